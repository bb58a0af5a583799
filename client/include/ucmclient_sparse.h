/* libucmclient: retrieval, for workers that attend to a part of a long context.
 *
 * A *block summary* is a few bytes for each layer of a block that say which queries want it.
 * Summaries are blocks of a namespace of their own, derived from that of the KV. They lie on every
 * tier, all workers of the tenant share them, and lookups find them again after a restart. A
 * *sequence* names the blocks of one context once, and keeps them in some tier and their summaries
 * in DRAM. A *selection* scores the blocks of sequences against queries and chooses some.
 * docs/sparse.md has the methods, what they cost and what they are worth, and when not to use any
 * of this.
 *
 * The functions that end in _local compute on the caller's memory and need no daemon. They, the
 * daemon and the GPU (libucmclient_cuda) give the same bits.
 *
 * Threads, fork, errors, timeouts and ownership are as in ucmclient.h. -UCM_EINVALID comes with a
 * sentence that names the field. NaN and infinities in K and V are no errors: the summary of such a
 * block is *poisoned* and every selection takes it. In a query they are -UCM_EINVALID.
 *
 * Numbers are those of docs/methods.md. Zeroed structs have every default, except where a
 * field's comment names none. */
#ifndef UCMCLIENT_SPARSE_H
#define UCMCLIENT_SPARSE_H

#include <ucmclient.h>
#include <ucmclient_mapping.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- summaries ---- */

enum ucm_sparse_dtype {
    UCM_SPARSE_F32 = 0,
    UCM_SPARSE_F16 = 1,
    UCM_SPARSE_BF16 = 2,
    UCM_SPARSE_FP8_E4M3 = 3, /* each decodes to its value, scale 1 */
};

/* Where K and V lie in the bytes of one layer of a block, in bytes from its start. The
 * channels of one token and KV head are contiguous. */
struct ucm_sparse_shape {
    uint32_t dtype;      /* enum ucm_sparse_dtype */
    uint32_t tokens;     /* of a block */
    uint32_t kv_heads;   /* of this part, 1 to 1024; 1 for MLA */
    uint32_t head_dim;   /* channels of K, a multiple of 4, at most 1024 */
    uint32_t v_head_dim; /* channels of V; 0: there is no V (MLA), or no method needs it */
    uint32_t rope_dim;   /* MLA: how many of the last channels of K are rotated; else 0 */
    uint64_t k_offset, k_token_stride, k_head_stride;
    uint64_t v_offset, v_token_stride, v_head_stride;
};

enum ucm_sparse_method {
    UCM_SPARSE_MEAN = 1,    /* ESA: one vector a KV head; see enum ucm_sparse_mean */
    UCM_SPARSE_SUBMEAN = 2, /* GSA, KVStar: means of `run` tokens, of some channels */
    UCM_SPARSE_BOX = 3,     /* Quest, PSA: smallest and largest key of each channel; a true bound */
    UCM_SPARSE_HASH = 4,    /* GSA on device: sign bits of each token's rotated key */
    UCM_SPARSE_STATS = 5,   /* mean and variance of K, mean of V: an estimate of attention mass */
    UCM_SPARSE_TOKENS = 6,  /* InfLLM: a few tokens stand for the block */
};
enum ucm_sparse_mean {
    UCM_SPARSE_MEAN_PLAIN = 0,
    UCM_SPARSE_MEAN_MAX = 1,        /* the largest value of each channel */
    UCM_SPARSE_MEAN_NORMALISED = 2, /* the mean, divided by its length */
};
/* The channels that RoPE rotates together as pair i. */
enum ucm_sparse_pairs {
    UCM_SPARSE_PAIRS_NEOX = 0,        /* i and i + head_dim / 2 */
    UCM_SPARSE_PAIRS_INTERLEAVED = 1, /* 2i and 2i + 1 */
};

/* What `tokens` holds of the tokens that were not chosen. */
enum ucm_sparse_rest {
    UCM_SPARSE_REST_NONE = 0,
    UCM_SPARSE_REST_MEAN = 1, /* their mean; 4 bits a channel; scores estimate attention mass */
};

/* A method, its parameters and the KV that it reads. Leave the fields of other methods 0. */
struct ucm_sparse_summary {
    uint32_t method;     /* enum ucm_sparse_method; no default */
    uint32_t kind;       /* mean: enum ucm_sparse_mean */
    uint32_t run;        /* submean: tokens of a mean; divides shape.tokens */
    uint32_t pairs;      /* submean with `keep`: enum ucm_sparse_pairs */
    const uint8_t *keep; /* submean: bit i % 8 of byte i / 8: pair i counts; NULL: all do */
    uint32_t keep_bytes; /* (head_dim / 2 + 7) / 8, or 0 */
    uint32_t bits;       /* hash: 64, 128 or 256 a token and KV head */
    uint32_t rope_bits;  /* hash with rope_dim: how many of `bits` are for the rotated channels */
    uint64_t seed;       /* hash: of the rotation; summaries of different seeds can't be compared */
    uint32_t chosen;     /* tokens: how many stand for the block */
    uint32_t rest;       /* tokens: enum ucm_sparse_rest */
    struct ucm_sparse_shape shape;
};

/* Checks a summary. *bytes (may be NULL) receives the bytes of one layer of one block, a multiple
 * of 4. */
UCM_API int ucm_sparse_summary_bytes(const struct ucm_sparse_summary *summary, uint64_t *bytes);

/* Opens the namespace of the summaries of `base`. It is a namespace as any other, for lookups,
 * loads, dumps and regions. It has the base's keys, parts and layers, and
 * ucm_sparse_summary_bytes() a layer. The worker may compute summaries and dump them there. If
 * `build` is not 0, the daemon computes them for each block that is stored in the base from now on.
 * It does so for blocks of this and other workers, while this client is connected.
 *
 * Close it before the base. A reconnect opens it again, as it does all namespaces. */
UCM_API int ucm_sparse_summary_open(struct ucm_namespace *base,
                                    const struct ucm_sparse_summary *summary, int build,
                                    int timeout_ms, struct ucm_namespace **out);

/* Has the daemon compute summaries of blocks that are stored already. ns is from
 * ucm_sparse_summary_open. The transfer's keys, n_keys, part, n_parts, priority and
 * daemon_timeout_ms are as for ucm_prefetch. Result of a block: OK: it was computed; EXISTS: it was
 * there; MISS: the base has no such block; IN_PROGRESS: a worker is storing it. */
UCM_API int ucm_sparse_summary_build(struct ucm_namespace *ns, const struct ucm_transfer *transfer,
                                     int timeout_ms, struct ucm_task **out);

/* Computes the summaries of n layers or blocks. The i-th is computed from kv + i * kv_stride (the
 * layer that summary->shape describes) and written to out + i * out_stride. kv_bytes and out_bytes
 * are the sizes of the whole arrays; nothing is read or written beyond them. Strides are in
 * bytes. */
UCM_API int ucm_sparse_summary_local(const struct ucm_sparse_summary *summary, const void *kv,
                                     size_t kv_bytes, size_t kv_stride, uint32_t n, void *out,
                                     size_t out_bytes, size_t out_stride);

/* ---- sequences ---- */

struct ucm_sequence;

/* Opens an empty sequence over a namespace of ucm_sparse_summary_open, which must stay open as long
 * as the sequence is used. part: of whose KV, from 0. The daemon ends a sequence that no call has
 * named for lease_ms (0: its longest lease).
 *
 * The library keeps the sequence's keys. After a broken connection, or a long time without use, the
 * next call that names the sequence opens it again and appends them. If fewer blocks are found than
 * before, that call returns -UCM_EDISCONNECTED, once, and the sequence goes on with those. Earlier
 * choices may then name blocks that it lost. Between a break and that call nothing protects the
 * blocks. 2^20 keys of 32 bytes take 32 MiB here. */
UCM_API int ucm_sequence_open(struct ucm_namespace *summaries, uint32_t part, uint32_t lease_ms,
                              int timeout_ms, struct ucm_sequence **out);
/* Ends the sequence and frees the handle. Never blocks. Prefetches that still wait are cancelled.
 * NULL is allowed. */
UCM_API void ucm_sequence_close(struct ucm_sequence *sequence);

enum {
    UCM_SEQUENCE_HAS_SUMMARY = 4, /* in the status of a block: its summary is held */
    UCM_SEQUENCE_BLOCKS_MAX = 1 << 20,
};

struct ucm_sequence_keys {
    const void *keys; /* n_keys * key_bytes, from the sequence's end on */
    /* any number; the sequence's blocks stay at most UCM_SEQUENCE_BLOCKS_MAX */
    uint32_t n_keys;
    uint32_t build;             /* not 0: the daemon computes summaries that are missing */
    uint32_t priority;          /* of reading summaries and blocks, 0 to 7 */
    uint32_t daemon_timeout_ms; /* for reading and computing; 0: the timeout */
    /* If not NULL, receives a byte a key. That is the enum ucm_found of its block, or UCM_FOUND_NOT
     * if it was not appended. UCM_SEQUENCE_HAS_SUMMARY is added if its summary is held. */
    uint8_t *status;
};
struct ucm_sequence_result {
    uint32_t blocks;                /* of the sequence now */
    uint32_t missing;               /* keys that were not appended: the first that is not cached,
                                     * and all after it */
    uint32_t in_dram, nvme, shared; /* where the appended blocks lie */
    uint32_t summaries; /* how many of them have a summary. The others are in every selection from
                         * the sequence */
    uint32_t built;     /* summaries that the daemon computed for this call */
};
/* Appends blocks, as long as they are cached without a gap. If it fails in the middle, what was
 * appended stays, and status is undefined; ucm_sequence_blocks tells how many blocks there are.
 * result may be NULL. */
UCM_API int ucm_sequence_append(struct ucm_sequence *sequence, const struct ucm_sequence_keys *keys,
                                int timeout_ms, struct ucm_sequence_result *result);
/* How many blocks the sequence has, as far as the library knows. */
UCM_API uint32_t ucm_sequence_blocks(struct ucm_sequence *sequence);

/* Brings blocks of the sequence into DRAM. index: n numbers below ucm_sequence_blocks.
 * -UCM_ENOTFOUND from the task: the daemon had ended the sequence; the next call that names it
 * opens it again. */
UCM_API int ucm_sequence_prefetch(struct ucm_sequence *sequence, const uint32_t *index, uint32_t n,
                                  uint32_t priority, uint32_t daemon_timeout_ms, int timeout_ms,
                                  struct ucm_task **out);

/* ---- selection ---- */

enum ucm_sparse_metric {
    UCM_SPARSE_DOT = 0, /* as its method scores */
    UCM_SPARSE_L2 = 1,  /* minus the squared distance: mean, submean and tokens */
    /* The product with the query rounded to 10 to 14 bits, so that sums are exact. It is several
     * times as fast on a GPU, whose matrix units compute it. For mean, submean and tokens, also
     * with rest. */
    UCM_SPARSE_ROUNDED = 2,
};
/* Over the queries that share a KV head. */
enum ucm_sparse_reduce {
    UCM_SPARSE_REDUCE_MAX = 0,
    UCM_SPARSE_REDUCE_MEAN = 1,
    UCM_SPARSE_REDUCE_SOFTMAX = 2, /* the sum of each query's softmax over the blocks */
};
/* Over the KV heads. */
enum ucm_sparse_heads {
    UCM_SPARSE_HEADS_EACH = 0, /* one list of blocks a KV head */
    UCM_SPARSE_HEADS_SUM = 1,  /* one list for all */
    UCM_SPARSE_HEADS_MAX = 2,
};
struct ucm_sparse_score {
    uint32_t metric, reduce, heads;
    uint32_t rows;    /* queries at once: the last so many tokens; 0: 1 */
    uint32_t q_heads; /* of a query, a multiple of kv_heads; no default */
    float beta; /* softmax: what scores are scaled by; 0: 1 / sqrt(head_dim), but 1 for stats and
                       * tokens with rest */
};

/* What serves the summary best for UCM_SPARSE_TOPK: a zeroed score with UCM_SPARSE_REDUCE_SOFTMAX.
 * For hashes and normalised means, whose scores are no logits, it is UCM_SPARSE_REDUCE_MAX. Softmax
 * takes up to twice the time. Its scores are no logits, which UCM_SPARSE_MASS needs. The caller
 * sets q_heads. */
UCM_API void ucm_sparse_score_defaults(const struct ucm_sparse_summary *summary,
                                       struct ucm_sparse_score *score);

enum ucm_sparse_policy {
    UCM_SPARSE_TOPK = 0, /* a number of blocks */
    UCM_SPARSE_MASS = 1, /* as few blocks as cover `eps` of the estimated attention */
};
struct ucm_sparse_choose {
    uint32_t policy;
    uint32_t topk_tokens;   /* topk: if not 0, how many tokens, in place of sparse_ratio */
    uint32_t min_blocks;    /* topk: at least so many blocks */
    uint32_t sink_blocks;   /* so many first blocks are always chosen, and count */
    uint32_t recent_blocks; /* so many last ones */
    uint32_t limit;         /* most blocks of a list, poisoned ones and windows included; 0: no
                             * limit */
    double sparse_ratio;    /* topk: of the blocks, 0 to 1 */
    double eps;             /* mass: 0 to 1 */
    double beta_m;          /* mass: weights are exp(beta_m * score); 0: ucm_sparse_score.beta.
                               * Functions that take only scores refuse 0 */
};
/* The defaults of ESA and GSA: topk, sparse_ratio .3, sink_blocks 1, recent_blocks 2,
 * min_blocks 4; eps .95 and beta_m 1 for mass. A zeroed struct chooses no block at all. */
UCM_API void ucm_sparse_choose_defaults(struct ucm_sparse_choose *choose);

struct ucm_sparse_select {
    struct ucm_sequence *const *sequences; /* row i: layer layers[i] of sequences[i] */
    const uint32_t *layers;
    uint32_t n_rows;  /* 1 to 4096; the sequences are of one namespace of summaries */
    uint32_t q_dtype; /* F32, F16 or BF16 */
    const void *q;    /* [n_rows][score.rows][score.q_heads][head_dim], contiguous */
    struct ucm_sparse_score score;
    struct ucm_sparse_choose choose;
    uint32_t prefetch;          /* 0, or priority + 1: chosen blocks are brought into DRAM */
    uint32_t daemon_timeout_ms; /* 0: the timeout */
};
/* The lists of all rows, one after the other: by row, then by KV head unless `heads` makes one
 * list. */
struct ucm_sparse_selected {
    uint32_t *counts; /* receives the number of blocks of each list */
    uint32_t *index;  /* receives their numbers in the sequence, ascending in each list */
    float *scores;    /* receives their scores; NULL: not wanted */
    uint32_t counts_room, index_room; /* elements; ucm_sparse_room tells how many are enough */
    uint32_t n_lists, n_blocks;       /* written: elements of counts and of index */
    uint32_t evicted;    /* chosen blocks that were evicted by name meanwhile and so left out:
                       * recompute them */
    uint64_t no_summary; /* blocks of the rows that have no summary: always chosen, up to `limit` */
};
/* How much room the answer takes at most if each block has a summary that is not poisoned; either
 * may be NULL. Other blocks are in every list, beyond this. So set `limit`, or add the number of
 * such blocks (ucm_sequence_result). */
UCM_API int ucm_sparse_room(const struct ucm_sparse_select *select, uint32_t *lists,
                            uint32_t *blocks);
/* Scores and chooses in the daemon. Ties go to the lower block. If the answer does not fit, the
 * message of -UCM_EINVALID says how long it is. The library sends as many requests as the
 * protocol's frames need. */
UCM_API int ucm_sparse_select(struct ucm_client *client, const struct ucm_sparse_select *select,
                              int timeout_ms, struct ucm_sparse_selected *out);

/* Summaries in the caller's memory: block b's at p + b * stride; p and stride are multiples of
 * 4. */
struct ucm_sparse_summaries {
    const void *p;
    size_t bytes, stride;
    uint32_t n;
    const uint8_t *missing; /* n bytes, not 0: block b has no summary; NULL: all have one */
};
/* One float a list and block: [lists][n], lists as for a row of ucm_sparse_select. q: one row. */
UCM_API int ucm_sparse_score_local(const struct ucm_sparse_summary *summary,
                                   const struct ucm_sparse_score *score,
                                   const struct ucm_sparse_summaries *summaries, const void *q,
                                   uint32_t q_dtype, float *scores, size_t scores_room);
/* Half a point for each use of a block, and .1 to 1 by its place. These are the first GSA's scores,
 * which need no summary. uses, scores: n. */
UCM_API int ucm_sparse_score_history(const uint32_t *uses, uint32_t n, float *scores);
/* Chooses among the n scores of one list. *count receives how many numbers index received. */
UCM_API int ucm_sparse_choose_local(const struct ucm_sparse_choose *choose, uint32_t block_tokens,
                                    const float *scores, uint32_t n, uint32_t *index,
                                    uint32_t index_room, uint32_t *count);
/* Scores and chooses for one row. out: as for ucm_sparse_select. */
UCM_API int ucm_sparse_select_local(const struct ucm_sparse_summary *summary,
                                    const struct ucm_sparse_score *score,
                                    const struct ucm_sparse_choose *choose,
                                    const struct ucm_sparse_summaries *summaries, const void *q,
                                    uint32_t q_dtype, struct ucm_sparse_selected *out);

/* ---- which layers, which steps ---- */

/* When a sequence is attended sparsely. A worker asks at each layer of each step. A layer is dense,
 * selects, or reuses. A reusing layer attends what the last selecting layer before it chose, and
 * needs no summaries. A selecting layer chooses every retrieval_stride steps. A choice made with
 * the query of step N serves from step N + lag on, until the next one does. The first choice of a
 * sequence serves at once. Pure functions: no client, no daemon. */
enum ucm_sparse_layer {
    UCM_SPARSE_LAYER_DENSE = 0,
    UCM_SPARSE_LAYER_SELECT = 1,
    UCM_SPARSE_LAYER_REUSE = 2,
};
enum { UCM_SPARSE_LAYERS_MAX = 512 };
struct ucm_sparse_schedule {
    uint32_t layers;                     /* 1 to 512 */
    uint8_t mode[UCM_SPARSE_LAYERS_MAX]; /* enum ucm_sparse_layer */
    uint32_t dense_below;                /* tokens: shorter sequences are dense in every layer */
    uint32_t retrieval_stride;           /* steps, 1 to 1024 */
    uint32_t lag;                        /* steps, at most 1024 */
    uint32_t rows;                       /* ucm_sparse_score.rows, 1 to 64 */
    float beta;                          /* ucm_sparse_score.beta */
};
/* The first two layers are dense. All others select every 5 steps, without lag, from 4,096 tokens
 * on. */
UCM_API int ucm_sparse_schedule_defaults(uint32_t layers, struct ucm_sparse_schedule *out);
/* The same, changed by what is known of a model. model: the name that it has on its hub, or a part
 * of it. -UCM_EUNSUPPORTED: it attends in a way that a choice of blocks would change; the message
 * says which. -UCM_ENOTFOUND: nothing is known of it. */
UCM_API int ucm_sparse_schedule_for_model(const char *model, uint32_t layers,
                                          struct ucm_sparse_schedule *out);
/* What a layer does in a step. */
struct ucm_sparse_step {
    uint32_t mode;      /* enum ucm_sparse_layer; the other fields are 0 where it is dense */
    uint32_t choose;    /* not 0: it makes a choice with this step's queries ... */
    uint32_t rows;      /* ... and those of earlier steps; how many in all */
    uint32_t layer;     /* whose choice is attended */
    uint64_t chosen_at; /* the step whose queries made it */
};
/* step: from 0 on, counted from the first at which the sequence had dense_below tokens. tokens:
 * of the sequence. */
UCM_API int ucm_sparse_schedule_step(const struct ucm_sparse_schedule *schedule, uint32_t layer,
                                     uint64_t step, uint64_t tokens, struct ucm_sparse_step *out);
/* *choices receives how many choices of a layer can be made and not replaced yet, at most. */
UCM_API int ucm_sparse_schedule_choices(const struct ucm_sparse_schedule *schedule,
                                        uint32_t *choices);

/* ---- policies ---- */

/* One description of how a worker attends sparsely. It says which summaries there are, how they are
 * scored, what is chosen in which layers and steps, and what stays on the GPU. It is read from a
 * text: the name of a preset, and keys that differ from it. "psa-estimated" is one,
 * "esa:sparse_ratio=0.2,retrieval_stride=1" another. Each field below is a key of that text under
 * the same name. docs/sparse.md has the presets, the source of each number, and what each preset is
 * worth. The functions turn a policy into what the calls above take. */
enum ucm_sparse_choice {
    UCM_SPARSE_CHOICE_TOPK = 0, /* a number of blocks */
    UCM_SPARSE_CHOICE_MASS = 1, /* until the scores' own softmax has eps */
    /* Blocks in the order of their scores, `microbatch` at a time. Attention stops when the
     * attended weight is at least eps of the sum of it and what is left. What is left weighs: */
    UCM_SPARSE_CHOICE_PSA = 2,       /* each block as much as the lightest attended one */
    UCM_SPARSE_CHOICE_ESTIMATED = 3, /* what the scores say, of `stats` or `tokens` with rest */
    UCM_SPARSE_CHOICE_CERTIFIED = 4, /* at most what `box` allows */
};

struct ucm_policy {
    char preset[24]; /* its name; "" of one that was made by hand */
    /* Summaries, as struct ucm_sparse_summary. */
    uint32_t summary; /* enum ucm_sparse_method */
    uint32_t kind, run, pairs, bits, rope_bits, chosen, rest;
    uint64_t seed;
    double keep; /* submean: which share of the RoPE pairs is kept, the slowest ones */
    /* Scores, as struct ucm_sparse_score. */
    uint32_t metric, reduce, heads, rows;
    double beta;
    /* The choice, as struct ucm_sparse_choose. */
    uint32_t choice; /* enum ucm_sparse_choice */
    uint32_t topk_tokens, min_blocks, limit;
    uint32_t min_tokens; /* as min_blocks; the larger one counts */
    double sparse_ratio, eps;
    uint32_t microbatch;                 /* psa, estimated, certified: blocks a round */
    uint32_t sink_blocks, recent_blocks; /* blocks */
    uint32_t sink_tokens, recent_tokens; /* the same in tokens; the larger one counts */
    /* Layers and steps, as struct ucm_sparse_schedule. */
    uint32_t dense_below;             /* tokens */
    uint32_t dense_first, dense_last; /* layers */
    uint32_t
        reuse; /* of so many selecting layers in a row the first chooses for all; 1: each chooses */
    uint32_t retrieval_stride, lag;
    /* A request's floor in the pool of entries: blocks of so many steps. */
    double entries;
    /* Top k with a budget that follows what steps cover. goal 0 switches it off. */
    double goal;            /* share to cover */
    uint32_t budget_tokens; /* with which a request of 2^17 tokens begins; for others it grows with
                             * the root of the length */
    double grow, shrink;    /* shares of the budget */
    uint32_t patience;      /* steps in a row that cover the goal, before it shrinks */
};

/* -UCM_EINVALID: the message names the key and says what would be right. */
UCM_API int ucm_policy_parse(const char *text, struct ucm_policy *out);
/* Checks whether fields fit together, for a worker that fills in a policy by hand. */
UCM_API int ucm_policy_check(const struct ucm_policy *policy);
/* The shortest text that gives the policy: its preset, and each key that differs. -UCM_EINVALID: it
 * has no preset, or room (bytes, with the final 0) is too small; UCM_POLICY_TEXT is always
 * enough. */
enum { UCM_POLICY_TEXT = 1024 };
UCM_API int ucm_policy_text(const struct ucm_policy *policy, char *text, size_t room);
/* The i-th preset: its name and a sentence about it; -UCM_ENOTFOUND after the last. */
UCM_API int ucm_policy_preset(uint32_t i, const char **name, const char **about);
/* The i-th key, likewise. */
UCM_API int ucm_policy_key(uint32_t i, const char **name, const char **about);

/* The summary of the policy for K and V of this shape. keep: 64 bytes that *out points into. */
UCM_API int ucm_policy_summary(const struct ucm_policy *policy,
                               const struct ucm_sparse_shape *shape, uint8_t keep[64],
                               struct ucm_sparse_summary *out);
UCM_API int ucm_policy_score(const struct ucm_policy *policy, uint32_t q_heads,
                             struct ucm_sparse_score *out);
/* model: its name for ucm_sparse_schedule_for_model, whose errors this returns, too. NULL: any
 * model that attends to all of the context in all layers. */
UCM_API int ucm_policy_schedule(const struct ucm_policy *policy, const char *model, uint32_t layers,
                                struct ucm_sparse_schedule *out);

/* The state of one request and layer, kept from step to step. */
struct ucm_policy_budget {
    uint32_t blocks;
    uint32_t calm;  /* steps in a row that covered the goal */
    uint32_t least; /* of blocks */
};
/* A request's budget when it begins; blocks: its complete ones. */
UCM_API int ucm_policy_budget_begin(const struct ucm_policy *policy, uint32_t block_tokens,
                                    uint32_t blocks, struct ucm_policy_budget *budget);
/* Moves the budget on after a step. share: what the step covered of the layer's least covered KV
 * head, measured as the choice `estimated` does. Nothing within a step depends on it, so a worker
 * may read shares and set budgets while the GPU runs. */
UCM_API int ucm_policy_budget_next(const struct ucm_policy *policy, uint32_t blocks, float share,
                                   struct ucm_policy_budget *budget);
/* What a selection among so many complete blocks takes. budget: NULL unless the policy has a goal.
 * For PSA's choices the result is the most blocks that a list orders; rounds attend the first of
 * them. */
UCM_API int ucm_policy_choose(const struct ucm_policy *policy, uint32_t block_tokens,
                              uint32_t blocks, const struct ucm_policy_budget *budget,
                              struct ucm_sparse_choose *out);

#ifdef __cplusplus
}
#endif
#endif
