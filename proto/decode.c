#include "proto/tables.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static int map_decode(const struct proto_message *m, const msgpack_object *from, msgpack_zone *zone,
                      void *out, const struct proto_where *where);

static const char *type_text(msgpack_object_type type)
{
    switch (type) {
    case MSGPACK_OBJECT_NIL:
        return "is nil";
    case MSGPACK_OBJECT_BOOLEAN:
        return "is a boolean";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return "is an integer";
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return "is a negative integer";
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return "is a float";
    case MSGPACK_OBJECT_STR:
        return "is text (MessagePack str)";
    case MSGPACK_OBJECT_BIN:
        return "is binary (MessagePack bin)";
    case MSGPACK_OBJECT_ARRAY:
        return "is an array";
    case MSGPACK_OBJECT_MAP:
        return "is a map";
    case MSGPACK_OBJECT_EXT:
        break;
    }
    return "is an extension type";
}

static int type_refuse(const struct proto_field *f, const msgpack_object *from,
                       const struct proto_where *where)
{
    if (from->type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
        return proto_refuse(f, where, "is %" PRId64, from->via.i64);
    return proto_refuse(f, where, "%s", type_text(from->type));
}

/* ---- one decoder a kind; `out` is the field itself ---- */

static int u64_decode(const struct proto_field *f, const msgpack_object *from, uint64_t *out,
                      const struct proto_where *where)
{
    if (from->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
        return type_refuse(f, from, where);
    *out = from->via.u64;
    return proto_check_amount(f, *out, where);
}

static int flag_decode(const struct proto_field *f, const msgpack_object *from, bool *out,
                       const struct proto_where *where)
{
    if (from->type != MSGPACK_OBJECT_BOOLEAN)
        return type_refuse(f, from, where);
    *out = from->via.boolean;
    return 0;
}

/* For an empty value msgpack-c leaves a pointer that means nothing. */
static int str_decode(const struct proto_field *f, const msgpack_object *from,
                      struct proto_str *out, const struct proto_where *where)
{
    int rc;

    if (from->type != MSGPACK_OBJECT_STR)
        return type_refuse(f, from, where);
    out->n = from->via.str.size;
    out->p = out->n ? from->via.str.ptr : "";
    rc = proto_check_amount(f, out->n, where);
    return rc ? rc : proto_check_text(f, out->p, out->n, where);
}

static int bin_decode(const struct proto_field *f, const msgpack_object *from,
                      struct proto_bin *out, const struct proto_where *where)
{
    if (from->type != MSGPACK_OBJECT_BIN)
        return type_refuse(f, from, where);
    out->n = from->via.bin.size;
    out->p = (const uint8_t *)(out->n ? from->via.bin.ptr : "");
    return proto_check_amount(f, out->n, where);
}

/* Memory for an array whose length has passed the field's bounds. */
static int entries_alloc(const struct proto_field *f, const msgpack_object *from,
                         size_t entry_bytes, msgpack_zone *zone, void **out,
                         const struct proto_where *where)
{
    int rc;

    if (from->type != MSGPACK_OBJECT_ARRAY)
        return type_refuse(f, from, where);
    rc = proto_check_amount(f, from->via.array.size, where);
    if (rc)
        return rc;
    *out = msgpack_zone_malloc(zone, from->via.array.size * entry_bytes);
    if (!*out)
        return ucm_error_set(where->e, UCM_WIRE_NO_MEMORY, "no memory for field \"%s\"", f->name);
    return 0;
}

static int u32s_decode(const struct proto_field *f, const msgpack_object *from, msgpack_zone *zone,
                       struct proto_u32s *out, const struct proto_where *where)
{
    const msgpack_object *entry;
    void *memory;
    uint32_t *to;
    int rc = entries_alloc(f, from, sizeof(*to), zone, &memory, where);

    if (rc)
        return rc;
    to = memory;
    for (uint32_t i = 0; i < from->via.array.size; i++) {
        entry = &from->via.array.ptr[i];
        if (entry->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
            return proto_refuse(f, where, "at [%" PRIu32 "] %s", i, type_text(entry->type));
        if (entry->via.u64 > UINT32_MAX)
            return proto_refuse(f, where, "at [%" PRIu32 "] is %" PRIu64, i, entry->via.u64);
        to[i] = (uint32_t)entry->via.u64;
    }
    *out = (struct proto_u32s){to, from->via.array.size};
    return 0;
}

/* Entries are flat: no table has an array of maps inside an array of maps, so this recurses once.
 */
static int entries_decode(const struct proto_field *f, const msgpack_object *from,
                          msgpack_zone *zone, struct proto_view *out,
                          const struct proto_where *where)
{
    const struct proto_message *m = proto_entry_message((enum proto_kind)f->kind);
    struct proto_where inner = {.outer = f->name, .e = where->e};
    void *memory;
    int rc = entries_alloc(f, from, m->bytes, zone, &memory, where);

    if (rc)
        return rc;
    for (inner.index = 0; inner.index < from->via.array.size; inner.index++) {
        rc = map_decode(m, &from->via.array.ptr[inner.index], zone,
                        (uint8_t *)memory + (size_t)inner.index * m->bytes, &inner);
        if (rc)
            return rc;
    }
    *out = (struct proto_view){memory, from->via.array.size};
    return 0;
}

static int field_decode(const struct proto_field *f, const msgpack_object *from, msgpack_zone *zone,
                        void *out, const struct proto_where *where)
{
    struct proto_view view;
    int rc;

    switch ((enum proto_kind)f->kind) {
    case PROTO_KIND_u64:
        return u64_decode(f, from, out, where);
    case PROTO_KIND_flag:
        return flag_decode(f, from, out, where);
    case PROTO_KIND_str:
        return str_decode(f, from, out, where);
    case PROTO_KIND_bin:
        return bin_decode(f, from, out, where);
    case PROTO_KIND_u32s:
        return u32s_decode(f, from, zone, out, where);
    case PROTO_KIND_handles:
    case PROTO_KIND_planes:
        break;
    }
    rc = entries_decode(f, from, zone, &view, where);
    if (rc == 0)
        memcpy(out, &view, sizeof(view));
    return rc;
}

/* ---- maps ---- */

void proto_quote(struct proto_str s, char *out, size_t room)
{
    size_t n = s.n < room - 1 ? s.n : room - 1;

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
