/* What several methods need: fields of free maps, pages of blocks. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

void pack_bin(msgpack_packer *pk, const char *name, const uint8_t *p, size_t n)
{
    proto_pack_str(pk, name);
    msgpack_pack_bin(pk, n);
    msgpack_pack_bin_body(pk, p, n);
}

void pack_text(msgpack_packer *pk, const char *name, const char *text)
{
    proto_pack_str(pk, name);
    proto_pack_str(pk, text);
}

void pack_flag(msgpack_packer *pk, const char *name, bool on)
{
    proto_pack_str(pk, name);
    if (on)
        msgpack_pack_true(pk);
    else
        msgpack_pack_false(pk);
}

struct page {
    block_ref *refs;
    uint32_t n;
};

static void page_visit_cb(void *ctx, block_ref ref, struct block *b)
{
    struct page *p = ctx;

    (void)b;
    p->refs[p->n++] = ref;
}

uint64_t blocks_page(struct requests *rq, struct ns *ns, uint64_t cursor, uint32_t limit,
                     uint32_t *n)
{
    struct page page = {.refs = rq->refs};
    uint64_t next = index_scan(rq->rooms.index, ns, cursor, limit, page_visit_cb, &page);

    *n = page.n;
    return next;
}
