/* Requests larger than DRAM: the work of making room grows with their keys and no faster, and a
 * client alongside them gets on. Work is counted in blocks looked at for eviction, not in seconds.
 */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX 16384u   /* keys of one request */
#define SLOTS 8192u  /* of 4 KiB in 32 MiB */
#define BIG 8u       /* requests at once */
#define OTHER 100000 /* first key of the client alongside them */

/* Blocks looked at for each key that was asked for. */
#define LOOKS 8u

static struct host host;
static struct worker w, beside;
static uint8_t keys[MAX * WORKER_KEY_BYTES], status[MAX];
static uint32_t blocks[BIG * MAX];

/* For that many requests at once, each into blocks of its own. */
static void open_host(uint32_t requests)
{
    struct worker_options options = {.layers = 1, .layer_bytes = 512, .blocks = requests * MAX};

    host = (struct host){.nvme = true, .sets = {"arena.size=32MiB"}};
    host_start(&host);
    worker_open(&w, &host, &options);
    options.blocks = 1;
    worker_open(&beside, &host, &options);
    arena_wait(w.client);
    for (uint32_t i = 0; i < BIG * MAX; i++)
        blocks[i] = i;
    keys_make(0, MAX, keys);
}

static void close_host(void)
{
    worker_close(&beside);
    worker_close(&w);
    host_remove(&host);
}

TestSuite(room_work, .fini = close_host, .timeout = 180);

static double cpu_seconds(void)
{
    char path[64], line[1024];
    unsigned long user = 0, system = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)host.pid);
    f = fopen(path, "r");
    cr_assert(f && fgets(line, sizeof(line), f));
    fclose(f);
    cr_assert_eq(sscanf(strrchr(line, ')'), ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
                        &user, &system),
                 2);
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

static uint64_t looks(void)
{
    return metric(w.client, "arena_candidates");
}

/* `n` keys on NVMe, the last of them in DRAM too. */
static void store(uint64_t first, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += SLOTS / 4) {
        uint64_t written = metric(w.client, "nvme_writes");
        uint32_t now = n - at < SLOTS / 4 ? n - at : SLOTS / 4;

        worker_store(&w, first + at, now);
        cr_assert(metric_reaches(w.client, "nvme_writes", written + now, 20000));
    }
}

static void expect_loaded(const uint8_t *result, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        cr_assert_eq(result[i], UCM_BLOCK_IS_OK, "block %u: status %u", i, result[i]);
}

static double one_load_ms(uint64_t number)
{
    uint8_t key[WORKER_KEY_BYTES];
    struct timespec a, b;

    key_make(number, key);
    clock_gettime(CLOCK_MONOTONIC, &a);
    cr_assert_eq(worker_load(&beside, key, blocks, 1, status), 0);
    clock_gettime(CLOCK_MONOTONIC, &b);
    cr_assert_eq(status[0], UCM_BLOCK_IS_OK);
    return (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6;
}

/* One request after the other: twice the keys, twice the looks. */
Test(room_work, a_load_larger_than_dram)
{
    open_host(1);
    store(0, MAX);
    for (uint32_t n = MAX; n >= MAX / 4; n /= 2) {
        uint64_t before = looks();
        double cpu = cpu_seconds();

        cr_assert_eq(worker_load(&w, keys, blocks, n, status), 0, "%s", ucm_errmsg());
        expect_loaded(status, n);
        printf("load of %u: %llu looks, %.2f s CPU\n", n, (unsigned long long)(looks() - before),
               cpu_seconds() - cpu);
        cr_expect_leq(looks() - before, (uint64_t)LOOKS * n);
    }
}

/* The dump is written back while it is stored. A search meets blocks that wait for that, and must
 * not meet them again and again. */
Test(room_work, a_dump_larger_than_dram)
{
    open_host(1);
    for (uint32_t n = MAX / 4, first = 0; n <= MAX; first += n, n *= 2) {
        uint64_t before = looks();
        double cpu = cpu_seconds();

        keys_make(first, n, keys);
        cr_assert_eq(worker_dump(&w, keys, blocks, n, status), 0, "%s", ucm_errmsg());
        printf("dump of %u: %llu looks, %.2f s CPU\n", n, (unsigned long long)(looks() - before),
               cpu_seconds() - cpu);
        cr_expect_leq(looks() - before, (uint64_t)LOOKS * n);
    }
}

static void beside_requests(uint32_t n)
{
    struct ucm_task *task[BIG];
    struct ucm_result result;
    uint64_t before;
    double idle = 0, worst = 0, sum = 0, cpu;
    uint32_t loads = 0;
    int rc;

    for (uint64_t i = 0; i < 64; i++)
        idle += one_load_ms(OTHER + i) / 64;
    before = looks();
    cpu = cpu_seconds();
    for (uint32_t i = 0; i < n; i++) { /* each into blocks of its own */
        struct ucm_transfer t = {.keys = keys, .blocks = blocks + i * MAX, .n_keys = MAX};

        cr_assert_eq(ucm_load(w.region, &t, -1, &task[i]), 0, "%s", ucm_errmsg());
    }
    do {
        double ms = one_load_ms(OTHER + loads % 2048);

        worst = ms > worst ? ms : worst;
        sum += ms;
        loads++;
        rc = ucm_task_check(task[0], &result);
    } while (rc == UCM_EPENDING || rc == -UCM_EPENDING);
    cr_assert_eq(rc, 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0)
            cr_assert_eq(ucm_task_wait(task[i], -1, &result), 0, "%s", ucm_errmsg());
        expect_loaded(result.result, MAX);
        ucm_task_free(task[i]);
    }
    printf("alongside %u loads of %u: %u loads of one, mean %.3f worst %.3f ms (alone %.3f), "
           "%llu looks, %.2f s CPU\n",
           n, MAX, loads, sum / loads, worst, idle, (unsigned long long)(looks() - before),
           cpu_seconds() - cpu);
    cr_expect_leq(looks() - before, (uint64_t)LOOKS * (n * MAX + loads));
}

Test(room_work, a_client_alongside_large_loads)
{
    open_host(BIG);
    store(OTHER, SLOTS / 4);
    store(0, MAX);
    beside_requests(1);
    beside_requests(BIG);
}
