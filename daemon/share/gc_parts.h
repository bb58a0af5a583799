/* What the names of block files say to a collector: whose they are, which part, and whether it is
 * the highest of its block, which hosts look for and which therefore goes first. How many parts a
 * namespace has stands in no name: the highest that was seen of it counts, in a table of fixed
 * size. A namespace that has no place in it has highest parts only.
 *
 * Threads: pure but for the table, which is its owner's. */
#ifndef UCMD_SHARE_GC_PARTS_H
#define UCMD_SHARE_GC_PARTS_H

#include "daemon/share/block_file.h"

#define GC_NAMESPACES 1024u
#define GC_NAMESPACE_BYTES 16u /* of the fingerprint, as names have it */

struct gc_name {
    uint8_t namespace[GC_NAMESPACE_BYTES];
    uint8_t part;
    uint8_t key_bytes;
};
/* Of a block file: 0, or -EINVAL for another name, temporary ones too. */
int gc_name_parse(const char *name, struct gc_name *out);

struct gc_parts {
    struct {
        uint8_t namespace[GC_NAMESPACE_BYTES];
        bool used;
        uint8_t highest;
    } places[GC_NAMESPACES];
};
/* True when no higher part of its namespace was seen so far. */
bool gc_parts_learn(struct gc_parts *p, const struct gc_name *name);

#endif
