/* Shared by the files of this room only. */
#ifndef UCMD_REQUEST_INTERNAL_H
#define UCMD_REQUEST_INTERNAL_H

#include "daemon/base/list.h"
#include "daemon/base/table.h"
#include "daemon/request/request.h"

/* Keys under leases of one connection: bounds what leases cost. */
#define SESSION_MAX_LEASED_KEYS (1u << 20)

struct requests {
    struct request_rooms rooms;
    struct list sessions, active, sweeps;
    uint32_t n_sessions, n_active;
    uint64_t started_ms;
    uint8_t secret[4];        /* keys hashes of what peers choose */
    uint64_t transfer_memory; /* bytes of request objects under way */
    bool draining;
    uv_idle_t sweeper;
    struct proto_buf out;            /* one answer at a time */
    block_ref refs[UCM_MAX_KEYS];    /* scratch of one call */
    block_ref missing[UCM_MAX_KEYS]; /* likewise, of lookups on the shared tier */
    uint8_t status[UCM_MAX_KEYS];    /* likewise */
};

struct session {
    struct list link;
    struct requests *rq;
    struct conn *conn;
    struct peer peer;
    bool hello, closing;
    uint64_t *ns_open;    /* bitmap of namespaces' places */
    uint64_t *ns_durable; /* likewise: of those whose dumps are durable unless they say otherwise */
    struct table regions, stagings, leases;
    uint32_t region_names, staging_names, lease_names; /* given out so far; see session_name */
    uint32_t leased_keys;
    struct list requests;
    uint32_t n_requests;
    struct cache_owner owner;
};

/* A request that is answered later. */
struct request {
    struct list link, link_all;
    struct session *s;
    uint32_t msgid;
    enum ucm_method method;
    struct deadline deadline;
    size_t memory;
    /* Cancelled, past its deadline, or its peer gone: end soon, answering for what was done. */
    void (*stop_cb)(struct request *r);
};

/* One frame under handling. */
struct call {
    struct session *s;
    uint32_t msgid;
    enum ucm_method method;
    struct proto_envelope *env;
    int *fds;
    uint32_t n_fds;
    struct ucm_error error;
};

/* A method: answers, or sets call->error and returns its negative code. */
typedef int (*method_fn)(struct call *call);

/* session.c */
void session_reply(struct session *s, uint32_t msgid, const struct proto_message *m,
                   const void *result);
void session_reply_error(struct session *s, uint32_t msgid, const struct ucm_error *e);
/* Tells how far a load has come. False: it was not sent, the peer does not read. */
bool session_progress(struct session *s, const struct msg_progress *m);
/* For free maps: begin, pack, end. */
void session_reply_begin(struct session *s, uint32_t msgid, struct proto_builder *pb);
void session_reply_end(struct session *s, uint32_t msgid, struct proto_builder *pb);
/* What the wire calls an object by: its number in a table of the session, and above it bits that
 * differ from one to the next, so that the name of one which has ended is not that of its
 * successor (but for one in 2048). */
#define SESSION_NUMBERS (UINT32_C(1) << 21)
static inline uint32_t session_name(uint32_t *names, uint32_t number)
{
    return number | ((*names)++ * UINT32_C(2654435761) & ~(SESSION_NUMBERS - 1));
}
static inline uint32_t session_number(uint64_t name)
{
    return (uint32_t)name & (SESSION_NUMBERS - 1);
}
/* After anything of a closing session ended. May free it. */
void session_settle(struct session *s);
/* The namespace that a call names, if its session opened it (operators: any). NULL with
 * call->error. */
struct ns *call_namespace(struct call *call, uint64_t id);
/* Whether a dump that asks for `durability` waits for stable storage. */
bool session_durable(const struct session *s, const struct ns *ns, uint64_t durability);
/* How many keys are in the blob; 0 with call->error when it is no whole number of keys, or too
 * many. */
uint32_t call_keys(struct call *call, const struct ns *ns, struct proto_bin keys);

/* pack.c: fields of free maps */
void pack_bin(msgpack_packer *pk, const char *name, const uint8_t *p, size_t n);
void pack_text(msgpack_packer *pk, const char *name, const char *text);
void pack_flag(msgpack_packer *pk, const char *name, bool on);

/* Blocks of a namespace, a page of them, in rq->refs. Returns the next cursor, 0 at the end. */
uint64_t blocks_page(struct requests *rq, struct ns *ns, uint64_t cursor, uint32_t limit,
                     uint32_t *n);

/* request.c */
/* Admits r (zeroed, with stop_cb set) as under way. deadline_ms 0 takes the default. 0, or BUSY, or
 * SHUTDOWN but for what gives a mapping back. */
int request_start(struct call *call, struct request *r, size_t memory, uint64_t deadline_ms);
/* Takes r out; the caller answers first and frees it afterwards. */
void request_end(struct request *r);

/* shared_lookup.c: which keys that are not here lie on the shared tier? What it finds is noted in the
 * cache, as far as there is room, before done_cb runs. */
struct shared_lookup {
    struct share_lookup p;
    struct requests *rq;
    struct ns *ns;
    void (*done_cb)(struct shared_lookup *k); /* frees it */
    void *ctx;
    size_t memory;
    const uint8_t *keys; /* a copy of all that were named */
    uint32_t n;
};
/* Asks for those of keys[from, n) that are not found here, of a chain or each by itself, for
 * wait_ms at most. 0: done_cb will run. Anything else: nothing to wait for. */
int shared_lookup_start(struct requests *rq, struct ns *ns, struct proto_bin keys, uint32_t from,
                        bool each, uint64_t wait_ms, struct shared_lookup **out);
void shared_lookup_free(struct shared_lookup *k);
/* done_cb runs no more; frees it. */
void shared_lookup_cancel(struct shared_lookup *k);

/* lookup.c */
int lease_new(struct call *call, const block_ref *refs, uint32_t n, uint64_t lease_ms,
              uint32_t *name);
void lease_end(struct session *s, uint32_t name);
void leases_end_all(struct session *s);

/* registered.c: a region or a staging ring of a session */
struct registered {
    struct session *s;
    struct table *table;   /* of the session's regions, or of its staging rings */
    uint32_t number, name; /* in that table, and on the wire */
    uint32_t transfers;    /* that use the region */
    enum { REGISTERED_OPENING, REGISTERED_OPEN, REGISTERED_CLOSING } state;
    bool close_sent;
    struct device *device;
    struct device_region *region;   /* owned; one of the two is NULL */
    struct device_staging *staging; /* likewise */
    struct ns *ns;                  /* of a region */
    struct device_job job;
    struct list pending; /* requests that wait for the job: the register, or unregisters */
};
/* The open region that the call names, or NULL with call->error. */
struct registered *call_region(struct call *call, uint64_t name);
void region_transfer_ended(struct registered *r);
/* Begins to close all regions and staging rings of a session whose requests have ended. */
void registered_close_all(struct session *s);

/* transfer.c */
/* Stops the transfers that use the region. */
void transfers_stop_region(struct registered *r);

/* methods, one file a group */
int method_hello(struct call *call);
int method_ns_open(struct call *call);
int method_region_register(struct call *call);
int method_region_unregister(struct call *call);
int method_ring_register(struct call *call);
int method_ring_unregister(struct call *call);
int method_lookup(struct call *call);
int method_release(struct call *call);
int method_load(struct call *call);
int method_dump(struct call *call);
int method_prefetch(struct call *call);
int method_cancel(struct call *call);
int method_pin(struct call *call);
int method_unpin(struct call *call);
int method_evict(struct call *call);
int method_purge(struct call *call);
int method_stats(struct call *call);
int method_health(struct call *call);
int method_ns_list(struct call *call);
int method_ls(struct call *call);
int method_inspect(struct call *call);
int method_verify(struct call *call);
int method_share_collect(struct call *call);

#endif
