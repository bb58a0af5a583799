/* Packets between the daemon and the process of a root, as docs/backends.md describes them: both
 * directions, for both sides.
 *
 * Promises: no byte of the other side makes this module read past a packet or allocate more than
 * 100 bytes for each of its values; a message that breaks a rule of docs/backends.md is refused
 * with a sentence. Threads: no state of its own; any thread, one object at a time. */
#ifndef UCM_BACKEND_WIRE_H
#define UCM_BACKEND_WIRE_H

#include "proto/errors.h"

#include <msgpack.h>
#include <stdbool.h>
#include <stdint.h>

#define WIRE_VERSION 1u
#define WIRE_PACKET_BYTES 65536u
#define WIRE_KEY_BYTES 128u /* of a key, prefix or file's name */
#define WIRE_NAME_BYTES 63u /* of what a backend or root is called */
#define WIRE_REASON_BYTES 120u
#define WIRE_SPAN_ALIGN 4096u
#define WIRE_FD 3 /* what the process finds the socket as */

enum wire_verb {
    WIRE_FIND,
    WIRE_READ,
    WIRE_WRITE,
    WIRE_REMOVE,
    WIRE_TOUCH,
    WIRE_LIST,
    WIRE_CHECK,
    WIRE_VERBS
};

enum wire_status {
    WIRE_OK,
    WIRE_MORE,
    WIRE_MISSING,
    WIRE_EXISTS,
    WIRE_OTHER,
    WIRE_ABSENT,
    WIRE_FULL,
    WIRE_READ_ONLY,
    WIRE_DENIED,
    WIRE_UNREACHABLE,
    WIRE_TIMEOUT,
    WIRE_FAILED,
    WIRE_STATUSES
};

extern const char *const wire_verbs[WIRE_VERBS], *const wire_statuses[WIRE_STATUSES];

/* Texts of these are NUL-terminated copies. */
struct wire_hello {
    uint64_t version_min, version_max, buffer, depth;
    char root[WIRE_NAME_BYTES + 1];
    char host[WIRE_NAME_BYTES + 1];
    bool read_only;
};
struct wire_hello_answer {
    char name[WIRE_NAME_BYTES + 1];
    uint64_t version, depth;
    bool touch, list;
};
struct wire_request {
    uint64_t id, ms, offset, bytes;
    enum wire_verb verb;
    char key[WIRE_KEY_BYTES + 1]; /* of WIRE_LIST: the prefix */
    char temp[WIRE_KEY_BYTES + 1];
    bool sync;
};
struct wire_answer {
    uint64_t id, bytes, mtime_ns, now_ns, unread;
    enum wire_status status;
    bool has_bytes, has_now;
    char reason[WIRE_REASON_BYTES + 1];
    const msgpack_object_array *files; /* of the packet; NULL: none */
};
struct wire_file {
    char name[WIRE_KEY_BYTES + 1];
    uint64_t bytes, mtime_ns;
};

/* ---- writing ---- */

/* One packet that is being made. */
struct wire_packet {
    uint8_t bytes[WIRE_PACKET_BYTES];
    size_t n;
    uint32_t messages;
    bool full; /* what was added last did not fit */
};

void wire_begin(struct wire_packet *p);
/* Each adds one message. False: it does not fit, and the packet is as before. */
bool wire_add_hello(struct wire_packet *p, const struct wire_hello *h);
bool wire_add_hello_answer(struct wire_packet *p, const struct wire_hello_answer *h);
bool wire_add_request(struct wire_packet *p, const struct wire_request *r);
/* files: n of them, for an answer to WIRE_LIST; a->files is not looked at. */
bool wire_add_answer(struct wire_packet *p, const struct wire_answer *a,
                     const struct wire_file *files, uint32_t n);
/* Makes it whole; it has a message at least. Returns its length. */
size_t wire_end(struct wire_packet *p);

/* ---- reading ---- */

struct wire_reader {
    msgpack_unpacked unpacked;
    uint32_t at; /* the message that is next */
};

/* 0: the caller closes it. The packet must stay where it is until then. Else -code with *e, and
 * nothing is held. */
int wire_open(struct wire_reader *r, const uint8_t *packet, size_t n, struct ucm_error *e);
void wire_close(struct wire_reader *r);
/* Is there another message? */
bool wire_more(const struct wire_reader *r);
/* The next message as this one. 0 or -code with *e; *out is undefined then. */
int wire_take_hello(struct wire_reader *r, struct wire_hello *out, struct ucm_error *e);
int wire_take_hello_answer(struct wire_reader *r, struct wire_hello_answer *out,
                           struct ucm_error *e);
int wire_take_request(struct wire_reader *r, struct wire_request *out, struct ucm_error *e);
int wire_take_answer(struct wire_reader *r, struct wire_answer *out, struct ucm_error *e);
/* Entry i of an answer's files. */
int wire_file_at(const struct wire_answer *a, uint32_t i, struct wire_file *out,
                 struct ucm_error *e);

#endif
