/* Shared by the transfer files only. */
#ifndef UCMD_REQUEST_TRANSFER_H
#define UCMD_REQUEST_TRANSFER_H

#include "daemon/cache/span.h"
#include "daemon/request/view.h"

/* FETCH: a load of single shards, see transfer_fetch.c. BUILD: digest.build. HOLD: chain.append, whose chain
 * takes the uses of what comes to DRAM. The namespace of these two is the digests', and their items come from
 * a tier or from a build. */
enum transfer_kind {
    TRANSFER_LOAD,
    TRANSFER_FETCH,
    TRANSFER_DUMP,
    TRANSFER_PREFETCH,
    TRANSFER_BUILD,
    TRANSFER_HOLD,
};

/* One item of a fetch request. */
struct fetch_piece {
    uint32_t index, shard, slot; /* as the client named them */
    uint32_t place;              /* in the request */
};

struct transfer {
    struct request r;
    enum transfer_kind kind;
    struct ns *ns;
    struct view view;              /* where its blocks are; view.ns[0] is ns */
    struct view_look look;         /* with `lookup` */
    struct registered *region;     /* of load, dump and fetch */
    uint32_t n_keys, part, parts;  /* items = n_keys * parts; these three have one part */
    uint32_t shard, shards;
    uint32_t opened; /* keys whose block was looked for, or opened: items up to there */
    uint32_t cursor, jobs, waits_n; /* waits_n: in waits, ready and durables */
    uint64_t window_bytes, in_window, bytes;
    uint64_t slot_wait_ns; /* since when it waits for a slot; 0: it does not */
    uint32_t slot_wait_at; /* cursor at that time */
    uint8_t slowest;       /* enum metric_tier that a part of a load came from */
    uint8_t priority;
    enum device_beside beside; /* of load, dump and fetch */
    bool stopping, pumping, finished;
    bool most;        /* a slot would not help: its tenant gets no more, or a queue is full */
    bool no_slot;     /* in this pump its next item found no slot */
    bool yielded;     /* begins no item before the next turn of the loop */
    bool awaits_read; /* begins no item before its turn to read; in rq->readers */
    bool has_event;   /* a dump that waits for it */
    bool marks;       /* a prefetch whose blocks are marked, to count what came of them */
    bool durable;     /* a dump that waits for stable storage */
    uint8_t event[UCM_MAX_HANDLE_BYTES];
    uint32_t lease;
    struct copy_batch *open[2];          /* filling up; of blocks that go straight, of coded ones */
    struct shared_lookup *lookup;        /* while it waits for the shared tier, else NULL */
    struct steps *steps;                 /* a load that goes layer by layer, else NULL */
    const struct ucm_rope_angle **turns; /* a load: n_keys tables, NULL where K stays; NULL: all */
    struct list waits;                   /* struct item_wait: waiting for a read */
    struct list ready;            /* struct item_wait: read, and waiting for a place in a batch */
    struct list durables;         /* struct durable_wait: waiting for stable storage */
    struct item_wait *spare;      /* the next item's, if it has to wait */
    struct cache_retry retry;     /* for space, for the next turn of the loop, or to read */
    struct cache_retry pressure;  /* a dump whose answer is held back */
    struct deadline pressure_end; /* for so long at most */
    bool released, slowed;
    bool prefix; /* LOAD: of the keys up to the first that is not found */
    /* n_keys each, in one allocation behind the struct */
    block_ref *refs;
    uint32_t *blocks;
    uint8_t *status;
    uint8_t *keys; /* of those whose blocks are opened in turns of the loop */
    /* BUILD, HOLD: blocks[i] is the base's block of a key, leased by the transfer or by the chain. */
    struct derived_space *space;
    bool build; /* digests that are nowhere are built */
    struct chain *chain;
    uint32_t chain_first, built; /* built: digests */
    uint8_t *found;              /* HOLD: enum ucm_lookup_status of each key */
    /* FETCH: a key is a block, whose pieces follow one another from blocks[i] on. */
    struct fetch_piece *pieces;
    uint32_t n_pieces;
};

struct item_wait {
    struct cache_wait w;
    struct list link;
    struct transfer *t;
    uint32_t item;
    bool large;           /* counted in rq->large_reads */
    enum trace_kind span; /* what it reads from */
    bool building, again; /* again: what a tier had of it could not be read */
};

/* Outlives its transfer when that is stopped; then t is NULL. */
struct durable_wait {
    struct cache_durable d;
    struct list link;
    struct transfer *t;
    uint32_t item;
    enum ucm_block_status status; /* once it is durable */
};

struct copy_batch {
    struct device_job
        job; /* items: an item of the transfer is one copy, of a fetch one for each piece */
    struct transfer *t;
    const struct form *form;             /* of what its slots hold, all alike */
    uint32_t n;                          /* items of the transfer */
    uint32_t *item;                      /* which they are */
    struct cache_fill **fill;            /* dump; NULL: it has ended */
    struct cache_shards **shards;        /* fetch: what was read of the part; NULL: the part */
    const struct ucm_rope_angle **turns; /* of copies, with t->turns */
    atomic_uchar *unfit;                 /* of copies; NULL: the encoding holds any bytes */
    uint64_t *slot;                      /* with unfit: of each item, as in its copy */
    /* Of a load in steps. */
    struct list link;         /* in steps->batches while a step of it is to be sent */
    uint32_t next_step, jobs; /* jobs: under way */
    enum ucm_block_status status;
};

static inline struct cache *cache_of(const struct transfer *t)
{
    return t->r.s->rq->rooms.cache;
}

static inline struct metrics *metrics_of(const struct transfer *t)
{
    return t->r.s->rq->rooms.metrics;
}

static inline uint32_t items_of(const struct transfer *t)
{
    return t->n_keys * t->parts;
}

static inline uint32_t item_key(const struct transfer *t, uint32_t item)
{
    return item / t->parts;
}

static inline uint32_t item_part(const struct transfer *t, uint32_t item)
{
    return t->part + item % t->parts;
}

/* It copies out of slots. */
static inline bool transfer_loads(const struct transfer *t)
{
    return t->kind == TRANSFER_LOAD || t->kind == TRANSFER_FETCH;
}

/* Copies that the item takes: of a fetch, one for each piece. */
static inline uint32_t item_copies(const struct transfer *t, uint32_t item)
{
    if (t->kind != TRANSFER_FETCH)
        return 1;
    return (item + 1 < t->n_keys ? t->blocks[item + 1] : t->n_pieces) - t->blocks[item];
}

/* The node where its slots should lie. */
static inline int node_of(const struct transfer *t)
{
    return t->region ? t->region->region->device->node : NUMA_NONE;
}

/* The namespace of the item's block, which was found or opened and is held. */
static inline struct ns *item_ns(const struct transfer *t, uint32_t item)
{
    return view_ns(&t->view, index_block(t->r.s->rq->rooms.index, t->refs[item_key(t, item)]));
}

static inline const struct form *item_form(const struct transfer *t, uint32_t item)
{
    return ns_form(item_ns(t, item), item_part(t, item));
}

/* How its copy goes: of a load, dump or fetch. */
static inline enum copy_way item_way(const struct transfer *t, uint32_t item)
{
    return region_way(t->region->region, item_form(t, item));
}

static inline uint64_t item_bytes(const struct transfer *t, uint32_t item)
{
    return ns_part_bytes(item_ns(t, item), item_part(t, item));
}

/* What an item takes of the window: its slot. */
static inline uint64_t item_slot_bytes(const struct transfer *t, uint32_t item)
{
    return arena_padded(item_bytes(t, item));
}

static inline bool batch_is_open(const struct transfer *t)
{
    return t->open[false] || t->open[true];
}

/* A key's status is the worst of its parts'. */
void item_status(struct transfer *t, uint32_t item, enum ucm_block_status status);

/* transfer_methods.c: NULL with call->error. `more` bytes, a multiple of 8, lie right behind the struct. */
struct transfer *transfer_new(struct call *call, enum transfer_kind kind, const struct view *view,
                              uint32_t n_keys, uint64_t deadline_ms, size_t more);
/* Refuses numbers that come twice: of n that are `step` u32s apart, `what` each, one for each `of`. 0 or -code
 * with call->error. */
int numbers_distinct(struct call *call, const uint32_t *numbers, uint32_t n, uint32_t step,
                     const char *what, const char *of);
/* Finds and holds the blocks of a load, a prefetch or a fetch. */
void blocks_find(struct transfer *t, const uint8_t *keys);
/* transfer.c: starts all that can be started now. May end and free the transfer. */
void transfer_pump(struct transfer *t);
void transfer_stop_cb(struct request *r);
void transfer_retry_cb(struct cache_retry *r);
/* The rest of the opening waits for the next turn of the loop. */
void transfer_yield(struct transfer *t);

/* transfer_reads.c: whose reads and copies go first. */
bool transfer_large(const struct transfer *t);
/* Of the transfer's next read in the tier's queue: of one priority, those go first that have few
 * reads under way. */
uint8_t read_priority(const struct transfer *t);
/* Of its jobs in the device's queue: a device cuts jobs into pieces, and begins none of a large
 * transfer's while a small one waits. */
uint8_t copy_priority(const struct transfer *t);
/* True: the transfer's next item needs a read, which may not begin now. The transfer waits in the
 * queue for its turn, then retry_cb runs. */
bool read_waits(struct transfer *t);
/* Call when a pump has ended: the next transfer in that queue gets its turn if a read may begin. */
void reader_wake(struct requests *rq);
void read_begun(struct item_wait *iw);
void read_ended(const struct item_wait *iw);

/* transfer_copy.c */
/* Begins item `item`. 0: begun or ended with its status set; -EBUSY: no slot, or no place in a batch, now;
 * -EDQUOT: no slot of its tenant's before something of this transfer has ended. */
int item_begin(struct transfer *t, uint32_t item);
/* Puts items that were read into open batches. False: one is full and the device takes no job. */
bool ready_take(struct transfer *t);
/* t->spare is there. 0 or -ENOMEM. */
int wait_reserve(struct transfer *t);
/* The item waits by t->spare, whose cache_wait was taken. */
void item_waits(struct transfer *t, uint32_t item);
/* Who has something under way lets those who wait for space go first. */
bool slot_waits(const struct transfer *t, uint32_t item);
/* Ends what was read and waits for a place in a batch; of digests what is to be built in place of its read. */
void ready_abandon(struct transfer *t, enum ucm_block_status status);
/* The same, and what waits for a read, as CANCELLED. */
void waits_abandon(struct transfer *t);
/* Submits a job of the batch's items. False: the device's queue is full. */
bool job_submit(struct copy_batch *b, struct device_job *job,
                void (*done_cb)(struct device_job *job, int status));
/* Sends the open batch of that form as a device job. False: the device's queue is full; it stays open. */
bool batch_send(struct transfer *t, bool coded);
void batch_free(struct copy_batch *b);
/* The item's block must be held. */
bool item_in_dram(const struct transfer *t, uint32_t item);
/* The item is in DRAM: it gets `status` once its part is on stable storage. */
void item_durable(struct transfer *t, uint32_t item, enum ucm_block_status status);
/* Ends the item as NOT_DURABLE; the write goes on. */
void durable_abandon(struct durable_wait *dw);
/* Gives up what is in open batches. */
void batch_abandon(struct transfer *t);
/* Ends all its items, and frees it. */
void batch_end(struct copy_batch *b, enum ucm_block_status status);
/* Of a job that has ended: what it got of the bus. */
void job_count(struct transfer *t, const struct device_job *job);
/* What a job's end means for its items; counts errors. */
enum ucm_block_status batch_outcome(struct transfer *t, int status);

/* transfer_fetch.c */
/* As cache_get, of an item of a fetch. */
int fetch_get(struct transfer *t, uint32_t item, struct cache_wait *w);
/* Adds the copies of an item out of that span of its part. 0, or -EINVAL: none was added. */
int fetch_copies(const struct transfer *t, uint32_t item, const struct span *span,
                 struct device_job *job);
/* Answers, and frees the transfer. */
void fetch_finish(struct transfer *t);

/* transfer_digest.c */
/* Asks the shared tier for bases and digests of t->keys, if there is one, then pumps. */
void digests_look(struct transfer *t);
/* Opens some more blocks of a BUILD or a HOLD. */
void digests_open(struct transfer *t);
/* Begins an item of theirs, for which t->spare is there. As item_begin. */
int digest_begin(struct transfer *t, uint32_t item);
/* The item's read or build ended. True: iw goes on. */
bool digest_ended(struct item_wait *iw, int status);
/* Begins items anew that could not be read. False: there is no room now, with t->most if it is the tenant's. */
bool digests_again(struct transfer *t);

/* transfer_turns.c: a load whose K turns. */
/* Checks what a load of n keys says. 0 with *memory, the bytes that its tables take (0: it says nothing);
 * or -code with call->error. */
int turns_check(struct call *call, const struct registered *region, struct proto_u32s turns,
                uint32_t n_keys, size_t *memory);
/* Fills in zeroed memory of so many bytes, as t->turns. */
void turns_init(struct transfer *t, struct proto_u32s turns, void *memory);

/* transfer_steps.c: a load that goes layer by layer and reports progress. */
/* Bytes that the steps of a load take. */
size_t steps_memory(uint32_t step, uint32_t shards);
/* Sets up zeroed memory of steps_memory bytes as t->steps. */
void steps_init(struct transfer *t, void *memory, uint32_t step);
/* Shards in one step. */
uint32_t steps_shards(const struct transfer *t);
/* Closes the open batch of that form; steps_pump sends its steps. */
void steps_add(struct transfer *t, bool coded);
/* Sends what may go now. False: the device's queue is full, and no job of this load is under way. */
bool steps_pump(struct transfer *t);
/* Reports the steps that have landed since the last report. */
void steps_report(struct transfer *t);
/* Whether every step of every closed batch was sent. */
bool steps_sent(const struct transfer *t);
/* Gives up what was not sent. */
void steps_abandon(struct transfer *t);

#endif
