#include "daemon/share/nfs_rpc.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LAST_FRAGMENT 0x80000000u
#define RPC_VERSION 2u
#define AUTH_NONE 0u
#define AUTH_SYS 1u
#define HOST_CAP 256   /* of AUTH_SYS's host name: 255 bytes */
#define SEND_PIECES 64 /* of one sendmsg */
#define CALL_PIECES 4  /* request, payload in two, padding */
#define READ_TURNS 16  /* then the loop goes on */
#define READ_BYTES (1u << 20)

static const uint8_t padding[4];

/* ---- begin and end ---- */

static int credential_put(struct nfs_rpc *r, uint32_t uid, uint32_t gid)
{
    struct nfs_xdr_out o = {r->credential, r->credential + sizeof(r->credential), false};
    char host[HOST_CAP];
    uint32_t host_bytes;

    if (gethostname(host, sizeof(host)) < 0)
        return -errno;
    host[sizeof(host) - 1] = 0;
    host_bytes = (uint32_t)strlen(host);
    nfs_xdr_put_u32(&o, AUTH_SYS);
    nfs_xdr_put_u32(&o, 4 + 4 + host_bytes + nfs_xdr_padding(host_bytes) + 4 + 4 + 4);
    nfs_xdr_put_u32(&o, 0); /* a number of no meaning */
    nfs_xdr_put_string(&o, host);
    nfs_xdr_put_u32(&o, uid);
    nfs_xdr_put_u32(&o, gid);
    nfs_xdr_put_u32(&o, 0); /* further groups */
    nfs_xdr_put_u32(&o, AUTH_NONE);
    nfs_xdr_put_u32(&o, 0);
    r->credential_bytes = (uint32_t)(o.at - r->credential);
    return o.bad ? -EINVAL : 0;
}

int nfs_rpc_init(struct nfs_rpc *r, int fd, uint32_t first_number, uint32_t uid, uint32_t gid)
{
    int err;

    memset(r, 0, sizeof(*r));
    r->fd = fd;
    r->next_number = first_number;
    list_init(&r->sending);
    list_init(&r->awaiting);
    err = credential_put(r, uid, gid);
    if (err == 0)
        err = nfs_rpc_reader_init(&r->reader);
    if (err < 0)
        close(fd);
    return err;
}

static void calls_end(struct list *calls, int error)
{
    for (struct list *node; (node = list_pop_front(calls));) {
        struct nfs_rpc_call *call = LIST_ENTRY(node, struct nfs_rpc_call, link);

        free(call->copy);
        call->copy = NULL;
        (void)call->done_cb(call, error, NULL); /* it is being closed */
    }
}

void nfs_rpc_close(struct nfs_rpc *r, int error)
{
    close(r->fd);
    r->fd = -1;
    calls_end(&r->sending, error);
    calls_end(&r->awaiting, error);
    nfs_rpc_reader_close(&r->reader);
}

/* ---- requests ---- */

void nfs_rpc_begin(struct nfs_rpc *r, struct nfs_rpc_call *call, enum nfs_proc proc)
{
    enum { CALL = 0 };

    memset(call, 0, offsetof(struct nfs_rpc_call, request));
    call->reply_bytes = NFS_RPC_REPLY_BYTES;
    call->number = r->next_number++;
    call->out = (struct nfs_xdr_out){call->request, call->request + sizeof(call->request), false};
    nfs_xdr_put_u32(&call->out, 0); /* the record's length, when it is known */
    nfs_xdr_put_u32(&call->out, call->number);
    nfs_xdr_put_u32(&call->out, CALL);
    nfs_xdr_put_u32(&call->out, RPC_VERSION);
    nfs_put_proc(&call->out, proc);
    nfs_xdr_put_bytes(&call->out, r->credential, r->credential_bytes);
}

static size_t payload_bytes(const struct nfs_rpc_call *call)
{
    return call->payload[0].iov_len + call->payload[1].iov_len;
}

int nfs_rpc_send(struct nfs_rpc *r, struct nfs_rpc_call *call)
{
    uint32_t request = (uint32_t)(call->out.at - call->request), mark;

    if (call->out.bad)
        return -EINVAL;
    call->bytes = request + payload_bytes(call);
    call->bytes += nfs_xdr_padding((uint32_t)payload_bytes(call));
    mark = htonl(LAST_FRAGMENT | (uint32_t)(call->bytes - sizeof(mark)));
    memcpy(call->request, &mark, sizeof(mark));
    list_push_back(&r->sending, &call->link);
    return 0;
}

struct nfs_rpc_call *nfs_rpc_find(struct nfs_rpc *r, uint32_t number)
{
    for (struct list *node = r->awaiting.next; node != &r->awaiting; node = node->next) {
        struct nfs_rpc_call *call = LIST_ENTRY(node, struct nfs_rpc_call, link);

        if (call->number == number)
            return call;
    }
    return NULL;
}

/* What is still to be sent of a call. */
static int call_pieces(const struct nfs_rpc_call *call, struct iovec out[CALL_PIECES])
{
    size_t request = (size_t)(call->out.at - call->request), skip = call->sent;
    struct iovec all[CALL_PIECES] = {
        {(void *)(uintptr_t)call->request, request},
        call->payload[0],
        call->payload[1],
        {(void *)(uintptr_t)padding, nfs_xdr_padding((uint32_t)payload_bytes(call))}};
    int n = 0;

    for (int i = 0; i < CALL_PIECES; i++) {
        size_t gone = skip < all[i].iov_len ? skip : all[i].iov_len;

        skip -= gone;
        if (all[i].iov_len > gone)
            out[n++] = (struct iovec){(uint8_t *)all[i].iov_base + gone, all[i].iov_len - gone};
    }
    return n;
}

/* n more bytes were sent: calls that are complete now await their replies. */
static void sent_count(struct nfs_rpc *r, size_t n)
{
    while (n > 0) {
        struct nfs_rpc_call *call = LIST_ENTRY(r->sending.next, struct nfs_rpc_call, link);
        size_t left = call->bytes - call->sent;

        if (n < left) {
            call->sent += n;
            return;
        }
        n -= left;
        call->sent = call->bytes;
        list_remove(&call->link);
        list_push_back(&r->awaiting, &call->link);
        free(call->copy);
        call->copy = NULL;
    }
}

int nfs_rpc_flush(struct nfs_rpc *r)
{
    while (!list_empty(&r->sending)) {
        struct iovec pieces[SEND_PIECES];
        struct msghdr message = {.msg_iov = pieces};
        ssize_t sent;
        int n = 0;

        for (struct list *node = r->sending.next;
             node != &r->sending && n + CALL_PIECES <= SEND_PIECES; node = node->next)
            n += call_pieces(LIST_ENTRY(node, struct nfs_rpc_call, link), pieces + n);
        message.msg_iovlen = (size_t)n;
        sent = sendmsg(r->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
        sent_count(r, (size_t)sent);
    }
    return 0;
}

bool nfs_rpc_sending(const struct nfs_rpc *r)
{
    return !list_empty(&r->sending);
}

/* A request that was sent in part must be completed: the stream would be lost otherwise. */
static int payload_copy(struct nfs_rpc_call *call)
{
    size_t first = call->payload[0].iov_len, all = payload_bytes(call);
    uint8_t *copy = malloc(all);

    if (!copy)
        return -ENOMEM;
    if (first > 0)
        memcpy(copy, call->payload[0].iov_base, first);
    if (all > first)
        memcpy(copy + first, call->payload[1].iov_base, all - first);
    call->copy = copy;
    call->payload[0] = (struct iovec){copy, all};
    call->payload[1] = (struct iovec){0};
    return 0;
}

int nfs_rpc_payload_gone(struct nfs_rpc_call *call)
{
    if (call->sent == call->bytes)
        return 0;
    if (call->sent > 0)
        return payload_copy(call);
    list_remove(&call->link);
    return 1;
}

/* ---- replies ---- */

int nfs_rpc_read(struct nfs_rpc *r)
{
    size_t all = 0;

    for (unsigned i = 0; i < READ_TURNS && all < READ_BYTES; i++) {
        struct iovec into[2];
        int n = nfs_rpc_buffers(r, into), err;
        size_t wanted = into[0].iov_len + into[1].iov_len;
        ssize_t got = readv(r->fd, into, n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
        if (got == 0)
            return -ECONNRESET;
        err = nfs_rpc_take(r, into, (size_t)got);
        if (err < 0)
            return err;
        if ((size_t)got < wanted)
            break; /* that was all */
        all += (size_t)got;
    }
    return 0;
}
