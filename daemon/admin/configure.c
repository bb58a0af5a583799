/* config.get and config.reload: what operators see and change of the daemon itself. */
#include "daemon/admin/admin.h"

#include <stdio.h>
#include <stdlib.h>

static void reload_audit(const struct session *s, const struct config_changes *changes)
{
    char keys[512] = "";
    size_t n = 0;

    for (uint32_t i = 0; i < changes->n && n < sizeof(keys); i++)
        if (!changes->change[i].restart)
            n += (size_t)snprintf(keys + n, sizeof(keys) - n, "%s%s", n > 0 ? "," : "",
                                  changes->change[i].key);
    audit(s, UCM_METHOD_CONFIG_RELOAD, "result=OK changed=%s", keys);
}

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

static void pack_taken(msgpack_packer *pk, struct config_changes *changes)
{
    msgpack_pack_map(pk, 2);
    pack_changes(pk, changes, false);
    pack_changes(pk, changes, true);
}

/* A refusal is an answer: to ask was no mistake. */
static void pack_refused(msgpack_packer *pk, struct config_error *e)
{
    bool set = e->line == CONFIG_LINE_SET, env = e->line == CONFIG_LINE_ENV;
    char variable[CONFIG_VARIABLE_BYTES] = "";
    const char *file = e->file ? e->file : "";

    if (env && e->key)
        config_variable(e->key, variable);
    proto_clean(e->text);
    msgpack_pack_map(pk, 3);
    proto_pack_text(pk, "refused", e->text + e->sentence);
    proto_pack_text(pk, "file", set ? "--set" : env ? variable : file);
    proto_pack_u64(pk, "line", set || env || e->line == CONFIG_LINE_EARLIER ? 0 : e->line);
}

int method_config_reload(struct call *call)
{
    struct requests *rq = call->s->rq;
    const struct request_modules *modules = &rq->modules;
    struct config_changes *changes;
    struct config_error e = {.text = ""};
    struct proto_builder pb;

    if (!call_operator(call))
        return -call->error.code;
    if (rq->draining)
        return ucm_error_set(&call->error, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    if (!modules->reload_cb)
        return ucm_error_set(&call->error, UCM_WIRE_UNSUPPORTED,
                             "the daemon was started without --config, so there is no file to read "
                             "again");
    changes = malloc(sizeof(*changes));
    if (!changes)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a reload");
    if (modules->reload_cb(modules->reload_ctx, changes, &e) == 0) {
        reload_audit(call->s, changes);
        call_map_begin(call, &pb);
        pack_taken(&pb.pk, changes);
    } else {
        audit(call->s, call->method, "result=refused reason=\"%s\"", e.text);
        call_map_begin(call, &pb);
        pack_refused(&pb.pk, &e);
    }
    free(changes);
    return call_reply_map(call, &pb);
}

/* ---- config.get ---- */

static void pack_entry(msgpack_packer *pk, struct config_entry *e)
{
    static const char *const sources[] = {"default", "file", "environment", "command line"};

    proto_clean(e->value);
    proto_clean(e->next);
    proto_clean(e->where);
    msgpack_pack_map(pk, e->waits ? 8 : 7);
    proto_pack_text(pk, "key", e->key);
    proto_pack_text(pk, "value", e->value);
    proto_pack_text(pk, "default", e->initial);
    proto_pack_flag(pk, "changed", e->changed);
    proto_pack_flag(pk, "reloadable", e->reloadable);
    proto_pack_text(pk, "source", sources[e->from]);
    proto_pack_text(pk, "where", e->where);
    if (e->waits)
        proto_pack_text(pk, "next", e->next);
}

int method_config_get(struct call *call)
{
    const struct request_modules *modules = &call->s->rq->modules;
    const struct config *next = modules->next && modules->next->origin.file ? modules->next : NULL;
    struct config_entries *all;
    struct proto_builder pb;

    if (!call_operator(call))
        return -call->error.code;
    all = malloc(sizeof(*all));
    if (!all)
        return ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for an answer");
    config_entries(modules->config, next, all);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 1);
    proto_pack_str(&pb.pk, "keys");
    msgpack_pack_array(&pb.pk, all->n);
    for (uint32_t i = 0; i < all->n; i++)
        pack_entry(&pb.pk, &all->entry[i]);
    free(all);
    return call_reply_map(call, &pb);
}
