/* The folder that keeps DRAM over a planned restart (arena.keep): on a tmpfs or hugetlbfs, which
 * are memory. In it `ucmd.arena`, the file that the arena maps, and, while no daemon runs and only
 * after an orderly stop, `ucmd.kept`, the manifest of what lies in it; docs/storage-format.md has
 * it.
 *
 * Promise: one process at a time has the folder (a lock on it, gone with the process). A manifest
 * is found whole or not at all, at most once: keep_take removes it before anything may be changed
 * in the arena, so that a run that was killed leaves none. What is not taken is removed. Threads:
 * the loop only, before it runs and when it ends; calls block for as long as memory takes.
 */
#ifndef UCMD_ARENA_KEEP_H
#define UCMD_ARENA_KEEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct keep;

/* What a manifest belongs to: another boot, another file or another size is another arena. */
struct keep_identity {
    uint8_t boot[16];
    uint64_t inode, bytes;
};

/* Takes the lock; waits some seconds for a predecessor that is still ending. 0, or -errno with a
 * sentence in why. */
#define KEEP_WHY_BYTES 400
int keep_open(const char *folder, struct keep **out, char why[KEEP_WHY_BYTES]);
/* NULL-safe. The arena must be unmapped. Its file goes unless keep_commit succeeded, or neither
 * keep_take nor keep_reset was called: then all is left for another try. */
void keep_close(struct keep *k);

/* The manifest of the run before; NULL: there is none. */
const uint8_t *keep_manifest(const struct keep *k, size_t *n);
/* Of the arena's file as it lies there. */
struct keep_identity keep_identity(const struct keep *k);
/* The arena is going to be used: the manifest, if there is one, is removed. Its bytes stay until
 * keep_forget. 0, or -errno: the arena must not be used. */
int keep_take(struct keep *k);
void keep_forget(struct keep *k);
/* Nothing of the run before is to be used: a new file, all zero. */
int keep_reset(struct keep *k, uint64_t bytes);
int keep_fd(const struct keep *k);

/* A new manifest of n bytes, all zero, to be filled; then given its name. 0 or -errno. */
int keep_create(struct keep *k, size_t n, uint8_t **out);
int keep_commit(struct keep *k);

#endif
