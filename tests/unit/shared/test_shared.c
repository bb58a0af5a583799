/* The shared tier's interface: where parts go and come from, with one root and with several. What
 * happens to damaged parts, and when the tier ends. */
#include "tests/unit/random.h"
#include "tests/unit/shared/shared_rig.h"

#define BLOCKS 600u

struct part {
    struct shared_io io;
    uint8_t data[RIG_BYTES];
    int status;
    bool reported, refused;
};

static void told_cb(struct shared_io *io, int status)
{
    struct part *p = LIST_ENTRY(io, struct part, io);

    cr_assert_not(p->reported);
    p->reported = true;
    p->status = status;
}

static void open_roots(uint32_t roots, enum config_placement placement)
{
    struct shared_settings s = settings_of(roots);

    s.placement = placement;
    open_with(s);
}

TestSuite(shared, .init = rig_setup, .fini = shared_teardown, .timeout = 30);

static int submit(struct part *p, bool write, uint32_t number, shared_root_id root)
{
    *p = (struct part){.io = {.write = write,
                              .id = rig_id(number),
                              .bytes = RIG_BYTES,
                              .root = root,
                              .done_cb = told_cb}};
    p->io.data = p->data;
    if (write)
        rig_fill(p->data, number);
    return shared_submit(shared, &p->io);
}

static int move(struct part *p, bool write, uint32_t number, shared_root_id root)
{
    cr_assert_eq(submit(p, write, number, root), 0);
    cr_assert_not(p->reported, "done_cb ran inside the call");
    cr_assert(rig_run(&p->reported, 20000));
    return p->status;
}

static int load(struct part *p, uint32_t number, shared_root_id root)
{
    uint8_t right[RIG_BYTES];
    int status = move(p, false, number, root);

    rig_fill(right, number);
    if (status == 0)
        cr_assert_eq(memcmp(right, p->data, RIG_BYTES), 0);
    return status;
}

Test(shared, a_read_asks_the_other_roots_when_the_hint_is_wrong)
{
    struct part p;

    open_roots(3, CONFIG_PLACEMENT_TIERED);
    rig_put(&rig.servers[2], 9);
    cr_assert_eq(load(&p, 9, 1), 0);
    cr_assert_eq(p.io.root, 3);
    rig.servers[0].fails[SHARED_READ] = -EIO;
    cr_assert_eq(load(&p, 9, 1), 0, "a root costs its own hits only");
    cr_assert_eq(load(&p, 10, 0), -EIO, "the root that failed might have it");
}

Test(shared, a_hung_root_leaves_time_for_those_after_it)
{
    struct part p;
    uint64_t from;

    open_roots(3, CONFIG_PLACEMENT_TIERED);
    rig_put(&rig.servers[2], 3);
    rig.servers[0].hangs = rig.servers[1].hangs = true;
    from = uv_now(&rig.loop);
    cr_assert_eq(load(&p, 3, 1), 0);
    cr_assert_eq(p.io.root, 3);
    cr_assert_leq(uv_now(&rig.loop) - from, 200);
    cr_assert_eq(load(&p, 4, 1), -ETIMEDOUT, "one of those that hang might have it");
    cr_assert_leq(uv_now(&rig.loop) - from, 450);
}

Test(shared, a_damaged_file_of_a_read_only_root_stays_and_is_not_looked_for)
{
    struct shared_settings s = settings_of(1);
    struct block_file_id id = rig_id(4);
    struct part p;

    s.roots[0].read_only = true;
    open_with(s);
    rig_put(&rig.servers[0], 4);
    rig.servers[0].files[4].damaged = true;
    cr_assert_eq(move(&p, false, 4, 1), -ENOENT);
    rig_run(NULL, 20);
    cr_assert(rig.servers[0].files[4].there);
    cr_assert_eq(shared_recall(shared, &id, 0), SHARED_KNOWN_MISSING);
    cr_assert_eq(submit(&p, true, 4, 0), -EROFS);
    cr_assert_eq(rig.servers[0].asked[SHARED_WRITE] + rig.servers[0].asked[SHARED_REMOVE], 0);
}

Test(shared, tiered_writes_to_the_first_that_takes_it)
{
    struct part p;

    open_roots(2, CONFIG_PLACEMENT_TIERED);
    cr_assert_eq(move(&p, true, 1, 0), 0);
    cr_assert_eq(p.io.root, 1);
    rig.servers[0].fails[SHARED_WRITE] = -ENOSPC;
    cr_assert_eq(move(&p, true, 2, 0), -ENOSPC);
    cr_assert_eq(move(&p, true, 2, 0), 0);
    cr_assert_eq(p.io.root, 2);
}

/* Where each block goes with the roots of `spec`. */
static void hashed_places(const char *const *targets, uint32_t n, const char *places[BLOCKS])
{
    struct shared_settings s = settings_of(n);

    s.placement = CONFIG_PLACEMENT_HASHED;
    for (uint32_t i = 0; i < n; i++)
        s.roots[i].target = targets[i];
    open_with(s);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        struct block_file_id id = rig_id(i);
        uint8_t root[UCM_MAX_ROOTS];

        cr_assert_eq(shared_write_roots(shared, &id, root), 1);
        cr_assert_eq(shared_roots_that_may_have(shared, &id, (1u << n) - 1), 1u << root[0]);
        places[i] = targets[root[0]];
        id.part = 0;
        cr_assert_eq(shared_roots_that_may_have(shared, &id, (1u << n) - 1), 1u << root[0],
                     "all parts of a block belong together");
    }
}

Test(shared, hashed_moves_only_what_a_removed_root_had)
{
    static const char *before[BLOCKS], *after[BLOCKS];
    static const char *const three[] = {"/0", "/1", "/2"}, *const two[] = {"/2", "/0"};
    unsigned counts[3] = {0};

    hashed_places(three, 3, before);
    close_it();
    hashed_places(two, 2, after);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        counts[before[i][1] - '0']++;
        if (before[i][1] != '1')
            cr_assert_str_eq(before[i], after[i], "block %u moved without need", i);
    }
    for (int i = 0; i < 3; i++)
        cr_assert(counts[i] > BLOCKS / 5 && counts[i] < BLOCKS / 2, "%u", counts[i]);
}

Test(shared, what_was_read_is_touched_when_its_time_is_old)
{
    struct part p;

    open_roots(1, CONFIG_PLACEMENT_TIERED);
    rig_put(&rig.servers[0], 1);
    rig_put(&rig.servers[0], 2);
    rig.servers[0].files[2].mtime_ns -= 7200ull * 1000000000u;
    cr_assert_eq(load(&p, 1, 1), 0); /* asks for the time */
    rig_run(NULL, 10);
    cr_assert_eq(load(&p, 1, 1), 0);
    cr_assert_eq(load(&p, 2, 1), 0);
    rig_run(NULL, 10);
    cr_assert_eq(rig.servers[0].asked[SHARED_TOUCH], 1);
    cr_assert_eq(rig.servers[0].files[2].mtime_ns, rig.servers[0].now_ns);
}

/* The background waits while reads do. */
Test(shared, touches_leave_room_for_others)
{
    enum { PARTS = 400 };
    static struct part parts[PARTS];
    uint32_t most = 0;

    open_roots(1, CONFIG_PLACEMENT_TIERED);
    rig.servers[0].latency_ms = 1;
    for (uint32_t i = 0; i < PARTS; i++) {
        rig_put(&rig.servers[0], i);
        rig.servers[0].files[i].mtime_ns -= 7200ull * 1000000000u;
    }
    cr_assert_eq(load(&parts[0], 0, 1), 0); /* asks for the time */
    rig_run(NULL, 10);
    for (uint32_t i = 0; i < PARTS; i++)
        cr_assert_eq(submit(&parts[i], false, i, 1), 0);
    for (int i = 0; i < 60; i++) {
        rig_run(NULL, 1);
        if (shared->roots[0]->queued[SHARED_BACKGROUND] > most)
            most = shared->roots[0]->queued[SHARED_BACKGROUND];
    }
    cr_expect_eq(most, 128u, "%u", most);
}

Test(shared, nobody_is_asked_when_all_are_down)
{
    struct part p;
    struct shared_root_stats stats;

    open_roots(1, CONFIG_PLACEMENT_TIERED);
    rig.servers[0].fails[SHARED_READ] = rig.servers[0].fails[SHARED_CHECK] = -EIO;
    for (int i = 0; i < 5; i++)
        cr_assert_eq(move(&p, false, 1, 1), -EIO);
    cr_assert_eq(submit(&p, false, 1, 1), -ENOENT);
    cr_assert_eq(submit(&p, true, 1, 0), -EROFS);
    shared_stats(shared, 0, &stats);
    cr_assert_eq(stats.health, SHARED_DOWN);
    cr_assert_str_eq(stats.reason, "Input/output error");
    cr_assert_eq(stats.failures, 5);
    cr_assert_eq(stats.breaks, 1);
}

Test(shared, stopped_it_reads_and_writes_no_more)
{
    struct part p;

    open_roots(1, CONFIG_PLACEMENT_TIERED);
    rig_put(&rig.servers[0], 1);
    shared_stop(shared);
    cr_assert_eq(submit(&p, true, 2, 0), -EROFS);
    cr_assert_eq(load(&p, 1, 1), 0);
}

/* Many operations of every kind at once, with roots that fail, hang and come back. All are
 * reported, and each part reported as read is right. */
Test(shared, at_random)
{
    enum { PARTS = 400 };
    static struct part parts[PARTS];
    unsigned good = 0;

    open_roots(3, CONFIG_PLACEMENT_TIERED);
    for (int round = 0; round < 12; round++) {
        for (int i = 0; i < PARTS; i++)
            parts[i].reported = true;
        for (int i = 0; i < PARTS; i++) {
            struct part *p = &parts[i];

            if (submit(p, below(3) == 0, below(500), (shared_root_id)below(4)) < 0)
                p->reported = p->refused = true;
        }
        for (int i = 0; i < RIG_ROOTS; i++) {
            struct rig_server *s = &rig.servers[i];

            rig_let_go(s);
            s->latency_ms = below(4);
            s->fails[SHARED_READ] = below(8) ? 0 : -EIO;
            s->fails[SHARED_WRITE] = below(4) ? 0 : -ENOSPC;
            s->hangs = below(4) == 0;
            s->stuck = s->hangs && below(2);
        }
        rig_run(NULL, 260);
        for (int i = 0; i < RIG_ROOTS; i++)
            rig_let_go(&rig.servers[i]);
        rig_run(NULL, 20);
        for (int i = 0; i < PARTS; i++) {
            uint8_t right[RIG_BYTES];

            cr_assert(parts[i].reported, "%d of round %d", i, round);
            if (parts[i].refused || parts[i].io.write || parts[i].status != 0)
                continue;
            rig_fill(right, rig_number(&parts[i].io.id));
            cr_assert_eq(memcmp(right, parts[i].data, RIG_BYTES), 0);
            good++;
        }
    }
    cr_assert_gt(good, 0);
}
