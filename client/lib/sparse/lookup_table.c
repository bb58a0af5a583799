/* Lookup tables: opening them, and looking keys up there. Nothing that the daemon writes leads a
 * reader out of the mapping; proto/memory/lookup_table.h says why. */
#include "client/lib/sparse/internal.h"

#include "proto/memory/lookup_table.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* Keys that are looked up at once. */
#define CHUNK 2048u

/* What a namespace's handle has of it: client_handle.ext. */
struct client_lookup_table {
    struct client_hook hook;
    /* Readers only try to take it. While another table is being mapped, none can be read. */
    pthread_rwlock_t lock;
    _Atomic bool usable; /* its connection lives */
    void *p;             /* NULL: none is mapped */
    uint64_t bytes;
    struct ucm_lookup_table_view view;
    /* The clock of this process minus the daemon's beat, when the table was mapped. */
    uint64_t behind_ms;
    bool shared;
};

/* Both processes' CLOCK_MONOTONIC runs at one speed, though a container may shift it. */
static uint64_t clock_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- mapping ---- */

static struct client_lookup_table *lookup_table_new(void)
{
    struct client_lookup_table *h = calloc(1, sizeof *h);

    if (h && pthread_rwlock_init(&h->lock, NULL) != 0) {
        free(h);
        h = NULL;
    }
    return h;
}

static struct client_lookup_table *lookup_table_of(const struct ucm_namespace *ns)
{
    return atomic_load_explicit(&ns->handle.ext, memory_order_acquire);
}

static void lookup_table_free_cb(struct client_handle *handle)
{
    struct client_lookup_table *h = handle->ext;

    client_hook_close(&h->hook);
    if (h->p)
        munmap(h->p, h->bytes);
    pthread_rwlock_destroy(&h->lock);
    free(h);
}

/* The connection broke, or this is a forked child. */
static void lookup_table_end_cb(struct client_hook *hook)
{
    struct client_lookup_table *h =
        (struct client_lookup_table *)((char *)hook - offsetof(struct client_lookup_table, hook));

    atomic_store(&h->usable, false);
}

static const struct client_feature lookup_table = {.down_cb = lookup_table_end_cb,
                                                   .forked_cb = lookup_table_end_cb};

static int lookup_table_map(struct client_lookup_table *h, const struct msg_lookup_table_open_r *m,
                            uint32_t key_bytes, int fd, struct ucm_error *e)
{
    struct ucm_lookup_table_view view;
    void *p;
    int r = client_memory_map(fd, m->bytes, "a lookup table", &p, e);

    if (r)
        return r;
    if (!ucm_lookup_table_view_open(p, m->bytes, key_bytes, &view)) {
        munmap(p, m->bytes);
        return ucm_error_set(e, UCM_EPROTOCOL, "ucmd's lookup table is of another format");
    }
    pthread_rwlock_wrlock(&h->lock);
    if (h->p)
        munmap(h->p, h->bytes);
    h->p = p;
    h->bytes = m->bytes;
    h->view = view;
    h->shared = m->shared;
    h->behind_ms = clock_ms() - atomic_load_explicit(&view.header->beat_ms, memory_order_relaxed);
    atomic_store(&h->usable, true);
    pthread_rwlock_unlock(&h->lock);
    return 0;
}

/* ---- lookup_table.open ---- */

struct open_call {
    struct client_call call;
    struct ucm_namespace *ns;
};

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_namespace *ns = ((struct open_call *)call)->ns;
    struct client_lookup_table *h = lookup_table_of(ns);

    if (!call->fds || call->fds->n != 1)
        return ucm_error_set(&call->error,
                             call->fds && call->fds->lost ? UCM_ENOMEMORY : UCM_EPROTOCOL,
                             "ucmd's answer to lookup_table.open came without its descriptor");
    if (!h) {
        h = lookup_table_new();
        if (!h)
            return ucm_error_set(&call->error, UCM_ENOMEMORY, "no memory for a lookup table");
        client_hook_open(call->client, &h->hook, &lookup_table);
        ns->handle.free_cb = lookup_table_free_cb;
        atomic_store(&ns->handle.ext, h);
    }
    return lookup_table_map(h, &any->lookup_table_open_r, (uint32_t)ns->open.key_bytes,
                            call->fds->fd[0], &call->error);
}

/* Its table may be read, or is being filled. */
static bool current(const struct client_lookup_table *h)
{
    const struct ucm_lookup_table_header *header = h->view.header;
    uint64_t silent_ms, state;

    if (!atomic_load_explicit(&h->usable, memory_order_relaxed))
        return false;
    state = atomic_load_explicit(&header->state, memory_order_acquire);
    silent_ms =
        clock_ms() - h->behind_ms - atomic_load_explicit(&header->beat_ms, memory_order_relaxed);
    return (state == UCM_LOOKUP_TABLE_FILLING || state == UCM_LOOKUP_TABLE_LIVE) &&
           (silent_ms <= UCM_LOOKUP_TABLE_STALE_MS || silent_ms > UINT64_MAX / 2);
}

static int table_open(struct ucm_namespace *ns, int64_t deadline_ns)
{
    struct msg_lookup_table_open m;
    struct client_request q = {UCM_METHOD_LOOKUP_TABLE_OPEN, &m, &ns->handle, .handle_id = &m.ns};
    struct open_call open = {.ns = ns};
    int r;

    client_read_ready(ns->handle.client); /* has the connection broken meanwhile? */
    if (lookup_table_of(ns) && current(lookup_table_of(ns)))
        return 0;
    client_handle_ref(&ns->handle);
    r = client_exchange(&open.call, ns->handle.client, open_take_cb, &q, deadline_ns);
    client_handle_unref(&ns->handle);
    return r;
}

/* Blocks of an encoded namespace lie there or in its base. */
static struct ucm_namespace *base_of(const struct ucm_namespace *ns)
{
    return ns->encoding ? (struct ucm_namespace *)ns->handle.request.handle : NULL;
}

int ucm_lookup_table_open(struct ucm_namespace *ns, int timeout_ms)
{
    struct ucm_client *c;
    int64_t deadline_ns;
    int r;

    if (!ns)
        return client_fail(UCM_EINVALID, "namespace is NULL");
    if (ns->summary)
        return client_fail(UCM_EUNSUPPORTED, "summaries have no lookup table");
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    deadline_ns = client_deadline(c, timeout_ms);
    r = table_open(ns, deadline_ns);
    if (r == 0 && base_of(ns))
        r = table_open(base_of(ns), deadline_ns);
    return client_leave(c, r);
}

/* ---- reading ---- */

/* Takes the reader's lock if there is a table to rely on. */
static struct client_lookup_table *reader_enter(const struct ucm_namespace *ns)
{
    struct client_lookup_table *h = lookup_table_of(ns);

    if (!h || pthread_rwlock_tryrdlock(&h->lock) != 0)
        return NULL;
    if (current(h) &&
        atomic_load_explicit(&h->view.header->state, memory_order_acquire) == UCM_LOOKUP_TABLE_LIVE)
        return h;
    pthread_rwlock_unlock(&h->lock);
    return NULL;
}

static bool complete(const struct client_lookup_table *h)
{
    return atomic_load_explicit(&h->view.header->left_out, memory_order_acquire) == 0;
}

/* Looks up those that are not found yet, up to the first gap if `stop`. */
static void chunk_find_base(const struct client_lookup_table *base, const uint8_t *keys, uint32_t n,
                            bool stop, uint8_t *found)
{
    for (uint32_t i = 0; i < n; i++) {
        if (found[i] == 0)
            ucm_lookup_table_find_many(&base->view, keys + (size_t)i * base->view.key_bytes, 1,
                                       true, found + i);
        if (stop && found[i] == 0)
            break;
    }
}

/* Adds up found[n] in 16 bits for each tier; CHUNK keys do not overflow them. */
static void count(const uint8_t *found, uint32_t n, struct ucm_lookup_table_hits *out)
{
    uint64_t sums = 0;

    for (uint32_t i = 0; i < n; i++)
        sums += UINT64_C(1) << 16 * found[i];
    out->hits += n - (uint32_t)(sums & UINT16_MAX);
    out->in_dram += (uint32_t)(sums >> 16 * UCM_FOUND_DRAM & UINT16_MAX);
    out->on_shared += (uint32_t)(sums >> 16 * UCM_FOUND_SHARED);
}

/* each: `found` has room for all keys. Otherwise it has room for a chunk, and the search ends at
 * the first gap. */
static void find(const struct client_lookup_table *h, const struct client_lookup_table *base,
                 const uint8_t *keys, uint32_t n_keys, bool each, uint8_t *found,
                 struct ucm_lookup_table_hits *out)
{
    bool gap = false;

    for (uint32_t i = 0; i < n_keys && !gap; i += CHUNK) {
        uint32_t n = n_keys - i < CHUNK ? n_keys - i : CHUNK;
        const uint8_t *at = keys + (size_t)i * h->view.key_bytes, *end;
        uint8_t *to = each ? found + i : found;

        /* A key that is not in the table may still be in the base's, and so may keys after it. */
        ucm_lookup_table_find_many(&h->view, at, n, !each && !base, to);
        if (base)
            chunk_find_base(base, at, n, !each, to);
        end = each ? NULL : memchr(to, UCM_FOUND_NOT, n);
        gap = end != NULL;
        count(to, gap ? (uint32_t)(end - to) : n, out);
    }
}

int ucm_lookup_table_read(struct ucm_namespace *ns, const void *keys, uint32_t n_keys,
                          uint8_t *found, struct ucm_lookup_table_hits *out)
{
    struct client_lookup_table *h, *base = NULL;
    uint8_t chunk[CHUNK];

    if (!ns || !keys || !out || n_keys == 0)
        return client_fail(UCM_EINVALID, "namespace, keys or out is NULL, or there are no keys");
    h = reader_enter(ns);
    if (!h)
        return UCM_LOOKUP_TABLE_NONE;
    if (base_of(ns)) {
        base = reader_enter(base_of(ns));
        if (!base) {
            pthread_rwlock_unlock(&h->lock);
            return UCM_LOOKUP_TABLE_NONE;
        }
    }
    *out = (struct ucm_lookup_table_hits){.shared_tier = h->shared};
    find(h, base, keys, n_keys, found != NULL, found ? found : chunk, out);
    out->complete = complete(h) && (!base || complete(base));
    pthread_rwlock_unlock(&h->lock);
    if (base)
        pthread_rwlock_unlock(&base->lock);
    return 0;
}

/* ---- telling the daemon of lookups ---- */

int ucm_lookup_note(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms)
{
    struct msg_lookup m = {.wait_ms = 1};
    struct client_request q = {UCM_METHOD_LOOKUP, &m, .handle_id = &m.ns, .request_id = &m.request};
    struct ucm_client *c = ns ? ns->handle.client : NULL;
    int r = client_enter_given(c, "namespace");

    if (r)
        return r;
    q.handle = &ns->handle;
    r = client_keys_check(c, ns, keys, n_keys, &m.keys);
    if (r == 0)
        r = client_tell(c, &q, client_deadline(c, timeout_ms));
    return client_leave(c, r);
}
