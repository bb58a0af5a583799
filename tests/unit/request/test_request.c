/* Requests at their bounds: a device whose queue is full, namespaces a connection, memory. */
#include "daemon/request/view.h"
#include "tests/unit/request/request_rig.h"

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

/* Opens a region of `blocks` blocks, with a plane for each layer, whose bytes no test reads.
 * Returns its name. */
static uint32_t region_open(struct ns *ns, uint32_t blocks)
{
    struct session *s = door.session;
    struct registered *r = calloc(1, sizeof(*r));

    cr_assert(r);
    r->region = calloc(1, sizeof(*r->region) + (LAYERS + 1) * sizeof(uint32_t));
    cr_assert(r->region);
    r->region->layer_first = (uint32_t *)(r->region + 1); /* freed with the region */
    for (uint32_t i = 0; i <= LAYERS; i++)
        r->region->layer_first[i] = i;
    r->region->blocks = blocks;
    r->region->pages = *ns_form(ns, 0);
    r->region->device = r->device = &gpu.device;
    r->s = s;
    r->ns = ns;
    r->view = (struct view){.ns = {ns}, .n = 1};
    r->table = &s->regions;
    r->state = REGISTERED_OPEN;
    r->number = table_add(&s->regions, r);
    r->name = session_name(&s->region_names, r->number);
    list_init(&r->pending);
    list_init(&r->users);
    rig.metrics.regions++;
    return r->name;
}

#define MANY 516 /* more than one job copies */

/* Blocks 1 to MANY on the tier only; small, so that DRAM holds all. */
static struct ns *store_many(void)
{
    struct ns *ns = space("small", 1, 1024 / LAYERS);

    shared_refuses(-EROFS, MANY);
    for (uint64_t i = 1; i <= MANY; i++)
        drop(store_below(ns, i));
    return ns;
}

/* Blocks first to first + n - 1 of a region. */
static struct proto_bin blocks_from(uint32_t first, uint32_t n)
{
    static uint32_t all[CHAIN_MAX];

    for (uint32_t i = 0; i < n; i++)
        all[i] = first + i;
    return (struct proto_bin){(const uint8_t *)all, 4 * n};
}

/* Keys first to first + n - 1 into blocks 0 to n - 1. */
static uint32_t load_range(uint32_t region, uint64_t first, uint32_t n)
{
    struct msg_load m = {.region = region, .keys = chain(first, n), .blocks = blocks_from(0, n)};

    return call(UCM_METHOD_LOAD, &proto_load, &m);
}

#define OPENED 512u /* by a dump in one iteration of the event loop */

/* Keys 1 to OPENED + 88. */
static uint32_t dump_many(struct ns *ns)
{
    struct msg_dump m = {.region = region_open(ns, OPENED + 88),
                         .keys = chain(1, OPENED + 88),
                         .blocks = blocks_from(0, OPENED + 88)};

    return call(UCM_METHOD_DUMP, &proto_dump, &m);
}

static uint32_t load_many(struct ns *ns)
{
    return load_range(region_open(ns, MANY), 1, MANY);
}

/* Ends the device's and the tier's operations until the answer is there. Returns how many of its
 * blocks have that status. */
static uint32_t answered_with(uint32_t id, enum ucm_block_status status)
{
    struct msg_blocks_r r;
    uint32_t n = 0;

    for (int i = 0; i < 200 && !answer_of(id); i++) {
        iterate();
        gpu_finish_all();
        tier_finish();
    }
    result_of(id, &proto_blocks_r, &r);
    for (uint32_t i = 0; i < r.status.n; i++)
        n += r.status.p[i] == status;
    return n;
}

/* A load begins some items an iteration of the event loop. */
static void read_all(void)
{
    for (int i = 0; i < 50; i++) {
        iterate();
        tier_finish();
    }
}

/* Bytes that were read are kept until the device takes jobs again. */
Test(request, a_full_device_makes_no_block_miss)
{
    uint32_t id = load_many(store_many());

    gpu.full = true;
    read_all();
    cr_assert_gt(gpu.refused, 0u);
    cr_assert_null(answer_of(id));
    gpu.full = false;
    cache_arena_grew(rig.cache); /* another request's copy ends */
    cr_expect_eq(answered_with(id, UCM_BLOCK_OK), (uint32_t)MANY);
    cr_expect_eq(gpu.copied, (unsigned)MANY);
}

Test(request, what_waits_for_a_full_device_can_be_cancelled)
{
    uint32_t id = load_many(store_many());

    gpu.full = true;
    read_all();
    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    cr_expect_eq(answered_with(id, UCM_BLOCK_CANCELLED), (uint32_t)MANY);
}

Test(request, a_dump_opens_its_blocks_in_turns)
{
    uint32_t id = dump_many(space("small", 1, 1024 / LAYERS));

    shared_refuses(-EROFS, OPENED + 88);
    cr_expect_eq(index_blocks(rig.index), OPENED);
    iterate();
    cr_expect_eq(index_blocks(rig.index), OPENED + 88);
    cr_expect_eq(answered_with(id, UCM_BLOCK_OK), OPENED + 88);
}

Test(request, a_dump_that_is_cancelled_opens_no_more)
{
    uint32_t id = dump_many(space("small", 1, 1024 / LAYERS));

    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    iterate();
    cr_assert(answer_of(id));
    cr_expect_eq(answered_with(id, UCM_BLOCK_CANCELLED), OPENED + 88);
    cr_expect_eq(index_blocks(rig.index), 0u);
}

/* ---- small loads alongside large ones ---- */

static uint64_t number_of(const struct tier_io *io)
{
    uint64_t number;

    memcpy(&number, io->name.key, sizeof(number));
    return number;
}

/* Reads under way of keys first to first + n - 1. */
static unsigned reads_of(uint64_t first, uint32_t n)
{
    unsigned found = 0;

    for (unsigned i = 0; i < rig.tier.n_pending; i++) {
        uint64_t number = number_of(fake_at(&rig.tier, i));

        found += number >= first && number < first + n;
    }
    return found;
}

Test(request, a_large_load_alone_fills_the_queue_of_the_tier)
{
    load_many(store_many());
    iterations(10);
    cr_expect_geq(rig.tier.n_pending, 100u);
}

/* Ends every read but that of `spared`, oldest first, until none is left. Neither load is ever more
 * than 32 reads ahead of the other. */
static void expect_turns(uint64_t spared, uint32_t half)
{
    unsigned ended[2] = {0, 0};

    while (ended[0] + ended[1] < 2 * half) {
        struct tier_io *io = fake_at(&rig.tier, 0);

        if (number_of(io) == spared)
            io = fake_at(&rig.tier, 1);
        ended[number_of(io) > half]++;
        fake_finish(&rig.tier, io, 0);
        iterate();
        iterate();
        gpu_finish_all();
        cr_assert_leq(rig.tier.n_pending, 17u);
        cr_assert_leq(abs((int)ended[0] - (int)ended[1]), 32, "one load reads and the other waits");
    }
}

/* While a small load reads, and for some time afterwards, large loads together have few reads under
 * way, and take turns. */
Test(request, large_loads_leave_the_tier_to_a_small_one)
{
    enum { HALF = 200 };
    uint32_t region = region_open(store_many(), MANY), id[2], small = load_range(region, MANY, 1);

    cr_assert_eq(reads_of(MANY, 1), 1u);
    cr_expect(fake_at(&rig.tier, 0)->small, "writes make way for it");
    id[0] = load_range(region, 1, HALF);
    id[1] = load_range(region, HALF + 1, HALF);
    iterations(10);
    cr_expect_eq(rig.tier.n_pending, 17u);
    for (unsigned i = 1; i < rig.tier.n_pending; i++)
        cr_expect_not(fake_at(&rig.tier, i)->small);
    expect_turns(MANY, HALF);
    cr_expect_null(answer_of(small));
    fake_next(&rig.tier, 0);
    for (int i = 0; i < 2; i++)
        cr_expect_eq(answered_with(id[i], UCM_BLOCK_OK), (uint32_t)HALF);
    cr_expect_eq(answered_with(small, UCM_BLOCK_OK), 1u);
}

/* Blocks in DRAM need no turn: their load ends while other large loads wait for theirs. */
Test(request, a_large_load_from_dram_waits_for_no_turn)
{
    enum { LARGE = 200 };
    struct ns *ns = store_many();
    uint32_t region = region_open(ns, MANY), reads, dram;

    shared.refuse_n = LARGE;
    for (uint64_t i = 1; i <= LARGE; i++)
        drop(store_dram(ns, 1000 + i));
    load_range(region, MANY, 1);
    reads = load_range(region, 1, LARGE);
    iterations(10);
    cr_assert_eq(rig.tier.n_pending, 17u, "the bound is reached");
    dram = load_range(region, 1001, LARGE);
    iterations(10);
    gpu_finish_all();
    cr_expect_null(answer_of(reads));
    cr_assert(answer_of(dram));
    cr_expect_eq(answered_with(dram, UCM_BLOCK_OK), (uint32_t)LARGE);
}

/* The small load has ended long ago. */
Test(request, large_loads_fill_the_queue_again)
{
    uint32_t region = region_open(store_many(), MANY);

    load_range(region, MANY, 1);
    fake_next(&rig.tier, 0);
    door.requests->narrow_reads = 20; /* instead of some thousand reads more */
    load_range(region, 1, MANY - 1);
    iterations(10);
    cr_assert_eq(rig.tier.n_pending, 16u);
    for (int i = 0; i < 8; i++) {
        fake_next(&rig.tier, 0);
        iterations(10);
    }
    cr_expect_geq(rig.tier.n_pending, 100u);
}

/* The load whose turn it is ends, so the next one reads. */
Test(request, a_load_that_is_cancelled_hands_its_turn_on)
{
    uint32_t region = region_open(store_many(), MANY), first;

    load_range(region, MANY, 1);
    first = load_range(region, 1, 200);
    load_range(region, 201, 200);
    iterations(10);
    cr_assert_eq(reads_of(201, 200), 0u);
    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = first});
    iterations(10);
    cr_expect_eq(reads_of(201, 200), 16u);
}

/* Four loads have a quarter of the arena each, two parts. A fifth waits for space, and gets the
 * next parts that are released. */
Test(request, space_goes_to_who_has_none)
{
    uint32_t region = region_open(rig.one, 32);

    shared_refuses(-EROFS, 17);
    for (uint64_t i = 1; i <= 17; i++)
        drop(store_below(rig.one, i));
    for (uint64_t i = 0; i < 4; i++)
        load_range(region, 1 + 4 * i, 4);
    iterations(10);
    cr_assert_eq(rig.tier.n_pending, 8u);
    load_range(region, 17, 1);
    iterations(10);
    cr_assert_eq(rig.tier.n_pending, 8u);
    tier_finish();
    gpu_finish_all();
    iterations(10);
    cr_expect_eq(reads_of(17, 1), 1u);
}

/* ---- namespaces ---- */

static int open_ns(uint32_t number)
{
    uint32_t layers = LAYERS;
    char model[16];
    struct msg_ns_open m = {.dtype = {"b", 1},
                            .layout = {"l", 1},
                            .block_tokens = 16,
                            .key_bytes = 16,
                            .parts = 1,
                            .layers = {&layers, 1},
                            .layer_bytes = 1024};
    uint32_t id;

    m.model = (struct proto_str){model, (uint32_t)snprintf(model, sizeof(model), "%u", number)};
    id = call(UCM_METHOD_NS_OPEN, &proto_ns_open, &m);
    return answer_code(id);
}

Test(request, a_connection_opens_so_many_namespaces)
{
    become(false);
    door.config.max_namespaces_tenant = 80;
    for (uint32_t i = 0; i < 20; i++)
        cr_assert_eq(open_ns(i), 0);
    cr_expect_eq(open_ns(20), UCM_WIRE_BUSY);
    cr_expect_eq(open_ns(3), 0, "it is open already");
    become(true);
    cr_expect_eq(open_ns(20), 0, "an operator's are not counted");
}

/* ---- memory ---- */

Test(request, a_search_on_the_shared_tier_counts_as_memory)
{
    struct msg_prefetch m = {.ns = rig.one->id, .keys = chain(1, KEYS_MAX)};
    uint64_t idle = taken(LIMIT_MEMORY);
    uint32_t id = call(UCM_METHOD_PREFETCH, &proto_prefetch, &m);

    cr_expect_geq(taken(LIMIT_MEMORY) - idle, (uint64_t)KEYS_MAX * (2 * 16 + 1));
    cr_expect_eq(requests_active(door.requests), 1u);
    call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = id});
    cr_expect_eq(taken(LIMIT_MEMORY), idle);
}

/* Others' requests begin, whatever one client has under way, and all are answered. */
Test(request, requests_under_way_are_bounded_by_tenant)
{
    uint32_t region = region_open(store_many(), 1);
    struct limit_owner *other = limits_uid(door.limits, "other", 1, false);
    uint32_t ids[64], n = 0;

    limits_set(door.limits, LIMIT_REQUESTS, 16);
    become(false);
    while (n < 64 && !answer_of(ids[n] = load_range(region, n + 1, 1)))
        n++;
    cr_assert_lt(n, 64u);
    cr_expect_eq(answer_code(ids[n]), UCM_WIRE_BUSY);
    cr_expect_eq(taken(LIMIT_REQUESTS), n);
    cr_expect_gt(n, 4u);
    cr_expect_eq(limit_take(other, LIMIT_REQUESTS, 1, NULL), 0, "another tenant's");
    limit_give(other, LIMIT_REQUESTS, 1);
    limit_owner_unref(other);
    for (uint32_t i = 0; i < n; i++)
        call(UCM_METHOD_CANCEL, &proto_cancel, &(struct msg_cancel){.msgid = ids[i]});
    iterations(10);
    tier_finish();
    iterations(10);
    cr_expect_eq(taken(LIMIT_REQUESTS), 0u);
}

Test(request, without_memory_for_a_search_it_is_not_made)
{
    struct msg_prefetch m = {.ns = rig.one->id, .keys = chain(1, KEYS_MAX)};
    struct msg_blocks_r r;

    limits_set(door.limits, LIMIT_MEMORY, sizeof(struct shared_query) + KEYS_MAX * (2 * 16 + 1));
    result_of(call(UCM_METHOD_PREFETCH, &proto_prefetch, &m), &proto_blocks_r, &r);
    cr_expect_eq(r.status.p[0], UCM_BLOCK_MISS);
    cr_expect_null(shared.lookup);
}

/* ---- leases ---- */

static uint32_t load_one(uint64_t key, uint32_t region, uint32_t block, uint32_t lease)
{
    struct msg_load m = {
        .region = region, .keys = chain(key, 1), .blocks = blocks_from(block, 1), .lease = lease};

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

/* The client forgot the lease when it sent the load. */
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

/* When a connection with many leases closes, each iteration of the event loop ends some of them. */
Test(request, leases_of_a_closed_connection_end_in_turns)
{
    static block_ref refs[LEASED_KEYS_PER_TURN];
    struct call call = {.s = door.session};
    uint32_t name;

    refs[0] = store(rig.one, 1);
    for (uint32_t i = 1; i < LEASED_KEYS_PER_TURN; i++)
        refs[i] = refs[0];
    for (int i = 0; i < 3; i++)
        cr_assert_eq(lease_new(&call, refs, LEASED_KEYS_PER_TURN, 60000, &name), 0);
    drop(refs[0]);
    hang_up();
    for (uint32_t left = 2; left > 0; left--) {
        cr_expect_eq(rig.metrics.leases, left);
        cr_expect_not(door.conn.freed);
        iterate();
    }
    cr_expect_eq(rig.metrics.leases, 0u);
}

/* ---- blocks that are not there, and no room ---- */

Test(request, a_load_counts_what_the_shared_tier_has_no_more)
{
    uint32_t id;

    peer_stores(rig.one, 1, 1);
    note(rig.one, 1, 1, true);
    shared_refuses(-ENOENT, 1);
    id = load_one(1, region_open(rig.one, 4), 0, 0);
    cr_expect_eq(answered_with(id, UCM_BLOCK_MISS), 1u);
    cr_expect_eq(rig.metrics.load_blocks_missed, 1u);
    cr_expect_eq(find(rig.one, 1), 0u);
}

/* As after a start with shorter slabs. Nothing is wrong with the copy. */
Test(request, a_part_longer_than_an_slab_has_no_room)
{
    struct ns *big = space("big", 1, MIB);
    block_ref ref = open_block(big, 1);

    place_long(ref);
    drop(ref);
    cr_expect_eq(answered_with(load_range(region_open(big, 1), 1, 1), UCM_BLOCK_NO_ROOM), 1u);
}

/* Half of the arena is four parts. */
Test(request, a_prefetch_finds_room_for_what_is_in_dram)
{
    struct msg_prefetch m = {.ns = rig.one->id};
    uint32_t id;

    shared_refuses(-EROFS, 7);
    for (uint64_t i = 1; i <= 5; i++)
        drop(store_below(rig.one, i));
    drop(store(rig.one, 6));
    drop(store(rig.one, 7));
    iterate();
    tier_finish();
    shared.refuse_n = 0;
    m.keys = chain(1, 7);
    id = call(UCM_METHOD_PREFETCH, &proto_prefetch, &m);
    cr_expect_eq(answered_with(id, UCM_BLOCK_OK), 6u);
    cr_expect(statuses(id, 7, UCM_BLOCK_OK, UCM_BLOCK_OK, UCM_BLOCK_OK, UCM_BLOCK_OK,
                       UCM_BLOCK_NO_ROOM, UCM_BLOCK_OK, UCM_BLOCK_OK));
}
