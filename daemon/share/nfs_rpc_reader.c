#include "daemon/share/nfs_rpc.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LAST_FRAGMENT 0x80000000u
#define VERIFIER_MAX_BYTES 400u

int nfs_rpc_reader_init(struct nfs_rpc_reader *in)
{
    memset(in, 0, sizeof(*in));
    in->record = malloc(NFS_RPC_REPLY_BYTES + NFS_RPC_STAGE_BYTES);
    if (!in->record)
        return -ENOMEM;
    in->stage = in->record + NFS_RPC_REPLY_BYTES;
    return 0;
}

void nfs_rpc_reader_close(struct nfs_rpc_reader *in)
{
    free(in->record);
    in->record = NULL;
}

/* ---- a reply's header ---- */

static int accepted_errno(uint32_t state)
{
    enum { SUCCESS, PROGRAM_UNAVAILABLE, PROGRAM_MISMATCH, PROCEDURE_UNAVAILABLE, GARBAGE, SYSTEM };

    switch (state) {
    case SUCCESS:
        return 0;
    case PROGRAM_UNAVAILABLE:
    case PROGRAM_MISMATCH:
    case PROCEDURE_UNAVAILABLE:
        return -EPROTONOSUPPORT;
    default: /* GARBAGE: what it took for arguments */
        return -EIO;
    }
}

/* Leaves x at the procedure's results; x is bad when the header is malformed or incomplete. */
static int header_get(struct nfs_xdr *x)
{
    enum { REPLY = 1, ACCEPTED = 0, DENIED = 1 };
    uint32_t state, n;

    nfs_xdr_skip(x, 4); /* number */
    if (nfs_xdr_u32(x) != REPLY)
        x->bad = true;
    state = nfs_xdr_u32(x);
    if (state == DENIED)
        return -EACCES;
    if (state != ACCEPTED)
        x->bad = true;
    nfs_xdr_skip(x, 4); /* the verifier's kind */
    (void)nfs_xdr_opaque(x, VERIFIER_MAX_BYTES, &n);
    return accepted_errno(nfs_xdr_u32(x));
}

/* ---- records ---- */

static void record_begin(struct nfs_rpc_reader *in)
{
    in->last = in->bulk = false;
    in->announced = in->record_bytes = in->bulk_bytes = in->bulk_at = 0;
    in->call = NULL;
}

static int record_end(struct nfs_rpc *r)
{
    struct nfs_rpc_reader *in = &r->reader;
    struct nfs_xdr x = {in->record, in->record + in->record_bytes, false};
    struct nfs_rpc_call *call = in->call;
    int status;

    if (!call || in->bulk_at < in->bulk_bytes)
        return -EPROTO;
    status = header_get(&x);
    if (x.bad)
        return -EPROTO;
    record_begin(in);
    list_remove(&call->link);
    return call->done_cb(call, status, &x);
}

static int mark_take(struct nfs_rpc *r)
{
    struct nfs_rpc_reader *in = &r->reader;
    uint32_t mark;

    memcpy(&mark, in->mark, sizeof(mark));
    mark = ntohl(mark);
    in->mark_bytes = 0;
    in->left = mark & ~LAST_FRAGMENT;
    in->last = (mark & LAST_FRAGMENT) != 0;
    if (in->left > NFS_RPC_REPLY_MAX_BYTES - in->announced)
        return -EPROTO;
    in->announced += in->left;
    if (in->call && in->announced > in->call->reply_bytes)
        return -EPROTO;
    if (in->left == 0)
        return in->last ? record_end(r) : -EPROTO; /* an empty fragment must be the last */
    return 0;
}

/* Copies bytes of the file that were received elsewhere. What follows them is padding. */
static void bulk_take(struct nfs_rpc_reader *in, const uint8_t *bytes, uint32_t n)
{
    while (n > 0 && in->bulk_at < in->bulk_bytes) {
        struct iovec to = in->call->land_cb(in->call, in->bulk_at);
        uint32_t piece = in->bulk_bytes - in->bulk_at;

        piece = piece < n ? piece : n;
        piece = piece < to.iov_len ? piece : (uint32_t)to.iov_len;
        if (to.iov_base)
            memcpy(to.iov_base, bytes, piece);
        in->bulk_at += piece;
        bytes += piece;
        n -= piece;
    }
}

/* Do the file's bytes begin in what was received so far? */
static int bulk_find(struct nfs_rpc_reader *in)
{
    struct nfs_xdr x = {in->record, in->record + in->record_bytes, false};
    uint32_t bytes = 0, head;
    int found = header_get(&x);

    if (found < 0 || x.bad)
        return 0;
    found = in->call->bulk_cb(in->call, &x, &bytes);
    if (found <= 0)
        return found;
    head = (uint32_t)(x.at - in->record);
    in->bulk = true;
    in->bulk_bytes = bytes;
    bulk_take(in, in->record + head, in->record_bytes - head);
    in->record_bytes = head;
    return 0;
}

static int call_find(struct nfs_rpc *r)
{
    struct nfs_rpc_reader *in = &r->reader;
    uint32_t number;

    memcpy(&number, in->record, sizeof(number));
    in->call = nfs_rpc_find(r, ntohl(number));
    return in->call && in->announced <= in->call->reply_bytes ? 0 : -EPROTO;
}

static int record_take(struct nfs_rpc *r, const uint8_t *bytes, uint32_t n)
{
    struct nfs_rpc_reader *in = &r->reader;
    uint32_t before = in->record_bytes;

    if (in->bulk) {
        bulk_take(in, bytes, n);
        return 0;
    }
    if (n > NFS_RPC_REPLY_BYTES - in->record_bytes)
        return -EPROTO;
    memcpy(in->record + in->record_bytes, bytes, n);
    in->record_bytes += n;
    if (!in->call && in->record_bytes >= 4) {
        int err = call_find(r);

        if (err < 0)
            return err;
    }
    return in->call && in->call->bulk_cb && before < NFS_RPC_HEAD_BYTES ? bulk_find(in) : 0;
}

/* Where the current fragment's next bytes of the file can be received directly. */
static struct iovec direct(const struct nfs_rpc_reader *in)
{
    struct iovec to = {0};
    size_t most;

    if (in->left == 0 || in->bulk_at == in->bulk_bytes)
        return to;
    to = in->call->land_cb(in->call, in->bulk_at);
    most = in->bulk_bytes - in->bulk_at;
    most = most < in->left ? most : in->left;
    to.iov_len = !to.iov_base ? 0 : to.iov_len < most ? to.iov_len : most;
    return to;
}

int nfs_rpc_buffers(struct nfs_rpc *r, struct iovec into[2])
{
    struct nfs_rpc_reader *in = &r->reader;

    into[0] = direct(in);
    into[1] = (struct iovec){in->stage, NFS_RPC_STAGE_BYTES};
    return 2;
}

static int stage_take(struct nfs_rpc *r, const uint8_t *at, size_t n)
{
    struct nfs_rpc_reader *in = &r->reader;
    int err = 0;

    while (n > 0 && err == 0) {
        uint32_t piece = in->left < n ? in->left : (uint32_t)n;

        if (in->left == 0) {
            piece = 1;
            in->mark[in->mark_bytes++] = *at;
            if (in->mark_bytes == sizeof(in->mark))
                err = mark_take(r);
        } else {
            err = record_take(r, at, piece);
            in->left -= piece;
            if (err == 0 && in->left == 0 && in->last)
                err = record_end(r);
        }
        at += piece;
        n -= piece;
    }
    return err;
}

int nfs_rpc_take(struct nfs_rpc *r, const struct iovec *into, size_t n)
{
    struct nfs_rpc_reader *in = &r->reader;
    size_t placed = n < into[0].iov_len ? n : into[0].iov_len;

    if (placed > 0) {
        in->bulk_at += (uint32_t)placed;
        in->left -= (uint32_t)placed;
        if (in->left == 0 && in->last) {
            int err = record_end(r);

            if (err < 0)
                return err;
        }
    }
    return stage_take(r, in->stage, n - placed);
}
