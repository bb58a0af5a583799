#include "proto/ring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(struct ucm_ring_words) <= UCM_RING_PAGE, "the words fill one page at most");
_Static_assert(sizeof(struct ucm_ring) % UCM_RING_PAGE == 0, "a ring is whole pages");
_Static_assert(sizeof(struct ucm_ring_slice) == 64, "slices lie in cache lines of their own");

static uint64_t turn_of(uint32_t tag, enum ucm_ring_phase phase)
{
    return (uint64_t)tag << 8 | (uint64_t)phase;
}

/* One: whoever shares the memory could have thousands sleep here. */
void ucm_ring_wake(struct ucm_ring *ring)
{
    atomic_fetch_add(&ring->words.bell, 1);
    if (atomic_load(&ring->words.asleep))
        (void)syscall(SYS_futex, &ring->words.bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void ucm_ring_post(struct ucm_ring *ring, uint32_t slice, uint32_t tag)
{
    atomic_store(&ring->words.slices[slice].turn, turn_of(tag, RING_POSTED));
    ucm_ring_wake(ring);
}

bool ucm_ring_move(struct ucm_ring *ring, uint32_t slice, uint32_t tag, enum ucm_ring_phase from,
                   enum ucm_ring_phase to)
{
    uint64_t expected = turn_of(tag, from);

    return atomic_compare_exchange_strong(&ring->words.slices[slice].turn, &expected,
                                          turn_of(tag, to));
}

/* The poster counts the bell up before it looks at `asleep`; here `asleep` is set before the kernel
 * looks at the bell. So one of the two sees the other. */
void ucm_ring_sleep(struct ucm_ring *ring, uint32_t bell, unsigned timeout_ms)
{
    struct timespec t = {.tv_sec = timeout_ms / 1000,
                         .tv_nsec = (long)(timeout_ms % 1000) * 1000000};

    atomic_store(&ring->words.asleep, 1);
    (void)syscall(SYS_futex, &ring->words.bell, FUTEX_WAIT, bell, &t, NULL, 0);
    atomic_store(&ring->words.asleep, 0);
}

static uint64_t clock_ms(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static bool settled(struct ucm_ring *ring)
{
    for (uint32_t i = 0; i < UCM_MAX_SLICES; i++) {
        uint64_t turn = atomic_load(&ring->words.slices[i].turn);

        if (ucm_ring_turn_phase(turn) == RING_CLAIMED ||
            (ucm_ring_turn_phase(turn) == RING_POSTED &&
             !ucm_ring_move(ring, i, ucm_ring_turn_tag(turn), RING_POSTED, RING_REVOKED)))
            return false;
    }
    return true;
}

/* The companion looks at `dead` once more when it has claimed: so a turn that is not seen claimed
 * here never begins. */
bool ucm_ring_abandon(struct ucm_ring *ring, unsigned timeout_ms)
{
    struct timespec nap = {.tv_nsec = 100000};
    uint64_t end_ms = clock_ms() + timeout_ms;

    atomic_store(&ring->words.dead, 1);
    ucm_ring_wake(ring);
    while (!settled(ring)) {
        if (clock_ms() >= end_ms)
            return false;
        (void)nanosleep(&nap, NULL);
    }
    return true;
}

bool ucm_ring_order_sound(const struct ucm_ring_order *order, uint64_t slice_bytes, uint32_t blocks,
                          uint32_t planes, uint32_t (*chunk)(const void *ctx, uint32_t plane),
                          const void *ctx, uint64_t *item_bytes)
{
    uint64_t bytes = 0;

    if (order->direction > 1 || order->n_items < 1 || order->n_items > UCM_RING_ITEMS ||
        order->n_planes < 1 || order->n_planes > planes ||
        order->first_plane > planes - order->n_planes)
        return false;
    for (uint32_t p = 0; p < order->n_planes; p++)
        bytes += chunk(ctx, order->first_plane + p);
    if (ucm_ring_pitch(bytes) > slice_bytes / order->n_items)
        return false;
    for (uint32_t i = 0; i < order->n_items; i++)
        if (order->blocks[i] >= blocks)
            return false;
    *item_bytes = bytes;
    return true;
}
