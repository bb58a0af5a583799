/* Chores: work done in steps, one in each iteration of the event loop in which the chore is due.
 * New work wakes its chore. Each chore bounds one step in its own units: blocks, parts.
 *
 * Promises: a chore that is due runs in the next iteration of the event loop, after those that were
 * added before it. One that is woken while another one runs comes in the same iteration if its
 * place is after that one's. While none is due the event loop rests.
 * Nothing is allocated. Thread: the event loop only. */
#ifndef UCMD_BASE_CHORE_H
#define UCMD_BASE_CHORE_H

#include "daemon/base/list.h"

#include <stdbool.h>
#include <uv.h>

/* Embedded in its owner, zeroed. */
struct chore {
    void *ctx;                 /* what its callbacks get */
    bool (*run_cb)(void *ctx); /* true: it stays due */
    /* Whether it has something to do now; NULL: only its callers know, and wake it. After an
     * iteration a ready chore is due. In between the code that makes it ready has to wake it: tests
     * look for a ready chore that sleeps (chore_asleep). */
    bool (*ready_cb)(const void *ctx);
    bool due;   /* out: it runs in the next iteration, or runs now */
    bool woken; /* while it runs */
    struct chores *of;
    struct list link; /* in chores.all */
};

struct chores {
    uv_idle_t idle; /* idle.data is the owner's */
    struct list all;
    bool on, closing;
};

/* 0 or -errno. */
int chores_init(struct chores *all, uv_loop_t *loop);
/* Wakes do nothing from now on. */
void chores_close(struct chores *all, uv_close_cb closed_cb);
void chore_add(struct chores *all, struct chore *k, bool (*run_cb)(void *ctx),
               bool (*ready_cb)(const void *ctx), void *ctx);
/* It does not run again. Not inside a chore. */
void chore_remove(struct chore *k);
void chore_wake(struct chore *k);
/* The first one that has something to do and is not due: nobody would do it. NULL: there is
 * none. */
const struct chore *chore_asleep(const struct chores *all);

#endif
