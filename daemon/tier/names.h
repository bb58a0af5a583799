/* The namespaces whose parts lie in the files of a tier: a slot's header has the fingerprint only.
 * Each folder has a copy, ucmd.namespaces, of one page a record; docs/storage-format.md has it.
 *
 * Promise: what names_write has written is found by every later start, whatever dies in between.
 * Records are appended; one that is torn or damaged is passed over. When most of a file is of no
 * use any more it is written anew beside and takes the old one's name when it is whole.
 * Threads: names_write in one thread at a time, away from the loop; meanwhile the loop may call
 * names_find and names_forget, and the rest only when it does not run. */
#ifndef UCMD_TIER_NAMES_H
#define UCMD_TIER_NAMES_H

#include "daemon/tier/nvme_format.h"

#include <stdbool.h>
#include <stdint.h>

struct names_file {
    char *folder, *path;
    uint64_t pages;    /* where the next record goes */
    uint64_t check_at; /* from so many pages on it may be worth writing anew */
    bool rewrite;      /* by the next names_write */
    bool named;        /* a power failure leaves it under its name */
};

struct names {
    struct names_file *files;
    unsigned n_files;
    uint64_t damaged;        /* records that were passed over */
    struct nvme_name **name; /* by fingerprint */
    uint32_t count, cap;
    bool doubtful; /* what was found is not known to be on the disk */
    bool unread;   /* a file could not be read: there may be others */
};

/* folders[i] NULL: a device that is not there. A file that can't be read is told in the log and
 * done without. 0 or -ENOMEM. */
int names_open(struct names *n, const char *const *folders, unsigned count);
void names_close(struct names *n);

const struct nvme_name *names_find(const struct names *n, const uint8_t *fingerprint);
/* In memory: adds the record, or raises from_sequence of the one that is there. 0 or -ENOMEM. */
int names_set(struct names *n, const struct nvme_name *name);
/* In memory, of a record that is there: slots before this one are not to be found. */
void names_forget(struct names *n, const uint8_t *fingerprint, uint64_t from_sequence);

/* The highest from_sequence of all. */
uint64_t names_last_sequence(const struct names *n);

/* A file has grown so long that names_prune is due. */
bool names_crowded(const struct names *n);
/* Drops what is not wanted from memory (wanted NULL: nothing) and has the files that hold more than
 * twice of what is left written anew. */
void names_prune(struct names *n, bool (*wanted)(void *ctx, const uint8_t *fingerprint), void *ctx);
/* To stable storage in every folder; blocks. 0, or -errno when one of them has failed. */
int names_write(struct names *n, const struct nvme_name *name);

#endif
