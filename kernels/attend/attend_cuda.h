/* What the kernels of attend.cu take, filled in by their launcher. All addresses are the GPU's.
 * Kernels take it by value, so a captured launch keeps its own copy.
 *
 * The kernel that ucm_attend_cuda_kernel names attends all blocks of each list and the window after
 * them. A step is one launch, or several: *rounds*. Each round goes on where the one before it
 * ended; the first also has the window. A round of a list that has stopped, or has no more blocks,
 * returns at once. So all rounds can be captured, and the host decides nothing. Before the first
 * round ucm_attend_order puts the lists in the order of their scores, and says where the first
 * round ends. It also works out what is left after each block. Each round says where the next one
 * ends. With an estimate, that is the first block at which the rule would stop if blocks until
 * there weigh what is estimated. With a bound, it is the first at which the rule would stop if they
 * weigh nothing. By PSA's rule it is at twice the blocks. The last round takes the rest. So a list
 * may stop later than its rule is fulfilled, but few launches are enough. What a list attends
 * follows from its queries and its blocks alone.
 *
 * Alongside the gather. With `wait`, a chosen block may be on its way (UCM_ENTRIES_WANTED). Only
 * the warp that has its tile waits for it; the others attend to resident blocks meanwhile. No bit
 * of the result depends on the waits. For that the launch must be the next one after the gather's
 * in its stream. From compute capability 9.0 on it has the attribute
 * CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. It then begins when all thread blocks of
 * the gather have begun, so it can't take the places that they need. It ends after the gather. What
 * comes before the gather, such as lists and queries, is complete then. The gather itself is
 * launched without the attribute, or after a resolve, whose end it awaits before it lets attention
 * begin. On other GPUs, and without the attribute, the same launch begins after the gather and
 * finds nothing to wait for. A capture keeps the attribute. */
#ifndef UCM_KERNELS_ATTEND_CUDA_H
#define UCM_KERNELS_ATTEND_CUDA_H

#include <stdint.h>
#include <stdio.h>

#define UCM_ATTEND_CUDA_THREADS 128u
#define UCM_ATTEND_CUDA_WARPS (UCM_ATTEND_CUDA_THREADS / 32u)
#define UCM_ATTEND_CUDA_ROWS 16u /* query rows of one KV head, at most: query heads of it x rows */
#define UCM_ATTEND_CUDA_TILE 16u /* tokens that a warp attends to at once */
#define UCM_ATTEND_CUDA_TOKENS 256u /* of a block, at most; a multiple of the tile */
#define UCM_ATTEND_CUDA_SPLIT 320u  /* tiles of a split, at most */
#define UCM_ATTEND_CUDA_SPLITS 1024u
#define UCM_ATTEND_CUDA_STAGES                                                                     \
    2u /* tiles of a warp in shared memory: more cost occupancy, and were slower */
#define UCM_ATTEND_CUDA_ORDER 4096u /* blocks of a list that is ordered, at most */
#define UCM_ATTEND_CUDA_ORDER_THREADS 256u

/* Bits of the word `flags`: reasons why a step's answer does not count. */
enum ucm_attend_flag {
    UCM_ATTEND_NO_ENTRY = 1, /* a chosen block has no entry */
    UCM_ATTEND_NO_PAGE =
        2, /* a block of the window has no page, or splits don't reach to its end */
};

/* Where K or V of a block's tokens lie, in bytes from the block's begin. Multiples of 16. Blocks of
 * one KV head, such as entries of a KV head, have head_stride 0. */
struct ucm_attend_cuda_plane {
    uint64_t offset, token_stride, head_stride;
};

/* Block i lies at base + i * stride, both multiples of 16. */
struct ucm_attend_cuda_memory {
    uint64_t base, stride;
    uint32_t blocks; /* numbers from here on are not in that memory */
    /* Not 0: each row of K and V has a scale byte, as in the encoding `fp8`
     * (docs/design/encodings.md). A block is then one KV head, and its rows lie one after the
     * other. The scales of K's tokens begin `scales` bytes (a multiple of 16) from the block's
     * begin, followed by those of V's. E4M3 only. */
    uint32_t scales;
    struct ucm_attend_cuda_plane k, v;
};

/* One row's result of some tokens. Its out lies next to it, not divided by sum. */
struct ucm_attend_cuda_sum {
    float top, sum; /* sum * 2^top */
    float lightest; /* log2 of the least weight of a chosen block's tile; psa only */
    float key_max;  /* the largest |k|; with bounds only */
};

/* What is left of a sequence's candidate blocks after the first i of a list, for i = 0 .. room:
 * ucm_left of arith.h with one top for each query row. */
struct ucm_attend_cuda_left {
    uint64_t top; /* float[sequences][kv_heads][group] */
    uint64_t
        /* uint64_t[sequences][kv_heads][group][room + 1]; UINT64_MAX: nothing is known of it */
        units;
};

/* What steps tell, over all of their lists: for the host. */
struct ucm_attend_cuda_told {
    uint32_t flags;  /* or-ed */
    uint32_t rounds; /* the most of a list; 0: there were none */
    float share;     /* the least of a list */
    uint32_t pad;
    uint64_t blocks; /* attended, of all lists */
};

enum ucm_attend_cuda_known {
    UCM_ATTEND_CUDA_NOTHING = 0,
    UCM_ATTEND_CUDA_ESTIMATES = 1, /* `left` is estimated */
    UCM_ATTEND_CUDA_BOUNDS = 2,    /* it is at most that, and certificates are reported */
};

struct ucm_attend_cuda_stop {
    uint32_t rule; /* enum ucm_stop_rule */
    float eps;
    float logit_scale;
    uint32_t known;      /* enum ucm_attend_cuda_known */
    uint32_t every;      /* rounds end at multiples of so many blocks */
    uint32_t rounds;     /* launches */
    uint64_t candidates; /* int32_t[sequences]: blocks that lists choose from */
    struct ucm_attend_cuda_left left;
    uint64_t
        /* uint32_t[rounds + 1][sequences][lists]: of rounds; [0] is 0. 0: there are no rounds */
        ends;
    uint64_t
        least; /* float[sequences][lists][2]: share and certificate, over KV heads; 1 between launches */
    uint64_t
        next; /* uint32_t[sequences][lists]: where the next round ends, over KV heads; 0 between launches */
    uint64_t heads; /* uint32_t[sequences][lists]: KV heads that are done; 0 between launches */
    uint64_t
        /* struct ucm_stop_report[sequences][lists]; may be in pinned memory; 0: not wanted */
        report;
    uint64_t told; /* struct ucm_attend_cuda_told; 0: not wanted */
};

struct ucm_attend_cuda {
    uint32_t kv_heads, group; /* group: query rows of a KV head */
    /* 1: kv_heads counts each KV head of the model twice, once for either half of its query rows.
     * Kernels of head_dim 256 need that if there are more than 8 rows. K and V are then read
     * twice. */
    uint32_t halved;
    uint32_t tokens; /* of a block, a multiple of UCM_ATTEND_CUDA_TILE */
    uint32_t sequences, lists, room;
    uint32_t round;               /* launches before this one */
    uint32_t split_tiles, splits; /* tiles of a thread block; splits of a list, at most */
    float scale_log2;             /* of logits, k_scale included, times log2(e) */
    float v_scale;                /* of results; 0: 1 */
    uint32_t ring;                /* mla_cuda.h */
    /* [sequences][kv_heads][group][head_dim]; elements from sequence to sequence */
    uint64_t q, q_stride;
    /* The chosen blocks: list item -> number -> entry. If a table is 0, its step is left out. */
    uint64_t list;  /* int32_t[sequences][lists][room] */
    uint64_t count; /* uint32_t[sequences][lists] */
    /* int32_t[sequences][numbers_stride]: of the sequence's blocks */
    uint64_t numbers;
    uint32_t numbers_stride, rows; /* rows: of entry_of */
    uint32_t
        apart; /* 0: all lists are of one entry_of; 1: list l is of entry_of + l * rows, a KV head's */
    uint64_t entry_of; /* int32_t[rows], or [lists][rows]: the layer's */
    uint32_t wait;     /* 1: wait for blocks that a gather brings meanwhile; 0: they have no
                        * entry */
    struct ucm_attend_cuda_memory pool;
    /* The window: blocks from first[sequence] on, to the last token. length 0: there is none. */
    struct ucm_attend_cuda_memory pages;
    uint32_t plain_pages;         /* 1: they have elements of q's type next to entries of E4M3 */
    uint64_t table, table_stride; /* int32_t[sequences][table_stride] */
    uint64_t first;               /* uint32_t[sequences]: its first block */
    /* uint32_t[sequences]: tokens of the sequence, the new one included */
    uint64_t length;
    uint64_t out;   /* q's dtype [sequences][kv_heads][group][head_dim]; of all rounds so far */
    uint64_t lse;   /* float[sequences][kv_heads][group], natural logarithm; 0: not wanted */
    uint64_t flags; /* uint32_t: or-ed */
    /* The workspace. */
    uint64_t partial;     /* float[sequences][kv_heads][splits][group][head_dim] */
    uint64_t partial_sum; /* struct ucm_attend_cuda_sum[sequences][kv_heads][splits][group] */
    uint64_t done;        /* uint32_t[sequences][kv_heads]; 0 between launches */
    /* Rounds; 0: one launch is all of it. */
    uint64_t state;     /* float[sequences][kv_heads][group][head_dim] */
    uint64_t state_sum; /* struct ucm_attend_cuda_sum[sequences][kv_heads][group] */
    struct ucm_attend_cuda_stop stop;
};

/* ucm_attend_order, of (query rows of a list, lists of all sequences) thread blocks. It sorts
 * items, which are blocks of their sequence. The sequence's first blocks come first. Then the best
 * score comes first; of equals the earlier block. */
struct ucm_attend_cuda_order {
    uint32_t sequences, lists, room, rows; /* lists: of a sequence; rows: of a list */
    uint32_t windows;                      /* blocks of a sequence that come first */
    uint32_t first;                        /* blocks of the first round, at least */
    float logit_scale, ln_tokens;          /* of bounds */
    uint64_t count;                        /* uint32_t[sequences][lists] */
    uint64_t list, to;                     /* int32_t[sequences][lists][room]; not the same */
    uint64_t score;                        /* float[sequences][lists][room]; 0: the order stays */
    uint64_t least;                        /* uint32_t[sequences]: as `first`; 0: none */
    /* What each query row finds of each block of its sequence,
     * float[sequences][lists][rows][pitch]: logarithms of its weights, or scores of `box`. */
    uint64_t row_score;
    uint32_t pitch;
    struct ucm_attend_cuda_stop
        stop; /* whose arrays are written; rounds 1: there is one, of all blocks */
};

/* ---- launching ---- */

/* type: f16 or bf16, of queries and results; narrow: K and V are FP8 E4M3, otherwise as queries.
 * head_dim: 64, 128 or 256. group: query rows of a KV head, at most UCM_ATTEND_CUDA_ROWS. */
static inline void ucm_attend_cuda_kernel(char name[40], const char *type, int narrow,
                                          uint32_t head_dim, uint32_t group)
{
    snprintf(name, 40, "ucm_attend_%s_%s%u_%u", type, narrow ? "e4m3_" : "", head_dim,
             group > 8 ? 16u : 8u);
}

/* Dynamic shared memory of a launch, which has three uses one after the other: tiles on their way,
 * the warps' results, the splits' weights. Tiles have rows in fours, 32 bytes apart, and with E4M3
 * 32 bytes of scales. element: bytes of an element of K and V in entries. Pages with elements of 16
 * bits next to entries of E4M3 have one stage of twice the size. */
static inline uint32_t ucm_attend_cuda_shared(uint32_t head_dim, uint32_t element, uint32_t group,
                                              uint32_t splits)
{
    uint32_t plane = UCM_ATTEND_CUDA_TILE * head_dim * element + UCM_ATTEND_CUDA_TILE / 4 * 32;
    uint32_t tile = 2 * plane + (element == 1 ? 2 * UCM_ATTEND_CUDA_TILE : 0);
    uint32_t tiles = UCM_ATTEND_CUDA_WARPS * UCM_ATTEND_CUDA_STAGES * tile;
    uint32_t results = UCM_ATTEND_CUDA_WARPS * (group > 8 ? 16 : 8) * (head_dim + 8) * 4;
    uint32_t weights = group * splits * 4, most = tiles > results ? tiles : results;

    return most > weights ? most : weights;
}

/* ---- how lists are cut ---- */

struct ucm_attend_cuda_cut {
    uint32_t split_tiles, splits;
};

/* Thread blocks that one multiprocessor holds, with 227 KiB of shared memory and 64 Ki
 * registers. */
static inline uint32_t ucm_attend_cuda_places(uint32_t head_dim, uint32_t element, uint32_t group)
{
    uint32_t shared = ucm_attend_cuda_shared(head_dim, element, group, 1) + (6 << 10);
    uint32_t registers = group > 8 ? (head_dim > 64 ? 168 : 128)
                                   : (head_dim > 128  ? 192
                                      : head_dim > 64 ? 128
                                                      : 80);
    uint32_t by_shared = (227u << 10) / shared;
    uint32_t by_registers = (64u << 10) / (UCM_ATTEND_CUDA_THREADS * registers);

    return by_shared < by_registers ? by_shared : by_registers;
}

/* How lists are cut. tiles: the most that a list of a captured launch can have, its window's
 * included. lists: sequences times KV heads. places: of all multiprocessors. least: tiles of a
 * split that is worth its cost. Results depend on the cut, so it follows from what is fixed when a
 * graph is captured. It is the fewest splits that keep nine tenths of the GPU's places busy to the
 * end, or fill them three times. */
static inline struct ucm_attend_cuda_cut ucm_attend_cuda_cut_of(uint32_t lists, uint32_t tiles,
                                                                uint64_t places, uint32_t least)
{
    uint32_t fit = (tiles + UCM_ATTEND_CUDA_SPLITS - 1) / UCM_ATTEND_CUDA_SPLITS;
    uint32_t splits = (tiles + UCM_ATTEND_CUDA_SPLIT - 1) / UCM_ATTEND_CUDA_SPLIT, each;

    least = least > fit ? least : fit;
    splits = splits > 0 ? splits : 1;
    for (each = tiles / splits; each > least; each = (tiles + splits - 1) / splits) {
        uint64_t blocks = (uint64_t)lists * splits, waves = (blocks + places - 1) / places;

        if (blocks * 10 >= waves * places * 9 || blocks >= 3 * places)
            break;
        splits++;
    }
    each = (tiles + splits - 1) / splits;
    each = each > least ? each : least;
    return (struct ucm_attend_cuda_cut){each, tiles > each ? (tiles + each - 1) / each : 1};
}

/* Each warp has three tiles. */
static inline struct ucm_attend_cuda_cut ucm_attend_cuda_cut(uint32_t lists, uint32_t tiles,
                                                             uint64_t places)
{
    return ucm_attend_cuda_cut_of(lists, tiles, places, 3 * UCM_ATTEND_CUDA_WARPS);
}

#endif
