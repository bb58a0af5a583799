/* Converts the public structs to those of kernels/sparse, for libucmclient and
 * libucmclient_cuda. */
#ifndef UCM_CLIENT_SPARSE_SPEC_H
#define UCM_CLIENT_SPARSE_SPEC_H

#include "client/include/ucmclient_sparse.h"
#include "kernels/sparse/select.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Checks only that `keep` can be copied; ucm_summary_check checks the rest. False with why. */
static inline bool sparse_spec(const struct ucm_sparse_summary *d, struct ucm_summary_spec *out,
                               char why[UCM_SPARSE_WHY])
{
    const struct ucm_sparse_shape *s = &d->shape;

    *out = (struct ucm_summary_spec){
        .method = d->method,
        .kind = d->kind,
        .run = d->run,
        .pairs = d->pairs,
        .keep_bytes = d->keep_bytes,
        .bits = d->bits,
        .rope_bits = d->rope_bits,
        .seed = d->seed,
        .chosen = d->chosen,
        .rest = d->rest,
        .shape = {s->dtype, s->tokens, s->kv_heads, s->head_dim, s->v_head_dim, s->rope_dim,
                  s->k_offset, s->k_token_stride, s->k_head_stride, s->v_offset, s->v_token_stride,
                  s->v_head_stride},
    };
    if (d->keep_bytes > sizeof(out->keep) || (d->keep_bytes > 0 && !d->keep)) {
        snprintf(why, UCM_SPARSE_WHY, "keep_bytes is %u, at most %zu%s", d->keep_bytes,
                 sizeof(out->keep), d->keep ? "" : ", and keep is NULL");
        return false;
    }
    if (d->keep_bytes > 0)
        memcpy(out->keep, d->keep, d->keep_bytes);
    return true;
}

static inline struct ucm_score_spec sparse_score_spec(const struct ucm_sparse_score *s)
{
    return (struct ucm_score_spec){
        .metric = s->metric,
        .reduce = s->reduce,
        .heads = s->heads,
        .rows = s->rows ? s->rows : 1,
        .q_heads = s->q_heads,
        .beta = s->beta,
    };
}

/* Without block_tokens; ucm_choose_for fills it in. */
static inline struct ucm_choose_spec sparse_choose_spec(const struct ucm_sparse_choose *c)
{
    return (struct ucm_choose_spec){
        .policy = c->policy,
        .topk_tokens = c->topk_tokens,
        .min_blocks = c->min_blocks,
        .sink_blocks = c->sink_blocks,
        .recent_blocks = c->recent_blocks,
        .limit = c->limit,
        .beta = (float)c->beta_m,
        .sparse_ratio = c->sparse_ratio,
        .eps = c->eps,
    };
}

#endif
