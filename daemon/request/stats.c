/* stats and health. */
#include "daemon/cache/snapshot.h"
#include "daemon/index/policy.h"
#include "daemon/request/internal.h"
#include "daemon/request/request.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static uint64_t write_amplification(const struct metrics *m)
{
    double written = (double)(m->nvme_written_bytes + m->nvme_checkpoint_bytes);

    return m->nvme_stored_bytes > 0 ? (uint64_t)(1000 * written / (double)m->nvme_stored_bytes) : 0;
}

/* Gauges that other rooms own: read only when somebody asks. */
static void gauges_read(struct requests *rq)
{
    struct request_rooms *r = &rq->rooms;
    struct metrics *m = r->metrics;
    struct cache_stats cs;

    cache_stats(r->cache, &cs);
    m->blocks = cs.complete;
    m->blocks_partial = index_blocks(r->index) - cs.complete;
    m->blocks_pinned = cs.pinned;
    m->blocks_shared = cs.shared_only;
    m->index_bytes = index_bytes(r->index);
    m->arena_bytes_total = arena_bytes_ready(r->arena);
    m->arena_bytes_configured = arena_bytes_configured(r->arena);
    m->arena_bytes_used = arena_bytes_used(r->arena);
    if (r->tier) {
        struct tier_stats ts;

        r->tier_ops->stats(r->tier, &ts);
        m->nvme_bytes_capacity = ts.capacity_bytes;
        m->nvme_bytes_used = ts.used_bytes;
        m->nvme_write_amplification = write_amplification(m);
    }
}

static void pack_metrics(msgpack_packer *pk, const struct metrics *m)
{
    uint32_t n = 0;

#define X(name, kind, unit, help) n++;
    UCMD_METRICS(X)
#undef X
    proto_pack_str(pk, "metrics");
    msgpack_pack_map(pk, n);
#define X(name, kind, unit, help) proto_pack_u64(pk, #name, m->name);
    UCMD_METRICS(X)
#undef X
}

static void pack_tiers(msgpack_packer *pk, const struct request_rooms *r)
{
    struct tier_stats ts;

    proto_pack_str(pk, "tiers");
    msgpack_pack_array(pk, r->tier ? 1 : 0);
    if (!r->tier)
        return;
    r->tier_ops->stats(r->tier, &ts);
    msgpack_pack_map(pk, 9);
    proto_pack_text(pk, "name", r->tier_ops->name);
    proto_pack_text(pk, "engine", ts.engine);
    proto_pack_u64(pk, "capacity_bytes", ts.capacity_bytes);
    proto_pack_u64(pk, "used_bytes", ts.used_bytes);
    proto_pack_u64(pk, "queued", ts.queued);
    proto_pack_u64(pk, "in_flight", ts.in_flight);
    proto_pack_flag(pk, "recovering", ts.recovering);
    proto_pack_flag(pk, "degraded", ts.degraded);
    proto_pack_text(pk, "reason", ts.degraded ? ts.reason : "");
}

static void pack_shares(msgpack_packer *pk, const struct request_rooms *r)
{
    static const char *const health[] = {"up", "read-only", "full", "down"};
    uint32_t n = share_roots(r->share);

    proto_pack_str(pk, "shares");
    msgpack_pack_array(pk, n);
    for (uint32_t i = 0; i < n; i++) {
        struct share_root_stats rs = {0};

        share_stats(r->share, i, &rs);
        msgpack_pack_map(pk, 17);
        proto_pack_text(pk, "name", rs.target);
        proto_pack_text(pk, "backend", rs.backend);
        proto_pack_text(pk, "health", health[rs.health]);
        proto_pack_text(pk, "reason", rs.reason);
        proto_pack_u64(pk, "capacity_bytes", rs.capacity_bytes);
        proto_pack_u64(pk, "used_bytes", rs.used_bytes);
        proto_pack_u64(pk, "files", rs.files);
        proto_pack_u64(pk, "in_flight", rs.in_flight);
        proto_pack_u64(pk, "queued", rs.queued);
        proto_pack_u64(pk, "reads", rs.reads);
        proto_pack_u64(pk, "read_bytes", rs.read_bytes);
        proto_pack_u64(pk, "writes", rs.writes);
        proto_pack_u64(pk, "write_bytes", rs.write_bytes);
        proto_pack_u64(pk, "failures", rs.failures);
        proto_pack_u64(pk, "timeouts", rs.timeouts);
        proto_pack_u64(pk, "breaks", rs.breaks);
        proto_pack_u64(pk, "latency_us", rs.latency_us);
    }
}

static void pack_devices(msgpack_packer *pk, struct device_set *devices)
{
    uint32_t n = device_set_count(devices);

    proto_pack_str(pk, "devices");
    msgpack_pack_array(pk, n);
    for (uint32_t i = 0; i < n; i++) {
        struct device *d = device_set_at(devices, i);
        struct device_stats ds;

        d->ops->stats(d, &ds);
        msgpack_pack_map(pk, 16);
        proto_pack_text(pk, "name", ds.name);
        proto_pack_bin(pk, "uuid", ds.uuid, sizeof(ds.uuid));
        proto_pack_flag(pk, "cuda", ds.cuda);
        proto_pack_flag(pk, "failed", ds.failed);
        proto_pack_u64(pk, "jobs", ds.jobs);
        proto_pack_u64(pk, "load_bytes", ds.load_bytes);
        proto_pack_u64(pk, "dump_bytes", ds.dump_bytes);
        proto_pack_u64(pk, "regions", ds.regions);
        proto_pack_u64(pk, "context_bytes", ds.context_bytes);
        proto_pack_u64(pk, "dma_launches", ds.launches[COPY_DMA]);
        proto_pack_u64(pk, "dma_bytes", ds.bytes[COPY_DMA]);
        proto_pack_u64(pk, "sm_launches", ds.launches[COPY_SM]);
        proto_pack_u64(pk, "sm_bytes", ds.bytes[COPY_SM]);
        proto_pack_u64(pk, "staged_launches", ds.launches[COPY_STAGED]);
        proto_pack_u64(pk, "staged_bytes", ds.bytes[COPY_STAGED]);
        proto_pack_u64(pk, "rings", ds.staging_rings);
    }
}

/* Empty unless the arena is spread over several NUMA nodes. */
static void pack_nodes(msgpack_packer *pk, const struct arena *a)
{
    uint32_t n = arena_nodes(a);

    proto_pack_str(pk, "nodes");
    msgpack_pack_array(pk, n);
    for (uint32_t i = 0; i < n; i++) {
        struct arena_node node;

        arena_node(a, i, &node);
        msgpack_pack_map(pk, 3);
        proto_pack_u64(pk, "node", (uint64_t)node.node);
        proto_pack_u64(pk, "total_bytes", node.ready_bytes);
        proto_pack_u64(pk, "used_bytes", node.used_bytes);
    }
}

int method_stats(struct call *call)
{
    struct requests *rq = call->s->rq;
    struct proto_builder pb;

    gauges_read(rq);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 10);
    proto_pack_text(&pb.pk, "version", UCM_VERSION);
    proto_pack_bin(&pb.pk, "instance", rq->rooms.instance, 16);
    proto_pack_u64(&pb.pk, "uptime_ms", uv_now(rq->rooms.loop) - rq->started_ms);
    proto_pack_u64(&pb.pk, "pid", (uint64_t)getpid());
    proto_pack_text(&pb.pk, "policy", policy_name());
    pack_metrics(&pb.pk, rq->rooms.metrics);
    pack_tiers(&pb.pk, &rq->rooms);
    pack_shares(&pb.pk, &rq->rooms);
    pack_devices(&pb.pk, rq->rooms.devices);
    pack_nodes(&pb.pk, rq->rooms.arena);
    return call_reply_map(call, &pb);
}

/* ---- health ---- */

#define REASONS_MAX 16

/* RECOVERING: well, but what an earlier run has stored is not all found again yet. FAILING: not
 * only slower but not doing its job. */
enum health { HEALTH_OK, HEALTH_RECOVERING, HEALTH_DEGRADED, HEALTH_FAILING };

/* The worst there is, and why. */
struct health_report {
    enum health health;
    uint32_t n;
    char reason[REASONS_MAX][160];
};

__attribute__((format(printf, 3, 4))) static void
report(struct health_report *h, enum health health, const char *format, ...)
{
    va_list args;

    h->health = health > h->health ? health : h->health;
    if (h->n == REASONS_MAX)
        return;
    va_start(args, format);
    vsnprintf(h->reason[h->n++], sizeof(h->reason[0]), format, args);
    va_end(args);
}

static void report_tier(struct health_report *h, const struct request_rooms *rooms)
{
    struct tier_stats stats;

    rooms->tier_ops->stats(rooms->tier, &stats);
    if (stats.degraded)
        report(h, HEALTH_DEGRADED, "tier %s: %s", rooms->tier_ops->name, stats.reason);
    else if (stats.recovering)
        report(h, HEALTH_RECOVERING, "tier %s: recovering, %u of %u segments",
               rooms->tier_ops->name, stats.segments_recovered, stats.segments);
}

/* Without a root there is less cache, and nothing else is slower. */
static void report_shares(struct health_report *h, const struct request_rooms *rooms)
{
    for (uint32_t i = 0; i < share_roots(rooms->share); i++) {
        struct share_root_stats stats = {0};

        share_stats(rooms->share, i, &stats);
        if (stats.health == SHARE_DOWN)
            report(h, HEALTH_DEGRADED, "share %s: %s", stats.target, stats.reason);
    }
}

static void report_devices(struct health_report *h, struct device_set *devices)
{
    for (uint32_t i = 0; i < device_set_count(devices); i++) {
        struct device *d = device_set_at(devices, i);
        struct device_stats stats;

        d->ops->stats(d, &stats);
        if (stats.failed)
            report(h, HEALTH_FAILING, "device %s failed", stats.name);
    }
}

int method_health(struct call *call)
{
    static const char *const names[] = {"ok", "recovering", "degraded", "failing"};
    const struct request_rooms *rooms = &call->s->rq->rooms;
    struct health_report h = {0};
    struct proto_builder pb;
    uint64_t done, of;

    if (rooms->tier)
        report_tier(&h, rooms);
    if (cache_snapshot_loading(rooms->cache, &done, &of))
        report(&h, HEALTH_RECOVERING, "DRAM: %llu of %llu parts of the snapshot looked at",
               (unsigned long long)done, (unsigned long long)of);
    report_shares(&h, rooms);
    report_devices(&h, rooms->devices);
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 2);
    proto_pack_text(&pb.pk, "status", names[h.health]);
    proto_pack_str(&pb.pk, "reasons");
    msgpack_pack_array(&pb.pk, h.n);
    for (uint32_t i = 0; i < h.n; i++)
        proto_pack_str(&pb.pk, h.reason[i]);
    return call_reply_map(call, &pb);
}
