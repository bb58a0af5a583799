/* A sample of every message of the wire, with every field set as its table allows it, and the frame
 * that it makes. The round trips and the seeds in tests/fuzz/corpus/proto/ are made from these. */
#ifndef UCM_TESTS_PROTO_SAMPLES_H
#define UCM_TESTS_PROTO_SAMPLES_H

#include "proto/tables.h"

#include <criterion/criterion.h>
#include <stddef.h>
#include <string.h>

static const struct proto_message *const proto_messages[] = {
#define S(suffix, list) &proto_##suffix,
    UCM_MESSAGES(S)
#undef S
        & proto_none,
};
#define N_PROTO_MESSAGES (sizeof(proto_messages) / sizeof(proto_messages[0]))

#define SAMPLE_ENTRIES 2u /* of an array */

static inline void sample_fill(const struct proto_message *m, void *out, unsigned salt);

static inline uint64_t sample_clamp(const struct proto_field *f, uint64_t v)
{
    return v < f->min ? f->min : v > f->max ? f->max : v;
}

/* How many entries or bytes a sample's array or text has. */
static inline struct proto_view sample_view(const struct proto_field *f, unsigned salt)
{
    static uint32_t numbers[SAMPLE_ENTRIES + 1];
    static union {
        struct msg_handle handle;
        struct msg_plane plane;
    } entries[2][SAMPLE_ENTRIES];
    static char text[2 * UCM_MAX_KEY_BYTES + 26];
    const struct proto_message *m;
    uint8_t *to;

    for (unsigned i = 0; i < SAMPLE_ENTRIES + 1; i++)
        numbers[i] = 1u << 11 * i;
    for (unsigned i = 0; i < sizeof(text); i++)
        text[i] = (char)('a' + i % 26);
    if (f->kind == PROTO_KIND_u32s)
        return (struct proto_view){numbers, (uint32_t)sample_clamp(f, SAMPLE_ENTRIES)};
    if (f->kind == PROTO_KIND_str || f->kind == PROTO_KIND_bin)
        return (struct proto_view){text + salt % 26, (uint32_t)sample_clamp(f, 12)};
    m = proto_entry_message((enum proto_kind)f->kind);
    to = (uint8_t *)entries[f->kind == PROTO_KIND_planes];
    for (unsigned i = 0; i < SAMPLE_ENTRIES; i++)
        sample_fill(m, to + i * m->bytes, i);
    return (struct proto_view){to, SAMPLE_ENTRIES};
}

static inline void sample_fill(const struct proto_message *m, void *out, unsigned salt)
{
    for (uint32_t i = 0; i < m->n_fields; i++, salt++) {
        const struct proto_field *f = &m->fields[i];
        uint8_t *at = (uint8_t *)out + f->offset;
        /* Numbers of each length that MessagePack has, no two alike. */
        uint64_t number = sample_clamp(f, f->min + (UINT64_C(1) << 5 * salt % 64));
        double real = (double)f->min + (double)(f->max - f->min) * 0.25;
        struct proto_view view;

        switch ((enum proto_kind)f->kind) {
        case PROTO_KIND_u64:
            memcpy(at, &number, sizeof(number));
            break;
        case PROTO_KIND_f64:
            memcpy(at, &real, sizeof(real));
            break;
        case PROTO_KIND_flag:
            memcpy(at, &(bool){true}, sizeof(bool));
            break;
        case PROTO_KIND_str:
        case PROTO_KIND_bin:
        case PROTO_KIND_u32s:
        case PROTO_KIND_handles:
        case PROTO_KIND_planes:
            view = sample_view(f, salt);
            memcpy(at, &view, sizeof(view));
            break;
        }
    }
}

/* A sample of the message's struct; NULL: it has none. */
static inline const void *sample_of(const struct proto_message *m)
{
    static union proto_any values[N_PROTO_MESSAGES];

    for (unsigned i = 0; i < N_PROTO_MESSAGES; i++)
        if (proto_messages[i] == m && m->bytes > 0) {
            sample_fill(m, &values[i], i);
            return &values[i];
        }
    return NULL;
}

/* A free map as `health` answers it. */
static inline int sample_health(struct proto_buf *b, uint32_t msgid, struct ucm_error *e)
{
    struct proto_builder pb;

    proto_response_begin(&pb, b, msgid);
    msgpack_pack_map(&pb.pk, 2);
    proto_pack_str(&pb.pk, "status");
    proto_pack_str(&pb.pk, "degraded");
    proto_pack_str(&pb.pk, "reasons");
    msgpack_pack_array(&pb.pk, 1);
    proto_pack_str(&pb.pk, "nvme: the file system is read-only");
    return proto_frame_end(&pb, e);
}

static inline int sample_request(struct proto_buf *b, enum ucm_method method, uint32_t msgid,
                                 struct ucm_error *e)
{
    const struct proto_message *m = proto_methods[method].params;

    return proto_request(b, msgid, method, m, sample_of(m), e);
}

static inline int sample_response(struct proto_buf *b, enum ucm_method method, uint32_t msgid,
                                  struct ucm_error *e)
{
    const struct proto_message *m = proto_methods[method].result;

    if (m == &proto_free_map)
        return sample_health(b, msgid, e);
    return proto_response(b, msgid, m, sample_of(m), e);
}

#endif
