/* Which slabs of a window its client maps, and which of them are wanted back by when. Nothing
 * here reads a clock or waits: whoever owns the map has one timer, for map.due_ms.
 *
 *   UNMAPPED --grant--> MAPPED --revoke--> REVOKED --the timer--> DUE --the timer--> overdue
 *   any but UNMAPPED --release--> UNMAPPED
 *
 * One timer serves all: a slab that is wanted back while it runs is due at its next end. So a
 * client has WINDOW_REVOKE_MS for each slab at least, and less than twice as much, whatever else
 * is wanted back. */
#ifndef UCMD_WINDOW_MAP_H
#define UCMD_WINDOW_MAP_H

#include <stdbool.h>
#include <stdint.h>

/* A client has so long to unmap what the daemon wants back. */
#define WINDOW_REVOKE_MS 5000

struct window_map {
    uint32_t slabs, n_due, n_revoked;
    uint64_t due_ms; /* when window_map_expire is to run; 0: nothing is wanted back */
    uint8_t *state;  /* of each slab; the owner's memory, zeroed */
};

void window_map_init(struct window_map *m, uint8_t *state, uint32_t slabs);
bool window_map_has(const struct window_map *m, uint32_t slab);
/* False: it is mapped, and perhaps wanted back. */
bool window_map_grant(struct window_map *m, uint32_t slab);
/* False: it is not mapped, or is wanted back already. */
bool window_map_revoke(struct window_map *m, uint32_t slab, uint64_t now_ms);
/* Of a slab that it has. */
void window_map_release(struct window_map *m, uint32_t slab);
/* Whether the slabs are all mapped, and none named twice; if not, *bad is the place of the first
 * that is wrong, and *twice says why. */
bool window_map_names(struct window_map *m, const uint32_t *slabs, uint32_t n, uint32_t *bad,
                      bool *twice);
/* Runs at due_ms. How many slabs were not released in time; 0: due_ms is the next time, or 0. */
uint32_t window_map_expire(struct window_map *m, uint64_t now_ms);

#endif
