/* Inside of the NVMe tier: what its files share. Nobody else includes it, but what features add:
 * daemon/encryption/nvme_encryption.c, daemon/block_pool/nvme_layers.c, daemon/scrub and
 * daemon/checkpoint.
 *
 * A read:  submit -> its file's queue -> engine -> checksum -> done
 * A write: submit -> checksum -> summed -> a record; with its neighbours one engine operation ->
 * done
 *
 * Reads wait by priority until their file's depth allows them; writes take what reads leave, but
 * each file may always have one under way. A disk makes a read wait for the writes that it already
 * has. So after a small request's read, its file has few writes under way for a while.
 *
 * An operation is tried three times, the last time by the threads, in case the ring is at fault. */
#ifndef UCMD_TIER_NVME_H
#define UCMD_TIER_NVME_H

#include "daemon/config/config.h"
#include "daemon/format/nvme_read.h"
#include "daemon/tier/checksum_pool.h"
#include "daemon/tier/engine.h"
#include "daemon/tier/ns_records.h"
#include "daemon/tier/nvme_file.h"
#include "daemon/tier/segment.h"
#include "daemon/tier/tier.h"
#include "proto/backoff.h"

#define NVME_PRIORITIES 16
#define NVME_READS_QUEUED_MAX 65536u
/* Reads under way at a file while several tenants read: what is under way is in nobody's order, so
 * a tenant that comes waits for it. So many bytes, but NVME_FAIR_READS at least: with a quarter of
 * it a virtual disk lost at least half of its speed, as each read also waits for an iteration of
 * the event loop. It holds for NVME_FAIR_WINDOW bytes of one tenant alone. */
#define NVME_FAIR_BYTES (4u << 20)
#define NVME_FAIR_READS 4u
#define NVME_FAIR_WINDOW (1ull << 30)
#define NVME_BURST_BYTES (2ull << 20) /* see base/fair.h */
#define NVME_WRITES_MAX 8u            /* under way a file */
#define NVME_MERGE_IOS 8u             /* parts in one write */
#define NVME_MERGE_BYTES (4u << 20)
/* The next writes to a file after a read of a small request, and the bounds that they have: low
 * enough for such a read to take at most three times as long as on an idle disk. */
#define NVME_NARROW_WRITES 2048u
#define NVME_NARROW_WRITES_MAX 2u
#define NVME_NARROW_MERGE_BYTES (256u << 10)
#define NVME_SYNC_CHECKS 4u /* of parts of an earlier run, a file */
#define NVME_SCANS 128u     /* headers read at a time by recovery */
#define NVME_IOVECS (1 + 2 * NVME_MERGE_IOS)
_Static_assert(NVME_IOVECS <= ENGINE_IOVECS, "an operation of the engine takes them");
#define NVME_HEADERS_BYTES ((size_t)NVME_PAGE * (1 + NVME_MERGE_IOS))

/* Work for libuv's pool. The tier is held until done has returned. */
struct nvme_job {
    uv_work_t work;
    struct tier *tier;
    void (*run_cb)(struct nvme_job *job);  /* in the pool; NULL: nothing is to be done there */
    void (*done_cb)(struct nvme_job *job); /* on the event loop */
};

/* A file's list of segments in quarantine, and its health checks, which write that list. */
struct nvme_health {
    struct nvme_quarantine list, stored; /* stored: what is being written */
    unsigned next;                       /* copy to write next */
    bool busy, due;
    bool waiting, checking; /* for the next health check; one is under way */
    struct backoff retry;   /* reset by a write that succeeds */
    int status;
    struct nvme_job job;
};

/* At the files, whether they are what they were, while nobody syncs them. */
struct nvme_look {
    struct nvme_job job;
    struct tier_ns_record restore;
    bool busy;
    bool ns_removed; /* a file of namespaces */
};

struct nvme_device {
    struct nvme_file file; /* fd < 0: could not be opened */
    struct fair_queue reads;
    struct list idle_reads;                    /* begin when no other waits */
    unsigned reads_waiting, in_flight, writes; /* in_flight: writes included */
    uint64_t reading;                          /* bytes of reads under way */
    unsigned narrow_writes;  /* how many of the next writes go under the narrow bounds */
    unsigned write_failures; /* in a row */
    bool degraded;
    bool lost; /* removed or cut while in use */
    /* The run before wrote after its last checkpoint, and did not stop in an orderly way. */
    bool went_on;
    int looked; /* by the last look: 0, or what nvme_file_intact said */
    char reason[TIER_REASON_BYTES];
    struct tier *tier;
    /* TIER_SYNC operations, by tier_io.link: those that wait for a check of an earlier run's part,
     * for the next sync, and for the running sync. */
    struct list unchecked, unsynced, syncing;
    unsigned sync_checks; /* under way */
    bool sync_busy;
    int sync_status;
    struct nvme_job sync_job;
    bool ns_removed; /* the sync found that the file of namespaces is gone */
    struct tier_ns_record ns_restore;
    uv_mutex_t sync_lock;
    _Atomic uint32_t syncs_failed;
    _Atomic int sync_error; /* the last one's */
    uint32_t syncs_failed_seen;
    struct nvme_health health;
};

/* tier_io.scratch while the operation is ours */
enum {
    NVME_IO_SEGMENT,
    NVME_IO_RECORD,
    NVME_IO_SEQUENCE,
    NVME_IO_MOVED,
    NVME_IO_IDLE,
    NVME_IO_SUMS,     /* of a write, or a read that is to be moved: checksums of layers, or NULL */
    NVME_IO_TO_BEGIN, /* TIER_READ_LAYERS: engine operations */
    NVME_IO_TO_END,
    NVME_IO_KNOWN,    /* TIER_READ_LAYERS: the header is not read */
    NVME_IO_STATUS,   /* TIER_READ_LAYERS: 0, or errno of one that failed */
    NVME_IO_ENCRYPTED /* of an encrypted record: struct nvme_encrypted; else NULL */
};

/* One engine operation; in a pool of free ones otherwise. */
struct nvme_op {
    struct engine_op e;
    struct list link; /* in the pool; recovery's, while they read, in its `reading` */
    struct tier *tier;
    void (*finish_cb)(struct nvme_op *op, int status); /* 0: all bytes were moved; or -errno */
    struct segment *segment;
    uint32_t record; /* the first */
    uint64_t left;   /* bytes */
    uint64_t bytes;  /* of a read: all of it */
    unsigned attempts;
    bool ring_failed; /* an attempt of the ring did */
    int scanned;      /* of recovery: its status; SCAN_UNDER_WAY */
    uint8_t *headers; /* pages: of a write to be written, of recovery to be read */
    unsigned n;       /* parts of a write; a read has one */
    struct tier_io *ios[NVME_MERGE_IOS];
    struct iovec iov[NVME_IOVECS];
};

struct nvme_recovery {
    enum {
        RECOVERY_DONE,
        RECOVERY_HEADERS,
        RECOVERY_CHECKPOINT,
        RECOVERY_RECORDS,
        RECOVERY_DUPLICATES
    } state;
    struct nvme_restore *restore; /* daemon/checkpoint: the checkpoint that is being read */
    struct nvme_op *ops;
    uint8_t *pages;
    struct list pool;
    struct list reading;           /* in the order of the cursor */
    uint32_t file, number, record; /* the cursor */
    uint32_t numbers;              /* segments of the longest file */
    uint64_t before;               /* sequences of earlier runs are below this */
    struct list duplicates;        /* found twice, to be compared */
    unsigned duplicates_n, duplicate_reads;
    uint64_t segments, segments_done, refused;
    uint64_t plaintext; /* refused: in the clear, of tenants with keys */
    uint64_t start_ms, progress_ms;
};

#define NVME_NS_BATCH 32u
/* One item of the batch under way: the request, the record that it makes, and the result. */
struct nvme_ns_one {
    struct tier_ns_record *asked;
    struct nvme_ns_record record;
    int status;
};
struct nvme_ns_writer {
    struct tier *tier;
    struct fair_queue queue; /* of tier_ns_record that wait */
    bool busy, any;          /* any: a directory has the records, whatever the status */
    int status;              /* of those that are written */
    struct nvme_job job;
    struct nvme_ns_one batch[NVME_NS_BATCH];
    const struct nvme_ns_record *writes[NVME_NS_BATCH]; /* of the batch: what is not there yet */
    unsigned n, n_writes;
};

/* What may be due in the next iteration of the event loop. Each iteration begins what writes it
 * may. */
enum {
    NVME_TURN_GATHERED =
        1, /* a write was pushed to the checksums: more may come before the flush */
    NVME_TURN_RECOVERY = 2,
    NVME_TURN_CHECKPOINT = 4,
    NVME_TURN_MOVE = 8,   /* the mover's segment has more live records to be dropped */
    NVME_TURN_BEGUN = 16, /* a write was: perhaps with the last free segment */
    NVME_TURN_SYNCS = 32, /* segments' headers were written */
};
/* live records that one iteration drops for segments to be reused */
#define NVME_ITERATION_DROPS 1024u
struct nvme_iteration {
    uv_idle_t idle; /* runs when something is due, or `parts` begins again */
    void (*run_cb)(struct tier *t, unsigned due);
    unsigned due;
    unsigned parts; /* of the writes begun in this iteration */
    unsigned drops; /* in this iteration */
};

/* A live record to be read and compared with what is known of it. */
struct nvme_check {
    uint64_t owner, bytes;
    uint32_t part;
    struct tier_place place;
    bool headers; /* and its header and its segment's, which are repaired, unsynced */
    bool idle;    /* after all other I/O of the host, and not counted as a read */
    /* status: 0 when all is right by now, or the record was forgotten meanwhile; -errno of the read
     * or the repair. */
    void (*done_cb)(struct tier *t, void *ctx, int status, bool bad_header);
    void *ctx;
};

struct nvme_scrub {
    struct tier *tier;
    uint64_t rate, interval_ms;
    /* The pass. */
    uint64_t begun_ms, due_ns, busy_since_ms;
    unsigned file, unreadable; /* file UINT_MAX: none is under way */
    uint32_t number, record;   /* the cursor */
    struct tier_described want;
    struct nvme_check check; /* of the record at the cursor */
};

struct nvme_mover {
    struct tier *tier;
    unsigned percent; /* of a segment's records that may be moved; 0: nothing is */
    /* That is being emptied; NULL: idle. Parts that left it may lie in another file, not synced. */
    struct segment *segment;
    uint32_t record;      /* the cursor */
    uint32_t left, moves; /* how many may still be moved because they were read, and of all */
    unsigned active;      /* operations under way */
    uint64_t bytes;       /* of their memory */
    struct list moved;    /* to be synced */
    bool unsynced;        /* some could not be */
    bool sparse;          /* all of it is moved */
    bool checking;
};

/* The checkpoint that is being written. */
struct nvme_checkpoint {
    struct tier *tier;
    struct nvme_job job;
    const char *suffix;
    int fd;
    unsigned file;
    uint32_t number, record; /* the cursor */
    uint64_t offset, size;
    uint64_t mark;   /* nvme_written_bytes when it was begun */
    uint8_t *buffer; /* NULL: none is being written */
    size_t n;
    bool last; /* of this file */
    int status;
};

/* Checksums of a part's layers, from a header that was read. They are counted as the daemon's
 * memory by config_check. */
#define NVME_KNOWN_BITS 14
#define NVME_KNOWN_BYTES CONFIG_NVME_SUMS_BYTES
struct nvme_known {
    uint64_t loc, checksum, bytes, layer_bytes;
    uint64_t *sums; /* NULL: none */
};

struct tier {
    uv_loop_t *loop;
    struct tier_callbacks callbacks;
    struct metrics *metrics;
    struct nvme_device *devices;
    unsigned files;
    uint64_t segment_bytes;
    struct segment_table segments;
    struct checksum_pool checksums;

    struct uring *ring;                             /* NULL when there is none */
    unsigned ring_depth, threads_depth, writes_max; /* a file */
    unsigned ring_faults; /* operations in a row that the threads could do and the ring could not */
    bool ring_off;

    struct nvme_op *read_ops, *write_ops;
    struct list read_pool, write_pool;
    uint8_t *headers; /* of the write_ops */

    struct nvme_known *known;         /* by their loc; NULL: none yet */
    uint64_t known_bytes, known_most; /* of their checksums */
    uint32_t known_next;              /* whose go next */

    struct list summed;                   /* writes that have their checksum */
    uint64_t backlog_bytes, backlog_max;  /* of accepted writes */
    unsigned reads_queued, writes_queued; /* not yet given to the engine */
    unsigned writes_in_flight, next_file; /* next_file: that the next write goes to */
    uint64_t record_sequence;
    struct ns_records ns_records;
    struct nvme_ns_writer ns_writer;
    struct nvme_recovery recovery;
    struct nvme_iteration iteration;
    unsigned quarantine_percent; /* of a file's segments: with more it takes no writes */
    uv_timer_t health_timer;
    struct nvme_look look;
    uv_timer_t look_timer;
    struct nvme_scrub scrub;
    uv_timer_t scrub_timer;
    struct nvme_mover mover;
    struct nvme_checkpoint checkpoint;
    uint64_t checkpoint_mark, checkpoint_size; /* of the last whole one */
    uv_timer_t checkpoint_timer;
    struct list to_encrypt;   /* writes that wait for memory to be encrypted into */
    uint64_t encrypted_bytes; /* of such memory in use */
    uint64_t tell_no_keys_ms; /* when the log may say so again */
    bool stalled;             /* no space until a write has ended */
    unsigned checks;          /* under way */
    unsigned held;            /* how often nvme_hold was called and not undone */
    bool closing;
    void (*free_cb)(struct tier *t); /* it closes, and nobody holds it any more */
    unsigned handles;                /* of the event loop that are still open */
};

static inline bool nvme_recovering(const struct tier *t)
{
    return t->recovery.state != RECOVERY_DONE;
}

/* Whether the segment was adopted, and this run has not opened it itself. */
static inline bool nvme_to_recover(const struct tier *t, const struct segment *s)
{
    return s->state == SEGMENT_CLOSED && s->sequence < t->recovery.before;
}

/* The files from the lowest to the highest: each calls those above it here, and no other.
 * nvme.c calls all. */

/* ---- nvme_iteration.c ---- */

/* A function that runs a callback and then goes on holds the tier, as the callback may close it. */
void nvme_hold(struct tier *t);
void nvme_release(struct tier *t);
void nvme_job_start(struct tier *t, struct nvme_job *job, void (*run_cb)(struct nvme_job *job),
                    void (*done_cb)(struct nvme_job *job));
/* what: of NVME_TURN_. */
void nvme_iteration_want(struct tier *t, unsigned what);
/* May this iteration of the event loop begin another write? Otherwise the next iteration pumps
 * them. */
bool nvme_iteration_may_write(struct tier *t);
/* A write of so many parts was begun. opened: with a segment of its own, so that others may have to
 * be emptied before the next write takes their space without asking: that waits for the next
 * iteration. */
void nvme_iteration_spend(struct tier *t, unsigned parts, bool opened);
/* So many live records were dropped of a segment. */
void nvme_iteration_dropped(struct tier *t, uint64_t records);
/* There may be space for what was stalled. */
void nvme_writes_go_on(struct tier *t);

/* ---- nvme_op.c ---- */

/* Whether io_uring is in use. */
bool nvme_ring_usable(const struct tier *t);
/* How many operations a file may have under way, reads and writes together, with the engine in
 * use. */
unsigned nvme_device_depth(const struct tier *t);
/* Moves what op->e.iov says, in three attempts, the last by the threads, and then calls
 * op->finish_cb, on the event loop. It changes op->e.iov and what that points to. */
void nvme_op_begin(struct nvme_op *op, unsigned file, uint64_t offset);
/* A warning: where the operation was when it failed. status: -errno. */
void nvme_op_log(const struct nvme_op *op, const char *event, int status);

/* ---- nvme_record.c ---- */

/* Whether records of such a part have checksums of its layers. */
static inline bool nvme_sums_kept(const struct tier_io *io)
{
    return io->bytes > CHECKSUM_SMALL && nvme_layers_fit(io->bytes, io->layer_bytes);
}

/* What the headers of a segment in use and of a record in it should say. */
void nvme_segment_header_of(const struct tier *t, const struct segment *s,
                            struct nvme_segment_header *out);
void nvme_record_header_of(const struct tier *t, const struct segment *s, uint32_t record,
                           const struct tier_described *d, struct nvme_record_header *out);

/* Is the header that was read the one of this part and this write of it, as the io and the index
 * know them? */
bool nvme_record_is(const struct tier *t, const struct tier_io *io,
                    const struct nvme_record_header *h);

/* What the index knows of a record; false: it is not live, or not known. */
bool nvme_describe(const struct tier *t, const struct segment *s, uint32_t record,
                   struct tier_described *out);
/* As tier_ops has it. */
void nvme_forget(struct tier *t, const struct tier_place *place, uint64_t bytes);

/* ---- daemon/encryption/nvme_encryption.c: on the event loop, except nvme_encrypted_sum ---- */

/* Does the namespace's tenant have keys? */
bool nvme_encryption_wanted(const struct tier *t, const uint8_t *fingerprint);
/* Has it no key yet, because that is being read? */
bool nvme_key_awaited(const struct tier *t, const uint8_t *fingerprint);
/* May a record of it in the clear be taken over? */
bool nvme_plaintext_allowed(const struct tier *t, const struct nvme_ns_record *r);
/* The io's record is encrypted, and one of the two begin succeeded. */
bool nvme_encrypted(const struct tier_io *io);
/* 0, -ENOKEY, -ENOMEM. The io has its sequence. */
int nvme_encrypted_write_begin(struct tier *t, struct tier_io *io);
/* The write, which has begun, goes to the pool, now or when there is memory. */
void nvme_encrypted_push(struct tier *t, struct tier_io *io);
/* There may be. */
void nvme_encrypted_pump(struct tier *t);
/* 0 or -EAGAIN. */
int nvme_encrypted_read_begin(struct tier_io *io);
/* For the pool, in place of nvme_sum: encrypts or opens. */
uint64_t nvme_encrypted_sum(const struct tier_io *io);
/* 0, or why encrypting failed. */
int nvme_encrypted_status(const struct tier_io *io);
/* What a write brings to storage. */
void *nvme_encrypted_data(const struct tier_io *io);
/* The record has its place: makes the page, and sets io->place. */
void nvme_encrypted_header(struct tier_io *io, struct nvme_record_header *placed,
                           uint8_t page[NVME_PAGE]);
/* Where a read of the whole record goes, from its header on. */
unsigned nvme_encrypted_read_next(const struct tier_io *io, struct iovec to[2]);
/* The page is there: 0; -EBADMSG: it is not the record's; -ESTALE: its namespace was purged;
 * -ENOKEY: the record stays, without its owner. */
int nvme_encrypted_arrived(struct tier *t, struct tier_io *io);
/* NULL-safe: of an io without one. */
void nvme_encrypted_drop(struct tier *t, struct tier_io *io);

/* ---- daemon/block_pool/nvme_layers.c ---- */

/* A read of layers: begin; next for each of its engine operations (false: there is another one);
 * arrived when one has ended (false: another one has not), with the read's status; verify with
 * nvme_sum's answer. */
void nvme_layers_begin(const struct tier *t, struct tier_io *io);
bool nvme_layers_next(struct tier_io *io, struct iovec *to, uint64_t *from);
bool nvme_layers_arrived(struct tier *t, struct tier_io *io, int *status);
int nvme_layers_verify(struct tier *t, struct tier_io *io, uint64_t wrong);
void nvme_known_close(struct tier *t);
/* For the pool of threads: how many of the layers differ from the header's checksums of them. */
uint64_t nvme_layers_wrong(const struct tier_io *io);

/* ---- nvme_sum.c ---- */

/* Memory for the checksums of layers that nvme_sum computes, and merge_add writes: of a write, or
 * of a read that becomes one. */
void nvme_sums_reserve(struct tier_io *io);
void nvme_sums_drop(struct tier_io *io);
/* For the pool: the payload's checksum; of TIER_READ_LAYERS how many layers are wrong. */
uint64_t nvme_sum(const struct tier_io *io);
uint64_t nvme_sum_bytes(const struct tier_io *io);

/* ---- nvme_ns_write.c ---- */

int nvme_ns_records_open(struct tier *t);
void nvme_ns_write(struct tier *t, struct tier_ns_record *asked);
/* Rewrites files of records that were removed; `done_cb` as for nvme_ns_write. */
void nvme_ns_restore(struct tier *t, struct tier_ns_record *asked);

/* ---- nvme_health.c ---- */

/* Syncs a file and looks whether it is intact, from any thread. Nothing else may sync it: the
 * kernel reports a failure once and then counts what it could not write as clean. */
int nvme_device_sync(struct nvme_device *d);
/* False after a failed sync: what lies in the file may not survive a power failure, whatever the
 * next sync says, and this run never calls it durable. */
bool nvme_sync_trusted(struct tier *t, struct nvme_device *d);
/* Applies the lists of segments in quarantine. */
void nvme_health_init(struct tier *t);
/* A write or a sync of the file failed, or a write did not. */
void nvme_write_failed(struct tier *t, unsigned file, int status);
void nvme_write_worked(struct tier *t, unsigned file);
/* The record does not hold what was written to it: its segment goes into quarantine. */
void nvme_quarantine_add(struct tier *t, struct segment *s, uint32_t record);

/* ---- daemon/checkpoint/nvme_checkpoint.c ---- */

#define PATH_BYTES 4352u

void nvme_checkpoint_go_on(struct tier *t);
void nvme_checkpoint_close(struct tier *t);
/* Something was written: a checkpoint may be due in a while. */
void nvme_checkpoint_later(struct tier *t);
/* Blocks until it is on stable storage. */
void nvme_checkpoint_last(struct tier *t);

/* ---- nvme_io.c ---- */

void nvme_read_finish(struct nvme_op *op, int status);
void nvme_write_finish(struct nvme_op *op, int status);
/* idle: after all other I/O of the host, and not counted. */
int nvme_read(struct tier *t, struct tier_io *io, bool idle);
int nvme_write(struct tier *t, struct tier_io *io);
/* Writes a part that the mover has read: it keeps its sequence, and its checksum where it is not
 * encrypted. The caller pumps the writes. 0, or what nvme_encrypted_write_begin says. */
int nvme_write_moved(struct tier *t, struct tier_io *io, uint64_t sequence);
/* Begins writes that are summed, as far as the files and this iteration of the event loop allow. */
void nvme_pump_writes(struct tier *t);
void nvme_checksum_done(void *ctx, struct tier_io **ios, const uint64_t *sums, unsigned n);

/* ---- nvme_check.c ---- */

/* 0: done will be called, on the event loop and not from inside. -EAGAIN, -ESTALE, -ENOMEM. */
int nvme_check(struct tier *t, const struct nvme_check *asked);

/* ---- nvme_sync.c ---- */

int nvme_sync_part(struct tier *t, struct tier_io *io);
/* A segment's header has been written, or could not be. */
void nvme_sync_pump(struct tier *t, struct nvme_device *d);

/* ---- nvme_move.c ---- */

/* A write has begun, perhaps with the last free segment: others have to be emptied, and what they
 * hold goes after that write. */
void nvme_move_check(struct tier *t);
/* In the next iteration. The caller pumps the writes. */
void nvme_move_go_on(struct tier *t);

/* ---- daemon/scrub/nvme_scrub.c ---- */

/* rate: bytes a second; 0: none. */
void nvme_scrub_start(struct tier *t, uint64_t rate, uint64_t interval_ms);

/* ---- nvme_duplicates.c ---- */

/* Recovery has found a record: offers it, and notes it where its part is known already. */
void nvme_record_found(struct tier *t, struct segment *s, uint32_t record,
                       const struct nvme_record_header *h);
/* False: all have been compared. */
bool nvme_duplicates_go_on(struct tier *t);
void nvme_duplicates_drop(struct tier *t);

/* ---- daemon/checkpoint/nvme_restore.c ---- */

/* Begins to read the checkpoints. False: there is none, or no memory for it. */
bool nvme_restore_start(struct tier *t);
/* In a later iteration. False: all that they have is taken over. */
bool nvme_restore_go_on(struct tier *t);
void nvme_restore_close(struct tier *t);

/* ---- nvme_recover.c ---- */

/* 0 or -ENOMEM; then nvme_recover_close. */
int nvme_recover_open(struct tier *t);
/* Begins in the background. */
void nvme_recover_start(struct tier *t);
void nvme_recover_close(struct tier *t);
/* In the next iteration. */
void nvme_recover_go_on(struct tier *t);

#endif
