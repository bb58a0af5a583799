/* Dumps while the tier still looks for blocks of earlier runs. */
#include "tests/unit/cache/cache_rig.h"

TestSuite(cache_restore, .init = rig_open, .fini = rig_close);

/* The tier has found part 0, at a place of this part alone. */
static uint64_t turns_up(struct ns *ns, uint64_t number)
{
    struct tier *t = &rig.tier;
    struct tier_name name = {.key_bytes = 16};
    struct tier_found f = {.name = &name,
                           .identity = ns->canonical,
                           .identity_bytes = ns->canonical_bytes,
                           .bytes = ns_part_bytes(ns, 0),
                           .sequence = 1};
    uint64_t owner;

    memcpy(name.fingerprint, ns->fingerprint, sizeof(name.fingerprint));
    key_of(number, name.key);
    f.place.loc = t->places + 1;
    owner = t->callbacks.restore_cb(t->callbacks.ctx, &f);
    if (owner == 0)
        return 0;
    t->place[t->places++] = (struct place){true, owner, f.bytes, calloc(1, f.bytes), 1};
    t->n_live++;
    return f.place.loc;
}

static void recovered(void)
{
    rig.tier.recovering = false;
    rig.tier.callbacks.recovered_cb(rig.tier.callbacks.ctx);
    iterate();
}

static block_ref dump_while_recovering(void)
{
    block_ref ref;

    rig.tier.recovering = true;
    ref = store(rig.one, 1);
    iterate();
    cr_assert_eq(rig.tier.n_pending, 0u, "it waits");
    return ref;
}

Test(cache_restore, the_copy_from_before_stays_the_only_one)
{
    block_ref ref = dump_while_recovering();

    cr_assert_neq(turns_up(rig.one, 1), 0u);
    cr_expect_not(cache_written(rig.cache), "nobody has read that copy yet");
    recovered();
    cr_assert_eq(rig.tier.n_pending, 1u);
    cr_assert_eq(fake_at(&rig.tier, 0)->op, TIER_SYNC);
    fake_next(&rig.tier, 0);
    iterate();
    cr_expect_eq(rig.tier.n_pending, 0u);
    cr_expect(cache_written(rig.cache));
    drop(ref);
}

Test(cache_restore, a_copy_from_before_that_is_not_whole_is_written_again)
{
    block_ref ref = dump_while_recovering();

    cr_assert_neq(turns_up(rig.one, 1), 0u);
    recovered();
    fake_next(&rig.tier, -EBADMSG);
    cr_expect_eq(rig.tier.forgets, 1u);
    cr_assert_eq(fake_at(&rig.tier, 0)->op, TIER_WRITE);
    drop(ref);
}

Test(cache_restore, a_fill_goes_on_when_its_part_turns_up)
{
    block_ref ref;

    rig.tier.recovering = true;
    ref = open_block(rig.one, 1);
    cr_assert_eq(dump(ref, 0, 0, 1), 0);
    cr_assert_neq(turns_up(rig.one, 1), 0u);
    cr_assert_eq(dump(ref, 0, 1, 1), 0);
    cr_expect(cache_in_dram(rig.cache, ref));
    recovered();
    cr_assert_eq(fake_at(&rig.tier, 0)->op, TIER_SYNC);
    drop(ref);
}

/* Otherwise a durable dump would take the namespace for recorded, and no later start would find it.
 */
Test(cache_restore, a_record_with_another_identity_makes_no_namespace)
{
    struct ns_identity id = rig.one->identity;
    uint8_t canonical[NS_CANONICAL_MAX];
    struct tier_name name = {.key_bytes = 16};
    struct tier_found f = {.name = &name, .identity = canonical, .bytes = MIB / 4, .sequence = 1};
    struct ucm_error e;
    struct ns *ns;

    id.model = "other";
    f.identity_bytes = (uint32_t)ns_identity_encode(&id, canonical, sizeof(canonical));
    memset(name.fingerprint, 7, sizeof(name.fingerprint));
    cr_expect_eq(rig.tier.callbacks.restore_cb(rig.tier.callbacks.ctx, &f), 0u);
    for (uint32_t place = 2; place < index_ns_places(rig.index); place++)
        cr_expect_null(index_ns_at(rig.index, place));
    cr_assert_eq(index_ns_open(rig.index, &id, NULL, &ns, &e), 0);
    cr_expect_eq(ns->record, NS_RECORD_NONE, "it has no record yet");
}
