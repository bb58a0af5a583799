#include "daemon/device/work.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ENTRY_GRAIN 4096u /* entries are whole pages */

/* Refuses and returns -UCM_WIRE_INVALID. */
#define REFUSE(e, ...) ucm_error_set(e, UCM_WIRE_INVALID, __VA_ARGS__)

/* ---- handles ---- */

static int check_counts(const struct msg_region_register *m, struct ucm_error *e)
{
    if (m->blocks < 1 || m->blocks > UINT32_MAX)
        return REFUSE(e, "blocks is %" PRIu64 "; 1 to %u are possible", m->blocks, UINT32_MAX);
    if (m->handles.n < 1 || m->handles.n > UCM_MAX_HANDLES)
        return REFUSE(e, "%u handles; 1 to %d are possible", m->handles.n, UCM_MAX_HANDLES);
    if (m->planes.n < 1 || m->planes.n > UCM_MAX_PLANES)
        return REFUSE(e, "%u planes; at least one for each layer and at most %d are right",
                      m->planes.n, UCM_MAX_PLANES);
    return 0;
}

/* A descriptor belongs to one handle: two owners of one would close it twice. */
static int check_fd(const struct msg_region_register *m, uint32_t i, const int *fds, uint32_t n_fds,
                    struct ucm_error *e)
{
    const struct msg_handle *h = &m->handles.p[i];

    if (h->fd >= n_fds || fds[h->fd] < 0)
        return REFUSE(e, "handle %u names descriptor %" PRIu64 "; %u came with the request", i,
                      h->fd, n_fds);
    for (uint32_t j = 0; j < i; j++)
        if (m->handles.p[j].kind != UCM_HANDLE_CUDA_IPC && m->handles.p[j].fd == h->fd)
            return REFUSE(
                e, "handles %u and %u name one descriptor; send it twice, or use one handle", j, i);
    return 0;
}

static int check_handle(const struct msg_region_register *m, uint32_t i, bool cuda, const int *fds,
                        uint32_t n_fds, struct ucm_error *e)
{
    const struct msg_handle *h = &m->handles.p[i];
    uint64_t end;

    if (h->kind > UCM_HANDLE_CUDA_FD || cuda == (h->kind == UCM_HANDLE_MEMFD))
        return REFUSE(e, "handle %u is of kind %" PRIu64 "; device %s takes %s", i, h->kind,
                      cuda ? "cuda" : "cpu",
                      cuda ? "CUDA IPC handles (1) and CUDA descriptors (2)" : "memfds (0)");
    if (h->bytes < 1)
        return REFUSE(e, "handle %u has no bytes; say how many lie after its offset", i);
    if (__builtin_add_overflow(h->offset, h->bytes, &end) || end > INT64_MAX)
        return REFUSE(e, "handle %u: offset %" PRIu64 " + bytes %" PRIu64 " is past any memory", i,
                      h->offset, h->bytes);
    if (h->kind != UCM_HANDLE_CUDA_IPC)
        return check_fd(m, i, fds, n_fds, e);
    if (h->bytes < UCM_NONCE_BYTES)
        return REFUSE(e, "handle %u has %" PRIu64 " bytes; a CUDA IPC handle has at least %d", i,
                      h->bytes, UCM_NONCE_BYTES);
    if (h->ipc.n != UCM_MAX_HANDLE_BYTES)
        return REFUSE(e, "handle %u: ipc has %u bytes; a cudaIpcMemHandle_t has %d", i, h->ipc.n,
                      UCM_MAX_HANDLE_BYTES);
    return 0;
}

static int check_handles(const struct msg_region_register *m, const int *fds, uint32_t n_fds,
                         struct ucm_error *e)
{
    bool cuda = proto_str_is(m->device, "cuda");
    int rc = 0;

    if (!cuda && !proto_str_is(m->device, "cpu"))
        return REFUSE(e, "device is \"%.*s\"; \"cpu\" and \"cuda\" are known",
                      (int)(m->device.n < 16 ? m->device.n : 16), m->device.p);
    for (uint32_t i = 0; rc == 0 && i < m->handles.n; i++)
        rc = check_handle(m, i, cuda, fds, n_fds, e);
    return rc;
}

/* ---- planes ---- */

static int check_plane_bounds(const struct msg_region_register *m, uint32_t i, struct ucm_error *e)
{
    const struct msg_plane *p = &m->planes.p[i];
    uint64_t end, bytes;

    if (p->handle >= m->handles.n)
        return REFUSE(e, "plane %u names handle %" PRIu64 "; there are %u, counted from 0", i,
                      p->handle, m->handles.n);
    if (p->block_bytes < 1 || p->block_bytes > UINT32_MAX)
        return REFUSE(e, "plane %u: block_bytes is %" PRIu64 " bytes; 1 to %u are possible", i,
                      p->block_bytes, UINT32_MAX);
    if (p->stride < p->block_bytes)
        return REFUSE(e,
                      "plane %u: stride %" PRIu64 " is less than the fragment of %" PRIu64
                      " bytes, so its blocks would overlap; at least the fragment is right",
                      i, p->stride, p->block_bytes);
    bytes = m->handles.p[p->handle].bytes;
    if (__builtin_mul_overflow(m->blocks - 1, p->stride, &end) ||
        __builtin_add_overflow(end, p->offset, &end) ||
        __builtin_add_overflow(end, p->block_bytes, &end) || end > bytes)
        return REFUSE(e,
                      "plane %u: block %" PRIu64 " at offset %" PRIu64 " with stride %" PRIu64
                      " ends past the %" PRIu64 " bytes of handle %" PRIu64
                      "; fewer blocks or a smaller offset or stride would fit",
                      i, m->blocks - 1, p->offset, p->stride, bytes, p->handle);
    return 0;
}

/* Layers come in order, some may be left out, and each adds up to layer_bytes, so a layer's
 * fragments are contiguous in a slot. */
static int check_layers(const struct msg_region_register *m, uint32_t layers, uint64_t layer_bytes,
                        struct ucm_error *e)
{
    uint64_t sum = 0; /* of at most UCM_MAX_PLANES fragments below 2^32 */
    uint32_t layer = 0;

    for (uint32_t i = 0; i < m->planes.n; i++) {
        const struct msg_plane *p = &m->planes.p[i];

        if (p->layer >= layers)
            return REFUSE(e,
                          "plane %u is of layer %" PRIu64 "; the namespace has %u, counted from 0",
                          i, p->layer, layers);
        if (i == 0 || (sum == layer_bytes && p->layer > layer)) {
            layer = (uint32_t)p->layer;
            sum = 0;
        }
        if (p->layer != layer)
            return REFUSE(e,
                          "plane %u is of layer %" PRIu64 " where layer %u has %" PRIu64
                          " of its %" PRIu64 " bytes; planes are sorted by layer and fill each",
                          i, p->layer, layer, sum, layer_bytes);
        sum += p->block_bytes;
        if (sum > layer_bytes)
            return REFUSE(e,
                          "plane %u: the fragments of layer %u add up to %" PRIu64
                          " bytes; the namespace's layer has %" PRIu64,
                          i, layer, sum, layer_bytes);
    }
    if (sum != layer_bytes)
        return REFUSE(
            e, "plane %u is the last and layer %u has %" PRIu64 " bytes; %" PRIu64 " are right",
            m->planes.n - 1, layer, sum, layer_bytes);
    return 0;
}

/* ---- overlap ---- */

/* The memory from a plane's first byte to its last. */
struct reach {
    uint32_t memory; /* the same for handles of one allocation */
    uint32_t plane;
    uint64_t begin, end, stride, block_bytes;
};

static int reach_order(const void *a, const void *b)
{
    const struct reach *x = a, *y = b;

    if (x->memory != y->memory)
        return x->memory < y->memory ? -1 : 1;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return 0;
}

/* By place inside the stride that all compared spans have in common. */
static int residue_order(const void *a, const void *b)
{
    const struct reach *x = a, *y = b;
    uint64_t i = x->begin % x->stride, j = y->begin % y->stride;

    return i == j ? 0 : i < j ? -1 : 1;
}

static int refuse_overlap(const struct reach *x, const struct reach *y, struct ucm_error *e)
{
    return REFUSE(
        e,
        "planes %u and %u overlap; each byte may belong to one plane (planes that interleave "
        "need one stride and fragments that share no byte)",
        x->plane < y->plane ? x->plane : y->plane, x->plane < y->plane ? y->plane : x->plane);
}

/* Spans that run into each other belong to interleaved planes. With one stride the planes share no
 * byte if their fragments share none on the circle of that stride. */
static int check_interleaved(struct reach *s, uint32_t n, struct ucm_error *e)
{
    uint64_t stride = s[0].stride;

    for (uint32_t i = 1; i < n; i++)
        if (s[i].stride != stride)
            return refuse_overlap(&s[0], &s[i], e);
    qsort(s, n, sizeof(*s), residue_order);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = s[i].begin % stride;
        uint64_t next = i + 1 < n ? s[i + 1].begin % stride : s[0].begin % stride + stride;

        if (at + s[i].block_bytes > next)
            return refuse_overlap(&s[i], &s[(i + 1) % n], e);
    }
    return 0;
}

/* Are the two handles of one allocation? A memfd that came twice is one file; descriptors of CUDA
 * memory can't be compared. */
static bool same_memory(const struct msg_handle *a, const struct msg_handle *b, const int *fds)
{
    struct stat x, y;

    if (a->kind != b->kind)
        return false;
    if (a->kind == UCM_HANDLE_CUDA_IPC)
        return memcmp(a->ipc.p, b->ipc.p, a->ipc.n) == 0;
    /* Only memfds have seals: fstat of another file may block on the server of its file system. */
    return a->kind == UCM_HANDLE_MEMFD && fcntl(fds[a->fd], F_GET_SEALS) >= 0 &&
           fcntl(fds[b->fd], F_GET_SEALS) >= 0 && fstat(fds[a->fd], &x) == 0 &&
           fstat(fds[b->fd], &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static uint32_t memory_of(const struct msg_region_register *m, uint32_t handle, const int *fds)
{
    for (uint32_t i = 0; i < handle; i++)
        if (same_memory(&m->handles.p[i], &m->handles.p[handle], fds))
            return i;
    return handle;
}

static void reaches_fill(const struct msg_region_register *m, const int *fds, struct reach *s)
{
    uint32_t memory[UCM_MAX_HANDLES];

    for (uint32_t i = 0; i < m->handles.n; i++)
        memory[i] = memory_of(m, i, fds);
    for (uint32_t i = 0; i < m->planes.n; i++) {
        const struct msg_plane *p = &m->planes.p[i];
        uint64_t begin = m->handles.p[p->handle].offset + p->offset;

        s[i] = (struct reach){memory[p->handle],
                              i,
                              begin,
                              begin + (m->blocks - 1) * p->stride + p->block_bytes,
                              p->stride,
                              p->block_bytes};
    }
    qsort(s, m->planes.n, sizeof(*s), reach_order);
}

static int check_overlap(const struct msg_region_register *m, const int *fds, struct ucm_error *e)
{
    struct reach *s = calloc(m->planes.n, sizeof(*s));
    uint32_t n = m->planes.n;
    int rc = 0;

    if (!s)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory to check %u planes", n);
    reaches_fill(m, fds, s);
    for (uint32_t first = 0, next; rc == 0 && first < n; first = next) {
        uint64_t end = s[first].end;

        for (next = first + 1; next < n && s[next].memory == s[first].memory && s[next].begin < end;
             next++)
            if (s[next].end > end)
                end = s[next].end;
        rc = check_interleaved(s + first, next - first, e);
    }
    free(s);
    return rc;
}

/* ---- building ---- */

/* One allocation: the region, then its arrays by falling alignment. The codec is a copy, whichever
 * of the two there is. */
static struct device_region *region_alloc(uint32_t n_handles, uint32_t n_planes,
                                          const struct form *pages, const struct codec *codec)
{
    struct device_region *r;
    const struct codec *kept = codec ? codec : pages->codec;
    size_t handles = n_handles * sizeof(*r->handles), planes = n_planes * sizeof(*r->planes);
    size_t encoded = codec ? n_planes * sizeof(*r->tensors) : 0,
           kept_bytes = kept ? sizeof(*kept) : 0;
    char *at;

    r = calloc(1, sizeof(*r) + handles + planes + encoded + kept_bytes +
                      (pages->layers + (size_t)1) * sizeof(*r->layer_first));
    if (!r)
        return NULL;
    at = (char *)(r + 1);
    r->handles = (struct device_handle *)at;
    r->planes = (struct ucm_copy_plane *)(at += handles);
    at += planes;
    if (codec)
        r->tensors = (struct ucm_encoding_plane *)at;
    at += encoded;
    if (kept)
        kept = memcpy(at, kept, kept_bytes);
    at += kept_bytes;
    r->layer_first = (uint32_t *)at;
    r->n_planes = n_planes;
    r->pages = *pages;
    r->pages.codec = codec ? NULL : kept;
    r->codec = codec ? kept : NULL;
    return r;
}

/* But for their descriptors. */
static void fill_handles(struct device_region *r, const struct msg_region_register *m)
{
    for (uint32_t i = 0; i < m->handles.n; i++) {
        const struct msg_handle *from = &m->handles.p[i];
        struct device_handle *h = &r->handles[i];

        *h = (struct device_handle){
            .kind = from->kind, .offset = from->offset, .bytes = from->bytes, .fd = -1};
        if (h->kind == UCM_HANDLE_CUDA_IPC)
            memcpy(h->ipc, from->ipc.p, sizeof(h->ipc));
    }
    r->n_handles = m->handles.n;
}

static void take_fds(struct device_region *r, const struct msg_region_register *m, int *fds)
{
    for (uint32_t i = 0; i < m->handles.n; i++) {
        if (r->handles[i].kind == UCM_HANDLE_CUDA_IPC)
            continue;
        r->handles[i].fd = fds[m->handles.p[i].fd];
        fds[m->handles.p[i].fd] = -1;
    }
}

static void fill_planes(struct device_region *r, const struct msg_region_register *m)
{
    uint32_t i = 0;

    for (uint32_t layer = 0; layer < r->pages.layers; layer++) {
        uint64_t slot_offset = layer * r->pages.layer_bytes;

        for (; i < r->n_planes && m->planes.p[i].layer == layer; i++) {
            const struct msg_plane *p = &m->planes.p[i];

            r->planes[i] = (struct ucm_copy_plane){.base = r->handles[p->handle].offset + p->offset,
                                                   .stride = p->stride,
                                                   .slot_offset = slot_offset,
                                                   .block_bytes = (uint32_t)p->block_bytes,
                                                   .memory = (uint32_t)p->handle};
            slot_offset += p->block_bytes;
        }
        r->layer_first[layer + 1] = i;
    }
}

int region_check(const struct msg_region_register *m, const struct form *pages,
                 const struct codec *codec, int *fds, uint32_t n_fds, struct device_region **out,
                 struct ucm_error *e)
{
    struct device_region *r;
    int rc = check_counts(m, e);

    if (rc == 0)
        rc = check_handles(m, fds, n_fds, e);
    for (uint32_t i = 0; rc == 0 && i < m->planes.n; i++)
        rc = check_plane_bounds(m, i, e);
    if (rc == 0)
        rc = check_layers(m, pages->layers, pages->layer_bytes, e);
    if (rc < 0)
        return rc;
    r = region_alloc(m->handles.n, m->planes.n, pages, codec);
    if (!r)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a region of %u planes",
                             m->planes.n);
    r->part = (uint32_t)m->part;
    r->blocks = (uint32_t)m->blocks;
    r->ring_region = (uint32_t)m->ring_region;
    r->block_pool = m->block_pool;
    fill_handles(r, m);
    fill_planes(r, m);
    rc = codec ? region_tensors(m, r, e) : 0;
    if (rc == 0)
        rc = check_overlap(m, fds, e);
    if (rc == 0)
        rc = region_rope(m, r, &r->rope, e);
    if (rc < 0) {
        free(r);
        return rc;
    }
    take_fds(r, m, fds);
    *out = r;
    return 0;
}

/* Handles of one allocation share its first mapping. */
static uint32_t mapping_of(const struct device_region *r, uint32_t handle)
{
    uint32_t i = 0;

    while (r->handles[i].address != r->handles[handle].address)
        i++;
    return i;
}

void region_mapped(struct device_region *r)
{
    for (uint32_t i = 0; i < r->n_planes; i++) {
        struct ucm_copy_plane *p = &r->planes[i];

        p->base += r->handles[p->memory].address;
        p->memory = mapping_of(r, p->memory);
        if (r->tensors)
            r->tensors[i].base = p->base;
    }
}

void region_free(struct device_region *r)
{
    if (!r)
        return;
    for (uint32_t i = 0; i < r->n_handles; i++)
        if (r->handles[i].fd >= 0)
            close(r->handles[i].fd);
    free(r->rope);
    free(r);
}

/* ---- staging rings ---- */

int staging_check(const struct msg_ring_register *m, int *fds, uint32_t n_fds,
                  struct device_staging **out, struct ucm_error *e)
{
    struct device_staging *s;

    if (m->entry_bytes % ENTRY_GRAIN != 0)
        return REFUSE(e, "entry_bytes: %" PRIu64 "; a multiple of %u is right", m->entry_bytes,
                      ENTRY_GRAIN);
    if (m->fd >= n_fds || fds[m->fd] < 0)
        return REFUSE(e, "fd: %" PRIu64 "; %u descriptors came with the request", m->fd, n_fds);
    s = calloc(1, sizeof(*s));
    if (!s)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a ring");
    s->offset = m->offset;
    s->entry_bytes = m->entry_bytes;
    s->entries = (uint32_t)m->entries;
    s->fd = fds[m->fd];
    fds[m->fd] = -1;
    memcpy(s->ipc, m->ipc.p, sizeof(s->ipc));
    *out = s;
    return 0;
}

void staging_free(struct device_staging *s)
{
    if (s && s->fd >= 0)
        close(s->fd);
    free(s);
}
