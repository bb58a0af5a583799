/* test_sparse [--few | --speed]: compares; a part of the cases only; or measures, and prints a table. */
#include "tests/gpu/sparse.h"

#include "client/cuda/sparse.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint8_t gpu_uuid[16];
CUstream gpu_stream;
bool few;
static unsigned passed, failed;
static uint64_t seed = 1;

bool check(bool condition, const char *format, ...)
{
    va_list args;

    condition ? passed++ : failed++;
    if (condition || failed > 40)
        return condition;
    va_start(args, format);
    printf("FAIL  ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    return condition;
}

void must(CUresult r, const char *what)
{
    const char *name = "?";

    if (r == CUDA_SUCCESS)
        return;
    (void)cuGetErrorName(r, &name);
    printf("FAIL  %s: %s\n%u passed, %u failed\n", what, name, passed, failed + 1);
    exit(1);
}

CUdeviceptr gpu_new(size_t n)
{
    CUdeviceptr at;

    must(cuMemAlloc(&at, n ? n : 4), "memory of the GPU");
    return at;
}

CUdeviceptr gpu_put(CUdeviceptr at, const void *from, size_t n)
{
    if (at == 0)
        at = gpu_new(n);
    must(cuMemcpyHtoDAsync(at, from, n, gpu_stream), "a copy to the GPU");
    must(cuStreamSynchronize(gpu_stream), "a copy to the GPU");
    return at;
}

void gpu_get(void *to, CUdeviceptr at, size_t n)
{
    must(cuMemcpyDtoHAsync(to, at, n, gpu_stream), "a copy from the GPU");
    must(cuStreamSynchronize(gpu_stream), "a copy from the GPU");
}

void gpu_free(CUdeviceptr at)
{
    must(cuMemFree(at), "freeing memory of the GPU");
}

void gpu_sync(void)
{
    must(cuStreamSynchronize(gpu_stream), "the kernel");
}

uint32_t rnd(void)
{
    uint64_t z = seed += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)((z ^ z >> 31) >> 16);
}

uint32_t rnd_below(uint32_t n)
{
    return (uint32_t)((uint64_t)rnd() * n >> 32);
}

/* About normal: the sum of twelve. */
float rnd_normal(void)
{
    float sum = -6;

    for (int i = 0; i < 12; i++)
        sum += (float)(rnd() >> 8) * 0x1p-24f;
    return sum;
}

void *fresh(size_t n)
{
    void *p = calloc(1, n ? n : 1);

    if (!p)
        must(CUDA_ERROR_OUT_OF_MEMORY, "memory");
    return p;
}

const char *method_name(uint32_t method)
{
    return method == TOKENS_REST ? "rest" : ucm_digest_method(method)->name;
}

static uint8_t keep_some[64];

bool digest_of(struct ucm_sparse_digest *out, uint32_t method, uint32_t dtype, uint32_t tokens,
               uint32_t kv_heads, uint32_t d, uint32_t rope_dim)
{
    uint64_t element = dtype == UCM_SPARSE_F32 ? 4 : dtype == UCM_SPARSE_FP8_E4M3 ? 1 : 2;
    uint32_t vd = rope_dim > 0 ? 0 : d;
    uint64_t row = d * element;

    bool rest = method == TOKENS_REST;

    if (rest && tokens == 1)
        return false;
    method = rest ? UCM_SPARSE_TOKENS : method;
    *out = (struct ucm_sparse_digest){
        .method = method,
        .kind = rnd_below(3),
        .run = tokens % 4 == 0 ? 4 : 1,
        .bits = 64u << rnd_below(3),
        .rope_bits = rope_dim > 0 ? 20 : 0,
        .seed = rnd(),
        .chosen = 1 + rnd_below(tokens - rest < 32 ? tokens - rest : 32),
        .rest = rest,
        .shape = {.dtype = dtype,
                  .tokens = tokens,
                  .kv_heads = kv_heads,
                  .head_dim = d,
                  .v_head_dim = vd,
                  .rope_dim = rope_dim,
                  .k_offset = 4 * element,
                  .k_token_stride = row * kv_heads,
                  .k_head_stride = row,
                  .v_offset = 4 * element + (row + element) * kv_heads * tokens,
                  .v_token_stride = vd * element,
                  .v_head_stride = vd * element * tokens},
    };
    if (method == UCM_SPARSE_SUBMEAN && rnd_below(3) > 0 && d >= 8) { /* odd numbers of pairs too */
        memset(keep_some, 0, sizeof(keep_some));
        for (uint32_t i = 0; i < d / 2; i++)
            keep_some[i / 8] |= (uint8_t)((i == 0 || rnd_below(2)) << i % 8);
        out->keep = keep_some;
        out->keep_bytes = (d / 2 + 7) / 8;
        out->pairs = rnd_below(2);
    }
    return method != UCM_SPARSE_HASH ||
           (d - rope_dim >= out->bits / 8 && (rope_dim == 0 || rope_dim >= 4));
}

struct ucm_digest_plan *plan_of(const struct ucm_sparse_digest *digest)
{
    struct ucm_digest_plan *plan = fresh(sizeof(*plan));

    if (!check(sparse_plan(plan, digest) == 0, "a plan: %s", ucm_cuda_errmsg()))
        must(CUDA_ERROR_INVALID_VALUE, "a test's digest");
    return plan;
}

int main(int argc, char **argv)
{
    CUcontext context;
    CUdevice dev;
    CUuuid uuid;

    must(cuInit(0), "CUDA");
    must(cuDeviceGet(&dev, 0), "a GPU");
    must(cuDeviceGetUuid(&uuid, dev), "its UUID");
    memcpy(gpu_uuid, uuid.bytes, sizeof(gpu_uuid));
    must(cuDevicePrimaryCtxRetain(&context, dev), "its context");
    must(cuCtxSetCurrent(context), "its context");
    must(cuStreamCreate(&gpu_stream, CU_STREAM_NON_BLOCKING), "a stream");
    few = argc > 1 && strcmp(argv[1], "--few") == 0;
    if (argc > 1 && strcmp(argv[1], "--speed") == 0) {
        measure();
    } else {
        test_digests();
        test_selections();
        if (!few)
            test_graphs();
    }
    must(cuStreamDestroy(gpu_stream), "the stream");
    printf("%u passed, %u failed\n", passed, failed);
    return failed > 0;
}
