/* Messages: every field refuses what its table forbids, with a sentence; which text and integers
 * are valid. */
#include "tests/unit/proto/proto_rig.h"

/* ---- refusals, for every field of every table ---- */

/* Decodes and expects a refusal that names the field and leaves the output alone. */
static void assert_refused(const struct proto_message *m, struct proto_envelope *env,
                           const char *field, const char *why)
{
    uint8_t *out = malloc(m->bytes + 1), *before = malloc(m->bytes + 1);
    struct ucm_error e = {0};
    char quoted[64];

    memset(out, 0xa5, m->bytes);
    memset(before, 0xa5, m->bytes);
    cr_assert_eq(proto_decode(m, env, out, &e), -UCM_WIRE_INVALID, "%s.%s %s: accepted", m->name,
                 field, why);
    cr_assert_eq(e.code, UCM_WIRE_INVALID);
    snprintf(quoted, sizeof(quoted), "\"%s\"", field);
    cr_assert_not_null(strstr(e.text, quoted), "%s.%s %s: %s", m->name, field, why, e.text);
    cr_assert(m->bytes == 0 || memcmp(out, before, m->bytes) == 0, "%s.%s %s: output touched",
              m->name, field, why);
    free(out);
    free(before);
}

static void try_wrong_types(const struct proto_message *m, const struct proto_field *f,
                            struct proto_envelope *env, msgpack_object *val)
{
    static const msgpack_object others[] = {
        {.type = MSGPACK_OBJECT_NIL},
        {.type = MSGPACK_OBJECT_BOOLEAN, .via.boolean = true},
        {.type = MSGPACK_OBJECT_POSITIVE_INTEGER, .via.u64 = 1},
        {.type = MSGPACK_OBJECT_NEGATIVE_INTEGER, .via.i64 = -1},
        {.type = MSGPACK_OBJECT_FLOAT64, .via.f64 = 1},
        {.type = MSGPACK_OBJECT_STR, .via.str = {16, "0123456789abcdef"}},
        {.type = MSGPACK_OBJECT_BIN, .via.bin = {16, "0123456789abcdef"}},
        {.type = MSGPACK_OBJECT_ARRAY},
        {.type = MSGPACK_OBJECT_MAP},
    };
    msgpack_object saved = *val;

    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        if (others[i].type == saved.type)
            continue;
        *val = others[i];
        assert_refused(m, env, f->name, "of another type");
    }
    *val = saved;
}

/* Puts a value of the given amount (the number, or a length) into the field. */
static void set_amount(msgpack_object *val, uint64_t amount)
{
    static char filler[UCM_MAX_FRAME_BYTES + 2];
    static msgpack_object entries[UCM_MAX_SELECT_ROWS + 2];

    memset(filler, 'a', sizeof(filler));
    if (val->type == MSGPACK_OBJECT_POSITIVE_INTEGER) {
        val->via.u64 = amount;
        return;
    }
    if (val->type == MSGPACK_OBJECT_FLOAT64) {
        val->via.f64 = (double)amount;
        return;
    }
    if (val->type != MSGPACK_OBJECT_ARRAY) {
        cr_assert_leq(amount, sizeof(filler));
        val->via.str.ptr = filler;
        val->via.str.size = (uint32_t)amount;
        return;
    }
    cr_assert_leq(amount, UCM_MAX_SELECT_ROWS + 2);
    for (uint64_t i = 0; i < amount; i++)
        entries[i] = val->via.array.ptr[0];
    val->via.array.ptr = entries;
    val->via.array.size = (uint32_t)amount;
}

/* why: NULL where the amount is right. */
static void try_amount(const struct proto_message *m, const struct proto_field *f,
                       struct proto_envelope *env, msgpack_object *val, uint64_t amount,
                       const char *why)
{
    uint8_t *out = malloc(m->bytes);
    msgpack_object saved = *val;
    struct ucm_error e = {0};

    set_amount(val, amount);
    if (why)
        assert_refused(m, env, f->name, why);
    else
        cr_assert_eq(proto_decode(m, env, out, &e), 0, "%s", e.text);
    *val = saved;
    free(out);
}

static void try_amounts(const struct proto_message *m, const struct proto_field *f,
                        struct proto_envelope *env, msgpack_object *val)
{
    try_amount(m, f, env, val, f->min, NULL);
    try_amount(m, f, env, val, f->max, NULL);
    if (f->min > 0)
        try_amount(m, f, env, val, f->min - 1, "below its bound");
    if (f->max < UINT64_MAX)
        try_amount(m, f, env, val, f->max + 1, "above its bound");
}

static void try_missing_and_twice(const struct proto_message *m, const struct proto_field *f,
                                  struct proto_envelope *env, uint32_t i)
{
    msgpack_object_kv *kv = env->body.via.map.ptr, saved = kv[i], last;
    uint32_t n = env->body.via.map.size, other = i == 0 ? n - 1 : 0;

    if (f->required) {
        last = kv[n - 1];
        kv[i] = last;
        env->body.via.map.size = n - 1;
        assert_refused(m, env, f->name, "missing");
        env->body.via.map.size = n;
        kv[i] = saved;
        kv[n - 1] = last;
    }
    if (n > 1) {
        last = kv[other];
        kv[other] = saved;
        assert_refused(m, env, f->name, "given twice");
        kv[other] = last;
    }
    kv[i].key.via.str.ptr = "sahrd";
    kv[i].key.via.str.size = 5;
    assert_refused(m, env, "sahrd", "unknown");
    kv[i] = saved;
}

Test(proto, every_field_refuses_what_its_table_forbids)
{
    for (size_t s = 0; s < N_PROTO_MESSAGES; s++) {
        const struct proto_message *m = proto_messages[s];
        const struct proto_field *f = m->fields;
        struct opened o;

        open_sample(&o, m);
        cr_assert_eq(o.env.body.via.map.size, m->n_fields, "the sample of %s has every field",
                     m->name);
        for (uint32_t i = 0; i < m->n_fields; i++, f++) {
            try_wrong_types(m, f, &o.env, &o.env.body.via.map.ptr[i].val);
            if (f->kind != PROTO_KIND_flag)
                try_amounts(m, f, &o.env, &o.env.body.via.map.ptr[i].val);
            try_missing_and_twice(m, f, &o.env, i);
        }
        close_message(&o);
    }
}

Test(proto, floats_are_floats_of_either_size_and_finite)
{
    static const double wrong[] = {NAN, -NAN, INFINITY, -INFINITY, -0.25, 1.0000001};
    struct msg_select out;
    struct opened o;
    msgpack_object *val = NULL;

    open_sample(&o, &proto_select);
    for (uint32_t i = 0; i < proto_select.n_fields; i++)
        if (strcmp(proto_select.fields[i].name, "eps") == 0)
            val = &o.env.body.via.map.ptr[i].val;
    cr_assert(val && val->type == MSGPACK_OBJECT_FLOAT64);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        val->via.f64 = wrong[i];
        assert_refused(&proto_select, &o.env, "eps", "of a wrong value");
    }
    val->type = MSGPACK_OBJECT_FLOAT32;
    val->via.f64 = 0.5;
    decode_message(&o, &proto_select, &out);
    cr_assert(out.eps == 0.5 && out.sparse_ratio == 0.25);
    close_message(&o);
}

/* ---- sentences ---- */

static void assert_says(const struct proto_message *m, struct proto_envelope *env,
                        const char *sentence)
{
    uint64_t out[64];
    struct ucm_error e = {0};

    cr_assert_leq(m->bytes, sizeof(out));
    cr_assert_eq(proto_decode(m, env, out, &e), -UCM_WIRE_INVALID);
    cr_assert_str_eq(e.text, sentence);
}

Test(proto, sentences_say_what_would_be_right)
{
    msgpack_object *val;
    struct opened o;

    open_sample(&o, &proto_load);
    val = &o.env.body.via.map.ptr[5].val;
    val->via.u64 = 9;
    assert_says(&proto_load, &o.env,
                "field \"priority\" is 9; it must be an unsigned integer, 0 to 7, or be left out");
    val->type = MSGPACK_OBJECT_NEGATIVE_INTEGER;
    val->via.i64 = -3;
    assert_says(&proto_load, &o.env,
                "field \"priority\" is -3; it must be an unsigned integer, 0 to 7, or be left out");
    o.env.body.via.map.ptr[1].val.type = MSGPACK_OBJECT_STR;
    assert_says(
        &proto_load, &o.env,
        "field \"keys\" is text (MessagePack str); it must be binary (MessagePack bin) of 16 to "
        "524288 bytes");
    o.env.body.via.map.ptr[0].key.via.str.ptr = "sl\"ot\n";
    assert_says(&proto_load, &o.env,
                "field \"sl?ot?\" is not known; there are: region, keys, blocks, layer, layers, "
                "priority, timeout_ms, progress_interval, request, gpu_busy, lease, shifts");
    o.env.body.via.map.ptr[0].key.type = MSGPACK_OBJECT_BIN;
    assert_says(&proto_load, &o.env,
                "a field's name is binary (MessagePack bin); it must be text (MessagePack str)");
    o.env.body.via.map.size = 0;
    assert_says(&proto_load, &o.env,
                "field \"region\" is missing; it must be an unsigned integer, 1 to 4294967295");
    o.env.body.type = MSGPACK_OBJECT_ARRAY;
    assert_says(&proto_load, &o.env,
                "the message is an array; it must be a map from field name to value");
    close_message(&o);
}

Test(proto, sentences_name_the_entry_of_an_array)
{
    msgpack_object *planes;
    struct opened o;

    open_sample(&o, &proto_region_register);
    planes = &o.env.body.via.map.ptr[6].val;
    planes->via.array.ptr[1].via.map.ptr[2].val.via.u64 = 0;
    assert_says(&proto_region_register, &o.env,
                "field \"planes[1].stride\" is 0; it must be an unsigned integer, 1 to "
                "9223372036854775807");
    planes->via.array.ptr[1].type = MSGPACK_OBJECT_NIL;
    assert_says(&proto_region_register, &o.env, "field \"planes[1]\" is nil; it must be a map");
    close_message(&o);

    open_sample(&o, &proto_ns_open);
    o.env.body.via.map.ptr[8].val.via.array.ptr[1].via.u64 = 1ull << 32;
    assert_says(&proto_ns_open, &o.env,
                "field \"layers\" at [1] is 4294967296; it must be an array of 1 to 256 unsigned "
                "integers below 2^32");
    o.env.body.via.map.ptr[8].val.via.array.ptr[1].type = MSGPACK_OBJECT_NIL;
    assert_says(&proto_ns_open, &o.env,
                "field \"layers\" at [1] is nil; it must be an array of 1 to 256 unsigned integers "
                "below 2^32");
    close_message(&o);
}

/* Names reach C strings, logs and terminals: "a\0b" must not become the namespace of "a". */
Test(proto, text_is_utf8_without_control_characters)
{
    static const struct {
        const char *p;
        uint32_t n;
        bool right;
    } cases[] = {
        {"a", 1, true},
        {"\xc3\xa9", 2, true},
        {"\xe6\xa8\xa1\xe5\x9e\x8b", 6, true},
        {"\xf0\x9f\x98\x80", 4, true},
        {"\xf4\x8f\xbf\xbf", 4, true},
        {"a\0b", 3, false},
        {"a\nb", 3, false},
        {"\x1b[2J", 4, false},
        {"\x7f", 1, false},
        {"\xc2\x9b", 2, false},         /* a control sequence by one character */
        {"\x80", 1, false},             /* a stray continuation */
        {"\xc3", 1, false},             /* cut short */
        {"\xc3(", 2, false},            /* not continued */
        {"\xc0\xaf", 2, false},         /* longer than needed */
        {"\xe0\x80\xaf", 3, false},     /* longer than needed */
        {"\xed\xa0\x80", 3, false},     /* a surrogate */
        {"\xf4\x90\x80\x80", 4, false}, /* past the last one */
        {"\xf8\x88\x80\x80\x80", 5, false},
    };
    struct msg_hello in = *(const struct msg_hello *)sample_of(&proto_hello), out;
    struct ucm_error e = {0};
    struct proto_buf b;
    struct opened o;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        open_sample(&o, &proto_hello);
        o.env.body.via.map.ptr[2].val.via.str.ptr = cases[i].p;
        o.env.body.via.map.ptr[2].val.via.str.size = cases[i].n;
        cr_assert_eq(proto_decode(&proto_hello, &o.env, &out, &e) == 0, cases[i].right, "case %zu",
                     i);
        close_message(&o);
        proto_buf_init(&b, LIMIT);
        in.client = (struct proto_str){cases[i].p, cases[i].n};
        cr_assert_eq(proto_response(&b, 1, &proto_hello, &in, &e) == 0, cases[i].right, "case %zu",
                     i);
        proto_buf_free(&b);
    }
}

/* ---- numbers ---- */

Test(proto, any_integer_encoding_that_is_not_negative_will_do)
{
    static const struct {
        const char *p;
        size_t n;
    } fives[] = {{"\x05", 1},
                 {"\xcc\x05", 2},
                 {"\xcd\x00\x05", 3},
                 {"\xce\x00\x00\x00\x05", 5},
                 {"\xcf\x00\x00\x00\x00\x00\x00\x00\x05", 9},
                 {"\xd0\x05", 2},
                 {"\xd1\x00\x05", 3},
                 {"\xd2\x00\x00\x00\x05", 5},
                 {"\xd3\x00\x00\x00\x00\x00\x00\x00\x05", 9}};

    for (size_t i = 0; i < sizeof(fives) / sizeof(fives[0]); i++) {
        struct ucm_error e = {0};
        struct msg_region out;
        struct proto_builder pb;
        struct proto_envelope env;
        struct proto_buf b;
        bool answerable;

        proto_buf_init(&b, LIMIT);
        proto_response_begin(&pb, &b, 1);
        msgpack_pack_map(&pb.pk, 1);
        proto_pack_str(&pb.pk, "region");
        proto_pack_raw(&pb.pk, fives[i].p, fives[i].n);
        cr_assert_eq(proto_frame_end(&pb, &e), 0, "%s", e.text);
        cr_assert_eq(
            proto_envelope_open(&env, body_of(&b), b.n - PROTO_HEADER_BYTES, &answerable, &e), 0);
        cr_assert_eq(proto_decode(&proto_region, &env, &out, &e), 0, "%s", e.text);
        cr_assert_eq(out.region, 5);
        proto_envelope_close(&env);
        proto_buf_free(&b);
    }
}
