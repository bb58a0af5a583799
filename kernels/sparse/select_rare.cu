/* Selections by items (select_items.cuh): the kernels that select.cu does not have. The code in
 * which all of them end is compiled once, and linked. */
#include "kernels/sparse/select_items.cuh"

#define SHORT_KERNELS(name, family)                                                                \
    KERNEL(name, family, 1, 2)                                                                     \
    KERNEL(name, family, 1, 4)                                                                     \
    KERNEL(name, family, 4, 2)

SHORT_KERNELS(dot, UCM_SELECT_DOT)
SHORT_KERNELS(box, UCM_SELECT_BOX)
SHORT_KERNELS(stats, UCM_SELECT_STATS)
SHORT_KERNELS(rest, UCM_SELECT_REST)
KERNEL(dot, UCM_SELECT_DOT, 1, 0)
KERNEL(box, UCM_SELECT_BOX, 1, 0)
KERNEL(box, UCM_SELECT_BOX, 4, 0)
KERNEL(stats, UCM_SELECT_STATS, 1, 0)
KERNEL(stats, UCM_SELECT_STATS, 4, 0)
KERNEL(rest, UCM_SELECT_REST, 1, 0)
KERNEL(rest, UCM_SELECT_REST, 4, 0)
KERNEL(l2, UCM_SELECT_L2, 1, 0)
KERNEL(l2, UCM_SELECT_L2, 4, 0)
KERNEL(hash, UCM_SELECT_HASH, 1, 0)

MATRIX_KERNEL(dot, UCM_SELECT_DOT, 2, 1)
MATRIX_KERNEL(dot, UCM_SELECT_DOT, 2, 2)
MATRIX_KERNEL(rest, UCM_SELECT_REST, 2, 1)
MATRIX_KERNEL(rest, UCM_SELECT_REST, 2, 2)
