/* Frames: walked and opened; and built. What lies in them is message.c's. */
#include "proto/tables.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* What one MessagePack value can take once unpacked: an object, of which a map entry has two.
 * Arrays that proto_decode allocates come out of the same zone. */
#define ZONE_VALUE_BYTES sizeof(msgpack_object)
#define ZONE_SLACK_BYTES 64
#define ZONE_MAX_CHUNK_BYTES 8192

#define FIRST_BYTES 512 /* of a buffer */

#define MAX_WIRE_CODE 99 /* the client library's own codes begin above */

/* msgpack-c gives up at 32 containers inside one another; a frame that passed must never get there.
 */
static_assert(UCM_MAX_DEPTH < 32, "deeper than msgpack-c unpacks");

uint32_t proto_frame_length(const uint8_t header[PROTO_HEADER_BYTES])
{
    return (uint32_t)header[0] << 24 | (uint32_t)header[1] << 16 | (uint32_t)header[2] << 8 |
           (uint32_t)header[3];
}

enum shape {
    SHAPE_REFUSED,
    SHAPE_SCALAR, /* `bytes` of payload */
    SHAPE_EXT,
    SHAPE_BYTES, /* a big-endian length of `bytes`, and so many bytes */
    SHAPE_ARRAY, /* a big-endian count of `bytes`, and so many values */
    SHAPE_MAP,   /* a big-endian count of `bytes`, and twice so many values */
};

/* First bytes 0xc0 to 0xdf, in order, as the MessagePack specification lists them. */
static const struct {
    uint8_t shape, bytes;
} shapes[32] = {
    {SHAPE_SCALAR, 0}, {SHAPE_REFUSED, 0}, {SHAPE_SCALAR, 0}, {SHAPE_SCALAR, 0}, /* nil, -, bools */
    {SHAPE_BYTES, 1},  {SHAPE_BYTES, 2},   {SHAPE_BYTES, 4},                     /* bin */
    {SHAPE_EXT, 0},    {SHAPE_EXT, 0},     {SHAPE_EXT, 0},                       /* ext */
    {SHAPE_SCALAR, 4}, {SHAPE_SCALAR, 8},                                        /* floats */
    {SHAPE_SCALAR, 1}, {SHAPE_SCALAR, 2},  {SHAPE_SCALAR, 4}, {SHAPE_SCALAR, 8}, /* uint */
    {SHAPE_SCALAR, 1}, {SHAPE_SCALAR, 2},  {SHAPE_SCALAR, 4}, {SHAPE_SCALAR, 8}, /* int */
    {SHAPE_EXT, 0},    {SHAPE_EXT, 0},     {SHAPE_EXT, 0},    {SHAPE_EXT, 0},    /* fixext */
    {SHAPE_EXT, 0},                                                              /* fixext 16 */
    {SHAPE_BYTES, 1},  {SHAPE_BYTES, 2},   {SHAPE_BYTES, 4},                     /* str */
    {SHAPE_ARRAY, 2},  {SHAPE_ARRAY, 4},   {SHAPE_MAP, 2},    {SHAPE_MAP, 4},
};

/* One value's own bytes, and how many values follow inside it. */
struct token {
    uint64_t bytes, children;
    bool container;
};

/* ---- the walk ---- */

static int refuse_at(struct ucm_error *e, size_t at, const char *what)
{
    return ucm_error_set(e, UCM_WIRE_INVALID, "the frame %s at byte %zu of its body", what, at);
}

/* p[0..left), left >= 1. */
static int token_read(struct token *t, const uint8_t *p, size_t left, size_t at,
                      struct ucm_error *e)
{
    uint8_t first = p[0];
    unsigned bytes = 0;
    uint64_t count = 0;
    enum shape shape = SHAPE_SCALAR;

    if (first >= 0xc0 && first < 0xe0) {
        shape = shapes[first - 0xc0].shape;
        bytes = shapes[first - 0xc0].bytes;
    } else if (first >= 0x80 && first < 0xc0) {
        shape = first < 0x90 ? SHAPE_MAP : first < 0xa0 ? SHAPE_ARRAY : SHAPE_BYTES;
        count = shape == SHAPE_BYTES ? first & 0x1f : first & 0x0f;
    }
    *t = (struct token){.bytes = 1 + bytes};
    if (shape == SHAPE_REFUSED)
        return refuse_at(e, at, "has 0xc1, which MessagePack never uses,");
    if (shape == SHAPE_EXT)
        return refuse_at(e, at, "has an extension type, which this protocol does not use,");
    if (shape == SHAPE_SCALAR)
        return 0;
    if (t->bytes > left)
        return refuse_at(e, at, "ends inside a value");
    for (unsigned i = 1; i <= bytes; i++)
        count = count << 8 | p[i];
    if (shape == SHAPE_BYTES) {
        t->bytes += count;
        return 0;
    }
    t->container = true;
    t->children = shape == SHAPE_MAP ? 2 * count : count;
    return 0;
}

/* Every value takes a byte at least, so a count beyond the bytes that are left is false; refused
 * here, it does not make msgpack-c allocate. */
int proto_frame_check(const uint8_t *body, size_t n, uint32_t *elements, struct ucm_error *e)
{
    uint64_t wanted[UCM_MAX_DEPTH + 1] = {1}; /* values still to come, by depth */
    unsigned depth = 0;
    uint32_t seen = 0;
    size_t at = 0;
    struct token t;
    int rc;

    if (n == 0 || n > UCM_MAX_FRAME_BYTES)
        return ucm_error_set(e, UCM_WIRE_INVALID,
                             "the frame's body has %zu bytes; it must have 1 to %u", n,
                             UCM_MAX_FRAME_BYTES);
    for (;;) {
        while (wanted[depth] == 0 && depth > 0)
            depth--;
        if (wanted[depth] == 0)
            break;
        if (at == n)
            return refuse_at(e, at, "ends before its value is whole,");
        wanted[depth]--;
        if (++seen > UCM_MAX_ELEMENTS)
            return ucm_error_set(e, UCM_WIRE_INVALID,
                                 "the frame has more than %d MessagePack values; send less at once",
                                 UCM_MAX_ELEMENTS);
        rc = token_read(&t, body + at, n - at, at, e);
        if (rc)
            return rc;
        if (t.bytes > n - at || t.children > n - at - t.bytes)
            return ucm_error_set(
                e, UCM_WIRE_INVALID,
                "the value at byte %zu of the frame's body claims more than the %zu "
                "bytes that are left",
                at, n - at);
        at += t.bytes;
        if (!t.container)
            continue;
        if (depth == UCM_MAX_DEPTH)
            return ucm_error_set(
                e, UCM_WIRE_INVALID,
                "the frame nests more than %d arrays and maps, at byte %zu of its body",
                UCM_MAX_DEPTH, at);
        wanted[++depth] = t.children;
    }
    if (at != n)
        return ucm_error_set(
            e, UCM_WIRE_INVALID,
            "the frame's value ends at byte %zu of %zu; one frame holds exactly one value", at, n);
    *elements = seen;
    return 0;
}

/* ---- the envelope ---- */

static int refuse(struct ucm_error *e, const char *sentence)
{
    return ucm_error_set(e, UCM_WIRE_INVALID, "%s", sentence);
}

/* Is this the beginning of [0, msgid, ... as every encoder writes it? So a request which breaks a
 * bound further on is still answered under its number. */
static bool peek_request(const uint8_t *p, size_t n, uint32_t *msgid)
{
    unsigned bytes;
    uint32_t v = 0;

    if (n < 3 || p[0] != 0x94 || p[1] != PROTO_REQUEST)
        return false;
    if (p[2] < 0x80) {
        *msgid = p[2];
        return true;
    }
    if (p[2] < 0xcc || p[2] > 0xce)
        return false;
    bytes = 1u << (p[2] - 0xcc);
    if (n < 3 + bytes)
        return false;
    for (unsigned i = 0; i < bytes; i++)
        v = v << 8 | p[3 + i];
    *msgid = v;
    return true;
}

/* [code, name, sentence]: the name follows from the code. */
static int error_read(struct proto_envelope *env, const msgpack_object *from, struct ucm_error *e)
{
    const msgpack_object *o = from->via.array.ptr;
    uint32_t n;

    if (from->type != MSGPACK_OBJECT_ARRAY || from->via.array.size != 3 ||
        o[0].type != MSGPACK_OBJECT_POSITIVE_INTEGER || o[0].via.u64 == 0 ||
        o[0].via.u64 > MAX_WIRE_CODE || o[1].type != MSGPACK_OBJECT_STR ||
        o[2].type != MSGPACK_OBJECT_STR)
        return refuse(e, "an error must be [code from 1 to 99, name, sentence]");
    n = o[2].via.str.size < sizeof(env->error.text) ? o[2].via.str.size
                                                    : sizeof(env->error.text) - 1;
    for (uint32_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)o[2].via.str.ptr[i];

        env->error.text[i] = c < ' ' || c == 0x7f ? '?' : (char)c;
    }
    env->error.text[n] = '\0';
    env->error.code = (int)o[0].via.u64;
    return 0;
}

static int response_read(struct proto_envelope *env, const msgpack_object *error,
                         struct ucm_error *e)
{
    if (error->type == MSGPACK_OBJECT_NIL)
        return env->body.type == MSGPACK_OBJECT_MAP
                   ? 0
                   : refuse(e, "a response's result must be a map");
    if (env->body.type != MSGPACK_OBJECT_NIL)
        return refuse(e, "a response with an error must have nil as its result");
    return error_read(env, error, e);
}

static int envelope_read(struct proto_envelope *env, bool *answerable, struct ucm_error *e)
{
    const msgpack_object *data = &env->unpacked.data, *o = data->via.array.ptr, *method;
    uint32_t n = data->type == MSGPACK_OBJECT_ARRAY ? data->via.array.size : 0;
    uint64_t type =
        n > 0 && o[0].type == MSGPACK_OBJECT_POSITIVE_INTEGER ? o[0].via.u64 : UINT64_MAX;

    if (type > PROTO_NOTIFICATION || n != (type == PROTO_NOTIFICATION ? 3 : 4))
        return refuse(e, "a frame must be [0, msgid, method, params], [1, msgid, error, result] or "
                         "[2, method, params]");
    env->type = (enum proto_type)type;
    env->body = o[n - 1];
    if (type != PROTO_NOTIFICATION) {
        if (o[1].type != MSGPACK_OBJECT_POSITIVE_INTEGER || o[1].via.u64 > UINT32_MAX)
            return ucm_error_set(e, UCM_WIRE_INVALID,
                                 "a %s's msgid must be an unsigned integer below 2^32",
                                 type == PROTO_REQUEST ? "request" : "response");
        env->msgid = (uint32_t)o[1].via.u64;
        *answerable = type == PROTO_REQUEST;
    }
    method = &o[n - 2];
    if (type == PROTO_RESPONSE)
        return response_read(env, method, e);
    if (type == PROTO_REQUEST && env->body.type != MSGPACK_OBJECT_MAP)
        return refuse(e, "a request's params must be a map; an empty one when there are none");
    if (method->type != MSGPACK_OBJECT_STR || method->via.str.size == 0)
        return refuse(e, "the method must be text (MessagePack str), e.g. \"lookup\"");
    env->method = (struct proto_str){method->via.str.ptr, method->via.str.size};
    if (type == PROTO_NOTIFICATION && proto_str_is(env->method, "error"))
        return error_read(env, &env->body, e);
    return 0;
}

int proto_envelope_open(struct proto_envelope *env, const uint8_t *body, size_t n, bool *answerable,
                        struct ucm_error *e)
{
    size_t chunk, at = 0;
    uint32_t elements;
    int rc;

    memset(env, 0, sizeof(*env));
    *answerable = false;
    rc = proto_frame_check(body, n, &elements, e);
    if (rc == 0) {
        /* The walk has counted the values, so the zone can be as small as they need. */
        chunk = elements * ZONE_VALUE_BYTES + ZONE_SLACK_BYTES;
        env->unpacked.zone =
            msgpack_zone_new(chunk < ZONE_MAX_CHUNK_BYTES ? chunk : ZONE_MAX_CHUNK_BYTES);
        /* Bytes that the walk let pass are one value, so only memory can lack. */
        if (!env->unpacked.zone || msgpack_unpack((const char *)body, n, &at, env->unpacked.zone,
                                                  &env->unpacked.data) != MSGPACK_UNPACK_SUCCESS)
            rc = ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a frame of %zu bytes", n);
        else
            rc = envelope_read(env, answerable, e);
    }
    if (rc) {
        *answerable = *answerable || peek_request(body, n, &env->msgid);
        proto_envelope_close(env);
    }
    return rc;
}

void proto_envelope_close(struct proto_envelope *env)
{
    msgpack_unpacked_destroy(&env->unpacked);
}

/* ---- the buffer ---- */

void proto_buf_init(struct proto_buf *b, size_t limit)
{
    *b = (struct proto_buf){.limit = limit};
}

void proto_buf_free(struct proto_buf *b)
{
    free(b->p);
    *b = (struct proto_buf){.limit = b->limit};
}

static int buf_grow(struct proto_buf *b, size_t more)
{
    size_t cap = b->cap ? b->cap : FIRST_BYTES;
    uint8_t *p;

    if (more > b->limit - b->n)
        return UCM_WIRE_INVALID;
    while (cap < b->n + more)
        cap *= 2;
    if (cap > b->limit)
        cap = b->limit;
    p = realloc(b->p, cap);
    if (!p)
        return UCM_WIRE_NO_MEMORY;
    b->p = p;
    b->cap = cap;
    return 0;
}

/* What the packers write with. */
static int append_cb(void *data, const char *p, size_t n)
{
    struct proto_buf *b = data;

    if (!b->failed && n > b->cap - b->n)
        b->failed = buf_grow(b, n);
    if (b->failed)
        return -1;
    if (n > 0)
        memcpy(b->p + b->n, p, n);
    b->n += n;
    return 0;
}

/* ---- building ---- */

/* The length is not known yet: its four bytes are filled in at the end. */
static void frame_begin(struct proto_builder *pb, struct proto_buf *b, enum proto_type type,
                        uint32_t msgid, const char *method)
{
    static const char header[PROTO_HEADER_BYTES];

    assert(!b->failed);
    pb->buf = b;
    pb->start = b->n;
    msgpack_packer_init(&pb->pk, b, append_cb);
    (void)append_cb(b, header, sizeof(header));
    msgpack_pack_array(&pb->pk, type == PROTO_NOTIFICATION ? 3 : 4);
    msgpack_pack_uint8(&pb->pk, type);
    if (type != PROTO_NOTIFICATION)
        msgpack_pack_uint32(&pb->pk, msgid);
    if (method)
        proto_pack_str(&pb->pk, method);
}

/* rc: of what was packed. The buffer is as before if that, or its end, fails. */
static int frame_end(struct proto_builder *pb, int rc, struct ucm_error *e)
{
    struct proto_buf *b = pb->buf;
    size_t n = b->n - pb->start - PROTO_HEADER_BYTES;

    if (rc == 0 && b->failed == UCM_WIRE_NO_MEMORY)
        rc = ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory to build a frame");
    else if (rc == 0 && b->failed)
        rc = ucm_error_set(e, UCM_WIRE_INVALID,
                           "the frame does not fit: %zu bytes wait to be sent, of at most %zu; "
                           "send less at once",
                           pb->start, b->limit);
    else if (rc == 0 && n > UCM_MAX_FRAME_BYTES)
        rc = ucm_error_set(e, UCM_WIRE_INVALID,
                           "the frame's body has %zu bytes; it must have at most %u: send less at "
                           "once",
                           n, UCM_MAX_FRAME_BYTES);
    if (rc) {
        b->n = pb->start;
        b->failed = 0;
        return rc;
    }
    for (unsigned i = 0; i < PROTO_HEADER_BYTES; i++)
        b->p[pb->start + i] = (uint8_t)(n >> (24 - 8 * i));
    return 0;
}

void proto_request_begin(struct proto_builder *pb, struct proto_buf *b, uint32_t msgid,
                         const char *method)
{
    frame_begin(pb, b, PROTO_REQUEST, msgid, method);
}

void proto_response_begin(struct proto_builder *pb, struct proto_buf *b, uint32_t msgid)
{
    frame_begin(pb, b, PROTO_RESPONSE, msgid, NULL);
    msgpack_pack_nil(&pb->pk);
}

int proto_request(struct proto_buf *b, uint32_t msgid, enum ucm_method method,
                  const struct proto_message *m, const void *params, struct ucm_error *e)
{
    struct proto_where where = {.e = e};
    struct proto_builder pb;

    assert((unsigned)method < UCM_METHOD_COUNT);
    frame_begin(&pb, b, PROTO_REQUEST, msgid, proto_methods[method].name.p);
    return frame_end(&pb, proto_message_pack(&pb.pk, m, params, &where), e);
}

int proto_response(struct proto_buf *b, uint32_t msgid, const struct proto_message *m,
                   const void *result, struct ucm_error *e)
{
    struct proto_where where = {.e = e};
    struct proto_builder pb;

    frame_begin(&pb, b, PROTO_RESPONSE, msgid, NULL);
    msgpack_pack_nil(&pb.pk);
    return frame_end(&pb, proto_message_pack(&pb.pk, m, result, &where), e);
}

int proto_notification(struct proto_buf *b, const char *method, const struct proto_message *m,
                       const void *params, struct ucm_error *e)
{
    struct proto_where where = {.e = e};
    struct proto_builder pb;

    frame_begin(&pb, b, PROTO_NOTIFICATION, 0, method);
    return frame_end(&pb, proto_message_pack(&pb.pk, m, params, &where), e);
}

/* An error without a sentence gets the table's. */
static void error_pack(msgpack_packer *pk, const struct ucm_error *error)
{
    assert(error->code > 0);
    msgpack_pack_array(pk, 3);
    msgpack_pack_int(pk, error->code);
    proto_pack_str(pk, ucm_error_name(error->code));
    proto_pack_str(pk, error->text[0] ? error->text : ucm_error_sentence(error->code));
}

int proto_response_error(struct proto_buf *b, uint32_t msgid, const struct ucm_error *error)
{
    struct proto_builder pb;

    frame_begin(&pb, b, PROTO_RESPONSE, msgid, NULL);
    error_pack(&pb.pk, error);
    msgpack_pack_nil(&pb.pk);
    return frame_end(&pb, 0, NULL);
}

int proto_notification_error(struct proto_buf *b, const struct ucm_error *error)
{
    struct proto_builder pb;

    frame_begin(&pb, b, PROTO_NOTIFICATION, 0, "error");
    error_pack(&pb.pk, error);
    return frame_end(&pb, 0, NULL);
}

/* Checks what the caller packed like a peer's frame: better an error here than a frame that the
 * other side refuses. */
int proto_frame_end(struct proto_builder *pb, struct ucm_error *e)
{
    size_t body = pb->start + PROTO_HEADER_BYTES;
    int rc = frame_end(pb, 0, e);
    uint32_t elements;

    if (rc == 0)
        rc = proto_frame_check(pb->buf->p + body, pb->buf->n - body, &elements, e);
    return rc ? frame_end(pb, rc, e) : 0;
}
