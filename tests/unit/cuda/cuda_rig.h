/* What the tests on the fake driver share: two GPUs, a worker's memory with its region, its staging
 * ring, and jobs. The ring may have a copy agent. This process is the daemon. The copy agent is the
 * worker, whose pid may be a child's. The daemon's clock stands still: see fake_clock_pass. */
#ifndef UCM_TESTS_CUDA_RIG_H
#define UCM_TESTS_CUDA_RIG_H

#include "client/cuda/copy_agent.h"
#include "client/include/ucmclient.h"
#include "daemon/config/config.h"
#include "daemon/cuda/costs.h"
#include "daemon/device/device.h"
#include "tests/runner/bytes.h"
#include "tests/runner/wipe.h"
#include "tests/unit/cuda/fake_cuda.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uv.h>

#define BLOCKS 64u
#define MIB ((size_t)1 << 20)
#define JOBS_MAX 64

static uv_loop_t loop;
static struct device_set *set;
static struct device *gpu;
static uint8_t *slots;
static size_t slots_bytes;
static char directory[64];
static unsigned failures;
/* Set before daemon_begin. bus_byte_ns: what a byte over the bus costs, by the calibration; 0: the
 * default. */
static unsigned busy_max_percent = 85;
static double bus_byte_ns;
static const struct numa *numa; /* set before daemon_begin: where GPUs hang */

/* ---- the daemon ---- */

static inline void failed_cb(void *ctx, const char *why)
{
    (void)ctx;
    cr_assert_gt(strlen(why), 0);
    failures++;
}

static unsigned removals;

static inline void memory_removed_cb(void *ctx, void *base, uint64_t bytes)
{
    (void)ctx;
    cr_assert_eq(base, slots);
    cr_assert_eq(bytes, slots_bytes);
    removals++;
}

/* Sets the costs, because a busy host would measure random ones. */
static inline void calibration_write(void)
{
    char path[160], text[COSTS_TEXT_BYTES];
    struct costs_table costs;

    costs_default(&costs);
    if (bus_byte_ns > 0)
        costs.of[UCM_COPY_LOAD].byte_ns = bus_byte_ns;
    costs_format(&costs, "13000/", text);
    for (int i = 0; i < FAKE_GPUS; i++) {
        uint8_t uuid[UCM_UUID_BYTES];
        int n = snprintf(path, sizeof(path), "%s/copy-", directory);
        FILE *file;

        fake_cuda_uuid(i, uuid);
        for (unsigned k = 0; k < UCM_UUID_BYTES; k++)
            n += snprintf(path + n, sizeof(path) - (size_t)n, "%02x", uuid[k]);
        file = fopen(path, "w");
        cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
    }
}

static inline void daemon_begin(enum copy_strategy strategy, size_t bytes)
{
    struct device_config config = {.cpu_threads = 1,
                                   .cuda = CONFIG_CUDA_REQUIRED,
                                   .strategy = strategy,
                                   .busy_max_percent = busy_max_percent,
                                   .calibration = directory,
                                   .numa = numa,
                                   .failed_cb = failed_cb,
                                   .memory_removed_cb = memory_removed_cb};
    struct ucm_error e = {0};
    char note[200];

    slots_bytes = bytes;
    snprintf(directory, sizeof(directory), "/tmp/ucm-test-cuda-XXXXXX");
    cr_assert(mkdtemp(directory));
    calibration_write();
    fake_cuda_install();
    fake_clock_stop();
    uv_loop_init(&loop);
    cr_assert_eq(device_set_new(&loop, &config, &set, note, &e), 0, "%s", e.text);
    cr_assert_eq(device_set_count(set), 1 + FAKE_GPUS);
    gpu = device_set_at(set, 1);
    slots = bytes_pages(slots_bytes);
    memset(slots, 0, slots_bytes);
    cr_assert_eq(device_set_memory_add(set, slots, slots_bytes), 0);
}

static inline void daemon_end(void)
{
    device_set_free(set);
    set = NULL;
    cr_assert_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    cr_assert_eq(uv_loop_close(&loop), 0);
    free(slots);
    cr_assert_eq(wipe(directory), 0);
    cr_assert_eq(fake_cuda_left(), 0);
}

/* ---- jobs ---- */

struct test_job {
    struct device_job job;
    struct ucm_copy_item items[BLOCKS];
    bool done;
    int status;
};

static inline void done_cb(struct device_job *job, int status)
{
    struct test_job *j = LIST_ENTRY(job, struct test_job, job);

    cr_assert_not(j->done, "done runs once");
    j->status = status;
    j->done = true;
}

static inline void job_submit(struct test_job *j, struct device *device)
{
    j->job.done_cb = done_cb;
    fake_cuda_fence();
    cr_assert_eq(device->ops->submit(device, &j->job), 0);
}

static inline int job_wait(struct test_job *j)
{
    while (!j->done)
        uv_run(&loop, UV_RUN_ONCE);
    fake_cuda_fence();
    return j->status;
}

/* On the first GPU. */
static inline void job_run(struct test_job *j)
{
    job_submit(j, gpu);
    cr_assert_eq(job_wait(j), 0, "%s", j->job.error.text);
}

static inline void job_fails(struct test_job *j, int status, const char *part)
{
    cr_assert_eq(job_wait(j), status, "%d: %s", j->status, j->job.error.text);
    cr_assert(strstr(j->job.error.text, part), "%s", j->job.error.text);
}

/* Lets the daemon's clock pass until the job is done. */
static inline int job_wait_passing(struct test_job *j)
{
    while (!j->done) {
        fake_clock_pass(5);
        uv_run(&loop, UV_RUN_NOWAIT);
        usleep(200);
    }
    return job_wait(j);
}

/* The worker's proof for one OPEN: where it stands, and what stood there. */
struct proof_place {
    uint8_t *at; /* NULL: the handle is none */
    uint8_t kept[UCM_NONCE_BYTES];
};

/* The nonce for the next registrations. */
static uint8_t nonce[UCM_NONCE_BYTES] = "a nonce of tests";
static bool unproven; /* the worker writes none */

static inline void proof_write(struct proof_place *p, const uint8_t *ipc, uint64_t offset)
{
    p->at = unproven ? NULL : fake_cuda_memory_of(ipc);
    if (!p->at)
        return;
    p->at += offset;
    memcpy(p->kept, p->at, sizeof(p->kept));
    memcpy(p->at, nonce, sizeof(p->kept));
}

static inline int control(enum device_op op, struct device_region *region,
                          struct device_staging *ring, struct ucm_error *e)
{
    struct device *device = region ? region->device : gpu;
    struct test_job j = {.job = {.op = op, .region = region, .staging = ring}};
    struct proof_place p = {.at = NULL};
    int rc;

    if (op == DEVICE_OPEN && region)
        proof_write(&p, region->handles[0].ipc, region->handles[0].offset);
    if (op == DEVICE_OPEN && ring)
        proof_write(&p, ring->ipc, ring->offset);
    memcpy(region ? region->proof.nonce : ring->proof.nonce, nonce, sizeof(nonce));
    job_submit(&j, device);
    rc = job_wait(&j);
    if (p.at)
        memcpy(p.at, p.kept, sizeof(p.kept));
    *e = j.job.error;
    return rc;
}

static inline void open_refused(struct device_region *region, struct device_staging *ring,
                                int status, const char *part)
{
    struct ucm_error e = {0};

    cr_assert_eq(control(DEVICE_OPEN, region, ring, &e), status, "%s", e.text);
    cr_assert(strstr(e.text, part), "%s", e.text);
}

static inline void loop_for(unsigned ms)
{
    uint64_t end = uv_hrtime() + ms * UINT64_C(1000000);

    while (uv_hrtime() < end)
        uv_run(&loop, UV_RUN_NOWAIT);
}

/* ---- a worker ---- */

struct worker_side {
    CUdeviceptr memory;
    uint64_t bytes, slot_bytes;
    uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    uint32_t n_planes, fragment;
    struct device_region *region;
    struct device_staging ring;
    struct ucm_staging *shared;
    CUdeviceptr entries; /* when there is no copy agent */
    bool served;
    struct copy_agent copy_agent;
    const struct ucm_encoding_spec
        *encoding;                      /* set before the region and the copy agent; NULL: none */
    const struct copy_agent_rope *rope; /* the same */
};

/* BF16 K at the beginning of each layer. */
static inline void rope_says(struct msg_region_register *m, const struct ucm_rope_spec *s,
                             uint32_t numbers[5])
{
    const uint32_t at[5] = {0, s->rows, s->dim, s->first, s->rotary};

    memcpy(numbers, at, sizeof(at));
    m->rope = (struct proto_u32s){numbers, 5};
    m->rope_dtype = (struct proto_str){"bf16", 4};
    m->rope_base = s->base;
}

/* n_planes layers of BLOCKS fragments, `gap` apart. */
static inline struct device_region *region_of(struct worker_side *w, struct device *device,
                                              pid_t pid, uint32_t gap)
{
    struct msg_handle handle = {
        .kind = UCM_HANDLE_CUDA_IPC, .bytes = w->bytes, .ipc = {w->ipc, sizeof(w->ipc)}};
    uint32_t tensors = w->encoding ? w->encoding->n_tensors : 1;
    struct msg_plane planes[64];
    struct msg_region_register m = {.ns = 1,
                                    .blocks = BLOCKS,
                                    .device = {"cuda", 4},
                                    .handles = {&handle, 1},
                                    .planes = {planes, w->n_planes}};
    struct form pages = {.layer_bytes = w->fragment * tensors, .layers = w->n_planes / tensors};
    struct device_region *r = NULL;
    struct ucm_error e = {0};
    struct codec codec;
    uint32_t rope[5];

    if (w->rope)
        rope_says(&m, &w->rope->spec, rope);
    for (uint32_t p = 0; p < w->n_planes; p++)
        planes[p] = (struct msg_plane){.offset = (uint64_t)p * BLOCKS * (w->fragment + gap),
                                       .stride = w->fragment + gap,
                                       .block_bytes = w->fragment,
                                       .layer = p / tensors};
    if (w->encoding)
        codec_init(&codec, w->encoding);
    cr_assert_eq(region_check(&m, &pages, w->encoding ? &codec : NULL, NULL, 0, &r, &e), 0, "%s",
                 e.text);
    r->device = device;
    r->pid = pid;
    r->connection = (uint64_t)(uintptr_t)w;
    return r;
}

static inline void worker_memory(struct worker_side *w, int ordinal, uint32_t n_planes,
                                 uint32_t fragment, uint32_t gap)
{
    CUipcMemHandle handle;

    w->n_planes = n_planes;
    w->fragment = fragment;
    w->slot_bytes = ((uint64_t)n_planes * fragment + 63) / 64 * 64;
    w->bytes = (uint64_t)n_planes * BLOCKS * (fragment + gap);
    w->memory = fake_cuda_alloc(ordinal, w->bytes);
    cr_assert_leq(BLOCKS * w->slot_bytes, slots_bytes);
    memset((void *)(uintptr_t)w->memory, 0, w->bytes);
    cr_assert_eq(cuIpcGetMemHandle(&handle, w->memory), CUDA_SUCCESS);
    memcpy(w->ipc, &handle, sizeof(w->ipc));
}

static inline void worker_begin(struct worker_side *w, pid_t pid, uint32_t n_planes,
                                uint32_t fragment, uint32_t gap)
{
    struct ucm_error e = {0};

    *w = (struct worker_side){.encoding = w->encoding, .rope = w->rope};
    worker_memory(w, 0, n_planes, fragment, gap);
    w->region = region_of(w, gpu, pid, gap);
    cr_assert_eq(control(DEVICE_OPEN, w->region, NULL, &e), 0, "%s", e.text);
}

static inline int ring_open(struct worker_side *w, pid_t pid, struct ucm_error *e)
{
    void *memory;

    cr_assert_eq(ucm_shared_memory(sizeof(*w->shared), &w->ring.fd, &memory), 0);
    w->shared = memory;
    w->ring.pid = pid;
    w->ring.connection = w->region->connection;
    return control(DEVICE_OPEN, NULL, &w->ring, e);
}

/* A ring without a copy agent. */
static inline void worker_ring(struct worker_side *w, pid_t pid, uint64_t entry_bytes,
                               uint32_t n_entries)
{
    CUipcMemHandle handle;
    struct ucm_error e = {0};

    w->entries = fake_cuda_alloc(0, entry_bytes * n_entries);
    cr_assert_eq(cuIpcGetMemHandle(&handle, w->entries), CUDA_SUCCESS);
    w->ring = (struct device_staging){.entry_bytes = entry_bytes, .entries = n_entries};
    memcpy(w->ring.ipc, &handle, sizeof(w->ring.ipc));
    cr_assert_eq(ring_open(w, pid, &e), 0, "%s", e.text);
    w->region->ring_region = 1;
}

/* One with a copy agent after it, which knows the region. */
static inline void worker_copy_agent(struct worker_side *w, uint64_t entry_bytes,
                                     uint32_t n_entries)
{
    struct ucm_copy_plane planes[64];
    struct ucm_error e = {0};
    uint8_t uuid[UCM_UUID_BYTES];
    uint32_t number;

    fake_cuda_uuid(0, uuid);
    cr_assert_eq(copy_agent_init(&w->copy_agent, uuid, entry_bytes, n_entries), CUDA_SUCCESS);
    w->ring = (struct device_staging){
        .offset = w->copy_agent.offset, .entry_bytes = entry_bytes, .entries = n_entries};
    memcpy(w->ring.ipc, w->copy_agent.ipc, sizeof(w->ring.ipc));
    for (uint32_t p = 0; p < w->n_planes; p++)
        planes[p] = w->region->planes[p];
    cr_assert_eq(copy_agent_region_add(&w->copy_agent, planes, w->n_planes, BLOCKS,
                                       (struct copy_agent_skills){w->encoding, w->rope}, &number),
                 CUDA_SUCCESS);
    cr_assert_eq(ring_open(w, getpid(), &e), 0, "%s", e.text);
    copy_agent_serve(&w->copy_agent, w->shared);
    w->region->ring_region = number;
    w->served = true;
}

static inline void ring_close(struct worker_side *w)
{
    struct ucm_error e = {0};

    cr_assert_eq(control(DEVICE_CLOSE, NULL, &w->ring, &e), 0, "%s", e.text);
    if (w->served)
        copy_agent_serve(&w->copy_agent, NULL);
    munmap(w->shared, sizeof(*w->shared));
    w->shared = NULL;
}

static inline void worker_end(struct worker_side *w)
{
    struct ucm_error e = {0};

    if (!w->region)
        return; /* has ended */
    if (w->shared)
        ring_close(w);
    if (w->served)
        copy_agent_close(&w->copy_agent);
    if (w->entries)
        cr_assert_eq(cuMemFree(w->entries), CUDA_SUCCESS);
    cr_assert_eq(control(DEVICE_CLOSE, w->region, NULL, &e), 0, "%s", e.text);
    region_free(w->region);
    w->region = NULL;
    cr_assert_eq(cuMemFree(w->memory), CUDA_SUCCESS);
}

/* A process with a pid of its own; it calls `run`, or does nothing. */
static inline pid_t child_begin(void (*run)(struct ucm_staging *ring), struct ucm_staging *ring)
{
    pid_t pid = fork();

    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (run)
            run(ring);
        for (;;)
            pause();
    }
    cr_assert_gt(pid, 0);
    return pid;
}

static inline void child_end(pid_t pid)
{
    kill(pid, SIGKILL);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
}

/* ---- copies ---- */

__attribute__((no_sanitize("thread"))) static inline uint64_t next_random(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

static inline void copy_init(struct test_job *j, struct worker_side *w, enum device_op op)
{
    *j = (struct test_job){.job = {.op = op, .region = w->region, .n_planes = w->n_planes}};
    j->job.items = j->items;
}

static inline void copy_add(struct test_job *j, const struct worker_side *w, uint32_t slot,
                            uint32_t block)
{
    j->items[j->job.n_items++] = (struct ucm_copy_item){
        .slot = (uint64_t)(uintptr_t)slots + slot * w->slot_bytes, .block = block};
}

/* Every second block, each to the slot of its number. Loads and dumps have different blocks, so
 * that both may be under way at once. */
static inline uint32_t half_first(enum device_op op)
{
    return op == DEVICE_LOAD;
}

static inline void copy_half(struct test_job *j, struct worker_side *w, enum device_op op)
{
    copy_init(j, w, op);
    for (uint32_t i = half_first(op); i < BLOCKS; i += 2)
        copy_add(j, w, i, i);
}

static inline void half_submit(struct test_job *j, struct worker_side *w, enum device_op op)
{
    copy_half(j, w, op);
    job_submit(j, gpu);
}

static inline void half_run(struct test_job *j, struct worker_side *w, enum device_op op)
{
    copy_half(j, w, op);
    job_run(j);
}

/* Every block, to the slot of its number. */
static inline void copy_all(struct test_job *j, struct worker_side *w, enum device_op op)
{
    copy_init(j, w, op);
    for (uint32_t i = 0; i < BLOCKS; i++)
        copy_add(j, w, i, i);
}

/* What a worker's copies may wait for. */
struct worker_event {
    CUevent event;
    uint8_t handle[64];
};

static inline void copy_half_behind(struct test_job *j, struct worker_side *w, enum device_op op,
                                    struct worker_event *e, bool signalled, uint64_t ms)
{
    cr_assert_eq(cuEventCreate(&e->event, 0), CUDA_SUCCESS);
    fake_cuda_event_signal(e->event, signalled);
    fake_cuda_event_handle(e->event, e->handle);
    copy_half(j, w, op);
    j->job.event = e->handle;
    j->job.deadline_ms = fake_clock_ms() + ms;
    job_submit(j, gpu);
}

/* ---- orders, as a copy agent sees them ---- */

/* How many orders of this direction are in this phase; -1: of either. */
static inline unsigned orders_in(const struct worker_side *w, enum ucm_staging_phase phase,
                                 int direction)
{
    const struct ucm_staging *ring = w->shared;
    unsigned n = 0;

    for (uint32_t i = 0; i < UCM_MAX_STAGING_ENTRIES; i++)
        if (ucm_staging_phase_of(atomic_load(&ring->words.entries[i].state)) == phase)
            n += direction < 0 || (ring->orders[i].direction & 1) == (uint32_t)direction;
    return n;
}

static inline void orders_await(const struct worker_side *w, enum ucm_staging_phase phase,
                                int direction)
{
    while (orders_in(w, phase, direction) == 0)
        uv_run(&loop, UV_RUN_NOWAIT);
}

/* Moves posted orders to `to`. When the daemon sees the first of them revoked, it may revoke the
 * next itself. */
static inline void orders_move(const struct worker_side *w, enum ucm_staging_phase to)
{
    for (uint32_t i = 0; i < UCM_MAX_STAGING_ENTRIES; i++) {
        uint64_t state = atomic_load(&w->shared->words.entries[i].state);

        if (ucm_staging_phase_of(state) == STAGING_POSTED)
            (void)ucm_staging_move(w->shared, i, ucm_staging_tag_of(state), STAGING_POSTED, to);
    }
}

/* The same copy between shadows of slots and memory. */
static inline void copy_expect(const struct test_job *j, const struct worker_side *w,
                               uint8_t *want_slots, uint8_t *want_memory)
{
    struct ucm_copy_plane planes[64];
    struct ucm_copy_item items[BLOCKS];

    for (uint32_t p = 0; p < w->n_planes; p++) {
        planes[p] = w->region->planes[p];
        planes[p].base = planes[p].base - w->memory + (uint64_t)(uintptr_t)want_memory;
    }
    for (uint32_t i = 0; i < j->job.n_items; i++) {
        items[i] = j->items[i];
        items[i].slot =
            items[i].slot - (uint64_t)(uintptr_t)slots + (uint64_t)(uintptr_t)want_slots;
    }
    ucm_copy_ref(planes + j->job.first_plane, j->job.n_planes, items, j->job.n_items,
                 j->job.op == DEVICE_DUMP ? UCM_COPY_DUMP : UCM_COPY_LOAD);
}

#endif
