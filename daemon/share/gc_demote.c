#include "daemon/share/gc_demote.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void copy_write(struct gc_copy *c);

static void copy_end(struct gc_copy *c)
{
    struct gc_demote *d = c->demote;

    deadline_disarm(d->sweep->deadlines, &c->retry);
    free(c->data);
    c->data = NULL;
    d->memory_bytes -= c->bytes;
    c->active = false;
    gc_sweep_resume(d->sweep, (unsigned)(c - d->copies));
}

static void written_cb(struct share_op *op, int status)
{
    struct gc_copy *c = LIST_ENTRY(op, struct gc_copy, op);

    c->under_way = false;
    if (status == 0)
        c->demote->files++;
    copy_end(c);
}

static void retry_cb(struct deadline *retry)
{
    copy_write(LIST_ENTRY(retry, struct gc_copy, retry));
}

/* 0 when the operation is under way. What the read found in the header is written again. */
static int copy_start(struct gc_copy *c, struct gc_root *root, enum share_verb verb,
                      void (*done)(struct share_op *op, int status))
{
    struct share_op op = {.verb = verb,
                          .by_name = true,
                          .bucket = (uint8_t)c->demote->sweep->bucket,
                          .file = c->op.file,
                          .data = c->data,
                          .bytes = c->bytes - BLOCK_FILE_HEADER_BYTES,
                          .done = done};
    int err;

    memcpy(op.name, c->op.name, sizeof(op.name));
    c->op = op;
    c->under_way = true;
    err = root->start(root, &c->op);
    if (err < 0)
        c->under_way = false;
    return err;
}

static void copy_write(struct gc_copy *c)
{
    struct gc_sweep *s = c->demote->sweep;
    int err = copy_start(c, c->demote->to, SHARE_WRITE, written_cb);

    if (err == -EAGAIN && ++c->tries < GC_COPY_TRIES)
        err = deadline_arm(s->deadlines, &c->retry, uv_now(s->loop) + GC_PAUSE_MS / 5, retry_cb);
    if (err < 0)
        copy_end(c);
}

static void read_cb(struct share_op *op, int status)
{
    struct gc_copy *c = LIST_ENTRY(op, struct gc_copy, op);

    c->under_way = false;
    if (status < 0 || c->demote->stopped)
        copy_end(c);
    else
        copy_write(c);
}

/* Only what is not there is worth the reading. */
static void found_cb(struct share_op *op, int status)
{
    struct gc_copy *c = LIST_ENTRY(op, struct gc_copy, op);
    bool missing = status == -ENOENT || status == -ESTALE || status == -EBADMSG;

    c->under_way = false;
    if (!missing || c->demote->stopped ||
        copy_start(c, c->demote->sweep->root, SHARE_READ, read_cb) < 0)
        copy_end(c);
}

/* So many bytes now, or later? */
static bool room_for(const struct gc_demote *d, uint64_t bytes)
{
    return d->memory_bytes + bytes <= GC_COPY_BYTES &&
           d->free_at_ms <= uv_now(d->sweep->loop) + GC_PAUSE_MS / 5;
}

static void room_take(struct gc_demote *d, uint64_t bytes)
{
    uint64_t now_ms = uv_now(d->sweep->loop);

    d->memory_bytes += bytes;
    if (d->free_at_ms < now_ms)
        d->free_at_ms = now_ms;
    d->free_at_ms += bytes / GC_COPY_BYTES_PER_MS;
}

int gc_demote_begin(struct gc_demote *d, unsigned slot, const struct share_file *file,
                    const char *name)
{
    struct gc_copy *c = &d->copies[slot];
    int err;

    if (file->bytes <= BLOCK_FILE_HEADER_BYTES || file->bytes > GC_COPY_BYTES)
        return -EFBIG;
    if (!room_for(d, file->bytes))
        return -EAGAIN;
    memset(&c->op, 0, sizeof(c->op));
    c->bytes = file->bytes;
    c->tries = 0;
    c->data = malloc(file->bytes - BLOCK_FILE_HEADER_BYTES);
    if (!c->data)
        return -ENOMEM;
    snprintf(c->op.name, sizeof(c->op.name), "%s", name);
    err = copy_start(c, d->to, SHARE_FIND, found_cb);
    if (err < 0) {
        free(c->data);
        c->data = NULL;
        return err;
    }
    c->active = true;
    room_take(d, c->bytes);
    return 0;
}

void gc_demote_init(struct gc_demote *d, struct gc_sweep *sweep, struct gc_root *to)
{
    memset(d, 0, sizeof(*d));
    d->sweep = sweep;
    d->to = to;
    for (unsigned i = 0; i < GC_REMOVALS; i++)
        d->copies[i].demote = d;
}

static struct gc_root *copy_root(const struct gc_copy *c)
{
    return c->op.verb == SHARE_READ ? c->demote->sweep->root : c->demote->to;
}

void gc_demote_stop(struct gc_demote *d)
{
    d->stopped = true;
    for (unsigned i = 0; i < GC_REMOVALS; i++) {
        struct gc_copy *c = &d->copies[i];

        if (!c->active)
            continue;
        if (c->under_way && !copy_root(c)->cancel(copy_root(c), &c->op))
            continue;
        c->under_way = false;
        copy_end(c);
    }
}
