#include "daemon/shared/answer_cache.h"

#include <errno.h>
#include <stdlib.h>

#define WAYS 4u

struct answer_cache_entry {
    uint64_t tag;
    uint64_t until_ms : 56, value : 8;
};

int answer_cache_init(struct answer_cache *m, uint32_t entries)
{
    m->entries = calloc(entries, sizeof(*m->entries));
    m->sets = entries / WAYS;
    return m->entries ? 0 : -ENOMEM;
}

void answer_cache_close(struct answer_cache *m)
{
    free(m->entries);
    *m = (struct answer_cache){.entries = NULL};
}

static struct answer_cache_entry *set_of(const struct answer_cache *m, uint64_t tag)
{
    return m->entries + (tag & (m->sets - 1)) * WAYS;
}

static struct answer_cache_entry *entry_of(const struct answer_cache *m, uint64_t tag)
{
    struct answer_cache_entry *set = set_of(m, tag);

    for (unsigned i = 0; i < WAYS; i++)
        if (set[i].tag == tag && set[i].value)
            return &set[i];
    return NULL;
}

uint8_t answer_cache_get(const struct answer_cache *m, uint64_t tag, uint64_t now_ms)
{
    const struct answer_cache_entry *e = entry_of(m, tag);

    return e && e->until_ms > now_ms ? (uint8_t)e->value : 0;
}

void answer_cache_put(struct answer_cache *m, uint64_t tag, uint8_t value, uint64_t now_ms,
                      uint64_t until_ms)
{
    struct answer_cache_entry *set = set_of(m, tag), *e = entry_of(m, tag);

    for (unsigned i = 0; !e && i < WAYS; i++)
        if (set[i].value == 0 || set[i].until_ms <= now_ms)
            e = &set[i];
    if (!e) {
        e = set;
        for (unsigned i = 1; i < WAYS; i++)
            if (set[i].until_ms < e->until_ms)
                e = &set[i];
    }
    e->tag = tag;
    e->until_ms = until_ms & ((1ull << 56) - 1);
    e->value = value;
}

void answer_cache_forget(struct answer_cache *m, uint64_t tag)
{
    struct answer_cache_entry *e = entry_of(m, tag);

    if (e)
        e->value = 0;
}
