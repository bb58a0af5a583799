/* What the kernels of entries.cu take. The arrays of struct ucm_entries lie in the GPU's memory.
 * Kernels take the struct by value, so a captured launch keeps its own copy. A graph can be
 * replayed, since all that changes from step to step lies in the arrays.
 *
 * Launches on the same arrays are in one stream, or ordered by events. A step is
 *   ucm_entries_next                      one thread
 *   for each layer:
 *     ucm_entries_resolve                 (sequences * lists) thread blocks; or the tail of the selection, by entries.cuh
 *     ucm_entries_gather                  any number of thread blocks: they share the misses
 *     attention over entry_of            after the gather, or alongside it: kernels/attend/attend_cuda.h
 *   ucm_entries_end                     one thread: the word in pinned memory
 * Between steps: ucm_entries_want_keys, and after it either ucm_entries_put, for bytes that the
 * GPU's memory has, or ucm_entries_take_all, a gather into these entries, ucm_entries_publish_all;
 * ucm_entries_forget_numbers; ucm_entries_leave_request. A request enters by a copy to
 * floor[request].
 *
 * The device may differ from entries.c in this: misses are in any order, so entries are taken in
 * any order. With one miss at a time the arrays are the same. FULL can be set while another warp
 * only looks at the last entry that could be taken. floors_broken can count for the same reason.
 * Both are safe.
 *
 * Memory order. State is read and written by atomics or by loads that pass the L1 cache. A thread
 * block that takes an entry has claimed it by a compare-and-swap on its stamp, from an old one to
 * this step's. From then on it alone touches the entry's key, request and bytes. It does so until
 * it publishes, or frees the entry by setting the stamp to 0 after a fence. Attention sees bytes
 * and table in a later launch, or alongside the gather, by a load of entry_of that acquires. For
 * that the item is written after a fence by each thread that copied.
 *
 * Shared mappings. The host makes a place's sequence number odd, with a full fence. It changes the
 * bytes (or starts a DMA engine that does), and makes the number even again with a release. In the
 * gather one thread loads the sequence number with ld.acquire.sys. After a barrier all threads
 * copy, with loads of scope system, which no cache of the GPU answers with earlier data. Each
 * thread then executes a fence.acq_rel.sys, which waits for its loads. After another barrier one
 * thread loads the sequence number again. If both match the announced number, no byte had changed.
 * For suppose that a load had read the next content. It was answered after the odd number was
 * visible. The last load was issued after that answer, so it would see the odd number, too. This
 * makes three assumptions. The host's memory is coherent for the GPU's reads over the bus. A read's
 * answer is not older than an answer that came before the read was issued. Bytes that a DMA engine
 * writes are not seen before what the CPU had made visible before it started the engine. x86 and
 * PCIe give all three. A bus with relaxed ordering of reads does too, because the fence waits for
 * the answers. */
#ifndef UCM_KERNELS_ENTRIES_CUDA_H
#define UCM_KERNELS_ENTRIES_CUDA_H

#include "kernels/entries/entries.h"

#define UCM_ENTRIES_CUDA_RESOLVE 256u /* threads of a thread block */
#define UCM_ENTRIES_CUDA_GATHER 512u
#define UCM_ENTRIES_CUDA_PLANES 2u /* K, V */

/* Where a block lies in the worker's shared mapping, by number. */
struct ucm_entries_place {
    uint64_t bytes; /* the GPU's address of the block; 0: not in the mapping */
    uint64_t seq;   /* the GPU's address of a uint64_t */
    uint64_t told;  /* its value when the bytes were promised */
};

/* A layer head's part in a plane: `rows` runs of row_bytes, `pitch` apart in the block, and one
 * after the other in an entry. A contiguous piece is one row. */
struct ucm_entries_plane {
    uint64_t entries; /* the pool: entry s at entries + s * entry_stride */
    uint64_t entry_stride;
    uint64_t first;                     /* in a block, of layer head 0 */
    uint64_t layer_stride, head_stride; /* layer_head = layer * heads + head */
    uint64_t pitch;
    uint32_t rows, row_bytes; /* row_bytes and all strides are multiples of 16 */
    /* Not 0: rows are encoded on their way, as by the encoding `fp8` (docs/design/encodings.md),
     * but an infinity becomes NaN. Their elements are of enum ucm_encoding_dtype `dtype`. row_bytes
     * is 128, 256 or 512, and rows a multiple of 4. An entry's codes are at entries + s *
     * entry_stride, its scale bytes at scales + s * entry_stride. */
    uint64_t scales;
    uint32_t dtype;
};

/* What attention met in a step, and its rounds: struct ucm_attend_cuda_told. */
struct ucm_entries_attended {
    uint32_t flags, rounds;
    float share;
    uint32_t pad;
    uint64_t blocks;
};

/* What the host reads of a step, in pinned memory. */
struct ucm_entries_word {
    uint64_t step;  /* struct ucm_entries_step.now; written last */
    uint32_t flags; /* of the step; those of attention above them */
    uint32_t unserved;
    uint64_t missed, taken, floors_broken;
    uint64_t blocks;
    uint32_t rounds;
    float share;
};
#define UCM_ENTRIES_ATTENDED 8 /* bits from which on flags are attention's */

struct ucm_entries_gather {
    uint64_t places; /* struct ucm_entries_place[numbers], the GPU's memory */
    uint32_t heads;  /* layer heads of a layer */
    uint32_t planes;
    struct ucm_entries_plane plane[UCM_ENTRIES_CUDA_PLANES];
    /* For the launch's layer: the engine's pages, and the page of each number's block. Pages have a
     * block's layer in the same form as the shared mapping. A block that has a page is copied from
     * there. Nobody writes to a complete block's page, so there is no sequence number. */
    uint64_t pages, page_stride;
    const int32_t *page_of; /* [numbers], -1: none; NULL: nobody's */
    uint32_t page_bound;
};

#endif
