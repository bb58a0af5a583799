/* Mappings of the client library over a fake daemon: what it maps and refuses, giving back, and
 * reconnects. A read gives the block's bytes or a miss. */
/* Sanitizers: thread */
#include "tests/unit/client/client_mapping_rig.h"

#include <sys/resource.h>

TestSuite(client_mapping, .init = setup, .fini = mapping_down, .timeout = 30);

/* ---- reading ---- */

Test(client_mapping, referenced_blocks_are_read)
{
    struct ucm_mapping_referenced result;
    struct ucm_mapping_info info;
    int before;

    open_mapping(0);
    before = rig_open_fds();
    cr_assert_eq(ref(0, MAPPING_BLOCKS + 8, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.placed, MAPPING_BLOCKS);
    cr_expect_eq(result.moved, 1u);
    cr_expect_eq(result.read, 2u);
    for (uint32_t b = 0; b < MAPPING_BLOCKS; b++)
        cr_expect_eq(read_block(b), 0);
    for (uint32_t b = MAPPING_BLOCKS; b < MAPPING_BLOCKS + 8; b++)
        cr_expect_eq(read_block(b), UCM_MAPPING_MISS, "it has no place");
    cr_assert_eq(ucm_mapping_info(mapping, &info), 0);
    cr_expect_eq(info.opened, 1u);
    cr_expect_eq(info.mapped, MAPPING_SLABS);
    cr_expect_eq(info.part_bytes, MAPPING_SLOT_BYTES);
    rig_expect_fds(before, "mapped ones");
}

Test(client_mapping, a_piece_of_a_block)
{
    uint8_t bytes[16];

    open_and_ref(0);
    cr_expect_eq(ucm_mapping_read(mapping, &places[9], MAPPING_SLOT_BYTES - 16, 16, bytes), 0);
    cr_expect_eq(bytes[15], 9);
    cr_expect_eq(ucm_mapping_read(mapping, &places[9], MAPPING_SLOT_BYTES - 15, 16, bytes),
                 -UCM_EINVALID);
    cr_expect_eq(ucm_mapping_read(mapping, &places[9], UINT64_MAX, 16, bytes), -UCM_EINVALID);
    cr_expect_eq(ucm_mapping_read(mapping, &places[9], 8, UINT64_MAX, bytes), -UCM_EINVALID);
}

Test(client_mapping, another_sequence_number_is_a_miss)
{
    open_and_ref(0);
    ucm_mapping_retract(mapping_seq(5));
    cr_expect_eq(read_block(5), UCM_MAPPING_MISS);
    ucm_mapping_publish(mapping_seq(5), 1000);
    cr_expect_eq(read_block(5), UCM_MAPPING_MISS);
    cr_assert_eq(ref(5, 1, NULL), 0);
    cr_expect_eq(read_block(5), 0);
    cr_expect_eq(read_block(6), 0);
}

Test(client_mapping, places_that_lead_out_of_it_are_misses)
{
    struct ucm_place place;
    uint8_t byte;

    open_and_ref(0);
    for (unsigned i = 0; i < 5; i++) {
        place = places[0];
        place.slab = i == 0 ? MAPPING_SLABS : i == 1 ? UCM_PLACE_NONE : place.slab;
        place.slot = i == 2 ? MAPPING_SLOTS : i == 3 ? UINT32_MAX : place.slot;
        place.seq = i == 4 ? 0 : place.seq;
        cr_expect_eq(ucm_mapping_read(mapping, &place, 0, 1, &byte), UCM_MAPPING_MISS, "%u", i);
    }
    /* Later changes of the daemon's header have no effect. */
    win.header->slabs = UINT32_MAX;
    win.header->slab_bytes = UINT64_MAX;
    win.header->slots_per_slab = UINT32_MAX;
    cr_expect_eq(read_block(63), 0);
}

/* ---- referencing ---- */

Test(client_mapping, many_slabs_come_with_several_answers)
{
    struct ucm_mapping_referenced result;

    WSET(most_granted, 3);
    open_mapping(0);
    cr_assert_eq(ref(0, MAPPING_BLOCKS, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(result.placed, MAPPING_BLOCKS);
    cr_expect_eq(WGET(refs), 3u);
    for (uint32_t b = 0; b < MAPPING_BLOCKS; b++)
        cr_expect_eq(read_block(b), 0);
}

Test(client_mapping, a_long_range_is_cut_into_requests)
{
    struct ucm_place *many = calloc(40000, sizeof *many);
    struct ucm_sequence *long_sequence = sequence_of(40000);
    struct ucm_mapping_ref p = {.sequence = long_sequence, .n = 40000, .places = many};
    struct ucm_mapping_referenced result;

    open_mapping(0);
    cr_assert_eq(ucm_mapping_ref(mapping, &p, -1, &result), 0, "%s", ucm_errmsg());
    cr_expect_eq(WGET(refs), 3u);
    cr_expect_eq(WGET(last_first), 32768u);
    cr_expect_eq(WGET(last_n), 40000u - 32768u);
    cr_expect_eq(result.placed, MAPPING_BLOCKS);
    cr_expect_eq(many[39999].slab, UCM_PLACE_NONE);
    free(many);
}

Test(client_mapping, what_can_not_be_pinned_is_refused_here)
{
    struct ucm_sequence *other = NULL;
    struct ucm_mapping *second;
    struct ucm_mapping_ref p = {.sequence = sequence, .n = 1, .places = places};
    uint8_t byte;

    cr_expect_eq(ucm_mapping_open(summaries, 0, 0, -1, &mapping), -UCM_EUNSUPPORTED);
    cr_expect_eq(ucm_mapping_open(rig.ns, 1, 0, -1, &mapping), -UCM_EINVALID);
    cr_expect_eq(ucm_mapping_open(rig.ns, 0, 2, -1, &mapping), -UCM_EINVALID);
    cr_expect_eq(ucm_mapping_open(NULL, 0, 0, -1, &mapping), -UCM_EINVALID);
    open_mapping(0);
    p.first = MAPPING_BLOCKS + 8;
    cr_expect_eq(ucm_mapping_ref(mapping, &p, -1, NULL), -UCM_EINVALID);
    p.first = 1;
    p.n = MAPPING_BLOCKS + 8;
    cr_expect_eq(ucm_mapping_ref(mapping, &p, -1, NULL), -UCM_EINVALID);
    p.n = 0;
    cr_expect_eq(ucm_mapping_ref(mapping, &p, -1, NULL), -UCM_EINVALID);
    p = (struct ucm_mapping_ref){.sequence = other, .n = 1, .places = places};
    cr_expect_eq(ucm_mapping_ref(mapping, &p, -1, NULL), -UCM_EINVALID);
    cr_expect_eq(ucm_mapping_read(mapping, NULL, 0, 1, &byte), -UCM_EINVALID);
    cr_expect_eq(ucm_mapping_unref(mapping, sequence, UCM_SEQUENCE_BLOCKS_MAX, 1, -1),
                 -UCM_EINVALID);
    second = mapping;
    ucm_mapping_close(second);
    ucm_mapping_close(NULL);
}

Test(client_mapping, unref_names_the_range)
{
    open_and_ref(0);
    cr_expect_eq(ucm_mapping_unref(mapping, sequence, 0, UINT32_MAX, -1), 0, "%s", ucm_errmsg());
    cr_expect_eq(WGET(unrefs), 1u);
    fake_hang_up(&rig.fake);
    cr_expect_eq(ucm_mapping_unref(mapping, sequence, 0, 1, -1), 0,
                 "nothing is referenced any more");
    cr_expect_eq(WGET(unrefs), 1u);
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

Test(client_mapping, what_the_daemon_wants_back_is_unmapped)
{
    static const uint32_t slabs[] = {2, 77}; /* the second was never granted */

    open_and_ref(0);
    mapping_ask_back(slabs, 2);
    until(one_released);
    cr_expect_eq(ranges(), MAPPING_SLABS, "the table and the other slabs");
    cr_expect_eq(read_block(16), UCM_MAPPING_MISS);
    cr_expect_eq(read_block(15), 0);
    cr_assert_eq(ref(0, MAPPING_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(16), 0, "it was granted again");
}

Test(client_mapping, addresses_stay_mapped_until_they_are_released)
{
    static const uint32_t slab = 2;
    struct ucm_mapped_range all[MAPPING_SLABS + 1], *wanted = NULL;
    const uint64_t *seq;
    const void *address;
    uint32_t n;

    open_and_ref(UCM_MAPPING_ADDRESSES);
    cr_assert_eq(ucm_mapping_address(mapping, &places[16], &address, &seq), 0);
    cr_expect_eq(*(const uint8_t *)address, 16);
    cr_expect_eq(*seq, places[16].seq);
    mapping_ask_back(&slab, 1);
    while (!wanted) {
        cr_assert_eq(ucm_mapping_ranges(mapping, all, MAPPING_SLABS + 1, &n), 0);
        cr_assert_eq(n, MAPPING_SLABS + 1);
        for (uint32_t i = 0; i < n; i++)
            if (all[i].wanted)
                wanted = &all[i];
    }
    cr_expect_eq(wanted->slab, 2u);
    cr_expect_eq((const void *)wanted->address, address);
    cr_expect_eq(*(const uint8_t *)address, 16, "still mapped");
    cr_expect_eq(WGET(releases), 0u);
    cr_assert_eq(ucm_mapping_release(mapping, address), 0, "%s", ucm_errmsg());
    until(one_released);
    cr_expect_eq(ucm_mapping_release(mapping, address), -UCM_ENOTFOUND);
    cr_expect_eq(ucm_mapping_address(mapping, &places[16], &address, &seq), UCM_MAPPING_MISS);
    for (uint32_t i = 0; i < n; i++)
        if (all[i].slab == UCM_PLACE_NONE)
            cr_expect_eq(ucm_mapping_release(mapping, all[i].address), -UCM_EINVALID);
}

Test(client_mapping, without_addresses_there_are_none)
{
    const uint64_t *seq;
    const void *address;

    open_and_ref(0);
    cr_expect_eq(ucm_mapping_address(mapping, &places[0], &address, &seq), -UCM_EINVALID);
    cr_expect_eq(ucm_mapping_release(mapping, places), -UCM_EINVALID);
}

/* ---- reconnects ---- */

Test(client_mapping, after_a_break_all_places_are_misses)
{
    open_and_ref(0);
    fake_hang_up(&rig.fake);
    while (ucm_process(rig.client) >= 0)
        fake_sleep_ms(1);
    cr_expect_eq(read_block(0), UCM_MAPPING_MISS);
    cr_expect_eq(ranges(), 0u, "nothing stays mapped");
    /* The next daemon may give the same sequence numbers. */
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(read_block(0), UCM_MAPPING_MISS);
    cr_assert_eq(ref(1, 3, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(WGET(opens), 2u);
    cr_expect_eq(read_block(0), UCM_MAPPING_MISS, "of the opening before");
    cr_expect_eq(read_block(1), 0);
}

Test(client_mapping, after_a_break_addresses_wait_for_their_release)
{
    struct ucm_mapped_range all[2 * MAPPING_SLABS + 2];
    const uint64_t *seq;
    const void *address;
    uint32_t n, old = 0;

    open_and_ref(UCM_MAPPING_ADDRESSES);
    cr_assert_eq(ucm_mapping_address(mapping, &places[0], &address, &seq), 0);
    fake_hang_up(&rig.fake);
    cr_assert_eq(rig_lookup(&rig, -1), 0);
    cr_expect_eq(*(const uint8_t *)address, 0, "still mapped");
    cr_assert_eq(ref(0, MAPPING_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_assert_eq(ucm_mapping_ranges(mapping, all, 2 * MAPPING_SLABS + 2, &n), 0);
    cr_expect_eq(n, 2 * MAPPING_SLABS + 2);
    for (uint32_t i = 0; i < n; i++) {
        if (!all[i].wanted)
            continue;
        cr_expect_eq(all[i].opened, 1u);
        cr_expect_eq(ucm_mapping_release(mapping, all[i].address), 0, "%s", ucm_errmsg());
        old++;
    }
    cr_expect_eq(old, MAPPING_SLABS + 1);
    cr_expect_eq(WGET(releases), 0u, "the daemon of before has gone");
    cr_expect_eq(read_block(0), 0);
}

Test(client_mapping, a_ref_that_is_not_answered_ends_the_mapping)
{
    struct ucm_mapping_ref p = {.sequence = sequence, .n = 1, .places = places};

    open_and_ref(0);
    WSET(hold, true);
    cr_expect_eq(ucm_mapping_ref(mapping, &p, 50, NULL), -UCM_EDEADLINE);
    WSET(hold, false);
    cr_expect_eq(read_block(3), UCM_MAPPING_MISS, "nobody knows what is referenced");
    cr_assert_eq(ref(0, 4, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(3), 0);
    cr_expect_eq(WGET(opens), 2u);
    cr_expect_eq(WGET(closes), 1u);
}

Test(client_mapping, one_that_the_daemon_ended_is_opened_again)
{
    open_and_ref(0);
    WSET(id, 0);
    cr_assert_eq(ref(0, 4, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(3), 0);
    cr_expect_eq(read_block(5), UCM_MAPPING_MISS);
}

/* ---- a hostile daemon ---- */

Test(client_mapping, answers_of_open_that_do_not_fit)
{
    int before = rig_open_fds();

    for (unsigned s = SPOIL_NO_FD; s <= SPOIL_OPEN_LAST; s++) {
        WSET(spoil, s);
        cr_expect_eq(ucm_mapping_open(rig.ns, 0, 0, -1, &mapping), -UCM_EPROTOCOL, "%u: %s", s,
                     ucm_errmsg());
        rig_expect_fds(before, "an answer that does not fit");
    }
    WSET(spoil, SPOIL_NOTHING);
    open_and_ref(0);
    cr_expect_eq(read_block(1), 0);
}

Test(client_mapping, answers_of_ref_that_do_not_fit)
{
    int before;

    open_mapping(0);
    before = rig_open_fds();
    for (unsigned s = SPOIL_REF_NO_FD; s <= SPOIL_REF_LAST; s++) {
        WSET(spoil, s);
        cr_expect_eq(ref(0, MAPPING_BLOCKS, NULL), -UCM_EPROTOCOL, "%u: %s", s, ucm_errmsg());
        rig_expect_fds(before, "an answer that does not fit");
        cr_expect_eq(read_block(0), UCM_MAPPING_MISS, "%u", s);
    }
    WSET(spoil, SPOIL_NOTHING);
    cr_assert_eq(ref(0, MAPPING_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(1), 0);
}

Test(client_mapping, places_out_of_the_mapping_are_none)
{
    open_mapping(0);
    for (unsigned s = SPOIL_PLACE_SLOT; s <= SPOIL_PLACE_UNGRANTED; s++) {
        struct ucm_mapping_referenced result;

        /* What was granted stays so. */
        WSET(spoil, s == SPOIL_PLACE_UNGRANTED ? SPOIL_NOTHING : s);
        if (s == SPOIL_PLACE_UNGRANTED) {
            ucm_mapping_close(mapping);
            open_mapping(0);
            WSET(spoil, s);
        }
        cr_assert_eq(ref(0, 4, &result), 0, "%s", ucm_errmsg());
        cr_expect_eq(result.placed, 0u, "%u", s);
        cr_expect_eq(read_block(0), UCM_MAPPING_MISS);
    }
}

/* Frames with descriptors that nobody asked for: answers to a lookup. */
static bool lookup_with_fds(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    struct msg_lookup_r r = {.hits = 1};
    int fds[UCM_MAX_FRAME_FDS];

    if (method != UCM_METHOD_LOOKUP)
        return mapping_hook(f, conn, method, env);
    for (unsigned i = 0; i < UCM_MAX_FRAME_FDS; i++)
        fds[i] = dup(win.table);
    fake_reply_fds(conn, env->msgid, &proto_lookup_r, &r, fds, UCM_MAX_FRAME_FDS);
    return true;
}

Test(client_mapping, descriptors_that_nobody_asked_for_are_closed)
{
    int before = rig_open_fds();

    rig.fake.hook = lookup_with_fds;
    for (int i = 0; i < 20; i++)
        cr_expect_eq(rig_lookup(&rig, -1), 0);
    rig_expect_fds(before, "nobody asked for them");
}

Test(client_mapping, without_room_for_descriptors_nothing_leaks)
{
    struct rlimit limit, few;
    int before;

    open_mapping(0);
    before = rig_open_fds();
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int fd = 0; fd < 1024; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            few.rlim_cur = (rlim_t)fd + 3;
    few.rlim_max = limit.rlim_max;
    /* The fake, in this process, first duplicates what it sends. */
    WSET(most_granted, 2);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    (void)ref(0, MAPPING_BLOCKS, NULL);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    rig_expect_fds(before + 1, "no room");
    cr_assert_eq(ref(0, MAPPING_BLOCKS, NULL), 0, "%s", ucm_errmsg());
    cr_expect_eq(read_block(63), 0);
}
