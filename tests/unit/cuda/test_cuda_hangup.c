/* Workers that hang up, or lose their GPU, while their copies are under way. The daemon writes
 * nothing to memory that they may have put to other use, and stores nothing from it. Copies that
 * wait delay nobody else's. */
/* Sanitizers: thread */
#include "tests/unit/cuda/cuda_rig.h"

#include <sys/socket.h>

static struct worker_side w, other;
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
    if (!set)
        return; /* the test did it */
    worker_end(&other);
    worker_end(&w);
    daemon_end();
    close(connection[0]);
}

TestSuite(cuda_hangup, .fini = end, .timeout = 60);

/* As the client library does it. */
static void hang_up(void)
{
    cr_assert_eq(shutdown(connection[1], SHUT_RDWR), 0);
    close(connection[1]);
}

static void expect_given_up(struct test_job *j)
{
    job_fails(j, -ECANCELED, "hung up");
}

/* By engines, by kernels, and through entries. */
Test(cuda_hangup, nothing_is_copied)
{
    static const enum copy_strategy strategies[] = {COPY_DMA, COPY_SM, COPY_STAGED};
    static struct test_job j[2];
    static uint8_t before[BLOCKS * 8192];

    for (unsigned k = 0; k < 3; k++) {
        begin(strategies[k]);
        if (strategies[k] == COPY_STAGED)
            worker_copy_agent(&w, 65536, 4);
        bytes_random((void *)(uintptr_t)w.memory, w.bytes, 6);
        memcpy(before, (void *)(uintptr_t)w.memory, w.bytes);
        hang_up();
        copy_half(&j[0], &w, DEVICE_LOAD);
        copy_half(&j[1], &w, DEVICE_DUMP);
        for (unsigned i = 0; i < 2; i++)
            job_submit(&j[i], gpu);
        for (unsigned i = 0; i < 2; i++)
            expect_given_up(&j[i]);
        cr_expect_eq(memcmp(before, (void *)(uintptr_t)w.memory, w.bytes), 0, "strategy %u", k);
        end();
    }
}

/* The fragment of a revoked order goes straight, but not to a worker that is gone. */
Test(cuda_hangup, what_is_revoked_goes_nowhere)
{
    static const uint8_t zeros[BLOCKS * 8192];
    static struct test_job j;

    begin(COPY_STAGED);
    worker_ring(&w, getpid(), MIB, 4);
    half_submit(&j, &w, DEVICE_LOAD);
    orders_await(&w, STAGING_POSTED, -1);
    hang_up();
    (void)job_wait_passing(&j);
    expect_given_up(&j);
    cr_expect_eq(memcmp(zeros, (void *)(uintptr_t)w.memory, w.bytes), 0);
}

/* Otherwise the region could not be closed before the deadline. */
Test(cuda_hangup, its_event_is_not_waited_for)
{
    static struct test_job j;
    struct worker_event event;

    begin(COPY_AUTO);
    copy_half_behind(&j, &w, DEVICE_DUMP, &event, false, 3600000);
    loop_for(20);
    hang_up();
    (void)job_wait_passing(&j);
    expect_given_up(&j);
    cr_assert_eq(cuEventDestroy(event.event), CUDA_SUCCESS);
}

/* ---- claimed orders ---- */

/* The copy agent has claimed an order of this copy. Its kernel does not begin yet. The clock stands
 * still, so the copy agent is never too late. */
static void begin_claimed(struct test_job *j, enum device_op op)
{
    worker_copy_agent(&w, MIB, 4);
    fake_cuda.hold = true;
    half_submit(j, &w, op);
    while (orders_in(&w, STAGING_CLAIMED, -1) == 0 || !fake_cuda.holds)
        uv_run(&loop, UV_RUN_NOWAIT);
}

Test(cuda_hangup, what_is_gathered_afterwards_is_not_stored)
{
    static struct test_job j;

    begin(COPY_STAGED);
    begin_claimed(&j, DEVICE_DUMP);
    hang_up();
    fake_cuda.hold = false;
    expect_given_up(&j);
}

/* The kernel runs in the worker, whose own context is fine: the copy ends when the kernel does. */
Test(cuda_hangup, a_lost_context_waits_for_what_copy_agents_claimed)
{
    static struct test_job j, k;

    begin(COPY_STAGED);
    worker_begin(&other, getpid(), 2, 4096, 0);
    begin_claimed(&j, DEVICE_LOAD);
    fake_cuda.lost = CUDA_ERROR_LAUNCH_FAILED;
    half_submit(&k, &other, DEVICE_LOAD);
    cr_expect_eq(job_wait(&k), -EIO);
    loop_for(20);
    cr_expect(!j.done, "its kernel may still write");
    fake_cuda.hold = false;
    cr_expect_eq(job_wait(&j), -EIO, "%s", j.job.error.text);
    cr_expect_eq(orders_in(&w, STAGING_CLAIMED, -1), 0);
    fake_cuda.lost = CUDA_SUCCESS;
}

/* ---- others ---- */

#define MANY 40u

Test(cuda_hangup, copies_that_wait_for_entries_hold_up_nobody)
{
    static struct test_job many[MANY], one;

    begin(COPY_STAGED);
    worker_begin(&other, getpid(), 2, 4096, 0);
    worker_copy_agent(&w, 65536, 4);
    fake_cuda.hold = true;
    for (unsigned i = 0; i < MANY; i++) {
        copy_init(&many[i], &w, DEVICE_LOAD);
        copy_add(&many[i], &w, i, i);
        job_submit(&many[i], gpu);
    }
    half_run(&one, &other, DEVICE_LOAD);
    for (unsigned i = 0; i < MANY; i++)
        cr_expect_not(many[i].done);
    fake_cuda.hold = false;
    for (unsigned i = 0; i < MANY; i++)
        cr_assert_eq(job_wait(&many[i]), 0, "%s", many[i].job.error.text);
    hang_up();
}
