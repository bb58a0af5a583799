/* The client library's half of lookup tables, with a daemon that is slow, wrong or hostile. That
 * daemon hands out memory that the test writes. */
/* Sanitizers: thread */
#include "proto/memory/lookup_table.h"
#include "tests/unit/client/client_rig.h"
#include "tests/unit/random.h"

#define BUCKETS 64u
#define BYTES (UCM_LOOKUP_TABLE_HEADER_BYTES + BUCKETS * 64u)

enum spoil {
    SPOIL_MAGIC = SPOIL_FDS,
    SPOIL_BUCKETS,
    SPOIL_KEY_BYTES,
};

static struct {
    int fd;
    struct ucm_lookup_table_header *header;
    struct ucm_lookup_table_bucket *bucket;
    atomic_uint spoil; /* rig_spoil or spoil */
    bool shared;
    uint64_t beat_ms; /* when the client mapped the table last */
} own;

static void set(unsigned key, uint64_t tier)
{
    (void)ucm_lookup_table_set(own.bucket, BUCKETS - 1,
                               ucm_lookup_table_hash(rig.keys[key], 16, 99), tier, 1);
}

static bool hook(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    struct msg_lookup_table_open_r r = {.bytes = BYTES, .shared = own.shared};
    unsigned spoil = own.spoil;
    int fds[2];

    (void)f;
    if (method != UCM_METHOD_LOOKUP_TABLE_OPEN)
        return false;
    own.header->magic[0] = spoil == SPOIL_MAGIC ? 'X' : 'U';
    own.header->buckets = spoil == SPOIL_BUCKETS ? BUCKETS * 2 : BUCKETS;
    own.header->key_bytes = spoil == SPOIL_KEY_BYTES ? 32 : 16;
    fake_reply_fds(conn, env->msgid, &proto_lookup_table_open_r, &r, fds,
                   rig_spoil_fds(spoil, own.fd, BYTES, fds));
    return true;
}

static void up(void)
{
    memset(&own, 0, sizeof own);
    own.fd = rig_memfd(BYTES, true, (void **)&own.header);
    own.bucket = (void *)((uint8_t *)own.header + UCM_LOOKUP_TABLE_HEADER_BYTES);
    memcpy(own.header->magic, UCM_LOOKUP_TABLE_MAGIC, 8);
    own.header->version = UCM_LOOKUP_TABLE_VERSION;
    own.header->key_bytes = 16;
    own.header->buckets = BUCKETS;
    own.header->seed = 99;
    atomic_store(&own.header->state, UCM_LOOKUP_TABLE_LIVE);
    atomic_store(&own.header->beat_ms, (uint64_t)fake_now_ms());
    rig_setup();
    rig.fake.hook = hook;
}

static void down(void)
{
    rig_teardown();
    munmap(own.header, BYTES);
    close(own.fd);
}

TestSuite(client_lookup_table, .init = up, .fini = down);

/* Opens the table, and puts its next beat an hour ahead. So it is never old, however slow this
 * machine is. */
static int open_table(void)
{
    int r;

    own.beat_ms = atomic_load(&own.header->beat_ms);
    r = ucm_lookup_table_open(rig.ns, -1);
    atomic_store(&own.header->beat_ms, own.beat_ms + 3600000);
    return r;
}

static int lookup(struct ucm_lookup_table_hits *out)
{
    return ucm_lookup_table_read(rig.ns, rig.keys, RIG_KEYS, NULL, out);
}

static unsigned opens(void)
{
    return (unsigned)FAKE_GET(&rig.fake, count[UCM_METHOD_LOOKUP_TABLE_OPEN]);
}

Test(client_lookup_table, what_the_table_says)
{
    uint8_t found[RIG_KEYS + 1];
    struct ucm_lookup_table_hits h;

    cr_expect_eq(lookup(&h), UCM_LOOKUP_TABLE_NONE, "not opened");
    cr_assert_eq(open_table(), 0, "%s", ucm_errmsg());
    cr_assert_eq(lookup(&h), 0);
    cr_expect(h.hits == 0 && h.complete && !h.shared_tier);
    set(0, 1);
    set(1, 3);
    set(2, 2);
    set(4, 1);
    cr_assert_eq(lookup(&h), 0);
    cr_expect(h.hits == 3 && h.in_dram == 1 && h.on_shared == 1);
    memset(found, 9, sizeof found);
    cr_assert_eq(ucm_lookup_table_read(rig.ns, rig.keys, RIG_KEYS, found, &h), 0);
    cr_expect(h.hits == 4 && h.in_dram == 2);
    cr_expect_eq(memcmp(found, (uint8_t[]){1, 3, 2, 0, 1, 0, 0, 0, 9}, sizeof found), 0);
    atomic_store(&own.header->left_out, 1);
    cr_assert_eq(lookup(&h), 0);
    cr_expect_not(h.complete);
    cr_expect_eq(ucm_lookup_table_read(rig.ns, NULL, 1, NULL, &h), -UCM_EINVALID);
    cr_expect_eq(ucm_lookup_table_read(rig.ns, rig.keys, 0, NULL, &h), -UCM_EINVALID);
}

/* Keys that take more than one request: each by itself, or up to the first gap. */
Test(client_lookup_table, many_keys)
{
    enum { N = 700, GAP = 600 };
    static uint8_t keys[N][16], found[N];
    struct ucm_lookup_table_hits h;

    memset(keys, 0, sizeof keys);
    for (unsigned i = 0; i < N; i++) {
        memcpy(keys[i], &i, sizeof i);
        if (i < 300 && i != GAP)
            (void)ucm_lookup_table_set(own.bucket, BUCKETS - 1,
                                       ucm_lookup_table_hash(keys[i], 16, 99), 1, 1);
    }
    cr_assert_eq(open_table(), 0);
    cr_assert_eq(ucm_lookup_table_read(rig.ns, keys, N, NULL, &h), 0);
    cr_expect_eq(h.hits, 300u);
    cr_assert_eq(ucm_lookup_table_read(rig.ns, keys, N, found, &h), 0);
    cr_expect_eq(h.hits, 300u);
    for (unsigned i = 0; i < N; i++)
        cr_assert_eq(found[i], i < 300);
}

Test(client_lookup_table, a_table_that_is_not_to_be_relied_on)
{
    struct ucm_lookup_table_hits h;

    cr_assert_eq(open_table(), 0);
    for (uint64_t state = 0; state < 6; state++) {
        atomic_store(&own.header->state, state);
        cr_expect_eq(lookup(&h), state == UCM_LOOKUP_TABLE_LIVE ? 0 : UCM_LOOKUP_TABLE_NONE);
    }
    atomic_store(&own.header->state, UCM_LOOKUP_TABLE_LIVE);
    atomic_store(&own.header->beat_ms, own.beat_ms - UCM_LOOKUP_TABLE_STALE_MS - 1000);
    cr_expect_eq(lookup(&h), UCM_LOOKUP_TABLE_NONE, "no sign of life");
    cr_expect_eq(opens(), 1u);
    /* By the clock of a daemon in another container this may be now. */
    cr_assert_eq(open_table(), 0);
    cr_expect_eq(opens(), 2u);
    cr_expect_eq(lookup(&h), 0);
    cr_assert_eq(open_table(), 0);
    cr_expect_eq(opens(), 2u, "it has one");
    atomic_store(&own.header->state, UCM_LOOKUP_TABLE_FILLING);
    cr_assert_eq(open_table(), 0);
    cr_expect_eq(opens(), 2u, "it is being filled");
    atomic_store(&own.header->state, UCM_LOOKUP_TABLE_SUPERSEDED);
    cr_assert_eq(open_table(), 0);
    cr_expect_eq(opens(), 3u);
}

Test(client_lookup_table, a_connection_that_breaks)
{
    struct ucm_lookup_table_hits h;

    cr_assert_eq(open_table(), 0);
    cr_assert_eq(lookup(&h), 0);
    fake_hang_up(&rig.fake);
    cr_assert_eq(open_table(), 0, "%s", ucm_errmsg());
    cr_expect_eq(opens(), 2u, "the new connection's table");
    cr_assert_eq(lookup(&h), 0);
    fake_hang_up(&rig.fake);
    (void)rig_lookup(&rig, -1); /* notices it, and connects again */
    cr_expect_eq(lookup(&h), UCM_LOOKUP_TABLE_NONE);
}

Test(client_lookup_table, a_daemon_before_lookup_tables)
{
    struct ucm_lookup_table_hits h;

    rig_refuse(UCM_METHOD_LOOKUP_TABLE_OPEN, UCM_WIRE_NO_METHOD, "whatever it says");
    cr_expect_eq(open_table(), -UCM_EUNSUPPORTED);
    cr_expect_str_eq(ucm_errmsg(), "this ucmd does not have lookup_table.open");
    cr_expect_eq(lookup(&h), UCM_LOOKUP_TABLE_NONE);
    cr_expect_eq(rig_lookup(&rig, -1), 0, "the connection goes on");
}

Test(client_lookup_table, answers_that_do_not_fit)
{
    struct ucm_lookup_table_hits h;

    for (unsigned s = SPOIL_NO_FD; s <= SPOIL_KEY_BYTES; s++) {
        own.spoil = s;
        cr_expect_eq(open_table(), -UCM_EPROTOCOL, "%u: %s", s, ucm_errmsg());
        cr_expect_eq(lookup(&h), UCM_LOOKUP_TABLE_NONE);
    }
    own.spoil = SPOIL_NOTHING;
    own.shared = true;
    cr_assert_eq(open_table(), 0);
    cr_assert_eq(lookup(&h), 0);
    cr_expect(h.shared_tier);
}

static void *read_lookup_table(void *arg)
{
    unsigned *right = arg;
    struct ucm_lookup_table_hits h;

    for (unsigned i = 0; i < 20000; i++) {
        int r = lookup(&h);

        cr_assert(r == 0 || r == UCM_LOOKUP_TABLE_NONE);
        cr_assert(r != 0 || h.hits == 3);
        *right += r == 0;
    }
    return NULL;
}

Test(client_lookup_table, readers_alongside_new_tables)
{
    unsigned right[2] = {0};
    pthread_t threads[2];

    for (unsigned i = 0; i < 3; i++)
        set(i, 1);
    cr_assert_eq(open_table(), 0);
    for (unsigned i = 0; i < 2; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, read_lookup_table, &right[i]), 0);
    for (unsigned i = 0; i < 100; i++) {
        atomic_store(&own.header->state, UCM_LOOKUP_TABLE_SUPERSEDED);
        cr_assert_eq(open_table(), 0, "%s", ucm_errmsg());
        atomic_store(&own.header->state, UCM_LOOKUP_TABLE_LIVE);
    }
    for (unsigned i = 0; i < 2; i++) {
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
        right[0] += i > 0 ? right[i] : 0;
    }
    cr_expect_eq(opens(), 101u);
    cr_assert_eq(open_table(), 0);
    cr_assert_eq(read_lookup_table(&right[0]), NULL);
    cr_expect_geq(right[0], 20000u);
}

/* Whatever the memory holds, also while it changes: no crash, and counts that fit the question. */
Test(client_lookup_table, memory_of_a_hostile_daemon)
{
    uint64_t *words = (uint64_t *)own.header;
    uint8_t found[RIG_KEYS];
    struct ucm_lookup_table_hits h;

    random_state = random_seed(7);
    cr_assert_eq(open_table(), 0);
    for (unsigned round = 0; round < 2000; round++) {
        for (size_t i = 0; i < BYTES / sizeof(*words); i += 1 + below(40))
            words[i] = below(4) == 0 ? UINT64_MAX
                                     : ((uint64_t)below(UINT32_MAX) << 32 | below(UINT32_MAX));
        atomic_store(&own.header->state, UCM_LOOKUP_TABLE_LIVE);
        atomic_store(&own.header->beat_ms, own.beat_ms + 3600000);
        cr_assert_eq(ucm_lookup_table_read(rig.ns, rig.keys, RIG_KEYS, found, &h), 0);
        cr_assert(h.hits <= RIG_KEYS && h.in_dram + h.on_shared <= h.hits);
        for (unsigned i = 0; i < RIG_KEYS; i++)
            cr_assert_leq(found[i], 3);
    }
}

Test(client_lookup_table, lookups_that_are_told)
{
    cr_assert_eq(ucm_lookup_note(rig.ns, rig.keys, RIG_KEYS, -1), 0, "%s", ucm_errmsg());
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(FAKE_GET(&rig.fake, count[UCM_METHOD_LOOKUP]), 2u);
    cr_expect_eq(ucm_lookup_note(rig.ns, rig.keys, 0, -1), -UCM_EINVALID);
    /* Answers that nobody awaits are freed with the connection. */
    for (unsigned i = 0; i < 50; i++)
        cr_assert_eq(ucm_lookup_note(rig.ns, rig.keys, 1, -1), 0);
    fake_hang_up(&rig.fake);
    cr_assert_eq(ucm_lookup_note(rig.ns, rig.keys, 1, -1), 0);
}

/* Like a scheduler whose lookups all miss: it makes no other call. */
Test(client_lookup_table, any_number_of_lookups_is_told)
{
    for (unsigned i = 0; i < 1000; i++) {
        cr_assert_eq(ucm_lookup_note(rig.ns, rig.keys, 1, -1), 0, "note %u: %s", i, ucm_errmsg());
        while (FAKE_GET(&rig.fake, count[UCM_METHOD_LOOKUP]) <= i)
            usleep(10);
    }
}

/* No lookup is answered, and a registration only late. */
static bool slow(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    return rig_late_region(f, conn, method, env) || method == UCM_METHOD_LOOKUP;
}

/* Notes that are not answered have places of their own, so an abandoned registration is undone. */
Test(client_lookup_table, told_lookups_leave_a_place_to_a_late_registration)
{
    struct ucm_region *region = NULL;

    rig.fake.hook = slow;
    for (unsigned i = 0; i < 256; i++)
        cr_assert_eq(ucm_lookup_note(rig.ns, rig.keys, 1, -1), 0, "note %u: %s", i, ucm_errmsg());
    cr_expect_eq(ucm_lookup_note(rig.ns, rig.keys, 1, -1), -UCM_EBUSY);
    cr_expect_eq(rig_register(&rig, 10, &region), -UCM_EDEADLINE);
    atomic_store(&rig_go, true);
    fake_await(&rig.fake, &rig.fake.count[UCM_METHOD_REGION_REGISTER], 2);
    cr_expect_eq(ucm_region_unregister(rig.region, -1), 0);
    rig.region = NULL;
    fake_await(&rig.fake, &rig.fake.count[UCM_METHOD_REGION_UNREGISTER], 2);
    cr_expect_eq(ucm_connection_epoch(rig.client), 1u, "the connection goes on");
}
