/* Summaries, sequences and selections: shared by the files of this module that serve them.
 * Summaries are blocks of a derived namespace (derived.h). */
#ifndef UCMD_RETRIEVAL_SUMMARY_H
#define UCMD_RETRIEVAL_SUMMARY_H

#include "daemon/retrieval/derived.h"
#include "daemon/retrieval/pool.h"

/* ---- summary.c: summaries' namespaces ---- */

/* The space of a namespace that this session opened by summary.open. NULL with call->error. */
struct derived_space *call_space(struct call *call, uint64_t ns);
/* Whether the daemon builds summaries of that base's blocks for this connection. 0, or -code with
 * call->error. */
int space_builds(struct call *call, struct ns *base);
/* Forgets what the session opened. */
void spaces_close_all(struct session *s);

/* ---- summary_build.c: summaries of what is stored ---- */

/* Published parts that wait for their build. */
#define SUMMARY_PUBLISHED_MAX 4096

int summaries_init(struct requests *rq); /* 0 or -ENOMEM */
/* No build may be under way, and no session left. */
void summaries_close(struct requests *rq);
/* Builds of published parts that have not begun are left out. */
void summaries_drop(struct requests *rq);
/* A session begins, or ends, to want summaries of what is stored. */
void space_watch(struct derived_space *space);
void space_unwatch(struct derived_space *space);

/* ---- sequence.c ---- */

#define SESSION_MAX_SEQUENCES 4096

/* Where the summaries of a sequence's blocks lie; threads read those below the n that they were
 * given. A longer array takes its place when it is full. */
struct sequence_summaries {
    struct session *s;
    uint32_t refs, cap;
    const void *at[]; /* NULL: the block has none */
};
void sequence_summaries_unref(struct sequence_summaries *d);

struct sequence_block {
    block_ref base, summary; /* leased; held, or 0 */
};

struct sequence {
    struct session *s;
    struct derived_space *space;
    uint32_t number, name; /* in the session's table, and on the wire */
    uint32_t part;
    uint32_t n;        /* blocks that selections see */
    uint32_t appended; /* and those that an append under way has brought */
    uint32_t cap;      /* of blocks */
    struct sequence_block *blocks;
    struct sequence_summaries *summaries;
    uint32_t n_summaries; /* below n */
    uint64_t deletions;   /* cache_deletions when it was opened */
    uint64_t lease_ms;
    uint32_t users; /* requests that use it */
    struct transfer *append;
    struct list refs; /* struct mapping_refs: while there are any, it does not run out */
    bool closing;
    uint32_t row; /* of the selection that is being answered: the first that chose blocks of it */
    struct deadline deadline;
    struct cache_retry retry; /* a closing sequence that has blocks left */
    struct request *close;    /* the request that closed it, or NULL */
};
/* The sequence of that name. It lives while the session has requests that use it. NULL with
 * call->error. */
struct sequence *call_sequence(struct call *call, uint64_t name);
void sequence_ref(struct sequence *ch);
void sequence_unref(struct sequence *ch);
/* Closes sequences of a session whose requests have ended, as many as one iteration of the event
 * loop may. True: none is left; otherwise session.settle_cb runs again. */
bool sequences_close_all(struct session *s);
/* Whether any block was evicted by name since the sequence was opened. */
bool sequence_deleting(const struct sequence *ch);
/* Whether the block may be used: it was not. */
bool sequence_has(const struct sequence *ch, uint32_t block);

/* For sequence_append.c. */
/* Makes room for n more blocks. 0 or -code with call->error. */
int sequence_reserve(struct call *call, struct sequence *ch, uint32_t n);
/* An append reserved for all of its keys. Gives back what missing blocks left unused. */
void sequence_trim(struct sequence *ch);
/* What a held summary takes of the arena. */
static inline uint64_t sequence_slot_bytes(const struct sequence *ch)
{
    return arena_padded(ns_part_bytes(ch->space->derived, ch->part));
}
/* Counts summaries that the sequence holds; negative: less. */
void sequence_held_add(const struct sequence *ch, int64_t summaries);
/* How many more it may hold. */
uint32_t sequence_may_hold(const struct sequence *ch);
/* The summary of its block `at` is in DRAM; the sequence takes the caller's reference to it. */
void sequence_keep(struct sequence *ch, uint32_t at, block_ref summary);

/* sequence_prefetch.c */
/* Key i of a transfer is that block of the sequence, which the transfer leases. One that was
 * evicted by name, or whose loads are bypassed, is a miss. */
void sequence_block_set(struct transfer *w, const struct sequence *ch, uint32_t i, uint32_t block);
/* Sets a bit for each block of index[n], until `most` were set that were not before. Returns how
 * many. */
uint32_t sequence_mark(const uint32_t *index, uint32_t n, uint32_t most, uint8_t *bits);
/* Brings the n blocks whose bits are set into DRAM, by a request that has the msgid of `from` and
 * is not answered. False: no request could begin. */
bool sequence_prefetch(struct sequence *ch, const struct request *from, const uint8_t *bits,
                       uint32_t n, uint8_t priority);

#endif
