/* Mappings of the client library that several threads and processes read. No byte is wrong, and
 * nobody waits for readers. */
/* Sanitizers: thread */
#include "tests/unit/client/client_mapping_rig.h"

#include <sys/wait.h>

TestSuite(client_mapping_threads, .init = setup, .fini = mapping_down, .timeout = 30);

static atomic_bool stop;
static atomic_uint good, missed;

/* Set where a writer gives a slot a new fill, seq / 2, with each sequence number. */
static bool refilled;

static void *reader(void *arg)
{
    uint8_t bytes[MAPPING_SLOT_BYTES];
    uint32_t block = (uint32_t)(uintptr_t)arg;

    while (!atomic_load(&stop)) {
        struct ucm_place place;
        int r;

        pthread_mutex_lock(&rig.fake.lock);
        place = places[block];
        pthread_mutex_unlock(&rig.fake.lock);
        if (refilled)
            place.seq = atomic_load(mapping_seq(block)) & ~UINT64_C(1);
        r = ucm_mapping_read(mapping, &place, 0, sizeof bytes, bytes);
        cr_assert(r == 0 || r == UCM_MAPPING_MISS);
        for (size_t i = 0; r == 0 && i < sizeof bytes; i++)
            cr_assert_eq(bytes[i], refilled ? (uint8_t)(place.seq / 2) : block, "wrong bytes");
        atomic_fetch_add(r == 0 ? &good : &missed, 1);
    }
    return NULL;
}

/* As the daemon does when it reuses a slot. */
Test(client_mapping_threads, a_slot_that_is_reused_under_a_reader_is_a_miss)
{
    pthread_t threads[2];

    open_and_ref(0);
    refilled = true;
    for (uint64_t i = 0; i < 2; i++) {
        uint64_t seq = 2 * (i + 1);

        ucm_mapping_retract(mapping_seq((uint32_t)i));
        memset(mapping_slot((uint32_t)i), (int)(seq / 2), MAPPING_SLOT_BYTES);
        ucm_mapping_publish(mapping_seq((uint32_t)i), seq);
        cr_assert_eq(pthread_create(&threads[i], NULL, reader, (void *)(uintptr_t)i), 0);
    }
    for (uint64_t round = 2; round < 5000 || atomic_load(&good) < 100; round++)
        for (uint32_t b = 0; b < 2; b++) {
            ucm_mapping_retract(mapping_seq(b));
            memset(mapping_slot(b), (int)(uint8_t)round, MAPPING_SLOT_BYTES);
            ucm_mapping_publish(mapping_seq(b), 2 * round);
        }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    cr_expect_gt(atomic_load(&good), 0u);
}

/* Breaks, revocations and references while others read. */
Test(client_mapping_threads, ranges_come_and_go_under_readers)
{
    struct ucm_place fresh[MAPPING_BLOCKS];
    struct ucm_mapping_ref p = {.sequence = sequence, .n = MAPPING_BLOCKS, .places = fresh};
    pthread_t threads[3];

    open_and_ref(0);
    for (uintptr_t i = 0; i < 3; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, reader, (void *)(i * 20)), 0);
    for (uint32_t round = 0; round < 60; round++) {
        uint32_t slab = round % MAPPING_SLABS;

        if (round % 10 == 9)
            fake_hang_up(&rig.fake);
        else
            mapping_ask_back(&slab, 1);
        if (ucm_mapping_ref(mapping, &p, -1, NULL) != 0)
            continue;
        pthread_mutex_lock(&rig.fake.lock);
        memcpy(places, fresh, sizeof fresh);
        pthread_mutex_unlock(&rig.fake.lock);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    cr_expect_gt(atomic_load(&good), 0u);
}

static void *restless_reader(void *arg)
{
    uint8_t bytes[MAPPING_SLOT_BYTES];

    while (!atomic_load(&stop))
        (void)ucm_mapping_read(mapping, arg, 0, sizeof bytes, bytes);
    return NULL;
}

#define RESTLESS 16

/* A thread reads at every moment, and yet a slab that is wanted back is unmapped. Otherwise this
 * test does not end. */
Test(client_mapping_threads, many_readers_starve_nobody)
{
    uint32_t slab = MAPPING_SLABS - 1;
    struct ucm_place read[RESTLESS]; /* a reference writes into `places` */
    pthread_t threads[RESTLESS];

    open_and_ref(0);
    memcpy(read, places, sizeof read);
    for (uintptr_t i = 0; i < RESTLESS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, restless_reader, &read[i]), 0);
    for (int i = 0; i < 10; i++) {
        mapping_ask_back(&slab, 1);
        cr_assert_eq(ref(0, MAPPING_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    }
    atomic_store(&stop, true);
    for (int i = 0; i < RESTLESS; i++)
        pthread_join(threads[i], NULL);
}

Test(client_mapping_threads, a_forked_child_reads_misses)
{
    int status = 0;
    pid_t child;

    open_and_ref(0);
    child = fork();
    if (child == 0) {
        uint8_t byte;

        _exit(ucm_mapping_read(mapping, &places[0], 0, 1, &byte) == UCM_MAPPING_MISS ? 0 : 1);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    cr_expect_eq(read_block(0), 0);
}

static void *ref_beside_close(void *arg)
{
    struct ucm_place fresh[MAPPING_BLOCKS];
    struct ucm_mapping_ref p = {.sequence = sequence, .n = MAPPING_BLOCKS, .places = fresh};

    *(int *)arg = ucm_mapping_ref(mapping, &p, -1, NULL);
    return NULL;
}

Test(client_mapping_threads, one_that_is_closed_while_a_thread_refs)
{
    pthread_t thread;
    int r = 0;

    open_mapping(0);
    WSET(slow_ms, 100);
    cr_assert_eq(pthread_create(&thread, NULL, ref_beside_close, &r), 0);
    while (WGET(refs) == 0)
        fake_sleep_ms(1);
    ucm_mapping_close(mapping);
    pthread_join(thread, NULL);
    cr_expect_lt(r, 0);
    WSET(slow_ms, 0);
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(WGET(opens), 1u);
    cr_expect_eq(WGET(closes), 1u);
}
