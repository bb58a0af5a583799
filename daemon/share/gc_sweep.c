#include "daemon/share/gc_sweep.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int gc_submit(struct share_root *r, struct share_task *t, void (*released_cb)(struct share_task *t))
{
    t->class = SHARE_BACKGROUND;
    t->deadline_ms = uv_now(r->config.loop) + GC_DEADLINE_MS;
    t->done_cb = NULL;
    t->released_cb = released_cb;
    return share_root_submit(r, t);
}

static void sweep_go(struct gc_sweep *s);
static void sweep_list(struct gc_sweep *s);

static const struct share_file *slot_file(const struct gc_removal *slot)
{
    return &slot->sweep->listing.files[slot->file];
}

static const char *file_name(const struct gc_sweep *s, uint32_t file)
{
    return s->listing.names + s->listing.files[file].name;
}

static void sweep_end(struct gc_sweep *s)
{
    deadline_disarm(s->root->config.deadlines, &s->pause);
    share_listing_free(&s->listing);
    s->active = false;
    s->ops->done_cb(s, s->stopped ? -ECANCELED : s->status);
}

/* It has failed, or is to stop: what is under way ends first. */
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
    if (deadline_armed(&s->pause))
        return;
    if (deadline_arm(s->root->config.deadlines, &s->pause, uv_now(s->root->config.loop) + ms,
                     pause_cb) < 0) {
        s->status = -ENOMEM;
        s->given_up = true;
    }
}

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
    if (!sweep_ending(s))
        sweep_pause(s, (uint64_t)GC_PAUSE_MS << s->tries);
    if (sweep_ending(s))
        sweep_end(s);
}

static void listed_cb(struct share_task *t)
{
    struct gc_sweep *s = LIST_ENTRY(t, struct gc_sweep, list);
    int status = t->status;

    s->listing_under_way = false;
    s->listing = t->op.listing; /* of one that was too late, too: it is freed with the others */
    if (s->stopped)
        sweep_end(s);
    else if (status < 0 && status != -ENOENT)
        list_failed(s, status);
    else {
        s->listed = true;
        s->tries = s->unlisted = 0;
        s->next = 0;
        if (s->ops->listed_cb)
            s->ops->listed_cb(s, &s->listing);
        sweep_go(s);
    }
}

static void sweep_list(struct gc_sweep *s)
{
    int err;

    share_listing_free(&s->listing);
    s->listed = false;
    if (s->bucket == BLOCK_FILE_BUCKETS) {
        sweep_end(s);
        return;
    }
    memset(&s->list, 0, sizeof(s->list));
    s->list.op.verb = SHARE_LIST;
    s->list.op.bucket = (uint8_t)s->bucket;
    s->listing_under_way = true;
    err = gc_submit(s->root, &s->list, listed_cb);
    if (err < 0) {
        s->listing_under_way = false;
        list_failed(s, err);
    }
}

/* The slot's file is gone, or stays. */
static void slot_end(struct gc_removal *slot, int status)
{
    struct gc_sweep *s = slot->sweep;
    uint32_t file = slot->file;

    slot->state = GC_SLOT_FREE;
    s->busy--;
    if (status == -ENOENT || status == -ESTALE)
        status = 0;
    if (status < 0 && !sweep_ending(s))
        s->status = status;
    s->failures = status < 0 ? s->failures + 1 : 0;
    if (s->failures == GC_FAILURES)
        s->given_up = true;
    s->ops->removed_cb(s, &s->listing.files[file], file_name(s, file), status);
}

static void removed_cb(struct share_task *t)
{
    struct gc_removal *slot = LIST_ENTRY(t, struct gc_removal, task);
    struct gc_sweep *s = slot->sweep;

    slot_end(slot, t->status);
    sweep_go(s);
}

/* A refusal that is more than a wait ends the sweep: the others would be refused as well. */
static void slot_refused(struct gc_removal *slot, int err)
{
    struct gc_sweep *s = slot->sweep;

    if (err == -EAGAIN && !s->stopped) {
        slot->state = GC_SLOT_WAITS;
        sweep_pause(s, GC_PAUSE_MS / 5);
        return;
    }
    slot_end(slot, err);
    s->given_up = true;
}

static void slot_remove(struct gc_removal *slot)
{
    struct gc_sweep *s = slot->sweep;
    int err;

    memset(&slot->task, 0, sizeof(slot->task));
    slot->task.op.verb = SHARE_REMOVE;
    slot->task.op.by_name = true;
    slot->task.op.bucket = (uint8_t)s->bucket;
    snprintf(slot->task.op.name, sizeof(slot->task.op.name), "%s", file_name(s, slot->file));
    slot->state = GC_SLOT_BUSY;
    err = gc_submit(s->root, &slot->task, removed_cb);
    if (err < 0)
        slot_refused(slot, err);
}

/* What comes before, then the removal. */
static void slot_go(struct gc_removal *slot)
{
    struct gc_sweep *s = slot->sweep;
    int err = -ENOENT;

    if (s->ops->before_cb) {
        slot->state = GC_SLOT_BEFORE;
        err = s->ops->before_cb(s, (unsigned)(slot - s->slots), slot_file(slot),
                                file_name(s, slot->file));
    }
    if (err == 0)
        return;
    if (err == -EAGAIN)
        slot_refused(slot, err);
    else
        slot_remove(slot);
}

void gc_sweep_resume(struct gc_sweep *s, unsigned i)
{
    if (sweep_ending(s)) {
        slot_end(&s->slots[i], -ECANCELED);
        sweep_go(s);
        return;
    }
    slot_remove(&s->slots[i]);
    sweep_go(s);
}

static void slots_again(struct gc_sweep *s)
{
    for (unsigned i = 0; i < GC_REMOVALS; i++) {
        struct gc_removal *slot = &s->slots[i];

        if (slot->state != GC_SLOT_WAITS)
            continue;
        if (sweep_ending(s))
            slot_end(slot, -ECANCELED);
        else
            slot_go(slot);
        if (deadline_armed(&s->pause))
            return;
    }
}

static struct gc_removal *slot_free(struct gc_sweep *s)
{
    for (unsigned i = 0; i < GC_REMOVALS; i++)
        if (s->slots[i].state == GC_SLOT_FREE)
            return &s->slots[i];
    return NULL;
}

/* Asks about files until the slots are full, the bucket is done, or the loop is to have its turn.
 */
static void files_go(struct gc_sweep *s)
{
    for (unsigned i = 0; s->next < s->listing.n; i++) {
        struct gc_removal *slot = slot_free(s);

        if (!slot || deadline_armed(&s->pause) || sweep_ending(s))
            return;
        if (i == GC_STEP) {
            sweep_pause(s, 0);
            return;
        }
        slot->file = s->next++;
        if (!s->ops->wanted_cb(s, slot_file(slot), file_name(s, slot->file)))
            continue;
        s->busy++;
        slot_go(slot);
    }
}

static void sweep_go(struct gc_sweep *s)
{
    if (sweep_ending(s))
        deadline_disarm(s->root->config.deadlines, &s->pause);
    if (!deadline_armed(&s->pause))
        slots_again(s);
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

void gc_sweep_init(struct gc_sweep *s, struct share_root *root, const struct gc_sweep_ops *ops)
{
    memset(s, 0, sizeof(*s));
    s->root = root;
    s->ops = ops;
    for (unsigned i = 0; i < GC_REMOVALS; i++)
        s->slots[i].sweep = s;
}

int gc_sweep_start(struct gc_sweep *s)
{
    int err =
        deadline_arm(s->root->config.deadlines, &s->pause, uv_now(s->root->config.loop), pause_cb);

    if (err < 0)
        return err;
    s->active = true;
    s->listed = s->stopped = s->given_up = false;
    s->bucket = s->tries = s->unlisted = s->left_out = s->failures = s->busy = 0;
    s->status = 0;
    return 0;
}

void gc_sweep_stop(struct gc_sweep *s)
{
    if (!s->active || s->stopped)
        return;
    s->stopped = true;
    if (s->listing_under_way && !share_root_cancel(s->root, &s->list))
        return;
    s->listing_under_way = false;
    for (unsigned i = 0; i < GC_REMOVALS; i++) {
        struct gc_removal *slot = &s->slots[i];

        if (slot->state == GC_SLOT_BUSY && share_root_cancel(s->root, &slot->task))
            slot_end(slot, -ECANCELED);
    }
    sweep_go(s);
}
