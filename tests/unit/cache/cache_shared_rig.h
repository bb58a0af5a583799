/* A cache over a tier and a shared tier that do what a test says, and what other hosts do to the shared tier.
 */
#ifndef UCMD_TESTS_CACHE_SHARED_RIG_H
#define UCMD_TESTS_CACHE_SHARED_RIG_H

#include "tests/unit/cache/cache_rig.h"
#include "tests/unit/shared_fake.h"

static struct shared shared;

static inline void open_shared(void)
{
    rig_open();
    memset(&shared, 0, sizeof(shared));
    list_init(&shared.pending);
    shared.to = 1;
    rig.cache->config.shared_blocks = 8;
    cache_shared_attach(rig.cache, &shared);
}

/* The shared tier answers so to the next n operations. */
static inline void shared_refuses(int answer, unsigned n)
{
    shared.refuse = answer;
    shared.refuse_n = n;
}

static inline void shared_finish(void)
{
    while (shared.n_pending > 0)
        fake_shared_next(&shared, 0);
}

static inline void close_shared(void)
{
    shared_finish();
    rig_close();
    fake_shared_close(&shared);
}

static inline struct block_file_id id_of(const struct ns *ns, uint64_t number, uint32_t part)
{
    struct block_file_id id = {.key_bytes = ns->identity.key_bytes, .part = part};

    memcpy(id.fingerprint, ns->fingerprint, sizeof(id.fingerprint));
    memcpy(id.key, &number, sizeof(number));
    return id;
}

/* Another host writes the block. */
static inline void peer_stores(struct ns *ns, uint64_t number, shared_root_id root)
{
    uint64_t layer_bytes = ns->identity.layer_bytes;
    uint8_t *data = calloc(LAYERS, layer_bytes);

    cr_assert(data);
    for (uint32_t part = 0; part < ns->identity.parts; part++) {
        struct block_file_id id = id_of(ns, number, part);

        for (uint32_t s = 0; s < LAYERS; s++) {
            uint64_t mark = ((number << 8 | ns->id) << 8 | part) << 8 | s;

            memcpy(data + s * layer_bytes, &mark, 8);
            memcpy(data + (s + 1) * layer_bytes - 8, &mark, 8);
        }
        fake_file_put(&shared, &id, root, data, LAYERS * layer_bytes);
    }
    free(data);
}

static inline block_ref note(struct ns *ns, uint64_t number, shared_root_id root, bool asked)
{
    uint8_t key[UCM_MAX_KEY_BYTES];

    key_of(number, key);
    cache_shared_note(rig.cache, ns, key, root, asked);
    return find(ns, number);
}

static inline bool has_file(const struct ns *ns, uint64_t number, uint32_t part,
                            shared_root_id root)
{
    struct block_file_id id = id_of(ns, number, part);

    return fake_file_find(&shared, &id, root) != NULL;
}

/* A block that another host stored and a lookup has found; returned held. */
static inline block_ref shared_block(struct ns *ns, uint64_t number)
{
    block_ref ref;

    peer_stores(ns, number, 1);
    ref = note(ns, number, 1, true);
    cr_assert_neq(ref, 0u);
    cache_lease(rig.cache, ref);
    return ref;
}

/* Reads part 0 from the shared tier, and lets go of the block. */
static inline void expect_shared_read(block_ref ref)
{
    struct waiter w;

    cr_assert_eq(get(&w, ref, 0), CACHE_PENDING);
    shared_finish();
    cr_expect(w.status == 0 && w.w.shared && marks_right(ref, 0));
    put_and_drop(ref, 0);
}

/* The block in DRAM, and nowhere else. */
static inline block_ref store_dram(struct ns *ns, uint64_t number)
{
    block_ref ref = store(ns, number);

    for (int i = 0; i < 4; i++) {
        iterate();
        while (rig.tier.n_pending > 0)
            fake_next(&rig.tier, -EIO);
    }
    return ref;
}

static inline void expect_no_shared_left(void)
{
    expect_nothing_held();
    cr_expect_eq(rig.cache->lists.shared.n, 0u);
    cr_expect_eq(rig.one->shared_bytes + rig.two->shared_bytes, 0u);
    cr_expect_eq(rig.cache->shared_busy, 0u);
    cr_expect_eq(rig.cache->write[WRITE_SHARED].writing_bytes, 0u);
}

#endif
