#include "daemon/cuda/costs.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1ull << 20)

static struct costs_table t;

static void setup(void)
{
    costs_default(&t);
}

TestSuite(costs, .init = setup);

/* The strategy for copies of that shape, of `bytes` together. */
static enum copy_strategy pick(uint64_t width, uint32_t rows, uint64_t bytes, bool busy)
{
    uint32_t n = (uint32_t)(bytes / width / rows);
    struct plan_extent *extents = calloc(n, sizeof(*extents));
    enum copy_strategy s;

    for (uint32_t i = 0; i < n; i++)
        extents[i] = (struct plan_extent){.width = width, .rows = rows};
    s = costs_pick(&t.of[UCM_COPY_LOAD], extents, n, bytes, busy);
    free(extents);
    return s;
}

Test(costs, large_runs_go_to_the_engines)
{
    cr_assert_eq(pick(2 * MIB, 1, 32 * MIB, false), COPY_DMA);
    cr_assert_eq(pick(512 * 1024, 1, 32 * MIB, true), COPY_DMA);
    cr_assert_eq(pick(32768, 64, 32 * MIB, false), COPY_DMA, "rows of a block");
}

Test(costs, crumbs_go_to_the_kernel)
{
    cr_assert_eq(pick(4096, 1, 8 * MIB, false), COPY_SM);
    cr_assert_eq(costs_pick(&t.of[0], NULL, 0, MIB, true), COPY_SM, "nothing for the engines");
}

Test(costs, a_busy_gpu_is_left_alone_where_the_engines_are_not_hopeless)
{
    cr_assert_eq(pick(16384, 32, 32 * MIB, true), COPY_DMA);
    cr_assert_eq(pick(16384, 32, 32 * MIB, false), COPY_SM);
    cr_assert_eq(pick(32768, 32, 32 * MIB, false), COPY_DMA);
    cr_assert_eq(pick(4096, 32, 32 * MIB, true), COPY_DMA);
    cr_assert_eq(pick(4096, 8, 32 * MIB, false), COPY_SM);
    cr_assert_eq(pick(4096, 8, 32 * MIB, true), COPY_DMA);
}

Test(costs, text_reads_back)
{
    char text[COSTS_TEXT_BYTES];
    struct costs_table back;

    costs_format(&t, "GPU-1/580", text);
    cr_assert_eq(costs_parse(&back, "GPU-1/580", text), 0);
    cr_assert_float_eq(back.of[1].op_ns, t.of[1].op_ns, 0.1);
    cr_assert_float_eq(back.of[0].byte_ns, t.of[0].byte_ns, 1e-5);
    cr_assert_eq(text[strlen(text) - 1], '\n');
}

Test(costs, what_is_wrong_is_not_believed)
{
    char text[COSTS_TEXT_BYTES], bad[COSTS_TEXT_BYTES + 8];
    struct costs_table back;

    costs_format(&t, "GPU-1/580", text);
    cr_assert_lt(costs_parse(&back, "GPU-1/590", text), 0, "another driver");
    cr_assert_lt(costs_parse(&back, "GPU-2/580", text), 0, "another GPU");
    cr_assert_lt(costs_parse(&back, "GPU-1/580", ""), 0);
    cr_assert_lt(costs_parse(&back, "GPU-1/580", "ucm-copy 3 GPU-1/580 nan nan"), 0);
    snprintf(bad, sizeof(bad), "%.*s 7", (int)strlen(text) - 1, text);
    cr_assert_lt(costs_parse(&back, "GPU-1/580", bad), 0, "more than there is to say");
    for (size_t n = 0; n + 8 < strlen(text); n += 7) {
        snprintf(bad, sizeof(bad), "%.*s", (int)n, text);
        cr_assert_lt(costs_parse(&back, "GPU-1/580", bad), 0, "cut at %zu", n);
    }
    cr_assert(costs_undisturbed(&t));
    t.of[0].kernel_byte_ns *= 2;
    cr_assert(!costs_undisturbed(&t));
    t.of[1].op_ns = -1;
    costs_format(&t, "GPU-1/580", text);
    cr_assert_lt(costs_parse(&back, "GPU-1/580", text), 0, "a figure that can't be");
}

Test(costs, wide_rows_are_cut_into_runs)
{
    struct plan_extent extents[8] = {{1000, 5000000, 600000, 1000000, 512 * 1024, 4},
                                     {9, 7, 4096, 8192, 4096, 3}};

    cr_assert_eq(costs_cut(&t.of[0], extents, 2, 4), 2, "no room");
    cr_assert_eq(extents[0].rows, 4);
    cr_assert_eq(costs_cut(&t.of[0], extents, 2, 8), 5);
    cr_assert_eq(extents[0].rows, 1);
    cr_assert_eq(extents[1].rows, 3, "narrow ones stay");
    cr_assert_eq(extents[4].slot, 1000 + 3 * 600000);
    cr_assert_eq(extents[4].page, 5000000 + 3 * 1000000);
    cr_assert(extents[4].rows == 1 && extents[4].width == 512 * 1024);
}

Test(costs, entries_must_save_more_alongside_those_who_wait_for_each_kernel)
{
    cr_assert(costs_staged_pays(95, 100, false));
    cr_assert_not(costs_staged_pays(98, 100, false));
    cr_assert(costs_staged_pays(20, 100, true));
    cr_assert_not(costs_staged_pays(70, 100, true), "the engines take nothing from others");
}

Test(costs, rows_between_the_measured_widths)
{
    struct plan_extent narrow = {.width = 4096, .rows = 10}, wide = {.width = 65536, .rows = 10};
    struct plan_extent middle = {.width = 34816, .rows = 10};
    struct costs c = t.of[0];
    double byte_ns = c.byte_ns;

    c.row_ns[0] = 200;
    c.row_ns[1] = 100;
    cr_assert_float_eq(costs_dma_ns(&c, &narrow, 1), c.op_ns + 2000 + 40960 * byte_ns, 1e-3);
    cr_assert_float_eq(costs_dma_ns(&c, &middle, 1), c.op_ns + 1500 + 348160 * byte_ns, 1e-3);
    cr_assert_float_eq(costs_dma_ns(&c, &wide, 1), c.op_ns + 1000 + 655360 * byte_ns, 1e-3);
}
