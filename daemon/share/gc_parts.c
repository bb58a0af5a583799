#include "daemon/share/gc_parts.h"

#include <string.h>

#define TRIES 8u /* places that a namespace may have */

bool gc_parts_learn(struct gc_parts *p, const struct block_file_name *name)
{
    uint32_t hash; /* a fingerprint's bytes are as good as random */

    memcpy(&hash, name->namespace, sizeof(hash));
    for (unsigned i = 0; i < TRIES; i++) {
        unsigned at = (hash + i) % GC_NAMESPACES;

        if (!p->places[at].used) {
            memcpy(p->places[at].namespace, name->namespace, BLOCK_FILE_NAMESPACE_BYTES);
            p->places[at].used = true;
            p->places[at].highest = name->part;
            return true;
        }
        if (memcmp(p->places[at].namespace, name->namespace, BLOCK_FILE_NAMESPACE_BYTES) != 0)
            continue;
        if (p->places[at].highest < name->part)
            p->places[at].highest = name->part;
        return p->places[at].highest == name->part;
    }
    return true;
}
