/* A call in a thread of its own: its end, its deadline, and what happens to it when nobody waits
 * any more. */
/* Sanitizers: thread */
#include "daemon/encryption/aside.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <semaphore.h>
#include <stdlib.h>

static uv_loop_t loop;
static struct aside aside;
static sem_t may_end, freed;
static int status, endings, result;

struct job {
    bool hangs;
    int result;
};

static void run_cb(void *job)
{
    struct job *j = job;

    if (j->hangs)
        while (sem_wait(&may_end) != 0)
            ;
    j->result = 7;
}

static void free_cb(void *job)
{
    free(job);
    sem_post(&freed);
}

static void ended_cb(void *ctx, void *job, int ended_status)
{
    cr_assert_eq(ctx, &aside);
    result = job ? ((struct job *)job)->result : 0;
    status = ended_status;
    endings++;
}

static const struct aside_call call = {run_cb, ended_cb, free_cb};

static int start(bool hangs, uint64_t deadline_ms)
{
    struct job *j = calloc(1, sizeof(*j));
    int rc;

    j->hangs = hangs;
    rc = aside_start(&aside, &loop, &call, &aside, j, deadline_ms);
    if (rc != 0)
        free(j);
    return rc;
}

static void setup(void)
{
    cr_assert_eq(uv_loop_init(&loop), 0);
    sem_init(&may_end, 0, 0);
    sem_init(&freed, 0, 0);
    aside = (struct aside){NULL, NULL};
    endings = 0;
}

static void teardown(void)
{
    aside_stop(&aside);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&loop), 0);
}

TestSuite(aside, .init = setup, .fini = teardown, .timeout = 60);

Test(aside, a_call_ends_on_the_loop)
{
    cr_assert_eq(start(false, 60000), 0);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert(endings == 1 && status == 0 && result == 7);
    sem_wait(&freed);
    cr_assert_eq(start(false, 60000), 0, "and the next one begins");
    aside_wait(&aside, 60000);
    cr_assert(endings == 2 && status == 0, "without the event loop");
    sem_wait(&freed);
}

Test(aside, one_that_hangs_ends_at_its_deadline_and_holds_up_the_next)
{
    cr_assert_eq(start(true, 5), 0);
    aside_wait(&aside, 1);
    cr_assert_eq(endings, 0);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert(endings == 1 && status == -ETIMEDOUT && result == 0);
    cr_assert_eq(start(false, 60000), -EBUSY);
    sem_post(&may_end);
    sem_wait(&freed); /* in the thread, unseen */
    cr_assert_eq(endings, 1);
    cr_assert_eq(start(false, 60000), 0);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert(endings == 2 && status == 0);
    sem_wait(&freed);
}

Test(aside, one_that_is_given_up)
{
    cr_assert_eq(start(true, 60000), 0);
    aside_stop(&aside);
    cr_assert(endings == 1 && status == -ECANCELED);
    uv_run(&loop, UV_RUN_DEFAULT);
    sem_post(&may_end);
    sem_wait(&freed);
    cr_assert_eq(endings, 1);
}
