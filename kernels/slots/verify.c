/* What must hold of the arrays between any two calls. */
#include "kernels/slots/slots.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

static int wrong(char why[UCM_SLOTS_WHY], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static int wrong(char why[UCM_SLOTS_WHY], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, UCM_SLOTS_WHY, format, args);
    va_end(args);
    return -EUCLEAN;
}

static uint32_t listed(const struct ucm_slots *s)
{
    return s->step->misses < s->shape.misses ? s->step->misses : s->shape.misses;
}

static int verify_table(const struct ucm_slots *s, char why[UCM_SLOTS_WHY])
{
    uint32_t keys = s->shape.strands * s->shape.numbers, wanted = 0;

    for (uint32_t k = 0; k < keys; k++) {
        int32_t at = s->slot_of[k];

        if (at == UCM_SLOTS_WANTED)
            wanted++;
        else if (at != UCM_SLOTS_NONE && (at < 0 || (uint32_t)at >= s->shape.slots))
            return wrong(why, "slot_of[%u] is %d; there are %u slots", k, at, s->shape.slots);
        else if (at >= 0 && s->key[at] != k)
            return wrong(why, "slot_of[%u] is %d, and that slot has key %u", k, at, s->key[at]);
    }
    if (wanted != listed(s))
        return wrong(why, "%u keys are wanted, and %u are on the list", wanted, listed(s));
    return 0;
}

static int verify_misses(const struct ucm_slots *s, char why[UCM_SLOTS_WHY])
{
    for (uint32_t i = 0; i < listed(s); i++) {
        const struct ucm_slots_miss *m = &s->miss[i];

        if (m->key >= s->shape.strands * s->shape.numbers || s->slot_of[m->key] != UCM_SLOTS_WANTED)
            return wrong(why, "miss %u is key %u, which is not wanted", i, m->key);
        if (m->slot != UCM_SLOTS_NONE &&
            ((uint32_t)m->slot >= s->shape.slots || s->key[m->slot] != m->key))
            return wrong(why, "miss %u has slot %d, which is not its key's", i, m->slot);
        for (uint32_t j = 0; j < i; j++)
            if (s->miss[j].key == m->key)
                return wrong(why, "misses %u and %u are the same key %u", j, i, m->key);
    }
    return 0;
}

static int on_list(const struct ucm_slots *s, uint32_t slot)
{
    for (uint32_t i = 0; i < listed(s); i++)
        if (s->miss[i].slot == (int32_t)slot)
            return 1;
    return 0;
}

static int verify_slots(const struct ucm_slots *s, char why[UCM_SLOTS_WHY])
{
    for (uint32_t slot = 0; slot < s->shape.slots; slot++) {
        uint32_t key = s->key[slot], request = s->request[slot];

        if (s->stamp[slot] > s->step->now)
            return wrong(why, "slot %u has the stamp of a later step", slot);
        if (request != UCM_SLOTS_NOBODY && request >= s->shape.requests)
            return wrong(why, "slot %u counts for request %u; there are %u", slot, request,
                         s->shape.requests);
        if (key == UCM_SLOTS_NO_KEY) {
            if (request != UCM_SLOTS_NOBODY || s->stamp[slot] != 0)
                return wrong(why, "slot %u is free, and has a request or a stamp", slot);
        } else if (key >= s->shape.strands * s->shape.numbers) {
            return wrong(why, "slot %u has key %u, which the table has not", slot, key);
        } else if (s->slot_of[key] != (int32_t)slot &&
                   !(s->slot_of[key] == UCM_SLOTS_WANTED && on_list(s, slot))) {
            return wrong(why, "slot %u has key %u, whose entry is %d", slot, key, s->slot_of[key]);
        }
    }
    return 0;
}

static int verify_held(const struct ucm_slots *s, char why[UCM_SLOTS_WHY])
{
    for (uint32_t r = 0; r < s->shape.requests; r++) {
        uint32_t held = 0;

        for (uint32_t slot = 0; slot < s->shape.slots; slot++)
            held += s->request[slot] == r;
        if (held != s->held[r])
            return wrong(why, "request %u has %u slots, and held says %u", r, held, s->held[r]);
    }
    return 0;
}

int ucm_slots_verify(const struct ucm_slots *s, char why[UCM_SLOTS_WHY])
{
    int rc = verify_table(s, why);

    if (rc == 0)
        rc = verify_misses(s, why);
    if (rc == 0)
        rc = verify_slots(s, why);
    if (rc == 0)
        rc = verify_held(s, why);
    return rc;
}
