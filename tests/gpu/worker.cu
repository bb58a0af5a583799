#include "tests/gpu/worker.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct worker {
    void *shared;
    char *memory, *base, *stage;
    uint64_t bytes;
    CUmemGenericAllocationHandle vmm;
    size_t vmm_bytes;
    cudaStream_t stream;
    cudaEvent_t event;
    volatile unsigned *flag;
    int fd;
    pthread_t busy;
    volatile int busy_runs;
    volatile unsigned long busy_count;
};

__global__ void wait_ms(long long ms, bool fault)
{
    long long begin, now;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ms * 1000000);
    if (fault)
        asm volatile("trap;");
}

__global__ void wait_flag(volatile unsigned *flag)
{
    while (!*flag)
        __nanosleep(1000);
}

__global__ void copy_bytes(char *to, const char *from, uint64_t n)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (uint64_t)gridDim.x * blockDim.x)
        to[i] = from[i];
}

/* What the event stands behind: the wait, and the kernel that writes the final bytes. */
static cudaError_t event_record(struct worker *w, const struct worker_request *q)
{
    cudaError_t r = cudaMemcpy(w->stage, w->shared, w->bytes, cudaMemcpyHostToDevice);

    *w->flag = 0;
    if (q->op == WORKER_EVENT_NEVER)
        wait_flag<<<1, 1, 0, w->stream>>>(w->flag);
    else
        wait_ms<<<1, 1, 0, w->stream>>>(q->ms, q->op == WORKER_EVENT_FAULT);
    copy_bytes<<<64, 256, 0, w->stream>>>(w->memory, w->stage, w->bytes);
    return r ? r : cudaEventRecord(w->event, w->stream);
}

static cudaError_t event_new(struct worker *w, const struct worker_request *q, struct worker_reply *a)
{
    cudaIpcEventHandle_t handle;
    cudaError_t r;

    if (!w->event) {
        r = cudaEventCreateWithFlags(&w->event, cudaEventDisableTiming | cudaEventInterprocess);
        if (r)
            return r;
    }
    r = cudaIpcGetEventHandle(&handle, w->event);
    memcpy(a->handle, &handle, sizeof(handle));
    return r ? r : event_record(w, q);
}

static cudaError_t alloc_ipc(struct worker *w, const struct worker_request *q, struct worker_reply *a)
{
    cudaIpcMemHandle_t handle;
    cudaError_t r = cudaMalloc(&w->base, q->offset + q->bytes);

    w->memory = w->base + q->offset;
    w->bytes = q->bytes;
    if (!r)
        r = cudaIpcGetMemHandle(&handle, w->base);
    if (!r && q->bytes <= WORKER_SHARED_BYTES)
        r = cudaMalloc(&w->stage, q->bytes);
    memcpy(a->handle, &handle, sizeof(handle));
    return r;
}

static cudaError_t alloc_vmm(struct worker *w, const struct worker_request *q, struct worker_reply *a)
{
    CUmemAllocationProp prop;
    CUmemAccessDesc access;
    CUdeviceptr address;
    size_t grain;

    memset(&prop, 0, sizeof(prop));
    memset(&access, 0, sizeof(access));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        return cudaErrorUnknown;
    w->vmm_bytes = (q->bytes + grain - 1) / grain * grain;
    if (cuMemCreate(&w->vmm, w->vmm_bytes, &prop, 0) ||
        cuMemExportToShareableHandle(&w->fd, w->vmm, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ||
        cuMemAddressReserve(&address, w->vmm_bytes, 0, 0, 0) ||
        cuMemMap(address, w->vmm_bytes, 0, w->vmm, 0) ||
        cuMemSetAccess(address, w->vmm_bytes, &access, 1))
        return cudaErrorUnknown;
    w->memory = (char *)address;
    w->bytes = q->bytes;
    a->value = w->vmm_bytes;
    return cudaMalloc(&w->stage, q->bytes);
}

static cudaError_t release(struct worker *w)
{
    cudaError_t r = cudaSuccess;

    if (w->vmm) {
        cuMemUnmap((CUdeviceptr)w->memory, w->vmm_bytes);
        cuMemAddressFree((CUdeviceptr)w->memory, w->vmm_bytes);
        cuMemRelease(w->vmm);
    } else if (w->base) {
        r = cudaFree(w->base);
    }
    if (!r && w->stage)
        r = cudaFree(w->stage);
    w->vmm = 0;
    w->base = w->memory = w->stage = NULL;
    return r;
}

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static cudaError_t dma(struct worker *w, const struct worker_request *q, struct worker_reply *a)
{
    void *host;
    cudaError_t r = cudaHostAlloc(&host, q->bytes, cudaHostAllocDefault);
    double best = 1e9;

    for (int i = 0; !r && i < 5; i++) {
        double begin = seconds();

        r = q->offset ? cudaMemcpyAsync(host, w->memory, q->bytes, cudaMemcpyDeviceToHost, w->stream)
                      : cudaMemcpyAsync(w->memory, host, q->bytes, cudaMemcpyHostToDevice, w->stream);
        if (!r)
            r = cudaStreamSynchronize(w->stream);
        best = seconds() - begin < best ? seconds() - begin : best;
    }
    a->value = (uint64_t)((double)q->bytes / best);
    cudaFreeHost(host);
    return r;
}

/* ---- a load for the SMs: bf16 matrices of N x N, by tensor cores ---- */

#define N 2048

/* A warp computes 32 x 32 of c = a * b, a block of eight warps 64 x 128. */
__global__ void multiply(const __nv_bfloat16 *a, const __nv_bfloat16 *b, __nv_bfloat16 *c)
{
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> x[2];
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> y[2];
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
    unsigned warp = threadIdx.x / 32;
    unsigned row = blockIdx.y * 64 + warp / 4 * 32, column = blockIdx.x * 128 + warp % 4 * 32;
    float odd = 0;

    for (int i = 0; i < 4; i++)
        wmma::fill_fragment(sum[i / 2][i % 2], 0.0f);
    for (unsigned k = 0; k < N; k += 16) {
        for (unsigned i = 0; i < 2; i++) {
            wmma::load_matrix_sync(x[i], a + (size_t)(row + 16 * i) * N + k, N);
            wmma::load_matrix_sync(y[i], b + (size_t)(column + 16 * i) * N + k, N);
        }
        for (int i = 0; i < 4; i++)
            wmma::mma_sync(sum[i / 2][i % 2], x[i / 2], y[i % 2], sum[i / 2][i % 2]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < sum[i / 2][i % 2].num_elements; j++)
            odd += sum[i / 2][i % 2].x[j];
    c[(size_t)(row + threadIdx.x % 32) * N + column] = odd;
}

static void *busy_run(void *arg)
{
    struct worker *w = (struct worker *)arg;
    __nv_bfloat16 *m;
    cudaStream_t stream;

    if (cudaMalloc(&m, 3 * sizeof(*m) * N * N) || cudaMemset(m, 0x3c, 2 * sizeof(*m) * N * N) ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))
        return NULL;
    while (w->busy_runs) {
        for (int i = 0; i < 16; i++)
            multiply<<<dim3(N / 128, N / 64), 256, 0, stream>>>(m, m + N * N, m + 2 * N * N);
        if (cudaStreamSynchronize(stream))
            return NULL;
        w->busy_count += 16;
    }
    cudaStreamDestroy(stream);
    cudaFree(m);
    return NULL;
}

static cudaError_t busy(struct worker *w, const struct worker_request *q, struct worker_reply *a)
{
    a->value = w->busy_count;
    if (q->op == WORKER_BUSY) {
        w->busy_runs = 1;
        return pthread_create(&w->busy, NULL, busy_run, w) ? cudaErrorUnknown : cudaSuccess;
    }
    if (q->op == WORKER_BUSY_END) {
        w->busy_runs = 0;
        pthread_join(w->busy, NULL);
    }
    return cudaSuccess;
}

/* Like a decode step: reads memory at full speed for about 50 us. */
__global__ void read_all(const uint4 *from, unsigned n, unsigned *odd)
{
    unsigned sum = 0;

    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        sum += __ldcs(from + i).x;
    if (sum == 0x12345678)
        *odd = sum;
}

#define CHAIN_BYTES (160u << 20)
#define CHAIN_MAX 100000

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static cudaError_t chain(const struct worker_request *q, struct worker_reply *a)
{
    uint64_t *ns = (uint64_t *)malloc(CHAIN_MAX * sizeof(*ns)), median;
    cudaStream_t stream;
    unsigned *odd, n = 0;
    uint4 *from;
    double begin = seconds();
    cudaError_t r = cudaMalloc(&from, CHAIN_BYTES + 4);

    odd = (unsigned *)((char *)from + CHAIN_BYTES);
    if (!r)
        r = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (unsigned i = 0; !r && n < CHAIN_MAX && seconds() - begin < q->ms * 1e-3; i++) {
        double t = seconds();

        read_all<<<264, 512, 0, stream>>>(from, CHAIN_BYTES / 16, odd);
        r = cudaStreamSynchronize(stream);
        if (i >= 100)
            ns[n++] = (uint64_t)((seconds() - t) * 1e9);
    }
    if (!r && n > 0) {
        qsort(ns, n, sizeof(*ns), compare_u64);
        a->value = ns[n * 99 / 100];
        median = ns[n / 2];
        memcpy(a->handle, &median, sizeof(median));
    }
    cudaStreamDestroy(stream);
    cudaFree(from);
    free(ns);
    return r;
}

static cudaError_t serve(struct worker *w, const struct worker_request *q, struct worker_reply *a)
{
    cudaDeviceProp prop;
    size_t free_bytes, total;
    cudaError_t r = cudaSuccess;

    switch (q->op) {
    case WORKER_HELLO:
        r = cudaGetDeviceProperties(&prop, 0);
        memcpy(a->handle, prop.uuid.bytes, 16);
        return r;
    case WORKER_ALLOC_IPC:
        return alloc_ipc(w, q, a);
    case WORKER_ALLOC_VMM:
        return alloc_vmm(w, q, a);
    case WORKER_FREE:
        return release(w);
    case WORKER_WRITE:
        r = cudaMemcpy(w->memory, w->shared, w->bytes, cudaMemcpyHostToDevice);
        return r ? r : cudaDeviceSynchronize();
    case WORKER_READ:
        return cudaMemcpy(w->shared, w->memory, w->bytes, cudaMemcpyDeviceToHost);
    case WORKER_EVENT:
    case WORKER_EVENT_NEVER:
    case WORKER_EVENT_FAULT:
        return event_new(w, q, a);
    case WORKER_EVENT_AGAIN:
        return event_record(w, q);
    case WORKER_EVENT_DESTROY:
        r = cudaEventDestroy(w->event);
        w->event = NULL;
        return r;
    case WORKER_RELEASE:
        *w->flag = 1;
        return cudaStreamSynchronize(w->stream);
    case WORKER_FREE_BYTES:
        r = cudaMemGetInfo(&free_bytes, &total);
        a->value = free_bytes;
        return r;
    case WORKER_BUSY:
    case WORKER_BUSY_COUNT:
    case WORKER_BUSY_END:
        return busy(w, q, a);
    case WORKER_CHAIN:
        return chain(q, a);
    case WORKER_DMA:
        return dma(w, q, a);
    }
    return cudaErrorInvalidValue;
}

static int reply(int socket, const struct worker_reply *a, int fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {(void *)a, sizeof(*a)};
    struct msghdr m;

    memset(&m, 0, sizeof(m));
    m.msg_iov = &iov;
    m.msg_iovlen = 1;
    if (fd >= 0) {
        m.msg_control = &control;
        m.msg_controllen = sizeof(control);
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
    }
    return sendmsg(socket, &m, MSG_NOSIGNAL) == (ssize_t)sizeof(*a) ? 0 : -1;
}

int worker_main(int socket, void *shared)
{
    struct worker w;
    struct worker_request q;
    unsigned *flag;

    memset(&w, 0, sizeof(w));
    w.shared = shared;
    if (cudaFree(NULL) || cudaStreamCreateWithFlags(&w.stream, cudaStreamNonBlocking) ||
        cudaHostAlloc((void **)&flag, sizeof(*flag), cudaHostAllocMapped))
        return 1;
    w.flag = flag;
    while (recv(socket, &q, sizeof(q), 0) == (ssize_t)sizeof(q)) {
        struct worker_reply a;
        cudaError_t r;

        memset(&a, 0, sizeof(a));
        w.fd = -1;
        r = serve(&w, &q, &a);
        a.error = r;
        if (r)
            fprintf(stderr, "worker: op %u: %s\n", q.op, cudaGetErrorString(r));
        if (reply(socket, &a, w.fd) < 0)
            return 1;
        if (w.fd >= 0)
            close(w.fd);
    }
    return 0;
}
