#include "proto/proto.h"

#include <assert.h>

/* msgpack-c gives up at 32 containers inside one another; a frame that passed must never get there.
 */
static_assert(UCM_MAX_DEPTH < 32, "deeper than msgpack-c unpacks");

uint32_t proto_frame_length(const uint8_t header[PROTO_HEADER_BYTES])
{
    return (uint32_t)header[0] << 24 | (uint32_t)header[1] << 16 | (uint32_t)header[2] << 8 |
           (uint32_t)header[3];
}

enum shape {
    SHAPE_REFUSED,
    SHAPE_SCALAR, /* `bytes` of payload */
    SHAPE_EXT,
    SHAPE_BYTES, /* a big-endian length of `bytes`, and so many bytes */
    SHAPE_ARRAY, /* a big-endian count of `bytes`, and so many values */
    SHAPE_MAP,   /* a big-endian count of `bytes`, and twice so many values */
};

/* First bytes 0xc0 to 0xdf, in order, as the MessagePack specification lists them. */
static const struct {
    uint8_t shape, bytes;
} shapes[32] = {
    {SHAPE_SCALAR, 0}, {SHAPE_REFUSED, 0}, {SHAPE_SCALAR, 0}, {SHAPE_SCALAR, 0}, /* nil, -, bools */
    {SHAPE_BYTES, 1},  {SHAPE_BYTES, 2},   {SHAPE_BYTES, 4},                     /* bin */
    {SHAPE_EXT, 0},    {SHAPE_EXT, 0},     {SHAPE_EXT, 0},                       /* ext */
    {SHAPE_SCALAR, 4}, {SHAPE_SCALAR, 8},                                        /* floats */
    {SHAPE_SCALAR, 1}, {SHAPE_SCALAR, 2},  {SHAPE_SCALAR, 4}, {SHAPE_SCALAR, 8}, /* uint */
    {SHAPE_SCALAR, 1}, {SHAPE_SCALAR, 2},  {SHAPE_SCALAR, 4}, {SHAPE_SCALAR, 8}, /* int */
    {SHAPE_EXT, 0},    {SHAPE_EXT, 0},     {SHAPE_EXT, 0},    {SHAPE_EXT, 0},    /* fixext */
    {SHAPE_EXT, 0},                                                              /* fixext 16 */
    {SHAPE_BYTES, 1},  {SHAPE_BYTES, 2},   {SHAPE_BYTES, 4},                     /* str */
    {SHAPE_ARRAY, 2},  {SHAPE_ARRAY, 4},   {SHAPE_MAP, 2},    {SHAPE_MAP, 4},
};

/* One value's own bytes, and how many values follow inside it. */
struct token {
    uint64_t bytes, children;
    bool container;
};

static int refuse(struct ucm_error *e, size_t at, const char *what)
{
    return ucm_error_set(e, UCM_WIRE_INVALID, "the frame %s at byte %zu of its body", what, at);
}

static void token_of_count(struct token *t, enum shape shape, uint64_t head, uint64_t count)
{
    t->container = shape != SHAPE_BYTES;
    t->bytes = shape == SHAPE_BYTES ? head + count : head;
    t->children = shape == SHAPE_BYTES ? 0 : shape == SHAPE_MAP ? 2 * count : count;
}

/* p[0..left), left >= 1. */
static int token_read(struct token *t, const uint8_t *p, size_t left, size_t at,
                      struct ucm_error *e)
{
    uint8_t first = p[0];
    unsigned bytes;
    uint64_t count = 0;
    enum shape shape;

    *t = (struct token){.bytes = 1};
    if (first < 0x80 || first >= 0xe0)
        return 0;
    if (first < 0xc0) {
        shape = first < 0x90 ? SHAPE_MAP : first < 0xa0 ? SHAPE_ARRAY : SHAPE_BYTES;
        token_of_count(t, shape, 1, shape == SHAPE_BYTES ? first & 0x1f : first & 0x0f);
        return 0;
    }
    shape = shapes[first - 0xc0].shape;
    bytes = shapes[first - 0xc0].bytes;
    if (shape == SHAPE_REFUSED)
        return refuse(e, at, "has 0xc1, which MessagePack never uses,");
    if (shape == SHAPE_EXT)
        return refuse(e, at, "has an extension type, which this protocol does not use,");
    t->bytes += bytes;
    if (shape == SHAPE_SCALAR)
        return 0;
    if (t->bytes > left)
        return refuse(e, at, "ends inside a value");
    for (unsigned i = 1; i <= bytes; i++)
        count = count << 8 | p[i];
    token_of_count(t, shape, t->bytes, count);
    return 0;
}

/* Every value takes a byte at least, so a count beyond the bytes that are left is false; refused here,
 * it does not make msgpack-c allocate. */
static int walk(const uint8_t *body, size_t n, uint32_t *elements, struct ucm_error *e)
{
    uint64_t wanted[UCM_MAX_DEPTH + 1] = {1}; /* values still to come, by depth */
    unsigned depth = 0;
    uint32_t seen = 0;
    size_t at = 0;
    struct token t;
    int rc;

    for (;;) {
        while (wanted[depth] == 0 && depth > 0)
            depth--;
        if (wanted[depth] == 0)
            break;
        if (at == n)
            return refuse(e, at, "ends before its value is whole,");
        wanted[depth]--;
        if (++seen > UCM_MAX_ELEMENTS)
            return ucm_error_set(e, UCM_WIRE_INVALID,
                                 "the frame has more than %d MessagePack values; send less at once",
                                 UCM_MAX_ELEMENTS);
        rc = token_read(&t, body + at, n - at, at, e);
        if (rc)
            return rc;
        if (t.bytes > n - at || t.children > n - at - t.bytes)
            return ucm_error_set(
                e, UCM_WIRE_INVALID,
                "the value at byte %zu of the frame's body claims more than the %zu "
                "bytes that are left",
                at, n - at);
        at += t.bytes;
        if (!t.container)
            continue;
        if (depth == UCM_MAX_DEPTH)
            return ucm_error_set(
                e, UCM_WIRE_INVALID,
                "the frame nests more than %d arrays and maps, at byte %zu of its body",
                UCM_MAX_DEPTH, at);
        wanted[++depth] = t.children;
    }
    if (at != n)
        return ucm_error_set(
            e, UCM_WIRE_INVALID,
            "the frame's value ends at byte %zu of %zu; one frame holds exactly one value", at, n);
    *elements = seen;
    return 0;
}

int proto_frame_check(const uint8_t *body, size_t n, uint32_t *elements, struct ucm_error *e)
{
    if (n == 0 || n > UCM_MAX_FRAME_BYTES)
        return ucm_error_set(e, UCM_WIRE_INVALID,
                             "the frame's body has %zu bytes; it must have 1 to %u", n,
                             UCM_MAX_FRAME_BYTES);
    return walk(body, n, elements, e);
}
