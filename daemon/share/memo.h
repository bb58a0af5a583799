/* What is remembered for a while of many things, in a table of fixed size: a tag, which is a hash
 * of 64 bits, to a small number. What finds no place takes that of the one that ends soonest.
 * Threads: its owner's. */
#ifndef UCMD_SHARE_MEMO_H
#define UCMD_SHARE_MEMO_H

#include <stdint.h>

struct memo_entry;
struct memo {
    struct memo_entry *entries;
    uint32_t sets;
};

/* `entries`: a power of two, at least 4. 0 or -ENOMEM. */
int memo_init(struct memo *m, uint32_t entries);
void memo_close(struct memo *m); /* one of zeroes too */
/* 1 to 255; 0: nothing is remembered. */
uint8_t memo_get(const struct memo *m, uint64_t tag, uint64_t now_ms);
void memo_put(struct memo *m, uint64_t tag, uint8_t value, uint64_t now_ms, uint64_t until_ms);
void memo_forget(struct memo *m, uint64_t tag);

#endif
