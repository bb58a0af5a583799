/* What the tests of the cpu device share: a loop, a device, a worker's memfd, and jobs. */
#ifndef UCM_TESTS_DEVICE_RIG_H
#define UCM_TESTS_DEVICE_RIG_H

#include "daemon/config/config.h"
#include "daemon/device/device.h"
#include "tests/runner/bytes.h"

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

static inline int memfd_make(uint64_t bytes, unsigned flags, int seals)
{
    int fd = memfd_create("kv", MFD_CLOEXEC | flags);

    cr_assert_geq(fd, 0);
    cr_assert(bytes == 0 || fallocate(fd, 0, 0, (off_t)bytes) == 0);
    if (seals)
        cr_assert_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static inline void setup(void)
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

static inline void teardown(void)
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

static inline void done_cb(struct device_job *job, int status)
{
    struct test_job *j = LIST_ENTRY(job, struct test_job, job);

    cr_assert_not(j->done, "done runs once");
    j->done = true;
    j->status = status;
    j->order = n_done++;
}

static inline void job_init(struct test_job *j, enum device_op op, struct device_region *r,
                            struct ucm_copy_item *items, uint32_t n)
{
    *j = (struct test_job){.job = {.op = op,
                                   .region = r,
                                   .items = items,
                                   .n_items = n,
                                   .n_planes = r->n_planes,
                                   .done_cb = done_cb}};
}

static inline void job_submit(struct test_job *j)
{
    cr_assert_eq(cpu->ops->submit(cpu, &j->job), 0);
}

static inline int job_wait(struct test_job *j)
{
    while (!j->done)
        uv_run(&loop, UV_RUN_ONCE);
    return j->status;
}

static inline int job_run(struct test_job *j)
{
    job_submit(j);
    return job_wait(j);
}

static inline struct device_region *region_of(const struct msg_plane *planes, uint32_t n,
                                              uint32_t blocks, uint32_t layers,
                                              uint64_t layer_bytes, int fd, uint64_t offset,
                                              uint64_t bytes)
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
    struct form pages = {.layer_bytes = layer_bytes, .layers = layers};

    cr_assert_eq(region_check(&m, &pages, NULL, fds, 1, &r, &e), 0, "%s", e.text);
    r->device = cpu;
    r->pid = getpid();
    return r;
}

/* One plane of 64 blocks of 64 KiB. */
static inline struct device_region *region_flat(int fd, uint64_t offset, uint64_t bytes)
{
    struct msg_plane plane = {.stride = 65536, .block_bytes = 65536};

    return region_of(&plane, 1, (uint32_t)(bytes / 65536), 1, 65536, fd, offset, bytes);
}

/* A job of its own, which ends with this status. */
static inline void job_ends(enum device_op op, struct device_region *r, struct ucm_copy_item *items,
                            uint32_t n, int status)
{
    struct test_job j;

    job_init(&j, op, r, items, n);
    cr_assert_eq(job_run(&j), status, "%d: %s", j.status, j.job.error.text);
}

static inline void open_ok(struct device_region *r)
{
    job_ends(DEVICE_OPEN, r, NULL, 0, 0);
}

static inline void open_refused(struct device_region *r, const char *word)
{
    struct test_job j;

    job_init(&j, DEVICE_OPEN, r, NULL, 0);
    cr_assert_eq(job_run(&j), -EINVAL);
    cr_assert(strstr(j.job.error.text, word), "\"%s\" does not say \"%s\"", j.job.error.text, word);
    region_free(r);
}

static inline void close_ok(struct device_region *r)
{
    job_ends(DEVICE_CLOSE, r, NULL, 0, 0);
    region_free(r);
}

#endif
