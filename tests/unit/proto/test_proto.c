/* Messages: what is encoded is decoded to the same; methods; the largest requests. */
#include "tests/unit/proto/proto_rig.h"

static void assert_same(const struct proto_message *m, const void *a, const void *b)
{
    const struct proto_field *f = m->fields;
    struct proto_view va, vb;
    size_t entry;

    for (uint32_t i = 0; i < m->n_fields; i++, f++) {
        if (f->kind == PROTO_KIND_u64 || f->kind == PROTO_KIND_flag || f->kind == PROTO_KIND_f64) {
            cr_assert_arr_eq((const uint8_t *)a + f->offset, (const uint8_t *)b + f->offset,
                             f->kind == PROTO_KIND_flag ? sizeof(bool) : sizeof(uint64_t), "%s.%s",
                             m->name, f->name);
            continue;
        }
        va = view_at(a, f);
        vb = view_at(b, f);
        cr_assert_eq(va.n, vb.n, "%s.%s", m->name, f->name);
        if (f->kind == PROTO_KIND_handles || f->kind == PROTO_KIND_planes) {
            entry = proto_entry_message((enum proto_kind)f->kind)->bytes;
            for (uint32_t k = 0; k < va.n; k++)
                assert_same(proto_entry_message((enum proto_kind)f->kind),
                            (const uint8_t *)va.p + k * entry, (const uint8_t *)vb.p + k * entry);
        } else if (va.n > 0) {
            cr_assert_arr_eq(va.p, vb.p, va.n * (f->kind == PROTO_KIND_u32s ? 4 : 1), "%s.%s",
                             m->name, f->name);
        }
    }
}

Test(proto, every_message_comes_back_as_it_was)
{
    for (size_t i = 0; i < N_PROTO_MESSAGES; i++) {
        const struct proto_message *m = proto_messages[i];
        void *out = calloc(1, m->bytes + 1);
        struct opened o;

        open_sample(&o, m);
        decode_message(&o, m, out);
        assert_same(m, sample_of(m), out);
        close_message(&o);
        free(out);
    }
}

/* A field that a sender leaves out reads as zero, and costs no byte. */
Test(proto, optional_fields_are_left_out)
{
    struct msg_lookup in = {.ns = 1, .keys = {(const uint8_t *)"0123456789abcdef", 16}}, out;
    struct opened o;

    open_message(&o, &proto_lookup, &in);
    cr_assert_eq(o.env.body.via.map.size, 2);
    memset(&out, 0xff, sizeof(out));
    decode_message(&o, &proto_lookup, &out);
    cr_assert(!out.per_key && out.lease_ms == 0);
    close_message(&o);
}

Test(proto, absent_views_are_null_and_empty_ones_are_not)
{
    struct msg_ns_open in = *(const struct msg_ns_open *)sample_of(&proto_ns_open), out;
    struct opened o;

    in.tenant.n = in.revision.n = in.salt.n = 0;
    open_message(&o, &proto_ns_open, &in);
    decode_message(&o, &proto_ns_open, &out);
    cr_assert_null(out.tenant.p);
    cr_assert_null(out.salt.p);
    close_message(&o);

    open_sample(&o, &proto_ns_open);
    o.env.body.via.map.ptr[0].val.via.str.size = 0;
    o.env.body.via.map.ptr[0].val.via.str.ptr = NULL;
    decode_message(&o, &proto_ns_open, &out);
    cr_assert_eq(out.tenant.n, 0);
    cr_assert_not_null(out.tenant.p);
    close_message(&o);
}

Test(proto, views_point_into_the_frame)
{
    struct msg_load out;
    struct opened o;

    open_sample(&o, &proto_load);
    decode_message(&o, &proto_load, &out);
    cr_assert(out.keys.p > o.buf.p && out.keys.p + out.keys.n <= o.buf.p + o.buf.n);
    close_message(&o);
}

Test(proto, fields_come_in_any_order)
{
    struct msg_load out;
    struct opened o;
    msgpack_object_kv kv;
    uint32_t n;

    open_sample(&o, &proto_load);
    n = o.env.body.via.map.size;
    for (uint32_t i = 0; i < n / 2; i++) {
        kv = o.env.body.via.map.ptr[i];
        o.env.body.via.map.ptr[i] = o.env.body.via.map.ptr[n - 1 - i];
        o.env.body.via.map.ptr[n - 1 - i] = kv;
    }
    decode_message(&o, &proto_load, &out);
    assert_same(&proto_load, sample_of(&proto_load), &out);
    close_message(&o);
}

/* ---- methods ---- */

Test(proto, methods_are_found_by_name)
{
    for (int i = 0; i < UCM_METHOD_COUNT; i++) {
        const char *name = proto_methods[i].name.p;

        cr_assert_eq(proto_method_find((struct proto_str){name, (uint32_t)strlen(name)}), i);
    }
    cr_assert_eq(proto_method_find((struct proto_str){"lookupx", 7}), -1);
    cr_assert_eq(proto_method_find((struct proto_str){"looku", 5}), -1);
    cr_assert_eq(proto_method_find((struct proto_str){NULL, 0}), -1);
    cr_assert_eq(proto_methods[UCM_METHOD_VERIFY].params, &proto_ls);
    cr_assert_eq(proto_methods[UCM_METHOD_STATS].result, &proto_free_map);
}

/* ---- sizes ---- */

Test(proto, the_largest_requests_fit)
{
    uint8_t *keys = malloc(UCM_KEYS_BYTES + 1), *blocks = calloc(1, UCM_BLOCKS_BYTES);
    struct msg_load in = {.region = 1,
                          .keys = {keys, UCM_KEYS_BYTES},
                          .blocks = {blocks, UCM_BLOCKS_BYTES},
                          .priority = 7,
                          .timeout_ms = UCM_TIMEOUT_MS},
                    out;
    struct msg_lookup lookup = {.ns = 1, .keys = {keys, UCM_KEYS_BYTES + 1}};
    struct ucm_error e = {0};
    struct proto_buf b;
    struct opened o;

    for (size_t i = 0; i <= UCM_KEYS_BYTES; i++)
        keys[i] = (uint8_t)(i * 31);
    open_message(&o, &proto_load, &in);
    decode_message(&o, &proto_load, &out);
    assert_same(&proto_load, &in, &out);
    close_message(&o);

    proto_buf_init(&b, LIMIT);
    cr_assert_eq(proto_request(&b, 1, UCM_METHOD_LOOKUP, &proto_lookup, &lookup, &e),
                 -UCM_WIRE_INVALID);
    cr_assert_str_eq(e.text,
                     "field \"keys\" has 524289 bytes; it must be binary (MessagePack bin) of 16 "
                     "to 524288 bytes");
    proto_buf_free(&b);
    free(keys);
    free(blocks);
}

Test(proto, the_largest_region_fits)
{
    struct msg_handle *handles = calloc(UCM_MAX_HANDLES, sizeof(*handles));
    struct msg_plane *planes = calloc(UCM_MAX_PLANES, sizeof(*planes));
    static const uint8_t ipc[UCM_MAX_HANDLE_BYTES];
    struct msg_region_register in = *(const struct msg_region_register *)sample_of(
                                   &proto_region_register),
                               out;
    struct opened o;

    for (uint32_t i = 0; i < UCM_MAX_HANDLES; i++)
        handles[i] = (struct msg_handle){
            UCM_HANDLE_CUDA_IPC, UINT64_MAX / 2, UINT64_MAX / 2, {ipc, sizeof(ipc)}, 63};
    for (uint32_t i = 0; i < UCM_MAX_PLANES; i++)
        planes[i] = (struct msg_plane){UCM_MAX_HANDLES - 1, UINT64_MAX / 2, UINT64_MAX / 2,
                                       UINT32_MAX, i % UCM_MAX_LAYERS};
    in.handles = (struct proto_handles){handles, UCM_MAX_HANDLES};
    in.planes = (struct proto_planes){planes, UCM_MAX_PLANES};
    open_message(&o, &proto_region_register, &in);
    decode_message(&o, &proto_region_register, &out);
    assert_same(&proto_region_register, &in, &out);
    close_message(&o);
    free(handles);
    free(planes);
}
