#include "daemon/share/gc_demote.h"

#include "daemon/share/gc.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void copy_write(struct gc_copy *c);

static void copy_end(struct gc_copy *c)
{
    struct gc_demote *d = c->demote;

    deadline_disarm(d->sweep->root->config.deadlines, &c->retry);
    free(c->data);
    c->data = NULL;
    d->memory_bytes -= c->bytes;
    c->active = false;
    gc_sweep_resume(d->sweep, (unsigned)(c - d->copies));
}

static void written_cb(struct share_task *t)
{
    struct gc_copy *c = LIST_ENTRY(t, struct gc_copy, task);

    c->under_way = false;
    if (t->status == 0)
        c->demote->files++;
    if ((t->status == -ENOSPC || t->status == -EDQUOT) && c->demote->to->gc)
        gc_full(c->demote->to->gc); /* it may have no other writer */
    copy_end(c);
}

static void retry_cb(struct deadline *retry)
{
    copy_write(LIST_ENTRY(retry, struct gc_copy, retry));
}

/* 0 when the operation is under way. Whose file the read found it to be is written again. */
static int copy_start(struct gc_copy *c, struct share_root *root, enum share_verb verb,
                      void (*released_cb)(struct share_task *t))
{
    struct share_task t = {.op = {.verb = verb,
                                  .by_name = true,
                                  .sync = verb == SHARE_WRITE && c->demote->sync,
                                  .bucket = (uint8_t)c->demote->sweep->bucket,
                                  .data = c->data,
                                  .bytes = c->bytes - BLOCK_FILE_HEADER_BYTES}};
    int err;

    memcpy(t.op.identity, c->task.op.identity, sizeof(t.op.identity));
    memcpy(t.op.name, c->task.op.name, sizeof(t.op.name));
    c->task = t;
    c->under_way = true;
    err = gc_submit(root, &c->task, released_cb);
    if (err < 0)
        c->under_way = false;
    return err;
}

static void copy_write(struct gc_copy *c)
{
    struct gc_sweep *s = c->demote->sweep;
    int err = copy_start(c, c->demote->to, SHARE_WRITE, written_cb);

    if (err == -EAGAIN && ++c->tries < GC_COPY_TRIES)
        err = deadline_arm(s->root->config.deadlines, &c->retry,
                           uv_now(s->root->config.loop) + GC_PAUSE_MS / 5, retry_cb);
    if (err < 0)
        copy_end(c);
}

static void read_cb(struct share_task *t)
{
    struct gc_copy *c = LIST_ENTRY(t, struct gc_copy, task);

    c->under_way = false;
    if (t->status < 0 || c->demote->stopped)
        copy_end(c);
    else
        copy_write(c);
}

/* Only what is not there is worth the reading. */
static void found_cb(struct share_task *t)
{
    struct gc_copy *c = LIST_ENTRY(t, struct gc_copy, task);
    bool missing = t->status == -ENOENT || t->status == -ESTALE || t->status == -EBADMSG;

    c->under_way = false;
    if (!missing || c->demote->stopped ||
        copy_start(c, c->demote->sweep->root, SHARE_READ, read_cb) < 0)
        copy_end(c);
}

/* So many bytes now, or later? */
static bool room_for(const struct gc_demote *d, uint64_t bytes)
{
    return d->memory_bytes + bytes <= GC_COPY_BYTES &&
           d->free_at_ms <= uv_now(d->sweep->root->config.loop) + GC_PAUSE_MS / 5;
}

static void room_take(struct gc_demote *d, uint64_t bytes)
{
    uint64_t now_ms = uv_now(d->sweep->root->config.loop);

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
    if (!share_root_takes_writes(d->to))
        return -EROFS; /* known before it is read */
    if (!room_for(d, file->bytes))
        return -EAGAIN;
    memset(&c->task, 0, sizeof(c->task));
    c->bytes = file->bytes;
    c->tries = 0;
    c->data = malloc(file->bytes - BLOCK_FILE_HEADER_BYTES);
    if (!c->data)
        return -ENOMEM;
    snprintf(c->task.op.name, sizeof(c->task.op.name), "%s", name);
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

void gc_demote_init(struct gc_demote *d, struct gc_sweep *sweep, struct share_root *to, bool sync)
{
    memset(d, 0, sizeof(*d));
    d->sync = sync;
    d->sweep = sweep;
    d->to = to;
    for (unsigned i = 0; i < GC_REMOVALS; i++)
        d->copies[i].demote = d;
}

static struct share_root *copy_root(const struct gc_copy *c)
{
    return c->task.op.verb == SHARE_READ ? c->demote->sweep->root : c->demote->to;
}

void gc_demote_stop(struct gc_demote *d)
{
    d->stopped = true;
    for (unsigned i = 0; i < GC_REMOVALS; i++) {
        struct gc_copy *c = &d->copies[i];

        if (!c->active)
            continue;
        if (c->under_way && !share_root_cancel(copy_root(c), &c->task))
            continue;
        c->under_way = false;
        copy_end(c);
    }
}
