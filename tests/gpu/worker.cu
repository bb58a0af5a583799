#include "tests/gpu/copy_agents.h"
#include "tests/gpu/worker.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
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
    struct copy_agents_ring *ring;
    int fd;
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

/* What comes before the event: the wait, and the kernel that writes the final bytes. */
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
    /* Reads no byte that was not written, because initcheck would report it. */
    if (!r)
        r = cudaMemset(w->base, 0, q->offset + q->bytes);
    return r ? r : cudaDeviceSynchronize();
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
    if (cudaMemcpy(w->memory, w->shared, w->bytes, cudaMemcpyHostToDevice) || cudaDeviceSynchronize())
        return cudaErrorUnknown;
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

static cudaError_t ring_make(struct worker *w, struct worker_reply *a)
{
    cudaDeviceProp prop;

    if (cudaGetDeviceProperties(&prop, 0))
        return cudaErrorUnknown;
    w->ring = copy_agents_open((const uint8_t *)prop.uuid.bytes, STAGING_ENTRY_BYTES,
                               STAGING_ENTRIES, a->handle, &a->value, &w->fd);
    return w->ring ? (cudaError_t)copy_agents_prove(w->ring, test_nonce) : cudaErrorUnknown;
}

static cudaError_t ring_region(struct worker *w, struct worker_reply *a)
{
    struct worker_region region;
    int number;

    memcpy(&region, (char *)w->shared + WORKER_SHARED_BYTES - sizeof(region), sizeof(region));
    if (!w->memory)
        return cudaErrorInvalidValue;
    for (uint32_t i = 0; i < region.n_planes; i++)
        region.planes[i].base += (uint64_t)w->memory;
    number = copy_agents_region(w->ring, region.planes, region.n_planes, region.blocks, NULL);
    a->value = (uint64_t)number;
    return number < 0 ? (cudaError_t)-number : cudaSuccess;
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
    case WORKER_RING:
        return ring_make(w, a);
    case WORKER_RING_SERVE:
        copy_agents_serve(w->ring);
        return cudaSuccess;
    case WORKER_RING_REGION:
        return ring_region(w, a);
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

int worker_trap(void)
{
    wait_ms<<<1, 1>>>(0, true);
    return cudaDeviceSynchronize() == cudaSuccess ? -1 : 0;
}

int worker_main(int socket, void *shared)
{
    struct worker w;
    struct worker_request q;
    unsigned *flag;

    memset(&w, 0, sizeof(w));
    w.shared = shared;
    /* A kernel that is loaded at its first launch holds up all later launches until the kernels before
     * it have ended; some here never do. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
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
