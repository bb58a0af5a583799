/* What the gate measures: daemons of its own with one copier, one worker, and the machine's like of
 * each thing by one thread. A case takes some 10 ms. */
#include "tests/bench/ucm_bench_gate.h"
#include "tests/bench/ucm_bench_workload.h"

#include <errno.h>
#include <openssl/sha.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ANSWER_MS 30000
#define LARGE_CHUNK (64u << 10)
#define LARGE_BLOCK (256u << 10)
#define LARGE_BLOCKS 64u
#define SMALL_CHUNK (4u << 10)
#define SMALL_BLOCK (64u << 10)
#define SMALL_BLOCKS 128u
#define BATCH 32u
#define IN_FLIGHT 4u
#define CALLS 200u
#define MANY_KEYS 64u
#define LEASE_MS 10000
#define RESPONSE_BYTES 24
#define REQUEST_BYTES(keys) ((size_t)(keys)*RIG_KEY_BYTES + 40)
#define HASH_BLOCKS 4096u
#define HASH_TOKENS 16u

/* ---- lookups and other short requests, against an echo ---- */

static double since(uint64_t start_ns)
{
    return (double)(clock_ns() - start_ns) / 1e9;
}

static int echo_seconds(struct echo *e, unsigned calls, double *seconds)
{
    struct samples us = {0};
    uint64_t start = clock_ns();
    int rc = echo_run(e, calls, &us);

    *seconds = since(start);
    samples_free(&us);
    return rc < 0 ? bench_fail(BENCH_FAILED, "the echo failed") : 0;
}

static int base_echo_one(struct gate_bench *b, double *seconds)
{
    return echo_seconds(&b->echo_one, CALLS, seconds);
}

static int base_echo_many(struct gate_bench *b, double *seconds)
{
    return echo_seconds(&b->echo_many, CALLS, seconds);
}

static int lookups(struct gate_bench *b, uint32_t n, uint32_t lease_ms, double *seconds)
{
    struct rig *rig = &b->large.rig;
    struct ucm_lookup lookup = {.keys = b->large.keys, .n_keys = n, .lease_ms = lease_ms};
    uint64_t start = clock_ns();

    for (unsigned i = 0; i < CALLS; i++) {
        uint32_t hits = 0, lease = 0;

        if (ucm_lookup_prefix(rig->ns, &lookup, rig->timeout_ms, &hits, NULL, &lease) < 0 ||
            (lease_ms && ucm_release(rig->client, lease, rig->timeout_ms) < 0))
            return bench_fail(BENCH_FAILED, "lookup: %s", ucm_errmsg());
        if (hits != n)
            return bench_fail(BENCH_FAILED, "a lookup of %u stored keys found %u", n, hits);
    }
    *seconds = since(start);
    return 0;
}

static int own_lookup_one(struct gate_bench *b, double *seconds)
{
    return lookups(b, 1, 0, seconds);
}

static int own_lookup_many(struct gate_bench *b, double *seconds)
{
    return lookups(b, MANY_KEYS, 0, seconds);
}

static int own_lease(struct gate_bench *b, double *seconds)
{
    return lookups(b, MANY_KEYS, LEASE_MS, seconds);
}

static int moved(struct gate_rig *r, int rc, const struct rig_moved *m, uint32_t n)
{
    if (rc < 0)
        return bench_rig_fail(&r->rig, rc);
    return m->ok + m->exists == n ? 0 : bench_fail(BENCH_FAILED, "blocks were not moved");
}

static int singles(struct gate_bench *b, enum rig_op op, double *seconds)
{
    struct gate_rig *r = &b->small;
    uint64_t start = clock_ns();
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < CALLS; i++) {
        struct rig_move move = {.keys = r->keys, .n = 1, .batch = 1, .in_flight = 1};
        struct rig_moved m;

        rc = moved(r, rig_move(&r->rig, op, &move, NULL, &m), &m, 1);
    }
    *seconds = since(start);
    return rc;
}

static int own_load_one(struct gate_bench *b, double *seconds)
{
    return singles(b, RIG_LOAD, seconds);
}

/* Of a block that is stored. */
static int own_dump_again(struct gate_bench *b, double *seconds)
{
    return singles(b, RIG_DUMP, seconds);
}

/* ---- copies, against memcpy ---- */

static int all(struct gate_rig *r, enum rig_op op, const uint8_t *keys, double *seconds)
{
    struct rig_move move = {.keys = keys, .n = r->n, .batch = BATCH, .in_flight = IN_FLIGHT};
    struct rig_moved m;
    uint64_t start = clock_ns();
    int rc = moved(r, rig_move(&r->rig, op, &move, NULL, &m), &m, r->n);

    *seconds = since(start);
    return rc;
}

static int base_copy(struct gate_rig *r, bool to_region, double *seconds)
{
    double rate = copy_run(&r->copy, to_region);

    if (!(rate > 0))
        return bench_fail(BENCH_FAILED, "memcpy failed");
    *seconds = (double)r->n * (double)r->rig.block_bytes / rate;
    return 0;
}

/* New keys each time; the blocks go afterwards. */
static int dump_new(struct gate_bench *b, struct gate_rig *r, double *seconds)
{
    int rc;

    bench_keys(b->run, ++b->round, r->n, r->fresh);
    rc = all(r, RIG_DUMP, r->fresh, seconds);
    if (rc == 0 && rig_evict(&r->rig, 0) < 0)
        rc = bench_rig_fail(&r->rig, -UCM_EIO);
    return rc;
}

static int own_load_large(struct gate_bench *b, double *seconds)
{
    return all(&b->large, RIG_LOAD, b->large.keys, seconds);
}

static int base_load_large(struct gate_bench *b, double *seconds)
{
    return base_copy(&b->large, true, seconds);
}

static int own_load_small(struct gate_bench *b, double *seconds)
{
    return all(&b->small, RIG_LOAD, b->small.keys, seconds);
}

static int base_load_small(struct gate_bench *b, double *seconds)
{
    return base_copy(&b->small, true, seconds);
}

static int own_dump_large(struct gate_bench *b, double *seconds)
{
    return dump_new(b, &b->dumps_large, seconds);
}

static int base_dump_large(struct gate_bench *b, double *seconds)
{
    return base_copy(&b->dumps_large, false, seconds);
}

static int own_dump_small(struct gate_bench *b, double *seconds)
{
    return dump_new(b, &b->dumps_small, seconds);
}

static int base_dump_small(struct gate_bench *b, double *seconds)
{
    return base_copy(&b->dumps_small, false, seconds);
}

/* ---- NVMe, against raw reads ---- */

static int from_disk(struct gate_bench *b, enum rig_op op, double *seconds)
{
    struct gate_rig *r = &b->on_disk;

    if (rig_evict(&r->rig, 1) < 0)
        return bench_rig_fail(&r->rig, -UCM_EIO);
    return all(r, op, r->keys, seconds);
}

static int own_disk_load(struct gate_bench *b, double *seconds)
{
    return from_disk(b, RIG_LOAD, seconds);
}

static int own_prefetch(struct gate_bench *b, double *seconds)
{
    return from_disk(b, RIG_PREFETCH, seconds);
}

static int base_read(struct gate_bench *b, double *seconds)
{
    double rate;

    if (reader_run(&b->reader, &rate) < 0 || !(rate > 0))
        return bench_fail(BENCH_FAILED, "%s", b->reader.why);
    *seconds = (double)b->on_disk.n * (double)b->on_disk.rig.block_bytes / rate;
    return 0;
}

/* ---- keys, against the bare hash of as many bytes ---- */

static int own_keys(struct gate_bench *b, double *seconds)
{
    uint64_t start = clock_ns();

    if (ucm_keys_sha256(NULL, b->tokens, HASH_TOKENS, HASH_BLOCKS, b->hashed) < 0)
        return bench_fail(BENCH_FAILED, "%s", ucm_errmsg());
    *seconds = since(start);
    return 0;
}

static int base_keys(struct gate_bench *b, double *seconds)
{
    uint8_t in[32 + 4 * HASH_TOKENS] = {0};
    uint64_t start = clock_ns();

    for (uint32_t i = 0; i < HASH_BLOCKS; i++) {
        memcpy(in + 32, b->tokens + (size_t)i * HASH_TOKENS, sizeof in - 32);
        SHA256(in, sizeof in, b->hashed + (size_t)i * 32);
    }
    *seconds = since(start);
    return 0;
}

const struct gate_case gate_cases[GATE_CASES] = {
    {"lookup of 1 key", "echo", own_lookup_one, base_echo_one},
    {"lookup of 64 keys", "echo", own_lookup_many, base_echo_many},
    {"lookup with a lease, and its release", "echo", own_lease, base_echo_many},
    {"load of 1 block of 64 KiB", "echo", own_load_one, base_echo_one},
    {"dump of a block that is stored", "echo", own_dump_again, base_echo_one},
    {"load of 16 MiB in 64 KiB", "memcpy", own_load_large, base_load_large},
    {"load of 8 MiB in 4 KiB", "memcpy", own_load_small, base_load_small},
    {"dump of 16 MiB in 64 KiB", "memcpy", own_dump_large, base_dump_large},
    {"dump of 8 MiB in 4 KiB", "memcpy", own_dump_small, base_dump_small},
    {"load of 16 MiB from NVMe", "raw reads", own_disk_load, base_read},
    {"prefetch of 16 MiB", "raw reads", own_prefetch, base_read},
    {"keys of 4096 blocks", "SHA-256", own_keys, base_keys},
};

/* ---- opening ---- */

/* The worker has one processor, and whoever answers it another: the daemons as the echo. Else a round
 * trip takes five times as long whenever the scheduler places one of the two sides otherwise. */
static void processor_take(const cpu_set_t *allowed, int which)
{
    cpu_set_t one;
    int last = -1;

    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && which >= 0; cpu++)
        if (CPU_ISSET(cpu, allowed)) {
            last = cpu;
            which--;
        }
    if (last >= 0)
        CPU_SET(last, &one);
    (void)sched_setaffinity(0, sizeof one, &one); /* it is only noisier then */
}

static int rig_begin(struct gate_bench *b, struct gate_rig *r, const struct daemon *d,
                     const char *model, bool small)
{
    struct rig_options o = {.socket = d->socket,
                            .name = program_name(),
                            .model = model,
                            .parts = 1,
                            .block_bytes = small ? SMALL_BLOCK : LARGE_BLOCK,
                            .chunk = small ? SMALL_CHUNK : LARGE_CHUNK,
                            .blocks = small ? SMALL_BLOCKS : LARGE_BLOCKS,
                            .timeout_ms = (int)args_number(b->args, "timeout")};
    int rc;

    r->n = o.blocks;
    r->keys = malloc((size_t)r->n * RIG_KEY_BYTES);
    r->fresh = malloc((size_t)r->n * RIG_KEY_BYTES);
    if (r->keys == NULL || r->fresh == NULL)
        return bench_fail(BENCH_FAILED, "memory ran out");
    rc = rig_open(&r->rig, &o);
    if (rc < 0)
        return bench_rig_fail(&r->rig, rc);
    r->open = true;
    rc = rig_wait_arena(&r->rig);
    if (rc < 0)
        return bench_rig_fail(&r->rig, rc);
    if (copy_init(&r->copy, r->rig.memory, r->rig.blocks, r->rig.planes, r->rig.chunk, 1) < 0)
        return bench_fail(BENCH_FAILED, "memory ran out");
    return 0;
}

/* Stores the blocks that are loaded. */
static int rig_store(struct gate_bench *b, struct gate_rig *r)
{
    double seconds;

    bench_keys(b->run, ++b->round, r->n, r->keys);
    for (uint32_t i = 0; i < r->n; i++)
        rig_fill(&r->rig, i, r->keys + (size_t)i * RIG_KEY_BYTES);
    return all(r, RIG_DUMP, r->keys, &seconds);
}

static void rig_end(struct gate_rig *r)
{
    if (r->open) {
        copy_close(&r->copy);
        rig_close(&r->rig);
    }
    free(r->keys);
    free(r->fresh);
}

static int daemon_begin(struct daemon *d, const char *path, const char *dir,
                        const char *const *sets)
{
    int rc;

    *d = (struct daemon){.path = path, .dir = dir};
    rc = daemon_start(d, sets);
    if (rc == 0 && daemon_wait(d, ANSWER_MS) < 0)
        rc = -EPROTO;
    return rc == 0 ? 0 : bench_fail(BENCH_FAILED, "%s could not be started in %s", path, dir);
}

static int daemons_begin(struct gate_bench *b)
{
    const char *path = args_text(b->args, "ucmd");
    static const char *const in_memory[] = {"arena.size=256MiB", "device.cpu_threads=1",
                                            "device.cuda=off", "log.level=error", NULL};
    char paths[240];
    const char *const on_disk[] = {"arena.size=128MiB",  "device.cpu_threads=1",
                                   "device.cuda=off",    "log.level=error",
                                   "nvme.size=256MiB",   paths,
                                   "nvme.segment=16MiB", NULL};
    int rc;

    snprintf(paths, sizeof paths, "nvme.paths=%s", b->nvme_folder);
    rc = daemon_begin(&b->memory, path, b->memory_folder, in_memory);
    return rc == 0 ? daemon_begin(&b->disk, path, b->folder, on_disk) : rc;
}

static int stores_fill(struct gate_bench *b)
{
    uint64_t before = 0;
    int rc = rig_store(b, &b->large);

    if (rc == 0)
        rc = rig_store(b, &b->small);
    if (rc == 0 && rig_written(&b->on_disk.rig, &before) < 0)
        rc = bench_rig_fail(&b->on_disk.rig, -UCM_EIO);
    if (rc == 0)
        rc = rig_store(b, &b->on_disk);
    if (rc == 0 && rig_wait_written(&b->on_disk.rig, before + b->on_disk.n) < 0)
        rc = bench_rig_fail(&b->on_disk.rig, -UCM_EDEADLINE);
    return rc;
}

static int machine_open(struct gate_bench *b)
{
    b->tokens = calloc((size_t)HASH_BLOCKS * HASH_TOKENS, sizeof *b->tokens);
    b->hashed = malloc((size_t)HASH_BLOCKS * 32);
    if (b->tokens == NULL || b->hashed == NULL ||
        echo_start(&b->echo_one, REQUEST_BYTES(1), RESPONSE_BYTES) < 0 ||
        echo_start(&b->echo_many, REQUEST_BYTES(MANY_KEYS), RESPONSE_BYTES) < 0)
        return bench_fail(BENCH_FAILED, "the baselines could not be started");
    if (reader_open(&b->reader, b->folder, LARGE_BLOCK, LARGE_BLOCKS, BATCH * IN_FLIGHT) < 0)
        return bench_fail(BENCH_FAILED, "%s", b->reader.why);
    b->reading = true;
    return 0;
}

int gate_open(struct gate_bench *b, const struct args *a)
{
    cpu_set_t allowed;
    int rc;

    CPU_ZERO(&allowed);

    *b = (struct gate_bench){.args = a, .run = bench_run_id()};
    snprintf(b->folder, sizeof b->folder, "%.150s/ucm-gate-XXXXXX", args_text(a, "dir"));
    if (!mkdtemp(b->folder)) {
        b->folder[0] = '\0';
        return bench_fail(BENCH_FAILED, "%s: %s", args_text(a, "dir"), strerror(errno));
    }
    snprintf(b->memory_folder, sizeof b->memory_folder, "%s/m", b->folder);
    snprintf(b->nvme_folder, sizeof b->nvme_folder, "%s/nvme", b->folder);
    if (mkdir(b->memory_folder, 0755) < 0 || mkdir(b->nvme_folder, 0755) < 0)
        return bench_fail(BENCH_FAILED, "%s: %s", b->folder, strerror(errno));
    (void)sched_getaffinity(0, sizeof allowed, &allowed);
    processor_take(&allowed, 1); /* children inherit it */
    rc = machine_open(b);
    if (rc == 0)
        rc = daemons_begin(b);
    processor_take(&allowed, 0);
    if (rc == 0)
        rc = rig_begin(b, &b->large, &b->memory, "gate large", false);
    if (rc == 0)
        rc = rig_begin(b, &b->small, &b->memory, "gate small", true);
    if (rc == 0)
        rc = rig_begin(b, &b->dumps_large, &b->memory, "gate dumps large", false);
    if (rc == 0)
        rc = rig_begin(b, &b->dumps_small, &b->memory, "gate dumps small", true);
    if (rc == 0)
        rc = rig_begin(b, &b->on_disk, &b->disk, "gate disk", false);
    return rc == 0 ? stores_fill(b) : rc;
}

void gate_close(struct gate_bench *b)
{
    rig_end(&b->large);
    rig_end(&b->small);
    rig_end(&b->dumps_large);
    rig_end(&b->dumps_small);
    rig_end(&b->on_disk);
    if (b->memory.pid > 0)
        (void)daemon_stop(&b->memory);
    if (b->disk.pid > 0)
        (void)daemon_stop(&b->disk);
    if (b->reading)
        reader_close(&b->reader);
    /* The later one first: its process has the other's socket, too. */
    if (b->echo_many.child > 0)
        echo_stop(&b->echo_many);
    if (b->echo_one.child > 0)
        echo_stop(&b->echo_one);
    free(b->tokens);
    free(b->hashed);
    if (b->folder[0] != '\0' && daemon_folder_remove(b->folder) < 0)
        bench_fail(BENCH_FAILED, "%s could not be removed", b->folder);
}
