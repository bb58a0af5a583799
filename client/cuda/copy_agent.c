#include "client/cuda/copy_agent.h"

#include "client/cuda/context.h"
#include "client/cuda/copy_agent_encoding.h"
#include "client/cuda/copy_agent_rope.h"

#include "kernels/encoding/encoding_cuda.h"
#include "kernels/rope/rope_cuda.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

/* CUDA reports finished work only when asked. The thread polls without pause shortly after any
 * progress, then with short naps while orders are claimed, else it sleeps until the bell rings. */
#define SPIN_NS 40000
#define NAP_NS 20000
#define SOON_NS 50000000 /* how long the daemon's `soon` keeps the thread from sleeping */
#define SLEEP_MS 100
#define IPC_GRAIN (2u << 20) /* CUDA cuts smaller allocations out of blocks that others share */

extern const unsigned char ucm_copy_fatbin[];

static CUresult kernel_launch(struct copy_agent *c, CUdeviceptr planes, uint32_t n_planes,
                              struct ucm_copy_item *items, uint32_t n_items, uint32_t tiles,
                              uint32_t direction, CUstream stream)
{
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &tiles, &direction};

    return cuLaunchKernel(c->kernel, UCM_COPY_CTAS, 1, 1, UCM_COPY_THREADS, 1, 1, 0, stream,
                          arguments, NULL);
}

/* ---- orders; on the thread, under the mutex ---- */

static uint32_t plane_fragment(const void *ctx, uint32_t plane)
{
    return ((const struct copy_agent_region *)ctx)->spec[plane].block_bytes;
}

static uint32_t plane_encoded(const void *ctx, uint32_t plane)
{
    return ((const struct copy_agent_region *)ctx)->encoded_spec[plane].bytes;
}

static CUresult entry_launch(struct copy_agent *c, uint32_t entry, uint64_t item_bytes)
{
    struct copy_agent_entry *s = &c->entries[entry];
    const struct ucm_staging_order *o = &s->order;
    const struct ucm_copy_plane *first = &s->region->spec[o->first_plane];
    uint64_t offset =
        o->converts ? s->region->encoded_spec[o->first_plane].slot_offset : first->slot_offset;
    uint64_t begin = c->base + entry * c->entry_bytes - offset;
    bool alone = o->converts && ucm_encoding_alone(&s->region->encoding, o->direction);
    CUstream stream = c->streams[o->direction][alone ? 0 : entry];
    CUresult r = CUDA_SUCCESS;

    for (uint32_t i = 0; i < o->n_items; i++)
        s->items[i] = (struct ucm_copy_item){.slot = begin + i * ucm_staging_pitch(item_bytes),
                                             .block = o->blocks[i]};
    if (o->converts)
        r = copy_agent_encoding_launch(s->region, o->first_plane, o->n_planes, s->items, o->n_items,
                                       o->direction, stream);
    else if (o->tables == 0)
        r = kernel_launch(c, s->region->planes + o->first_plane * sizeof(*first), o->n_planes,
                          s->items, o->n_items,
                          ucm_copy_tiles(ucm_copy_largest_fragment(first, o->n_planes)),
                          o->direction, stream);
    if (r == CUDA_SUCCESS && o->tables > 0)
        r = copy_agent_rope_launch(s->region, o, s->items, s->tables, stream);
    if (r == CUDA_SUCCESS)
        r = cuEventRecord(s->moved, stream);
    if (r != CUDA_SUCCESS) /* a refused order must not run: the entry will hold another's bytes */
        (void)cuStreamSynchronize(stream);
    return r;
}

/* The order is claimed. Returns false when it must be refused. Reads `dead` only now, after the
 * claim: see ucm_staging_abandon. */
static bool entry_begin(struct copy_agent *c, uint32_t entry)
{
    struct copy_agent_entry *s = &c->entries[entry];
    uint32_t (*bytes)(const void *ctx, uint32_t plane);
    uint64_t item_bytes;

    memcpy(&s->order, &c->served->orders[entry], sizeof(s->order));
    if (s->order.region < 1 || s->order.region > COPY_AGENT_REGIONS)
        return false;
    s->region = c->regions[s->order.region - 1];
    if (!s->region || (s->order.converts && !s->region->encoded_spec))
        return false;
    bytes = s->order.converts ? plane_encoded : plane_fragment;
    if (atomic_load(&c->served->words.dead) ||
        !ucm_staging_order_sound(&s->order, c->entry_bytes, s->region->blocks, s->region->n_planes,
                                 bytes, s->region, &item_bytes) ||
        !copy_agent_rope_sound(s->region, &s->order) ||
        entry_launch(c, entry, item_bytes) != CUDA_SUCCESS)
        return false;
    s->region->kernels++;
    return true;
}

static bool entry_claim(struct copy_agent *c, uint32_t entry)
{
    struct copy_agent_entry *s = &c->entries[entry];
    struct ucm_staging_words *words = &c->served->words;
    uint64_t state = atomic_load(&words->entries[entry].state);
    uint32_t tag = ucm_staging_tag_of(state);

    if (ucm_staging_phase_of(state) != STAGING_POSTED || atomic_load(&words->dead) ||
        ucm_staging_generation(tag) != atomic_load(&words->generation) ||
        !ucm_staging_move(c->served, entry, tag, STAGING_POSTED, STAGING_CLAIMED))
        return false;
    s->tag = tag;
    s->claimed = entry_begin(c, entry);
    if (!s->claimed)
        (void)ucm_staging_move(c->served, entry, tag, STAGING_CLAIMED, STAGING_REFUSED);
    return true;
}

/* A kernel that failed has lost the process's context: no kernel will run again, and the daemon
 * must not take the entry for moved. */
static bool entry_poll(struct copy_agent *c, uint32_t entry)
{
    struct copy_agent_entry *s = &c->entries[entry];
    CUresult r = cuEventQuery(s->moved);

    if (r == CUDA_ERROR_NOT_READY)
        return false;
    if (r != CUDA_SUCCESS)
        atomic_store(&c->served->words.dead, 1);
    (void)ucm_staging_move(c->served, entry, s->tag, STAGING_CLAIMED,
                           r == CUDA_SUCCESS ? STAGING_DONE : STAGING_REFUSED);
    s->claimed = false;
    if (--s->region->kernels == 0)
        pthread_cond_broadcast(&c->changed);
    return true;
}

static bool entries_step(struct copy_agent *c, bool *claimed)
{
    bool moved = false;

    *claimed = false;
    for (uint32_t i = 0; c->served && i < c->n_entries; i++) {
        moved |= c->entries[i].claimed ? entry_poll(c, i) : entry_claim(c, i);
        *claimed |= c->entries[i].claimed;
    }
    return moved;
}

/* ---- the thread ---- */

/* Nothing moved. Called with the mutex, which it releases while it sleeps. bell: its value before
 * the entries were polled. */
static void nap(struct copy_agent *c, bool claimed, uint32_t bell, int64_t still_ns)
{
    struct ucm_staging *served = c->served;
    struct timespec t = {.tv_nsec = NAP_NS};

    if (!served) {
        if (!c->quit && !c->wanted)
            (void)pthread_cond_wait(&c->changed, &c->mutex);
        return;
    }
    pthread_mutex_unlock(&c->mutex);
    if (claimed || (atomic_load(&served->words.soon) && still_ns < SOON_NS)) {
        if (still_ns >= SPIN_NS)
            (void)nanosleep(&t, NULL);
    } else if (still_ns >= SPIN_NS) {
        ucm_staging_sleep(served, bell, SLEEP_MS);
    }
    pthread_mutex_lock(&c->mutex);
}

static void *thread_run(void *arg)
{
    CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED; /* see ucm_context_enter */
    struct copy_agent *c = arg;
    int64_t moved_ns = 0;
    uint32_t rung = 0, bell;
    bool claimed;

    (void)cuCtxSetCurrent(c->context);
    (void)cuThreadExchangeStreamCaptureMode(&relaxed);
    (void)prctl(PR_SET_NAME, "ucm-copy-agent");
    (void)prctl(PR_SET_TIMERSLACK, 1000);
    pthread_mutex_lock(&c->mutex);
    while (!c->quit) {
        bell = c->served ? atomic_load(&c->served->words.bell) : rung;
        if (entries_step(c, &claimed) || bell != rung)
            moved_ns = copy_agent_now_ns();
        rung = bell;
        if (!claimed && c->served != c->wanted) {
            c->served = c->wanted;
            pthread_cond_broadcast(&c->changed);
        } else {
            nap(c, claimed, bell, copy_agent_now_ns() - moved_ns);
        }
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

void copy_agent_serve(struct copy_agent *c, struct ucm_staging *staging)
{
    if (staging)
        atomic_store(&staging->words.knows,
                     UCM_STAGING_KNOWS_CONVERSION | UCM_STAGING_KNOWS_SHIFTED);
    pthread_mutex_lock(&c->mutex);
    if (c->served) {
        atomic_store(&c->served->words.dead, 1);
        ucm_staging_wake(c->served);
    }
    c->wanted = staging;
    pthread_cond_broadcast(&c->changed);
    while (c->served != staging)
        pthread_cond_wait(&c->changed, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
}

/* ---- regions ---- */

static void region_free(struct copy_agent_region *r)
{
    if (r->planes)
        (void)cuMemFree(r->planes);
    copy_agent_encoding_close(r);
    copy_agent_rope_close(r);
    free(r->spec);
    free(r);
}

CUresult copy_agent_prove(struct copy_agent *c, const uint8_t nonce[UCM_NONCE_BYTES])
{
    CUresult r = ucm_context_enter(c->context);

    if (r != CUDA_SUCCESS)
        return r;
    r = cuMemcpyHtoDAsync(c->base, nonce, UCM_NONCE_BYTES, c->streams[0][0]);
    if (r == CUDA_SUCCESS)
        r = cuStreamSynchronize(c->streams[0][0]);
    ucm_context_leave();
    return r;
}

static CUresult region_new(struct copy_agent *c, const struct ucm_copy_plane *planes,
                           uint32_t n_planes, uint32_t blocks, struct copy_agent_skills skills,
                           struct copy_agent_region **out)
{
    struct copy_agent_region *r = calloc(1, sizeof(*r));
    size_t bytes = n_planes * sizeof(*r->spec);
    uint64_t slot_offset = 0;
    CUresult rc;

    if (!r)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r->n_planes = n_planes;
    r->blocks = blocks;
    r->spec = malloc(bytes);
    for (uint32_t p = 0; r->spec && p < n_planes; p++) {
        r->spec[p] = planes[p];
        r->spec[p].slot_offset = slot_offset;
        slot_offset += planes[p].block_bytes;
    }
    rc = r->spec ? ucm_upload(r->spec, bytes, c->streams[0][0], &r->planes)
                 : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS && skills.encoding)
        rc = copy_agent_encoding_open(c, r, skills.encoding);
    if (rc == CUDA_SUCCESS && skills.rope)
        rc = copy_agent_rope_open(c, r, skills.rope);
    if (rc == CUDA_SUCCESS)
        *out = r;
    else
        region_free(r);
    return rc;
}

CUresult copy_agent_owns(struct copy_agent *c, uint64_t address, bool *owns)
{
    int ordinal = -1;
    CUresult r = ucm_context_enter(c->context);

    if (r != CUDA_SUCCESS)
        return r;
    r = cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    ucm_context_leave();
    if (r == CUDA_SUCCESS)
        *owns = ordinal == c->dev;
    return r;
}

CUresult copy_agent_region_add(struct copy_agent *c, const struct ucm_copy_plane *planes,
                               uint32_t n_planes, uint32_t blocks, struct copy_agent_skills skills,
                               uint32_t *number)
{
    struct copy_agent_region *region = NULL;
    uint32_t i = 0;
    CUresult r = ucm_context_enter(c->context);

    if (r != CUDA_SUCCESS)
        return r;
    r = region_new(c, planes, n_planes, blocks, skills, &region);
    if (r == CUDA_SUCCESS) {
        pthread_mutex_lock(&c->mutex);
        while (i < COPY_AGENT_REGIONS && c->regions[i])
            i++;
        if (i < COPY_AGENT_REGIONS)
            c->regions[i] = region;
        pthread_mutex_unlock(&c->mutex);
        if (i == COPY_AGENT_REGIONS) {
            region_free(region);
            r = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    ucm_context_leave();
    if (r == CUDA_SUCCESS)
        *number = i + 1;
    return r;
}

void copy_agent_region_remove(struct copy_agent *c, uint32_t number)
{
    struct copy_agent_region *region;

    pthread_mutex_lock(&c->mutex);
    region = c->regions[number - 1];
    c->regions[number - 1] = NULL;
    while (region->kernels > 0)
        pthread_cond_wait(&c->changed, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
    if (ucm_context_enter(c->context) == CUDA_SUCCESS) {
        region_free(region);
        ucm_context_leave();
    }
}

void copy_agent_region_mark(struct copy_agent *c, uint32_t number, void *user)
{
    pthread_mutex_lock(&c->mutex);
    c->regions[number - 1]->user = user;
    pthread_mutex_unlock(&c->mutex);
}

uint32_t copy_agent_region_find(struct copy_agent *c, const void *user)
{
    uint32_t i = 0;

    pthread_mutex_lock(&c->mutex);
    while (i < COPY_AGENT_REGIONS && (!c->regions[i] || c->regions[i]->user != user))
        i++;
    if (i < COPY_AGENT_REGIONS)
        c->regions[i]->user = NULL;
    pthread_mutex_unlock(&c->mutex);
    return i < COPY_AGENT_REGIONS ? i + 1 : 0;
}

/* ---- init and close ---- */

/* Tokens wait for loads. None waits for a dump: it takes what the worker's kernels leave. */
static CUresult streams_create(struct copy_agent *c)
{
    int least, greatest;
    CUresult r = cuCtxGetStreamPriorityRange(&least, &greatest);

    for (unsigned i = 0; r == CUDA_SUCCESS && i < 2 * c->n_entries; i++)
        r = cuStreamCreateWithPriority(&c->streams[i % 2][i / 2], CU_STREAM_NON_BLOCKING,
                                       i % 2 == UCM_COPY_LOAD ? greatest : least);
    return r;
}

static CUresult entries_create(struct copy_agent *c)
{
    size_t items = (size_t)c->n_entries * UCM_STAGING_ITEMS, used = c->n_entries * c->entry_bytes;
    CUipcMemHandle handle;
    CUdeviceptr base;
    CUresult r = cuMemAlloc(&c->base, (used + IPC_GRAIN - 1) / IPC_GRAIN * IPC_GRAIN);

    if (r == CUDA_SUCCESS) /* the daemon maps it, and must not see what was there */
        r = cuMemsetD8Async(c->base, 0, used, c->streams[0][0]);
    if (r == CUDA_SUCCESS)
        r = cuIpcGetMemHandle(&handle, c->base);
    if (r == CUDA_SUCCESS)
        r = cuMemGetAddressRange(&base, NULL, c->base);
    if (r == CUDA_SUCCESS)
        r = cuMemHostAlloc((void **)&c->items, items * sizeof(*c->items), 0);
    if (r == CUDA_SUCCESS)
        r = cuMemHostAlloc((void **)&c->tables, c->n_entries * UCM_ROPE_TABLES_BYTES, 0);
    for (uint32_t i = 0; r == CUDA_SUCCESS && i < c->n_entries; i++) {
        c->entries[i].items = c->items + (size_t)i * UCM_STAGING_ITEMS;
        c->entries[i].tables = c->tables + i * (UCM_ROPE_TABLES_BYTES / sizeof(*c->tables));
        r = cuEventCreate(&c->entries[i].moved, CU_EVENT_DISABLE_TIMING);
    }
    if (r != CUDA_SUCCESS)
        return r;
    memcpy(c->ipc, &handle, sizeof(c->ipc));
    c->offset = c->base - base;
    return r;
}

/* The first launch of a kernel, and the first on a stream, may wait for everything that runs in the
 * process: better now than when a copy is due. These launches copy nothing. The clearing of the
 * entries, enqueued on the first stream before, has ended when they have. */
static CUresult kernel_warm(struct copy_agent *c)
{
    CUresult r = CUDA_SUCCESS;

    for (unsigned i = 0; r == CUDA_SUCCESS && i < 2 * c->n_entries; i++) {
        CUstream stream = c->streams[i % 2][i / 2];

        r = kernel_launch(c, 0, 0, NULL, 0, 0, i % 2, stream);
        if (r == CUDA_SUCCESS)
            r = cuEventRecord(c->entries[i / 2].moved, stream);
        if (r == CUDA_SUCCESS)
            r = cuStreamSynchronize(stream);
    }
    return r;
}

static CUresult create(struct copy_agent *c)
{
    CUresult r = cuModuleLoadData(&c->module, ucm_copy_fatbin);

    if (r == CUDA_SUCCESS)
        r = cuModuleGetFunction(&c->kernel, c->module, UCM_COPY_KERNEL);
    if (r == CUDA_SUCCESS)
        r = streams_create(c);
    if (r == CUDA_SUCCESS)
        r = entries_create(c);
    if (r == CUDA_SUCCESS)
        r = kernel_warm(c);
    if (r == CUDA_SUCCESS && pthread_create(&c->thread, NULL, thread_run, c) != 0)
        r = CUDA_ERROR_OPERATING_SYSTEM;
    return r;
}

/* Undoes create, whole or in part; the context is current. */
static void destroy(struct copy_agent *c)
{
    for (unsigned i = 0; i < 2 * UCM_MAX_STAGING_ENTRIES; i++) {
        CUstream stream = c->streams[i % 2][i / 2];

        if (stream) {
            (void)cuStreamSynchronize(stream);
            (void)cuStreamDestroy(stream);
        }
    }
    for (uint32_t i = 0; i < c->n_entries; i++)
        if (c->entries[i].moved)
            (void)cuEventDestroy(c->entries[i].moved);
    if (c->items)
        (void)cuMemFreeHost(c->items);
    if (c->tables)
        (void)cuMemFreeHost(c->tables);
    if (c->base)
        (void)cuMemFree(c->base);
    if (c->module)
        (void)cuModuleUnload(c->module);
}

CUresult copy_agent_init(struct copy_agent *c, const uint8_t uuid[UCM_UUID_BYTES],
                         uint64_t entry_bytes, uint32_t n_entries)
{
    CUresult r;

    *c = (struct copy_agent){.entry_bytes = entry_bytes,
                             .n_entries = n_entries,
                             .mutex = PTHREAD_MUTEX_INITIALIZER,
                             .changed = PTHREAD_COND_INITIALIZER};
    c->entries = calloc(n_entries, sizeof(*c->entries));
    if (!c->entries)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = ucm_device_find(uuid, &c->dev);
    if (r == CUDA_SUCCESS)
        r = cuDevicePrimaryCtxRetain(&c->context, c->dev);
    if (r != CUDA_SUCCESS)
        goto err_after_entries;
    r = ucm_context_enter(c->context);
    if (r != CUDA_SUCCESS)
        goto err_after_retain;
    r = create(c);
    if (r != CUDA_SUCCESS)
        destroy(c);
    ucm_context_leave();
    if (r == CUDA_SUCCESS)
        return r;

err_after_retain:
    (void)cuDevicePrimaryCtxRelease(c->dev);
err_after_entries:
    free(c->entries);
    return r;
}

void copy_agent_close(struct copy_agent *c)
{
    copy_agent_serve(c, NULL);
    pthread_mutex_lock(&c->mutex);
    c->quit = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
    pthread_join(c->thread, NULL);
    pthread_mutex_destroy(&c->mutex);
    pthread_cond_destroy(&c->changed);
    if (ucm_context_enter(c->context) == CUDA_SUCCESS) {
        for (unsigned i = 0; i < COPY_AGENT_REGIONS; i++)
            if (c->regions[i])
                region_free(c->regions[i]);
        destroy(c);
        ucm_context_leave();
        (void)cuDevicePrimaryCtxRelease(c->dev);
        free(c->entries);
    }
}
