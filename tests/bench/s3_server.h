/* A server that keeps objects in memory and answers as S3 does, as fast as threads and sockets can: for s3_bench only. It verifies no
 * signatures. It keeps the last 512 objects. */
#ifndef UCM_BENCH_S3_SERVER_H
#define UCM_BENCH_S3_SERVER_H

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define S3_OBJECTS 512u
#define S3_HEAD 16384u

struct s3_object {
    char path[256];
    uint8_t *data;
    size_t bytes;
};

static struct {
    pthread_mutex_t lock;
    struct s3_object objects[S3_OBJECTS];
    unsigned n;
} s3_store = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Its place, made if it is not there. */
static struct s3_object *s3_object_find(const char *path, size_t bytes, int make)
{
    struct s3_object *o = NULL;

    pthread_mutex_lock(&s3_store.lock);
    for (unsigned i = 0; !o && i < s3_store.n && i < S3_OBJECTS; i++)
        if (strcmp(s3_store.objects[i].path, path) == 0)
            o = &s3_store.objects[i];
    if (!o && make) {
        o = &s3_store.objects[s3_store.n++ % S3_OBJECTS];
        snprintf(o->path, sizeof(o->path), "%s", path);
    }
    if (o && make && o->bytes != bytes) {
        free(o->data);
        o->data = malloc(bytes ? bytes : 1);
        o->bytes = bytes;
    }
    pthread_mutex_unlock(&s3_store.lock);
    return o;
}

static int s3_send(int fd, const char *head, const void *body, size_t n)
{
    struct iovec v[2] = {{(void *)(uintptr_t)head, strlen(head)}, {(void *)(uintptr_t)body, n}};

    while (v[0].iov_len + v[1].iov_len > 0) {
        ssize_t sent = writev(fd, v, 2);

        if (sent < 0)
            return -1;
        for (unsigned i = 0; i < 2; i++) {
            size_t part = (size_t)sent < v[i].iov_len ? (size_t)sent : v[i].iov_len;

            v[i].iov_base = (char *)v[i].iov_base + part;
            v[i].iov_len -= part;
            sent -= (ssize_t)part;
        }
    }
    return 0;
}

static size_t s3_length(const char *head)
{
    const char *at = strcasestr(head, "\r\nContent-Length:");

    return at ? strtoull(at + 17, NULL, 10) : 0;
}

/* One request, of which `head` was read, and the first bytes of a body behind it. */
static int s3_answer(int fd, char *head, const char *body, size_t n)
{
    static const char date[] =
        "Date: Mon, 23 Nov 2026 12:00:00 GMT\r\nLast-Modified: Mon, 23 Nov 2026 12:00:00 GMT\r\n";
    char method[8], path[256], text[400];
    size_t bytes = s3_length(head);
    struct s3_object *o;

    if (sscanf(head, "%7s %255s", method, path) != 2)
        return -1;
    o = s3_object_find(path, bytes, method[0] == 'P');
    if (method[0] == 'P' && o) {
        if (n == 0 && strcasestr(head, "100-continue") &&
            s3_send(fd, "HTTP/1.1 100 Continue\r\n\r\n", "", 0) < 0)
            return -1;
        memcpy(o->data, body, n);
        for (ssize_t got; n < bytes; n += (size_t)got)
            if ((got = recv(fd, o->data + n, bytes - n, 0)) <= 0)
                return -1;
    }
    snprintf(text, sizeof(text), "HTTP/1.1 %s\r\n%sContent-Length: %zu\r\n\r\n",
             o ? "200 OK" : "404 Not Found", date, o && method[0] != 'P' ? o->bytes : 0);
    return s3_send(fd, text, o ? o->data : NULL, o && method[0] == 'G' ? o->bytes : 0);
}

static void *s3_connection_main(void *arg)
{
    int fd = (int)(intptr_t)arg, on = 1;
    char *head = malloc(S3_HEAD + 1), *end;
    size_t n = 0;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    while (head) {
        ssize_t got = recv(fd, head + n, S3_HEAD - n, 0);

        if (got <= 0)
            break;
        n += (size_t)got;
        head[n] = '\0';
        end = strstr(head, "\r\n\r\n");
        if (!end)
            continue;
        *end = '\0';
        if (s3_answer(fd, head, end + 4, n - (size_t)(end + 4 - head)) < 0)
            break;
        n = 0;
    }
    free(head);
    close(fd);
    return NULL;
}

/* Its port. */
static int s3_server_start(pid_t *pid)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pthread_t thread;

    if (fd < 0 || bind(fd, (struct sockaddr *)&at, n) < 0 || listen(fd, 256) < 0 ||
        getsockname(fd, (struct sockaddr *)&at, &n) < 0)
        return 0;
    *pid = fork();
    if (*pid != 0) {
        close(fd);
        return ntohs(at.sin_port);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        int c = accept4(fd, NULL, NULL, SOCK_CLOEXEC);

        if (c >= 0 && pthread_create(&thread, NULL, s3_connection_main, (void *)(intptr_t)c) == 0)
            pthread_detach(thread);
    }
}

#endif
