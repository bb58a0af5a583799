/* How block files get to and from a root: one vtable, two kinds. Knows nothing of the index, of
 * policy or of health; a root (later in this room) has one and bounds what it gives to it.
 *
 * Promise: an operation that was started ends once with `done`, on the loop and never from inside
 * start, unless cancel took it back. A READ that ends with 0 has delivered exactly the bytes that
 * were written for this part: header, identity, length and checksum were compared. A WRITE that
 * ends with 0 left a whole file under its name, or nothing under it, whatever dies in between; one
 * that is there already, with the right length, is not written again (-EEXIST).
 * Answers, which say nothing against the root: 0; -ENOENT and -ESTALE: not there; -EEXIST;
 * -EBADMSG: there is something that is not this part, and a WRITE could not take its place;
 * -EINVAL: no part can be called that. All else is the root's failure, -ENODEV: the root itself is
 * not there. A file of the right length that is damaged stands in the way of every WRITE: who reads
 * -EBADMSG removes it. Threads:
 * every function on the loop; a backend may have threads of its own. While operations are under way
 * the loop stays alive. open does no I/O on the root: a server that hangs at the daemon's start
 * holds nobody up. */
#ifndef UCMD_SHARE_BACKEND_H
#define UCMD_SHARE_BACKEND_H

#include "daemon/base/list.h"
#include "daemon/share/block_file.h"

#include <uv.h>

/* FIND: is the file there? TOUCH: its modification time becomes now, by the server's clock. LIST:
 * one bucket's files. CHECK: does the root answer, with `sync` does it take writes too, and what
 * time is it there? */
enum share_verb {
    SHARE_FIND,
    SHARE_READ,
    SHARE_WRITE,
    SHARE_REMOVE,
    SHARE_TOUCH,
    SHARE_LIST,
    SHARE_CHECK
};

/* Of one bucket: files whose names are a block file's or a temporary file's, nothing else: no
 * folders, no links. Freed by share_listing_free. A bucket that is not there has none. */
#define SHARE_LISTING_FILES (1u << 19) /* more are left out, and `cut` says so */
#define SHARE_LISTING_UNREAD 16u       /* with more of these it is no listing */
struct share_file {
    uint64_t bytes;    /* of the file, header included */
    uint64_t mtime_ns; /* by the server's clock */
    uint32_t name;     /* its name is at names + name */
};
struct share_listing {
    struct share_file *files;
    char *names;
    uint32_t n;
    bool cut;
    uint32_t unread; /* files left out because nothing could be learnt of them */
};

/* Memory of the caller, untouched by it from start to done. */
struct share_op {
    enum share_verb verb;
    struct block_file_id id; /* not for LIST and CHECK, nor with by_name */
    bool by_name;            /* not LIST, CHECK: bucket and name are given, of a listing */
    uint8_t bucket;          /* LIST, and with by_name; else share_op_place sets it */
    /* With by_name. READ with 0: whose file the header says it is; all else in it was compared.
     * WRITE: what the header is to say. */
    uint8_t identity[BLOCK_FILE_IDENTITY_BYTES];
    struct share_listing listing; /* out: LIST with 0, the caller's */
    uint64_t now_ns;              /* out: CHECK with sync and 0: the server's time */
    uint64_t mtime_ns;            /* out: READ with 0: the file's, by its clock; 0: not learned */
    void *data;                   /* of READ and WRITE */
    uint64_t bytes;               /* of the payload; of FIND too */
    bool sync;                    /* WRITE: on stable storage before done. CHECK: see above */
    void (*done)(struct share_op *op, int status);
    /* The backend's own. */
    struct list link;
    void *backend;
    int status;
    enum { SHARE_OP_QUEUED, SHARE_OP_BUSY, SHARE_OP_ENDED } state;
    struct block_file_header file;
    uint8_t header[BLOCK_FILE_HEADER_BYTES];
    char name[BLOCK_FILE_NAME_CAP], temp[BLOCK_FILE_TEMP_CAP];
    void *scratch;
};

struct share_backend;

struct share_backend_config {
    uv_loop_t *loop;
    const char *target; /* a folder, or nfs://server/export?options */
    const char *host;   /* for temporary names */
    unsigned depth;     /* threads (at least 2), or requests under way */
};

struct share_backend_ops {
    const char *name;
    /* 0, -ENOMEM, -EINVAL for a target that is none of this kind's. */
    int (*open)(const struct share_backend_config *config, struct share_backend **out);
    /* Nothing may be under way. Ends on the loop; NULL-safe. */
    void (*close)(struct share_backend *b);
    void (*start)(struct share_backend *b, struct share_op *op);
    /* True: done will not run, and op and data are the caller's again. False: too late to stop it,
     * done will run when the root lets go. */
    bool (*cancel)(struct share_backend *b, struct share_op *op);
};

extern const struct share_backend_ops share_posix, share_nfs;

void share_listing_free(struct share_listing *l); /* one of zeroes too */

/* ---- for backends ---- */

/* Bucket, name and what the header must say, whatever the verb needs of them; a name that is given
 * is looked at. 0 or -errno. */
int share_op_place(struct share_op *op);
/* The header of a write, with the payload's checksum. Takes as long as the payload is. */
void share_op_seal(struct share_op *op);
/* Are header and payload those of the part? 0 or -EBADMSG. */
int share_op_verify(struct share_op *op);

static inline uint64_t share_op_file_bytes(const struct share_op *op)
{
    return BLOCK_FILE_HEADER_BYTES + op->bytes;
}

/* A listing as it grows; one of zeroes is empty. Its `out` is the caller's at any time. */
struct share_lister {
    struct share_listing out;
    uint32_t files_cap;
    size_t names_bytes, names_cap;
};
bool share_lister_wants(const char *name);
/* 0, also when the listing is cut; -ENOMEM. */
int share_lister_add(struct share_lister *l, const char *name, uint64_t bytes, uint64_t mtime_ns);

/* What makes temporary names unique in this process; one a backend. */
struct share_temp {
    char host[BLOCK_FILE_HOST_CAP];
    uint64_t started;
};
void share_temp_init(struct share_temp *t, const char *host);
/* Any thread. */
void share_temp_next(const struct share_temp *t, char out[BLOCK_FILE_TEMP_CAP]);

#endif
