/* Shared mappings: slabs that workers of one tenant map, and read by themselves.
 *
 * Mapping slabs are numbered from 0, here and on the wire; where arena.h says `slab` they follow
 * the ordinary ones. One is granted to a group, which is a tenant: it gets memory of its own (a
 * memfd), which never holds another tenant's bytes. It is given back when it has no slot in use and
 * no worker maps it; the next loan of that number has another memfd. What is granted never exceeds
 * the budget, memory included that only a worker still maps.
 *
 * A slot of a mapping slab is a slot as any other. Its sequence number in the group's table
 * (proto/memory/mapping.h) is even from arena_slot_publish until arena_slot_retract or
 * arena_slot_free, and odd or 0 otherwise. */
#ifndef UCMD_MAPPING_GRANT_H
#define UCMD_MAPPING_GRANT_H

#include "daemon/arena/arena.h"

struct ucm_mapping_header;

/* Where workers read a slot. */
struct grant_place {
    uint32_t mapping, slot; /* numbers of the mapping slab, and of the slot in it */
    uint64_t seq;
};

/* Finds or makes the group of that tenant, and its table. 0; -EOPNOTSUPP: the arena has no
 * mappings; or -errno. */
int grant_group_open(struct arena *a, const char *tenant, struct arena_group **out);
/* One more open. */
void grant_group_ref(struct arena_group *g);
/* Once for each open. A group that slabs are granted to lives on. */
void grant_group_close(struct arena *a, struct arena_group *g);
const char *grant_group_tenant(const struct arena_group *g);
/* The table's descriptor, read-only and borrowed, and a copy of its header. */
int grant_group_table(const struct arena_group *g, struct ucm_mapping_header *out);

/* 0: a slot of a slab that is granted to the group. Else there is none now:
 * - -EAGAIN: a slab is being granted or given back; granted_cb runs when that has ended;
 * - -ENOSPC: the budget is granted, and nothing of it comes back by itself;
 * - -EFBIG: no slab is as long; or an errno of the group's last loan, for a while after it
 *   failed. */
int grant_slot(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t owner,
               slot_ref *out);
/* The next slot of that size in use in the group's slabs, round and round, and its owner; 0:
 * there is none. */
slot_ref grant_group_next(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t *owner);
/* The position of a search that goes round these slots in several steps. NULL: the group has no
 * slab with slots of that size. */
struct grant_round {
    uint64_t slots; /* that there are, in use or not */
    uint64_t looks; /* fruitless ones in a row */
    uint64_t vain;  /* the caller's own: when all were */
};
struct grant_round *grant_group_round(const struct arena *a, struct arena_group *g, uint64_t bytes);
/* Walks the groups except `but`, by granted bytes, the largest first: the group after that one
 * (NULL: the first). NULL: the end. */
struct arena_group *grant_group_most(struct arena *a, const struct arena_group *but,
                                     const struct arena_group *behind);
/* A slab of the group's with slots in use, for arena_slab_owners: the one at `i`, modulo how
 * many slabs it has granted; UINT32_MAX: that one has no slots in use, or is closed. */
uint32_t grant_group_slab(struct arena *a, const struct arena_group *g, uint32_t i);
uint32_t grant_groups(const struct arena *a);

/* Where workers read the slot. False: it is not published, or ordinary. */
bool grant_place(struct arena *a, slot_ref slot, struct grant_place *out);

/* The descriptor of a mapping slab that is granted, read-only and borrowed. */
int grant_fd(struct arena *a, uint32_t mapping);
/* A worker gets that descriptor. Until release the slab is granted to no other group. */
void grant_map(struct arena *a, uint32_t mapping);
void grant_release(struct arena *a, uint32_t mapping);
/* Callbacks for changes of grants, on the event loop. */
struct grant_watcher {
    /* A slab without slots, which workers of its group map, is wanted by another one, or the
     * budget was lowered: they should release it. Not inside a call of the arena. */
    void (*revoke_cb)(void *ctx, struct arena_group *g, uint32_t mapping);
    /* There is more space to grant, or less, or a loan failed: after arena_config.granted_cb. */
    void (*changed_cb)(void *ctx);
    void *ctx;
};
void grant_watch(struct arena *a, const struct grant_watcher *w); /* NULL: nobody */
/* The mapping slab at this address. */
uint32_t grant_at(const struct arena *a, const void *base);
/* After GRANTED_GOES. */
void grant_let_go(struct arena *a, uint32_t mapping);

/* Where more is granted than the budget allows, tenants keep it until they give slabs back. */
void grant_budget_set(struct arena *a, uint64_t bytes);
uint64_t grant_budget(const struct arena *a);
/* More is granted than that, without what is being given back. */
bool grant_over(const struct arena *a);
/* Bytes granted to the group, or with NULL to all; what comes or goes counts. */
uint64_t grant_bytes(const struct arena *a, const struct arena_group *g);
/* The same of slabs that ended, and that workers keep mapped. A group that keeps some may have so
 * much less. */
uint64_t grant_kept_bytes(const struct arena *a, const struct arena_group *g);
uint64_t grant_used_bytes(const struct arena *a); /* of them by slots */

#endif
