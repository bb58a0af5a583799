#include "daemon/base/config.h"
#include "daemon/device/device.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>

#define MEMORY (4u << 20)
#define SLOTS (8u << 20)

static uv_loop_t loop;
static struct device_set *set;
static struct device *cpu;
static uint8_t *memory; /* the worker's own mapping of its memfd */
static uint8_t *slots, *want_memory, *want_slots;
static int memfd;

/* ---- a worker's memory ---- */

static int memfd_make(uint64_t bytes, unsigned flags, int seals)
{
    int fd = memfd_create("kv", MFD_CLOEXEC | flags);

    cr_assert_geq(fd, 0);
    cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
    if (seals)
        cr_assert_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void setup(void)
{
    struct device_config config = {.cpu_threads = 3, .cuda = CONFIG_CUDA_OFF};
    struct ucm_error e;
    char note[200];

    uv_loop_init(&loop);
    cr_assert_eq(device_set_new(&loop, &config, &set, note, &e), 0);
    cr_assert_str_eq(note, "");
    cpu = device_set_at(set, 0);
    memfd = memfd_make(MEMORY, MFD_ALLOW_SEALING, F_SEAL_SHRINK);
    memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    slots = malloc(SLOTS);
    want_memory = malloc(MEMORY);
    want_slots = malloc(SLOTS);
    cr_assert(memory != MAP_FAILED && slots && want_memory && want_slots);
}

static void teardown(void)
{
    device_set_free(set);
    cr_assert_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    cr_assert_eq(uv_loop_close(&loop), 0);
    munmap(memory, MEMORY);
    close(memfd);
    free(slots);
    free(want_memory);
    free(want_slots);
}

/* ---- jobs ---- */

struct test_job {
    struct device_job job;
    bool done;
    int status;
    unsigned order; /* when it was done, among all jobs */
};

static unsigned n_done;

static void done_cb(struct device_job *job, int status)
{
    struct test_job *j = LIST_ENTRY(job, struct test_job, job);

    cr_assert_not(j->done, "done runs once");
    j->done = true;
    j->status = status;
    j->order = n_done++;
}

static void job_init(struct test_job *j, enum device_op op, struct device_region *r,
                     const struct ucm_copy_item *items, uint32_t n)
{
    *j = (struct test_job){.job = {.op = op,
                                   .region = r,
                                   .items = items,
                                   .n_items = n,
                                   .n_planes = r->n_planes,
                                   .done = done_cb}};
}

static void job_submit(struct test_job *j)
{
    cr_assert_eq(cpu->ops->submit(cpu, &j->job), 0);
}

static int job_wait(struct test_job *j)
{
    while (!j->done)
        uv_run(&loop, UV_RUN_ONCE);
    return j->status;
}

static int job_run(struct test_job *j)
{
    job_submit(j);
    return job_wait(j);
}

static struct device_region *region_of(const struct msg_plane *planes, uint32_t n, uint32_t blocks,
                                       uint32_t shards, uint64_t shard_bytes, int fd,
                                       uint64_t offset, uint64_t bytes)
{
    struct msg_handle handle = {.kind = UCM_HANDLE_MEMFD, .offset = offset, .bytes = bytes};
    struct msg_region_register m = {.ns = 1,
                                    .blocks = blocks,
                                    .device = {"cpu", 3},
                                    .handles = {&handle, 1},
                                    .planes = {planes, n}};
    struct device_region *r = NULL;
    struct ucm_error e = {0};
    int fds[1] = {dup(fd)};

    cr_assert_eq(region_check(&m, shards, shard_bytes, fds, 1, &r, &e), 0, "%s", e.text);
    r->device = cpu;
    r->pid = getpid();
    return r;
}

/* One plane of 64 blocks of 64 KiB. */
static struct device_region *region_flat(int fd, uint64_t offset, uint64_t bytes)
{
    struct msg_plane plane = {.stride = 65536, .chunk = 65536};

    return region_of(&plane, 1, (uint32_t)(bytes / 65536), 1, 65536, fd, offset, bytes);
}

static void open_ok(struct device_region *r)
{
    struct test_job j;

    job_init(&j, DEVICE_OPEN, r, NULL, 0);
    cr_assert_eq(job_run(&j), 0, "%s", j.job.error.text);
}

static void open_refused(struct device_region *r, const char *word)
{
    struct test_job j;

    job_init(&j, DEVICE_OPEN, r, NULL, 0);
    cr_assert_eq(job_run(&j), -EINVAL);
    cr_assert(strstr(j.job.error.text, word), "\"%s\" does not say \"%s\"", j.job.error.text, word);
    region_free(r);
}

static void close_ok(struct device_region *r)
{
    struct test_job j;

    job_init(&j, DEVICE_CLOSE, r, NULL, 0);
    cr_assert_eq(job_run(&j), 0);
    region_free(r);
}

/* ---- layouts ---- */

static void fill(uint8_t *p, size_t n, unsigned seed)
{
    uint64_t x = seed * 0x9E3779B97F4A7C15ull + 1;

    for (size_t i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        p[i] = (uint8_t)x;
    }
}

/* What the slots and the memory should be, byte by byte, from the layout's definition alone. */
static void expect(const struct msg_plane *planes, uint32_t first, uint32_t n_planes,
                   const struct ucm_copy_item *items, uint32_t n, bool load)
{
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *slot = want_slots + (items[i].slot - (uint64_t)(uintptr_t)slots);

        for (uint32_t p = 0; p < first + n_planes; slot += planes[p++].chunk) {
            uint8_t *chunk = want_memory + planes[p].offset + items[i].block * planes[p].stride;

            if (p >= first && load)
                memcpy(chunk, slot, planes[p].chunk);
            else if (p >= first)
                memcpy(slot, chunk, planes[p].chunk);
        }
    }
}

static void copy_check(struct device_region *r, const struct msg_plane *planes, uint32_t first,
                       uint32_t n_planes, const struct ucm_copy_item *items, uint32_t n,
                       enum device_op op)
{
    struct test_job j;

    fill(memory, MEMORY, 1);
    fill(slots, SLOTS, 2);
    memcpy(want_memory, memory, MEMORY);
    memcpy(want_slots, slots, SLOTS);
    expect(planes, first, n_planes, items, n, op == DEVICE_LOAD);
    job_init(&j, op, r, items, n);
    j.job.first_plane = first;
    j.job.n_planes = n_planes;
    cr_assert_eq(job_run(&j), 0, "%s", j.job.error.text);
    cr_assert_eq(memcmp(memory, want_memory, MEMORY), 0);
    cr_assert_eq(memcmp(slots, want_slots, SLOTS), 0);
}

static void layout_check(const struct msg_plane *planes, uint32_t n_planes, uint32_t blocks,
                         uint32_t shards, uint64_t shard_bytes)
{
    struct device_region *r =
        region_of(planes, n_planes, blocks, shards, shard_bytes, memfd, 0, MEMORY);
    struct ucm_copy_item items[64];

    cr_assert_leq(blocks, 64);
    open_ok(r);
    for (uint32_t i = 0; i < blocks; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots +
                                                  i * (shards * shard_bytes + 64),
                                          .block = (i * 11 + 3) % blocks};
    for (int op = DEVICE_LOAD; op <= DEVICE_DUMP; op++) {
        copy_check(r, planes, 0, n_planes, items, blocks, op);
        copy_check(r, planes, n_planes / 2, n_planes - n_planes / 2, items, blocks / 2 + 1, op);
    }
    close_ok(r);
}

TestSuite(device_cpu, .init = setup, .fini = teardown, .timeout = 60);

Test(device_cpu, split_k_and_v)
{
    struct msg_plane planes[16];

    for (uint32_t i = 0; i < 16; i++)
        planes[i] = (struct msg_plane){
            .offset = i * 64 * 4096ull, .stride = 4096, .chunk = 4096, .shard = i / 2};
    layout_check(planes, 16, 64, 8, 8192);
}

Test(device_cpu, fused_k_and_v)
{
    struct msg_plane planes[8];

    for (uint32_t i = 0; i < 8; i++)
        planes[i] = (struct msg_plane){
            .offset = i * 61 * 8192ull, .stride = 8192, .chunk = 8192, .shard = i};
    layout_check(planes, 8, 61, 8, 8192);
}

Test(device_cpu, heads_first_with_heads_of_others_between)
{
    struct msg_plane planes[8];

    for (uint32_t i = 0; i < 8; i++)
        planes[i] = (struct msg_plane){.offset = i / 4 * (40 * 8 * 2048ull) + i % 4 * 2 * 2048,
                                       .stride = 8 * 2048,
                                       .chunk = 2048,
                                       .shard = i / 4};
    layout_check(planes, 8, 40, 2, 8192);
}

Test(device_cpu, one_latent_a_layer)
{
    struct msg_plane planes[4];

    for (uint32_t i = 0; i < 4; i++)
        planes[i] = (struct msg_plane){
            .offset = i * 13 * 73728ull, .stride = 73728, .chunk = 73728, .shard = i};
    layout_check(planes, 4, 13, 4, 73728);
}

Test(device_cpu, all_layers_of_a_block_together)
{
    struct msg_plane planes[32];

    for (uint32_t i = 0; i < 32; i++)
        planes[i] = (struct msg_plane){
            .offset = i * 4096ull, .stride = 32 * 4096, .chunk = 4096, .shard = i};
    layout_check(planes, 32, 32, 32, 4096);
}

Test(device_cpu, odd_sizes_and_places)
{
    static const uint32_t sizes[] = {1, 3, 17, 255, 4095, 4097, 20011};

    for (unsigned s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        struct msg_plane planes[3];

        for (uint32_t i = 0; i < 3; i++)
            planes[i] = (struct msg_plane){.offset = 1 + i * 64ull * (sizes[s] + 5) + i,
                                           .stride = sizes[s] + s,
                                           .chunk = sizes[s],
                                           .shard = i};
        layout_check(planes, 3, 63, 3, sizes[s]);
    }
}

Test(device_cpu, chunks_of_different_sizes)
{
    static const struct msg_plane planes[] = {
        {.offset = 0, .stride = 50000, .chunk = 50000, .shard = 0},
        {.offset = 2000000, .stride = 8, .chunk = 3, .shard = 0},
        {.offset = 2100000, .stride = 30000, .chunk = 20003, .shard = 1},
        {.offset = 2120003, .stride = 30000, .chunk = 1, .shard = 1},
        {.offset = 3300001, .stride = 29999, .chunk = 29999, .shard = 1},
    };

    layout_check(planes, 5, 28, 2, 50003);
}

/* One item is larger than what a thread takes at a time. */
Test(device_cpu, an_item_of_many_pieces)
{
    struct msg_plane planes[3] = {
        {.offset = 0, .stride = 1, .chunk = 1300000, .shard = 0},
        {.offset = 1300000, .stride = 1, .chunk = 900000, .shard = 0},
        {.offset = 2200000, .stride = 1, .chunk = 1800000, .shard = 0},
    };

    for (int i = 0; i < 3; i++)
        planes[i].stride = planes[i].chunk;
    layout_check(planes, 3, 1, 1, 4000000);
}

/* ---- what is refused ---- */

Test(device_cpu, memfd_must_be_sealed_against_shrinking)
{
    int plain = memfd_make(MEMORY, 0, 0);
    int open_seals = memfd_make(MEMORY, MFD_ALLOW_SEALING, 0);
    int wrong_seal = memfd_make(MEMORY, MFD_ALLOW_SEALING, F_SEAL_GROW);

    open_refused(region_flat(plain, 0, MEMORY), "F_SEAL_SHRINK");
    open_refused(region_flat(open_seals, 0, MEMORY), "F_SEAL_SHRINK");
    open_refused(region_flat(wrong_seal, 0, MEMORY), "F_SEAL_SHRINK");
    close(plain);
    close(open_seals);
    close(wrong_seal);
}

Test(device_cpu, file_is_no_memfd)
{
    char path[] = "/tmp/ucmd-test-XXXXXX";
    int fd = mkstemp(path), null = open("/dev/null", O_RDWR);

    cr_assert_eq(ftruncate(fd, MEMORY), 0);
    open_refused(region_flat(fd, 0, MEMORY), "not a memfd");
    open_refused(region_flat(null, 0, MEMORY), "not a memfd");
    unlink(path);
    close(fd);
    close(null);
}

Test(device_cpu, memfd_must_hold_what_is_said)
{
    int small = memfd_make(MEMORY - 1, MFD_ALLOW_SEALING, F_SEAL_SHRINK);
    int empty = memfd_make(0, MFD_ALLOW_SEALING, F_SEAL_SHRINK);

    open_refused(region_flat(small, 0, MEMORY), "pass the memfd's 4194303 bytes");
    open_refused(region_flat(empty, 0, MEMORY), "pass the memfd's 0 bytes");
    open_refused(region_flat(memfd, 65536, MEMORY), "pass the memfd's");
    close(small);
    close(empty);
}

Test(device_cpu, memfd_must_be_writable)
{
    int fd = memfd_make(MEMORY, MFD_ALLOW_SEALING, F_SEAL_SHRINK | F_SEAL_WRITE);

    open_refused(region_flat(fd, 0, MEMORY), "must be writable");
    close(fd);
}

/* A hole in a sealed memfd is filled on demand: no signal. */
Test(device_cpu, holes_are_zeroes)
{
    struct device_region *r = region_flat(memfd, 65536, MEMORY - 65536);
    struct ucm_copy_item item = {.slot = (uint64_t)(uintptr_t)slots, .block = 5};
    struct test_job j;

    open_ok(r);
    fill(memory, MEMORY, 5);
    cr_assert_eq(fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, MEMORY), 0);
    memory[65536 + 5 * 65536 + 9] = 77;
    job_init(&j, DEVICE_DUMP, r, &item, 1);
    cr_assert_eq(job_run(&j), 0);
    cr_assert_eq(slots[9], 77);
    cr_assert_eq(slots[8], 0);
    close_ok(r);
}

Test(device_cpu, bad_jobs_touch_nothing)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct ucm_copy_item items[2] = {{.slot = (uint64_t)(uintptr_t)slots, .block = 0},
                                     {.slot = (uint64_t)(uintptr_t)slots + 65536, .block = 64}};
    static const uint8_t event[64];
    struct test_job j;

    open_ok(r);
    fill(memory, MEMORY, 1);
    memset(slots, 0, SLOTS);
    memset(want_slots, 0, SLOTS);
    job_init(&j, DEVICE_DUMP, r, items, 2);
    cr_assert_eq(job_run(&j), -EINVAL);
    cr_assert(strstr(j.job.error.text, "block id 64"), "%s", j.job.error.text);
    job_init(&j, DEVICE_DUMP, r, items, 1);
    j.job.first_plane = 1;
    cr_assert_eq(job_run(&j), -EINVAL);
    j.job.first_plane = 0;
    j.job.n_planes = 2;
    j.done = false;
    cr_assert_eq(job_run(&j), -EINVAL);
    job_init(&j, DEVICE_DUMP, r, items, 1);
    j.job.event = event;
    j.job.deadline_ms = uv_now(&loop) + 1000;
    cr_assert_eq(job_run(&j), -EINVAL);
    cr_assert(strstr(j.job.error.text, "no events"), "%s", j.job.error.text);
    uv_update_time(&loop);
    job_init(&j, DEVICE_DUMP, r, items, 1);
    j.job.deadline_ms = uv_now(&loop) - 1;
    cr_assert_eq(job_run(&j), -ETIMEDOUT);
    cr_assert_eq(j.job.error.code, UCM_WIRE_DEADLINE);
    cr_assert_eq(memcmp(slots, want_slots, SLOTS), 0, "nothing was copied");
    close_ok(r);
}

/* ---- many jobs ---- */

#define MANY 2000

Test(device_cpu, many_jobs_keep_their_bytes_apart)
{
    static struct test_job jobs[MANY];
    static struct ucm_copy_item items[MANY];
    struct msg_plane plane = {.stride = 2000, .chunk = 1999};
    struct device_region *r = region_of(&plane, 1, MANY, 1, 1999, memfd, 0, MEMORY);

    open_ok(r);
    fill(memory, MEMORY, 8);
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

Test(device_cpu, queue_is_bounded)
{
    static struct test_job jobs[DEVICE_QUEUE_MAX + 1];
    static struct ucm_copy_item items[DEVICE_QUEUE_MAX + 1];
    struct msg_plane plane = {.stride = 512, .chunk = 512};
    struct device_region *r = region_of(&plane, 1, DEVICE_QUEUE_MAX + 1, 1, 512, memfd, 0, MEMORY);
    struct test_job last;

    for (uint32_t i = 0; i <= DEVICE_QUEUE_MAX; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots + i * 512, .block = i};
    open_ok(r);
    /* What is done counts until the loop has seen it, so the loop's absence fills the queue. */
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

Test(device_cpu, close_waits_for_the_regions_jobs)
{
    static struct test_job jobs[64];
    static struct ucm_copy_item items[64];
    struct device_region *r = region_flat(memfd, 0, MEMORY), *other = region_flat(memfd, 0, MEMORY);
    struct test_job last;

    open_ok(r);
    open_ok(other);
    fill(memory, MEMORY, 9);
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
    job_init(&jobs[0], DEVICE_LOAD, other, items, 64);
    cr_assert_eq(job_run(&jobs[0]), 0, "the other region lives on");
    close_ok(other);
}

/* With one thread, behind a long job: priorities decide, then loads go before dumps, then age. */
Test(device_cpu, urgent_first)
{
    static const struct {
        enum device_op op;
        uint8_t priority;
        unsigned place;
    } plan[] = {{DEVICE_DUMP, 0, 5}, {DEVICE_LOAD, 0, 4}, {DEVICE_DUMP, 7, 1},
                {DEVICE_LOAD, 3, 2}, {DEVICE_LOAD, 7, 0}, {DEVICE_LOAD, 3, 3}};
    struct device_config config = {.cpu_threads = 1, .cuda = CONFIG_CUDA_OFF};
    static struct ucm_copy_item items[4096];
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct test_job long_job, jobs[6];
    struct device_set *one;
    struct ucm_error e;
    char note[200];

    cr_assert_eq(device_set_new(&loop, &config, &one, note, &e), 0);
    cpu = device_set_at(one, 0);
    for (uint32_t i = 0; i < 4096; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots, .block = i % 64};
    open_ok(r);
    job_init(&long_job, DEVICE_LOAD, r, items, 4096);
    long_job.job.priority = 7;
    job_submit(&long_job);
    for (unsigned i = 0; i < 6; i++) {
        job_init(&jobs[i], plan[i].op, r, items, 1);
        jobs[i].job.priority = plan[i].priority;
        job_submit(&jobs[i]);
    }
    n_done = 0;
    for (unsigned i = 0; i < 6; i++)
        cr_assert_eq(job_wait(&jobs[i]), 0);
    cr_assert(long_job.done);
    for (unsigned i = 0; i < 6; i++)
        cr_assert_eq(jobs[i].order, plan[i].place + 1, "job %u was number %u", i, jobs[i].order);
    close_ok(r);
    device_set_free(one);
}

Test(device_cpu, stats_count_what_was_done)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct ucm_copy_item items[3] = {{.slot = (uint64_t)(uintptr_t)slots, .block = 0},
                                     {.slot = (uint64_t)(uintptr_t)slots, .block = 1},
                                     {.slot = (uint64_t)(uintptr_t)slots, .block = 999}};
    struct device_stats stats;
    struct test_job j;

    open_ok(r);
    job_init(&j, DEVICE_LOAD, r, items, 2);
    cr_assert_eq(job_run(&j), 0);
    job_init(&j, DEVICE_DUMP, r, items, 1);
    cr_assert_eq(job_run(&j), 0);
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

Test(device_cpu, descriptors_are_given_back)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    int fd = r->fds[0];

    cr_assert_geq(fcntl(fd, F_GETFD), 0);
    open_ok(r);
    cr_assert_eq(r->fds[0], -1);
    cr_assert_eq(fcntl(fd, F_GETFD), -1, "an open region needs no descriptor");
    close_ok(r);
}

/* ---- the set ---- */

Test(device_cpu, devices_by_name)
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
Test(device_cpu, gpus_where_there_are_any)
{
    struct device_config config = {
        .cpu_threads = 1, .cuda = CONFIG_CUDA_AUTO, .found = found_cb, .ctx = &loop};
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

Test(device_cpu, freed_while_gpus_are_sought)
{
    struct device_config config = {.cpu_threads = 1, .cuda = CONFIG_CUDA_AUTO};
    struct device_set *s;
    struct ucm_error e = {0};
    char note[200];

    cr_assert_eq(device_set_new(&loop, &config, &s, note, &e), 0);
    device_set_free(s);
    device_set_free(NULL);
}
