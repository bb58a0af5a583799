/* hints.open: the memory in which a worker looks its namespace's keys up by itself. */
#include "daemon/features.h"
#include "daemon/hints/tables.h"
#include "daemon/request/internal.h"

#include "daemon/base/memfd.h"

#include <errno.h>
#include <string.h>

/* A table of hints has a descriptor, and two while it is filled. */
#define HINTS_DESCRIPTORS 2

/* What the feature has of the daemon. */
struct hints_module {
    struct hint_tables *tables;
};

static struct hint_tables *tables_of(const struct requests *rq)
{
    return ((const struct hints_module *)rq->ext[FEATURE_HINTS])->tables;
}

static void hints_give(struct limit_owner *o)
{
    limit_give(o, LIMIT_HINTS, 1);
    limit_give(o, LIMIT_DESCRIPTORS, HINTS_DESCRIPTORS);
    limit_owner_unref(o);
}

static void hints_unref(struct session *s, struct ns *ns)
{
    struct limit_owner *o = hint_tables_unref(tables_of(s->rq), ns);

    if (o)
        hints_give(o);
}

/* A new table is that of who uses it first. 0; -EBUSY with *e, or another -errno. */
static int hints_make(struct session *s, struct ns *ns, struct ucm_error *e)
{
    struct limit_owner *o = s->peer.owner;
    int rc;

    if (limit_ask(o, LIMIT_KEPT, 1, e) != 0 || limit_take(o, LIMIT_HINTS, 1, e) != 0)
        return -EBUSY;
    if (limit_take(o, LIMIT_DESCRIPTORS, HINTS_DESCRIPTORS, e) != 0) {
        limit_give(o, LIMIT_HINTS, 1);
        return -EBUSY;
    }
    rc = hint_tables_ref(tables_of(s->rq), ns, limit_owner_ref(o));
    if (rc != 0)
        hints_give(o);
    return rc;
}

static int hints_ref(struct session *s, struct ns *ns, struct ucm_error *e)
{
    uint8_t *flags = &s->ns[index_ns_place(s->rq->modules.index, ns)];
    int rc = 0;

    if (!(*flags & SESSION_NS_HINTS))
        rc = ns->follower ? hint_tables_ref(tables_of(s->rq), ns, NULL) : hints_make(s, ns, e);
    if (rc == 0)
        *flags |= SESSION_NS_HINTS;
    return rc;
}

static void session_close_cb(struct session *s)
{
    struct index *ix = s->rq->modules.index;

    for (uint32_t place = 0; place < index_ns_places(ix); place++)
        if (s->ns[place] & SESSION_NS_HINTS)
            hints_unref(s, index_ns_at(ix, place));
}

static int open_cb(struct requests *rq)
{
    const struct hint_tables_config config = {.loop = rq->modules.loop,
                                              .deadlines = rq->modules.deadlines,
                                              .index = rq->modules.index,
                                              .cache = rq->modules.cache};
    struct hints_module *module = rq->ext[FEATURE_HINTS];

    limits_set(rq->modules.limits, LIMIT_HINTS, hint_tables_max());
    return hint_tables_new(&config, &module->tables);
}

static void observe_cb(struct requests *rq, struct exposition *x)
{
    struct hint_tables_stats stats;

    hint_tables_beat(tables_of(rq));
    hint_tables_stats(tables_of(rq), &stats);
    x->metrics.hint_tables = stats.tables;
    x->metrics.hint_bytes = stats.bytes;
    x->metrics.hint_left_out = stats.left_out;
}

static void close_cb(struct requests *rq)
{
    hint_tables_free(tables_of(rq));
}

const struct feature hints_feature = {.requests_bytes = sizeof(struct hints_module),
                                      .open_cb = open_cb,
                                      .observe_cb = observe_cb,
                                      .close_cb = close_cb,
                                      .session_close_cb = session_close_cb};

/* ---- hints.open ---- */

static int open_check(struct call *call, const struct ns *ns)
{
    const struct session *s = call->s;

    if (s->rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (strcmp(ns->identity.tenant, s->peer.tenant) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_DENIED,
                             "hints are of the tenant's own namespaces; look another's keys up");
    if (conn_fds_room(s->conn) == 0)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY, "read the answers before this one");
    return 0;
}

int method_hints_open(struct call *call)
{
    struct session *s = call->s;
    struct ns *ns = call_namespace(call, call->params.hints_open.ns);
    struct msg_hints_open_r r = {.shared = s->rq->modules.share != NULL};
    int rc, fd;

    if (!ns || open_check(call, ns) != 0)
        return -call->error.code;
    rc = hints_ref(s, ns, &call->error);
    if (rc == -EBUSY)
        return -call->error.code;
    if (rc == -EINVAL)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "hints need a kernel that seals memory against writers: Linux 5.1");
    if (rc == 0) {
        fd = memfd_lend(hint_tables_fd(ns, &r.bytes));
        rc = fd < 0 ? fd : 0;
    }
    if (rc < 0)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for hints: %s",
                             strerror(-rc));
    session_reply_fds(s, call->msgid, call->method, &r, &fd, 1);
    return 0;
}
