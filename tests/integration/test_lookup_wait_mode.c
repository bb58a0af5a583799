/* Lookups that don't wait for the shared tier. The test stops the process of its root, and lets it
 * go on. So the root is as slow as the test wants, on any machine. */
#include "tests/integration/harness.h"
#include "tests/runner/halt.h"
#include "tests/runner/wipe.h"

#include <criterion/criterion.h>
#include <ctype.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define STORED 4u /* by another host */
#define ASKED 6u
#define UNDER_WAY 64u /* of a connection: docs/methods.md, lookup */
#define CALL_MS 30000

static struct host host;
static struct worker worker;
static char directory[64], roots[2][96];
static pid_t backend; /* 0: it runs */
static const struct worker_options OPTIONS = {.layers = 2, .blocks = 8, .layer_bytes = 4096};

/* A child of the daemon: the process of its only root. */
static pid_t backend_of(pid_t daemon)
{
    DIR *proc = opendir("/proc");
    pid_t found = 0;

    cr_assert(proc);
    for (struct dirent *e; !found && (e = readdir(proc)) != NULL;) {
        char path[300];
        int parent = 0;
        FILE *f;

        if (!isdigit((unsigned char)e->d_name[0]))
            continue;
        snprintf(path, sizeof(path), "/proc/%s/stat", e->d_name);
        f = fopen(path, "r");
        if (f && fscanf(f, "%*d (%*[^)]) %*c %d", &parent) == 1 && parent == daemon)
            found = (pid_t)atoi(e->d_name);
        if (f)
            fclose(f);
    }
    closedir(proc);
    cr_assert(found, "the daemon has no backend");
    return found;
}

static void hold(void)
{
    backend = backend_of(host.pid);
    halt(backend);
}

static void let_go(void)
{
    if (backend)
        kill(backend, SIGCONT);
    backend = 0;
}

struct answer {
    uint32_t hits, dram, lease, pending;
};

static struct answer look(uint32_t wait_mode, uint64_t first, uint32_t n, uint32_t wait_ms)
{
    uint8_t keys[ASKED * WORKER_KEY_BYTES];
    struct answer a = {.pending = 7};
    struct ucm_lookup asked = {.keys = keys,
                               .n_keys = n,
                               .lease_ms = 60000,
                               .wait_ms = wait_ms,
                               .wait_mode = wait_mode,
                               .pending = &a.pending};

    keys_make(first, n, keys);
    cr_assert_eq(ucm_lookup_prefix(worker.ns, &asked, CALL_MS, &a.hits, &a.dram, &a.lease), 0, "%s",
                 ucm_errmsg());
    return a;
}

/* Another host has stored blocks 0 to STORED, and 50. This host knows only 50. */
static void begin(void)
{
    snprintf(directory, sizeof(directory), "/tmp/ucm-wait-mode-XXXXXX");
    cr_assert(mkdtemp(directory));
    snprintf(roots[0], sizeof(roots[0]), "shared.roots=%s", directory);
    snprintf(roots[1], sizeof(roots[1]), "shared.roots=%s", directory);
    host = (struct host){.sets = {roots[0], NULL}};
    host_start(&host);
    worker_open(&worker, &host, &OPTIONS);
    worker_store(&worker, 0, STORED);
    worker_store(&worker, 50, 1);
    cr_assert(metric_reaches(worker.client, "shared_writes", STORED + 1, CALL_MS));
    worker_close(&worker);
    host_remove(&host);
    host = (struct host){.sets = {roots[1], "shared.negative=0ms", "shared.lookup_timeout=10s",
                                  "shared.timeout=60s", NULL}};
    host_start(&host);
    worker_open(&worker, &host, &OPTIONS);
    worker_store(&worker, 100, 1);
    /* Waits until its root is there. */
    for (uint64_t end_ms = now_ms() + CALL_MS; look(UCM_WAIT_MODE_WAIT, 50, 1, 0).hits == 0;) {
        cr_assert_lt(now_ms(), end_ms, "the root does not come up");
        sleep_ms(1);
    }
}

static void end(void)
{
    let_go();
    worker_close(&worker);
    cr_expect_eq(host_stop(&host), 0);
    host_remove(&host);
    cr_assert_eq(wipe(directory), 0);
}

TestSuite(lookup_wait_mode, .init = begin, .fini = end, .timeout = 120);

/* The first answer that is final. */
static struct answer look_until_known(uint64_t first, uint32_t n, uint32_t wait_ms)
{
    struct answer a = look(UCM_WAIT_MODE_LATER, first, n, wait_ms);

    for (uint64_t end_ms = now_ms() + CALL_MS; a.pending; sleep_ms(1)) {
        cr_assert_lt(now_ms(), end_ms, "it stays pending");
        a = look(UCM_WAIT_MODE_LATER, first, n, wait_ms);
    }
    return a;
}

Test(lookup_wait_mode, who_comes_back_finds_what_the_shared_tier_has)
{
    const uint32_t blocks[STORED] = {4, 5, 6, 7};
    uint8_t keys[STORED * WORKER_KEY_BYTES], status[STORED];
    uint64_t asked, counted;
    struct answer a;

    hold();
    asked = metric(worker.client, "shared_probes");
    counted = metric(worker.client, "lookups");
    for (int i = 0; i < 4; i++) {
        a = look(UCM_WAIT_MODE_LATER, 0, ASKED, 0);
        cr_expect(a.pending == 1 && a.hits == 0 && a.lease == 0);
    }
    cr_expect_eq(metric(worker.client, "shared_probes"), asked + 1, "it is asked once");
    cr_expect_eq(metric(worker.client, "lookups_pending"), 4u);
    cr_expect_eq(metric(worker.client, "lookups"), counted, "they are no misses");
    a = look(UCM_WAIT_MODE_LATER, 100, 1, 0);
    cr_expect(a.pending == 0 && a.hits == 1 && a.dram == 1 && a.lease != 0, "others go on");
    a = look(UCM_WAIT_MODE_HERE, 0, ASKED, 0);
    cr_expect(a.pending == 0 && a.hits == 0, "a caller that gives up gets what is here");

    let_go();
    a = look_until_known(0, ASKED, 0);
    cr_expect(a.hits == STORED && a.dram == 0 && a.lease != 0);
    cr_expect_eq(metric(worker.client, "shared_probes"), asked + 1, "nor is it asked again");
    keys_make(0, STORED, keys);
    cr_expect_eq(worker_load(&worker, keys, blocks, STORED, status), 0);
    for (uint32_t i = 0; i < STORED; i++)
        cr_expect_eq(worker_differs(&worker, blocks[i], i), 0u);
}

Test(lookup_wait_mode, it_ends_at_its_deadline)
{
    struct answer a;

    hold();
    a = look_until_known(0, ASKED, 1);
    cr_expect(a.hits == 0 && a.lease == 0);
}

Test(lookup_wait_mode, one_connection_has_so_many_under_way_and_they_end_with_it)
{
    struct answer a;

    hold();
    for (uint64_t i = 0; i < UNDER_WAY; i++)
        cr_assert_eq(look(UCM_WAIT_MODE_LATER, 1000 + 8 * i, ASKED, 0).pending, 1, "%d", (int)i);
    a = look(UCM_WAIT_MODE_LATER, 1000 + 8 * UNDER_WAY, ASKED, 0);
    cr_expect(a.pending == 0 && a.hits == 0, "as without a shared tier");
    cr_expect_eq(look(UCM_WAIT_MODE_LATER, 1000, ASKED, 0).pending, 1);
    worker_close(&worker);
    worker_open(&worker, &host, &OPTIONS);
    cr_expect_eq(look(UCM_WAIT_MODE_LATER, 1000 + 8 * UNDER_WAY, ASKED, 0).pending, 1);
}

Test(lookup_wait_mode, nonsense_is_refused)
{
    uint8_t key[WORKER_KEY_BYTES] = {1};
    struct ucm_lookup asked = {.keys = key, .n_keys = 1, .wait_mode = 3};
    uint32_t hits;

    cr_expect_eq(ucm_lookup_prefix(worker.ns, &asked, CALL_MS, &hits, NULL, NULL), -UCM_EINVALID);
    asked.wait_mode = UCM_WAIT_MODE_LATER;
    cr_expect_eq(ucm_lookup_prefix(worker.ns, &asked, CALL_MS, &hits, NULL, NULL), -UCM_EINVALID,
                 "pending is NULL");
}
