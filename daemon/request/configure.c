/* config.reload: what operators change of the daemon itself. */
#include "daemon/request/internal.h"

#include <stdlib.h>

static void pack_changes(msgpack_packer *pk, struct config_changes *changes, bool restart)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < changes->n; i++)
        n += changes->change[i].restart == restart;
    proto_pack_str(pk, restart ? "restarts" : "changes");
    msgpack_pack_array(pk, n);
    for (uint32_t i = 0; i < changes->n; i++) {
        struct config_change *change = &changes->change[i];

        if (change->restart != restart)
            continue;
        proto_clean(change->from);
        proto_clean(change->to);
        msgpack_pack_map(pk, 3);
        proto_pack_text(pk, "key", change->key);
        proto_pack_text(pk, "from", change->from);
        proto_pack_text(pk, "to", change->to);
    }
}

#define WARNINGS_MAX 100

static void pack_taken(msgpack_packer *pk, struct config_changes *changes,
                       const struct config *next)
{
    uint32_t n = next->warnings.n < WARNINGS_MAX ? (uint32_t)next->warnings.n : WARNINGS_MAX;

    msgpack_pack_map(pk, 3);
    pack_changes(pk, changes, false);
    pack_changes(pk, changes, true);
    proto_pack_str(pk, "warnings");
    msgpack_pack_array(pk, n);
    for (uint32_t i = 0; i < n; i++) {
        proto_clean(next->warnings.item[i]);
        proto_pack_str(pk, next->warnings.item[i]);
    }
}

/* A refusal is an answer: to ask was no mistake. */
static void pack_refused(msgpack_packer *pk, struct config_error *e)
{
    bool set = e->line == CONFIG_LINE_SET;

    proto_clean(e->text);
    msgpack_pack_map(pk, 3);
    proto_pack_text(pk, "refused", e->text + e->sentence);
    proto_pack_text(pk, "file", set ? "--set" : e->file ? e->file : "");
    proto_pack_u64(pk, "line", set ? 0 : e->line);
}

int method_config_reload(struct call *call)
{
    struct requests *rq = call->s->rq;
    const struct request_rooms *rooms = &rq->rooms;
    struct config_changes *changes;
    struct config_error e = {.text = ""};
    struct proto_builder pb;

    if (!call_operator(call))
        return -call->error.code;
    if (rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (!rooms->reload_cb)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "the daemon was started without --config, so there is no file to read "
                             "again");
    changes = malloc(sizeof(*changes));
    if (!changes)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a reload");
    if (rooms->reload_cb(rooms->reload_ctx, changes, &e) == 0) {
        call_map_begin(call, &pb);
        pack_taken(&pb.pk, changes, rooms->next);
    } else {
        call_map_begin(call, &pb);
        pack_refused(&pb.pk, &e);
    }
    free(changes);
    return call_reply_map(call, &pb);
}
