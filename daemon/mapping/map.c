#include "daemon/mapping/map.h"

#include <assert.h>

/* NAMED: a mark next to the state, while mapped_slabs_names looks. */
enum { UNMAPPED, MAPPED, REVOKED, DUE, NAMED = 0x80 };

void mapped_slabs_init(struct mapped_slabs *m, uint8_t *state, uint32_t slabs)
{
    *m = (struct mapped_slabs){.slabs = slabs, .state = state};
}

bool mapped_slabs_has(const struct mapped_slabs *m, uint32_t slab)
{
    return slab < m->slabs && m->state[slab] != UNMAPPED;
}

bool mapped_slabs_grant(struct mapped_slabs *m, uint32_t slab)
{
    assert(slab < m->slabs);
    if (m->state[slab] != UNMAPPED)
        return false;
    m->state[slab] = MAPPED;
    return true;
}

/* The timer begins, for all that is wanted back by now. */
static void begin(struct mapped_slabs *m, uint64_t now_ms)
{
    for (uint32_t i = 0; m->n_revoked > 0 && i < m->slabs; i++) {
        if (m->state[i] != REVOKED)
            continue;
        m->state[i] = DUE;
        m->n_revoked--;
        m->n_due++;
    }
    m->due_ms = m->n_due > 0 ? now_ms + MAPPING_REVOKE_MS : 0;
}

bool mapped_slabs_revoke(struct mapped_slabs *m, uint32_t slab, uint64_t now_ms)
{
    if (m->state[slab] != MAPPED)
        return false;
    m->state[slab] = REVOKED;
    m->n_revoked++;
    if (m->due_ms == 0)
        begin(m, now_ms);
    return true;
}

void mapped_slabs_release(struct mapped_slabs *m, uint32_t slab)
{
    assert(mapped_slabs_has(m, slab));
    m->n_due -= m->state[slab] == DUE;
    m->n_revoked -= m->state[slab] == REVOKED;
    m->state[slab] = UNMAPPED;
    if (m->n_due + m->n_revoked == 0)
        m->due_ms = 0;
}

bool mapped_slabs_names(struct mapped_slabs *m, const uint32_t *slabs, uint32_t n, uint32_t *bad,
                        bool *twice)
{
    uint32_t i = 0;

    for (; i < n && mapped_slabs_has(m, slabs[i]) && !(m->state[slabs[i]] & NAMED); i++)
        m->state[slabs[i]] |= NAMED;
    *bad = i;
    *twice = i < n && mapped_slabs_has(m, slabs[i]);
    for (uint32_t k = 0; k < i; k++)
        m->state[slabs[k]] &= (uint8_t)~NAMED;
    return i == n;
}

uint32_t mapped_slabs_expire(struct mapped_slabs *m, uint64_t now_ms)
{
    if (m->n_due == 0)
        begin(m, now_ms);
    return m->due_ms > now_ms ? 0 : m->n_due;
}
