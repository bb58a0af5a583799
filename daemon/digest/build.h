/* What is made of one part, layer by layer: its digest, of its coded form too, its coded form, or of that the
 * plain one. Threads of the pool compute.
 * Thread: the loop. */
#ifndef UCMD_DIGEST_BUILD_H
#define UCMD_DIGEST_BUILD_H

#include "daemon/digest/pool.h"
#include "kernels/encoding/encoding.h"
#include "kernels/sparse/sparse.h"

struct part_build {
    struct digest_job job;                /* job.done_cb is the caller's */
    const struct ucm_digest_plan *digest; /* NULL: the coded form is made */
    const struct ucm_encoding_spec *encoding;
    bool decode; /* `from` is the coded form, and the plain one is made */
    uint8_t *
        scratch; /* with a digest: NULL, or a plain shard's bytes: `from` is the coded form, whose layers
                       * are decoded one after the other */
    const uint8_t *from; /* the part: shards of from_bytes */
    uint8_t *to;         /* shards of to_bytes */
    uint64_t from_bytes, to_bytes;
    uint32_t shards;
    /* The pool's. */
    uint32_t piece_shards, ended; /* ended: pieces of those that come one after the other */
    atomic_bool unfit;            /* out: the encoding could not hold some shard */
    atomic_ullong ns;             /* out: CPU time of threads */
};

/* The caller fills in all but the pool's, and leaves it alone until done_cb. */
void part_build_submit(struct digest_pool *pool, struct part_build *b);

#endif
