/* The message tables that proto/messages.h expands to: for this module, for ucmctl, which packs
 * what it sends through ucm_call, and for tests that compare the documentation with them. Constant
 * data; any thread. */
#ifndef UCM_PROTO_TABLES_H
#define UCM_PROTO_TABLES_H

#include "proto/proto.h"

enum proto_kind {
    PROTO_KIND_u64,
    PROTO_KIND_str,
    PROTO_KIND_bin,
    PROTO_KIND_flag,
    PROTO_KIND_f64,
    PROTO_KIND_u32s,
    PROTO_KIND_handles,
    PROTO_KIND_planes,
};

#define PROTO_NAME_BYTES 32 /* with a NUL; MessagePack's short form has 31 */
struct proto_field {
    uint64_t min, max;
    uint16_t offset; /* in the message's struct */
    uint8_t kind;    /* enum proto_kind */
    bool required;
    uint8_t name_bytes;
    uint8_t head; /* of the name in MessagePack: with the name's bytes after it it is packed */
    char name[PROTO_NAME_BYTES];
};

struct proto_message {
    const char *name;
    const struct proto_field *fields;
    uint32_t n_fields;
    uint32_t bytes; /* of the struct */
    bool free;      /* a map whose fields no table lists */
};

#define PROTO_MAX_FIELDS 32 /* the decoder's bitmap of fields seen */

extern const struct proto_message proto_handle, proto_plane;

/* The common shape of proto_str, proto_bin, proto_u32s, proto_handles and proto_planes. */
struct proto_view {
    const void *p;
    uint32_t n;
};

/* The message of an array's entries; kind is handles or planes. */
const struct proto_message *proto_entry_message(enum proto_kind kind);

/* Where a field is: inside entry `index` of the array `outer`, or at the top (outer NULL). */
struct proto_where {
    const char *outer;
    uint32_t index;
    struct ucm_error *e;
};

/* Packs one message as a map. 0 or -UCM_WIRE_INVALID; the end of the frame reports a full
 * buffer. */
int proto_message_pack(msgpack_packer *pk, const struct proto_message *m, const void *message,
                       const struct proto_where *where);

#endif
