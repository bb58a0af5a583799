/* For the tests of messages: a message encoded, and opened from a frame that a test may damage. */
#ifndef UCM_TESTS_UNIT_PROTO_RIG_H
#define UCM_TESTS_UNIT_PROTO_RIG_H

#include "proto/proto.h"
#include "proto/tables.h"
#include "tests/unit/proto/proto_samples.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT (4u << 20)

/* A message opened from a frame of its own, so that a test may damage it before it is decoded. */
struct opened {
    struct proto_buf buf;
    struct proto_envelope env;
};

static inline const uint8_t *body_of(const struct proto_buf *b)
{
    return b->p + PROTO_HEADER_BYTES;
}

static inline void open_message(struct opened *o, const struct proto_message *m, const void *value)
{
    struct ucm_error e = {0};
    bool answerable;

    proto_buf_init(&o->buf, LIMIT);
    cr_assert_eq(proto_response(&o->buf, 7, m, value, &e), 0, "%s: %s", m->name, e.text);
    cr_assert_eq(proto_frame_length(o->buf.p), o->buf.n - PROTO_HEADER_BYTES);
    cr_assert_eq(proto_envelope_open(&o->env, body_of(&o->buf), o->buf.n - PROTO_HEADER_BYTES,
                                     &answerable, &e),
                 0, "%s: %s", m->name, e.text);
}

static inline void open_sample(struct opened *o, const struct proto_message *m)
{
    open_message(o, m, sample_of(m));
}

static inline void decode_message(struct opened *o, const struct proto_message *m, void *out)
{
    struct ucm_error e = {0};

    cr_assert_eq(proto_decode(m, &o->env, out, &e), 0, "%s: %s", m->name, e.text);
}

static inline void close_message(struct opened *o)
{
    proto_envelope_close(&o->env);
    proto_buf_free(&o->buf);
}

static inline struct proto_view view_at(const void *message, const struct proto_field *f)
{
    struct proto_view v;

    memcpy(&v, (const uint8_t *)message + f->offset, sizeof(v));
    return v;
}

#endif
