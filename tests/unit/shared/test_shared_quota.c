/* Tenants' minimum and maximum of a root: passes of garbage collection over a real directory, and
 * the notes that say which tenant has a namespace. */
#include "tests/unit/shared/shared_gc_rig.h"

#define FILE_BYTES 1064

static struct {
    const char *tenant;
    uint64_t guaranteed, most;
} given[4];

static bool quota_cb(void *ctx, const char *tenant, uint64_t *guaranteed, uint64_t *most)
{
    (void)ctx;
    for (unsigned i = 0; i < 4; i++)
        if (given[i].tenant && (!tenant || strcmp(given[i].tenant, tenant) == 0)) {
            if (tenant)
                *guaranteed = given[i].guaranteed, *most = given[i].most;
            return true;
        }
    return false;
}

static void give(unsigned at, const char *tenant, uint64_t guaranteed, uint64_t most)
{
    given[at].tenant = tenant;
    given[at].guaranteed = guaranteed * FILE_BYTES;
    given[at].most = most * FILE_BYTES;
}

static struct rig g;
static struct shared shared;

static void notes_open(void)
{
    memset(given, 0, sizeof(given));
    rig_begin(&g, 0);
    memset(&shared, 0, sizeof(shared));
    shared.settings.loop = g.loop;
    shared.settings.deadlines = g.deadlines;
    shared.settings.timeout_ms = 5000;
    shared.n = 1;
    shared.roots[0] = g.hosts[0].root;
    gc_quotas(g.hosts[0].gc, quota_cb, NULL);
}

static void notes_close(void)
{
    rig_end(&g);
}

TestSuite(shared_quota, .init = notes_open, .fini = notes_close);

static const char *note_name(unsigned namespace)
{
    static char name[BLOCK_FILE_NAME_CAP];
    struct block_file_id id = rig_id(namespace, 0, 0);

    block_file_tenant_name(id.fingerprint, name);
    return name;
}

/* As a host that writes the namespace does it. */
static void note(unsigned namespace, const char *tenant, uint64_t age_s)
{
    struct shared_io io = {.write = true, .id = rig_id(namespace, 0, 0), .tenant = tenant};

    shared_tenant_note(&shared, &io);
    RIG_WAIT_WHILE(&g, shared.noting > 0);
    rig_age(rig_path(&g, BLOCK_FILE_TENANT_BUCKET, note_name(namespace)), age_s);
}

/* n files of the namespace, the first the oldest, a day apart. */
static void put(unsigned namespace, unsigned n, uint64_t youngest_s)
{
    for (unsigned i = 0; i < n; i++)
        rig_put(&g, namespace, i, 0, youngest_s + (n - i) * UINT64_C(86400), FILE_BYTES);
}

static unsigned left(unsigned namespace, unsigned from, unsigned n)
{
    unsigned there = 0;

    for (unsigned i = from; i < from + n; i++)
        there += rig_has(&g, namespace, i, 0);
    return there;
}

static void capacity(unsigned files)
{
    g.hosts[0].root->config.capacity_bytes = (uint64_t)files * FILE_BYTES;
}

Test(shared_quota, what_is_guaranteed_stays_though_it_is_the_oldest)
{
    note(1, "quiet", 0);
    note(2, "noisy", 0);
    put(1, 40, 9000000);
    put(2, 160, 600);
    give(0, "quiet", 40, 0);
    capacity(100);
    rig_pass(&g, 0);
    cr_expect_eq(left(1, 0, 40), 40u);
    cr_expect_leq(left(2, 0, 160), 50u);
    cr_expect_geq(left(2, 0, 160), 40u);
    cr_expect_eq(left(2, 120, 40), 40u, "the oldest of the others went");
}

Test(shared_quota, beyond_its_guarantee_a_tenant_loses_its_oldest)
{
    note(1, "quiet", 0);
    put(1, 100, 600);
    put(2, 100, 600);
    give(0, "quiet", 80, 0);
    capacity(120);
    rig_pass(&g, 0);
    cr_expect_geq(left(1, 0, 100), 80u);
    cr_expect_leq(left(1, 0, 100), 90u);
    cr_expect_geq(left(1, 30, 70), 65u, "its oldest went");
    cr_expect_geq(left(2, 0, 100), 15u);
    cr_expect_leq(left(2, 0, 60), 2u);
}

Test(shared_quota, at_most_holds_on_a_root_with_space)
{
    note(1, "quiet", 0);
    note(2, "noisy", 0);
    note(3, "noisy", 0);
    put(1, 50, 9000000);
    put(2, 60, 9000000);
    put(3, 40, 600);
    give(0, "noisy", 0, 50);
    rig_pass(&g, 0);
    cr_expect_eq(left(1, 0, 50), 50u);
    cr_expect_leq(left(2, 0, 60) + left(3, 0, 40), 45u, "of both its namespaces together");
    cr_expect_geq(left(2, 0, 60) + left(3, 0, 40), 40u);
    cr_expect_geq(left(3, 0, 40), 38u, "the oldest go first");
    rig_pass(&g, 0);
    cr_expect_geq(left(2, 0, 60) + left(3, 0, 40), 40u, "within its bound it loses nothing");
}

Test(shared_quota, at_most_and_a_full_root_at_once)
{
    note(1, "quiet", 0);
    note(2, "noisy", 0);
    put(1, 40, 9000000);
    put(2, 100, 36000);
    put(3, 60, 600);
    give(0, "quiet", 40, 0);
    give(1, "noisy", 0, 50);
    capacity(120);
    rig_pass(&g, 0);
    cr_expect_eq(left(1, 0, 40), 40u);
    cr_expect_leq(left(2, 0, 100), 45u);
    cr_expect_leq(left(1, 0, 40) + left(2, 0, 100) + left(3, 0, 60), 108u);
    cr_expect_geq(left(1, 0, 40) + left(2, 0, 100) + left(3, 0, 60), 98u);
}

Test(shared_quota, what_cannot_be_read_stops_the_pass)
{
    uint64_t failed = g.hosts[0].metrics.shared_gc_failed;

    note(1, "quiet", 0);
    put(1, 40, 9000000);
    give(0, "quiet", 40, 0);
    capacity(10);
    /* The marker's read must pass: it is there. */
    rig_pass(&g, 0);
    cr_assert_eq(left(1, 0, 40), 40u);
    note(4, "other", 0);
    put(4, 20, 600);
    rig_fault(&g)->fail[SHARED_READ] = -EIO;
    cr_assert_eq(gc_run(g.hosts[0].gc), 0);
    rig_wait(&g, 0);
    cr_expect_gt(g.hosts[0].metrics.shared_gc_failed, failed);
    cr_expect_eq(left(4, 0, 20), 20u);
    rig_fault(&g)->fail[SHARED_READ] = 0;
    rig_pass(&g, 0);
    cr_expect_eq(left(1, 0, 40), 40u);
    cr_expect_eq(left(4, 0, 20), 0u);
}

Test(shared_quota, notes_go_with_their_namespaces)
{
    give(0, "quiet", 10, 0);
    note(1, "quiet", 30 * 86400);
    note(2, "quiet", 30 * 86400);
    note(3, "quiet", 3600);
    put(1, 1, 600);
    rig_pass(&g, 0);
    cr_expect(rig_has_name(&g, BLOCK_FILE_TENANT_BUCKET, note_name(2)), "no pass had counted");
    rig_pass(&g, 0);
    cr_expect(rig_has_name(&g, BLOCK_FILE_TENANT_BUCKET, note_name(1)));
    cr_expect_not(rig_has_name(&g, BLOCK_FILE_TENANT_BUCKET, note_name(2)));
    cr_expect(rig_has_name(&g, BLOCK_FILE_TENANT_BUCKET, note_name(3)), "it is young");
    cr_expect_eq(gc_usage(g.hosts[0].gc).files, 1u, "notes are not counted");
    /* A damaged note goes at once, so that a writer may replace it. */
    rig_put_name(&g, BLOCK_FILE_TENANT_BUCKET, note_name(7), 60, 64 + UCM_MAX_NAME_BYTES);
    rig_pass(&g, 0);
    cr_expect_not(rig_has_name(&g, BLOCK_FILE_TENANT_BUCKET, note_name(7)));
}
