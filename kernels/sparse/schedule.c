#include "kernels/sparse/schedule.h"

#include "kernels/sparse/arith.h"
#include "kernels/sparse/select.h"
#include "kernels/sparse/spec.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <strings.h>

static int check_layers(const struct ucm_schedule *s, char why[UCM_SPARSE_WHY])
{
    bool selects = false;

    if (s->layers < 1 || s->layers > UCM_SCHEDULE_LAYERS_MAX)
        return sparse_refuse(why, "layers is %u; 1 to %u are allowed", s->layers,
                             UCM_SCHEDULE_LAYERS_MAX);
    for (uint32_t l = 0; l < s->layers; l++) {
        if (s->mode[l] > UCM_LAYER_REUSE)
            return sparse_refuse(why,
                                 "mode %u of layer %u is none of 0 (dense), 1 (select), 2 "
                                 "(reuse)",
                                 s->mode[l], l);
        if (s->mode[l] == UCM_LAYER_REUSE && !selects)
            return sparse_refuse(why, "layer %u reuses a choice, and no layer before it selects",
                                 l);
        selects |= s->mode[l] == UCM_LAYER_SELECT;
    }
    return 0;
}

int ucm_schedule_check(const struct ucm_schedule *s, char why[UCM_SPARSE_WHY])
{
    if (s->retrieval_stride < 1 || s->retrieval_stride > UCM_SCHEDULE_STEPS_MAX)
        return sparse_refuse(why, "retrieval_stride is %u; 1 to %u are allowed",
                             s->retrieval_stride, UCM_SCHEDULE_STEPS_MAX);
    if (s->lag > UCM_SCHEDULE_STEPS_MAX)
        return sparse_refuse(why, "lag is %u; at most %u are allowed", s->lag,
                             UCM_SCHEDULE_STEPS_MAX);
    if (s->rows < 1 || s->rows > UCM_SCORE_ROWS_MAX)
        return sparse_refuse(why, "rows is %u; 1 to %u are allowed", s->rows, UCM_SCORE_ROWS_MAX);
    if (!(s->beta >= 0) || ucm_not_finite(s->beta))
        return sparse_refuse(why, "beta is %g; it must be finite and not negative",
                             (double)s->beta);
    return check_layers(s, why);
}

struct ucm_schedule_step ucm_schedule_step(const struct ucm_schedule *s, uint32_t layer,
                                           uint64_t step, uint64_t tokens)
{
    struct ucm_schedule_step out = {.mode = s->mode[layer]};
    uint64_t asked = step < s->lag ? 0 : step - s->lag;

    if (tokens < s->dense_below || out.mode == UCM_LAYER_DENSE)
        return (struct ucm_schedule_step){.mode = UCM_LAYER_DENSE};
    out.chosen_at = asked - asked % s->retrieval_stride;
    out.layer = layer;
    while (s->mode[out.layer] != UCM_LAYER_SELECT)
        out.layer--;
    if (out.mode == UCM_LAYER_SELECT && step % s->retrieval_stride == 0) {
        out.choose = true;
        out.rows = step + 1 < s->rows ? (uint32_t)step + 1 : s->rows;
    }
    return out;
}

uint32_t ucm_schedule_choices(const struct ucm_schedule *s)
{
    return 1 + (s->lag + s->retrieval_stride - 1) / s->retrieval_stride;
}

/* ---- defaults ---- */

#define DENSE_FIRST 2
#define DENSE_BELOW 4096

void ucm_schedule_defaults(struct ucm_schedule *s, uint32_t layers)
{
    *s = (struct ucm_schedule){
        .layers = layers,
        .dense_below = DENSE_BELOW,
        .retrieval_stride = 5,
        .rows = 1,
    };
    for (uint32_t l = DENSE_FIRST; l < layers && l < UCM_SCHEDULE_LAYERS_MAX; l++)
        s->mode[l] = UCM_LAYER_SELECT;
}

/* A name has the part in it, in any case; the first line that matches counts. */
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

/* What one version of a family does and the others don't. */
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

int ucm_schedule_for_model(const char *model, uint32_t layers, struct ucm_schedule *s,
                           char why[UCM_SPARSE_WHY])
{
    const struct model *m = find_model(model);
    const char *refusal = version_refusal(model);
    struct ucm_schedule out;
    int rc;

    if (m == NULL) {
        sparse_refuse(why, "nothing is known of a model named %.60s: give the schedule", model);
        return -ENOENT;
    }
    if (refusal == NULL)
        refusal = m->refusal;
    if (refusal != NULL) {
        sparse_refuse(why, "%.60s %s", model, refusal);
        return -ENOTSUP;
    }
    ucm_schedule_defaults(&out, layers);
    out.beta = m->beta;
    rc = ucm_schedule_check(&out, why);
    if (rc == 0)
        *s = out;
    return rc;
}
