#include "client/ctl/answer.h"

#include "proto/tables.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ABSENT_MS 100
#define JSON_EXACT (UINT64_C(1) << 53) /* what a double holds without rounding */

int answer_connect(const struct ucm_options *options, int timeout_ms, struct ucm_client **out)
{
    int rc = ucm_connect(options, timeout_ms < ABSENT_MS ? timeout_ms : ABSENT_MS, out);

    /* It listens, but has not answered hello yet. */
    if (rc == -UCM_EDEADLINE && timeout_ms > ABSENT_MS)
        rc = ucm_connect(options, timeout_ms, out);
    return rc;
}

int answer_call(struct ucm_client *client, enum ucm_method method, const void *params,
                int timeout_ms, struct answer *out)
{
    struct proto_where where = {.e = NULL};
    msgpack_packer pk;
    msgpack_sbuffer packed;
    uint8_t *bytes = NULL;
    size_t n = 0, at = 0;
    int rc;

    msgpack_sbuffer_init(&packed);
    msgpack_packer_init(&pk, &packed, msgpack_sbuffer_write);
    if (proto_message_pack(&pk, proto_methods[method].params, params, &where) < 0) {
        msgpack_sbuffer_destroy(&packed);
        return -UCM_EPROTOCOL;
    }
    rc = ucm_call(client, proto_methods[method].name.p, packed.data, packed.size, timeout_ms,
                  &bytes, &n);
    msgpack_sbuffer_destroy(&packed);
    if (rc < 0)
        return rc;
    msgpack_unpacked_init(&out->unpacked);
    if (msgpack_unpack_next(&out->unpacked, (const char *)bytes, n, &at) !=
            MSGPACK_UNPACK_SUCCESS ||
        out->unpacked.data.type != MSGPACK_OBJECT_MAP) {
        msgpack_unpacked_destroy(&out->unpacked);
        free(bytes);
        return -UCM_EPROTOCOL;
    }
    out->bytes = bytes;
    out->root = &out->unpacked.data;
    return 0;
}

void answer_close(struct answer *a)
{
    msgpack_unpacked_destroy(&a->unpacked);
    free(a->bytes);
    a->bytes = NULL;
    a->root = NULL;
}

int answer_page(struct ucm_client *client, enum ucm_method method, uint32_t ns, uint64_t limit,
                uint64_t *cursor, int timeout_ms, struct answer *out)
{
    const struct msg_page page = {.cursor = *cursor, .limit = limit};
    const struct msg_ls of_ns = {.ns = ns, .cursor = *cursor, .limit = limit};
    int rc = answer_call(client, method, ns == 0 ? (const void *)&page : &of_ns, timeout_ms, out);
    uint64_t next;

    if (rc < 0)
        return rc;
    next = answer_u64(out->root, "next");
    if (next != 0 && next == *cursor) {
        answer_close(out);
        return -UCM_EPROTOCOL;
    }
    *cursor = next;
    return 0;
}

const msgpack_object *answer_get(const msgpack_object *map, const char *field)
{
    size_t n = strlen(field);

    if (map == NULL || map->type != MSGPACK_OBJECT_MAP)
        return NULL;
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object_kv *kv = &map->via.map.ptr[i];

        if (kv->key.type == MSGPACK_OBJECT_STR && kv->key.via.str.size == n &&
            memcmp(kv->key.via.str.ptr, field, n) == 0)
            return &kv->val;
    }
    return NULL;
}

const msgpack_object *answer_at(const msgpack_object *map, const char *field, uint32_t i)
{
    const msgpack_object *o = answer_get(map, field);

    if (o == NULL || o->type != MSGPACK_OBJECT_ARRAY || i >= o->via.array.size)
        return NULL;
    return &o->via.array.ptr[i];
}

uint32_t answer_count(const msgpack_object *map, const char *field)
{
    const msgpack_object *o = answer_get(map, field);

    return o != NULL && o->type == MSGPACK_OBJECT_ARRAY ? o->via.array.size : 0;
}

uint64_t answer_u64(const msgpack_object *map, const char *field)
{
    const msgpack_object *o = answer_get(map, field);

    return o != NULL && o->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? o->via.u64 : 0;
}

bool answer_flag(const msgpack_object *map, const char *field)
{
    const msgpack_object *o = answer_get(map, field);

    return o != NULL && o->type == MSGPACK_OBJECT_BOOLEAN && o->via.boolean;
}

static void copy_safe(char *buf, size_t n, const char *p, size_t len)
{
    size_t i;

    for (i = 0; i < len && i + 1 < n; i++)
        buf[i] = (unsigned char)p[i] < 0x20 || p[i] == 0x7f ? '?' : p[i];
    buf[i] = '\0';
}

static void copy_hex(char *buf, size_t n, const char *p, size_t len)
{
    static const char digits[] = "0123456789abcdef";
    size_t at = 0;

    for (size_t i = 0; i < len && at + 2 < n; i++) {
        buf[at++] = digits[(unsigned char)p[i] >> 4];
        buf[at++] = digits[(unsigned char)p[i] & 15];
    }
    buf[at] = '\0';
}

const char *answer_object_text(const msgpack_object *o, char *buf, size_t n)
{
    buf[0] = '\0';
    if (o == NULL)
        return buf;
    if (o->type == MSGPACK_OBJECT_STR)
        copy_safe(buf, n, o->via.str.ptr, o->via.str.size);
    else if (o->type == MSGPACK_OBJECT_BIN)
        copy_hex(buf, n, o->via.bin.ptr, o->via.bin.size);
    else if (o->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
        snprintf(buf, n, "%" PRIu64, o->via.u64);
    else if (o->type == MSGPACK_OBJECT_BOOLEAN)
        snprintf(buf, n, "%s", o->via.boolean ? "yes" : "no");
    return buf;
}

const char *answer_text(const msgpack_object *map, const char *field, char *buf, size_t n)
{
    return answer_object_text(answer_get(map, field), buf, n);
}

/* ---- JSON ---- */

cJSON *answer_json_u64(uint64_t v)
{
    char text[24];

    if (v <= JSON_EXACT)
        return cJSON_CreateNumber((double)v);
    snprintf(text, sizeof text, "%" PRIu64, v);
    return cJSON_CreateRaw(text);
}

static cJSON *json_bytes(const char *p, size_t n, bool hex)
{
    char *text = hex ? malloc(2 * n + 2) : strndup(p, n);
    cJSON *j;

    if (text == NULL)
        return NULL;
    if (hex)
        copy_hex(text, 2 * n + 2, p, n);
    j = cJSON_CreateString(text);
    free(text);
    return j;
}

/* An array or a map. Recursion is bounded by the nesting that the unpacker allows. */
static cJSON *json_container(const msgpack_object *o)
{
    bool map = o->type == MSGPACK_OBJECT_MAP;
    cJSON *j = map ? cJSON_CreateObject() : cJSON_CreateArray();
    uint32_t n = map ? o->via.map.size : o->via.array.size;
    char name[128];

    for (uint32_t i = 0; j != NULL && i < n; i++) {
        cJSON *item = answer_json(map ? &o->via.map.ptr[i].val : &o->via.array.ptr[i]);

        if (map)
            answer_object_text(&o->via.map.ptr[i].key, name, sizeof name);
        if (item == NULL ||
            !(map ? cJSON_AddItemToObject(j, name, item) : cJSON_AddItemToArray(j, item))) {
            cJSON_Delete(item);
            cJSON_Delete(j);
            return NULL;
        }
    }
    return j;
}

cJSON *answer_json(const msgpack_object *o)
{
    switch (o->type) {
    case MSGPACK_OBJECT_BOOLEAN:
        return cJSON_CreateBool(o->via.boolean);
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return answer_json_u64(o->via.u64);
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return cJSON_CreateNumber((double)o->via.i64);
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return cJSON_CreateNumber(o->via.f64);
    case MSGPACK_OBJECT_STR:
        return json_bytes(o->via.str.ptr, o->via.str.size, false);
    case MSGPACK_OBJECT_BIN:
        return json_bytes(o->via.bin.ptr, o->via.bin.size, true);
    case MSGPACK_OBJECT_ARRAY:
    case MSGPACK_OBJECT_MAP:
        return json_container(o);
    default:
        return cJSON_CreateNull();
    }
}
