/* A disk with a volatile cache beneath a real daemon, and its power failing.
 *
 * volatile_disk.so is preloaded into the daemon. It sees what the daemon does to the files of some
 * directories. A journal says how to take back everything that no fsync has made final: the bytes
 * that a write replaced, sizes, names. The test holds the journal's memory, so it outlives the
 * daemon. The files themselves always have the newest contents, as the page cache has them.
 * power_fail decides, by a seed, which changes the disk had. It decides for every sector by itself,
 * so writes are lost, torn and reordered. Sizes and the names of a directory are lost from some
 * moment on, because file systems keep those in a journal.
 *
 * It is strict. fsync of a file says nothing of its name. A sync makes final only what was complete
 * when it began. Unsynced writes of a killed daemon stay in doubt while the next one runs. If a
 * sync failed for a change, no later sync of the same run makes it final. The disk does not support
 * io_uring (run with nvme.io=threads) and mappings. It drops O_DIRECT and does not really sync, so
 * that thousands of rounds take minutes. */
#ifndef UCM_TESTS_VOLATILE_DISK_H
#define UCM_TESTS_VOLATILE_DISK_H

#include <stdatomic.h>
#include <stdint.h>

/* In the daemon's environment: the journal's descriptor; the directories with ':' between them; a
 * directory for names that may come back; and whether O_TMPFILE is refused. That directory is on
 * the same file system. */
#define VOLATILE_JOURNAL "UCM_VOLATILE_JOURNAL"
#define VOLATILE_DIRECTORIES "UCM_VOLATILE_DIRECTORIES"
#define VOLATILE_SAVED "UCM_VOLATILE_SAVED"
#define VOLATILE_NO_TMPFILE "UCM_VOLATILE_NO_TMPFILE"

#define VOLATILE_BYTES (512ull << 20)
#define VOLATILE_HEAD 4096u
#define VOLATILE_NAME 160u

enum volatile_kind {
    VOLATILE_WRITE,   /* `length` bytes at `offset`: `old` are those from before */
    VOLATILE_SIZE,    /* only old_size */
    VOLATILE_MADE,    /* `to` was given to file `other` */
    VOLATILE_RENAMED, /* file `other`, from `from` to `to`; `saved`: what was called `to` before */
    VOLATILE_REMOVED  /* `from` was removed, and is `saved` */
};

struct volatile_record {
    uint64_t bytes; /* of the record, `old` included; a multiple of 64 */
    uint32_t kind;
    _Atomic uint32_t live; /* not final yet */
    uint32_t doomed;       /* a sync of it failed: no later one makes it final */
    _Atomic uint64_t done; /* when it was complete; 0: it is not */
    uint64_t dev, ino;     /* the file, or of a name the directory */
    uint64_t offset, length, old_size, other;
    char from[VOLATILE_NAME], to[VOLATILE_NAME], saved[VOLATILE_NAME];
    uint8_t old[];
};

struct volatile_journal {
    _Atomic uint64_t used; /* bytes of records, after the head */
    _Atomic uint64_t clock;
    _Atomic uint64_t steps; /* beginnings and ends of what was seen */
    _Atomic uint64_t writes, syncs, names;
    _Atomic uint64_t doomed;
    /* The test's wishes. */
    _Atomic uint64_t kill_at;      /* at this step the process dies; 0: at none */
    _Atomic uint64_t sync_us;      /* how long a sync takes at most */
    _Atomic uint64_t page_read_us; /* how long the read of one page takes */
    /* How many calls fail from now on. Syncs fail with EIO, after `spared` good ones; then what
     * they should have made final is given up. Reads of one page fail with EIO, after `spared` good
     * ones. Writes fail with write_error, and so many writes are short. */
    _Atomic uint64_t syncs_spared, syncs_failing, writes_failing, writes_short;
    _Atomic uint64_t page_reads_spared, page_reads_failing;
    _Atomic int write_error;
};

#endif
