/* What one thread block attends to: the list's tiles, where they lie, and waiting for those that
 * come. */
#ifndef UCM_KERNELS_ATTEND_LIST_CUH
#define UCM_KERNELS_ATTEND_LIST_CUH

#include "kernels/attend/attend_cuda.h"
#include "kernels/attend/attend_machine.cuh"

typedef const struct ucm_attend_cuda &args_t;

/* What one launch attends to for one KV head. */
struct tiles {
    const int32_t *list, *table;
    uint32_t chosen, window, all; /* tiles of the chosen blocks; the window's first; its end */
    uint32_t first, length;       /* of the window: its first block; the sequence's tokens */
};

/* The model's KV head. */
static __device__ __forceinline__ uint32_t head_of(args_t a)
{
    return blockIdx.y >> a.halved;
}

static __device__ __forceinline__ uint32_t list_of(args_t a)
{
    return blockIdx.z * a.lists + (a.lists > 1 ? head_of(a) : 0);
}

/* Where a round of the list begins. */
static __device__ __forceinline__ uint32_t round_at(args_t a, uint32_t round, uint32_t list)
{
    return round == 0 ? 0 : __ldcg((const uint32_t *)a.stop.ends + (uint64_t)round * a.sequences * a.lists + list);
}

static __device__ __forceinline__ struct tiles tiles_of(args_t a)
{
    uint32_t sequence = blockIdx.z, which = list_of(a), in_block = a.tokens / TILE;
    uint32_t end = min(((const uint32_t *)a.count)[which], a.room), begin = round_at(a, a.round, which);
    struct tiles t;

    if (a.stop.ends != 0)
        end = min(end, round_at(a, a.round + 1, which));
    t.list = (const int32_t *)a.list + (uint64_t)which * a.room + begin;
    t.chosen = end > begin ? (end - begin) * in_block : 0;
    t.all = t.window = t.chosen;
    t.table = NULL;
    t.first = t.length = 0;
    if (a.round > 0 || a.length == 0)
        return t;
    t.table = (const int32_t *)a.table + sequence * a.table_stride;
    t.first = ((const uint32_t *)a.first)[sequence];
    t.length = ((const uint32_t *)a.length)[sequence];
    if (t.length > t.first * a.tokens) {
        if (a.plain_pages) /* a split has tiles of one type */
            t.window = (t.chosen + a.split_tiles - 1) / a.split_tiles * a.split_tiles;
        t.all = t.window + (t.length - t.first * a.tokens + TILE - 1) / TILE;
    }
    return t;
}

/* Where a tile lies: its block's address, a multiple of 16, and the tile's number in it, below 16.
 * The upper bits, which addresses leave free, tell how many tokens count, and whether the block is
 * a page. 0: nowhere. */
#define VALID_SHIFT 56
#define IS_PAGE (UINT64_C(1) << 63)
/* Marks a block that is on its way to its entry. Then its row in entry_of, times 16, replaces the
 * address. */
#define IS_WANTED (UINT64_C(1) << 62)
#define WANTED (-2) /* UCM_ENTRIES_WANTED, in entry_of */
#define PATIENCE UINT64_C(2000000000) /* ns; a gather that takes longer has failed */

static __device__ __forceinline__ void raise_flag(args_t a, uint32_t flag)
{
    atomicOr((uint32_t *)a.flags, flag);
}

static __device__ __forceinline__ uint64_t block_at(const struct ucm_attend_cuda_memory &m, int32_t number)
{
    return (uint32_t)number < m.blocks ? m.base + (uint32_t)number * m.stride : 0;
}

/* A list item's number, or without a table the item itself; -1 if there is none. */
static __device__ __forceinline__ int32_t number_at(args_t a, int32_t item)
{
    if (a.numbers == 0)
        return item;
    return (uint32_t)item < a.numbers_stride
               ? ((const int32_t *)a.numbers)[(uint64_t)blockIdx.z * a.numbers_stride + (uint32_t)item]
               : -1;
}

/* A list item on its way to an entry. */
struct chosen {
    int32_t number, entry;
};

static __device__ __forceinline__ uint64_t row_of_number(args_t a, int32_t number)
{
    return (uint64_t)(a.apart * head_of(a)) * a.rows + (uint32_t)number;
}

static __device__ __forceinline__ struct chosen chosen_of(args_t a, int32_t item)
{
    struct chosen c = {number_at(a, item), -1};

    if (a.entry_of == 0) {
        c.entry = c.number;
    } else if ((uint32_t)c.number < a.rows) {
        const int32_t *cell = (const int32_t *)a.entry_of + row_of_number(a, c.number);

        c.entry = a.wait ? load_acquire(cell) : *cell;
    }
    return c;
}

/* It is looked up before the list's length is known. Nothing past the list's end is used. */
static __device__ __forceinline__ struct chosen chosen_early(args_t a, uint32_t tile)
{
    uint32_t list = list_of(a), at = round_at(a, a.round, list) + tile / (a.tokens / TILE);

    if (at >= a.room)
        return chosen{-1, -1};
    return chosen_of(a, ((const int32_t *)a.list)[(uint64_t)list * a.room + at]);
}

static __device__ __forceinline__ uint64_t chosen_at(args_t a, const struct chosen &c, uint32_t tile)
{
    uint64_t at = a.wait && c.entry == WANTED ? row_of_number(a, c.number) * 16 | IS_WANTED : block_at(a.pool, c.entry);

    if (at == 0) {
        raise_flag(a, UCM_ATTEND_NO_ENTRY);
        return 0;
    }
    return (at + tile) | (uint64_t)TILE << VALID_SHIFT;
}

/* For the window: the address of a tile of a block of the sequence. */
static __device__ __forceinline__ uint64_t page_at(args_t a, const struct tiles &t, uint32_t block, uint32_t tile)
{
    uint64_t valid = min(TILE, t.length - block * a.tokens - tile * TILE);
    uint64_t at = block < a.table_stride ? block_at(a.pages, t.table[block]) : 0;

    if (at == 0) {
        raise_flag(a, UCM_ATTEND_NO_PAGE);
        return 0;
    }
    return (at + tile) | valid << VALID_SHIFT | IS_PAGE;
}

/* early: c belongs to this tile, if the tile is one of a chosen block. */
static __device__ __forceinline__ uint64_t tile_at(args_t a, const struct tiles &t, uint32_t tile, bool early,
                                                   struct chosen c)
{
    uint32_t in_block = a.tokens / TILE;

    if (tile < t.chosen)
        return chosen_at(a, early ? c : chosen_of(a, t.list[tile / in_block]), tile % in_block);
    tile -= t.window;
    return page_at(a, t, t.first + tile / in_block, tile % in_block);
}

/* A thread block's part of its list. */
struct split {
    uint32_t first, n; /* of the list's tiles; n 0: nothing is left for it */
    uint32_t of;       /* splits of the list, one at least */
};

static __device__ __forceinline__ uint32_t splits_of(args_t a, const struct tiles &t)
{
    return max(1u, min(a.splits, (t.all + a.split_tiles - 1) / a.split_tiles));
}

static __device__ __forceinline__ struct split split_of(args_t a, const struct tiles &t)
{
    struct split s;
    uint32_t end;

    s.first = blockIdx.x * a.split_tiles;
    s.of = splits_of(a, t);
    end = s.first < t.window && a.plain_pages ? t.chosen : t.all;
    s.n = end > s.first ? min(end - s.first, a.split_tiles) : 0;
    return s;
}

/* By ALL threads of a thread block: where its tiles lie. early: belongs to the tile with the
 * thread's number. */
template <uint32_t ALL>
static __device__ __forceinline__ void look_up(args_t a, const struct tiles &t, const struct split &s, struct chosen early,
                                               uint64_t *where)
{
    if (blockIdx.x == 0 && threadIdx.x == 0 && t.all > a.splits * a.split_tiles)
        raise_flag(a, UCM_ATTEND_NO_PAGE); /* no thread block has the rest */
    for (uint32_t i = threadIdx.x; i < s.n; i += ALL)
        where[i] = tile_at(a, t, s.first + i, i < ALL, early);
}

/* By a warp, after all of its lanes have read *where. Returns the tile's place when its block has
 * come or failed to come. */
static __device__ __forceinline__ void tile_await(args_t a, uint64_t *where)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        const int32_t *cell = (const int32_t *)a.entry_of + (*where & ((UINT64_C(1) << VALID_SHIFT) - 1)) / 16;
        uint64_t began = nanoseconds(), at;
        int32_t entry;

        while ((entry = load_acquire(cell)) == WANTED && nanoseconds() - began < PATIENCE)
            pause();
        at = block_at(a.pool, entry);
        if (at == 0)
            raise_flag(a, UCM_ATTEND_NO_ENTRY);
        *where = at == 0 ? 0 : (at + *where % 16) | (uint64_t)TILE << VALID_SHIFT;
    }
    __syncwarp();
    arrived_before_copies();
}

static __device__ __forceinline__ uint32_t valid_of(uint64_t where)
{
    return (uint32_t)(where >> VALID_SHIFT) & 0x1f;
}

#endif
