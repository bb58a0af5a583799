/* Of write-behind a turn of the loop does little, however much there is, and all is done in the
 * end. */
#include "tests/unit/nvme_rig.h"

#define PARTS 200u
#define BUDGET_PARTS 8u

static struct rig rig;

static unsigned not_begun(void)
{
    struct tier_stats stats;

    tier_nvme.stats(rig.tier, &stats);
    return stats.queued;
}

/* Writes all at once; no turn begins or ends more than its share. Ending is bounded by the pieces
 * of memory, so that what one turn ends is one write of many parts or some of few. */
static void expect_small_turns(uint64_t bytes)
{
    for (unsigned i = 0; i < PARTS; i++)
        cr_assert_eq(part_write(&rig, i, bytes), 0);
    while (rig.under_way > 0) {
        unsigned queued = not_begun(), done = rig.done;

        uv_run(&rig.loop, UV_RUN_ONCE);
        cr_expect_leq(queued - not_begun(), 2 * BUDGET_PARTS - 1, "begun");
        cr_expect_leq(rig.done - done, 2 * BUDGET_PARTS - 1, "ended");
    }
    rig_run(&rig);
    cr_expect_eq(rig_verify(&rig), PARTS);
}

Test(nvme_budget, many_small_writes_take_many_turns)
{
    rig_init(&rig, 1, 33 * MIB, 4 * MIB, CONFIG_IO_URING);
    rig_open(&rig);
    rig_memory(&rig, PARTS, 4096);
    expect_small_turns(4096);
    rig_close(&rig);
}

Test(nvme_budget, so_do_those_that_threads_sum)
{
    rig_init(&rig, 1, 33 * MIB, 4 * MIB, CONFIG_IO_URING);
    rig_open(&rig);
    rig_memory(&rig, PARTS, 64 << 10);
    expect_small_turns(64 << 10);
    rig_close(&rig);
}

/* Nobody comes after it, and it is not forgotten for that. */
Test(nvme_budget, a_single_write_does_not_wait_for_others)
{
    rig_init(&rig, 1, 33 * MIB, 4 * MIB, CONFIG_IO_AUTO);
    rig_open(&rig);
    rig_memory(&rig, 2, MIB);
    cr_expect_eq(rig_write(&rig, 0, 1, 64 << 10), 1u);
    cr_expect_eq(rig_write(&rig, 1, 2, 100), 1u);
    cr_expect_eq(rig_verify(&rig), 2u);
    rig_close(&rig);
}

/* Summed on the loop or not: a flipped bit is found. */
Test(nvme_budget, small_parts_are_verified_too)
{
    static const uint64_t sizes[] = {1, 4096, 16 << 10, (16 << 10) + 1};
    unsigned n = sizeof(sizes) / sizeof(sizes[0]);
    int fd;

    rig_init(&rig, 1, 33 * MIB, 4 * MIB, CONFIG_IO_AUTO);
    rig_open(&rig);
    rig_memory(&rig, n, 32 << 10);
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(rig_write(&rig, i, i + 1, sizes[i]), 1u);
    cr_expect_eq(rig_verify(&rig), n);
    fd = rig_fd(&rig, 0);
    for (unsigned i = 0; i < n; i++) {
        off_t at = place_offset(&rig.parts[i].place) + NVME_PAGE;
        char byte;

        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        byte ^= 1;
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    }
    cr_assert_eq(fsync(fd), 0);
    close(fd);
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(part_read(&rig, i, 0), 0);
    rig_run(&rig);
    for (unsigned i = 0; i < n; i++)
        cr_expect_eq(rig.parts[i].status, -EBADMSG);
    cr_expect_eq(rig.metrics.nvme_corrupt, n);
    rig_close(&rig);
}
