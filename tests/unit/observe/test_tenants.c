#include "daemon/observe/tenants.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static struct tenants all;

Test(tenants, a_tenant_keeps_its_place)
{
    struct metrics_tenant *a = tenants_find(&all, "a"), *b = tenants_find(&all, "b");

    cr_assert_neq(a, b);
    cr_assert_eq(tenants_find(&all, "a"), a);
    cr_assert_str_eq(b->name, "b");
    cr_assert_eq(all.n, 2);
}

Test(tenants, those_beyond_the_labels_are_counted_together)
{
    char name[32];

    for (unsigned i = 0; i < 1000; i++) {
        snprintf(name, sizeof(name), "uid:%u", i);
        tenants_find(&all, name)->lookups++;
    }
    cr_assert_eq(all.n, EXPOSITION_TENANTS);
    cr_assert_str_eq(all.at[TENANTS_MAX].name, "other");
    cr_assert_eq(all.at[TENANTS_MAX].lookups, 1000 - TENANTS_MAX);
    cr_assert_eq(tenants_find(&all, "uid:3"), &all.at[3]);
}

/* The configuration refuses the name; a namespace on disk may be older than that. */
Test(tenants, one_that_is_called_other_shares_that_label)
{
    struct metrics_tenant *other = tenants_find(&all, "other");
    char name[32];

    for (unsigned i = 0; i < 100; i++) {
        snprintf(name, sizeof(name), "uid:%u", i);
        tenants_find(&all, name);
    }
    cr_assert_eq(tenants_find(&all, "uid:99"), other);
    cr_assert_eq(all.n, TENANTS_MAX);
}

Test(tenants, each_has_times_of_its_own)
{
    struct metrics_tenant *a = tenants_find(&all, "a"), *b = tenants_find(&all, "b");

    cr_assert_neq(tenants_times(&all, a), tenants_times(&all, b));
    cr_assert_eq(tenants_times(&all, b), tenants_times(&all, tenants_find(&all, "b")));
}

Test(tenants, clearing_leaves_counters_alone)
{
    struct metrics_tenant *t = tenants_find(&all, "a");

    t->lookups = t->blocks = t->dram_bytes = 5;
    tenants_gauges_clear(&all);
    cr_assert_eq(t->lookups, 5);
    cr_assert_eq(t->blocks, 0);
    cr_assert_eq(t->dram_bytes, 0);
}
