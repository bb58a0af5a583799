#include "daemon/arena/arena.h"
#include "daemon/arena/internal.h"

#include "daemon/base/poison.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* slot_ref = 1 + (slab << slot_bits | slot), slot_bits as many as a slab of the smallest slots
 * needs: so there are names for 16 TiB less one slab, whatever the slabs' size. */

uint64_t arena_padded(uint64_t bytes)
{
    return (bytes + ARENA_ALIGN - 1) & ~(uint64_t)(ARENA_ALIGN - 1);
}

/* ---- slots ---- */

/* The slabs at this home with a free slot of this size. */
static struct list *partial_of(const struct arena *a, uint64_t slot_bytes, uint32_t home)
{
    struct list *l = &a->partial[(slot_bytes / ARENA_ALIGN - 1) * (a->nodes + 1) + home];

    if (!l->next)
        list_init(l);
    return l;
}

/* The thread that makes a slab ready touches all of it; until then none of it is poisoned. */
static bool slab_is_ready(const struct arena *a, const struct slab *e)
{
    uint32_t slab = (uint32_t)(e - a->slab);

    return arena_slab_granted(a, slab) || slab < a->ready;
}

void arena_slab_unpoison(const struct arena *a, uint32_t slab)
{
    const char *base = a->slab[slab].base;

    /* Without slots all of it is poisoned, or, if it never had any, nothing. */
    if (a->slab[slab].slots > 0 || poison_begins(base, 1) == 0)
        poison(base, a->config.slab, a->config.slab);
}

static slot_ref ref_of(const struct arena *a, uint32_t slab, uint32_t slot)
{
    return 1 + (slab << a->slot_bits | slot);
}

static void slot_push_free(struct slab *e, uint32_t slot)
{
    e->owner[slot] = SLOT_FREE | e->free_slot;
    e->free_slot = slot;
    e->n_free++;
}

int arena_carve(struct arena *a, struct slab *e, uint64_t slot_bytes)
{
    uint32_t slots = (uint32_t)(a->config.slab / slot_bytes);

    e->owner = malloc(slots * sizeof(*e->owner));
    if (!e->owner)
        return -ENOMEM;
    memset(e->owner, 0xff, slots * sizeof(*e->owner)); /* SLOT_FREE */
    e->slot_bytes = slot_bytes;
    e->slots = slots;
    e->n_free = slots;
    e->fresh = 0;
    e->partial = partial_of(a, slot_bytes, e->home);
    if (slab_is_ready(a, e))
        poison(e->base, a->config.slab, 0);
    return 0;
}

static void slab_uncarve(struct arena *a, struct slab *e)
{
    list_remove(&e->link);
    free(e->owner);
    e->owner = NULL;
    e->slot_bytes = 0;
    e->slots = e->n_free = 0;
    e->closed = false;
    list_push_front(&a->home[e->home].free, &e->link);
    a->home[e->home].n_free++;
}

/* Some of its slots may be of an earlier run; the others of that size are free now. */
void arena_slab_ready(struct arena *a, uint32_t slab)
{
    struct slab *e = &a->slab[slab];
    struct arena_home *home = &a->home[e->home];

    list_init(&e->link);
    if (e->slots > 0)
        e->partial = partial_of(a, e->slot_bytes, e->home); /* its home is known now */
    home->ready++;
    e->n_free = 0;
    e->fresh = e->slots;
    for (uint32_t i = e->slots; i-- > 0;) { /* so that neighbours are handed out in order */
        if (arena_slot_used(e, i))
            continue;
        slot_push_free(e, i);
        poison(e->base + i * e->slot_bytes, e->slot_bytes, 0);
    }
    home->used_bytes += (e->slots - e->n_free) * e->slot_bytes;
    if (e->slots == 0) {
        list_push_back(&home->free, &e->link);
        home->n_free++;
    } else if (e->n_free == e->slots) {
        slab_uncarve(a, e);
    } else if (e->n_free > 0) {
        list_push_back(e->partial, &e->link);
    }
}

uint32_t arena_home_of(const struct arena *a, int node)
{
    uint32_t i = 0;

    while (i < a->nodes && a->config.numa->node[i] != node)
        i++;
    return i;
}

/* Lists of `partial` that nobody has used are zeros. */
static struct slab *first_of(const struct list *slabs)
{
    return !slabs->next || list_empty(slabs) ? NULL : LIST_ENTRY(slabs->next, struct slab, link);
}

/* A free slab of no particular node comes first, then one of the node with most free slabs. So no
 * node runs out before the others. */
static struct slab *slab_anywhere(const struct arena *a, const struct list *partial)
{
    struct slab *e = NULL;
    uint32_t from = a->nodes;

    for (uint32_t i = 0; !e && i <= a->nodes; i++)
        e = first_of(&partial[i]);
    if (!e && a->home[from].n_free == 0)
        for (uint32_t i = 0; i < a->nodes; i++)
            if (a->home[i].n_free > a->home[from].n_free)
                from = i;
    return e ? e : first_of(&a->home[from].free);
}

/* A slab with a free slot of this size; NULL when there is none. */
static struct slab *slab_find(struct arena *a, uint64_t slot_bytes, int node)
{
    const struct list *partial = &a->partial[(slot_bytes / ARENA_ALIGN - 1) * (a->nodes + 1)];
    uint32_t home = a->nodes > 0 ? arena_home_of(a, node) : 0;
    struct slab *e = NULL;

    if (home < a->nodes && !(e = first_of(&partial[home])))
        e = first_of(&a->home[home].free);
    if (!e)
        e = slab_anywhere(a, partial);
    if (!e || e->slots > 0)
        return e;
    if (arena_carve(a, e, slot_bytes) != 0)
        return NULL;
    list_remove(&e->link);
    a->home[e->home].n_free--;
    list_push_front(e->partial, &e->link);
    return e;
}

slot_ref arena_slot_hand_out(struct arena *a, struct slab *e, uint64_t bytes, uint64_t owner)
{
    bool fresh = e->n_free == e->slots - e->fresh; /* none was given back */
    uint32_t slot = fresh ? e->fresh++ : e->free_slot;
    uint64_t padding = e->slot_bytes - bytes;
    char *p = e->base + slot * e->slot_bytes;

    poison(p, e->slot_bytes, e->slot_bytes);
    memset(p + bytes, 0,
           padding); /* it is written to disk with the slot, and had another owner's bytes */
    poison(p, e->slot_bytes, bytes);

    if (!fresh)
        e->free_slot = (uint32_t)e->owner[slot];
    e->n_free--;
    e->owner[slot] = owner;
    if (e->n_free == 0)
        list_remove(&e->link);
    return ref_of(a, (uint32_t)(e - a->slab), slot);
}

slot_ref arena_alloc(struct arena *a, uint64_t bytes, uint64_t owner, int node)
{
    uint64_t slot_bytes = arena_padded(bytes);
    struct slab *e;

    assert(bytes > 0 && !(owner & SLOT_FREE));
    if (slot_bytes > a->config.slab)
        return 0;
    e = slab_find(a, slot_bytes, node);
    if (!e)
        return 0;
    a->used_slots++;
    a->used_bytes += slot_bytes;
    a->home[e->home].used_bytes += slot_bytes;
    return arena_slot_hand_out(a, e, bytes, owner);
}

void arena_slot_free(struct arena *a, slot_ref ref)
{
    const void *memory = arena_memory(a, ref, NULL);
    uint32_t slab, slot;
    struct slab *e;

    arena_slot_position(a, ref, &slab, &slot);
    e = &a->slab[slab];
    if (slab_is_ready(a, e))
        poison(memory, e->slot_bytes, 0);
    slot_push_free(e, slot);
    if (arena_slab_granted(a, slab)) {
        a->granted_freed(a, e, slot);
        return;
    }
    a->used_slots--;
    a->used_bytes -= e->slot_bytes;
    if (slab >= a->ready)
        return; /* of an earlier run; arena_slab_ready lists the slab */
    a->home[e->home].used_bytes -= e->slot_bytes;
    if (e->n_free == e->slots)
        slab_uncarve(a, e);
    else if (e->n_free == 1 && !e->closed)
        list_push_back(e->partial, &e->link);
}

void *arena_memory(struct arena *a, slot_ref ref, uint64_t *slot_bytes)
{
    uint32_t slab = (ref - 1) >> a->slot_bits, slot = (ref - 1) & ((1u << a->slot_bits) - 1);
    struct slab *e = &a->slab[slab];

    assert(ref != 0 && slab < a->slabs + a->granted && slot < e->slots &&
           !(e->owner[slot] & SLOT_FREE));
    if (slot_bytes)
        *slot_bytes = e->slot_bytes;
    return e->base + slot * e->slot_bytes;
}

uint32_t arena_slab_of(const struct arena *a, slot_ref ref)
{
    assert(ref != 0);
    return (ref - 1) >> a->slot_bits;
}

uint64_t arena_slot_bytes(struct arena *a, slot_ref ref)
{
    uint64_t bytes;

    (void)arena_memory(a, ref, &bytes);
    return bytes;
}

int arena_slot_node(const struct arena *a, slot_ref ref)
{
    uint32_t home = a->slab[arena_slab_of(a, ref)].home;

    return home < a->nodes ? a->config.numa->node[home] : NUMA_NONE;
}

struct arena_group *arena_slot_group(const struct arena *a, slot_ref ref)
{
    return a->slab[(ref - 1) >> a->slot_bits].group;
}

bool arena_slab_owners(struct arena *a, uint32_t slab, bool (*visit)(void *ctx, uint64_t owner),
                       void *ctx)
{
    struct slab *e = &a->slab[slab];

    /* visit may free the last slot: then the slab has none any more. */
    for (uint32_t i = 0; i < e->slots; i++)
        if (arena_slot_used(e, i) && !visit(ctx, e->owner[i]))
            return false;
    return true;
}

void arena_slab_close(struct arena *a, uint32_t slab, bool closed)
{
    struct slab *e = &a->slab[slab];

    assert(e->n_free < e->slots);
    list_remove(&e->link);
    e->closed = closed;
    if (!closed && e->n_free > 0)
        list_push_back(e->partial, &e->link);
}

bool arena_slab_closed(const struct arena *a, uint32_t slab)
{
    return a->slab[slab].closed;
}

uint64_t arena_slab_slot_bytes(const struct arena *a, uint32_t slab)
{
    return arena_slab_granted(a, slab) || slab >= a->ready ? 0 : a->slab[slab].slot_bytes;
}

/* ---- slots of an earlier run ---- */

slot_ref arena_slot_take(struct arena *a, uint32_t slab, uint32_t slot, uint64_t bytes)
{
    uint64_t slot_bytes = arena_padded(bytes);
    struct slab *e = &a->slab[slab];

    if (slab < a->ready || slab >= a->slabs || bytes == 0 || slot_bytes > a->config.slab ||
        slot >= a->config.slab / slot_bytes)
        return 0;
    if (e->slots == 0 && arena_carve(a, e, slot_bytes) != 0)
        return 0;
    if (e->slot_bytes != slot_bytes || arena_slot_used(e, slot))
        return 0;
    e->owner[slot] = 0;
    poison(e->base + slot * slot_bytes, slot_bytes, bytes);
    a->used_slots++;
    a->used_bytes += slot_bytes;
    return ref_of(a, slab, slot);
}

void arena_slot_position(struct arena *a, slot_ref ref, uint32_t *slab, uint32_t *number)
{
    *slab = arena_slab_of(a, ref);
    *number = (ref - 1) & ((1u << a->slot_bits) - 1);
}

void arena_slot_own(struct arena *a, slot_ref ref, uint64_t owner)
{
    uint32_t slab, slot;

    arena_slot_position(a, ref, &slab, &slot);
    assert(arena_slot_used(&a->slab[slab], slot));
    a->slab[slab].owner[slot] = owner;
}

int arena_slot_ready(struct arena *a, slot_ref ref)
{
    uint32_t slab = arena_slab_of(a, ref);

    return slab < a->ready ? 0 : slab < a->limit ? -EAGAIN : -ENOSPC;
}

uint64_t arena_slots_used(const struct arena *a)
{
    return a->used_slots;
}

uint64_t arena_bytes_used(const struct arena *a)
{
    return a->used_bytes;
}

uint64_t arena_bytes_ready(const struct arena *a)
{
    return a->ready * a->config.slab;
}

uint64_t arena_bytes_configured(const struct arena *a)
{
    return a->limit * a->config.slab;
}

bool arena_space_comes(const struct arena *a, uint64_t bytes)
{
    uint64_t ahead = bytes > a->config.slab ? bytes / a->config.slab : 1;

    for (uint64_t i = a->ready; i < a->limit && i < a->ready + ahead; i++)
        if (a->slab[i].slots == 0)
            return true;
    return false;
}

uint64_t arena_slab_bytes(const struct arena *a)
{
    return a->config.slab;
}

uint32_t arena_slabs(const struct arena *a)
{
    return a->slabs + a->granted;
}

uint32_t arena_nodes(const struct arena *a)
{
    return a->nodes;
}

void arena_node(const struct arena *a, uint32_t i, struct arena_node *out)
{
    const struct arena_home *home = &a->home[i];

    *out = (struct arena_node){a->config.numa->node[i], home->ready * a->config.slab,
                               home->used_bytes};
}
