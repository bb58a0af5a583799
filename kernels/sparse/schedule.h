/* When and where a sequence is attended sparsely: by layer, by step and by length. Pure functions on
 * plain data, for workers to ask at each layer of each step.
 *
 * A layer is dense, selects, or reuses: it attends the blocks that the last selecting layer before it
 * chose, and needs no digests. A selecting layer makes a choice every retrieval_stride steps; the
 * choice made with the query of step N serves from step N + lag on, until the next one does. So with
 * a lag of 1 and a stride of 2 it serves N + 1 and N + 2, and there is a step's time to bring blocks
 * up. The first choice of a sequence serves at once, since there is none before it. */
#ifndef UCM_KERNELS_SPARSE_SCHEDULE_H
#define UCM_KERNELS_SPARSE_SCHEDULE_H

#include "kernels/sparse/sparse.h"

#include <stdbool.h>
#include <stdint.h>

enum ucm_layer_mode {
    UCM_LAYER_DENSE = 0,
    UCM_LAYER_SELECT = 1,
    UCM_LAYER_REUSE = 2,
};

#define UCM_SCHEDULE_LAYERS_MAX 512
#define UCM_SCHEDULE_STEPS_MAX 1024 /* of stride and lag */

struct ucm_schedule {
    uint32_t layers;
    uint8_t mode[UCM_SCHEDULE_LAYERS_MAX]; /* enum ucm_layer_mode */
    uint32_t dense_below;                  /* tokens: shorter sequences are dense in every layer */
    uint32_t retrieval_stride;
    uint32_t lag;
    uint32_t rows; /* the queries of the last so many steps vote (KVStar); ucm_score_spec.rows */
    float beta;    /* what the model scales logits by; 0: 1 / sqrt(head_dim) */
};

/* 0; or -EINVAL, and why says which field is wrong. */
int ucm_schedule_check(const struct ucm_schedule *s, char why[UCM_SPARSE_WHY]);

/* What a layer does in a step. */
struct ucm_schedule_step {
    uint32_t mode;      /* enum ucm_layer_mode; the fields below are 0 where it is dense */
    bool choose;        /* it makes a choice with this step's queries */
    uint32_t rows;      /* of them, so many steps' */
    uint32_t layer;     /* whose choice is attended */
    uint64_t chosen_at; /* the step whose queries made it */
};

/* tokens: of the sequence. step: from 0 on, counted from the first at which tokens reached
 * dense_below. A schedule that ucm_schedule_check accepts, and layer < layers. */
struct ucm_schedule_step ucm_schedule_step(const struct ucm_schedule *s, uint32_t layer,
                                           uint64_t step, uint64_t tokens);

/* Choices of one layer that are made and not yet replaced, at most: what a worker has room for. */
uint32_t ucm_schedule_choices(const struct ucm_schedule *s);

/* The first two layers dense and all others selecting, every 5 steps, without lag, from 4,096 tokens
 * on. */
void ucm_schedule_defaults(struct ucm_schedule *s, uint32_t layers);

/* The same with what is known of a model, by the name that it has on its hub or a part of it. 0;
 * -ENOTSUP: it attends in a way that block selection would change, and why says which; -ENOENT: the
 * name is not known, and why says so; -EINVAL: layers. */
int ucm_schedule_for_model(const char *model, uint32_t layers, struct ucm_schedule *s,
                           char why[UCM_SPARSE_WHY]);

#endif
