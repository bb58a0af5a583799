#include "tests/integration/roots/nfs_relay.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PIECE_BYTES 65536

static struct sockaddr_in place(int port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static void pair_end(struct nfs_relay *r, unsigned i)
{
    close(r->pairs[i].client);
    close(r->pairs[i].server);
    r->pairs[i] = r->pairs[--r->n];
}

static void pair_begin(struct nfs_relay *r)
{
    struct sockaddr_in to = place(r->to_port);
    int client = accept(r->listener, NULL, NULL), server;

    if (client < 0)
        return;
    server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (r->n == NFS_RELAY_PAIRS || connect(server, (struct sockaddr *)&to, sizeof(to)) < 0) {
        close(server);
        close(client);
        return;
    }
    memset(&r->pairs[r->n], 0, sizeof(r->pairs[0]));
    r->pairs[r->n].client = client;
    r->pairs[r->n++].server = server;
}

/* Counts records of ONC RPC: four bytes of length, of which the highest bit is a flag. */
static void count(struct nfs_relay *r, unsigned i, const uint8_t *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        uint32_t left = r->pairs[i].left;

        if (left > 0) {
            left = left < n - at ? left : (uint32_t)(n - at);
            r->pairs[i].left -= left;
            at += left;
            continue;
        }
        r->pairs[i].mark[r->pairs[i].mark_bytes++] = bytes[at++];
        if (r->pairs[i].mark_bytes == 4) {
            memcpy(&left, r->pairs[i].mark, 4);
            r->pairs[i].left = ntohl(left) & 0x7fffffffu;
            r->pairs[i].mark_bytes = 0;
            atomic_fetch_add(&r->requests, 1);
        }
    }
}

static uint64_t next_random(struct nfs_relay *r)
{
    r->random ^= r->random << 13;
    r->random ^= r->random >> 7;
    r->random ^= r->random << 17;
    return r->random;
}

static void damage(struct nfs_relay *r, uint8_t *bytes, size_t n)
{
    unsigned every = atomic_load(&r->damage_every);

    for (size_t i = 0; every && i < n; i++)
        if (next_random(r) % every == 0)
            bytes[i] ^= (uint8_t)(1u << next_random(r) % 8);
}

static bool turn_of(struct nfs_relay *r)
{
    return atomic_load(&r->say_after) == 0 || atomic_fetch_sub(&r->say_after, 1) == 0;
}

/* Length, number, type, accepted, verifier (2), success, then NFS's status; and no attributes. */
static void say(struct nfs_relay *r, uint8_t *bytes, size_t n)
{
    uint32_t status = htonl(atomic_load(&r->say_status)), word = htonl(atomic_load(&r->word_is));
    unsigned at = atomic_load(&r->word_at);

    if ((status == 0 && at == 0) || n < 48 || !turn_of(r))
        return;
    if (status != 0) {
        memcpy(bytes + 28, &status, sizeof(status));
        memset(bytes + 32, 0, 16);
    }
    if (at > 0 && at + sizeof(word) <= n)
        memcpy(bytes + at, &word, sizeof(word));
    atomic_store(&r->say_status, 0);
    atomic_store(&r->word_at, 0);
}

/* With put_lock held. */
static size_t put_locked(struct nfs_relay *r, const uint8_t *bytes, size_t n,
                         uint8_t out[PIECE_BYTES])
{
    unsigned put_n = r->put_n;
    uint32_t mark = htonl(0x80000000u | (put_n + 4));

    if (put_n == 0 || n < 8 || put_n > PIECE_BYTES - 8 || !turn_of(r))
        return 0;
    r->put_n = 0;
    if (r->put_raw) {
        memcpy(out, r->put, put_n);
        return put_n;
    }
    memcpy(out, &mark, 4);
    memcpy(out + 4, bytes + 4, 4);
    memcpy(out + 8, r->put, put_n);
    return put_n + 8;
}

/* What replaces a reply that begins with `bytes`. Returns the number of its bytes, or 0. */
static size_t put(struct nfs_relay *r, const uint8_t *bytes, size_t n, uint8_t out[PIECE_BYTES])
{
    size_t n_out;

    pthread_mutex_lock(&r->put_lock);
    n_out = put_locked(r, bytes, n, out);
    pthread_mutex_unlock(&r->put_lock);
    return n_out;
}

void nfs_relay_put(struct nfs_relay *r, const uint8_t *bytes, unsigned n, bool raw)
{
    pthread_mutex_lock(&r->put_lock);
    r->put = bytes;
    r->put_n = n;
    r->put_raw = raw;
    pthread_mutex_unlock(&r->put_lock);
}

static bool piece(struct nfs_relay *r, unsigned i, bool request)
{
    uint8_t bytes[PIECE_BYTES], other[PIECE_BYTES];
    int from = request ? r->pairs[i].client : r->pairs[i].server;
    int to = request ? r->pairs[i].server : r->pairs[i].client;
    ssize_t n = recv(from, bytes, sizeof(bytes), 0);
    size_t n_other;

    if (n <= 0)
        return false;
    if (request) {
        count(r, i, bytes, (size_t)n);
    } else {
        say(r, bytes, (size_t)n);
        damage(r, bytes, (size_t)n);
        n_other = put(r, bytes, (size_t)n, other);
        if (n_other > 0) {
            memcpy(bytes, other, n_other);
            n = (ssize_t)n_other;
        }
    }
    for (ssize_t at = 0, sent; at < n; at += sent) {
        sent = send(to, bytes + at, (size_t)(n - at), MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
    }
    return true;
}

static void *relay_main(void *arg)
{
    struct nfs_relay *r = arg;

    while (!atomic_load(&r->stop)) {
        struct pollfd fds[1 + 2 * NFS_RELAY_PAIRS] = {{.fd = r->listener, .events = POLLIN}};

        for (unsigned i = 0; i < r->n; i++) {
            fds[1 + 2 * i] = (struct pollfd){.fd = r->pairs[i].client, .events = POLLIN};
            fds[2 + 2 * i] = (struct pollfd){.fd = r->pairs[i].server, .events = POLLIN};
        }
        poll(fds, 1 + 2 * r->n, 5);
        for (unsigned i = r->n; i-- > 0;) {
            bool cut = atomic_load(&r->cut) > 0;

            if (cut)
                atomic_fetch_sub(&r->cut, 1);
            if (cut || (fds[1 + 2 * i].revents && !piece(r, i, true)) ||
                (fds[2 + 2 * i].revents && !piece(r, i, false)))
                pair_end(r, i);
        }
        if (fds[0].revents)
            pair_begin(r);
    }
    while (r->n > 0)
        pair_end(r, r->n - 1);
    return NULL;
}

void nfs_relay_open(struct nfs_relay *r, int to_port)
{
    struct sockaddr_in at = place(NFS_RELAY_PORT);
    int yes = 1;

    memset(r, 0, sizeof(*r));
    cr_assert_eq(pthread_mutex_init(&r->put_lock, NULL), 0);
    r->to_port = to_port;
    r->random = 88172645463325252u;
    r->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_geq(r->listener, 0);
    setsockopt(r->listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    cr_assert_eq(bind(r->listener, (struct sockaddr *)&at, sizeof(at)), 0);
    cr_assert_eq(listen(r->listener, 64), 0);
    cr_assert_eq(pthread_create(&r->thread, NULL, relay_main, r), 0);
}

void nfs_relay_close(struct nfs_relay *r)
{
    atomic_store(&r->stop, true);
    pthread_join(r->thread, NULL);
    pthread_mutex_destroy(&r->put_lock);
    close(r->listener);
}
