/* ucmd-backend-s3 TARGET: keeps blocks in a bucket of an S3 server (docs/shared-tier.md). One
 * thread serves libcurl's transfers, the daemon's requests, and the output of a command that prints
 * credentials, over one epoll. */
#include "daemon/backend/s3/s3.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#define EVENTS 64
#define IDLE_MS 1000u

struct loop {
    struct s3 s3;
    int epoll;
    int command_fd;      /* of the credentials' command, as epoll has it; -1: none */
    uint64_t curl_at_ms; /* when libcurl wants to be called; UINT64_MAX: never */
};

/* ---- libcurl's sockets ---- */

static int watch(struct loop *l, int fd, uint32_t events)
{
    struct epoll_event e = {.events = events, .data.fd = fd};

    if (epoll_ctl(l->epoll, EPOLL_CTL_MOD, fd, &e) == 0)
        return 0;
    return errno == ENOENT ? epoll_ctl(l->epoll, EPOLL_CTL_ADD, fd, &e) : -1;
}

static int socket_cb(CURL *easy, curl_socket_t fd, int what, void *ctx, void *of_socket)
{
    struct loop *l = ctx;
    uint32_t events = (what & CURL_POLL_IN ? EPOLLIN : 0u) | (what & CURL_POLL_OUT ? EPOLLOUT : 0u);

    (void)easy, (void)of_socket;
    if (what == CURL_POLL_REMOVE) {
        (void)epoll_ctl(l->epoll, EPOLL_CTL_DEL, fd, NULL); /* it may be closed already */
        return 0;
    }
    return watch(l, fd, events);
}

static int timer_cb(CURLM *multi, long ms, void *ctx)
{
    struct loop *l = ctx;

    (void)multi;
    l->curl_at_ms = ms < 0 ? UINT64_MAX : clock_ms() + (uint64_t)ms;
    return 0;
}

static void transfers_take(struct loop *l)
{
    CURLMsg *m;
    int left;

    while ((m = curl_multi_info_read(l->s3.multi, &left)) != NULL) {
        struct s3_job *j;
        CURLcode result = m->data.result;

        if (m->msg != CURLMSG_DONE ||
            curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &j) != CURLE_OK)
            continue;
        s3_job_step_done(j, result);
    }
}

static void transfers_turn(struct loop *l, int fd, uint32_t events)
{
    int flags = (events & EPOLLIN ? CURL_CSELECT_IN : 0) |
                (events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
                (events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);
    int running;

    (void)curl_multi_socket_action(l->s3.multi, fd, flags, &running);
}

/* ---- the daemon's requests ---- */

/* 0; -EPIPE: the daemon is gone; -EPROTO. */
static int requests_take(struct loop *l)
{
    struct ucm_backend_request *r;
    int rc;

    while ((rc = ucm_backend_next(l->s3.backend, &r)) == 0)
        s3_job_begin(&l->s3, r);
    return rc == -EAGAIN ? 0 : rc;
}

/* ---- the event loop ---- */

static void command_watch(struct loop *l)
{
    int fd = s3_credentials_fd(l->s3.credentials);

    if (fd >= 0 && fd != l->command_fd)
        (void)watch(l, fd, EPOLLIN); /* if that fails, the time of its look comes */
    l->command_fd = fd;
}

static int wait_of(uint64_t until_ms)
{
    uint64_t now = clock_ms(), ms = until_ms > now ? until_ms - now : 0;

    return ms > IDLE_MS ? (int)IDLE_MS : (int)ms;
}

static int run(struct loop *l)
{
    struct epoll_event events[EVENTS];
    int daemon_fd = ucm_backend_fd(l->s3.backend), rc = 0;

    while (rc == 0 && !l->s3.gone) {
        uint64_t key_ms = s3_credentials_iteration(l->s3.credentials);
        uint64_t next = s3_jobs_iteration(&l->s3, !s3_credentials_awaited(l->s3.credentials));
        int n;

        command_watch(l);
        if (ucm_backend_flush(l->s3.backend) < 0)
            break;
        next = key_ms < next ? key_ms : next;
        next = l->curl_at_ms < next ? l->curl_at_ms : next;
        n = epoll_wait(l->epoll, events, EVENTS, wait_of(next));
        for (int i = 0; i < n; i++)
            if (events[i].data.fd == daemon_fd)
                rc = requests_take(l);
            else if (events[i].data.fd != l->command_fd)
                transfers_turn(l, events[i].data.fd, events[i].events);
        if (l->curl_at_ms <= clock_ms()) {
            l->curl_at_ms = UINT64_MAX;
            transfers_turn(l, CURL_SOCKET_TIMEOUT, 0);
        }
        transfers_take(l);
    }
    return rc == -EPIPE ? 0 : rc;
}

/* ---- beginning and end ---- */

static int jobs_make(struct s3 *s3)
{
    s3->n_jobs = (unsigned)ucm_backend_hello(s3->backend)->depth + 1; /* and the health check */
    s3->jobs = calloc(s3->n_jobs, sizeof(*s3->jobs));
    for (unsigned i = 0; s3->jobs && i < s3->n_jobs; i++) {
        s3->jobs[i].s3 = s3;
        s3->jobs[i].easy = curl_easy_init();
        if (!s3->jobs[i].easy)
            return -ENOMEM;
    }
    return s3->jobs ? 0 : -ENOMEM;
}

static int loop_open(struct loop *l)
{
    const struct ucm_backend_about about = {
        .name = "s3", .touch = l->s3.target.touch, .list = l->s3.target.list};
    int rc;

    l->epoll = epoll_create1(EPOLL_CLOEXEC);
    l->command_fd = -1;
    l->curl_at_ms = UINT64_MAX;
    if (l->epoll < 0 || getrandom(&l->s3.random, sizeof(l->s3.random), 0) < 0)
        return -errno;
    l->s3.random |= 1;
    l->s3.multi = curl_multi_init();
    rc = l->s3.multi ? s3_credentials_open(&l->s3.target, &l->s3.credentials) : -ENOMEM;
    if (rc == 0)
        rc = ucm_backend_open(&about, &l->s3.backend);
    if (rc == 0)
        rc = jobs_make(&l->s3);
    if (rc < 0)
        return rc;
    curl_multi_setopt(l->s3.multi, CURLMOPT_SOCKETFUNCTION, socket_cb);
    curl_multi_setopt(l->s3.multi, CURLMOPT_SOCKETDATA, l);
    curl_multi_setopt(l->s3.multi, CURLMOPT_TIMERFUNCTION, timer_cb);
    curl_multi_setopt(l->s3.multi, CURLMOPT_TIMERDATA, l);
    curl_multi_setopt(l->s3.multi, CURLMOPT_MAXCONNECTS, (long)l->s3.n_jobs);
    return watch(l, ucm_backend_fd(l->s3.backend), EPOLLIN) < 0 ? -errno : 0;
}

static void loop_close(struct loop *l)
{
    for (unsigned i = 0; l->s3.jobs && i < l->s3.n_jobs; i++) {
        struct s3_job *j = &l->s3.jobs[i];

        if (j->easy) {
            (void)curl_multi_remove_handle(l->s3.multi, j->easy);
            curl_easy_cleanup(j->easy);
        }
        curl_slist_free_all(j->headers);
        s3_xml_free(j->xml);
        free(j->files);
        free(j->r);
    }
    free(l->s3.jobs);
    curl_multi_cleanup(l->s3.multi);
    s3_credentials_close(l->s3.credentials);
    ucm_backend_close(l->s3.backend);
    close(l->epoll);
}

int main(int argc, char **argv)
{
    static struct loop l;
    char why[S3_WHY_BYTES];
    int rc;

    if (argc != 2) {
        fprintf(stderr, "Usage: ucmd-backend-s3 s3://BUCKET[/PREFIX][?OPTION=VALUE[&...]], which "
                        "ucmd starts: see docs/shared-tier.md\n");
        return 2;
    }
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return 1;
    if (s3_target_parse(argv[1], &l.s3.target, why) < 0) {
        fprintf(stderr, "ucmd-backend-s3: %s\n", why);
        return 2;
    }
    rc = loop_open(&l);
    if (rc == 0)
        rc = run(&l);
    loop_close(&l);
    curl_global_cleanup();
    if (rc < 0)
        fprintf(stderr, "ucmd-backend-s3: %s\n", strerror(-rc));
    return rc < 0;
}
