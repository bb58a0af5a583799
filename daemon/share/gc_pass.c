/* The sweeps of one pass, and which files go. */
#include "daemon/share/gc_internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <string.h>

static struct gc *gc_of(struct gc_sweep *s)
{
    return LIST_ENTRY(s, struct gc, sweep);
}

/* Counts what the bucket holds now, without the marker: other hosts may have written to it or
 * removed from it since it was last listed. */
static void listed_cb(struct gc_sweep *s, const struct share_listing *l)
{
    struct gc_pass *pass = &gc_of(s)->pass;
    uint64_t bytes = 0;
    uint32_t files = 0;

    for (uint32_t i = 0; i < l->n; i++) {
        if (gc_is_marker(l->files[i].name))
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
static uint32_t cell_of(const struct gc_pass *pass, const struct share_file *file, size_t key_chars,
                        bool highest)
{
    uint64_t age = gc_age(pass->now_ns, file->mtime_ns);

    return gc_cell(highest ? age : age - age / 8, file->name, key_chars);
}

static bool temp_old(const struct gc_pass *pass, const struct share_file *file)
{
    return file->mtime_ns < pass->now_ns && pass->now_ns - file->mtime_ns >= GC_TEMP_AGE_NS;
}

static bool wanted(struct gc *gc, const struct share_file *file)
{
    struct gc_pass *pass = &gc->pass;
    struct block_file_name parsed;
    bool highest;
    uint32_t cell;

    if (gc_is_marker(file->name))
        return false;
    if (block_file_name_parse(file->name, &parsed) < 0)
        return pass->phase == GC_ADD && block_file_temp_valid(file->name) && temp_old(pass, file);
    highest = gc_parts_learn(&gc->parts, &parsed);
    if (!highest)
        pass->has_others = true;
    cell = cell_of(pass, file, parsed.key_chars, highest);
    if (pass->phase == GC_ADD)
        pass->ages.bytes[cell] += file->bytes;
    return pass->phase == (highest ? GC_HIGHEST : GC_OTHERS) && cell >= pass->cut &&
           pass->used_bytes > pass->pending && pass->used_bytes - pass->pending > pass->target;
}

static bool wanted_cb(struct gc_sweep *s, const struct share_file *file)
{
    struct gc *gc = gc_of(s);
    bool is = wanted(gc, file);

    if (is)
        gc->pass.pending += file->bytes;
    return is;
}

static void removed_cb(struct gc_sweep *s, const struct share_file *file, int status)
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
    if (block_file_temp_valid(file->name)) {
        gc->config.root->config.metrics->share_gc_temps++;
        return;
    }
    pass->removed++;
    pass->removed_bytes += file->bytes;
    gc->config.root->config.metrics->share_gc_removed++;
    gc->config.root->config.metrics->share_gc_bytes += file->bytes;
}

/* Bytes that the root is brought to; UINT64_MAX: it may stay as it is. */
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

/* True: the root holds too much, and there are files that may go. */
static bool cut_find(struct gc *gc)
{
    struct gc_pass *pass = &gc->pass;

    pass->target = target_of(gc);
    if (pass->used_bytes <= pass->target)
        return false;
    pass->cut = gc_ages_cut(&pass->ages, pass->used_bytes - pass->target);
    if (pass->cut == GC_CELLS)
        log_warn("share", "gc-none-old-enough", "root=%u used=%llu target=%llu",
                 gc->config.root->number, (unsigned long long)pass->used_bytes,
                 (unsigned long long)pass->target);
    return pass->cut < GC_CELLS;
}

/* False: there is no further phase. */
static bool phase_next(struct gc *gc)
{
    struct gc_pass *pass = &gc->pass;

    if (pass->phase == GC_OTHERS)
        return false;
    return pass->phase++ == GC_ADD ? cut_find(gc)
                                   : pass->has_others && pass->used_bytes > pass->target;
}

static void sweep_done_cb(struct gc_sweep *s, int status)
{
    struct gc *gc = gc_of(s);

    if (status < 0 && !s->stopped && !s->given_up) {
        gc->pass.partly = status;
        status = 0;
    }
    if (status == 0 && phase_next(gc)) {
        gc_sweep_start(&gc->sweep);
        return;
    }
    gc_pass_ended(gc, status);
}

static const struct gc_sweep_ops sweep_ops = {.listed_cb = listed_cb,
                                              .wanted_cb = wanted_cb,
                                              .removed_cb = removed_cb,
                                              .done_cb = sweep_done_cb};

void gc_pass_begin(struct gc *gc, uint64_t now_ns, bool for_full)
{
    memset(&gc->pass, 0, sizeof(gc->pass));
    gc->pass.now_ns = now_ns;
    gc->pass.for_full = for_full;
    gc->pass.began_ms = uv_now(gc->config.root->config.loop);
    gc_sweep_init(&gc->sweep, gc->config.root, gc->config.next, gc->config.sync, &sweep_ops);
    gc_sweep_start(&gc->sweep);
}
