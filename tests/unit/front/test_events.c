/* Rings of events that come and go: what a reader learns from the numbers. tests/integration/test_events.py has the rest. */
#include "daemon/events/events.h"
#include "daemon/tenant/tenant.h"

#include <criterion/criterion.h>
#include <string.h>

#define HOUR_MS 3600000u

static struct tenant_set tenants;
static struct limits *limits;
static struct metrics metrics;
static struct events *events;

static void nobody_waits(void *ctx)
{
    (void)ctx;
}

static void setup(void)
{
    struct events_config config = {.memory = 1 << 20,
                                   .limits = limits = limits_new(),
                                   .tenants = &tenants,
                                   .metrics = &metrics,
                                   .wake_cb = nobody_waits};

    cr_assert_eq(tenant_set_init(&tenants), 0);
    cr_assert_not_null(limits);
    cr_assert_eq(events_new(&config, &events), 0);
}

static void teardown(void)
{
    events_free(events);
    limits_free(limits);
    tenant_set_close(&tenants);
}

TestSuite(events, .init = setup, .fini = teardown);

static struct tenant_events *opened(const char *tenant, uint64_t now_ms)
{
    struct tenant_events *te = NULL;
    struct ucm_error e = {.text = ""};

    cr_assert_eq(events_open(events, tenant, now_ms, &te, &e), 0, "%s", e.text);
    return te;
}

static void happen(struct tenant_events *te, unsigned n)
{
    struct ns ns = {.id = 1, .tenant = te->tenant};
    const uint8_t key[UCM_MAX_KEY_BYTES] = {1};

    ns.identity.key_bytes = 16;
    for (unsigned i = 0; i < n; i++)
        events_changed(events, &ns, key, UCM_LOOKUP_MISS, UCM_LOOKUP_DRAM);
}

Test(events, the_first_ring_begins_with_1)
{
    struct tenant_events *te = opened("a", 0);

    cr_expect_eq(events_first(te), 1);
    happen(te, 3);
    cr_expect_eq(te->last, 3);
    cr_expect_eq(events_first(te), 1);
    happen(te, (unsigned)te->cap);
    cr_expect_eq(events_first(te), 4);
}

/* When a ring comes back, its numbers tell a reader that it has missed events, even if none has
 * happened since. */
Test(events, a_ring_that_comes_back_goes_on_after_a_gap)
{
    struct tenant_events *te = opened("a", 0);
    char name[] = "0";
    uint64_t had;

    happen(te, 3);
    had = te->last;
    for (; tenant_find(&tenants, "a"); name[0]++) {
        struct ucm_error e = {.text = ""};

        cr_assert_lt(name[0], '~', "others take no memory from an idle one");
        (void)events_open(events, name, 2 * HOUR_MS, &te, &e);
    }
    te = opened("a", 4 * HOUR_MS);
    cr_expect_gt(events_first(te), had + 1);
    cr_expect_gt(te->last, had);
}
