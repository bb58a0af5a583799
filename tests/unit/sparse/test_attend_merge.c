/* Results of parts of a list: how they are merged, and into which parts launches on a GPU cut lists. */
#include "kernels/attend/mla_cuda.h"
#include "tests/unit/sparse/attend_rig.h"

/* ---- merging ---- */

static void merge(const float *const *outs, const float *lses, uint32_t n, uint32_t channels,
                  float *out, float *lse)
{
    struct ucm_attend_part parts[4];

    for (uint32_t i = 0; i < n; i++)
        parts[i] = (struct ucm_attend_part){outs[i], &lses[i]};
    ucm_attend_merge(parts, n, 1, channels, out, lse);
}

Test(attend_merge, log_sums_that_lie_far_apart)
{
    static const float a[] = {1, 2, 3, 4}, b[] = {5, 6, 7, 8};
    const float *outs[] = {a, b};
    float out[4], lse;

    for (float far = 100; far <= 1e4f; far *= 10) {
        merge(outs, (float[]){far, -far}, 2, 4, out, &lse);
        cr_assert(memcmp(out, a, sizeof(a)) == 0 && lse == far);
        merge(outs, (float[]){-far, far}, 2, 4, out, &lse);
        cr_assert(memcmp(out, b, sizeof(b)) == 0 && lse == far);
        merge(outs, (float[]){-far, -far}, 2, 4, out, &lse);
        cr_assert_float_eq(lse, -far + logf(2), 1e-3);
        cr_assert_float_eq(out[0], 3, 1e-6);
    }
    merge(outs, (float[]){5000, 5000 + logf(3)}, 2, 4, out, &lse);
    cr_assert_float_eq(lse, 5000 + logf(4), 2e-3);
    cr_assert_float_eq(out[1], 2 + 4 * 0.75f, 2e-3);
    merge(outs, (float[]){-0.0f, 0}, 1, 4, out, &lse);
    cr_assert(memcmp(out, a, sizeof(a)) == 0 && lse == 0);
}

Test(attend_merge, parts_that_are_empty_or_no_numbers)
{
    static const float a[] = {1, 2}, nans[] = {NAN, NAN}, one[] = {NAN, 7};
    const float *outs[] = {a, nans}, *odd[] = {a, one};
    float out[2], lse;

    merge(outs, (float[]){3, -INFINITY}, 2, 2, out, &lse); /* empty: its out is not read */
    cr_assert(out[0] == 1 && out[1] == 2 && lse == 3);
    merge(outs, (float[]){-INFINITY, -INFINITY}, 2, 2, out, &lse);
    cr_assert(out[0] == 0 && out[1] == 0 && lse == -INFINITY);
    merge(outs, NULL, 0, 2, out, &lse);
    cr_assert(out[0] == 0 && lse == -INFINITY);
    merge(outs, (float[]){3, NAN}, 2, 2, out, &lse);
    cr_assert(isnan(out[0]) && isnan(out[1]) && isnan(lse));
    merge(outs, (float[]){INFINITY, 2}, 2, 2, out, &lse);
    cr_assert(isnan(out[0]) && isnan(lse));
    merge(odd, (float[]){3, 2}, 2, 2, out, &lse); /* one channel of a part's values */
    cr_assert(isnan(out[0]) && isfinite(out[1]) && isfinite(lse));
    merge(odd, (float[]){3, -500}, 2, 2, out, &lse); /* 0 * NaN: nothing is hidden */
    cr_assert(isnan(out[0]) && out[1] == 2 && lse == 3);
}

/* ---- what launches on a GPU are cut into ---- */

Test(attend_merge, cuts_hold_all_tiles_and_fit_the_kernels)
{
    static const uint32_t dims[] = {64, 128, 256};

    for (uint32_t i = 0; i < 20000; i++) {
        uint32_t lists = 1 + rig_below(i % 2 ? 16 : 4000), d = dims[i % 3];
        uint32_t tiles =
            rig_below(i % 5 ? 1000 : UCM_ATTEND_CUDA_SPLIT * UCM_ATTEND_CUDA_SPLITS + 1);
        struct ucm_attend_cuda_cut cut = ucm_attend_cuda_cut(
            lists, tiles, 132 * ucm_attend_cuda_places(d, 1 + i % 2, 1 + i % 16));

        cr_assert_geq(ucm_attend_cuda_places(d, 1 + i % 2, 1 + i % 16), 1);
        cr_assert(cut.split_tiles >= 1 && cut.split_tiles <= UCM_ATTEND_CUDA_SPLIT);
        cr_assert(cut.splits >= 1 && cut.splits <= UCM_ATTEND_CUDA_SPLITS);
        cr_assert((uint64_t)cut.split_tiles * cut.splits >= tiles, "%u tiles", tiles);
        cr_assert(cut.splits == 1 || (uint64_t)cut.split_tiles * (cut.splits - 1) < tiles);
    }
}

/* Of MLA: any number of query heads, in row groups of one size; rings that keep a step ahead on a GPU with 227 KiB a thread
 * block, and fit one with 99. */
Test(attend_merge, row_groups_and_rings_of_latents)
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
