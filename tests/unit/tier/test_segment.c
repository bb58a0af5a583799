#include "daemon/tier/segment.h"

#include "daemon/format/nvme_format.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#define MIB (1ull << 20)
#define STRIDE (MIB / 8) /* 7 records in a segment of 1 MiB */
#define RECORDS 7

static struct segment_table table;
static unsigned heat[4096]; /* by owner */
static bool refuse[4096];
static unsigned asked, looked, lost;

static bool drop_cb(void *ctx, uint64_t owner, uint64_t loc)
{
    struct segment *of;
    uint32_t at;

    (void)ctx;
    asked++;
    cr_assert_eq(segment_find(&table, loc, 1, &of, &at), 0);
    cr_assert_eq(of->owners[at], owner);
    lost += !refuse[owner];
    return !refuse[owner];
}

static unsigned heat_cb(void *ctx, uint64_t owner)
{
    (void)ctx;
    looked++;
    return refuse[owner] ? TIER_HEAT_BUSY : heat[owner];
}

static const struct tier_callbacks callbacks = {.drop_cb = drop_cb, .heat_cb = heat_cb};

static void close_table(void)
{
    segment_table_close(&table);
}

TestSuite(segment, .fini = close_table);

static void table_init(uint64_t a, uint64_t b)
{
    uint64_t counts[] = {a, b};

    cr_assert_eq(segment_table_init(&table, MIB, 1000, counts, 2), 0);
}

static struct segment *s; /* where the last record lies */
static uint32_t record;
static uint64_t dropped;

static void put(uint32_t file, uint64_t owner)
{
    cr_assert_eq(segment_reserve(&table, file, STRIDE, owner, &s, &record), 0);
    segment_written(&table, s, record, true);
}

/* Fills whole segments of file 0; owner: a running number. */
static void fill(unsigned from, unsigned segments)
{
    for (unsigned i = 0; i < segments * RECORDS; i++)
        put(0, from + i);
}

static void full(unsigned segments)
{
    table_init(segments, 0);
    fill(0, segments);
}

static int reclaim(uint32_t most)
{
    return segment_reclaim(&table, &callbacks, most, &dropped);
}

/* All records of it but the last `left`. */
static void forget(unsigned segment, unsigned left)
{
    for (unsigned k = 0; k < RECORDS - left; k++)
        segment_forget(&table, &table.file[0].segments[segment], k);
}

static bool holds(uint64_t owner)
{
    for (unsigned i = 0; i < table.file[0].count; i++) {
        const struct segment *it = &table.file[0].segments[i];

        for (unsigned k = 0; it->state != SEGMENT_FREE && k < it->next; k++)
            if (it->owners[k] == owner && it->states[k] == RECORD_LIVE)
                return true;
    }
    return false;
}

Test(segment, records_follow_each_other_and_fill)
{
    struct segment *first = NULL;

    table_init(2, 0);
    for (unsigned i = 0; i < 2 * RECORDS; i++) {
        cr_assert_eq(segment_reserve(&table, 0, STRIDE, i, &s, &record), 0);
        first = first ? first : s;
        cr_assert_eq(record, i % RECORDS);
        cr_assert_eq(s == first, i < RECORDS);
        cr_assert_eq(segment_has_next(s, record, STRIDE), record < RECORDS - 1);
        cr_assert_leq(segment_record_offset(&table, s, record) + STRIDE, MIB + 2 * MIB);
        segment_written(&table, s, record, true);
    }
    cr_assert_eq(segment_reserve(&table, 0, STRIDE, 0, &s, &record), -ENOSPC);
    cr_assert_eq(segment_reserve(&table, 1, STRIDE, 0, &s, &record), -ENOSPC);
    cr_assert_eq(table.used_bytes, 2 * RECORDS * STRIDE);
}

Test(segment, the_coldest_of_the_old_goes_first)
{
    full(8);
    for (unsigned i = 0; i < 8 * RECORDS; i++)
        heat[i] = i / RECORDS == 2 ? 0 : 3;
    cr_assert_eq(reclaim(UINT32_MAX), 0);
    cr_assert_eq(dropped, RECORDS);
    cr_assert_not(holds(2 * RECORDS));
    memset(heat, 0, sizeof(heat)); /* all alike: the oldest */
    cr_assert_eq(reclaim(UINT32_MAX), 0);
    cr_assert_not(holds(0));
    cr_assert(holds(RECORDS));
}

/* The newest records are not lost just because their segment has few others. */
Test(segment, who_drops_takes_the_oldest_however_full)
{
    full(8);
    forget(6, 1); /* of the youngest but one */
    cr_assert_eq(reclaim(UINT32_MAX), 0);
    cr_assert_eq(dropped, RECORDS);
    cr_expect_not(holds(0));
}

Test(segment, who_moves_takes_the_emptiest_whose_records_have_a_place)
{
    bool sparse;

    table_init(8, 0);
    fill(0, 7);
    forget(6, 1);
    cr_expect_eq(segment_victim(&table, &callbacks, &sparse), &table.file[0].segments[0]);
    cr_expect_not(sparse, "a segment would be opened for what it frees");
    forget(4, 3);
    cr_expect_eq(segment_victim(&table, &callbacks, &sparse), &table.file[0].segments[6]);
    cr_expect(sparse, "both go into one");
    put(0, 500);
    for (unsigned k = RECORDS - 3; k < RECORDS; k++)
        segment_forget(&table, &table.file[0].segments[4], k);
    cr_expect_eq(segment_victim(&table, &callbacks, &sparse), &table.file[0].segments[6]);
    cr_expect(sparse, "to what is open");
}

/* A start finds segments in the order of their places, and the newest may come first. */
Test(segment, what_a_start_found_goes_by_its_age)
{
    table_init(64, 0);
    for (unsigned i = 0; i < 64; i++) {
        cr_assert_eq(segment_adopt(&table, 0, i, i + 1, STRIDE, &s), 0);
        for (unsigned k = 0; k < RECORDS; k++)
            segment_restore(&table, s, k, i * RECORDS + k + 1, 1000 - 10 * i + k);
        segment_read_end(&table, s);
    }
    segment_restored(&table);
    for (unsigned i = 64; i-- > 60;) {
        cr_assert_eq(reclaim(UINT32_MAX), 0);
        cr_expect_not(holds(i * RECORDS + 1), "%u", i);
    }
    cr_expect(holds(1));
}

Test(segment, the_last_forgotten_record_frees_it)
{
    full(2);
    for (unsigned k = 0; k < RECORDS; k++) {
        cr_assert(list_empty(&table.file[0].free));
        segment_forget(&table, &table.file[0].segments[0], k);
    }
    cr_assert_not(list_empty(&table.file[0].free));
    cr_assert_null(table.file[0].segments[0].owners, "memory is for segments in use");
}

Test(segment, refusals_are_asked_for_a_bounded_number_of_times)
{
    full(64);
    for (unsigned i = 0; i < 64; i++)
        refuse[i * RECORDS + 1] = true; /* 0 is no owner */
    cr_assert_eq(reclaim(UINT32_MAX), -ENOSPC);
    cr_assert_eq(asked, 0);
    cr_assert_leq(looked, 16 * RECORDS);
    cr_assert_eq(lost, dropped);
    refuse[63 * RECORDS + 1] = false; /* records that refused once are asked again */
    for (unsigned i = 0; i < 100; i++)
        if (reclaim(UINT32_MAX) == 0)
            break;
    cr_assert_not(holds(63 * RECORDS + 1));
}

Test(segment, busy_neighbours_spare_the_others)
{
    full(2);
    heat[3] = TIER_HEAT_BUSY;
    cr_assert_eq(reclaim(UINT32_MAX), 0);
    cr_assert(holds(0));
    cr_assert_eq(reclaim(UINT32_MAX), -ENOSPC);
    cr_assert_eq(dropped, 0);
}

Test(segment, a_segment_leaves_in_as_many_calls_as_it_takes)
{
    full(2);
    s = &table.file[0].segments[0];
    cr_assert_eq(reclaim(3), -EAGAIN);
    cr_expect_eq(dropped, 3u);
    segment_forget(&table, s, 4);
    cr_expect_eq(segment_victim(&table, &callbacks, NULL), &table.file[0].segments[1]);
    cr_assert_eq(reclaim(2), -EAGAIN);
    cr_expect_eq(dropped, 2u);
    cr_assert_eq(reclaim(2), 0);
    cr_expect_eq(dropped, 1u);
    cr_expect_eq(s->state, SEGMENT_FREE);
    cr_expect(holds(RECORDS), "the other was not touched");
}

/* A part of it comes into use, or it goes into quarantine, between two calls. */
Test(segment, what_can_leave_no_more_stays_and_another_goes)
{
    for (int withheld = 0; withheld < 2; withheld++) {
        full(2);
        cr_assert_eq(reclaim(3), -EAGAIN);
        if (withheld)
            cr_assert(segment_quarantine(&table, &table.file[0].segments[0]));
        else
            refuse[5] = true;
        cr_assert_eq(reclaim(100), -EAGAIN);
        cr_expect(holds(5));
        cr_expect_eq(table.file[0].segments[0].reads, 0u);
        cr_assert_eq(reclaim(100), 0);
        cr_expect_eq(dropped, RECORDS);
        cr_expect(holds(5));
        refuse[5] = false;
        segment_table_close(&table);
    }
}

Test(segment, what_is_under_way_is_not_reused)
{
    struct segment *emptied;

    table_init(2, 0);
    emptied = &table.file[0].segments[0];
    fill(0, 1);
    for (unsigned i = 0; i < RECORDS; i++)
        cr_assert_eq(segment_reserve(&table, 0, STRIDE, 100 + i, &s, &record), 0);
    segment_read_begin(emptied);
    cr_assert_eq(reclaim(UINT32_MAX), -ENOSPC);
    cr_assert_eq(asked, 0);
    for (unsigned i = 0; i < RECORDS; i++)
        segment_written(&table, s, i, i > 0);
    cr_assert_eq(reclaim(UINT32_MAX), 0);
    cr_assert_eq(dropped, RECORDS - 1);
    forget(0, 0);
    cr_assert_eq(emptied->state, SEGMENT_CLOSED, "a read is under way");
    segment_read_end(&table, emptied);
    cr_assert_eq(emptied->state, SEGMENT_FREE);
}

Test(segment, a_victim_is_left_as_it_is_until_it_is_taken)
{
    table_init(8, 0);
    cr_expect_not(segment_short(&table));
    fill(0, 6);
    cr_expect_not(segment_short(&table), "two are free");
    fill(6 * RECORDS, 2);
    cr_expect(segment_short(&table));
    for (unsigned i = 0; i < 8 * RECORDS; i++)
        heat[i] = i / RECORDS == 3 ? 0 : 3;
    s = segment_victim(&table, &callbacks, NULL);
    cr_assert_eq(s, &table.file[0].segments[3]);
    cr_expect_eq(s->live, RECORDS);
    cr_expect_eq(asked, 0);
    segment_read_begin(s);
    cr_expect_neq(segment_victim(&table, &callbacks, NULL), s, "it is being emptied");
    segment_forget(&table, s, 2);
    segment_take(&table, s, &callbacks, UINT32_MAX, &dropped);
    cr_expect_eq(dropped, RECORDS - 1);
    cr_expect_eq(s->state, SEGMENT_CLOSED);
    segment_read_end(&table, s);
    cr_expect_eq(s->state, SEGMENT_FREE);
}

Test(segment, a_use_counts_for_one_opening)
{
    table_init(1, 0);
    put(0, 1);
    cr_expect_eq(s->used[record], 0);
    s->used[record] = 1;
    for (unsigned i = 1; i < RECORDS; i++)
        put(0, 1);
    for (unsigned i = 0; i < RECORDS; i++)
        segment_forget(&table, s, i);
    cr_assert_eq(s->state, SEGMENT_FREE);
    cr_assert_eq(segment_reserve(&table, 0, STRIDE, 1, &s, &record), 0);
    cr_expect_eq(s->used[record], 0);
    segment_written(&table, s, record, true);
}

/* There are more sizes than segments that may be open. None is closed after a record or two. */
Test(segment, many_strides_share)
{
    unsigned stored = 0;

    table_init(8, 0);
    for (unsigned i = 0; i < 40; i++) {
        uint64_t stride = STRIDE - i % 8 * NVME_PAGE;

        if (segment_reserve(&table, 0, stride, i, &s, &record) < 0)
            break;
        cr_assert_geq((uint64_t)s->stride_pages * NVME_PAGE, stride);
        segment_written(&table, s, record, true);
        stored++;
    }
    cr_assert_eq(stored, 40);
}

Test(segment, a_stopped_file_takes_nothing_and_keeps_what_it_has)
{
    uint64_t loc;

    table_init(4, 0);
    put(0, 1);
    loc = segment_loc(&table, s, record);
    segment_file_stop(&table, 0);
    cr_assert_not(segment_has_space(&table, 0, STRIDE, 0));
    cr_assert_not(segment_writable(&table));
    cr_assert_eq(reclaim(UINT32_MAX), -ENOSPC);
    cr_assert_eq(segment_find(&table, loc, 1000, &s, &record), 0);
}

/* Its segments come before the others' in the lists. */
Test(segment, a_stopped_file_does_not_hide_the_others)
{
    table_init(400, 3);
    fill(0, 399);
    for (unsigned i = 0; i < 3 * RECORDS; i++)
        put(1, 3000 + i);
    segment_file_stop(&table, 0);
    cr_expect_eq(reclaim(UINT32_MAX), 0);
    cr_expect_eq(dropped, RECORDS);
    segment_file_start(&table, 0);
    cr_expect_eq(reclaim(UINT32_MAX), 0);
    cr_expect_not(holds(0), "its oldest is the oldest of all");
}

/* In whatever state a segment is when a bad block is found, it can still be read, and is never
 * written again. */
Test(segment, what_is_in_quarantine_is_not_reused)
{
    struct segment *free_one, *open_one, *closed;
    uint64_t capacity;

    table_init(4, 0);
    capacity = table.capacity_bytes;
    fill(0, 1);
    cr_assert_eq(segment_reserve(&table, 0, STRIDE, 100, &open_one, &record), 0);
    segment_written(&table, open_one, record, true);
    closed = &table.file[0].segments[0];
    free_one = &table.file[0].segments[3];
    cr_assert(segment_quarantine(&table, closed));
    cr_assert(segment_quarantine(&table, open_one));
    cr_assert(segment_quarantine(&table, free_one));
    cr_assert_not(segment_quarantine(&table, closed), "it is there already");
    cr_assert_eq(table.capacity_bytes, capacity - 3 * MIB);
    cr_assert_eq(table.file[0].quarantined, 3);
    cr_assert_eq(segment_find(&table, segment_loc(&table, open_one, 0), 1000, &s, &record), 0);
    fill(200, 1); /* the one that is left */
    cr_assert_eq(segment_reserve(&table, 0, STRIDE, 1, &s, &record), -ENOSPC);
    /* emptied: still not reused, and no victim */
    forget(0, 0);
    segment_forget(&table, open_one, 0);
    cr_assert_eq(closed->state, SEGMENT_FREE);
    cr_assert_eq(segment_reserve(&table, 0, STRIDE, 1, &s, &record), -ENOSPC);
    cr_assert_eq(reclaim(UINT32_MAX), 0);
    cr_assert_eq(segment_reserve(&table, 0, STRIDE, 1, &s, &record), 0);
    cr_assert_eq(s->number, 2);
    /* an earlier run's records in it are found again, and it stays in its list */
    cr_assert_eq(segment_adopt(&table, 0, 3, 5, STRIDE, &s), 0);
    segment_restore(&table, s, 0, 1, 5);
    segment_read_end(&table, s);
    segment_forget(&table, s, 0);
    cr_assert_eq(segment_reserve(&table, 0, STRIDE, 1, &s, &record), 0);
    cr_assert_eq(s->number, 2);
}
