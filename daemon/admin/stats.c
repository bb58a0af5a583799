/* stats and health: what requests_observe gathers, on the wire. */
#include "daemon/admin/admin.h"

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
                       const struct request_modules *r)
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
    proto_pack_text(pk, "reason", ts.reason[0] ? ts.reason : ts.records);
}

static void pack_shared_roots(msgpack_packer *pk, const struct exposition *x,
                              const struct shared *shared)
{
    proto_pack_str(pk, "shared_roots");
    msgpack_pack_array(pk, x->n_roots);
    for (uint32_t i = 0; i < x->n_roots; i++) {
        struct shared_root_stats rs = {0};

        shared_stats(shared, i, &rs);
        msgpack_pack_map(pk, 6 + fields_of(METRIC_LIST_ROOTS));
        proto_pack_text(pk, "name", rs.target);
        proto_pack_text(pk, "backend", rs.backend);
        proto_pack_text(pk, "health", root_state_names[rs.health]);
        proto_pack_text(pk, "reason", rs.reason);
        proto_pack_u64(pk, "pid", rs.process.pid);
        proto_pack_text(pk, "program", rs.process.name);
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

/* The fields that every histogram has. */
#define TIMES_FIELDS 5

static void pack_times(msgpack_packer *pk, const struct histogram *h)
{
    uint32_t buckets = 0;

    for (uint32_t i = 0; i < HISTOGRAM_BUCKETS; i++)
        buckets += h->bucket[i] > 0;
    proto_pack_u64(pk, "count", histogram_total(h));
    proto_pack_u64(pk, "sum_ns", h->sum_ns);
    proto_pack_u64(pk, "p50_us", histogram_quantile_us(h, 500));
    proto_pack_u64(pk, "p99_us", histogram_quantile_us(h, 990));
    proto_pack_str(pk, "buckets");
    msgpack_pack_array(pk, 2 * buckets);
    for (uint32_t i = 0; i < HISTOGRAM_BUCKETS; i++)
        if (h->bucket[i] > 0) {
            msgpack_pack_uint64(pk, histogram_bound_us(i));
            msgpack_pack_uint64(pk, h->bucket[i]);
        }
}

/* A client that is no operator gets its own tenant's only. */
static void pack_tenants(msgpack_packer *pk, const struct exposition *x, const struct tenants *all,
                         const struct peer *peer)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < x->n_tenants; i++)
        n += peer->admin || strcmp(x->tenant[i].name, peer->tenant) == 0;
    proto_pack_str(pk, "tenants");
    msgpack_pack_array(pk, n);
    for (uint32_t i = 0; i < x->n_tenants; i++) {
        if (!peer->admin && strcmp(x->tenant[i].name, peer->tenant) != 0)
            continue;
        msgpack_pack_map(pk, 3 + fields_of(METRIC_LIST_TENANTS));
        proto_pack_text(pk, "name", x->tenant[i].name);
        pack_fields(pk, &metric_lists[METRIC_LIST_TENANTS], &x->tenant[i]);
        proto_pack_str(pk, "lookup_times");
        msgpack_pack_map(pk, TIMES_FIELDS);
        pack_times(pk, &all->times[i].lookup);
        proto_pack_str(pk, "load_times");
        msgpack_pack_map(pk, TIMES_FIELDS);
        pack_times(pk, &all->times[i].load);
    }
}

static void pack_histogram(msgpack_packer *pk, const struct histogram_info *info, uint32_t tier,
                           uint32_t size, const struct histogram *h)
{
    msgpack_pack_map(pk, 3 + TIMES_FIELDS);
    proto_pack_text(pk, "name", info->name);
    proto_pack_text(pk, "tier", info->tiers > 1 ? metric_tier_names[tier] : "");
    proto_pack_text(pk, "size", info->sizes > 1 ? metric_size_names[size] : "");
    pack_times(pk, h);
}

static void pack_histograms(msgpack_packer *pk, const struct histograms *all)
{
    uint32_t n = 0;

    for (size_t i = 0; i < histogram_infos_n; i++)
        n += histogram_infos[i].tiers * histogram_infos[i].sizes;
    proto_pack_str(pk, "histograms");
    msgpack_pack_array(pk, n);
    for (size_t i = 0; i < histogram_infos_n; i++) {
        const struct histogram_info *info = &histogram_infos[i];
        const struct histogram *h = (const struct histogram *)((const char *)all + info->offset);

        for (uint32_t t = 0; t < info->tiers; t++)
            for (uint32_t s = 0; s < info->sizes; s++)
                pack_histogram(pk, info, t, s, h++);
    }
}

static void pack_reuse(msgpack_packer *pk, const struct metrics_reuse *r)
{
    static const uint64_t halves[] = REUSE_HALVES;
    uint32_t n = 0;

    for (unsigned t = 0; t < REUSE_TIERS; t++)
        n += r->bytes[t] > 0;
    proto_pack_str(pk, "reuse");
    msgpack_pack_map(pk, 4);
    proto_pack_u64(pk, "references", r->references);
    proto_pack_u64(pk, "sampled", r->sampled);
    proto_pack_str(pk, "factor_permille");
    msgpack_pack_array(pk, REUSE_POINTS);
    for (unsigned i = 0; i < REUSE_POINTS; i++)
        msgpack_pack_uint64(pk, 500 * halves[i]);
    proto_pack_str(pk, "curves");
    msgpack_pack_array(pk, n);
    for (unsigned t = 0; t < REUSE_TIERS; t++) {
        if (r->bytes[t] == 0)
            continue;
        msgpack_pack_map(pk, 3);
        proto_pack_text(pk, "tiers", reuse_tiers_names[t]);
        proto_pack_u64(pk, "bytes", r->bytes[t]);
        proto_pack_str(pk, "hit_permille");
        msgpack_pack_array(pk, REUSE_POINTS);
        for (unsigned i = 0; i < REUSE_POINTS; i++)
            msgpack_pack_uint32(pk, r->hit_permille[t][i]);
    }
}

static void call_observe(struct call *call)
{
    const struct peer *peer = &call->s->peer;

    requests_observe(call->s->rq, peer->admin ? NULL : peer->tenant,
                     &admin_of(call->s->rq)->observed);
}

int method_stats(struct call *call)
{
    struct requests *rq = call->s->rq;
    struct exposition *x = &admin_of(rq)->observed.shown;
    struct proto_builder pb;

    call_observe(call);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 18);
    proto_pack_text(&pb.pk, "version", x->version);
    proto_pack_text(&pb.pk, "commit", x->commit);
    proto_pack_text(&pb.pk, "options", x->options);
    proto_pack_bin(&pb.pk, "instance", rq->modules.instance, 16);
    proto_pack_u64(&pb.pk, "uptime_ms", x->uptime_ms);
    proto_pack_u64(&pb.pk, "pid", (uint64_t)getpid());
    proto_pack_text(&pb.pk, "policy", x->policy);
    proto_pack_text(&pb.pk, "health", health_names[x->health]);
    proto_pack_flag(&pb.pk, "recovering", admin_of(rq)->observed.recovering);
    pack_metrics(&pb.pk, x);
    pack_tiers(&pb.pk, x, &rq->modules);
    pack_shared_roots(&pb.pk, x, rq->modules.shared);
    pack_devices(&pb.pk, x, rq->modules.devices);
    pack_nodes(&pb.pk, x, rq->modules.arena);
    bypass_pack(&pb.pk, rq, &call->s->peer);
    pack_tenants(&pb.pk, x, &index_tenants(rq->modules.index)->metrics, &call->s->peer);
    pack_histograms(&pb.pk, &x->metrics.histograms);
    pack_reuse(&pb.pk, &x->reuse);
    return call_reply_map(call, &pb);
}

int method_health(struct call *call)
{
    struct observe_snapshot *o = &admin_of(call->s->rq)->observed;
    struct proto_builder pb;

    call_observe(call);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 2 + o->recovering);
    proto_pack_text(&pb.pk, "status", health_names[o->shown.health]);
    if (o->recovering)
        proto_pack_flag(&pb.pk, "recovering", true);
    proto_pack_str(&pb.pk, "reasons");
    msgpack_pack_array(&pb.pk, o->n_reasons);
    for (uint32_t i = 0; i < o->n_reasons; i++)
        proto_pack_str(&pb.pk, o->reason[i]);
    return call_reply_map(call, &pb);
}
