/* What devices share: the queue in which jobs wait, the way from the event loop to a device's
 * threads and back, and how a job is cut into pieces. Inside this module only.
 *
 * Promises:
 * - A queue allocates nothing and never holds more than DEVICE_QUEUE_MAX loads and dumps.
 * - Copies of several tenants share what they wait for by the tenants' weights (base/fair.h); a
 *   tenant's own go by priority, loads before dumps where these two share it. Other jobs of several
 *   tenants take turns, a tenant's own in their order.
 * - Pieces of a job cover each (item, plane) once.
 * - work_finish runs `done_cb` of its job once, on the event loop; a CLOSE reaches the threads only
 *   after every copy of its region or staging ring.
 * Threads: a queue belongs to whichever thread holds its owner's lock. */
#ifndef UCMD_DEVICE_WORK_H
#define UCMD_DEVICE_WORK_H

#include "daemon/base/fair.h"
#include "daemon/device/device.h"

#include <stdatomic.h>
#include <uv.h>

/* daemon/blend/region.c: what a registration says of K. 0 with *out (NULL: nothing), which
 * region_free frees; or -code with *e. r has its planes. */
int region_rope(const struct msg_region_register *m, const struct device_region *r,
                struct device_rope **out, struct ucm_error *e);
/* region.c, when all handles are mapped: gives planes their addresses. */
void region_mapped(struct device_region *r);

/* ---- queue ---- */

#define JOB_PRIORITIES 8u

/* To take a job out, remove its link. */
struct job_queue {
    struct fair_queue control; /* all but copies */
    bool joint;                /* loads and dumps share the threads: both wait in the first of: */
    struct fair_queue copies[2];
};

/* burst: see base/fair.h. */
void job_queue_init(struct job_queue *q, bool joint, uint64_t burst);
void job_queue_push(struct job_queue *q, struct device_job *job);
/* The first other job, out of the queue, if tenants wait whose firsts skip_cb (NULL: none) names;
 * or NULL. */
struct device_job *job_queue_pop_control(struct job_queue *q,
                                         bool (*skip_cb)(void *ctx, struct list *link), void *ctx);
/* The next copy of that direction (of a joint queue: of either direction), left in the queue, or
 * NULL. */
struct device_job *job_queue_first(struct job_queue *q, enum device_op op);
/* The next copy of a joint queue, skipping tenants whose first copy skip_cb rejects; or NULL. */
struct device_job *job_queue_first_unless(struct job_queue *q,
                                          bool (*skip_cb)(void *ctx, struct list *link), void *ctx);
bool job_queue_waits(struct job_queue *q); /* does anything? */
/* The next one after `job`, which waits; or NULL. What begins of a job is charged to its queue
 * (fair_queue_charge). */
struct device_job *job_queue_next(struct device_job *job);
/* Moves every copy of which no piece was taken and whose deadline has passed to `expired`. */
void job_queue_expire(struct job_queue *q, uint64_t now_ms, struct list *expired);

/* ---- jobs: job.c ---- */

uint64_t job_clock_ms(void); /* the clock of uv_now(); any thread */
static inline enum ucm_copy_direction job_direction(const struct device_job *job)
{
    return job->op == DEVICE_DUMP ? UCM_COPY_DUMP : UCM_COPY_LOAD;
}
bool job_late(const struct device_job *job, uint64_t now_ms);
/* Fills job->error and returns `status`: job_refuse(job, status, code, format, ...). */
#define job_refuse(job, status, code, ...)                                                         \
    ((void)ucm_error_set(&(job)->error, code, __VA_ARGS__), (status))
int job_refuse_late(struct device_job *job);     /* -ETIMEDOUT */
int job_refuse_deserted(struct device_job *job); /* -ECANCELED */
/* What must hold before a copy begins: it is not late, its planes and block ids are the region's.
 * 0 or -errno, job->error filled. */
int job_check(struct device_job *job, uint64_t now_ms);
/* Has the peer of that socket hung up? One system call. NULL: no. */
bool peer_hung_up(const int *peer_fd);
/* A plane's offset and length in the job's slots, in their form. */
uint64_t job_plane_at(const struct device_job *job, uint32_t plane);
uint32_t job_plane_bytes(const struct device_job *job, uint32_t plane);
/* Bytes of a slot that the job's planes take. *cost (or NULL): what such an item counts in turns
 * and pieces, in bytes; a fragment costs at least JOB_FRAGMENT_COST. */
#define JOB_FRAGMENT_COST 512u
uint64_t job_item_bytes(const struct device_job *job, uint64_t *cost);
/* Checks that memory which a peer shares is safe to map up to offset + bytes: a memfd that can't
 * shrink, on tmpfs, whose missing pages kill nobody. That it has as many pages as are shared (bytes
 * > 0, after offset) finds honest mistakes alone: a peer may have them elsewhere, or take them
 * away (guard.h). Waits for nothing that a peer holds. 0, or -EINVAL with job->error, where `what`
 * names the memory. */
int job_check_memfd(struct device_job *job, const char *what, int fd, uint64_t offset,
                    uint64_t bytes);

struct job_piece {
    uint32_t first_item, n_items, first_plane, n_planes;
    uint64_t bytes, cost; /* cost: by job_item_bytes */
};
/* The next piece that costs about max_cost (at least one fragment) and has at most max_items.
 * Returns true for the last one, and is not called again after that. */
bool job_next_piece(struct device_job *job, uint64_t max_cost, uint32_t max_items,
                    struct job_piece *out);

/* ---- daemon/encoding/convert.c ---- */

/* For a region with a codec: each plane must be one tensor, in order and aligned. Fills in their
 * offsets in slots. 0, or -code with *e. r has its planes. */
int region_tensors(const struct msg_region_register *m, struct device_region *r,
                   struct ucm_error *e);
/* On the CPU: encodes or decodes a piece between slots and pages. */
void job_convert(struct device_job *job, const struct job_piece *piece);
/* Any thread that has encoded a piece: sets job->unfit where a tensor did not fit. */
void job_mark_unfit(struct device_job *job, const struct job_piece *piece);

/* ---- work: the part of a device that all kinds have ---- */

struct work {
    struct device device;
    uv_mutex_t mutex;
    uv_cond_t cond; /* signalled with everything that goes into the inbox, and with quit */
    /* Under the mutex. */
    struct list inbox; /* submitted, and not yet taken by a thread */
    struct list done;
    bool quit;

    uv_async_t async;
    atomic_bool soon; /* a job is about to end */
    /* Loop only. */
    uv_idle_t awake; /* while it runs the event loop does not sleep */
    uint64_t awake_until_ns;
    uint32_t accepted;        /* loads and dumps under way */
    struct list staging_open; /* struct device_staging */
    struct device_stats stats;
    void (*delivered_cb)(struct work *w); /* after each delivery; may be NULL */
};

/* On zeroed memory that begins with w. 0 or -errno. */
int work_init(struct work *w, uv_loop_t *loop, const struct device_ops *ops);
/* Loop: struct device_ops's submit. */
int work_submit(struct device *d, struct device_job *job);
/* Any thread: the job is done. _locked: the caller holds the mutex, and wakes the event loop. */
void work_finish(struct work *w, struct device_job *job, int status);
void work_finish_locked(struct work *w, struct device_job *job, int status);
/* Any thread: a job will be done within about 0.1 ms. Waking a sleeping processor takes up to half
 * as long. So the event loop stays awake until a job is done and shortly after, at most 0.25 ms. */
void work_soon(struct work *w);
void work_wake(struct work *w); /* any thread: delivered_cb runs soon */
void work_quit(struct work *w); /* sets quit and signals */
/* Loop: nothing is accepted and no thread uses w any more. Frees it when the event loop has run. */
void work_close(struct work *w);

/* cpu.c: the device of workers whose KV lies in shared memory. 0 or -errno. */
int cpu_new(struct uv_loop_s *loop, unsigned threads, struct device **out);

#endif
