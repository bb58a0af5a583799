#include "kernels/slots/slots.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define ALIGN 64u

/* ---- the shape ---- */

static int refuse(char why[UCM_SLOTS_WHY], const char *field, uint64_t value, uint64_t most)
{
    snprintf(why, UCM_SLOTS_WHY, "%s is %llu; 1 to %llu are allowed", field,
             (unsigned long long)value, (unsigned long long)most);
    return -EINVAL;
}

int ucm_slots_check(const struct ucm_slots_shape *shape, char why[UCM_SLOTS_WHY])
{
    if (shape->strands < 1 || shape->strands > UCM_SLOTS_STRANDS_MAX)
        return refuse(why, "strands", shape->strands, UCM_SLOTS_STRANDS_MAX);
    if (shape->numbers < 1 || shape->numbers > UCM_SLOTS_NUMBERS_MAX)
        return refuse(why, "numbers", shape->numbers, UCM_SLOTS_NUMBERS_MAX);
    if ((uint64_t)shape->strands * shape->numbers > UCM_SLOTS_NO_KEY)
        return refuse(why, "strands times numbers", (uint64_t)shape->strands * shape->numbers,
                      UCM_SLOTS_NO_KEY);
    if (shape->slots < 1 || shape->slots > UCM_SLOTS_MAX)
        return refuse(why, "slots", shape->slots, UCM_SLOTS_MAX);
    if (shape->requests < 1 || shape->requests > UCM_SLOTS_REQUESTS_MAX)
        return refuse(why, "requests", shape->requests, UCM_SLOTS_REQUESTS_MAX);
    if (shape->misses < 1 || shape->misses > UCM_SLOTS_MISSES_MAX)
        return refuse(why, "misses", shape->misses, UCM_SLOTS_MISSES_MAX);
    return 0;
}

static size_t keys_of(const struct ucm_slots_shape *shape)
{
    return (size_t)shape->strands * shape->numbers;
}

/* The next array of so many elements, in memory from base on. */
static void *place(char *base, size_t *at, size_t elements, size_t bytes)
{
    void *array = base + *at;

    *at += (elements * bytes + ALIGN - 1) / ALIGN * ALIGN;
    return array;
}

static size_t lay_out(struct ucm_slots *s, const struct ucm_slots_shape *shape, void *memory)
{
    size_t at = 0;

    *s = (struct ucm_slots){
        .shape = *shape,
        .groups = (shape->slots + UCM_SLOTS_GROUP - 1) / UCM_SLOTS_GROUP,
    };
    s->stamp = place(memory, &at, shape->slots, sizeof(*s->stamp));
    s->step = place(memory, &at, 1, sizeof(*s->step));
    s->slot_of = place(memory, &at, keys_of(shape), sizeof(*s->slot_of));
    s->key = place(memory, &at, shape->slots, sizeof(*s->key));
    s->request = place(memory, &at, shape->slots, sizeof(*s->request));
    s->held = place(memory, &at, shape->requests, sizeof(*s->held));
    s->floor = place(memory, &at, shape->requests, sizeof(*s->floor));
    s->miss = place(memory, &at, shape->misses, sizeof(*s->miss));
    s->unserved = place(memory, &at, shape->misses, sizeof(*s->unserved));
    return at;
}

size_t ucm_slots_bytes(const struct ucm_slots_shape *shape)
{
    struct ucm_slots s;

    /* Addresses are not looked at; they begin where ucm_slots_layout's may. */
    return lay_out(&s, shape, (void *)(uintptr_t)ALIGN);
}

void ucm_slots_layout(struct ucm_slots *s, const struct ucm_slots_shape *shape, void *memory)
{
    lay_out(s, shape, memory);
}

void ucm_slots_init(struct ucm_slots *s)
{
    const struct ucm_slots_shape *n = &s->shape;

    memset(s->slot_of, 0xff, keys_of(n) * sizeof(*s->slot_of)); /* UCM_SLOTS_NONE */
    memset(s->stamp, 0, n->slots * sizeof(*s->stamp));
    memset(s->key, 0xff, n->slots * sizeof(*s->key));
    memset(s->request, 0xff, n->slots * sizeof(*s->request));
    memset(s->held, 0, n->requests * sizeof(*s->held));
    memset(s->floor, 0, n->requests * sizeof(*s->floor));
    memset(s->step, 0, sizeof(*s->step));
}

/* ---- requests ---- */

/* From now on the slot counts for this request, or for nobody. */
static void count_for(struct ucm_slots *s, uint32_t slot, uint32_t request)
{
    uint32_t old = s->request[slot];

    if (old != UCM_SLOTS_NOBODY)
        s->held[old]--;
    if (request != UCM_SLOTS_NOBODY)
        s->held[request]++;
    s->request[slot] = request;
}

int ucm_slots_enter(struct ucm_slots *s, uint32_t request, uint32_t floor)
{
    uint64_t sum = floor;

    assert(request < s->shape.requests && s->floor[request] == 0 && s->held[request] == 0);
    for (uint32_t r = 0; r < s->shape.requests; r++)
        sum += s->floor[r];
    if (sum > s->shape.slots)
        return -ENOSPC;
    s->floor[request] = floor;
    return 0;
}

void ucm_slots_leave(struct ucm_slots *s, uint32_t request)
{
    assert(request < s->shape.requests && s->step->misses == 0);
    for (uint32_t slot = 0; slot < s->shape.slots; slot++)
        if (s->request[slot] == request)
            count_for(s, slot, UCM_SLOTS_NOBODY);
    s->floor[request] = 0;
}

static void free_slot(struct ucm_slots *s, uint32_t slot)
{
    count_for(s, slot, UCM_SLOTS_NOBODY);
    s->key[slot] = UCM_SLOTS_NO_KEY;
    s->stamp[slot] = 0;
}

void ucm_slots_forget(struct ucm_slots *s, const uint32_t *numbers, uint32_t n)
{
    assert(s->step->misses == 0);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t strand = 0; strand < s->shape.strands; strand++) {
            int32_t *at = &s->slot_of[ucm_slots_key(&s->shape, strand, numbers[i])];

            if (*at >= 0)
                free_slot(s, (uint32_t)*at);
            *at = UCM_SLOTS_NONE;
        }
}

/* ---- a step ---- */

static void not_served(struct ucm_slots *s, uint32_t key, uint32_t flag)
{
    struct ucm_slots_step *step = s->step;

    s->slot_of[key] = UCM_SLOTS_NONE;
    if (step->unserved < s->shape.misses)
        s->unserved[step->unserved] = key;
    step->unserved++;
    step->flags |= UCM_SLOTS_UNSERVED | flag;
}

void ucm_slots_want(struct ucm_slots *s, uint32_t key, uint32_t request)
{
    struct ucm_slots_step *step = s->step;
    int32_t at = s->slot_of[key];

    if (at >= 0) {
        s->stamp[at] = step->now;
        if (s->request[at] == UCM_SLOTS_NOBODY)
            count_for(s, (uint32_t)at, request);
    } else if (at == UCM_SLOTS_NONE) {
        s->slot_of[key] = UCM_SLOTS_WANTED;
        step->missed++;
        if (step->misses < s->shape.misses)
            s->miss[step->misses] =
                (struct ucm_slots_miss){.key = key, .slot = UCM_SLOTS_NONE, .request = request};
        else
            not_served(s, key, UCM_SLOTS_LIST_FULL);
        step->misses++;
    }
}

static void resolve_list(struct ucm_slots *s, uint32_t strand, const uint32_t *index, uint32_t n,
                         const int32_t *table, uint64_t length, uint32_t request)
{
    for (uint32_t i = 0; i < n && index[i] != UCM_SLOTS_NO_INDEX; i++) {
        int32_t number = index[i] < length ? table[index[i]] : -1;

        if (number < 0 || (uint32_t)number >= s->shape.numbers || request >= s->shape.requests)
            s->step->flags |= UCM_SLOTS_UNSERVED | UCM_SLOTS_STRAY;
        else
            ucm_slots_want(s, ucm_slots_key(&s->shape, strand, (uint32_t)number), request);
    }
}

void ucm_slots_resolve(struct ucm_slots *s, uint32_t strand, const struct ucm_slots_lists *lists)
{
    assert(strand + (lists->apart ? lists->lists - 1 : 0) < s->shape.strands);
    for (uint32_t sequence = 0; sequence < lists->sequences; sequence++)
        for (uint32_t l = 0; l < lists->lists; l++) {
            size_t list = (size_t)sequence * lists->lists + l;
            uint32_t count = lists->count[list], begin = lists->begin ? lists->begin[list] : 0;

            count = lists->end && lists->end[list] < count ? lists->end[list] : count;
            count = count < lists->room ? count : lists->room;
            resolve_list(s, strand + lists->apart * l, lists->index + list * lists->room + begin,
                         count > begin ? count - begin : 0,
                         lists->table + sequence * lists->table_stride, lists->table_stride,
                         lists->request[sequence]);
        }
}

/* ---- slots for misses ---- */

static bool may_take(const struct ucm_slots *s, uint32_t slot, uint32_t request, bool floors)
{
    uint32_t holder = s->request[slot];

    if (s->stamp[slot] == s->step->now)
        return false;
    return !floors || holder == UCM_SLOTS_NOBODY || holder == request ||
           s->held[holder] > s->floor[holder];
}

/* Of the group at the hand, which goes on to the next; UCM_SLOTS_NONE if none may be taken. */
static int32_t oldest_of_group(struct ucm_slots *s, uint32_t request, bool floors)
{
    uint32_t first = s->step->hand++ % s->groups * UCM_SLOTS_GROUP;
    int32_t oldest = UCM_SLOTS_NONE;

    for (uint32_t slot = first; slot < first + UCM_SLOTS_GROUP && slot < s->shape.slots; slot++)
        if (may_take(s, slot, request, floors) &&
            (oldest == UCM_SLOTS_NONE || s->stamp[slot] < s->stamp[oldest]))
            oldest = (int32_t)slot;
    return oldest;
}

static int32_t find_slot(struct ucm_slots *s, uint32_t request)
{
    int32_t slot = UCM_SLOTS_NONE;

    for (uint32_t i = 0; i < s->groups && slot == UCM_SLOTS_NONE; i++)
        slot = oldest_of_group(s, request, true);
    for (uint32_t i = 0; i < s->groups && slot == UCM_SLOTS_NONE; i++) {
        slot = oldest_of_group(s, request, false);
        s->step->floors_broken += slot != UCM_SLOTS_NONE;
    }
    return slot;
}

void ucm_slots_take(struct ucm_slots *s)
{
    uint32_t n = s->step->misses < s->shape.misses ? s->step->misses : s->shape.misses;

    for (uint32_t i = 0; i < n; i++) {
        struct ucm_slots_miss *miss = &s->miss[i];

        if (miss->slot != UCM_SLOTS_NONE)
            continue;
        miss->slot = find_slot(s, miss->request);
        if (miss->slot == UCM_SLOTS_NONE) {
            s->step->flags |= UCM_SLOTS_FULL;
            continue;
        }
        if (s->key[miss->slot] != UCM_SLOTS_NO_KEY)
            s->slot_of[s->key[miss->slot]] = UCM_SLOTS_NONE;
        s->key[miss->slot] = miss->key;
        s->stamp[miss->slot] = s->step->now;
        count_for(s, (uint32_t)miss->slot, miss->request);
        s->step->taken++;
    }
}

/* arrived NULL: none of them. */
static void end_misses(struct ucm_slots *s, const uint8_t *arrived)
{
    uint32_t n = s->step->misses < s->shape.misses ? s->step->misses : s->shape.misses;

    for (uint32_t i = 0; i < n; i++) {
        struct ucm_slots_miss *miss = &s->miss[i];

        if (miss->slot != UCM_SLOTS_NONE && arrived && arrived[i] != 0) {
            s->slot_of[miss->key] = miss->slot;
            continue;
        }
        if (miss->slot != UCM_SLOTS_NONE)
            free_slot(s, (uint32_t)miss->slot);
        not_served(s, miss->key, 0);
    }
    s->step->misses = 0;
}

void ucm_slots_publish(struct ucm_slots *s, const uint8_t *arrived)
{
    end_misses(s, arrived);
}

/* Misses of a step that never ended have not arrived. */
void ucm_slots_begin(struct ucm_slots *s, uint64_t now)
{
    assert(now > 0 && now >= s->step->now);
    end_misses(s, NULL);
    s->step->now = now;
    s->step->unserved = 0;
    s->step->flags = 0;
}
