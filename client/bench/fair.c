/* fair: what tenants get of the bus, the disk or a root while all of them load, against their weights; and how long a
 * tenant waits that loads little beside one that floods. Starts a daemon of its own, and is one user for each tenant. */
#include "client/bench/fair.h"
#include "client/ctl/answer.h"
#include "proto/histogram.h"
#include "proto/proto.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define SLOTS 32
#define FIRST_UID 60001u
#define WARM_MS 300u /* or a quarter of the time, if that is longer: bursts are over then */
#define START_MS 60000
#define LARGE_BLOCK (1 * MIB)
#define SMALL_BLOCK (128u << 10)
#define VICTIM_BLOCKS 256u
#define RUN_MAX 128u
#define PAUSE 3 /* a victim pauses for so many times what a request takes alone */

#define SHARE_AIM 0.9
#define TOGETHER_AIM 0.9
#define WAIT_AIM 1.5

static bool is_large(unsigned i)
{
    return i % 2 == 0;
}

static unsigned weight_of(unsigned i)
{
    return 100 * (1 + 3 * i % 4);
}

/* ---- the daemon ---- */

static uint64_t player_bytes(const struct fair_bench *b, unsigned i)
{
    if (i > PLAYERS_MAX)
        return VICTIM_BLOCKS * SMALL_BLOCK;
    return is_large(i) ? args_number(b->args, "large") * LARGE_BLOCK
                       : args_number(b->args, "small") * SMALL_BLOCK;
}

static int folder_make(const char *path)
{
    return mkdir(path, 0700) == 0 ? 0 : bench_fail(BENCH_FAILED, "%s: %s", path, strerror(errno));
}

/* "uid:N weight=W,...": one setting, with commas. */
static char *settings_of(const struct fair_bench *b)
{
    char *text = malloc((b->n + 2) * 40), *at = text;

    if (!text)
        return NULL;
    at += sprintf(at, "tenant_settings=uid:%u weight=100", FIRST_UID + PLAYERS_MAX + 1);
    for (unsigned i = 0; i < b->n; i++)
        at += sprintf(at, ",uid:%u weight=%u", FIRST_UID + i, weight_of(i));
    return text;
}

static int start(struct fair_bench *b)
{
    const char *tier = args_text(b->args, "tier"), *set = args_text(b->args, "set");
    const char *sets[DAEMON_MAX_SETS] = {"socket_mode=0666"};
    char arena[64], size[64], disk[256], root[256], *settings = settings_of(b);
    uint64_t bytes = 256 * MIB;
    unsigned n = 1;

    if (!settings)
        return bench_fail(BENCH_FAILED, "memory ran out");
    for (unsigned i = 0; i < b->n; i++)
        bytes += player_bytes(b, i);
    snprintf(arena, sizeof arena, "arena.size=%lluMiB", (unsigned long long)(bytes / MIB * 5 / 4));
    snprintf(size, sizeof size, "nvme.size=%lluMiB", (unsigned long long)(2 * bytes / MIB + 1024));
    snprintf(disk, sizeof disk, "nvme.paths=%s/disk", b->dir);
    snprintf(root, sizeof root, "share.roots=%s/root", b->dir);
    sets[n++] = arena;
    sets[n++] = settings;
    if (strcmp(tier, "nvme") == 0) {
        sets[n++] = disk;
        sets[n++] = size;
        if (folder_make(strchr(disk, '=') + 1) != 0)
            return BENCH_FAILED;
    } else if (strcmp(tier, "share") == 0) {
        sets[n++] = root;
        if (folder_make(strchr(root, '=') + 1) != 0)
            return BENCH_FAILED;
    }
    if (!b->gpu)
        sets[n++] = "device.cuda=off";
    if (set)
        sets[n++] = set;
    n = daemon_start(&b->daemon, sets) != 0 || daemon_wait(&b->daemon, START_MS) != 0;
    free(settings);
    return n > 0 ? bench_fail(BENCH_NO_DAEMON, "%s did not start; run it by hand to see why",
                              b->daemon.path)
                 : 0;
}

/* ---- players ---- */

static int player_fail(struct player *p, int status)
{
    return p->rc = bench_rig_fail(&p->rig, status);
}

static int wait_stored(struct fair_bench *b, struct rig *rig, uint64_t parts)
{
    const char *metric =
        strcmp(args_text(b->args, "tier"), "nvme") == 0 ? "nvme_writes" : "share_writes";
    uint64_t stored = 0;

    for (unsigned ms = 0; stored < parts && ms < START_MS; ms += 10) {
        int rc = rig_metric(rig, metric, &stored);

        if (rc < 0)
            return bench_rig_fail(rig, rc);
        usleep(10000);
    }
    return stored >= parts ? 0 : bench_fail(BENCH_FAILED, "the blocks were not written below");
}

static int player_open(struct fair_bench *b, struct player *p, unsigned i)
{
    bool large = is_large(i);
    struct rig_options o = {
        .socket = b->daemon.socket,
        .name = "ucm-bench",
        .model = "ucm-bench fair",
        .parts = 1,
        .block_bytes = large ? LARGE_BLOCK : SMALL_BLOCK,
        .chunk = large ? 64u << 10 : 32u << 10,
        .blocks = (uint32_t)(player_bytes(b, i) / (large ? LARGE_BLOCK : SMALL_BLOCK)),
        .timeout_ms = 60000,
        .uid = FIRST_UID + i,
        .gpu = b->gpu,
        .companion = b->gpu && args_given(b->args, "companion")};
    struct rig_move move = {.n = o.blocks, .batch = 16, .in_flight = 4};
    struct rig_moved moved;
    int rc = rig_open(&p->rig, &o);

    if (rc < 0)
        return player_fail(p, rc);
    p->b = b;
    snprintf(p->name, sizeof p->name, "tenant %u", i + 1);
    p->weight = weight_of(i);
    p->blocks = o.blocks;
    p->keys = malloc((size_t)o.blocks * RIG_KEY_BYTES);
    if (!p->keys)
        return bench_fail(BENCH_FAILED, "memory ran out");
    bench_keys(i + 1, 0, o.blocks, p->keys);
    if (args_given(b->args, "check") && (rc = fair_check_fill(p)) != 0)
        return rc;
    move.keys = p->keys;
    rc = rig_move(&p->rig, RIG_DUMP, &move, NULL, &moved);
    if (rc < 0)
        return player_fail(p, rc);
    return moved.ok == o.blocks ? 0 : bench_fail(BENCH_FAILED, "not all blocks were stored");
}

static void player_close(struct player *p)
{
    rig_close(&p->rig);
    samples_free(&p->ms);
    free(p->keys);
    free(p->loaded_once);
    *p = (struct player){.b = NULL};
}

struct slot {
    struct ucm_task *task;
    uint64_t sent_ns;
    uint32_t first;
};

static int slot_send(struct player *p, struct slot *s, uint32_t *next)
{
    uint32_t ids[RUN_MAX];
    struct ucm_transfer t = {.n_keys = p->batch, .blocks = ids};
    int rc;

    if (*next + p->batch > p->blocks)
        *next = 0;
    s->first = *next;
    *next += p->batch;
    t.keys = p->keys + (size_t)s->first * RIG_KEY_BYTES;
    for (uint32_t i = 0; i < p->batch; i++)
        ids[i] = s->first + i;
    s->sent_ns = clock_ns();
    rc = ucm_load(p->rig.region, &t, p->rig.timeout_ms, &s->task);
    return rc < 0 ? player_fail(p, rc) : 0;
}

/* Brings blocks out of DRAM again, many at a time: a round trip for each request would leave its tenant without work
 * in the daemon for as long, and its turn to others. */
static int evict_loaded(struct player *p)
{
    uint32_t end = p->evict_from + p->loaded + p->batch;
    bool wraps = end + p->batch > p->blocks; /* as slot_send does */
    int rc;

    p->loaded += p->batch;
    if (p->loaded < p->blocks / 4 && !wraps)
        return 0;
    rc = rig_evict_keys(&p->rig, p->keys + (size_t)p->evict_from * RIG_KEY_BYTES, p->loaded);
    p->evict_from = wraps ? 0 : end;
    p->loaded = 0;
    return rc < 0 ? player_fail(p, rc) : 0;
}

static int slot_wait(struct player *p, struct slot *s)
{
    struct ucm_result r;
    int rc = ucm_task_wait(s->task, p->rig.timeout_ms, &r);
    bool all = rc == 0 && r.n_ok == p->batch;
    uint64_t now_ns = clock_ns();

    ucm_task_free(s->task);
    s->task = NULL;
    if (!all)
        return p->rc = bench_fail(BENCH_FAILED, "%s: a load: %s", p->name, ucm_errmsg());
    if (p->loaded_once)
        memset(p->loaded_once + s->first, true, p->batch);
    if (now_ns >= p->b->begin_ns && now_ns < p->b->end_ns) {
        p->bytes += p->batch * p->rig.block_bytes;
        (void)samples_add(&p->ms, (double)(now_ns - s->sent_ns) / 1e6);
    }
    return p->b->evicts ? evict_loaded(p) : 0;
}

static void pause_for(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};

    if (ns > 0)
        nanosleep(&t, NULL);
}

static void *player_run(void *arg)
{
    struct player *p = arg;
    struct slot slots[SLOTS] = {{.task = NULL}};
    uint32_t next = 0;

    p->evict_from = p->loaded = 0;
    for (unsigned i = 0; i < p->in_flight && p->rc == 0; i++)
        (void)slot_send(p, &slots[i], &next);
    for (unsigned i = 0; p->rc == 0 && clock_ns() < p->b->end_ns; i = (i + 1) % p->in_flight) {
        if (slot_wait(p, &slots[i]) != 0)
            break;
        pause_for(p->pause_ns);
        (void)slot_send(p, &slots[i], &next);
    }
    for (unsigned i = 0; i < p->in_flight; i++)
        if (slots[i].task)
            (void)slot_wait(p, &slots[i]);
    if (p->b->evicts && p->rc == 0)
        p->rc = rig_evict_keys(&p->rig, p->keys, p->blocks) < 0 ? BENCH_FAILED : 0;
    return NULL;
}

double fair_run(struct fair_bench *b, struct player *const *players, unsigned n)
{
    uint64_t bytes = 0, run_ms = args_number(b->args, "time");
    unsigned started = 0;
    int rc = 0;

    b->begin_ns = clock_ns() + (run_ms / 4 > WARM_MS ? run_ms / 4 : WARM_MS) * UINT64_C(1000000);
    b->end_ns = b->begin_ns + run_ms * UINT64_C(1000000);
    for (unsigned i = 0; i < n; i++) {
        players[i]->bytes = 0;
        players[i]->rc = 0;
        samples_clear(&players[i]->ms);
    }
    for (; started < n; started++)
        if (pthread_create(&players[started]->thread, NULL, player_run, players[started]) != 0)
            break;
    for (unsigned i = 0; i < started; i++) {
        pthread_join(players[i]->thread, NULL);
        rc = players[i]->rc != 0 ? players[i]->rc : rc;
        bytes += players[i]->bytes;
    }
    if (started < n || rc != 0)
        return -1;
    return (double)bytes * 1e9 / (double)(b->end_ns - b->begin_ns);
}

/* With four requests under way at least, of half the size and so on where its blocks are too few; from below with half of
 * its blocks, as the others are to leave DRAM again. */
static void flood(struct player *p)
{
    uint32_t most = p->b->evicts ? p->blocks / 2 : p->blocks;

    p->pause_ns = 0;
    p->batch = p->rig.block_bytes == LARGE_BLOCK ? 16 : 8;
    while (p->batch > 1 && 4 * p->batch > most)
        p->batch /= 2;
    p->in_flight = most / p->batch < SLOTS ? most / p->batch : SLOTS;
}

/* ---- shares ---- */

static void report_ratio(struct fair_bench *b, const char *name, double value, double baseline,
                         const char *against, const char *unit, double aim, bool more)
{
    report_figure(&b->report, &(struct figure){.name = name,
                                               .unit = unit,
                                               .value = value,
                                               .baseline_name = against,
                                               .baseline = baseline,
                                               .target = aim,
                                               .more_is_better = more});
}

static const char *request_name(const struct player *p, char name[32])
{
    snprintf(name, 32, "%u KiB", (unsigned)(p->batch * p->rig.block_bytes >> 10));
    return name;
}

static int measure_alone(struct fair_bench *b)
{
    char name[96], size[32];

    for (unsigned i = 0; i < 2 && i < b->n; i++) {
        struct player *p = &b->players[i];
        bool small = !is_large(i);

        flood(p);
        b->alone[small] = fair_run(b, &p, 1);
        if (b->alone[small] <= 0)
            return BENCH_FAILED;
        snprintf(name, sizeof name, "one alone, requests of %s, bytes a second",
                 request_name(p, size));
        report_number(&b->report, name, b->alone[small]);
    }
    return 0;
}

/* ---- turns of the daemon's loop ---- */

static int turns_read(struct fair_bench *b, struct histogram *out)
{
    struct rig *rig = &b->players[PLAYERS_MAX].rig;
    struct answer stats;
    char name[32];
    int rc = answer_call(rig->client, UCM_METHOD_STATS, NULL, rig->timeout_ms, &stats);

    if (rc < 0)
        return bench_fail(BENCH_FAILED, "stats: %s", ucm_errmsg());
    *out = (struct histogram){.sum_ns = 0};
    for (uint32_t i = 0; i < answer_count(stats.root, "histograms"); i++) {
        const msgpack_object *o = answer_at(stats.root, "histograms", i);

        if (strcmp(answer_text(o, "name", name, sizeof name), "loop_turn") == 0)
            answer_histogram(o, out);
    }
    answer_close(&stats);
    return 0;
}

/* An older daemon does not tell. */
static void report_turns(struct fair_bench *b, unsigned n, struct histogram turns[2])
{
    char name[96];
    unsigned last = 0;

    for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++) {
        turns[1].bucket[i] -= turns[0].bucket[i];
        last = turns[1].bucket[i] > 0 ? i : last;
    }
    if (last == 0)
        return;
    snprintf(name, sizeof name, "%u tenants, turns of the loop: p99, us", n);
    report_number(&b->report, name, (double)histogram_quantile_us(&turns[1], 990));
    snprintf(name, sizeof name, "%u tenants, turns of the loop: longest at most, us", n);
    report_number(&b->report, name, (double)histogram_bound_us(last));
}

/* The least and the most that a tenant got of its due; and all bytes, against the time that they would take if each
 * tenant's came as fast as they do alone, one tenant after the other. */
static int measure_shares(struct fair_bench *b, unsigned n)
{
    struct player *players[PLAYERS_MAX];
    double rate, least[2] = {1e9, 1e9}, most[2] = {0, 0}, weights = 0, alone_s = 0;
    struct histogram turns[2];
    char name[96], size[32];

    for (unsigned i = 0; i < n; i++) {
        players[i] = &b->players[i];
        flood(players[i]);
        weights += players[i]->weight;
    }
    if (turns_read(b, &turns[0]) != 0)
        return BENCH_FAILED;
    rate = fair_run(b, players, n);
    if (rate < 0 || turns_read(b, &turns[1]) != 0)
        return BENCH_FAILED;
    report_turns(b, n, turns);
    for (unsigned i = 0; i < n; i++) {
        double seconds = (double)args_number(b->args, "time") / 1e3;
        double due = rate * seconds * players[i]->weight / weights;
        double got = (double)players[i]->bytes / due;
        bool small = !is_large(i);

        alone_s += (double)players[i]->bytes / b->alone[small];
        least[small] = got < least[small] ? got : least[small];
        most[small] = got > most[small] ? got : most[small];
    }
    snprintf(name, sizeof name, "%u tenants: all together", n);
    report_ratio(b, name, rate / 1e9,
                 rate * (double)args_number(b->args, "time") / 1e3 / alone_s / 1e9,
                 "the same bytes alone", "GB/s", TOGETHER_AIM, true);
    for (unsigned small = 0; small < 2; small++) {
        if (most[small] == 0)
            continue;
        (void)request_name(players[small], size);
        snprintf(name, sizeof name, "%u tenants, %s: least of a due", n, size);
        report_ratio(b, name, least[small], 1, "its due", "", SHARE_AIM, true);
        snprintf(name, sizeof name, "%u tenants, %s: most", n, size);
        report_ratio(b, name, most[small], 1, "its due", "", 2 - SHARE_AIM, false);
    }
    return args_given(b->args, "check") ? fair_check(b, players, n) : 0;
}

/* ---- a neighbour ---- */

static int measure_neighbour(struct fair_bench *b, uint32_t batch)
{
    struct player *both[2] = {&b->players[PLAYERS_MAX], &b->players[0]}, *victim = both[0];
    double alone[2], beside[2], kib = batch * SMALL_BLOCK / 1024.0;
    char name[96];

    victim->batch = batch;
    victim->in_flight = 1;
    victim->pause_ns = 0;
    if (fair_run(b, both, 1) < 0)
        return BENCH_FAILED;
    victim->pause_ns = (uint64_t)(PAUSE * 1e6 * samples_at(&victim->ms, 0.5));
    if (fair_run(b, both, 1) < 0)
        return BENCH_FAILED;
    alone[0] = samples_at(&victim->ms, 0.5);
    alone[1] = samples_at(&victim->ms, 0.99);
    flood(both[1]);
    if (fair_run(b, both, 2) < 0)
        return BENCH_FAILED;
    beside[0] = samples_at(&victim->ms, 0.5);
    beside[1] = samples_at(&victim->ms, 0.99);
    snprintf(name, sizeof name, "%.0f KiB beside a flood, median", kib);
    report_ratio(b, name, beside[0], alone[0], "alone", "ms", 0, false);
    snprintf(name, sizeof name, "%.0f KiB beside a flood, p99", kib);
    report_ratio(b, name, beside[1], alone[1], "alone", "ms", WAIT_AIM, false);
    return 0;
}

/* ---- the command ---- */

static int open_all(struct fair_bench *b)
{
    struct rig *first = &b->players[PLAYERS_MAX].rig;
    uint64_t parts = 0;
    int rc = player_open(b, &b->players[PLAYERS_MAX], PLAYERS_MAX + 1);

    if (rc == 0 && rig_wait_arena(first) < 0)
        rc = bench_rig_fail(first, -1);
    for (unsigned i = 0; rc == 0 && i < b->n; i++) {
        rc = player_open(b, &b->players[i], i);
        parts += b->players[i].blocks;
    }
    if (rc != 0 || !b->evicts)
        return rc;
    rc = wait_stored(b, &b->players[0].rig, parts + VICTIM_BLOCKS);
    for (unsigned i = 0; rc == 0 && i <= PLAYERS_MAX; i++)
        if (b->players[i].b) {
            struct player *p = &b->players[i];

            rc = rig_evict_keys(&p->rig, p->keys, p->blocks);
            rc = rc < 0 ? bench_rig_fail(&p->rig, rc) : 0;
        }
    return rc;
}

static int measure(struct fair_bench *b)
{
    char names[128], *list = names, *name;
    int rc = open_all(b);

    if (rc == 0)
        rc = measure_alone(b);
    snprintf(names, sizeof names, "%s", args_text(b->args, "tenants"));
    while (rc == 0 && (name = strsep(&list, ",")) != NULL)
        rc = measure_shares(b, (unsigned)strtoul(name, NULL, 10));
    for (uint32_t batch = 2; rc == 0 && batch <= RUN_MAX && !args_given(b->args, "shares");
         batch *= 8)
        rc = measure_neighbour(b, batch);
    return rc;
}

static int tenants_read(struct fair_bench *b)
{
    char names[128], *list = names, *name;

    snprintf(names, sizeof names, "%s", args_text(b->args, "tenants"));
    while ((name = strsep(&list, ",")) != NULL) {
        unsigned long n = strtoul(name, NULL, 10);

        if (n < 1 || n > PLAYERS_MAX)
            return program_usage_error(b->args, "--tenants: wanted numbers from 1 to %d",
                                       PLAYERS_MAX);
        b->n = n > b->n ? (unsigned)n : b->n;
    }
    return 0;
}

int bench_fair(const struct args *a)
{
    struct fair_bench *b = calloc(1, sizeof *b);
    int rc;

    if (!b)
        return bench_fail(BENCH_FAILED, "memory ran out");
    b->args = a;
    b->gpu = strcmp(args_text(a, "device"), "gpu") == 0;
    b->evicts = strcmp(args_text(a, "tier"), "dram") != 0;
    b->daemon = (struct daemon){.path = args_text(a, "ucmd"), .dir = b->dir};
    rc = tenants_read(b);
    if (rc == 0 && geteuid() != 0)
        rc = bench_fail(BENCH_FAILED, "it takes root to be several users");
    snprintf(b->dir, sizeof b->dir, "%s/ucm-fair-XXXXXX", args_text(a, "dir"));
    if (rc == 0 && (!mkdtemp(b->dir) || chmod(b->dir, 0711) != 0))
        rc = bench_fail(BENCH_FAILED, "%s: %s", b->dir, strerror(errno));
    if (rc != 0) {
        free(b);
        return rc;
    }
    report_begin(&b->report, "fair", args_given(a, "json"));
    rc = start(b);
    if (rc == 0) {
        rc = measure(b);
        for (unsigned i = 0; i <= PLAYERS_MAX; i++)
            if (b->players[i].b)
                player_close(&b->players[i]);
    }
    if (b->daemon.pid > 0)
        (void)daemon_stop(&b->daemon);
    (void)daemon_folder_remove(b->dir);
    rc = report_end(&b->report) < 0 ? BENCH_FAILED : rc;
    free(b);
    return rc;
}
