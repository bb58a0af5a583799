/* The bytes of a block file, header and payload, in requests of equal size that are under way side by
 * side. They are received into the operation's memory and sent from it. */
#include "daemon/share/nfs_task.h"

#include <errno.h>
#include <string.h>

#define CHUNK_ALIGN 4096u

/* Bytes of one request when `all` are divided into equal requests of at most `max`. */
static uint32_t chunk_bytes(uint64_t all, uint32_t max)
{
    uint64_t n = (all + max - 1) / max, chunk = (all + n - 1) / n;

    chunk = (chunk + CHUNK_ALIGN - 1) / CHUNK_ALIGN * CHUNK_ALIGN;
    return chunk < max ? (uint32_t)chunk : max;
}

/* ---- all bytes were written ---- */

/* A new verifier: the server was restarted and may have lost unstable writes. */
static void verifier_check(struct nfs_task *t, const uint8_t verifier[NFS_VERIFIER_BYTES])
{
    if (!t->verifier_known)
        memcpy(t->verifier, verifier, sizeof(t->verifier));
    else if (memcmp(t->verifier, verifier, sizeof(t->verifier)) != 0)
        t->verifier_changed = true;
    t->verifier_known = true;
}

static void committed_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    if (r->status != NFS_OK) {
        nfs_task_end(t, nfs_status_errno(r->status));
        return;
    }
    verifier_check(t, r->verifier);
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, nfs_rename_step);
}

static void commit_step(struct nfs_task *t)
{
    nfs_ask(t, NFS_COMMIT, &t->file, NULL, committed_reply_cb);
}

static void all_written(struct nfs_task *t)
{
    if (t->verifier_changed)
        nfs_task_end(t, -ECONNRESET);
    else
        nfs_task_next(t, t->op->sync ? commit_step : nfs_rename_step);
}

/* ---- requests ---- */

/* Bytes of the file go to header and payload, unless the operation was cancelled. */
static struct iovec read_land_cb(struct nfs_rpc_call *rpc, uint32_t at)
{
    const struct nfs_call *call = LIST_ENTRY(rpc, struct nfs_call, rpc);
    struct share_op *op = call->task->over ? NULL : call->task->op;
    uint64_t from = call->args.at + at;

    if (!op)
        return (struct iovec){NULL, call->args.n - at};
    if (from < share_op_head_bytes(op))
        return (struct iovec){op->header + from, share_op_head_bytes(op) - from};
    return (struct iovec){(uint8_t *)op->data + (from - share_op_head_bytes(op)),
                          call->args.n - at};
}

/* A reply with more bytes than requested does not fit. */
static int read_bulk_cb(struct nfs_rpc_call *rpc, struct nfs_xdr *head, uint32_t *bytes)
{
    const struct nfs_call *call = LIST_ENTRY(rpc, struct nfs_call, rpc);
    struct nfs_reply reply;

    if (nfs_reply_decode(NFS_READ, head, &reply) < 0 || reply.status != NFS_OK)
        return 0;
    if (reply.count > call->args.n)
        return -EPROTO;
    *bytes = reply.count;
    return 1;
}

/* Bytes that a WRITE sends; the operation's memory is in use until its reply has come. */
static void payload_set(struct nfs_call *call)
{
    struct share_op *op = call->task->op;
    uint64_t at = call->args.at, n = call->args.n;
    uint64_t heads = share_op_head_bytes(op), head = at < heads ? heads - at : 0;

    head = head < n ? head : n;
    if (head > 0)
        call->rpc.payload[0] = (struct iovec){op->header + at, head};
    if (n > head)
        call->rpc.payload[1] = (struct iovec){(uint8_t *)op->data + (at + head - heads), n - head};
    list_push_back(&call->task->payloads, &call->of_task);
}

static void data_send(struct nfs_task *t, uint64_t at, uint32_t n);

static void data_reply_cb(struct nfs_task *t, const struct nfs_reply *r)
{
    bool write = t->op->verb == SHARE_WRITE;
    uint32_t wanted = r->args->n;

    if (r->status != NFS_OK) {
        nfs_task_end(t, write ? nfs_status_errno(r->status) : nfs_gone_errno(r->status));
        return;
    }
    if (r->count == 0 || r->count > wanted) {
        nfs_task_end(t, write ? -EPROTO : -EBADMSG);
        return;
    }
    if (write)
        verifier_check(t, r->verifier);
    t->moved += r->count;
    if (r->count < wanted) /* a part of it: the rest */
        data_send(t, r->args->at + r->count, wanted - r->count);
    else if (t->moved == share_op_file_bytes(t->op) && write)
        all_written(t);
    else if (t->moved == share_op_file_bytes(t->op))
        nfs_task_end(t, share_op_verify(t->op));
}

static void data_send(struct nfs_task *t, uint64_t at, uint32_t n)
{
    const struct nfs_args args = {.handle = &t->file, .at = at, .n = n};
    bool write = t->op->verb == SHARE_WRITE;
    struct nfs_call *call = nfs_call_new(t, write ? NFS_WRITE : NFS_READ, &args, data_reply_cb);

    if (!call)
        return;
    if (write) {
        payload_set(call);
    } else {
        call->rpc.bulk_cb = read_bulk_cb;
        call->rpc.land_cb = read_land_cb;
        call->rpc.reply_bytes = NFS_RPC_HEAD_BYTES + n;
    }
    nfs_call_send(call);
}

static void data_step(struct nfs_task *t)
{
    uint64_t at = t->at, left = share_op_file_bytes(t->op) - at;
    uint32_t n = left < t->chunk ? (uint32_t)left : t->chunk;

    t->at += n;
    if (left > n)
        nfs_task_next(t, data_step);
    data_send(t, at, n);
}

void nfs_data_begin(struct nfs_task *t)
{
    const struct nfs_conn *c = &t->b->conn;
    uint32_t max = t->op->verb == SHARE_WRITE ? c->write_bytes : c->read_bytes;

    t->chunk = chunk_bytes(share_op_file_bytes(t->op), max);
    nfs_task_next(t, data_step);
}
