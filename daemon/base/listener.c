#include "daemon/base/listener.h"

#include "daemon/base/log.h"
#include "daemon/base/rights.h"
#include "proto/errors.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static void listener_init(struct listener *l)
{
    *l = (struct listener){.fd = -1, .lock_fd = -1};
}

void listener_take(struct listener *l, int fd)
{
    listener_init(l);
    l->fd = fd;
    (void)rights_pass(fd, false); /* from Linux 6.16 on */
}

void listener_close(struct listener *l)
{
    if (l->owns_path && unlink(l->path) != 0)
        log_debug("listener", "unlink-failed", "path=%s errno=%d", l->path, errno);
    if (l->fd >= 0)
        close(l->fd);
    if (l->lock_fd >= 0)
        close(l->lock_fd);
    listener_init(l);
}

/* After a system call failed: the sentence, and -errno. */
static int failed(struct ucm_error *e, const char *what, const char *where)
{
    int rc = -errno;

    ucm_error_set(e, UCM_WIRE_IO, "cannot %s %s: %s", what, where, strerror(-rc));
    return rc;
}

/* ---- a path ---- */

static int path_lock(struct listener *l, const char *key, struct ucm_error *e)
{
    char lock[LISTENER_PATH_BYTES + 8];

    snprintf(lock, sizeof(lock), "%s.lock", l->path);
    l->lock_fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (l->lock_fd < 0) {
        ucm_error_set(e, UCM_WIRE_IO,
                      "cannot open %s: %s; its directory must exist and be writable", lock,
                      strerror(errno));
        return -EACCES;
    }
    if (flock(l->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        ucm_error_set(e, UCM_WIRE_BUSY, "another ucmd serves %s; stop it, or set another `%s`",
                      l->path, key);
        return -EADDRINUSE;
    }
    return 0;
}

static int path_access(const struct listener *l, unsigned mode, const char *name,
                       struct ucm_error *e)
{
    const struct group *group;

    if (chmod(l->path, mode) != 0)
        return failed(e, "set the mode of", l->path);
    if (name[0] == '\0')
        return 0;
    group = getgrnam(name);
    if (!group || chown(l->path, (uid_t)-1, group->gr_gid) != 0) {
        ucm_error_set(e, UCM_WIRE_IO, "cannot give %s to group \"%s\": %s", l->path, name,
                      group ? strerror(errno) : "there is no such group");
        return -EACCES;
    }
    return 0;
}

static int path_listen(struct listener *l, const char *key, unsigned mode, const char *group,
                       int backlog, struct ucm_error *e)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    mode_t mask;
    int rc = path_lock(l, key, e);

    if (rc != 0)
        return rc;
    memcpy(address.sun_path, l->path, strlen(l->path) + 1);
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return failed(e, "make a socket for", l->path);
    (void)rights_pass(l->fd, false); /* from Linux 6.16 on */
    if (unlink(l->path) != 0 && errno != ENOENT)
        log_warn("listener", "unlink-failed", "path=%s errno=%d", l->path, errno);
    mask = umask(0177); /* nobody connects before path_access has set mode and group */
    rc = bind(l->fd, (struct sockaddr *)&address, sizeof(address));
    umask(mask);
    if (rc != 0)
        return failed(e, "listen on", l->path);
    l->owns_path = true;
    rc = path_access(l, mode, group, e);
    if (rc != 0)
        return rc;
    return listen(l->fd, backlog) == 0 ? 0 : failed(e, "listen on", l->path);
}

int listener_unix(struct listener *l, const char *key, const char *path, unsigned mode,
                  const char *group, int backlog, struct ucm_error *e)
{
    int rc;

    listener_init(l);
    if (strlen(path) >= sizeof(l->path)) {
        ucm_error_set(e, UCM_WIRE_INVALID, "%s: a path has at most %zu bytes", key,
                      sizeof(l->path) - 1);
        return -EINVAL;
    }
    memcpy(l->path, path, strlen(path) + 1);
    rc = path_listen(l, key, mode, group, backlog, e);
    if (rc != 0)
        listener_close(l);
    return rc;
}

/* ---- TCP ---- */

/* Digits alone, as strtoul takes more. 0 or -EINVAL. */
static int port_parse(const char *text, in_port_t *port)
{
    size_t n = strlen(text);
    unsigned long v;

    if (n == 0 || n > 5 || strspn(text, "0123456789") != n)
        return -EINVAL;
    v = strtoul(text, NULL, 10);
    if (v > UINT16_MAX)
        return -EINVAL;
    *port = htons((uint16_t)v);
    return 0;
}

static int parse_in6(const char *text, union listener_address *a)
{
    const char *end = strstr(text, "]:");
    char host[INET6_ADDRSTRLEN];
    size_t n;

    if (!end)
        return -EINVAL;
    n = (size_t)(end - text) - 1;
    if (n >= sizeof(host))
        return -EINVAL;
    memcpy(host, text + 1, n);
    host[n] = '\0';
    a->in6.sin6_family = AF_INET6;
    if (inet_pton(AF_INET6, host, &a->in6.sin6_addr) != 1)
        return -EINVAL;
    return port_parse(end + 2, &a->in6.sin6_port);
}

static int parse_in4(const char *text, union listener_address *a)
{
    const char *colon = strchr(text, ':');
    char host[INET_ADDRSTRLEN] = "127.0.0.1";

    if (colon) {
        size_t n = (size_t)(colon - text);

        if (n >= sizeof(host))
            return -EINVAL;
        memcpy(host, text, n);
        host[n] = '\0';
    }
    a->in4.sin_family = AF_INET;
    if (inet_pton(AF_INET, host, &a->in4.sin_addr) != 1)
        return -EINVAL;
    return port_parse(colon ? colon + 1 : text, &a->in4.sin_port);
}

int listener_address_parse(const char *text, union listener_address *out)
{
    union listener_address a;
    int rc;

    memset(&a, 0, sizeof(a));
    rc = text[0] == '[' ? parse_in6(text, &a) : parse_in4(text, &a);
    if (rc == 0)
        *out = a;
    return rc;
}

bool listener_address_loopback(const union listener_address *a)
{
    if (a->any.sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&a->in6.sin6_addr);
    return ntohl(a->in4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

static void address_text(const union listener_address *a, char buf[LISTENER_TEXT_BYTES])
{
    bool in6 = a->any.sa_family == AF_INET6;
    const void *host = in6 ? (const void *)&a->in6.sin6_addr : (const void *)&a->in4.sin_addr;
    char text[INET6_ADDRSTRLEN] = "?";

    if (!inet_ntop(a->any.sa_family, host, text, sizeof(text)))
        text[0] = '?';
    snprintf(buf, LISTENER_TEXT_BYTES, in6 ? "[%s]:%u" : "%s:%u", text,
             ntohs(in6 ? a->in6.sin6_port : a->in4.sin_port));
}

void listener_text(const struct listener *l, char buf[LISTENER_TEXT_BYTES])
{
    union listener_address a;
    socklen_t n = sizeof(a);

    memset(&a, 0, sizeof(a));
    if (getsockname(l->fd, &a.any, &n) == 0)
        address_text(&a, buf);
    else
        snprintf(buf, LISTENER_TEXT_BYTES, "?");
}

int listener_tcp(struct listener *l, const union listener_address *a, int backlog,
                 struct ucm_error *e)
{
    bool in6 = a->any.sa_family == AF_INET6;
    char text[LISTENER_TEXT_BYTES];
    int on = 1, rc = 0;

    listener_init(l);
    address_text(a, text);
    l->fd = socket(a->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return failed(e, "make a socket for", text);
    /* A port whose last connections wait for their end is free. */
    if (setsockopt(l->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        (in6 && setsockopt(l->fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on)) != 0) ||
        bind(l->fd, &a->any, in6 ? sizeof(a->in6) : sizeof(a->in4)) != 0 ||
        listen(l->fd, backlog) != 0)
        rc = failed(e, "listen on", text);
    if (rc != 0)
        listener_close(l);
    return rc;
}
