#include "daemon/cuda/plan.h"

#include <stdbool.h>

/* Planes [first, end) whose fragments are one run of bytes on both sides. */
struct run {
    uint32_t first, end;
    uint64_t width;
};

static struct run run_at(const struct ucm_copy_plane *planes, uint32_t first, uint32_t n_planes)
{
    struct run r = {first, first + 1, planes[first].block_bytes};

    for (; r.end < n_planes; r.end++) {
        const struct ucm_copy_plane *a = &planes[r.end - 1], *b = &planes[r.end];

        if (b->base != a->base + a->block_bytes ||
            b->slot_offset != a->slot_offset + a->block_bytes || b->stride != a->stride ||
            b->memory != a->memory)
            break;
        r.width += b->block_bytes;
    }
    return r;
}

/* ---- one item after the other, rows over planes ---- */

/* Is the run the next row of `e`? The second row sets the pitch. */
static bool row_joins(const struct plan_extent *e, const struct ucm_copy_plane *first,
                      const struct ucm_copy_plane *next, uint64_t width)
{
    uint64_t page_pitch, slot_pitch;

    if (width != e->width || next->memory != first->memory || next->stride != first->stride ||
        next->base <= first->base || next->slot_offset <= first->slot_offset)
        return false;
    page_pitch = (next->base - first->base) / e->rows;
    slot_pitch = (next->slot_offset - first->slot_offset) / e->rows;
    if (page_pitch * e->rows != next->base - first->base ||
        slot_pitch * e->rows != next->slot_offset - first->slot_offset)
        return false;
    if (e->rows > 1)
        return page_pitch == e->page_pitch && slot_pitch == e->slot_pitch;
    return page_pitch >= width && slot_pitch >= width && page_pitch <= PLAN_PITCH_MAX &&
           slot_pitch <= PLAN_PITCH_MAX;
}

/* The extent of block 0 in a slot at 0 that begins at plane *p; advances *p past it. */
static struct plan_extent rows_at(const struct ucm_copy_plane *planes, uint32_t *p,
                                  uint32_t n_planes)
{
    const struct ucm_copy_plane *first = &planes[*p];
    struct run r = run_at(planes, *p, n_planes);
    struct plan_extent e = {first->slot_offset, first->base, r.width, r.width, r.width, 1};

    while (r.end < n_planes) {
        const struct ucm_copy_plane *next = &planes[r.end];
        struct run after = run_at(planes, r.end, n_planes);

        if (!row_joins(&e, first, next, after.width))
            break;
        e.page_pitch = (next->base - first->base) / e.rows;
        e.slot_pitch = (next->slot_offset - first->slot_offset) / e.rows;
        e.rows++;
        r = after;
    }
    *p = r.end;
    return e;
}

static uint32_t rows_over_planes(const struct ucm_copy_plane *planes, uint32_t n_planes)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < n_planes; n++)
        (void)rows_at(planes, &p, n_planes);
    return n;
}

static void emit_by_item(const struct ucm_copy_plane *planes, uint32_t n_planes,
                         const struct ucm_copy_item *items, uint32_t n_items,
                         struct plan_extent *out)
{
    for (uint32_t p = 0; p < n_planes;) {
        uint64_t stride = planes[p].stride;
        struct plan_extent e = rows_at(planes, &p, n_planes);

        for (uint32_t i = 0; i < n_items; i++, out++) {
            *out = e;
            out->slot += items[i].slot;
            out->page += items[i].block * stride;
        }
    }
}

/* ---- one plane after the other, rows over items ---- */

/* Counts the items from `first` on that are consecutive blocks in slots a fixed distance apart. */
static uint32_t items_in_row(const struct ucm_copy_item *items, uint32_t first, uint32_t n_items)
{
    uint32_t n = 1;
    uint64_t pitch;

    if (first + 1 == n_items || items[first + 1].slot <= items[first].slot)
        return 1;
    pitch = items[first + 1].slot - items[first].slot;
    if (pitch > PLAN_PITCH_MAX)
        return 1;
    for (; first + n < n_items; n++) {
        const struct ucm_copy_item *a = &items[first + n - 1], *b = a + 1;

        if (b->block != a->block + 1 || b->slot != a->slot + pitch || b->memory != a->memory)
            break;
    }
    return n;
}

static uint32_t item_rows(const struct ucm_copy_item *items, uint32_t n_items)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_items; n++)
        i += items_in_row(items, i, n_items);
    return n;
}

/* Number of runs of planes; 0 when some stride is too large for a pitch. */
static uint32_t plane_runs(const struct ucm_copy_plane *planes, uint32_t n_planes)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < n_planes; n++) {
        struct run r = run_at(planes, p, n_planes);

        if (planes[p].stride > PLAN_PITCH_MAX || planes[p].stride < r.width)
            return 0;
        p = r.end;
    }
    return n;
}

static void emit_by_plane(const struct ucm_copy_plane *planes, uint32_t n_planes,
                          const struct ucm_copy_item *items, uint32_t n_items,
                          struct plan_extent *out)
{
    for (uint32_t p = 0; p < n_planes;) {
        struct run r = run_at(planes, p, n_planes);

        for (uint32_t i = 0, n; i < n_items; i += n, out++) {
            n = items_in_row(items, i, n_items);
            *out = (struct plan_extent){.slot = items[i].slot + planes[p].slot_offset,
                                        .page = planes[p].base + items[i].block * planes[p].stride,
                                        .slot_pitch = r.width,
                                        .page_pitch = r.width,
                                        .width = r.width,
                                        .rows = n};
            if (n == 1)
                continue;
            out->slot_pitch = items[i + 1].slot - items[i].slot;
            out->page_pitch = planes[p].stride;
            if (out->slot_pitch == r.width && out->page_pitch == r.width) {
                out->width = out->slot_pitch = out->page_pitch = n * r.width;
                out->rows = 1;
            }
        }
        p = r.end;
    }
}

uint32_t plan_extents(const struct ucm_copy_plane *planes, uint32_t n_planes,
                      const struct ucm_copy_item *items, uint32_t n_items, struct plan_extent *out,
                      uint32_t max)
{
    uint64_t by_item = (uint64_t)rows_over_planes(planes, n_planes) * n_items;
    uint64_t by_plane = (uint64_t)plane_runs(planes, n_planes) * item_rows(items, n_items);

    if (by_plane > 0 && by_plane <= by_item) {
        if (by_plane > max)
            return 0;
        emit_by_plane(planes, n_planes, items, n_items, out);
        return (uint32_t)by_plane;
    }
    if (by_item > max)
        return 0;
    emit_by_item(planes, n_planes, items, n_items, out);
    return (uint32_t)by_item;
}
