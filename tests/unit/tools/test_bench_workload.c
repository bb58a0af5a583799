/* The synthetic bytes and requests that the benchmark, the demo and the tests rest on. */
#include "client/bench/pattern.h"
#include "client/bench/workload.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint8_t key_a[32] = {1}, key_b[32] = {2};

/* ---- pattern ---- */

Test(pattern, a_filled_block_has_no_differing_byte)
{
    static uint8_t buf[10007];

    for (size_t n = 0; n < sizeof buf; n += 379) {
        pattern_fill(buf, n, pattern_seed(key_a, 0), 0);
        cr_assert_eq(pattern_differ(buf, n, pattern_seed(key_a, 0), 0), 0, "%zu bytes", n);
    }
}

Test(pattern, chunks_filled_apart_make_the_whole)
{
    static uint8_t whole[4096], parts[4096];
    uint64_t seed = pattern_seed(key_a, 3);

    pattern_fill(whole, sizeof whole, seed, 0);
    for (size_t at = 0; at < sizeof parts; at += 512)
        pattern_fill(parts + at, 512, seed, at);
    cr_assert_eq(memcmp(whole, parts, sizeof whole), 0);
}

Test(pattern, every_changed_byte_is_counted)
{
    static uint8_t buf[8197];
    uint64_t seed = pattern_seed(key_a, 0);
    static const size_t at[] = {0, 7, 8, 4095, 4096, 8191, 8192, 8196};

    pattern_fill(buf, sizeof buf, seed, 0);
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        buf[at[i]] ^= 0x10;
        cr_assert_eq(pattern_differ(buf, sizeof buf, seed, 0), i + 1);
    }
}

/* Bytes that a cache could mix up: of another key, another part, or another place in the same part.
 */
Test(pattern, the_bytes_of_another_block_part_or_place_differ)
{
    static uint8_t buf[65536];

    pattern_fill(buf, sizeof buf, pattern_seed(key_a, 0), 0);
    cr_assert_gt(pattern_differ(buf, sizeof buf, pattern_seed(key_b, 0), 0), sizeof buf / 2);
    cr_assert_gt(pattern_differ(buf, sizeof buf, pattern_seed(key_a, 1), 0), sizeof buf / 2);
    cr_assert_gt(pattern_differ(buf, sizeof buf, pattern_seed(key_a, 0), 4096), sizeof buf / 2);
    memset(buf, 0, sizeof buf);
    cr_assert_gt(pattern_differ(buf, sizeof buf, pattern_seed(key_a, 0), 0), sizeof buf / 2);
}

/* ---- keys ---- */

Test(workload, a_key_is_the_sha256_of_its_id)
{
    /* sha256 of eight zero bytes */
    static const uint8_t want[8] = {0xaf, 0x55, 0x70, 0xf5, 0xa1, 0x81, 0x0b, 0x7a};
    uint8_t key[WORKLOAD_KEY_BYTES], two[2 * WORKLOAD_KEY_BYTES];
    const uint64_t ids[] = {7, 0};

    workload_key(0, key);
    cr_assert_eq(memcmp(key, want, sizeof want), 0);
    workload_keys(ids, 2, two);
    cr_assert_eq(memcmp(two + WORKLOAD_KEY_BYTES, key, sizeof key), 0);
    cr_assert_neq(memcmp(two, key, sizeof key), 0);
}

/* ---- generated ---- */

Test(workload, the_same_seed_gives_the_same_requests)
{
    struct workload *a, *b;
    struct workload_request x, y;
    struct workload_error e;

    cr_assert_eq(workload_generate(&workload_default, &a, &e), 0);
    cr_assert_eq(workload_generate(&workload_default, &b, &e), 0);
    for (int i = 0; i < 1000; i++) {
        cr_assert_eq(workload_next(a, &x, &e), 1);
        cr_assert_eq(workload_next(b, &y, &e), 1);
        cr_assert_eq(x.n_ids, y.n_ids);
        cr_assert_eq(x.timestamp_ms, y.timestamp_ms);
        cr_assert_eq(memcmp(x.ids, y.ids, x.n_ids * sizeof *x.ids), 0);
    }
    workload_free(a);
    workload_free(b);
}

/* With an endless cache, every block but a turn's own new ones has been seen, because prefixes are
 * shared. */
Test(workload, turns_repeat_their_conversation_and_share_prompts)
{
    struct workload_shape shape = {.conversations = 1,
                                   .turns = 4,
                                   .prompts = 1,
                                   .prompt_blocks = 10,
                                   .turn_blocks = 3,
                                   .seed = 5};
    uint64_t before[64] = {0};
    uint32_t n_before = 0;
    struct workload_request q;
    struct workload_error e;
    struct workload *w;

    cr_assert_eq(workload_generate(&shape, &w, &e), 0);
    for (int i = 0; i < 12; i++) {
        uint32_t shared = i % 4 == 0 && i > 0 ? 10 : n_before;

        cr_assert_eq(workload_next(w, &q, &e), 1);
        cr_assert_geq(q.n_ids, 11);
        cr_assert_leq(q.n_ids, 10 + 4 * 5);
        cr_assert_eq(memcmp(q.ids, before, shared * sizeof *q.ids), 0);
        if (i > 0)
            cr_assert_neq(q.ids[shared], before[shared]);
        memset(before, 0, sizeof before);
        memcpy(before, q.ids, q.n_ids * sizeof *q.ids);
        n_before = q.n_ids;
    }
    workload_free(w);
}

Test(workload, a_shape_that_cannot_be_is_refused)
{
    struct workload_shape shape = workload_default;
    struct workload_error e = {.text = ""};
    struct workload *w = NULL;

    shape.conversations = 0;
    cr_assert_eq(workload_generate(&shape, &w, &e), -EINVAL);
    cr_assert_neq(e.text[0], '\0');
    shape = workload_default;
    shape.turns = 100000;
    cr_assert_eq(workload_generate(&shape, &w, &e), -EINVAL);
    cr_assert_null(w);
}

/* ---- traces ---- */

static struct workload *trace_of(const char *text)
{
    char path[] = "/tmp/test_bench_workload.XXXXXX";
    struct workload_error e;
    struct workload *w;
    FILE *f;

    f = fdopen(mkstemp(path), "w");
    cr_assert_not_null(f);
    fputs(text, f);
    fclose(f);
    cr_assert_eq(workload_trace(path, &w, &e), 0, "%s", e.text);
    unlink(path);
    return w;
}

Test(workload, a_trace_is_read_line_by_line)
{
    struct workload_request q;
    struct workload_error e;
    struct workload *w =
        trace_of("{\"timestamp\": 3, \"input_length\": 9, \"hash_ids\": [5, 9007199254740992]}\n"
                 "\n"
                 "{\"hash_ids\": []}");

    cr_assert_eq(workload_next(w, &q, &e), 1);
    cr_assert_eq(q.timestamp_ms, 3);
    cr_assert_eq(q.n_ids, 2);
    cr_assert_eq(q.ids[0], 5);
    cr_assert_eq(q.ids[1], UINT64_C(9007199254740992));
    cr_assert_eq(workload_next(w, &q, &e), 1);
    cr_assert_eq(q.n_ids, 0);
    cr_assert_eq(workload_next(w, &q, &e), 0);
    cr_assert_eq(workload_next(w, &q, &e), 0);
    workload_free(w);
}

Test(workload, a_recorded_trace_has_lines_that_are_no_requests)
{
    static const char recorded[] = "{\"ucm_trace\": 1}\n"
                                   "{\"define\": \"namespace\", \"namespace\": 1}\n"
                                   "{\"timestamp\": 5, \"hash_ids\": [0, 1]}\n"
                                   "{\"timestamp\": 6, \"dumped_ids\": [0, 1, 2]}\n"
                                   "{\"timestamp\": 7, \"lost\": 9}\n"
                                   "{\"timestamp\": 8, \"hash_ids\": [0, 3]}\n"
                                   "{\"end\": true}\n";
    struct workload_request q;
    struct workload_error e;
    struct workload *w = trace_of(recorded);

    cr_assert_eq(workload_next(w, &q, &e), 1);
    cr_assert_eq(q.timestamp_ms, 5);
    cr_assert_eq(workload_next(w, &q, &e), 1);
    cr_assert_eq(q.timestamp_ms, 8);
    cr_assert_eq(q.ids[1], 3);
    cr_assert_eq(workload_next(w, &q, &e), 0);
    workload_free(w);
    w = trace_of("{\"ucm_trace\": 2}\n");
    cr_assert_eq(workload_next(w, &q, &e), -EINVAL);
    workload_free(w);
}

Test(workload, a_bad_line_is_refused_with_its_number)
{
    static const char *const bad[] = {
        "nonsense",
        "[1]",
        "{}",
        "{\"hash_ids\": 1}",
        "{\"hash_ids\": [-1]}",
        "{\"hash_ids\": [1.5]}",
        "{\"hash_ids\": [\"1\"]}",
        "{\"hash_ids\": [1e300]}",
        "{\"timestamp\": -1, \"hash_ids\": []}",
    };
    struct workload_request q;
    struct workload_error e;
    char text[128];

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct workload *w;

        snprintf(text, sizeof text, "{\"hash_ids\": [1]}\n%s\n", bad[i]);
        w = trace_of(text);
        cr_assert_eq(workload_next(w, &q, &e), 1);
        cr_assert_eq(workload_next(w, &q, &e), -EINVAL, "%s", bad[i]);
        cr_assert_not_null(strstr(e.text, ":2: "), "%s", e.text);
        workload_free(w);
    }
}

Test(workload, a_trace_that_is_not_there_is_refused)
{
    struct workload_error e = {.text = ""};
    struct workload *w = NULL;

    cr_assert_eq(workload_trace("/nonexistent/trace.jsonl", &w, &e), -ENOENT);
    cr_assert_not_null(strstr(e.text, "/nonexistent/trace.jsonl"));
    cr_assert_null(w);
}
