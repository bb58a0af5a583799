/* Schedules: which layer chooses in which step, what is refused, what is known of models. */
#include "client/include/ucmclient_sparse.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static struct ucm_sparse_schedule schedule(uint32_t stride, uint32_t lag)
{
    struct ucm_sparse_schedule s;

    cr_assert_eq(ucm_sparse_schedule_defaults(6, &s), 0);
    s.retrieval_stride = stride;
    s.lag = lag;
    s.mode[4] = UCM_SPARSE_LAYER_REUSE;
    s.mode[5] = UCM_SPARSE_LAYER_REUSE;
    return s;
}

static struct ucm_sparse_step step_of(const struct ucm_sparse_schedule *s, uint32_t layer,
                                      uint64_t step, uint64_t tokens)
{
    struct ucm_sparse_step out;

    cr_assert_eq(ucm_sparse_schedule_step(s, layer, step, tokens, &out), 0, "%s", ucm_errmsg());
    return out;
}

Test(client_schedule, short_sequences_and_dense_layers_need_no_choice)
{
    struct ucm_sparse_schedule s = schedule(1, 0);

    for (uint32_t layer = 0; layer < 6; layer++) {
        struct ucm_sparse_step step = step_of(&s, layer, 0, s.dense_below - 1);

        cr_assert(step.mode == UCM_SPARSE_LAYER_DENSE && !step.choose && step.rows == 0);
        step = step_of(&s, layer, 0, s.dense_below);
        cr_assert_eq(step.mode, s.mode[layer]);
        cr_assert_eq(step.choose, s.mode[layer] == UCM_SPARSE_LAYER_SELECT);
    }
}

Test(client_schedule, a_layer_reuses_the_choice_of_the_last_that_selected)
{
    struct ucm_sparse_schedule s = schedule(2, 0);

    for (uint32_t layer = 2; layer < 6; layer++) {
        struct ucm_sparse_step step = step_of(&s, layer, 7, 1u << 20);

        cr_assert_eq(step.layer, layer < 3 ? 2 : 3);
        cr_assert_eq(step.chosen_at, 6);
        cr_assert_not(step.choose);
    }
}

/* For steps 0, 1, 2 and so on: the step whose query made the choice. */
static void expect(uint32_t stride, uint32_t lag, const uint64_t *chosen_at, uint64_t n)
{
    struct ucm_sparse_schedule s = schedule(stride, lag);

    for (uint64_t i = 0; i < n; i++) {
        struct ucm_sparse_step step = step_of(&s, 2, i, 1u << 20);

        cr_assert_eq(step.chosen_at, chosen_at[i], "stride %u, lag %u, step %d", stride, lag,
                     (int)i);
        cr_assert_eq(step.choose, i % stride == 0);
    }
}

Test(client_schedule, a_choice_serves_from_its_lag_on_until_the_next_does)
{
    expect(1, 0, (uint64_t[]){0, 1, 2, 3}, 4);
    expect(1, 1, (uint64_t[]){0, 0, 1, 2}, 4);
    expect(2, 1, (uint64_t[]){0, 0, 0, 2, 2, 4}, 6);
    expect(1, 2, (uint64_t[]){0, 0, 0, 1, 2}, 5);
    expect(5, 0, (uint64_t[]){0, 0, 0, 0, 0, 5, 5}, 7);
    expect(5, 2, (uint64_t[]){0, 0, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 10}, 13);
}

/* A worker that keeps so many choices of a layer always has the one that serves. */
Test(client_schedule, choices_that_are_kept_suffice)
{
    for (uint32_t stride = 1; stride < 9; stride++)
        for (uint32_t lag = 0; lag < 20; lag++) {
            struct ucm_sparse_schedule s = schedule(stride, lag);
            uint32_t room = 0;

            cr_assert_eq(ucm_sparse_schedule_choices(&s, &room), 0);
            for (uint64_t i = 0; i < 100; i++) {
                uint64_t made = i / stride; /* the newest choice's number */
                uint64_t used = step_of(&s, 2, i, 1u << 20).chosen_at / stride;

                cr_assert(used <= made && made - used < room);
            }
        }
}

Test(client_schedule, rows_are_the_steps_that_there_are)
{
    struct ucm_sparse_schedule s = schedule(2, 0);

    s.rows = 8;
    cr_assert_eq(step_of(&s, 2, 0, 1u << 20).rows, 1);
    cr_assert_eq(step_of(&s, 2, 4, 1u << 20).rows, 5);
    cr_assert_eq(step_of(&s, 2, 5, 1u << 20).rows, 0);
    cr_assert_eq(step_of(&s, 2, 100, 1u << 20).rows, 8);
}

static void refused(struct ucm_sparse_schedule s, const char *word)
{
    uint32_t choices;

    cr_assert_eq(ucm_sparse_schedule_choices(&s, &choices), -UCM_EINVALID);
    cr_assert_not_null(strstr(ucm_errmsg(), word), "\"%s\" says nothing of %s", ucm_errmsg(), word);
}

Test(client_schedule, wrong_ones_are_refused_with_a_sentence)
{
    struct ucm_sparse_schedule good = schedule(1, 1), bad;
    uint32_t choices;

    cr_assert_eq(ucm_sparse_schedule_choices(&good, &choices), 0);
    refused((bad = good, bad.layers = 0, bad), "layers");
    refused((bad = good, bad.layers = 513, bad), "layers");
    refused((bad = good, bad.retrieval_stride = 0, bad), "retrieval_stride");
    refused((bad = good, bad.lag = 100000, bad), "lag");
    refused((bad = good, bad.rows = 0, bad), "rows");
    refused((bad = good, bad.rows = 65, bad), "rows");
    refused((bad = good, bad.beta = NAN, bad), "beta");
    refused((bad = good, bad.mode[3] = 3, bad), "mode");
    refused((bad = good, bad.mode[1] = UCM_SPARSE_LAYER_REUSE, bad), "reuses");
}

Test(client_schedule, known_models_have_defaults)
{
    static const char *const names[] = {"meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B",
                                        "Qwen/Qwen3-32B", "mistralai/Mistral-7B-Instruct-v0.3",
                                        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"};
    struct ucm_sparse_schedule s;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        cr_assert_eq(ucm_sparse_schedule_for_model(names[i], 32, &s), 0, "%s", ucm_errmsg());
        cr_assert(s.mode[0] == UCM_SPARSE_LAYER_DENSE && s.mode[1] == UCM_SPARSE_LAYER_DENSE);
        cr_assert(s.mode[2] == UCM_SPARSE_LAYER_SELECT && s.mode[31] == UCM_SPARSE_LAYER_SELECT);
        cr_assert_eq(s.beta, 0);
    }
    cr_assert_eq(ucm_sparse_schedule_for_model("deepseek-ai/DeepSeek-V3", 61, &s), 0);
    cr_assert_float_eq(s.beta, 1 / sqrtf(192), 1e-7);
}

Test(client_schedule, models_that_attend_otherwise_are_refused)
{
    static const char *const names[] = {"google/gemma-2-9b",
                                        "google/gemma-3-27b-it",
                                        "mistralai/Mistral-7B-v0.1",
                                        "openai/gpt-oss-20b",
                                        "meta-llama/Llama-4-Scout",
                                        "Qwen/Qwen2.5-7B-Instruct-1M",
                                        "deepseek-ai/DeepSeek-V3.2",
                                        "google/gemma-4-something",
                                        "mistralai/Ministral-8B-Instruct-2410"};
    struct ucm_sparse_schedule s = {.layers = 77};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        cr_assert_eq(ucm_sparse_schedule_for_model(names[i], 32, &s), -UCM_EUNSUPPORTED, "%s",
                     names[i]);
        cr_assert(strstr(ucm_errmsg(), names[i]) == ucm_errmsg(), "%s", ucm_errmsg());
    }
    cr_assert_eq(ucm_sparse_schedule_for_model("acme/one", 32, &s), -UCM_ENOTFOUND);
    cr_assert_eq(ucm_sparse_schedule_for_model("", 32, &s), -UCM_ENOTFOUND);
    cr_assert_eq(ucm_sparse_schedule_for_model("meta-llama/Llama-3.1-8B", 0, &s), -UCM_EINVALID);
    cr_assert_eq(s.layers, 77);
}
