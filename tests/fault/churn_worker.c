#include "tests/fault/churn_worker.h"

#include "tests/runner/bytes.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define BLOCKS 48    /* of a region */
#define BATCH_MAX 16 /* keys of a request */
#define PARTS_MAX 3
#define KEYS_MAX 900 /* of a space */
#define UNTOUCHED 0xEE
#define EXIT_WRONG 9

/* Sizes from 8 KiB to 192 KiB a part, so that slabs move between them. */
const struct churn_space churn_spaces[CHURN_SPACES] = {
    {"one", 1, 4, 600, 4096},
    {"two", 2, 2, 200, 16384},
    {"small", 1, 8, 900, 1024},
    {"large", 3, 3, 60, 65536},
};

/* ---- chance ---- */

static uint64_t random_state;

void churn_seed(uint64_t seed)
{
    random_state = seed;
}

uint64_t churn_random(void)
{
    random_state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t x = random_state;

    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

uint32_t churn_below(uint32_t n)
{
    return (uint32_t)(churn_random() % n);
}

bool churn_chance(uint32_t percent)
{
    return churn_below(100) < percent;
}

static void shuffle(uint32_t *v, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = churn_below(i), swap = v[i - 1];

        v[i - 1] = v[j];
        v[j] = swap;
    }
}

/* ---- which keys are evicted by name ---- */

/* A lease keeps no block that a worker evicts by name. All processes share this. */
struct evictions {
    atomic_uint begun[CHURN_SPACES][KEYS_MAX], ended[CHURN_SPACES][KEYS_MAX];
};
static struct evictions *evictions;

void churn_round(void)
{
    if (!evictions)
        evictions = mmap(NULL, sizeof(*evictions), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq((void *)evictions, MAP_FAILED);
    memset((void *)evictions, 0, sizeof(*evictions));
}

/* ---- a process of workers, one for each part of its namespace ---- */

static struct {
    struct host *host;
    uint64_t seed;
    unsigned op;
    const struct churn_space *space;
    uint32_t number; /* of the space: makes its keys differ from the others' */
    struct worker w[PARTS_MAX];
} me;

static volatile sig_atomic_t leaving;

static void leave_cb(int number)
{
    (void)number;
    leaving = 1;
}

void churn_leave_on_sigterm(void)
{
    struct sigaction leave = {.sa_handler = leave_cb, .sa_flags = SA_RESTART};

    cr_assert_eq(sigaction(SIGTERM, &leave, NULL), 0);
}

static _Noreturn __attribute__((format(printf, 1, 2))) void wrong(const char *format, ...)
{
    va_list args;

    fprintf(stderr, "worker %d seed %#llx space %s op %u: ", (int)getpid(),
            (unsigned long long)me.seed, me.space->model, me.op);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    _exit(EXIT_WRONG);
}

/* One request: which keys, to or from which blocks, which layers. */
struct batch {
    struct worker *w;
    uint32_t n, layer, layers, lease, daemon_timeout_ms;
    uint64_t number[BATCH_MAX];
    uint32_t block[BATCH_MAX];
    uint8_t keys[BATCH_MAX * WORKER_KEY_BYTES], result[BATCH_MAX];
    unsigned evicted[BATCH_MAX]; /* evictions of the key that had ended before it was looked up */
    bool leased[BATCH_MAX], may_stop;
};

static uint64_t key_number(uint32_t key)
{
    return me.number * UINT64_C(1000000) + key;
}

static uint32_t key_of(const struct batch *b, uint32_t i)
{
    return (uint32_t)(b->number[i] - key_number(0));
}

static void batch_keys(struct batch *b)
{
    for (uint32_t i = 0; i < b->n; i++)
        key_make(b->number[i], b->keys + (size_t)i * WORKER_KEY_BYTES);
}

/* A run of keys, as a prefix is, or some here and there; each in a block of its own among those
 * from `first` on. */
static void batch_choose(struct batch *b, struct worker *w, uint32_t first, uint32_t blocks)
{
    uint32_t order[BLOCKS], start;

    *b = (struct batch){.w = w, .n = 1 + churn_below(BATCH_MAX), .layers = w->layers};
    start = churn_below(me.space->keys - BATCH_MAX);
    for (uint32_t i = 0; i < blocks; i++)
        order[i] = first + i;
    shuffle(order, blocks);
    for (uint32_t i = 0; i < b->n; i++) {
        b->number[i] = key_number(start + i);
        b->block[i] = order[i];
    }
    if (churn_chance(20))
        for (uint32_t i = 0; i < b->n; i++)
            b->number[i] = key_number(churn_below(me.space->keys));
    if (churn_chance(8)) {
        b->daemon_timeout_ms = 1 + churn_below(30);
        b->may_stop = true;
    }
    batch_keys(b);
}

static uint8_t *fragment_of(const struct worker *w, uint32_t plane, uint32_t block)
{
    uint64_t half = w->layer_bytes / 2;

    return w->memory + plane * half * w->blocks + block * half;
}

/* Marks the planes of a block that lie outside, or inside, of the batch's layers. */
static void planes_mark(const struct batch *b, uint32_t block, bool inside)
{
    for (uint32_t p = 0; p < 2 * b->w->layers; p++) {
        bool in = p / 2 >= b->layer && p / 2 < b->layer + b->layers;

        if (in == inside)
            memset(fragment_of(b->w, p, block), UNTOUCHED, b->w->layer_bytes / 2);
    }
}

/* Only bytes that this dump may read are there. */
static void batch_fill(struct batch *b)
{
    for (uint32_t i = 0; i < b->n; i++) {
        worker_fill(b->w, b->block[i], b->number[i]);
        planes_mark(b, b->block[i], false);
    }
}

static void batch_clear(struct batch *b)
{
    for (uint32_t i = 0; i < b->n; i++) {
        planes_mark(b, b->block[i], false);
        planes_mark(b, b->block[i], true);
    }
}

static struct ucm_transfer transfer_of(const struct batch *b)
{
    return (struct ucm_transfer){.keys = b->keys,
                                 .blocks = b->block,
                                 .n_keys = b->n,
                                 .layer = b->layer,
                                 .n_layers = b->layers,
                                 .priority = churn_below(8),
                                 .daemon_timeout_ms = b->daemon_timeout_ms,
                                 .lease = b->lease};
}

static struct ucm_task *batch_begin(struct batch *b, bool load)
{
    struct ucm_transfer t = transfer_of(b);
    struct ucm_task *task;
    int rc = load ? ucm_load(b->w->region, &t, CHURN_WAIT_MS, &task)
                  : ucm_dump(b->w->region, &t, CHURN_WAIT_MS, &task);

    if (rc != 0)
        wrong("%s refused: %s", load ? "load" : "dump", ucm_errmsg());
    return task;
}

static void batch_end(struct batch *b, struct ucm_task *task)
{
    struct ucm_result r;

    if (ucm_task_wait(task, CHURN_WAIT_MS, &r) != 0)
        wrong("no answer: %s", ucm_errmsg());
    if (r.n_keys != b->n)
        wrong("%u statuses for %u keys", r.n_keys, b->n);
    memcpy(b->result, r.result, b->n);
    ucm_task_free(task);
}

/* ---- the oracle ---- */

static bool planes_untouched(const struct batch *b, uint32_t block)
{
    for (uint32_t p = 0; p < 2 * b->w->layers; p++)
        if (bytes_other(fragment_of(b->w, p, block), b->w->layer_bytes / 2, UNTOUCHED) > 0)
            return false;
    return true;
}

static void load_check_ok(struct batch *b, uint32_t i)
{
    size_t outside = 0, differs;

    /* Bytes outside of the request must be unchanged. Only this function restores them. */
    for (uint32_t p = 0; p < 2 * b->w->layers; p++) {
        if (p / 2 >= b->layer && p / 2 < b->layer + b->layers)
            continue;
        outside += bytes_other(fragment_of(b->w, p, b->block[i]), b->w->layer_bytes / 2, UNTOUCHED);
    }
    if (outside > 0)
        wrong("load wrote %zu bytes outside of layers %u + %u", outside, b->layer, b->layers);
    if (b->layers == b->w->layers) {
        differs = worker_differs(b->w, b->block[i], b->number[i]);
    } else {
        uint64_t half = b->w->layer_bytes / 2, bytes = 2 * b->layers * half;
        uint8_t *got = malloc(bytes);

        if (!got)
            wrong("no memory");
        for (uint32_t p = 0; p < 2 * b->layers; p++)
            memcpy(got + p * half, fragment_of(b->w, 2 * b->layer + p, b->block[i]), half);
        worker_fill(b->w, b->block[i], b->number[i]);
        differs = 0;
        for (uint32_t p = 0; p < 2 * b->layers; p++)
            differs +=
                memcmp(got + p * half, fragment_of(b->w, 2 * b->layer + p, b->block[i]), half) != 0;
        free(got);
    }
    if (differs > 0)
        wrong("key %llu part %u: %zu wrong bytes, status OK", (unsigned long long)b->number[i],
              b->w->part, differs);
}

static bool evicted_since_lookup(const struct batch *b, uint32_t i)
{
    return atomic_load(&evictions->begun[me.number][key_of(b, i)]) != b->evicted[i];
}

static void load_check(struct batch *b)
{
    for (uint32_t i = 0; i < b->n; i++) {
        switch (b->result[i]) {
        case UCM_BLOCK_IS_OK:
            load_check_ok(b, i);
            continue;
        case UCM_BLOCK_IS_MISS:
            if (b->leased[i] && !evicted_since_lookup(b, i))
                wrong("key %llu was leased and is missed", (unsigned long long)b->number[i]);
            break;
        case UCM_BLOCK_IS_NO_ROOM:
            break;
        case UCM_BLOCK_IS_CANCELLED:
            if (b->may_stop)
                continue; /* perhaps copied in part */
            wrong("cancelled by nobody");
        default:
            wrong("load status %u", b->result[i]);
        }
        if (!planes_untouched(b, b->block[i]))
            wrong("status %u, yet something was written", b->result[i]);
    }
}

static void dump_check(const struct batch *b)
{
    for (uint32_t i = 0; i < b->n; i++) {
        uint8_t s = b->result[i];

        if (s == UCM_BLOCK_IS_CANCELLED && !b->may_stop)
            wrong("dump cancelled by nobody");
        if (s != UCM_BLOCK_IS_OK && s != UCM_BLOCK_IS_EXISTS && s != UCM_BLOCK_IS_IN_PROGRESS &&
            s != UCM_BLOCK_IS_NO_ROOM && s != UCM_BLOCK_IS_CANCELLED)
            wrong("dump status %u", s);
    }
}

/* ---- what a worker does ---- */

static struct worker *some_worker(void)
{
    return &me.w[churn_below(me.space->parts)];
}

/* The process dies in the middle of what it has begun. */
static void perhaps_die(void)
{
    if (churn_chance(1))
        _exit(0);
    if (churn_chance(1))
        raise(SIGKILL);
}

static void do_dump_whole(void)
{
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    for (uint32_t p = 0; p < me.space->parts; p++) {
        struct ucm_task *task;

        b.w = &me.w[p];
        batch_fill(&b);
        task = batch_begin(&b, false);
        perhaps_die();
        batch_end(&b, task);
        dump_check(&b);
        if (churn_chance(10))
            return;
    }
}

/* Layer by layer, in any order. Now and then a layer is left out, or the worker gives up. */
static void do_dump_layers(void)
{
    uint32_t order[8];
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    for (uint32_t l = 0; l < b.w->layers; l++)
        order[l] = l;
    if (churn_chance(50))
        shuffle(order, b.w->layers);
    b.layers = 1;
    for (uint32_t l = 0; l < b.w->layers; l++) {
        struct ucm_task *task;

        if (churn_chance(3))
            continue;
        b.layer = order[l];
        batch_fill(&b);
        task = batch_begin(&b, false);
        perhaps_die();
        batch_end(&b, task);
        dump_check(&b);
    }
}

static void lookup_prefix(struct batch *b)
{
    struct ucm_lookup l = {.keys = b->keys, .n_keys = b->n, .lease_ms = 120000};
    uint32_t hits, dram;

    if (ucm_lookup_prefix(b->w->ns, &l, CHURN_WAIT_MS, &hits, &dram, &b->lease) != 0)
        wrong("lookup: %s", ucm_errmsg());
    if (hits > b->n || dram > hits || !!b->lease != !!hits)
        wrong("lookup: %u hits of %u, %u in DRAM, lease %u", hits, b->n, dram, b->lease);
    for (uint32_t i = 0; i < hits; i++)
        b->leased[i] = true;
}

static void lookup_per_key(struct batch *b)
{
    struct ucm_lookup l = {.keys = b->keys, .n_keys = b->n, .lease_ms = 120000};
    uint8_t found[BATCH_MAX];
    uint32_t hits, n = 0;

    if (ucm_lookup_per_key(b->w->ns, &l, CHURN_WAIT_MS, found, &hits, &b->lease) != 0)
        wrong("lookup: %s", ucm_errmsg());
    for (uint32_t i = 0; i < b->n; i++) {
        b->leased[i] = found[i] != UCM_FOUND_NOT;
        n += b->leased[i];
    }
    if (n != hits)
        wrong("lookup: %u hits, %u found", hits, n);
}

static void batch_lease(struct batch *b)
{
    for (uint32_t i = 0; i < b->n; i++)
        b->evicted[i] = atomic_load(&evictions->ended[me.number][key_of(b, i)]);
    if (churn_chance(50))
        lookup_prefix(b);
    else
        lookup_per_key(b);
    if (churn_chance(30))
        sleep_ms((int)churn_below(20));
}

static void some_layers(struct batch *b)
{
    if (churn_chance(70))
        return;
    b->layer = churn_below(b->w->layers);
    b->layers = 1 + churn_below(b->w->layers - b->layer);
}

static void do_load(void)
{
    struct ucm_task *task;
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    some_layers(&b);
    if (churn_chance(60))
        batch_lease(&b);
    if (b.lease && churn_chance(10)) {
        if (ucm_release(b.w->client, b.lease, CHURN_WAIT_MS) != 0)
            wrong("release: %s", ucm_errmsg());
        b.lease = 0;
        memset(b.leased, 0, sizeof(b.leased));
    }
    batch_clear(&b);
    task = batch_begin(&b, true);
    perhaps_die();
    if (churn_chance(10)) {
        b.may_stop = true;
        if (ucm_task_cancel(task, CHURN_WAIT_MS) != 0)
            wrong("cancel: %s", ucm_errmsg());
    }
    batch_end(&b, task);
    load_check(&b);
}

/* A load, a dump and another load of one connection at once. */
static void do_several(void)
{
    struct worker *w = some_worker();
    struct ucm_task *task[3];
    struct batch b[3];

    for (uint32_t i = 0; i < 3; i++) {
        batch_choose(&b[i], w, i * (BLOCKS / 3), BLOCKS / 3);
        if (i == 1) {
            batch_fill(&b[i]);
        } else {
            batch_lease(&b[i]);
            batch_clear(&b[i]);
        }
        task[i] = batch_begin(&b[i], i != 1);
    }
    perhaps_die();
    for (uint32_t i = 3; i-- > 0;) {
        batch_end(&b[i], task[i]);
        if (i == 1)
            dump_check(&b[i]);
        else
            load_check(&b[i]);
    }
}

static void do_prefetch(void)
{
    struct ucm_transfer t;
    struct ucm_task *task;
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    b.layers = 0;
    t = transfer_of(&b);
    t.blocks = NULL;
    if (churn_chance(50)) {
        t.part = b.w->part;
        t.n_parts = 1;
    }
    if (ucm_prefetch(b.w->ns, &t, CHURN_WAIT_MS, &task) != 0)
        wrong("prefetch: %s", ucm_errmsg());
    if (churn_chance(20)) {
        ucm_task_free(task);
        return;
    }
    batch_end(&b, task);
    for (uint32_t i = 0; i < b.n; i++)
        if (b.result[i] != UCM_BLOCK_IS_OK && b.result[i] != UCM_BLOCK_IS_MISS &&
            b.result[i] != UCM_BLOCK_IS_NO_ROOM &&
            !(b.may_stop && b.result[i] == UCM_BLOCK_IS_CANCELLED))
            wrong("prefetch status %u", b.result[i]);
}

static void count_evictions(const struct batch *b, atomic_uint *of_key)
{
    for (uint32_t i = 0; i < b->n; i++)
        atomic_fetch_add(&of_key[key_of(b, i)], 1);
}

static int evict_keys(struct batch *b)
{
    uint64_t evicted, busy;
    int rc;

    count_evictions(b, evictions->begun[me.number]);
    rc = ucm_evict(b->w->ns, b->keys, b->n, CHURN_WAIT_MS, &evicted, &busy);
    count_evictions(b, evictions->ended[me.number]);
    return rc;
}

static int evict_space(struct batch *b)
{
    uint64_t evicted, busy;
    int rc;

    for (uint32_t key = 0; key < me.space->keys; key++)
        atomic_fetch_add(&evictions->begun[me.number][key], 1);
    rc = ucm_evict(b->w->ns, NULL, 0, CHURN_WAIT_MS, &evicted, &busy);
    for (uint32_t key = 0; key < me.space->keys; key++)
        atomic_fetch_add(&evictions->ended[me.number][key], 1);
    return rc;
}

static void do_keep(void)
{
    uint64_t changed;
    struct batch b;
    int rc;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    switch (churn_below(4)) {
    case 0:
        rc = ucm_pin(b.w->ns, b.keys, 1 + churn_below(2), CHURN_WAIT_MS, &changed);
        break;
    case 1:
        rc = ucm_unpin(b.w->ns, NULL, 0, CHURN_WAIT_MS, &changed);
        break;
    case 2:
        if (churn_chance(90))
            return;
        rc = evict_space(&b);
        break;
    default:
        rc = evict_keys(&b);
        break;
    }
    if (rc != 0)
        wrong("pin, unpin or evict: %s", ucm_errmsg());
}

/* A lease that only the connection's end ends. */
static void do_forget_lease(void)
{
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    batch_lease(&b);
}

static void open_worker(uint32_t part)
{
    worker_open(&me.w[part], me.host,
                &(struct worker_options){.model = me.space->model,
                                         .parts = me.space->parts,
                                         .part = part,
                                         .layers = me.space->layers,
                                         .blocks = BLOCKS,
                                         .layer_bytes = me.space->layer_bytes});
}

/* The region goes while its load is under way. The load ends first, and only then the mapping. */
static void do_reopen(void)
{
    struct worker *w = some_worker();
    struct ucm_task *task = NULL;
    struct batch b;

    batch_choose(&b, w, 0, BLOCKS);
    if (churn_chance(70)) {
        b.may_stop = true;
        batch_clear(&b);
        task = batch_begin(&b, true);
    }
    if (ucm_region_unregister(w->region, CHURN_WAIT_MS) != 0)
        wrong("unregister: %s", ucm_errmsg());
    w->region = NULL;
    if (task) {
        batch_end(&b, task);
        load_check(&b);
    }
    worker_close(w);
    open_worker(b.w->part);
}

static void (*const acts[])(void) = {
    do_dump_whole, do_dump_whole, do_dump_whole, do_dump_layers,  do_dump_layers, do_load,
    do_load,       do_load,       do_load,       do_load,         do_several,     do_several,
    do_prefetch,   do_keep,       do_reopen,     do_forget_lease,
};

_Noreturn void churn_process(struct host *host, uint64_t seed)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    me.seed = random_state = seed;
    me.host = host;
    me.number = churn_below(CHURN_SPACES);
    me.space = &churn_spaces[me.number];
    for (uint32_t p = 0; p < me.space->parts; p++)
        open_worker(p);
    for (me.op = 0; !leaving && me.op < 2000; me.op++) {
        acts[churn_below(sizeof(acts) / sizeof(acts[0]))]();
        if (churn_chance(5))
            sleep_ms((int)churn_below(10));
    }
    for (uint32_t p = 0; p < me.space->parts; p++) {
        if (ucm_connection_epoch(me.w[p].client) != 1)
            wrong("the daemon dropped a connection");
        if (churn_chance(50))
            worker_close(&me.w[p]);
    }
    _exit(0);
}
