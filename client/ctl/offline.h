/* verify --offline: walks the files of the NVMe tier without a daemon (cmd_offline.c) and repairs
 * them when asked to (cmd_salvage.c). Without --salvage nothing is written. The format is
 * daemon/format's. */
#ifndef UCM_CTL_OFFLINE_H
#define UCM_CTL_OFFLINE_H

#include "daemon/format/nvme_read.h"

#define SEGMENTS_MAX (1ull << 32)
#define PATH_BYTES 4096u

/* A namespace of which there is a record, or a part. */
struct space {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    char model[UCM_MAX_NAME_BYTES + 1]; /* empty: not known */
    bool named;
    uint64_t from_sequence, parts, bytes, corrupt, purged;
};

struct offline {
    char file[PATH_BYTES];
    char directory[PATH_BYTES]; /* of what belongs to it; empty: not known */
    int fd;
    bool as_it_is, device; /* an entry that is not a directory; a block device */
    bool salvage, lift;
    uint64_t size;
    struct nvme_super super;
    struct nvme_state state; /* the copy that counts; zeros: none does */
    struct nvme_copies states, quarantines;
    struct space *space;
    uint32_t spaces;
    uint8_t *payload;
    /* Found. */
    uint64_t segments, empty, live, encrypted, bytes, corrupt_headers, corrupt_payloads, misplaced,
        stale;
    uint64_t unreadable, cut, corrupt_spaces, index_spans, quarantined;
    bool index_damaged, index_there, short_file;
    /* Done. */
    uint64_t dropped, rebuilt, emptied, pages_written, spaces_kept, lifted;
    bool index_removed, spaces_rewritten, grown;
    int error;          /* -errno of the first repair that failed, or of the read of `unread` */
    const char *unread; /* a file next to the cache file that could not be read whole, or NULL */
    const char *halt;   /* why the walk ended before the end, or NULL: it did not */
};

/* Header of a segment in the file. */
static inline uint64_t offline_segment_at(const struct offline *o, uint32_t number)
{
    return o->super.data_offset + number * o->super.segment_bytes;
}

/* ---- offline_file.c ---- */

/* Opens a file or device to change it: locked, and not mounted. Waits a few seconds for a daemon
 * that was killed. A descriptor, or -errno; -EWOULDBLOCK, -EBUSY: somebody has it. */
int offline_take(const char *path, bool device);
/* state: the daemon's nvme.state, for an entry that is not a directory; may be NULL. An exit status;
 * after it offline_close, whatever it was. */
int offline_open(struct offline *o, const char *path, const char *state);
void offline_close(struct offline *o);
/* A path in the directory. */
void offline_path(const struct offline *o, const char *name, char out[PATH_BYTES]);

/* ---- cmd_salvage.c: each does nothing unless `salvage` ---- */

/* The record whose header lies at `at` is none any more. */
void salvage_record(struct offline *o, uint64_t at);
/* The segment's header does not pass: makes it from its first records, where they show how it was.
 * Whether it did, and the header. */
bool salvage_segment(struct offline *o, uint32_t number, struct nvme_segment_header *out);
/* After all has been seen: state pages, quarantine, length, ucmd.namespaces, ucmd.index. After a
 * walk that ended early only what the repairs so far need. */
void salvage_rest(struct offline *o);

#endif
