#include "daemon/device/worker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STAT_FLAGS 9
#define STAT_START 22
#define FLAG_EXITING 0x4 /* PF_EXITING, which the kernel sets first when a process exits */

/* Field n of /proc/<pid>/stat, n > 2. The second field is the program's name in brackets, which may
 * hold anything. */
static int stat_field(const char *text, unsigned n, uint64_t *out)
{
    const char *p = strrchr(text, ')');
    char *end;

    for (unsigned i = 2; p && i < n; i++) {
        p = strchr(p, ' ');
        if (p)
            p++;
    }
    if (!p)
        return -EIO;
    errno = 0;
    *out = strtoull(p, &end, 10);
    return errno != 0 || end == p ? -EIO : 0;
}

/* Reads from offset 0, so that the kernel writes the text again. -ESRCH: the process is gone. */
static int stat_read(int fd, uint64_t *flags, uint64_t *start)
{
    char text[1024];
    ssize_t n;
    int rc;

    do {
        n = pread(fd, text, sizeof(text) - 1, 0);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    text[n] = '\0';
    rc = stat_field(text, STAT_FLAGS, flags);
    return rc < 0 ? rc : stat_field(text, STAT_START, start);
}

int worker_open(struct worker *w, pid_t pid)
{
    uint64_t flags, start;
    char path[64];
    int fd, rc;

    *w = (struct worker){.pid = pid, .fd = -1};
    if (pid <= 0)
        return -ESRCH;
    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    rc = stat_read(fd, &flags, &start);
    if (rc == 0 && flags & FLAG_EXITING)
        rc = -ESRCH;
    if (rc < 0) {
        close(fd);
        return rc;
    }
    w->fd = fd;
    w->start = start;
    return 0;
}

bool worker_alive(const struct worker *w)
{
    uint64_t flags, start;

    return w->fd >= 0 && stat_read(w->fd, &flags, &start) == 0 && !(flags & FLAG_EXITING);
}

bool worker_hung_up(const int *peer_fd)
{
    struct pollfd p = {.events = POLLRDHUP};

    if (!peer_fd)
        return false;
    p.fd = *peer_fd;
    return poll(&p, 1, 0) > 0;
}

bool worker_seen(struct worker *w, const int *peer_fd, uint64_t now_ms)
{
    if (now_ms >= w->seen_ms + WORKER_SEEN_MS) {
        w->seen_ms = now_ms;
        w->seen = worker_alive(w) && !worker_hung_up(peer_fd);
    }
    return w->seen;
}

void worker_close(struct worker *w)
{
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
}
