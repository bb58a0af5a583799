/* What the cache's tests share: a cache over a tier that does what a test says, when it says it. */
#ifndef UCMD_TESTS_CACHE_RIG_H
#define UCMD_TESTS_CACHE_RIG_H

#include "daemon/cache/cache.h"
#include "daemon/cache/internal.h"
#include "daemon/lookup_table/tables.h"
#include "daemon/mapping/grant.h"
#include "proto/errors.h"
#include "tests/unit/index/index_secret.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- a tier that does what a test says ---- */

#define PLACES_MAX 4096

struct place {
    bool live;
    uint64_t owner, bytes;
    uint8_t *data;
    uint64_t sequence;
};

struct tier {
    struct tier_callbacks callbacks;
    struct list pending;
    struct place place[PLACES_MAX]; /* by loc - 1 */
    uint64_t places;
    unsigned n_pending, n_live, submits, forgets;
    int refuse;        /* what submit answers, 0: accepts */
    unsigned refuse_n; /* so often */
    bool recovering;
    struct tier_ns_record *naming; /* the last one that was asked for */
};

static inline int fake_submit(struct tier *t, struct tier_io *io)
{
    t->submits++;
    if (t->refuse_n > 0) {
        t->refuse_n--;
        return t->refuse;
    }
    if (io->op == TIER_READ || io->op == TIER_READ_LAYERS) {
        const struct place *p = &t->place[io->place.loc - 1];

        cr_assert(io->place.loc >= 1 && io->place.loc <= t->places && p->live, "a read of nothing");
        cr_assert(p->bytes == io->bytes && p->owner == io->name.owner);
    }
    list_push_back(&t->pending, &io->link);
    t->n_pending++;
    return 0;
}

static inline void fake_forget(struct tier *t, const struct tier_place *place, uint64_t bytes)
{
    struct place *p = &t->place[place->loc - 1];

    t->forgets++;
    cr_assert(place->loc >= 1 && place->loc <= t->places && p->live, "forgotten twice");
    cr_assert_eq(p->bytes, bytes);
    p->live = false;
    t->n_live--;
    free(p->data);
}

static inline void fake_stats(struct tier *t, struct tier_stats *out)
{
    *out = (struct tier_stats){.recovering = t->recovering};
}

static inline void fake_naming(struct tier *t, struct tier_ns_record *n)
{
    t->naming = n;
}

static inline uint64_t fake_sequence(struct tier *t, uint64_t loc)
{
    return t->place[loc - 1].sequence;
}

static const struct tier_ops fake_ops = {.name = "fake",
                                         .sequence = fake_sequence,
                                         .submit = fake_submit,
                                         .forget = fake_forget,
                                         .stats = fake_stats,
                                         .ns_record = fake_naming};

/* Tests mark a few pages of a part and write many parts. A page without a mark takes no memory. */
static inline uint8_t *fake_copy(const uint8_t *from, uint64_t bytes)
{
    static const uint8_t nothing[4096];
    uint8_t *copy = calloc(1, bytes);

    cr_assert(copy);
    for (uint64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < sizeof(nothing) ? bytes - at : sizeof(nothing);
        if (memcmp(from + at, nothing, n) != 0)
            memcpy(copy + at, from + at, n);
    }
    return copy;
}

static inline void fake_finish(struct tier *t, struct tier_io *io, int status)
{
    list_remove(&io->link);
    t->n_pending--;
    if (status == 0 && io->op == TIER_WRITE) {
        struct place *p = &t->place[t->places++];

        cr_assert_leq(t->places, (uint64_t)PLACES_MAX);
        *p = (struct place){true, io->name.owner, io->bytes, fake_copy(io->data, io->bytes),
                            t->places};
        io->place = (struct tier_place){.loc = t->places, .checksum = io->bytes};
        t->n_live++;
    } else if (status == 0 && io->op == TIER_READ) {
        memcpy(io->data, t->place[io->place.loc - 1].data, io->bytes);
    } else if (status == 0 && io->op == TIER_READ_LAYERS) {
        memset(io->data, 0xDD, tier_layers_room(io->layer_bytes, io->layer, io->layers));
        memcpy((char *)io->data + tier_layers_at(io->layer_bytes, io->layer),
               t->place[io->place.loc - 1].data + io->layer * io->layer_bytes,
               io->layers * io->layer_bytes);
    } else if (io->op == TIER_READ) {
        memset(io->data, 0xDD, io->bytes);
    }
    io->done_cb(io, status);
}

static inline struct tier_io *fake_at(struct tier *t, unsigned i)
{
    struct list *n = t->pending.next;

    while (i-- > 0)
        n = n->next;
    cr_assert(n != &t->pending, "nothing is under way");
    return LIST_ENTRY(n, struct tier_io, link);
}

static inline void fake_next(struct tier *t, int status)
{
    fake_finish(t, fake_at(t, 0), status);
}

static inline bool fake_reclaim(struct tier *t, uint64_t loc)
{
    struct place *p = &t->place[loc - 1];

    cr_assert(p->live);
    if (!t->callbacks.drop_cb(t->callbacks.ctx, p->owner, loc))
        return false;
    cr_assert(p->live);
    p->live = false;
    t->n_live--;
    free(p->data);
    return true;
}

/* The tier finds that the part at `loc` is damaged. */
static inline void fake_lose(struct tier *t, uint64_t loc)
{
    t->callbacks.lost_cb(t->callbacks.ctx, t->place[loc - 1].owner, loc);
}

/* ---- the rig ---- */

/* 8 slots of the parts of `one`, 16 of those of `two`. */
#define MIB (1u << 20)
#define LAYERS 2u

static struct {
    uv_loop_t loop;
    struct metrics metrics;
    struct index *index;
    struct policy *policy;
    struct arena *arena;
    struct lookup_tables *lookup_tables;
    struct cache *cache;
    struct tier tier;
    struct ns *one, *two;
    struct pending_writes pending_writes[3];
    const struct numa *numa; /* set before rig_open: nodes that memory lies on */
    uint64_t ready_bytes;    /* set before rig_open: how much memory it waits for; 0: all */
    uint64_t max_blocks;     /* set before rig_open: of the index; 0: 1000 */
    uint64_t slab;           /* set before rig_open: bytes of each of the two; 0: MIB */
    bool apart;              /* set before rig_open: `two` is tenant "u"'s */
    uint32_t mappings;       /* set before rig_open: slabs that may be granted */
    unsigned mapping_events[GRANTED_GONE + 1];
} rig;

static inline void slab_ready_cb(void *ctx, uint32_t slab, void *base, uint64_t bytes)
{
    (void)ctx;
    (void)slab;
    (void)base;
    (void)bytes;
}

static inline void mapping_cb(void *ctx, enum arena_granted_event event, uint32_t mapping,
                              void *base, uint64_t bytes)
{
    (void)ctx;
    (void)base;
    (void)bytes;
    rig.mapping_events[event]++;
    if (event == GRANTED_GOES)
        grant_let_go(rig.arena, mapping);
}

static inline struct ns *space_with(const char *tenant, const char *model, uint32_t parts,
                                    const uint32_t *layers, uint64_t layer_bytes)
{
    struct ns_identity id = {tenant, model, "",     "b",         "l",  16,
                             16,     parts, layers, layer_bytes, NULL, 0};
    struct ucm_error e;
    struct ns *ns = NULL;

    cr_assert_eq(index_ns_open(rig.index, &id, NULL, &ns, &e), 0);
    ns->record = NS_RECORD_WRITTEN; /* the fake tier keeps no names */
    return ns;
}

static inline struct ns *space_of(const char *tenant, const char *model, uint32_t parts,
                                  uint64_t layer_bytes)
{
    static const uint32_t layers[] = {LAYERS, LAYERS};

    return space_with(tenant, model, parts, layers, layer_bytes);
}

static inline struct ns *space(const char *model, uint32_t parts, uint64_t layer_bytes)
{
    return space_of("t", model, parts, layer_bytes);
}

static inline void arena_wait(uint64_t bytes)
{
    uv_async_t awake; /* growing alone keeps no loop alive */

    cr_assert_eq(uv_async_init(&rig.loop, &awake, NULL), 0);
    for (int i = 0; i < 5000 && arena_bytes_ready(rig.arena) < bytes; i++) {
        uv_run(&rig.loop, UV_RUN_NOWAIT);
        uv_sleep(1);
    }
    cr_assert_eq(arena_bytes_ready(rig.arena), bytes);
    uv_close((uv_handle_t *)&awake, NULL);
    uv_run(&rig.loop, UV_RUN_NOWAIT);
}

static inline void rig_open(void)
{
    struct cache_config cc = {.loop = &rig.loop, .metrics = &rig.metrics, .backlog_bytes = MIB};
    uint64_t slab = rig.slab > 0 ? rig.slab : MIB;
    struct arena_config ac = {.size = 2 * slab,
                              .slab = slab,
                              .prefault = rig.numa != NULL,
                              .numa = rig.numa,
                              .slab_ready_cb = slab_ready_cb,
                              .granted = rig.mappings * slab,
                              .granted_max = 2 * rig.mappings * slab,
                              .granted_cb = mapping_cb};

    cr_assert_eq(uv_loop_init(&rig.loop), 0);
    cr_assert_eq(index_new(rig.max_blocks > 0 ? rig.max_blocks : 1000, 32, &rig.index), 0);
    index_secret_fix(rig.index);
    cr_assert_eq(policy_new(rig.index, 8, &rig.policy), 0);
    cc.index = rig.index;
    cc.policy = rig.policy;
    cr_assert_eq(cache_new(&cc, &rig.cache), 0);
    list_init(&rig.tier.pending);
    rig.tier.callbacks = cache_tier_callbacks(rig.cache);
    cache_tier_attach(rig.cache, &fake_ops, &rig.tier);
    cr_assert_eq(arena_new(&rig.loop, &ac, &rig.arena), 0);
    arena_wait(rig.ready_bytes > 0 ? rig.ready_bytes : 2 * slab);
    cache_arena_attach(rig.cache, rig.arena);
    rig.one = space("one", 1, MIB / 4 / LAYERS);
    rig.two = space_of(rig.apart ? "u" : "t", "two", 2, MIB / 8 / LAYERS);
    for (int i = 0; i < 3; i++)
        pending_writes_init(&rig.pending_writes[i]);
    cr_assert_eq(lookup_tables_new(&(struct lookup_tables_config){.loop = &rig.loop,
                                                                  .index = rig.index,
                                                                  .cache = rig.cache},
                                   &rig.lookup_tables),
                 0);
}

static inline void iterate(void)
{
    cr_assert_null(chore_asleep(&rig.cache->chores), "nobody would do it");
    uv_run(&rig.loop, UV_RUN_NOWAIT);
    cr_assert_null(chore_asleep(&rig.cache->chores), "nobody would do it");
}

static inline void iterations(unsigned n)
{
    while (n-- > 0)
        iterate();
}

/* The tier answers so to the next n operations. */
static inline void tier_refuses(int answer, unsigned n)
{
    rig.tier.refuse = answer;
    rig.tier.refuse_n = n;
}

/* All operations under way there end well. */
static inline void tier_finish(void)
{
    while (rig.tier.n_pending > 0)
        fake_next(&rig.tier, 0);
}

/* Some iterations of the event loop. The operations that they begin end well. */
static inline void settle(void)
{
    for (int i = 0; i < 10; i++) {
        iterate();
        tier_finish();
    }
}

static inline void rig_close(void)
{
    tier_finish();
    lookup_tables_free(rig.lookup_tables);
    cache_free(rig.cache);
    arena_free(rig.arena);
    uv_run(&rig.loop, UV_RUN_DEFAULT);
    cr_expect_eq(uv_loop_close(&rig.loop), 0);
    policy_free(rig.policy);
    index_free(rig.index);
    for (uint64_t i = 0; i < rig.tier.places; i++)
        if (rig.tier.place[i].live)
            free(rig.tier.place[i].data);
}

static inline void key_of(uint64_t number, uint8_t key[UCM_MAX_KEY_BYTES])
{
    memset(key, 0, UCM_MAX_KEY_BYTES);
    memcpy(key, &number, sizeof(number));
}

static inline block_ref find(struct ns *ns, uint64_t number)
{
    uint8_t key[UCM_MAX_KEY_BYTES];

    key_of(number, key);
    return index_find(rig.index, ns, key);
}

static inline block_ref open_block(struct ns *ns, uint64_t number)
{
    uint8_t key[UCM_MAX_KEY_BYTES];
    block_ref ref;

    key_of(number, key);
    ref = cache_open(rig.cache, ns, key);
    cr_assert_neq(ref, 0u);
    return ref;
}

static inline struct block *block_of(block_ref ref)
{
    return index_block(rig.index, ref);
}

/* What a layer's first and last 8 bytes are. */
static inline uint64_t mark_of(const struct block *b, uint32_t part, uint32_t layer)
{
    uint64_t number;

    memcpy(&number, b->key, sizeof(number));
    return ((number << 8 | b->ns) << 8 | part) << 8 | layer;
}

static inline void marks_write(block_ref ref, uint32_t part, uint8_t *slot, uint32_t layer,
                               uint32_t n)
{
    const struct ns *ns = cache_ns(rig.cache, ref);
    uint64_t bytes = ns->identity.layer_bytes;

    for (uint32_t s = layer; s < layer + n; s++) {
        uint64_t mark = mark_of(block_of(ref), part, s);

        memcpy(slot + s * bytes, &mark, 8);
        memcpy(slot + (s + 1) * bytes - 8, &mark, 8);
    }
}

/* Where a part that the test uses lies, or where a pending write will put it. */
static inline uint8_t *memory_of(block_ref ref, uint32_t part)
{
    struct span span;

    cr_assert_eq(span_part(rig.cache, ref, part, &span), 0);
    return span.origin;
}

static inline uint8_t *memory_to_fill(const struct pending_write *f)
{
    return arena_memory(rig.arena, f->slot, NULL);
}

static inline bool marks_right(block_ref ref, uint32_t part)
{
    const struct ns *ns = cache_ns(rig.cache, ref);
    const uint8_t *slot = memory_of(ref, part);
    uint64_t bytes = ns->identity.layer_bytes;

    for (uint32_t s = 0; s < LAYERS; s++) {
        uint64_t mark = mark_of(block_of(ref), part, s);

        if (memcmp(slot + s * bytes, &mark, 8) != 0 ||
            memcmp(slot + (s + 1) * bytes - 8, &mark, 8) != 0)
            return false;
    }
    return true;
}

static inline int claim(block_ref ref, uint32_t part, uint32_t layer, uint32_t n,
                        struct pending_write **out)
{
    return pending_write_claim(rig.cache, &rig.pending_writes[0], ref, part, layer, n, NUMA_NONE,
                               out);
}

static inline int dump(block_ref ref, uint32_t part, uint32_t layer, uint32_t n)
{
    struct pending_write *f;
    int rc = claim(ref, part, layer, n, &f);

    if (rc != 0)
        return rc;
    marks_write(ref, part, memory_to_fill(f), layer, n);
    pending_write_done(rig.cache, f, n, true);
    return 0;
}

/* A whole block in DRAM; returned held. */
static inline block_ref store(struct ns *ns, uint64_t number)
{
    block_ref ref = open_block(ns, number);

    for (uint32_t p = 0; p < ns->identity.parts; p++)
        cr_assert_eq(dump(ref, p, 0, ns->identity.layers[p]), 0);
    return ref;
}

static inline void drop(block_ref ref)
{
    cache_unlease(rig.cache, ref);
}

static inline void drop_all(const block_ref *refs, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        drop(refs[i]);
}

/* Blocks first to first + n - 1 in DRAM, not held. */
static inline void store_all(struct ns *ns, uint64_t first, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        drop(store(ns, first + i));
}

/* For a caller that uses the part and holds the block. */
static inline void put_and_drop(block_ref ref, uint32_t part)
{
    cache_put(rig.cache, ref, part);
    drop(ref);
}

/* A whole block that lies on the tier only; returned held. */
static inline block_ref store_below(struct ns *ns, uint64_t number)
{
    block_ref ref = store(ns, number);

    iterate();
    tier_finish();
    drop(ref);
    cr_assert_eq(cache_evict(rig.cache, ref, CACHE_DRAM), CACHE_EVICT_DONE);
    cache_lease(rig.cache, ref);
    return ref;
}

/* Part 0 lies on the tier and is longer than a slab, as after a restart with smaller ones. */
static inline void place_long(block_ref ref)
{
    struct tier *t = &rig.tier;

    t->place[t->places++] = (struct place){true, part_owner(ref, 0), 2 * MIB, malloc(1), 1};
    t->n_live++;
    part_set_nvme(rig.cache, ref, 0, &(struct tier_place){.loc = t->places});
}

static inline void expect_nothing_held(void)
{
    cr_expect_eq(index_blocks(rig.index), 0u);
    cr_expect_eq(arena_bytes_used(rig.arena), 0u);
    cr_expect_eq(rig.tier.n_live, 0u);
    cr_expect_eq(rig.cache->users, 0u);
    cr_expect_eq(rig.cache->dirty_bytes, 0u);
}

/* A waiter for a read. */
struct waiter {
    struct cache_wait w;
    int calls, status;
    struct waiter *cancels; /* when it has ended */
};

static inline void waiter_cb(struct cache_wait *w, int status)
{
    struct waiter *me = (struct waiter *)w;

    me->calls++;
    me->status = status;
    if (me->cancels)
        cache_get_cancel(rig.cache, &me->cancels->w);
}

static inline int get(struct waiter *w, block_ref ref, uint32_t part)
{
    *w = (struct waiter){.w = {.done_cb = waiter_cb}};
    return cache_get(rig.cache, ref, part, 0, NUMA_NONE, &w->w);
}

/* Uses a part that is in DRAM. */
static inline void use(block_ref ref, uint32_t part)
{
    struct cache_wait w = {0};

    cr_assert_eq(cache_get(rig.cache, ref, part, 0, NUMA_NONE, &w), CACHE_READY);
}

/* A waiter for a part that is to be durable. */
struct promise {
    struct cache_durable d;
    int status;
};

#define NOT_YET 1

static inline void promise_cb(struct cache_durable *d, int status)
{
    ((struct promise *)d)->status = status;
}

static inline void promise(struct promise *p, block_ref ref)
{
    *p = (struct promise){.d.done_cb = promise_cb, .status = NOT_YET};
    cr_assert_eq(cache_durable(rig.cache, &p->d, ref, 0), 0);
}

static int check_status __attribute__((unused)); /* of the verify that ended last */

static inline void check_cb(struct cache_check *k, int status)
{
    (void)k;
    check_status = status;
}

/* ---- a copier: copies when a test says so ---- */

static struct cache_copy *copies[64];
static unsigned n_copies;

static inline void copy_cb(void *ctx, struct cache_copy *k)
{
    cr_assert_eq(ctx, &rig);
    cr_assert_lt(n_copies, 64u);
    copies[n_copies++] = k;
}

static inline void copy_next(void)
{
    struct cache_copy *k = copies[0];

    cr_assert_gt(n_copies, 0u);
    memmove(copies, copies + 1, --n_copies * sizeof(copies[0]));
    memcpy(k->to, k->from, k->bytes);
    k->done_cb(k);
}

/* A waiter for space. */
struct asker {
    struct cache_retry r;
    int calls;
    bool again;
};

static inline void asker_cb(struct cache_retry *r)
{
    struct asker *a = (struct asker *)r;

    a->calls++;
    if (a->again)
        a->again = cache_wait_for(rig.cache, r, WAIT_SLOT);
}

static inline void ask(struct asker *a)
{
    *a = (struct asker){.r = {.retry_cb = asker_cb}};
    list_init(&a->r.link);
}

static inline void ask_for(struct asker *a, enum wait_for what)
{
    ask(a);
    cr_assert(cache_wait_for(rig.cache, &a->r, what));
}

#endif
