/* One side of `make bench-gate`: gate.py runs it once with the baseline's build and once with this
 * tree's, by turns. It starts its own daemons with the given ucmd. It plays their worker through
 * the libucmclient that the loader finds (LD_LIBRARY_PATH), and repeats a case on request. So a
 * case costs what this daemon and this library cost together.
 *
 *   gate_worker UCMD DIRECTORY
 *
 * Standard output has a line with the name of each case, and an empty one. Daemons start with the
 * first number on standard input, so that a caller without a case starts none. There is a line
 * "WALL CPU" for each number of a case on standard input. WALL is the seconds of one operation by
 * the clock: the median over the repetition. CPU is the mean processor time of daemon and worker,
 * kernel included. A case that measures no time prints its value for WALL, and 0. The program ends
 * with its input, or with a sentence on standard error.
 *
 * Worker and daemons share one processor. A round trip between two processors takes seven times as
 * long, most of it to wake the other one up. It varies with what that one does. So effects that
 * need many processors, such as a contended lock, do not show here. */
#include "client/bench/figure.h"
#include "tests/gate/place.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LARGE_FRAGMENT (64u << 10)
#define LARGE_BLOCK (256u << 10)
#define LARGE_BLOCKS 64u
#define SMALL_FRAGMENT (4u << 10)
#define SMALL_BLOCK (64u << 10)
#define SMALL_BLOCKS 128u
#define TINY_BLOCK 64u
#define MANY_KEYS 8192u
#define SOME_KEYS 64u
#define LEASE_MS 10000
#define FOUND_BLOCKS 4096u
#define FOUND_PAUSE_US 200
#define HASH_BLOCKS 4096u
#define HASH_TOKENS 16u

enum { LARGE, SMALL, TINY, NEW_LARGE, NEW_SMALL, ON_DISK, PLACES };

static struct worker {
    char memory_directory[200], disk_directory[200], again_directory[200];
    struct daemon memory, disk, again; /* again: started again each time */
    struct place place[PLACES];
    uint8_t *found_keys;
    uint32_t *tokens;
    uint8_t *hashed;
} w;

/* The last one that is allowed; daemons inherit it. */
static void processor_take(void)
{
    cpu_set_t allowed, one;
    int cpu = CPU_SETSIZE - 1;

    CPU_ZERO(&allowed);
    CPU_ZERO(&one);
    (void)sched_getaffinity(0, sizeof allowed, &allowed);
    while (cpu >= 0 && !CPU_ISSET(cpu, &allowed))
        cpu--;
    if (cpu >= 0)
        CPU_SET(cpu, &one);
    (void)sched_setaffinity(0, sizeof one, &one); /* it is only noisier then */
}

/* ---- clocks ---- */

/* CPU time of a process with all its threads; of this one for 0. */
static double cpu_s(pid_t pid)
{
    struct timespec t = {0};
    clockid_t id = CLOCK_PROCESS_CPUTIME_ID;

    if (pid == 0 || clock_getcpuclockid(pid, &id) == 0)
        (void)clock_gettime(id, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A repetition: each operation goes into `walls`, and its processor time into a sum. */
struct meter {
    pid_t daemon; /* 0: none */
    struct samples walls;
    uint64_t begin_ns;
    double begin_cpu, cpu;
};

static void meter_begin(struct meter *m)
{
    m->begin_cpu = cpu_s(0) + (m->daemon ? cpu_s(m->daemon) : 0);
    m->begin_ns = clock_ns();
}

/* An operation has ended. */
static void meter_lap(struct meter *m)
{
    uint64_t now = clock_ns();

    (void)samples_add(&m->walls, (double)(now - m->begin_ns) / 1e9);
    m->begin_ns = now;
}

static void meter_end(struct meter *m)
{
    m->cpu += cpu_s(0) + (m->daemon ? cpu_s(m->daemon) : 0) - m->begin_cpu;
}

/* ---- operations on places ---- */

/* A case: which operation, on which place, on how many keys at once, and how often. */
struct work {
    const char *name;
    int (*repeat_cb)(struct meter *m, const struct work *c);
    struct place *place;
    enum rig_op op;
    uint32_t n;
    unsigned times;
};

static int look(struct meter *m, const struct work *c, uint32_t lease_ms)
{
    struct rig *rig = &c->place->rig;
    struct ucm_lookup lookup = {.keys = c->place->keys, .n_keys = c->n, .lease_ms = lease_ms};

    m->daemon = w.memory.pid;
    meter_begin(m);
    for (unsigned i = 0; i < c->times; i++) {
        uint32_t hits = 0, lease = 0;

        if (ucm_lookup_prefix(rig->ns, &lookup, GATE_TIMEOUT_MS, &hits, NULL, &lease) < 0 ||
            (lease_ms && ucm_release(rig->client, lease, GATE_TIMEOUT_MS) < 0))
            return gate_fail("lookup: %s", ucm_errmsg());
        if (hits != c->n)
            return gate_fail("a lookup of %u stored keys found %u", c->n, hits);
        meter_lap(m);
    }
    meter_end(m);
    return 0;
}

static int look_only(struct meter *m, const struct work *c)
{
    return look(m, c, 0);
}

static int look_and_release(struct meter *m, const struct work *c)
{
    return look(m, c, LEASE_MS);
}

/* Loads, and dumps of blocks that are stored. */
static int moves(struct meter *m, const struct work *c)
{
    int rc = 0;

    m->daemon = w.memory.pid;
    meter_begin(m);
    for (unsigned i = 0; rc == 0 && i < c->times; i++) {
        rc = place_move(c->place, c->op, c->place->keys, c->n);
        meter_lap(m);
    }
    meter_end(m);
    return rc;
}

/* New keys each time; the blocks go afterwards, uncounted. */
static int dumps(struct meter *m, const struct work *c)
{
    struct place *p = c->place;
    int rc = 0;

    m->daemon = w.memory.pid;
    for (unsigned i = 0; rc == 0 && i < c->times; i++) {
        gate_keys(p->fresh, p->n);
        meter_begin(m);
        rc = place_move(p, c->op, p->fresh, p->n);
        meter_lap(m);
        meter_end(m);
        if (rc == 0 && rig_evict(&p->rig, 0) < 0)
            rc = gate_fail("%s", p->rig.error);
    }
    return rc;
}

static int from_disk(struct meter *m, const struct work *c)
{
    struct place *p = c->place;
    int rc = 0;

    m->daemon = w.disk.pid;
    for (unsigned i = 0; rc == 0 && i < c->times; i++) {
        if (rig_evict(&p->rig, 1) < 0)
            return gate_fail("%s", p->rig.error);
        meter_begin(m);
        rc = place_move(p, c->op, p->keys, p->n);
        meter_lap(m);
        meter_end(m);
    }
    return rc;
}

/* ---- keys, memory, restart ---- */

static int hash(struct meter *m, const struct work *c)
{
    meter_begin(m);
    for (unsigned i = 0; i < c->times; i++) {
        if (ucm_keys_sha256(NULL, w.tokens, HASH_TOKENS, HASH_BLOCKS, w.hashed) < 0)
            return gate_fail("%s", ucm_errmsg());
        meter_lap(m);
    }
    meter_end(m);
    return 0;
}

/* Memory of the daemon that does not lie in its arena. */
static int memory(struct meter *m, const struct work *c)
{
    char path[64], line[256];
    uint64_t arena = 0;
    double bytes = 0;
    FILE *f;

    (void)c;
    if (rig_metric(&w.place[TINY].rig, "arena_bytes_total", &arena) < 0)
        return gate_fail("%s", w.place[TINY].rig.error);
    snprintf(path, sizeof path, "/proc/%d/status", (int)w.memory.pid);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "RssAnon:", 8) == 0)
            bytes = strtod(line + 8, NULL) * 1024;
    if (f)
        fclose(f);
    bytes -= (double)arena;
    return bytes > 0 && samples_add(&m->walls, bytes) == 0 ? 0
                                                           : gate_fail("%s has no RssAnon", path);
}

/* Its NVMe tier lies in its directory. */
static int disk_daemon_start(struct daemon *d)
{
    char paths[240];
    const char *const sets[] = {"arena.size=64MiB",   "device.cpu_threads=1",
                                "device.cuda=off",    "log.level=error",
                                "nvme.size=128MiB",   paths,
                                "nvme.segment=16MiB", NULL};

    snprintf(paths, sizeof paths, "nvme.paths=%s/nvme", d->dir);
    if (daemon_start(d, sets) < 0 || daemon_wait(d, GATE_TIMEOUT_MS) < 0)
        return gate_fail("%s could not be started in %s", d->path, d->dir);
    return 0;
}

static int daemon_end(struct daemon *d)
{
    int rc = d->pid > 0 && daemon_stop(d) < 0 ? gate_fail("a daemon did not stop in order") : 0;

    d->pid = 0;
    return rc;
}

static int all_found(struct rig *rig)
{
    struct ucm_lookup lookup = {.keys = w.found_keys, .n_keys = FOUND_BLOCKS};
    uint64_t end = clock_ns() + UINT64_C(1000000) * GATE_TIMEOUT_MS;
    uint32_t hits = 0;

    while (hits < FOUND_BLOCKS) {
        if (ucm_lookup_prefix(rig->ns, &lookup, GATE_TIMEOUT_MS, &hits, NULL, NULL) < 0)
            return gate_fail("lookup: %s", ucm_errmsg());
        if (clock_ns() > end)
            return gate_fail("a restart found %u of %u blocks", hits, FOUND_BLOCKS);
        if (hits < FOUND_BLOCKS)
            usleep(FOUND_PAUSE_US);
    }
    return 0;
}

/* From exec until every block on NVMe is found. */
static int restart(struct meter *m, const struct work *c)
{
    struct place p = {0};
    int rc;

    (void)c;
    meter_begin(m);
    rc = disk_daemon_start(&w.again);
    if (rc == 0)
        rc = place_open(&p, &w.again, "again", 1, SMALL_FRAGMENT, SMALL_FRAGMENT);
    if (rc == 0)
        rc = all_found(&p.rig);
    meter_lap(m);
    meter_end(m);
    if (rc == 0)
        m->cpu += cpu_s(w.again.pid); /* it began with none */
    place_close(&p);
    return daemon_end(&w.again) < 0 ? -1 : rc;
}

static const struct work works[] = {
    {"lookup of 1 key", look_only, &w.place[TINY], 0, 1, 600},
    {"lookup of 64 keys", look_only, &w.place[TINY], 0, SOME_KEYS, 400},
    {"lookup of 8192 keys", look_only, &w.place[TINY], 0, MANY_KEYS, 10},
    {"lookup of 8192 keys with a lease, and its release", look_and_release, &w.place[TINY], 0,
     MANY_KEYS, 8},
    {"load of 1 block of 64 KiB", moves, &w.place[SMALL], RIG_LOAD, 1, 300},
    {"dump of a block that is stored", moves, &w.place[SMALL], RIG_DUMP, 1, 300},
    {"load of 16 MiB in 64 KiB", moves, &w.place[LARGE], RIG_LOAD, LARGE_BLOCKS, 3},
    {"load of 8 MiB in 4 KiB", moves, &w.place[SMALL], RIG_LOAD, SMALL_BLOCKS, 3},
    {"dump of 16 MiB in 64 KiB", dumps, &w.place[NEW_LARGE], RIG_DUMP, LARGE_BLOCKS, 3},
    {"dump of 8 MiB in 4 KiB", dumps, &w.place[NEW_SMALL], RIG_DUMP, SMALL_BLOCKS, 3},
    {"load of 16 MiB from NVMe", from_disk, &w.place[ON_DISK], RIG_LOAD, LARGE_BLOCKS, 2},
    {"prefetch of 16 MiB", from_disk, &w.place[ON_DISK], RIG_PREFETCH, LARGE_BLOCKS, 2},
    {.name = "restart until 4096 blocks on NVMe are found", .repeat_cb = restart},
    {.name = "memory besides the arena", .repeat_cb = memory},
    {.name = "keys of 4096 blocks", .repeat_cb = hash, .times = 3},
};
#define WORKS (sizeof works / sizeof works[0])

/* ---- opening ---- */

static int daemons_start(void)
{
    static const char *const in_memory[] = {"arena.size=192MiB", "device.cpu_threads=1",
                                            "device.cuda=off", "log.level=error", NULL};

    if (daemon_start(&w.memory, in_memory) < 0 || daemon_wait(&w.memory, GATE_TIMEOUT_MS) < 0)
        return gate_fail("%s could not be started in %s", w.memory.path, w.memory_directory);
    return disk_daemon_start(&w.disk);
}

/* What `restart` finds; the daemon that stored it is stopped. */
static int found_store(void)
{
    struct place p = {0};
    int rc = disk_daemon_start(&w.again);

    if (rc == 0)
        rc = place_open(&p, &w.again, "again", FOUND_BLOCKS, SMALL_FRAGMENT, SMALL_FRAGMENT);
    if (rc == 0)
        rc = place_store(&p, true);
    if (rc == 0)
        memcpy(w.found_keys, p.keys, (size_t)FOUND_BLOCKS * RIG_KEY_BYTES);
    place_close(&p);
    return daemon_end(&w.again) < 0 ? -1 : rc;
}

static int directory_make(char *out, size_t n, const char *directory, const char *name)
{
    char nvme[240];

    snprintf(out, n, "%.150s/%s", directory, name);
    snprintf(nvme, sizeof nvme, "%s/nvme", out);
    return mkdir(out, 0755) == 0 && mkdir(nvme, 0755) == 0
               ? 0
               : gate_fail("%s: %s", out, strerror(errno));
}

static int places_open(void)
{
    const struct {
        const struct daemon *daemon;
        const char *model;
        uint32_t n, block, fragment;
        bool stored;
    } all[PLACES] = {
        [LARGE] = {&w.memory, "large", LARGE_BLOCKS, LARGE_BLOCK, LARGE_FRAGMENT, true},
        [SMALL] = {&w.memory, "small", SMALL_BLOCKS, SMALL_BLOCK, SMALL_FRAGMENT, true},
        [TINY] = {&w.memory, "tiny", MANY_KEYS, TINY_BLOCK, TINY_BLOCK, true},
        [NEW_LARGE] = {&w.memory, "new large", LARGE_BLOCKS, LARGE_BLOCK, LARGE_FRAGMENT, false},
        [NEW_SMALL] = {&w.memory, "new small", SMALL_BLOCKS, SMALL_BLOCK, SMALL_FRAGMENT, false},
        [ON_DISK] = {&w.disk, "disk", LARGE_BLOCKS, LARGE_BLOCK, LARGE_FRAGMENT, true},
    };

    for (size_t i = 0; i < PLACES; i++)
        if (place_open(&w.place[i], all[i].daemon, all[i].model, all[i].n, all[i].block,
                       all[i].fragment) < 0 ||
            (all[i].stored && place_store(&w.place[i], all[i].daemon == &w.disk) < 0))
            return -1;
    return 0;
}

static int worker_open(const char *ucmd, const char *directory)
{
    int rc;

    w.found_keys = malloc((size_t)FOUND_BLOCKS * RIG_KEY_BYTES);
    w.tokens = calloc((size_t)HASH_BLOCKS * HASH_TOKENS, sizeof *w.tokens);
    w.hashed = malloc((size_t)HASH_BLOCKS * 32);
    if (w.found_keys == NULL || w.tokens == NULL || w.hashed == NULL)
        return gate_fail("memory ran out");
    if (directory_make(w.memory_directory, sizeof w.memory_directory, directory, "memory") < 0 ||
        directory_make(w.disk_directory, sizeof w.disk_directory, directory, "disk") < 0 ||
        directory_make(w.again_directory, sizeof w.again_directory, directory, "again") < 0)
        return -1;
    w.memory = (struct daemon){.path = ucmd, .dir = w.memory_directory};
    w.disk = (struct daemon){.path = ucmd, .dir = w.disk_directory};
    w.again = (struct daemon){.path = ucmd, .dir = w.again_directory};
    processor_take();
    rc = daemons_start();
    if (rc == 0)
        rc = places_open();
    return rc == 0 ? found_store() : rc;
}

static int answer(unsigned long number)
{
    struct meter m = {0};
    int rc = number < WORKS ? works[number].repeat_cb(&m, &works[number])
                            : gate_fail("there is no case %lu", number);

    if (rc == 0)
        printf("%.9g %.9g\n", samples_at(&m.walls, 0.5), m.cpu > 0 ? m.cpu / (double)m.walls.n : 0);
    samples_free(&m.walls);
    return rc;
}

int main(int argc, char **argv)
{
    char line[32];
    int rc = 0;

    if (argc != 3)
        return gate_fail("usage: gate_worker UCMD DIRECTORY") < 0 ? 2 : 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < WORKS; i++)
        puts(works[i].name);
    puts("");
    while (rc == 0 && fgets(line, sizeof line, stdin)) {
        if (w.found_keys == NULL)
            rc = worker_open(argv[1], argv[2]);
        if (rc == 0)
            rc = answer(strtoul(line, NULL, 10));
    }
    for (size_t i = 0; i < PLACES; i++)
        place_close(&w.place[i]);
    rc |= daemon_end(&w.memory) | daemon_end(&w.disk);
    free(w.found_keys);
    free(w.tokens);
    free(w.hashed);
    return rc == 0 ? 0 : 1;
}
