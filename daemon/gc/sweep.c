#include "daemon/gc/sweep.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int gc_submit(struct shared_root *r, struct shared_task *t,
              void (*released_cb)(struct shared_task *t))
{
    t->class = SHARED_BACKGROUND;
    t->deadline_ms = uv_now(r->config.loop) + GC_DEADLINE_MS;
    t->released_cb = released_cb;
    return shared_root_submit(r, t);
}

static void sweep_go(struct gc_sweep *s);
static void sweep_list(struct gc_sweep *s);

static uint64_t now_of(const struct gc_sweep *s)
{
    return uv_now(s->root->config.loop);
}

static const struct shared_file *file_of(const struct gc_removal *rm)
{
    return &rm->sweep->listing.files[rm->file];
}

static void sweep_end(struct gc_sweep *s)
{
    deadline_disarm(s->root->config.deadlines, &s->pause);
    shared_listing_free(&s->listing);
    s->active = false;
    s->ops->done_cb(s, s->stopped ? -ECANCELED : s->status);
}

/* It was stopped or has given up: it ends as soon as nothing is under way. */
static bool sweep_ending(const struct gc_sweep *s)
{
    return s->stopped || s->given_up;
}

static void pause_cb(struct deadline *d)
{
    struct gc_sweep *s = LIST_ENTRY(d, struct gc_sweep, pause);

    if (s->listed)
        sweep_go(s);
    else
        sweep_list(s);
}

static void sweep_pause(struct gc_sweep *s, uint64_t ms)
{
    if (!deadline_armed(&s->pause))
        deadline_arm(s->root->config.deadlines, &s->pause, now_of(s) + ms, pause_cb);
}

/* ---- listing ---- */

static void list_failed(struct gc_sweep *s, int status)
{
    if (status != -EAGAIN) {
        s->status = status;
        s->tries++;
    }
    if (s->tries == GC_TRIES) {
        s->tries = 0;
        s->bucket++;
        s->left_out++;
        s->given_up = ++s->unlisted == GC_UNLISTED || s->left_out == GC_LEFT_OUT;
    }
    if (sweep_ending(s))
        sweep_end(s);
    else
        sweep_pause(s, (uint64_t)GC_PAUSE_MS << s->tries);
}

static void listed_cb(struct shared_task *t)
{
    struct gc_sweep *s = LIST_ENTRY(t, struct gc_sweep, list);
    int status = t->status;

    s->listing = t->op.listing; /* after a stop too: sweep_end frees it */
    if (s->stopped) {
        sweep_end(s);
    } else if (status < 0 && status != -ENOENT) {
        list_failed(s, status);
    } else {
        s->listed = true;
        s->tries = s->unlisted = 0;
        s->at = 0;
        s->ops->listed_cb(s, &s->listing);
        sweep_go(s);
    }
}

static void sweep_list(struct gc_sweep *s)
{
    int err;

    shared_listing_free(&s->listing);
    s->listed = false;
    if (s->bucket == BLOCK_FILE_BUCKETS) {
        sweep_end(s);
        return;
    }
    memset(&s->list, 0, sizeof(s->list));
    s->list.op.verb = SHARED_LIST;
    s->list.op.bucket = (uint8_t)s->bucket;
    err = gc_submit(s->root, &s->list, listed_cb);
    if (err < 0)
        list_failed(s, err);
}

/* ---- one file ---- */

static void copy_end(struct gc_removal *rm)
{
    if (!rm->copy)
        return;
    free(rm->copy);
    rm->copy = NULL;
    rm->sweep->copy_bytes -= file_of(rm)->bytes;
}

/* The file is gone, or stays. */
static void removal_end(struct gc_removal *rm, int status)
{
    struct gc_sweep *s = rm->sweep;

    copy_end(rm);
    rm->state = GC_FREE;
    s->busy--;
    if (status == -ENOENT || status == -ESTALE)
        status = 0;
    if (status < 0 && !sweep_ending(s))
        s->status = status;
    s->failures = status < 0 ? s->failures + 1 : 0;
    if (s->failures == GC_FAILURES)
        s->given_up = true;
    s->ops->removed_cb(s, file_of(rm), status);
}

static struct shared_root *removal_root(const struct gc_removal *rm)
{
    bool next = rm->verb == SHARED_FIND || rm->verb == SHARED_WRITE;

    return next ? rm->sweep->next : rm->sweep->root;
}

static void removal_released_cb(struct shared_task *t);

/* The copy says that it is whose the read found it to be. */
static int removal_submit(struct gc_removal *rm)
{
    struct gc_sweep *s = rm->sweep;
    struct shared_task t = {.op = {.verb = rm->verb,
                                   .by_name = true,
                                   .sync = rm->verb == SHARED_WRITE && s->sync,
                                   .bucket = (uint8_t)s->bucket,
                                   .data = rm->copy}};

    if (rm->copy)
        t.op.bytes = file_of(rm)->bytes - BLOCK_FILE_HEADER_BYTES;
    memcpy(t.op.identity, rm->task.op.identity, sizeof(t.op.identity));
    t.op.copy_encrypted = rm->task.op.copy_encrypted;
    snprintf(t.op.name, sizeof(t.op.name), "%s", file_of(rm)->name);
    rm->task = t;
    rm->state = GC_BUSY;
    return gc_submit(removal_root(rm), &rm->task, removal_released_cb);
}

static void removal_go(struct gc_removal *rm)
{
    struct gc_sweep *s = rm->sweep;
    int err = removal_submit(rm);

    if (err == 0)
        return;
    if (err == -EAGAIN && !s->stopped &&
        (rm->verb == SHARED_REMOVE || rm->tries++ < GC_COPY_TRIES)) {
        rm->state = GC_WAITS;
        sweep_pause(s, GC_WAIT_MS);
    } else if (rm->verb != SHARED_REMOVE && !s->stopped) {
        copy_end(rm);
        rm->verb = SHARED_REMOVE;
        removal_go(rm);
    } else { /* the others would be refused as well */
        removal_end(rm, err);
        s->given_up = true;
    }
}

/* What follows an operation of a copy. Only what the next root lacks is read. */
static enum shared_verb removal_next(const struct gc_removal *rm, int status)
{
    if (rm->verb == SHARED_FIND && shared_status_missing(status))
        return SHARED_READ;
    return rm->verb == SHARED_READ && status == 0 ? SHARED_WRITE : SHARED_REMOVE;
}

static void removal_released_cb(struct shared_task *t)
{
    struct gc_removal *rm = LIST_ENTRY(t, struct gc_removal, task);
    struct gc_sweep *s = rm->sweep;
    int status = t->status;

    if (rm->verb == SHARED_WRITE && status == 0)
        s->root->config.metrics->shared_gc_demoted++;
    if (rm->verb == SHARED_WRITE && shared_status_full(status))
        shared_root_full(s->next); /* it may have no other writer */
    if (rm->verb == SHARED_REMOVE || sweep_ending(s)) {
        removal_end(rm, rm->verb == SHARED_REMOVE ? status : -ECANCELED);
    } else {
        rm->verb = removal_next(rm, status);
        rm->tries = 0;
        if (rm->verb == SHARED_REMOVE)
            copy_end(rm);
        removal_go(rm);
    }
    sweep_go(s);
}

static bool copy_wanted(const struct gc_removal *rm)
{
    const struct gc_sweep *s = rm->sweep;
    uint64_t bytes = file_of(rm)->bytes;

    return s->next && bytes > BLOCK_FILE_HEADER_BYTES && bytes <= GC_COPY_BYTES &&
           block_file_name_valid(file_of(rm)->name) && shared_root_takes_writes(s->next);
}

/* Memory for the copy, when bound and pace allow it. 0, -EAGAIN, -ENOMEM. */
static int copy_begin(struct gc_removal *rm)
{
    struct gc_sweep *s = rm->sweep;
    uint64_t bytes = file_of(rm)->bytes, now_ms = now_of(s);

    if (s->copy_bytes + bytes > GC_COPY_BYTES || s->copy_free_ms > now_ms + GC_WAIT_MS)
        return -EAGAIN;
    rm->copy = malloc(bytes - BLOCK_FILE_HEADER_BYTES);
    if (!rm->copy)
        return -ENOMEM;
    s->copy_bytes += bytes;
    if (s->copy_free_ms < now_ms)
        s->copy_free_ms = now_ms;
    s->copy_free_ms += bytes / GC_COPY_BYTES_PER_MS;
    return 0;
}

static void removal_begin(struct gc_removal *rm)
{
    int err = copy_wanted(rm) ? copy_begin(rm) : -ENOENT;

    rm->tries = 0;
    rm->verb = err == 0 || err == -EAGAIN ? SHARED_FIND : SHARED_REMOVE;
    if (err == -EAGAIN) {
        rm->state = GC_WAITS;
        sweep_pause(rm->sweep, GC_WAIT_MS);
    } else {
        removal_go(rm);
    }
}

/* ---- a bucket's files ---- */

static void waiting_go(struct gc_sweep *s)
{
    for (unsigned i = 0; i < GC_REMOVALS && !deadline_armed(&s->pause); i++) {
        struct gc_removal *rm = &s->removals[i];

        if (rm->state != GC_WAITS)
            continue;
        if (sweep_ending(s))
            removal_end(rm, -ECANCELED);
        else if (rm->verb == SHARED_FIND && !rm->copy)
            removal_begin(rm);
        else
            removal_go(rm);
    }
}

static struct gc_removal *removal_free(struct gc_sweep *s)
{
    for (unsigned i = 0; i < GC_REMOVALS; i++)
        if (s->removals[i].state == GC_FREE)
            return &s->removals[i];
    return NULL;
}

/* Asks about files until GC_REMOVALS are under way, the bucket is done, or GC_STEP were asked
 * about. */
static void files_go(struct gc_sweep *s)
{
    for (unsigned i = 0; s->at < s->listing.n; i++) {
        struct gc_removal *rm = removal_free(s);

        if (!rm || deadline_armed(&s->pause) || sweep_ending(s))
            return;
        if (i == GC_STEP) {
            sweep_pause(s, 0);
            return;
        }
        rm->file = s->at++;
        if (!s->ops->wanted_cb(s, file_of(rm)))
            continue;
        s->busy++;
        removal_begin(rm);
    }
}

static void sweep_go(struct gc_sweep *s)
{
    if (sweep_ending(s))
        deadline_disarm(s->root->config.deadlines, &s->pause);
    waiting_go(s);
    files_go(s);
    if (s->busy > 0 || (deadline_armed(&s->pause) && !sweep_ending(s)))
        return;
    if (sweep_ending(s)) {
        sweep_end(s);
        return;
    }
    s->bucket++;
    sweep_list(s);
}

void gc_sweep_init(struct gc_sweep *s, struct shared_root *root, struct shared_root *next,
                   bool sync, const struct gc_sweep_ops *ops)
{
    memset(s, 0, sizeof(*s));
    s->root = root;
    s->next = next;
    s->sync = sync;
    s->ops = ops;
    for (unsigned i = 0; i < GC_REMOVALS; i++)
        s->removals[i].sweep = s;
}

void gc_sweep_start(struct gc_sweep *s)
{
    s->active = true;
    s->listed = s->stopped = s->given_up = false;
    s->bucket = s->tries = s->unlisted = s->left_out = s->failures = s->busy = 0;
    s->status = 0;
    sweep_pause(s, 0); /* done_cb must not run from inside */
}

void gc_sweep_stop(struct gc_sweep *s)
{
    if (!s->active || s->stopped)
        return;
    s->stopped = true;
    if (s->list.state != SHARED_TASK_NONE && !shared_root_cancel(s->root, &s->list))
        return;
    for (unsigned i = 0; i < GC_REMOVALS; i++) {
        struct gc_removal *rm = &s->removals[i];

        if (rm->state == GC_BUSY && shared_root_cancel(removal_root(rm), &rm->task))
            removal_end(rm, -ECANCELED);
    }
    sweep_go(s);
}
