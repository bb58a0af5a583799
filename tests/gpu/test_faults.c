/* Mistakes of workers and their handles. Each is refused or fails by itself, nothing unfinished is
 * reported as stored, and the context goes on serving the others. The last test loses the context
 * on purpose. */
#include "tests/gpu/harness.h"

#include "proto/memory/staging.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MEMORY FLAT_BYTES

static struct test_device t;
static struct test_worker good; /* whose copies must work after everything */
static uint8_t good_ipc[64];
static struct ucm_copy_item items[FLAT_BLOCKS];

static int flat_open(struct test_worker *w, const uint8_t *ipc, struct device_region **out)
{
    struct ucm_error e = {0};
    int rc = region_open(&t, &layout_flat, w->pid, ipc, -1, 0, MEMORY, out, &e);

    if (rc < 0)
        printf("INFO  refused: %s\n", e.text);
    return rc;
}

/* A worker of its own, with a region. */
static bool worker_with_region(struct test_worker *w, struct device_region **out)
{
    worker_start(w);
    worker_do(w, WORKER_ALLOC_IPC, MEMORY, 0, 0);
    return CHECK(flat_open(w, w->reply.handle, out) == 0, "a region opens");
}

/* A dump of the good worker's memory works, bit for bit. */
static void still_sound(const char *after)
{
    struct device_region *r;
    struct test_job j;
    static uint64_t seed = 1000;

    random_bytes(good.shared, MEMORY, seed++);
    worker_do(&good, WORKER_WRITE, 0, 0, 0);
    if (!CHECK(flat_open(&good, good_ipc, &r) == 0, "after %s: a region opens", after))
        return;
    job_init(&j, DEVICE_DUMP, r, items, 32);
    CHECK(job_run(&t, &j) == 0 && memcmp(t.slots, good.shared, MEMORY) == 0,
          "after %s: others' copies are right", after);
    region_shut(&t, r);
}

static void dump_start(struct test_job *j, struct device_region *r, const uint8_t *event,
                       unsigned ms)
{
    job_init(j, DEVICE_DUMP, r, items, 32);
    j->job.event = event;
    j->job.deadline_ms = now_ms(&t) + ms;
    job_submit(&t, j);
}

/* ---- handles ---- */

static void test_forged(void)
{
    struct device_region *r;
    uint8_t ipc[64];

    t.proves_nothing = true;
    CHECK(flat_open(&good, good_ipc, &r) == -EINVAL, "a handle without its proof is refused");
    random_bytes(ipc, sizeof(ipc), 7);
    CHECK(flat_open(&good, ipc, &r) == -EINVAL, "random bytes are refused");
    memset(ipc, 0, sizeof(ipc));
    CHECK(flat_open(&good, ipc, &r) == -EINVAL, "zero bytes are refused");
    for (unsigned i = 0; i < 64; i += 9) {
        memcpy(ipc, good_ipc, sizeof(ipc));
        ipc[i] ^= 0x55;
        CHECK(flat_open(&good, ipc, &r) < 0, "nor does it open with byte %u changed", i);
    }
    t.proves_nothing = false;
    still_sound("forged handles");
}

static void test_sizes(void)
{
    struct device_region *r;
    struct ucm_error e = {0};
    int fd;

    CHECK(region_open(&t, &layout_flat, good.pid, good_ipc, -1, 0, 4096 * MIB, &r, &e) == -EINVAL,
          "more bytes than the allocation has are refused: %s", e.text);
    CHECK(region_open(&t, &layout_flat, good.pid, good_ipc, -1, 4 * MIB, MEMORY, &r, &e) == -EINVAL,
          "an offset past the allocation is refused: %s", e.text);
    fd = memfd_create("no", MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, 64 * MIB) == 0 &&
              region_open(&t, &layout_flat, good.pid, NULL, fd, 0, MEMORY, &r, &e) == -EINVAL,
          "a memfd is no CUDA memory: %s", e.text);
    close(fd);
    still_sound("wrong sizes and descriptors");
}

static void test_vmm(void)
{
    struct test_layout half = layout_flat;
    struct device_region *r;
    struct ucm_error e = {0};
    struct test_worker w;

    worker_start(&w);
    worker_do(&w, WORKER_ALLOC_VMM, MEMORY, 0, 0);
    CHECK(region_open(&t, &layout_flat, w.pid, NULL, w.fd, 0, MEMORY, &r, &e) == 0,
          "VMM memory opens: %s", e.text);
    region_shut(&t, r);
    if (region_open(&t, &layout_flat, w.pid, NULL, w.fd, 0, MEMORY + MIB, &r, &e) == 0)
        CHECK(false, "a little more than the allocation is mapped");
    else
        printf("INFO  %s\n", e.text);
    half.blocks = 16;
    CHECK(region_open(&t, &half, w.pid, NULL, w.fd, 0, MEMORY / 2, &r, &e) == -EINVAL,
          "a part of a VMM allocation is refused: %s", e.text);
    CHECK(region_open(&t, &layout_flat, w.pid, NULL, w.fd, 0, 4 * MEMORY, &r, &e) == -EINVAL,
          "more bytes than the VMM allocation has are refused: %s", e.text);
    CHECK(region_open(&t, &layout_flat, w.pid, NULL, w.fd, 0, 1ull << 46, &r, &e) == -EINVAL,
          "absurdly many bytes are refused: %s", e.text);
    worker_kill(&w);
}

static void test_stale(void)
{
    struct device_region *r;
    struct test_worker w;
    uint8_t dead[64];

    worker_start(&w);
    worker_do(&w, WORKER_ALLOC_IPC, MEMORY, 0, 0);
    memcpy(dead, w.reply.handle, 64);
    worker_kill(&w);
    CHECK(flat_open(&w, dead, &r) == -EINVAL, "a dead worker's handle is refused");
    still_sound("stale handles");
}

/* A new worker whose memory lies where a dead one's lay, with the dead one's region still open. */
static void test_restarted(void)
{
    struct device_region *old, *r;
    struct test_worker w;
    struct test_job j;

    if (!worker_with_region(&w, &old))
        return;
    random_bytes(w.shared, MEMORY, 20);
    worker_do(&w, WORKER_WRITE, 0, 0, 0);
    worker_kill(&w);
    if (worker_with_region(&w, &r)) {
        random_bytes(w.shared, MEMORY, 21);
        worker_do(&w, WORKER_WRITE, 0, 0, 0);
        memset(t.slots, 0, MEMORY);
        job_init(&j, DEVICE_DUMP, r, items, 32);
        CHECK(job_run(&t, &j) == 0 && memcmp(t.slots, w.shared, MEMORY) == 0,
              "and its dump stores its own bytes, not those of before");
        region_shut(&t, r);
    }
    region_shut(&t, old);
    worker_kill(&w);
    still_sound("a restarted worker");
}

static void test_shared(void)
{
    struct device_region *r, *other;
    struct test_worker w;
    uint8_t ipc[64];

    CHECK(flat_open(&good, good_ipc, &r) == 0, "one handle opens");
    CHECK(flat_open(&good, good_ipc, &other) == 0, "and again for a second region");
    region_shut(&t, r);
    r = other;
    worker_start(&w);
    CHECK(flat_open(&w, good_ipc, &other) == -EBUSY, "but not for another process");
    memcpy(ipc, good_ipc, sizeof(ipc));
    ipc[63] ^= 1;
    CHECK(flat_open(&w, ipc, &other) < 0, "nor with a byte changed that the driver ignores");
    worker_kill(&w);
    region_shut(&t, r);
    still_sound("handles that are shared");
}

/* ---- jobs ---- */

static void test_jobs(struct device_region *r)
{
    struct ucm_copy_item bad = items[0];
    uint8_t event[64], elsewhere[64];
    struct test_job j;

    bad.block = 32;
    job_init(&j, DEVICE_LOAD, r, &bad, 1);
    CHECK(job_run(&t, &j) == -EINVAL, "a block id out of range is refused: %s", j.job.error.text);
    bad.block = 0;
    bad.slot = (uint64_t)(uintptr_t)elsewhere;
    job_init(&j, DEVICE_DUMP, r, &bad, 1);
    CHECK(job_run(&t, &j) == -EINVAL, "a slot outside of the arena is refused: %s",
          j.job.error.text);
    bad.slot = (uint64_t)(uintptr_t)t.slots + t.slots_bytes - MIB / 2;
    job_init(&j, DEVICE_DUMP, r, &bad, 1);
    CHECK(job_run(&t, &j) == -EINVAL, "a slot past the arena's end is refused: %s",
          j.job.error.text);
    job_init(&j, DEVICE_DUMP, r, items, 1);
    j.job.first_plane = 1;
    CHECK(job_run(&t, &j) == -EINVAL, "a plane out of range is refused: %s", j.job.error.text);
    job_init(&j, DEVICE_DUMP, r, items, 32);
    j.job.deadline_ms = now_ms(&t) - 1;
    CHECK(job_run(&t, &j) == -ETIMEDOUT, "a late copy does not begin: %s", j.job.error.text);
    random_bytes(event, sizeof(event), 9);
    dump_start(&j, r, event, 1000);
    CHECK(job_wait(&t, &j) == -EINVAL, "a forged event is refused: %s", j.job.error.text);
    dump_start(&j, r, good_ipc, 1000);
    CHECK(job_wait(&t, &j) == -EINVAL, "a memory handle is no event: %s", j.job.error.text);
    still_sound("refused jobs");
}

/* ---- events ---- */

static void test_event_never(struct test_worker *w, struct device_region *r)
{
    struct test_job never, many[100], j;
    uint64_t begin = uv_hrtime(), worst = 0;
    uint8_t event[64];
    unsigned bad = 0;

    worker_do(w, WORKER_EVENT_NEVER, 0, 0, 0);
    memcpy(event, w->reply.handle, 64);
    dump_start(&never, r, event, 1500);
    for (unsigned i = 0; i < 100; i++)
        dump_start(&many[i], r, event, 500 + i);
    loop_for(&t, 50);
    for (unsigned i = 0; i < 20; i++) {
        uint64_t start = uv_hrtime();

        job_init(&j, i % 2 ? DEVICE_DUMP : DEVICE_LOAD, r, items + i, 1);
        if (job_run(&t, &j) != 0)
            printf("INFO  copy %u: %s\n", i, j.job.error.text);
        bad += j.status != 0;
        worst = uv_hrtime() - start > worst ? uv_hrtime() - start : worst;
    }
    CHECK(bad == 0 && !never.done,
          "others go on alongside an event that never comes (worst %.2f ms)", (double)worst / 1e6);
    for (unsigned i = 0; i < 100; i++)
        bad += job_wait(&t, &many[i]) != -ETIMEDOUT;
    CHECK(bad == 0, "100 dumps after it end at their deadlines");
    bad += job_wait(&t, &never) != -ETIMEDOUT;
    CHECK(bad == 0, "the last one too, after %.0f ms: %s", (double)(uv_hrtime() - begin) / 1e6,
          never.job.error.text);
    worker_do(w, WORKER_RELEASE, 0, 0, 0);
    dump_start(&j, r, event, 1000);
    CHECK(job_wait(&t, &j) == 0 && memcmp(t.slots, w->shared, MEMORY) == 0,
          "when it comes after all, the next dump is right");
}

/* The worker is stopped, its GPU work is not. */
static void test_stopped(struct test_worker *w, struct device_region *r)
{
    struct test_job j;

    random_bytes(w->shared, MEMORY, 12);
    worker_do(w, WORKER_EVENT, 0, 0, 300);
    kill(w->pid, SIGSTOP);
    dump_start(&j, r, w->reply.handle, 5000);
    CHECK(job_wait(&t, &j) == 0 && memcmp(t.slots, w->shared, MEMORY) == 0,
          "a stopped worker's dump is right: %s", j.job.error.text);
    kill(w->pid, SIGCONT);
}

/* Killed at various times with its event pending: nothing may be reported as stored. */
static void test_killed(void)
{
    static const unsigned delays[] = {0, 1, 5, 20, 100};
    unsigned reported = 0, n = 0;
    double worst_ms = 0;

    for (unsigned i = 0; i < sizeof(delays) / sizeof(delays[0]); i++) {
        struct device_region *r;
        struct test_worker w;
        struct test_job j, k;
        uint64_t begin;

        if (!worker_with_region(&w, &r))
            return;
        worker_do(&w, i % 2 ? WORKER_EVENT : WORKER_EVENT_NEVER, 0, 0, 60000);
        dump_start(&j, r, w.reply.handle, 20000);
        dump_start(&k, r, w.reply.handle, 20000);
        loop_for(&t, delays[i]);
        begin = uv_hrtime();
        kill(w.pid, SIGKILL);
        reported += job_wait(&t, &j) == 0;
        reported += job_wait(&t, &k) == 0;
        n += 2;
        region_shut(&t, r);
        if ((double)(uv_hrtime() - begin) / 1e6 > worst_ms)
            worst_ms = (double)(uv_hrtime() - begin) / 1e6;
        printf("INFO  killed after %u ms: %d, %s\n", delays[i], j.status, j.job.error.text);
        worker_kill(&w);
    }
    CHECK(worst_ms < 5000, "regions of killed workers are closed within %.0f ms", worst_ms);
    CHECK(reported == 0, "%u dumps of killed workers: none is reported as stored (%u were)", n,
          reported);
    still_sound("killed workers");
}

/* Loads into a worker that is killed meanwhile harm nobody. */
static void test_killed_loading(void)
{
    struct device_region *r;
    struct test_worker w;
    struct test_job j[40];

    if (!worker_with_region(&w, &r))
        return;
    for (unsigned i = 0; i < 40; i++) {
        job_init(&j[i], DEVICE_LOAD, r, items, 32);
        job_submit(&t, &j[i]);
    }
    loop_for(&t, 2);
    worker_kill(&w);
    for (unsigned i = 0; i < 40; i++)
        (void)job_wait(&t, &j[i]);
    region_shut(&t, r);
    CHECK(t.failures == 0, "a worker killed during loads: %s", j[39].job.error.text);
    still_sound("a worker killed during loads");
}

/* ---- entries ---- */

/* Does to the posted orders what the stopped worker's copy agent would have done. */
static unsigned turns_move(struct ucm_staging *ring, enum ucm_staging_phase to)
{
    unsigned posted = 0;

    for (uint32_t i = 0; i < UCM_MAX_STAGING_ENTRIES; i++) {
        uint64_t turn = atomic_load(&ring->words.entries[i].state);
        uint32_t tag = ucm_staging_tag_of(turn);

        if (ucm_staging_phase_of(turn) != STAGING_POSTED)
            continue;
        posted++;
        if (to == STAGING_POSTED ||
            !ucm_staging_move(ring, i, tag, STAGING_POSTED, STAGING_CLAIMED))
            continue;
        if (to == STAGING_DONE)
            (void)ucm_staging_move(ring, i, tag, STAGING_CLAIMED, STAGING_DONE);
    }
    return posted;
}

/* The worker is killed when its orders of a load and a dump are in that phase. Orders that it
 * claimed and can't have done fail. Unclaimed ones go another way. */
static void killed_in(enum ucm_staging_phase phase, const char *name)
{
    struct device_region *r;
    struct test_worker w;
    struct test_job j[2];
    unsigned turns;
    uint64_t begin;

    if (!worker_with_region(&w, &r) || !CHECK(ring_words(&w), "a ring is there"))
        return;
    kill(w.pid, SIGSTOP);
    for (unsigned i = 0; i < 2; i++) {
        job_init(&j[i], i ? DEVICE_DUMP : DEVICE_LOAD, r, items, 32);
        job_submit(&t, &j[i]);
    }
    loop_for(&t, 5); /* none is revoked before 20 ms */
    turns = turns_move(ring_words(&w), phase);
    begin = uv_hrtime();
    worker_kill(&w);
    for (unsigned i = 0; i < 2; i++)
        (void)job_wait(&t, &j[i]);
    region_shut(&t, r);
    ring_shut(&t, &w);
    CHECK(turns >= 2 && uv_hrtime() - begin < 1000000000,
          "a worker killed when its turns were %s: its copies end within %.0f ms (%d, %d: %s)",
          name, (double)(uv_hrtime() - begin) / 1e6, j[0].status, j[1].status, j[0].job.error.text);
    CHECK(phase != STAGING_CLAIMED || (j[0].status == -EIO && j[1].status == -EIO),
          "what was claimed fails");
    CHECK(t.failures == 0, "and the context goes on");
}

static void test_killed_in_entries(void)
{
    killed_in(STAGING_POSTED, "posted");
    killed_in(STAGING_CLAIMED, "claimed");
    killed_in(STAGING_DONE, "done");
    still_sound("workers killed in their entries");
}

static void test_faulting_worker(void)
{
    struct device_region *r;
    struct test_worker w;
    struct test_job j;

    if (!worker_with_region(&w, &r))
        return;
    random_bytes(w.shared, MEMORY, 13);
    worker_do(&w, WORKER_EVENT_FAULT, 0, 0, 200);
    memset(t.slots, 0, MEMORY);
    dump_start(&j, r, w.reply.handle, 2000);
    (void)job_wait(&t, &j);
    CHECK(j.status != 0 || memcmp(t.slots, w.shared, MEMORY) == 0,
          "a worker whose kernel fails before the event: its dump ends with %d, %s", j.status,
          j.job.error.text);
    worker_kill(&w);
    region_shut(&t, r);
    still_sound("a worker's fault");
}

/* ---- memory of the dead ---- */

static uint64_t free_bytes(void)
{
    worker_do(&good, WORKER_FREE_BYTES, 0, 0, 0);
    return good.reply.value;
}

static void test_memory_freed(void)
{
    struct test_layout big = layout_flat;
    struct device_region *r;
    struct ucm_error e = {0};
    struct test_worker w;
    struct test_job j;
    uint64_t before = free_bytes(), begin;

    worker_start(&w);
    worker_do(&w, WORKER_ALLOC_IPC, 8192 * MIB, 0, 0);
    if (!CHECK(region_open(&t, &big, w.pid, w.reply.handle, -1, 0, 8192 * MIB, &r, &e) == 0,
               "a region of 8 GiB opens: %s", e.text))
        return;
    job_init(&j, DEVICE_LOAD, r, items, 32);
    CHECK(job_run(&t, &j) == 0, "and is copied into");
    worker_kill(&w);
    begin = uv_hrtime();
    region_shut(&t, r);
    while (free_bytes() + 64 * MIB < before && uv_hrtime() - begin < 5000000000ull)
        usleep(10000);
    CHECK(free_bytes() + 64 * MIB >= before, "a killed worker's GPU memory is free after %.0f ms",
          (double)(uv_hrtime() - begin) / 1e6);
}

/* ---- a lost context ---- */

/* A region with a plane at an unmapped address, which no check would allow. For the kernel only,
 * because the engines would take the address for host memory. */
static struct device_region *wild_open(void)
{
    struct test_layout wild = layout_flat;
    struct device_region *bad;
    struct test_proof proof;
    struct test_job j;

    wild.n_planes = wild.layers = 2;
    wild.layer_bytes = 4096;
    wild.planes[0] = (struct msg_plane){0, 0, 4096, 4096, 0};
    wild.planes[1] = (struct msg_plane){0, MIB, 4096, 4096, 1};
    if (region_make(&t, &wild, good.pid, good_ipc, -1, 0, MEMORY, &bad) < 0)
        return NULL;
    bad->planes[1].base = 1ull << 45;
    job_init(&j, DEVICE_OPEN, bad, NULL, 0);
    proof_write(&t, bad, &proof);
    CHECK(job_run(&t, &j) == 0, "a region with a wild plane opens");
    proof_undo(&t, bad, &proof);
    return bad;
}

/* Jobs are under way when the context is lost. A wild address in one of our copies ends it, or a
 * kernel of this process that traps. All jobs end. */
static void test_lost(bool by_kernel)
{
    struct device_region *r, *s, *bad = by_kernel ? wild_open() : NULL;
    struct test_job jobs[20], j;
    struct device_stats stats;
    unsigned wrong = 0;

    if (!CHECK(flat_open(&good, good_ipc, &s) == 0, "a region for the last test opens") ||
        (by_kernel && !bad))
        return;
    for (unsigned i = 0; i < 20; i++) {
        job_init(&jobs[i], i % 2 ? DEVICE_DUMP : DEVICE_LOAD, i == 10 && bad ? bad : s, items, 32);
        job_submit(&t, &jobs[i]);
        if (i == 10 && !bad)
            CHECK(worker_trap() == 0, "a kernel traps");
    }
    for (unsigned i = 0; i < 20; i++)
        wrong += job_wait(&t, &jobs[i]) != 0;
    loop_for(&t, 20);
    job_init(&j, DEVICE_LOAD, s, items, 32);
    CHECK(job_run(&t, &j) == -EIO, "later copies fail: %s", j.job.error.text);
    CHECK(t.failures == 1 && wrong > 0, "the context is lost, and that is reported once: %s",
          t.why);
    CHECK(!bad || jobs[10].status == -EIO, "the wild copy failed");
    printf("INFO  %u of 20 copies failed with it\n", wrong);
    CHECK(flat_open(&good, good_ipc, &r) == -EIO && t.failures == 1, "later regions are refused");
    t.gpu->ops->stats(t.gpu, &stats);
    CHECK(stats.failed, "stats say that the device failed");
    region_shut(&t, s);
    if (bad)
        region_shut(&t, bad);
}

int main(int argc, char **argv)
{
    const char *strategy = getenv("UCM_TEST_STRATEGY");
    struct device_region *r;

    harness_main(argc, argv);
    device_start(&t, 64 * MIB);
    flat_items(&t, 0, items);
    worker_start(&good);
    CHECK(worker_do(&good, WORKER_ALLOC_IPC, MEMORY, 0, 0), "worker allocates");
    memcpy(good_ipc, good.reply.handle, 64);
    still_sound("the start");
    test_forged();
    test_sizes();
    test_vmm();
    test_stale();
    test_restarted();
    test_shared();
    if (CHECK(flat_open(&good, good_ipc, &r) == 0, "a region opens")) {
        test_jobs(r);
        test_event_never(&good, r);
        test_stopped(&good, r);
        region_shut(&t, r);
    }
    test_killed();
    test_killed_loading();
    if (strategy && strcmp(strategy, "staged") == 0)
        test_killed_in_entries();
    test_faulting_worker();
    test_memory_freed();
    test_lost(strategy && strcmp(strategy, "sm") == 0);
    worker_kill(&good);
    device_stop(&t);
    return tally();
}
