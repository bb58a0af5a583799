#include "daemon/base/table.h"

#include <stdlib.h>

void table_init(struct table *t, uint32_t max)
{
    *t = (struct table){.max = max};
}

void table_close(struct table *t)
{
    free(t->item);
    free(t->free_ring);
    *t = (struct table){0};
}

static int table_grow(struct table *t)
{
    uint32_t cap = t->cap ? 2 * t->cap : 16;
    uint32_t *ring;
    void **item;

    if (cap > t->max)
        cap = t->max;
    if (cap == t->cap)
        return -1;
    /* Growing only happens with no number free, so the ring is empty and needs no unrolling. */
    ring = malloc(cap * sizeof(*ring));
    item = realloc(t->item, cap * sizeof(*item));
    if (item)
        t->item = item;
    if (!ring || !item) {
        free(ring);
        return -1;
    }
    free(t->free_ring);
    t->free_ring = ring;
    t->free_head = 0;
    t->cap = cap;
    return 0;
}

uint32_t table_add(struct table *t, void *item)
{
    uint32_t i;

    if (t->used < t->cap) {
        i = t->used++;
    } else if (t->free_n > 0) {
        i = t->free_ring[t->free_head];
        t->free_head = (t->free_head + 1) % t->cap;
        t->free_n--;
    } else {
        if (table_grow(t) != 0)
            return 0;
        i = t->used++;
    }
    t->item[i] = item;
    return i + 1;
}

void *table_get(const struct table *t, uint32_t number)
{
    return number >= 1 && number <= t->used ? t->item[number - 1] : NULL;
}

void *table_remove(struct table *t, uint32_t number)
{
    void *item = table_get(t, number);

    if (item) {
        t->item[number - 1] = NULL;
        t->free_ring[(t->free_head + t->free_n++) % t->cap] = number - 1;
    }
    return item;
}

uint32_t table_count(const struct table *t)
{
    return t->used - t->free_n;
}

uint32_t table_next(const struct table *t, uint32_t number)
{
    for (uint32_t i = number; i < t->used; i++)
        if (t->item[i])
            return i + 1;
    return 0;
}
