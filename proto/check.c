#include "proto/tables.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void proto_where_prefix(const struct proto_where *where, char *out, size_t size)
{
    if (where->outer)
        snprintf(out, size, "%s[%" PRIu32 "].", where->outer, where->index);
    else
        out[0] = '\0';
}

/* The words of an error about a field of each kind: before and after the range of what it may be, and
 * the unit of what it is. */
static const struct {
    const char *before, *after, *counted;
} kinds[] = {
    [PROTO_KIND_u64] = {"an unsigned integer, ", "", ""},
    [PROTO_KIND_str] = {"text (MessagePack str, UTF-8) of ", " bytes", " bytes"},
    [PROTO_KIND_bin] = {"binary (MessagePack bin) of ", " bytes", " bytes"},
    [PROTO_KIND_flag] = {"true or false", "", ""},
    [PROTO_KIND_f64] = {"a float, ", "", ""},
    [PROTO_KIND_u32s] = {"an array of ", " unsigned integers below 2^32", " entries"},
    [PROTO_KIND_handles] = {"an array of ", " maps", " entries"},
    [PROTO_KIND_planes] = {"an array of ", " maps", " entries"},
};

/* "16 to 32", "exactly 64" or "" */
static void range_text(const struct proto_field *f, char *out, size_t size)
{
    out[0] = '\0';
    if (f->kind == PROTO_KIND_flag)
        return;
    if (f->min == f->max)
        snprintf(out, size, "exactly %" PRIu64, f->min);
    else
        snprintf(out, size, "%" PRIu64 " to %" PRIu64, f->min, f->max);
}

int proto_refuse(const struct proto_field *f, const struct proto_where *where, const char *wrong,
                 ...)
{
    char prefix[32], what[96], range[48];
    va_list args;

    proto_where_prefix(where, prefix, sizeof(prefix));
    range_text(f, range, sizeof(range));
    va_start(args, wrong);
    vsnprintf(what, sizeof(what), wrong, args);
    va_end(args);
    return ucm_error_set(where->e, UCM_WIRE_INVALID, "field \"%s%s\" %s; it must be %s%s%s%s",
                         prefix, f->name, what, kinds[f->kind].before, range, kinds[f->kind].after,
                         f->required ? "" : ", or be left out");
}

int proto_check_amount(const struct proto_field *f, uint64_t amount,
                       const struct proto_where *where)
{
    if (f->kind == PROTO_KIND_flag || (amount >= f->min && amount <= f->max))
        return 0;
    return proto_refuse(f, where, "%s %" PRIu64 "%s", f->kind == PROTO_KIND_u64 ? "is" : "has",
                        amount, kinds[f->kind].counted);
}

int proto_check_real(const struct proto_field *f, double real, const struct proto_where *where)
{
    /* A NaN is in no range. */
    if (real >= (double)f->min && real <= (double)f->max)
        return 0;
    return proto_refuse(f, where, "is %g", real);
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

void proto_clean(char *text)
{
    uint32_t n = (uint32_t)strlen(text), c = 0, bytes;

    for (uint32_t i = 0; i < n; i += bytes) {
        bytes = utf8_next((const uint8_t *)text + i, n - i, &c);
        if (bytes > 0 && c >= 0x20 && (c < 0x7f || c >= 0xa0))
            continue;
        memset(text + i, '?', bytes ? bytes : 1);
        bytes += bytes == 0;
    }
}
