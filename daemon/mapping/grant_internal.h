/* Shared by grant.c, which grants mapping slabs, group.c, which has those that they are granted to,
 * and grant_memory.c, which gets and gives back their memory. */
#ifndef UCMD_MAPPING_GRANT_INTERNAL_H
#define UCMD_MAPPING_GRANT_INTERNAL_H

#include "daemon/arena/internal.h"
#include "daemon/mapping/grant.h"

#include "daemon/mapping/loan.h"
#include "proto/backoff.h"

#include <stdatomic.h>

enum mapping_state {
    MAPPING_FREE,   /* address space only */
    MAPPING_MAKING, /* the thread gets its memory */
    MAPPING_GRANTED,
    MAPPING_GOING,  /* devices let go of it, until grant_let_go */
    MAPPING_ENDING, /* workers let go of it, then the thread gives its memory back */
};

/* A mapping slab, next to its struct slab. */
struct mapping {
    enum mapping_state state;
    bool revoked;   /* its workers are to release it; no slot of it is handed out */
    bool returning; /* counted in granter.returning */
    /* in MAPPING_ENDING: counted in granter.kept, not in granted */
    bool kept;
    uint32_t mapped;             /* workers' descriptors */
    struct list link;            /* in granter.free or keeps, or in its group's list */
    struct list job;             /* in one of the thread's lists, or in granter.revokes */
    struct mapping_class *class; /* while it has slots */
    int fd;                      /* read-only, the daemon's own; -1: none */
    struct loan loan;            /* in MAPPING_ENDING: workers that still have the memory */
    int status;                  /* what the thread says of the last job */
};

/* The slabs of a group with slots of one size. */
struct mapping_class {
    struct list link; /* in arena_group.classes */
    uint64_t slot_bytes;
    uint32_t slabs;
    struct list partial; /* of slab.link: those with a free slot that may be handed out */
    struct grant_round round;
};

struct arena_group {
    struct list link; /* in granter.groups */
    char *tenant;
    uint32_t opens, granted; /* granted: mapping slabs, in any state but FREE, less the kept ones */
    uint32_t kept;           /* that workers keep after their end */
    bool making;             /* one of `granted` */
    struct list mappings;    /* of mapping.link */
    struct list classes;
    struct list empty;     /* of slab.link: granted, without slots, and not revoked */
    struct backoff failed; /* loans */
    int failed_rc;
    /* The table. fd: to write; read_fd: what is granted to workers. */
    int fd, read_fd;
    struct loan loan; /* of the table, when nobody has the group open */
    struct ucm_mapping_header *header;
    _Atomic uint64_t *seq;
    /* Where grant_group_next goes on. */
    struct mapping *hand;
    uint32_t hand_slot;
};

struct granter {
    uint32_t granted;   /* in any state but FREE, less the kept ones */
    uint32_t kept;      /* that workers keep after their end */
    uint32_t returning; /* of `granted`: GOING, ENDING or revoked */
    char *base;
    struct mapping *mapping;
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
    struct list jobs, ended; /* of mapping.job */
    bool stop;
};

static inline uint32_t grant_number(const struct arena *a, const struct mapping *w)
{
    return (uint32_t)(w - a->granter->mapping);
}

static inline struct slab *grant_slab(const struct arena *a, const struct mapping *w)
{
    return &a->slab[a->slabs + grant_number(a, w)];
}

static inline struct mapping *grant_mapping(const struct arena *a, const struct slab *e)
{
    return &a->granter->mapping[(uint32_t)(e - a->slab) - a->slabs];
}

static inline struct arena_group *grant_group(const struct arena *a, const struct mapping *w)
{
    return grant_slab(a, w)->group;
}

/* group.c */
void grant_group_free(struct arena *a, struct arena_group *g);
/* Frees the group that nobody opened and nothing is granted to. */
void grant_group_settle(struct arena *a, struct arena_group *g);

/* grant_memory.c: the thread gets the mapping's memory, or gives it back (by w->state), and puts it
 * into `ended`. 0 or -errno. */
int grant_submit(struct arena *a, struct mapping *w);
/* The mappings whose job is done, one at a time; NULL: the end. */
struct mapping *grant_ended(struct arena *a);

#endif
