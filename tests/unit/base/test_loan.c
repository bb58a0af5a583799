/* Memory that the daemon is done with, and that workers may still have mapped:
 * daemon/mapping/loan.h. */
#include "daemon/base/list.h"
#include "daemon/base/memfd.h"
#include "daemon/mapping/loan.h"

#include <criterion/criterion.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES (64u << 10)

static uv_loop_t loop;
static struct deadlines deadlines;
static struct loan loan;
static unsigned frees, keeps;
static int rw = -1, own = -1;
static char *mapped;

static void free_cb(struct loan *l)
{
    cr_assert_eq(l, &loan);
    cr_assert_eq(l->ctx, &frees);
    frees++;
}

static void kept_cb(struct loan *l)
{
    cr_assert_eq(l, &loan);
    keeps++;
}

static const struct loan_calls calls = {free_cb, kept_cb};

static void open_all(void)
{
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(deadlines_init(&deadlines, &loop), 0);
    cr_assert_eq(memfd_new("loan", BYTES, &rw), 0);
    mapped = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, rw, 0);
    cr_assert_neq(mapped, MAP_FAILED);
    own = memfd_share(rw);
    cr_assert_geq(own, 0);
}

static void close_all(void)
{
    loan_cancel(&loan);
    deadlines_close(&deadlines);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&loop), 0);
    munmap(mapped, BYTES);
    close(rw);
    close(own);
}

TestSuite(loan, .init = open_all, .fini = close_all);

static void run_for(int ms, const unsigned *count)
{
    for (int i = 0; i < ms && *count == 0; i++) {
        uv_run(&loop, UV_RUN_NOWAIT);
        uv_sleep(1);
    }
}

static void run_until(const unsigned *count)
{
    run_for(20000, count);
    cr_assert_eq(*count, 1u);
}

static int granted(void)
{
    int fd = memfd_grant(own);

    cr_assert_geq(fd, 0);
    return fd;
}

Test(loan, nobody_has_it)
{
    loan_end(&loan, &deadlines, own, &calls, &frees);
    cr_expect_eq(frees, 1u, "at once, though it is mapped here");
    cr_expect(!loan_waits(&loan));
}

Test(loan, a_descriptor_is_waited_for)
{
    int fd = granted();

    loan_end(&loan, &deadlines, own, &calls, &frees);
    cr_expect_eq(frees, 0u);
    cr_expect(loan_waits(&loan));
    close(fd);
    run_until(&frees);
    cr_expect_eq(keeps, 0u);
}

Test(loan, a_mapping_is_waited_for)
{
    int fd = granted();
    void *theirs = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, fd, 0);

    cr_assert_neq(theirs, MAP_FAILED);
    close(fd);
    loan_end(&loan, &deadlines, own, &calls, &frees);
    run_until(&keeps);
    cr_expect_eq(frees, 0u);
    munmap(theirs, BYTES);
    run_until(&frees);
    cr_expect_eq(keeps, 1u, "once");
}

Test(loan, a_copy_of_a_descriptor_is_waited_for)
{
    int fd = granted(), copy = dup(fd);

    close(fd);
    cr_expect_eq(memfd_granted(own), 1);
    close(copy);
    cr_expect_eq(memfd_granted(own), 0);
}

Test(loan, is_taken_back_before_it_ends)
{
    int fd = granted();

    loan_end(&loan, &deadlines, own, &calls, &frees);
    loan_cancel(&loan);
    close(fd);
    run_for(50, &frees);
    cr_expect_eq(frees, 0u);
    loan_end(&loan, &deadlines, own, &calls, &frees);
    cr_expect_eq(frees, 1u);
}
