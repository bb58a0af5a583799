#include "daemon/gc/pass.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <string.h>

static bool is_marker(const char *name)
{
    return strspn(name, "0-") == 2 * UCM_MIN_KEY_BYTES + 1 + 2 * BLOCK_FILE_NAMESPACE_BYTES + 3 &&
           name[2 * UCM_MIN_KEY_BYTES] == '-';
}

/* Neither is counted, nor goes for space. */
static bool is_note(const char *name)
{
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES];

    return is_marker(name) || block_file_tenant_parse(name, namespace);
}

static struct gc_walk *walk_of(struct gc_sweep *s)
{
    return LIST_ENTRY(s, struct gc_walk, sweep);
}

/* Counts what the bucket holds now, without notes: other hosts may have written to it or
 * removed from it since it was last listed. */
static void listed_cb(struct gc_sweep *s, const struct shared_listing *l)
{
    struct gc_pass *pass = &walk_of(s)->pass;
    uint64_t bytes = 0;
    uint32_t files = 0;

    for (uint32_t i = 0; i < l->n; i++) {
        if (is_note(l->files[i].name))
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
static uint32_t cell_of(const struct gc_pass *pass, const struct shared_file *file,
                        size_t key_chars, bool highest)
{
    uint64_t age = gc_age(pass->now_ns, file->mtime_ns);

    return gc_cell(highest ? age : age - age / 8, file->name, key_chars);
}

static bool temp_old(const struct gc_pass *pass, const struct shared_file *file)
{
    return file->mtime_ns < pass->now_ns && pass->now_ns - file->mtime_ns >= GC_TEMP_AGE_NS;
}

static void add(struct gc_walk *w, struct gc_owner *o, uint32_t cell, uint64_t bytes)
{
    if (o)
        gc_quota_add(o, cell, bytes);
    else
        w->pass.ages.bytes[cell] += bytes;
}

/* Whether the root wants its space. */
static bool has_much(const struct gc_pass *pass)
{
    return pass->used_bytes > pass->pending && pass->used_bytes - pass->pending > pass->target;
}

static bool block_wanted(struct gc_walk *w, const struct shared_file *file,
                         const struct block_file_name *parsed, struct gc_owner *o)
{
    struct gc_pass *pass = &w->pass;
    bool highest = gc_parts_learn(&w->parts, parsed);
    uint32_t cell = cell_of(pass, file, parsed->key_chars, highest);

    if (!highest)
        pass->has_others = true;
    if (o)
        cell = gc_quota_cell(cell);
    if (pass->phase == GC_ADD)
        add(w, o, cell, file->bytes);
    if (pass->phase != (highest ? GC_HIGHEST : GC_OTHERS))
        return false;
    return (o && gc_quota_goes(o, cell)) ||
           (cell >= pass->cut && has_much(pass) && (!o || gc_quota_spares(o, cell, file->bytes)));
}

static bool note_wanted(const struct gc_walk *w, const struct shared_file *file)
{
    const struct gc_pass *pass = &w->pass;

    if (pass->phase != GC_ADD)
        return false;
    if (block_file_temp_valid(file->name))
        return temp_old(pass, file);
    return gc_quota_stale(&w->quota, file->name, gc_age(pass->now_ns, file->mtime_ns));
}

static bool wanted_cb(struct gc_sweep *s, const struct shared_file *file)
{
    struct gc_walk *w = walk_of(s);
    struct block_file_name parsed;
    struct gc_owner *o;

    if (is_marker(file->name))
        return false;
    if (block_file_name_parse(file->name, &parsed) < 0) {
        bool is = note_wanted(w, file);

        w->pass.pending += is && !is_note(file->name) ? file->bytes : 0;
        return is;
    }
    o = gc_quota_owner(&w->quota, parsed.namespace, w->pass.phase == GC_ADD);
    if (!block_wanted(w, file, &parsed, o))
        return false;
    w->pass.pending += file->bytes;
    if (o)
        o->pending += file->bytes;
    return true;
}

static void removed_cb(struct gc_sweep *s, const struct shared_file *file, int status)
{
    struct gc_walk *w = walk_of(s);
    struct gc_pass *pass = &w->pass;
    struct block_file_name parsed;
    struct gc_owner *o = NULL;

    if (is_note(file->name))
        return;
    if (block_file_name_parse(file->name, &parsed) == 0)
        o = gc_quota_owner(&w->quota, parsed.namespace, false);
    pass->pending -= file->bytes;
    if (o)
        o->pending -= file->bytes;
    if (status < 0)
        return;
    if (o)
        o->bytes -= file->bytes;
    pass->used_bytes -= file->bytes;
    pass->used_files--;
    pass->buckets[s->bucket].bytes -= file->bytes;
    pass->buckets[s->bucket].files--;
    if (block_file_temp_valid(file->name))
        return;
    pass->removed++;
    pass->removed_bytes += file->bytes;
    w->config->root->config.metrics->shared_gc_removed++;
}

/* Bytes that the root is brought to; UINT64_MAX: it may stay as it is. */
static uint64_t target_of(const struct gc_walk *w)
{
    uint64_t capacity = w->config->root->config.capacity_bytes, low = w->config->low;
    uint64_t target = UINT64_MAX, used = w->pass.used_bytes;

    if (capacity && used > capacity)
        target = capacity / 100 * low + capacity % 100 * low / 100;
    if (w->pass.for_full && used / 100 * low < target)
        target = used / 100 * low;
    return target;
}

/* True: the root or a tenant holds too much, and there are files that may go. */
static bool cut_find(struct gc_walk *w)
{
    struct gc_pass *pass = &w->pass;
    uint64_t go = gc_quota_cut(&w->quota, w->config->low, &pass->ages);

    pass->target = target_of(w);
    pass->cut = GC_CELLS;
    pass->tenants_much = go > 0;
    if (pass->used_bytes <= pass->target || pass->used_bytes - pass->target <= go)
        return go > 0;
    pass->cut = gc_ages_cut(&pass->ages, pass->used_bytes - pass->target - go);
    if (pass->cut == GC_CELLS)
        log_warn("shared", "gc-none-old-enough", "root=%u used=%llu target=%llu",
                 w->config->root->number, (unsigned long long)pass->used_bytes,
                 (unsigned long long)pass->target);
    return pass->cut < GC_CELLS || go > 0;
}

/* False: there is no further phase. */
static bool phase_next(struct gc_walk *w)
{
    struct gc_pass *pass = &w->pass;

    if (pass->phase == GC_OTHERS)
        return false;
    return pass->phase++ == GC_ADD
               ? cut_find(w)
               : pass->has_others && (pass->used_bytes > pass->target || pass->tenants_much);
}

static void sweep_done_cb(struct gc_sweep *s, int status)
{
    struct gc_walk *w = walk_of(s);

    if (status < 0 && !s->stopped && !s->given_up) {
        w->pass.partly = status;
        status = 0;
    }
    if (status == 0 && phase_next(w)) {
        gc_sweep_start(&w->sweep);
        return;
    }
    gc_quota_ended(&w->quota, status == 0 && w->pass.partly == 0);
    w->ended_cb(w, status);
}

static const struct gc_sweep_ops sweep_ops = {.listed_cb = listed_cb,
                                              .wanted_cb = wanted_cb,
                                              .removed_cb = removed_cb,
                                              .done_cb = sweep_done_cb};

static void learned_cb(struct gc_quota *q, int status)
{
    struct gc_walk *w = LIST_ENTRY(q, struct gc_walk, quota);

    if (status == 0 && w->stopped)
        status = -ECANCELED;
    if (status < 0) {
        w->ended_cb(w, status);
        return;
    }
    gc_quota_begin(q);
    gc_sweep_init(&w->sweep, w->config->root, w->config->next, w->config->sync, &sweep_ops);
    gc_sweep_start(&w->sweep);
}

void gc_walk_begin(struct gc_walk *w, uint64_t now_ns, bool for_full)
{
    memset(&w->pass, 0, sizeof(w->pass));
    w->pass.now_ns = now_ns;
    w->pass.for_full = for_full;
    w->pass.began_ms = uv_now(w->config->root->config.loop);
    gc_quota_learn(&w->quota, w->config->root, learned_cb);
}

void gc_walk_stop(struct gc_walk *w)
{
    w->stopped = true;
    if (gc_quota_cancel(&w->quota))
        w->ended_cb(w, -ECANCELED);
    gc_sweep_stop(&w->sweep);
}

bool gc_walk_busy(const struct gc_walk *w)
{
    return w->sweep.active || gc_quota_busy(&w->quota);
}

void gc_walk_free(struct gc_walk *w)
{
    gc_quota_free(&w->quota);
}
