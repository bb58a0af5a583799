#include "proto/tables.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_BYTES 512

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

/* ---- frames ---- */

/* The length is not known yet: its four bytes are filled in at the end. */
static void frame_begin(struct proto_builder *pb, struct proto_buf *b, size_t values,
                        enum proto_type type)
{
    static const char header[PROTO_HEADER_BYTES];

    assert(!b->failed);
    pb->buf = b;
    pb->start = b->n;
    msgpack_packer_init(&pb->pk, b, append_cb);
    (void)append_cb(b, header, sizeof(header));
    msgpack_pack_array(&pb->pk, values);
    msgpack_pack_uint8(&pb->pk, type);
}

static int frame_drop(struct proto_builder *pb, int rc)
{
    pb->buf->n = pb->start;
    pb->buf->failed = 0;
    return rc;
}

static int frame_end(struct proto_builder *pb, struct ucm_error *e)
{
    struct proto_buf *b = pb->buf;
    size_t n = b->n - pb->start - PROTO_HEADER_BYTES;

    if (b->failed == UCM_WIRE_NO_MEMORY)
        return frame_drop(pb, ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory to build a frame"));
    if (b->failed)
        return frame_drop(pb,
                          ucm_error_set(e, UCM_WIRE_INVALID,
                                        "the frame does not fit: %zu bytes wait to be sent, of at "
                                        "most %zu; send less at once",
                                        pb->start, b->limit));
    if (n > UCM_MAX_FRAME_BYTES)
        return frame_drop(pb,
                          ucm_error_set(e, UCM_WIRE_INVALID,
                                        "the frame's body has %zu bytes; it must have at most %u: "
                                        "send less at once",
                                        n, UCM_MAX_FRAME_BYTES));
    for (unsigned i = 0; i < PROTO_HEADER_BYTES; i++)
        b->p[pb->start + i] = (uint8_t)(n >> (24 - 8 * i));
    return 0;
}

static int frame_end_message(struct proto_builder *pb, const struct proto_message *m,
                             const void *message, struct ucm_error *e)
{
    struct proto_where where = {.e = e};
    int rc = proto_message_pack(&pb->pk, m, message, &where);

    return rc ? frame_drop(pb, rc) : frame_end(pb, e);
}

void proto_request_begin(struct proto_builder *pb, struct proto_buf *b, uint32_t msgid,
                         const char *method)
{
    frame_begin(pb, b, 4, PROTO_REQUEST);
    msgpack_pack_uint32(&pb->pk, msgid);
    proto_pack_str(&pb->pk, method);
}

void proto_response_begin(struct proto_builder *pb, struct proto_buf *b, uint32_t msgid)
{
    frame_begin(pb, b, 4, PROTO_RESPONSE);
    msgpack_pack_uint32(&pb->pk, msgid);
    msgpack_pack_nil(&pb->pk);
}

void proto_notification_begin(struct proto_builder *pb, struct proto_buf *b, const char *method)
{
    frame_begin(pb, b, 3, PROTO_NOTIFICATION);
    proto_pack_str(&pb->pk, method);
}

int proto_request(struct proto_buf *b, uint32_t msgid, enum ucm_method method,
                  const struct proto_message *m, const void *params, struct ucm_error *e)
{
    struct proto_builder pb;

    proto_request_begin(&pb, b, msgid, proto_method_name(method));
    return frame_end_message(&pb, m, params, e);
}

int proto_response(struct proto_buf *b, uint32_t msgid, const struct proto_message *m,
                   const void *result, struct ucm_error *e)
{
    struct proto_builder pb;

    proto_response_begin(&pb, b, msgid);
    return frame_end_message(&pb, m, result, e);
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

    frame_begin(&pb, b, 4, PROTO_RESPONSE);
    msgpack_pack_uint32(&pb.pk, msgid);
    error_pack(&pb.pk, error);
    msgpack_pack_nil(&pb.pk);
    return frame_end(&pb, NULL);
}

int proto_notification(struct proto_buf *b, const char *method, const struct proto_message *m,
                       const void *params, struct ucm_error *e)
{
    struct proto_builder pb;

    proto_notification_begin(&pb, b, method);
    return frame_end_message(&pb, m, params, e);
}

int proto_notification_error(struct proto_buf *b, const struct ucm_error *error)
{
    struct proto_builder pb;

    proto_notification_begin(&pb, b, "error");
    error_pack(&pb.pk, error);
    return frame_end(&pb, NULL);
}

/* Checks what the caller packed like a peer's frame: better an error here than a frame that the other
 * side refuses. */
int proto_response_end(struct proto_builder *pb, struct ucm_error *e)
{
    int rc = frame_end(pb, e);
    uint32_t elements;

    if (rc)
        return rc;
    rc = proto_frame_check(pb->buf->p + pb->start + PROTO_HEADER_BYTES,
                           pb->buf->n - pb->start - PROTO_HEADER_BYTES, &elements, e);
    return rc ? frame_drop(pb, rc) : 0;
}
