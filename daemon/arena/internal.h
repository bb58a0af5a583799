/* Shared by the files of this room only: arena.c has the slots, grow.c makes extents ready, window.c lends
 * window extents, group.c has those that they are lent to, window_make.c gets and gives back their memory. */
#ifndef UCMD_ARENA_INTERNAL_H
#define UCMD_ARENA_INTERNAL_H

#include "daemon/arena/arena.h"

#include "daemon/base/list.h"
#include "daemon/base/loan.h"
#include "proto/backoff.h"

#include <pthread.h>
#include <stdatomic.h>
#include <uv.h>

/* In extent.owner: the slot is free; the low 32 bits have the next free one. */
#define SLOT_FREE (UINT64_C(1) << 63)

struct extent {
    /* In its home's free list, in arena.partial, or (full, closed, not ready) in none. A window extent: in its
     * class's partial list, in its group's empty list, or in none. */
    struct list link;
    char *base;
    uint64_t *owner;     /* by slot */
    uint64_t slot_bytes; /* of each of its slots */
    uint32_t slots;      /* 0: it may take any slot size */
    uint32_t n_free, free_slot;
    uint32_t home;
    bool closed; /* it is being emptied: not in arena.partial */
};

/* The extents of one NUMA node. The last home has those of no node in particular; without placement
 * it is the only one. */
struct arena_home {
    struct list free; /* extents without slots */
    uint32_t n_free, ready;
    uint64_t used_bytes;
};

/* ---- windows ---- */

enum window_state {
    WINDOW_FREE,   /* address space only */
    WINDOW_MAKING, /* the thread gets its memory */
    WINDOW_LENT,
    WINDOW_GOING,  /* devices let go of it, until arena_window_let_go */
    WINDOW_ENDING, /* workers let go of it, then the thread gives its memory back */
};

/* A window extent, beside its struct extent. */
struct window {
    enum window_state state;
    bool revoked;     /* its workers are to release it; no slot of it is handed out */
    bool returning;   /* counted in windows.returning */
    bool kept;        /* in WINDOW_ENDING: counted in windows.kept, and no more in lent */
    uint32_t mapped;  /* workers' descriptors */
    struct list link; /* in windows.free or keeps, or in its group's list */
    struct list job;  /* in one of the thread's lists, or in windows.revokes */
    struct arena_group *group;
    struct window_class *class; /* while it has slots */
    int fd;                     /* read-only, the daemon's own; -1: none */
    struct loan loan;           /* in WINDOW_ENDING: workers that still have the memory */
    int status;                 /* what the thread says of the last job */
};

/* The extents of a group with slots of one size. */
struct window_class {
    struct list link; /* in arena_group.classes */
    uint64_t slot_bytes;
    uint32_t extents;
    struct list partial; /* of extent.link: those with a free slot that may be handed out */
    struct arena_round round;
};

struct arena_group {
    struct list link; /* in windows.groups */
    char *tenant;
    uint32_t opens, lent; /* lent: window extents, in any state but FREE, less the kept ones */
    uint32_t kept;        /* that workers keep after their end */
    bool making;          /* one of `lent` */
    struct list windows;  /* of window.link */
    struct list classes;
    struct list empty;     /* of extent.link: lent, without slots, and not revoked */
    struct backoff failed; /* loans */
    int failed_rc;
    /* The table. fd: to write; read_fd: what is lent to workers. */
    int fd, read_fd;
    struct loan loan; /* of the table, when nobody has the group open */
    struct ucm_window_header *header;
    _Atomic uint64_t *generation;
    /* Where arena_group_next goes on. */
    struct window *hand;
    uint32_t hand_slot;
};

struct windows {
    uint32_t n, lent; /* window extents; lent: in any state but FREE, less the kept ones */
    uint32_t used; /* the first ones, which have been lent: no memory is touched for the others */
    uint32_t kept; /* that workers keep after their end */
    uint32_t returning; /* of `lent`: GOING, ENDING or revoked */
    char *base;
    struct window *window;
    uint64_t budget, used_bytes;
    uint64_t generation;                      /* the last one that was given */
    struct list free, groups, revokes, keeps; /* keeps: kept ones */
    void (*revoke_cb)(void *ctx, struct arena_group *g, uint32_t window);
    void *revoke_ctx;
    uv_async_t done; /* the thread has done a job, or revokes is not empty */
    bool open;       /* done is a handle of the loop */
    pthread_t thread;
    bool threaded, unplaced; /* unplaced: as arena.unplaced */
    pthread_mutex_t lock;    /* guards the three below */
    pthread_cond_t more;
    struct list jobs, ended; /* of window.job */
    bool stop;
};

struct arena {
    struct arena_config config;
    uv_loop_t *loop;
    char *base;
    uint32_t extents, ready, slot_bits;
    uint32_t limit; /* extents that there will be */
    struct extent *extent;
    uint32_t nodes; /* homes that are a node: config.numa's, or none */
    struct arena_home *home;
    struct list *partial; /* extents with free slots, by slot size and home */
    uint64_t used_slots, used_bytes;

    uv_async_t grown; /* the thread made `touched` extents ready */
    pthread_t thread;
    pthread_mutex_t lock; /* guards the three below */
    uint32_t touched;
    bool stop, ended; /* ended: there will be no more than `touched` */
    bool threaded;
    bool unplaced; /* the thread's: placing failed, and was logged */

    struct windows windows; /* n 0: none */
    unsigned handles;       /* of the loop, to be closed */
};

/* arena.c: the next extent is ready. */
void arena_extent_ready(struct arena *a, uint32_t extent);
/* The home of a node; the last one for a node that is not among config.numa's. */
uint32_t arena_home_of(const struct arena *a, int node);
/* Divides the extent into slots. 0 or -ENOMEM. */
int arena_carve(struct arena *a, struct extent *e, uint64_t slot_bytes);
/* Hands out a free slot of the extent for so many bytes. */
slot_ref arena_slot_hand_out(struct arena *a, struct extent *e, uint64_t bytes, uint64_t owner);
/* Its memory goes to somebody else. */
void arena_extent_unpoison(const struct arena *a, uint32_t extent);

static inline bool arena_extent_in_window(const struct arena *a, uint32_t extent)
{
    return extent >= a->extents;
}

static inline bool arena_slot_used(const struct extent *e, uint32_t slot)
{
    return !(e->owner[slot] & SLOT_FREE);
}

static inline uint32_t arena_window_number(const struct arena *a, const struct window *w)
{
    return (uint32_t)(w - a->windows.window);
}

static inline struct extent *arena_window_extent(const struct arena *a, const struct window *w)
{
    return &a->extent[a->extents + arena_window_number(a, w)];
}

static inline struct window *arena_extent_window(const struct arena *a, const struct extent *e)
{
    return &a->windows.window[(uint32_t)(e - a->extent) - a->extents];
}

/* window.c: address space for config.window_max, or what there is. 0 or -errno. */
int arena_windows_init(struct arena *a);
/* The thread has ended, and nobody uses or maps anything. */
void arena_windows_close(struct arena *a);
/* A slot of the window extent is free again. */
void arena_window_slot_freed(struct arena *a, struct extent *e);
/* The list of its class, for an extent with slots. */
struct list *arena_window_partial(struct arena *a, struct extent *e);
/* The window has no slots: who wants it now? */
void arena_window_settle(struct arena *a, struct window *w);

/* group.c */
void arena_group_free(struct arena *a, struct arena_group *g);
/* Frees the group that nobody opened and nothing is lent to. */
void arena_group_settle(struct arena *a, struct arena_group *g);

/* window_make.c: the thread gets the window's memory, or gives it back (by w->state), and puts it into `ended`.
 * 0 or -errno. */
int arena_window_submit(struct arena *a, struct window *w);
/* The windows whose job is done, one at a time; NULL: no more. */
struct window *arena_window_ended(struct arena *a);
void arena_windows_stop(struct arena *a);
/* grow.c: ends the thread. The caller closes `grown` if `threaded`. */
void arena_grow_stop(struct arena *a);

#endif
