/* Is a file the highest part of its block? Hosts look for the highest part, so it goes first. No
 * name says how many parts a namespace has: the highest part that was seen of it counts, in a table
 * of fixed size. In a namespace that finds no entry in the table every part counts as the highest.
 *
 * Thread: its owner's. */
#ifndef UCMD_GC_PARTS_H
#define UCMD_GC_PARTS_H

#include "daemon/shared/block_file.h"

#define GC_NAMESPACES 1024u

struct gc_parts {
    struct {
        uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES];
        bool used;
        uint8_t highest;
    } entries[GC_NAMESPACES];
};
/* Notes the part. True: no higher one of its namespace was seen so far. */
bool gc_parts_learn(struct gc_parts *p, const struct block_file_name *name);

#endif
