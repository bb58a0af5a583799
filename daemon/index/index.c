#include "daemon/index/index.h"
#include "daemon/index/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static_assert(offsetof(struct index, slab.places) == 0, "index_block takes it for that");

int index_new(uint64_t max_blocks, uint32_t max_ns, struct index **out)
{
    struct index *ix = calloc(1, sizeof(*ix));
    int rc;

    if (!ix)
        return -ENOMEM;
    rc = tenant_set_init(&ix->tenants);
    if (rc != 0)
        goto err_after_index;
    rc = ns_set_init(&ix->ns, max_ns);
    if (rc != 0)
        goto err_after_tenants;
    rc = getentropy(ix->secret, sizeof(ix->secret)) < 0 ? -errno : 0;
    if (rc != 0)
        goto err_after_ns;
    rc = slab_init(&ix->slab, &ix->pages);
    if (rc != 0)
        goto err_after_ns;
    pages_init(&ix->pages);
    ix->counted_max = max_blocks * INDEX_BLOCK_BYTES;
    *out = ix;
    return 0;

err_after_ns:
    ns_set_close(&ix->ns);
err_after_tenants:
    tenant_set_close(&ix->tenants);
err_after_index:
    free(ix);
    return rc;
}

void index_free(struct index *ix)
{
    if (!ix)
        return;
    ns_set_close(&ix->ns);
    tenant_set_close(&ix->tenants);
    slab_close(&ix->slab);
    pages_close(&ix->pages);
    free(ix);
}

/* ---- blocks ---- */

block_ref index_insert(struct index *ix, struct ns *ns, const uint8_t *key)
{
    struct block *b;
    block_ref ref;

    if (index_full(ix, ns))
        return 0;
    ref = slab_take(&ix->slab, ns->identity.parts);
    if (ref == 0)
        return 0;
    b = slab_block(&ix->slab, ref);
    memcpy(b->key, key, ns->identity.key_bytes);
    b->ns = ns->id;
    if (ns_table_insert(ix, ns->table, ref) != 0) {
        slab_give(&ix->slab, ref);
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
    slab_give(&ix->slab, ref);
    ix->blocks--;
    ix->counted -= ns->index_bytes;
    ns->blocks--;
    ix->holders -= --ns->tenant->blocks == 0;
    ns->tenant->index_bytes -= ns->index_bytes;
}

struct block *index_peek(struct index *ix, block_ref ref)
{
    uint32_t chunk = ref >> SLAB_CELL_BITS;
    struct block *b;

    /* The chunk's number may be another's by now, which has fewer records. */
    if (chunk >= ix->slab.places.n || !ix->slab.places.at[chunk].base ||
        ref % SLAB_CELLS >= ix->slab.chunk[chunk].fresh)
        return NULL;
    b = slab_block(&ix->slab, ref);
    return b->ns != 0 ? b : NULL;
}

/* ---- lists of blocks ---- */

void block_list_insert(struct index *ix, struct block_list *l, block_ref ref, block_ref before)
{
    struct block *b = index_block(ix, ref);
    block_ref *forth = before ? &index_block(ix, before)->list_next : &l->front;
    block_ref *back = *forth ? &index_block(ix, *forth)->list_prev : &l->back;

    b->list_prev = before;
    b->list_next = *forth;
    *forth = *back = ref;
    l->n++;
}

void block_list_remove(struct index *ix, struct block_list *l, struct block *b)
{
    *(b->list_prev ? &index_block(ix, b->list_prev)->list_next : &l->front) = b->list_next;
    *(b->list_next ? &index_block(ix, b->list_next)->list_prev : &l->back) = b->list_prev;
    b->list_prev = b->list_next = 0;
    l->n--;
}

/* ---- what it holds ---- */

uint64_t index_bytes(const struct index *ix)
{
    return sizeof(*ix) + ns_set_bytes(&ix->ns) + ix->slab.size_bytes +
           ix->slab.places.n * (sizeof(struct index_chunk) + sizeof(struct slab_chunk));
}

uint64_t index_bytes_max(const struct index *ix)
{
    return ix->counted_max;
}

bool index_full(const struct index *ix, const struct ns *ns)
{
    return ix->counted + ns->index_bytes > ix->counted_max;
}

bool index_over_part(const struct index *ix, const struct tenant *t)
{
    return t->index_bytes > ix->counted_max / (ix->holders > 0 ? ix->holders : 1);
}

uint64_t index_blocks(const struct index *ix)
{
    return ix->blocks;
}
