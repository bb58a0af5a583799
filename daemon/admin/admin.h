/* What operators do: the feature's state, and what other features ask of it.
 *
 * Nothing here is on the way of a lookup, a load or a dump. Whether a bypass makes them miss they
 * ask themselves (bypass_on, of request/call.c). Thread: the event loop. */
#ifndef UCMD_ADMIN_ADMIN_H
#define UCMD_ADMIN_ADMIN_H

#include "daemon/base/log.h"
#include "daemon/features.h"
#include "daemon/observe/drops.h"
#include "daemon/observe/snapshot.h"
#include "daemon/request/internal.h"

/* Lines of tenants' calls, by tenant; the last place is of all that find none. */
#define AUDIT_TENANTS 16u
struct audit_tenant {
    char name[UCM_MAX_NAME_BYTES + 1];
    uint64_t full_ms;             /* when it may write a whole burst again */
    uint64_t calls, blocks, busy; /* not logged since the last summary line */
};

struct audits {
    struct audit_tenant tenant[AUDIT_TENANTS + 1];
    struct deadline tell;
};

struct admin {
    struct audits audits;
    struct fair_queue sweeps; /* evict.c: of sweep.link */
    uv_idle_t sweep_iteration;
    struct drops drops;               /* of writes to NVMe */
    bool keeping;                     /* tenants.c: a thread writes what tenants were given */
    struct observe_snapshot observed; /* for one answer at a time */
};

static inline struct admin *admin_of(const struct requests *rq)
{
    return rq->ext[FEATURE_ADMIN];
}

/* observe.c */
/* Fills all of *out. It looks at gauges of every module: some microseconds. tenant: the caller's,
 * so that health's reasons name no other tenants; NULL: the caller may know all names. */
void requests_observe(struct requests *rq, const char *tenant, struct observe_snapshot *out);

/* tenants.c */
/* Whether anybody is, or could become, this tenant: a name that is mistyped must not pass for a
 * change that was made. */
bool tenant_known(const struct requests *rq, const char *name);

/* bypass.c */
/* The field `bypassed` of a map: what the peer may see. */
void bypass_pack(msgpack_packer *pk, const struct requests *rq, const struct peer *peer);

/* audit.c */
void audits_close(struct requests *rq); /* tells of the lines that were held back */
/* Writes the line of a method that changed something: its caller, and what `format` says. */
#define audit(s, method, format, ...)                                                              \
    log_audit(proto_methods[method].name.p, "uid=%u gid=%u pid=%d tenant=%s " format,              \
              (unsigned)(s)->peer.uid, (unsigned)(s)->peer.gid, (int)(s)->peer.pid,                \
              (s)->peer.tenant, __VA_ARGS__)
struct audit_blocks {
    const char *tier;
    uint32_t keys; /* 0: the whole namespace */
    const struct msg_count_r *result;
    int code; /* enum ucm_wire_error of how it ended; 0: done */
};
/* The same for one that changed blocks of a namespace, within a tenant's bound of lines. */
void audit_blocks(const struct session *s, enum ucm_method method, const struct ns *ns,
                  const struct audit_blocks *a);

/* evict.c */
void sweeps_init(struct requests *rq);

#endif
