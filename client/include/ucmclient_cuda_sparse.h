/* libucmclient_cuda: summaries and selections on the worker's GPU. ucmclient_sparse.h says what
 * they are, and docs/design/retrieval.md what each method computes. These kernels give the same
 * bits as the daemon, and as the functions of ucmclient_sparse.h that end in _local. They need no
 * connection.
 *
 * A worker builds summaries of blocks when it stores the blocks. It builds them into a region of
 * the summaries' namespace in its own memory, and dumps them like any blocks. Or it loads them
 * there. In each step and layer it then chooses from the summaries in that region, by a table of
 * block numbers for each sequence. That is one launch, which a CUDA graph can capture. A block's
 * number in the KV and its number in the summaries may differ.
 *
 * Threads: calls for different handles from any threads; calls for one handle one at a time. A
 * launch runs later than its call, and what it reads must stay until it has run. The launches of
 * one ucm_cuda_select share a workspace, so they must follow each other, in one stream or by
 * events. Handles use the GPU's primary context, which is the CUDA runtime's, and do not change the
 * caller's current context. Fork: use and close nothing in the child.
 *
 * Capture: ucm_cuda_summary and ucm_cuda_select only launch a kernel, so a captured graph holds one
 * kernel node. The graph has a copy of everything in their structs, and reads what the structs'
 * addresses lead to when it runs. So contents (block tables, lengths, queries, summaries) may
 * change between replays; addresses and sizes may not. A handle must live as long as graphs with
 * its launches. Open and close allocate, so do not call them while a stream captures.
 *
 * Addresses are those of the GPU's memory in this process. Kernels check block numbers against the
 * bounds given and nothing else. A wrong address is an error of the context, as in any kernel.
 *
 * Errors: 0 or a negative enum ucm_status; ucm_cuda_errmsg has the sentence. -UCM_EINVALID names
 * the field. Outputs are untouched on failure. */
#ifndef UCMCLIENT_CUDA_SPARSE_H
#define UCMCLIENT_CUDA_SPARSE_H

#include <ucmclient_cuda.h>
#include <ucmclient_sparse.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- summaries ---- */

struct ucm_cuda_summary;

/* For the GPU with that UUID (16 bytes). `summary` is copied. Loads one kernel and a table of some
 * KiB. The caller owns *out. */
UCM_API int ucm_cuda_summary_open(const uint8_t *gpu, const struct ucm_sparse_summary *summary,
                                  struct ucm_cuda_summary **out);
/* Call it after its last launch has run. NULL is allowed. */
UCM_API void ucm_cuda_summary_close(struct ucm_cuda_summary *summary);

enum {
    UCM_CUDA_SUMMARY_LAYERS = 128, /* of one launch */
};

/* One layer's memory: where its block 0 lies. The shape's k_offset counts from k and its v_offset
 * from v, so k and v are equal if K and V are of one allocation. v is read only if the method is
 * `stats` and there is V. */
struct ucm_cuda_summary_layer {
    uint64_t k, v, out;
};

/* Block i of n_blocks has number blocks[i] in the KV, and out_numbers[i] in the summaries' region.
 * If either is negative or not below its bound, the block is skipped. Strides are in bytes. The
 * summaries' stride is at least ucm_sparse_summary_bytes(), and like `out` a multiple of 4. K and V
 * are aligned to an element. */
struct ucm_cuda_summary_build {
    const struct ucm_cuda_summary_layer *layers; /* read during the call */
    uint32_t n_layers;                           /* 1 to UCM_CUDA_SUMMARY_LAYERS */
    uint32_t n_blocks;
    uint64_t numbers;     /* int32_t[n_blocks] */
    uint64_t out_numbers; /* int32_t[n_blocks]; 0: the same */
    uint64_t stride, out_stride;
    uint32_t bound, out_bound;
    uint32_t thread_blocks; /* at most so many at once, of 128 threads; 0: 32 */
};

/* Launches the build on `stream` (a cudaStream_t or CUstream): all layers and blocks in one launch.
 * It takes few thread blocks and little shared memory, so it runs alongside other kernels. n_blocks
 * 0 launches nothing. */
UCM_API int ucm_cuda_summary(struct ucm_cuda_summary *summary,
                             const struct ucm_cuda_summary_build *build, void *stream);

/* ---- selection ----
 *
 * The scores are those of summaries. ucm_cuda_select_open needs a summary, and refuses NULL and
 * methods that it does not know with -UCM_EINVALID. GSA's history (ucm_sparse_score_history) needs
 * no summary and is not here. Its scores come from counts that the worker's scheduler has on the
 * host. They make one list for all heads and layers, so the host makes one choice a step, by
 * ucm_sparse_choose_local. */

struct ucm_cuda_select;

enum {
    UCM_CUDA_SELECT_SEQUENCES = 1024,       /* of one launch */
    UCM_CUDA_SELECT_QUERIES = 2048,         /* of a sequence: score.rows * score.q_heads */
    UCM_CUDA_SELECT_BLOCKS = (1 << 20) - 1, /* of a sequence */
};
#define UCM_CUDA_SELECT_NONE UINT32_MAX /* in index, after the chosen blocks */

/* What all launches of a handle have in common. */
struct ucm_cuda_select_options {
    struct ucm_sparse_score score;
    struct ucm_sparse_choose choose;
    uint32_t q_dtype;    /* UCM_SPARSE_F32, _F16 or _BF16 */
    uint32_t sequences;  /* at most, of one launch */
    uint32_t max_blocks; /* at most, of a sequence */
    uint32_t room;       /* blocks of one list's answer; 0: what max_blocks blocks need */
};

/* Allocates the workspace, whose size ucm_cuda_select_info tells. `summary` and options are
 * copied. */
UCM_API int ucm_cuda_select_open(const uint8_t *gpu, const struct ucm_sparse_summary *summary,
                                 const struct ucm_cuda_select_options *options,
                                 struct ucm_cuda_select **out);
/* Call it after its last launch has run, when no graph will replay one. NULL is allowed. */
UCM_API void ucm_cuda_select_close(struct ucm_cuda_select *select);

struct ucm_cuda_select_info {
    uint32_t lists;           /* a sequence */
    uint32_t room;            /* of each */
    uint64_t workspace_bytes; /* with softmax mostly 4 * sequences * rows * q_heads * max_blocks */
    /* With softmax, the last launch's scores of all blocks for each query:
     * float[sequences][rows][q_heads], each head_pitch floats from the next. With other reduces
     * 0. */
    uint64_t head_scores;
    uint32_t head_pitch;
};
UCM_API int ucm_cuda_select_info(const struct ucm_cuda_select *select,
                                 struct ucm_cuda_select_info *out);

/* One layer. Block b of sequence c is number table[c * table_stride + b]. If that is negative or
 * not below `bound`, the block has no summary. It is then chosen before all others, up to
 * `room`. */
struct ucm_cuda_select_layer {
    uint64_t summaries;    /* the layer's of block 0, aligned to 4 */
    uint64_t stride;       /* bytes from one block's to the next's, a multiple of 4 */
    uint32_t bound;        /* blocks in that memory */
    uint32_t sequences;    /* of this launch, at most those of the options */
    uint64_t table;        /* int32_t[sequences][table_stride] */
    uint64_t table_stride; /* at least max_blocks */
    /* int32_t[sequences], read when the launch runs; above max_blocks: that many */
    uint64_t n_blocks;
    uint64_t q;        /* [sequences][score.rows][score.q_heads][head_dim] of q_dtype */
    uint64_t q_stride; /* elements from one sequence's queries to the next's; 0: contiguous */
    uint64_t count;    /* uint32_t[sequences][lists]: blocks chosen */
    uint64_t index;    /* uint32_t[sequences][lists][room]: positions in the sequence, ascending */
    uint64_t score;    /* float[sequences][lists][room]: their scores; 0: not wanted */
    /* uint32_t[sequences], read when the launch runs: how many blocks each list may choose, windows
     * included. At most `room`. It replaces sparse_ratio, topk_tokens and min_blocks, and limit. 0:
     * those decide. */
    uint64_t most;
};

/* Launches one kernel on `stream`. It scores all sequences' blocks and makes the choice of each
 * list. NaN in q makes scores of -inf, which lose against all others. */
UCM_API int ucm_cuda_select(struct ucm_cuda_select *select,
                            const struct ucm_cuda_select_layer *layer, void *stream);

#ifdef __cplusplus
}
#endif
#endif
