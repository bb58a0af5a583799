/* The daemon's memory as the GPU reads it: which of the mapping's ranges the driver knows, and where blocks lie in them.
 * place[] here and the GPU's table are the same between calls. */
#include "client/cuda/decode.h"

#include "client/cuda/error.h"

#include <stdlib.h>
#include <string.h>

CUresult decode_places_upload(struct ucm_cuda_decode *d, uint32_t first, uint32_t last,
                              CUstream stream)
{
    CUresult r = cuMemcpyHtoDAsync(d->plan.gather.places + first * sizeof *d->place,
                                   &d->place[first], (last - first + 1) * sizeof *d->place, stream);

    return r == CUDA_SUCCESS ? cuStreamSynchronize(stream) : r;
}

/* ---- ranges ---- */

static void range_unregister(struct decode_range *m)
{
    (void)cuMemHostUnregister((void *)(uintptr_t)m->host);
}

/* The GPU's address; 0: of no range. */
static CUdeviceptr address_on_gpu(const struct ucm_cuda_decode *d, const void *host)
{
    uintptr_t at = (uintptr_t)host;

    for (uint32_t i = 0; i < d->n_ranges; i++) {
        const struct decode_range *m = &d->range[i];

        if (at - (uintptr_t)m->host < m->bytes)
            return m->gpu + (at - (uintptr_t)m->host);
    }
    return 0;
}

static struct decode_range *range_at(const struct ucm_cuda_decode *d, const void *host)
{
    for (uint32_t i = 0; i < d->n_ranges; i++)
        if (d->range[i].host == host)
            return &d->range[i];
    return NULL;
}

static int range_register(struct ucm_cuda_decode *d, const struct ucm_mapped_range *from)
{
    struct decode_range m = {.host = from->address, .bytes = from->bytes};
    CUresult r;

    if (d->n_ranges == d->ranges_room) {
        uint32_t room = d->ranges_room ? 2 * d->ranges_room : 16;
        struct decode_range *more = realloc(d->range, room * sizeof *more);

        if (!more)
            return cuda_fail(UCM_ENOMEMORY, "no memory for a mapping's ranges");
        d->range = more;
        d->ranges_room = room;
    }
    r = cuMemHostRegister((void *)(uintptr_t)m.host, m.bytes,
                          CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY);
    if (r != CUDA_SUCCESS)
        return cuda_fail_driver(r, "a mapping's memory can't be registered with the driver");
    r = cuMemHostGetDevicePointer(&m.gpu, (void *)(uintptr_t)m.host, 0);
    if (r != CUDA_SUCCESS) {
        range_unregister(&m);
        return cuda_fail_driver(r, "a mapping's memory has no address on the GPU");
    }
    d->range[d->n_ranges++] = m;
    return 0;
}

/* *list: malloc'd. */
static int ranges_list(struct ucm_mapping *mapping, struct ucm_mapped_range **list, uint32_t *n)
{
    uint32_t room = 64;

    for (;;) {
        int r;

        *list = malloc(room * sizeof **list);
        if (!*list)
            return cuda_fail(UCM_ENOMEMORY, "no memory for a mapping's ranges");
        r = cuda_pass(ucm_mapping_ranges(mapping, *list, room, n));
        if (r == 0 && *n <= room)
            return 0;
        free(*list);
        if (r != 0)
            return r;
        room = *n;
    }
}

/* To be given back, whether the daemon asked or its connection is gone. */
static bool is_wanted(const struct ucm_mapped_range *m, uint64_t opened)
{
    return m->wanted != 0 || m->opened != opened;
}

/* The gather reads all layers of a block, and checks nothing: after it lies another one. */
static int part_check(const struct ucm_cuda_decode *d, const struct ucm_mapping_info *info)
{
    const struct ucm_cuda_decode_options *o = &d->plan.options;

    if (info->part_bytes < o->layers * o->layer_bytes)
        return cuda_fail(UCM_EINVALID, "a block of the mapping has %llu bytes; %u layers have %llu",
                         (unsigned long long)info->part_bytes, o->layers,
                         (unsigned long long)(o->layers * o->layer_bytes));
    return 0;
}

/* At most `most` of those that the driver does not know yet; *left: the others. */
static int ranges_register(struct ucm_cuda_decode *d, uint32_t most, uint32_t *left)
{
    struct ucm_mapped_range *list;
    struct ucm_mapping_info info;
    uint32_t n, done = 0, unknown = 0;
    int r = cuda_pass(ucm_mapping_info(d->mapping, &info));

    if (r == 0)
        r = part_check(d, &info);
    if (r == 0)
        r = ranges_list(d->mapping, &list, &n);
    if (r != 0)
        return r;
    for (uint32_t i = 0; r == 0 && i < n; i++) {
        if (is_wanted(&list[i], info.opened) || range_at(d, list[i].address))
            continue;
        unknown++;
        if (done < most) {
            r = range_register(d, &list[i]);
            done++;
        }
    }
    free(list);
    *left = unknown - done;
    return r;
}

/* The mapping is this handle's from now on, if it has none. */
static int mapping_take(struct ucm_cuda_decode *d, struct ucm_mapping *mapping, uint32_t most,
                        uint32_t *left)
{
    int r;

    if (d->mapping && d->mapping != mapping)
        return cuda_fail(UCM_EINVALID, "places are of another mapping; leave that one first");
    d->mapping = mapping;
    r = ranges_register(d, most, left);
    if (r != 0 && d->n_ranges == 0)
        d->mapping = NULL; /* it may be closed now */
    return r;
}

int ucm_cuda_decode_mapping_register(struct ucm_cuda_decode *d, struct ucm_mapping *mapping,
                                     uint32_t most, uint32_t *left)
{
    uint32_t others = 0;
    int r;

    if (!d || !mapping || !left)
        return cuda_fail(UCM_EINVALID, "decode, mapping or left is NULL");
    r = cuda_enter(d->context);
    if (r != 0)
        return r;
    pthread_mutex_lock(&d->mapping_lock);
    r = mapping_take(d, mapping, most, &others);
    pthread_mutex_unlock(&d->mapping_lock);
    ucm_context_leave();
    if (r == 0)
        *left = others;
    return r;
}

/* ---- places ---- */

static struct ucm_entries_place place_of(struct ucm_cuda_decode *d, const struct ucm_place *place)
{
    struct ucm_entries_place p = {.told = place->seq};
    const uint64_t *seq;
    const void *bytes;

    if (place->slab == UCM_PLACE_NONE || ucm_mapping_address(d->mapping, place, &bytes, &seq) != 0)
        return (struct ucm_entries_place){0};
    p.bytes = address_on_gpu(d, bytes);
    p.seq = address_on_gpu(d, seq);
    return p.bytes != 0 && p.seq != 0 ? p : (struct ucm_entries_place){0};
}

static CUresult places_set(struct ucm_cuda_decode *d, const uint32_t *numbers,
                           const struct ucm_place *places, uint32_t n, CUstream stream)
{
    uint32_t first = UINT32_MAX, last = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t number = numbers[i];

        d->place[number] = places ? place_of(d, &places[i]) : (struct ucm_entries_place){0};
        first = number < first ? number : first;
        last = number > last ? number : last;
    }
    return n > 0 ? decode_places_upload(d, first, last, stream) : CUDA_SUCCESS;
}

int ucm_cuda_decode_places(struct ucm_cuda_decode *d, struct ucm_mapping *mapping,
                           const uint32_t *numbers, const struct ucm_place *places, uint32_t n,
                           void *stream)
{
    CUresult rc = CUDA_SUCCESS;
    uint32_t left;
    int r;

    if (!d || (n > 0 && !numbers) || (places && !mapping))
        return cuda_fail(UCM_EINVALID,
                         "decode or numbers is NULL, or places is not and mapping is");
    for (uint32_t i = 0; i < n; i++)
        if (numbers[i] >= d->plan.shape.numbers)
            return cuda_fail(UCM_EINVALID, "number %u of %u", numbers[i], d->plan.shape.numbers);
    r = cuda_enter(d->context);
    if (r != 0)
        return r;
    pthread_mutex_lock(&d->mapping_lock);
    if (places)
        r = mapping_take(d, mapping, UINT32_MAX, &left);
    if (r == 0)
        rc = places_set(d, numbers, places, n, stream);
    pthread_mutex_unlock(&d->mapping_lock);
    ucm_context_leave();
    return rc == CUDA_SUCCESS ? r : cuda_fail_driver(rc, "places can't be copied to the GPU");
}

/* ---- giving back ---- */

static bool lies_in(uint64_t address, const struct decode_range *m)
{
    return address - m->gpu < m->bytes;
}

static bool lies_in_wanted(const struct ucm_cuda_decode *d, const struct ucm_entries_place *p)
{
    for (uint32_t i = 0; i < d->n_ranges; i++)
        if (d->range[i].wanted &&
            (lies_in(p->bytes, &d->range[i]) || lies_in(p->seq, &d->range[i])))
            return true;
    return false;
}

/* Places in ranges that are wanted become none, here and on the GPU. */
static CUresult places_clear(struct ucm_cuda_decode *d, uint32_t *lost, CUstream stream)
{
    for (uint32_t i = 0; i < d->plan.shape.numbers; i++)
        if (d->place[i].bytes != 0 && lies_in_wanted(d, &d->place[i])) {
            d->place[i] = (struct ucm_entries_place){0};
            (*lost)++;
        }
    return decode_places_upload(d, 0, d->plan.shape.numbers - 1, stream);
}

/* No kernel reads ranges that are wanted any more. */
static void ranges_drop(struct ucm_cuda_decode *d)
{
    for (uint32_t i = 0; i < d->n_ranges;) {
        if (!d->range[i].wanted) {
            i++;
            continue;
        }
        range_unregister(&d->range[i]);
        d->range[i] = d->range[--d->n_ranges];
    }
}

void decode_mapping_end(struct ucm_cuda_decode *d)
{
    while (d->n_ranges > 0)
        range_unregister(&d->range[--d->n_ranges]);
    d->mapping = NULL;
}

/* One that can't be released now is on the next list again. */
static int ranges_release(struct ucm_mapping *mapping, const struct ucm_mapped_range *list,
                          uint32_t n, uint64_t opened)
{
    int r = 0;

    for (uint32_t i = 0; i < n; i++)
        if (is_wanted(&list[i], opened)) {
            int rc = cuda_pass(ucm_mapping_release(mapping, list[i].address));

            if (rc != 0 && rc != -UCM_ENOTFOUND)
                r = rc;
        }
    return r;
}

static int mapping_update(struct ucm_cuda_decode *d, uint32_t *lost, CUstream stream)
{
    struct ucm_mapped_range *list;
    struct ucm_mapping_info info;
    CUresult rc = CUDA_SUCCESS;
    bool any = false;
    uint32_t n;
    int r = cuda_pass(ucm_mapping_info(d->mapping, &info));

    if (r == 0)
        r = ranges_list(d->mapping, &list, &n);
    if (r != 0)
        return r;
    for (uint32_t i = 0; i < n; i++) {
        struct decode_range *m = range_at(d, list[i].address);

        if (m && is_wanted(&list[i], info.opened))
            any = m->wanted = true;
    }
    if (any)
        rc = places_clear(d, lost, stream);
    if (rc == CUDA_SUCCESS) {
        ranges_drop(d);
        r = ranges_release(d->mapping, list, n, info.opened);
    } else {
        r = cuda_fail_driver(rc, "places can't be copied to the GPU");
    }
    free(list);
    return r;
}

int ucm_cuda_decode_mapping_update(struct ucm_cuda_decode *d, uint32_t *lost, void *stream)
{
    uint32_t none = 0;
    int r = 0;

    if (!d)
        return cuda_fail(UCM_EINVALID, "decode is NULL");
    r = cuda_enter(d->context);
    if (r != 0)
        return r;
    pthread_mutex_lock(&d->mapping_lock);
    if (d->mapping)
        r = mapping_update(d, &none, stream);
    pthread_mutex_unlock(&d->mapping_lock);
    ucm_context_leave();
    if (r == 0 && lost)
        *lost = none;
    return r;
}

int ucm_cuda_decode_mapping_leave(struct ucm_cuda_decode *d, void *stream)
{
    CUresult rc;
    int r;

    if (!d)
        return cuda_fail(UCM_EINVALID, "decode is NULL");
    r = cuda_enter(d->context);
    if (r != 0)
        return r;
    pthread_mutex_lock(&d->mapping_lock);
    memset(d->place, 0, d->plan.shape.numbers * sizeof *d->place);
    rc = decode_places_upload(d, 0, d->plan.shape.numbers - 1, stream);
    if (rc == CUDA_SUCCESS)
        decode_mapping_end(d);
    pthread_mutex_unlock(&d->mapping_lock);
    return cuda_leave(rc, "places can't be copied to the GPU");
}
