/* Which segment is emptied next, and its emptying. */
#include "daemon/tier/segment.h"

#include <errno.h>
#include <stdlib.h>

/* Bounds of reclaim: CANDIDATES_RANK segments of each rank, found in LOOK_RANK looks, each valued
 * by HEAT_SAMPLES records; VICTIM_TRIES of them are tried. */
#define CANDIDATES_RANK 8u
#define CANDIDATES (SEGMENT_RANKS * CANDIDATES_RANK)
#define LOOK_RANK 64u
#define HEAT_SAMPLES 16u
#define VICTIM_TRIES 8u

struct candidate {
    struct segment *segment;
    bool sparse;
    uint64_t warmth;
};

/* How warm its live records are: by a sample of them, spread over the segment. In whole steps, so
 * that of segments that are as warm the oldest goes first, whatever one record was read. */
static uint64_t segment_warmth(const struct segment *s, const struct tier_callbacks *cb)
{
    static const unsigned weights[] = {1, 3, 6, 10, 30}; /* the last: TIER_HEAT_KEPT */
    uint32_t step = s->next / HEAT_SAMPLES + 1;
    uint64_t weight = 0, seen = 0;

    for (uint32_t i = s->sequence % step; i < s->next; i += step) {
        unsigned heat;

        if (s->states[i] != RECORD_LIVE)
            continue;
        heat = s->owners[i] ? cb->heat_cb(cb->ctx, s->owners[i]) : 0;
        weight += weights[heat > TIER_HEAT_KEPT ? 3 : heat];
        seen++;
    }
    return seen > 0 ? weight / seen : 0;
}

static bool segment_reclaimable(const struct segment_table *t, const struct segment *s)
{
    return s->reads == 0 && s->writes == 0 && t->file[s->file].writable;
}

/* At most half of it is live. */
static bool segment_sparse(const struct segment *s)
{
    return 2 * (uint64_t)s->live <= s->records;
}

/* Its live parts fit where its stride is being written. */
static bool segment_fits_open(const struct segment_table *t, const struct segment *s)
{
    for (uint32_t i = 0; i < t->files; i++) {
        const struct segment_file *f = &t->file[i];

        for (const struct list *n = f->writable ? f->open.next : &f->open; n != &f->open;
             n = n->next) {
            const struct segment *to = LIST_ENTRY(n, const struct segment, link);

            if (to->stride_pages == s->stride_pages &&
                (to->records - to->next >= s->live || f->free_count > 0))
                return true;
        }
    }
    return false;
}

/* A segment may be opened without closing another one, which would be the next to be moved. */
static bool segment_may_open(const struct segment_table *t)
{
    for (uint32_t i = 0; i < t->files; i++)
        if (t->file[i].writable && t->file[i].free_count > 0 &&
            t->file[i].open_count < segment_open_max(&t->file[i]))
            return true;
    return false;
}

/* Moving what is live in it takes less space than it frees: at once, or with another one that goes
 * to the same segment. */
static bool candidate_sparse(const struct segment_table *t, const struct candidate *all, unsigned n,
                             unsigned i)
{
    const struct segment *s = all[i].segment;

    if (!segment_sparse(s))
        return false;
    if (segment_fits_open(t, s))
        return true;
    for (unsigned k = 0; k < n && segment_may_open(t); k++)
        if (k != i && all[k].segment->stride_pages == s->stride_pages &&
            segment_sparse(all[k].segment))
            return true;
    return false;
}

static int candidate_compare(const void *left, const void *right)
{
    const struct candidate *a = left, *b = right;

    if (a->sparse != b->sparse)
        return a->sparse ? -1 : 1;
    if (a->sparse && a->segment->live != b->segment->live)
        return a->segment->live < b->segment->live ? -1 : 1;
    if (a->warmth != b->warmth)
        return a->warmth < b->warmth ? -1 : 1;
    if (a->segment->newest != b->segment->newest)
        return a->segment->newest < b->segment->newest ? -1 : 1; /* the older goes first */
    return a->segment->sequence < b->segment->sequence ? -1 : 1;
}

static unsigned candidates_collect(const struct segment_table *t, const struct tier_callbacks *cb,
                                   bool moves, struct candidate *out)
{
    unsigned n = 0;

    for (unsigned rank = 0; rank < SEGMENT_RANKS; rank++) {
        const struct list *head = &t->closed[rank];
        unsigned taken = 0, looked = 0;

        for (struct list *node = head->next;
             node != head && taken < CANDIDATES_RANK && looked < LOOK_RANK;
             node = node->next, looked++) {
            struct segment *s = LIST_ENTRY(node, struct segment, link);

            if (!segment_reclaimable(t, s))
                continue;
            out[n++] = (struct candidate){.segment = s, .warmth = segment_warmth(s, cb)};
            taken++;
        }
    }
    for (unsigned i = 0; i < n && moves; i++)
        out[i].sparse = candidate_sparse(t, out, n, i);
    qsort(out, n, sizeof(out[0]), candidate_compare);
    return n;
}

static bool segment_busy(const struct segment *s, const struct tier_callbacks *cb)
{
    for (uint32_t i = 0; i < s->next; i++)
        if (s->states[i] == RECORD_LIVE && s->owners[i] &&
            cb->heat_cb(cb->ctx, s->owners[i]) == TIER_HEAT_BUSY)
            return true;
    return false;
}

/* Asks for every live record until one is refused. While it is being emptied a read counts as under
 * way, so that nothing else frees it. A part may come into use, and the segment into quarantine,
 * between two calls. */
bool segment_take(struct segment_table *t, struct segment *s, const struct tier_callbacks *cb,
                  uint32_t most, uint64_t *dropped)
{
    bool all = !s->withheld && (s->leaving || !segment_busy(s, cb));

    *dropped = 0;
    if (!s->leaving)
        segment_read_begin(s);
    s->leaving = true;
    for (uint32_t i = 0; i < s->next && all; i++) {
        if (s->states[i] != RECORD_LIVE)
            continue;
        if (most-- == 0)
            return false;
        all = !s->owners[i] || cb->drop_cb(cb->ctx, s->owners[i], segment_loc(t, s, i));
        /* drop may have called forget itself */
        if (all && s->states[i] == RECORD_LIVE) {
            segment_record_kill(t, s, i);
            (*dropped)++;
        }
    }
    s->leaving = false;
    segment_read_end(t, s);
    return true;
}

struct segment *segment_victim(struct segment_table *t, const struct tier_callbacks *callbacks,
                               bool *sparse)
{
    struct candidate candidates[CANDIDATES];
    unsigned n = candidates_collect(t, callbacks, sparse, candidates);

    for (unsigned i = 0; i < n && i < VICTIM_TRIES; i++) {
        struct segment *s = candidates[i].segment;

        if (!segment_busy(s, callbacks)) {
            if (sparse)
                *sparse = candidates[i].sparse;
            return s;
        }
        segment_list(t, s); /* it refused: others go first next time */
    }
    return NULL;
}

int segment_reclaim(struct segment_table *t, const struct tier_callbacks *callbacks, uint32_t most,
                    uint64_t *dropped)
{
    bool begun = t->leaving;
    struct segment *s = begun ? t->leaving : segment_victim(t, callbacks, NULL);

    *dropped = 0;
    if (!s)
        return -ENOSPC;
    t->leaving = segment_take(t, s, callbacks, most, dropped) ? NULL : s;
    if (t->leaving)
        return -EAGAIN;
    if (s->state == SEGMENT_FREE && !s->withheld)
        return 0;
    segment_list(t, s); /* it refused: others go first next time */
    return begun ? -EAGAIN : -ENOSPC;
}
