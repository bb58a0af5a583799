/* What a feature adds to requests: its interface. daemon/features.c lists all features; the module
 * itself names none.
 *
 * A feature keeps its state of the daemon in requests.ext, and of a connection in session.ext, each
 * under its own number. Callbacks may be NULL. Thread: the event loop only. */
#ifndef UCMD_REQUEST_FEATURE_H
#define UCMD_REQUEST_FEATURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct call;
struct requests;
struct session;

struct exposition;

#define FEATURES 9u /* daemon/features.h names them */

struct feature {
    /* The sizes of its zeroed memory: requests.ext[id], session.ext[id]. 0: it needs none. */
    size_t requests_bytes, session_bytes;
    int (*open_cb)(struct requests *rq);   /* 0 or -errno; close_cb follows in either case */
    void (*drain_cb)(struct requests *rq); /* no new work is taken from now on */
    void (*stop_cb)(struct requests *rq);  /* what is under way ends soon */
    uint32_t (*active_cb)(const struct requests *rq); /* what a stop awaits, besides requests */
    void (*reload_cb)(struct requests *rq);           /* settings may have changed */
    /* Its gauges: once a second, and when somebody asks. */
    void (*observe_cb)(struct requests *rq, struct exposition *x);
    void (*close_cb)(struct requests *rq); /* no session is left */
    int (*session_open_cb)(
        struct session *s); /* 0 or -errno, and session_close_cb does not follow */
    void (*session_gone_cb)(
        struct session *s); /* its peer has gone; its requests are yet to be stopped */
    /* Its requests and regions have ended. False: the feature goes on, and calls
     * session.settle_cb. */
    bool (*session_end_cb)(struct session *s);
    void (*session_close_cb)(
        /* its leases and pending writes have ended; its namespaces are open yet */
        struct session *s);
};

/* By number. */
typedef const struct feature *const feature_table[FEATURES];
/* A method: answers, now or later, and returns 0; or sets call->error and returns its negative
 * code. By enum ucm_method. */
typedef int (*method_fn)(struct call *call);

#endif
