/* Operations and calls of a root that is a process. */
#include "daemon/shared/process/process.h"

#include "daemon/base/kill_point.h"
#include "daemon/shared/shared.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIRECTORY "blocks"

/* ---- ends ---- */

static void turn_cb(uv_idle_t *turn);

static void turn_wanted(struct shared_backend *b)
{
    (void)uv_idle_start(&b->turn, turn_cb); /* can't fail */
}

/* done_cb runs at the end of this iteration of the event loop. */
static void op_ended(struct shared_backend *b, struct shared_op *op, int status)
{
    op->status = status;
    op->state = SHARED_OP_ENDED;
    list_push_back(&b->ended, &op->link);
    turn_wanted(b);
}

static void call_free(struct process_call *c)
{
    struct shared_backend *b = c->run->b;

    deadline_disarm(b->deadlines, &c->hang);
    list_remove(&c->span_link);
    list_remove(&c->link);
    shared_listing_free(&c->listing);
    c->stage = CALL_FREE;
    c->op = NULL;
    list_push_front(&b->free, &c->link);
    b->calls_used--;
    turn_wanted(b);
}

static void call_end(struct process_call *c, int status)
{
    struct shared_op *op = c->op;
    struct shared_backend *b = c->run->b;

    if (op && status == 0 && c->verb == SHARED_LIST) {
        op->listing = c->listing;
        c->listing = (struct shared_listing){0};
    }
    if (op && status == 0 && c->verb == SHARED_READ)
        op->mtime_ns = c->mtime_ns;
    call_free(c);
    if (op)
        op_ended(b, op, status);
}

static void calls_fail(struct process_run *run)
{
    struct shared_backend *b = run->b;

    for (unsigned i = 0; i <= b->depth; i++) {
        struct process_call *c = &b->calls[i];

        if (c->stage == CALL_READY || c->stage == CALL_ASKED)
            call_end(c, -ECONNRESET);
    }
}

static void list_fail(struct shared_backend *b, struct list *ops, int status)
{
    for (struct list *node; (node = list_pop_front(ops));)
        op_ended(b, LIST_ENTRY(node, struct shared_op, link), status);
}

static void queue_fail(struct shared_backend *b, int status)
{
    list_fail(b, &b->light, status);
    list_fail(b, &b->heavy, status);
}

/* ---- the buffer ---- */

static uint64_t padded(uint64_t bytes)
{
    return (bytes + WIRE_SPAN_ALIGN - 1) & ~(uint64_t)(WIRE_SPAN_ALIGN - 1);
}

/* The first gap that is large enough. */
static bool span_take(struct process_run *run, struct process_call *c, uint64_t bytes)
{
    struct list *node;
    uint64_t at = 0;

    bytes = padded(bytes);
    for (node = run->spans.next; node != &run->spans; node = node->next) {
        const struct process_call *other = LIST_ENTRY(node, struct process_call, span_link);

        if (other->offset - at >= bytes)
            break;
        at = other->offset + other->span_bytes;
    }
    if (node == &run->spans && run->buffer_bytes - at < bytes)
        return false;
    c->offset = at;
    c->span_bytes = bytes;
    list_push_back(node, &c->span_link); /* before that one */
    return true;
}

/* ---- copies ---- */

static void copy(struct process_call *c)
{
    uint8_t *span = c->run->buffer + c->offset; /* the process may write to it, against the rules */

    c->status = 0;
    if (c->back)
        c->status = shared_op_unpack(c->op, span);
    else
        shared_op_pack(c->op, span);
}

static void copied(struct process_call *c)
{
    struct shared_backend *b = c->run->b;

    if (c->back) {
        call_end(c, c->status);
    } else if (c->given_up || c->run->state == RUN_ENDING) {
        call_end(c, c->given_up ? -ECANCELED : -ECONNRESET);
    } else {
        c->stage = CALL_READY;
        list_push_back(&b->ready, &c->link);
        turn_wanted(b);
    }
}

static void copy_cb(uv_work_t *work)
{
    copy(work->data);
}

static void copied_cb(uv_work_t *work, int status)
{
    struct process_call *c = work->data;
    struct process_run *run = c->run;

    if (status < 0)
        c->status = status;
    run->copying--;
    copied(c);
    process_run_settle(run);
}

static void copy_begin(struct process_call *c, bool back)
{
    c->stage = CALL_COPIES;
    c->back = back;
    c->given_up = false;
    if (c->op->bytes > PROCESS_INLINE_BYTES) {
        c->copy.data = c;
        if (uv_queue_work(c->run->b->loop, &c->copy, copy_cb, copied_cb) == 0) {
            c->run->copying++;
            return;
        }
    }
    copy(c);
    copied(c);
}

/* ---- requests ---- */

static void hang_cb(struct deadline *d)
{
    struct process_call *c = LIST_ENTRY(d, struct process_call, hang);

    process_run_end(c->run, 0, "it hangs: a %s was not answered %u ms after its deadline",
                    wire_verbs[c->verb], c->run->b->config.patience_ms);
}

static uint64_t ms_left(const struct process_call *c)
{
    uint64_t now = uv_now(c->run->b->loop), until = c->op->deadline_ms;

    return until == 0 ? PROCESS_REQUEST_MS : until > now ? until - now : 1;
}

_Static_assert((int)SHARED_FIND == (int)WIRE_FIND && (int)SHARED_CHECK == (int)WIRE_CHECK &&
                   (int)SHARED_LIST == (int)WIRE_LIST,
               "verbs are numbered alike");

static void request_of(struct process_call *c, struct wire_request *out)
{
    const struct shared_op *op = c->op;

    *out = (struct wire_request){.id = c->id,
                                 .ms = ms_left(c),
                                 .offset = c->offset,
                                 .bytes = shared_op_file_bytes(op),
                                 .verb = (enum wire_verb)c->verb,
                                 .sync = op->sync};
    if (c->verb == SHARED_LIST)
        snprintf(out->key, sizeof(out->key), DIRECTORY "/%02x/", op->bucket);
    else if (c->verb != SHARED_CHECK)
        snprintf(out->key, sizeof(out->key), DIRECTORY "/%02x/%s", op->bucket, op->name);
    snprintf(out->temp, sizeof(out->temp), DIRECTORY "/%02x/%s", op->bucket, op->temp);
}

static void call_asked(struct process_call *c)
{
    struct shared_backend *b = c->run->b;

    if (c->verb == SHARED_WRITE)
        KILL_POINT("shared-write-asked");
    c->stage = CALL_ASKED;
    deadline_arm(b->deadlines, &c->hang, uv_now(b->loop) + ms_left(c) + b->config.patience_ms,
                 hang_cb);
}

static bool moves(const struct shared_op *op)
{
    return op->verb == SHARED_READ || op->verb == SHARED_WRITE;
}

/* The health check has a call of its own: it must find out about a process that has no other
 * left. */
static bool call_room(const struct process_run *run, const struct shared_op *op)
{
    return run->b->calls_used < run->depth + (op->verb == SHARED_CHECK);
}

/* False: there is no room for it now. */
static bool call_begin(struct process_run *run, struct shared_op *op)
{
    struct shared_backend *b = run->b;
    struct process_call *c;

    if (!call_room(run, op))
        return false;
    c = LIST_ENTRY(b->free.next, struct process_call, link);
    if (moves(op) && !span_take(run, c, shared_op_file_bytes(op)))
        return false;
    list_remove(&c->link);
    b->calls_used++;
    c->run = run;
    c->op = op;
    c->verb = op->verb;
    c->id = ++b->numbers * PROCESS_CALLS + (uint64_t)(c - b->calls);
    c->mtime_ns = 0;
    op->state = SHARED_OP_BUSY;
    op->backend = c;
    shared_temp_next(&b->temps, op->temp);
    if (op->verb == SHARED_WRITE) {
        copy_begin(c, false);
        return true;
    }
    c->stage = CALL_READY;
    list_push_back(&b->ready, &c->link);
    return true;
}

static void queue_begin(struct process_run *run, struct list *ops)
{
    while (!list_empty(ops)) {
        struct shared_op *op = LIST_ENTRY(ops->next, struct shared_op, link);

        list_remove(&op->link);
        if (call_begin(run, op))
            continue;
        list_push_front(ops, &op->link);
        return;
    }
}

/* What this process can't do, and nothing that does not fit. 1: it is to be queued. */
static int answer_now(const struct shared_backend *b, const struct shared_op *op)
{
    const struct process_run *run = b->run;

    if (moves(op) && padded(shared_op_file_bytes(op)) > b->config.buffer_bytes)
        return -ENOMEM; /* says nothing about the root */
    if (run && run->state == RUN_UP &&
        ((op->verb == SHARED_TOUCH && !run->touch) || (op->verb == SHARED_LIST && !run->list)))
        return 0;
    return 1;
}

/* What answer_now found the process unable to do. */
static void op_without(struct shared_backend *b, struct shared_op *op, int status)
{
    op->listing.unable = op->verb == SHARED_LIST && status == 0;
    op_ended(b, op, status);
}

static void incapable_end(struct process_run *run)
{
    struct list *next;

    for (struct list *node = run->b->light.next; node != &run->b->light; node = next) {
        struct shared_op *op = LIST_ENTRY(node, struct shared_op, link);
        int status = answer_now(run->b, op);

        next = node->next;
        if (status > 0)
            continue;
        list_remove(&op->link);
        op_without(run->b, op, status);
    }
}

static void pump(struct shared_backend *b)
{
    bool waits = !list_empty(&b->light) || !list_empty(&b->heavy);
    int err = 0;

    if (!b->run && waits)
        err = backoff_ready(&b->pause, uv_now(b->loop)) && closing_done(b->closing_fds)
                  ? process_run_start(b)
                  : -ECONNREFUSED;
    if (err < 0)
        queue_fail(b, err);
    if (!b->run || b->run->state != RUN_UP)
        return;
    incapable_end(b->run);
    queue_begin(b->run, &b->light);
    queue_begin(b->run, &b->heavy);
    process_run_flush(b->run);
}

static void turn_cb(uv_idle_t *turn)
{
    struct shared_backend *b = turn->data;
    struct list ended;

    uv_idle_stop(turn);
    if (b->closing)
        return;
    pump(b);
    list_init(&ended);
    list_splice_front(&ended, &b->ended);
    for (struct list *node; (node = list_pop_front(&ended));) {
        struct shared_op *op = LIST_ENTRY(node, struct shared_op, link);

        b->under_way--;
        op->done_cb(op, op->status); /* may close the backend */
    }
}

/* ---- answers ---- */

static struct process_call *call_find(struct process_run *run, uint64_t id)
{
    struct process_call *c = &run->b->calls[id % PROCESS_CALLS];

    if (id % PROCESS_CALLS > run->b->depth || c->stage != CALL_ASKED || c->id != id)
        return NULL;
    return c;
}

static void reason_take(struct shared_backend *b, const struct wire_answer *a)
{
    bool failure = a->status >= WIRE_ABSENT;

    if (failure && a->reason[0])
        memcpy(b->reason, a->reason, sizeof(a->reason));
    else if (failure || a->status == WIRE_OK)
        b->reason[0] = '\0';
}

static bool answered(struct process_run *run, const struct wire_answer *a, const char **why)
{
    struct process_call *c = call_find(run, a->id);
    int status = c ? process_answer_take(c, a, why) : -EPROTO;

    if (!c)
        *why = "it answered a request that is not under way";
    if (status == -EPROTO)
        return false;
    reason_take(run->b, a);
    if (status == PROCESS_MORE)
        return true;
    if (status == 0 && c->op && c->verb == SHARED_CHECK && c->op->sync)
        c->op->now_ns = a->now_ns;
    if (c->verb == SHARED_CHECK)
        run->checks_failed = status < 0 ? run->checks_failed + 1 : 0;
    c->mtime_ns = a->mtime_ns;
    deadline_disarm(run->b->deadlines, &c->hang);
    if (status == 0 && c->verb == SHARED_WRITE)
        KILL_POINT("shared-write-answered");
    if (status == 0 && c->op && c->verb == SHARED_READ)
        copy_begin(c, true);
    else
        call_end(c, status);
    /* Its connections and its sandbox may be of a time that has passed: a directory was mounted
     * again. */
    if (run->checks_failed >= PROCESS_CHECKS)
        process_run_end(run, PROCESS_STOP_MS, "its health check failed %u times in a row",
                        PROCESS_CHECKS);
    return true;
}

/* ---- the vtable ---- */

static int calls_make(struct shared_backend *b)
{
    b->calls = calloc(b->depth + 1, sizeof(*b->calls));
    if (!b->calls)
        return -ENOMEM;
    for (unsigned i = 0; i <= b->depth; i++) {
        list_init(&b->calls[i].span_link);
        list_push_back(&b->free, &b->calls[i].link);
    }
    return 0;
}

static void name_take(char out[WIRE_NAME_BYTES + 1], const char *name)
{
    snprintf(out, WIRE_NAME_BYTES + 1, "%.*s", (int)WIRE_NAME_BYTES, name);
    for (char *c = out; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '_';
}

/* A process gets the NAME of process:NAME, or another target without its options. */
static void target_take(struct shared_backend *b, const char *target)
{
    size_t scheme = strlen(CONFIG_PROCESS);

    snprintf(b->shown, sizeof(b->shown), "%.*s", (int)strcspn(target, "?"), target);
    name_take(b->name, strncmp(target, CONFIG_PROCESS, scheme) == 0 ? target + scheme : b->shown);
}

static void turn_closed_cb(uv_handle_t *h)
{
    struct shared_backend *b = h->data;

    closing_drop(b->closing_fds);
    free(b->calls);
    free(b);
}

static void close_last(struct shared_backend *b)
{
    uv_close((uv_handle_t *)&b->turn, turn_closed_cb);
}

static const struct process_events events = {turn_wanted, request_of, call_asked, answered,
                                             calls_fail,  queue_fail, close_last};

static int process_open(const struct shared_backend_config *config, struct shared_backend **out)
{
    struct shared_backend *b;

    if (!config->process || !config->process->command[0] || config->depth >= PROCESS_CALLS)
        return -EINVAL;
    b = calloc(1, sizeof(*b));
    if (!b)
        return -ENOMEM;
    b->events = &events;
    b->loop = config->loop;
    b->deadlines = config->deadlines;
    b->config = *config->process;
    if (b->config.patience_ms == 0)
        b->config.patience_ms = PROCESS_PATIENCE_MS;
    b->depth = config->depth;
    b->launcher = config->launcher;
    b->read_only = config->read_only;
    target_take(b, config->target);
    name_take(b->host, config->host);
    shared_temp_init(&b->temps, config->host);
    backoff_init(&b->pause, b->config.pause_ms ? b->config.pause_ms : PROCESS_PAUSE_MS,
                 PROCESS_PAUSE_MAX_MS, uv_hrtime() | 1);
    list_init(&b->light);
    list_init(&b->heavy);
    list_init(&b->ended);
    list_init(&b->ready);
    list_init(&b->free);
    b->closing_fds = closing_new();
    if (!b->closing_fds || calls_make(b) < 0) {
        closing_drop(b->closing_fds);
        free(b);
        return -ENOMEM;
    }
    (void)uv_idle_init(b->loop, &b->turn); /* can't fail */
    b->turn.data = b;
    *out = b;
    return 0;
}

static void process_close(struct shared_backend *b)
{
    if (!b)
        return;
    assert(b->under_way == 0);
    b->closing = true;
    if (!b->run)
        close_last(b);
    else
        process_run_stop(b->run);
}

static void process_op_start(struct shared_backend *b, struct shared_op *op)
{
    int err = shared_op_resolve(op), now = err < 0 ? err : answer_now(b, op);

    b->under_way++;
    turn_wanted(b);
    op->state = SHARED_OP_QUEUED;
    if (now <= 0)
        op_without(b, op, now);
    else if (op->verb == SHARED_CHECK)
        list_push_front(&b->light, &op->link);
    else
        list_push_back(moves(op) ? &b->heavy : &b->light, &op->link);
}

static bool process_cancel(struct shared_backend *b, struct shared_op *op)
{
    struct process_call *c = op->backend;

    if (op->state != SHARED_OP_BUSY) {
        list_remove(&op->link);
        if (op->state == SHARED_OP_ENDED && op->verb == SHARED_LIST)
            shared_listing_free(&op->listing); /* which nobody has been told of */
    } else if (c->stage == CALL_COPIES) {
        c->given_up = true;
        return false;
    } else if (c->stage == CALL_READY) {
        call_free(c);
    } else {
        c->op = NULL; /* the process has the span until it answers */
    }
    b->under_way--;
    return true;
}

static const char *process_reason(const struct shared_backend *b)
{
    return b->reason[0] ? b->reason : NULL;
}

static void process_stats(const struct shared_backend *b, struct shared_process_stats *out)
{
    out->starts = b->starts;
    out->ends = b->ends;
    out->kills = b->kills;
    /* Until it has been started a thread writes there. */
    out->pid = b->run && !b->run->threaded && b->run->pid > 0 ? (uint64_t)b->run->pid : 0;
    snprintf(out->name, sizeof(out->name), "%s", b->run ? b->run->name : "");
}

const struct shared_backend_ops shared_process = {.open = process_open,
                                                  .close = process_close,
                                                  .start = process_op_start,
                                                  .cancel = process_cancel,
                                                  .reason = process_reason,
                                                  .process = process_stats};
