/* Policies: their texts, refusals with their sentences, derived values, and the budget that moves
 * from step to step. */
#include "client/include/ucmclient_sparse.h"
#include "kernels/sparse/budget.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct ucm_policy parsed(const char *text)
{
    struct ucm_policy p;

    cr_assert_eq(ucm_policy_parse(text, &p), 0, "%s: %s", text, ucm_errmsg());
    return p;
}

static void refused(const char *text, const char *why)
{
    struct ucm_policy p;

    cr_expect_eq(ucm_policy_parse(text, &p), -UCM_EINVALID, "%s", text);
    cr_expect_not_null(strstr(ucm_errmsg(), why), "%s: %s", text, ucm_errmsg());
}

static const struct ucm_sparse_shape shape = {
    .dtype = UCM_SPARSE_BF16,
    .tokens = 16,
    .kv_heads = 8,
    .head_dim = 128,
    .v_head_dim = 128,
    .k_token_stride = 2048,
    .k_head_stride = 256,
    .v_offset = 32768,
    .v_token_stride = 2048,
    .v_head_stride = 256,
};

Test(client_policy, every_preset_is_a_policy_and_says_so)
{
    const char *name, *about;
    char text[UCM_POLICY_TEXT];
    uint32_t n = 0;

    for (; ucm_policy_preset(n, &name, &about) == 0; n++) {
        struct ucm_policy p = parsed(name);
        struct ucm_sparse_summary summary;
        struct ucm_sparse_schedule schedule;
        uint8_t keep[64];

        cr_expect_str_eq(p.preset, name);
        cr_expect(strlen(about) > 20 && strlen(name) < sizeof p.preset);
        cr_expect_eq(ucm_policy_text(&p, text, sizeof text), 0, "%s", ucm_errmsg());
        cr_expect_str_eq(text, name, "a preset's text is its name");
        cr_expect_eq(ucm_policy_summary(&p, &shape, keep, &summary), 0, "%s: %s", name,
                     ucm_errmsg());
        cr_expect_eq(ucm_policy_schedule(&p, "Llama-3.1-8B", 32, &schedule), 0, "%s: %s", name,
                     ucm_errmsg());
    }
    cr_expect_eq(n, 10);
    cr_expect_eq(ucm_policy_preset(n, &name, &about), -UCM_ENOTFOUND);
}

Test(client_policy, every_key_can_be_given_and_its_default_is_in_range)
{
    const char *name, *about;
    uint32_t n = 0;

    for (; ucm_policy_key(n, &name, &about) == 0; n++) {
        char text[64];

        cr_expect(strlen(about) > 3);
        snprintf(text, sizeof text, "topk:%s=x", name);
        refused(text, name);
    }
    cr_expect_eq(n, 39);
    cr_expect_eq(ucm_policy_key(n, &name, &about), -UCM_ENOTFOUND);
}

Test(client_policy, the_seeds_numbers)
{
    struct ucm_policy p = parsed("esa");

    cr_expect(p.summary == UCM_SPARSE_MEAN && p.sparse_ratio == .3 && p.sink_blocks == 1 &&
              p.recent_blocks == 2 && p.min_blocks == 4 && p.retrieval_stride == 5 && p.lag == 1);
    p = parsed("gsa");
    cr_expect(p.summary == UCM_SPARSE_SUBMEAN && p.metric == UCM_SPARSE_L2 && p.sink_blocks == 4 &&
              p.recent_blocks == 8 && p.sparse_ratio == .3);
    p = parsed("gsa-device");
    cr_expect(p.summary == UCM_SPARSE_HASH && p.bits == 128 && p.topk_tokens == 4096 &&
              p.sink_tokens == 64 && p.recent_tokens == 512);
    p = parsed("kvstar");
    cr_expect(p.run == 4 && p.keep == .5 && p.rows == 8 && p.retrieval_stride == 8 && p.beta == 1);
    p = parsed("kvstar-corrected");
    cr_expect(p.run == 4 && p.beta == 0);
    p = parsed("psa");
    cr_expect(p.choice == UCM_SPARSE_CHOICE_PSA && p.eps == .95 && p.microbatch == 4);
    p = parsed("topk");
    cr_expect(p.topk_tokens == 2048);
    p = parsed("topk:sparse_ratio=0.25");
    cr_expect(p.topk_tokens == 0 && p.sparse_ratio == .25, "not the preset's tokens");
    p = parsed("psa-estimated");
    cr_expect(p.summary == UCM_SPARSE_TOKENS && p.chosen == 8 && p.rest == 1 &&
              p.choice == UCM_SPARSE_CHOICE_ESTIMATED);
    p = parsed("auto");
    cr_expect(p.goal > 0 && p.choice == UCM_SPARSE_CHOICE_TOPK && p.min_tokens == 1024);
}

Test(client_policy, keys_in_any_order)
{
    struct ucm_policy a = parsed(
                          "topk:bits=64,sparse_ratio=0.25,summary=hash,seed=18446744073709551615"),
                      b = parsed(
                          "topk:summary=hash,seed=18446744073709551615,bits=64,sparse_ratio=.25");

    cr_expect_eq(memcmp(&a, &b, sizeof a), 0);
    cr_expect(a.summary == UCM_SPARSE_HASH && a.bits == 64 && a.chosen == 0 && a.rest == 0);
    cr_expect(a.seed == UINT64_MAX && a.sparse_ratio == .25);
    a = parsed("topk:summary=tokens");
    cr_expect(a.chosen == 8 && a.rest == 1, "a method brings its usual parameters");
}

Test(client_policy, a_text_gives_the_policy_back)
{
    static const char *const texts[] = {
        "auto",
        "auto:goal=0.9,grow=0.5",
        "topk:summary=hash,bits=256,reduce=max,sparse_ratio=0.06",
        "topk:summary=stats",
        "esa:retrieval_stride=1,lag=0",
        "psa:microbatch=8,eps=0.98",
        "kvstar:keep=0.250001",
        "psa-estimated:dense_below=0",
        "auto:dense_below=4294967295,dense_first=2,dense_last=1,reuse=2,entries=2.5",
    };
    char out[UCM_POLICY_TEXT];

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct ucm_policy p = parsed(texts[i]), again;

        cr_assert_eq(ucm_policy_text(&p, out, sizeof out), 0, "%s", ucm_errmsg());
        again = parsed(out);
        cr_expect_eq(memcmp(&p, &again, sizeof p), 0, "%s became %s", texts[i], out);
        cr_expect_eq(strlen(out), strlen(texts[i]), "%s became %s", texts[i], out);
        for (size_t room = 0; room <= strlen(out); room++)
            cr_expect_eq(ucm_policy_text(&p, out, room), -UCM_EINVALID);
    }
}

Test(client_policy, refusals_say_what_would_be_right)
{
    refused("", "there are auto, topk");
    refused("pas", "did you mean \"psa\"?");
    refused("psa-estimate", "did you mean \"psa-estimated\"?");
    refused("quest", "there are auto");
    refused("psa:epz=.9", "key \"epz\" is not known; did you mean \"eps\"?");
    refused("psa:everything=3", "there are summary, kind");
    refused("psa:eps", "\"eps\" is no key=value");
    refused("psa:eps=0.9,", "ends in a comma");
    refused("psa:,eps=0.9", "no key=value");
    refused("psa:=0.9", "key \"\"");
    refused("psa:eps=", "eps is \"\"; a number such as 0.25 from 0 to 1 is wanted");
    refused("psa:eps=95%", "a number such as 0.25 from 0 to 1");
    refused("psa:eps=1.5", "from 0 to 1");
    refused("psa:eps=0,95", "\"95\" is no key=value");
    refused("psa:eps=1e-1", "from 0 to 1");
    refused("psa:eps=0.1234567", "a number such as");
    refused("psa:eps=.", "a number such as");
    refused("psa:eps=-1", "from 0 to 1");
    refused("psa:microbatch=2.5", "a whole number from 1 to");
    refused("psa:microbatch=99999999999999999999", "a whole number");
    refused("topk:summary=boxes", "did you mean \"box\"?");
    refused("topk:summary=", "there are mean, submean");
    refused("topk:summary=hash,seed=-1", "below 2^64");
    refused("topk:eps=.9", "eps has no effect with choice=topk; it is of mass or psa or estimated");
    refused("topk:bits=64", "bits has no effect with summary=tokens; it is of hash");
    refused("topk:summary=hash,bits=100", "64, 128 and 256");
    refused("topk:topk_tokens=512,sparse_ratio=0.5", "give one");
    refused("psa-estimated:summary=box", "summary=stats, or summary=tokens with rest=1");
    refused("psa-estimated:rest=0", "summary=stats, or summary=tokens with rest=1");
    refused("psa-certified:summary=mean", "summary=box");
    refused("auto:summary=mean", "goal=0 is a fixed top k");
    refused("topk:choice=mass", "reduce=max or mean");
    refused("topk:metric=l2", "rest=0");
    refused("kvstar:keep=0", "no channel");
    refused("topk:limit=3", "less than min_blocks");
    cr_expect_eq(ucm_policy_parse(NULL, NULL), -UCM_EINVALID);
}

Test(client_policy, filled_in_by_hand)
{
    struct ucm_policy good = parsed("auto"), p;
    char text[UCM_POLICY_TEXT];

#define WRONG(change)                                                                              \
    do {                                                                                           \
        p = good;                                                                                  \
        change;                                                                                    \
        cr_expect_eq(ucm_policy_check(&p), -UCM_EINVALID, #change);                                \
    } while (0)
    WRONG(p.summary = 0);
    WRONG(p.summary = 7);
    WRONG(p.summary = UINT32_MAX);
    WRONG(p.choice = 5);
    WRONG(p.choice = UINT32_MAX);
    WRONG(p.heads = 3);
    WRONG(p.sparse_ratio = NAN);
    WRONG(p.goal = 1.5);
    WRONG(p.goal = INFINITY);
    WRONG(p.rows = 0);
    WRONG(p.retrieval_stride = 0);
    WRONG(p.reuse = 0);
    WRONG(p.chosen = 33);
#undef WRONG
    p = good;
    memset(p.preset, 'x', sizeof p.preset);
    cr_expect_eq(ucm_policy_text(&p, text, sizeof text), -UCM_EINVALID, "a name without an end");
    p = good;
    p.preset[0] = '\0';
    cr_expect_eq(ucm_policy_check(&p), 0);
    cr_expect_eq(ucm_policy_text(&p, text, sizeof text), -UCM_EINVALID, "made by hand");
}

/* Random text gives an error or a policy. A policy that parses can be written and read again. */
Test(client_policy, random_texts)
{
    static const char *const pieces[] = {
        "auto", "psa", ":",      ",",    "=", "eps", "0.5", "summary", "hash", "tokens",
        "bits", "64",  "choice", "topk", "9", "-",   "e",   ".",       "goal"};
    unsigned seed = 17;

    for (int round = 0; round < 20000; round++) {
        char text[256] = "auto:", out[UCM_POLICY_TEXT];
        struct ucm_policy p, again;

        if (rand_r(&seed) % 8 == 0)
            text[0] = '\0';
        for (int i = rand_r(&seed) % 8; i > 0; i--)
            strcat(text, pieces[(size_t)rand_r(&seed) % (sizeof pieces / sizeof pieces[0])]);
        if (ucm_policy_parse(text, &p) != 0)
            continue;
        cr_assert_eq(ucm_policy_text(&p, out, sizeof out), 0, "%s: %s", text, ucm_errmsg());
        again = parsed(out);
        cr_assert_eq(memcmp(&p, &again, sizeof p), 0, "%s became %s", text, out);
    }
}

/* ---- what follows ---- */

Test(client_policy, summaries_of_a_shape)
{
    struct ucm_policy p = parsed("kvstar");
    struct ucm_sparse_summary d;
    struct ucm_sparse_shape mla = shape;
    uint8_t keep[64];
    uint64_t bytes;

    cr_assert_eq(ucm_policy_summary(&p, &shape, keep, &d), 0, "%s", ucm_errmsg());
    cr_expect(d.run == 4 && d.keep == keep && d.keep_bytes == 8);
    for (int i = 0; i < 8; i++)
        cr_expect_eq(keep[i], i < 4 ? 0 : 0xff, "the slower half of 64 pairs");
    cr_expect_eq(ucm_sparse_summary_bytes(&d, &bytes), 0, "%s", ucm_errmsg());
    p = parsed("gsa:run=5");
    cr_expect_eq(ucm_policy_summary(&p, &shape, keep, &d), -UCM_EINVALID, "5 does not divide 16");
    p = parsed("gsa-device");
    mla.kv_heads = 1;
    mla.head_dim = 576;
    mla.v_head_dim = 0;
    mla.rope_dim = 64;
    mla.k_token_stride = 1152;
    mla.k_head_stride = 1152;
    cr_assert_eq(ucm_policy_summary(&p, &mla, keep, &d), 0, "%s", ucm_errmsg());
    cr_expect(d.bits == 128 && d.rope_bits == 14);
}

Test(client_policy, schedules)
{
    struct ucm_policy p = parsed("auto:dense_first=1,dense_last=2,reuse=3");
    struct ucm_sparse_schedule s;
    static const uint8_t expected[] = {0, 1, 2, 2, 1, 2, 2, 1, 0, 0};

    cr_assert_eq(ucm_policy_schedule(&p, NULL, 10, &s), 0, "%s", ucm_errmsg());
    cr_expect_arr_eq(s.mode, expected, sizeof expected);
    p = parsed("esa");
    cr_assert_eq(ucm_policy_schedule(&p, "deepseek-v3", 61, &s), 0, "%s", ucm_errmsg());
    cr_expect(s.retrieval_stride == 5 && s.lag == 1 && s.dense_below == 4096);
    cr_expect(s.beta > .07f && s.beta < .0725f, "the model's");
    cr_expect_eq(ucm_policy_schedule(&p, "gpt-oss-20b", 24, &s), -UCM_EUNSUPPORTED);
    p = parsed("auto:dense_first=512,dense_last=512");
    cr_assert_eq(ucm_policy_schedule(&p, NULL, 10, &s), 0);
    for (int l = 0; l < 10; l++)
        cr_expect_eq(s.mode[l], UCM_SPARSE_LAYER_DENSE);
}

Test(client_policy, choices)
{
    struct ucm_policy p = parsed("gsa-device");
    struct ucm_policy_budget budget = {100, 0, 4};
    struct ucm_sparse_choose c;

    cr_assert_eq(ucm_policy_choose(&p, 16, 8192, NULL, &c), 0, "%s", ucm_errmsg());
    cr_expect(c.policy == UCM_SPARSE_TOPK && c.topk_tokens == 4096 && c.sink_blocks == 4 &&
              c.recent_blocks == 32);
    cr_assert_eq(ucm_policy_choose(&p, 100, 8192, NULL, &c), 0);
    cr_expect(c.sink_blocks == 1 && c.recent_blocks == 6, "rounded up to blocks");
    p = parsed("psa");
    cr_assert_eq(ucm_policy_choose(&p, 16, 8192, NULL, &c), 0);
    cr_expect(c.sparse_ratio == 1 && c.limit == 0, "the order of all blocks");
    p = parsed("auto");
    cr_expect_eq(ucm_policy_choose(&p, 16, 8192, NULL, &c), -UCM_EINVALID, "a budget is wanted");
    cr_assert_eq(ucm_policy_choose(&p, 16, 8192, &budget, &c), 0);
    cr_expect_eq(c.topk_tokens, 1600);
    cr_assert_eq(ucm_policy_choose(&p, 16, 50, &budget, &c), 0);
    cr_expect_eq(c.topk_tokens, 800, "no more than there are");
    p = parsed("topk");
    cr_expect_eq(ucm_policy_choose(&p, 16, 8192, &budget, &c), -UCM_EINVALID, "no goal, no budget");
    cr_expect_eq(ucm_policy_choose(&p, 0, 8192, NULL, &c), -UCM_EINVALID);
}

/* ---- the budget ---- */

Test(client_budget, begins_by_the_root_of_the_length)
{
    struct ucm_policy p = parsed("auto:budget_tokens=4096,min_tokens=0");
    struct ucm_policy_budget b;
    static const struct {
        uint32_t tokens, budget;
    } cases[] = {{1u << 17, 4096}, {1u << 15, 2048}, {1u << 13, 1024},
                 {1u << 19, 8192}, {64, 64},         {0, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cr_assert_eq(ucm_policy_budget_begin(&p, 16, cases[i].tokens / 16, &b), 0, "%s",
                     ucm_errmsg());
        cr_expect_eq(b.blocks, cases[i].budget / 16, "%u tokens: %u", cases[i].tokens, b.blocks);
    }
    p = parsed("topk");
    cr_expect_eq(ucm_policy_budget_begin(&p, 16, 100, &b), -UCM_EINVALID, "no goal");
}

Test(client_budget, has_a_least_in_tokens)
{
    struct ucm_policy p = parsed("auto:min_tokens=1000,goal=0.9");
    struct ucm_policy_budget b;

    cr_assert_eq(ucm_policy_budget_begin(&p, 16, 100, &b), 0);
    cr_expect(b.blocks == 63 && b.least == 63);
    for (int i = 0; i < 100; i++)
        ucm_policy_budget_next(&p, 100, 1, &b);
    cr_expect_eq(b.blocks, 63);
    cr_assert_eq(ucm_policy_budget_begin(&p, 16, 10, &b), 0);
    cr_expect_eq(b.blocks, 10);
}

Test(client_budget, root)
{
    for (uint64_t x = 0; x < 70000; x++) {
        uint64_t root = ucm_budget_root(x);

        cr_assert(root * root <= x && (root + 1) * (root + 1) > x);
    }
    cr_expect_eq(ucm_budget_root(UINT64_MAX), UINT32_MAX);
}

Test(client_budget, grows_at_once_and_shrinks_slowly)
{
    struct ucm_policy p = parsed("auto:goal=0.9,grow=0.25,shrink=0.125,patience=3,min_tokens=0");
    struct ucm_policy_budget b = {40, 0, 4};

#define NEXT(share, expected)                                                                      \
    do {                                                                                           \
        cr_assert_eq(ucm_policy_budget_next(&p, 1000, share, &b), 0);                              \
        cr_expect_eq(b.blocks, expected, "%u", b.blocks);                                          \
    } while (0)
    NEXT(.5f, 50);
    NEXT(.95f, 50);
    NEXT(.95f, 50);
    NEXT(.95f, 44);
    NEXT(.9f, 44);
    NEXT(.9f, 44);
    NEXT(.89f, 55); /* starts the count again */
    NEXT(.95f, 55);
    NEXT(.95f, 55);
    NEXT(.95f, 49);
    NEXT(NAN, 61);
    NEXT(-INFINITY, 76);
#undef NEXT
    b.blocks = 4;
    for (int i = 0; i < 100; i++)
        ucm_policy_budget_next(&p, 1000, 1, &b);
    cr_expect_eq(b.blocks, 4, "min_blocks");
    for (int i = 0; i < 100; i++)
        ucm_policy_budget_next(&p, 1000, 0, &b);
    cr_expect_eq(b.blocks, 1000, "dense");
    b.blocks = 1;
    ucm_policy_budget_next(&p, 2, 0, &b);
    cr_expect_eq(b.blocks, 2);
}

/* A query whose mass moves: within a few steps the budget covers it again, and on average it is not far
 * above what is needed. */
Test(client_budget, follows_what_is_needed)
{
    struct ucm_policy p = parsed("auto:min_tokens=0,goal=0.9");
    struct ucm_policy_budget b;
    unsigned seed = 5, below = 0;
    double spent = 0, needed = 0;

    cr_assert_eq(ucm_policy_budget_begin(&p, 16, 8192, &b), 0);
    for (int step = 0; step < 4000; step++) {
        uint32_t need = (step / 500 % 2 ? 60u : 600u) + (uint32_t)rand_r(&seed) % 20;

        spent += b.blocks;
        needed += need;
        below += b.blocks < need;
        cr_assert_eq(ucm_policy_budget_next(&p, 8192, b.blocks < need ? .5f : .99f, &b), 0);
    }
    cr_expect_lt(below, 4000 / 5, "%u steps got too little", below);
    cr_expect_lt(spent, 1.5 * needed, "%g times what was needed", spent / needed);
}
