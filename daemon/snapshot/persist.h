/* The persistent arena (config key arena.persist_dir): a directory on a tmpfs or hugetlbfs, which
 * are memory, whose files survive a planned restart of the daemon. It holds two files:
 * - `ucmd.arena`, the file that the arena maps;
 * - `ucmd.kept`, the snapshot: a list of the parts in it. The snapshot exists only after an orderly
 *   stop and until the next start. format.h has its format.
 *
 * Promises:
 * - One process at a time has the directory: it holds a lock, which ends with the process.
 * - A snapshot is whole, and is used at most once: persist_take removes it before anything in the
 *   arena may change, so a run that was killed leaves none.
 * - A file that no later start can use is removed.
 *
 * Thread: the event loop's, before the event loop runs and after it has ended. The calls block for
 * as long as memory takes. */
#ifndef UCMD_SNAPSHOT_PERSIST_H
#define UCMD_SNAPSHOT_PERSIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct persist;

/* The arena that a snapshot belongs to: this boot, this file, this size. */
struct persist_identity {
    uint8_t boot[16];
    uint64_t inode, bytes;
};

#define PERSIST_WHY_BYTES 400
/* Takes the lock; waits some seconds for another daemon that is ending. 0, or -errno with a
 * sentence in `why`. */
int persist_open(const char *directory, struct persist **out, char why[PERSIST_WHY_BYTES]);
/* Call it after the arena is unmapped; NULL-safe. Removes the arena's file, unless persist_commit
 * succeeded, or neither persist_take nor persist_reset was called (the next start may use it). */
void persist_close(struct persist *k);

/* The snapshot of the run before, valid until persist_forget; NULL: there is none. */
const uint8_t *persist_snapshot(const struct persist *k, size_t *n);
/* The identity of the arena's current file. */
struct persist_identity persist_identity(const struct persist *k);
/* Before the arena's file is used: removes the snapshot's file. 0; or -errno, and the arena's file
 * must not be used. */
int persist_take(struct persist *k);
void persist_forget(struct persist *k);
/* Instead of persist_take: a new arena file, all zero. 0 or -errno. */
int persist_reset(struct persist *k, uint64_t bytes);
int persist_fd(const struct persist *k); /* the arena's file */
/* The next start will not find the arena's file: somebody removed it. */
bool persist_removed(const struct persist *k);

/* A new snapshot: n zeroed bytes, which the caller fills in before persist_commit. 0 or -errno. */
int persist_create(struct persist *k, size_t n, uint8_t **out);
int persist_commit(struct persist *k);

#endif
