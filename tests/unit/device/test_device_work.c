#include "daemon/device/work.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define ITEMS 40
#define PLANES 24

/* However a job is cut, every fragment is copied once. No piece is larger than asked, unless it is
 * a single fragment. */
Test(device_work, pieces_cover_each_fragment_once)
{
    struct ucm_copy_plane planes[PLANES] = {0};
    struct device_region r = {.n_planes = PLANES, .planes = planes, .blocks = 1};

    srand(2);
    for (unsigned round = 0; round < 2000; round++) {
        uint8_t seen[ITEMS][PLANES] = {{0}};
        struct device_job job = {.op = DEVICE_LOAD, .region = &r};
        uint64_t max_cost = 1 + (uint64_t)(rand() % 20000), offset = 0;
        uint32_t max_items = 1 + (uint32_t)(rand() % 10);
        struct job_piece piece;
        bool last = false;

        for (uint32_t p = 0; p < PLANES; p++) {
            planes[p].slot_offset = offset;
            planes[p].block_bytes = 1 + (uint32_t)(rand() % 1000);
            offset += planes[p].block_bytes;
        }
        job.n_items = 1 + (uint32_t)(rand() % ITEMS);
        job.first_plane = (uint32_t)(rand() % PLANES);
        job.n_planes = 1 + (uint32_t)(rand() % (int)(PLANES - job.first_plane));
        while (!last) {
            uint64_t bytes = 0, cost = 0;

            last = job_next_piece(&job, max_cost, max_items, &piece);
            cr_assert_leq(piece.n_items, max_items);
            for (uint32_t i = piece.first_item; i < piece.first_item + piece.n_items; i++)
                for (uint32_t p = piece.first_plane; p < piece.first_plane + piece.n_planes; p++) {
                    cr_assert_lt(i, job.n_items);
                    cr_assert(p >= job.first_plane && p < job.first_plane + job.n_planes);
                    seen[i][p]++;
                    bytes += planes[p].block_bytes;
                    cost += planes[p].block_bytes > 512 ? planes[p].block_bytes : 512;
                }
            cr_assert_eq(bytes, piece.bytes);
            cr_assert(piece.cost <= max_cost || (piece.n_items == 1 && piece.n_planes == 1));
            cr_assert(piece.cost <= cost && piece.cost >= bytes && 2 * piece.cost >= cost,
                      "as long as a fragment takes");
        }
        for (uint32_t i = 0; i < job.n_items; i++)
            for (uint32_t p = 0; p < PLANES; p++)
                cr_assert_eq(seen[i][p],
                             p >= job.first_plane && p < job.first_plane + job.n_planes);
    }
}

static struct job_queue q;

static struct device_job *pop(struct device_job *job)
{
    list_remove(&job->link);
    return job;
}

Test(device_work, queue_orders_by_priority_direction_and_age)
{
    struct device_job jobs[] = {
        {.op = DEVICE_DUMP, .priority = 0}, {.op = DEVICE_LOAD, .priority = 0},
        {.op = DEVICE_DUMP, .priority = 7}, {.op = DEVICE_LOAD, .priority = 7},
        {.op = DEVICE_LOAD, .priority = 0}, {.op = DEVICE_CLOSE}};
    static const unsigned joint[] = {3, 2, 1, 4, 0}, loads[] = {3, 1, 4}, dumps[] = {2, 0};

    job_queue_init(&q, true, 0);
    for (unsigned i = 0; i < 6; i++)
        job_queue_push(&q, &jobs[i]);
    for (unsigned i = 0; i < 5; i++)
        cr_assert_eq(pop(job_queue_first(&q, DEVICE_LOAD)), &jobs[joint[i]], "place %u", i);
    cr_assert_null(job_queue_first(&q, DEVICE_LOAD));
    cr_assert_eq(job_queue_pop_control(&q, NULL, NULL), &jobs[5]);
    cr_assert_null(job_queue_pop_control(&q, NULL, NULL));

    job_queue_init(&q, false, 0);
    for (unsigned i = 0; i < 5; i++)
        job_queue_push(&q, &jobs[i]);
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(pop(job_queue_first(&q, DEVICE_LOAD)), &jobs[loads[i]], "load %u", i);
    for (unsigned i = 0; i < 2; i++)
        cr_assert_eq(pop(job_queue_first(&q, DEVICE_DUMP)), &jobs[dumps[i]], "dump %u", i);
}

static bool of_tenant_cb(void *ctx, struct list *link)
{
    return LIST_ENTRY(link, struct device_job, link)->who.tenant == *(uint32_t *)ctx;
}

/* One tenant closes regions, and another opens one. */
Test(device_work, tenants_take_turns_with_their_regions)
{
    struct device_job closes[3], open = {.op = DEVICE_OPEN, .who = {2, 100}};
    uint32_t skipped = 1;

    job_queue_init(&q, true, 0);
    for (unsigned i = 0; i < 3; i++) {
        closes[i] = (struct device_job){.op = DEVICE_CLOSE, .who = {1, 100}};
        job_queue_push(&q, &closes[i]);
    }
    cr_assert_eq(job_queue_pop_control(&q, NULL, NULL), &closes[0]);
    cr_assert_null(job_queue_pop_control(&q, of_tenant_cb, &skipped));
    job_queue_push(&q, &open);
    cr_assert_eq(job_queue_pop_control(&q, NULL, NULL), &open);
    for (unsigned i = 1; i < 3; i++)
        cr_assert_eq(job_queue_pop_control(&q, NULL, NULL), &closes[i]);
    cr_assert_not(job_queue_waits(&q));
}

/* Jobs of 32 MiB of one tenant, and a small one of another. The small one goes before all that have
 * not begun. */
Test(device_work, a_tenant_waits_for_what_is_under_way_only)
{
    struct device_job flood[8], small = {.op = DEVICE_LOAD, .who = {2, 100}};

    job_queue_init(&q, false, 16 << 20);
    for (unsigned i = 0; i < 8; i++) {
        flood[i] = (struct device_job){.op = DEVICE_LOAD, .who = {1, 100}, .priority = 7};
        job_queue_push(&q, &flood[i]);
    }
    for (unsigned i = 0; i < 40; i++)
        fair_queue_charge(&q.copies[0], &flood[0].who, 2 << 20, NULL);
    job_queue_push(&q, &small);
    cr_assert_eq(job_queue_first(&q, DEVICE_LOAD), &small, "whatever their priorities are");
    cr_assert_eq(job_queue_next(&small), &flood[0]);
    (void)pop(&small);
    fair_queue_charge(small.queue, &small.who, 1 << 20, NULL);
    for (unsigned i = 0; i < 8; i++)
        cr_assert_eq(pop(job_queue_first(&q, DEVICE_LOAD)), &flood[i]);
}

Test(device_work, only_what_does_not_move_expires)
{
    struct device_job jobs[] = {
        {.op = DEVICE_LOAD, .deadline_ms = 100},
        {.op = DEVICE_LOAD, .deadline_ms = 101},
        {.op = DEVICE_DUMP, .deadline_ms = 0},
        {.op = DEVICE_DUMP, .deadline_ms = 50, .begun = true, .next_item = 1},
        {.op = DEVICE_DUMP, .deadline_ms = 50},
        {.op = DEVICE_DUMP, .deadline_ms = 50, .begun = true}};
    struct list expired;

    job_queue_init(&q, true, 0);
    list_init(&expired);
    for (unsigned i = 0; i < 6; i++)
        job_queue_push(&q, &jobs[i]);
    job_queue_expire(&q, 100, &expired);
    cr_assert_eq(list_pop_front(&expired), &jobs[0].link);
    cr_assert_eq(list_pop_front(&expired), &jobs[4].link);
    cr_assert_eq(list_pop_front(&expired), &jobs[5].link,
                 "its time was looked at, and nothing of it moved");
    cr_assert_null(list_pop_front(&expired));
    cr_assert_eq(pop(job_queue_first(&q, DEVICE_LOAD)), &jobs[1]);
    cr_assert_eq(pop(job_queue_first(&q, DEVICE_LOAD)), &jobs[2]);
    cr_assert_eq(pop(job_queue_first(&q, DEVICE_LOAD)), &jobs[3]);
}

static struct work *w;
static unsigned delivered;

static void job_done_cb(struct device_job *job, int status)
{
    (void)job;
    delivered += status == 0;
}

static void run_until_asleep(uv_loop_t *loop)
{
    do
        (void)uv_run(loop, UV_RUN_NOWAIT);
    while (uv_is_active((uv_handle_t *)&w->awake));
}

/* If a job announces its end, the event loop stays awake, but not for long if the job does not end.
 * The announcement of an ended job has no effect. */
Test(device_work, the_loop_is_awake_when_a_job_ends_but_not_for_good, .timeout = 20)
{
    struct device_region region = {.n_planes = 0};
    struct device_job job = {.op = DEVICE_OPEN, .region = &region, .done_cb = job_done_cb};
    uv_loop_t loop;

    cr_assert_eq(uv_loop_init(&loop), 0);
    w = calloc(1, sizeof(*w));
    cr_assert(w);
    cr_assert_eq(work_init(w, &loop, NULL), 0);
    work_soon(w);
    (void)uv_run(&loop, UV_RUN_ONCE);
    cr_assert(uv_is_active((uv_handle_t *)&w->awake));
    run_until_asleep(&loop);
    cr_assert_eq(work_submit(&w->device, &job), 0);
    cr_assert_eq(list_pop_front(&w->inbox), &job.link);
    work_soon(w);
    (void)uv_run(&loop, UV_RUN_ONCE);
    work_finish(w, &job, 0);
    run_until_asleep(&loop);
    cr_assert_eq(delivered, 1);
    cr_assert_eq(work_submit(&w->device, &job), 0);
    cr_assert_eq(list_pop_front(&w->inbox), &job.link);
    work_finish(w, &job, 0);
    work_soon(w);
    (void)uv_run(&loop, UV_RUN_ONCE);
    cr_assert_eq(delivered, 2);
    cr_assert(!uv_is_active((uv_handle_t *)&w->awake), "what was to come has come");
    work_soon(w);
    (void)uv_run(&loop, UV_RUN_ONCE);
    work_close(w); /* while it is kept awake */
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert_eq(uv_loop_close(&loop), 0);
}
