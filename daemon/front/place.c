#include "daemon/front/place.h"

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

/* Reads a file of a process's folder in /proc, as one text. Its length; 0: it is not there, or longer. */
static size_t file_read(int folder, const char *name, char text[FILE_BYTES])
{
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC);
    size_t have = 0;
    ssize_t n = -1;

    if (fd < 0)
        return 0;
    while (have < FILE_BYTES - 1 && (n = read(fd, text + have, FILE_BYTES - 1 - have)) > 0)
        have += (size_t)n;
    close(fd);
    text[have] = '\0';
    return n == 0 ? have : 0;
}

/* Do both processes have this file, with the same text? */
static bool file_same(int a, int b, const char *name)
{
    char of_a[FILE_BYTES], of_b[FILE_BYTES];
    size_t n = file_read(a, name, of_a);

    return n > 0 && file_read(b, name, of_b) == n && memcmp(of_a, of_b, n) == 0;
}

/* The process's own number, and how many PID namespaces deep it lies below that of this /proc; 0: not
 * known. */
static unsigned pid_depth(int folder, pid_t *pid)
{
    char text[FILE_BYTES], *line, *end;
    unsigned depth = 0;

    if (file_read(folder, "status", text) == 0 || !(line = strstr(text, "\nNSpid:")))
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

/* The maps decide, as this process may read those of all others. As read from inside, the maps of two
 * namespaces are alike only if both are the whole: for that, the namespaces themselves, where this
 * process may ask for them. */
static bool user_ns_same(int own, int peer)
{
    struct stat of_own, of_peer;

    if (!file_same(own, peer, "uid_map") || !file_same(own, peer, "gid_map"))
        return false;
    return fstatat(own, "ns/user", &of_own, 0) != 0 || fstatat(peer, "ns/user", &of_peer, 0) != 0 ||
           (of_own.st_dev == of_peer.st_dev && of_own.st_ino == of_peer.st_ino);
}

/* The path behind "ID:CONTROLLERS:" in a line, if these are of the hierarchy. Cgroups may have any name, so
 * that nothing but the first two colons counts. */
static const char *line_path(const char *line, const char *hierarchy)
{
    const char *of = strchr(line, ':'), *path = of ? strchr(of + 1, ':') : NULL;
    size_t n = strlen(hierarchy);

    return path && (size_t)(path - of - 1) == n && memcmp(of + 1, hierarchy, n) == 0 ? path + 1
                                                                                     : NULL;
}

/* Of cgroup v1's named hierarchy where there is one, else of v2. */
static void cgroup_read(int folder, char out[PLACE_CGROUP_BYTES])
{
    const char *v1 = NULL, *v2 = NULL;
    char text[FILE_BYTES], *rest = text, *line;

    out[0] = '\0';
    if (file_read(folder, "cgroup", text) == 0)
        return;
    while ((line = strsep(&rest, "\n"))) {
        v1 = v1 ? v1 : line_path(line, "name=systemd");
        v2 = v2 ? v2 : line_path(line, "");
    }
    v1 = v1 ? v1 : v2;
    if (v1 && strlen(v1) < PLACE_CGROUP_BYTES)
        memcpy(out, v1, strlen(v1) + 1);
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

static enum peer_place folder_place(int peer, pid_t pid, char cgroup[PLACE_CGROUP_BYTES])
{
    int own = open("/proc/self", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    pid_t own_pid = 0, peer_pid = 0;
    unsigned own_depth = own >= 0 ? pid_depth(own, &own_pid) : 0,
             peer_depth = pid_depth(peer, &peer_pid);
    enum peer_place place = PLACE_UNKNOWN;

    /* Numbers that differ: this is the /proc of another PID namespace. */
    if (own_depth > 0 && own_pid == getpid() && peer_depth > 0 && peer_pid == pid) {
        place = !user_ns_same(own, peer)  ? PLACE_USER_NS
                : peer_depth != own_depth ? PLACE_CONTAINER
                                          : PLACE_HERE;
        cgroup_read(peer, cgroup);
    }
    if (own >= 0)
        close(own);
    return place;
}

enum peer_place place_read(int fd, pid_t pid, char cgroup[PLACE_CGROUP_BYTES])
{
    int process = pid > 0 ? process_open(fd, pid) : -1, folder;
    enum peer_place place = PLACE_UNKNOWN;
    char path[32];

    cgroup[0] = '\0';
    if (process < 0)
        return PLACE_UNKNOWN;
    snprintf(path, sizeof(path), "/proc/%d", (int)pid);
    folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        /* An open folder stays its process's. That lives still, so nobody else had its number. */
        place = folder_place(folder, pid, cgroup);
        if (!process_alive(process)) {
            place = PLACE_UNKNOWN;
            cgroup[0] = '\0';
        }
        close(folder);
    }
    close(process);
    return place;
}
