#include "client/bench/alone.h"

#include "client/bench/disk.h"
#include "client/bench/figure.h"
#include "daemon/config/config.h"
#include "daemon/format/nvme_format.h"
#include "daemon/seal/seal.h"
#include "daemon/tier/tier.h"
#include "proto/errors.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <uv.h>

#define LAYERS 32u /* of a part */
#define SEGMENT (64ull << 20)

struct job {
    struct tier_io io;
    struct alone *alone;
};

struct alone {
    uv_loop_t loop;
    struct config config;
    struct metrics metrics;
    struct tier *tier;
    struct seal *seal;
    struct tier_stats stats;
    char file[DISK_PATH_BYTES];
    uint64_t part_bytes, random;
    unsigned parts, jobs_n;
    /* of the present run */
    bool write;
    uint64_t end_ns, limit, next, done, failed;
    struct tier_place *places;
    char *memory; /* jobs_n slots */
    size_t memory_bytes;
    struct job *jobs;
};

static bool drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    (void)ctx, (void)owner, (void)loc;
    return false;
}

static unsigned heat_cb(void *ctx, uint64_t owner)
{
    (void)ctx, (void)owner;
    return TIER_HEAT_BUSY;
}

/* Checkpoints leave all of it out. */
static bool describe_cb(void *ctx, uint64_t owner, struct tier_described *out)
{
    (void)ctx, (void)owner, (void)out;
    return false;
}

/* ---- one run ---- */

static void job_next(struct job *j);

static void job_done_cb(struct tier_io *io, int status)
{
    struct job *j = LIST_ENTRY(io, struct job, io);
    struct alone *a = j->alone;

    a->failed += status < 0;
    a->done += status == 0;
    if (a->write && status == 0)
        a->places[io->name.owner] = io->place;
    job_next(j);
}

/* Reads go all over the file; writes take the parts in turn, whose old places are given up. */
static void job_next(struct job *j)
{
    struct alone *a = j->alone;
    uint64_t part;
    int rc;

    if (a->next >= a->limit || clock_ns() >= a->end_ns || a->failed > 0)
        return;
    part = a->next++ % a->parts;
    if (!a->write) {
        a->random = a->random * 6364136223846793005u + 1442695040888963407u;
        part = (a->random >> 33) % a->parts;
    } else if (a->places[part].loc != 0) {
        tier_nvme.forget(a->tier, &a->places[part], a->part_bytes);
        a->places[part].loc = 0;
    }
    j->io.op = a->write ? TIER_WRITE : TIER_READ;
    j->io.name.owner = part;
    j->io.name.key_bytes = UCM_MIN_KEY_BYTES;
    memcpy(j->io.name.key, &part, sizeof(part));
    j->io.place = a->places[part];
    rc = tier_nvme.submit(a->tier, &j->io);
    a->failed += rc < 0;
}

static int run_until(struct alone *a, bool write, uint64_t end_ns, uint64_t limit)
{
    a->write = write;
    a->end_ns = end_ns;
    a->limit = limit;
    a->done = a->failed = 0;
    a->next = 0;
    for (unsigned i = 0; i < a->jobs_n; i++)
        job_next(&a->jobs[i]);
    uv_run(&a->loop, UV_RUN_DEFAULT);
    return a->failed > 0 ? -EIO : 0;
}

int alone_run(struct alone *a, bool write, double seconds, double *rate, double *cpu_s_per_gb)
{
    uint64_t start = clock_ns();
    double cpu = disk_cpu_s();
    int rc = run_until(a, write, start + (uint64_t)(seconds * 1e9), UINT64_MAX);
    double bytes = (double)(a->done * a->part_bytes);

    *rate = bytes * 1e9 / (double)(clock_ns() - start);
    *cpu_s_per_gb = (disk_cpu_s() - cpu) * 1e9 / bytes;
    return rc;
}

/* ---- opening ---- */

/* A key for all tenants, in a file of the folder, and the namespace that the parts are of. */
static int seal_start(struct alone *a, const char *folder, char *why, size_t why_bytes)
{
    struct config_error bad = {.text = ""};
    char path[DISK_PATH_BYTES + 16], set[DISK_PATH_BYTES + 64];
    FILE *f;
    int rc;

    snprintf(path, sizeof(path), "%s/keys", folder);
    f = fopen(path, "w");
    if (!f)
        return -errno;
    fprintf(f, "%064d\n", 7); /* it protects nothing */
    if (fclose(f) != 0 || chmod(path, 0600) < 0)
        return -errno;
    snprintf(set, sizeof(set), "encryption.tenants=* file:%s", path);
    rc = config_set(&a->config, set, &bad);
    if (rc < 0)
        snprintf(why, why_bytes, "%s", bad.text);
    return rc < 0 ? rc : seal_open(&a->loop, &a->config, &a->metrics, &a->seal);
}

static void recorded_cb(struct tier_ns_record *n, int status)
{
    n->from_sequence = status == 0;
}

static int ns_record(struct alone *a)
{
    static const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
        identity[] = "bench           \5\0\0\0bench";
    struct tier_ns_record n = {.fingerprint = fingerprint,
                               .identity = identity,
                               .identity_bytes = sizeof(identity) - 1,
                               .done_cb = recorded_cb};

    tier_nvme.ns_record(a->tier, &n);
    uv_run(&a->loop, UV_RUN_DEFAULT);
    return n.from_sequence ? 0 : -EIO;
}

static int tier_start(struct alone *a, const struct alone_options *o, char *why, size_t why_bytes)
{
    /* the others are for recovery, the scrub, moves and purges, of which there are none */
    struct tier_callbacks callbacks = {
        .drop_cb = drop_cb, .heat_cb = heat_cb, .describe_cb = describe_cb};
    uint64_t slots = nvme_records(SEGMENT, nvme_stride(a->part_bytes));
    struct config_error bad = {.text = ""};
    struct ucm_error e = {0};
    char set[4][DISK_PATH_BYTES];
    int rc = 0;

    /* Room as well for what is under way: its old place is not free before the whole segment is. */
    a->config.nvme_size = NVME_DATA_OFFSET + ((a->parts + a->jobs_n) / slots + 4) * SEGMENT;
    snprintf(set[0], sizeof(set[0]), "nvme.paths=%s", o->folder);
    snprintf(set[1], sizeof(set[1]), "nvme.size=%" PRIu64, a->config.nvme_size);
    snprintf(set[2], sizeof(set[2]), "nvme.depth=%u", o->depth);
    snprintf(set[3], sizeof(set[3]), "nvme.io=%s", o->io);
    for (int i = 0; rc == 0 && i < 4; i++)
        rc = config_set(&a->config, set[i], &bad);
    if (rc < 0) {
        snprintf(why, why_bytes, "%s", bad.text);
        return rc;
    }
    rc = o->sealed ? seal_start(a, o->folder, why, why_bytes) : 0;
    if (rc < 0)
        return rc;
    callbacks.seal = a->seal;
    rc = tier_nvme.open(&a->loop, &a->config, &callbacks, &a->metrics, &a->tier, &e);
    if (rc < 0)
        snprintf(why, why_bytes, "%s", e.text);
    if (rc == 0 && o->sealed)
        rc = ns_record(a);
    return rc;
}

static int memory_init(struct alone *a, bool sealed)
{
    a->memory_bytes = a->jobs_n * a->part_bytes;
    a->memory =
        mmap(NULL, a->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (a->memory == MAP_FAILED)
        return -ENOMEM;
    a->places = calloc(a->parts, sizeof(a->places[0]));
    a->jobs = calloc(a->jobs_n, sizeof(a->jobs[0]));
    if (!a->places || !a->jobs)
        return -ENOMEM;
    (void)madvise(a->memory, a->memory_bytes, MADV_HUGEPAGE);
    for (size_t i = 0; i < a->memory_bytes; i++)
        a->memory[i] = (char)(i * 2654435761u >> 13);
    for (unsigned i = 0; i < a->jobs_n; i++) {
        a->jobs[i].alone = a;
        a->jobs[i].io.data = a->memory + i * a->part_bytes;
        a->jobs[i].io.bytes = a->part_bytes;
        a->jobs[i].io.shard_bytes = a->part_bytes / LAYERS;
        a->jobs[i].io.done_cb = job_done_cb;
        a->jobs[i].io.seal = sealed;
    }
    return 0;
}

int alone_open(const struct alone_options *o, struct alone **out, char *why, size_t why_bytes)
{
    struct alone *a = calloc(1, sizeof(*a));
    int rc;

    if (!a)
        return -ENOMEM;
    a->part_bytes = o->part_bytes;
    a->parts = (unsigned)(o->total_bytes / o->part_bytes);
    a->jobs_n = 2 * o->depth;
    if (a->jobs_n > a->parts / 2)
        a->jobs_n = a->parts / 2; /* no part may be written twice at once */
    a->random = clock_ns();
    config_init(&a->config);
    a->config.nvme_rewrite = 0;
    a->config.nvme_scrub = 0;
    snprintf(a->file, sizeof(a->file), "%s/%s", o->folder, NVME_CACHE_FILE);
    snprintf(why, why_bytes, "memory ran out");
    rc = uv_loop_init(&a->loop);
    if (rc < 0)
        goto err_after_alone;
    rc = memory_init(a, o->sealed);
    if (rc == 0)
        rc = tier_start(a, o, why, why_bytes);
    if (rc < 0)
        goto err_after_loop;
    tier_nvme.buffer_add(a->tier, 0, a->memory, a->memory_bytes);
    /* Twice round: a place that was never written costs the file system more than one that was. */
    rc = run_until(a, true, UINT64_MAX, 2 * a->config.nvme_size / a->part_bytes);
    if (rc < 0) {
        snprintf(why, why_bytes, "%s: parts could not be written", a->file);
        alone_close(a);
        return rc;
    }
    *out = a;
    return 0;

err_after_loop:
    uv_loop_close(&a->loop);
err_after_alone:
    free(a->places);
    free(a->jobs);
    if (a->memory && a->memory != MAP_FAILED)
        munmap(a->memory, a->memory_bytes);
    config_free(&a->config);
    free(a);
    return rc;
}

void alone_close(struct alone *a)
{
    tier_nvme.close(a->tier);
    seal_close(a->seal);
    uv_run(&a->loop, UV_RUN_DEFAULT);
    uv_loop_close(&a->loop);
    munmap(a->memory, a->memory_bytes);
    free(a->places);
    free(a->jobs);
    config_free(&a->config);
    free(a);
}

const char *alone_file(const struct alone *a, uint64_t *offset)
{
    *offset = NVME_DATA_OFFSET;
    return a->file;
}

const char *alone_engine(struct alone *a)
{
    tier_nvme.stats(a->tier, &a->stats);
    return a->stats.engine;
}
