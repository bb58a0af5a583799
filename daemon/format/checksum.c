#include "daemon/format/checksum.h"

#include <string.h>

#define XXH_STATIC_LINKING_ONLY /* a state on the stack */
#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h> /* the widest vectors that this CPU has */
#endif

#define COPY_PIECE_BYTES (256u << 10) /* a core's second cache has it twice */

uint64_t checksum_of(const void *data, uint64_t bytes)
{
    return XXH3_64bits(data, bytes);
}

/* Fragment by fragment, so that a cache has the fragment that is read twice. */
uint64_t checksum_fragments(const void *data, uint64_t bytes, uint64_t fragment_bytes,
                            uint64_t *sums)
{
    const uint8_t *p = data;
    XXH3_state_t state;

    XXH3_64bits_reset(&state);
    for (uint64_t at = 0; at < bytes; at += fragment_bytes) {
        *sums++ = XXH3_64bits(p + at, fragment_bytes);
        (void)XXH3_64bits_update(&state, p + at, fragment_bytes); /* refuses NULL only */
    }
    return XXH3_64bits_digest(&state);
}

uint64_t checksum_copy(void *to, const void *from, uint64_t bytes, bool of_copy)
{
    const uint8_t *in = from;
    uint8_t *out = to;
    XXH3_state_t state;

    XXH3_64bits_reset(&state);
    for (uint64_t at = 0; at < bytes; at += COPY_PIECE_BYTES) {
        uint64_t n = bytes - at < COPY_PIECE_BYTES ? bytes - at : COPY_PIECE_BYTES;

        memcpy(out + at, in + at, n);
        (void)XXH3_64bits_update(&state, (of_copy ? out : in) + at, n); /* refuses NULL only */
    }
    return XXH3_64bits_digest(&state);
}
