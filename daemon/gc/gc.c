#include "daemon/gc/gc.h"

#include "daemon/base/log.h"
#include "daemon/format/bytes.h"
#include "daemon/gc/pass.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_MS 10000u /* from the look until the first pass, at most about that */
#define AGAIN_MS 60000u /* after one that failed, at most about that */
#define RENEWALS 4u     /* of the marker, from pass to pass */
#define SOON_MS 1000u   /* after one that was not enough */
#define STEP_TRIES 100u /* of a step that the root has no time for, GC_PAUSE_MS apart */
#define NS_PER_MS 1000000u

/* What a pass asks of the root before and after its sweeps, one after the other. */
enum gc_step {
    GC_STEP_IDLE,
    GC_STEP_READ,  /* read the marker: its time, and what the root held */
    GC_STEP_CLOCK, /* ask for the server's time */
    GC_STEP_CLAIM, /* touch the marker */
    GC_STEP_SWEEP,
    GC_STEP_UNMARK, /* remove the marker, ... */
    GC_STEP_MARK    /* ... write it again */
};

#define GC_MARKER_BYTES 16u

struct gc {
    struct gc_config config;
    struct gc_usage usage;
    bool stopped, forced, full, failing, incomplete;
    /* the first iteration only asks what the root has and whether it accepts writes */
    bool look;
    uint64_t full_ms;     /* by uv_now: when gc_full was called */
    uint64_t clock_ms;    /* by uv_now: when the server was asked for its time */
    uint64_t marked_ns;   /* the marker's time; 0: unknown */
    struct deadline next; /* of the next pass, the present step's next try, the next renewal */
    enum gc_step step;
    struct shared_task task;
    struct shared_task renewal; /* touches the marker while a pass goes on */
    unsigned tries;
    uint8_t marker[GC_MARKER_BYTES];
    struct gc_walk walk;
};

static const struct block_file_id marker_id = {.key_bytes = UCM_MIN_KEY_BYTES};

static void step_start(struct gc *gc, enum gc_step step);
static void renew(struct gc *gc);

/* ---- when passes begin ---- */

/* Between half of `ms` and one and a half times, so that hosts started together drift apart. */
static uint64_t jittered(uint64_t ms)
{
    uint64_t x = uv_hrtime() * 0x9e3779b97f4a7c15ull;

    return ms / 2 + (x >> 32) % (ms + 1);
}

static void next_cb(struct deadline *d)
{
    struct gc *gc = LIST_ENTRY(d, struct gc, next);

    if (gc->step == GC_STEP_SWEEP) {
        renew(gc);
        return;
    }
    if (gc->step == GC_STEP_IDLE)
        gc->tries = 0;
    step_start(gc, gc->step == GC_STEP_IDLE ? GC_STEP_READ : gc->step);
}

static void next_in(struct gc *gc, uint64_t in_ms)
{
    const struct shared_root_config *root = &gc->config.root->config;

    if (!gc->stopped)
        deadline_arm(root->deadlines, &gc->next, uv_now(root->loop) + in_ms, next_cb);
}

/* Nothing is under way until the next pass. */
static void idle(struct gc *gc, uint64_t next_ms)
{
    gc->step = GC_STEP_IDLE;
    gc->forced = false;
    next_in(gc, next_ms);
}

/* Logs the first of several failures in a row. */
static void failure_note(struct gc *gc, const char *event, bool *logged, int status)
{
    gc->config.root->config.metrics->shared_gc_failed++;
    if (*logged)
        return;
    *logged = true;
    log_warn("shared", event, "root=%u step=%d error=%s", gc->config.root->number, (int)gc->step,
             strerror(-status));
}

static uint64_t first_ms(const struct gc *gc)
{
    return gc->config.collect_ms < FIRST_MS ? gc->config.collect_ms : FIRST_MS;
}

/* The marker said what the root holds, and the root's health whether it takes writes. */
static void looked(struct gc *gc)
{
    gc->look = false;
    idle(gc, jittered(first_ms(gc)));
}

static void failed(struct gc *gc, int status)
{
    if (gc->look) {
        looked(gc);
        return;
    }
    if (!gc->stopped)
        failure_note(gc, "gc-failed", &gc->failing, status);
    idle(gc, jittered(gc->config.collect_ms < AGAIN_MS ? gc->config.collect_ms : AGAIN_MS));
}

/* ---- the marker ---- */

/* A marker that can't be read has no time: a pass is due, and writes it again. */
static void marker_take(struct gc *gc, int status)
{
    gc->marked_ns = status == 0 ? gc->task.op.mtime_ns : 0;
    if (status == 0)
        gc->usage = (struct gc_usage){true, get64(gc->marker), get64(gc->marker + 8)};
}

static void marker_make(struct gc *gc)
{
    put64(gc->marker, gc->usage.bytes);
    put64(gc->marker + 8, gc->usage.files);
}

/* How long ago the marker was set; very long: never, or its time makes no sense. */
static uint64_t marker_age_ms(const struct gc *gc)
{
    return gc->marked_ns == 0 ? UINT64_MAX
                              : gc_age(gc->walk.pass.now_ns, gc->marked_ns) / NS_PER_MS;
}

/* The server was full, and no host has begun or ended a pass since. The server's time is a little
 * later than the question for it, so in doubt a pass is due. */
static bool due_full(const struct gc *gc)
{
    return gc->full &&
           (gc->clock_ms <= gc->full_ms || marker_age_ms(gc) >= gc->clock_ms - gc->full_ms);
}

static bool due(const struct gc *gc)
{
    uint64_t capacity = gc->config.root->config.capacity_bytes;

    return gc->forced || due_full(gc) || marker_age_ms(gc) >= gc->config.collect_ms ||
           (capacity && gc->usage.known && gc->usage.bytes > capacity);
}

static void begin(struct gc *gc)
{
    bool for_full = due_full(gc);

    gc->full = false;
    gc->step = GC_STEP_SWEEP;
    next_in(gc, gc->config.collect_ms / RENEWALS);
    gc_walk_begin(&gc->walk, gc->walk.pass.now_ns, for_full);
}

static void skip(struct gc *gc)
{
    uint64_t age_ms = marker_age_ms(gc);

    gc->full = false;
    idle(gc, gc->config.collect_ms - age_ms + jittered(gc->config.collect_ms / 10));
}

static void pass_ended_cb(struct gc_walk *w, int status)
{
    struct gc *gc = LIST_ENTRY(w, struct gc, walk);
    const struct gc_pass *pass = &w->pass;

    deadline_disarm(gc->config.root->config.deadlines, &gc->next);
    if (status < 0) {
        failed(gc, status);
        return;
    }
    gc->failing = false;
    if (pass->partly < 0)
        failure_note(gc, "gc-incomplete", &gc->incomplete, pass->partly);
    else
        gc->incomplete = false;
    gc->usage = (struct gc_usage){true, pass->used_bytes, pass->used_files};
    gc->config.root->config.metrics->shared_gc_passes++;
    log_info("shared", "gc",
             "root=%u removed=%" PRIu64 " bytes=%" PRIu64 " used=%" PRIu64 " files=%" PRIu64
             " ms=%" PRIu64,
             gc->config.root->number, pass->removed, pass->removed_bytes, pass->used_bytes,
             pass->used_files, uv_now(gc->config.root->config.loop) - pass->began_ms);
    step_start(gc, GC_STEP_UNMARK);
}

/* With or without a new marker, which only saves work. */
static void ended(struct gc *gc)
{
    uint64_t capacity = gc->config.root->config.capacity_bytes, in_ms = gc->config.collect_ms;

    if (capacity && gc->usage.bytes > capacity && gc->walk.pass.removed > 0)
        in_ms = SOON_MS; /* highest parts were not all known, or the root grew meanwhile */
    idle(gc, jittered(in_ms));
    if (gc->full) {
        gc->full = false;
        gc_full(gc); /* the server became full during this pass, which was for something else */
    }
}

/* ---- steps ---- */

/* A full server takes no file of a CHECK; its time as of an earlier CHECK will do. */
static void clock_taken(struct gc *gc, int status)
{
    int err = status;

    gc->walk.pass.now_ns = gc->task.op.now_ns;
    if (shared_status_full(status))
        err = shared_root_time(gc->config.root, &gc->walk.pass.now_ns);
    if (gc->look && !gc->forced && !gc->full)
        looked(gc);
    else if (err < 0)
        failed(gc, status);
    else if (due(gc))
        step_start(gc, GC_STEP_CLAIM);
    else
        skip(gc);
}

static void step_ended(struct gc *gc, int status)
{
    switch (gc->step) {
    case GC_STEP_READ:
        marker_take(gc, status);
        if (gc->config.root->config.read_only)
            idle(gc, jittered(gc->config.collect_ms));
        else
            step_start(gc, GC_STEP_CLOCK);
        return;
    case GC_STEP_CLOCK:
        clock_taken(gc, status);
        return;
    case GC_STEP_CLAIM:
        begin(gc);
        return;
    case GC_STEP_UNMARK:
        step_start(gc, GC_STEP_MARK);
        return;
    default:
        ended(gc);
    }
}

static void step_cb(struct shared_task *t)
{
    struct gc *gc = LIST_ENTRY(t, struct gc, task);

    if (gc->stopped) {
        idle(gc, 0);
        return;
    }
    step_ended(gc, t->status);
}

static enum shared_verb step_verb(enum gc_step step)
{
    switch (step) {
    case GC_STEP_READ:
        return SHARED_READ;
    case GC_STEP_CLOCK:
        return SHARED_CHECK;
    case GC_STEP_CLAIM:
        return SHARED_TOUCH;
    case GC_STEP_UNMARK:
        return SHARED_REMOVE;
    default:
        return SHARED_WRITE;
    }
}

/* An operation on the marker. */
static int task_make(struct shared_task *t, enum shared_verb verb)
{
    char name[BLOCK_FILE_NAME_CAP];
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    int err = block_file_locate(&marker_id, identity, name);

    memset(t, 0, sizeof(*t));
    t->op.verb = verb;
    t->op.id = marker_id;
    t->op.bucket = identity[0];
    t->op.bytes = GC_MARKER_BYTES;
    return err;
}

static void step_start(struct gc *gc, enum gc_step step)
{
    struct shared_op *op = &gc->task.op;
    int err = task_make(&gc->task, step_verb(step));

    gc->step = step;
    op->data = gc->marker;
    op->sync = step == GC_STEP_CLOCK;
    if (step == GC_STEP_CLOCK)
        gc->clock_ms = uv_now(gc->config.root->config.loop);
    if (step == GC_STEP_MARK)
        marker_make(gc);
    if (err == 0)
        err = gc_submit(gc->config.root, &gc->task, step_cb);
    if (err == -EAGAIN && ++gc->tries < STEP_TRIES)
        next_in(gc, GC_PAUSE_MS);
    else if (err < 0 && step >= GC_STEP_UNMARK)
        ended(gc);
    else if (err < 0)
        failed(gc, err);
}

/* ---- while a pass goes on ---- */

static void renewed_cb(struct shared_task *t)
{
    (void)t; /* it saves work and nothing else */
}

/* A pass may take longer than it is from pass to pass. With a marker of its beginning all other
 * hosts would list the root, too. */
static void renew(struct gc *gc)
{
    if (gc->renewal.state == SHARED_TASK_NONE && task_make(&gc->renewal, SHARED_TOUCH) == 0)
        (void)gc_submit(gc->config.root, &gc->renewal, renewed_cb); /* or the next time */
    next_in(gc, gc->config.collect_ms / RENEWALS);
}

/* ---- for the owner ---- */

static bool step_under_way(const struct gc *gc)
{
    return gc->task.state != SHARED_TASK_NONE;
}

int gc_new(const struct gc_config *config, struct gc **out)
{
    struct gc *gc = calloc(1, sizeof(*gc));

    if (!gc)
        return -ENOMEM;
    gc->config = *config;
    gc->walk = (struct gc_walk){.config = &gc->config, .ended_cb = pass_ended_cb};
    gc->look = config->first_ms == 0;
    next_in(gc, gc->look ? 0 : jittered(config->first_ms));
    *out = gc;
    return 0;
}

void gc_stop(struct gc *gc)
{
    if (gc->stopped)
        return;
    gc->stopped = true;
    deadline_disarm(gc->config.root->config.deadlines, &gc->next);
    if (step_under_way(gc) && shared_root_cancel(gc->config.root, &gc->task))
        gc->step = GC_STEP_IDLE;
    if (gc->renewal.state != SHARED_TASK_NONE)
        (void)shared_root_cancel(gc->config.root, &gc->renewal); /* else gc_busy waits for it */
    if (gc->step == GC_STEP_SWEEP)
        gc_walk_stop(&gc->walk);
}

bool gc_busy(const struct gc *gc)
{
    return step_under_way(gc) || gc->renewal.state != SHARED_TASK_NONE || gc_walk_busy(&gc->walk);
}

void gc_free(struct gc *gc)
{
    if (!gc)
        return;
    deadline_disarm(gc->config.root->config.deadlines, &gc->next);
    gc_walk_free(&gc->walk);
    free(gc);
}

void gc_full(struct gc *gc)
{
    uint64_t now_ms = uv_now(gc->config.root->config.loop);
    uint64_t at_ms = gc->walk.pass.for_full ? gc->walk.pass.began_ms + GC_FULL_PAUSE_MS : 0;

    if (gc->stopped || gc->full || gc->config.root->config.read_only ||
        (gc->step != GC_STEP_IDLE && gc->walk.pass.for_full))
        return;
    gc->full = true;
    gc->full_ms = now_ms;
    if (gc->step == GC_STEP_IDLE)
        next_in(gc, at_ms > now_ms ? at_ms - now_ms : 0);
}

int gc_run(struct gc *gc)
{
    if (gc->stopped)
        return -ECANCELED;
    if (gc->config.root->config.read_only)
        return -EROFS;
    if (gc->step != GC_STEP_IDLE && !gc->look)
        return -EALREADY;
    if (gc->step == GC_STEP_IDLE)
        next_in(gc, 0);
    gc->look = false;
    gc->forced = true;
    return 0;
}

struct gc_usage gc_usage(const struct gc *gc)
{
    return gc->usage;
}

void gc_quotas(struct gc *gc, shared_quota_fn quota_cb, void *ctx)
{
    gc->walk.quota.quota_cb = quota_cb;
    gc->walk.quota.ctx = ctx;
}
