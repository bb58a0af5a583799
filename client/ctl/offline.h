/* verify --offline: the files of the NVMe tier, walked without a daemon (cmd_offline.c) and, when
 * asked to, repaired (cmd_salvage.c). Made from docs/storage-format.md alone, so that it checks the
 * daemon and the text. Without --salvage nothing is written. */
#ifndef UCM_CTL_OFFLINE_H
#define UCM_CTL_OFFLINE_H

#include "proto/limits.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PAGE 4096u
#define STATE_AT(copy) (PAGE * (1u + (copy)))
#define QUARANTINE_AT(copy) (PAGE * (3u + (copy)))
#define FORMAT_VERSION 1u
#define SEGMENTS_MAX (1ull << 32)

struct space {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    char model[UCM_MAX_NAME_BYTES + 1]; /* empty: not known */
    bool named;
    uint64_t from_sequence, parts, bytes, corrupt, purged;
};

#define PATH_BYTES 4096u

struct offline {
    char file[PATH_BYTES];
    char folder[PATH_BYTES]; /* of what belongs to it; empty: not known */
    int fd;
    bool as_it_is, device; /* an entry that is no folder; a block device */
    bool salvage, lift;
    uint64_t size, segment_bytes, data_offset;
    uint8_t uuid[16];
    struct space *space;
    uint32_t spaces;
    uint8_t *payload;
    uint64_t epoch, state_segments; /* of the state page that counts; 0: none does */
    bool state_damaged; /* one of them, perhaps the newer: the segments tell the epoch */
    /* Found. */
    uint64_t segments, empty, live, bytes, corrupt_headers, corrupt_payloads, foreign, stale;
    uint64_t unreadable, cut, corrupt_records, corrupt_names, index_records, quarantined;
    bool index_damaged, index_there, short_file;
    /* Done. */
    uint64_t dropped, rebuilt, emptied, pages_written, names_kept, lifted;
    bool index_removed, names_rewritten, grown;
    int error; /* errno of the first repair that failed */
};

enum page_kind { PAGE_NONE, PAGE_DAMAGED, PAGE_GOOD };

uint32_t offline_u32(const uint8_t *p);
uint64_t offline_u64(const uint8_t *p);
bool offline_read(int fd, void *p, size_t n, uint64_t at);
/* Magic, version and checksum of a header page; what else must hold is the caller's. */
enum page_kind offline_page_kind(const uint8_t *page, const char *magic);

/* ---- offline_file.c ---- */

/* state: the daemon's nvme.state, for an entry that is no folder; may be NULL. An exit code; after
 * it offline_close, whatever it was. */
int offline_open(struct offline *o, const char *path, const char *state);
void offline_close(struct offline *o);
/* A path in the folder. */
void offline_path(const struct offline *o, const char *name, char out[PATH_BYTES]);

/* ---- cmd_salvage.c: each does nothing unless `salvage` ---- */

/* The slot whose header lies at `at` is none any more. */
void salvage_slot(struct offline *o, uint64_t at);
/* The segment's header does not pass: made again from its first slots where they tell how it was.
 * Whether it was, and its page. */
bool salvage_segment(struct offline *o, uint32_t number, uint8_t page[PAGE]);
/* After all has been seen. */
void salvage_state(struct offline *o);
void salvage_names(struct offline *o);
void salvage_index(struct offline *o);
void salvage_quarantine(struct offline *o);
void salvage_size(struct offline *o);
void salvage_sync(struct offline *o);

#endif
