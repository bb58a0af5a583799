/* The inside of libucmclient. README.md explains states, threads and tokens.
 *
 * Unless a comment says otherwise, the caller of each function here holds the client's lock, and a
 * function that waits drops the lock meanwhile. Deadlines are in CLOCK_MONOTONIC nanoseconds; 0 is
 * long past. Functions return 0 or -UCM_E* with ucm_errmsg set. */
#ifndef UCM_CLIENT_INTERNAL_H
#define UCM_CLIENT_INTERNAL_H

#include "client/include/ucmclient.h"
#include "client/include/ucmclient_sparse.h"
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

/* The link broke before the first byte of a request left, so the daemon knows nothing of it and the
 * caller sends it again on the next link. Never leaves the library. */
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

/* Descriptors that came with an answer. Who takes one sets it to -1; the others are closed. */
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

/* What a request says. */
struct client_request {
    enum ucm_method method;
    const void *params;           /* the struct msg_* of the method's parameters */
    struct client_handle *handle; /* must be ready before it is sent; NULL: none */
    uint64_t *handle_id;          /* the field of *params that receives its id */
    struct proto_str *request_id; /* the field that receives the thread's request id; NULL: none */
    bool *computes;               /* the field that older daemons don't know; NULL: there is none */
    struct msg_lookup *nowait; /* a lookup with `nowait`, which older daemons don't know; or NULL */
    uint64_t wait_ms;          /* what that waits there for the shared tier */
    const int *fds;
    uint32_t n_fds;
    const char *name; /* not NULL: the method, with packed_bytes of packed parameters */
    size_t packed_bytes;
};

/* request_id.c: the calling thread's, a view. Needs no lock. */
struct proto_str client_request_id(void);

/* ---- handles (namespaces and regions): handle.c ---- */

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
    struct client_request request;        /* opens it; names a region's namespace, referenced */
    int fds[UCM_MAX_FRAME_FDS];           /* sent with it, owned */
    _Atomic(struct client_hints *) hints; /* of a namespace, freed with it; NULL: never opened */
    /* Of one that takes CUDA IPC memory: writes the nonce (0, or not 0 and nothing is written), or, NULL, puts all
     * back. Without the lock. */
    int (*prove_cb)(struct client_handle *h, const uint8_t *nonce);
    bool once; /* a reconnect does not register it again */
    TAILQ_ENTRY(client_handle) node;
};
TAILQ_HEAD(client_handles, client_handle);

struct ucm_namespace {
    struct client_handle handle;
    /* Views into `shards` and behind it; of digests and encoded blocks, those of the base, which
     * handle.request references. */
    struct msg_ns_open open;
    struct client_digest *digest;     /* behind the struct; NULL: the blocks are no digests */
    struct client_encoding *encoding; /* likewise; NULL: they are stored as they are */
    uint8_t fingerprint[32];
    uint32_t shards[]; /* then the salt, then the strings */
};

struct client_digest {
    struct msg_digest_open open;
    struct ucm_sparse_digest digest; /* keep: the array below, or NULL */
    uint8_t keep[UCM_MAX_HEAD_DIM / 2 / 8];
};

struct client_encoding {
    struct msg_encoding_open open; /* views into what follows */
    struct ucm_encoding_info info; /* likewise its form; sizes: of the last answer */
    uint32_t k[3], v[3];
    char encoding[17], dtype[17];
};

struct ucm_region {
    struct client_handle handle;
    atomic_bool computes;           /* ucm_region_computes */
    struct msg_region_register msg; /* views into the members below and behind them */
    uint32_t rope[UCM_ROPE_NUMBERS];
    char rope_dtype[16], rope_scaling[16];
    char device[16];
    uint8_t gpu[UCM_UUID_BYTES];
    struct client_proof *proofs; /* behind the planes; NULL: no memory needs any */
    struct msg_plane
        planes[]; /* then a struct msg_handle, a proof and an IPC handle for each memory */
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
/* Waits until its open or register is answered, and moves that on. 0 or -UCM_EDEADLINE, without ucm_errmsg. */
int client_handle_wait(struct client_handle *h, int64_t deadline_ns);
void client_handle_ref(struct client_handle *h);
void client_handle_unref(struct client_handle *h); /* the last one frees */
void client_handle_list(struct client_handle *h);
void client_handle_unlist(struct client_handle *h);
/* Ends all waits for it and gives the user's reference back. */
void client_handle_drop(struct client_handle *h);
void client_handle_stale_all(struct ucm_client *c); /* the connection broke */

/* Connects if need be, registers stale handles again, and returns with the writer's token once `h`
 * (may be NULL) is ready. Ids stay valid until client_request gives the token back. */
int client_begin(struct ucm_client *c, struct client_handle *h, int64_t deadline_ns);
/* Returns with the writer's token on the present connection, or -UCM_EDISCONNECTED after its break.
 * Never connects. */
int client_begin_same(struct ucm_client *c, int64_t deadline_ns);

/* ---- registering CUDA IPC memory: prove.c ---- */

void client_prove_init(struct ucm_client *c);
void client_prove_forked(void); /* in the child */
/* Does the daemon of now ask for a proof of it? */
bool client_prove_needed(const struct client_handle *h);
/* Begins to prove, if nobody else of this process does. False: after client_prove_turn it may be possible. */
bool client_prove_begin(struct client_handle *h);
/* 0 or -UCM_EDEADLINE. */
int client_prove_turn(struct ucm_client *c, int64_t deadline_ns);
/* It has begun, and its register is not sent. */
bool client_proves(const struct client_handle *h);
/* Moves that on. 0, also when it has ended, or -UCM_EDEADLINE, which loses nothing. */
int client_prove_step(struct client_handle *h, int64_t deadline_ns);
/* Its call is done. What was written is put back by client_prove_restore. Harmless when it does not prove. */
void client_prove_end(struct client_handle *h);
/* The link is down. */
void client_prove_break(struct ucm_client *c);
/* Puts back what ended registrations have written. Drops the lock meanwhile, so the caller holds no token. */
void client_prove_restore(struct ucm_client *c);
/* Returns when nothing of the handle, whose call is done or given up, stands in memory any more. */
void client_prove_settle(struct client_handle *h);

/* ---- chains: chain.c ---- */

/* Chains are no handles: appending a million keys again would hold up every call after a reconnect.
 * The first call that names a chain opens it again. */
struct ucm_chain {
    struct ucm_client *client;
    struct ucm_namespace *ns; /* of digests, referenced */
    TAILQ_ENTRY(ucm_chain) node;
    unsigned refs; /* of the user, of threads that use it, of prefetches */
    bool closed;   /* by the user */
    bool busy;     /* a thread opens it or appends to it: others wait for client->idle */
    bool reopening;
    bool build; /* missing digests are built, also when it is opened again */
    uint32_t part, lease_ms;
    uint32_t id;       /* on the wire ... */
    uint64_t attempts; /* ... of this connection; 0: the daemon does not know it */
    uint8_t *keys;     /* n_blocks, in room for `room` */
    uint32_t n_blocks, room;
};
TAILQ_HEAD(client_chains, ucm_chain);

/* As client_begin of `h`, or NULL; and the daemon of the present connection knows all of the chains, each by
 * its id. They are of one client. May return CLIENT_AGAIN. */
int client_chains_begin(struct ucm_chain *const *chains, uint32_t n, struct client_handle *h,
                        int64_t deadline_ns);
void client_chain_ref(struct ucm_chain *chain);
void client_chain_unref(struct ucm_chain *chain);
/* The daemon answered that it has no such chain: the next call opens it again. */
void client_chain_forget(struct ucm_chain *chain);
void client_chains_free(struct ucm_client *c);
/* 0; or -UCM_EINVALID: one of the numbers is not a block of the chain. */
int client_chain_index_check(const struct ucm_chain *chain, const uint32_t *index, uint32_t n);

/* ---- prefetchers: prefetcher.c ---- */

struct ucm_prefetcher;
TAILQ_HEAD(client_prefetchers, ucm_prefetcher);

/* The connection broke: all that wait end. */
void client_prefetchers_end(struct ucm_client *c);
void client_prefetchers_free(struct ucm_client *c);

/* ---- staging rings: staging.c ---- */

struct ucm_staging;

struct ucm_ring_registration {
    struct ucm_client *client;
    struct ucm_staging *memory;
    uint32_t id; /* 0: the daemon does not know it, or not any more */
    TAILQ_ENTRY(ucm_ring_registration) node;
};
TAILQ_HEAD(client_staging_queue, ucm_ring_registration);

/* The connection broke: lets no order begin any more. True when none is under way. */
bool client_rings_abandon(struct ucm_client *c);
void client_rings_end(struct ucm_client *c); /* the daemon knows none of them any more */
void client_rings_free(struct ucm_client *c);

/* ---- memory of the daemon: memory.c, hints.c ---- */

/* Maps a descriptor that the daemon sent, read-only, after it has checked that reading there can't kill this process.
 * what: "a window". 0 or -code with *e. Without the lock. */
int client_memory_map(int fd, uint64_t bytes, const char *what, void **out, struct ucm_error *e);

/* A namespace's table of hints. NULL-safe. */
struct client_hints;
void client_hints_free(struct client_hints *h);
/* The connection broke, or this is a forked child: the tables are worth nothing any more. */
void client_hints_end(struct ucm_client *c);

/* ---- windows: window.c, window_map.c ---- */

struct client_mapping {
    uint8_t *p;
    size_t bytes;
    uint32_t extent; /* UCM_PLACE_NONE: a table */
    bool wanted;
    uint64_t opened;
};

/* What an opening of a window says, checked. */
struct client_geometry {
    uint64_t extent_bytes, slot_bytes, part_bytes;
    uint32_t extents, slots; /* slots of an extent */
    uint64_t budget;
};

/* The daemon's memory as this process maps it. Readers take `lock` alone, so a call that holds it waits for nothing
 * but their copies. Who changes it also holds the client's lock. */
struct client_maps {
    pthread_rwlock_t lock;
    _Atomic uint64_t opened; /* whose places may be read; 0: none */
    struct client_geometry geometry;
    const _Atomic uint64_t *generations; /* in the table */
    const uint8_t **extents;             /* geometry.extents; NULL: not mapped */
    struct client_mapping *mappings;     /* n of room */
    uint32_t n, room;
};

int client_maps_init(struct client_maps *m);
void client_maps_free(struct client_maps *m); /* unmaps all */
/* A new opening: maps the table. fd stays the caller's. 0 or -code with *e: what the daemon sent does not fit, or
 * there is no memory. */
int client_maps_open(struct client_maps *m, uint64_t opened, const struct client_geometry *g,
                     int fd, struct ucm_error *e);
/* Maps an extent of the present opening, which must not be mapped. */
int client_maps_add(struct client_maps *m, uint32_t extent, int fd, struct ucm_error *e);
bool client_maps_has(const struct client_maps *m, uint32_t extent);
/* No place is worth anything any more. keep: the mappings stay until each is released; else they go now. */
void client_maps_end(struct client_maps *m, bool keep);
/* Unmaps an extent of the present opening. */
void client_maps_remove(struct client_maps *m, uint32_t extent);
void client_maps_want(struct client_maps *m, uint32_t extent);
/* NULL: nothing is mapped there. */
struct client_mapping *client_maps_find(struct client_maps *m, const void *address);
void client_maps_unmap(struct client_maps *m, struct client_mapping *mapping);

struct ucm_window {
    struct ucm_client *client;
    struct ucm_namespace *ns; /* referenced */
    TAILQ_ENTRY(ucm_window) node;
    unsigned refs; /* of the user, of threads that use it */
    bool busy;     /* a thread opens it, pins or unpins: others wait for client->idle */
    bool closed;   /* by the user */
    uint32_t part, flags;
    uint32_t id;       /* on the wire ... */
    uint64_t attempts; /* ... of this connection; 0: the daemon does not know it */
    uint64_t openings;
    struct client_maps maps;
};
TAILQ_HEAD(client_windows, ucm_window);

/* The connection broke. */
void client_windows_end(struct ucm_client *c);
void client_windows_free(struct ucm_client *c);
/* The daemon wants extents back. */
void client_window_revoke(struct ucm_client *c, const struct msg_window_revoke *m);

/* ---- the client ---- */

enum client_link {
    LINK_DOWN,
    LINK_BREAKING, /* broken, but a companion may still move the worker's bytes: see link.c */
    LINK_HELLO,    /* connected, hello is on its way */
    LINK_UP,
};

/* The user sees numbers of the library's own: after a restart the daemon may use its number again,
 * and an old lease must not end a new one. */
struct client_lease {
    uint32_t number; /* 0: free */
    uint32_t wire;
    int64_t ends_ns;
};

TAILQ_HEAD(client_tasks, ucm_task);

/* spin.c: how long recent requests took. A waiter that knows about when its request ends spins
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
    int fd;               /* -1: none. May outlive LINK_DOWN, until both tokens are free */
    uint64_t generation;  /* counts connections that said hello */
    uint64_t attempts;    /* counts tries to connect */
    struct backoff retry; /* in nanoseconds */
    int64_t up_since_ns;
    int64_t settled_by_ns;           /* while breaking: when to stop waiting for companions */
    int why;                         /* while down: -UCM_E* of the last try or break ... */
    char why_text[CLIENT_WHY_BYTES]; /* ... and its sentence */
    bool refused;                    /* the last try failed in a way that a retry will not mend */
    struct ucm_error farewell;       /* the daemon's error for the whole connection */
    struct client_call hello;
    struct ucm_server_info info;
    uint32_t version; /* of the protocol, on this connection */
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
    unsigned n_orphans, n_told; /* given up calls, and told ones, in that table: see request.c */
    struct proto_buf followups; /* encoded; never sent in part */

    struct client_handles handles; /* each namespace before its regions */
    bool stale;                    /* some listed handle may be STALE */
    /* The handle that proves its memory, referenced, until its register is answered and the memory has its own bytes
     * back; NULL: none. */
    struct client_handle *prover;
    bool prove_over;    /* it was answered */
    bool prove_written; /* the nonce stands in its memory */
    bool prove_calls;   /* a thread is in its prove_cb, without the lock */
    struct client_call challenge;
    uint8_t nonce[UCM_NONCE_BYTES];
    int64_t nonce_ns; /* when it was asked for; 0: there is none */
    struct client_tasks tasks;
    struct client_chains chains;
    struct client_prefetchers prefetchers;
    struct client_staging_queue rings;
    struct client_windows windows;

    struct client_lease *leases; /* n_leases, a power of two; NULL until the first one */
    uint32_t n_leases, next_lease;

    int epoll_fd;               /* ucm_fd: of the socket, until it breaks, and of these two */
    int event_fd, settle_fd;    /* settle_fd: a timer, for the next look at a breaking link */
    bool polled;                /* the user asked for ucm_fd */
    bool signalled;             /* event_fd is readable */
    unsigned tasks_done;        /* since the last ucm_process */
    struct client_spin spin[3]; /* of loads, of dumps, of fetches */
};

/* client.c: every API function goes in by enter, which locks and counts the caller, and out by
 * leave, which passes the reader's role on, sends followups, unlocks and returns `status`. */
int client_enter(struct ucm_client *c);
int client_leave(struct ucm_client *c, int status);
int64_t client_deadline(const struct ucm_client *c, int timeout_ms);
int64_t client_now_ns(void);
void client_close_descriptors(struct ucm_client *c);
/* Calls of several requests on one object take turns, inside the client: *busy is the object's. what: what the message
 * of a deadline says that another thread does. */
int client_turn(struct ucm_client *c, bool *busy, const char *what, int64_t deadline_ns);
void client_turn_end(struct ucm_client *c, bool *busy);
/* 0 or ETIMEDOUT. */
int client_cond_wait(struct ucm_client *c, pthread_cond_t *cond, int64_t deadline_ns);

/* fork.c: makes a forked child close its copies of descriptors. Without any client's lock. */
int client_fork_init(void); /* does its work once in a process */
void client_fork_watch(struct ucm_client *c);
void client_fork_forget(struct ucm_client *c);

/* link.c: connecting and breaking. */
void client_link_init(struct ucm_client *c);
int client_link_up(struct ucm_client *c, int64_t deadline_ns);
/* Breaks the connection. Every call under way ends with status and text, now or when companions
 * have ended (LINK_BREAKING). Does nothing when the link is broken already. */
void client_link_break(struct ucm_client *c, int status, const char *text);
/* Completes a break if companions have ended, or had their time; else ucm_fd becomes readable when
 * it is worth another look. Never blocks. */
void client_link_try_settle(struct ucm_client *c);
/* Waits for that. 0, also when no break is under way, or -UCM_EDEADLINE. */
int client_link_settle(struct ucm_client *c, int64_t deadline_ns);
/* Closes the socket of a broken link when nobody uses it any more. */
void client_link_reap(struct ucm_client *c);
static inline bool client_link_live(const struct ucm_client *c)
{
    return c->link == LINK_HELLO || c->link == LINK_UP;
}

/* io.c: bytes out and in. */
/* Returns when the writer's token may be free, or -UCM_EDEADLINE. */
int client_writer_wait(struct ucm_client *c, int64_t deadline_ns);
void client_writer_release(struct ucm_client *c);
/* Sends c->out. The caller holds the writer's token and keeps it. -UCM_EDEADLINE: nothing was sent;
 * a frame that was sent in part breaks the link. May return CLIENT_AGAIN. */
int client_send(struct ucm_client *c, const int *fds, uint32_t n_fds, int64_t deadline_ns);
/* Takes the reader's token, which must be free, waits until something arrives (or `also`, POLLOUT,
 * is ready) and dispatches it. On a breaking link it waits for companions instead. 0, or ETIMEDOUT.
 * The link must not be DOWN. expected_ns: see client_spin_poll; 0: unknown. */
int client_read(struct ucm_client *c, short also, int64_t expected_ns, int64_t deadline_ns);
/* Dispatches what has arrived. Never blocks. */
void client_read_ready(struct ucm_client *c);
/* Wakes a waiter to read on, if nobody reads. */
void client_lead_pass(struct ucm_client *c);
/* Closes what came and nobody took. The caller holds the reader's token, or nobody does. */
void client_fds_close(struct ucm_client *c);
/* Makes ucm_fd readable. */
void client_signal(struct ucm_client *c);

/* request.c: one request, built on the above. */

/* Encodes, links the call, sends, and gives the writer's token back that client_begin took. On
 * failure the call is not linked. May return CLIENT_AGAIN. */
int client_request(struct client_call *call, const struct client_request *q, int64_t deadline_ns);
/* The same, then waits for the answer, and gives up on it when the deadline passes. */
int client_request_wait(struct client_call *call, const struct client_request *q,
                        int64_t deadline_ns);
/* From client_begin to the answer, on as many links as it takes. Inits and closes the call. When the
 * deadline passes, the library drops the answer, and undoes what it would leave behind in the
 * daemon. */
int client_exchange(struct client_call *call, struct ucm_client *c, client_take_cb take_cb,
                    const struct client_request *q, int64_t deadline_ns);
/* After client_begin_same; drops the answer's result. -UCM_EDISCONNECTED: the connection broke. */
int client_exchange_same(struct ucm_client *c, enum ucm_method method, const void *params,
                         int64_t deadline_ns);
/* Sends a request, and drops the answer, of which CLIENT_TOLD may be awaited. */
int client_tell(struct ucm_client *c, const struct client_request *q, int64_t deadline_ns);
/* Gives up on an answer, and undoes what it brings if it comes later. -UCM_EDEADLINE. */
int client_call_orphan(struct client_call *call, const struct client_request *q);
/* method: CANCEL, RELEASE, REGION_UNREGISTER, RING_UNREGISTER, CHAIN_CLOSE or WINDOW_CLOSE. */
void client_followup(struct ucm_client *c, enum ucm_method method, uint32_t id);
/* window.release of one extent. */
void client_followup_window(struct ucm_client *c, uint32_t window, uint32_t extent);
void client_followup_flush(struct ucm_client *c);

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
/* Asks the daemon to stop a request that was sent, or has ended. */
int client_call_cancel(struct client_call *call, int64_t deadline_ns);
/* A request for blocks whose answer is blocks_r. ns: whose keys they are; keys: the field of the
 * parameters that receives them. */
int client_task_start(const struct client_request *q, const struct ucm_namespace *ns,
                      struct proto_bin *keys, const struct ucm_transfer *t, int timeout_ms,
                      struct ucm_task **out);
/* The same for n blocks of a chain; chain_id: the field that receives its id. The caller holds the lock. */
int client_task_start_chain(struct ucm_chain *chain, uint64_t *chain_id,
                            const struct client_request *q, uint32_t n, int64_t deadline_ns,
                            struct ucm_task **out);

/* error.c: sets ucm_errmsg and returns -status. Without the lock. */
int client_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
int client_fail_as(int status, const char *text); /* status is negative already; returned */
int client_fail_wire(int status, const struct ucm_error *e);

#endif
