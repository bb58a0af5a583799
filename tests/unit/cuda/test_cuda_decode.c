/* Decode steps of libucmclient_cuda over the fake driver, which does not run them: refusals with
 * their sentences, sizes, and that all is freed. tests/gpu checks what they compute. */
#include "client/include/ucmclient_cuda_decode.h"
#include "tests/unit/cuda/library_rig.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#define ROW (64 * 2)

static struct ucm_cuda_decode_options options;

/* A layer has K of all tokens and heads, then V; pages have the same. */
static void setup(void)
{
    struct ucm_cuda_decode_layout layout = {.k_token_stride = 2 * ROW,
                                            .k_head_stride = ROW,
                                            .v_offset = 16 * 2 * ROW,
                                            .v_token_stride = 2 * ROW,
                                            .v_head_stride = ROW};

    rig_open();
    options = (struct ucm_cuda_decode_options){
        .layers = 3,
        .q_heads = 8,
        .kv_heads = 2,
        .head_dim = 64,
        .dtype = UCM_SPARSE_BF16,
        .tokens = 16,
        .block_pool = 4096,
        .entries = 100,
        .numbers = 1000,
        .requests = 4,
        .sequences = 2,
        .lists = 2,
        .room = 20,
        .window = 3,
        .stored = layout,
        .layer_bytes = 2 * 16 * 2 * ROW,
        .page = layout,
    };
}

TestSuite(cuda_decode, .init = setup, .fini = rig_close, .timeout = 60);

static struct ucm_cuda_decode *opened(void)
{
    struct ucm_cuda_decode *d = NULL;

    cr_assert_eq(ucm_cuda_decode_open(uuid, &options, &d), 0, "%s", ucm_cuda_errmsg());
    return d;
}

/* By the options: an entry has so many bytes, and a handle can be opened. */
static void entries_have(uint64_t want)
{
    uint64_t bytes = 0;

    cr_expect_eq(ucm_cuda_decode_entry_bytes(&options, &bytes), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(bytes, want);
    ucm_cuda_decode_close(opened());
}

Test(cuda_decode, sizes)
{
    struct ucm_cuda_decode *d = opened();
    struct ucm_cuda_decode_info info;

    entries_have(2 * 16 * ROW); /* K and V of a KV head */
    cr_expect_eq(ucm_cuda_decode_info(d, &info), 0);
    cr_expect_eq(info.entry_bytes, 2 * 16 * ROW);
    cr_expect_geq(info.table_bytes, 3 * 2 * 1000 * 4 + 1000 * 24);
    cr_expect_geq(info.host_bytes, 1000 * 24);
    cr_expect_geq(info.splits * info.split_tiles, 23);
    ucm_cuda_decode_close(d);
    ucm_cuda_decode_close(NULL);
    options.kv_dtype = UCM_SPARSE_FP8_E4M3;
    entries_have(16 * ROW); /* a byte an element */
    options.kv_dtype = UCM_SPARSE_BF16;
    options.encoding = UCM_CUDA_DECODE_FP8;
    entries_have(16 * ROW + 2 * 16); /* a byte an element, and a row */
    d = opened();
    cr_expect_eq(ucm_cuda_decode_info(d, &info), 0);
    cr_expect_geq(info.splits * info.split_tiles, 23);
    ucm_cuda_decode_close(d);
    options.encoding = UCM_CUDA_DECODE_AS_STORED;
    options.entry = UCM_CUDA_DECODE_LAYER;
    options.lists = 1;
    entries_have(options.layer_bytes);
}

/* A latent of 576 channels a token for 128 query heads. */
static struct ucm_cuda_decode_options latent_options(void)
{
    struct ucm_cuda_decode_options o = options;

    o.q_heads = 128;
    o.kv_heads = o.lists = 1;
    o.head_dim = 576;
    o.v_head_dim = 512;
    o.scale = 0.07f;
    o.stored = o.page =
        (struct ucm_cuda_decode_layout){.k_token_stride = 1152, .k_head_stride = 1152};
    o.layer_bytes = 16 * 1152;
    return o;
}

static void option_refused(const struct ucm_cuda_decode_options *o, const char *part)
{
    struct ucm_cuda_decode *d = NULL;
    uint64_t bytes = 7;

    refused(ucm_cuda_decode_entry_bytes(o, &bytes), part);
    cr_expect_eq(bytes, 7);
    refused(ucm_cuda_decode_open(uuid, o, &d), part);
    cr_expect_null(d);
}

/* Refuses a copy of the options with one changed field. */
#define REFUSED(field, value, part)                                                                \
    do {                                                                                           \
        struct ucm_cuda_decode_options o = options;                                                \
                                                                                                   \
        o.field = value;                                                                           \
        option_refused(&o, part);                                                                  \
    } while (0)

/* A valid layer, without the fields that rounds need. */
static struct ucm_cuda_decode_layer layer_right(void)
{
    return (struct ucm_cuda_decode_layer){.sequences = 2,
                                          .index = 4096,
                                          .count = 4096,
                                          .table = 4096,
                                          .table_stride = 300,
                                          .request = 4096,
                                          .q = 4096,
                                          .out = 4096};
}

/* A kernel for another type would read past the entries. */
Test(cuda_decode, kernels_of_the_type_of_entries)
{
    static const struct {
        uint32_t kv_dtype, encoding;
        const char *kernel;
    } of[] = {{0, UCM_CUDA_DECODE_AS_STORED, "ucm_attend_bf16_64_8"},
              {UCM_SPARSE_FP8_E4M3, UCM_CUDA_DECODE_AS_STORED, "ucm_attend_bf16_e4m3_64_8"},
              {0, UCM_CUDA_DECODE_FP8, "ucm_attend_bf16_e4m3_64_8"}};
    struct ucm_cuda_decode_layer l = layer_right();

    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        struct ucm_cuda_decode *d;

        options.kv_dtype = of[i].kv_dtype;
        options.encoding = of[i].encoding;
        d = opened();
        cr_expect_eq(ucm_cuda_decode_layer(d, &l, stream), 0, "%s", ucm_cuda_errmsg());
        cr_expect(fake_cuda_launched(of[i].kernel), "%s", of[i].kernel);
        ucm_cuda_decode_close(d);
    }
}

Test(cuda_decode, latents)
{
    options = latent_options();
    entries_have(16 * 1152); /* K alone */
    options.entry = UCM_CUDA_DECODE_LAYER;
    options.layer_bytes = 2 * 16 * 1152;
    entries_have(2 * 16 * 1152);
    options = latent_options();
    options.entry = UCM_CUDA_DECODE_HEAD;
    options.kv_dtype = UCM_SPARSE_FP8_E4M3;
    options.k_scale = options.v_scale = 0.5f;
    entries_have(16 * 576);
}

Test(cuda_decode, latents_that_are_wrong)
{
    options = latent_options();
    REFUSED(q_heads, 129, "q_heads is 129; 1 to 128 are right for MLA");
    REFUSED(kv_heads, 2, "kv_heads is 2; MLA has 1");
    options.q_heads = 16;
    REFUSED(v_head_dim, 0,
            "head_dim is 576; 64, 128 and 256 are right, and 576 with v_head_dim 512");
    options.q_heads = 128;
    REFUSED(head_dim, 256, "q_heads is 128; 1 to 16 times kv_heads");
    REFUSED(scale, 0, "MLA's must be given");
    REFUSED(v_scale, 0.5f, "v_scale is 0.5 and k_scale 0; MLA has one scale");
    REFUSED(encoding, UCM_CUDA_DECODE_FP8, "entries of MLA are as stored");
    REFUSED(rule, UCM_CUDA_DECODE_PSA, "lists of MLA don't stop");
    REFUSED(layer_bytes, 15 * 1152, "stored reaches byte 18432 of 17280");
}

Test(cuda_decode, options_that_are_wrong)
{
    struct ucm_cuda_decode *d = NULL;

    REFUSED(layers, 0, "layers is 0");
    REFUSED(kv_heads, 0, "kv_heads is 0");
    REFUSED(q_heads, 9, "q_heads is 9; 1 to 16 times kv_heads, 2");
    REFUSED(q_heads, 34, "q_heads is 34");
    REFUSED(head_dim, 96, "head_dim is 96; 64, 128 and 256");
    options.head_dim = 256;
    REFUSED(q_heads, 18, "q_heads is 9 times kv_heads; with head_dim 256");
    options.head_dim = 64;
    REFUSED(v_head_dim, 32, "v_head_dim is 32; head_dim, 64, is right");
    REFUSED(dtype, UCM_SPARSE_F32, "dtype 0 is neither");
    REFUSED(kv_dtype, UCM_SPARSE_F16, "kv_dtype 1 is neither");
    REFUSED(k_scale, -1, "k_scale is -1");
    REFUSED(v_scale, INFINITY, "v_scale is inf");
    REFUSED(tokens, 24, "tokens is 24; multiples of 16 up to 256");
    REFUSED(scale, -1, "scale is -1");
    REFUSED(entry, 2, "entry is 2");
    REFUSED(sequences, 1025, "sequences is 1025; 1 to 1024");
    REFUSED(lists, 3, "lists is 3; one a KV head (2)");
    REFUSED(lists, 1, "one list for all KV heads wants entries of a layer");
    REFUSED(room, 0, "room is 0");
    REFUSED(window, 1 << 20, "window is 1048576 blocks");
    REFUSED(stored.k_head_stride, 8, "of stored is no multiple of 16");
    REFUSED(page.v_offset, 8, "of page is no multiple of 16");
    REFUSED(layer_bytes, 0, "layer_bytes is 0");
    REFUSED(stored.v_offset, 16 * 2 * ROW + 16, "stored reaches byte 8208 of 8192");
    REFUSED(stored.v_token_stride, 1ull << 62, "beyond the 8192 of a layer");
    REFUSED(encoding, 2, "encoding is 2, which is no");
    options.encoding = UCM_CUDA_DECODE_FP8;
    REFUSED(kv_dtype, UCM_SPARSE_FP8_E4M3, "encoding fp8 makes 8 bits of 16");
    REFUSED(entry, UCM_CUDA_DECODE_LAYER, "wants entries of a KV head");
    REFUSED(v_scale, 0.5f, "v_scale 0.5; with encoding fp8");
    options.encoding = UCM_CUDA_DECODE_AS_STORED;
    REFUSED(entries, 0, "entries is 0; 1 to");
    REFUSED(numbers, 1u << 31, "numbers is 2147483648");
    REFUSED(requests, 0, "requests is 0");
    options.block_pool = 8;
    refused(ucm_cuda_decode_open(uuid, &options, &d), "block_pool is 0, or no multiple of 16");
    refused(ucm_cuda_decode_open(NULL, &options, &d), "NULL");
    options.block_pool = 4096;
    memset(uuid, 0xee, sizeof uuid);
    cr_expect_eq(ucm_cuda_decode_open(uuid, &options, &d), -UCM_EDEVICE);
    cr_expect_null(d);
}

Test(cuda_decode, rounds)
{
    struct ucm_cuda_decode_layer l = layer_right();
    struct ucm_cuda_decode *d;
    struct ucm_cuda_decode_result result;
    uint64_t plain, bytes;

    l.candidates = l.score = l.head_scores = 4096;
    l.head_pitch = 300;

    cr_assert_eq(ucm_cuda_decode_entry_bytes(&options, &plain), 0);
    REFUSED(rule, 4, "rule is 4");
    options.rule = UCM_CUDA_DECODE_ESTIMATED;
    options.eps = 0.9f;
    option_refused(&options, "known is 0; rule 2 wants 1");
    options.known = UCM_CUDA_DECODE_ESTIMATES;
    cr_expect_eq(ucm_cuda_decode_entry_bytes(&options, &bytes), 0);
    cr_expect_eq(bytes, plain);
    REFUSED(known, 3, "known is 3");
    REFUSED(rule, UCM_CUDA_DECODE_CERTIFIED, "known is 1; rule 3 wants 2");
    REFUSED(eps, 1.5f, "eps is 1.5; 0 to 1");
    REFUSED(eps, NAN, "eps is nan; 0 to 1");
    REFUSED(rounds, 17, "rounds is 17; 1 to 16");
    REFUSED(every, 1u << 20, "every is 1048576 and first 32 blocks");
    REFUSED(room, 4097, "room is 4097; lists of more than one round have at most 4096");
    d = opened();
    cr_expect_eq(ucm_cuda_decode_begin(d, stream), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(ucm_cuda_decode_layer(d, &l, stream), 0, "%s", ucm_cuda_errmsg());
    cr_expect(fake_cuda_launched("ucm_attend_order"));
    cr_expect_eq(ucm_cuda_decode_end(d, stream), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(ucm_cuda_decode_result(d, &result), 0);
    cr_expect_eq(result.rounds, 0);
    l.score = 0;
    refused(ucm_cuda_decode_layer(d, &l, stream), "candidates or score is 0");
    l.score = 4096;
    l.head_scores = 0;
    refused(ucm_cuda_decode_layer(d, &l, stream), "head_scores or head_pitch is 0");
    ucm_cuda_decode_close(d);
    options.rounds = 1;
    options.room = 5000; /* nothing is sorted */
    d = opened();
    l.head_scores = 4096;
    l.score = 0;
    cr_expect_eq(ucm_cuda_decode_layer(d, &l, stream), 0, "%s", ucm_cuda_errmsg());
    ucm_cuda_decode_close(d);
}

#define LAYER_REFUSED(field, value, part)                                                          \
    REFUSED_WITH(good, field, value, ucm_cuda_decode_layer(d, &good, stream), part)

Test(cuda_decode, layers)
{
    struct ucm_cuda_decode_layer good = layer_right();
    struct ucm_cuda_decode *d = opened();

    good.layer = 2;
    good.pages = good.page_table = good.first = good.length = 4096;
    good.page_stride = 8192;
    good.page_bound = 10;
    good.page_table_stride = 300;
    cr_expect_eq(ucm_cuda_decode_begin(d, stream), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(ucm_cuda_decode_layer(d, &good, stream), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(ucm_cuda_decode_end(d, stream), 0, "%s", ucm_cuda_errmsg());
    LAYER_REFUSED(layer, 3, "layer is 3 of 3");
    LAYER_REFUSED(sequences, 3, "sequences is 3; the handle is for 2");
    LAYER_REFUSED(request, 0, "index, count, table or request is 0");
    LAYER_REFUSED(table_stride, 1ull << 32, "table_stride is 4294967296");
    LAYER_REFUSED(out, 4104, "out none of 16");
    LAYER_REFUSED(first, 0, "length is not 0, but first");
    LAYER_REFUSED(page_stride, 8, "pages or page_stride");
    good.length = good.first = good.page_table = good.pages = 0;
    cr_expect_eq(ucm_cuda_decode_layer(d, &good, stream), 0, "without a window: %s",
                 ucm_cuda_errmsg());
    refused(ucm_cuda_decode_begin(NULL, stream), "NULL");
    ucm_cuda_decode_close(d);
}

Test(cuda_decode, requests_and_floors)
{
    struct ucm_cuda_decode *d = opened();

    cr_expect_eq(ucm_cuda_decode_enter(d, 0, 60, stream), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(ucm_cuda_decode_enter(d, 1, 41, stream), -UCM_ENOMEMORY);
    cr_expect_not_null(
        strstr(ucm_cuda_errmsg(), "41 entries: 60 are kept for other requests, of 100"));
    cr_expect_eq(ucm_cuda_decode_enter(d, 1, 40, stream), 0);
    cr_expect_eq(ucm_cuda_decode_leave(d, 0, stream), 0);
    cr_expect_eq(ucm_cuda_decode_enter(d, 2, 60, stream), 0, "%s", ucm_cuda_errmsg());
    refused(ucm_cuda_decode_enter(d, 4, 0, stream), "request is 4 of 4");
    refused(ucm_cuda_decode_leave(d, 4, stream), "request is 4 of 4");
    ucm_cuda_decode_close(d);
}

Test(cuda_decode, between_steps)
{
    struct ucm_cuda_decode_put item = {.key = {2, 1, 999}, .request = 3, .from = 4096};
    struct ucm_cuda_decode *d = opened();
    struct ucm_cuda_decode_result result = {.flags = 7};
    struct ucm_cuda_decode_key key;
    struct ucm_place place = {.slab = UCM_PLACE_NONE};
    uint32_t n = 7, numbers[] = {3, 1000};

    cr_expect_eq(ucm_cuda_decode_result(d, &result), 0);
    cr_expect_eq(result.step, 0);
    cr_expect_eq(result.flags, 0);
    cr_expect_eq(ucm_cuda_decode_unserved(d, &key, 1, &n, stream), 0, "%s", ucm_cuda_errmsg());
    cr_expect_eq(n, 0);
    cr_expect_eq(ucm_cuda_decode_put(d, &item, 1, &n, stream), 0, "%s", ucm_cuda_errmsg());
    item.from = 8;
    refused(ucm_cuda_decode_put(d, &item, 1, &n, stream), "from is 0, or no multiple");
    item.from = 4096;
    item.key.head = 2;
    refused(ucm_cuda_decode_put(d, &item, 1, &n, stream), "head 2, number 999: there are 3, 2");
    item.key.head = 0;
    item.request = 4;
    refused(ucm_cuda_decode_put(d, &item, 1, &n, stream), "request is 4 of 4");
    cr_expect_eq(ucm_cuda_decode_forget(d, numbers, 1, stream), 0, "%s", ucm_cuda_errmsg());
    refused(ucm_cuda_decode_forget(d, numbers, 2, stream), "number 1000 of 1000");
    cr_expect_eq(ucm_cuda_decode_places(d, NULL, numbers, NULL, 1, stream), 0, "%s",
                 ucm_cuda_errmsg());
    refused(ucm_cuda_decode_places(d, NULL, numbers, &place, 1, stream), "mapping is");
    refused(ucm_cuda_decode_places(d, NULL, numbers, NULL, 2, stream), "number 1000 of 1000");
    cr_expect_eq(ucm_cuda_decode_mapping_update(d, &n, stream), 0, "there is none");
    cr_expect_eq(n, 0);
    cr_expect_eq(ucm_cuda_decode_mapping_leave(d, stream), 0);
    ucm_cuda_decode_close(d);
}
