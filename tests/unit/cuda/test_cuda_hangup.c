/* Workers that hang up, or lose their GPU, while their copies are under way. The daemon writes nothing
 * to memory that they may use for something else, and stores nothing of it. Copies that wait delay
 * nobody else's. */
/* Sanitizers: thread */
#include "tests/unit/cuda/cuda_rig.h"

#include <sys/socket.h>

static struct worker_side w;
static int connection[2]; /* the daemon's end, the worker's */

static void begin(enum copy_strategy strategy)
{
    daemon_begin(strategy, 6 * MIB);
    worker_begin(&w, getpid(), 2, 4096, 0);
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, connection), 0);
    w.region->peer_fd = &connection[0];
    bytes_random(slots, BLOCKS * w.slot_bytes, 5);
}

static void end(void)
{
    worker_end(&w);
    daemon_end();
    close(connection[0]);
    cr_assert_eq(fake_cuda_left(), 0);
}

/* As the client library does it. */
static void hang_up(void)
{
    cr_assert_eq(shutdown(connection[1], SHUT_RDWR), 0);
    close(connection[1]);
}

static void expect_given_up(struct test_job *j)
{
    cr_expect_eq(job_wait(j), -ECANCELED, "%d: %s", j->status, j->job.error.text);
    cr_expect(strstr(j->job.error.text, "hung up"), "%s", j->job.error.text);
}

static void nothing_is_copied(enum copy_strategy strategy)
{
    static struct test_job j[2];
    static uint8_t before[BLOCKS * 8192];

    begin(strategy);
    if (strategy == COPY_STAGED)
        worker_companion(&w, 65536, 4);
    bytes_random((void *)(uintptr_t)w.memory, w.bytes, 6);
    memcpy(before, (void *)(uintptr_t)w.memory, w.bytes);
    hang_up();
    copy_half(&j[0], &w, DEVICE_LOAD);
    copy_half(&j[1], &w, DEVICE_DUMP);
    for (unsigned i = 0; i < 2; i++)
        job_submit(&j[i], gpu);
    for (unsigned i = 0; i < 2; i++)
        expect_given_up(&j[i]);
    cr_expect_eq(memcmp(before, (void *)(uintptr_t)w.memory, w.bytes), 0);
    end();
}

Test(cuda_hangup, nothing_is_copied_by_engines, .timeout = 60)
{
    nothing_is_copied(COPY_DMA);
}

Test(cuda_hangup, nothing_is_copied_by_kernels, .timeout = 60)
{
    nothing_is_copied(COPY_SM);
}

Test(cuda_hangup, nothing_is_copied_through_slices, .timeout = 60)
{
    nothing_is_copied(COPY_STAGED);
}

static bool posted(const struct worker_side *of)
{
    return ucm_staging_phase_of(atomic_load(&of->shared->words.slices[0].state)) == STAGING_POSTED;
}

/* A revoked order's piece goes straight, but not to a worker that is gone. */
Test(cuda_hangup, what_is_revoked_goes_nowhere, .timeout = 60)
{
    static const uint8_t zeros[BLOCKS * 8192];
    static struct test_job j;

    begin(COPY_STAGED);
    worker_ring(&w, getpid(), MIB, 4);
    copy_half(&j, &w, DEVICE_LOAD);
    job_submit(&j, gpu);
    while (!posted(&w))
        uv_run(&loop, UV_RUN_NOWAIT);
    hang_up();
    (void)job_wait_passing(&j);
    expect_given_up(&j);
    cr_expect_eq(memcmp(zeros, (void *)(uintptr_t)w.memory, w.bytes), 0);
    end();
}

/* Otherwise the region could not be closed before the deadline. */
Test(cuda_hangup, its_event_is_not_waited_for, .timeout = 60)
{
    static struct test_job j;
    uint8_t handle[64];
    CUevent event;

    begin(COPY_AUTO);
    cr_assert_eq(cuEventCreate(&event, 0), CUDA_SUCCESS);
    fake_cuda_event_signal(event, false);
    fake_cuda_event_handle(event, handle);
    copy_half(&j, &w, DEVICE_DUMP);
    j.job.event = handle;
    j.job.deadline_ms = fake_clock_ms() + 3600000;
    job_submit(&j, gpu);
    loop_for(20);
    hang_up();
    (void)job_wait_passing(&j);
    expect_given_up(&j);
    cr_assert_eq(cuEventDestroy(event), CUDA_SUCCESS);
    end();
}

/* ---- claimed orders ---- */

static bool claimed(const struct worker_side *of)
{
    for (uint32_t i = 0; i < UCM_MAX_SLICES; i++)
        if (ucm_staging_phase_of(atomic_load(&of->shared->words.slices[i].state)) ==
            STAGING_CLAIMED)
            return true;
    return false;
}

/* A copy of which the companion has claimed an order; its kernel does not begin yet. The clock
 * stands still, so the companion is never too late. */
static void begin_claimed(struct test_job *j, enum device_op op)
{
    worker_companion(&w, MIB, 4);
    fake_cuda_hold(true);
    copy_half(j, &w, op);
    job_submit(j, gpu);
    while (!claimed(&w) || !fake_cuda_holds())
        uv_run(&loop, UV_RUN_NOWAIT);
}

Test(cuda_hangup, what_is_gathered_afterwards_is_not_stored, .timeout = 60)
{
    static struct test_job j;

    begin(COPY_STAGED);
    begin_claimed(&j, DEVICE_DUMP);
    hang_up();
    fake_cuda_hold(false);
    expect_given_up(&j);
    end();
}

/* The kernel runs in the worker, whose own context is fine: the copy ends when the kernel does. */
Test(cuda_hangup, a_lost_context_waits_for_what_companions_claimed, .timeout = 60)
{
    static struct worker_side other;
    static struct test_job j, k;

    begin(COPY_STAGED);
    worker_begin(&other, getpid(), 2, 4096, 0);
    begin_claimed(&j, DEVICE_LOAD);
    fake_cuda_lose(CUDA_ERROR_LAUNCH_FAILED);
    copy_half(&k, &other, DEVICE_LOAD);
    job_submit(&k, gpu);
    cr_expect_eq(job_wait(&k), -EIO);
    loop_for(20);
    cr_expect(!j.done, "its kernel may still write");
    fake_cuda_hold(false);
    cr_expect_eq(job_wait(&j), -EIO, "%s", j.job.error.text);
    cr_expect(!claimed(&w));
    fake_cuda_lose(CUDA_SUCCESS);
    worker_end(&other);
    end();
}

/* ---- others ---- */

#define MANY 40u

Test(cuda_hangup, copies_that_wait_for_slices_hold_up_nobody, .timeout = 60)
{
    static struct worker_side other;
    static struct test_job many[MANY], one;

    begin(COPY_STAGED);
    worker_begin(&other, getpid(), 2, 4096, 0);
    worker_companion(&w, 65536, 4);
    fake_cuda_hold(true);
    for (unsigned i = 0; i < MANY; i++) {
        copy_init(&many[i], &w, DEVICE_LOAD);
        copy_add(&many[i], &w, i, i);
        job_submit(&many[i], gpu);
    }
    copy_half(&one, &other, DEVICE_LOAD);
    job_submit(&one, gpu);
    cr_assert_eq(job_wait(&one), 0, "%s", one.job.error.text);
    for (unsigned i = 0; i < MANY; i++)
        cr_expect_not(many[i].done);
    fake_cuda_hold(false);
    for (unsigned i = 0; i < MANY; i++)
        cr_assert_eq(job_wait(&many[i]), 0, "%s", many[i].job.error.text);
    worker_end(&other);
    end();
    hang_up();
}
