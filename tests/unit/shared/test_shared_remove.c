/* Removals by key: which files are asked for, in which tenants' turns, and the reports about roots
 * that are full, hang, fail, or refuse changes. */
/* Sanitizers: thread */
#include "tests/unit/shared/shared_rig.h"

#include "daemon/encryption/encryption.h"
#include "tests/runner/wipe.h"

#define KEYS 5000u
#define PARTS 4u

struct job {
    struct shared_removal r;
    uint8_t keys[KEYS][32];
    uint32_t whole[KEYS];
    int calls, status;
    bool done;
};
static struct job one, two;

static void done_cb(struct shared_removal *r, int status)
{
    struct job *j = LIST_ENTRY(r, struct job, r);

    j->calls++;
    j->status = status;
    j->done = true;
}

/* n keys from `first` on, of blocks of `parts` parts. */
static void job_init(struct job *j, uint32_t tenant, uint32_t first, uint32_t n, uint32_t parts)
{
    memset(j, 0, sizeof(*j));
    j->r = (struct shared_removal){.who = {.tenant = tenant, .weight = 100},
                                   .key_bytes = 32,
                                   .part = parts - 1,
                                   .n = n,
                                   .keys = j->keys[0],
                                   .whole = j->whole,
                                   .done_cb = done_cb};
    for (uint32_t i = 0; i < n; i++)
        memcpy(j->keys[i], rig_id(first + i).key, 32);
    memcpy(j->r.fingerprint, rig_id(0).fingerprint, sizeof(j->r.fingerprint));
}

static void begin(struct job *j, uint32_t tenant, uint32_t first, uint32_t n, uint32_t parts)
{
    job_init(j, tenant, first, n, parts);
    shared_removal_begin(shared, &j->r);
    cr_assert_eq(j->calls, 0, "done_cb ran inside the call");
}

TestSuite(shared_remove, .init = rig_setup, .fini = shared_teardown, .timeout = 60);

/* How it ended, within `ms` of the event loop. */
static int outcome(struct job *j, uint64_t ms)
{
    cr_assert(rig_run(&j->done, ms));
    return j->status;
}

static void put(uint32_t root, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++)
        rig_put(&rig.servers[root], i);
}

static uint32_t left(uint32_t root)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < RIG_FILES; i++)
        n += rig.servers[root].files[i].there;
    return n;
}

static unsigned asked(uint32_t root)
{
    return rig.servers[root].asked[SHARED_REMOVE];
}

/* The first is known nowhere and lies on root 0, the second is known on root 1, the third is nowhere. */
Test(shared_remove, all_parts_are_asked_for_where_the_highest_was)
{
    open_with(settings_of(2));
    put(0, 0, 1);
    put(1, 1, 1);
    job_init(&one, 1, 0, 3, PARTS);
    one.whole[1] = 2;
    shared_removal_begin(shared, &one.r);
    cr_expect_eq(outcome(&one, 1000), 0);
    cr_expect_eq(asked(0), PARTS + 1 + 1);
    cr_expect_eq(asked(1), 1 + PARTS + 1);
    cr_expect_eq(left(0) + left(1), 0u);
}

Test(shared_remove, few_of_many_wait_at_the_root)
{
    open_with(settings_of(1));
    put(0, 0, KEYS);
    begin(&one, 1, 0, KEYS, 1);
    cr_expect_eq(asked(0) + shared->roots[0]->queued[SHARED_BACKGROUND], 64u);
    cr_assert(rig_run(&one.done, 60000));
    cr_expect(one.calls == 1 && one.status == 0);
    cr_expect_eq(left(0), 0u);
}

Test(shared_remove, a_tenant_does_not_wait_for_what_another_one_has_queued)
{
    open_with(settings_of(1));
    put(0, 0, KEYS + 8);
    rig.servers[0].latency_ms = 1;
    begin(&one, 1, 0, KEYS, 1);
    rig_run(NULL, 20);
    begin(&two, 2, KEYS, 8, 1);
    cr_assert(rig_run(&two.done, 60000));
    cr_expect_not(one.done);
    cr_expect_gt(left(0), KEYS / 2);
    cr_assert(rig_run(&one.done, 60000));
    cr_expect(one.status == 0 && two.status == 0);
    cr_expect_eq(left(0), 0u);
}

Test(shared_remove, jobs_of_one_tenant_take_turns)
{
    open_with(settings_of(1));
    put(0, 0, KEYS + 8);
    rig.servers[0].latency_ms = 1;
    begin(&one, 1, 0, KEYS, 1);
    begin(&two, 1, KEYS, 8, 1);
    cr_assert(rig_run(&two.done, 60000));
    cr_expect_gt(left(0), KEYS / 2);
}

Test(shared_remove, a_full_queue_is_waited_for)
{
    struct block_file_id id = rig_id(1);

    open_with(settings_of(1));
    put(0, 0, 10);
    rig.servers[0].hangs = true;
    while (shared_submit_background(shared, 0, SHARED_TOUCH, &id, 0) == 0)
        ;
    begin(&one, 1, 0, 10, 1);
    rig_run(NULL, 20);
    cr_expect_eq(asked(0), 0u);
    rig_let_go(&rig.servers[0]);
    cr_expect_eq(outcome(&one, 1000), 0);
    cr_expect_eq(left(0), 0u);
}

Test(shared_remove, a_root_that_hangs_is_told_of_and_the_others_are_done)
{
    open_with(settings_of(2));
    put(0, 0, 500);
    put(1, 0, 500);
    rig.servers[0].hangs = true;
    begin(&one, 1, 0, 500, 1);
    cr_expect_eq(outcome(&one, 10000), -ETIMEDOUT);
    cr_expect_eq(left(1), 0u);
}

Test(shared_remove, cancelled_while_a_root_hangs_it_is_the_callers_again)
{
    struct block_file_id id = rig_id(50); /* it waits */

    open_with(settings_of(1));
    put(0, 0, 500);
    rig.servers[0].hangs = true;
    begin(&one, 1, 0, 500, 1);
    begin(&two, 2, 500, 1, 1);
    id.part = 0;
    cr_expect_eq(shared_recall(shared, &id, 0), SHARED_KNOWN_MISSING);
    rig_run(NULL, 20);
    shared_removal_cancel(shared, &one.r);
    cr_expect_eq(shared_recall(shared, &id, 0), SHARED_KNOWN_NOT, "that it is gone");
    memset(&one, 0xee, sizeof(one));
    rig_let_go(&rig.servers[0]);
    cr_assert(rig_run(&two.done, 1000));
    cr_expect_gt(left(0), 400u, "what had not begun did not");
    shared_removal_cancel(shared, &two.r);
}

Test(shared_remove, a_root_that_fails_is_told_of_and_asked_no_more)
{
    open_with(settings_of(2));
    put(1, 0, KEYS);
    rig.servers[0].fails[SHARED_REMOVE] = rig.servers[0].fails[SHARED_CHECK] = -EIO;
    begin(&one, 1, 0, KEYS, PARTS);
    cr_expect_eq(outcome(&one, 60000), -EIO);
    cr_expect_lt(asked(0), 64u);
    cr_expect_eq(left(1), 0u);
    begin(&two, 1, 0, 1, 1);
    cr_expect_eq(outcome(&two, 1000), -EHOSTDOWN);
}

Test(shared_remove, a_root_that_is_read_only_is_left_alone)
{
    struct shared_settings s = settings_of(2);

    s.roots[0].read_only = true;
    open_with(s);
    put(0, 0, 3);
    put(1, 0, 3);
    begin(&one, 1, 0, 3, 1);
    cr_expect_eq(outcome(&one, 1000), 0);
    cr_expect(left(0) == 3 && left(1) == 0);
}

Test(shared_remove, a_stop_ends_it)
{
    open_with(settings_of(1));
    put(0, 0, 500);
    begin(&one, 1, 0, 500, 1);
    shared_stop(shared);
    begin(&two, 1, 0, 500, 1);
    cr_expect_eq(outcome(&one, 1000), -ECANCELED);
    cr_expect_eq(outcome(&two, 1000), -ECANCELED);
}

/* After the removal, the tier has forgotten what a lookup found before. */
Test(shared_remove, what_was_found_before_is_not_known_afterwards)
{
    struct block_file_id id = rig_id(1);

    open_with(settings_of(1));
    shared_remember_found(shared, &id, 0, shared->removed);
    cr_expect_eq(shared_recall(shared, &id, 0), SHARED_KNOWN_FOUND);
    put(0, 1, 1);
    begin(&one, 1, 1, 1, 2);
    cr_expect_eq(shared_recall(shared, &id, 0), SHARED_KNOWN_MISSING);
    cr_assert(rig_run(&one.done, 1000));
    rig_run(NULL, 3000);
    cr_expect_eq(shared_recall(shared, &id, 0), SHARED_KNOWN_NOT);
    shared_remember_found(shared, &id, 0, 0);
    cr_expect_eq(shared_recall(shared, &id, 0), SHARED_KNOWN_NOT);
}

/* ---- names ---- */

static void open_with_secrets(const char *directory)
{
    struct shared_settings s = settings_of(1);

    rig_clock_ns = 0; /* a thread reads the directory */
    uv_update_time(&rig.loop);
    s.encryption = (struct encryption *)&rig;
    s.secrets = directory;
    s.secrets_ms = 10000;
    open_with(s);
    put(0, 0, 3);
    job_init(&one, 1, 0, 3, 1);
    one.r.encrypted = true;
    shared_removal_begin(shared, &one.r);
    cr_expect_eq(asked(0), 0u, "the secret is being read");
}

Test(shared_remove, a_name_that_is_not_known_yet_is_waited_for)
{
    char directory[] = "/tmp/secrets.XXXXXX";

    cr_assert(mkdtemp(directory));
    open_with_secrets(directory);
    cr_expect_eq(outcome(&one, 20000), 0);
    cr_expect_neq(memcmp(one.r.name, one.r.fingerprint, sizeof(one.r.name)), 0);
    cr_expect_eq(left(0), 0u);
    while (wipe(directory) != 0) /* the thread may still be removing its temporary file there */
        ;
}

Test(shared_remove, a_name_that_can_not_be_known_is_told_of)
{
    open_with_secrets("/nonexistent/secrets");
    cr_expect_eq(outcome(&one, 20000), -ENOKEY);
    cr_expect_eq(left(0), 3u);
}
