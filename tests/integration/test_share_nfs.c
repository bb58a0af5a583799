/* The NFS root against a real server: what every backend promises, and what servers do to it. */
#include "nfs_relay.h"
#include "nfs_server.h"
#include "tests/unit/share_contract.h"

#include "daemon/base/log.h"
#include "daemon/share/nfs_conn.h"
#include "daemon/share/nfs_proc.h"

#include <dlfcn.h>
#include <netdb.h>
#include <signal.h>

static struct nfs_server server;
static struct nfs_relay relay;

/* ---- a resolver and a kernel of the test's own ---- */

#define TWO_ADDRESSES "two-addresses.test"

static unsigned polls_that_fail;

#pragma GCC visibility push(default) /* libuv and the daemon call these */

/* The server of this name has an address where the relay does not listen, and then its own. */
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **out)
{
    static int (*resolve)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    int err;

    *(void **)&resolve = dlsym(RTLD_NEXT, "getaddrinfo");
    if (!name || strcmp(name, TWO_ADDRESSES) != 0)
        return resolve(name, service, hints, out);
    err = resolve("127.0.0.9", service, hints, out);
    return err ? err : resolve("127.0.0.1", service, hints, &(*out)->ai_next);
}

int uv_poll_start(uv_poll_t *poll, int events, uv_poll_cb cb)
{
    static int (*start)(uv_poll_t *, int, uv_poll_cb);

    *(void **)&start = dlsym(RTLD_NEXT, "uv_poll_start");
    if (polls_that_fail > 0) {
        polls_that_fail--;
        return -ENOMEM;
    }
    return start(poll, events, cb);
}

#pragma GCC visibility pop

/* ---- what every backend promises ---- */

static void server_begin(void)
{
    const char *lacks = nfs_server_lacks();

    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    if (lacks)
        cr_skip("%s", lacks);
    nfs_server_open(&server);
}

static void server_away(struct contract *c)
{
    (void)c;
    nfs_server_kill(&server);
}

static void server_back(struct contract *c)
{
    (void)c;
    nfs_server_start(&server);
}

static void begin(struct contract *c)
{
    server_begin();
    c->ops = &share_nfs;
    strcpy(c->folder, server.export);
    strcpy(c->target, server.url);
    c->root_away = server_away;
    c->root_back = server_back;
}

static void end(struct contract *c)
{
    (void)c;
    nfs_server_close(&server);
}

SHARE_CONTRACT(share_nfs, begin, end)

/* ---- what servers and networks do ---- */

static void begin_by_relay(struct contract *c)
{
    begin(c);
    nfs_relay_open(&relay, NFS_SERVER_PORT);
    snprintf(c->target, sizeof(c->target), "nfs://127.0.0.1:%d/kv?mountport=%d", NFS_RELAY_PORT,
             NFS_SERVER_MOUNT_PORT);
}

static void end_by_relay(struct contract *c)
{
    nfs_relay_close(&relay);
    end(c);
}

#define NFS_CASE(name, begin, end)                                                                 \
    static void name(struct contract *c);                                                          \
    Test(share_nfs, name)                                                                          \
    {                                                                                              \
        contract_case(begin, end, name);                                                           \
    }                                                                                              \
    static void name(struct contract *c)

static void turn_for(struct contract *c, uint64_t ms)
{
    uint64_t until = uv_hrtime() + ms * 1000000;

    while (uv_hrtime() < until) {
        uv_run(&c->loop, UV_RUN_NOWAIT);
        usleep(500);
    }
}

static void starts_of(struct contract *c, struct contract_op *ops, unsigned n, enum share_verb verb,
                      uint64_t bytes)
{
    for (unsigned i = 0; i < n; i++) {
        uint8_t *data = ops[i].op.data ? ops[i].op.data : contract_data(bytes, i);

        ops[i].op = contract_of(verb, i, data, bytes);
        contract_start(c, &ops[i]);
    }
}

static unsigned requests_of(struct contract *c, enum share_verb verb, unsigned number,
                            uint64_t bytes, int expected)
{
    unsigned before = atomic_load(&relay.requests);
    uint8_t *data = contract_data(bytes, number);

    cr_assert_eq(contract_do(c, verb, number, data, bytes), expected);
    free(data);
    return atomic_load(&relay.requests) - before;
}

NFS_CASE(a_file_is_found_by_one_request, begin_by_relay, end_by_relay)
{
    cr_assert_eq(contract_write(c, 1, 5000), 0);
    cr_assert_eq(requests_of(c, SHARE_FIND, 1, 5000, 0), 1);
    cr_assert_eq(contract_do(c, SHARE_REMOVE, 1, NULL, 0), 0);
    cr_assert_eq(requests_of(c, SHARE_FIND, 1, 5000, -ENOENT), 1);
    cr_assert_eq(requests_of(c, SHARE_WRITE, 1, 5000, 0), 4, "look, create, write, rename");
    cr_assert_eq(requests_of(c, SHARE_READ, 1, 5000, 0), 2);
    cr_assert_eq(requests_of(c, SHARE_WRITE, 1, 5000, -EEXIST), 1);
    cr_assert_not(uv_loop_alive(&c->loop), "nothing wakes an idle daemon");
}

static unsigned descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    unsigned n = 0;

    cr_assert(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

NFS_CASE(a_cut_connection_is_made_again, begin_by_relay, end_by_relay)
{
    unsigned before;

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    before = descriptors();
    for (unsigned i = 0; i < 30; i++) {
        atomic_store(&relay.cut, 1);
        if (i % 2) /* found out while nobody asks, or by who asks */
            turn_for(c, 20);
        cr_assert_eq(contract_read(c, 1, 5000), 0);
        while (atomic_load(&relay.cut) > 0)
            turn_for(c, 1);
    }
    turn_for(c, 50);
    cr_assert_eq(contract_read(c, 1, 5000), 0);
    turn_for(c, 50);
    cr_assert_leq(descriptors(), before + 2, "the relay may be late");
}

static int ended_with(struct contract *c, enum share_verb verb, unsigned number, unsigned after,
                      unsigned status)
{
    uint8_t *data = contract_data(5000, number);
    int err;

    atomic_store(&relay.say_after, after);
    atomic_store(&relay.say_status, status);
    err = contract_do(c, verb, number, data, 5000);
    cr_assert_eq(atomic_load(&relay.say_status), 0, "it was said");
    free(data);
    return err;
}

NFS_CASE(what_servers_say_is_understood, begin_by_relay, end_by_relay)
{
    enum { LOOK, CREATE, WRITE };
    unsigned files;

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    contract_do(c, SHARE_FIND, 2, NULL, 5000); /* its bucket is made */
    cr_assert_eq(contract_write(c, 2, 5000), 0);
    cr_assert_eq(contract_do(c, SHARE_REMOVE, 2, NULL, 0), 0);
    cr_assert_eq(ended_with(c, SHARE_FIND, 1, LOOK, NFS_ERR_JUKEBOX), 0, "asked again later");
    cr_assert_eq(ended_with(c, SHARE_FIND, 1, LOOK, NFS_ERR_STALE), 0, "with fresh handles");
    cr_assert_eq(ended_with(c, SHARE_FIND, 1, LOOK, NFS_ERR_ACCES), -EACCES);
    cr_assert_eq(ended_with(c, SHARE_READ, 1, 1, NFS_ERR_STALE), -ENOENT, "somebody removed it");
    cr_assert_eq(ended_with(c, SHARE_READ, 1, 1, NFS_ERR_IO), -EIO);
    cr_assert_eq(ended_with(c, SHARE_READ, 1, 1, 77777), -EIO);
    files = contract_files(c->folder);
    cr_assert_eq(ended_with(c, SHARE_WRITE, 2, CREATE, NFS_ERR_DQUOT), -EDQUOT);
    cr_assert_eq(ended_with(c, SHARE_WRITE, 2, WRITE, NFS_ERR_NOSPC), -ENOSPC);
    cr_assert_eq(contract_files(c->folder), files + 1, "made, though the server denied it");
    cr_assert_eq(ended_with(c, SHARE_WRITE, 2, WRITE, NFS_ERR_JUKEBOX), 0, "begun anew");
    cr_assert_eq(contract_files(c->folder), files + 2);
    cr_assert_eq(contract_read(c, 2, 5000), 0);
    cr_assert_eq(contract_do(c, SHARE_REMOVE, 2, NULL, 0), 0);
}

/* As a root would: what is not done in time is taken back. */
static int run_in_time(struct contract *c, struct contract_op *o)
{
    contract_start(c, o);
    for (unsigned ms = 0; o->status == PENDING && ms < 60; ms++)
        turn_for(c, 1);
    if (o->status != PENDING)
        return o->status;
    cr_assert(c->ops->cancel(c->b, &o->op));
    atomic_store(&relay.cut,
                 1); /* what was damaged may be how long a reply is: it goes on for ever */
    return -ETIMEDOUT;
}

/* What is delivered is right, whichever bytes of whichever replies are not: lengths, numbers,
 * handles, data. */
NFS_CASE(a_lying_server_delivers_nothing_wrong, begin_by_relay, end_by_relay)
{
    static const enum share_verb verbs[] = {SHARE_READ, SHARE_WRITE, SHARE_FIND, SHARE_READ,
                                            SHARE_LIST, SHARE_CHECK, SHARE_TOUCH};
    static const unsigned every[] = {100, 300, 1000, 10000};
    enum { BYTES = 3000 };
    uint8_t *data = malloc(BYTES);
    unsigned whole = 0;

    cr_assert(data);
    for (unsigned i = 0; i < 8; i++)
        cr_assert_eq(contract_write(c, i, BYTES), 0);
    log_set_level(LOG_ERROR);
    for (unsigned i = 0; i < 400; i++) {
        struct contract_op o = {.op = contract_of(verbs[i % 7], i % 8, data, BYTES)};

        if (o.op.verb == SHARE_WRITE)
            o.op.id = contract_id(100 + i);
        o.op.sync = i % 2;
        contract_fill(data, BYTES, o.op.verb == SHARE_WRITE ? 100 + i : 0);
        atomic_store(&relay.damage_every, every[i % 4]);
        if (run_in_time(c, &o) < 0)
            continue;
        share_listing_free(&o.op.listing);
        for (unsigned at = 0; o.op.verb == SHARE_READ && at < BYTES; at++)
            cr_assert_eq(data[at], contract_byte(i % 8, at));
        whole += o.op.verb == SHARE_READ;
    }
    atomic_store(&relay.damage_every, 0);
    cr_assert_gt(whole, 0);
    turn_for(c, NFS_PAUSE_MS + 50);
    cr_assert_eq(contract_do(c, SHARE_FIND, 9, NULL, BYTES), -ENOENT);
    free(data);
}

/* A hung server: operations are taken back at once, and what it answers later lands nowhere. */
NFS_CASE(late_replies_land_nowhere, begin, end)
{
    enum { N = 24, BYTES = 600000 };
    static struct contract_op ops[N];
    int status;

    starts_of(c, ops, N, SHARE_WRITE, BYTES);
    contract_wait(c, N);
    for (unsigned verb = SHARE_READ; verb <= SHARE_WRITE; verb++) {
        unsigned done = c->done;

        starts_of(c, ops, N, (enum share_verb)verb, BYTES);
        while (c->done == done) /* some are on their way now */
            uv_run(&c->loop, UV_RUN_ONCE);
        nfs_server_hang(&server, true);
        turn_for(c, 50);
        for (unsigned i = 0; i < N; i++) {
            if (ops[i].status == PENDING)
                cr_assert(c->ops->cancel(c->b, &ops[i].op));
            memset(ops[i].op.data, 0x5a, BYTES);
        }
        nfs_server_hang(&server, false);
        turn_for(c, 300);
        for (unsigned i = 0; i < N; i++)
            for (unsigned at = 0; at < BYTES; at++)
                cr_assert_eq(((uint8_t *)ops[i].op.data)[at], 0x5a);
        for (unsigned i = 0; i < N; i++) {
            contract_fill(ops[i].op.data, BYTES, i);
            status = contract_do(c, SHARE_REMOVE, i, NULL, 0);
            cr_assert(status == 0 || (verb == SHARE_WRITE && status == -ENOENT));
        }
    }
    for (unsigned i = 0; i < N; i++)
        free(ops[i].op.data);
    cr_assert_eq(contract_files(c->folder), 0, "temporary files");
}

enum { LOAD_OPS = 16, LOAD_KEYS = 48, LOAD_BYTES = 200000 };

/* What has ended is looked at, and something else begun in its place. */
static void load_turn(struct contract *c, struct contract_op *ops, unsigned *random, bool more)
{
    static const enum share_verb verbs[] = {SHARE_READ, SHARE_WRITE, SHARE_FIND, SHARE_READ};

    for (unsigned i = 0; i < LOAD_OPS; i++) {
        struct contract_op *o = &ops[i];
        uint8_t *data = o->op.data;
        unsigned number;

        if (o->status == PENDING)
            continue;
        memcpy(&number, o->op.id.key, sizeof(number));
        for (unsigned at = 0; o->op.verb == SHARE_READ && o->status == 0 && at < LOAD_BYTES; at++)
            cr_assert_eq(data[at], contract_byte(number, at));
        if (!more)
            continue;
        *random = *random * 1103515245u + 12345u;
        number = (*random >> 16) % LOAD_KEYS;
        o->op = contract_of(verbs[(*random >> 8) % 4], number, data, LOAD_BYTES);
        if (o->op.verb == SHARE_WRITE)
            contract_fill(data, LOAD_BYTES, number);
        contract_start(c, o);
    }
    uv_run(&c->loop, UV_RUN_NOWAIT);
}

static void load_for(struct contract *c, struct contract_op *ops, unsigned *random, uint64_t ms)
{
    uint64_t until = uv_hrtime() + ms * 1000000;

    while (uv_hrtime() < until)
        load_turn(c, ops, random, true);
}

NFS_CASE(a_server_is_killed_under_load, begin, end)
{
    static struct contract_op ops[LOAD_OPS];
    unsigned random = 1;
    uint64_t now;

    log_set_level(LOG_ERROR);
    for (unsigned i = 0; i < LOAD_OPS; i++)
        ops[i].op = contract_of(SHARE_FIND, 0, contract_data(LOAD_BYTES, 0), LOAD_BYTES);
    for (unsigned i = 0; i < 5; i++) {
        load_for(c, ops, &random, 150);
        nfs_server_kill(&server);
        load_for(c, ops, &random, 30 * i);
        nfs_server_start(&server);
    }
    load_for(c, ops, &random, NFS_PAUSE_MS + 200);
    for (unsigned i = 0; i < LOAD_OPS; i++)
        while (ops[i].status == PENDING)
            uv_run(&c->loop, UV_RUN_ONCE);
    load_turn(c, ops, &random, false);
    cr_assert_eq(contract_check(c, true, &now), 0);
    for (unsigned i = 0; i < LOAD_KEYS; i++) {
        int status = contract_write(c, i, LOAD_BYTES);

        cr_assert(status == 0 || status == -EEXIST);
        cr_assert_eq(contract_read(c, i, LOAD_BYTES), 0);
    }
    for (unsigned i = 0; i < LOAD_OPS; i++)
        free(ops[i].op.data);
}

/* Its handles are all stale then. */
NFS_CASE(an_export_is_made_anew, begin, end)
{
    uint64_t now;

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    nfs_server_kill(&server);
    contract_rename_root(c, true);
    cr_assert_eq(mkdir(c->folder, 0700), 0);
    nfs_server_start(&server);
    cr_assert_eq(contract_check(c, false, &now), 0);
    cr_assert_eq(contract_do(c, SHARE_FIND, 1, NULL, 5000), -ENOENT);
    cr_assert_eq(contract_write(c, 1, 5000), 0);
    cr_assert_eq(contract_read(c, 1, 5000), 0);
}

NFS_CASE(a_blocks_folder_is_made_anew, begin, end)
{
    char from[256], to[256];

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    snprintf(from, sizeof(from), "%s/blocks", c->folder);
    snprintf(to, sizeof(to), "%s/gone", c->folder);
    cr_assert_eq(rename(from, to), 0);
    cr_assert_eq(contract_write(c, 2, 5000), 0);
    cr_assert_eq(contract_read(c, 2, 5000), 0);
}

static void target_becomes(struct contract *c, const char *target)
{
    contract_close(c);
    snprintf(c->target, sizeof(c->target), "%s", target);
    contract_open(c);
}

NFS_CASE(an_export_that_is_none_is_said_to_be_so, begin, end)
{
    char target[160];
    uint64_t now;
    int status;

    snprintf(target, sizeof(target), "nfs://127.0.0.1:%d/other?mountport=%d", NFS_SERVER_PORT,
             NFS_SERVER_MOUNT_PORT);
    target_becomes(c, target);
    status = contract_check(c, true, &now);
    cr_assert(status == -ENODEV || status == -EACCES, "%s", strerror(-status));
    cr_assert_eq(contract_read(c, 1, 10), status, "for as long as it pauses");
    target_becomes(c, "nfs://127.0.0.1:1/kv?mountport=1");
    cr_assert_eq(contract_check(c, true, &now), -ECONNREFUSED);
}

/* The server's name is looked up, and its portmapper asked for the port of mountd. */
NFS_CASE(names_and_ports_are_looked_up, begin, end)
{
    char target[160];

    snprintf(target, sizeof(target), "nfs://localhost:%d/kv?version=3", NFS_SERVER_PORT);
    target_becomes(c, target);
    cr_assert_eq(contract_write(c, 1, 5000), 0);
    cr_assert_eq(contract_read(c, 1, 5000), 0);
    target_becomes(c, "nfs://no-such-host.invalid/kv");
    cr_assert_eq(contract_do(c, SHARE_FIND, 1, NULL, 5000), -EADDRNOTAVAIL);
}

NFS_CASE(the_next_address_is_tried_where_nothing_listens, begin_by_relay, end_by_relay)
{
    char target[160];
    uint64_t now;

    snprintf(target, sizeof(target), "nfs://" TWO_ADDRESSES ":%d/kv?mountport=%d", NFS_RELAY_PORT,
             NFS_SERVER_MOUNT_PORT);
    target_becomes(c, target);
    cr_assert_eq(contract_check(c, true, &now), 0);
}

/* At once, and not when the silence was long enough. */
NFS_CASE(a_socket_that_cannot_be_watched_is_reported, begin, end)
{
    uint64_t before = uv_hrtime(), now;

    polls_that_fail = 1;
    cr_assert_eq(contract_check(c, false, &now), -EIO);
    cr_assert_lt(uv_hrtime() - before, NFS_CONNECT_MS * 1000000ull);
    cr_assert_eq(contract_check(c, false, &now), 0);
}
