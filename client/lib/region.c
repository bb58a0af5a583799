#include "client/lib/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_BYTES (sizeof(((struct ucm_region *)0)->device))

static int register_take_cb(struct client_call *call, const union proto_any *any)
{
    client_handle_of(call)->id = (uint32_t)any->region.region;
    return 0;
}

static int spec_check(const struct ucm_region_spec *spec)
{
    if (!spec->device || strlen(spec->device) > DEVICE_BYTES)
        return client_fail(UCM_EINVALID, "device must be \"cpu\" or \"cuda\"");
    if (!spec->memory || spec->n_memory == 0 || spec->n_memory > UCM_MAX_HANDLES)
        return client_fail(UCM_EINVALID, "a region has 1 to %d pieces of memory, not %u",
                           UCM_MAX_HANDLES, spec->memory ? spec->n_memory : 0);
    if (!spec->planes || spec->n_planes == 0 || spec->n_planes > UCM_MAX_PLANES)
        return client_fail(UCM_EINVALID, "a region has 1 to %d planes, not %u", UCM_MAX_PLANES,
                           spec->planes ? spec->n_planes : 0);
    for (uint32_t i = 0; i < spec->n_memory; i++)
        if (spec->memory[i].kind == UCM_MEMORY_CUDA_IPC && !spec->memory[i].prove_cb)
            return client_fail(
                UCM_EINVALID,
                "memory %u is a CUDA IPC handle without a prove_cb, by which ucmd sees that the "
                "memory is this process's",
                i);
    return 0;
}

static int fd_copy(struct client_handle *h, uint32_t memory, int fd, uint64_t *out)
{
    uint32_t n = h->request.n_fds;
    int copy;

    if (n == UCM_MAX_FRAME_FDS)
        return client_fail(UCM_EINVALID, "more than %d pieces of memory by descriptor",
                           UCM_MAX_FRAME_FDS);
    copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return client_fail(errno == EBADF ? UCM_EINVALID : UCM_ENOMEMORY,
                           "the descriptor %d of memory %u cannot be duplicated: %s", fd, memory,
                           strerror(errno));
    h->fds[n] = copy;
    h->request.n_fds++;
    *out = n;
    return 0;
}

static void proofs_undo(const struct ucm_region *region, uint32_t n)
{
    while (n-- > 0)
        if (region->proofs[n].prove_cb)
            (void)region->proofs[n].prove_cb(region->proofs[n].ctx, region->proofs[n].offset, NULL);
}

static int region_prove_cb(struct client_handle *h, const uint8_t *nonce)
{
    const struct ucm_region *region = (struct ucm_region *)h;

    for (uint32_t i = 0; nonce && i < region->msg.handles.n; i++) {
        const struct client_proof *p = &region->proofs[i];

        if (p->prove_cb && p->prove_cb(p->ctx, p->offset, nonce) != 0) {
            proofs_undo(region, i);
            return -1;
        }
    }
    if (!nonce)
        proofs_undo(region, region->msg.handles.n);
    return 0;
}

/* The handle begins with the lowest plane. Memory before it may belong to other code of this
 * process, and must not be written to. */
static uint64_t lowest_plane(const struct ucm_region *region, uint32_t memory, uint64_t bytes)
{
    uint64_t lowest = UINT64_MAX;

    for (uint32_t p = 0; p < region->msg.planes.n; p++)
        if (region->planes[p].handle == memory && region->planes[p].offset < lowest)
            lowest = region->planes[p].offset;
    return lowest < bytes ? lowest : 0;
}

static void ipc_copy(struct ucm_region *region, uint32_t i, const struct ucm_memory *from,
                     struct msg_handle *to, uint8_t *ipc)
{
    uint64_t skipped = lowest_plane(region, i, from->bytes);

    to->bytes -= skipped;
    to->offset += skipped;
    for (uint32_t p = 0; p < region->msg.planes.n; p++)
        if (region->planes[p].handle == i)
            region->planes[p].offset -= skipped;
    memcpy(ipc, from->ipc, sizeof from->ipc);
    to->ipc = (struct proto_bin){ipc, sizeof from->ipc};
    region->proofs[i] = (struct client_proof){from->prove_cb, from->prove_ctx, to->offset};
    region->handle.prove_cb = region_prove_cb;
}

static int memory_copy(struct ucm_region *region, const struct ucm_region_spec *spec)
{
    struct msg_handle *to = (struct msg_handle *)(region->planes + spec->n_planes);
    uint8_t *ipc;
    int r = 0;

    region->proofs = (struct client_proof *)(to + spec->n_memory);
    ipc = (uint8_t *)(region->proofs + spec->n_memory);

    region->msg.handles = (struct proto_handles){to, spec->n_memory};
    for (uint32_t i = 0; i < spec->n_memory && r == 0; i++, to++, ipc += UCM_MAX_HANDLE_BYTES) {
        const struct ucm_memory *from = &spec->memory[i];

        to->kind = from->kind;
        to->bytes = from->bytes;
        to->offset = from->offset;
        if (from->kind == UCM_MEMORY_CUDA_IPC)
            ipc_copy(region, i, from, to, ipc);
        else
            r = fd_copy(&region->handle, i, from->fd, &to->fd);
    }
    return r;
}

static void spec_copy(struct ucm_region *region, const struct ucm_region_spec *spec)
{
    region->msg.part = spec->part;
    region->msg.blocks = spec->blocks;
    region->msg.ring_region = spec->ring_region;
    region->msg.block_pool = spec->block_pool != 0;
    region->msg.device = (struct proto_str){region->device, (uint32_t)strlen(spec->device)};
    memcpy(region->device, spec->device, region->msg.device.n);
    if (spec->gpu) {
        memcpy(region->gpu, spec->gpu, sizeof region->gpu);
        region->msg.gpu = (struct proto_bin){region->gpu, sizeof region->gpu};
    }
    for (uint32_t i = 0; i < spec->n_planes; i++)
        region->planes[i] = (struct msg_plane){
            .handle = spec->planes[i].memory,
            .offset = spec->planes[i].offset,
            .stride = spec->planes[i].stride,
            .block_bytes = spec->planes[i].block_bytes,
            .layer = spec->planes[i].layer,
        };
    region->msg.planes = (struct proto_planes){region->planes, spec->n_planes};
}

/* A name that the wire has room for; the daemon says whether it knows it. */
static int name_copy(char to[16], const char *from, const char *what, struct proto_str *out)
{
    size_t n = from ? strlen(from) : 0;

    if (n > 16)
        return client_fail(UCM_EINVALID, "rope: %s is \"%.40s\"; no name is that long", what, from);
    if (n > 0)
        memcpy(to, from, n);
    *out = (struct proto_str){to, (uint32_t)n};
    return 0;
}

static int rope_copy(struct ucm_region *region, const struct ucm_rope *rope)
{
    struct msg_region_register *m = &region->msg;
    const uint32_t at[] = {rope->offset, rope->rows,   rope->dim,
                           rope->first,  rope->rotary, rope->run};
    int r = name_copy(region->rope_dtype, rope->dtype, "dtype", &m->rope_dtype);

    if (r == 0)
        r = name_copy(region->rope_scaling, rope->scaling, "scaling", &m->rope_scaling);
    memcpy(region->rope, at, sizeof at);
    /* A run of 1 is left out. */
    m->rope = (struct proto_u32s){region->rope, UCM_ROPE_NUMBERS - (rope->run <= 1)};
    m->rope_interleaved = rope->interleaved != 0;
    m->rope_base = rope->base;
    m->rope_factor = rope->factor;
    m->rope_trained = rope->trained;
    m->rope_fast = rope->fast;
    m->rope_slow = rope->slow;
    m->rope_whole = rope->whole != 0;
    return r;
}

static int region_new(struct ucm_namespace *ns, const struct ucm_region_spec *spec,
                      struct ucm_region **out)
{
    struct ucm_region *region =
        calloc(1, sizeof *region + spec->n_planes * sizeof *region->planes +
                      spec->n_memory * (sizeof *region->msg.handles.p + sizeof *region->proofs +
                                        UCM_MAX_HANDLE_BYTES));
    struct client_request q = {UCM_METHOD_REGION_REGISTER, .handle = &ns->handle};
    int r;

    if (!region)
        return client_fail(UCM_ENOMEMORY, "no memory for the region");
    q.params = &region->msg;
    q.handle_id = &region->msg.ns;
    client_handle_init(&region->handle, ns->handle.client, &q, register_take_cb);
    spec_copy(region, spec);
    r = memory_copy(region, spec);
    if (r == 0 && spec->rope)
        r = rope_copy(region, spec->rope);
    if (r)
        client_handle_unref(&region->handle);
    else
        *out = region;
    return r;
}

int ucm_region_register(struct ucm_namespace *ns, const struct ucm_region_spec *spec,
                        int timeout_ms, struct ucm_region **out)
{
    struct ucm_region *region = NULL;
    struct ucm_client *c;
    int r;

    if (!ns || !spec || !out)
        return client_fail(UCM_EINVALID, "namespace, spec or out is NULL");
    c = ns->handle.client;
    r = spec_check(spec);
    if (r == 0)
        r = client_enter(c);
    if (r)
        return r;
    r = region_new(ns, spec, &region);
    if (r)
        return client_leave(c, r);
    r = client_handle_open(&region->handle, client_deadline(c, timeout_ms));
    if (r == 0)
        *out = region;
    return client_leave(c, r);
}

/* The region is unlisted: a reconnect does not register it, and its id is then meaningless. */
static int unregister(struct ucm_region *region, int64_t deadline_ns)
{
    struct client_handle *h = &region->handle;
    struct ucm_client *c = h->client;
    int r;

    /* A reconnect has sent it again, so the answer will bring an id that must be unregistered. */
    if (h->state == HANDLE_PENDING && client_handle_wait(h, deadline_ns) != 0)
        return client_fail(UCM_EDEADLINE, "ucmd did not answer region.register in time");
    client_handle_unlist(h);
    if (h->state == HANDLE_REFUSED)
        return client_fail(
            UCM_EDISCONNECTED,
            "ucmd refused the region after a reconnect; it closes the mapping of the "
            "connection before by itself");
    r = client_begin_same(c, deadline_ns);
    if (r)
        return r;
    if (h->state != HANDLE_READY) {
        client_writer_release(c);
        return client_fail(UCM_EDISCONNECTED,
                           "the connection broke: ucmd closes its mapping of the region by itself");
    }
    return client_exchange_same(c, UCM_METHOD_REGION_UNREGISTER,
                                &(struct msg_region){.region = h->id}, deadline_ns);
}

void ucm_region_gpu_busy(struct ucm_region *region, int busy)
{
    if (region)
        atomic_store(&region->gpu_busy, busy != 0);
}

int ucm_region_unregister(struct ucm_region *region, int timeout_ms)
{
    struct ucm_client *c = region ? region->handle.client : NULL;
    int r = client_enter_given(c, "region");

    if (r)
        return r;
    client_handle_unlist(&region->handle);
    r = unregister(region, client_deadline(c, timeout_ms));
    /* An earlier call that timed out has unregistered it after all. */
    if (r == -UCM_ENOTFOUND)
        r = 0;
    if (r == 0 || r == -UCM_EDISCONNECTED)
        client_handle_drop(&region->handle);
    else
        client_handle_list(&region->handle);
    return client_leave(c, r);
}
