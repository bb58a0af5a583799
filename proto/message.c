/* Messages: their tables, what a field may be, and fields out of and into MessagePack. */
#include "proto/tables.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- the tables ---- */

#define NEED_REQ true
#define NEED_OPT false
#define FIELD(m, kind, name, need, min, max)                                                       \
    {min,                                                                                          \
     max,                                                                                          \
     offsetof(struct msg_##m, name),                                                               \
     PROTO_KIND_##kind,                                                                            \
     NEED_##need,                                                                                  \
     sizeof(#name) - 1,                                                                            \
     0xa0 | (sizeof(#name) - 1),                                                                   \
     #name},
#define COUNT(m, kind, name, need, min, max) +1
#define SHORT(m, kind, name, need, min, max) &&sizeof(#name) <= PROTO_NAME_BYTES

#define MESSAGE(suffix, list)                                                                      \
    static_assert((0 list(COUNT, suffix)) <= PROTO_MAX_FIELDS, #suffix " has too many fields");    \
    static_assert(true list(SHORT, suffix), #suffix " has a name that is too long");               \
    const struct proto_message proto_##suffix = {                                                  \
        .name = #suffix,                                                                           \
        .fields = (const struct proto_field[]){list(FIELD, suffix)},                               \
        .n_fields = 0 list(COUNT, suffix),                                                         \
        .bytes = sizeof(struct msg_##suffix),                                                      \
    };

MESSAGE(handle, UCM_MSG_HANDLE)
MESSAGE(plane, UCM_MSG_PLANE)
UCM_MESSAGES(MESSAGE)
const struct proto_message proto_none = {.name = "none"};
const struct proto_message proto_free_map = {.name = "free_map", .free = true};

const struct proto_method proto_methods[UCM_METHOD_COUNT] = {
#define M(NAME, name, text, params, result)                                                        \
    [UCM_METHOD_##NAME] = {{text, sizeof(text) - 1}, &proto_##params, &proto_##result},
    UCM_METHODS(M)
#undef M
};

int proto_method_find(struct proto_str name)
{
    for (int i = 0; i < UCM_METHOD_COUNT; i++)
        if (name.n == proto_methods[i].name.n &&
            memcmp(name.p, proto_methods[i].name.p, name.n) == 0)
            return i;
    return -1;
}

const struct proto_message *proto_entry_message(enum proto_kind kind)
{
    assert(kind == PROTO_KIND_handles || kind == PROTO_KIND_planes);
    return kind == PROTO_KIND_handles ? &proto_handle : &proto_plane;
}

#define SAME_SHAPE(type)                                                                           \
    static_assert(sizeof(struct type) == sizeof(struct proto_view) &&                              \
                      offsetof(struct type, n) == offsetof(struct proto_view, n),                  \
                  #type " is not a view")
SAME_SHAPE(proto_str);
SAME_SHAPE(proto_bin);
SAME_SHAPE(proto_u32s);
SAME_SHAPE(proto_handles);
SAME_SHAPE(proto_planes);

/* What a field holds. */
struct value {
    uint64_t amount; /* the number itself, or the length of the view */
    double real;
    struct proto_view view;
};

/* ---- what a field may be ---- */

static void where_prefix(const struct proto_where *where, char *out, size_t size)
{
    if (where->outer)
        snprintf(out, size, "%s[%" PRIu32 "].", where->outer, where->index);
    else
        out[0] = '\0';
}

/* For each kind: its type in MessagePack, and the words of an error: before and after the allowed
 * range, and the unit. */
static const struct {
    uint8_t type;
    const char *before, *after, *counted;
} kinds[] = {
    [PROTO_KIND_u64] = {MSGPACK_OBJECT_POSITIVE_INTEGER, "an unsigned integer, ", "", ""},
    [PROTO_KIND_str] = {MSGPACK_OBJECT_STR, "text (MessagePack str, UTF-8) of ", " bytes",
                        " bytes"},
    [PROTO_KIND_bin] = {MSGPACK_OBJECT_BIN, "binary (MessagePack bin) of ", " bytes", " bytes"},
    [PROTO_KIND_flag] = {MSGPACK_OBJECT_BOOLEAN, "true or false", "", ""},
    [PROTO_KIND_f64] = {MSGPACK_OBJECT_FLOAT64, "a float, ", "", ""},
    [PROTO_KIND_u32s] = {MSGPACK_OBJECT_ARRAY, "an array of ", " unsigned integers below 2^32",
                         " entries"},
    [PROTO_KIND_handles] = {MSGPACK_OBJECT_ARRAY, "an array of ", " maps", " entries"},
    [PROTO_KIND_planes] = {MSGPACK_OBJECT_ARRAY, "an array of ", " maps", " entries"},
};

/* "16 to 32", "exactly 64" or "" */
static void range_text(const struct proto_field *f, char *out, size_t size)
{
    out[0] = '\0';
    if (f->kind == PROTO_KIND_flag)
        return;
    if (f->min == f->max)
        snprintf(out, size, "exactly %" PRIu64, f->min);
    else
        snprintf(out, size, "%" PRIu64 " to %" PRIu64, f->min, f->max);
}

__attribute__((format(printf, 3, 4))) static int
refuse(const struct proto_field *f, const struct proto_where *where, const char *wrong, ...)
{
    char prefix[32], what[96], range[48];
    va_list args;

    where_prefix(where, prefix, sizeof(prefix));
    range_text(f, range, sizeof(range));
    va_start(args, wrong);
    vsnprintf(what, sizeof(what), wrong, args);
    va_end(args);
    return ucm_error_set(where->e, UCM_WIRE_INVALID, "field \"%s%s\" %s; it must be %s%s%s%s",
                         prefix, f->name, what, kinds[f->kind].before, range, kinds[f->kind].after,
                         f->required ? "" : ", or be left out");
}

/* Length of the UTF-8 character at p, and itself in *c; 0 when there is none: a stray or missing
 * continuation, a longer form than needed, a surrogate, past U+10FFFF. */
static uint32_t utf8_next(const uint8_t *p, uint32_t n, uint32_t *c)
{
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t bytes = p[0] < 0x80 ? 1 : p[0] < 0xc0 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;

    if (bytes == 0 || bytes > n || p[0] >= 0xf8)
        return 0;
    *c = bytes == 1 ? p[0] : p[0] & (0xffu >> (bytes + 1));
    for (uint32_t i = 1; i < bytes; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        *c = *c << 6 | (p[i] & 0x3f);
    }
    if (*c < smallest[bytes] || *c > 0x10ffff || (*c >= 0xd800 && *c <= 0xdfff))
        return 0;
    return bytes;
}

uint32_t proto_text_span(const char *p, uint32_t n, uint32_t *control)
{
    uint32_t c = 0, bytes, i;

    *control = UINT32_MAX;
    for (i = 0; i < n; i += bytes) {
        bytes = utf8_next((const uint8_t *)p + i, n - i, &c);
        if (bytes == 0)
            break;
        if (c < 0x20 || (c >= 0x7f && c < 0xa0)) {
            *control = c;
            break;
        }
    }
    return i;
}

static int text_check(const struct proto_field *f, const struct proto_view *v,
                      const struct proto_where *where)
{
    uint32_t c, n = proto_text_span(v->p, v->n, &c);

    if (n == v->n)
        return 0;
    return c != UINT32_MAX
               ? refuse(f, where, "has the control character U+%04" PRIX32 " at byte %" PRIu32, c,
                        n)
               : refuse(f, where, "is not UTF-8 at byte %" PRIu32, n);
}

/* 0 or -UCM_WIRE_INVALID. */
static int value_check(const struct proto_field *f, const struct value *v,
                       const struct proto_where *where)
{
    if (f->kind == PROTO_KIND_f64) {
        /* A NaN is in no range. */
        if (v->real >= (double)f->min && v->real <= (double)f->max)
            return 0;
        return refuse(f, where, "is %g", v->real);
    }
    if (f->kind != PROTO_KIND_flag && (v->amount < f->min || v->amount > f->max))
        return refuse(f, where, "%s %" PRIu64 "%s", f->kind == PROTO_KIND_u64 ? "is" : "has",
                      v->amount, kinds[f->kind].counted);
    return f->kind == PROTO_KIND_str ? text_check(f, &v->view, where) : 0;
}

void proto_clean(char *text)
{
    size_t n = strlen(text), at = 0;
    uint32_t control;

    for (;;) {
        at += proto_text_span(text + at, (uint32_t)(n - at), &control);
        if (at == n)
            return;
        memset(text + at, '?', control != UINT32_MAX && control > 0x7f ? 2 : 1); /* its bytes */
    }
}

/* ---- out of MessagePack ---- */

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
        return refuse(f, where, "is %" PRId64, from->via.i64);
    return refuse(f, where, "%s", type_text(from->type));
}

/* ---- a field; `from` has the type of its kind ---- */

static int u32s_decode(const struct proto_field *f, const msgpack_object_array *from, uint32_t *to,
                       const struct proto_where *where)
{
    for (uint32_t i = 0; i < from->size; i++) {
        const msgpack_object *entry = &from->ptr[i];

        if (entry->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
            return refuse(f, where, "at [%" PRIu32 "] %s", i, type_text(entry->type));
        if (entry->via.u64 > UINT32_MAX)
            return refuse(f, where, "at [%" PRIu32 "] is %" PRIu64, i, entry->via.u64);
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
                        msgpack_zone *zone, void *out, const struct proto_where *where)
{
    bool numbers = f->kind == PROTO_KIND_u32s;
    size_t entry_bytes =
        numbers ? sizeof(uint32_t) : proto_entry_message((enum proto_kind)f->kind)->bytes;
    void *memory = msgpack_zone_malloc(zone, from->size * entry_bytes);

    if (!memory)
        return ucm_error_set(where->e, UCM_WIRE_NO_MEMORY, "no memory for field \"%s\"", f->name);
    memcpy(out, &(struct proto_view){memory, from->size}, sizeof(struct proto_view));
    return numbers ? u32s_decode(f, from, memory, where)
                   : entries_decode(f, from, zone, memory, where);
}

/* *out is the caller's to throw away where this fails. */
static int field_decode(const struct proto_field *f, const msgpack_object *from, msgpack_zone *zone,
                        void *out, const struct proto_where *where)
{
    struct value v = {0};
    int rc;

    if (from->type != kinds[f->kind].type &&
        !(f->kind == PROTO_KIND_f64 && from->type == MSGPACK_OBJECT_FLOAT32))
        return type_refuse(f, from, where);
    switch ((enum proto_kind)f->kind) {
    case PROTO_KIND_u64:
        v.amount = from->via.u64;
        memcpy(out, &v.amount, sizeof(v.amount));
        break;
    case PROTO_KIND_flag:
        memcpy(out, &from->via.boolean, sizeof(from->via.boolean));
        return 0;
    case PROTO_KIND_f64:
        v.real = from->via.f64;
        memcpy(out, &v.real, sizeof(v.real));
        break;
    case PROTO_KIND_str:
    case PROTO_KIND_bin: /* for an empty value msgpack-c leaves a pointer that means nothing */
        v.amount = from->via.bin.size;
        v.view = (struct proto_view){v.amount ? from->via.bin.ptr : "", from->via.bin.size};
        memcpy(out, &v.view, sizeof(v.view));
        break;
    case PROTO_KIND_u32s:
    case PROTO_KIND_handles:
    case PROTO_KIND_planes:
        v.amount = from->via.array.size;
        break;
    }
    rc = value_check(f, &v, where);
    return rc == 0 && from->type == MSGPACK_OBJECT_ARRAY
               ? array_decode(f, &from->via.array, zone, out, where)
               : rc;
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
    const struct proto_field *fields = m->fields;
    char prefix[32], word[33], known[160] = "";
    size_t n = 0;

    where_prefix(where, prefix, sizeof(prefix));
    proto_quote((struct proto_str){name->ptr, name->size}, word, sizeof(word));
    for (uint32_t i = 0; i < m->n_fields && n < sizeof(known); i++)
        n += (size_t)snprintf(known + n, sizeof(known) - n, "%s%s", i ? ", " : "", fields[i].name);
    if (m->n_fields == 0)
        return ucm_error_set(where->e, UCM_WIRE_INVALID,
                             "field \"%s%s\" is not known; the map must be empty here", prefix,
                             word);
    return ucm_error_set(where->e, UCM_WIRE_INVALID, "field \"%s%s\" is not known; there are: %s",
                         prefix, word, known);
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
    const struct proto_field *fields = m->fields;
    const msgpack_object_str *name;
    const msgpack_object_kv *kv;
    uint32_t seen = 0, at = 0, tries;
    int rc;

    if (from->type != MSGPACK_OBJECT_MAP)
        return not_a_map(from, where);
    memset(out, 0, m->bytes);
    for (uint32_t i = 0; i < from->via.map.size; i++, at++) {
        kv = &from->via.map.ptr[i];
        if (kv->key.type != MSGPACK_OBJECT_STR)
            return ucm_error_set(where->e, UCM_WIRE_INVALID,
                                 "a field's name %s; it must be text (MessagePack str)",
                                 type_text(kv->key.type));
        name = &kv->key.via.str;
        for (tries = 0; tries < m->n_fields; tries++, at++) { /* encoders keep the table's order */
            at = at < m->n_fields ? at : 0;
            if (fields[at].name_bytes == name->size &&
                memcmp(fields[at].name, name->ptr, name->size) == 0)
                break;
        }
        if (tries == m->n_fields)
            return unknown_refuse(m, name, where);
        if (seen & 1u << at)
            return refuse(&fields[at], where, "is given twice");
        seen |= 1u << at;
        rc = field_decode(&fields[at], &kv->val, zone, (uint8_t *)out + fields[at].offset, where);
        if (rc)
            return rc;
    }
    for (uint32_t i = 0; i < m->n_fields; i++)
        if (fields[i].required && !(seen & 1u << i))
            return refuse(&fields[i], where, "is missing");
    return 0;
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

/* ---- into MessagePack: pieces ---- */

void proto_pack_raw(msgpack_packer *pk, const void *packed, size_t n)
{
    pk->callback(pk->data, packed, n);
}

void proto_pack_strn(msgpack_packer *pk, const char *s, size_t n)
{
    msgpack_pack_str(pk, n);
    msgpack_pack_str_body(pk, s, n);
}

void proto_pack_str(msgpack_packer *pk, const char *s)
{
    proto_pack_strn(pk, s, strlen(s));
}

void proto_pack_u64(msgpack_packer *pk, const char *key, uint64_t v)
{
    proto_pack_str(pk, key);
    msgpack_pack_uint64(pk, v);
}

void proto_pack_text(msgpack_packer *pk, const char *key, const char *text)
{
    proto_pack_str(pk, key);
    proto_pack_str(pk, text);
}

void proto_pack_bin(msgpack_packer *pk, const char *key, const uint8_t *p, size_t n)
{
    proto_pack_str(pk, key);
    msgpack_pack_bin(pk, n);
    msgpack_pack_bin_body(pk, p, n);
}

void proto_pack_flag(msgpack_packer *pk, const char *key, bool on)
{
    proto_pack_str(pk, key);
    if (on)
        msgpack_pack_true(pk);
    else
        msgpack_pack_false(pk);
}

/* ---- into MessagePack: messages ---- */

static int entries_encode(msgpack_packer *pk, const struct proto_field *f,
                          const struct proto_view *v, const struct proto_where *where)
{
    const struct proto_message *m = proto_entry_message((enum proto_kind)f->kind);
    struct proto_where inner = {.outer = f->name, .e = where->e};
    int rc;

    msgpack_pack_array(pk, v->n);
    for (inner.index = 0; inner.index < v->n; inner.index++) {
        rc = proto_message_pack(pk, m, (const uint8_t *)v->p + (size_t)inner.index * m->bytes,
                                &inner);
        if (rc)
            return rc;
    }
    return 0;
}

static void u32s_encode(msgpack_packer *pk, const struct proto_view *v)
{
    const uint32_t *p = v->p;

    msgpack_pack_array(pk, v->n);
    for (uint32_t i = 0; i < v->n; i++)
        msgpack_pack_uint32(pk, p[i]);
}

static int field_encode(msgpack_packer *pk, const struct proto_field *f, const struct value *v,
                        const struct proto_where *where)
{
    proto_pack_raw(pk, (const uint8_t *)f + offsetof(struct proto_field, head), 1u + f->name_bytes);
    switch ((enum proto_kind)f->kind) {
    case PROTO_KIND_u64:
        msgpack_pack_uint64(pk, v->amount);
        break;
    case PROTO_KIND_flag:
        if (v->amount)
            msgpack_pack_true(pk);
        else
            msgpack_pack_false(pk);
        break;
    case PROTO_KIND_f64:
        msgpack_pack_double(pk, v->real);
        break;
    case PROTO_KIND_str:
        proto_pack_strn(pk, v->view.p, v->view.n);
        break;
    case PROTO_KIND_bin:
        msgpack_pack_bin(pk, v->view.n);
        msgpack_pack_bin_body(pk, v->view.p, v->view.n);
        break;
    case PROTO_KIND_u32s:
        u32s_encode(pk, &v->view);
        break;
    case PROTO_KIND_handles:
    case PROTO_KIND_planes:
        return entries_encode(pk, f, &v->view, where);
    }
    return 0;
}

int proto_message_pack(msgpack_packer *pk, const struct proto_message *m, const void *message,
                       const struct proto_where *where)
{
    struct value values[PROTO_MAX_FIELDS];
    uint32_t present = 0;
    int rc = 0;

    assert(!m->free);
    for (uint32_t i = 0; rc == 0 && i < m->n_fields; i++) {
        const struct proto_field *f = &m->fields[i];
        const uint8_t *at = (const uint8_t *)message + f->offset;
        struct value *v = &values[i];
        bool flag;

        *v = (struct value){0};
        if (f->kind == PROTO_KIND_u64) {
            memcpy(&v->amount, at, sizeof(v->amount));
        } else if (f->kind == PROTO_KIND_flag) {
            memcpy(&flag, at, sizeof(flag));
            v->amount = flag;
        } else if (f->kind == PROTO_KIND_f64) {
            memcpy(&v->real, at, sizeof(v->real));
        } else {
            memcpy(&v->view, at, sizeof(v->view));
            v->amount = v->view.n;
            assert(v->amount == 0 || v->view.p);
        }
        if (!f->required && v->amount == 0 && v->real == 0)
            continue; /* 0 leaves an optional field out */
        present |= 1u << i;
        rc = value_check(f, v, where);
    }
    if (rc == 0)
        msgpack_pack_map(pk, (size_t)__builtin_popcount(present));
    for (uint32_t i = 0; rc == 0 && i < m->n_fields; i++)
        if (present & 1u << i)
            rc = field_encode(pk, &m->fields[i], &values[i], where);
    return rc;
}
