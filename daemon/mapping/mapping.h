/* Shared mappings: blocks that a connection's process reads by itself. Common to five files, of
 * which each calls those before it: refs.c (which blocks are kept in a mapping, and how many for a
 * uid), budget.c (which tenant gives up memory), mapping.c (what a connection maps), ref.c
 * (bringing blocks there) and feature.c (the interface, and the end of mappings).
 *
 * A shared mapping is of one part of one namespace. Its slabs belong to the tenant: two connections
 * of a tenant read the same slots. The arena counts the memory granted to each tenant. This module
 * tracks what each client maps and references, and what it must release.
 *
 * A reference is a lasting reference to a part that lies in a mapping slot of its tenant. Its
 * sequence leases the block. */
#ifndef UCMD_MAPPING_MAPPING_H
#define UCMD_MAPPING_MAPPING_H

#include "daemon/features.h"
#include "daemon/mapping/map.h"
#include "daemon/mapping/relocate.h"
#include "daemon/retrieval/summary.h"
#include "proto/memory/mapping.h"

#define SESSION_MAX_MAPPINGS 256
/* Blocks that are looked at for references to end in one iteration of the event loop. */
#define MAPPING_BLOCKS_PER_TURN 2048

/* What the daemon has of them. */
struct mappings {
    struct requests *rq;
    struct relocations relocations; /* relocations.arena: NULL: there are none */
    struct list all, tenants, refs; /* struct mapping, mapping_tenant, mapping_refs */
    uint32_t n_tenants;
    struct mapping_slab *slabs; /* n_slabs */
    uint32_t n_slabs;
    /* A slab is being taken from a tenant that had so much; until then it is waited for. */
    struct {
        const struct mapping_tenant *from;
        uint64_t granted, until_ms;
    } taking;
    uint64_t deletions; /* cache_deletions when the last sweep for them began */
    /* A sweep looks at every reference, to end those of blocks that are marked for deletion and in
     * slabs that are taken. */
    uint64_t sweep;
    struct cache_retry sweeper;
};

/* What a connection has. */
struct session_mappings {
    struct table all;
    uint32_t names; /* given out so far; see session_name */
    uint32_t n;     /* with those that are ending */
    bool ending;
};

/* A tenant that has mappings. */
struct mapping_tenant {
    struct list link;
    struct arena_group *group;
    struct ucm_mapping_header header; /* of its table */
    uint32_t mappings;
    uint32_t referenced; /* a lower budget counts by it */
};

struct mapping {
    struct list link; /* in all mappings of the daemon */
    struct session *s;
    struct mapping_tenant *tenant;
    struct ns *ns;
    uint32_t number, name; /* in the session's table, and on the wire */
    uint32_t part;
    uint32_t requests; /* references and their ends under way */
    bool closing;
    struct request *close;    /* the request that closed it, or NULL */
    struct list refs;         /* struct mapping_refs */
    struct deadline revoke;   /* the map's timer */
    struct cache_retry retry; /* a closing mapping that has references left */
    struct mapped_slabs map;
    uint8_t map_state[];
};

/* The references that a mapping has of one sequence. */
struct mapping_refs {
    /* In all references of the daemon: those that the present sweep has not finished come first. */
    struct list link;
    struct list of_mapping, of_sequence;
    struct mapping *w;
    struct sequence *ch;
    uint32_t n;        /* blocks referenced */
    uint32_t requests; /* that work on it */
    uint32_t cap;
    uint32_t *slab; /* cap: of each block of the sequence, or UCM_PLACE_NONE */
    uint64_t swept; /* the last sweep that looked at all of it */
    uint32_t sweep_at;
    uint32_t end_at; /* while all of them end */
};

/* State of each mapping slab. */
struct mapping_slab {
    const struct mapping_tenant *tenant; /* whose references these are */
    uint32_t refs;
    /* until then nobody takes references in it: it is wanted back. 0: it is not */
    uint64_t taken_ms;
};

static inline struct mappings *mappings_at(const struct requests *rq)
{
    return rq->ext[FEATURE_MAPPINGS];
}
static inline struct session_mappings *session_mappings(const struct session *s)
{
    return s->ext[FEATURE_MAPPINGS];
}
static inline struct mappings *mappings_of(const struct mapping *w)
{
    return mappings_at(w->s->rq);
}

/* Whether the slab is wanted back from that tenant; another one may have it by now. */
static inline bool slab_taken(const struct mappings *ws, uint32_t slab,
                              const struct mapping_tenant *t, uint64_t now_ms)
{
    return ws->slabs[slab].tenant == t && ws->slabs[slab].taken_ms > now_ms;
}

/* ---- mapping.c ---- */

/* The mapping that the call names; NULL with call->error. */
struct mapping *call_mapping(struct call *call, uint64_t name);
/* A request of the mapping has ended. The last one of a mapping that is closing frees it, once its
 * references have ended. */
void mapping_unref(struct mapping *w);
/* For grant_watch; ctx: the requests. */
void mapping_revoke_cb(void *ctx, struct arena_group *group, uint32_t slab);

/* ---- budget.c ---- */

/* The arena grants less or more than before: references that do not fit any more end. */
void mappings_reload(struct requests *rq);

/* Begins to take a slab from a tenant that has more than its part of the budget, if the mapping's
 * has less. False: it has not, or nobody has more. */
bool mapping_claim(const struct mapping *w);

/* ---- refs.c ---- */

/* What a slot of it takes. */
uint64_t mapping_slot_bytes(const struct mapping *w);
/* Whether the mapping's uid may reference a block more of what its tenant may have of the
 * budget. */
bool mapping_may_ref(const struct mapping *w);
/* The mapping's references of that sequence, made if need be; NULL: no memory. Room for all of the
 * sequence's blocks. */
struct mapping_refs *refs_get(struct mapping *w, struct sequence *ch);
/* Drops it if nothing is referenced and nobody works on it. */
void refs_put(struct mapping_refs *p);
/* The caller has one reference to the block's part. True: it is referenced now. False: it can't be
 * (evicted by name, in a revoked slab, or its uid is at its limit), and the reference has ended. */
bool refs_add(struct mapping_refs *p, uint32_t block);
/* Ends references of blocks from *at up to `end`, and looks at `*most` blocks at most, which falls.
 * True: *at is `end`. */
bool refs_end(struct mapping_refs *p, uint32_t *at, uint32_t end, uint32_t *most);
/* Ends some of the references of a mapping, or of a sequence, for which no request works any more.
 * True: none is left. */
bool mapping_refs_end_all(struct mapping *w);
bool sequence_refs_end_all(struct sequence *ch);
/* Blocks may have been evicted by name: their references end. */
void mappings_deleting(struct requests *rq);
/* Begins a sweep. */
void refs_sweep(struct requests *rq);
void refs_sweep_cb(struct cache_retry *r);

/* ---- ref.c ---- */

/* Stops the requests that bring blocks into that mapping, or of that sequence (the other one is
 * NULL), and those that end their references. */
void ref_requests_stop(struct session *s, const struct mapping *w, const struct sequence *ch);
/* Sequences tell of their ends from now on. */
void refs_init(struct requests *rq);

#endif
