#include "daemon/shared/process/filter.h"

#include <asm/ioctls.h>
#include <asm/sockios.h>
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define MACHINE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define MACHINE AUDIT_ARCH_AARCH64
#else
#error "add the machine's AUDIT_ARCH_ here"
#endif

#define NAMESPACES                                                                                 \
    (CLONE_NEWCGROUP | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUSER |  \
     CLONE_NEWUTS)

/* The system calls that programs need, and those that reach no other process. Any other number is
 * refused: with EPERM if this build's headers know it, with ENOSYS if it is newer, so that a C
 * library falls back. Left out:
 * - other processes: ptrace, process_vm_*, process_madvise, kcmp, pidfd_getfd, pidfd_send_signal,
 *   get_robust_list, migrate_pages, perf_event_open;
 * - large interfaces: io_uring makes sockets that this filter would not see; bpf, userfaultfd,
 *   keys, modules;
 * - mounts, namespaces, users, the machine's clock and name;
 * - setsid, setpgid: a process that leaves the group would outlive it;
 * - memory that RLIMIT_DATA does not count, and what can be shared by name: memfd_create,
 *   memfd_secret, shmget; queues, semaphores. */
static const int frequent[] = {SYS_futex,         SYS_read,     SYS_write,    SYS_recvmsg,
                               SYS_sendmsg,       SYS_recvfrom, SYS_sendto,   SYS_epoll_pwait,
                               SYS_ppoll,         SYS_pread64,  SYS_pwrite64, SYS_readv,
                               SYS_writev,        SYS_madvise,  SYS_munmap,   SYS_mprotect,
                               SYS_clock_gettime, SYS_gettid,   SYS_getpid};
static const int files[] = {SYS_openat,
                            SYS_openat2,
                            SYS_close,
                            SYS_close_range,
                            SYS_fstat,
                            SYS_newfstatat,
                            SYS_statx,
                            SYS_statfs,
                            SYS_fstatfs,
                            SYS_lseek,
                            SYS_preadv,
                            SYS_pwritev,
                            SYS_preadv2,
                            SYS_pwritev2,
                            SYS_faccessat,
                            SYS_faccessat2,
                            SYS_getdents64,
                            SYS_readlinkat,
                            SYS_getcwd,
                            SYS_chdir,
                            SYS_fchdir,
                            SYS_mkdirat,
                            SYS_mknodat,
                            SYS_unlinkat,
                            SYS_linkat,
                            SYS_symlinkat,
                            SYS_renameat2,
                            SYS_fchmod,
                            SYS_fchmodat,
                            SYS_fchown,
                            SYS_fchownat,
                            SYS_utimensat,
                            SYS_umask,
                            SYS_truncate,
                            SYS_ftruncate,
                            SYS_fallocate,
                            SYS_fadvise64,
                            SYS_readahead,
                            SYS_sync_file_range,
                            SYS_fsync,
                            SYS_fdatasync,
                            SYS_syncfs,
                            SYS_flock,
                            SYS_copy_file_range,
                            SYS_sendfile,
                            SYS_splice,
                            SYS_tee,
                            SYS_vmsplice,
                            SYS_dup,
                            SYS_dup3,
                            SYS_pipe2,
                            SYS_setxattr,
                            SYS_lsetxattr,
                            SYS_fsetxattr,
                            SYS_getxattr,
                            SYS_lgetxattr,
                            SYS_fgetxattr,
                            SYS_listxattr,
                            SYS_llistxattr,
                            SYS_flistxattr,
                            SYS_removexattr,
                            SYS_lremovexattr,
                            SYS_fremovexattr,
                            SYS_inotify_init1,
                            SYS_inotify_add_watch,
                            SYS_inotify_rm_watch,
                            SYS_io_setup,
                            SYS_io_destroy,
                            SYS_io_submit,
                            SYS_io_cancel,
                            SYS_io_getevents,
                            SYS_io_pgetevents};
static const int waits[] = {SYS_epoll_create1,    SYS_epoll_ctl,       SYS_epoll_pwait2,
                            SYS_pselect6,         SYS_eventfd2,        SYS_signalfd4,
                            SYS_timerfd_create,   SYS_timerfd_settime, SYS_timerfd_gettime,
                            SYS_timer_create,     SYS_timer_settime,   SYS_timer_gettime,
                            SYS_timer_getoverrun, SYS_timer_delete,    SYS_getitimer,
                            SYS_setitimer,        SYS_nanosleep,       SYS_clock_nanosleep,
                            SYS_clock_getres,     SYS_gettimeofday,    SYS_times,
                            SYS_futex_waitv,      SYS_restart_syscall};
/* add_socket says which. */
static const int sockets[] = {SYS_connect,    SYS_accept,     SYS_accept4,     SYS_bind,
                              SYS_listen,     SYS_shutdown,   SYS_getsockname, SYS_getpeername,
                              SYS_getsockopt, SYS_setsockopt, SYS_recvmmsg,    SYS_sendmmsg};
static const int memory[] = {SYS_brk,           SYS_mremap,        SYS_msync,
                             SYS_mincore,       SYS_mlock,         SYS_mlock2,
                             SYS_munlock,       SYS_mlockall,      SYS_munlockall,
                             SYS_mbind,         SYS_set_mempolicy, SYS_set_mempolicy_home_node,
                             SYS_get_mempolicy, SYS_pkey_alloc,    SYS_pkey_free,
                             SYS_pkey_mprotect, SYS_membarrier};
/* Threads and children among it. */
static const int own[] = {SYS_execve,
                          SYS_execveat,
                          SYS_exit,
                          SYS_exit_group,
                          SYS_wait4,
                          SYS_waitid,
                          SYS_pidfd_open,
                          SYS_set_tid_address,
                          SYS_set_robust_list,
                          SYS_rseq,
                          SYS_rt_sigaction,
                          SYS_rt_sigprocmask,
                          SYS_rt_sigreturn,
                          SYS_rt_sigpending,
                          SYS_rt_sigsuspend,
                          SYS_rt_sigtimedwait,
                          SYS_sigaltstack,
                          SYS_sched_yield,
                          SYS_sched_getaffinity,
                          SYS_sched_getattr,
                          SYS_sched_getparam,
                          SYS_sched_getscheduler,
                          SYS_sched_get_priority_max,
                          SYS_sched_get_priority_min,
                          SYS_sched_rr_get_interval,
                          SYS_getpriority,
                          SYS_ioprio_get,
                          SYS_getcpu,
                          SYS_getppid,
                          SYS_getpgid,
                          SYS_getsid,
                          SYS_getuid,
                          SYS_geteuid,
                          SYS_getgid,
                          SYS_getegid,
                          SYS_getresuid,
                          SYS_getresgid,
                          SYS_getgroups,
                          SYS_capget,
                          SYS_getrlimit,
                          SYS_setrlimit,
                          SYS_getrusage,
                          SYS_uname,
                          SYS_sysinfo,
                          SYS_getrandom};
/* Forms of the above that newer machines never had. */
static const int older[] = {
#if defined(__x86_64__)
    SYS_open,         SYS_creat,      SYS_stat,      SYS_lstat,  SYS_access,  SYS_getdents,
    SYS_readlink,     SYS_mkdir,      SYS_mknod,     SYS_rmdir,  SYS_unlink,  SYS_link,
    SYS_symlink,      SYS_rename,     SYS_renameat,  SYS_chmod,  SYS_chown,   SYS_lchown,
    SYS_utime,        SYS_utimes,     SYS_futimesat, SYS_dup2,   SYS_pipe,    SYS_inotify_init,
    SYS_epoll_create, SYS_epoll_wait, SYS_poll,      SYS_select, SYS_eventfd, SYS_signalfd,
    SYS_alarm,        SYS_pause,      SYS_time,      SYS_fork,   SYS_vfork,   SYS_getpgrp,
    SYS_arch_prctl
#elif defined(SYS_renameat)
    SYS_renameat
#endif
};

#define LIST(name)                                                                                 \
    {                                                                                              \
        name, sizeof(name) / sizeof((name)[0])                                                     \
    }
static const struct {
    const int *calls;
    unsigned n;
} allowed[] = {LIST(frequent), LIST(files), LIST(waits), LIST(sockets),
               LIST(memory),   LIST(own),   LIST(older)};
#define LISTS (sizeof(allowed) / sizeof(allowed[0]))
#define ALLOWED_MAX 400u
#define NEWEST SYS_set_mempolicy_home_node /* that the list was made for: Linux 6.1 */

#define LOAD(field)                                                                                \
    (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define ARGUMENT_LOW(n) /* little-endian machines only */                                          \
    (struct sock_filter)                                                                           \
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + (n)*8)
#define JUMP(how, value, yes, no)                                                                  \
    (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_K | (how), (uint32_t)(value), yes, no)
#define SKIP_UNLESS(value, n) JUMP(BPF_JEQ, value, 0, n)
#define RETURN(what) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, (uint32_t)(what))
#define FORBID(error) RETURN(SECCOMP_RET_ERRNO | (error))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "ARGUMENT_LOW");

/* Calls that are allowed if an argument's bits under the mask equal the value, or if they differ.
 * Process ids are 32 bits wide, and the kernel reads only 32 bits of the flags. */
struct rule {
    int call;
    unsigned argument;
    uint32_t mask, value;
    bool equal;
};
#define ALL UINT32_MAX
#define ONLY(call, argument, value)                                                                \
    {                                                                                              \
        call, argument, ALL, (uint32_t)(value), true                                               \
    }
#define NEVER(call, argument, value)                                                               \
    {                                                                                              \
        call, argument, ALL, (uint32_t)(value), false                                              \
    }
#define NONE_OF(call, argument, bits)                                                              \
    {                                                                                              \
        call, argument, (uint32_t)(bits), 0, true                                                  \
    }

#define IOPRIO_WHO_PROCESS 1
#ifndef PR_SCHED_CORE
#define PR_SCHED_CORE 62
#endif

/* The rules of one call stand together; all must hold. */
static const struct rule rules[] = {
    /* 0 is the caller. A library that names its own threads by number is refused, and does
     * without. */
    ONLY(SYS_prlimit64, 0, 0),
    ONLY(SYS_sched_setaffinity, 0, 0),
    ONLY(SYS_sched_setattr, 0, 0),
    ONLY(SYS_sched_setparam, 0, 0),
    ONLY(SYS_sched_setscheduler, 0, 0),
    ONLY(SYS_move_pages, 0, 0),
    ONLY(SYS_setpriority, 0, PRIO_PROCESS),
    ONLY(SYS_setpriority, 1, 0),
    ONLY(SYS_ioprio_set, 0, IOPRIO_WHO_PROCESS),
    ONLY(SYS_ioprio_set, 1, 0),
    /* It would not die with the daemon; it would share a core's secrets with whom it likes. */
    NEVER(SYS_prctl, 0, PR_SET_PDEATHSIG),
    NEVER(SYS_prctl, 0, PR_SCHED_CORE),
    /* A descriptor's signals go to any process that is named. */
    NEVER(SYS_fcntl, 1, F_SETOWN),
    NEVER(SYS_fcntl, 1, F_SETOWN_EX),
    NEVER(SYS_ioctl, 1, FIOSETOWN),
    NEVER(SYS_ioctl, 1, SIOCSPGRP),
    /* Standard error may be an operator's terminal: it types there. */
    NEVER(SYS_ioctl, 1, TIOCSTI),
    NEVER(SYS_ioctl, 1, TIOCLINUX),
    NEVER(SYS_ioctl, 1, TIOCSCTTY),
    /* RLIMIT_DATA counts neither. */
    {SYS_mmap, 3, MAP_TYPE | MAP_ANONYMOUS, MAP_SHARED | MAP_ANONYMOUS, false},
    NONE_OF(SYS_mmap, 3, MAP_GROWSDOWN),
    /* A child of the daemon's nobody would wait for. clone3 has its flags in memory that no filter
     * sees; without it the C library uses clone. */
    NONE_OF(SYS_clone, 0, NAMESPACES | CLONE_PARENT),
    /* SOCK_STREAM or SOCK_SEQPACKET, which are bound to their peer. A datagram has an address. */
    ONLY(SYS_socketpair, 0, AF_UNIX),
    {SYS_socketpair, 1, 0xb, SOCK_STREAM, true},
};
#define RULES (sizeof(rules) / sizeof(rules[0]))
_Static_assert((SOCK_STREAM & 0xb) == SOCK_STREAM && (SOCK_SEQPACKET & 0xb) == SOCK_STREAM &&
                   (SOCK_DGRAM & 0xb) != SOCK_STREAM && (SOCK_RAW & 0xb) != SOCK_STREAM,
               "types of socket pairs");

struct program {
    struct sock_filter at[2 * ALLOWED_MAX + 6 * RULES + 64];
    unsigned short n;
};

static void add(struct program *p, struct sock_filter f)
{
    assert(p->n < sizeof(p->at) / sizeof(p->at[0]));
    p->at[p->n++] = f;
}

/* A program of another machine's numbers would pass any list. */
static void add_machine(struct program *p)
{
    add(p, LOAD(arch));
    add(p, JUMP(BPF_JEQ, MACHINE, 1, 0));
    add(p, RETURN(SECCOMP_RET_KILL_PROCESS));
    add(p, LOAD(nr));
    add(p, JUMP(BPF_JGT, NEWEST, 0, 1)); /* x32's are among these */
    add(p, FORBID(ENOSYS));
    add(p, SKIP_UNLESS(SYS_clone3, 1));
    add(p, FORBID(ENOSYS));
}

static void add_list(struct program *p, const int *calls, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        add(p, SKIP_UNLESS(calls[i], 1));
        add(p, RETURN(SECCOMP_RET_ALLOW));
    }
}

static void add_rules(struct program *p)
{
    for (unsigned i = 0; i < RULES; i++) {
        const struct rule *r = &rules[i];
        bool more = i + 1 < RULES && rules[i + 1].call == r->call;

        add(p, SKIP_UNLESS(r->call, 5));
        add(p, ARGUMENT_LOW(r->argument));
        add(p, (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, r->mask));
        add(p, JUMP(BPF_JEQ, r->value, r->equal, !r->equal));
        add(p, FORBID(EPERM));
        add(p, more ? LOAD(nr) : RETURN(SECCOMP_RET_ALLOW));
    }
}

/* No local sockets: the daemon would take the process for an operator of its own user. Netlink is
 * the resolver's, and RDMA's, whose two protocols reach the kernel alone. */
static void add_socket(struct program *p, bool network)
{
    if (!network) {
        add(p, SKIP_UNLESS(SYS_socket, 1));
        add(p, FORBID(EAFNOSUPPORT));
        return;
    }
    add(p, SKIP_UNLESS(SYS_socket, 10));
    add(p, ARGUMENT_LOW(0));
    add(p, JUMP(BPF_JEQ, AF_INET, 6, 0));
    add(p, JUMP(BPF_JEQ, AF_INET6, 5, 0));
    add(p, JUMP(BPF_JEQ, AF_NETLINK, 1, 0));
    add(p, FORBID(EAFNOSUPPORT));
    add(p, ARGUMENT_LOW(2));
    add(p, JUMP(BPF_JEQ, NETLINK_ROUTE, 1, 0));
    add(p, JUMP(BPF_JEQ, NETLINK_RDMA, 0, 1));
    add(p, RETURN(SECCOMP_RET_ALLOW));
    add(p, FORBID(EAFNOSUPPORT));
}

/* To its own threads, and where there is `group` (0), to its group. */
static void add_signal(struct program *p, int call, bool scoped, bool group)
{
    uint32_t self = (uint32_t)getpid();

    add(p, SKIP_UNLESS(call, scoped ? 1 : 5));
    if (!scoped) {
        add(p, ARGUMENT_LOW(0));
        add(p, JUMP(BPF_JEQ, self, 1, 0));
        add(p, SKIP_UNLESS(group ? 0 : self, 1));
    }
    add(p, RETURN(SECCOMP_RET_ALLOW));
    if (!scoped)
        add(p, FORBID(EPERM));
}

int process_filter_enter(bool network, bool signals_scoped)
{
    struct program p = {.n = 0};
    struct sock_fprog program = {.filter = p.at};

    add_machine(&p);
    for (unsigned i = 0; i < LISTS; i++)
        add_list(&p, allowed[i].calls, allowed[i].n);
    add_rules(&p);
    add_socket(&p, network);
    add_signal(&p, SYS_kill, signals_scoped, true);
    add_signal(&p, SYS_tgkill, signals_scoped, false);
    add_signal(&p, SYS_rt_sigqueueinfo, signals_scoped, false);
    add_signal(&p, SYS_rt_tgsigqueueinfo, signals_scoped, false);
    if (signals_scoped)
        add_signal(&p, SYS_tkill, true, false);
    add(&p, FORBID(EPERM));
    program.len = p.n;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) < 0 ? -errno : 0;
}
