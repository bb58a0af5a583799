#include "daemon/shared/root_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define STORE_BYTES (64ull << 20) /* of queued and begun writes, except a single larger one */
#define SILENT_MS 1000u           /* without an answer, while lookups wait: no further ones */
#define CHECK_MS 5000u
#define CLOCK_KEPT_MS (3600u * 1000u)
#define CLOCK_RETRY_MS (60u * 1000u)
#define BACKGROUND_PATIENCE_MS 1000u /* then a background task goes before all else */
/* Loads begun while several tenants load: what is begun is in nobody's order, so a tenant that
 * comes waits for it. An eighth of the depth at least. It holds for FAIR_WINDOW bytes of one tenant
 * alone. */
#define FAIR_BYTES (4ull << 20)
#define FAIR_WINDOW (1ull << 30)
#define BURST_BYTES (4ull << 20)                /* see base/fair.h */
#define OPERATION_COST 4096u                    /* bytes that each counts, besides its own */
#define BACKGROUND_BURST (16u * OPERATION_COST) /* where operations count alike */

static const uint32_t queue_max[SHARED_CLASSES] = {4096, 4096, 1024, 256};

/* Without user, password and options. */
static void target_show(const char *target, char out[SHARED_TARGET_SHOWN])
{
    const char *server = strstr(target, "://"), *at;
    size_t slash;

    if (!server) {
        snprintf(out, SHARED_TARGET_SHOWN, "%s", target);
        return;
    }
    server += 3;
    slash = strcspn(server, "/?");
    at = memchr(server, '@', slash);
    snprintf(out, SHARED_TARGET_SHOWN, "%.*s%.*s", (int)(server - target), target,
             (int)strcspn(at ? at + 1 : server, "?"), at ? at + 1 : server);
}

/* ---- which tasks may begin, and which may wait ---- */

static uint32_t begun_all(const struct shared_root *r)
{
    uint32_t n = 0;

    for (int c = 0; c < SHARED_CLASSES; c++)
        n += r->begun[c];
    return n;
}

static uint32_t at_least_one(uint32_t n)
{
    return n > 0 ? n : 1;
}

/* Half of the depth while reads are under way, else three quarters: a new read can begin at
 * once. */
static uint32_t stores_max(const struct shared_root *r)
{
    uint32_t depth = r->config.depth;

    return at_least_one(r->begun[SHARED_LOAD] > 0 ? depth / 2 : depth * 3 / 4);
}

static bool loads_may_begin(const struct shared_root *r)
{
    return !fair_contended(&r->queue[SHARED_LOAD].fair, FAIR_WINDOW) || r->loading < FAIR_BYTES ||
           r->begun[SHARED_LOAD] < at_least_one(r->config.depth / 8);
}

/* An eighth of the depth is for lookups only. */
static bool class_may_begin(const struct shared_root *r, enum shared_class class)
{
    uint32_t depth = r->config.depth, all = begun_all(r);
    uint32_t rest = depth > 1 ? depth - at_least_one(depth / 8) : 1;

    switch (class) {
    case SHARED_LOOKUP:
        return all < depth;
    case SHARED_LOAD:
        return all < rest && loads_may_begin(r);
    case SHARED_STORE:
        return all < rest && r->queued[SHARED_LOAD] == 0 && r->begun[SHARED_STORE] < stores_max(r);
    default:
        return all < rest && r->begun[SHARED_BACKGROUND] < at_least_one(depth / 4);
    }
}

static bool class_may_wait(const struct shared_root *r, enum shared_class class, uint64_t bytes)
{
    if (r->queued[class] >= queue_max[class])
        return false;
    if (class != SHARED_STORE)
        return true;
    return r->queued[SHARED_LOAD] == 0 &&
           (r->store_bytes == 0 || r->store_bytes + bytes <= STORE_BYTES);
}

/* Something waits there. */
static struct shared_task *queue_first(struct shared_root *r, enum shared_class class)
{
    return LIST_ENTRY(fair_queue_first(&r->queue[class]), struct shared_task, link);
}

static struct shared_task *task_next(struct shared_root *r)
{
    bool starved = r->queued[SHARED_BACKGROUND] > 0 && r->begun[SHARED_BACKGROUND] == 0 &&
                   shared_root_now(r) - queue_first(r, SHARED_BACKGROUND)->submitted_ms >=
                       BACKGROUND_PATIENCE_MS;

    if (starved && class_may_begin(r, SHARED_BACKGROUND))
        return queue_first(r, SHARED_BACKGROUND);
    for (int c = 0; c < SHARED_CLASSES; c++)
        if (r->queued[c] > 0)
            return class_may_begin(r, (enum shared_class)c) ? queue_first(r, (enum shared_class)c)
                                                            : NULL;
    return NULL;
}

/* ---- a task's states ---- */

static void task_unqueue(struct shared_task *t)
{
    list_remove(&t->link);
    t->root->queued[t->class]--;
}

/* The backend no longer has it, or its answer will not be waited for. */
static void begun_less(struct shared_root *r, struct shared_task *t)
{
    list_remove(&t->link);
    r->begun[t->class]--;
    r->loading -= t->class == SHARED_LOAD ? t->cost : 0;
}

static void task_accounts_close(struct shared_task *t)
{
    if (t->class == SHARED_STORE)
        t->root->store_bytes -= t->op.bytes;
    if (t->op.verb == SHARED_WRITE)
        breaker_again(&t->root->writes,
                      shared_root_now(t->root)); /* in case it was a trial without result */
    t->state = SHARED_TASK_NONE;
}

/* Neither queue nor backend has the task any more. It may be freed when this returns. */
static void task_end(struct shared_task *t, int status)
{
    deadline_disarm(t->root->config.deadlines, &t->deadline);
    task_accounts_close(t);
    t->status = status;
    t->released_cb(t);
}

static void ready_report(struct shared_root *r)
{
    for (int c = 0; c < SHARED_CLASSES; c++) {
        bool fits = c == SHARED_STORE ? class_may_wait(r, SHARED_STORE, STORE_BYTES / 2)
                                      : r->queued[c] < queue_max[c] / 2;

        if (!r->refused[c] || !fits)
            continue;
        r->refused[c] = false;
        r->config.ready_cb(r->config.ctx);
    }
}

static void task_begin(struct shared_root *r, struct shared_task *t);

static void queue_begin(struct shared_root *r)
{
    struct shared_task *t;

    while ((t = task_next(r))) {
        task_unqueue(t);
        fair_queue_charge(&r->queue[t->class], &t->who, t->cost, &t->got);
        task_begin(r, t);
    }
}

static void root_pump(struct shared_root *r)
{
    queue_begin(r);
    ready_report(r);
}

static void check_plan(struct shared_root *r);

static void check_at_cb(struct deadline *d)
{
    struct shared_root *r = LIST_ENTRY(d, struct shared_root, check_at);

    if (r->stopped || r->check.state != SHARED_TASK_NONE)
        return; /* check_released_cb plans the next one */
    if (breaker_try(&r->breaker, shared_root_now(r)))
        shared_root_check(r);
    else
        check_plan(r);
}

/* The breaker is open: a check will run when its pause ends. */
static void check_plan(struct shared_root *r)
{
    if (r->stopped || r->check.state != SHARED_TASK_NONE || deadline_armed(&r->check_at))
        return;
    deadline_arm(r->config.deadlines, &r->check_at, r->breaker.backoff.until, check_at_cb);
}

static void queue_flush(struct shared_root *r, enum shared_class class, int status)
{
    while (r->queued[class] > 0) {
        struct shared_task *t = queue_first(r, class);

        task_unqueue(t);
        task_end(t, status);
    }
}

static void root_flush(struct shared_root *r)
{
    for (int c = 0; c < SHARED_CLASSES; c++)
        queue_flush(r, (enum shared_class)c, -EHOSTDOWN);
}

/* What waits ends with the root. */
static void status_note(struct shared_root *r, const struct shared_task *t, int status)
{
    if (root_status_note(r, t, status)) {
        check_plan(r);
        root_flush(r);
    } else if (breaker_closed(&r->breaker)) {
        deadline_disarm(r->config.deadlines, &r->check_at);
    }
}

static void backend_done_cb(struct shared_op *op, int status)
{
    struct shared_task *t = LIST_ENTRY(op, struct shared_task, op);
    struct shared_root *r = t->root;

    begun_less(r, t);
    r->heard_ms = shared_root_now(r);
    t->state = SHARED_TASK_ENDING; /* callbacks of flushed tasks can't cancel it */
    status_note(r, t, status);
    task_end(t, status);
    root_pump(r);
}

static void task_begin(struct shared_root *r, struct shared_task *t)
{
    if (r->begun[t->class]++ == 0 && t->class == SHARED_LOOKUP)
        r->heard_ms = shared_root_now(r);
    r->loading += t->class == SHARED_LOAD ? t->cost : 0;
    list_push_back(&r->under_way, &t->link);
    t->state = SHARED_TASK_BEGUN;
    t->begun_ns = uv_hrtime();
    t->op.done_cb = backend_done_cb;
    t->op.deadline_ms = t->deadline.at_ms;
    r->config.ops->start(r->backend, &t->op);
}

static void deadline_cb(struct deadline *d)
{
    struct shared_task *t = LIST_ENTRY(d, struct shared_task, deadline);
    struct shared_root *r = t->root;
    bool waited = t->state == SHARED_TASK_QUEUED;

    if (waited)
        task_unqueue(t);
    else if (r->config.ops->cancel(r->backend, &t->op))
        begun_less(r, t);
    else
        return; /* its bytes are being copied: it ends when they are */
    t->state = SHARED_TASK_ENDING;
    if (!waited)
        status_note(r, t, -ETIMEDOUT);
    task_end(t, -ETIMEDOUT);
    root_pump(r);
}

static bool verb_changes(enum shared_verb verb)
{
    return verb == SHARED_WRITE || verb == SHARED_REMOVE || verb == SHARED_TOUCH;
}

static int submit_refusal(struct shared_root *r, const struct shared_task *t)
{
    if (r->stopped && t->class >= SHARED_STORE)
        return -ECANCELED;
    if (!breaker_closed(&r->breaker)) {
        check_plan(r);
        return -EHOSTDOWN;
    }
    if (r->config.read_only && verb_changes(t->op.verb))
        return -EROFS;
    if (!class_may_wait(r, t->class, t->op.bytes)) {
        r->refused[t->class] = true;
        return -EAGAIN;
    }
    return 0;
}

int shared_root_submit(struct shared_root *r, struct shared_task *t)
{
    int err = submit_refusal(r, t);

    if (err < 0)
        return err;
    if (t->op.verb == SHARED_WRITE && !root_write_try(r))
        return -EROFS;
    t->root = r;
    t->deadline = (struct deadline){0};
    deadline_arm(r->config.deadlines, &t->deadline, t->deadline_ms, deadline_cb);
    t->status = 0;
    t->state = SHARED_TASK_QUEUED;
    t->submitted_ms = shared_root_now(r);
    if (t->class == SHARED_STORE)
        r->store_bytes += t->op.bytes;
    t->cost = OPERATION_COST;
    if (t->class == SHARED_LOAD || t->class == SHARED_STORE)
        t->cost += t->op.bytes;
    fair_queue_push(&r->queue[t->class], &t->who, 0, &t->link, false);
    r->queued[t->class]++;
    queue_begin(r);
    return 0;
}

bool shared_root_cancel(struct shared_root *r, struct shared_task *t)
{
    if (t->state == SHARED_TASK_QUEUED)
        task_unqueue(t);
    else if (t->state == SHARED_TASK_BEGUN && r->config.ops->cancel(r->backend, &t->op))
        begun_less(r, t);
    else
        return false;
    deadline_disarm(r->config.deadlines, &t->deadline);
    task_accounts_close(t);
    queue_begin(r);
    return true;
}

/* ---- checks ---- */

static uint64_t check_ms(const struct shared_root *r)
{
    return r->config.timeout_ms < CHECK_MS ? r->config.timeout_ms : CHECK_MS;
}

void shared_root_check(struct shared_root *r)
{
    struct shared_task *t = &r->check;

    if (r->stopped || t->state != SHARED_TASK_NONE)
        return;
    t->op = (struct shared_op){.verb = SHARED_CHECK};
    deadline_arm(r->config.deadlines, &t->deadline, shared_root_now(r) + check_ms(r), deadline_cb);
    task_begin(r, t);
}

static void check_released_cb(struct shared_task *t)
{
    if (!breaker_closed(&t->root->breaker))
        check_plan(t->root);
}

static void check_stop(struct shared_root *r)
{
    deadline_disarm(r->config.deadlines, &r->check_at);
    (void)shared_root_cancel(r, &r->check); /* if it can't, shared_root_busy counts it */
    (void)shared_root_cancel(r, &r->clock);
}

bool shared_root_takes_lookups(struct shared_root *r)
{
    if (!breaker_closed(&r->breaker)) {
        check_plan(r);
        return false;
    }
    if (r->begun[SHARED_LOOKUP] > 0 && shared_root_now(r) - r->heard_ms > SILENT_MS)
        return false;
    return breaker_closed(&r->lookups) || breaker_try(&r->lookups, shared_root_now(r));
}

/* ---- the server's time ---- */

static void clock_released_cb(struct shared_task *t)
{
    struct shared_root *r = t->root;

    if (t->status < 0 || t->op.now_ns == 0)
        return;
    r->clock_ahead_ns = (int64_t)(t->op.now_ns - uv_hrtime());
    r->clock_known_ms = shared_root_now(r);
}

int shared_root_time(struct shared_root *r, uint64_t *now_ns)
{
    uint64_t now = shared_root_now(r);
    bool known = r->clock_known_ms != 0;

    if ((!known || now - r->clock_known_ms > CLOCK_KEPT_MS) && !r->config.read_only &&
        r->clock.state == SHARED_TASK_NONE && now >= r->clock_again_ms) {
        r->clock.op = (struct shared_op){.verb = SHARED_CHECK, .sync = true};
        r->clock.deadline_ms = now + check_ms(r);
        r->clock_again_ms = now + CLOCK_RETRY_MS;
        (void)shared_root_submit(r, &r->clock); /* if it is refused, a later call tries again */
    }
    if (!known)
        return -EAGAIN;
    *now_ns = uv_hrtime() + (uint64_t)r->clock_ahead_ns;
    return 0;
}

/* ---- the end ---- */

void shared_root_stop(struct shared_root *r)
{
    r->stopped = true;
    check_stop(r);
    queue_flush(r, SHARED_STORE, -ECANCELED);
    queue_flush(r, SHARED_BACKGROUND, -ECANCELED);
}

void shared_root_give_up(struct shared_root *r)
{
    struct list left, *node;

    shared_root_stop(r);
    root_flush(r);
    list_init(&left);
    list_splice_front(&left, &r->under_way);
    while ((node = list_pop_front(&left)) != NULL) {
        struct shared_task *t = LIST_ENTRY(node, struct shared_task, link);

        list_push_back(&r->under_way, node);
        if (!r->config.ops->cancel(r->backend, &t->op))
            continue;
        begun_less(r, t);
        t->state = SHARED_TASK_ENDING;
        task_end(t, -ECANCELED);
    }
}

uint32_t shared_root_busy(const struct shared_root *r)
{
    uint32_t n = begun_all(r);

    for (int c = 0; c < SHARED_CLASSES; c++)
        n += r->queued[c];
    return n;
}

/* ---- opening ---- */

int shared_root_open(const struct shared_root_config *config, struct shared_root **out)
{
    struct shared_root *r = calloc(1, sizeof(*r));
    struct shared_backend_config bc = {.loop = config->loop,
                                       .deadlines = config->deadlines,
                                       .target = config->target,
                                       .host = config->host,
                                       .depth = config->depth,
                                       .read_only = config->read_only,
                                       .process = config->process,
                                       .launcher = config->launcher};
    int err;

    if (!r)
        return -ENOMEM;
    r->config = *config;
    r->config.target = r->config.host = NULL; /* borrowed */
    r->config.process = NULL;
    list_init(&r->under_way);
    for (int c = 0; c < SHARED_CLASSES; c++)
        fair_queue_init(&r->queue[c], c == SHARED_BACKGROUND ? BACKGROUND_BURST : BURST_BYTES);
    root_health_init(r);
    r->check = (struct shared_task){
        .class = SHARED_BACKGROUND, .released_cb = check_released_cb, .root = r};
    r->clock = (struct shared_task){
        .class = SHARED_BACKGROUND, .released_cb = clock_released_cb, .root = r};
    target_show(config->target, r->shown);
    r->hash = XXH3_64bits(config->target, strlen(config->target));
    err = config->ops->open(&bc, &r->backend);
    if (err < 0) {
        free(r);
        return err;
    }
    *out = r;
    return 0;
}

void shared_root_close(struct shared_root *r)
{
    if (!r)
        return;
    assert(shared_root_busy(r) == 0);
    check_stop(r);
    r->config.ops->close(r->backend);
    free(r);
}
