/* A staging ring's registration lives and dies with one connection. Its shared memory never serves
 * another one, so an order that a previous daemon still writes there has no effect. */
#include "proto/memory/staging.h"
#include "client/lib/internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct ucm_ring_registration {
    struct client_hook hook;
    struct ucm_client *client;
    struct ucm_staging *memory;
    uint32_t id; /* 0: the daemon does not know it, or not any more */
};

/* A handle for as long as the ring is registered. With it the library proves the ring's memory as a
 * region's. */
struct ring_request {
    struct client_handle handle; /* frees this */
    struct ucm_ring_registration *ring;
    struct msg_ring_register msg;
    ucm_prove_cb prove_cb;
    void *prove_ctx;
};

static int register_take_cb(struct client_call *call, const union proto_any *any)
{
    ((struct ring_request *)client_handle_of(call))->ring->id = (uint32_t)any->ring.ring;
    return 0;
}

static int ring_prove_cb(struct client_handle *h, const uint8_t *nonce)
{
    const struct ring_request *q = (struct ring_request *)h;

    return q->prove_cb(q->prove_ctx, q->msg.offset, nonce);
}

static struct ucm_ring_registration *ring_of(struct client_hook *hook)
{
    return (struct ucm_ring_registration *)((char *)hook -
                                            offsetof(struct ucm_ring_registration, hook));
}

/* From now on no order begins. */
static bool ring_settled_cb(struct client_hook *hook)
{
    struct ucm_ring_registration *ring = ring_of(hook);

    return ring->id == 0 || ucm_staging_abandon(ring->memory, 0);
}

static void ring_down_cb(struct client_hook *hook)
{
    ring_of(hook)->id = 0;
}

static void ring_free(struct ucm_ring_registration *ring)
{
    client_hook_close(&ring->hook);
    munmap(ring->memory, sizeof *ring->memory);
    free(ring);
}

static void ring_closed_cb(struct client_hook *hook)
{
    ring_free(ring_of(hook));
}

static const struct client_feature rings = {
    .settled_cb = ring_settled_cb, .down_cb = ring_down_cb, .closed_cb = ring_closed_cb};

/* *fd is the caller's. */
static int ring_new(struct ucm_client *c, struct ucm_ring_registration **out, int *fd)
{
    struct ucm_ring_registration *ring = calloc(1, sizeof *ring);
    void *memory;
    int r;

    if (!ring)
        return client_fail(UCM_ENOMEMORY, "no memory for a ring");
    r = ucm_shared_memory(sizeof *ring->memory, fd, &memory);
    if (r) {
        free(ring);
        return r;
    }
    /* A forked child must neither keep the memory nor see its parent's orders. */
    (void)madvise(memory, sizeof *ring->memory, MADV_DONTFORK);
    ring->client = c;
    ring->memory = memory;
    client_hook_open(c, &ring->hook, &rings);
    *out = ring;
    return 0;
}

/* From now on the request owns fd. */
static int ring_send(struct ucm_ring_registration *ring, const struct ucm_ring_spec *spec, int fd,
                     int64_t deadline_ns)
{
    struct ring_request *q = calloc(1, sizeof *q);
    struct client_request request = {.method = UCM_METHOD_RING_REGISTER};
    int r;

    if (!q) {
        close(fd);
        return client_fail(UCM_ENOMEMORY, "no memory for a ring");
    }
    q->ring = ring;
    q->msg = (struct msg_ring_register){.gpu = {spec->gpu, UCM_UUID_BYTES},
                                        .ipc = {spec->ipc, UCM_MAX_HANDLE_BYTES},
                                        .offset = spec->offset,
                                        .entry_bytes = spec->entry_bytes,
                                        .entries = spec->entries};
    q->prove_cb = spec->prove_cb;
    q->prove_ctx = spec->prove_ctx;
    request.params = &q->msg;
    client_handle_init(&q->handle, ring->client, &request, register_take_cb);
    q->handle.fds[0] = fd;
    q->handle.request.n_fds = 1;
    q->handle.prove_cb = ring_prove_cb;
    q->handle.once = true;
    r = client_handle_open(&q->handle, deadline_ns);
    if (r)
        return r;
    client_handle_drop(&q->handle);
    return ring->id != 0 ? 0
                         : client_fail(UCM_EDISCONNECTED,
                                       "the connection broke after the ring's registration");
}

int ucm_ring_register(struct ucm_client *c, const struct ucm_ring_spec *spec, int timeout_ms,
                      struct ucm_ring_registration **out, void **memory)
{
    struct ucm_ring_registration *ring = NULL;
    int fd = -1, r;

    if (!c || !spec || !out || !memory || !spec->gpu || !spec->ipc || !spec->prove_cb)
        return client_fail(UCM_EINVALID, "client, spec, out, memory, gpu, ipc or prove_cb is NULL");
    if (spec->entries < 2 || spec->entries > UCM_MAX_STAGING_ENTRIES)
        return client_fail(UCM_EINVALID, "a ring has 2 to %d entries, not %u",
                           UCM_MAX_STAGING_ENTRIES, spec->entries);
    r = client_enter(c);
    if (r)
        return r;
    r = ring_new(c, &ring, &fd);
    if (r)
        return client_leave(c, r);
    r = ring_send(ring, spec, fd, client_deadline(c, timeout_ms));
    if (r == 0) {
        *out = ring;
        *memory = ring->memory;
    } else {
        ring_free(ring);
    }
    return client_leave(c, r);
}

int ucm_ring_alive(struct ucm_ring_registration *ring)
{
    struct ucm_client *c = ring ? ring->client : NULL;
    int r = client_enter_given(c, "ring");

    if (r)
        return r;
    return client_leave(c, ring->id != 0 && c->link == LINK_UP);
}

static int unregister(struct ucm_ring_registration *ring, int64_t deadline_ns)
{
    struct ucm_client *c = ring->client;
    int r = client_begin_same(c, deadline_ns);

    if (r)
        return r;
    if (ring->id == 0) {
        client_writer_release(c);
        return client_fail(UCM_EDISCONNECTED,
                           "the connection broke: ucmd closes its mapping of the ring by itself");
    }
    return client_exchange_same(c, UCM_METHOD_RING_UNREGISTER, &(struct msg_ring){.ring = ring->id},
                                deadline_ns);
}

int ucm_ring_unregister(struct ucm_ring_registration *ring, int timeout_ms)
{
    struct ucm_client *c = ring ? ring->client : NULL;
    int r = client_enter_given(c, "ring");

    if (r)
        return r;
    r = unregister(ring, client_deadline(c, timeout_ms));
    /* An earlier call that timed out has unregistered it after all. */
    if (r == -UCM_ENOTFOUND)
        r = 0;
    if (r == 0)
        ring->id = 0;
    return client_leave(c, r);
}

void ucm_ring_free(struct ucm_ring_registration *ring)
{
    struct ucm_client *c = ring ? ring->client : NULL;

    if (!c || client_enter(c) != 0)
        return; /* ucm_close frees it */
    ring_free(ring);
    (void)client_leave(c, 0);
}
