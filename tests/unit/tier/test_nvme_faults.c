/* The NVMe tier when the device, the file system or the ring misbehave. nvme_faults.h makes
 * them. */
/* Sanitizers: thread */
#include "tests/unit/tier/nvme_faults.h"
#include "tests/unit/tier/nvme_rig.h"

TestSuite(nvme_faults, .fini = rig_close);

/* ---- what lies on the disk is not what was written ---- */

static void stored(enum config_io io, unsigned n)
{
    rig_start(1, 17 * MIB, 1 * MIB, io, n, 50000);
    cr_assert_eq(rig_write(0, n, 50000), n);
}

Test(nvme_faults, flipped_bits_are_found)
{
    static const int at[] = {0, 1, 777, 4095, 4096, 49999};

    stored(CONFIG_IO_AUTO, 12);
    for (unsigned i = 0; i < 6; i++)
        part_flip(i, NVME_PAGE + at[i]);
    part_flip(6, NVME_PAGE + 50000); /* padding: nobody's bytes */
    rig_read(0, 12, 0);
    for (unsigned i = 0; i < 12; i++) {
        cr_assert_eq(rig.parts[i].status, i < 6 ? -EBADMSG : 0);
        cr_assert(i < 6 || part_right(i));
    }
    cr_assert_eq(rig.metrics.nvme_corrupt, 6);
}

Test(nvme_faults, swapped_records_are_found)
{
    static char a[57344], b[57344];
    off_t at_a, at_b;
    int fd;

    stored(CONFIG_IO_AUTO, 4);
    fd = rig_fd(0);
    at_a = place_offset(&rig.parts[1].place);
    at_b = place_offset(&rig.parts[2].place);
    cr_assert_eq(pread(fd, a, sizeof(a), at_a), (ssize_t)sizeof(a));
    cr_assert_eq(pread(fd, b, sizeof(b), at_b), (ssize_t)sizeof(b));
    cr_assert_eq(pwrite(fd, a, sizeof(a), at_b), (ssize_t)sizeof(a));
    cr_assert_eq(pwrite(fd, b, sizeof(b), at_a), (ssize_t)sizeof(b));
    close(fd);
    rig_read(0, 4, 0);
    for (unsigned i = 0; i < 4; i++)
        cr_assert_eq(rig.parts[i].status, i == 1 || i == 2 ? -EBADMSG : 0);
}

Test(nvme_faults, truncated_file)
{
    for (unsigned k = 0; k < 2; k++) {
        unsigned lost = 0;
        off_t cut_at;

        stored(rig_engines[k], 10);
        /* part 5 loses its tail, those after it everything */
        cut_at = place_offset(&rig.parts[5].place) + 3 * NVME_PAGE + 100;
        cr_assert_eq(truncate(rig_path(0), cut_at), 0);
        rig_read(0, 10, 0);
        for (unsigned i = 0; i < 10; i++) {
            bool whole = place_offset(&rig.parts[i].place) + (off_t)nvme_stride(50000) <= cut_at;

            lost += !whole;
            cr_assert_eq(rig.parts[i].status, whole ? 0 : -EIO, "part %u", i);
            cr_assert(!whole || part_right(i));
        }
        cr_assert_geq(lost, 1);
        cr_assert_eq(rig.metrics.nvme_read_errors, lost);
        rig_close();
    }
}

/* ---- the device is slow ---- */

/* A full index drops the blocks that were found first. */
Test(nvme_faults, what_is_read_late_is_found_in_its_turn)
{
    struct tier_ns_record name;

    rig_init(1, 17 * MIB, 1 * MIB, CONFIG_IO_THREADS);
    rig_open();
    rig_name(&name, false);
    rig_run();
    rig_memory(12, 50000);
    cr_assert_eq(rig_write(0, 12, 50000), 12);
    rig_close_tier();
    (void)unlink(rig_file(0, NVME_INDEX_FILE)); /* so that all headers are read */
    fault.late_from = place_offset(&rig.parts[0].place);
    fault.late_to = place_offset(&rig.parts[11].place) + 1;
    rig.recovers = true;
    rig.done = 0;
    rig_open();
    rig_run();
    cr_assert_eq(rig.done, 12);
    for (unsigned i = 0; i < 12; i++)
        cr_expect_eq(rig.parts[i].order, i, "part %u was number %u", i, rig.parts[i].order);
}

/* ---- the device fails ---- */

Test(nvme_faults, other_files_go_on)
{
    rig_start(2, 17 * MIB, 1 * MIB, CONFIG_IO_THREADS, 100, 50000);
    cr_assert_eq(rig_write(0, 20, 50000), 20);
    fault.write_error = fault.sync_error = EROFS; /* health checks fail, too: it stays off */
    fault.writes_fail = 3; /* one operation with its retries: one file is given up */
    cr_assert_eq(rig_write(20, 21, 50000), 0);
    cr_assert(rig_stats().degraded);
    cr_assert_eq(rig_write(40, 100, 50000), 60);
    for (unsigned i = 41; i < 100; i++)
        cr_assert_eq(nvme_loc_file(rig.parts[i].place.loc), nvme_loc_file(rig.parts[40].place.loc));
    cr_assert_geq(rig_verify(), 80);
}

Test(nvme_faults, under_systemd_a_read_only_directory_may_be_the_sandboxs)
{
    char text[4096];
    size_t n;
    FILE *log = tmpfile();
    int kept = dup(2);

    rig_init(2, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    fault.open_error = EROFS;
    fault.open_path = rig.directories[0];
    setenv("INVOCATION_ID", "0", 1);
    cr_assert(log && kept >= 0 && dup2(fileno(log), 2) == 2);
    rig_open();
    dup2(kept, 2);
    unsetenv("INVOCATION_ID");
    rewind(log);
    n = fread(text, 1, sizeof(text) - 1, log);
    text[n] = '\0';
    cr_assert(strstr(text, "file-lost") && strstr(text, "systemctl daemon-reload"), "%s", text);
    fclose(log);
    close(kept);
    rig_close_tier();
    fault.open_error = 0;
    rig_open();
}

Test(nvme_faults, a_read_only_disk_is_done_without)
{
    struct tier_stats stats;

    rig_init(2, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    fault.open_error = EROFS;
    fault.open_path = rig.directories[0];
    rig_open();
    rig_memory(10, 50000);
    stats = rig_stats();
    cr_assert(stats.degraded);
    cr_assert(strstr(stats.reason, "Read-only"), "%s", stats.reason);
    cr_assert_eq(stats.capacity_bytes, 8 * MIB);
    cr_assert_eq(rig_write(0, 10, 50000), 10);
    cr_assert_eq(rig_verify(), 10);
    rig_close_tier();
    fault.open_path = rig_base(); /* all of them */
    rig_open();
    cr_assert_eq(part_write(0, 50000), -EROFS);
    rig_close_tier();
    fault.open_error = 0;
    rig_open();
}

Test(nvme_faults, no_room_at_start_is_said_and_leaves_nothing)
{
    struct stat st;

    rig_init(1, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    fault.allocate_error = ENOSPC;
    cr_assert_eq(rig_try_open(), -ENOSPC);
    cr_assert(strstr(rig.error.text, "lower nvme.size"), "%s", rig.error.text);
    cr_assert_eq(stat(rig_path(0), &st), -1);
    fault.allocate_error = EOPNOTSUPP; /* sparse then */
    rig_open();
    rig_memory(10, 50000);
    cr_assert_eq(rig_write(0, 10, 50000), 10);
    cr_assert_eq(rig_verify(), 10);
}

/* ---- the ring fails ---- */

Test(nvme_faults, a_ring_that_probes_badly)
{
    fault.ring_submit_error = EPERM;
    rig_init(1, 17 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig_open();
    cr_assert_str_eq(rig_stats().engine, "threads");
}

static void ring_or_skip(void)
{
    if (strcmp(rig_stats().engine, "io_uring") != 0)
        cr_skip("io_uring is not allowed here");
}

Test(nvme_faults, a_ring_that_takes_no_more)
{
    static const int errors[] = {EPERM, EAGAIN, EBADF};

    for (unsigned k = 0; k < 3; k++) {
        stored(CONFIG_IO_AUTO, 40);
        ring_or_skip();
        for (unsigned i = 0; i < 20; i++) /* in the kernel already, or about to be */
            cr_assert_eq(part_read(i, 0), 0);
        if (k == 1)
            uv_run(&rig.loop, UV_RUN_NOWAIT);
        fault.ring_submit_error = errors[k];
        rig_run();
        fault.ring_submit_error = errors[k];
        cr_assert_eq(rig_verify(), 40);
        cr_assert_str_eq(rig_stats().engine, "threads");
        fault.ring_submit_error = 0; /* once given up it stays so */
        cr_assert_eq(rig_write(0, 20, 50000), 20);
        cr_assert_eq(rig_verify(), 40);
        cr_assert_eq(rig.metrics.nvme_read_errors + rig.metrics.nvme_write_errors, 0);
        rig_close();
    }
}

Test(nvme_faults, one_hiccup_is_no_reason_to_leave_the_ring)
{
    stored(CONFIG_IO_AUTO, 10);
    ring_or_skip();
    fault.ring_error = EIO;
    cr_assert_eq(part_read(0, 0), 0);
    rig_run();
    fault.ring_error = 0;
    cr_assert_eq(rig.parts[0].status, 0);
    cr_assert_eq(rig_verify(), 10);
    cr_assert_str_eq(rig_stats().engine, "io_uring");
}
