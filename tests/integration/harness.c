#include "tests/integration/harness.h"

#include "tests/runner/bytes.h"
#include "tests/runner/wipe.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <msgpack.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define START_MS 60000 /* to start, or to stop */
#define PATIENCE 3     /* times the time that a test gives: hosts with other work are slow */

uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void sleep_ms(int ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};

    nanosleep(&t, NULL);
}

/* ---- the daemon ---- */

static void host_exec(const struct host *h)
{
    const char *ucmd = h->ucmd ? h->ucmd : getenv("UCMD");
    const char *argv[64] = {ucmd ? ucmd : "build/ucmd"};
    char socket[128], nvme[128];
    int n = 1;

    /* A test that failed must not leave its daemon running. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(socket, sizeof(socket), "socket=%s", h->socket);
    snprintf(nvme, sizeof(nvme), "nvme.paths=%s", h->dir);
    const char *fixed[] = {socket,
                           "arena.size=16MiB",
                           "arena.slab=1MiB",
                           "arena.prefault=false", /* most tests use little of it */
                           "metrics.socket=",      /* test_observe.py has it */
                           "device.cuda=off",
                           "shutdown.drain=20s", /* blocks written by then are there later */
                           h->nvme ? nvme : NULL,
                           "nvme.size=256MiB",
                           "nvme.segment=4MiB"};

    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        if (!fixed[i])
            break;
        argv[n++] = "--set";
        argv[n++] = fixed[i];
    }
    for (size_t i = 0; h->sets[i]; i++) {
        argv[n++] = "--set";
        argv[n++] = h->sets[i];
    }
    argv[n] = NULL;
    execv(argv[0], (char *const *)argv);
    fprintf(stderr, "cannot run %s: %s\n", argv[0], strerror(errno));
    _exit(127);
}

bool host_try_restart(struct host *h)
{
    struct ucm_options options = {.socket = h->socket, .name = "harness"};
    struct ucm_client *client = NULL;
    uint64_t end = now_ms() + START_MS;

    h->pid = fork();
    cr_assert_geq(h->pid, 0);
    if (h->pid == 0)
        host_exec(h);
    while (ucm_connect(&options, 200, &client) != 0) {
        if (waitpid(h->pid, &h->status, WNOHANG) != 0) {
            h->pid = 0;
            return false;
        }
        cr_assert_lt(now_ms(), end, "the daemon does not answer: %s", ucm_errmsg());
        sleep_ms(2);
    }
    ucm_close(client);
    return true;
}

void host_restart_at_once(struct host *h)
{
    cr_assert(host_try_restart(h), "the daemon ended at start, status %#x", h->status);
}

void host_restart(struct host *h)
{
    struct ucm_options options = {.socket = h->socket, .name = "harness"};
    struct ucm_client *client;
    uint64_t end = now_ms() + START_MS;

    host_restart_at_once(h);
    cr_assert_eq(ucm_connect(&options, START_MS, &client), 0, "%s", ucm_errmsg());
    for (; recovering(client); sleep_ms(2))
        cr_assert_lt(now_ms(), end, "recovery does not end");
    ucm_close(client);
}

void host_prepare(struct host *h)
{
    const char *tmp = getenv("TMPDIR");

    snprintf(h->dir, sizeof(h->dir), "%s/ucm-test-XXXXXX", tmp && strlen(tmp) < 32 ? tmp : "/tmp");
    cr_assert(mkdtemp(h->dir));
    snprintf(h->socket, sizeof(h->socket), "%s/s", h->dir);
}

void host_start(struct host *h)
{
    host_prepare(h);
    host_restart_at_once(h);
}

int host_stop(struct host *h)
{
    uint64_t end = now_ms() + START_MS;
    int status = -1;

    cr_assert_eq(kill(h->pid, SIGTERM), 0);
    while (waitpid(h->pid, &status, WNOHANG) == 0) {
        cr_assert_lt(now_ms(), end, "the daemon does not stop");
        sleep_ms(5);
    }
    h->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void host_kill(struct host *h)
{
    cr_assert_eq(kill(h->pid, SIGKILL), 0);
    cr_assert_eq(waitpid(h->pid, NULL, 0), h->pid);
    h->pid = 0;
}

void host_killed(struct host *h)
{
    int status;

    cr_assert_eq(waitpid(h->pid, &status, 0), h->pid);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %#x", status);
    h->pid = 0;
}

uint64_t host_rss_bytes(const struct host *h)
{
    unsigned long pages = 0;
    char path[64];
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)h->pid);
    f = fopen(path, "r");
    cr_assert(f);
    cr_assert_eq(fscanf(f, "%*u %lu", &pages), 1);
    fclose(f);
    return pages * UINT64_C(4096);
}

void host_remove(struct host *h)
{
    if (h->pid > 0)
        cr_expect_eq(host_stop(h), 0, "the daemon's exit status");
    (void)wipe(h->dir);
}

/* ---- a worker ---- */

int worker_region_try(struct worker *w)
{
    uint64_t half = w->layer_bytes / 2, plane_bytes = half * w->blocks;
    struct ucm_plane planes[128];
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD};
    struct ucm_region_spec spec = {.part = w->part,
                                   .blocks = w->blocks,
                                   .device = "cpu",
                                   .memory = &memory,
                                   .n_memory = 1,
                                   .planes = planes,
                                   .n_planes = 2 * w->layers};
    int rc;

    cr_assert_leq(spec.n_planes, 128u);
    w->memory_bytes = plane_bytes * spec.n_planes;
    cr_assert_eq(ucm_shared_memory(w->memory_bytes, &memory.fd, (void **)&w->memory), 0);
    memory.bytes = w->memory_bytes;
    for (uint32_t i = 0; i < spec.n_planes; i++)
        planes[i] = (struct ucm_plane){.offset = i * plane_bytes,
                                       .stride = half,
                                       .block_bytes = (uint32_t)half,
                                       .layer = i / 2};
    rc = ucm_region_register(w->ns, &spec, 20000, &w->region);
    close(memory.fd);
    return rc;
}

struct ucm_identity worker_identity(const struct worker_options *o, uint32_t *layers)
{
    *layers = o->layers ? o->layers : 4;
    return (struct ucm_identity){
        .model = o->model ? o->model : "test",
        .dtype = "bf16",
        .layout = "test/1",
        .block_tokens = 16,
        .key_bytes = WORKER_KEY_BYTES,
        .parts = o->parts ? o->parts : 1,
        .layers = layers,
        .n_layers = 1,
        .layer_bytes = o->layer_bytes ? o->layer_bytes : 8192,
        .durability = o->durability,
        .salt = o->salt,
        .salt_bytes = o->salt ? strlen(o->salt) : 0,
    };
}

void worker_open(struct worker *w, const struct host *h, const struct worker_options *o)
{
    struct ucm_options options = {.socket = h->socket, .name = "test", .default_timeout_ms = 30000};
    uint32_t layers;
    struct ucm_identity id = worker_identity(o, &layers);

    *w = (struct worker){.layers = layers,
                         .blocks = o->blocks ? o->blocks : 64,
                         .part = o->part,
                         .layer_bytes = id.layer_bytes};
    cr_assert_eq(ucm_connect(&options, 20000, &w->client), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_namespace_open(w->client, &id, -1, &w->ns), 0, "%s", ucm_errmsg());
    cr_assert_eq(worker_region_try(w), 0, "%s", ucm_errmsg());
}

void worker_close(struct worker *w)
{
    if (w->region)
        cr_expect_eq(ucm_region_unregister(w->region, -1), 0, "%s", ucm_errmsg());
    ucm_namespace_close(w->ns);
    ucm_close(w->client);
    munmap(w->memory, w->memory_bytes);
}

void worker_drop(struct worker *w)
{
    if (w->region)
        (void)ucm_region_unregister(w->region, 1000);
    if (w->ns)
        ucm_namespace_close(w->ns);
    if (w->client)
        ucm_close(w->client);
    if (w->memory)
        munmap(w->memory, w->memory_bytes);
    *w = (struct worker){0};
}

/* ---- patterns ---- */

void key_make(uint64_t number, uint8_t out[WORKER_KEY_BYTES])
{
    for (int i = 0; i < WORKER_KEY_BYTES / 8; i++) {
        uint64_t v = (number + 1) * UINT64_C(0x9E3779B97F4A7C15) + (uint64_t)i * 77;

        memcpy(out + 8 * i, &v, 8);
    }
}

void keys_make(uint64_t first, uint32_t n, uint8_t *out)
{
    for (uint32_t i = 0; i < n; i++)
        key_make(first + i, out + (size_t)i * WORKER_KEY_BYTES);
}

static uint8_t *worker_fragment(const struct worker *w, uint32_t plane, uint32_t block)
{
    uint64_t half = w->layer_bytes / 2;

    return w->memory + plane * half * w->blocks + block * half;
}

static uint64_t pattern(const struct worker *w, uint32_t plane, uint64_t seed)
{
    return seed * 1000003 + w->part * 131 + plane;
}

void worker_fill(struct worker *w, uint32_t block, uint64_t seed)
{
    for (uint32_t p = 0; p < 2 * w->layers; p++)
        bytes_fill(worker_fragment(w, p, block), w->layer_bytes / 2, pattern(w, p, seed));
}

void worker_clear(struct worker *w)
{
    bytes_set(w->memory, w->memory_bytes, 0xEE);
}

size_t worker_differs(const struct worker *w, uint32_t block, uint64_t seed)
{
    size_t n = 0;

    for (uint32_t p = 0; p < 2 * w->layers; p++)
        n += bytes_differ(worker_fragment(w, p, block), w->layer_bytes / 2, pattern(w, p, seed));
    return n;
}

/* ---- requests ---- */

static int task_end(struct ucm_task *task, uint32_t n, uint8_t *status)
{
    struct ucm_result r;
    int rc = ucm_task_wait(task, 30000, &r);

    if (rc == 0 && status)
        memcpy(status, r.result, n);
    ucm_task_free(task);
    return rc;
}

static int dump(struct worker *w, const uint8_t *keys, const uint32_t *blocks, uint32_t n,
                uint32_t durability, uint8_t *status)
{
    struct ucm_transfer t = {.keys = keys, .blocks = blocks, .n_keys = n, .durability = durability};
    struct ucm_task *task;
    int rc = ucm_dump(w->region, &t, -1, &task);

    return rc != 0 ? rc : task_end(task, n, status);
}

int worker_dump(struct worker *w, const uint8_t *keys, const uint32_t *blocks, uint32_t n,
                uint8_t *status)
{
    return dump(w, keys, blocks, n, UCM_DURABLE_DEFAULT, status);
}

int worker_dump_durable(struct worker *w, const uint8_t *keys, const uint32_t *blocks, uint32_t n,
                        uint8_t *status)
{
    return dump(w, keys, blocks, n, UCM_DURABLE_ON_NVME, status);
}

int worker_load(struct worker *w, const uint8_t *keys, const uint32_t *blocks, uint32_t n,
                uint8_t *status)
{
    struct ucm_transfer t = {.keys = keys, .blocks = blocks, .n_keys = n};
    struct ucm_task *task;
    int rc = ucm_load(w->region, &t, -1, &task);

    return rc != 0 ? rc : task_end(task, n, status);
}

/* Blocks 0 to n - 1, under keys number first to first + n. */
struct batch {
    uint8_t *keys, *status;
    uint32_t *blocks;
};

static struct batch batch_new(uint64_t first, uint32_t n)
{
    struct batch b = {.keys = malloc((size_t)n * WORKER_KEY_BYTES),
                      .status = malloc(n),
                      .blocks = malloc(n * sizeof(*b.blocks))};

    cr_assert(b.keys && b.status && b.blocks);
    keys_make(first, n, b.keys);
    for (uint32_t i = 0; i < n; i++)
        b.blocks[i] = i;
    return b;
}

static void batch_free(struct batch *b)
{
    free(b->keys);
    free(b->status);
    free(b->blocks);
}

uint32_t worker_hits(struct worker *w, uint64_t first, uint32_t n)
{
    struct batch b = batch_new(first, n);
    struct ucm_lookup l = {.keys = b.keys, .n_keys = n};
    uint32_t hits = 0, lease;

    cr_assert_eq(ucm_lookup_prefix(w->ns, &l, -1, &hits, NULL, &lease), 0, "%s", ucm_errmsg());
    batch_free(&b);
    return hits;
}

void worker_store_as(struct worker *w, uint64_t first, uint32_t n, uint32_t durability,
                     uint8_t expected)
{
    struct batch b = batch_new(first, n);

    for (uint32_t i = 0; i < n; i++)
        worker_fill(w, i, first + i);
    cr_assert_eq(dump(w, b.keys, b.blocks, n, durability, b.status), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < n; i++) {
        bool there = b.status[i] == UCM_BLOCK_IS_OK || b.status[i] == UCM_BLOCK_IS_EXISTS;

        cr_assert(expected == IS_STORED ? there : b.status[i] == expected, "block %u: status %u", i,
                  b.status[i]);
    }
    batch_free(&b);
}

void worker_store(struct worker *w, uint64_t first, uint32_t n)
{
    worker_store_as(w, first, n, UCM_DURABLE_DEFAULT, UCM_BLOCK_IS_OK);
}

void worker_store_durable(struct worker *w, uint64_t first, uint32_t n, uint8_t expected)
{
    worker_store_as(w, first, n, UCM_DURABLE_ON_NVME, expected);
}

uint8_t worker_dump_one(struct worker *w, uint64_t number)
{
    uint8_t key[WORKER_KEY_BYTES], status = UCM_BLOCK_IS_FAILED;

    key_make(number, key);
    worker_fill(w, 0, number);
    cr_assert_eq(worker_dump_durable(w, key, &(uint32_t){0}, 1, &status), 0, "%s", ucm_errmsg());
    return status;
}

static uint32_t found(struct worker *w, uint64_t first, uint32_t n, uint8_t *status)
{
    struct batch b = batch_new(first, n);
    uint32_t there = 0;

    worker_clear(w);
    cr_assert_eq(worker_load(w, b.keys, b.blocks, n, b.status), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < n; i++) {
        if (b.status[i] != UCM_BLOCK_IS_OK)
            continue;
        there++;
        cr_assert_eq(worker_differs(w, i, first + i), 0u, "key %llu has WRONG BYTES",
                     (unsigned long long)(first + i));
    }
    if (status)
        memcpy(status, b.status, n);
    batch_free(&b);
    return there;
}

uint32_t worker_found(struct worker *w, uint64_t first, uint32_t n, uint8_t *status)
{
    uint32_t there = 0;

    for (uint32_t at = 0; at < n; at += w->blocks)
        there += found(w, first + at, n - at < w->blocks ? n - at : w->blocks,
                       status ? status + at : NULL);
    return there;
}

void worker_expect(struct worker *w, uint64_t first, uint32_t n)
{
    uint32_t there = worker_found(w, first, n, NULL);

    cr_assert_eq(there, n, "%u of %u blocks from key %llu on are there", there, n,
                 (unsigned long long)first);
}

/* ---- operators' calls, and commands ---- */

static int call(struct ucm_client *c, const char *method, const uint8_t *params, size_t n,
                int timeout_ms)
{
    uint8_t *answer = NULL;
    size_t bytes;
    int rc = ucm_call(c, method, params, n, timeout_ms, &answer, &bytes);

    free(answer);
    return rc;
}

int purge_ns(struct ucm_client *c, uint8_t ns, int timeout_ms)
{
    const uint8_t params[] = {0x81, 0xa2, 'n', 's', ns};

    return call(c, "namespace.purge", params, sizeof(params), timeout_ms);
}

int evict_dram(struct ucm_client *c, uint8_t ns, int timeout_ms)
{
    const uint8_t params[] = {0x82, 0xa2, 'n', 's', ns, 0xa4, 't', 'i', 'e', 'r', 1};

    return call(c, "evict", params, sizeof(params), timeout_ms);
}

static int run(const char *command, char *out, size_t cap)
{
    FILE *f = popen(command, "r");
    size_t n;
    int status;

    cr_assert_not_null(f);
    n = fread(out, 1, cap - 1, f);
    out[n] = '\0';
    if (n > 0 && out[n - 1] == '\n')
        out[n - 1] = '\0';
    while (fgetc(f) != EOF)
        ;
    status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int shell(char *out, size_t cap, const char *format, ...)
{
    char command[600];
    va_list args;

    va_start(args, format);
    vsnprintf(command, sizeof(command), format, args);
    va_end(args);
    return run(command, out, cap);
}

int ucmctl(char *out, size_t cap, const char *format, ...)
{
    const char *program = getenv("UCMCTL");
    char command[600];
    va_list args;
    int n = snprintf(command, sizeof(command), "%s ", program ? program : "build/ucmctl");

    va_start(args, format);
    vsnprintf(command + n, sizeof(command) - (size_t)n, format, args);
    va_end(args);
    return run(command, out, cap);
}

/* ---- stats ---- */

static const msgpack_object *map_find(const msgpack_object *map, const char *name)
{
    cr_assert_eq(map->type, MSGPACK_OBJECT_MAP);
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object *k = &map->via.map.ptr[i].key;

        if (k->type == MSGPACK_OBJECT_STR && k->via.str.size == strlen(name) &&
            memcmp(k->via.str.ptr, name, k->via.str.size) == 0)
            return &map->via.map.ptr[i].val;
    }
    cr_assert_fail("stats has no %s", name);
    return NULL;
}

uint64_t metric(struct ucm_client *c, const char *name)
{
    msgpack_unpacked unpacked;
    uint8_t *p;
    size_t n, off = 0;
    uint64_t value;

    cr_assert_eq(ucm_call(c, "stats", NULL, 0, -1, &p, &n), 0, "%s", ucm_errmsg());
    msgpack_unpacked_init(&unpacked);
    cr_assert_eq(msgpack_unpack_next(&unpacked, (char *)p, n, &off), MSGPACK_UNPACK_SUCCESS);
    value = map_find(map_find(&unpacked.data, "metrics"), name)->via.u64;
    msgpack_unpacked_destroy(&unpacked);
    free(p);
    return value;
}

bool metric_reaches(struct ucm_client *c, const char *name, uint64_t least, int timeout_ms)
{
    uint64_t end = now_ms() + (uint64_t)timeout_ms * PATIENCE;

    while (metric(c, name) < least) {
        if (now_ms() > end)
            return false;
        sleep_ms(5);
    }
    return true;
}

void arena_wait(struct ucm_client *c)
{
    cr_assert(metric_reaches(c, "arena_bytes_total", metric(c, "arena_bytes_configured"), 20000),
              "the arena does not grow");
}

bool health_is(struct ucm_client *c, const char *status)
{
    msgpack_unpacked unpacked;
    const msgpack_object *o;
    uint8_t *p;
    size_t n, off = 0;
    bool is;

    cr_assert_eq(ucm_call(c, "health", NULL, 0, -1, &p, &n), 0, "%s", ucm_errmsg());
    msgpack_unpacked_init(&unpacked);
    cr_assert_eq(msgpack_unpack_next(&unpacked, (char *)p, n, &off), MSGPACK_UNPACK_SUCCESS);
    o = map_find(&unpacked.data, "status");
    is = o->via.str.size == strlen(status) && memcmp(o->via.str.ptr, status, strlen(status)) == 0;
    msgpack_unpacked_destroy(&unpacked);
    free(p);
    return is;
}

void wait_ok(struct ucm_client *c)
{
    for (uint64_t end = now_ms() + START_MS; !health_is(c, "ok"); sleep_ms(2))
        cr_assert_lt(now_ms(), end, "its health does not become ok");
}

bool health_says(struct ucm_client *c, const char *text)
{
    uint8_t *p;
    size_t n;
    bool says;

    cr_assert_eq(ucm_call(c, "health", NULL, 0, -1, &p, &n), 0, "%s", ucm_errmsg());
    says = memmem(p, n, text, strlen(text)) != NULL;
    free(p);
    return says;
}

bool recovering(struct ucm_client *c)
{
    return health_says(c, "recovering") || health_says(c, "of the snapshot looked at");
}

/* ---- raw sockets ---- */

int raw_connect(const struct host *h)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    snprintf(a.sun_path, sizeof(a.sun_path), "%s", h->socket);
    cr_assert_geq(fd, 0);
    cr_assert_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0, "%s", strerror(errno));
    return fd;
}

bool raw_write(int fd, const void *p, size_t n)
{
    while (n > 0) {
        ssize_t w = send(fd, p, n, MSG_NOSIGNAL);

        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0)
            return false;
        p = (const char *)p + w;
        n -= (size_t)w;
    }
    return true;
}

/* False at the end or after the time. */
static bool read_all(int fd, uint8_t *p, size_t n, uint64_t end, bool *timeout)
{
    while (n > 0) {
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        uint64_t now = now_ms();
        ssize_t r;

        if (now >= end || poll(&poll_fd, 1, (int)(end - now)) == 0) {
            *timeout = true;
            return false;
        }
        r = recv(fd, p, n, 0);
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            return false;
        p += r;
        n -= (size_t)r;
    }
    return true;
}

ssize_t raw_frame(int fd, uint8_t *buf, size_t cap, int timeout_ms)
{
    uint64_t end = now_ms() + (uint64_t)timeout_ms * PATIENCE;
    bool timeout = false;
    uint8_t h[4];
    size_t n;

    if (!read_all(fd, h, 4, end, &timeout))
        return timeout ? -1 : 0;
    n = (size_t)h[0] << 24 | (size_t)h[1] << 16 | (size_t)h[2] << 8 | h[3];
    cr_assert_leq(n, cap);
    if (!read_all(fd, buf, n, end, &timeout))
        return timeout ? -1 : 0;
    return (ssize_t)n;
}

bool raw_closed(int fd, int timeout_ms)
{
    uint64_t end = now_ms() + (uint64_t)timeout_ms * PATIENCE;
    uint8_t buf[4096];
    bool timeout = false;

    while (read_all(fd, buf, 1, end, &timeout))
        continue;
    return !timeout;
}

void raw_hello(int fd)
{
    /* [0, 1, "hello", {version_min: 1, version_max: 1, client: "raw"}] */
    static const char frame[] = "\x00\x00\x00\x2f\x94\x00\x01\xa5hello\x83\xabversion_min\x01"
                                "\xabversion_max\x01\xa6"
                                "client\xa3raw";
    uint8_t buf[4096];

    cr_assert(raw_write(fd, frame, sizeof(frame) - 1));
    cr_assert_gt(raw_frame(fd, buf, sizeof(buf), 5000), 0);
}
