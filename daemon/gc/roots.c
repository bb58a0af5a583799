/* The collectors of a shared tier's roots: the shared tier's side of gc.h. */
#include "daemon/gc/gc.h"
#include "daemon/shared/shared_internal.h"

#include <errno.h>

static struct gc *gc_of(const struct shared *s, uint32_t root)
{
    return root < s->n ? s->roots[root]->gc : NULL;
}

static void full_cb(struct shared_root *r)
{
    gc_full(r->gc);
}

/* The root that files of this one are copied to before they are removed. */
static struct shared_root *colder(const struct shared *s, uint32_t root)
{
    if (s->settings.placement != CONFIG_PLACEMENT_TIERED)
        return NULL;
    for (uint32_t i = root + 1; i < s->n; i++)
        if (!s->roots[i]->config.read_only)
            return s->roots[i];
    return NULL;
}

int shared_collectors_open(struct shared *s)
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

void shared_collectors_stop(struct shared *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (gc_of(s, i))
            gc_stop(gc_of(s, i));
}

uint32_t shared_collectors_busy(const struct shared *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n; i++)
        n += gc_of(s, i) && gc_busy(gc_of(s, i));
    return n;
}

void shared_collectors_close(struct shared *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        gc_free(gc_of(s, i));
}

void shared_collectors_stats(const struct shared *s, uint32_t root, struct shared_root_stats *out)
{
    struct gc_usage used = {0};

    if (gc_of(s, root))
        used = gc_usage(gc_of(s, root));
    out->used_bytes = used.bytes;
    out->files = used.files;
}

void shared_quotas(struct shared *s, shared_quota_fn quota_cb, void *ctx)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (gc_of(s, i))
            gc_quotas(gc_of(s, i), quota_cb, ctx);
}

int shared_collect(struct shared *s, uint32_t root)
{
    return gc_of(s, root) ? gc_run(gc_of(s, root)) : -EINVAL;
}
