/* Writes a process's standard output and error into the daemon's log, line by line. A thread reads
 * them from a pipe: a writer holds the pipe's lock while a page that it writes from is not yet
 * there, and the reader would wait, too. (A socket could bring descriptors.) */
#include "daemon/base/detached.h"
#include "daemon/base/log.h"
#include "daemon/shared/process/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#define READ_BYTES 4096u
#define PAUSE_NS                                                                                   \
    1000000 /* between reads: a process that writes too much blocks, and takes no processor time */

struct said {
    struct closing *closing;
    int fd;
    char root[128];
    uint64_t window_ms; /* when the present window began */
    unsigned lines;     /* in it */
    uint64_t dropped;   /* lines that the log does not have, and has not been told of */
    size_t n;           /* of the present line: its bytes, those that are left out among them */
    char line[PROCESS_LINE_BYTES];
};

/* Each time as if from a new site: what bounds the lines is here. */
#define SAY(format, ...)                                                                           \
    log_line(&(struct log_site){0}, LOG_WARN, "shared", "backend-says", format, __VA_ARGS__)

static void dropped_tell(struct said *s)
{
    if (s->dropped > 0)
        SAY("root=%s dropped=%llu", s->root, (unsigned long long)s->dropped);
    s->dropped = 0;
}

static bool line_passes(struct said *s)
{
    uint64_t now_ms = uv_hrtime() / 1000000;

    if (s->lines == 0 || now_ms - s->window_ms >= PROCESS_LINES_MS) {
        dropped_tell(s);
        s->window_ms = now_ms;
        s->lines = 0;
    }
    if (s->lines == PROCESS_LINES)
        return false;
    s->lines++;
    return true;
}

static void line_end(struct said *s)
{
    bool cut = s->n > sizeof(s->line);

    if (s->n > 0 && line_passes(s))
        SAY("root=%s text=\"%.*s%s\"", s->root, (int)(cut ? sizeof(s->line) : s->n), s->line,
            cut ? "..." : "");
    else
        s->dropped += s->n > 0;
    s->n = 0;
}

static void bytes_take(struct said *s, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] == '\n') {
            line_end(s);
            continue;
        }
        if (s->n < sizeof(s->line))
            s->line[s->n] = bytes[i] ? bytes[i] : '?';
        s->n++;
    }
}

static void *said_cb(void *arg)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    struct said *s = arg;
    char bytes[READ_BYTES];
    ssize_t n;

    while ((n = read(s->fd, bytes, sizeof(bytes))) > 0 || (n < 0 && errno == EINTR)) {
        bytes_take(s, bytes, n > 0 ? (size_t)n : 0);
        (void)nanosleep(&pause, NULL);
    }
    line_end(s);
    dropped_tell(s);
    close(s->fd);
    closing_drop(s->closing);
    free(s);
    return NULL;
}

int process_said_begin(struct shared_backend *b, int *out)
{
    struct said *s = calloc(1, sizeof(*s));
    int fds[2], rc;

    if (!s)
        return -ENOMEM;
    if (pipe2(fds, O_CLOEXEC) < 0) {
        rc = -errno;
        free(s);
        return rc;
    }
    s->fd = fds[0];
    memcpy(s->root, b->shown, sizeof(s->root));
    s->closing = closing_hold(b->closing_fds);
    rc = detached_start(0, said_cb, s);
    if (rc < 0) {
        closing_drop(s->closing);
        close(fds[0]);
        close(fds[1]);
        free(s);
        return rc;
    }
    *out = fds[1];
    return 0;
}
