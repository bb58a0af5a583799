/* The sequence numbers of a mapping: every order that the fences leave open, in which a writer's
 * and a reader's steps may take effect. And the functions of proto/memory/mapping.h, between
 * threads. */
/* Sanitizers: thread */
#include "proto/memory/mapping.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <string.h>

/* ---- a model ----
 *
 * A slot has two words. The daemon fills it twice; a reader learned the place after the first time.
 * Each process has a list of steps, and which must come before which. Every other order may happen,
 * by the processor or the compiler. The model runs all of them, and counts those in which the
 * reader believes wrong bytes. */

enum { GENERATION, WORD_0, WORD_1, VARIABLES };
#define TOLD 2 /* the sequence number of the bytes 1 1 */

struct step {
    int variable;
    int store;       /* what is written; -1: it is read */
    unsigned behind; /* bits of steps of the same process that take effect before */
};

#define STEPS 16

struct model {
    struct step step[STEPS]; /* writer's first, then the reader's */
    unsigned n, writer;
    /* The run. */
    int value[VARIABLES];
    int seen[STEPS];
    unsigned done, runs, wrong, right, misses;
};

static void judge(struct model *m)
{
    const int *seen = m->seen + m->writer; /* seq, words, seq */

    m->runs++;
    if (seen[0] != TOLD || seen[3] != TOLD)
        m->misses++;
    else if (seen[1] == 1 && seen[2] == 1)
        m->right++;
    else
        m->wrong++;
}

static void explore(struct model *m)
{
    if (m->done == (1u << m->n) - 1) {
        judge(m);
        return;
    }
    for (unsigned i = 0; i < m->n; i++) {
        const struct step *s = &m->step[i];
        int was = m->value[s->variable];

        if (m->done >> i & 1 || (m->done & s->behind) != s->behind)
            continue;
        if (s->store >= 0)
            m->value[s->variable] = s->store;
        else
            m->seen[i] = was;
        m->done |= 1u << i;
        explore(m);
        m->done &= ~(1u << i);
        m->value[s->variable] = was;
    }
}

static unsigned add(struct model *m, int variable, int store, unsigned behind)
{
    m->step[m->n] = (struct step){variable, store, behind};
    return 1u << m->n++;
}

enum { FENCE_RETRACT = 1, RELEASE = 2, ACQUIRE = 4, FENCE_END = 8, ALL = 15 };

/* The slot holds 1 1, is announced, and is filled with 2 2 and then with 3 3. ordered: which of the
 * four orderings hold. */
static struct model run(unsigned ordered)
{
    struct model m = {.value = {TOLD, 1, 1}};
    unsigned before = 0, odd, words, even, begin;

    for (int fill = 2; fill <= 3; fill++) {
        odd = add(&m, GENERATION, 2 * fill - 1, before);
        words = add(&m, WORD_0, fill, before | (ordered & FENCE_RETRACT ? odd : 0));
        words |= add(&m, WORD_1, fill, before | (ordered & FENCE_RETRACT ? odd : 0));
        /* One variable's values have an order in any case. */
        even = add(&m, GENERATION, 2 * fill, before | odd | (ordered & RELEASE ? words : 0));
        before |= odd | words | even;
    }
    m.writer = m.n;
    begin = add(&m, GENERATION, -1, 0);
    words = add(&m, WORD_0, -1, ordered & ACQUIRE ? begin : 0);
    words |= add(&m, WORD_1, -1, ordered & ACQUIRE ? begin : 0);
    (void)add(&m, GENERATION, -1, begin | (ordered & FENCE_END ? words : 0));
    explore(&m);
    return m;
}

Test(mapping_table, no_order_shows_other_bytes)
{
    struct model m = run(ALL);

    cr_expect_eq(m.wrong, 0u, "%u of %u", m.wrong, m.runs);
    cr_expect_gt(m.right, 0u);
    cr_expect_gt(m.misses, 0u);
    cr_expect_gt(m.runs, 1000u);
}

/* Release and acquire matter to a reader that knows the sequence number that is being published:
 * see the next test. */
Test(mapping_table, each_fence_is_needed)
{
    cr_expect_gt(run(ALL & ~FENCE_RETRACT).wrong, 0u);
    cr_expect_gt(run(ALL & ~FENCE_END).wrong, 0u);
}

/* The reader knows the place that will be filled: its bytes must be there when the sequence number
 * is. */
Test(mapping_table, release_and_acquire_are_needed)
{
    for (unsigned drop = 0; drop <= ACQUIRE; drop += 2) { /* none, RELEASE, ACQUIRE */
        struct model m = {.value = {1, 0, 0}};
        unsigned words, begin;

        words = add(&m, WORD_0, 1, 0);
        words |= add(&m, WORD_1, 1, 0);
        (void)add(&m, GENERATION, TOLD, drop == RELEASE ? 0 : words);
        m.writer = m.n;
        begin = add(&m, GENERATION, -1, 0);
        words = add(&m, WORD_0, -1, drop == ACQUIRE ? 0 : begin);
        words |= add(&m, WORD_1, -1, drop == ACQUIRE ? 0 : begin);
        (void)add(&m, GENERATION, -1, begin | words);
        explore(&m);
        if (drop == 0)
            cr_expect_eq(m.wrong, 0u);
        else
            cr_expect_gt(m.wrong, 0u);
        cr_expect_gt(m.right, 0u);
    }
}

/* ---- the functions ---- */

Test(mapping_table, what_is_never_right)
{
    _Atomic uint64_t seq = 0;

    cr_expect_not(ucm_mapping_begin(&seq, 0), "an entry that was never used");
    ucm_mapping_retract(&seq);
    cr_expect_eq(seq, 1u);
    cr_expect_not(ucm_mapping_begin(&seq, 1), "odd");
    ucm_mapping_publish(&seq, 10);
    cr_expect(ucm_mapping_begin(&seq, 10));
    cr_expect(ucm_mapping_end(&seq, 10));
    cr_expect_not(ucm_mapping_begin(&seq, 8));
    ucm_mapping_retract(&seq);
    ucm_mapping_retract(&seq);
    cr_expect_eq(seq, 11u);
    cr_expect_not(ucm_mapping_end(&seq, 10));
}

#define WORDS 64u
#define FILLS 2000u

static _Atomic uint64_t seq, told;
static _Atomic uint64_t words[WORDS]; /* what the writer's memcpy and the reader's would touch */

static void *writer(void *arg)
{
    (void)arg;
    for (uint64_t fill = 1; fill <= FILLS; fill++) {
        ucm_mapping_retract(&seq);
        for (unsigned i = 0; i < WORDS; i++)
            atomic_store_explicit(&words[i], 2 * fill, memory_order_relaxed);
        ucm_mapping_publish(&seq, 2 * fill);
        atomic_store_explicit(&told, 2 * fill, memory_order_release);
    }
    return NULL;
}

Test(mapping_table, a_reader_alongside_a_writer)
{
    uint64_t place, copy[WORDS], right = 0;
    pthread_t thread;

    cr_assert_eq(pthread_create(&thread, NULL, writer, NULL), 0);
    do {
        place = atomic_load_explicit(&told, memory_order_acquire);
        if (!ucm_mapping_begin(&seq, place))
            continue;
        for (unsigned i = 0; i < WORDS; i++)
            copy[i] = atomic_load_explicit(&words[i], memory_order_relaxed);
        if (!ucm_mapping_end(&seq, place))
            continue;
        right++;
        for (unsigned i = 0; i < WORDS; i++)
            cr_assert_eq(copy[i], place);
    } while (place != 2 * FILLS || right == 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_expect_gt(right, 0u);
}
