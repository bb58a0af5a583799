#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <string.h>

#define CHUNK_ALIGN 4096u

uint64_t nfs_time_ns(const struct nfstime3 *time)
{
    return time->seconds * (uint64_t)1000000000u + time->nseconds % 1000000000u;
}

static int file_fits(const struct nfs_task *t, const struct fattr3 *attributes)
{
    bool fits = attributes->type == NF3REG && attributes->size == share_op_file_bytes(t->op);

    t->op->mtime_ns = nfs_time_ns(&attributes->mtime);
    return fits ? 0 : -EBADMSG;
}

uint32_t nfs_chunk_bytes(uint64_t all, uint32_t max)
{
    uint64_t n = (all + max - 1) / max, chunk = (all + n - 1) / n;

    chunk = (chunk + CHUNK_ALIGN - 1) / CHUNK_ALIGN * CHUNK_ALIGN;
    return chunk < max ? (uint32_t)chunk : max;
}

/* Of a file by its handle: one that is gone meanwhile was somebody's to remove. */
static int gone_errno(int status)
{
    return status == NFS3ERR_STALE ? -ENOENT : nfs_status_errno(status);
}

/* ---- reading ---- */

/* Bytes [at, at + n) of the file to header and payload. */
static void bytes_land(struct share_op *op, uint64_t at, const char *bytes, uint32_t n)
{
    uint32_t head = 0;

    if (at < BLOCK_FILE_HEADER_BYTES) {
        head = BLOCK_FILE_HEADER_BYTES - (uint32_t)at;
        head = head < n ? head : n;
        memcpy(op->header + at, bytes, head);
    }
    if (n > head)
        memcpy((char *)op->data + (at + head - BLOCK_FILE_HEADER_BYTES), bytes + head, n - head);
}

static void read_send(struct nfs_task *t, uint64_t at, uint32_t n);

static void read_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const READ3res *got = res;
    const READ3resok *ok = &got->READ3res_u.resok;
    uint32_t n = ok->data.data_len;

    if (got->status != NFS3_OK) {
        nfs_task_end(t, gone_errno(got->status));
        return;
    }
    if (n > call->n) {
        nfs_task_end(t, -EPROTO);
        return;
    }
    if (n == 0) {
        nfs_task_end(t, -EBADMSG);
        return;
    }
    bytes_land(t->op, call->at, ok->data.data_val, n);
    t->moved += n;
    if (n < call->n)
        read_send(t, call->at + n, call->n - n); /* in the place of the one that just ended */
    else if (t->moved == share_op_file_bytes(t->op))
        nfs_task_end(t, share_op_verify(t->op));
}

static void read_send(struct nfs_task *t, uint64_t at, uint32_t n)
{
    struct nfs_call *call = nfs_call_new(t, read_reply);
    READ3args args = {.file = nfs_fh(&t->file), .offset = at, .count = n};

    if (!call)
        return;
    call->at = at;
    call->n = n;
    nfs_call_sent(call, rpc_nfs3_read_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void read_data_step(struct nfs_task *t)
{
    uint64_t at = t->at, left = share_op_file_bytes(t->op) - at;
    uint32_t n = left < t->chunk ? (uint32_t)left : t->chunk;

    t->at += n;
    if (left > n)
        nfs_task_next(t, read_data_step);
    read_send(t, at, n);
}

/* ---- removing, touching ---- */

static void remove_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const REMOVE3res *removed = res;
    int err = nfs_missing_errno(nfs_status_errno(removed->status),
                                &removed->REMOVE3res_u.resfail.dir_wcc.after);

    (void)call;
    nfs_task_end(t, err == -EISDIR ? -EBADMSG : err);
}

void nfs_remove_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, remove_reply);
    REMOVE3args args = {.object = nfs_in_bucket(t, t->op->name)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_remove_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void touched_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const SETATTR3res *set = res;

    (void)call;
    nfs_task_end(t, gone_errno(set->status));
}

static void set_time_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, touched_reply);
    SETATTR3args args = {.object = nfs_fh(&t->file),
                         .new_attributes.atime.set_it = SET_TO_SERVER_TIME,
                         .new_attributes.mtime.set_it = SET_TO_SERVER_TIME};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_setattr_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

/* ---- looking a file up ---- */

/* err: 0 for the file that is looked for; -EBADMSG: something else has its name. */
static void looked(struct nfs_task *t, int err)
{
    switch (t->op->verb) {
    case SHARE_READ:
        if (err < 0) {
            nfs_task_end(t, err);
            break;
        }
        t->chunk = nfs_chunk_bytes(share_op_file_bytes(t->op), t->b->conn.read_bytes);
        nfs_task_next(t, read_data_step);
        break;
    case SHARE_WRITE:
        if (err == -ENOENT || err == -EBADMSG)
            nfs_task_next(t, nfs_create_step);
        else
            nfs_task_end(t, err == 0 ? -EEXIST : err);
        break;
    case SHARE_TOUCH:
        if (err == 0 || err == -EBADMSG)
            nfs_task_next(t, set_time_step);
        else
            nfs_task_end(t, err);
        break;
    default:
        nfs_task_end(t, err);
    }
}

static void attributes_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const GETATTR3res *got = res;

    (void)call;
    if (got->status == NFS3_OK)
        looked(t, file_fits(t, &got->GETATTR3res_u.resok.obj_attributes));
    else
        looked(t, gone_errno(got->status));
}

/* For servers that leave them out. */
static void attributes_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, attributes_reply);
    GETATTR3args args = {.object = nfs_fh(&t->file)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_getattr_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}

static void look_reply(struct nfs_task *t, const struct nfs_call *call, const void *res)
{
    const LOOKUP3res *found = res;
    const LOOKUP3resok *ok = &found->LOOKUP3res_u.resok;

    (void)call;
    if (found->status != NFS3_OK)
        looked(t, nfs_missing_errno(nfs_status_errno(found->status),
                                    &found->LOOKUP3res_u.resfail.dir_attributes));
    else if (!nfs_handle_set(&t->file, ok->object.data.data_val, ok->object.data.data_len))
        looked(t, -EPROTO);
    else if (ok->obj_attributes.attributes_follow)
        looked(t, file_fits(t, &ok->obj_attributes.post_op_attr_u.attributes));
    else
        nfs_task_next(t, attributes_step);
}

void nfs_look_step(struct nfs_task *t)
{
    struct nfs_call *call = nfs_call_new(t, look_reply);
    LOOKUP3args args = {.what = nfs_in_bucket(t, t->op->name)};

    if (call)
        nfs_call_sent(call,
                      rpc_nfs3_lookup_async(nfs_conn_rpc(&t->b->conn), nfs_call_cb, &args, call));
}
