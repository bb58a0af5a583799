/* Namespace records: the namespaces whose parts lie in the files of a tier, since a record's header
 * has the fingerprint only. Each directory has a copy, ucmd.namespaces, with one page a record.
 *
 * Promises:
 * - Every later start finds what ns_records_write has written, whatever dies in between.
 * - Records are appended; a torn or damaged one is skipped.
 * - When most of a file is of no use any more, a new file is written next to it and
 *   renamed when it is whole.
 * - A secret that was replaced, as a purge does it, is overwritten in every file that has it, also
 *   in one that is being left behind by a rewrite. What a killed daemon did not come to, the next
 *   start does.
 * - A file that somebody removed or cut is rewritten, too: the records are in memory.
 *
 * Threads: ns_records_write and ns_records_restore in one thread at a time, away from the event
 * loop. Meanwhile the event loop may call ns_records_find and ns_records_forget, and any thread
 * ns_records_removed; the rest only when neither of the two runs. */
#ifndef UCMD_TIER_NS_RECORDS_H
#define UCMD_TIER_NS_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ns_file {
    char *directory, *path;
    uint64_t pages;      /* where the next record goes */
    uint64_t check_at;   /* from so many pages on it may be worth rewriting */
    bool rewrite;        /* by the next ns_records_write */
    bool linked;         /* its name is on stable storage */
    _Atomic int trouble; /* -errno: it could not be read, or the last record not be written; or 0 */
};

struct ns_records {
    struct ns_file *files;
    unsigned n_files;
    uint64_t damaged;         /* records that were skipped */
    struct ns_entry **record; /* by fingerprint */
    uint32_t count, cap;
    bool unsynced; /* what was found is not known to be on the disk */
    bool unread;   /* a file could not be read: there may be others */
};

/* directories[i] NULL: a device that is not there. A file that can't be read is logged and left
 * out. 0 or -ENOMEM. */
int ns_records_open(struct ns_records *n, const char *const *directories, unsigned count);
void ns_records_close(struct ns_records *n);

const struct nvme_ns_record *ns_records_find(const struct ns_records *n,
                                             const uint8_t *fingerprint);
/* A later start would skip a record with this sequence. */
bool ns_records_purged(const struct ns_records *n, const uint8_t *fingerprint, uint64_t sequence);
/* i: below count; in the fingerprints' order. */
const struct nvme_ns_record *ns_records_at(const struct ns_records *n, uint32_t i);
/* In memory: adds the record, or raises from_sequence of the one that is there. 0 or -ENOMEM. */
int ns_records_set(struct ns_records *n, const struct nvme_ns_record *r);
/* In memory, of a namespace that has a record: the secret of its keys from now on. */
void ns_records_secret(struct ns_records *n, const uint8_t *fingerprint, const uint8_t secret[16]);
/* In memory, of a namespace that has a record: records of it wait on the disk for a key, so it is
 * wanted until it is purged. */
void ns_records_keep(struct ns_records *n, const uint8_t *fingerprint);
/* In memory, of a namespace that has a record: parts before this sequence are purged. */
void ns_records_forget(struct ns_records *n, const uint8_t *fingerprint, uint64_t from_sequence);

/* The highest from_sequence of all. */
uint64_t ns_records_last_sequence(const struct ns_records *n);

/* A file has grown so long that ns_records_prune is due. */
bool ns_records_crowded(const struct ns_records *n);
/* Drops records that are neither wanted nor kept from memory, and marks files that hold more than
 * twice of what is left to be rewritten. */
void ns_records_prune(struct ns_records *n, bool (*wanted)(void *ctx, const uint8_t *fingerprint),
                      void *ctx);
/* `count` records, each of another namespace, to stable storage in every directory with one sync,
 * and then former secrets of these namespaces are overwritten there; blocks. 0, or -errno when a
 * directory has failed. *any: a directory has all of them, and the next start will go by it. */
int ns_records_write(struct ns_records *n, const struct nvme_ns_record *const *r, unsigned count,
                     bool *any);
/* The file in this directory was removed, or there has been none yet. */
bool ns_records_removed(const struct ns_records *n, unsigned file);
/* Which file can't be read or written, and why; false: none. The event loop, also while a write
 * runs. */
bool ns_records_trouble(const struct ns_records *n, char *text, size_t bytes);
/* Rewrites files that were removed or cut, if there is any record; blocks. 0 or -errno, as
 * ns_records_write. */
int ns_records_restore(struct ns_records *n);

#endif
