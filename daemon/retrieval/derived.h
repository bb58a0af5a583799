/* Derived namespaces: their blocks are made of a base namespace's blocks, under the same keys.
 *
 * A build reads a part of the base block and fills the same part of the derived block, as a dump
 * would: the pending write's claim makes sure that one build serves all who want it. Threads of the
 * module's pool compute. */
#ifndef UCMD_RETRIEVAL_DERIVED_H
#define UCMD_RETRIEVAL_DERIVED_H

#include "daemon/features.h"
#include "daemon/request/internal.h"
#include "daemon/retrieval/pool.h"
#include "kernels/sparse/sparse.h"

/* Derived namespaces. */
struct derived {
    struct list spaces;                    /* struct derived_space */
    struct list tenants;                   /* struct derived_tenant: of spaces */
    struct list builds;                    /* struct derived_build */
    bool stopping;                         /* builds */
    void (*ended_cb)(struct requests *rq); /* a build has ended: others may begin */
    struct pending_writes pending_writes;  /* of builds */
};

/* Summaries of what is stored. */
struct summaries {
    void *spare; /* select.c: the memory of a selection that has ended, or NULL */
    size_t spare_bytes;
    /* Parts that were published and whose summaries are to be built. */
    uint32_t watchers; /* sessions that want that, of all namespaces */
    struct published *published;
    struct list published_free; /* of them */
    struct list turns;          /* of tenants for whom parts wait, in the order of their turns */
    struct cache_retry published_retry;
};

/* References of sequences' blocks: the mappings' own. */
struct sequence;
struct sequence_refs {
    void (*stop_cb)(struct sequence *ch); /* requests that take or end references to its blocks */
    bool (*end_cb)(struct sequence *ch);  /* ends some. True: it has none left */
};

/* What the daemon has of both. */
struct retrieval {
    struct requests *rq;
    struct summary_pool *pool;
    struct sequence_refs refs;
    struct derived derived;
    struct summaries summaries;
    struct list users; /* struct user */
};
/* What a connection has. */
struct session_retrieval {
    struct user *user;
    struct list spaces; /* struct session_space: what summary.open opened */
    struct table sequences;
    uint32_t sequence_names; /* given out so far; see session_name */
    uint32_t n_sequences;    /* with those that are ending */
    bool ending;
};
static inline struct retrieval *retrieval_of(const struct requests *rq)
{
    return rq->ext[FEATURE_RETRIEVAL];
}
static inline struct session_retrieval *session_retrieval(const struct session *s)
{
    return s->ext[FEATURE_RETRIEVAL];
}

/* Builds under way. Each has a thread's work ahead of it, and the slots of two parts. */
#define DERIVED_BUILDS_MAX 256

/* State of all spaces and sessions of one tenant. Tenants take turns with the parts that wait for
 * their builds, and with their selections. */
struct derived_tenant {
    struct list link;
    struct limit_owner *owner; /* of builds, and of the parts that wait for them */
    uint32_t refs;             /* spaces, users */
    struct summary_turns selections;
    /* summary_build.c */
    struct list turn;  /* in summaries.turns, while parts wait */
    struct list parts; /* struct published, the oldest first */
    uint32_t waiting;  /* of them */
    char name[UCM_MAX_NAME_BYTES + 1];
};

/* With one more reference. NULL: no memory. */
struct derived_tenant *derived_tenant_ref(struct requests *rq, const char *name);
void derived_tenant_unref(struct derived_tenant *t);

/* What the blocks of a derived namespace are made of. There is one for each while sessions,
 * sequences or builds use it. */
struct derived_space {
    struct list link;
    struct requests *rq;
    uint32_t refs;
    uint32_t watchers; /* sessions that want summaries of what is stored in base */
    struct ns *base, *derived;
    struct derived_tenant *tenant;
    bool summaries;               /* else base's blocks, which are encoded, as they are */
    struct ucm_summary_plan plan; /* of summaries */
};
/* The space of that derived namespace, with one more reference. plan: NULL: base is encoded, and
 * derived is its base. NULL: no memory. */
struct derived_space *space_open(struct requests *rq, struct ns *base, struct ns *derived,
                                 const struct ucm_summary_plan *plan);
struct derived_space *space_ref(struct derived_space *space);
void space_unref(struct derived_space *space);

static inline const struct part *space_part(const struct derived_space *space, block_ref ref,
                                            uint32_t part)
{
    return &index_block(space->rq->modules.index, ref)->part[part];
}

/* Whether the daemon can build summaries of that base's blocks: of those that are raw, or encoded
 * without loss. */
bool space_decodes(const struct ns *base);
/* As cache_get of part `part` of the held block `derived`, with one more source: if the part is
 * nowhere, it is built from the held block `base` (0: from nothing). That is one of space->base,
 * or, for summaries of an encoded namespace, of the one that this is derived from. Further:
 * -ENOENT: neither is whole; -EINPROGRESS: a worker's dump is writing the part; -EAGAIN also with
 * DERIVED_BUILDS_MAX builds, or the tenant's part of them (limit.h). */
int derived_get(struct derived_space *space, block_ref base, block_ref derived, uint32_t part,
                uint8_t priority, struct cache_wait *w);
/* Begins to build that part, which nobody waits for. 0, or -errno as above, also -EEXIST. */
int derived_build(struct derived_space *space, block_ref base, block_ref derived, uint32_t part);

/* summary_build.c */
/* A part that is to be decoded into the base of its namespace waits for its build, holding nothing.
 * False: too many wait, or no memory. */
bool build_raw(struct requests *rq, struct ns *from, struct ns *base, const uint8_t *key,
               uint32_t part);

void derived_init(struct requests *rq);
/* Builds end soon, without their results. */
void derived_stop(struct requests *rq);
/* No build may be under way, and no space left. */
void derived_close(struct requests *rq);

/* user.c */
/* The connections of one uid. */
struct user {
    struct list link;
    uid_t uid;
    struct derived_tenant *tenant;
    uint32_t sessions;
    struct summary_queue selections; /* under way */
};

/* NULL: no memory. */
struct user *user_ref(struct requests *rq, const struct peer *peer);
void user_unref(struct user *u);

#endif
