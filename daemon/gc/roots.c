/* The collectors of a share's roots: the share's side of gc.h. */
#include "daemon/gc/gc.h"
#include "daemon/share/share_internal.h"

#include <errno.h>

static struct gc *gc_of(const struct share *s, uint32_t root)
{
    return root < s->n ? s->roots[root]->gc : NULL;
}

static void full_cb(struct share_root *r)
{
    gc_full(r->gc);
}

/* The root that files of this one are copied to before they are removed. */
static struct share_root *colder(const struct share *s, uint32_t root)
{
    if (s->settings.spread != CONFIG_SPREAD_TIERED)
        return NULL;
    for (uint32_t i = root + 1; i < s->n; i++)
        if (!s->roots[i]->config.read_only)
            return s->roots[i];
    return NULL;
}

int share_collectors_open(struct share *s)
{
    int err = 0;

    for (uint32_t i = 0; err == 0 && s->settings.low > 0 && i < s->n; i++) {
        struct gc_config gc = {.root = s->roots[i],
                               .next = colder(s, i),
                               .sync = s->settings.sync,
                               .low = s->settings.low,
                               .collect_ms = s->settings.collect_ms};

        err = gc_new(&gc, &s->roots[i]->gc);
        s->roots[i]->full_cb = err == 0 ? full_cb : NULL;
    }
    return err;
}

void share_collectors_stop(struct share *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (gc_of(s, i))
            gc_stop(gc_of(s, i));
}

uint32_t share_collectors_busy(const struct share *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n; i++)
        n += gc_of(s, i) && gc_busy(gc_of(s, i));
    return n;
}

void share_collectors_close(struct share *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        gc_free(gc_of(s, i));
}

void share_collectors_stats(const struct share *s, uint32_t root, struct share_root_stats *out)
{
    struct gc_usage used = {0};

    if (gc_of(s, root))
        used = gc_usage(gc_of(s, root));
    out->used_bytes = used.bytes;
    out->files = used.files;
}

void share_quotas(struct share *s, share_quota_fn quota_cb, void *ctx)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (gc_of(s, i))
            gc_quotas(gc_of(s, i), quota_cb, ctx);
}

int share_collect(struct share *s, uint32_t root)
{
    return gc_of(s, root) ? gc_run(gc_of(s, root)) : -EINVAL;
}
