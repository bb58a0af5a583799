/* What the files of test_decode share: a worker's pool, blocks as the daemon has them, and a step.
 */
#ifndef UCM_TESTS_GPU_DECODE_H
#define UCM_TESTS_GPU_DECODE_H

#include "client/cuda/decode.h"
#include "kernels/attend/attend.h"
#include "kernels/encoding/encoding.h"
#include "tests/gpu/mapping.h"

#define LAYERS 3u
#define HEADS 2u
#define GROUP 4u
#define TOKENS 16u
#define SEQUENCES 3u
#define NUMBERS 60u
#define BLOCKS 24u /* of a sequence */
#define WINDOW 4u  /* its last ones, in pages */
#define CHOSEN (BLOCKS - WINDOW)
#define STRANGER 15u /* a number that is in no sequence */
#define PAGES 16u
#define ROOM CHOSEN
#define MOST 9u /* of a list that is attended as it was drawn */
#define ROUNDS 3u
#define D_MAX 576u

struct scene_spec {
    const char *name;
    uint32_t entry, lists, d, dtype; /* of the options */
    uint32_t entries;
    bool heads_first; /* in layers; pages have it the other way around */
    bool narrow;      /* K and V are FP8 E4M3 */
    uint32_t rule;    /* enum ucm_cuda_decode_rule */
    float eps;
    bool encoded; /* entries are, as the encoding fp8 has them */
    bool latent;  /* MLA: one latent for all HEADS * GROUP query heads */
};

/* Of a step, at fixed addresses on the GPU. */
struct input {
    int32_t table[SEQUENCES * BLOCKS], page_table[SEQUENCES * BLOCKS];
    uint32_t request[SEQUENCES], first[SEQUENCES], length[SEQUENCES], candidates[SEQUENCES],
        least[SEQUENCES], pad;
    struct input_layer {
        uint32_t count[SEQUENCES * HEADS], index[SEQUENCES * HEADS * ROOM];
        float score[SEQUENCES * HEADS * ROOM], head_score[SEQUENCES * HEADS * GROUP * CHOSEN];
        uint16_t q[SEQUENCES * HEADS * GROUP * D_MAX];
    } layer[LAYERS];
};

struct output {
    uint16_t out[LAYERS][SEQUENCES * HEADS * GROUP * D_MAX];
    float lse[LAYERS][SEQUENCES * HEADS * GROUP];
    struct ucm_cuda_decode_report report[LAYERS][SEQUENCES * HEADS]; /* with a rule */
};

struct scene {
    struct scene_spec spec;
    struct ucm_cuda_decode_options options;
    struct ucm_cuda_decode *decode;
    struct ucm_attend_plan plan;      /* of layers */
    uint32_t heads, group, v;         /* KV heads, query heads of one, channels of V */
    uint64_t row, layer_bytes, block; /* bytes; row: of a token and KV head */
    struct mapping mapping, table;    /* blocks; sequence numbers */
    CUdeviceptr blocks;               /* the same blocks in the GPU's memory */
    uint8_t *attended;                /* the same blocks as entries hold them */
    uint8_t *pages;                   /* [LAYERS][PAGES], as layers are */
    CUdeviceptr pool, gpu_pages, gpu_input, gpu_output;
    struct input input;
    CUgraphExec graph;
};

void scene_open(struct scene *t, const struct scene_spec *spec);
void scene_close(struct scene *t);

/* The encoding of a layer of so many KV heads, where entries are encoded. */
struct ucm_encoding_spec scene_coding(const struct scene *t, uint32_t heads);

/* All blocks' places, or none of this number's. */
void scene_places(struct scene *t);
void scene_no_place(struct scene *t, uint32_t number);
_Atomic uint64_t *scene_seq(struct scene *t, uint32_t number);

/* Fresh lists, lengths and queries. */
void scene_draw(struct scene *t);
/* Runs a step of it, by launches or by the scene's graph, and waits. */
struct ucm_cuda_decode_result scene_step(struct scene *t);
struct ucm_cuda_decode_result scene_replay(struct scene *t);
void scene_output(struct scene *t, struct output *out);
/* Nothing is resident any more, and all is in the mapping. */
void scene_forget(struct scene *t);
/* Puts the blocks that were not served into the pool from the GPU's memory. Returns how many keys
 * that were. */
uint32_t scene_serve(struct scene *t);

/* The entries that a step attended of a layer's list l, in their order. Returns how many. */
uint32_t scene_attended(struct scene *t, const struct output *out, uint32_t layer, uint32_t l,
                        uint32_t index[ROOM]);

/* Compares what the step attended with the C's result. */
void scene_compare(struct scene *t, const char *what);
/* Checks that the tables are whole, and that each resident layer head has its block's bytes.
 * Returns how many there are. */
uint32_t scene_resident(struct scene *t, const char *what);
/* Layer heads that lists attended, each once; of layers up to `layers`. */
uint32_t scene_chosen(struct scene *t, uint32_t layers);
uint32_t scene_layer_head(const struct scene *t, uint32_t layer, uint32_t list);

void test_decode_steps(const struct scene_spec *spec);
void test_decode_between(const struct scene_spec *spec);
void test_decode_rounds(const struct scene_spec *spec);

#endif
