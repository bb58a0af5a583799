/* Windows of the client library, before a fake daemon: what it maps and refuses, that a read is the block's bytes
 * or a miss, giving back, and reconnects. */
/* Sanitizers: thread */
#include "tests/unit/client/client_window_rig.h"

#include <sys/resource.h>

TestSuite(client_window, .init = setup, .fini = teardown, .timeout = 30);

static int open_fds(void)
{
    int n = 0;

    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* The fake, in this process, closes what it sent a little later than the client receives it. */
static void expect_fds(int n, const char *when)
{
    int64_t end = fake_now_ms() + 5000;

    while (open_fds() > n && fake_now_ms() < end)
        fake_sleep_ms(1);
    cr_expect_leq(open_fds(), n, "descriptors leak: %s", when);
}

/* ---- reading ---- */

Test(client_window, pinned_blocks_are_read)
{
    struct ucm_window_pinned result;
    struct ucm_window_info info;
    int before;

    open_window(0);
    before = open_fds();
    cr_assert_eq(pin(0, WINDOW_BLOCKS + 8, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.placed, WINDOW_BLOCKS);
    cr_expect_eq(result.moved, 1u);
    cr_expect_eq(result.read, 2u);
    for (uint32_t b = 0; b < WINDOW_BLOCKS; b++)
        cr_expect_eq(read_block(b), 0);
    for (uint32_t b = WINDOW_BLOCKS; b < WINDOW_BLOCKS + 8; b++)
        cr_expect_eq(read_block(b), UCM_WINDOW_MISS, "it has no place");
    cr_assert_eq(ucm_window_info(window, &info), 0);
    cr_expect_eq(info.opened, 1u);
    cr_expect_eq(info.mapped, WINDOW_SLABS);
    cr_expect_eq(info.part_bytes, WINDOW_SLOT_BYTES);
    expect_fds(before, "mapped ones");
}

Test(client_window, a_piece_of_a_block)
{
    uint8_t bytes[16];

    open_and_pin(0);
    cr_expect_eq(ucm_window_read(window, &places[9], WINDOW_SLOT_BYTES - 16, 16, bytes), 0);
    cr_expect_eq(bytes[15], 9);
    cr_expect_eq(ucm_window_read(window, &places[9], WINDOW_SLOT_BYTES - 15, 16, bytes),
                 -UCM_EINVALID);
    cr_expect_eq(ucm_window_read(window, &places[9], UINT64_MAX, 16, bytes), -UCM_EINVALID);
    cr_expect_eq(ucm_window_read(window, &places[9], 8, UINT64_MAX, bytes), -UCM_EINVALID);
}

Test(client_window, another_sequence_number_is_a_miss)
{
    open_and_pin(0);
    ucm_window_retract(window_seq(5));
    cr_expect_eq(read_block(5), UCM_WINDOW_MISS);
    ucm_window_publish(window_seq(5), 1000);
    cr_expect_eq(read_block(5), UCM_WINDOW_MISS);
    cr_assert_eq(pin(5, 1, NULL), 0);
    cr_expect_eq(read_block(5), 0);
    cr_expect_eq(read_block(6), 0);
}

Test(client_window, places_that_lead_out_of_it_are_misses)
{
    struct ucm_place place;
    uint8_t byte;

    open_and_pin(0);
    for (unsigned i = 0; i < 5; i++) {
        place = places[0];
        place.slab = i == 0 ? WINDOW_SLABS : i == 1 ? UCM_PLACE_NONE : place.slab;
        place.slot = i == 2 ? WINDOW_SLOTS : i == 3 ? UINT32_MAX : place.slot;
        place.seq = i == 4 ? 0 : place.seq;
        cr_expect_eq(ucm_window_read(window, &place, 0, 1, &byte), UCM_WINDOW_MISS, "%u", i);
    }
    /* What the daemon's header says later has no effect. */
    win.header->slabs = UINT32_MAX;
    win.header->slab_bytes = UINT64_MAX;
    win.header->slots_per_slab = UINT32_MAX;
    cr_expect_eq(read_block(63), 0);
}

/* ---- pinning ---- */

Test(client_window, many_slabs_come_with_several_answers)
{
    struct ucm_window_pinned result;

    WSET(most_granted, 3);
    open_window(0);
    cr_assert_eq(pin(0, WINDOW_BLOCKS, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.placed, WINDOW_BLOCKS);
    cr_expect_eq(WGET(pins), 3u);
    for (uint32_t b = 0; b < WINDOW_BLOCKS; b++)
        cr_expect_eq(read_block(b), 0);
}

Test(client_window, a_long_range_is_cut_into_requests)
{
    struct ucm_place *many = calloc(40000, sizeof *many);
    struct ucm_sequence *long_sequence = sequence_of(40000);
    struct ucm_window_pin p = {.sequence = long_sequence, .n = 40000, .places = many};
    struct ucm_window_pinned result;

    open_window(0);
    cr_assert_eq(ucm_window_pin(window, &p, -1, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(WGET(pins), 3u);
    cr_expect_eq(WGET(last_first), 32768u);
    cr_expect_eq(WGET(last_n), 40000u - 32768u);
    cr_expect_eq(result.placed, WINDOW_BLOCKS);
    cr_expect_eq(many[39999].slab, UCM_PLACE_NONE);
    free(many);
}

Test(client_window, what_can_not_be_pinned_is_refused_here)
{
    struct ucm_sequence *other = NULL;
    struct ucm_window *second;
    struct ucm_window_pin p = {.sequence = sequence, .n = 1, .places = places};
    uint8_t byte;

    cr_expect_eq(ucm_window_open(summaries, 0, 0, -1, &window), -UCM_EUNSUPPORTED);
    cr_expect_eq(ucm_window_open(rig.ns, 1, 0, -1, &window), -UCM_EINVALID);
    cr_expect_eq(ucm_window_open(rig.ns, 0, 2, -1, &window), -UCM_EINVALID);
    cr_expect_eq(ucm_window_open(NULL, 0, 0, -1, &window), -UCM_EINVALID);
    open_window(0);
    p.first = WINDOW_BLOCKS + 8;
    cr_expect_eq(ucm_window_pin(window, &p, -1, NULL), -UCM_EINVALID);
    p.first = 1;
    p.n = WINDOW_BLOCKS + 8;
    cr_expect_eq(ucm_window_pin(window, &p, -1, NULL), -UCM_EINVALID);
    p.n = 0;
    cr_expect_eq(ucm_window_pin(window, &p, -1, NULL), -UCM_EINVALID);
    p = (struct ucm_window_pin){.sequence = other, .n = 1, .places = places};
    cr_expect_eq(ucm_window_pin(window, &p, -1, NULL), -UCM_EINVALID);
    cr_expect_eq(ucm_window_read(window, NULL, 0, 1, &byte), -UCM_EINVALID);
    cr_expect_eq(ucm_window_unpin(window, sequence, UCM_SEQUENCE_BLOCKS_MAX, 1, -1), -UCM_EINVALID);
    second = window;
    ucm_window_close(second);
    ucm_window_close(NULL);
}

Test(client_window, unpin_names_the_range)
{
    open_and_pin(0);
    cr_expect_eq(ucm_window_unpin(window, sequence, 0, UINT32_MAX, -1), 0, "%s", ucm_errmsg());
    cr_expect_eq(WGET(unpins), 1u);
    fake_hang_up(&rig.fake);
    cr_expect_eq(ucm_window_unpin(window, sequence, 0, 1, -1), 0, "nothing is pinned any more");
    cr_expect_eq(WGET(unpins), 1u);
}

/* ---- giving back ---- */

static void until(bool (*is)(void))
{
    int64_t end = fake_now_ms() + 10000;

    while (!is()) {
        cr_assert(fake_now_ms() < end, "it does not happen");
        ucm_process(rig.client);
        fake_sleep_ms(1);
    }
}

static bool one_released(void)
{
    return WGET(releases) == 1;
}

Test(client_window, what_the_daemon_wants_back_is_unmapped)
{
    static const uint32_t slabs[] = {2, 77}; /* the second was never granted */

    open_and_pin(0);
    window_ask_back(slabs, 2);
    until(one_released);
    cr_expect_eq(mappings(), WINDOW_SLABS, "the table and the other slabs");
    cr_expect_eq(read_block(16), UCM_WINDOW_MISS);
    cr_expect_eq(read_block(15), 0);
    cr_assert_eq(pin(0, WINDOW_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(16), 0, "it was granted again");
}

Test(client_window, addresses_stay_mapped_until_they_are_released)
{
    static const uint32_t slab = 2;
    struct ucm_window_mapping all[WINDOW_SLABS + 1], *wanted = NULL;
    const uint64_t *seq;
    const void *address;
    uint32_t n;

    open_and_pin(UCM_WINDOW_ADDRESSES);
    cr_assert_eq(ucm_window_address(window, &places[16], &address, &seq), 0);
    cr_expect_eq(*(const uint8_t *)address, 16);
    cr_expect_eq(*seq, places[16].seq);
    window_ask_back(&slab, 1);
    while (!wanted) {
        cr_assert_eq(ucm_window_mappings(window, all, WINDOW_SLABS + 1, &n), 0);
        cr_assert_eq(n, WINDOW_SLABS + 1);
        for (uint32_t i = 0; i < n; i++)
            if (all[i].wanted)
                wanted = &all[i];
    }
    cr_expect_eq(wanted->slab, 2u);
    cr_expect_eq((const void *)wanted->address, address);
    cr_expect_eq(*(const uint8_t *)address, 16, "still mapped");
    cr_expect_eq(WGET(releases), 0u);
    cr_assert_eq(ucm_window_release(window, address), 0, "%s", ucm_errmsg());
    until(one_released);
    cr_expect_eq(ucm_window_release(window, address), -UCM_ENOTFOUND);
    cr_expect_eq(ucm_window_address(window, &places[16], &address, &seq), UCM_WINDOW_MISS);
    for (uint32_t i = 0; i < n; i++)
        if (all[i].slab == UCM_PLACE_NONE)
            cr_expect_eq(ucm_window_release(window, all[i].address), -UCM_EINVALID);
}

Test(client_window, without_addresses_there_are_none)
{
    const uint64_t *seq;
    const void *address;

    open_and_pin(0);
    cr_expect_eq(ucm_window_address(window, &places[0], &address, &seq), -UCM_EINVALID);
    cr_expect_eq(ucm_window_release(window, places), -UCM_EINVALID);
}

Test(client_window, closing_ends_it_in_the_daemon)
{
    open_and_pin(0);
    ucm_window_close(window);
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(WGET(closes), 1u);
}

/* ---- reconnects ---- */

Test(client_window, after_a_break_all_places_are_misses)
{
    open_and_pin(0);
    fake_hang_up(&rig.fake);
    while (ucm_process(rig.client) >= 0)
        fake_sleep_ms(1);
    cr_expect_eq(read_block(0), UCM_WINDOW_MISS);
    cr_expect_eq(mappings(), 0u, "nothing stays mapped");
    /* The next daemon may give the same sequence numbers. */
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(read_block(0), UCM_WINDOW_MISS);
    cr_assert_eq(pin(1, 3, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(WGET(opens), 2u);
    cr_expect_eq(read_block(0), UCM_WINDOW_MISS, "of the opening before");
    cr_expect_eq(read_block(1), 0);
}

Test(client_window, after_a_break_addresses_wait_for_their_release)
{
    struct ucm_window_mapping all[2 * WINDOW_SLABS + 2];
    const uint64_t *seq;
    const void *address;
    uint32_t n, old = 0;

    open_and_pin(UCM_WINDOW_ADDRESSES);
    cr_assert_eq(ucm_window_address(window, &places[0], &address, &seq), 0);
    fake_hang_up(&rig.fake);
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(*(const uint8_t *)address, 0, "still mapped");
    cr_assert_eq(pin(0, WINDOW_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_window_mappings(window, all, 2 * WINDOW_SLABS + 2, &n), 0);
    cr_expect_eq(n, 2 * WINDOW_SLABS + 2);
    for (uint32_t i = 0; i < n; i++) {
        if (!all[i].wanted)
            continue;
        cr_expect_eq(all[i].opened, 1u);
        cr_expect_eq(ucm_window_release(window, all[i].address), 0, "%s", ucm_errmsg());
        old++;
    }
    cr_expect_eq(old, WINDOW_SLABS + 1);
    cr_expect_eq(WGET(releases), 0u, "the daemon of before has gone");
    cr_expect_eq(read_block(0), 0);
}

Test(client_window, a_pin_that_is_not_answered_ends_the_window)
{
    struct ucm_window_pin p = {.sequence = sequence, .n = 1, .places = places};

    open_and_pin(0);
    WSET(hold, true);
    cr_expect_eq(ucm_window_pin(window, &p, 50, NULL), -UCM_EDEADLINE);
    WSET(hold, false);
    cr_expect_eq(read_block(3), UCM_WINDOW_MISS, "nobody knows what is pinned");
    cr_assert_eq(pin(0, 4, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(3), 0);
    cr_expect_eq(WGET(opens), 2u);
    cr_expect_eq(WGET(closes), 1u);
}

Test(client_window, one_that_the_daemon_ended_is_opened_again)
{
    open_and_pin(0);
    WSET(id, 0);
    cr_assert_eq(pin(0, 4, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(3), 0);
    cr_expect_eq(read_block(5), UCM_WINDOW_MISS);
}

/* ---- a hostile daemon ---- */

Test(client_window, answers_of_open_that_do_not_fit)
{
    int before = open_fds();

    for (enum window_spoil s = SPOIL_OPEN_NO_FD; s <= SPOIL_OPEN_LAST; s++) {
        WSET(spoil, s);
        cr_expect_eq(ucm_window_open(rig.ns, 0, 0, -1, &window), -UCM_EPROTOCOL, "%d: %s", (int)s,
                     ucm_errmsg());
        expect_fds(before, "an answer that does not fit");
    }
    WSET(spoil, SPOIL_NOTHING);
    open_and_pin(0);
    cr_expect_eq(read_block(1), 0);
}

Test(client_window, answers_of_pin_that_do_not_fit)
{
    int before;

    open_window(0);
    before = open_fds();
    for (enum window_spoil s = SPOIL_PIN_NO_FD; s <= SPOIL_PIN_LAST; s++) {
        WSET(spoil, s);
        cr_expect_eq(pin(0, WINDOW_BLOCKS, NULL), -UCM_EPROTOCOL, "%d: %s", (int)s, ucm_errmsg());
        expect_fds(before, "an answer that does not fit");
        cr_expect_eq(read_block(0), UCM_WINDOW_MISS, "%d", (int)s);
    }
    WSET(spoil, SPOIL_NOTHING);
    cr_assert_eq(pin(0, WINDOW_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(1), 0);
}

Test(client_window, places_out_of_the_window_are_none)
{
    open_window(0);
    for (enum window_spoil s = SPOIL_PLACE_SLOT; s <= SPOIL_PLACE_UNGRANTED; s++) {
        struct ucm_window_pinned result;

        /* What was granted stays so. */
        WSET(spoil, s == SPOIL_PLACE_UNGRANTED ? SPOIL_NOTHING : s);
        if (s == SPOIL_PLACE_UNGRANTED) {
            ucm_window_close(window);
            open_window(0);
            WSET(spoil, s);
        }
        cr_assert_eq(pin(0, 4, &result), 0, "%s", ucm_errmsg());
        cr_expect_eq(result.placed, 0u, "%d", (int)s);
        cr_expect_eq(read_block(0), UCM_WINDOW_MISS);
    }
}

/* Frames with descriptors that nobody asked for: of a lookup. */
static bool lookup_with_fds(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    struct msg_lookup_r r = {.hits = 1};
    int fds[UCM_MAX_FRAME_FDS];

    if (method != UCM_METHOD_LOOKUP)
        return window_hook(f, conn, method, env);
    for (unsigned i = 0; i < UCM_MAX_FRAME_FDS; i++)
        fds[i] = dup(win.table);
    fake_reply_fds(conn, env->msgid, &proto_lookup_r, &r, fds, UCM_MAX_FRAME_FDS);
    return true;
}

Test(client_window, descriptors_that_nobody_asked_for_are_closed)
{
    int before = open_fds();

    rig.fake.hook = lookup_with_fds;
    for (int i = 0; i < 20; i++)
        cr_expect_eq(rig_lookup(&rig, -1), 0);
    expect_fds(before, "nobody asked for them");
}

Test(client_window, without_room_for_descriptors_nothing_leaks)
{
    struct rlimit limit, few;
    int before;

    open_window(0);
    before = open_fds();
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int fd = 0; fd < 1024; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            few.rlim_cur = (rlim_t)fd + 3;
    few.rlim_max = limit.rlim_max;
    /* The fake, in this process, dups what it sends first. */
    WSET(most_granted, 2);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    (void)pin(0, WINDOW_BLOCKS, NULL);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    expect_fds(before + 1, "no room");
    cr_assert_eq(pin(0, WINDOW_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(63), 0);
}
