/* Transfers whose items a device copies: load, dump and gather. An item that has its slot joins an
 * open batch of its form; a batch becomes one device job, or of a load in steps several; when the
 * job ends, the slots are given back.
 *
 * Jobs are awaited whatever happens, since the device may still touch the worker's pages. */
#ifndef UCMD_REQUEST_COPIES_H
#define UCMD_REQUEST_COPIES_H

#include "daemon/request/transfer.h"

struct copies;
struct batch_item;
struct copy_batch;

struct copy_kind {
    struct transfer_kind transfer; /* of a struct copies */
    enum device_op op;
    uint32_t job_items; /* at most */
    /* Adds the copies of an item to its batch's job. 0; or -EINVAL, and none was added. NULL: one
     * copy, of the whole part. */
    int (*add)(struct copy_batch *b, const struct batch_item *i);
    /* Sends a batch that is complete. False: the device's queue is full. NULL: as one
     * job. */
    bool (*send_batch)(struct copy_batch *b);
    /* Ends the reference to the item's slot. ok: it was copied. NULL: cache_unref. cache_released
     * comes after the last item. */
    void (*put)(struct copies *c, const struct copy_batch *b, const struct batch_item *i, bool ok);
};

/* Such a transfer has one part. */
struct copies {
    struct transfer w;
    const struct copy_kind *kind;
    struct registered *region;
    struct list link; /* in region->users */
    uint32_t layer, layers;
    uint32_t step;           /* layers that a job moves of a load in steps; 0: all of them */
    uint32_t n_copies, jobs; /* of all items; under way */
    /* of each key: to where, or from where; block_pool/gather.c has its own there */
    uint32_t *blocks;
    enum device_beside beside;
    struct copy_batch *open[2];           /* filling up; of blocks that go straight last */
    const uint8_t *event;                 /* jobs wait for it; or NULL */
    struct steps *steps;                  /* of a load in steps, else NULL */
    const struct ucm_rope_angle **shifts; /* a load: n_keys tables, NULL where K stays; NULL: all */
};

struct batch_item {
    uint32_t at;
    union {
        struct pending_write *pending_write; /* of a dump; NULL: it has ended */
        struct cache_layers *layers; /* of a gather: what was read of the part; NULL: the part */
    } held;
    uint64_t slot; /* as in its copy */
};

struct copy_batch {
    struct device_job job;
    struct copies *c;
    const struct form *form;              /* of what its slots hold, all alike */
    uint64_t slot_bytes;                  /* of each */
    uint32_t n;                           /* items */
    struct batch_item *item;              /* n; this and the job's arrays are after the struct */
    const struct ucm_rope_angle **shifts; /* of copies; or NULL */
    /* For a load in steps; load_steps.c owns these. */
    struct list link;         /* in steps->batches while a step of it is to be sent */
    uint32_t next_step, jobs; /* jobs: under way */
    enum ucm_block_status status;
};

struct copy_params {
    uint64_t region, layer, layers, priority, timeout_ms;
    struct proto_bin keys, blocks;
    bool raw; /* a dump */
    bool gpu_busy;
};
/* Checks what a load or dump says, before anything moves: the region, or NULL with call->error. */
struct registered *copies_check(struct call *call, const struct copy_params *p, uint32_t *n_keys);
/* `bytes` of memory that begin with a struct copies, which use the region until copies_end. NULL
 * with call->error. */
void *copies_new(struct call *call, const struct copy_kind *kind, const struct copy_params *p,
                 struct registered *region, uint32_t n_keys, size_t bytes);
/* Refuses numbers that come twice: of n that are `step` u32s apart, `what` each, one for each `of`.
 * 0 or -code with call->error. */
int numbers_distinct(struct call *call, const uint32_t *numbers, uint32_t n, uint32_t step,
                     const char *what, const char *of);
/* Its items have ended, and so has its reference to the region. If it has copied anything, how long
 * it took is counted in the histogram of its size, and returned; else 0. NULL: not here. */
uint64_t copies_end(struct copies *c, struct histogram took[METRIC_SIZES]);
/* As in transfer_kind. `again` puts items that were read into open batches. */
int copies_again(struct transfer *w);
int copies_send(struct transfer *w);
void copies_stop(struct transfer *w);

/* A place for that item in an open batch of its form; 0, -EAGAIN, -ENOMEM. -EXDEV: the region can't
 * have that form; the item misses, as it would if it was not there. */
int batch_reserve(struct copies *c, const struct transfer_item *it, struct copy_batch **out);
/* What the open batch of that number has; NULL: it may still get items, or there is none. One
 * without items is freed. */
struct copy_batch *batch_open(struct copies *c, unsigned open);
/* Puts an item in its place, which counts as held from now on. It ends as FAILED if it has no span
 * that the job may touch. */
void batch_add(struct copy_batch *b, const struct batch_item *item);
/* Submits a job of the batch's items. False: the device's queue is full. */
bool job_submit(struct copy_batch *b, struct device_job *job,
                void (*done_cb)(struct device_job *job, int status));
/* A job has ended: what that means for its items. Counts errors, and what it got of the bus. */
enum ucm_block_status job_ended(struct copies *c, const struct device_job *job, int status);
/* Ends all its items, counts what it copied, and frees it. */
void batch_end(struct copy_batch *b, enum ucm_block_status status);

/* A load that re-rotates K: requests.shifts. */
struct load_shifts {
    /* Checks what a load of n keys says. 0 with *memory, the bytes that its tables take, or -code
     * with call->error. */
    int (*check)(struct call *call, const struct registered *region, struct proto_u32s shifts,
                 uint32_t n_keys, size_t *memory);
    /* Fills in zeroed memory of so many bytes, as c->shifts. */
    void (*init)(struct copies *c, struct proto_u32s shifts, void *memory);
};

/* ---- load_steps.c: a load that goes layer by layer and reports progress ---- */

/* Bytes that the steps of a load take. */
size_t steps_memory(uint32_t layers);
/* Sets up zeroed memory of steps_memory bytes as c->steps. */
void steps_init(struct copies *c, void *memory, uint32_t step);
/* As in copy_kind, and in its transfer_kind. */
bool steps_send_batch(struct copy_batch *b);
int steps_send(struct transfer *w);
void steps_stop(struct transfer *w);

#endif
