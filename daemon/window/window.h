/* Windows: blocks that a connection's process reads by itself. Shared by pins.c (which blocks are
 * kept in a window, and how many a uid may keep), budget.c (who gives memory up for others),
 * window.c (what a connection maps), pin.c (bringing blocks there) and feature.c (the door, and the
 * end of windows): each calls those before it.
 *
 * A window is of one part of one namespace. Its slabs belong to the tenant, not to it: two
 * connections of a tenant read the same slots. Which memory is granted, and to whom, is the arena's
 * to count; here is who maps what, who pins what, and who has to give some back.
 *
 * A pin is a lasting reference to a part that lies in a window slot of its tenant. Its sequence
 * leases the block. */
#ifndef UCMD_WINDOW_WINDOW_H
#define UCMD_WINDOW_WINDOW_H

#include "daemon/features.h"
#include "daemon/retrieval/summary.h"
#include "daemon/window/map.h"
#include "daemon/window/relocate.h"
#include "proto/memory/window.h"

#define SESSION_MAX_WINDOWS 256
/* Blocks that are looked at for pins to end in one iteration of the event loop. */
#define WINDOW_BLOCKS_PER_TURN 2048

/* What the daemon has of them. */
struct windows {
    struct requests *rq;
    struct relocations relocations; /* relocations.arena: NULL: there are none */
    struct list all, tenants, pins; /* struct window, window_tenant, window_pins */
    uint32_t n_tenants;
    struct window_slab *slabs; /* n_slabs */
    uint32_t n_slabs;
    /* A slab is being taken from a tenant that had so much; until then it is waited for. */
    struct {
        const struct window_tenant *from;
        uint64_t granted, until_ms;
    } taking;
    uint64_t deletions; /* cache_deletions when the last sweep for them began */
    /* A sweep looks at every pin, to end those of blocks that are marked for deletion and in slabs
     * that are taken. */
    uint64_t sweep;
    struct cache_retry sweeper;
};

/* What a connection has. */
struct session_windows {
    struct table all;
    uint32_t names; /* given out so far; see session_name */
    uint32_t n;     /* with those that are ending */
    bool ending;
};

/* A tenant that has windows. */
struct window_tenant {
    struct list link;
    struct arena_group *group;
    struct ucm_window_header header; /* of its table */
    uint32_t windows;
    uint32_t pinned; /* a lower budget counts by it */
};

struct window {
    struct list link; /* in all windows of the daemon */
    struct session *s;
    struct window_tenant *tenant;
    struct ns *ns;
    uint32_t number, name; /* in the session's table, and on the wire */
    uint32_t part;
    uint32_t requests; /* pins and unpins under way */
    bool closing;
    struct request *close;    /* the request that closed it, or NULL */
    struct list pins;         /* struct window_pins */
    struct deadline revoke;   /* the map's timer */
    struct cache_retry retry; /* a closing window that has pins left */
    struct window_map map;
    uint8_t map_state[];
};

/* The pins that a window has of one sequence. */
struct window_pins {
    /* In all pins of the daemon: those that the present sweep has not finished come first. */
    struct list link;
    struct list of_window, of_sequence;
    struct window *w;
    struct sequence *ch;
    uint32_t n;        /* blocks pinned */
    uint32_t requests; /* that work on it */
    uint32_t cap;
    uint32_t *slab; /* cap: of each block of the sequence, or UCM_PLACE_NONE */
    uint64_t swept; /* the last sweep that looked at all of it */
    uint32_t sweep_at;
    uint32_t end_at; /* while all of them end */
};

/* Of each window slab. */
struct window_slab {
    const struct window_tenant *tenant; /* whose pins these are */
    uint32_t pins;
    uint64_t taken_ms; /* until then nobody pins in it: it is wanted back. 0: it is not */
};

static inline struct windows *windows_at(const struct requests *rq)
{
    return rq->ext[FEATURE_WINDOWS];
}
static inline struct session_windows *session_windows(const struct session *s)
{
    return s->ext[FEATURE_WINDOWS];
}
static inline struct windows *windows_of(const struct window *w)
{
    return windows_at(w->s->rq);
}

/* Whether the slab is wanted back from that tenant; another one may have it by now. */
static inline bool slab_taken(const struct windows *ws, uint32_t slab,
                              const struct window_tenant *t, uint64_t now_ms)
{
    return ws->slabs[slab].tenant == t && ws->slabs[slab].taken_ms > now_ms;
}

/* ---- window.c ---- */

/* The window that the call names; NULL with call->error. */
struct window *call_window(struct call *call, uint64_t name);
/* A request of the window has ended. The last one of a window that is closing frees it, once its
 * pins have ended. */
void window_unref(struct window *w);
/* For grant_watch; ctx: the requests. */
void window_revoke_cb(void *ctx, struct arena_group *group, uint32_t slab);

/* ---- budget.c ---- */

/* The arena grants less or more than before: pins that do not fit any more end. */
void windows_reload(struct requests *rq);

/* Begins to take a slab from a tenant that has more than its part of the budget, if the window's
 * has less. False: it has not, or nobody has more. */
bool window_claim(const struct window *w);

/* ---- pins.c ---- */

/* What a slot of it takes. */
uint64_t window_slot_bytes(const struct window *w);
/* Whether the window's uid may pin a block more of what its tenant may have of the budget. */
bool window_may_pin(const struct window *w);
/* The window's pins of that sequence, made if need be; NULL: no memory. Room for all of the
 * sequence's blocks. */
struct window_pins *pins_get(struct window *w, struct sequence *ch);
/* Drops it if nothing is pinned and nobody works on it. */
void pins_put(struct window_pins *p);
/* The caller has one reference to the block's part. True: it is pinned now. False: it can't be
 * (evicted by name, in a slab that is wanted back, or its uid has pinned what it may), and the
 * reference has ended. */
bool pins_add(struct window_pins *p, uint32_t block);
/* Ends pins of blocks from *at up to `end`, and looks at `*most` blocks at most, which falls. True:
 * *at is `end`. */
bool pins_end(struct window_pins *p, uint32_t *at, uint32_t end, uint32_t *most);
/* Ends some of the pins of a window, or of a sequence, for which no request works any more. True:
 * none is left. */
bool window_pins_end_all(struct window *w);
bool sequence_pins_end_all(struct sequence *ch);
/* Blocks may have been evicted by name: their pins end. */
void windows_deleting(struct requests *rq);
/* Begins a sweep. */
void pins_sweep(struct requests *rq);
void pins_sweep_cb(struct cache_retry *r);

/* ---- pin.c ---- */

/* Stops the requests that bring blocks into that window, or of that sequence (the other one is
 * NULL), and those that end their pins. */
void pin_requests_stop(struct session *s, const struct window *w, const struct sequence *ch);
/* Sequences tell of their ends from now on. */
void pins_init(struct requests *rq);

#endif
