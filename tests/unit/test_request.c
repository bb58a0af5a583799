/* Requests at their bounds: a device whose queue is full, namespaces a connection, memory. */
#include "tests/unit/request_rig.h"

/* ---- a device that takes jobs when a test lets it ---- */

static struct {
    struct device device;
    struct list jobs;
    unsigned refused, copied;
    bool full;
} gpu;

static int gpu_submit(struct device *d, struct device_job *job)
{
    (void)d;
    if (gpu.full && job->op != DEVICE_CLOSE) {
        gpu.refused++;
        return -EAGAIN;
    }
    list_push_back(&gpu.jobs, &job->link);
    return 0;
}

static const struct device_ops gpu_ops = {.submit = gpu_submit};

static void gpu_finish_all(void)
{
    struct list *node;

    while ((node = list_pop_front(&gpu.jobs)) != NULL) {
        struct device_job *job = LIST_ENTRY(node, struct device_job, link);

        gpu.copied += job->op == DEVICE_LOAD ? job->n_items : 0;
        job->done_cb(job, 0);
    }
}

static void open_all(void)
{
    open_door();
    gpu.device = (struct device){.ops = &gpu_ops, .node = NUMA_NONE};
    list_init(&gpu.jobs);
}

static void close_all(void)
{
    hang_up();
    gpu_finish_all();
    close_door();
}

TestSuite(request, .init = open_all, .fini = close_all);

/* An open region of `blocks` blocks, without planes. Returns its name. */
static uint32_t region_open(struct ns *ns, uint32_t blocks)
{
    struct session *s = door.session;
    struct registered *r = calloc(1, sizeof(*r));

    cr_assert(r);
    r->region = calloc(1, sizeof(*r->region) + (SHARDS + 1) * sizeof(uint32_t));
    cr_assert(r->region);
    r->region->shard_first = (uint32_t *)(r->region + 1); /* freed with the region */
    r->region->blocks = blocks;
    r->region->shards = SHARDS;
    r->region->device = r->device = &gpu.device;
    r->s = s;
    r->ns = ns;
    r->table = &s->regions;
    r->state = REGISTERED_OPEN;
    r->number = table_add(&s->regions, r);
    r->name = session_name(&s->region_names, r->number);
    list_init(&r->pending);
    rig.metrics.regions++;
    return r->name;
}

#define MANY 516 /* more than one job copies */

/* Blocks 1 to MANY on the tier only; small, so that DRAM holds all. */
static struct ns *store_many(void)
{
    struct ns *ns = space("small", 1, 1024 / SHARDS);

    share.refuse = -EROFS;
    share.refuse_n = MANY;
    for (uint64_t i = 1; i <= MANY; i++)
        drop(store_below(ns, i));
    return ns;
}

static uint32_t load_many(struct ns *ns)
{
    static uint8_t all[MANY * 16], blocks[MANY * 4];
    struct msg_load m = {.region = region_open(ns, MANY),
                         .keys = {all, sizeof(all)},
                         .blocks = {blocks, sizeof(blocks)}};

    for (uint64_t i = 0; i < MANY; i++) {
        uint64_t number = i + 1;
        uint32_t block = (uint32_t)i;

        memcpy(all + 16 * i, &number, sizeof(number));
        memcpy(blocks + 4 * i, &block, sizeof(block));
    }
    return call(UCM_METHOD_LOAD, &proto_load, &m);
}

/* A load begins some items a turn of the loop. */
static void read_all(void)
{
    for (int i = 0; i < 50; i++) {
        turn();
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
    }
}

/* What was read is kept until the device takes jobs again. */
Test(request, a_full_device_makes_no_block_miss)
{
    uint32_t id = load_many(store_many());
    struct msg_blocks_r r;

    gpu.full = true;
    read_all();
    cr_assert_gt(gpu.refused, 0u);
    cr_assert_null(answer_of(id));
    gpu.full = false;
    cache_arena_grew(rig.cache); /* somebody else's copy ends */
    for (int i = 0; i < 20 && !answer_of(id); i++) {
        turn();
        gpu_finish_all();
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
    }
    result_of(id, &proto_blocks_r, &r);
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert_eq(r.status.p[i], UCM_BLOCK_OK, "block %u: %u", i, r.status.p[i]);
    cr_expect_eq(gpu.copied, (unsigned)MANY);
}

Test(request, what_waits_for_a_full_device_can_be_cancelled)
{
    uint32_t id = load_many(store_many());
    struct msg_blocks_r r;

    gpu.full = true;
    read_all();
    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    result_of(id, &proto_blocks_r, &r);
    cr_expect_eq(r.status.p[MANY - 1], UCM_BLOCK_CANCELLED);
    cr_expect_eq(r.status.p[0], UCM_BLOCK_CANCELLED);
}

/* ---- namespaces ---- */

static int open_ns(uint32_t number)
{
    uint32_t shards = SHARDS;
    char model[16];
    struct msg_ns_open m = {.dtype = {"b", 1},
                            .layout = {"l", 1},
                            .block_tokens = 16,
                            .key_bytes = 16,
                            .parts = 1,
                            .shards = {&shards, 1},
                            .shard_bytes = 1024};
    uint32_t id;

    m.model = (struct proto_str){model, (uint32_t)snprintf(model, sizeof(model), "%u", number)};
    id = call(UCM_METHOD_NS_OPEN, &proto_ns_open, &m);
    return answer_code(id);
}

Test(request, a_connection_opens_so_many_namespaces)
{
    struct session *s = door.session;

    s->peer.admin = false;
    door.config.max_namespaces_tenant = 80;
    for (uint32_t i = 0; i < 20; i++)
        cr_assert_eq(open_ns(i), 0);
    cr_expect_eq(open_ns(20), UCM_WIRE_BUSY);
    cr_expect_eq(open_ns(3), 0, "it is open already");
    s->peer.admin = true;
    cr_expect_eq(open_ns(20), 0, "an operator's are not counted");
}

/* ---- memory ---- */

Test(request, a_search_on_the_shared_tier_counts_as_memory)
{
    struct msg_prefetch m = {.ns = rig.one->id, .keys = chain(1, KEYS_MAX)};
    uint64_t idle = door.requests->memory;
    uint32_t id = call(UCM_METHOD_PREFETCH, &proto_prefetch, &m);

    cr_expect_geq(door.requests->memory - idle, (uint64_t)KEYS_MAX * (2 * 16 + 1));
    cr_expect_eq(requests_active(door.requests), 1u);
    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    cr_expect_eq(door.requests->memory, idle);
}

Test(request, without_memory_for_a_search_it_is_not_made)
{
    struct msg_prefetch m = {.ns = rig.one->id, .keys = chain(1, KEYS_MAX)};
    struct msg_blocks_r r;

    door.config.max_frame_memory = sizeof(struct shared_lookup) + KEYS_MAX * (2 * 16 + 1);
    result_of(call(UCM_METHOD_PREFETCH, &proto_prefetch, &m), &proto_blocks_r, &r);
    cr_expect_eq(r.status.p[0], UCM_BLOCK_MISS);
    cr_expect_null(share.lookup);
}

/* ---- leases ---- */

static uint32_t load_one(uint64_t key, uint32_t region, uint32_t block, uint32_t lease)
{
    uint8_t at[4];
    struct msg_load m = {
        .region = region, .keys = chain(key, 1), .blocks = {at, sizeof(at)}, .lease = lease};

    memcpy(at, &block, sizeof(block));
    return call(UCM_METHOD_LOAD, &proto_load, &m);
}

static uint32_t lease_one(uint64_t key)
{
    struct msg_lookup m = {.ns = rig.one->id, .keys = chain(key, 1), .lease_ms = 60000};
    struct msg_lookup_r r;

    result_of(call(UCM_METHOD_LOOKUP, &proto_lookup, &m), &proto_lookup_r, &r);
    cr_assert_neq(r.lease, 0u);
    cr_assert_eq(rig.metrics.leases, 1u);
    return (uint32_t)r.lease;
}

/* The client forgot it when it sent the load. */
Test(request, a_load_that_is_refused_ends_its_lease)
{
    uint32_t region = region_open(rig.one, 4);

    drop(store(rig.one, 1));
    cr_expect_eq(answer_code(load_one(1, region, 1000, lease_one(1))), UCM_WIRE_INVALID);
    cr_expect_eq(rig.metrics.leases, 0u);
    cr_expect_eq(answer_code(load_one(1, 999, 0, lease_one(1))), UCM_WIRE_NOT_FOUND);
    cr_expect_eq(rig.metrics.leases, 0u);
    door.config.max_requests_conn = 0;
    cr_expect_eq(answer_code(load_one(1, region, 0, lease_one(1))), UCM_WIRE_BUSY);
    cr_expect_eq(rig.metrics.leases, 0u);
}

/* ---- blocks that are not there, and no room ---- */

Test(request, a_load_counts_what_the_share_has_no_more)
{
    uint32_t region = region_open(rig.one, 4), id;
    struct msg_blocks_r r;

    peer_stores(rig.one, 1, 1);
    note(rig.one, 1, 1, true);
    share.refuse = -ENOENT;
    share.refuse_n = 1;
    id = load_one(1, region, 0, 0);
    result_of(id, &proto_blocks_r, &r);
    cr_expect_eq(r.status.p[0], UCM_BLOCK_MISS);
    cr_expect_eq(rig.metrics.load_blocks_missed, 1u);
}

Test(request, a_load_of_what_nvme_knows_no_more_is_a_miss)
{
    uint32_t region = region_open(rig.one, 4), id;
    struct msg_blocks_r r;

    share.refuse = -EROFS;
    share.refuse_n = 1;
    drop(store_below(rig.one, 1));
    rig.tier.refuse = -ESTALE;
    rig.tier.refuse_n = 1;
    id = load_one(1, region, 0, 0);
    result_of(id, &proto_blocks_r, &r);
    cr_expect_eq(r.status.p[0], UCM_BLOCK_MISS);
    cr_expect_eq(rig.metrics.load_blocks_missed, 1u);
}

/* Half of the arena is four parts. */
Test(request, a_prefetch_finds_room_for_what_is_in_dram)
{
    struct msg_prefetch m = {.ns = rig.one->id};
    struct msg_blocks_r r;
    uint32_t id;

    share.refuse = -EROFS;
    share.refuse_n = 7;
    for (uint64_t i = 1; i <= 5; i++)
        drop(store_below(rig.one, i));
    drop(store(rig.one, 6));
    drop(store(rig.one, 7));
    turn();
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
    share.refuse_n = 0;
    m.keys = chain(1, 7);
    id = call(UCM_METHOD_PREFETCH, &proto_prefetch, &m);
    for (int i = 0; i < 20 && !answer_of(id); i++) {
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, 0);
        turn();
    }
    result_of(id, &proto_blocks_r, &r);
    for (uint32_t i = 0; i < 7; i++)
        cr_expect_eq(r.status.p[i], i == 4 ? UCM_BLOCK_NO_ROOM : UCM_BLOCK_OK, "block %u: %u",
                     i + 1, r.status.p[i]);
}
