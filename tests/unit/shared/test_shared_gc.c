/* Sanitizers: thread */
#include "daemon/gc/gc.h"

#include "daemon/gc/ages.h"
#include "daemon/gc/parts.h"
#include "daemon/gc/sweep.h"
#include "tests/unit/shared/shared_gc_rig.h"

/* ---- ages ---- */

static struct gc_ages ages;

/* Bytes of files from the cell on. */
static uint64_t bytes_from(uint32_t cell)
{
    uint64_t sum = 0;

    for (uint32_t i = cell; i < GC_CELLS; i++)
        sum += ages.bytes[i];
    return sum;
}

Test(shared_gc_ages, cut_gives_what_was_asked_for_and_a_cell_at_most_more)
{
    for (uint32_t i = 0; i < 20000; i++) {
        /* From seconds to years. */
        uint64_t age = (1ull << (31 + below(26))) + below(1u << 31);

        ages.bytes[gc_cell(age, &i, sizeof(i))] += 1000;
    }
    for (uint64_t wanted = 500000; wanted <= 12000000; wanted += 500000) {
        uint32_t cut = gc_ages_cut(&ages, wanted);

        cr_assert_geq(cut, GC_GROUPS, "the youngest class never goes");
        cr_assert_geq(bytes_from(cut), wanted);
        cr_assert_lt(bytes_from(cut + 1), wanted);
    }
    cr_assert_eq(gc_ages_cut(&ages, 0), GC_CELLS);
}

Test(shared_gc_ages, files_of_some_minutes_never_go)
{
    uint32_t cell = gc_cell(GC_AGE_LEAST_NS, "k", 1);

    ages.bytes[gc_cell(GC_AGE_LEAST_NS - 1, "k", 1)] = 1 << 20;
    cr_assert_eq(gc_ages_cut(&ages, 1), GC_CELLS);
    ages.bytes[cell] = 1 << 20;
    cr_assert_eq(gc_ages_cut(&ages, 2 << 20), cell);
}

/* Each edge of a class is where the one before it ends. */
Test(shared_gc_ages, classes_have_no_gaps)
{
    uint64_t edge = GC_AGE_LEAST_NS;

    for (unsigned i = 1; i < GC_AGES - 1; i++) {
        uint64_t next = edge + (1ull << (63 - __builtin_clzll(edge) - 6));

        cr_assert_eq(gc_cell(edge, "k", 1) / GC_GROUPS, i);
        cr_assert_eq(gc_cell(next - 1, "k", 1) / GC_GROUPS, i);
        edge = next;
    }
    cr_assert_eq(gc_cell(edge, "k", 1) / GC_GROUPS, GC_AGES - 1);
    cr_assert_eq(gc_cell(UINT64_MAX, "k", 1) / GC_GROUPS, GC_AGES - 1);
}

/* A root that was filled at once does not lose everything, and each block goes with all its
 * parts. */
Test(shared_gc_ages, groups_of_keys_split_a_class)
{
    uint64_t day = 1ull << 46; /* 19.5 hours, where a class begins */
    uint32_t cut;

    for (uint32_t i = 0; i < 3200; i++) /* a tenth of a second apart: one class */
        ages.bytes[gc_cell(day + i * 100000000ull, &i, sizeof(i))] += 100;
    cut = gc_ages_cut(&ages, 32000);
    cr_assert_geq(bytes_from(cut), 32000);
    cr_assert_leq(bytes_from(cut), 32000 + 2 * 320000 / GC_GROUPS);
    cr_assert_eq(gc_cell(day, "key", 3), gc_cell(day + 5, "key", 3));
}

Test(shared_gc_ages, a_time_far_ahead_counts_as_the_oldest)
{
    uint64_t now = 1700000000ull * 1000000000u;

    cr_assert_eq(gc_age(now, now - 5), 5);
    cr_assert_eq(gc_age(now, now + GC_AGE_AHEAD_NS), 0);
    cr_assert_gt(gc_age(now, now + GC_AGE_AHEAD_NS + 1), 200ull * 365 * 86400 * 1000000000u);
}

Test(shared_gc_ages, names_say_whose_and_which_part)
{
    static struct gc_parts parts;
    struct block_file_id id = rig_id(7, 3, 5);
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    char name[BLOCK_FILE_NAME_CAP];
    struct block_file_name got, other;

    cr_assert_eq(block_file_locate(&id, identity, name), 0);
    cr_assert_eq(block_file_name_parse(name, &got), 0);
    cr_assert_eq(memcmp(got.namespace, id.fingerprint, BLOCK_FILE_NAMESPACE_BYTES), 0);
    cr_assert_eq(got.part, 5);
    cr_assert_eq(got.key_chars, 2 * id.key_bytes);
    cr_assert_eq(block_file_name_parse(".tmp-host-1-2-3", &other), -EINVAL);
    cr_assert(gc_parts_learn(&parts, &got), "the highest so far");
    other = got;
    other.part = 6;
    cr_assert(gc_parts_learn(&parts, &other));
    cr_assert_not(gc_parts_learn(&parts, &got));
    other.namespace[15] ^= 1;
    other.part = 0;
    cr_assert(gc_parts_learn(&parts, &other), "the only one of another namespace");
}

/* ---- passes over a real directory ---- */

static struct rig g, beside; /* `beside` is another root of the same daemon */

static void teardown(void)
{
    if (beside.loop)
        rig_end(&beside);
    if (g.loop)
        rig_end(&g);
}

TestSuite(shared_gc, .fini = teardown);

/* Blocks of one part each, a minute older from one to the next. */
static void lay(unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        rig_put(&g, 1, i, 0, 3600 + i * 60, 1064);
}

/* Blocks of one part each, of up to ten days. Returns their bytes. */
static uint64_t lay_any(unsigned n)
{
    uint64_t bytes = 0;

    for (unsigned i = 0; i < n; i++)
        bytes += rig_put(&g, 1, i, 0, 600 + below(864000), 1064);
    return bytes;
}

/* Files that are read and copied, each ten minutes younger than the one before. */
static void lay_whole(unsigned n, uint64_t bytes)
{
    for (unsigned i = 0; i < n; i++)
        rig_write(&g, 1, i, 0, 86400 - i * 600, bytes);
}

/* Both roots: files that leave the first go to `beside`. */
static void begin_both(void)
{
    rig_begin(&g, 0);
    rig_begin_beside(&beside, &g);
}

static void capacity(uint64_t bytes)
{
    g.hosts[0].root->config.capacity_bytes = bytes;
}

static uint64_t bytes_with_marker(uint64_t bytes)
{
    return bytes + 64 + 16;
}

/* By one host, and by two at once, which remove no more. */
Test(shared_gc, brought_to_low_percent_the_coldest_first)
{
    for (unsigned hosts = 1; hosts <= RIG_HOSTS; hosts++) {
        uint64_t total, target, used;

        rig_begin(&g, 0);
        if (hosts == 2)
            rig_host(&g, 1);
        total = lay_any(3000);
        target = total / 2 / 100 * 90;
        for (unsigned i = 0; i < hosts; i++) {
            g.hosts[i].root->config.capacity_bytes = total / 2;
            cr_assert_eq(gc_run(g.hosts[i].gc), 0);
        }
        for (unsigned i = 0; i < hosts; i++)
            rig_wait(&g, i);
        used = rig_used(&g);
        cr_assert_leq(used, bytes_with_marker(target), "%u hosts", hosts);
        cr_assert_geq(used, target - total / 64, "%u hosts removed a bit too much", hosts);
        if (hosts == 1) {
            cr_assert_eq(g.hosts[0].metrics.shared_gc_passes, 1);
            /* Files that stayed although they are colder than a removed one: at most a fraction of
             * a class. */
            cr_assert_leq(rig_inversion(&g), total / 64);
            cr_assert_eq(gc_usage(g.hosts[0].gc).bytes, used - 80);
            cr_assert_eq(gc_usage(g.hosts[0].gc).files, used / 1064);
        }
        rig_end(&g);
        g.loop = NULL;
    }
}

Test(shared_gc, nothing_goes_below_capacity_and_usage_is_known)
{
    rig_begin(&g, 1 << 20);
    for (unsigned i = 0; i < 100; i++)
        rig_put(&g, 1, i, i % 4, 86400, 1064);
    rig_pass(&g, 0);
    cr_assert_eq(rig_used(&g), bytes_with_marker(100 * 1064));
    cr_assert_eq(g.hosts[0].metrics.shared_gc_removed, 0);
    cr_assert_eq(gc_usage(g.hosts[0].gc).files, 100);
    rig_pass(&g, 0);
    cr_assert_eq(gc_usage(g.hosts[0].gc).files, 100, "the marker does not count");
    cr_assert_eq(gc_usage(g.hosts[0].gc).bytes, 100 * 1064);
}

Test(shared_gc, the_highest_part_goes_first_and_blocks_stay_whole)
{
    unsigned promised = 0, whole = 0;

    rig_begin(&g, 400 * 1064);
    for (unsigned i = 0; i < 200; i++)
        for (unsigned part = 0; part < 4; part++)
            rig_put(&g, 1, i, part, 3600 + i * 600 + (3 - part) * 5, 1064);
    rig_pass(&g, 0);
    for (unsigned i = 0; i < 200; i++) {
        if (!rig_has(&g, 1, i, 3))
            continue;
        promised++;
        whole += rig_has(&g, 1, i, 0) && rig_has(&g, 1, i, 1) && rig_has(&g, 1, i, 2);
    }
    cr_assert_leq(rig_used(&g), bytes_with_marker(400 * 1064));
    cr_assert_gt(promised, 50);
    cr_assert_eq(promised, whole, "%u of %u are whole", whole, promised);
}

Test(shared_gc, a_young_marker_leaves_the_pass_to_the_other)
{
    rig_begin(&g, 1 << 20);
    rig_put(&g, 1, 1, 0, 86400, 1064);
    rig_pass(&g, 0);
    rig_host(&g, 1);
    rig_host_first(&g, 1, 3600000, 100);
    RIG_WAIT_WHILE(&g, !gc_usage(g.hosts[1].gc).known); /* off the marker */
    rig_sleep(&g, 200);                                 /* a pass would have begun */
    cr_assert_eq(gc_usage(g.hosts[1].gc).files, 1);
    cr_assert_eq(g.hosts[1].metrics.shared_gc_passes, 0);
}

static uint64_t marker_mtime_ns(void)
{
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    const struct block_file_id id = {.key_bytes = UCM_MIN_KEY_BYTES};
    char name[BLOCK_FILE_NAME_CAP];
    struct stat st;

    cr_assert_eq(block_file_locate(&id, identity, name), 0);
    cr_assert_eq(stat(rig_path(&g, identity[0], name), &st), 0);
    return (uint64_t)st.st_mtim.tv_sec * NS + (uint64_t)st.st_mtim.tv_nsec;
}

/* Other hosts would begin a pass, too, once the marker is as old as the interval of passes. */
Test(shared_gc, a_long_pass_keeps_its_marker_young)
{
    unsigned renewed = 0;
    uint64_t last;

    rig_begin(&g, 1 << 20);
    rig_put(&g, 1, 1, 0, 86400, 1064);
    rig_pass(&g, 0);
    rig_host_config(&g, 0, 400);
    g.hosts[0].root->config.depth = 8; /* a quarter of it for collection: a LIST and the touch */
    rig_hold_lists(&g, true);
    last = marker_mtime_ns();
    for (rig_timer(&g, RIG_WAIT_MS); renewed < 4;) {
        uv_run(g.loop, UV_RUN_ONCE);
        cr_assert_not(g.timed_out, "it was touched when the pass began, and not again");
        renewed += marker_mtime_ns() > last;
        last = marker_mtime_ns();
    }
    rig_hold_lists(&g, false);
    rig_wait(&g, 0);
    cr_assert_eq(g.hosts[0].metrics.shared_gc_passes, 2);
}

Test(shared_gc, passes_whose_markers_are_touched_at_any_moment_end)
{
    rig_begin(&g, 1 << 20);
    rig_put(&g, 1, 1, 0, 86400, 1064);
    rig_pass(&g, 0);
    rig_host_config(&g, 0, 4);
    for (unsigned i = 0; i < 20; i++)
        rig_wait(&g, 0);
}

Test(shared_gc, the_smaller_of_two_capacities_counts)
{
    rig_begin(&g, 1 << 20);
    lay(100);
    rig_pass(&g, 0);
    rig_host(&g, 1);
    g.hosts[1].root->config.capacity_bytes = 50 * 1064;
    rig_host_first(&g, 1, 3600000, 100);
    rig_wait(&g, 1); /* by itself, though the marker is young */
    cr_assert_leq(rig_used(&g), bytes_with_marker(45 * 1064));
}

Test(shared_gc, a_full_server_brings_it_to_low_percent_of_what_is_there)
{
    rig_begin(&g, 0);
    for (unsigned i = 0; i < 1000; i++)
        rig_put(&g, 1, i, 0, 3600 + i * 600, 1064);
    rig_pass(&g, 0);
    cr_assert_eq(rig_used(&g), bytes_with_marker(1000 * 1064));
    rig_sleep(&g, 5);
    gc_full(g.hosts[0].gc);
    rig_wait(&g, 0);
    cr_assert_leq(rig_used(&g), bytes_with_marker(900 * 1064));
    cr_assert_geq(rig_used(&g), 880 * 1064);
}

Test(shared_gc, temporary_files_of_the_dead_go_and_foreign_ones_stay)
{
    rig_begin(&g, 64);
    rig_put_name(&g, 5, ".tmp-dead-00000001-0000000000000001-0000000000000001", 3700, 100);
    rig_put_name(&g, 5, ".tmp-live-00000001-0000000000000001-0000000000000002", 3500, 100);
    rig_put_name(&g, 5, "README", 864000, 100);
    rig_put_name(&g, 5, "0123-4", 864000, 100);
    rig_pass(&g, 0);
    cr_assert_not(rig_has_name(&g, 5, ".tmp-dead-00000001-0000000000000001-0000000000000001"));
    cr_assert(rig_has_name(&g, 5, ".tmp-live-00000001-0000000000000001-0000000000000002"));
    cr_assert(rig_has_name(&g, 5, "README"));
    cr_assert(rig_has_name(&g, 5, "0123-4"));
    cr_assert_eq(g.hosts[0].metrics.shared_gc_removed, 0);
}

/* Whenever a host dies, the next pass brings the root to the right size. If the dead hosts left
 * more than the capacity, that is `low` percent of it. Otherwise it is what they left. */
Test(shared_gc, killed_in_a_pass_leaves_nothing_to_repair)
{
    const uint64_t marker = bytes_with_marker(0);
    uint64_t total = 0, target, left;

    rig_directory(&g);
    for (unsigned i = 0; i < 1000; i++)
        total += rig_put(&g, 1, i / 2, i % 2, 3600 + i * 300, 1064);
    target = total / 2 / 100 * 90;
    for (unsigned round = 0; round < 8; round++) {
        pid_t child = fork();

        cr_assert_geq(child, 0);
        if (child == 0) {
            rig_open(&g, total / 2);
            rig_pass(&g, 0);
            pause();
        }
        usleep(2000 + round * 6000);
        kill(child, SIGKILL);
        cr_assert_eq(waitpid(child, NULL, 0), child);
        cr_assert_geq(rig_used(&g), target - total / 64);
    }
    left = rig_used(&g);
    rig_open(&g, total / 2);
    rig_pass(&g, 0);
    cr_assert_leq(rig_used(&g), left > total / 2 + marker ? target + marker : left + marker);
    for (unsigned i = 0; i < 500; i++)
        cr_assert(!rig_has(&g, 1, i, 1) || rig_has(&g, 1, i, 0), "block %u", i);
}

/* A server whose clock is ten years slow: no host compares its own clock with it. */
Test(shared_gc, only_the_servers_time_counts)
{
    rig_begin(&g, 0);
    rig_fault(&g)->behind_s = 315360000;
    for (unsigned i = 0; i < 100; i++)
        rig_put(&g, 1, i, 0, i < 50 ? 60 : 3600 + i, 1064);
    rig_put_name(&g, 5, ".tmp-live-00000001-0000000000000001-0000000000000002", 3500, 100);
    capacity(20 * 1064);
    rig_pass(&g, 0);
    for (unsigned i = 0; i < 100; i++)
        cr_assert_eq(rig_has(&g, 1, i, 0), i < 50, "file %u", i);
    cr_assert(rig_has_name(&g, 5, ".tmp-live-00000001-0000000000000001-0000000000000002"));
}

Test(shared_gc, a_root_that_fails_ends_the_pass_and_the_next_one_does_the_rest)
{
    rig_begin(&g, 50 * 1064);
    lay(100);
    rig_fault(&g)->fail[SHARED_REMOVE] = -EIO;
    cr_assert_eq(gc_run(g.hosts[0].gc), 0);
    rig_wait(&g, 0);
    cr_assert_eq(g.hosts[0].metrics.shared_gc_failed, 1);
    cr_assert_eq(rig_used(&g), 100 * 1064);
    rig_fault(&g)->fail[SHARED_REMOVE] = 0;
    rig_pass(&g, 0);
    cr_assert_leq(rig_used(&g), bytes_with_marker(45 * 1064));
}

/* Bytes in the first file's bucket, and which bucket that is. */
static uint64_t bucket_bytes(uint8_t *bucket)
{
    const char *name = strstr(g.files[0].path, "/blocks/") + strlen("/blocks/");
    uint64_t bytes = 0;

    *bucket = (uint8_t)strtoul(name, NULL, 16);
    for (unsigned i = 0; i < g.n; i++)
        if (strncmp(strstr(g.files[i].path, "/blocks/") + strlen("/blocks/"), name, 3) == 0)
            bytes += g.files[i].bytes;
    return bytes;
}

Test(shared_gc, a_directory_that_can_not_be_listed_is_left_out_of_a_pass)
{
    uint64_t left;
    uint8_t bucket;

    rig_begin(&g, 50 * 1064);
    lay(100);
    left = bucket_bytes(&bucket);
    rig_fault(&g)->bad_bucket = bucket;
    rig_fault(&g)->bad_lists = GC_TRIES; /* in the first of its sweeps */
    rig_pass(&g, 0);
    cr_assert_eq(g.hosts[0].metrics.shared_gc_failed, 1);
    cr_assert_leq(rig_used(&g), bytes_with_marker(45 * 1064) + left);
    rig_pass(&g, 0);
    cr_assert_eq(g.hosts[0].metrics.shared_gc_failed, 1);
}

Test(shared_gc, purge_tells_of_a_directory_that_can_not_be_listed)
{
    uint64_t left;
    uint8_t bucket;
    int status;

    begin_both();
    for (unsigned i = 0; i < 100; i++)
        rig_put(&g, 1, i, 0, 10, 100);
    left = bucket_bytes(&bucket);
    rig_fault(&g)->bad_bucket = bucket;
    rig_fault(&g)->bad_lists = GC_TRIES;
    cr_assert_eq(rig_purge(&g, &beside, 1, &status), 100 - left / 100);
    cr_assert_eq(status, -EIO);
    cr_assert_eq(rig_used(&g), left);
}

Test(shared_gc, stopped_in_a_pass_it_ends)
{
    rig_begin(&g, 50 * 1064);
    lay(2000);
    cr_assert_eq(gc_run(g.hosts[0].gc), 0);
    rig_sleep(&g, 15); /* the suite stops it and waits until it is not busy */
}

/* ---- to the next root ---- */

Test(shared_gc, demoted_files_keep_their_bytes)
{
    uint64_t demoted = 0;

    begin_both();
    for (unsigned i = 0; i < 60; i++)
        rig_write(&g, 1, i, i % 2, 86400 - i * 600, 200000 + i);
    rig_write(&beside, 1, 0, 0, 60, 200000); /* one that is there already */
    rig_put(&g, 1, 1000, 0, 864000, 200000); /* one that is a block file in name only */
    rig_next(&g, 0, beside.hosts[0].root);
    capacity(30 * 200000);
    rig_pass(&g, 0);
    cr_assert_leq(rig_used(&g), bytes_with_marker(27 * 200000));
    for (unsigned i = 0; i < 60; i++) {
        bool there = rig_read(&beside, 1, i, i % 2, 200000 + i) == 0;

        demoted += there;
        cr_assert(there || rig_read(&g, 1, i, i % 2, 200000 + i) == 0, "block %u is lost", i);
    }
    cr_assert_geq(demoted, 32);
    cr_assert_eq(g.hosts[0].metrics.shared_gc_demoted, demoted - 1);
    cr_assert_not(rig_has(&beside, 1, 1000, 0));
}

Test(shared_gc, stopped_while_files_are_copied_it_ends)
{
    for (unsigned ms = 0; ms < 60; ms += 12) {
        begin_both();
        lay_whole(40, 500000);
        rig_next(&g, 0, beside.hosts[0].root);
        capacity(500000);
        cr_assert_eq(gc_run(g.hosts[0].gc), 0);
        rig_sleep(&g, 20 + ms);
        rig_host_end(&g, &g.hosts[0]);
        memset(&g.hosts[0], 0, sizeof(g.hosts[0]));
        teardown();
        g.loop = beside.loop = NULL;
    }
}

Test(shared_gc, a_next_root_that_fails_holds_nothing_up)
{
    begin_both();
    lay_whole(40, 100000);
    rig_next(&g, 0, beside.hosts[0].root);
    rig_fault(&beside)->fail[SHARED_WRITE] = -ENOSPC;
    capacity(20 * 100000);
    rig_pass(&g, 0);
    cr_assert_leq(rig_used(&g), bytes_with_marker(18 * 100064));
    cr_assert_eq(g.hosts[0].metrics.shared_gc_demoted, 0);
}

/* ---- purge ---- */

Test(shared_gc, purge_tells_of_a_root_that_fails_and_sweeps_the_others)
{
    int status;

    begin_both();
    for (unsigned i = 0; i < 50; i++) {
        rig_put(&g, 1, i, 0, 10, 100);
        rig_put(&beside, 1, i, 0, 10, 100);
    }
    rig_fault(&beside)->fail[SHARED_REMOVE] = -EIO;
    cr_assert_eq(rig_purge(&g, &beside, 1, &status), 50);
    cr_assert_eq(status, -EIO);
    cr_assert_eq(rig_used(&g), 0);
}

Test(shared_gc, purge_cancelled_tells_nobody)
{
    struct rig_purge p;
    struct shared shared;

    begin_both();
    for (unsigned i = 0; i < 500; i++)
        rig_put(&g, 1, i, 0, 10, 100);
    rig_purge_begin(&g, &beside, 1, &p, &shared);
    rig_sleep(&g, 10);
    shared_purge_cancel(&shared, &p.purge);
    shared_purge_cancel(&shared, &p.purge); /* harmless */
    RIG_WAIT_WHILE(&g, !list_empty(&shared.purges));
    cr_assert_eq(p.reports, 0);
}

Test(shared_gc, purges_end_when_the_daemon_stops)
{
    struct rig_purge p;
    struct shared shared;

    begin_both();
    rig_purge_begin(&g, &beside, 1, &p, &shared);
    shared_purges_stop(&shared);
    RIG_WAIT_WHILE(&g, !list_empty(&shared.purges));
    cr_assert_eq(p.reports, 1);
    cr_assert_eq(p.status, -ECANCELED);
}
