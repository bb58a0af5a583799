#include "daemon/share/process_filter.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

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

/* - Other processes: the daemon's memory, descriptors, scheduling.
 * - The kernel's larger doors: io_uring makes sockets that this filter would not see.
 * - Mounts, namespaces, keys. A systemd unit forbids most of these, too; not every daemon runs in one. */
static const int denied[] = {
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_pidfd_getfd,
    SYS_kcmp,
    SYS_io_uring_setup,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_unshare,
    SYS_setns,
    SYS_keyctl,
    SYS_add_key,
    SYS_request_key,
    SYS_open_by_handle_at,
    SYS_swapon,
    SYS_swapoff,
    SYS_reboot,
    SYS_kexec_load,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_acct,
    SYS_quotactl,
    SYS_personality,
    SYS_syslog,
};
#define DENIED (sizeof(denied) / sizeof(denied[0]))

#define LOAD(field)                                                                                \
    (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define ARGUMENT_LOW(n) /* little-endian machines only */                                          \
    (struct sock_filter)                                                                           \
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + (n)*8)
#define SKIP_UNLESS(value, n)                                                                      \
    (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(value), 0, n)
#define RETURN(what) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, (uint32_t)(what))
#define FORBID(error) RETURN(SECCOMP_RET_ERRNO | (error))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "ARGUMENT_LOW");

struct program {
    struct sock_filter at[2 * DENIED + 64];
    unsigned short n;
};

static void add(struct program *p, struct sock_filter f)
{
    p->at[p->n++] = f;
}

/* A program of another machine's numbers would pass any list. */
static void add_machine(struct program *p)
{
    add(p, LOAD(arch));
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MACHINE, 1, 0));
    add(p, RETURN(SECCOMP_RET_KILL_PROCESS));
    add(p, LOAD(nr));
#if defined(__x86_64__)
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1)); /* x32 */
    add(p, FORBID(ENOSYS));
#endif
}

/* Threads and children, in the same namespaces. clone3 has its flags in memory that no filter sees; without it
 * the C library uses clone. */
static void add_clone(struct program *p)
{
    add(p, SKIP_UNLESS(SYS_clone3, 1));
    add(p, FORBID(ENOSYS));
    add(p, SKIP_UNLESS(SYS_clone, 4));
    add(p, ARGUMENT_LOW(0));
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NAMESPACES, 0, 1));
    add(p, FORBID(EPERM));
    add(p, RETURN(SECCOMP_RET_ALLOW));
}

/* No local sockets: the daemon would take the process for an operator of its own user. Netlink is the
 * resolver's. socketpair is not concerned. */
static void add_socket(struct program *p, bool network)
{
    if (!network) {
        add(p, SKIP_UNLESS(SYS_socket, 1));
        add(p, FORBID(EAFNOSUPPORT));
        return;
    }
    add(p, SKIP_UNLESS(SYS_socket, 8));
    add(p, ARGUMENT_LOW(0));
    add(p, SKIP_UNLESS(AF_INET, 1));
    add(p, RETURN(SECCOMP_RET_ALLOW));
    add(p, SKIP_UNLESS(AF_INET6, 1));
    add(p, RETURN(SECCOMP_RET_ALLOW));
    add(p, SKIP_UNLESS(AF_NETLINK, 1));
    add(p, RETURN(SECCOMP_RET_ALLOW));
    add(p, FORBID(EAFNOSUPPORT));
}

int process_filter_enter(bool network)
{
    struct program p = {.n = 0};
    struct sock_fprog program = {.filter = p.at};

    add_machine(&p);
    for (unsigned i = 0; i < DENIED; i++) {
        add(&p, SKIP_UNLESS(denied[i], 1));
        add(&p, FORBID(EPERM));
    }
    add_socket(&p, network);
    add_clone(&p);
    add(&p, RETURN(SECCOMP_RET_ALLOW));
    program.len = p.n;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) < 0 ? -errno : 0;
}
