/* Sanitizers: thread */
#include "daemon/device/guard.h"
#include "tests/unit/device/device_rig.h"

#include <linux/userfaultfd.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

/* ---- layouts ---- */

/* What slots and memory should hold, byte by byte, from the layout's definition alone. */
static void expect(const struct msg_plane *planes, uint32_t first, uint32_t n_planes,
                   const struct ucm_copy_item *items, uint32_t n, bool load)
{
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *slot = want_slots + (items[i].slot - (uint64_t)(uintptr_t)slots);

        for (uint32_t p = 0; p < first + n_planes; slot += planes[p++].block_bytes) {
            uint8_t *fragment = want_memory + planes[p].offset + items[i].block * planes[p].stride;

            if (p >= first && load)
                memcpy(fragment, slot, planes[p].block_bytes);
            else if (p >= first)
                memcpy(slot, fragment, planes[p].block_bytes);
        }
    }
}

static void copy_check(struct device_region *r, const struct msg_plane *planes, uint32_t first,
                       uint32_t n_planes, struct ucm_copy_item *items, uint32_t n,
                       enum device_op op)
{
    struct test_job j;

    bytes_random(memory, MEMORY, 1);
    bytes_random(slots, SLOTS, 2);
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
                         uint32_t layers, uint64_t layer_bytes)
{
    struct device_region *r =
        region_of(planes, n_planes, blocks, layers, layer_bytes, memfd, 0, MEMORY);
    struct ucm_copy_item items[64];

    cr_assert_leq(blocks, 64);
    open_ok(r);
    for (uint32_t i = 0; i < blocks; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots +
                                                  i * (layers * layer_bytes + 64),
                                          .block = (i * 11 + 3) % blocks};
    for (int op = DEVICE_LOAD; op <= DEVICE_DUMP; op++) {
        copy_check(r, planes, 0, n_planes, items, blocks, op);
        copy_check(r, planes, n_planes / 2, n_planes - n_planes / 2, items, blocks / 2 + 1, op);
    }
    close_ok(r);
}

TestSuite(device_cpu, .init = setup, .fini = teardown, .timeout = 60);

/* Each layout has a number of planes. Groups of `together` planes lie `apart` bytes from each
 * other; planes of a group, `beside` bytes. */
Test(device_cpu, layouts_of_engines)
{
    static const struct {
        uint32_t planes, layers, blocks, together;
        uint64_t apart, beside, stride;
        uint32_t fragment;
    } of[] = {
        {16, 8, 64, 1, 64 * 4096, 0, 4096, 4096},               /* K and V apart */
        {8, 8, 61, 1, 61 * 8192, 0, 8192, 8192},                /* fused */
        {8, 2, 40, 4, 40 * 8 * 2048, 2 * 2048, 8 * 2048, 2048}, /* heads of others between */
        {4, 4, 13, 1, 13 * 73728, 0, 73728, 73728},             /* one latent a layer */
        {32, 32, 32, 32, 0, 4096, 32 * 4096, 4096},             /* all layers of a block together */
    };

    for (unsigned l = 0; l < sizeof(of) / sizeof(of[0]); l++) {
        uint32_t each = of[l].planes / of[l].layers;
        struct msg_plane planes[32];

        for (uint32_t i = 0; i < of[l].planes; i++)
            planes[i] = (struct msg_plane){.offset = i / of[l].together * of[l].apart +
                                                     i % of[l].together * of[l].beside,
                                           .stride = of[l].stride,
                                           .block_bytes = of[l].fragment,
                                           .layer = i / each};
        layout_check(planes, of[l].planes, of[l].blocks, of[l].layers, each * of[l].fragment);
    }
}

Test(device_cpu, odd_sizes_and_places)
{
    static const uint32_t sizes[] = {1, 3, 17, 255, 4095, 4097, 20011};

    for (unsigned s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        struct msg_plane planes[3];

        for (uint32_t i = 0; i < 3; i++)
            planes[i] = (struct msg_plane){.offset = 1 + i * 64ull * (sizes[s] + 5) + i,
                                           .stride = sizes[s] + s,
                                           .block_bytes = sizes[s],
                                           .layer = i};
        layout_check(planes, 3, 63, 3, sizes[s]);
    }
}

Test(device_cpu, fragments_of_different_sizes)
{
    static const struct msg_plane planes[] = {
        {.offset = 0, .stride = 50000, .block_bytes = 50000, .layer = 0},
        {.offset = 2000000, .stride = 8, .block_bytes = 3, .layer = 0},
        {.offset = 2100000, .stride = 30000, .block_bytes = 20003, .layer = 1},
        {.offset = 2120003, .stride = 30000, .block_bytes = 1, .layer = 1},
        {.offset = 3300001, .stride = 29999, .block_bytes = 29999, .layer = 1},
    };

    layout_check(planes, 5, 28, 2, 50003);
}

/* One item is larger than what a thread takes at a time. */
Test(device_cpu, an_item_of_many_pieces)
{
    struct msg_plane planes[3] = {
        {.offset = 0, .stride = 1, .block_bytes = 1300000, .layer = 0},
        {.offset = 1300000, .stride = 1, .block_bytes = 900000, .layer = 0},
        {.offset = 2200000, .stride = 1, .block_bytes = 1800000, .layer = 0},
    };

    for (int i = 0; i < 3; i++)
        planes[i].stride = planes[i].block_bytes;
    layout_check(planes, 3, 1, 1, 4000000);
}

/* ---- what is refused ---- */

/* A region with this file as all its memory is refused, with a sentence that contains `word`. */
static void memory_refused(int fd, const char *word)
{
    open_refused(region_flat(fd, 0, MEMORY), word);
    close(fd);
}

Test(device_cpu, memory_is_a_writable_memfd_that_can_not_shrink_and_is_as_long_as_said)
{
    char path[] = "/tmp/ucmd-test-XXXXXX";
    int fd = mkstemp(path);

    memory_refused(memfd_make(MEMORY, 0, 0), "F_SEAL_SHRINK");
    memory_refused(memfd_make(MEMORY, MFD_ALLOW_SEALING, 0), "F_SEAL_SHRINK");
    memory_refused(memfd_make(MEMORY, MFD_ALLOW_SEALING, F_SEAL_GROW), "F_SEAL_SHRINK");
    memory_refused(memfd_make(MEMORY, MFD_ALLOW_SEALING, F_SEAL_SHRINK | F_SEAL_WRITE),
                   "must be writable");
    memory_refused(memfd_make(MEMORY - 1, MFD_ALLOW_SEALING, F_SEAL_SHRINK),
                   "pass the memfd's 4194303 bytes");
    memory_refused(memfd_make(0, MFD_ALLOW_SEALING, F_SEAL_SHRINK), "pass the memfd's 0 bytes");
    memory_refused(open("/dev/null", O_RDWR), "not a memfd");
    cr_assert_eq(ftruncate(fd, MEMORY), 0);
    memory_refused(fd, "not a memfd");
    unlink(path);
    open_refused(region_flat(memfd, 65536, MEMORY), "pass the memfd's");
}

static blkcnt_t pages_of(int fd)
{
    struct stat st;

    cr_assert_eq(fstat(fd, &st), 0);
    return st.st_blocks / 8;
}

static void punch(uint64_t offset, uint64_t bytes)
{
    cr_assert_eq(
        fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes),
        0);
}

/* A userfaultfd that does not block, because one that blocks can't be polled. */
static bool fault_waits(int fault, int ms)
{
    struct pollfd p = {.fd = fault, .events = POLLIN};

    return poll(&p, 1, ms) == 1 && p.revents == POLLIN;
}

/* The device unmaps it slice by slice. */
Test(device_cpu, a_large_region_is_unmapped)
{
    const uint64_t bytes = 40u << 20;
    int fd = memfd_make(bytes + 4096, MFD_ALLOW_SEALING, F_SEAL_SHRINK);
    struct device_region *r = region_flat(fd, 4096, bytes);
    struct ucm_copy_item item = {.slot = (uint64_t)(uintptr_t)slots};
    uint8_t *mapped;

    open_ok(r);
    mapped = (uint8_t *)(uintptr_t)r->handles[0].address;
    for (item.block = 0; item.block < r->blocks; item.block++)
        job_ends(DEVICE_DUMP, r, &item, 1, 0);
    close_ok(r);
    for (uint64_t at = 0; at < bytes + 4096; at += 4096)
        cr_assert(msync(mapped + at, 4096, MS_ASYNC) < 0 && errno == ENOMEM);
    close(fd);
}

static atomic_uint advices;

/* In place of libc's. */
int madvise(void *p, size_t bytes, int advice)
{
    advices++;
    return (int)syscall(SYS_madvise, p, bytes, advice);
}

/* A file of holes costs its client nothing, and must not cost the daemon a call for each slice. */
Test(device_cpu, a_region_at_the_end_of_a_file_of_holes_is_unmapped)
{
    const uint64_t holes = 1ull << 39; /* what ThreadSanitizer has room for */
    int fd = memfd_make(0, MFD_ALLOW_SEALING, 0);
    struct device_region *r;

    cr_assert_eq(fallocate(fd, 0, (off_t)holes, MEMORY), 0); /* nothing is before that */
    cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    r = region_flat(fd, holes, MEMORY);
    open_ok(r);
    advices = 0;
    close_ok(r);
    cr_assert_lt(advices, 10000u, "%u", advices); /* of 32,768 slices */
    close(fd);
}

/* Holes elsewhere in the file are the client's business. */
Test(device_cpu, memory_around_a_region_may_lack_pages)
{
    struct device_region *r;

    bytes_random(memory, MEMORY, 5);
    punch(0, 65536);
    r = region_flat(memfd, 65536, MEMORY - 65536);
    open_ok(r);
    close_ok(r);
    cr_assert_eq(pages_of(memfd), (MEMORY - 65536) / 4096);
}

/* tests/integration/test_region_memory.py has more of what workers do with their pages. */
static void punch_cb(void *stop)
{
    while (!atomic_load((atomic_bool *)stop)) {
        punch(0, MEMORY);
        memset(memory, 7, MEMORY);
    }
    punch(0, MEMORY);
}

Test(device_cpu, holes_made_while_it_copies)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct ucm_copy_item items[32];
    int guard = guard_open();
    unsigned failed = 0, i;
    atomic_bool stop = false;
    uv_thread_t thread;
    struct test_job j;

    if (guard < 0)
        cr_skip_test("no userfaultfd here");
    close(guard);
    open_ok(r);
    cr_assert_eq(uv_thread_create(&thread, punch_cb, &stop), 0);
    for (i = 0; i < 2000 && (i < 200 || failed < 10); i++) {
        for (uint32_t k = 0; k < 32; k++)
            items[k] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots + k * 65536,
                                              .block = 2 * k};
        job_init(&j, i % 2 ? DEVICE_LOAD : DEVICE_DUMP, r, items, 32);
        failed += job_run(&j) == -EFAULT;
    }
    atomic_store(&stop, true);
    uv_thread_join(&thread);
    cr_assert_geq(failed, 10);
    for (i = 0; i < 2; i++)
        job_ends(i % 2 ? DEVICE_LOAD : DEVICE_DUMP, r, items, 32, -EFAULT);
    cr_assert_eq(pages_of(memfd), 0);
    close_ok(r);
}

/* ---- copies that are held up ---- */

/* Slots whose pages come only when the test lets them. A copy to them waits, like one whose worker
 * punches holes. */
struct stuck {
    int fault;
    uint8_t *slots;
};

static void stuck_init(struct stuck *s)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.range.len = MEMORY, .mode = UFFDIO_REGISTER_MODE_MISSING};

    s->fault = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    if (s->fault < 0)
        cr_skip_test("no userfaultfd here");
    s->slots = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(s->slots, MAP_FAILED);
    range.range.start = (uintptr_t)s->slots;
    cr_assert_eq(ioctl(s->fault, UFFDIO_API, &api), 0);
    cr_assert_eq(ioctl(s->fault, UFFDIO_REGISTER, &range), 0);
}

/* Waits until so many copies wait for its pages. */
static void stuck_await(const struct stuck *s, unsigned copies)
{
    struct uffd_msg message;

    while (copies-- > 0) {
        cr_assert(fault_waits(s->fault, 30000));
        cr_assert_eq(read(s->fault, &message, sizeof(message)), (ssize_t)sizeof(message));
    }
}

static void dump_begin(struct test_job *j, struct device_region *r, uint32_t tenant,
                       struct ucm_copy_item *item, void *slot)
{
    *item = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slot};
    job_init(j, DEVICE_DUMP, r, item, 1);
    j->job.who = (struct fair_who){.tenant = tenant, .weight = 100};
    job_submit(j);
}

#define HOSTILE 4u

/* Each of several tenants holds up as many threads as it gets, and has more jobs waiting. */
Test(device_cpu, who_is_held_up_holds_up_nobody_else)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY), *other;
    struct ucm_copy_item items[HOSTILE][8], item;
    struct test_job jobs[HOSTILE][8], j;
    struct stuck s;

    stuck_init(&s);
    open_ok(r);
    for (uint32_t t = 0; t < HOSTILE; t++) {
        for (uint32_t i = 0; i < 8; i++)
            dump_begin(&jobs[t][i], r, t + 1, &items[t][i], s.slots + (t * 8 + i) * 65536);
        stuck_await(&s, t == 0 ? 3 : 1);
        dump_begin(&j, r, HOSTILE + 1, &item, slots);
        cr_assert_eq(job_wait(&j), 0);
        other = region_flat(memfd, 0, MEMORY);
        open_ok(other);
        close_ok(other);
    }
    for (uint32_t t = 0; t < HOSTILE; t++)
        for (uint32_t i = 0; i < 8; i++)
            cr_assert_not(jobs[t][i].done);
    cr_assert_not(fault_waits(s.fault, 0));
    close(s.fault);
    for (uint32_t t = 0; t < HOSTILE; t++)
        for (uint32_t i = 0; i < 8; i++)
            cr_assert_eq(job_wait(&jobs[t][i]), 0);
    munmap(s.slots, MEMORY);
    close_ok(r);
}

/* One thread is held up until all jobs are there. Then priorities decide, then loads go before
 * dumps, then older jobs first. */
Test(device_cpu, urgent_first)
{
    static const struct {
        enum device_op op;
        uint8_t priority;
        unsigned place;
    } plan[] = {{DEVICE_DUMP, 0, 6}, {DEVICE_LOAD, 0, 5}, {DEVICE_DUMP, 7, 2},
                {DEVICE_LOAD, 3, 3}, {DEVICE_LOAD, 7, 1}, {DEVICE_LOAD, 3, 4}};
    struct device_config config = {.cpu_threads = 1, .cuda = CONFIG_CUDA_OFF};
    struct ucm_copy_item item, slot = {.slot = (uint64_t)(uintptr_t)slots};
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct test_job first, jobs[6];
    struct device_set *one;
    struct ucm_error e;
    struct stuck s;
    char note[200];

    stuck_init(&s);
    cr_assert_eq(device_set_new(&loop, &config, &one, note, &e), 0);
    cpu = device_set_at(one, 0);
    open_ok(r);
    dump_begin(&first, r, 0, &item, s.slots);
    stuck_await(&s, 1);
    for (unsigned i = 0; i < 6; i++) {
        job_init(&jobs[i], plan[i].op, r, &slot, 1);
        jobs[i].job.priority = plan[i].priority;
        jobs[i].job.who = first.job.who;
        job_submit(&jobs[i]);
    }
    n_done = 0;
    close(s.fault);
    cr_assert_eq(job_wait(&first), 0);
    for (unsigned i = 0; i < 6; i++)
        cr_assert_eq(job_wait(&jobs[i]), 0);
    for (unsigned i = 0; i < 6; i++)
        cr_assert_eq(jobs[i].order, plan[i].place, "job %u was number %u", i, jobs[i].order);
    munmap(s.slots, MEMORY);
    close_ok(r);
    device_set_free(one);
}

Test(device_cpu, bad_jobs_touch_nothing)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct ucm_copy_item items[2] = {{.slot = (uint64_t)(uintptr_t)slots, .block = 0},
                                     {.slot = (uint64_t)(uintptr_t)slots + 65536, .block = 64}};
    static const uint8_t event[64];
    struct test_job j;

    open_ok(r);
    bytes_random(memory, MEMORY, 1);
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
    j.job.deadline_ms = uv_now(&loop) + 60000;
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
