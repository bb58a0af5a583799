/* The namespaces whose parts lie in the files of a tier: a record's header has the fingerprint only.
 * Each folder has a copy, ucmd.namespaces, of one page a record; docs/storage-format.md has it.
 *
 * Promise: what ns_records_write has written is found by every later start, whatever dies in between.
 * Records are appended; one that is torn or damaged is passed over. When most of a file is of no
 * use any more it is written anew beside and takes the old one's name when it is whole.
 * Threads: ns_records_write in one thread at a time, away from the loop; meanwhile the loop may call
 * ns_records_find and ns_records_forget, and the rest only when it does not run. */
#ifndef UCMD_TIER_NS_RECORDS_H
#define UCMD_TIER_NS_RECORDS_H

#include "daemon/format/nvme_read.h"

#include <stdbool.h>
#include <stdint.h>

struct ns_file {
    char *folder, *path;
    uint64_t pages;    /* where the next record goes */
    uint64_t check_at; /* from so many pages on it may be worth writing anew */
    bool rewrite;      /* by the next ns_records_write */
    bool linked;       /* a power failure leaves it under its name */
};

struct ns_records {
    struct ns_file *files;
    unsigned n_files;
    uint64_t damaged;               /* records that were passed over */
    struct nvme_ns_record **record; /* by fingerprint */
    uint32_t count, cap;
    bool unsynced; /* what was found is not known to be on the disk */
    bool unread;   /* a file could not be read: there may be others */
};

/* folders[i] NULL: a device that is not there. A file that can't be read is told in the log and
 * done without. 0 or -ENOMEM. */
int ns_records_open(struct ns_records *n, const char *const *folders, unsigned count);
void ns_records_close(struct ns_records *n);

const struct nvme_ns_record *ns_records_find(const struct ns_records *n,
                                             const uint8_t *fingerprint);
/* In memory: adds the record, or raises from_sequence of the one that is there. 0 or -ENOMEM. */
int ns_records_set(struct ns_records *n, const struct nvme_ns_record *r);
/* In memory, of a record that is there: records before this one are not to be found. */
void ns_records_forget(struct ns_records *n, const uint8_t *fingerprint, uint64_t from_sequence);

/* The highest from_sequence of all. */
uint64_t ns_records_last_sequence(const struct ns_records *n);

/* A file has grown so long that ns_records_prune is due. */
bool ns_records_crowded(const struct ns_records *n);
/* Drops what is not wanted from memory (wanted NULL: nothing) and has the files that hold more than
 * twice of what is left written anew. */
void ns_records_prune(struct ns_records *n, bool (*wanted)(void *ctx, const uint8_t *fingerprint),
                      void *ctx);
/* To stable storage in every folder; blocks. 0, or -errno when one of them has failed. */
int ns_records_write(struct ns_records *n, const struct nvme_ns_record *r);

#endif
