#include "client/bench/chain.h"

#include "client/bench/bench.h"
#include "client/bench/select.h"
#include "client/ctl/answer.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define REGION_BLOCKS 4096u /* stored at a time */
#define KV_BYTES (2u * CHAIN_KV_HEADS * CHAIN_HEAD_DIM)
#define SLOT 4096u
#define START_MS 30000
#define POLL_US 10000
#define MIB (UINT64_C(1) << 20)

static int fail_call(const char *what)
{
    return bench_fail(BENCH_FAILED, "%s: %s", what, ucm_errmsg());
}

int chain_rig_metric(struct chain_rig *rig, const char *name, uint64_t *out)
{
    struct answer stats;

    if (answer_call(rig->client, UCM_METHOD_STATS, NULL, -1, &stats) < 0)
        return fail_call("stats");
    *out = answer_u64(answer_get(stats.root, "metrics"), name);
    answer_close(&stats);
    return 0;
}

/* ---- the daemon ---- */

static uint64_t slot_bytes(uint64_t bytes)
{
    return (bytes + SLOT - 1) / SLOT * SLOT;
}

/* Chains hold digests in a quarter of the arena at most. */
static uint64_t arena_mib(const struct chain_rig *rig, uint32_t blocks)
{
    uint64_t digests = blocks * slot_bytes((uint64_t)rig->plan.bytes * rig->layers);
    uint64_t base = blocks * slot_bytes((uint64_t)KV_BYTES * rig->layers);
    uint64_t least = digests + base > 4 * digests ? digests + base : 4 * digests;

    return (least + least / 16) / MIB / 64 * 64 + 256;
}

static int start(struct chain_rig *rig, uint32_t blocks)
{
    struct ucm_options o = {.socket = rig->daemon.socket, .name = "ucm-bench"};
    char arena[64], threads[64];

    snprintf(arena, sizeof(arena), "arena.size=%lluMiB",
             (unsigned long long)arena_mib(rig, blocks));
    snprintf(threads, sizeof(threads), "device.cpu_threads=%u", rig->threads);
    if (daemon_start(&rig->daemon, (const char *const[]){arena, threads, NULL}) != 0)
        return bench_fail(BENCH_FAILED, "the daemon could not be started");
    if (ucm_connect(&o, START_MS, &rig->client) < 0 ||
        ucm_server_info(rig->client, &rig->server) < 0)
        return fail_call("the daemon does not answer");
    return 0;
}

static int wait_arena(struct chain_rig *rig)
{
    uint64_t configured = 1, ready = 0;

    while (ready < configured) {
        int rc = chain_rig_metric(rig, "arena_bytes_configured", &configured);

        if (rc == 0)
            rc = chain_rig_metric(rig, "arena_bytes_total", &ready);
        if (rc != 0)
            return rc;
        usleep(POLL_US);
    }
    return 0;
}

/* ---- namespaces and regions ---- */

static int store_register(struct chain_store *s, uint32_t layers, uint32_t layer_bytes)
{
    struct ucm_plane *planes = calloc(layers, sizeof(*planes));
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD,
                                .bytes = (uint64_t)REGION_BLOCKS * layers * layer_bytes};
    struct ucm_region_spec spec = {.blocks = REGION_BLOCKS,
                                   .device = "cpu",
                                   .memory = &memory,
                                   .n_memory = 1,
                                   .planes = planes,
                                   .n_planes = layers};
    void *p;
    int rc = 0;

    if (!planes)
        return bench_fail(BENCH_FAILED, "memory ran out");
    for (uint32_t l = 0; l < layers; l++)
        planes[l] = (struct ucm_plane){.offset = (uint64_t)l * REGION_BLOCKS * layer_bytes,
                                       .stride = layer_bytes,
                                       .chunk_bytes = layer_bytes,
                                       .shard = l};
    if (ucm_shared_memory(memory.bytes, &memory.fd, &p) < 0) {
        rc = fail_call("making a region's memory");
    } else {
        s->memory = p;
        s->bytes = memory.bytes;
        if (ucm_region_register(s->ns, &spec, -1, &s->region) < 0)
            rc = fail_call("registering a region");
        close(memory.fd);
    }
    free(planes);
    return rc;
}

static void store_close(struct chain_store *s)
{
    if (s->region)
        (void)ucm_region_unregister(s->region, -1);
    ucm_namespace_close(s->ns);
    if (s->memory)
        munmap(s->memory, s->bytes);
    *s = (struct chain_store){.ns = NULL};
}

static const struct ucm_sparse_digest digest = {
    .method = UCM_SPARSE_MEAN,
    .shape = {.dtype = UCM_SPARSE_BF16,
              .tokens = 1,
              .kv_heads = CHAIN_KV_HEADS,
              .head_dim = CHAIN_HEAD_DIM,
              .k_token_stride = KV_BYTES,
              .k_head_stride = 2 * CHAIN_HEAD_DIM},
};

static int namespaces_open(struct chain_rig *rig)
{
    struct ucm_identity identity = {.model = "ucm-bench chain",
                                    .dtype = "bf16",
                                    .layout = "bench-k/1",
                                    .block_tokens = 1,
                                    .key_bytes = RIG_KEY_BYTES,
                                    .parts = 1,
                                    .shards = &rig->layers,
                                    .n_shards = 1,
                                    .shard_bytes = KV_BYTES};
    int rc;

    if (ucm_namespace_open(rig->client, &identity, -1, &rig->base.ns) < 0 ||
        ucm_sparse_digest_open(rig->base.ns, &digest, 0, -1, &rig->digests.ns) < 0)
        return fail_call("opening a namespace");
    rc = store_register(&rig->base, rig->layers, KV_BYTES);
    return rc != 0 ? rc : store_register(&rig->digests, rig->layers, rig->plan.bytes);
}

/* ---- what is stored ---- */

static void digests_fill(const struct chain_rig *rig, uint32_t first, uint32_t n)
{
    for (uint32_t l = 0; l < rig->layers; l++)
        for (uint32_t i = 0; i < n; i++)
            select_fill_digest(&rig->plan, ((uint64_t)(first + i) << 32) + l,
                               rig->digests.memory +
                                   ((size_t)l * REGION_BLOCKS + i) * rig->plan.bytes);
}

static int dump(const struct chain_store *s, const uint8_t *keys, const uint32_t *blocks,
                uint32_t n)
{
    struct ucm_transfer t = {.keys = keys, .blocks = blocks, .n_keys = n};
    struct ucm_result result = {0};
    struct ucm_task *task;
    int rc;

    if (ucm_dump(s->region, &t, -1, &task) < 0)
        return fail_call("storing");
    rc = ucm_task_wait(task, -1, &result);
    if (rc < 0)
        rc = fail_call("storing");
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        if (result.result[i] != UCM_BLOCK_IS_OK)
            rc = bench_fail(BENCH_FAILED, "a block was not stored (%u)", result.result[i]);
    ucm_task_free(task);
    return rc;
}

static int store_all(struct chain_rig *rig, uint32_t blocks)
{
    uint32_t numbers[REGION_BLOCKS];
    int rc = 0;

    for (uint32_t i = 0; i < REGION_BLOCKS; i++)
        numbers[i] = i;
    for (uint32_t at = 0; rc == 0 && at < blocks; at += REGION_BLOCKS) {
        uint32_t n = blocks - at < REGION_BLOCKS ? blocks - at : REGION_BLOCKS;
        const uint8_t *keys = rig->keys + (size_t)at * RIG_KEY_BYTES;

        digests_fill(rig, at, n);
        rc = dump(&rig->base, keys, numbers, n);
        if (rc == 0)
            rc = dump(&rig->digests, keys, numbers, n);
    }
    return rc;
}

/* ---- life ---- */

int chain_rig_open(struct chain_rig *rig, const struct args *a, uint32_t blocks)
{
    int rc;

    *rig = (struct chain_rig){.dir = "/tmp/ucm-bench-XXXXXX",
                              .layers = (uint32_t)args_number(a, "layers"),
                              .threads = (unsigned)args_number(a, "threads")};
    rig->daemon = (struct daemon){.path = args_text(a, "ucmd"), .dir = rig->dir};
    rig->plan = chain_plan();
    rig->keys = malloc((size_t)blocks * RIG_KEY_BYTES);
    if (!rig->keys)
        return bench_fail(BENCH_FAILED, "memory ran out");
    bench_keys(bench_run_id(), 0, blocks, rig->keys);
    if (!mkdtemp(rig->dir)) {
        rig->dir[0] = '\0';
        return bench_fail(BENCH_FAILED, "no temporary folder");
    }
    rc = start(rig, blocks);
    if (rc == 0)
        rc = wait_arena(rig);
    if (rc == 0)
        rc = namespaces_open(rig);
    return rc == 0 ? store_all(rig, blocks) : rc;
}

void chain_rig_close(struct chain_rig *rig)
{
    store_close(&rig->digests);
    store_close(&rig->base);
    ucm_close(rig->client);
    if (rig->daemon.pid > 0)
        (void)daemon_stop(&rig->daemon);
    if (rig->dir[0])
        (void)daemon_folder_remove(rig->dir);
    free(rig->keys);
    *rig = (struct chain_rig){.keys = NULL};
}

struct ucm_digest_plan chain_plan(void)
{
    const struct ucm_digest_spec spec = {.method = UCM_DIGEST_MEAN,
                                         .shape = {.dtype = UCM_KV_BF16,
                                                   .tokens = 1,
                                                   .kv_heads = CHAIN_KV_HEADS,
                                                   .head_dim = CHAIN_HEAD_DIM,
                                                   .k_token_stride = KV_BYTES,
                                                   .k_head_stride = 2 * CHAIN_HEAD_DIM}};
    struct ucm_digest_plan plan;
    char why[UCM_SPARSE_WHY];

    (void)ucm_digest_plan_init(&plan, &spec, why); /* this spec is accepted */
    return plan;
}
