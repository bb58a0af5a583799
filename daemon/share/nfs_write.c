#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void nfs_unlink_temp_step(struct nfs_task *t)
{
    t->temp_made = false; /* what can't be removed is left to garbage collection */
    nfs_ask(t, NFS_REMOVE, &t->folder, t->temp, NULL);
}

/* ---- its name ---- */

static void renamed_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                             const struct nfs_reply *r)
{
    int err = nfs_status_errno(r->status);

    (void)call;
    if (err == 0)
        t->temp_made = false;
    else if (err == -EISDIR || err == -EEXIST || err == -ENOTDIR)
        err = -EBADMSG; /* a folder has the name */
    else if (err == -ENOENT)
        err = -ESTALE; /* another host removed the file or the folder: try again */
    nfs_task_end(t, err);
}

static void rename_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, NFS_RENAME, renamed_reply_cb);

    if (!call)
        return;
    nfs_put_place(&call->rpc.out, &t->folder, t->temp);
    nfs_put_place(&call->rpc.out, &t->folder, t->op->name);
    nfs_call_send(call);
}

/* ---- its bytes ---- */

/* A new verifier: the server was restarted and may have lost unstable writes. */
static void verifier_check(struct nfs_task *t, const uint8_t verifier[NFS_VERIFIER_BYTES])
{
    if (!t->verifier_known)
        memcpy(t->verifier, verifier, sizeof(t->verifier));
    else if (memcmp(t->verifier, verifier, sizeof(t->verifier)) != 0)
        t->verifier_changed = true;
    t->verifier_known = true;
}

static void committed_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                               const struct nfs_reply *r)
{
    (void)call;
    if (r->status != NFS_OK) {
        nfs_task_end(t, nfs_status_errno(r->status));
        return;
    }
    verifier_check(t, r->verifier);
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, rename_step);
}

static void commit_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_COMMIT, &t->file, NULL, committed_reply_cb);
}

static void write_send(struct nfs_task *t, uint64_t at, uint32_t n);

/* All bytes were written, unless the server was restarted in between. */
static void all_written(struct nfs_task *t)
{
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, t->op->sync ? commit_step : rename_step);
}

static void written_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                             const struct nfs_reply *r)
{
    if (r->status != NFS_OK) {
        nfs_task_end(t, nfs_status_errno(r->status));
        return;
    }
    if (r->count == 0 || r->count > call->n) {
        nfs_task_end(t, -EPROTO);
        return;
    }
    verifier_check(t, r->verifier);
    t->moved += r->count;
    if (r->count < call->n)
        write_send(t, call->at + r->count, call->n - r->count);
    else if (t->moved == share_op_file_bytes(t->op))
        all_written(t);
}

/* Header and payload are sent from the operation's memory, which stays in use until the reply. */
static void write_send(struct nfs_task *t, uint64_t at, uint32_t n)
{
    struct nfs_call *call = nfs_call_new(t, NFS_WRITE, written_reply_cb);
    uint64_t head = at < BLOCK_FILE_HEADER_BYTES ? BLOCK_FILE_HEADER_BYTES - at : 0;

    if (!call)
        return;
    call->at = at;
    call->n = n;
    head = head < n ? head : n;
    if (head > 0)
        call->rpc.payload[0] = (struct iovec){t->op->header + at, head};
    if (n > head)
        call->rpc.payload[1] = (struct iovec){
            (uint8_t *)t->op->data + (at + head - BLOCK_FILE_HEADER_BYTES), n - head};
    list_push_back(&t->payloads, &call->of_task);
    nfs_put_write(&call->rpc.out, &t->file, at, n, false);
    nfs_call_send(call);
}

static void write_data_step(struct nfs_task *t)
{
    uint64_t at = t->at, left = share_op_file_bytes(t->op) - at;
    uint32_t n = left < t->chunk ? (uint32_t)left : t->chunk;

    t->at += n;
    if (left > n)
        nfs_task_next(t, write_data_step);
    write_send(t, at, n);
}

/* ---- CHECK: does the root take writes, and what is its time? ---- */

static void time_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                          const struct nfs_reply *r)
{
    (void)call;
    if (r->status == NFS_OK)
        t->op->now_ns = r->attributes.mtime_ns;
    nfs_task_end(t, nfs_status_errno(r->status));
}

static void time_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &t->file, NULL, time_reply_cb);
}

static void check_written_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                                   const struct nfs_reply *r)
{
    (void)call;
    if (r->status != NFS_OK)
        nfs_task_end(t, nfs_status_errno(r->status));
    else
        nfs_task_next(t, time_step);
}

/* A full server refuses bytes, not the making of a file. */
static void check_write_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, NFS_WRITE, check_written_reply_cb);

    if (!call)
        return;
    nfs_put_write(&call->rpc.out, &t->file, 0, sizeof(t->temp), true);
    nfs_xdr_put_bytes(&call->rpc.out, t->temp, sizeof(t->temp));
    nfs_call_send(call);
}

static void root_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                          const struct nfs_reply *r)
{
    (void)call;
    if (r->status != NFS_OK)
        nfs_task_end(t, nfs_status_errno(r->status));
    else if (t->op->sync)
        nfs_task_next(t, nfs_folder_step);
    else
        nfs_task_end(t, 0);
}

void nfs_check_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &t->b->conn.root, NULL, root_reply_cb);
}

/* ---- the temporary file ---- */

static void fill(struct nfs_task *t)
{
    if (t->op->verb == SHARE_CHECK) {
        nfs_task_next(t, check_write_step);
        return;
    }
    share_op_seal(t->op);
    t->chunk = nfs_chunk_bytes(share_op_file_bytes(t->op), t->b->conn.write_bytes);
    nfs_task_next(t, write_data_step);
}

static void temp_found_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                                const struct nfs_reply *r)
{
    (void)call;
    t->file = r->handle;
    if (r->status != NFS_OK)
        nfs_task_end(t, r->status == NFS_ERR_NOENT ? -ESTALE : nfs_status_errno(r->status));
    else
        fill(t);
}

/* For servers whose CREATE returns no handle. */
static void temp_find_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_LOOKUP, &t->folder, t->temp, temp_found_reply_cb);
}

static void created_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                             const struct nfs_reply *r)
{
    (void)call;
    t->file = r->handle;
    if (r->status == NFS_ERR_EXIST) { /* -EEXIST would mean that the part exists */
        t->temp_made = false;
        nfs_task_end(t, -EIO);
    } else if (r->status != NFS_OK) {
        t->temp_made = false;
        nfs_task_end(t, r->status == NFS_ERR_NOENT ? -ESTALE : nfs_status_errno(r->status));
    } else if (r->handle.n == 0) {
        nfs_task_next(t, temp_find_step);
    } else {
        fill(t);
    }
}

void nfs_create_step(struct nfs_task *t)
{
    share_temp_next(&t->b->temps, t->temp);
    t->temp_made = true;
    nfs_ask(t, NFS_CREATE, &t->folder, t->temp, created_reply_cb);
}
