#include "client/lib/sparse/internal.h"
#include "client/lib/sparse/local.h"
#include "client/lib/sparse/spec.h"

#include <stdlib.h>
#include <string.h>

#define FRAME_REST 512 /* of a frame, next to q, sequences and the lists */

/* What one call works with. A piece has the rows of one request. */
struct selection {
    struct client_call call;
    const struct ucm_sparse_select *s;
    struct ucm_sparse_selected *out;
    uint64_t row_bytes;         /* of q */
    uint32_t block_bytes;       /* of a chosen block in an answer */
    uint32_t first, n;          /* the piece */
    uint32_t limit;             /* of its lists */
    uint32_t lists;             /* of the piece */
    uint32_t *ids;              /* of its sequences: room for all rows */
    uint32_t n_lists, n_blocks; /* of the pieces before */
    uint32_t evicted;
    uint64_t no_summary;
};

static const struct ucm_sparse_summary *summary_of(const struct ucm_sequence *sequence)
{
    return &sequence->ns->summary->summary;
}

static uint32_t row_lists(const struct ucm_sparse_select *s, uint32_t i)
{
    return client_score_lists(summary_of(s->sequences[i]), &s->score);
}

/* ---- what is asked ---- */

static int rows_check(const struct ucm_sparse_select *s)
{
    if (!s->sequences || !s->layers || s->n_rows == 0 || s->n_rows > UCM_MAX_SELECT_ROWS)
        return client_fail(UCM_EINVALID, "a selection has 1 to %d rows, not %u%s",
                           UCM_MAX_SELECT_ROWS, s->n_rows,
                           s->sequences && s->layers ? "" : ", and sequences or layers is NULL");
    for (uint32_t i = 0; i < s->n_rows; i++) {
        if (!s->sequences[i])
            return client_fail(UCM_EINVALID, "sequence %u is NULL", i);
        if (s->sequences[i]->client != s->sequences[0]->client)
            return client_fail(UCM_EINVALID, "sequence %u is of another client than sequence 0", i);
        if (summary_of(s->sequences[i])->shape.head_dim !=
            summary_of(s->sequences[0])->shape.head_dim)
            return client_fail(UCM_EINVALID, "sequence %u has another head_dim than sequence 0", i);
        if (s->score.q_heads == 0 ||
            s->score.q_heads % summary_of(s->sequences[i])->shape.kv_heads != 0)
            return client_fail(UCM_EINVALID,
                               "q_heads is %u, no multiple of the %u KV heads of sequence %u",
                               s->score.q_heads, summary_of(s->sequences[i])->shape.kv_heads, i);
    }
    return 0;
}

static int select_check(const struct ucm_sparse_select *s)
{
    int r = rows_check(s);

    if (r)
        return r;
    if (s->score.q_heads > UCM_MAX_Q_HEADS || s->score.rows > UCM_MAX_Q_ROWS)
        return client_fail(UCM_EINVALID, "q_heads is %u and rows %u; at most %d and %d",
                           s->score.q_heads, s->score.rows, UCM_MAX_Q_HEADS, UCM_MAX_Q_ROWS);
    if (client_q_element(s->q_dtype) == 0)
        return client_fail(UCM_EINVALID, "q_dtype is %u; queries are F32, F16 or BF16", s->q_dtype);
    if (s->prefetch > 8)
        return client_fail(UCM_EINVALID, "prefetch is %u; 0, or a priority of 0 to 7 and 1",
                           s->prefetch);
    return 0;
}

/* Room for one list of row i. */
static int row_room(const struct ucm_sparse_select *s, uint32_t i, uint32_t *out)
{
    struct ucm_summary_spec summary;
    struct ucm_choose_spec spec;
    int r = client_summary_spec(summary_of(s->sequences[i]), &summary);

    if (r == 0)
        r = client_choose_spec(&s->choose, &summary, &spec);
    if (r == 0)
        *out = ucm_choose_room(&spec, s->sequences[i]->n_blocks);
    return r;
}

int ucm_sparse_room(const struct ucm_sparse_select *s, uint32_t *lists, uint32_t *blocks)
{
    uint64_t n_lists = 0, n_blocks = 0;
    struct ucm_client *c;
    int r;

    if (!s || !s->sequences || s->n_rows == 0 || !s->sequences[0])
        return client_fail(UCM_EINVALID, "select or its sequences are NULL");
    c = s->sequences[0]->client;
    r = client_enter(c);
    if (r)
        return r;
    r = rows_check(s);
    for (uint32_t i = 0; r == 0 && i < s->n_rows; i++) {
        uint32_t room = 0;

        r = row_room(s, i, &room);
        n_lists += row_lists(s, i);
        n_blocks += (uint64_t)room * row_lists(s, i);
    }
    if (r == 0 && n_blocks > UINT32_MAX)
        r = client_fail(UCM_EINVALID, "the answer would have %llu blocks; ask for fewer rows",
                        (unsigned long long)n_blocks);
    if (r == 0 && lists)
        *lists = (uint32_t)n_lists;
    if (r == 0 && blocks)
        *blocks = (uint32_t)n_blocks;
    return client_leave(c, r);
}

/* ---- pieces ---- */

/* For a piece of one row whose answer would be too long if every block were chosen. Its lists are
 * limited to what fits, if that suffices for the policy. */
static int piece_limit(struct selection *sel, uint64_t room)
{
    uint64_t list = room / sel->lists, fits = list < 4 ? 0 : (list - 4) / sel->block_bytes;
    uint32_t need = 0;
    int r = row_room(sel->s, sel->first, &need);

    if (r)
        return r;
    if (need > fits)
        return client_fail(UCM_EINVALID,
                           "a list can have %u blocks, and an answer holds lists of %u: set limit",
                           need, (uint32_t)fits);
    sel->limit = (uint32_t)fits;
    return 0;
}

/* Takes as many rows from `first` on as fit: their queries into a frame, and their longest answer
 * into another. */
static int piece_cut(struct selection *sel)
{
    const struct ucm_sparse_select *s = sel->s;
    const struct ucm_choose_spec choose = sparse_choose_spec(&s->choose);
    uint64_t room = s->sequences[0]->client->max_frame_bytes - FRAME_REST;

    sel->n = 0;
    sel->lists = 0;
    for (uint32_t i = sel->first; i < s->n_rows; i++) {
        uint32_t lists = sel->lists + row_lists(s, i);
        uint64_t longest = ucm_choose_limit(&choose, s->sequences[i]->n_blocks);

        if (longest < sel->limit)
            longest = sel->limit;
        if (sel->n > 0 && ((sel->n + 1) * (sel->row_bytes + 2 * 5) > room ||
                           lists * (longest * sel->block_bytes + 4) > room))
            break;
        sel->n++;
        sel->lists = lists;
        sel->limit = (uint32_t)longest;
    }
    if (sel->row_bytes + 2 * 5 > room)
        return client_fail(UCM_EINVALID, "the queries of a row have %llu bytes; a request has %llu",
                           (unsigned long long)sel->row_bytes, (unsigned long long)room);
    return sel->lists * ((uint64_t)sel->limit * sel->block_bytes + 4) > room
               ? piece_limit(sel, room)
               : 0;
}

static bool list_fits(const uint32_t *index, uint32_t count, uint32_t n_blocks)
{
    for (uint32_t i = 0; i < count; i++)
        if (index[i] >= n_blocks || (i > 0 && index[i] <= index[i - 1]))
            return false;
    return true;
}

/* Copies from the frame what may lie unaligned there. */
static bool answer_fits(const struct selection *sel, const uint32_t *counts, const uint32_t *index)
{
    uint32_t list = 0;

    for (uint32_t i = sel->first; i < sel->first + sel->n; i++)
        for (uint32_t k = row_lists(sel->s, i); k > 0; k--, list++) {
            if (!list_fits(index, counts[list], sel->s->sequences[i]->n_blocks))
                return false;
            index += counts[list];
        }
    return true;
}

static int refuse(struct client_call *call)
{
    return ucm_error_set(&call->error, UCM_EPROTOCOL,
                         "ucmd's answer to select does not fit the question");
}

static int select_take_cb(struct client_call *call, const union proto_any *any)
{
    struct selection *sel = (struct selection *)call;
    struct ucm_sparse_selected *out = sel->out;
    const struct msg_select_r *m = &any->select_r;
    uint64_t lists = m->counts.n / 4, blocks = m->index.n / 4, sum = 0;
    uint32_t *counts = out->counts + sel->n_lists, *index = out->index + sel->n_blocks;

    if (lists != sel->lists || m->counts.n % 4 || m->index.n % 4 ||
        (out->scores && m->scores.n != m->index.n))
        return refuse(call);
    if (blocks > out->index_room - sel->n_blocks)
        return ucm_error_set(&call->error, UCM_EINVALID,
                             "rows %u to %u chose %llu blocks, and index_room has %u left",
                             sel->first, sel->first + sel->n - 1, (unsigned long long)blocks,
                             out->index_room - sel->n_blocks);
    memcpy(counts, m->counts.p, m->counts.n);
    for (uint32_t i = 0; i < lists; i++)
        sum += counts[i];
    if (sum != blocks)
        return refuse(call);
    if (blocks > 0)
        memcpy(index, m->index.p, m->index.n);
    if (out->scores && blocks > 0)
        memcpy(out->scores + sel->n_blocks, m->scores.p, m->scores.n);
    if (!answer_fits(sel, counts, index))
        return refuse(call);
    sel->n_lists += (uint32_t)lists;
    sel->n_blocks += (uint32_t)blocks;
    sel->evicted += (uint32_t)m->evicted;
    sel->no_summary += m->no_summary;
    return 0;
}

static void piece_message(const struct selection *sel, struct msg_select *m)
{
    const struct ucm_sparse_select *s = sel->s;

    *m = (struct msg_select){
        .sequences = {sel->ids, sel->n},
        .layers = {s->layers + sel->first, sel->n},
        .q = {(const uint8_t *)s->q + sel->first * sel->row_bytes,
              (uint32_t)(sel->n * sel->row_bytes)},
        .q_dtype = s->q_dtype,
        .q_heads = s->score.q_heads,
        .rows = s->score.rows,
        .metric = s->score.metric,
        .reduce = s->score.reduce,
        .heads = s->score.heads,
        .beta = (double)s->score.beta,
        .policy = s->choose.policy,
        .sparse_ratio = s->choose.sparse_ratio,
        .topk_tokens = s->choose.topk_tokens,
        .min_blocks = s->choose.min_blocks,
        .eps = s->choose.eps,
        .beta_m = s->choose.beta_m,
        .limit = sel->limit,
        .sink_blocks = s->choose.sink_blocks,
        .recent_blocks = s->choose.recent_blocks,
        .scores = sel->out->scores != NULL,
        .prefetch = s->prefetch,
        .timeout_ms = s->daemon_timeout_ms,
    };
}

/* Sends the piece on a connection that knows its sequences, and waits for the answer. */
static int piece_run(struct selection *sel, int64_t deadline_ns)
{
    struct ucm_sequence *const *sequences = sel->s->sequences + sel->first;
    struct client_request q = {.method = UCM_METHOD_SELECT};
    struct msg_select m;
    int r, ended = 0;

    client_call_init(&sel->call, sequences[0]->client, select_take_cb, NULL);
    do {
        r = client_sequences_begin(sequences, sel->n, NULL, deadline_ns);
        if (r == 0) {
            for (uint32_t i = 0; i < sel->n; i++)
                sel->ids[i] = sequences[i]->id;
            piece_message(sel, &m);
            q.params = &m;
            r = client_request_wait(&sel->call, &q, deadline_ns);
        }
        if (r == -UCM_ENOTFOUND)
            for (uint32_t i = 0; i < sel->n; i++)
                client_sequence_forget(sequences[i]);
    } while (r == CLIENT_AGAIN || (r == -UCM_ENOTFOUND && ended++ == 0));
    client_call_close(&sel->call);
    return r;
}

static int select_all(struct selection *sel, int64_t deadline_ns)
{
    int r = 0;

    while (r == 0 && sel->first < sel->s->n_rows) {
        sel->limit = 0;
        r = piece_cut(sel);
        if (r == 0 && sel->lists > sel->out->counts_room - sel->n_lists)
            r = client_fail(UCM_EINVALID, "the rows to %u have %u lists; counts_room is %u",
                            sel->first + sel->n - 1, sel->n_lists + sel->lists,
                            sel->out->counts_room);
        if (r == 0)
            r = piece_run(sel, deadline_ns);
        sel->first += sel->n;
    }
    return r;
}

static int selection_init(struct selection *sel, const struct ucm_sparse_select *s,
                          struct ucm_sparse_selected *out)
{
    const struct ucm_sparse_shape *shape;
    int r = select_check(s);

    if (r)
        return r;
    shape = &summary_of(s->sequences[0])->shape;
    *sel = (struct selection){.s = s, .out = out, .block_bytes = out->scores ? 8 : 4};
    sel->row_bytes = (uint64_t)(s->score.rows ? s->score.rows : 1) * s->score.q_heads *
                     shape->head_dim * client_q_element(s->q_dtype);
    sel->ids = malloc(s->n_rows * sizeof *sel->ids);
    return sel->ids ? 0 : client_fail(UCM_ENOMEMORY, "no memory for a selection");
}

int ucm_sparse_select(struct ucm_client *c, const struct ucm_sparse_select *s, int timeout_ms,
                      struct ucm_sparse_selected *out)
{
    struct selection sel;
    int r = client_enter_given(s && s->q && out && out->counts && out->index ? c : NULL,
                               "client, select, q, out, counts or index");

    if (r)
        return r;
    r = selection_init(&sel, s, out);
    if (r == 0 && s->sequences[0]->client != c) {
        free(sel.ids);
        r = client_fail(UCM_EINVALID, "the sequences are of another client");
    }
    if (r)
        return client_leave(c, r);
    r = select_all(&sel, client_deadline(c, timeout_ms));
    free(sel.ids);
    if (r == 0) {
        out->n_lists = sel.n_lists;
        out->n_blocks = sel.n_blocks;
        out->evicted = sel.evicted;
        out->no_summary = sel.no_summary;
    }
    return client_leave(c, r);
}
