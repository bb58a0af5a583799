/* Walks of summaries: summary.build, and sequence.append, whose sequence takes the references to
 * what comes to DRAM. Their blocks are of the summaries' namespace. An item takes a reference to a
 * part in DRAM, waits for its read, or for its build. */
#ifndef UCMD_RETRIEVAL_SUMMARY_WALK_H
#define UCMD_RETRIEVAL_SUMMARY_WALK_H

#include "daemon/request/walk.h"
#include "daemon/retrieval/summary.h"

struct summary_walk {
    struct walk w;
    struct derived_space *space;
    struct view_look look;     /* for bases on the shared tier, then for summaries */
    bool build;                /* summaries that are nowhere are built */
    struct sequence *sequence; /* of an append, else NULL */
    uint32_t sequence_first;
    uint32_t built;   /* summaries */
    block_ref *bases; /* the base's block of each key, leased by the build or by the sequence */
    uint8_t *found;   /* of an append: enum ucm_lookup_status of each key */
    uint8_t *keys;
};

static inline struct summary_walk *summary_walk(struct walk *w)
{
    return LIST_ENTRY(w, struct summary_walk, w);
}

/* kind: of a struct summary_walk. NULL with call->error. */
struct summary_walk *summary_walk_new(struct call *call, const struct walk_kind *kind,
                                      struct derived_space *space, struct proto_bin keys,
                                      uint32_t n, uint64_t deadline_ms);
/* Asks the shared tier for bases and summaries, if there is one, then pumps. */
void summaries_look(struct summary_walk *d);
/* Functions of walk_kind. */
int summary_begin(struct walk *w, const struct walk_item *it);
int summary_ready(struct walk *w, struct item_wait *iw, int status);
int summary_again(struct walk *w);
void summary_no_room(struct walk *w);

#endif
