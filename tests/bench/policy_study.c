/* Replays a trace or a workload against eviction policies: which keeps the blocks that prefix
 * lookups will want? docs/eviction.md has the question and the answer. The daemon's own policy runs
 * as it is, through daemon/index/policy.h; the others are simulated in policy_sims.h.
 * Usage: policy_study TRACE.jsonl|WORKLOAD [percent of the distinct blocks ...], default 5 10 25 50
 */
#include "daemon/index/index.h"
#include "daemon/index/policy.h"
#include "tests/bench/policy_sims.h"
#include "tests/bench/policy_workloads.h"

#include <stdio.h>

#define SIZES_MAX 16

/* ---- the daemon's own ---- */

static struct index *own_index;
static struct ns *own_ns;
static struct policy *own_policy;
static block_ref *own_ref;
static double own_hint = 1;

static void own_key(uint32_t id, uint8_t key[UCM_MAX_KEY_BYTES])
{
    memset(key, 0, UCM_MAX_KEY_BYTES);
    memcpy(key, &id, sizeof(id));
}

static void own_open(void)
{
    static const uint32_t shards = 1;
    struct ns_identity id = {"study",           "", "",      "", "",   512,
                             UCM_MAX_KEY_BYTES, 1,  &shards, 1,  NULL, 0};

    if (index_new(n_ids, 1, &own_index) != 0 ||
        index_ns_open(own_index, &id, NULL, &own_ns, NULL) != 0 ||
        policy_new(own_index, (uint64_t)(capacity * own_hint), &own_policy) != 0)
        abort();
    own_ref = zeroed(n_ids, sizeof(*own_ref));
    own_hint = 1;
}

static void own_close(void)
{
    policy_free(own_policy);
    index_free(own_index);
    free(own_ref);
}

static void own_hint_quarter_open(void)
{
    own_hint = 0.25;
    own_open();
}

static void own_hint_four_open(void)
{
    own_hint = 4;
    own_open();
}

static void own_no_ghosts_open(void)
{
    own_hint = 0;
    own_open();
}

static block_ref own_block(uint32_t id)
{
    uint8_t key[UCM_MAX_KEY_BYTES];

    own_key(id, key);
    if (own_ref[id] == 0)
        own_ref[id] = index_insert(own_index, own_ns, key);
    if (own_ref[id] == 0)
        abort();
    return own_ref[id];
}

enum { BUSY = 1 }; /* a list aside */

/* As the daemon does: the lookup's hits, the same again when they are loaded, then the dump. */
static void own_hits(const uint32_t *id, uint32_t n)
{
    uint32_t all = requests[now - 1].n;
    block_ref *refs = zeroed(all, sizeof(*refs));

    /* The request before lets go of its blocks, head first. */
    for (uint32_t i = 0; now > 1 && i < requests[now - 2].n; i++) {
        block_ref ref = own_ref[requests[now - 2].id[i]];

        if (ref && policy_list(own_policy, ref) == BUSY)
            policy_move(own_policy, ref, POLICY_CANDIDATES);
    }
    for (uint32_t i = 0; i < all; i++)
        refs[i] = own_block(id[i]);
    policy_touch(own_policy, refs, n);
    policy_touch(own_policy, refs, n);
    policy_touch(own_policy, refs + n, all - n);
    free(refs);
}

/* A block lives in DRAM alone here: once evicted, the index has forgotten it. */
static void own_add(uint32_t id)
{
    policy_insert(own_policy, own_block(id));
}

static uint32_t own_number(block_ref ref)
{
    uint32_t id;

    memcpy(&id, index_block(own_index, ref)->key, sizeof(id));
    return id;
}

static unsigned own_judge_cb(void *ctx, block_ref ref)
{
    (void)ctx;
    return busy(own_number(ref)) ? BUSY : POLICY_CANDIDATES;
}

static uint32_t own_victim(void)
{
    block_ref ref = policy_victim(own_policy, policy_common(own_policy), POLICY_CANDIDATES,
                                  own_judge_cb, NULL, &(int64_t){INT64_MAX});
    uint32_t id = own_number(ref);

    policy_remove(own_policy, ref, true);
    index_remove(own_index, ref);
    own_ref[id] = 0;
    return id;
}

/* ---- the replay ---- */

struct algo {
    const char *name;
    bool head_last; /* a chain is put in place from its tail: the head is the most recent */
    void (*open)(void), (*close)(void);
    void (*hits)(const uint32_t *id, uint32_t n); /* or each by use and order */
    void (*use)(uint32_t id), (*order)(uint32_t id), (*want)(uint32_t id), (*add)(uint32_t id);
    uint32_t (*victim)(void);
    bool may_refuse; /* the victim may be the block just added */
};

static const struct algo algos[] = {
    {"FIFO", false, NULL, NULL, NULL, nothing, nothing, nothing, push_first, oldest_first, false},
    {"SIEVE", true, sieve_open, NULL, NULL, sieve_use, nothing, nothing, sieve_add, sieve_victim,
     false},
    {"2Q", true, NULL, NULL, NULL, twoq_use, twoq_use, nothing, twoq_add, twoq_victim, false},
    {"S3-FIFO, small 10 %", true, s3_open, NULL, NULL, s3_use, nothing, nothing, s3_add, s3_victim,
     false},
    {"S3-FIFO, small 50 %", true, s3_half_open, NULL, NULL, s3_use, nothing, nothing, s3_add,
     s3_victim, false},
    {"LRU-2", true, NULL, NULL, NULL, lru2_use, nothing, nothing, lru2_add, heap_least, false},
    {"LRU, tail most recent", false, NULL, NULL, NULL, move_first, nothing, nothing, push_first,
     oldest_first, false},
    {"LRU, head most recent", true, NULL, NULL, NULL, move_first, move_first, nothing, push_first,
     oldest_first, false},
    {"ARC", true, NULL, NULL, NULL, arc_use, move_same, arc_want, arc_add, arc_victim, false},
    {"age over uses", true, NULL, NULL, NULL, age_use, age_order, nothing, age_add, age_victim,
     false},
    {"LFU aged, by depth", true, lfu_depth_open, NULL, NULL, lfu_use, lfu_order, nothing, lfu_add,
     lfu_victim, false},
    {"LFU aged, all uses known", true, lfu_open, NULL, NULL, lfu_use, lfu_order, nothing, lfu_add,
     lfu_victim, false},
    {"ucmd", false, own_open, own_close, own_hits, nothing, nothing, nothing, own_add, own_victim,
     false},
    {"ucmd, hint a quarter", false, own_hint_quarter_open, own_close, own_hits, nothing, nothing,
     nothing, own_add, own_victim, false},
    {"ucmd, hint fourfold", false, own_hint_four_open, own_close, own_hits, nothing, nothing,
     nothing, own_add, own_victim, false},
    {"ucmd, without ghosts", false, own_no_ghosts_open, own_close, own_hits, nothing, nothing,
     nothing, own_add, own_victim, false},
    {"optimum (knows the future)", false, belady_open, belady_close, NULL, belady_use, nothing,
     nothing, belady_add, belady_victim, true},
};

static void hits_each(const struct algo *a, const uint32_t *id, uint32_t n,
                      void (*what)(uint32_t id))
{
    for (uint32_t i = 0; i < n; i++)
        what(id[a->head_last ? n - 1 - i : i]);
}

static void make_room(const struct algo *a, uint8_t *here, uint32_t *count, uint32_t most)
{
    while (*count > most) {
        here[a->victim()] = 0;
        (*count)--;
    }
}

static void store(const struct algo *a, uint32_t id, uint8_t *here, uint32_t *count)
{
    a->want(id);
    if (!a->may_refuse)
        make_room(a, here, count, capacity - 1);
    busy_since[id] = now;
    a->add(id);
    here[id] = 1;
    (*count)++;
    make_room(a, here, count, capacity);
}

static uint64_t behind_gap; /* references to blocks that were there, but not hit */

/* Looks the prefix up, uses what is there, then stores the rest. Returns the hits. */
static uint32_t serve(const struct algo *a, const struct request *r, uint8_t *here, uint32_t *count)
{
    uint32_t hits = 0;

    while (hits < r->n && here[r->id[hits]])
        busy_since[r->id[hits++]] = now;
    if (a->hits)
        a->hits(r->id, hits);
    else
        hits_each(a, r->id, hits, a->use);
    for (uint32_t i = hits; i < r->n; i++) {
        uint32_t at = a->head_last ? r->n - 1 - (i - hits) : i, id = r->id[at];

        depth[id] = at;
        if (!here[id]) {
            store(a, id, here, count);
            continue;
        }
        behind_gap++;
        busy_since[id] = now;
        a->use(id);
    }
    hits_each(a, r->id, hits, a->order);
    return hits;
}

static double replay(const struct algo *a, double percent)
{
    uint8_t *here = zeroed(n_ids, 1);
    uint32_t count = 0;
    uint64_t hits = 0;

    behind_gap = 0;
    state_open();
    capacity = (uint32_t)(n_ids * percent / 100);
    if (a->open)
        a->open();
    for (uint32_t i = 0; i < n_requests; i++) {
        now = i + 1;
        hits += serve(a, &requests[i], here, &count);
    }
    if (a->close)
        a->close();
    state_close();
    free(here);
    return (double)hits / (double)n_references;
}

/* Of the blocks that were used k times, how many were used again? */
static void tell_reuse(void)
{
    uint32_t *times = zeroed(n_ids, sizeof(*times)), reached[9] = {0};

    for (uint32_t r = 0; r < n_requests; r++)
        for (uint32_t i = 0; i < requests[r].n; i++)
            times[requests[r].id[i]]++;
    for (uint32_t i = 0; i < n_ids; i++)
        for (uint32_t k = 1; k <= 8 && k <= times[i]; k++)
            reached[k]++;
    printf("%u requests, %lu references, %u blocks\nused again after k uses, %%:", n_requests,
           (unsigned long)n_references, reached[1]);
    for (uint32_t k = 1; k < 8; k++)
        printf("  %u: %.1f", k, 100.0 * reached[k + 1] / reached[k]);
    printf("\n\n");
    free(times);
}

int main(int argc, char **argv)
{
    double size[SIZES_MAX] = {5, 10, 25, 50};
    int sizes = argc > 2 ? argc - 2 : 4;
    size_t k;

    if (argc < 2 || sizes > SIZES_MAX) {
        fprintf(stderr, "usage: %s TRACE.jsonl|WORKLOAD [percent ...]; workloads:\n", argv[0]);
        workload_list(stderr);
        return 2;
    }
    for (int i = 0; i < argc - 2; i++)
        size[i] = strtod(argv[i + 2], NULL);
    if (workload_make(argv[1], 1) != 0 && trace_read(argv[1]) != 0)
        return 1;
    for (int i = 0; i < sizes; i++)
        if (!trace_fits(size[i]))
            return 2;
    tell_reuse();
    printf("prefix hit rate, %% of all references\n%-28s", "cache, % of the blocks");
    for (int i = 0; i < sizes; i++)
        printf(" %6.1f", size[i]);
    printf("\n");
    for (k = 0; k < sizeof(algos) / sizeof(algos[0]); k++) {
        printf("%-28s", algos[k].name);
        for (int i = 0; i < sizes; i++)
            printf(" %6.2f", 100 * replay(&algos[k], size[i]));
        printf("\n");
        fflush(stdout);
    }
    printf("%-28s", "its hits, behind a gap too");
    for (int i = 0; i < sizes; i++) {
        double hits = replay(&algos[k - 1], size[i]);

        printf(" %6.2f", 100 * (hits + (double)behind_gap / (double)n_references));
    }
    printf("\n");
    trace_free();
    return 0;
}
