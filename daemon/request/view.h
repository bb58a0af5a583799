/* Views: where a session looks for the blocks that it names in one namespace.
 *
 * Most views have one namespace. One that the session opened by encoding.open has a second: where
 * it lacks a block, one of its base is taken, which has the same keys. The namespace that holds a
 * block says which form that has (base/form.h); a view says nothing of it. */
#ifndef UCMD_REQUEST_VIEW_H
#define UCMD_REQUEST_VIEW_H

#include "daemon/request/internal.h"

/* The view that the session has of a namespace. */
struct view session_view(struct session *s, struct ns *ns);

/* What a chain of that namespace may have, whatever its session sees. */
static inline struct view view_whole(struct ns *ns)
{
    return (struct view){.ns = {ns, ns->base}, .n = ns->base ? 2 : 1};
}

/* Which of the two has that block. */
static inline struct ns *view_ns(const struct view *v, const struct block *b)
{
    return b->ns == v->ns[0]->id ? v->ns[0] : v->ns[1];
}

/* The block of each key, or 0: of two namespaces encoded in DRAM, else raw in DRAM, else encoded
 * below, else raw below. A block need not be complete where the view has one namespace. With
 * stop_at_gap the search may end soon after a key that is nowhere. False: the view's loads are
 * bypassed, and there are none. */
bool view_find(struct requests *rq, const struct view *v, const uint8_t *keys, uint32_t n,
               bool stop_at_gap, block_ref *refs);
/* As cache_touch, of what was found. At most UCM_MAX_KEYS. */
void view_touch(struct requests *rq, const struct view *v, const block_ref *refs, uint32_t n);

/* Shared lookups for a view: of two namespaces each in turn while it finds more of the chain, for a
 * chain's head may be raw and its middle encoded. With `per_key` one of either. */
struct view_look {
    struct session *s;
    struct view view;
    bool per_key;
    uint8_t rounds;
    uint32_t hits;       /* of a chain */
    uint32_t keys_bytes; /* of all its keys */
    uint64_t until_ms;   /* all rounds together, by uv_now */
    /* The round that is under way, whose `ctx` is the look; NULL: none is */
    struct shared_query *k;
    /* All rounds have ended. keys: all that were named; they die with it. */
    void (*done_cb)(struct view_look *look, const uint8_t *keys);
};
/* Begins for those keys, whose first `hits` are here. False: there is nothing to ask for, and
 * done_cb will not run. */
bool view_look_begin(struct view_look *look, struct proto_bin keys, uint32_t hits);
/* done_cb will not run. There is a round under way. */
void view_look_cancel(struct view_look *look);

#endif
