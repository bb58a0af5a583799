/* Which tenant's record of a namespace is written next, when many wait. */
#include "daemon/tier/nvme.h"
#include "tests/unit/tier/nvme_rig.h"

#define MANY 300u

struct asked {
    struct tier_ns_record record;
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    unsigned place; /* when it was done, from 1 */
};

static struct asked asked[MANY];
static unsigned done, again;

static void done_cb(struct tier_ns_record *record, int status)
{
    cr_assert_eq(status, 0, "%s", strerror(-status));
    LIST_ENTRY(record, struct asked, record)->place = ++done;
}

static void ask(struct asked *a, uint32_t tenant, unsigned number, bool forget)
{
    static const uint8_t identity[16] = "any";

    memset(a->fingerprint, 0x11, sizeof(a->fingerprint));
    memcpy(a->fingerprint, &number, sizeof(number));
    a->record = (struct tier_ns_record){.fingerprint = a->fingerprint,
                                        .identity = identity,
                                        .identity_bytes = sizeof(identity),
                                        .forget = forget,
                                        .who = {tenant, FAIR_WEIGHT},
                                        .done_cb = done_cb};
    tier_nvme.ns_record(rig.tier, &a->record);
}

static void open_rig(void)
{
    rig_init(1, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig_open();
}

TestSuite(nvme_ns_turns, .init = open_rig, .fini = rig_close);

/* One is under way, and the others share a batch. */
Test(nvme_ns_turns, who_asks_for_many_keeps_nobody_waiting)
{
    static struct asked other;

    for (unsigned i = 0; i < MANY; i++)
        ask(&asked[i], 1, i, i % 2 == 0);
    ask(&other, 2, MANY, false);
    rig_run();
    cr_expect_eq(done, MANY + 1);
    cr_expect_leq(other.place, 1 + NVME_NS_BATCH);
    for (unsigned i = 1; i < MANY; i++)
        cr_assert_gt(asked[i].place, asked[i - 1].place);
}

static void again_cb(struct tier_ns_record *record, int status)
{
    (void)record;
    cr_assert_eq(status, 0);
    again++;
    ask(&asked[again], 1, again, false);
}

/* If a namespace's record waits, its purge comes after it. A callback may ask for more. */
Test(nvme_ns_turns, records_of_one_namespace_keep_their_order)
{
    static struct asked before, first, purge, second;
    const struct nvme_ns_record *known;

    ask(&before, 1, 9, false);
    before.record.done_cb = again_cb;
    ask(&first, 1, 7, false);
    rig.tier->record_sequence += 100;
    ask(&purge, 1, 7, true);
    ask(&second, 1, 7, false);
    rig_run();
    cr_expect_eq(again, 1u);
    cr_expect(asked[1].place > 0);
    cr_expect(first.place < purge.place && purge.place < second.place);
    known = ns_records_find(&rig.tier->ns_records, first.fingerprint);
    cr_assert_not_null(known);
    cr_expect_eq(known->from_sequence, purge.record.from_sequence);
}
