/* Summaries, sequences and selections of the client library, over a fake daemon. */
/* Sanitizers: thread */
#include "tests/unit/client/sparse_rig.h"

TestSuite(client_sparse, .init = sparse_up, .fini = rig_teardown);

/* ---- summaries ---- */

Test(client_sparse, a_namespace_of_summaries_is_one_as_any)
{
    struct ucm_lookup l = {.keys = rig.keys, .n_keys = 3};
    struct ucm_transfer t = {.keys = rig.keys, .n_keys = 3};
    struct ucm_result result;
    struct ucm_task *task;
    uint8_t fingerprint[32];
    uint32_t hits;

    ucm_namespace_fingerprint(summaries, fingerprint);
    cr_expect_eq(fingerprint[0], 8);
    cr_assert_eq(ucm_lookup_prefix(summaries, &l, -1, &hits, NULL, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(hits, 1);
    cr_assert_eq(ucm_prefetch(summaries, &t, -1, &task), 0, "%s", ucm_errmsg());
    cr_assert_eq(rig_finish(task, &result), 0);
    cr_expect_eq(result.n_keys, 3);
    ucm_namespace_close(summaries);
}

Test(client_sparse, the_daemon_builds_summaries_of_stored_blocks)
{
    struct ucm_transfer t = {.keys = rig.keys, .n_keys = 3};
    struct ucm_result result;
    struct ucm_task *task;

    cr_assert_eq(ucm_sparse_summary_build(summaries, &t, -1, &task), 0, "%s", ucm_errmsg());
    cr_assert_eq(rig_finish(task, &result), 0);
    cr_expect_eq(result.n_ok, 3);
    cr_expect_eq(ucm_sparse_summary_build(rig.ns, &t, -1, &task), -UCM_EINVALID);
}

Test(client_sparse, summaries_that_cannot_be_are_refused_with_a_sentence)
{
    struct ucm_sparse_summary good = sparse_mean(), d;
    struct ucm_namespace *ns;

#define REFUSED(change)                                                                            \
    do {                                                                                           \
        d = good;                                                                                  \
        change;                                                                                    \
        cr_expect_eq(ucm_sparse_summary_open(rig.ns, &d, 0, -1, &ns), -UCM_EINVALID, #change);     \
        cr_expect(strlen(ucm_errmsg()) > 10, #change);                                             \
    } while (0)
    REFUSED(d.method = 0);
    REFUSED(d.method = 99);
    REFUSED(d.shape.dtype = 4);
    REFUSED(d.shape.kv_heads = 0);
    REFUSED(d.shape.head_dim = 7);
    REFUSED(d.shape.head_dim = 4096);
    REFUSED(d.shape.k_token_stride = 1);
    REFUSED(d.shape.tokens = 32);
    REFUSED(d.shape.k_offset = UINT64_MAX);
    REFUSED(d.keep_bytes = 8);
    REFUSED(d.keep_bytes = UINT32_MAX; d.keep = rig.keys[0]);
#undef REFUSED
    cr_expect_eq(ucm_sparse_summary_open(summaries, &good, 0, -1, &ns), -UCM_EINVALID,
                 "summaries of summaries");
    cr_expect_eq(ucm_sparse_summary_open(NULL, &good, 0, -1, &ns), -UCM_EINVALID);
    cr_expect_eq(ucm_sparse_summary_open(rig.ns, NULL, 0, -1, &ns), -UCM_EINVALID);
}

Test(client_sparse, a_daemon_with_other_summaries_is_refused)
{
    struct ucm_sparse_summary d = sparse_mean();
    struct ucm_namespace *ns;

    SET(summary_bytes, 1000);
    cr_expect_eq(ucm_sparse_summary_open(rig.ns, &d, 0, -1, &ns), -UCM_EUNSUPPORTED);
}

Test(client_sparse, they_are_opened_again_after_a_reconnect)
{
    struct ucm_lookup l = {.keys = rig.keys, .n_keys = 1};
    uint32_t hits;

    rig_reconnect();
    cr_expect_eq(ucm_lookup_prefix(summaries, &l, -1, &hits, NULL, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SUMMARY_OPEN), 2);
}

/* ---- sequences ---- */

Test(client_sparse, a_sequence_grows_by_what_is_cached)
{
    struct ucm_sequence *sequence = sequence_of(0);
    uint8_t status[RIG_KEYS];
    struct ucm_sequence_keys more = {.keys = rig.keys, .n_keys = 6, .status = status};
    struct ucm_sequence_result result;

    SET(cached, 4);
    cr_assert_eq(ucm_sequence_append(sequence, &more, -1, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.blocks, 4);
    cr_expect_eq(result.missing, 2);
    cr_expect_eq(result.in_dram, 4);
    cr_expect_eq(result.summaries, 4);
    cr_expect_eq(status[3], UCM_FOUND_DRAM | UCM_SEQUENCE_HAS_SUMMARY);
    cr_expect_eq(status[4], UCM_FOUND_NOT);
    cr_expect_eq(ucm_sequence_blocks(sequence), 4);
    SET(cached, 5);
    more = (struct ucm_sequence_keys){.keys = rig.keys[4], .n_keys = 2, .build = 1};
    cr_assert_eq(ucm_sequence_append(sequence, &more, -1, &result), 0);
    cr_expect_eq(result.blocks, 5);
    cr_expect_eq(result.built, 1);
    ucm_sequence_close(sequence);
    (void)rig_lookup(&rig, -1);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_CLOSE), 1);
}

Test(client_sparse, a_gap_ends_an_append_of_many_keys)
{
    uint8_t *keys = calloc(50000, 16), *status = malloc(50000);
    struct ucm_sequence_keys more = {.keys = keys, .n_keys = 50000, .status = status};
    struct ucm_sequence_result result;
    struct ucm_sequence *sequence = sequence_of(0);

    memset(status, 99, 50000);
    SET(cached, 20000);
    cr_assert_eq(ucm_sequence_append(sequence, &more, -1, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.blocks, 20000);
    cr_expect_eq(result.missing, 30000);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_APPEND), 2);
    cr_expect_eq(status[19999], UCM_FOUND_DRAM | UCM_SEQUENCE_HAS_SUMMARY);
    for (uint32_t i = 20000; i < 50000; i++)
        cr_assert_eq(status[i], UCM_FOUND_NOT, "key %u", i);
    free(keys);
    free(status);
}

Test(client_sparse, a_sequence_has_a_bound)
{
    uint8_t *keys = calloc(UCM_SEQUENCE_BLOCKS_MAX, 16);
    struct ucm_sequence_keys more = {.keys = keys, .n_keys = UCM_SEQUENCE_BLOCKS_MAX};
    struct ucm_sequence *sequence = sequence_of(1);

    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), -UCM_EINVALID);
    more.n_keys--;
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), 0, "%s", ucm_errmsg());
    more.n_keys = 1;
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), -UCM_EINVALID);
    more.n_keys = UINT32_MAX;
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), -UCM_EINVALID);
    free(keys);
}

Test(client_sparse, wrong_arguments_of_sequences)
{
    struct ucm_sequence *sequence = sequence_of(3), *other;
    struct ucm_sequence_keys none = {.keys = rig.keys}, null = {.n_keys = 1},
                             fast = {.keys = rig.keys, .n_keys = 1, .priority = 8};
    struct ucm_task *task;
    uint32_t index[] = {0, 3};

    cr_expect_eq(ucm_sequence_open(rig.ns, 0, 0, -1, &other), -UCM_EINVALID, "no summaries");
    cr_expect_eq(ucm_sequence_open(summaries, 1, 0, -1, &other), -UCM_EINVALID, "part 1 of 1");
    cr_expect_eq(ucm_sequence_append(sequence, &none, -1, NULL), -UCM_EINVALID);
    cr_expect_eq(ucm_sequence_append(sequence, &null, -1, NULL), -UCM_EINVALID);
    cr_expect_eq(ucm_sequence_append(sequence, &fast, -1, NULL), -UCM_EINVALID);
    cr_expect_eq(ucm_sequence_prefetch(sequence, index, 2, 0, 0, -1, &task), -UCM_EINVALID);
    cr_expect_str_eq(ucm_errmsg(), "index 1 is block 3 of a sequence of 3 blocks");
    cr_expect_eq(ucm_sequence_prefetch(sequence, index, 0, 0, 0, -1, &task), -UCM_EINVALID);
    cr_expect_eq(ucm_sequence_prefetch(sequence, NULL, 1, 0, 0, -1, &task), -UCM_EINVALID);
    cr_expect_eq(ucm_sequence_blocks(NULL), 0);
    ucm_sequence_close(NULL);
}

Test(client_sparse, an_answer_that_does_not_fit_is_no_sequence)
{
    struct ucm_sequence *sequence = sequence_of(2);
    struct ucm_sequence_keys more = {.keys = rig.keys, .n_keys = 1};

    SET(spoil, true);
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), -UCM_EPROTOCOL);
    cr_expect_eq(ucm_sequence_blocks(sequence), 2);
    SET(spoil, false);
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(ucm_sequence_blocks(sequence), 3);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_OPEN), 2, "the first one is given up");
}

Test(client_sparse, a_sequence_of_a_closed_namespace_is_of_no_use)
{
    struct ucm_sequence *sequence = sequence_of(2);
    struct ucm_sequence_keys more = {.keys = rig.keys, .n_keys = 1};

    ucm_namespace_close(summaries);
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), -UCM_ENOTFOUND);
    cr_expect_str_eq(ucm_errmsg(), "the namespace was closed");
    ucm_sequence_close(sequence);
}

/* ---- selections ---- */

struct answer {
    uint32_t counts[64], index[256];
    float scores[256];
    struct ucm_sparse_selected out;
};

static struct answer *answer_new(struct answer *a)
{
    memset(a, 0, sizeof *a);
    a->out = (struct ucm_sparse_selected){.counts = a->counts,
                                          .index = a->index,
                                          .scores = a->scores,
                                          .counts_room = 64,
                                          .index_room = 256};
    return a;
}

static struct ucm_sparse_select select_of(struct ucm_sequence *const *sequences,
                                          const uint32_t *layers, uint32_t n)
{
    static const float q[64 * SPARSE_Q_HEADS * SPARSE_DIM];
    struct ucm_sparse_select s = {.sequences = sequences,
                                  .layers = layers,
                                  .n_rows = n,
                                  .q = q,
                                  .score.q_heads = SPARSE_Q_HEADS};

    ucm_sparse_choose_defaults(&s.choose);
    return s;
}

Test(client_sparse, a_selection_of_several_rows)
{
    struct ucm_sequence *sequences[3] = {sequence_of(1), sequence_of(5), NULL};
    uint32_t layers[3] = {0, 1, 1}, lists, blocks;
    struct ucm_sparse_select s;
    struct answer a;

    sequences[2] = sequences[0];
    s = select_of(sequences, layers, 3);
    cr_assert_eq(ucm_sparse_room(&s, &lists, &blocks), 0, "%s", ucm_errmsg());
    cr_expect_eq(lists, 6);
    cr_expect_eq(blocks, 2 + 8 + 2);
    cr_assert_eq(ucm_sparse_select(rig.client, &s, -1, &answer_new(&a)->out), 0, "%s",
                 ucm_errmsg());
    cr_expect_eq(a.out.n_lists, 6);
    cr_expect_eq(a.out.n_blocks, 1 + 1 + 2 + 2 + 1 + 1);
    cr_expect_eq(a.counts[2], 2);
    cr_expect_eq(a.index[3], 1);
    cr_expect_eq(a.scores[3], -1.0f);
    cr_expect_eq(a.out.evicted, 1);
    cr_expect_eq(a.out.no_summary, 2);
    cr_expect_eq(GET(selects), 1);
    s.score.heads = UCM_SPARSE_HEADS_SUM;
    cr_assert_eq(ucm_sparse_select(rig.client, &s, -1, &answer_new(&a)->out), 0);
    cr_expect_eq(a.out.n_lists, 3);
}

Test(client_sparse, too_many_rows_for_a_frame_take_several_requests)
{
    enum { ROWS = 100 };
    static uint32_t counts[ROWS * 2], index[ROWS * 4], layers[ROWS];
    struct ucm_sequence *sequences[ROWS];
    struct ucm_sparse_selected out = {
        .counts = counts, .index = index, .counts_room = ROWS * 2, .index_room = ROWS * 4};
    struct ucm_sparse_select s;
    float *q;

    sequences[0] = sequence_of(20);
    for (int i = 1; i < ROWS; i++)
        sequences[i] = sequences[0];
    s = select_of(sequences, layers, ROWS);
    s.score.q_heads = 1024; /* 32 KiB a row */
    s.q = q = calloc(ROWS, 1024 * SPARSE_DIM * sizeof(float));
    cr_assert_eq(ucm_sparse_select(rig.client, &s, -1, &out), 0, "%s", ucm_errmsg());
    cr_expect_eq(out.n_lists, ROWS * 2);
    cr_expect_eq(out.n_blocks, ROWS * 4);
    cr_expect_eq(GET(selects), 4);
    cr_expect_eq(out.evicted, 4);
    free(q);
}

Test(client_sparse, an_answer_too_long_for_a_frame_takes_several_requests_or_a_limit)
{
    uint32_t layers[4] = {0}, *counts = calloc(8, 4), *index = calloc(1 << 20, 4);
    struct ucm_sequence *sequences[4];
    struct ucm_sparse_selected out = {
        .counts = counts, .index = index, .counts_room = 8, .index_room = 1 << 20};
    struct ucm_sparse_select s;

    for (int i = 0; i < 4; i++)
        sequences[i] = sequence_of(100000);
    s = select_of(sequences, layers, 4);
    cr_assert_eq(ucm_sparse_select(rig.client, &s, -1, &out), 0, "%s", ucm_errmsg());
    cr_expect_eq(GET(selects), 4, "a row may fill a frame");
    cr_expect_eq(GET(last_n_rows), 1);
    s.choose.limit = 1000;
    cr_assert_eq(ucm_sparse_select(rig.client, &s, -1, &out), 0);
    cr_expect_eq(GET(selects), 5);
    cr_expect_eq(GET(last_limit), 1000);
    s.choose.limit = 0;
    out.scores = calloc(1 << 20, 4); /* 2 lists of 100000: more than a frame takes with scores */
    cr_assert_eq(ucm_sparse_select(rig.client, &s, -1, &out), 0, "%s", ucm_errmsg());
    cr_expect(GET(last_limit) > 60000 && GET(last_limit) < 65536);
    s.choose.sparse_ratio = 1;
    cr_expect_eq(ucm_sparse_select(rig.client, &s, -1, &out), -UCM_EINVALID);
    free(out.scores);
    free(counts);
    free(index);
}

Test(client_sparse, wrong_selections)
{
    struct ucm_sequence *sequences[2] = {sequence_of(9), sequence_of(9)}, *others[2];
    uint32_t layers[2] = {0, 1};
    struct ucm_sparse_select good = select_of(sequences, layers, 2), s;
    struct ucm_client *client = rig_connect(&rig.fake);
    struct answer a;

#define REFUSED(change)                                                                            \
    do {                                                                                           \
        s = good;                                                                                  \
        answer_new(&a);                                                                            \
        change;                                                                                    \
        cr_expect_eq(ucm_sparse_select(rig.client, &s, -1, &a.out), -UCM_EINVALID, #change);       \
        cr_expect(strlen(ucm_errmsg()) > 10, #change);                                             \
    } while (0)
    REFUSED(s.n_rows = 0);
    REFUSED(s.n_rows = 5000);
    REFUSED(s.q = NULL);
    REFUSED(s.sequences = NULL);
    REFUSED(s.layers = NULL);
    REFUSED(others[0] = sequences[0]; others[1] = NULL; s.sequences = others);
    REFUSED(s.q_dtype = UCM_SPARSE_FP8_E4M3);
    REFUSED(s.score.q_heads = 0);
    REFUSED(s.score.q_heads = 3);
    REFUSED(s.score.q_heads = UINT32_MAX - 1);
    REFUSED(s.score.rows = 65);
    REFUSED(s.prefetch = 9);
    REFUSED(a.out.counts = NULL);
    REFUSED(a.out.index = NULL);
    REFUSED(a.out.counts_room = 3);
    REFUSED(a.out.index_room = 7);
#undef REFUSED
    cr_expect_eq(ucm_sparse_select(client, &good, -1, &answer_new(&a)->out), -UCM_EINVALID,
                 "another client's sequences");
    SET(spoil, true);
    cr_expect_eq(ucm_sparse_select(rig.client, &good, -1, &a.out), -UCM_EPROTOCOL,
                 "blocks that the sequence does not have");
    ucm_close(client);
}

/* ---- after a reconnect ---- */

static int select_one(struct ucm_sequence *sequence)
{
    uint32_t layer = 0;
    struct ucm_sparse_select s = select_of(&sequence, &layer, 1);
    struct answer a;

    return ucm_sparse_select(rig.client, &s, -1, &answer_new(&a)->out);
}

Test(client_sparse, a_sequence_is_opened_again_by_the_call_that_names_it)
{
    struct ucm_sequence *first = sequence_of(20000), *second = sequence_of(3);

    rig_reconnect();
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_OPEN), 2);
    cr_expect_eq(select_one(first), 0, "%s", ucm_errmsg());
    cr_expect_eq(ucm_sequence_blocks(first), 20000);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_OPEN), 3);
    cr_expect_eq(select_one(second), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_OPEN), 4);
    cr_expect_eq(select_one(first), 0);
    cr_expect_eq(fake_count(&rig.fake, UCM_METHOD_SEQUENCE_OPEN), 4);
}

Test(client_sparse, a_sequence_that_lost_blocks_says_so_once)
{
    struct ucm_sequence *sequence = sequence_of(20000);
    struct ucm_sequence_keys more = {.keys = rig.keys, .n_keys = 1};

    SET(cached, 17000);
    rig_reconnect();
    cr_expect_eq(select_one(sequence), -UCM_EDISCONNECTED);
    cr_expect_not_null(strstr(ucm_errmsg(), "3000 of its 20000 blocks"), "%s", ucm_errmsg());
    cr_expect_eq(ucm_sequence_blocks(sequence), 17000);
    cr_expect_eq(select_one(sequence), 0, "%s", ucm_errmsg());
    SET(cached, 17001);
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), 0);
    cr_expect_eq(ucm_sequence_blocks(sequence), 17001);
}

Test(client_sparse, an_append_after_a_reconnect_follows_what_was_there)
{
    struct ucm_sequence *sequence = sequence_of(5);
    struct ucm_sequence_keys more = {.keys = rig.keys, .n_keys = 2};
    struct ucm_sequence_result result;

    rig_reconnect();
    cr_assert_eq(ucm_sequence_append(sequence, &more, -1, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.blocks, 7);
}

Test(client_sparse, a_sequence_that_the_daemon_ended_is_opened_again)
{
    struct ucm_sequence *sequence = sequence_of(5);
    struct ucm_sequence_keys more = {.keys = rig.keys, .n_keys = 2};
    uint32_t index = 1;
    struct ucm_result result;
    struct ucm_task *task;

    sparse_expire();
    cr_expect_eq(select_one(sequence), 0, "%s", ucm_errmsg());
    sparse_expire();
    cr_expect_eq(ucm_sequence_append(sequence, &more, -1, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(ucm_sequence_blocks(sequence), 7);
    sparse_expire();
    cr_assert_eq(ucm_sequence_prefetch(sequence, &index, 1, 0, 0, -1, &task), 0);
    cr_expect_eq(rig_finish(task, &result), -UCM_ENOTFOUND, "a task cannot be sent again");
    cr_assert_eq(ucm_sequence_prefetch(sequence, &index, 1, 0, 0, -1, &task), 0);
    cr_expect_eq(rig_finish(task, &result), 0, "%s", ucm_errmsg());
}

struct worker {
    pthread_t thread;
    struct ucm_sequence *sequence;
    int failures;
};

static void *select_many(void *arg)
{
    struct worker *w = arg;

    for (int i = 0; i < 50; i++) {
        int r = select_one(w->sequence);

        w->failures += r != 0 && r != -UCM_EDISCONNECTED;
    }
    return NULL;
}

Test(client_sparse, threads_share_a_sequence_over_reconnects)
{
    struct worker workers[4];
    struct ucm_sequence *sequence = sequence_of(20000);
    struct ucm_sequence_keys more = {.keys = rig.keys, .n_keys = 1};
    uint32_t appended = 0;

    for (int i = 0; i < 4; i++) {
        workers[i] = (struct worker){.sequence = sequence};
        pthread_create(&workers[i].thread, NULL, select_many, &workers[i]);
    }
    for (int i = 0; i < 6; i++) {
        appended += ucm_sequence_append(sequence, &more, -1, NULL) == 0;
        if (i % 2)
            fake_hang_up(&rig.fake);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(workers[i].thread, NULL);
        cr_expect_eq(workers[i].failures, 0);
    }
    cr_expect_eq(ucm_sequence_blocks(sequence), 20000 + appended);
}
