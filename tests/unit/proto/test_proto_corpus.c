/* The seeds of tests/fuzz/fuzz_proto.c: tests/fuzz/corpus/proto/ holds one frame body a method and
 * direction, made from the samples. With UCM_WRITE_CORPUS=1 in the environment this writes them;
 * without, it holds the files against the samples, so that no seed outlives a change of the tables.
 */
#include "tests/unit/proto/proto_samples.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CORPUS "tests/fuzz/corpus/proto"
#define LIMIT (4u << 20)

static void seed(const char *method, const char *kind, struct proto_buf *b)
{
    const uint8_t *p = b->p + PROTO_HEADER_BYTES;
    size_t n = b->n - PROTO_HEADER_BYTES;
    bool write = getenv("UCM_WRITE_CORPUS");
    uint8_t read[4096];
    char path[128];
    FILE *f;

    snprintf(path, sizeof(path), CORPUS "/%s.%s", method, kind);
    f = fopen(path, write ? "wb" : "rb");
    cr_assert_not_null(f, "%s: %s; UCM_WRITE_CORPUS=1 writes the seeds anew", path,
                       strerror(errno));
    if (write) {
        cr_assert_eq(fwrite(p, 1, n, f), n);
    } else {
        cr_assert_eq(fread(read, 1, sizeof(read), f), n, "%s is stale", path);
        cr_assert_arr_eq(read, p, n, "%s is stale; UCM_WRITE_CORPUS=1 writes the seeds anew", path);
    }
    cr_assert_eq(fclose(f), 0);
    b->n = 0;
}

Test(proto_corpus, seeds_are_fresh)
{
    struct ucm_error e = {0};
    struct proto_buf b;
    FILE *here = fopen("tests/unit/proto/test_proto_corpus.c", "rb");

    if (!here)
        cr_skip_test("not run from the repository's root: the seeds are not compared");
    fclose(here);
    proto_buf_init(&b, LIMIT);
    for (int i = 0; i < UCM_METHOD_COUNT; i++) {
        enum ucm_method method = (enum ucm_method)i;

        cr_assert_eq(sample_request(&b, method, 1, &e), 0, "%s", e.text);
        seed(proto_methods[method].name.p, "request", &b);
        cr_assert_eq(sample_response(&b, method, 1, &e), 0, "%s", e.text);
        seed(proto_methods[method].name.p, "response", &b);
    }
    ucm_error_set(&e, UCM_WIRE_BUSY, "256 requests are under way");
    cr_assert_eq(proto_response_error(&b, 1, &e), 0);
    seed("error", "response", &b);
    cr_assert_eq(proto_notification_error(&b, &e), 0);
    seed("error", "notification", &b);
    cr_assert_eq(
        proto_notification(&b, UCM_PROGRESS, &proto_progress, sample_of(&proto_progress), &e), 0);
    seed(UCM_PROGRESS, "notification", &b);
    cr_assert_eq(proto_notification(&b, UCM_MAPPING_REVOKE, &proto_mapping_revoke,
                                    sample_of(&proto_mapping_revoke), &e),
                 0);
    seed(UCM_MAPPING_REVOKE, "notification", &b);
    proto_buf_free(&b);
}
