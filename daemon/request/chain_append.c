/* chain.append: finds the blocks of keys up to the first that is not there, leases them, and holds their
 * digests. What has to be read or built is a transfer; the rest of a long append waits for turns of the loop. */
#include "daemon/cache/span.h"
#include "daemon/request/digest.h"
#include "daemon/request/view.h"
#include "daemon/request/transfer.h"

#include <string.h>

/* Keys that an append looks for in one turn of the loop. */
#define APPEND_KEYS_PER_TURN 4096

static struct request_rooms *rooms_of(const struct chain *ch)
{
    return &ch->s->rq->rooms;
}

/* ---- bases and digests ---- */

/* Leases what was found for n keys up to the first that is not there: how many. */
static uint32_t bases_lease(struct chain *ch, const struct view *v, uint32_t n,
                            const block_ref *refs, uint8_t *tiers)
{
    struct index *ix = rooms_of(ch)->index;
    uint32_t found = 0, end, got;

    for (; found < n && refs[found] != 0; found += got) {
        struct ns *ns = view_ns(v, index_block(ix, refs[found]));

        for (end = found + 1; end < n && refs[end] != 0; end++)
            if (view_ns(v, index_block(ix, refs[end])) != ns)
                break;
        got = cache_lease_found(rooms_of(ch)->cache, ns, refs + found, end - found, tiers + found);
        if (got < end - found)
            return found + got;
    }
    return found;
}

/* Appends the blocks of keys [from, from + n) up to the first that is not found. Returns how many. */
static uint32_t bases_append(struct transfer *t, uint32_t from, uint32_t n, bool *bypassed)
{
    static const uint8_t status[] = {[CACHE_DRAM] = UCM_LOOKUP_DRAM,
                                     [CACHE_NVME] = UCM_LOOKUP_NVME,
                                     [CACHE_SHARE] = UCM_LOOKUP_SHARED};
    struct chain *ch = t->chain;
    struct view v = session_view(ch->s, ch->space->base);
    uint8_t *tiers = t->found + from;
    uint32_t found;

    *bypassed = !view_find(ch->s->rq, &v, t->keys + (size_t)from * t->ns->identity.key_bytes, n, true,
                           t->blocks + from);
    if (*bypassed) {
        rooms_of(ch)->metrics->bypass_lookup_keys += n;
        return 0;
    }
    found = bases_lease(ch, &v, n, t->blocks + from, tiers);
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
    return (uint32_t)(limit_room(owner_of(ch->s), LIMIT_DIGESTS) / chain_slot_bytes(ch));
}

/* Holds those of the digests that are in DRAM; the others are the transfer's, leased. Of `found` keys
 * whose bases were just appended. */
static void digests_take(struct transfer *t, uint32_t from, uint32_t found)
{
    struct chain *ch = t->chain;
    struct cache *c = cache_of(t);
    const void **memory = &ch->digests->at[ch->appended];
    uint32_t held = cache_hold_ready(c, t->refs + from, found, ch->part, may_hold(ch), memory);

    chain_held_add(ch, held);
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
    bool bypassed;

    n = n < APPEND_KEYS_PER_TURN ? n : APPEND_KEYS_PER_TURN;
    found = bases_append(t, from, n, &bypassed);
    index_find_many(t->r.s->rq->rooms.index, t->ns,
                    t->keys + (size_t)from * t->ns->identity.key_bytes, n, false, t->refs + from);
    digests_take(t, from, found);
    if (t->build)
        digests_make(t, from, found);
    t->chain->appended += found;
    for (uint32_t i = from + found; i < from + n; i++) {
        t->r.s->rq->rooms.metrics->digest_orphans += t->refs[i] != 0 && !bypassed;
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
    struct span span;

    if (!append_may_hold(t) || span_part(c, t->refs[item], ch->part, &span) != 0) {
        cache_put(c, t->refs[item], ch->part);
        return;
    }
    ch->digests->at[at] = span.origin;
    ch->blocks[at].digest = t->refs[item];
    cache_hold(c, t->refs[item], ch->part);
    chain_held_add(ch, 1);
}

/* ---- the answer ---- */

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

/* ---- the request ---- */

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
    struct view view;

    if (n == 0 || (m->build && space_builds(call, ch->space->base) != 0) ||
        append_check(call, ch, n) != 0)
        return -call->error.code;
    view = (struct view){.ns = {ch->space->derived}, .n = 1};
    t = transfer_new(call, TRANSFER_HOLD, &view, n, m->deadline_ms, 0);
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
