/* Encoded namespaces: blocks of a base namespace in another form, under the same keys.
 *
 * An encoded namespace's identity is a function of the base's and of the encoding's spec, so
 * whoever opens the same spec finds the same blocks, and no others. Its geometry is that of the
 * coded form: index, cache and tiers hold, move and check coded bytes and know nothing of
 * encodings. Devices encode and decode (device_job.coded).
 *
 * The namespace that holds a block says which form it has, from its birth on (base/form.h).
 * Lookups, loads and prefetches of a session that opened the namespace by encoding.open take a
 * block of the base where the encoded namespace has none. */
#ifndef UCMD_REQUEST_ENCODING_H
#define UCMD_REQUEST_ENCODING_H

#include "daemon/request/internal.h"

/* A view: where a session looks for blocks that it names in `coded`. There is one for each encoded
 * namespace that a session opened by encoding.open, as long as the namespace lives; ns.encoded
 * leads to it. It says nothing of the form that a block has: ns_form does, of the namespace that
 * holds the block. */
struct encoded_ns {
    struct requests *rq;
    struct ns *base, *coded;
};

/* Of a namespace that this session opened by encoding.open; else NULL, and the blocks of ns are bytes as any. */
struct encoded_ns *session_encoded(struct session *s, const struct ns *ns);

/* The block of each key, or 0: coded in DRAM, else plain in DRAM, else coded below, else plain below. With stop_at_gap the
 * search may end soon after a key that is in neither. A namespace whose loads are bypassed has none. */
void encoded_find(const struct encoded_ns *en, const uint8_t *keys, uint32_t n, bool stop_at_gap,
                  block_ref *refs);
/* As cache_touch, of blocks of either namespace. */
void encoded_touch(const struct encoded_ns *en, const block_ref *refs, uint32_t n);
/* Whether loads of ns are bypassed; of an encoded namespace, those of its base, too. en: of ns, or NULL. */
static inline bool encoded_bypassed(const struct requests *rq, const struct ns *ns,
                                    const struct encoded_ns *en)
{
    return bypass_on(rq, ns, BYPASS_LOAD) && (!en || bypass_on(rq, en->base, BYPASS_LOAD));
}
static inline bool encoded_is_plain(const struct encoded_ns *en, block_ref ref)
{
    return index_block(en->rq->rooms.index, ref)->ns == en->base->id;
}
/* The view of who copies by that region. Its pages hold plain KV if it is registered so; else what
 * is in region->ns as it is, and then no blocks of a base are looked for: they could not be had. */
static inline struct encoded_ns *region_view(const struct registered *r)
{
    return r->region->codec ? session_encoded(r->s, r->ns) : NULL;
}

/* mixed.c */
/* A dump has stored that part of the held block ref, which is of either namespace. Where other parts lie in the
 * other form only, the coded ones are decoded into the base. */
void mixed_part_stored(struct encoded_ns *en, block_ref ref, uint32_t part);

/* Shared lookups for an encoded namespace: of it, of the base, and so on in turn while each finds more of
 * the chain, for a chain's head may be plain and its middle coded. With `each` one of either. */
struct encoded_look {
    struct session *s;
    const struct encoded_ns *en;
    bool each;
    uint8_t rounds;
    uint32_t hits;     /* of a chain */
    uint64_t until_ms; /* all rounds together, by uv_now */
};
/* Begins the next round for those keys. False: there is none. *k is then as it was. */
bool encoded_look_next(struct encoded_look *look, struct proto_bin keys, struct shared_lookup **k);
/* Begins the first one, or the only one of a namespace ns that is not encoded (look->en is NULL), whose first
 * `hits` keys are here. False: there is nothing to ask for. */
bool encoded_look_begin(struct encoded_look *look, struct ns *ns, struct proto_bin keys,
                        uint32_t hits, struct shared_lookup **k);

#endif
