/* Which slabs of a mapping its client maps, and by when it must release revoked ones. Nothing here
 * reads a clock or waits: the map's owner has one timer, for map.due_ms.
 *
 *   UNMAPPED --grant--> MAPPED --revoke--> REVOKED --the timer--> DUE --the timer--> overdue
 *   any but UNMAPPED --release--> UNMAPPED
 *
 * One timer serves all: a slab that is revoked while it runs is due at its next end. So a client
 * has at least MAPPING_REVOKE_MS for each slab, and less than twice as much, whatever else is
 * revoked. */
#ifndef UCMD_MAPPING_MAP_H
#define UCMD_MAPPING_MAP_H

#include <stdbool.h>
#include <stdint.h>

/* A client has so long to unmap what the daemon wants back. */
#define MAPPING_REVOKE_MS 5000

struct mapped_slabs {
    uint32_t slabs, n_due, n_revoked;
    uint64_t due_ms; /* when mapped_slabs_expire is to run; 0: nothing is wanted back */
    uint8_t *state;  /* of each slab; the owner's memory, zeroed */
};

void mapped_slabs_init(struct mapped_slabs *m, uint8_t *state, uint32_t slabs);
bool mapped_slabs_has(const struct mapped_slabs *m, uint32_t slab);
/* False: it is mapped, and perhaps wanted back. */
bool mapped_slabs_grant(struct mapped_slabs *m, uint32_t slab);
/* False: it is not mapped, or is wanted back already. */
bool mapped_slabs_revoke(struct mapped_slabs *m, uint32_t slab, uint64_t now_ms);
/* Releases a slab that it maps. */
void mapped_slabs_release(struct mapped_slabs *m, uint32_t slab);
/* Whether the slabs are all mapped, and none named twice; if not, *bad is the place of the first
 * that is wrong, and *twice says why. */
bool mapped_slabs_names(struct mapped_slabs *m, const uint32_t *slabs, uint32_t n, uint32_t *bad,
                        bool *twice);
/* Runs at due_ms. How many slabs were not released in time; 0: due_ms is the next time, or 0. */
uint32_t mapped_slabs_expire(struct mapped_slabs *m, uint64_t now_ms);

#endif
