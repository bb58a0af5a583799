/* Any bytes as what an NFS server sends: as the body of one reply, and as the stream of a
 * connection on which four calls await theirs. Calls end at most once; bytes land in the room of
 * the call that asked for them and nowhere else; what decodes stays within what is there. Traps on
 * any break of these promises. */
#include "daemon/share/nfs_rpc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CALLS 4u
#define ROOM_BYTES 1000u
#define SPLIT 64u /* where the room has a seam, as between header and payload */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

struct asked {
    struct nfs_rpc_call rpc;
    enum nfs_proc proc;
    uint8_t *room;
    unsigned ended;
};

static void must(bool promise)
{
    if (!promise)
        abort();
}

/* READ's reply has its bytes elsewhere. */
static int check_body(enum nfs_proc proc, struct nfs_xdr *x)
{
    const uint8_t *end = x->end;
    struct nfs_reply r;
    struct nfs_entry e;
    bool last;

    if (nfs_reply_decode(proc, x, &r) < 0)
        return -EPROTO;
    must(!x->bad && x->at <= end && r.handle.n <= NFS_HANDLE_BYTES);
    must((proc != NFS_LOOKUP && proc != NFS_MOUNT_MNT) || r.status != 0 || r.handle.n > 0);
    if (proc != NFS_READDIRPLUS || r.status != 0)
        return 0;
    while (nfs_entry_next(&r.entries, &e, &last))
        must(memchr(e.name, 0, sizeof(e.name)) != NULL);
    must(!r.entries.bad && r.entries.at == x->at);
    return 0;
}

static int done(struct nfs_rpc_call *rpc, int status, struct nfs_xdr *x)
{
    struct asked *a = LIST_ENTRY(rpc, struct asked, rpc);

    must(a->ended++ == 0);
    must(x || status == -ECONNRESET);
    return x && status == 0 ? check_body(a->proc, x) : 0;
}

static int bulk(struct nfs_rpc_call *rpc, struct nfs_xdr *head, uint32_t *bytes)
{
    struct nfs_reply r;

    (void)rpc;
    if (nfs_reply_decode(NFS_READ, head, &r) < 0 || r.status != 0)
        return 0;
    *bytes = r.count;
    return r.count > ROOM_BYTES ? -EPROTO : 1;
}

static struct iovec land(struct nfs_rpc_call *rpc, uint32_t at)
{
    struct asked *a = LIST_ENTRY(rpc, struct asked, rpc);

    must(a->ended == 0 && at < ROOM_BYTES);
    if (rpc->number % 2)
        return (struct iovec){NULL, ROOM_BYTES - at};
    return (struct iovec){a->room + at, at < SPLIT ? SPLIT - at : ROOM_BYTES - at};
}

static void ask(struct nfs_rpc *r, struct asked *a, enum nfs_proc proc)
{
    nfs_rpc_begin(r, &a->rpc, proc);
    a->proc = proc;
    a->ended = 0;
    a->room = malloc(ROOM_BYTES);
    must(a->room != NULL);
    a->rpc.done_cb = done;
    if (proc == NFS_READ) {
        a->rpc.bulk_cb = bulk;
        a->rpc.land_cb = land;
        a->rpc.reply_bytes = NFS_RPC_HEAD_BYTES + ROOM_BYTES;
    }
    list_push_back(&r->awaiting, &a->rpc.link);
}

static int feed(struct nfs_rpc *r, const uint8_t *data, size_t n)
{
    struct iovec room[2];
    size_t first;

    must(nfs_rpc_buffers(r, room) == 2 && room[1].iov_len > 0);
    first = n < room[0].iov_len ? n : room[0].iov_len;
    must(n <= first + room[1].iov_len);
    if (first > 0)
        memcpy(room[0].iov_base, data, first);
    memcpy(room[1].iov_base, data + first, n - first);
    return nfs_rpc_take(r, room, n);
}

static void check_stream(const uint8_t *data, size_t n, size_t piece, enum nfs_proc other)
{
    struct asked *asked = malloc(CALLS * sizeof(*asked));
    struct nfs_rpc r;
    int err = 0;

    must(asked && nfs_rpc_init(&r, -1, 0, 1, 1) == 0);
    for (unsigned i = 0; i < CALLS; i++)
        ask(&r, &asked[i], i < 2 ? NFS_READ : other);
    for (size_t at = 0; at < n && err == 0; at += piece) {
        piece = piece < n - at ? piece : n - at;
        err = feed(&r, data + at, piece);
        must(err == 0 || err == -EPROTO);
    }
    nfs_rpc_close(&r, -ECONNRESET);
    for (unsigned i = 0; i < CALLS; i++) {
        must(asked[i].ended == 1);
        free(asked[i].room);
    }
    free(asked);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    enum nfs_proc proc;
    size_t piece;
    uint8_t *own;
    struct nfs_xdr x;

    if (n < 2)
        return 0;
    proc = (enum nfs_proc)(data[0] % NFS_PROCS);
    piece = 1 + (size_t)data[1] * data[1];
    n -= 2;
    own = malloc(n ? n : 1); /* a byte beyond it would be found out */
    must(own != NULL);
    memcpy(own, data + 2, n);
    x = (struct nfs_xdr){own, own + n, false};
    (void)check_body(proc, &x);
    check_stream(own, n, piece < NFS_RPC_STAGE_BYTES ? piece : NFS_RPC_STAGE_BYTES, proc);
    free(own);
    return 0;
}
