#include "daemon/share/memo.h"

#include <errno.h>
#include <stdlib.h>

#define WAYS 4u

struct memo_entry {
    uint64_t tag;
    uint64_t until_ms : 56, value : 8;
};

int memo_init(struct memo *m, uint32_t entries)
{
    m->entries = calloc(entries, sizeof(*m->entries));
    m->sets = entries / WAYS;
    return m->entries ? 0 : -ENOMEM;
}

void memo_close(struct memo *m)
{
    free(m->entries);
    *m = (struct memo){.entries = NULL};
}

static struct memo_entry *set_of(const struct memo *m, uint64_t tag)
{
    return m->entries + (tag & (m->sets - 1)) * WAYS;
}

static struct memo_entry *entry_of(const struct memo *m, uint64_t tag)
{
    struct memo_entry *set = set_of(m, tag);

    for (unsigned i = 0; i < WAYS; i++)
        if (set[i].tag == tag && set[i].value)
            return &set[i];
    return NULL;
}

uint8_t memo_get(const struct memo *m, uint64_t tag, uint64_t now_ms)
{
    const struct memo_entry *e = entry_of(m, tag);

    return e && e->until_ms > now_ms ? (uint8_t)e->value : 0;
}

void memo_put(struct memo *m, uint64_t tag, uint8_t value, uint64_t now_ms, uint64_t until_ms)
{
    struct memo_entry *set = set_of(m, tag), *e = entry_of(m, tag);

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

void memo_forget(struct memo *m, uint64_t tag)
{
    struct memo_entry *e = entry_of(m, tag);

    if (e)
        e->value = 0;
}
