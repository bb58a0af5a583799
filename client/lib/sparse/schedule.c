#include "kernels/sparse/schedule.h"

#include "client/lib/sparse/internal.h"

#include <errno.h>
#include <string.h>

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a " must equal " #b)
SAME(UCM_SPARSE_LAYER_DENSE, UCM_LAYER_DENSE);
SAME(UCM_SPARSE_LAYER_SELECT, UCM_LAYER_SELECT);
SAME(UCM_SPARSE_LAYER_REUSE, UCM_LAYER_REUSE);
SAME(UCM_SPARSE_LAYERS_MAX, UCM_SCHEDULE_LAYERS_MAX);

static void to_user(const struct ucm_schedule *s, struct ucm_sparse_schedule *out)
{
    *out = (struct ucm_sparse_schedule){
        .layers = s->layers,
        .dense_below = s->dense_below,
        .retrieval_stride = s->retrieval_stride,
        .lag = s->lag,
        .rows = s->rows,
        .beta = s->beta,
    };
    memcpy(out->mode, s->mode, sizeof out->mode);
}

static int from_user(const struct ucm_sparse_schedule *s, struct ucm_schedule *out)
{
    char why[UCM_SPARSE_WHY];

    *out = (struct ucm_schedule){
        .layers = s->layers,
        .dense_below = s->dense_below,
        .retrieval_stride = s->retrieval_stride,
        .lag = s->lag,
        .rows = s->rows,
        .beta = s->beta,
    };
    memcpy(out->mode, s->mode, sizeof out->mode);
    return ucm_schedule_check(out, why) ? client_fail(UCM_EINVALID, "%s", why) : 0;
}

int ucm_sparse_schedule_defaults(uint32_t layers, struct ucm_sparse_schedule *out)
{
    struct ucm_schedule s;
    char why[UCM_SPARSE_WHY];

    if (!out)
        return client_fail(UCM_EINVALID, "out is NULL");
    ucm_schedule_defaults(&s, layers);
    if (ucm_schedule_check(&s, why) != 0)
        return client_fail(UCM_EINVALID, "%s", why);
    to_user(&s, out);
    return 0;
}

int ucm_sparse_schedule_for_model(const char *model, uint32_t layers,
                                  struct ucm_sparse_schedule *out)
{
    char why[UCM_SPARSE_WHY];
    struct ucm_schedule s;
    int r;

    if (!model || !out)
        return client_fail(UCM_EINVALID, "model or out is NULL");
    r = ucm_schedule_for_model(model, layers, &s, why);
    if (r)
        return client_fail(r == -ENOENT    ? UCM_ENOTFOUND
                           : r == -ENOTSUP ? UCM_EUNSUPPORTED
                                           : UCM_EINVALID,
                           "%s", why);
    to_user(&s, out);
    return 0;
}

int ucm_sparse_schedule_step(const struct ucm_sparse_schedule *schedule, uint32_t layer,
                             uint64_t step, uint64_t tokens, struct ucm_sparse_step *out)
{
    struct ucm_schedule_step at;
    struct ucm_schedule s;
    int r;

    if (!schedule || !out)
        return client_fail(UCM_EINVALID, "schedule or out is NULL");
    r = from_user(schedule, &s);
    if (r)
        return r;
    if (layer >= s.layers)
        return client_fail(UCM_EINVALID, "layer is %u of %u", layer, s.layers);
    at = ucm_schedule_step(&s, layer, step, tokens);
    *out = (struct ucm_sparse_step){at.mode, at.choose, at.rows, at.layer, at.chosen_at};
    return 0;
}

int ucm_sparse_schedule_choices(const struct ucm_sparse_schedule *schedule, uint32_t *choices)
{
    struct ucm_schedule s;
    int r;

    if (!schedule || !choices)
        return client_fail(UCM_EINVALID, "schedule or choices is NULL");
    r = from_user(schedule, &s);
    if (r == 0)
        *choices = ucm_schedule_choices(&s);
    return r;
}
