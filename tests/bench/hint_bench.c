/* The table of hints alone, in one process: how many blocks a second can be stored and evicted in it, and how long a reader takes
 * for 8192 keys and for one, without a writer and beside one that stores and evicts a million blocks a second. False misses are
 * of blocks that stay, false hits of blocks that never were.
 * Usage: hint_bench [blocks...; 100000 1000000] */
#include "daemon/index/hints.h"
#include "tests/bench/key_batch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ROUNDS 400u
#define PACE 1000000u   /* blocks stored, and as many evicted, a second */
#define KEYS (1u << 20) /* of the writer, made before */

static uint8_t found[BATCH];
static uint8_t *churn_keys;

/* ---- the writer: stores the next block, and evicts the oldest ---- */

struct writer {
    struct hints *table;
    uint32_t window;        /* blocks of its own in the table */
    uint64_t pace, changes; /* 0: as fast as it can */
    _Atomic bool stop;
    uint64_t took_ns, cpu_ns, late; /* late: turns that began more than 1 ms late */
};

static const uint8_t *churn_key(uint64_t number)
{
    return churn_keys + number % KEYS * KEY_BYTES;
}

static void *write_run(void *arg)
{
    struct writer *w = arg;
    uint64_t start = now_ns();

    /* In turns of 100 us, as the loop's are. */
    while (!atomic_load_explicit(&w->stop, memory_order_relaxed)) {
        uint64_t due = w->pace ? (now_ns() - start) * w->pace / 1000000000u : w->changes + 1024;

        w->late += w->pace && due > w->changes + w->pace / 1000;
        for (; w->changes < due; w->changes++) {
            hints_set(w->table, churn_key(w->changes + w->window), 0, 1);
            hints_set(w->table, churn_key(w->changes), 1, 0);
        }
        if (w->pace) {
            struct timespec nap = {.tv_nsec = 100000};

            nanosleep(&nap, NULL);
        }
    }
    w->took_ns = now_ns() - start;
    w->cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    return NULL;
}

/* ---- the reader ---- */

struct times {
    uint64_t many[ROUNDS], one[ROUNDS], false_misses, false_hits, asked;
};

static void measure(const struct ucm_hint_view *v, uint64_t blocks, struct times *t)
{
    memset(t, 0, sizeof(*t));
    for (unsigned r = 0; r < ROUNDS; r++) {
        bool present = r % 4 != 3;
        uint64_t start;
        uint32_t hits;

        batch_draw(blocks, present);
        start = now_ns();
        hits = ucm_hint_find_many(v, keys, BATCH, false, found);
        t->many[r] = now_ns() - start;
        t->asked += BATCH;
        t->false_misses += present ? BATCH - hits : 0;
        t->false_hits += present ? 0 : hits;
        batch_draw(blocks, present);
        start = now_ns();
        for (uint32_t i = 0; i < 1024; i++)
            (void)ucm_hint_find_many(v, keys + (size_t)i * KEY_BYTES, 1, true, found + i);
        t->one[r] = (now_ns() - start) / 1024;
    }
    qsort(t->many, ROUNDS, sizeof(t->many[0]), by_value);
    qsort(t->one, ROUNDS, sizeof(t->one[0]), by_value);
}

static void times_show(const char *beside, const struct times *t)
{
    printf(
        "  %-28s 8192 keys: %6.1f us median, %6.1f tenth; one key: %4llu ns median, %4llu tenth; "
        "false misses %llu, false hits %llu of %llu keys\n",
        beside, (double)t->many[ROUNDS / 2] / 1e3, (double)t->many[ROUNDS / 10] / 1e3,
        (unsigned long long)t->one[ROUNDS / 2], (unsigned long long)t->one[ROUNDS / 10],
        (unsigned long long)t->false_misses, (unsigned long long)t->false_hits,
        (unsigned long long)t->asked);
}

/* ---- one size: half of the blocks stay, half come and go ---- */

static void must(bool right, const char *what)
{
    if (!right) {
        fprintf(stderr, "hint_bench: %s\n", what);
        exit(1);
    }
}

static struct hints *table_make(uint64_t stay, uint32_t window)
{
    struct hints *h;
    uint8_t key[KEY_BYTES];
    uint64_t start;
    int rc;

    must(hints_new(KEY_BYTES, stay + window, 0, &h) == 0, "no memory for the table");
    start = now_ns();
    while ((rc = hints_reserve(h)) > 0)
        ;
    must(rc == 0, "no memory for the table");
    printf("  %.1f MiB, reserved in %.1f ms", (double)hints_bytes(h) / (1 << 20),
           (double)(now_ns() - start) / 1e6);
    hints_begin(h);
    start = now_ns();
    for (uint64_t i = 0; i < stay; i++) {
        key_make(key, i);
        hints_set(h, key, 0, 1);
    }
    for (uint32_t i = 0; i < window; i++)
        hints_set(h, churn_key(i), 0, 1);
    printf(", filled at %.0f ns a block\n", (double)(now_ns() - start) / (double)(stay + window));
    return h;
}

static struct ucm_hint_view map(const struct hints *h)
{
    struct ucm_hint_view v = {0};
    void *p = mmap(NULL, hints_bytes(h), PROT_READ, MAP_SHARED | MAP_POPULATE, hints_fd(h), 0);

    must(p != MAP_FAILED && ucm_hint_open(p, hints_bytes(h), KEY_BYTES, &v), "no mapping");
    return v;
}

static void beside(struct writer *w, const char *name, const struct ucm_hint_view *v, uint64_t stay)
{
    struct times t;
    pthread_t thread;

    atomic_store(&w->stop, false);
    w->changes = w->late = 0;
    must(pthread_create(&thread, NULL, write_run, w) == 0, "no thread");
    measure(v, stay, &t);
    atomic_store(&w->stop, true);
    must(pthread_join(thread, NULL) == 0, "no thread");
    times_show(name, &t);
    printf("  %-28s %.2f million stored and as many evicted a second, %.0f ns of a processor each "
           "(%.2f million a "
           "second of it); turns more than 1 ms late: %llu\n",
           "", (double)w->changes / ((double)w->took_ns / 1e3),
           (double)w->cpu_ns / 2 / (double)w->changes,
           (double)w->changes / ((double)w->cpu_ns / 1e3), (unsigned long long)w->late);
    for (uint64_t i = 0; i < w->window; i++) { /* as they were before */
        hints_set(w->table, churn_key(w->changes + i), 1, 0);
    }
    for (uint64_t i = 0; i < w->window; i++)
        hints_set(w->table, churn_key(i), 0, 1);
}

static void size_measure(uint64_t blocks)
{
    uint32_t window = blocks / 2 < KEYS / 2 ? (uint32_t)(blocks / 2) : KEYS / 2;
    uint64_t stay = blocks - window;
    struct ucm_hint_view v;
    struct hints *h;
    struct writer w = {.window = window};
    struct times t;

    printf("%llu blocks, half of which come and go\n", (unsigned long long)blocks);
    h = table_make(stay, window);
    v = map(h);
    measure(&v, stay, &t);
    times_show("alone", &t);
    w.table = h;
    w.pace = PACE;
    beside(&w, "beside a million a second", &v, stay);
    w.pace = 0;
    beside(&w, "beside as many as can be", &v, stay);
    printf("  left out: %llu\n", (unsigned long long)hints_left_out(h));
    munmap((void *)(uintptr_t)v.header, hints_bytes(h));
    hints_free(h, UCM_HINT_ENDED);
}

int main(int argc, char **argv)
{
    static const uint64_t sizes[] = {100000, 1000000};

    churn_keys = malloc((size_t)KEYS * KEY_BYTES);
    must(churn_keys != NULL, "memory ran out");
    for (uint64_t i = 0; i < KEYS; i++)
        key_make(churn_keys + i * KEY_BYTES, i + (UINT64_C(1) << 50));
    for (int i = 1; i < argc; i++)
        size_measure(strtoull(argv[i], NULL, 10));
    for (unsigned i = 0; argc == 1 && i < 2; i++)
        size_measure(sizes[i]);
    free(churn_keys);
    return 0;
}
