#include "daemon/format/checksum.h"

#define XXH_STATIC_LINKING_ONLY /* a state on the stack */
#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h> /* the widest vectors that this CPU has */
#endif

uint64_t checksum_of(const void *data, uint64_t bytes)
{
    return XXH3_64bits(data, bytes);
}

/* Piece by piece, so that a cache has the piece that is read twice. */
uint64_t checksum_pieces(const void *data, uint64_t bytes, uint64_t piece_bytes, uint64_t *sums)
{
    const uint8_t *p = data;
    XXH3_state_t state;

    XXH3_64bits_reset(&state);
    for (uint64_t at = 0; at < bytes; at += piece_bytes) {
        *sums++ = XXH3_64bits(p + at, piece_bytes);
        (void)XXH3_64bits_update(&state, p + at, piece_bytes); /* refuses NULL only */
    }
    return XXH3_64bits_digest(&state);
}
