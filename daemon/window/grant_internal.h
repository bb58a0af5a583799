/* Shared by grant.c, which grants window slabs, group.c, which has those that they are granted to,
 * and grant_memory.c, which gets and gives back their memory. */
#ifndef UCMD_WINDOW_GRANT_INTERNAL_H
#define UCMD_WINDOW_GRANT_INTERNAL_H

#include "daemon/arena/internal.h"
#include "daemon/window/grant.h"

#include "daemon/window/loan.h"
#include "proto/backoff.h"

#include <stdatomic.h>

enum window_state {
    WINDOW_FREE,   /* address space only */
    WINDOW_MAKING, /* the thread gets its memory */
    WINDOW_GRANTED,
    WINDOW_GOING,  /* devices let go of it, until grant_let_go */
    WINDOW_ENDING, /* workers let go of it, then the thread gives its memory back */
};

/* A window slab, beside its struct slab. */
struct window {
    enum window_state state;
    bool revoked;   /* its workers are to release it; no slot of it is handed out */
    bool returning; /* counted in granter.returning */
    /* in WINDOW_ENDING: counted in granter.kept, and no more in granted */
    bool kept;
    uint32_t mapped;            /* workers' descriptors */
    struct list link;           /* in granter.free or keeps, or in its group's list */
    struct list job;            /* in one of the thread's lists, or in granter.revokes */
    struct window_class *class; /* while it has slots */
    int fd;                     /* read-only, the daemon's own; -1: none */
    struct loan loan;           /* in WINDOW_ENDING: workers that still have the memory */
    int status;                 /* what the thread says of the last job */
};

/* The slabs of a group with slots of one size. */
struct window_class {
    struct list link; /* in arena_group.classes */
    uint64_t slot_bytes;
    uint32_t slabs;
    struct list partial; /* of slab.link: those with a free slot that may be handed out */
    struct grant_round round;
};

struct arena_group {
    struct list link; /* in granter.groups */
    char *tenant;
    uint32_t opens, granted; /* granted: window slabs, in any state but FREE, less the kept ones */
    uint32_t kept;           /* that workers keep after their end */
    bool making;             /* one of `granted` */
    struct list windows;     /* of window.link */
    struct list classes;
    struct list empty;     /* of slab.link: granted, without slots, and not revoked */
    struct backoff failed; /* loans */
    int failed_rc;
    /* The table. fd: to write; read_fd: what is granted to workers. */
    int fd, read_fd;
    struct loan loan; /* of the table, when nobody has the group open */
    struct ucm_window_header *header;
    _Atomic uint64_t *seq;
    /* Where grant_group_next goes on. */
    struct window *hand;
    uint32_t hand_slot;
};

struct granter {
    uint32_t granted;   /* in any state but FREE, less the kept ones */
    uint32_t kept;      /* that workers keep after their end */
    uint32_t returning; /* of `granted`: GOING, ENDING or revoked */
    char *base;
    struct window *window;
    uint64_t budget, used_bytes;
    uint64_t seq;                             /* the last one that was given */
    struct list free, groups, revokes, keeps; /* keeps: kept ones */
    struct grant_watcher watcher;             /* its callbacks NULL: nobody */
    uv_async_t done; /* the thread has done a job, or revokes is not empty */
    bool open;       /* done is a handle of the event loop */
    pthread_t thread;
    bool threaded, unplaced; /* unplaced: as arena.unplaced */
    pthread_mutex_t lock;    /* guards the three below */
    pthread_cond_t more;
    struct list jobs, ended; /* of window.job */
    bool stop;
};

static inline uint32_t grant_number(const struct arena *a, const struct window *w)
{
    return (uint32_t)(w - a->granter->window);
}

static inline struct slab *grant_slab(const struct arena *a, const struct window *w)
{
    return &a->slab[a->slabs + grant_number(a, w)];
}

static inline struct window *grant_window(const struct arena *a, const struct slab *e)
{
    return &a->granter->window[(uint32_t)(e - a->slab) - a->slabs];
}

static inline struct arena_group *grant_group(const struct arena *a, const struct window *w)
{
    return grant_slab(a, w)->group;
}

/* group.c */
void grant_group_free(struct arena *a, struct arena_group *g);
/* Frees the group that nobody opened and nothing is granted to. */
void grant_group_settle(struct arena *a, struct arena_group *g);

/* grant_memory.c: the thread gets the window's memory, or gives it back (by w->state), and puts it
 * into `ended`. 0 or -errno. */
int grant_submit(struct arena *a, struct window *w);
/* The windows whose job is done, one at a time; NULL: no more. */
struct window *grant_ended(struct arena *a);

#endif
