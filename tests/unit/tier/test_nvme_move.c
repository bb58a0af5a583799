/* Parts that were read are written elsewhere before their segment is reused. */
/* Sanitizers: thread */
#include "tests/unit/tier/nvme_rig.h"

#include "daemon/checkpoint/format.h"

TestSuite(nvme_move, .fini = rig_close);

#define PART 100000u
#define RECORDS 9u         /* in a segment of 1 MiB */
#define FULL (6 * RECORDS) /* of 8 segments two are free: with one less some are emptied */
#define SEGMENTS_MAX 16u

static void prepare_moving(unsigned files, uint64_t size, unsigned share)
{
    rig_init(files, size, 1 * MIB, CONFIG_IO_AUTO);
    rig.config.nvme_rewrite = share;
}

static void open_moving(unsigned files, uint64_t size, unsigned share)
{
    prepare_moving(files, size, share);
    rig_open();
    rig_memory(400, PART);
}

static void read_part(unsigned number)
{
    cr_assert_eq(rig_read_one(number), 0);
}

static unsigned place_segment(const struct tier_place *place)
{
    return (unsigned)((place_offset(place) - NVME_DATA_OFFSET) / (off_t)MIB);
}

static unsigned part_segment(unsigned number)
{
    return place_segment(&rig.parts[number].place);
}

/* The parts of the segment that is emptied first: its last part came before the last parts of the
 * others. That need not be the first segment in the file, because writes overtake one another. */
static unsigned first[RECORDS];

static void first_parts(void)
{
    unsigned last[SEGMENTS_MAX] = {0}, segment, n = 0;

    for (unsigned i = 0; i < rig.n && rig.parts[i].stored; i++) {
        cr_assert_lt(part_segment(i), SEGMENTS_MAX);
        last[part_segment(i)] = i;
    }
    segment = part_segment(0);
    for (unsigned s = 0; s < SEGMENTS_MAX; s++)
        if (last[s] > 0 && last[s] < last[segment])
            segment = s;
    for (unsigned i = 0; i < rig.n && rig.parts[i].stored; i++)
        if (part_segment(i) == segment)
            first[n++ % RECORDS] = i;
    cr_assert_eq(n, RECORDS);
}

/* One file, as full as it may be before a segment is emptied. */
static void open_full(unsigned share)
{
    open_moving(1, 9 * MIB, share);
    cr_assert_eq(rig_write(0, FULL, PART), FULL);
    first_parts();
}

/* Three parts of a segment are read, and writing goes on until it must have been reused. */
Test(nvme_move, what_was_read_stays)
{
    open_full(50);
    for (unsigned i = 2; i < 5; i++)
        read_part(first[i]);
    cr_assert_eq(rig_write(FULL, 10 * RECORDS, PART), 4 * RECORDS);
    for (unsigned i = 0; i < RECORDS; i++)
        cr_expect_eq(rig.parts[first[i]].stored, i >= 2 && i < 5, "part %u", first[i]);
    cr_expect_eq(rig.moves, 3u);
    cr_expect_eq(rig.metrics.nvme_rewritten, 3u);
    cr_expect_eq(rig.metrics.nvme_writes, 10 * RECORDS);
    cr_expect_eq(rig.metrics.nvme_stored_bytes, 10 * RECORDS * PART);
    cr_expect_geq(rig.metrics.nvme_syncs, 1u, "before their old places are written over");
    cr_expect_gt(rig_verify(), 5 * RECORDS);
}

/* A part that was kept once is not kept again for that. */
Test(nvme_move, it_must_be_read_again_to_stay_again)
{
    open_full(50);
    read_part(3);
    rig_write(FULL, 10 * RECORDS, PART);
    cr_assert(rig.parts[3].stored);
    rig_write(10 * RECORDS, 30 * RECORDS, PART);
    cr_expect_not(rig.parts[3].stored);
    cr_expect_eq(rig.moves, 1u);
}

Test(nvme_move, at_most_its_share_is_kept)
{
    unsigned kept = 0;

    open_full(50);
    for (unsigned i = 0; i < FULL; i++)
        read_part(i);
    rig_write(FULL, 7 * RECORDS, PART);
    for (unsigned i = 0; i < RECORDS; i++)
        kept += rig.parts[first[i]].stored;
    cr_expect_eq(kept, RECORDS / 2);
    /* and the log goes on for ever */
    cr_expect_eq(rig_write(7 * RECORDS, 40 * RECORDS, PART), 33 * RECORDS);
    rig_verify();
}

/* A third of all that the tier holds, and all of one segment. Nobody reads them, and they stay. */
Test(nvme_move, what_is_guaranteed_stays)
{
    open_full(50);
    for (unsigned i = 0; i < RECORDS; i++)
        rig.parts[first[i]].heat = TIER_HEAT_KEPT;
    for (unsigned i = 2 * RECORDS; i < 3 * RECORDS; i++)
        rig.parts[i].heat = TIER_HEAT_KEPT;
    cr_expect_eq(rig_write(FULL, 40 * RECORDS, PART), 34 * RECORDS);
    for (unsigned i = 0; i < FULL; i++)
        if (rig.parts[i].heat == TIER_HEAT_KEPT)
            cr_expect(rig.parts[i].stored, "part %u", i);
    cr_expect_geq(rig_verify(), 2 * RECORDS);
}

Test(nvme_move, without_a_shared_tier_nothing_is_moved)
{
    open_full(0);
    for (unsigned i = 0; i < RECORDS; i++)
        read_part(i);
    rig_write(FULL, 20 * RECORDS, PART);
    cr_expect_eq(rig.moves, 0u);
    cr_expect_eq(rig.metrics.nvme_rewritten, 0u);
}

Test(nvme_move, checking_a_part_is_no_use_of_it)
{
    open_full(50);
    rig.parts[first[3]].io.check = true;
    read_part(first[3]);
    rig_write(FULL, 10 * RECORDS, PART);
    cr_expect_not(rig.parts[first[3]].stored);
}

Test(nvme_move, several_files)
{
    open_moving(3, 9 * MIB, 50);
    rig_write(0, 20 * RECORDS, PART);
    for (unsigned i = 0; i < 20 * RECORDS; i += 7)
        if (rig.parts[i].stored)
            read_part(i);
    rig_write(20 * RECORDS, 40 * RECORDS, PART);
    cr_expect_gt(rig.moves, 0u);
    cr_expect_gt(rig_verify(), 12 * RECORDS);
}

/* A part whose bytes on disk have changed is not spread further. */
Test(nvme_move, what_is_damaged_is_not_moved)
{
    open_full(50);
    read_part(first[3]);
    read_part(first[4]);
    part_flip(first[3], NVME_PAGE + 77);
    rig_write(FULL, 10 * RECORDS, PART);
    cr_expect_not(rig.parts[first[3]].stored);
    cr_expect(rig.parts[first[4]].stored);
    cr_expect_eq(rig.metrics.nvme_corrupt, 1u);
    rig_verify();
}

/* There is a bad block in the victim. It goes into quarantine, so dropping its other parts would
 * make no space. */
Test(nvme_move, what_is_sound_in_a_segment_that_goes_into_quarantine_stays)
{
    open_moving(1, 17 * MIB, 50);
    rig.config.nvme_quarantine = 100;
    cr_assert_eq(rig_write(0, 13 * RECORDS, PART), 13 * RECORDS);
    first_parts();
    read_part(first[0]);
    part_flip(first[0], NVME_PAGE + 77);
    rig_write(13 * RECORDS, 40 * RECORDS, PART);
    cr_expect_eq(rig.metrics.nvme_quarantined_bytes, MIB);
    cr_expect_not(rig.parts[first[0]].stored);
    cr_expect_eq(rig.losses, 1u, "the callback of the part's user ran");
    for (unsigned i = 1; i < RECORDS; i++)
        cr_expect(rig.parts[first[i]].stored, "part %u", first[i]);
    rig_verify();
}

/* Iterations of the event loop until parts are being moved. */
static void run_until_moving(void)
{
    uint64_t reads = rig.metrics.nvme_reads;

    for (unsigned i = FULL; i < 10 * RECORDS; i++)
        cr_assert_eq(part_write(i, PART), 0);
    while (rig.under_way > 0 && rig.metrics.nvme_reads == reads)
        uv_run(&rig.loop, UV_RUN_ONCE);
    cr_assert_gt(rig.metrics.nvme_reads, reads);
}

Test(nvme_move, what_is_forgotten_meanwhile_stays_forgotten)
{
    open_full(50);
    for (unsigned i = 2; i < 5; i++)
        read_part(first[i]);
    run_until_moving();
    for (unsigned i = 2; i < 5; i++) {
        struct rig_part *p = &rig.parts[first[i]];

        if (!p->stored)
            continue;
        tier_nvme.forget(rig.tier, &p->place, PART);
        p->stored = false;
    }
    rig_run();
    rig_verify();
}

/* A caller that waits for the backlog gets a callback when its own write ends, and for no other. */
Test(nvme_move, what_moves_is_not_in_the_backlog)
{
    prepare_moving(1, 9 * MIB, 50);
    rig.config.nvme_write_queue_size = PART;
    rig_open();
    rig_memory(400, PART);
    for (unsigned i = 0; i < FULL; i++) {
        rig_write(i, i + 1, PART);
        read_part(i);
    }
    for (unsigned i = FULL; i < 10 * RECORDS; i++) {
        cr_assert_eq(part_write(i, PART), 0, "part %u", i);
        while (rig.under_way > 0)
            uv_run(&rig.loop, UV_RUN_ONCE);
    }
    cr_expect_gt(rig.moves, 0u);
    rig_run();
    rig_verify();
}

/* Records of the segment `number` that a file's checkpoint tells of. */
static uint32_t checkpoint_tells(unsigned file, uint32_t number)
{
    static uint8_t bytes[MIB];
    struct checkpoint_span r;
    uint32_t listed = 0;
    int fd = open(rig_file(file, NVME_INDEX_FILE), O_RDONLY | O_CLOEXEC);
    ssize_t n;

    cr_assert_geq(fd, 0);
    n = read(fd, bytes, sizeof(bytes));
    close(fd);
    unlink(rig_file(file, NVME_INDEX_FILE));
    cr_assert_gt(n, 0);
    for (size_t at = 0; at < (size_t)n; at += checkpoint_span_bytes(r.entries)) {
        cr_assert_eq(checkpoint_span_decode(bytes + at, (size_t)n - at, &r), 0);
        listed += r.segment == number ? r.to - r.from : 0;
    }
    return listed;
}

/* A moved part may lie in another file that is not synced. If a checkpoint said that the part is
 * not here any more, a power failure would lose it. */
Test(nvme_move, a_checkpoint_is_silent_about_a_segment_that_is_being_emptied)
{
    struct tier_place before[3 * FULL];
    uint32_t number = UINT32_MAX;
    unsigned file = 0;

    open_moving(2, 9 * MIB, 50);
    cr_assert_eq(rig_write(0, 2 * FULL, PART), 2 * FULL);
    for (unsigned i = 0; i < 2 * FULL; i++) {
        if (rig.parts[i].stored)
            read_part(i);
        before[i] = rig.parts[i].place;
    }
    for (unsigned i = 2 * FULL; i < 3 * FULL; i++)
        cr_assert_eq(part_write(i, PART), 0);
    while (rig.moves == 0)
        uv_run(&rig.loop, UV_RUN_ONCE);
    for (unsigned i = 0; i < 2 * FULL; i++) {
        if (!rig.parts[i].stored || rig.parts[i].place.loc == before[i].loc)
            continue;
        file = nvme_loc_file(before[i].loc);
        number = place_segment(&before[i]);
    }
    cr_assert_eq(tier_nvme.sync(rig.tier), 0);
    cr_expect_eq(checkpoint_tells(file, number), 0u);
    rig_run();
}

/* The last operation's end closes the tier, whatever is being moved then. */
Test(nvme_move, closed_while_it_moves)
{
    for (unsigned turns = 0; turns < 8; turns++) {
        open_full(50);
        for (unsigned i = 0; i < FULL; i++)
            read_part(i);
        for (unsigned i = FULL; i < FULL + 1 + 3 * turns; i++)
            cr_assert_eq(part_write(i, PART), 0);
        rig.close_when_done = true;
        rig_run();
        rig_close();
    }
}

/* Copies of purged parts belong to nobody. The segment that they come from is free again. It is not
 * kept out of use as if the copies could not be synced. */
Test(nvme_move, what_is_purged_meanwhile_costs_no_room)
{
    struct tier_ns_record naming;
    unsigned there = 0;

    open_moving(1, 9 * MIB, 50);
    rig_name(&naming, false);
    rig_run();
    for (unsigned round = 0; round < 7; round++) {
        unsigned from = round * FULL;

        cr_assert_eq(rig_write(from, from + FULL, PART), FULL, "round %u", round);
        for (unsigned i = from; i < from + FULL; i++)
            if (rig.parts[i].stored)
                read_part(i);
        rig_name(&naming, true);
        rig_run();
        cr_assert_null(naming.identity);
    }
    for (unsigned i = 6 * FULL; i < 7 * FULL; i++)
        there += rig.parts[i].stored;
    cr_expect_gt(there, 2 * RECORDS);
    cr_expect_gt(rig.moves, 0u);
}
