#include "daemon/front/place.h"

#include "daemon/base/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

#define FILE_BYTES 16384

/* Reads a file of a process's directory in /proc, as one text. Its length; 0: it is not there, or
 * longer. */
static size_t file_read(int directory, const char *name, char text[FILE_BYTES])
{
    ssize_t n = text_file_read(directory, name, 0, text, FILE_BYTES);

    return n > 0 && n < FILE_BYTES - 1 ? (size_t)n : 0;
}

/* The process's own number, and how many PID namespaces deep it lies below that of this /proc; 0:
 * not known. */
static unsigned pid_depth(int directory, pid_t *pid)
{
    char text[FILE_BYTES], *line, *end;
    unsigned depth = 0;

    if (file_read(directory, "status", text) == 0 || !(line = strstr(text, "\nNSpid:")))
        return 0;
    line += strlen("\nNSpid:");
    for (long v = strtol(line, &end, 10); end != line && *end != '\0';
         line = end, v = strtol(line, &end, 10)) {
        if (depth++ == 0)
            *pid = (pid_t)v;
        if (*end == '\n')
            break;
    }
    return depth;
}

/* What does not change while this process lives. */
struct own {
    unsigned depth; /* 0: not known; also where this /proc is that of another PID namespace */
    size_t map_bytes[2];
    char map[2][FILE_BYTES];
    bool has_ns;
    struct stat ns;
};

static const char *const map_names[2] = {"uid_map", "gid_map"};

static const struct own *own_read(void)
{
    static struct own own;
    int directory = own.depth == 0 ? open("/proc/self", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    pid_t pid = 0;

    if (directory < 0)
        return &own;
    for (int i = 0; i < 2; i++)
        own.map_bytes[i] = file_read(directory, map_names[i], own.map[i]);
    own.has_ns = fstatat(directory, "ns/user", &own.ns, 0) == 0;
    own.depth = pid_depth(directory, &pid);
    if (pid != getpid())
        own.depth = 0;
    close(directory);
    return &own;
}

/* The maps decide, as this process may read those of all others. As read from inside, the maps of
 * two namespaces are alike only if both are the whole: for that, the namespaces themselves, where
 * this process may ask for them. */
static bool user_ns_same(const struct own *own, int peer)
{
    struct stat ns;
    char map[FILE_BYTES];

    for (int i = 0; i < 2; i++) {
        size_t n = file_read(peer, map_names[i], map);

        if (n == 0 || n != own->map_bytes[i] || memcmp(map, own->map[i], n) != 0)
            return false;
    }
    return !own->has_ns || fstatat(peer, "ns/user", &ns, 0) != 0 ||
           (ns.st_dev == own->ns.st_dev && ns.st_ino == own->ns.st_ino);
}

/* The path after "ID:CONTROLLERS:" in a line, if these are of the hierarchy. Cgroups may have any
 * name, so that nothing but the first two colons counts. */
static const char *line_path(const char *line, const char *hierarchy)
{
    const char *of = strchr(line, ':'), *path = of ? strchr(of + 1, ':') : NULL;
    size_t n = strlen(hierarchy);

    return path && (size_t)(path - of - 1) == n && memcmp(of + 1, hierarchy, n) == 0 ? path + 1
                                                                                     : NULL;
}

/* Reads the path in cgroup v1's named hierarchy if there is one, else in v2's. */
static void cgroup_read(int directory, char out[PLACE_CGROUP_BYTES])
{
    const char *v1 = NULL, *v2 = NULL;
    char text[FILE_BYTES], *rest = text, *line;

    out[0] = '\0';
    if (file_read(directory, "cgroup", text) == 0)
        return;
    while ((line = strsep(&rest, "\n"))) {
        v1 = v1 ? v1 : line_path(line, "name=systemd");
        v2 = v2 ? v2 : line_path(line, "");
    }
    v1 = v1 ? v1 : v2;
    if (v1 && strlen(v1) < PLACE_CGROUP_BYTES)
        memcpy(out, v1, strlen(v1) + 1);
}

/* Whether nobody holds the other end any more. What ended before accept is not looked up by its
 * number, which may be another process's by now. */
static bool hung_up(int fd)
{
    struct pollfd p = {.fd = fd};

    return poll(&p, 1, 0) != 0; /* POLLHUP needs no asking */
}

/* A descriptor of the process that connected. Older kernels: of the one that has its number now. */
static int process_open(int fd, pid_t pid)
{
    socklen_t bytes = sizeof(int);
    int process;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &process, &bytes) == 0)
        return process;
    return errno == ENOPROTOOPT ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

static bool process_alive(int process)
{
    struct pollfd p = {.fd = process, .events = POLLIN};

    return poll(&p, 1, 0) == 0;
}

static enum peer_place directory_place(int peer, pid_t pid, char cgroup[PLACE_CGROUP_BYTES])
{
    const struct own *own = own_read();
    pid_t peer_pid = 0;
    unsigned depth = pid_depth(peer, &peer_pid);

    /* Numbers that differ: this is the /proc of another PID namespace. */
    if (own->depth == 0 || depth == 0 || peer_pid != pid)
        return PLACE_UNKNOWN;
    cgroup_read(peer, cgroup);
    if (!user_ns_same(own, peer))
        return PLACE_USER_NS;
    return depth != own->depth ? PLACE_CONTAINER : PLACE_HERE;
}

enum peer_place place_read(int fd, pid_t pid, char cgroup[PLACE_CGROUP_BYTES])
{
    int process = pid > 0 ? process_open(fd, pid) : -1, directory;
    enum peer_place place = PLACE_UNKNOWN;
    char path[32];

    cgroup[0] = '\0';
    if (process < 0)
        return PLACE_UNKNOWN;
    snprintf(path, sizeof(path), "/proc/%d", (int)pid);
    directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory >= 0) {
        /* An open directory stays its process's. That lives still, so nobody else had its
         * number. */
        place = directory_place(directory, pid, cgroup);
        if (!process_alive(process) || hung_up(fd)) {
            place = PLACE_UNKNOWN;
            cgroup[0] = '\0';
        }
        close(directory);
    }
    close(process);
    return place;
}

void place_own_cgroup(char cgroup[PLACE_CGROUP_BYTES])
{
    int directory = open("/proc/self", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    cgroup[0] = '\0';
    if (directory < 0)
        return;
    cgroup_read(directory, cgroup);
    close(directory);
}
