/* test_attend: attention over entries on a GPU, compared with the C of kernels/attend. */
#ifndef UCM_TESTS_GPU_ATTEND_H
#define UCM_TESTS_GPU_ATTEND_H

#include "kernels/attend/attend.h"
#include "kernels/attend/attend_cuda.h"
#include "kernels/attend/mla_cuda.h"
#include "kernels/attend/stop.h"
#include "tests/gpu/compare.h"

/* ---- kernels ---- */

void order_launch(const struct ucm_attend_cuda_order *args);

/* ---- problems: pools, lists and windows, on the host and on the GPU ---- */

struct attend_shape {
    uint32_t dtype, tokens, kv_heads, group, d; /* dtype: F16 or BF16; d of K, and of V */
    uint32_t sequences, lists, room;            /* lists of a sequence: kv_heads or 1 */
    uint32_t entries, pages, window; /* window: blocks of a table, 0: there is no window */
    uint32_t apart; /* 1: an entry holds one KV head, and lists have tables of their own */
    /* 1: K and V are FP8 E4M3; ENCODED: those in entries are, with a scale a row */
    uint32_t narrow;
    uint32_t latent; /* 1: MLA; kv_heads 1, V is the first channels of K */
};
#define ENCODED 2u

struct problem {
    struct attend_shape shape;
    struct ucm_attend_plan plan, pool_plan; /* of pages, and of entries: their layouts differ */
    uint64_t page, entry;                   /* bytes */
    uint32_t v;                             /* channels of V and of results */
    uint8_t *pool, *pages;                  /* of encoded entries, what they decode to */
    uint8_t *encoded;                       /* NULL, or as the GPU has them, with its stride */
    uint16_t *q16;
    float *q;
    int32_t *list, *numbers, *entry_of; /* item -> number -> entry */
    uint32_t n_numbers, tables;         /* of entry_of */
    uint32_t *count, *first, *length;
    int32_t *table;
    struct ucm_attend_cuda args;
    uint64_t rows;
};

void problem_open(struct problem *p, const struct attend_shape *shape);
/* ENCODED: entry `entry` again, from its encoded bytes, here and on the GPU. */
void problem_decode(struct problem *p, uint32_t entry);
/* The largest |v|, about. */
float problem_v(const struct problem *p);
void problem_draw_bytes(const struct problem *p, uint8_t *to, uint64_t n);
/* args: the problem's, or like them. */
void problem_launch(const struct problem *p, const struct ucm_attend_cuda *args);
/* Fresh lists, lengths and queries, here and there. */
void problem_draw(struct problem *p);
/* The entry of an item of list l of all sequences' lists, for the C. */
int32_t problem_entry(const struct problem *p, uint64_t l, int32_t item);
/* What KV head g of the model is in an entry. */
uint32_t problem_head(const struct problem *p, uint32_t g);
/* Splits of `tiles` tiles each, for the longest list. */
void problem_cut(struct problem *p, uint32_t tiles);
/* The flags since the last call. */
uint32_t problem_flags(const struct problem *p);

/* ---- answers ---- */

struct answer {
    float *out, *lse;
};

struct answer answer_new(const struct problem *p);
/* The C's. */
void answer_reference(const struct problem *p, struct answer *to);
/* What the last launch answered; step launches first. */
void answer_get(const struct problem *p, struct answer *to);
void answer_step(const struct problem *p, struct answer *to);
/* Checks that got is within the kernel's bound of want, or the same bit for bit. */
void answer_compare(const struct problem *p, const struct answer *want, const struct answer *got,
                    const char *what);
void answer_same(const struct problem *p, const struct answer *want, const struct answer *got,
                 const char *what);

/* Tests with one launch a step, and with launches alongside the gather, with splits of so many
 * tiles. */
void test_steps_of(const struct attend_shape *shape);
void test_beside_of(const struct attend_shape *shape, uint32_t tiles);
void test_steps(void);
void test_beside(void);
void test_rounds(void);
void test_latents(void);

#endif
