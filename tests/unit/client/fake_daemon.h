/* A daemon for tests of the client library: one thread on a real socket in a directory of its own.
 * It answers every request at once, unless the test's hook takes it over. Header only: each test
 * program has its own copy. */
#ifndef UCM_TESTS_FAKE_DAEMON_H
#define UCM_TESTS_FAKE_DAEMON_H

#include "tests/unit/client/fake_answers.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/un.h>

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
    if (method >= 0)
        FAKE_SET(f, f->count[method], f->count[method] + 1);
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

/* Reads nothing while it is paused. */
FAKE_FN void fake_pause(struct fake *f, bool paused)
{
    atomic_store(&f->paused, paused);
    fake_wake(f);
    while (atomic_load(&f->is_paused) != paused)
        fake_sleep_ms(1);
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
