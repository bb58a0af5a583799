#include "daemon/share/gc_parts.h"

#include <errno.h>
#include <string.h>

#define TRIES 8u /* places that a namespace may have */

static uint8_t digit(char c)
{
    return (uint8_t)(c <= '9' ? c - '0' : c - 'a' + 10);
}

static uint8_t byte_of(const char *hex)
{
    return (uint8_t)(digit(hex[0]) << 4 | digit(hex[1]));
}

int gc_name_parse(const char *name, struct gc_name *out)
{
    size_t n;

    if (!block_file_name_valid(name))
        return -EINVAL;
    n = strcspn(name, "-");
    out->key_bytes = (uint8_t)(n / 2);
    name += n + 1;
    for (unsigned i = 0; i < GC_NAMESPACE_BYTES; i++)
        out->namespace[i] = byte_of(name + 2 * (size_t)i);
    out->part = byte_of(name + 2 * GC_NAMESPACE_BYTES + 1);
    return 0;
}

bool gc_parts_learn(struct gc_parts *p, const struct gc_name *name)
{
    uint32_t hash; /* a fingerprint's bytes are as good as random */

    memcpy(&hash, name->namespace, sizeof(hash));
    for (unsigned i = 0; i < TRIES; i++) {
        unsigned at = (hash + i) % GC_NAMESPACES;

        if (!p->places[at].used) {
            memcpy(p->places[at].namespace, name->namespace, GC_NAMESPACE_BYTES);
            p->places[at].used = true;
            p->places[at].highest = name->part;
            return true;
        }
        if (memcmp(p->places[at].namespace, name->namespace, GC_NAMESPACE_BYTES) != 0)
            continue;
        if (p->places[at].highest < name->part)
            p->places[at].highest = name->part;
        return p->places[at].highest == name->part;
    }
    return true;
}
