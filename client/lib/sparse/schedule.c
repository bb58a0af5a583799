/* Which layers attend sparsely in which steps: what ucmclient_sparse.h says of schedules. */
#include "client/lib/sparse/internal.h"
#include "kernels/sparse/arith.h"
#include "kernels/sparse/select.h"

#include <string.h>
#include <strings.h>

#define STEPS_MAX 1024 /* of stride and lag */

static int check_layers(const struct ucm_sparse_schedule *s)
{
    bool selects = false;

    if (s->layers < 1 || s->layers > UCM_SPARSE_LAYERS_MAX)
        return client_fail(UCM_EINVALID, "layers is %u; 1 to %u are allowed", s->layers,
                           (unsigned)UCM_SPARSE_LAYERS_MAX);
    for (uint32_t l = 0; l < s->layers; l++) {
        if (s->mode[l] > UCM_SPARSE_LAYER_REUSE)
            return client_fail(UCM_EINVALID,
                               "mode %u of layer %u is none of 0 (dense), 1 (select), 2 (reuse)",
                               s->mode[l], l);
        if (s->mode[l] == UCM_SPARSE_LAYER_REUSE && !selects)
            return client_fail(UCM_EINVALID,
                               "layer %u reuses a choice, and no layer before it selects", l);
        selects |= s->mode[l] == UCM_SPARSE_LAYER_SELECT;
    }
    return 0;
}

static int check(const struct ucm_sparse_schedule *s)
{
    if (s->retrieval_stride < 1 || s->retrieval_stride > STEPS_MAX)
        return client_fail(UCM_EINVALID, "retrieval_stride is %u; 1 to %u are allowed",
                           s->retrieval_stride, STEPS_MAX);
    if (s->lag > STEPS_MAX)
        return client_fail(UCM_EINVALID, "lag is %u; at most %u are allowed", s->lag, STEPS_MAX);
    if (s->rows < 1 || s->rows > UCM_SCORE_ROWS_MAX)
        return client_fail(UCM_EINVALID, "rows is %u; 1 to %u are allowed", s->rows,
                           UCM_SCORE_ROWS_MAX);
    if (!(s->beta >= 0) || ucm_not_finite(s->beta))
        return client_fail(UCM_EINVALID, "beta is %g; it must be finite and not negative",
                           (double)s->beta);
    return check_layers(s);
}

int ucm_sparse_schedule_step(const struct ucm_sparse_schedule *schedule, uint32_t layer,
                             uint64_t step, uint64_t tokens, struct ucm_sparse_step *out)
{
    const struct ucm_sparse_schedule *s = schedule;
    uint64_t asked;
    int r;

    if (!s || !out)
        return client_fail(UCM_EINVALID, "schedule or out is NULL");
    r = check(s);
    if (r)
        return r;
    if (layer >= s->layers)
        return client_fail(UCM_EINVALID, "layer is %u of %u", layer, s->layers);
    *out = (struct ucm_sparse_step){.mode = UCM_SPARSE_LAYER_DENSE};
    if (tokens < s->dense_below || s->mode[layer] == UCM_SPARSE_LAYER_DENSE)
        return 0;
    asked = step < s->lag ? 0 : step - s->lag;
    *out = (struct ucm_sparse_step){
        .mode = s->mode[layer], .layer = layer, .chosen_at = asked - asked % s->retrieval_stride};
    while (s->mode[out->layer] != UCM_SPARSE_LAYER_SELECT)
        out->layer--;
    if (out->mode == UCM_SPARSE_LAYER_SELECT && step % s->retrieval_stride == 0) {
        out->choose = true;
        out->rows = step + 1 < s->rows ? (uint32_t)step + 1 : s->rows;
    }
    return 0;
}

int ucm_sparse_schedule_choices(const struct ucm_sparse_schedule *schedule, uint32_t *choices)
{
    int r;

    if (!schedule || !choices)
        return client_fail(UCM_EINVALID, "schedule or choices is NULL");
    r = check(schedule);
    if (r == 0)
        *choices =
            1 + (schedule->lag + schedule->retrieval_stride - 1) / schedule->retrieval_stride;
    return r;
}

/* ---- defaults ---- */

#define DENSE_FIRST 2
#define DENSE_BELOW 4096

static int defaults(uint32_t layers, float beta, struct ucm_sparse_schedule *out)
{
    struct ucm_sparse_schedule s = {.layers = layers,
                                    .dense_below = DENSE_BELOW,
                                    .retrieval_stride = 5,
                                    .rows = 1,
                                    .beta = beta};
    int r;

    for (uint32_t l = DENSE_FIRST; l < layers && l < UCM_SPARSE_LAYERS_MAX; l++)
        s.mode[l] = UCM_SPARSE_LAYER_SELECT;
    r = check(&s);
    if (r == 0)
        *out = s;
    return r;
}

int ucm_sparse_schedule_defaults(uint32_t layers, struct ucm_sparse_schedule *out)
{
    return out ? defaults(layers, 0, out) : client_fail(UCM_EINVALID, "out is NULL");
}

/* A line matches if the name contains its part, in upper or lower case. The first that matches
 * counts. */
static const struct model {
    const char *part;
    const char *refusal;
    float beta;
} models[] = {
    {"gemma-2", "attends within a sliding window in every other layer", 0},
    {"gemma2", "attends within a sliding window in every other layer", 0},
    {"gemma-3", "attends within a sliding window in five of six layers", 0},
    {"gemma3", "attends within a sliding window in five of six layers", 0},
    {"gemma-1", NULL, 0},
    {"gemma-7b", NULL, 0},
    {"gemma-2b", NULL, 0},
    {"gemma", "is a Gemma of unknown kind, and those since the second have sliding windows", 0},
    {"gpt-oss", "has attention sinks, and sliding windows in every other layer", 0},
    {"llama-4", "attends within chunks in three of four layers", 0},
    {"qwen3-next", "has linear attention in three of four layers", 0},
    {"deepseek-v3.2", "chooses its tokens itself", 0},
    {"ministral", "attends within a sliding window in some layers", 0},
    {"r1-distill-llama", NULL, 0},
    {"r1-distill-qwen", NULL, 0},
    /* MLA: logits are scaled by the 128 + 64 channels of a head, not by the 576 that are stored. */
    {"deepseek-v2", NULL, 0x1.279a74p-4f},
    {"deepseek-v3", NULL, 0x1.279a74p-4f},
    {"deepseek-r1", NULL, 0x1.279a74p-4f},
    {"deepseek-coder-v2", NULL, 0x1.279a74p-4f},
    {"llama-3", NULL, 0},
    {"llama3", NULL, 0},
    {"qwen2.5", NULL, 0},
    {"qwen3", NULL, 0},
    {"mixtral", NULL, 0},
    {"mistral", NULL, 0},
};

static bool has_part(const char *name, const char *part)
{
    size_t n = strlen(part);

    for (; *name != '\0'; name++)
        if (strncasecmp(name, part, n) == 0)
            return true;
    return false;
}

/* What only one version of a family does. */
static const char *version_refusal(const char *model)
{
    if (has_part(model, "mistral-7b") && has_part(model, "v0.1"))
        return "attends within a sliding window";
    if (has_part(model, "qwen2.5") && has_part(model, "-1m"))
        return "has dual chunk attention, in which a key's rotation depends on the query";
    return NULL;
}

static const struct model *find_model(const char *name)
{
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++)
        if (has_part(name, models[i].part))
            return &models[i];
    return NULL;
}

int ucm_sparse_schedule_for_model(const char *model, uint32_t layers,
                                  struct ucm_sparse_schedule *out)
{
    const struct model *m;
    const char *refusal;

    if (!model || !out)
        return client_fail(UCM_EINVALID, "model or out is NULL");
    m = find_model(model);
    if (!m)
        return client_fail(UCM_ENOTFOUND,
                           "nothing is known of a model named %.60s: give the schedule", model);
    refusal = version_refusal(model);
    if (!refusal)
        refusal = m->refusal;
    if (refusal)
        return client_fail(UCM_EUNSUPPORTED, "%.60s %s", model, refusal);
    return defaults(layers, m->beta, out);
}
