/* Many workers at once do everything that a worker may
 * do, are stopped and killed in the middle of it, and check each byte that they are given.
 *
 * The oracle: a block's bytes follow from its key, part, plane and offset, whoever dumps it. A load
 * that says OK delivered exactly these and touched nothing else; what was leased is not missed;
 * every request is answered; and when all workers are gone, the daemon holds nothing of them and
 * does not grow from round to round.
 *
 * UCM_SEED repeats a run's choices (not its timing); UCM_CHURN_SECONDS makes it longer. */
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECONDS 15
#define ROUNDS 3
#define PROCESSES 6
#define BLOCKS 48    /* of a region */
#define BATCH_MAX 16 /* keys of a request */
#define PARTS_MAX 3
#define WAIT_MS 60000 /* more than any deadline: who waits so long waits for ever */
#define UNTOUCHED 0xEE
#define EXIT_WRONG 9

/* Sizes from 8 KiB to 192 KiB a part, so that extents move between them. */
static const struct space {
    const char *model;
    uint32_t parts, layers, keys;
    uint64_t shard_bytes;
} spaces[] = {
    {"one", 1, 4, 600, 4096},
    {"two", 2, 2, 200, 16384},
    {"small", 1, 8, 900, 1024},
    {"large", 3, 3, 60, 65536},
};
#define SPACES (sizeof(spaces) / sizeof(spaces[0]))

static struct host host;

/* ---- chance ---- */

static uint64_t random_state;

static uint64_t random_next(void)
{
    random_state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t x = random_state;

    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)(random_next() % n);
}

static bool chance(uint32_t percent)
{
    return below(100) < percent;
}

static void shuffle(uint32_t *v, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = below(i), swap = v[i - 1];

        v[i - 1] = v[j];
        v[j] = swap;
    }
}

/* ---- a process of workers, one for each part of its namespace ---- */

static struct {
    uint64_t seed;
    unsigned op;
    const struct space *space;
    uint32_t number; /* of the space: makes its keys differ from the others' */
    struct worker w[PARTS_MAX];
} me;

static volatile sig_atomic_t leaving;

static void leave_cb(int number)
{
    (void)number;
    leaving = 1;
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

/* One request: which keys, to or from which blocks, what of them. */
struct batch {
    struct worker *w;
    uint32_t n, shard, shards, lease, deadline_ms;
    uint64_t number[BATCH_MAX];
    uint32_t block[BATCH_MAX];
    uint8_t keys[BATCH_MAX * WORKER_KEY_BYTES], result[BATCH_MAX];
    bool leased[BATCH_MAX], may_stop;
};

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

    *b = (struct batch){.w = w, .n = 1 + below(BATCH_MAX), .shards = w->layers};
    start = below(me.space->keys - BATCH_MAX);
    for (uint32_t i = 0; i < blocks; i++)
        order[i] = first + i;
    shuffle(order, blocks);
    for (uint32_t i = 0; i < b->n; i++) {
        b->number[i] = me.number * UINT64_C(1000000) + start + i;
        b->block[i] = order[i];
    }
    if (chance(20))
        for (uint32_t i = 0; i < b->n; i++)
            b->number[i] = me.number * UINT64_C(1000000) + below(me.space->keys);
    if (chance(8)) {
        b->deadline_ms = 1 + below(30);
        b->may_stop = true;
    }
    batch_keys(b);
}

static uint8_t *chunk_of(const struct worker *w, uint32_t plane, uint32_t block)
{
    uint64_t half = w->shard_bytes / 2;

    return w->memory + plane * half * w->blocks + block * half;
}

/* Marks the planes of a block that lie outside, or inside, of the batch's layers. */
static void planes_mark(const struct batch *b, uint32_t block, bool inside)
{
    for (uint32_t p = 0; p < 2 * b->w->layers; p++) {
        bool in = p / 2 >= b->shard && p / 2 < b->shard + b->shards;

        if (in == inside)
            memset(chunk_of(b->w, p, block), UNTOUCHED, b->w->shard_bytes / 2);
    }
}

/* Only what this dump may read is there. */
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
                                 .shard = b->shard,
                                 .n_shards = b->shards,
                                 .priority = below(8),
                                 .deadline_ms = b->deadline_ms,
                                 .lease = b->lease};
}

static struct ucm_task *batch_begin(struct batch *b, bool load)
{
    struct ucm_transfer t = transfer_of(b);
    struct ucm_task *task;
    int rc = load ? ucm_load(b->w->region, &t, WAIT_MS, &task)
                  : ucm_dump(b->w->region, &t, WAIT_MS, &task);

    if (rc != 0)
        wrong("%s refused: %s", load ? "load" : "dump", ucm_errmsg());
    return task;
}

static void batch_end(struct batch *b, struct ucm_task *task)
{
    struct ucm_result r;

    if (ucm_task_wait(task, WAIT_MS, &r) != 0)
        wrong("no answer: %s", ucm_errmsg());
    if (r.n_keys != b->n)
        wrong("%u statuses for %u keys", r.n_keys, b->n);
    memcpy(b->result, r.result, b->n);
    ucm_task_free(task);
}

/* ---- the oracle ---- */

static bool planes_untouched(const struct batch *b, uint32_t block)
{
    for (uint32_t p = 0; p < 2 * b->w->layers; p++) {
        const uint8_t *c = chunk_of(b->w, p, block);

        for (uint64_t i = 0; i < b->w->shard_bytes / 2; i++)
            if (c[i] != UNTOUCHED)
                return false;
    }
    return true;
}

static void load_check_ok(struct batch *b, uint32_t i)
{
    size_t outside = 0, differs;

    /* What was not asked for must be as it was: it is made right here, and only here. */
    for (uint32_t p = 0; p < 2 * b->w->layers; p++) {
        uint8_t *c = chunk_of(b->w, p, b->block[i]);

        if (p / 2 >= b->shard && p / 2 < b->shard + b->shards)
            continue;
        for (uint64_t at = 0; at < b->w->shard_bytes / 2; at++)
            outside += c[at] != UNTOUCHED;
    }
    if (outside > 0)
        wrong("load wrote %zu bytes outside of layers %u + %u", outside, b->shard, b->shards);
    if (b->shards == b->w->layers) {
        differs = worker_differs(b->w, b->block[i], b->number[i]);
    } else {
        uint64_t half = b->w->shard_bytes / 2, bytes = 2 * b->shards * half;
        uint8_t *got = malloc(bytes);

        if (!got)
            wrong("no memory");
        for (uint32_t p = 0; p < 2 * b->shards; p++)
            memcpy(got + p * half, chunk_of(b->w, 2 * b->shard + p, b->block[i]), half);
        worker_fill(b->w, b->block[i], b->number[i]);
        differs = 0;
        for (uint32_t p = 0; p < 2 * b->shards; p++)
            differs +=
                memcmp(got + p * half, chunk_of(b->w, 2 * b->shard + p, b->block[i]), half) != 0;
        free(got);
    }
    if (differs > 0)
        wrong("key %llu part %u: %zu wrong bytes, status OK", (unsigned long long)b->number[i],
              b->w->part, differs);
}

static void load_check(struct batch *b)
{
    for (uint32_t i = 0; i < b->n; i++) {
        switch (b->result[i]) {
        case UCM_BLOCK_IS_OK:
            load_check_ok(b, i);
            continue;
        case UCM_BLOCK_IS_MISS:
            if (b->leased[i])
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
    return &me.w[below(me.space->parts)];
}

/* In the middle of whatever was begun. */
static void perhaps_die(void)
{
    if (chance(1))
        _exit(0);
    if (chance(1))
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
        if (chance(10))
            return;
    }
}

/* Layer by layer, in any order; now and then one is left out, or the worker loses interest. */
static void do_dump_layers(void)
{
    uint32_t order[8];
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    for (uint32_t l = 0; l < b.w->layers; l++)
        order[l] = l;
    if (chance(50))
        shuffle(order, b.w->layers);
    b.shards = 1;
    for (uint32_t l = 0; l < b.w->layers; l++) {
        struct ucm_task *task;

        if (chance(3))
            continue;
        b.shard = order[l];
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

    if (ucm_lookup_prefix(b->w->ns, &l, WAIT_MS, &hits, &dram, &b->lease) != 0)
        wrong("lookup: %s", ucm_errmsg());
    if (hits > b->n || dram > hits || !!b->lease != !!hits)
        wrong("lookup: %u hits of %u, %u in DRAM, lease %u", hits, b->n, dram, b->lease);
    for (uint32_t i = 0; i < hits; i++)
        b->leased[i] = true;
}

static void lookup_each(struct batch *b)
{
    struct ucm_lookup l = {.keys = b->keys, .n_keys = b->n, .lease_ms = 120000};
    uint8_t found[BATCH_MAX];
    uint32_t hits, n = 0;

    if (ucm_lookup_each(b->w->ns, &l, WAIT_MS, found, &hits, &b->lease) != 0)
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
    if (chance(50))
        lookup_prefix(b);
    else
        lookup_each(b);
    if (chance(30))
        sleep_ms((int)below(20));
}

static void some_layers(struct batch *b)
{
    if (chance(70))
        return;
    b->shard = below(b->w->layers);
    b->shards = 1 + below(b->w->layers - b->shard);
}

static void do_load(void)
{
    struct ucm_task *task;
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    some_layers(&b);
    if (chance(60))
        batch_lease(&b);
    if (b.lease && chance(10)) {
        if (ucm_release(b.w->client, b.lease, WAIT_MS) != 0)
            wrong("release: %s", ucm_errmsg());
        b.lease = 0;
        memset(b.leased, 0, sizeof(b.leased));
    }
    batch_clear(&b);
    task = batch_begin(&b, true);
    perhaps_die();
    if (chance(10)) {
        b.may_stop = true;
        if (ucm_task_cancel(task, WAIT_MS) != 0)
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
    b.shards = 0;
    t = transfer_of(&b);
    t.blocks = NULL;
    t.part = chance(50) ? 0 : 1 + b.w->part;
    if (ucm_prefetch(b.w->ns, &t, WAIT_MS, &task) != 0)
        wrong("prefetch: %s", ucm_errmsg());
    if (chance(20)) {
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

static void do_keep(void)
{
    uint64_t changed, busy;
    struct batch b;
    int rc;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    switch (below(4)) {
    case 0:
        rc = ucm_pin(b.w->ns, b.keys, 1 + below(2), WAIT_MS, &changed);
        break;
    case 1:
        rc = ucm_unpin(b.w->ns, NULL, 0, WAIT_MS, &changed);
        break;
    case 2:
        if (chance(90))
            return;
        rc = ucm_evict(b.w->ns, NULL, 0, WAIT_MS, &changed, &busy);
        break;
    default:
        rc = ucm_evict(b.w->ns, b.keys, b.n, WAIT_MS, &changed, &busy);
        break;
    }
    if (rc != 0)
        wrong("pin, unpin or evict: %s", ucm_errmsg());
}

/* A lease that nobody ends: the connection's end does. */
static void do_forget_lease(void)
{
    struct batch b;

    batch_choose(&b, some_worker(), 0, BLOCKS);
    batch_lease(&b);
}

static void open_worker(uint32_t part)
{
    worker_open(&me.w[part], &host,
                &(struct worker_options){.model = me.space->model,
                                         .parts = me.space->parts,
                                         .part = part,
                                         .layers = me.space->layers,
                                         .blocks = BLOCKS,
                                         .shard_bytes = me.space->shard_bytes});
}

/* The region goes while its load is under way: the load ends first, and only then the mapping. */
static void do_reopen(void)
{
    struct worker *w = some_worker();
    struct ucm_task *task = NULL;
    struct batch b;

    batch_choose(&b, w, 0, BLOCKS);
    if (chance(70)) {
        b.may_stop = true;
        batch_clear(&b);
        task = batch_begin(&b, true);
    }
    if (ucm_region_unregister(w->region, WAIT_MS) != 0)
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

static _Noreturn void process_run(uint64_t seed)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    me.seed = random_state = seed;
    me.number = below(SPACES);
    me.space = &spaces[me.number];
    for (uint32_t p = 0; p < me.space->parts; p++)
        open_worker(p);
    for (me.op = 0; !leaving && me.op < 2000; me.op++) {
        acts[below(sizeof(acts) / sizeof(acts[0]))]();
        if (chance(5))
            sleep_ms((int)below(10));
    }
    for (uint32_t p = 0; p < me.space->parts; p++) {
        if (ucm_generation(me.w[p].client) != 1)
            wrong("the daemon dropped a connection");
        if (chance(50))
            worker_close(&me.w[p]);
    }
    _exit(0);
}

/* ---- the one who stops, kills and counts them ---- */

struct process {
    pid_t pid;
    uint64_t wake_ms; /* stopped until then; 0: runs */
};

static void process_start(struct process *p)
{
    uint64_t seed = random_next();

    fflush(NULL);
    p->wake_ms = 0;
    p->pid = fork();
    cr_assert_geq(p->pid, 0);
    if (p->pid == 0)
        process_run(seed);
}

static void process_judge(int status)
{
    bool fine = WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0;

    cr_assert(fine, "a worker ended with status %#x", (unsigned)status);
}

static void process_disturb(struct process *p)
{
    if (p->wake_ms != 0) {
        if (now_ms() < p->wake_ms)
            return;
        p->wake_ms = 0;
        kill(p->pid, SIGCONT);
    } else if (below(1000) < 4) {
        kill(p->pid, SIGKILL);
    } else if (below(1000) < 8) {
        kill(p->pid, SIGSTOP);
        p->wake_ms = now_ms() + 20 + below(300);
    }
}

static void processes_end(struct process *all)
{
    uint64_t end = now_ms() + 2 * WAIT_MS;

    for (int i = 0; i < PROCESSES; i++) {
        kill(all[i].pid, chance(50) ? SIGKILL : SIGTERM);
        kill(all[i].pid, SIGCONT);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status;

        while (waitpid(all[i].pid, &status, WNOHANG) == 0) {
            cr_assert_lt(now_ms(), end, "a worker does not end");
            sleep_ms(5);
        }
        process_judge(status);
    }
}

static unsigned churn(uint64_t until_ms)
{
    struct process all[PROCESSES];
    unsigned started = PROCESSES;

    for (int i = 0; i < PROCESSES; i++)
        process_start(&all[i]);
    while (now_ms() < until_ms) {
        for (int i = 0; i < PROCESSES; i++) {
            int status;

            cr_assert_eq(waitpid(host.pid, &status, WNOHANG), 0, "the daemon ended, status %#x",
                         (unsigned)status);
            if (waitpid(all[i].pid, &status, WNOHANG) == all[i].pid) {
                process_judge(status);
                process_start(&all[i]);
                started++;
            } else {
                process_disturb(&all[i]);
            }
        }
        sleep_ms(5);
    }
    processes_end(all);
    return started;
}

/* ---- what is left ---- */

static bool falls_to(struct ucm_client *c, const char *name, uint64_t most)
{
    for (uint64_t end = now_ms() + 20000; now_ms() < end; sleep_ms(10))
        if (metric(c, name) <= most)
            return true;
    return false;
}

static void evict_all(struct ucm_client *c)
{
    for (size_t i = 0; i < SPACES; i++) {
        struct ucm_identity id = {.model = spaces[i].model,
                                  .dtype = "bf16",
                                  .layout = "test/1",
                                  .block_tokens = 16,
                                  .key_bytes = WORKER_KEY_BYTES,
                                  .parts = spaces[i].parts,
                                  .shards = &spaces[i].layers,
                                  .n_shards = 1,
                                  .shard_bytes = spaces[i].shard_bytes};
        struct ucm_namespace *ns;
        uint64_t changed, busy;

        cr_assert_eq(ucm_namespace_open(c, &id, WAIT_MS, &ns), 0, "%s", ucm_errmsg());
        cr_assert_eq(ucm_unpin(ns, NULL, 0, WAIT_MS, &changed), 0, "%s", ucm_errmsg());
        cr_assert_eq(ucm_evict(ns, NULL, 0, WAIT_MS, &changed, &busy), 0, "%s", ucm_errmsg());
        ucm_namespace_close(ns);
    }
}

static void expect_nothing_left(struct ucm_client *c)
{
    static const char *const left[] = {"regions", "leases", "requests_active"};
    static const char *const after[] = {"blocks", "blocks_partial", "blocks_pinned",
                                        "arena_bytes_used", "nvme_bytes_used"};

    cr_assert(falls_to(c, "connections", 1), "connections");
    for (size_t i = 0; i < sizeof(left) / sizeof(left[0]); i++)
        cr_assert(falls_to(c, left[i], 0), "%s: %llu left", left[i],
                  (unsigned long long)metric(c, left[i]));
    evict_all(c);
    for (size_t i = 0; i < sizeof(after) / sizeof(after[0]); i++)
        cr_assert(falls_to(c, after[i], 0), "%s: %llu left after everything was evicted", after[i],
                  (unsigned long long)metric(c, after[i]));
    cr_expect_eq(metric(c, "nvme_corrupt"), 0u);
    cr_expect_eq(metric(c, "nvme_read_errors"), 0u);
    cr_expect_eq(metric(c, "connections_dropped"), 0u);
}

static unsigned daemon_fds(void)
{
    char path[64];
    unsigned n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)host.pid);
    dir = opendir(path);
    cr_assert(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* A checkpoint or a list of namespaces that is being written has its files open for a moment. */
static bool fds_fall_to(unsigned most)
{
    for (uint64_t end = now_ms() + WAIT_MS; daemon_fds() > most; sleep_ms(20))
        if (now_ms() >= end)
            return false;
    return true;
}

static uint64_t daemon_rss_bytes(void)
{
    char path[64];
    unsigned long pages = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)host.pid);
    f = fopen(path, "r");
    cr_assert(f);
    cr_assert_eq(fscanf(f, "%*u %lu", &pages), 1);
    fclose(f);
    return pages * 4096;
}

/* Sanitizers keep what was freed for a while. */
#ifdef SANITIZED
#define RSS_SLACK_BYTES (400u << 20)
#else
#define RSS_SLACK_BYTES (8u << 20)
#endif

static uint64_t number_from(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void remove_host(void)
{
    host_remove(&host);
}

TestSuite(churn, .fini = remove_host, .timeout = 3600);

Test(churn, workers_come_and_go_and_nothing_is_ever_wrong)
{
    static const char *const progress[] = {
        "dump_blocks",   "load_blocks_dram",    "load_blocks_nvme",     "prefetch_blocks",
        "single_flight", "arena_extents_moved", "arena_evicted_blocks", "nvme_reclaimed_segments"};
    uint64_t seconds = number_from("UCM_CHURN_SECONDS", SECONDS);
    uint64_t seed = number_from("UCM_SEED", now_ms() * 1000003 + (uint64_t)getpid());
    unsigned rounds = seconds > 20 * ROUNDS ? (unsigned)(seconds / 20) : ROUNDS, fds = 0;
    /* Children inherit it: one that SIGTERM reaches before it runs must not die of it. */
    struct sigaction leave = {.sa_handler = leave_cb, .sa_flags = SA_RESTART};
    uint64_t rss = 0;

    cr_assert_eq(sigaction(SIGTERM, &leave, NULL), 0);
    random_state = seed;
    fprintf(stderr, "UCM_SEED=%#llx UCM_CHURN_SECONDS=%llu\n", (unsigned long long)seed,
            (unsigned long long)seconds);
    alarm((unsigned)(4 * seconds + 300));
    host = (struct host){
        .nvme = true,
        .sets = {"arena.size=16MiB", "nvme.size=24MiB", "nvme.segment=2MiB", "nvme.backlog=8MiB"}};
    host_start(&host);
    for (unsigned round = 0; round < rounds; round++) {
        struct ucm_options options = {.socket = host.socket, .name = "counter"};
        unsigned started = churn(now_ms() + seconds * 1000 / rounds);
        struct ucm_client *c;

        cr_assert_eq(ucm_connect(&options, WAIT_MS, &c), 0, "%s", ucm_errmsg());
        expect_nothing_left(c);
        fprintf(stderr, "round %u: %u processes, fds %u, rss %llu KiB", round, started,
                daemon_fds(), (unsigned long long)daemon_rss_bytes() / 1024);
        for (size_t i = 0; i < sizeof(progress) / sizeof(progress[0]); i++)
            fprintf(stderr, ", %s %llu", progress[i], (unsigned long long)metric(c, progress[i]));
        fputc('\n', stderr);
        if (round == 0) {
            fds = daemon_fds();
            rss = daemon_rss_bytes();
            /* Else nothing of what this test is about has happened. */
            cr_expect_gt(metric(c, "load_blocks_nvme"), 0u);
            cr_expect_gt(metric(c, "arena_evicted_blocks"), 0u);
        }
        cr_expect(fds_fall_to(fds), "descriptors leak: %u, %u before", daemon_fds(), fds);
        cr_expect_leq(daemon_rss_bytes(), rss + RSS_SLACK_BYTES, "memory leaks");
        ucm_close(c);
    }
    cr_expect_eq(host_stop(&host), 0, "the daemon's exit status");
}
