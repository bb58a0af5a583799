/* Into which parts launches on a GPU cut lists. */
#include "kernels/attend/mla_cuda.h"
#include "tests/unit/sparse/attend_rig.h"

Test(attend_cut, cuts_hold_all_tiles_and_fit_the_kernels)
{
    static const uint32_t dims[] = {64, 128, 256};

    for (uint32_t i = 0; i < 20000; i++) {
        uint32_t lists = 1 + below(i % 2 ? 16 : 4000), d = dims[i % 3];
        uint32_t tiles = below(i % 5 ? 1000 : UCM_ATTEND_CUDA_SPLIT * UCM_ATTEND_CUDA_SPLITS + 1);
        struct ucm_attend_cuda_cut cut = ucm_attend_cuda_cut(
            lists, tiles, 132 * ucm_attend_cuda_places(d, 1 + i % 2, 1 + i % 16));

        cr_assert_geq(ucm_attend_cuda_places(d, 1 + i % 2, 1 + i % 16), 1);
        cr_assert(cut.split_tiles >= 1 && cut.split_tiles <= UCM_ATTEND_CUDA_SPLIT);
        cr_assert(cut.splits >= 1 && cut.splits <= UCM_ATTEND_CUDA_SPLITS);
        cr_assert((uint64_t)cut.split_tiles * cut.splits >= tiles, "%u tiles", tiles);
        cr_assert(cut.splits == 1 || (uint64_t)cut.split_tiles * (cut.splits - 1) < tiles);
    }
}

/* For MLA: any number of query heads, in row groups of one size. Rings keep a step ahead on a GPU
 * with 227 KiB for a thread block, and fit one with 99 KiB. */
Test(attend_cut, row_groups_and_rings_of_latents)
{
    for (uint32_t heads = 1; heads <= UCM_ATTEND_MLA_HEADS; heads++) {
        uint32_t groups = ucm_attend_mla_groups(heads), rows = heads / groups;

        cr_assert(groups * rows == heads && rows <= UCM_ATTEND_MLA_ROWS, "%u query heads", heads);
        for (uint32_t element = 1; element <= 2; element++) {
            uint32_t large = ucm_attend_mla_ring(element, rows, 227 << 10);
            uint32_t small = ucm_attend_mla_ring(element, rows, 99 << 10);

            cr_assert_geq(large, 2 * UCM_ATTEND_MLA_STEP);
            cr_assert_leq(large, UCM_ATTEND_MLA_RING);
            cr_assert_leq(ucm_attend_mla_shared(element, rows, large) + UCM_ATTEND_MLA_STATIC,
                          227 << 10);
            cr_assert(small >= UCM_ATTEND_MLA_STEP, "%u query heads", heads);
        }
    }
    cr_assert_eq(ucm_attend_mla_groups(128), 4);
    cr_assert_eq(ucm_attend_mla_groups(33), 3);
}
