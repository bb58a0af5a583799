/* How many hosts can share a tier? Replays a trace over fleets, and says what they find where, and what they ask of the shared
 * tier's server. docs/scale.md has the answer. `scale_study` alone lists the options. */
#include "tests/bench/scale.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FLEETS_MAX 16

enum { GIB = 1 << 30 };

/* A number of the command line. */
struct option {
    const char *name, *what;
    double value;
};

enum {
    TRACE_TOKENS,
    BLOCK_TOKENS,
    TOKEN_BYTES,
    PARTS,
    MINUTES,
    LOAD,
    DRAM,
    NVME,
    NOTED,
    CAPACITY,
    COLLECT,
    SETTLE,
    STALE,
    SLACK,
    RTT,
    DEADLINE,
    FIRST_WAVE,
    SEED,
    OPTIONS
};

static struct option options[OPTIONS] = {
    [TRACE_TOKENS] = {"trace-tokens", "tokens of a block of the trace", 512},
    [BLOCK_TOKENS] = {"block-tokens", "tokens of a block of the cache", 512},
    [TOKEN_BYTES] = {"token-bytes", "bytes of a token's KV, all parts together", 70272},
    [PARTS] = {"parts", "parts of a block, each a file", 1},
    [MINUTES] = {"minutes", "of the trace, from its beginning; 0: all", 0},
    [LOAD] = {"load", "copies of the trace's traffic for each host", 1},
    [DRAM] = {"dram", "GiB of a host", 512},
    [NVME] = {"nvme", "GiB of a host; 0: none", 0},
    [NOTED] = {"noted", "blocks on the shared tier only that a host remembers", 4194304},
    [CAPACITY] = {"capacity",
                  "TiB of the shared tier for each host; 0: no bound; -1: there is none", 0},
    [COLLECT] = {"collect", "seconds from collection to collection", 600},
    [SETTLE] = {"settle", "ms until others find what a request stores", 1000},
    [STALE] = {"stale", "ms by which a router's knowledge is late", 1000},
    [SLACK] =
        {"slack",
         "times the mean load that a host may have and still get requests for its blocks; 0: any",
         2},
    [RTT] = {"rtt", "ms of a round trip of a lookup; 0: no time", 0},
    [DEADLINE] = {"deadline", "ms that a lookup has", 50},
    [FIRST_WAVE] = {"first-wave", "keys that a lookup asks for first; 0: as the daemon", 0},
    [SEED] = {"seed", "of workloads and placement", 1},
};

static const char *const places[] = {"round-robin", "session", "prefix", NULL};
static const char *const admissions[] = {"all", "reuse", NULL};
static const char *const commons[] = {"none", "heads", "all", NULL};

struct study {
    struct scale_source source;
    unsigned place, admission, common;
    uint32_t hosts[FLEETS_MAX], n_hosts;
};

static void usage(FILE *out)
{
    fprintf(out, "Usage: scale_study TRACE.jsonl|WORKLOAD|skew:EXPONENT [OPTION VALUE]...\n"
                 "  --hosts N[,N]...       (1,10,100)\n"
                 "  --place round-robin|session|prefix   (round-robin)\n"
                 "  --admission all|reuse  what is written to the shared tier (all)\n"
                 "  --common none|heads|all   what hosts' prompts have in common (heads)\n");
    for (int i = 0; i < OPTIONS; i++)
        fprintf(out, "  --%-14s %s (%g)\n", options[i].name, options[i].what, options[i].value);
}

static bool name_take(const char *value, const char *const *names, unsigned *out)
{
    for (*out = 0; names[*out] != NULL; ++*out)
        if (strcmp(value, names[*out]) == 0)
            return true;
    return false;
}

static bool hosts_take(struct study *s, const char *value)
{
    for (s->n_hosts = 0; *value != '\0' && s->n_hosts < FLEETS_MAX; s->n_hosts++) {
        char *end;
        unsigned long n = strtoul(value, &end, 10);

        if (n < 1 || n > 60000 || (*end != '\0' && *end != ','))
            return false;
        s->hosts[s->n_hosts] = (uint32_t)n;
        value = *end == ',' ? end + 1 : end;
    }
    return s->n_hosts > 0 && *value == '\0';
}

static bool number_take(const char *name, const char *value)
{
    for (int i = 0; i < OPTIONS; i++) {
        char *end;

        if (strcmp(name, options[i].name) != 0)
            continue;
        options[i].value = strtod(value, &end);
        return *value != '\0' && *end == '\0' && (options[i].value >= 0 || i == CAPACITY);
    }
    return false;
}

static bool option_take(struct study *s, const char *name, const char *value)
{
    if (strncmp(name, "--", 2) != 0 || value == NULL)
        return false;
    name += 2;
    if (strcmp(name, "hosts") == 0)
        return hosts_take(s, value);
    if (strcmp(name, "place") == 0)
        return name_take(value, places, &s->place);
    if (strcmp(name, "admission") == 0)
        return name_take(value, admissions, &s->admission);
    if (strcmp(name, "common") == 0)
        return name_take(value, commons, &s->common);
    return number_take(name, value);
}

static double block_bytes(void)
{
    return options[TOKEN_BYTES].value * options[BLOCK_TOKENS].value;
}

static uint64_t blocks_of_gib(double gib)
{
    return (uint64_t)(gib * GIB / block_bytes());
}

static struct scale_fleet fleet_of(const struct study *s, uint32_t hosts)
{
    double rtt = options[RTT].value, copies = hosts * options[LOAD].value;
    struct scale_fleet f = {.hosts = hosts,
                            .copies = copies < 1 ? 1 : (uint32_t)(copies + 0.5),
                            .place = (enum scale_place)s->place,
                            .admission = (enum scale_admission)s->admission,
                            .stale_ms = (uint32_t)options[STALE].value,
                            .slack = options[SLACK].value,
                            .dram = blocks_of_gib(options[DRAM].value),
                            .nvme = blocks_of_gib(options[NVME].value),
                            .noted = (uint64_t)options[NOTED].value,
                            .capacity = SCALE_NO_SHARE,
                            .settle_ms = (uint32_t)options[SETTLE].value,
                            .waves =
                                rtt > 0 ? (uint32_t)(options[DEADLINE].value / rtt) : SCALE_NONE,
                            .first_wave = (uint32_t)options[FIRST_WAVE].value,
                            .collect_s = (uint32_t)options[COLLECT].value,
                            .seed = s->source.seed};

    if (options[CAPACITY].value >= 0)
        f.capacity = blocks_of_gib(options[CAPACITY].value * 1024 * hosts);
    return f;
}

static double percent(uint64_t n, uint64_t of)
{
    return of > 0 ? 100.0 * (double)n / (double)of : 0;
}

/* Requests to a server a second, of all operations together. */
static struct scale_asks asks_of(const struct scale_result *r, enum scale_engine e, bool worst)
{
    double parts = options[PARTS].value, looks = 0, changes = 0, moves = 0;

    for (int op = 0; op < SCALE_OPS; op++) {
        struct scale_asks a = scale_asks(e, (enum scale_op)op, (uint64_t)(block_bytes() / parts));
        double n = worst ? (double)r->worst[op] : (double)r->ops[op] / r->seconds;

        n *= op == SCALE_FIND ? 1 : parts; /* a lookup asks for one part of a block */
        looks += n * a.looks;
        changes += n * a.changes;
        moves += n * a.moves;
    }
    return (struct scale_asks){(uint32_t)looks, (uint32_t)changes, (uint32_t)moves};
}

static void row_print(uint32_t hosts, const struct scale_result *r)
{
    struct scale_asks s3 = asks_of(r, SCALE_S3, false), nfs = asks_of(r, SCALE_NFS, false),
                      posix = asks_of(r, SCALE_POSIX, false), worst = asks_of(r, SCALE_S3, true);
    double gb = block_bytes() / 1e9 / r->seconds;

    printf("%6u %6.2f %6.2f %6.2f %6.2f %6.2f %8.2f %8.2f %9u %9u %9u %9u %9u %9.3f %9.1f %5.2f\n",
           hosts, percent(r->dram, r->references), percent(r->nvme, r->references),
           percent(r->shared, r->references), percent(r->computed, r->references),
           percent(r->late, r->references), (double)r->ops[SCALE_READ] * gb,
           (double)r->ops[SCALE_WRITE] * gb, s3.looks + s3.moves, s3.changes,
           worst.looks + worst.moves, nfs.looks + nfs.changes + nfs.moves,
           posix.looks + posix.changes, (double)r->stored * options[PARTS].value / 1e6,
           (double)r->removed * options[PARTS].value / r->seconds, r->busiest);
}

static void details_print(const struct scale_result *r)
{
    double lookups = r->lookups > 0 ? (double)r->lookups : 1;

    printf("       lookups there: %.1f %% of requests, %.1f keys each, %.1f %% found nothing with "
           "%.1f keys; round trips",
           percent(r->lookups, r->requests), (double)r->ops[SCALE_FIND] / lookups,
           percent(r->lookups_missed, r->lookups),
           r->lookups_missed > 0 ? (double)r->finds_missed / (double)r->lookups_missed : 0);
    for (unsigned i = 1; i < SCALE_WAVES; i++)
        if (r->rounds[i] > 0)
            printf(" %u: %.1f %%", i, percent(r->rounds[i], r->lookups));
    printf("; written twice: %.3f %%; collected before it was read: %llu\n",
           percent(r->ops[SCALE_AGAIN], r->ops[SCALE_WRITE] + r->ops[SCALE_AGAIN]),
           (unsigned long long)r->lost);
}

static void heading_print(const struct study *s, const struct scale_traffic *t)
{
    printf("%s, %s: %u requests in %u s, %llu blocks of %.2f MB of %llu; a host without bound has "
           "%.2f %%\n"
           "                            %% of the blocks asked for    GB/s       S3: requests/s    "
           "           NFS     posix      "
           "files   removed  busiest\n"
           " hosts   dram   nvme shared compute  late     read  written GET,HEAD       PUT     "
           "worst     calls  metadata  "
           "million        /s   host\n",
           s->source.what, places[s->place], t->n_requests, t->n_steps / SCALE_STEPS,
           (unsigned long long)t->blocks, block_bytes() / 1e6, (unsigned long long)t->references,
           percent(t->references - t->blocks, t->references));
}

int main(int argc, char **argv)
{
    struct study s = {.hosts = {1, 10, 100}, .n_hosts = 3, .common = SCALE_COMMON_HEADS};
    struct scale_traffic t;

    for (int i = 2; i < argc; i += 2)
        if (!option_take(&s, argv[i], argv[i + 1])) {
            fprintf(stderr, "not an option with its value: %s\n", argv[i]);
            usage(stderr);
            return 2;
        }
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    s.source.what = argv[1];
    s.source.seed = (unsigned long)options[SEED].value;
    s.source.minutes = options[MINUTES].value;
    s.source.common = (enum scale_common)s.common;
    s.source.split = (unsigned)(options[TRACE_TOKENS].value / options[BLOCK_TOKENS].value);
    s.source.split = s.source.split > 0 ? s.source.split : 1;
    if (scale_traffic_load(&s.source, &t) < 0)
        return 1;
    heading_print(&s, &t);
    for (uint32_t i = 0; i < s.n_hosts; i++) {
        struct scale_fleet f = fleet_of(&s, s.hosts[i]);
        struct scale_result r;

        scale_replay(&t, &f, &r);
        row_print(s.hosts[i], &r);
        details_print(&r);
        fflush(stdout);
    }
    scale_traffic_free(&t);
    return 0;
}
