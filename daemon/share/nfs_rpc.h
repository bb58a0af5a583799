/* One TCP connection of ONC RPC (RFC 5531), on a non-blocking descriptor: requests go out in the
 * order of nfs_rpc_send, replies are matched by number. Bytes of a file are sent from the caller's
 * memory and received into it.
 *
 * Promises:
 * - done_cb of a sent call runs once, at the latest in nfs_rpc_close; no call is sent twice.
 * - Nothing a server sends is trusted. A reply to no call, one longer than its call allows, and one
 *   that can't be decoded are -EPROTO; the caller then closes the connection.
 *
 * Threads: the loop. */
#ifndef UCMD_SHARE_NFS_RPC_H
#define UCMD_SHARE_NFS_RPC_H

#include "daemon/base/list.h"
#include "daemon/share/nfs_proc.h"

#include <stddef.h>
#include <sys/uio.h>

#define NFS_RPC_REQUEST_BYTES 1536u        /* without a file's bytes; an export's path fits */
#define NFS_RPC_REPLY_BYTES (128u << 10)   /* without a file's bytes */
#define NFS_RPC_REPLY_MAX_BYTES (2u << 20) /* with them */
#define NFS_RPC_HEAD_BYTES 1024u           /* bound of what comes before them */
#define NFS_RPC_STAGE_BYTES (16u << 10)
#define NFS_RPC_CREDENTIAL_BYTES 320u

struct nfs_rpc_call {
    struct list link;
    uint32_t number;
    /* status 0: `reply` is at what follows the reply's header. -EACCES, -EIO, -EPROTONOSUPPORT: the
     * server refused the call. Without a reply (NULL): the error of nfs_rpc_close. Returns 0, or
     * -errno to have the connection closed. */
    int (*done_cb)(struct nfs_rpc_call *call, int status, struct nfs_xdr *reply);
    /* For replies that end with bytes of a file, else NULL. `head`: what follows the reply's header,
     * as far as it was received. 1: *bytes follow; 0: unknown yet, or none; -EPROTO. */
    int (*bulk_cb)(struct nfs_rpc_call *call, struct nfs_xdr *head, uint32_t *bytes);
    /* Where the bytes from `at` on go, at least one; iov_base NULL: dropped. Called again for each
     * piece, because the owner of the memory may have gone. */
    struct iovec (*land_cb)(struct nfs_rpc_call *call, uint32_t at);
    uint32_t reply_bytes; /* a longer reply is -EPROTO */
    /* The request: `request`, then the payload, padded. */
    struct nfs_xdr_out out;
    struct iovec payload[2];
    size_t bytes, sent;
    void *copy; /* of the payload, when its owner went while it was being sent */
    uint8_t request[NFS_RPC_REQUEST_BYTES];
};

/* State of the stream of replies. */
struct nfs_rpc_reader {
    uint8_t mark[4];
    uint32_t mark_bytes;
    uint32_t left; /* of the fragment */
    bool last;     /* it is the record's last one */
    uint32_t announced, record_bytes;
    struct nfs_rpc_call *call; /* of the reply, once its number was received */
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
    struct list sending;  /* of nfs_rpc_call.link; the first one may be sent in part */
    struct list awaiting; /* of nfs_rpc_call.link: sent, the oldest first */
    struct nfs_rpc_reader reader;
};

/* Takes fd, also when it fails. uid, gid: of the AUTH_SYS credential. */
int nfs_rpc_init(struct nfs_rpc *r, int fd, uint32_t first_number, uint32_t uid, uint32_t gid);
/* done_cb of all calls runs with `error` before it returns. Not from inside nfs_rpc_read. */
void nfs_rpc_close(struct nfs_rpc *r, int error);

/* Initializes the call. The caller then sets done_cb and what else it needs, and puts the arguments
 * into call->out. */
void nfs_rpc_begin(struct nfs_rpc *r, struct nfs_rpc_call *call, enum nfs_proc proc);
/* 0: queued, done_cb will run; -EINVAL: the arguments do not fit. */
int nfs_rpc_send(struct nfs_rpc *r, struct nfs_rpc_call *call);
/* Sends what the socket takes of the queue. 0 or -errno. */
int nfs_rpc_flush(struct nfs_rpc *r);
bool nfs_rpc_sending(const struct nfs_rpc *r);
/* Receives about a MiB at most. 0 or -errno; -ECONNRESET: the server closed the connection. */
int nfs_rpc_read(struct nfs_rpc *r);
/* The owner of a payload takes it back, once. 1: nothing of the call was sent, and it left the queue;
 * 0: the call goes on, from a copy if it must; -ENOMEM. */
int nfs_rpc_payload_gone(struct nfs_rpc_call *call);

/* ---- nfs_rpc_reader.c; tests use it without a socket ---- */

int nfs_rpc_reader_init(struct nfs_rpc_reader *in);
void nfs_rpc_reader_close(struct nfs_rpc_reader *in);
/* Where the next bytes of the stream go: fills both pieces, returns 2. */
int nfs_rpc_buffers(struct nfs_rpc *r, struct iovec into[2]);
/* n bytes were received into `into`: done_cb of calls runs from inside. 0 or -errno. */
int nfs_rpc_take(struct nfs_rpc *r, const struct iovec *into, size_t n);
/* The call that was sent under this number, or NULL. */
struct nfs_rpc_call *nfs_rpc_find(struct nfs_rpc *r, uint32_t number);

#endif
