/* The learner finds from references alone which blocks deserve more time than LRU gives them. */
#include "daemon/learn/learn.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>

#define BLOCKS 400u /* that DRAM holds: few enough that all are sampled */

static struct learner *l;

static void setup(void)
{
    cr_assert_eq(learner_new(&l), 0);
}

static void teardown(void)
{
    learner_free(l);
}

TestSuite(learner, .init = setup, .fini = teardown);

static uint64_t hash_of(uint64_t number)
{
    number *= UINT64_C(0x9e3779b97f4a7c15);
    return number ^ number >> 29;
}

static void refer(uint64_t number, uint32_t uses)
{
    learner_reference(l, hash_of(number), uses, BLOCKS);
}

/* A set of half of DRAM is used in turn. In between come so many blocks that never return that LRU
 * has lost the set each time. */
static void scans_of(uint32_t turns, uint32_t uses_least, uint32_t uses_most)
{
    static uint64_t other = UINT64_C(1) << 40;
    enum { SET = BLOCKS / 2 };

    for (uint32_t turn = 0; turn < turns; turn++)
        for (uint32_t i = 0; i < SET; i++) {
            refer(i, turn < uses_least ? uses_least : turn < uses_most ? turn : uses_most);
            for (int k = 0; k < 3; k++)
                refer(other++, 0);
        }
}

static void scans(uint32_t turns)
{
    scans_of(turns, 0, USES_MAX);
}

/* Each block is used several times within a short while, then never again. So a block with many
 * uses is dead, and a new one comes back. */
static void bursts(uint32_t blocks)
{
    static uint64_t next = UINT64_C(1) << 50;
    enum { APART = BLOCKS / 10 };

    for (uint32_t i = 0; i < blocks; i++, next++)
        for (uint32_t k = 0; k <= USES_MAX && next >= (UINT64_C(1) << 50) + k * APART; k++)
            refer(next - k * APART, k);
}

Test(learner, uses_earn_time_where_scans_pass)
{
    scans(40);
    cr_expect_gt(learner_bonus(l)[USES_ONE], learner_bonus(l)[0]);
    for (uint32_t u = 1; u < USES_CLASSES; u++)
        cr_expect_geq(learner_bonus(l)[u], learner_bonus(l)[u - 1]);
}

/* Of the blocks that come back, it is known only that they were there long ago. */
Test(learner, having_been_there_long_ago_earns_time_where_scans_pass)
{
    scans_of(40, USES_LATE, USES_LATE);
    cr_expect_gt(learner_bonus(l)[USES_LATE], learner_bonus(l)[0]);
}

Test(learner, unlearns_when_the_traffic_changes)
{
    int32_t most;

    scans(40);
    most = learner_bonus(l)[USES_MAX];
    bursts(40 * BLOCKS);
    cr_expect_lt(learner_bonus(l)[USES_MAX], most);
    cr_expect_leq(learner_bonus(l)[USES_MAX], BONUS_ONE);
    scans(80);
    cr_expect_gt(learner_bonus(l)[USES_ONE], learner_bonus(l)[0]);
}

/* The sample follows DRAM's size both ways, and its memory is bounded whatever comes. */
Test(learner, any_size_in_any_order)
{
    uint64_t r = 88172645463325252u, in_dram = 1;

    for (uint32_t i = 0; i < 500000; i++) {
        random_next(&r);
        if (i % 1000 == 0)
            in_dram = r % 3 == 0 ? in_dram / 4 + 1 : in_dram * 2 % (UINT64_C(1) << 26) + 1;
        learner_reference(l, hash_of(r % 5 == 0 ? r : r % 20000), (uint32_t)(r >> 40) % 20,
                          in_dram);
    }
}
