/* Which block leaves DRAM next: LRU, where a block's uses earn it more time, as much as
 * daemon/learn finds to be best. docs/design/eviction.md compares it with others.
 *
 * Knows blocks by their numbers and keeps its few bytes a block inside struct block; knows nothing
 * of slots or tiers. The server has one; the cache reports to it what happens. Thread: the event
 * loop only. */
#ifndef UCMD_INDEX_POLICY_H
#define UCMD_INDEX_POLICY_H

#include "daemon/base/list.h"
#include "daemon/index/index.h"
#include "daemon/learn/learn.h"

struct policy;

/* The blocks of one tenant may be a group: a search looks at one group at a time, so the caller
 * decides whose blocks may leave. All others are in the common group. A tenant's group is
 * tenant.group, where the cache sets it before policy_group_made; blocks that are in the common
 * group by then come over when they are used, moved, or met by a search. */
enum { POLICY_CANDIDATES = 0, POLICY_LISTS = 8 };
/* In block.policy_data; 0: the block is a candidate, or not in the policy. */
#define POLICY_ASIDE_SHIFT 3
#define POLICY_ASIDE ((POLICY_LISTS - 1u) << POLICY_ASIDE_SHIFT)
struct policy_group {
    struct block_list list[USES_CLASSES]; /* the candidates, by uses */
    struct block_list aside[POLICY_LISTS];
    uint64_t candidates;
    /* For each list, the first block that came over from the common group. These came coldest
     * first, and are colder than blocks used since. 0: none is left. */
    block_ref came[USES_CLASSES];
    /* The cache's own: quota.c, space.c. */
    struct list open;
    struct tenant *tenant;
    bool whole; /* none of its blocks is in the common group, or a walk brings them over */
    uint64_t stuck, released;
};
struct policy_group *policy_common(struct policy *p);
void policy_group_made(struct policy *p);
/* Brings a block that is in the common group into its tenant's, if that has one. */
void policy_come_over(struct policy *p, block_ref ref);

/* capacity_hint: how many blocks DRAM is likely to hold. The unit of the policy's time follows from
 * it; an estimate that is 16 times too low or too high does no harm. */
int policy_new(struct index *ix, uint64_t capacity_hint, struct policy **out);
void policy_free(struct policy *p);

/* The block came into DRAM (dumped or read). Sets BLOCK_IN_POLICY. Blocks that come without a touch
 * in between leave in the opposite order, since the head of a chain comes first. */
void policy_insert(struct policy *p, block_ref ref);
/* The blocks of one prefix are used, in the chain's order, head first: looked up, loaded, or about
 * to be dumped. Those that are not in DRAM will be inserted next, perhaps; what is known of their
 * earlier uses counts. Numbers that are 0 are passed over. A chain is worthless without its head:
 * no block gets fewer uses than those after it. Touching again at once (a lookup, then its load)
 * moves the blocks but is no further use. Returns how many blocks are used again; *outside: how
 * many are not in DRAM. */
uint32_t policy_touch(struct policy *p, const block_ref *refs, uint32_t n, uint32_t *outside);
/* The block left DRAM. evicted: to make room; the policy remembers its uses. Clears
 * BLOCK_IN_POLICY. */
void policy_remove(struct policy *p, block_ref ref, bool evicted);
/* Every block is a candidate, or in one of the lists aside. Those hold the blocks that may not
 * leave now, so that no search meets them again. The caller says what each list means, and moves a
 * block back to the candidates when it may leave; policy_touch does so, too. */

/* Looks for a block of the group that may leave, among the candidates or in a list aside, coldest
 * first. judge says in which list the block belongs. POLICY_CANDIDATES: the block may leave;
 * policy_victim returns it and leaves it where it is. Another list: the block moves there, after
 * the others. Each call of judge takes one from *looks; judge itself may take more. Returns 0 when
 * there is no block, or no look, left. */
block_ref policy_victim(struct policy *p, struct policy_group *g, unsigned from,
                        unsigned (*judge)(void *ctx, block_ref ref), void *ctx, int64_t *looks);
/* The list of a block; POLICY_CANDIDATES for one that is not in the policy. */
static inline unsigned policy_list(const struct block *b)
{
    return (b->policy_data & POLICY_ASIDE) >> POLICY_ASIDE_SHIFT;
}
/* Back among the candidates it is the coldest of them; in a list aside it is the last. */
void policy_move(struct policy *p, block_ref ref, unsigned list);
uint64_t policy_list_count(const struct policy_group *g, unsigned list);
/* Which of these groups has the candidate that should leave first; -1: none has one. */
int policy_coldest_group(const struct policy *p, struct policy_group *const *g, uint32_t n);
/* The first candidate that the caller's `like` accepts, coldest first; 0 when it accepts none of
 * the `tries` coldest. All keep their places. */
block_ref policy_near(const struct policy *p, const struct policy_group *g,
                      bool (*like)(void *ctx, block_ref ref), void *ctx, uint32_t tries);
uint64_t policy_count(const struct policy *p);
/* Over a restart. policy_walk visits the blocks, those first that should leave last, with the uses
 * that the next run needs; none without memory for some bytes a group. policy_restore puts a block
 * of the run before after all that are there. */
void policy_walk(const struct policy *p, void (*visit)(void *ctx, block_ref ref, uint32_t uses),
                 void *ctx);
void policy_restore(struct policy *p, block_ref ref, uint32_t uses);
/* How much the block is worth keeping on a slower tier, 0 (not used since it was stored) to 3. */
enum { HEAT_ONCE = 1 };
unsigned policy_heat(const struct block *b);
const char *policy_name(void);

#endif
