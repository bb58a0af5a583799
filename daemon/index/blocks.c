/* Blocks: their records, and their coming and going. */
#include "daemon/index/index.h"
#include "daemon/index/internal.h"

#include <errno.h>
#include <stdlib.h>

#define CHUNK_MIN (64u << 10)
#define CHUNK_DOUBLINGS 5 /* 64 KiB to 2 MiB */
/* So that a record's key of 32 bytes lies in one cache line. */
#define RECORD_ALIGN 32u

static_assert(sizeof(struct part) == 24, "of the 128 bytes that a block may take");

/* ---- chunks ---- */

uint32_t record_bytes(uint32_t parts)
{
    size_t n = sizeof(struct block) + parts * sizeof(struct part);

    return (uint32_t)((n + RECORD_ALIGN - 1) & ~(size_t)(RECORD_ALIGN - 1));
}

/* Returns a free number for a chunk, or 0. */
static uint32_t number_take(struct index *ix)
{
    struct list *link = list_pop_front(&ix->records.free);

    if (link)
        return (uint32_t)(LIST_ENTRY(link, struct record_chunk, link) - ix->records.chunk);
    return ix->head.chunks < RECORD_CHUNKS ? ix->head.chunks++ : 0;
}

static void number_give(struct index *ix, uint32_t number)
{
    ix->head.chunk[number] = (struct index_chunk){0};
    list_push_front(&ix->records.free, &ix->records.chunk[number].link);
}

/* An open one. False: without memory, or a number. */
static bool chunk_new(struct index *ix, uint32_t parts)
{
    struct record_class *class = &ix->records.class[parts];
    uint32_t doublings = class->chunks < CHUNK_DOUBLINGS ? class->chunks : CHUNK_DOUBLINGS;
    uint32_t size_bytes = CHUNK_MIN << doublings;
    uint32_t record = record_bytes(parts), records = size_bytes / record;
    uint32_t number = number_take(ix);
    void *base;

    if (!number)
        return false;
    base = pages_new(&ix->pages, size_bytes);
    if (!base) {
        number_give(ix, number);
        return false;
    }
    ix->head.chunk[number] = (struct index_chunk){base, record};
    ix->records.chunk[number] = (struct record_chunk){
        .size_bytes = size_bytes,
        .records = records < INDEX_CELLS ? records : INDEX_CELLS,
        .parts = parts,
    };
    ix->records.size_bytes += size_bytes;
    class->chunks++;
    class->empty++;
    list_push_front(&class->open, &ix->records.chunk[number].link);
    return true;
}

static void chunk_free(struct index *ix, uint32_t number)
{
    struct record_chunk *c = &ix->records.chunk[number];
    struct record_class *class = &ix->records.class[c->parts];

    list_remove(&c->link);
    class->chunks--;
    class->empty--;
    ix->records.size_bytes -= c->size_bytes;
    pages_free(ix->head.chunk[number].base, c->size_bytes);
    number_give(ix, number);
}

/* ---- records ---- */

/* A zeroed record for a block with this many parts; 0 without memory. */
static block_ref record_take(struct index *ix, uint32_t parts)
{
    uint32_t number, cell;
    struct record_class *class;
    struct record_chunk *c;
    struct block *b;
    block_ref ref;

    assert(parts >= 1 && parts <= UCM_MAX_PARTS);
    class = &ix->records.class[parts];
    if (list_empty(&class->open) && !chunk_new(ix, parts))
        return 0;
    c = LIST_ENTRY(class->open.next, struct record_chunk, link);
    number = (uint32_t)(c - ix->records.chunk);
    if (c->used == 0)
        class->empty--;
    cell = c->free_cell ? c->free_cell - 1 : c->fresh++;
    ref = number << INDEX_CELL_BITS | cell;
    b = index_cell(ix, ref);
    if (c->free_cell)
        c->free_cell = b->hash_next;
    c->used++;
    if (c->used == c->records)
        list_remove(&c->link);
    memset(b, 0, ix->head.chunk[number].record_bytes);
    return ref;
}

static void record_give(struct index *ix, block_ref ref)
{
    uint32_t number = ref >> INDEX_CELL_BITS;
    struct record_chunk *c = &ix->records.chunk[number];
    struct record_class *class = &ix->records.class[c->parts];
    struct block *b = index_cell(ix, ref);

    b->ns = 0;
    b->hash_next = c->free_cell;
    c->free_cell = (ref & (INDEX_CELLS - 1)) + 1;
    if (c->used == c->records)
        list_push_front(&class->open, &c->link);
    c->used--;
    if (c->used > 0)
        return;
    class->empty++;
    if (class->empty > 1)
        chunk_free(ix, number);
}

int records_init(struct index *ix)
{
    struct records *s = &ix->records;

    list_init(&s->free);
    for (uint32_t i = 0; i <= UCM_MAX_PARTS; i++)
        list_init(&s->class[i].open);
    ix->head.chunks = 1;
    ix->head.chunk = calloc(RECORD_CHUNKS, sizeof(*ix->head.chunk));
    s->chunk = calloc(RECORD_CHUNKS, sizeof(*s->chunk));
    return ix->head.chunk && s->chunk ? 0 : -ENOMEM;
}

void records_close(struct index *ix)
{
    for (uint32_t i = 1; i < ix->head.chunks; i++)
        pages_free(ix->head.chunk[i].base, ix->records.chunk[i].size_bytes);
    free(ix->head.chunk);
    free(ix->records.chunk);
}

/* ---- how many there may be ---- */

bool index_full(const struct index *ix, const struct ns *ns)
{
    return ix->counted + ns->index_bytes > ix->head.bytes_max;
}

bool index_over_part(const struct index *ix, const struct tenant *t)
{
    return t->index_bytes > ix->head.bytes_max / (ix->holders > 0 ? ix->holders : 1);
}

/* ---- blocks ---- */

block_ref index_insert(struct index *ix, struct ns *ns, const uint8_t *key)
{
    struct block *b;
    block_ref ref;

    if (index_full(ix, ns))
        return 0;
    ref = record_take(ix, ns->identity.parts);
    if (ref == 0)
        return 0;
    b = index_cell(ix, ref);
    memcpy(b->key, key, ns->identity.key_bytes);
    b->ns = ns->id;
    if (ns_table_insert(ix, ns->table, ref) != 0) {
        record_give(ix, ref);
        return 0;
    }
    ix->blocks++;
    ix->counted += ns->index_bytes;
    ns->blocks++;
    ix->holders += ns->tenant->blocks++ == 0;
    ns->tenant->index_bytes += ns->index_bytes;
    return ref;
}

void index_remove(struct index *ix, block_ref ref)
{
    struct block *b = index_block(ix, ref);
    struct ns *ns = index_ns(ix, b->ns);

    assert(b->leases == 0 && !(b->flags & BLOCK_IN_POLICY));
    for (uint32_t i = 0; i < ns->identity.parts; i++)
        assert(b->part[i].users == 0);
    ns_table_remove(ix, ns->table, ref);
    record_give(ix, ref);
    ix->blocks--;
    ix->counted -= ns->index_bytes;
    ns->blocks--;
    ix->holders -= --ns->tenant->blocks == 0;
    ns->tenant->index_bytes -= ns->index_bytes;
}

struct block *index_peek(struct index *ix, block_ref ref)
{
    uint32_t chunk = ref >> INDEX_CELL_BITS;
    struct block *b;

    /* The chunk's number may be another's by now, which has fewer records. */
    if (chunk >= ix->head.chunks || !ix->head.chunk[chunk].base ||
        ref % INDEX_CELLS >= ix->records.chunk[chunk].fresh)
        return NULL;
    b = index_cell(ix, ref);
    return b->ns != 0 ? b : NULL;
}
