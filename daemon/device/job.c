/* Jobs: what a copy names, blocks of a region and spans of slots; what must hold before it begins;
 * its pieces. */
#include "daemon/device/work.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

/* ---- what it names ---- */

void device_job_layers(struct device_job *job, uint32_t layer, uint32_t layers)
{
    const uint32_t *first = job->region->layer_first;

    assert(layers > 0 && layer + layers <= job->region->pages.layers);
    job->first_layer = layer;
    job->n_layers = layers;
    job->first_plane = first[layer];
    job->n_planes = first[layer + layers] - first[layer];
}

enum copy_way region_way(const struct device_region *r, const struct form *f)
{
    const struct codec *pages = r->pages.codec;
    bool same = f->layer_bytes == r->pages.layer_bytes;

    if (!f->codec)
        return same && !pages ? WAY_STRAIGHT : WAY_NONE;
    if (same && pages && codec_same(f->codec, pages))
        return WAY_STRAIGHT;
    return r->codec && codec_same(f->codec, r->codec) ? WAY_CONVERTED : WAY_NONE;
}

int device_job_add(struct device_job *job, const struct span *span, uint32_t block)
{
    enum copy_way way = job->converts ? WAY_CONVERTED : WAY_STRAIGHT;
    const struct device_region *r = job->region;
    uint64_t slot = (uintptr_t)span->origin;

    if (job->n_items >= job->cap_items || block >= r->blocks || region_way(r, span->form) != way ||
        span->pending != (job->op == DEVICE_DUMP))
        return -EINVAL;
    if (r->block_pool) { /* an entry takes any layer */
        if (span->n != 1)
            return -EINVAL;
    } else {
        if (span->form->layers != r->pages.layers || job->first_layer < span->first ||
            job->first_layer + job->n_layers > span->first + span->n)
            return -EINVAL;
        /* Planes count from the first layer that the region has. */
        slot -= span->first * span->form->layer_bytes;
    }
    job->items[job->n_items++] = (struct ucm_copy_item){.slot = slot, .block = block};
    return 0;
}

static int slot_order(const void *a, const void *b)
{
    const struct ucm_copy_item *x = a, *y = b;

    return (x->slot > y->slot) - (x->slot < y->slot);
}

void device_job_sort(struct device_job *job)
{
    uint32_t i = 1;

    while (i < job->n_items && job->items[i - 1].slot <= job->items[i].slot)
        i++;
    if (i < job->n_items)
        qsort(job->items, job->n_items, sizeof(*job->items), slot_order);
}

/* ---- whether it may begin, and its pieces ---- */

int job_refuse_late(struct device_job *job)
{
    return job_refuse(job, -ETIMEDOUT, UCM_WIRE_DEADLINE,
                      "the deadline passed before the copy could begin");
}

int job_refuse_deserted(struct device_job *job)
{
    return job_refuse(job, -ECANCELED, UCM_WIRE_CANCELLED,
                      "the worker hung up: its memory may be in use for something else");
}

bool job_late(const struct device_job *job, uint64_t now_ms)
{
    return job->deadline_ms != 0 && now_ms >= job->deadline_ms;
}

int job_check(struct device_job *job, uint64_t now_ms)
{
    const struct device_region *r = job->region;

    if (job_late(job, now_ms))
        return job_refuse_late(job);
    if (job->n_items == 0 || job->n_planes == 0 || job->first_plane >= r->n_planes ||
        job->n_planes > r->n_planes - job->first_plane)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "the copy names planes %u to %u; the region has %u", job->first_plane,
                          job->first_plane + job->n_planes, r->n_planes);
    if (job->converts && !r->tensors)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID, "the region's blocks are not encoded");
    for (uint32_t i = 0; i < job->n_items; i++)
        if (job->items[i].block >= r->blocks)
            return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                              "block id %u is out of range; the region has %u blocks",
                              job->items[i].block, r->blocks);
    return 0;
}

bool peer_hung_up(const int *peer_fd)
{
    struct pollfd p = {.events = POLLRDHUP};

    if (!peer_fd)
        return false;
    p.fd = *peer_fd;
    return poll(&p, 1, 0) > 0;
}

uint64_t job_plane_at(const struct device_job *job, uint32_t plane)
{
    return job->converts ? job->region->tensors[plane].slot_offset
                         : job->region->planes[plane].slot_offset;
}

uint32_t job_plane_bytes(const struct device_job *job, uint32_t plane)
{
    return job->converts ? job->region->tensors[plane].bytes
                         : job->region->planes[plane].block_bytes;
}

uint64_t job_item_bytes(const struct device_job *job, uint64_t *cost)
{
    const struct device_region *r = job->region;
    uint32_t first = job->first_plane, last = first + job->n_planes - 1;
    uint64_t least = (uint64_t)job->n_planes * JOB_FRAGMENT_COST, bytes;

    if (job->converts)
        bytes =
            r->tensors[last].slot_offset + r->tensors[last].bytes - r->tensors[first].slot_offset;
    else
        bytes = r->planes[last].slot_offset + r->planes[last].block_bytes -
                r->planes[first].slot_offset;
    if (cost)
        *cost = bytes > least ? bytes : least;
    return bytes;
}

static uint64_t plane_cost(const struct device_job *job, uint32_t p)
{
    uint32_t bytes = job_plane_bytes(job, job->first_plane + p);

    return bytes > JOB_FRAGMENT_COST ? bytes : JOB_FRAGMENT_COST;
}

/* One item is larger than a piece: takes as many of its planes as fit. */
static void cut_planes(struct device_job *job, uint64_t max_cost, struct job_piece *out)
{
    uint32_t p = job->next_plane;

    out->first_plane = job->first_plane + p;
    out->n_items = 1;
    out->bytes = out->cost = 0;
    do {
        out->cost += plane_cost(job, p);
        out->bytes += job_plane_bytes(job, job->first_plane + p++);
    } while (p < job->n_planes && out->cost + plane_cost(job, p) <= max_cost);
    out->n_planes = p - job->next_plane;
    job->next_plane = p % job->n_planes;
    job->next_item += p == job->n_planes;
}

bool job_next_piece(struct device_job *job, uint64_t max_cost, uint32_t max_items,
                    struct job_piece *out)
{
    uint64_t item_cost, item_bytes = job_item_bytes(job, &item_cost), n = max_cost / item_cost;

    assert(job->next_item < job->n_items);
    out->first_item = job->next_item;
    if (n == 0 || job->next_plane != 0) { /* or a smaller piece has begun this item */
        cut_planes(job, max_cost, out);
        return job->next_item == job->n_items;
    }
    if (n > max_items)
        n = max_items;
    if (n > job->n_items - job->next_item)
        n = job->n_items - job->next_item;
    out->n_items = (uint32_t)n;
    out->first_plane = job->first_plane;
    out->n_planes = job->n_planes;
    out->bytes = n * item_bytes;
    out->cost = n * item_cost;
    job->next_item += out->n_items;
    return job->next_item == job->n_items;
}

/* Asks nothing that needs the lock of the file (SEEK_HOLE does): the peer may hold it. */
int job_check_memfd(struct device_job *job, const char *what, int fd, uint64_t offset,
                    uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = offset + bytes, there;
    struct statfs fs;
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s is not a memfd sealed with F_SEAL_SHRINK", what);
    if (fstatfs(fd, &fs) < 0 || fs.f_type != TMPFS_MAGIC)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s is not on tmpfs; a memfd without MFD_HUGETLB is right", what);
    if (fstat(fd, &st) < 0)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID, "%s: %s", what, strerror(errno));
    if (st.st_size < 0 || (uint64_t)st.st_size < end)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s: %" PRIu64 " bytes pass the memfd's %" PRIu64 " bytes", what, end,
                          (uint64_t)st.st_size);
    there = (uint64_t)st.st_blocks * 512 / page;
    if (there < (end - 1) / page - offset / page + 1)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "%s: pages are missing: the memfd has %" PRIu64 " for %" PRIu64
                          " bytes; write to all of its pages before it is registered, or make "
                          "them by MADV_POPULATE_WRITE",
                          what, there, bytes);
    return 0;
}
