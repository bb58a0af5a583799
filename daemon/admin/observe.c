/* What the daemon shows of itself, gathered from the modules: only when somebody asks, or once a
 * second. */
#include "daemon/admin/admin.h"
#include "daemon/base/numa.h"
#include "daemon/encryption/encryption.h"
#include "daemon/index/policy.h"
#include "daemon/request/transfer.h"
#include "daemon/snapshot/snapshot.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static_assert(EXPOSITION_DEVICES >= DEVICE_GPUS_MAX + 1, "and the CPU");
static_assert(EXPOSITION_NODES >= NUMA_NODES_MAX, "each node");

static uint64_t write_amplification(const struct metrics *m)
{
    double written = (double)(m->nvme_written_bytes + m->nvme_checkpoint_bytes);

    return m->nvme_stored_bytes > 0 ? (uint64_t)(1000 * written / (double)m->nvme_stored_bytes) : 0;
}

/* Gauges that other modules own. */
static void gauges_read(struct metrics *m, const struct request_modules *r)
{
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
    m->quota_rejections = limits_refused(r->limits);
    m->client_descriptors = limits_used(r->limits, LIMIT_DESCRIPTORS) + reaper_refused(r->reaper);
    m->frame_bytes = limits_used(r->limits, LIMIT_FRAMES);
    m->request_bytes = limits_used(r->limits, LIMIT_MEMORY);
}

static void tiers_read(struct exposition *x, const struct request_modules *r)
{
    struct metrics_tier *t = &x->tier[0];
    struct tier_stats ts;

    x->n_tiers = r->tier ? 1 : 0;
    if (!r->tier)
        return;
    r->tier_ops->stats(r->tier, &ts);
    snprintf(t->name, sizeof(t->name), "%s", r->tier_ops->name);
#define X(field, kind, unit, help) t->field = ts.field;
    UCMD_TIER_METRICS(X)
#undef X
    x->metrics.nvme_bytes_capacity = ts.capacity_bytes;
    x->metrics.nvme_bytes_used = ts.used_bytes;
    x->metrics.nvme_write_amplification = write_amplification(&x->metrics);
    keys_observe(r, &x->metrics);
}

static void roots_read(struct exposition *x, const struct shared *shared)
{
    x->n_roots = shared_roots(shared);
    for (uint32_t i = 0; i < x->n_roots; i++) {
        struct metrics_root *root = &x->root[i];
        struct shared_root_stats rs = {0};

        shared_stats(shared, i, &rs);
        snprintf(root->name, sizeof(root->name), "%s", rs.target);
        root->state = rs.health;
#define X(field, kind, unit, help) root->field = rs.field;
        UCMD_ROOT_METRICS(X)
#undef X
    }
}

static void devices_read(struct exposition *x, struct device_set *devices)
{
    uint32_t n = device_set_count(devices);

    x->n_devices = n;
    for (uint32_t i = 0; i < n; i++) {
        struct device *d = device_set_at(devices, i);
        struct metrics_device *to = &x->device[i];
        struct device_stats ds;

        d->ops->stats(d, &ds);
        snprintf(to->name, sizeof(to->name), "%s", ds.name);
        to->failed = ds.failed;
        to->copy_jobs = ds.jobs;
        to->load_bytes = ds.load_bytes;
        to->dump_bytes = ds.dump_bytes;
        to->regions = ds.regions;
        to->context_bytes = ds.context_bytes;
        to->dma_launches = ds.launches[COPY_DMA];
        to->dma_bytes = ds.bytes[COPY_DMA];
        to->sm_launches = ds.launches[COPY_SM];
        to->sm_bytes = ds.bytes[COPY_SM];
        to->staged_launches = ds.launches[COPY_STAGED];
        to->staged_bytes = ds.bytes[COPY_STAGED];
        to->rings = ds.staging_rings;
    }
}

/* None unless the arena is spread over several NUMA nodes. */
static void nodes_read(struct exposition *x, const struct arena *a)
{
    x->n_nodes = arena_nodes(a);
    for (uint32_t i = 0; i < x->n_nodes; i++) {
        struct arena_node node;

        arena_node(a, i, &node);
        snprintf(x->node[i].name, sizeof(x->node[i].name), "%d", node.node);
        x->node[i].total_bytes = node.ready_bytes;
        x->node[i].used_bytes = node.used_bytes;
    }
}

/* Not of those that share a label, whose sum would say nothing. */
static void given_read(const struct tenant *t)
{
    const struct tenant_settings *s = &t->settings;
    struct metrics_tenant *m = t->metrics;

    if (!m || strcmp(m->name, t->name) != 0)
        return;
    m->dram_min_bytes = s->dram_min;
    m->dram_max_bytes = s->dram_max;
    m->nvme_min_bytes = s->nvme_min;
    m->nvme_max_bytes = s->nvme_max;
    m->shared_min_bytes = s->shared_min;
    m->shared_max_bytes = s->shared_max;
}

/* Sums of the namespaces that there are now. */
static void tenants_read(struct exposition *x, struct index *ix)
{
    struct tenant_set *set = index_tenants(ix);
    struct tenants *tenants = &set->metrics;

    tenants_gauges_clear(tenants);
    for (uint32_t place = 0; place < index_ns_places(ix); place++) {
        const struct ns *ns = index_ns_at(ix, place);
        struct metrics_tenant *t;

        if (!ns)
            continue;
        t = ns->tenant->metrics;
        t->namespaces++;
        t->blocks += ns->blocks;
        t->dram_bytes += ns->dram_bytes;
        t->nvme_bytes += ns->nvme_bytes;
        t->shared_bytes += ns->shared_bytes;
    }
    for (const struct tenant *t = tenant_next(set, NULL); t; t = tenant_next(set, t))
        given_read(t);
    x->n_tenants = tenants->n;
    memcpy(x->tenant, tenants->at, tenants->n * sizeof(x->tenant[0]));
}

/* Since when a transfer waits for a slot; 0: it does not, or the request is no transfer. */
static uint64_t waits_since(const struct request *r)
{
    return r->stop_cb == transfer_stop_cb ? LIST_ENTRY(r, const struct transfer, r)->slot_wait_ns
                                          : 0;
}

static void waiters_read(struct metrics *m, const struct requests *rq)
{
    uint64_t oldest_ns = UINT64_MAX;

    m->slot_waiters = m->slot_wait_oldest_us = 0;
    for (const struct list *n = rq->active.next; n != &rq->active; n = n->next) {
        uint64_t since_ns = waits_since(LIST_ENTRY(n, const struct request, link_all));

        if (since_ns == 0)
            continue;
        m->slot_waiters++;
        oldest_ns = since_ns < oldest_ns ? since_ns : oldest_ns;
    }
    if (m->slot_waiters > 0)
        m->slot_wait_oldest_us = (uv_hrtime() - oldest_ns) / 1000;
}

/* ---- health ---- */

/* A full root is no failure until collections had the time to make space. */
#define SHARED_FULL_MS (15u * 60u * 1000u)

/* RECOVERING: well, but what an earlier run has stored is not all found again yet. FAILING: not
 * only slower but not doing its job. The worst there is counts. */
__attribute__((format(printf, 3, 4))) static void
report(struct observe_snapshot *o, enum health health, const char *format, ...)
{
    va_list args;

    o->shown.health = health > o->shown.health ? health : o->shown.health;
    o->recovering |= health == HEALTH_RECOVERING;
    if (o->n_reasons == OBSERVE_REASONS)
        return;
    va_start(args, format);
    vsnprintf(o->reason[o->n_reasons], sizeof(o->reason[0]), format, args);
    va_end(args);
    proto_clean(o->reason[o->n_reasons++]); /* it holds paths, and may be cut */
}

static void report_drops(struct observe_snapshot *o, struct requests *rq)
{
    const struct metrics *m = rq->modules.metrics;
    struct drops *d = &admin_of(rq)->drops;

    if (drops_count(d, uv_now(rq->modules.loop), m->nvme_write_dropped, m->nvme_writes))
        report(o, HEALTH_DEGRADED,
               "tier %s: %llu of %llu parts were not written (nvme_write_dropped): the disks are "
               "slower than the dumps, or fail",
               rq->modules.tier_ops->name, (unsigned long long)d->lost, (unsigned long long)d->of);
}

/* Whose parts they are stands in a file of its own. */
static void report_records(struct observe_snapshot *o, const struct request_modules *modules,
                           const char *trouble)
{
    uint64_t bytes;
    uint32_t n = cache_ns_unrecorded(modules->cache, &bytes);

    if (trouble[0])
        report(
            o, HEALTH_DEGRADED,
            "tier %s: %s: what it has of %u namespaces (%llu bytes) is lost when the daemon ends; "
            "make space there, or mend the disk",
            modules->tier_ops->name, trouble, n, (unsigned long long)bytes);
    else if (n > 0)
        report(
            o, HEALTH_DEGRADED,
            "tier %s: namespaces' records are written again; until that is done what it has of %u "
            "namespaces (%llu bytes) would be lost",
            modules->tier_ops->name, n, (unsigned long long)bytes);
}

static void report_tier(struct observe_snapshot *o, struct requests *rq)
{
    const struct request_modules *modules = &rq->modules;
    struct tier_stats stats;

    modules->tier_ops->stats(modules->tier, &stats);
    report_records(o, modules, stats.records);
    if (stats.reason[0]) {
        report(o, HEALTH_DEGRADED, "tier %s: %s", modules->tier_ops->name, stats.reason);
        drops_excuse(&admin_of(rq)->drops);
    } else {
        report_drops(o, rq);
    }
    if (stats.recovering)
        report(o, HEALTH_RECOVERING, "tier %s: recovering, %u of %u segments",
               modules->tier_ops->name, stats.segments_recovered, stats.segments);
}

/* Without a root there is less cache, and nothing else is slower. */
static void report_shared_roots(struct observe_snapshot *o, const struct request_modules *modules)
{
    const char *secrets = shared_secrets_problem(modules->shared);

    if (secrets)
        report(o, HEALTH_DEGRADED, "%s", secrets);
    for (uint32_t i = 0; i < shared_roots(modules->shared); i++) {
        struct shared_root_stats stats = {0};

        shared_stats(modules->shared, i, &stats);
        if (stats.health == SHARED_DOWN)
            report(o, HEALTH_DEGRADED, "shared root %s: %s", stats.target, stats.reason);
        else if (stats.writes_refused)
            report(o,
                   stats.health == SHARED_FULL && stats.refused_ms < SHARED_FULL_MS
                       ? HEALTH_OK
                       : HEALTH_DEGRADED,
                   "shared root %s takes no writes: %s", stats.target, stats.reason);
    }
}

static void report_kept(struct observe_snapshot *o, const struct request_modules *modules)
{
    if (snapshot_removed(modules->snapshot))
        report(o, HEALTH_DEGRADED,
               "arena.persist_dir: a file of %s was removed: what DRAM has is lost when the daemon "
               "ends; "
               "restart "
               "ucmd",
               modules->config->arena_persist_dir);
}

static void report_socket(struct observe_snapshot *o, const char *path)
{
    struct stat st;

    if (path && lstat(path, &st) < 0 && errno == ENOENT)
        report(o, HEALTH_DEGRADED,
               "socket: %s was removed: new clients can't connect; restart ucmd", path);
}

static void report_encryption(struct observe_snapshot *o, const struct request_modules *modules,
                              const char *tenant)
{
    char problem[ENCRYPTION_PROBLEM_BYTES];

    if (encryption_problem(modules->encryption, tenant, problem))
        report(o, HEALTH_DEGRADED, "%s", problem);
}

/* Engines compute what the cache would have served, and that is easily forgotten. Whose the others
 * are is not for everybody. */
static void report_bypasses(struct observe_snapshot *o, const struct requests *rq)
{
    uint32_t others = 0;

    for (uint32_t i = 0; i < rq->bypasses.n; i++) {
        const struct bypass *b = &rq->bypasses.at[i];
        bool load = b->what & BYPASS_LOAD, store = b->what & BYPASS_STORE;

        if (b->of_ns || b->tenant[0] != '\0') {
            others++;
            continue;
        }
        report(o, HEALTH_DEGRADED,
               "an operator bypasses the cache for all: %s%s%s, since %llu s; 'ucmctl bypass %s "
               "off' ends "
               "it",
               load ? "loads find nothing" : "", load && store ? ", " : "",
               store ? "dumps store nothing" : "",
               (unsigned long long)(uv_now(rq->modules.loop) - b->since_ms) / 1000,
               load ? "load" : "store");
    }
    if (others > 0)
        report(o, HEALTH_OK,
               "an operator bypasses the cache for %u tenants or namespaces; 'ucmctl bypass' lists "
               "them",
               others);
}

static void report_devices(struct observe_snapshot *o, struct device_set *devices)
{
    for (uint32_t i = 0; i < device_set_count(devices); i++) {
        struct device *d = device_set_at(devices, i);
        struct device_stats stats;

        d->ops->stats(d, &stats);
        if (stats.failed)
            report(o, HEALTH_FAILING, "device %s failed", stats.name);
    }
}

static void health_read(struct observe_snapshot *o, struct requests *rq, const char *tenant)
{
    const struct request_modules *modules = &rq->modules;
    uint64_t done, of;

    o->shown.health = HEALTH_OK;
    o->n_reasons = 0;
    o->recovering = false;
    report_bypasses(o, rq);
    if (modules->tier)
        report_tier(o, rq);
    report_kept(o, modules);
    report_socket(o, modules->socket);
    report_encryption(o, modules, tenant);
    if (snapshot_loading(modules->snapshot, &done, &of))
        report(o, HEALTH_RECOVERING, "DRAM: %llu of %llu parts of the snapshot looked at",
               (unsigned long long)done, (unsigned long long)of);
    report_shared_roots(o, modules);
    report_devices(o, modules->devices);
}

void requests_observe(struct requests *rq, const char *tenant, struct observe_snapshot *out)
{
    struct request_modules *modules = &rq->modules;
    struct exposition *x = &out->shown;

    snprintf(x->version, sizeof(x->version), "%s", UCM_VERSION);
    snprintf(x->commit, sizeof(x->commit), "%s", modules->commit ? modules->commit : "");
    snprintf(x->options, sizeof(x->options), "%s", modules->options ? modules->options : "");
    snprintf(x->policy, sizeof(x->policy), "%s", policy_name());
    x->uptime_ms = uv_now(modules->loop) - rq->started_ms;
    x->metrics = *modules->metrics;
    gauges_read(&x->metrics, modules);
    waiters_read(&x->metrics, rq);
    tiers_read(x, modules);
    roots_read(x, modules->shared);
    devices_read(x, modules->devices);
    nodes_read(x, modules->arena);
    tenants_read(x, modules->index);
    for (unsigned id = 0; id < FEATURES; id++)
        if (modules->features[id]->observe_cb)
            modules->features[id]->observe_cb(rq, x);
    health_read(out, rq, tenant);
    out->draining = rq->draining;
}
