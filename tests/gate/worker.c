/* One side of `make bench-gate`: gate.py runs it once with the baseline's build and once with this
 * tree's, by turns. It starts its own daemons with the given ucmd. It plays their worker through
 * the libucmclient that the loader finds (LD_LIBRARY_PATH), and repeats a case on request. So a
 * case costs what this daemon and this library cost together.
 *
 *   gate_worker UCMD DIRECTORY
 *
 * Standard output has a line with the name of each case, and an empty one. Then there is a line
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

static struct worker {
    char memory_directory[200], disk_directory[200], again_directory[200];
    struct daemon memory, disk, again; /* again: started again each time */
    struct place large, small, tiny, new_large, new_small, on_disk;
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

/* ---- short requests ---- */

static int look(struct meter *m, uint32_t n, uint32_t lease_ms, unsigned calls)
{
    struct rig *rig = &w.tiny.rig;
    struct ucm_lookup lookup = {.keys = w.tiny.keys, .n_keys = n, .lease_ms = lease_ms};

    m->daemon = w.memory.pid;
    meter_begin(m);
    for (unsigned i = 0; i < calls; i++) {
        uint32_t hits = 0, lease = 0;

        if (ucm_lookup_prefix(rig->ns, &lookup, GATE_TIMEOUT_MS, &hits, NULL, &lease) < 0 ||
            (lease_ms && ucm_release(rig->client, lease, GATE_TIMEOUT_MS) < 0))
            return gate_fail("lookup: %s", ucm_errmsg());
        if (hits != n)
            return gate_fail("a lookup of %u stored keys found %u", n, hits);
        meter_lap(m);
    }
    meter_end(m);
    return 0;
}

static int lookup_one(struct meter *m)
{
    return look(m, 1, 0, 600);
}

static int lookup_some(struct meter *m)
{
    return look(m, SOME_KEYS, 0, 400);
}

static int lookup_many(struct meter *m)
{
    return look(m, MANY_KEYS, 0, 10);
}

static int lookup_lease(struct meter *m)
{
    return look(m, MANY_KEYS, LEASE_MS, 8);
}

static int singles(struct meter *m, enum rig_op op)
{
    int rc = 0;

    m->daemon = w.memory.pid;
    meter_begin(m);
    for (unsigned i = 0; rc == 0 && i < 300; i++) {
        rc = place_move(&w.small, op, w.small.keys, 1);
        meter_lap(m);
    }
    meter_end(m);
    return rc;
}

static int load_one(struct meter *m)
{
    return singles(m, RIG_LOAD);
}

static int dump_again(struct meter *m)
{
    return singles(m, RIG_DUMP);
}

/* ---- copies ---- */

static int loads(struct meter *m, struct place *p)
{
    int rc = 0;

    m->daemon = w.memory.pid;
    meter_begin(m);
    for (unsigned i = 0; rc == 0 && i < 3; i++) {
        rc = place_move(p, RIG_LOAD, p->keys, p->n);
        meter_lap(m);
    }
    meter_end(m);
    return rc;
}

static int load_large(struct meter *m)
{
    return loads(m, &w.large);
}

static int load_small(struct meter *m)
{
    return loads(m, &w.small);
}

/* New keys each time; the blocks go afterwards, uncounted. */
static int dumps(struct meter *m, struct place *p)
{
    int rc = 0;

    m->daemon = w.memory.pid;
    for (unsigned i = 0; rc == 0 && i < 3; i++) {
        gate_keys(p->fresh, p->n);
        meter_begin(m);
        rc = place_move(p, RIG_DUMP, p->fresh, p->n);
        meter_lap(m);
        meter_end(m);
        if (rc == 0 && rig_evict(&p->rig, 0) < 0)
            rc = gate_fail("%s", p->rig.error);
    }
    return rc;
}

static int dump_large(struct meter *m)
{
    return dumps(m, &w.new_large);
}

static int dump_small(struct meter *m)
{
    return dumps(m, &w.new_small);
}

/* ---- NVMe ---- */

static int from_disk(struct meter *m, enum rig_op op)
{
    struct place *p = &w.on_disk;
    int rc = 0;

    m->daemon = w.disk.pid;
    for (unsigned i = 0; rc == 0 && i < 2; i++) {
        if (rig_evict(&p->rig, 1) < 0)
            return gate_fail("%s", p->rig.error);
        meter_begin(m);
        rc = place_move(p, op, p->keys, p->n);
        meter_lap(m);
        meter_end(m);
    }
    return rc;
}

static int disk_load(struct meter *m)
{
    return from_disk(m, RIG_LOAD);
}

static int disk_prefetch(struct meter *m)
{
    return from_disk(m, RIG_PREFETCH);
}

/* ---- keys, memory, restart ---- */

static int hash(struct meter *m)
{
    meter_begin(m);
    for (unsigned i = 0; i < 3; i++) {
        if (ucm_keys_sha256(NULL, w.tokens, HASH_TOKENS, HASH_BLOCKS, w.hashed) < 0)
            return gate_fail("%s", ucm_errmsg());
        meter_lap(m);
    }
    meter_end(m);
    return 0;
}

/* Memory of the daemon that does not lie in its arena. */
static int memory(struct meter *m)
{
    char path[64], line[256];
    uint64_t arena = 0;
    double bytes = 0;
    FILE *f;

    if (rig_metric(&w.tiny.rig, "arena_bytes_total", &arena) < 0)
        return gate_fail("%s", w.tiny.rig.error);
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

static int again_start(void)
{
    char paths[240];
    const char *const sets[] = {"arena.size=64MiB",   "device.cpu_threads=1",
                                "device.cuda=off",    "log.level=error",
                                "nvme.size=128MiB",   paths,
                                "nvme.segment=16MiB", NULL};

    snprintf(paths, sizeof paths, "nvme.paths=%s/nvme", w.again_directory);
    if (daemon_start(&w.again, sets) < 0 || daemon_wait(&w.again, GATE_TIMEOUT_MS) < 0)
        return gate_fail("%s could not be started in %s", w.again.path, w.again_directory);
    return 0;
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
static int restart(struct meter *m)
{
    struct place p = {0};
    int rc;

    meter_begin(m);
    rc = again_start();
    if (rc == 0)
        rc = place_open(&p, &w.again, "again", 1, SMALL_FRAGMENT, SMALL_FRAGMENT);
    if (rc == 0)
        rc = all_found(&p.rig);
    meter_lap(m);
    meter_end(m);
    if (rc == 0)
        m->cpu += cpu_s(w.again.pid); /* it began with none */
    place_close(&p);
    if (w.again.pid > 0 && daemon_stop(&w.again) < 0 && rc == 0)
        rc = gate_fail("the restarted daemon did not stop in order");
    w.again.pid = 0;
    return rc;
}

static const struct work {
    const char *name;
    int (*repeat_cb)(struct meter *m);
} works[] = {
    {"lookup of 1 key", lookup_one},
    {"lookup of 64 keys", lookup_some},
    {"lookup of 8192 keys", lookup_many},
    {"lookup of 8192 keys with a lease, and its release", lookup_lease},
    {"load of 1 block of 64 KiB", load_one},
    {"dump of a block that is stored", dump_again},
    {"load of 16 MiB in 64 KiB", load_large},
    {"load of 8 MiB in 4 KiB", load_small},
    {"dump of 16 MiB in 64 KiB", dump_large},
    {"dump of 8 MiB in 4 KiB", dump_small},
    {"load of 16 MiB from NVMe", disk_load},
    {"prefetch of 16 MiB", disk_prefetch},
    {"restart until 4096 blocks on NVMe are found", restart},
    {"memory besides the arena", memory},
    {"keys of 4096 blocks", hash},
};
#define WORKS (sizeof works / sizeof works[0])

/* ---- opening ---- */

static int daemons_start(void)
{
    static const char *const in_memory[] = {"arena.size=192MiB", "device.cpu_threads=1",
                                            "device.cuda=off", "log.level=error", NULL};
    char paths[240];
    const char *const on_disk[] = {"arena.size=64MiB",   "device.cpu_threads=1",
                                   "device.cuda=off",    "log.level=error",
                                   "nvme.size=128MiB",   paths,
                                   "nvme.segment=16MiB", NULL};

    snprintf(paths, sizeof paths, "nvme.paths=%s/nvme", w.disk_directory);
    if (daemon_start(&w.memory, in_memory) < 0 || daemon_wait(&w.memory, GATE_TIMEOUT_MS) < 0)
        return gate_fail("%s could not be started in %s", w.memory.path, w.memory_directory);
    if (daemon_start(&w.disk, on_disk) < 0 || daemon_wait(&w.disk, GATE_TIMEOUT_MS) < 0)
        return gate_fail("%s could not be started in %s", w.disk.path, w.disk_directory);
    return 0;
}

/* What `restart` finds; the daemon that stored it is stopped. */
static int found_store(void)
{
    struct place p = {0};
    int rc = again_start();

    if (rc == 0)
        rc = place_open(&p, &w.again, "again", FOUND_BLOCKS, SMALL_FRAGMENT, SMALL_FRAGMENT);
    if (rc == 0)
        rc = place_store(&p, true);
    if (rc == 0)
        memcpy(w.found_keys, p.keys, (size_t)FOUND_BLOCKS * RIG_KEY_BYTES);
    place_close(&p);
    if (w.again.pid > 0 && daemon_stop(&w.again) < 0 && rc == 0)
        rc = gate_fail("a daemon did not stop in order");
    w.again.pid = 0;
    return rc;
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
        struct place *place;
        const struct daemon *daemon;
        const char *model;
        uint32_t n, block, fragment;
        bool stored;
    } all[] = {
        {&w.large, &w.memory, "large", LARGE_BLOCKS, LARGE_BLOCK, LARGE_FRAGMENT, true},
        {&w.small, &w.memory, "small", SMALL_BLOCKS, SMALL_BLOCK, SMALL_FRAGMENT, true},
        {&w.tiny, &w.memory, "tiny", MANY_KEYS, TINY_BLOCK, TINY_BLOCK, true},
        {&w.new_large, &w.memory, "new large", LARGE_BLOCKS, LARGE_BLOCK, LARGE_FRAGMENT, false},
        {&w.new_small, &w.memory, "new small", SMALL_BLOCKS, SMALL_BLOCK, SMALL_FRAGMENT, false},
        {&w.on_disk, &w.disk, "disk", LARGE_BLOCKS, LARGE_BLOCK, LARGE_FRAGMENT, true},
    };

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (place_open(all[i].place, all[i].daemon, all[i].model, all[i].n, all[i].block,
                       all[i].fragment) < 0 ||
            (all[i].stored && place_store(all[i].place, all[i].daemon == &w.disk) < 0))
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
    int rc =
        number < WORKS ? works[number].repeat_cb(&m) : gate_fail("there is no case %lu", number);

    if (rc == 0)
        printf("%.9g %.9g\n", samples_at(&m.walls, 0.5), m.cpu > 0 ? m.cpu / (double)m.walls.n : 0);
    samples_free(&m.walls);
    return rc;
}

int main(int argc, char **argv)
{
    char line[32];
    int rc;

    if (argc != 3)
        return gate_fail("usage: gate_worker UCMD DIRECTORY") < 0 ? 2 : 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    rc = worker_open(argv[1], argv[2]);
    for (size_t i = 0; rc == 0 && i < WORKS; i++)
        puts(works[i].name);
    if (rc == 0)
        puts("");
    while (rc == 0 && fgets(line, sizeof line, stdin))
        rc = answer(strtoul(line, NULL, 10));
    place_close(&w.large);
    place_close(&w.small);
    place_close(&w.tiny);
    place_close(&w.new_large);
    place_close(&w.new_small);
    place_close(&w.on_disk);
    if (w.memory.pid > 0 && daemon_stop(&w.memory) < 0 && rc == 0)
        rc = gate_fail("a daemon did not stop in order");
    if (w.disk.pid > 0 && daemon_stop(&w.disk) < 0 && rc == 0)
        rc = gate_fail("a daemon did not stop in order");
    free(w.found_keys);
    free(w.tokens);
    free(w.hashed);
    return rc == 0 ? 0 : 1;
}
