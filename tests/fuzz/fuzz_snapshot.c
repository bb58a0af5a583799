/* Any bytes as the snapshot of kept DRAM. It is refused, or every number in it is within its
 * bounds. Input that begins with the right head gets correct checksums, so that the bytes under
 * them are reached. */
#include "daemon/index/index.h"
#include "daemon/snapshot/format.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

#define SLAB (1u << 20)
#define SLABS 8u
#define BODY_MAX 65536u
#define COUNTS 5u /* bytes before the body: namespaces and parts */

static const struct persist_identity arena = {
    .boot = {1, 2, 3}, .inode = 77, .bytes = SLABS * (uint64_t)SLAB};

static void snapshot_walk(const uint8_t *p, size_t n, const struct snapshot_head *h,
                          size_t parts_at)
{
    size_t at = SNAPSHOT_HEAD_BYTES;

    for (uint32_t i = 0; i < h->namespaces; i++) {
        struct snapshot_ns ns;

        must(n - at >= snapshot_ns_bytes(0));
        at += snapshot_ns_decode(p + at, &ns);
        must(at <= n && ns.identity_bytes > 0 && ns.identity_bytes <= NS_CANONICAL_MAX);
    }
    must(at == parts_at && (n - at) / SNAPSHOT_PART_BYTES >= h->parts);
    for (uint64_t i = 0; i < h->parts; i++) {
        struct snapshot_part part;

        snapshot_part_decode(p + at + i * SNAPSHOT_PART_BYTES, &part);
        must(part.ns < h->namespaces && part.part < UCM_MAX_PARTS && part.slab < SLABS);
    }
    must(memchr(h->program, '\0', sizeof(h->program)) != NULL);
}

static void snapshot_try(const uint8_t *p, size_t n)
{
    struct snapshot_head h;
    size_t parts_at;

    if (snapshot_check(p, n, &arena, SLAB, &h, &parts_at) == 0)
        snapshot_walk(p, n, &h, parts_at);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct snapshot_head h = {.arena = arena, .slab = SLAB, .program = "fuzz"};
    uint8_t *p;
    size_t n;

    snapshot_try(data, size);
    if (size < COUNTS || size > BODY_MAX)
        return 0;
    n = SNAPSHOT_HEAD_BYTES + size - COUNTS;
    p = malloc(n);
    must(p != NULL);
    memcpy(p + SNAPSHOT_HEAD_BYTES, data + COUNTS, size - COUNTS);
    h.namespaces = data[0];
    for (unsigned i = 1; i < COUNTS; i++)
        h.parts = h.parts << 8 | data[i];
    snapshot_complete(p, n, &h);
    snapshot_try(p, n);
    free(p);
    return 0;
}
