/* Windows: slabs that workers of one tenant map, and read by themselves.
 *
 * Window slabs are numbered from 0, here and on the wire; where arena.h says `slab` they follow
 * the ordinary ones. One is lent to a group, which is a tenant: it gets memory of its own (a
 * memfd), which never holds another tenant's bytes. It is given back when it has no slot in use and
 * no worker maps it; the next loan of that number has another memfd. What is lent never exceeds the
 * budget, memory included that only a worker still maps.
 *
 * A slot of a window slab is a slot as any other. Its sequence number in the group's table
 * (proto/memory/window.h) is even from arena_slot_publish until arena_slot_retract or
 * arena_slot_free, and odd or 0 otherwise. */
#ifndef UCMD_WINDOW_LEND_H
#define UCMD_WINDOW_LEND_H

#include "daemon/arena/arena.h"

struct ucm_window_header;

/* Where workers read a slot. */
struct lend_place {
    uint32_t window, slot; /* numbers of the window slab, and of the slot in it */
    uint64_t seq;
};

/* Finds or makes the group of that tenant, and its table. 0; -EOPNOTSUPP: the arena has no windows;
 * or -errno. */
int lend_group_open(struct arena *a, const char *tenant, struct arena_group **out);
/* One more open. */
void lend_group_ref(struct arena_group *g);
/* Once for each open. A group that slabs are lent to lives on. */
void lend_group_close(struct arena *a, struct arena_group *g);
const char *lend_group_tenant(const struct arena_group *g);
/* The table's descriptor, read-only and borrowed, and a copy of its header. */
int lend_group_table(const struct arena_group *g, struct ucm_window_header *out);

/* 0: a slot of a slab that is lent to the group. Else there is none now:
 * - -EAGAIN: a slab is being lent or given back; lent_cb runs when that has ended;
 * - -ENOSPC: the budget is lent, and nothing of it comes back by itself;
 * - -EFBIG: no slab is as long; or an errno of the group's last loan, for a while after it
 *   failed. */
int lend_slot(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t owner,
              slot_ref *out);
/* The next slot of that size in use in the group's slabs, round and round, and its owner; 0:
 * there is none. */
slot_ref lend_group_next(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t *owner);
/* Who goes round these slots in several steps counts here. NULL: the group has no slab with slots
 * of that size. */
struct lend_round {
    uint64_t slots; /* that there are, in use or not */
    uint64_t looks; /* in a row that were in vain */
    uint64_t vain;  /* the caller's own: when all were */
};
struct lend_round *lend_group_round(const struct arena *a, struct arena_group *g, uint64_t bytes);
/* Groups by what they have lent, the most first, `but` left out: the one behind that one (NULL: the
 * first). NULL: there are no more. */
struct arena_group *lend_group_most(struct arena *a, const struct arena_group *but,
                                    const struct arena_group *behind);
/* A slab of the group's with slots in use, for arena_slab_owners: the one at `i`, modulo how
 * many slabs it has lent; UINT32_MAX: that one has no slots in use, or is closed. */
uint32_t lend_group_slab(struct arena *a, const struct arena_group *g, uint32_t i);
uint32_t lend_groups(const struct arena *a);

/* Where workers read the slot. False: it is not published, or ordinary. */
bool lend_place(struct arena *a, slot_ref slot, struct lend_place *out);

/* The descriptor of a window slab that is lent, read-only and borrowed. */
int lend_fd(struct arena *a, uint32_t window);
/* A worker gets that descriptor. Until release the slab is lent to no other group. */
void lend_map(struct arena *a, uint32_t window);
void lend_release(struct arena *a, uint32_t window);
/* Who hears of what is lent, on the event loop. */
struct lend_watcher {
    /* A slab without slots, which workers of its group map, is wanted by another one, or the
     * budget was lowered: they should release it. Not inside a call of the arena. */
    void (*revoke_cb)(void *ctx, struct arena_group *g, uint32_t window);
    /* There is more space to lend, or less, or a loan failed: behind arena_config.lent_cb. */
    void (*changed_cb)(void *ctx);
    void *ctx;
};
void lend_watch(struct arena *a, const struct lend_watcher *w); /* NULL: nobody */
/* The window slab at this address. */
uint32_t lend_at(const struct arena *a, const void *base);
/* After LENT_GOES. */
void lend_let_go(struct arena *a, uint32_t window);

/* Where more is lent than the budget allows, tenants keep it until they give slabs back. */
void lend_budget_set(struct arena *a, uint64_t bytes);
uint64_t lend_budget(const struct arena *a);
/* More is lent than that, without what is being given back. */
bool lend_over(const struct arena *a);
/* Bytes lent to the group, or with NULL to all; what comes or goes counts. */
uint64_t lend_bytes(const struct arena *a, const struct arena_group *g);
/* The same of slabs that ended, and that workers keep mapped. A group that keeps some may have so
 * much less. */
uint64_t lend_kept_bytes(const struct arena *a, const struct arena_group *g);
uint64_t lend_used_bytes(const struct arena *a); /* of them by slots */

#endif
