/* chain.open, chain.close: blocks of one prefix, named once. chain_append.c brings the blocks.
 *
 * A chain leases each base block and holds the summaries that are in DRAM, so that selections need
 * no look at the cache. It ends with its connection, when it is closed, or when nothing used it for
 * its lease's time; then its blocks go in iterations of the event loop. */
#include "daemon/request/walk.h"
#include "daemon/retrieval/summary.h"

#include <stdlib.h>
#include <string.h>

#define BLOCKS_MIN 256
/* Blocks of a closing chain that go in one iteration of the event loop. */
#define CLOSE_BLOCKS_PER_TURN 8192

static struct request_modules *modules_of(const struct chain *ch)
{
    return &ch->s->rq->modules;
}

void chain_held_add(const struct chain *ch, int64_t summaries)
{
    uint64_t bytes = chain_slot_bytes(ch);

    if (summaries < 0)
        limit_give(ch->s->peer.owner, LIMIT_SUMMARIES, (uint64_t)-summaries * bytes);
    else /* chain_may_hold allowed them */
        limit_add(ch->s->peer.owner, LIMIT_SUMMARIES, (uint64_t)summaries * bytes);
    modules_of(ch)->metrics->summary_held_bytes =
        limits_used(modules_of(ch)->limits, LIMIT_SUMMARIES);
}

uint32_t chain_may_hold(const struct chain *ch)
{
    return (uint32_t)(limit_room(ch->s->peer.owner, LIMIT_SUMMARIES) / chain_slot_bytes(ch));
}

void chain_keep(struct chain *ch, uint32_t at, block_ref summary)
{
    struct cache *c = modules_of(ch)->cache;
    struct span span;

    if (chain_may_hold(ch) == 0 || span_part(c, summary, ch->part, &span) != 0) {
        cache_put(c, summary, ch->part);
        return;
    }
    ch->summaries->at[at] = span.origin;
    ch->blocks[at].summary = summary;
    cache_ref_lasting(c, summary, ch->part);
    chain_held_add(ch, 1);
}

/* ---- memory ---- */

static bool chain_memory_take(struct session *s, size_t bytes)
{
    if (limit_take(s->peer.owner, LIMIT_CHAINS, bytes, NULL) != 0)
        return false;
    if (memory_take(s, bytes))
        return true;
    limit_give(s->peer.owner, LIMIT_CHAINS, bytes);
    return false;
}

static void chain_memory_return(struct session *s, size_t bytes)
{
    limit_give(s->peer.owner, LIMIT_CHAINS, bytes);
    memory_return(s, bytes);
}

static void *chain_alloc(struct session *s, size_t bytes)
{
    bool taken = chain_memory_take(s, bytes);
    void *memory = taken ? calloc(1, bytes) : NULL;

    if (taken && !memory)
        chain_memory_return(s, bytes);
    return memory;
}

void chain_summaries_unref(struct chain_summaries *d)
{
    if (!d || --d->refs > 0)
        return;
    chain_memory_return(d->s, sizeof(*d) + d->cap * sizeof(d->at[0]));
    free(d);
}

static struct chain_summaries *summaries_new(struct session *s, uint32_t cap)
{
    struct chain_summaries *d = chain_alloc(s, sizeof(*d) + cap * sizeof(d->at[0]));

    if (!d)
        return NULL;
    d->s = s;
    d->refs = 1;
    d->cap = cap;
    return d;
}

static bool blocks_resize(struct chain *ch, uint32_t cap)
{
    size_t bytes = cap * sizeof(*ch->blocks);
    struct chain_block *blocks;

    if (!chain_memory_take(ch->s, bytes))
        return false;
    blocks = realloc(ch->blocks, bytes);
    if (!blocks) {
        chain_memory_return(ch->s, bytes);
        return false;
    }
    chain_memory_return(ch->s, ch->cap * sizeof(*ch->blocks));
    ch->blocks = blocks;
    ch->cap = cap;
    return true;
}

/* Selections under way go on with the array that they have. */
static bool summaries_resize(struct chain *ch, uint32_t cap)
{
    struct chain_summaries *d = summaries_new(ch->s, cap);

    if (!d)
        return false;
    if (ch->summaries)
        memcpy(d->at, ch->summaries->at, ch->appended * sizeof(d->at[0]));
    chain_summaries_unref(ch->summaries);
    ch->summaries = d;
    return true;
}

int chain_reserve(struct call *call, struct chain *ch, uint32_t n)
{
    uint32_t cap = ch->cap > BLOCKS_MIN ? ch->cap : BLOCKS_MIN;

    if (ch->n + n > UCM_MAX_CHAIN_BLOCKS)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "this chain has %u blocks; with %u more it would have over %u", ch->n,
                             n, UCM_MAX_CHAIN_BLOCKS);
    while (cap < ch->n + n)
        cap *= 2;
    if ((cap > ch->cap && !blocks_resize(ch, cap)) ||
        ((!ch->summaries || cap > ch->summaries->cap) && !summaries_resize(ch, cap)))
        return ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "chains take as much memory as they may, of half of limits.frame_memory, or this uid's "
            "and tenant's do, three times what they leave free; close some");
    return 0;
}

void chain_trim(struct chain *ch)
{
    uint32_t cap = BLOCKS_MIN;

    if (ch->n == 0) {
        chain_summaries_unref(ch->summaries);
        free(ch->blocks);
        chain_memory_return(ch->s, ch->cap * sizeof(*ch->blocks));
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

static void chain_free(struct chain *ch)
{
    struct session *s = ch->s;
    struct request *close = ch->close;

    chain_memory_return(s, sizeof(*ch) + ch->cap * sizeof(*ch->blocks));
    chain_summaries_unref(ch->summaries);
    free(ch->blocks);
    space_unref(ch->space);
    free(ch);
    session_retrieval(s)->n_chains--;
    s->rq->modules.metrics->chains--;
    if (close)
        request_end(close, NULL, NULL);
    else if (!session_retrieval(s)->ending)
        s->settle_cb(s);
}

/* False: the rest waits for the next iteration of the event loop. */
static bool blocks_drop(struct chain *ch)
{
    struct cache *c = modules_of(ch)->cache;

    for (uint32_t i = 0; ch->appended > 0; i++) {
        const struct chain_block *b = &ch->blocks[ch->appended - 1];

        if (i == CLOSE_BLOCKS_PER_TURN)
            return false;
        ch->appended--;
        leased_add(ch->s, -1);
        modules_of(ch)->metrics->chain_blocks--;
        if (b->summary != 0) {
            cache_unref_lasting(c, b->summary, ch->part);
            chain_held_add(ch, -1);
        }
        cache_unlease(c, b->base);
    }
    return true;
}

static void chain_drain(struct chain *ch)
{
    if (ch->users > 0 || !list_empty(&ch->retry.link))
        return;
    if (retrieval_of(ch->s->rq)->pins.end_cb(ch) && blocks_drop(ch))
        chain_free(ch);
    else
        (void)cache_wait_for(modules_of(ch)->cache, &ch->retry, WAIT_TURN);
}

static void drain_cb(struct cache_retry *r)
{
    chain_drain(LIST_ENTRY(r, struct chain, retry));
}

/* Nobody finds it any more. It is drained when the requests that use it have ended. */
static void chain_end(struct chain *ch)
{
    ch->closing = true;
    table_remove(&session_retrieval(ch->s)->chains, ch->number);
    deadline_disarm(modules_of(ch)->deadlines, &ch->deadline);
    ch->users++;
    if (ch->append)
        walk_stop_cb(&ch->append->r);
    retrieval_of(ch->s->rq)->pins.stop_cb(ch);
    ch->users--;
    chain_drain(ch);
}

static void chain_expired_cb(struct deadline *d);

static void chain_renew(struct chain *ch)
{
    deadline_arm(modules_of(ch)->deadlines, &ch->deadline,
                 uv_now(modules_of(ch)->loop) + ch->lease_ms, chain_expired_cb);
}

static void chain_expired_cb(struct deadline *d)
{
    struct chain *ch = LIST_ENTRY(d, struct chain, deadline);

    if (ch->users > 0 || !list_empty(&ch->pins)) {
        chain_renew(ch);
        return;
    }
    modules_of(ch)->metrics->chains_expired++;
    chain_end(ch);
}

void chain_ref(struct chain *ch)
{
    ch->users++;
    chain_renew(ch);
}

void chain_unref(struct chain *ch)
{
    ch->users--;
    if (ch->closing)
        chain_drain(ch);
    else
        chain_renew(ch);
}

bool chains_close_all(struct session *s)
{
    uint32_t number, blocks = 0;

    session_retrieval(s)->ending = true;
    while (blocks < CLOSE_BLOCKS_PER_TURN &&
           (number = table_next(&session_retrieval(s)->chains, 0)) != 0) {
        struct chain *ch = table_get(&session_retrieval(s)->chains, number);

        blocks += ch->appended + 1;
        chain_end(ch);
    }
    session_retrieval(s)->ending = false;
    if (table_count(&session_retrieval(s)->chains) > 0)
        (void)cache_wait_for(s->rq->modules.cache, &s->retry, WAIT_TURN);
    return session_retrieval(s)->n_chains == 0;
}

/* ---- by name ---- */

struct chain *call_chain(struct call *call, uint64_t name)
{
    struct chain *ch = table_get(&session_retrieval(call->s)->chains, name & SESSION_NUMBERS);

    if (ch && ch->name == name)
        return ch;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "chain %llu is not open on this connection; it may have been unused for its "
                  "lease_ms",
                  (unsigned long long)name);
    return NULL;
}

bool chain_doomed(const struct chain *ch)
{
    return cache_dooms(modules_of(ch)->cache) != ch->dooms;
}

bool chain_has(const struct chain *ch, uint32_t block)
{
    return !chain_doomed(ch) || !cache_doomed(modules_of(ch)->cache, ch->blocks[block].base);
}

static struct chain *chain_new(struct call *call, struct derived_space *space)
{
    struct session *s = call->s;
    struct chain *ch = chain_alloc(s, sizeof(*ch));

    if (!ch) {
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a chain");
        return NULL;
    }
    ch->number = table_add(&session_retrieval(s)->chains, ch);
    if (ch->number == 0) {
        chain_memory_return(s, sizeof(*ch));
        free(ch);
        ucm_error_set(&call->error, UCM_WIRE_BUSY,
                      "this connection has %u chains, as many as one may have; close some",
                      table_count(&session_retrieval(s)->chains));
        return NULL;
    }
    ch->s = s;
    ch->name = session_name(&session_retrieval(s)->chain_names, ch->number);
    ch->space = space_ref(space);
    list_init(&ch->pins);
    list_init(&ch->retry.link);
    ch->retry.retry_cb = drain_cb;
    session_retrieval(s)->n_chains++;
    s->rq->modules.metrics->chains++;
    return ch;
}

int method_chain_open(struct call *call)
{
    const struct msg_chain_open *m = &call->params.chain_open;
    struct derived_space *space = call_space(call, m->ns);
    uint64_t most_ms = call->s->rq->modules.config->lease_max_ms;
    struct chain *ch;

    if (!space)
        return -call->error.code;
    if (call->s->rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (m->part >= space->derived->identity.parts)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "part: %llu; this namespace has %u",
                             (unsigned long long)m->part, space->derived->identity.parts);
    ch = chain_new(call, space);
    if (!ch)
        return -call->error.code;
    ch->part = (uint32_t)m->part;
    ch->dooms = cache_dooms(call->s->rq->modules.cache);
    ch->lease_ms = m->lease_ms && m->lease_ms < most_ms ? m->lease_ms : most_ms;
    chain_renew(ch);
    return call_reply(call, &(struct msg_chain){ch->name});
}

/* The draining of a chain can't be stopped, and ends soon. */
static void close_stop_cb(struct request *r)
{
    (void)r;
}

int method_chain_close(struct call *call)
{
    struct chain *ch = call_chain(call, call->params.chain.chain);

    if (!ch)
        return -call->error.code;
    call->gives_back = true;
    ch->close = request_new(call, sizeof(*ch->close), 0, 0, close_stop_cb);
    if (!ch->close)
        return -call->error.code;
    chain_end(ch);
    return 0;
}
