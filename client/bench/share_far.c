/* A server that is far away, or hangs: how long a lookup takes, and what a hit in DRAM feels. */
#include "client/bench/plain.h"
#include "client/bench/share.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define KEYS 8192u
#define PART_BYTES 4096u
#define ONE_WAY_NS 500000
#define ROUND_TRIPS_TARGET 30
#define HIT_BLOCKS 64u
#define P99_TARGET 1.5

static struct rig_options small_blocks(const struct share_bench *b, uint32_t blocks,
                                       const char *model)
{
    return (struct rig_options){.name = program_name(),
                                .model = model,
                                .parts = 1,
                                .block_bytes = PART_BYTES,
                                .chunk = PART_BYTES,
                                .blocks = blocks,
                                .timeout_ms = (int)args_number(b->tier.args, "timeout")};
}

static int links_open(struct share_bench *b, struct share_links *links, const char *what)
{
    int rc = share_links_open(b->target, links);

    if (rc == -ENOTSUP) {
        report_text(&b->tier.report, what,
                    "not measured: needs nfs://SERVER/EXPORT?nfsport=N&mountport=N");
        return rc;
    }
    return rc < 0 ? bench_fail(BENCH_FAILED, "%s: %s", b->target, strerror(-rc)) : 0;
}

/* ---- lookups ---- */

/* Another host, which knows nothing yet but its root: one lookup of all. */
static int lookup_far(struct share_bench *b, const struct share_links *links, const uint8_t *keys,
                      double *us)
{
    static const char *const sets[] = {"share.lookup_deadline=2s", NULL};
    struct rig_options o = small_blocks(b, 1, "ucm-bench share lookup");
    struct rig rig;
    uint8_t other[RIG_KEY_BYTES] = {1};
    struct ucm_lookup first = {.keys = other, .n_keys = 1}, all = {.keys = keys, .n_keys = KEYS};
    uint32_t hits = 0;
    uint64_t start;
    int rc = share_daemon_open(b, links->target, 64u << 20, sets, &o, &rig);

    if (rc != 0)
        return rc;
    rc = ucm_lookup_prefix(rig.ns, &first, rig.timeout_ms, &hits, NULL, NULL);
    start = clock_ns();
    if (rc == 0)
        rc = ucm_lookup_prefix(rig.ns, &all, rig.timeout_ms, &hits, NULL, NULL);
    *us = (double)(clock_ns() - start) / 1e3;
    if (rc < 0)
        rc = bench_fail(BENCH_FAILED, "lookup: %s", ucm_errmsg());
    else if (hits != KEYS)
        rc = bench_fail(BENCH_FAILED, "%u of %u blocks of the root were found", hits, KEYS);
    return share_daemon_close(b, &rig) != 0 ? BENCH_FAILED : rc;
}

static int lookup_rounds(struct share_bench *b, struct share_links *links, const uint8_t *keys)
{
    struct plain plain = {
        .target = links->target, .block_bytes = 4096, .total_bytes = 4096, .depth = 1};
    struct pair p = {.own = {.n = 0}};
    double own = 0, base = 0;
    int rc = 0;

    link_delay(links->nfs, ONE_WAY_NS);
    for (unsigned i = 0; rc == 0 && i < b->tier.rounds; i++) {
        if (plain_round_trip(&plain, &base) < 0)
            rc = bench_fail(BENCH_FAILED, "%s", plain.why);
        if (rc == 0)
            rc = lookup_far(b, links, keys, &own);
        if (rc == 0)
            rc = pair_add(&p, own, base);
    }
    link_delay(links->nfs, 0);
    plain_remove(&plain);
    if (rc == 0)
        report_figure(&b->tier.report,
                      &(struct figure){.name = "lookup of 8,192 keys that only the root has",
                                       .unit = "us",
                                       .value = samples_at(&p.own, 0.5),
                                       .baseline_name = "one round trip",
                                       .baseline = samples_at(&p.base, 0.5),
                                       .ratio = samples_at(&p.ratio, 0.5),
                                       .target = ROUND_TRIPS_TARGET});
    pair_free(&p);
    return rc;
}

int share_bench_lookup(struct share_bench *b)
{
    struct rig_options o = small_blocks(b, KEYS, "ucm-bench share lookup");
    uint8_t *keys = malloc((size_t)KEYS * RIG_KEY_BYTES);
    struct rig_move plan = {.keys = keys, .n = KEYS, .batch = 1024, .in_flight = 4};
    struct share_links links;
    struct rig rig;
    uint64_t ns;
    int rc = keys ? links_open(b, &links, "lookup") : bench_fail(BENCH_FAILED, "memory ran out");

    if (rc != 0) {
        free(keys);
        return rc == -ENOTSUP ? 0 : rc;
    }
    bench_keys(bench_run_id(), 0, KEYS, keys);
    rc = share_daemon_open(b, b->target, 256u << 20, NULL, &o, &rig);
    if (rc == 0) {
        memset(rig.memory, 1, rig.memory_bytes);
        rc = share_store(&rig, &plan, &ns);
        if (share_daemon_close(b, &rig) != 0)
            rc = BENCH_FAILED;
    }
    if (rc == 0)
        rc = lookup_rounds(b, &links, keys);
    share_links_close(&links);
    free(keys);
    return rc;
}

/* ---- a server that hangs ---- */

/* An engine that goes on asking for what only the root could have. */
struct asker {
    struct rig rig;
    pthread_t thread;
    atomic_bool over;
    uint64_t run;
    uint64_t asked;
    int status;
};

static void *ask(void *arg)
{
    struct asker *a = arg;
    uint8_t keys[256 * RIG_KEY_BYTES];
    struct ucm_lookup lookup = {.keys = keys, .n_keys = 256};
    uint32_t hits, round = 0;

    while (!atomic_load(&a->over) && a->status == 0) {
        bench_keys(a->run, round++, 256, keys);
        a->status = ucm_lookup_prefix(a->rig.ns, &lookup, a->rig.timeout_ms, &hits, NULL, NULL);
        a->asked++;
    }
    return NULL;
}

static int hits_for(struct rig *rig, const uint8_t *keys, double seconds, struct samples *us)
{
    uint64_t end = clock_ns() + (uint64_t)(seconds * 1e9);

    for (uint32_t turn = 0; clock_ns() < end; turn++) {
        uint32_t n = turn % HIT_BLOCKS;
        struct rig_move move = {.keys = keys + (size_t)n * RIG_KEY_BYTES,
                                .n = 1,
                                .first_block = n,
                                .batch = 1,
                                .in_flight = 1};
        struct rig_moved moved;
        uint64_t start = clock_ns();
        int rc = rig_move(rig, RIG_LOAD, &move, NULL, &moved);

        if (rc < 0)
            return bench_rig_fail(rig, rc);
        if (moved.ok != 1)
            return bench_fail(BENCH_FAILED, "a block in DRAM is no hit");
        if (samples_add(us, (double)(clock_ns() - start) / 1e3) < 0)
            return bench_fail(BENCH_FAILED, "memory ran out");
    }
    return 0;
}

/* By turns, so that both see the same machine; together a minute of each. */
static int hung_rounds(struct share_bench *b, struct rig *rig, const uint8_t *keys,
                       struct share_links *links)
{
    double seconds = (double)args_number(b->tier.args, "hung") / 1e3;
    struct samples us = {.n = 0};
    double well = 0, hung = 0, well50, hung50;
    int rc = hits_for(rig, keys, seconds, &us);

    well = samples_at(&us, 0.99);
    well50 = samples_at(&us, 0.5);
    samples_clear(&us);
    link_hang(links->nfs, true);
    if (rc == 0)
        rc = hits_for(rig, keys, seconds, &us);
    link_hang(links->nfs, false);
    hung = samples_at(&us, 0.99);
    hung50 = samples_at(&us, 0.5);
    samples_free(&us);
    if (rc != 0)
        return rc;
    report_number(&b->tier.report, "seconds_hung", seconds);
    report_figure(&b->tier.report, &(struct figure){.name = "DRAM hit, median, server hung",
                                                    .unit = "us",
                                                    .value = hung50,
                                                    .baseline_name = "server well",
                                                    .baseline = well50});
    report_figure(&b->tier.report, &(struct figure){.name = "DRAM hit, p99, server hung",
                                                    .unit = "us",
                                                    .value = hung,
                                                    .baseline_name = "server well",
                                                    .baseline = well,
                                                    .target = P99_TARGET});
    return 0;
}

static int hung_measure(struct share_bench *b, struct share_links *links)
{
    struct rig_options o = small_blocks(b, HIT_BLOCKS, "ucm-bench share hits");
    uint8_t keys[HIT_BLOCKS * RIG_KEY_BYTES];
    struct rig_move plan = {.keys = keys, .n = HIT_BLOCKS, .batch = HIT_BLOCKS, .in_flight = 1};
    struct asker asker = {.run = bench_run_id()};
    struct rig rig;
    uint64_t ns;
    int rc = share_daemon_open(b, links->target, 64u << 20, NULL, &o, &rig);

    if (rc != 0)
        return rc;
    bench_keys(bench_run_id(), 0, HIT_BLOCKS, keys);
    memset(rig.memory, 1, rig.memory_bytes);
    rc = share_store(&rig, &plan, &ns);
    if (rc == 0 && rig_open(&asker.rig, &o) < 0)
        rc = bench_rig_fail(&asker.rig, -UCM_EDISCONNECTED);
    if (rc == 0) {
        rc = pthread_create(&asker.thread, NULL, ask, &asker) == 0
                 ? hung_rounds(b, &rig, keys, links)
                 : bench_fail(BENCH_FAILED, "a thread could not be started");
        atomic_store(&asker.over, true);
        pthread_join(asker.thread, NULL);
        if (rc == 0 && asker.status < 0)
            rc = bench_fail(BENCH_FAILED, "a lookup failed: %s", ucm_strerror(asker.status));
        if (rc == 0)
            report_number(&b->tier.report, "lookups_meanwhile", (double)asker.asked);
        rig_close(&asker.rig);
    }
    return share_daemon_close(b, &rig) != 0 ? BENCH_FAILED : rc;
}

int share_bench_hung(struct share_bench *b)
{
    struct share_links links;
    int rc = links_open(b, &links, "hung");

    if (rc != 0)
        return rc == -ENOTSUP ? 0 : rc;
    rc = hung_measure(b, &links);
    share_links_close(&links);
    return rc;
}
