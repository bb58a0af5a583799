#include "daemon/index/internal.h"

#include <errno.h>
#include <stdlib.h>

#define CHUNK_MIN (64u << 10)
#define CHUNK_DOUBLINGS 5 /* 64 KiB to 2 MiB */
/* So that a record's key of 32 bytes lies in one cache line. */
#define RECORD_ALIGN 32u

static_assert(sizeof(struct part) == 24, "of the 128 bytes that a block may take");

/* ---- chunks ---- */

uint32_t slab_record_bytes(uint32_t parts)
{
    size_t n = sizeof(struct block) + parts * sizeof(struct part);

    return (uint32_t)((n + RECORD_ALIGN - 1) & ~(size_t)(RECORD_ALIGN - 1));
}

static uint32_t number_of(const struct slab *s, struct list *link)
{
    return (uint32_t)(LIST_ENTRY(link, struct slab_chunk, link) - s->chunk);
}

/* Returns a free number for a chunk, or 0. */
static uint32_t number_take(struct slab *s)
{
    struct list *link = list_pop_front(&s->free);

    if (link)
        return number_of(s, link);
    return s->places.n < SLAB_CHUNKS ? s->places.n++ : 0;
}

static void number_give(struct slab *s, uint32_t number)
{
    s->places.at[number] = (struct index_chunk){0};
    list_push_front(&s->free, &s->chunk[number].link);
}

static uint32_t chunk_new(struct slab *s, uint32_t parts)
{
    struct slab_class *class = &s->class[parts];
    uint32_t doublings = class->chunks < CHUNK_DOUBLINGS ? class->chunks : CHUNK_DOUBLINGS;
    uint32_t size_bytes = CHUNK_MIN << doublings;
    uint32_t record = slab_record_bytes(parts), records = size_bytes / record;
    uint32_t number = number_take(s);
    void *base;

    if (!number)
        return 0;
    base = pages_new(s->pages, size_bytes);
    if (!base) {
        number_give(s, number);
        return 0;
    }
    s->places.at[number] = (struct index_chunk){base, record};
    s->chunk[number] = (struct slab_chunk){
        .size_bytes = size_bytes,
        .records = records < SLAB_CELLS ? records : SLAB_CELLS,
        .parts = parts,
    };
    s->size_bytes += size_bytes;
    class->chunks++;
    class->empty++;
    list_push_front(&class->open, &s->chunk[number].link);
    return number;
}

static void chunk_free(struct slab *s, uint32_t number)
{
    struct slab_chunk *c = &s->chunk[number];
    struct slab_class *class = &s->class[c->parts];

    list_remove(&c->link);
    class->chunks--;
    class->empty--;
    s->size_bytes -= c->size_bytes;
    pages_free(s->places.at[number].base, c->size_bytes);
    number_give(s, number);
}

/* ---- records ---- */

block_ref slab_take(struct slab *s, uint32_t parts)
{
    uint32_t number, cell;
    struct slab_class *class;
    struct slab_chunk *c;
    struct block *b;
    block_ref ref;

    assert(parts >= 1 && parts <= UCM_MAX_PARTS);
    class = &s->class[parts];
    number = list_empty(&class->open) ? chunk_new(s, parts) : number_of(s, class->open.next);
    if (!number)
        return 0;
    c = &s->chunk[number];
    if (c->used == 0)
        class->empty--;
    cell = c->free_cell ? c->free_cell - 1 : c->fresh++;
    ref = number << SLAB_CELL_BITS | cell;
    b = slab_block(s, ref);
    if (c->free_cell)
        c->free_cell = b->hash_next;
    c->used++;
    if (c->used == c->records)
        list_remove(&c->link);
    memset(b, 0, s->places.at[number].record_bytes);
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
        list_push_front(&class->open, &c->link);
    c->used--;
    if (c->used > 0)
        return;
    class->empty++;
    if (class->empty > 1)
        chunk_free(s, number);
}

int slab_init(struct slab *s, struct pages *pages)
{
    *s = (struct slab){.pages = pages, .places.n = 1};
    list_init(&s->free);
    for (uint32_t i = 0; i <= UCM_MAX_PARTS; i++)
        list_init(&s->class[i].open);
    s->places.at = calloc(SLAB_CHUNKS, sizeof(*s->places.at));
    s->chunk = calloc(SLAB_CHUNKS, sizeof(*s->chunk));
    if (s->places.at && s->chunk)
        return 0;
    slab_close(s);
    return -ENOMEM;
}

void slab_close(struct slab *s)
{
    for (uint32_t i = 1; i < s->places.n; i++)
        pages_free(s->places.at[i].base, s->chunk[i].size_bytes);
    free(s->places.at);
    free(s->chunk);
}
