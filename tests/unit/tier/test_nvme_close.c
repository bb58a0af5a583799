/* The end of a tier: operations under way end by themselves, and ask the caller nothing more. */
/* Sanitizers: thread */
#include "tests/unit/tier/nvme_rig.h"

TestSuite(nvme_close, .fini = rig_close);

static uv_work_t blockers[128];

static void sleep_cb(uv_work_t *work)
{
    (void)work;
    usleep(300000);
}

static void slept_cb(uv_work_t *work, int status)
{
    (void)work;
    (void)status;
}

/* The pool can do nothing else for a while. */
static void pool_block(void)
{
    const char *threads = getenv("UV_THREADPOOL_SIZE");
    int n = threads ? atoi(threads) : 4;

    cr_assert_leq((size_t)n, sizeof(blockers) / sizeof(blockers[0]));
    for (int i = 0; i < n; i++)
        cr_assert_eq(uv_queue_work(&rig.loop, &blockers[i], sleep_cb, slept_cb), 0);
}

Test(nvme_close, the_scrub_asks_nobody_any_more)
{
    struct tier_ns_record naming;

    rig_init(1, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig.config.nvme_scrub = 1024 * MIB;
    rig.config.nvme_scrub_interval_ms = 100;
    rig_open();
    rig_memory(30, 100000);
    cr_assert_eq(rig_write(0, 30, 100000), 30);
    pool_block();
    rig_name(&naming, false); /* holds the tier for as long */
    tier_nvme.close(rig.tier);
    rig.tier = NULL;
    /* the caller is gone: describe fails the test where it is asked of these */
    for (unsigned i = 0; i < 30; i++)
        rig.parts[i].stored = false;
    cr_assert_eq(uv_run(&rig.loop, UV_RUN_DEFAULT), 0);
    cr_expect_null(naming.identity);
}
