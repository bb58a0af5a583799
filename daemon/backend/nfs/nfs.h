/* An NFS server as a root: operations as chains of requests, on one connection of libnfs.
 *
 * - A task is one request of the daemon. Each of its steps sends one call to the server, whose
 *   reply decides on the next step; a file's bytes are calls side by side.
 * - A task outlives its request when that is given up at its deadline: it ends when the replies
 *   that it awaits, which are then dropped, have come and its temporary file is removed. The span
 *   of the buffer is not touched any more.
 * - A call counts against the depth until its reply has come.
 * - Steps wait in two queues. Those of writes come after the others, except one step in sixteen,
 *   and have three quarters of the depth at most.
 * - What a reply says is checked as far as libnfs lets it be seen: handles' and data's lengths,
 *   counts, pages. libnfs 4.0 can be crashed by replies that it decodes before; that is why this is
 *   a process.
 *
 * Threads: one. No function of the server's replies runs from inside a call that sends. */
#ifndef UCM_BACKEND_NFS_NFS_H
#define UCM_BACKEND_NFS_NFS_H

#include "daemon/backend/nfs/target.h"
#include "daemon/backend/ucmbackend.h"

#include <netdb.h>
#include <nfsc/libnfs-zdr.h>

#include <nfsc/libnfs.h>

#include <nfsc/libnfs-raw.h>

#include <nfsc/libnfs-raw-nfs.h>
#include <sys/queue.h>

#define NFS_ATTEMPTS 3u     /* of a task: handles went stale, the connection was lost */
#define NFS_LATER_TURNS 20u /* retries after NFS3ERR_JUKEBOX */
#define NFS_LATER_MS 250u
#define NFS_TICK_MS 100u
#define NFS_CONNECT_MS 5000u              /* for each step of connecting */
#define NFS_SILENT_MS 15000u              /* without any reply while replies are awaited */
#define NFS_CALL_MS 60000u                /* for one reply, whatever else comes */
#define NFS_NOT_EAGER 16u                 /* writes, after one of a file that was there */
#define NFS_PAUSE_MS 250u                 /* after a failed attempt to connect */
#define NFS_MAX_TRANSFER_BYTES (1u << 20) /* of one call; libnfs accepts no larger one */
#define NFS_HANDLE_BYTES 64u
#define NFS_VERIFIER_BYTES 8u
#define NFS_BUCKETS 256u
#define NFS_NAME_CAP (WIRE_KEY_BYTES + 1)
#define NFS_KNOWN 32768u /* files whose handles are kept */

/* errno has a JUKEBOX of its own in the kernel only. */
#define NFS_LATER EAGAIN

struct nfs;
struct nfs_task;

struct nfs_handle {
    uint32_t n; /* 0: none */
    char bytes[NFS_HANDLE_BYTES];
};

struct nfs_attributes {
    bool known, file, directory;
    uint32_t links;
    uint64_t bytes, mtime_ns;
};

enum nfs_proc {
    NFS_GETATTR,
    NFS_SETATTR, /* both times become the server's now */
    NFS_LOOKUP,
    NFS_READ,
    NFS_WRITE,
    NFS_CREATE, /* for the owner only, as is MKDIR */
    NFS_MKDIR,
    NFS_REMOVE,
    NFS_RENAME, /* within one directory */
    NFS_READDIRPLUS,
    NFS_FSINFO,
    NFS_COMMIT /* of the whole file */
};

/* Each procedure takes some of these. */
struct nfs_args {
    const struct nfs_handle *handle; /* of the file, or of the directory that has the name */
    const char *name, *new_name;
    uint64_t at;          /* READ, WRITE; READDIRPLUS: the cookie */
    uint32_t n;           /* READ, WRITE: bytes */
    const void *data;     /* WRITE; copied */
    bool sync;            /* WRITE */
    bool anew;            /* CREATE: the server empties a file of that name */
    const char *verifier; /* READDIRPLUS */
};

/* One for all procedures; what a reply lacks is zero. Valid during the callback only. */
struct nfs_reply {
    int err; /* 0 or -errno of what the server says; -NFS_LATER: ask again later; -ESTALE */
    struct nfs_attributes attributes;
    struct nfs_attributes directory; /* of the directory that has the name, or was read */
    struct nfs_handle handle;        /* LOOKUP with 0: always */
    uint32_t count;                  /* READ, WRITE: at most what was asked for */
    const char *data;                /* READ */
    const char *verifier;            /* WRITE, COMMIT, READDIRPLUS */
    const struct entryplus3 *entries;
    bool last;
    uint32_t read_bytes, write_bytes; /* FSINFO */
    uint64_t at;                      /* of the call */
    uint32_t n;
};

typedef void nfs_step(struct nfs_task *t);
typedef void nfs_replied_cb(struct nfs_task *t, const struct nfs_reply *r);

/* What a verb's task does: its first step; with its bucket's handle; with a temporary file that is
 * left. */
struct nfs_verb {
    nfs_step *first, *in_directory, *clean;
};

struct nfs_call {
    TAILQ_ENTRY(nfs_call) link; /* of nfs.calls: the oldest first */
    struct nfs_task *task;
    enum nfs_proc proc;
    nfs_replied_cb *replied_cb;
    uint64_t at, sent_ms;
    uint32_t n;
};

struct nfs_task {
    TAILQ_ENTRY(nfs_task) all;  /* of nfs.tasks */
    TAILQ_ENTRY(nfs_task) link; /* of the queue that it waits in */
    enum { TASK_NOWHERE, TASK_READS, TASK_WRITES, TASK_LATER } queue;
    struct nfs *nfs;
    struct ucm_backend_request *request; /* NULL: given up */
    nfs_step *step;                      /* the next one */
    nfs_step *then;                      /* when all bytes are written */
    enum wire_verb verb;
    uint8_t bucket;
    char name[NFS_NAME_CAP], temp[NFS_NAME_CAP]; /* within the bucket */
    bool over; /* status is final; further replies are only counted */
    int status;
    unsigned awaiting, attempts, turns;
    struct ucm_backend_result result;
    /* State of this attempt. */
    struct nfs_handle *wanted; /* a handle that is looked up */
    struct nfs_handle directory, file;
    bool by_known;      /* READ: `file` is a handle that was kept */
    bool temp_made;     /* a file named `temp` may exist */
    bool eager;         /* WRITE: it is made while the name is looked up */
    bool looked, made;  /* WRITE: nothing has the name; `file` is there to be written */
    int make_error;     /* WRITE: why it could not be made */
    uint64_t at, moved; /* bytes of the file: asked for, and answered */
    uint32_t chunk;     /* bytes of one call */
    bool verifier_known, verifier_changed;
    char verifier[NFS_VERIFIER_BYTES];
    uint64_t cookie;
    char cookie_verifier[NFS_VERIFIER_BYTES];
    struct wire_file *files; /* LIST */
    uint32_t n_files, cap, pages, blank;
    uint64_t unread;
};

/* A file that was found or written. */
struct nfs_known {
    struct nfs_handle handle; /* n 0: the place is free */
    uint64_t bytes;
    uint8_t bucket;
    char name[NFS_NAME_CAP];
};

enum nfs_state { NFS_DOWN, NFS_PORT, NFS_MOUNT, NFS_SERVER, NFS_UP };

/* DOWN -> PORT (portmapper, unless the target names mountd's port) -> MOUNT (mountd) -> SERVER
 * (limits) -> UP. When nothing accepts a connection at one of the server's addresses, the steps are
 * taken at the next one. */
struct nfs_conn {
    enum nfs_state state;
    struct rpc_context *rpc; /* from PORT on */
    struct addrinfo *addresses, *address;
    uint32_t next_number; /* of a call; unique over all connections */
    uint16_t mount_port;
    struct nfs_handle root;
    uint32_t read_bytes, write_bytes; /* of one call */
    bool connected;
    bool over; /* the step is done, or failed with `error` */
    int error;
    int refused; /* why it is down */
    uint64_t refused_until_ms, heard_ms, told_ms;
    char said[WIRE_REASON_BYTES + 1]; /* by libnfs, of the last failure */
};

TAILQ_HEAD(nfs_tasks, nfs_task);

struct nfs {
    struct ucm_backend *backend;
    struct nfs_target target;
    const struct nfs_verb *verbs; /* WIRE_VERBS */
    struct nfs_conn conn;
    unsigned unsent; /* calls since libnfs was last told to send */
    unsigned depth, n_calls, n_write_calls, write_calls_max;
    unsigned steps;     /* taken: decides when a write's step comes first */
    unsigned not_eager; /* writes that look before they make a file */
    TAILQ_HEAD(nfs_calls, nfs_call) calls;
    struct nfs_tasks tasks, reads, writes, later;
    uint64_t now_ms, later_ms, tick_ms;
    struct nfs_handle blocks; /* <root>/blocks */
    struct nfs_handle buckets[NFS_BUCKETS];
    struct nfs_known known[NFS_KNOWN]; /* by a hash of the name; the newest stays */
    bool broken;                       /* the daemon is gone */
};

/* Each file calls those that stand above it here, and no other. */

/* ---- reply.c ---- */

/* 0; -EPROTO: `data`, what libnfs decoded of a reply, can't be one. */
int nfs_reply_take(enum nfs_proc proc, const void *data, struct nfs_reply *r);
int nfs_mount_errno(int status);
bool nfs_handle_take(struct nfs_handle *h, uint32_t n, const char *bytes);
/* -ENOENT of a directory that was itself removed says nothing about the file: -ESTALE. */
int nfs_missing_errno(const struct nfs_reply *r);
/* For calls by a file's handle: a stale one means that another host removed the file. */
int nfs_gone_errno(const struct nfs_reply *r);

/* ---- handles.c ---- */

/* The handle that is kept of the task's file, or NULL. */
const struct nfs_known *nfs_known_of(const struct nfs_task *t);
/* The task's file has this handle. */
void nfs_known_put(struct nfs_task *t, const struct nfs_handle *handle, uint64_t bytes);
void nfs_known_forget(struct nfs_task *t);
/* Those of another connection may be of another export. */
void nfs_known_forget_all(struct nfs *n);
void nfs_directories_forget(struct nfs *n);
/* A handle that the task used is stale. */
void nfs_directory_stale(struct nfs_task *t);

/* ---- conn.c ---- */

/* Connects when it is down. 0: it is up, or will be, or tasks end; -errno: why not now. */
int nfs_conn_want(struct nfs *n);
bool nfs_conn_up(const struct nfs *n);
/* Ends the connection at the next iteration of the event loop. `said`: by libnfs, or NULL. */
void nfs_conn_drop(struct nfs *n, int error, const char *said);
/* Takes the next step of connecting, or closes what is over. */
void nfs_conn_settle(struct nfs *n);
/* Each tick: is the server silent? */
void nfs_conn_watch(struct nfs *n);

/* ---- task.c ---- */

/* Begins a request of the daemon. */
void nfs_task_new(struct nfs *n, struct ucm_backend_request *request);
/* Queues the step, before those of tasks that have not begun. */
void nfs_task_next(struct nfs_task *t, nfs_step *step);
/* Ends the task with 0 or -errno, once the replies that it awaits have come; the first call
 * decides. After -ESTALE, -NFS_LATER and -ECONNRESET it begins again, a bounded number of times. */
void nfs_task_end(struct nfs_task *t, int status);
/* Answers, retries or frees a task that is over or was given up, when it awaits no reply. */
void nfs_task_settle(struct nfs_task *t);
/* Takes as many steps as the depth allows. */
void nfs_pump(struct nfs *n);
/* Each tick: gives up what is late, begins again what was to wait. */
void nfs_tasks_watch(struct nfs *n);

/* ---- call.c ---- */

/* Sends one call. The task may have ended when this returns. replied_cb may be NULL; it does not
 * run for a task that is over or was given up. */
void nfs_ask(struct nfs_task *t, enum nfs_proc proc, const struct nfs_args *args,
             nfs_replied_cb *replied_cb);

/* ---- directory.c ---- */

/* Looks up the bucket's handle, then takes the verb's first step. A missing bucket is made by a
 * WRITE or CHECK; it ends other tasks with -ENOENT, a LIST with 0. */
void nfs_directory_step(struct nfs_task *t);

/* ---- what the verbs do in their bucket ---- */

/* list.c. A listing is held until it is whole. */
void nfs_list_step(struct nfs_task *t);
/* data.c. READ: the bytes of `file`. WRITE: the same, then that step. */
void nfs_data_begin(struct nfs_task *t, nfs_step *then);
/* write.c. WRITE of a missing file; CHECK, in the root and in a bucket. */
void nfs_create_step(struct nfs_task *t);
/* A WRITE may go on: no such file is there. */
void nfs_write_looked(struct nfs_task *t);
/* Two chains of steps can't be taken at once: the server tells less than others. Writes look first
 * from now on. */
void nfs_not_eager(struct nfs_task *t);
void nfs_check_step(struct nfs_task *t);
void nfs_unlink_temp_step(struct nfs_task *t);
/* file.c. FIND, READ, WRITE and TOUCH look the file up first. */
void nfs_look_step(struct nfs_task *t);
/* READ: by a handle that is kept, or as nfs_directory_step. What fails by a kept one begins again
 * without it. */
void nfs_read_step(struct nfs_task *t);
void nfs_remove_step(struct nfs_task *t);

#endif
