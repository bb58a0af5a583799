/* Roles whose streams wait for a load's layers, with kernels after each wait. */
#include "tests/gpu/serve.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRST 1000u /* the blocks that role_produce stored */
#define LOADED 64u
#define ROUNDS 20u
#define FLIGHT 8u /* loads at once */

/* Counts the words of a layer that are not what a reversed load of n blocks leaves. */
__global__ void layer_differs(const unsigned *kv, unsigned n, unsigned layer, unsigned *differ)
{
    const unsigned words = FRAGMENT / 4;

    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n * 2 * words; i += gridDim.x * blockDim.x) {
        unsigned word = i % words, plane = 2 * layer + i / words % 2, block = i / words / 2;

        if (kv[((size_t)plane * BLOCKS + BLOCKS - 1 - block) * words + word] != pattern(FIRST + block, plane, word))
            atomicAdd(differ, 1);
    }
}

static void need_cuda(int rc, const char *what)
{
    if (rc != 0)
        fprintf(stderr, "%s\n", ucm_cuda_errmsg());
    need(rc == 0, what);
}

struct streamer {
    struct worker w;
    struct ucm_cuda *cuda; /* w's, or one for the waits alone */
    unsigned *differ;      /* one a load; the host reads them, too */
};

/* A daemon that has just begun finds what lies on NVMe while it serves. */
static void stored_await(struct worker *w)
{
    struct transfer t(FIRST, LOADED, true);
    struct ucm_lookup l = {};
    uint32_t hits = 0;

    l.keys = t.keys;
    l.n_keys = t.n_keys;
    for (double end = now_s() + 20; hits < LOADED && now_s() < end; usleep(10000))
        need(ucm_lookup_prefix(w->ns, &l, -1, &hits, NULL, NULL) == 0, "lookup");
    need(hits == LOADED, "the blocks are stored");
}

static void streamer_open(struct streamer *s)
{
    cudaDeviceProp prop;

    worker_open(&s->w);
    stored_await(&s->w);
    s->cuda = s->w.cuda;
    need(cudaGetDeviceProperties(&prop, 0) == cudaSuccess, "properties");
    if (!s->cuda)
        need_cuda(ucm_cuda_open(s->w.client, (const uint8_t *)prop.uuid.bytes, NULL, 30000, &s->cuda), "copy_agent");
    need(cudaMallocHost(&s->differ, FLIGHT * sizeof(*s->differ)) == cudaSuccess, "cudaMallocHost");
    memset(s->differ, 0, FLIGHT * sizeof(*s->differ));
    /* If it were loaded lazily after a stream that waits, it would hold up this thread. */
    layer_differs<<<1, 1, 0, s->w.stream>>>(s->w.kv, 0, 0, s->differ);
    need(cudaStreamSynchronize(s->w.stream) == cudaSuccess, "the kernel is loaded");
}

/* A layer-wise load, and all that a forward pass enqueues after its layers. */
static struct ucm_task *load_begin(struct streamer *s, unsigned *differ)
{
    struct transfer t(FIRST, LOADED, true);
    struct ucm_task *task;

    t.progress_interval = 1;
    need(ucm_load(s->w.region, &t, -1, &task) == 0, "load");
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        need_cuda(ucm_cuda_stream_wait(s->cuda, task, layer + 1, s->w.stream, 60000), "stream wait");
        layer_differs<<<32, 256, 0, s->w.stream>>>(s->w.kv, LOADED, layer, differ);
        need(cudaPeekAtLastError() == cudaSuccess, "launch");
    }
    return task;
}

int role_consume_stream(void)
{
    struct streamer s;
    struct ucm_result r;
    double enqueued_s = 0, done_s = 0;
    unsigned differ;

    streamer_open(&s);
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct ucm_task *task;
        double begin;

        poison(&s.w);
        begin = now_s();
        task = load_begin(&s, s.differ);
        enqueued_s += now_s() - begin;
        need(cudaStreamSynchronize(s.w.stream) == cudaSuccess, "the stream's end");
        done_s += now_s() - begin;
        need(ucm_task_wait(task, 30000, &r) == 0 && r.n_ok == LOADED, "load's end");
        need_cuda(ucm_cuda_stream_waits_end(s.cuda, task), "no wait was given up");
        ucm_task_free(task);
    }
    differ = *s.differ;
    fprintf(stderr, "     loads after stream waits: enqueued in %.0f us, done after %.0f us, %u words differ\n",
            enqueued_s / ROUNDS * 1e6, done_s / ROUNDS * 1e6, differ);
    if (s.cuda != s.w.cuda)
        need_cuda(ucm_cuda_close(s.cuda, -1), "the waits' copy agent closes");
    worker_close(&s.w);
    need(cudaFreeHost(s.differ) == cudaSuccess, "cudaFreeHost");
    return differ ? 1 : 0;
}

/* The daemon stops in the middle of its loads, so that the stream waits at one of them. Then it
 * dies. The bytes of a successful load were there for the kernels, too. */
int role_stream_orphan(void)
{
    const char *text = getenv("UCM_TEST_DAEMON");
    pid_t daemon = text ? (pid_t)atoi(text) : 0;
    struct ucm_task *tasks[FLIGHT];
    struct streamer s;
    struct ucm_result r;
    int rc = 0;

    need(daemon > 1, "the daemon's pid");
    streamer_open(&s);
    poison(&s.w);
    for (unsigned i = 0; i < FLIGHT; i++) {
        if (i == FLIGHT - 1) {
            need(kill(daemon, SIGSTOP) == 0, "the daemon is stopped");
            usleep(20000); /* until each of its threads is: none serves the last load */
        }
        tasks[i] = load_begin(&s, s.differ + i);
    }
    usleep(200000);
    need(cudaStreamQuery(s.w.stream) == cudaErrorNotReady, "the stream waits");
    need(kill(daemon, SIGKILL) == 0, "the daemon is killed");
    for (double end = now_s() + 10; cudaStreamQuery(s.w.stream) == cudaErrorNotReady && now_s() < end;)
        usleep(1000);
    need(cudaStreamQuery(s.w.stream) == cudaSuccess, "the stream goes on");
    for (unsigned i = 0; i < FLIGHT; i++) {
        rc = ucm_task_wait(tasks[i], 30000, &r);
        need(rc == 0 ? s.differ[i] == 0 : rc == -UCM_EDISCONNECTED, "a load is good, or known to have failed");
        need_cuda(ucm_cuda_stream_waits_end(s.cuda, tasks[i]), "no wait was given up");
        ucm_task_free(tasks[i]);
    }
    need(rc != 0, "the last one failed");
    rc = s.w.cuda ? ucm_cuda_region_unregister(s.cuda, s.w.region, -1) : ucm_region_unregister(s.w.region, -1);
    need(rc == -UCM_EDISCONNECTED, "nobody is there to unregister at");
    need_cuda(ucm_cuda_close(s.cuda, -1), "the copy agent closes");
    ucm_close(s.w.client);
    return 0;
}
