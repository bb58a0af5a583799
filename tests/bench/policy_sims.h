/* The policies that policy_study.c compares the daemon's own with, over blocks that are numbers
 * below n_ids. Part of that one program: plain state, anew for each run. */
#ifndef UCM_TESTS_POLICY_SIMS_H
#define UCM_TESTS_POLICY_SIMS_H

#include "tests/bench/policy_trace.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define NONE UINT32_MAX
#define LISTS 5

/* ---- what the simulated policies work with, anew for each run ---- */

static uint32_t capacity, now;
static uint32_t *busy_since; /* request that needs the block now: it may not be evicted */
static uint32_t *prev, *next, list_n[LISTS]; /* circular lists, the heads behind the blocks */
static uint8_t *list_of, *uses;
static double *value, *last, *last_but_one; /* heap's key; times of use */
static uint32_t *heap, *heap_at, heap_n, *depth;
static double tick, level;

static bool busy(uint32_t id)
{
    return busy_since[id] == now;
}

static void state_open(void)
{
    size_t n = n_ids + LISTS;

    busy_since = zeroed(n, sizeof(*busy_since));
    prev = zeroed(n, sizeof(*prev));
    next = zeroed(n, sizeof(*next));
    list_of = zeroed(n, 1);
    uses = zeroed(n, 1);
    value = zeroed(n, sizeof(*value));
    last = zeroed(n, sizeof(*last));
    last_but_one = zeroed(n, sizeof(*last_but_one));
    heap = zeroed(n, sizeof(*heap));
    heap_at = zeroed(n, sizeof(*heap_at));
    depth = zeroed(n, sizeof(*depth));
    memset(list_of, LISTS, n);
    for (uint32_t i = 0; i < LISTS; i++) {
        prev[n_ids + i] = next[n_ids + i] = n_ids + i;
        list_n[i] = 0;
    }
    heap_n = now = 0;
    tick = level = 0;
}

static void state_close(void)
{
    void *all[] = {busy_since, prev, next,         list_of, uses, value,
                   last,       heap, last_but_one, heap_at, depth};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}

static void list_push(uint32_t list, uint32_t id)
{
    uint32_t head = n_ids + list;

    next[id] = next[head];
    prev[id] = head;
    prev[next[id]] = id;
    next[head] = id;
    list_of[id] = (uint8_t)list;
    list_n[list]++;
}

static void list_cut(uint32_t id)
{
    next[prev[id]] = next[id];
    prev[next[id]] = prev[id];
    list_n[list_of[id]]--;
    list_of[id] = LISTS;
}

static void list_move(uint32_t list, uint32_t id)
{
    list_cut(id);
    list_push(list, id);
}

/* The oldest of the list that may go, or NONE. */
static uint32_t list_oldest(uint32_t list)
{
    uint32_t id = prev[n_ids + list];

    while (id < n_ids && busy(id))
        id = prev[id];
    return id < n_ids ? id : NONE;
}

static void list_trim(uint32_t list, double most)
{
    while (list_n[list] > most)
        list_cut(prev[n_ids + list]);
}

static void heap_set(uint32_t at, uint32_t id)
{
    heap[at] = id;
    heap_at[id] = at;
}

static void heap_fix(uint32_t at)
{
    uint32_t id = heap[at];

    while (at > 0 && value[heap[(at - 1) / 2]] > value[id]) {
        heap_set(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        uint32_t child = 2 * at + 1;

        if (child + 1 < heap_n && value[heap[child + 1]] < value[heap[child]])
            child++;
        if (child >= heap_n || value[heap[child]] >= value[id])
            break;
        heap_set(at, heap[child]);
        at = child;
    }
    heap_set(at, id);
}

static void heap_add(uint32_t id, double v)
{
    value[id] = v;
    heap_set(heap_n++, id);
    heap_fix(heap_n - 1);
}

static void heap_change(uint32_t id, double v)
{
    value[id] = v;
    heap_fix(heap_at[id]);
}

static void heap_cut(uint32_t id)
{
    uint32_t at = heap_at[id];

    heap_set(at, heap[--heap_n]);
    if (at < heap_n)
        heap_fix(at);
}

/* The least of those that may go. */
static uint32_t heap_least(void)
{
    static uint32_t aside[1024];
    uint32_t n = 0, id;

    while (busy(id = heap[0])) {
        heap_cut(id);
        aside[n++] = id;
        if (n == sizeof(aside) / sizeof(aside[0]) || heap_n == 0)
            abort();
    }
    heap_cut(id);
    while (n-- > 0)
        heap_add(aside[n], value[aside[n]]);
    return id;
}

/* ---- the policies: use = a hit, order = put in place again without a use, add = a new block,
 * victim = choose and take out ---- */

static void nothing(uint32_t id)
{
    (void)id;
}

static void push_first(uint32_t id)
{
    list_push(0, id);
}

static void move_first(uint32_t id)
{
    list_move(0, id);
}

static void move_same(uint32_t id)
{
    list_move(list_of[id], id);
}

static uint32_t oldest_first(void)
{
    uint32_t id = list_oldest(0);

    list_cut(id);
    return id;
}

/* 2Q: 0 in, 1 main, 2 out (ghosts). */
static void twoq_use(uint32_t id)
{
    if (list_of[id] == 1)
        list_move(1, id);
}

static void twoq_add(uint32_t id)
{
    if (list_of[id] == 2)
        list_move(1, id);
    else
        list_push(0, id);
}

static uint32_t twoq_victim(void)
{
    uint32_t from = list_n[0] > 0.25 * capacity || list_n[1] == 0 ? 0 : 1, id = list_oldest(from);

    if (id == NONE)
        id = list_oldest(from = 1 - from);
    list_cut(id);
    if (from == 0)
        list_push(2, id);
    list_trim(2, 0.5 * capacity);
    return id;
}

/* S3-FIFO: 0 small, 1 main, 2 ghosts. */
static double s3_small = 0.1;

static void s3_use(uint32_t id)
{
    uses[id] = (uint8_t)(uses[id] < 3 ? uses[id] + 1 : 3);
}

static void s3_add(uint32_t id)
{
    uses[id] = 0;
    twoq_add(id);
}

static uint32_t s3_victim(void)
{
    for (;;) {
        bool small = list_n[0] >= s3_small * capacity || list_n[1] == 0;
        uint32_t id = list_oldest(small ? 0 : 1);

        if (id == NONE)
            id = list_oldest((small = !small) ? 0 : 1);
        if (uses[id] > 0) {
            uses[id] = (uint8_t)(small ? 0 : uses[id] - 1);
            list_move(1, id);
            continue;
        }
        list_cut(id);
        if (small)
            list_push(2, id);
        list_trim(2, capacity);
        return id;
    }
}

static void s3_half_open(void)
{
    s3_small = 0.5;
}

static void s3_open(void)
{
    s3_small = 0.1;
}

/* SIEVE */
static uint32_t hand;

static void sieve_open(void)
{
    hand = NONE;
}

static void sieve_use(uint32_t id)
{
    uses[id] = 1;
}

static void sieve_add(uint32_t id)
{
    uses[id] = 0;
    list_push(0, id);
}

static uint32_t sieve_victim(void)
{
    uint32_t id = hand == NONE ? prev[n_ids] : hand;

    while (id >= n_ids || uses[id] || busy(id)) {
        if (id < n_ids && !busy(id))
            uses[id] = 0;
        id = prev[id];
    }
    hand = prev[id] < n_ids ? prev[id] : NONE;
    list_cut(id);
    return id;
}

/* ARC: 0 and 1 seen once and more, 2 and 3 their ghosts; level is the target of list 0. */
static void arc_use(uint32_t id)
{
    list_move(1, id);
}

static void arc_want(uint32_t id)
{
    double a = list_n[2], b = list_n[3];

    if (list_of[id] == 2)
        level = fmin(capacity, level + fmax(1, b / a));
    else if (list_of[id] == 3)
        level = fmax(0, level - fmax(1, a / b));
}

static void arc_add(uint32_t id)
{
    if (list_of[id] == 2 || list_of[id] == 3)
        list_move(1, id);
    else
        list_push(0, id);
}

static uint32_t arc_victim(void)
{
    uint32_t from = list_n[0] > level ? 0 : 1, id = list_oldest(from);

    if (id == NONE)
        id = list_oldest(from = 1 - from);
    list_move(from + 2, id);
    list_trim(2, list_n[0] < capacity ? capacity - list_n[0] : 0);
    list_trim(3, 2.0 * capacity - list_n[0] - list_n[1] - list_n[2]);
    return id;
}

/* LRU-2: by the last use but one; what was used once goes first. */
static double lru2_value(uint32_t id)
{
    return last_but_one[id] > 0 ? last_but_one[id] : last[id] - 1e12;
}

static void lru2_see(uint32_t id)
{
    last_but_one[id] = last[id];
    last[id] = ++tick;
}

static void lru2_use(uint32_t id)
{
    lru2_see(id);
    heap_change(id, lru2_value(id));
}

static void lru2_add(uint32_t id)
{
    lru2_see(id);
    heap_add(id, lru2_value(id));
}

/* LFU with dynamic aging (GDSF where all sizes are one): level + uses, and LRU among equals. Uses
 * are remembered for ever, which no real cache can. The other form counts a use less, the deeper in
 * the chain the block lies. */
static double by_depth;

static void lfu_open(void)
{
    by_depth = 0;
}

static void lfu_depth_open(void)
{
    by_depth = 0.01;
}

static double lfu_value(uint32_t id)
{
    tick += 1e-9;
    return level + last[id] / (1 + by_depth * depth[id]) + tick;
}

static void lfu_order(uint32_t id)
{
    heap_change(id, lfu_value(id));
}

static void lfu_use(uint32_t id)
{
    last[id]++;
    lfu_order(id);
}

static void lfu_add(uint32_t id)
{
    last[id]++;
    heap_add(id, lfu_value(id));
}

static uint32_t lfu_victim(void)
{
    uint32_t id = heap_least();

    level = fmax(level, value[id]);
    return id;
}

/* Age against uses: an LRU list for each number of uses, 0 to 3; the victim is the one whose age,
 * over 1 + its uses, is largest. 4: ghosts. */
static void age_use(uint32_t id)
{
    uses[id] = (uint8_t)(uses[id] < 3 ? uses[id] + 1 : 3);
    last[id] = ++tick;
    list_move(uses[id], id);
}

static void age_order(uint32_t id)
{
    last[id] = tick;
    move_same(id);
}

static void age_add(uint32_t id)
{
    last[id] = ++tick;
    if (list_of[id] == 4) {
        age_use(id);
        return;
    }
    uses[id] = 0;
    list_push(0, id);
}

static uint32_t age_victim(void)
{
    uint32_t victim = NONE;
    double most = -1;

    for (uint32_t i = 0; i < 4; i++) {
        uint32_t id = list_oldest(i);
        double age = id == NONE ? -1 : (tick - last[id]) / (1 + i);

        if (age <= most && victim != NONE)
            continue;
        if (id != NONE) {
            most = age;
            victim = id;
        }
    }
    list_move(4, victim);
    list_trim(4, capacity);
    return victim;
}

/* Belady: knows the next reference to each block; may refuse to keep the new one. Each reference of
 * a block comes here once, as a use or as an add. */
static uint32_t **occurrence, *occurrences, *cursor;

static double belady_value(uint32_t id)
{
    uint32_t c = ++cursor[id];

    return c < occurrences[id] ? -(double)occurrence[id][c] : -1e12;
}

static void belady_open(void)
{
    occurrence = zeroed(n_ids, sizeof(*occurrence));
    occurrences = zeroed(n_ids, sizeof(*occurrences));
    cursor = zeroed(n_ids, sizeof(*cursor));
    for (int pass = 0; pass < 2; pass++) {
        uint32_t reference = 0;

        for (uint32_t i = 0; pass && i < n_ids; i++) {
            occurrence[i] = zeroed(occurrences[i], sizeof(**occurrence));
            occurrences[i] = 0;
        }
        for (uint32_t r = 0; r < n_requests; r++)
            for (uint32_t i = 0; i < requests[r].n; i++) {
                uint32_t id = requests[r].id[i];

                if (pass)
                    occurrence[id][occurrences[id]] = reference++;
                occurrences[id]++;
            }
    }
}

static void belady_close(void)
{
    for (uint32_t i = 0; i < n_ids; i++)
        free(occurrence[i]);
    free(occurrence);
    free(occurrences);
    free(cursor);
}

static void belady_use(uint32_t id)
{
    heap_change(id, belady_value(id));
}

static void belady_add(uint32_t id)
{
    heap_add(id, belady_value(id));
}

static uint32_t belady_victim(void)
{
    uint32_t id = heap[0];

    heap_cut(id);
    return id;
}

#endif
