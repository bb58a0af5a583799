#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void nfs_unlink_temp_step(struct nfs_task *t)
{
    struct nfs_call *call;
    REMOVE3args args = {.object = nfs_in_bucket(t, t->temp)};

    t->temp_made = false; /* what can't be removed is the garbage collection's */
    call = nfs_call_new(t, NULL);
    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_remove_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

/* ---- its name ---- */

static void renamed_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    int err = nfs_status_errno(((const RENAME3res *)res)->status);

    (void)call;
    if (err == 0)
        t->temp_made = false;
    else if (err == -EISDIR || err == -EEXIST || err == -ENOTDIR)
        err = -EBADMSG; /* a folder has the name */
    else if (err == -ENOENT)
        err = -ESTALE; /* somebody removed the file, or the folder: once more */
    nfs_task_end(t, err);
}

static void rename_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, renamed_reply);
    RENAME3args args = {.from = nfs_in_bucket(t, t->temp), .to = nfs_in_bucket(t, t->op->name)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_rename_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

/* ---- its bytes ---- */

/* Another verifier than before: the server was restarted, and may have lost what it held. */
static void verifier_check(struct nfs_task *t, const writeverf3 verifier)
{
    if (!t->verifier_known)
        memcpy(t->verifier, verifier, sizeof(t->verifier));
    else if (memcmp(t->verifier, verifier, sizeof(t->verifier)) != 0)
        t->verifier_changed = true;
    t->verifier_known = true;
}

static void committed_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const COMMIT3res *committed = res;

    (void)call;
    if (committed->status != NFS3_OK) {
        nfs_task_end(t, nfs_status_errno(committed->status));
        return;
    }
    verifier_check(t, committed->COMMIT3res_u.resok.verf);
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, rename_step);
}

static void commit_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, committed_reply);
    COMMIT3args args = {.file = nfs_fh(&t->file)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_commit_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void write_send(struct nfs_task *t, uint64_t at, uint32_t n);

/* All bytes are on the server, if it still is what it was when it got the first ones. */
static void all_written(struct nfs_task *t)
{
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, t->op->sync ? commit_step : rename_step);
}

static void written_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const WRITE3res *written = res;
    const WRITE3resok *ok = &written->WRITE3res_u.resok;

    if (written->status != NFS3_OK) {
        nfs_task_end(t, nfs_status_errno(written->status));
        return;
    }
    if (ok->count == 0 || ok->count > call->n) {
        nfs_task_end(t, -EPROTO);
        return;
    }
    verifier_check(t, ok->verf);
    t->moved += ok->count;
    if (ok->count < call->n)
        write_send(t, call->at + ok->count, call->n - ok->count);
    else if (t->moved == share_op_file_bytes(t->op))
        all_written(t);
}

static int write_call(struct nfs_task *t, struct nfs_call *call, char *bytes)
{
    WRITE3args args = {.file = nfs_fh(&t->file),
                       .offset = call->at,
                       .count = call->n,
                       .stable = UNSTABLE,
                       .data = {call->n, bytes}};

    return rpc_nfs3_write_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call);
}

/* Bytes that the header is among: libnfs wants them in one piece, of which it makes a copy. */
static int write_head_call(struct nfs_task *t, struct nfs_call *call)
{
    uint32_t head = BLOCK_FILE_HEADER_BYTES - (uint32_t)call->at;
    char *bytes = malloc(call->n);
    int rc;

    if (!bytes)
        return -1;
    head = head < call->n ? head : call->n;
    memcpy(bytes, t->op->header + call->at, head);
    memcpy(bytes + head, t->op->data, call->n - head);
    rc = write_call(t, call, bytes);
    free(bytes);
    return rc;
}

static void write_send(struct nfs_task *t, uint64_t at, uint32_t n)
{
    struct nfs_call *call = nfs_call_new(t, written_reply);
    int rc;

    if (!call)
        return;
    call->at = at;
    call->n = n;
    rc = at < BLOCK_FILE_HEADER_BYTES
             ? write_head_call(t, call)
             : write_call(t, call, (char *)t->op->data + (at - BLOCK_FILE_HEADER_BYTES));
    nfs_call_sent(call, rc);
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

/* ---- does the root take writes, and what time is it there? ---- */

static void time_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const GETATTR3res *got = res;

    (void)call;
    if (got->status == NFS3_OK)
        t->op->now_ns = nfs_time_ns(&got->GETATTR3res_u.resok.obj_attributes.mtime);
    nfs_task_end(t, nfs_status_errno(got->status));
}

static void time_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, time_reply);
    GETATTR3args args = {.object = nfs_fh(&t->file)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_getattr_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void probe_written_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const WRITE3res *written = res;

    (void)call;
    if (written->status != NFS3_OK)
        nfs_task_end(t, nfs_status_errno(written->status));
    else
        nfs_task_next(t, time_step);
}

/* A full server says so when bytes come, not when the file is made. */
static void probe_write_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, probe_written_reply);
    WRITE3args args = {.file = nfs_fh(&t->file),
                       .count = sizeof(t->temp),
                       .stable = FILE_SYNC,
                       .data = {sizeof(t->temp), t->temp}};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_write_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void root_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const GETATTR3res *got = res;

    (void)call;
    if (got->status != NFS3_OK)
        nfs_task_end(t, nfs_status_errno(got->status));
    else if (t->op->sync)
        nfs_task_next(t, nfs_folder_step);
    else
        nfs_task_end(t, 0);
}

void nfs_check_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, root_reply);
    GETATTR3args args = {.object = nfs_fh(&t->b->conn.root)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_getattr_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

/* ---- a file of its own ---- */

static void fill(struct nfs_task *t)
{
    if (t->op->verb == SHARE_CHECK) {
        nfs_task_next(t, probe_write_step);
        return;
    }
    share_op_seal(t->op);
    t->chunk = nfs_chunk_bytes(share_op_file_bytes(t->op), t->b->conn.write_bytes);
    nfs_task_next(t, write_data_step);
}

static void temp_found_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const LOOKUP3res *found = res;
    const nfs_fh3 *file = &found->LOOKUP3res_u.resok.object;

    (void)call;
    if (found->status != NFS3_OK)
        nfs_task_end(t, found->status == NFS3ERR_NOENT ? -ESTALE : nfs_status_errno(found->status));
    else if (!nfs_handle_set(&t->file, file->data.data_val, file->data.data_len))
        nfs_task_end(t, -EPROTO);
    else
        fill(t);
}

/* For servers that don't tell the new file's handle. */
static void temp_find_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, temp_found_reply);
    LOOKUP3args args = {.what = nfs_in_bucket(t, t->temp)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_lookup_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void created_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const CREATE3res *created = res;
    const post_op_fh3 *obj = &created->CREATE3res_u.resok.obj;
    const nfs_fh3 *file = &obj->post_op_fh3_u.handle;

    (void)call;
    if (created->status == NFS3ERR_EXIST) { /* -EEXIST would say that the part is there */
        t->temp_made = false;
        nfs_task_end(t, -EIO);
    } else if (created->status != NFS3_OK) {
        t->temp_made = false;
        nfs_task_end(t, created->status == NFS3ERR_NOENT ? -ESTALE
                                                         : nfs_status_errno(created->status));
    } else if (!obj->handle_follows) {
        nfs_task_next(t, temp_find_step);
    } else if (!nfs_handle_set(&t->file, file->data.data_val, file->data.data_len)) {
        nfs_task_end(t, -EPROTO);
    } else {
        fill(t);
    }
}

void nfs_create_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, created_reply);
    CREATE3args args = {.how.mode = GUARDED, .how.createhow3_u.g_obj_attributes.mode = {1, {0600}}};

    if (!call)
        return;
    share_temp_next(&t->b->temps, t->temp);
    t->temp_made = true;
    args.where = nfs_in_bucket(t, t->temp);
    nfs_call_sent(call, rpc_nfs3_create_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}
