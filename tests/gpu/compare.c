#include "tests/gpu/compare.h"

#include "kernels/arith.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct memory {
    void *here;
    CUdeviceptr there; /* one of both */
};

uint8_t gpu_uuid[16];
CUstream gpu_stream;
bool few;
static unsigned passed, failed;
static uint64_t seed = 1;
static CUmodule module;
static struct memory *kept;
static size_t n_kept;

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

static void keep(void *here, CUdeviceptr there)
{
    kept = realloc(kept, (n_kept + 1) * sizeof(*kept));
    if (!kept)
        must(CUDA_ERROR_OUT_OF_MEMORY, "memory");
    kept[n_kept++] = (struct memory){here, there};
}

void memory_end(void)
{
    for (; n_kept > 0; n_kept--) {
        free(kept[n_kept - 1].here);
        if (kept[n_kept - 1].there)
            must(cuMemFree(kept[n_kept - 1].there), "freeing memory of the GPU");
    }
}

CUdeviceptr gpu_new(size_t n)
{
    CUdeviceptr at;

    must(cuMemAlloc(&at, n ? n : 4), "memory of the GPU");
    keep(NULL, at);
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

void gpu_sync(void)
{
    must(cuStreamSynchronize(gpu_stream), "the kernel");
}

void gpu_load(const void *image)
{
    must(cuModuleLoadData(&module, image), "the kernels");
}

CUfunction gpu_kernel(const char *name)
{
    CUfunction kernel;

    must(cuModuleGetFunction(&kernel, module, name), name);
    return kernel;
}

void gpu_launch(const char *kernel, uint32_t blocks, uint32_t threads, uint32_t shared,
                void **arguments)
{
    must(cuLaunchKernel(gpu_kernel(kernel), blocks, 1, 1, threads, 1, 1, shared, gpu_stream,
                        arguments, NULL),
         kernel);
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

float rnd_element(bool bf16, float size, uint16_t *bits)
{
    union {
        float f;
        uint32_t u;
    } x = {size * rnd_normal() + 0.0f}; /* no -0 */
    uint32_t e = x.u >> 23 & 0xff;

    if (bf16) {
        *bits = (uint16_t)(x.u >> 16);
        return ucm_bf16_decode(*bits);
    }
    *bits = e < 113 || e > 142
                ? 0
                : (uint16_t)((x.u >> 16 & 0x8000) | (e - 112) << 10 | (x.u >> 13 & 0x3ff));
    return ucm_f16_decode(*bits);
}

void *fresh(size_t n)
{
    size_t bytes = n / 64 * 64 + 64;
    void *p = aligned_alloc(64, bytes);

    if (!p)
        must(CUDA_ERROR_OUT_OF_MEMORY, "memory");
    memset(p, 0, bytes);
    keep(p, 0);
    return p;
}

void gpu_begin(int argc, char **argv)
{
    CUcontext context;
    CUdevice dev;
    CUuuid uuid;

    few = argc > 1 && strcmp(argv[1], "--few") == 0;
    must(cuInit(0), "CUDA");
    must(cuDeviceGet(&dev, 0), "a GPU");
    must(cuDeviceGetUuid(&uuid, dev), "its UUID");
    memcpy(gpu_uuid, uuid.bytes, sizeof(gpu_uuid));
    must(cuDevicePrimaryCtxRetain(&context, dev), "its context");
    must(cuCtxSetCurrent(context), "its context");
    must(cuStreamCreate(&gpu_stream, CU_STREAM_NON_BLOCKING), "a stream");
}

int gpu_end(void)
{
    must(cuStreamDestroy(gpu_stream), "the stream");
    free(kept);
    printf("%u passed, %u failed\n", passed, failed);
    return failed > 0;
}
