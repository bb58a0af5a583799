/* Memory that the daemon holds when nobody uses it. Each round has the same peak. After it, the
 * memory goes back to the system, and nothing adds up over rounds. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KEYS 16384u /* the most of one request */
#define BATCHES 64u
#define CROWD 64
#define ROUNDS 3

#define SLACK_BYTES (8u << 20)

static struct host host;
static struct worker worker;

static void setup(void)
{
    host = (struct host){.nvme = true,
                         .sets = {"arena.size=32MiB", "nvme.size=64MiB", "nvme.segment=2MiB",
                                  "request.handshake=60s"}};
    host_start(&host);
    worker_open(&worker, &host,
                &(struct worker_options){.layers = 1, .layer_bytes = 512, .blocks = KEYS});
    arena_wait(worker.client);
}

static void teardown(void)
{
    worker_close(&worker);
    host_remove(&host);
}

TestSuite(memory, .init = setup, .fini = teardown, .timeout = 300);

/* Anonymous memory: without the worker's and the binary's. */
static size_t daemon_bytes(void)
{
    char path[64], line[128];
    unsigned long kib = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)host.pid);
    f = fopen(path, "r");
    cr_assert(f);
    while (fgets(line, sizeof(line), f))
        if (sscanf(line, "RssAnon: %lu", &kib) == 1)
            break;
    fclose(f);
    cr_assert_gt(kib, 0u);
    return (size_t)kib << 10;
}

/* Connections that each send most of a frame, and go in the middle of it. One that came last stays,
 * so that memory of the others lies below memory in use. */
static void crowd(void)
{
    static unsigned stay;
    static uint8_t frame[(1 << 20) - 64];
    int fds[CROWD];

    frame[1] = 0x10; /* a body of 1 MiB: big-endian */
    for (int i = 0; i < CROWD; i++) {
        fds[i] = raw_connect(&host);
        raw_hello(fds[i]);
        cr_assert(raw_write(fds[i], frame, sizeof(frame)));
    }
    raw_hello(raw_connect(&host));
    stay++;
    for (int i = 0; i < CROWD; i++)
        close(fds[i]);
    for (uint64_t end = now_ms() + 20000; metric(worker.client, "connections") > 1 + stay;
         sleep_ms(10))
        cr_assert_lt(now_ms(), end);
}

/* `most` loads at once, each of as many keys as a request may have. */
static void batches(unsigned most)
{
    static uint8_t keys[KEYS * WORKER_KEY_BYTES];
    static uint32_t blocks[KEYS];
    struct ucm_transfer t = {.keys = keys, .blocks = blocks, .n_keys = KEYS};
    struct ucm_task *tasks[BATCHES];
    struct ucm_result result;
    unsigned n = 0;

    keys_make(1, KEYS, keys);
    for (uint32_t i = 0; i < KEYS; i++)
        blocks[i] = i;
    cr_assert_eq(worker_dump(&worker, keys, blocks, KEYS, NULL), 0, "%s", ucm_errmsg());
    while (n < most && ucm_load(worker.region, &t, -1, &tasks[n]) == 0)
        n++;
    cr_assert_eq(n, most, "%s", ucm_errmsg());
    for (unsigned i = 0; i < n; i++) {
        cr_expect_eq(ucm_task_wait(tasks[i], -1, &result), 0, "%s", ucm_errmsg());
        ucm_task_free(tasks[i]);
    }
}

Test(memory, a_peak_goes_back_to_the_system)
{
    size_t idle, once, again;

    batches(1); /* the index and the arena have their size from now on */
    idle = daemon_bytes();
    for (int i = 0; i < ROUNDS; i++) {
        crowd();
        batches(BATCHES);
    }
    once = daemon_bytes();
    for (int i = 0; i < 2 * ROUNDS; i++) {
        crowd();
        batches(BATCHES);
    }
    again = daemon_bytes();
    fprintf(stderr, "idle %zu KiB, after %d rounds %zu KiB, after %d %zu KiB\n", idle >> 10, ROUNDS,
            once >> 10, 3 * ROUNDS, again >> 10);
    cr_expect_leq(once, idle + SLACK_BYTES, "memory is kept");
    cr_expect_leq(again, once + SLACK_BYTES, "memory leaks");
}
