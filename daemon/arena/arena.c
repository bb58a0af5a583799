#include "daemon/arena/arena.h"
#include "daemon/arena/internal.h"

#include "daemon/base/log.h"
#include "daemon/base/poison.h"
#include "proto/limits.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* slot_ref = 1 + (extent << slot_bits | slot), slot_bits as many as an extent of the smallest slots
 * needs: so there are names for 16 TiB less one extent, whatever the extents' size. */

uint64_t arena_padded(uint64_t bytes)
{
    return (bytes + ARENA_ALIGN - 1) & ~(uint64_t)(ARENA_ALIGN - 1);
}

/* ---- slots ---- */

/* The extents at this home with a free slot of this size. */
static struct list *partial_of(const struct arena *a, uint64_t slot_bytes, uint32_t home)
{
    struct list *l = &a->partial[(slot_bytes / ARENA_ALIGN - 1) * (a->nodes + 1) + home];

    if (!l->next)
        list_init(l);
    return l;
}

/* The thread that makes an extent ready touches all of it; until then none of it is poisoned. */
static bool extent_is_ready(const struct arena *a, const struct extent *e)
{
    uint32_t extent = (uint32_t)(e - a->extent);

    return arena_extent_lent(a, extent) || extent < a->ready;
}

void arena_extent_unpoison(const struct arena *a, uint32_t extent)
{
    const char *base = a->extent[extent].base;

    /* Without slots all of it is poisoned, or, if it never had any, nothing. */
    if (a->extent[extent].slots > 0 || poison_begins(base, 1) == 0)
        poison(base, a->config.extent, a->config.extent);
}

static slot_ref ref_of(const struct arena *a, uint32_t extent, uint32_t slot)
{
    return 1 + (extent << a->slot_bits | slot);
}

static void slot_push_free(struct extent *e, uint32_t slot)
{
    e->owner[slot] = SLOT_FREE | e->free_slot;
    e->free_slot = slot;
    e->n_free++;
}

int arena_carve(struct arena *a, struct extent *e, uint64_t slot_bytes)
{
    uint32_t slots = (uint32_t)(a->config.extent / slot_bytes);

    e->owner = malloc(slots * sizeof(*e->owner));
    if (!e->owner)
        return -ENOMEM;
    memset(e->owner, 0xff, slots * sizeof(*e->owner)); /* SLOT_FREE */
    e->slot_bytes = slot_bytes;
    e->slots = slots;
    e->n_free = slots;
    e->fresh = 0;
    e->partial = partial_of(a, slot_bytes, e->home);
    if (extent_is_ready(a, e))
        poison(e->base, a->config.extent, 0);
    return 0;
}

static void extent_uncarve(struct arena *a, struct extent *e)
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
void arena_extent_ready(struct arena *a, uint32_t extent)
{
    struct extent *e = &a->extent[extent];
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
        extent_uncarve(a, e);
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
static struct extent *first_of(const struct list *extents)
{
    return !extents->next || list_empty(extents) ? NULL
                                                 : LIST_ENTRY(extents->next, struct extent, link);
}

/* A free extent of no node in particular comes first, then one of the node with most free extents,
 * so that no node runs out before the others. */
static struct extent *extent_anywhere(const struct arena *a, const struct list *partial)
{
    struct extent *e = NULL;
    uint32_t from = a->nodes;

    for (uint32_t i = 0; !e && i <= a->nodes; i++)
        e = first_of(&partial[i]);
    if (!e && a->home[from].n_free == 0)
        for (uint32_t i = 0; i < a->nodes; i++)
            if (a->home[i].n_free > a->home[from].n_free)
                from = i;
    return e ? e : first_of(&a->home[from].free);
}

/* An extent with a free slot of this size; NULL when there is none. */
static struct extent *extent_find(struct arena *a, uint64_t slot_bytes, int node)
{
    const struct list *partial = &a->partial[(slot_bytes / ARENA_ALIGN - 1) * (a->nodes + 1)];
    uint32_t home = a->nodes > 0 ? arena_home_of(a, node) : 0;
    struct extent *e = NULL;

    if (home < a->nodes && !(e = first_of(&partial[home])))
        e = first_of(&a->home[home].free);
    if (!e)
        e = extent_anywhere(a, partial);
    if (!e || e->slots > 0)
        return e;
    if (arena_carve(a, e, slot_bytes) != 0)
        return NULL;
    list_remove(&e->link);
    a->home[e->home].n_free--;
    list_push_front(e->partial, &e->link);
    return e;
}

slot_ref arena_slot_hand_out(struct arena *a, struct extent *e, uint64_t bytes, uint64_t owner)
{
    bool fresh = e->n_free == e->slots - e->fresh; /* none was given back */
    uint32_t slot = fresh ? e->fresh++ : e->free_slot;
    uint64_t padding = e->slot_bytes - bytes;
    char *p = e->base + slot * e->slot_bytes;

    poison(p, e->slot_bytes, e->slot_bytes);
    memset(p + bytes, 0, padding); /* it goes to a disk with the slot, whoever had that before */
    poison(p, e->slot_bytes, bytes);

    if (!fresh)
        e->free_slot = (uint32_t)e->owner[slot];
    e->n_free--;
    e->owner[slot] = owner;
    if (e->n_free == 0)
        list_remove(&e->link);
    return ref_of(a, (uint32_t)(e - a->extent), slot);
}

slot_ref arena_alloc(struct arena *a, uint64_t bytes, uint64_t owner, int node)
{
    uint64_t slot_bytes = arena_padded(bytes);
    struct extent *e;

    assert(bytes > 0 && !(owner & SLOT_FREE));
    if (slot_bytes > a->config.extent)
        return 0;
    e = extent_find(a, slot_bytes, node);
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
    uint32_t extent, slot;
    struct extent *e;

    arena_slot_position(a, ref, &extent, &slot);
    e = &a->extent[extent];
    if (extent_is_ready(a, e))
        poison(memory, e->slot_bytes, 0);
    slot_push_free(e, slot);
    if (arena_extent_lent(a, extent)) {
        a->lent_freed(a, e, slot);
        return;
    }
    a->used_slots--;
    a->used_bytes -= e->slot_bytes;
    if (extent >= a->ready)
        return; /* of an earlier run; arena_extent_ready lists the extent */
    a->home[e->home].used_bytes -= e->slot_bytes;
    if (e->n_free == e->slots)
        extent_uncarve(a, e);
    else if (e->n_free == 1 && !e->closed)
        list_push_back(e->partial, &e->link);
}

void *arena_memory(struct arena *a, slot_ref ref, uint64_t *slot_bytes)
{
    uint32_t extent = (ref - 1) >> a->slot_bits, slot = (ref - 1) & ((1u << a->slot_bits) - 1);
    struct extent *e = &a->extent[extent];

    assert(ref != 0 && extent < a->extents + a->lent && slot < e->slots &&
           !(e->owner[slot] & SLOT_FREE));
    if (slot_bytes)
        *slot_bytes = e->slot_bytes;
    return e->base + slot * e->slot_bytes;
}

uint32_t arena_extent_of(const struct arena *a, slot_ref ref)
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
    uint32_t home = a->extent[arena_extent_of(a, ref)].home;

    return home < a->nodes ? a->config.numa->node[home] : NUMA_NONE;
}

struct arena_group *arena_slot_group(const struct arena *a, slot_ref ref)
{
    return a->extent[(ref - 1) >> a->slot_bits].group;
}

bool arena_extent_owners(struct arena *a, uint32_t extent, bool (*visit)(void *ctx, uint64_t owner),
                         void *ctx)
{
    struct extent *e = &a->extent[extent];

    /* visit may free the last slot: then the extent has none any more. */
    for (uint32_t i = 0; i < e->slots; i++)
        if (arena_slot_used(e, i) && !visit(ctx, e->owner[i]))
            return false;
    return true;
}

void arena_extent_close(struct arena *a, uint32_t extent, bool closed)
{
    struct extent *e = &a->extent[extent];

    assert(e->n_free < e->slots);
    list_remove(&e->link);
    e->closed = closed;
    if (!closed && e->n_free > 0)
        list_push_back(e->partial, &e->link);
}

bool arena_extent_closed(const struct arena *a, uint32_t extent)
{
    return a->extent[extent].closed;
}

uint64_t arena_extent_slot_bytes(const struct arena *a, uint32_t extent)
{
    return arena_extent_lent(a, extent) || extent >= a->ready ? 0 : a->extent[extent].slot_bytes;
}

/* ---- slots of an earlier run ---- */

slot_ref arena_slot_take(struct arena *a, uint32_t extent, uint32_t slot, uint64_t bytes)
{
    uint64_t slot_bytes = arena_padded(bytes);
    struct extent *e = &a->extent[extent];

    if (extent < a->ready || extent >= a->extents || bytes == 0 || slot_bytes > a->config.extent ||
        slot >= a->config.extent / slot_bytes)
        return 0;
    if (e->slots == 0 && arena_carve(a, e, slot_bytes) != 0)
        return 0;
    if (e->slot_bytes != slot_bytes || arena_slot_used(e, slot))
        return 0;
    e->owner[slot] = 0;
    poison(e->base + slot * slot_bytes, slot_bytes, bytes);
    a->used_slots++;
    a->used_bytes += slot_bytes;
    return ref_of(a, extent, slot);
}

void arena_slot_position(struct arena *a, slot_ref ref, uint32_t *extent, uint32_t *number)
{
    *extent = arena_extent_of(a, ref);
    *number = (ref - 1) & ((1u << a->slot_bits) - 1);
}

void arena_slot_own(struct arena *a, slot_ref ref, uint64_t owner)
{
    uint32_t extent, slot;

    arena_slot_position(a, ref, &extent, &slot);
    assert(arena_slot_used(&a->extent[extent], slot));
    a->extent[extent].owner[slot] = owner;
}

int arena_slot_ready(struct arena *a, slot_ref ref)
{
    uint32_t extent = arena_extent_of(a, ref);

    return extent < a->ready ? 0 : extent < a->limit ? -EAGAIN : -ENOSPC;
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
    return a->ready * a->config.extent;
}

uint64_t arena_bytes_configured(const struct arena *a)
{
    return a->limit * a->config.extent;
}

bool arena_space_comes(const struct arena *a, uint64_t bytes)
{
    uint64_t ahead = bytes > a->config.extent ? bytes / a->config.extent : 1;

    for (uint64_t i = a->ready; i < a->limit && i < a->ready + ahead; i++)
        if (a->extent[i].slots == 0)
            return true;
    return false;
}

uint64_t arena_extent_bytes(const struct arena *a)
{
    return a->config.extent;
}

uint32_t arena_extents(const struct arena *a)
{
    return a->extents + a->lent;
}

uint32_t arena_nodes(const struct arena *a)
{
    return a->nodes;
}

void arena_node(const struct arena *a, uint32_t i, struct arena_node *out)
{
    const struct arena_home *home = &a->home[i];

    *out = (struct arena_node){a->config.numa->node[i], home->ready * a->config.extent,
                               home->used_bytes};
}
