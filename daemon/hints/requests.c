/* hints.open: the memory in which a worker looks its namespace's keys up by itself. */
#include "daemon/request/internal.h"

#include "daemon/base/memfd.h"

#include <errno.h>
#include <string.h>

/* A table of hints has a descriptor, and two while it is filled. */
#define HINTS_DESCRIPTORS 2

static void hints_give(struct limit_owner *o)
{
    limit_give(o, LIMIT_HINTS, 1);
    limit_give(o, LIMIT_DESCRIPTORS, HINTS_DESCRIPTORS);
    limit_owner_unref(o);
}

static void hints_unuse(struct session *s, struct ns *ns)
{
    cache_hints_unuse(s->rq->rooms.cache, ns);
    if (ns->hints)
        return;
    hints_give(ns->hints_owner);
    ns->hints_owner = NULL;
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
    rc = cache_hints_use(s->rq->rooms.cache, ns);
    if (rc == 0)
        ns->hints_owner = limit_owner_ref(o);
    else
        hints_give(limit_owner_ref(o));
    return rc;
}

static int hints_use(struct session *s, struct ns *ns, struct ucm_error *e)
{
    uint8_t *flags = session_ns_flags(s, ns);
    int rc = 0;

    if (!(*flags & SESSION_NS_HINTS))
        rc = ns->hints ? cache_hints_use(s->rq->rooms.cache, ns) : hints_make(s, ns, e);
    if (rc == 0)
        *flags |= SESSION_NS_HINTS;
    return rc;
}

static void session_close_cb(struct session *s)
{
    struct index *ix = s->rq->rooms.index;

    for (uint32_t place = 0; place < index_ns_places(ix); place++)
        if (s->ns[place] & SESSION_NS_HINTS)
            hints_unuse(s, index_ns_at(ix, place));
}

static int open_cb(struct requests *rq)
{
    limits_set(rq->rooms.limits, LIMIT_HINTS, cache_hints_max());
    return 0;
}

const struct feature hints_feature = {.open_cb = open_cb, .session_close_cb = session_close_cb};

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
    struct msg_hints_open_r r = {.shared = s->rq->rooms.share != NULL};
    int rc, fd;

    if (!ns || open_check(call, ns) != 0)
        return -call->error.code;
    rc = hints_use(s, ns, &call->error);
    if (rc == -EBUSY)
        return -call->error.code;
    if (rc == -EINVAL)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "hints need a kernel that seals memory against writers: Linux 5.1");
    if (rc == 0) {
        fd = memfd_lend(cache_hints_table(ns, &r.bytes));
        rc = fd < 0 ? fd : 0;
    }
    if (rc < 0)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for hints: %s",
                             strerror(-rc));
    session_reply_fds(s, call->msgid, call->method, &r, &fd, 1);
    return 0;
}
