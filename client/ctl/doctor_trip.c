/* A round trip: is the cache really active? As a worker of its own, in a namespace of its own. */
#include "client/ctl/doctor.h"

#include "proto/backoff.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define BLOCKS 64u
#define LAYERS 4u
#define FRAGMENT (TRIP_BYTES / BLOCKS / LAYERS)
#define SECONDS 0.3 /* of loads */
/* How long a busy daemon is asked again: NVIDIA's driver takes some seconds to start on a host of
 * eight GPUs, and the daemon answers others meanwhile. */
#define BUSY_SECONDS 20.0
#define BUSY_MIN_MS 20
#define BUSY_MAX_MS 500

struct trip {
    struct doctor *d;
    struct trip_memory *m;
    struct ucm_namespace *ns;
    struct ucm_region *region;
    uint8_t keys[BLOCKS][32];
    uint32_t blocks[BLOCKS];
    uint8_t *sent, *got;
    double dump, load; /* bytes a second */
    const char *step;  /* that failed */
    bool refused;      /* it was the registration */
    char why[256];
};

static int failed(struct trip *t, const char *step, const char *why)
{
    t->step = step;
    snprintf(t->why, sizeof t->why, "%s", why);
    return -1;
}

static int library_failed(struct trip *t, const char *step)
{
    return failed(t, step, ucm_errmsg()[0] != '\0' ? ucm_errmsg() : "failed");
}

/* Only a registration says what the daemon makes of the device: its list of devices is empty while
 * the driver starts, and the GPU's context opens with the first region. */
static int register_region(struct trip *t, const struct ucm_region_spec *spec)
{
    double until = doctor_now() + BUSY_SECONDS;
    struct backoff wait;
    int rc;

    backoff_init(&wait, BUSY_MIN_MS, BUSY_MAX_MS, 0);
    for (;;) {
        rc = ucm_region_register(t->ns, spec, -1, &t->region);
        if (rc != -UCM_EBUSY || doctor_now() > until)
            break;
        backoff_fail(&wait, 0);
        nanosleep(&(struct timespec){.tv_nsec = (long)wait.pause * 1000000}, NULL);
    }
    if (rc == 0)
        return 0;
    t->refused = true;
    return library_failed(t, "registering memory");
}

static int open_region(struct trip *t)
{
    const uint32_t layers = LAYERS;
    const struct ucm_identity identity = {
        .model = "ucmctl doctor",
        .dtype = "bytes",
        .layout = "doctor/1",
        .block_tokens = 16,
        .key_bytes = sizeof t->keys[0],
        .parts = 1,
        .layers = &layers,
        .n_layers = 1,
        .layer_bytes = FRAGMENT,
    };
    struct ucm_plane planes[LAYERS];
    struct ucm_region_spec spec = {
        .blocks = BLOCKS,
        .device = t->m->device,
        .gpu = t->m->gpu,
        .memory = &t->m->memory,
        .n_memory = 1,
        .planes = planes,
        .n_planes = LAYERS,
    };

    for (uint32_t i = 0; i < LAYERS; i++)
        planes[i] = (struct ucm_plane){.offset = (uint64_t)i * BLOCKS * FRAGMENT,
                                       .stride = FRAGMENT,
                                       .block_bytes = FRAGMENT,
                                       .layer = i};
    if (ucm_namespace_open(t->d->client, &identity, -1, &t->ns) < 0)
        return library_failed(t, "opening a namespace");
    return register_region(t, &spec);
}

/* A load or dump of all blocks, to its end. */
static int transfer(struct trip *t, bool dump)
{
    const struct ucm_transfer all = {.keys = t->keys, .blocks = t->blocks, .n_keys = BLOCKS};
    const char *step = dump ? "dump" : "load";
    struct ucm_result result;
    struct ucm_task *task;
    bool whole;
    int rc = dump ? ucm_dump(t->region, &all, -1, &task) : ucm_load(t->region, &all, -1, &task);

    if (rc < 0)
        return library_failed(t, step);
    rc = ucm_task_wait(task, -1, &result);
    whole = rc == 0 && result.n_ok == BLOCKS;
    ucm_task_free(task);
    if (rc < 0)
        return library_failed(t, step);
    return whole
               ? 0
               : failed(
                     t, step,
                     "not all blocks were moved: DRAM is full of blocks in use, or a bypass is on");
}

static int lookup(struct trip *t, uint32_t wanted)
{
    const struct ucm_lookup all = {.keys = t->keys, .n_keys = BLOCKS};
    uint32_t hits = 0;

    if (ucm_lookup_prefix(t->ns, &all, -1, &hits, NULL, NULL) < 0)
        return library_failed(t, "lookup");
    if (hits != wanted)
        return failed(t, "lookup",
                      wanted == 0 ? "the daemon still finds the blocks that doctor dropped"
                      : answer_count(t->d->stats, "bypassed") > 0
                          ? "the daemon does not find the blocks that doctor dumped: a bypass is on"
                          : "the daemon does not find the blocks that doctor dumped");
    return 0;
}

static int compare(struct trip *t)
{
    memset(t->got, 0, TRIP_BYTES);
    if (t->m->get_cb(t->m, t->got) != 0)
        return failed(t, "reading the memory", t->m->why);
    return memcmp(t->sent, t->got, TRIP_BYTES) == 0
               ? 0
               : failed(t, "comparing", "other bytes came back than were stored");
}

static int there_and_back(struct trip *t)
{
    double start, seconds = 0;
    uint64_t n = 0;

    if (t->m->put_cb(t->m, t->sent) != 0)
        return failed(t, "filling the memory", t->m->why);
    start = doctor_now();
    if (transfer(t, true) != 0)
        return -1;
    t->dump = TRIP_BYTES / (doctor_now() - start);
    if (lookup(t, BLOCKS) != 0)
        return -1;
    memset(t->got, 0, TRIP_BYTES);
    if (t->m->put_cb(t->m, t->got) != 0)
        return failed(t, "emptying the memory", t->m->why);
    for (start = doctor_now(); n == 0 || (t->d->measure && seconds < SECONDS); n++) {
        if (transfer(t, false) != 0)
            return -1;
        seconds = doctor_now() - start;
    }
    t->load = (double)n * TRIP_BYTES / seconds;
    return compare(t);
}

/* Drops the blocks in every tier. */
static int drop(struct trip *t)
{
    if (ucm_evict(t->ns, t->keys, BLOCKS, -1, NULL, NULL) < 0)
        return library_failed(t, "dropping the blocks");
    return lookup(t, 0);
}

static void trip_close(struct trip *t)
{
    if (t->region != NULL && ucm_region_unregister(t->region, -1) < 0 && t->step == NULL)
        library_failed(t, "unregistering memory");
    ucm_namespace_close(t->ns);
    free(t->sent);
    free(t->got);
}

void doctor_trip(struct doctor *d, const char *check, struct trip_memory *m)
{
    struct trip t = {.d = d, .m = m, .sent = malloc(TRIP_BYTES), .got = malloc(TRIP_BYTES)};
    int rc = -1;

    for (uint32_t i = 0; i < BLOCKS; i++)
        t.blocks[i] = BLOCKS - 1 - i;
    if (t.sent == NULL || t.got == NULL || getrandom(t.keys, sizeof t.keys, 0) != sizeof t.keys) {
        failed(&t, "beginning", "memory or random numbers ran out");
    } else {
        for (uint32_t i = 0; i < TRIP_BYTES; i += sizeof i)
            memcpy(t.sent + i, &(uint32_t){i * 2654435761u}, sizeof i);
        rc = open_region(&t);
    }
    if (rc == 0) {
        const char *step;

        there_and_back(&t);
        step = t.step;
        if (drop(&t) != 0 && step != NULL)
            t.step = step;
    }
    trip_close(&t);
    if (t.refused && m->refused_cb != NULL && m->refused_cb(m, t.why))
        return;
    if (t.step != NULL)
        doctor_add(d, DOCTOR_FAIL, check, "see the daemon's log and 'ucmctl health'", "%s: %s",
                   t.step, t.why);
    else
        doctor_add(d, DOCTOR_OK, check, NULL,
                   "16 MiB dumped, found, loaded and equal: %.2f GB/s out, %.2f GB/s in",
                   t.dump / 1e9, t.load / 1e9);
}

/* ---- host memory ---- */

static int cpu_put_cb(struct trip_memory *m, const void *from)
{
    memcpy(m->ctx, from, TRIP_BYTES);
    return 0;
}

static int cpu_get_cb(struct trip_memory *m, void *to)
{
    memcpy(to, m->ctx, TRIP_BYTES);
    return 0;
}

void doctor_trip_cpu(struct doctor *d)
{
    struct trip_memory m = {.device = "cpu", .put_cb = cpu_put_cb, .get_cb = cpu_get_cb};
    int fd;

    if (d->client == NULL) {
        doctor_add(d, DOCTOR_SKIP, "round trip", "start the daemon", "not tried: no daemon");
        return;
    }
    if (ucm_shared_memory(TRIP_BYTES, &fd, &m.ctx) < 0) {
        doctor_add(d, DOCTOR_FAIL, "round trip", "more memory", "%s", ucm_errmsg());
        return;
    }
    m.memory = (struct ucm_memory){.kind = UCM_MEMORY_MEMFD, .bytes = TRIP_BYTES, .fd = fd};
    doctor_trip(d, "round trip", &m);
    munmap(m.ctx, TRIP_BYTES);
    close(fd);
}
