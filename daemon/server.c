#include "daemon/server.h"

#include "daemon/arena/persist.h"
#include "daemon/arena/window.h"
#include "daemon/base/deadline.h"
#include "daemon/base/log.h"
#include "daemon/base/memory.h"
#include "daemon/base/reaper.h"
#include "daemon/cache/cache.h"
#include "daemon/cache/snapshot.h"
#include "daemon/device/device.h"
#include "daemon/features.h"
#include "daemon/front/front.h"
#include "daemon/index/index.h"
#include "daemon/index/policy.h"
#include "daemon/notify.h"
#include "daemon/observe/observe.h"
#include "daemon/observe/turns.h"
#include "daemon/reload.h"
#include "daemon/request/request.h"
#include "daemon/seal/seal.h"
#include "daemon/share/share.h"
#include "daemon/tier/tier.h"
#include "proto/build.h"
#include "proto/metrics.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

/* Part size that the policy's sizing assumes: what a rank holds of 16 tokens of an 8B model. */
#define TYPICAL_PART_BYTES (512u << 10)
#define STOP_TICK_MS 10

/* The daemon opens the first tier that the configuration wants. With none it has DRAM only. */
static const struct tier_ops *const tiers[] = {&tier_nvme};
#define TIERS (sizeof(tiers) / sizeof(tiers[0]))

struct server {
    uv_loop_t loop;
    struct config config;
    struct reload reload;
    const char *commit; /* that the program was built from */
    struct metrics metrics;
    struct deadlines deadlines;
    struct limits *limits;
    struct reaper *reaper;
    struct index *index;
    struct policy *policy;
    struct cache *cache;
    struct numa numa; /* no nodes: nothing is placed */
    struct arena *arena;
    struct persist *persist; /* the persistent arena; NULL: DRAM ends with the daemon */
    const struct tier_ops *tier_ops;
    struct tier *tier;   /* NULL, and tier_ops too: the configuration wants no tier */
    struct share *share; /* NULL: nothing is shared with other hosts */
    struct seal *seal;   /* NULL: nothing is encrypted */
    struct device_set *devices;
    struct requests *requests;
    struct front *front;
    struct observe *observe; /* NULL: nobody may look */
    struct notify notify;
    uv_signal_t term, intr, hup;
    uv_timer_t stop_timer;
    struct turns turns;
    uint64_t stop_at_ms, progress_seen;
    /* DRAINING: requests and write-behind have until stop_at_ms. DROPPING: what is left was stopped,
     * connections end. SNAPSHOT: the list of parts in DRAM is being written. */
    enum { SERVING, DRAINING, DROPPING, SNAPSHOT, STOPPED } state;
    int exit_status;
};

/* ---- stopping ---- */

static void unrecorded_tell(struct server *s)
{
    uint64_t bytes;
    uint32_t n = cache_ns_unrecorded(s->cache, &bytes);

    if (bytes == 0)
        return;
    log_error("server", "namespaces-not-recorded",
              "namespaces=%u bytes=%" PRIu64
              ": the next start does not find what the tier has of them",
              n, bytes);
    if (s->exit_status == 0)
        s->exit_status = 1;
}

/* In a signal's handler: what can't be called there is not. */
static void sync_late_cb(int number)
{
    static const char text[] =
        "ucmd: error: a disk does not answer: what was written last may not be found again\n";
    struct pollfd err = {.fd = STDERR_FILENO, .events = POLLOUT};

    (void)number;
    log_flush();
    /* Who stopped reading is not waited for. */
    if (poll(&err, 1, 0) != 1 || write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        _exit(2); /* nobody to tell */
    _exit(1);
}

/* The exit status says when the last writes may not be found again. */
static void tier_stop(struct server *s)
{
    if (!s->tier)
        return;
    unrecorded_tell(s);
    (void)signal(SIGALRM, sync_late_cb);
    (void)alarm((unsigned)(s->config.drain_ms / 1000) + 1); /* a disk may hang, too */
    if (s->tier_ops->sync(s->tier) != 0) {
        log_error("server", "sync-failed", "%s", "what was written last may not be found again");
        if (s->exit_status == 0)
            s->exit_status = 1;
    }
    (void)alarm((unsigned)(s->config.drain_ms / 1000) + 1); /* the same for what closing writes */
    s->tier_ops->close(s->tier);
    (void)alarm(0);
}

static uint32_t server_share_busy(const struct server *s)
{
    return s->share ? share_busy(s->share) : 0;
}

/* A thread hangs in a mounted folder and may still write to its slot, so nothing can be freed. The tier
 * is synced and closed in order, then the process exits. Where not even that ends the thread, it holds what is
 * left of the process: neither memory nor locks that the next daemon wants. */
static void *descriptors_close(void *unused)
{
    (void)close_range(STDERR_FILENO + 1, ~0u, 0);
    return unused;
}

/* Lowest first: the daemon's own before those of clients, whose close() may wait. */
static void descriptors_close_awaited(void)
{
    struct timespec until;
    pthread_t thread;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    if (pthread_create(&thread, NULL, descriptors_close, NULL) == 0)
        (void)pthread_timedjoin_np(thread, NULL, &until); /* late: the process ends all the same */
}

static void stop_beside_share(struct server *s)
{
    log_error("server", "share-hangs", "operations=%u", server_share_busy(s));
    front_free(s->front);
    requests_free(s->requests);
    tier_stop(s);
    arena_give_up(s->arena);
    persist_close(s->persist); /* from here on the memory is the next daemon's */
    descriptors_close_awaited();
    log_flush();
    _exit(s->exit_status);
}

static void rooms_free(struct server *s)
{
    if (server_share_busy(s) > 0)
        stop_beside_share(s);
    s->state = STOPPED;
    observe_free(s->observe);
    front_free(s->front);
    requests_free(s->requests);
    tier_stop(s);
    share_close(s->share);
    seal_close(s->seal);
    device_set_free(s->devices);
    cache_free(s->cache);
    arena_free(s->arena);
    persist_close(s->persist);
    deadlines_close(&s->deadlines);
    notify_close(&s->notify);
    reaper_stop(s->reaper);
    uv_close((uv_handle_t *)&s->term, NULL);
    uv_close((uv_handle_t *)&s->intr, NULL);
    uv_close((uv_handle_t *)&s->hup, NULL);
    uv_close((uv_handle_t *)&s->stop_timer, NULL);
    turns_end(&s->turns);
}

/* Nobody uses the rooms any more. After a device failed there is no snapshot: it may have written where
 * it should not. */
static void stop_last(struct server *s)
{
    if (s->persist && s->exit_status == 0 && cache_snapshot_start(s->cache, s->persist) == 0) {
        s->state = SNAPSHOT;
        s->stop_at_ms = uv_now(&s->loop) + s->config.drain_ms;
        return;
    }
    uv_timer_stop(&s->stop_timer);
    rooms_free(s);
}

static void snapshot_tick(struct server *s, bool late)
{
    if (late)
        cache_snapshot_cut(s->cache);
    if (!cache_snapshot_ready(s->cache))
        return;
    cache_snapshot_finish(s->cache);
    uv_timer_stop(&s->stop_timer);
    rooms_free(s);
}

static void stop_tick_cb(uv_timer_t *timer)
{
    struct server *s = timer->data;
    bool late = uv_now(&s->loop) >= s->stop_at_ms;

    /* Waits for write-behind too: the next start finds what was written. */
    if (s->state == DRAINING &&
        ((requests_active(s->requests) == 0 && cache_written(s->cache)) || late)) {
        if (requests_active(s->requests) > 0)
            log_warn("server", "drain-cut", "requests=%u", requests_active(s->requests));
        requests_stop_all(s->requests);
        cache_stop_writing(s->cache);
        if (s->share)
            share_stop(s->share);
        s->state = DROPPING;
        /* As long again for copies under way; then the daemon exits even if one never ends. */
        s->stop_at_ms = uv_now(&s->loop) + s->config.drain_ms + 1000;
        return;
    }
    if (s->state == SNAPSHOT)
        snapshot_tick(s, late);
    if (s->state != DROPPING)
        return;
    if (requests_active(s->requests) == 0)
        front_drop_all(s->front);
    /* Builds outlive the sessions that asked for them. */
    if (requests_active(s->requests) == 0 && requests_sessions(s->requests) == 0 &&
        cache_tier_busy(s->cache) == 0 && cache_moves(s->cache) == 0) {
        if (server_share_busy(s) == 0 || share_hangs(s->share) || late)
            stop_last(s);
    } else if (late) {
        log_error("server", "stop-forced", "requests=%u sessions=%u tier=%u relocations=%u",
                  requests_active(s->requests), requests_sessions(s->requests),
                  cache_tier_busy(s->cache), cache_moves(s->cache));
        log_flush();
        _exit(s->exit_status ? s->exit_status : 1);
    }
}

static void server_stop(struct server *s, int exit_status)
{
    if (s->state != SERVING)
        return;
    s->state = DRAINING;
    s->exit_status = exit_status;
    notify_stopping();
    log_info("server", "stopping", "requests=%u", requests_active(s->requests));
    front_stop(s->front);
    requests_drain(s->requests);
    cache_ns_records_last(s->cache);
    observe_publish(s->observe);
    s->stop_at_ms = uv_now(&s->loop) + s->config.drain_ms;
    if (uv_timer_start(&s->stop_timer, stop_tick_cb, 0, STOP_TICK_MS) != 0)
        abort(); /* libuv: only for a closing handle */
}

static void term_cb(uv_signal_t *signal, int number)
{
    (void)number;
    server_stop(signal->data, 0);
}

static void hup_cb(uv_signal_t *signal, int number)
{
    struct server *s = signal->data;

    (void)number;
    if (s->state == SERVING)
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

static void extent_ready_cb(void *ctx, uint32_t extent, void *base, uint64_t bytes)
{
    struct server *s = ctx;

    if (s->tier)
        s->tier_ops->buffer_add(s->tier, extent, base, bytes);
    if (device_set_memory_add(s->devices, base, bytes) != 0)
        log_warn("server", "unpinned", "extent=%u reason=\"%s\"", extent, "no memory to note it");
    cache_arena_grew(s->cache);
}

/* The tier reads and writes it unregistered, a few per cent dearer: registered, the kernel would hold the memory
 * after it was given back, and another tenant could not have it before all reads have ended. */
static void window_cb(void *ctx, enum arena_lent_event event, uint32_t window, void *base,
                      uint64_t bytes)
{
    struct server *s = ctx;

    if (event == LENT_GOES)
        device_set_memory_remove(s->devices, base, bytes);
    else if (event == LENT_READY && device_set_memory_add(s->devices, base, bytes) != 0)
        log_warn("server", "unpinned", "window=%u reason=\"%s\"", window, "no memory to note it");
    cache_groups_changed(s->cache);
}

static void memory_removed_cb(void *ctx, void *base, uint64_t bytes)
{
    struct server *s = ctx;

    (void)bytes;
    arena_window_let_go(s->arena, arena_window_at(s->arena, base));
}

static void arena_ended_cb(void *ctx)
{
    struct server *s = ctx;

    cache_arena_grew(s->cache);
}

static bool progress_cb(void *ctx)
{
    struct server *s = ctx;
    uint64_t done = s->metrics.nvme_reads + s->metrics.nvme_writes + s->metrics.nvme_read_errors +
                    s->metrics.nvme_write_errors + s->metrics.nvme_corrupt +
                    s->metrics.arena_kept_parts + s->metrics.arena_kept_refused +
                    arena_bytes_ready(s->arena); /* what is kept waits for its extent */
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
        rc = uv_signal_init(&s->loop, &s->term);
    if (rc == 0)
        rc = uv_signal_init(&s->loop, &s->intr);
    if (rc == 0)
        rc = uv_signal_init(&s->loop, &s->hup);
    if (rc == 0)
        rc = uv_timer_init(&s->loop, &s->stop_timer);
    if (rc == 0)
        rc = reaper_new(&s->loop, &s->reaper);
    if (rc == 0)
        rc = turns_begin(&s->turns, &s->loop, s->metrics.histograms.loop_turn);
    if (rc == 0)
        rc = notify_init(&s->notify, &s->loop, progress_cb, s);
    s->term.data = s->intr.data = s->hup.data = s->stop_timer.data = s;
    if (rc == 0)
        rc = uv_signal_start(&s->term, term_cb, SIGTERM);
    if (rc == 0)
        rc = uv_signal_start(&s->intr, term_cb, SIGINT);
    if (rc == 0)
        rc = uv_signal_start(&s->hup, hup_cb, SIGHUP);
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
        .size = c->arena_size / c->arena_extent * c->arena_extent,
        .extent = c->arena_extent,
        .prefault = c->arena_prefault,
        .extent_ready_cb = extent_ready_cb,
        .numa = numa_used(s),
        .deadlines = &s->deadlines,
        .ended_cb = arena_ended_cb,
        .lent = c->window_size,
        .lent_max = memory_total(),
        .lent_cb = window_cb,
        .ctx = s,
    };
    bool warm = false;
    int rc = 0;

    if (c->arena_keep[0] != '\0') {
        char why[PERSIST_WHY_BYTES];

        rc = persist_open(c->arena_keep, &s->persist, why);
        if (rc != 0)
            return ucm_error_set(e, UCM_WIRE_IO, "%s", why);
        rc = cache_snapshot_open(s->persist, ac.size, ac.extent, &warm);
        if (rc != 0)
            return rc;
        ac.file = true;
        ac.fd = persist_fd(s->persist);
    }
    rc = arena_new(&s->loop, &ac, &s->arena);
    if (rc != 0)
        return rc;
    cache_arena_attach(s->cache, s->arena);
    s->reload.cache = s->cache;
    if (warm && cache_snapshot_load(s->cache, s->persist) != 0)
        log_warn("server", "snapshot-refused", "reason=\"%s\"", "no memory to take it over");
    return s->persist ? arena_grow(s->arena) : 0;
}

static int tier_init(struct server *s, struct ucm_error *e)
{
    struct tier_callbacks callbacks = cache_tier_callbacks(s->cache);
    size_t i = 0;
    int rc;

    callbacks.seal = s->seal;
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

static uint64_t bound_of(uint64_t setting)
{
    return setting > 0 ? setting : UINT64_MAX;
}

/* What a tenant's settings bound, besides namespaces, which the index bounds. */
static uint64_t setting_cb(void *ctx, const char *tenant, enum limit what)
{
    const struct tenant_set *set = ctx;
    const struct tenant *t = tenant_find(set, tenant);
    const struct tenant_settings *given = t ? &t->settings : &set->defaults;

    switch (what) {
    case LIMIT_CONNECTIONS:
        return bound_of(given->connections);
    case LIMIT_REQUESTS:
        return bound_of(given->requests);
    case LIMIT_MEMORY:
        return bound_of(given->memory);
    case LIMIT_LEASED:
        return bound_of(given->leased);
    case LIMIT_DIGESTS:
        return bound_of(given->dram_most / REQUESTS_HELD_FRACTION);
    default:
        return UINT64_MAX;
    }
}

/* Where DRAM is all there is, the smallest blocks of one part that fit there are the most that count; and some on their
 * way in. So blocks of which only a few parts are stored don't take more than that. */
#define BLOCKS_COMING 65536u

static uint64_t index_blocks_most(const struct config *c)
{
    uint64_t fit = c->arena_size / ARENA_ALIGN + BLOCKS_COMING;

    if (c->nvme_paths.n > 0 || c->share_roots.n > 0 || c->index_max_blocks < fit)
        return c->index_max_blocks;
    return fit;
}

static int cache_init(struct server *s, struct ucm_error *e)
{
    struct config *c = &s->config;
    struct cache_config cc = {.loop = &s->loop, .deadlines = &s->deadlines, .metrics = &s->metrics};
    int rc = seal_open(&s->loop, c, &s->metrics, &s->seal);

    cc.seal = s->seal;
    s->limits = limits_new();
    if (rc == 0)
        rc = s->limits ? index_new(index_blocks_most(c), c->max_namespaces, &s->index) : -ENOMEM;
    if (rc == 0)
        rc = tenant_set_configure(index_tenants(s->index), c);
    if (rc == 0) {
        index_limits(s->index, s->limits);
        limits_settings(s->limits, setting_cb, index_tenants(s->index));
    }
    if (rc == 0)
        tenants_kept_read(index_tenants(s->index), c);
    s->reload.index = s->index;
    if (rc == 0)
        rc = policy_new(s->index, c->arena_size / TYPICAL_PART_BYTES, &s->policy);
    if (rc != 0)
        return rc;
    /* At most half of the arena waits for the disk, so that loads find slots beside it. */
    cc.write_reused = c->nvme_admission == CONFIG_ADMIT_REUSE;
    cc.write_learned = c->nvme_admission == CONFIG_ADMIT_LEARNED;
    cc.backlog_bytes = c->nvme_backlog < c->arena_size / 2 ? c->nvme_backlog : c->arena_size / 2;
    cc.share_reused = c->share_admission == CONFIG_ADMIT_REUSE;
    cc.shared_blocks = c->index_max_blocks / 4;
    cc.index = s->index;
    cc.policy = s->policy;
    rc = cache_new(&cc, &s->cache);
    if (rc == 0)
        rc = tier_init(s, e);
    return rc == 0 ? arena_init(s, e) : rc;
}

static bool share_quota_cb(void *ctx, const char *tenant, uint64_t *guaranteed, uint64_t *most)
{
    const struct tenant_set *set = ctx;
    const struct tenant_settings *s = tenant ? tenant_settings_of(set, tenant) : &set->defaults;
    bool any = s->share_guaranteed > 0 || s->share_most > 0;

    for (const struct tenant *t = tenant_next(set, NULL); !tenant && !any && t;
         t = tenant_next(set, t))
        any = t->settings.share_guaranteed > 0 || t->settings.share_most > 0;
    if (tenant) {
        *guaranteed = s->share_guaranteed;
        *most = s->share_most;
    }
    return any;
}

/* Does no I/O on roots yet: a server that hangs does not delay the start. */
static int share_init(struct server *s, struct ucm_error *e)
{
    int rc = share_open(&s->loop, &s->deadlines, &s->config, s->seal, &s->metrics, &s->share, e);

    if (rc == 0 && s->share) {
        cache_share_attach(s->cache, s->share);
        share_quotas(s->share, share_quota_cb, index_tenants(s->index));
    }
    return rc;
}

static int devices_init(struct server *s, struct ucm_error *e)
{
    struct device_config dc = {.cpu_threads = s->config.cpu_threads,
                               .cuda = (int)s->config.cuda,
                               .strategy = (enum copy_strategy)s->config.copy_strategy,
                               .beside_percent = s->config.copy_beside,
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
    struct request_rooms rooms = {
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
        .share = s->share,
        .seal = s->seal,
        .persist = s->persist,
        .commit = ucm_build_commit,
        .options = ucm_build_options,
        .reload_cb = s->reload.sources->path ? reload_cb : NULL,
        .reload_ctx = &s->reload,
        .next = &s->reload.next,
    };
    struct front_handler handler;
    int rc, fd = notify_listen_fd();

    rooms.socket = fd < 0 ? s->config.socket : NULL;
    if (fd < -1)
        return ucm_error_set(e, UCM_WIRE_INVALID,
                             "socket activation gave several sockets; ucmd.socket must name one");
    if (getrandom(rooms.instance, sizeof(rooms.instance), 0) != sizeof(rooms.instance))
        return -EIO;
    rc = requests_new(&rooms, &s->requests);
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

/* The last one, so that whoever asks is told of a daemon that serves. */
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
        rc = share_init(s, e);
    if (rc == 0)
        rc = front_init(s, e);
    if (rc == 0 && s->persist)
        rc = persist_take(s->persist);
    if (rc == 0)
        rc = observe_init(s);
    if (rc != 0) {
        if (e->code == 0)
            ucm_error_set(e, UCM_WIRE_INTERNAL, "cannot start: %s", uv_strerror(rc));
        arena_free(s->arena); /* joins its thread */
        persist_close(s->persist);
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
