#include "daemon/cuda/worker.h"

#include "daemon/base/text_file.h"
#include "daemon/device/work.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FLAG_EXITING 0x4u /* PF_EXITING, which the kernel sets first when a process exits */
/* Of /proc/<pid>/stat, after the second field: the ninth, flags, and the 22nd, the start. */
#define STAT_FIELDS                                                                                \
    ") %*c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %" SCNu64

/* Reads from offset 0, so that the kernel writes the text again. -ESRCH: the process is gone. */
static int stat_read(int fd, unsigned *flags, uint64_t *start)
{
    const char *name_end;
    char text[1024];
    ssize_t n;

    do {
        n = pread(fd, text, sizeof(text) - 1, 0);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    text[n] = '\0';
    /* The second field is the program's name in brackets, which may hold anything. */
    name_end = strrchr(text, ')');
    return name_end && sscanf(name_end, STAT_FIELDS, flags, start) == 2 ? 0 : -EIO;
}

int worker_open(struct worker *w, pid_t pid)
{
    unsigned flags;
    uint64_t start;
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
    unsigned flags;
    uint64_t start;

    return w->fd >= 0 && stat_read(w->fd, &flags, &start) == 0 && !(flags & FLAG_EXITING);
}

bool worker_seen(struct worker *w, const int *peer_fd, uint64_t now_ms)
{
    if (now_ms >= w->seen_ms + WORKER_SEEN_MS) {
        w->seen_ms = now_ms;
        w->seen = worker_alive(w) && !peer_hung_up(peer_fd);
    }
    return w->seen;
}

/* ---- events ---- */

/* How many pid namespaces, from ours on, the process has a number in; 1 when the kernel does not
 * say. A worker with very many groups pushes that line out of the buffer: not known. */
static int status_read(const struct worker *w, unsigned *uid)
{
    char path[64], text[4096], *line;
    int levels = 0;
    ssize_t n;

    snprintf(path, sizeof(path), "/proc/%ld/status", (long)w->pid);
    n = text_file_read(AT_FDCWD, path, 0, text, sizeof(text));
    if (n < 0)
        return (int)n;
    line = strstr(text, "\nUid:");
    if (!line || sscanf(line, " Uid: %*u %u", uid) != 1)
        return -EIO;
    line = strstr(text, "\nNSpid:");
    if (!line)
        return n == (ssize_t)sizeof(text) - 1 ? -EIO : 1;
    for (line += strlen("\nNSpid:"); *line && *line != '\n'; line++)
        levels += *line == '\t';
    return levels;
}

const char *worker_events_foreign(const struct worker *w)
{
    struct stat ours, theirs;
    unsigned uid;
    char path[64];
    int levels = w->fd < 0 ? -ESRCH : status_read(w, &uid);

    if (levels < 0)
        return "the worker's process can't be seen from here (another pid namespace?)";
    if (levels > 1)
        return "the worker is in a pid namespace of its own";
    if (uid != (unsigned)geteuid())
        return "the worker is another user than the daemon";
    snprintf(path, sizeof(path), "/proc/%ld/root/dev/shm", (long)w->pid);
    if (stat(path, &theirs) < 0)
        return "the worker's /dev/shm can't be seen from here";
    if (stat("/dev/shm", &ours) < 0 || ours.st_dev != theirs.st_dev || ours.st_ino != theirs.st_ino)
        return "the worker's /dev/shm is not the daemon's";
    return worker_alive(w) ? NULL : "the worker is gone";
}

void worker_close(struct worker *w)
{
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
}
