/* Lookup tables alongside a cache, without memory and with much of it. test_cache_random.c compares
 * them with lookups whatever happens. tests/integration/test_lookup_table.py makes them grow. */
#include "tests/unit/cache/lookup_table_rig.h"

#include <sys/resource.h>

TestSuite(lookup_table, .init = rig_open, .fini = rig_close);

/* true: this process can open no further files from now on; false: as many as before. */
static void files_limit(bool limited)
{
    static struct rlimit before;
    struct rlimit none;

    if (before.rlim_cur == 0)
        cr_assert_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = limited ? 3 : before.rlim_cur;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
}

/* A table that can't be replaced reports blocks without room as missing. */
Test(lookup_table, no_memory_for_a_larger_table)
{
    uint64_t found = 0, n = 700;
    struct ucm_lookup_table_view v;

    files_limit(true);
    cr_assert_lt(lookup_tables_ref(rig.lookup_tables, rig.one, NULL), 0);
    cr_assert_null(rig.one->follower);
    files_limit(false);
    cr_assert_eq(lookup_tables_ref(rig.lookup_tables, rig.one, NULL), 0);
    iterations(5);
    v = lookup_table_view(rig.one);
    files_limit(true);
    for (uint64_t i = 0; i < n; i++)
        drop(store_below(rig.one, i));
    files_limit(false);
    cr_expect_eq(lookup_table_state(&v), UCM_LOOKUP_TABLE_LIVE);
    for (uint64_t i = 0; i < n; i++) {
        cr_assert(lookup_table_found(&v, i) == 0 || lookup_table_found(&v, i) == UCM_LOOKUP_NVME);
        found += lookup_table_found(&v, i) != 0;
    }
    cr_expect_lt(found, n);
    cr_expect_eq(found + atomic_load(&v.header->left_out), n);
    lookup_tables_unref(rig.lookup_tables, rig.one);
    lookup_table_view_close(&v);
}

static uint64_t bytes_of_tables(void)
{
    struct lookup_tables_stats stats;

    lookup_tables_stats(rig.lookup_tables, &stats);
    return stats.bytes;
}

/* Both tables are counted, and both end with the last follower. */
Test(lookup_table, a_larger_table_that_is_being_filled)
{
    struct ucm_lookup_table_view v;
    uint64_t before, n = 0;

    cr_assert_eq(lookup_tables_ref(rig.lookup_tables, rig.one, NULL), 0);
    iterations(5);
    v = lookup_table_view(rig.one);
    before = bytes_of_tables();
    while (bytes_of_tables() == before) {
        cr_assert_lt(n, 900u);
        drop(store_below(rig.one, n++));
    }
    cr_assert_eq(lookup_table_state(&v), UCM_LOOKUP_TABLE_LIVE, "the larger one has begun");
    for (uint64_t was = atomic_load(&v.header->beat_ms); atomic_load(&v.header->beat_ms) == was;)
        lookup_tables_beat(rig.lookup_tables);
    lookup_table_agree(rig.one, n);
    lookup_tables_unref(rig.lookup_tables, rig.one);
    cr_expect_eq(lookup_table_state(&v), UCM_LOOKUP_TABLE_ENDED);
    iterations(5);
    lookup_table_view_close(&v);
}

/* A thread gives back the memory of a large table. Meanwhile the next table serves. */
Test(lookup_table, large_tables_end_alongside_the_loop)
{
    struct ucm_lookup_table_view v;

    for (unsigned i = 0; i < 3; i++) {
        rig.one->blocks += 100000; /* so large */
        cr_assert_eq(lookup_tables_ref(rig.lookup_tables, rig.one, NULL), 0);
        v = lookup_table_view(rig.one);
        rig.one->blocks -= 100000;
        cr_expect_gt(v.mask, 16383u);
        iterations(40);
        cr_expect_eq(lookup_table_state(&v), UCM_LOOKUP_TABLE_LIVE);
        lookup_tables_unref(rig.lookup_tables, rig.one);
        cr_expect_eq(lookup_table_state(&v), UCM_LOOKUP_TABLE_ENDED);
        lookup_table_view_close(&v);
    }
}
