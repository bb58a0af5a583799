#include "daemon/digest/build.h"

#include <time.h>

#define PIECE_BYTES (256u << 10) /* of KV, so that selections overtake builds */
#define SLOW_BYTES (1u << 20)    /* of one layer, which is a piece at least */

/* False: it does not fit. */
static bool shard_encode(const struct ucm_encoding_spec *spec, const uint8_t *plain, uint8_t *coded)
{
    for (uint32_t i = 0; i < spec->n_sections; i++) {
        ucm_encode(spec, i, plain, coded);
        if (!ucm_encoding_fits(spec, i, coded))
            return false;
        plain += ucm_encoding_plain_bytes(spec, i);
        coded += ucm_encoding_bytes(spec, i);
    }
    return true;
}

static const uint8_t *shard_decode(const struct ucm_encoding_spec *spec, const uint8_t *coded,
                                   uint8_t *to)
{
    uint8_t *plain = to;

    for (uint32_t i = 0; i < spec->n_sections; i++) {
        ucm_decode(spec, i, coded, plain);
        coded += ucm_encoding_bytes(spec, i);
        plain += ucm_encoding_plain_bytes(spec, i);
    }
    return to;
}

static uint64_t thread_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* a Linux thread has one */
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static void run_cb(struct digest_job *job, uint32_t piece, unsigned thread)
{
    struct part_build *b = LIST_ENTRY(job, struct part_build, job);
    uint32_t first = (b->ended + piece) * b->piece_shards, end = first + b->piece_shards;
    uint64_t begun_ns = thread_ns();

    (void)thread;
    for (uint32_t shard = first; shard < end && shard < b->shards; shard++) {
        const uint8_t *from = b->from + shard * b->from_bytes;
        uint8_t *to = b->to + shard * b->to_bytes;

        if (b->digest)
            ucm_digest_build(b->digest,
                             b->scratch ? shard_decode(b->encoding, from, b->scratch) : from, to);
        else if (b->decode)
            (void)shard_decode(b->encoding, from, to);
        else if (!shard_encode(b->encoding, from, to))
            atomic_store_explicit(&b->unfit, true, memory_order_relaxed);
    }
    atomic_fetch_add_explicit(&b->ns, thread_ns() - begun_ns, memory_order_relaxed);
}

static uint32_t pieces_of(const struct part_build *b)
{
    return (b->shards + b->piece_shards - 1) / b->piece_shards;
}

/* There is one scratch. */
static uint32_t next_piece_cb(struct digest_job *job)
{
    struct part_build *b = LIST_ENTRY(job, struct part_build, job);

    return ++b->ended < pieces_of(b);
}

void part_build_submit(struct digest_pool *pool, struct part_build *b)
{
    b->ended = 0;
    b->piece_shards = b->from_bytes < PIECE_BYTES ? (uint32_t)(PIECE_BYTES / b->from_bytes) : 1;
    atomic_init(&b->unfit, false);
    atomic_init(&b->ns, 0);
    b->job.run_cb = run_cb;
    b->job.phase_cb = b->scratch ? next_piece_cb : NULL;
    b->job.queue = NULL;
    b->job.slow = b->from_bytes > SLOW_BYTES;
    digest_pool_submit(pool, &b->job, b->scratch ? 1 : pieces_of(b));
}
