/* The inside of libucmclient. README.md explains states, threads and tokens.
 *
 * Unless a comment says otherwise, the caller of each function here holds the client's lock, and a
 * function that waits drops the lock meanwhile. Deadlines are in CLOCK_MONOTONIC nanoseconds; 0 is
 * long past. Functions return 0 or -UCM_E* with ucm_errmsg set. */
#ifndef UCM_CLIENT_INTERNAL_H
#define UCM_CLIENT_INTERNAL_H

#include "client/include/ucmclient.h"
#include "proto/backoff.h"
#include "proto/proto.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#define CLIENT_BUCKETS 256 /* of the hash table of calls, by message id */
#define CLIENT_ORPHANS 256 /* timed-out calls whose late answer must be undone; half: leases */
#define CLIENT_TOLD 256    /* requests whose answers nobody waits for */
#define CLIENT_FOLLOWUPS_BYTES 16384 /* cancels, releases and unregisters that nobody waits for */
#define CLIENT_DEFAULT_TIMEOUT_MS 10000
#define CLIENT_WHY_BYTES 480
#define CLIENT_SETTLE_NS 1000000 /* from a look at a breaking link to the next */

/* The link broke before the first byte of a request left. The daemon has not seen the request, and
 * the caller sends it again on the next link. This status never leaves the library. */
#define CLIENT_AGAIN 1

/* ---- calls: call.c ---- */

struct client_call;

/* Takes the decoded result of an answer; the call is still linked. 0, or -UCM_E* with call->error
 * filled. May be NULL. */
typedef int (*client_take_cb)(struct client_call *call, const union proto_any *m);
/* Runs once, when the call is done, whatever its status. May be NULL. */
typedef void (*client_done_cb)(struct client_call *call);
/* The daemon reported progress of a load. False: the report does not fit the load. */
typedef bool (*client_progress_cb)(struct client_call *call, const struct msg_progress *m);

/* Descriptors that came with an answer. A taker sets its descriptor to -1; the others are
 * closed. */
struct client_fds {
    int *fd;
    uint32_t n;
    bool lost; /* some did not come, as this process has no room for them */
};

/* One request on its way. It lives on the waiter's stack, or inside a task or a handle. */
struct client_call {
    struct ucm_client *client;
    enum ucm_method method; /* UCM_METHOD_COUNT: any, whose result is the map answer->body */
    const struct proto_envelope *answer; /* while take_cb runs */
    struct client_fds *fds;              /* likewise: that came with the answer; NULL: none */
    client_take_cb take_cb;
    client_done_cb done_cb;
    client_progress_cb progress_cb; /* NULL: a report of progress is an error */
    uint32_t layers;                /* landed so far, by the latest report */
    uint32_t msgid;
    bool linked; /* in the table: an answer is awaited */
    bool done;
    int64_t expected_ns; /* when its answer should come; 0: unknown */
    int status;          /* when done: 0, or -UCM_E* with its sentence in `error` */
    struct ucm_error error;
    LIST_ENTRY(client_call) node; /* in its bucket */
    unsigned n_waiting;           /* threads on `cond` */
    pthread_cond_t cond;
    TAILQ_ENTRY(client_call) waiting; /* in client->waiting while n_waiting > 0 */
};
TAILQ_HEAD(client_calls, client_call);

/* init creates the condition variable. reset prepares the call for another request. */
void client_call_init(struct client_call *call, struct ucm_client *c, client_take_cb take_cb,
                      client_done_cb done_cb);
void client_call_close(struct client_call *call);
void client_call_reset(struct client_call *call);

/* Puts the call into the table. */
void client_call_link(struct client_call *call, uint32_t msgid);
uint32_t client_msgid(struct ucm_client *c); /* the next that is free */
/* Takes the call out of the table: the library drops a late answer. */
void client_call_unlink(struct client_call *call);
struct client_call *client_call_find(struct ucm_client *c, uint32_t msgid);
/* Unlinks, sets the outcome, wakes the waiters. text NULL: call->error is filled already. */
void client_call_finish(struct client_call *call, int status, const char *text);
void client_call_finish_all(struct ucm_client *c, int status, const char *text);
/* Waits until the call is done. 0, or -UCM_EDEADLINE, which leaves the call as it was. Sets no
 * ucm_errmsg. */
int client_call_wait(struct client_call *call, int64_t deadline_ns);
/* The same, until that many layers have landed or the call is done. */
int client_call_wait_layers(struct client_call *call, uint32_t layers, int64_t deadline_ns);
/* Takes a report of progress. False: it violates the protocol. */
bool client_call_progress(struct ucm_client *c, const struct msg_progress *m);
/* The outcome of a done call; its sentence becomes ucm_errmsg. */
int client_call_status(const struct client_call *call);

/* What a request sends. */
struct client_request {
    enum ucm_method method;
    const void *params;           /* the struct msg_* of the method's parameters */
    struct client_handle *handle; /* must be ready before it is sent; NULL: none */
    uint64_t *handle_id;          /* the field of *params that receives its id */
    struct proto_str *request_id; /* the field that receives the thread's request id; NULL: none */
    const int *fds;
    uint32_t n_fds;
    const char *name; /* not NULL: the method, with packed_bytes of packed parameters */
    size_t packed_bytes;
};

/* request_id.c: the calling thread's, a view. Needs no lock. */
struct proto_str client_request_id(void);

/* ---- handles (namespaces and regions): handle.c, begin.c ---- */

enum client_handle_state {
    HANDLE_STALE,   /* the present connection does not know it */
    HANDLE_PENDING, /* its request is on its way */
    HANDLE_READY,   /* `id` names it on the present connection */
    HANDLE_REFUSED, /* the daemon refused it after a reconnect: call.error says why */
};

/* The first member of a struct ucm_namespace or ucm_region, whose memory it frees. */
struct client_handle {
    struct ucm_client *client;
    bool listed; /* in client->handles: a reconnect registers it again */
    enum client_handle_state state;
    uint32_t id;
    unsigned refs; /* of the user, of threads that wait or send, of a namespace's regions */
    struct client_call call;
    struct client_request request; /* opens it; names a region's namespace, referenced */
    int fds[UCM_MAX_FRAME_FDS];    /* sent with it, owned */
    _Atomic(void *)
        ext; /* what a feature keeps of it, or NULL; the feature reads it without the lock */
    void (*free_cb)(struct client_handle *h); /* frees that, before the handle; NULL: nothing */
    /* For CUDA IPC memory: writes the nonce (0, or not 0 and nothing is written), or, if NULL,
     * restores all bytes. Without the lock. */
    int (*prove_cb)(struct client_handle *h, const uint8_t *nonce);
    bool once; /* a reconnect does not register it again */
    TAILQ_ENTRY(client_handle) node;
};
TAILQ_HEAD(client_handles, client_handle);

struct ucm_namespace {
    struct client_handle handle;
    /* Views into `layers` and what follows it. For summaries and encoded blocks they are the
     * base's, which handle.request references. */
    struct msg_ns_open open;
    struct client_summary *summary;   /* after the struct; NULL: the blocks are no summaries */
    struct client_encoding *encoding; /* likewise; NULL: they are stored as they are */
    uint8_t fingerprint[32];
    uint32_t layers[]; /* then the salt, then the strings */
};

struct client_encoding {
    struct msg_encoding_open open; /* views into what follows */
    struct ucm_encoding_info info; /* likewise its form; sizes: of the last answer */
    uint32_t k[3], v[3];
    char encoding[17], dtype[17];
};

struct ucm_region {
    struct client_handle handle;
    atomic_bool gpu_busy;           /* ucm_region_gpu_busy */
    struct msg_region_register msg; /* views into the members below and after them */
    uint32_t rope[UCM_ROPE_NUMBERS];
    char rope_dtype[16], rope_scaling[16];
    char device[16];
    uint8_t gpu[UCM_UUID_BYTES];
    struct client_proof *proofs; /* after the planes; NULL: no memory needs any */
    /* Then a struct msg_handle, a proof and an IPC handle for each memory. */
    struct msg_plane planes[];
};

struct client_proof {
    ucm_prove_cb prove_cb; /* NULL: the memory needs none */
    void *ctx;
    uint64_t offset; /* in the allocation */
};

static inline struct client_handle *client_handle_of(struct client_call *call)
{
    return (struct client_handle *)((char *)call - offsetof(struct client_handle, call));
}
void client_handle_init(struct client_handle *h, struct ucm_client *c,
                        const struct client_request *request, client_take_cb take_cb);
/* Opens or registers a new handle for the user. On failure the handle is dropped. */
int client_handle_open(struct client_handle *h, int64_t deadline_ns);
/* Waits until its open or register is answered, and moves that on. 0 or -UCM_EDEADLINE, without
 * ucm_errmsg. */
int client_handle_wait(struct client_handle *h, int64_t deadline_ns);
void client_handle_ref(struct client_handle *h);
void client_handle_unref(struct client_handle *h); /* the last one frees */
void client_handle_list(struct client_handle *h);
void client_handle_unlist(struct client_handle *h);
/* Ends all waits for it and gives the user's reference back. */
void client_handle_drop(struct client_handle *h);

/* Connects if need be, registers stale handles again, and returns with the writer's token once `h`
 * (may be NULL) is ready. Ids stay valid until client_request gives the token back. */
int client_begin(struct ucm_client *c, struct client_handle *h, int64_t deadline_ns);
/* Returns with the writer's token on the present connection, or -UCM_EDISCONNECTED after its break.
 * Never connects. */
int client_begin_same(struct ucm_client *c, int64_t deadline_ns);

/* ---- registering CUDA IPC memory: features/prove.c ---- */

void client_prove_init(struct ucm_client *c);
/* Begins to prove, unless another handle of this process does. False: after client_prove_turn it
 * may be possible. */
bool client_prove_begin(struct client_handle *h);
/* 0 or -UCM_EDEADLINE. */
int client_prove_turn(struct ucm_client *c, int64_t deadline_ns);
/* It has begun, and its register is not sent. */
bool client_proves(const struct client_handle *h);
/* Its call is done. The next thread that rests puts back what was overwritten. Harmless when the
 * handle does not prove. */
void client_prove_end(struct client_handle *h);
/* For a handle whose call is done or given up: returns when its nonce is no longer in memory. */
void client_prove_settle(struct client_handle *h);

/* ---- what features and others keep of a client: hook.c ---- */

/* An object whose life ends with the connection or the client, such as a mapping, has a hook as a
 * member. Callbacks may be NULL. They run with the lock held. */
struct client_hook;
struct client_feature {
    /* The connection breaks. True when no part of the object moves this process's bytes any more;
     * until then it is asked again. */
    bool (*settled_cb)(struct client_hook *hook);
    /* The connection is gone. */
    void (*down_cb)(struct client_hook *hook);
    /* In a forked child, where the client is of no use. */
    void (*forked_cb)(struct client_hook *hook);
    /* The daemon says something unasked. 0, or -code with *e if it violates the protocol. */
    int (*notified_cb)(struct client_hook *hook, struct proto_envelope *env, struct ucm_error *e);
    /* The client is being freed: closes the hook, frees the object. */
    void (*closed_cb)(struct client_hook *hook);
};
struct client_hook {
    const struct client_feature *feature; /* NULL: it is closed */
    LIST_ENTRY(client_hook) node;
};
LIST_HEAD(client_hooks, client_hook);

void client_hook_open(struct ucm_client *c, struct client_hook *hook,
                      const struct client_feature *f);
void client_hook_close(struct client_hook *hook); /* harmless when it is closed */
bool client_hooks_settled(struct ucm_client *c);
void client_hooks_down(struct ucm_client *c);
void client_hooks_forked(struct ucm_client *c);
int client_hooks_notify(struct ucm_client *c, struct proto_envelope *env, struct ucm_error *e);
void client_hooks_closed(struct ucm_client *c);

/* ---- the client ---- */

enum client_link {
    LINK_DOWN,
    LINK_BREAKING, /* broken, but a copy agent may still move the worker's bytes: see link.c */
    LINK_HELLO,    /* connected, hello is on its way */
    LINK_UP,
};

/* The user sees numbers of the library's own. After a restart the daemon may use its number again,
 * and an old lease must not end a new one. */
struct client_lease {
    uint32_t number; /* 0: free */
    uint32_t wire;
    int64_t ends_ns;
};

TAILQ_HEAD(client_tasks, ucm_task);

/* spin.c: how long recent requests took. A waiter that can estimate when its request ends spins
 * around that time, since waking a sleeping thread takes as long as moving some MiB. */
struct client_spin {
    int64_t key_ns; /* for each block, smoothed; 0: nothing measured yet */
};
void client_spin_learn(struct client_spin *s, uint32_t n_keys, int64_t took_ns);
/* When a request that is sent now should end; 0: unknown, or too late to be worth a spin. */
int64_t client_spin_expect(const struct client_spin *s, uint32_t n_keys);
/* Like poll() of one descriptor until shortly after expected_ns; spins for at most 0.16 ms around
 * that time. 0: nothing came until then. Any thread, without the lock. */
int client_spin_poll(struct pollfd *p, int64_t expected_ns, int64_t deadline_ns);

struct ucm_client {
    pthread_mutex_t lock;
    TAILQ_ENTRY(ucm_client) node; /* in fork.c's list of all clients of the process */
    bool forked;                  /* this is a forked child's copy, which is of no use */
    char *socket;
    char name[UCM_MAX_NAME_BYTES + 1];
    int default_timeout_ms;

    unsigned users;            /* threads inside */
    _Atomic unsigned entering; /* threads that wait for the lock to come inside */
    bool closing;
    pthread_cond_t idle; /* a token or the link changed hands, or users fell to 0 */

    enum client_link link;
    int fd;                    /* -1: none. May outlive LINK_DOWN, until both tokens are free */
    uint64_t connection_epoch; /* counts connections that said hello */
    uint64_t attempts;         /* counts tries to connect */
    struct backoff retry;      /* in nanoseconds */
    int64_t up_since_ns;
    int64_t settled_by_ns;           /* while breaking: when to stop waiting for copy agents */
    int why;                         /* while down: -UCM_E* of the last try or break ... */
    char why_text[CLIENT_WHY_BYTES]; /* ... and its sentence */
    bool refused;                    /* the last try failed in a way that a retry will not mend */
    struct ucm_error farewell;       /* the daemon's error for the whole connection */
    struct client_call hello;
    struct ucm_server_info info;
    uint32_t max_frame_bytes;

    bool reading, writing; /* a thread holds the token */
    struct proto_buf out;  /* belongs to the writer's token */
    struct {
        uint8_t *p;
        size_t begin, end, cap;
        int fds[UCM_MAX_FRAME_FDS]; /* came with bytes before fds_end; -1: taken */
        uint32_t n_fds;
        bool fds_lost;  /* this process has no room for more descriptors */
        size_t fds_end; /* 0: none came with what is left */
    } in;               /* belongs to the reader's token */

    uint32_t next_msgid;
    LIST_HEAD(client_bucket, client_call) calls[CLIENT_BUCKETS];
    struct client_calls waiting;
    unsigned n_orphans, n_told; /* in that table: calls that were given up, and those whose answers
                                 * nobody waits for; see request.c */
    struct proto_buf followups; /* encoded; never sent in part */

    struct client_handles handles; /* each namespace before its regions */
    bool stale;                    /* some listed handle may be STALE */
    struct {
        struct client_hook hook;
        /* The one that proves its memory, referenced, until its register is answered and the memory
         * has its own bytes back; NULL: none. */
        struct client_handle *handle;
        bool over;    /* it was answered */
        bool written; /* the nonce stands in its memory */
        bool calls;   /* a thread is in its prove_cb, without the lock */
        struct client_call challenge;
        uint8_t nonce[UCM_NONCE_BYTES];
        int64_t nonce_ns; /* when it was asked for; 0: there is none */
    } prover;
    /* A thread calls it after it waited, and before it leaves, if it holds no token. It may drop
     * the lock. NULL: nothing to do. */
    void (*rest_cb)(struct ucm_client *c);
    struct client_tasks tasks;
    struct client_hooks hooks;

    struct client_lease *leases; /* n_leases, a power of two; NULL until the first one */
    uint32_t n_leases, next_lease;

    int epoll_fd;               /* ucm_fd: of the socket, until it breaks, and of these two */
    int event_fd, settle_fd;    /* settle_fd: a timer, for the next look at a breaking link */
    bool polled;                /* the user asked for ucm_fd */
    bool signalled;             /* event_fd is readable */
    unsigned tasks_done;        /* since the last ucm_process */
    struct client_spin spin[3]; /* of loads, of dumps, of gathers */
};

/* enter.c: every API function begins with enter and ends with leave. enter locks and counts the
 * caller. leave passes the reader's role on, sends followups, unlocks and returns `status`. */
int client_enter(struct ucm_client *c);
/* The same of a call's arguments: c is NULL where one of those that the call needs is. */
int client_enter_given(struct ucm_client *c, const char *needed);
int client_leave(struct ucm_client *c, int status);

/* wait.c */
int64_t client_now_ns(void);
int64_t client_deadline(const struct ucm_client *c, int timeout_ms);
/* 0 or ETIMEDOUT. */
int client_cond_wait(struct ucm_client *c, pthread_cond_t *cond, int64_t deadline_ns);
/* Calls of several requests on one object take turns, inside the client: *busy is the object's.
 * what: what the message of a deadline says that another thread does. */
int client_turn(struct ucm_client *c, bool *busy, const char *what, int64_t deadline_ns);
void client_turn_end(struct ucm_client *c, bool *busy);
/* Makes ucm_fd readable. */
void client_signal(struct ucm_client *c);

/* fork.c: makes a forked child close its copies of descriptors. Without any client's lock. */
int client_fork_init(void); /* does its work once in a process */
void client_fork_watch(struct ucm_client *c);
void client_fork_forget(struct ucm_client *c);

/* break.c: how a connection ends. */
/* Breaks the connection. Every call under way ends with status and text, now or when copy agents
 * have ended (LINK_BREAKING). Does nothing if the link is broken already. */
void client_link_break(struct ucm_client *c, int status, const char *text);
/* Completes a break if copy agents have ended, or their time is over. Otherwise ucm_fd becomes
 * readable when it is time for another look. Never blocks. */
void client_link_try_settle(struct ucm_client *c);
/* Closes the socket of a broken link when nobody uses it any more. */
void client_link_reap(struct ucm_client *c);
/* Closes descriptors that came and that nobody took. The caller holds the reader's token, or nobody
 * does. */
void client_fds_close(struct ucm_client *c);
void client_close_descriptors(struct ucm_client *c);
static inline bool client_link_live(const struct ucm_client *c)
{
    return c->link == LINK_HELLO || c->link == LINK_UP;
}

/* link.c: connecting. */
void client_link_init(struct ucm_client *c);
int client_link_up(struct ucm_client *c, int64_t deadline_ns);
/* Waits until a break is complete. 0, also when no break is under way, or -UCM_EDEADLINE. */
int client_link_settle(struct ucm_client *c, int64_t deadline_ns);

/* io.c: bytes out and in. */
/* Returns when the writer's token may be free, or -UCM_EDEADLINE. */
int client_writer_wait(struct ucm_client *c, int64_t deadline_ns);
void client_writer_release(struct ucm_client *c);
/* Sends c->out. The caller holds the writer's token and keeps it. -UCM_EDEADLINE: nothing was sent;
 * a frame that was sent in part breaks the link. May return CLIENT_AGAIN. */
int client_send(struct ucm_client *c, const int *fds, uint32_t n_fds, int64_t deadline_ns);
/* Takes the reader's token, which must be free, waits until something arrives (or `also`, POLLOUT,
 * is ready) and dispatches it. On a breaking link it waits for copy agents instead. 0, or
 * ETIMEDOUT. The link must not be DOWN. expected_ns: see client_spin_poll; 0: unknown. */
int client_read(struct ucm_client *c, short also, int64_t expected_ns, int64_t deadline_ns);
/* Dispatches what has arrived. Never blocks. */
void client_read_ready(struct ucm_client *c);
/* Wakes a waiter to read on, if nobody reads. */
void client_lead_pass(struct ucm_client *c);
/* Decodes a result or a notification; one that does not fit is -UCM_EPROTOCOL. */
int client_take(const struct proto_message *m, struct proto_envelope *env, void *out,
                struct ucm_error *e);

/* request.c: one request, built on the above. */

/* Encodes, links the call, sends, and gives the writer's token back that client_begin took. On
 * failure the call is not linked. May return CLIENT_AGAIN. */
int client_request(struct client_call *call, const struct client_request *q, int64_t deadline_ns);
/* The same, then waits for the answer, and gives up on it when the deadline passes. */
int client_request_wait(struct client_call *call, const struct client_request *q,
                        int64_t deadline_ns);
/* A client_take_cb of calls whose answer nobody waits for: undoes what it brings. */
int client_undo_cb(struct client_call *call, const union proto_any *m);
/* Gives up on an answer, and undoes what it brings if it comes later. -UCM_EDEADLINE. */
int client_call_orphan(struct client_call *call, const struct client_request *q);
/* method: CANCEL, RELEASE, REGION_UNREGISTER, RING_UNREGISTER, SEQUENCE_CLOSE or MAPPING_CLOSE. */
void client_followup(struct ucm_client *c, enum ucm_method method, uint32_t id);
/* The same for any method whose answer does not matter. */
void client_followup_params(struct ucm_client *c, enum ucm_method method, const void *params);
void client_followup_flush(struct ucm_client *c);

/* exchange.c: a request and its answer. */

/* From client_begin to the answer, on as many links as it takes. Inits and closes the call. When
 * the deadline passes, the library drops the answer, and undoes what the request left in the
 * daemon. */
int client_exchange(struct client_call *call, struct ucm_client *c, client_take_cb take_cb,
                    const struct client_request *q, int64_t deadline_ns);
/* After client_begin_same; drops the answer's result. -UCM_EDISCONNECTED: the connection broke. */
int client_exchange_same(struct ucm_client *c, enum ucm_method method, const void *params,
                         int64_t deadline_ns);
/* Sends a request, and drops the answer, of which CLIENT_TOLD may be awaited. */
int client_tell(struct ucm_client *c, const struct client_request *q, int64_t deadline_ns);

/* lookup.c: may a request have so many keys? *out is how they travel. */
int client_keys_check(const struct ucm_client *c, const struct ucm_namespace *ns, const void *keys,
                      uint32_t n_keys, struct proto_bin *out);

/* lease.c */
int client_lease_prepare(struct ucm_client *c); /* creates the table */
uint32_t client_lease_add(struct ucm_client *c, uint32_t wire, uint32_t lease_ms);
uint32_t client_lease_find(struct ucm_client *c, uint32_t number); /* on the wire; 0: ended */
void client_lease_end(struct ucm_client *c, uint32_t number);
void client_lease_end_all(struct ucm_client *c);

/* task.c */
void client_task_free_all(struct ucm_client *c);
/* A request for blocks whose answer is blocks_r. ns: whose keys they are; keys: the field of the
 * parameters that receives them. */
int client_task_start(const struct client_request *q, const struct ucm_namespace *ns,
                      struct proto_bin *keys, const struct ucm_transfer *t, int timeout_ms,
                      struct ucm_task **out);
/* What a task holds if it is not by keys alone. free_cb also runs when the task was not sent. */
struct client_task_kind {
    int (*begin_cb)(void *of, const struct client_request *q,
                    int64_t deadline_ns); /* as client_begin */
    void (*done_cb)(void *of, int status);
    void (*free_cb)(void *of);
};
/* Sends a request whose answer has n statuses. kind: NULL, and client_begin of q->handle. */
int client_task_run(struct ucm_client *c, const struct client_request *q, uint32_t n,
                    const struct client_task_kind *kind, void *of, int64_t deadline_ns,
                    struct ucm_task **out);
static inline const struct ucm_namespace *client_namespace_of(const struct ucm_region *region)
{
    return (const struct ucm_namespace *)region->handle.request.handle;
}

/* error.c: sets ucm_errmsg and returns -status. Without the lock. */
int client_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
int client_fail_as(int status, const char *text); /* status is negative already; returned */
int client_fail_wire(int status, const struct ucm_error *e);

#endif
