/* The retrieval part of a fake daemon, as a hook of fake_daemon.h: summaries, sequences, selections
 * that choose the first blocks. Sequences end with their connection, as in ucmd. */
#ifndef UCM_TESTS_SPARSE_RIG_H
#define UCM_TESTS_SPARSE_RIG_H

#include "client/include/ucmclient_sparse.h"
#include "tests/unit/client/client_rig.h"

#include <math.h>

#define SPARSE_SEQUENCES 64
#define SPARSE_KV_HEADS 2
#define SPARSE_Q_HEADS 4
#define SPARSE_DIM 8

/* What the hook, on the fake's thread, shares with the test. Under the fake's lock. */
static struct {
    struct {
        uint32_t id; /* 0: free */
        int conn;
        uint32_t blocks;
    } sequences[SPARSE_SEQUENCES];
    uint32_t cached; /* blocks of any sequence that are cached */
    uint32_t chosen; /* blocks of a list, at most */
    uint64_t summary_bytes;
    bool spoil; /* answers that do not fit */
    uint32_t last_n_rows, last_limit;
    uint64_t last_deadline_ms;
    uint32_t selects;
} sparse;

FAKE_FN int sparse_sequence(uint32_t id, int conn)
{
    for (int i = 0; i < SPARSE_SEQUENCES; i++)
        if (sparse.sequences[i].id == id && sparse.sequences[i].conn == conn)
            return i;
    return -1;
}

FAKE_FN void sparse_summary_open(struct fake *f, int conn, uint32_t msgid)
{
    uint8_t fingerprint[32] = {8};
    struct msg_summary_open_r m = {.fingerprint = {fingerprint, 32}};

    pthread_mutex_lock(&f->lock);
    m.ns = f->next_id++;
    m.layer_bytes = sparse.summary_bytes;
    pthread_mutex_unlock(&f->lock);
    fake_reply(f, conn, msgid, &proto_summary_open_r, &m);
}

FAKE_FN void sparse_sequence_open(struct fake *f, int conn, uint32_t msgid)
{
    struct msg_sequence m = {0};

    pthread_mutex_lock(&f->lock);
    for (int i = 0; i < SPARSE_SEQUENCES && m.sequence == 0; i++)
        if (sparse.sequences[i].id == 0) {
            m.sequence = sparse.sequences[i].id = f->next_id++;
            sparse.sequences[i].conn = conn;
            sparse.sequences[i].blocks = 0;
        }
    pthread_mutex_unlock(&f->lock);
    fake_reply(f, conn, msgid, &proto_sequence, &m);
}

FAKE_FN void sparse_append(struct fake *f, int conn, uint32_t msgid,
                           const struct msg_sequence_append *m)
{
    uint8_t *status = calloc(1, UCM_MAX_KEYS);
    struct msg_sequence_append_r r = {0};
    uint32_t n = m->keys.n / 16, k;
    int i;

    pthread_mutex_lock(&f->lock);
    i = sparse_sequence((uint32_t)m->sequence, conn);
    if (i >= 0) {
        k = sparse.cached - sparse.sequences[i].blocks;
        k = k < n ? k : n;
        sparse.sequences[i].blocks += k;
        r = (struct msg_sequence_append_r){.blocks = sparse.sequences[i].blocks + sparse.spoil,
                                           .dram = k,
                                           .missing = n - k,
                                           .summaries = k,
                                           .built = m->build ? 1 : 0,
                                           .status = {status, n}};
        memset(status, UCM_LOOKUP_DRAM | UCM_SEQUENCE_SUMMARY, k);
        sparse.last_deadline_ms = m->timeout_ms;
    }
    pthread_mutex_unlock(&f->lock);
    fake_reply_if(f, conn, msgid, i >= 0, &proto_sequence_append_r, &r);
    free(status);
}

FAKE_FN void sparse_sequence_close(struct fake *f, int conn, uint32_t msgid, uint32_t id)
{
    int i;

    pthread_mutex_lock(&f->lock);
    i = sparse_sequence(id, conn);
    if (i >= 0)
        sparse.sequences[i].id = 0;
    pthread_mutex_unlock(&f->lock);
    fake_reply_if(f, conn, msgid, i >= 0, &proto_none, NULL);
}

/* Each list has the sequence's first blocks, up to `chosen` and the request's limit; block b scores
 * -b. */
FAKE_FN void sparse_select(struct fake *f, int conn, uint32_t msgid, const struct msg_select *m)
{
    uint32_t *counts = malloc(4u << 18), *index = malloc(4u << 18);
    uint32_t per_row = m->heads == 0 ? SPARSE_KV_HEADS : 1, lists = 0, blocks = 0;
    float *scores = malloc(4u << 18);
    bool known = true;
    struct msg_select_r r;

    pthread_mutex_lock(&f->lock);
    for (uint32_t row = 0; row < m->sequences.n; row++) {
        int i = sparse_sequence(m->sequences.p[row], conn);
        uint32_t k = i < 0 ? 0 : sparse.sequences[i].blocks;

        known = known && i >= 0;
        k = k < sparse.chosen ? k : sparse.chosen;
        k = m->limit && m->limit < k ? (uint32_t)m->limit : k;
        for (uint32_t list = 0; list < per_row; list++) {
            counts[lists++] = k;
            for (uint32_t b = 0; b < k; b++) {
                index[blocks] = b + sparse.spoil * 1000000;
                scores[blocks++] = -(float)b;
            }
        }
    }
    sparse.last_n_rows = m->sequences.n;
    sparse.last_limit = (uint32_t)m->limit;
    sparse.selects++;
    pthread_mutex_unlock(&f->lock);
    r = (struct msg_select_r){.counts = {(uint8_t *)counts, lists * 4},
                              .index = {(uint8_t *)index, blocks * 4},
                              .evicted = 1,
                              .no_summary = 2};
    if (m->scores)
        r.scores = (struct proto_bin){(uint8_t *)scores, blocks * 4};
    fake_reply_if(f, conn, msgid, known, &proto_select_r, &r);
    free(counts);
    free(index);
    free(scores);
}

FAKE_FN bool sparse_hook(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    union proto_any m;
    struct ucm_error e;
    bool known;

    if (method < UCM_METHOD_SUMMARY_OPEN || method > UCM_METHOD_SEQUENCE_PREFETCH)
        return false;
    cr_assert_eq(proto_decode(proto_methods[method].params, env, &m, &e), 0, "%s", e.text);
    switch (method) {
    case UCM_METHOD_SUMMARY_OPEN:
        sparse_summary_open(f, conn, env->msgid);
        return true;
    case UCM_METHOD_SUMMARY_BUILD:
        fake_reply_blocks(f, conn, env->msgid, m.summary_build.keys.n / 16, UCM_BLOCK_EXISTS);
        return true;
    case UCM_METHOD_SEQUENCE_OPEN:
        sparse_sequence_open(f, conn, env->msgid);
        return true;
    case UCM_METHOD_SEQUENCE_APPEND:
        sparse_append(f, conn, env->msgid, &m.sequence_append);
        return true;
    case UCM_METHOD_SEQUENCE_CLOSE:
        sparse_sequence_close(f, conn, env->msgid, (uint32_t)m.sequence.sequence);
        return true;
    case UCM_METHOD_SELECT:
        sparse_select(f, conn, env->msgid, &m.select);
        return true;
    default:
        FAKE_SET(f, known, sparse_sequence((uint32_t)m.sequence_prefetch.sequence, conn) >= 0);
        if (known)
            fake_reply_blocks(f, conn, env->msgid, m.sequence_prefetch.index.n / 4, UCM_BLOCK_OK);
        else
            fake_reply_if(f, conn, env->msgid, false, NULL, NULL);
        return true;
    }
}

FAKE_FN struct ucm_sparse_summary sparse_mean(void)
{
    return (struct ucm_sparse_summary){
        .method = UCM_SPARSE_MEAN,
        .shape = {.dtype = UCM_SPARSE_BF16,
                  .tokens = 16,
                  .kv_heads = SPARSE_KV_HEADS,
                  .head_dim = SPARSE_DIM,
                  .k_token_stride = 2 * SPARSE_KV_HEADS * SPARSE_DIM,
                  .k_head_stride = 2 * SPARSE_DIM},
    };
}

/* ---- what every test has ---- */

static struct ucm_namespace *summaries;

FAKE_FN void sparse_up(void)
{
    struct ucm_sparse_summary summary = sparse_mean();

    memset(&sparse, 0, sizeof sparse);
    sparse.cached = UCM_SEQUENCE_BLOCKS_MAX;
    sparse.chosen = 2;
    rig_setup();
    rig.fake.hook = sparse_hook;
    cr_assert_eq(ucm_sparse_summary_bytes(&summary, &sparse.summary_bytes), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_sparse_summary_open(rig.ns, &summary, 0, -1, &summaries), 0, "%s",
                 ucm_errmsg());
}

#define SET(field, value) FAKE_SET(&rig.fake, sparse.field, value)
#define GET(field) fake_read(&rig.fake, &sparse.field, sizeof sparse.field)

/* As if the daemon had ended them. */
FAKE_FN void sparse_expire(void)
{
    pthread_mutex_lock(&rig.fake.lock);
    memset(sparse.sequences, 0, sizeof sparse.sequences);
    pthread_mutex_unlock(&rig.fake.lock);
}

FAKE_FN struct ucm_sequence *sequence_of(uint32_t n)
{
    struct ucm_sequence *sequence = NULL;
    uint8_t *keys = calloc(n ? n : 1, 16);
    struct ucm_sequence_keys more = {.keys = keys, .n_keys = n};

    cr_assert_eq(ucm_sequence_open(summaries, 0, 0, -1, &sequence), 0, "%s", ucm_errmsg());
    if (n > 0)
        cr_assert_eq(ucm_sequence_append(sequence, &more, -1, NULL), 0, "%s", ucm_errmsg());
    free(keys);
    return sequence;
}

#endif
