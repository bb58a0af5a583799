/* The daemon learns from the blocks that NVMe dropped which first uses are worth a write. */
#include "daemon/learn/learn.h"

#include <criterion/criterion.h>

static struct admission a;

static void setup(void)
{
    a = (struct admission){.hits = 0};
}

TestSuite(admission_counts, .init = setup);

static void let_go(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        cr_assert(admission_first(&a));
        admission_unused(&a);
    }
}

/* Blocks that NVMe dropped and that came back. */
static void come_back(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        admission_first(&a);
        admission_returned(&a);
    }
}

static void hits(uint32_t n)
{
    admission_hits(&a, n);
}

Test(admission_counts, everything_is_written_until_nvme_has_let_go_of_enough)
{
    hits(1000000);
    let_go(1000);
    cr_expect(!admission_reused_only(&a));
    for (uint32_t i = 0; i < 100; i++)
        admission_unused(&a);
    cr_expect(admission_reused_only(&a));
}

Test(admission_counts, hits_that_would_be_lost_count_against_all_hits)
{
    let_go(1000);
    hits(100000);
    for (uint32_t i = 0; i < 100; i++)
        admission_unused(&a);
    come_back(500);
    cr_expect(admission_reused_only(&a), "500 of 100,000");
    come_back(1000);
    cr_expect(!admission_reused_only(&a), "1,500 of 100,000");
    hits(200000);
    cr_expect(admission_reused_only(&a), "1,500 of 300,000");
}

Test(admission_counts, one_stretch_in_sixteen_is_written)
{
    uint32_t written = 0, in_a_row = 0, most = 0;

    hits(1000000);
    a.unused = 5000;
    for (uint32_t i = 0; i < 64 * 1024; i++) {
        bool first = admission_first(&a);

        written += first;
        in_a_row = first ? in_a_row + 1 : 0;
        most = in_a_row > most ? in_a_row : most;
    }
    cr_expect_leq(written, 4 * 1024u + 1024u);
    cr_expect_geq(written, 4 * 1024u - 1024u);
    cr_expect_geq(most, 1023u);
}

Test(admission_counts, old_counts_fade)
{
    a.unused = 1u << 20;
    for (uint32_t i = 0; i < 128; i++)
        hits(1u << 16);
    cr_expect_lt(a.unused, 1u << 19);
    cr_expect_leq(a.hits, 1u << 22);
}

Test(admission_counts, all_count_half_before_one_is_too_large)
{
    uint32_t *const counts[] = {&a.hits, &a.returned, &a.unused, &a.stored};

    for (unsigned i = 0; i < 4; i++) {
        a = (struct admission){.hits = 8, .stored = 8, .returned = 8, .unused = 8};
        *counts[i] = (1u << 22) - 1;
        if (i == 0)
            admission_hits(&a, 1);
        else if (i == 1)
            admission_returned(&a);
        else if (i == 2)
            admission_unused(&a);
        else
            (void)admission_first(&a);
        for (unsigned k = 0; k < 4; k++)
            cr_expect_eq(*counts[k], k == i ? 1u << 21 : 4u, "%u of %u", k, i);
    }
}
