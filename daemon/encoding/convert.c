/* Between the two forms that a region's blocks may have: pages hold KV as it was computed, slots
 * may hold it in the form of the region's codec, tensor after tensor. */
#include "daemon/device/work.h"

#include <inttypes.h>

/* ---- registrations ---- */

static const char *tensor_name(const struct ucm_encoding_tensor *s)
{
    return s->kind == UCM_ENCODING_K ? "K" : "V";
}

static int check_tensor(const struct msg_region_register *m, uint32_t i,
                        const struct ucm_encoding_spec *encoding, uint32_t tensor,
                        struct ucm_error *e)
{
    const struct msg_plane *p = &m->planes.p[i];
    uint64_t bytes = ucm_encoding_raw_bytes(encoding, tensor);

    if (p->block_bytes != bytes)
        return ucm_error_set(
            e, UCM_WIRE_INVALID,
            "plane %u: block_bytes is %" PRIu64 " bytes; in this encoded namespace a layer has %u "
            "planes, and here its %s of %" PRIu64 " bytes belongs (K and V that lie side by "
            "side are two planes of one stride)",
            i, p->block_bytes, encoding->n_tensors, tensor_name(&encoding->tensor[tensor]), bytes);
    if ((m->handles.p[p->handle].offset + p->offset) % DEVICE_TENSOR_ALIGN != 0 ||
        p->stride % DEVICE_TENSOR_ALIGN != 0)
        return ucm_error_set(
            e, UCM_WIRE_INVALID,
            "plane %u: block 0 is at byte %" PRIu64 " of its memory and the stride is %" PRIu64
            "; in an encoded namespace both are multiples of %u",
            i, m->handles.p[p->handle].offset + p->offset, p->stride, DEVICE_TENSOR_ALIGN);
    return 0;
}

/* Tensors follow one another in a slot, as fragments do in a raw one. */
int region_tensors(const struct msg_region_register *m, struct device_region *r,
                   struct ucm_error *e)
{
    const struct ucm_encoding_spec *spec = &r->codec->spec;
    uint64_t slot_offset = 0;

    for (uint32_t i = 0, tensor = 0; i < r->n_planes; i++, tensor++) {
        uint64_t layer = m->planes.p[i].layer;
        int rc;

        if (i == 0 || m->planes.p[i - 1].layer != layer) {
            tensor = 0;
            slot_offset = layer * ucm_encoding_layer_bytes(spec);
        }
        /* Fragments of the right sizes can't be more than there are tensors: they add up to the
         * layer's bytes. */
        rc = check_tensor(m, i, spec, tensor, e);
        if (rc < 0)
            return rc;
        r->tensors[i] =
            (struct ucm_encoding_plane){.base = r->planes[i].base,
                                        .stride = r->planes[i].stride,
                                        .slot_offset = slot_offset,
                                        .bytes = (uint32_t)ucm_encoding_bytes(spec, tensor),
                                        .tensor = tensor};
        slot_offset += r->tensors[i].bytes;
    }
    return 0;
}

/* ---- copies ---- */

void job_convert(struct device_job *job, const struct job_piece *piece)
{
    const struct ucm_encoding_spec *encoding = &job->region->codec->spec;

    for (uint32_t i = piece->first_item; i < piece->first_item + piece->n_items; i++)
        for (uint32_t p = piece->first_plane; p < piece->first_plane + piece->n_planes; p++) {
            const struct ucm_encoding_plane *plane = &job->region->tensors[p];
            void *slot = (void *)(uintptr_t)(job->items[i].slot + plane->slot_offset);
            void *page = (void *)(uintptr_t)(plane->base + job->items[i].block * plane->stride);

            if (job->op == DEVICE_LOAD)
                ucm_decode(encoding, plane->tensor, slot, page);
            else
                ucm_encode(encoding, plane->tensor, page, slot);
        }
    if (job->op == DEVICE_DUMP)
        job_mark_unfit(job, piece);
}

static bool item_fits(const struct device_job *job, const struct job_piece *piece, uint32_t item)
{
    const struct device_region *r = job->region;

    for (uint32_t p = piece->first_plane; p < piece->first_plane + piece->n_planes; p++) {
        const struct ucm_encoding_plane *c = &r->tensors[p];
        const void *encoded = (const void *)(uintptr_t)(job->items[item].slot + c->slot_offset);

        if (!ucm_encoding_fits(&r->codec->spec, c->tensor, encoded))
            return false;
    }
    return true;
}

void job_mark_unfit(struct device_job *job, const struct job_piece *piece)
{
    if (!job->unfit)
        return;
    for (uint32_t i = piece->first_item; i < piece->first_item + piece->n_items; i++)
        if (!item_fits(job, piece, i))
            atomic_store_explicit(&job->unfit[i], 1, memory_order_relaxed);
}
