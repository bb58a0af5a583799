/* Requests and replies on a connection whose other end the test plays: what is cut in pieces, what
 * lies, and whose memory it is. */
#include "daemon/share/nfs_rpc.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ATTRIBUTES_BYTES 84u
#define PENDING 1

static struct nfs_rpc rpc;
static int peer;

struct asked {
    struct nfs_rpc_call call;
    enum nfs_proc proc;
    struct nfs_reply reply;
    int status;
    uint8_t *data; /* READ: of `bytes`; NULL: its owner went */
    uint32_t bytes, seam;
};

static void begin(void)
{
    int pair[2];

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
    peer = pair[1];
    cr_assert_eq(nfs_rpc_init(&rpc, pair[0], UINT32_MAX, 1000, 1000), 0);
}

static void end(void)
{
    nfs_rpc_close(&rpc, -ECONNRESET);
    close(peer);
}

static int done(struct nfs_rpc_call *call, int status, struct nfs_xdr *x)
{
    struct asked *a = LIST_ENTRY(call, struct asked, call);

    cr_assert_eq(a->status, PENDING, "a call ends once");
    a->status = x && status == 0 ? nfs_reply_decode(a->proc, x, &a->reply) : status;
    return x ? a->status : 0;
}

static int bulk(struct nfs_rpc_call *call, struct nfs_xdr *head, uint32_t *bytes)
{
    struct asked *a = LIST_ENTRY(call, struct asked, call);
    struct nfs_reply r;

    if (nfs_reply_decode(NFS_READ, head, &r) < 0 || r.status != 0)
        return 0;
    *bytes = r.count;
    return r.count > a->bytes ? -EPROTO : 1;
}

static struct iovec land(struct nfs_rpc_call *call, uint32_t at)
{
    struct asked *a = LIST_ENTRY(call, struct asked, call);

    if (!a->data)
        return (struct iovec){NULL, a->bytes - at};
    return (struct iovec){a->data + at, (at < a->seam ? a->seam : a->bytes) - at};
}

static void ask(struct asked *a, enum nfs_proc proc)
{
    static const struct nfs_handle handle = {3, {1, 2, 3}};

    a->proc = proc;
    a->status = PENDING;
    nfs_rpc_begin(&rpc, &a->call, proc);
    a->call.done_cb = done;
    if (proc == NFS_READ) {
        a->call.bulk_cb = bulk;
        a->call.land_cb = land;
        a->call.reply_bytes = NFS_RPC_HEAD_BYTES + a->bytes;
        nfs_put_args(&a->call.out, proc, &(struct nfs_args){.handle = &handle, .n = a->bytes});
    } else {
        nfs_put_args(&a->call.out, NFS_LOOKUP,
                     &(struct nfs_args){.handle = &handle, .name = "name"});
    }
}

static uint64_t peer_takes(uint8_t *out, size_t cap)
{
    uint64_t all = 0;

    for (ssize_t n; all < cap && (n = recv(peer, out + all, cap - all, 0)) > 0; all += (uint64_t)n)
        ;
    return all;
}

static void ask_read(struct asked *a, uint32_t bytes, uint32_t seam)
{
    uint8_t request[NFS_RPC_REQUEST_BYTES];

    a->bytes = bytes;
    a->seam = seam;
    a->data = malloc(bytes);
    cr_assert(a->data);
    memset(a->data, 0xee, bytes);
    ask(a, NFS_READ);
    cr_assert_eq(nfs_rpc_send(&rpc, &a->call), 0);
    cr_assert_eq(nfs_rpc_flush(&rpc), 0);
    cr_assert_gt(peer_takes(request, sizeof(request)), 0);
}

static uint8_t byte_at(uint32_t at)
{
    return (uint8_t)(at * 7 + at / 256);
}

/* A READ's reply with n bytes, which says that it has `said`. */
static uint32_t read_reply(const struct asked *a, uint8_t *out, size_t cap, uint32_t n,
                           uint32_t said)
{
    static const uint32_t attributes[ATTRIBUTES_BYTES / 4];
    struct nfs_xdr_out o = {out, out + cap, false};

    nfs_xdr_put_u32(&o, a->call.number);
    nfs_xdr_put_u32(&o, 1);
    for (unsigned i = 0; i < 5; i++) /* accepted, verifier, success; and READ's own success */
        nfs_xdr_put_u32(&o, 0);
    nfs_xdr_put_u32(&o, 1);
    nfs_xdr_put_bytes(&o, attributes, ATTRIBUTES_BYTES);
    nfs_xdr_put_u32(&o, said);
    nfs_xdr_put_u32(&o, 1);
    nfs_xdr_put_u32(&o, said);
    cr_assert_leq(n + 4, (size_t)(o.end - o.at));
    for (uint32_t i = 0; i < n; i++)
        o.at[i] = byte_at(i);
    o.at += n;
    memset(o.at, 0, 4);
    o.at += nfs_xdr_padding(n);
    cr_assert_not(o.bad);
    return (uint32_t)(o.at - out);
}

static int say(const void *bytes, size_t n)
{
    cr_assert_eq(send(peer, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
    return nfs_rpc_read(&rpc);
}

static int say_fragment(const uint8_t *bytes, uint32_t n, bool last)
{
    uint32_t mark = htonl(n | (last ? 0x80000000u : 0));
    int err = say(&mark, sizeof(mark));

    return err < 0 || n == 0 ? err : say(bytes, n);
}

static void assert_read(const struct asked *a, uint32_t n)
{
    cr_assert_eq(a->status, 0);
    cr_assert_eq(a->reply.count, n);
    for (uint32_t i = 0; i < n; i++)
        cr_assert_eq(a->data[i], byte_at(i));
    for (uint32_t i = n; i < a->bytes; i++)
        cr_assert_eq(a->data[i], 0xee);
}

/* The calls are static: what a test leaves unanswered ends in `end`, after the test has returned. */
Test(nfs_rpc, replies_come_in_fragments_and_pieces_of_any_length, .init = begin, .fini = end)
{
    static uint8_t reply[8192];

    for (uint32_t cut = 1; cut < 700; cut += cut < 180 ? 1 : 97) {
        for (uint32_t piece = 1; piece < 900; piece += 211) {
            struct asked a = {0};
            uint32_t n, fragment;

            ask_read(&a, 701, 64);
            n = read_reply(&a, reply, sizeof(reply), 701 - cut % 5, 701 - cut % 5);
            cr_assert_eq(say_fragment(reply, cut, false), 0);
            for (uint32_t at = cut; at < n; at += fragment) {
                fragment = piece < n - at ? piece : n - at;
                cr_assert_eq(say_fragment(reply + at, fragment, at + fragment == n), 0);
            }
            assert_read(&a, 701 - cut % 5);
            free(a.data);
        }
    }
}

Test(nfs_rpc, replies_are_told_apart_by_their_number, .init = begin, .fini = end)
{
    static uint8_t reply[4096];
    static struct asked a[3] = {{.status = 0}};
    uint32_t n;

    for (unsigned i = 0; i < 3; i++)
        ask_read(&a[i], 1000, 64);
    for (unsigned i = 3; i-- > 0;) {
        n = read_reply(&a[i], reply, sizeof(reply), 100 * i, 100 * i);
        cr_assert_eq(say_fragment(reply, n, true), 0);
        assert_read(&a[i], 100 * i);
        free(a[i].data);
    }
    cr_assert_eq(say_fragment(reply, n, true), -EPROTO, "nobody asks any more");
}

Test(nfs_rpc, what_is_given_up_lands_nowhere, .init = begin, .fini = end)
{
    static uint8_t reply[8192];
    static struct asked a = {0};
    uint8_t *data;
    uint32_t n;

    ask_read(&a, 5000, 64);
    n = read_reply(&a, reply, sizeof(reply), 5000, 5000);
    cr_assert_eq(say_fragment(reply, 1000, false), 0);
    data = a.data;
    a.data = NULL;
    memset(data, 0x5a, 5000);
    cr_assert_eq(say_fragment(reply + 1000, n - 1000, true), 0);
    cr_assert_eq(a.status, 0);
    for (unsigned i = 0; i < 5000; i++)
        cr_assert_eq(data[i], 0x5a);
    free(data);
}

static int lie(uint32_t asked_bytes, uint32_t sent, uint32_t said, uint32_t record)
{
    static uint8_t reply[16384];
    static struct asked a = {0};
    uint32_t n, mark;
    int err;

    begin();
    ask_read(&a, asked_bytes, 64);
    n = read_reply(&a, reply + 4, sizeof(reply) - 4, sent, said);
    mark = htonl(0x80000000u | (record ? record : n));
    memcpy(reply, &mark, 4);
    err = say(reply, 4 + (record && record < n ? record : n));
    for (uint32_t i = sent; i < asked_bytes; i++)
        cr_assert_eq(a.data[i], 0xee);
    end();
    cr_assert_neq(a.status, PENDING);
    free(a.data);
    return err;
}

Test(nfs_rpc, lengths_that_are_none_cost_the_connection)
{
    cr_assert_eq(lie(1000, 1000, 1000, 0), 0);
    cr_assert_eq(lie(1000, 1004, 1004, 0), -EPROTO, "more than there is room for");
    cr_assert_eq(lie(1000, 0, 0x7ffffff0, 0), -EPROTO);
    cr_assert_eq(lie(1000, 0, 0xfffffffe, 0), -EPROTO);
    cr_assert_eq(lie(1000, 800, 1000, 0), -EPROTO, "fewer than it says");
    cr_assert_eq(lie(1000, 1000, 1000, 0x7fffffff), -EPROTO);
    cr_assert_eq(lie(1000, 1000, 1000, NFS_RPC_HEAD_BYTES + 1001), -EPROTO);
    for (uint32_t record = 1; record < 128; record++) /* up to the bytes */
        cr_assert_eq(lie(0, 0, 0, record), -EPROTO, "%u", record);
}

/* What lies in two places, is longer than the socket takes at once, and is not a multiple of 4. */
Test(nfs_rpc, payloads_go_out_from_where_they_lie_or_from_a_copy, .init = begin, .fini = end)
{
    enum { HEAD = 61, BYTES = 2000002, CAP = BYTES + 4096 };
    uint8_t head[HEAD], *data = malloc(BYTES), *got = malloc(CAP);
    static struct asked first = {0}, second = {0};
    uint64_t n;
    uint32_t mark;

    cr_assert(data && got);
    for (uint32_t i = 0; i < BYTES; i++)
        data[i] = byte_at(i + HEAD);
    for (uint32_t i = 0; i < HEAD; i++)
        head[i] = byte_at(i);
    ask(&first, NFS_WRITE);
    ask(&second, NFS_WRITE);
    first.call.payload[0] = second.call.payload[0] = (struct iovec){head, HEAD};
    first.call.payload[1] = second.call.payload[1] = (struct iovec){data, BYTES};
    cr_assert_eq(nfs_rpc_send(&rpc, &first.call), 0);
    cr_assert_eq(nfs_rpc_send(&rpc, &second.call), 0);
    cr_assert_eq(nfs_rpc_flush(&rpc), 0);
    cr_assert(nfs_rpc_sending(&rpc));
    cr_assert_eq(nfs_rpc_payload_gone(&first.call), 0, "half of it is out");
    cr_assert_eq(nfs_rpc_payload_gone(&second.call), 1, "never sent");
    memset(head, 0, sizeof(head));
    free(data);
    for (n = 0; nfs_rpc_sending(&rpc);) {
        n += peer_takes(got + n, CAP - n);
        cr_assert_eq(nfs_rpc_flush(&rpc), 0);
    }
    n += peer_takes(got + n, CAP - n);
    memcpy(&mark, got, 4);
    cr_assert_eq(n, 4 + (ntohl(mark) & 0x7fffffff));
    cr_assert_eq(n % 4, 0);
    n -= nfs_xdr_padding(HEAD + BYTES);
    for (uint32_t i = 0; i < HEAD + BYTES; i++)
        cr_assert_eq(got[n - HEAD - BYTES + i], byte_at(i));
    free(got);
}

Test(nfs_rpc, calls_end_with_the_connection, .init = begin, .fini = end)
{
    static struct asked sent = {0}, queued = {0};

    ask_read(&sent, 10, 4);
    ask(&queued, NFS_LOOKUP);
    cr_assert_eq(nfs_rpc_send(&rpc, &queued.call), 0);
    close(peer);
    cr_assert_eq(nfs_rpc_read(&rpc), -ECONNRESET);
    nfs_rpc_close(&rpc, -ECONNRESET);
    cr_assert_eq(sent.status, -ECONNRESET);
    cr_assert_eq(queued.status, -ECONNRESET);
    free(sent.data);
    begin();
}

Test(nfs_rpc, a_request_that_does_not_fit_is_not_sent, .init = begin, .fini = end)
{
    char name[NFS_RPC_REQUEST_BYTES];
    static struct asked a = {0};

    memset(name, 'x', sizeof(name) - 1);
    name[sizeof(name) - 1] = 0;
    ask(&a, NFS_LOOKUP);
    nfs_xdr_put_string(&a.call.out, name);
    cr_assert_eq(nfs_rpc_send(&rpc, &a.call), -EINVAL);
}
