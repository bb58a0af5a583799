#include "kernels/entries/entries.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define ALIGN 64u

/* ---- the shape ---- */

static int refuse(char why[UCM_ENTRIES_WHY], const char *field, uint64_t value, uint64_t most)
{
    snprintf(why, UCM_ENTRIES_WHY, "%s is %llu; 1 to %llu are allowed", field,
             (unsigned long long)value, (unsigned long long)most);
    return -EINVAL;
}

int ucm_entries_check(const struct ucm_entries_shape *shape, char why[UCM_ENTRIES_WHY])
{
    if (shape->layer_heads < 1 || shape->layer_heads > UCM_ENTRIES_LAYER_HEADS_MAX)
        return refuse(why, "layer_heads", shape->layer_heads, UCM_ENTRIES_LAYER_HEADS_MAX);
    if (shape->numbers < 1 || shape->numbers > UCM_ENTRIES_NUMBERS_MAX)
        return refuse(why, "numbers", shape->numbers, UCM_ENTRIES_NUMBERS_MAX);
    if ((uint64_t)shape->layer_heads * shape->numbers > UCM_ENTRIES_NO_KEY)
        return refuse(why, "layer_heads times numbers",
                      (uint64_t)shape->layer_heads * shape->numbers, UCM_ENTRIES_NO_KEY);
    if (shape->entries < 1 || shape->entries > UCM_ENTRIES_MAX)
        return refuse(why, "entries", shape->entries, UCM_ENTRIES_MAX);
    if (shape->requests < 1 || shape->requests > UCM_ENTRIES_REQUESTS_MAX)
        return refuse(why, "requests", shape->requests, UCM_ENTRIES_REQUESTS_MAX);
    if (shape->misses < 1 || shape->misses > UCM_ENTRIES_MISSES_MAX)
        return refuse(why, "misses", shape->misses, UCM_ENTRIES_MISSES_MAX);
    return 0;
}

static size_t keys_of(const struct ucm_entries_shape *shape)
{
    return (size_t)shape->layer_heads * shape->numbers;
}

/* The next array of so many elements, in memory from base on. */
static void *place(char *base, size_t *at, size_t elements, size_t bytes)
{
    void *array = base + *at;

    *at += (elements * bytes + ALIGN - 1) / ALIGN * ALIGN;
    return array;
}

static size_t lay_out(struct ucm_entries *s, const struct ucm_entries_shape *shape, void *memory)
{
    size_t at = 0;

    *s = (struct ucm_entries){
        .shape = *shape,
        .groups = (shape->entries + UCM_ENTRIES_GROUP - 1) / UCM_ENTRIES_GROUP,
    };
    s->stamp = place(memory, &at, shape->entries, sizeof(*s->stamp));
    s->step = place(memory, &at, 1, sizeof(*s->step));
    s->entry_of = place(memory, &at, keys_of(shape), sizeof(*s->entry_of));
    s->key = place(memory, &at, shape->entries, sizeof(*s->key));
    s->request = place(memory, &at, shape->entries, sizeof(*s->request));
    s->held = place(memory, &at, shape->requests, sizeof(*s->held));
    s->floor = place(memory, &at, shape->requests, sizeof(*s->floor));
    s->miss = place(memory, &at, shape->misses, sizeof(*s->miss));
    s->unserved = place(memory, &at, shape->misses, sizeof(*s->unserved));
    return at;
}

size_t ucm_entries_bytes(const struct ucm_entries_shape *shape)
{
    struct ucm_entries s;

    /* Only sizes matter here. Addresses begin where ucm_entries_layout's may. */
    return lay_out(&s, shape, (void *)(uintptr_t)ALIGN);
}

void ucm_entries_layout(struct ucm_entries *s, const struct ucm_entries_shape *shape, void *memory)
{
    lay_out(s, shape, memory);
}

void ucm_entries_init(struct ucm_entries *s)
{
    const struct ucm_entries_shape *n = &s->shape;

    memset(s->entry_of, 0xff, keys_of(n) * sizeof(*s->entry_of)); /* UCM_ENTRIES_NONE */
    memset(s->stamp, 0, n->entries * sizeof(*s->stamp));
    memset(s->key, 0xff, n->entries * sizeof(*s->key));
    memset(s->request, 0xff, n->entries * sizeof(*s->request));
    memset(s->held, 0, n->requests * sizeof(*s->held));
    memset(s->floor, 0, n->requests * sizeof(*s->floor));
    memset(s->step, 0, sizeof(*s->step));
}

/* ---- requests ---- */

/* From now on the entry counts for this request, or for none. */
static void count_for(struct ucm_entries *s, uint32_t entry, uint32_t request)
{
    uint32_t old = s->request[entry];

    if (old != UCM_ENTRIES_NOBODY)
        s->held[old]--;
    if (request != UCM_ENTRIES_NOBODY)
        s->held[request]++;
    s->request[entry] = request;
}

int ucm_entries_enter(struct ucm_entries *s, uint32_t request, uint32_t floor)
{
    uint64_t sum = floor;

    assert(request < s->shape.requests && s->floor[request] == 0 && s->held[request] == 0);
    for (uint32_t r = 0; r < s->shape.requests; r++)
        sum += s->floor[r];
    if (sum > s->shape.entries)
        return -ENOSPC;
    s->floor[request] = floor;
    return 0;
}

void ucm_entries_leave(struct ucm_entries *s, uint32_t request)
{
    assert(request < s->shape.requests && s->step->misses == 0);
    for (uint32_t entry = 0; entry < s->shape.entries; entry++)
        if (s->request[entry] == request)
            count_for(s, entry, UCM_ENTRIES_NOBODY);
    s->floor[request] = 0;
}

static void free_entry(struct ucm_entries *s, uint32_t entry)
{
    count_for(s, entry, UCM_ENTRIES_NOBODY);
    s->key[entry] = UCM_ENTRIES_NO_KEY;
    s->stamp[entry] = 0;
}

void ucm_entries_forget(struct ucm_entries *s, const uint32_t *numbers, uint32_t n)
{
    assert(s->step->misses == 0);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t layer_head = 0; layer_head < s->shape.layer_heads; layer_head++) {
            int32_t *at = &s->entry_of[ucm_entries_key(&s->shape, layer_head, numbers[i])];

            if (*at >= 0)
                free_entry(s, (uint32_t)*at);
            *at = UCM_ENTRIES_NONE;
        }
}

/* ---- a step ---- */

static void not_served(struct ucm_entries *s, uint32_t key, uint32_t flag)
{
    struct ucm_entries_step *step = s->step;

    s->entry_of[key] = UCM_ENTRIES_NONE;
    if (step->unserved < s->shape.misses)
        s->unserved[step->unserved] = key;
    step->unserved++;
    step->flags |= UCM_ENTRIES_UNSERVED | flag;
}

void ucm_entries_want(struct ucm_entries *s, uint32_t key, uint32_t request)
{
    struct ucm_entries_step *step = s->step;
    int32_t at = s->entry_of[key];

    if (at >= 0) {
        s->stamp[at] = step->now;
        if (s->request[at] == UCM_ENTRIES_NOBODY)
            count_for(s, (uint32_t)at, request);
    } else if (at == UCM_ENTRIES_NONE) {
        s->entry_of[key] = UCM_ENTRIES_WANTED;
        step->missed++;
        if (step->misses < s->shape.misses)
            s->miss[step->misses] = (struct ucm_entries_miss){
                .key = key, .entry = UCM_ENTRIES_NONE, .request = request};
        else
            not_served(s, key, UCM_ENTRIES_LIST_FULL);
        step->misses++;
    }
}

static void resolve_list(struct ucm_entries *s, uint32_t layer_head, const uint32_t *index,
                         uint32_t n, const int32_t *table, uint64_t length, uint32_t request)
{
    for (uint32_t i = 0; i < n && index[i] != UCM_ENTRIES_NO_INDEX; i++) {
        int32_t number = index[i] < length ? table[index[i]] : -1;

        if (number < 0 || (uint32_t)number >= s->shape.numbers || request >= s->shape.requests)
            s->step->flags |= UCM_ENTRIES_UNSERVED | UCM_ENTRIES_STRAY;
        else
            ucm_entries_want(s, ucm_entries_key(&s->shape, layer_head, (uint32_t)number), request);
    }
}

void ucm_entries_resolve(struct ucm_entries *s, uint32_t layer_head,
                         const struct ucm_entries_lists *lists)
{
    assert(layer_head + (lists->apart ? lists->lists - 1 : 0) < s->shape.layer_heads);
    for (uint32_t sequence = 0; sequence < lists->sequences; sequence++)
        for (uint32_t l = 0; l < lists->lists; l++) {
            size_t list = (size_t)sequence * lists->lists + l;
            uint32_t count = lists->count[list], begin = lists->begin ? lists->begin[list] : 0;

            count = lists->end && lists->end[list] < count ? lists->end[list] : count;
            count = count < lists->room ? count : lists->room;
            resolve_list(
                s, layer_head + lists->apart * l, lists->index + list * lists->room + begin,
                count > begin ? count - begin : 0, lists->table + sequence * lists->table_stride,
                lists->table_stride, lists->request[sequence]);
        }
}

/* ---- entries for misses ---- */

static bool may_take(const struct ucm_entries *s, uint32_t entry, uint32_t request, bool floors)
{
    uint32_t holder = s->request[entry];

    if (s->stamp[entry] == s->step->now)
        return false;
    return !floors || holder == UCM_ENTRIES_NOBODY || holder == request ||
           s->held[holder] > s->floor[holder];
}

/* The oldest entry of the group at the hand; UCM_ENTRIES_NONE if none may be taken. The hand moves
 * on to the next group. */
static int32_t oldest_of_group(struct ucm_entries *s, uint32_t request, bool floors)
{
    uint32_t first = s->step->hand++ % s->groups * UCM_ENTRIES_GROUP;
    int32_t oldest = UCM_ENTRIES_NONE;

    for (uint32_t entry = first; entry < first + UCM_ENTRIES_GROUP && entry < s->shape.entries;
         entry++)
        if (may_take(s, entry, request, floors) &&
            (oldest == UCM_ENTRIES_NONE || s->stamp[entry] < s->stamp[oldest]))
            oldest = (int32_t)entry;
    return oldest;
}

static int32_t find_entry(struct ucm_entries *s, uint32_t request)
{
    int32_t entry = UCM_ENTRIES_NONE;

    for (uint32_t i = 0; i < s->groups && entry == UCM_ENTRIES_NONE; i++)
        entry = oldest_of_group(s, request, true);
    for (uint32_t i = 0; i < s->groups && entry == UCM_ENTRIES_NONE; i++) {
        entry = oldest_of_group(s, request, false);
        s->step->floors_broken += entry != UCM_ENTRIES_NONE;
    }
    return entry;
}

void ucm_entries_take(struct ucm_entries *s)
{
    uint32_t n = s->step->misses < s->shape.misses ? s->step->misses : s->shape.misses;

    for (uint32_t i = 0; i < n; i++) {
        struct ucm_entries_miss *miss = &s->miss[i];

        if (miss->entry != UCM_ENTRIES_NONE)
            continue;
        miss->entry = find_entry(s, miss->request);
        if (miss->entry == UCM_ENTRIES_NONE) {
            s->step->flags |= UCM_ENTRIES_FULL;
            continue;
        }
        if (s->key[miss->entry] != UCM_ENTRIES_NO_KEY)
            s->entry_of[s->key[miss->entry]] = UCM_ENTRIES_NONE;
        s->key[miss->entry] = miss->key;
        s->stamp[miss->entry] = s->step->now;
        count_for(s, (uint32_t)miss->entry, miss->request);
        s->step->taken++;
    }
}

/* arrived NULL: none has arrived. */
static void end_misses(struct ucm_entries *s, const uint8_t *arrived)
{
    uint32_t n = s->step->misses < s->shape.misses ? s->step->misses : s->shape.misses;

    for (uint32_t i = 0; i < n; i++) {
        struct ucm_entries_miss *miss = &s->miss[i];

        if (miss->entry != UCM_ENTRIES_NONE && arrived && arrived[i] != 0) {
            s->entry_of[miss->key] = miss->entry;
            continue;
        }
        if (miss->entry != UCM_ENTRIES_NONE)
            free_entry(s, (uint32_t)miss->entry);
        not_served(s, miss->key, 0);
    }
    s->step->misses = 0;
}

void ucm_entries_publish(struct ucm_entries *s, const uint8_t *arrived)
{
    end_misses(s, arrived);
}

/* Misses of a step that never ended have not arrived. */
void ucm_entries_begin(struct ucm_entries *s, uint64_t now)
{
    assert(now > 0 && now >= s->step->now);
    end_misses(s, NULL);
    s->step->now = now;
    s->step->unserved = 0;
    s->step->flags = 0;
}
