/* Selections by items (select_items.cuh): the kernels for heads of 128 channels with several query heads each, and what else is often asked
 * for. select_rare.cu has the others, which take less of a build and are some microseconds slower. client/cuda/sparse_select.c knows which are here. */
#include "kernels/sparse/select_items.cuh"

KERNEL(dot, UCM_SELECT_DOT, 4, 0)
KERNEL(dot, UCM_SELECT_DOT, 4, 4)
KERNEL(box, UCM_SELECT_BOX, 4, 4)
KERNEL(stats, UCM_SELECT_STATS, 4, 4)
KERNEL(rest, UCM_SELECT_REST, 4, 4)
KERNEL(hash, UCM_SELECT_HASH, 4, 0)

MATRIX_KERNEL(dot, UCM_SELECT_DOT, 4, 1)
MATRIX_KERNEL(dot, UCM_SELECT_DOT, 4, 2)
MATRIX_KERNEL(rest, UCM_SELECT_REST, 4, 1)
MATRIX_KERNEL(rest, UCM_SELECT_REST, 4, 2)
