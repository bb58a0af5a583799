#include "daemon/format/checksum.h"

#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h> /* the widest vectors that this CPU has */
#endif

uint64_t checksum_of(const void *data, uint64_t bytes)
{
    return XXH3_64bits(data, bytes);
}
