#include "proto/proto.h"

#include <assert.h>
#include <string.h>

/* What one MessagePack value can take once unpacked: an object, of which a map entry has two.
 * Arrays that proto_decode allocates come out of the same zone. */
#define ZONE_VALUE_BYTES sizeof(msgpack_object)
#define ZONE_SLACK_BYTES 64
#define ZONE_MAX_CHUNK_BYTES 8192

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

/* Every value takes a byte at least, so a count beyond the bytes that are left is false; refused here,
 * it does not make msgpack-c allocate. */
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

/* Is this the beginning of [0, msgid, ... as every encoder writes it? So a request which breaks a bound
 * further on is still answered under its number. */
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

static bool is_u32(const msgpack_object *o)
{
    return o->type == MSGPACK_OBJECT_POSITIVE_INTEGER && o->via.u64 <= UINT32_MAX;
}

/* [code, name, sentence]: the name follows from the code. */
static int error_read(struct proto_envelope *env, const msgpack_object *from, struct ucm_error *e)
{
    const msgpack_object *o = from->via.array.ptr;
    uint32_t n;

    if (from->type != MSGPACK_OBJECT_ARRAY || from->via.array.size != 3 || !is_u32(&o[0]) ||
        o[0].via.u64 == 0 || o[0].via.u64 > MAX_WIRE_CODE || o[1].type != MSGPACK_OBJECT_STR ||
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

static int method_read(struct proto_envelope *env, const msgpack_object *from, struct ucm_error *e)
{
    if (from->type != MSGPACK_OBJECT_STR || from->via.str.size == 0)
        return refuse(e, "the method must be text (MessagePack str), e.g. \"lookup\"");
    env->method = (struct proto_str){from->via.str.ptr, from->via.str.size};
    return 0;
}

static int request_read(struct proto_envelope *env, const msgpack_object *o, bool *answerable,
                        struct ucm_error *e)
{
    if (!is_u32(&o[1]))
        return refuse(e, "a request's msgid must be an unsigned integer below 2^32");
    env->msgid = (uint32_t)o[1].via.u64;
    *answerable = true;
    if (o[3].type != MSGPACK_OBJECT_MAP)
        return refuse(e, "a request's params must be a map; an empty one when there are none");
    env->body = o[3];
    return method_read(env, &o[2], e);
}

static int response_read(struct proto_envelope *env, const msgpack_object *o, struct ucm_error *e)
{
    if (!is_u32(&o[1]))
        return refuse(e, "a response's msgid must be an unsigned integer below 2^32");
    env->msgid = (uint32_t)o[1].via.u64;
    env->body = o[3];
    if (o[2].type == MSGPACK_OBJECT_NIL)
        return o[3].type == MSGPACK_OBJECT_MAP ? 0 : refuse(e, "a response's result must be a map");
    if (o[3].type != MSGPACK_OBJECT_NIL)
        return refuse(e, "a response with an error must have nil as its result");
    return error_read(env, &o[2], e);
}

static int notification_read(struct proto_envelope *env, const msgpack_object *o,
                             struct ucm_error *e)
{
    static const char error_method[] = "error";
    int rc = method_read(env, &o[1], e);

    if (rc)
        return rc;
    env->body = o[2];
    if (env->method.n == sizeof(error_method) - 1 &&
        memcmp(env->method.p, error_method, env->method.n) == 0)
        return error_read(env, &o[2], e);
    return 0;
}

static int envelope_read(struct proto_envelope *env, bool *answerable, struct ucm_error *e)
{
    const msgpack_object *data = &env->unpacked.data, *o = data->via.array.ptr;
    uint32_t n = data->type == MSGPACK_OBJECT_ARRAY ? data->via.array.size : 0;
    uint64_t type =
        n > 0 && o[0].type == MSGPACK_OBJECT_POSITIVE_INTEGER ? o[0].via.u64 : UINT64_MAX;

    if (type > PROTO_NOTIFICATION || n != (type == PROTO_NOTIFICATION ? 3 : 4))
        return refuse(e, "a frame must be [0, msgid, method, params], [1, msgid, error, result] or "
                         "[2, method, params]");
    env->type = (enum proto_type)type;
    if (env->type == PROTO_REQUEST)
        return request_read(env, o, answerable, e);
    return env->type == PROTO_RESPONSE ? response_read(env, o, e) : notification_read(env, o, e);
}

/* The walk has counted the values, so the zone can be as small as they need. */
static int unpack(struct proto_envelope *env, const uint8_t *body, size_t n, uint32_t elements,
                  struct ucm_error *e)
{
    size_t chunk = elements * ZONE_VALUE_BYTES + ZONE_SLACK_BYTES, at = 0;

    env->unpacked.zone =
        msgpack_zone_new(chunk < ZONE_MAX_CHUNK_BYTES ? chunk : ZONE_MAX_CHUNK_BYTES);
    /* Bytes that the walk let pass are one value, so only memory can lack. */
    if (env->unpacked.zone && msgpack_unpack((const char *)body, n, &at, env->unpacked.zone,
                                             &env->unpacked.data) == MSGPACK_UNPACK_SUCCESS)
        return 0;
    return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a frame of %zu bytes", n);
}

int proto_envelope_open(struct proto_envelope *env, const uint8_t *body, size_t n, bool *answerable,
                        struct ucm_error *e)
{
    uint32_t elements;
    int rc;

    memset(env, 0, sizeof(*env));
    *answerable = false;
    rc = proto_frame_check(body, n, &elements, e);
    if (rc == 0)
        rc = unpack(env, body, n, elements, e);
    if (rc == 0)
        rc = envelope_read(env, answerable, e);
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
