/* Requests of inference, as a cache sees them: each a chain of block ids, the prefix first. From a
 * trace in Mooncake's format (one JSON object a line: timestamp, hash_ids) or in that of `ucm-bench
 * record`, which is the same with further lines (docs/capacity.md); or generated: many
 * conversations that share a few system prompts and grow turn by turn.
 *
 * Promise: the same file, or the same shape and seed, gives the same requests everywhere; a line
 * that is no request is refused with its number. Threads: a workload belongs to one thread. */
#ifndef UCM_BENCH_WORKLOAD_H
#define UCM_BENCH_WORKLOAD_H

#include <stddef.h>
#include <stdint.h>

#define WORKLOAD_MAX_BLOCKS 16384 /* of one request */
#define WORKLOAD_KEY_BYTES 32

struct workload_request {
    uint64_t timestamp_ms;
    uint32_t n_ids;
    const uint64_t *ids; /* valid until the next call */
};

struct workload_shape {
    uint32_t conversations; /* going on at once, 1 to 65536 */
    uint32_t turns;         /* of each, then another takes its place; at least 1 */
    uint32_t prompts;       /* different system prompts; at least 1 */
    uint32_t prompt_blocks; /* blocks of each */
    uint32_t turn_blocks;   /* blocks that a turn adds, on average; at least 1 */
    uint64_t seed;
};

/* prompt_blocks + turns * 2 * turn_blocks must stay within WORKLOAD_MAX_BLOCKS. */
extern const struct workload_shape workload_default;

struct workload;
struct workload_error {
    char text[256];
};

/* 0 or -errno with *e filled; free with workload_free. */
int workload_trace(const char *path, struct workload **out, struct workload_error *e);
/* Endless. 0, -EINVAL or -ENOMEM with *e filled. */
int workload_generate(const struct workload_shape *shape, struct workload **out,
                      struct workload_error *e);
void workload_free(struct workload *w); /* NULL-safe */

/* 1 and *out; 0 at the end; -errno with *e filled. */
int workload_next(struct workload *w, struct workload_request *out, struct workload_error *e);

/* The key of a block: SHA-256 of its id, 8 bytes little-endian. */
void workload_key(uint64_t id, uint8_t key[WORKLOAD_KEY_BYTES]);
/* n keys, one after the other. */
void workload_keys(const uint64_t *ids, uint32_t n, uint8_t *keys);

/* A small generator with its state in *state (any value): for choices that must repeat. */
uint64_t workload_random(uint64_t *state);

#endif
