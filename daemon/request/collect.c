/* share.collect: garbage collection of the shared tier begins now. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <errno.h>
#include <string.h>

static_assert(SHARE_MAX_ROOTS == 8, "bounds of the message");

/* Roots that take no writes are collected by whoever writes to them. */
static int root_collect(struct call *call, uint32_t root, bool named, struct msg_collect_r *r)
{
    const struct request_rooms *rooms = &call->s->rq->rooms;
    int err = rooms->share_ops->collect(rooms->share, root);

    switch (err) {
    case 0:
        r->roots++;
        return 0;
    case -EALREADY:
        r->busy++;
        return 0;
    case -EROFS:
    case -EINVAL:
        if (!named)
            return 0;
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "root %u is read-only here: a host that writes to it collects it",
                             root + 1);
    case -ECANCELED:
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    default:
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "root %u: %s", root + 1,
                             strerror(-err));
    }
}

int method_share_collect(struct call *call)
{
    const struct request_rooms *rooms = &call->s->rq->rooms;
    struct msg_collect m;
    struct msg_collect_r r = {0};
    uint32_t n;
    int rc = proto_decode(&proto_collect, call->env, &m, &call->error);

    if (rc != 0)
        return rc;
    if (!call->s->peer.admin)
        return ucm_error_set(
            &call->error, UCM_WIRE_DENIED,
            "%s is for operators: root, the daemon's own user, and whom `admins` names",
            proto_method_name(call->method));
    if (!rooms->share)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "there is no shared tier: share.roots in the configuration is empty");
    n = rooms->share_ops->roots(rooms->share);
    if (m.root > n)
        return ucm_error_set(&call->error, UCM_WIRE_NOT_FOUND,
                             "the shared tier has no root %u, it has %u", (unsigned)m.root, n);
    for (uint32_t i = 0; rc == 0 && i < n; i++)
        if (m.root == 0 || m.root == i + 1)
            rc = root_collect(call, i, m.root != 0, &r);
    if (rc == 0)
        session_reply(call->s, call->msgid, &proto_collect_r, &r);
    return rc;
}
