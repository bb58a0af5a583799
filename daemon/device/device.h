/* The contract of a device: what holds workers' KV memory and copies between it and slots.
 * `cpu` maps shared memory and copies with memcpy; `cuda` opens IPC handles and launches copies.
 *
 * Promises: nothing is launched that is not inside a region's registered bounds (region_check has
 * seen every number, the device sees every block id). A dump reads only after its event, and one
 * with an event succeeds only if the worker was alive when the event was seen (a dying worker's
 * events may read as signalled). Of a worker that has hung up, and so may use its memory for
 * anything, no further piece is copied, and a dump succeeds only if it had not when the last byte
 * was read. A job that was accepted completes exactly once, on the loop.
 * Closing a region completes only after every job of it is done and its mappings are closed.
 *
 * Order for one region: OPEN; when that is done with 0, any loads and dumps; CLOSE, after which
 * nothing is submitted. A region whose OPEN failed holds nothing and needs no CLOSE.
 *
 * A GPU belongs to the NUMA node that its slot hangs on: its thread keeps to the processors there,
 * and who looks for slots for it is told.
 *
 * Threads: functions below on the loop only, and none of them waits (but see device_set_new). Each
 * device has threads of its own; for CUDA exactly one a GPU makes all CUDA calls, and it makes its
 * context (about 600 MiB of GPU memory) when the first region is opened: a GPU that nobody uses
 * costs nothing. */
#ifndef UCMD_DEVICE_DEVICE_H
#define UCMD_DEVICE_DEVICE_H

#include "daemon/base/list.h"
#include "daemon/base/numa.h"
#include "daemon/device/plan.h"
#include "kernels/copy.h"
#include "proto/errors.h"
#include "proto/messages.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct uv_loop_s;
struct device;

/* A worker's registered memory. Filled by region_check from the wire's message; the caller adds
 * device and pid before OPEN, the device the addresses. Owned by the front's connection; opaque
 * fields belong to the device. */
struct device_region {
    struct device *device;
    uint32_t part, blocks, shards;
    uint64_t shard_bytes;
    uint32_t n_handles, n_planes;
    struct msg_handle *handles; /* copies, ipc bytes included (in ipc_bytes) */
    uint8_t (*ipc_bytes)[UCM_MAX_HANDLE_BYTES];
    int *fds; /* one a handle, -1 when it has none; owned; closed when the device has mapped them,
                 or with the region */
    struct msg_plane *spec;
    uint32_t *shard_first; /* shards + 1 entries: planes [shard_first[s], shard_first[s+1]) */
    struct ucm_copy_plane *planes; /* base filled by the device when it opens */
    pid_t pid;                     /* of the worker, as the kernel names it; 0: not visible here */
    uint64_t owner;                /* its connection: tells workers apart that are not visible */
    const int *peer_fd;   /* its socket, open until the region is closed, to be asked whether the
                             worker has hung up; NULL: nobody is asked */
    uint32_t ring_region; /* how orders on its connection's ring name it; 0: none does */
    void *mapping;        /* device's own */
};

/* Slices of a worker's GPU memory that copies may go through, and the memory that it shares for
 * that (proto/staging.h). Filled by the caller; owned by the front's connection. Trusted with nothing:
 * a worker that breaks the rules gets its copies late, or gets other bytes of its own. */
struct device_staging {
    struct device *device;
    pid_t pid;
    uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    uint64_t offset, slice_bytes;
    uint32_t slices;
    int fd;        /* the shared memory; owned; closed and -1 when the device has mapped it */
    void *mapping; /* device's own */
};

/* Checks a registration against the namespace's geometry (shards of this part, shard_bytes) and the
 * handles' sizes: handles are of the device's kind, every plane's last block ends inside its
 * handle, strides hold a chunk, planes are sorted by shard and the chunks of each shard add up to
 * shard_bytes. No byte belongs to two chunks: planes of one allocation may interleave only with one
 * stride. Takes the descriptors of fds that handles name (dup'ed by the caller: it owns the array,
 * entries taken are set to -1), each for one handle. 0 and *out, or -code with *e; then nothing was
 * taken. */
int region_check(const struct msg_region_register *m, uint32_t shards, uint64_t shard_bytes,
                 int *fds, uint32_t n_fds, struct device_region **out, struct ucm_error *e);
void region_free(struct device_region *r); /* a region that is not open; NULL-safe */

enum device_op {
    DEVICE_OPEN,          /* map the region's handles */
    DEVICE_CLOSE,         /* unmap them; queued behind the region's jobs */
    DEVICE_STAGING_OPEN,  /* map the ring; cuda only */
    DEVICE_STAGING_CLOSE, /* unmap it; queued behind the copies that may go through it */
    DEVICE_LOAD,
    DEVICE_DUMP,
};

/* One piece of work. Allocated by the caller, untouched by it from submit until `done`, which may
 * free it. */
struct device_job {
    enum device_op op;
    struct device_region *region; /* but for RING_OPEN and RING_CLOSE */
    struct device_staging
        *ring; /* theirs; of a copy: an open ring that it may go through, or NULL */
    const struct ucm_copy_item *items; /* slot addresses as the CPU sees them; alive until done */
    uint32_t n_items;
    uint32_t first_plane, n_planes; /* range of the region's planes */
    const uint8_t *event;   /* dump: 64 bytes of an IPC event handle, or NULL; alive until done */
    uint64_t deadline_ms;   /* uv_now() time by which a job that has not begun fails; 0: none, but a
                               dump with an event must have one */
    uint8_t priority;       /* 0 to 7; loads go before dumps of the same priority */
    struct ucm_error error; /* out, when status is not 0 */
    /* 0; -ETIMEDOUT (event or deadline); -EINVAL (the worker's handles, ids or event are wrong);
     * -EBUSY (OPEN: an older region still holds the memory); -EIO (device or worker failed);
     * -ECANCELED (the worker has hung up). */
    void (*done)(struct device_job *job, int status);
    /* The device's own, from submit to done. */
    struct list link;
    int status;
    bool begun, staged;
    uint32_t next_item, next_plane; /* where the next piece begins */
    uint32_t pieces;                /* under way */
    void *scratch;
};

struct device_stats {
    char name[64]; /* "cpu", "NVIDIA H200" */
    uint8_t uuid[UCM_UUID_BYTES];
    bool cuda, failed; /* failed: a sticky error; the daemon must restart */
    uint64_t jobs, load_bytes, dump_bytes, regions, context_bytes, rings;
    /* cuda: launches, and the bytes that they moved, by enum copy_strategy. */
    uint64_t launches[COPY_STRATEGIES], bytes[COPY_STRATEGIES];
};

struct device_ops {
    const char *name;
    /* 0, or -EAGAIN: its queue is full. OPEN and CLOSE are never refused. */
    int (*submit)(struct device *d, struct device_job *job);
    /* Memory that slots will lie in: pin it for DMA. Returns at once; jobs submitted later may use
     * it. It stays mapped until the device is closed. */
    void (*memory_add)(struct device *d, void *base, uint64_t bytes);
    void (*stats)(struct device *d, struct device_stats *out);
    /* All jobs done, all regions closed. Joins the threads, closes handles on the loop. */
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
    const char *calibration; /* folder where a GPU's costs are kept; NULL or "": nowhere; alive as
                                long as the devices */
    const struct numa *numa; /* what GPUs' nodes are asked of, borrowed; NULL: they have none */
    /* Called on the loop when a device has failed for good (sticky CUDA error); once a device. */
    void (*failed)(void *ctx, const char *why);
    /* Called on the loop once the GPUs are known, where device_set_new did not wait for that; gpus
     * may be 0, note says why. May be NULL. */
    void (*found)(void *ctx, uint32_t gpus, const char *note);
    void *ctx;
};

/* Makes cpu, and every GPU that the driver shows. Without a driver there is none, and *note says
 * why; with one, starting it takes long (hundreds of ms): for CONFIG_CUDA_AUTO a thread does that
 * and the GPUs appear later (*note says so), for CONFIG_CUDA_REQUIRED this call waits, and fails
 * when there is no GPU. note is "" when there is nothing to say. */
struct device_set;
int device_set_new(struct uv_loop_s *loop, const struct device_config *config,
                   struct device_set **out, char note[200], struct ucm_error *e);
void device_set_free(struct device_set *s); /* NULL-safe; run the loop once more afterwards */
uint32_t device_set_count(const struct device_set *s);
struct device *device_set_at(struct device_set *s, uint32_t i); /* 0 is cpu */
/* "cpu", or "cuda" with a UUID (16 bytes). NULL with *e when there is no such device: UNSUPPORTED,
 * INVALID, DEVICE, or BUSY while the GPUs are still starting. */
struct device *device_set_find(struct device_set *s, struct proto_str name, struct proto_bin gpu,
                               struct ucm_error *e);
/* Give memory to every device, those that appear later included. 0 or -ENOMEM. */
int device_set_memory_add(struct device_set *s, void *base, uint64_t bytes);

#endif
