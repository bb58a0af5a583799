/* The keys and the presets of policies. Comments say where numbers come from. ESA, GSA and KVStar
 * are algorithms of UCM (unified-cache-management, ucm/sparse), PSA is arXiv 2503.00392.
 * docs/sparse.md says what each preset is worth.
 *
 * A preset is a text of keys that differ from their defaults here, as a user's text is. */
#include "client/lib/sparse/policy.h"

#include <stddef.h>

static const char *const summaries[] = {"",     "mean",  "submean", "box",
                                        "hash", "stats", "tokens",  NULL};
static const char *const kinds[] = {"mean", "max", "normalised", NULL};
static const char *const rope_pairs[] = {"neox", "interleaved", NULL};
static const char *const metrics[] = {"dot", "l2", "rounded", NULL};
static const char *const reduces[] = {"max", "mean", "softmax", NULL};
static const char *const head_lists[] = {"each", "sum", "max", NULL};
static const char *const choices[] = {"topk", "mass", "psa", "estimated", "certified", NULL};

#define SUMMARY(m) (1u << UCM_SPARSE_##m)
#define CHOICE(c) (1u << UCM_SPARSE_CHOICE_##c)
#define ROUNDS (CHOICE(PSA) | CHOICE(ESTIMATED) | CHOICE(CERTIFIED))
#define BLOCKS UCM_SEQUENCE_BLOCKS_MAX
#define TOKENS (BLOCKS * 16.0)
#define AT(field) offsetof(struct ucm_policy, field)
/* The default first. */
#define COUNT(field, value, low, high, ...)                                                        \
    {                                                                                              \
#field, value, __VA_ARGS__, .type = POLICY_COUNT, .at = AT(field), .least = low,           \
                                    .most = high                                                   \
    }
#define REAL(field, value, high, ...)                                                              \
    {                                                                                              \
#field, value, __VA_ARGS__, .type = POLICY_REAL, .at = AT(field), .most = high             \
    }
#define NAME(field, value, list, ...)                                                              \
    {                                                                                              \
#field, value, __VA_ARGS__, .type = POLICY_NAME, .at = AT(field), .names = list            \
    }

const struct policy_key policy_keys[] = {
    /* `tokens` with rest and softmax cover the most mass for their bytes, and estimate it. 4 of
     * them cover 0.988 of what an oracle covers. 8 find answers at 32k that 4 lose. */
    NAME(summary, "tokens", summaries, "method of the summary; sets the method's usual parameters"),
    NAME(kind, "mean", kinds, "which mean", .summaries = SUMMARY(MEAN)),
    COUNT(run, "4", 1, 1024, "tokens of a mean", .summaries = SUMMARY(SUBMEAN)),
    REAL(keep, "1", 1, "share of the RoPE pairs, the slowest", .summaries = SUMMARY(SUBMEAN)),
    NAME(pairs, "neox", rope_pairs, "which channels RoPE pairs", .summaries = SUMMARY(SUBMEAN)),
    COUNT(bits, "128", 64, 256, "of a token and KV head: 64, 128 or 256",
          .summaries = SUMMARY(HASH)),
    COUNT(rope_bits, "0", 0, 255, "of them for MLA's rotated part; 0: in proportion",
          .summaries = SUMMARY(HASH)),
    {"seed", "0", "of the hash's rotation", .type = POLICY_SEED, .at = AT(seed),
     .summaries = SUMMARY(HASH)},
    COUNT(chosen, "8", 1, 32, "tokens that stand for the block", .summaries = SUMMARY(TOKENS)),
    COUNT(rest, "1", 0, 1, "1: the mean of the others, too", .summaries = SUMMARY(TOKENS)),
    NAME(metric, "dot", metrics,
         "product, minus the squared distance, or product with the rounded query"),
    NAME(reduce, "softmax", reduces, "over the query heads of a KV head"),
    NAME(heads, "each", head_lists, "a list for each KV head, or one of their sum or maximum"),
    COUNT(rows, "1", 1, 64, "queries of so many last steps vote"),
    REAL(beta, "0", 1000, "what softmax scales scores by; 0: as the model does"),
    NAME(choice, "topk", choices, "how many blocks: a number, or a rule that stops"),
    /* sparse_ratio, min_blocks, sink_blocks and recent_blocks are the defaults of UCM's ESA. */
    REAL(sparse_ratio, "0.3", 1, "of the blocks", .choices = CHOICE(TOPK)),
    COUNT(min_blocks, "4", 0, BLOCKS, "at least so many are attended"),
    COUNT(min_tokens, "0", 0, TOKENS, "the same in tokens; the larger counts"),
    COUNT(sink_blocks, "1", 0, BLOCKS, "first blocks that are always attended"),
    COUNT(recent_blocks, "2", 0, BLOCKS, "last ones"),
    COUNT(sink_tokens, "0", 0, TOKENS, "the same in tokens; the larger counts"),
    COUNT(recent_tokens, "0", 0, TOKENS, "likewise"),
    COUNT(topk_tokens, "0", 0, TOKENS, "in place of sparse_ratio, if not 0",
          .choices = CHOICE(TOPK)),
    COUNT(limit, "0", 0, BLOCKS, "at most so many are attended; 0: no limit"),
    /* PSA's authors name 95 % as an example, and rounds of 4 blocks in another. */
    REAL(eps, "0.95", 1, "share of the attention to cover", .choices = CHOICE(MASS) | ROUNDS),
    COUNT(microbatch, "4", 1, BLOCKS, "blocks of a round", .choices = ROUNDS),
    /* UCM recommends ESA for contexts above 4K. */
    COUNT(dense_below, "4096", 0, UINT32_MAX, "tokens: shorter sequences are dense"),
    /* None. Dense first layers gained nothing: KL 0.0153 in place of 0.0158 at 1/8. One of 32
     * layers takes as much memory as 1/32 of all layers. */
    COUNT(dense_first, "0", 0, UCM_SPARSE_LAYERS_MAX, "first layers that are dense"),
    COUNT(dense_last, "0", 0, UCM_SPARSE_LAYERS_MAX, "last layers that are dense"),
    COUNT(reuse, "1", 1, UCM_SPARSE_LAYERS_MAX, "layers that share a choice"),
    COUNT(retrieval_stride, "1", 1, 1024, "steps that share a choice"),
    COUNT(lag, "0", 0, 1024, "steps until a choice serves"),
    /* With twice what a step needs, 2 to 4 % of the accesses miss. */
    REAL(entries, "2", 1024, "a request's floor in the pool, in steps' worth of blocks"),
    /* These five were measured on a decoder that recalls values, and on SmolLM2-135M with text. */
    REAL(goal, "0", 1, "share that budgets follow; 0: fixed top k", .choices = CHOICE(TOPK)),
    COUNT(budget_tokens, "4096", 1, TOKENS, "of 2^17 tokens at first; other lengths by the root",
          .choices = CHOICE(TOPK)),
    REAL(grow, "0.25", 16, "of the budget, after a step below the goal", .choices = CHOICE(TOPK)),
    REAL(shrink, "0.03125", 1, "of the budget, after `patience` steps at the goal",
         .choices = CHOICE(TOPK)),
    COUNT(patience, "4", 1, 1 << 20, "steps in a row", .choices = CHOICE(TOPK)),
};
const uint32_t policy_n_keys = sizeof(policy_keys) / sizeof(policy_keys[0]);

const struct policy_preset policy_presets[] = {
    {"auto", "top k whose budget begins by the length and follows, by layer, what steps cover",
     "metric=rounded,goal=0.5,min_tokens=1024"},
    {"topk", "2,048 tokens, in the best order there is without exact attention",
     "metric=rounded,topk_tokens=2048"},
    {"psa-estimated",
     "PSA's rounds until the attended weight is eps of that and the estimate of what is left",
     "metric=rounded,choice=estimated"},
    {"psa-certified",
     "PSA's rounds until the attended weight is certainly eps of all: attends nearly everything",
     "summary=box,choice=certified"},
    /* PSA's algorithm 1; its metadata are means or boxes. */
    {"psa", "PSA as published: what is left weighs as much as the lightest attended block, each",
     "summary=box,choice=psa"},
    /* As UCM has it: the mean of the keys, the sum over all heads, one list. A choice serves from
     * the step after the one whose queries made it. */
    {"esa", "ESA: means, one list for all heads, 0.3 of the blocks, every 5 steps, a step late",
     "summary=mean,reduce=mean,heads=sum,retrieval_stride=5,lag=1"},
    /* As UCM has it: minus the L2 distance, summed over the heads, and its windows. Here the
     * distance is squared. Its eviction is not here, since kernels/entries/entries.h decides that
     * for all policies. UCM does not say how many means a block has. Its prefetch engine predicts,
     * so choices are made a step ahead. */
    {"gsa", "GSA: two means a block by distance, one list, 0.3 of the blocks, a step ahead",
     "summary=submean,run=8,metric=l2,reduce=mean,heads=sum,sink_blocks=4,recent_blocks=8,"
     "lag=1"},
    /* As UCM has it: the windows count among the 4,096 tokens. UCM averages q over a group, so that
     * opposed heads cancel. Here the nearest head counts. */
    {"gsa-device", "GSA on the device: hashes of all tokens, 4,096 tokens, 64 and 512 always",
     "summary=hash,reduce=max,topk_tokens=4096,sink_tokens=64,recent_tokens=512"},
    /* UCM keeps the half of the channels with the largest mean |K|, which differs from text to
     * text. A summary that requests share keeps the slower half of the pairs instead. */
    {"kvstar", "KVStar as written: means of 4 tokens, 8 queries' softmax without 1 / sqrt(d)",
     "summary=submean,run=4,keep=0.5,rows=8,beta=1,sink_blocks=2,recent_blocks=4,"
     "retrieval_stride=8"},
    {"kvstar-corrected", "KVStar with its softmax scaled by 1 / sqrt(d)",
     "summary=submean,run=4,keep=0.5,rows=8,sink_blocks=2,recent_blocks=4,retrieval_stride=8"},
};
const uint32_t policy_n_presets = sizeof(policy_presets) / sizeof(policy_presets[0]);

bool policy_rounds(const struct ucm_policy *p)
{
    return p->summary == UCM_SPARSE_MEAN || p->summary == UCM_SPARSE_SUBMEAN ||
           p->summary == UCM_SPARSE_TOKENS;
}

void policy_summary_defaults(struct ucm_policy *p)
{
    if (p->metric == UCM_SPARSE_ROUNDED && !policy_rounds(p)) /* a preset's */
        p->metric = UCM_SPARSE_DOT;
    p->kind = p->run = p->bits = p->rope_bits = p->chosen = p->rest = 0;
    p->seed = 0;
    p->keep = 1;
    if (p->summary == UCM_SPARSE_SUBMEAN)
        p->run = 4;
    if (p->summary == UCM_SPARSE_HASH)
        p->bits = 128;
    if (p->summary == UCM_SPARSE_TOKENS) {
        p->chosen = 8;
        p->rest = UCM_SPARSE_REST_MEAN;
    }
}

int ucm_policy_preset(uint32_t i, const char **name, const char **about)
{
    if (i >= policy_n_presets)
        return client_fail(UCM_ENOTFOUND, "there are %u presets", policy_n_presets);
    *name = policy_presets[i].name;
    *about = policy_presets[i].about;
    return 0;
}

int ucm_policy_key(uint32_t i, const char **name, const char **about)
{
    if (i >= policy_n_keys)
        return client_fail(UCM_ENOTFOUND, "there are %u keys", policy_n_keys);
    *name = policy_keys[i].name;
    *about = policy_keys[i].about;
    return 0;
}
