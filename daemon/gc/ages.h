/* Bytes of a root by the age of their files, and which files go to bring the root to a target. Pure
 * functions, any thread.
 *
 * Files are counted in cells. A cell is a class of ages and, within that, one of GC_GROUPS groups
 * of keys: in a root that was filled in one go all files are of one class, and the groups still say
 * which of them go. All parts of a block are in one group. Hosts that count the same files find the
 * same cut. 256 KiB, however many files there are. */
#ifndef UCMD_GC_AGES_H
#define UCMD_GC_AGES_H

#include <stddef.h>
#include <stdint.h>

#define GC_AGES 1024u
#define GC_GROUPS 32u
#define GC_CELLS (GC_AGES * GC_GROUPS)
/* The first class holds all ages below this (4.6 minutes); its files never go. From there on each
 * doubling of the age has 64 classes, up to 208 days; the last class holds all beyond. */
#define GC_AGE_LEAST_NS (1ull << 38)
/* A time further ahead of the server's clock than this says nothing about the file, which then
 * counts as the oldest: no reader would set its time, so it would stay for ever. */
#define GC_AGE_AHEAD_NS (3600ull * 1000000000u)

struct gc_ages {
    uint64_t bytes[GC_CELLS];
};

/* The age of a file, both times by the server's clock. */
uint64_t gc_age(uint64_t now_ns, uint64_t mtime_ns);
/* The cell of a file; a larger number goes first. `key`: n bytes that all parts of its block
 * share. */
uint32_t gc_cell(uint64_t age_ns, const void *key, size_t n);
/* Files of the returned cell and above hold `bytes` between them, or as many as may go; without
 * that cell they hold less. GC_CELLS: no file may go. */
uint32_t gc_ages_cut(const struct gc_ages *a, uint64_t bytes);

#endif
