/* One GPU, as the files cuda*.c share it; README.md says which file does what.
 *
 * The thread owns everything below that is not in struct work. A copy waits in `waiting` for its
 * event, then in `queued`. It is launched piece by piece, so an urgent job overtakes all but
 * GPU_AHEAD_BYTES and one launch.
 * Threads: call the functions below on the GPU's thread only. */
#ifndef UCMD_CUDA_GPU_H
#define UCMD_CUDA_GPU_H

#include "daemon/cuda/api.h"
#include "daemon/cuda/busy.h"
#include "daemon/cuda/costs.h"
#include "daemon/cuda/cuda.h"
#include "daemon/cuda/worker.h"
#include "daemon/device/work.h"
#include "kernels/rope/rope_cuda.h"

#define GPU_LAUNCHES 16                /* under way in one direction */
#define GPU_LAUNCH_BYTES (16ull << 20) /* of one launch; a fragment larger than that is not cut */
#define GPU_LAUNCH_ITEMS 4096
#define GPU_DMA_EXTENTS 4096u /* of one launch */
/* Launched and not done, besides the newest launch: keeps the bus busy without a gap. */
#define GPU_AHEAD_BYTES (32ull << 20)
/* While several tenants use a direction: a launch, and what is launched besides the newest. What is
 * launched is in nobody's order any more, so a tenant that comes waits for that much. It holds for
 * GPU_FAIR_WINDOW bytes of one tenant alone, about 0.3 s. */
#define GPU_FAIR_BYTES (4ull << 20)
#define GPU_FAIR_WINDOW (16ull << 30)
#define GPU_BURST_BYTES (16ull << 20) /* see base/fair.h */
/* Streams: by enum ucm_copy_direction, and one for small loads that overtake a full load stream
 * (express.c). */
#define GPU_EXPRESS 2u
#define GPU_STREAMS 3u
#define GPU_EXPRESS_BYTES (1ull << 20) /* under way in it, at most */
#define GPU_BESIDE_WORKERS 8           /* computing workers that one GPU keeps track of */
#define GPU_BESIDE_BYTES (6ull << 20)  /* of one launch while a worker computes */

/* A launch under way. The GPU reads items, in pinned memory, while the kernel runs: nobody writes
 * them before `done`. */
struct gpu_launch {
    CUevent done;
    struct device_job *job;
    struct job_piece piece; /* of the job, unless an entry has it */
    struct ucm_copy_item *items;
    struct ucm_rope_angle *tables; /* of a load that re-rotates K; pinned as well */
    uint64_t cost;                 /* as job_item_bytes has it */
    enum copy_strategy strategy;
    uint64_t begun_ns, cost_ns; /* cost_ns: estimated from the measured costs */
    uint64_t due_ns;            /* estimated end, counting the launches before it */
    bool announced;             /* work_soon was called for it */
    CUstream behind;            /* what it ends in; NULL: its own stream */
    /* that it fills or empties; NULL: it is a piece by itself */
    struct gpu_staging_entry *entry;
};

/* Launches are seen done in the order in which they were made. */
struct gpu_stream {
    CUstream stream;
    struct gpu_launch launches[GPU_LAUNCHES];
    uint32_t oldest, n;
    uint64_t cost;    /* of those under way */
    uint64_t done_ns; /* when the last launch was seen done */
    uint64_t next_ns; /* alongside a worker that computes: no launch before */
    uint64_t due_ns;  /* when the newest should be done */
};

/* Empty kernels that show whether others' kernels run. */
struct gpu_probe {
    CUstream stream;
    CUevent done;
    bool launched; /* `done` was recorded at least once */
    /* Wanted: probe as soon as nothing is under way. Until then nothing more is launched; entries
     * hold this up until until_ns only. */
    bool wanted;
    uint64_t until_ns;
};

/* A worker computes on this GPU, or did until a moment ago. */
struct gpu_beside {
    struct gpu_said {
        const struct device_region *region; /* whose worker said so; only compared */
        uint64_t until_ms;
    } said[GPU_BESIDE_WORKERS]; /* of more workers the latest */
    /* As this round of the thread sees them. What gpu_launch_next goes by must not change between a
     * look whether there is a place and its use. */
    bool now, hurry; /* hurry: the first load waits for no share of the bus */
};

enum gpu_pin_state { GPU_PIN_NEW, GPU_PIN_OURS, GPU_PIN_OTHERS, GPU_PIN_FAILED };

/* Memory that is registered with CUDA in one call. */
struct gpu_pin {
    uint64_t base, bytes;
    enum gpu_pin_state state;
    CUresult why;     /* GPU_PIN_FAILED: of the last try */
    uint64_t next_ms; /* and when a job may try again */
};

struct gpu_memory {
    struct gpu_pin *pins; /* sorted by base */
    size_t n, cap;
    size_t fresh; /* how many are GPU_PIN_NEW */
};

/* Scratch of one launch: runs go to the driver as one batch, rows as another. The driver reads both
 * before the calls return. */
struct gpu_dma {
    struct plan_extent extents[GPU_DMA_EXTENTS];
    CUdeviceptr to[GPU_DMA_EXTENTS], from[GPU_DMA_EXTENTS];
    size_t sizes[GPU_DMA_EXTENTS];
    CUDA_MEMCPY3D_BATCH_OP ops[GPU_DMA_EXTENTS];
};

struct gpu {
    struct work work;
    struct list added; /* under work's mutex: struct gpu_added, memory that the thread adds */
    uv_thread_t thread;

    /* The event loop's. */
    struct device_config config;
    bool failure_reported;

    /* Written by the thread, read by the event loop. `why` is set before `failed`. */
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
    CUmodule convert_module; /* NULL until the first region whose copies may convert */
    /* NULL until the first region whose loads can re-rotate K; the same: */
    CUmodule rope_module;
    CUstream shifts;               /* re-rotates K in pages that launches have filled */
    struct ucm_copy_item *items;   /* of all launches */
    struct ucm_rope_angle *tables; /* the same */
    struct gpu_stream streams[GPU_STREAMS];
    struct job_queue queued;
    bool contended[2]; /* by direction, in this round of the thread: see GPU_FAIR_BYTES */
    struct list waiting;
    struct list opened;   /* IPC memory, struct gpu_ipc */
    bool ipc_checked;     /* handles are compared with what they name: gpu_ipc_learn */
    struct list stagings; /* struct gpu_staging */
    uint32_t entries;     /* of all staging rings, under way */
    struct gpu_memory memory;
    CUstream uploads; /* never wait for copies or kernels */
    struct gpu_dma dma;
    struct costs_table costs;
    struct busy busy;
    struct gpu_probe probe;
    struct gpu_beside beside;
    uint64_t moved_ns;   /* when something last made progress */
    uint64_t expired_ms; /* when deadlines of queued copies were last checked */
};

/* ---- context.c ---- */

/* Context, kernel, streams. 0 or -errno, job->error filled. */
int gpu_context_open(struct gpu *g, struct device_job *job);
void gpu_context_close(struct gpu *g);
/* The context is lost: every job fails from now on, and the event loop reports it
 * (config.failed_cb). */
void gpu_fail(struct gpu *g, CUresult r, const char *what);
/* Fills job->error with what CUDA refused; returns -EIO for a lost context, else `status`. */
int gpu_refuse(struct gpu *g, struct device_job *job, int status, CUresult r, const char *what);
int gpu_refuse_failed(struct gpu *g, struct device_job *job);
/* Puts the bytes into new GPU memory, which the caller frees, after a failure too. 0, or -EIO with
 * `without` in job->error. */
int gpu_upload(struct gpu *g, struct device_job *job, CUdeviceptr *out, const void *data,
               size_t bytes, const char *without);
/* The copy kernel over planes in GPU memory and pinned items. */
CUresult gpu_kernel_launch(struct gpu *g, CUstream stream, CUdeviceptr planes, uint32_t n_planes,
                           struct ucm_copy_item *items, uint32_t n_items, uint32_t largest_fragment,
                           uint32_t direction);

/* ---- copy.c ---- */

/* After gpu_fail, in every round of the thread: ends all copies. Those whose entries copy agents
 * have claimed end last. */
void gpu_abandon(struct gpu *g);
/* Each does what can be done now, and returns whether that was anything. */
bool gpu_events_poll(struct gpu *g);
bool gpu_fill(struct gpu *g, enum ucm_copy_direction direction);
bool gpu_reap(struct gpu *g, unsigned stream);
void gpu_expire(struct gpu *g);

/* Once in each round of the thread: do several tenants use a direction? */
void gpu_contended_look(struct gpu *g);

/* ---- launch.c ---- */

void gpu_finish(struct gpu *g, struct device_job *job, int status); /* a copy ends */
/* A dump whose worker died meanwhile. */
int gpu_refuse_dying(struct device_job *job);
/* Bytes of one launch, at most. */
uint64_t gpu_launch_bytes(const struct gpu *g, enum ucm_copy_direction direction);
/* A place for one more launch; NULL: none now. One that is there stays until it is used. */
struct gpu_launch *gpu_launch_next(struct gpu *g, enum ucm_copy_direction direction);
/* Before a job's first piece: checks what must hold for all of them. 0 or -errno, job->error
 * filled. */
int gpu_job_check(struct gpu *g, struct device_job *job);
/* Records the event after what was enqueued. With its end gpu_reap calls gpu_staging_launched for
 * the entry or, when that is NULL, ends a piece of the job. */
CUresult gpu_launch_follow(struct gpu *g, unsigned stream, struct gpu_launch *l,
                           struct device_job *job, uint64_t cost, struct gpu_staging_entry *entry);
/* Is anything under way in a stream? */
static inline bool gpu_streams_busy(const struct gpu *g)
{
    return g->streams[UCM_COPY_LOAD].n + g->streams[UCM_COPY_DUMP].n + g->streams[GPU_EXPRESS].n >
           0;
}
/* The copy kernel over a piece's planes, in that stream. */
CUresult gpu_piece_kernel(struct gpu *g, unsigned stream, struct gpu_launch *l,
                          const struct device_job *job, const struct job_piece *piece);
/* Launches a piece, counted in job->pieces, straight between slots and pages. On an error the job
 * fails. */
void gpu_launch_piece(struct gpu *g, enum ucm_copy_direction direction, struct device_job *job,
                      const struct job_piece *piece);
void gpu_piece_end(struct gpu *g, struct device_job *job);
/* No further piece begins; the job ends with its last piece, or now. */
void gpu_job_fail(struct gpu *g, struct device_job *job, int status);
/* The same, when a piece has failed. */
void gpu_piece_fail(struct gpu *g, struct device_job *job, int status);

/* ---- express.c: small loads alongside others' launches ---- */

/* Whether the load, which is next, may go this way. */
bool gpu_express_takes(struct gpu *g, const struct device_job *job);
/* Launches all of it, or it fails. */
void gpu_express_launch(struct gpu *g, struct device_job *job);

/* ---- beside.c: a worker computes, and its own small copies wait behind ours ---- */

/* A load or dump has come: its worker says whether it computes. That holds until it says something
 * else, or nothing for a while. */
void gpu_beside_told(struct gpu *g, const struct device_job *job);
void gpu_beside_forget(struct gpu *g, const struct device_region *region); /* it is closed */
/* Once in each round of the thread: what the functions below go by. */
void gpu_beside_look(struct gpu *g);
/* May a launch begin? While a worker computes, a launch waits until the one before has ended, so
 * that the engine turns to others. Loads also wait until the bus would be done at their share of
 * it. */
bool gpu_beside_allows(const struct gpu *g, enum ucm_copy_direction direction);
void gpu_beside_launched(struct gpu *g, enum ucm_copy_direction direction, uint64_t bytes);
/* When what waits for its share of the bus may begin; 0: nothing waits for that. */
uint64_t gpu_beside_next_ns(struct gpu *g);
/* Is a way of that time no slower than that share? Then entries would gain nothing. */
bool gpu_beside_suffices(const struct gpu *g, enum ucm_copy_direction direction, double ns,
                         uint64_t bytes);

/* ---- busy.c ---- */

/* Do other processes' kernels run? While that is not known: yes, and a probe is wanted. While
 * entries are under way: what was known last. */
bool gpu_others_run(struct gpu *g);
/* The same; probes at once where a probe is due and possible. */
bool gpu_others_look(struct gpu *g);
/* Makes the wanted probe. It takes 0.3 ms at most when nobody is there, 3 ms where the second look
 * is as slow as the first. At most 20 a second, 100 while others may have gone. false: the probe
 * waits for what is under way, and so must new launches. */
bool gpu_probe_ready(struct gpu *g);
/* A launch of the copy kernel is done. */
void gpu_kernel_seen(struct gpu *g, enum ucm_copy_direction direction, const struct gpu_launch *l);

/* ---- calibrate.c ---- */

/* Fills g->costs: from the file, or by measuring for at most a second, or with defaults. */
void gpu_calibrate(struct gpu *g);

/* ---- dma.c ---- */

/* Fills g->dma.extents with those of a piece between slots and pages, for gpu_dma_launch, and in
 * the items which memory their slots lie in. Returns how many; 0: too many for the copy engines. */
uint32_t gpu_dma_plan(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                      struct ucm_copy_item *items);
/* The same between slots and the entry at that address, where items follow one another in the order
 * of `items`: writes their blocks. piece: of its planes, items and bytes. */
uint32_t gpu_dma_plan_entry(struct gpu *g, const struct device_job *job,
                            const struct job_piece *piece, struct ucm_copy_item *items,
                            uint64_t entry);
/* Enqueues the n extents. After an error nothing of them is under way. */
CUresult gpu_dma_launch(struct gpu *g, enum ucm_copy_direction direction, uint32_t n);

/* ---- ipc.c ---- */

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
    uint64_t offset, bytes;           /* must lie in the allocation */
    const struct device_proof *proof; /* must stand there */
    char name[24];                    /* in refusals */
};
/* 0 or -errno, job->error filled. */
int gpu_ipc_get(struct gpu *g, struct device_job *job, const struct gpu_ipc_wish *wish,
                const struct worker *worker, struct gpu_ipc **out);
void gpu_ipc_put(struct gpu_ipc *ipc);
/* Sees whether this driver's handles say how large their memory is, with memory of our own; once,
 * after gpu_context_open. */
void gpu_ipc_learn(struct gpu *g);

/* ---- region.c ---- */

struct gpu_region {
    struct worker worker;
    const char *events_foreign; /* worker_events_foreign */
    CUdeviceptr planes;         /* struct ucm_copy_plane of all planes, in GPU memory */
    /* For a region whose copies may convert: its tensors' places, and the kernels by enum
     * ucm_copy_direction. */
    CUdeviceptr tensors;
    CUfunction converts[2];
    /* For a region whose loads can re-rotate K: device_rope.at in GPU memory, and the kernel. */
    CUdeviceptr rope_at;
    CUfunction rope;
    uint32_t n; /* maps made so far */
    struct gpu_map {
        struct gpu_ipc *ipc; /* or, for VMM memory: */
        CUmemGenericAllocationHandle handle;
        size_t bytes;
    } maps[];
};

/* Fills the region's planes and mapping. 0 or -errno, job->error filled. */
int gpu_region_open(struct gpu *g, struct device_job *job);
void gpu_region_close(struct device_region *region);

/* Opens the event of a dump: job->scratch. */
int gpu_event_open(struct gpu *g, struct device_job *job);
void gpu_event_close(struct device_job *job); /* harmless when none is open */

/* ---- convert.c ---- */

/* For a region with tensors, as a part of its OPEN. 0 or -errno, job->error filled. */
int gpu_convert_open(struct gpu *g, struct device_job *job);
void gpu_convert_close(struct gpu_region *mapping); /* harmless when it is not open */
/* Launches a piece that converts straight between its slots and pages. */
CUresult gpu_convert_launch(struct gpu *g, const struct device_job *job,
                            const struct job_piece *piece, struct ucm_copy_item *items);

/* ---- rope.c ---- */

struct ucm_staging_order;

/* For a region with `rope`, as a part of its OPEN. 0 or -errno, job->error filled. */
int gpu_rope_open(struct gpu *g, struct device_job *job);
void gpu_rope_close(struct gpu_region *mapping); /* harmless when it is not open */
/* Is K of any item re-rotated? */
bool gpu_rope_shifts(const struct device_job *job, const struct job_piece *piece);
/* How many of the job's next items, at most `most`, have tables that fit: into a launch, or an
 * order, where each item takes so many words besides them. */
uint32_t gpu_rope_items(const struct device_job *job, uint32_t most, uint32_t words);
/* Launches a kernel that copies a piece and re-rotates it. Writes the launch's items and tables. */
CUresult gpu_rope_launch(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                         struct gpu_launch *l);
/* The same for a piece whose copy, or decoding, was launched: K is re-rotated after that, and the
 * launch ends there. After an error nothing of the piece is under way. */
CUresult gpu_rope_behind(struct gpu *g, const struct device_job *job, const struct job_piece *piece,
                         struct gpu_launch *l);
/* What an order says of a piece's shifts, tables and all. */
void gpu_rope_order(const struct device_job *job, const struct job_piece *piece,
                    struct ucm_staging_order *order);

/* ---- staging.c, staging_entry.c ---- */

int gpu_staging_open(struct gpu *g, struct device_job *job); /* 0 or -errno, job->error filled */
void gpu_staging_close(struct device_staging *staging);
/* As gpu_job_check, and picks the way. The stream has a place. */
int gpu_job_begin(struct gpu *g, struct device_job *job);
enum gpu_took { GPU_TOOK, GPU_FULL, GPU_PAUSED };
/* Begins the job's next piece; the stream has a place for it. While several tenants use the
 * direction, pieces of jobs that wait behind it may go with it. FULL: no entry is free now. PAUSED:
 * the ring takes nothing for a while, or never again. */
enum gpu_took gpu_staging_take(struct gpu *g, struct device_job *job);
/* a launch for it is done */
void gpu_staging_launched(struct gpu *g, struct gpu_staging_entry *entry);
/* the same, after gpu_fail */
void gpu_staging_lost(struct gpu *g, struct gpu_staging_entry *entry);
/* Handles what copy agents have done, and launches what entries wait for. */
bool gpu_stagings_step(struct gpu *g);
/* After gpu_fail: ends entries that no copy agent has claimed, and no launch has. */
void gpu_stagings_abandon(struct gpu *g);

/* ---- memory.c ---- */

void gpu_memory_add(struct gpu_memory *m, uint64_t base, uint64_t bytes);
void gpu_memory_remove(struct gpu_memory *m, uint64_t base, uint64_t bytes); /* as it was added */
/* Checks that all slots of the job lie in memory that was added, and pins what is not pinned yet.
 * 0 or -errno, job->error filled. */
int gpu_memory_need(struct gpu *g, struct device_job *job);
/* Names the pinned piece that holds all of the range; 0: no single one does. */
uint32_t gpu_memory_pin_of(const struct gpu_memory *m, uint64_t begin, uint64_t bytes);
/* Pins one more piece, when the thread has nothing else to do. */
void gpu_memory_pin_one(struct gpu *g);
void gpu_memory_close(struct gpu *g);

#endif
