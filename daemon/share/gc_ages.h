/* Bytes by age, and the age beyond which files go so that a root is brought to what it may hold:
 * pure functions, any thread. Takes 8 KiB, however many files there are.
 *
 * Promise: files that are counted here and are at least as old as what gc_ages_cut says have at
 * least the bytes that were asked for between them, and at most one class more; hosts that count
 * the same files find ages of the same class. Files of the youngest class are never told to go. */
#ifndef UCMD_SHARE_GC_AGES_H
#define UCMD_SHARE_GC_AGES_H

#include <stdint.h>

#define GC_AGES 1024u
/* The first class is all that is younger than this (4.6 minutes); from there on 64 classes to each
 * doubling of the age, up to 208 days, and the last one is all beyond. */
#define GC_AGE_LEAST_NS (1ull << 38)
/* A time that is further ahead of the server's clock than this says nothing about the file, which
 * then counts as the oldest: its reader would not set the time either, so it would stay for ever.
 */
#define GC_AGE_AHEAD_NS (3600ull * 1000000000u)
#define GC_AGE_NEVER UINT64_MAX

/* With `width_ns` the classes are equal parts of what lies from `from_ns` to `to_ns` instead. */
struct gc_ages {
    uint64_t bytes[GC_AGES];
    uint64_t from_ns, to_ns, width_ns;
};
struct gc_cut {
    uint64_t age_ns; /* files of this age and older go; GC_AGE_NEVER: none */
    uint64_t need;   /* bytes of the youngest class that goes which are needed, ... */
    uint64_t over;   /* ... and which are not */
};

void gc_ages_init(struct gc_ages *a);
/* To look closer at one class of `coarse`: that which begins at age_ns, a result of gc_ages_cut. */
void gc_ages_init_within(struct gc_ages *a, uint64_t age_ns);
void gc_ages_add(struct gc_ages *a, uint64_t age_ns, uint64_t bytes);
/* The age from which on there are `bytes`, or as many as there are. */
struct gc_cut gc_ages_cut(const struct gc_ages *a, uint64_t bytes);

/* Of a file by the server's clock. */
uint64_t gc_age(uint64_t now_ns, uint64_t mtime_ns);

#endif
