/* How block files get to and from a root: one vtable. root.h bounds what a
 * backend is given.
 *
 * Promises:
 * - done_cb of a started operation runs once, on the event loop, never from inside start; not after
 *   a successful cancel.
 * - A READ with 0 has delivered exactly the bytes written for this part: header, identity, length
 *   and checksum were compared; of an encrypted part the encryption header's, and the caller has
 *   the last word.
 * - A WRITE leaves a whole file under its name or none, whatever dies meanwhile. A file that exists
 *   with the right length is not written again (-EEXIST).
 *
 * These statuses are answers; every other one is a failure of the root:
 * - 0
 * - -ENOENT, -ESTALE: the file does not exist
 * - -EEXIST
 * - -EBADMSG: something else has the part's name, and a WRITE could not replace it
 * - -EINVAL: no part has such a name
 * Failure -ENODEV: the root itself does not exist. A damaged file of the right length blocks every
 * WRITE of its part: a caller whose READ ends with -EBADMSG removes it.
 *
 * Threads: every function on the event loop; a backend may have threads of its own. The event loop
 * stays alive while operations are under way. open does no I/O on the root. */
#ifndef UCMD_SHARED_BACKEND_H
#define UCMD_SHARED_BACKEND_H

#include "daemon/base/deadline.h"
#include "daemon/base/list.h"
#include "daemon/shared/block_file.h"

#include <errno.h>
#include <uv.h>

/* - FIND: does the file exist with this length?
 * - TOUCH: sets its modification time to the server's now
 * - LIST: the files of one bucket
 * - CHECK: does the root answer? With `sync`: does it take writes, and what is its time? */
enum shared_verb {
    SHARED_FIND,
    SHARED_READ,
    SHARED_WRITE,
    SHARED_REMOVE,
    SHARED_TOUCH,
    SHARED_LIST,
    SHARED_CHECK
};

/* One bucket's regular files with the name of a block file or a temporary file. Empty for a bucket
 * that does not exist; zeroes are an empty listing. Freed by shared_listing_free. */
#define SHARED_LISTING_FILES (1u << 19) /* more are left out, and `cut` is set */
#define SHARED_LISTING_UNREAD 16u       /* more unread files fail the LIST */
struct shared_file {
    uint64_t bytes;    /* of the file, header included */
    uint64_t mtime_ns; /* by the server's clock */
    char name[BLOCK_FILE_NAME_CAP];
};
struct shared_listing {
    struct shared_file *files;
    uint32_t n, cap;
    bool cut;
    bool unable; /* the root tells no files at all; it is empty then, and the LIST ended with 0 */
    uint32_t unread; /* files left out because the root reported no size and time */
};

/* Memory of the caller, untouched by it from start to done_cb. */
struct shared_op {
    enum shared_verb verb;
    struct block_file_id id; /* not for LIST and CHECK, nor with by_name */
    bool by_name;            /* the caller gives bucket and name, from a listing */
    bool note;               /* of a tenant file: it does not count as a part */
    uint8_t bucket;          /* LIST, and with by_name; else shared_op_resolve sets it */
    /* with by_name: out, READ with 0: the file is encrypted. in, WRITE: the same */
    bool copy_encrypted;
    /* With by_name. out, READ with 0: the identity in the header; all else was compared. in, WRITE:
     * the identity to write. */
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    struct shared_listing listing; /* out: LIST with 0, the caller's */
    uint64_t now_ns;               /* out: CHECK with sync and 0: the server's time */
    uint64_t mtime_ns;             /* out: READ with 0: by the server's clock; 0: unknown */
    void *data;                    /* of READ and WRITE */
    uint64_t bytes;                /* of the payload; of FIND too */
    /* READ and WRITE, not by_name: data is encrypted, and the encryption header, after the header,
     * is the caller's: it fills it for a WRITE, and opens what a READ brings. */
    bool encrypted;
    bool sync; /* WRITE: on stable storage before done_cb. CHECK: see above */
    /* When the caller will cancel it, by uv_now; 0: it may not. A backend may give up by itself
     * then. */
    uint64_t deadline_ms;
    void (*done_cb)(struct shared_op *op, int status);
    /* The backend's own. */
    struct list link;
    void *backend;
    int status;
    enum { SHARED_OP_QUEUED, SHARED_OP_BUSY, SHARED_OP_ENDED } state;
    struct block_file_header file;
    /* the encryption header: with `encrypted` */
    uint8_t header[BLOCK_FILE_HEADER_BYTES + BLOCK_FILE_ENCRYPTION_BYTES];
    char name[BLOCK_FILE_NAME_CAP], temp[BLOCK_FILE_TEMP_CAP];
};

/* No file that could be the part's lies there. */
static inline bool shared_status_missing(int status)
{
    return status == -ENOENT || status == -ESTALE || status == -EBADMSG;
}

/* No space, or over quota. */
static inline bool shared_status_full(int status)
{
    return status == -ENOSPC || status == -EDQUOT;
}

struct shared_backend;
struct shared_process_stats;

struct shared_backend_config {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    const char *target; /* a directory, nfs://server/export?options, or process:name */
    const char *host;   /* for temporary names */
    unsigned depth;     /* operations, or requests of a server, under way */
    bool read_only;
    const struct config_process *process; /* of a process; borrowed during open */
    const char *launcher; /* ucmd, which puts the process into its sandbox; NULL: it has none */
};

struct shared_backend_ops {
    /* 0, -ENOMEM, -EINVAL for a target that this kind can't use. */
    int (*open)(const struct shared_backend_config *config, struct shared_backend **out);
    /* Nothing may be under way. Ends on the event loop; NULL-safe. */
    void (*close)(struct shared_backend *b);
    void (*start)(struct shared_backend *b, struct shared_op *op);
    /* True: done_cb will not run, and op and data are the caller's again. False: done_cb will run
     * when what is copied at this moment has been. */
    bool (*cancel)(struct shared_backend *b, struct shared_op *op);
    /* Why operations fail, better than their status says it; NULL: nothing is known. May be
     * NULL. */
    const char *(*reason)(const struct shared_backend *b);
    /* NULL: the root is no process. */
    void (*process)(const struct shared_backend *b, struct shared_process_stats *out);
};

extern const struct shared_backend_ops shared_process; /* each root's but those of tests */

void shared_listing_free(struct shared_listing *l); /* one of zeroes too */

/* ---- for backends ---- */

/* Fills in bucket, name and the expected header, or validates a given name. 0 or -errno. */
int shared_op_resolve(struct shared_op *op);
/* Are header and payload those of the part? 0 or -EBADMSG. */
int shared_op_verify(struct shared_op *op);
/* Between slot and `file`, which has shared_op_file_bytes(op) bytes and may be changed by others at
 * any time; so the checksum is of the slot. pack: makes the header of a WRITE, and copies both to
 * the file. unpack: copies both from it, and verifies. */
void shared_op_pack(struct shared_op *op, uint8_t *file);
int shared_op_unpack(struct shared_op *op, const uint8_t *file);

static inline uint64_t shared_op_head_bytes(const struct shared_op *op)
{
    return BLOCK_FILE_HEADER_BYTES + (op->encrypted ? BLOCK_FILE_ENCRYPTION_BYTES : 0);
}

static inline uint64_t shared_op_file_bytes(const struct shared_op *op)
{
    return shared_op_head_bytes(op) + op->bytes;
}

bool shared_listing_wants(const char *name);
/* Such a name, of a block file or a temporary file. 0, also when the listing is cut; -ENOMEM. */
int shared_listing_add(struct shared_listing *l, const char *name, uint64_t bytes,
                       uint64_t mtime_ns);

/* Makes temporary names that no other process uses; one for each backend. */
struct shared_temp {
    char prefix[BLOCK_FILE_TEMP_CAP]; /* all but the number */
};
void shared_temp_init(struct shared_temp *t, const char *host);
/* Any thread. */
void shared_temp_next(const struct shared_temp *t, char out[BLOCK_FILE_TEMP_CAP]);

#endif
