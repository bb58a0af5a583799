/* Where a peer runs: this process, children in namespaces of their own, and a process that has
 * gone. The kernel's namespaces are real. Tests of those that this user may not make are skipped.
 */
#include "daemon/front/peer.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int ends[2]; /* of a socket: the daemon's, and a child's */
static int hold[2]; /* a child lives until this is closed */
static char cgroup[PLACE_CGROUP_BYTES];

static void setup(void)
{
    cr_assert_eq(pipe2(hold, O_CLOEXEC), 0);
}

TestSuite(place, .init = setup);

/* A socket whose peer is the caller: both ends of a socketpair belong to the process that made it.
 */
static int listener(char path[64])
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    snprintf(path, 64, "/tmp/ucmd-place-%d", (int)getpid());
    unlink(path);
    memcpy(at.sun_path, path, strlen(path) + 1);
    cr_assert_eq(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    cr_assert_eq(chmod(path, 0666), 0);
    cr_assert_eq(listen(fd, 4), 0);
    return fd;
}

static int connect_to(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    memcpy(at.sun_path, path, strlen(path) + 1);
    return fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof(at)) == 0 ? fd : -1;
}

static bool map_write(pid_t child, const char *name, const char *text)
{
    char path[64];
    int fd;
    bool done;

    snprintf(path, sizeof(path), "/proc/%d/%s", (int)child, name);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    done = fd >= 0 && write(fd, text, strlen(text)) > 0;
    if (fd >= 0)
        close(fd);
    return done;
}

static bool maps_write(pid_t child, const char *map)
{
    return map_write(child, "setgroups", "deny") && map_write(child, "uid_map", map) &&
           map_write(child, "gid_map", map);
}

/* In a child: enters the namespaces of `flags`, says so, connects when it may, and waits. */
static void child_run(const char *path, int flags, int turn)
{
    char byte = 0;

    close(hold[1]);
    if (flags && unshare(flags) != 0)
        _exit(77);
    if (write(turn, &byte, 1) != 1 || read(turn, &byte, 1) != 1)
        _exit(77);
    if (connect_to(path) < 0)
        _exit(78);
    _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);
}

static enum peer_place found_place(struct ucred *cred)
{
    socklen_t bytes = sizeof(*cred);

    cr_assert_eq(getsockopt(ends[0], SOL_SOCKET, SO_PEERCRED, cred, &bytes), 0);
    return place_read(ends[0], cred->pid, cgroup);
}

/* Connects from a child in namespaces of its own. False: the kernel does not let us make them. */
static bool connected(int flags, const char *map, enum peer_place *place)
{
    char path[64], byte;
    int at = listener(path), turn[2], status;
    struct ucred cred;
    pid_t child;
    bool there;

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, turn), 0);
    child = fork();
    if (child == 0) {
        close(turn[0]);
        child_run(path, flags, turn[1]);
    }
    close(turn[1]);
    there = read(turn[0], &byte, 1) == 1 && (!map || maps_write(child, map)) &&
            write(turn[0], &byte, 1) == 1;
    close(turn[0]);
    if (there) {
        ends[0] = accept4(at, NULL, NULL, SOCK_CLOEXEC);
        cr_assert_geq(ends[0], 0);
        *place = found_place(&cred);
    }
    close(hold[1]);
    waitpid(child, &status, 0);
    cr_assert_eq(WEXITSTATUS(status), there ? 0 : 77);
    close(at);
    unlink(path);
    return there;
}

Test(place, a_child_like_this_process_is_here)
{
    enum peer_place place;
    char own[PLACE_CGROUP_BYTES] = "";

    cr_assert(connected(0, NULL, &place));
    cr_assert_eq(place, PLACE_HERE);
    memcpy(own, cgroup, sizeof(own));
    cr_assert_eq(own[0], '/');
}

Test(place, another_user_namespace)
{
    enum peer_place place;
    char map[64];

    snprintf(map, sizeof(map), "0 %u 1", (unsigned)getuid());
    if (!connected(CLONE_NEWUSER, map, &place))
        cr_skip_test("this kernel or container lets nobody make user namespaces");
    cr_assert_eq(place, PLACE_USER_NS);
    cr_assert_neq(cgroup[0], '\0');
}

/* Its uid maps are the daemon's own, so only the namespace itself shows the difference. */
Test(place, another_user_namespace_with_all_ids)
{
    enum peer_place place;

    if (geteuid() != 0)
        cr_skip_test("only root maps all ids");
    if (!connected(CLONE_NEWUSER, "0 0 4294967295", &place))
        cr_skip_test("this process may not map all ids");
    cr_assert_eq(place, PLACE_USER_NS);
}

static void next_pid_is(pid_t pid)
{
    FILE *f = fopen("/proc/sys/kernel/ns_last_pid", "w");

    if (!f || fprintf(f, "%d", (int)pid - 1) < 0 || fclose(f) != 0)
        cr_skip_test("this process may not choose the next process's number");
}

/* It connects and ends; its socket lives on in its parent. */
static pid_t connected_and_gone(void)
{
    char path[64];
    int at = listener(path), status;
    pid_t child;

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, hold), 0);
    child = fork();
    if (child == 0) {
        int fd = connect_to(path);
        char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 0;
        struct iovec v = {&byte, 1};
        struct msghdr m = {.msg_iov = &v,
                           .msg_iovlen = 1,
                           .msg_control = control,
                           .msg_controllen = sizeof(control)};
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);

        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
        _exit(sendmsg(hold[1], &m, 0) == 1 ? 0 : 1);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    ends[0] = accept(at, NULL, NULL);
    cr_assert_geq(ends[0], 0);
    close(at);
    unlink(path);
    return child;
}

Test(place, whoever_gets_its_number_is_not_taken_for_it)
{
    pid_t gone = connected_and_gone(), other;
    int probe;
    socklen_t bytes = sizeof(probe);
    struct ucred cred;
    enum peer_place place;

    if (getsockopt(ends[0], SOL_SOCKET, 77 /* SO_PEERPIDFD */, &probe, &bytes) != 0 &&
        errno == ENOPROTOOPT)
        cr_skip_test("this kernel has no SO_PEERPIDFD (Linux 6.5)");
    next_pid_is(gone);
    other = fork();
    if (other == 0) {
        pause();
        _exit(0);
    }
    place = found_place(&cred);
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
    if (other != gone)
        cr_skip_test("another process took the number");
    cr_assert_eq(place, PLACE_UNKNOWN);
}

/* ---- what follows from it ---- */

static struct config config;

static void identify(struct peer *peer)
{
    struct ucm_error e;

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    cr_assert_eq(peer_identify(ends[0], &config, peer, &e), 0, "%s", e.text);
}

Test(place, the_longest_cgroup_decides_before_the_uid)
{
    struct config_error e;
    struct peer peer;
    char set[PLACE_CGROUP_BYTES + 200];

    config_init(&config);
    identify(&peer);
    cr_assert_eq(peer.place, PLACE_HERE);
    cr_assert(peer.admin, "the daemon's own uid");
    place_read(ends[0], getpid(), cgroup);
    snprintf(set, sizeof(set), "tenants=by-uid uid:%u,all cgroup:/,longer cgroup:%s%s", getuid(),
             cgroup, cgroup[1] ? "" : "nowhere");
    cr_assert_eq(config_set(&config, set, &e), 0, "%s", e.text);
    identify(&peer);
    cr_assert_str_eq(peer.tenant, cgroup[1] ? "longer" : "all");
    snprintf(set, sizeof(set), "tenants=by-uid uid:%u,others cgroup:/nowhere", getuid());
    cr_assert_eq(config_set(&config, set, &e), 0, "%s", e.text);
    identify(&peer);
    cr_assert_str_eq(peer.tenant, "by-uid");
    config_free(&config);
}

Test(place, where_cgroups_decide_a_peer_that_has_gone_is_turned_away)
{
    struct config_error e;
    struct ucm_error why;
    struct peer peer;
    struct ucred cred;
    pid_t gone = connected_and_gone();

    cr_assert_eq(found_place(&cred), PLACE_UNKNOWN);
    cr_assert_eq(cred.pid, gone);
    cr_assert_eq(cgroup[0], '\0');
    config_init(&config);
    cr_assert_eq(peer_identify(ends[0], &config, &peer, &why), 0);
    cr_assert(!peer.admin, "its uid is the daemon's, but nobody knows where it ran");
    cr_assert_eq(config_set(&config, "tenants=a cgroup:/a", &e), 0, "%s", e.text);
    cr_assert_eq(peer_identify(ends[0], &config, &peer, &why), -UCM_WIRE_DENIED);
    cr_assert_not_null(strstr(why.text, "cgroup"));
    config_free(&config);
}
