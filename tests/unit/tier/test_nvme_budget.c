/* One iteration of the event loop does little write-back, however much there is, and all is done in
 * the end. A disk that a small request reads has few writes under way. */
#include "tests/unit/tier/nvme_rig.h"

TestSuite(nvme_budget, .fini = rig_close);

#define PARTS 200u
#define BUDGET_PARTS 8u

static unsigned not_begun(void)
{
    return rig_stats().queued;
}

/* Writes all parts at once. No iteration begins or ends more than its share. Pieces of memory bound
 * what one iteration ends: one write of many parts, or several writes of few. Threads sum the
 * larger ones. */
Test(nvme_budget, many_small_writes_take_many_turns)
{
    static const unsigned sizes[] = {4096, 64 << 10};

    for (unsigned k = 0; k < 2; k++) {
        rig_start(1, 33 * MIB, 4 * MIB, CONFIG_IO_URING, PARTS, sizes[k]);
        for (unsigned i = 0; i < PARTS; i++)
            cr_assert_eq(part_write(i, sizes[k]), 0);
        while (rig.under_way > 0) {
            unsigned queued = not_begun(), done = rig.done;

            uv_run(&rig.loop, UV_RUN_ONCE);
            cr_expect_leq(queued - not_begun(), 2 * BUDGET_PARTS - 1, "begun, of %u", sizes[k]);
            cr_expect_leq(rig.done - done, 2 * BUDGET_PARTS - 1, "ended, of %u", sizes[k]);
        }
        rig_run();
        cr_expect_eq(rig_verify(), PARTS);
        rig_close();
    }
}

/* ---- segments to be reused ---- */

#define RECORDS 2047u /* of 8 KiB, in a segment of 16 MiB */
#define DROPS 1024u   /* that one iteration drops */

/* Both segments are full of small parts, and writes go on. Records are dropped when a write needs
 * space, or ahead of need (rewrite > 0). */
Test(nvme_budget, a_segment_is_dropped_in_turns)
{
    static const unsigned rewrite[] = {0, 50};

    for (unsigned k = 0; k < 2; k++) {
        unsigned most = 0;

        rig_init(1, 33 * MIB, 16 * MIB, CONFIG_IO_URING);
        rig.config.nvme_rewrite = rewrite[k];
        rig_open();
        rig_memory(2 * RECORDS + 100, 4096);
        for (unsigned i = 0; i < 2 * RECORDS + 100; i++)
            cr_assert_eq(part_write(i, 4096), 0);
        while (rig.under_way > 0) {
            unsigned drops = rig.drops;

            uv_run(&rig.loop, UV_RUN_ONCE);
            most = rig.drops - drops > most ? rig.drops - drops : most;
        }
        rig_run();
        cr_expect_eq(most, DROPS, "rewrite %u", rewrite[k]);
        cr_expect_eq(rig.drops % RECORDS, 0u, "rewrite %u", rewrite[k]);
        cr_expect_gt(rig.drops, 0u, "rewrite %u", rewrite[k]);
        cr_expect_eq(rig.metrics.nvme_reclaimed_blocks, rig.drops);
        cr_expect_eq(rig.metrics.nvme_write_dropped, 0u);
        cr_expect_eq(rig_verify(), 2 * RECORDS + 100 - rig.drops);
        rig_close();
    }
}

/* ---- writes alongside small requests ---- */

#define NARROW_WRITES 2048u
#define NARROW_MAX 2u
#define WIDE_MAX 8u
#define BEGUN 8u /* parts that one iteration begins to write */
/* Writes of several iterations, as the first one may have begun a write of the iteration before. */
#define WRITES (4 * BEGUN)

static struct {
    uv_prepare_t prepare;
    unsigned writes, parts; /* under way at once, at most */
} seen;

/* Runs after an iteration has begun its writes, and before any of them can end. */
static void look_cb(uv_prepare_t *handle)
{
    unsigned parts = rig.under_way - not_begun();
    struct tier_stats stats;

    (void)handle;
    stats = rig_stats();
    seen.writes = stats.in_flight > seen.writes ? stats.in_flight : seen.writes;
    seen.parts = parts > seen.parts ? parts : seen.parts;
}

static void watched_writes(unsigned first, unsigned n, uint64_t even, uint64_t odd)
{
    seen.writes = seen.parts = 0;
    cr_assert_eq(uv_prepare_init(&rig.loop, &seen.prepare), 0);
    cr_assert_eq(uv_prepare_start(&seen.prepare, look_cb), 0);
    for (unsigned i = first; i < first + n; i++)
        cr_assert_eq(part_write(i, i % 2 ? odd : even), 0);
    while (rig.under_way > 0)
        uv_run(&rig.loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&seen.prepare, NULL);
    rig_run();
}

/* Neighbours differ in length, so that each needs a write of its own. */
static unsigned most_writes(unsigned first, unsigned n)
{
    watched_writes(first, n, 100, 5000);
    return seen.writes;
}

/* A write that opens a segment is its iteration's last. */
static void open_segment(void)
{
    cr_assert_eq(rig_write(0, 1, 100), 1u);
}

static void read_first(bool small)
{
    rig.parts[0].io.small = small;
    cr_assert_eq(rig_read_one(0), 0);
}

Test(nvme_budget, a_disk_that_a_small_request_reads_has_few_writes)
{
    rig_queue_depth = 128;
    rig_start(1, 129 * MIB, 4 * MIB, CONFIG_IO_URING, 1 + WRITES + NARROW_WRITES + WRITES, 8192);
    open_segment();
    cr_expect_eq(most_writes(1, WRITES), WIDE_MAX, "nothing was read yet");
    read_first(true);
    cr_expect_eq(most_writes(1 + WRITES, NARROW_WRITES), NARROW_MAX);
    cr_expect_eq(most_writes(1 + WRITES + NARROW_WRITES, WRITES), WIDE_MAX,
                 "no such read for a while");
    cr_expect_eq(rig_verify(), rig.n);
}

/* A write has up to 256 KiB with headers, or one part. */
Test(nvme_budget, and_small_ones)
{
    static const uint64_t sizes[] = {60 << 10, MIB};
    static const unsigned merged[] = {4, 1};

    for (unsigned k = 0; k < 2; k++) {
        rig_queue_depth = 128;
        rig_start(1, 65 * MIB, 16 * MIB, CONFIG_IO_URING, 17, MIB);
        cr_assert_eq(rig_write(0, 1, sizes[k]), 1u);
        read_first(true);
        watched_writes(1, 16, sizes[k], sizes[k]);
        cr_expect_leq(seen.parts, NARROW_MAX * merged[k]);
        cr_expect_eq(rig_verify(), rig.n);
        rig_close();
    }
}

Test(nvme_budget, large_requests_do_not_hold_up_writes)
{
    rig_queue_depth = 128;
    rig_start(1, 33 * MIB, 4 * MIB, CONFIG_IO_URING, 1 + 2 * WRITES, 8192);
    open_segment();
    cr_assert_eq(most_writes(1, WRITES), WIDE_MAX);
    read_first(false);
    cr_expect_eq(most_writes(1 + WRITES, WRITES), WIDE_MAX);
}

/* Summed on the event loop or not: a flipped bit is found. */
Test(nvme_budget, small_parts_are_verified_too)
{
    static const uint64_t sizes[] = {1, 4096, 16 << 10, (16 << 10) + 1};
    unsigned n = sizeof(sizes) / sizeof(sizes[0]);

    rig_start(1, 33 * MIB, 4 * MIB, CONFIG_IO_AUTO, n, 32 << 10);
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(rig_write(i, i + 1, sizes[i]), 1u);
    cr_expect_eq(rig_verify(), n);
    for (unsigned i = 0; i < n; i++)
        part_flip(i, NVME_PAGE);
    rig_read(0, n, 0);
    rig_ended(0, n, -EBADMSG);
    cr_expect_eq(rig.metrics.nvme_corrupt, n);
}
