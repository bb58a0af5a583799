#include "client/bench/link.h"

#include "client/bench/figure.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_CONNECTIONS 64u
#define PIECE_BYTES (256u << 10)
#define WAY_BYTES (32u << 20) /* under way in one direction; more waits in the sender's kernel */
#define IDLE_NS 20000000      /* how soon a change of the settings is seen */

struct piece {
    struct piece *next;
    uint64_t due_ns;
    size_t n, sent;
    char bytes[];
};

struct way {
    int from, to;
    struct piece *first, **last;
    size_t held;
    bool ended; /* nothing more comes from `from` */
};

struct connection {
    bool open;
    struct way way[2];
};

struct bench_link {
    int listener, stop[2];
    unsigned port;
    struct addrinfo *server;
    pthread_t thread;
    _Atomic uint64_t delay_ns;
    atomic_bool hang;
    struct connection connections[MAX_CONNECTIONS];
};

static void connection_close(struct connection *c)
{
    for (unsigned i = 0; i < 2; i++) {
        for (struct piece *p = c->way[i].first, *next; p; p = next) {
            next = p->next;
            free(p);
        }
        close(c->way[i].from);
    }
    *c = (struct connection){.open = false};
}

static void prepare(int fd)
{
    int on = 1;

    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)fcntl(fd, F_SETFL, O_NONBLOCK);
}

static void accept_one(struct bench_link *l)
{
    int fd = accept4(l->listener, NULL, NULL, SOCK_CLOEXEC), server;
    struct connection *c = NULL;

    for (unsigned i = 0; !c && i < MAX_CONNECTIONS; i++)
        c = l->connections[i].open ? NULL : &l->connections[i];
    if (fd < 0 || !c) {
        if (fd >= 0)
            close(fd);
        return;
    }
    server = socket(l->server->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || connect(server, l->server->ai_addr, l->server->ai_addrlen) < 0) {
        close(fd);
        if (server >= 0)
            close(server);
        return;
    }
    prepare(fd);
    prepare(server);
    *c = (struct connection){.open = true,
                             .way = {{.from = fd, .to = server}, {.from = server, .to = fd}}};
    for (unsigned i = 0; i < 2; i++)
        c->way[i].last = &c->way[i].first;
}

/* False: the connection is broken. */
static bool way_receive(struct bench_link *l, struct way *w)
{
    struct piece *p = malloc(sizeof(*p) + PIECE_BYTES);
    ssize_t n = p ? recv(w->from, p->bytes, PIECE_BYTES, 0) : 0;

    if (n <= 0) {
        bool again = p && n < 0 && (errno == EAGAIN || errno == EINTR);

        free(p);
        w->ended = !again;
        return again || n == 0;
    }
    p->next = NULL;
    p->due_ns = clock_ns() + atomic_load(&l->delay_ns);
    p->n = (size_t)n;
    p->sent = 0;
    *w->last = p;
    w->last = &p->next;
    w->held += p->n;
    return true;
}

static bool way_send(struct way *w, uint64_t now_ns)
{
    while (w->first && w->first->due_ns <= now_ns) {
        struct piece *p = w->first;
        ssize_t n = send(w->to, p->bytes + p->sent, p->n - p->sent, MSG_NOSIGNAL);

        if (n < 0)
            return errno == EAGAIN || errno == EINTR;
        p->sent += (size_t)n;
        w->held -= (size_t)n;
        if (p->sent < p->n)
            return true;
        w->first = p->next;
        if (!w->first)
            w->last = &w->first;
        free(p);
    }
    return true;
}

static bool connection_carry(struct bench_link *l, struct connection *c, short from0, short from1,
                             uint64_t now_ns)
{
    bool sound = true;

    if (from0 && c->way[0].held < WAY_BYTES)
        sound = way_receive(l, &c->way[0]);
    if (sound && from1 && c->way[1].held < WAY_BYTES)
        sound = way_receive(l, &c->way[1]);
    for (unsigned i = 0; sound && i < 2; i++)
        sound = way_send(&c->way[i], now_ns);
    for (unsigned i = 0; sound && i < 2; i++)
        sound = !c->way[i].ended || c->way[i].first;
    return sound;
}

/* What to wait for, and until when. */
static unsigned polls_fill(struct bench_link *l, struct pollfd *polls, uint64_t *wake_ns)
{
    uint64_t now = clock_ns();
    unsigned n = 2;

    *wake_ns = now + IDLE_NS;
    polls[0] = (struct pollfd){.fd = l->stop[0], .events = POLLIN};
    polls[1] = (struct pollfd){.fd = l->listener, .events = POLLIN};
    for (unsigned i = 0; i < MAX_CONNECTIONS; i++) {
        struct connection *c = &l->connections[i];

        for (unsigned k = 0; k < 2; k++, n++) {
            struct way *w = &c->way[k], *back = &c->way[1 - k];

            polls[n] = (struct pollfd){.fd = -1};
            if (!c->open || atomic_load(&l->hang))
                continue;
            polls[n].fd = w->from;
            polls[n].events = (short)((w->held < WAY_BYTES && !w->ended ? POLLIN : 0) |
                                      (back->first && back->first->due_ns <= now ? POLLOUT : 0));
            if (w->first && w->first->due_ns > now && w->first->due_ns < *wake_ns)
                *wake_ns = w->first->due_ns;
        }
    }
    return n;
}

static void *carry(void *arg)
{
    struct bench_link *l = arg;
    struct pollfd polls[2 + 2 * MAX_CONNECTIONS];
    uint64_t wake_ns;

    for (;;) {
        unsigned n = polls_fill(l, polls, &wake_ns);
        uint64_t now = clock_ns(), wait = wake_ns > now ? wake_ns - now : 0;
        const struct timespec pause = {.tv_nsec = (long)wait};

        if (ppoll(polls, n, &pause, NULL) < 0 && errno != EINTR)
            return NULL;
        if (polls[0].revents)
            return NULL;
        if (polls[1].revents)
            accept_one(l);
        if (atomic_load(&l->hang))
            continue;
        now = clock_ns();
        for (unsigned i = 0; i < MAX_CONNECTIONS; i++) {
            struct connection *c = &l->connections[i];
            const struct pollfd *p = &polls[2 + 2 * i];

            if (c->open && p->fd >= 0 && !connection_carry(l, c, p[0].revents, p[1].revents, now))
                connection_close(c);
        }
    }
}

static int listen_somewhere(struct bench_link *l)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof(at);

    l->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (l->listener < 0 || bind(l->listener, (struct sockaddr *)&at, n) < 0 ||
        listen(l->listener, 16) < 0 || getsockname(l->listener, (struct sockaddr *)&at, &n) < 0)
        return -errno;
    l->port = ntohs(at.sin_port);
    return 0;
}

int link_open(const char *host, unsigned port, struct bench_link **out)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct bench_link *l = calloc(1, sizeof(*l));
    char service[16];
    int rc;

    if (!l)
        return -ENOMEM;
    l->listener = l->stop[0] = l->stop[1] = -1;
    snprintf(service, sizeof(service), "%u", port);
    rc = getaddrinfo(host, service, &hints, &l->server) == 0 ? 0 : -EHOSTUNREACH;
    if (rc == 0)
        rc = listen_somewhere(l);
    if (rc == 0 && pipe2(l->stop, O_CLOEXEC) < 0)
        rc = -errno;
    if (rc == 0)
        rc = -pthread_create(&l->thread, NULL, carry, l);
    if (rc == 0) {
        *out = l;
        return 0;
    }
    if (l->listener >= 0)
        close(l->listener);
    if (l->stop[0] >= 0) {
        close(l->stop[0]);
        close(l->stop[1]);
    }
    if (l->server)
        freeaddrinfo(l->server);
    free(l);
    return rc;
}

void link_close(struct bench_link *l)
{
    if (!l)
        return;
    close(l->stop[1]);
    pthread_join(l->thread, NULL);
    for (unsigned i = 0; i < MAX_CONNECTIONS; i++)
        if (l->connections[i].open)
            connection_close(&l->connections[i]);
    close(l->stop[0]);
    close(l->listener);
    freeaddrinfo(l->server);
    free(l);
}

unsigned link_port(const struct bench_link *l)
{
    return l->port;
}

void link_delay(struct bench_link *l, uint64_t ns)
{
    atomic_store(&l->delay_ns, ns);
}

void link_hang(struct bench_link *l, bool hang)
{
    atomic_store(&l->hang, hang);
}
