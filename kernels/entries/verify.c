/* What must hold of the arrays between any two calls. */
#include "kernels/entries/entries.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

static int wrong(char why[UCM_ENTRIES_WHY], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static int wrong(char why[UCM_ENTRIES_WHY], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, UCM_ENTRIES_WHY, format, args);
    va_end(args);
    return -EUCLEAN;
}

static uint32_t listed(const struct ucm_entries *s)
{
    return s->step->misses < s->shape.misses ? s->step->misses : s->shape.misses;
}

static int verify_table(const struct ucm_entries *s, char why[UCM_ENTRIES_WHY])
{
    uint32_t keys = s->shape.layer_heads * s->shape.numbers, wanted = 0;

    for (uint32_t k = 0; k < keys; k++) {
        int32_t at = s->entry_of[k];

        if (at == UCM_ENTRIES_WANTED)
            wanted++;
        else if (at != UCM_ENTRIES_NONE && (at < 0 || (uint32_t)at >= s->shape.entries))
            return wrong(why, "entry_of[%u] is %d; there are %u entries", k, at, s->shape.entries);
        else if (at >= 0 && s->key[at] != k)
            return wrong(why, "entry_of[%u] is %d, and that entry has key %u", k, at, s->key[at]);
    }
    if (wanted != listed(s))
        return wrong(why, "%u keys are wanted, and %u are on the list", wanted, listed(s));
    return 0;
}

static int verify_misses(const struct ucm_entries *s, char why[UCM_ENTRIES_WHY])
{
    for (uint32_t i = 0; i < listed(s); i++) {
        const struct ucm_entries_miss *m = &s->miss[i];

        if (m->key >= s->shape.layer_heads * s->shape.numbers ||
            s->entry_of[m->key] != UCM_ENTRIES_WANTED)
            return wrong(why, "miss %u is key %u, which is not wanted", i, m->key);
        if (m->entry != UCM_ENTRIES_NONE &&
            ((uint32_t)m->entry >= s->shape.entries || s->key[m->entry] != m->key))
            return wrong(why, "miss %u has entry %d, which is not its key's", i, m->entry);
        for (uint32_t j = 0; j < i; j++)
            if (s->miss[j].key == m->key)
                return wrong(why, "misses %u and %u are the same key %u", j, i, m->key);
    }
    return 0;
}

static int on_list(const struct ucm_entries *s, uint32_t entry)
{
    for (uint32_t i = 0; i < listed(s); i++)
        if (s->miss[i].entry == (int32_t)entry)
            return 1;
    return 0;
}

static int verify_entries(const struct ucm_entries *s, char why[UCM_ENTRIES_WHY])
{
    for (uint32_t entry = 0; entry < s->shape.entries; entry++) {
        uint32_t key = s->key[entry], request = s->request[entry];

        if (s->stamp[entry] > s->step->now)
            return wrong(why, "entry %u has the stamp of a later step", entry);
        if (request != UCM_ENTRIES_NOBODY && request >= s->shape.requests)
            return wrong(why, "entry %u counts for request %u; there are %u", entry, request,
                         s->shape.requests);
        if (key == UCM_ENTRIES_NO_KEY) {
            if (request != UCM_ENTRIES_NOBODY || s->stamp[entry] != 0)
                return wrong(why, "entry %u is free, and has a request or a stamp", entry);
        } else if (key >= s->shape.layer_heads * s->shape.numbers) {
            return wrong(why, "entry %u has key %u, which the table has not", entry, key);
        } else if (s->entry_of[key] != (int32_t)entry &&
                   !(s->entry_of[key] == UCM_ENTRIES_WANTED && on_list(s, entry))) {
            return wrong(why, "entry %u has key %u, whose item is %d", entry, key,
                         s->entry_of[key]);
        }
    }
    return 0;
}

static int verify_held(const struct ucm_entries *s, char why[UCM_ENTRIES_WHY])
{
    for (uint32_t r = 0; r < s->shape.requests; r++) {
        uint32_t held = 0;

        for (uint32_t entry = 0; entry < s->shape.entries; entry++)
            held += s->request[entry] == r;
        if (held != s->held[r])
            return wrong(why, "request %u has %u entries, and held says %u", r, held, s->held[r]);
    }
    return 0;
}

int ucm_entries_verify(const struct ucm_entries *s, char why[UCM_ENTRIES_WHY])
{
    int rc = verify_table(s, why);

    if (rc == 0)
        rc = verify_misses(s, why);
    if (rc == 0)
        rc = verify_entries(s, why);
    if (rc == 0)
        rc = verify_held(s, why);
    return rc;
}
