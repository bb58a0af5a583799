/* The CUDA form of a load with position shifts. It copies blocks from slots to pages, block by
 * block and plane by plane, as copy.cu does. It re-rotates K when it writes. Bits equal those of
 * ucm_copy_ref and ucm_rope_apply.
 *
 * Promise, as copy.h's: of the given items and planes it touches only [slot + slot_offset, +
 * fragment) and [base + block * stride, + fragment). Any alignment; pages, slots, rows and the
 * rotary part at multiples of 16 bytes are fast.
 *
 * ucm_rope_kernel_name names a kernel. Launch it with ucm_rope_ctas CTAs of UCM_COPY_THREADS,
 * ucm_rope_tables_bytes of shared memory, and these arguments, the arrays in memory that the GPU
 * can read:
 * - const struct ucm_copy_plane *planes, uint32_t n_planes
 * - const struct ucm_copy_item *items, uint32_t n_items; `memory` says which of the tables
 *   re-rotates the item's K; UCM_ROPE_STAYS: none
 * - const uint32_t *at: n_planes; where K begins in the plane's fragment; UCM_ROPE_NO_K: not there
 * - const struct ucm_rope_angle *tables: rotary / 2 angles each, at a multiple of 8 bytes
 * - uint32_t n_tables, at most ucm_rope_tables_most
 * - struct ucm_rope_spec spec, which ucm_rope_check has accepted
 * - uint32_t tiles: ucm_rope_tiles(&spec, the largest fragment)
 * - uint32_t in_place: not 0: K is re-rotated in the pages where it lies, and slots are not read */
#ifndef UCM_KERNELS_ROPE_CUDA_H
#define UCM_KERNELS_ROPE_CUDA_H

#include "kernels/copy.h"
#include "kernels/rope/arith.h"

#include <stdbool.h>
#include <stdio.h>

#define UCM_ROPE_NO_K UINT32_MAX
#define UCM_ROPE_STAYS UINT32_MAX
#define UCM_ROPE_KERNEL_NAME 32

UCM_HD uint32_t ucm_rope_row_bytes(const struct ucm_rope_spec *s)
{
    return s->dim * (s->dtype == UCM_ROPE_F32 ? 4u : s->dtype == UCM_ROPE_FP8_E4M3 ? 1u : 2u);
}

/* Rows that one warp re-rotates at a time. */
UCM_HD uint32_t ucm_rope_tile_rows(const struct ucm_rope_spec *s)
{
    uint32_t rows = UCM_COPY_TILE_BYTES / ucm_rope_row_bytes(s);

    return rows > 0 ? rows : 1;
}

UCM_HD uint32_t ucm_rope_k_tiles(const struct ucm_rope_spec *s)
{
    uint32_t tile = ucm_rope_tile_rows(s);

    return (s->rows + tile - 1) / tile;
}

/* Tables of one launch. A table has at most UCM_ROPE_PAIRS_MAX angles, so at least four fit. */
#define UCM_ROPE_TABLES_BYTES 16384u
static inline uint32_t ucm_rope_tables_bytes(const struct ucm_rope_spec *s, uint32_t n_tables)
{
    return n_tables * (s->rotary / 2) * (uint32_t)sizeof(struct ucm_rope_angle);
}

static inline uint32_t ucm_rope_tables_most(const struct ucm_rope_spec *s)
{
    return UCM_ROPE_TABLES_BYTES / ucm_rope_tables_bytes(s, 1);
}

/* Tiles of a fragment: those of K's rows, then those of the bytes before and after it. */
static inline uint32_t ucm_rope_tiles(const struct ucm_rope_spec *s, uint32_t largest_fragment)
{
    return ucm_rope_k_tiles(s) + ucm_copy_tiles(largest_fragment) + 2;
}

/* As many as copies have. In place it is four times as many, for about a quarter of the time.
 * Writes then wait for no bus, and other copies wait for this launch. */
static inline uint32_t ucm_rope_ctas(bool in_place)
{
    return in_place ? 4 * UCM_COPY_CTAS : UCM_COPY_CTAS;
}

static inline void ucm_rope_kernel_name(const struct ucm_rope_spec *s,
                                        char out[UCM_ROPE_KERNEL_NAME])
{
    static const char *const dtypes[] = {"f32", "f16", "bf16", "fp8"};

    snprintf(out, UCM_ROPE_KERNEL_NAME, "ucm_rope_%s_%s", dtypes[s->dtype],
             s->pairs == UCM_ROPE_HALVES ? "halves" : "neighbours");
}

#endif
