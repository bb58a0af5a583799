#include "client/include/ucmclient_cuda.h"

#include "client/cuda/copy_agent.h"
#include "client/cuda/error.h"
#include "client/cuda/stream_wait.h"
#include "client/lib/features/encoding_spec.h"
#include "kernels/rope/rope_cuda.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define ENTRY_BYTES (16u << 20)
#define ENTRIES 4
#define KEEP_MS 50           /* how often the keeper checks the staging ring */
#define KEEP_TIMEOUT_MS 1000 /* of the keeper's calls to the daemon */
#define STREAM_TIMEOUT_MS 10000

struct ucm_cuda {
    struct copy_agent copy_agent;
    struct stream_waits waits;
    struct ucm_client *client;
    uint8_t gpu[UCM_UUID_BYTES];
    pthread_t keeper;
    int keeper_quit; /* an eventfd; -1: the keeper does not run */
    /* The keeper's; before and after it, the opener's and the closer's. */
    struct ucm_ring_registration *ring;
    uint64_t connection_epoch; /* of the connection on which the ring was last registered */
};

/* ---- the staging ring ---- */

static int ring_prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce)
{
    struct ucm_cuda *cuda = ctx;

    (void)offset; /* that of the entries */
    return nonce ? (int)copy_agent_prove(&cuda->copy_agent, nonce) : 0;
}

static int ring_register(struct ucm_cuda *cuda, int timeout_ms)
{
    struct ucm_ring_spec spec = {.gpu = cuda->gpu,
                                 .ipc = cuda->copy_agent.ipc,
                                 .offset = cuda->copy_agent.offset,
                                 .entry_bytes = cuda->copy_agent.entry_bytes,
                                 .entries = cuda->copy_agent.n_entries,
                                 .prove_cb = ring_prove_cb,
                                 .prove_ctx = cuda};
    uint64_t before = ucm_connection_epoch(cuda->client), after;
    void *memory;
    int r = ucm_ring_register(cuda->client, &spec, timeout_ms, &cuda->ring, &memory);

    after = ucm_connection_epoch(cuda->client);
    /* Another thread may have reconnected meanwhile. Only a ring that still lives certainly belongs
     * to the connection of now. */
    cuda->connection_epoch = r == 0 && ucm_ring_alive(cuda->ring) == 1 ? after : before;
    if (r == 0)
        copy_agent_serve(&cuda->copy_agent, memory);
    return r;
}

/* Serves orders until the daemon has closed the ring, and keeps the memory until the copy agent has
 * left it. On an error nothing changes: the daemon still uses the entries. */
static int ring_drop(struct ucm_cuda *cuda, int timeout_ms)
{
    int r = ucm_ring_alive(cuda->ring) == 1 ? ucm_ring_unregister(cuda->ring, timeout_ms) : 0;

    if (r != 0 && ucm_ring_alive(cuda->ring) == 1)
        return r;
    copy_agent_serve(&cuda->copy_agent, NULL);
    ucm_ring_free(cuda->ring);
    cuda->ring = NULL;
    return 0;
}

/* Registers again after a reconnect. Never connects by itself: a new epoch shows that another
 * call did. */
static void keep(struct ucm_cuda *cuda, bool *again)
{
    int r;

    if (cuda->ring && ucm_ring_alive(cuda->ring) == 1)
        return;
    if (cuda->ring)
        (void)ring_drop(cuda, 0);
    if (ucm_connection_epoch(cuda->client) == cuda->connection_epoch && !*again)
        return;
    r = ring_register(cuda, KEEP_TIMEOUT_MS);
    *again = r == -UCM_EBUSY || r == -UCM_EDEADLINE || r == -UCM_EDISCONNECTED;
}

static void *keeper_run(void *arg)
{
    struct ucm_cuda *cuda = arg;
    struct pollfd quit = {.fd = cuda->keeper_quit, .events = POLLIN};
    bool again = false;

    while (poll(&quit, 1, KEEP_MS) <= 0)
        keep(cuda, &again);
    return NULL;
}

static int keeper_start(struct ucm_cuda *cuda)
{
    int rc;

    cuda->keeper_quit = eventfd(0, EFD_CLOEXEC);
    if (cuda->keeper_quit < 0)
        return errno;
    rc = pthread_create(&cuda->keeper, NULL, keeper_run, cuda);
    if (rc != 0) {
        close(cuda->keeper_quit);
        cuda->keeper_quit = -1;
    }
    return rc;
}

static void keeper_stop(struct ucm_cuda *cuda)
{
    if (cuda->keeper_quit < 0)
        return;
    (void)eventfd_write(cuda->keeper_quit, 1);
    (void)pthread_join(cuda->keeper, NULL);
    close(cuda->keeper_quit);
    cuda->keeper_quit = -1;
}

static void cuda_free(struct ucm_cuda *cuda)
{
    stream_waits_close(&cuda->waits);
    copy_agent_close(&cuda->copy_agent);
    free(cuda);
}

static int options_check(const struct ucm_cuda_options *o)
{
    if (o->entry_bytes < 65536 || o->entry_bytes > 64u << 20 || o->entry_bytes % 4096 != 0)
        return cuda_fail(UCM_EINVALID,
                         "entry_bytes is %llu; 64 KiB to 64 MiB in whole pages are right",
                         (unsigned long long)o->entry_bytes);
    if (o->entries < 2 || o->entries > UCM_MAX_STAGING_ENTRIES)
        return cuda_fail(UCM_EINVALID, "entries is %u; 2 to %d are right", o->entries,
                         UCM_MAX_STAGING_ENTRIES);
    return 0;
}

int ucm_cuda_open(struct ucm_client *client, const uint8_t *gpu,
                  const struct ucm_cuda_options *options, int timeout_ms, struct ucm_cuda **out)
{
    struct ucm_cuda_options o = options ? *options : (struct ucm_cuda_options){0};
    struct ucm_cuda *cuda;
    CUresult rc;
    int r;

    if (!client || !gpu || !out)
        return cuda_fail(UCM_EINVALID, "client, gpu or out is NULL");
    o.entry_bytes = o.entry_bytes ? o.entry_bytes : ENTRY_BYTES;
    o.entries = o.entries ? o.entries : ENTRIES;
    r = options_check(&o);
    if (r != 0)
        return r;
    cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return cuda_fail(UCM_ENOMEMORY, "no memory for the copy agent");
    cuda->client = client;
    cuda->keeper_quit = -1;
    memcpy(cuda->gpu, gpu, sizeof cuda->gpu);
    rc = copy_agent_init(&cuda->copy_agent, gpu, o.entry_bytes, o.entries);
    if (rc != CUDA_SUCCESS) {
        free(cuda);
        return cuda_fail_driver(rc, "the copy agent can't be made");
    }
    rc = stream_waits_init(&cuda->waits, cuda->copy_agent.context);
    if (rc != CUDA_SUCCESS) {
        copy_agent_close(&cuda->copy_agent);
        free(cuda);
        return cuda_fail_driver(rc, "no pinned memory for waits of streams");
    }
    r = cuda_pass(ring_register(cuda, timeout_ms));
    if (r == 0 && keeper_start(cuda) != 0) {
        r = cuda_fail(UCM_ENOMEMORY, "no thread for the copy agent");
        if (ring_drop(cuda, timeout_ms) != 0) {
            copy_agent_serve(&cuda->copy_agent, NULL);
            return r; /* leaks: the daemon's copies may still use the entries */
        }
    }
    if (r == 0)
        *out = cuda;
    else
        cuda_free(cuda);
    return r;
}

int ucm_cuda_close(struct ucm_cuda *cuda, int timeout_ms)
{
    int r = 0;

    if (!cuda)
        return 0;
    stream_waits_stop(&cuda->waits);
    keeper_stop(cuda);
    if (cuda->ring)
        r = cuda_pass(ring_drop(cuda, timeout_ms));
    if (r != 0) {
        (void)keeper_start(cuda); /* without it a new connection only gets no ring */
        return r;
    }
    cuda_free(cuda);
    return 0;
}

void ucm_cuda_abandon(struct ucm_cuda *cuda)
{
    if (!cuda)
        return;
    stream_waits_stop(&cuda->waits);
    keeper_stop(cuda);
    copy_agent_serve(&cuda->copy_agent, NULL);
    ucm_ring_free(cuda->ring);
    cuda_free(cuda);
}

/* ---- regions ---- */

/* The daemon can't always check this: a driver may map another GPU's memory for it, over the link
 * between the two, like its own. */
static int memory_check(struct ucm_cuda *cuda, uint32_t n, const uint64_t *addresses)
{
    for (uint32_t i = 0; i < n; i++) {
        bool owns = false;
        CUresult rc = copy_agent_owns(&cuda->copy_agent, addresses[i], &owns);

        if (rc != CUDA_SUCCESS)
            return cuda_fail_driver(rc, "an address is not of CUDA's memory");
        if (!owns)
            return cuda_fail(UCM_EINVALID, "memory %u lies on another GPU than the copy agent", i);
    }
    return 0;
}

static int planes_check(const struct ucm_region_spec *spec)
{
    if (!spec->planes || spec->n_planes == 0 || spec->n_planes > UCM_MAX_PLANES)
        return cuda_fail(UCM_EINVALID, "a region has 1 to %d planes, not %u", UCM_MAX_PLANES,
                         spec->planes ? spec->n_planes : 0);
    return 0;
}

/* How the namespace's blocks are encoded. *has false: they are not. */
static int encoding_of(const struct ucm_namespace *ns, struct ucm_encoding_spec *out, bool *has)
{
    struct ucm_encoding_info info;
    char why[UCM_ENCODING_WHY];
    int r = ucm_encoding_describe(ns, &info);

    *has = r == 0;
    if (r == -UCM_ENOTFOUND)
        return 0;
    if (r != 0)
        return cuda_fail(-r, "%s", ucm_errmsg());
    r = encoding_spec(&info.form, out, why);
    return r == 0 ? 0 : cuda_fail(-r, "%s", why);
}

static bool rope_dtype(const char *name, uint32_t *out)
{
    static const char *const names[] = {[UCM_ROPE_F32] = "f32",
                                        [UCM_ROPE_F16] = "f16",
                                        [UCM_ROPE_BF16] = "bf16",
                                        [UCM_ROPE_FP8_E4M3] = "fp8_e4m3"};

    for (uint32_t i = 0; name && i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = i;
            return true;
        }
    return false;
}

/* Where K lies in each plane, whose layers come in order. The angles are the daemon's: of the frequencies nothing
 * is needed here. */
static void rope_places(const struct ucm_region_spec *spec, struct copy_agent_rope *out)
{
    uint64_t begin = 0, k = spec->rope->offset, bytes = ucm_rope_bytes(&out->spec);

    for (uint32_t p = 0; p < spec->n_planes; p++) {
        const struct ucm_plane *plane = &spec->planes[p];

        if (p > 0 && plane->layer != spec->planes[p - 1].layer)
            begin = 0;
        out->at[p] = k >= begin && k + bytes <= begin + plane->block_bytes ? (uint32_t)(k - begin)
                                                                           : UCM_ROPE_NO_K;
        begin += plane->block_bytes;
    }
}

/* *out: what the copy agent must know of the region's rope, to be freed; `at` NULL: nothing. */
static int rope_of(const struct ucm_region_spec *spec, struct copy_agent_rope *out)
{
    const struct ucm_rope *r = spec->rope;
    char why[UCM_ROPE_WHY];

    out->at = NULL;
    if (!r)
        return 0;
    if (r->run > 1)
        return cuda_fail(UCM_EINVALID,
                         "rope: a row holds %u tokens of each channel; on a GPU a row is one token",
                         r->run);
    out->spec =
        (struct ucm_rope_spec){.rows = r->rows,
                               .dim = r->dim,
                               .first = r->first,
                               .rotary = r->rotary,
                               .pairs = r->interleaved ? UCM_ROPE_NEIGHBOURS : UCM_ROPE_HALVES,
                               .base = r->base};
    if (!rope_dtype(r->dtype, &out->spec.dtype))
        return cuda_fail(UCM_EINVALID,
                         "rope: dtype is \"%.40s\"; f32, f16, bf16 and fp8_e4m3 can be re-rotated",
                         r->dtype ? r->dtype : "");
    if (ucm_rope_check(&out->spec, why) != 0)
        return cuda_fail(UCM_EINVALID, "rope: %s", why);
    out->at = malloc(spec->n_planes * sizeof(*out->at));
    if (!out->at)
        return cuda_fail(UCM_ENOMEMORY, "no memory for the region");
    rope_places(spec, out);
    return 0;
}

static int planes_add(struct ucm_cuda *cuda, const struct ucm_region_spec *spec,
                      struct copy_agent_skills skills, const uint64_t *addresses, uint32_t *number)
{
    struct ucm_copy_plane *planes;
    CUresult rc;

    planes = calloc(spec->n_planes, sizeof *planes);
    if (!planes)
        return cuda_fail(UCM_ENOMEMORY, "no memory for the region");
    for (uint32_t i = 0; i < spec->n_planes; i++) {
        const struct ucm_plane *p = &spec->planes[i];

        if (p->memory >= spec->n_memory) {
            free(planes);
            return cuda_fail(UCM_EINVALID, "plane %u names memory %u of %u", i, p->memory,
                             spec->n_memory);
        }
        planes[i] = (struct ucm_copy_plane){.base = addresses[p->memory] + p->offset,
                                            .stride = p->stride,
                                            .block_bytes = p->block_bytes};
    }
    rc = copy_agent_region_add(&cuda->copy_agent, planes, spec->n_planes, spec->blocks, skills,
                               number);
    free(planes);
    if (rc == CUDA_ERROR_INVALID_VALUE && skills.encoding)
        return cuda_fail(
            UCM_EINVALID,
            "planes: in an encoded namespace each is a layer's whole K, or its whole V, "
            "in this order, and begins at a multiple of 16 bytes in every block");
    return rc == CUDA_SUCCESS ? 0 : cuda_fail_driver(rc, "the copy agent can't take the region");
}

int ucm_cuda_region_register(struct ucm_cuda *cuda, struct ucm_namespace *ns,
                             const struct ucm_region_spec *spec, const uint64_t *addresses,
                             int timeout_ms, struct ucm_region **out)
{
    struct ucm_encoding_spec encoding;
    struct copy_agent_rope rope = {.at = NULL};
    struct copy_agent_skills skills = {NULL, NULL};
    struct ucm_region_spec with;
    uint32_t number;
    bool encoded;
    int r;

    if (!cuda || !ns || !spec || !addresses || !out)
        return cuda_fail(UCM_EINVALID, "cuda, namespace, spec, addresses or out is NULL");
    r = memory_check(cuda, spec->n_memory, addresses);
    if (r == 0)
        r = encoding_of(ns, &encoding, &encoded);
    if (r == 0)
        r = planes_check(spec);
    if (r == 0)
        r = rope_of(spec, &rope);
    if (r == 0) {
        skills.encoding = encoded ? &encoding : NULL;
        skills.rope = rope.at ? &rope : NULL;
        r = planes_add(cuda, spec, skills, addresses, &number);
    }
    free(rope.at);
    if (r != 0)
        return r;
    with = *spec;
    with.ring_region = number;
    r = cuda_pass(ucm_region_register(ns, &with, timeout_ms, out));
    if (r != 0) {
        copy_agent_region_remove(&cuda->copy_agent, number);
        return r;
    }
    copy_agent_region_mark(&cuda->copy_agent, number, *out);
    return 0;
}

int ucm_cuda_region_unregister(struct ucm_cuda *cuda, struct ucm_region *region, int timeout_ms)
{
    uint32_t number;
    int r;

    if (!cuda || !region)
        return cuda_fail(UCM_EINVALID, "cuda or region is NULL");
    /* Detached before the region is freed: the next region may get its address. */
    number = copy_agent_region_find(&cuda->copy_agent, region);
    if (number == 0)
        return cuda_fail(UCM_EINVALID, "the region was not registered with this copy agent");
    r = cuda_pass(ucm_region_unregister(region, timeout_ms));
    if (r != 0 && r != -UCM_EDISCONNECTED) {
        copy_agent_region_mark(&cuda->copy_agent, number, region);
        return r;
    }
    copy_agent_region_remove(&cuda->copy_agent, number);
    return r;
}

/* ---- streams ---- */

static int stream_check(struct ucm_cuda *cuda, CUstream stream)
{
    CUstreamCaptureStatus capture;
    CUcontext context;
    CUresult rc = cuStreamIsCapturing(stream, &capture);

    if (rc == CUDA_SUCCESS)
        rc = cuStreamGetCtx(stream, &context);
    if (rc != CUDA_SUCCESS)
        return cuda_fail_driver(rc, "the stream can't be queried");
    if (context != cuda->copy_agent.context)
        return cuda_fail(UCM_EINVALID, "the stream is not of the GPU's primary context");
    if (capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return cuda_fail(UCM_EINVALID,
                         "a wait can't be captured: a graph would wait the first time only");
    return 0;
}

static int stream_wait(struct ucm_cuda *cuda, struct ucm_task *task, uint32_t layers,
                       CUstream stream, int timeout_ms)
{
    CUresult rc = CUDA_SUCCESS;
    int r = stream_check(cuda, stream);

    if (r != 0)
        return r;
    r = stream_waits_add(&cuda->waits, task, layers, stream, timeout_ms, &rc);
    if (r == -UCM_EBUSY)
        return cuda_fail(UCM_EBUSY, "%d waits of streams are pending or not ended yet",
                         STREAM_WAITS);
    if (r == -UCM_ENOMEMORY)
        return cuda_fail(UCM_ENOMEMORY, "no thread that ends the waits of streams");
    if (r == -UCM_EDEVICE)
        return cuda_fail_driver(rc, "the stream can't wait");
    return r;
}

int ucm_cuda_stream_wait(struct ucm_cuda *cuda, struct ucm_task *task, uint32_t layers,
                         void *stream, int timeout_ms)
{
    CUcontext old;
    CUresult rc;
    int r;

    if (!cuda || !task)
        return cuda_fail(UCM_EINVALID, "cuda or task is NULL");
    rc = cuCtxPushCurrent(cuda->copy_agent.context);
    if (rc != CUDA_SUCCESS)
        return cuda_fail_driver(rc, "the GPU's context can't be entered");
    r = stream_wait(cuda, task, layers, stream, timeout_ms < 0 ? STREAM_TIMEOUT_MS : timeout_ms);
    (void)cuCtxPopCurrent(&old);
    return r;
}

int ucm_cuda_stream_waits_end(struct ucm_cuda *cuda, struct ucm_task *task)
{
    if (!cuda || !task)
        return cuda_fail(UCM_EINVALID, "cuda or task is NULL");
    if (stream_waits_end(&cuda->waits, task) == 0)
        return 0;
    return cuda_fail(UCM_EDEADLINE, "a stream went on before the layers it waited for had landed");
}
