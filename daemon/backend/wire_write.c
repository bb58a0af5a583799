#include "daemon/backend/wire.h"

#include "proto/proto.h"

#include <assert.h>
#include <string.h>

#define HEAD_BYTES 3u /* an array of up to 65,535 messages */

const char *const wire_verbs[WIRE_VERBS] = {
    [WIRE_FIND] = "find",   [WIRE_READ] = "read", [WIRE_WRITE] = "write", [WIRE_REMOVE] = "remove",
    [WIRE_TOUCH] = "touch", [WIRE_LIST] = "list", [WIRE_CHECK] = "check",
};
const char *const wire_statuses[WIRE_STATUSES] = {
    [WIRE_OK] = "ok",           [WIRE_MORE] = "more",
    [WIRE_MISSING] = "missing", [WIRE_EXISTS] = "exists",
    [WIRE_OTHER] = "other",     [WIRE_ABSENT] = "absent",
    [WIRE_FULL] = "full",       [WIRE_READ_ONLY] = "read_only",
    [WIRE_DENIED] = "denied",   [WIRE_UNREACHABLE] = "unreachable",
    [WIRE_TIMEOUT] = "timeout", [WIRE_FAILED] = "failed",
};

static int write_cb(void *data, const char *bytes, size_t n)
{
    struct wire_packet *p = data;

    if (p->full || n > sizeof(p->bytes) - p->n) {
        p->full = true;
        return -1;
    }
    memcpy(p->bytes + p->n, bytes, n);
    p->n += n;
    return 0;
}

void wire_begin(struct wire_packet *p)
{
    p->n = HEAD_BYTES;
    p->messages = 0;
    p->full = false;
}

size_t wire_end(struct wire_packet *p)
{
    assert(p->messages > 0);
    p->bytes[0] = 0xdc;
    p->bytes[1] = (uint8_t)(p->messages >> 8);
    p->bytes[2] = (uint8_t)p->messages;
    return p->n;
}

static bool message_end(struct wire_packet *p, size_t start)
{
    if (p->full || p->messages == UINT16_MAX) {
        p->n = start;
        p->full = false;
        return false;
    }
    p->messages++;
    return true;
}

bool wire_add_hello(struct wire_packet *p, const struct wire_hello *h)
{
    size_t start = p->n;
    msgpack_packer pk;

    msgpack_packer_init(&pk, p, write_cb);
    msgpack_pack_map(&pk, 8);
    proto_pack_text(&pk, "hello", "ucmd");
    proto_pack_u64(&pk, "version_min", h->version_min);
    proto_pack_u64(&pk, "version_max", h->version_max);
    proto_pack_u64(&pk, "buffer", h->buffer);
    proto_pack_u64(&pk, "depth", h->depth);
    proto_pack_text(&pk, "root", h->root);
    proto_pack_text(&pk, "host", h->host);
    proto_pack_flag(&pk, "read_only", h->read_only);
    return message_end(p, start);
}

bool wire_add_hello_answer(struct wire_packet *p, const struct wire_hello_answer *h)
{
    size_t start = p->n;
    msgpack_packer pk;

    msgpack_packer_init(&pk, p, write_cb);
    msgpack_pack_map(&pk, 4);
    proto_pack_text(&pk, "hello", h->name);
    proto_pack_u64(&pk, "version", h->version);
    proto_pack_u64(&pk, "depth", h->depth);
    proto_pack_str(&pk, "abilities");
    msgpack_pack_array(&pk, (size_t)h->touch + h->list);
    if (h->touch)
        proto_pack_str(&pk, "touch");
    if (h->list)
        proto_pack_str(&pk, "list");
    return message_end(p, start);
}

bool wire_add_request(struct wire_packet *p, const struct wire_request *r)
{
    bool data = r->verb == WIRE_READ || r->verb == WIRE_WRITE;
    bool makes = r->verb == WIRE_WRITE || r->verb == WIRE_CHECK;
    size_t start = p->n;
    msgpack_packer pk;

    msgpack_packer_init(&pk, p, write_cb);
    msgpack_pack_map(&pk, 3 + (size_t)(r->verb != WIRE_CHECK) + (data || r->verb == WIRE_FIND) +
                              data + 2 * (size_t)makes);
    proto_pack_u64(&pk, "id", r->id);
    proto_pack_text(&pk, "verb", wire_verbs[r->verb]);
    proto_pack_u64(&pk, "ms", r->ms);
    if (r->verb != WIRE_CHECK)
        proto_pack_text(&pk, r->verb == WIRE_LIST ? "prefix" : "key", r->key);
    if (data || r->verb == WIRE_FIND)
        proto_pack_u64(&pk, "bytes", r->bytes);
    if (data)
        proto_pack_u64(&pk, "offset", r->offset);
    if (makes) {
        proto_pack_text(&pk, "temp", r->temp);
        proto_pack_flag(&pk, "sync", r->sync);
    }
    return message_end(p, start);
}

bool wire_add_answer(struct wire_packet *p, const struct wire_answer *a,
                     const struct wire_file *files, uint32_t n)
{
    size_t start = p->n;
    msgpack_packer pk;

    msgpack_packer_init(&pk, p, write_cb);
    msgpack_pack_map(&pk, 2 + (size_t)a->has_bytes + (a->mtime_ns != 0) + a->has_now +
                              (a->unread != 0) + (a->reason[0] != '\0') + (n > 0));
    proto_pack_u64(&pk, "id", a->id);
    proto_pack_text(&pk, "status", wire_statuses[a->status]);
    if (a->has_bytes)
        proto_pack_u64(&pk, "bytes", a->bytes);
    if (a->mtime_ns != 0)
        proto_pack_u64(&pk, "mtime", a->mtime_ns);
    if (a->has_now)
        proto_pack_u64(&pk, "now", a->now_ns);
    if (a->unread != 0)
        proto_pack_u64(&pk, "unread", a->unread);
    if (a->reason[0] != '\0')
        proto_pack_text(&pk, "reason", a->reason);
    if (n > 0) {
        proto_pack_str(&pk, "files");
        msgpack_pack_array(&pk, n);
        for (uint32_t i = 0; i < n; i++) {
            msgpack_pack_array(&pk, 3);
            proto_pack_str(&pk, files[i].name);
            msgpack_pack_uint64(&pk, files[i].bytes);
            msgpack_pack_uint64(&pk, files[i].mtime_ns);
        }
    }
    return message_end(p, start);
}
