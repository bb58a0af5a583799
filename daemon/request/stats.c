/* stats and health: what requests_observe gathers, on the wire. */
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <string.h>
#include <unistd.h>

static void pack_fields(msgpack_packer *pk, const struct metric_list *list, const void *values)
{
    for (size_t i = 0; i < list->n_metrics; i++) {
        const struct metric_info *m = &list->metric[i];
        uint64_t v;

        memcpy(&v, (const char *)values + m->offset, sizeof(v));
        if (strcmp(m->kind, "flag") == 0)
            proto_pack_flag(pk, m->name, v != 0);
        else
            proto_pack_u64(pk, m->name, v);
    }
}

static uint32_t fields_of(unsigned list)
{
    return (uint32_t)metric_lists[list].n_metrics;
}

static void pack_metrics(msgpack_packer *pk, const struct exposition *x)
{
    proto_pack_str(pk, "metrics");
    msgpack_pack_map(pk, fields_of(METRIC_LIST_PLAIN));
    pack_fields(pk, &metric_lists[METRIC_LIST_PLAIN], &x->metrics);
}

static void pack_tiers(msgpack_packer *pk, const struct exposition *x,
                       const struct request_rooms *r)
{
    struct tier_stats ts;

    proto_pack_str(pk, "tiers");
    msgpack_pack_array(pk, x->n_tiers);
    if (!r->tier)
        return;
    r->tier_ops->stats(r->tier, &ts);
    msgpack_pack_map(pk, 3 + fields_of(METRIC_LIST_TIERS));
    proto_pack_text(pk, "name", r->tier_ops->name);
    proto_pack_text(pk, "engine", ts.engine);
    pack_fields(pk, &metric_lists[METRIC_LIST_TIERS], &x->tier[0]);
    proto_pack_text(pk, "reason", ts.degraded ? ts.reason : "");
}

static void pack_shares(msgpack_packer *pk, const struct exposition *x, const struct share *share)
{
    proto_pack_str(pk, "shares");
    msgpack_pack_array(pk, x->n_roots);
    for (uint32_t i = 0; i < x->n_roots; i++) {
        struct share_root_stats rs = {0};

        share_stats(share, i, &rs);
        msgpack_pack_map(pk, 4 + fields_of(METRIC_LIST_ROOTS));
        proto_pack_text(pk, "name", rs.target);
        proto_pack_text(pk, "backend", rs.backend);
        proto_pack_text(pk, "health", root_state_names[rs.health]);
        proto_pack_text(pk, "reason", rs.reason);
        pack_fields(pk, &metric_lists[METRIC_LIST_ROOTS], &x->root[i]);
    }
}

static void pack_devices(msgpack_packer *pk, const struct exposition *x, struct device_set *devices)
{
    proto_pack_str(pk, "devices");
    msgpack_pack_array(pk, x->n_devices);
    for (uint32_t i = 0; i < x->n_devices; i++) {
        struct device *d = device_set_at(devices, i);
        struct device_stats ds;

        d->ops->stats(d, &ds);
        msgpack_pack_map(pk, 3 + fields_of(METRIC_LIST_DEVICES));
        proto_pack_text(pk, "name", ds.name);
        proto_pack_bin(pk, "uuid", ds.uuid, sizeof(ds.uuid));
        proto_pack_flag(pk, "cuda", ds.cuda);
        pack_fields(pk, &metric_lists[METRIC_LIST_DEVICES], &x->device[i]);
    }
}

static void pack_nodes(msgpack_packer *pk, const struct exposition *x, const struct arena *a)
{
    proto_pack_str(pk, "nodes");
    msgpack_pack_array(pk, x->n_nodes);
    for (uint32_t i = 0; i < x->n_nodes; i++) {
        struct arena_node node;

        arena_node(a, i, &node);
        msgpack_pack_map(pk, 1 + fields_of(METRIC_LIST_NODES));
        proto_pack_u64(pk, "node", (uint64_t)node.node);
        pack_fields(pk, &metric_lists[METRIC_LIST_NODES], &x->node[i]);
    }
}

int method_stats(struct call *call)
{
    struct requests *rq = call->s->rq;
    struct exposition *x = &rq->observed.shown;
    struct proto_builder pb;

    requests_observe(rq, &rq->observed);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 11);
    proto_pack_text(&pb.pk, "version", x->version);
    proto_pack_bin(&pb.pk, "instance", rq->rooms.instance, 16);
    proto_pack_u64(&pb.pk, "uptime_ms", x->uptime_ms);
    proto_pack_u64(&pb.pk, "pid", (uint64_t)getpid());
    proto_pack_text(&pb.pk, "policy", x->policy);
    proto_pack_text(&pb.pk, "health", health_names[x->health]);
    pack_metrics(&pb.pk, x);
    pack_tiers(&pb.pk, x, &rq->rooms);
    pack_shares(&pb.pk, x, rq->rooms.share);
    pack_devices(&pb.pk, x, rq->rooms.devices);
    pack_nodes(&pb.pk, x, rq->rooms.arena);
    return call_reply_map(call, &pb);
}

int method_health(struct call *call)
{
    struct observe_snapshot *o = &call->s->rq->observed;
    struct proto_builder pb;

    requests_observe(call->s->rq, o);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 2);
    proto_pack_text(&pb.pk, "status", health_names[o->shown.health]);
    proto_pack_str(&pb.pk, "reasons");
    msgpack_pack_array(&pb.pk, o->n_reasons);
    for (uint32_t i = 0; i < o->n_reasons; i++)
        proto_pack_str(&pb.pk, o->reason[i]);
    return call_reply_map(call, &pb);
}
