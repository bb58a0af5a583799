/* The index as a whole. */
#include "daemon/index/index.h"
#include "daemon/index/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static_assert(offsetof(struct index, head) == 0, "index_cell takes it for that");

int index_new(uint64_t max_blocks, uint32_t max_ns, struct index **out)
{
    struct index *ix = calloc(1, sizeof(*ix));
    int rc;

    if (!ix)
        return -ENOMEM;
    rc = tenant_set_init(&ix->tenants);
    if (rc != 0)
        goto err_after_index;
    rc = ns_set_init(ix, max_ns);
    if (rc != 0)
        goto err_after_tenants;
    rc = getentropy(ix->secret, sizeof(ix->secret)) < 0 ? -errno : records_init(ix);
    if (rc != 0)
        goto err_after_ns;
    pages_init(&ix->pages);
    ix->head.bytes_max = max_blocks * INDEX_BLOCK_BYTES;
    *out = ix;
    return 0;

err_after_ns:
    records_close(ix);
    ns_set_close(ix);
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
    ns_set_close(ix);
    tenant_set_close(&ix->tenants);
    records_close(ix);
    pages_close(&ix->pages);
    free(ix);
}

uint64_t index_bytes(const struct index *ix)
{
    return sizeof(*ix) + ns_set_bytes(ix) + ix->records.size_bytes +
           ix->head.chunks * (sizeof(struct index_chunk) + sizeof(struct record_chunk));
}

uint64_t index_blocks(const struct index *ix)
{
    return ix->blocks;
}
