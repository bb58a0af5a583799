/* kernels/entries and kernels/attend for decode_kernels.py: functions that a ctypes call finds by name. */
#include "kernels/attend/attend.h"
#include "kernels/entries/entries.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define VISIBLE __attribute__((visibility("default")))

/* Blocks of one memory. */
struct piece {
    const struct ucm_attend_plan *plan;
    struct ucm_attend_memory memory;
    const int32_t *blocks;
    uint32_t n, tail;
    uint32_t head; /* of this memory */
};

VISIBLE struct ucm_entries *test_entries(const struct ucm_entries_shape *shape, char *why);
VISIBLE void test_entries_free(struct ucm_entries *s);
VISIBLE int test_entries_enter(struct ucm_entries *s, uint32_t request, uint32_t floor);
VISIBLE void test_entries_leave(struct ucm_entries *s, uint32_t request);
VISIBLE void test_entries_forget(struct ucm_entries *s, uint32_t number);
VISIBLE void test_entries_begin(struct ucm_entries *s);
VISIBLE void test_entries_resolve(struct ucm_entries *s, uint32_t layer_head,
                                  const struct ucm_entries_lists *lists);
VISIBLE void test_entries_want(struct ucm_entries *s, uint32_t layer_head, uint32_t number,
                               uint32_t request);
VISIBLE int32_t test_entries_entry(const struct ucm_entries *s, uint32_t layer_head,
                                   uint32_t number);
VISIBLE void test_entries_take(struct ucm_entries *s);
VISIBLE uint32_t test_entries_missed(const struct ucm_entries *s, struct ucm_entries_miss *out);
VISIBLE void test_entries_publish(struct ucm_entries *s, const uint8_t *arrived);
VISIBLE int test_entries_verify(const struct ucm_entries *s, char *why);
VISIBLE struct ucm_attend_plan *test_attend_plan(const struct ucm_kv_shape *shape, uint32_t group,
                                                 char *why);
VISIBLE int test_attend(const struct piece *pieces, uint32_t n, const float *q, float *out);

static void *aligned(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

/* ---- entries ---- */

struct ucm_entries *test_entries(const struct ucm_entries_shape *shape, char *why)
{
    struct ucm_entries *s;
    void *memory;

    if (ucm_entries_check(shape, why) < 0)
        return NULL;
    s = malloc(sizeof(*s));
    memory = aligned(ucm_entries_bytes(shape));
    if (s == NULL || memory == NULL) {
        free(s);
        free(memory);
        return NULL;
    }
    ucm_entries_layout(s, shape, memory);
    ucm_entries_init(s);
    return s;
}

void test_entries_free(struct ucm_entries *s)
{
    free(s->stamp); /* the first array of all */
    free(s);
}

int test_entries_enter(struct ucm_entries *s, uint32_t request, uint32_t floor)
{
    return ucm_entries_enter(s, request, floor);
}

void test_entries_leave(struct ucm_entries *s, uint32_t request)
{
    ucm_entries_leave(s, request);
}

void test_entries_forget(struct ucm_entries *s, uint32_t number)
{
    ucm_entries_forget(s, &number, 1);
}

/* Each run has a higher number, because each run of a step gets one layer further. */
void test_entries_begin(struct ucm_entries *s)
{
    ucm_entries_begin(s, s->step->now + 1);
}

void test_entries_resolve(struct ucm_entries *s, uint32_t layer_head,
                          const struct ucm_entries_lists *lists)
{
    ucm_entries_resolve(s, layer_head, lists);
}

void test_entries_want(struct ucm_entries *s, uint32_t layer_head, uint32_t number,
                       uint32_t request)
{
    ucm_entries_want(s, ucm_entries_key(&s->shape, layer_head, number), request);
}

/* Below 0: why it has none. */
int32_t test_entries_entry(const struct ucm_entries *s, uint32_t layer_head, uint32_t number)
{
    return s->entry_of[ucm_entries_key(&s->shape, layer_head, number)];
}

void test_entries_take(struct ucm_entries *s)
{
    ucm_entries_take(s);
}

uint32_t test_entries_missed(const struct ucm_entries *s, struct ucm_entries_miss *out)
{
    memcpy(out, s->miss, s->step->misses * sizeof(*out));
    return s->step->misses;
}

void test_entries_publish(struct ucm_entries *s, const uint8_t *arrived)
{
    ucm_entries_publish(s, arrived);
}

int test_entries_verify(const struct ucm_entries *s, char *why)
{
    return ucm_entries_verify(s, why);
}

/* ---- attention ---- */

struct ucm_attend_plan *test_attend_plan(const struct ucm_kv_shape *shape, uint32_t group,
                                         char *why)
{
    struct ucm_attend_spec spec = {.shape = *shape, .group = group};
    struct ucm_attend_plan *plan = malloc(sizeof(*plan));

    if (plan != NULL && ucm_attend_plan_init(plan, &spec, why) < 0) {
        free(plan);
        return NULL;
    }
    return plan;
}

/* The attention of a KV head over n pieces, one after the other; their plans differ in places only. q: [group]
 * [head_dim]; out: [group][v_head_dim]. */
int test_attend(const struct piece *pieces, uint32_t n, const float *q, float *out)
{
    const struct ucm_attend_plan *plan = pieces[0].plan;
    float *query = aligned(plan->query_floats * sizeof(float));
    float *floats = aligned(plan->state_floats * sizeof(float));
    struct ucm_attend_state state;
    int r = query != NULL && floats != NULL ? 0 : -ENOMEM;

    if (r == 0) {
        ucm_attend_query(plan, q, query);
        ucm_attend_begin(plan, &state, floats);
    }
    for (uint32_t i = 0; i < n && r == 0; i++)
        r = ucm_attend_add(pieces[i].plan, &pieces[i].memory, pieces[i].head, query,
                           pieces[i].blocks, pieces[i].n, pieces[i].tail, &state, NULL, 0);
    if (r == 0)
        ucm_attend_end(plan, &state, out, NULL);
    free(query);
    free(floats);
    return r;
}
