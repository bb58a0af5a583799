/* libucmclient_cuda: decode steps whose KV is mostly not on the GPU. ucmclient_sparse.h has
 * summaries and sequences, ucmclient_mapping.h shared mappings, and ucmclient_cuda_sparse.h the
 * selection. docs/sparse.md describes the whole.
 *
 * A worker has a *block pool*: GPU memory in entries of one size. An entry holds a *layer head* of
 * a block. That is K and V of one KV head of one layer, or of all KV heads of one layer. A block
 * has a *number*, its row in the worker's summaries. Requests with a common prefix have the same
 * numbers. What a step's selections chose has to be in entries before it is attended. What is not
 * there is a *miss*. The GPU itself copies it from the daemon's memory (a shared mapping) into an
 * entry that no block of this step has. A step is
 *
 *   ucm_cuda_decode_begin
 *   for each layer: ucm_cuda_select; ucm_cuda_decode_layer
 *   ucm_cuda_decode_end
 *
 * Its launches on one stream need no decision of the host, so all of it can be one CUDA graph. When
 * the step has run, ucm_cuda_decode_result tells whether it counts. It does not count if a block
 * came neither from an entry nor through the mapping; then throw its outputs away. The worker asks
 * what was missing (ucm_cuda_decode_unserved), has the daemon copy it to its memory (ucm_gather),
 * and puts it into entries (ucm_cuda_decode_put). Then it runs the same step again: the same graph
 * over the same inputs. What a step used stays in its entries for the next run. So each run gets at
 * least one layer, or one round of it, further than the run before. Where a block came from does
 * not change one bit of the result.
 *
 * Units: sizes, offsets and strides in bytes unless a field says elements. Addresses are those of
 * the GPU's memory in this process. What they lead to belongs to the caller, and must stay until
 * launches that read it have run. Kernels check block numbers and page numbers against the bounds
 * given, and nothing else.
 *
 * Ownership: the pool is the caller's memory. Tables and workspace are the handle's;
 * ucm_cuda_decode_info tells how large they are. After ucm_cuda_decode_open no block is resident in
 * the pool, whatever its bytes are.
 *
 * Threads: make calls for one handle one at a time, except ucm_cuda_decode_mapping_register. All
 * launches of a handle follow each other, in one stream or by events.
 *
 * Capture: begin, layer and end only launch kernels. The graph has a copy of everything in their
 * structs, and reads what addresses lead to when it runs. So contents (lists, tables, lengths,
 * queries, pages) may change between replays; addresses and counts may not. All other calls wait
 * for their stream. Do not make them in a stream that captures, nor while a step runs;
 * ucm_cuda_decode_mapping_register is the exception.
 *
 * Errors: 0 or a negative enum ucm_status; ucm_cuda_errmsg has the sentence. -UCM_EINVALID names
 * the field. Outputs are untouched on failure. */
#ifndef UCMCLIENT_CUDA_DECODE_H
#define UCMCLIENT_CUDA_DECODE_H

#include <ucmclient_cuda_sparse.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ucm_cuda_decode;

enum ucm_cuda_decode_entry {
    UCM_CUDA_DECODE_HEAD =
        0, /* an entry: one KV head of a layer; K, then V, [tokens][head_dim] each; MLA: K */
    UCM_CUDA_DECODE_LAYER = 1, /* an entry: a layer, as the daemon has it */
};

/* The form in which entries hold K and V. */
enum ucm_cuda_decode_encoding {
    UCM_CUDA_DECODE_AS_STORED = 0,
    /* As the encoding `fp8` has them (docs/design/encodings.md): a code of 8 bits for each element
     * and a scale byte for each row. First come [tokens][head_dim] codes of K, then those of V,
     * then [tokens] scales of K, then those of V. The gather encodes rows on their way into an
     * entry. Attention reads what they decode to, with an infinity as NaN. The local window stays
     * as it is. */
    UCM_CUDA_DECODE_FP8 = 1,
};

enum {
    UCM_CUDA_DECODE_SEQUENCES = 1024, /* of one launch */
    UCM_CUDA_DECODE_GROUP =
        16, /* query heads of a KV head; with head_dim 256, more than 8 are even */
    UCM_CUDA_DECODE_LATENT = 128, /* query heads of a latent (MLA) */
    UCM_CUDA_DECODE_TOKENS = 256, /* of a block */
};

/* Where K and V lie in a block. A token of a KV head is head_dim contiguous elements. Multiples of
 * 16. */
struct ucm_cuda_decode_layout {
    uint64_t k_offset, k_token_stride, k_head_stride;
    uint64_t v_offset, v_token_stride, v_head_stride;
};

/* When a list stops. Its blocks are attended in the order of their scores, in rounds. Their *share*
 * is their weight, divided by the sum of it and the weight of what is left. The list stops when the
 * share reaches eps for all its query heads. What a list attends follows from its queries and its
 * sequence's blocks alone. Blocks that are not attended are not copied.
 *
 * A layer is then one launch that sorts its lists, followed by up to `rounds` times resolve, gather
 * and attention. The first round attends the local window and `first` blocks. After a round that
 * covers too little, the next one ends where
 *   ESTIMATED  the share would reach eps if the blocks until there weigh what is estimated,
 *   CERTIFIED  it would reach eps if they weigh nothing,
 *   PSA        twice as many blocks are attended,
 * at least an eighth more, and at a multiple of `every`. The last round takes what is left of the
 * list. A missing block stops all lists after their round, since the step does not count. So each
 * run gets a round further. With rounds 1, the one round attends all that was chosen, and reports
 * its share for budgets to follow.
 *
 * Rounds save copies. They save no time where everything is resident: on an H200 three rounds take
 * 2.5 times as long as UCM_CUDA_DECODE_ALL over three times the blocks. */
enum ucm_cuda_decode_rule {
    UCM_CUDA_DECODE_ALL = 0, /* all that was chosen is attended */
    UCM_CUDA_DECODE_PSA =
        1, /* each block that is left weighs as much as the lightest one attended */
    UCM_CUDA_DECODE_ESTIMATED = 2, /* what its summary estimates */
    UCM_CUDA_DECODE_CERTIFIED = 3, /* what its summary allows at most */
};

/* What scores of query heads say of a block's weight: `stats` and `tokens` with rest estimate it,
 * `box` bounds it. */
enum ucm_cuda_decode_known {
    UCM_CUDA_DECODE_NOTHING = 0,
    UCM_CUDA_DECODE_ESTIMATES = 1,
    UCM_CUDA_DECODE_BOUNDS = 2, /* certificates are reported */
};

enum {
    UCM_CUDA_DECODE_ROUNDS = 16, /* of a layer, at most */
    UCM_CUDA_DECODE_ORDER = 4096 /* blocks of a list that is attended in more than one round */
};

/* What all launches of a handle have in common. 0 is a default only where a comment names it. */
struct ucm_cuda_decode_options {
    uint32_t layers, q_heads, kv_heads;
    uint32_t head_dim; /* of K and V: 64, 128 or 256; 576: MLA */
    /* 0: as head_dim. 512, with head_dim 576 and kv_heads 1: MLA in absorbed form. K is a token's
     * latent, V its first 512 channels. So layouts' v fields are not read, and v_scale is k_scale.
     * q has 576 channels, out 512. */
    uint32_t v_head_dim;
    uint32_t dtype;         /* of q and out: UCM_SPARSE_F16 or UCM_SPARSE_BF16 */
    uint32_t kv_dtype;      /* of K and V: 0: as dtype; or UCM_SPARSE_FP8_E4M3 */
    uint32_t tokens;        /* of a block: a multiple of 16 */
    float scale;            /* of logits; 0: 1 / sqrt(head_dim). For MLA give the model's */
    float k_scale, v_scale; /* what K and V that are stored were divided by; 0: 1 */
    uint32_t entry;         /* enum ucm_cuda_decode_entry */
    uint64_t block_pool;    /* entries * ucm_cuda_decode_entry_bytes, aligned to 16 */
    uint32_t entries;
    uint32_t numbers;  /* block numbers are below this */
    uint32_t requests; /* at once; they are 0 .. requests - 1 */
    /* Room for the misses of one layer, and for the keys that a step did not get. 0: room for all
     * misses of a layer (sequences * lists * room), and for at most 2^20 keys of a step. A further
     * run finds the rest. */
    uint32_t misses;
    uint32_t sequences; /* of a launch, at most */
    /* of a sequence: kv_heads, or 1 for all KV heads, which needs entries of a layer */
    uint32_t lists;
    uint32_t room;   /* blocks of a list, at most: ucm_cuda_select_info.room */
    uint32_t window; /* at most so many blocks of a sequence in the engine's pages; 0: none */
    struct ucm_cuda_decode_layout stored; /* of a layer of a block in the daemon */
    uint64_t layer_bytes;                 /* from one layer to the next there: the namespace's */
    struct ucm_cuda_decode_layout page;   /* of a page of the engine's, see ucm_cuda_decode_layer */
    /* Rounds. UCM_CUDA_DECODE_ALL ignores these fields. */
    uint32_t rule;  /* enum ucm_cuda_decode_rule */
    uint32_t known; /* enum ucm_cuda_decode_known: what the layers' head_scores are */
    float eps;      /* 0 to 1 */
    uint32_t
        rounds; /* of a layer, at most; the last one takes what is left of a list. 0: 3; PSA 6 */
    uint32_t every;       /* a round ends after a multiple of so many blocks of its list; 0: 4 */
    uint32_t first;       /* the first round's blocks, besides the local window; 0: 32 */
    uint32_t sink_blocks; /* a sequence's first blocks, which come first whatever their scores */
    /* enum ucm_cuda_decode_encoding. FP8 needs entries of a KV head, K and V of 16 bits, and
     * neither k_scale nor v_scale. */
    uint32_t encoding;
};

/* Checks options, and tells how large an entry is. Needs no GPU, and does not look at
 * `block_pool`. */
UCM_API int ucm_cuda_decode_entry_bytes(const struct ucm_cuda_decode_options *options,
                                        uint64_t *bytes);
/* For the GPU with that UUID (16 bytes). Options are copied. The caller owns *out. */
UCM_API int ucm_cuda_decode_open(const uint8_t *gpu, const struct ucm_cuda_decode_options *options,
                                 struct ucm_cuda_decode **out);
/* Call it after its last launch has run, when no graph will replay one. It takes the mapping from
 * the GPU as ucm_cuda_decode_mapping_leave does, so call it before ucm_mapping_close, and before
 * ucm_close of its client. NULL is allowed. */
UCM_API void ucm_cuda_decode_close(struct ucm_cuda_decode *decode);

struct ucm_cuda_decode_info {
    uint64_t entry_bytes;
    uint64_t
        table_bytes; /* on the GPU: the block in each entry, and blocks' places in the mapping */
    uint64_t workspace_bytes; /* on the GPU: of attention */
    uint64_t host_bytes;      /* pinned */
    /* How a list is cut for thread blocks: into at most so many runs of so many tiles of 16 tokens.
     * The last bits of results depend on it. It follows from the options and the GPU. */
    uint32_t splits, split_tiles;
};
UCM_API int ucm_cuda_decode_info(const struct ucm_cuda_decode *decode,
                                 struct ucm_cuda_decode_info *out);

/* ---- a step: launches on `stream`, a cudaStream_t or CUstream of the primary context ---- */

/* A new step, or the same again. */
UCM_API int ucm_cuda_decode_begin(struct ucm_cuda_decode *decode, void *stream);

/* One layer of `sequences` sequences. A sequence attends to the blocks that its lists chose, which
 * are whole, and to the *local window*. That is its last tokens, from block `first` on, which lie
 * in the engine's pages. The lists must have no block of that window, since a block that is
 * attended twice counts twice. */
struct ucm_cuda_decode_layer {
    uint32_t layer, sequences;
    /* uint32_t[sequences][lists][room]: positions in the sequence, see ucm_cuda_select */
    uint64_t index;
    uint64_t count; /* uint32_t[sequences][lists] */
    uint64_t table; /* int32_t[sequences][table_stride]: the number of each block of a sequence */
    uint64_t table_stride; /* elements; positions from here on have no number */
    /* uint32_t[sequences]: whose entries these are; sequences may have one in common */
    uint64_t request;
    /* The engine's pages of this layer: page p at pages + p * page_stride. */
    uint64_t pages, page_stride; /* multiples of 16 */
    uint32_t page_bound;         /* page numbers are below this */
    /* int32_t[sequences][page_table_stride]: the page of each block of a sequence */
    uint64_t page_table;
    uint64_t page_table_stride; /* elements */
    uint64_t first;             /* uint32_t[sequences]: the local window's first block */
    uint64_t
        length; /* uint32_t[sequences]: tokens, the new one included; 0: only lists are attended */
    /* [sequences][q_heads][head_dim]; those of a KV head are neighbours; aligned to 4 */
    uint64_t q;
    uint64_t q_stride; /* elements from one sequence's queries to the next's; 0: contiguous */
    uint64_t out;      /* [sequences][q_heads][v_head_dim], aligned to 16 */
    uint64_t lse;      /* float[sequences][q_heads], natural logarithm; 0: not wanted */
    /* With a rule: what the selection before this launch says besides its lists. */
    uint64_t candidates; /* int32_t[sequences]: its n_blocks */
    /* float[sequences][lists][room]: its score. With one round it is not read */
    uint64_t score;
    uint64_t
        head_scores; /* ucm_cuda_select_info of a selection of one row; read if `known` is not 0 */
    uint32_t head_pitch;
    uint64_t
        least; /* uint32_t[sequences]: blocks that each list attends before it may stop; 0: none */
    /* struct ucm_cuda_decode_report[sequences][lists] to be written; 0: not wanted */
    uint64_t report;
    /* int32_t[numbers]: the page that has the block of a number, or -1; 0: none has. A miss that
     * has a page is copied from there, not over the bus. So the daemon need not have the block yet.
     * Such a block is complete, `page` and `stored` of the options are the same, and `pages` is not
     * 0. */
    uint64_t page_of;
};

/* A list's report: struct ucm_stop_report of kernels/attend. */
struct ucm_cuda_decode_report {
    uint32_t blocks, rounds; /* attended, without the local window */
    float share;             /* that the rule says they cover: the least of the query heads */
    float certificate;       /* that they cover at least, with bounds; 0: nothing is certain */
};

/* Launches one layer: what the lists chose gets entries, misses are copied, and all of it is
 * attended. */
UCM_API int ucm_cuda_decode_layer(struct ucm_cuda_decode *decode,
                                  const struct ucm_cuda_decode_layer *layer, void *stream);

/* Writes the step's result to pinned memory. */
UCM_API int ucm_cuda_decode_end(struct ucm_cuda_decode *decode, void *stream);

enum ucm_cuda_decode_flag {
    UCM_CUDA_DECODE_UNSERVED = 1,  /* blocks are missing; the next three say more */
    UCM_CUDA_DECODE_FULL = 2,      /* the step needs more entries than there are */
    UCM_CUDA_DECODE_LIST_FULL = 4, /* a layer had more misses than options.misses */
    UCM_CUDA_DECODE_STRAY = 8, /* a list chose a block without a number: a fault of the caller */
    /* A block was not attended. With UNSERVED it is among those. Without, its copy took more than 2
     * s, and another run finds it there. If that happens twice, it is a fault of the caller. */
    UCM_CUDA_DECODE_NO_ENTRY = 256,
    /* a fault of the caller: a block of a local window has no page, or the window has more than
     * options.window blocks */
    UCM_CUDA_DECODE_NO_PAGE = 512,
};

struct ucm_cuda_decode_result {
    uint64_t step;     /* begins so far, of the step that ended last; 0: none has */
    uint32_t flags;    /* 0: the step counts */
    uint32_t unserved; /* keys; one may count twice */
    /* Since the handle was opened: misses; entries that they took; how many of those were taken in
     * spite of a floor. */
    uint64_t missed, taken, floors_broken;
    /* With a rule, of all lists and layers: */
    uint64_t attended; /* blocks */
    uint32_t rounds;   /* the most that one had */
    float share;       /* the least that one covers */
};
/* The result of the step that ended last. Waits for nothing. Call it when the stream has run that
 * step's end, and before another step's end can run. */
UCM_API int ucm_cuda_decode_result(struct ucm_cuda_decode *decode,
                                   struct ucm_cuda_decode_result *out);

/* ---- between steps: these wait for `stream` ---- */

/* A request comes. Eviction leaves it at least `floor` entries. -UCM_ENOMEMORY: the floors would
 * add up to more than the entries. */
UCM_API int ucm_cuda_decode_enter(struct ucm_cuda_decode *decode, uint32_t request, uint32_t floor,
                                  void *stream);
/* The request goes. Its blocks stay resident, and count for the next request that uses them. */
UCM_API int ucm_cuda_decode_leave(struct ucm_cuda_decode *decode, uint32_t request, void *stream);
/* Other blocks get these numbers. No block of these numbers is resident or in a mapping any
 * more. */
UCM_API int ucm_cuda_decode_forget(struct ucm_cuda_decode *decode, const uint32_t *numbers,
                                   uint32_t n, void *stream);

/* Where blocks lie in the daemon's memory: number numbers[i] lies at places[i], of ucm_mapping_ref.
 * places NULL: they are in no mapping. The mapping was opened with UCM_MAPPING_ADDRESSES, and a
 * handle has one. This registers memory of it that the GPU does not know yet with the driver, which
 * pins its pages: 70 ms a GiB. An invalid place counts as none. */
UCM_API int ucm_cuda_decode_places(struct ucm_cuda_decode *decode, struct ucm_mapping *mapping,
                                   const uint32_t *numbers, const struct ucm_place *places,
                                   uint32_t n, void *stream);
/* Registers memory of the mapping with the driver before ucm_cuda_decode_places needs it: at most
 * `most` ranges that the GPU does not know yet. Each is a slab of the daemon's. *left receives how
 * many others there are. Any thread may call it alongside steps and other calls for the handle.
 * These may wait for the registration under way, so ask for one range at a time. The caller keeps
 * the mapping open. */
UCM_API int ucm_cuda_decode_mapping_register(struct ucm_cuda_decode *decode,
                                             struct ucm_mapping *mapping, uint32_t most,
                                             uint32_t *left);
/* Gives back what the daemon wants back, and everything of an earlier connection. Places there are
 * invalid from now on. Call it between steps when ucm_fd was readable, and at least every second.
 * *lost receives how many places became invalid; NULL is allowed. */
UCM_API int ucm_cuda_decode_mapping_update(struct ucm_cuda_decode *decode, uint32_t *lost,
                                           void *stream);
/* All places become invalid, and the GPU no longer knows the mapping. Call it before
 * ucm_mapping_close, and before ucm_close of its client. */
UCM_API int ucm_cuda_decode_mapping_leave(struct ucm_cuda_decode *decode, void *stream);

/* A layer head of a block. head: 0 if entries are of a layer. */
struct ucm_cuda_decode_key {
    uint32_t layer, head, number;
};
/* Lists up to `room` keys that the last step did not get, each once, by layer, head and number. *n
 * receives how many there are. There may be more that had no room in options.misses; the next run
 * finds them. Layers after one that lacks many keys chose by other queries than the next run has.
 * So ask for the first layer's only, unless all are few. */
UCM_API int ucm_cuda_decode_unserved(struct ucm_cuda_decode *decode,
                                     struct ucm_cuda_decode_key *out, uint32_t room, uint32_t *n,
                                     void *stream);
/* A layer head whose bytes the caller has. */
struct ucm_cuda_decode_put {
    struct ucm_cuda_decode_key key;
    uint32_t request; /* that wants it */
    uint64_t from;    /* its layer of the block, as in `stored` of the options; aligned to 16 */
};
/* Copies them into entries; one that is there already stays. *placed receives how many are there
 * now. The others found all entries in use by this step. NULL is allowed. */
UCM_API int ucm_cuda_decode_put(struct ucm_cuda_decode *decode,
                                const struct ucm_cuda_decode_put *items, uint32_t n,
                                uint32_t *placed, void *stream);

#ifdef __cplusplus
}
#endif
#endif
