/* chain: a long sequence's blocks named once, and the first selection among them, through a daemon of
 * its own, its socket and libucmclient. All blocks and digests lie in DRAM. */
#include "client/bench/chain.h"

#include "client/bench/baseline.h"
#include "client/bench/bench.h"
#include "client/bench/select.h"
#include "client/ctl/program.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the sum is held against. */
#define AIM_BLOCKS 65536
#define AIM_MS 20
/* Of a list, beyond which an answer's frame would be too short for eight lists. */
#define CHOSEN_MOST 16384
#define LEASE_MS 60000
#define CLOSE_TIMEOUT_MS 30000

struct chain_bench {
    const struct args *args;
    struct report report;
    struct chain_rig rig;
    uint32_t blocks, piece; /* piece: keys of one request */
    struct ucm_sparse_select select;
    float *q;
    uint32_t *counts, *index, *leases;
    struct ucm_sparse_selected selected;
    /* Milliseconds. */
    struct samples open, append, first, again, sum, lookup, alone, read, echo;
};

static int fail_call(const char *what)
{
    return bench_fail(BENCH_FAILED, "%s: %s", what, ucm_errmsg());
}

static double ms_since(uint64_t begin)
{
    return (double)(clock_ns() - begin) / 1e6;
}

static int add(struct samples *s, double ms)
{
    return samples_add(s, ms) < 0 ? bench_fail(BENCH_FAILED, "memory ran out") : 0;
}

/* ---- one round ---- */

static int select_once(struct chain_bench *b, struct ucm_chain *const *chain, struct samples *out)
{
    uint64_t begin = clock_ns();

    b->select.chains = chain;
    if (ucm_sparse_select(b->rig.client, &b->select, -1, &b->selected) < 0)
        return fail_call("select");
    if (b->selected.no_digest > 0)
        return bench_fail(BENCH_FAILED, "%llu blocks have no digest",
                          (unsigned long long)b->selected.no_digest);
    return add(out, ms_since(begin));
}

static int append(struct chain_bench *b, struct ucm_chain *chain)
{
    struct ucm_chain_keys keys = {.keys = b->rig.keys, .n_keys = b->blocks};
    struct ucm_chain_result r;
    uint64_t begin = clock_ns();

    if (ucm_chain_append(chain, &keys, -1, &r) < 0)
        return fail_call("appending");
    if (r.blocks != b->blocks || r.in_dram != b->blocks || r.digests != b->blocks)
        return bench_fail(BENCH_FAILED, "of %u blocks %u are in DRAM, %u have digests there",
                          b->blocks, r.in_dram, r.digests);
    return add(&b->append, ms_since(begin));
}

/* The chain's blocks are let go behind its end. */
static int wait_closed(struct chain_bench *b)
{
    uint64_t begin = clock_ns(), chains = 1;

    while (chains > 0) {
        int rc = chain_rig_metric(&b->rig, "chains", &chains);

        if (rc != 0)
            return rc;
        if (ms_since(begin) > CLOSE_TIMEOUT_MS)
            return bench_fail(BENCH_FAILED, "the daemon does not let a closed chain go");
    }
    return 0;
}

static int measure_chain(struct chain_bench *b)
{
    struct ucm_chain *chain;
    uint64_t begin = clock_ns();
    int rc;

    if (ucm_chain_open(b->rig.digests.ns, 0, 0, -1, &chain) < 0)
        return fail_call("opening a chain");
    rc = add(&b->open, ms_since(begin));
    if (rc == 0)
        rc = append(b, chain);
    if (rc == 0)
        rc = select_once(b, &chain, &b->first);
    if (rc == 0)
        rc = add(&b->sum, ms_since(begin));
    if (rc == 0)
        rc = select_once(b, &chain, &b->again);
    ucm_chain_close(chain);
    return rc == 0 ? wait_closed(b) : rc;
}

/* A lookup of the same keys, as a worker without chains sends it: a lease for each piece. */
static int measure_lookup(struct chain_bench *b)
{
    uint64_t begin = clock_ns();
    uint32_t n = 0;

    for (uint32_t at = 0; at < b->blocks; at += b->piece) {
        struct ucm_lookup m = {.keys = b->rig.keys + (size_t)at * RIG_KEY_BYTES,
                               .n_keys = b->piece,
                               .lease_ms = LEASE_MS};
        uint32_t hits;

        if (ucm_lookup_prefix(b->rig.base.ns, &m, -1, &hits, NULL, &b->leases[n++]) < 0)
            return fail_call("looking up");
        if (hits != b->piece)
            return bench_fail(BENCH_FAILED, "a lookup of %u keys found %u", b->piece, hits);
    }
    if (add(&b->lookup, ms_since(begin)) != 0)
        return BENCH_FAILED;
    while (n > 0)
        if (ucm_release(b->rig.client, b->leases[--n], -1) < 0)
            return fail_call("releasing");
    return 0;
}

static int measure_echo(struct chain_bench *b, struct echo *echo)
{
    struct samples us = {.n = 0};
    double ms = 0;
    int rc = echo_run(echo, b->blocks / b->piece, &us);

    for (size_t i = 0; i < us.n; i++)
        ms += us.v[i] / 1e3;
    samples_free(&us);
    return rc < 0 ? bench_fail(BENCH_FAILED, "the echo could not be measured") : add(&b->echo, ms);
}

/* The same selection in this process, and a read of as many bytes: before the daemon takes its memory. */
static int measure_alone(struct chain_bench *b)
{
    struct select_result r = {.select = {.n = 0}};
    struct select_case c = {.name = "mean",
                            .plan = chain_plan(),
                            .blocks = b->blocks,
                            .layers = 1,
                            .threads = (unsigned)args_number(b->args, "threads"),
                            .rounds = (unsigned)args_number(b->args, "rounds")};
    char why[SELECT_WHY] = "";
    int rc;

    c.score.rows = 1;
    c.score.q_heads = CHAIN_Q_HEADS;
    ucm_choose_defaults(&c.choose);
    c.choose.block_tokens = 1;
    c.choose.topk_tokens = b->select.choose.topk_tokens;
    rc = select_measure_cpu(&c, &r, why);
    b->alone = r.select;
    b->read = r.read;
    samples_free(&r.score);
    if (rc == 0)
        return 0;
    return bench_fail(BENCH_FAILED, "a selection in this process: %s",
                      why[0] != '\0' ? why : strerror(-rc));
}

/* ---- a number of blocks ---- */

static void report_ms(struct chain_bench *b, const char *what, struct samples *s,
                      const char *baseline_name, struct samples *baseline, double target)
{
    char name[64];

    snprintf(name, sizeof(name), "%u %s", b->blocks, what);
    report_figure(&b->report, &(struct figure){.name = name,
                                               .unit = "ms",
                                               .value = samples_at(s, 0.5),
                                               .baseline_name = baseline_name,
                                               .baseline = baseline ? samples_at(baseline, 0.5) : 0,
                                               .target = target,
                                               .target_is_value = true});
}

static void report_all(struct chain_bench *b)
{
    double target = b->blocks == AIM_BLOCKS && b->rig.threads == 2 ? AIM_MS : 0;

    report_ms(b, "open, append, select", &b->sum, NULL, NULL, target);
    report_ms(b, "least of them", &(struct samples){&b->sum.v[0], 1, 1}, NULL, NULL, 0);
    report_ms(b, "open", &b->open, NULL, NULL, 0);
    report_ms(b, "append", &b->append, "echo of its frames", &b->echo, 0);
    report_ms(b, "first selection", &b->first, "the same in one process", &b->alone, 0);
    report_ms(b, "second selection", &b->again, "a read of its bytes", &b->read, 0);
    report_ms(b, "lookup with leases", &b->lookup, "echo of its frames", &b->echo, 0);
}

static void samples_free_all(struct chain_bench *b)
{
    struct samples *all[] = {&b->open,   &b->append, &b->first, &b->again, &b->sum,
                             &b->lookup, &b->alone,  &b->read,  &b->echo};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        samples_free(all[i]);
        *all[i] = (struct samples){.n = 0};
    }
}

static void select_set(struct chain_bench *b)
{
    static const uint32_t shard;
    struct ucm_sparse_choose *choose = &b->select.choose;

    b->select = (struct ucm_sparse_select){.shards = &shard, .n_rows = 1, .q = b->q};
    b->select.q_dtype = UCM_SPARSE_F32;
    b->select.score.q_heads = CHAIN_Q_HEADS;
    ucm_sparse_choose_defaults(choose);
    choose->topk_tokens = (uint32_t)(choose->sparse_ratio * b->blocks); /* a block is one token */
    if (choose->topk_tokens > CHOSEN_MOST)
        choose->topk_tokens = CHOSEN_MOST;
    b->selected = (struct ucm_sparse_selected){
        .counts = b->counts,
        .index = b->index,
        .counts_room = CHAIN_KV_HEADS,
        .index_room = CHAIN_KV_HEADS * CHOSEN_MOST,
    };
}

static int measure_rounds(struct chain_bench *b)
{
    struct echo echo;
    int rc = 0;

    if (echo_start(&echo, (size_t)b->piece * RIG_KEY_BYTES + 64, b->piece + 64) < 0)
        return bench_fail(BENCH_FAILED, "the echo could not be started");
    for (uint64_t i = 0; rc == 0 && i < args_number(b->args, "rounds"); i++) {
        rc = measure_chain(b);
        if (rc == 0)
            rc = measure_lookup(b);
        if (rc == 0)
            rc = measure_echo(b, &echo);
    }
    echo_stop(&echo);
    return rc;
}

static int measure_stored(struct chain_bench *b)
{
    int rc = chain_rig_open(&b->rig, b->args, b->blocks);

    if (rc == 0) {
        b->piece = b->blocks < b->rig.server.max_keys ? b->blocks : b->rig.server.max_keys;
        if (b->blocks % b->piece != 0)
            rc = program_usage_error(b->args,
                                     "--blocks: %u is no multiple of %u, the keys of a request",
                                     b->blocks, b->piece);
    }
    if (rc == 0)
        rc = measure_rounds(b);
    if (rc == 0)
        report_all(b);
    chain_rig_close(&b->rig);
    return rc;
}

static int measure_blocks(struct chain_bench *b)
{
    int rc;

    select_set(b);
    rc = measure_alone(b);
    if (rc == 0)
        rc = measure_stored(b);
    samples_free_all(b);
    return rc;
}

static int measure_list(struct chain_bench *b)
{
    char text[128], *list = text, *part;
    int rc = 0;

    snprintf(text, sizeof(text), "%s", args_text(b->args, "blocks"));
    while (rc == 0 && (part = strsep(&list, ",")) != NULL) {
        char *end;
        unsigned long n = strtoul(part, &end, 10);

        if (*part == '\0' || *end != '\0' || n < 64 || n > UCM_CHAIN_BLOCKS_MAX)
            return program_usage_error(b->args, "--blocks is a list of numbers from 64 to 2^20");
        b->blocks = (uint32_t)n;
        rc = measure_blocks(b);
    }
    return rc;
}

int bench_chain(const struct args *a)
{
    struct chain_bench b = {.args = a};
    struct select_case c = {.plan = {.spec = {.shape = {.head_dim = CHAIN_HEAD_DIM}}},
                            .score = {.rows = 1, .q_heads = CHAIN_Q_HEADS}};
    int rc;

    if (access(args_text(a, "ucmd"), X_OK) != 0)
        return bench_fail(BENCH_FAILED, "cannot run %s; name the daemon with --ucmd",
                          args_text(a, "ucmd"));
    b.q = malloc(sizeof(*b.q) * CHAIN_Q_HEADS * CHAIN_HEAD_DIM);
    b.counts = malloc(sizeof(*b.counts) * CHAIN_KV_HEADS);
    b.index = malloc(sizeof(*b.index) * CHAIN_KV_HEADS * CHOSEN_MOST);
    b.leases = malloc(sizeof(*b.leases) * UCM_CHAIN_BLOCKS_MAX / 64);
    if (!b.q || !b.counts || !b.index || !b.leases) {
        rc = bench_fail(BENCH_FAILED, "memory ran out");
    } else {
        select_fill_queries(&c, b.q);
        report_begin(&b.report, "chain", args_given(a, "json"));
        report_number(&b.report, "threads", (double)args_number(a, "threads"));
        report_number(&b.report, "layers", (double)args_number(a, "layers"));
        rc = measure_list(&b);
        if (report_end(&b.report) < 0)
            rc = BENCH_FAILED;
    }
    free(b.q);
    free(b.counts);
    free(b.index);
    free(b.leases);
    return rc;
}
