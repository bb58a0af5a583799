/* How many hosts can share a tier? What the hosts of a fleet find in their DRAM, on their NVMe and on the shared tier, and
 * what they ask of its server, when each of them gets a copy of a trace's traffic. docs/scale.md has the answer.
 *
 * - scale_traffic.c makes runs of a trace: blocks that always come together, one behind the other.
 * - scale_fleet.c replays: hosts' caches, the shared tier, collection.
 * - scale_route.c is the router: who gets the next request.
 * - scale_cost.c: how many requests a lookup is, and how many of a server's requests an operation is.
 * - scale_study.c is the program.
 *
 * Time goes in steps of 100 ms. What an operation takes, and what waits for it, plays no part: rates come out, not delays.
 * Threads: one. What can't be had ends the program (abort). */
#ifndef UCM_TESTS_SCALE_H
#define UCM_TESTS_SCALE_H

#include <stdbool.h>
#include <stdint.h>

#define SCALE_STEPS 10u /* a second */
#define SCALE_NONE UINT32_MAX
#define SCALE_WAVES 6u

/* ---- traffic ---- */

struct scale_run {
    uint32_t parent; /* SCALE_NONE: it begins a prompt */
    uint32_t
        number; /* among those that all copies share, or among those of which each copy has its own */
    uint16_t blocks;
    bool common; /* all copies have the same */
};

struct scale_request {
    uint32_t step, run; /* when; the last run of its prompt */
    uint32_t session;   /* whose turn it is, as far as prompts show it */
};

struct scale_traffic {
    struct scale_run *runs;
    struct scale_request *requests; /* by time */
    uint32_t *first;                /* of each step: of its requests, and one behind the last */
    uint32_t n_runs, n_common, n_requests, n_steps, deepest;
    uint64_t references, blocks; /* blocks that requests name; of these different ones */
};

enum scale_common { SCALE_COMMON_NONE, SCALE_COMMON_HEADS, SCALE_COMMON_ALL };

struct scale_source {
    const char *what; /* a trace's path, a workload of policy_workloads.h, or "skew:EXPONENT" */
    unsigned long seed;
    double minutes; /* of it; 0: all */
    unsigned split; /* blocks for one of the trace */
    /* What the copies have in common. heads: what 16 and more prompts of one copy go on from; of "skew" its documents. */
    enum scale_common common;
};

/* 0, or -1 and a sentence on stderr. */
int scale_traffic_load(const struct scale_source *source, struct scale_traffic *out);
/* The same from what scale_traffic_add gave. `common` blocks: those below this number. */
void scale_traffic_add(double when, const uint32_t *id, uint32_t n);
void scale_traffic_make(const struct scale_source *source, uint32_t common,
                        struct scale_traffic *out);
void scale_traffic_free(struct scale_traffic *t);

/* ---- a fleet ---- */

enum scale_place { SCALE_ROUND_ROBIN, SCALE_SESSION, SCALE_PREFIX };
enum scale_admission { SCALE_ALL, SCALE_REUSE };

struct scale_fleet {
    uint32_t hosts, copies;
    enum scale_place place;
    uint32_t stale_ms; /* of what the router knows */
    double
        slack; /* a host gets no request for its blocks while it has more than so many times the mean load */
    uint64_t dram, nvme; /* blocks of a host; nvme with those in DRAM, or 0 */
    uint64_t noted;      /* blocks of a host's index that lie on the shared tier only */
    uint64_t capacity;   /* blocks of the shared tier; 0: no bound. SCALE_NO_SHARE: there is none */
    uint32_t settle_ms;  /* from a request until others find what it stored */
    uint32_t waves;      /* round trips that a lookup has time for */
    uint32_t first_wave; /* keys of the first one; 0: as the daemon */
    uint32_t collect_s;
    enum scale_admission admission;
    unsigned long seed;
};
#define SCALE_NO_SHARE UINT64_MAX

enum scale_op {
    SCALE_FIND,
    SCALE_READ,
    SCALE_WRITE,
    SCALE_AGAIN,
    SCALE_OPS
}; /* AGAIN: a write of what is there */

struct scale_result {
    uint64_t requests, references;
    uint64_t dram, nvme, shared, computed; /* of the references: where they were */
    uint64_t late; /* of the computed: the shared tier has them, and the lookup had no time */
    uint64_t lost; /* reads of what was collected meanwhile */
    uint64_t lookups, lookups_missed, finds_missed; /* that found nothing; what they asked */
    uint64_t rounds[SCALE_WAVES];              /* lookups by their round trips; the last: more */
    uint64_t ops[SCALE_OPS], worst[SCALE_OPS]; /* together; in the worst second */
    uint64_t stored, removed;                  /* blocks on the shared tier at the end; collected */
    double busiest;                            /* requests of the busiest host, of the mean */
    uint32_t seconds;
};

void scale_replay(const struct scale_traffic *t, const struct scale_fleet *f,
                  struct scale_result *out);

/* ---- requests ---- */

/* What a lookup of n missing keys, the first `there` of which lie on the shared tier, asks and finds in at most `waves` round
 * trips. daemon/share/lookup.c does the same by waves; tests/unit/share/test_scale.c compares. first: keys of the first wave, 0: as
 * the daemon. */
struct scale_probe {
    uint32_t finds, rounds, found;
};
struct scale_probe scale_probe(uint32_t n, uint32_t there, uint32_t waves, uint32_t first);

/* Requests to a server: those that read metadata, that change it, and the file's bytes. */
struct scale_asks {
    uint32_t looks, changes, moves;
};
enum scale_engine { SCALE_S3, SCALE_NFS, SCALE_POSIX, SCALE_ENGINES };
/* Of an operation on a file of that many bytes. */
struct scale_asks scale_asks(enum scale_engine e, enum scale_op op, uint64_t bytes);

#endif
