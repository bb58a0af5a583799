/* Transfers: load, dump, prefetch, gather, summary.build and sequence.append go through their
 * items, a part of a block each, in order, with a cursor. An item that is not in DRAM waits for its
 * read while later ones begin. The bytes under way are bounded, so that a transfer larger than the
 * arena flows through it. Without a slot a transfer waits until somebody releases one; if no
 * reference will be released, it gives up the rest.
 *
 *   begun -> [waits for its read] -> [read, waits for its kind] -> ended
 *
 * Its kind defines how an item begins and ends. Stopping (cancel, deadline, connection closed) ends
 * what is not with a device.
 *
 * Thread: the event loop only. */
#ifndef UCMD_REQUEST_TRANSFER_H
#define UCMD_REQUEST_TRANSFER_H

#include "daemon/cache/span.h"
#include "daemon/request/view.h"

struct transfer;
struct item_wait;

/* An item whose block is held, as it was when it was looked at. */
struct transfer_item {
    uint32_t at, part;
    block_ref ref;
    const struct part *p;
    const struct form *form; /* of the part */
};

/* Functions that may be NULL say what that means. */
struct transfer_kind {
    bool writes; /* its items are written, not read */
    bool brings; /* an item that is in DRAM is done */
    /* Opens blocks of keys from w->opened on; calls transfer_yield if some are left. NULL: all are
     * found at the start. */
    void (*open)(struct transfer *w);
    /* What an item counts as in an iteration of the event loop. NULL: one. */
    uint32_t (*weight)(const struct transfer *w, uint32_t at);
    /* Begins an item. 0: begun, or ended with its status set; -EBUSY: no slot now; -EAGAIN: a queue
     * is full; -EDQUOT: its tenant gets no slot before something of this transfer has ended. The
     * transfer tries again. Another -errno ends the item. */
    int (*begin)(struct transfer *w, const struct transfer_item *it);
    /* The read of an item has ended; with status 0 the transfer has a reference to its part, or
     * iw->w.layers. 1: it waits in w->ready now. 0: the item has ended; -errno: with the status
     * that this says. */
    int (*ready)(struct transfer *w, struct item_wait *iw, int status);
    /* Goes on with what waits in w->ready. 0, or as `begin` what that waits for. */
    int (*again)(struct transfer *w);
    /* Gives back what an item in w->ready has. NULL: nothing. */
    void (*drop)(struct transfer *w, struct item_wait *iw);
    /* There is no room for what has not begun. NULL: what waits in w->ready has its room. */
    void (*no_room)(struct transfer *w);
    /* Sends to devices what may go. -EAGAIN: a queue is full; 1: something is with a device, or
     * about to be; 0: nothing is. NULL: it sends nothing. */
    int (*send)(struct transfer *w);
    /* Gives up what has not reached a device. NULL: there is nothing. */
    void (*stop)(struct transfer *w);
    /* All items have ended, and so have their leases: calls transfer_end. Or sees to it that the
     * transfer is pumped again. */
    void (*finish)(struct transfer *w);
};

#define TRANSFER_PRIORITY_MAX 7 /* of the wire and of devices */

/* The first member of what a kind keeps. */
struct transfer {
    struct request r;
    const struct transfer_kind *kind;
    const struct request_modules *modules;
    struct view view;               /* where its blocks are */
    struct ns *ns;                  /* view.ns[0] */
    uint32_t n_keys, part, parts;   /* items = n_keys * parts */
    uint32_t opened;                /* keys whose block was looked for, or opened */
    uint32_t cursor;                /* the next item */
    uint32_t waits_n;               /* items that wait: for a read, in `ready`, or for their kind */
    uint64_t held_most, held_bytes; /* of slots under way */
    uint64_t bytes;                 /* copied, brought or built */
    uint64_t slot_wait_ns;          /* since when it waits for a slot; 0: it does not */
    uint8_t priority;
    bool stopping, pumping, finished;
    bool yielded;             /* begins no item before the next iteration of the event loop */
    bool awaits_read;         /* begins no item before its turn to read; in rq->readers */
    struct list waits, ready; /* struct item_wait */
    struct item_wait *spare;  /* the next item's, if it has to wait */
    struct cache_retry retry; /* for space, for the next iteration of the event loop, or to read */
    struct view_look *look;   /* while it waits for the shared tier, else NULL */
    block_ref *refs;          /* n_keys, leased; NULL: all items have ended */
    uint8_t *status;          /* n_keys: enum ucm_block_status */
};

struct item_wait {
    struct cache_wait w;
    struct list link;
    struct transfer *transfer;
    struct transfer_item it;
    uint64_t slot_bytes;  /* it counts as so many held bytes */
    bool large;           /* counted in rq->large_reads */
    enum span_kind span;  /* what it reads from */
    bool building, again; /* of summaries: again: what a tier had of it could not be read */
};

/* Zeroed memory of `bytes` that begin with a transfer, of all parts' first. NULL with
 * call->error. */
void *transfer_new(struct call *call, const struct transfer_kind *kind, const struct view *view,
                   uint32_t n_keys, uint64_t timeout_ms, size_t bytes);
/* Finds and leases the blocks of all keys. prefix: up to the first that is not found, and counts
 * them as a lookup does. Returns how many are missed for that they are not there. */
uint32_t transfer_find(struct transfer *w, const uint8_t *keys, bool prefix);
/* Starts all that can be started now. May end and free the transfer. */
void transfer_pump(struct transfer *w);
void transfer_stop_cb(struct request *r);
/* The rest waits for the next iteration of the event loop. */
void transfer_yield(struct transfer *w);
/* A key's status is the worst of its parts'. */
void transfer_status(struct transfer *w, uint32_t at, enum ucm_block_status status);
/* Ends a transfer whose items have ended: answers with *result, or if that is NULL with
 * msg_blocks_r, and frees the transfer. A caller with a result has told r.trace, if there is one,
 * how much was ok. */
void transfer_end(struct transfer *w, const void *result);

/* ---- for transfer_kind.begin ---- */

/* w->spare is there. 0 or -ENOMEM. */
int transfer_reserve(struct transfer *w);
/* A transfer with items under way lets those that wait for space go first. */
bool transfer_gives_way(const struct transfer *w, const struct transfer_item *it);
/* As cache_get of the item, which may wait then. */
int transfer_get(struct transfer *w, const struct transfer_item *it, int node);
/* The item waits by w->spare, whose cache_wait was taken. */
void transfer_wait(struct transfer *w, const struct transfer_item *it);
/* An item in w->ready is given up, or all of them. */
void transfer_drop(struct item_wait *iw, enum ucm_block_status status);
void transfer_drop_ready(struct transfer *w, enum ucm_block_status status);

bool transfer_large(const struct transfer *w);
/* Priority of the transfer's next read in the tier's queue: within one priority, transfers with few
 * reads under way go first. */
uint8_t read_priority(const struct transfer *w);

/* ---- a transfer that waits for the shared tier first ---- */

/* Asks the shared tier for keys that are not here, if there is one, and then runs begin_cb, now or
 * later; keys die with it. */
struct transfer_look {
    struct transfer *transfer;
    struct view_look look;
    void (*begin_cb)(struct transfer *w, const uint8_t *keys);
};
void transfer_look(struct transfer *w, struct transfer_look *l, struct proto_bin keys,
                   uint64_t wait_ms);

#endif
