/* Durability in the NVMe tier: what a sync promises, and what it does when the device can't. */
/* Sanitizers: thread */
#include "tests/unit/tier/nvme_faults.h"
#include "tests/unit/tier/nvme_rig.h"

TestSuite(nvme_sync, .fini = rig_close);

static void open_rig(enum config_io io)
{
    rig_start(1, 17 * MIB, 1 * MIB, io, 60, 50000);
    fault.sync_error = 0;
}

static void sync_all(unsigned from, unsigned to)
{
    for (unsigned i = from; i < to; i++)
        cr_assert_eq(part_submit(i, TIER_SYNC), 0);
    rig_run();
}

Test(nvme_sync, many_share_one)
{
    open_rig(CONFIG_IO_AUTO);
    cr_assert_eq(rig_write(0, 60, 50000), 60);
    fault.syncs = 0;
    sync_all(0, 60);
    rig_ended(0, 60, 0);
    cr_assert_leq(fault.syncs, 2);
    cr_assert_geq(fault.syncs, 1);
    cr_assert_eq(rig_verify(), 60);
}

Test(nvme_sync, a_failed_one_promises_nothing)
{
    open_rig(CONFIG_IO_AUTO);
    cr_assert_eq(rig_write(0, 10, 50000), 10);
    fault.sync_error = EIO;
    sync_all(0, 10);
    rig_ended(0, 10, -EIO);
    cr_assert_eq(rig.metrics.nvme_sync_errors, 10);
    fault.sync_error = 0;
    cr_assert_eq(rig_verify(), 10); /* readable all the same */
}

/* The kernel counts pages that it could not write as clean. So the next sync succeeds and means
 * nothing. */
Test(nvme_sync, what_one_failed_for_no_later_one_promises)
{
    open_rig(CONFIG_IO_AUTO);
    cr_assert_eq(rig_write(0, 10, 50000), 10);
    fault.sync_error = EIO;
    sync_all(0, 1); /* the others' bytes were in it as well */
    fault.sync_error = 0;
    for (unsigned i = 0; i < 10; i++)
        cr_assert_eq(part_submit(i, TIER_SYNC), -EIO);
    cr_assert_eq(rig_write(10, 20, 50000), 10); /* elsewhere */
    sync_all(10, 20);
    rig_ended(10, 20, 0);
    cr_assert_eq(rig_verify(), 20);
}

static int syncs_then;
static void (*first_done_cb)(struct tier_io *io, int status);

static void second_cb(struct tier_io *io, int status)
{
    syncs_then = fault.syncs;
    first_done_cb(io, status);
}

static void first_cb(struct tier_io *io, int status)
{
    first_done_cb(io, status);
    cr_assert_eq(part_submit(1, TIER_SYNC), 0);
    rig.parts[1].io.done_cb = second_cb;
}

/* The callback asks for the next sync. That is another one, although the first has only just ended.
 */
Test(nvme_sync, what_is_asked_for_after_one_waits_for_the_next)
{
    open_rig(CONFIG_IO_AUTO);
    cr_assert_eq(rig_write(0, 2, 50000), 2);
    fault.syncs = 0;
    cr_assert_eq(part_submit(0, TIER_SYNC), 0);
    first_done_cb = rig.parts[0].io.done_cb;
    rig.parts[0].io.done_cb = first_cb;
    rig_run();
    cr_expect_eq(rig.parts[1].status, 0);
    cr_expect_eq(syncs_then, 2);
}

Test(nvme_sync, what_lies_no_more_can_not_be_synced)
{
    open_rig(CONFIG_IO_AUTO);
    cr_assert_eq(rig_write(0, 1, 50000), 1);
    tier_nvme.forget(rig.tier, &rig.parts[0].place, 50000);
    cr_assert_eq(part_submit(0, TIER_SYNC), -ESTALE);
}

/* Records after a header that was never written are not found by a later start. */
Test(nvme_sync, records_without_their_segments_header_are_not_durable)
{
    open_rig(CONFIG_IO_THREADS);
    fault.headers_fail = true;
    for (unsigned i = 0; i < 60; i++)
        cr_assert_eq(part_write(i, 50000), 0);
    rig_run();
    fault.headers_fail = false;
    for (unsigned i = 0; i < 60; i++)
        if (rig.parts[i].status == 0)
            cr_assert_eq(part_submit(i, TIER_SYNC), -EIO, "part %u", i);
}
