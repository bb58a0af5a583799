#include "daemon/shared/process/sandbox.h"

#include "daemon/shared/process/filter.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <pwd.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NICE 5
#define FILES 4096u
#define TASKS 4096u /* of its user: processes and threads */
#define STACK_BYTES (8u << 20)

/* Newer than headers in use: Linux 6.2, 6.7 and 6.12 have them. */
#define FS_TRUNCATE (1ull << 14)
#define FS_IOCTL_DEV (1ull << 15)
#define NET_TCP (1ull << 0 | 1ull << 1)
#define SCOPE_ABSTRACT_UNIX_SOCKET (1ull << 0)
#define SCOPE_SIGNAL (1ull << 1)

#define FS_READ                                                                                    \
    (LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define FS_ALL_1 ((LANDLOCK_ACCESS_FS_MAKE_SYM << 1) - 1) /* those of the first version */
#define FS_FILE                                                                                    \
    (LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE |   \
     FS_TRUNCATE | FS_IOCTL_DEV)

struct ruleset {
    uint64_t fs, net, scoped;
};

struct wants {
    bool network;
    bool signals_scoped; /* by Landlock */
    uint64_t memory_bytes;
    char **command;
};

static int fail(const char *what, int err)
{
    fprintf(stderr, "ucmd: backend: %s: %s\n", what, strerror(err));
    return 1;
}

/* ---- files ---- */

/* What programs read: libraries, what the C library looks up, certificates. Not /dev/zero: mapped
 * as shared it is memory that no limit counts, by reading it, too. */
static const char *const readable[] = {"/usr",
                                       "/lib",
                                       "/lib64",
                                       "/bin",
                                       "/sbin",
                                       "/opt",
                                       "/etc/ld.so.cache",
                                       "/etc/ld.so.conf",
                                       "/etc/ld.so.conf.d",
                                       "/etc/resolv.conf",
                                       "/run/systemd/resolve",
                                       "/etc/hosts",
                                       "/etc/host.conf",
                                       "/etc/gai.conf",
                                       "/etc/nsswitch.conf",
                                       "/etc/services",
                                       "/etc/protocols",
                                       "/etc/passwd",
                                       "/etc/group",
                                       "/etc/localtime",
                                       "/etc/timezone",
                                       "/etc/ssl",
                                       "/etc/pki",
                                       "/etc/ca-certificates",
                                       "/etc/alternatives",
                                       "/etc/python3",
                                       "/etc/libibverbs.d",
                                       "/proc/self",
                                       "/proc/meminfo",
                                       "/proc/cpuinfo",
                                       "/proc/stat",
                                       "/proc/filesystems",
                                       "/proc/version",
                                       "/proc/sys",
                                       "/proc/net",
                                       "/sys/class/infiniband",
                                       "/sys/class/infiniband_verbs",
                                       "/sys/devices",
                                       NULL};
static const char *const writable[] = {"/dev/null", "/dev/random", "/dev/urandom",
                                       "/dev/infiniband", NULL};

/* Allows `access` below the path. 0; -errno, -ENOENT among them. */
static int rule_add(int rules, const char *path, uint64_t access)
{
    struct landlock_path_beneath_attr rule = {.allowed_access = access};
    struct stat st;
    int rc = 0;

    rule.parent_fd = open(path, O_PATH | O_CLOEXEC);
    if (rule.parent_fd < 0)
        return -errno;
    if (fstat(rule.parent_fd, &st) == 0 && !S_ISDIR(st.st_mode))
        rule.allowed_access &= FS_FILE;
    if (syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) < 0)
        rc = -errno;
    close(rule.parent_fd);
    return rc;
}

static void rules_add(int rules, const char *const *paths, uint64_t access)
{
    for (; *paths; paths++)
        (void)rule_add(rules, *paths, access); /* what is not there needs no rule */
}

/* The directory that the command lies in. */
static int command_rule_add(int rules, const char *command)
{
    char directory[4096], *slash;

    snprintf(directory, sizeof(directory), "%s", command);
    slash = strrchr(directory, '/');
    slash[slash == directory] = '\0';
    return rule_add(rules, directory, FS_READ);
}

static struct ruleset ruleset_of(int version)
{
    struct ruleset r = {.fs = FS_ALL_1};

    if (version >= 2)
        r.fs |= LANDLOCK_ACCESS_FS_REFER;
    if (version >= 3)
        r.fs |= FS_TRUNCATE;
    if (version >= 5)
        r.fs |= FS_IOCTL_DEV;
    if (version >= 4)
        r.net = NET_TCP;
    if (version >= 6)
        r.scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL;
    return r;
}

/* Rules of words "read=" and "write=". What the configuration names must be there, or it would be
 * forbidden once it comes: the daemon tries again later. */
static int words_rules_add(int rules, char **words, uint64_t all)
{
    for (; strcmp(*words, "--") != 0; words++) {
        bool write = strncmp(*words, "write=", 6) == 0;
        const char *path = strchr(*words, '/');
        int rc;

        if (!write && strncmp(*words, "read=", 5) != 0)
            continue;
        rc = path ? rule_add(rules, path, write ? all : FS_READ) : -EINVAL;
        if (rc < 0) {
            (void)fail(*words, -rc);
            return rc == -ENOENT ? PROCESS_ABSENT : 1;
        }
    }
    return 0;
}

/* Files, signals to others and, without `network`, TCP; and no process outside can be traced or
 * read. */
static int landlock_enter(char **words, struct wants *w)
{
    int version =
        (int)syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    struct ruleset r;
    int rules, rc;

    if (version < 1) {
        fprintf(stderr,
                "ucmd: backend: warning: it can't be bound by Landlock (%s): the backend sees "
                "the files that ucmd sees\n",
                strerror(errno));
        return 0;
    }
    r = ruleset_of(version);
    if (w->network)
        r.net = 0;
    rules = (int)syscall(SYS_landlock_create_ruleset, &r,
                         version >= 6   ? sizeof(r)
                         : version >= 4 ? 16
                                        : 8,
                         0);
    if (rules < 0)
        return fail("Landlock", errno);
    rules_add(rules, readable, FS_READ);
    rules_add(rules, writable, r.fs);
    rc = command_rule_add(rules, w->command[0]);
    rc = rc < 0 ? fail(w->command[0], -rc) : words_rules_add(rules, words, r.fs);
    if (rc == 0 && syscall(SYS_landlock_restrict_self, rules, 0) < 0)
        rc = fail("Landlock", errno);
    w->signals_scoped = (r.scoped & SCOPE_SIGNAL) != 0;
    close(rules);
    return rc;
}

/* ---- the rest ---- */

static int limit_set(int what, const char *name, uint64_t to)
{
    struct rlimit l;

    if (getrlimit(what, &l) < 0)
        return fail(name, errno);
    if (l.rlim_max > to)
        l.rlim_max = to;
    l.rlim_cur = l.rlim_max;
    return setrlimit(what, &l) < 0 ? fail(name, errno) : 0;
}

/* Keeps one of root's capabilities: to use ports below 1024, which some file servers require.
 * Without permission the process runs without it. */
static void port_keep(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    uint32_t bit = 1u << CAP_NET_BIND_SERVICE;
    struct __user_cap_data_struct caps[_LINUX_CAPABILITY_U32S_3] = {{bit, bit, bit}};

    if (syscall(SYS_capset, &head, caps) == 0)
        (void)prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_BIND_SERVICE, 0, 0);
}

/* A user of its own, where the daemon may change users and there is one. */
static int user_change(bool network)
{
    const struct passwd *user = geteuid() == 0 ? getpwnam(PROCESS_USER) : NULL;

    if (!user)
        return 0;
    if (network)
        (void)prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0); /* until it is executed */
    if (setgroups(0, NULL) < 0 || setgid(user->pw_gid) < 0 || setuid(user->pw_uid) < 0)
        return fail("user " PROCESS_USER, errno);
    if (network)
        port_keep();
    return 0;
}

/* Drops root's capabilities but those for the files that Landlock allows, for memory that a network
 * card reads and, with `network`, for ports below 1024. When it is executed, the program gets at
 * most the bounding set. */
static int capabilities_drop(bool network)
{
    for (int c = 0; prctl(PR_CAPBSET_READ, c) >= 0; c++) {
        bool kept = c == CAP_DAC_OVERRIDE || c == CAP_FOWNER || c == CAP_IPC_LOCK ||
                    (network && c == CAP_NET_BIND_SERVICE);

        if (!kept && prctl(PR_CAPBSET_DROP, c) < 0)
            return fail("capabilities", errno);
    }
    return 0;
}

static int words_read(char **words, struct wants *w)
{
    for (; *words && strcmp(*words, "--") != 0; words++) {
        if (strcmp(*words, "network") == 0)
            w->network = true;
        else if (strncmp(*words, "memory=", 7) == 0)
            w->memory_bytes = strtoull(*words + 7, NULL, 10);
    }
    if (!*words || !words[1])
        return fail("its words", EINVAL);
    w->command = words + 1;
    return 0;
}

/* A host or unit that runs out of memory ends a backend before the daemon, unless the daemon has
 * more than half of it: the unit makes the daemon a candidate, too. */
static void candidate_be(void)
{
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return;
    (void)!write(fd, "1000", 4);
    close(fd);
}

int process_sandbox_main(char **words)
{
    struct wants w = {.network = false};
    int rc = words_read(words, &w);

    if (rc == 0)
        rc = limit_set(RLIMIT_CORE, "RLIMIT_CORE", 0); /* blocks in the clear */
    if (rc == 0)
        rc = limit_set(RLIMIT_NOFILE, "RLIMIT_NOFILE", FILES);
    if (rc == 0)
        rc = limit_set(RLIMIT_NPROC, "RLIMIT_NPROC", TASKS);
    if (rc == 0) /* which RLIMIT_DATA does not count */
        rc = limit_set(RLIMIT_STACK, "RLIMIT_STACK", STACK_BYTES);
    candidate_be();
    (void)setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + NICE);
    if (rc == 0)
        rc = user_change(w.network);
    if (rc == 0) /* a change of users forgets it */
        rc = prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 ? fail("prctl", errno) : 0;
    if (rc == 0 && geteuid() == 0)
        rc = capabilities_drop(w.network);
    if (rc == 0)
        rc = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ? fail("prctl", errno) : 0;
    if (rc == 0)
        rc = landlock_enter(words, &w);
    if (rc == 0 && process_filter_enter(w.network, w.signals_scoped) < 0)
        rc = fail("seccomp", errno);
    /* Last: this program, with a sanitizer in it, may have more. */
    if (rc == 0 && w.memory_bytes > 0)
        rc = limit_set(RLIMIT_DATA, "RLIMIT_DATA", w.memory_bytes);
    if (rc != 0)
        return rc;
    execv(w.command[0], w.command);
    return fail(w.command[0], errno);
}
