/* Small numbers for pointers, against a plain model. */
#include "daemon/base/table.h"

#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <stdlib.h>

Test(table, an_empty_one_knows_no_number)
{
    struct table t;

    table_init(&t, 4);
    for (uint32_t i = 0; i < 8; i++) {
        cr_expect_null(table_get(&t, i));
        cr_expect_null(table_remove(&t, i));
    }
    cr_expect_null(table_get(&t, UINT32_MAX));
    cr_expect_eq(table_count(&t), 0u);
    cr_expect_eq(table_next(&t, 0), 0u);
    table_close(&t);
}

Test(table, numbers_run_from_one_to_the_bound)
{
    struct table t;
    int item;

    for (uint32_t max = 1; max < 70; max += 23) {
        table_init(&t, max);
        for (uint32_t i = 1; i <= max; i++)
            cr_assert_eq(table_add(&t, &item), i);
        cr_expect_eq(table_add(&t, &item), 0u, "full");
        cr_expect_eq(table_count(&t), max);
        table_close(&t);
    }
}

/* A stale number is likely to be noticed: a freed number is the last to be used again. */
Test(table, a_freed_number_is_reused_last)
{
    struct table t;
    int item;

    table_init(&t, 3);
    for (int i = 0; i < 3; i++)
        cr_assert_neq(table_add(&t, &item), 0u);
    cr_expect_eq(table_remove(&t, 2), &item);
    cr_expect_null(table_remove(&t, 2), "removed once");
    cr_expect_eq(table_remove(&t, 1), &item);
    cr_expect_eq(table_add(&t, &item), 2u);
    cr_expect_eq(table_add(&t, &item), 1u);
    table_close(&t);
}

#define MAX 100

Test(table, random_ops_against_a_model)
{
    static int items[1000];
    void *model[MAX + 1] = {NULL};
    uint32_t count = 0, seen;
    struct table t;

    table_init(&t, MAX);
    for (int op = 0; op < 100000; op++) {
        /* it fills up and empties by turns */
        bool add = below(100) < (op / 5000 % 2 ? 30u : 70u);
        uint32_t number = 1 + below(MAX);

        if (add) {
            void *item = &items[op % 1000];

            number = table_add(&t, item);
            cr_assert_eq(number == 0, count == MAX);
            if (number != 0) {
                cr_assert(number <= MAX && !model[number], "in use already");
                model[number] = item;
                count++;
            }
        } else {
            cr_assert_eq(table_remove(&t, number), model[number]);
            count -= model[number] != NULL;
            model[number] = NULL;
        }
        cr_assert_eq(table_count(&t), count);
        cr_assert_eq(table_get(&t, number), model[number]);
    }
    seen = 0;
    for (uint32_t i = table_next(&t, 0); i; i = table_next(&t, i)) {
        cr_assert_eq(table_get(&t, i), model[i]);
        cr_assert_not_null(table_remove(&t, i), "the present one may be removed");
        seen++;
    }
    cr_expect_eq(seen, count);
    cr_expect_eq(table_count(&t), 0u);
    table_close(&t);
}
