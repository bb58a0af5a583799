/* Workers that break the rules of a staging ring, die with its orders, or register memory of
 * others. Their copies end in time, well or with a sentence. Others' copies are right, and nothing
 * is left over. */
/* Sanitizers: thread */
#include "tests/unit/cuda/cuda_rig.h"

#include "daemon/cuda/api.h"

static struct worker_side bad, good;
static struct ucm_error e;

/* the good worker's first slot: copies of the bad one may still be under way */
#define GOOD_SLOT 256u

/* Whatever the bad worker did, the good one's dump is right. */
static void still_sound(void)
{
    static struct test_job j;
    uint8_t *first = slots + GOOD_SLOT * good.slot_bytes;

    bytes_random((void *)(uintptr_t)good.memory, good.bytes, uv_hrtime());
    memset(first, 0, BLOCKS * good.slot_bytes);
    copy_init(&j, &good, DEVICE_DUMP);
    for (uint32_t n = 0; n < BLOCKS; n++)
        copy_add(&j, &good, GOOD_SLOT + n, n);
    job_run(&j);
    for (uint32_t n = 0; n < BLOCKS; n++)
        cr_assert_eq(memcmp(first + n * good.slot_bytes,
                            (uint8_t *)(uintptr_t)good.memory + n * (uint64_t)good.fragment,
                            good.fragment),
                     0);
}

static void begin(void)
{
    daemon_begin(COPY_STAGED, 6 * MIB);
    worker_begin(&good, getpid(), 2, 4096, 0);
}

static void end(void)
{
    worker_end(&bad);
    still_sound();
    worker_end(&good);
    daemon_end();
    cr_assert_eq(failures, 0);
}

TestSuite(cuda_faults, .init = begin, .fini = end, .timeout = 60);

/* Its ring is served by nobody. */
static void bad_begin(pid_t pid)
{
    worker_begin(&bad, pid, 2, 4096, 0);
    worker_ring(&bad, pid, 65536, 4);
}

static void bad_begin_served(void)
{
    worker_begin(&bad, getpid(), 2, 4096, 0);
    worker_copy_agent(&bad, 65536, 4);
}

/* A region of the bad worker that is not open. The test frees it, unless it opens it. */
static void bad_region(int ordinal)
{
    bad = (struct worker_side){.n_planes = 0};
    worker_memory(&bad, ordinal, 2, 4096, 0);
    bad.region = region_of(&bad, gpu, getpid(), 0);
}

static void bad_region_free(void)
{
    region_free(bad.region);
    bad.region = NULL;
    cr_assert_eq(cuMemFree(bad.memory), CUDA_SUCCESS);
}

/* ---- orders ---- */

/* Begins a load and a dump, and moves an order of each. The clock stands still: none is revoked. */
static void copies_begin(struct test_job j[2], enum ucm_staging_phase to)
{
    for (unsigned i = 0; i < 2; i++)
        half_submit(&j[i], &bad, i ? DEVICE_DUMP : DEVICE_LOAD);
    for (int direction = 0; direction < 2; direction++)
        orders_await(&bad, STAGING_POSTED, direction);
    orders_move(&bad, to);
}

Test(cuda_faults, nobody_serves_the_ring)
{
    static struct test_job j;

    bad_begin(getpid());
    bytes_random(slots, BLOCKS * bad.slot_bytes, 9);
    half_submit(&j, &bad, DEVICE_LOAD);
    orders_await(&bad, STAGING_POSTED, -1);
    loop_for(5);
    cr_assert_not(j.done, "the copy agent has 20 ms");
    cr_assert_eq(job_wait_passing(&j), 0, "%s", j.job.error.text);
    cr_assert_eq(memcmp((uint8_t *)(uintptr_t)bad.memory + 4096, slots + bad.slot_bytes, 4096), 0,
                 "it went straight");
}

Test(cuda_faults, died_with_orders_that_are_claimed_or_refused)
{
    static const enum ucm_staging_phase phases[] = {STAGING_CLAIMED, STAGING_REFUSED};
    static struct test_job j[2];

    for (unsigned k = 0; k < 2; k++) {
        pid_t pid = child_begin(NULL, NULL);

        bad_begin(pid);
        copies_begin(j, phases[k]);
        child_end(pid);
        for (unsigned i = 0; i < 2; i++) {
            (void)job_wait_passing(&j[i]);
            if (phases[k] == STAGING_CLAIMED)
                job_fails(&j[i], -EIO, "died");
        }
        still_sound();
        worker_end(&bad);
    }
}

Test(cuda_faults, claims_and_does_nothing)
{
    static struct test_job j[2], k;
    uint64_t begin_ms;

    bad_begin(getpid());
    begin_ms = fake_clock_ms();
    copies_begin(j, STAGING_CLAIMED);
    half_submit(&k, &bad, DEVICE_LOAD);
    cr_assert_eq(job_wait_passing(&k), 0, "new copies go straight");
    still_sound();
    cr_assert(!j[0].done && !j[1].done && fake_clock_ms() < begin_ms + 5000);
    for (unsigned i = 0; i < 2; i++)
        cr_assert(job_wait_passing(&j[i]) == -EIO && strstr(j[i].job.error.text, "claimed"), "%s",
                  j[i].job.error.text);
    cr_assert_geq(fake_clock_ms(), begin_ms + 5000);
    cr_assert_eq(atomic_load(&bad.shared->words.dead), 1, "the ring has ended");
}

Test(cuda_faults, an_abandoned_ring_fails_its_copies)
{
    static struct test_job j[2];
    unsigned failed = 0;

    bad_begin(getpid());
    copies_begin(j, STAGING_REVOKED);
    for (unsigned i = 0; i < 2; i++) {
        cr_assert(job_wait(&j[i]) == 0 ||
                      (j[i].status == -EIO && strstr(j[i].job.error.text, "abandoned")),
                  "%s", j[i].job.error.text);
        failed += j[i].status != 0;
    }
    cr_assert_gt(failed, 0, "the daemon revokes the other orders once it has seen the first");
}

/* The copy agent's kernel runs, and no event shows its end. The copy agent must not refuse the
 * order before the kernel has ended. Otherwise the kernel would write to an entry of another order.
 */
Test(cuda_faults, a_kernel_that_can_not_be_followed_has_ended)
{
    static struct test_job j;
    uint8_t *page;

    bad_begin_served();
    page = (uint8_t *)(uintptr_t)bad.memory;
    bytes_random(slots, BLOCKS * bad.slot_bytes, 9);
    fake_cuda.hold = true;
    fake_cuda.bad_records = 8;
    half_submit(&j, &bad, DEVICE_LOAD);
    loop_for(100);
    cr_assert_not(j.done, "its kernels have not begun");
    fake_cuda.hold = false;
    cr_assert_eq(job_wait(&j), 0, "%s", j.job.error.text);
    for (uint32_t n = half_first(DEVICE_LOAD); n < BLOCKS; n += 2)
        cr_assert_eq(memcmp(page + n * 4096, slots + n * bad.slot_bytes, 4096), 0);
    memset(page, 0x5A, bad.bytes);
    cr_assert_eq(cuCtxSynchronize(), CUDA_SUCCESS);
    fake_cuda_fence();
    for (uint64_t i = 0; i < bad.bytes; i++)
        cr_assert_eq(page[i], 0x5A, "written after the answer");
    fake_cuda.bad_records = 0;
}

/* A process that writes anything anywhere in the shared memory, while copies go through it. */
static void scribble(struct ucm_staging *ring)
{
    volatile uint32_t *words = (volatile uint32_t *)(void *)ring;
    uint64_t x = 88172645463325252u;

    for (;;) {
        uint64_t r = next_random(&x);
        uint32_t entry = (uint32_t)(r >> 8) % UCM_MAX_STAGING_ENTRIES;

        if (r % 8 == 0)
            words[(r >> 16) % (sizeof(*ring) / 4)] = (uint32_t)(r >> 32);
        else if (r % 8 == 1)
            words[(r >> 16) % (UCM_STAGING_PAGE / 4)] = (uint32_t)(r >> 32);
        else /* what may happen, when it may not */
            (void)ucm_staging_move(
                ring, entry, ucm_staging_tag_of(atomic_load(&ring->words.entries[entry].state)),
                (enum ucm_staging_phase)((r >> 16) % 6), (enum ucm_staging_phase)((r >> 24) % 6));
    }
}

Test(cuda_faults, memory_that_changes_underneath)
{
    static struct test_job j[8];

    fake_cuda.delay_us = 20;
    for (unsigned round = 0; round < 2; round++) {
        uint8_t *guard = slots + BLOCKS * UINT64_C(65536);
        pid_t pid;

        memset(guard, 0xAB, 65536);
        worker_begin(&bad, getpid(), 4, 4096, 32);
        worker_ring(&bad, getpid(), 65536, 8);
        pid = child_begin(scribble, bad.shared);
        for (unsigned i = 0; i < 8; i++)
            half_submit(&j[i], &bad, i % 2 ? DEVICE_DUMP : DEVICE_LOAD);
        for (unsigned i = 0; i < 8; i++) {
            int rc = job_wait_passing(&j[i]);

            cr_assert(rc == 0 || rc == -EIO, "%d", rc);
        }
        for (uint32_t i = 0; i < 65536; i++)
            cr_assert_eq(guard[i], 0xAB);
        for (uint32_t n = 0; n < 4 * BLOCKS; n++)
            for (uint32_t i = 0; i < 32; i++)
                cr_assert_eq(((uint8_t *)(uintptr_t)bad.memory)[n * 4128 + 4096 + i], 0,
                             "between the blocks nothing is written");
        child_end(pid);
        still_sound();
        worker_end(&bad);
    }
}

/* ---- registrations ---- */

Test(cuda_faults, one_memory_has_one_ring_at_a_time)
{
    static struct test_job j[2];
    struct device_staging second;
    uint32_t generation;
    void *memory;

    bad_begin_served();
    generation = atomic_load(&bad.shared->words.generation);
    second = (struct device_staging){.pid = getpid(),
                                     .connection = bad.ring.connection + 1,
                                     .offset = bad.ring.offset,
                                     .entry_bytes = bad.ring.entry_bytes,
                                     .entries = bad.ring.entries};
    memcpy(second.ipc, bad.ring.ipc, sizeof(second.ipc));
    cr_assert_eq(ucm_shared_memory(sizeof(*bad.shared), &second.fd, &memory), 0);
    open_refused(NULL, &second, -EBUSY, "older connection");
    second.connection = bad.ring.connection;
    open_refused(NULL, &second, -EBUSY, "unregister it first");
    close(second.fd);
    munmap(memory, sizeof(*bad.shared));
    for (unsigned i = 0; i < 2; i++)
        half_submit(&j[i], &bad, i ? DEVICE_DUMP : DEVICE_LOAD);
    ring_close(&bad); /* after the copies */
    for (unsigned i = 0; i < 2; i++)
        cr_assert(j[i].done && j[i].status == 0);
    for (unsigned i = 0; i < 3; i++) {
        cr_assert_eq(ring_open(&bad, getpid(), &e), 0, "%s", e.text);
        copy_agent_serve(&bad.copy_agent, bad.shared);
        generation += atomic_load(&bad.shared->words.generation) == generation;
        half_run(&j[0], &bad, DEVICE_LOAD);
        ring_close(&bad);
    }
}

static void ring_refused(off_t bytes, off_t behind, int seals, const char *word)
{
    int fd = memfd_create("ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    bad.ring =
        (struct device_staging){.pid = getpid(), .entry_bytes = 65536, .entries = 2, .fd = fd};
    cr_assert_eq(fallocate(fd, 0, 0, bytes), 0);
    cr_assert(behind == 0 || fallocate(fd, FALLOC_FL_KEEP_SIZE, bytes, behind) == 0);
    cr_assert_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
    open_refused(NULL, &bad.ring, -EINVAL, word);
    close(fd);
}

/* Shared memory of another size, or one that a worker could change to block the GPU's thread. */
Test(cuda_faults, shared_memory_of_another_size_is_refused)
{
    const off_t bytes = sizeof(struct ucm_staging);

    worker_begin(&bad, getpid(), 2, 4096, 0);
    ring_refused(bytes, 0, 0, "F_SEAL_SHRINK");
    ring_refused(bytes, 0, F_SEAL_GROW, "F_SEAL_SHRINK");
    ring_refused(bytes, 0, F_SEAL_SHRINK, "F_SEAL_GROW");
    ring_refused(bytes - 4096, 0, F_SEAL_SHRINK | F_SEAL_GROW, "pass the memfd's");
    ring_refused(bytes + 1, 0, F_SEAL_SHRINK | F_SEAL_GROW, "must have 139264 bytes");
    ring_refused(bytes, 16 << 20, F_SEAL_SHRINK | F_SEAL_GROW, "no pages past its end");
}

static void bad_region_taken(void)
{
    cr_assert_eq(control(DEVICE_OPEN, bad.region, NULL, &e), 0, "%s", e.text);
}

static void begin_unlike(void)
{
    fake_cuda.handles_unlike = true; /* the daemon looks at handles of its own first */
    begin();
}

TestSuite(cuda_faults_unlike, .init = begin_unlike, .fini = end, .timeout = 60);

/* Handles with other fields, of an unknown driver, can't be checked. Only a worker that can write
 * to memory registers it by such a handle, too. A refused handle is closed again. */
Test(cuda_faults_unlike, handles_of_an_unknown_driver_are_taken)
{
    bad_region(0);
    bad_region_taken();
    cr_assert_eq(control(DEVICE_CLOSE, bad.region, NULL, &e), 0, "%s", e.text);
    unproven = true;
    cr_assert_eq(control(DEVICE_OPEN, bad.region, NULL, &e), -EINVAL);
    cr_assert(e.code == UCM_WIRE_DENIED && strstr(e.text, "region.challenge"), "%s", e.text);
    bad_region_free();
}

/* A worker that the daemon can't see gets no ring, and no access to another worker's memory. */
Test(cuda_faults, workers_that_are_not_visible_are_told_apart)
{
    struct device_region *again, *other;

    bad = (struct worker_side){.n_planes = 0};
    worker_memory(&bad, 0, 2, 4096, 0);
    bad.region = region_of(&bad, gpu, 0, 0);
    again = region_of(&bad, gpu, 0, 0);
    other = region_of(&bad, gpu, 0, 0);
    bad.region->connection = again->connection = 1;
    other->connection = 2;
    cr_assert_eq(control(DEVICE_OPEN, bad.region, NULL, &e), 0, "%s", e.text);
    cr_assert_eq(control(DEVICE_OPEN, again, NULL, &e), 0, "%s", e.text);
    open_refused(other, NULL, -EBUSY, "another process");
    cr_assert_eq(ring_open(&bad, 0, &e), -EINVAL);
    cr_assert(strstr(e.text, "can't be seen"), "%s", e.text);
    close(bad.ring.fd);
    munmap(bad.shared, sizeof(*bad.shared));
    bad.shared = NULL;
    cr_assert_eq(control(DEVICE_CLOSE, again, NULL, &e), 0);
    region_free(again);
    region_free(other);
}

Test(cuda_faults, memory_of_another_gpu_is_refused)
{
    bool owns = true;

    worker_copy_agent(&good, 65536, 2);
    bad_region(1);
    open_refused(bad.region, NULL, -EINVAL, "another GPU");
    cr_assert_eq(copy_agent_owns(&good.copy_agent, bad.memory, &owns), CUDA_SUCCESS);
    cr_assert_not(owns, "the copy agent knows it, too");
    cr_assert_eq(copy_agent_owns(&good.copy_agent, good.memory, &owns), CUDA_SUCCESS);
    cr_assert(owns);
    cr_assert_neq(copy_agent_owns(&good.copy_agent, 4096, &owns), CUDA_SUCCESS);
    bad_region_free();
}

/* ---- events ---- */

Test(cuda_faults, an_event_that_never_comes)
{
    static struct test_job j;
    struct worker_event event;

    copy_half_behind(&j, &good, DEVICE_DUMP, &event, false, 200);
    still_sound();
    fake_clock_pass(199);
    loop_for(5);
    cr_assert_not(j.done);
    fake_clock_pass(1);
    cr_assert_eq(job_wait(&j), -ETIMEDOUT, "%s", j.job.error.text);
    cr_assert_eq(cuEventDestroy(event.event), CUDA_SUCCESS);
}

/* A dying worker's events may read as signalled. */
Test(cuda_faults, an_event_of_a_dead_worker_says_nothing)
{
    static struct test_job j;
    struct worker_event event;
    pid_t pid;

    pid = child_begin(NULL, NULL);
    worker_begin(&bad, pid, 2, 4096, 0);
    copy_half_behind(&j, &bad, DEVICE_DUMP, &event, false, 20000);
    child_end(pid);
    fake_cuda_event_signal(event.event, true);
    job_fails(&j, -EIO, "exiting");
    cr_assert_eq(cuEventDestroy(event.event), CUDA_SUCCESS);
}

/* Its name could be that of another worker's event that has already come. */
Test(cuda_faults, an_event_of_a_foreign_worker_is_not_opened)
{
    static struct test_job j;
    struct worker_event event;

    worker_begin(&bad, 0, 2, 4096, 0);
    copy_half_behind(&j, &bad, DEVICE_DUMP, &event, true, 20000);
    job_fails(&j, -EINVAL, "wait for the event in the worker");
    half_run(&j, &bad, DEVICE_DUMP);
    cr_assert_eq(cuEventDestroy(event.event), CUDA_SUCCESS);
}

Test(cuda_faults, a_stranger_has_no_events)
{
    static struct test_job j;
    struct worker_event event;

    bad_region(0);
    bad.region->stranger = true;
    bad_region_taken();
    copy_half_behind(&j, &bad, DEVICE_DUMP, &event, true, 20000);
    job_fails(&j, -EINVAL, "another tenant");
    half_run(&j, &bad, DEVICE_DUMP);
    cr_assert_eq(cuEventDestroy(event.event), CUDA_SUCCESS);
}

/* The driver's answer when daemon and worker are process 1, each in a pid namespace of its own. */
static CUresult open_own_number(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    (void)out, (void)handle, (void)flags;
    return CUDA_ERROR_INVALID_CONTEXT;
}

Test(cuda_faults, a_handle_of_the_daemons_own_number_says_what_to_do)
{
    bad_region(0);
    cuda.cuIpcOpenMemHandle = open_own_number;
    open_refused(bad.region, NULL, -EINVAL, "hostPID");
    bad_region_free();
}

/* ---- a lost context ---- */

static void end_lost(void)
{
    worker_end(&good);
    daemon_end();
}

TestSuite(cuda_faults_lost, .init = begin, .fini = end_lost, .timeout = 60);

Test(cuda_faults_lost, a_lost_context_ends_every_copy)
{
    static struct test_job j[16], later;
    unsigned failed = 0;

    worker_copy_agent(&good, 65536, 4);
    fake_cuda.delay_us = 2000;
    for (unsigned i = 0; i < 16; i++)
        half_submit(&j[i], &good, i % 2 ? DEVICE_DUMP : DEVICE_LOAD);
    loop_for(5);
    fake_cuda.lost = CUDA_ERROR_LAUNCH_FAILED;
    for (unsigned i = 0; i < 16; i++)
        failed += job_wait(&j[i]) != 0;
    cr_assert_gt(failed, 0);
    half_submit(&later, &good, DEVICE_LOAD);
    job_fails(&later, -EIO, "restart");
    while (failures == 0)
        uv_run(&loop, UV_RUN_ONCE);
    loop_for(20);
    cr_assert_eq(failures, 1, "reported once");
    cr_assert_eq(atomic_load(&good.shared->words.dead), 1, "no copy agent begins anything more");
    fake_cuda.lost = CUDA_SUCCESS;
}
