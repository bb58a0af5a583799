/* sequence.append: finds the blocks of keys up to the first that is not there, leases them, and
 * holds their summaries. Blocks that have to be read or built form a transfer; the rest of a long
 * append waits for iterations of the event loop. */
#include "daemon/retrieval/summary_transfer.h"

/* Keys that an append looks for in one iteration of the event loop. */
#define APPEND_KEYS_PER_TURN 4096

static struct request_modules *modules_of(const struct sequence *ch)
{
    return &ch->s->rq->modules;
}

/* ---- bases and summaries ---- */

/* Appends the blocks of keys [from, from + n) up to the first that is not found. Returns how
 * many. */
static uint32_t bases_append(struct summary_transfer *d, uint32_t from, uint32_t n, bool *bypassed)
{
    static const uint8_t status[] = {[CACHE_DRAM] = UCM_LOOKUP_DRAM,
                                     [CACHE_NVME] = UCM_LOOKUP_NVME,
                                     [CACHE_SHARED] = UCM_LOOKUP_SHARED};
    struct sequence *ch = d->sequence;
    struct view v = session_view(ch->s, ch->space->base);
    uint8_t *tiers = d->found + from;
    uint32_t found = 0;

    *bypassed = !view_find(ch->s->rq, &v, d->keys + (size_t)from * d->w.ns->identity.key_bytes, n,
                           true, d->bases + from);
    if (*bypassed) {
        modules_of(ch)->metrics->bypass_lookup_keys += n;
        return 0;
    }
    cache_tiers(modules_of(ch)->cache, d->bases + from, n, true, tiers);
    for (; found < n && tiers[found] != 0; found++) {
        tiers[found] = status[tiers[found]];
        ch->blocks[ch->appended + found] = (struct sequence_block){d->bases[from + found], 0};
    }
    (void)cache_lease_many(modules_of(ch)->cache, d->bases + from, found, false);
    modules_of(ch)->metrics->sequence_blocks += found;
    return found;
}

/* Holds those of the summaries that are in DRAM; the others are the transfer's, leased. Of `found`
 * keys whose bases were just appended. */
static void summaries_take(struct summary_transfer *d, uint32_t from, uint32_t found)
{
    struct sequence *ch = d->sequence;
    struct cache *c = d->w.modules->cache;
    const void **memory = &ch->summaries->at[ch->appended];
    uint32_t held =
        cache_ref_ready(c, d->w.refs + from, found, ch->part, sequence_may_hold(ch), memory);

    sequence_held_add(ch, held);
    cache_touch(c, d->w.ns, d->w.refs + from, found);
    for (uint32_t i = 0; i < found; i++) {
        block_ref *ref = &d->w.refs[from + i];

        if (memory[i]) {
            ch->blocks[ch->appended + i].summary = *ref;
            *ref = 0;
        } else if (*ref != 0 && !cache_deleting(c, *ref)) {
            cache_lease(c, *ref);
        } else {
            *ref = 0;
        }
    }
}

/* Makes blocks for summaries that are to be built. Only when all that were found are held: a new
 * block may take the place of one that is not. */
static void summaries_make(struct summary_transfer *d, uint32_t from, uint32_t found)
{
    uint32_t key_bytes = d->w.ns->identity.key_bytes;

    for (uint32_t i = from; i < from + found; i++)
        if (d->w.refs[i] == 0 && d->sequence->blocks[d->sequence_first + i].summary == 0)
            d->w.refs[i] =
                cache_open(d->w.modules->cache, d->w.ns, d->keys + (size_t)i * key_bytes);
}

/* Looks for some more blocks, and opens their summaries. */
static void append_open(struct transfer *w)
{
    struct summary_transfer *d = summary_transfer(w);
    uint32_t from = w->opened, n = w->n_keys - from, found;
    bool bypassed;

    n = n < APPEND_KEYS_PER_TURN ? n : APPEND_KEYS_PER_TURN;
    found = bases_append(d, from, n, &bypassed);
    index_find_many(w->modules->index, w->ns, d->keys + (size_t)from * w->ns->identity.key_bytes, n,
                    false, w->refs + from);
    summaries_take(d, from, found);
    if (d->build)
        summaries_make(d, from, found);
    d->sequence->appended += found;
    for (uint32_t i = from + found; i < from + n; i++) {
        w->modules->metrics->summaries_orphaned += w->refs[i] != 0 && !bypassed;
        w->refs[i] = 0;
    }
    w->opened = found == n ? from + n : w->n_keys;
    while (w->cursor < w->opened && w->refs[w->cursor] == 0)
        w->cursor++;
    if (w->opened < w->n_keys)
        transfer_yield(w);
}

/* ---- the answer ---- */

/* Counts what came, and makes it seen. */
static void append_count(struct summary_transfer *d, struct msg_sequence_append_r *r)
{
    struct sequence *ch = d->sequence;
    uint32_t n = ch->appended - d->sequence_first;

    for (uint32_t i = 0; i < n; i++) {
        r->dram += d->found[i] == UCM_LOOKUP_DRAM;
        r->nvme += d->found[i] == UCM_LOOKUP_NVME;
        r->shared += d->found[i] == UCM_LOOKUP_SHARED;
        if (ch->blocks[d->sequence_first + i].summary == 0)
            continue;
        d->found[i] |= UCM_SEQUENCE_SUMMARY;
        r->summaries++;
    }
    ch->n = ch->appended;
    ch->n_summaries += (uint32_t)r->summaries;
    leased_add(ch->s, (int64_t)n - d->w.n_keys);
    r->blocks = ch->n;
    r->missing = d->w.n_keys - n;
    r->built = d->built;
    r->status = (struct proto_bin){d->found, d->w.n_keys};
    modules_of(ch)->metrics->summaries_missing += n - r->summaries;
}

static void append_finish(struct transfer *w)
{
    struct summary_transfer *d = summary_transfer(w);
    struct sequence *ch = d->sequence;
    struct msg_sequence_append_r r = {0};

    append_count(d, &r);
    sequence_trim(ch);
    ch->append = NULL;
    sequence_unref(ch);
    transfer_end(w, &r);
}

static const struct transfer_kind append_kind = {.open = append_open,
                                                 .begin = summary_begin,
                                                 .ready = summary_ready,
                                                 .again = summary_again,
                                                 .no_room = summary_no_room,
                                                 .finish = append_finish};

/* ---- the request ---- */

/* What the append may need of the connection's and the daemon's bounds. */
static int append_check(struct call *call, struct sequence *ch, uint32_t n)
{
    if (ch->append)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this sequence has an append under way; one at a time");
    if (call->s->leased_keys + n > SESSION_MAX_LEASED_KEYS)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "this connection's leases and sequences cover %u keys, at most %u may "
                             "be; release some",
                             call->s->leased_keys, SESSION_MAX_LEASED_KEYS);
    if (leased_check(call) != 0)
        return -call->error.code;
    return sequence_reserve(call, ch, n);
}

int method_sequence_append(struct call *call)
{
    const struct msg_sequence_append *m = &call->params.sequence_append;
    struct sequence *ch = call_sequence(call, m->sequence);
    uint32_t n = ch ? call_keys(call, ch->space->derived, m->keys) : 0;
    struct summary_transfer *d;

    if (n == 0 || (m->build && space_builds(call, ch->space->base) != 0) ||
        append_check(call, ch, n) != 0)
        return -call->error.code;
    d = summary_transfer_new(call, &append_kind, ch->space, m->keys, n, m->timeout_ms);
    if (!d)
        return -call->error.code;
    d->sequence = ch;
    d->sequence_first = ch->n;
    d->build = m->build;
    d->w.part = ch->part;
    d->w.priority = (uint8_t)m->priority;
    ch->append = &d->w;
    sequence_ref(ch);
    leased_add(call->s, n);
    summaries_look(d);
    return 0;
}
