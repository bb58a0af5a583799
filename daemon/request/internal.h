/* Shared by the files of this module only. */
#ifndef UCMD_REQUEST_INTERNAL_H
#define UCMD_REQUEST_INTERNAL_H

#include "daemon/base/list.h"
#include "daemon/base/table.h"
#include "daemon/cache/cache.h"
#include "daemon/device/device.h"
#include "daemon/index/index.h"
#include "daemon/request/feature.h"
#include "daemon/request/request.h"
#include "daemon/request/spans.h"

struct registered;

/* Keys under leases of one connection: bounds what leases cost. */
#define SESSION_MAX_LEASED_KEYS (1u << 20)
/* Keys whose leases end in one iteration of the event loop, which takes about 1 ms; the last lease
 * ends whole. */
#define LEASED_KEYS_PER_TURN (1u << 15)
/* Namespaces that one connection holds open: a quarter of limits.namespaces_per_tenant, but at
 * least so many. An operator's may hold all. */
#define SESSION_MIN_NAMESPACES 16

/* Where a session looks for blocks (view.h). A value: it lasts as long as the session has ns[0]
 * open. */
struct view {
    struct ns *ns[2]; /* the one that is named, and its base */
    uint32_t n;
};

/* What operators have switched off (daemon/admin/bypass.c). */
enum bypass_what { BYPASS_LOAD = 1, BYPASS_STORE = 2 };
#define BYPASSES_MAX 64u

struct bypass {
    bool of_ns;                          /* of the namespace; else of all of the tenant */
    char tenant[UCM_MAX_NAME_BYTES + 1]; /* "": of all tenants */
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint32_t ns;   /* its number when it was named */
    unsigned what; /* of enum bypass_what */
    uint64_t since_ms;
};

struct bypasses {
    uint32_t n; /* nearly always 0 */
    struct bypass at[BYPASSES_MAX];
};

struct requests {
    struct request_modules modules;
    struct bypasses bypasses;
    struct list sessions, active, shared_queries;
    uint32_t n_sessions, n_active;
    uint64_t started_ms;
    uint64_t dram_bytes,
        index_bytes;   /* of the arena when all of it is there; of the index at most */
    uint8_t secret[4]; /* keys hashes of what peers choose */
    bool draining;
    /* transfer.c: whose reads go first */
    struct fair_queue readers; /* of transfer.retry.link: they wait for a turn to read */
    uint32_t large_reads;      /* reads of large transfers that are under way */
    uint64_t large_bytes;      /* the slots of these */
    uint32_t narrow_reads;     /* so many of them still begin under the bound */
    struct proto_buf out;      /* one answer at a time */
    /* daemon/trace: of a call that may be traced, NULL: none is; of the keys of a lookup, as
     * reuse_lookup. */
    void (*trace_cb)(struct call *call);
    struct reuse *reuse;
    void (*looked_up_cb)(struct reuse *r, uint32_t ns, const uint8_t *keys, uint32_t key_bytes,
                         uint32_t n, uint64_t block_bytes, uint64_t now_ms);
    const struct load_shifts *shifts; /* daemon/blend */
    /* daemon/encoding: a dump by that region, which has two forms, has stored its part of the held
     * block. */
    void (*part_stored_cb)(const struct registered *r, block_ref ref);
    void *ext[FEATURES]; /* what features have */
};

struct session {
    struct list link;
    struct requests *rq;
    struct conn *conn;
    struct peer peer;
    bool hello, closing;
    uint32_t n_ns; /* open ones */
    struct table regions, stagings, leases;
    /* Given out so far; see session_name. */
    uint32_t region_names, staging_names, lease_names;
    uint32_t leased_keys; /* under leases and in sequences */
    struct list laters;   /* struct later, the oldest first */
    uint32_t n_laters;
    struct list requests;
    uint32_t n_requests;
    uint8_t nonce[UCM_NONCE_BYTES]; /* of region.challenge */
    uint64_t nonce_until_ms;        /* uv_now; 0: there is none */
    struct pending_writes pending_writes;
    /* Set by session.c; called after something of the session has ended. Frees a closing session
     * that has nothing left. */
    void (*settle_cb)(struct session *s);
    /* a closing session with leases left: the next iteration of the event loop */
    struct cache_retry retry;
    void *ext[FEATURES]; /* what features have */
    uint8_t ns[];        /* by index_ns_place: enum session_ns */
};

enum session_ns {
    SESSION_NS_OPEN = 1,
    SESSION_NS_DURABLE = 2,      /* its dumps are, unless they say otherwise */
    SESSION_NS_WITH_BASE = 4,    /* it was opened by encoding.open */
    SESSION_NS_LOOKUP_TABLE = 8, /* daemon/lookup_table: it uses the namespace's table */
};

/* A request that is answered later: the first member of what its method keeps. request_new makes
 * it, request_end answers and frees it. */
struct request {
    struct list link, link_all; /* of its session, of all */
    struct session *s;
    uint32_t msgid;
    enum ucm_method method;
    struct deadline deadline;
    uint64_t begun_ns; /* when its frame was there */
    size_t memory;
    bool silent;          /* not answered: the rest of a request that was */
    bool gives_back;      /* as of its call */
    struct traced *trace; /* NULL: not traced */
    /* Runs when the request is cancelled, passes its deadline, or its session closes, and possibly
     * again. Ends the request now or soon, with what was done; may end no other request. */
    void (*stop_cb)(struct request *r);
};

/* One frame under handling. */
struct call {
    struct session *s;
    uint32_t msgid;
    enum ucm_method method;
    uint64_t begun_ns;
    union proto_any params; /* decoded; views die with the call */
    struct traced *trace;   /* NULL: not traced, or passed on to a struct request */
    bool gives_back; /* set by its method: it only ends things, also while the daemon drains */
    int *fds;
    uint32_t n_fds;
    struct ucm_error error;
};

/* daemon/encryption/keys.c: what of NVMe which keys have encrypted; *out had zeroes there. */
void keys_observe(const struct request_modules *r, struct metrics *out);

/* call.c */
/* Whether the peer is an operator; false with call->error. */
bool call_operator(struct call *call);
/* An object's name on the wire: its number in a table of the session (name & SESSION_NUMBERS), with
 * bits above it that count up. So the name of an object that has ended is not its successor's, but
 * for one in 2048. */
#define SESSION_NUMBERS ((UINT32_C(1) << 21) - 1)
uint32_t session_name(uint32_t *names, uint32_t number);
void session_ns_close_all(struct session *s); /* for its end */
/* The namespace that a call names, if its session opened it (operators: any). NULL with
 * call->error. */
struct ns *call_namespace(struct call *call, uint64_t id);
/* The namespace whose stored blocks a call reads or drops: any of the peer's tenant, open or not
 * (operators: any). It may go with the next namespace.open: a request that outlives the call keeps
 * it by index_ns_ref. NULL with call->error, which for another tenant's is that of one that does
 * not exist. */
struct ns *call_stored_namespace(struct call *call, uint64_t id);
/* It stays while the connection lives. 0 or -code with call->error. */
int session_ns_open(struct call *call, struct ns *ns);
/* The session looks for blocks of ns in its base, too, and dumps to ns are as durable as those to
 * the base. */
void session_ns_with_base(struct session *s, const struct ns *ns, const struct ns *base);
/* Whether a dump that asks for `durability` waits for stable storage. */
bool session_durable(struct session *s, const struct ns *ns, uint64_t durability);
/* How many keys `keys` holds; 0 with call->error: not a whole number of them, or too many. */
uint32_t call_keys(struct call *call, const struct ns *ns, struct proto_bin keys);
/* How many parts a request means that names `parts` from `part` on (0: all from there) of a
 * namespace with `of` parts: 0 and *n, or a negative wire code with the error set. */
int call_parts(struct call *call, uint64_t part, uint64_t parts, uint32_t of, uint32_t *n);
/* Both return 0. */
int call_reply(struct call *call, const void *result);
int call_reply_map(struct call *call, struct proto_builder *pb);
/* For free maps: begin, pack, call_reply_map. */
void call_map_begin(struct call *call, struct proto_builder *pb);
/* Answers a request of that method, with *e if it is an error (NULL: none), else with the
 * result. */
void session_reply(struct session *s, uint32_t msgid, enum ucm_method method,
                   const struct ucm_error *e, const void *result);
/* The same of a result, with descriptors, which are the front's from now on. */
void session_reply_fds(struct session *s, uint32_t msgid, enum ucm_method method,
                       const void *result, const int *fds, uint32_t n);
void session_notify(struct session *s, const char *name, const struct proto_message *m,
                    const void *params);
/* Whether an operator's bypass of loads or of stores holds for the namespace. */
bool bypass_on(const struct requests *rq, const struct ns *ns, enum bypass_what what);
/* Sends a load's progress. False: not sent, because the peer does not read. */
bool session_progress(struct session *s, const struct msg_progress *m);

/* request.c */
/* A request under way: `bytes` of zeroed memory that begin with a struct request. It has `more`
 * besides them, which count as its memory. timeout_ms 0 takes the default. NULL with
 * call->error: NO_MEMORY, BUSY, or SHUTDOWN while the daemon drains (what gives back is still
 * taken). */
void *request_new(struct call *call, size_t bytes, size_t more, uint64_t timeout_ms,
                  void (*stop_cb)(struct request *r));
/* Answers as session_reply does, and frees r, and the session if r was the last thing that a
 * closing one waited for. */
void request_end(struct request *r, const struct ucm_error *e, const void *result);
/* Ends a request that its method refuses after all: the caller returns call->error, which is
 * set. */
void request_refuse(struct request *r, const struct call *call);
/* Counts `bytes` as LIMIT_MEMORY of the session's, until memory_return. False: that is too much. */
bool memory_take(struct session *s, size_t bytes);
void memory_return(struct session *s, size_t bytes);
/* The same with zeroed memory, for free() and memory_return. NULL: that is too much, or there is
 * none. */
void *memory_alloc(struct session *s, size_t bytes);

#define SHARED_LOOKUP_GONE 1024u
/* shared_query.c: which keys that are not here lie on the shared tier? What it finds is noted in
 * the cache, as far as there is room, before done_cb runs. */
struct shared_query {
    struct shared_lookup p;
    struct list link;  /* in rq->shared_queries */
    struct session *s; /* whose memory it takes */
    struct ns *ns;
    uint64_t purged; /* ns->purged when it began */
    /* Bit by hash: keys that were evicted since, and more. */
    uint64_t gone[SHARED_LOOKUP_GONE / 64];
    void (*done_cb)(struct shared_query *k); /* calls shared_query_free */
    void *ctx;
    size_t memory;       /* counted against limits.frame_memory */
    const uint8_t *keys; /* a copy of all that were named */
};
/* Until when to ask for a client that waits so long (0: the most), at most for
 * shared.lookup_timeout; for one that comes back later, at most for shared.timeout. By uv_now. */
uint64_t shared_query_until(const struct requests *rq, uint64_t wait_ms);
uint64_t shared_query_until_later(const struct requests *rq, uint64_t wait_ms);
/* Asks for those of keys[from, n) that are not found here: one chain, or each by itself. 0: done_cb
 * will run, at until_ms at the latest. Otherwise there is nothing to wait for. */
int shared_query_start(struct session *s, struct ns *ns, struct proto_bin keys, uint32_t from,
                       bool per_key, uint64_t until_ms, struct shared_query **out);
void shared_query_free(struct shared_query *k);
/* done_cb does not run any more; frees it. */
void shared_query_cancel(struct shared_query *k);
/* The key's files are gone: what lookups under way have found of it is not noted. */
void shared_queries_forget(struct requests *rq, const struct ns *ns, const uint8_t *key);

/* lookup_later.c: lookups that don't wait for the shared tier, and whose client comes back for its
 * answer. A session remembers which keys it has asked for, and for some time that the answer has
 * come. */
/* Whether the shared tier is being asked for keys that this host lacks (it has the first `hits`, if
 * they are a chain); begins that if need be. False: it has answered, or can't be asked now. */
bool lookup_later(struct session *s, const struct view *v, const struct msg_lookup *m,
                  uint32_t hits);
/* The session closes. */
void lookups_later_end(struct session *s);

/* lookup.c */
/* Counts keys that leases and sequences of the session cover; negative: less. */
void leased_add(struct session *s, int64_t keys);
/* May the session lease more of what this host can hold, by the rule of limit.h? 0, or
 * -UCM_WIRE_BUSY with call->error. */
int leased_check(struct call *call);
/* Leases refs[n]; skips zeroes. */
int lease_new(struct call *call, const block_ref *refs, uint32_t n, uint64_t lease_ms,
              uint32_t *name);
void lease_end(struct session *s, uint32_t name);
/* Ends some of the session's leases, as many as one iteration of the event loop may. True: it has
 * none left. */
bool leases_end(struct session *s);

/* What a lookup of n keys found, for the counts of the daemon and of ns; raw: in an encoded
 * namespace's base. */
struct lookup_counts {
    uint32_t n, hits, dram, shared, raw;
};
void lookup_counts_add(struct requests *rq, struct ns *ns, const uint8_t *keys,
                       const struct lookup_counts *f);

/* registered.c: a region or a staging ring of a session */
#define REGISTERED_KINDS 5 /* of what is bounded it takes */
struct registered {
    struct session *s;
    struct table *table;   /* of the session's regions, or of its staging rings */
    uint32_t number, name; /* in that table, and on the wire */
    struct list users;     /* copies.link: of those that copy by the region */
    enum { REGISTERED_OPENING, REGISTERED_OPEN, REGISTERED_CLOSING } state;
    bool close_sent;
    struct device *device;
    struct device_region *region;   /* owned; one of the two is NULL */
    struct device_staging *staging; /* likewise */
    struct ns *ns;                  /* of a region */
    struct view view;               /* where copies by the region look for blocks */
    struct device_job job;
    struct list pending; /* requests that wait for the job: the register, or unregisters */
    uint64_t taken[REGISTERED_KINDS]; /* of its session's: by registered_kinds */
};
/* The open region that the call names, or NULL with call->error. */
struct registered *call_region(struct call *call, uint64_t name);
/* Closes it once the last of r->users has ended; that user calls it again. */
void registered_close(struct registered *r);
/* Begins to close all regions and staging rings of a session whose requests have ended. */
void registered_close_all(struct session *s);

/* transfer.c */
void transfers_init(struct requests *rq);

/* method_hello, method_ns_open, ...: one file a group */
#define M(NAME, name, text, params, result) int method_##name(struct call *call);
UCM_METHODS(M)
#undef M

#endif
