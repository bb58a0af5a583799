/* Small numbers for pointers, for the wire and the index's 32-bit fields. They run from 1 to `max`.
 * The number that was freed first is reused first, so that a stale number mostly names nothing.
 * Thread: the table's owner's. */
#ifndef UCMD_BASE_TABLE_H
#define UCMD_BASE_TABLE_H

#include <stdint.h>

struct table {
    void **item;
    uint32_t *free_ring; /* freed numbers, oldest first */
    uint32_t used, cap, max, free_head, free_n;
};

void table_init(struct table *t, uint32_t max);
void table_close(struct table *t);
/* The new number, or 0: full or out of memory. */
uint32_t table_add(struct table *t, void *item);
void *table_get(const struct table *t, uint32_t number); /* NULL when there is none */
void *table_remove(struct table *t, uint32_t number);    /* likewise */
uint32_t table_count(const struct table *t);

/* for (uint32_t i = table_next(t, 0); i; i = table_next(t, i)): every number in use; the present
 * one may be removed on the way. */
uint32_t table_next(const struct table *t, uint32_t number);

#endif
