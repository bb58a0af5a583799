/* kv_size.h against what models' papers and vendors publish: bytes of KV a token. */
#include "client/ctl/kv_size.h"

#include "daemon/arena/arena.h"
#include "daemon/index/index.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

/* The public config.json of each model, cut to what counts. */
static const struct {
    const char *name, *config;
    uint64_t token_bytes; /* at the config's own type */
    uint32_t sliding, recurrent;
} models[] = {
    /* 2 x 32 layers x 8 heads x 128 x 2 bytes. */
    {"Llama-3.1-8B",
     "{\"model_type\":\"llama\",\"hidden_size\":4096,\"num_attention_heads\":32,"
     "\"num_hidden_layers\":32,\"num_key_value_heads\":8,\"max_position_embeddings\":131072,"
     "\"torch_dtype\":\"bfloat16\"}",
     131072, 0, 0},
    /* 516.096 KB, as the paper \"Insights into DeepSeek-V3\" (ISCA 2025, table 1) has it. */
    {"Llama-3.1-405B",
     "{\"model_type\":\"llama\",\"hidden_size\":16384,\"num_attention_heads\":128,"
     "\"num_hidden_layers\":126,\"num_key_value_heads\":8,\"torch_dtype\":\"bfloat16\"}",
     516096, 0, 0},
    /* Multi-head: as many KV heads as heads, and no word of them. */
    {"Llama-2-7B",
     "{\"model_type\":\"llama\",\"hidden_size\":4096,\"num_attention_heads\":32,"
     "\"num_hidden_layers\":32,\"torch_dtype\":\"float16\"}",
     524288, 0, 0},
    /* 327.680 KB, in the same table. */
    {"Qwen2.5-72B",
     "{\"model_type\":\"qwen2\",\"hidden_size\":8192,\"num_attention_heads\":64,"
     "\"num_hidden_layers\":80,\"num_key_value_heads\":8,\"sliding_window\":131072,"
     "\"use_sliding_window\":false,\"max_window_layers\":80,\"torch_dtype\":\"bfloat16\"}",
     327680, 0, 0},
    /* A mixture of experts whose head_dim is not hidden_size by heads. */
    {"Qwen3-30B-A3B",
     "{\"model_type\":\"qwen3_moe\",\"hidden_size\":2048,\"num_attention_heads\":32,"
     "\"num_hidden_layers\":48,\"num_key_value_heads\":4,\"head_dim\":128,\"num_experts\":128,"
     "\"sliding_window\":null,\"use_sliding_window\":false,\"torch_dtype\":\"bfloat16\"}",
     98304, 0, 0},
    {"Mistral-7B-v0.1",
     "{\"model_type\":\"mistral\",\"hidden_size\":4096,\"num_attention_heads\":32,"
     "\"num_hidden_layers\":32,\"num_key_value_heads\":8,\"sliding_window\":4096,"
     "\"torch_dtype\":\"bfloat16\"}",
     131072, 32, 0},
    {"Mixtral-8x7B-v0.1",
     "{\"model_type\":\"mixtral\",\"hidden_size\":4096,\"num_attention_heads\":32,"
     "\"num_hidden_layers\":32,\"num_key_value_heads\":8,\"sliding_window\":null,"
     "\"num_local_experts\":8,\"torch_dtype\":\"bfloat16\"}",
     131072, 0, 0},
    {"gemma-2-9b",
     "{\"model_type\":\"gemma2\",\"hidden_size\":3584,\"num_attention_heads\":16,"
     "\"num_hidden_layers\":42,\"num_key_value_heads\":8,\"head_dim\":256,\"sliding_window\":4096,"
     "\"torch_dtype\":\"float32\"}",
     688128, 21, 0},
    /* Leaves its heads to transformers' defaults, in a part of its own. */
    {"gemma-3-4b-it",
     "{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":\"gemma3_text\","
     "\"hidden_size\":2560,\"num_hidden_layers\":34,\"sliding_window\":1024},"
     "\"torch_dtype\":\"bfloat16\"}",
     139264, 29, 0},
    {"gpt-oss-120b",
     "{\"model_type\":\"gpt_oss\",\"hidden_size\":2880,\"num_attention_heads\":64,"
     "\"num_hidden_layers\":4,\"num_key_value_heads\":8,\"head_dim\":64,\"sliding_window\":128,"
     "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\","
     "\"full_attention\"]}",
     8192, 2, 0},
    /* 70.272 KB, in the same table. */
    {"DeepSeek-V3",
     "{\"model_type\":\"deepseek_v3\",\"hidden_size\":7168,\"num_attention_heads\":128,"
     "\"num_hidden_layers\":61,\"num_key_value_heads\":128,\"kv_lora_rank\":512,"
     "\"qk_rope_head_dim\":64,\"qk_nope_head_dim\":128,\"v_head_dim\":128,"
     "\"quantization_config\":{\"quant_method\":\"fp8\"},\"torch_dtype\":\"bfloat16\"}",
     70272, 0, 0},
    {"DeepSeek-V2-Lite",
     "{\"model_type\":\"deepseek_v2\",\"hidden_size\":2048,\"num_attention_heads\":16,"
     "\"num_hidden_layers\":27,\"kv_lora_rank\":512,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
     "\"torch_dtype\":\"bfloat16\"}",
     31104, 0, 0},
    /* Every fourth of 48 layers has KV: 2 x 12 x 2 x 256 x 2. */
    {"Qwen3-Next-80B-A3B",
     "{\"model_type\":\"qwen3_next\",\"hidden_size\":2048,\"num_attention_heads\":16,"
     "\"num_hidden_layers\":48,\"num_key_value_heads\":2,\"head_dim\":256,"
     "\"full_attention_interval\":4,\"torch_dtype\":\"bfloat16\"}",
     24576, 0, 36},
};

static void read_text(const char *text, struct kv_model *m)
{
    cJSON *config = cJSON_Parse(text);
    char why[KV_WHY_BYTES] = "";

    cr_assert_not_null(config, "%s", text);
    cr_assert_eq(kv_model_read(config, m, why), 0, "%s: %s", text, why);
    cJSON_Delete(config);
}

static struct kv_sizes sizes_of(const struct kv_model *m, struct kv_shape shape)
{
    char why[KV_WHY_BYTES] = "";
    struct kv_sizes s = {0};

    cr_assert_eq(kv_sizes(m, &shape, &s, why), 0, "%s", why);
    return s;
}

Test(kv_size, published_bytes_a_token)
{
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        struct kv_model m;
        struct kv_sizes s;

        read_text(models[i].config, &m);
        s = sizes_of(&m, (struct kv_shape){.tp = 1, .pp = 1, .block_tokens = 16});
        cr_assert_eq(s.token_bytes, models[i].token_bytes, "%s: %llu bytes a token", models[i].name,
                     (unsigned long long)s.token_bytes);
        cr_assert_eq(m.sliding_layers, models[i].sliding, "%s: %u sliding", models[i].name,
                     m.sliding_layers);
        cr_assert_eq(m.recurrent_layers, models[i].recurrent, "%s", models[i].name);
        cr_assert_eq(s.block_bytes, 16 * s.token_bytes);
    }
}

Test(kv_size, ranks_split_heads_and_layers)
{
    struct kv_model m;
    struct kv_sizes s;

    read_text(models[0].config, &m); /* 8 KV heads, 32 layers */
    s = sizes_of(&m, (struct kv_shape){.tp = 4, .pp = 1, .block_tokens = 16});
    cr_assert_eq(s.parts, 4);
    cr_assert_eq(s.token_bytes, 131072);
    cr_assert_eq(s.rank_token_bytes, 131072 / 4);
    cr_assert_eq(s.part_bytes, 16 * 131072 / 4);
    s = sizes_of(&m, (struct kv_shape){.tp = 2, .pp = 2, .block_tokens = 16});
    cr_assert_eq(s.parts, 4);
    cr_assert_eq(s.rank_token_bytes, 131072 / 4);
    /* More ranks than heads: two hold the same head, and one of them stores it. */
    s = sizes_of(&m, (struct kv_shape){.tp = 16, .pp = 1, .block_tokens = 16});
    cr_assert_eq(s.parts, 8);
    cr_assert_eq(s.token_bytes, 131072);
    cr_assert_eq(s.rank_token_bytes, 131072 / 8);
    s = sizes_of(&m, (struct kv_shape){.tp = 1, .pp = 1, .block_tokens = 16, .value_bits = 8});
    cr_assert_eq(s.token_bytes, 65536);
}

Test(kv_size, a_latent_is_stored_once_for_all_ranks)
{
    struct kv_model m;
    struct kv_sizes s;

    read_text(models[10].config, &m);
    cr_assert(m.mla);
    s = sizes_of(&m, (struct kv_shape){.tp = 8, .pp = 1, .block_tokens = 64});
    cr_assert_eq(s.parts, 1);
    cr_assert_eq(s.token_bytes, 70272);
    cr_assert_eq(s.rank_token_bytes, 70272);
    /* 576 bytes of FP8 a layer. */
    s = sizes_of(&m, (struct kv_shape){.tp = 8, .pp = 1, .block_tokens = 64, .value_bits = 8});
    cr_assert_eq(s.token_bytes, 61 * 576);
}

Test(kv_size, fp8_of_the_config)
{
    struct kv_model m;

    read_text("{\"num_hidden_layers\":2,\"num_attention_heads\":2,\"head_dim\":64,"
              "\"quantization_config\":{\"kv_cache_scheme\":{\"num_bits\":8,\"type\":\"float\"}}}",
              &m);
    cr_assert_eq(m.value_bits, 8);
}

Test(kv_size, what_fits_and_what_is_needed_agree)
{
    struct kv_model m;

    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        struct kv_sizes s;

        read_text(models[i].config, &m);
        s = sizes_of(&m, (struct kv_shape){.tp = 2, .pp = 2, .block_tokens = 16});
        for (uint64_t blocks = 1; blocks < 100000; blocks = blocks * 7 + 1) {
            uint64_t dram = kv_dram_bytes(&s, blocks), nvme = kv_nvme_bytes(&s, blocks);

            cr_assert_geq(kv_dram_blocks(&s, dram), blocks, "%s", models[i].name);
            cr_assert_geq(kv_nvme_blocks(&s, nvme), blocks, "%s", models[i].name);
            cr_assert_lt(kv_dram_blocks(&s, dram - s.extent), blocks, "%s", models[i].name);
            cr_assert_lt(kv_nvme_blocks(&s, nvme - s.extent), blocks, "%s", models[i].name);
        }
        cr_assert_eq(kv_nvme_blocks(&s, 0), 0);
    }
}

/* The daemon's own figures: what a slot and a record of the index take. */
Test(kv_size, sizes_are_the_daemon_s)
{
    struct kv_model m;

    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        for (uint32_t tp = 1; tp <= 2; tp++) {
            struct kv_sizes s;
            uint64_t record;

            read_text(models[i].config, &m);
            s = sizes_of(&m, (struct kv_shape){.tp = tp, .pp = 1, .block_tokens = 17});
            record = sizeof(struct block) + s.parts * sizeof(struct part);
            cr_assert_eq(s.slot_bytes, arena_padded(s.part_bytes));
            cr_assert_geq(s.index_bytes, record);
            cr_assert_leq(s.index_bytes, record + 64);
        }
    }
}

Test(kv_size, large_parts_ask_for_a_larger_extent)
{
    struct kv_shape shape = {.tp = 1, .pp = 1, .block_tokens = 1024};
    char why[KV_WHY_BYTES] = "";
    struct kv_model m;
    struct kv_sizes s;

    read_text(models[0].config, &m); /* 128 MiB: a segment has a header besides */
    s = sizes_of(&m, shape);
    cr_assert_eq(s.extent, 256u << 20);
    shape.block_tokens = 65536;
    cr_assert_lt(kv_sizes(&m, &shape, &s, why), 0);
    cr_assert(strstr(why, "--block-tokens") != NULL, "%s", why);
}

Test(kv_size, what_it_cannot_know_is_refused)
{
    static const struct {
        const char *config, *word;
    } wrong[] = {
        {"[]", "no JSON object"},
        {"{}", "num_hidden_layers"},
        {"{\"num_hidden_layers\":-1}", "num_hidden_layers"},
        {"{\"num_hidden_layers\":\"32\"}", "num_hidden_layers"},
        {"{\"num_hidden_layers\":1e9}", "num_hidden_layers"},
        {"{\"num_hidden_layers\":2.5}", "num_hidden_layers"},
        {"{\"num_hidden_layers\":32}", "num_attention_heads"},
        {"{\"num_hidden_layers\":32,\"num_attention_heads\":32}", "head_dim"},
        {"{\"num_hidden_layers\":32,\"num_attention_heads\":3,\"hidden_size\":4096}", "head_dim"},
        {"{\"num_hidden_layers\":32,\"kv_lora_rank\":512}", "qk_rope_head_dim"},
        {"{\"num_hidden_layers\":3,\"layer_types\":[\"full_attention\"]}", "layer_types"},
        {"{\"num_hidden_layers\":1,\"layer_types\":[7]}", "layer_types"},
        {"{\"num_hidden_layers\":1,\"layer_types\":[\"linear_attention\"]}", "no layer"},
    };

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        cJSON *config = cJSON_Parse(wrong[i].config);
        char why[KV_WHY_BYTES] = "";
        struct kv_model m;

        cr_assert_lt(kv_model_read(config, &m, why), 0, "%s", wrong[i].config);
        cr_assert(strstr(why, wrong[i].word) != NULL, "%s: %s", wrong[i].config, why);
        cJSON_Delete(config);
    }
}

Test(kv_size, ranks_that_do_not_divide_are_refused)
{
    struct kv_shape shape = {.tp = 3, .pp = 1, .block_tokens = 16};
    char why[KV_WHY_BYTES] = "";
    struct kv_model m;
    struct kv_sizes s;

    read_text(models[0].config, &m);
    cr_assert_lt(kv_sizes(&m, &shape, &s, why), 0);
    cr_assert(strstr(why, "--tp 3") != NULL, "%s", why);
    shape = (struct kv_shape){.tp = 1, .pp = 33, .block_tokens = 16};
    cr_assert_lt(kv_sizes(&m, &shape, &s, why), 0);
    cr_assert(strstr(why, "--pp 33") != NULL, "%s", why);
}
