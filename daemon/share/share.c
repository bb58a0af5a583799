/* Opening, closing and counters of the shared tier. */
#include "daemon/share/share.h"

#include "daemon/config/roots.h"
#include "daemon/share/share_internal.h"
#include "proto/errors.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static void ready_cb(void *ctx)
{
    struct share *s = ctx;

    share_encrypted_go_on(s);
    share_removals_go_on(s);
    if (s->ready_cb)
        s->ready_cb(s->ready_ctx);
}

/* Encrypted parts have other names now, or may be written. */
static void secrets_changed_cb(void *ctx)
{
    struct share *s = ctx;

    if (s->stopped)
        return;
    if (s->secrets_cb)
        s->secrets_cb(s->ready_ctx);
    ready_cb(s);
}

/* ---- opening ---- */

static int root_open(struct share *s, struct share_root_config *config)
{
    int err;

    config->loop = s->settings.loop;
    config->deadlines = s->settings.deadlines;
    config->metrics = s->settings.metrics;
    config->host = s->settings.host;
    config->deadline_ms = s->settings.deadline_ms;
    config->ready_cb = ready_cb;
    config->ctx = s;
    err = share_root_open(config, &s->roots[s->n]);
    if (err < 0)
        return err;
    s->n++;
    s->roots[s->n - 1]->number = s->n;
    return 0;
}

int share_new(const struct share_settings *settings, struct share **out)
{
    struct share *s = calloc(1, sizeof(*s));
    int err;

    if (!s)
        return -ENOMEM;
    s->settings = *settings;
    list_init(&s->lookups);
    list_init(&s->purges);
    list_init(&s->encrypted);
    if (getrandom(&s->hash_seed, sizeof(s->hash_seed), 0) != sizeof(s->hash_seed))
        s->hash_seed = uv_hrtime();
    err = share_removals_init(s, settings->n);
    if (err == 0)
        err = answer_cache_init(&s->answers, SHARE_ANSWERS);
    if (err == 0)
        err = share_secrets_open(s, secrets_changed_cb);
    for (uint32_t i = 0; err == 0 && i < settings->n; i++)
        err = root_open(s, &s->settings.roots[i]);
    if (err == 0)
        err = share_collectors_open(s);
    if (err < 0) {
        share_close(s);
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
                       struct share_settings *settings)
{
    for (uint32_t i = 0; i < settings->n; i++)
        settings->roots[i] = (struct share_root_config){
            .ops = &share_process,
            .kind = kind_of(&roots[i]),
            .target = roots[i].target,
            .process = &roots[i].process,
            .launcher = "/proc/self/exe",
            .depth = roots[i].target[0] == '/' ? c->share_threads : c->share_depth,
            .capacity_bytes = roots[i].capacity_bytes,
            .read_only = roots[i].read_only};
}

int share_open(struct uv_loop_s *loop, struct deadlines *deadlines, const struct config *c,
               struct encryption *encryption, struct metrics *metrics, struct share **out,
               struct ucm_error *e)
{
    struct config_root roots[UCM_MAX_ROOTS];
    struct share_settings settings = {.loop = loop,
                                      .deadlines = deadlines,
                                      .metrics = metrics,
                                      .encryption = encryption,
                                      .secrets = c->encryption_secrets,
                                      .secrets_ms = c->encryption_deadline_ms,
                                      .spread = c->share_spread,
                                      .sync = c->share_sync,
                                      .low = CONFIG_SHARE_LOW,
                                      .negative_ms = c->share_negative_ms,
                                      .deadline_ms = c->share_deadline_ms,
                                      .collect_ms = c->share_collect_ms,
                                      .touch_ms = c->share_touch_ms};
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
    err = share_new(&settings, out);
    for (uint32_t i = 0; err == 0 && i < settings.n; i++)
        share_root_check((*out)->roots[i]); /* a root that is missing shows in health and log */
    if (err < 0)
        ucm_error_set(e, UCM_WIRE_IO, "share.roots: %s", strerror(-err));
    return err;
}

/* ---- ending ---- */

void share_stop(struct share *s)
{
    if (s->stopped)
        return;
    s->stopped = true;
    share_purges_stop(s);
    share_removals_stop(s);
    share_encrypted_go_on(s);
    share_collectors_stop(s);
    for (uint32_t i = 0; i < s->n; i++)
        share_root_stop(s->roots[i]);
}

uint32_t share_busy(const struct share *s)
{
    uint32_t n = s->n_lookups + !list_empty(&s->purges) + s->encrypting +
                 !list_empty(&s->removals) + !list_empty(&s->unnamed) + share_collectors_busy(s);

    for (uint32_t i = 0; i < s->n; i++)
        n += share_root_busy(s->roots[i]);
    return n;
}

void share_give_up(struct share *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        share_root_give_up(s->roots[i]);
}

void share_close(struct share *s)
{
    if (!s)
        return;
    share_stop(s);
    share_collectors_close(s);
    for (uint32_t i = 0; i < s->n; i++)
        share_root_close(s->roots[i]);
    share_secrets_close(s);
    answer_cache_close(&s->answers);
    free(s->removers);
    free(s);
}

void share_on_ready(struct share *s, void (*cb)(void *ctx), void (*secrets_cb)(void *ctx),
                    void *ctx)
{
    s->ready_cb = cb;
    s->secrets_cb = secrets_cb;
    s->ready_ctx = ctx;
}

/* ---- for operators ---- */

uint32_t share_roots(const struct share *s)
{
    return s ? s->n : 0;
}

void share_stats(const struct share *s, uint32_t root, struct share_root_stats *out)
{
    share_root_stats_get(s->roots[root], out);
    share_collectors_stats(s, root, out);
}
