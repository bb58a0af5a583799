/* The contract of a device: it holds workers' KV memory and copies between that and slots.
 * `cpu` maps shared memory and copies with memcpy; `cuda` opens IPC handles and launches copies.
 * README.md in this directory describes how.
 *
 * Promises:
 * - IPC memory is open only while a worker has it that could write there (struct device_proof).
 * - Nothing is launched outside a region's registered bounds: region_check has checked every
 *   number, and the device checks every block id.
 * - A dump reads only after its event. A dump with an event succeeds only if the worker was alive
 *   after the event was seen signalled: the events of a dying process may read as signalled.
 * - Once a worker has hung up, no further piece of its copies begins, and a dump succeeds only if
 *   the worker had not hung up when the last byte was read.
 * - Every accepted job completes exactly once, on the event loop.
 * - A CLOSE completes after every copy of its region or staging ring, and after the unmapping.
 *
 * Order: OPEN; after it completed with 0 any loads and dumps; CLOSE, after which nothing is
 * submitted. What failed to open holds nothing and needs no CLOSE.
 *
 * Threads: call everything below on the event loop only. No call blocks, except where
 * device_set_new says so. Each device has threads of its own. One thread a GPU makes all of its
 * CUDA calls; it creates the context (about 600 MiB of GPU memory) when the first region opens. It
 * runs on the processors of the NUMA node that the GPU hangs on; device.node says where to take
 * slots. */
#ifndef UCMD_DEVICE_DEVICE_H
#define UCMD_DEVICE_DEVICE_H

#include "daemon/base/fair.h"
#include "daemon/base/list.h"
#include "daemon/base/numa.h"
#include "daemon/base/span.h"
#include "kernels/copy.h"
#include "kernels/encoding/encoding.h"
#include "kernels/rope/rope.h"
#include "proto/errors.h"
#include "proto/messages.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct uv_loop_s;
struct device;
struct device_job;

/* The device's own count of the copies that use a region or a staging ring. */
struct device_users {
    uint32_t jobs;            /* copies that were submitted and are not done */
    struct device_job *close; /* the CLOSE that waits for them */
};

struct device_handle {
    uint64_t kind, offset, bytes; /* kind: enum ucm_handle_kind */
    uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    int fd; /* owned; -1: none. The caller may take it, and set -1, once OPEN has completed */
    uint64_t address; /* of the mapping, whose first byte is the handle's offset 0; 0: none */
};

/* What a worker has written over the first bytes of the memory that its IPC handles name, to show
 * that it is its own: the bytes of a handle can be guessed, and the driver opens them for
 * anybody. */
struct device_proof {
    uint8_t nonce[UCM_NONCE_BYTES];
};

/* Where K lies in the planes of a region, and how it is rotated. */
struct device_rope {
    struct ucm_rope_spec spec;
    uint32_t at[]; /* n_planes: where K begins in the plane's fragment; DEVICE_NO_K: not there */
};
#define DEVICE_NO_K UINT32_MAX

#define DEVICE_TENSOR_ALIGN 16u /* where a tensor begins in a page */

/* A worker's registered memory. region_check fills it; the caller adds device, pid, connection,
 * peer_fd, proof and stranger before OPEN; the device adds addresses. */
struct device_region {
    struct device *device;
    pid_t pid;           /* of the worker, as the kernel names it; 0: not visible here */
    uint64_t connection; /* its; the staging ring of the same connection serves it */
    const int *peer_fd;  /* its socket, open until the region is closed, to ask whether the worker
                           hung up; NULL: never ask */
    struct device_proof proof; /* of its IPC handles */
    bool stranger;             /* of another tenant than the daemon's own user: it gets no events */
    uint32_t part, blocks;
    struct form pages; /* what its pages hold */
    /* its blocks are entries that take any layer: pages.layers is 1 */
    bool block_pool;
    const struct codec *codec; /* raw pages: how copies may encode and decode; NULL: they don't */
    uint32_t ring_region;      /* what orders of a staging ring call it; 0: never staged */
    uint32_t n_handles, n_planes;
    struct device_handle *handles;
    /* pages.layers + 1 entries: layer s has planes [layer_first[s], layer_first[s+1]); none: the
     * region has no memory for that layer */
    uint32_t *layer_first;
    /* Until OPEN, `base` counts from the first byte of handle `memory`'s mapping. */
    struct ucm_copy_plane *planes;
    /* With a codec, when each plane is one tensor: where the tensors lie in an encoded slot
     * (n_planes of them). NULL: blocks are copied as they are. A region serves both forms, by
     * device_job.converts. */
    struct ucm_encoding_plane *tensors;
    struct device_rope *rope; /* NULL: loads can't re-rotate K */
    struct device_users users;
    void *mapping; /* device's own */
};

/* A staging ring: entries of a worker's GPU memory that copies may pass through, and the memory
 * that it shares for that (proto/memory/staging.h). staging_check fills it; the caller adds pid,
 * connection and proof. The device trusts nothing in it: a worker that breaks the rules delays its
 * own copies, or gets wrong bytes of its own. */
struct device_staging {
    pid_t pid;
    uint64_t connection;
    uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    struct device_proof proof;
    uint64_t offset, entry_bytes;
    uint32_t entries;
    int fd;           /* the shared memory; as a handle's */
    struct list link; /* device's own from here on: among its open staging rings */
    struct device_users users;
    void *mapping;
};

/* How a copy between those pages and blocks of that form goes. */
enum copy_way {
    WAY_NONE, /* no way is available */
    WAY_STRAIGHT,
    WAY_CONVERTED,
};
enum copy_way region_way(const struct device_region *r, const struct form *f);

/* Checks a registration against the form that its pages hold and the sizes of its handles:
 * - handles are of the device's kind;
 * - every plane's last block ends inside its handle, and strides hold a fragment;
 * - planes are sorted by layer, and the fragments of each layer that has some add up to
 *   pages->layer_bytes;
 * - no byte belongs to two fragments; planes of one allocation may interleave with one stride only;
 * - with a codec (pages are raw then; NULL: none): every plane is one tensor, in order, and
 *   begins at a multiple of DEVICE_TENSOR_ALIGN in every block;
 * - with `rope`: the K of each layer lies whole in one plane's fragment.
 * Takes the descriptors that handles name out of fds and sets their entries to -1. Returns 0 and
 * *out; or -code with *e, and then takes nothing. */
int region_check(const struct msg_region_register *m, const struct form *pages,
                 const struct codec *codec, int *fds, uint32_t n_fds, struct device_region **out,
                 struct ucm_error *e);
void region_free(struct device_region *r); /* of a region that is not open; NULL-safe */

/* The same for a staging ring. */
int staging_check(const struct msg_ring_register *m, int *fds, uint32_t n_fds,
                  struct device_staging **out, struct ucm_error *e);
void staging_free(struct device_staging *s); /* of one that is not open; NULL-safe */

enum device_op {
    DEVICE_OPEN,   /* map the memory of a region or a staging ring (cuda only) */
    DEVICE_CLOSE,  /* unmap it, after the copies that use it */
    DEVICE_UNPIN,  /* memory_add is undone */
    DEVICE_COPIES, /* from here on: */
    DEVICE_LOAD = DEVICE_COPIES,
    DEVICE_DUMP,
};

/* What the worker's GPU does besides a copy, as the worker says. AWAITED: a step of it waits for
 * this copy. */
enum device_beside {
    DEVICE_BESIDE_UNKNOWN,
    DEVICE_BESIDE_NOTHING,
    DEVICE_BESIDE_STEPS,
    DEVICE_BESIDE_AWAITED,
};

/* One piece of work. The caller allocates it and does not touch it from submit until `done_cb`,
 * which may free it. A copy passes through the open staging ring of its region's connection where
 * that pays. */
struct device_job {
    enum device_op op;
    struct device_region *region;   /* or, for OPEN and CLOSE: */
    struct device_staging *staging; /* the device fills it for copies */
    void *memory;                   /* UNPIN: as in memory_add */
    uint64_t memory_bytes;
    struct ucm_copy_item *items; /* slot addresses as the CPU sees them; alive until done */
    uint32_t n_items, cap_items;
    uint32_t first_layer, n_layers; /* of the blocks: those that are copied */
    uint32_t first_plane, n_planes; /* theirs */
    /* Load: the table by which K of each item is re-rotated (NULL: it stays); NULL: all stays.
     * Alive until done. */
    const struct ucm_rope_angle *const *shifts;
    const uint8_t *event; /* dump: 64 bytes of an IPC event handle, or NULL; alive until done */
    uint64_t deadline_ms; /* uv_now() time at which a job fails that has not begun; 0: none, but a
                               dump with an event must have one */
    struct fair_who who;  /* its tenant: tenants share the bus by their weights */
    uint8_t priority;     /* 0 to 7, among the tenant's own */
    enum device_beside beside;
    bool straight; /* never through a staging ring */
    bool converts; /* slots hold the region's codec's form, and the device encodes or decodes */
    /* Out, of an encoded dump: set where a tensor of the item did not fit (ucm_encoding_fits), so
     * that the slot holds nothing of use. n_items, 0 at first; NULL: the encoding fits always. */
    atomic_uchar *unfit;
    struct fair_got got;    /* out, of a copy */
    struct ucm_error error; /* out, when status is not 0 */
    /* status is one of:
     * - 0
     * - -ETIMEDOUT: the event or the deadline
     * - -EINVAL: the worker's handles, ids or event are wrong
     * - -EBUSY (OPEN): an older registration still holds the memory
     * - -EIO: the device or the worker failed
     * - -ECANCELED: the worker has hung up */
    void (*done_cb)(struct device_job *job, int status);
    /* The device's own, from submit to done_cb. */
    struct list link;
    struct fair_queue *queue; /* where it waits, or did, */
    unsigned rank;            /* and its rank there */
    int status;
    bool begun, staged;
    uint32_t next_item, next_plane; /* where the next piece begins; of CLOSE (cpu): handle */
    uint64_t next_byte;             /* and byte of its mapping */
    uint32_t pieces;                /* under way */
    void *scratch;
};

/* The load or dump is one of these layers of blocks. The region has planes for them; of a pool
 * there is layer 0. */
void device_job_layers(struct device_job *job, uint32_t layer, uint32_t layers);
/* Adds a copy between block `block` and the span, to items, where there are cap_items. 0; -EINVAL:
 * no such block; or the span lacks the job's layers, has another form, or has bytes that the job
 * may not read (write). Nobody else writes items. */
int device_job_add(struct device_job *job, const struct span *span, uint32_t block);
/* By the slots' addresses. */
void device_job_sort(struct device_job *job);

enum copy_strategy {
    COPY_AUTO,   /* the planner decides */
    COPY_DMA,    /* the copy engines, straight between slots and pages */
    COPY_SM,     /* a kernel, straight between slots and pages */
    COPY_STAGED, /* the copy engines to and from entries of the worker's memory, and its own kernel
                    between entries and pages */
    COPY_STRATEGIES
};

struct device_stats {
    char name[64]; /* "cpu", "NVIDIA H200" */
    uint8_t uuid[UCM_UUID_BYTES];
    bool cuda, failed; /* failed: a sticky error; the daemon must restart */
    uint64_t jobs, load_bytes, dump_bytes, regions, context_bytes, staging_rings;
    /* cuda: launches, and the bytes that they moved, by enum copy_strategy. */
    uint64_t launches[COPY_STRATEGIES], bytes[COPY_STRATEGIES];
};

struct device_ops {
    /* 0, or -EAGAIN: its queue is full. Only copies are refused. */
    int (*submit)(struct device *d, struct device_job *job);
    /* Memory that slots will lie in: the device pins it for DMA. Returns at once; jobs submitted
     * later may use it. It stays mapped until the device is closed, or an UNPIN is done. NULL:
     * nothing to pin, and there is no UNPIN. */
    void (*memory_add)(struct device *d, void *base, uint64_t bytes);
    void (*stats)(struct device *d, struct device_stats *out);
    /* After all jobs are done and everything is closed. Joins the threads. */
    void (*close)(struct device *d);
};

struct device {
    const struct device_ops *ops;
    int node; /* of the host's memory; NUMA_NONE: none in particular */
};

#define DEVICE_QUEUE_MAX 4096 /* loads and dumps accepted and not done, a device */
#define DEVICE_GPUS_MAX 32

struct device_config {
    unsigned cpu_threads;
    int cuda; /* enum config_cuda */
    enum copy_strategy strategy;
    /* The share of the bus for loads while a worker computes; 100: as if it did not. */
    unsigned busy_max_percent;
    /* directory for the measured costs of GPUs; NULL or "": none; borrowed */
    const char *calibration;
    const struct numa *numa; /* looks up GPUs' nodes, borrowed; NULL: they have none */
    /* Runs on the event loop, once a device, when the device failed for good (a sticky CUDA
     * error). */
    void (*failed_cb)(void *ctx, const char *why);
    /* Runs on the event loop when the GPUs are known, if device_set_new did not wait for that; gpus
     * may be 0, note says why. May be NULL. */
    void (*found_cb)(void *ctx, uint32_t gpus, const char *note);
    /* Runs on the event loop: no device uses this memory any more (device_set_memory_remove). May
     * be NULL if that is never called. */
    void (*memory_removed_cb)(void *ctx, void *base, uint64_t bytes);
    void *ctx;
};

/* Creates cpu and every GPU that the driver shows. Without a driver there is none, and *note says
 * why. Starting a driver takes hundreds of ms: for CONFIG_CUDA_AUTO a thread does it and the GPUs
 * appear later (*note says so); for CONFIG_CUDA_REQUIRED this call waits, and fails without a GPU.
 * note is "" when there is nothing to say. */
struct device_set;
/* Whether the driver that CONFIG_CUDA_REQUIRED needs is installed. Does not start it, so whether it
 * shows a GPU is open. 0 or -ENOENT with why. */
int device_check(int cuda, char why[200]);
int device_set_new(struct uv_loop_s *loop, const struct device_config *config,
                   struct device_set **out, char note[200], struct ucm_error *e);
void device_set_free(struct device_set *s); /* NULL-safe; run the event loop once more afterwards */
uint32_t device_set_count(const struct device_set *s);
struct device *device_set_at(struct device_set *s, uint32_t i); /* 0 is cpu */
/* "cpu", or "cuda" with a UUID (16 bytes). NULL with *e when there is no such device: UNSUPPORTED,
 * INVALID, DEVICE, or BUSY while the GPUs are still starting. */
struct device *device_set_find(struct device_set *s, struct proto_str name, struct proto_bin gpu,
                               struct ucm_error *e);
/* Gives memory to every device, those that appear later included. 0 or -ENOMEM. */
int device_set_memory_add(struct device_set *s, void *base, uint64_t bytes);
/* Undoes it: no copy may use the memory any more. memory_removed_cb runs, perhaps inside the call;
 * until then it stays mapped, and is not added again. */
void device_set_memory_remove(struct device_set *s, void *base, uint64_t bytes);

#endif
