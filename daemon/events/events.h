/* Cache events: the changes of each tenant's blocks in order, and the blocks' metadata.
 * docs/events.md describes their use.
 *
 * A tenant with a reader has a ring of its latest events, numbered from 1 on. A reader keeps a
 * number and asks for later events. The daemon keeps no state of readers but those that wait. A
 * slow reader costs nothing: it loses the events that the ring overwrote, and detects the gap by
 * the numbers.
 *
 * Block metadata (a block's parent and tokens) comes from engines, before the block or after it. It
 * stays while the block is in some tier. If memory runs out, the tenant's oldest goes first.
 *
 * All of it together takes `memory` bytes at most, shared by tenants by the rule of limit.h.
 * Thread: the event loop only. */
#ifndef UCMD_EVENTS_EVENTS_H
#define UCMD_EVENTS_EVENTS_H

#include "daemon/base/limit.h"
#include "daemon/index/index.h"
#include "proto/messages.h"
#include "proto/metrics/metrics.h"

struct events;

/* was, is: enum ucm_lookup_status of the block before and after. Both alike: its metadata came
 * later than the block. */
struct event {
    uint32_t ns;
    uint8_t was, is;
    uint8_t key[UCM_MAX_KEY_BYTES];
};

/* One tenant's. */
struct tenant_events {
    struct list link;
    struct tenant *tenant; /* which it refers to */
    struct limit_owner *owner;
    struct event *ring; /* of cap, a power of two */
    /* last: the number of the latest event; began: of none, the one before the ring's first. */
    uint64_t cap, began, last;
    uint32_t waiting;     /* waiting calls, for the request module */
    uint64_t used_ms;     /* the last call */
    struct list metadata; /* struct metadata, the oldest first */
};

/* memory: at least CONFIG_EVENTS_MIN. wake_cb: a tenant with a waiting reader has an event. It runs
 * inside the call that changed the block, once until events_awake. Everything else is borrowed. 0
 * or -errno. */
struct events_config {
    uint64_t memory;
    struct limits *limits;
    struct tenant_set *tenants;
    struct metrics *metrics;
    void (*wake_cb)(void *ctx);
    void *ctx;
};
int events_new(const struct events_config *config, struct events **out);
void events_free(struct events *es); /* NULL-safe; nobody may wait */
void events_awake(struct events *es);

/* Keeps the tenant's events from now on. If need be, drops those of tenants without a reader for an
 * hour. 0, or -code with *e: BUSY, NO_MEMORY. */
int events_open(struct events *es, const char *tenant, uint64_t now_ms, struct tenant_events **out,
                struct ucm_error *e);

/* For the cache: a block of a tenant that has events. */
void events_changed(struct events *es, const struct ns *ns, const uint8_t *key, uint8_t was,
                    uint8_t is);

/* The number of the oldest event that is still there; last + 1: none is. */
static inline uint64_t events_first(const struct tenant_events *te)
{
    return te->last - te->began > te->cap ? te->last - te->cap + 1 : te->began + 1;
}
static inline const struct event *events_at(const struct tenant_events *te, uint64_t number)
{
    return &te->ring[number & (te->cap - 1)];
}

/* What a block stands for. Views. parent: the key before it; empty: it begins a sequence. tokens:
 * u32 each, little-endian. */
struct block_metadata {
    struct proto_bin parent, tokens;
    struct proto_str lora;
};
/* Keeps a copy, in place of an earlier one. is: the block's status now; with one that is found, and
 * had no metadata before, it is an event. False: there is no memory for it, which is
 * counted. */
bool events_metadata_set(struct events *es, struct tenant_events *te, const struct ns *ns,
                         const uint8_t *key, uint8_t is, const struct block_metadata *d);
/* The views hold until the next call that changes something. */
bool events_metadata_get(const struct events *es, const struct tenant_events *te, uint32_t ns,
                         const uint8_t *key, struct block_metadata *out);

#endif
