#include "daemon/digest/select.h"

#include "kernels/sparse/arith.h"

#include <string.h>

#define ALIGN 64u
#define GROUP_BYTES (2u << 20) /* of a group's rows, but one row at least */
/* Of one piece: digests read, channels of queries multiplied; blocks at least. */
#define CHUNK_BYTES (512u << 10)
#define CHUNK_WORK (4u << 20)
#define CHUNK_MIN 8u
/* A softmax or a choice of more blocks, each one piece, is slow: 0.1 ms. */
#define SLOW_BLOCKS (1u << 16)

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* ---- memory ---- */

static size_t row_values(const struct selection *s)
{
    return (size_t)s->score.rows * s->score.q_heads * s->plan->spec.shape.head_dim;
}

static size_t scores_bytes(const struct selection *s, uint32_t n)
{
    return aligned((size_t)selection_lists(s) * n * sizeof(float));
}

static size_t row_bytes(const struct selection *s, uint32_t n)
{
    return aligned(row_values(s) * sizeof(float)) + scores_bytes(s, n) +
           aligned(ucm_score_scratch_bytes(s->plan, &s->score, n));
}

/* The end of the group that begins with row `first`; *bytes: what its rows need. */
static uint32_t group_end(const struct selection *s, uint32_t first, size_t *bytes)
{
    uint32_t end = first;
    size_t sum = 0;

    while (end < s->n_rows) {
        size_t more = row_bytes(s, s->blocks[end]);

        if (end > first && sum + more > GROUP_BYTES)
            break;
        sum += more;
        end++;
    }
    *bytes = sum;
    return end;
}

static size_t thread_bytes(const struct selection *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_rows; i++)
        n = s->blocks[i] > n ? s->blocks[i] : n;
    return aligned(ucm_choose_scratch_bytes(&s->choose, n));
}

size_t selection_bytes(const struct selection *s, unsigned threads)
{
    size_t most = 0, bytes;

    for (uint32_t row = 0; row < s->n_rows;) {
        row = group_end(s, row, &bytes);
        most = bytes > most ? bytes : most;
    }
    return most + threads * thread_bytes(s);
}

/* ---- steps, on threads ---- */

/* BEGIN for each row, each step of the scores, CHOOSE for each list; then the next group. */
enum { PHASE_BEGIN, PHASE_SCORE };

static uint32_t phase_choose(const struct selection *s)
{
    return PHASE_SCORE + ucm_score_steps(&s->rows[s->first].score);
}

/* Widens q exactly. The element that is not finite, or UINT64_MAX. */
static uint64_t q_widen(const struct selection *s, size_t first, size_t n, float *out)
{
    const uint16_t *half = s->q;
    const float *whole = s->q;
    uint32_t bad = 0;

    for (size_t i = 0; i < n; i++) {
        out[i] = s->q_dtype == SELECT_F32   ? whole[first + i]
                 : s->q_dtype == SELECT_F16 ? ucm_f16_decode(half[first + i])
                                            : ucm_bf16_decode(half[first + i]);
        bad |= ucm_not_finite(out[i]);
    }
    for (size_t i = 0; bad && i < n; i++)
        if (ucm_not_finite(out[i]))
            return first + i;
    return UINT64_MAX;
}

static void row_begin(struct selection *s, uint32_t i)
{
    struct select_row *r = &s->rows[i];
    struct ucm_score_blocks blocks = {.at = r->digests, .offset = r->offset, .n = s->blocks[i]};
    size_t values = row_values(s);
    uint64_t bad = q_widen(s, i * values, values, r->q), was = atomic_load(&s->bad);

    while (bad < was && !atomic_compare_exchange_weak(&s->bad, &was, bad))
        ;
    if (bad == UINT64_MAX)
        ucm_score_begin(&r->score, s->plan, &s->score, &blocks, r->q, r->scratch, r->scores);
}

static void list_choose(struct selection *s, uint32_t row, uint32_t list, unsigned thread)
{
    const struct select_row *r = &s->rows[row];
    uint32_t n = s->blocks[row];
    struct select_list *l = &s->lists[(size_t)row * selection_lists(s) + list];

    l->n = ucm_choose(&s->choose, r->scores + (size_t)list * n, n,
                      s->threads_memory + thread * s->thread_bytes, s->index + l->first,
                      s->chosen ? s->chosen + l->first : NULL, l->cap);
}

/* Units of work in a piece. */
static uint32_t chunk_of(const struct selection *s, uint32_t units, uint32_t n)
{
    return units == n ? s->chunk : 1; /* blocks, or a softmax for each query head */
}

static uint32_t row_pieces(const struct selection *s, uint32_t row)
{
    const struct select_row *r = &s->rows[row];
    uint32_t n = s->blocks[row], units, chunk;

    if (n == 0)
        return s->phase == PHASE_BEGIN;
    if (s->phase == PHASE_BEGIN)
        return 1;
    if (s->phase == phase_choose(s))
        return selection_lists(s);
    units = ucm_score_units(&r->score, s->phase - PHASE_SCORE);
    chunk = chunk_of(s, units, n);
    return (units + chunk - 1) / chunk;
}

/* The row of a piece, whose number becomes that among the row's. */
static uint32_t row_of(const struct selection *s, uint32_t *piece)
{
    uint32_t low = s->first, high = s->end - 1;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (*piece < s->rows[middle].pieces)
            high = middle;
        else
            low = middle + 1;
    }
    if (low > s->first)
        *piece -= s->rows[low - 1].pieces;
    return low;
}

static void run_cb(struct digest_job *job, uint32_t piece, unsigned thread)
{
    struct selection *s = LIST_ENTRY(job, struct selection, job);
    uint32_t row = row_of(s, &piece), units, chunk, first;
    const struct select_row *r = &s->rows[row];

    if (s->phase == PHASE_BEGIN) {
        row_begin(s, row);
        return;
    }
    if (s->phase == phase_choose(s)) {
        list_choose(s, row, piece, thread);
        return;
    }
    units = ucm_score_units(&r->score, s->phase - PHASE_SCORE);
    chunk = chunk_of(s, units, s->blocks[row]);
    first = piece * chunk;
    ucm_score_run(&r->score, s->phase - PHASE_SCORE, first,
                  units - first < chunk ? units : first + chunk);
}

/* A piece is a whole list. */
static bool of_lists(const struct selection *s, uint32_t row)
{
    const struct ucm_score_job *score = &s->rows[row].score;

    return s->phase != PHASE_BEGIN &&
           (s->phase == phase_choose(s) ||
            ucm_score_units(score, s->phase - PHASE_SCORE) != s->blocks[row]);
}

static uint32_t phase_pieces(struct selection *s)
{
    uint32_t sum = 0;

    s->job.slow = false;
    for (uint32_t i = s->first; i < s->end; i++) {
        sum += row_pieces(s, i);
        s->rows[i].pieces = sum;
        if (s->blocks[i] > SLOW_BLOCKS && of_lists(s, i))
            s->job.slow = true;
    }
    return sum;
}

static void group_begin(struct selection *s, uint32_t first)
{
    uint8_t *memory = s->memory;
    size_t bytes;

    s->first = first;
    s->end = group_end(s, first, &bytes);
    s->phase = PHASE_BEGIN;
    for (uint32_t i = s->first; i < s->end; i++) {
        struct select_row *r = &s->rows[i];

        r->q = (float *)(void *)memory;
        r->scores = (float *)(void *)(memory + aligned(row_values(s) * sizeof(float)));
        r->scratch = (uint8_t *)r->scores + scores_bytes(s, s->blocks[i]);
        memory += row_bytes(s, s->blocks[i]);
    }
}

static uint32_t phase_cb(struct digest_job *job)
{
    struct selection *s = LIST_ENTRY(job, struct selection, job);
    uint32_t pieces;

    if (atomic_load(&s->bad) != UINT64_MAX)
        return 0;
    do {
        if (s->phase == PHASE_BEGIN || s->phase < phase_choose(s))
            s->phase++;
        else if (s->end < s->n_rows)
            group_begin(s, s->end);
        else
            return 0;
        pieces = phase_pieces(s);
    } while (pieces == 0);
    return pieces;
}

static uint32_t chunk_blocks(const struct selection *s)
{
    size_t by_bytes = CHUNK_BYTES / s->plan->bytes, by_work = CHUNK_WORK / row_values(s);
    size_t blocks = by_bytes < by_work ? by_bytes : by_work;

    return blocks < CHUNK_MIN ? CHUNK_MIN : (uint32_t)blocks;
}

void selection_submit(struct digest_pool *pool, struct digest_queue *queue, struct selection *s,
                      void *memory)
{
    s->thread_bytes = thread_bytes(s);
    s->threads_memory = memory;
    s->memory = s->threads_memory + digest_pool_threads(pool) * s->thread_bytes;
    s->chunk = chunk_blocks(s);
    atomic_store(&s->bad, UINT64_MAX);
    group_begin(s, 0);
    s->job.run_cb = run_cb;
    s->job.phase_cb = phase_cb;
    s->job.queue = queue;
    digest_pool_submit(pool, &s->job, phase_pieces(s));
}
