/* How many requests a lookup is, and how many of a server's requests an operation is. */
#include "tests/bench/scale.h"
#include "tests/bench/scale_costs.h"

#define WAVE 64u
#define HEAD 4u /* of the first wave */

/* The i-th key of a wave of m keys between lo and hi, of n in all. */
static uint32_t wave_key(uint32_t i, uint32_t m, uint32_t lo, uint32_t hi, uint32_t n)
{
    uint32_t wide = hi - lo, head = lo == 0 ? HEAD : 0;

    if (wide <= m)
        return lo + i;
    if (i < head)
        return i;
    if (hi == n)
        return lo + head - 1 + (uint32_t)((uint64_t)(i - head + 1) * (wide - head) / (m - head));
    return lo + (uint32_t)((uint64_t)(i + 1) * wide / (m + 1));
}

struct scale_probe scale_probe(uint32_t n, uint32_t there, uint32_t waves, uint32_t first)
{
    struct scale_probe p = {0};
    uint32_t lo = 0, hi = n, most = first > 0 ? first : WAVE;

    for (; lo < hi && p.rounds < waves; p.rounds++, most = WAVE) {
        uint32_t m = hi - lo < most ? hi - lo : most, from = lo, to = hi;
        bool narrow = first > 0 && p.rounds == 0; /* the first few, one behind the other */

        for (uint32_t i = 0; i < m; i++) {
            uint32_t key = narrow ? i : wave_key(i, m, from, to, n);

            if (key >= there) {
                hi = key;
                break;
            }
            lo = key + 1;
        }
        p.finds += m;
    }
    p.found = lo;
    return p;
}

static uint32_t moves(uint64_t bytes)
{
    return (uint32_t)((bytes + SCALE_NFS_MOVE_BYTES - 1) / SCALE_NFS_MOVE_BYTES);
}

struct scale_asks scale_asks(enum scale_engine e, enum scale_op op, uint64_t bytes)
{
    const struct scale_asks s3[SCALE_OPS] = {
        [SCALE_FIND] = {.looks = SCALE_S3_FIND},
        [SCALE_READ] = {.moves = SCALE_S3_READ},
        [SCALE_WRITE] = {.changes = SCALE_S3_WRITE},
        [SCALE_AGAIN] = {.looks = SCALE_S3_AGAIN_HEAD, .changes = SCALE_S3_AGAIN_PUT}};
    const struct scale_asks nfs[SCALE_OPS] = {
        [SCALE_FIND] = {.looks = SCALE_NFS_FIND},
        [SCALE_READ] = {.looks = SCALE_NFS_READ, .moves = moves(bytes)},
        [SCALE_WRITE] = {.looks = SCALE_NFS_WRITE_LOOKS,
                         .changes = SCALE_NFS_WRITE,
                         .moves = moves(bytes)},
        [SCALE_AGAIN] = {.looks = SCALE_NFS_AGAIN}};
    const struct scale_asks posix[SCALE_OPS] = {
        [SCALE_FIND] = {.looks = SCALE_POSIX_FIND},
        [SCALE_READ] = {.looks = SCALE_POSIX_READ},
        [SCALE_WRITE] = {.looks = SCALE_POSIX_WRITE_LOOKS, .changes = SCALE_POSIX_WRITE},
        [SCALE_AGAIN] = {.looks = SCALE_POSIX_AGAIN}};

    return e == SCALE_S3 ? s3[op] : e == SCALE_NFS ? nfs[op] : posix[op];
}
