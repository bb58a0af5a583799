/* The NFS root against a real server, through its process: what every backend promises, and what servers and networks
 * do to it. test_shared_nfs_hostile.c has servers that lie, and processes that are killed. */
#include "tests/integration/roots/nfs_rig.h"
#include "tests/reference/shared_costs.h"
#include "tests/unit/shared/shared_contract.h"

#include "daemon/base/log.h"

#include <sys/mount.h>

#define PAUSE_MS 250u                           /* between attempts to connect */
#define LARGE (2u * COST_NFS_MOVE_BYTES + 5000) /* of bytes */
#define LARGE_MOVES 3

/* RFC 1813's. */
enum {
    ERR_IO = 5,
    ERR_ACCES = 13,
    ERR_NOSPC = 28,
    ERR_DQUOT = 69,
    ERR_STALE = 70,
    ERR_JUKEBOX = 10008
};

SHARED_CONTRACT(shared_nfs, nfs_rig_begin, nfs_rig_end)

/* ---- what servers and networks do ---- */

#define NFS_CASE(name, begin, end)                                                                 \
    static void name(struct contract *c);                                                          \
    Test(shared_nfs, name)                                                                         \
    {                                                                                              \
        contract_case(begin, end, name);                                                           \
    }                                                                                              \
    static void name(struct contract *c)

static void starts_of(struct contract *c, struct contract_op *ops, unsigned n,
                      enum shared_verb verb, uint64_t bytes)
{
    for (unsigned i = 0; i < n; i++) {
        uint8_t *data = ops[i].op.data ? ops[i].op.data : contract_data(bytes, i);

        ops[i].op = contract_of(verb, i, data, bytes);
        contract_start(c, &ops[i]);
    }
}

static unsigned requests_of(struct contract *c, enum shared_verb verb, unsigned number,
                            uint64_t bytes, int expected)
{
    unsigned before = atomic_load(&relay.requests);
    uint8_t *data = contract_data(bytes, number);

    cr_assert_eq(contract_do(c, verb, number, data, bytes), expected);
    free(data);
    return atomic_load(&relay.requests) - before;
}

NFS_CASE(a_file_is_found_by_one_request, nfs_rig_relay_begin, nfs_rig_relay_end)
{
    cr_assert_eq(contract_write(c, 1, 5000), 0);
    cr_assert_eq(requests_of(c, SHARED_FIND, 1, 5000, 0), COST_NFS_FIND);
    cr_assert_eq(contract_do(c, SHARED_REMOVE, 1, NULL, 0), 0);
    cr_assert_eq(requests_of(c, SHARED_FIND, 1, 5000, -ENOENT), COST_NFS_FIND);
    cr_assert_eq(requests_of(c, SHARED_WRITE, 1, 5000, 0),
                 COST_NFS_WRITE_LOOKS + COST_NFS_WRITE + 1, "look, create, write, rename");
    cr_assert_eq(requests_of(c, SHARED_READ, 1, 5000, 0), 1, "by the handle that was written");
    cr_assert_eq(requests_of(c, SHARED_READ, 1, 4000, -EBADMSG), 1, "which is not kept then");
    cr_assert_eq(requests_of(c, SHARED_READ, 1, 5000, 0), COST_NFS_READ + 1, "look, read");
    cr_assert_eq(requests_of(c, SHARED_READ, 1, 5000, 0), 1);
    cr_assert_eq(requests_of(c, SHARED_WRITE, 1, 5000, -EEXIST), 3, "look, create, remove");
    cr_assert_eq(requests_of(c, SHARED_WRITE, 1, 5000, -EEXIST), COST_NFS_AGAIN,
                 "the next ones only look");
    cr_assert_eq(contract_write(c, 2, LARGE), 0);
    cr_assert_eq(requests_of(c, SHARED_READ, 2, LARGE, 0), LARGE_MOVES);
}

static unsigned descriptors(struct contract *c)
{
    struct shared_process_stats stats;
    char path[64];
    unsigned n = 0;
    DIR *dir;

    c->ops->process(c->b, &stats);
    snprintf(path, sizeof(path), "/proc/%u/fd", (unsigned)stats.pid);
    dir = opendir(path);

    cr_assert(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

NFS_CASE(a_cut_connection_is_made_again, nfs_rig_relay_begin, nfs_rig_relay_end)
{
    unsigned before;

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    before = descriptors(c);
    for (unsigned i = 0; i < 30; i++) {
        atomic_store(&relay.cut, 1);
        if (i % 2) /* found out without a request, or by one */
            nfs_rig_turn_for(c, 20);
        cr_assert_eq(contract_read(c, 1, 5000), 0);
        while (atomic_load(&relay.cut) > 0)
            nfs_rig_turn_for(c, 1);
    }
    nfs_rig_turn_for(c, 50);
    cr_assert_eq(contract_read(c, 1, 5000), 0);
    nfs_rig_turn_for(c, 50);
    cr_assert_leq(descriptors(c), before + 2, "the relay may be late");
}

static int ended_with(struct contract *c, enum shared_verb verb, unsigned number, unsigned after,
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

NFS_CASE(what_servers_say_is_understood, nfs_rig_relay_begin, nfs_rig_relay_end)
{
    enum { LOOK, CREATE, WRITE };
    uint8_t *other = contract_data(4000, 1);
    unsigned files;

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    contract_do(c, SHARED_FIND, 2, NULL, 5000); /* its bucket is made */
    cr_assert_eq(contract_write(c, 2, 5000), 0);
    cr_assert_eq(contract_write(c, 2, 5000), -EEXIST,
                 "the next ones look first: one reply at a time");
    cr_assert_eq(contract_do(c, SHARED_REMOVE, 2, NULL, 0), 0);
    cr_assert_eq(ended_with(c, SHARED_FIND, 1, LOOK, ERR_JUKEBOX), 0, "asked again later");
    cr_assert_eq(ended_with(c, SHARED_FIND, 1, LOOK, ERR_STALE), 0, "with fresh handles");
    cr_assert_eq(ended_with(c, SHARED_FIND, 1, LOOK, ERR_ACCES), -EACCES);
    cr_assert_eq(ended_with(c, SHARED_READ, 1, 0, ERR_STALE), 0,
                 "a kept handle is not the last word");
    cr_assert_eq(ended_with(c, SHARED_READ, 1, 0, ERR_IO), 0);
    cr_assert_eq(contract_do(c, SHARED_READ, 1, other, 4000), -EBADMSG); /* it is forgotten */
    cr_assert_eq(ended_with(c, SHARED_READ, 1, 1, ERR_STALE), -ENOENT, "somebody removed it");
    cr_assert_eq(ended_with(c, SHARED_READ, 1, 1, ERR_IO), -EIO);
    cr_assert_eq(ended_with(c, SHARED_READ, 1, 1, 77777), -EIO);
    files = contract_files(c->directory);
    cr_assert_eq(ended_with(c, SHARED_WRITE, 2, CREATE, ERR_DQUOT), -ENOSPC);
    cr_assert_eq(ended_with(c, SHARED_WRITE, 2, WRITE, ERR_NOSPC), -ENOSPC);
    cr_assert_eq(contract_files(c->directory), files + 1, "made, though the server denied it");
    cr_assert_eq(ended_with(c, SHARED_WRITE, 2, WRITE, ERR_JUKEBOX), 0, "begun again");
    cr_assert_eq(contract_files(c->directory), files + 2);
    cr_assert_eq(contract_read(c, 2, 5000), 0);
    cr_assert_eq(contract_do(c, SHARED_REMOVE, 2, NULL, 0), 0);
    free(other);
}

/* By another host: a process and a connection of its own. */
static int removed_elsewhere(struct contract *c, struct shared_backend **other, unsigned number)
{
    struct shared_backend *own = c->b;
    int rc;

    if (!*other)
        contract_open(c);
    else
        c->b = *other;
    rc = contract_do(c, SHARED_REMOVE, number, NULL, 0);
    *other = c->b;
    c->b = own;
    return rc;
}

/* The server reuses inode numbers of files whose handles are kept here. */
NFS_CASE(a_kept_handle_serves_no_other_file, nfs_rig_begin, nfs_rig_end)
{
    struct shared_backend *other = NULL;

    for (unsigned i = 0; i < 20; i += 2) {
        cr_assert_eq(contract_write(c, i, 5000), 0);
        cr_assert_eq(contract_read(c, i, 5000), 0);
        cr_assert_eq(removed_elsewhere(c, &other, i), 0);
        cr_assert_eq(contract_write(c, i + 1, 5000), 0);
        cr_assert_eq(contract_read(c, i, 5000), -ENOENT);
        cr_assert_eq(contract_read(c, i + 1, 5000), 0);
    }
    c->ops->close(other);
}

/* A hung server: operations are taken back at once, and what it answers later lands nowhere. */
NFS_CASE(late_replies_land_nowhere, nfs_rig_begin, nfs_rig_end)
{
    enum { N = 24, BYTES = 600000 };
    static struct contract_op ops[N];
    static uint8_t mine[BYTES];
    int status;

    memset(mine, 0x5a, BYTES);
    starts_of(c, ops, N, SHARED_WRITE, BYTES);
    contract_wait(c, N);
    for (unsigned verb = SHARED_READ; verb <= SHARED_WRITE; verb++) {
        unsigned done = c->done;

        starts_of(c, ops, N, (enum shared_verb)verb, BYTES);
        while (c->done == done) /* some are on their way now */
            uv_run(&c->loop, UV_RUN_ONCE);
        nfs_server_hang(&nfs_rig_server, true);
        nfs_rig_turn_for(c, 50);
        for (unsigned i = 0; i < N; i++) {
            /* An operation can't be taken back while a thread of the daemon copies its bytes. */
            while (ops[i].status == PENDING && !c->ops->cancel(c->b, &ops[i].op))
                uv_run(&c->loop, UV_RUN_ONCE);
            memcpy(ops[i].op.data, mine, BYTES);
        }
        nfs_server_hang(&nfs_rig_server, false);
        nfs_rig_turn_for(c, 300);
        for (unsigned i = 0; i < N; i++)
            cr_assert(memcmp(ops[i].op.data, mine, BYTES) == 0);
        for (unsigned i = 0; i < N; i++) {
            bytes_put(ops[i].op.data, BYTES, i);
            status = contract_do(c, SHARED_REMOVE, i, NULL, 0);
            cr_assert(status == 0 || (verb == SHARED_WRITE && status == -ENOENT));
        }
    }
    for (unsigned i = 0; i < N; i++)
        free(ops[i].op.data);
    cr_assert_eq(contract_files(c->directory), 0, "temporary files");
}

enum { LOAD_OPS = 16, LOAD_KEYS = 48, LOAD_BYTES = 200000 };

/* Checks each operation that has ended, and begins another one in its place. */
static void load_turn(struct contract *c, struct contract_op *ops, unsigned *random, bool more)
{
    static const enum shared_verb verbs[] = {SHARED_READ, SHARED_WRITE, SHARED_FIND, SHARED_READ};

    for (unsigned i = 0; i < LOAD_OPS; i++) {
        struct contract_op *o = &ops[i];
        uint8_t *data = o->op.data;
        unsigned number;

        if (o->status == PENDING)
            continue;
        memcpy(&number, o->op.id.key, sizeof(number));
        if (o->op.verb == SHARED_READ && o->status == 0)
            contract_right(data, LOAD_BYTES, number);
        if (!more)
            continue;
        *random = *random * 1103515245u + 12345u;
        number = (*random >> 16) % LOAD_KEYS;
        o->op = contract_of(verbs[(*random >> 8) % 4], number, data, LOAD_BYTES);
        if (o->op.verb == SHARED_WRITE)
            bytes_put(data, LOAD_BYTES, number);
        contract_start(c, o);
    }
    uv_run(&c->loop, UV_RUN_NOWAIT);
    usleep(200); /* the others' turn */
}

static void load_for(struct contract *c, struct contract_op *ops, unsigned *random, uint64_t ms)
{
    uint64_t until = uv_hrtime() + ms * 1000000;

    while (uv_hrtime() < until)
        load_turn(c, ops, random, true);
}

NFS_CASE(a_server_is_killed_under_load, nfs_rig_begin, nfs_rig_end)
{
    static struct contract_op ops[LOAD_OPS];
    unsigned random = 1;
    uint64_t now;

    log_set_level(LOG_ERROR);
    for (unsigned i = 0; i < LOAD_OPS; i++)
        ops[i].op = contract_of(SHARED_FIND, 0, contract_data(LOAD_BYTES, 0), LOAD_BYTES);
    for (unsigned i = 0; i < 5; i++) {
        load_for(c, ops, &random, 150);
        nfs_server_kill(&nfs_rig_server);
        load_for(c, ops, &random, 30 * i);
        nfs_server_start(&nfs_rig_server);
    }
    load_for(c, ops, &random, PAUSE_MS + 200);
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
NFS_CASE(an_export_is_made_anew, nfs_rig_begin, nfs_rig_end)
{
    uint64_t now;

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    nfs_server_kill(&nfs_rig_server);
    contract_rename_root(c, true);
    cr_assert_eq(mkdir(c->directory, 0700), 0);
    nfs_server_start(&nfs_rig_server);
    cr_assert_eq(contract_check(c, false, &now), 0);
    cr_assert_eq(contract_do(c, SHARED_FIND, 1, NULL, 5000), -ENOENT);
    cr_assert_eq(contract_write(c, 1, 5000), 0);
    cr_assert_eq(contract_read(c, 1, 5000), 0);
}

NFS_CASE(a_blocks_directory_is_made_anew, nfs_rig_begin, nfs_rig_end)
{
    char from[256], to[256];

    cr_assert_eq(contract_write(c, 1, 5000), 0);
    snprintf(from, sizeof(from), "%s/blocks", c->directory);
    snprintf(to, sizeof(to), "%s/gone", c->directory);
    cr_assert_eq(rename(from, to), 0);
    cr_assert_eq(contract_write(c, 2, 5000), 0);
    cr_assert_eq(contract_read(c, 2, 5000), 0);
}

static void target_becomes(struct contract *c, const char *target)
{
    contract_close(c);
    nfs_rig_target(c, target);
    contract_open(c);
}

NFS_CASE(an_export_that_is_none_is_said_to_be_so, nfs_rig_begin, nfs_rig_end)
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
    cr_assert(
        strstr(c->ops->reason(c->b), status == -ENODEV ? "the export does not exist" : "denied"),
        "%s", c->ops->reason(c->b));
    target_becomes(c, "nfs://127.0.0.1:1/kv?mountport=1");
    cr_assert_eq(contract_check(c, true, &now), -EHOSTUNREACH);
    cr_assert(strstr(c->ops->reason(c->b), "Connection refused"), "%s", c->ops->reason(c->b));
}

/* The server's name is looked up, and its portmapper asked for the port of mountd. */
NFS_CASE(names_and_ports_are_looked_up, nfs_rig_begin, nfs_rig_end)
{
    char target[160];

    snprintf(target, sizeof(target), "nfs://localhost:%d/kv?version=3", NFS_SERVER_PORT);
    target_becomes(c, target);
    cr_assert_eq(contract_write(c, 1, 5000), 0);
    cr_assert_eq(contract_read(c, 1, 5000), 0);
    target_becomes(c, "nfs://no-such-host.invalid/kv");
    cr_assert_eq(contract_do(c, SHARED_FIND, 1, NULL, 5000), -EHOSTUNREACH);
    cr_assert(strstr(c->ops->reason(c->b), "name is not known"), "%s", c->ops->reason(c->b));
}

/* The first of them is one where the relay does not listen. */
static void hosts_lay(struct contract *c)
{
    char path[160];

    snprintf(path, sizeof(path), "%s.hosts", c->directory);
    contract_put(path, "127.0.0.9 two-addresses.test\n127.0.0.1 two-addresses.test\n", 58);
    cr_assert_eq(mount(path, "/etc/hosts", NULL, MS_BIND, NULL), 0);
}

NFS_CASE(the_next_address_is_tried_where_nothing_listens, nfs_rig_relay_begin, nfs_rig_relay_end)
{
    char target[160];
    uint64_t now;

    hosts_lay(c);
    snprintf(target, sizeof(target), "nfs://two-addresses.test:%d/kv?mountport=%d", NFS_RELAY_PORT,
             NFS_SERVER_MOUNT_PORT);
    target_becomes(c, target);
    cr_assert_eq(contract_check(c, true, &now), 0);
}

/* As in a unit's sandbox that does not let it. */
NFS_CASE(a_network_that_is_forbidden_is_said_to_be_so, nfs_rig_begin, nfs_rig_end)
{
    uint64_t now;

    nfs_rig_process.network = false;
    target_becomes(c, nfs_rig_server.url);
    cr_assert_eq(contract_check(c, true, &now), -EIO);
    cr_assert(strstr(c->ops->reason(c->b), "Address family"), "%s", c->ops->reason(c->b));
}
