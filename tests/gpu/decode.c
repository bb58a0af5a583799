/* test_decode [--few]: decode steps of libucmclient_cuda against the C of kernels/attend, over a mapping that this program
 * plays. */
#include "tests/gpu/decode.h"

#include "client/cuda/error.h"
#include "kernels/arith.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

/* ---- layers and pages ---- */

static struct ucm_cuda_decode_layout layout(const struct scene *t, bool heads_first)
{
    uint64_t token = heads_first ? t->row : t->row * t->heads;
    uint64_t head = heads_first ? t->row * TOKENS : t->row;

    return (struct ucm_cuda_decode_layout){.k_token_stride = token,
                                           .k_head_stride = head,
                                           .v_offset = t->spec.latent ? 0 : t->layer_bytes / 2,
                                           .v_token_stride = token,
                                           .v_head_stride = head};
}

/* E4M3: any but NaN, and no more than 7.5. */
static void draw_bytes(const struct scene *t, uint8_t *at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes && t->spec.narrow; i++)
        at[i] = (uint8_t)(rnd_below(2) << 7 | rnd_below(0x50));
    for (uint64_t i = 0; i < bytes / 2 && !t->spec.narrow; i++)
        rnd_element(t->spec.dtype == UCM_SPARSE_BF16, 1, (uint16_t *)(void *)(at + 2 * i));
}

/* K or V of a layer of a block, in either order: a row has a scale of its own. */
struct ucm_encoding_spec scene_coding(const struct scene *t, uint32_t heads)
{
    struct ucm_encoding_tensor tensor = {
        .tokens = TOKENS, .heads = heads, .dim = t->spec.d, .order = UCM_ENCODING_HND};

    return (struct ucm_encoding_spec){.encoding = UCM_ENCODING_FP8,
                                      .version = 1,
                                      .dtype = t->spec.dtype,
                                      .n_tensors = 1,
                                      .tensor = {tensor}};
}

/* Rows of different sizes, and an infinity in a block that no sequence has. */
static void blocks_vary(struct scene *t)
{
    uint16_t *row = (uint16_t *)(void *)t->mapping.bytes;
    uint32_t sign = t->spec.dtype == UCM_SPARSE_BF16 ? 7 : 10, d = t->spec.d;

    for (uint64_t i = 0; i < NUMBERS * t->block / t->row; i++, row += d) {
        uint32_t by = rnd_below(8);

        for (uint32_t c = 0; c < d; c++) /* less by 2^by, but no denormals */
            if ((row[c] & 0x7fffu) >> sign > by)
                row[c] = (uint16_t)(row[c] - (by << sign));
    }
    row = (uint16_t *)(void *)(t->mapping.bytes + STRANGER * t->block);
    row[3] = (uint16_t)(t->spec.dtype == UCM_SPARSE_BF16 ? 0xff80 : 0xfc00);
}

static void blocks_code(struct scene *t)
{
    struct ucm_encoding_spec spec = scene_coding(t, HEADS);
    uint64_t half = t->layer_bytes / 2;
    uint8_t *encoded = fresh(ucm_encoding_bytes(&spec, 0));

    blocks_vary(t);
    for (uint64_t at = 0; at < NUMBERS * t->block; at += half) {
        ucm_encode(&spec, 0, t->mapping.bytes + at, encoded);
        ucm_decode(&spec, 0, encoded, t->attended + at);
    }
}

static void blocks_make(struct scene *t)
{
    draw_bytes(t, t->mapping.bytes, NUMBERS * t->block);
    t->attended = fresh(NUMBERS * t->block);
    if (t->spec.encoded)
        blocks_code(t);
    else
        memcpy(t->attended, t->mapping.bytes, NUMBERS * t->block);
    t->blocks = gpu_put(0, t->mapping.bytes, NUMBERS * t->block);
}

/* The other order of tokens and heads. */
static void turn(const struct scene *t, const uint8_t *stored, uint8_t *page)
{
    const struct ucm_cuda_decode_layout *a = &t->options.stored, *b = &t->options.page;

    for (uint32_t token = 0; token < TOKENS; token++)
        for (uint32_t head = 0; head < t->heads; head++) {
            uint64_t from = token * a->k_token_stride + head * a->k_head_stride;
            uint64_t to = token * b->k_token_stride + head * b->k_head_stride;

            memcpy(page + to, stored + from, t->row);
            memcpy(page + b->v_offset + to, stored + a->v_offset + from, t->row);
        }
}

static void pages_make(struct scene *t)
{
    uint8_t *turned = fresh(LAYERS * PAGES * t->layer_bytes);

    t->pages = fresh(LAYERS * PAGES * t->layer_bytes);
    draw_bytes(t, t->pages, LAYERS * PAGES * t->layer_bytes);
    for (uint32_t i = 0; i < LAYERS * PAGES; i++)
        turn(t, t->pages + i * t->layer_bytes, turned + i * t->layer_bytes);
    t->gpu_pages = gpu_put(0, turned, LAYERS * PAGES * t->layer_bytes);
}

/* ---- a scene ---- */

static void plan_make(struct scene *t)
{
    const struct ucm_cuda_decode_layout *l = &t->options.stored;
    struct ucm_attend_spec spec = {.group = t->group, .scale = t->options.scale};
    char why[UCM_SPARSE_WHY] = "";

    spec.k_scale = t->options.k_scale;
    spec.v_scale = t->options.v_scale;
    spec.shape = (struct ucm_kv_shape){.dtype = t->spec.narrow ? UCM_KV_FP8_E4M3 : t->spec.dtype,
                                       .tokens = TOKENS,
                                       .kv_heads = t->heads,
                                       .head_dim = t->spec.d,
                                       .v_head_dim = t->v,
                                       .rope_dim = t->spec.d - t->v,
                                       .k_token_stride = l->k_token_stride,
                                       .k_head_stride = l->k_head_stride,
                                       .v_offset = l->v_offset,
                                       .v_token_stride = l->v_token_stride,
                                       .v_head_stride = l->v_head_stride};
    check(ucm_attend_plan_init(&t->plan, &spec, why) == 0, "a plan: %s", why);
}

static void options_make(struct scene *t)
{
    const struct scene_spec *s = &t->spec;
    uint64_t bytes;

    t->options = (struct ucm_cuda_decode_options){
        .layers = LAYERS,
        .q_heads = HEADS * GROUP,
        .kv_heads = t->heads,
        .head_dim = s->d,
        .v_head_dim = t->v,
        .scale = s->latent ? 0.05f : 0,
        .dtype = s->dtype,
        .kv_dtype = s->narrow ? UCM_SPARSE_FP8_E4M3 : 0,
        .k_scale = s->narrow ? 0.25f : 0,
        .v_scale = !s->narrow  ? 0
                   : s->latent ? 0.25f
                               : 0.5f,
        .tokens = TOKENS,
        .entry = s->entry,
        .entries = s->entries,
        .numbers = NUMBERS,
        .requests = SEQUENCES,
        .sequences = SEQUENCES,
        .lists = s->lists,
        .room = ROOM,
        .window = WINDOW,
        .stored = layout(t, s->heads_first),
        .layer_bytes = t->layer_bytes,
        .page = layout(t, !s->heads_first),
        .rule = s->rule,
        .known = s->rule == UCM_CUDA_DECODE_ESTIMATED ? UCM_CUDA_DECODE_ESTIMATES
                                                      : UCM_CUDA_DECODE_BOUNDS,
        .eps = s->eps,
        .rounds = ROUNDS,
        .every = 2,
        .first = 2,
        .sink_blocks = 1,
        .encoding = s->encoded ? UCM_CUDA_DECODE_FP8 : UCM_CUDA_DECODE_AS_STORED,
    };
    check(ucm_cuda_decode_entry_bytes(&t->options, &bytes) == 0, "%s", ucm_cuda_errmsg());
    t->pool = t->options.block_pool = gpu_new(bytes * s->entries);
}

static void input_fixed(struct scene *t)
{
    struct input *in = &t->input;

    for (uint32_t c = 0; c < SEQUENCES; c++) {
        in->request[c] = c;
        in->first[c] = CHOSEN;
        in->candidates[c] = CHOSEN;
        in->least[c] = c == 1 ? UINT32_MAX : c; /* sequence 1 is dense */
        for (uint32_t i = 0; i < BLOCKS; i++) { /* half of their blocks are the same */
            in->table[c * BLOCKS + i] = (int32_t)(i < 10 ? i : (10 + c * 14 + i) % NUMBERS);
            in->page_table[c * BLOCKS + i] = i < CHOSEN ? -1 : (int32_t)rnd_below(PAGES);
        }
    }
}

void scene_open(struct scene *t, const struct scene_spec *spec)
{
    memset(t, 0, sizeof(*t));
    t->spec = *spec;
    t->row = spec->d * (spec->narrow ? 1ull : 2ull);
    t->heads = spec->latent ? 1 : HEADS;
    t->group = HEADS * GROUP / t->heads;
    t->v = spec->latent ? 512 : spec->d;
    t->layer_bytes = (spec->latent ? 1 : 2) * TOKENS * t->heads * t->row;
    t->block = LAYERS * t->layer_bytes;
    options_make(t);
    plan_make(t);
    mapping_open(&t->mapping, NUMBERS * t->block);
    mapping_open(&t->table, 4096);
    blocks_make(t);
    pages_make(t);
    input_fixed(t);
    t->gpu_input = gpu_new(sizeof(t->input));
    t->gpu_output = gpu_new(sizeof(struct output));
    check(ucm_cuda_decode_open(gpu_uuid, &t->options, &t->decode) == 0, "%s: %s", spec->name,
          ucm_cuda_errmsg());
    scene_places(t);
}

void scene_close(struct scene *t)
{
    if (t->graph)
        must(cuGraphExecDestroy(t->graph), "the graph");
    ucm_cuda_decode_close(t->decode);
    mapping_close(&t->mapping);
    mapping_close(&t->table);
    memory_end();
}

/* ---- the mapping ---- */

_Atomic uint64_t *scene_seq(struct scene *t, uint32_t number)
{
    return (_Atomic uint64_t *)(void *)(t->table.bytes + 8 * number);
}

void scene_places(struct scene *t)
{
    for (uint32_t i = 0; i < NUMBERS; i++) {
        *scene_seq(t, i) = 2;
        t->decode->place[i] =
            (struct ucm_entries_place){t->mapping.gpu + i * t->block, t->table.gpu + 8 * i, 2};
    }
    must(decode_places_upload(t->decode, 0, NUMBERS - 1, gpu_stream), "places");
}

void scene_no_place(struct scene *t, uint32_t number)
{
    check(ucm_cuda_decode_places(t->decode, NULL, &number, NULL, 1, gpu_stream) == 0, "%s",
          ucm_cuda_errmsg());
}

/* ---- a step ---- */

void scene_draw(struct scene *t)
{
    for (uint32_t c = 0; c < SEQUENCES; c++)
        t->input.length[c] = CHOSEN * TOKENS + 1 + rnd_below(WINDOW * TOKENS);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct input_layer *in = &t->input.layer[layer];

        for (uint32_t l = 0; l < SEQUENCES * t->spec.lists; l++) {
            uint32_t at = 0, most = t->spec.rule ? CHOSEN : MOST;

            for (uint32_t i = 0; i < CHOSEN && at < most; i++) /* ascending, as a selection is */
                if (t->spec.rule ? l == 1 || rnd_below(6) > 0 : rnd_below(3) == 0)
                    in->index[l * ROOM + at++] = i;
            in->count[l] = at;
            for (; at < ROOM; at++)
                in->index[l * ROOM + at] = UCM_CUDA_SELECT_NONE;
        }
        for (uint32_t i = 0; i < SEQUENCES * HEADS * ROOM; i++)
            in->score[i] = rnd_normal();
        for (uint32_t i = 0; i < SEQUENCES * HEADS * GROUP * CHOSEN; i++) /* of 16 tokens */
            in->head_score[i] = t->options.known == UCM_CUDA_DECODE_BOUNDS ? 4.0f + rnd_normal()
                                                                           : 2.0f + rnd_normal();
        for (uint32_t i = 0; i < SEQUENCES * HEADS * GROUP * t->spec.d; i++)
            rnd_element(t->spec.dtype == UCM_SPARSE_BF16, 1.5f, &in->q[i]);
    }
    gpu_put(t->gpu_input, &t->input, sizeof(t->input));
}

static void launch_all(struct scene *t)
{
    uint64_t in = t->gpu_input, out = t->gpu_output;
    int r = ucm_cuda_decode_begin(t->decode, gpu_stream);

    for (uint32_t layer = 0; r == 0 && layer < LAYERS; layer++) {
        uint64_t at = in + offsetof(struct input, layer) + layer * sizeof(struct input_layer);
        struct ucm_cuda_decode_layer l = {
            .layer = layer,
            .sequences = SEQUENCES,
            .index = at + offsetof(struct input_layer, index),
            .count = at + offsetof(struct input_layer, count),
            .table = in + offsetof(struct input, table),
            .table_stride = BLOCKS,
            .request = in + offsetof(struct input, request),
            .pages = t->gpu_pages + layer * PAGES * t->layer_bytes,
            .page_stride = t->layer_bytes,
            .page_bound = PAGES,
            .page_table = in + offsetof(struct input, page_table),
            .page_table_stride = BLOCKS,
            .first = in + offsetof(struct input, first),
            .length = in + offsetof(struct input, length),
            .q = at + offsetof(struct input_layer, q),
            .out =
                out + offsetof(struct output, out) + layer * sizeof(((struct output *)0)->out[0]),
            .lse =
                out + offsetof(struct output, lse) + layer * sizeof(((struct output *)0)->lse[0]),
            .candidates = in + offsetof(struct input, candidates),
            .score = at + offsetof(struct input_layer, score),
            .head_scores = at + offsetof(struct input_layer, head_score),
            .head_pitch = CHOSEN,
            .least = in + offsetof(struct input, least),
            .report = out + offsetof(struct output, report) +
                      layer * sizeof(((struct output *)0)->report[0]),
        };

        r = ucm_cuda_decode_layer(t->decode, &l, gpu_stream);
    }
    if (r == 0)
        r = ucm_cuda_decode_end(t->decode, gpu_stream);
    check(r == 0, "%s: launches: %s", t->spec.name, r ? ucm_cuda_errmsg() : "");
}

static struct ucm_cuda_decode_result result(struct scene *t)
{
    struct ucm_cuda_decode_result r = {0};

    gpu_sync();
    check(ucm_cuda_decode_result(t->decode, &r) == 0, "%s", ucm_cuda_errmsg());
    return r;
}

struct ucm_cuda_decode_result scene_step(struct scene *t)
{
    launch_all(t);
    return result(t);
}

struct ucm_cuda_decode_result scene_replay(struct scene *t)
{
    CUgraph graph;

    if (!t->graph) {
        must(cuStreamBeginCapture(gpu_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture");
        launch_all(t);
        must(cuStreamEndCapture(gpu_stream, &graph), "capture");
        must(cuGraphInstantiate(&t->graph, graph, 0), "the graph");
        must(cuGraphDestroy(graph), "the graph");
    }
    must(cuGraphLaunch(t->graph, gpu_stream), "the graph");
    return result(t);
}

void scene_output(struct scene *t, struct output *out)
{
    memset(out, 0, sizeof(*out));
    for (uint32_t i = 0; i < LAYERS; i++) { /* what a shorter row leaves is anything */
        gpu_get(out->out[i], t->gpu_output + offsetof(struct output, out) + i * sizeof(out->out[0]),
                2ull * SEQUENCES * HEADS * GROUP * t->v);
        gpu_get(out->lse[i], t->gpu_output + offsetof(struct output, lse) + i * sizeof(out->lse[0]),
                sizeof(out->lse[0]));
        if (t->spec.rule)
            gpu_get(out->report[i],
                    t->gpu_output + offsetof(struct output, report) + i * sizeof(out->report[0]),
                    SEQUENCES * t->spec.lists * sizeof(out->report[0][0]));
    }
}

void scene_forget(struct scene *t)
{
    uint32_t numbers[NUMBERS];

    for (uint32_t i = 0; i < NUMBERS; i++)
        numbers[i] = i;
    check(ucm_cuda_decode_forget(t->decode, numbers, NUMBERS, gpu_stream) == 0, "%s",
          ucm_cuda_errmsg());
    scene_places(t);
}

uint32_t scene_serve(struct scene *t)
{
    struct ucm_cuda_decode_key key[LAYERS * HEADS * NUMBERS];
    struct ucm_cuda_decode_put put[LAYERS * HEADS * NUMBERS];
    uint32_t n = 0, placed = 0;

    check(ucm_cuda_decode_unserved(t->decode, key, LAYERS * HEADS * NUMBERS, &n, gpu_stream) == 0,
          "%s", ucm_cuda_errmsg());
    for (uint32_t i = 0; i < n; i++)
        put[i] = (struct ucm_cuda_decode_put){.key = key[i],
                                              .request = i % SEQUENCES,
                                              .from = t->blocks + key[i].number * t->block +
                                                      key[i].layer * t->layer_bytes};
    check(ucm_cuda_decode_put(t->decode, put, n, &placed, gpu_stream) == 0, "%s",
          ucm_cuda_errmsg());
    check(placed == n, "%s: %u of %u were put", t->spec.name, placed, n);
    scene_resident(t, "put");
    return n;
}

int main(int argc, char **argv)
{
    static const struct scene_spec specs[] = {
        {"heads, tokens first", UCM_CUDA_DECODE_HEAD, HEADS, 128, UCM_SPARSE_BF16, 200, false,
         false, 0, 0, false, false},
        {"heads first", UCM_CUDA_DECODE_HEAD, HEADS, 64, UCM_SPARSE_F16, 400, true, false, 0, 0,
         false, false},
        {"layers", UCM_CUDA_DECODE_LAYER, HEADS, 128, UCM_SPARSE_BF16, 160, true, false, 0, 0,
         false, false},
        {"layers, one list", UCM_CUDA_DECODE_LAYER, 1, 64, UCM_SPARSE_BF16, 200, false, false, 0, 0,
         false, false},
        {"heads, FP8", UCM_CUDA_DECODE_HEAD, HEADS, 64, UCM_SPARSE_F16, 200, false, true, 0, 0,
         false, false},
        {"layers, FP8", UCM_CUDA_DECODE_LAYER, HEADS, 128, UCM_SPARSE_BF16, 160, true, true, 0, 0,
         false, false},
        {"encoded, tokens first", UCM_CUDA_DECODE_HEAD, HEADS, 128, UCM_SPARSE_BF16, 200, false,
         false, 0, 0, true, false},
        {"encoded, heads first", UCM_CUDA_DECODE_HEAD, HEADS, 64, UCM_SPARSE_F16, 200, true, false,
         0, 0, true, false},
        {"latents", UCM_CUDA_DECODE_HEAD, 1, 576, UCM_SPARSE_BF16, 120, false, false, 0, 0, false,
         true},
        {"latents in layers", UCM_CUDA_DECODE_LAYER, 1, 576, UCM_SPARSE_F16, 120, false, false, 0,
         0, false, true},
        {"latents, FP8", UCM_CUDA_DECODE_HEAD, 1, 576, UCM_SPARSE_BF16, 120, false, true, 0, 0,
         false, true},
    };
    static const struct scene_spec rounds[] = {
        {"rounds, psa", UCM_CUDA_DECODE_HEAD, HEADS, 128, UCM_SPARSE_BF16, 400, false, false,
         UCM_CUDA_DECODE_PSA, 0.7f, false, false},
        {"rounds, estimated", UCM_CUDA_DECODE_HEAD, HEADS, 64, UCM_SPARSE_F16, 400, true, false,
         UCM_CUDA_DECODE_ESTIMATED, 0.9f, false, false},
        {"rounds, certified, one list", UCM_CUDA_DECODE_LAYER, 1, 128, UCM_SPARSE_BF16, 400, true,
         false, UCM_CUDA_DECODE_CERTIFIED, 0.3f, false, false},
        {"rounds, estimated, FP8", UCM_CUDA_DECODE_HEAD, HEADS, 64, UCM_SPARSE_F16, 400, false,
         true, UCM_CUDA_DECODE_ESTIMATED, 0.9f, false, false},
        {"rounds, all", UCM_CUDA_DECODE_HEAD, HEADS, 128, UCM_SPARSE_BF16, 400, false, false,
         UCM_CUDA_DECODE_ESTIMATED, 1.0f, false, false},
        {"rounds, estimated, encoded", UCM_CUDA_DECODE_HEAD, HEADS, 128, UCM_SPARSE_BF16, 400, true,
         false, UCM_CUDA_DECODE_ESTIMATED, 0.9f, true, false},
        {"rounds, certified, encoded", UCM_CUDA_DECODE_HEAD, HEADS, 64, UCM_SPARSE_F16, 400, false,
         false, UCM_CUDA_DECODE_CERTIFIED, 0.3f, true, false},
    };

    gpu_begin(argc, argv);
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        test_decode_steps(&specs[i]);
        test_decode_between(&specs[i]);
    }
    for (size_t i = 0; i < sizeof(rounds) / sizeof(rounds[0]); i++)
        test_decode_rounds(&rounds[i]);
    return gpu_end();
}
