/* A daemon for tests of the client library: one thread on a real socket in a folder of its own that
 * answers every request at once, unless the test's hook takes it over. Header only: each test
 * program has its own. A reply may be sent from any thread. */
#ifndef UCM_TESTS_FAKE_DAEMON_H
#define UCM_TESTS_FAKE_DAEMON_H

#include "proto/proto.h"
#include "tests/unit/fake_staging.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define FAKE_FN __attribute__((unused)) static
#define FAKE_CONNS 8
#define FAKE_REGIONS 64
#define FAKE_HELD 256

struct fake_region {
    uint32_t id;
    uint32_t ns;
    ino_t ino[4]; /* of the descriptors that came with it */
    uint32_t n_fds;
};

struct fake;
typedef bool (*fake_hook)(struct fake *f, int conn, int method, struct proto_envelope *env);
#define FAKE_NO_HOOK ((fake_hook)0)

struct fake {
    char dir[64], path[96];
    pthread_t thread;
    int wake;
    atomic_bool stop, paused, hang_up;
    atomic_bool is_paused; /* the thread has seen `paused` */

    pthread_mutex_t lock; /* of what follows, and of sends */
    int listener;
    int conns[FAKE_CONNS]; /* -1: free */
    struct {
        uint8_t *p;
        size_t n;
    } in[FAKE_CONNS];
    int fds[FAKE_CONNS][UCM_MAX_FRAME_FDS];
    uint32_t n_fds[FAKE_CONNS];

    uint32_t next_id; /* of namespaces and regions: never the same twice */
    uint32_t next_lease;
    unsigned count[UCM_METHOD_COUNT];
    unsigned accepted;
    struct fake_region regions[FAKE_REGIONS];
    unsigned n_regions;
    uint32_t last_lease;     /* that a load or a release named */
    uint32_t last_cancelled; /* msgid */
    uint32_t max_keys;
    struct fake_stagings rings;

    /* Runs on the daemon's thread for each request; true: taken over. */
    _Atomic(fake_hook) hook;
    struct {
        int conn;
        uint32_t msgid;
        uint32_t n_keys;
    } held[FAKE_HELD];
    unsigned n_held;
};

FAKE_FN void fake_sleep_ms(int ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

FAKE_FN int64_t fake_now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Until *(unsigned *)p is at least n, which another thread brings about. */
FAKE_FN void fake_await(struct fake *f, const unsigned *p, unsigned n)
{
    int64_t end = fake_now_ms() + 20000;

    for (;;) {
        unsigned v;

        pthread_mutex_lock(&f->lock);
        v = *p;
        pthread_mutex_unlock(&f->lock);
        if (v >= n)
            return;
        cr_assert(fake_now_ms() < end, "waited for %u, still %u", n, v);
        fake_sleep_ms(1);
    }
}

/* A field of the fake, which its thread may write. */
FAKE_FN uint64_t fake_read(struct fake *f, const void *field, size_t n)
{
    uint64_t v = 0;

    pthread_mutex_lock(&f->lock);
    memcpy(&v, field, n);
    pthread_mutex_unlock(&f->lock);
    return v;
}
#define FAKE_GET(f, field) fake_read(f, &(f)->field, sizeof(f)->field)

FAKE_FN unsigned fake_count(struct fake *f, enum ucm_method method)
{
    return (unsigned)FAKE_GET(f, count[method]);
}

/* ---- replies ---- */

FAKE_FN void fake_raw(struct fake *f, int conn, const void *p, size_t n)
{
    size_t sent = 0;

    while (sent < n && !atomic_load(&f->stop)) {
        ssize_t r = send(conn, (const char *)p + sent, n - sent, MSG_NOSIGNAL);

        if (r < 0)
            return;
        sent += (size_t)r;
    }
}

FAKE_FN void fake_reply(struct fake *f, int conn, uint32_t msgid, const struct proto_message *m,
                        const void *result)
{
    struct proto_buf b;
    struct ucm_error e;

    proto_buf_init(&b, 2 << 20);
    cr_assert_eq(proto_response(&b, msgid, m, result, &e), 0);
    fake_raw(f, conn, b.p, b.n);
    proto_buf_free(&b);
}

FAKE_FN void fake_error(struct fake *f, int conn, uint32_t msgid, int code, const char *text)
{
    struct ucm_error e = {.code = code};
    struct proto_buf b;

    snprintf(e.text, sizeof e.text, "%s", text);
    proto_buf_init(&b, 2 << 20);
    cr_assert_eq(proto_response_error(&b, msgid, &e), 0);
    fake_raw(f, conn, b.p, b.n);
    proto_buf_free(&b);
}

FAKE_FN void fake_reply_blocks(struct fake *f, int conn, uint32_t msgid, uint32_t n_keys,
                               uint8_t status)
{
    uint8_t *s = malloc(n_keys);
    struct msg_blocks_r m = {.status = {s, n_keys}, .bytes = n_keys * 100ull};

    cr_assert_not_null(s);
    memset(s, status, n_keys);
    fake_reply(f, conn, msgid, &proto_blocks_r, &m);
    free(s);
}

/* For hooks: keeps a request to be answered later. */
FAKE_FN void fake_hold(struct fake *f, int conn, uint32_t msgid, uint32_t n_keys)
{
    pthread_mutex_lock(&f->lock);
    cr_assert(f->n_held < FAKE_HELD);
    f->held[f->n_held].conn = conn;
    f->held[f->n_held].msgid = msgid;
    f->held[f->n_held].n_keys = n_keys;
    f->n_held++;
    pthread_mutex_unlock(&f->lock);
}

FAKE_FN void fake_answer_held(struct fake *f, unsigned i, uint8_t status)
{
    fake_reply_blocks(f, (int)FAKE_GET(f, held[i].conn), (uint32_t)FAKE_GET(f, held[i].msgid),
                      (uint32_t)FAKE_GET(f, held[i].n_keys), status);
}

/* ---- what it answers by itself ---- */

FAKE_FN void fake_hello(struct fake *f, int conn, uint32_t msgid)
{
    static const uint8_t instance[16] = {1, 2, 3};
    struct msg_hello_r m = {
        .version = 1,
        .server = {"ucmd fake", 9},
        .instance = {instance, 16},
        .tenant = {"uid:7", 5},
        .max_frame_bytes = UCM_MAX_FRAME_BYTES,
        .max_keys = f->max_keys,
        .max_requests = 256,
        .max_regions = 64,
        .max_leases = 16,
        .max_lease_ms = 60000,
        .max_deadline_ms = 60000,
    };

    fake_reply(f, conn, msgid, &proto_hello_r, &m);
}

FAKE_FN void fake_ns_open(struct fake *f, int conn, uint32_t msgid)
{
    uint8_t fingerprint[32] = {9};
    struct msg_ns_open_r m = {.fingerprint = {fingerprint, 32}};

    pthread_mutex_lock(&f->lock);
    m.ns = f->next_id++;
    pthread_mutex_unlock(&f->lock);
    fake_reply(f, conn, msgid, &proto_ns_open_r, &m);
}

FAKE_FN uint32_t fake_region_add(struct fake *f, int slot, uint32_t ns)
{
    struct fake_region *r;
    struct stat st;
    uint32_t id;

    pthread_mutex_lock(&f->lock);
    cr_assert(f->n_regions < FAKE_REGIONS);
    r = &f->regions[f->n_regions++];
    *r = (struct fake_region){.id = f->next_id++, .ns = ns, .n_fds = f->n_fds[slot]};
    for (uint32_t i = 0; i < f->n_fds[slot]; i++) {
        if (i < 4 && fstat(f->fds[slot][i], &st) == 0)
            r->ino[i] = st.st_ino;
        close(f->fds[slot][i]);
    }
    f->n_fds[slot] = 0;
    id = r->id;
    pthread_mutex_unlock(&f->lock);
    return id;
}

FAKE_FN void fake_region_remove(struct fake *f, uint32_t id)
{
    pthread_mutex_lock(&f->lock);
    for (unsigned i = 0; i < f->n_regions; i++)
        if (f->regions[i].id == id)
            f->regions[i] = f->regions[--f->n_regions];
    pthread_mutex_unlock(&f->lock);
}

FAKE_FN void fake_ring_register(struct fake *f, int slot, struct msg_ring *out)
{
    pthread_mutex_lock(&f->lock);
    cr_assert_eq(f->n_fds[slot], 1);
    out->ring = f->next_id++;
    fake_staging_add(&f->rings, f->fds[slot][0], (uint32_t)out->ring);
    f->n_fds[slot] = 0;
    pthread_mutex_unlock(&f->lock);
}

FAKE_FN void fake_ring_unregister(struct fake *f, int conn, uint32_t msgid, uint32_t id)
{
    bool found;

    pthread_mutex_lock(&f->lock);
    found = fake_staging_remove(&f->rings, id);
    pthread_mutex_unlock(&f->lock);
    if (found)
        fake_reply(f, conn, msgid, &proto_none, NULL);
    else
        fake_error(f, conn, msgid, UCM_WIRE_NOT_FOUND, "no such ring");
}

/* hits: the first byte of the first key, so that each caller can tell its own answer. */
FAKE_FN void fake_lookup(struct fake *f, int conn, uint32_t msgid, const struct msg_lookup *m,
                         uint32_t key_bytes)
{
    uint32_t n = m->keys.n / key_bytes;
    uint8_t status[1024] = {0};
    struct msg_lookup_r r = {.hits = m->keys.p[0] < n ? m->keys.p[0] : n};

    if (m->each) {
        memset(status, UCM_LOOKUP_DRAM, r.hits);
        r.status = (struct proto_bin){status, n};
    }
    if (m->lease_ms && r.hits) {
        pthread_mutex_lock(&f->lock);
        r.lease = f->next_lease++;
        pthread_mutex_unlock(&f->lock);
    }
    fake_reply(f, conn, msgid, &proto_lookup_r, &r);
}

FAKE_FN void fake_answer(struct fake *f, int slot, int method, struct proto_envelope *env)
{
    int conn = f->conns[slot];
    uint32_t id = env->msgid;
    struct ucm_error e;
    union {
        struct msg_region_register reg;
        struct msg_region region;
        struct msg_ring_register ring_register;
        struct msg_ring ring;
        struct msg_lookup lookup;
        struct msg_load load;
        struct msg_dump dump;
        struct msg_prefetch prefetch;
        struct msg_release release;
        struct msg_cancel cancel;
        struct msg_keys keys;
        struct msg_evict evict;
    } m;

#define DECODE(name, at) cr_assert_eq(proto_decode(&proto_##name, env, &m.at, &e), 0, "%s", e.text)
    switch (method) {
    case UCM_METHOD_HELLO:
        fake_hello(f, conn, id);
        return;
    case UCM_METHOD_NS_OPEN:
        fake_ns_open(f, conn, id);
        return;
    case UCM_METHOD_REGION_REGISTER:
        DECODE(region_register, reg);
        m.region.region = fake_region_add(f, slot, (uint32_t)m.reg.ns);
        fake_reply(f, conn, id, &proto_region, &m.region);
        return;
    case UCM_METHOD_REGION_UNREGISTER:
        DECODE(region, region);
        fake_region_remove(f, (uint32_t)m.region.region);
        fake_reply(f, conn, id, &proto_none, NULL);
        return;
    case UCM_METHOD_RING_REGISTER:
        DECODE(ring_register, ring_register);
        fake_ring_register(f, slot, &m.ring);
        fake_reply(f, conn, id, &proto_ring, &m.ring);
        return;
    case UCM_METHOD_RING_UNREGISTER:
        DECODE(ring, ring);
        fake_ring_unregister(f, conn, id, (uint32_t)m.ring.ring);
        return;
    case UCM_METHOD_LOOKUP:
        DECODE(lookup, lookup);
        fake_lookup(f, conn, id, &m.lookup, 16);
        return;
    case UCM_METHOD_RELEASE:
        DECODE(release, release);
        pthread_mutex_lock(&f->lock);
        f->last_lease = (uint32_t)m.release.lease;
        pthread_mutex_unlock(&f->lock);
        fake_reply(f, conn, id, &proto_none, NULL);
        return;
    case UCM_METHOD_LOAD:
        DECODE(load, load);
        pthread_mutex_lock(&f->lock);
        f->last_lease = (uint32_t)m.load.lease;
        pthread_mutex_unlock(&f->lock);
        fake_reply_blocks(f, conn, id, m.load.keys.n / 16, UCM_BLOCK_OK);
        return;
    case UCM_METHOD_DUMP:
        DECODE(dump, dump);
        fake_reply_blocks(f, conn, id, m.dump.keys.n / 16, UCM_BLOCK_EXISTS);
        return;
    case UCM_METHOD_PREFETCH:
        DECODE(prefetch, prefetch);
        fake_reply_blocks(f, conn, id, m.prefetch.keys.n / 16, UCM_BLOCK_MISS);
        return;
    case UCM_METHOD_CANCEL:
        DECODE(cancel, cancel);
        pthread_mutex_lock(&f->lock);
        f->last_cancelled = (uint32_t)m.cancel.msgid;
        pthread_mutex_unlock(&f->lock);
        fake_reply(f, conn, id, &proto_cancel_r, &(struct msg_cancel_r){.cancelled = true});
        return;
    case UCM_METHOD_PIN:
    case UCM_METHOD_UNPIN:
        DECODE(keys, keys);
        fake_reply(f, conn, id, &proto_count_r,
                   &(struct msg_count_r){.blocks = m.keys.keys.n / 16});
        return;
    case UCM_METHOD_EVICT:
        DECODE(evict, evict);
        fake_reply(f, conn, id, &proto_count_r, &(struct msg_count_r){.blocks = 3, .busy = 2});
        return;
    default:
        fake_error(f, conn, id, UCM_WIRE_UNSUPPORTED, "the fake does not know this method");
    }
#undef DECODE
}

/* ---- the thread ---- */

FAKE_FN void fake_drop(struct fake *f, int slot)
{
    pthread_mutex_lock(&f->lock);
    close(f->conns[slot]);
    f->conns[slot] = -1;
    f->in[slot].n = 0;
    for (uint32_t i = 0; i < f->n_fds[slot]; i++)
        close(f->fds[slot][i]);
    f->n_fds[slot] = 0;
    f->n_regions = 0; /* of every connection: tests with regions have one */
    memset(f->rings.ids, 0, sizeof f->rings.ids);
    pthread_mutex_unlock(&f->lock);
}

FAKE_FN void fake_frame(struct fake *f, int slot, const uint8_t *body, uint32_t n)
{
    struct proto_envelope env;
    struct ucm_error e;
    fake_hook hook;
    bool answerable;
    int method;

    cr_assert_eq(proto_envelope_open(&env, body, n, &answerable, &e), 0, "%s", e.text);
    method = proto_method_find(env.method);
    pthread_mutex_lock(&f->lock);
    if (method >= 0)
        f->count[method]++;
    pthread_mutex_unlock(&f->lock);
    hook = atomic_load(&f->hook);
    if (!hook || !hook(f, f->conns[slot], method, &env))
        fake_answer(f, slot, method, &env);
    proto_envelope_close(&env);
}

FAKE_FN bool fake_receive(struct fake *f, int slot)
{
    union {
        char bytes[CMSG_SPACE(UCM_MAX_FRAME_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {f->in[slot].p + f->in[slot].n, (2u << 20) - f->in[slot].n};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = &control,
                       .msg_controllen = sizeof control};
    ssize_t n = recvmsg(f->conns[slot], &m, MSG_CMSG_CLOEXEC);
    struct cmsghdr *h;

    if (n <= 0)
        return false;
    for (h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
        size_t k = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);

        memcpy(f->fds[slot] + f->n_fds[slot], CMSG_DATA(h), k * sizeof(int));
        f->n_fds[slot] += (uint32_t)k;
    }
    f->in[slot].n += (size_t)n;
    return true;
}

FAKE_FN void fake_frames(struct fake *f, int slot)
{
    size_t at = 0;

    while (f->in[slot].n - at >= PROTO_HEADER_BYTES) {
        uint32_t n = proto_frame_length(f->in[slot].p + at);

        if (f->in[slot].n - at < PROTO_HEADER_BYTES + (size_t)n)
            break;
        fake_frame(f, slot, f->in[slot].p + at + PROTO_HEADER_BYTES, n);
        at += PROTO_HEADER_BYTES + (size_t)n;
    }
    memmove(f->in[slot].p, f->in[slot].p + at, f->in[slot].n - at);
    f->in[slot].n -= at;
}

FAKE_FN void fake_accept(struct fake *f)
{
    int fd = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);

    for (int i = 0; fd >= 0 && i < FAKE_CONNS; i++) {
        if (f->conns[i] >= 0)
            continue;
        pthread_mutex_lock(&f->lock);
        f->conns[i] = fd;
        f->accepted++;
        pthread_mutex_unlock(&f->lock);
        return;
    }
    if (fd >= 0)
        close(fd);
}

FAKE_FN void *fake_run(void *arg)
{
    struct fake *f = arg;

    while (!atomic_load(&f->stop)) {
        struct pollfd p[2 + FAKE_CONNS] = {{.fd = f->wake, .events = POLLIN},
                                           {.fd = f->listener, .events = POLLIN}};
        bool paused = atomic_load(&f->paused);
        uint64_t v;

        atomic_store(&f->is_paused, paused);
        for (int i = 0; i < FAKE_CONNS; i++) {
            p[2 + i].fd = f->conns[i];
            p[2 + i].events = paused ? 0 : POLLIN;
        }
        poll(p, 2 + FAKE_CONNS, 1000);
        if (p[0].revents && read(f->wake, &v, sizeof v) < 0)
            break;
        if (atomic_load(&f->hang_up)) {
            for (int i = 0; i < FAKE_CONNS; i++)
                if (f->conns[i] >= 0)
                    fake_drop(f, i);
            atomic_store(&f->hang_up, false);
        }
        if (p[1].revents)
            fake_accept(f);
        for (int i = 0; i < FAKE_CONNS; i++) {
            if (p[2 + i].fd < 0 || f->conns[i] != p[2 + i].fd || !p[2 + i].revents)
                continue;
            if (fake_receive(f, i))
                fake_frames(f, i);
            else
                fake_drop(f, i);
        }
    }
    return NULL;
}

FAKE_FN void fake_wake(struct fake *f)
{
    uint64_t one = 1;

    cr_assert_eq(write(f->wake, &one, sizeof one), (ssize_t)sizeof one);
}

/* Listens and runs: at first, or again after fake_down. */
FAKE_FN void fake_up(struct fake *f)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    snprintf(a.sun_path, sizeof a.sun_path, "%s", f->path);
    f->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    cr_assert(f->listener >= 0);
    cr_assert_eq(bind(f->listener, (struct sockaddr *)&a, sizeof a), 0);
    cr_assert_eq(listen(f->listener, 64), 0);
    atomic_store(&f->stop, false);
    cr_assert_eq(pthread_create(&f->thread, NULL, fake_run, f), 0);
}

FAKE_FN void fake_down(struct fake *f)
{
    atomic_store(&f->stop, true);
    pthread_mutex_lock(&f->lock);
    for (int i = 0; i < FAKE_CONNS; i++) /* a send that blocks */
        if (f->conns[i] >= 0)
            shutdown(f->conns[i], SHUT_RDWR);
    pthread_mutex_unlock(&f->lock);
    fake_wake(f);
    pthread_join(f->thread, NULL);
    for (int i = 0; i < FAKE_CONNS; i++)
        if (f->conns[i] >= 0)
            fake_drop(f, i);
    close(f->listener);
    unlink(f->path);
}

/* Returns when its ends are closed. */
FAKE_FN void fake_hang_up(struct fake *f)
{
    int64_t end = fake_now_ms() + 20000;

    atomic_store(&f->hang_up, true);
    fake_wake(f);
    while (atomic_load(&f->hang_up)) {
        cr_assert(fake_now_ms() < end, "the fake does not hang up");
        fake_sleep_ms(1);
    }
}

/* Without a thread: for tests that bring it up later. */
FAKE_FN void fake_init(struct fake *f)
{
    memset(f, 0, sizeof *f);
    snprintf(f->dir, sizeof f->dir, "/tmp/ucm-fake-XXXXXX");
    cr_assert_not_null(mkdtemp(f->dir));
    snprintf(f->path, sizeof f->path, "%s/sock", f->dir);
    f->wake = eventfd(0, EFD_CLOEXEC);
    f->next_id = 100;
    f->next_lease = 1000;
    f->max_keys = UCM_MAX_KEYS;
    pthread_mutex_init(&f->lock, NULL);
    for (int i = 0; i < FAKE_CONNS; i++) {
        f->conns[i] = -1;
        f->in[i].p = malloc(2u << 20);
    }
}

FAKE_FN void fake_close(struct fake *f)
{
    fake_stagings_close(&f->rings);
    for (int i = 0; i < FAKE_CONNS; i++)
        free(f->in[i].p);
    close(f->wake);
    pthread_mutex_destroy(&f->lock);
    rmdir(f->dir);
}

#endif
