/* Replays a trace against DRAM with an NVMe tier below: which blocks are worth writing, and which
 * are worth writing again when their segment is reclaimed? docs/eviction.md has the answer. Policy
 * and segments are the daemon's own; time and the disk's speed play no part.
 * Usage: tier TRACE.jsonl|WORKLOAD [DRAM NVME ...], each in percent of the distinct blocks */
#include "daemon/format/nvme_format.h"
#include "daemon/index/index.h"
#include "daemon/index/policy.h"
#include "daemon/tier/segment.h"
#include "tests/reference/policy_workloads.h"

#include <string.h>

#define SIZES_MAX 16
#define SEGMENT_BYTES (1u << 20)
#define STRIDE 16384u /* 63 slots in a segment, as of 64 MiB and parts of 1 MiB */

enum admit {
    ADMIT_ALL,
    ADMIT_LEARNED,
    ADMIT_HALF,
    ADMIT_QUARTER,
    ADMIT_REUSE,
    ADMIT_SEEN,
    ADMIT_EVICTED
};
enum rewriting { REWRITE_NONE, REWRITE_HIT, REWRITE_READ, REWRITE_WARM, REWRITE_HOT };

struct rule {
    const char *name;
    enum admit admission;
    enum rewriting rewriting;
    unsigned share;    /* rewritten of a segment at most, % */
    bool oldest_first; /* and not the one with the least to lose */
};

static const struct rule rules[] = {
    {"write all", ADMIT_ALL, REWRITE_NONE, 0, false},
    {"learned", ADMIT_LEARNED, REWRITE_NONE, 0, false},
    {"1 request in 2", ADMIT_HALF, REWRITE_NONE, 0, false},
    {"1 request in 4", ADMIT_QUARTER, REWRITE_NONE, 0, false},
    {"used again, DRAM's ghosts", ADMIT_REUSE, REWRITE_NONE, 0, false},
    {"used again, NVMe's ghosts", ADMIT_SEEN, REWRITE_NONE, 0, false},
    {"evicted, and used again", ADMIT_EVICTED, REWRITE_NONE, 0, false},
    {"all; hit since, 25 %", ADMIT_ALL, REWRITE_HIT, 25, false},
    {"all; hit since, 50 %", ADMIT_ALL, REWRITE_HIT, 50, false},
    {"all; hit since, 75 %", ADMIT_ALL, REWRITE_HIT, 75, false},
    {"all; heat 1 and up, 50 %", ADMIT_ALL, REWRITE_WARM, 50, false},
    {"all; heat 2 and up, 50 %", ADMIT_ALL, REWRITE_HOT, 50, false},
    {"learned; read since, 50 %", ADMIT_LEARNED, REWRITE_READ, 50, false},
    {"all; read since, 50 %", ADMIT_ALL, REWRITE_READ, 50, false},
    {"all, oldest first", ADMIT_ALL, REWRITE_NONE, 0, true},
    {"all, oldest; hit since, 50 %", ADMIT_ALL, REWRITE_HIT, 50, true},
    {"all, oldest; read since, 50 %", ADMIT_ALL, REWRITE_READ, 50, true},
    {"used again; hit since, 50 %", ADMIT_REUSE, REWRITE_HIT, 50, false},
};

struct place {
    block_ref ref;           /* 0: in no tier */
    uint64_t loc;            /* 0: not on NVMe */
    uint32_t seen;           /* insert that brought it last, 0: never */
    uint32_t busy;           /* request that needs it */
    bool in_dram, hit, read; /* the latter since it was written */
};

static const struct rule *rule;
static struct index *ix;
static uint32_t outside; /* of policy_touch */
static struct ns *ns;
static struct policy *policy;
static struct segment_table segments;
static struct place *places;
static uint32_t dram_max, dram_n, nvme_max, now, inserts;
static uint64_t written, rewritten, hits, hits_below;

static uint32_t number_of(block_ref ref)
{
    uint32_t id;

    memcpy(&id, index_block(ix, ref)->key, sizeof(id));
    return id;
}

static void forget_if_gone(struct place *p)
{
    if (p->in_dram || p->loc != 0)
        return;
    index_remove(ix, p->ref);
    p->ref = 0;
}

/* ---- NVMe ---- */

static bool drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct place *p = &places[owner];

    (void)ctx;
    if (p->loc != loc)
        abort();
    if (policy_heat(index_block(ix, p->ref)) == 0)
        admission_unused(&ns->admission);
    p->loc = 0;
    forget_if_gone(p);
    return true;
}

static unsigned heat_cb(void *ctx, uint64_t owner)
{
    const struct place *p = &places[owner];

    (void)ctx;
    if (p->busy == now && !p->in_dram)
        return TIER_HEAT_BUSY;
    return rule->oldest_first ? 0 : policy_heat(index_block(ix, p->ref));
}

static const struct tier_callbacks callbacks = {.drop_cb = drop_cb, .heat_cb = heat_cb};

static bool place_write(uint32_t id)
{
    struct segment *s;
    uint32_t slot;

    if (segment_reserve(&segments, 0, STRIDE, id, &s, &slot) != 0)
        return false;
    segment_written(&segments, s, slot, true);
    places[id].loc = segment_loc(&segments, s, slot);
    places[id].hit = places[id].read = false;
    return true;
}

static bool worth_rewriting(const struct place *p)
{
    switch (rule->rewriting) {
    case REWRITE_HIT:
        return p->hit;
    case REWRITE_READ:
        return p->read;
    case REWRITE_WARM:
        return policy_heat(index_block(ix, p->ref)) >= 1;
    case REWRITE_HOT:
        return policy_heat(index_block(ix, p->ref)) >= 2;
    case REWRITE_NONE:
        break;
    }
    return false;
}

static bool one_is_left(void)
{
    const struct list *free = &segments.file[0].free;

    return list_empty(free) || free->next->next == free;
}

/* As the tier does when its last free segment was opened. */
static void reclaim_ahead(void)
{
    struct segment *s = segment_victim(&segments, &callbacks, NULL);
    uint32_t most = s ? s->records * rule->share / 100 : 0;
    uint64_t dropped;

    for (uint32_t i = 0; s && i < s->records && most > 0; i++) {
        uint32_t id = (uint32_t)s->owners[i];

        if (s->states[i] != RECORD_LIVE || !worth_rewriting(&places[id]))
            continue;
        segment_read_begin(s);
        if (place_write(id)) {
            segment_forget(&segments, s, i);
            rewritten++;
            most--;
        }
        segment_read_end(&segments, s);
    }
    if (s && s->state == SEGMENT_SEALED)
        (void)segment_take(&segments, s, &callbacks, UINT32_MAX, &dropped);
}

static void nvme_write(uint32_t id)
{
    uint64_t dropped;

    if (places[id].loc != 0)
        return;
    if (rule->rewriting != REWRITE_NONE && one_is_left())
        reclaim_ahead();
    if (!segment_has_space(&segments, 0, STRIDE, 0))
        (void)segment_reclaim(&segments, &callbacks, UINT32_MAX, &dropped);
    written += place_write(id);
}

/* ---- DRAM ---- */

enum { BUSY = 1 }; /* a list aside */

static unsigned list_cb(void *ctx, block_ref ref)
{
    (void)ctx;
    return places[number_of(ref)].busy == now ? BUSY : POLICY_CANDIDATES;
}

static unsigned any_cb(void *ctx, block_ref ref)
{
    (void)ctx, (void)ref;
    return POLICY_CANDIDATES;
}

static void dram_evict(void)
{
    block_ref ref = policy_victim(policy, policy_common(policy), POLICY_CANDIDATES, list_cb, NULL,
                                  &(int64_t){INT64_MAX});
    uint32_t id = number_of(ref);

    policy_remove(policy, ref, true);
    if (rule->admission == ADMIT_EVICTED && policy_heat(index_block(ix, ref)) >= 1)
        nvme_write(id);
    places[id].in_dram = false;
    dram_n--;
    forget_if_gone(&places[id]);
}

static void dram_insert(uint32_t id)
{
    while (dram_n >= dram_max)
        dram_evict();
    policy_insert(policy, places[id].ref);
    places[id].in_dram = true;
    dram_n++;
}

/* ---- what requests do ---- */

static bool admit(uint32_t id, bool seen)
{
    switch (rule->admission) {
    case ADMIT_ALL:
        return true;
    case ADMIT_LEARNED:
        return policy_heat(index_block(ix, places[id].ref)) >= 1 || admission_first(&ns->admission);
    case ADMIT_HALF:
        return now * 2654435761u >> 31 == 0;
    case ADMIT_QUARTER:
        return now * 2654435761u >> 30 == 0;
    case ADMIT_REUSE:
        return policy_heat(index_block(ix, places[id].ref)) >= 1;
    case ADMIT_SEEN:
        return seen || policy_heat(index_block(ix, places[id].ref)) >= 1;
    case ADMIT_EVICTED:
        break;
    }
    return false;
}

static void block_make(uint32_t id)
{
    struct place *p = &places[id];
    uint8_t key[UCM_MAX_KEY_BYTES] = {0};

    memcpy(key, &id, sizeof(id));
    p->ref = index_insert(ix, ns, key);
    if (p->ref == 0)
        abort();
    p->hit = p->read = false;
}

static void store(uint32_t id)
{
    struct place *p = &places[id];
    bool seen = p->seen != 0 && inserts - p->seen < nvme_max;

    dram_insert(id);
    index_block(ix, p->ref)->whole_parts = 1;
    p->seen = ++inserts;
    if (admit(id, seen))
        nvme_write(id);
}

/* The blocks of a dump that are in no tier; head first. */
static void dump(const uint32_t *id, uint32_t n)
{
    block_ref *refs = zeroed(n, sizeof(*refs));
    bool *missing = zeroed(n, sizeof(*missing));

    for (uint32_t i = 0; i < n; i++) {
        missing[i] = places[id[i]].ref == 0;
        if (missing[i])
            block_make(id[i]);
        refs[i] = places[id[i]].ref;
    }
    policy_touch(policy, refs, n, &outside);
    for (uint32_t i = 0; i < n; i++)
        if (missing[i])
            store(id[i]);
    free(missing);
    free(refs);
}

static bool admits_uses(void)
{
    if (rule->admission == ADMIT_LEARNED)
        return admission_reused_only(&ns->admission);
    return rule->admission == ADMIT_REUSE || rule->admission == ADMIT_SEEN;
}

static void use(const struct request *r, uint32_t n)
{
    block_ref *refs = zeroed(n, sizeof(*refs));

    for (uint32_t i = 0; i < n; i++)
        refs[i] = places[r->id[i]].ref;
    while (policy_list_count(policy_common(policy), BUSY) > 0)
        policy_move(policy,
                    policy_victim(policy, policy_common(policy), BUSY, any_cb, NULL, &(int64_t){1}),
                    POLICY_CANDIDATES);
    admission_hits(&ns->admission, policy_touch(policy, refs, n, &outside)); /* the lookup */
    policy_touch(policy, refs, n, &outside);                                 /* the load */
    free(refs);
    for (uint32_t i = 0; i < n; i++) {
        struct place *p = &places[r->id[i]];

        p->hit = true;
        p->read |= !p->in_dram;
        hits_below += !p->in_dram;
        if (!p->in_dram) {
            if (policy_heat(index_block(ix, p->ref)) == HEAT_ONCE)
                admission_returned(&ns->admission);
            dram_insert(r->id[i]);
        } else if (admits_uses() && policy_heat(index_block(ix, p->ref)) >= 1) {
            nvme_write(r->id[i]);
        }
    }
}

static void serve(const struct request *r)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < r->n; i++)
        places[r->id[i]].busy = now;
    while (n < r->n && places[r->id[n]].ref != 0)
        n++;
    hits += n;
    use(r, n);
    dump(r->id + n, r->n - n);
}

static void replay(double dram, double nvme)
{
    static const uint32_t shards = 1;
    struct ns_identity id = {"study",           "", "",      "", "",   512,
                             UCM_MAX_KEY_BYTES, 1,  &shards, 1,  NULL, 0};
    uint64_t per_segment = nvme_records(SEGMENT_BYTES, STRIDE), count;

    dram_max = (uint32_t)(n_ids * dram / 100);
    count = (uint64_t)(n_ids * nvme / 100) / per_segment;
    nvme_max = (uint32_t)(count * per_segment);
    dram_n = inserts = 0;
    written = rewritten = hits = hits_below = 0;
    places = zeroed(n_ids, sizeof(*places));
    if (index_new(n_ids, 1, &ix) != 0 || index_ns_open(ix, &id, NULL, &ns, NULL) != 0 ||
        policy_new(ix, dram_max, &policy) != 0 ||
        segment_table_init(&segments, SEGMENT_BYTES, 1, &count, 1) != 0)
        abort();
    for (now = 1; now <= n_requests; now++)
        serve(&requests[now - 1]);
    segment_table_close(&segments);
    policy_free(policy);
    index_free(ix);
    free(places);
}

int main(int argc, char **argv)
{
    double size[SIZES_MAX][2] = {{1, 10}, {5, 10}, {1, 25}, {5, 25}, {10, 25}, {1, 100}, {5, 100}};
    int sizes = argc > 2 ? (argc - 2) / 2 : 7;

    if (argc < 2 || argc % 2 != 0 || sizes > SIZES_MAX) {
        fprintf(stderr, "usage: %s TRACE.jsonl|WORKLOAD [DRAM NVME ...]; workloads:\n", argv[0]);
        workload_list(stderr);
        return 2;
    }
    for (int i = 0; i < argc - 2; i++)
        size[i / 2][i % 2] = strtod(argv[i + 2], NULL);
    if (workload_make(argv[1], 1) != 0 && trace_read(argv[1]) != 0)
        return 1;
    for (int i = 0; i < sizes; i++)
        if (!trace_fits(size[i][0]))
            return 2;
    printf("prefix hit rate, %%, and blocks written for each block hit (of NVMe: and rewritten)\n"
           "%-28s",
           "DRAM and NVMe, % of blocks");
    for (int i = 0; i < sizes; i++)
        printf("   %5.1f + %5.1f", size[i][0], size[i][1]);
    printf("\n");
    for (size_t k = 0; k < sizeof(rules) / sizeof(rules[0]); k++) {
        rule = &rules[k];
        printf("%-28s", rule->name);
        for (int i = 0; i < sizes; i++) {
            replay(size[i][0], size[i][1]);
            printf("  %5.2f %4.2f", 100 * (double)hits / (double)n_references,
                   (double)(written + rewritten) / (double)hits);
            printf(rewritten ? "+%3.0f" : "    ", (double)rewritten / 1000);
        }
        printf("\n");
        fflush(stdout);
    }
    trace_free();
    return 0;
}
