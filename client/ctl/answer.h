/* The daemon's free-form results (stats, ls, ...): calling a method and reading the map that comes
 * back. Used by ucmctl, ucm-bench and the demo, on top of ucm_call.
 *
 * Promise: a field that is absent or of another type reads as its fallback, so that an older daemon
 * is no error; text is made safe for a terminal (a model's name is another's to choose).
 * Threads: no state of its own; any thread, one object at a time. */
#ifndef UCM_CTL_ANSWER_H
#define UCM_CTL_ANSWER_H

#include "client/include/ucmclient.h"

#include <cjson/cJSON.h>
#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As ucm_connect, but a daemon that is not there is told at once: the library waits for one that
 * may be starting, which a person at a prompt does not want. */
int answer_connect(const struct ucm_options *options, int timeout_ms, struct ucm_client **out);

/* Owned by the caller from a call that succeeded until answer_close. */
struct answer {
    uint8_t *bytes;
    msgpack_unpacked unpacked;
    const msgpack_object *root; /* a map */
};

/* params: a packed map, or NULL. 0 or a negative enum ucm_status; ucm_errmsg() has the sentence,
 * but for -UCM_EPROTOCOL, when the result is no map. */
int answer_call(struct ucm_client *client, const char *method, const msgpack_sbuffer *params,
                int timeout_ms, struct answer *out);
void answer_close(struct answer *a);

/* One page of namespace.list, ls or verify: asks for `limit` (0: the daemon's choice) from *cursor
 * on (0: the start), of namespace ns when that is not 0, and leaves the next page's cursor, 0 at
 * the end. As answer_call; -UCM_EPROTOCOL too when a page points to itself. */
int answer_page(struct ucm_client *client, const char *method, uint32_t ns, uint64_t limit,
                uint64_t *cursor, int timeout_ms, struct answer *out);

/* NULL when map is NULL, no map or without this field. */
const msgpack_object *answer_get(const msgpack_object *map, const char *field);
/* The i-th element of a field that is an array; NULL past its end. */
const msgpack_object *answer_at(const msgpack_object *map, const char *field, uint32_t i);
uint32_t answer_count(const msgpack_object *map, const char *field); /* 0 when it is no array */
uint64_t answer_u64(const msgpack_object *map, const char *field);   /* fallback 0 */
bool answer_flag(const msgpack_object *map, const char *field);      /* fallback false */
/* Text as it is, binary as hex, cut to fit; fallback "". Returns buf. */
const char *answer_text(const msgpack_object *map, const char *field, char *buf, size_t n);
/* The object itself as text, by the same rules. */
const char *answer_object_text(const msgpack_object *o, char *buf, size_t n);
/* Whole numbers stay exact, binary becomes hex. NULL without memory; owned by the caller. */
cJSON *answer_json(const msgpack_object *o);
/* A whole number in JSON, exact beyond 2^53 too. */
cJSON *answer_json_u64(uint64_t v);

/* Params: begin a map of n fields in *buf, then fields. */
void answer_map(msgpack_packer *pk, msgpack_sbuffer *buf, size_t n);
void answer_put_u64(msgpack_packer *pk, const char *field, uint64_t v);
void answer_put_bin(msgpack_packer *pk, const char *field, const void *p, size_t n);

#endif
