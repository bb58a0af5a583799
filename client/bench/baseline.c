#include "client/bench/baseline.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- echo ---- */

static int read_all(int fd, uint8_t *p, size_t n)
{
    while (n > 0) {
        ssize_t got = read(fd, p, n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -EPIPE;
        p += got;
        n -= (size_t)got;
    }
    return 0;
}

static int write_all(int fd, const uint8_t *p, size_t n)
{
    while (n > 0) {
        ssize_t put = send(fd, p, n, MSG_NOSIGNAL);

        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return -errno;
        p += put;
        n -= (size_t)put;
    }
    return 0;
}

static void echo_child(const struct echo *e, int fd)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (read_all(fd, e->buf, e->request_bytes) == 0)
        if (write_all(fd, e->buf, e->response_bytes) < 0)
            break;
    _exit(0);
}

int echo_start(struct echo *e, size_t request_bytes, size_t response_bytes)
{
    size_t room = request_bytes > response_bytes ? request_bytes : response_bytes;
    int pair[2], rc;

    e->request_bytes = request_bytes;
    e->response_bytes = response_bytes;
    e->buf = calloc(1, room);
    if (e->buf == NULL)
        return -ENOMEM;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) {
        rc = -errno;
        goto err_after_buf;
    }
    fflush(NULL);
    e->child = fork();
    if (e->child < 0) {
        rc = -errno;
        close(pair[0]);
        close(pair[1]);
        goto err_after_buf;
    }
    if (e->child == 0) {
        close(pair[0]);
        echo_child(e, pair[1]);
    }
    close(pair[1]);
    e->fd = pair[0];
    return 0;
err_after_buf:
    free(e->buf);
    return rc;
}

void echo_stop(struct echo *e)
{
    close(e->fd);
    free(e->buf);
    while (waitpid(e->child, NULL, 0) < 0 && errno == EINTR)
        continue;
}

int echo_run(struct echo *e, unsigned calls, struct samples *out_us)
{
    for (unsigned i = 0; i < calls; i++) {
        uint64_t t = clock_ns();
        int rc = write_all(e->fd, e->buf, e->request_bytes);

        if (rc == 0)
            rc = read_all(e->fd, e->buf, e->response_bytes);
        if (rc == 0)
            rc = samples_add(out_us, (double)(clock_ns() - t) / 1e3);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- memcpy ---- */

int copy_init(struct copy *c, uint8_t *region, uint32_t blocks, uint32_t planes, uint32_t fragment,
              unsigned threads)
{
    size_t bytes = (size_t)blocks * planes * fragment;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED)
        return -ENOMEM;
    (void)madvise(p, bytes,
                  MADV_HUGEPAGE); /* as the daemon's arena; without it the run still counts */
    memset(p, 1, bytes);
    *c = (struct copy){.region = region,
                       .slots = p,
                       .blocks = blocks,
                       .planes = planes,
                       .fragment = fragment,
                       .threads = threads};
    return 0;
}

void copy_close(struct copy *c)
{
    munmap(c->slots, (size_t)c->blocks * c->planes * c->fragment);
}

struct stripe {
    const struct copy *c;
    pthread_t thread;
    uint32_t first, n;
    bool to_region;
};

static void *stripe_run(void *arg)
{
    const struct stripe *s = arg;
    const struct copy *c = s->c;

    for (uint32_t b = s->first; b < s->first + s->n; b++) {
        for (uint32_t p = 0; p < c->planes; p++) {
            uint8_t *slot = c->slots + ((size_t)b * c->planes + p) * c->fragment;
            uint8_t *page = c->region + ((size_t)p * c->blocks + b) * c->fragment;

            memcpy(s->to_region ? page : slot, s->to_region ? slot : page, c->fragment);
        }
    }
    return NULL;
}

double copy_run(struct copy *c, bool to_region)
{
    struct stripe stripe[64];
    unsigned n = c->threads < 64 ? c->threads : 64, begun;
    uint64_t t = clock_ns();
    double seconds;

    for (begun = 0; begun < n; begun++) {
        uint32_t first = (uint32_t)((uint64_t)c->blocks * begun / n);
        uint32_t end = (uint32_t)((uint64_t)c->blocks * (begun + 1) / n);

        stripe[begun] =
            (struct stripe){.c = c, .first = first, .n = end - first, .to_region = to_region};
        if (n == 1)
            stripe_run(&stripe[begun]);
        else if (pthread_create(&stripe[begun].thread, NULL, stripe_run, &stripe[begun]) != 0)
            break;
    }
    for (unsigned i = 0; n > 1 && i < begun; i++)
        pthread_join(stripe[i].thread, NULL);
    seconds = (double)(clock_ns() - t) / 1e9;
    return begun == n ? (double)c->blocks * c->planes * c->fragment / seconds : 0;
}
