#include "daemon/index/internal.h"

#include <errno.h>
#include <stdlib.h>

#define CHUNK_MIN (64u << 10)
#define CHUNK_DOUBLINGS 5 /* 64 KiB to 2 MiB */
/* So that a record's key of 32 bytes lies in one cache line. */
#define RECORD_ALIGN 32u

static_assert(sizeof(struct part) == 24, "of the 128 bytes that a block may take");

/* ---- chunks ---- */

static uint32_t record_bytes(uint32_t parts)
{
    size_t n = sizeof(struct block) + parts * sizeof(struct part);

    return (uint32_t)((n + RECORD_ALIGN - 1) & ~(size_t)(RECORD_ALIGN - 1));
}

static void chunk_link(struct slab *s, uint32_t number)
{
    struct slab_chunk *c = &s->chunk[number];
    struct slab_class *class = &s->class[c->parts];

    c->prev = 0;
    c->next = class->open;
    if (class->open)
        s->chunk[class->open].prev = number;
    class->open = number;
}

static void chunk_unlink(struct slab *s, uint32_t number)
{
    struct slab_chunk *c = &s->chunk[number];

    if (c->prev)
        s->chunk[c->prev].next = c->next;
    else
        s->class[c->parts].open = c->next;
    if (c->next)
        s->chunk[c->next].prev = c->prev;
    c->prev = c->next = 0;
}

/* Returns a free number for a chunk, or 0. */
static uint32_t number_take(struct slab *s)
{
    uint32_t number = s->free_chunk;

    if (number)
        s->free_chunk = s->chunk[number].next;
    else if (s->chunks < SLAB_CHUNKS)
        number = s->chunks++;
    return number;
}

static void number_give(struct slab *s, uint32_t number)
{
    s->place[number] = (struct slab_place){0};
    s->chunk[number] = (struct slab_chunk){.next = s->free_chunk};
    s->free_chunk = number;
}

static uint32_t chunk_new(struct slab *s, uint32_t parts)
{
    struct slab_class *class = &s->class[parts];
    uint32_t doublings = class->chunks < CHUNK_DOUBLINGS ? class->chunks : CHUNK_DOUBLINGS;
    uint32_t size_bytes = CHUNK_MIN << doublings;
    uint32_t record = record_bytes(parts), records = size_bytes / record;
    uint32_t number = number_take(s);
    void *base;

    if (!number)
        return 0;
    base = pages_new(s->pages, size_bytes);
    if (!base) {
        number_give(s, number);
        return 0;
    }
    s->place[number] = (struct slab_place){base, record};
    s->chunk[number] = (struct slab_chunk){
        .size_bytes = size_bytes,
        .records = records < SLAB_CELLS ? records : SLAB_CELLS,
        .parts = parts,
    };
    s->size_bytes += size_bytes;
    class->chunks++;
    class->empty++;
    chunk_link(s, number);
    return number;
}

static void chunk_free(struct slab *s, uint32_t number)
{
    struct slab_chunk *c = &s->chunk[number];
    struct slab_class *class = &s->class[c->parts];

    chunk_unlink(s, number);
    class->chunks--;
    class->empty--;
    s->size_bytes -= c->size_bytes;
    pages_free(s->place[number].base, c->size_bytes);
    number_give(s, number);
}

/* ---- records ---- */

block_ref slab_take(struct slab *s, uint32_t parts)
{
    uint32_t number, cell;
    struct slab_chunk *c;
    struct block *b;
    block_ref ref;

    assert(parts >= 1 && parts <= UCM_MAX_PARTS);
    number = s->class[parts].open;
    if (!number)
        number = chunk_new(s, parts);
    if (!number)
        return 0;
    c = &s->chunk[number];
    if (c->used == 0)
        s->class[parts].empty--;
    cell = c->free_cell ? c->free_cell - 1 : c->fresh++;
    ref = number << SLAB_CELL_BITS | cell;
    b = slab_block(s, ref);
    if (c->free_cell)
        c->free_cell = b->hash_next;
    c->used++;
    if (c->used == c->records)
        chunk_unlink(s, number);
    memset(b, 0, s->place[number].record_bytes);
    return ref;
}

void slab_give(struct slab *s, block_ref ref)
{
    uint32_t number = ref >> SLAB_CELL_BITS;
    struct slab_chunk *c = &s->chunk[number];
    struct slab_class *class = &s->class[c->parts];
    struct block *b = slab_block(s, ref);

    b->ns = 0;
    b->hash_next = c->free_cell;
    c->free_cell = (ref & (SLAB_CELLS - 1)) + 1;
    if (c->used == c->records)
        chunk_link(s, number);
    c->used--;
    if (c->used > 0)
        return;
    class->empty++;
    if (class->empty > 1)
        chunk_free(s, number);
}

int slab_init(struct slab *s, struct pages *pages)
{
    *s = (struct slab){.pages = pages, .chunks = 1};
    s->place = calloc(SLAB_CHUNKS, sizeof(*s->place));
    s->chunk = calloc(SLAB_CHUNKS, sizeof(*s->chunk));
    if (s->place && s->chunk)
        return 0;
    slab_close(s);
    return -ENOMEM;
}

void slab_close(struct slab *s)
{
    for (uint32_t i = 1; i < s->chunks; i++)
        pages_free(s->place[i].base, s->chunk[i].size_bytes);
    free(s->place);
    free(s->chunk);
}
