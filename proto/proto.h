/* The wire, shared by both sides: frames, envelopes, messages. docs/protocol.md and docs/methods.md
 * describe it.
 *
 * Promise: no byte of a peer makes this module read past the frame, recurse without bound, or
 * allocate more than 100 bytes for each value in it. A frame is walked once (depth, element count,
 * every length against what is left) before msgpack-c sees it.
 * Threads: no state of its own; any thread, one object at a time. Knows no other module. */
#ifndef UCM_PROTO_PROTO_H
#define UCM_PROTO_PROTO_H

#include "proto/errors.h"
#include "proto/messages.h"

#include <msgpack.h>

/* ---- frames: 4-byte big-endian body length, then one MessagePack value ---- */

#define PROTO_HEADER_BYTES 4

uint32_t proto_frame_length(const uint8_t header[PROTO_HEADER_BYTES]);

/* Checks one body of n bytes: exactly one MessagePack value, within UCM_MAX_DEPTH and
 * UCM_MAX_ELEMENTS, no length beyond the end, no ext types. 0 and how many values it has, or -code
 * with *e filled. */
int proto_frame_check(const uint8_t *body, size_t n, uint32_t *elements, struct ucm_error *e);

/* ---- opening a frame ---- */

enum proto_type { PROTO_REQUEST = 0, PROTO_RESPONSE = 1, PROTO_NOTIFICATION = 2 };

/* An opened frame. Objects and views point into the frame's bytes and into `unpacked`; both must
 * outlive them. */
struct proto_envelope {
    enum proto_type type;
    uint32_t msgid;          /* 0 for a notification */
    struct proto_str method; /* empty for a response */
    struct ucm_error error;  /* of a response or the notification "error"; code 0: none */
    msgpack_object body;     /* params map or result */
    msgpack_unpacked unpacked;
};

/* Checks and opens. On success the caller calls proto_envelope_close. On failure nothing is held;
 * *answerable then says whether the frame began as a request with a msgid: if so, env->type and
 * env->msgid are set, and the caller can answer with the error. */
int proto_envelope_open(struct proto_envelope *env, const uint8_t *body, size_t n, bool *answerable,
                        struct ucm_error *e);
void proto_envelope_close(struct proto_envelope *env);

/* ---- messages by table ---- */

struct proto_message; /* descriptor of one message: its fields, kinds and bounds */

#define S(suffix, list) extern const struct proto_message proto_##suffix;
UCM_MESSAGES(S)
#undef S
extern const struct proto_message proto_none;     /* the empty map; its struct is NULL */
extern const struct proto_message proto_free_map; /* any map: read env->body; its struct is NULL */

/* Large enough for any one message. */
union proto_any {
#define S(suffix, list) struct msg_##suffix suffix;
    UCM_MESSAGES(S)
#undef S
};

/* Decodes env->body into the struct that belongs to m, e.g. proto_lookup and struct msg_lookup.
 * Views point into the frame, NULL where the field is absent; arrays lie in memory of env and die
 * with it. Refuses a missing, unknown, repeated, mistyped or out-of-bounds field with a sentence
 * that names it. On failure *out is untouched. */
int proto_decode(const struct proto_message *m, struct proto_envelope *env, void *out,
                 struct ucm_error *e);

/* A peer's word made fit for a sentence: printable ASCII, cut to fit. */
void proto_quote(struct proto_str s, char *out, size_t size);
/* Makes a text fit for a str of the wire, in place: what is no UTF-8, or controls, becomes '?'. */
void proto_clean(char *text);

/* The number of bytes before the first one that is not UTF-8, or is a control character: names go
 * into logs, tables and C strings. n: all are valid. *control: that character, or UINT32_MAX. */
uint32_t proto_text_span(const char *p, uint32_t n, uint32_t *control);

/* By enum ucm_method. */
struct proto_method {
    struct proto_str name;
    const struct proto_message *params, *result;
};
extern const struct proto_method proto_methods[UCM_METHOD_COUNT];
/* enum ucm_method, or -1. */
int proto_method_find(struct proto_str name);

/* ---- building frames ---- */

/* A buffer that grows up to `limit` bytes. Owned by the caller; p is from malloc. An append that
 * fails sets `failed` until the frame ends: to check at the end of a frame is enough, and a frame
 * that failed leaves the buffer as it was. */
struct proto_buf {
    uint8_t *p;
    size_t n, cap, limit;
    int failed; /* 0, or the enum ucm_wire_error that the end of the frame reports */
};

void proto_buf_init(struct proto_buf *b, size_t limit);
void proto_buf_free(struct proto_buf *b);

/* Each appends one whole frame, header included; b may hold several. 0, or -code with *e: INVALID
 * for a field out of its bounds (the sentence names it) or a frame too long, NO_MEMORY. On failure
 * b is as before. */
int proto_request(struct proto_buf *b, uint32_t msgid, enum ucm_method method,
                  const struct proto_message *m, const void *params, struct ucm_error *e);
int proto_response(struct proto_buf *b, uint32_t msgid, const struct proto_message *m,
                   const void *result, struct ucm_error *e);
int proto_response_error(struct proto_buf *b, uint32_t msgid, const struct ucm_error *error);
int proto_notification(struct proto_buf *b, const char *method, const struct proto_message *m,
                       const void *params, struct ucm_error *e);
/* The notification "error", for a frame that can't be answered. */
int proto_notification_error(struct proto_buf *b, const struct ucm_error *error);

/* For results that are free maps: begin, pack the one map with pb->pk, end. Ignore the packer's
 * return values: end reports their failures, and refuses what proto_frame_check would. */
struct proto_builder {
    struct proto_buf *buf;
    size_t start;
    msgpack_packer pk;
};
void proto_response_begin(struct proto_builder *pb, struct proto_buf *b, uint32_t msgid);
/* The same for a request's params that no struct holds. */
void proto_request_begin(struct proto_builder *pb, struct proto_buf *b, uint32_t msgid,
                         const char *method);
/* Ends either. 0, or -code with *e: INVALID when the frame passes a limit of the wire or of the
 * buffer or is not one value, NO_MEMORY. */
int proto_frame_end(struct proto_builder *pb, struct ucm_error *e);

/* Small helpers over msgpack_pack_*: a string; a key and its value. */
void proto_pack_str(msgpack_packer *pk, const char *s);
void proto_pack_strn(msgpack_packer *pk, const char *s, size_t n);
void proto_pack_u64(msgpack_packer *pk, const char *key, uint64_t v);
void proto_pack_text(msgpack_packer *pk, const char *key, const char *text);
void proto_pack_bin(msgpack_packer *pk, const char *key, const uint8_t *p, size_t n);
void proto_pack_flag(msgpack_packer *pk, const char *key, bool on);
/* Bytes that are MessagePack already. */
void proto_pack_raw(msgpack_packer *pk, const void *packed, size_t n);

#endif
