/* The lookup table: which set entries a reader finds, while a writer runs or dies, and in memory of
 * a hostile daemon. test_lookup_table_model.c has all orders of a few steps. */
/* Sanitizers: thread */
#include "daemon/lookup_table/table.h"
#include "tests/unit/random.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define KEY 32u

static void key_make(uint8_t *key, uint64_t number)
{
    memset(key, 0, KEY);
    memcpy(key, &number, sizeof(number));
}

static struct lookup_table *h;         /* the table, */
static struct ucm_lookup_table_view v; /* and a reader's view of it */

/* One that is being filled. */
static void open_table(uint64_t blocks)
{
    void *p;
    int rc;

    cr_assert_eq(lookup_table_new(KEY, blocks, 7, &h), 0);
    while ((rc = lookup_table_reserve(h)) > 0)
        ;
    cr_assert_eq(rc, 0);
    p = mmap(NULL, lookup_table_bytes(h), PROT_READ, MAP_SHARED, lookup_table_fd(h), 0);
    cr_assert_neq(p, MAP_FAILED);
    cr_assert(ucm_lookup_table_view_open(p, lookup_table_bytes(h), KEY, &v));
}

static void open_live(uint64_t blocks)
{
    open_table(blocks);
    lookup_table_begin(h);
}

static void close_table(void)
{
    if (v.header)
        munmap((void *)(uintptr_t)v.header, ucm_lookup_table_bytes(v.mask + 1));
    if (h)
        lookup_table_free(h, UCM_LOOKUP_TABLE_ENDED);
    v.header = NULL;
    h = NULL;
}

TestSuite(lookup_table, .fini = close_table);

static void set(uint64_t number, uint8_t was, uint8_t is)
{
    uint8_t key[KEY];

    key_make(key, number);
    lookup_table_set(h, key, was, is);
}

static uint8_t find(uint64_t number)
{
    uint8_t key[KEY], found;

    key_make(key, number);
    (void)ucm_lookup_table_find_many(&v, key, 1, true, &found);
    return found;
}

/* ---- what is set is found ---- */

#define NUMBERS 4096u

Test(lookup_table, a_reader_finds_what_was_set)
{
    static uint8_t tiers[NUMBERS];
    uint64_t state = 1, entries = 0;

    open_live(NUMBERS / 2); /* up to six sevenths full */
    for (unsigned i = 0; i < 200000; i++) {
        uint64_t r = random_next(&state);
        uint32_t n = (uint32_t)(r >> 8) % NUMBERS;
        uint8_t is = (uint8_t)(r & 3);

        if (is != tiers[n])
            set(n, tiers[n], is);
        tiers[n] = is;
        n = (uint32_t)(r >> 40) % NUMBERS;
        if (lookup_table_left_out(h) == 0)
            cr_assert_eq(find(n), tiers[n]);
        else
            cr_assert(find(n) == tiers[n] || find(n) == 0);
    }
    for (uint32_t n = 0; n < NUMBERS; n++)
        entries += find(n) != 0;
    cr_expect_eq(entries, lookup_table_entries(h));
    for (uint32_t n = 0; n < NUMBERS; n++)
        if (tiers[n] != 0)
            set(n, tiers[n], 0);
    cr_expect_eq(lookup_table_entries(h), 0u);
    cr_expect_eq(lookup_table_left_out(h), 0u);
    for (uint32_t n = 0; n < NUMBERS; n++)
        cr_assert_eq(find(n), 0u);
}

Test(lookup_table, of_many_keys_each_or_the_prefix)
{
    enum { N = 1000, GAP = 777 };
    static uint8_t keys[N * KEY], found[N + 1];

    open_live(N);
    for (uint32_t i = 0; i < N; i++) {
        key_make(keys + i * KEY, i);
        if (i != GAP)
            set(i, 0, 1 + i % 3);
    }
    for (uint32_t n = 1; n <= N; n = n < 100 ? n + 1 : n + 100) {
        for (unsigned prefix = 0; prefix < 2; prefix++) {
            uint32_t most = prefix ? GAP : n - 1;

            memset(found, 9, sizeof(found));
            cr_expect_eq(ucm_lookup_table_find_many(&v, keys, n, prefix, found),
                         n > GAP ? most : n);
            for (uint32_t i = 0; i < n; i++)
                cr_assert_eq(found[i], i < GAP || (i > GAP && !prefix) ? 1 + i % 3 : 0);
            cr_assert_eq(found[n], 9u);
        }
    }
}

/* A reader may take what it misses for a miss only while none is left out. */
Test(lookup_table, a_large_table_has_room_for_each_until_it_is_crowded)
{
    uint64_t n = 0;

    open_live(1000000);
    while (!lookup_table_crowded(h))
        set(n++, 0, 1);
    cr_expect_gt(n, 1050000u);
    cr_expect_eq(lookup_table_left_out(h), 0u);
    cr_expect_eq(lookup_table_entries(h), n);
    for (uint64_t i = 0; i < n; i += 97)
        cr_assert_eq(find(i), 1u);
    for (uint64_t i = 0; i < n; i += 97)
        cr_assert_eq(find(n + i), 0u);
}

/* More entries than there is room for: none is lost silently. */
Test(lookup_table, what_has_no_room_is_counted)
{
    uint32_t room = UCM_LOOKUP_TABLE_MIN_BUCKETS * UCM_LOOKUP_TABLE_ENTRIES, found = 0;

    open_live(1);
    for (uint32_t n = 0; n < 2 * room; n++)
        set(n, 0, 1);
    for (uint32_t n = 0; n < 2 * room; n++)
        found += find(n) != 0;
    cr_expect(lookup_table_crowded(h));
    cr_expect_eq(found, lookup_table_entries(h));
    cr_expect_eq(found + atomic_load(&v.header->left_out), 2 * room);
    cr_expect_gt(found, room * 9 / 10);
    for (uint32_t n = 0; n < 2 * room; n++)
        set(n, 1, 0);
    cr_expect_eq(lookup_table_entries(h), 0u);
    cr_expect_eq(atomic_load(&v.header->left_out), 0u);
}

Test(lookup_table, states_and_beats_are_seen_after_the_table_is_gone)
{

    open_table(1);
    cr_expect_eq(atomic_load(&v.header->state), UCM_LOOKUP_TABLE_FILLING);
    cr_expect_eq(atomic_load(&v.header->beat_ms), 7u);
    lookup_table_begin(h);
    cr_expect_eq(atomic_load(&v.header->state), UCM_LOOKUP_TABLE_LIVE);
    lookup_table_beat(h, 1234);
    cr_expect_eq(atomic_load(&v.header->beat_ms), 1234u);
    set(5, 0, 2);
    lookup_table_free(h, UCM_LOOKUP_TABLE_SUPERSEDED);
    h = NULL;
    cr_expect_eq(atomic_load(&v.header->state), UCM_LOOKUP_TABLE_SUPERSEDED);
    cr_expect_eq(find(5), 2u);
}

/* ---- a hostile client ---- */

Test(lookup_table, nobody_else_writes)
{
    char path[64];
    void *p;
    int fd;

    open_table(1);
    cr_expect_eq(fcntl(lookup_table_fd(h), F_GETFL) & O_ACCMODE, O_RDONLY);
    cr_expect_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, lookup_table_fd(h), 0),
                 MAP_FAILED);
    p = mmap(NULL, lookup_table_bytes(h), PROT_READ, MAP_SHARED, lookup_table_fd(h), 0);
    cr_assert_neq(p, MAP_FAILED);
    cr_expect_eq(mprotect(p, 4096, PROT_READ | PROT_WRITE), -1);
    cr_expect_eq(ftruncate(lookup_table_fd(h), 0), -1);
    cr_expect_eq(pwrite(lookup_table_fd(h), "x", 1, 0), -1);
    /* The file's mode does not stop the superuser, but the memfd seals do. */
    snprintf(path, sizeof(path), "/proc/self/fd/%d", lookup_table_fd(h));
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        cr_expect_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
        cr_expect_eq(pwrite(fd, "x", 1, 0), -1);
        cr_expect_eq(ftruncate(fd, 0), -1);
        cr_expect_eq(ftruncate(fd, 1 << 20), -1);
        cr_expect_eq(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
        cr_expect_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
        close(fd);
    }
    munmap(p, lookup_table_bytes(h));
}

/* ---- a hostile daemon ---- */

Test(lookup_table, a_header_that_does_not_fit_is_refused)
{
    static _Alignas(64) uint8_t memory[UCM_LOOKUP_TABLE_HEADER_BYTES + 64 * 64];
    struct ucm_lookup_table_header *header = (void *)memory;
    struct ucm_lookup_table_view view;

    memset(memory, 0, sizeof(memory));
    cr_expect_not(ucm_lookup_table_view_open(memory, sizeof(memory), KEY, &view));
    memcpy(header->magic, UCM_LOOKUP_TABLE_MAGIC, sizeof(header->magic));
    header->version = UCM_LOOKUP_TABLE_VERSION;
    header->key_bytes = KEY;
    header->buckets = 64;
    cr_expect(ucm_lookup_table_view_open(memory, sizeof(memory), KEY, &view));
    cr_expect_not(ucm_lookup_table_view_open(memory, sizeof(memory), 16, &view));
    cr_expect_not(ucm_lookup_table_view_open(memory, sizeof(memory) - 1, KEY, &view));
    cr_expect_not(ucm_lookup_table_view_open(memory, 10, KEY, &view));
    for (unsigned shift = 0; shift < 64; shift++) {
        header->buckets = UINT64_C(1) << shift;
        cr_expect_eq(ucm_lookup_table_view_open(memory, sizeof(memory), KEY, &view), shift == 6);
    }
    header->buckets = 63;
    cr_expect_not(
        ucm_lookup_table_view_open(memory, UCM_LOOKUP_TABLE_HEADER_BYTES + 63 * 64, KEY, &view));
    header->buckets = 64;
    header->version = UCM_LOOKUP_TABLE_VERSION + 1;
    cr_expect_not(ucm_lookup_table_view_open(memory, sizeof(memory), KEY, &view));
}

/* ---- alongside a writer ---- */

#define STABLE                                                                                     \
    200u /* numbers 0 to 199 stay; those up to twice as many come and go; others never were */

static void *churn(void *arg)
{
    uint64_t state = 3;

    for (unsigned i = 0; i < 100000; i++) {
        uint32_t n = STABLE + (uint32_t)(random_next(&state) % STABLE);

        set(n, 0, 1 + n % 3);
        set(n % STABLE, 1, 1 + (uint8_t)(state >> 33) % 3); /* its tier alone */
        set(n, 1, 0);
    }
    return arg;
}

static void look(void)
{
    uint8_t moving;

    for (uint32_t n = 0; n < STABLE; n++) {
        cr_assert_neq(find(n), 0u, "%u is there", n);
        moving = find(STABLE + n);
        cr_assert(moving == 0 || moving == 1 + (STABLE + n) % 3);
        cr_assert_eq(find(2 * STABLE + n), 0u, "%u never was", n);
    }
}

static void open_churned(void)
{
    open_live(1); /* 448 entries: many lie in a bucket after their own */
    for (uint32_t n = 0; n < STABLE; n++)
        set(n, 0, 1);
}

Test(lookup_table, a_reader_alongside_a_writer)
{
    pthread_t thread;

    open_churned();
    cr_assert_eq(pthread_create(&thread, NULL, churn, NULL), 0);
    for (unsigned i = 0; i < 20; i++)
        look();
    cr_assert_eq(pthread_join(thread, NULL), 0);
    look();
}
