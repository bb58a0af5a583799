/* What kernels do with a pool's arrays; slots_cuda.h says in which order, and what may run beside what. */
#ifndef UCM_KERNELS_SLOTS_CUH
#define UCM_KERNELS_SLOTS_CUH

#include "kernels/slots/slots.h"

#define SLOTS_ALL 0xffffffffu
#define SLOTS_NEVER 0xffffffffffffffffull

typedef unsigned long long slots_u64;

static __device__ __forceinline__ uint64_t slots_stamp(const struct ucm_slots &s, uint32_t slot)
{
    return __ldcg((const slots_u64 *)&s.stamp[slot]);
}

static __device__ __forceinline__ uint32_t slots_listed(const struct ucm_slots &s)
{
    return min(__ldcg(&s.step->misses), s.shape.misses);
}

static __device__ __forceinline__ void slots_lose(const struct ucm_slots &s, uint32_t key,
                                                  uint32_t flag)
{
    uint32_t i = atomicAdd(&s.step->unserved, 1);

    if (i < s.shape.misses)
        s.unserved[i] = key;
    atomicOr(&s.step->flags, UCM_SLOTS_UNSERVED | flag);
}

/* A slot that was used counts for somebody. */
static __device__ __forceinline__ void slots_adopt(const struct ucm_slots &s, uint32_t slot,
                                                   uint32_t request)
{
    if (__ldcg(&s.request[slot]) == UCM_SLOTS_NOBODY &&
        atomicCAS(&s.request[slot], UCM_SLOTS_NOBODY, request) == UCM_SLOTS_NOBODY)
        atomicAdd(&s.held[request], 1);
}

/* By one thread. now: s.step->now. */
static __device__ __forceinline__ void slots_want(const struct ucm_slots &s, uint64_t now,
                                                  uint32_t key, uint32_t request)
{
    int32_t at = __ldcg(&s.slot_of[key]);

    if (at >= 0) {
        __stcg((slots_u64 *)&s.stamp[at], (slots_u64)now);
        slots_adopt(s, (uint32_t)at, request);
    } else if (at == UCM_SLOTS_NONE &&
               atomicCAS(&s.slot_of[key], UCM_SLOTS_NONE, UCM_SLOTS_WANTED) == UCM_SLOTS_NONE) {
        uint32_t i = atomicAdd(&s.step->misses, 1);

        atomicAdd((slots_u64 *)&s.step->missed, 1);
        if (i < s.shape.misses) {
            s.miss[i] = ucm_slots_miss{key, UCM_SLOTS_NONE, request};
        } else {
            atomicExch(&s.slot_of[key], UCM_SLOTS_NONE);
            slots_lose(s, key, UCM_SLOTS_LIST_FULL);
        }
    }
}

/* One entry of a list. table: of the list's sequence, `length` entries. */
static __device__ __forceinline__ void slots_chosen(const struct ucm_slots &s, uint64_t now,
                                                    uint32_t strand, const int32_t *table,
                                                    uint64_t length, uint32_t index,
                                                    uint32_t request)
{
    int32_t number = index < length ? table[index] : -1;

    if (index == UCM_SLOTS_NO_INDEX)
        return;
    if (number < 0 || (uint32_t)number >= s.shape.numbers || request >= s.shape.requests)
        atomicOr(&s.step->flags, UCM_SLOTS_UNSERVED | UCM_SLOTS_STRAY);
    else
        slots_want(s, now, strand * s.shape.numbers + (uint32_t)number, request);
}

/* ---- taking a slot: by a warp, a lane looks at one slot of the group ---- */

static __device__ __forceinline__ bool slots_may_take(const struct ucm_slots &s, uint32_t slot,
                                                      uint32_t request, bool floors)
{
    uint32_t holder = __ldcg(&s.request[slot]);

    return !floors || holder == UCM_SLOTS_NOBODY || holder == request ||
           (int32_t)__ldcg(&s.held[holder]) > (int32_t)__ldcg(&s.floor[holder]);
}

/* The oldest of the warp's ages, and the first lane that has it. */
static __device__ __forceinline__ uint64_t slots_oldest(uint64_t age, uint32_t *lane)
{
    uint64_t oldest = age;

#pragma unroll
    for (uint32_t d = 16; d > 0; d /= 2)
        oldest = min((slots_u64)oldest, __shfl_xor_sync(SLOTS_ALL, (slots_u64)oldest, d));
    *lane = (uint32_t)__ffs((int)__ballot_sync(SLOTS_ALL, age == oldest)) - 1;
    return oldest;
}

/* By the lane that looks at it: true if the slot is this step's now, and the request's. Its old holder has one less:
 * that is asked before it is certain, and given back if a floor forbids it. */
static __device__ __forceinline__ bool slots_claim(const struct ucm_slots &s, uint32_t slot,
                                                   uint64_t age, uint64_t now, uint32_t request,
                                                   bool floors)
{
    uint32_t holder;

    if (atomicCAS((slots_u64 *)&s.stamp[slot], (slots_u64)age, (slots_u64)now) != age)
        return false;
    __threadfence();
    holder = __ldcg(&s.request[slot]);
    if (holder == request)
        return true;
    if (holder != UCM_SLOTS_NOBODY) {
        int32_t held = (int32_t)atomicSub(&s.held[holder], 1);

        if (floors && held <= (int32_t)__ldcg(&s.floor[holder])) {
            atomicAdd(&s.held[holder], 1);
            atomicExch((slots_u64 *)&s.stamp[slot], (slots_u64)age);
            return false;
        }
    }
    atomicExch(&s.request[slot], request);
    atomicAdd(&s.held[request], 1);
    return true;
}

/* The whole warp: a slot of the group, or UCM_SLOTS_NONE. */
static __device__ __forceinline__ int32_t slots_of_group(const struct ucm_slots &s, uint32_t group,
                                                         uint64_t now, uint32_t request, bool floors)
{
    uint32_t lane = threadIdx.x % 32, slot = group * UCM_SLOTS_GROUP + lane, first;
    bool mine = slot < s.shape.slots, taken = false;

    /* Each turn a lane gives up, or another warp took a slot: 64 turns are plenty. */
    for (uint32_t turn = 0; turn < 64; turn++) {
        uint64_t age = mine ? slots_stamp(s, slot) : SLOTS_NEVER;

        if (age == now || (age != SLOTS_NEVER && !slots_may_take(s, slot, request, floors)))
            age = SLOTS_NEVER;
        if (slots_oldest(age, &first) == SLOTS_NEVER)
            return UCM_SLOTS_NONE;
        if (lane == first) {
            taken = slots_claim(s, slot, age, now, request, floors);
            mine = taken;
        }
        if (__shfl_sync(SLOTS_ALL, taken, first))
            return (int32_t)__shfl_sync(SLOTS_ALL, slot, first);
    }
    return UCM_SLOTS_NONE;
}

/* The whole warp: a slot for a miss, whose old owner is not resident any more; or UCM_SLOTS_NONE. */
static __device__ __forceinline__ int32_t slots_take(const struct ucm_slots &s, uint64_t now,
                                                     const struct ucm_slots_miss &miss)
{
    int32_t slot = UCM_SLOTS_NONE;
    uint32_t turn, lane = threadIdx.x % 32;

    for (turn = 0; turn < 2 * s.groups && slot == UCM_SLOTS_NONE; turn++) {
        uint32_t group = lane == 0 ? atomicAdd(&s.step->hand, 1) % s.groups : 0;

        slot = slots_of_group(s, __shfl_sync(SLOTS_ALL, group, 0), now, miss.request,
                              turn < s.groups);
    }
    if (lane == 0 && slot == UCM_SLOTS_NONE)
        atomicOr(&s.step->flags, UCM_SLOTS_FULL);
    if (lane == 0 && slot != UCM_SLOTS_NONE) {
        uint32_t old = atomicExch(&s.key[slot], miss.key);

        if (old != UCM_SLOTS_NO_KEY)
            atomicExch(&s.slot_of[old], UCM_SLOTS_NONE);
        atomicAdd((slots_u64 *)&s.step->taken, 1);
        if (turn > s.groups)
            atomicAdd((slots_u64 *)&s.step->floors_broken, 1);
    }
    return slot;
}

/* By one thread, when it knows whether the bytes are there. */
static __device__ __forceinline__ void slots_end_miss(const struct ucm_slots &s,
                                                      const struct ucm_slots_miss &miss,
                                                      int32_t slot, bool arrived)
{
    if (slot != UCM_SLOTS_NONE && arrived) {
        atomicExch(&s.slot_of[miss.key], slot);
        return;
    }
    atomicExch(&s.slot_of[miss.key], UCM_SLOTS_NONE);
    if (slot != UCM_SLOTS_NONE) {
        atomicExch(&s.key[slot], UCM_SLOTS_NO_KEY);
        atomicExch(&s.request[slot], UCM_SLOTS_NOBODY);
        atomicSub(&s.held[miss.request], 1);
        __threadfence();
        atomicExch((slots_u64 *)&s.stamp[slot], 0);
    }
    slots_lose(s, miss.key, 0);
}

#endif
