/* An operation on its way through an NFS server: a chain of steps, each of which sends one request;
 * its reply decides on the next one. The room's own, behind backend.h.
 *
 * A task is on the heap and outlives the operation: one that was given up is done with its replies,
 * which then land nowhere, and with removing its temporary file. A request counts against the depth
 * until its reply is there, whoever still wants it. Steps wait for their turn in two queues: those
 * that write behind the others, but for one in sixteen, and with three quarters of the depth. */
#ifndef UCMD_SHARE_NFS_TASK_H
#define UCMD_SHARE_NFS_TASK_H

#include "daemon/share/backend.h"
#include "daemon/share/nfs_conn.h"

#define NFS_ATTEMPTS 3u     /* of an operation: handles went stale, the connection was lost */
#define NFS_LATER_TURNS 20u /* how often it may be told to come back later */
#define NFS_LATER_MS 250u

struct nfs_task;
struct nfs_call;
/* Sends one request with nfs_call_new's and nfs_call_sent's help. */
typedef void nfs_step(struct nfs_task *t);
/* r: gone when this returns. */
typedef void nfs_replied(struct nfs_task *t, const struct nfs_call *call,
                         const struct nfs_reply *r);

struct nfs_call {
    struct nfs_rpc_call rpc;
    struct list of_task; /* while its bytes are the operation's */
    struct nfs_task *task;
    enum nfs_proc proc;
    nfs_replied *replied;
    uint64_t at; /* READ, WRITE: which bytes of the file */
    uint32_t n;
};

struct nfs_task {
    struct list link;
    struct share_backend *b;
    struct share_op *op; /* NULL: given up */
    nfs_step *step;      /* what its turn in the queue is for */
    bool queued;         /* in one of the backend's lists */
    bool over;           /* status says how; replies only count down */
    int status;
    unsigned awaiting, attempts, turns;
    struct list payloads; /* of nfs_call.of_task */
    bool writes;
    uint8_t bucket;
    /* Of this attempt. */
    struct nfs_handle folder, file;
    bool temp_made; /* perhaps: its name is temp */
    char temp[BLOCK_FILE_TEMP_CAP];
    uint64_t at, moved; /* bytes of the file: asked for, and replied to */
    uint32_t chunk;     /* bytes of one request */
    bool verifier_known, verifier_changed;
    uint8_t verifier[NFS_VERIFIER_BYTES];
    uint64_t cookie;
    uint8_t cookie_verifier[NFS_VERIFIER_BYTES];
    struct share_lister lister;
    uint32_t pages, blank; /* LIST: requests made; files without attributes, up to which */
};

struct share_backend {
    uv_loop_t *loop;
    struct nfs_conn conn;
    struct share_temp temps;
    unsigned depth, calls, write_calls, write_calls_max;
    unsigned steps;            /* taken; who is next */
    unsigned under_way;        /* operations, started and not ended */
    struct list reads, writes; /* of nfs_task.link: a step to take */
    struct list ended;         /* of share_op.link: to be told */
    struct list later;         /* of nfs_task.link: the server said so */
    uv_timer_t turn;           /* tells `ended`: never from inside a call */
    uv_timer_t again;          /* for `later` */
    unsigned handles;          /* not closed yet */
    bool closing;
    struct nfs_handle blocks; /* <root>/blocks */
    struct nfs_handle buckets[BLOCK_FILE_BUCKETS];
};

/* ---- nfs_task.c: queues and calls ---- */

/* To the front: what has begun goes on first. */
void nfs_task_next(struct nfs_task *t, nfs_step *step);
/* It ends with status when the replies that it awaits are there. -ESTALE, -EAGAIN and -ECONNRESET:
 * it begins anew, a bounded number of times. The first call counts. */
void nfs_task_end(struct nfs_task *t, int status);
/* Ends those that wait for a connection which can't be had. */
void nfs_tasks_fail(struct share_backend *b, int error);
/* NULL: the task was ended with -ENOMEM. replied (may be NULL) runs when somebody still wants it.
 */
struct nfs_call *nfs_call_new(struct nfs_task *t, enum nfs_proc proc, nfs_replied *replied);
/* Its arguments were put into call->rpc.out. The task may be gone when this returns. */
void nfs_call_send(struct nfs_call *call);
/* A request with nothing but a handle and perhaps a name: see nfs_put_args. */
void nfs_ask(struct nfs_task *t, enum nfs_proc proc, const struct nfs_handle *h, const char *name,
             nfs_replied *replied);
/* The operation was given up: its memory is its owner's again when this returns. */
void nfs_task_let_go(struct nfs_task *t);
/* When nothing of the task is awaited and it is over, or given up. */
void nfs_task_settle(struct nfs_task *t);
void nfs_task_begin(struct nfs_task *t);
void nfs_task_free(struct nfs_task *t); /* in no list */
/* As many steps as there is room for. */
void nfs_pump(struct share_backend *b);
void nfs_op_ended(struct share_backend *b, struct share_op *op, int status);

/* ---- nfs_folder.c ---- */

/* The bucket's handle, then what the verb does there. A bucket that is not there ends the task with
 * -ENOENT, or is made when it writes. */
void nfs_folder_step(struct nfs_task *t);
void nfs_folders_forget(struct share_backend *b);
/* A handle that the task used is no good. */
void nfs_folder_stale(struct nfs_task *t);
/* What a folder that was removed says of what was in it is no answer: -ESTALE for such a -ENOENT.
 */
int nfs_missing_errno(int err, const struct nfs_attributes *folder);

/* ---- what the verbs do in their bucket ---- */

/* nfs_file.c: FIND, READ, WRITE and TOUCH look the file up first. */
void nfs_look_step(struct nfs_task *t);
void nfs_remove_step(struct nfs_task *t);
/* Bytes of one request when `all` go in requests of at most `max`, all about as long. */
uint32_t nfs_chunk_bytes(uint64_t all, uint32_t max);
/* nfs_write.c: WRITE when the file is not there, and CHECK, in the root and in bucket 0. */
void nfs_create_step(struct nfs_task *t);
void nfs_check_step(struct nfs_task *t);
void nfs_unlink_temp_step(struct nfs_task *t);
/* nfs_list.c */
void nfs_list_step(struct nfs_task *t);

#endif
