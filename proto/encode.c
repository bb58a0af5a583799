#include "proto/tables.h"

#include <assert.h>
#include <string.h>

#define SAME_SHAPE(type)                                                                           \
    static_assert(sizeof(struct type) == sizeof(struct proto_view) &&                              \
                      offsetof(struct type, n) == offsetof(struct proto_view, n),                  \
                  #type " is not a view")
SAME_SHAPE(proto_str);
SAME_SHAPE(proto_bin);
SAME_SHAPE(proto_u32s);
SAME_SHAPE(proto_handles);
SAME_SHAPE(proto_planes);

static struct proto_view view_of(const struct proto_field *f, const void *message)
{
    struct proto_view v;

    memcpy(&v, (const uint8_t *)message + f->offset, sizeof(v));
    assert(v.n == 0 || v.p);
    return v;
}

/* The number itself, or the length of what the field holds. 0 leaves an optional field out. */
static uint64_t amount_of(const struct proto_field *f, const void *message)
{
    const uint8_t *at = (const uint8_t *)message + f->offset;
    uint64_t number;
    bool flag;

    if (f->kind == PROTO_KIND_u64) {
        memcpy(&number, at, sizeof(number));
        return number;
    }
    if (f->kind == PROTO_KIND_flag) {
        memcpy(&flag, at, sizeof(flag));
        return flag;
    }
    return view_of(f, message).n;
}

static double real_of(const struct proto_field *f, const void *message)
{
    double real;

    memcpy(&real, (const uint8_t *)message + f->offset, sizeof(real));
    return real;
}

static bool field_present(const struct proto_field *f, const void *message)
{
    if (f->kind == PROTO_KIND_f64)
        return f->required || real_of(f, message) != 0;
    return f->required || amount_of(f, message) != 0;
}

static int field_check(const struct proto_field *f, const void *message,
                       const struct proto_where *where)
{
    int rc = f->kind == PROTO_KIND_f64 ? proto_check_real(f, real_of(f, message), where)
                                       : proto_check_amount(f, amount_of(f, message), where);
    struct proto_view v;

    if (rc || f->kind != PROTO_KIND_str)
        return rc;
    v = view_of(f, message);
    return proto_check_text(f, v.p, v.n, where);
}

static int entries_encode(msgpack_packer *pk, const struct proto_field *f, struct proto_view v,
                          const struct proto_where *where)
{
    const struct proto_message *m = proto_entry_message((enum proto_kind)f->kind);
    struct proto_where inner = {.outer = f->name, .e = where->e};
    int rc;

    msgpack_pack_array(pk, v.n);
    for (inner.index = 0; inner.index < v.n; inner.index++) {
        rc = proto_message_pack(pk, m, (const uint8_t *)v.p + (size_t)inner.index * m->bytes,
                                &inner);
        if (rc)
            return rc;
    }
    return 0;
}

static void u32s_encode(msgpack_packer *pk, struct proto_view v)
{
    const uint32_t *p = v.p;

    msgpack_pack_array(pk, v.n);
    for (uint32_t i = 0; i < v.n; i++)
        msgpack_pack_uint32(pk, p[i]);
}

static int field_encode(msgpack_packer *pk, const struct proto_field *f, const void *message,
                        const struct proto_where *where)
{
    struct proto_view v = {0};

    if (f->kind != PROTO_KIND_u64 && f->kind != PROTO_KIND_flag && f->kind != PROTO_KIND_f64)
        v = view_of(f, message);
    proto_pack_strn(pk, f->name, f->name_bytes);
    switch ((enum proto_kind)f->kind) {
    case PROTO_KIND_u64:
        msgpack_pack_uint64(pk, amount_of(f, message));
        break;
    case PROTO_KIND_flag:
        if (amount_of(f, message))
            msgpack_pack_true(pk);
        else
            msgpack_pack_false(pk);
        break;
    case PROTO_KIND_f64:
        msgpack_pack_double(pk, real_of(f, message));
        break;
    case PROTO_KIND_str:
        proto_pack_strn(pk, v.p, v.n);
        break;
    case PROTO_KIND_bin:
        msgpack_pack_bin(pk, v.n);
        proto_pack_raw(pk, v.p, v.n);
        break;
    case PROTO_KIND_u32s:
        u32s_encode(pk, v);
        break;
    case PROTO_KIND_handles:
    case PROTO_KIND_planes:
        return entries_encode(pk, f, v, where);
    }
    return 0;
}

int proto_message_pack(msgpack_packer *pk, const struct proto_message *m, const void *message,
                       const struct proto_where *where)
{
    const struct proto_field *fields = m->fields();
    uint32_t present = 0;
    int rc;

    assert(!m->free);
    for (uint32_t i = 0; i < m->n_fields; i++) {
        if (!field_present(&fields[i], message))
            continue;
        rc = field_check(&fields[i], message, where);
        if (rc)
            return rc;
        present++;
    }
    msgpack_pack_map(pk, present);
    for (uint32_t i = 0; i < m->n_fields; i++) {
        if (!field_present(&fields[i], message))
            continue;
        rc = field_encode(pk, &fields[i], message, where);
        if (rc)
            return rc;
    }
    return 0;
}
