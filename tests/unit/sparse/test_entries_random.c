/* Random steps on kernels/entries against a model that searches for everything: it keeps no table,
 * no counts and no list of free entries. */
#include "kernels/entries/entries.h"

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define LAYER_HEADS 3u
#define NUMBERS 40u
#define ENTRIES 40u /* a step may want more, */
#define REQUESTS 4u
#define LIST 16u /* and a layer head may miss more */
#define NOBODY (-1)

struct place {
    bool used, published;
    uint32_t layer_head, number;
    uint64_t stamp;
    int request;
};

struct model {
    struct place place[ENTRIES];
    int floor[REQUESTS];
    uint64_t now;
    uint32_t hand, misses, unserved, flags, broken;
    struct {
        uint32_t layer_head, number;
        int entry, request;
    } miss[LIST];
    uint32_t lost[LIST];
};

static int find(const struct model *m, uint32_t layer_head, uint32_t number)
{
    for (int i = 0; i < (int)ENTRIES; i++)
        if (m->place[i].used && m->place[i].published && m->place[i].layer_head == layer_head &&
            m->place[i].number == number)
            return i;
    return -1;
}

static uint32_t listed(const struct model *m)
{
    return m->misses < LIST ? m->misses : LIST;
}

static bool wanted(const struct model *m, uint32_t layer_head, uint32_t number)
{
    for (uint32_t i = 0; i < listed(m); i++)
        if (m->miss[i].layer_head == layer_head && m->miss[i].number == number)
            return true;
    return false;
}

static int has(const struct model *m, int request)
{
    int n = 0;

    for (uint32_t i = 0; i < ENTRIES; i++)
        n += m->place[i].used && m->place[i].request == request;
    return n;
}

static void lose(struct model *m, uint32_t layer_head, uint32_t number, uint32_t flag)
{
    if (m->unserved < LIST)
        m->lost[m->unserved] = layer_head * NUMBERS + number;
    m->unserved++;
    m->flags |= UCM_ENTRIES_UNSERVED | flag;
}

static void model_want(struct model *m, uint32_t layer_head, uint32_t number, int request)
{
    int at = find(m, layer_head, number);

    if (at >= 0) {
        m->place[at].stamp = m->now;
        if (m->place[at].request == NOBODY)
            m->place[at].request = request;
    } else if (!wanted(m, layer_head, number)) {
        if (m->misses < LIST) {
            m->miss[m->misses].layer_head = layer_head, m->miss[m->misses].number = number;
            m->miss[m->misses].entry = -1, m->miss[m->misses].request = request;
        } else {
            lose(m, layer_head, number, UCM_ENTRIES_LIST_FULL);
        }
        m->misses++;
    }
}

static uint64_t age_of(const struct place *p)
{
    return p->used ? p->stamp : 0;
}

static int model_find_entry(struct model *m, int request)
{
    uint32_t groups = (ENTRIES + 31) / 32;

    for (uint32_t turn = 0; turn < 2 * groups; turn++) {
        uint32_t group = m->hand++ % groups;
        int best = -1;

        for (uint32_t i = 32 * group; i < 32 * group + 32 && i < ENTRIES; i++) {
            const struct place *p = &m->place[i];
            bool kept = p->used && p->request != NOBODY && p->request != request &&
                        has(m, p->request) <= m->floor[p->request];

            if ((p->used && p->stamp == m->now) || (kept && turn < groups))
                continue;
            if (best < 0 || age_of(p) < age_of(&m->place[best]))
                best = (int)i;
        }
        m->broken += best >= 0 && turn >= groups;
        if (best >= 0)
            return best;
    }
    return -1;
}

static void model_take(struct model *m)
{
    for (uint32_t i = 0; i < listed(m); i++) {
        if (m->miss[i].entry >= 0)
            continue;
        m->miss[i].entry = model_find_entry(m, m->miss[i].request);
        if (m->miss[i].entry < 0)
            m->flags |= UCM_ENTRIES_FULL;
        else
            m->place[m->miss[i].entry] = (struct place){.used = true,
                                                        .layer_head = m->miss[i].layer_head,
                                                        .number = m->miss[i].number,
                                                        .stamp = m->now,
                                                        .request = m->miss[i].request};
    }
}

static void model_publish(struct model *m, const uint8_t *arrived)
{
    for (uint32_t i = 0; i < listed(m); i++) {
        int entry = m->miss[i].entry;

        if (entry >= 0 && arrived[i])
            m->place[entry].published = true;
        else if (entry >= 0)
            m->place[entry].used = false;
        if (entry < 0 || !arrived[i])
            lose(m, m->miss[i].layer_head, m->miss[i].number, 0);
    }
    m->misses = 0;
}

static void compare(const struct model *m, const struct ucm_entries *s)
{
    char why[UCM_ENTRIES_WHY] = "";

    cr_assert_eq(ucm_entries_verify(s, why), 0, "%s", why);
    for (uint32_t k = 0; k < LAYER_HEADS * NUMBERS; k++) {
        int at = find(m, k / NUMBERS, k % NUMBERS);

        if (at < 0 && wanted(m, k / NUMBERS, k % NUMBERS))
            at = UCM_ENTRIES_WANTED;
        cr_assert_eq(s->entry_of[k], at);
    }
    for (uint32_t i = 0; i < ENTRIES; i++)
        cr_assert_eq(s->stamp[i], age_of(&m->place[i]));
    for (uint32_t r = 0; r < REQUESTS; r++)
        cr_assert_eq((int)s->held[r], has(m, (int)r));
    cr_assert_eq(s->step->hand, m->hand);
    cr_assert_eq(s->step->flags, m->flags);
    cr_assert_eq(s->step->floors_broken, m->broken);
    cr_assert_eq(s->step->unserved, m->unserved);
    for (uint32_t i = 0; i < m->unserved && i < LIST; i++)
        cr_assert_eq(s->unserved[i], m->lost[i]);
}

/* ---- the operations, on both ---- */

static void layer_head_of_both(struct model *m, struct ucm_entries *s, unsigned *seed,
                               uint32_t layer_head)
{
    uint8_t arrived[LIST];

    for (uint32_t n = (uint32_t)rand_r(seed) % 40; n > 0; n--) {
        uint32_t number = (uint32_t)rand_r(seed) % (rand_r(seed) % 3 ? 20 : NUMBERS);
        int request = rand_r(seed) % (int)REQUESTS;

        model_want(m, layer_head, number, request);
        ucm_entries_want(s, ucm_entries_key(&s->shape, layer_head, number), (uint32_t)request);
    }
    if (rand_r(seed) % 8 == 0)
        compare(m, s);
    model_take(m);
    ucm_entries_take(s);
    compare(m, s);
    for (uint32_t i = 0; i < LIST; i++)
        arrived[i] = rand_r(seed) % 12 != 0;
    model_publish(m, arrived);
    ucm_entries_publish(s, arrived);
    compare(m, s);
}

static void between_steps(struct model *m, struct ucm_entries *s, unsigned *seed)
{
    int request = rand_r(seed) % (int)REQUESTS;

    if (rand_r(seed) % 4 == 0) { /* it leaves, and enters again */
        int floor = rand_r(seed) % 30, sum = floor;

        for (uint32_t i = 0; i < ENTRIES; i++)
            if (m->place[i].request == request)
                m->place[i].request = NOBODY;
        m->floor[request] = 0;
        ucm_entries_leave(s, (uint32_t)request);
        for (uint32_t r = 0; r < REQUESTS; r++)
            sum += m->floor[r];
        cr_assert_eq(ucm_entries_enter(s, (uint32_t)request, (uint32_t)floor) == 0,
                     sum <= (int)ENTRIES);
        if (sum <= (int)ENTRIES)
            m->floor[request] = floor;
    }
    if (rand_r(seed) % 3 == 0) {
        uint32_t number = (uint32_t)rand_r(seed) % NUMBERS;

        for (uint32_t i = 0; i < ENTRIES; i++)
            if (m->place[i].number == number)
                m->place[i].used = false;
        ucm_entries_forget(s, &number, 1);
    }
    m->now += rand_r(seed) % 4 != 0; /* or a replay */
    ucm_entries_begin(s, m->now);
    m->unserved = m->flags = 0;
    compare(m, s);
}

/* -> what was seen of a step's flags. */
static uint32_t random_steps(unsigned seed, uint32_t steps, uint32_t *broken)
{
    uint32_t flags = 0;
    struct ucm_entries_shape shape = {.layer_heads = LAYER_HEADS,
                                      .numbers = NUMBERS,
                                      .entries = ENTRIES,
                                      .requests = REQUESTS,
                                      .misses = LIST};
    void *memory = aligned_alloc(64, ucm_entries_bytes(&shape));
    struct model m = {.now = 1};
    struct ucm_entries s;

    memset(memory, 0xa5, ucm_entries_bytes(&shape));
    ucm_entries_layout(&s, &shape, memory);
    ucm_entries_init(&s);
    for (uint32_t i = 0; i < ENTRIES; i++)
        m.place[i].request = NOBODY;
    ucm_entries_begin(&s, 1);
    for (uint32_t step = 0; step < steps; step++) {
        for (uint32_t layer_head = 0; layer_head < LAYER_HEADS; layer_head++)
            layer_head_of_both(&m, &s, &seed, layer_head);
        flags |= s.step->flags;
        *broken += s.step->floors_broken;
        between_steps(&m, &s, &seed);
    }
    free(memory);
    return flags;
}

Test(entries_random, as_a_model_that_searches_for_everything)
{
    uint32_t flags = 0, broken = 0;

    for (unsigned seed = 1; seed <= 10; seed++)
        flags |= random_steps(seed, 60, &broken);
    cr_assert_eq(flags, UCM_ENTRIES_UNSERVED | UCM_ENTRIES_LIST_FULL | UCM_ENTRIES_FULL, "%x",
                 flags);
    cr_assert_gt(broken, 0);
}
