/* test_sparse [--few]: compares; a part of the cases only. */
#include "tests/gpu/sparse.h"

#include "client/cuda/sparse.h"

#include <string.h>

const char *method_name(uint32_t method)
{
    return method == TOKENS_REST ? "rest" : ucm_summary_method(method)->name;
}

static uint8_t keep_some[64];

bool summary_of(struct ucm_sparse_summary *out, uint32_t method, uint32_t dtype, uint32_t tokens,
                uint32_t kv_heads, uint32_t d, uint32_t rope_dim)
{
    uint64_t element = dtype == UCM_SPARSE_F32 ? 4 : dtype == UCM_SPARSE_FP8_E4M3 ? 1 : 2;
    uint32_t vd = rope_dim > 0 ? 0 : d;
    uint64_t row = d * element;

    bool rest = method == TOKENS_REST;

    if (rest && tokens == 1)
        return false;
    method = rest ? UCM_SPARSE_TOKENS : method;
    *out = (struct ucm_sparse_summary){
        .method = method,
        .kind = rnd_below(3),
        .run = tokens % 4 == 0 ? 4 : 1,
        .bits = 64u << rnd_below(3),
        .rope_bits = rope_dim > 0 ? 20 : 0,
        .seed = rnd(),
        .chosen = 1 + rnd_below(tokens - rest < 32 ? tokens - rest : 32),
        .rest = rest,
        .shape = {.dtype = dtype,
                  .tokens = tokens,
                  .kv_heads = kv_heads,
                  .head_dim = d,
                  .v_head_dim = vd,
                  .rope_dim = rope_dim,
                  .k_offset = 4 * element,
                  .k_token_stride = row * kv_heads,
                  .k_head_stride = row,
                  .v_offset = 4 * element + (row + element) * kv_heads * tokens,
                  .v_token_stride = vd * element,
                  .v_head_stride = vd * element * tokens},
    };
    if (method == UCM_SPARSE_SUBMEAN && rnd_below(3) > 0 && d >= 8) { /* odd numbers of pairs too */
        memset(keep_some, 0, sizeof(keep_some));
        for (uint32_t i = 0; i < d / 2; i++)
            keep_some[i / 8] |= (uint8_t)((i == 0 || rnd_below(2)) << i % 8);
        out->keep = keep_some;
        out->keep_bytes = (d / 2 + 7) / 8;
        out->pairs = rnd_below(2);
    }
    return method != UCM_SPARSE_HASH ||
           (d - rope_dim >= out->bits / 8 && (rope_dim == 0 || rope_dim >= 4));
}

struct ucm_summary_plan *plan_of(const struct ucm_sparse_summary *summary)
{
    struct ucm_summary_plan *plan = fresh(sizeof(*plan));

    if (!check(sparse_plan(plan, summary) == 0, "a plan: %s", ucm_cuda_errmsg()))
        must(CUDA_ERROR_INVALID_VALUE, "a test's summary");
    return plan;
}

int main(int argc, char **argv)
{
    gpu_begin(argc, argv);
    test_summaries();
    test_selections();
    if (!few)
        test_graphs();
    return gpu_end();
}
