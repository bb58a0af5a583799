#include "client/cuda/companion.h"

#include "client/cuda/context.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

/* CUDA tells of finished work only when asked: without pause for a moment after anything moved,
 * then with short naps while turns are under way, else it sleeps at the bell. */
#define SPIN_NS 40000
#define NAP_NS 20000
#define SOON_NS 50000000ull /* how long turns that are said to come are believed in */
#define SLEEP_MS 100
#define IPC_GRAIN (2u << 20) /* CUDA cuts smaller allocations out of pieces that others share */

extern const unsigned char ucm_copy_fatbin[];

static uint64_t now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- turns; on the thread, under the mutex ---- */

static uint32_t plane_chunk(const void *ctx, uint32_t plane)
{
    return ((const struct ucm_copy_plane *)ctx)[plane].chunk;
}

static CUresult turn_launch(struct companion *c, uint32_t slice, uint64_t item_bytes)
{
    struct companion_turn *t = &c->turns[slice];
    const struct ucm_staging_order *o = &t->order;
    const struct ucm_copy_plane *first = &t->region->spec[o->first_plane];
    CUdeviceptr planes = t->region->planes + o->first_plane * sizeof(*first);
    uint64_t begin = c->base + slice * c->slice_bytes - first->slot_offset;
    uint32_t n_planes = o->n_planes, n_items = o->n_items, direction = o->direction, largest = 0;
    uint32_t tiles;
    struct ucm_copy_item *items = t->items;
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &tiles, &direction};
    CUresult r;

    for (uint32_t p = 0; p < n_planes; p++)
        if (first[p].chunk > largest)
            largest = first[p].chunk;
    for (uint32_t i = 0; i < n_items; i++)
        items[i] = (struct ucm_copy_item){.slot = begin + i * ucm_staging_pitch(item_bytes),
                                          .block = o->blocks[i]};
    tiles = ucm_copy_tiles(largest);
    r = cuLaunchKernel(c->kernel, UCM_COPY_CTAS, 1, 1, UCM_COPY_THREADS, 1, 1, 0,
                       c->streams[direction], arguments, NULL);
    if (r == CUDA_SUCCESS)
        r = cuEventRecord(t->moved, c->streams[direction]);
    if (r != CUDA_SUCCESS) /* what is refused must not run: the slice will be another's */
        (void)cuStreamSynchronize(c->streams[direction]);
    return r;
}

/* Claimed already. false: refused. `dead` is looked at behind the claim: see ucm_staging_abandon. */
static bool turn_begin(struct companion *c, uint32_t slice)
{
    struct companion_turn *t = &c->turns[slice];
    uint64_t item_bytes;

    memcpy(&t->order, &c->ring->orders[slice], sizeof(t->order));
    if (t->order.region < 1 || t->order.region > COMPANION_REGIONS)
        return false;
    t->region = c->regions[t->order.region - 1];
    if (!t->region || atomic_load(&c->ring->words.dead) ||
        !ucm_staging_order_sound(&t->order, c->slice_bytes, t->region->blocks, t->region->n_planes,
                                 plane_chunk, t->region->spec, &item_bytes) ||
        turn_launch(c, slice, item_bytes) != CUDA_SUCCESS)
        return false;
    t->region->kernels++;
    return true;
}

static bool turn_take(struct companion *c, uint32_t slice)
{
    struct companion_turn *t = &c->turns[slice];
    uint64_t turn = atomic_load(&c->ring->words.slices[slice].state);
    uint32_t tag = ucm_staging_tag_of(turn);

    if (ucm_staging_phase_of(turn) != STAGING_POSTED || atomic_load(&c->ring->words.dead) ||
        ucm_staging_generation(tag) != atomic_load(&c->ring->words.generation) ||
        !ucm_staging_move(c->ring, slice, tag, STAGING_POSTED, STAGING_CLAIMED))
        return false;
    t->tag = tag;
    t->claimed = turn_begin(c, slice);
    if (!t->claimed)
        (void)ucm_staging_move(c->ring, slice, tag, STAGING_CLAIMED, STAGING_REFUSED);
    return true;
}

/* A kernel that failed has lost the process's context: nothing of it will run again, and the daemon
 * must not take the slice for moved. */
static bool turn_look(struct companion *c, uint32_t slice)
{
    struct companion_turn *t = &c->turns[slice];
    CUresult r = cuEventQuery(t->moved);

    if (r == CUDA_ERROR_NOT_READY)
        return false;
    if (r != CUDA_SUCCESS)
        atomic_store(&c->ring->words.dead, 1);
    (void)ucm_staging_move(c->ring, slice, t->tag, STAGING_CLAIMED,
                           r == CUDA_SUCCESS ? STAGING_DONE : STAGING_REFUSED);
    t->claimed = false;
    if (--t->region->kernels == 0)
        pthread_cond_broadcast(&c->changed);
    return true;
}

static bool turns_step(struct companion *c, bool *claimed)
{
    bool moved = false;

    *claimed = false;
    for (uint32_t i = 0; c->ring && i < c->slices; i++) {
        moved |= c->turns[i].claimed ? turn_look(c, i) : turn_take(c, i);
        *claimed |= c->turns[i].claimed;
    }
    return moved;
}

/* ---- the thread ---- */

static void nap(void)
{
    struct timespec t = {.tv_nsec = NAP_NS};

    (void)nanosleep(&t, NULL);
}

static void wait_for_ring(struct companion *c)
{
    struct timespec until;

    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    while (!c->quit && !c->wanted && !c->ring)
        if (pthread_cond_timedwait(&c->changed, &c->mutex, &until) != 0)
            break;
}

/* The mutex is held, but not while it rests. bell: as it was before the turns were looked at. */
static void rest(struct companion *c, bool claimed, uint32_t bell, uint64_t still_ns)
{
    struct ucm_staging *ring = c->ring;

    if (!ring) {
        wait_for_ring(c);
        return;
    }
    pthread_mutex_unlock(&c->mutex);
    if (claimed || (atomic_load(&ring->words.soon) && still_ns < SOON_NS)) {
        if (still_ns >= SPIN_NS)
            nap();
    } else if (still_ns >= SPIN_NS) {
        ucm_staging_sleep(ring, bell, SLEEP_MS);
    }
    pthread_mutex_lock(&c->mutex);
}

static void *thread_run(void *arg)
{
    CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED; /* see context.h */
    struct companion *c = arg;
    uint64_t moved_ns = 0;
    uint32_t rung = 0, bell;
    bool claimed;

    (void)cuCtxSetCurrent(c->context);
    (void)cuThreadExchangeStreamCaptureMode(&relaxed);
    (void)prctl(PR_SET_NAME, "ucm-companion");
    (void)prctl(PR_SET_TIMERSLACK, 1000);
    pthread_mutex_lock(&c->mutex);
    while (!c->quit) {
        bell = c->ring ? atomic_load(&c->ring->words.bell) : rung;
        if (turns_step(c, &claimed) || bell != rung)
            moved_ns = now_ns();
        rung = bell;
        if (!claimed && c->ring != c->wanted) {
            c->ring = c->wanted;
            pthread_cond_broadcast(&c->changed);
        } else {
            rest(c, claimed, bell, now_ns() - moved_ns);
        }
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

void companion_serve(struct companion *c, struct ucm_staging *ring)
{
    pthread_mutex_lock(&c->mutex);
    if (c->ring) {
        atomic_store(&c->ring->words.dead, 1);
        ucm_staging_wake(c->ring);
    }
    c->wanted = ring;
    pthread_cond_broadcast(&c->changed);
    while (c->ring != ring)
        pthread_cond_wait(&c->changed, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
}

/* ---- regions ---- */

static void region_free(struct companion_region *r)
{
    if (r->planes)
        (void)cuMemFree(r->planes);
    free(r->spec);
    free(r);
}

static CUresult region_new(struct companion *c, const struct ucm_copy_plane *planes,
                           uint32_t n_planes, uint32_t blocks, struct companion_region **out)
{
    struct companion_region *r = calloc(1, sizeof(*r));
    uint64_t slot_offset = 0;
    CUresult rc;

    if (!r)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r->spec = calloc(n_planes, sizeof(*r->spec));
    rc = r->spec ? cuMemAlloc(&r->planes, n_planes * sizeof(*r->spec)) : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS) {
        for (uint32_t p = 0; p < n_planes; p++) {
            r->spec[p] = planes[p];
            r->spec[p].slot_offset = slot_offset;
            slot_offset += planes[p].chunk;
        }
        rc = cuMemcpyHtoDAsync(r->planes, r->spec, n_planes * sizeof(*r->spec), c->streams[0]);
        if (rc == CUDA_SUCCESS) /* the other stream's kernels read it, too */
            rc = cuStreamSynchronize(c->streams[0]);
    }
    if (rc != CUDA_SUCCESS) {
        region_free(r);
        return rc;
    }
    r->n_planes = n_planes;
    r->blocks = blocks;
    *out = r;
    return rc;
}

CUresult companion_owns(struct companion *c, uint64_t address, bool *owns)
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

CUresult companion_region_add(struct companion *c, const struct ucm_copy_plane *planes,
                              uint32_t n_planes, uint32_t blocks, uint32_t *number)
{
    struct companion_region *region;
    uint32_t i = 0;
    CUresult r = ucm_context_enter(c->context);

    if (r != CUDA_SUCCESS)
        return r;
    r = region_new(c, planes, n_planes, blocks, &region);
    if (r == CUDA_SUCCESS) {
        pthread_mutex_lock(&c->mutex);
        while (i < COMPANION_REGIONS && c->regions[i])
            i++;
        if (i < COMPANION_REGIONS)
            c->regions[i] = region;
        pthread_mutex_unlock(&c->mutex);
        if (i == COMPANION_REGIONS) {
            region_free(region);
            r = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    ucm_context_leave();
    if (r == CUDA_SUCCESS)
        *number = i + 1;
    return r;
}

void companion_region_remove(struct companion *c, uint32_t number)
{
    struct companion_region *region;

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

/* ---- life ---- */

static CUresult device_find(const uint8_t uuid[UCM_UUID_BYTES], CUdevice *out)
{
    int n = 0;
    CUresult r = cuInit(0);

    if (r == CUDA_SUCCESS)
        r = cuDeviceGetCount(&n);
    for (int i = 0; r == CUDA_SUCCESS && i < n; i++) {
        CUuuid found;
        CUdevice dev;

        r = cuDeviceGet(&dev, i);
        if (r == CUDA_SUCCESS)
            r = cuDeviceGetUuid(&found, dev);
        if (r == CUDA_SUCCESS && memcmp(found.bytes, uuid, UCM_UUID_BYTES) == 0) {
            *out = dev;
            return r;
        }
    }
    return r == CUDA_SUCCESS ? CUDA_ERROR_NO_DEVICE : r;
}

static CUresult streams_create(struct companion *c)
{
    int least, greatest;
    CUresult r = cuCtxGetStreamPriorityRange(&least, &greatest);

    for (unsigned i = 0; r == CUDA_SUCCESS && i < 2; i++)
        r = cuStreamCreateWithPriority(&c->streams[i], CU_STREAM_NON_BLOCKING,
                                       i == UCM_COPY_LOAD || greatest == least ? greatest
                                                                               : greatest + 1);
    return r;
}

static CUresult slices_create(struct companion *c)
{
    size_t items = (size_t)c->slices * UCM_STAGING_ITEMS;
    size_t bytes = (c->slices * c->slice_bytes + IPC_GRAIN - 1) / IPC_GRAIN * IPC_GRAIN;
    CUipcMemHandle handle;
    CUdeviceptr base;
    CUresult r = cuMemAlloc(&c->base, bytes);

    if (r == CUDA_SUCCESS) /* another process will have it mapped: whatever was there is not its */
        r = cuMemsetD8Async(c->base, 0, c->slices * c->slice_bytes, c->streams[0]);
    if (r == CUDA_SUCCESS)
        r = cuIpcGetMemHandle(&handle, c->base);
    if (r == CUDA_SUCCESS)
        r = cuMemGetAddressRange(&base, NULL, c->base);
    if (r == CUDA_SUCCESS)
        r = cuMemHostAlloc((void **)&c->items, items * sizeof(*c->items), 0);
    for (uint32_t i = 0; r == CUDA_SUCCESS && i < c->slices; i++) {
        c->turns[i].items = c->items + (size_t)i * UCM_STAGING_ITEMS;
        r = cuEventCreate(&c->turns[i].moved, CU_EVENT_DISABLE_TIMING);
    }
    if (r != CUDA_SUCCESS)
        return r;
    memcpy(c->ipc, &handle, sizeof(c->ipc));
    c->offset = c->base - base;
    return r;
}

static CUresult kernel_load(struct companion *c)
{
    CUresult r = cuModuleLoadData(&c->module, ucm_copy_fatbin);

    return r == CUDA_SUCCESS ? cuModuleGetFunction(&c->kernel, c->module, UCM_COPY_KERNEL) : r;
}

/* The first launch of a kernel, and the first on a stream, may wait for everything that runs in the
 * process: better now than when a copy is due. Nothing is copied; and the clearing of the slices,
 * enqueued before, has ended when this has. */
static CUresult kernel_warm(struct companion *c)
{
    CUdeviceptr nowhere = 0;
    uint32_t none = 0;
    void *arguments[] = {&nowhere, &none, &nowhere, &none, &none, &none};
    CUresult r = CUDA_SUCCESS;

    for (unsigned i = 0; r == CUDA_SUCCESS && i < 2; i++) {
        r = cuLaunchKernel(c->kernel, UCM_COPY_CTAS, 1, 1, UCM_COPY_THREADS, 1, 1, 0, c->streams[i],
                           arguments, NULL);
        if (r == CUDA_SUCCESS)
            r = cuEventRecord(c->turns[i].moved, c->streams[i]);
        if (r == CUDA_SUCCESS)
            r = cuStreamSynchronize(c->streams[i]);
    }
    return r;
}

/* Undoes what companion_init made, whole or in part; the context is current. */
static void release(struct companion *c)
{
    for (unsigned i = 0; i < 2; i++)
        if (c->streams[i]) {
            (void)cuStreamSynchronize(c->streams[i]);
            (void)cuStreamDestroy(c->streams[i]);
        }
    for (uint32_t i = 0; i < c->slices; i++)
        if (c->turns[i].moved)
            (void)cuEventDestroy(c->turns[i].moved);
    if (c->items)
        (void)cuMemFreeHost(c->items);
    if (c->base)
        (void)cuMemFree(c->base);
    if (c->module)
        (void)cuModuleUnload(c->module);
    ucm_context_leave();
    (void)cuDevicePrimaryCtxRelease(c->dev);
    free(c->turns);
}

CUresult companion_init(struct companion *c, const uint8_t uuid[UCM_UUID_BYTES],
                        uint64_t slice_bytes, uint32_t slices)
{
    CUresult r;

    *c = (struct companion){.slice_bytes = slice_bytes, .slices = slices};
    c->turns = calloc(slices, sizeof(*c->turns));
    if (!c->turns)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = device_find(uuid, &c->dev);
    if (r == CUDA_SUCCESS)
        r = cuDevicePrimaryCtxRetain(&c->context, c->dev);
    if (r != CUDA_SUCCESS) {
        free(c->turns);
        return r;
    }
    r = ucm_context_enter(c->context);
    if (r != CUDA_SUCCESS) {
        (void)cuDevicePrimaryCtxRelease(c->dev);
        free(c->turns);
        return r;
    }
    r = kernel_load(c);
    if (r == CUDA_SUCCESS)
        r = streams_create(c);
    if (r == CUDA_SUCCESS)
        r = slices_create(c);
    if (r == CUDA_SUCCESS)
        r = kernel_warm(c);
    if (r != CUDA_SUCCESS) {
        release(c);
        return r;
    }
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->changed, NULL);
    if (pthread_create(&c->thread, NULL, thread_run, c) != 0) {
        pthread_mutex_destroy(&c->mutex);
        pthread_cond_destroy(&c->changed);
        release(c);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    ucm_context_leave();
    return r;
}

void companion_close(struct companion *c)
{
    companion_serve(c, NULL);
    pthread_mutex_lock(&c->mutex);
    c->quit = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
    pthread_join(c->thread, NULL);
    pthread_mutex_destroy(&c->mutex);
    pthread_cond_destroy(&c->changed);
    if (ucm_context_enter(c->context) == CUDA_SUCCESS) {
        for (unsigned i = 0; i < COMPANION_REGIONS; i++)
            if (c->regions[i])
                region_free(c->regions[i]);
        release(c);
    }
}
