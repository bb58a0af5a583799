/* Walks of digests: digest.build, and chain.append, whose chain takes the references to what comes
 * to DRAM. Their blocks are of the digests' namespace. An item takes a reference to a part in DRAM,
 * waits for its read, or for its build. */
#ifndef UCMD_RETRIEVAL_DIGEST_WALK_H
#define UCMD_RETRIEVAL_DIGEST_WALK_H

#include "daemon/request/walk.h"
#include "daemon/retrieval/digest.h"

struct digest_walk {
    struct walk w;
    struct derived_space *space;
    struct view_look look; /* for bases on the shared tier, then for digests */
    bool build;            /* digests that are nowhere are built */
    struct chain *chain;   /* of an append, else NULL */
    uint32_t chain_first;
    uint32_t built;   /* digests */
    block_ref *bases; /* the base's block of each key, leased by the build or by the chain */
    uint8_t *found;   /* of an append: enum ucm_lookup_status of each key */
    uint8_t *keys;
};

static inline struct digest_walk *digest_walk(struct walk *w)
{
    return LIST_ENTRY(w, struct digest_walk, w);
}

/* kind: of a struct digest_walk. NULL with call->error. */
struct digest_walk *digest_walk_new(struct call *call, const struct walk_kind *kind,
                                    struct derived_space *space, struct proto_bin keys, uint32_t n,
                                    uint64_t deadline_ms);
/* Asks the shared tier for bases and digests, if there is one, then pumps. */
void digests_look(struct digest_walk *d);
/* Functions of walk_kind. */
int digest_begin(struct walk *w, const struct walk_item *it);
int digest_ready(struct walk *w, struct item_wait *iw, int status);
int digest_again(struct walk *w);
void digest_no_room(struct walk *w);

#endif
