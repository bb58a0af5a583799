/* The table behind config.h: what each key is called, holds and means. For the config_*.c files
 * only. */
#ifndef UCMD_CONFIG_TABLE_H
#define UCMD_CONFIG_TABLE_H

#include "daemon/config/config.h"

enum config_kind {
    CONFIG_SIZE,     /* uint64_t bytes: 4096, 4096B, 64KiB, 512MiB, 4GiB, 1TiB */
    CONFIG_DURATION, /* uint64_t milliseconds: 500ms, 10s, 5min, 1h */
    CONFIG_INT,      /* unsigned */
    CONFIG_OCTAL,    /* unsigned: 0660 */
    CONFIG_BOOL,     /* bool: true, false */
    CONFIG_ENUM,     /* an enum from 0, by the names in `names` */
    CONFIG_STRING,   /* char *, at most max bytes */
    CONFIG_LIST,     /* struct config_list, at most max items */
};

#define CONFIG_ITEM_BYTES 1024 /* of a list, its NUL included */

struct config_key {
    const char *name; /* "section.key", or "key" at the top */
    enum config_kind kind;
    size_t offset;       /* in struct config */
    const char *initial; /* as config_set takes it */
    const char *help;
    uint64_t min, max;        /* of the number, the string's bytes or the list's items */
    const char *const *names; /* CONFIG_ENUM and CONFIG_BOOL: NULL at the end */
    const char *(*item_cb)(const char *text); /* NULL, or what the text or item should be */
    bool reloadable;
    bool internal; /* for tests and measurements: config_print shows it only where it is set */
};

struct config_section {
    const char *name; /* "" is the top */
    const char *help;
};

extern const struct config_key config_keys[]; /* a section's keys lie side by side */
extern const size_t config_key_count;
extern const struct config_section config_sections[]; /* in the keys' order */
extern const size_t config_section_count;

/* The length of the section's name in "section.key", 0 at the top. */
size_t config_section_length(const char *name);

/* The key of this name, or NULL. */
const struct config_key *config_key_find(const char *name);
/* The known name nearest to this one, or NULL when none is near. */
const char *config_key_nearest(const char *name);

/* The caller of each function below that takes a config_error has set the error's file and line:
 * the text begins with the location, "FILE:LINE: ", or "FILE: " for line 0, or "--set: " for
 * CONFIG_LINE_SET; nothing without a file. */

/* Sets the location to where the key was set. */
void config_locate(const struct config *c, struct config_error *e, const char *key);
/* Writes a sentence after the location; returns -EINVAL. */
int config_refuse(struct config_error *e, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The same for a key that does not exist. */
int config_unknown(struct config_error *e, const char *name);
/* Says that memory ran out; returns -ENOMEM. */
int config_no_memory(struct config_error *e);

/* Sets the key from text as config_set takes it. 0, or -EINVAL with a sentence that begins with the
 * key's name, or -ENOMEM; c is untouched on failure. */
int config_value_set(struct config *c, const struct config_key *k, const char *text,
                     struct config_error *e);
/* Replaces a list; takes the items of `list` on success. */
int config_list_set(struct config *c, const struct config_key *k, struct config_list *list,
                    struct config_error *e);
int config_list_add(struct config_list *list, const char *item);
void config_list_free(struct config_list *list);

/* The value as config_value_set takes it; strings are not quoted. Not for lists. Returns buf or the
 * string itself. */
#define CONFIG_TEXT_BYTES 32
const char *config_value_text(const struct config *c, const struct config_key *k,
                              char buf[CONFIG_TEXT_BYTES]);
/* Any value for people: lists in brackets, cut if it is long. */
void config_shown(const struct config *c, const struct config_key *k, char buf[CONFIG_SHOWN_BYTES]);
/* The value of a key that is neither text nor a list. */
uint64_t config_number(const struct config *c, const struct config_key *k);
bool config_value_equal(const struct config *a, const struct config *b, const struct config_key *k);
/* The default as YAML. */
const char *config_initial_text(const struct config_key *k);

static inline void *config_field(struct config *c, const struct config_key *k)
{
    return (char *)c + k->offset;
}

static inline const void *config_field_const(const struct config *c, const struct config_key *k)
{
    return (const char *)c + k->offset;
}

static inline size_t config_key_index(const struct config_key *k)
{
    return (size_t)(k - config_keys);
}

#endif
