#include "proto/tables.h"

#include <inttypes.h>
#include <string.h>

static int map_decode(const struct proto_message *m, const msgpack_object *from, msgpack_zone *zone,
                      void *out, const struct proto_where *where);

static const char *type_text(msgpack_object_type type)
{
    static const char *const texts[] = {
        [MSGPACK_OBJECT_NIL] = "is nil",
        [MSGPACK_OBJECT_BOOLEAN] = "is a boolean",
        [MSGPACK_OBJECT_POSITIVE_INTEGER] = "is an integer",
        [MSGPACK_OBJECT_NEGATIVE_INTEGER] = "is a negative integer",
        [MSGPACK_OBJECT_FLOAT32] = "is a float",
        [MSGPACK_OBJECT_FLOAT64] = "is a float",
        [MSGPACK_OBJECT_STR] = "is text (MessagePack str)",
        [MSGPACK_OBJECT_BIN] = "is binary (MessagePack bin)",
        [MSGPACK_OBJECT_ARRAY] = "is an array",
        [MSGPACK_OBJECT_MAP] = "is a map",
        [MSGPACK_OBJECT_EXT] = "is an extension type",
    };

    return texts[type];
}

static int type_refuse(const struct proto_field *f, const msgpack_object *from,
                       const struct proto_where *where)
{
    if (from->type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
        return proto_refuse(f, where, "is %" PRId64, from->via.i64);
    return proto_refuse(f, where, "%s", type_text(from->type));
}

/* ---- a field; `from` has the type of its kind ---- */

/* For an empty value msgpack-c leaves a pointer that means nothing. */
static struct proto_view view_of(const char *p, uint32_t n)
{
    return (struct proto_view){n ? p : "", n};
}

static int u32s_decode(const struct proto_field *f, const msgpack_object_array *from, uint32_t *to,
                       const struct proto_where *where)
{
    for (uint32_t i = 0; i < from->size; i++) {
        const msgpack_object *entry = &from->ptr[i];

        if (entry->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
            return proto_refuse(f, where, "at [%" PRIu32 "] %s", i, type_text(entry->type));
        if (entry->via.u64 > UINT32_MAX)
            return proto_refuse(f, where, "at [%" PRIu32 "] is %" PRIu64, i, entry->via.u64);
        to[i] = (uint32_t)entry->via.u64;
    }
    return 0;
}

/* Entries are flat: no table has an array of maps inside an array of maps, so this recurses once.
 */
static int entries_decode(const struct proto_field *f, const msgpack_object_array *from,
                          msgpack_zone *zone, uint8_t *to, const struct proto_where *where)
{
    const struct proto_message *m = proto_entry_message((enum proto_kind)f->kind);
    struct proto_where inner = {.outer = f->name, .e = where->e};
    int rc = 0;

    for (inner.index = 0; rc == 0 && inner.index < from->size; inner.index++)
        rc = map_decode(m, &from->ptr[inner.index], zone, to + (size_t)inner.index * m->bytes,
                        &inner);
    return rc;
}

/* The array's length has passed the field's bounds. */
static int array_decode(const struct proto_field *f, const msgpack_object_array *from,
                        msgpack_zone *zone, struct proto_view *out, const struct proto_where *where)
{
    bool numbers = f->kind == PROTO_KIND_u32s;
    size_t entry_bytes =
        numbers ? sizeof(uint32_t) : proto_entry_message((enum proto_kind)f->kind)->bytes;
    void *memory = msgpack_zone_malloc(zone, from->size * entry_bytes);

    if (!memory)
        return ucm_error_set(where->e, UCM_WIRE_NO_MEMORY, "no memory for field \"%s\"", f->name);
    *out = (struct proto_view){memory, from->size};
    return numbers ? u32s_decode(f, from, memory, where)
                   : entries_decode(f, from, zone, memory, where);
}

static const uint8_t types[] = {
    [PROTO_KIND_u64] = MSGPACK_OBJECT_POSITIVE_INTEGER,
    [PROTO_KIND_str] = MSGPACK_OBJECT_STR,
    [PROTO_KIND_bin] = MSGPACK_OBJECT_BIN,
    [PROTO_KIND_flag] = MSGPACK_OBJECT_BOOLEAN,
    [PROTO_KIND_f64] = MSGPACK_OBJECT_FLOAT64,
    [PROTO_KIND_u32s] = MSGPACK_OBJECT_ARRAY,
    [PROTO_KIND_handles] = MSGPACK_OBJECT_ARRAY,
    [PROTO_KIND_planes] = MSGPACK_OBJECT_ARRAY,
};

/* What proto_check_amount checks. */
static uint64_t amount_of(const msgpack_object *from)
{
    switch (from->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return from->via.u64;
    case MSGPACK_OBJECT_STR:
        return from->via.str.size;
    case MSGPACK_OBJECT_BIN:
        return from->via.bin.size;
    case MSGPACK_OBJECT_ARRAY:
        return from->via.array.size;
    default:
        return 0;
    }
}

static int field_decode(const struct proto_field *f, const msgpack_object *from, msgpack_zone *zone,
                        void *out, const struct proto_where *where)
{
    struct proto_view view;
    int rc;

    if (from->type != types[f->kind] &&
        !(f->kind == PROTO_KIND_f64 && from->type == MSGPACK_OBJECT_FLOAT32))
        return type_refuse(f, from, where);
    rc = f->kind == PROTO_KIND_f64 ? proto_check_real(f, from->via.f64, where)
                                   : proto_check_amount(f, amount_of(from), where);
    if (rc)
        return rc;
    switch ((enum proto_kind)f->kind) {
    case PROTO_KIND_u64:
        memcpy(out, &from->via.u64, sizeof(from->via.u64));
        return 0;
    case PROTO_KIND_flag:
        memcpy(out, &from->via.boolean, sizeof(from->via.boolean));
        return 0;
    case PROTO_KIND_f64:
        memcpy(out, &from->via.f64, sizeof(from->via.f64));
        return 0;
    case PROTO_KIND_str:
        view = view_of(from->via.str.ptr, from->via.str.size);
        rc = proto_check_text(f, view.p, view.n, where);
        break;
    case PROTO_KIND_bin:
        view = view_of(from->via.bin.ptr, from->via.bin.size);
        break;
    case PROTO_KIND_u32s:
    case PROTO_KIND_handles:
    case PROTO_KIND_planes:
        rc = array_decode(f, &from->via.array, zone, &view, where);
        break;
    }
    if (rc == 0)
        memcpy(out, &view, sizeof(view));
    return rc;
}

/* ---- maps ---- */

void proto_quote(struct proto_str s, char *out, size_t size)
{
    size_t n = s.n < size - 1 ? s.n : size - 1;

    for (size_t i = 0; i < n; i++)
        out[i] = s.p[i] > ' ' && s.p[i] < 0x7f && s.p[i] != '"' ? s.p[i] : '?';
    out[n] = '\0';
}

static int unknown_refuse(const struct proto_message *m, const msgpack_object_str *name,
                          const struct proto_where *where)
{
    char prefix[32], word[33], known[160] = "";
    size_t n = 0;

    proto_where_prefix(where, prefix, sizeof(prefix));
    proto_quote((struct proto_str){name->ptr, name->size}, word, sizeof(word));
    for (uint32_t i = 0; i < m->n_fields && n < sizeof(known); i++)
        n += (size_t)snprintf(known + n, sizeof(known) - n, "%s%s", i ? ", " : "",
                              m->fields()[i].name);
    if (m->n_fields == 0)
        return ucm_error_set(where->e, UCM_WIRE_INVALID,
                             "field \"%s%s\" is not known; the map must be empty here", prefix,
                             word);
    return ucm_error_set(where->e, UCM_WIRE_INVALID, "field \"%s%s\" is not known; there are: %s",
                         prefix, word, known);
}

/* Encoders keep the table's order, so the search begins where the last one ended. */
static const struct proto_field *field_find(const struct proto_message *m,
                                            const msgpack_object_str *name, uint32_t *hint)
{
    const struct proto_field *fields = m->fields();
    uint32_t i = *hint;

    for (uint32_t tries = 0; tries < m->n_fields; tries++, i++) {
        if (i >= m->n_fields)
            i = 0;
        if (fields[i].name_bytes != name->size ||
            memcmp(fields[i].name, name->ptr, name->size) != 0)
            continue;
        *hint = i + 1;
        return &fields[i];
    }
    return NULL;
}

static int missing_refuse(const struct proto_message *m, uint32_t seen,
                          const struct proto_where *where)
{
    const struct proto_field *fields = m->fields();

    for (uint32_t i = 0; i < m->n_fields; i++)
        if (fields[i].required && !(seen & 1u << i))
            return proto_refuse(&fields[i], where, "is missing");
    return 0;
}

static int not_a_map(const msgpack_object *from, const struct proto_where *where)
{
    if (where->outer)
        return ucm_error_set(where->e, UCM_WIRE_INVALID,
                             "field \"%s[%" PRIu32 "]\" %s; it must be a map", where->outer,
                             where->index, type_text(from->type));
    return ucm_error_set(where->e, UCM_WIRE_INVALID,
                         "the message %s; it must be a map from field name to "
                         "value",
                         type_text(from->type));
}

static int map_decode(const struct proto_message *m, const msgpack_object *from, msgpack_zone *zone,
                      void *out, const struct proto_where *where)
{
    const struct proto_field *f;
    const msgpack_object_kv *kv;
    uint32_t seen = 0, bit, hint = 0;
    int rc;

    if (from->type != MSGPACK_OBJECT_MAP)
        return not_a_map(from, where);
    memset(out, 0, m->bytes);
    for (uint32_t i = 0; i < from->via.map.size; i++) {
        kv = &from->via.map.ptr[i];
        if (kv->key.type != MSGPACK_OBJECT_STR)
            return ucm_error_set(where->e, UCM_WIRE_INVALID,
                                 "a field's name %s; it must be text (MessagePack str)",
                                 type_text(kv->key.type));
        f = field_find(m, &kv->key.via.str, &hint);
        if (!f)
            return unknown_refuse(m, &kv->key.via.str, where);
        bit = 1u << (f - m->fields());
        if (seen & bit)
            return proto_refuse(f, where, "is given twice");
        seen |= bit;
        rc = field_decode(f, &kv->val, zone, (uint8_t *)out + f->offset, where);
        if (rc)
            return rc;
    }
    return missing_refuse(m, seen, where);
}

int proto_decode(const struct proto_message *m, struct proto_envelope *env, void *out,
                 struct ucm_error *e)
{
    struct proto_where where = {.e = e};
    union proto_any message; /* *out changes only when all of it is sound */
    int rc;

    if (m->free)
        return env->body.type == MSGPACK_OBJECT_MAP ? 0 : not_a_map(&env->body, &where);
    rc = map_decode(m, &env->body, env->unpacked.zone, &message, &where);
    if (rc == 0 && m->bytes > 0)
        memcpy(out, &message, m->bytes);
    return rc;
}
