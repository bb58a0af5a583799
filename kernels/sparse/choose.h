/* Shared by the two forms of a choice. choose.c makes it from one list on one thread, choose_job.c
 * from a long list in steps.
 *
 * The blocks outside the windows are taken in the order of docs/design/retrieval.md, the best
 * first. Top k ends when enough are taken, mass when their weights and the windows' suffice. A
 * *cut* says where that ends: the key of the last block taken, and how many blocks of that key, the
 * lowest first. */
#ifndef UCM_KERNELS_SPARSE_CHOOSE_H
#define UCM_KERNELS_SPARSE_CHOOSE_H

#include "kernels/sparse/arith.h"
#include "kernels/sparse/score_ops.h"
#include "kernels/sparse/select.h"

#define POISON_KEY 0xff800000u /* of +inf, the largest key there is; alone with its first digit */
#define DIGITS (1u << 11)      /* keys are 11, 11 and 10 bits */
#define FIRST_SHIFT 21

/* Sums over the candidates with a digit. */
struct choose_sums {
    uint64_t mass[DIGITS];
    uint32_t count[DIGITS];
};

/* What is still to be taken; both above 0. */
struct choose_need {
    uint32_t count;
    uint64_t mass; /* top k: more than there is */
};

struct choose_cut {
    uint32_t key;  /* blocks above it are in */
    uint32_t ties; /* and so many that equal it */
};

static inline uint32_t choose_least(uint64_t a, uint32_t b)
{
    return a < b ? (uint32_t)a : b;
}

/* Keys order as scores do. */
static inline void choose_keys(const float *restrict scores, uint32_t *restrict keys, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        keys[i] = ucm_score_key(scores[i]);
}

static inline uint32_t choose_poisoned(const uint32_t *keys, uint32_t n)
{
    uint32_t poisoned = 0;

    for (uint32_t i = 0; i < n; i++)
        poisoned += keys[i] == POISON_KEY;
    return poisoned;
}

uint32_t choose_windows(const struct ucm_choose_spec *spec, uint32_t n);
/* Blocks that the policy allows, windows included. The limit and the space for the answer may be
 * lower. */
uint32_t choose_most(const struct ucm_choose_spec *spec, uint32_t n);
/* What mass needs beyond the windows, which weigh `have` of `total`. */
uint64_t choose_mass(const struct ucm_choose_spec *spec, uint64_t total, uint64_t have);
/* What is to be taken of n blocks between windows, some of which are poisoned. A count or a mass of
 * 0: only the poisoned ones. */
struct choose_need choose_need(const struct ucm_choose_spec *spec, uint32_t n, uint32_t room,
                               uint32_t poisoned, uint64_t mass);
/* The digit at which the selection ends. Subtracts the candidates of higher digits from the need,
 * which counts at most all candidates. */
uint32_t choose_walk(const struct choose_sums *sums, bool weighed, struct choose_need *need);
/* How many of n blocks with the same key, and so the same weight, are taken. */
uint32_t choose_ties(uint32_t n, uint64_t mass, const struct choose_need *need);

#endif
