#include "daemon/backend/wire.h"

#include "proto/proto.h"

#include <inttypes.h>
#include <string.h>

enum kind { NUMBER, FLAG, TEXT, KEY, ARRAY };

/* One field that a message may have. `to` gets a uint64_t, a bool, a text of `max` bytes and its
 * NUL, or a pointer to the array. */
struct field {
    const char *name;
    enum kind kind;
    void *to;
    size_t max;
    bool required;
    bool *seen; /* may be NULL */
};

static int refuse(struct ucm_error *e, const char *field, const char *rule)
{
    return ucm_error_set(e, UCM_WIRE_INVALID, "field \"%s\" %s", field, rule);
}

int wire_open(struct wire_reader *r, const uint8_t *packet, size_t n, struct ucm_error *e)
{
    const msgpack_object *top;
    uint32_t elements;
    size_t at = 0;
    int rc;

    if (n > WIRE_PACKET_BYTES)
        return ucm_error_set(e, UCM_WIRE_INVALID, "a packet has %zu bytes; %u is the most", n,
                             WIRE_PACKET_BYTES);
    rc = proto_frame_check(packet, n, &elements, e);
    if (rc < 0)
        return rc;
    msgpack_unpacked_init(&r->unpacked);
    if (msgpack_unpack_next(&r->unpacked, (const char *)packet, n, &at) != MSGPACK_UNPACK_SUCCESS) {
        msgpack_unpacked_destroy(&r->unpacked);
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a packet");
    }
    top = &r->unpacked.data;
    if (top->type != MSGPACK_OBJECT_ARRAY || top->via.array.size == 0) {
        msgpack_unpacked_destroy(&r->unpacked);
        return ucm_error_set(e, UCM_WIRE_INVALID, "a packet is an array of one or more messages");
    }
    r->at = 0;
    return 0;
}

void wire_close(struct wire_reader *r)
{
    msgpack_unpacked_destroy(&r->unpacked);
}

bool wire_more(const struct wire_reader *r)
{
    return r->at < r->unpacked.data.via.array.size;
}

/* Printable ASCII. */
static bool text_fits(const msgpack_object_str *s, size_t max)
{
    if (s->size > max)
        return false;
    for (uint32_t i = 0; i < s->size; i++)
        if (s->ptr[i] < ' ' || s->ptr[i] > '~')
            return false;
    return true;
}

static bool key_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_' || c == '/';
}

static bool key_fits(const msgpack_object_str *s, size_t max)
{
    if (s->size == 0 || s->size > max)
        return false;
    for (uint32_t i = 0; i < s->size; i++)
        if (!key_char(s->ptr[i]))
            return false;
    return true;
}

static void text_copy(const msgpack_object_str *s, char *to)
{
    memcpy(to, s->ptr, s->size);
    to[s->size] = '\0';
}

static int field_take(const struct field *f, const msgpack_object *from, struct ucm_error *e)
{
    switch (f->kind) {
    case NUMBER:
        if (from->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
            return refuse(e, f->name, "must be an integer that is not negative");
        memcpy(f->to, &from->via.u64, sizeof(from->via.u64));
        return 0;
    case FLAG:
        if (from->type != MSGPACK_OBJECT_BOOLEAN)
            return refuse(e, f->name, "must be true or false");
        memcpy(f->to, &from->via.boolean, sizeof(bool));
        return 0;
    case ARRAY:
        if (from->type != MSGPACK_OBJECT_ARRAY)
            return refuse(e, f->name, "must be an array");
        *(const msgpack_object_array **)f->to = &from->via.array;
        return 0;
    default:
        if (from->type != MSGPACK_OBJECT_STR)
            return refuse(e, f->name, "must be a text");
        if (f->kind == KEY ? !key_fits(&from->via.str, f->max) : !text_fits(&from->via.str, f->max))
            return refuse(e, f->name, "is too long, or has a character that is not allowed");
        text_copy(&from->via.str, f->to);
        return 0;
    }
}

static const struct field *field_find(const struct field *fields, unsigned n,
                                      const msgpack_object *key, unsigned *number)
{
    for (unsigned i = 0; key->type == MSGPACK_OBJECT_STR && i < n; i++)
        if (key->via.str.size == strlen(fields[i].name) &&
            memcmp(key->via.str.ptr, fields[i].name, key->via.str.size) == 0) {
            *number = i;
            return &fields[i];
        }
    return NULL;
}

/* The next message, which has these fields and no others. */
static int message_take(struct wire_reader *r, const struct field *fields, unsigned n,
                        struct ucm_error *e)
{
    const msgpack_object *from;
    uint32_t seen = 0;
    unsigned i;

    if (!wire_more(r))
        return ucm_error_set(e, UCM_WIRE_INVALID, "the packet has no further message");
    from = &r->unpacked.data.via.array.ptr[r->at++];
    if (from->type != MSGPACK_OBJECT_MAP)
        return ucm_error_set(e, UCM_WIRE_INVALID, "a message is a map");
    for (uint32_t at = 0; at < from->via.map.size; at++) {
        const msgpack_object_kv *kv = &from->via.map.ptr[at];
        const struct field *f = field_find(fields, n, &kv->key, &i);
        int rc;

        if (!f)
            return ucm_error_set(e, UCM_WIRE_INVALID, "a message has a field that it can't have");
        if (seen >> i & 1)
            return refuse(e, f->name, "is there twice");
        seen |= 1u << i;
        rc = field_take(f, &kv->val, e);
        if (rc < 0)
            return rc;
    }
    for (i = 0; i < n; i++) {
        if (fields[i].required && !(seen >> i & 1))
            return refuse(e, fields[i].name, "is missing");
        if (fields[i].seen)
            *fields[i].seen = seen >> i & 1;
    }
    return 0;
}

#define FIELDS(f) (unsigned)(sizeof(f) / sizeof((f)[0]))

int wire_take_hello(struct wire_reader *r, struct wire_hello *out, struct ucm_error *e)
{
    char hello[8] = "";
    const struct field fields[] = {
        {.name = "hello", .kind = TEXT, .to = hello, .max = 7, .required = true},
        {.name = "version_min", .to = &out->version_min, .required = true},
        {.name = "version_max", .to = &out->version_max, .required = true},
        {.name = "buffer", .to = &out->buffer, .required = true},
        {.name = "depth", .to = &out->depth, .required = true},
        {.name = "root", .kind = TEXT, .to = out->root, .max = WIRE_NAME_BYTES, .required = true},
        {.name = "host", .kind = TEXT, .to = out->host, .max = WIRE_NAME_BYTES, .required = true},
        {.name = "read_only", .kind = FLAG, .to = &out->read_only, .required = true},
    };

    return message_take(r, fields, FIELDS(fields), e);
}

static int abilities_take(const msgpack_object_array *from, struct wire_hello_answer *out,
                          struct ucm_error *e)
{
    out->touch = out->list = false;
    for (uint32_t i = 0; i < from->size; i++) {
        const msgpack_object *o = &from->ptr[i];
        bool touch = o->type == MSGPACK_OBJECT_STR && o->via.str.size == 5 &&
                     memcmp(o->via.str.ptr, "touch", 5) == 0;
        bool list = o->type == MSGPACK_OBJECT_STR && o->via.str.size == 4 &&
                    memcmp(o->via.str.ptr, "list", 4) == 0;

        if (!touch && !list)
            return refuse(e, "abilities", "has something else than \"touch\" and \"list\"");
        out->touch |= touch;
        out->list |= list;
    }
    return 0;
}

int wire_take_hello_answer(struct wire_reader *r, struct wire_hello_answer *out,
                           struct ucm_error *e)
{
    const msgpack_object_array *abilities = NULL;
    const struct field fields[] = {
        {.name = "hello", .kind = TEXT, .to = out->name, .max = WIRE_NAME_BYTES, .required = true},
        {.name = "version", .to = &out->version, .required = true},
        {.name = "depth", .to = &out->depth, .required = true},
        {.name = "abilities", .kind = ARRAY, .to = &abilities, .required = true},
    };
    int rc = message_take(r, fields, FIELDS(fields), e);

    if (rc < 0)
        return rc;
    if (out->name[0] == '\0')
        return refuse(e, "hello", "is empty");
    if (out->depth == 0)
        return refuse(e, "depth", "is 0; it is 1 or more");
    return abilities_take(abilities, out, e);
}

static int word_find(const char *const *names, int n, const char *word)
{
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], word) == 0)
            return i;
    return -1;
}

int wire_take_request(struct wire_reader *r, struct wire_request *out, struct ucm_error *e)
{
    char verb[16] = "", prefix[WIRE_KEY_BYTES + 1] = "";
    const struct field fields[] = {
        {.name = "id", .to = &out->id, .required = true},
        {.name = "verb", .kind = TEXT, .to = verb, .max = 15, .required = true},
        {.name = "ms", .to = &out->ms, .required = true},
        {.name = "key", .kind = KEY, .to = out->key, .max = WIRE_KEY_BYTES},
        {.name = "prefix", .kind = KEY, .to = prefix, .max = WIRE_KEY_BYTES},
        {.name = "temp", .kind = KEY, .to = out->temp, .max = WIRE_KEY_BYTES},
        {.name = "bytes", .to = &out->bytes},
        {.name = "offset", .to = &out->offset},
        {.name = "sync", .kind = FLAG, .to = &out->sync},
    };
    int rc, v;

    *out = (struct wire_request){0};
    rc = message_take(r, fields, FIELDS(fields), e);
    if (rc < 0)
        return rc;
    v = word_find(wire_verbs, WIRE_VERBS, verb);
    if (v < 0)
        return refuse(e, "verb", "is none of this version");
    out->verb = (enum wire_verb)v;
    if (out->verb == WIRE_LIST)
        memcpy(out->key, prefix, sizeof(prefix));
    if (out->verb != WIRE_CHECK && out->key[0] == '\0')
        return refuse(e, out->verb == WIRE_LIST ? "prefix" : "key", "is missing");
    return 0;
}

int wire_take_answer(struct wire_reader *r, struct wire_answer *out, struct ucm_error *e)
{
    char status[16] = "";
    const struct field fields[] = {
        {.name = "id", .to = &out->id, .required = true},
        {.name = "status", .kind = TEXT, .to = status, .max = 15, .required = true},
        {.name = "bytes", .to = &out->bytes, .seen = &out->has_bytes},
        {.name = "mtime", .to = &out->mtime_ns},
        {.name = "now", .to = &out->now_ns, .seen = &out->has_now},
        {.name = "unread", .to = &out->unread},
        {.name = "reason", .kind = TEXT, .to = out->reason, .max = WIRE_REASON_BYTES},
        {.name = "files", .kind = ARRAY, .to = &out->files},
    };
    int rc, s;

    *out = (struct wire_answer){0};
    rc = message_take(r, fields, FIELDS(fields), e);
    if (rc < 0)
        return rc;
    s = word_find(wire_statuses, WIRE_STATUSES, status);
    if (s < 0)
        return refuse(e, "status", "is none of this version");
    out->status = (enum wire_status)s;
    return 0;
}

int wire_file_at(const struct wire_answer *a, uint32_t i, struct wire_file *out,
                 struct ucm_error *e)
{
    const msgpack_object *o = &a->files->ptr[i], *entry;

    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size != 3)
        return refuse(e, "files", "has an entry that is not [name, bytes, mtime]");
    entry = o->via.array.ptr;
    if (entry[0].type != MSGPACK_OBJECT_STR || !text_fits(&entry[0].via.str, WIRE_KEY_BYTES) ||
        entry[1].type != MSGPACK_OBJECT_POSITIVE_INTEGER ||
        entry[2].type != MSGPACK_OBJECT_POSITIVE_INTEGER)
        return refuse(e, "files", "has an entry that is not [name, bytes, mtime]");
    text_copy(&entry[0].via.str, out->name);
    out->bytes = entry[1].via.u64;
    out->mtime_ns = entry[2].via.u64;
    return 0;
}
