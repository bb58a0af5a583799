/* lookup: the round trip of one key, and a long prefix with a lease, against a bare echo of frames
 * of the same sizes; and the same keys in the lookup table, against those round trips. */
#include "client/bench/baseline.h"
#include "client/bench/bench.h"

#include <stdlib.h>
#include <string.h>

#define REGION_BLOCKS 4096
/* Frames of the wire: envelope, field names and numbers around the keys. */
#define REQUEST_BYTES(keys) ((size_t)(keys)*RIG_KEY_BYTES + 32)
#define RESPONSE_BYTES 24
#define LEASE_MS 10000

struct lookups {
    const struct args *args;
    struct rig rig;
    uint8_t *keys;
    uint32_t n_keys; /* stored */
    struct progress progress;
};

/* One subject against its echo: medians over rounds of p50 and p99, and of their ratios. */
struct duel {
    struct echo echo;
    unsigned calls;
    struct pair p50, p99;
    struct samples own_us, echo_us; /* of one round */
};

static int duel_end_round(struct duel *d)
{
    int rc = pair_add(&d->p50, samples_at(&d->own_us, 0.5), samples_at(&d->echo_us, 0.5)) |
             pair_add(&d->p99, samples_at(&d->own_us, 0.99), samples_at(&d->echo_us, 0.99));

    samples_clear(&d->own_us);
    samples_clear(&d->echo_us);
    return rc;
}

static void duel_free(struct duel *d)
{
    pair_free(&d->p50);
    pair_free(&d->p99);
    samples_free(&d->own_us);
    samples_free(&d->echo_us);
    echo_stop(&d->echo);
}

static int lookup_once(struct lookups *l, const uint8_t *keys, uint32_t n, uint32_t lease_ms,
                       struct samples *us)
{
    struct ucm_lookup lookup = {.keys = keys, .n_keys = n, .lease_ms = lease_ms};
    uint32_t hits = 0, lease = 0;
    uint64_t t = clock_ns();
    int rc = ucm_lookup_prefix(l->rig.ns, &lookup, l->rig.timeout_ms, &hits, NULL,
                               lease_ms != 0 ? &lease : NULL);

    if (rc < 0)
        return program_fail(BENCH_FAILED, "lookup: %s", ucm_errmsg());
    if (samples_add(us, (double)(clock_ns() - t) / 1e3) < 0)
        return program_fail(BENCH_FAILED, "memory ran out");
    if (hits != n)
        return program_fail(
            BENCH_FAILED, "a lookup of %u stored keys found %u; is the arena too small?", n, hits);
    if (lease != 0 && ucm_release(l->rig.client, lease, l->rig.timeout_ms) < 0)
        return program_fail(BENCH_FAILED, "release: %s", ucm_errmsg());
    return 0;
}

static int duel_round(struct lookups *l, struct duel *d, uint32_t n, uint32_t lease_ms,
                      uint64_t *random)
{
    for (unsigned i = 0; i < d->calls; i++) {
        uint32_t first =
            (uint32_t)((*random = *random * 6364136223846793005u + 1442695040888963407u) >> 33) %
            (l->n_keys - n + 1);
        int rc = lookup_once(l, l->keys + (size_t)first * RIG_KEY_BYTES, n, lease_ms, &d->own_us);

        if (rc != 0)
            return rc;
    }
    if (echo_run(&d->echo, d->calls, &d->echo_us) < 0 || duel_end_round(d) < 0)
        return program_fail(BENCH_FAILED, "the echo could not be measured");
    return 0;
}

static void duel_report(struct report *r, struct duel *d, const char *p50, const char *p99,
                        const double target[2], bool target_is_value)
{
    struct figure f = {.name = p50,
                       .unit = "us",
                       .baseline_name = "echo",
                       .target = target[0],
                       .target_is_value = target_is_value};

    report_pair(r, &d->p50, f);
    f.name = p99;
    f.target = target[1];
    report_pair(r, &d->p99, f);
}

/* ---- lookup tables ---- */

#define TABLE_KEYS 16384u /* as many as `keys` may be */
#define TABLE_CALLS 50u   /* timed together: one takes about as long as reading the clock */

struct lookup_table {
    bool there;
    struct samples one_us, many_us;
    uint64_t asked, false_hits, false_misses;
    uint8_t *absent; /* keys that nobody stored */
};

/* Waits until the daemon has filled the table. Without a table there is nothing to measure. */
static int lookup_table_open(struct lookups *l, struct lookup_table *h, uint32_t n_many)
{
    struct ucm_lookup_table_hits in_table;
    uint64_t until = clock_ns() + (uint64_t)l->rig.timeout_ms * 1000000u;

    h->absent = malloc((size_t)n_many * RIG_KEY_BYTES);
    if (h->absent == NULL)
        return program_fail(BENCH_FAILED, "memory ran out");
    bench_keys(bench_run_id(), 1u << 30, n_many, h->absent);
    if (ucm_lookup_table_open(l->rig.ns, l->rig.timeout_ms) < 0) {
        program_fail(0, "no lookup table: %s", ucm_errmsg());
        return 0;
    }
    while (ucm_lookup_table_read(l->rig.ns, l->keys, 1, NULL, &in_table) == UCM_LOOKUP_TABLE_NONE)
        if (clock_ns() > until || ucm_lookup_table_open(l->rig.ns, l->rig.timeout_ms) < 0)
            return program_fail(BENCH_FAILED, "the lookup table does not come");
    h->there = true;
    return 0;
}

static void lookup_table_free(struct lookup_table *h)
{
    samples_free(&h->one_us);
    samples_free(&h->many_us);
    free(h->absent);
}

static int lookup_table_once(struct lookups *l, struct lookup_table *h, const uint8_t *keys,
                             uint32_t n)
{
    struct ucm_lookup_table_hits in_table;

    if (ucm_lookup_table_read(l->rig.ns, keys, n, NULL, &in_table) != 0)
        return program_fail(BENCH_FAILED, "the lookup table is of no use any more");
    h->asked += n;
    h->false_misses += n - in_table.hits;
    return 0;
}

/* Time of one call, from `calls` calls timed together. The keys are in the processor's cache: a
 * caller has just made them. */
static int lookup_table_time(struct lookups *l, struct lookup_table *h, uint32_t n, unsigned calls,
                             struct samples *us, uint64_t *random)
{
    uint64_t t = clock_ns();

    for (unsigned i = 0; i < calls; i++) {
        uint32_t first =
            (uint32_t)((*random = *random * 6364136223846793005u + 1442695040888963407u) >> 33) %
            (l->n_keys - n < 1024 ? l->n_keys - n + 1 : 1024);
        int rc = lookup_table_once(l, h, l->keys + (size_t)first * RIG_KEY_BYTES, n);

        if (rc != 0)
            return rc;
    }
    return samples_add(us, (double)(clock_ns() - t) / 1e3 / calls) < 0
               ? program_fail(BENCH_FAILED, "memory ran out")
               : 0;
}

static int lookup_table_round(struct lookups *l, struct lookup_table *h, unsigned calls,
                              uint32_t n_many, uint64_t *random)
{
    uint8_t found[TABLE_KEYS];
    struct ucm_lookup_table_hits in_table;
    int rc = 0;

    for (unsigned i = 0; i < calls && rc == 0; i++) {
        rc = lookup_table_time(l, h, 1, TABLE_CALLS, &h->one_us, random);
        if (rc == 0)
            rc = lookup_table_time(l, h, n_many, 1, &h->many_us, random);
    }
    if (rc == 0 && ucm_lookup_table_read(l->rig.ns, h->absent, n_many, found, &in_table) == 0) {
        h->asked += n_many;
        h->false_hits += in_table.hits;
    }
    return rc;
}

static void table_time_report(struct report *r, const char *name, struct samples *us,
                              struct samples *lookup, double target)
{
    double value = samples_at(us, 0.5), baseline = samples_at(lookup, 0.5);

    report_figure(r, &(struct figure){.name = name,
                                      .unit = "us",
                                      .value = value,
                                      .baseline_name = "lookup",
                                      .baseline = baseline,
                                      .ratio = value / baseline,
                                      .target = target,
                                      .target_is_value = true});
}

static void lookup_table_report(struct report *r, struct lookup_table *h, struct duel *one,
                                struct duel *many)
{
    table_time_report(r, "table lookup of one key", &h->one_us, &one->p50.own, 0.1);
    table_time_report(r, "table lookup of the prefix", &h->many_us, &many->p50.own, 60);
    report_number(r, "table_keys", (double)h->asked);
    report_number(r, "false_hits", (double)h->false_hits);
    report_number(r, "false_misses", (double)h->false_misses);
}

/* ---- population ---- */

/* Dumps blocks until enough are stored or the daemon has no room: *stored. */
static int populate(struct lookups *l, uint32_t wanted, uint32_t *stored)
{
    uint32_t done = 0;

    while (done < wanted) {
        uint32_t n = wanted - done < REGION_BLOCKS ? wanted - done : REGION_BLOCKS;
        struct rig_move move = {
            .keys = l->keys + (size_t)done * RIG_KEY_BYTES, .n = n, .batch = 1024, .in_flight = 4};
        struct rig_moved moved;
        int rc = rig_move(&l->rig, RIG_DUMP, &move, NULL, &moved);

        if (rc < 0)
            return bench_rig_fail(&l->rig, rc);
        done += n;
        if (moved.ok + moved.exists < n)
            break;
        if (progress_due(&l->progress))
            progress_show(&l->progress, "storing %u of %u blocks", done, wanted);
    }
    *stored = done;
    return 0;
}

/* Only a run of keys that the daemon still has is of use; eviction may have taken the oldest. */
static int keep_present(struct lookups *l, uint32_t stored, uint32_t *present)
{
    uint8_t *found = malloc(l->rig.server.max_keys);
    uint32_t best = 0, best_first = 0, run = 0;

    if (found == NULL)
        return program_fail(BENCH_FAILED, "memory ran out");
    for (uint32_t at = 0, n; at < stored; at += n) {
        struct ucm_lookup lookup = {.keys = l->keys + (size_t)at * RIG_KEY_BYTES};
        uint32_t hits = 0;

        n = stored - at < l->rig.server.max_keys ? stored - at : l->rig.server.max_keys;
        lookup.n_keys = n;
        if (ucm_lookup_per_key(l->rig.ns, &lookup, l->rig.timeout_ms, found, &hits, NULL) < 0) {
            free(found);
            return program_fail(BENCH_FAILED, "lookup: %s", ucm_errmsg());
        }
        for (uint32_t i = 0; i < n; i++) {
            run = found[i] != UCM_FOUND_NOT ? run + 1 : 0;
            if (run > best) {
                best = run;
                best_first = at + i + 1 - run;
            }
        }
    }
    free(found);
    memmove(l->keys, l->keys + (size_t)best_first * RIG_KEY_BYTES, (size_t)best * RIG_KEY_BYTES);
    *present = best;
    return 0;
}

/* ---- the command ---- */

static int measure(struct lookups *l, struct lookup_table *h, struct duel *one, struct duel *many,
                   uint32_t n_many)
{
    uint64_t rounds = args_number(l->args, "rounds"), random = 1;

    for (uint64_t i = 0; i < rounds; i++) {
        int rc = duel_round(l, one, 1, 0, &random);

        if (rc == 0)
            rc = duel_round(l, many, n_many, LEASE_MS, &random);
        if (rc == 0 && h->there)
            rc = lookup_table_round(l, h, many->calls, n_many, &random);
        if (rc != 0)
            return rc;
        if (progress_due(&l->progress))
            progress_show(&l->progress, "round %u of %u", (unsigned)i + 1, (unsigned)rounds);
    }
    return 0;
}

static void report(struct lookups *l, struct lookup_table *h, struct duel *one, struct duel *many,
                   uint32_t n_many, uint32_t wanted)
{
    static const double ratios[2] = {3, 5}, values[2] = {1500, 0};
    struct report r;
    uint64_t index_bytes = 0;

    report_begin(&r, "lookup", args_given(l->args, "json"));
    report_number(&r, "blocks_wanted", wanted);
    report_number(&r, "blocks", l->n_keys);
    if (rig_metric(&l->rig, "index_bytes", &index_bytes) == 0)
        report_number(&r, "index_bytes", (double)index_bytes);
    report_number(&r, "prefix_keys", n_many);
    duel_report(&r, one, "one key p50", "one key p99", ratios, false);
    duel_report(&r, many, "prefix, lease p50", "prefix, lease p99", values, true);
    if (h->there)
        lookup_table_report(&r, h, one, many);
    (void)report_end(&r);
}

static int run(struct lookups *l, struct duel *one, struct duel *many, uint32_t n_many)
{
    uint32_t wanted = (uint32_t)args_number(l->args, "blocks"), stored = 0;
    struct lookup_table h = {0};
    int rc;

    if (wanted < n_many)
        wanted = n_many;
    l->keys = malloc((size_t)wanted * RIG_KEY_BYTES);
    if (l->keys == NULL)
        return program_fail(BENCH_FAILED, "memory ran out");
    bench_keys(bench_run_id(), 0, wanted, l->keys);
    rc = populate(l, wanted, &stored);
    if (rc == 0)
        rc = keep_present(l, stored, &l->n_keys);
    if (rc == 0 && l->n_keys < n_many)
        rc = program_fail(BENCH_FAILED,
                          "the daemon holds a run of %u blocks; %u are needed: its arena "
                          "or index is too small",
                          l->n_keys, n_many);
    if (rc == 0 && l->n_keys < wanted)
        program_fail(0, "the daemon holds %u of %u blocks; each takes 4 KiB of its arena or NVMe",
                     l->n_keys, wanted);
    if (rc == 0)
        rc = lookup_table_open(l, &h, n_many);
    if (rc == 0)
        rc = measure(l, &h, one, many, n_many);
    progress_end(&l->progress);
    if (rc == 0)
        report(l, &h, one, many, n_many, wanted);
    lookup_table_free(&h);
    if (rig_evict(&l->rig, 0) < 0 && rc == 0)
        rc = program_fail(BENCH_FAILED, "evicting what was stored: %s", l->rig.error);
    free(l->keys);
    return rc;
}

int bench_lookup(const struct args *a)
{
    uint32_t n_many = (uint32_t)args_number(a, "keys");
    struct lookups l = {.args = a};
    struct duel one = {.calls = (unsigned)args_number(a, "calls")};
    struct duel many = {.calls = one.calls / 20 + 1};
    struct rig_options o;
    int rc;

    bench_rig_options(a, &o);
    o.model = "ucm-bench lookup";
    o.blocks = REGION_BLOCKS;
    progress_begin(&l.progress, args_given(a, "quiet"));
    if (echo_start(&one.echo, REQUEST_BYTES(1), RESPONSE_BYTES) < 0)
        return program_fail(BENCH_FAILED, "the echo could not be started");
    if (echo_start(&many.echo, REQUEST_BYTES(n_many), RESPONSE_BYTES) < 0) {
        echo_stop(&one.echo);
        return program_fail(BENCH_FAILED, "the echo could not be started");
    }
    rc = rig_open(&l.rig, &o);
    rc = rc < 0 ? bench_rig_fail(&l.rig, rc) : run(&l, &one, &many, n_many);
    rig_close(&l.rig);
    duel_free(&many);
    duel_free(&one);
    return rc;
}
