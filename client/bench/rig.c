#include "client/bench/rig.h"

#include "client/bench/copy_agent.h"
#include "client/bench/pattern.h"
#include "client/ctl/answer.h"
#include "proto/proto.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_IN_FLIGHT 64
#define POLL_MS 20
#define POLL_WRITTEN_MS 2 /* what waits for it is being measured */
#define WRITTEN_TIMEOUT_MS 60000
#define EVICT_TIMEOUT_MS 10000
#define ARENA_TIMEOUT_MS 30000
#define POISON 0xdb

static int fail(struct rig *rig, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static int fail(struct rig *rig, int status, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    vsnprintf(rig->error, sizeof rig->error, format, ap);
    va_end(ap);
    return status;
}

/* A library call failed: its own sentence. */
static int fail_call(struct rig *rig, const char *what, int status)
{
    const char *text = ucm_errmsg();

    return fail(rig, status, "%s: %s", what, text[0] != '\0' ? text : ucm_strerror(status));
}

/* ---- operators' calls ---- */

static int call(struct rig *rig, enum ucm_method method, const void *params, struct answer *out)
{
    int rc = answer_call(rig->client, method, params, rig->timeout_ms, out);

    return rc < 0 ? fail_call(rig, proto_methods[method].name.p, rc) : 0;
}

int rig_metric(struct rig *rig, const char *name, uint64_t *out)
{
    struct answer stats;
    int rc = call(rig, UCM_METHOD_STATS, NULL, &stats);

    if (rc < 0)
        return rc;
    *out = answer_u64(answer_get(stats.root, "metrics"), name);
    answer_close(&stats);
    return 0;
}

static void pause_ms(long ms)
{
    const struct timespec t = {.tv_nsec = ms * 1000000};

    nanosleep(&t, NULL);
}

static int wait_arena(struct rig *rig)
{
    uint64_t configured = 0, ready = 0;
    int rc = rig_metric(rig, "arena_bytes_configured", &configured);

    for (int ms = 0; rc == 0 && ms < ARENA_TIMEOUT_MS; ms += POLL_MS) {
        rc = rig_metric(rig, "arena_bytes_total", &ready);
        if (rc == 0 && ready >= configured)
            break;
        pause_ms(POLL_MS);
    }
    return rc;
}

/* ---- opening ---- */

static int open_encoded(struct rig *rig, const struct rig_encoding *e)
{
    const struct ucm_encoded_form form = {.encoding = e->name,
                                          .dtype = "bf16",
                                          .k = {e->tokens, e->heads, e->dim},
                                          .v = {e->tokens, e->heads, e->dim}};
    int rc;

    rig->base = rig->ns;
    rig->ns = NULL;
    rc = ucm_encoding_open(rig->base, &form, rig->timeout_ms, &rig->ns);
    return rc < 0 ? fail_call(rig, "opening the encoded namespace", rc) : 0;
}

static int open_namespace(struct rig *rig, const struct rig_options *o)
{
    uint32_t layers = rig->planes / rig->tensors;
    struct ucm_identity identity = {
        .model = o->model,
        .dtype = "u8",
        .layout = "bench-planes/1",
        .block_tokens = 512,
        .key_bytes = RIG_KEY_BYTES,
        .parts = o->parts,
        .layers = &layers,
        .n_layers = 1,
        .layer_bytes = (uint64_t)rig->fragment * rig->tensors,
    };
    int rc = ucm_namespace_open(rig->client, &identity, rig->timeout_ms, &rig->ns);

    if (rc < 0)
        return fail_call(rig, "opening the namespace", rc);
    return o->encoding ? open_encoded(rig, o->encoding) : 0;
}

static int register_region(struct rig *rig, const struct ucm_memory *memory)
{
    struct ucm_plane *planes = calloc(rig->planes, sizeof *planes);
    struct ucm_region_spec spec = {
        .part = rig->part,
        .blocks = rig->blocks,
        .device = rig->on_gpu ? "cuda" : "cpu",
        .gpu = rig->on_gpu ? rig->gpu.uuid : NULL,
        .memory = memory,
        .n_memory = 1,
        .planes = planes,
        .n_planes = rig->planes,
    };
    uint64_t place = rig->gpu.memory;
    int rc;

    if (planes == NULL)
        return fail(rig, -UCM_ENOMEMORY, "memory ran out");
    for (uint32_t p = 0; p < rig->planes; p++) {
        planes[p].stride = (uint64_t)rig->fragment * rig->spread;
        planes[p].offset = p * rig->blocks * planes[p].stride;
        planes[p].block_bytes = rig->fragment;
        planes[p].layer = p / rig->tensors;
    }
    if (rig->cuda)
        rc = rig->copy_agent->region_register(rig->cuda, rig->ns, &spec, &place, rig->timeout_ms,
                                              &rig->region);
    else
        rc = ucm_region_register(rig->ns, &spec, rig->timeout_ms, &rig->region);
    free(planes);
    return rc < 0 ? fail_call(rig, "registering the region", rc) : 0;
}

static int open_shared(struct rig *rig)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_MEMFD, .bytes = rig->memory_bytes};
    void *p = NULL;
    int rc = ucm_shared_memory(rig->memory_bytes, &memory.fd, &p);

    if (rc < 0)
        return fail_call(rig, "making the region's memory", rc);
    rig->memory = p;
    rc = register_region(rig, &memory);
    close(memory.fd);
    if (rc < 0)
        munmap(rig->memory, rig->memory_bytes);
    return rc;
}

/* As the vLLM connector does. */
static const struct ucm_cuda_options q4_ring = {.entries = 8, .entry_bytes = 8u << 20};

static int open_copy_agent(struct rig *rig, const struct rig_encoding *e)
{
    const struct ucm_cuda_options *o = e && strcmp(e->name, "q4") == 0 ? &q4_ring : NULL;
    char why[200];
    int rc;

    rig->copy_agent = bench_copy_agent(why, sizeof why);
    if (!rig->copy_agent)
        return fail(rig, -UCM_EDEVICE, "%s", why);
    rc = rig->copy_agent->open(rig->client, rig->gpu.uuid, o, rig->timeout_ms, &rig->cuda);
    return rc < 0 ? fail(rig, rc, "the copy agent: %s", rig->copy_agent->errmsg()) : 0;
}

static void close_copy_agent(struct rig *rig)
{
    if (rig->cuda)
        (void)rig->copy_agent->close(rig->cuda, rig->timeout_ms);
    rig->cuda = NULL;
}

static int open_gpu(struct rig *rig, const struct rig_options *o)
{
    size_t bytes = rig->memory_bytes * rig->spread;
    struct ucm_memory memory = {.kind = UCM_MEMORY_CUDA_IPC, .bytes = bytes, .fd = -1};
    void *p =
        mmap(NULL, rig->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int rc;

    if (p == MAP_FAILED)
        return fail(rig, -UCM_ENOMEMORY, "memory ran out");
    rig->memory = p;
    rig->on_gpu = 1;
    if (gpu_open(&rig->gpu, o->gpu - 1, bytes) < 0) {
        rc = fail(rig, -UCM_EDEVICE, "%s", rig->gpu.why);
        goto err_after_memory;
    }
    memcpy(memory.ipc, rig->gpu.ipc, sizeof memory.ipc);
    memory.prove_cb = gpu_prove_cb;
    memory.prove_ctx = &rig->gpu;
    rc = o->copy_agent ? open_copy_agent(rig, o->encoding) : 0;
    if (rc == 0)
        rc = register_region(rig, &memory);
    if (rc == 0)
        return 0;
    close_copy_agent(rig);
    gpu_close(&rig->gpu);
err_after_memory:
    munmap(rig->memory, rig->memory_bytes);
    return rc;
}

static int check_options(struct rig *rig, const struct rig_options *o)
{
    if (o->fragment == 0 || o->block_bytes % o->fragment != 0)
        return fail(rig, -UCM_EINVALID,
                    "a block of %llu bytes is no multiple of fragments of %llu bytes",
                    (unsigned long long)o->block_bytes, (unsigned long long)o->fragment);
    if (o->block_bytes / o->fragment > RIG_MAX_PLANES)
        return fail(rig, -UCM_EINVALID, "a block of %llu fragments; the most is %d",
                    (unsigned long long)(o->block_bytes / o->fragment), RIG_MAX_PLANES);
    if (o->fragment % 8 != 0 && o->fragment != o->block_bytes)
        return fail(rig, -UCM_EINVALID, "fragments must be a multiple of 8 bytes");
    return 0;
}

static int open_connection(struct rig *rig, const struct rig_options *o)
{
    struct ucm_options options = {
        .socket = o->socket, .name = o->name, .default_timeout_ms = o->timeout_ms};
    int rc = answer_connect(&options, o->timeout_ms, &rig->client);

    if (rc == -UCM_ENODAEMON)
        return fail(rig, rc,
                    "no daemon listens on %s; start one with 'ucmd --set socket=PATH', or name "
                    "its socket with --socket or $UCM_SOCKET",
                    o->socket != NULL ? o->socket : UCM_DEFAULT_SOCKET);
    if (rc < 0)
        return fail_call(rig, "connecting", rc);
    rc = ucm_server_info(rig->client, &rig->server);
    return rc < 0 ? fail_call(rig, "connecting", rc) : 0;
}

int rig_open(struct rig *rig, const struct rig_options *o)
{
    int rc;

    memset(rig, 0, sizeof *rig);
    rc = check_options(rig, o);
    if (rc < 0)
        return rc;
    rig->blocks = o->blocks;
    rig->part = o->part;
    rig->block_bytes = o->block_bytes;
    rig->fragment = (uint32_t)o->fragment;
    rig->planes = (uint32_t)(o->block_bytes / o->fragment);
    rig->tensors = o->encoding ? 2 : 1;
    rig->timeout_ms = o->timeout_ms;
    rig->spread = o->gpu && o->spread > 1 ? o->spread : 1;
    rig->memory_bytes = (size_t)o->block_bytes * o->blocks;
    rc = open_connection(rig, o);
    if (rc == 0)
        rc = open_namespace(rig, o);
    if (rc == 0)
        rc = o->gpu ? open_gpu(rig, o) : open_shared(rig);
    if (rc < 0) {
        ucm_close(rig->client);
        rig->client = NULL;
        return rc;
    }
    rc = wait_arena(rig);
    if (rc < 0)
        rig_close(rig);
    return rc;
}

void rig_close(struct rig *rig)
{
    int rc;

    if (rig->client == NULL)
        return;
    /* A failure leaves the handle to ucm_close, which ends the connection and the mapping with it.
     */
    rc = rig->cuda ? rig->copy_agent->region_unregister(rig->cuda, rig->region, rig->timeout_ms)
                   : ucm_region_unregister(rig->region, rig->timeout_ms);
    if (rc == 0) {
        ucm_namespace_close(rig->ns);
        ucm_namespace_close(rig->base);
    }
    close_copy_agent(rig);
    ucm_close(rig->client);
    gpu_close(&rig->gpu);
    munmap(rig->memory, rig->memory_bytes);
    rig->client = NULL;
}

/* ---- bytes ---- */

static uint8_t *rig_fragment(const struct rig *rig, uint32_t block, uint32_t plane)
{
    return rig->memory + ((size_t)plane * rig->blocks + block) * rig->fragment;
}

void rig_fill(struct rig *rig, uint32_t block, const uint8_t *key)
{
    uint64_t seed = pattern_seed(key, rig->part);

    for (uint32_t p = 0; p < rig->planes; p++)
        pattern_fill(rig_fragment(rig, block, p), rig->fragment, seed, (uint64_t)p * rig->fragment);
}

size_t rig_differ(const struct rig *rig, uint32_t block, const uint8_t *key)
{
    uint64_t seed = pattern_seed(key, rig->part);
    size_t n = 0;

    for (uint32_t p = 0; p < rig->planes; p++)
        n += pattern_differ(rig_fragment(rig, block, p), rig->fragment, seed,
                            (uint64_t)p * rig->fragment);
    return n;
}

void rig_poison(struct rig *rig)
{
    memset(rig->memory, POISON, rig->memory_bytes);
}

int rig_push(struct rig *rig)
{
    if (rig->on_gpu && gpu_write(&rig->gpu, rig->memory, rig->memory_bytes) < 0)
        return fail(rig, -UCM_EDEVICE, "%s", rig->gpu.why);
    return 0;
}

int rig_pull(struct rig *rig)
{
    if (rig->on_gpu && gpu_read(&rig->gpu, rig->memory, rig->memory_bytes) < 0)
        return fail(rig, -UCM_EDEVICE, "%s", rig->gpu.why);
    return 0;
}

/* ---- moving ---- */

struct flight {
    struct ucm_task *task;
    uint32_t first, n;
};

static void count_result(struct rig_moved *m, uint8_t status)
{
    switch (status) {
    case UCM_BLOCK_IS_OK:
        m->ok++;
        break;
    case UCM_BLOCK_IS_MISS:
        m->miss++;
        break;
    case UCM_BLOCK_IS_FAILED:
        m->failed++;
        break;
    case UCM_BLOCK_IS_NO_ROOM:
        m->no_room++;
        break;
    case UCM_BLOCK_IS_EXISTS:
        m->exists++;
        break;
    case UCM_BLOCK_IS_IN_PROGRESS:
        m->in_progress++;
        break;
    default:
        m->other++;
        break;
    }
}

static int submit(struct rig *rig, enum rig_op op, const struct rig_move *m, uint32_t first,
                  uint32_t n, uint32_t *ids, struct flight *f)
{
    struct ucm_transfer t = {.keys = m->keys + (size_t)first * RIG_KEY_BYTES, .n_keys = n};
    int rc;

    for (uint32_t i = 0; i < n; i++)
        ids[i] = m->first_block + first + i;
    if (op == RIG_PREFETCH) {
        rc = ucm_prefetch(rig->ns, &t, rig->timeout_ms, &f->task);
    } else {
        t.blocks = ids;
        t.lease = op == RIG_LOAD && first + n == m->n ? m->lease : 0;
        rc = op == RIG_LOAD ? ucm_load(rig->region, &t, rig->timeout_ms, &f->task)
                            : ucm_dump(rig->region, &t, rig->timeout_ms, &f->task);
    }
    f->first = first;
    f->n = n;
    return rc < 0 ? fail_call(rig, "submitting", rc) : 0;
}

static int land(struct rig *rig, struct flight *f, uint8_t *result, struct rig_moved *out)
{
    struct ucm_result r;
    int rc = ucm_task_wait(f->task, rig->timeout_ms, &r);

    if (rc < 0) {
        fail_call(rig, "waiting for a transfer", rc);
    } else {
        out->bytes += r.bytes;
        for (uint32_t i = 0; i < r.n_keys && i < f->n; i++) {
            count_result(out, r.result[i]);
            if (result != NULL)
                result[f->first + i] = r.result[i];
        }
    }
    ucm_task_free(f->task);
    f->task = NULL;
    return rc < 0 ? rc : 0;
}

int rig_move(struct rig *rig, enum rig_op op, const struct rig_move *m, uint8_t *result,
             struct rig_moved *out)
{
    uint32_t depth = m->in_flight < MAX_IN_FLIGHT ? m->in_flight : MAX_IN_FLIGHT, begun = 0,
             head = 0;
    uint32_t n_flights = (m->n + m->batch - 1) / m->batch;
    struct flight flight[MAX_IN_FLIGHT];
    uint32_t *ids = calloc(m->batch, sizeof *ids);
    int rc = 0;

    if (ids == NULL)
        return fail(rig, -UCM_ENOMEMORY, "memory ran out");
    memset(out, 0, sizeof *out);
    while (head < begun || (rc == 0 && begun < n_flights)) {
        if (rc == 0 && begun < n_flights && begun - head < depth) {
            uint32_t first = begun * m->batch, left = m->n - first;

            rc = submit(rig, op, m, first, left < m->batch ? left : m->batch, ids,
                        &flight[begun % MAX_IN_FLIGHT]);
            begun += rc == 0;
        } else {
            int landed = land(rig, &flight[head++ % MAX_IN_FLIGHT], result, out);

            rc = rc == 0 ? landed : rc;
        }
    }
    free(ids);
    return rc;
}

/* ---- what only operators' calls tell ---- */

int rig_written(struct rig *rig, uint64_t *out)
{
    struct answer stats;
    const msgpack_object *m;
    int rc = call(rig, UCM_METHOD_STATS, NULL, &stats);

    if (rc < 0)
        return rc;
    m = answer_get(stats.root, "metrics");
    *out = answer_u64(m, "nvme_writes") + answer_u64(m, "nvme_write_dropped") +
           answer_u64(m, "nvme_write_errors");
    answer_close(&stats);
    return 0;
}

int rig_wait_written(struct rig *rig, uint64_t target)
{
    uint64_t written = 0;
    int rc;

    for (int ms = 0; ms < WRITTEN_TIMEOUT_MS; ms += POLL_WRITTEN_MS) {
        rc = rig_written(rig, &written);
        if (rc < 0)
            return rc;
        if (written >= target)
            return 0;
        pause_ms(POLL_WRITTEN_MS);
    }
    return fail(rig, -UCM_EDEADLINE, "%llu of %llu parts were written to NVMe in %d s",
                (unsigned long long)written, (unsigned long long)target, WRITTEN_TIMEOUT_MS / 1000);
}

/* The number that operators' calls want; the library keeps it to itself. */
static int namespace_number(struct rig *rig, uint64_t *out)
{
    uint64_t cursor = 0, found = 0;
    uint8_t mine[32];

    ucm_namespace_fingerprint(rig->ns, mine);
    do {
        struct answer list;
        int rc =
            answer_page(rig->client, UCM_METHOD_NS_LIST, 0, 0, &cursor, rig->timeout_ms, &list);

        if (rc < 0)
            return fail_call(rig, "namespace.list", rc);
        for (uint32_t i = 0; i < answer_count(list.root, "namespaces"); i++) {
            const msgpack_object *o = answer_at(list.root, "namespaces", i);
            const msgpack_object *f = answer_get(o, "fingerprint");

            if (f != NULL && f->type == MSGPACK_OBJECT_BIN && f->via.bin.size == sizeof mine &&
                memcmp(f->via.bin.ptr, mine, sizeof mine) == 0)
                found = answer_u64(o, "ns");
        }
        answer_close(&list);
    } while (cursor != 0 && found == 0);
    if (found == 0)
        return fail(rig, -UCM_ENOTFOUND, "the daemon does not list this namespace");
    *out = found;
    return 0;
}

static int evict_once(struct rig *rig, uint64_t ns, int dram_only, uint64_t *busy)
{
    const struct msg_evict params = {.ns = ns, .tier = dram_only ? 1 : 0};
    struct answer counts;
    int rc = call(rig, UCM_METHOD_EVICT, &params, &counts);

    if (rc < 0)
        return rc;
    *busy = answer_u64(counts.root, "busy");
    answer_close(&counts);
    return 0;
}

int rig_evict(struct rig *rig, int dram_only)
{
    uint64_t ns = 0, busy = 0;
    int rc = namespace_number(rig, &ns);

    for (int ms = 0; rc == 0 && ms < EVICT_TIMEOUT_MS; ms += POLL_MS) {
        rc = evict_once(rig, ns, dram_only, &busy);
        if (rc == 0 && busy == 0)
            return 0;
        pause_ms(POLL_MS);
    }
    if (rc == 0)
        rc = fail(rig, -UCM_EBUSY, "%llu blocks could not be evicted in %d s: they are in use%s",
                  (unsigned long long)busy, EVICT_TIMEOUT_MS / 1000,
                  dram_only ? ", or not on NVMe" : "");
    return rc;
}
