/* Reading lookup tables as a client does, alongside a cache's rig. */
#ifndef UCMD_TESTS_LOOKUP_TABLE_RIG_H
#define UCMD_TESTS_LOOKUP_TABLE_RIG_H

#include "proto/memory/lookup_table.h"
#include "proto/messages.h"
#include "tests/unit/cache/cache_rig.h"

#include <sys/mman.h>

/* Maps the table that readers of ns get now. */
static inline struct ucm_lookup_table_view lookup_table_view(const struct ns *ns)
{
    struct ucm_lookup_table_view v;
    uint64_t bytes;
    int fd = lookup_tables_fd(ns, &bytes);
    void *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

    cr_assert_neq(p, MAP_FAILED);
    cr_assert(ucm_lookup_table_view_open(p, bytes, ns->identity.key_bytes, &v));
    return v;
}

static inline void lookup_table_view_close(const struct ucm_lookup_table_view *v)
{
    munmap((void *)(uintptr_t)v->header, ucm_lookup_table_bytes(v->mask + 1));
}

static inline uint64_t lookup_table_state(const struct ucm_lookup_table_view *v)
{
    return atomic_load(&v->header->state);
}

static inline uint8_t lookup_table_found(const struct ucm_lookup_table_view *v, uint64_t number)
{
    uint8_t key[UCM_MAX_KEY_BYTES], found;

    key_of(number, key);
    (void)ucm_lookup_table_find_many(v, key, 1, true, &found);
    return found;
}

/* A live table says of these numbers what a lookup would say. */
static inline void lookup_table_agree(struct ns *ns, uint64_t numbers)
{
    struct ucm_lookup_table_view v = lookup_table_view(ns);

    for (uint64_t n = 0; lookup_table_state(&v) == UCM_LOOKUP_TABLE_LIVE && n < numbers; n++)
        cr_assert_eq(lookup_table_found(&v, n), cache_status(rig.cache, find(ns, n)), "block %llu",
                     (unsigned long long)n);
    lookup_table_view_close(&v);
}

#endif
