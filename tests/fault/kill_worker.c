#include "tests/fault/kill_worker.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the daemon's end ---- */

static void *killer_main(void *arg)
{
    const struct killer *k = arg;

    usleep(k->after_us);
    kill(k->pid, k->signal);
    return NULL;
}

void killer_start(struct killer *k, const struct host *h)
{
    k->pid = h->pid;
    cr_assert_eq(pthread_create(&k->thread, NULL, killer_main, k), 0);
}

void killer_reap(struct killer *k, struct host *h, struct oracle *o)
{
    uint64_t end = now_ms() + 60000;
    int status = 0;
    pid_t rc;

    cr_assert_eq(pthread_join(k->thread, NULL), 0);
    while ((rc = waitpid(h->pid, &status, WNOHANG)) == 0) {
        cr_assert_lt(now_ms(), end, "the daemon does not stop");
        usleep(500);
    }
    cr_assert_eq(rc, h->pid);
    h->pid = 0;
    oracle_run_ended(o, WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) > k->may_fail)
        cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %#x", status);
}

bool kill_restarted(struct host *h)
{
    bool runs = host_try_restart(h);

    cr_assert(runs || (WIFSIGNALED(h->status) && WTERMSIG(h->status) == SIGKILL),
              "the daemon refuses to start: status %#x", h->status);
    return runs;
}

const char *kill_log_level(void)
{
    return getenv("UCM_KILL_LOG") ? "log.level=debug" : "log.level=error";
}

/* ---- the worker ---- */

static int client_ms(const struct kill_worker *k)
{
    return k->patient ? 20000 : KILL_CLIENT_MS;
}

static int space_open(struct kill_worker *k, const char *model, struct ucm_namespace **out)
{
    uint32_t layers;
    struct ucm_identity id = worker_identity(&(struct worker_options){.model = model}, &layers);

    return ucm_namespace_open(k->w.client, &id, client_ms(k), out);
}

bool kill_worker_connect(struct kill_worker *k, const struct host *h)
{
    struct ucm_options options = {.socket = h->socket, .name = "oracle"};

    k->w = (struct worker){.layers = 4, .blocks = KILL_BATCH, .layer_bytes = 8192};
    if (ucm_connect(&options, client_ms(k), &k->w.client) != 0)
        return false;
    if (space_open(k, "kill", &k->w.ns) != 0)
        return false;
    return worker_region_try(&k->w) == 0;
}

int kill_task_run(int rc, struct ucm_task *task, uint32_t n, uint8_t *status)
{
    struct ucm_result r;

    if (rc != 0)
        return rc;
    rc = ucm_task_wait(task, 20000, &r);
    if (rc == 0)
        memcpy(status, r.result, n);
    ucm_task_free(task);
    return rc;
}

static void transfer_make(struct ucm_transfer *t, uint32_t first, uint32_t n, bool durable)
{
    static uint8_t keys[KILL_BATCH * WORKER_KEY_BYTES];
    static uint32_t blocks[KILL_BATCH];

    keys_make(first, n, keys);
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = i;
    *t = (struct ucm_transfer){.keys = keys, .blocks = blocks, .n_keys = n, .durability = durable};
}

static void dump_told(struct kill_worker *k, uint32_t key, uint8_t status, bool durable, bool weak)
{
    bool stored = status == UCM_BLOCK_IS_OK || status == UCM_BLOCK_IS_EXISTS;

    cr_assert(stored || (weak && durable && status == UCM_BLOCK_IS_NOT_DURABLE),
              "key %u: status %u", key, status);
    k->not_durable += !stored;
    if (!stored)
        return;
    /* blocks of an earlier run that exist already have not been read */
    k->oracle->held[key] |= durable || status == UCM_BLOCK_IS_OK;
    if (durable)
        k->oracle->state[key] = ORACLE_DURABLE;
}

/* weak: it may be answered as not durable. */
static bool dump(struct kill_worker *k, uint32_t first, uint32_t n, bool durable, bool weak)
{
    uint8_t status[KILL_BATCH];
    struct ucm_transfer t;
    struct ucm_task *task = NULL;
    int rc;

    for (uint32_t i = 0; i < n; i++) {
        worker_fill(&k->w, i, first + i);
        if (k->oracle->state[first + i] == ORACLE_NOTHING)
            k->oracle->state[first + i] = ORACLE_MAYBE;
    }
    transfer_make(&t, first, n, durable);
    rc = ucm_dump(k->w.region, &t, client_ms(k), &task);
    if (kill_task_run(rc, task, n, status) != 0)
        return false;
    for (uint32_t i = 0; i < n; i++)
        dump_told(k, first + i, status[i], durable, weak);
    return true;
}

bool kill_worker_dump(struct kill_worker *k, uint32_t n)
{
    uint32_t first = k->oracle->keys;

    cr_assert_leq(first + n, ORACLE_KEYS);
    k->oracle->keys += n;
    return dump(k, first, n, oracle_below(k->oracle, 2), k->disk_fails || k->full);
}

bool kill_worker_dump_again(struct kill_worker *k, uint32_t n, bool durable)
{
    uint32_t most = k->oracle->keys, first;

    if (most == 0)
        return true;
    n = n < most ? n : most;
    first = oracle_below(k->oracle, most - n + 1);
    /* a block that is found damaged is dropped, and stored by the second try */
    return dump(k, first, n, durable, true) && dump(k, first, n, durable, k->disk_fails || k->full);
}

void kill_worker_purges(struct kill_worker *k, unsigned n)
{
    struct ucm_namespace *scratch;

    if (space_open(k, "scratch", &scratch) != 0)
        return;
    /* The namespace of the keys is the first. A disk that fails may refuse it. */
    while (n > 0 && purge_ns(k->w.client, 2, client_ms(k)) == 0)
        n--;
    ucm_namespace_close(scratch);
}

static void key_check(struct kill_worker *k, uint32_t key, uint32_t block, uint8_t status)
{
    struct oracle *o = k->oracle;

    if (status == UCM_BLOCK_IS_OK) {
        cr_assert_eq(worker_differs(&k->w, block, key), 0u, "key %u has WRONG BYTES", key);
        cr_assert_neq(o->state[key], ORACLE_NOTHING, "key %u was never dumped", key);
        o->held[key] |= oracle_load_proves(o, key);
        k->found++;
    } else {
        cr_assert_neq(o->state[key], ORACLE_DURABLE, "key %u is LOST: status %u", key, status);
        k->absent++;
    }
    k->durable_checked += o->state[key] == ORACLE_DURABLE;
}

bool kill_worker_check(struct kill_worker *k)
{
    uint32_t end = k->oracle->keys + 8;

    for (uint32_t first = 0; first < end; first += KILL_BATCH) {
        uint32_t n = end - first < KILL_BATCH ? end - first : KILL_BATCH;
        uint8_t status[KILL_BATCH];
        struct ucm_transfer t;
        struct ucm_task *task = NULL;
        int rc;

        worker_clear(&k->w);
        transfer_make(&t, first, n, false);
        rc = ucm_load(k->w.region, &t, client_ms(k), &task);
        if (kill_task_run(rc, task, n, status) != 0)
            return false;
        for (uint32_t i = 0; i < n; i++)
            key_check(k, first + i, i, status[i]);
    }
    return true;
}

bool kill_worker_recovered(struct kill_worker *k)
{
    uint8_t *p;
    size_t n;
    bool is = false;

    for (uint64_t end = now_ms() + 20000; !is && now_ms() < end;) {
        if (ucm_call(k->w.client, "health", NULL, 0, client_ms(k), &p, &n) != 0)
            return false;
        is = memmem(p, n, "recovering", 10) == NULL;
        free(p);
    }
    cr_assert(is, "recovery does not end");
    return true;
}

void kill_report(const char *format, ...)
{
    const char *path = getenv("UCM_KILL_REPORT");
    FILE *file = path ? fopen(path, "w") : NULL;
    va_list args;

    cr_assert(!path || file);
    va_start(args, format);
    vfprintf(file ? file : stderr, format, args);
    va_end(args);
    if (file)
        cr_assert_eq(fclose(file), 0);
}
