/* The rings of a fake daemon. It maps every ring that came, as a daemon does. Under the fake's
 * lock. */
#ifndef UCM_TESTS_FAKE_RINGS_H
#define UCM_TESTS_FAKE_RINGS_H

#include "proto/memory/staging.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAKE_STAGINGS 8

struct fake_stagings {
    struct ucm_staging *maps[FAKE_STAGINGS];
    uint32_t ids[FAKE_STAGINGS]; /* 0: unregistered, or its connection is gone */
    unsigned n;
};

/* Takes the descriptor. The generation numbers the rings, from 1. */
__attribute__((unused)) static void fake_staging_add(struct fake_stagings *r, int fd, uint32_t id)
{
    struct ucm_staging *ring = mmap(NULL, sizeof *ring, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    cr_assert(r->n < FAKE_STAGINGS && ring != MAP_FAILED);
    cr_assert(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK, "a daemon could not rely on the memory");
    close(fd);
    r->maps[r->n] = ring;
    r->ids[r->n++] = id;
    atomic_store(&ring->words.generation, r->n);
}

__attribute__((unused)) static bool fake_staging_remove(struct fake_stagings *r, uint32_t id)
{
    for (unsigned i = 0; i < r->n; i++)
        if (r->ids[i] == id) {
            r->ids[i] = 0;
            return true;
        }
    return false;
}

__attribute__((unused)) static void fake_stagings_close(struct fake_stagings *r)
{
    for (unsigned i = 0; i < r->n; i++)
        munmap(r->maps[i], sizeof *r->maps[i]);
}

#endif
