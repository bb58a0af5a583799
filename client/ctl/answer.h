/* Calls a method by ucm_call and reads the map in its result. For ucmctl, ucm-bench and the demo.
 *
 * Promises: a field that is absent or of another type reads as its fallback, so results of an older
 * daemon are no error. Text is safe to print on a terminal: names are chosen by others.
 * Threads: any, but an answer belongs to one at a time. */
#ifndef UCM_CTL_ANSWER_H
#define UCM_CTL_ANSWER_H

#include "client/include/ucmclient.h"
#include "proto/messages.h"

#include <cjson/cJSON.h>
#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As ucm_connect, but fails within 0.1 s when no daemon listens. The library waits for a daemon
 * that may be starting; a person at a prompt does not want that. */
int answer_connect(const struct ucm_options *options, int timeout_ms, struct ucm_client **out);

/* The caller owns it from a successful call until answer_close. */
struct answer {
    uint8_t *bytes;
    msgpack_unpacked unpacked;
    const msgpack_object *root; /* a map */
};

/* params: the message that proto/messages.h names for the method; NULL where that is none. 0 or a
 * negative enum ucm_status with its sentence in ucm_errmsg(). -UCM_EPROTOCOL: the params pass the
 * message's bounds, or the result is no map; this sets no sentence. */
int answer_call(struct ucm_client *client, enum ucm_method method, const void *params,
                int timeout_ms, struct answer *out);
void answer_close(struct answer *a);

/* Gets one page of namespace.list, ls or verify: at most `limit` items (0: the daemon chooses) from
 * *cursor on (0: the start), of namespace ns unless that is 0. *cursor becomes the next page's, 0
 * at the end. Returns as answer_call; also -UCM_EPROTOCOL if a page points to itself. */
int answer_page(struct ucm_client *client, enum ucm_method method, uint32_t ns, uint64_t limit,
                uint64_t *cursor, int timeout_ms, struct answer *out);

/* NULL if map is NULL or no map, or has no such field. */
const msgpack_object *answer_get(const msgpack_object *map, const char *field);
/* The i-th element of a field that is an array; NULL past its end. */
const msgpack_object *answer_at(const msgpack_object *map, const char *field, uint32_t i);
uint32_t answer_count(const msgpack_object *map, const char *field); /* 0 when it is no array */
uint64_t answer_u64(const msgpack_object *map, const char *field);   /* fallback 0 */
bool answer_flag(const msgpack_object *map, const char *field);      /* fallback false */
/* Text as it is and binary in hex, cut to fit; fallback "". Returns buf. */
const char *answer_text(const msgpack_object *map, const char *field, char *buf, size_t n);
/* What DRAM the cache may take, by the metrics: while the daemon takes it (arena_bytes_total), after a start, the figure
 * that it is on its way to. */
static inline uint64_t dram_bytes(uint64_t total, uint64_t configured)
{
    return total < configured ? configured : total; /* configured is 0 if the answer lacks it */
}
/* A result of `stats`, as exposition_write takes it. Skips unknown fields; missing ones are 0. */
struct exposition;
void answer_exposition(const msgpack_object *stats, struct exposition *x);
/* The object itself as text, by the same rules. */
const char *answer_object_text(const msgpack_object *o, char *buf, size_t n);
/* Whole numbers stay exact, binary becomes hex. NULL without memory; owned by the caller. */
cJSON *answer_json(const msgpack_object *o);
/* A whole number in JSON, exact beyond 2^53 too. */
cJSON *answer_json_u64(uint64_t v);

#endif
