/* One operation on an NFS server: a chain of steps. Each step sends one request, whose reply decides
 * on the next step. This room's own, behind backend.h.
 *
 * - A task is on the heap and outlives an operation that was cancelled: it ends when its replies,
 *   which are then dropped, have come and its temporary file is removed.
 * - A request counts against the depth until its reply has come, cancelled or not.
 * - Steps wait in two queues. Those of writes come after the others, except one step in sixteen,
 *   and have three quarters of the depth at most. */
#ifndef UCMD_SHARE_NFS_TASK_H
#define UCMD_SHARE_NFS_TASK_H

#include "daemon/share/backend.h"
#include "daemon/share/nfs_conn.h"

#define NFS_ATTEMPTS 3u     /* of an operation: handles went stale, the connection was lost */
#define NFS_LATER_TURNS 20u /* retries after NFS_ERR_JUKEBOX */
#define NFS_LATER_MS 250u

struct nfs_task;
struct nfs_call;
/* Sends one request . */
typedef void nfs_step(struct nfs_task *t);
/* r is valid during the call only. */
typedef void nfs_replied_cb(struct nfs_task *t, const struct nfs_reply *r);

struct nfs_call {
    struct nfs_rpc_call rpc;
    struct list of_task; /* while its payload is the operation's memory */
    struct nfs_task *task;
    enum nfs_proc proc;
    nfs_replied_cb *replied_cb;
    struct nfs_args args;
};

struct nfs_task {
    struct list link; /* in one of the backend's lists, or in none */
    struct share_backend *b;
    struct share_op *op; /* NULL: cancelled */
    nfs_step *step;      /* the next one */
    bool over;           /* status is final; further replies are only counted */
    int status;
    unsigned awaiting, attempts, turns;
    struct list payloads; /* of nfs_call.of_task */
    bool writes;
    uint8_t bucket;
    /* Of this attempt. */
    struct nfs_handle *wanted; /* a handle that is looked up */
    struct nfs_handle folder, file;
    bool temp_made; /* a file named `temp` may exist */
    char temp[BLOCK_FILE_TEMP_CAP];
    uint64_t at, moved; /* bytes of the file: requested, and answered */
    uint32_t chunk;     /* bytes of one request */
    bool verifier_known, verifier_changed;
    uint8_t verifier[NFS_VERIFIER_BYTES];
    uint64_t cookie;
    uint8_t cookie_verifier[NFS_VERIFIER_BYTES];
    struct share_listing listing;
    uint32_t pages, blank; /* LIST: requests made; the next file that may lack attributes */
};

struct share_backend {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct nfs_conn conn;
    struct share_temp temps;
    unsigned depth, calls, write_calls, write_calls_max;
    unsigned steps;            /* taken: decides when a write's step comes first */
    unsigned under_way;        /* operations, started and not ended */
    struct list reads, writes; /* of nfs_task.link: with a step to take */
    struct list ended;         /* of share_op.link: done_cb is still to run */
    struct list later;         /* of nfs_task.link: the server asked to retry later */
    struct deadline report;    /* runs done_cb of `ended`: never from inside a call */
    struct deadline retry;     /* of `later` */
    struct nfs_handle blocks;  /* <root>/blocks */
    struct nfs_handle buckets[BLOCK_FILE_BUCKETS];
};

/* ---- nfs_task.c: queues and calls ---- */

/* Queues the step, before those of tasks that have not begun. */
void nfs_task_next(struct nfs_task *t, nfs_step *step);
/* Ends the task with status, once the replies that it awaits have come; the first call decides.
 * After -ESTALE, -EAGAIN and -ECONNRESET it begins anew, a bounded number of times. */
void nfs_task_end(struct nfs_task *t, int status);
/* Ends all queued tasks: there is no connection. */
void nfs_tasks_fail(struct share_backend *b, int error);
/* NULL: the task ended with -ENOMEM. replied_cb (may be NULL) does not run for a task that is over or
 * was cancelled. */
struct nfs_call *nfs_call_new(struct nfs_task *t, enum nfs_proc proc, const struct nfs_args *args,
                              nfs_replied_cb *replied_cb);
/* The task may be freed when this returns. */
void nfs_call_send(struct nfs_call *call);
/* Both of them. */
void nfs_request(struct nfs_task *t, enum nfs_proc proc, const struct nfs_args *args,
                 nfs_replied_cb *replied_cb);
/* A request with nothing but a handle and perhaps a name. */
void nfs_ask(struct nfs_task *t, enum nfs_proc proc, const struct nfs_handle *h, const char *name,
             nfs_replied_cb *replied_cb);
/* The operation was cancelled: its memory is the owner's again when this returns. */
void nfs_task_let_go(struct nfs_task *t);
/* Ends or retries a task that is over, or frees a cancelled one, when it awaits no reply. */
void nfs_task_settle(struct nfs_task *t);
void nfs_task_begin(struct nfs_task *t);
void nfs_task_free(struct nfs_task *t); /* in no list */
/* Takes as many steps as the depth allows. */
void nfs_pump(struct share_backend *b);
void nfs_op_ended(struct share_backend *b, struct share_op *op, int status);

/* ---- nfs_folder.c ---- */

/* Looks up the bucket's handle, then takes the verb's first step. A missing bucket is made by a WRITE
 * or CHECK; it ends other tasks with -ENOENT, a LIST with 0. */
void nfs_folder_step(struct nfs_task *t);
void nfs_folders_forget(struct share_backend *b);
/* A handle that the task used is stale. */
void nfs_folder_stale(struct nfs_task *t);
/* -ENOENT of a folder that was itself removed says nothing about the file: -ESTALE. */
int nfs_missing_errno(int err, const struct nfs_attributes *folder);

/* ---- what the verbs do in their bucket ---- */

/* nfs_file.c. FIND, READ, WRITE and TOUCH look the file up first. */
void nfs_look_step(struct nfs_task *t);
void nfs_remove_step(struct nfs_task *t);
/* For requests by a file's handle: a stale one means that another host removed the file. */
int nfs_gone_errno(uint32_t status);
/* nfs_data.c. READ: header and payload of `file`. WRITE: the same, then nfs_rename_step. */
void nfs_data_begin(struct nfs_task *t);
/* nfs_write.c. WRITE of a missing file; CHECK, in the root and in bucket 0. */
void nfs_create_step(struct nfs_task *t);
void nfs_rename_step(struct nfs_task *t);
void nfs_check_step(struct nfs_task *t);
void nfs_unlink_temp_step(struct nfs_task *t);
/* nfs_list.c */
void nfs_list_step(struct nfs_task *t);

#endif
