/* Sockets that the daemon listens on: a path that one process at a time owns, and an address of
 * TCP. Errors come as a sentence in *e, and as -errno. */
#ifndef UCMD_BASE_LISTENER_H
#define UCMD_BASE_LISTENER_H

#include <netinet/in.h>
#include <stdbool.h>

struct ucm_error;

#define LISTENER_PATH_BYTES 108 /* of sun_path, its NUL included */
#define LISTENER_TEXT_BYTES 64

/* Zero it, then set both descriptors to -1. */
struct listener {
    int fd;      /* non-blocking; -1: none */
    int lock_fd; /* of PATH.lock, locked; -1: none */
    bool owns_path;
    char path[LISTENER_PATH_BYTES]; /* "" for TCP */
};

/* Listens on the Unix socket `path` with these permissions, for `group` ("": the process's).
 * PATH.lock is locked for this process's life, so a socket whose lock is free is a dead process's,
 * and is replaced. What it accepts takes no descriptors until rights_pass allows them (Linux 6.16).
 * `key` is what the configuration calls the path. -EADDRINUSE: another process has the lock. */
int listener_unix(struct listener *l, const char *key, const char *path, unsigned mode,
                  const char *group, int backlog, struct ucm_error *e);
/* Takes a Unix socket that listens already, e.g. from systemd. The same holds for what connects
 * from now on. */
void listener_take(struct listener *l, int fd);
/* Removes the path, if listener_unix made it. */
void listener_close(struct listener *l);

union listener_address {
    struct sockaddr any;
    struct sockaddr_in in4;
    struct sockaddr_in6 in6;
};

/* "127.0.0.1:9471", "[::1]:9471", or "9471", which is a port of 127.0.0.1. Numbers only; port 0
 * lets the kernel choose. 0 or -EINVAL. */
int listener_address_parse(const char *text, union listener_address *out);
bool listener_address_loopback(const union listener_address *a);
/* -EADDRINUSE: the port is taken. */
int listener_tcp(struct listener *l, const union listener_address *a, int backlog,
                 struct ucm_error *e);
/* The address that a TCP listener has, e.g. "127.0.0.1:9471". */
void listener_text(const struct listener *l, char buf[LISTENER_TEXT_BYTES]);

#endif
