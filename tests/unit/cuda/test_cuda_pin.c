/* The arena's memory, which each GPU's thread pins piece by piece. */
#include "daemon/cuda/gpu.h"
#include "tests/unit/cuda/cuda_rig.h"

static struct worker_side a, b;

static void worker_begin_on(struct worker_side *w, uint32_t number)
{
    struct ucm_error e = {0};

    *w = (struct worker_side){0};
    worker_memory(w, (int)number, 2, 4096, 0);
    w->region = region_of(w, device_set_at(set, 1 + number), getpid(), 0);
    cr_assert_eq(control(DEVICE_OPEN, w->region, NULL, &e), 0, "%s", e.text);
}

/* If two threads register the same memory at once, the driver may refuse both. */
Test(cuda_pin, one_gpu_after_the_other, .timeout = 60)
{
    static struct test_job j[2];

    daemon_begin(COPY_AUTO, 1 * MIB);
    fake_cuda.register_together = true;
    worker_begin_on(&a, 0);
    worker_begin_on(&b, 1);
    copy_half(&j[0], &a, DEVICE_LOAD);
    copy_half(&j[1], &b, DEVICE_LOAD);
    job_submit(&j[0], a.region->device);
    job_submit(&j[1], b.region->device);
    for (unsigned i = 0; i < 2; i++)
        cr_assert_eq(job_wait(&j[i]), 0, "%s", j[i].job.error.text);
    cr_assert_not(fake_cuda.registered_together);
    worker_end(&a);
    worker_end(&b);
    daemon_end();
}

Test(cuda_pin, what_could_not_be_pinned_is_tried_again, .timeout = 60)
{
    static struct test_job j;

    daemon_begin(COPY_AUTO, 1 * MIB);
    fake_cuda.refuse_registrations = true;
    worker_begin_on(&a, 0);
    for (unsigned i = 0; i < 2; i++) { /* each job gets the reason */
        half_submit(&j, &a, DEVICE_LOAD);
        cr_assert_eq(job_wait(&j), -EIO);
        cr_assert(strstr(j.job.error.text, "can't be pinned: ") && strlen(j.job.error.text) > 30,
                  "%s", j.job.error.text);
    }
    fake_cuda.refuse_registrations = false;
    fake_clock_pass(2000);
    half_run(&j, &a, DEVICE_LOAD);
    worker_end(&a);
    daemon_end();
}

/* To pin a large arena takes a minute. */
Test(cuda_pin, nothing_more_is_pinned_when_the_daemon_ends, .timeout = 60)
{
    const size_t bytes = 8192 * MIB;
    void *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned begun;

    cr_assert_neq(memory, MAP_FAILED);
    daemon_begin(COPY_AUTO, 1 * MIB);
    worker_begin_on(&a, 0);
    worker_end(&a); /* the GPU's context stays */
    begun = fake_cuda.registrations;
    fake_cuda.hold_registrations = true;
    cr_assert_eq(device_set_memory_add(set, memory, bytes), 0);
    while (fake_cuda.registrations == begun)
        usleep(100);
    work_quit(&((struct gpu *)gpu)->work);
    begun = fake_cuda.registrations;
    fake_cuda.hold_registrations = false;
    daemon_end();
    cr_assert_eq(fake_cuda.registrations, begun);
    cr_assert_eq(fake_cuda.registered, 0);
    munmap(memory, bytes);
}
