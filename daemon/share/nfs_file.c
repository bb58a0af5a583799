#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <string.h>

#define CHUNK_ALIGN 4096u

static int file_fits(const struct nfs_task *t, const struct nfs_attributes *a)
{
    bool fits = a->type == NFS_TYPE_FILE && a->bytes == share_op_file_bytes(t->op);

    t->op->mtime_ns = a->mtime_ns;
    return fits ? 0 : -EBADMSG;
}

uint32_t nfs_chunk_bytes(uint64_t all, uint32_t max)
{
    uint64_t n = (all + max - 1) / max, chunk = (all + n - 1) / n;

    chunk = (chunk + CHUNK_ALIGN - 1) / CHUNK_ALIGN * CHUNK_ALIGN;
    return chunk < max ? (uint32_t)chunk : max;
}

/* For requests by a file's handle: a stale one means that another host removed the file. */
static int gone_errno(uint32_t status)
{
    return status == NFS_ERR_STALE ? -ENOENT : nfs_status_errno(status);
}

/* ---- reading ---- */

/* Bytes of the file go to header and payload, unless the operation was cancelled. */
static struct iovec read_land_cb(struct nfs_rpc_call *rpc, uint32_t at)
{
    const struct nfs_call *call = LIST_ENTRY(rpc, struct nfs_call, rpc);
    struct share_op *op = call->task->over ? NULL : call->task->op;
    uint64_t place = call->at + at;

    if (!op)
        return (struct iovec){NULL, call->n - at};
    if (place < BLOCK_FILE_HEADER_BYTES)
        return (struct iovec){op->header + place, BLOCK_FILE_HEADER_BYTES - place};
    return (struct iovec){(uint8_t *)op->data + (place - BLOCK_FILE_HEADER_BYTES), call->n - at};
}

/* A reply with more bytes than requested has no room. */
static int read_bulk_cb(struct nfs_rpc_call *rpc, struct nfs_xdr *head, uint32_t *bytes)
{
    const struct nfs_call *call = LIST_ENTRY(rpc, struct nfs_call, rpc);
    struct nfs_reply reply;

    if (nfs_reply_decode(NFS_READ, head, &reply) < 0 || reply.status != NFS_OK)
        return 0;
    if (reply.count > call->n)
        return -EPROTO;
    *bytes = reply.count;
    return 1;
}

static void read_send(struct nfs_task *t, uint64_t at, uint32_t n);

static void read_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                          const struct nfs_reply *r)
{
    if (r->status != NFS_OK) {
        nfs_task_end(t, gone_errno(r->status));
        return;
    }
    if (r->count == 0) {
        nfs_task_end(t, -EBADMSG);
        return;
    }
    t->moved += r->count;
    if (r->count < call->n)
        read_send(t, call->at + r->count, call->n - r->count); /* a short read: the rest */
    else if (t->moved == share_op_file_bytes(t->op))
        nfs_task_end(t, share_op_verify(t->op));
}

static void read_send(struct nfs_task *t, uint64_t at, uint32_t n)
{
    struct nfs_call *call = nfs_call_new(t, NFS_READ, read_reply_cb);

    if (!call)
        return;
    call->at = at;
    call->n = n;
    call->rpc.bulk_cb = read_bulk_cb;
    call->rpc.land_cb = read_land_cb;
    call->rpc.reply_bytes = NFS_RPC_HEAD_BYTES + n;
    nfs_put_read(&call->rpc.out, &t->file, at, n);
    nfs_call_send(call);
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

static void remove_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                            const struct nfs_reply *r)
{
    int err = nfs_missing_errno(nfs_status_errno(r->status), &r->folder);

    (void)call;
    nfs_task_end(t, err == -EISDIR ? -EBADMSG : err);
}

void nfs_remove_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_REMOVE, &t->folder, t->op->name, remove_reply_cb);
}

static void touched_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                             const struct nfs_reply *r)
{
    (void)call;
    nfs_task_end(t, gone_errno(r->status));
}

static void set_time_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_SETATTR, &t->file, NULL, touched_reply_cb);
}

/* ---- looking a file up ---- */

/* err: 0: the file exists; -EBADMSG: something else has its name. */
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

static void attributes_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                                const struct nfs_reply *r)
{
    (void)call;
    looked(t, r->status == NFS_OK ? file_fits(t, &r->attributes) : gone_errno(r->status));
}

/* For servers whose LOOKUP has no attributes. */
static void attributes_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_GETATTR, &t->file, NULL, attributes_reply_cb);
}

static void look_reply_cb(struct nfs_task *t, const struct nfs_call *call,
                          const struct nfs_reply *r)
{
    (void)call;
    t->file = r->handle;
    if (r->status != NFS_OK)
        looked(t, nfs_missing_errno(nfs_status_errno(r->status), &r->folder));
    else if (r->attributes.known)
        looked(t, file_fits(t, &r->attributes));
    else
        nfs_task_next(t, attributes_step);
}

void nfs_look_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_LOOKUP, &t->folder, t->op->name, look_reply_cb);
}
