/* What is made of one part, layer by layer: its summary, of its encoded form too; or of that the
 * raw one.
 * Threads of the pool compute.
 * Thread: the event loop. */
#ifndef UCMD_RETRIEVAL_PART_BUILD_H
#define UCMD_RETRIEVAL_PART_BUILD_H

#include "daemon/base/span.h"
#include "daemon/retrieval/pool.h"
#include "kernels/sparse/sparse.h"

struct part_build {
    struct summary_job job;                 /* job.done_cb is the caller's */
    const struct ucm_summary_plan *summary; /* NULL: the raw form is made */
    const struct form *from_form, *to_form;
    uint8_t *scratch; /* the caller's, of part_build_scratch bytes */
    struct span from, to;
    /* The pool's. */
    uint32_t piece_layers, ended; /* ended: pieces of those that come one after the other */
};

/* On zeroed memory. Plan (or NULL) and forms live until the build is done. 0; -EINVAL: parts of the
 * second form can't be made of parts of the first: other sizes, an encoding that loses something,
 * or none. */
int part_build_init(struct part_build *b, const struct ucm_summary_plan *summary,
                    const struct form *from, const struct form *to);
/* What it needs of memory: for a summary of an encoded part, whose layers are decoded one after the
 * other. */
uint64_t part_build_scratch(const struct part_build *b);
/* From one whole part into another, of these forms. The caller has set scratch and done_cb, and
 * leaves b alone until done_cb. 0; -EINVAL: the spans are others. */
int part_build_submit(struct summary_pool *pool, struct part_build *b, const struct span *from,
                      const struct span *to);

#endif
