/* What is wrong with a configuration, and where. */
#include "daemon/config/table.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define PATH_TAIL 120 /* of a long path the end says more */

static int refuse(struct config_error *e, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));

static int refuse(struct config_error *e, const char *format, va_list args)
{
    size_t length = e->file ? strlen(e->file) : 0,
           skip = length > PATH_TAIL ? length - PATH_TAIL : 0;
    size_t size = sizeof(e->text), n = 0;
    char variable[CONFIG_VARIABLE_BYTES];

    if (e->line == CONFIG_LINE_SET)
        n = (size_t)snprintf(e->text, size, "--set: ");
    else if (e->line == CONFIG_LINE_ENV && e->key)
        n = (size_t)snprintf(e->text, size, "%s: ", config_variable(e->key, variable));
    else if (e->line == CONFIG_LINE_ENV)
        n = 0; /* the sentence names it */
    else if (e->line == CONFIG_LINE_EARLIER && length > 0)
        n = (size_t)snprintf(e->text, size, "%s%s: ", skip ? "..." : "", e->file + skip);
    else if (length > 0 && e->line > 0)
        n = (size_t)snprintf(e->text, size, "%s%s:%u: ", skip ? "..." : "", e->file + skip,
                             e->line);
    else if (length > 0)
        n = (size_t)snprintf(e->text, size, "%s%s: ", skip ? "..." : "", e->file + skip);
    e->sentence = (uint32_t)n;
    vsnprintf(e->text + n, size - n, format, args);
    return -EINVAL;
}

int config_refuse(struct config_error *e, const char *format, ...)
{
    va_list args;
    int rc;

    va_start(args, format);
    rc = refuse(e, format, args);
    va_end(args);
    return rc;
}

int config_no_memory(struct config_error *e)
{
    config_refuse(e, "memory ran out");
    return -ENOMEM;
}

int config_unknown(struct config_error *e, const char *name)
{
    const char *near = config_key_nearest(name);

    if (near && strcmp(near, name) == 0)
        return config_refuse(e, "\"%s\" is a section; set one of its keys", name);
    if (near)
        return config_refuse(e, "unknown key \"%s\"; did you mean \"%s\"?", name, near);
    return config_refuse(e, "unknown key \"%s\"; the ucmd.yaml that ships lists all keys", name);
}

/* A default has no line, so only the file is named. */
void config_locate(const struct config *c, struct config_error *e, const char *key)
{
    const struct config_key *k = config_key_find(key);

    assert(k);
    e->file = c->origin.file;
    e->key = k->name;
    e->line = c->origin.line[config_key_index(k)];
}

int config_fail(const struct config *c, struct config_error *e, const char *key, const char *format,
                ...)
{
    va_list args;
    int rc;

    config_locate(c, e, key);
    va_start(args, format);
    rc = refuse(e, format, args);
    va_end(args);
    return rc;
}
