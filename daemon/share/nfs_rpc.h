/* One TCP connection of ONC RPC (RFC 5531), on a descriptor that doesn't block: requests out in the
 * order in which they were sent, replies in by their number. Bytes of a file are not copied: they
 * go out from where they lie, and come in where they are to be.
 *
 * Promise: a call that was sent ends once, by its `done`, or by nfs_rpc_close; none is sent twice.
 * What the server says is taken for nothing but bytes: a reply to nobody, one that is longer than
 * its call allows and one that can't be taken apart are -EPROTO, whereupon the connection is to be
 * closed. Threads: the loop's. */
#ifndef UCMD_SHARE_NFS_RPC_H
#define UCMD_SHARE_NFS_RPC_H

#include "daemon/base/list.h"
#include "daemon/share/nfs_proc.h"

#include <stddef.h>
#include <sys/uio.h>

#define NFS_RPC_REQUEST_BYTES 1536u        /* without a file's bytes; an export's path fits */
#define NFS_RPC_REPLY_BYTES (128u << 10)   /* without a file's bytes */
#define NFS_RPC_REPLY_MAX_BYTES (2u << 20) /* with them */
#define NFS_RPC_HEAD_BYTES 1024u           /* what comes before them is shorter */
#define NFS_RPC_STAGE_BYTES (16u << 10)
#define NFS_RPC_CREDENTIAL_BYTES 320u
#define NFS_RPC_BUCKETS 64u

struct nfs_rpc_call {
    struct list link;
    uint32_t number;
    /* 0 and what follows the reply's header; or what the server said instead of it: -EACCES, -EIO,
     * -EPROTONOSUPPORT; or nfs_rpc_close's error. Below 0: the connection is no good. */
    int (*done)(struct nfs_rpc_call *call, int status, struct nfs_xdr *reply);
    /* Of a reply that ends with a file's bytes, else NULL. At `head`: what follows the reply's
     * header, as far as it has come. 1: *bytes of them follow; 0: not yet, or there are none;
     * -EPROTO. */
    int (*bulk)(struct nfs_rpc_call *call, struct nfs_xdr *head, uint32_t *bytes);
    /* Where those from `at` on belong; iov_base NULL: nowhere. At least one byte. Asked again at
     * every turn: who they are for may be gone. */
    struct iovec (*land)(struct nfs_rpc_call *call, uint32_t at);
    uint32_t reply_bytes; /* the longest reply that makes sense */
    /* The request: these, then the payload, padded. */
    struct nfs_xdr_out out;
    struct iovec payload[2];
    size_t bytes, sent;
    void *copy; /* of the payload, when its owner went before it was sent */
    uint8_t request[NFS_RPC_REQUEST_BYTES];
};

/* Where the stream of replies is. */
struct nfs_rpc_reader {
    uint8_t mark[4];
    uint32_t mark_bytes;
    uint32_t left; /* of the fragment */
    bool last;     /* it is the record's last one */
    uint32_t announced, record_bytes;
    struct nfs_rpc_call *call; /* whose reply it is, as soon as that is known */
    bool bulk;
    uint32_t bulk_bytes, bulk_at;
    uint8_t *record;
    uint8_t *stage;
};

struct nfs_rpc {
    int fd;
    uint32_t next_number;
    uint8_t credential[NFS_RPC_CREDENTIAL_BYTES];
    uint32_t credential_bytes;
    struct list sending; /* of nfs_rpc_call.link; the first one may be sent in part */
    struct list awaiting[NFS_RPC_BUCKETS];
    struct nfs_rpc_reader reader;
};

/* fd: its own from now on, also when this fails. uid, gid: whom the server is to take us for. */
int nfs_rpc_init(struct nfs_rpc *r, int fd, uint32_t first_number, uint32_t uid, uint32_t gid);
/* Calls end with `error` from inside. Not from inside nfs_rpc_read. */
void nfs_rpc_close(struct nfs_rpc *r, int error);

/* Sets all of the call; `done` and what else is not zero are set then, and the arguments put into
 * call->out. */
void nfs_rpc_begin(struct nfs_rpc *r, struct nfs_rpc_call *call, enum nfs_proc proc);
/* Queued, or -EINVAL: it does not fit. The call ends later. */
int nfs_rpc_send(struct nfs_rpc *r, struct nfs_rpc_call *call);
/* What is queued goes out as far as the socket takes it. 0 or -errno. */
int nfs_rpc_flush(struct nfs_rpc *r);
bool nfs_rpc_sending(const struct nfs_rpc *r);
/* What has come is taken, at most about a MiB of it. 0 or -errno; -ECONNRESET at its end. */
int nfs_rpc_read(struct nfs_rpc *r);
/* The payload of a call that is queued belongs to somebody else from now on. 1: the call was not
 * begun to be sent, and is the caller's again. 0, -ENOMEM. */
int nfs_rpc_payload_gone(struct nfs_rpc *r, struct nfs_rpc_call *call);

/* ---- nfs_rpc_reader.c; tests use it without a socket ---- */

int nfs_rpc_reader_init(struct nfs_rpc_reader *in);
void nfs_rpc_reader_close(struct nfs_rpc_reader *in);
/* Where the next bytes of the stream go: one or two pieces. */
int nfs_rpc_room(struct nfs_rpc *r, struct iovec room[2]);
/* n bytes are there: calls end from inside. 0, or what one of them or the reader says of it. */
int nfs_rpc_take(struct nfs_rpc *r, const struct iovec *room, size_t n);
/* The call that was sent under this number, or NULL. */
struct nfs_rpc_call *nfs_rpc_find(struct nfs_rpc *r, uint32_t number);

#endif
