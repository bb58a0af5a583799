/* Requests of every kind are under way when the daemon stops or is killed. Each ends soon, with its
 * result or with an error that says what happened. Then the same handles work again. */
/* Sanitizers: address, thread */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <msgpack.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BATCH 16u
#define RANGES 32u /* of keys; each engine goes round */
#define CALL_MS 30000
#define ROUNDS 4u

enum kind {
    LOOKUP,
    LOAD,
    DUMP,
    DUMP_DURABLE,
    PREFETCH,
    WAIT, /* submits loads, and waits for them later */
    EVICT,
    PURGE,
    REGISTER,
    STATS,
    KINDS
};

static const char *const kind_name[KINDS] = {"lookup", "load",  "dump",  "durable dump", "prefetch",
                                             "wait",   "evict", "purge", "register",     "stats"};

/* Written by its thread; `ok` and `stop` by both. */
struct engine {
    pthread_t thread;
    enum kind kind;
    struct worker w;
    atomic_uint ok, broken; /* ok: since the daemon last came up */
    atomic_bool stop;
    unsigned turn;
    uint64_t longest_ms;
    char bad[160]; /* empty: none */
    bool durable[RANGES];
};

static struct host host;
static struct engine engine[KINDS];
static atomic_bool purged_another; /* perhaps */

static void close_host(void)
{
    host_remove(&host);
}

TestSuite(inflight, .fini = close_host, .timeout = 180);

/* ---- one call ---- */

static void range_make(struct ucm_transfer *t, uint32_t range, uint8_t *keys, uint32_t *blocks)
{
    keys_make(range * BATCH, BATCH, keys);
    for (uint32_t i = 0; i < BATCH; i++)
        blocks[i] = i;
    *t = (struct ucm_transfer){.keys = keys, .blocks = blocks, .n_keys = BATCH};
}

static int bytes_check(struct engine *e, uint32_t range, const uint8_t *status)
{
    for (uint32_t i = 0; i < BATCH; i++)
        if (status[i] == UCM_BLOCK_IS_OK && worker_differs(&e->w, i, range * BATCH + i) != 0) {
            snprintf(e->bad, sizeof(e->bad), "WRONG BYTES under key %u", range * BATCH + i);
            return -UCM_EINTERNAL;
        }
    return 0;
}

static int task_finish(struct ucm_task *task, uint8_t *status)
{
    struct ucm_result r;
    int rc = ucm_task_wait(task, CALL_MS, &r);

    if (rc == 0)
        memcpy(status, r.result, BATCH);
    ucm_task_free(task);
    return rc;
}

static int load(struct engine *e, uint32_t range, bool linger)
{
    uint8_t keys[BATCH * WORKER_KEY_BYTES], status[BATCH] = {0};
    uint32_t blocks[BATCH];
    struct ucm_transfer t;
    struct ucm_task *task;
    int rc;

    range_make(&t, range, keys, blocks);
    rc = ucm_load(e->w.region, &t, CALL_MS, &task);
    if (rc != 0)
        return rc;
    if (linger)
        usleep(3000);
    rc = task_finish(task, status);
    return rc == 0 ? bytes_check(e, range, status) : rc;
}

static int dump(struct engine *e, uint32_t range, bool durable)
{
    uint8_t keys[BATCH * WORKER_KEY_BYTES], status[BATCH] = {0};
    uint32_t blocks[BATCH], kept = 0;
    struct ucm_transfer t;
    struct ucm_task *task;
    int rc;

    range_make(&t, range, keys, blocks);
    t.durability = durable;
    for (uint32_t i = 0; i < BATCH; i++)
        worker_fill(&e->w, i, range * BATCH + i);
    rc = ucm_dump(e->w.region, &t, CALL_MS, &task);
    if (rc == 0)
        rc = task_finish(task, status);
    for (uint32_t i = 0; i < BATCH; i++)
        kept += status[i] == UCM_BLOCK_IS_OK || status[i] == UCM_BLOCK_IS_EXISTS;
    if (rc == 0 && durable && kept == BATCH)
        e->durable[range] = true;
    return rc;
}

static int prefetch(struct engine *e, uint32_t range)
{
    uint8_t keys[BATCH * WORKER_KEY_BYTES], status[BATCH];
    uint32_t blocks[BATCH];
    struct ucm_transfer t;
    struct ucm_task *task;
    int rc;

    range_make(&t, range, keys, blocks);
    t.blocks = NULL;
    rc = ucm_prefetch(e->w.ns, &t, CALL_MS, &task);
    return rc == 0 ? task_finish(task, status) : rc;
}

static int lookup(struct engine *e, uint32_t range)
{
    uint8_t keys[BATCH * WORKER_KEY_BYTES];
    struct ucm_lookup l = {.keys = keys, .n_keys = BATCH, .lease_ms = 1000};
    uint32_t hits, lease = 0;
    int rc;

    keys_make(range * BATCH, BATCH, keys);
    rc = ucm_lookup_prefix(e->w.ns, &l, CALL_MS, &hits, NULL, &lease);
    return rc == 0 ? ucm_release(e->w.client, lease, CALL_MS) : rc;
}

static int evict(struct engine *e, uint32_t range)
{
    int rc = dump(e, range, false);

    return rc == 0 ? ucm_evict(e->w.ns, NULL, 0, CALL_MS, NULL, NULL) : rc;
}

static void pack_text(msgpack_packer *pk, const char *name, const char *text)
{
    msgpack_pack_str_with_body(pk, name, strlen(name));
    msgpack_pack_str_with_body(pk, text, strlen(text));
}

static void pack_number(msgpack_packer *pk, const char *name, uint64_t v)
{
    msgpack_pack_str_with_body(pk, name, strlen(name));
    msgpack_pack_uint64(pk, v);
}

/* The number of the namespace "purged" in the daemon that runs now. The library does not tell it.
 */
static int number_of(struct engine *e, uint8_t *ns)
{
    msgpack_sbuffer out;
    msgpack_packer pk;
    uint8_t *answer = NULL;
    const uint8_t *at;
    size_t n = 0;
    int rc;

    msgpack_sbuffer_init(&out);
    msgpack_packer_init(&pk, &out, msgpack_sbuffer_write);
    msgpack_pack_map(&pk, 8);
    pack_text(&pk, "model", "purged");
    pack_text(&pk, "dtype", "bf16");
    pack_text(&pk, "layout", "test/1");
    pack_number(&pk, "block_tokens", 16);
    pack_number(&pk, "key_bytes", WORKER_KEY_BYTES);
    pack_number(&pk, "parts", 1);
    pack_number(&pk, "layer_bytes", e->w.layer_bytes);
    msgpack_pack_str_with_body(&pk, "layers", 6);
    msgpack_pack_array(&pk, 1);
    msgpack_pack_uint64(&pk, e->w.layers);
    rc = ucm_call(e->w.client, "namespace.open", out.data, out.size, CALL_MS, &answer, &n);
    msgpack_sbuffer_destroy(&out);
    at = rc == 0 ? memmem(answer, n, "\xa2ns", 3) : NULL;
    if (at)
        *ns = at[3]; /* a small one */
    free(answer);
    return rc;
}

static int purge(struct engine *e, uint32_t range)
{
    uint64_t connection_epoch;
    uint8_t ns;
    int rc = dump(e, range, false);

    connection_epoch = ucm_connection_epoch(e->w.client);
    if (rc == 0)
        rc = number_of(e, &ns);
    if (rc == 0)
        rc = purge_ns(e->w.client, ns, CALL_MS);
    /* Another daemon ran by then, where the number names no namespace, or another one. */
    if (ucm_connection_epoch(e->w.client) == connection_epoch)
        return rc;
    purged_another = purged_another || rc == 0;
    return rc == -UCM_ENOTFOUND ? -UCM_EDISCONNECTED : rc;
}

/* Registers another region and gives it back. */
static int region(struct engine *e)
{
    struct worker more = {.client = e->w.client,
                          .ns = e->w.ns,
                          .layers = e->w.layers,
                          .blocks = e->w.blocks,
                          .layer_bytes = e->w.layer_bytes};
    int rc = worker_region_try(&more);

    if (rc == 0)
        rc = ucm_region_unregister(more.region, CALL_MS);
    munmap(more.memory, more.memory_bytes);
    return rc;
}

static int stats(struct engine *e)
{
    uint8_t *answer;
    size_t n;
    int rc = ucm_call(e->w.client, "stats", NULL, 0, CALL_MS, &answer, &n);

    if (rc == 0)
        free(answer);
    return rc;
}

static int call(struct engine *e)
{
    uint32_t range = e->turn++ % RANGES;

    switch (e->kind) {
    case LOOKUP:
        return lookup(e, range);
    case LOAD:
        return load(e, range, false);
    case DUMP:
        return dump(e, range, false);
    case DUMP_DURABLE:
        return dump(e, range, true);
    case PREFETCH:
        return prefetch(e, range);
    case WAIT:
        return load(e, range, true);
    case EVICT:
        return evict(e, range);
    case PURGE:
        return purge(e, range);
    case REGISTER:
        return region(e);
    case STATS:
    case KINDS:
        break;
    }
    return stats(e);
}

/* ---- engines ---- */

static bool is_clear(int rc)
{
    return rc == -UCM_EDISCONNECTED || rc == -UCM_ENODAEMON || rc == -UCM_ESHUTDOWN;
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;

    while (!atomic_load(&e->stop) && e->bad[0] == '\0') {
        uint64_t start = now_ms(), took;
        int rc = call(e);

        took = now_ms() - start;
        e->longest_ms = took > e->longest_ms ? took : e->longest_ms;
        if (rc == 0)
            atomic_fetch_add(&e->ok, 1);
        else if (is_clear(rc))
            atomic_fetch_add(&e->broken, 1);
        else if (e->bad[0] == '\0')
            snprintf(e->bad, sizeof(e->bad), "%s: %.100s", ucm_strerror(rc), ucm_errmsg());
        usleep(rc == 0 ? 500 : 5000);
    }
    return NULL;
}

/* Each engine evicts and purges only its own blocks. */
static void engines_open(void)
{
    for (unsigned i = 0; i < KINDS; i++) {
        struct engine *e = &engine[i];
        const char *model = i == PURGE ? "purged" : i == EVICT ? "evicted" : "kept";

        *e = (struct engine){.kind = (enum kind)i};
        worker_open(&e->w, &host, &(struct worker_options){.model = model, .blocks = BATCH});
    }
    for (unsigned i = 0; i < KINDS; i++)
        cr_assert_eq(pthread_create(&engine[i].thread, NULL, engine_main, &engine[i]), 0);
}

static bool all_work(void)
{
    for (unsigned i = 0; i < KINDS; i++) {
        cr_assert_str_empty(engine[i].bad, "%s: %s", kind_name[i], engine[i].bad);
        if (atomic_load(&engine[i].ok) < 3)
            return false;
    }
    return true;
}

static void wait_all_work(void)
{
    for (unsigned i = 0; i < KINDS; i++)
        atomic_store(&engine[i].ok, 0);
    for (uint64_t end = now_ms() + 60000; !all_work(); sleep_ms(5)) {
        if (now_ms() < end)
            continue;
        for (unsigned i = 0; i < KINDS; i++)
            cr_assert_geq(atomic_load(&engine[i].ok), 3u, "%s does not go on", kind_name[i]);
    }
}

static void engines_close(void)
{
    unsigned broken = 0;

    for (unsigned i = 0; i < KINDS; i++)
        atomic_store(&engine[i].stop, true);
    for (unsigned i = 0; i < KINDS; i++) {
        struct engine *e = &engine[i];

        cr_assert_eq(pthread_join(e->thread, NULL), 0);
        cr_expect_str_empty(e->bad, "%s: %s", kind_name[i], e->bad);
        cr_expect_leq(e->longest_ms, CALL_MS + 2000u, "%s hung for %llu ms", kind_name[i],
                      (unsigned long long)e->longest_ms);
        broken += atomic_load(&e->broken);
    }
    cr_expect_gt(broken, 0u, "nothing was under way at any restart");
}

/* Each block that was ever acknowledged as durable is there, with its bytes. */
static void expect_durable(void)
{
    struct engine *e = &engine[DUMP_DURABLE];
    unsigned ranges = 0;

    for (uint32_t range = 0; range < RANGES; range++) {
        uint8_t keys[BATCH * WORKER_KEY_BYTES], status[BATCH];
        uint32_t blocks[BATCH];
        struct ucm_transfer t;

        if (!e->durable[range])
            continue;
        ranges++;
        range_make(&t, range, keys, blocks);
        worker_clear(&e->w);
        cr_assert_eq(worker_load(&e->w, keys, blocks, BATCH, status), 0, "%s", ucm_errmsg());
        for (uint32_t i = 0; i < BATCH; i++)
            cr_assert(status[i] == UCM_BLOCK_IS_OK &&
                          worker_differs(&e->w, i, t.n_keys * range + i) == 0,
                      "key %u is lost: status %u", range * BATCH + i, status[i]);
    }
    cr_expect_gt(ranges, 0u);
}

static void stop_and_start(void (*stop)(struct host *h))
{
    host = (struct host){.nvme = true, .sets = {"nvme.segment=1MiB", "arena.prefault=true"}};
    host_start(&host);
    engines_open();
    for (unsigned round = 0; round < ROUNDS; round++) {
        wait_all_work();
        stop(&host);
        sleep_ms(round % 2 ? 50 : 0); /* sometimes no daemon runs */
        host_restart(&host);
    }
    wait_all_work();
    engines_close();
    wait_ok(engine[0].w.client);
    if (!purged_another)
        expect_durable();
    for (unsigned i = 0; i < KINDS; i++)
        worker_close(&engine[i].w);
}

static void stop_clean(struct host *h)
{
    cr_assert_eq(host_stop(h), 0);
}

Test(inflight, at_a_stop)
{
    stop_and_start(stop_clean);
}

Test(inflight, at_a_kill)
{
    stop_and_start(host_kill);
}
