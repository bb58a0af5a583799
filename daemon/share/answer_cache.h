/* What is remembered for a while of many things, in a table of fixed size: a tag, which is a hash
 * of 64 bits, to a small number. What finds no place takes that of the one that ends soonest.
 * Threads: its owner's. */
#ifndef UCMD_SHARE_ANSWER_CACHE_H
#define UCMD_SHARE_ANSWER_CACHE_H

#include <stdint.h>

struct answer_cache_entry;
struct answer_cache {
    struct answer_cache_entry *entries;
    uint32_t sets;
};

/* `entries`: a power of two, at least 4. 0 or -ENOMEM. */
int answer_cache_init(struct answer_cache *m, uint32_t entries);
void answer_cache_close(struct answer_cache *m); /* one of zeroes too */
/* 1 to 255; 0: nothing is remembered. */
uint8_t answer_cache_get(const struct answer_cache *m, uint64_t tag, uint64_t now_ms);
void answer_cache_put(struct answer_cache *m, uint64_t tag, uint8_t value, uint64_t now_ms,
                      uint64_t until_ms);
void answer_cache_forget(struct answer_cache *m, uint64_t tag);

#endif
