/* The state of fake_daemon.h, and replies. A reply may be sent from any thread. */
#ifndef UCM_TESTS_FAKE_BASE_H
#define UCM_TESTS_FAKE_BASE_H

#include "proto/proto.h"
#include "tests/unit/client/fake_staging.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FAKE_FN __attribute__((unused)) static
#define FAKE_CONNS 8
#define FAKE_REGIONS 64
#define FAKE_HELD 256

struct fake_region {
    uint32_t id;
    uint32_t ns;
    ino_t ino; /* of the first descriptor that came with it */
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
    uint64_t last_request;   /* the first 8 bytes of the request id that came last */
    uint64_t last_wait_ms;   /* that a lookup named */
    unsigned computing;      /* loads and dumps whose worker computes */
    uint8_t nonce
        [UCM_NONCE_BYTES]; /* of the last region.challenge, the number of which is its first byte */
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
#define FAKE_SET(f, target, value)                                                                 \
    do {                                                                                           \
        pthread_mutex_lock(&(f)->lock);                                                            \
        target = (value);                                                                          \
        pthread_mutex_unlock(&(f)->lock);                                                          \
    } while (0)

FAKE_FN unsigned fake_count(struct fake *f, enum ucm_method method)
{
    return (unsigned)FAKE_GET(f, count[method]);
}

/* Waits until another thread has raised *(unsigned *)p to at least n. */
FAKE_FN void fake_await(struct fake *f, const unsigned *p, unsigned n)
{
    int64_t end = fake_now_ms() + 20000;

    while (fake_read(f, p, sizeof *p) < n) {
        cr_assert(fake_now_ms() < end, "waited for %u", n);
        fake_sleep_ms(1);
    }
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

FAKE_FN void fake_reply_if(struct fake *f, int conn, uint32_t msgid, bool known,
                           const struct proto_message *m, const void *result)
{
    if (known)
        fake_reply(f, conn, msgid, m, result);
    else
        fake_error(f, conn, msgid, UCM_WIRE_NOT_FOUND, "there is none");
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

#endif
