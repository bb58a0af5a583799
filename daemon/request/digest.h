/* Digests, chains and selections: shared by the files of this room that serve them.
 *
 * Digests are blocks of a derived namespace under their base block's keys. A build reads a part of the
 * base block and fills the same part of the digest block, as a dump would: the fill's claim makes sure
 * that one build serves all who want it. */
#ifndef UCMD_REQUEST_DIGEST_H
#define UCMD_REQUEST_DIGEST_H

#include "daemon/digest/pool.h"
#include "daemon/request/internal.h"
#include "kernels/sparse/sparse.h"

/* ---- digest.c: derived namespaces ---- */

/* Of all the spaces of one tenant. Tenants take turns with the parts that wait for their builds, and none
 * takes more than three quarters of the places. */
struct digest_tenant {
    struct list link;
    struct list turn;  /* in digests.turns, while parts wait */
    struct list parts; /* struct published, the oldest first */
    uint32_t waiting;  /* of them */
    uint32_t builds;   /* under way */
    uint32_t refs;     /* spaces */
    char name[UCM_MAX_NAME_BYTES + 1];
};

/* What the digests of a namespace are made of. There is one for each derived namespace while sessions,
 * chains or builds use it. */
struct digest_space {
    struct list link;
    struct requests *rq;
    uint32_t refs;
    uint32_t watchers; /* sessions that want digests of what is stored in base */
    struct ns *base, *derived;
    struct digest_tenant *tenant;
    struct ucm_digest_plan plan;
};
struct digest_space *space_ref(struct digest_space *space);
void space_unref(struct digest_space *space);
/* The space of a namespace that this session opened by digest.open. NULL with call->error. */
struct digest_space *call_space(struct call *call, uint64_t ns);
/* Whether the daemon builds digests of that base's blocks: not if they are encoded. 0, or -code with
 * call->error. */
int space_builds(struct call *call, const struct ns *base);
/* Forgets what the session opened. */
void spaces_close_all(struct session *s);

/* ---- digest_build.c: builds ---- */

/* Builds under way. Each has a thread's work ahead of it, and the slots of two parts. */
#define DIGEST_BUILDS_MAX 256
/* Published parts that wait for their build. */
#define DIGEST_PUBLISHED_MAX 4096
/* What one tenant may take of either. */
#define DIGEST_OF_TENANT(all) ((all) / 4 * 3)

int digests_init(struct requests *rq); /* 0 or -ENOMEM */
/* No build may be under way, and no session left. */
void digests_close(struct requests *rq);
/* Builds end soon, without their digests. */
void digests_stop(struct requests *rq);
/* Builds of published parts that have not begun are left out. */
void digests_drop(struct requests *rq);
/* As cache_get of part `part` of the held block `digest`, with one more source: if the digest is
 * nowhere, it is built from the held block `base` (0: from nothing). Further: -ENOENT: neither is whole;
 * -EINPROGRESS: a worker's dump is writing the digest; -EBUSY also with DIGEST_BUILDS_MAX builds, or the
 * tenant's part of them. */
int digest_get(struct digest_space *space, block_ref base, block_ref digest, uint32_t part,
               uint8_t priority, struct cache_wait *w);
/* A session begins, or ends, to want digests of what is stored. */
void space_watch(struct digest_space *space);
void space_unwatch(struct digest_space *space);

/* ---- chain.c ---- */

#define SESSION_MAX_CHAINS 4096

/* Where the digests of a chain's blocks lie; threads read those below the n that they were given. A
 * longer array takes its place when it is full. */
struct chain_digests {
    struct session *s;
    uint32_t refs, cap;
    const void *at[]; /* NULL: the block has none */
};
void chain_digests_unref(struct chain_digests *d);

struct chain_block {
    block_ref base, digest; /* leased; held, or 0 */
};

struct chain {
    struct session *s;
    struct digest_space *space;
    uint32_t number, name; /* in the session's table, and on the wire */
    uint32_t part;
    uint32_t n;        /* blocks that selections see */
    uint32_t appended; /* and those that an append under way has brought */
    uint32_t cap;      /* of blocks */
    struct chain_block *blocks;
    struct chain_digests *digests;
    uint32_t n_digests; /* below n */
    uint64_t dooms;     /* cache_dooms when it was opened */
    uint64_t lease_ms;
    uint32_t users; /* requests that use it */
    struct transfer *append;
    bool closing;
    struct deadline deadline;
    struct cache_retry retry; /* a closing chain that has blocks left */
    struct request *close;    /* the request that closed it, or NULL */
};
/* The chain of that name. It lives while the session has requests that use it. NULL with
 * call->error. */
struct chain *call_chain(struct call *call, uint64_t name);
void chain_use(struct chain *ch);
void chain_unuse(struct chain *ch);
/* Closes chains of a session whose requests have ended, as many as one turn of the loop may. True: none
 * is left; otherwise session_settle runs again. */
bool chains_close_all(struct session *s);
/* Whether the block may be used: it was not evicted by name since the chain was opened. */
bool chain_has(const struct chain *ch, uint32_t block);

/* chain_prefetch.c */
/* Sets a bit for each block of index[n], until `most` were set that were not before. Returns how many. */
uint32_t chain_mark(const uint32_t *index, uint32_t n, uint32_t most, uint8_t *bits);
/* Brings the n blocks whose bits are set into DRAM, by a request that has the msgid of `from` and is not
 * answered. False: no request could begin. */
bool chain_prefetch(struct chain *ch, const struct request *from, const uint8_t *bits, uint32_t n,
                    uint8_t priority);

/* For the append's transfer. */
struct transfer;
/* Looks for some more blocks, and opens their digests. False: there are more for another turn. */
bool append_open(struct transfer *t);
/* False: chains hold as much as they may, so no more digests are brought. */
bool append_may_hold(const struct transfer *t);
/* The digest of the item is in DRAM, and the transfer has one use of it, which the chain takes. */
void append_hold(struct transfer *t, uint32_t item);
/* Answers, and frees the transfer. */
void append_finish(struct transfer *t);

#endif
