#include "proto/memory/staging.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(struct ucm_staging_words) <= UCM_STAGING_PAGE, "the words fit one page");
_Static_assert(sizeof(struct ucm_staging) % UCM_STAGING_PAGE == 0, "whole pages");
_Static_assert(sizeof(struct ucm_staging_entry) == 64, "each entry has its own cache line");

static uint64_t state_of(uint32_t tag, enum ucm_staging_phase phase)
{
    return (uint64_t)tag << 8 | (uint64_t)phase;
}

/* Wakes one sleeper: a worker that shares the memory could let thousands sleep here. */
void ucm_staging_wake(struct ucm_staging *staging)
{
    atomic_fetch_add(&staging->words.bell, 1);
    if (atomic_load(&staging->words.asleep))
        (void)syscall(SYS_futex, &staging->words.bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void ucm_staging_post(struct ucm_staging *staging, uint32_t entry, uint32_t tag)
{
    atomic_store(&staging->words.entries[entry].state, state_of(tag, STAGING_POSTED));
    ucm_staging_wake(staging);
}

bool ucm_staging_move(struct ucm_staging *staging, uint32_t entry, uint32_t tag,
                      enum ucm_staging_phase from, enum ucm_staging_phase to)
{
    uint64_t expected = state_of(tag, from);

    return atomic_compare_exchange_strong(&staging->words.entries[entry].state, &expected,
                                          state_of(tag, to));
}

/* The poster increments the bell before it reads `asleep`; the sleeper sets `asleep` before the
 * kernel compares the bell. So one of the two always sees the other. */
void ucm_staging_sleep(struct ucm_staging *staging, uint32_t bell, unsigned timeout_ms)
{
    struct timespec t = {.tv_sec = timeout_ms / 1000,
                         .tv_nsec = (long)(timeout_ms % 1000) * 1000000};

    atomic_store(&staging->words.asleep, 1);
    (void)syscall(SYS_futex, &staging->words.bell, FUTEX_WAIT, bell, &t, NULL, 0);
    atomic_store(&staging->words.asleep, 0);
}

static uint64_t clock_ms(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Revokes what is posted; true when nothing is claimed. */
static bool settled(struct ucm_staging *staging)
{
    for (uint32_t i = 0; i < UCM_MAX_STAGING_ENTRIES; i++) {
        uint64_t state = atomic_load(&staging->words.entries[i].state);
        enum ucm_staging_phase phase = ucm_staging_phase_of(state);

        if (phase == STAGING_CLAIMED ||
            (phase == STAGING_POSTED && !ucm_staging_move(staging, i, ucm_staging_tag_of(state),
                                                          STAGING_POSTED, STAGING_REVOKED)))
            return false;
    }
    return true;
}

/* The copy agent reads `dead` again after each claim: an order that settled() does not see claimed
 * never begins. */
bool ucm_staging_abandon(struct ucm_staging *staging, unsigned timeout_ms)
{
    struct timespec nap = {.tv_nsec = 100000};
    uint64_t end_ms = clock_ms() + timeout_ms;

    atomic_store(&staging->words.dead, 1);
    ucm_staging_wake(staging);
    while (!settled(staging)) {
        if (clock_ms() >= end_ms)
            return false;
        (void)nanosleep(&nap, NULL);
    }
    return true;
}

bool ucm_staging_order_sound(const struct ucm_staging_order *order, uint64_t entry_bytes,
                             uint32_t blocks, uint32_t planes,
                             uint32_t (*fragment)(const void *ctx, uint32_t plane), const void *ctx,
                             uint64_t *item_bytes)
{
    uint64_t bytes = 0;

    if (order->direction > 1 || order->n_items < 1 || order->n_items > UCM_STAGING_ITEMS ||
        order->n_planes < 1 || order->n_planes > planes ||
        order->first_plane > planes - order->n_planes)
        return false;
    for (uint32_t p = 0; p < order->n_planes; p++)
        bytes += fragment(ctx, order->first_plane + p);
    if (ucm_staging_pitch(bytes) > entry_bytes / order->n_items)
        return false;
    for (uint32_t i = 0; i < order->n_items; i++)
        if (order->blocks[i] >= blocks)
            return false;
    *item_bytes = bytes;
    return true;
}

bool ucm_staging_shifts_sound(const struct ucm_staging_order *order, uint32_t table_words)
{
    uint64_t words =
        (uint64_t)order->n_items * UCM_STAGING_SHIFT_WORDS + (uint64_t)order->tables * table_words;

    if (order->tables == 0)
        return true;
    if (table_words == 0 || order->direction != 0 || words > UCM_STAGING_ITEMS)
        return false;
    for (uint32_t i = 0; i < order->n_items; i++) {
        uint32_t table = order->blocks[order->n_items + i];

        if (table >= order->tables && table != UCM_STAGING_STAYS)
            return false;
    }
    return true;
}
