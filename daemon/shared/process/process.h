/* The process backend: a root that is a process of its own, which docs/backends.md describes. It is
 * internal: the module's interface is backend.h.
 *
 * - A run is one process with its socket and its buffer. There is one at a time, and all that it
 *   had is gone before the next one starts.
 * - A call is one request to a run. Its operation may be cancelled at any time but while a thread
 *   copies: the call, and its span of the buffer, stay until the process has answered or the run
 *   ends.
 * - Slots are never in the buffer: what is read from there is copied first, then verified.
 *
 * process.c has operations and calls; answer.c says what answers mean. run.c starts, watches and
 * ends runs, sends and receives packets, and tells process.c by process_events what happens.
 * start.c makes processes, said.c reads what they say. */
#ifndef UCMD_SHARED_PROCESS_PROCESS_H
#define UCMD_SHARED_PROCESS_PROCESS_H

#include "daemon/backend/wire.h"
#include "daemon/base/closer.h"
#include "daemon/config/roots.h"
#include "daemon/shared/backend.h"
#include "proto/backoff.h"

#include <sys/types.h>

#define PROCESS_PATIENCE_MS 10000u /* for its hello, and beyond a request's deadline */
#define PROCESS_STOP_MS 2000u      /* to end by itself */
#define PROCESS_LEFT_MS 2000u      /* from its kill to the daemon's end without it */
#define PROCESS_EXIT_MS 200u       /* the same, when it has closed its socket */
#define PROCESS_REQUEST_MS 60000u  /* of an operation without a deadline */
#define PROCESS_PAUSE_MS 250u      /* between starts; doubles to */
#define PROCESS_PAUSE_MAX_MS 30000u
#define PROCESS_CHECKS 3u      /* that fail in a row: it is started again */
#define PROCESS_WELL_MS 10000u /* a run that was up for so long: the next pause is the shortest */
#define PROCESS_INLINE_BYTES 65536u /* copied on the event loop; more in a thread */
#define PROCESS_TURN_PACKETS 16u    /* received for one iteration of the event loop */
#define PROCESS_CALLS 1025u         /* at most */
#define PROCESS_LINE_BYTES 400u     /* of a line that it says; more are left out */
#define PROCESS_LINES 100u          /* of it in the log, in */
#define PROCESS_LINES_MS 10000u

struct process_call {
    struct list link;      /* in `free` or `ready` of the backend, or in none */
    struct list span_link; /* in `spans` of the run, by offset */
    struct process_run *run;
    struct shared_op *op; /* NULL: cancelled */
    enum { CALL_FREE, CALL_COPIES, CALL_READY, CALL_ASKED } stage;
    enum shared_verb verb;
    uint64_t id, offset, span_bytes;
    uint64_t mtime_ns;
    bool back;     /* CALL_COPIES: from the buffer */
    bool given_up; /* the same, to it: nothing is asked when it has ended */
    int status;    /* of the copy */
    uv_work_t copy;
    struct deadline hang;
    struct shared_listing listing;
};

struct process_run {
    struct shared_backend *b;
    enum { RUN_STARTING, RUN_GREETING, RUN_UP, RUN_ENDING } state;
    uv_work_t start;
    bool threaded; /* `start` is under way: the run is made, or its buffer given back */
    int start_status;
    pid_t pid; /* 0: none, or reaped */
    int socket, pid_fd, buffer_fd;
    uint8_t *buffer;
    uint64_t buffer_bytes;
    uv_poll_t io, exit;
    bool io_open, exit_open, limit_open, writable_wanted;
    unsigned handles;       /* that are open or closing */
    unsigned checks_failed; /* in a row */
    unsigned copying;       /* threads that use the buffer */
    /* Times out the greeting, and the end, which must come before the daemon's own deadlines. */
    uv_timer_t limit;
    struct list spans; /* of process_call.span_link */
    struct wire_packet out;
    bool out_waits; /* it is whole, and the socket took it not */
    uint64_t up_ms;
    unsigned depth;
    bool touch, list;
    char name[WIRE_NAME_BYTES + 1];
    char why[160]; /* it ends */
};

/* What process.c does when something happens to a run. */
struct process_events {
    /* Does at the end of this iteration of the event loop what is to be done: starts, requests,
     * ends. */
    void (*turn)(struct shared_backend *b);
    void (*request)(struct process_call *c, struct wire_request *out);
    void (*asked)(struct process_call *c); /* it was put into a packet */
    /* The message of an answer. False: it breaks a rule, which *why then says. */
    bool (*answered)(struct process_run *run, const struct wire_answer *a, const char **why);
    /* The run ends: fails all calls of it but those that a thread copies. */
    void (*calls_fail)(struct process_run *run);
    /* All operations that wait for a call end with `status`. */
    void (*queue_fail)(struct shared_backend *b, int status);
    void (*last)(struct shared_backend *b); /* the run is gone and the backend closes */
};

struct shared_backend {
    const struct process_events *events;
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct config_process config;
    char name[WIRE_NAME_BYTES + 1];
    char shown[128]; /* the target, for the log */
    char host[WIRE_NAME_BYTES + 1];
    const char *launcher;
    bool read_only;
    unsigned depth;
    struct shared_temp temps;
    struct process_run *run; /* NULL: down */
    /* of a run's socket; held by threads, too, that a run leaves behind. No process is started
     * before its end. */
    struct closing *closing_fds;
    struct backoff pause;
    /* sends what was started in this iteration of the event loop, and ends what ended */
    uv_idle_t turn;
    bool closing;
    unsigned under_way;       /* operations */
    struct list light, heavy; /* of shared_op.link: queued; heavy: they need a span */
    struct list ended;        /* of shared_op.link: done_cb is still to run */
    struct list ready;        /* of process_call.link: to be sent */
    struct list free;
    struct process_call *calls;
    unsigned calls_used;
    uint64_t numbers;             /* of calls */
    uint64_t starts, ends, kills; /* ends: unasked; kills: of these, by the daemon */
    char reason[160];             /* of the last failure; "": none since the last start */
    bool absent;                  /* the last run ended for that its directory is not there */
};

/* ---- run.c ---- */

/* There is none. 0, -ENOMEM. */
int process_run_start(struct shared_backend *b);
/* Ends it, for this reason (a sentence's end: "it ..."). grace_ms: to end by itself; 0: it is
 * killed at once. */
void process_run_end(struct process_run *run, uint64_t grace_ms, const char *why, ...)
    __attribute__((format(printf, 3, 4)));
/* The backend closes. */
void process_run_stop(struct process_run *run);
/* A thread has ended. */
void process_run_settle(struct process_run *run);
/* Its socket is there: watches it, and sends the hello. 0 or -errno. */
int process_run_greet(struct process_run *run);
/* Sends calls of `ready`. */
void process_run_flush(struct process_run *run);

/* ---- answer.c ---- */

#define PROCESS_MORE 1
/* The call's status; PROCESS_MORE: another answer follows; -EPROTO: it breaks a rule, which *why
 * says. */
int process_answer_take(struct process_call *c, const struct wire_answer *a, const char **why);

/* ---- said.c ---- */

/* For a process that starts: its writes to *out, which the caller closes, go to the log, cut to
 * PROCESS_LINE_BYTES and PROCESS_LINES, until no writer is left. 0 or -errno. Any thread; waits for
 * nobody. */
int process_said_begin(struct shared_backend *b, int *out);

/* ---- start.c ---- */

/* In a thread: buffer, socket and process. 0, or -errno and what failed in `why`. */
int process_make(struct process_run *run);

#endif
