#include "daemon/base/config.h"

#include "daemon/base/config_table.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_TAIL 120 /* of a long path the end tells more */

/* ---- errors ---- */

static int error_at(struct config_error *e, const char *file, uint32_t line, const char *format,
                    va_list args) __attribute__((format(printf, 4, 0)));

static int error_at(struct config_error *e, const char *file, uint32_t line, const char *format,
                    va_list args)
{
    size_t length = file ? strlen(file) : 0, skip = length > PATH_TAIL ? length - PATH_TAIL : 0;
    size_t size = sizeof(e->text), n = 0;

    if (line == CONFIG_LINE_SET)
        n = (size_t)snprintf(e->text, size, "--set: ");
    else if (length > 0 && line > 0)
        n = (size_t)snprintf(e->text, size, "%s%s:%u: ", skip ? "..." : "", file + skip, line);
    else if (length > 0)
        n = (size_t)snprintf(e->text, size, "%s%s: ", skip ? "..." : "", file + skip);
    vsnprintf(e->text + n, size - n, format, args);
    return -EINVAL;
}

int config_error_at(struct config_error *e, const char *file, uint32_t line, const char *format,
                    ...)
{
    va_list args;
    int rc;

    va_start(args, format);
    rc = error_at(e, file, line, format, args);
    va_end(args);
    return rc;
}

/* A default has no line, so only the file is named. */
int config_fail(const struct config *c, struct config_error *e, const char *key, const char *format,
                ...)
{
    const struct config_key *k = config_key_find(key);
    va_list args;
    int rc;

    assert(k);
    va_start(args, format);
    rc = error_at(e, c->origin.file, c->origin.line[config_key_place(k)], format, args);
    va_end(args);
    return rc;
}

/* What was in a file made by an earlier version stays harmless: it only says something where the
 * file asks for more than what holds now. */
int config_warn_retired(struct config *c, const struct config_retired *r, const char *at,
                        const char *text)
{
    char sentence[512];

    if (strcmp(text, r->value) == 0)
        return 0;
    snprintf(sentence, sizeof(sentence), "%.160s: %s is no key any more, and ignored: %s", at,
             r->name, r->instead);
    return config_list_add(&c->warnings, sentence);
}

int config_value_renew(struct config *c, const struct config_key *k, const char *at,
                       const char **text)
{
    const struct config_retired_value *r = config_retired_value_find(k->name, *text);
    char sentence[512];

    if (!r)
        return 0;
    *text = r->instead;
    snprintf(sentence, sizeof(sentence), "%.160s: %s: %s is no value any more, and taken for %s",
             at, r->key, r->text, r->instead);
    return config_list_add(&c->warnings, sentence);
}

/* ---- the whole ---- */

static int key_set(struct config *c, const struct config_key *k, const char *text,
                   char why[CONFIG_WHY_BYTES])
{
    struct config_list list;
    int rc;

    if (k->kind != CONFIG_LIST)
        return config_value_set(c, k, text, why);
    rc = config_list_split(&list, text);
    if (rc < 0) {
        config_refuse(why, "%s: memory ran out", k->name);
        return rc;
    }
    rc = config_list_set(c, k, &list, why);
    config_list_free(&list);
    return rc;
}

void config_init(struct config *c)
{
    char why[CONFIG_WHY_BYTES];

    *c = (struct config){0};
    for (size_t i = 0; i < config_key_count; i++) {
        int rc = key_set(c, &config_keys[i], config_keys[i].initial, why);

        assert(rc == 0 || rc == -ENOMEM);
        if (rc < 0)
            abort(); /* no memory, and nothing has begun */
    }
}

void config_free(struct config *c)
{
    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];

        if (k->kind == CONFIG_LIST)
            config_list_free(config_field(c, k));
        else if (k->kind == CONFIG_STRING || k->kind == CONFIG_PATH)
            free(*(char **)config_field(c, k));
    }
    config_list_free(&c->warnings);
    free(c->origin.file);
    *c = (struct config){0};
}

static int set_unknown(struct config *c, const char *name, const char *text, struct config_error *e)
{
    const struct config_retired *retired = config_retired_find(name);
    const char *near;

    if (retired && config_warn_retired(c, retired, "--set", text) < 0) {
        config_error_at(e, NULL, CONFIG_LINE_SET, "memory ran out");
        return -ENOMEM;
    }
    if (retired)
        return 0;
    near = config_key_nearest(name);
    return config_error_at(e, NULL, CONFIG_LINE_SET, "unknown key \"%s\"%s%s%s", name,
                           near ? "; did you mean \"" : "; the ucmd.yaml that ships lists all keys",
                           near ? near : "", near ? "\"?" : "");
}

int config_set(struct config *c, const char *assignment, struct config_error *e)
{
    const char *equals = strchr(assignment, '='), *text;
    const struct config_key *k;
    char name[64], why[CONFIG_WHY_BYTES];
    int rc;

    if (!equals || equals == assignment)
        return config_error_at(e, NULL, CONFIG_LINE_SET,
                               "\"%.80s\" is not an assignment; write key=value, "
                               "e.g. arena.size=4GiB",
                               assignment);
    snprintf(name, sizeof(name), "%.*s", (int)(equals - assignment < 63 ? equals - assignment : 63),
             assignment);
    k = config_key_find(name);
    if (!k)
        return set_unknown(c, name, equals + 1, e);
    text = equals + 1;
    if (config_value_renew(c, k, "--set", &text) < 0) {
        config_error_at(e, NULL, CONFIG_LINE_SET, "memory ran out");
        return -ENOMEM;
    }
    rc = key_set(c, k, text, why);
    if (rc < 0) {
        config_error_at(e, NULL, CONFIG_LINE_SET, "%s", why);
        return rc;
    }
    c->origin.line[config_key_place(k)] = CONFIG_LINE_SET;
    return 0;
}

int config_reload(struct config *c, const struct config *fresh, struct config_error *e)
{
    char text[CONFIG_TEXT_BYTES], why[CONFIG_WHY_BYTES];
    int differ = 0;

    for (size_t i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];

        if (config_value_equal(c, fresh, k) || c->origin.line[i] == CONFIG_LINE_SET)
            continue;
        if (k->reloadable) {
            assert(k->kind != CONFIG_LIST);
            /* Equal bounds on both sides: this can fail by want of memory only, for a string. */
            if (config_value_set(c, k, config_value_text(fresh, k, text), why) == 0)
                continue;
        }
        if (differ++ == 0)
            snprintf(e->text, sizeof(e->text), "%s differs; it takes effect at the next start",
                     k->name);
    }
    return differ;
}
