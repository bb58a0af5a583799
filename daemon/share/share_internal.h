/* What the files of the shared tier's door owe each other: share.c (opening, closing, figures),
 * share_policy.c (which roots), share_io.c (parts), lookup.c (keys). */
#ifndef UCMD_SHARE_SHARE_INTERNAL_H
#define UCMD_SHARE_SHARE_INTERNAL_H

#include "daemon/base/config.h"
#include "daemon/share/answer_cache.h"
#include "daemon/share/root.h"

#define SHARE_FOUND_MS 5000u      /* for how long it is remembered that a file is there */
#define SHARE_DAMAGED_MS 600000u  /* and that it is not what it should be */
#define SHARE_ANSWERS (64u << 10) /* of roots, about keys */

struct share_settings {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct metrics *metrics;
    const char *host; /* not kept */
    enum config_spread spread;
    bool exact, sync;
    unsigned low; /* 0: no garbage collection */
    uint64_t negative_ms, deadline_ms, collect_ms, touch_ms;
    uint32_t n;
    struct share_root_spec {
        const struct share_backend_ops *ops;
        const char *target; /* not kept */
        unsigned depth;
        uint64_t capacity_bytes;
        bool read_only;
    } roots[SHARE_MAX_ROOTS];
};

struct gc;
struct share {
    struct share_settings settings;
    uint32_t n;
    struct share_root *roots[SHARE_MAX_ROOTS];
    struct gc *gcs[SHARE_MAX_ROOTS];
    bool stopped;
    uint64_t seed;
    struct answer_cache answers;
    struct list lookups; /* of lookup.c: not told yet */
    struct list purges;  /* of gc_purge.h */
    uint32_t n_lookups;
    void (*ready_cb)(void *ctx);
    void *ready_ctx;
};

/* Roots by the place in share->roots; a set of them is a mask. */
typedef uint32_t share_roots_mask;

/* share.c */
int share_new(const struct share_settings *settings, struct share **out);

/* share_policy.c */

/* What answers about a part are remembered by. */
uint64_t share_tag(const struct share *s, const struct block_file_id *id, uint32_t root);
/* That it is there is not remembered while a namespace is purged. */
void share_remember(struct share *s, const struct block_file_id *id, uint32_t root, bool found,
                    uint64_t for_ms);
enum share_known { SHARE_KNOWN_NOT, SHARE_KNOWN_FOUND, SHARE_KNOWN_MISSING };
enum share_known share_recall(const struct share *s, const struct block_file_id *id, uint32_t root);
/* Which of `asked` could have it. */
share_roots_mask share_holders(const struct share *s, const struct block_file_id *id,
                               share_roots_mask asked);
/* The roots that a new part may go to, best first. The number of them. */
uint32_t share_takers(struct share *s, const struct block_file_id *id,
                      uint8_t out[SHARE_MAX_ROOTS]);

/* share_io.c */

/* Best effort, in the background: REMOVE or TOUCH. 0 or -errno of the root. */
int share_submit_background(struct share *s, uint32_t root, enum share_verb verb,
                            const struct block_file_id *id, uint64_t bytes);

#endif
