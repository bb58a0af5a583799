/* select: which blocks of its sequences a query wants. Everything is checked here; threads score
 * and choose over summaries that the sequences hold; the event loop leaves out what was evicted by
 * name, and answers. */
#include "daemon/retrieval/selection.h"
#include "daemon/retrieval/summary.h"

#include <stdlib.h>
#include <string.h>

#define ALIGN 64u
/* Bytes of a frame for everything but the lists. */
#define ANSWER_MARGIN 1024u
/* Bytes of memory kept from one selection to the next. */
#define SPARE_MOST (16u << 20)

struct select_request {
    struct request r;
    struct selection s;
    struct sequence **sequences;           /* of each row */
    struct sequence_summaries **summaries; /* likewise, with a reference */
    uint32_t *counts;                      /* of each list's chosen blocks */
    uint32_t *next; /* of each row, with `prefetch`: the next one of its sequence */
    uint64_t no_summary;
    void *memory; /* what the selection works in */
    size_t memory_bytes;
    uint8_t prefetch; /* 0, or priority + 1 */
    struct ucm_error stopped;
};

/* ---- checks ---- */

static int specs_take(struct call *call, const struct msg_select *m,
                      const struct derived_space *space, struct selection *s)
{
    const struct ucm_summary_plan *plan = &space->plan;
    char why[UCM_SPARSE_WHY];

    s->plan = plan;
    s->score = (struct ucm_score_spec){.metric = (uint32_t)m->metric,
                                       .reduce = (uint32_t)m->reduce,
                                       .heads = (uint32_t)m->heads,
                                       .rows = m->rows ? (uint32_t)m->rows : 1,
                                       .q_heads = (uint32_t)m->q_heads,
                                       .beta = (float)m->beta};
    s->choose = (struct ucm_choose_spec){.policy = (uint32_t)m->policy,
                                         .topk_tokens = (uint32_t)m->topk_tokens,
                                         .min_blocks = (uint32_t)m->min_blocks,
                                         .sink_blocks = (uint32_t)m->sink_blocks,
                                         .recent_blocks = (uint32_t)m->recent_blocks,
                                         .limit = (uint32_t)m->limit,
                                         .beta = (float)m->beta_m,
                                         .sparse_ratio = m->sparse_ratio,
                                         .eps = m->eps};
    s->q_dtype = (enum select_dtype)m->q_dtype;
    if (ucm_score_check(plan, &s->score, why) != 0 ||
        ucm_choose_for(&plan->spec, &s->choose, why) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "%s", why);
    return 0;
}

static uint64_t q_bytes(const struct selection *s)
{
    return (uint64_t)s->n_rows * s->score.rows * s->score.q_heads * s->plan->spec.shape.head_dim *
           (s->q_dtype == SELECT_F32 ? 4 : 2);
}

/* The sequence and the layer of row i. NULL with call->error. */
static struct sequence *row_check(struct call *call, const struct msg_select *m, uint32_t i,
                                  const struct derived_space **space)
{
    struct sequence *ch = call_sequence(call, m->sequences.p[i]);

    if (!ch)
        return NULL;
    if (*space && ch->space != *space) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID,
                      "sequences[%u]: all sequences of a selection have summaries of one namespace",
                      i);
        return NULL;
    }
    *space = ch->space;
    if (m->layers.p[i] >= ch->space->derived->identity.layers[ch->part]) {
        ucm_error_set(&call->error, UCM_WIRE_INVALID, "layers[%u]: %u; this sequence's part has %u",
                      i, m->layers.p[i], ch->space->derived->identity.layers[ch->part]);
        return NULL;
    }
    return ch;
}

/* Checks everything; fills in specs, and the blocks of each row. 0 or -code with call->error. */
static int select_check(struct call *call, const struct msg_select *m, struct selection *s,
                        uint32_t *blocks)
{
    const struct derived_space *space = NULL;
    int rc;

    s->n_rows = m->sequences.n;
    s->blocks = blocks;
    if (m->layers.n != s->n_rows)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "layers: %u numbers for %u sequences; give one for each", m->layers.n,
                             s->n_rows);
    for (uint32_t i = 0; i < s->n_rows; i++) {
        const struct sequence *ch = row_check(call, m, i, &space);

        if (!ch)
            return -call->error.code;
        blocks[i] = ch->n;
    }
    rc = specs_take(call, m, space, s);
    if (rc == 0 && m->q.n != q_bytes(s))
        rc = ucm_error_set(&call->error, UCM_WIRE_INVALID,
                           "q: %u bytes; %u rows of %u queries of %u heads of %u channels take "
                           "%llu",
                           m->q.n, s->n_rows, s->score.rows, s->score.q_heads,
                           s->plan->spec.shape.head_dim, (unsigned long long)q_bytes(s));
    return rc;
}

/* ---- how many blocks a list may answer ---- */

/* A list may answer all that it may choose (ucm_choose_limit), if that fits into the answer; else
 * what the policy needs, and an equal part of what is left, which blocks without a summary take. */
struct caps {
    uint64_t entries; /* in all */
    uint64_t extra;
    bool all;
};

static uint32_t smaller(uint64_t a, uint32_t b)
{
    return a < b ? (uint32_t)a : b;
}

static uint32_t lists_of(const struct selection *s)
{
    return s->n_rows * selection_lists(s);
}

static uint32_t list_cap(const struct selection *s, const struct caps *caps, uint32_t row)
{
    uint32_t n = s->blocks[row], most = ucm_choose_limit(&s->choose, n);

    return caps->all ? most : smaller(ucm_choose_room(&s->choose, n) + caps->extra, most);
}

static uint64_t caps_sum(const struct selection *s, const struct caps *caps)
{
    uint64_t sum = 0;

    for (uint32_t row = 0; row < s->n_rows; row++)
        sum += (uint64_t)list_cap(s, caps, row) * selection_lists(s);
    return sum;
}

static int caps_make(struct call *call, const struct msg_select *m, const struct selection *s,
                     struct caps *caps)
{
    uint64_t lists = (uint64_t)s->n_rows * selection_lists(s);
    uint64_t taken = ANSWER_MARGIN + lists * sizeof(uint32_t), most, needed;

    if (taken > UCM_MAX_FRAME_BYTES)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "%llu lists do not fit into an answer; ask for fewer rows",
                             (unsigned long long)lists);
    most = (UCM_MAX_FRAME_BYTES - taken) / (m->scores ? 8 : 4);
    *caps = (struct caps){0};
    needed = caps_sum(s, caps);
    if (needed > most)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID,
                             "up to %llu blocks would be chosen, the answer holds %llu; set limit, "
                             "or ask for fewer rows",
                             (unsigned long long)needed, (unsigned long long)most);
    caps->extra = (most - needed) / lists;
    caps->all = true;
    if (caps_sum(s, caps) > most)
        caps->all = false;
    caps->entries = caps_sum(s, caps);
    return 0;
}

static struct requests *rq_of(const struct select_request *sr)
{
    return sr->r.s->rq;
}

/* ---- memory ---- */

/* The memory of a selection is kept for the next one: that of a long sequence would be new pages
 * for each, which cost a tenth of its time. */
static bool spare_take(struct select_request *sr, size_t bytes)
{
    struct summaries *ds = &retrieval_of(rq_of(sr))->summaries;

    if (ds->spare_bytes >= bytes) {
        sr->memory = ds->spare;
        sr->memory_bytes = ds->spare_bytes;
        ds->spare = NULL;
        ds->spare_bytes = 0;
        return true;
    }
    sr->memory = aligned_alloc(ALIGN, bytes);
    sr->memory_bytes = bytes;
    return sr->memory != NULL;
}

static void spare_give(struct select_request *sr)
{
    struct summaries *ds = &retrieval_of(rq_of(sr))->summaries;

    if (sr->memory_bytes > SPARE_MOST || sr->memory_bytes <= ds->spare_bytes) {
        free(sr->memory);
        return;
    }
    free(ds->spare);
    ds->spare = sr->memory;
    ds->spare_bytes = sr->memory_bytes;
}

/* ---- the answer ---- */

/* Moves a list to `to`, without blocks that were evicted by name. Returns how many those are. */
static uint32_t list_pack(const struct selection *s, const struct sequence *ch,
                          struct select_list *l, uint32_t to)
{
    uint32_t begin = l->first, end = begin + l->n;

    l->first = to;
    if (!sequence_deleting(ch)) {
        memmove(s->index + to, s->index + begin, l->n * sizeof(s->index[0]));
        if (s->chosen)
            memmove(s->chosen + to, s->chosen + begin, l->n * sizeof(s->chosen[0]));
        return 0;
    }
    for (uint32_t k = begin; k < end; k++) {
        if (!sequence_has(ch, s->index[k]))
            continue;
        s->index[to] = s->index[k];
        if (s->chosen)
            s->chosen[to] = s->chosen[k];
        to++;
    }
    l->n = to - l->first;
    return end - begin - l->n;
}

/* Moves what may be answered to the front of index and chosen, where lists say then what is theirs.
 * Returns how many blocks were left out. */
static uint32_t lists_pack(struct select_request *sr, uint32_t *total)
{
    struct selection *s = &sr->s;
    uint32_t per_row = selection_lists(s), to = 0, evicted = 0;

    for (uint32_t i = 0; i < lists_of(s); i++) {
        evicted += list_pack(s, sr->sequences[i / per_row], &s->lists[i], to);
        sr->counts[i] = s->lists[i].n;
        to += s->lists[i].n;
    }
    *total = to;
    return evicted;
}

/* Blocks that all lists of a row have in the answer. */
static uint32_t row_chosen(const struct select_request *sr, uint32_t row)
{
    uint32_t per_row = selection_lists(&sr->s), n = 0;

    for (uint32_t l = 0; l < per_row; l++)
        n += sr->counts[row * per_row + l];
    return n;
}

#define NO_ROW UINT32_MAX

/* Links the rows of each sequence that chose anything, from the sequence's own first one on. */
static void rows_link(struct select_request *sr)
{
    for (uint32_t row = 0; row < sr->s.n_rows; row++)
        sr->sequences[row]->row = NO_ROW;
    for (uint32_t row = sr->s.n_rows; row-- > 0;) {
        if (row_chosen(sr, row) == 0)
            continue;
        sr->next[row] = sr->sequences[row]->row;
        sr->sequences[row]->row = row;
    }
}

/* The blocks that the rows of a sequence chose: a bit for each. Returns how many, `most` at
 * most. */
static uint32_t chosen_mark(const struct select_request *sr, const struct sequence *ch,
                            uint32_t most, uint8_t *bits)
{
    const struct selection *s = &sr->s;
    uint32_t per_row = selection_lists(s), marked = 0;

    /* The sequence may have grown, the memory has not. */
    memset(bits, 0, (s->blocks[ch->row] + 7) / 8);
    for (uint32_t row = ch->row; row != NO_ROW; row = sr->next[row])
        marked += sequence_mark(s->index + s->lists[row * per_row].first, row_chosen(sr, row),
                                most - marked, bits);
    return marked;
}

/* Brings the chosen blocks of the sequences into DRAM, in a request for each sequence that is not
 * answered: what they can't bring, a load reads. */
static void chosen_prefetch(struct select_request *sr)
{
    uint32_t budget = UCM_MAX_KEYS;

    rows_link(sr);
    for (uint32_t row = 0; row < sr->s.n_rows && budget > 0; row++) {
        struct sequence *ch = sr->sequences[row];
        uint32_t n;

        if (ch->closing || ch->row != row)
            continue;
        n = chosen_mark(sr, ch, budget, sr->s.memory);
        /* None of the others could begin, either. */
        if (!sequence_prefetch(ch, &sr->r, sr->s.memory, n, (uint8_t)(sr->prefetch - 1)))
            return;
        budget -= n;
    }
}

static void select_free(struct select_request *sr)
{
    for (uint32_t i = 0; i < sr->s.n_rows; i++) {
        sequence_summaries_unref(sr->summaries[i]);
        sequence_unref(sr->sequences[i]);
    }
    spare_give(sr);
}

static void select_answer(struct select_request *sr)
{
    struct selection *s = &sr->s;
    struct msg_select_r r = {.no_summary = sr->no_summary};
    uint32_t total;

    r.evicted = lists_pack(sr, &total);
    r.counts = (struct proto_bin){(const uint8_t *)sr->counts, lists_of(s) * 4};
    r.index = (struct proto_bin){(const uint8_t *)s->index, total * 4};
    if (s->chosen)
        r.scores = (struct proto_bin){(const uint8_t *)s->chosen, total * 4};
    session_reply(sr->r.s, sr->r.msgid, sr->r.method, NULL, &r);
    sr->r.silent = true;
    if (sr->prefetch)
        chosen_prefetch(sr);
}

static void select_done_cb(struct summary_job *job)
{
    struct select_request *sr = LIST_ENTRY(job, struct select_request, s.job);
    uint64_t bad = atomic_load(&sr->s.bad);
    struct ucm_error *e = &sr->stopped;

    if (e->code == 0 && bad != UINT64_MAX)
        ucm_error_set(e, UCM_WIRE_INVALID, "q: element %llu is not finite",
                      (unsigned long long)bad);
    if (e->code == 0)
        select_answer(sr);
    select_free(sr);
    request_end(&sr->r, e, NULL);
}

/* The thread that is at work ends its piece. */
static void select_stop_cb(struct request *r)
{
    struct select_request *sr = LIST_ENTRY(r, struct select_request, r);

    if (sr->stopped.code != 0)
        return;
    if (uv_now(rq_of(sr)->modules.loop) >= r->deadline.at_ms)
        ucm_error_set(&sr->stopped, UCM_WIRE_DEADLINE, "not done in time; try again");
    else if (rq_of(sr)->draining)
        ucm_error_set(&sr->stopped, UCM_WIRE_SHUTDOWN, "the daemon is shutting down");
    else
        ucm_error_set(&sr->stopped, UCM_WIRE_CANCELLED, "the selection was cancelled");
    summary_job_stop(&sr->s.job);
}

/* ---- the request ---- */

static size_t padded(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* Bytes of each part of the request, in this order, which are zeroed; and of its memory, which is
 * not. */
struct layout {
    size_t head, rows, sequences, summaries, lists, blocks, counts, next, request;
    size_t q, index, chosen, work, memory;
};

static void layout_make(struct layout *l, const struct msg_select *m, const struct selection *s,
                        uint64_t entries, unsigned threads)
{
    *l = (struct layout){
        .head = padded(sizeof(struct select_request)),
        .rows = padded(s->n_rows * sizeof(struct select_row)),
        .sequences = padded(s->n_rows * sizeof(struct sequence *)),
        .summaries = padded(s->n_rows * sizeof(struct sequence_summaries *)),
        .lists = padded(lists_of(s) * sizeof(struct select_list)),
        .blocks = padded(s->n_rows * sizeof(uint32_t)),
        .counts = padded(lists_of(s) * sizeof(uint32_t)),
        .next = m->prefetch ? padded(s->n_rows * sizeof(uint32_t)) : 0,
        .q = padded(m->q.n),
        .index = padded(entries * sizeof(uint32_t)),
        .chosen = m->scores ? padded(entries * sizeof(float)) : 0,
        .work = padded(selection_bytes(s, threads)),
    };
    l->request = l->head + l->rows + l->sequences + l->summaries + l->lists + l->blocks +
                 l->counts + l->next;
    l->memory = l->q + l->index + l->chosen + l->work;
}

static void *part_take(uint8_t **at, size_t bytes)
{
    void *part = *at;

    *at += bytes;
    return part;
}

static void lists_set(struct selection *s, const struct caps *caps)
{
    uint32_t per_row = selection_lists(s), first = 0;

    for (uint32_t i = 0; i < lists_of(s); i++) {
        s->lists[i].cap = list_cap(s, caps, i / per_row);
        s->lists[i].first = first;
        first += s->lists[i].cap;
    }
}

static void rows_set(struct select_request *sr, struct call *call, const struct msg_select *m)
{
    struct selection *s = &sr->s;
    struct metrics *metrics = rq_of(sr)->modules.metrics;

    for (uint32_t i = 0; i < s->n_rows; i++) {
        struct sequence *ch = call_sequence(call, m->sequences.p[i]);

        s->rows[i].summaries = ch->summaries ? ch->summaries->at : NULL;
        s->rows[i].offset = m->layers.p[i] * (uint64_t)s->plan->bytes;
        sr->sequences[i] = ch;
        sr->summaries[i] = ch->summaries;
        if (ch->summaries)
            ch->summaries->refs++;
        sequence_ref(ch);
        sr->no_summary += ch->n - ch->n_summaries;
        metrics->select_blocks += (uint64_t)ch->n * s->plan->spec.shape.kv_heads;
    }
    metrics->selects++;
}

/* Returns what the selection may work in; NULL with call->error. */
static void *select_new(struct call *call, const struct msg_select *m,
                        const struct selection *checked, const struct caps *caps,
                        struct select_request **out)
{
    struct layout l;
    struct select_request *sr;
    struct selection *s;
    uint8_t *at;

    layout_make(&l, m, checked, caps->entries,
                summary_pool_threads(retrieval_of(call->s->rq)->pool));
    sr = request_new(call, l.request, l.memory, m->timeout_ms, select_stop_cb);
    if (!sr)
        return NULL;
    if (!spare_take(sr, l.memory)) {
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a selection");
        request_refuse(&sr->r, call);
        return NULL;
    }
    s = &sr->s;
    *s = *checked;
    at = (uint8_t *)sr + l.head;
    s->rows = part_take(&at, l.rows);
    sr->sequences = part_take(&at, l.sequences);
    sr->summaries = part_take(&at, l.summaries);
    s->lists = part_take(&at, l.lists);
    s->blocks = memcpy(part_take(&at, l.blocks), checked->blocks, s->n_rows * sizeof(uint32_t));
    sr->counts = part_take(&at, l.counts);
    sr->next = part_take(&at, l.next);
    at = sr->memory;
    s->q = memcpy(part_take(&at, l.q), m->q.p, m->q.n);
    s->index = part_take(&at, l.index);
    s->chosen = m->scores ? part_take(&at, l.chosen) : NULL;
    *out = sr;
    return at;
}

int method_select(struct call *call)
{
    const struct msg_select *m = &call->params.select;
    uint32_t blocks[UCM_MAX_SELECT_ROWS];
    struct selection checked = {0};
    struct select_request *sr;
    struct caps caps;
    void *work;
    int rc = select_check(call, m, &checked, blocks);

    if (rc == 0)
        rc = caps_make(call, m, &checked, &caps);
    if (rc != 0)
        return rc;
    work = select_new(call, m, &checked, &caps, &sr);
    if (!work)
        return -call->error.code;
    rows_set(sr, call, m);
    lists_set(&sr->s, &caps);
    sr->prefetch = (uint8_t)m->prefetch;
    sr->s.job.done_cb = select_done_cb;
    selection_submit(retrieval_of(rq_of(sr))->pool, &session_retrieval(call->s)->user->selections,
                     &sr->s, work);
    return 0;
}
