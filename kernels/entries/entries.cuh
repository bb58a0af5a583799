/* What kernels do with a pool's arrays. entries_cuda.h says in which order, and what may run at
 * once. */
#ifndef UCM_KERNELS_ENTRIES_CUH
#define UCM_KERNELS_ENTRIES_CUH

#include "kernels/entries/entries.h"

#define ENTRIES_ALL 0xffffffffu
#define ENTRIES_NEVER 0xffffffffffffffffull

typedef unsigned long long entries_u64;

static __device__ __forceinline__ uint64_t entries_stamp(const struct ucm_entries &s, uint32_t entry)
{
    return __ldcg((const entries_u64 *)&s.stamp[entry]);
}

static __device__ __forceinline__ uint32_t entries_listed(const struct ucm_entries &s)
{
    return min(__ldcg(&s.step->misses), s.shape.misses);
}

static __device__ __forceinline__ void entries_lose(const struct ucm_entries &s, uint32_t key,
                                                  uint32_t flag)
{
    uint32_t i = atomicAdd(&s.step->unserved, 1);

    if (i < s.shape.misses)
        s.unserved[i] = key;
    atomicOr(&s.step->flags, UCM_ENTRIES_UNSERVED | flag);
}

/* An entry that was used counts for a request. */
static __device__ __forceinline__ void entries_adopt(const struct ucm_entries &s, uint32_t entry,
                                                   uint32_t request)
{
    if (__ldcg(&s.request[entry]) == UCM_ENTRIES_NOBODY &&
        atomicCAS(&s.request[entry], UCM_ENTRIES_NOBODY, request) == UCM_ENTRIES_NOBODY)
        atomicAdd(&s.held[request], 1);
}

/* By one thread. now: s.step->now. */
static __device__ __forceinline__ void entries_want(const struct ucm_entries &s, uint64_t now,
                                                  uint32_t key, uint32_t request)
{
    int32_t at = __ldcg(&s.entry_of[key]);

    if (at >= 0) {
        __stcg((entries_u64 *)&s.stamp[at], (entries_u64)now);
        entries_adopt(s, (uint32_t)at, request);
    } else if (at == UCM_ENTRIES_NONE &&
               atomicCAS(&s.entry_of[key], UCM_ENTRIES_NONE, UCM_ENTRIES_WANTED) == UCM_ENTRIES_NONE) {
        uint32_t i = atomicAdd(&s.step->misses, 1);

        atomicAdd((entries_u64 *)&s.step->missed, 1);
        if (i < s.shape.misses) {
            s.miss[i] = ucm_entries_miss{key, UCM_ENTRIES_NONE, request};
        } else {
            atomicExch(&s.entry_of[key], UCM_ENTRIES_NONE);
            entries_lose(s, key, UCM_ENTRIES_LIST_FULL);
        }
    }
}

/* One item of a list. table: of the list's sequence, `length` items. */
static __device__ __forceinline__ void entries_chosen(const struct ucm_entries &s, uint64_t now,
                                                    uint32_t layer_head, const int32_t *table,
                                                    uint64_t length, uint32_t index,
                                                    uint32_t request)
{
    int32_t number = index < length ? table[index] : -1;

    if (index == UCM_ENTRIES_NO_INDEX)
        return;
    if (number < 0 || (uint32_t)number >= s.shape.numbers || request >= s.shape.requests)
        atomicOr(&s.step->flags, UCM_ENTRIES_UNSERVED | UCM_ENTRIES_STRAY);
    else
        entries_want(s, now, layer_head * s.shape.numbers + (uint32_t)number, request);
}

/* ---- taking an entry: by a warp, a lane looks at one entry of the group ---- */

static __device__ __forceinline__ bool entries_may_take(const struct ucm_entries &s, uint32_t entry,
                                                      uint32_t request, bool floors)
{
    uint32_t holder = __ldcg(&s.request[entry]);

    return !floors || holder == UCM_ENTRIES_NOBODY || holder == request ||
           (int32_t)__ldcg(&s.held[holder]) > (int32_t)__ldcg(&s.floor[holder]);
}

/* The oldest of the warp's ages, and the first lane that has it. */
static __device__ __forceinline__ uint64_t entries_oldest(uint64_t age, uint32_t *lane)
{
    uint64_t oldest = age;

#pragma unroll
    for (uint32_t d = 16; d > 0; d /= 2)
        oldest = min((entries_u64)oldest, __shfl_xor_sync(ENTRIES_ALL, (entries_u64)oldest, d));
    *lane = (uint32_t)__ffs((int)__ballot_sync(ENTRIES_ALL, age == oldest)) - 1;
    return oldest;
}

/* By the lane that looks at it. True: the entry now belongs to this step and the request. The old
 * holder's count is lowered before that is certain, and raised again if a floor forbids it. */
static __device__ __forceinline__ bool entries_claim(const struct ucm_entries &s, uint32_t entry,
                                                   uint64_t age, uint64_t now, uint32_t request,
                                                   bool floors)
{
    uint32_t holder;

    if (atomicCAS((entries_u64 *)&s.stamp[entry], (entries_u64)age, (entries_u64)now) != age)
        return false;
    __threadfence();
    holder = __ldcg(&s.request[entry]);
    if (holder == request)
        return true;
    if (holder != UCM_ENTRIES_NOBODY) {
        int32_t held = (int32_t)atomicSub(&s.held[holder], 1);

        if (floors && held <= (int32_t)__ldcg(&s.floor[holder])) {
            atomicAdd(&s.held[holder], 1);
            atomicExch((entries_u64 *)&s.stamp[entry], (entries_u64)age);
            return false;
        }
    }
    atomicExch(&s.request[entry], request);
    atomicAdd(&s.held[request], 1);
    return true;
}

/* The whole warp: an entry of the group, or UCM_ENTRIES_NONE. */
static __device__ __forceinline__ int32_t entries_of_group(const struct ucm_entries &s, uint32_t group,
                                                         uint64_t now, uint32_t request, bool floors)
{
    uint32_t lane = threadIdx.x % 32, entry = group * UCM_ENTRIES_GROUP + lane, first;
    bool mine = entry < s.shape.entries, taken = false;

    /* In each turn a lane gives up, or another warp took an entry. So 64 turns are plenty. */
    for (uint32_t turn = 0; turn < 64; turn++) {
        uint64_t age = mine ? entries_stamp(s, entry) : ENTRIES_NEVER;

        if (age == now || (age != ENTRIES_NEVER && !entries_may_take(s, entry, request, floors)))
            age = ENTRIES_NEVER;
        if (entries_oldest(age, &first) == ENTRIES_NEVER)
            return UCM_ENTRIES_NONE;
        if (lane == first) {
            taken = entries_claim(s, entry, age, now, request, floors);
            mine = taken;
        }
        if (__shfl_sync(ENTRIES_ALL, taken, first))
            return (int32_t)__shfl_sync(ENTRIES_ALL, entry, first);
    }
    return UCM_ENTRIES_NONE;
}

/* The whole warp: an entry for a miss, or UCM_ENTRIES_NONE. The entry's old key is not resident any
 * more. */
static __device__ __forceinline__ int32_t entries_take(const struct ucm_entries &s, uint64_t now,
                                                     const struct ucm_entries_miss &miss)
{
    int32_t entry = UCM_ENTRIES_NONE;
    uint32_t turn, lane = threadIdx.x % 32;

    for (turn = 0; turn < 2 * s.groups && entry == UCM_ENTRIES_NONE; turn++) {
        uint32_t group = lane == 0 ? atomicAdd(&s.step->hand, 1) % s.groups : 0;

        entry = entries_of_group(s, __shfl_sync(ENTRIES_ALL, group, 0), now, miss.request,
                              turn < s.groups);
    }
    if (lane == 0 && entry == UCM_ENTRIES_NONE)
        atomicOr(&s.step->flags, UCM_ENTRIES_FULL);
    if (lane == 0 && entry != UCM_ENTRIES_NONE) {
        uint32_t old = atomicExch(&s.key[entry], miss.key);

        if (old != UCM_ENTRIES_NO_KEY)
            atomicExch(&s.entry_of[old], UCM_ENTRIES_NONE);
        atomicAdd((entries_u64 *)&s.step->taken, 1);
        if (turn > s.groups)
            atomicAdd((entries_u64 *)&s.step->floors_broken, 1);
    }
    return entry;
}

/* By one thread, when it knows whether the bytes are there. */
static __device__ __forceinline__ void entries_end_miss(const struct ucm_entries &s,
                                                      const struct ucm_entries_miss &miss,
                                                      int32_t entry, bool arrived)
{
    if (entry != UCM_ENTRIES_NONE && arrived) {
        atomicExch(&s.entry_of[miss.key], entry);
        return;
    }
    atomicExch(&s.entry_of[miss.key], UCM_ENTRIES_NONE);
    if (entry != UCM_ENTRIES_NONE) {
        atomicExch(&s.key[entry], UCM_ENTRIES_NO_KEY);
        atomicExch(&s.request[entry], UCM_ENTRIES_NOBODY);
        atomicSub(&s.held[miss.request], 1);
        __threadfence();
        atomicExch((entries_u64 *)&s.stamp[entry], 0);
    }
    entries_lose(s, miss.key, 0);
}

#endif
