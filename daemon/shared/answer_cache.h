/* Answers of the last seconds in a table of fixed size: from a tag, which is a hash of 64 bits, to
 * a small number, until a time. A new answer that finds no free entry replaces the one that ends
 * soonest.
 * Thread: its owner's. */
#ifndef UCMD_SHARED_ANSWER_CACHE_H
#define UCMD_SHARED_ANSWER_CACHE_H

#include <stdint.h>

struct answer_cache {
    struct answer_cache_entry *entries;
    uint32_t sets;
};

/* `entries`: a power of two, at least 4. 0 or -ENOMEM. */
int answer_cache_init(struct answer_cache *m, uint32_t entries);
void answer_cache_close(struct answer_cache *m); /* zeroes are fine */
/* 1 to 255; 0: no answer. */
uint8_t answer_cache_get(const struct answer_cache *m, uint64_t tag, uint64_t now_ms);
void answer_cache_put(struct answer_cache *m, uint64_t tag, uint8_t value, uint64_t now_ms,
                      uint64_t until_ms);
void answer_cache_forget(struct answer_cache *m, uint64_t tag);

#endif
