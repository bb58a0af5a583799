#include "daemon/cuda/gpu.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Registering takes about 50 ms a GiB and blocks the driver. Pieces of this size bound that, and a
 * job waits only for the pieces that it needs. */
#define GPU_PIN_BYTES (256ull << 20)
#define GPU_PIN_AGAIN_MS 1000 /* from a failure to the next try */

/* All GPUs' threads get the same memory, and each pins it when it has nothing else to do. While one
 * registers a range, another finds it neither free nor registered. */
static uv_mutex_t registering;
static uv_once_t registering_once = UV_ONCE_INIT;

static void registering_init(void)
{
    if (uv_mutex_init(&registering) != 0)
        abort();
}

/* The first pin whose end is above the address. */
static size_t pin_after(const struct gpu_memory *m, uint64_t address)
{
    size_t low = 0, high = m->n;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (m->pins[middle].base + m->pins[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int memory_grow(struct gpu_memory *m)
{
    size_t cap = m->cap ? 2 * m->cap : 64;
    struct gpu_pin *pins = realloc(m->pins, cap * sizeof(*pins));

    if (!pins)
        return -ENOMEM;
    m->pins = pins;
    m->cap = cap;
    return 0;
}

/* Without memory for the list the rest stays unknown, and begin() refuses jobs with slots there. */
void gpu_memory_add(struct gpu_memory *m, uint64_t base, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t n = bytes < GPU_PIN_BYTES ? bytes : GPU_PIN_BYTES;
        size_t i = pin_after(m, base);

        if (m->n == m->cap && memory_grow(m) < 0)
            return;
        memmove(&m->pins[i + 1], &m->pins[i], (m->n - i) * sizeof(*m->pins));
        m->pins[i] = (struct gpu_pin){.base = base, .bytes = n, .state = GPU_PIN_NEW};
        m->n++;
        m->fresh++;
        base += n;
        bytes -= n;
    }
}

void gpu_memory_remove(struct gpu_memory *m, uint64_t base, uint64_t bytes)
{
    size_t first = pin_after(m, base), i = first;

    for (; i < m->n && m->pins[i].base < base + bytes; i++) {
        m->fresh -= m->pins[i].state == GPU_PIN_NEW;
        if (m->pins[i].state == GPU_PIN_OURS)
            (void)cuda.cuMemHostUnregister((void *)(uintptr_t)m->pins[i].base);
    }
    memmove(&m->pins[first], &m->pins[i], (m->n - i) * sizeof(*m->pins));
    m->n -= i - first;
}

/* Portable: one registration serves all GPUs, and only one GPU may make it. Kernels get host
 * addresses unchanged, so the GPU must see the memory at the same address; it does on every 64-bit
 * Linux. */
static CUresult registered(struct gpu_pin *p)
{
    void *memory = (void *)(uintptr_t)p->base;
    CUdeviceptr address = 0;
    CUresult r = cuda.cuMemHostRegister(memory, p->bytes,
                                        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);

    p->state = r == CUDA_SUCCESS ? GPU_PIN_OURS : GPU_PIN_OTHERS;
    if (r == CUDA_SUCCESS || r == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        r = cuda.cuMemHostGetDevicePointer(&address, memory, 0);
    if (r == CUDA_SUCCESS && address != p->base)
        r = CUDA_ERROR_NOT_SUPPORTED;
    if (r != CUDA_SUCCESS && p->state == GPU_PIN_OURS)
        (void)cuda.cuMemHostUnregister(memory);
    return r;
}

static void pin(struct gpu *g, struct gpu_pin *p)
{
    g->memory.fresh -= p->state == GPU_PIN_NEW;
    uv_once(&registering_once, registering_init);
    uv_mutex_lock(&registering);
    p->why = registered(p);
    uv_mutex_unlock(&registering);
    if (p->why != CUDA_SUCCESS) {
        p->state = GPU_PIN_FAILED;
        p->next_ms = job_clock_ms() + GPU_PIN_AGAIN_MS;
    }
}

/* The range of one slot; *last is the pin of the slot before, which most likely covers this one,
 * too. */
static int need_range(struct gpu *g, struct device_job *job, uint64_t begin, uint64_t end,
                      size_t *last)
{
    struct gpu_memory *m = &g->memory;

    while (begin < end) {
        size_t i = *last;
        struct gpu_pin *p;

        if (i >= m->n || begin < m->pins[i].base || begin >= m->pins[i].base + m->pins[i].bytes)
            i = pin_after(m, begin);
        if (i >= m->n || begin < m->pins[i].base)
            return job_refuse(job, -EINVAL, UCM_WIRE_INTERNAL,
                              "slot memory at %#" PRIx64 " was never given to the GPU", begin);
        p = &m->pins[i];
        if (p->state == GPU_PIN_NEW || (p->state == GPU_PIN_FAILED && job_clock_ms() >= p->next_ms))
            pin(g, p);
        if (p->state == GPU_PIN_FAILED)
            return gpu_refuse(g, job, -EIO, p->why, "slot memory can't be pinned");
        *last = i;
        begin = p->base + p->bytes;
    }
    return 0;
}

int gpu_memory_need(struct gpu *g, struct device_job *job)
{
    uint64_t offset = job_plane_at(job, job->first_plane);
    uint64_t bytes = job_item_bytes(job, NULL);
    size_t last = 0;
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < job->n_items; i++)
        rc = need_range(g, job, job->items[i].slot + offset, job->items[i].slot + offset + bytes,
                        &last);
    return rc;
}

uint32_t gpu_memory_pin_of(const struct gpu_memory *m, uint64_t begin, uint64_t bytes)
{
    size_t i = pin_after(m, begin);
    const struct gpu_pin *p = &m->pins[i];

    if (i == m->n || begin < p->base || begin + bytes > p->base + p->bytes)
        return 0;
    return (uint32_t)i + 1;
}

void gpu_memory_pin_one(struct gpu *g)
{
    for (size_t i = 0; i < g->memory.n; i++) {
        if (g->memory.pins[i].state == GPU_PIN_NEW) {
            pin(g, &g->memory.pins[i]); /* a job that needs it reports the error */
            return;
        }
    }
}

void gpu_memory_close(struct gpu *g)
{
    for (size_t i = 0; i < g->memory.n; i++)
        if (g->memory.pins[i].state == GPU_PIN_OURS)
            (void)cuda.cuMemHostUnregister((void *)(uintptr_t)g->memory.pins[i].base);
    free(g->memory.pins);
    g->memory = (struct gpu_memory){0};
}
