/* sequence.open, sequence.close: blocks of one prefix, named once. sequence_append.c brings the
 * blocks.
 *
 * A sequence leases each base block and holds the summaries that are in DRAM, so that selections
 * need no look at the cache. It ends with its connection, when it is closed, or when nothing used
 * it for its lease's time; then its blocks go in iterations of the event loop. */
#include "daemon/request/transfer.h"
#include "daemon/retrieval/summary.h"

#include <stdlib.h>
#include <string.h>

#define BLOCKS_MIN 256
/* Blocks of a closing sequence that go in one iteration of the event loop. */
#define CLOSE_BLOCKS_PER_TURN 8192

static struct request_modules *modules_of(const struct sequence *ch)
{
    return &ch->s->rq->modules;
}

void sequence_held_add(const struct sequence *ch, int64_t summaries)
{
    uint64_t bytes = sequence_slot_bytes(ch);

    if (summaries < 0)
        limit_give(ch->s->peer.owner, LIMIT_SUMMARIES, (uint64_t)-summaries * bytes);
    else /* sequence_may_hold allowed them */
        limit_add(ch->s->peer.owner, LIMIT_SUMMARIES, (uint64_t)summaries * bytes);
    modules_of(ch)->metrics->summaries_held_bytes =
        limits_used(modules_of(ch)->limits, LIMIT_SUMMARIES);
}

uint32_t sequence_may_hold(const struct sequence *ch)
{
    return (uint32_t)(limit_room(ch->s->peer.owner, LIMIT_SUMMARIES) / sequence_slot_bytes(ch));
}

void sequence_keep(struct sequence *ch, uint32_t at, block_ref summary)
{
    struct cache *c = modules_of(ch)->cache;
    struct span span;

    if (sequence_may_hold(ch) == 0 || span_part(c, summary, ch->part, &span) != 0) {
        cache_put(c, summary, ch->part);
        return;
    }
    ch->summaries->at[at] = span.origin;
    ch->blocks[at].summary = summary;
    cache_ref_lasting(c, summary, ch->part);
    sequence_held_add(ch, 1);
}

/* ---- memory ---- */

static bool sequence_memory_take(struct session *s, size_t bytes)
{
    if (limit_take(s->peer.owner, LIMIT_SEQUENCES, bytes, NULL) != 0)
        return false;
    if (memory_take(s, bytes))
        return true;
    limit_give(s->peer.owner, LIMIT_SEQUENCES, bytes);
    return false;
}

static void sequence_memory_return(struct session *s, size_t bytes)
{
    limit_give(s->peer.owner, LIMIT_SEQUENCES, bytes);
    memory_return(s, bytes);
}

static void *sequence_alloc(struct session *s, size_t bytes)
{
    bool taken = sequence_memory_take(s, bytes);
    void *memory = taken ? calloc(1, bytes) : NULL;

    if (taken && !memory)
        sequence_memory_return(s, bytes);
    return memory;
}

void sequence_summaries_unref(struct sequence_summaries *d)
{
    if (!d || --d->refs > 0)
        return;
    sequence_memory_return(d->s, sizeof(*d) + d->cap * sizeof(d->at[0]));
    free(d);
}

static struct sequence_summaries *summaries_new(struct session *s, uint32_t cap)
{
    struct sequence_summaries *d = sequence_alloc(s, sizeof(*d) + cap * sizeof(d->at[0]));

    if (!d)
        return NULL;
    d->s = s;
    d->refs = 1;
    d->cap = cap;
    return d;
}

static bool blocks_resize(struct sequence *ch, uint32_t cap)
{
    size_t bytes = cap * sizeof(*ch->blocks);
    struct sequence_block *blocks;

    if (!sequence_memory_take(ch->s, bytes))
        return false;
    blocks = realloc(ch->blocks, bytes);
    if (!blocks) {
        sequence_memory_return(ch->s, bytes);
        return false;
    }
    sequence_memory_return(ch->s, ch->cap * sizeof(*ch->blocks));
    ch->blocks = blocks;
    ch->cap = cap;
    return true;
}

/* Selections under way go on with the array that they have. */
static bool summaries_resize(struct sequence *ch, uint32_t cap)
{
    struct sequence_summaries *d = summaries_new(ch->s, cap);

    if (!d)
        return false;
    if (ch->summaries)
        memcpy(d->at, ch->summaries->at, ch->appended * sizeof(d->at[0]));
    sequence_summaries_unref(ch->summaries);
    ch->summaries = d;
    return true;
}

int sequence_reserve(struct call *call, struct sequence *ch, uint32_t n)
{
    uint32_t cap = ch->cap > BLOCKS_MIN ? ch->cap : BLOCKS_MIN;

    if (ch->n + n > UCM_MAX_SEQUENCE_BLOCKS)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "this sequence has %u blocks; with %u more it would have over %u",
                             ch->n, n, UCM_MAX_SEQUENCE_BLOCKS);
    while (cap < ch->n + n)
        cap *= 2;
    if ((cap > ch->cap && !blocks_resize(ch, cap)) ||
        ((!ch->summaries || cap > ch->summaries->cap) && !summaries_resize(ch, cap)))
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "sequences take as much memory as they may, of half of "
                             "limits.frame_memory, or this uid's "
                             "and tenant's do, three times what they leave free; close some");
    return 0;
}

void sequence_trim(struct sequence *ch)
{
    uint32_t cap = BLOCKS_MIN;

    if (ch->n == 0) {
        sequence_summaries_unref(ch->summaries);
        free(ch->blocks);
        sequence_memory_return(ch->s, ch->cap * sizeof(*ch->blocks));
        ch->summaries = NULL;
        ch->blocks = NULL;
        ch->cap = 0;
        return;
    }
    while (cap < ch->n)
        cap *= 2;
    if (cap < ch->cap && blocks_resize(ch, cap))
        summaries_resize(ch, cap); /* else it stays as it is */
}

/* ---- the end ---- */

static void sequence_free(struct sequence *ch)
{
    struct session *s = ch->s;
    struct request *close = ch->close;

    sequence_memory_return(s, sizeof(*ch) + ch->cap * sizeof(*ch->blocks));
    sequence_summaries_unref(ch->summaries);
    free(ch->blocks);
    space_unref(ch->space);
    free(ch);
    session_retrieval(s)->n_sequences--;
    s->rq->modules.metrics->sequences--;
    if (close)
        request_end(close, NULL, NULL);
    else if (!session_retrieval(s)->ending)
        s->settle_cb(s);
}

/* False: the rest waits for the next iteration of the event loop. */
static bool blocks_drop(struct sequence *ch)
{
    struct cache *c = modules_of(ch)->cache;

    for (uint32_t i = 0; ch->appended > 0; i++) {
        const struct sequence_block *b = &ch->blocks[ch->appended - 1];

        if (i == CLOSE_BLOCKS_PER_TURN)
            return false;
        ch->appended--;
        leased_add(ch->s, -1);
        modules_of(ch)->metrics->sequence_blocks--;
        if (b->summary != 0) {
            cache_unref_lasting(c, b->summary, ch->part);
            sequence_held_add(ch, -1);
        }
        cache_unlease(c, b->base);
    }
    return true;
}

static void sequence_drain(struct sequence *ch)
{
    if (ch->users > 0 || !list_empty(&ch->retry.link))
        return;
    if (retrieval_of(ch->s->rq)->refs.end_cb(ch) && blocks_drop(ch))
        sequence_free(ch);
    else
        (void)cache_wait_for(modules_of(ch)->cache, &ch->retry, WAIT_TURN);
}

static void drain_cb(struct cache_retry *r)
{
    sequence_drain(LIST_ENTRY(r, struct sequence, retry));
}

/* Nobody finds it any more. It is drained when the requests that use it have ended. */
static void sequence_end(struct sequence *ch)
{
    ch->closing = true;
    table_remove(&session_retrieval(ch->s)->sequences, ch->number);
    deadline_disarm(modules_of(ch)->deadlines, &ch->deadline);
    ch->users++;
    if (ch->append)
        transfer_stop_cb(&ch->append->r);
    retrieval_of(ch->s->rq)->refs.stop_cb(ch);
    ch->users--;
    sequence_drain(ch);
}

static void sequence_expired_cb(struct deadline *d);

static void sequence_renew(struct sequence *ch)
{
    deadline_arm(modules_of(ch)->deadlines, &ch->deadline,
                 uv_now(modules_of(ch)->loop) + ch->lease_ms, sequence_expired_cb);
}

static void sequence_expired_cb(struct deadline *d)
{
    struct sequence *ch = LIST_ENTRY(d, struct sequence, deadline);

    if (ch->users > 0 || !list_empty(&ch->refs)) {
        sequence_renew(ch);
        return;
    }
    modules_of(ch)->metrics->sequences_expired++;
    sequence_end(ch);
}

void sequence_ref(struct sequence *ch)
{
    ch->users++;
    sequence_renew(ch);
}

void sequence_unref(struct sequence *ch)
{
    ch->users--;
    if (ch->closing)
        sequence_drain(ch);
    else
        sequence_renew(ch);
}

bool sequences_close_all(struct session *s)
{
    uint32_t number, blocks = 0;

    session_retrieval(s)->ending = true;
    while (blocks < CLOSE_BLOCKS_PER_TURN &&
           (number = table_next(&session_retrieval(s)->sequences, 0)) != 0) {
        struct sequence *ch = table_get(&session_retrieval(s)->sequences, number);

        blocks += ch->appended + 1;
        sequence_end(ch);
    }
    session_retrieval(s)->ending = false;
    if (table_count(&session_retrieval(s)->sequences) > 0)
        (void)cache_wait_for(s->rq->modules.cache, &s->retry, WAIT_TURN);
    return session_retrieval(s)->n_sequences == 0;
}

/* ---- by name ---- */

struct sequence *call_sequence(struct call *call, uint64_t name)
{
    struct sequence *ch = table_get(&session_retrieval(call->s)->sequences, name & SESSION_NUMBERS);

    if (ch && ch->name == name)
        return ch;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "sequence %llu is not open on this connection; it may have been unused for its "
                  "lease_ms",
                  (unsigned long long)name);
    return NULL;
}

bool sequence_deleting(const struct sequence *ch)
{
    return cache_deletions(modules_of(ch)->cache) != ch->deletions;
}

bool sequence_has(const struct sequence *ch, uint32_t block)
{
    return !sequence_deleting(ch) || !cache_deleting(modules_of(ch)->cache, ch->blocks[block].base);
}

static struct sequence *sequence_new(struct call *call, struct derived_space *space)
{
    struct session *s = call->s;
    struct sequence *ch = sequence_alloc(s, sizeof(*ch));

    if (!ch) {
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a sequence");
        return NULL;
    }
    ch->number = table_add(&session_retrieval(s)->sequences, ch);
    if (ch->number == 0) {
        sequence_memory_return(s, sizeof(*ch));
        free(ch);
        ucm_error_set(&call->error, UCM_WIRE_BUSY,
                      "this connection has %u sequences, as many as one may have; close some",
                      table_count(&session_retrieval(s)->sequences));
        return NULL;
    }
    ch->s = s;
    ch->name = session_name(&session_retrieval(s)->sequence_names, ch->number);
    ch->space = space_ref(space);
    list_init(&ch->refs);
    list_init(&ch->retry.link);
    ch->retry.retry_cb = drain_cb;
    session_retrieval(s)->n_sequences++;
    s->rq->modules.metrics->sequences++;
    return ch;
}

int method_sequence_open(struct call *call)
{
    const struct msg_sequence_open *m = &call->params.sequence_open;
    struct derived_space *space = call_space(call, m->ns);
    uint64_t most_ms = call->s->rq->modules.config->lease_max_ms;
    struct sequence *ch;

    if (!space)
        return -call->error.code;
    if (call->s->rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (m->part >= space->derived->identity.parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "part: %llu; this namespace has %u",
                             (unsigned long long)m->part, space->derived->identity.parts);
    ch = sequence_new(call, space);
    if (!ch)
        return -call->error.code;
    ch->part = (uint32_t)m->part;
    ch->deletions = cache_deletions(call->s->rq->modules.cache);
    ch->lease_ms = m->lease_ms && m->lease_ms < most_ms ? m->lease_ms : most_ms;
    sequence_renew(ch);
    return call_reply(call, &(struct msg_sequence){ch->name});
}

/* The draining of a sequence can't be stopped, and ends soon. */
static void close_stop_cb(struct request *r)
{
    (void)r;
}

int method_sequence_close(struct call *call)
{
    struct sequence *ch = call_sequence(call, call->params.sequence.sequence);

    if (!ch)
        return -call->error.code;
    call->gives_back = true;
    ch->close = request_new(call, sizeof(*ch->close), 0, 0, close_stop_cb);
    if (!ch->close)
        return -call->error.code;
    sequence_end(ch);
    return 0;
}
