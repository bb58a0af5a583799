/* Mappings of the arena: memory that is granted to a tenant, which process has it, and when it
 * comes back. */
/* Sanitizers: thread */
#include "daemon/mapping/grant.h"
#include "proto/memory/mapping.h"
#include "tests/unit/arena/arena_rig.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SLABS 8u

/* ---- what the kernel may refuse ---- */

static struct {
    int memfd_error, allocate_error;
    unsigned calls; /* of what failed */
} fault;

int memfd_create(const char *name, unsigned flags)
{
    if (fault.memfd_error) {
        fault.calls++;
        errno = fault.memfd_error;
        return -1;
    }
    return (int)syscall(SYS_memfd_create, name, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    if (fault.allocate_error) {
        fault.calls++;
        errno = fault.allocate_error;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, offset, length);
}

/* ---- the rig ---- */

static struct arena_group *a, *b;
static unsigned events[GRANTED_GONE + 1];
static uint64_t failed_ms; /* when memory was last unavailable */
static bool keep_going;    /* the device takes its time */
static unsigned revokes;
static uint32_t revoked, going;
static uint32_t slabs = SLABS;

static void mapping_cb(void *ctx, enum arena_granted_event event, uint32_t mapping, void *base,
                       uint64_t bytes)
{
    cr_assert_eq(ctx, &loop);
    cr_assert_eq(bytes, MIB);
    cr_assert_lt(mapping, SLABS);
    events[event]++;
    if (event == GRANTED_FAILED)
        failed_ms = uv_now(&loop);
    if (event == GRANTED_READY)
        memset(base, 0, 64); /* a device reads and writes it from now on */
    if (event == GRANTED_GOES) {
        going = mapping;
        if (!keep_going)
            grant_let_go(arena, mapping);
    }
}

static void revoke_cb(void *ctx, struct arena_group *g, uint32_t mapping)
{
    cr_assert_eq(ctx, &revoked);
    cr_assert(g == a || g == b);
    revoked = mapping;
    revokes++;
}

static void open_arena(uint64_t budget)
{
    open_arena_as((struct arena_config){.size = 2 * MIB,
                                        .granted = budget,
                                        .granted_max = slabs * MIB,
                                        .granted_cb = mapping_cb,
                                        .ctx = &loop});
    cr_assert_eq(grant_group_open(arena, "a", &a), 0);
    cr_assert_eq(grant_group_open(arena, "b", &b), 0);
    grant_watch(arena, &(struct grant_watcher){.revoke_cb = revoke_cb, .ctx = &revoked});
}

/* Iterations of the event loop until *count is n. */
static void await(const unsigned *count, unsigned n)
{
    uv_async_t awake; /* the arena's handle keeps no loop alive */

    cr_assert_eq(uv_async_init(&loop, &awake, NULL), 0);
    for (int i = 0; i < 10000 && *count < n; i++) {
        uv_run(&loop, UV_RUN_NOWAIT);
        if (*count < n)
            uv_sleep(1);
    }
    cr_assert_eq(*count, n);
    uv_close((uv_handle_t *)&awake, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
}

static void teardown(void)
{
    if (a)
        grant_group_close(arena, a);
    if (b)
        grant_group_close(arena, b);
    end();
}

TestSuite(grant, .init = begin, .fini = teardown);

/* A slot of a group, whose slab may have to be granted first. */
static slot_ref slot_of(struct arena_group *g, uint64_t bytes)
{
    slot_ref slot = 0;
    int rc = grant_slot(arena, g, bytes, 7, &slot);

    if (rc == -EAGAIN) {
        await(&events[GRANTED_READY], events[GRANTED_READY] + 1);
        rc = grant_slot(arena, g, bytes, 7, &slot);
    }
    cr_assert_eq(rc, 0);
    cr_assert_eq(arena_slot_group(arena, slot), g);
    return slot;
}

static struct grant_place place_of(slot_ref slot)
{
    struct grant_place p;

    cr_assert(grant_place(arena, slot, &p));
    return p;
}

/* What a worker maps of a slab, or of the table. */
static const void *worker_map(int fd, uint64_t bytes)
{
    const void *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

    cr_assert_neq(p, MAP_FAILED);
    return p;
}

static const _Atomic uint64_t *worker_table(const struct arena_group *g,
                                            struct ucm_mapping_header *header)
{
    int fd = grant_group_table(g, header);
    const char *p = worker_map(fd, ucm_mapping_table_bytes(header->slabs, header->slots_per_slab));

    return (const _Atomic uint64_t *)(p + UCM_MAPPING_HEADER_BYTES);
}

/* ---- tests ---- */

Test(grant, none_without_address_space)
{
    struct arena_group *g;

    open_arena_as((struct arena_config){.size = MIB});
    cr_expect_eq(grant_group_open(arena, "a", &g), -EOPNOTSUPP);
}

Test(grant, a_budget_of_nothing)
{
    slot_ref slot;

    open_arena(0);
    cr_expect_eq(grant_slot(arena, a, 4096, 1, &slot), -ENOSPC);
    cr_expect_eq(grant_slot(arena, a, MIB + 1, 1, &slot), -EFBIG);
    grant_budget_set(arena, MIB);
    slot = slot_of(a, 4096);
    cr_expect_eq(grant_bytes(arena, NULL), MIB);
    cr_expect_eq(grant_bytes(arena, a), MIB);
    cr_expect_eq(grant_bytes(arena, b), 0u);
    cr_expect_eq(grant_used_bytes(arena), 4096u);
    cr_expect_eq(arena_bytes_used(arena), 0u, "ordinary slots");
    arena_slot_free(arena, slot);
    await(&events[GRANTED_GONE], 1);
    cr_expect_eq(grant_bytes(arena, NULL), 0u);
    cr_expect_eq(grant_used_bytes(arena), 0u);
}

Test(grant, sequence_numbers_of_a_place)
{
    struct ucm_mapping_header h;
    const _Atomic uint64_t *table;
    struct grant_place p, q;
    slot_ref slot, other;
    uint64_t entry;

    open_arena(MIB);
    table = worker_table(a, &h);
    cr_expect_eq(memcmp(h.magic, UCM_MAPPING_MAGIC, sizeof(h.magic)), 0);
    cr_expect_eq(h.version, UCM_MAPPING_VERSION);
    cr_expect_eq(h.slot_align, ARENA_ALIGN);
    cr_expect_eq(h.slab_bytes, MIB);
    cr_expect_eq(h.slabs, SLABS);
    cr_expect_eq(h.slots_per_slab, MIB / ARENA_ALIGN);

    slot = slot_of(a, 3 * 4096);
    other = slot_of(a, 3 * 4096);
    cr_expect_not(grant_place(arena, slot, &p), "nothing is in it");
    arena_slot_publish(arena, slot);
    p = place_of(slot);
    entry = ucm_mapping_entry(h.slots_per_slab, p.mapping, p.slot);
    cr_expect_eq(p.seq % 2, 0u);
    cr_expect_neq(p.seq, 0u);
    cr_expect(ucm_mapping_begin(&table[entry], p.seq));
    cr_expect(ucm_mapping_end(&table[entry], p.seq));
    arena_slot_publish(arena, other);
    q = place_of(other);
    cr_expect_neq(q.seq, p.seq);

    arena_slot_retract(arena, slot);
    cr_expect_eq(table[entry] % 2, 1u);
    cr_expect_gt(table[entry], p.seq);
    cr_expect_not(ucm_mapping_end(&table[entry], p.seq));
    cr_expect_not(grant_place(arena, slot, &q));
    arena_slot_retract(arena, slot);
    cr_expect_eq(table[entry] % 2, 1u, "twice is once");

    arena_slot_free(arena, slot);
    cr_expect_eq(table[entry] % 2, 1u);
    cr_expect_eq(slot_of(a, 3 * 4096), slot);
    cr_expect_eq(table[entry] % 2, 1u, "while it is filled");
    arena_slot_publish(arena, slot);
    q = place_of(slot);
    cr_expect_gt(q.seq, p.seq);
    cr_expect_not(ucm_mapping_begin(&table[entry], p.seq));
    cr_expect(ucm_mapping_begin(&table[entry], q.seq));
    arena_slot_free(arena, slot); /* without retract */
    cr_expect_eq(table[entry] % 2, 1u);
    arena_slot_free(arena, other);
}

Test(grant, ordinary_slots_have_none)
{
    struct grant_place p;
    slot_ref slot;

    open_arena(MIB);
    slot = arena_alloc(arena, 4096, 1, NUMA_NONE);
    cr_assert_neq(slot, 0u);
    cr_expect_null(arena_slot_group(arena, slot));
    arena_slot_publish(arena, slot);
    cr_expect_not(grant_place(arena, slot, &p));
    arena_slot_retract(arena, slot);
    arena_slot_free(arena, slot);
}

Test(grant, a_worker_reads_and_never_writes)
{
    slot_ref slot;
    struct stat st;
    char path[40];
    int fds[2], again;
    const char *seen;

    open_arena(MIB);
    slot = slot_of(a, MIB);
    fds[0] = grant_fd(arena, 0);
    fds[1] = grant_group_table(a, &(struct ucm_mapping_header){.epoch = 0});
    memcpy(arena_memory(arena, slot, NULL), "secret of a", 12);
    seen = worker_map(fds[0], MIB);
    cr_expect_str_eq(seen, "secret of a");
    memcpy(arena_memory(arena, slot, NULL), "the daemon may", 15);
    cr_expect_str_eq(seen, "the daemon may", "its own mapping stays writable");
    cr_expect_lt(mprotect((void *)(uintptr_t)seen, MIB, PROT_READ | PROT_WRITE), 0);
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(fcntl(fds[i], F_GETFL) & O_ACCMODE, O_RDONLY);
        cr_assert_eq(fstat(fds[i], &st), 0);
        cr_expect_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0), MAP_FAILED);
        cr_expect_lt(ftruncate(fds[i], 0), 0);
        /* A worker that runs as the daemon's user opens it again. */
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fds[i]);
        again = open(path, O_RDWR | O_CLOEXEC);
        if (again < 0)
            continue;
        cr_expect_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
        cr_expect_lt(pwrite(again, "x", 1, 0), 0);
        cr_expect_lt(ftruncate(again, 0), 0);
        cr_expect_lt(ftruncate(again, st.st_size + 4096), 0);
        cr_expect_lt(syscall(SYS_fallocate, again, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                             (off_t)0, (off_t)4096),
                     0);
        close(again);
    }
    cr_expect_str_eq(seen, "the daemon may");
    arena_slot_free(arena, slot);
}

/* A slab of a is given back and granted to b, at the same number and the same address. */
Test(grant, no_tenant_sees_another_ones_bytes)
{
    struct stat of_a, of_b;
    const char *seen_a, *seen_b;
    slot_ref slot;
    int fd;

    open_arena(MIB);
    slot = slot_of(a, MIB);
    memset(arena_memory(arena, slot, NULL), 'a', MIB);
    fd = fcntl(grant_fd(arena, 0), F_DUPFD_CLOEXEC, 0);
    seen_a = worker_map(fd, MIB);
    cr_assert_eq(fstat(fd, &of_a), 0);
    arena_slot_free(arena, slot); /* the worker keeps what it has, and says nothing */
    await(&events[GRANTED_GONE], 1);

    slot = slot_of(b, MIB);
    for (uint64_t i = 64; i < MIB; i++)
        cr_assert_eq(((char *)arena_memory(arena, slot, NULL))[i], 0);
    memset(arena_memory(arena, slot, NULL), 'b', MIB);
    cr_assert_eq(fstat(grant_fd(arena, 0), &of_b), 0);
    cr_expect_neq(of_a.st_ino, of_b.st_ino);
    seen_b = worker_map(grant_fd(arena, 0), MIB);
    for (uint64_t i = 0; i < MIB; i++)
        cr_assert(seen_a[i] == 'a' && seen_b[i] == 'b');
    cr_assert_eq(munmap((void *)(uintptr_t)seen_a, MIB), 0);
    seen_a = worker_map(fd, MIB);
    cr_expect_eq(seen_a[MIB - 1], 'a', "the old descriptor names the old memory");
    close(fd);
    arena_slot_free(arena, slot);
}

Test(grant, the_budget_holds)
{
    slot_ref slot[3], none;

    open_arena(2 * MIB);
    slot[0] = slot_of(a, MIB);
    slot[1] = slot_of(b, MIB);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &none), -ENOSPC);
    cr_expect_eq(grant_slot(arena, b, 4096, 1, &none), -ENOSPC);
    arena_slot_free(arena, slot[1]);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &none), -EAGAIN, "it comes back");
    await(&events[GRANTED_GONE], 1);
    slot[1] = slot_of(a, MIB);
    cr_expect_eq(grant_bytes(arena, a), 2 * MIB);

    grant_budget_set(arena, MIB);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &none), -ENOSPC);
    arena_slot_free(arena, slot[1]);
    await(&events[GRANTED_GONE], 2);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &none), -ENOSPC);
    grant_budget_set(arena, 3 * MIB);
    slot[1] = slot_of(a, MIB);
    slot[2] = slot_of(b, MIB);
    cr_expect_eq(grant_bytes(arena, NULL), 3 * MIB);
    for (int i = 0; i < 3; i++)
        arena_slot_free(arena, slot[i]);
    await(&events[GRANTED_GONE], 5);
}

/* Address space for an odd number, whatever the budget says. With such small slabs, the table ends
 * within a page. */
Test(grant, no_more_than_there_are_numbers)
{
    slot_ref slot[SLABS - 1], none;

    slabs = SLABS - 1;
    open_arena(100 * MIB);
    for (uint32_t i = 0; i < slabs; i++)
        slot[i] = slot_of(i % 2 ? a : b, MIB);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &none), -ENOSPC);
    for (uint32_t i = 0; i < slabs; i++)
        arena_slot_free(arena, slot[i]);
}

Test(grant, a_mapped_slab_stays_with_its_group)
{
    slot_ref slot, none;

    open_arena(MIB);
    slot = slot_of(a, MIB);
    grant_map(arena, 0);
    grant_map(arena, 0);
    arena_slot_free(arena, slot);
    cr_expect_eq(grant_bytes(arena, a), MIB, "two workers map it");
    cr_expect_eq(grant_slot(arena, a, 4096, 1, &slot), 0, "and use it again");
    arena_slot_free(arena, slot);
    cr_expect_eq(events[GRANTED_GOES], 0u);

    cr_expect_eq(grant_slot(arena, b, MIB, 1, &none), -EAGAIN, "revoked");
    cr_expect_eq(revokes, 0u, "not inside the call");
    await(&revokes, 1);
    cr_expect_eq(revoked, 0u);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &none), -EAGAIN, "nothing further for a");
    cr_expect_eq(grant_slot(arena, b, MIB, 1, &none), -EAGAIN);
    grant_release(arena, 0);
    cr_expect_eq(events[GRANTED_GOES], 0u);
    grant_release(arena, 0);
    await(&events[GRANTED_GONE], 1);
    slot = slot_of(b, MIB);
    cr_expect_eq(grant_bytes(arena, a), 0u);
    arena_slot_free(arena, slot);
}

Test(grant, devices_let_go_before_the_memory_does)
{
    slot_ref slot;

    open_arena(MIB);
    keep_going = true;
    slot = slot_of(a, MIB);
    arena_slot_free(arena, slot);
    cr_expect_eq(events[GRANTED_GOES], 1u);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &slot), -EAGAIN);
    uv_run(&loop, UV_RUN_NOWAIT);
    cr_expect_eq(events[GRANTED_GONE], 0u);
    cr_expect_eq(grant_bytes(arena, NULL), MIB);
    grant_let_go(arena, going);
    await(&events[GRANTED_GONE], 1);
}

Test(grant, who_asked_has_gone)
{
    struct arena_group *c;
    slot_ref slot;

    open_arena(2 * MIB);
    cr_assert_eq(grant_group_open(arena, "c", &c), 0);
    cr_expect_eq(grant_slot(arena, c, MIB, 1, &slot), -EAGAIN);
    grant_group_close(arena, c);
    await(&events[GRANTED_GONE], 1);
    cr_expect_eq(grant_bytes(arena, NULL), 0u);

    cr_assert_eq(grant_group_open(arena, "c", &c), 0);
    slot = slot_of(c, MIB / 2);
    grant_group_close(arena, c);
    cr_expect_eq(grant_bytes(arena, NULL), MIB, "its slot lives on");
    cr_assert_eq(grant_group_open(arena, "c", &c), 0);
    cr_expect_eq(arena_slot_group(arena, slot), c);
    cr_expect_str_eq(grant_group_tenant(c), "c");
    grant_group_close(arena, c);
    arena_slot_free(arena, slot);
    await(&events[GRANTED_GONE], 2);
}

Test(grant, the_budget_is_lowered_while_memory_comes)
{
    slot_ref slot;

    open_arena(MIB);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &slot), -EAGAIN);
    grant_budget_set(arena, 0);
    await(&events[GRANTED_GONE], 1);
    cr_expect_eq(grant_bytes(arena, NULL), 0u);
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &slot), -ENOSPC);
}

Test(grant, other_sizes_and_the_hand)
{
    slot_ref slot[5], next;
    uint64_t owner;

    open_arena(2 * MIB);
    for (int i = 0; i < 3; i++)
        slot[i] = slot_of(a, MIB / 4);
    slot[3] = slot_of(a, MIB / 2);
    slot[4] = slot_of(a, MIB / 4);
    cr_expect_eq(grant_bytes(arena, a), 2 * MIB);
    for (int i = 0; i < 8; i++) {
        next = grant_group_next(arena, a, MIB / 4, &owner);
        cr_expect_eq(owner, 7u);
        cr_expect_eq(next, i % 4 == 3 ? slot[4] : slot[i % 4]);
    }
    cr_expect_eq(grant_group_next(arena, a, MIB / 2, &owner), slot[3]);
    cr_expect_eq(grant_group_next(arena, a, MIB, &owner), 0u);
    cr_expect_eq(grant_group_next(arena, b, MIB / 4, &owner), 0u);
    for (int i = 0; i < 5; i++)
        arena_slot_free(arena, slot[i]);
    await(&events[GRANTED_GONE], 2);
}

/* The result of grant_slot once it is not this error any more. */
static int tried_again(int error, slot_ref *out)
{
    int rc = grant_slot(arena, a, MIB, 1, out);

    for (int i = 0; i < 10000 && rc == error; i++) {
        uv_sleep(1);
        uv_update_time(&loop);
        rc = grant_slot(arena, a, MIB, 1, out);
    }
    return rc;
}

Test(grant, memory_that_cannot_be_had)
{
    slot_ref slot;

    open_arena(MIB);
    fault.memfd_error = EMFILE;
    cr_expect_eq(grant_slot(arena, a, MIB, 1, &slot), -EAGAIN);
    await(&events[GRANTED_FAILED], 1);
    cr_expect_eq(fault.calls, 1u);
    cr_expect_eq(grant_bytes(arena, NULL), 0u);
    if (uv_now(&loop) - failed_ms < 100) /* else this host stood still */
        cr_expect_eq(grant_slot(arena, a, MIB, 1, &slot), -EMFILE, "not again at once");
    cr_expect_eq(grant_slot(arena, b, MIB, 1, &slot), -EAGAIN, "another one's trouble");
    await(&events[GRANTED_FAILED], 2);

    fault.memfd_error = 0;
    fault.allocate_error = ENOSPC; /* of the table */
    cr_expect_eq(tried_again(-EMFILE, &slot), -EAGAIN);
    await(&events[GRANTED_FAILED], 3);
    cr_expect_eq(grant_bytes(arena, NULL), 0u);

    fault.allocate_error = 0;
    cr_expect_eq(tried_again(-ENOSPC, &slot), -EAGAIN);
    await(&events[GRANTED_READY], 1);
    slot = slot_of(a, MIB);
    memset(arena_memory(arena, slot, NULL), 1, MIB);
    arena_slot_free(arena, slot);
}

Test(grant, a_table_that_cannot_be_had)
{
    struct arena_group *c;

    open_arena(MIB);
    fault.memfd_error = EMFILE;
    cr_expect_eq(grant_group_open(arena, "c", &c), -EMFILE);
}

Test(grant, closing_while_memory_comes_and_goes)
{
    slot_ref slot, none;

    open_arena(3 * MIB);
    slot = slot_of(a, MIB);
    arena_slot_free(arena, slot);
    cr_expect_eq(grant_slot(arena, b, MIB, 1, &none), -EAGAIN);
    slot = slot_of(b, MIB);
    grant_map(arena, arena_slab_of(arena, slot) - 2);
}
