/* Reads and writes of parts, and what they entail: damaged files are removed, old ones touched. */
#include "daemon/shared/shared_internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define TOUCHES_WAIT 128u /* at a root, in a queue that others need, too */

/* One read or write of a part: one root after the other until one succeeds, within one deadline. */
struct part_io {
    struct shared_task task;
    struct shared *shared;
    struct shared_io *io;
    uint8_t roots[UCM_MAX_ROOTS]; /* in the order in which they are asked */
    uint32_t n, at;
    uint64_t deadline_ms;
    uint64_t removed;                    /* shared.removed when it began */
    int status;                          /* the worst so far */
    struct shared_encryption encryption; /* of io->encrypted */
    struct list link;                    /* in shared.encrypted */
};

/* ---- background operations ---- */

struct background {
    struct shared_task task;
    struct shared *shared;
    uint32_t root;
};

static void background_released_cb(struct shared_task *t)
{
    struct background *e = LIST_ENTRY(t, struct background, task);

    /* A file that could not be removed blocks the writes of its part: do not call it missing. */
    if (t->op.verb == SHARED_REMOVE && (t->status == 0 || t->status == -ENOENT))
        shared_remember(e->shared, &t->op.id, e->root, false, e->shared->settings.negative_ms);
    free(e);
}

int shared_submit_background(struct shared *s, uint32_t root, enum shared_verb verb,
                             const struct block_file_id *id, uint64_t bytes)
{
    struct background *e = calloc(1, sizeof(*e));
    int err;

    if (!e)
        return -ENOMEM;
    e->shared = s;
    e->root = root;

    e->task.op.verb = verb;
    e->task.op.id = *id;
    e->task.op.bytes = bytes;
    e->task.class = SHARED_BACKGROUND;
    e->task.deadline_ms = shared_now(s) + s->settings.timeout_ms;
    e->task.released_cb = background_released_cb;
    err = shared_root_submit(s->roots[root], &e->task);
    if (err < 0)
        free(e);
    return err;
}

/* What a file's length is without its first header, also of an operation that knows of no
 * encryption. */
static uint64_t behind_header(const struct shared_op *op)
{
    return shared_op_file_bytes(op) - BLOCK_FILE_HEADER_BYTES;
}

/* Touches the file that was read when its time is older than shared.touch. */
static void touch_if_old(struct shared *s, uint32_t root, const struct shared_task *t)
{
    uint64_t now_ns;

    if (t->op.mtime_ns == 0 || s->roots[root]->config.read_only || s->stopped ||
        s->roots[root]->queued[SHARED_BACKGROUND] >= TOUCHES_WAIT ||
        shared_root_time(s->roots[root], &now_ns) < 0)
        return;
    if (now_ns > t->op.mtime_ns && now_ns - t->op.mtime_ns > s->settings.touch_ms * 1000000u)
        (void)shared_submit_background(s, root, SHARED_TOUCH, &t->op.id,
                                       behind_header(&t->op)); /* else its next reader */
}

/* Removes the file. A good one that another host put there meanwhile is lost: a miss. */
static void damaged_remove(struct shared *s, uint32_t root, const struct shared_task *t)
{
    s->settings.metrics->shared_damaged++;
    log_warn("shared", "damaged-file", "root=%s bucket=%02x file=%s", s->roots[root]->shown,
             t->op.bucket, t->op.name);
    shared_remember(s, &t->op.id, root, false, SHARED_DAMAGED_MS);
    (void)shared_submit_background(s, root, SHARED_REMOVE, &t->op.id, behind_header(&t->op));
}

/* ---- parts ---- */

static void part_io_released_cb(struct shared_task *t);

static uint32_t root_of(const struct part_io *m)
{
    return m->roots[m->at];
}

/* A root that hangs leaves half of the remaining time to those after it. */
static uint64_t turn_until_ms(const struct part_io *m)
{
    bool last = m->io->write || m->at + 1 == m->n;

    return last ? m->deadline_ms : m->deadline_ms - (m->deadline_ms - shared_now(m->shared)) / 2;
}

/* Submits to the present root, or to one after it. 0, or -errno of the last one. */
static int part_io_begin(struct part_io *m)
{
    int err = m->status;

    for (; m->at < m->n && shared_now(m->shared) < m->deadline_ms; m->at++) {
        m->task.deadline_ms = turn_until_ms(m);
        err = shared_root_submit(m->shared->roots[root_of(m)], &m->task);
        if (err == 0 || err == -EAGAIN)
            break;
    }
    return err;
}

static void part_io_free(struct part_io *m)
{
    m->io->op = NULL;
    shared_encryption_end(&m->encryption);
    free(m);
}

/* Others were refused while encrypted parts took all the memory there is for them. */
static void encrypted_ready(struct shared *s)
{
    bool full = s->encryption_full;

    s->encryption_full = false;
    if (full && s->ready_cb)
        s->ready_cb(s->ready_ctx);
}

static void part_io_end(struct part_io *m, int status)
{
    struct shared_io *io = m->io;
    struct shared *s = m->shared;

    io->got = m->task.got;
    part_io_free(m);
    io->done_cb(io, status);
    encrypted_ready(s);
}

static void read_answered(struct part_io *m, int status)
{
    struct shared *s = m->shared;
    uint32_t root = root_of(m);
    int err;

    if (status == 0) {
        shared_remember_found(s, &m->io->id, root, m->removed);
        m->io->root = (shared_root_id)(root + 1);
        touch_if_old(s, root, &m->task);
        part_io_end(m, 0);
        return;
    }
    if (status == -EBADMSG)
        damaged_remove(s, root, &m->task);
    else if (status == -ENOKEY) /* another host's, or of a key that is gone: not ours to remove */
        shared_remember(s, &m->io->id, root, false, SHARED_NO_KEY_MS);
    else if (shared_status_missing(status))
        shared_remember(s, &m->io->id, root, false, s->settings.negative_ms);
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
    struct shared *s = m->shared;
    uint32_t root = root_of(m);

    if (status == -EEXIST)
        status = 0;
    if (status == 0) {
        shared_remember(s, &m->io->id, root, true, SHARED_FOUND_MS);
        m->io->root = (shared_root_id)(root + 1);
        shared_tenant_note(s, m->io);
    } else if (shared_status_full(status)) {
        shared_root_full(s->roots[root]);
    }
    part_io_end(m, status);
}

static void part_io_released_cb(struct shared_task *t)
{
    struct part_io *m = LIST_ENTRY(t, struct part_io, task);

    if (m->io->write) {
        write_answered(m, t->status);
    } else if (t->status == 0 && m->io->encrypted) {
        (void)shared_encryption_begin(&m->encryption); /* of a read: it always begins */
    } else {
        read_answered(m, t->status);
    }
}

/* ---- encrypted parts ---- */

/* A root's queue may be full: the part waits until one says that it is not, or its deadline has
 * passed. */
static void encrypted_write(struct part_io *m)
{
    int err = m->shared->stopped ? -ECANCELED : part_io_begin(m);

    if (err == -EAGAIN) {
        m->shared->encrypting++;
        list_push_back(&m->shared->encrypted, &m->link);
    } else if (err < 0) {
        part_io_end(m, err == -ENOENT ? -ETIMEDOUT : err);
    }
}

void shared_encrypted_go_on(struct shared *s)
{
    struct list waiting, *node;

    list_init(&waiting);
    list_splice_front(&waiting, &s->encrypted);
    while ((node = list_pop_front(&waiting)) != NULL) {
        s->encrypting--;
        encrypted_write(LIST_ENTRY(node, struct part_io, link));
    }
}

static void encrypted_cb(struct shared_encryption *x, int status)
{
    struct part_io *m = LIST_ENTRY(x, struct part_io, encryption);

    if (!m->io->write) {
        shared_encryption_end(x);
        read_answered(m, status);
    } else if (status < 0) {
        part_io_end(m, status);
    } else {
        m->task.op.data = x->cipher;
        encrypted_write(m);
    }
}

static uint32_t read_roots(struct shared *s, const struct shared_io *io, uint8_t out[UCM_MAX_ROOTS])
{
    shared_roots_mask up = shared_roots_up(s), holders = shared_roots_that_may_have(s, &io->id, up);
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

static int refusal(const struct shared_io *io, int err)
{
    if (err == -EAGAIN || err == -ENOMEM || err == -ENOKEY)
        return err;
    return io->write ? -EROFS : -ENOENT;
}

/* The secret of this moment: the part's name derives from it, too. */
static int secret_take(struct shared_encryption *x)
{
    const uint8_t *secret;
    int rc = shared_secret(x->shared, x->io->space.fingerprint, &secret);

    x->space = x->io->space;
    if (rc < 0 || !secret)
        return rc < 0 && !x->io->write ? -ENOENT : rc;
    memcpy(x->secret, secret, sizeof(x->secret));
    x->space.salt = x->secret;
    x->space.salt_bytes = sizeof(x->secret);
    return 0;
}

int shared_submit(struct shared *s, struct shared_io *io)
{
    struct part_io *m = calloc(1, sizeof(*m));
    int err;

    if (!m)
        return -ENOMEM;
    m->shared = s;
    m->io = io;
    m->removed = s->removed;
    m->status = -ENOENT;
    m->n = io->write ? shared_write_roots(s, &io->id, m->roots) : read_roots(s, io, m->roots);

    m->task.class = io->write ? SHARED_STORE : SHARED_LOAD;
    m->task.who = io->who;
    m->deadline_ms = shared_now(s) + s->settings.timeout_ms;
    m->task.released_cb = part_io_released_cb;
    m->task.op = (struct shared_op){.verb = io->write ? SHARED_WRITE : SHARED_READ,
                                    .id = io->id,
                                    .data = io->data,
                                    .bytes = io->bytes,
                                    .encrypted = io->encrypted,
                                    .sync = io->write && s->settings.sync};
    m->encryption =
        (struct shared_encryption){.shared = s,
                                   .io = io,
                                   .encryption = m->task.op.header + BLOCK_FILE_HEADER_BYTES,
                                   .done_cb = encrypted_cb};
    err = io->encrypted ? secret_take(&m->encryption) : 0;
    if (err < 0) {
        s->encryption_full |= io->write && err == -EAGAIN;
        s->settings.metrics->encryption_key_missing += err != -EAGAIN;
    } else if (io->write && io->encrypted)
        err = m->n > 0 ? shared_encryption_begin(&m->encryption) : -EROFS;
    else
        err = part_io_begin(m);
    if (err < 0) {
        free(m);
        return refusal(io, err);
    }
    io->op = m;
    return 0;
}
