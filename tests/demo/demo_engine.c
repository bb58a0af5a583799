#include "tests/demo/demo.h"

#include "client/bench/figure.h"
#include "client/bench/rig.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define REGION_BLOCKS 64
#define BATCH 16
#define IN_FLIGHT 4
#define LEASE_MS 30000
#define TIMEOUT_MS 30000

/* What the scheduler tells the other rank, and the other's answer that its load is done. */
struct order {
    uint32_t play; /* 0: the end */
    uint32_t hits;
};

struct rank {
    const struct demo *demo;
    struct demo_rank *count;
    unsigned engine, number;
    int peer; /* socket to the other rank */
    struct rig rig;
    struct workload *workload;
    uint64_t index; /* of the workload's next request */
    uint8_t *keys;
    uint8_t result[REGION_BLOCKS];
};

static int fail(struct rank *r, const char *text)
{
    snprintf(r->count->error, sizeof r->count->error, "%s", text);
    return -1;
}

/* ---- moving one part of the blocks ---- */

static int load_some(struct rank *r, const uint8_t *keys, uint32_t n)
{
    struct rig_move move = {.keys = keys, .n = n, .batch = BATCH, .in_flight = IN_FLIGHT};
    struct rig_moved moved;
    uint64_t t = clock_ns();

    if (rig_move(&r->rig, RIG_LOAD, &move, r->result, &moved) < 0)
        return fail(r, r->rig.error);
    r->count->load_ns += clock_ns() - t;
    r->count->load_bytes += moved.ok * r->rig.block_bytes;
    r->count->lost += n - moved.ok;
    if (rig_pull(&r->rig) < 0)
        return fail(r, r->rig.error);
    for (uint32_t b = 0; b < n; b++) {
        if (r->result[b] != UCM_BLOCK_IS_OK)
            continue;
        r->count->differing_bytes += rig_differ(&r->rig, b, keys + (size_t)b * RIG_KEY_BYTES);
        r->count->checked_bytes += r->rig.block_bytes;
    }
    return 0;
}

static int dump_some(struct rank *r, const uint8_t *keys, uint32_t n)
{
    struct rig_move move = {.keys = keys, .n = n, .batch = BATCH, .in_flight = IN_FLIGHT};
    struct rig_moved moved;
    uint64_t t;

    for (uint32_t b = 0; b < n; b++)
        rig_fill(&r->rig, b, keys + (size_t)b * RIG_KEY_BYTES);
    if (rig_push(&r->rig) < 0)
        return fail(r, r->rig.error);
    t = clock_ns();
    if (rig_move(&r->rig, RIG_DUMP, &move, NULL, &moved) < 0)
        return fail(r, r->rig.error);
    r->count->dump_ns += clock_ns() - t;
    r->count->dump_bytes += moved.ok * r->rig.block_bytes;
    r->count->not_stored += moved.no_room + moved.failed + moved.other;
    return 0;
}

static int each(struct rank *r, uint32_t first, uint32_t n,
                int (*some)(struct rank *r, const uint8_t *keys, uint32_t n))
{
    for (uint32_t at = 0; at < n; at += REGION_BLOCKS) {
        uint32_t left = n - at;
        int rc = some(r, r->keys + (size_t)(first + at) * RIG_KEY_BYTES,
                      left < REGION_BLOCKS ? left : REGION_BLOCKS);

        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- requests ---- */

/* A balancer without affinity: any turn may go to any engine, so both need all conversations. */
static unsigned engine_of(uint64_t index)
{
    return (unsigned)(workload_random(&index) % DEMO_ENGINES);
}

/* This engine's next request; its keys. 1, 0 at the end, -1. */
static int next_request(struct rank *r, uint32_t *n)
{
    struct workload_request q;
    struct workload_error e;
    int got;

    do {
        got = workload_next(r->workload, &q, &e);
        if (got < 0)
            return fail(r, e.text);
        if (got == 0)
            return 0;
    } while (engine_of(r->index++) != r->engine || q.n_ids == 0);
    *n = q.n_ids < r->rig.server.max_keys ? q.n_ids : r->rig.server.max_keys;
    workload_keys(q.ids, *n, r->keys);
    return 1;
}

static int look_up(struct rank *r, uint32_t n, uint32_t *hits, uint32_t *lease)
{
    struct ucm_lookup lookup = {.keys = r->keys, .n_keys = n, .lease_ms = LEASE_MS};
    struct demo_shared *shared = r->demo->shared;
    uint32_t in_dram = 0, i;
    uint64_t t = clock_ns();

    *lease = 0;
    if (ucm_lookup_prefix(r->rig.ns, &lookup, TIMEOUT_MS, hits, &in_dram, lease) < 0)
        return fail(r, ucm_errmsg());
    i = atomic_load(&shared->n_lookups[r->engine]);
    if (i < DEMO_MAX_LOOKUPS) {
        shared->lookup_us[r->engine][i] = (float)(clock_ns() - t) / 1e3f;
        atomic_store(&shared->n_lookups[r->engine], i + 1);
    }
    r->count->requests++;
    r->count->looked_up += n;
    r->count->hit += *hits;
    r->count->hit_dram += in_dram;
    return 0;
}

static int tell(struct rank *r, uint32_t play, uint32_t hits)
{
    struct order o = {.play = play, .hits = hits};

    if (send(r->peer, &o, sizeof o, MSG_NOSIGNAL) != (ssize_t)sizeof o)
        return fail(r, "the engine's other rank is gone");
    return 0;
}

static int hear(struct rank *r, struct order *o)
{
    ssize_t n;

    do
        n = recv(r->peer, o, sizeof *o, MSG_WAITALL);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof *o ? 0 : fail(r, "the engine's other rank is gone");
}

/* Rank 0: one request. The lease is given back only when both ranks have loaded. */
static int play_scheduler(struct rank *r, uint32_t n)
{
    struct order done;
    uint32_t hits = 0, lease;

    if (look_up(r, n, &hits, &lease) < 0 || tell(r, 1, hits) < 0)
        return -1;
    if (each(r, 0, hits, load_some) < 0 || hear(r, &done) < 0)
        return -1;
    if (lease != 0 && ucm_release(r->rig.client, lease, TIMEOUT_MS) < 0)
        return fail(r, ucm_errmsg());
    return each(r, hits, n - hits, dump_some);
}

static int play_worker(struct rank *r, uint32_t n, uint32_t hits)
{
    if (each(r, 0, hits, load_some) < 0 || tell(r, 1, hits) < 0)
        return -1;
    return each(r, hits, n - hits, dump_some);
}

static int run_scheduler(struct rank *r)
{
    uint32_t n = 0;
    int rc = 1;

    while (atomic_load(&r->demo->shared->stop) == 0) {
        rc = next_request(r, &n);
        if (rc <= 0)
            break;
        rc = play_scheduler(r, n);
        if (rc < 0)
            return rc;
    }
    return rc < 0 ? rc : tell(r, 0, 0);
}

/* Follows the same workload, so that it only needs to hear the number of hits. */
static int run_worker(struct rank *r)
{
    struct order o;
    uint32_t n = 0;

    for (;;) {
        if (hear(r, &o) < 0)
            return -1;
        if (o.play == 0)
            return 0;
        if (next_request(r, &n) <= 0 || o.hits > n)
            return fail(r, "the ranks do not agree on the workload");
        if (play_worker(r, n, o.hits) < 0)
            return -1;
    }
}

/* ---- processes ---- */

/* More than DRAM holds at once: conversations come back after others have pushed their blocks out.
 */
static const struct workload_shape shape = {.conversations = 40,
                                            .turns = 10,
                                            .prompts = 3,
                                            .prompt_blocks = 16,
                                            .turn_blocks = 3,
                                            .seed = 7};

static int rank_open(struct rank *r)
{
    const struct demo_options *o = &r->demo->options;
    struct workload_error e;
    char name[64];
    struct rig_options rig = {.socket = r->demo->socket,
                              .name = name,
                              .model = "demo/multi-turn",
                              .parts = DEMO_RANKS,
                              .part = r->number,
                              .block_bytes = o->part_bytes,
                              .fragment = o->fragment_bytes,
                              .blocks = REGION_BLOCKS,
                              .timeout_ms = TIMEOUT_MS,
                              .gpu = o->gpu};
    int rc = o->trace != NULL ? workload_trace(o->trace, &r->workload, &e)
                              : workload_generate(&shape, &r->workload, &e);

    if (rc < 0)
        return fail(r, e.text);
    snprintf(name, sizeof name, "engine-%u rank-%u", r->engine, r->number);
    r->keys = malloc((size_t)WORKLOAD_MAX_BLOCKS * RIG_KEY_BYTES);
    if (r->keys == NULL)
        return fail(r, "memory ran out");
    if (rig_open(&r->rig, &rig) < 0)
        return fail(r, r->rig.error);
    return 0;
}

static int rank_main(const struct demo *d, unsigned engine, unsigned number, int peer)
{
    struct rank r = {.demo = d,
                     .count = &d->shared->rank[engine][number],
                     .engine = engine,
                     .number = number,
                     .peer = peer};
    int rc;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    rc = rank_open(&r);
    if (rc == 0)
        rc = number == 0 ? run_scheduler(&r) : run_worker(&r);
    rig_close(&r.rig);
    workload_free(r.workload);
    free(r.keys);
    close(peer);
    return rc < 0 ? 1 : 0;
}

static int engine_main(const struct demo *d, unsigned engine)
{
    int pair[2], status, bad = 0;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGINT, SIG_IGN); /* main hears it, and sets `stop` */
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        return 1;
    for (unsigned k = 0; k < DEMO_RANKS; k++) {
        pid_t pid = fork();

        if (pid < 0)
            return 1; /* the rank begun already ends with this process */
        if (pid == 0) {
            close(pair[1 - k]);
            _exit(rank_main(d, engine, k, pair[k]));
        }
    }
    close(pair[0]);
    close(pair[1]);
    for (unsigned k = 0; k < DEMO_RANKS; k++)
        if (wait(&status) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
            bad = 1;
    return bad;
}

int demo_engine_start(struct demo *d, unsigned engine)
{
    pid_t pid;

    fflush(NULL);
    pid = fork();
    if (pid < 0) {
        perror("ucm-demo: fork");
        return -1;
    }
    if (pid == 0)
        _exit(engine_main(d, engine));
    d->engine[engine] = pid;
    return 0;
}
