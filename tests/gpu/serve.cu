/* The main job on a GPU, through the real daemon and client library: one process dumps its CUDA memory
 * and ends, another loads it into its own, bit for bit, while a third is killed in the middle of a dump.
 *
 * usage: test_serve (starts $UCMD, default ucmd beside it); the roles are processes of their own, since
 * a process can't open its own IPC handle. */
#include "tests/gpu/serve.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int passed, failed;

static void check(bool ok, const char *what)
{
    printf("%s %s%s%s\n", ok ? "PASS" : "FAIL", what, ok ? "" : ": ", ok ? "" : ucm_errmsg());
    fflush(stdout);
    if (ok)
        passed++;
    else
        failed++;
}

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

/* Block b of the first n gets the pattern of seed first + b, at place b of the planes from..from+planes. */
__global__ void fill(unsigned *kv, unsigned first, unsigned n, unsigned from, unsigned planes)
{
    const unsigned words = CHUNK / 4;

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

/* staged always has companions, and auto+ring; there the planner has to find that they pay. */
static bool staged(void)
{
    const char *strategy = getenv("UCM_TEST_STRATEGY");

    return strategy && (strcmp(strategy, "staged") == 0 || strcmp(strategy, "auto+ring") == 0);
}

static int region_register(struct worker *w, const struct ucm_region_spec *spec)
{
    uint64_t address = (uint64_t)w->kv;
    int rc = 0;

    if (!staged())
        return ucm_region_register(w->ns, spec, 30000, &w->region);
    if (!w->cuda)
        rc = ucm_cuda_open(w->client, spec->gpu, NULL, 30000, &w->cuda);
    if (rc == 0)
        rc = ucm_cuda_region_register(w->cuda, w->ns, spec, &address, 30000, &w->region);
    if (rc != 0 && rc != -UCM_EBUSY)
        printf("INFO  %s\n", ucm_cuda_errmsg());
    return rc;
}

void worker_open(struct worker *w)
{
    uint32_t shards = LAYERS;
    struct ucm_identity id = {};
    struct ucm_memory memory = {};
    struct ucm_region_spec spec = {};
    std::vector<struct ucm_plane> planes(2 * LAYERS);
    cudaDeviceProp prop;
    cudaIpcMemHandle_t handle;

    *w = {};
    w->bytes = (size_t)2 * LAYERS * BLOCKS * CHUNK;
    need(cudaMalloc(&w->kv, w->bytes) == cudaSuccess, "cudaMalloc");
    need(cudaMemset(w->kv, 0xEE, w->bytes) == cudaSuccess, "cudaMemset");
    need(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking) == cudaSuccess, "stream");
    need(cudaEventCreateWithFlags(&w->event, cudaEventDisableTiming | cudaEventInterprocess) ==
             cudaSuccess, "event");
    need(cudaIpcGetEventHandle(&w->handle, w->event) == cudaSuccess, "event handle");
    need(cudaIpcGetMemHandle(&handle, w->kv) == cudaSuccess, "memory handle");
    need(cudaDeviceSynchronize() == cudaSuccess, "synchronize");
    need(cudaGetDeviceProperties(&prop, 0) == cudaSuccess, "properties");
    need(ucm_connect(NULL, 10000, &w->client) == 0, "connect");
    id.model = "gpu-test";
    id.dtype = "bf16";
    id.layout = "split-kv/1";
    id.block_tokens = 16;
    id.key_bytes = KEY_BYTES;
    id.parts = 1;
    id.shards = &shards;
    id.n_shards = 1;
    id.shard_bytes = 2 * CHUNK;
    need(ucm_namespace_open(w->client, &id, -1, &w->ns) == 0, "namespace");
    memory.kind = UCM_MEMORY_CUDA_IPC;
    memory.bytes = w->bytes;
    memcpy(memory.ipc, &handle, sizeof(memory.ipc));
    for (unsigned p = 0; p < planes.size(); p++) {
        planes[p] = {};
        planes[p].offset = (uint64_t)p * BLOCKS * CHUNK;
        planes[p].stride = CHUNK;
        planes[p].chunk_bytes = CHUNK;
        planes[p].shard = p / 2;
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

        /* The daemon starts its GPUs behind the open socket. */
        if (rc != -UCM_EBUSY || now_s() > end) {
            need(rc == 0, "region");
            break;
        }
        usleep(20000);
    }
}

void worker_close(struct worker *w)
{
    if (w->cuda)
        need(ucm_cuda_region_unregister(w->cuda, w->region, -1) == 0, "unregister");
    else
        need(ucm_region_unregister(w->region, -1) == 0, "unregister");
    need(ucm_cuda_close(w->cuda, -1) == 0, "companion closes");
    ucm_namespace_close(w->ns);
    ucm_close(w->client);
    need(cudaFree(w->kv) == cudaSuccess, "cudaFree");
}

struct ucm_transfer transfer(std::vector<uint8_t> &keys, std::vector<uint32_t> &blocks,
                             unsigned first, unsigned n, bool reversed)
{
    struct ucm_transfer t = {};

    keys.resize(n * KEY_BYTES);
    blocks.resize(n);
    for (unsigned i = 0; i < n; i++) {
        key_make(first + i, keys.data() + i * KEY_BYTES);
        blocks[i] = reversed ? BLOCKS - 1 - i : i;
    }
    t.keys = keys.data();
    t.blocks = blocks.data();
    t.n_keys = n;
    return t;
}

/* The dump is sent while the kernel that writes the bytes has not even begun. */
static struct ucm_task *dump_begin(struct worker *w, unsigned first, unsigned n, long long ms)
{
    std::vector<uint8_t> keys;
    std::vector<uint32_t> blocks;
    struct ucm_transfer t = transfer(keys, blocks, first, n, false);
    struct ucm_task *task;

    t.event = (const uint8_t *)&w->handle;
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

/* Words that are not what a load of n blocks leaves; n 0: that are no poison. */
static size_t compare(struct worker *w, unsigned first, unsigned n)
{
    std::vector<unsigned> host(w->bytes / 4);
    size_t differ = 0;
    const unsigned words = CHUNK / 4;

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

static size_t load_and_compare(struct worker *w, unsigned first, unsigned n)
{
    std::vector<uint8_t> keys;
    std::vector<uint32_t> blocks;
    struct ucm_transfer t = transfer(keys, blocks, first, n, true);
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

/* ---- roles ---- */

static int role_produce(void)
{
    struct worker w;
    struct ucm_task *task;
    struct ucm_result r;

    worker_open(&w);
    task = dump_begin(&w, 1000, 64, 300);
    need(ucm_task_wait(task, 30000, &r) == 0, "dump's end");
    need(r.n_ok == 64, "64 stored blocks");
    ucm_task_free(task);
    worker_close(&w);
    return 0;
}

static int role_consume(void)
{
    struct worker w;
    size_t differ;

    worker_open(&w);
    differ = load_and_compare(&w, 1000, 64);
    if (differ)
        fprintf(stderr, "%zu words differ\n", differ);
    worker_close(&w);
    return differ ? 1 : 0;
}

/* A forward pass: each layer's kernel, an event of its own behind it, and its dump, one after another.
 * No block may be found before the last layer is stored. */
static int role_produce_layers(void)
{
    struct worker w;
    std::vector<uint8_t> keys;
    std::vector<uint32_t> blocks;
    struct ucm_transfer t = transfer(keys, blocks, 3000, 64, false);
    struct ucm_task *task[LAYERS];
    struct ucm_lookup l = {};
    struct ucm_result r;
    uint32_t hits;

    worker_open(&w);
    l.keys = keys.data();
    l.n_keys = 64;
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        cudaIpcEventHandle_t handle;
        cudaEvent_t event;

        need(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess) ==
                 cudaSuccess, "event");
        need(cudaIpcGetEventHandle(&handle, event) == cudaSuccess, "event handle");
        delay_ms<<<1, 1, 0, w.stream>>>(20);
        fill<<<264, 256, 0, w.stream>>>(w.kv, 3000, 64, 2 * layer, 2);
        need(cudaEventRecord(event, w.stream) == cudaSuccess, "record");
        t.event = (const uint8_t *)&handle;
        t.shard = layer;
        t.n_shards = 1;
        need(ucm_dump(w.region, &t, -1, &task[layer]) == 0, "dump");
        need(ucm_lookup_prefix(w.ns, &l, -1, &hits, NULL, NULL) == 0 && hits == 0,
             "no block before its last layer");
    }
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        need(ucm_task_wait(task[layer], 30000, &r) == 0 && r.n_ok == 64, "a layer's dump");
        ucm_task_free(task[layer]);
    }
    need(ucm_lookup_prefix(w.ns, &l, -1, &hits, NULL, NULL) == 0 && hits == 64, "all blocks");
    worker_close(&w);
    return 0;
}

/* Compares each layer on the GPU as soon as it is told of, while the others are on their way. */
static int role_consume_layers(void)
{
    struct worker w;
    std::vector<uint8_t> keys, result(64);
    std::vector<uint32_t> blocks;
    std::vector<unsigned> host(2 * BLOCKS * CHUNK / 4);
    struct ucm_transfer t = transfer(keys, blocks, 3000, 64, true);
    struct ucm_task *task;
    struct ucm_result r;
    const unsigned words = CHUNK / 4;
    size_t differ = 0;

    worker_open(&w);
    t.step = 1;
    need(ucm_load(w.region, &t, -1, &task) == 0, "load");
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        need(ucm_task_wait_layers(task, layer + 1, 30000, result.data()) == 0, "a layer");
        need(cudaMemcpy(host.data(), w.kv + (size_t)2 * layer * BLOCKS * words, host.size() * 4,
                        cudaMemcpyDeviceToHost) == cudaSuccess, "copy back");
        for (unsigned p = 0; p < 2; p++)
            for (unsigned b = 0; b < 64; b++)
                for (unsigned i = 0; i < words; i++)
                    differ += result[b] != UCM_BLOCK_IS_OK ||
                              host[((size_t)p * BLOCKS + BLOCKS - 1 - b) * words + i] !=
                                  pattern(3000 + b, 2 * layer + p, i);
    }
    need(ucm_task_wait(task, 30000, &r) == 0 && r.n_ok == 64, "load's end");
    ucm_task_free(task);
    worker_close(&w);
    return differ ? 1 : 0;
}

/* Says that its dump is under way and waits to be killed, its event never signalled. */
static int role_victim(void)
{
    struct worker w;

    worker_open(&w);
    dump_begin(&w, 5000, 64, 60000);
    usleep(100000);
    puts("dumping");
    fflush(stdout);
    pause();
    return 1;
}

static bool load_all(struct worker *w, const struct ucm_transfer *t)
{
    struct ucm_task *task;
    struct ucm_result r;
    bool all;

    if (ucm_load(w->region, t, -1, &task) != 0)
        return false;
    all = ucm_task_wait(task, 30000, &r) == 0 && r.n_ok == t->n_keys;
    ucm_task_free(task);
    return all;
}

/* Loads without a pause until the daemon is gone. A load that was told to have failed writes nothing
 * any more. Then it goes on with the next daemon, through a new ring. */
static int role_survivor(void)
{
    std::vector<uint8_t> keys;
    std::vector<uint32_t> blocks;
    struct worker w;
    struct ucm_task *tasks[4];
    struct ucm_result r;
    struct ucm_transfer t;
    unsigned loads = 0;
    double end;
    bool lost = false;

    worker_open(&w);
    t = transfer(keys, blocks, 1000, 64, true);
    for (unsigned i = 0; i < 4; i++)
        need(ucm_load(w.region, &t, -1, &tasks[i]) == 0, "load");
    while (!lost) {
        for (unsigned i = 0; i < 4 && !lost; i++) {
            lost = ucm_task_wait(tasks[i], 30000, &r) != 0;
            ucm_task_free(tasks[i]);
            tasks[i] = NULL;
            /* Too short for the next daemon to be there. */
            lost = lost || ucm_load(w.region, &t, 2, &tasks[i]) != 0;
        }
        if (++loads == 20) {
            puts("loading");
            fflush(stdout);
        }
    }
    for (unsigned i = 0; i < 4; i++)
        if (tasks[i]) {
            need(ucm_task_wait(tasks[i], 30000, &r) != 0, "a load under way when the daemon died fails");
            ucm_task_free(tasks[i]);
        }
    if (!staged()) /* what the engines were given may go on for a moment, without anybody's help */
        usleep(100000);
    poison(&w);
    usleep(100000);
    need(compare(&w, 1000, 0) == 0, "nothing is written after that");
    for (end = now_s() + 20; !load_all(&w, &t) && now_s() < end;)
        usleep(20000);
    need(load_all(&w, &t), "the next daemon serves it");
    usleep(300000); /* the ring follows the connection */
    need(load_and_compare(&w, 1000, 64) == 0, "bit for bit");
    worker_close(&w);
    return 0;
}

static int role_free_bytes(void)
{
    size_t free_bytes, total;

    need(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess, "cudaMemGetInfo");
    printf("%zu\n", free_bytes);
    return 0;
}

/* ---- the test ---- */

static char self[512], dir[64];
static pid_t daemon_pid;

/* Starts a role; *out, when not NULL, receives the read end of its standard output. */
static pid_t role_start(const char *role, int *out)
{
    int fds[2];
    pid_t pid;

    if (pipe(fds) != 0)
        exit(1);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fds[1], 1);
        close(fds[0]);
        execl(self, self, role, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    if (out)
        *out = fds[0];
    else
        close(fds[0]);
    return pid;
}

static bool role_ends(pid_t pid)
{
    int status;

    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static size_t free_bytes(void)
{
    char text[64] = "";
    int out;
    pid_t pid = role_start("free", &out);
    ssize_t n = read(out, text, sizeof(text) - 1);

    close(out);
    return role_ends(pid) && n > 0 ? strtoull(text, NULL, 10) : 0;
}

/* The socket's folder stays the same from one daemon to the next. */
static void daemon_start(void)
{
    const char *ucmd = getenv("UCMD");
    char beside[520], socket_set[128], paths_set[128], pid[16];

    snprintf(beside, sizeof(beside), "%.500s", self);
    strcpy(strrchr(beside, '/'), "/ucmd");
    if (!*dir) {
        snprintf(dir, sizeof(dir), "/tmp/ucm-gpu-XXXXXX");
        if (!mkdtemp(dir))
            exit(1);
    }
    snprintf(socket_set, sizeof(socket_set), "socket=%s/s", dir);
    snprintf(paths_set, sizeof(paths_set), "nvme.paths=%s", dir);
    setenv("UCM_SOCKET", socket_set + strlen("socket="), 1);
    daemon_pid = fork();
    if (daemon_pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(ucmd ? ucmd : beside, "ucmd", "--set", socket_set, "--set", paths_set, "--set",
              "nvme.size=1GiB", "--set", "arena.size=1GiB", "--set", "device.cuda=required",
              "--set", staged() ? "copy.strategy=staged" : "copy.strategy=auto", (char *)NULL);
        _exit(127);
    }
    snprintf(pid, sizeof(pid), "%d", (int)daemon_pid);
    setenv("UCM_TEST_DAEMON", pid, 1);
}

/* How many of the victim's blocks a lookup finds. */
static uint32_t victim_hits(struct ucm_client *c)
{
    std::vector<uint8_t> keys(64 * KEY_BYTES);
    uint32_t shards = LAYERS, hits = 99, lease;
    struct ucm_identity id = {};
    struct ucm_namespace *ns;
    struct ucm_lookup l = {};
    std::vector<uint8_t> found(64);

    id.model = "gpu-test";
    id.dtype = "bf16";
    id.layout = "split-kv/1";
    id.block_tokens = 16;
    id.key_bytes = KEY_BYTES;
    id.parts = 1;
    id.shards = &shards;
    id.n_shards = 1;
    id.shard_bytes = 2 * CHUNK;
    if (ucm_namespace_open(c, &id, -1, &ns) != 0)
        return 99;
    for (unsigned i = 0; i < 64; i++)
        key_make(5000 + i, keys.data() + i * KEY_BYTES);
    l.keys = keys.data();
    l.n_keys = 64;
    if (ucm_lookup_each(ns, &l, -1, found.data(), &hits, &lease) != 0)
        hits = 99;
    ucm_namespace_close(ns);
    return hits;
}

static void evict_from_dram(struct ucm_client *c)
{
    static const uint8_t params[] = "\x82\xa2ns\x01\xa4tier\x01";
    uint8_t *p;
    size_t n;

    for (int i = 0; i < 100; i++) {
        usleep(50000); /* write-behind comes first: what lies nowhere else stays */
        if (ucm_call(c, "evict", params, sizeof(params) - 1, -1, &p, &n) == 0)
            free(p);
    }
}

/* Do stats say that a device moved bytes through slices? */
static bool staged_moved(struct ucm_client *c)
{
    static const char name[] = "staged_bytes";
    const uint8_t *at;
    uint8_t *p;
    size_t n;
    bool moved = false;

    if (ucm_call(c, "stats", NULL, 0, -1, &p, &n) != 0)
        return false;
    at = p;
    while ((at = (const uint8_t *)memmem(at, n - (size_t)(at - p), name, sizeof(name) - 1)) != NULL) {
        at += sizeof(name) - 1;
        moved |= *at != 0;
    }
    free(p);
    return moved;
}

/* The daemon is killed in the middle of a worker's loads. */
static void test_daemon_killed(struct ucm_client *c)
{
    char said[16] = "";
    int out, status;
    pid_t survivor = role_start("survivor", &out);
    double start;

    check(read(out, said, sizeof(said)) > 0, "a worker loads without a pause");
    usleep(3000);
    kill(daemon_pid, SIGKILL);
    waitpid(daemon_pid, &status, 0);
    daemon_start();
    check(role_ends(survivor), "it survives the daemon: nothing is written late, and loads go on");
    for (start = now_s(); !staged_moved(c) && now_s() < start + 1;)
        usleep(20000);
    check(staged_moved(c) == staged(), staged() ? "through a new ring" : "through none");
    close(out);
}

static void test_daemon_killed_under_streams(void)
{
    int status;

    check(role_ends(role_start("stream-orphan", NULL)), "streams that wait for a daemon come free when it dies");
    kill(daemon_pid, SIGKILL);
    waitpid(daemon_pid, &status, 0);
    daemon_start();
    check(role_ends(role_start("consume-stream", NULL)), "and wait for the next one's layers");
}

static int test_main(void)
{
    struct ucm_client *c = NULL;
    char said[16] = "";
    size_t before, after = 0;
    double start;
    pid_t consumer, victim;
    int out, status;

    daemon_start();
    for (start = now_s(); ucm_connect(NULL, 500, &c) != 0 && now_s() < start + 20;)
        usleep(20000);
    check(c != NULL, "the daemon answers");
    if (!c)
        return 1;
    check(role_ends(role_start("produce", NULL)), "a worker dumps behind its event and ends");
    check(role_ends(role_start("consume", NULL)), "another loads it, bit for bit");
    check(role_ends(role_start("produce-layers", NULL)), "a worker dumps layer by layer, each behind its event");
    check(role_ends(role_start("consume-layers", NULL)), "each layer of a load lies there when it is told of");
    check(role_ends(role_start("consume-stream", NULL)), "kernels behind a stream's waits see each layer");
    before = free_bytes();

    victim = role_start("victim", &out);
    check(read(out, said, sizeof(said)) > 0, "a third is in the middle of a dump");
    consumer = role_start("consume", NULL);
    usleep(200000);
    start = now_s();
    kill(victim, SIGKILL);
    waitpid(victim, &status, 0);
    check(role_ends(consumer), "a load beside it, over its death, is right");
    while (now_s() < start + 10) {
        after = free_bytes();
        if (after + (64u << 20) > before)
            break;
    }
    printf("     free GPU memory %zu MiB before, %zu MiB after, %.1f s after the kill\n", before >> 20,
           after >> 20, now_s() - start);
    check(now_s() - start < 5 && after + (64u << 20) > before, "its GPU memory is free in 5 s");
    check(victim_hits(c) == 0, "nothing of its dump is found");
    check(role_ends(role_start("consume", NULL)), "the daemon serves on, bit for bit");
    check(staged_moved(c) == staged(), staged() ? "through the workers' companions" : "and through no ring");
    evict_from_dram(c);
    check(role_ends(role_start("consume", NULL)), "the same from NVMe, bit for bit");
    test_daemon_killed(c);
    test_daemon_killed_under_streams();
    ucm_close(c);
    kill(daemon_pid, SIGTERM);
    check(role_ends(daemon_pid), "the daemon stops cleanly");
    return failed ? 1 : 0;
}

int main(int argc, char **argv)
{
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char remove[128];
    int rc;

    if (n <= 0)
        return 1;
    if (argc > 1 && !strcmp(argv[1], "produce"))
        return role_produce();
    if (argc > 1 && !strcmp(argv[1], "consume"))
        return role_consume();
    if (argc > 1 && !strcmp(argv[1], "produce-layers"))
        return role_produce_layers();
    if (argc > 1 && !strcmp(argv[1], "consume-layers"))
        return role_consume_layers();
    if (argc > 1 && !strcmp(argv[1], "consume-stream"))
        return role_consume_stream();
    if (argc > 1 && !strcmp(argv[1], "stream-orphan"))
        return role_stream_orphan();
    if (argc > 1 && !strcmp(argv[1], "victim"))
        return role_victim();
    if (argc > 1 && !strcmp(argv[1], "survivor"))
        return role_survivor();
    if (argc > 1 && !strcmp(argv[1], "free"))
        return role_free_bytes();
    rc = test_main();
    snprintf(remove, sizeof(remove), "rm -rf %s", dir);
    if (system(remove) != 0)
        rc = 1;
    printf("%d passed, %d failed\n", passed, failed);
    return rc;
}
