#include "daemon/retrieval/selection.h"

#include "kernels/sparse/arith.h"

#define ALIGN 64u
#define GROUP_BYTES (2u << 20) /* of a group's rows, but one row at least */
/* Bounds of one piece: summaries read, channels of queries multiplied; blocks at least. */
#define CHUNK_BYTES (512u << 10)
#define CHUNK_WORK (4u << 20)
#define CHUNK_MIN 8u
/* A softmax of more blocks, one piece, is slow: 0.1 ms. A choice from more is cut into pieces of so
 * many. */
#define LONG_BLOCKS (1u << 16)
#define LONG_CHUNK (1u << 15)

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

static bool is_long(const struct selection *s, uint32_t row)
{
    return s->blocks[row] > LONG_BLOCKS;
}

/* The most blocks of a row that is long, or not; 0: there is none. */
static uint32_t most_blocks(const struct selection *s, bool of_long)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_rows; i++)
        if (is_long(s, i) == of_long && s->blocks[i] > n)
            n = s->blocks[i];
    return n;
}

static size_t thread_bytes(const struct selection *s)
{
    return aligned(ucm_choose_scratch_bytes(&s->choose, most_blocks(s, false)));
}

static size_t long_bytes(const struct selection *s)
{
    uint32_t n = most_blocks(s, true);

    return n > 0 ? aligned(ucm_choose_job_bytes(&s->choose, n, LONG_CHUNK)) : 0;
}

size_t selection_bytes(const struct selection *s, unsigned threads)
{
    size_t most = 0, bytes;

    for (uint32_t row = 0; row < s->n_rows;) {
        row = group_end(s, row, &bytes);
        most = bytes > most ? bytes : most;
    }
    return most + threads * thread_bytes(s) + long_bytes(s);
}

/* ---- steps, on threads ---- */

/* BEGIN for each row, each step of the scores, CHOOSE for each list of rows that are not long, LONG
 * for one list of a long row after the other; then the next group. */
enum { PHASE_BEGIN, PHASE_SCORE };

static uint32_t phase_choose(const struct selection *s)
{
    return PHASE_SCORE + ucm_score_steps(&s->rows[s->first].score);
}

static uint32_t phase_long(const struct selection *s)
{
    return phase_choose(s) + 1;
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
    struct ucm_score_blocks blocks = {.at = r->summaries, .offset = r->offset, .n = s->blocks[i]};
    size_t values = row_values(s);
    uint64_t bad = q_widen(s, i * values, values, r->q), was = atomic_load(&s->bad);

    while (bad < was && !atomic_compare_exchange_weak(&s->bad, &was, bad))
        ;
    if (bad == UINT64_MAX)
        ucm_score_begin(&r->score, s->plan, &s->score, &blocks, r->q, r->scratch, r->scores);
}

static struct select_list *list_of(const struct selection *s, uint32_t row, uint32_t list)
{
    return &s->lists[(size_t)row * selection_lists(s) + list];
}

static void list_choose(struct selection *s, uint32_t row, uint32_t list, unsigned thread)
{
    const struct select_row *r = &s->rows[row];
    uint32_t n = s->blocks[row];
    struct select_list *l = list_of(s, row, list);

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
        return is_long(s, row) ? 0 : selection_lists(s);
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

static void run_cb(struct summary_job *job, uint32_t piece, unsigned thread)
{
    struct selection *s = LIST_ENTRY(job, struct selection, job);
    uint32_t row, units, chunk, first;
    const struct select_row *r;

    /* First: which phase is which the first row's score says, once it has begun. */
    if (s->phase == PHASE_BEGIN) {
        row_begin(s, row_of(s, &piece));
        return;
    }
    if (s->phase == phase_long(s)) {
        ucm_choose_run(&s->choosing, piece);
        return;
    }
    row = row_of(s, &piece);
    r = &s->rows[row];
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

/* A piece is a softmax over all blocks. */
static bool of_lists(const struct selection *s, uint32_t row)
{
    return s->phase != PHASE_BEGIN && s->phase < phase_choose(s) &&
           ucm_score_units(&s->rows[row].score, s->phase - PHASE_SCORE) != s->blocks[row];
}

static uint32_t phase_pieces(struct selection *s)
{
    uint32_t sum = 0;

    s->job.slow = false;
    for (uint32_t i = s->first; i < s->end; i++) {
        sum += row_pieces(s, i);
        s->rows[i].pieces = sum;
        if (is_long(s, i) && of_lists(s, i))
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

/* The choice from the list s->long_list of s->long_row, or the first one after it. 0: there is
 * none in the group. */
static uint32_t long_begin(struct selection *s)
{
    for (; s->long_row < s->end; s->long_row++, s->long_list = 0) {
        const struct select_row *r = &s->rows[s->long_row];
        uint32_t n = s->blocks[s->long_row];

        for (; is_long(s, s->long_row) && s->long_list < selection_lists(s); s->long_list++) {
            struct select_list *l = list_of(s, s->long_row, s->long_list);
            const struct ucm_choose_list list = {.scores = r->scores + (size_t)s->long_list * n,
                                                 .n = n,
                                                 .index = s->index + l->first,
                                                 .chosen = s->chosen ? s->chosen + l->first : NULL,
                                                 .room = l->cap};
            uint32_t units =
                ucm_choose_begin(&s->choosing, &s->choose, &list, LONG_CHUNK, s->long_memory);

            if (units > 0)
                return units;
            (void)ucm_choose_next(&s->choosing, &l->n); /* its windows are all */
        }
    }
    return 0;
}

/* The next step of that choice, or the next one. */
static uint32_t long_next(struct selection *s)
{
    if (ucm_choose_next(&s->choosing, &list_of(s, s->long_row, s->long_list)->n))
        return s->choosing.units;
    s->long_list++;
    return long_begin(s);
}

static uint32_t group_next(struct selection *s)
{
    if (s->phase == PHASE_BEGIN || s->phase < phase_choose(s)) {
        s->phase++;
        return phase_pieces(s);
    }
    if (s->phase == phase_long(s))
        return long_next(s);
    s->phase++;
    s->long_row = s->first;
    s->long_list = 0;
    return long_begin(s);
}

static uint32_t phase_cb(struct summary_job *job)
{
    struct selection *s = LIST_ENTRY(job, struct selection, job);
    uint32_t pieces = 0;

    if (atomic_load(&s->bad) != UINT64_MAX)
        return 0;
    while (pieces == 0) {
        pieces = group_next(s);
        if (pieces > 0 || s->phase == PHASE_BEGIN || s->phase < phase_long(s))
            continue;
        if (s->end == s->n_rows)
            return 0;
        group_begin(s, s->end);
        pieces = phase_pieces(s);
    }
    return pieces;
}

static uint32_t chunk_blocks(const struct selection *s)
{
    size_t by_bytes = CHUNK_BYTES / s->plan->bytes, by_work = CHUNK_WORK / row_values(s);
    size_t blocks = by_bytes < by_work ? by_bytes : by_work;

    return blocks < CHUNK_MIN ? CHUNK_MIN : (uint32_t)blocks;
}

void selection_submit(struct summary_pool *pool, struct summary_queue *queue, struct selection *s,
                      void *memory)
{
    s->thread_bytes = thread_bytes(s);
    s->threads_memory = memory;
    s->long_memory = s->threads_memory + summary_pool_threads(pool) * s->thread_bytes;
    s->memory = s->long_memory + long_bytes(s);
    s->chunk = chunk_blocks(s);
    atomic_store(&s->bad, UINT64_MAX);
    group_begin(s, 0);
    s->job.run_cb = run_cb;
    s->job.phase_cb = phase_cb;
    s->job.queue = queue;
    summary_pool_submit(pool, &s->job, phase_pieces(s));
}
