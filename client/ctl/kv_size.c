#include "client/ctl/kv_size.h"

#include "daemon/format/nvme_format.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* More is a mistake in the file. Products of these stay far below 2^64. */
#define MAX_LAYERS 4096
#define MAX_VALUES (1u << 20)

#define SLOT_ALIGN 4096u /* arena.c pads slots to it */
#define EXTENT_USUAL (64ull << 20)
#define EXTENT_MAX (1ull << 30)

__attribute__((format(printf, 2, 3))) static int refuse(char why[KV_WHY_BYTES], const char *format,
                                                        ...)
{
    va_list ap;

    va_start(ap, format);
    vsnprintf(why, KV_WHY_BYTES, format, ap);
    va_end(ap);
    return -EINVAL;
}

/* ---- reading a config ---- */

/* What transformers assumes where a config of this type says nothing. Only types whose published
 * configs leave fields out. */
struct assumed {
    const char *type, *field;
    uint32_t value;
};
static const struct assumed assumed[] = {
    {"gemma3_text", "num_attention_heads", 8},
    {"gemma3_text", "num_key_value_heads", 4},
    {"gemma3_text", "head_dim", 256},
    {"gemma3_text", "sliding_window", 4096},
    {"gemma3_text", "sliding_window_pattern", 6},
    {"gemma2", "head_dim", 256},
    {"llama4_text", "no_rope_layer_interval", 4},
    {"gemma2", "sliding_window", 4096},
    {"gemma2", "sliding_window_pattern", 2},
};

/* A config, or the part of it that describes the language model, with the whole behind it. */
struct source {
    const cJSON *text, *whole;
    const char *type;
};

static const cJSON *field(const struct source *s, const char *name)
{
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(s->text, name);

    return found != NULL && !cJSON_IsNull(found) ? found
                                                 : cJSON_GetObjectItemCaseSensitive(s->whole, name);
}

/* 0 with *out; *out 0 where there is none. -EINVAL: it is no number that can be. */
static int number(const struct source *s, const char *name, uint32_t max, uint32_t *out,
                  char why[KV_WHY_BYTES])
{
    const cJSON *found = field(s, name);
    double v;

    *out = 0;
    for (size_t i = 0; i < sizeof(assumed) / sizeof(assumed[0]); i++)
        if (strcmp(assumed[i].type, s->type) == 0 && strcmp(assumed[i].field, name) == 0)
            *out = assumed[i].value;
    if (found == NULL || cJSON_IsNull(found))
        return 0;
    v = cJSON_GetNumberValue(found);
    if (!cJSON_IsNumber(found) || v < 0 || v > max || v != (double)(uint32_t)v)
        return refuse(why, "%s: wanted a whole number up to %u", name, max);
    *out = (uint32_t)v;
    return 0;
}

/* The first of several names that is there. */
static int number_of(const struct source *s, const char *const *names, uint32_t max, uint32_t *out,
                     char why[KV_WHY_BYTES])
{
    int rc;

    do
        rc = number(s, *names, max, out, why);
    while (rc == 0 && *out == 0 && *++names != NULL);
    return rc;
}

static void read_dtype(const struct source *s, struct kv_model *m)
{
    static const struct {
        const char *name;
        uint32_t bits;
    } known[] = {{"bfloat16", 16}, {"float16", 16},      {"half", 16},      {"float32", 32},
                 {"float", 32},    {"float8_e4m3fn", 8}, {"float8_e5m2", 8}};
    const cJSON *said = field(s, "dtype");
    const cJSON *quantized =
        cJSON_GetObjectItemCaseSensitive(field(s, "quantization_config"), "kv_cache_scheme");
    double bits = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(quantized, "num_bits"));
    const char *text;

    if (!cJSON_IsString(said))
        said = field(s, "torch_dtype");
    text = cJSON_GetStringValue(said);
    snprintf(m->dtype, sizeof(m->dtype), "%s", text != NULL ? text : "bfloat16 assumed");
    m->value_bits = 16;
    for (size_t i = 0; text != NULL && i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(known[i].name, text) == 0)
            m->value_bits = known[i].bits;
    if (bits == 4 || bits == 8) {
        snprintf(m->dtype, sizeof(m->dtype), "%d-bit KV", (int)bits);
        m->value_bits = (uint32_t)bits;
    }
}

/* layer_types: one word a layer. */
static int read_layer_types(const cJSON *types, struct kv_model *m, char why[KV_WHY_BYTES])
{
    const cJSON *type;
    uint32_t of = m->layers;

    if ((uint32_t)cJSON_GetArraySize(types) != of)
        return refuse(why, "layer_types has %d words for %u layers", cJSON_GetArraySize(types), of);
    cJSON_ArrayForEach(type, types) {
        const char *word = cJSON_GetStringValue(type);

        if (word == NULL)
            return refuse(why, "layer_types: wanted words");
        if (strstr(word, "linear") != NULL || strstr(word, "mamba") != NULL ||
            strstr(word, "recurrent") != NULL || strstr(word, "conv") != NULL)
            m->recurrent_layers++;
        else if (strstr(word, "sliding") != NULL || strstr(word, "chunked") != NULL)
            m->sliding_layers++;
    }
    m->layers -= m->recurrent_layers;
    return m->layers > 0 ? 0 : refuse(why, "no layer has KV");
}

/* Which layers slide, in the several ways that configs say it. */
static int read_layers(const struct source *s, struct kv_model *m, char why[KV_WHY_BYTES])
{
    static const char *const windows[] = {"sliding_window", "attention_chunk_size", NULL};
    static const char *const patterns[] = {"sliding_window_pattern", "_sliding_window_pattern",
                                           "no_rope_layer_interval", NULL};
    const cJSON *types = field(s, "layer_types"), *use = field(s, "use_sliding_window");
    uint32_t pattern, interval, max_window;
    int rc = number_of(s, windows, UINT32_MAX, &m->window, why);

    if (rc == 0)
        rc = number_of(s, patterns, MAX_LAYERS, &pattern, why);
    if (rc == 0)
        rc = number(s, "full_attention_interval", MAX_LAYERS, &interval, why);
    if (rc == 0)
        rc = number(s, "max_window_layers", MAX_LAYERS, &max_window, why);
    if (rc != 0)
        return rc;
    if (cJSON_IsArray(types))
        return read_layer_types(types, m, why);
    if (interval > 1) { /* every interval-th layer has full attention, the others recurrent state */
        m->recurrent_layers = m->layers - m->layers / interval;
        m->layers /= interval;
        m->window = 0;
        return m->layers > 0 ? 0 : refuse(why, "no layer has KV");
    }
    if (m->window == 0 || cJSON_IsFalse(use) || (max_window > 0 && max_window >= m->layers))
        m->window = 0;
    else if (pattern > 1) /* every pattern-th layer sees everything */
        m->sliding_layers = m->layers - m->layers / pattern;
    else
        m->sliding_layers = m->layers - (cJSON_IsTrue(use) ? max_window : 0);
    return 0;
}

/* DeepSeek's: one latent and one rotary key a token and layer. */
static int read_mla(const struct source *s, uint32_t rank, struct kv_model *m,
                    char why[KV_WHY_BYTES])
{
    uint32_t rope, index_dim;
    int rc = number(s, "qk_rope_head_dim", MAX_VALUES, &rope, why);

    if (rc == 0)
        rc = number(s, "index_head_dim", MAX_VALUES, &index_dim, why);
    if (rc != 0)
        return rc;
    if (rope == 0)
        return refuse(why, "kv_lora_rank without qk_rope_head_dim");
    m->mla = 1;
    m->heads = 1;
    m->k_dim = rank + rope;
    /* The indexer's keys are FP8 with a 4-byte scale for each 128, whatever the KV is. */
    m->index_bytes = index_dim + (index_dim + 127) / 128 * 4;
    return 0;
}

static int read_heads(const struct source *s, struct kv_model *m, char why[KV_WHY_BYTES])
{
    static const char *const heads_names[] = {"num_attention_heads", "n_head", "num_heads", NULL};
    static const char *const kv_names[] = {"num_key_value_heads", "num_kv_heads",
                                           "multi_query_group_num", NULL};
    static const char *const hidden_names[] = {"hidden_size", "n_embd", "d_model", NULL};
    static const char *const dim_names[] = {"head_dim", "kv_channels", NULL};
    uint32_t heads, hidden;
    int rc = number_of(s, heads_names, MAX_VALUES, &heads, why);

    if (rc == 0)
        rc = number_of(s, kv_names, MAX_VALUES, &m->heads, why);
    if (rc == 0)
        rc = number_of(s, dim_names, MAX_VALUES, &m->k_dim, why);
    if (rc == 0)
        rc = number_of(s, hidden_names, MAX_VALUES, &hidden, why);
    if (rc == 0)
        rc = number(s, "v_head_dim", MAX_VALUES, &m->v_dim, why);
    if (rc != 0)
        return rc;
    if (m->heads == 0) { /* multi-head attention, or Falcon's one */
        m->heads = cJSON_IsTrue(field(s, "multi_query")) ? 1 : heads;
        if (m->heads == 0)
            return refuse(why, "num_attention_heads is missing");
    }
    if (m->k_dim == 0) {
        if (heads == 0 || hidden == 0 || hidden % heads != 0)
            return refuse(why, "head_dim is missing, and hidden_size by num_attention_heads does "
                               "not tell it");
        m->k_dim = hidden / heads;
    }
    if (m->v_dim == 0)
        m->v_dim = m->k_dim;
    return 0;
}

int kv_model_read(const cJSON *config, struct kv_model *out, char why[KV_WHY_BYTES])
{
    static const char *const layers_names[] = {"num_hidden_layers", "n_layer", "num_layers",
                                               "n_layers", NULL};
    static const char *const length_names[] = {"max_position_embeddings", "n_positions",
                                               "seq_length", NULL};
    struct source s = {.whole = config, .type = ""};
    struct kv_model m = {.layers = 0};
    uint32_t rank = 0;
    int rc;

    if (!cJSON_IsObject(config))
        return refuse(why, "this is no JSON object");
    s.text = cJSON_GetObjectItemCaseSensitive(config, "text_config");
    if (!cJSON_IsObject(s.text))
        s.text = config;
    if (cJSON_IsString(field(&s, "model_type")))
        s.type = cJSON_GetStringValue(field(&s, "model_type"));
    for (size_t i = 0; s.type[i] != '\0' && i + 1 < sizeof(m.type); i++)
        m.type[i] = (char)(s.type[i] > ' ' && s.type[i] < 0x7f ? s.type[i] : '?');
    rc = number_of(&s, layers_names, MAX_LAYERS, &m.layers, why);
    if (rc == 0 && m.layers == 0)
        rc = refuse(why, "num_hidden_layers is missing: is this a model's config.json?");
    if (rc == 0)
        rc = number_of(&s, length_names, UINT32_MAX, &m.max_tokens, why);
    if (rc == 0)
        rc = number(&s, "kv_lora_rank", MAX_VALUES, &rank, why);
    if (rc == 0)
        rc = read_layers(&s, &m, why);
    if (rc == 0)
        rc = rank > 0 ? read_mla(&s, rank, &m, why) : read_heads(&s, &m, why);
    if (rc != 0)
        return rc;
    read_dtype(&s, &m);
    *out = m;
    return 0;
}

/* ---- sizes ---- */

static uint64_t up(uint64_t v, uint64_t unit)
{
    return (v + unit - 1) / unit * unit;
}

/* Of one layer and token, for so many heads. */
static uint64_t layer_bytes(const struct kv_model *m, const struct kv_shape *shape, uint32_t heads)
{
    uint64_t bits = shape->value_bits > 0 ? shape->value_bits : m->value_bits;

    return ((uint64_t)heads * (m->k_dim + m->v_dim) * bits + 7) / 8 + m->index_bytes;
}

/* A record of the index, and its fraction of a hash bucket: as index.max_blocks counts it. */
static uint64_t index_bytes(uint32_t parts)
{
    return up(64 + 24ull * parts, 32) + 32;
}

int kv_sizes(const struct kv_model *m, const struct kv_shape *shape, struct kv_sizes *out,
             char why[KV_WHY_BYTES])
{
    uint32_t stored = m->mla ? 1 : shape->tp < m->heads ? shape->tp : m->heads;
    uint32_t rank_heads = m->heads / stored, most = (m->layers + shape->pp - 1) / shape->pp;
    struct kv_sizes s = {.extent = EXTENT_USUAL};

    if (shape->pp > m->layers)
        return refuse(why, "--pp %u: the model has %u layers", shape->pp, m->layers);
    if (m->heads % stored != 0 || (!m->mla && shape->tp % stored != 0))
        return refuse(why, "--tp %u does not divide %u KV heads evenly", shape->tp, m->heads);
    s.parts = stored * shape->pp;
    s.token_bytes = layer_bytes(m, shape, rank_heads) * m->layers * stored;
    s.rank_token_bytes = layer_bytes(m, shape, rank_heads) * most;
    s.part_bytes = s.rank_token_bytes * shape->block_tokens;
    s.block_bytes = s.token_bytes * shape->block_tokens;
    s.slot_bytes = up(s.part_bytes, SLOT_ALIGN);
    s.record_bytes = nvme_stride(s.part_bytes);
    s.index_bytes = index_bytes(s.parts);
    while (s.extent < s.slot_bytes || nvme_records(s.extent, s.record_bytes) == 0) {
        s.extent *= 2;
        if (s.extent > EXTENT_MAX)
            return refuse(why,
                          "a part of a block takes %llu bytes: the daemon takes 1GiB at most; "
                          "fewer --block-tokens?",
                          (unsigned long long)s.part_bytes);
    }
    *out = s;
    return 0;
}

uint64_t kv_dram_blocks(const struct kv_sizes *s, uint64_t bytes)
{
    return bytes / s->extent * (s->extent / s->slot_bytes) / s->parts;
}

uint64_t kv_nvme_blocks(const struct kv_sizes *s, uint64_t bytes)
{
    uint64_t segments = bytes > NVME_DATA_OFFSET ? (bytes - NVME_DATA_OFFSET) / s->extent : 0;

    return segments * nvme_records(s->extent, s->record_bytes) / s->parts;
}

uint64_t kv_dram_bytes(const struct kv_sizes *s, uint64_t blocks)
{
    return up(blocks * s->parts, s->extent / s->slot_bytes) / (s->extent / s->slot_bytes) *
           s->extent;
}

uint64_t kv_nvme_bytes(const struct kv_sizes *s, uint64_t blocks)
{
    uint64_t each = nvme_records(s->extent, s->record_bytes);

    return NVME_DATA_OFFSET + up(blocks * s->parts, each) / each * s->extent;
}
