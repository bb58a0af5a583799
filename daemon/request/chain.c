/* chain.open, chain.append, chain.close: blocks of one prefix, named once.
 *
 * A chain leases each base block and holds the digests that are in DRAM, so that selections need no
 * look at the cache. It ends with its connection, when it is closed, or when nothing used it for its
 * lease's time; then its blocks go in turns of the loop. */
#include "daemon/request/digest.h"
#include "daemon/request/encoding.h"
#include "daemon/request/transfer.h"

#include <stdlib.h>
#include <string.h>

/* Chains hold digests up to this fraction of the arena. */
#define HELD_FRACTION 4
/* And take up to this fraction of limits.frame_memory, so that requests find some. */
#define MEMORY_FRACTION 2
#define BLOCKS_MIN 256
/* In one turn of the loop: keys that an append looks for, blocks of a closing chain that go. */
#define APPEND_KEYS_PER_TURN 4096
#define CLOSE_BLOCKS_PER_TURN 8192

static struct request_rooms *rooms_of(const struct chain *ch)
{
    return &ch->s->rq->rooms;
}

static uint64_t digest_slot_bytes(const struct chain *ch)
{
    return arena_padded(ns_part_bytes(ch->space->derived, ch->part));
}

static void held_add(struct session *s, int64_t bytes)
{
    struct digests *ds = &s->rq->digests;

    ds->held_bytes += (uint64_t)bytes;
    s->user->held_bytes += (uint64_t)bytes;
    s->rq->rooms.metrics->digest_held_bytes = ds->held_bytes;
}

/* ---- memory ---- */

static bool chain_memory_take(struct session *s, size_t bytes)
{
    struct digests *ds = &s->rq->digests;

    if (ds->chain_memory + bytes > s->rq->rooms.config->max_frame_memory / MEMORY_FRACTION ||
        !memory_take(s->rq, s, bytes))
        return false;
    ds->chain_memory += bytes;
    return true;
}

static void chain_memory_return(struct session *s, size_t bytes)
{
    s->rq->digests.chain_memory -= bytes;
    memory_return(s->rq, s, bytes);
}

void chain_digests_unref(struct chain_digests *d)
{
    if (!d || --d->refs > 0)
        return;
    chain_memory_return(d->s, sizeof(*d) + d->cap * sizeof(d->at[0]));
    free(d);
}

static struct chain_digests *digests_new(struct session *s, uint32_t cap)
{
    size_t memory = sizeof(struct chain_digests) + cap * sizeof(void *);
    struct chain_digests *d;

    if (!chain_memory_take(s, memory))
        return NULL;
    d = malloc(memory);
    if (!d) {
        chain_memory_return(s, memory);
        return NULL;
    }
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
static bool digests_resize(struct chain *ch, uint32_t cap)
{
    struct chain_digests *d = digests_new(ch->s, cap);

    if (!d)
        return false;
    if (ch->digests)
        memcpy(d->at, ch->digests->at, ch->appended * sizeof(d->at[0]));
    chain_digests_unref(ch->digests);
    ch->digests = d;
    return true;
}

static int chain_reserve(struct call *call, struct chain *ch, uint32_t n)
{
    uint32_t cap = ch->cap > BLOCKS_MIN ? ch->cap : BLOCKS_MIN;

    if (ch->n + n > UCM_MAX_CHAIN_BLOCKS)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "this chain has %u blocks; with %u more it would have over %u", ch->n,
                             n, UCM_MAX_CHAIN_BLOCKS);
    while (cap < ch->n + n)
        cap *= 2;
    if ((cap > ch->cap && !blocks_resize(ch, cap)) ||
        ((!ch->digests || cap > ch->digests->cap) && !digests_resize(ch, cap)))
        return ucm_error_set(
            &call->error, UCM_WIRE_BUSY,
            "chains take as much memory as they may: half of limits.frame_memory, or "
            "this user's three quarters of it; close some");
    return 0;
}

/* An append reserved for all of its keys. Gives back what missing blocks left unused. */
static void chain_trim(struct chain *ch)
{
    uint32_t cap = BLOCKS_MIN;

    if (ch->n == 0) {
        chain_digests_unref(ch->digests);
        free(ch->blocks);
        chain_memory_return(ch->s, ch->cap * sizeof(*ch->blocks));
        ch->digests = NULL;
        ch->blocks = NULL;
        ch->cap = 0;
        return;
    }
    while (cap < ch->n)
        cap *= 2;
    if (cap < ch->cap && blocks_resize(ch, cap))
        digests_resize(ch, cap); /* else it stays as it is */
}

/* ---- the end ---- */

static void chain_free(struct chain *ch)
{
    struct session *s = ch->s;
    struct request *close = ch->close;

    chain_memory_return(s, sizeof(*ch) + ch->cap * sizeof(*ch->blocks));
    chain_digests_unref(ch->digests);
    free(ch->blocks);
    space_unref(ch->space);
    free(ch);
    s->n_chains--;
    s->rq->rooms.metrics->chains--;
    if (close)
        request_end(close, NULL, NULL);
    else if (!s->chains_ending)
        session_settle(s);
}

/* False: the rest waits for the next turn of the loop. */
static bool blocks_drop(struct chain *ch)
{
    struct cache *c = rooms_of(ch)->cache;

    for (uint32_t i = 0; ch->appended > 0; i++) {
        const struct chain_block *b = &ch->blocks[ch->appended - 1];

        if (i == CLOSE_BLOCKS_PER_TURN)
            return false;
        ch->appended--;
        leased_add(ch->s, -1);
        rooms_of(ch)->metrics->chain_blocks--;
        if (b->digest != 0) {
            cache_unhold(c, b->digest, ch->part);
            held_add(ch->s, -(int64_t)digest_slot_bytes(ch));
        }
        cache_unlease(c, b->base);
    }
    return true;
}

static void chain_drain(struct chain *ch)
{
    if (ch->users > 0 || !list_empty(&ch->retry.link))
        return;
    if (blocks_drop(ch))
        chain_free(ch);
    else
        cache_next_turn(rooms_of(ch)->cache, &ch->retry);
}

static void drain_cb(struct cache_retry *r)
{
    chain_drain(LIST_ENTRY(r, struct chain, retry));
}

/* Nobody finds it any more. It is drained when the requests that use it have ended. */
static void chain_end(struct chain *ch)
{
    ch->closing = true;
    table_remove(&ch->s->chains, ch->number);
    deadline_disarm(rooms_of(ch)->deadlines, &ch->deadline);
    ch->users++;
    if (ch->append)
        transfer_stop_cb(&ch->append->r);
    ch->users--;
    chain_drain(ch);
}

static void chain_expired_cb(struct deadline *d);

static void chain_renew(struct chain *ch)
{
    deadline_arm(rooms_of(ch)->deadlines, &ch->deadline, uv_now(rooms_of(ch)->loop) + ch->lease_ms,
                 chain_expired_cb);
}

static void chain_expired_cb(struct deadline *d)
{
    struct chain *ch = LIST_ENTRY(d, struct chain, deadline);

    if (ch->users > 0) {
        chain_renew(ch);
        return;
    }
    rooms_of(ch)->metrics->chains_expired++;
    chain_end(ch);
}

void chain_use(struct chain *ch)
{
    ch->users++;
    chain_renew(ch);
}

void chain_unuse(struct chain *ch)
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

    s->chains_ending = true;
    while (blocks < CLOSE_BLOCKS_PER_TURN && (number = table_next(&s->chains, 0)) != 0) {
        struct chain *ch = table_get(&s->chains, number);

        blocks += ch->appended + 1;
        chain_end(ch);
    }
    s->chains_ending = false;
    if (table_count(&s->chains) > 0)
        cache_next_turn(s->rq->rooms.cache, &s->retry);
    return s->n_chains == 0;
}

/* ---- by name ---- */

struct chain *call_chain(struct call *call, uint64_t name)
{
    struct chain *ch = table_get(&call->s->chains, session_number(name));

    if (ch && ch->name == name)
        return ch;
    ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                  "chain %llu is not open on this connection; it may have been unused for its "
                  "lease_ms",
                  (unsigned long long)name);
    return NULL;
}

bool chain_has(const struct chain *ch, uint32_t block)
{
    struct cache *c = rooms_of(ch)->cache;

    return cache_dooms(c) == ch->dooms || !cache_doomed(c, ch->blocks[block].base);
}

static struct chain *chain_new(struct call *call, struct derived_space *space)
{
    struct session *s = call->s;
    struct chain *ch = NULL;

    if (chain_memory_take(s, sizeof(*ch))) {
        ch = calloc(1, sizeof(*ch));
        if (!ch)
            chain_memory_return(s, sizeof(*ch));
    }
    if (!ch) {
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a chain");
        return NULL;
    }
    ch->number = table_add(&s->chains, ch);
    if (ch->number == 0) {
        chain_memory_return(s, sizeof(*ch));
        free(ch);
        ucm_error_set(&call->error, UCM_WIRE_BUSY,
                      "this connection has %u chains, as many as one may have; close some",
                      table_count(&s->chains));
        return NULL;
    }
    ch->s = s;
    ch->name = session_name(&s->chain_names, ch->number);
    ch->space = space_ref(space);
    list_init(&ch->retry.link);
    ch->retry.retry_cb = drain_cb;
    s->n_chains++;
    s->rq->rooms.metrics->chains++;
    return ch;
}

int method_chain_open(struct call *call)
{
    const struct msg_chain_open *m = &call->params.chain_open;
    struct derived_space *space = call_space(call, m->ns);
    uint64_t most_ms = call->s->rq->rooms.config->lease_max_ms;
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
    ch->dooms = cache_dooms(call->s->rq->rooms.cache);
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
    ch->close = request_new(call, sizeof(*ch->close), 0, close_stop_cb);
    if (!ch->close)
        return -call->error.code;
    chain_end(ch);
    return 0;
}

/* ---- chain.append ---- */

/* Finds the blocks of n keys up to the first that is not there, and leases them: how many. */
static uint32_t bases_lease(struct chain *ch, const uint8_t *keys, uint32_t n, block_ref *refs,
                            uint8_t *tiers)
{
    const struct encoded_ns *en = session_encoded(ch->s, ch->space->base);
    struct index *ix = rooms_of(ch)->index;
    struct cache *c = rooms_of(ch)->cache;
    uint32_t found = 0, end;

    if (!en) {
        index_find_many(ix, ch->space->base, keys, n, true, refs);
        return cache_lease_found(c, ch->space->base, refs, n, tiers);
    }
    encoded_find(en, keys, n, true, false, refs);
    for (; found < n && refs[found] != 0; found = end) {
        bool plain = encoded_is_plain(en, refs[found]);

        for (end = found; end < n && refs[end] != 0 && encoded_is_plain(en, refs[end]) == plain;)
            end++;
        end = found + cache_lease_found(c, plain ? en->base : en->coded, refs + found, end - found,
                                        tiers + found);
        if (end == found)
            break;
    }
    return found;
}

static bool chain_bypassed(const struct chain *ch)
{
    return encoded_bypassed(ch->s->rq, ch->space->base, session_encoded(ch->s, ch->space->base));
}

/* Appends the blocks of keys [from, from + n) up to the first that is not found. Returns how many. */
static uint32_t bases_append(struct transfer *t, uint32_t from, uint32_t n)
{
    static const uint8_t status[] = {[CACHE_DRAM] = UCM_LOOKUP_DRAM,
                                     [CACHE_NVME] = UCM_LOOKUP_NVME,
                                     [CACHE_SHARE] = UCM_LOOKUP_SHARED};
    struct chain *ch = t->chain;
    uint8_t *tiers = t->found + from;
    uint32_t found;

    if (chain_bypassed(ch)) {
        rooms_of(ch)->metrics->bypass_lookup_keys += n;
        return 0;
    }
    found = bases_lease(ch, t->keys + (size_t)from * t->ns->identity.key_bytes, n, t->blocks + from,
                        tiers);
    for (uint32_t i = 0; i < found; i++) {
        tiers[i] = status[tiers[i]];
        ch->blocks[ch->appended + i] = (struct chain_block){t->blocks[from + i], 0};
    }
    rooms_of(ch)->metrics->chain_blocks += found;
    return found;
}

/* How many more digests chains may hold. */
static uint32_t may_hold(const struct chain *ch)
{
    const struct requests *rq = ch->s->rq;
    uint64_t most = arena_bytes_configured(rq->rooms.arena) / HELD_FRACTION;
    uint64_t of_user = user_most(ch->s, most), held = rq->digests.held_bytes;
    uint64_t left = held < most ? most - held : 0;

    held = ch->s->user->held_bytes;
    of_user = held < of_user ? of_user - held : 0;
    return (uint32_t)((left < of_user ? left : of_user) / digest_slot_bytes(ch));
}

/* Holds those of the digests that are in DRAM; the others are the transfer's, leased. Of `found` keys
 * whose bases were just appended. */
static void digests_take(struct transfer *t, uint32_t from, uint32_t found)
{
    struct chain *ch = t->chain;
    struct cache *c = cache_of(t);
    const void **memory = &ch->digests->at[ch->appended];
    uint32_t held = cache_hold_ready(c, t->refs + from, found, ch->part, may_hold(ch), memory);

    held_add(ch->s, (int64_t)(held * digest_slot_bytes(ch)));
    cache_touch(c, t->ns, t->refs + from, found);
    for (uint32_t i = 0; i < found; i++) {
        block_ref *ref = &t->refs[from + i];

        if (memory[i]) {
            ch->blocks[ch->appended + i].digest = *ref;
            *ref = 0;
        } else if (*ref != 0 && !cache_doomed(c, *ref)) {
            cache_lease(c, *ref);
        } else {
            *ref = 0;
        }
    }
}

/* Makes blocks for digests that are to be built. Only when all that were found are held: a new block
 * may take the place of one that is not. */
static void digests_make(struct transfer *t, uint32_t from, uint32_t found)
{
    uint32_t key_bytes = t->ns->identity.key_bytes;

    for (uint32_t i = from; i < from + found; i++)
        if (t->refs[i] == 0 && t->chain->blocks[t->chain_first + i].digest == 0)
            t->refs[i] = cache_open(cache_of(t), t->ns, t->keys + (size_t)i * key_bytes);
}

bool append_open(struct transfer *t)
{
    uint32_t from = t->opened, n = t->n_keys - from, found;

    n = n < APPEND_KEYS_PER_TURN ? n : APPEND_KEYS_PER_TURN;
    found = bases_append(t, from, n);
    index_find_many(t->r.s->rq->rooms.index, t->ns,
                    t->keys + (size_t)from * t->ns->identity.key_bytes, n, false, t->refs + from);
    digests_take(t, from, found);
    if (t->build)
        digests_make(t, from, found);
    t->chain->appended += found;
    for (uint32_t i = from + found; i < from + n; i++) {
        t->r.s->rq->rooms.metrics->digest_orphans += t->refs[i] != 0 && !chain_bypassed(t->chain);
        t->refs[i] = 0;
    }
    t->opened = found == n ? from + n : t->n_keys;
    while (t->cursor < t->opened && t->refs[t->cursor] == 0)
        t->cursor++;
    return t->opened == t->n_keys;
}

bool append_may_hold(const struct transfer *t)
{
    return may_hold(t->chain) > 0;
}

void append_hold(struct transfer *t, uint32_t item)
{
    struct chain *ch = t->chain;
    struct cache *c = cache_of(t);
    uint32_t at = t->chain_first + item;

    if (!append_may_hold(t)) {
        cache_put(c, t->refs[item], ch->part);
        return;
    }
    ch->digests->at[at] = cache_memory(c, t->refs[item], ch->part);
    ch->blocks[at].digest = t->refs[item];
    cache_hold(c, t->refs[item], ch->part);
    held_add(ch->s, (int64_t)digest_slot_bytes(ch));
}

/* Counts what came, and makes it seen. */
static void append_count(struct transfer *t, struct msg_chain_append_r *r)
{
    struct chain *ch = t->chain;
    uint32_t n = ch->appended - t->chain_first;

    for (uint32_t i = 0; i < n; i++) {
        r->dram += t->found[i] == UCM_LOOKUP_DRAM;
        r->nvme += t->found[i] == UCM_LOOKUP_NVME;
        r->shared += t->found[i] == UCM_LOOKUP_SHARED;
        if (ch->blocks[t->chain_first + i].digest == 0)
            continue;
        t->found[i] |= UCM_CHAIN_DIGEST;
        r->digests++;
    }
    ch->n = ch->appended;
    ch->n_digests += (uint32_t)r->digests;
    leased_add(ch->s, (int64_t)n - t->n_keys);
    r->blocks = ch->n;
    r->missing = t->n_keys - n;
    r->built = t->built;
    r->status = (struct proto_bin){t->found, t->n_keys};
    rooms_of(ch)->metrics->digest_missing += n - r->digests;
}

void append_finish(struct transfer *t)
{
    struct chain *ch = t->chain;
    struct msg_chain_append_r r = {0};

    append_count(t, &r);
    chain_trim(ch);
    ch->append = NULL;
    chain_unuse(ch);
    request_end(&t->r, NULL, &r);
}

/* What the append may need of the connection's and the daemon's bounds. */
static int append_check(struct call *call, struct chain *ch, uint32_t n)
{
    if (ch->append)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this chain has an append under way; one at a time");
    if (call->s->leased_keys + n > SESSION_MAX_LEASED_KEYS)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection's leases and chains cover %u keys, at most %u may "
                             "be; release some",
                             call->s->leased_keys, SESSION_MAX_LEASED_KEYS);
    if (leased_check(call) != 0)
        return -call->error.code;
    return chain_reserve(call, ch, n);
}

int method_chain_append(struct call *call)
{
    const struct msg_chain_append *m = &call->params.chain_append;
    struct chain *ch = call_chain(call, m->chain);
    uint32_t n = ch ? call_keys(call, ch->space->derived, m->keys) : 0;
    struct transfer *t;

    if (n == 0 || (m->build && space_builds(call, ch->space->base) != 0) ||
        append_check(call, ch, n) != 0)
        return -call->error.code;
    t = transfer_new(call, TRANSFER_HOLD, ch->space->derived, n, m->deadline_ms, 0);
    if (!t)
        return -call->error.code;
    t->space = ch->space;
    t->chain = ch;
    t->chain_first = ch->n;
    t->build = m->build;
    t->part = ch->part;
    t->priority = (uint8_t)m->priority;
    memcpy(t->keys, m->keys.p, m->keys.n);
    ch->append = t;
    chain_use(ch);
    leased_add(call->s, n);
    digests_look(t);
    return 0;
}
