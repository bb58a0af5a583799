/* Summaries and selections of libucmclient_cuda over the fake driver, which does not run them:
 * refusals with their sentences, and that all is freed. tests/gpu checks what they compute. */
#include "client/include/ucmclient_cuda_sparse.h"
#include "tests/unit/cuda/library_rig.h"

#include <criterion/criterion.h>
#include <string.h>

static struct ucm_sparse_summary summary;
static struct ucm_cuda_select_options options;
static struct ucm_cuda_select_layer selection; /* of a layer */

static void setup(void)
{
    rig_open();
    summary = (struct ucm_sparse_summary){
        .method = UCM_SPARSE_HASH,
        .bits = 128,
        .shape = {.dtype = UCM_SPARSE_BF16,
                  .tokens = 16,
                  .kv_heads = 2,
                  .head_dim = 64,
                  .k_token_stride = 256,
                  .k_head_stride = 128},
    };
    options = (struct ucm_cuda_select_options){
        .score = {.q_heads = 8},
        .choose = {.sparse_ratio = 0.25},
        .q_dtype = UCM_SPARSE_BF16,
        .sequences = 4,
        .max_blocks = 1000,
    };
    selection = (struct ucm_cuda_select_layer){.summaries = 4096,
                                               .stride = 4096,
                                               .bound = 10,
                                               .sequences = 4,
                                               .table = 4096,
                                               .table_stride = 1000,
                                               .n_blocks = 4096,
                                               .q = 4096,
                                               .count = 4096,
                                               .index = 4096};
}

TestSuite(cuda_sparse, .init = setup, .fini = rig_close, .timeout = 60);

Test(cuda_sparse, builds)
{
    struct ucm_cuda_summary_layer layer = {.k = 4096, .v = 4096, .out = 8192};
    struct ucm_cuda_summary_build good = {.layers = &layer,
                                          .n_layers = 1,
                                          .n_blocks = 3,
                                          .numbers = 4096,
                                          .stride = 4096,
                                          .out_stride = 1024,
                                          .bound = 10,
                                          .out_bound = 10};
    struct ucm_cuda_summary *d;

    cr_assert_eq(ucm_cuda_summary_open(uuid, &summary, &d), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(ucm_cuda_summary(d, &good, NULL), 0, "%s", ucm_cuda_errmsg());
    REFUSED_WITH(good, out_stride, 512, ucm_cuda_summary(d, &good, NULL),
                 "out_stride is 512; multiples of 4 from 520 on");
    REFUSED_WITH(good, stride, 4097, ucm_cuda_summary(d, &good, NULL), "stride is no multiple");
    REFUSED_WITH(good, numbers, 0, ucm_cuda_summary(d, &good, NULL), "numbers is 0");
    REFUSED_WITH(good, n_layers, UCM_CUDA_SUMMARY_LAYERS + 1, ucm_cuda_summary(d, &good, NULL),
                 "n_layers is 129");
    layer.k = 4097;
    refused(ucm_cuda_summary(d, &good, NULL), "layer 0");
    ucm_cuda_summary_close(d);
    ucm_cuda_summary_close(NULL);
}

Test(cuda_sparse, summaries_that_are_none)
{
    struct ucm_cuda_summary *d = NULL;

    summary.bits = 100;
    refused(ucm_cuda_summary_open(uuid, &summary, &d), "bits is 100");
    summary.method = 9;
    refused(ucm_cuda_summary_open(uuid, &summary, &d), "no summary method 9");
    refused(ucm_cuda_summary_open(NULL, &summary, &d), "NULL");
    cr_expect_null(d);
    memset(uuid, 0xee, sizeof(uuid));
    summary.method = UCM_SPARSE_BOX;
    cr_expect_eq(ucm_cuda_summary_open(uuid, &summary, &d), -UCM_EDEVICE);
    cr_expect_null(d);
}

Test(cuda_sparse, selections)
{
    struct ucm_cuda_select_info info;
    struct ucm_cuda_select *s;

    selection.stride = 520;
    cr_assert_eq(ucm_cuda_select_open(uuid, &summary, &options, &s), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(ucm_cuda_select_info(s, &info), 0);
    cr_expect_eq(info.lists, 2);
    cr_expect_eq(info.room, 250);
    cr_expect_eq(ucm_cuda_select(s, &selection, NULL), 0, "%s", ucm_cuda_errmsg());
    REFUSED_WITH(selection, sequences, 5, ucm_cuda_select(s, &selection, NULL),
                 "sequences is 5; the handle is for 4");
    REFUSED_WITH(selection, stride, 521, ucm_cuda_select(s, &selection, NULL), "multiple of 4");
    REFUSED_WITH(selection, table_stride, 999, ucm_cuda_select(s, &selection, NULL),
                 "table_stride 999");
    REFUSED_WITH(selection, q, 0, ucm_cuda_select(s, &selection, NULL), "q, count or index is 0");
    ucm_cuda_select_close(s);
    ucm_cuda_select_close(NULL);
}

Test(cuda_sparse, launches_of_few_sequences_take_clusters)
{
    static const char *const cluster = "ucm_select_cluster_rest_4_1";
    struct ucm_cuda_select *s;

    summary.method = UCM_SPARSE_TOKENS;
    summary.bits = 0;
    summary.chosen = 8;
    summary.rest = 1;
    summary.shape.head_dim = 128;
    summary.shape.k_token_stride = 512;
    summary.shape.k_head_stride = 256;
    options.score.metric = UCM_SPARSE_ROUNDED;
    options.score.reduce = UCM_SPARSE_REDUCE_SOFTMAX;
    for (int at_once = 0; at_once <= 6; at_once++) { /* a sequence has two lists */
        fake_cuda.clusters = at_once;
        cr_assert_eq(ucm_cuda_select_open(uuid, &summary, &options, &s), 0, "%s",
                     ucm_cuda_errmsg());
        (void)fake_cuda_launched(cluster); /* to load it */
        for (selection.sequences = 1; selection.sequences <= 4; selection.sequences++) {
            cr_assert_eq(ucm_cuda_select(s, &selection, NULL), 0, "%s", ucm_cuda_errmsg());
            cr_expect_eq(fake_cuda_launched(cluster), 2 * (int)selection.sequences <= at_once,
                         "%u sequences, %d clusters", selection.sequences, at_once);
        }
        ucm_cuda_select_close(s);
    }
}

#define OPTION_REFUSED(field, value, part)                                                         \
    REFUSED_WITH(options, field, value, ucm_cuda_select_open(uuid, &summary, &options, &s), part)

Test(cuda_sparse, options_that_are_wrong)
{
    struct ucm_cuda_select *s = NULL;

    OPTION_REFUSED(q_dtype, UCM_SPARSE_FP8_E4M3, "q_dtype 3");
    OPTION_REFUSED(score.q_heads, 7, "q_heads is 7");
    OPTION_REFUSED(score.metric, UCM_SPARSE_L2, "metric 1 is not defined for hash");
    OPTION_REFUSED(choose.sparse_ratio, 2, "sparse_ratio");
    OPTION_REFUSED(sequences, 0, "sequences is 0");
    OPTION_REFUSED(max_blocks, 1u << 20, "max_blocks is 1048576");
    options.score.rows = 64;
    OPTION_REFUSED(score.q_heads, 64, "64 rows of 64 query heads");
    cr_expect_null(s);
}
