/* One GPU, as the files cuda*.c share it: cuda.c has the device and its thread, cuda_copy.c the way
 * of a copy, cuda_busy.c who else is there, cuda_dma.c a copy's form on the copy engines,
 * cuda_ring.c its form through slices of the worker's memory, cuda_calibrate.c what it costs,
 * cuda_region.c what regions map, cuda_memory.c the pinning of slots, cuda_context.c the context
 * and its loss.
 *
 * The thread owns everything but the inbox: the loop puts jobs into that and wakes the thread, done
 * jobs go back through the outbox. A copy waits in `waiting` for its event, then in `ready`, and is
 * launched piece by piece, so that an urgent job overtakes all but GPU_AHEAD_BYTES and one launch.
 * Threads: functions below on the GPU's thread only. */
#ifndef UCMD_DEVICE_GPU_H
#define UCMD_DEVICE_GPU_H

#include "daemon/device/busy.h"
#include "daemon/device/costs.h"
#include "daemon/device/cuda.h"
#include "daemon/device/cuda_api.h"
#include "daemon/device/nvml.h"
#include "daemon/device/work.h"
#include "daemon/device/worker.h"

#include <stdatomic.h>

#define GPU_LAUNCHES 16                /* under way in one direction */
#define GPU_LAUNCH_BYTES (16ull << 20) /* of one launch; a chunk larger than that is not cut */
#define GPU_LAUNCH_ITEMS 4096
#define GPU_DMA_EXTENTS 4096u /* of one launch */
#define GPU_AHEAD_BYTES                                                                            \
    (32ull                                                                                         \
     << 20) /* launched and not done, besides the newest: keeps the bus busy without a gap   \
                   */

/* A kernel on its way. items is pinned memory that the GPU reads while the kernel runs: it belongs
 * to the launch and is written again only after `done`. */
struct gpu_launch {
    CUevent done;
    struct device_job *job;
    struct ucm_copy_item *items;
    uint64_t bytes;
    enum copy_strategy strategy;
    uint64_t begun_ns, cost_ns; /* by the costs measured; the maker sets them */
    uint64_t due_ns;            /* when it should be done, with what is before it */
    bool told;                  /* the loop, that it will be soon */
    struct gpu_turn *turn; /* of a ring that it serves, or NULL: then it is a piece by itself */
};

/* One direction: its launches finish in the order in which they were made. */
struct gpu_stream {
    CUstream stream;
    struct gpu_launch launches[GPU_LAUNCHES];
    uint32_t oldest, n;
    uint64_t bytes;
    uint64_t done_ns; /* when the last one was seen done, */
    uint64_t due_ns;  /* and when the newest should be */
};

/* An empty kernel, to see whether others' run. */
struct gpu_probe {
    CUstream stream;
    CUevent done;
    bool launched;     /* ever: `done` tells something */
    bool wanted;       /* as soon as nothing is under way; until then nothing more is launched, */
    uint64_t until_ns; /* but by companions no longer than until then */
};

enum gpu_pin_state { GPU_PIN_NEW, GPU_PIN_OURS, GPU_PIN_OTHERS, GPU_PIN_FAILED };

/* Memory that is registered with CUDA in one call. */
struct gpu_pin {
    uint64_t base, bytes;
    enum gpu_pin_state state;
};

struct gpu_memory {
    struct gpu_pin *pins; /* sorted by base */
    size_t n, cap;
    size_t fresh; /* how many are GPU_PIN_NEW */
};

/* memory_add on its way to the thread. */
struct gpu_added {
    struct list link;
    uint64_t base, bytes;
};

struct gpu {
    struct device device;
    struct job_outbox outbox;
    uv_thread_t thread;
    uv_mutex_t mutex;
    uv_cond_t cond;
    /* Under the mutex. */
    struct job_queue inbox;
    struct list added;
    bool quit;

    /* The loop's. */
    struct device_config config;
    bool failed_told;

    /* Written by the thread, read by the loop. `why` is set before `failed`. */
    atomic_bool failed;
    atomic_ullong context_bytes;
    atomic_ullong strategy_bytes[COPY_STRATEGIES], strategy_launches[COPY_STRATEGIES];
    char why[240];

    /* The thread's. */
    int ordinal;
    CUdevice dev;
    CUcontext context; /* NULL until the first OPEN */
    CUmodule module;
    CUfunction kernel;
    struct ucm_copy_item *items;  /* of all launches */
    struct gpu_stream streams[2]; /* by enum ucm_copy_direction */
    struct job_queue ready;
    struct list waiting;
    struct list opened; /* IPC memory, struct gpu_ipc */
    struct list rings;  /* struct gpu_ring */
    uint32_t turns;     /* of all rings, under way */
    struct gpu_memory memory;
    CUstream uploads;    /* waits for nobody's copies and kernels */
    struct gpu_dma *dma; /* scratch */
    struct nvml nvml;
    struct costs_table costs;
    struct busy busy;
    struct gpu_probe probe;
    uint64_t moved_ns;   /* when something last went on */
    uint64_t expired_ms; /* when deadlines of queued copies were last looked at */
};

/* ---- cuda_context.c ---- */

/* With the first region: context, kernel, streams. 0 or -errno, job->error filled. */
int gpu_context_open(struct gpu *g, struct device_job *job);
void gpu_context_close(struct gpu *g);
/* The context is lost: every job fails from now on, and the daemon is told to restart. */
void gpu_fail(struct gpu *g, CUresult r, const char *what);
/* Says what CUDA refused: fills job->error and returns -EIO for a lost context, else `status`. */
int gpu_refuse(struct gpu *g, struct device_job *job, int status, CUresult r, const char *what);
int gpu_refuse_failed(struct gpu *g, struct device_job *job);

/* ---- cuda_copy.c ---- */

/* A copy ends: gives it back, and lets a CLOSE go that waited for the region's last one. */
void gpu_finish(struct gpu *g, struct device_job *job, int status);
/* After gpu_fail, and again in each turn of the thread's loop: all copies end, those last of which
 * companions have claimed turns. */
void gpu_abandon(struct gpu *g);
/* Each does what can be done now, and tells whether that was anything. */
bool gpu_events_poll(struct gpu *g);
bool gpu_fill(struct gpu *g, enum ucm_copy_direction direction);
bool gpu_reap(struct gpu *g, enum ucm_copy_direction direction);
void gpu_expire(struct gpu *g);

/* Room for one more launch; NULL: none now. */
struct gpu_launch *gpu_launch_next(struct gpu *g, enum ucm_copy_direction direction);
/* What was enqueued is followed by an event: `turn` is told of its end, or the job when that is
 * NULL. */
CUresult gpu_launch_follow(struct gpu *g, enum ucm_copy_direction direction, struct gpu_launch *l,
                           struct device_job *job, uint64_t bytes, struct gpu_turn *turn);
/* A piece, straight between slots and pages. It counts in job->pieces already. */
CUresult gpu_launch_piece(struct gpu *g, enum ucm_copy_direction direction, struct device_job *job,
                          const struct job_piece *piece);
/* A piece ends. */
void gpu_piece_end(struct gpu *g, struct device_job *job);
/* Nothing more of a job begins; it ends with its last piece. */
void gpu_job_fail(struct device_job *job, int status);
/* A piece ends badly, and with it the job. */
void gpu_piece_fail(struct gpu *g, struct device_job *job, int status);

/* The copy kernel over planes in GPU memory and pinned items. */
CUresult gpu_kernel_launch(struct gpu *g, CUstream stream, CUdeviceptr planes, uint32_t n_planes,
                           struct ucm_copy_item *items, uint32_t n_items, uint32_t largest_chunk,
                           uint32_t direction);

/* ---- cuda_busy.c ---- */

CUresult gpu_probe_open(struct gpu *g);
void gpu_probe_close(struct gpu *g);
/* Shall the SMs be left alone: do other processes' kernels run? When that is not known, yes, and a
 * probe is wanted; while companions move slices, what was known last. */
bool gpu_others_run(struct gpu *g);
/* The same, for a question that is worth a probe at once where one is due and possible. */
bool gpu_others_look(struct gpu *g);
/* Makes the probe that is wanted: 0.3 ms at most when nobody is there, 3 ms where the second look
 * is as slow as the first; twenty times a second at most, a hundred while others may have gone.
 * False: it must wait for what is under way, and so must new launches. */
bool gpu_probe_ready(struct gpu *g);
/* A launch of the copy kernel is done. */
void gpu_kernel_seen(struct gpu *g, enum ucm_copy_direction direction, const struct gpu_launch *l);

/* ---- cuda_calibrate.c ---- */

/* Fills g->costs: from the file, or by measuring for at most a second, or with defaults. */
void gpu_calibrate(struct gpu *g);

/* ---- cuda_dma.c ---- */

int gpu_dma_init(struct gpu *g); /* 0 or -ENOMEM */
void gpu_dma_close(struct gpu *g);
/* The extents of a piece, kept for gpu_dma_launch; notes in the items which memory their slots lie
 * in. 0: the piece is none for the copy engines, it has too many extents. */
uint32_t gpu_dma_plan(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                      struct ucm_copy_item *items);
struct plan_extent *gpu_dma_extents(struct gpu *g); /* those that gpu_dma_plan keeps */
/* The same, of a piece between its slots and a slice, where item i begins at slice + i * pitch. */
uint32_t gpu_dma_plan_slice(struct gpu *g, const struct device_job *job,
                            const struct job_piece *piece, struct ucm_copy_item *items,
                            uint64_t slice, uint64_t pitch);
/* Sends the n extents on their way. After an error nothing of them is under way. */
CUresult gpu_dma_launch(struct gpu *g, CUstream stream, enum ucm_copy_direction direction,
                        uint32_t n);

/* ---- cuda_region.c ---- */

struct gpu_region {
    struct worker worker;
    uint64_t seen_ms;        /* when the worker was last looked for, */
    bool seen_alive;         /* and what was seen */
    CUdeviceptr planes;      /* struct ucm_copy_plane of all planes, in GPU memory */
    uint32_t jobs;           /* copies that the thread has taken and not finished */
    struct device_job *last; /* the CLOSE that waits for them */
    uint32_t n;              /* maps made so far */
    struct gpu_map {
        struct gpu_ipc *ipc; /* or, for VMM memory: */
        CUmemGenericAllocationHandle handle;
        CUdeviceptr address;
        size_t bytes;
    } maps[];
};

/* An opened IPC handle. Many tensors lie in one allocation, so many handles of a worker are the
 * same bytes with different offsets: opened once, counted. */
struct gpu_ipc {
    struct list link;
    uint8_t bytes[UCM_MAX_HANDLE_BYTES];
    pid_t pid;
    uint64_t start; /* of the process: a worker may come back with its old pid and handles */
    CUdeviceptr address;
    uint64_t size; /* from address to the allocation's end */
    uint32_t refs;
};
struct gpu_ipc_wish {
    const uint8_t *ipc;
    uint64_t offset, bytes; /* must lie in the allocation */
    char name[24];          /* in refusals */
};
/* 0 or -errno, job->error filled. */
int gpu_ipc_get(struct gpu *g, struct device_job *job, const struct gpu_ipc_wish *wish,
                const struct worker *worker, struct gpu_ipc **out);
void gpu_ipc_put(struct gpu_ipc *ipc);

/* The context is current. Fills the region's planes and mapping. 0 or -errno, job->error filled. */
int gpu_region_open(struct gpu *g, struct device_job *job);
void gpu_region_close(struct device_region *region);

/* Opens the event of a dump: job->scratch. */
int gpu_event_open(struct gpu *g, struct device_job *job);
void gpu_event_close(struct device_job *job); /* harmless when none is open */

/* ---- cuda_ring.c ---- */

struct gpu_ring;
struct gpu_turn;

int gpu_ring_open(struct gpu *g, struct device_job *job); /* 0 or -errno, job->error filled */
void gpu_ring_close(struct device_staging *ring);
/* Counts a copy in and out that may use the ring; out: the CLOSE that may go now, or NULL. */
void gpu_ring_ref(struct device_staging *ring);
struct device_job *gpu_ring_unref(struct device_staging *ring);
/* false: it is kept, and comes back from the last unref. */
bool gpu_ring_may_close(struct device_job *close);

/* Does it pay to carry the job out through its ring? */
bool gpu_ring_pays(struct gpu *g, struct device_job *job);
enum gpu_ring_took { GPU_RING_TOOK, GPU_RING_FULL, GPU_RING_RESTS };
/* Begins the job's next piece; the stream has room. FULL: no slice is free now. RESTS: the ring
 * takes nothing for a while, or never again. */
enum gpu_ring_took gpu_ring_take(struct gpu *g, struct device_job *job);
/* A launch for the turn is done. */
void gpu_ring_launched(struct gpu *g, struct gpu_turn *turn);
/* Looks what companions have done. */
bool gpu_rings_poll(struct gpu *g);
/* Launches what turns wait for. */
bool gpu_rings_fill(struct gpu *g, enum ucm_copy_direction direction);
/* After gpu_fail: turns that wait for nobody end. */
void gpu_rings_abandon(struct gpu *g);

/* ---- cuda_memory.c ---- */

void gpu_memory_add(struct gpu_memory *m, uint64_t base, uint64_t bytes);
/* Sees that all slots of the job lie in memory that was added, and pins what is not pinned yet. */
int gpu_memory_need(struct gpu *g, struct device_job *job);
/* Names the pinned piece that holds all of the range; 0: no single one does. */
uint32_t gpu_memory_pin_of(const struct gpu_memory *m, uint64_t begin, uint64_t bytes);
/* Pins one more piece, when the thread has nothing else to do. */
void gpu_memory_pin_one(struct gpu *g);
void gpu_memory_close(struct gpu *g);

#endif
