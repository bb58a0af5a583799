/* The CUDA form of the encodings. Kernels encode a dump's pages into encoded tensors, and decode a
 * load's encoded tensors into pages. They go block by block and plane by plane, as copy.cu does.
 * The encoded side is a slot in pinned memory, or an item of a staging ring's entry in the GPU's
 * memory. The raw side is a worker's paged KV memory. Bits equal those of ucm_encode and
 * ucm_decode.
 *
 * Promise, as copy.h's: of the given items and planes a kernel touches only [slot + slot_offset, +
 * bytes) and [base + block * stride, + the tensor's raw bytes). Any bytes decode to something.
 * Pages, slots, items and slot_offset are multiples of 16; fp8 and int8 take any pages.
 *
 * A kernel is named ucm_encoding_METHOD_DTYPE_load or _dump by ucm_encoding_kernel_name. Launch it
 * with ucm_encoding_ctas CTAs of UCM_ENCODING_THREADS and these arguments, the arrays in memory
 * that the GPU can read:
 * - const struct ucm_encoding_plane *planes, uint32_t n_planes
 * - const struct ucm_copy_item *items, uint32_t n_items
 * - struct ucm_encoding_spec spec, which ucm_encoding_check has accepted
 * - uint32_t tiles: ucm_encoding_tiles(&spec)
 * Of a module's kernels that ucm_encoding_alone names, only one may run at a time. */
#ifndef UCM_KERNELS_ENCODING_CUDA_H
#define UCM_KERNELS_ENCODING_CUDA_H

#include "kernels/copy.h"
#include "kernels/encoding/arith.h"

#include <stdio.h>

/* Small CTAs find room on a multiprocessor alongside a worker's. */
#define UCM_ENCODING_THREADS 128
#define UCM_ENCODING_PAGE_ALIGN 16u /* q4 and lossless */
#define UCM_ENCODING_TILE_ROWS 32u  /* at most: a lane keeps a row's scale */
#define UCM_ENCODING_TILE_ELEMENTS 4096u
#define UCM_ENCODING_TILE_TOKENS 16u      /* q4 */
#define UCM_ENCODING_TILE_COLUMNS_Q4 128u /* of all heads' channels */
#define UCM_ENCODING_TILE_COLUMNS 256u    /* int8 with a scale a channel: of a run */
#define UCM_ENCODING_DIM_VECTOR 1024u     /* longer rows go element by element */

/* Rows of a tile, which one warp encodes or decodes at a time. A power of two. */
UCM_HD uint32_t ucm_encoding_tile_rows(uint32_t dim)
{
    uint32_t rows = UCM_ENCODING_TILE_ROWS;

    while (rows > 1 && rows * dim > UCM_ENCODING_TILE_ELEMENTS)
        rows /= 2;
    return rows;
}

UCM_HD uint32_t ucm_encoding_tensor_tiles(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    const struct ucm_encoding_tensor *s = &spec->tensor[tensor];
    uint32_t rows = s->tokens * s->heads, channels = s->heads * s->dim;
    uint32_t tile = ucm_encoding_tile_rows(s->dim), run = ucm_int8_run(spec, tensor);

    if (spec->encoding == UCM_ENCODING_INT8 && run > 0)
        return (s->tokens + run - 1) / run *
               ((channels + UCM_ENCODING_TILE_COLUMNS - 1) / UCM_ENCODING_TILE_COLUMNS);
    if (spec->encoding == UCM_ENCODING_Q4)
        return (s->tokens + UCM_ENCODING_TILE_TOKENS - 1) / UCM_ENCODING_TILE_TOKENS *
               ((channels + UCM_ENCODING_TILE_COLUMNS_Q4 - 1) / UCM_ENCODING_TILE_COLUMNS_Q4);
    if (spec->encoding == UCM_ENCODING_LOSSLESS)
        return (rows * s->dim + UCM_ENCODING_TILE_ELEMENTS - 1) / UCM_ENCODING_TILE_ELEMENTS;
    return (rows + tile - 1) / tile;
}

/* Tiles of the tensor that has most. */
UCM_HD uint32_t ucm_encoding_tiles(const struct ucm_encoding_spec *spec)
{
    uint32_t most = 0;

    for (uint32_t i = 0; i < spec->n_tensors; i++) {
        uint32_t tiles = ucm_encoding_tensor_tiles(spec, i);

        most = tiles > most ? tiles : most;
    }
    return most;
}

/* lossless: parts of a tensor that CTAs can encode independently, since no two of them share a
 * base. */
#define UCM_LOSSLESS_RUN 128u /* tokens, of a part of one head */
UCM_HD uint32_t ucm_lossless_units(const struct ucm_encoding_tensor *s)
{
    if (s->order == UCM_ENCODING_NHD)
        return (s->tokens + UCM_LOSSLESS_TILE - 1) / UCM_LOSSLESS_TILE;
    return s->heads * ((s->tokens + UCM_LOSSLESS_RUN - 1) / UCM_LOSSLESS_RUN);
}

/* Whether a tensor is too much for one CTA. Vectors of 8 elements must not reach over a unit's
 * end. */
static inline bool ucm_lossless_long(const struct ucm_encoding_spec *spec)
{
    bool is_long = false;

    for (uint32_t i = 0; i < spec->n_tensors; i++) {
        if (spec->tensor[i].dim % 8 != 0)
            return false;
        is_long |=
            spec->tensor[i].tokens > UCM_LOSSLESS_TILE && ucm_lossless_units(&spec->tensor[i]) > 1;
    }
    return is_long;
}

/* q4's loads and lossless dumps compute most. q4's dumps compute even more. With fewer CTAs each
 * warp has several units, and a worker's kernels are disturbed less. With 256 CTAs, matrix products
 * on an H200 keep 0.86 of their speed, with 384 CTAs 0.83. */
UCM_HD uint32_t ucm_encoding_ctas(const struct ucm_encoding_spec *spec,
                                  enum ucm_copy_direction direction)
{
    if (spec->encoding == UCM_ENCODING_Q4)
        return direction == UCM_COPY_DUMP ? 256 : 384;
    return spec->encoding == UCM_ENCODING_LOSSLESS && direction == UCM_COPY_DUMP ? 384 : 192;
}

/* Dumps of long lossless tensors keep notes in the module. */
static inline bool ucm_encoding_alone(const struct ucm_encoding_spec *spec,
                                      enum ucm_copy_direction direction)
{
    return direction == UCM_COPY_DUMP && spec->encoding == UCM_ENCODING_LOSSLESS &&
           ucm_lossless_long(spec);
}

/* The kernel's name; false: none takes that spec. */
#define UCM_ENCODING_KERNEL_NAME 48
static inline bool ucm_encoding_kernel_name(const struct ucm_encoding_spec *spec,
                                            enum ucm_copy_direction direction,
                                            char name[UCM_ENCODING_KERNEL_NAME])
{
    static const char *const methods[] = {NULL, "fp8", "int8", "q4", "lossless"};
    static const char *const dtypes[] = {NULL, "f16", "bf16"};

    if (spec->encoding >= sizeof(methods) / sizeof(*methods) || !methods[spec->encoding] ||
        spec->dtype >= sizeof(dtypes) / sizeof(*dtypes) || !dtypes[spec->dtype] ||
        (spec->encoding == UCM_ENCODING_LOSSLESS && spec->dtype != UCM_ENCODING_BF16))
        return false;
    snprintf(name, UCM_ENCODING_KERNEL_NAME, "ucm_encoding_%s_%s_%s%s", methods[spec->encoding],
             dtypes[spec->dtype], direction == UCM_COPY_LOAD ? "load" : "dump",
             ucm_encoding_alone(spec, direction) ? "_long" : "");
    return true;
}

#endif
