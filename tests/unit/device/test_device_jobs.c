/* Sanitizers: thread */
#include "tests/unit/device/device_rig.h"

#include <sys/socket.h>

TestSuite(device_jobs, .init = setup, .fini = teardown, .timeout = 60);

/* ---- many jobs ---- */

#define MANY 2000

Test(device_jobs, many_jobs_keep_their_bytes_apart)
{
    static struct test_job jobs[MANY];
    static struct ucm_copy_item items[MANY];
    struct msg_plane plane = {.stride = 2000, .block_bytes = 1999};
    struct device_region *r = region_of(&plane, 1, MANY, 1, 1999, memfd, 0, MEMORY);

    open_ok(r);
    bytes_random(memory, MEMORY, 8);
    memcpy(want_memory, memory, MEMORY);
    for (uint32_t i = 0; i < MANY; i++) {
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots + i * 4096,
                                          .block = MANY - 1 - i};
        job_init(&jobs[i], DEVICE_DUMP, r, &items[i], 1);
        jobs[i].job.priority = i % 8;
        job_submit(&jobs[i]);
    }
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert_eq(job_wait(&jobs[i]), 0);
    memset(memory, 0, MEMORY);
    for (uint32_t i = 0; i < MANY; i++) {
        job_init(&jobs[i], DEVICE_LOAD, r, &items[i], 1);
        job_submit(&jobs[i]);
    }
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert_eq(job_wait(&jobs[i]), 0);
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert_eq(memcmp(memory + i * 2000, want_memory + i * 2000, 1999), 0, "block %u", i);
    close_ok(r);
}

Test(device_jobs, queue_is_bounded)
{
    static struct test_job jobs[DEVICE_QUEUE_MAX + 1];
    static struct ucm_copy_item items[DEVICE_QUEUE_MAX + 1];
    struct msg_plane plane = {.stride = 512, .block_bytes = 512};
    struct device_region *r = region_of(&plane, 1, DEVICE_QUEUE_MAX + 1, 1, 512, memfd, 0, MEMORY);
    struct test_job last;

    for (uint32_t i = 0; i <= DEVICE_QUEUE_MAX; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots + i * 512, .block = i};
    open_ok(r);
    /* Done jobs count until the event loop has seen them, so the queue fills while the loop does
     * not run. */
    for (uint32_t i = 0; i < DEVICE_QUEUE_MAX; i++) {
        job_init(&jobs[i], DEVICE_LOAD, r, &items[i], 1);
        job_submit(&jobs[i]);
    }
    job_init(&jobs[DEVICE_QUEUE_MAX], DEVICE_LOAD, r, &items[DEVICE_QUEUE_MAX], 1);
    cr_assert_eq(cpu->ops->submit(cpu, &jobs[DEVICE_QUEUE_MAX].job), -EAGAIN);
    job_init(&last, DEVICE_CLOSE, r, NULL, 0);
    job_submit(&last); /* never refused */
    cr_assert_eq(job_wait(&last), 0);
    for (uint32_t i = 0; i < DEVICE_QUEUE_MAX; i++)
        cr_assert(jobs[i].done && jobs[i].status == 0 && jobs[i].order < last.order);
    cr_assert_not(jobs[DEVICE_QUEUE_MAX].done);
    region_free(r);
}

Test(device_jobs, close_waits_for_the_regions_jobs)
{
    static struct test_job jobs[64];
    static struct ucm_copy_item items[64];
    struct device_region *r = region_flat(memfd, 0, MEMORY), *other = region_flat(memfd, 0, MEMORY);
    struct test_job last;

    open_ok(r);
    open_ok(other);
    bytes_random(memory, MEMORY, 9);
    for (uint32_t i = 0; i < 64; i++)
        items[i] =
            (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots + i * 65536, .block = i};
    for (uint32_t i = 0; i < 64; i++) {
        job_init(&jobs[i], DEVICE_DUMP, r, &items[i], 1);
        job_submit(&jobs[i]);
    }
    job_init(&last, DEVICE_CLOSE, r, NULL, 0);
    job_submit(&last);
    cr_assert_eq(job_wait(&last), 0);
    for (uint32_t i = 0; i < 64; i++)
        cr_assert(jobs[i].done && jobs[i].status == 0 && jobs[i].order < last.order);
    cr_assert_eq(memcmp(slots, memory, MEMORY), 0);
    region_free(r);
    job_ends(DEVICE_LOAD, other, items, 64, 0); /* the other region lives on */
    close_ok(other);
}

/* Its memory may be in use for something else. */
Test(device_jobs, a_worker_that_hung_up_is_left_alone)
{
    struct msg_plane plane = {.stride = 64 << 10, .block_bytes = 64 << 10};
    struct ucm_copy_item items[32];
    struct device_region *r = region_of(&plane, 1, 64, 1, 64 << 10, memfd, 0, MEMORY);
    int connection[2];

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, connection), 0);
    r->peer_fd = &connection[0];
    for (uint32_t i = 0; i < 32; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots + i * (64u << 10),
                                          .block = i};
    open_ok(r);
    memset(slots, 1, SLOTS);
    job_ends(DEVICE_LOAD, r, items, 32, 0);
    close(connection[1]);
    memset(slots, 2, SLOTS);
    job_ends(DEVICE_LOAD, r, items, 32, -ECANCELED);
    cr_expect_eq(memory[0], 1);
    job_ends(DEVICE_DUMP, r, items, 32, -ECANCELED);
    close_ok(r);
    close(connection[0]);
}

Test(device_jobs, stats_count_what_was_done)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct ucm_copy_item items[3] = {{.slot = (uint64_t)(uintptr_t)slots, .block = 0},
                                     {.slot = (uint64_t)(uintptr_t)slots, .block = 1},
                                     {.slot = (uint64_t)(uintptr_t)slots, .block = 999}};
    struct device_stats stats;
    struct test_job j;

    open_ok(r);
    job_ends(DEVICE_LOAD, r, items, 2, 0);
    job_ends(DEVICE_DUMP, r, items, 1, 0);
    job_init(&j, DEVICE_DUMP, r, items, 3);
    cr_assert_neq(job_run(&j), 0);
    cpu->ops->stats(cpu, &stats);
    cr_assert_str_eq(stats.name, "cpu");
    cr_assert_eq(stats.jobs, 3);
    cr_assert_eq(stats.load_bytes, 2 * 65536);
    cr_assert_eq(stats.dump_bytes, 65536);
    cr_assert_eq(stats.regions, 1);
    cr_assert_not(stats.failed || stats.cuda);
    close_ok(r);
    cpu->ops->stats(cpu, &stats);
    cr_assert_eq(stats.regions, 0);
}

Test(device_jobs, an_open_region_needs_no_descriptor)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct ucm_copy_item item = {.slot = (uint64_t)(uintptr_t)slots};

    open_ok(r);
    cr_assert_eq(close(r->handles[0].fd), 0);
    r->handles[0].fd = -1;
    job_ends(DEVICE_DUMP, r, &item, 1, 0);
    close_ok(r);
}

/* ---- the set ---- */

Test(device_jobs, devices_by_name)
{
    struct ucm_error e = {0};
    uint8_t uuid[16] = {1};

    cr_assert_eq(
        device_set_find(set, (struct proto_str){"cpu", 3}, (struct proto_bin){NULL, 0}, &e), cpu);
    cr_assert_null(
        device_set_find(set, (struct proto_str){"cuda", 4}, (struct proto_bin){uuid, 16}, &e));
    cr_assert_eq(e.code, UCM_WIRE_DEVICE);
    cr_assert(strstr(e.text, "device.cuda"), "%s", e.text);
    cr_assert_null(
        device_set_find(set, (struct proto_str){"npu", 3}, (struct proto_bin){NULL, 0}, &e));
    cr_assert_eq(e.code, UCM_WIRE_UNSUPPORTED);
    cr_assert_eq(device_set_count(set), 1);
    cr_assert_eq(device_set_memory_add(set, slots, SLOTS), 0);
}

static unsigned found_n;
static void found_cb(void *ctx, uint32_t gpus, const char *note)
{
    (void)gpus;
    (void)note;
    found_n++;
    uv_stop(ctx);
}

/* On a host without a GPU there is none and a reason; on one with a GPU it is found. Either way the
 * call returns at once. */
Test(device_jobs, gpus_where_there_are_any)
{
    struct device_config config = {
        .cpu_threads = 1, .cuda = CONFIG_CUDA_AUTO, .found_cb = found_cb, .ctx = &loop};
    uint8_t uuid[16] = {1};
    struct device_set *s;
    struct ucm_error e = {0};
    char note[200];

    cr_assert_eq(device_set_new(&loop, &config, &s, note, &e), 0);
    cr_assert_neq(note[0], '\0');
    cr_assert_null(
        device_set_find(s, (struct proto_str){"cuda", 4}, (struct proto_bin){uuid, 16}, &e));
    if (e.code == UCM_WIRE_BUSY) {
        uv_run(&loop, UV_RUN_DEFAULT);
        cr_assert_eq(found_n, 1);
    } else {
        cr_assert_eq(e.code, UCM_WIRE_DEVICE);
    }
    if (device_set_count(s) == 1) {
        config.cuda = CONFIG_CUDA_REQUIRED;
        cr_assert_eq(device_set_new(&loop, &config, &set, note, &e), -UCM_WIRE_DEVICE);
        cr_assert(strstr(e.text, "required"), "%s", e.text);
    }
    device_set_free(s);
}

Test(device_jobs, freed_while_gpus_are_sought)
{
    struct device_config config = {.cpu_threads = 1, .cuda = CONFIG_CUDA_AUTO};
    struct device_set *s;
    struct ucm_error e = {0};
    char note[200];

    cr_assert_eq(device_set_new(&loop, &config, &s, note, &e), 0);
    device_set_free(s);
    device_set_free(NULL);
}
