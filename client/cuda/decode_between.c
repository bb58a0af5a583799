/* What happens between steps: requests, numbers, and keys that a step did not get. */
#include "client/cuda/decode.h"

#include "client/cuda/error.h"

#include <stdlib.h>
#include <string.h>

#define THREADS 256u

static uint32_t blocks_for(uint64_t threads)
{
    uint64_t blocks = (threads + THREADS - 1) / THREADS;

    return blocks < 1 ? 1 : blocks > 1024 ? 1024 : (uint32_t)blocks;
}

static CUresult download(void *to, const void *from, size_t bytes, CUstream stream)
{
    CUresult r = cuMemcpyDtoHAsync(to, (CUdeviceptr)(uintptr_t)from, bytes, stream);

    return r == CUDA_SUCCESS ? cuStreamSynchronize(stream) : r;
}

/* ---- requests ---- */

static int request_check(const struct ucm_cuda_decode *d, uint32_t request)
{
    if (!d)
        return cuda_fail(UCM_EINVALID, "decode is NULL");
    if (request >= d->plan.shape.requests)
        return cuda_fail(UCM_EINVALID, "request is %u of %u", request, d->plan.shape.requests);
    return 0;
}

int ucm_cuda_decode_enter(struct ucm_cuda_decode *d, uint32_t request, uint32_t floor, void *stream)
{
    uint64_t sum;
    CUresult rc;
    int r = request_check(d, request);

    if (r != 0)
        return r;
    sum = d->floors_sum - d->floors[request] + floor;
    if (sum > d->plan.shape.entries)
        return cuda_fail(UCM_ENOMEMORY,
                         "a floor of %u entries: %llu are kept for other requests, of %u", floor,
                         (unsigned long long)(sum - floor), d->plan.shape.entries);
    r = cuda_enter(d->context);
    if (r != 0)
        return r;
    d->scratch.key[0] = floor;
    rc = cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)&d->entries.floor[request], d->scratch.key,
                           sizeof floor, stream);
    if (rc == CUDA_SUCCESS)
        rc = cuStreamSynchronize(stream);
    if (rc == CUDA_SUCCESS) {
        d->floors_sum = sum;
        d->floors[request] = floor;
    }
    return cuda_leave(rc, "a floor can't be set");
}

int ucm_cuda_decode_leave(struct ucm_cuda_decode *d, uint32_t request, void *stream)
{
    CUresult rc;
    int r = request_check(d, request);

    if (r == 0)
        r = cuda_enter(d->context);
    if (r != 0)
        return r;
    rc = decode_launch(d, DECODE_LEAVE, blocks_for(d->plan.shape.entries), THREADS,
                       (void *[]){&d->entries, &request}, stream);
    if (rc == CUDA_SUCCESS)
        rc = cuStreamSynchronize(stream);
    if (rc == CUDA_SUCCESS) {
        d->floors_sum -= d->floors[request];
        d->floors[request] = 0;
    }
    return cuda_leave(rc, "a request can't leave");
}

/* ---- numbers ---- */

static CUresult forget_batch(struct ucm_cuda_decode *d, const uint32_t *numbers, uint32_t n,
                             CUstream stream)
{
    struct decode_scratch *s = &d->scratch;
    uint32_t first = numbers[0], last = numbers[0];
    CUresult r;

    for (uint32_t i = 0; i < n; i++) {
        s->key[i] = numbers[i];
        d->place[numbers[i]] = (struct ucm_entries_place){0};
        first = numbers[i] < first ? numbers[i] : first;
        last = numbers[i] > last ? numbers[i] : last;
    }
    r = cuMemcpyHtoDAsync(s->key_gpu, s->key, n * sizeof *s->key, stream);
    if (r == CUDA_SUCCESS)
        r = decode_launch(d, DECODE_FORGET, blocks_for((uint64_t)n * d->plan.shape.layer_heads),
                          THREADS, (void *[]){&d->entries, &s->key_gpu, &n}, stream);
    return r == CUDA_SUCCESS ? decode_places_upload(d, first, last, stream) : r;
}

int ucm_cuda_decode_forget(struct ucm_cuda_decode *d, const uint32_t *numbers, uint32_t n,
                           void *stream)
{
    CUresult rc = CUDA_SUCCESS;
    int r;

    if (!d || (n > 0 && !numbers))
        return cuda_fail(UCM_EINVALID, "decode or numbers is NULL");
    for (uint32_t i = 0; i < n; i++)
        if (numbers[i] >= d->plan.shape.numbers)
            return cuda_fail(UCM_EINVALID, "number %u of %u", numbers[i], d->plan.shape.numbers);
    r = cuda_enter(d->context);
    if (r != 0)
        return r;
    for (uint32_t at = 0; rc == CUDA_SUCCESS && at < n; at += d->plan.batch)
        rc = forget_batch(d, numbers + at, n - at < d->plan.batch ? n - at : d->plan.batch, stream);
    return cuda_leave(rc, "numbers can't be forgotten");
}

/* ---- what a step did not get ---- */

static int by_key(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static struct ucm_cuda_decode_key key_of(const struct ucm_cuda_decode *d, uint32_t key)
{
    uint32_t layer_head = key / d->plan.shape.numbers, heads = d->plan.gather.heads;

    return (struct ucm_cuda_decode_key){layer_head / heads, layer_head % heads,
                                        key % d->plan.shape.numbers};
}

/* *keys: malloc'd, ascending, each once. */
static CUresult keys_read(struct ucm_cuda_decode *d, uint32_t **keys, uint32_t *n, CUstream stream)
{
    struct ucm_entries_step step;
    uint32_t listed, kept = 0;
    CUresult r = download(&step, d->entries.step, sizeof step, stream);

    if (r != CUDA_SUCCESS)
        return r;
    listed = step.unserved < d->plan.shape.misses ? step.unserved : d->plan.shape.misses;
    *keys = malloc((listed ? listed : 1) * sizeof **keys);
    if (!*keys)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (listed > 0)
        r = download(*keys, d->entries.unserved, listed * sizeof **keys, stream);
    if (r != CUDA_SUCCESS) {
        free(*keys);
        return r;
    }
    qsort(*keys, listed, sizeof **keys, by_key);
    for (uint32_t i = 0; i < listed; i++)
        if (i == 0 || (*keys)[i] != (*keys)[i - 1])
            (*keys)[kept++] = (*keys)[i];
    *n = kept;
    return r;
}

int ucm_cuda_decode_unserved(struct ucm_cuda_decode *d, struct ucm_cuda_decode_key *out,
                             uint32_t room, uint32_t *n, void *stream)
{
    uint32_t *keys, all;
    CUresult rc;
    int r;

    if (!d || !n || (room > 0 && !out))
        return cuda_fail(UCM_EINVALID, "decode, n or out is NULL");
    r = cuda_enter(d->context);
    if (r != 0)
        return r;
    rc = keys_read(d, &keys, &all, stream);
    if (rc == CUDA_SUCCESS) {
        for (uint32_t i = 0; i < all && i < room; i++)
            out[i] = key_of(d, keys[i]);
        *n = all;
        free(keys);
    }
    return cuda_leave(rc, "keys can't be read");
}

static int item_check(const struct ucm_cuda_decode *d, const struct ucm_cuda_decode_put *item)
{
    const struct ucm_cuda_decode_key *k = &item->key;

    if (k->layer >= d->plan.options.layers || k->head >= d->plan.gather.heads ||
        k->number >= d->plan.shape.numbers)
        return cuda_fail(UCM_EINVALID, "layer %u, head %u, number %u: there are %u, %u and %u",
                         k->layer, k->head, k->number, d->plan.options.layers, d->plan.gather.heads,
                         d->plan.shape.numbers);
    if (item->from == 0 || item->from % 16 != 0)
        return cuda_fail(UCM_EINVALID, "from is 0, or no multiple of 16");
    return request_check(d, item->request);
}

/* Ends all misses, with the bytes of the batch's n. */
static CUresult launch_put(struct ucm_cuda_decode *d, uint32_t n, CUstream stream)
{
    struct decode_scratch *s = &d->scratch;

    return decode_launch(d, DECODE_PUT, 32, UCM_ENTRIES_CUDA_GATHER,
                         (void *[]){&d->entries, &d->plan.gather, &s->key_gpu, &s->from_gpu, &n},
                         stream);
}

static CUresult put_batch(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_put *items,
                          uint32_t n, CUstream stream)
{
    struct decode_scratch *s = &d->scratch;
    CUresult r;

    for (uint32_t i = 0; i < n; i++) {
        const struct ucm_cuda_decode_key *k = &items[i].key;

        s->from[i] = items[i].from;
        s->key[i] =
            ucm_entries_key(&d->plan.shape, k->layer * d->plan.gather.heads + k->head, k->number);
        s->request[i] = items[i].request;
    }
    r = cuMemcpyHtoDAsync(s->from_gpu, s->from, n * sizeof *s->from, stream);
    if (r == CUDA_SUCCESS)
        r = cuMemcpyHtoDAsync(s->key_gpu, s->key, n * sizeof *s->key, stream);
    if (r == CUDA_SUCCESS)
        r = cuMemcpyHtoDAsync(s->request_gpu, s->request, n * sizeof *s->request, stream);
    if (r == CUDA_SUCCESS)
        r = decode_launch(d, DECODE_WANT, blocks_for(n), THREADS,
                          (void *[]){&d->entries, &s->key_gpu, &s->request_gpu, &n}, stream);
    if (r == CUDA_SUCCESS)
        r = launch_put(d, n, stream);
    return r == CUDA_SUCCESS ? cuStreamSynchronize(stream) : r;
}

/* A key that is put and finds no entry counts as not served. Misses of a step that never ended are not among those. */
static CUresult put_all(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_put *items,
                        uint32_t n, uint32_t *placed, CUstream stream)
{
    struct ucm_entries_step before = {0}, after = {0};
    CUresult r = launch_put(d, 0, stream);

    if (r == CUDA_SUCCESS)
        r = download(&before, d->entries.step, sizeof before, stream);
    for (uint32_t at = 0; r == CUDA_SUCCESS && at < n; at += d->plan.batch)
        r = put_batch(d, items + at, n - at < d->plan.batch ? n - at : d->plan.batch, stream);
    if (r == CUDA_SUCCESS)
        r = download(&after, d->entries.step, sizeof after, stream);
    if (r == CUDA_SUCCESS && placed)
        *placed = n - (after.unserved - before.unserved);
    return r;
}

int ucm_cuda_decode_put(struct ucm_cuda_decode *d, const struct ucm_cuda_decode_put *items,
                        uint32_t n, uint32_t *placed, void *stream)
{
    int r = 0;

    if (!d || (n > 0 && !items))
        return cuda_fail(UCM_EINVALID, "decode or items is NULL");
    for (uint32_t i = 0; r == 0 && i < n; i++)
        r = item_check(d, &items[i]);
    if (r == 0)
        r = cuda_enter(d->context);
    return r ? r
             : cuda_leave(put_all(d, items, n, placed, stream), "keys can't be put into entries");
}
