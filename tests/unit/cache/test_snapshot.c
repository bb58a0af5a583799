/* Steps of keeping DRAM over a restart: the snapshot's bytes, whole and damaged; the directory's
 * files; slots taken before their memory is ready. tests/unit/index/test_policy.c has the policy's
 * order; tests/integration/test_keep.c tests the whole. */
#include "daemon/config/config.h"
#include "daemon/format/checksum.h"
#include "daemon/snapshot/format.h"
#include "daemon/snapshot/persist.h"
#include "daemon/snapshot/snapshot.h"
#include "tests/unit/arena/arena_rig.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the snapshot ---- */

#define PARTS 5u

static uint8_t snapshot[8192];
static struct persist_identity identity = {.boot = {1, 2, 3}, .inode = 77, .bytes = 8 * MIB};

static size_t snapshot_make(void)
{
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES] = {9};
    struct snapshot_ns ns = {fingerprint, (const uint8_t *)"one and a bit", 13};
    struct snapshot_head h = {
        .arena = identity, .slab = MIB, .parts = PARTS, .namespaces = 2, .program = "ucmd test"};
    size_t at = SNAPSHOT_HEAD_BYTES;

    memset(snapshot, 0, sizeof(snapshot));
    at += snapshot_ns_encode(snapshot + at, &ns);
    ns.identity_bytes = 8;
    at += snapshot_ns_encode(snapshot + at, &ns);
    for (uint32_t i = 0; i < PARTS; i++, at += SNAPSHOT_PART_BYTES) {
        struct snapshot_part p = {.ns = i % 2,
                                  .part = i,
                                  .slab = i,
                                  .slot = 10 + i,
                                  .checksum = 1000 + i,
                                  .uses = i,
                                  .stored = i == 3 || i == 5};

        p.key[31] = (uint8_t)i;
        snapshot_part_encode(snapshot + at, &p);
    }
    snapshot_complete(snapshot, at, &h);
    return at;
}

static int check(const uint8_t *p, size_t n)
{
    struct snapshot_head h;
    size_t at;

    return snapshot_check(p, n, &identity, MIB, &h, &at);
}

Test(kept, snapshots_come_back)
{
    size_t n = snapshot_make(), at;
    struct snapshot_head h;
    struct snapshot_part p;
    struct snapshot_ns ns;

    cr_assert_eq(snapshot_check(snapshot, n, &identity, MIB, &h, &at), 0);
    cr_expect_eq(h.parts, PARTS);
    cr_expect_eq(h.namespaces, 2u);
    cr_expect_str_eq(h.program, "ucmd test");
    cr_expect_eq(snapshot_ns_decode(snapshot + SNAPSHOT_HEAD_BYTES, &ns), 40u + 16u);
    cr_expect_eq(ns.identity_bytes, 13u);
    cr_expect_eq(ns.fingerprint[0], 9u);
    cr_expect_eq(memcmp(ns.identity, "one and a bit", 13), 0);
    for (uint32_t i = 0; i < PARTS; i++) {
        snapshot_part_decode(snapshot + at + i * SNAPSHOT_PART_BYTES, &p);
        cr_expect(p.ns == i % 2 && p.part == i && p.slab == i && p.slot == 10 + i);
        cr_expect(p.checksum == 1000 + i && p.uses == i && p.stored == (i == 3 || i == 5));
        cr_expect_eq(p.key[31], i);
    }
    /* a file system's pages may be longer */
    cr_expect_eq(check(snapshot, sizeof(snapshot)), 0);
}

Test(kept, no_damage_passes)
{
    size_t n = snapshot_make();

    for (size_t i = 0; i < n; i++) {
        cr_assert_neq(check(snapshot, i), 0, "cut at %zu", i);
        for (unsigned bit = 0; bit < 8; bit++) {
            snapshot[i] ^= (uint8_t)(1u << bit);
            cr_assert_neq(check(snapshot, n), 0, "byte %zu, bit %u", i, bit);
            snapshot[i] ^= (uint8_t)(1u << bit);
        }
    }
    cr_expect_eq(check(snapshot, n), 0);
}

/* Snapshots of another boot, file, size, slab, version. */
Test(kept, snapshots_of_others_are_told)
{
    size_t n = snapshot_make(), at;
    struct persist_identity other = identity;
    struct snapshot_head h;

    other.boot[15] = 1;
    cr_expect_eq(snapshot_check(snapshot, n, &other, MIB, &h, &at), -ESTALE);
    other = identity;
    other.inode++;
    cr_expect_eq(snapshot_check(snapshot, n, &other, MIB, &h, &at), -ESTALE);
    other = identity;
    other.bytes += MIB;
    cr_expect_eq(snapshot_check(snapshot, n, &other, MIB, &h, &at), -ESTALE);
    cr_expect_eq(snapshot_check(snapshot, n, &identity, 2 * MIB, &h, &at), -ESTALE);
    snapshot[8]++;
    cr_expect_eq(check(snapshot, n), -EPROTONOSUPPORT);
}

/* Properly encrypted, but with numbers that lead out of the arena or the lists. */
Test(kept, numbers_out_of_bounds_are_refused)
{
    static const struct {
        uint32_t offset, value; /* in the last part */
    } wrong[] = {{0, 2}, {4, UCM_MAX_PARTS}, {8, 8}, {56, 8}};
    struct snapshot_head h = {
        .arena = identity, .slab = MIB, .parts = PARTS, .namespaces = 2, .program = "ucmd test"};

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        size_t n = snapshot_make();
        uint8_t *p = snapshot + n - SNAPSHOT_PART_BYTES + wrong[i].offset;

        p[0] = (uint8_t)wrong[i].value;
        p[1] = (uint8_t)(wrong[i].value >> 8);
        snapshot_complete(snapshot, n, &h);
        cr_expect_eq(check(snapshot, n), -EBADMSG, "case %zu", i);
    }
    for (uint32_t namespaces = 0; namespaces < 40; namespaces++) {
        size_t n = snapshot_make();

        h.namespaces = namespaces;
        snapshot_complete(snapshot, n, &h);
        cr_expect_eq(check(snapshot, n) == 0, namespaces == 2);
    }
}

/* ---- the directory ---- */

static char directory[64];

static void directory_make(void)
{
    snprintf(directory, sizeof(directory), "/dev/shm/ucm-keep-XXXXXX");
    cr_assert(mkdtemp(directory));
}

static void directory_remove(void)
{
    cr_expect_eq(rmdir(directory), 0, "something is left in %s", directory);
}

static struct persist *directory_open(void)
{
    char why[PERSIST_WHY_BYTES];
    struct persist *k;

    cr_assert_eq(persist_open(directory, &k, why), 0, "%s", why);
    return k;
}

Test(kept, a_snapshot_is_found_once)
{
    struct persist_identity before;
    struct persist *k;
    uint8_t *p;
    size_t n;

    directory_make();
    k = directory_open();
    cr_expect_null(persist_snapshot(k, &n));
    cr_assert_eq(persist_reset(k, 4 * MIB), 0);
    cr_assert_eq(pwrite(persist_fd(k), "abc", 3, MIB), 3);
    before = persist_identity(k);
    cr_expect_eq(before.bytes, 4 * MIB);
    cr_assert_eq(persist_create(k, 5000, &p), 0);
    memcpy(p + 4990, "end", 3);
    cr_assert_eq(persist_commit(k), 0);
    persist_close(k);
    for (unsigned i = 0; i < 2; i++) { /* not taken: there for another try */
        k = directory_open();
        cr_expect_not_null(persist_snapshot(k, &n));
        persist_close(k);
    }
    k = directory_open();
    cr_expect_eq(memcmp(persist_snapshot(k, &n) + 4990, "end", 3), 0);
    cr_expect_geq(n, 5000u);
    cr_expect_eq(persist_identity(k).inode, before.inode);
    cr_assert_eq(persist_take(k), 0);
    cr_expect_eq(memcmp(persist_snapshot(k, &n) + 4990, "end", 3), 0, "its bytes stay");
    persist_forget(k);
    persist_close(k); /* without a snapshot: the arena's file goes */
    k = directory_open();
    cr_expect_null(persist_snapshot(k, &n));
    cr_expect_eq(persist_identity(k).inode, 0u);
    persist_close(k);
    directory_remove();
}

Test(kept, a_file_of_others_is_not_used)
{
    char path[128], why[PERSIST_WHY_BYTES];
    struct persist *k;
    size_t n;

    directory_make();
    snprintf(path, sizeof(path), "%s/" CONFIG_KEEP_ARENA, directory);
    cr_assert_eq(symlink("/dev/zero", path), 0);
    k = directory_open();
    cr_expect_null(persist_snapshot(k, &n));
    cr_assert_eq(persist_reset(k, MIB), 0);
    persist_close(k);
    directory_remove();
    cr_expect_eq(persist_open(directory, &k, why), -ENOENT);
    cr_expect_not_null(strstr(why, directory), "%s", why);
}

Test(kept, a_directory_that_takes_no_file_is_told_and_given_back)
{
    char path[128], why[PERSIST_WHY_BYTES];
    struct snapshot *kept = NULL;

    directory_make();
    snprintf(path, sizeof(path), "%s/" CONFIG_KEEP_ARENA, directory);
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_expect_lt(snapshot_open(directory, MIB, MIB, &kept, why), 0);
    cr_expect_null(kept);
    cr_expect_not_null(strstr(why, directory), "%s", why);
    cr_assert_eq(rmdir(path), 0);
    cr_assert_eq(snapshot_open(directory, MIB, MIB, &kept, why), 0, "its lock is free: %s", why);
    snapshot_close(kept);
    directory_remove();
}

/* ---- slots ---- */

static uint32_t ready_n;

static void in_turn_cb(void *ctx, uint32_t slab, void *base, uint64_t bytes)
{
    (void)ctx, (void)base, (void)bytes;
    cr_assert_eq(slab, ready_n++);
}

static void arena_open(int fd, uint64_t size)
{
    ready_n = 0;
    begin();
    open_arena_as(
        (struct arena_config){.size = size, .file = true, .fd = fd, .slab_ready_cb = in_turn_cb});
}

static void arena_grow_all(uint64_t bytes)
{
    cr_assert_eq(arena_grow(arena), 0);
    await_ready(bytes);
}

Test(kept, slots_are_where_they_were)
{
    struct persist *k;
    slot_ref slots[40], kept[40];
    uint32_t slab[40], number[40];

    directory_make();
    k = directory_open();
    cr_assert_eq(persist_reset(k, 8 * MIB), 0);
    arena_open(persist_fd(k), 8 * MIB);
    arena_grow_all(8 * MIB);
    for (unsigned i = 0; i < 40; i++) {
        slots[i] = arena_alloc(arena, i % 2 ? MIB / 8 : MIB / 4 - 5, i, NUMA_NONE);
        cr_assert_neq(slots[i], 0u);
        memset(arena_memory(arena, slots[i], NULL), (int)i + 1, 100);
        arena_slot_position(arena, slots[i], &slab[i], &number[i]);
    }
    end();
    arena_open(persist_fd(k), 8 * MIB);
    for (unsigned i = 0; i < 40; i++) {
        kept[i] = arena_slot_take(arena, slab[i], number[i], i % 2 ? MIB / 8 : MIB / 4 - 5);
        cr_assert_eq(kept[i], slots[i]);
        cr_expect_eq(arena_slot_ready(arena, kept[i]), -EAGAIN);
    }
    cr_expect_eq(arena_slot_take(arena, slab[0], number[0], MIB / 4 - 5), 0u, "taken");
    cr_expect_eq(arena_slot_take(arena, slab[0], 1, MIB / 8), 0u, "another size");
    cr_expect_eq(arena_slot_take(arena, slab[0], 4, MIB / 4), 0u, "behind the slab");
    cr_expect_eq(arena_slot_take(arena, 8, 0, MIB), 0u, "behind the arena");
    cr_expect_eq(arena_slot_take(arena, 7, 0, 2 * MIB), 0u, "longer than a slab");
    cr_expect_eq(arena_alloc(arena, 4096, 0, NUMA_NONE), 0u, "nothing is ready");
    arena_slot_free(arena, kept[1]); /* before its slab is ready */
    arena_grow_all(8 * MIB);
    cr_expect_eq(arena_bytes_used(arena), 20 * (MIB / 4) + 19 * (MIB / 8));
    for (unsigned i = 0; i < 40; i++) {
        if (i == 1)
            continue;
        cr_expect_eq(arena_slot_ready(arena, kept[i]), 0);
        cr_assert_eq(((uint8_t *)arena_memory(arena, kept[i], NULL))[99], i + 1, "slot %u", i);
    }
    /* new ones lie between them, never on them */
    for (unsigned i = 0; i < 5; i++)
        cr_assert_neq(arena_alloc(arena, MIB / 8, 99, NUMA_NONE), 0u);
    cr_expect_eq(arena_alloc(arena, MIB / 8, 99, NUMA_NONE), 0u);
    for (unsigned i = 0; i < 40; i++)
        if (i != 1)
            arena_slot_free(arena, kept[i]);
    cr_expect_eq(arena_bytes_used(arena), 5 * MIB / 8);
    end();
    persist_close(k);
    directory_remove();
}

static void ended_cb(void *ctx)
{
    ++*(unsigned *)ctx;
}

/* A small tmpfs of the test's own, where the kernel lets it. */
Test(kept, where_the_room_ends_the_arena_ends)
{
    unsigned ended = 0;
    struct arena_config c = {.size = 8 * MIB, .file = true, .ended_cb = ended_cb, .ctx = &ended};
    uv_async_t awake;
    struct persist *k;
    slot_ref slot;

    directory_make();
    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("none", directory, "tmpfs", 0, "size=3m") < 0) {
        directory_remove();
        cr_skip_test("no mounts of its own");
    }
    k = directory_open();
    cr_assert_eq(persist_reset(k, 8 * MIB), 0);
    c.fd = persist_fd(k);
    begin();
    cr_assert_eq(uv_async_init(&loop, &awake, NULL), 0);
    open_arena_as(c);
    slot = arena_slot_take(arena, 7, 0, MIB);
    cr_assert_neq(slot, 0u);
    cr_assert_eq(arena_grow(arena), 0);
    for (int i = 0; i < 5000 && ended == 0; i++) {
        uv_run(&loop, UV_RUN_NOWAIT);
        uv_sleep(1);
    }
    cr_expect_eq(ended, 1u);
    cr_expect_eq(arena_bytes_ready(arena), 3 * MIB);
    cr_expect_eq(arena_bytes_configured(arena), 3 * MIB);
    cr_expect_eq(arena_slot_ready(arena, slot), -ENOSPC);
    arena_slot_free(arena, slot);
    for (unsigned i = 0; i < 3; i++) {
        slot = arena_alloc(arena, MIB, 1, NUMA_NONE);
        cr_assert_neq(slot, 0u);
        memset(arena_memory(arena, slot, NULL), 1, MIB);
    }
    cr_expect_eq(arena_alloc(arena, MIB, 1, NUMA_NONE), 0u);
    uv_close((uv_handle_t *)&awake, NULL);
    end();
    persist_close(k);
    cr_expect_eq(umount(directory), 0);
    directory_remove();
}
