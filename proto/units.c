#include "proto/units.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"TiB", 1ull << 40}, {"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}, {"B", 1},
    {NULL, 0},
};
static const struct unit duration_units[] = {
    {"h", 3600000}, {"min", 60000}, {"s", 1000}, {"ms", 1}, {NULL, 0},
};

static int refuse(char why[UNITS_WHY_BYTES], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static int refuse(char why[UNITS_WHY_BYTES], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, UNITS_WHY_BYTES, format, args);
    va_end(args);
    return -EINVAL;
}

/* Digits at the front of text, at least one; *end is what follows. */
static bool digits(const char *text, uint64_t *value, const char **end)
{
    uint64_t v = 0;

    if (!isdigit((unsigned char)*text))
        return false;
    for (; isdigit((unsigned char)*text); text++)
        if (__builtin_mul_overflow(v, 10, &v) ||
            __builtin_add_overflow(v, (uint64_t)(*text - '0'), &v))
            return false;
    *value = v;
    *end = text;
    return true;
}

/* n and the unit that follows it in text. -ENOENT: it is none of the units. */
static int multiply(const struct unit *units, const char *text, uint64_t n, const char *unit,
                    uint64_t *out, char why[UNITS_WHY_BYTES])
{
    for (; units->name; units++) {
        if (strcmp(unit, units->name) != 0)
            continue;
        return __builtin_mul_overflow(n, units->factor, out)
                   ? refuse(why, "\"%.40s\" is too large", text)
                   : 0;
    }
    return -ENOENT;
}

int units_parse_size(const char *text, uint64_t *bytes, char why[UNITS_WHY_BYTES])
{
    const char *unit;
    uint64_t n;
    int rc = -ENOENT;

    if (digits(text, &n, &unit)) {
        rc = multiply(size_units, text, n, *unit ? unit : "B", bytes, why);
        if (rc == -ENOENT && strchr("kKmMgGtT", *unit) &&
            (unit[1] == '\0' || !strcasecmp(unit + 1, "b") || !strcasecmp(unit + 1, "ib")))
            return refuse(why, "\"%.40s\" may mean powers of 1000 or of 1024; write %llu%ciB", text,
                          (unsigned long long)n, toupper((unsigned char)*unit));
    }
    if (rc == -ENOENT)
        return refuse(why,
                      "\"%.40s\" is not a size; write a whole number with B, KiB, MiB, GiB or TiB, "
                      "e.g. 4GiB",
                      text);
    return rc;
}

int units_parse_duration(const char *text, uint64_t *ms, char why[UNITS_WHY_BYTES])
{
    const char *unit;
    uint64_t n;
    int rc = -ENOENT;

    if (digits(text, &n, &unit)) {
        if (*unit == '\0' && n != 0)
            return refuse(why, "\"%.40s\" has no unit; write ms, s, min or h after the number",
                          text);
        if (strcmp(unit, "m") == 0)
            return refuse(why,
                          "\"%.40s\" may mean minutes or milliseconds; write %llumin or %llums",
                          text, (unsigned long long)n, (unsigned long long)n);
        rc = multiply(duration_units, text, n, *unit ? unit : "ms", ms, why);
    }
    if (rc == -ENOENT)
        return refuse(why,
                      "\"%.40s\" is not a duration; write a whole number with ms, s, min or h, "
                      "e.g. 30s",
                      text);
    return rc;
}

int units_parse_count(const char *text, uint64_t *value, char why[UNITS_WHY_BYTES])
{
    const char *end;

    if (!digits(text, value, &end) || *end != '\0')
        return refuse(why, "\"%.40s\" is not a whole number", text);
    return 0;
}

static char *with_unit(const struct unit *units, char buf[UNITS_TEXT_BYTES], uint64_t value)
{
    while (units[1].name && (value % units->factor != 0 || value == 0))
        units++;
    snprintf(buf, UNITS_TEXT_BYTES, "%llu%s", (unsigned long long)(value / units->factor),
             units->name);
    return buf;
}

char *units_size_text(char buf[UNITS_TEXT_BYTES], uint64_t bytes)
{
    return with_unit(size_units, buf, bytes);
}

char *units_duration_text(char buf[UNITS_TEXT_BYTES], uint64_t ms)
{
    return with_unit(duration_units, buf, ms);
}
