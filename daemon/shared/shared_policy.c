/* Which roots a block is written to and read from, and the answers that are remembered. */
#include "daemon/shared/shared_internal.h"

#include <string.h>
#include <xxhash.h>

static uint64_t block_hash(const struct block_file_id *id, uint64_t seed)
{
    uint8_t bytes[UCM_FINGERPRINT_BYTES + UCM_MAX_KEY_BYTES];

    memcpy(bytes, id->fingerprint, UCM_FINGERPRINT_BYTES);
    memcpy(bytes + UCM_FINGERPRINT_BYTES, id->key, id->key_bytes);
    return XXH3_64bits_withSeed(bytes, UCM_FINGERPRINT_BYTES + id->key_bytes, seed);
}

/* The key of the answer cache for a part on a root. */
static uint64_t answer_tag(const struct shared *s, const struct block_file_id *id, uint32_t root)
{
    return block_hash(id, s->hash_seed * 0x9e3779b97f4a7c15ull + id->part * UCM_MAX_ROOTS + root);
}

void shared_remember(struct shared *s, const struct block_file_id *id, uint32_t root, bool found,
                     uint64_t for_ms)
{
    uint64_t now = shared_now(s), tag = answer_tag(s, id, root);

    if (for_ms > 0 && !(found && !list_empty(&s->purges)))
        answer_cache_put(&s->answers, tag, found ? SHARED_KNOWN_FOUND : SHARED_KNOWN_MISSING, now,
                         now + for_ms);
    else
        answer_cache_forget(&s->answers, tag);
}

void shared_remember_found(struct shared *s, const struct block_file_id *id, uint32_t root,
                           uint64_t removed)
{
    if (removed == s->removed)
        shared_remember(s, id, root, true, SHARED_FOUND_MS);
}

enum shared_known shared_recall(const struct shared *s, const struct block_file_id *id,
                                uint32_t root)
{
    return (enum shared_known)answer_cache_get(&s->answers, answer_tag(s, id, root), shared_now(s));
}

/* ---- rendezvous ---- */

/* Each root has its own weight for each block; the root with the highest weight has the block, with
 * all its parts. When a root leaves, only its own blocks move. Returns the root among the writable
 * ones of `asked`; UCM_MAX_ROOTS: there is none. */
static uint32_t hashed_root(const struct shared *s, const struct block_file_id *id,
                            shared_roots_mask asked)
{
    uint32_t best = UCM_MAX_ROOTS;
    uint64_t most = 0;

    for (uint32_t i = 0; i < s->n; i++) {
        uint64_t weight;

        if (!(asked >> i & 1) || s->roots[i]->config.read_only)
            continue;
        weight = block_hash(id, s->roots[i]->hash);
        if (best == UCM_MAX_ROOTS || weight > most) {
            best = i;
            most = weight;
        }
    }
    return best;
}

shared_roots_mask shared_roots_that_may_have(const struct shared *s, const struct block_file_id *id,
                                             shared_roots_mask asked)
{
    shared_roots_mask mask = 0;
    uint32_t one;

    if (s->settings.placement != CONFIG_PLACEMENT_HASHED)
        return asked;
    one = hashed_root(s, id, asked);
    if (one < UCM_MAX_ROOTS)
        mask |= 1u << one;
    for (uint32_t i = 0; i < s->n; i++)
        if (s->roots[i]->config.read_only) /* its writers did not hash over our roots */
            mask |= asked & 1u << i;
    return mask;
}

shared_roots_mask shared_roots_up(const struct shared *s)
{
    shared_roots_mask up = 0;

    for (uint32_t i = 0; i < s->n; i++)
        if (shared_root_up(s->roots[i]))
            up |= 1u << i;
    return up;
}

uint32_t shared_write_roots(struct shared *s, const struct block_file_id *id,
                            uint8_t out[UCM_MAX_ROOTS])
{
    uint32_t n = 0, one;

    if (s->settings.placement == CONFIG_PLACEMENT_HASHED) {
        /* Only this one: no host would look for the block elsewhere. */
        one = hashed_root(s, id, shared_roots_up(s));
        if (one < UCM_MAX_ROOTS && shared_root_takes_writes(s->roots[one]))
            out[n++] = (uint8_t)one;
        return n;
    }
    for (uint32_t i = 0; i < s->n; i++)
        if (shared_root_takes_writes(s->roots[i]))
            out[n++] = (uint8_t)i;
    return n;
}
