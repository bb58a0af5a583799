#include "proto/proto.h"

#include <string.h>

/* What one MessagePack value can take once unpacked: an object, of which a map entry has two.
 * Arrays that proto_decode allocates come out of the same zone. */
#define ZONE_VALUE_BYTES sizeof(msgpack_object)
#define ZONE_SLACK_BYTES 64
#define ZONE_MAX_CHUNK_BYTES 8192

#define MAX_WIRE_CODE 99 /* the client library's own codes begin above */

static int refuse(struct ucm_error *e, const char *sentence)
{
    return ucm_error_set(e, UCM_WIRE_INVALID, "%s", sentence);
}

/* Is this the beginning of [0, msgid, ... as every encoder writes it? Looked at before anything
 * else, so that a request which breaks a bound further on is still answered under its number. */
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

/* The entries of an array of n; NULL for anything else. */
static const msgpack_object *array_of(const msgpack_object *o, uint32_t n)
{
    return o->type == MSGPACK_OBJECT_ARRAY && o->via.array.size == n ? o->via.array.ptr : NULL;
}

/* [code, name, sentence]: the name follows from the code. */
static int error_read(struct proto_envelope *env, const msgpack_object *from, struct ucm_error *e)
{
    const msgpack_object *o = array_of(from, 3);
    uint32_t n;

    if (!o || !is_u32(&o[0]) || o[0].via.u64 == 0 || o[0].via.u64 > MAX_WIRE_CODE ||
        o[1].type != MSGPACK_OBJECT_STR || o[2].type != MSGPACK_OBJECT_STR)
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
    const msgpack_object *four = array_of(&env->unpacked.data, 4),
                         *three = array_of(&env->unpacked.data, 3);

    if (four && is_u32(&four[0]) && four[0].via.u64 == PROTO_REQUEST) {
        env->type = PROTO_REQUEST;
        return request_read(env, four, answerable, e);
    }
    if (four && is_u32(&four[0]) && four[0].via.u64 == PROTO_RESPONSE) {
        env->type = PROTO_RESPONSE;
        return response_read(env, four, e);
    }
    if (three && is_u32(&three[0]) && three[0].via.u64 == PROTO_NOTIFICATION) {
        env->type = PROTO_NOTIFICATION;
        return notification_read(env, three, e);
    }
    return refuse(e, "a frame must be [0, msgid, method, params], [1, msgid, error, result] or "
                     "[2, method, params]");
}

/* The walk has counted the values, so the zone can be as small as they need. */
static int unpack(struct proto_envelope *env, const uint8_t *body, size_t n, uint32_t elements,
                  struct ucm_error *e)
{
    size_t chunk = elements * ZONE_VALUE_BYTES + ZONE_SLACK_BYTES, at = 0;

    env->unpacked.zone =
        msgpack_zone_new(chunk < ZONE_MAX_CHUNK_BYTES ? chunk : ZONE_MAX_CHUNK_BYTES);
    if (!env->unpacked.zone)
        goto err_memory;
    switch (msgpack_unpack((const char *)body, n, &at, env->unpacked.zone, &env->unpacked.data)) {
    case MSGPACK_UNPACK_SUCCESS:
        return 0;
    case MSGPACK_UNPACK_NOMEM_ERROR:
    case MSGPACK_UNPACK_PARSE_ERROR: /* msgpack-c's word for a failed allocation too */
        goto err_memory;
    case MSGPACK_UNPACK_CONTINUE:
    case MSGPACK_UNPACK_EXTRA_BYTES:
        break;
    }
    return ucm_error_set(e, UCM_WIRE_INTERNAL, "the frame passed its check but does not unpack");
err_memory:
    return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a frame of %zu bytes", n);
}

int proto_envelope_open(struct proto_envelope *env, const uint8_t *body, size_t n, bool *answerable,
                        struct ucm_error *e)
{
    uint32_t elements;
    int rc;

    memset(env, 0, sizeof(*env));
    *answerable = peek_request(body, n, &env->msgid);
    rc = proto_frame_check(body, n, &elements, e);
    if (rc)
        return rc;
    rc = unpack(env, body, n, elements, e);
    if (rc == 0)
        rc = envelope_read(env, answerable, e);
    if (rc)
        proto_envelope_close(env);
    return rc;
}

void proto_envelope_close(struct proto_envelope *env)
{
    msgpack_unpacked_destroy(&env->unpacked);
}
