#include "proto/errors.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

struct error_entry {
    int code;
    const char *name, *sentence;
};

static const struct error_entry entries[] = {
#define X(name, code, sentence) {code, #name, sentence},
    UCM_ERRORS(X)
#undef X
};

static const struct error_entry *entry_find(int code)
{
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++)
        if (entries[i].code == code)
            return &entries[i];
    return NULL;
}

/* The text travels as a MessagePack str, so a cut must not leave half a UTF-8 character at the
 * end. */
static void cut_whole(char *text, size_t n)
{
    while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
        n--;
    text[n] = '\0';
}

int ucm_error_set(struct ucm_error *e, int code, const char *format, ...)
{
    /* One longer, so that the first byte which does not fit can be looked at; and apart from *e,
     * whose text may be among the arguments. */
    char text[sizeof(e->text) + 1];
    va_list args;
    int n;

    if (!e)
        return -code;
    va_start(args, format);
    n = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (n < 0)
        snprintf(text, sizeof(text), "%s", ucm_error_sentence(code));
    else if ((size_t)n >= sizeof(e->text))
        cut_whole(text, sizeof(e->text) - 1);
    e->code = code;
    memcpy(e->text, text, strlen(text) + 1);
    return -code;
}

const char *ucm_error_name(int code)
{
    const struct error_entry *entry = entry_find(code);

    return entry ? entry->name : "UNKNOWN";
}

const char *ucm_error_sentence(int code)
{
    const struct error_entry *entry = entry_find(code);

    return entry ? entry->sentence : "an error that this build does not know";
}
