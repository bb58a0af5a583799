/* A pool's steps on the GPU. entries_cuda.h has the order of launches, and the memory order that
 * they need. */
#include "kernels/encoding/fp8.cuh"
#include "kernels/entries/entries.cuh"
#include "kernels/entries/entries_cuda.h"

typedef const struct ucm_entries &pool_t;

/* ---- the host's memory ---- */

static __device__ __forceinline__ uint64_t load_acquire(uint64_t at)
{
    uint64_t x;

    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}

static __device__ __forceinline__ uint64_t load_relaxed(uint64_t at)
{
    uint64_t x;

    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}

template <bool STRONG> static __device__ __forceinline__ uint4 load_vector(uint64_t at)
{
    uint4 x;

    if (STRONG)
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(at)
                     : "memory");
    else
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(at)
                     : "memory");
    return x;
}

static __device__ __forceinline__ void fence_system(void)
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/* ---- launches that overlap, from compute capability 9.0 on ---- */

/* When all thread blocks have called this, the next launch begins, if it has the attribute. */
static __device__ __forceinline__ void let_next_begin(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the launch that this one overlaps has ended, and all of its stores are visible. */
static __device__ __forceinline__ void await_last(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- a step ---- */

/* By one thread. Forgets misses of a step that never ended. attended: or NULL. */
extern "C" __global__ void ucm_entries_next(const __grid_constant__ struct ucm_entries s,
                                          struct ucm_entries_attended *attended)
{
    uint32_t n = entries_listed(s);

    for (uint32_t i = 0; i < n; i++)
        entries_end_miss(s, s.miss[i], s.miss[i].entry, false);
    if (attended)
        *attended = ucm_entries_attended{0, 0, 1.0f, 0, 0};
    s.step->misses = 0;
    s.step->done = 0;
    s.step->now++;
    s.step->unserved = 0;
    s.step->flags = 0;
}

/* A thread block is a list. */
extern "C" __global__ void __launch_bounds__(UCM_ENTRIES_CUDA_RESOLVE)
    ucm_entries_resolve(const __grid_constant__ struct ucm_entries s, uint32_t layer_head,
                      const __grid_constant__ struct ucm_entries_lists lists)
{
    uint32_t sequence = blockIdx.x / lists.lists, l = blockIdx.x % lists.lists;
    uint32_t n = min(lists.count[blockIdx.x], lists.room), begin = lists.begin ? lists.begin[blockIdx.x] : 0;
    const uint32_t *index = lists.index + (size_t)blockIdx.x * lists.room;
    const int32_t *table = lists.table + sequence * lists.table_stride;
    uint64_t now = s.step->now;

    let_next_begin();
    if (lists.end)
        n = min(n, lists.end[blockIdx.x]);
    for (uint32_t i = begin + threadIdx.x; i < n; i += UCM_ENTRIES_CUDA_RESOLVE)
        entries_chosen(s, now, layer_head + lists.apart * l, table, lists.table_stride, index[i],
                     lists.request[sequence]);
}

/* The step's last launch, by one thread. A reader that sees the word's step sees the rest of the
 * word, too. */
extern "C" __global__ void ucm_entries_end(const __grid_constant__ struct ucm_entries s,
                                         const struct ucm_entries_attended *attended,
                                         struct ucm_entries_word *word)
{
    volatile struct ucm_entries_word *w = word;
    const struct ucm_entries_step *step = s.step;

    w->flags = step->flags | attended->flags << UCM_ENTRIES_ATTENDED;
    w->unserved = step->unserved;
    w->missed = step->missed;
    w->taken = step->taken;
    w->floors_broken = step->floors_broken;
    w->blocks = attended->blocks;
    w->rounds = attended->rounds;
    w->share = attended->rounds > 0 ? attended->share : 0.0f;
    __threadfence_system();
    w->step = step->now;
}

/* By all of a launch's thread blocks: true in all threads of the last one. */
static __device__ bool last_block(pool_t s)
{
    __shared__ bool last;

    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&s.step->done, 1) + 1 == gridDim.x;
    }
    __syncthreads();
    return last;
}

static __device__ void end_misses(pool_t s)
{
    if (last_block(s) && threadIdx.x == 0) {
        s.step->misses = 0;
        s.step->done = 0;
    }
}

/* ---- the gather: a team of threads has a miss ---- */

template <uint32_t TEAM> static __device__ __forceinline__ void team_sync(void)
{
    if (TEAM == 32)
        __syncwarp();
    else
        __syncthreads();
}

struct arriving {
    struct ucm_entries_miss miss;
    struct ucm_entries_place place;
    bool there;
};

/* Where a miss is copied from. A page has only one layer of the block, so the place is where the
 * block would begin for that layer to lie there. */
static __device__ __forceinline__ struct ucm_entries_place
place_of(pool_t s, const struct ucm_entries_gather &g, uint32_t key)
{
    uint32_t number = key % s.shape.numbers, layer = key / s.shape.numbers / g.heads;
    int32_t page = g.page_of ? __ldcg(&g.page_of[number]) : -1;

    if (page < 0 || (uint32_t)page >= g.page_bound)
        return ((const struct ucm_entries_place *)g.places)[number];
    return ucm_entries_place{
        g.pages + (uint32_t)page * g.page_stride - layer * g.plane[0].layer_stride, 0, 0};
}

/* By the team's first warp. */
static __device__ __forceinline__ void begin_arriving(pool_t s, const struct ucm_entries_gather &g,
                                                      uint32_t i, struct arriving *a)
{
    struct ucm_entries_miss miss = s.miss[i];
    int32_t entry = entries_take(s, s.step->now, miss);

    if (threadIdx.x % 32 != 0)
        return;
    miss.entry = entry;
    a->miss = miss;
    a->place = place_of(s, g, miss.key);
    a->there = entry != UCM_ENTRIES_NONE && a->place.bytes != 0 &&
               (a->place.seq == 0 || load_acquire(a->place.seq) == a->place.told);
}

#define IN_FLIGHT 8u

template <uint32_t TEAM, bool STRONG>
static __device__ __forceinline__ void copy_plane(const struct ucm_entries_plane &p, uint64_t from,
                                                  uint64_t to, uint32_t thread)
{
    uint32_t row_vectors = p.row_bytes / 16, vectors = p.rows * row_vectors;

    for (uint32_t first = thread; first < vectors; first += TEAM * IN_FLIGHT) {
        uint4 x[IN_FLIGHT];

#pragma unroll
        for (uint32_t i = 0; i < IN_FLIGHT; i++) {
            uint32_t v = first + i * TEAM;

            if (v < vectors)
                x[i] = load_vector<STRONG>(from + v / row_vectors * p.pitch +
                                           v % row_vectors * 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < IN_FLIGHT; i++)
            if (first + i * TEAM < vectors)
                ((uint4 *)to)[first + i * TEAM] = x[i];
    }
}

/* Infinities become NaN, since attention takes their code for a number. */
static __device__ __forceinline__ uint32_t finite_codes(uint32_t four)
{
    return four | (((four & 0x7e7e7e7eu) + 0x02020202u) & 0x80808080u) >> 7;
}

/* One vector of a row; neighbouring lanes have the others. Writes its codes; the row's first lane
 * writes the scale. */
template <uint32_t D>
static __device__ __forceinline__ void code_vector(uint4 x, uint32_t row_vectors, uint2 *codes,
                                                   uint8_t *scale)
{
    uint32_t most = element_largest<D>(x), k;
    uint2 c;

    for (uint32_t lanes = row_vectors / 2; lanes > 0; lanes /= 2)
        most = max(most, __shfl_xor_sync(ENTRIES_ALL, most, lanes));
    k = fp8<D>::scale(most);
    c = fp8<D>::encode(x, k);
    *codes = make_uint2(finite_codes(c.x), finite_codes(c.y));
    if (threadIdx.x % row_vectors == 0)
        *scale = (uint8_t)k;
}

/* As copy_plane, encoded. Warps are whole: vectors is a multiple of 32. */
template <uint32_t TEAM, bool STRONG, uint32_t D>
static __device__ __forceinline__ void code_plane(const struct ucm_entries_plane &p, uint64_t from,
                                                  uint64_t to, uint64_t scales, uint32_t thread)
{
    uint32_t row_vectors = p.row_bytes / 16, vectors = p.rows * row_vectors;

    for (uint32_t first = thread; first < vectors; first += TEAM * IN_FLIGHT) {
        uint4 x[IN_FLIGHT];

#pragma unroll
        for (uint32_t i = 0; i < IN_FLIGHT; i++) {
            uint32_t v = first + i * TEAM;

            if (v < vectors)
                x[i] = load_vector<STRONG>(from + v / row_vectors * p.pitch + v % row_vectors * 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < IN_FLIGHT; i++) {
            uint32_t v = first + i * TEAM;

            if (v < vectors)
                code_vector<D>(x[i], row_vectors, (uint2 *)to + v,
                               (uint8_t *)scales + v / row_vectors);
        }
    }
}

/* A layer head's plane into an entry. */
template <uint32_t TEAM, bool STRONG>
static __device__ __forceinline__ void bring_plane(const struct ucm_entries_plane &p, uint64_t from,
                                                   int32_t entry, uint32_t thread)
{
    uint64_t at = (uint64_t)entry * p.entry_stride;

    if (p.scales == 0)
        copy_plane<TEAM, STRONG>(p, from, p.entries + at, thread);
    else if (p.dtype == UCM_ENCODING_F16)
        code_plane<TEAM, STRONG, UCM_ENCODING_F16>(p, from, p.entries + at, p.scales + at, thread);
    else
        code_plane<TEAM, STRONG, UCM_ENCODING_BF16>(p, from, p.entries + at, p.scales + at, thread);
}

template <uint32_t TEAM, bool STRONG>
static __device__ __forceinline__ void gather(pool_t s, const struct ucm_entries_gather &g)
{
    __shared__ struct arriving arriving[UCM_ENTRIES_CUDA_GATHER / TEAM];
    uint32_t thread = threadIdx.x % TEAM, teams = gridDim.x * (UCM_ENTRIES_CUDA_GATHER / TEAM);
    struct arriving *a = &arriving[threadIdx.x / TEAM];
    uint32_t n;

    await_last();     /* the list of misses is complete, and so is all else that attention reads */
    let_next_begin(); /* attention may begin; it can no longer take the places of thread blocks that
                       * it waits for */
    n = entries_listed(s);
    for (uint32_t i = blockIdx.x + gridDim.x * (threadIdx.x / TEAM); i < n; i += teams) {
        if (thread < 32)
            begin_arriving(s, g, i, a);
        team_sync<TEAM>();
        if (a->there) {
            uint32_t layer_head = a->miss.key / s.shape.numbers;

            for (uint32_t j = 0; j < g.planes; j++) {
                const struct ucm_entries_plane &p = g.plane[j];

                bring_plane<TEAM, STRONG>(p,
                                          a->place.bytes + p.first +
                                              layer_head / g.heads * p.layer_stride +
                                              layer_head % g.heads * p.head_stride,
                                          a->miss.entry, thread);
            }
            fence_system();
        }
        team_sync<TEAM>();
        if (thread == 0)
            entries_end_miss(s, a->miss, a->miss.entry,
                           a->there && (a->place.seq == 0 ||
                                        load_relaxed(a->place.seq) == a->place.told));
        team_sync<TEAM>();
    }
    end_misses(s);
}

#define GATHER(name, team, strong)                                                                 \
    extern "C" __global__ void __launch_bounds__(UCM_ENTRIES_CUDA_GATHER, 1)                          \
    ucm_entries_gather_##name(const __grid_constant__ struct ucm_entries s,                            \
                            const __grid_constant__ struct ucm_entries_gather g)                     \
    {                                                                                              \
        gather<team, strong>(s, g);                                                                \
    }

GATHER(warp, 32, true)
GATHER(block, UCM_ENTRIES_CUDA_GATHER, true)
/* For measurements alongside the others only: a cache may answer its loads. */
GATHER(warp_weak, 32, false)
GATHER(block_weak, UCM_ENTRIES_CUDA_GATHER, false)

/* ---- between steps ---- */

extern "C" __global__ void ucm_entries_want_keys(const __grid_constant__ struct ucm_entries s,
                                               const uint32_t *keys, const uint32_t *requests,
                                               uint32_t n)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        entries_want(s, s.step->now, keys[i], requests[i]);
}

/* A warp has a miss. */
extern "C" __global__ void ucm_entries_take_all(const __grid_constant__ struct ucm_entries s)
{
    uint32_t n = entries_listed(s), warps = gridDim.x * blockDim.x / 32;

    for (uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < n; i += warps) {
        struct ucm_entries_miss miss = s.miss[i];

        if (miss.entry != UCM_ENTRIES_NONE)
            continue;
        miss.entry = entries_take(s, s.step->now, miss);
        if (threadIdx.x % 32 == 0)
            s.miss[i].entry = miss.entry;
    }
}

extern "C" __global__ void ucm_entries_publish_all(const __grid_constant__ struct ucm_entries s,
                                                 const uint8_t *arrived)
{
    uint32_t n = entries_listed(s);

    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        entries_end_miss(s, s.miss[i], s.miss[i].entry, arrived[i] != 0);
    end_misses(s);
}

/* Where a key's bytes lie, by the whole warp; 0: the key is not there. */
static __device__ __forceinline__ uint64_t source_of(const uint32_t *keys, const uint64_t *from,
                                                     uint32_t n, uint32_t key)
{
    uint32_t lane = threadIdx.x % 32;

    for (uint32_t first = 0; first < n; first += 32) {
        uint32_t i = first + lane;
        uint32_t found = __ballot_sync(ENTRIES_ALL, i < n && keys[i] == key);

        if (found != 0)
            return from[first + (uint32_t)__ffs((int)found) - 1];
    }
    return 0;
}

/* Takes an entry for each miss, and fills it with bytes that the GPU's memory has. Those of keys[i]
 * are at from[i], as one layer of its block. A warp has a miss. */
extern "C" __global__ void __launch_bounds__(UCM_ENTRIES_CUDA_GATHER, 1)
    ucm_entries_put(const __grid_constant__ struct ucm_entries s,
                  const __grid_constant__ struct ucm_entries_gather g, const uint32_t *keys,
                  const uint64_t *from, uint32_t n)
{
    uint32_t misses = entries_listed(s), teams = gridDim.x * (UCM_ENTRIES_CUDA_GATHER / 32);

    for (uint32_t i = blockIdx.x + gridDim.x * (threadIdx.x / 32); i < misses; i += teams) {
        struct ucm_entries_miss miss = s.miss[i];
        int32_t entry = entries_take(s, s.step->now, miss);
        uint64_t at = source_of(keys, from, n, miss.key);
        uint32_t head = miss.key / s.shape.numbers % g.heads;

        for (uint32_t j = 0; j < g.planes && entry != UCM_ENTRIES_NONE && at != 0; j++) {
            const struct ucm_entries_plane &p = g.plane[j];

            bring_plane<32, false>(p, at + p.first + head * p.head_stride, entry, threadIdx.x % 32);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            entries_end_miss(s, miss, entry, at != 0);
        __syncwarp();
    }
    end_misses(s);
}

/* A thread has a number in a layer head. */
extern "C" __global__ void ucm_entries_forget_numbers(const __grid_constant__ struct ucm_entries s,
                                                    const uint32_t *numbers, uint32_t n)
{
    uint64_t all = (uint64_t)n * s.shape.layer_heads, step = (uint64_t)gridDim.x * blockDim.x;

    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        uint32_t key = (uint32_t)(i / n) * s.shape.numbers + numbers[i % n];
        /* a number may be there twice */
        int32_t at = atomicExch(&s.entry_of[key], UCM_ENTRIES_NONE);

        if (at >= 0) {
            uint32_t holder = atomicExch(&s.request[at], UCM_ENTRIES_NOBODY);

            if (holder != UCM_ENTRIES_NOBODY)
                atomicSub(&s.held[holder], 1);
            s.key[at] = UCM_ENTRIES_NO_KEY;
            s.stamp[at] = 0;
        }
    }
}

/* held[request] becomes 0, since all of its entries then count for none. */
extern "C" __global__ void ucm_entries_leave_request(const __grid_constant__ struct ucm_entries s,
                                                   uint32_t request)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < s.shape.entries;
         i += gridDim.x * blockDim.x)
        if (s.request[i] == request) {
            s.request[i] = UCM_ENTRIES_NOBODY;
            atomicSub(&s.held[request], 1);
        }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        s.floor[request] = 0;
}
