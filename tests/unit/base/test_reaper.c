/* Descriptors that a thread of its own closes: how they count until then. A close() that waits
 * holds up nobody else. */
/* Sanitizers: thread */
#include "daemon/base/reaper.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static uv_loop_t loop;
static uv_timer_t alive; /* the reaper does not keep the event loop */
static struct limits *limits;
static struct limit_owner *one, *two;
static struct reaper *reaper;
static int listener;

static void setup(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    cr_assert_eq(uv_loop_init(&loop), 0);
    uv_timer_init(&loop, &alive);
    limits = limits_new();
    cr_assert(limits);
    one = limits_uid(limits, "one", 1, false);
    two = limits_uid(limits, "two", 2, false);
    cr_assert(one && two);
    cr_assert_eq(reaper_new(&loop, &reaper), 0);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(listener, (struct sockaddr *)&at, sizeof(at)), 0);
    cr_assert_eq(listen(listener, 8), 0);
}

static void teardown(void)
{
    reaper_stop(reaper);
    uv_close((uv_handle_t *)&alive, NULL);
    cr_expect_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    cr_expect_eq(uv_loop_close(&loop), 0);
    reaper_free(reaper);
    cr_expect_eq(limits_used(limits, LIMIT_DESCRIPTORS), 0u);
    limit_owner_unref(one);
    limit_owner_unref(two);
    limits_free(limits);
    close(listener);
}

TestSuite(reaper, .init = setup, .fini = teardown, .timeout = 60);

/* A socket whose close() waits for an hour, because nobody reads what it has sent. *peer: the other
 * end. */
static int lingering(int *peer)
{
    struct linger linger = {1, 3600};
    struct sockaddr_in at;
    socklen_t len = sizeof(at);
    static char much[1 << 16];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    cr_assert_eq(getsockname(listener, (struct sockaddr *)&at, &len), 0);
    cr_assert_eq(connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    *peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    cr_assert_geq(*peer, 0);
    while (send(fd, much, sizeof(much), MSG_DONTWAIT) > 0)
        ;
    cr_assert_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)), 0);
    return fd;
}

static void reap(int fd, struct limit_owner *owner)
{
    cr_assert_eq(limit_take(owner, LIMIT_DESCRIPTORS, 1, NULL), 0);
    reaper_close(reaper, fd, owner);
}

static bool open_still(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

static void late_cb(uv_timer_t *timer)
{
    (void)timer;
    cr_assert(false, "nothing was closed for a minute");
}

static void run_until_reaped(void)
{
    cr_assert_eq(uv_timer_start(&alive, late_cb, 60000, 0), 0);
    while (reaper_waiting(reaper) > 0)
        uv_run(&loop, UV_RUN_ONCE);
    uv_timer_stop(&alive);
}

Test(reaper, counts_until_it_has_closed)
{
    int fds[2];

    cr_assert_eq(pipe(fds), 0);
    reap(fds[0], one);
    reap(fds[1], two);
    cr_assert_eq(limits_used(limits, LIMIT_DESCRIPTORS), 2u, "only the event loop gives back");
    cr_assert_eq(reaper_waiting(reaper), 2u);
    run_until_reaped();
    cr_assert_not(open_still(fds[0]) || open_still(fds[1]));
    cr_assert_eq(limits_used(limits, LIMIT_DESCRIPTORS), 0u);
}

Test(reaper, what_lingers_is_cut_short)
{
    int peers[20];

    for (int i = 0; i < 20; i++)
        reap(lingering(&peers[i]), i % 2 ? one : two);
    run_until_reaped();
    for (int i = 0; i < 20; i++)
        close(peers[i]);
}

static void send_fd(int socket, int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec iov = {"x", 1};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);

    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(h), &fd, sizeof(fd));
    cr_assert_eq(sendmsg(socket, &m, 0), 1);
}

/* Two ends, the first with an unread socket whose close() waits. Returns that socket's peer. */
static int with_unread(int ends[2])
{
    int peer, fd = lingering(&peer);

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    send_fd(ends[1], fd);
    close(fd);
    return peer;
}

Test(reaper, closes_a_socket_with_unread_descriptors_aside)
{
    int ends[2], peer = with_unread(ends);

    cr_assert_eq(limit_take(one, LIMIT_DESCRIPTORS, 1, NULL), 0);
    reaper_close_socket(reaper, ends[0], one);
    cr_assert_eq(reaper_waiting(reaper), 1u);
    cr_assert_eq(send(ends[1], "x", 1, MSG_NOSIGNAL), -1, "nothing comes into it any more");
    run_until_reaped();
    cr_assert_not(open_still(ends[0]));
    close(ends[1]);
    close(peer);
}

Test(reaper, a_refused_socket_counts_for_nobody)
{
    int ends[2], peer = with_unread(ends);

    reaper_close_refused(reaper, ends[0], one);
    cr_assert_eq(reaper_refused(reaper), 1u);
    cr_assert_eq(limits_used(limits, LIMIT_DESCRIPTORS), 0u);
    run_until_reaped();
    cr_assert_eq(reaper_refused(reaper), 0u);
    cr_assert_not(open_still(ends[0]));
    close(ends[1]);
    close(peer);
}

Test(reaper, closes_a_socket_without_descriptors_at_once)
{
    int ends[2];

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    cr_assert_eq(send(ends[1], "x", 1, 0), 1);
    cr_assert_eq(limit_take(one, LIMIT_DESCRIPTORS, 1, NULL), 0);
    reaper_close_socket(reaper, ends[0], one);
    cr_assert_not(open_still(ends[0]));
    cr_assert_eq(limits_used(limits, LIMIT_DESCRIPTORS), 0u);
    close(ends[1]);
}

Test(reaper, at_its_end_all_is_given_back)
{
    int fds[2];

    cr_assert_eq(pipe(fds), 0);
    for (int i = 0; i < 500; i++)
        reap(dup(fds[0]), i % 3 ? one : two);
    close(fds[0]);
    close(fds[1]);
}

/* ---- tenants' numbers ---- */

Test(reaper, numbers_of_tenants_are_dense)
{
    struct limit_owner *three = limits_uid(limits, "three", 3, false), *four;

    cr_assert_eq(limit_number(one), 1u);
    cr_assert_eq(limit_number(two), 2u);
    cr_assert_eq(limit_number(three), 3u);
    limit_owner_unref(two);
    four = limits_uid(limits, "four", 4, false);
    cr_assert_eq(limit_number(four), 2u, "the first that is free");
    two = limits_uid(limits, "two", 2, false);
    cr_assert_eq(limit_number(two), 4u);
    limit_owner_unref(three);
    limit_owner_unref(four);
}
