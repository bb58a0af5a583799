#include "proto/tables.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

void proto_where_prefix(const struct proto_where *where, char *out, size_t room)
{
    if (where->outer)
        snprintf(out, room, "%s[%" PRIu32 "].", where->outer, where->index);
    else
        out[0] = '\0';
}

/* "16 to 32" or "exactly 64" */
static void range_text(const struct proto_field *f, char *out, size_t room)
{
    if (f->min == f->max)
        snprintf(out, room, "exactly %" PRIu64, f->min);
    else
        snprintf(out, room, "%" PRIu64 " to %" PRIu64, f->min, f->max);
}

static void right_text(const struct proto_field *f, char *out, size_t room)
{
    char range[48];

    range_text(f, range, sizeof(range));
    switch ((enum proto_kind)f->kind) {
    case PROTO_KIND_u64:
        snprintf(out, room, "an unsigned integer, %s", range);
        break;
    case PROTO_KIND_str:
        snprintf(out, room, "text (MessagePack str, UTF-8) of %s bytes", range);
        break;
    case PROTO_KIND_bin:
        snprintf(out, room, "binary (MessagePack bin) of %s bytes", range);
        break;
    case PROTO_KIND_flag:
        snprintf(out, room, "true or false");
        break;
    case PROTO_KIND_u32s:
        snprintf(out, room, "an array of %s unsigned integers below 2^32", range);
        break;
    case PROTO_KIND_handles:
    case PROTO_KIND_planes:
        snprintf(out, room, "an array of %s maps", range);
        break;
    }
}

int proto_refuse(const struct proto_field *f, const struct proto_where *where, const char *wrong,
                 ...)
{
    char prefix[32], what[96], right[96];
    va_list args;

    proto_where_prefix(where, prefix, sizeof(prefix));
    right_text(f, right, sizeof(right));
    va_start(args, wrong);
    vsnprintf(what, sizeof(what), wrong, args);
    va_end(args);
    return ucm_error_set(where->e, UCM_WIRE_INVALID, "field \"%s%s\" %s; it must be %s%s", prefix,
                         f->name, what, right, f->required ? "" : ", or be left out");
}

static int amount_refuse(const struct proto_field *f, uint64_t amount,
                         const struct proto_where *where)
{
    switch ((enum proto_kind)f->kind) {
    case PROTO_KIND_u64:
    case PROTO_KIND_flag:
        return proto_refuse(f, where, "is %" PRIu64, amount);
    case PROTO_KIND_str:
    case PROTO_KIND_bin:
        return proto_refuse(f, where, "has %" PRIu64 " bytes", amount);
    case PROTO_KIND_u32s:
    case PROTO_KIND_handles:
    case PROTO_KIND_planes:
        break;
    }
    return proto_refuse(f, where, "has %" PRIu64 " entries", amount);
}

int proto_check_amount(const struct proto_field *f, uint64_t amount,
                       const struct proto_where *where)
{
    if (f->kind != PROTO_KIND_flag && (amount < f->min || amount > f->max))
        return amount_refuse(f, amount, where);
    return 0;
}

/* Length of the UTF-8 character at p, and itself in *c; 0 when there is none: a stray or missing
 * continuation, a longer form than needed, a surrogate, past U+10FFFF. */
static uint32_t utf8_next(const uint8_t *p, uint32_t n, uint32_t *c)
{
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t bytes = p[0] < 0x80 ? 1 : p[0] < 0xc0 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;

    if (bytes == 0 || bytes > n || p[0] >= 0xf8)
        return 0;
    *c = bytes == 1 ? p[0] : p[0] & (0xffu >> (bytes + 1));
    for (uint32_t i = 1; i < bytes; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        *c = *c << 6 | (p[i] & 0x3f);
    }
    if (*c < smallest[bytes] || *c > 0x10ffff || (*c >= 0xd800 && *c <= 0xdfff))
        return 0;
    return bytes;
}

int proto_check_text(const struct proto_field *f, const char *p, uint32_t n,
                     const struct proto_where *where)
{
    uint32_t c = 0, bytes;

    for (uint32_t i = 0; i < n; i += bytes) {
        bytes = utf8_next((const uint8_t *)p + i, n - i, &c);
        if (bytes == 0)
            return proto_refuse(f, where, "is not UTF-8 at byte %" PRIu32, i);
        if (c < 0x20 || (c >= 0x7f && c < 0xa0))
            return proto_refuse(f, where,
                                "has the control character U+%04" PRIX32 " at byte %" PRIu32, c, i);
    }
    return 0;
}
