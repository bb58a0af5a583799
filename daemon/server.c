#include "daemon/server.h"
#include "daemon/admin/admin.h"
#include "daemon/admin/kept.h"

#include "daemon/base/log.h"
#include "daemon/base/reaper.h"
#include "daemon/cache/cache.h"
#include "daemon/config/memory.h"
#include "daemon/device/device.h"
#include "daemon/encryption/encryption.h"
#include "daemon/features.h"
#include "daemon/front/front.h"
#include "daemon/index/index.h"
#include "daemon/index/policy.h"
#include "daemon/mapping/grant.h"
#include "daemon/modules.h"
#include "daemon/observe/observe.h"
#include "daemon/request/request.h"
#include "daemon/shared/shared.h"
#include "daemon/snapshot/snapshot.h"
#include "proto/build.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* Part size that the policy's sizing assumes: what a rank holds of 16 tokens of an 8B model. */
#define TYPICAL_PART_BYTES (512u << 10)

/* The daemon opens the first tier that the configuration wants. With none it has DRAM only. */
static const struct tier_ops *const tiers[] = {&tier_nvme};
#define TIERS (sizeof(tiers) / sizeof(tiers[0]))

static void signal_cb(void *ctx, int number)
{
    struct server *s = ctx;

    if (number != SIGHUP)
        server_stop(s, 0);
    else if (s->state == SERVING)
        reload_by_signal(&s->reload);
}

static void device_failed_cb(void *ctx, const char *why)
{
    struct server *s = ctx;

    log_error("server", "device-failed", "reason=\"%s\"", why);
    server_stop(s, 1);
}

static void device_found_cb(void *ctx, uint32_t gpus, const char *note)
{
    (void)ctx;
    log_info("server", "devices", "gpus=%u note=\"%s\"", gpus, note);
}

/* ---- starting ---- */

static void slab_ready_cb(void *ctx, uint32_t slab, void *base, uint64_t bytes)
{
    struct server *s = ctx;

    if (s->tier)
        s->tier_ops->buffer_add(s->tier, slab, base, bytes);
    if (device_set_memory_add(s->devices, base, bytes) != 0)
        log_warn("server", "unpinned", "slab=%u reason=\"%s\"", slab, "no memory to note it");
    snapshot_grew(s->snapshot);
    cache_arena_grew(s->cache);
}

/* The tier reads and writes it unregistered, a few per cent dearer: registered, the kernel would
 * hold the memory after it was given back, and another tenant could not have it before all reads
 * have ended. */
static void mapping_cb(void *ctx, enum arena_granted_event event, uint32_t mapping, void *base,
                       uint64_t bytes)
{
    struct server *s = ctx;

    if (event == GRANTED_GOES)
        device_set_memory_remove(s->devices, base, bytes);
    else if (event == GRANTED_READY && device_set_memory_add(s->devices, base, bytes) != 0)
        log_warn("server", "unpinned", "mapping=%u reason=\"%s\"", mapping, "no memory to note it");
}

static void memory_removed_cb(void *ctx, void *base, uint64_t bytes)
{
    struct server *s = ctx;

    (void)bytes;
    grant_let_go(s->arena, grant_at(s->arena, base));
}

static void arena_ended_cb(void *ctx)
{
    struct server *s = ctx;

    if (s->requests)
        requests_arena_ended(s->requests);
    snapshot_grew(s->snapshot);
    cache_arena_grew(s->cache);
}

static bool progress_cb(void *ctx)
{
    struct server *s = ctx;
    uint64_t done = s->metrics.nvme_reads + s->metrics.nvme_writes + s->metrics.nvme_read_errors +
                    s->metrics.nvme_write_errors + s->metrics.nvme_corrupt +
                    s->metrics.arena_kept_parts + s->metrics.arena_kept_refused +
                    arena_bytes_ready(s->arena); /* what is kept waits for its slab */
    bool moved = done != s->progress_seen;

    s->progress_seen = done;
    return moved || cache_tier_busy(s->cache) == 0;
}

static int loop_init(struct server *s)
{
    int rc = uv_loop_init(&s->loop);

    if (rc == 0)
        rc = deadlines_init(&s->deadlines, &s->loop);
    if (rc == 0)
        rc = signals_start(&s->signals, &s->loop, signal_cb, s);
    if (rc == 0)
        rc = uv_timer_init(&s->loop, &s->stop_timer);
    if (rc == 0)
        rc = reaper_new(&s->loop, &s->reaper);
    if (rc == 0)
        rc = iterations_begin(&s->iterations, &s->loop, s->metrics.histograms.loop_iteration);
    if (rc == 0)
        rc = notify_init(&s->notify, &s->loop, progress_cb, s);
    s->stop_timer.data = s;
    return rc;
}

/* Places nothing on a host with one node. */
static void numa_init(struct server *s)
{
    struct numa *n = &s->numa;
    int rc;

    if (s->config.arena_numa == CONFIG_NUMA_OFF)
        return;
    numa_read("/sys", n);
    if (n->n < 2)
        return;
    rc = numa_allow(n);
    if (rc < 0)
        log_info("server", "numa-off", "reason=\"%s\"",
                 rc == -EBUSY ? "the process was given a memory policy, which is kept"
                              : strerror(-rc));
    else
        log_info("server", "numa", "nodes=%u", n->n);
}

static const struct numa *numa_used(const struct server *s)
{
    return s->numa.n > 1 ? &s->numa : NULL;
}

static int arena_init(struct server *s, struct ucm_error *e)
{
    struct config *c = &s->config;
    struct arena_config ac = {
        .size = c->arena_size / c->arena_slab * c->arena_slab,
        .slab = c->arena_slab,
        .prefault = c->arena_prefault,
        .slab_ready_cb = slab_ready_cb,
        .numa = numa_used(s),
        .deadlines = &s->deadlines,
        .ended_cb = arena_ended_cb,
        .granted = c->mapping_size,
        .granted_max = memory_total(),
        .granted_cb = mapping_cb,
        .ctx = s,
    };
    int rc = 0;

    if (c->arena_persist_dir[0] != '\0') {
        char why[PERSIST_WHY_BYTES];

        rc = snapshot_open(c->arena_persist_dir, ac.size, ac.slab, &s->snapshot, why);
        if (rc != 0)
            return why[0] ? ucm_error_set(e, UCM_WIRE_IO, "%s", why) : rc;
        ac.file = true;
        ac.fd = snapshot_fd(s->snapshot);
    }
    rc = arena_new(&s->loop, &ac, &s->arena);
    if (rc != 0)
        return rc;
    cache_arena_attach(s->cache, s->arena);
    s->reload.cache = s->cache;
    if (!s->snapshot)
        return 0;
    snapshot_load(s->snapshot, &(struct snapshot_modules){.loop = &s->loop,
                                                          .cache = s->cache,
                                                          .index = s->index,
                                                          .policy = s->policy,
                                                          .arena = s->arena,
                                                          .metrics = &s->metrics});
    return arena_grow(s->arena);
}

static int tier_init(struct server *s, struct ucm_error *e)
{
    struct tier_callbacks callbacks = cache_tier_callbacks(s->cache);
    size_t i = 0;
    int rc;

    callbacks.encryption = s->encryption;
    while (i < TIERS && !tiers[i]->wanted(&s->config))
        i++;
    if (i == TIERS)
        return 0;
    rc = tiers[i]->open(&s->loop, &s->config, &callbacks, &s->metrics, &s->tier, e);
    if (rc != 0)
        return rc;
    s->tier_ops = tiers[i];
    cache_tier_attach(s->cache, s->tier_ops, s->tier);
    return 0;
}

/* Where DRAM is all there is, the smallest blocks of one part that fit there are the most that
 * count; and some on their way in. So blocks of which only a few parts are stored don't take more
 * than that. */
#define BLOCKS_COMING 65536u

static uint64_t index_blocks_most(const struct config *c)
{
    uint64_t fit = c->arena_size / ARENA_ALIGN + BLOCKS_COMING;

    if (c->nvme_paths.n > 0 || c->shared_roots.n > 0 || c->index_max_blocks < fit)
        return c->index_max_blocks;
    return fit;
}

static int cache_init(struct server *s, struct ucm_error *e)
{
    struct config *c = &s->config;
    struct cache_config cc = {.loop = &s->loop, .deadlines = &s->deadlines, .metrics = &s->metrics};
    int rc = encryption_open(&s->loop, c, &s->metrics, &s->encryption);

    cc.encryption = s->encryption;
    s->limits = limits_new();
    if (rc == 0)
        rc = s->limits ? index_new(index_blocks_most(c), c->max_namespaces, &s->index) : -ENOMEM;
    if (rc == 0)
        rc = tenant_set_configure(index_tenants(s->index), c);
    if (rc == 0) {
        index_limits(s->index, s->limits);
        limits_settings(s->limits, tenant_limit, index_tenants(s->index));
    }
    if (rc == 0)
        tenants_kept_read(index_tenants(s->index), c);
    s->reload.index = s->index;
    if (rc == 0)
        rc = policy_new(s->index, c->arena_size / TYPICAL_PART_BYTES, &s->policy);
    if (rc != 0)
        return rc;
    /* At most half of the arena waits for the disk, so that loads find slots alongside it. */
    cc.write_reused = c->nvme_admission == CONFIG_ADMIT_REUSE;
    cc.write_learned = c->nvme_admission == CONFIG_ADMIT_LEARNED;
    cc.backlog_bytes =
        c->nvme_write_queue_size < c->arena_size / 2 ? c->nvme_write_queue_size : c->arena_size / 2;
    cc.shared_reused = c->shared_admission == CONFIG_ADMIT_REUSE;
    cc.shared_blocks = c->index_max_blocks / 4;
    cc.index = s->index;
    cc.policy = s->policy;
    rc = cache_new(&cc, &s->cache);
    if (rc == 0)
        rc = tier_init(s, e);
    return rc == 0 ? arena_init(s, e) : rc;
}

/* Does no I/O on roots yet: a server that hangs does not delay the start. */
static int shared_init(struct server *s, struct ucm_error *e)
{
    int rc =
        shared_open(&s->loop, &s->deadlines, &s->config, s->encryption, &s->metrics, &s->shared, e);

    if (rc == 0 && s->shared) {
        cache_shared_attach(s->cache, s->shared);
        shared_quotas(s->shared, tenant_shared_quota, index_tenants(s->index));
    }
    return rc;
}

static int devices_init(struct server *s, struct ucm_error *e)
{
    struct device_config dc = {.cpu_threads = s->config.cpu_threads,
                               .cuda = (int)s->config.cuda,
                               .strategy = (enum copy_strategy)s->config.copy_strategy,
                               .busy_max_percent = s->config.copy_busy_max_percent,
                               .calibration = s->config.copy_calibration,
                               .numa = numa_used(s),
                               .failed_cb = device_failed_cb,
                               .found_cb = device_found_cb,
                               .memory_removed_cb = memory_removed_cb,
                               .ctx = s};
    char note[200] = "";
    int rc = device_set_new(&s->loop, &dc, &s->devices, note, e);

    if (rc == 0 && note[0])
        log_info("server", "devices", "note=\"%s\"", note);
    return rc;
}

static int front_init(struct server *s, struct ucm_error *e)
{
    struct request_modules modules = {
        .features = daemon_features,
        .methods = daemon_methods,
        .loop = &s->loop,
        .config = &s->config,
        .metrics = &s->metrics,
        .deadlines = &s->deadlines,
        .limits = s->limits,
        .reaper = s->reaper,
        .index = s->index,
        .arena = s->arena,
        .cache = s->cache,
        .policy = s->policy,
        .devices = s->devices,
        .tier_ops = s->tier_ops,
        .tier = s->tier,
        .shared = s->shared,
        .encryption = s->encryption,
        .snapshot = s->snapshot,
        .commit = ucm_build_commit,
        .options = ucm_build_options,
        .reload_cb = s->reload.sources->path ? reload_cb : NULL,
        .reload_ctx = &s->reload,
        .next = &s->reload.next,
    };
    struct front_handler handler;
    int rc, fd = notify_listen_fd();

    modules.socket = fd < 0 ? s->config.socket : NULL;
    if (fd < -1)
        return ucm_error_set(e, UCM_WIRE_INVALID,
                             "socket activation gave several sockets; ucmd.socket must name one");
    if (getrandom(modules.instance, sizeof(modules.instance), 0) != sizeof(modules.instance))
        return -EIO;
    rc = requests_new(&modules, &s->requests);
    if (rc != 0)
        return rc;
    s->reload.requests = s->requests;
    handler = requests_handler(s->requests);
    return front_new(&s->loop, &s->config, fd, &s->deadlines, s->limits, s->reaper, &s->metrics,
                     &handler, &s->front, e);
}

static void observe_fill_cb(void *ctx, struct observe_snapshot *out)
{
    struct server *s = ctx;

    requests_observe(s->requests, NULL, out);
}

/* The last one, so that observers see a daemon that serves. */
static int observe_init(struct server *s)
{
    struct observe_options options = {
        .loop = &s->loop, .config = &s->config, .fill_cb = observe_fill_cb, .ctx = s};

    return observe_new(&options, &s->observe);
}

int server_check(const struct config *config, void (*warn_cb)(const char *text),
                 struct config_error *e)
{
    char why[200];
    int rc = config_check(config, e);

    if (rc == 0)
        rc = config_check_roots(config, warn_cb, e);
    for (size_t i = 0; rc == 0 && i < TIERS; i++)
        if (tiers[i]->wanted(config))
            rc = tiers[i]->check(config, e);
    if (rc == 0 && device_check((int)config->cuda, why) < 0)
        rc = config_fail(config, e, "device.cuda", "device.cuda is required, but %s", why);
    if (rc == 0)
        observe_check(config, warn_cb);
    return rc;
}

int server_new(struct config *config, const struct server_sources *sources, struct server **out,
               struct ucm_error *e)
{
    struct server *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return -ENOMEM;
    s->config = *config;
    *config = (struct config){0};
    s->reload = (struct reload){.config = &s->config, .sources = &sources->config};
    s->commit = sources->commit;
    e->code = 0;
    rc = loop_init(s);
    numa_init(s);
    if (rc == 0)
        rc = devices_init(s, e);
    if (rc == 0)
        rc = cache_init(s, e);
    if (rc == 0)
        rc = shared_init(s, e);
    if (rc == 0)
        rc = front_init(s, e);
    if (rc == 0)
        rc = snapshot_take(s->snapshot);
    if (rc == 0)
        rc = observe_init(s);
    if (rc != 0) {
        if (e->code == 0)
            ucm_error_set(e, UCM_WIRE_INTERNAL, "cannot start: %s", uv_strerror(rc));
        arena_free(s->arena); /* joins its thread */
        snapshot_close(s->snapshot);
        return rc; /* the process exits: the kernel frees the rest */
    }
    *out = s;
    return 0;
}

int server_run(struct server *s)
{
    char status[160];

    snprintf(status, sizeof(status), "Serving on %s", s->config.socket);
    notify_ready(status);
    log_info("server", "serving", "socket=%s version=%s commit=%s arena=%llu nvme_paths=%zu pid=%d",
             s->config.socket, UCM_VERSION, s->commit, (unsigned long long)s->config.arena_size,
             s->config.nvme_paths.n, (int)getpid());
    uv_run(&s->loop, UV_RUN_DEFAULT);
    return s->exit_status;
}

void server_free(struct server *s)
{
    int rc = uv_loop_close(&s->loop);

    assert(rc == 0);
    (void)rc;
    policy_free(s->policy);
    index_free(s->index);
    reaper_free(s->reaper);
    limits_free(s->limits);
    config_free(&s->config);
    config_free(&s->reload.next);
    free(s);
}
