/* Checksums of parts in DRAM, for the snapshot. The pool computes them, a piece of some parts at a
 * time, while the event loop goes on. Thread: the event loop only. */
#ifndef UCMD_SNAPSHOT_SUM_H
#define UCMD_SNAPSHOT_SUM_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#define SUMS_PIECES 8u
#define SUMS_PIECE_PARTS 64u
#define SUMS_PIECE_BYTES (8u << 20) /* a piece ends with the part that exceeds them */

struct sums_part {
    const void *data; /* NULL: no checksum is wanted */
    uint64_t bytes, checksum;
};

struct sums {
    uv_loop_t *loop;
    unsigned pieces; /* in the pool at once; at most SUMS_PIECES */
    uint64_t n, at;  /* parts; those before `at` have begun. n = at: all have */
    /* Fills in part i. False: not yet; sums_pump then tries again. */
    bool (*part_cb)(void *ctx, uint64_t i, struct sums_part *out);
    void (*done_cb)(void *ctx, uint64_t i, const struct sums_part *part);
    /* All parts of a piece are done, and the next one was begun if there is one. May free the sums.
     * May be NULL. */
    void (*piece_cb)(void *ctx);
    void *ctx;
    struct sums_piece {
        uv_work_t work;
        struct sums *sums;
        bool busy;
        uint32_t n;
        uint64_t first;
        struct sums_part part[SUMS_PIECE_PARTS];
    } piece[SUMS_PIECES];
};

/* Hands over as many pieces as may be in the pool. False: none is, and none could be begun. */
bool sums_pump(struct sums *s);
bool sums_busy(const struct sums *s);

#endif
