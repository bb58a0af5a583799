#include "daemon/retrieval/part_build.h"

#include <errno.h>

#define PIECE_BYTES (256u << 10) /* of KV, so that selections overtake builds */
#define SLOW_BYTES (1u << 20)    /* of one layer, which is a piece at least */

static const uint8_t *layer_decode(const struct ucm_encoding_spec *spec, const uint8_t *encoded,
                                   uint8_t *to)
{
    uint8_t *raw = to;

    for (uint32_t i = 0; i < spec->n_tensors; i++) {
        ucm_decode(spec, i, encoded, raw);
        encoded += ucm_encoding_bytes(spec, i);
        raw += ucm_encoding_raw_bytes(spec, i);
    }
    return to;
}

static void layer_make(struct part_build *b, const uint8_t *from, uint8_t *to)
{
    const struct codec *decodes = b->from_form->codec;

    if (b->summary)
        ucm_summary_build(b->summary,
                          decodes ? layer_decode(&decodes->spec, from, b->scratch) : from, to);
    else
        (void)layer_decode(&decodes->spec, from, to);
}

static void run_cb(struct summary_job *job, uint32_t piece, unsigned thread)
{
    struct part_build *b = LIST_ENTRY(job, struct part_build, job);
    uint32_t first = (b->ended + piece) * b->piece_layers, end = first + b->piece_layers;

    (void)thread;
    for (uint32_t layer = first; layer < end && layer < b->from_form->layers; layer++)
        layer_make(b, b->from.origin + layer * b->from_form->layer_bytes,
                   b->to.origin + layer * b->to_form->layer_bytes);
}

static uint32_t pieces_of(const struct part_build *b)
{
    return (b->from_form->layers + b->piece_layers - 1) / b->piece_layers;
}

/* There is one scratch. */
static uint32_t next_piece_cb(struct summary_job *job)
{
    struct part_build *b = LIST_ENTRY(job, struct part_build, job);

    return ++b->ended < pieces_of(b);
}

/* A summary describes KV as it was computed. */
static bool summary_fits(const struct ucm_summary_plan *plan, const struct form *from,
                         const struct form *to)
{
    return form_exact(from) && !to->codec && to->layer_bytes == plan->bytes &&
           ucm_summary_extent(&plan->spec) <= form_raw_layer_bytes(from);
}

int part_build_init(struct part_build *b, const struct ucm_summary_plan *summary,
                    const struct form *from, const struct form *to)
{
    bool decodes = from->codec && !to->codec && form_raw_layer_bytes(from) == to->layer_bytes;

    if (from->layers != to->layers || !(summary ? summary_fits(summary, from, to) : decodes))
        return -EINVAL;
    b->summary = summary;
    b->from_form = from;
    b->to_form = to;
    return 0;
}

uint64_t part_build_scratch(const struct part_build *b)
{
    return b->summary && b->from_form->codec ? b->from_form->codec->raw_layer_bytes : 0;
}

static bool whole(const struct span *span, const struct form *form)
{
    return span->form == form && span->first == 0 && span->n == form->layers;
}

int part_build_submit(struct summary_pool *pool, struct part_build *b, const struct span *from,
                      const struct span *to)
{
    uint64_t from_bytes = b->from_form->layer_bytes;

    if (!whole(from, b->from_form) || !whole(to, b->to_form) || from->pending || !to->pending ||
        !b->scratch != (part_build_scratch(b) == 0))
        return -EINVAL;
    b->from = *from;
    b->to = *to;
    b->ended = 0;
    b->piece_layers = from_bytes < PIECE_BYTES ? (uint32_t)(PIECE_BYTES / from_bytes) : 1;
    b->job.run_cb = run_cb;
    b->job.phase_cb = b->scratch ? next_piece_cb : NULL;
    b->job.queue = NULL;
    b->job.slow = from_bytes > SLOW_BYTES;
    summary_pool_submit(pool, &b->job, b->scratch ? 1 : pieces_of(b));
    return 0;
}
