/* A worker of test_serve: its memory, and the contents of its blocks. */
#include "tests/gpu/serve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void need(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "%d: %s: %s / %s\n", (int)getpid(), what, ucm_errmsg(),
            cudaGetErrorString(cudaPeekAtLastError()));
    _exit(1);
}

double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- patterns ---- */

__global__ void delay_ms(long long ms)
{
    long long begin, now;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ms * 1000000);
}

__global__ void fill(unsigned *kv, unsigned first, unsigned n, unsigned from, unsigned planes)
{
    const unsigned words = FRAGMENT / 4;

    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n * planes * words;
         i += gridDim.x * blockDim.x) {
        unsigned word = i % words, plane = from + i / words % planes, block = i / words / planes;

        kv[((size_t)plane * BLOCKS + block) * words + word] = pattern(first + block, plane, word);
    }
}

static void key_make(unsigned number, uint8_t *out)
{
    for (unsigned i = 0; i < KEY_BYTES; i++)
        out[i] = (uint8_t)(pattern(number, 999, i) >> 11);
}

/* ---- a worker ---- */

static bool strategy_is(const char *name)
{
    const char *strategy = getenv("UCM_TEST_STRATEGY");

    return strategy && strcmp(strategy, name) == 0;
}

bool plans(void)
{
    return strategy_is("auto+ring");
}

bool staged(void)
{
    return strategy_is("staged") || plans();
}

/* With dma+ring it has nothing to do. */
bool copy_agent(void)
{
    return staged() || strategy_is("dma+ring");
}

/* In a stream of its own: those of the test may wait for a load. */
static int prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce)
{
    struct worker *w = (struct worker *)ctx;
    uint8_t *at = (uint8_t *)w->kv + offset;
    cudaStream_t stream;
    cudaError_t r = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);

    if (r == cudaSuccess && nonce)
        r = cudaMemcpyAsync(w->kept, at, sizeof(w->kept), cudaMemcpyDeviceToHost, stream);
    if (r == cudaSuccess)
        r = cudaMemcpyAsync(at, nonce ? nonce : w->kept, sizeof(w->kept), cudaMemcpyHostToDevice, stream);
    if (r == cudaSuccess)
        r = cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
    return r;
}

static int region_register(struct worker *w, const struct ucm_region_spec *spec)
{
    uint64_t address = (uint64_t)w->kv;
    int rc = 0;

    if (!copy_agent())
        return ucm_region_register(w->ns, spec, 30000, &w->region);
    if (!w->cuda)
        rc = ucm_cuda_open(w->client, spec->gpu, NULL, 30000, &w->cuda);
    if (rc == 0)
        rc = ucm_cuda_region_register(w->cuda, w->ns, spec, &address, 30000, &w->region);
    if (rc != 0 && rc != -UCM_EBUSY)
        printf("INFO  %s\n", ucm_cuda_errmsg());
    return rc;
}

void worker_register(struct worker *w)
{
    struct ucm_memory memory = {};
    struct ucm_region_spec spec = {};
    std::vector<struct ucm_plane> planes(2 * LAYERS);
    cudaDeviceProp prop;
    cudaIpcMemHandle_t handle;

    need(cudaIpcGetMemHandle(&handle, w->kv) == cudaSuccess, "memory handle");
    need(cudaGetDeviceProperties(&prop, 0) == cudaSuccess, "properties");
    memory.kind = UCM_MEMORY_CUDA_IPC;
    memory.bytes = w->bytes;
    memcpy(memory.ipc, &handle, sizeof(memory.ipc));
    memory.prove_cb = prove_cb;
    memory.prove_ctx = w;
    for (unsigned p = 0; p < planes.size(); p++) {
        planes[p] = {};
        planes[p].offset = (uint64_t)p * BLOCKS * FRAGMENT;
        planes[p].stride = FRAGMENT;
        planes[p].block_bytes = FRAGMENT;
        planes[p].layer = p / 2;
    }
    spec.blocks = BLOCKS;
    spec.device = "cuda";
    spec.gpu = (const uint8_t *)prop.uuid.bytes;
    spec.memory = &memory;
    spec.n_memory = 1;
    spec.planes = planes.data();
    spec.n_planes = (uint32_t)planes.size();
    for (double end = now_s() + 30;;) {
        int rc = region_register(w, &spec);

        /* The daemon starts its GPUs after the open socket. */
        if (rc != -UCM_EBUSY || now_s() > end) {
            need(rc == 0, "region");
            break;
        }
        usleep(20000);
    }
}

void worker_unregister(struct worker *w)
{
    if (w->region && w->cuda)
        need(ucm_cuda_region_unregister(w->cuda, w->region, -1) == 0, "unregister");
    else if (w->region)
        need(ucm_region_unregister(w->region, -1) == 0, "unregister");
    w->region = NULL;
}

struct ucm_identity identity(void)
{
    static const uint32_t layers = LAYERS;
    struct ucm_identity id = {};

    id.model = "gpu-test";
    id.dtype = "bf16";
    id.layout = "split-kv/1";
    id.block_tokens = 16;
    id.key_bytes = KEY_BYTES;
    id.parts = 1;
    id.layers = &layers;
    id.n_layers = 1;
    id.layer_bytes = 2 * FRAGMENT;
    return id;
}

void worker_open(struct worker *w)
{
    struct ucm_identity id = identity();

    *w = {};
    w->bytes = (size_t)2 * LAYERS * BLOCKS * FRAGMENT;
    need(cudaMalloc(&w->kv, w->bytes) == cudaSuccess, "cudaMalloc");
    need(cudaMemset(w->kv, 0xEE, w->bytes) == cudaSuccess, "cudaMemset");
    need(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking) == cudaSuccess, "stream");
    need(cudaEventCreateWithFlags(&w->event, cudaEventDisableTiming | cudaEventInterprocess) ==
             cudaSuccess, "event");
    need(cudaIpcGetEventHandle(&w->handle, w->event) == cudaSuccess, "event handle");
    need(cudaDeviceSynchronize() == cudaSuccess, "synchronize");
    need(ucm_connect(NULL, 10000, &w->client) == 0, "connect");
    need(ucm_namespace_open(w->client, &id, -1, &w->base) == 0, "namespace");
    w->ns = w->base;
    worker_register(w);
}

void worker_close(struct worker *w)
{
    worker_unregister(w);
    need(ucm_cuda_close(w->cuda, -1) == 0, "copy agent closes");
    ucm_namespace_close(w->base);
    ucm_close(w->client);
    need(cudaFree(w->kv) == cudaSuccess, "cudaFree");
}

transfer::transfer(unsigned first, unsigned n, bool reversed)
    : ucm_transfer(), all_keys(n * KEY_BYTES), all_blocks(n)
{
    for (unsigned i = 0; i < n; i++) {
        key_make(first + i, all_keys.data() + i * KEY_BYTES);
        all_blocks[i] = reversed ? BLOCKS - 1 - i : i;
    }
    only(0, n);
}

void transfer::only(unsigned at, unsigned n)
{
    keys = all_keys.data() + at * KEY_BYTES;
    blocks = all_blocks.data() + at;
    n_keys = n;
}

struct ucm_task *dump_begin(struct worker *w, unsigned first, unsigned n, long long ms)
{
    struct transfer t(first, n, false);
    struct ucm_task *task;

    t.cuda_event = (const uint8_t *)&w->handle;
    delay_ms<<<1, 1, 0, w->stream>>>(ms);
    fill<<<264, 256, 0, w->stream>>>(w->kv, first, n, 0, 2 * LAYERS);
    need(cudaEventRecord(w->event, w->stream) == cudaSuccess, "record");
    need(ucm_dump(w->region, &t, -1, &task) == 0, "dump");
    return task;
}

void poison(struct worker *w)
{
    need(cudaMemset(w->kv, 0xEE, w->bytes) == cudaSuccess, "cudaMemset");
    need(cudaDeviceSynchronize() == cudaSuccess, "synchronize");
}

size_t compare(struct worker *w, unsigned first, unsigned n)
{
    std::vector<unsigned> host(w->bytes / 4);
    size_t differ = 0;
    const unsigned words = FRAGMENT / 4;

    need(cudaMemcpy(host.data(), w->kv, w->bytes, cudaMemcpyDeviceToHost) == cudaSuccess, "copy back");
    for (unsigned p = 0; p < 2 * LAYERS; p++)
        for (unsigned b = 0; b < BLOCKS; b++)
            for (unsigned i = 0; i < words; i++) {
                unsigned at = BLOCKS - 1 - b;
                unsigned want = at < n ? pattern(first + at, p, i) : 0xEEEEEEEEu;

                differ += host[((size_t)p * BLOCKS + b) * words + i] != want;
            }
    return differ;
}

size_t load_and_compare(struct worker *w, unsigned first, unsigned n)
{
    struct transfer t(first, n, true);
    struct ucm_task *task;
    struct ucm_result r;

    poison(w);
    need(ucm_load(w->region, &t, -1, &task) == 0, "load");
    need(ucm_task_wait(task, 30000, &r) == 0, "load's end");
    for (unsigned i = 0; i < n; i++)
        need(r.result[i] == UCM_BLOCK_IS_OK, "a loaded block's status");
    ucm_task_free(task);
    return compare(w, first, n);
}
