/* What the kernels of select.cu take, filled in by client/cuda/sparse_select.c. All addresses are
 * the GPU's. Kernels take it by value, so a captured launch keeps its own copy. */
#ifndef UCM_KERNELS_SELECT_CUDA_H
#define UCM_KERNELS_SELECT_CUDA_H

#include "kernels/sparse/warp.cuh"

#include <stdint.h>

#define UCM_SELECT_CUDA_THREADS 512u
#define UCM_SELECT_CUDA_SEQUENCES 1024u /* of one launch */
#define UCM_SELECT_CUDA_BLOCKS                                                                     \
    ((1u << 20) - 1)               /* of a sequence: sums of weights fit 32 + 12 bits */
#define UCM_SELECT_CUDA_RAW 16384u /* scores of query heads in shared memory */
#define UCM_SELECT_CUDA_TILE 512u  /* blocks of an item, at most */
#define UCM_SELECT_CUDA_PAD                                                                        \
    4u /* addresses of summaries past a tile's, for teams that have no block */
#define UCM_SELECT_CUDA_MATRIX_BLOCKS 16u /* that a warp scores at once by the matrix units */
#define UCM_SELECT_CUDA_DIGITS 2048u
#define UCM_SELECT_CUDA_KEYS                                                                       \
    16384u /* of a list, held while it is chosen from by mass; longer lists are read again */
#define UCM_SELECT_CUDA_SLICE 8192u  /* of a long list: what one item looks through */
#define UCM_SELECT_CUDA_LONG 8192u   /* longer lists are looked through by several thread blocks */
#define UCM_SELECT_CUDA_FOUND 10240u /* blocks that a choice compares one by one, at most */
#define UCM_SELECT_CUDA_MARKS 4096u  /* words of a bit a block, of a choice at once */
#define UCM_SELECT_CUDA_NO_INDEX 0xffffffffu /* in an answer, after the chosen blocks */

/* Dynamic shared memory, in bytes, is at least what a choice takes. Scoring takes the scores of a
 * whole tile, then RINGS bytes, then the addresses of the tile's summaries. If N > 0, vectors come
 * through the RINGS bytes; otherwise these hold the prepared queries. If N is 0 and warps have
 * several jobs each, the scores of two chunks come first. After them, summaries of chunks are
 * staged in STAGES places, which may take more. */
#define UCM_SELECT_CUDA_SHARED                                                                     \
    (4 * (2 * UCM_SELECT_CUDA_FOUND + UCM_SELECT_CUDA_MARKS + UCM_SELECT_CUDA_SLICE))
#define UCM_SELECT_CUDA_RINGS_AT (4 * UCM_SELECT_CUDA_RAW)
#define UCM_SELECT_CUDA_RINGS (54u << 10)
#define UCM_SELECT_CUDA_STAGES 2u
#define UCM_SELECT_CUDA_STAGE (68u << 10) /* bytes of one, at most */

#define UCM_SELECT_CUDA_SHORT                                                                      \
    512u /* queries of a sequence, at most, of a kernel whose N is above 0 */

enum ucm_select_cuda_q {
    UCM_SELECT_Q_F32 = 0,
    UCM_SELECT_Q_F16 = 1,
    UCM_SELECT_Q_BF16 = 2,
};

/* The kernels ucm_select_FAMILY_QUERIES_N score QUERIES (1 or 4) of one KV head at once. N is 2 or
 * 4 for vectors of 32 * N channels, or 0 for any. For UCM_METRIC_ROUNDED,
 * ucm_select_matrix_FAMILY_N_PANELS score 4 * PANELS queries of a KV head at once; PANELS is 1 or
 * 2, and N 2 or 4. FAMILY is DOT or REST. */
enum ucm_select_cuda_family {
    UCM_SELECT_DOT = 0, /* mean, submean, tokens without rest */
    UCM_SELECT_L2 = 1,  /* the same, minus the squared distance; N is 0 */
    UCM_SELECT_BOX = 2,
    UCM_SELECT_STATS = 3,
    UCM_SELECT_HASH = 4, /* N is 0 */
    UCM_SELECT_REST = 5, /* tokens with rest */
};

/* How many items of a sequence are done, by their kinds. All are 0 between launches. */
struct ucm_select_cuda_progress {
    uint32_t prepared, scored, weighed, shared, looked;
};

struct ucm_select_cuda {
    /* From the summary's plan. */
    uint32_t kv_heads, head_dim, tokens;
    uint32_t vectors, channels, vector_bytes;
    uint32_t chosen;  /* tokens with rest: the vectors before the last */
    uint32_t padded;  /* channels, rounded up to a multiple of 32; hash: words of 32 bits */
    uint32_t aligned; /* channels is a multiple of 4, and so every vector's place */
    uint32_t array[3], scale[3];
    uint32_t n_segments;
    struct ucm_cuda_segment segment[2];
    float stats_beta, ln_count; /* of the plan: also for tokens with rest */
    uint64_t channel;           /* uint16_t[channels]; 0: all */
    uint64_t flips;             /* uint32_t[] */
    /* Scores. */
    uint32_t reduce, heads, rows, q_heads;
    uint32_t queries_a_head; /* KV head: rows * query heads of it */
    uint32_t query_floats;   /* of a prepared query, a multiple of 4 */
    uint32_t rounds; /* metric UCM_METRIC_ROUNDED: for 8 bits a channel 7, for 4 bits 3; else 0 */
    float beta;
    /* Choice. */
    uint32_t policy, block_tokens, topk_tokens, min_blocks;
    uint32_t sink_blocks, recent_blocks, k_max;
    float mass_beta;
    double sparse_ratio, eps;
    uint32_t room; /* of a list's answer */
    /* Sizes. */
    uint32_t sequences, max_blocks, lists;
    uint32_t pitch;      /* max_blocks, rounded up to a multiple of 4 */
    uint32_t slices;     /* of a list, if max_blocks is above UCM_SELECT_CUDA_LONG; else 0 */
    uint32_t tile;       /* blocks of an item, at most */
    uint32_t grain;      /* a tile is a multiple of it, the last of a sequence aside */
    uint32_t chunk;      /* of them, scored between two barriers: all, or a power of two */
    uint32_t raw_pitch;  /* from one query's scores of a chunk to the next one's */
    uint32_t staged;     /* bytes of a block's summary in shared memory; 0: read where it lies */
    uint32_t stage_at;   /* in shared memory, in bytes */
    uint32_t summary_at; /* the tile's addresses there, a multiple of 8 */
    uint32_t
        prepares; /* an item for each sequence prepares queries, in the workspace; else each thread
                   * block does .. */
    uint32_t query_at;   /* .. there, a multiple of 16; 0, where scores go, if N > 0 */
    uint32_t copy_bytes; /* of a summary, that scores need */
    /* The launch. */
    uint32_t blocks;                  /* of the summaries' memory: numbers beyond have no summary */
    uint32_t q_dtype;                 /* enum ucm_select_cuda_q */
    uint32_t wide;                    /* summaries are aligned to 16 bytes */
    uint32_t q_aligned;               /* every query begins at a multiple of 4 elements */
    uint64_t summaries, block_stride; /* the layer's */
    uint64_t table, table_stride;     /* int32_t; elements from a sequence's row to the next */
    uint64_t n_blocks;                /* int32_t[sequences] */
    uint64_t most;                    /* uint32_t[sequences], or 0: see ucm_cuda_select_layer */
    uint64_t q, q_stride;             /* elements from a sequence's queries to the next */
    uint64_t index, count, score;     /* score may be 0 */
    /* In the workspace. */
    uint64_t
        ticket; /* uint32_t[2]: the next item; thread blocks that are done; 0 between launches */
    uint64_t progress; /* struct ucm_select_cuda_progress[sequences] */
    uint64_t poison;   /* a summary for blocks that have none: each head is poisoned */
    uint64_t queries;  /* if `prepares`: float[sequences][kv_heads][queries_a_head][query_floats] */
    uint64_t scores;   /* float[sequences][lists][pitch] */
    uint64_t
        /* top k: uint32_t[sequences][lists][UCM_SELECT_CUDA_DIGITS]; 0 between launches */
        digits;
    uint64_t found;    /* long lists: uint32_t[sequences][lists]; 0 between launches */
    uint64_t found_at; /* and uint32_t[2][UCM_SELECT_CUDA_FOUND] of each: keys and blocks */
    uint64_t marks;    /* and uint32_t[(max_blocks + 31) / 32] of each */
    uint64_t raw;      /* softmax: float[sequences][rows * q_heads][pitch] */
    uint64_t top;      /* softmax: uint32_t[sequences][rows * q_heads]: keys; 0 between launches */
    uint64_t sum;      /* softmax: uint64_t[sequences][rows * q_heads]; 0 between launches */
};

#endif
