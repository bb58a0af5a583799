/* Transfers of summaries: summary.build, and sequence.append, whose sequence takes the references
 * to what comes to DRAM. Their blocks are of the summaries' namespace. An item takes a reference to
 * a part in DRAM, waits for its read, or for its build. */
#ifndef UCMD_RETRIEVAL_SUMMARY_TRANSFER_H
#define UCMD_RETRIEVAL_SUMMARY_TRANSFER_H

#include "daemon/request/transfer.h"
#include "daemon/retrieval/summary.h"

struct summary_transfer {
    struct transfer w;
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

static inline struct summary_transfer *summary_transfer(struct transfer *w)
{
    return LIST_ENTRY(w, struct summary_transfer, w);
}

/* kind: of a struct summary_transfer. NULL with call->error. */
struct summary_transfer *summary_transfer_new(struct call *call, const struct transfer_kind *kind,
                                              struct derived_space *space, struct proto_bin keys,
                                              uint32_t n, uint64_t timeout_ms);
/* Asks the shared tier for bases and summaries, if there is one, then pumps. */
void summaries_look(struct summary_transfer *d);
/* Functions of transfer_kind. */
int summary_begin(struct transfer *w, const struct transfer_item *it);
int summary_ready(struct transfer *w, struct item_wait *iw, int status);
int summary_again(struct transfer *w);
void summary_no_room(struct transfer *w);

#endif
