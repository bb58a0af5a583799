/* What a copy names: blocks of a region, and spans of slots. */
#include "daemon/device/device.h"

#include <errno.h>
#include <stdlib.h>

static void planes_of(struct device_job *job, uint32_t shard, uint32_t shards)
{
    const uint32_t *first = job->region->shard_first;

    job->first_shard = shard;
    job->n_shards = shards;
    job->first_plane = first[shard];
    job->n_planes = first[shard + shards] - first[shard];
}

void device_job_init(struct device_job *job, enum device_op op, struct device_region *region,
                     bool coded, uint32_t shard, uint32_t shards)
{
    *job = (struct device_job){.op = op, .region = region, .coded = coded};
    planes_of(job, shard, shards);
}

void device_job_cut(const struct device_job *from, uint32_t shard, uint32_t shards,
                    struct device_job *out)
{
    assert(shards > 0 && shard >= from->first_shard &&
           shard + shards <= from->first_shard + from->n_shards);
    *out = *from;
    planes_of(out, shard, shards);
}

/* Whether the planes that the job moves are all of what the span has. A slot of a pool takes any
 * shard. */
static bool shards_fit(const struct device_job *job, const struct span *span)
{
    if (job->region->pool)
        return span->n == 1;
    return span->form->shards == job->region->pages.shards && job->first_shard >= span->first &&
           job->first_shard + job->n_shards <= span->first + span->n;
}

/* Planes count from the first shard that the region has. */
static uint64_t slot_of(const struct device_job *job, const struct span *span)
{
    uint64_t before = job->region->pool ? 0 : span->first * span->form->shard_bytes;

    return (uint64_t)(uintptr_t)span->origin - before;
}

int device_job_add(struct device_job *job, const struct span *span, uint32_t block)
{
    enum copy_way way = job->coded ? WAY_CODED : WAY_STRAIGHT;

    if (job->n_items >= job->cap_items || block >= job->region->blocks ||
        region_way(job->region, span->form) != way || !shards_fit(job, span) ||
        span->fill != (job->op == DEVICE_DUMP))
        return -EINVAL;
    job->items[job->n_items++] = (struct ucm_copy_item){.slot = slot_of(job, span), .block = block};
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
