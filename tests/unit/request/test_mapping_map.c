/* Which slabs a client has to give back by when, by a clock of the test's own. */
#include "daemon/mapping/map.h"

#include <criterion/criterion.h>
#include <string.h>

#define SLABS 8

static struct mapped_slabs map;
static uint8_t state[SLABS];

static void open_all(void)
{
    memset(state, 0, sizeof state);
    mapped_slabs_init(&map, state, SLABS);
    for (uint32_t i = 0; i < SLABS; i++)
        cr_assert(mapped_slabs_grant(&map, i));
}

TestSuite(mapped_slabs, .init = open_all);

Test(mapped_slabs, granted_once)
{
    cr_expect_not(mapped_slabs_grant(&map, 3));
    mapped_slabs_release(&map, 3);
    cr_expect_not(mapped_slabs_has(&map, 3));
    cr_expect_not(mapped_slabs_revoke(&map, 3, 1000), "nobody maps it");
    cr_expect(mapped_slabs_grant(&map, 3));
    cr_expect_not(mapped_slabs_has(&map, SLABS));
    cr_expect_eq(map.due_ms, 0u);
}

Test(mapped_slabs, who_releases_in_time_is_not_late)
{
    cr_assert(mapped_slabs_revoke(&map, 2, 1000));
    cr_expect_not(mapped_slabs_revoke(&map, 2, 1001), "it is wanted back already");
    cr_expect_eq(map.due_ms, 6000u);
    mapped_slabs_release(&map, 2);
    cr_expect_eq(map.due_ms, 0u, "nothing is wanted back");
    cr_expect_eq(mapped_slabs_expire(&map, 6000), 0u);
    cr_expect_eq(map.due_ms, 0u);
}

/* A slab that is wanted back shortly before another one is due has a time of its own. */
Test(mapped_slabs, each_has_its_time)
{
    cr_assert(mapped_slabs_revoke(&map, 0, 1000));
    cr_assert(mapped_slabs_revoke(&map, 1, 5900));
    cr_expect_eq(mapped_slabs_expire(&map, 5999), 0u, "the timer was early");
    cr_expect_eq(map.due_ms, 6000u);
    mapped_slabs_release(&map, 0);
    cr_expect_eq(mapped_slabs_expire(&map, 6000), 0u, "100 ms are too few for the second one");
    cr_expect_eq(map.due_ms, 11000u);
    cr_assert(mapped_slabs_revoke(&map, 2, 10000));
    mapped_slabs_release(&map, 1);
    cr_expect_eq(mapped_slabs_expire(&map, 11000), 0u);
    cr_expect_eq(map.due_ms, 16000u);
    cr_expect_eq(mapped_slabs_expire(&map, 16000), 1u);
}

/* Slabs come and go at random. None is late before MAPPING_REVOKE_MS, and each that the client
 * keeps is late within twice that. */
Test(mapped_slabs, random_times)
{
    uint64_t since[SLABS] = {0}, now = 1;
    unsigned seed = 17;

    for (int step = 0; step < 200000; step++) {
        uint32_t i = (uint32_t)rand_r(&seed) % SLABS, late;

        now += (uint64_t)rand_r(&seed) % 700;
        while (map.due_ms > 0 && map.due_ms <= now) {
            uint64_t at = map.due_ms;

            late = mapped_slabs_expire(&map, at);
            for (uint32_t k = 0; k < SLABS && late == 0; k++)
                cr_assert(since[k] == 0 || at < since[k] + 2 * MAPPING_REVOKE_MS);
            for (uint32_t k = 0; k < SLABS && late > 0; k++)
                if (since[k] > 0 && at >= since[k] + MAPPING_REVOKE_MS) {
                    mapped_slabs_release(&map, k);
                    cr_assert(mapped_slabs_grant(&map, k));
                    since[k] = 0;
                    late--;
                }
            cr_assert_eq(late, 0u, "one was late before its time");
        }
        if (since[i] == 0 && mapped_slabs_revoke(&map, i, now)) {
            since[i] = now;
        } else if (rand_r(&seed) % 2) {
            mapped_slabs_release(&map, i);
            cr_assert(mapped_slabs_grant(&map, i));
            since[i] = 0;
        }
    }
}

Test(mapped_slabs, names_of_a_release)
{
    const uint32_t good[] = {7, 0, 3}, twice[] = {7, 0, 7}, other[] = {7, SLABS, 0};
    uint32_t bad;
    bool again;

    cr_assert(mapped_slabs_revoke(&map, 0, 1000));
    cr_expect(mapped_slabs_names(&map, good, 3, &bad, &again));
    cr_expect_not(mapped_slabs_names(&map, twice, 3, &bad, &again));
    cr_expect(bad == 2 && again);
    cr_expect_not(mapped_slabs_names(&map, other, 3, &bad, &again));
    cr_expect(bad == 1 && !again);
    cr_expect(mapped_slabs_names(&map, good, 3, &bad, &again), "no mark is left");
    mapped_slabs_release(&map, 7);
    cr_expect_not(mapped_slabs_names(&map, good, 3, &bad, &again));
    cr_expect(bad == 0 && !again);
}
