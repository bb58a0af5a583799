/* lookup_table.open: the memory in which a worker looks its namespace's keys up by itself. */
#include "daemon/features.h"
#include "daemon/lookup_table/tables.h"
#include "daemon/request/internal.h"

#include "daemon/base/memfd.h"

#include <errno.h>
#include <string.h>

/* A lookup table has a descriptor, and two while it is filled. */
#define LOOKUP_TABLE_DESCRIPTORS 2

/* What the feature has of the daemon. */
struct lookup_table_module {
    struct lookup_tables *tables;
};

static struct lookup_tables *tables_of(const struct requests *rq)
{
    return ((const struct lookup_table_module *)rq->ext[FEATURE_LOOKUP_TABLES])->tables;
}

static void lookup_table_give(struct limit_owner *o)
{
    limit_give(o, LIMIT_LOOKUP_TABLES, 1);
    limit_give(o, LIMIT_DESCRIPTORS, LOOKUP_TABLE_DESCRIPTORS);
    limit_owner_unref(o);
}

static void lookup_table_unref(struct session *s, struct ns *ns)
{
    struct limit_owner *o = lookup_tables_unref(tables_of(s->rq), ns);

    if (o)
        lookup_table_give(o);
}

/* A new table belongs to its first user. 0; -EBUSY with *e, or another -errno. */
static int lookup_table_make(struct session *s, struct ns *ns, struct ucm_error *e)
{
    struct limit_owner *o = s->peer.owner;
    int rc;

    if (limit_ask(o, LIMIT_KEPT, 1, e) != 0 || limit_take(o, LIMIT_LOOKUP_TABLES, 1, e) != 0)
        return -EBUSY;
    if (limit_take(o, LIMIT_DESCRIPTORS, LOOKUP_TABLE_DESCRIPTORS, e) != 0) {
        limit_give(o, LIMIT_LOOKUP_TABLES, 1);
        return -EBUSY;
    }
    rc = lookup_tables_ref(tables_of(s->rq), ns, limit_owner_ref(o));
    if (rc != 0)
        lookup_table_give(o);
    return rc;
}

static int lookup_table_ref(struct session *s, struct ns *ns, struct ucm_error *e)
{
    uint8_t *flags = &s->ns[index_ns_place(s->rq->modules.index, ns)];
    int rc = 0;

    if (!(*flags & SESSION_NS_LOOKUP_TABLE))
        rc = ns->follower ? lookup_tables_ref(tables_of(s->rq), ns, NULL)
                          : lookup_table_make(s, ns, e);
    if (rc == 0)
        *flags |= SESSION_NS_LOOKUP_TABLE;
    return rc;
}

static void session_close_cb(struct session *s)
{
    struct index *ix = s->rq->modules.index;

    for (uint32_t place = 0; place < index_ns_places(ix); place++)
        if (s->ns[place] & SESSION_NS_LOOKUP_TABLE)
            lookup_table_unref(s, index_ns_at(ix, place));
}

static int open_cb(struct requests *rq)
{
    const struct lookup_tables_config config = {.loop = rq->modules.loop,
                                                .deadlines = rq->modules.deadlines,
                                                .index = rq->modules.index,
                                                .cache = rq->modules.cache};
    struct lookup_table_module *module = rq->ext[FEATURE_LOOKUP_TABLES];

    limits_set(rq->modules.limits, LIMIT_LOOKUP_TABLES, lookup_tables_max());
    return lookup_tables_new(&config, &module->tables);
}

static void observe_cb(struct requests *rq, struct exposition *x)
{
    struct lookup_tables_stats stats;

    lookup_tables_beat(tables_of(rq));
    lookup_tables_stats(tables_of(rq), &stats);
    x->metrics.lookup_tables = stats.tables;
    x->metrics.lookup_table_bytes = stats.bytes;
    x->metrics.lookup_table_left_out = stats.left_out;
}

static void close_cb(struct requests *rq)
{
    lookup_tables_free(tables_of(rq));
}

const struct feature lookup_tables_feature = {.requests_bytes = sizeof(struct lookup_table_module),
                                              .open_cb = open_cb,
                                              .observe_cb = observe_cb,
                                              .close_cb = close_cb,
                                              .session_close_cb = session_close_cb};

/* ---- lookup_table.open ---- */

static int open_check(struct call *call, const struct ns *ns)
{
    const struct session *s = call->s;

    if (s->rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (strcmp(ns->identity.tenant, s->peer.tenant) != 0)
        return ucm_error_set(
            &call->error, UCM_WIRE_DENIED,
            "lookup tables are of the tenant's own namespaces; look another's keys up");
    if (conn_fds_room(s->conn) == 0)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY, "read the answers before this one");
    return 0;
}

int method_lookup_table_open(struct call *call)
{
    struct session *s = call->s;
    struct ns *ns = call_namespace(call, call->params.lookup_table_open.ns);
    struct msg_lookup_table_open_r r = {.shared = s->rq->modules.shared != NULL};
    int rc, fd;

    if (!ns || open_check(call, ns) != 0)
        return -call->error.code;
    rc = lookup_table_ref(s, ns, &call->error);
    if (rc == -EBUSY)
        return -call->error.code;
    if (rc == -EINVAL)
        return ucm_error_set(
            &call->error, UCM_WIRE_UNSUPPORTED,
            "lookup tables need a kernel that seals memory against writers: Linux 5.1");
    if (rc == 0) {
        fd = memfd_grant(lookup_tables_fd(ns, &r.bytes));
        rc = fd < 0 ? fd : 0;
    }
    if (rc < 0)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a lookup table: %s",
                             strerror(-rc));
    session_reply_fds(s, call->msgid, call->method, &r, &fd, 1);
    return 0;
}
