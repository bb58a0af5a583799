/* Between score.c, which goes through blocks in tiles of 16, and the methods' panels, which score a
 * tile with a few query heads. Vectors have a lane for each block. */
#ifndef UCM_KERNELS_SPARSE_SCORE_TILE_H
#define UCM_KERNELS_SPARSE_SCORE_TILE_H

#include "kernels/simd/isa.h"
#include "kernels/sparse/score_ops.h"
#include "kernels/sparse/simd/lanes.h"

#include <stdbool.h>

#ifdef UCM_LANES

/* Query heads of a panel: as many as have room in registers. */
#define PANEL (UCM_LANES == 16 ? 4u : 2u)

struct score_tile {
    const struct ucm_summary_plan *plan;
    uint32_t query_floats;
    const uint8_t *at[TILE];    /* summaries; a tile that is not full repeats one */
    const uint8_t *ahead[TILE]; /* the next tile's, to be brought into the cache */
    bool lead;                  /* the first panel of a KV head, which does that */
};

/* Raw scores of n query heads (1..PANEL), prepared, against KV head g of the tile. */
typedef void score_panel(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,
                         vec out[][TILE_VECS]);

/* The panel of a method and metric. */
score_panel *UCM_ISA_NAME(score_panel_of)(const struct ucm_summary_plan *plan, uint32_t metric);
score_panel UCM_ISA_NAME(score_panel_hash);

/* The form of queries that panels read. */
uint32_t UCM_ISA_NAME(score_query_floats)(const struct ucm_summary_plan *plan);
void UCM_ISA_NAME(score_prepare)(const struct ucm_summary_plan *plan, const float *q, uint32_t i,
                                 uint32_t group, float *queries);

/* choose.c: struct ucm_score_ops has them. */
uint32_t UCM_ISA_NAME(choose_count)(const uint32_t *keys, uint32_t n, uint32_t least);
uint32_t UCM_ISA_NAME(choose_put)(const uint32_t *keys, uint32_t n, uint32_t above, uint32_t ties,
                                  uint32_t base, uint32_t *index, uint32_t room);

/* Compiles a panel for each number of query heads, so that its accumulators stay in registers. */
#if UCM_LANES == 16
#define PANEL_CASES(panel)                                                                         \
    case 3:                                                                                        \
        panel(t, g, q, 3, out);                                                                    \
        break;                                                                                     \
    case 4:                                                                                        \
        panel(t, g, q, 4, out);                                                                    \
        break;
#else
#define PANEL_CASES(panel)
#endif
#define PANEL_BY_COUNT(name, panel)                                                                \
    void name(const struct score_tile *t, uint32_t g, const float *q, uint32_t n,                  \
              vec out[][TILE_VECS])                                                                \
    {                                                                                              \
        switch (n) {                                                                               \
            PANEL_CASES(panel)                                                                     \
        case 2:                                                                                    \
            panel(t, g, q, 2, out);                                                                \
            break;                                                                                 \
        default:                                                                                   \
            panel(t, g, q, 1, out);                                                                \
        }                                                                                          \
    }

/* Brings bytes [from, from + n) of block i's summary in the next tile into the cache. */
LANES_INLINE void tile_prefetch(const struct score_tile *t, uint32_t i, uint32_t from, uint32_t n)
{
    if (!t->lead || t->ahead[i] == NULL)
        return;
    for (uint32_t c = 0; c < n; c += 64)
        _mm_prefetch((const char *)t->ahead[i] + from + c, _MM_HINT_T1);
}

#endif
#endif
