/* The sweeps of one pass, and which files go. */
#include "daemon/share/gc_internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <string.h>

/* A class that would take this much more than is needed is looked at closer first. */
#define OVER_SHARE 128u

static struct gc *gc_of(struct gc_sweep *s)
{
    return LIST_ENTRY(s, struct gc, sweep);
}

/* What a bucket holds now, but for the marker; also what others removed from it and wrote to it
 * since it was last looked at. */
static void listed_cb(struct gc_sweep *s, const struct share_listing *l)
{
    struct gc_pass *pass = &gc_of(s)->pass;
    uint64_t bytes = 0;
    uint32_t files = 0;

    for (uint32_t i = 0; i < l->n; i++) {
        if (gc_is_marker(l->names + l->files[i].name))
            continue;
        bytes += l->files[i].bytes;
        files++;
    }
    if (l->unread > 0)
        pass->partly = -EIO;
    pass->used_bytes += bytes - pass->buckets[s->bucket].bytes;
    pass->used_files += files - (uint64_t)pass->buckets[s->bucket].files;
    pass->buckets[s->bucket].bytes = bytes;
    pass->buckets[s->bucket].files = files;
}

/* Parts below the highest count as an eighth younger: see gc.h. */
static uint64_t age_of(const struct gc_pass *pass, const struct share_file *file, bool highest)
{
    uint64_t age = gc_age(pass->now_ns, file->mtime_ns);

    return highest ? age : age - age / 8;
}

static bool temp_old(const struct gc_pass *pass, const struct share_file *file)
{
    return file->mtime_ns < pass->now_ns && pass->now_ns - file->mtime_ns >= GC_TEMP_AGE_NS;
}

/* Is it of this sweep, old enough, and still needed for the target? */
static bool block_wanted(const struct gc_pass *pass, const struct share_file *file, bool highest)
{
    if (highest != (pass->phase == GC_HIGHEST) || age_of(pass, file, highest) < pass->cut_ns)
        return false;
    return pass->used_bytes > pass->pending && pass->used_bytes - pass->pending > pass->target;
}

static bool wanted(struct gc *gc, const struct share_file *file, const char *name)
{
    struct gc_pass *pass = &gc->pass;
    struct gc_name parsed;
    bool highest;

    if (gc_is_marker(name))
        return false;
    if (gc_name_parse(name, &parsed) < 0)
        return pass->phase == GC_ADD && block_file_temp_valid(name) && temp_old(pass, file);
    highest = gc_parts_learn(&gc->parts, &parsed);
    if (!highest)
        pass->has_others = true;
    if (pass->phase == GC_HIGHEST || pass->phase == GC_OTHERS)
        return block_wanted(pass, file, highest);
    gc_ages_add(&pass->ages, age_of(pass, file, highest), file->bytes);
    return false;
}

static bool wanted_cb(struct gc_sweep *s, const struct share_file *file, const char *name)
{
    struct gc *gc = gc_of(s);
    bool is = wanted(gc, file, name);

    if (is)
        gc->pass.pending += file->bytes;
    return is;
}

static void removed_cb(struct gc_sweep *s, const struct share_file *file, const char *name,
                       int status)
{
    struct gc *gc = gc_of(s);
    struct gc_pass *pass = &gc->pass;

    pass->pending -= file->bytes;
    if (status < 0)
        return;
    pass->used_bytes -= file->bytes;
    pass->used_files--;
    pass->buckets[s->bucket].bytes -= file->bytes;
    pass->buckets[s->bucket].files--;
    if (block_file_temp_valid(name)) {
        gc->config.root->config.metrics->share_gc_temps++;
        return;
    }
    pass->removed++;
    pass->removed_bytes += file->bytes;
    gc->config.root->config.metrics->share_gc_removed++;
    gc->config.root->config.metrics->share_gc_bytes += file->bytes;
}

static int before_cb(struct gc_sweep *s, unsigned slot, const struct share_file *file,
                     const char *name)
{
    struct gc *gc = gc_of(s);

    if (!gc->config.next || block_file_temp_valid(name))
        return -ENOENT;
    return gc_demote_begin(&gc->demote, slot, file, name);
}

/* What the root is to be brought to, given what is on it: UINT64_MAX when it may stay as it is. */
static uint64_t target_of(const struct gc *gc)
{
    uint64_t capacity = gc->config.root->config.capacity_bytes, low = gc->config.low;
    uint64_t target = UINT64_MAX, used = gc->pass.used_bytes;

    if (capacity && used > capacity)
        target = capacity / 100 * low + capacity % 100 * low / 100;
    if (gc->pass.for_full && used / 100 * low < target)
        target = used / 100 * low;
    return target;
}

/* After ADD. True: it is over capacity and there are files that may go. */
static bool cut_find(struct gc *gc, bool *closer)
{
    struct gc_pass *pass = &gc->pass;
    struct gc_cut cut;

    pass->target = target_of(gc);
    if (pass->used_bytes <= pass->target)
        return false;
    cut = gc_ages_cut(&pass->ages, pass->used_bytes - pass->target);
    if (cut.age_ns == GC_AGE_NEVER) {
        log_warn("share", "gc-none-old-enough", "root=%u used=%llu target=%llu",
                 gc->config.root->number, (unsigned long long)pass->used_bytes,
                 (unsigned long long)pass->target);
        return false;
    }
    pass->cut_ns = cut.age_ns;
    pass->need = cut.need;
    *closer = cut.over > pass->used_bytes / OVER_SHARE;
    return true;
}

/* After LOOK. */
static void cut_refine(struct gc_pass *pass)
{
    struct gc_cut cut = gc_ages_cut(&pass->ages, pass->need);

    if (cut.age_ns != GC_AGE_NEVER)
        pass->cut_ns = cut.age_ns;
}

/* The phase after one that has ended; false: none. */
static bool phase_next(struct gc *gc)
{
    struct gc_pass *pass = &gc->pass;
    bool closer = false;

    switch (pass->phase) {
    case GC_ADD:
        if (!cut_find(gc, &closer))
            return false;
        if (closer)
            gc_ages_init_within(&pass->ages, pass->cut_ns);
        pass->phase = closer ? GC_LOOK : GC_HIGHEST;
        return true;
    case GC_LOOK:
        cut_refine(pass);
        pass->phase = GC_HIGHEST;
        return true;
    case GC_HIGHEST:
        pass->phase = GC_OTHERS;
        return pass->has_others && pass->used_bytes > pass->target;
    default:
        return false;
    }
}

static void sweep_done_cb(struct gc_sweep *s, int status)
{
    struct gc *gc = gc_of(s);

    gc->config.root->config.metrics->share_gc_demoted += gc->demote.files;
    gc->demote.files = 0;
    if (status < 0 && !s->stopped && !s->given_up) {
        gc->pass.partly = status;
        status = 0;
    }
    if (status == 0 && phase_next(gc)) {
        status = gc_sweep_start(&gc->sweep);
        if (status == 0)
            return;
    }
    gc_pass_ended(gc, status);
}

static const struct gc_sweep_ops sweep_ops = {.listed_cb = listed_cb,
                                              .wanted_cb = wanted_cb,
                                              .removed_cb = removed_cb,
                                              .done_cb = sweep_done_cb,
                                              .before_cb = before_cb};

int gc_pass_begin(struct gc *gc, uint64_t now_ns, bool for_full)
{
    memset(&gc->pass, 0, sizeof(gc->pass));
    gc->pass.now_ns = now_ns;
    gc->pass.for_full = for_full;
    gc->pass.began_ms = uv_now(gc->config.root->config.loop);
    gc_ages_init(&gc->pass.ages);
    gc_sweep_init(&gc->sweep, gc->config.root, &sweep_ops);
    gc_demote_init(&gc->demote, &gc->sweep, gc->config.next, gc->config.sync);
    return gc_sweep_start(&gc->sweep);
}

void gc_pass_stop(struct gc *gc)
{
    gc_sweep_stop(&gc->sweep);
    gc_demote_stop(&gc->demote);
}
