#include "daemon/base/rights.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

int rights_pass(int fd, bool may)
{
    int on = may;

    return setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &on, sizeof(on)) == 0 ? 0 : -errno;
}

uint32_t rights_unread(int fd)
{
    char text[512], path[48];
    const char *line;
    unsigned n;
    ssize_t got;
    int info;

    snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
    info = open(path, O_RDONLY | O_CLOEXEC);
    if (info < 0)
        return UINT32_MAX;
    got = read(info, text, sizeof(text) - 1);
    close(info);
    text[got > 0 ? got : 0] = '\0';
    line = strstr(text, "\nscm_fds:");
    return line && sscanf(line, "\nscm_fds: %u", &n) == 1 ? n : UINT32_MAX;
}

bool rights_end(int fd)
{
    int bytes;

    (void)shutdown(fd, SHUT_RDWR); /* from here on the kernel takes nothing of the peer */
    return (ioctl(fd, SIOCINQ, &bytes) == 0 && bytes == 0) || rights_unread(fd) == 0;
}

/* Without room for descriptors a peek drops the references that it took, which are never the last
 * ones. */
ssize_t rights_peek(int fd, void *p, size_t n, bool *some)
{
    struct iovec iov = {p, n};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t got;

    do
        got = recvmsg(fd, &m, MSG_PEEK | MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    *some = got >= 0 && (m.msg_flags & MSG_CTRUNC);
    return got < 0 ? -errno : got;
}
