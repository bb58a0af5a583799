/* hints.open: the memory in which a worker looks its namespace's keys up by itself. */
#include "daemon/request/internal.h"

#include "daemon/base/memfd.h"

#include <errno.h>
#include <string.h>

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
    rc = session_hints_use(s, ns, &call->error);
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
