/* ucmevents: publishes ucmd's cache events on ZeroMQ, as vLLM publishes those of its GPU memory
 * (vllm/distributed/kv_events.py): PUB with frames topic, sequence number, batch; a ROUTER for
 * subscribers that missed some. docs/events.md describes a batch.
 *
 * Promise: a subscriber's state is each block's tier, now or once the next batches have arrived.
 * After a gap (events lost, another daemon) everything is published again.
 * It is a process of its own, so that no fault of libzmq and no subscriber reaches the daemon.
 * Threads: one, besides libzmq's own. */
#ifndef UCM_EVENTS_EVENTS_H
#define UCM_EVENTS_EVENTS_H

#include "client/ctl/answer.h"
#include "client/ctl/program.h"

extern const struct program events_program;

/* ---- outlet.c: the sockets ---- */

struct outlet;

struct outlet_config {
    const char *endpoint, *replay; /* to bind; replay: "" for none */
    uint32_t steps;                /* batches that are kept for replay, at most, */
    uint64_t bytes;                /* and their bytes */
};
/* 0; or -1, and says why on standard error. */
int outlet_open(const struct outlet_config *config, struct outlet **out);
/* NULL-safe. Waits at most 1 s for messages to leave. */
void outlet_close(struct outlet *o);
/* Numbers a batch, sends it under each of `topics` (separated by commas) and keeps it. Never blocks: a subscriber that does not
 * read loses batches, and sees so by their numbers. -1: no memory. */
int outlet_send(struct outlet *o, const char *topics, const void *batch, size_t n);
/* Answers replay requests. True: there is a new subscriber since the last call. */
bool outlet_serve(struct outlet *o);

/* ---- batch.c: events as vLLM packs them ---- */

/* Keys as bytes, or as the number that vLLM makes of them. Events as maps, or as arrays, which older vLLM sends. */
struct batch_form {
    bool hash_bytes, arrays;
    uint32_t rank;
};

struct batch_block {
    const uint8_t *key;
    uint32_t key_bytes, block_tokens;
    const char *medium;
    bool has_metadata;
    /* Where it is. parent_bytes 0: it begins a sequence. lora: "" for none. */
    const uint8_t *parent, *tokens;
    uint32_t parent_bytes, n_tokens;
    const char *lora;
};

struct batch;

struct batch *batch_new(const struct batch_form *form); /* NULL: no memory */
void batch_free(struct batch *b);
/* A block that follows the one before goes into the same event. What `block` points to is copied. */
void batch_stored(struct batch *b, const struct batch_block *block);
void batch_removed(struct batch *b, const struct batch_block *block);
void batch_cleared(struct batch *b);
uint32_t batch_blocks(const struct batch *b); /* since the last end */
/* What was added, packed; the next call begins another one. NULL: nothing, or no memory (*failed). */
const void *batch_end(struct batch *b, size_t *n, bool *failed);

/* ---- listing.c: all blocks of a namespace, parents first ---- */

struct listing;
struct listing *listing_new(void); /* NULL: no memory */
void listing_free(struct listing *l);
/* A copy of what an answer of events.list says of a block. -1: no memory. */
int listing_add(struct listing *l, const msgpack_object *block, const struct batch_block *common,
                const char *const media[4]);
/* each_cb gets every block once, one whose parent is in the list after it. False from it ends the walk. */
void listing_walk(struct listing *l, bool (*each_cb)(void *ctx, const struct batch_block *block),
                  void *ctx);

/* A block of an event or of a list: its key and metadata point into `o`. lora: where a text of it may be written. */
#define LORA_BYTES 257
void block_read(const msgpack_object *o, struct batch_block *block, char lora[LORA_BYTES]);

/* ---- publish.c ---- */

int cmd_publish(const struct args *a);

#endif
