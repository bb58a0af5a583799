/* What tests of relocations share: a cache with mappings, a copier that obeys the test, and a
 * worker that reads the table of sequence numbers. */
#ifndef UCMD_TESTS_RELOCATE_RIG_H
#define UCMD_TESTS_RELOCATE_RIG_H

#include "daemon/mapping/relocate.h"
#include "proto/memory/mapping.h"
#include "tests/unit/cache/cache_rig.h"

#include <sys/mman.h>

#define MAPPINGS 2u /* slabs, of 4 parts of `one` each */

/* ---- callers that want a part in the mapping ---- */

static struct relocations relocations;
static struct arena_group *group, *other_group;
static struct ns *other;

struct mover {
    struct mapping_move m;
    int calls, status;
};

static inline void moved_cb(struct mapping_move *m, int status)
{
    struct mover *mv = (struct mover *)m;

    mv->calls++;
    mv->status = status;
}

static inline int move(struct mover *mv, block_ref ref, uint32_t part)
{
    struct arena_group *g =
        strcmp(cache_ns(rig.cache, ref)->identity.tenant, "other") == 0 ? other_group : group;

    *mv = (struct mover){.m = {.done_cb = moved_cb}};
    return mapping_move(&relocations, ref, part, g, &mv->m);
}

static void changed_cb(void *ctx)
{
    mapping_slots_changed(ctx);
}

static uv_async_t awake; /* what mappings wait for keeps no loop alive */

static inline void relocate_open_with(uint32_t slabs)
{
    rig.mappings = slabs;
    rig_open();
    relocations = (struct relocations){
        .cache = rig.cache, .arena = rig.arena, .index = rig.index, .metrics = &rig.metrics};
    relocations_open(&relocations);
    grant_watch(rig.arena, &(struct grant_watcher){.changed_cb = changed_cb, .ctx = &relocations});
    other = space_of("other", "one", 1, MIB / 4 / LAYERS);
    cr_assert_eq(grant_group_open(rig.arena, "t", &group), 0);
    cr_assert_eq(grant_group_open(rig.arena, "other", &other_group), 0);
    cache_copier_attach(rig.cache, copy_cb, &rig);
    cr_assert_eq(uv_async_init(&rig.loop, &awake, NULL), 0);
}

static inline void relocate_open(void)
{
    relocate_open_with(MAPPINGS);
}

static inline void relocate_close(void)
{
    iterate(); /* cancelled ones end */
    cr_expect_eq(cache_moves(rig.cache), 0u);
    cr_expect_eq(n_copies, 0u);
    grant_group_close(rig.arena, group);
    grant_group_close(rig.arena, other_group);
    grant_watch(rig.arena, NULL);
    relocations_close(&relocations);
    uv_close((uv_handle_t *)&awake, NULL);
    rig_close();
}

/* ---- blocks ---- */

/* In DRAM and below, so that no write uses it; held. */
static inline block_ref stored(struct ns *ns, uint64_t number)
{
    block_ref ref = store(ns, number);

    settle();
    return ref;
}

/* Until so many events of that kind have come. */
static inline void await(enum arena_granted_event event, unsigned n)
{
    for (int i = 0; i < 10000 && rig.mapping_events[event] < n; i++) {
        iterate();
        uv_sleep(1);
    }
    cr_assert_geq(rig.mapping_events[event], n);
    iterate();
}

/* Waits for the first slab that is granted. */
static inline void move_granted(struct mover *mv, block_ref ref)
{
    cr_assert_eq(move(mv, ref, 0), CACHE_PENDING);
    await(GRANTED_READY, 1);
}

static inline void move_ended(const struct mover *mv, int status)
{
    cr_assert_eq(mv->calls, 1);
    cr_assert_eq(mv->status, status);
}

/* Moves an otherwise unused part of a block in DRAM. The mover has a reference. */
static inline struct grant_place moved(block_ref ref, uint32_t part)
{
    unsigned ready = rig.mapping_events[GRANTED_READY];
    struct grant_place place;
    struct mover mv;

    cr_assert_eq(move(&mv, ref, part), CACHE_PENDING);
    if (n_copies == 0)
        await(GRANTED_READY, ready + 1);
    copy_next();
    move_ended(&mv, 0);
    cr_expect(mv.m.copied);
    cr_expect_not(mv.m.read);
    cr_assert(mapping_place(&relocations, ref, part, &place));
    cr_expect(marks_right(ref, part));
    return place;
}

static inline bool in_dram(struct ns *ns, uint64_t number)
{
    block_ref ref = find(ns, number);

    return ref != 0 && cache_in_dram(rig.cache, ref);
}

/* Whether a worker that knows the place finds its bytes there. */
static inline bool readable(struct arena_group *g, const struct grant_place *place)
{
    struct ucm_mapping_header h;
    int fd = grant_group_table(g, &h);
    uint64_t bytes = ucm_mapping_table_bytes(h.slabs, h.slots_per_slab);
    char *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    const _Atomic uint64_t *table = (const _Atomic uint64_t *)(p + UCM_MAPPING_HEADER_BYTES);
    bool right;

    cr_assert_neq((void *)p, MAP_FAILED);
    right = ucm_mapping_begin(
        &table[ucm_mapping_entry(h.slots_per_slab, place->mapping, place->slot)], place->seq);
    munmap(p, bytes);
    return right;
}

#endif
