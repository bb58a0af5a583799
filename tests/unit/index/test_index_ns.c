/* Namespaces of the index: which are the same, how many there may be, and those of an earlier run.
 */
#include "daemon/index/ns_form.h"
#include "tests/unit/index/index_rig.h"

TestSuite(index_ns, .init = index_begin, .fini = index_end);

/* ---- namespaces ---- */

Test(index_ns, same_identity_same_namespace)
{
    char model[] = "m";
    uint32_t mine[UCM_MAX_PARTS];
    struct ns_identity id = identity(), copy = id;
    struct ns *ns = open_ns(&id);

    memcpy(mine, layers, sizeof(mine));
    copy.model = model;
    copy.layers = mine;
    cr_assert_eq(open_ns(&copy), ns);
    memset(model, 'x', 1);
    cr_assert_str_eq(ns->identity.model, "m");
    cr_assert_eq(ns_count(), 1);
    cr_assert_eq(index_ns(ix, ns->id), ns);
    cr_assert(!index_ns(ix, 0) && !index_ns(ix, 2));
}

Test(index_ns, any_other_field_is_another_namespace)
{
    static const uint32_t other_layers[] = {32, 31};
    static const uint8_t salt[] = {0, 1};
    struct ns_identity base = identity(), id[16];
    uint32_t n = 0;
    struct ns *first;

    base.parts = 2;
    first = open_ns(&base);
    add(first, 1);
    for (uint32_t i = 0; i < 16; i++)
        id[i] = base;
    id[n++].tenant = "u";
    id[n++].model = "mr";
    id[n++].revision = "";
    id[n++].dtype = "fp16";
    id[n++].layout = "nhd/2";
    id[n++].block_tokens = 32;
    id[n++].key_bytes = 31;
    id[n++].parts = 1;
    id[n++].layers = other_layers;
    id[n++].layer_bytes = 8192;
    id[n].salt = salt;
    id[n++].salt_bytes = 1;
    id[n].salt = salt;
    id[n++].salt_bytes = 2;
    id[n].model = "mr"; /* the same letters, split otherwise */
    id[n++].revision = "";
    for (uint32_t i = 0; i < n; i++) {
        struct ns *ns = open_ns(&id[i]);

        cr_assert_eq(ns->id, i + 2);
        cr_assert_eq(find(ns, 1), 0);
        for (uint32_t k = 1; k < ns->id; k++)
            cr_assert_neq(
                memcmp(ns->fingerprint, index_ns(ix, k)->fingerprint, UCM_FINGERPRINT_BYTES), 0);
    }
    cr_assert_neq(find(first, 1), 0);
}

Test(index_ns, fingerprint_has_its_canonical_form)
{
    static const uint32_t two[] = {32, 16};
    static const uint8_t salt[] = {0xde, 0xad};
    /* computed apart, by the text of docs/protocol.md */
    static const uint8_t want[UCM_FINGERPRINT_BYTES] = {
        0xbb, 0xdb, 0x8b, 0x61, 0x9b, 0xe6, 0xb6, 0x20, 0x1b, 0x1d, 0x8b,
        0xef, 0x54, 0xe9, 0x55, 0xfd, 0x11, 0x6f, 0x83, 0xba, 0x9c, 0x7b,
        0xbc, 0xec, 0xb3, 0x96, 0xcf, 0x29, 0xc9, 0x43, 0x20, 0x03};
    struct ns_identity id = {"uid:1000", "llama", "r1", "bf16", "nhd/1", 16,
                             32,         2,       two,  65536,  salt,    2};
    uint8_t canonical[NS_CANONICAL_MAX], out[UCM_FINGERPRINT_BYTES];
    int n = ns_identity_encode(&id, canonical, sizeof(canonical));

    cr_assert_gt(n, 0);
    cr_assert_eq(ns_fingerprint(canonical, (size_t)n, out), 0);
    cr_assert_eq(memcmp(out, want, sizeof(out)), 0);
}

/* What a tier stores about a namespace of an earlier run. */
struct left {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES], canonical[NS_CANONICAL_MAX];
    size_t n;
};

static struct left left_of(const struct ns_identity *id)
{
    struct left l = {.n = 0};
    int n = ns_identity_encode(id, l.canonical, sizeof(l.canonical));

    cr_assert_gt(n, 0);
    l.n = (size_t)n;
    cr_assert_eq(ns_fingerprint(l.canonical, l.n, l.fingerprint), 0);
    return l;
}

static int restore(const struct left *l, struct ns **out)
{
    struct ucm_error e = {0};

    return index_ns_restore(ix, l->fingerprint, l->canonical, l->n, out, &e);
}

Test(index_ns, what_an_earlier_run_left_of_a_namespace_is_taken_only_whole)
{
    struct ns_identity id = identity();
    struct left l = left_of(&id);
    struct ns *ns = NULL;

    l.fingerprint[3] ^= 1;
    cr_expect_eq(restore(&l, &ns), -UCM_WIRE_INVALID, "the identity of another");
    l.fingerprint[3] ^= 1;
    l.n--;
    cr_expect_eq(restore(&l, &ns), -UCM_WIRE_INVALID, "no identity");
    l.n++;
    cr_expect_eq(ns_count(), 0u);
    cr_assert_eq(restore(&l, &ns), 0);
    cr_expect_eq(open_ns(&id), ns);
    cr_expect_eq(ns->canonical_bytes, l.n);
    cr_expect_arr_eq(ns->canonical, l.canonical, l.n);
    cr_expect_eq(restore(&l, &ns), 0, "once more");
    l.canonical[l.n - 1] ^= 1;
    cr_expect_eq(restore(&l, &ns), -UCM_WIRE_INVALID, "another identity under its fingerprint");
}

static struct ns *open_model(const char *tenant, unsigned number)
{
    struct ns_identity id = identity();
    struct ucm_error e = {0};
    struct ns *ns = NULL;
    char model[16];

    snprintf(model, sizeof(model), "model %u", number);
    id.tenant = tenant;
    id.model = model;
    return index_ns_open(ix, &id, NULL, &ns, &e) == 0 ? ns : NULL;
}

Test(index_ns, at_the_bound_the_namespace_that_rested_longest_gives_way)
{
    struct ns *a, *b, *c;
    uint32_t second;

    index_again(100, 3);
    a = open_model("t", 1);
    b = open_model("t", 2);
    c = open_model("t", 3);
    add(a, 1);
    index_ns_ref(ix, c);
    second = b->id;
    b = open_model("t", 4);
    cr_assert_not_null(b);
    cr_assert_null(index_ns(ix, second), "a number does not come to mean another namespace");
    cr_assert_eq(index_ns(ix, b->id), b);
    cr_assert_eq(index_ns_at(ix, index_ns_place(ix, b)), b);
    cr_assert_eq(ns_count(), 3u);
    /* a has a block, c is in use */
    index_ns_ref(ix, b);
    cr_assert_null(open_model("t", 5));
    index_ns_unref(ix, c);
    index_ns_unref(ix, b);
    index_remove(ix, find(a, 1));
    /* a has rested longest, then c */
    cr_assert_not_null(open_model("t", 5));
    cr_assert_eq(open_model("t", 3), c);
    cr_assert_not_null(open_model("t", 6));
    cr_assert_not_null(open_model("t", 7));
    cr_assert_neq(open_model("t", 3), NULL);
    cr_assert_eq(ns_count(), 3u);
}

Test(index_ns, a_tenant_has_a_bound_of_its_own)
{
    struct ns_identity id = identity();
    struct ns *other, *ns = NULL;
    struct config config;
    struct left left;

    index_again(100, 8);
    config_init(&config);
    config.max_namespaces_tenant = 2;
    cr_assert_eq(tenant_set_configure(index_tenants(ix), &config), 0);
    config_free(&config);
    other = open_model("other", 1);
    for (unsigned i = 0; i < 2; i++)
        index_ns_ref(ix, open_model("t", i));
    cr_assert_null(open_model("t", 2));
    cr_assert_not_null(open_model("other", 2));
    /* what an earlier run has left is taken all the same */
    id.tenant = "t";
    left = left_of(&id);
    cr_assert_eq(restore(&left, &ns), 0);
    cr_assert_eq(ns_count(), 5u);
    index_ns_ref(ix, ns);
    cr_assert_null(open_model("t", 3));
    /* its own idle one goes, never another tenant's */
    index_ns_unref(ix, index_ns_at(ix, 1));
    cr_assert_not_null(open_model("t", 3));
    cr_assert_eq(open_model("other", 1), other);
}

/* Thousands come and go: numbers stay apart, everything that is there is found. */
Test(index_ns, namespaces_come_and_go)
{
    uint32_t last[16] = {0};

    index_again(100, 16);
    for (unsigned i = 0; i < 5000; i++) {
        struct ns *ns = open_model("t", i);

        cr_assert_not_null(ns);
        for (unsigned k = 0; k < 16; k++)
            cr_assert_neq(last[k], ns->id);
        last[i % 16] = ns->id;
        cr_assert_eq(index_ns_find(ix, ns->fingerprint), ns);
        cr_assert_eq(index_ns(ix, ns->id), ns);
    }
    cr_assert_eq(ns_count(), 16u);
    for (unsigned k = 0; k < 16; k++)
        cr_assert_not_null(index_ns(ix, last[k]));
}

Test(index_ns, refuses_what_is_out_of_bounds)
{
    struct ns_identity id = identity(), bad = id;
    struct ucm_error e = {0};
    struct ns *ns = NULL;

    index_again(10, 1);
    bad.parts = UCM_MAX_PARTS + 1;
    cr_assert_eq(index_ns_open(ix, &bad, NULL, &ns, &e), -UCM_WIRE_INVALID);
    bad = id;
    bad.key_bytes = 8;
    cr_assert_eq(index_ns_open(ix, &bad, NULL, &ns, &e), -UCM_WIRE_INVALID);
    index_ns_ref(ix, open_ns(&id));
    bad = id;
    bad.model = "one too many";
    cr_assert_eq(index_ns_open(ix, &bad, NULL, &ns, &e), -UCM_WIRE_BUSY);
    cr_assert_null(ns);
    open_ns(&id);
    index_free(NULL);
}

/* ---- forms ---- */

static const struct ucm_encoding_spec fp8 = {.encoding = UCM_ENCODING_FP8,
                                             .version = 1,
                                             .dtype = UCM_ENCODING_BF16,
                                             .n_tensors = 1,
                                             .tensor = {{.tokens = 16, .heads = 1, .dim = 128}}};

/* No matter who made the identity: its fields decide, and only all together. */
Test(index_ns, an_identity_has_a_form)
{
    struct ns_identity raw = identity(), id, other;
    struct ns_encoded_memory memory;
    uint8_t salt[NS_ENCODED_SALT_BYTES];
    struct ns *base, *encoded;

    raw.parts = 2;
    base = open_ns(&raw);
    cr_assert_null(ns_codec(base));
    cr_assert_eq(ns_form(base, 1)->layer_bytes, 4096);
    ns_encoded_identity(base, &fp8, &memory, &id);
    encoded = open_ns(&id);
    cr_assert(ns_codec(encoded));
    cr_assert_eq(ns_form(encoded, 1)->layer_bytes, 2048 + 16);
    cr_assert_eq(ns_form(encoded, 1)->layers, 32);
    cr_assert_eq(form_raw_layer_bytes(ns_form(encoded, 1)), 4096);
    other = id;
    other.layer_bytes++;
    cr_assert_null(ns_codec(open_ns(&other)));
    other = id;
    other.layout = "encoding/2/fp8";
    cr_assert_null(ns_codec(open_ns(&other)));
    other.layout = "encoding/1/int8";
    cr_assert_null(ns_codec(open_ns(&other)));
    other = id;
    other.dtype = "bf16";
    cr_assert_null(ns_codec(open_ns(&other)));
    other = id;
    other.salt = memcpy(salt, id.salt, sizeof(salt));
    salt[0] ^= 1; /* another base */
    cr_assert(codec_same(ns_codec(open_ns(&other)), ns_codec(encoded)));
    salt[UCM_FINGERPRINT_BYTES] ^= 1; /* with other layers */
    cr_assert_null(ns_codec(open_ns(&other)));
}
