/* Opening, closing and counters of the shared tier. */
#include "daemon/shared/shared.h"

#include "daemon/config/roots.h"
#include "daemon/shared/shared_internal.h"
#include "proto/errors.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static void ready_cb(void *ctx)
{
    struct shared *s = ctx;

    shared_encrypted_go_on(s);
    shared_purges_go_on(s);
    shared_removals_go_on(s);
    if (s->ready_cb)
        s->ready_cb(s->ready_ctx);
}

/* Encrypted parts have other names now, or may be written. */
static void secrets_changed_cb(void *ctx)
{
    struct shared *s = ctx;

    if (s->stopped)
        return;
    if (s->secrets_cb)
        s->secrets_cb(s->ready_ctx);
    ready_cb(s);
}

/* ---- opening ---- */

static int root_open(struct shared *s, struct shared_root_config *config)
{
    int err;

    config->loop = s->settings.loop;
    config->deadlines = s->settings.deadlines;
    config->metrics = s->settings.metrics;
    config->host = s->settings.host;
    config->timeout_ms = s->settings.timeout_ms;
    config->ready_cb = ready_cb;
    config->ctx = s;
    err = shared_root_open(config, &s->roots[s->n]);
    if (err < 0)
        return err;
    s->n++;
    s->roots[s->n - 1]->number = s->n;
    return 0;
}

int shared_new(const struct shared_settings *settings, struct shared **out)
{
    struct shared *s = calloc(1, sizeof(*s));
    int err;

    if (!s)
        return -ENOMEM;
    s->settings = *settings;
    list_init(&s->lookups);
    list_init(&s->purges);
    list_init(&s->encrypted);
    if (getrandom(&s->hash_seed, sizeof(s->hash_seed), 0) != sizeof(s->hash_seed))
        s->hash_seed = uv_hrtime();
    err = shared_removals_init(s, settings->n);
    if (err == 0)
        err = answer_cache_init(&s->answers, SHARED_ANSWERS);
    if (err == 0)
        err = shared_secrets_open(s, secrets_changed_cb);
    for (uint32_t i = 0; err == 0 && i < settings->n; i++)
        err = root_open(s, &s->settings.roots[i]);
    if (err == 0)
        err = shared_collectors_open(s);
    if (err < 0) {
        shared_close(s);
        return err;
    }
    *out = s;
    return 0;
}

/* config_roots lets absolute paths, nfs://, s3://, mooncake:// and process: pass, nothing else. */
static const char *kind_of(const struct config_root *r)
{
    if (strncmp(r->target, CONFIG_PROCESS, strlen(CONFIG_PROCESS)) == 0)
        return "process";
    if (r->target[0] == '/')
        return "directory";
    if (strncmp(r->target, "mooncake://", 11) == 0)
        return "mooncake";
    return strncmp(r->target, "s3://", 5) == 0 ? "s3" : "nfs";
}

static void roots_take(const struct config *c, const struct config_root *roots,
                       struct shared_settings *settings)
{
    for (uint32_t i = 0; i < settings->n; i++)
        settings->roots[i] = (struct shared_root_config){
            .ops = &shared_process,
            .kind = kind_of(&roots[i]),
            .target = roots[i].target,
            .process = &roots[i].process,
            .launcher = "/proc/self/exe",
            .depth = roots[i].target[0] == '/' ? c->shared_threads : c->shared_queue_depth,
            .capacity_bytes = roots[i].capacity_bytes,
            .read_only = roots[i].read_only};
}

int shared_open(struct uv_loop_s *loop, struct deadlines *deadlines, const struct config *c,
                struct encryption *encryption, struct metrics *metrics, struct shared **out,
                struct ucm_error *e)
{
    struct config_root roots[UCM_MAX_ROOTS];
    struct shared_settings settings = {.loop = loop,
                                       .deadlines = deadlines,
                                       .metrics = metrics,
                                       .encryption = encryption,
                                       .secrets = c->encryption_secrets,
                                       .secrets_ms = c->encryption_timeout_ms,
                                       .placement = c->shared_placement,
                                       .sync = c->shared_sync,
                                       .low = CONFIG_SHARED_LOW,
                                       .negative_ms = c->shared_negative_ms,
                                       .timeout_ms = c->shared_timeout_ms,
                                       .collect_ms = c->shared_gc_interval_ms,
                                       .touch_ms = c->shared_touch_ms};
    struct config_error wrong;
    char host[256] = "";
    int err = config_roots(c, roots, &settings.n, &wrong);

    *out = NULL;
    if (err < 0) {
        ucm_error_set(e, UCM_WIRE_INVALID, "%s", wrong.text);
        return err;
    }
    if (settings.n == 0)
        return 0;
    (void)gethostname(host, sizeof(host) - 1); /* without it the start time tells hosts apart */
    settings.host = host;
    roots_take(c, roots, &settings);
    err = shared_new(&settings, out);
    for (uint32_t i = 0; err == 0 && i < settings.n; i++)
        shared_root_check((*out)->roots[i]); /* a root that is missing shows in health and log */
    if (err < 0)
        ucm_error_set(e, UCM_WIRE_IO, "shared.roots: %s", strerror(-err));
    return err;
}

/* ---- ending ---- */

void shared_stop(struct shared *s)
{
    if (s->stopped)
        return;
    s->stopped = true;
    shared_purges_stop(s);
    shared_removals_stop(s);
    shared_encrypted_go_on(s);
    shared_collectors_stop(s);
    for (uint32_t i = 0; i < s->n; i++)
        shared_root_stop(s->roots[i]);
}

uint32_t shared_busy(const struct shared *s)
{
    uint32_t n = s->n_lookups + !list_empty(&s->purges) + s->encrypting +
                 !list_empty(&s->removals) + !list_empty(&s->unnamed) + shared_collectors_busy(s);

    for (uint32_t i = 0; i < s->n; i++)
        n += shared_root_busy(s->roots[i]);
    return n;
}

void shared_give_up(struct shared *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        shared_root_give_up(s->roots[i]);
}

void shared_close(struct shared *s)
{
    if (!s)
        return;
    shared_stop(s);
    shared_collectors_close(s);
    for (uint32_t i = 0; i < s->n; i++)
        shared_root_close(s->roots[i]);
    shared_secrets_close(s);
    answer_cache_close(&s->answers);
    free(s->removers);
    free(s);
}

void shared_on_ready(struct shared *s, void (*cb)(void *ctx), void (*secrets_cb)(void *ctx),
                     void *ctx)
{
    s->ready_cb = cb;
    s->secrets_cb = secrets_cb;
    s->ready_ctx = ctx;
}

/* ---- for operators ---- */

uint32_t shared_roots(const struct shared *s)
{
    return s ? s->n : 0;
}

void shared_stats(const struct shared *s, uint32_t root, struct shared_root_stats *out)
{
    shared_root_stats_get(s->roots[root], out);
    shared_collectors_stats(s, root, out);
}
