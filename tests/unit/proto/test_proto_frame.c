/* Frames and envelopes: how hostile bytes are refused, and how frames are built.
 * tests/fuzz/fuzz_proto.c changes them at random. */
#include "proto/proto.h"
#include "tests/unit/proto/proto_samples.h"

#include <criterion/criterion.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT (4u << 20)
#define BYTES(literal) (const uint8_t *)(literal), sizeof(literal) - 1

/* Checks a copy of exactly n bytes, so that a read past the end is seen by the sanitizer. */
static int check(const uint8_t *p, size_t n, struct ucm_error *e)
{
    uint8_t *copy = malloc(n ? n : 1);
    uint32_t elements;
    int rc;

    if (n > 0)
        memcpy(copy, p, n);
    rc = proto_frame_check(copy, n, &elements, e);
    free(copy);
    return rc;
}

static void assert_refused(const uint8_t *p, size_t n, const char *part)
{
    struct ucm_error e = {0};

    cr_assert_eq(check(p, n, &e), -UCM_WIRE_INVALID, "accepted; expected \"%s\"", part);
    cr_assert_not_null(strstr(e.text, part), "\"%s\" is not in \"%s\"", part, e.text);
}

static void assert_sound(const uint8_t *p, size_t n)
{
    struct ucm_error e = {0};

    cr_assert_eq(check(p, n, &e), 0, "%s", e.text);
}

/* ---- the checker ---- */

Test(proto_frame, length_is_big_endian)
{
    cr_assert_eq(proto_frame_length((const uint8_t *)"\x01\x02\x03\x04"), 0x01020304);
    cr_assert_eq(proto_frame_length((const uint8_t *)"\xff\xff\xff\xff"), UINT32_MAX);
}

Test(proto_frame, every_plain_value_passes)
{
    assert_sound(BYTES("\x00"));
    assert_sound(BYTES("\x7f"));
    assert_sound(BYTES("\xe0"));
    assert_sound(BYTES("\xc0"));
    assert_sound(BYTES("\xc2"));
    assert_sound(BYTES("\xc3"));
    assert_sound(BYTES("\xca\x00\x00\x00\x00"));
    assert_sound(BYTES("\xcb\x00\x00\x00\x00\x00\x00\x00\x00"));
    assert_sound(BYTES("\xcc\xff"));
    assert_sound(BYTES("\xcd\xff\xff"));
    assert_sound(BYTES("\xce\xff\xff\xff\xff"));
    assert_sound(BYTES("\xcf\xff\xff\xff\xff\xff\xff\xff\xff"));
    assert_sound(BYTES("\xd0\xff"));
    assert_sound(BYTES("\xd1\xff\xff"));
    assert_sound(BYTES("\xd2\xff\xff\xff\xff"));
    assert_sound(BYTES("\xd3\xff\xff\xff\xff\xff\xff\xff\xff"));
    assert_sound(BYTES("\xa0"));
    assert_sound(BYTES("\xa1x"));
    assert_sound(BYTES("\xd9\x01x"));
    assert_sound(BYTES("\xda\x00\x01x"));
    assert_sound(BYTES("\xdb\x00\x00\x00\x01x"));
    assert_sound(BYTES("\xc4\x01x"));
    assert_sound(BYTES("\xc5\x00\x01x"));
    assert_sound(BYTES("\xc6\x00\x00\x00\x01x"));
    assert_sound(BYTES("\x90"));
    assert_sound(BYTES("\xdc\x00\x01\x00"));
    assert_sound(BYTES("\xdd\x00\x00\x00\x01\x00"));
    assert_sound(BYTES("\x80"));
    assert_sound(BYTES("\xde\x00\x01\x00\x00"));
    assert_sound(BYTES("\xdf\x00\x00\x00\x01\x00\x00"));
}

/* Five bytes that make a trusting decoder allocate 96 GB, and their kin. */
Test(proto_frame, counts_beyond_the_bytes_are_refused)
{
    assert_refused(BYTES("\xdd\xff\xff\xff\xff"), "claims more than");
    assert_refused(BYTES("\xdf\xff\xff\xff\xff"), "claims more than");
    assert_refused(BYTES("\xdf\x80\x00\x00\x00"), "claims more than"); /* twice that is 2^32 */
    assert_refused(BYTES("\xdc\xff\xff"), "claims more than");
    assert_refused(BYTES("\xde\xff\xff"), "claims more than");
    assert_refused(BYTES("\xdb\xff\xff\xff\xff"), "claims more than");
    assert_refused(BYTES("\xc6\xff\xff\xff\xff"), "claims more than");
    assert_refused(BYTES("\xc6\x00\x00\x00\x02x"), "claims more than");
    assert_refused(BYTES("\x9f\x00"), "claims more than");
    assert_refused(BYTES("\x81\x00"), "claims more than");
    assert_refused(BYTES("\xa2x"), "claims more than");
    assert_refused(BYTES("\x94\x00\x01\xa6lookup\xdd\xff\xff\xff\xff"), "claims more than");
}

/* Two arrays that are each within the bytes left, but not both. */
Test(proto_frame, counts_that_only_fit_one_by_one_are_refused)
{
    assert_refused(BYTES("\x92\x92\x00\x00"), "before its value is whole");
    assert_refused(BYTES("\x93\x93\x93\x00\x00\x00"), "before its value is whole");
}

Test(proto_frame, extensions_and_0xc1_are_refused)
{
    static const uint8_t firsts[] = {0xc7, 0xc8, 0xc9, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8};
    uint8_t frame[24] = {0};

    for (size_t i = 0; i < sizeof(firsts); i++) {
        frame[0] = firsts[i];
        assert_refused(frame, sizeof(frame), "extension type");
    }
    assert_refused(BYTES("\xc1"), "0xc1");
    assert_refused(BYTES("\x91\xc1"), "at byte 1");
}

Test(proto_frame, one_frame_is_one_value)
{
    assert_refused(BYTES("\x90\x90"), "exactly one value");
    assert_refused(BYTES("\x01\x00\x00"), "exactly one value");
    assert_refused(NULL, 0, "must have 1 to 1048576");
}

Test(proto_frame, depth_is_bounded)
{
    uint8_t deep[100000];

    memset(deep, 0x91, sizeof(deep));
    deep[UCM_MAX_DEPTH - 1] = 0x90;
    assert_sound(deep, UCM_MAX_DEPTH);
    deep[UCM_MAX_DEPTH - 1] = 0x91;
    deep[UCM_MAX_DEPTH] = 0xc0;
    assert_sound(deep, UCM_MAX_DEPTH + 1);
    deep[UCM_MAX_DEPTH] = 0x90;
    assert_refused(deep, UCM_MAX_DEPTH + 1, "nests more than 8");
    memset(deep, 0x91, sizeof(deep));
    assert_refused(deep, sizeof(deep), "nests more than 8");
    memset(deep, 0x81, sizeof(deep));
    assert_refused(deep, sizeof(deep), "nests more than 8");
}

/* array32 of n nils */
static uint8_t *nils(uint32_t n)
{
    uint8_t *p = malloc(n + 5);

    memset(p, 0xc0, n + 5);
    p[0] = 0xdd;
    for (unsigned i = 0; i < 4; i++)
        p[1 + i] = (uint8_t)(n >> (24 - 8 * i));
    return p;
}

Test(proto_frame, element_count_is_bounded)
{
    uint8_t *p = nils(UCM_MAX_ELEMENTS);

    assert_refused(p, UCM_MAX_ELEMENTS + 5, "more than 65536 MessagePack values");
    free(p);
    p = nils(UCM_MAX_ELEMENTS - 1);
    assert_sound(p, UCM_MAX_ELEMENTS + 4);
    free(p);
}

Test(proto_frame, body_length_is_bounded)
{
    uint8_t *p = calloc(1, UCM_MAX_FRAME_BYTES + 1);
    uint32_t n = UCM_MAX_FRAME_BYTES - 5;

    p[0] = 0xc6;
    for (unsigned i = 0; i < 4; i++)
        p[1 + i] = (uint8_t)(n >> (24 - 8 * i));
    assert_sound(p, UCM_MAX_FRAME_BYTES);
    assert_refused(p, UCM_MAX_FRAME_BYTES + 1, "must have 1 to 1048576");
    free(p);
}

/* ---- envelopes ---- */

struct opening {
    int rc;
    bool answerable;
    struct ucm_error error;
    struct proto_envelope env;
};

static struct opening open_bytes(const uint8_t *p, size_t n)
{
    struct opening o = {0};

    o.rc = proto_envelope_open(&o.env, p, n, &o.answerable, &o.error);
    return o;
}

static void assert_not_opened(const uint8_t *p, size_t n, const char *part)
{
    struct opening o = open_bytes(p, n);

    cr_assert_eq(o.rc, -UCM_WIRE_INVALID, "expected \"%s\"", part);
    cr_assert_not_null(strstr(o.error.text, part), "\"%s\" is not in \"%s\"", part, o.error.text);
}

Test(proto_frame, requests_open)
{
    struct opening o = open_bytes(BYTES("\x94\x00\xcd\x01\x02\xa6lookup\x80"));

    cr_assert_eq(o.rc, 0, "%s", o.error.text);
    cr_assert(o.answerable);
    cr_assert_eq(o.env.type, PROTO_REQUEST);
    cr_assert_eq(o.env.msgid, 0x102);
    cr_assert_eq(proto_method_find(o.env.method), UCM_METHOD_LOOKUP);
    cr_assert_eq(o.env.body.type, MSGPACK_OBJECT_MAP);
    proto_envelope_close(&o.env);
}

Test(proto_frame, wrong_shapes_do_not_open)
{
    static const char shapes[] = "a frame must be [0, msgid";

    assert_not_opened(BYTES("\x80"), shapes);
    assert_not_opened(BYTES("\x05"), shapes);
    assert_not_opened(BYTES("\x90"), shapes);
    assert_not_opened(BYTES("\x91\x00"), shapes);
    assert_not_opened(BYTES("\x93\x00\x01\xa1x"), shapes);         /* a request of three */
    assert_not_opened(BYTES("\x94\x02\xa1x\x80\x80"), shapes);     /* a notification of four */
    assert_not_opened(BYTES("\x94\x03\x01\xa1x\x80"), shapes);     /* no such type */
    assert_not_opened(BYTES("\x94\xa1x\x01\xa1x\x80"), shapes);    /* type is text */
    assert_not_opened(BYTES("\x95\x00\x01\xa1x\x80\x80"), shapes); /* one too many */
    assert_not_opened(BYTES("\x94\x00\xff\xa1x\x80"), "msgid must be");
    assert_not_opened(BYTES("\x94\x00\xcf\x00\x00\x00\x01\x00\x00\x00\x00\xa1x\x80"),
                      "msgid must be");
    assert_not_opened(BYTES("\x94\x00\x01\x05\x80"), "method must be");
    assert_not_opened(BYTES("\x94\x00\x01\xc4\x01x\x80"), "method must be");
    assert_not_opened(BYTES("\x94\x00\x01\xa0\x80"), "method must be");
    assert_not_opened(BYTES("\x94\x00\x01\xa1x\x90"), "params must be a map");
    assert_not_opened(BYTES("\x94\x00\x01\xa1x\xc0"), "params must be a map");
    assert_not_opened(BYTES("\x94\x01\xc0\xc0\x80"), "msgid must be");
    assert_not_opened(BYTES("\x94\x01\x01\xc0\x90"), "result must be a map");
    assert_not_opened(BYTES("\x94\x01\x01\x93\x01\xa1x\xa1y\x80"), "must have nil");
    assert_not_opened(BYTES("\x94\x01\x01\xa1x\xc0"), "an error must be");
    assert_not_opened(BYTES("\x94\x01\x01\x92\x01\xa1x\xc0"), "an error must be");
    assert_not_opened(BYTES("\x94\x01\x01\x93\x00\xa1x\xa1y\xc0"), "an error must be");
    assert_not_opened(BYTES("\x94\x01\x01\x93\x64\xa1x\xa1y\xc0"), "an error must be");
    assert_not_opened(BYTES("\x94\x01\x01\x93\x01\x05\xa1y\xc0"), "an error must be");
    assert_not_opened(BYTES("\x93\x02\x05\x80"), "method must be");
    assert_not_opened(BYTES("\x93\x02\xa5"
                            "error\x80"),
                      "an error must be");
}

/* A request whose number can be read is answered under that number, wherever it breaks afterwards.
 */
Test(proto_frame, broken_requests_can_be_answered)
{
    struct opening o = open_bytes(BYTES("\x94\x00\xce\x00\x01\x00\x02\xa6lookup\xc1"));

    cr_assert_eq(o.rc, -UCM_WIRE_INVALID);
    cr_assert(o.answerable);
    cr_assert_eq(o.env.type, PROTO_REQUEST);
    cr_assert_eq(o.env.msgid, 0x10002);
    o = open_bytes(BYTES("\x94\x00\x07\xa6lookup\x90"));
    cr_assert(o.rc < 0 && o.answerable && o.env.msgid == 7);
    /* Valid, in a longer form than needed. */
    o = open_bytes(BYTES("\xdc\x00\x04\x00\xcf\x00\x00\x00\x00\x00\x00\x00\x07\xa6lookup\x90"));
    cr_assert(o.rc < 0 && o.answerable && o.env.msgid == 7);
}

Test(proto_frame, what_is_no_request_is_not_answered)
{
    cr_assert_not(open_bytes(BYTES("\x94\x01\x07\xc1\xc0")).answerable);
    cr_assert_not(open_bytes(BYTES("\x94\x00\xff\xa6lookup\x80")).answerable);
    cr_assert_not(open_bytes(BYTES("\x94\x00\xce\x00\x01")).answerable);
    cr_assert_not(open_bytes(BYTES("\x94\x00")).answerable);
    cr_assert_not(open_bytes(BYTES("\xc1")).answerable);
    cr_assert_not(open_bytes(NULL, 0).answerable);
}

static void assert_error_comes_back(const struct proto_buf *b, enum proto_type type, uint32_t msgid,
                                    const char *text)
{
    struct opening o = open_bytes(b->p + PROTO_HEADER_BYTES, b->n - PROTO_HEADER_BYTES);

    cr_assert_eq(o.rc, 0, "%s", o.error.text);
    cr_assert_eq(o.env.type, type);
    cr_assert_eq(o.env.msgid, msgid);
    cr_assert_eq(o.env.error.code, UCM_WIRE_BUSY);
    cr_assert_str_eq(o.env.error.text, text);
    proto_envelope_close(&o.env);
}

Test(proto_frame, errors_travel)
{
    struct ucm_error e = {0};
    struct proto_buf b;

    proto_buf_init(&b, LIMIT);
    ucm_error_set(&e, UCM_WIRE_BUSY, "256 requests are under way; wait for one");
    cr_assert_eq(proto_response_error(&b, 12, &e), 0);
    assert_error_comes_back(&b, PROTO_RESPONSE, 12, e.text);
    b.n = 0;
    cr_assert_eq(proto_notification_error(&b, &e), 0);
    assert_error_comes_back(&b, PROTO_NOTIFICATION, 0, e.text);
    b.n = 0;
    e.text[0] = '\0';
    cr_assert_eq(proto_response_error(&b, 12, &e), 0);
    assert_error_comes_back(&b, PROTO_RESPONSE, 12, ucm_error_sentence(UCM_WIRE_BUSY));
    proto_buf_free(&b);
}

Test(proto_frame, foreign_error_texts_are_cut_and_cleaned)
{
    struct ucm_error e;
    msgpack_sbuffer b;
    msgpack_packer pk;
    struct opening o;
    char text[1000];

    memset(text, '\n', sizeof(text));
    msgpack_sbuffer_init(&b);
    msgpack_packer_init(&pk, &b, msgpack_sbuffer_write);
    msgpack_pack_array(&pk, 3);
    msgpack_pack_int(&pk, PROTO_NOTIFICATION);
    proto_pack_str(&pk, "error");
    msgpack_pack_array(&pk, 3);
    msgpack_pack_int(&pk, 99);
    proto_pack_str(&pk, "NEW");
    proto_pack_strn(&pk, text, sizeof(text));
    o = open_bytes((const uint8_t *)b.data, b.size);
    cr_assert_eq(o.rc, 0, "%s", o.error.text);
    cr_assert_eq(o.env.error.code, 99);
    cr_assert_eq(strlen(o.env.error.text), sizeof(e.text) - 1);
    cr_assert_eq(strspn(o.env.error.text, "?"), sizeof(e.text) - 1);
    proto_envelope_close(&o.env);
    msgpack_sbuffer_destroy(&b);
}

/* The memory that a frame takes follows from what it holds, not from what it says. */
Test(proto_frame, memory_is_bounded_by_the_values)
{
    uint8_t *p = nils(60000), *frame = malloc(60100);
    size_t before, after;
    struct opening o;

    memcpy(frame, "\x94\x00\x01\xa1x\x81\xa1y", 8);
    memcpy(frame + 8, p, 60005);
    before = mallinfo2().uordblks + mallinfo2().hblkhd;
    o = open_bytes(frame, 8 + 60005);
    cr_assert_eq(o.rc, 0, "%s", o.error.text);
    after = mallinfo2().uordblks + mallinfo2().hblkhd;
    cr_assert_leq(after - before, 60000 * 100);
    proto_envelope_close(&o.env);
    free(p);
    free(frame);
}

/* ---- builders ---- */

Test(proto_frame, several_frames_share_a_buffer)
{
    struct ucm_error e = {0};
    struct proto_buf b;
    size_t first;

    proto_buf_init(&b, LIMIT);
    cr_assert_eq(sample_request(&b, UCM_METHOD_HELLO, 1, &e), 0);
    first = b.n;
    cr_assert_eq(sample_request(&b, UCM_METHOD_LOOKUP, 2, &e), 0);
    cr_assert_eq(proto_frame_length(b.p), first - PROTO_HEADER_BYTES);
    cr_assert_eq(proto_frame_length(b.p + first), b.n - first - PROTO_HEADER_BYTES);
    proto_buf_free(&b);
    cr_assert_null(b.p);
}

Test(proto_frame, a_frame_that_fails_leaves_the_buffer)
{
    struct msg_lookup bad = {.ns = 1, .keys = {(const uint8_t *)"abc", 3}};
    struct ucm_error e = {0};
    uint8_t before[512];
    struct proto_buf b;
    size_t n;

    proto_buf_init(&b, 150);
    cr_assert_eq(sample_request(&b, UCM_METHOD_LOOKUP, 1, &e), 0, "%s", e.text);
    n = b.n;
    memcpy(before, b.p, n);
    cr_assert_eq(sample_request(&b, UCM_METHOD_LOAD, 2, &e), -UCM_WIRE_INVALID);
    cr_assert_not_null(strstr(e.text, "of at most 150"), "%s", e.text);
    cr_assert_eq(b.n, n);
    cr_assert_eq(proto_request(&b, 3, UCM_METHOD_LOOKUP, &proto_lookup, &bad, &e),
                 -UCM_WIRE_INVALID);
    cr_assert_not_null(strstr(e.text, "\"keys\" has 3 bytes"), "%s", e.text);
    cr_assert_eq(b.n, n);
    cr_assert_arr_eq(b.p, before, n);
    cr_assert_eq(sample_request(&b, UCM_METHOD_CANCEL, 4, &e), 0, "%s", e.text);
    cr_assert_leq(b.cap, 150);
    proto_buf_free(&b);
}

Test(proto_frame, a_builder_refuses_what_a_peer_would)
{
    struct proto_builder pb;
    struct ucm_error e = {0};
    struct proto_buf b;

    proto_buf_init(&b, LIMIT);
    proto_response_begin(&pb, &b, 1);
    msgpack_pack_map(&pb.pk, 1);
    cr_assert_eq(proto_frame_end(&pb, &e), -UCM_WIRE_INVALID);
    proto_response_begin(&pb, &b, 1);
    msgpack_pack_map(&pb.pk, 0);
    msgpack_pack_map(&pb.pk, 0);
    cr_assert_eq(proto_frame_end(&pb, &e), -UCM_WIRE_INVALID);
    proto_response_begin(&pb, &b, 1);
    msgpack_pack_array(&pb.pk, UCM_MAX_ELEMENTS);
    for (unsigned i = 0; i < UCM_MAX_ELEMENTS; i++)
        msgpack_pack_nil(&pb.pk);
    cr_assert_eq(proto_frame_end(&pb, &e), -UCM_WIRE_INVALID);
    proto_response_begin(&pb, &b, 1);
    msgpack_pack_array(&pb.pk, 1u << 20);
    for (unsigned i = 0; i < 1u << 20; i++)
        msgpack_pack_nil(&pb.pk);
    cr_assert_eq(proto_frame_end(&pb, &e), -UCM_WIRE_INVALID);
    cr_assert_not_null(strstr(e.text, "at most 1048576"), "%s", e.text);
    cr_assert_eq(b.n, 0);
    proto_buf_free(&b);
}

Test(proto_frame, packed_params_go_in_as_they_are)
{
    struct proto_builder pb;
    struct ucm_error e = {0};
    struct proto_buf a, b;

    proto_buf_init(&a, LIMIT);
    proto_buf_init(&b, LIMIT);
    cr_assert_eq(proto_request(&a, 1, UCM_METHOD_RELEASE, &proto_release,
                               &(struct msg_release){.lease = 9}, &e),
                 0);
    proto_request_begin(&pb, &b, 1, "release");
    proto_pack_raw(&pb.pk, BYTES("\x81\xa5lease\x09"));
    cr_assert_eq(proto_frame_end(&pb, &e), 0, "%s", e.text);
    cr_assert_eq(a.n, b.n);
    cr_assert_arr_eq(a.p, b.p, a.n);
    proto_buf_free(&a);
    proto_buf_free(&b);
}

/* ---- all frames, damaged ---- */

static void each_frame(void (*visit)(const uint8_t *body, size_t n, enum ucm_method method))
{
    struct ucm_error e = {0};
    struct proto_buf b;

    for (int i = 0; i < 2 * UCM_METHOD_COUNT; i++) {
        enum ucm_method method = (enum ucm_method)(i / 2);

        proto_buf_init(&b, LIMIT);
        cr_assert_eq(i % 2 ? sample_response(&b, method, 300, &e)
                           : sample_request(&b, method, 300, &e),
                     0, "%s", e.text);
        visit(b.p + PROTO_HEADER_BYTES, b.n - PROTO_HEADER_BYTES, method);
        proto_buf_free(&b);
    }
}

static void truncate_everywhere(const uint8_t *body, size_t n, enum ucm_method method)
{
    struct ucm_error e = {0};

    assert_sound(body, n);
    for (size_t cut = 0; cut < n; cut++)
        cr_assert_eq(check(body, cut, &e), -UCM_WIRE_INVALID, "%s cut at %zu",
                     proto_methods[method].name.p, cut);
}

Test(proto_frame, truncation_is_refused_at_every_byte)
{
    each_frame(truncate_everywhere);
}

static void add_a_byte(const uint8_t *body, size_t n, enum ucm_method method)
{
    uint8_t *longer = malloc(n + 1);
    struct ucm_error e = {0};

    memcpy(longer, body, n);
    for (int last = 0; last < 256; last++) {
        longer[n] = (uint8_t)last;
        cr_assert_eq(check(longer, n + 1, &e), -UCM_WIRE_INVALID, "%s",
                     proto_methods[method].name.p);
    }
    free(longer);
}

Test(proto_frame, trailing_bytes_are_refused)
{
    each_frame(add_a_byte);
}
