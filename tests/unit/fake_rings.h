/* The rings of a fake daemon: it maps all that ever came, as a daemon does. Under the fake's lock.
 */
#ifndef UCM_TESTS_FAKE_RINGS_H
#define UCM_TESTS_FAKE_RINGS_H

#include "proto/ring.h"

#include <criterion/criterion.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAKE_RINGS 8

struct fake_rings {
    struct ucm_ring *maps[FAKE_RINGS];
    uint32_t ids[FAKE_RINGS]; /* 0: unregistered, or its connection is gone */
    unsigned n;
};

/* Takes the descriptor. The generation tells which one it is: 1 is the first. */
__attribute__((unused)) static void fake_ring_add(struct fake_rings *r, int fd, uint32_t id)
{
    struct ucm_ring *ring = mmap(NULL, sizeof *ring, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    cr_assert(r->n < FAKE_RINGS && ring != MAP_FAILED);
    close(fd);
    r->maps[r->n] = ring;
    r->ids[r->n++] = id;
    atomic_store(&ring->words.generation, r->n);
}

__attribute__((unused)) static bool fake_ring_remove(struct fake_rings *r, uint32_t id)
{
    for (unsigned i = 0; i < r->n; i++)
        if (r->ids[i] == id) {
            r->ids[i] = 0;
            return true;
        }
    return false;
}

__attribute__((unused)) static void fake_rings_close(struct fake_rings *r)
{
    for (unsigned i = 0; i < r->n; i++)
        munmap(r->maps[i], sizeof *r->maps[i]);
}

#endif
