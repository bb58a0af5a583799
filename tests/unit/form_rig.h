/* For the tests of blocks in two forms: coded namespaces of rig.one and rig.two, and a coder that builds when a test says so. */
#ifndef UCMD_TESTS_FORM_RIG_H
#define UCMD_TESTS_FORM_RIG_H

#include "tests/unit/cache_share_rig.h"

#define BUILDS_MAX 4

struct build {
    bool used;
    struct list waiters; /* of cache_wait.link */
    block_ref base, coded;
    uint32_t part;
    struct cache_fill *fill;
};

static struct {
    struct ns *one, *two; /* their blocks are half as long */
    struct cache_fills fills;
    struct build build[BUILDS_MAX];
    unsigned n, begun, most;
} coder;

static inline int coder_cb(void *ctx, block_ref base, block_ref coded, uint32_t part,
                           struct cache_wait *w)
{
    struct build *b = coder.build;
    struct cache *c = rig.cache;
    int rc = cache_get(c, coded, part, 0, NUMA_NONE, w);

    (void)ctx;
    if (rc != -ENOENT)
        return rc;
    if (block_of(coded)->part[part].dram == PART_DRAM_FILLING) {
        for (int i = 0; i < BUILDS_MAX; i++, b++)
            if (b->used && b->coded == coded && b->part == part) {
                list_push_back(&b->waiters, &w->link);
                return CACHE_PENDING;
            }
        return -EINPROGRESS;
    }
    if (coder.n == coder.most)
        return -EBUSY;
    while (b->used)
        b++;
    rc = cache_get(c, base, part, 0, NUMA_NONE, w);
    if (rc == CACHE_PENDING) {
        cache_get_cancel(c, w);
        return -EIO; /* these tests encode from DRAM only */
    }
    if (rc < 0)
        return rc;
    cr_assert(marks_right(base, part), "what is encoded is what was dumped");
    rc = cache_fill_claim(c, &coder.fills, coded, part, 0, SHARDS, NUMA_NONE, &b->fill);
    if (rc != 0) {
        cache_put(c, base, part);
        return rc;
    }
    *b = (struct build){.used = true, .base = base, .coded = coded, .part = part, .fill = b->fill};
    list_init(&b->waiters);
    list_push_back(&b->waiters, &w->link);
    coder.n++;
    coder.begun++;
    cache_lease(c, base);
    cache_lease(c, coded);
    return CACHE_PENDING;
}

static inline void build_end(struct build *b, int status)
{
    struct build ended = *b;
    struct cache *c = rig.cache;
    struct list waiters, *node;

    list_init(&waiters);
    list_splice_front(&waiters, &b->waiters);
    b->used = false;
    coder.n--;
    cr_assert(marks_right(ended.base, ended.part), "nobody wrote over it meanwhile");
    marks_write(ended.coded, ended.part, memory_to_fill(ended.fill), 0, SHARDS);
    cache_put(c, ended.base, ended.part);
    cache_fill_done(c, ended.fill, SHARDS, status == 0);
    cache_unlease(c, ended.base);
    cache_unlease(c, ended.coded);
    while ((node = list_pop_front(&waiters)) != NULL) {
        struct cache_wait *w = LIST_ENTRY(node, struct cache_wait, link);
        int rc = status;

        if (rc == 0 && block_of(ended.coded)->part[ended.part].dram != PART_DRAM_READY)
            rc = -ENOENT; /* evicted by name */
        if (rc == 0)
            rc = cache_get(c, ended.coded, ended.part, 0, NUMA_NONE, w);
        w->done_cb(w, rc == CACHE_READY ? 0 : rc);
    }
}

/* Ends the oldest build, or returns false. */
static inline bool build_next(int status)
{
    for (int i = 0; i < BUILDS_MAX; i++)
        if (coder.build[i].used) {
            build_end(&coder.build[i], status);
            return true;
        }
    return false;
}

static inline struct ns *coded_of(struct ns *base, const char *model)
{
    struct ns *ns = space(model, base->identity.parts, base->identity.shard_bytes / 2);

    index_ns_derive(rig.index, ns, base, NULL);
    return ns;
}

static inline void open_forms(void)
{
    open_shared();
    memset(&coder, 0, sizeof(coder));
    cache_fills_init(&coder.fills);
    coder.fills.keep = true;
    coder.most = BUILDS_MAX;
    coder.one = coded_of(rig.one, "one, coded");
    coder.two = coded_of(rig.two, "two, coded");
    cache_coder_attach(rig.cache, coder_cb, NULL);
}

static inline void close_forms(void)
{
    while (build_next(-ECANCELED))
        ;
    cr_expect(list_empty(&coder.fills.list));
    close_shared();
}

/* A part of a dump that wants the other form. */
static inline int dump_form(block_ref ref, uint32_t part, bool below)
{
    struct cache_fill *f;
    struct ns *ns = cache_ns(rig.cache, ref);
    int rc = claim(ref, part, 0, SHARDS, &f);

    if (rc != 0)
        return rc;
    cache_fill_form(rig.cache, f, ns == rig.one ? coder.one : coder.two, below);
    marks_write(ref, part, memory_to_fill(f), 0, SHARDS);
    cache_fill_done(rig.cache, f, SHARDS, true);
    return 0;
}

/* A whole block in DRAM whose other form is wanted; not held. */
static inline block_ref store_form(struct ns *ns, uint64_t number, bool below)
{
    block_ref ref = open_block(ns, number);

    for (uint32_t p = 0; p < ns->identity.parts; p++)
        cr_assert_eq(dump_form(ref, p, below), 0);
    drop(ref);
    return ref;
}

static inline void turns(void)
{
    for (int i = 0; i < 10; i++)
        turn();
}

/* Until nothing is under way. */
static inline void quiet(void)
{
    bool some = true;

    while (some) {
        turns();
        some = build_next(0);
        if (rig.tier.n_pending > 0) {
            fake_next(&rig.tier, 0);
            some = true;
        }
        if (share.n_pending > 0) {
            fake_share_next(&share, 0);
            some = true;
        }
    }
}

/* What the block has where, as "dn": d in DRAM, n on NVMe, s on the shared tier; "" if there is none. */
static inline const char *at(struct ns *ns, uint64_t number)
{
    static char text[4][4];
    static unsigned turn_of;
    char *out = text[turn_of++ % 4];
    block_ref ref = find(ns, number);
    const struct part *p = ref ? block_of(ref)->part : NULL;

    snprintf(out, 4, "%s%s%s", p && p->dram == PART_DRAM_READY ? "d" : "",
             p && p->nvme == PART_NVME_READY ? "n" : "",
             p && p->share == PART_SHARE_KNOWN ? "s" : "");
    return out;
}

static inline unsigned form_users(const struct ns *ns)
{
    uint64_t n = 0;

    for (unsigned i = 0; ns->coded_forms && i < NS_CODED_FORMS; i++)
        n += ns->coded_forms[i].users;
    return (unsigned)n;
}

/* Without the shared tier. */
static inline void open_local_forms(void)
{
    open_forms();
    rig.cache->share = NULL;
}

#define EXPECT_AT(number, plain, coded)                                                            \
    do {                                                                                           \
        cr_expect_str_eq(at(rig.one, number), plain);                                              \
        cr_expect_str_eq(at(coder.one, number), coded);                                            \
    } while (0)

static inline void evict_all(uint64_t number)
{
    struct ns *ns[] = {rig.one, coder.one};

    for (int i = 0; i < 2; i++)
        if (find(ns[i], number))
            (void)cache_evict(rig.cache, find(ns[i], number), CACHE_ALL);
}

#endif
