/* The words that daemon and copy agent share. An order is either claimed or revoked, never both. An
 * abandoned ring is never claimed again. An order that reaches outside of its entry or region is
 * refused. */
/* Sanitizers: thread */
#include "proto/memory/staging.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct ucm_staging *ring;

static void setup(void)
{
    ring = calloc(1, sizeof(*ring));
}

static void teardown(void)
{
    free(ring);
}

TestSuite(staging, .init = setup, .fini = teardown);

Test(staging, layout_is_the_pages)
{
    cr_assert_eq(sizeof(struct ucm_staging), 139264);
    cr_assert_eq(offsetof(struct ucm_staging_words, entries), 64);
    cr_assert_eq(offsetof(struct ucm_staging_words, soon), 16);
    cr_assert_eq(offsetof(struct ucm_staging, orders), 4096);
    cr_assert_eq(sizeof(struct ucm_staging_order), 16448);
}

Test(staging, tags_tell_generations_apart)
{
    for (uint32_t turn = 0; turn < 3; turn++) {
        cr_assert_eq(ucm_staging_generation(ucm_staging_tag(7, turn)), 7);
        cr_assert_neq(ucm_staging_tag(7, turn), ucm_staging_tag(8, turn));
    }
    cr_assert_eq(ucm_staging_tag(4095, UCM_STAGING_NUMBERS + 5), ucm_staging_tag(4095, 5),
                 "numbers wrap");
    cr_assert_eq(ucm_staging_generation(ucm_staging_tag(4095, UINT32_MAX)), 4095);
    for (uint32_t random = 0; random < 3 * UCM_STAGING_GENERATIONS; random++) {
        uint32_t generation = ucm_staging_generation_of(random);

        cr_assert(generation >= 1 && generation < UCM_STAGING_GENERATIONS);
    }
}

Test(staging, an_old_turn_can_not_be_moved)
{
    uint32_t old = ucm_staging_tag(1, 9), new = ucm_staging_tag(2, 9);

    ucm_staging_post(ring, 3, old);
    ucm_staging_post(ring, 3, new);
    cr_assert_not(ucm_staging_move(ring, 3, old, STAGING_POSTED, STAGING_CLAIMED));
    cr_assert(ucm_staging_move(ring, 3, new, STAGING_POSTED, STAGING_CLAIMED));
    cr_assert_not(ucm_staging_move(ring, 3, new, STAGING_POSTED, STAGING_REVOKED));
    cr_assert_not(ucm_staging_move(ring, 3, old, STAGING_CLAIMED, STAGING_DONE));
    cr_assert(ucm_staging_move(ring, 3, new, STAGING_CLAIMED, STAGING_DONE));
}

/* ---- two threads for two processes ---- */

#define TURNS 20000u

static atomic_uint posted, claims;

static void *claimer(void *arg)
{
    uint32_t seen = 0;

    (void)arg;
    while (seen < TURNS) {
        uint32_t turn = atomic_load(&posted);

        if (turn == seen)
            continue;
        seen = turn;
        if (ucm_staging_move(ring, 0, ucm_staging_tag(1, turn), STAGING_POSTED, STAGING_CLAIMED))
            atomic_fetch_add(&claims, 1);
    }
    return NULL;
}

Test(staging, a_turn_is_claimed_or_revoked_but_not_both, .timeout = 60)
{
    unsigned revoked = 0, claimed = 0;
    pthread_t thread;

    cr_assert_eq(pthread_create(&thread, NULL, claimer, NULL), 0);
    for (uint32_t turn = 1; turn <= TURNS; turn++) {
        uint32_t tag = ucm_staging_tag(1, turn);
        uint64_t word;

        ucm_staging_post(ring, 0, tag);
        atomic_store(&posted, turn);
        for (unsigned i = 0; i < turn % 64; i++)
            atomic_load(&ring->words.entries[0].state);
        revoked += ucm_staging_move(ring, 0, tag, STAGING_POSTED, STAGING_REVOKED);
        word = atomic_load(&ring->words.entries[0].state);
        cr_assert_eq(ucm_staging_tag_of(word), tag);
        claimed += ucm_staging_phase_of(word) == STAGING_CLAIMED;
    }
    pthread_join(thread, NULL);
    cr_assert_eq(revoked + claimed, TURNS);
    cr_assert_eq(claimed, atomic_load(&claims));
}

static void *sleeper(void *arg)
{
    uint32_t bell = atomic_load(&ring->words.bell);

    (void)arg;
    while (ucm_staging_phase_of(atomic_load(&ring->words.entries[1].state)) != STAGING_POSTED) {
        ucm_staging_sleep(ring, bell, 20000);
        bell = atomic_load(&ring->words.bell);
    }
    return NULL;
}

Test(staging, a_post_wakes_who_sleeps, .timeout = 10)
{
    struct timespec moment = {.tv_nsec = 20000000};

    for (unsigned i = 0; i < 20; i++) {
        pthread_t thread;

        atomic_store(&ring->words.entries[1].state, 0);
        cr_assert_eq(pthread_create(&thread, NULL, sleeper, NULL), 0);
        if (i % 2)
            nanosleep(&moment, NULL);
        ucm_staging_post(ring, 1, ucm_staging_tag(1, i));
        pthread_join(thread, NULL);
    }
}

/* ---- abandoned ---- */

Test(staging, what_is_posted_is_revoked_when_a_ring_is_abandoned)
{
    ucm_staging_post(ring, 0, ucm_staging_tag(1, 1));
    ucm_staging_post(ring, 5, ucm_staging_tag(1, 2));
    cr_assert(ucm_staging_abandon(ring, 0));
    cr_assert_eq(atomic_load(&ring->words.dead), 1);
    cr_assert_not(
        ucm_staging_move(ring, 0, ucm_staging_tag(1, 1), STAGING_POSTED, STAGING_CLAIMED));
    cr_assert_not(
        ucm_staging_move(ring, 5, ucm_staging_tag(1, 2), STAGING_POSTED, STAGING_CLAIMED));
}

static void *finisher(void *arg)
{
    struct timespec moment = {.tv_nsec = 30000000};

    (void)arg;
    nanosleep(&moment, NULL);
    ucm_staging_move(ring, 2, ucm_staging_tag(1, 1), STAGING_CLAIMED, STAGING_DONE);
    return NULL;
}

Test(staging, what_is_claimed_is_awaited, .timeout = 10)
{
    pthread_t thread;

    ucm_staging_post(ring, 2, ucm_staging_tag(1, 1));
    ucm_staging_move(ring, 2, ucm_staging_tag(1, 1), STAGING_POSTED, STAGING_CLAIMED);
    cr_assert_not(ucm_staging_abandon(ring, 5), "but not for ever");
    cr_assert_eq(pthread_create(&thread, NULL, finisher, NULL), 0);
    cr_assert(ucm_staging_abandon(ring, 5000));
    cr_assert_eq(ucm_staging_phase_of(atomic_load(&ring->words.entries[2].state)), STAGING_DONE);
    pthread_join(thread, NULL);
}

/* ---- orders ---- */

#define ENTRY 65536u
#define BLOCKS 100u

static const uint32_t fragments[4] = {4096, 100, 65536, 7};

static uint32_t fragment(const void *ctx, uint32_t plane)
{
    return ((const uint32_t *)ctx)[plane];
}

static bool sound(const struct ucm_staging_order *order)
{
    uint64_t bytes = 0;

    return ucm_staging_order_sound(order, ENTRY, BLOCKS, 4, fragment, fragments, &bytes);
}

Test(staging, orders_that_fit_are_sound)
{
    struct ucm_staging_order o = {.direction = 1, .n_planes = 2, .n_items = 15};
    uint64_t bytes;

    for (uint32_t i = 0; i < o.n_items; i++)
        o.blocks[i] = BLOCKS - 1 - i;
    cr_assert(ucm_staging_order_sound(&o, ENTRY, BLOCKS, 4, fragment, fragments, &bytes));
    cr_assert_eq(bytes, 4196);
    o.n_items = 16; /* 16 * 4208 */
    cr_assert_not(sound(&o), "items past the entry's end");
    o = (struct ucm_staging_order){.first_plane = 2, .n_planes = 1, .n_items = 1};
    cr_assert(sound(&o), "one that fills the entry");
    o = (struct ucm_staging_order){.first_plane = 3, .n_planes = 1, .n_items = 4096};
    cr_assert(sound(&o), "many small ones, 16 bytes apart");
}

Test(staging, hostile_orders_are_not)
{
    struct ucm_staging_order good = {.n_planes = 1, .n_items = 2, .blocks = {1, 2}}, o;

    cr_assert(sound(&good));
#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        o = good;                                                                                  \
        o.field = (value);                                                                         \
        cr_assert_not(sound(&o), #field " of " #value);                                            \
    } while (0)
    REFUSED(direction, 2);
    REFUSED(direction, UINT32_MAX);
    REFUSED(n_items, 0);
    REFUSED(n_items, 4097);
    REFUSED(n_items, UINT32_MAX);
    REFUSED(n_planes, 0);
    REFUSED(n_planes, 5);
    REFUSED(n_planes, UINT32_MAX);
    REFUSED(first_plane, 4);
    REFUSED(first_plane, UINT32_MAX);
    REFUSED(first_plane, 2); /* 64 KiB twice */
    REFUSED(blocks[1], BLOCKS);
    REFUSED(blocks[1], UINT32_MAX);
}

static uint32_t edge(uint64_t *seed)
{
    static const uint32_t edges[] = {
        0,         1, 2, 3, 4, 5, 15, 16, 99, 100, 4095, 4096, INT32_MAX, 1u << 31, UINT32_MAX - 1,
        UINT32_MAX};

    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return edges[*seed >> 60];
}

/* Ten thousand orders made of edge values: each that passes the check stays within entry, planes
 * and region. */
Test(staging, no_order_that_is_sound_reaches_outside)
{
    struct ucm_staging_order *o = calloc(1, sizeof(*o)); /* so that a read past its end is seen */
    uint64_t seed = 7;
    unsigned sound_ones = 0;

    for (unsigned i = 0; i < 10000; i++) {
        uint64_t bytes = 0, claimed;

        *o = (struct ucm_staging_order){.direction = edge(&seed) % 3,
                                        .first_plane = i % 2 ? edge(&seed) : 0,
                                        .n_planes = edge(&seed),
                                        .n_items = edge(&seed)};
        for (uint32_t k = 0; k < UCM_STAGING_ITEMS; k++)
            o->blocks[k] = i % 8 ? k % BLOCKS : edge(&seed);
        if (!ucm_staging_order_sound(o, ENTRY, BLOCKS, 4, fragment, fragments, &claimed))
            continue;
        sound_ones++;
        cr_assert(o->direction <= 1 && o->n_items >= 1 && o->n_items <= UCM_STAGING_ITEMS);
        cr_assert((uint64_t)o->first_plane + o->n_planes <= 4);
        for (uint32_t p = 0; p < o->n_planes; p++)
            bytes += fragments[o->first_plane + p];
        cr_assert_eq(bytes, claimed);
        cr_assert_leq((o->n_items - 1) * ucm_staging_pitch(bytes) + bytes, ENTRY);
        for (uint32_t k = 0; k < o->n_items; k++)
            cr_assert_lt(o->blocks[k], BLOCKS);
    }
    cr_assert_gt(sound_ones, 100, "%u", sound_ones);
    free(o);
}
