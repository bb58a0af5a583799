#include "daemon/gc/parts.h"

#include <string.h>

#define TRIES 8u /* entries that a namespace may have */

bool gc_parts_learn(struct gc_parts *p, const struct block_file_name *name)
{
    uint32_t hash; /* a fingerprint's bytes are as good as random */

    memcpy(&hash, name->namespace, sizeof(hash));
    for (unsigned i = 0; i < TRIES; i++) {
        unsigned at = (hash + i) % GC_NAMESPACES;

        if (!p->entries[at].used) {
            memcpy(p->entries[at].namespace, name->namespace, BLOCK_FILE_NAMESPACE_BYTES);
            p->entries[at].used = true;
            p->entries[at].highest = name->part;
            return true;
        }
        if (memcmp(p->entries[at].namespace, name->namespace, BLOCK_FILE_NAMESPACE_BYTES) != 0)
            continue;
        if (p->entries[at].highest < name->part)
            p->entries[at].highest = name->part;
        return p->entries[at].highest == name->part;
    }
    return true;
}
