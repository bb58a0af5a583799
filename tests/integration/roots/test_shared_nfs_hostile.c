/* Servers that lie to the process of an NFS root, and that process killed. It may crash, hang or fail; the daemon lives,
 * another root serves, and what is delivered is right. */
/* Sanitizers: address */
#include "tests/integration/roots/nfs_rig.h"

#include "daemon/base/log.h"

#include <limits.h>

#define BYTES 3000u
#define BUFFER_BYTES (1u << 20) /* small, because each start makes all its pages */
#define FILES 8u                /* that are there */
/* An operation that takes longer is taken back, as a root would: more than the first FILES writes
 * took, all replies of which passed. */
enum { OP_MS = 40, OP_MOST_MS = 250 };

static struct shared_backend *beside; /* a directory, on the same loop */

static void begin(struct contract *c)
{
    nfs_rig_relay_begin(c);
    nfs_rig_process.patience_ms = 1000;
    nfs_rig_process.buffer_bytes = BUFFER_BYTES;
    log_set_level(LOG_ERROR);
}

/* The other root takes the place of the one that is tested, and gives it back. */
static void swap(struct contract *c, struct shared_backend **b)
{
    struct shared_backend *other = *b;

    *b = c->b;
    c->b = other;
}

static void other_root_serves(struct contract *c, unsigned number)
{
    swap(c, &beside);
    cr_assert_eq(contract_write(c, number, BYTES), 0);
    cr_assert_eq(contract_read(c, number, BYTES), 0);
    swap(c, &beside);
}

static void beside_open(struct contract *c)
{
    struct config_process process;
    char directory[160];
    struct shared_backend_config config = {.loop = &c->loop,
                                           .deadlines = &c->deadlines,
                                           .target = directory,
                                           .host = "host",
                                           .depth = 2,
                                           .process = &process};

    snprintf(directory, sizeof(directory), "%s/beside", nfs_rig_server.directory);
    cr_assert(mkdir(directory, 0700) == 0 || errno == EEXIST);
    shared_directory_process(&process, directory);
    process.buffer_bytes = BUFFER_BYTES;
    cr_assert_eq(shared_process.open(&config, &beside), 0);
}

/* ---- one operation ---- */

/* The relay lets all replies pass. */
static void relay_well(void)
{
    nfs_relay_put(&relay, NULL, 0, false);
    atomic_store(&relay.word_at, 0);
    atomic_store(&relay.damage_every, 0);
    atomic_store(&relay.say_after, 0);
}

static unsigned op_ms = OP_MS;

static int run_in_time(struct contract *c, struct contract_op *o)
{
    uv_update_time(&c->loop);
    o->op.deadline_ms = uv_now(&c->loop) + op_ms;
    contract_start(c, o);
    for (unsigned ms = 0; o->status == PENDING && ms < op_ms; ms++)
        nfs_rig_turn_for(c, 1);
    while (o->status == PENDING && !c->ops->cancel(c->b, &o->op)) /* a thread copies */
        nfs_rig_turn_for(c, 1);
    if (o->status == PENDING || o->status == -ETIMEDOUT) {
        o->status = -ETIMEDOUT;
        atomic_store(&relay.cut, 1); /* a reply's length was damaged: it goes on for ever */
    }
    return o->status;
}

static const enum shared_verb verbs[] = {SHARED_READ,   SHARED_LIST,  SHARED_FIND, SHARED_WRITE,
                                         SHARED_REMOVE, SHARED_TOUCH, SHARED_CHECK};
#define VERBS (sizeof(verbs) / sizeof(verbs[0]))

/* Runs the i-th operation, on one of the files that are there, or on one that is not. Returns its
 * status, and checks what was read. */
static int one(struct contract *c, unsigned i)
{
    enum shared_verb verb = verbs[i % VERBS];
    bool changes = verb == SHARED_WRITE || verb == SHARED_REMOVE;
    uint8_t *data = contract_data(BYTES, 100 + i);
    struct contract_op o = {.op = contract_of(verb, changes ? 100 + i : i % FILES, data, BYTES)};
    int status;

    o.op.sync = i % 2;
    status = run_in_time(c, &o);
    if (status == 0)
        shared_listing_free(&o.op.listing);
    if (verb == SHARED_READ && status == 0)
        contract_right(data, BYTES, i % FILES);
    free(data);
    return status;
}

static void until_up(struct contract *c)
{
    uint64_t now;

    relay_well();
    for (unsigned i = 0; contract_check(c, false, &now) != 0; i++) {
        cr_assert_lt(i, 1000);
        nfs_rig_turn_for(c, 10);
    }
}

/* All files are there and right, and more can be stored. */
static void serves(struct contract *c)
{
    until_up(c);
    for (unsigned i = 0; i < FILES; i++)
        cr_assert_eq(contract_read(c, i, BYTES), 0);
    cr_assert_eq(contract_write(c, 99, BYTES), 0);
    cr_assert_eq(contract_read(c, 99, BYTES), 0);
}

/* Ends pauses at once: of a connection by a check, of a process by a new root. */
static void go_on(struct contract *c)
{
    struct shared_process_stats stats;
    uint64_t now;

    c->ops->process(c->b, &stats);
    if (stats.ends > 0) {
        shared_process.close(beside); /* its process keeps the event loop alive */
        contract_close(c);
        contract_open(c);
        beside_open(c);
    }
    (void)contract_check(c, false, &now);
}

/* Runs n operations. prepare_cb tells the relay what to do to a reply of the i-th one. */
static void under(struct contract *c, unsigned n, void (*prepare_cb)(unsigned i))
{
    unsigned whole = 0;
    uint64_t began_ms, took_ms;

    beside_open(c);
    uv_update_time(&c->loop);
    began_ms = uv_now(&c->loop);
    for (unsigned i = 0; i < FILES; i++)
        cr_assert_eq(contract_write(c, i, BYTES), 0);
    uv_update_time(&c->loop);
    took_ms = uv_now(&c->loop) - began_ms;
    op_ms = took_ms < OP_MOST_MS - OP_MS ? OP_MS + (unsigned)took_ms : OP_MOST_MS;
    for (unsigned i = 0; i < n; i++) {
        int status;

        if (i % (2 * VERBS) == 0) /* some reads find the root up, also on a busy host */
            until_up(c);
        prepare_cb(i);
        status = one(c, i);
        whole += verbs[i % VERBS] == SHARED_READ && status == 0;
        relay_well();
        if (!contract_answer(status))
            go_on(c);
        if (i % 8 == 0)
            other_root_serves(c, i);
    }
    serves(c);
    cr_assert_gt(whole, 0);
    shared_process.close(beside);
}

#define HOSTILE(name, n, prepare_cb)                                                               \
    static void name(struct contract *c)                                                           \
    {                                                                                              \
        under(c, n, prepare_cb);                                                                   \
    }                                                                                              \
    Test(shared_nfs_hostile, name)                                                                 \
    {                                                                                              \
        contract_case(begin, nfs_rig_relay_end, name);                                             \
    }

/* ---- any bytes of any replies: lengths, numbers, handles, data ---- */

static void damage(unsigned i)
{
    static const unsigned every[] = {100, 300, 1000, 10000};

    atomic_store(&relay.damage_every, every[i % 4]);
}

HOSTILE(bytes_of_replies_are_wrong, 200, damage)

/* ---- one number of one reply ---- */

static void word(unsigned i)
{
    static const uint32_t values[] = {0x7fffffff, 0x80000000, 0x80000004, 0xfffffffc,
                                      0xffffffff, 0,          0x00100000, 65};

    atomic_store(&relay.say_after, i / VERBS % 4);
    atomic_store(&relay.word_is, values[i * 7 / 3 % 8]);
    atomic_store(&relay.word_at, 28 + i * 5 / 7 % 50 * 4);
}

HOSTILE(a_number_in_a_reply_is_wrong, 250, word)

/* ---- replies that were found to break decoders ---- */

#define ACCEPTED 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
#define OK 0, 0, 0, 0
#define NO 0, 0, 0, 0
#define YES 0, 0, 0, 1
#define HUGE 0x80, 0, 0, 4

/* The bytes after a reply's number. libnfs 4.0 crashes on the names. */
static const uint8_t handle_huge[] = {ACCEPTED, OK, HUGE, 1, 2, 3, 4};
static const uint8_t data_huge[] = {ACCEPTED, OK, NO, 0, 0, 0x10, 0, YES, HUGE, 1, 2, 3, 4};
static const uint8_t name_huge[] = {ACCEPTED, OK, NO, 0, 0, 0, 0, 0,    0,   0,   0,   YES, 0,
                                    0,        0,  0,  0, 0, 0, 7, HUGE, 'n', 'a', 'm', 'e', 0,
                                    0,        0,  0,  0, 0, 0, 1, NO,   NO,  NO,  YES};
static const uint8_t name_none[] = {ACCEPTED, OK, NO, 0, 0, 0, 0, 0, 0, 0, 0, YES, 0, 0, 0, 0};
static const uint8_t cut_short[] = {ACCEPTED, OK};
static const uint8_t denied[] = {0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 5};
static const uint8_t call_back[] = {0,    0,    0, 0, 0, 0, 0, 2, 0, 1,
                                    0x86, 0xa3, 0, 0, 0, 3, 0, 0, 0, 0};

static const struct {
    const uint8_t *bytes;
    unsigned n;
} bodies[] = {{handle_huge, sizeof(handle_huge)}, {data_huge, sizeof(data_huge)},
              {name_huge, sizeof(name_huge)},     {name_none, sizeof(name_none)},
              {cut_short, sizeof(cut_short)},     {denied, sizeof(denied)},
              {call_back, sizeof(call_back)}};
#define BODIES (sizeof(bodies) / sizeof(bodies[0]))

static void body(unsigned i)
{
    atomic_store(&relay.say_after, i / VERBS % 3);
    nfs_relay_put(&relay, bodies[i / 3 % BODIES].bytes, bodies[i / 3 % BODIES].n, false);
}

HOSTILE(a_reply_is_none, 3 * VERBS * BODIES, body)

/* ---- streams that a fuzzer found: tests/integration/nfs_replies ---- */

static struct {
    uint8_t bytes[4096];
    unsigned n;
} streams[32];
static unsigned n_streams;

static void streams_load(void)
{
    const struct dirent *e;
    DIR *dir = opendir("tests/integration/nfs_replies");

    cr_assert(dir);
    while ((e = readdir(dir)) != NULL && n_streams < 32) {
        char path[512];
        int fd;
        ssize_t n;

        snprintf(path, sizeof(path), "tests/integration/nfs_replies/%s", e->d_name);
        fd = e->d_name[0] == '.' ? -1 : open(path, O_RDONLY);
        if (fd < 0)
            continue;
        n = read(fd, streams[n_streams].bytes, sizeof(streams[0].bytes));
        close(fd);
        cr_assert_gt(n, 2);
        streams[n_streams++].n = (unsigned)n;
    }
    closedir(dir);
    cr_assert_gt(n_streams, 0);
}

/* Sends a stream as it is, and as the body of a reply. The first two bytes told the fuzz target
 * what to do. */
static void stream(unsigned i)
{
    unsigned which;

    if (n_streams == 0)
        streams_load();
    which = i / VERBS % n_streams;
    atomic_store(&relay.say_after, i % 3);
    nfs_relay_put(&relay, streams[which].bytes + 2, streams[which].n - 2, i / 2 % 2);
}

HOSTILE(a_stream_is_any, 140, stream)

/* ---- the process is killed ---- */

enum { KEYS = 400, KEY_BYTES = 100000, LOAD_OPS = 8, KILLS = 7, DONE_BETWEEN = 24 };

struct load {
    struct contract_op ops[LOAD_OPS];
    bool stored[KEYS];            /* it was acknowledged */
    unsigned random, reads, done; /* done: reads and writes that went well */
};

/* Checks each operation that has ended, and begins another one in its place. */
static void load_turn(struct contract *c, struct load *l, bool more)
{
    for (unsigned i = 0; i < LOAD_OPS; i++) {
        struct contract_op *o = &l->ops[i];
        uint8_t *data = o->op.data;
        unsigned number;

        if (o->status == PENDING)
            continue;
        memcpy(&number, o->op.id.key, sizeof(number));
        if (o->op.verb == SHARED_WRITE && (o->status == 0 || o->status == -EEXIST))
            l->stored[number] = true;
        if (o->op.verb == SHARED_READ && o->status == 0)
            contract_right(data, KEY_BYTES, number);
        l->reads += o->op.verb == SHARED_READ && o->status == 0;
        l->done += o->status == 0;
        if (!more)
            continue;
        l->random = l->random * 1103515245u + 12345u;
        number = (l->random >> 16) % KEYS;
        o->op =
            contract_of(l->random >> 8 & 1 ? SHARED_READ : SHARED_WRITE, number, data, KEY_BYTES);
        if (o->op.verb == SHARED_WRITE)
            bytes_put(data, KEY_BYTES, number);
        contract_start(c, o);
    }
    uv_run(&c->loop, UV_RUN_NOWAIT);
    usleep(200); /* the others' turn */
}

static void killed(struct contract *c)
{
    struct load *l = calloc(1, sizeof(*l));
    struct shared_process_stats stats;
    unsigned kills = 0, kept = 0, until = DONE_BETWEEN;

    l->random = 1;
    for (unsigned i = 0; i < LOAD_OPS; i++)
        l->ops[i].op = contract_of(SHARED_FIND, 0, contract_data(KEY_BYTES, 0), KEY_BYTES);
    while (kills < KILLS) {
        load_turn(c, l, true);
        c->ops->process(c->b, &stats);
        if (stats.pid == 0 || stats.name[0] == '\0') {
            until = l->done + DONE_BETWEEN;
        } else if (l->done >= until) {
            cr_assert_eq(kill((pid_t)stats.pid, SIGKILL), 0);
            kills++;
            until = UINT_MAX;
        }
    }
    for (unsigned i = 0; i < LOAD_OPS; i++)
        while (l->ops[i].status == PENDING)
            uv_run(&c->loop, UV_RUN_ONCE);
    load_turn(c, l, false);
    until_up(c);
    for (unsigned i = 0; i < KEYS; i++) {
        if (!l->stored[i])
            continue;
        cr_assert_eq(contract_read(c, i, KEY_BYTES), 0);
        kept++;
    }
    cr_assert(kept > 0 && l->reads > 0);
    for (unsigned i = 0; i < LOAD_OPS; i++)
        free(l->ops[i].op.data);
    free(l);
}

Test(shared_nfs_hostile, the_process_is_killed_again_and_again)
{
    contract_case(begin, nfs_rig_relay_end, killed);
}
