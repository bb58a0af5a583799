/* The index as its users see it: against a plain model, while it grows and shrinks, under scans. */
#include "tests/unit/index/index_rig.h"

static struct ns_identity
    id; /* a test's change holds for the namespaces that it opens afterwards */

static void begin(void)
{
    index_begin();
    id = identity();
}

TestSuite(index, .init = begin, .fini = index_end);

/* The number's chunk is now a chunk with fewer records. */
Test(index, a_number_from_before_is_nobodys)
{
    enum { MANY = 200000 };
    static block_ref refs[MANY];
    struct ns_identity other = id;
    struct ns *ns = open_ns(&id), *wide;
    unsigned found = 0;

    for (unsigned i = 0; i < MANY; i++)
        refs[i] = add(ns, i);
    for (unsigned i = 0; i < MANY; i++)
        index_remove(ix, refs[i]);
    other.model = "wide";
    other.parts = 4;
    wide = open_ns(&other);
    for (unsigned i = 0; i < 1000; i++)
        (void)add(wide, i);
    for (unsigned i = 0; i < MANY; i++)
        found += index_peek(ix, refs[i]) != NULL;
    cr_expect_leq(found, 1000u);
}

/* ---- blocks ---- */

Test(index, a_new_block_is_all_zero_but_its_key)
{
    struct ns *ns;
    struct block *b;
    uint8_t key[UCM_MAX_KEY_BYTES];
    block_ref ref;

    id.key_bytes = 20;
    id.parts = 3;
    ns = open_ns(&id);
    memset(key, 0xee, sizeof(key));
    for (int round = 0; round < 2; round++) { /* the second time in a used record */
        ref = index_insert(ix, ns, key);
        b = index_block(ix, ref);
        cr_assert_eq(memcmp(b->key, key, 20), 0);
        for (uint32_t i = 20; i < UCM_MAX_KEY_BYTES; i++)
            cr_assert_eq(b->key[i], 0);
        cr_assert_eq(b->ns, ns->id);
        cr_assert(b->whole_parts == 0 && b->leases == 0 && b->flags == 0 && b->policy_data == 0);
        for (uint32_t i = 0; i < 3; i++) {
            cr_assert(b->part[i].nvme_at.loc == 0 && b->part[i].dram == 0 && b->part[i].users == 0);
            b->part[i].nvme_at.loc = 7;
            b->part[i].dram = PART_DRAM_READY;
        }
        b->whole_parts = 3;
        b->policy_data = 1;
        cr_assert(block_complete(b, ns));
        index_remove(ix, ref);
        cr_assert_eq(index_find(ix, ns, key), 0);
    }
}

Test(index, every_length_of_key_tells_keys_apart_by_every_byte)
{
    for (uint32_t n = UCM_MIN_KEY_BYTES; n <= UCM_MAX_KEY_BYTES; n++) {
        uint8_t key[UCM_MAX_KEY_BYTES] = {0};
        struct ns *ns;
        block_ref ref[UCM_MAX_KEY_BYTES];

        id.key_bytes = n;
        ns = open_ns(&id);
        for (uint32_t i = 0; i < n; i++) {
            key[i] = 1;
            cr_assert_eq(index_find(ix, ns, key), 0);
            ref[i] = index_insert(ix, ns, key);
            key[i] = 0;
        }
        for (uint32_t i = 0; i < n; i++) {
            key[i] = 1;
            cr_assert_eq(index_find(ix, ns, key), ref[i]);
            key[i] = 0;
        }
    }
}

struct model {
    struct ns *ns[3];
    block_ref ref[3][4096]; /* by namespace and number */
    uint64_t n;
};

static void model_check(struct model *m)
{
    static uint8_t keys[4096 * UCM_MAX_KEY_BYTES];
    static block_ref out[4096];

    for (int s = 0; s < 3; s++) {
        uint32_t key_bytes = m->ns[s]->identity.key_bytes;
        uint64_t n = 0;

        for (uint32_t i = 0; i < 4096; i++) {
            uint8_t key[UCM_MAX_KEY_BYTES];

            key_make(key, i);
            memcpy(keys + (size_t)i * key_bytes, key, key_bytes);
            n += m->ref[s][i] != 0;
        }
        index_find_many(ix, m->ns[s], keys, 4096, false, out);
        cr_assert_eq(memcmp(out, m->ref[s], sizeof(out)), 0);
        cr_assert_eq(m->ns[s]->blocks, n);
    }
    cr_assert_eq(index_blocks(ix), m->n);
}

Test(index, agrees_with_a_model)
{
    static struct model m;
    uint64_t seed = 88172645463325252u;

    for (uint32_t s = 0; s < 3; s++) {
        id.key_bytes = 16 + 8 * s;
        id.parts = 1 + s;
        m.ns[s] = open_ns(&id);
    }
    for (uint32_t step = 0; step < 300000; step++) {
        uint32_t s = (uint32_t)random_next(&seed) % 3, i = (uint32_t)random_next(&seed) % 4096;
        bool grow = step / 30000 % 2 == 0; /* by turns mostly inserts and mostly removals */
        bool add_one = random_next(&seed) % 8 != 0 ? grow : !grow;

        cr_assert_eq(find(m.ns[s], i), m.ref[s][i]);
        if (m.ref[s][i] == 0 && add_one) {
            m.ref[s][i] = add(m.ns[s], i);
            m.n++;
        } else if (m.ref[s][i] != 0 && !add_one) {
            index_remove(ix, m.ref[s][i]);
            m.ref[s][i] = 0;
            m.n--;
        }
        if (step % 10000 == 0)
            model_check(&m);
    }
    model_check(&m);
}

Test(index, blocks_do_not_move_while_it_grows)
{
    struct ns *ns = open_ns(&id);
    block_ref first = add(ns, 0);
    struct block *b = index_block(ix, first);

    for (uint32_t i = 1; i < 200000; i++)
        add(ns, i);
    cr_assert_eq(index_block(ix, first), b);
    for (uint32_t i = 0; i < 200000; i++)
        cr_assert_eq(number_of(index_block(ix, find(ns, i))), i);
    cr_assert_eq(find(ns, 200000), 0);
}

/* A block takes 64 bytes and 24 for each part, rounded up to 32, and 32 in the table. */
Test(index, a_block_of_more_parts_counts_as_more)
{
    uint32_t of_many[UCM_MAX_PARTS];
    struct ns *narrow, *wide;
    uint64_t bytes, n = 0;
    uint8_t key[UCM_MAX_KEY_BYTES];
    block_ref ref = 0, last = 0;

    index_again(1000, 4096);
    narrow = open_ns(&id);
    bytes = index_bytes(ix);
    for (uint32_t i = 0; i < UCM_MAX_PARTS; i++)
        of_many[i] = 1;
    id.parts = UCM_MAX_PARTS;
    id.layers = of_many;
    wide = open_ns(&id);
    cr_expect_eq(narrow->index_bytes, INDEX_BLOCK_BYTES);
    cr_expect_eq(wide->index_bytes, 64u + 24 * UCM_MAX_PARTS + 32);
    for (key_make(key, n); (ref = index_insert(ix, wide, key)) != 0; key_make(key, ++n))
        last = ref;
    cr_expect_eq(n, index_bytes_max(ix) / wide->index_bytes);
    cr_expect_eq(index_find(ix, wide, key), 0);
    cr_expect_lt(index_bytes(ix) - bytes, index_bytes_max(ix) + (256 << 10), "one chunk at most");
    while (!index_full(ix, narrow))
        add(narrow, n++);
    cr_expect(index_full(ix, wide));
    index_remove(ix, last);
    add(wide, n);
    cr_expect(index_full(ix, narrow) && index_full(ix, wide));
}

Test(index, find_many_stops_at_a_gap_and_leaves_0)
{
    static uint8_t keys[500 * KEY];
    static block_ref out[500];
    struct ns *ns = open_ns(&id);

    for (uint32_t i = 0; i < 500; i++)
        key_make(keys + (size_t)i * KEY, i);
    memset(out, 0xff, sizeof(out));
    index_find_many(ix, ns, keys, 500, true, out); /* an empty table */
    for (uint32_t i = 0; i < 500; i++)
        cr_assert_eq(out[i], 0);
    for (uint32_t i = 0; i < 500; i++)
        if (i != 77)
            add(ns, i);
    for (uint32_t n = 0; n <= 500; n += 25) {
        memset(out, 0xff, sizeof(out));
        index_find_many(ix, ns, keys, n, true, out);
        for (uint32_t i = 0; i < n && i < 77; i++)
            cr_assert_eq(out[i], find(ns, i));
        for (uint32_t i = 77; i < n; i++)
            cr_assert(out[i] == 0 || (i > 77 && out[i] == find(ns, i)));
        if (n < 500)
            cr_assert_eq(out[n], UINT32_MAX);
    }
}

/* ---- memory ---- */

Test(index, takes_at_most_128_bytes_a_block)
{
    struct ns *ns = open_ns(&id);

    for (uint32_t n = 1; n <= 1000000; n++) {
        add(ns, n);
        if (n % 200000 == 0)
            cr_assert_leq(index_bytes(ix), UINT64_C(128) * n, "%.1f bytes at %u",
                          (double)index_bytes(ix) / n, n);
    }
}

Test(index, gives_memory_back_when_blocks_go)
{
    enum { N = 200000 };
    static block_ref ref[N];
    struct ns *ns = open_ns(&id);
    uint64_t before = index_bytes(ix), most = 0;

    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < N; i++)
            ref[i] = add(ns, i);
        if (round == 0)
            most = index_bytes(ix);
        cr_assert_leq(index_bytes(ix), most);
        for (uint32_t i = 0; i < N; i++)
            index_remove(ix, ref[i]);
        cr_assert_leq(index_bytes(ix), before + (3u << 20));
    }
}

Test(index, many_namespaces_cost_little)
{
    char model[32];

    id.model = model;
    for (uint32_t i = 0; i < 4096; i++) {
        snprintf(model, sizeof(model), "model-%u", i);
        add(open_ns(&id), i);
    }
    cr_assert_leq(index_bytes(ix), 8u << 20);
}

/* ---- scans ---- */

struct seen {
    uint32_t times[1000000]; /* by number */
    uint32_t n, limit;
};

static uint64_t scan_step(struct ns *ns, uint64_t cursor, uint32_t limit, struct seen *s)
{
    static block_ref refs[20000];

    cursor = index_scan(ix, ns, cursor, limit, refs, &s->n);
    cr_assert_leq(s->n, limit);
    for (uint32_t i = 0; i < s->n; i++)
        s->times[number_of(index_block(ix, refs[i]))]++;
    cr_assert(cursor == 0 || s->n == limit);
    return cursor;
}

Test(index, scan_meets_each_block_once)
{
    static struct seen s;
    static const uint32_t limits[] = {1, 7, 100, 100000};
    struct ns *ns = open_ns(&id), *other;

    id.dtype = "fp8";
    other = open_ns(&id);
    cr_assert_eq(scan_step(ns, 0, 10, &s), 0);
    for (uint32_t i = 0; i < 5000; i++) {
        add(ns, i);
        add(other, 10000 + i);
    }
    for (size_t k = 0; k < sizeof(limits) / sizeof(limits[0]); k++) {
        uint64_t cursor = 0;

        memset(&s, 0, sizeof(s));
        do
            cursor = scan_step(ns, cursor, limits[k], &s);
        while (cursor != 0);
        for (uint32_t i = 0; i < 20000; i++)
            cr_assert_eq(s.times[i], i < 5000);
    }
}

/* Those that stay all the time are met exactly once, those that come or go at most once. */
static void scan_under_change(bool growing)
{
    static struct seen s;
    static block_ref ref[20000];
    uint32_t from = growing ? 1000 : 20000, at = from;
    uint64_t cursor = 0;
    struct ns *ns;

    index_begin();
    ns = open_ns(&id);
    memset(&s, 0, sizeof(s));
    for (uint32_t i = 0; i < from; i++)
        ref[i] = add(ns, i);
    do {
        cursor = scan_step(ns, cursor, 10, &s);
        for (int i = 0; i < 100; i++) {
            if (growing && at < 20000)
                add(ns, at++);
            else if (!growing && at > 1000)
                index_remove(ix, ref[--at]);
        }
    } while (cursor != 0);
    cr_assert_eq(at, growing ? 20000 : 1000);
    for (uint32_t i = 0; i < 1000; i++)
        cr_assert_eq(s.times[i], 1, "%u met %u times", i, s.times[i]);
    for (uint32_t i = 1000; i < 20000; i++)
        cr_assert_leq(s.times[i], 1);
}

Test(index, scan_while_blocks_come_or_go)
{
    scan_under_change(true);
    scan_under_change(false);
}

/* Keys that an attacker who knew the secret would choose. */
Test(index, stays_right_when_all_keys_fall_into_one_bucket)
{
    enum { N = 600 };
    static uint32_t number[N];
    static uint8_t keys[N * KEY];
    static block_ref ref[N], out[N];
    static struct seen s;
    struct ns *ns = open_ns(&id);
    uint64_t cursor = 0;
    uint32_t n = 0;

    for (uint32_t i = 0; n < N; i++) {
        uint8_t key[UCM_MAX_KEY_BYTES];

        key_make(key, i);
        if ((index_hash(ix, key, KEY) & 0x3ff) != 5)
            continue;
        memcpy(keys + (size_t)n * KEY, key, KEY);
        number[n++] = i;
    }
    for (uint32_t i = 0; i < N; i++)
        ref[i] = add(ns, number[i]);
    for (uint32_t i = 1; i < N; i++)
        cr_assert_eq((index_hash(ix, keys + (size_t)i * KEY, KEY) ^ index_hash(ix, keys, KEY)) &
                         ns->table->mask,
                     0u);
    do
        cursor = scan_step(ns, cursor, 5, &s);
    while (cursor != 0);
    for (uint32_t i = 0; i < N; i++)
        cr_assert_eq(s.times[number[i]], 1u);
    for (uint32_t i = 0; i < N; i += 3) {
        index_remove(ix, ref[i]);
        ref[i] = 0;
    }
    index_find_many(ix, ns, keys, N, false, out);
    cr_assert_eq(memcmp(out, ref, sizeof(ref)), 0);
    for (uint32_t i = 0; i < N; i++)
        if (ref[i])
            index_remove(ix, ref[i]);
    cr_assert_eq(index_blocks(ix), 0);
    index_find_many(ix, ns, keys, N, false, out);
    for (uint32_t i = 0; i < N; i++)
        cr_assert_eq(out[i], 0);
}
