/* For the tests of summaries, sequences and selections: requests over summaries of rig.one. The pool works when a
 * test lets it. */
#ifndef UCM_TESTS_UNIT_SUMMARY_RIG_H
#define UCM_TESTS_UNIT_SUMMARY_RIG_H

#include "daemon/retrieval/selection.h"
#include "tests/unit/request/request_rig.h"

#define SUMMARY_BYTES 68u /* mean of one head of 64 channels, and its scale */
#define HELD_MAX (2u * MIB / 4 / 4096)

static struct ns *derived;

/* Mean summaries of the first 64 channels of the base's layers, taken for 16 tokens of float16. */
static inline struct ns *open_summaries_of(const struct ns *base, bool build)
{
    struct msg_summary_open m = {.ns = base->id,
                                 .method = UCM_SUMMARY_MEAN,
                                 .dtype = UCM_KV_F16,
                                 .kv_heads = 1,
                                 .head_dim = 64,
                                 .k_token_stride = 128,
                                 .build = build};
    struct msg_summary_open_r r;
    struct ns *ns;

    result_of(call(UCM_METHOD_SUMMARY_OPEN, &proto_summary_open, &m), &proto_summary_open_r, &r);
    cr_assert_eq(r.layer_bytes, SUMMARY_BYTES);
    ns = index_ns(rig.index, (uint32_t)r.ns);
    cr_assert(ns);
    ns->record = NS_RECORD_WRITTEN;
    return ns;
}

/* Opens the summaries of rig.one. */
static inline uint32_t open_summaries(bool build)
{
    derived = open_summaries_of(rig.one, build);
    return derived->id;
}

static inline void open_all(void)
{
    open_door();
    door.config.lease_max_ms = 600000;
    door.requests->modules.shared = rig.cache->shared = NULL; /* this host alone */
    open_summaries(false);
}

static inline void turns_pass(void)
{
    iterations(40);
}

static inline void close_all(void)
{
    hang_up();
    while (pool_next())
        turns_pass();
    tier_finish();
    turns_pass();
    cr_expect_eq(taken(LIMIT_SUMMARIES), 0u);
    cr_expect_eq(taken(LIMIT_MEMORY), 0u);
    cr_expect_eq(rig.metrics.sequences + rig.metrics.sequence_blocks, 0u);
    close_door();
    cr_expect_eq(rig.metrics.summaries_held_bytes, 0u);
}

/* Writes end, and what waited for them goes on. */
static inline void written(void)
{
    for (int i = 0; i < 10; i++) {
        tier_finish();
        turns_pass();
    }
}

static inline uint32_t build(uint64_t first, uint32_t n)
{
    struct msg_summary_build m = {.ns = derived->id, .keys = chain(first, n)};

    return call(UCM_METHOD_SUMMARY_BUILD, &proto_summary_build, &m);
}

static inline uint32_t open_sequence(void)
{
    struct msg_sequence_open m = {.ns = derived->id};
    struct msg_sequence r;

    result_of(call(UCM_METHOD_SEQUENCE_OPEN, &proto_sequence_open, &m), &proto_sequence, &r);
    return (uint32_t)r.sequence;
}

static inline uint32_t append(uint32_t name, uint64_t first, uint32_t n, bool builds)
{
    struct msg_sequence_append m = {.sequence = name, .keys = chain(first, n), .build = builds};

    return call(UCM_METHOD_SEQUENCE_APPEND, &proto_sequence_append, &m);
}

static inline struct msg_sequence_append_r appended(uint32_t msgid)
{
    struct msg_sequence_append_r r;

    result_of(msgid, &proto_sequence_append_r, &r);
    return r;
}

static inline uint32_t close_sequence(uint32_t name)
{
    return call(UCM_METHOD_SEQUENCE_CLOSE, &proto_sequence, &(struct msg_sequence){name});
}

/* The best n of the sequence for a query of ones. */
static inline uint32_t ask_best(uint32_t name, uint32_t n)
{
    static const uint32_t layer = 0;
    uint32_t sequences[1] = {name};
    uint16_t q[64];
    struct msg_select m = {.sequences = {sequences, 1},
                           .layers = {&layer, 1},
                           .q = {(const uint8_t *)q, sizeof(q)},
                           .q_dtype = UCM_KV_F16,
                           .q_heads = 1,
                           .min_blocks = n};

    for (unsigned i = 0; i < 64; i++)
        q[i] = 0x3c00;
    return call(UCM_METHOD_SELECT, &proto_select, &m);
}

static inline struct msg_select_r selected(uint32_t msgid)
{
    struct msg_select_r r;

    result_of(msgid, &proto_select_r, &r);
    return r;
}

static inline void work(void)
{
    do
        turns_pass();
    while (pool_next());
}

static inline uint32_t sequence_of(uint32_t n)
{
    uint32_t name = open_sequence();

    store_all(rig.one, 1, n);
    append(name, 1, n, true);
    work();
    return name;
}

/* Block 1, n times; returns before the append has ended, if n is large. */
static inline uint32_t append_same_begin(uint32_t name, uint32_t n)
{
    static uint8_t same[UCM_MAX_KEYS * 16];
    struct msg_sequence_append m = {.sequence = name, .keys = {same, 16 * n}};

    for (uint32_t i = 0; i < n; i++)
        memcpy(same + 16 * i, chain(1, 1).p, 16);
    return call(UCM_METHOD_SEQUENCE_APPEND, &proto_sequence_append, &m);
}

static inline uint32_t append_same(uint32_t name, uint32_t n)
{
    uint32_t msgid = append_same_begin(name, n);

    turns_pass();
    return msgid;
}

/* Block 1 and its summary, both on the tier only. */
static inline void store_both_below(void)
{
    block_ref ref;

    drop(store_below(rig.one, 1));
    build(1, 1);
    fake_next(&rig.tier, 0);
    work();
    tier_finish();
    turns_pass();
    tier_finish();
    ref = find(derived, 1);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cr_assert_eq(cache_evict(rig.cache, find(rig.one, 1), CACHE_DRAM), CACHE_EVICT_DONE);
}

#endif
