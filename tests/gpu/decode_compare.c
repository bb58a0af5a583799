/* The expected result of a step of test_decode: attention by the C of kernels/attend, and entries
 * with the bytes of their blocks. */
#include "tests/gpu/decode.h"

#include "kernels/arith.h"

#include <math.h>
#include <string.h>

uint32_t scene_layer_head(const struct scene *t, uint32_t layer, uint32_t list)
{
    return t->spec.entry == UCM_CUDA_DECODE_HEAD ? layer * t->heads + list : layer;
}

/* Whether entry x of a list comes before y. */
static bool comes_first(const struct scene *t, const struct input_layer *in, uint32_t x, uint32_t y)
{
    bool window = in->index[x] < t->options.sink_blocks,
         other = in->index[y] < t->options.sink_blocks;

    if (window != other)
        return window;
    return !window && in->score[x] != in->score[y] ? in->score[x] > in->score[y] : x < y;
}

uint32_t scene_attended(struct scene *t, const struct output *out, uint32_t layer, uint32_t l,
                        uint32_t index[ROOM])
{
    const struct input_layer *in = &t->input.layer[layer];
    uint32_t n = in->count[l], first = l * ROOM;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t before = i;

        for (uint32_t j = 0; t->spec.rule && j < n; j++)
            before = (j == 0 ? 0 : before) + comes_first(t, in, first + j, first + i);
        index[before] = in->index[first + i];
    }
    return t->spec.rule && out->report[layer][l].blocks < n ? out->report[layer][l].blocks : n;
}

uint32_t scene_chosen(struct scene *t, uint32_t layers)
{
    struct output *out = fresh(sizeof(*out));
    bool in[LAYERS * HEADS * NUMBERS] = {false};
    uint32_t n = 0;

    scene_output(t, out);
    for (uint32_t layer = 0; layer < layers; layer++)
        for (uint32_t l = 0; l < SEQUENCES * t->spec.lists; l++) {
            uint32_t index[ROOM], attended = scene_attended(t, out, layer, l, index);

            for (uint32_t i = 0; i < attended; i++) {
                uint32_t number = (uint32_t)t->input.table[l / t->spec.lists * BLOCKS + index[i]];
                bool *one = &in[scene_layer_head(t, layer, l % t->spec.lists) * NUMBERS + number];

                n += !*one;
                *one = true;
            }
        }
    return n;
}

static float decoded(const struct scene *t, uint16_t bits)
{
    return t->spec.dtype == UCM_SPARSE_F16 ? ucm_f16_decode(bits) : ucm_bf16_decode(bits);
}

/* One KV head of a sequence in a layer. */
static void reference(struct scene *t, const struct output *got, uint32_t layer, uint32_t c,
                      uint32_t g, float *scratch, float *out, float *lse)
{
    const struct input_layer *in = &t->input.layer[layer];
    struct ucm_attend_memory blocks = {t->attended + layer * t->layer_bytes, t->block, NUMBERS};
    struct ucm_attend_memory pages = {t->pages + layer * PAGES * t->layer_bytes, t->layer_bytes,
                                      PAGES};
    uint32_t l = c * t->spec.lists + (t->spec.lists > 1 ? g : 0),
             row = (c * t->heads + g) * t->group;
    uint32_t length = t->input.length[c], n = (length + TOKENS - 1) / TOKENS;
    uint32_t index[ROOM], attended = scene_attended(t, got, layer, l, index);
    float q[HEADS * GROUP * D_MAX], *query = scratch + t->plan.state_floats;
    struct ucm_attend_state state;
    int r = 0;

    for (uint32_t i = 0; i < t->group * t->spec.d; i++)
        q[i] = decoded(t, in->q[row * t->spec.d + i]);
    ucm_attend_query(&t->plan, q, query);
    ucm_attend_begin(&t->plan, &state, scratch);
    for (uint32_t i = 0; i < attended; i++)
        r |= ucm_attend_add(&t->plan, &blocks, g, query, &t->input.table[c * BLOCKS + index[i]], 1,
                            0, &state, NULL, 0);
    r |= ucm_attend_add(&t->plan, &pages, g, query, &t->input.page_table[c * BLOCKS + CHOSEN],
                        n - CHOSEN, length % TOKENS, &state, NULL, 0);
    check(r == 0, "the reference");
    ucm_attend_end(&t->plan, &state, out, lse);
}

void scene_compare(struct scene *t, const char *what)
{
    float by = 6 * (t->spec.dtype == UCM_SPARSE_F16 ? 0x1p-10f : 0x1p-8f);
    float *scratch = fresh(ucm_attend_scratch_floats(&t->plan) * 4);
    float out[HEADS * GROUP * D_MAX], lse[HEADS * GROUP];
    struct output *got = fresh(sizeof(*got));
    uint32_t wrong = 0, d = t->v, lists = SEQUENCES * t->heads;

    scene_output(t, got);
    for (uint32_t i = 0; i < LAYERS * lists; i++) {
        uint32_t layer = i / lists, row = i % lists * t->group;

        reference(t, got, layer, i / t->heads % SEQUENCES, i % t->heads, scratch, out, lse);
        for (uint32_t j = 0; j < t->group * d; j++)
            wrong += !(fabsf(decoded(t, got->out[layer][row * d + j]) - out[j]) <= by);
        for (uint32_t j = 0; j < t->group; j++)
            wrong += !(fabsf(got->lse[layer][row + j] - lse[j]) <= 1e-3f);
    }
    check(wrong == 0, "%s, %s: %u numbers are wrong", t->spec.name, what, wrong);
}

/* Codes of K, codes of V, scales of K, scales of V. */
static bool encoded_wrong(const struct scene *t, const uint8_t *entry, const uint8_t *stored)
{
    const struct ucm_cuda_decode_layout *l = &t->options.stored;
    struct ucm_encoding_spec spec = scene_coding(t, 1);
    uint32_t half = TOKENS * t->spec.d, wrong = 0;
    uint8_t raw[2 * TOKENS * D_MAX], encoded[TOKENS * (D_MAX + 1)];

    for (uint32_t v = 0; v < 2; v++) {
        uint64_t pitch = v ? l->v_token_stride : l->k_token_stride;

        for (uint32_t token = 0; token < TOKENS; token++)
            memcpy(raw + token * t->row, stored + v * l->v_offset + token * pitch, t->row);
        ucm_encode(&spec, 0, raw, encoded);
        for (uint32_t i = 0; i < half; i++) /* an infinity is NaN in an entry */
            encoded[i] |= (encoded[i] & 0x7f) == 0x7e;
        wrong |= memcmp(entry + v * half, encoded, half) != 0;
        wrong |= memcmp(entry + 2 * half + v * TOKENS, encoded + half, TOKENS) != 0;
    }
    return wrong;
}

/* Bytes of an entry that differ from the layer head's of its block. */
static bool entry_wrong(const struct scene *t, const uint8_t *entry, uint32_t layer_head,
                        uint32_t number)
{
    const struct ucm_cuda_decode_layout *l = &t->options.stored;
    const uint8_t *stored = t->mapping.bytes + number * t->block;
    uint64_t row = t->row, half = TOKENS * row;

    if (t->spec.entry == UCM_CUDA_DECODE_LAYER)
        return memcmp(entry, stored + layer_head * t->layer_bytes, t->layer_bytes) != 0;
    stored += layer_head / t->heads * t->layer_bytes + layer_head % t->heads * l->k_head_stride;
    if (t->spec.encoded)
        return encoded_wrong(t, entry, stored);
    for (uint32_t token = 0; token < TOKENS; token++)
        if (memcmp(entry + token * row, stored + token * l->k_token_stride, row) != 0 ||
            (!t->spec.latent && memcmp(entry + half + token * row,
                                       stored + l->v_offset + token * l->v_token_stride, row) != 0))
            return true;
    return false;
}

uint32_t scene_resident(struct scene *t, const char *what)
{
    const struct ucm_entries_shape *shape = &t->decode->plan.shape;
    uint64_t bytes = t->decode->plan.info.entry_bytes, size = ucm_entries_bytes(shape);
    uint8_t *pool = fresh(bytes * t->spec.entries);
    uint32_t there = 0, wrong = 0;
    char why[UCM_ENTRIES_WHY] = "";
    struct ucm_entries s;
    void *memory = fresh(size);

    gpu_get(memory, t->decode->tables, size);
    gpu_get(pool, t->pool, bytes * t->spec.entries);
    ucm_entries_layout(&s, shape, memory);
    check(ucm_entries_verify(&s, why) == 0, "%s, %s: %s", t->spec.name, what, why);
    for (uint32_t key = 0; key < shape->layer_heads * NUMBERS; key++)
        if (s.entry_of[key] >= 0) {
            there++;
            wrong += entry_wrong(t, pool + (uint32_t)s.entry_of[key] * bytes, key / NUMBERS,
                                 key % NUMBERS);
        }
    check(wrong == 0, "%s, %s: %u of %u entries are wrong", t->spec.name, what, wrong, there);
    return there;
}
