/* Descriptors that lie unread in a socket are found without closing any of them. */
#include "daemon/base/rights.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int ends[2];

static void setup(void)
{
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
}

static void teardown(void)
{
    close(ends[0]);
    close(ends[1]);
}

TestSuite(rights, .init = setup, .fini = teardown, .timeout = 60);

/* Sends two bytes with n copies of one end of a pipe, and keeps no copy. 0 or -errno. *other: the
 * other end. */
static int give(unsigned n, int *other)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * RIGHTS_MOST)];
    } control = {0};
    struct iovec iov = {"xx", 2};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = CMSG_SPACE(sizeof(int) * n)};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    int both[2], rc;

    cr_assert_eq(pipe2(both, O_CLOEXEC | O_NONBLOCK), 0);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int) * n);
    for (unsigned i = 0; i < n; i++)
        memcpy(CMSG_DATA(h) + i * sizeof(int), &both[1], sizeof(int));
    rc = sendmsg(ends[1], &m, MSG_NOSIGNAL) == 2 ? 0 : -errno;
    close(both[1]);
    *other = both[0];
    return rc;
}

/* Whether the end that was sent is still open. */
static bool lives(int other)
{
    char byte;

    return read(other, &byte, 1) < 0 && errno == EAGAIN;
}

Test(rights, are_counted)
{
    int one, two;

    cr_assert_eq(rights_unread(ends[0]), 0u);
    cr_assert_eq(give(3, &one), 0);
    cr_assert_eq(give(RIGHTS_MOST, &two), 0);
    cr_assert_eq(rights_unread(ends[0]), 3 + RIGHTS_MOST);
    cr_assert_not(rights_end(ends[0]));
    cr_assert_eq(rights_unread(ends[0]), 3 + RIGHTS_MOST);
    close(one);
    close(two);
}

Test(rights, end_with_the_socket)
{
    int other;

    cr_assert_eq(send(ends[1], "x", 1, 0), 1);
    cr_assert(rights_end(ends[0]));
    cr_assert_lt(give(1, &other), 0);
    close(other);
}

Test(rights, of_what_is_no_socket_are_not_known)
{
    cr_assert_eq(rights_unread(STDIN_FILENO), UINT32_MAX);
    cr_assert_eq(rights_unread(-1), UINT32_MAX);
}

Test(rights, a_peek_sees_them_and_closes_none)
{
    char bytes[8];
    bool some;
    int other;

    cr_assert_eq(rights_peek(ends[0], bytes, sizeof(bytes), &some), -EAGAIN);
    cr_assert_not(some);
    cr_assert_eq(send(ends[1], "ab", 2, 0), 2);
    cr_assert_eq(give(1, &other), 0);
    cr_assert_eq(rights_peek(ends[0], bytes, sizeof(bytes), &some), 4);
    cr_assert(some);
    cr_assert_arr_eq(bytes, "abxx", 4);
    cr_assert(lives(other));
    close(other);
}

Test(rights, none_come_with_what_a_peek_saw_without)
{
    char bytes[8], control[64];
    struct iovec iov = {bytes, 2};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = sizeof(control)};
    bool some;
    int other;

    cr_assert_eq(send(ends[1], "ab", 2, 0), 2);
    cr_assert_eq(rights_peek(ends[0], bytes, sizeof(bytes), &some), 2);
    cr_assert_not(some);
    cr_assert_eq(give(1, &other), 0);
    cr_assert_eq(recvmsg(ends[0], &m, 0), 2);
    cr_assert_eq(m.msg_controllen, 0u);
    cr_assert(lives(other));
    close(other);
}

Test(rights, can_be_refused)
{
    int rc = rights_pass(ends[0], false), other;

    if (rc == -ENOPROTOOPT)
        cr_skip_test("a kernel before 6.16");
    cr_assert_eq(rc, 0);
    cr_assert_eq(give(1, &other), -EPERM);
    close(other);
    cr_assert_eq(rights_pass(ends[0], true), 0);
    cr_assert_eq(give(1, &other), 0);
    close(other);
}
