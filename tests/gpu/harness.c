#include "tests/gpu/harness.h"

#include "daemon/config/config.h"
#include "daemon/cuda/api.h"
#include "tests/gpu/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAIT_MS 30000

static unsigned passed, failed;

bool check(bool condition, const char *file, int line, const char *format, ...)
{
    va_list args;

    condition ? passed++ : failed++;
    printf("%s  ", condition ? "PASS" : "FAIL");
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    if (!condition)
        printf("  (%s:%d)", file, line);
    printf("\n");
    return condition;
}

int tally(void)
{
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}

void die(const char *what)
{
    printf("FAIL  %s: %s\n%u passed, %u failed\n", what, strerror(errno), passed, failed + 1);
    exit(1);
}

/* ---- workers ---- */

/* Tests run once for each strategy: UCM_TEST_STRATEGY names it. */
static enum copy_strategy strategy_wanted(void)
{
    const char *name = getenv("UCM_TEST_STRATEGY");

    if (name && strcmp(name, "dma") == 0)
        return COPY_DMA;
    if (name && strcmp(name, "sm") == 0)
        return COPY_SM;
    if (name && strcmp(name, "staged") == 0)
        return COPY_STAGED;
    return COPY_AUTO;
}

static uint8_t *shared_map(int fd)
{
    void *p = mmap(NULL, WORKER_SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (p == MAP_FAILED)
        die("mmap");
    return p;
}

void harness_main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 4 && strcmp(argv[1], "worker") == 0)
        exit(worker_main(atoi(argv[2]), shared_map(atoi(argv[3]))));
}

void worker_start(struct test_worker *w)
{
    int sockets[2], fd = memfd_create("shared", 0);
    char a[16], b[16];

    if (fd < 0 || ftruncate(fd, WORKER_SHARED_BYTES) < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) < 0)
        die("worker");
    fcntl(sockets[0], F_SETFD, FD_CLOEXEC);
    w->pid = fork();
    if (w->pid == 0) {
        snprintf(a, sizeof(a), "%d", sockets[1]);
        snprintf(b, sizeof(b), "%d", fd);
        execl("/proc/self/exe", "test", "worker", a, b, (char *)NULL);
        _exit(127);
    }
    close(sockets[1]);
    w->socket = sockets[0];
    w->fd = -1;
    w->shared = shared_map(fd);
    close(fd);
    rings_watch(w);
}

static void receive(struct test_worker *w)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {&w->reply, sizeof(w->reply)};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = &control,
                       .msg_controllen = sizeof(control)};
    struct pollfd p = {w->socket, POLLIN, 0};

    if (poll(&p, 1, WAIT_MS) != 1 || recvmsg(w->socket, &m, 0) != (ssize_t)sizeof(w->reply))
        die("the worker does not answer");
    if (CMSG_FIRSTHDR(&m))
        memcpy(&w->fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(w->fd));
}

bool worker_do(struct test_worker *w, enum worker_op op, uint64_t bytes, uint64_t offset,
               unsigned ms)
{
    struct worker_request q = {op, ms, bytes, offset};

    if (send(w->socket, &q, sizeof(q), MSG_NOSIGNAL) != (ssize_t)sizeof(q))
        die("the worker is gone");
    receive(w);
    return w->reply.error == 0;
}

void worker_kill(struct test_worker *w)
{
    kill(w->pid, SIGKILL);
    waitpid(w->pid, NULL, 0);
    close(w->socket);
    if (w->fd >= 0)
        close(w->fd);
    munmap(w->shared, WORKER_SHARED_BYTES);
}

/* ---- the device ---- */

static void failed_cb(void *ctx, const char *why)
{
    struct test_device *t = ctx;

    t->failures++;
    snprintf(t->why, sizeof(t->why), "%s", why);
}

static void found_cb(void *ctx, uint32_t gpus, const char *note)
{
    struct test_device *t = ctx;

    printf("INFO  %u GPUs found%s%s\n", gpus, *note ? ": " : "", note);
    t->gpus = gpus;
    uv_stop(&t->loop);
}

void device_start(struct test_device *t, uint64_t slots_bytes)
{
    struct device_config config = {.cpu_threads = 1,
                                   .cuda = CONFIG_CUDA_AUTO,
                                   .strategy = strategy_wanted(),
                                   .calibration = getenv("UCM_TEST_CALIBRATION"),
                                   .failed_cb = failed_cb,
                                   .found_cb = found_cb,
                                   .ctx = t};
    struct test_worker w;
    struct ucm_error e = {0};
    uint64_t begin;
    char note[200];

    memset(t, 0, sizeof(*t));
    worker_start(&w);
    if (!worker_do(&w, WORKER_HELLO, 0, 0, 0))
        die("no GPU");
    memcpy(t->uuid, w.reply.handle, sizeof(t->uuid));
    worker_kill(&w);
    begin = uv_hrtime();
    uv_loop_init(&t->loop);
    if (device_set_new(&t->loop, &config, &t->set, note, &e) < 0)
        die(e.text);
    printf("INFO  device_set_new took %.1f ms: %s\n", (double)(uv_hrtime() - begin) / 1e6, note);
    t->slots_bytes = slots_bytes;
    t->slots = mmap(NULL, slots_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (t->slots == MAP_FAILED)
        die("slots");
    (void)madvise(t->slots, slots_bytes, MADV_HUGEPAGE); /* as the arena asks */
    memset(t->slots, 0, slots_bytes);
    if (device_set_memory_add(t->set, t->slots, slots_bytes) < 0)
        die("memory_add");
    uv_run(&t->loop, UV_RUN_DEFAULT);
    printf("INFO  GPUs were ready %.1f ms later\n", (double)(uv_hrtime() - begin) / 1e6);
    if (getenv("UCM_TEST_NO_BATCHES")) {
        cuda.cuMemcpyBatchAsync = NULL;
        cuda.cuMemcpy3DBatchAsync = NULL;
    }
    if (!device_use(t, t->uuid))
        die("the first GPU");
}

bool device_use(struct test_device *t, const uint8_t uuid[UCM_UUID_BYTES])
{
    struct ucm_error e = {0};

    memmove(t->uuid, uuid, sizeof(t->uuid));
    t->gpu = device_set_find(t->set, (struct proto_str){"cuda", 4},
                             (struct proto_bin){t->uuid, sizeof(t->uuid)}, &e);
    if (!t->gpu)
        printf("INFO  %s\n", e.text);
    return t->gpu != NULL;
}

void device_stop(struct test_device *t)
{
    rings_close(t);
    device_set_free(t->set);
    uv_run(&t->loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&t->loop) == 0, "the event loop is empty after device_set_free");
    munmap(t->slots, t->slots_bytes);
}

/* ---- regions and jobs ---- */

const struct test_layout layout_flat = {.name = "flat",
                                        .layers = 1,
                                        .n_handles = 1,
                                        .n_planes = 1,
                                        .blocks = FLAT_BLOCKS,
                                        .layer_bytes = MIB,
                                        .planes = {{.stride = MIB, .block_bytes = MIB}}};

void flat_items(const struct test_device *t, uint64_t first,
                struct ucm_copy_item items[FLAT_BLOCKS])
{
    for (uint32_t i = 0; i < FLAT_BLOCKS; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)t->slots + first + i * MIB,
                                          .block = i};
}

int region_make(struct test_device *t, const struct test_layout *layout, pid_t pid,
                const uint8_t *ipc, int fd, uint64_t offset, uint64_t bytes,
                struct device_region **out)
{
    struct msg_handle handles[16];
    struct msg_region_register m = {.ns = 1,
                                    .blocks = layout->blocks,
                                    .device = {"cuda", 4},
                                    .gpu = {t->uuid, sizeof(t->uuid)}};
    struct form pages = {.layer_bytes = layout->layer_bytes, .layers = layout->layers};
    struct ucm_error e = {0};
    int fds[1] = {-1}, rc;

    for (uint32_t i = 0; i < layout->n_handles; i++)
        handles[i] = (struct msg_handle){.kind = ipc ? UCM_HANDLE_CUDA_IPC : UCM_HANDLE_CUDA_FD,
                                         .bytes = bytes - layout->handle_offsets[i],
                                         .offset = offset + layout->handle_offsets[i],
                                         .ipc = {ipc, ipc ? 64 : 0}};
    m.handles = (struct proto_handles){handles, layout->n_handles};
    m.planes = (struct proto_planes){layout->planes, layout->n_planes};
    if (!ipc)
        fds[0] = dup(fd);
    rc = region_check(&m, &pages, NULL, fds, !ipc, out, &e);
    if (fds[0] >= 0)
        close(fds[0]);
    if (rc < 0) {
        printf("INFO  region_check: %s\n", e.text);
        return rc;
    }
    (*out)->device = t->gpu;
    (*out)->pid = pid;
    (*out)->connection = (uint64_t)pid;
    return 0;
}

int region_open(struct test_device *t, const struct test_layout *layout, pid_t pid,
                const uint8_t *ipc, int fd, uint64_t offset, uint64_t bytes,
                struct device_region **out, struct ucm_error *error)
{
    struct test_proof proof;
    struct device_region *r;
    struct test_job j;
    int rc = region_make(t, layout, pid, ipc, fd, offset, bytes, &r);

    if (rc < 0)
        return rc;
    job_init(&j, DEVICE_OPEN, r, NULL, 0);
    proof_write(t, r, &proof);
    rc = job_run(t, &j);
    proof_undo(t, r, &proof);
    *error = j.job.error;
    if (rc < 0) {
        region_free(r);
        return rc;
    }
    ring_region(t, r, offset);
    *out = r;
    return rc;
}

void region_shut(struct test_device *t, struct device_region *r)
{
    struct test_job j;

    job_init(&j, DEVICE_CLOSE, r, NULL, 0);
    if (job_run(t, &j) != 0)
        CHECK(false, "closing a region: %s", j.job.error.text);
    region_free(r);
}

void job_done(struct device_job *job, int status)
{
    struct test_job *j = LIST_ENTRY(job, struct test_job, job);

    j->done = true;
    j->status = status;
    j->done_ns = uv_hrtime();
}

void job_init(struct test_job *j, enum device_op op, struct device_region *r,
              struct ucm_copy_item *items, uint32_t n)
{
    *j = (struct test_job){.job = {.op = op,
                                   .region = r,
                                   .items = items,
                                   .n_items = n,
                                   .n_planes = r->n_planes,
                                   .done_cb = job_done}};
}

void job_submit(struct test_device *t, struct test_job *j)
{
    j->done = false;
    if (t->gpu->ops->submit(t->gpu, &j->job) < 0)
        die("submit");
}

int job_wait(struct test_device *t, struct test_job *j)
{
    uint64_t begin = uv_hrtime();

    while (!j->done) {
        uv_run(&t->loop, UV_RUN_NOWAIT);
        if (uv_hrtime() - begin > WAIT_MS * 1000000ull)
            die("a job does not end");
    }
    return j->status;
}

int job_run(struct test_device *t, struct test_job *j)
{
    job_submit(t, j);
    return job_wait(t, j);
}

uint64_t now_ms(struct test_device *t)
{
    uv_update_time(&t->loop);
    return uv_now(&t->loop);
}

void loop_for(struct test_device *t, unsigned ms)
{
    uint64_t end = uv_hrtime() + ms * 1000000ull;

    while (uv_hrtime() < end) {
        uv_run(&t->loop, UV_RUN_NOWAIT);
        usleep(200);
    }
}

/* ---- the oracle ---- */

uint64_t random_next(uint64_t *state)
{
    uint64_t x = *state += 0x9E3779B97F4A7C15ull;

    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

void random_bytes(void *p, size_t n, uint64_t seed)
{
    uint8_t *bytes = p;

    for (size_t i = 0; i < n; i += 8) {
        uint64_t x = random_next(&seed);

        memcpy(bytes + i, &x, n - i < 8 ? n - i : 8);
    }
}

void oracle_copy(const struct test_device *t, const struct device_region *r,
                 const struct ucm_copy_item *items, uint32_t n, uint8_t *slots, uint8_t *shadow,
                 uint64_t offset, enum ucm_copy_direction direction, uint32_t first_plane,
                 uint32_t n_planes)
{
    struct ucm_copy_plane planes[128];

    for (uint32_t p = 0; p < n_planes; p++) {
        struct ucm_copy_plane *plane = &planes[p];

        *plane = r->planes[first_plane + p];
        plane->base += (uint64_t)(uintptr_t)shadow - r->handles[plane->memory].address - offset;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct ucm_copy_item item = items[i];

        item.slot = item.slot - (uint64_t)(uintptr_t)t->slots + (uint64_t)(uintptr_t)slots;
        ucm_copy_ref(planes, n_planes, &item, 1, direction);
    }
}
