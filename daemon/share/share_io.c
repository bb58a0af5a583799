/* Reads and writes of parts, and what they entail: damaged files are removed, old ones touched. */
#include "daemon/share/share_internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define TOUCHES_WAIT 128u /* at a root, in a queue that others need, too */

/* One read or write of a part: one root after the other until one succeeds, within one deadline. */
struct part_io {
    struct share_task task;
    struct share *share;
    struct share_io *io;
    uint8_t roots[UCM_MAX_ROOTS]; /* in the order in which they are asked */
    uint32_t n, at;
    uint64_t deadline_ms;
    uint64_t removed;                   /* share.removed when it began */
    int status;                         /* the worst so far */
    struct share_encryption encryption; /* of io->encrypted */
    struct list link;                   /* in share.encrypted */
};

/* ---- background operations ---- */

struct background {
    struct share_task task;
    struct share *share;
    uint32_t root;
};

static void background_released_cb(struct share_task *t)
{
    struct background *e = LIST_ENTRY(t, struct background, task);

    /* A file that could not be removed blocks the writes of its part: do not call it missing. */
    if (t->op.verb == SHARE_REMOVE && (t->status == 0 || t->status == -ENOENT))
        share_remember(e->share, &t->op.id, e->root, false, e->share->settings.negative_ms);
    free(e);
}

int share_submit_background(struct share *s, uint32_t root, enum share_verb verb,
                            const struct block_file_id *id, uint64_t bytes)
{
    struct background *e = calloc(1, sizeof(*e));
    int err;

    if (!e)
        return -ENOMEM;
    e->share = s;
    e->root = root;

    e->task.op.verb = verb;
    e->task.op.id = *id;
    e->task.op.bytes = bytes;
    e->task.class = SHARE_BACKGROUND;
    e->task.deadline_ms = share_now(s) + s->settings.deadline_ms;
    e->task.released_cb = background_released_cb;
    err = share_root_submit(s->roots[root], &e->task);
    if (err < 0)
        free(e);
    return err;
}

/* What a file's length is without its first header, also of an operation that knows of no
 * encryption. */
static uint64_t behind_header(const struct share_op *op)
{
    return share_op_file_bytes(op) - BLOCK_FILE_HEADER_BYTES;
}

/* Touches the file that was read when its time is older than share.touch. */
static void touch_if_old(struct share *s, uint32_t root, const struct share_task *t)
{
    uint64_t now_ns;

    if (t->op.mtime_ns == 0 || s->roots[root]->config.read_only || s->stopped ||
        s->roots[root]->queued[SHARE_BACKGROUND] >= TOUCHES_WAIT ||
        share_root_time(s->roots[root], &now_ns) < 0)
        return;
    if (now_ns > t->op.mtime_ns && now_ns - t->op.mtime_ns > s->settings.touch_ms * 1000000u)
        (void)share_submit_background(s, root, SHARE_TOUCH, &t->op.id,
                                      behind_header(&t->op)); /* else its next reader */
}

/* Removes the file. A good one that another host put there meanwhile is lost: a miss. */
static void damaged_remove(struct share *s, uint32_t root, const struct share_task *t)
{
    s->settings.metrics->share_damaged++;
    log_warn("share", "damaged-file", "root=%s bucket=%02x file=%s", s->roots[root]->shown,
             t->op.bucket, t->op.name);
    share_remember(s, &t->op.id, root, false, SHARE_DAMAGED_MS);
    (void)share_submit_background(s, root, SHARE_REMOVE, &t->op.id, behind_header(&t->op));
}

/* ---- parts ---- */

static void part_io_released_cb(struct share_task *t);

static uint32_t root_of(const struct part_io *m)
{
    return m->roots[m->at];
}

/* A root that hangs leaves half of the remaining time to those after it. */
static uint64_t turn_until_ms(const struct part_io *m)
{
    bool last = m->io->write || m->at + 1 == m->n;

    return last ? m->deadline_ms : m->deadline_ms - (m->deadline_ms - share_now(m->share)) / 2;
}

/* Submits to the present root, or to one after it. 0, or -errno of the last one. */
static int part_io_begin(struct part_io *m)
{
    int err = m->status;

    for (; m->at < m->n && share_now(m->share) < m->deadline_ms; m->at++) {
        m->task.deadline_ms = turn_until_ms(m);
        err = share_root_submit(m->share->roots[root_of(m)], &m->task);
        if (err == 0 || err == -EAGAIN)
            break;
    }
    return err;
}

static void part_io_free(struct part_io *m)
{
    m->io->op = NULL;
    share_encryption_end(&m->encryption);
    free(m);
}

/* Others were refused while encrypted parts took all the memory there is for them. */
static void encrypted_ready(struct share *s)
{
    bool full = s->encryption_full;

    s->encryption_full = false;
    if (full && s->ready_cb)
        s->ready_cb(s->ready_ctx);
}

static void part_io_end(struct part_io *m, int status)
{
    struct share_io *io = m->io;
    struct share *s = m->share;

    io->got = m->task.got;
    part_io_free(m);
    io->done_cb(io, status);
    encrypted_ready(s);
}

static void read_answered(struct part_io *m, int status)
{
    struct share *s = m->share;
    uint32_t root = root_of(m);
    int err;

    if (status == 0) {
        share_remember_found(s, &m->io->id, root, m->removed);
        m->io->root = (share_root_id)(root + 1);
        touch_if_old(s, root, &m->task);
        part_io_end(m, 0);
        return;
    }
    if (status == -EBADMSG)
        damaged_remove(s, root, &m->task);
    else if (status == -ENOKEY) /* another host's, or of a key that is gone: not ours to remove */
        share_remember(s, &m->io->id, root, false, SHARE_NO_KEY_MS);
    else if (share_status_missing(status))
        share_remember(s, &m->io->id, root, false, s->settings.negative_ms);
    else
        m->status = status;
    m->at++;
    err = part_io_begin(m);
    if (err == -EAGAIN)
        m->status = -EBUSY; /* that root may have the part */
    if (err < 0)
        part_io_end(m, m->status);
}

static void write_answered(struct part_io *m, int status)
{
    struct share *s = m->share;
    uint32_t root = root_of(m);

    if (status == -EEXIST)
        status = 0;
    if (status == 0) {
        share_remember(s, &m->io->id, root, true, SHARE_FOUND_MS);
        m->io->root = (share_root_id)(root + 1);
        share_tenant_note(s, m->io);
    } else if (share_status_full(status)) {
        share_root_full(s->roots[root]);
    }
    part_io_end(m, status);
}

static void part_io_released_cb(struct share_task *t)
{
    struct part_io *m = LIST_ENTRY(t, struct part_io, task);

    if (m->io->write) {
        write_answered(m, t->status);
    } else if (t->status == 0 && m->io->encrypted) {
        (void)share_encryption_begin(&m->encryption); /* of a read: it always begins */
    } else {
        read_answered(m, t->status);
    }
}

/* ---- encrypted parts ---- */

/* A root's queue may be full: the part waits until one says that it is not, or its deadline has
 * passed. */
static void encrypted_write(struct part_io *m)
{
    int err = m->share->stopped ? -ECANCELED : part_io_begin(m);

    if (err == -EAGAIN) {
        m->share->encrypting++;
        list_push_back(&m->share->encrypted, &m->link);
    } else if (err < 0) {
        part_io_end(m, err == -ENOENT ? -ETIMEDOUT : err);
    }
}

void share_encrypted_go_on(struct share *s)
{
    struct list waiting, *node;

    list_init(&waiting);
    list_splice_front(&waiting, &s->encrypted);
    while ((node = list_pop_front(&waiting)) != NULL) {
        s->encrypting--;
        encrypted_write(LIST_ENTRY(node, struct part_io, link));
    }
}

static void encrypted_cb(struct share_encryption *x, int status)
{
    struct part_io *m = LIST_ENTRY(x, struct part_io, encryption);

    if (!m->io->write) {
        share_encryption_end(x);
        read_answered(m, status);
    } else if (status < 0) {
        part_io_end(m, status);
    } else {
        m->task.op.data = x->cipher;
        encrypted_write(m);
    }
}

static uint32_t read_roots(struct share *s, const struct share_io *io, uint8_t out[UCM_MAX_ROOTS])
{
    share_roots_mask up = share_roots_up(s), holders = share_roots_that_may_have(s, &io->id, up);
    uint32_t n = 0;

    if (io->root > 0 && io->root <= s->n && (up >> (io->root - 1) & 1)) {
        out[n++] = (uint8_t)(io->root - 1);
        holders &= ~(1u << (io->root - 1));
    }
    for (uint32_t i = 0; i < s->n; i++)
        if (holders >> i & 1)
            out[n++] = (uint8_t)i;
    return n;
}

static int refusal(const struct share_io *io, int err)
{
    if (err == -EAGAIN || err == -ENOMEM || err == -ENOKEY)
        return err;
    return io->write ? -EROFS : -ENOENT;
}

/* The secret of this moment: the part's name derives from it, too. */
static int secret_take(struct share_encryption *x)
{
    const uint8_t *secret;
    int rc = share_secret(x->share, x->io->space.fingerprint, &secret);

    x->space = x->io->space;
    if (rc < 0 || !secret)
        return rc < 0 && !x->io->write ? -ENOENT : rc;
    memcpy(x->secret, secret, sizeof(x->secret));
    x->space.salt = x->secret;
    x->space.salt_bytes = sizeof(x->secret);
    return 0;
}

int share_submit(struct share *s, struct share_io *io)
{
    struct part_io *m = calloc(1, sizeof(*m));
    int err;

    if (!m)
        return -ENOMEM;
    m->share = s;
    m->io = io;
    m->removed = s->removed;
    m->status = -ENOENT;
    m->n = io->write ? share_write_roots(s, &io->id, m->roots) : read_roots(s, io, m->roots);

    m->task.class = io->write ? SHARE_STORE : SHARE_LOAD;
    m->task.who = io->who;
    m->deadline_ms = share_now(s) + s->settings.deadline_ms;
    m->task.released_cb = part_io_released_cb;
    m->task.op = (struct share_op){.verb = io->write ? SHARE_WRITE : SHARE_READ,
                                   .id = io->id,
                                   .data = io->data,
                                   .bytes = io->bytes,
                                   .encrypted = io->encrypted,
                                   .sync = io->write && s->settings.sync};
    m->encryption =
        (struct share_encryption){.share = s,
                                  .io = io,
                                  .encryption = m->task.op.header + BLOCK_FILE_HEADER_BYTES,
                                  .done_cb = encrypted_cb};
    err = io->encrypted ? secret_take(&m->encryption) : 0;
    if (err < 0) {
        s->encryption_full |= io->write && err == -EAGAIN;
        s->settings.metrics->encryption_key_missing += err != -EAGAIN;
    } else if (io->write && io->encrypted)
        err = m->n > 0 ? share_encryption_begin(&m->encryption) : -EROFS;
    else
        err = part_io_begin(m);
    if (err < 0) {
        free(m);
        return refusal(io, err);
    }
    io->op = m;
    return 0;
}
