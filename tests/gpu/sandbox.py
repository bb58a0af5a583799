#!/usr/bin/env python3
"""Runs a program of the bundle as a container runtime or systemd would, where neither is.

usage: sandbox.py unit --bundle DIRECTORY --run DIRECTORY --state DIRECTORY [--report FILE] [--unit FILE] [--set X=Y]... -- COMMAND...
       sandbox.py pod --bundle DIRECTORY --run DIRECTORY [--state DIRECTORY] [--uid N] -- COMMAND...
       sandbox.py user --bundle DIRECTORY [--uid N] -- COMMAND...

unit: the sandbox of systemd/ucmd.service, line by line. A line that this program does not know is an error; what can't
be done without systemd it says in the report.
pod: the mounts, devices and rights of a container that neither is privileged nor may write to its root. Namespaces of
PID, IPC, network and user are the caller's (unshare).
user: another user without capabilities, and nothing else.

The bundle appears at /run/ucmd-bundle, and --run and --state at /run/ucmd and /var/lib/ucmd; what of these is missing is made. Linux 5.12 or
later; root.
"""

import argparse
import ctypes
import fnmatch
import glob
import os
import pathlib
import resource
import stat
import sys

HERE = pathlib.Path(__file__).resolve()
BUNDLE_AT, RUN_AT, STATE_AT = "/run/ucmd-bundle", "/run/ucmd", "/var/lib/ucmd"
UID = 900
STANDARD_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def checked(result, what):
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


# ---- mounts ----

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_SLAVE = 1, 2, 4, 4096, 8192, 16384, 1 << 18, 1 << 19
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1


def mount(source, target, kind=None, flags=0, data=None):
    def text(word):
        return None if word is None else os.fsencode(word)
    checked(libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data)), f"mount on {target}")


def bind(source, target):
    """Files on files, directories on directories; the target is made."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(source) and not os.path.exists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(source, target, None, MS_BIND | MS_REC)


def read_only(path, on=True):
    """With all that is mounted below."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY if on else 0, 0 if on else MOUNT_ATTR_RDONLY, 0, 0)
    checked(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), AT_RECURSIVE, attributes,
                         ctypes.c_size_t(32)), f"mount_setattr {path}")


def hide(path):
    if os.path.isdir(path):
        mount("none", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "mode=000,size=4k")
    elif os.path.exists(path):
        mount("/dev/null", path, None, MS_BIND)


def tmpfs(path, mode="1777"):
    mount("none", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode}")


def build(target, mode, fill):
    """A new tmpfs at target. fill(path) fills it while all else is still in its place."""
    os.makedirs(BUNDLE_AT, exist_ok=True)  # also in a /run that is new
    tmpfs(BUNDLE_AT, mode)
    fill(BUNDLE_AT)
    mount(BUNDLE_AT, target, None, MS_MOVE)


def devices(nodes, directories):
    """A /dev with nothing else in it."""
    def fill(path):
        for name in nodes + [directory for directory in directories if os.path.isdir(f"/dev/{directory}")]:
            os.makedirs(os.path.dirname(f"{path}/{name}"), exist_ok=True)
            bind(f"/dev/{name}", f"{path}/{name}")
        for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            os.symlink(target, f"{path}/{name}")
        os.makedirs(f"{path}/shm", exist_ok=True)
    build("/dev", "755", fill)


def present(names):
    return [name for name in names if os.path.exists(f"/dev/{name}")]


def nvidia_nodes():
    """What NVIDIA's container toolkit gives for a GPU."""
    return [os.path.relpath(path, "/dev") for pattern in ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
            for path in sorted(glob.glob(f"/dev/{pattern}"))]


# ---- rights ----

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38


def drop_capabilities():
    last = int(pathlib.Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(last + 1):
        checked(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), f"capability {capability}")


def become(uid):
    if pathlib.Path("/proc/self/setgroups").read_text().strip() == "allow":
        os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)  # the change of the user took it away


def no_new_privileges():
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


# ---- filters of system calls ----

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NE, EQ, GE, MASKED_EQ = 1, 4, 5, 7
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
BAD_ARCHITECTURE = 2  # an attribute


class Compare(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def library():
    try:
        return ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return ctypes.CDLL(f"{BUNDLE_AT}/lib/libseccomp.so.2")


class Filter:
    """One of libseccomp, for the native architecture."""

    def __init__(self, otherwise=ALLOW, other_architectures=ALLOW):
        self.lib = library()
        self.lib.seccomp_init.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(self.lib.seccomp_init(ctypes.c_uint32(otherwise)))
        self.lib.seccomp_attr_set(self.handle, BAD_ARCHITECTURE, ctypes.c_uint32(other_architectures))

    def rule(self, action, call, *compares):
        number = self.lib.seccomp_syscall_resolve_name(call.encode())
        if number < 0:  # of another architecture, or newer than the library
            return
        array = (Compare * len(compares))(*(Compare(*c) for c in compares))
        rc = self.lib.seccomp_rule_add_array(self.handle, ctypes.c_uint32(action), number, len(compares), array)
        if rc < 0:
            raise OSError(-rc, f"seccomp rule for {call}: {os.strerror(-rc)}")

    def load(self):
        rc = self.lib.seccomp_load(self.handle)
        if rc < 0:
            raise OSError(-rc, f"seccomp_load: {os.strerror(-rc)}")
        self.lib.seccomp_release(self.handle)


def groups():
    """What systemd-analyze syscall-filter printed when the bundle was made."""
    found, name = {}, None
    path = HERE.parent / "syscall-groups.txt"
    for line in path.read_text().splitlines() if path.exists() else ():
        word = line.strip()
        if line.startswith("@"):
            name = word
            found[name] = []
        elif name and word and not word.startswith("#"):
            found[name].append(word)
    return found


def calls(word, table):
    if not word.startswith("@"):
        return {word.split(":")[0]}
    return set().union(*(calls(inner, table) for inner in table[word]))


# ---- the unit ----

def parse(path, changes):
    """[(directive, value)] of [Service], in its order."""
    lines, section = [], None
    for line in pathlib.Path(path).read_text().splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and line[0] not in "#;":
            lines.append(tuple(word.strip() for word in line.split("=", 1)))
    for change in changes:
        directive, value = change.split("=", 1)
        lines = [one for one in lines if one[0] != directive] + [(directive, value)]
    return lines


def truth(value):
    if value not in ("yes", "no"):
        raise SystemExit(f"sandbox.py: yes or no, not {value}")
    return value == "yes"


# No part of the sandbox, or done otherwise here.
ELSEWHERE = {"Type", "ExecStart", "ExecReload", "Restart", "RestartSec", "RestartPreventExitStatus", "WatchdogSec",
             "TimeoutStopSec", "OOMPolicy", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve", "StateDirectory",
             "StateDirectoryMode", "User", "Group", "AmbientCapabilities"}
# Reports directives that no other line of the unit makes up for.
SYSTEMD_ONLY = {"IPAddressDeny": "a BPF program of the unit's cgroup"}
TUNABLES = ("/proc/sys", "/proc/acpi", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sysrq-trigger", "/proc/mtrr", "/sys")
HIDDEN_TUNABLES = ("/proc/kallsyms", "/proc/kcore", "/sys/kernel/debug", "/sys/kernel/tracing")
GROUP_OF = {"ProtectClock": "@clock", "ProtectKernelModules": "@module"}
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
FAMILIES_END = 64
NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80)
WRITE_EXECUTE, EXECUTE, SHM_EXEC = 6, 4, 0o100000


def sets_id():
    """Modes with the bits of another user or group."""
    for bit in (0o4000, 0o2000):
        for call, at in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mkdir", 1), ("mkdirat", 2), ("mknod", 1),
                         ("mknodat", 2), ("creat", 1)):
            yield EPERM, call, (at, MASKED_EQ, bit, bit)
        for call, at in (("open", 1), ("openat", 2)):
            for create in (0o100, 0o20000000):  # O_CREAT, O_TMPFILE
                yield EPERM, call, (at, MASKED_EQ, create, create), (at + 1, MASKED_EQ, bit, bit)
    yield ENOSYS, "openat2"


#: A directive: the error of each call that it refuses, the call, and its arguments then.
REFUSED = {
    "ProtectKernelLogs": [(EPERM, "syslog")],
    "ProtectHostname": [(EPERM, "sethostname"), (EPERM, "setdomainname")],
    "RestrictNamespaces": [*((EPERM, call, (0, MASKED_EQ, flag, flag)) for flag in NAMESPACES for call in ("unshare", "clone")),
                           (ENOSYS, "clone3"), (EPERM, "setns")],
    "RestrictRealtime": [(EPERM, "sched_setscheduler", (1, EQ, policy, 0)) for policy in (1, 2, 6)],  # FIFO, RR, DEADLINE
    "RestrictSUIDSGID": list(sets_id()),
    "LockPersonality": [(EPERM, "personality", (0, NE, 0, 0))],
    # No line of the unit: with --set MemoryDenyWriteExecute=yes.
    "MemoryDenyWriteExecute": [(EPERM, "mmap", (2, MASKED_EQ, WRITE_EXECUTE, WRITE_EXECUTE)), (EPERM, "mprotect", (2, MASKED_EQ, EXECUTE, EXECUTE)),
                               (EPERM, "pkey_mprotect", (2, MASKED_EQ, EXECUTE, EXECUTE)), (EPERM, "shmat", (2, MASKED_EQ, SHM_EXEC, SHM_EXEC))],
}


class Unit:
    def __init__(self, lines):
        self.lines = lines
        self.one = dict(lines)
        self.done, self.left = set(), dict(SYSTEMD_ONLY)

    def all(self, directive):
        return [value for name, value in self.lines if name == directive]

    def on(self, directive):
        self.done.add(directive)
        return truth(self.one.get(directive, "no"))

    # Mounts; ProtectSystem=strict comes last, so that it can go round what the others made writable.

    def mounts(self, directories):
        """directories: those that are opened, as mounts of this namespace, and where each goes.
        Others may hide them meanwhile."""
        self.on("PrivateMounts")
        if self.on("PrivateTmp"):
            self.private_tmp()
        self.done.add("BindPaths")
        if self.on("ProtectHome"):
            for path in ("/home", "/root", "/run/user"):
                hide(path)
        if self.on("ProtectKernelModules"):
            hide("/usr/lib/modules")
        if self.on("ProtectKernelLogs"):
            hide("/proc/kmsg")
            hide("/dev/kmsg")
        self.device_nodes()
        for directory, at in directories:
            bind(directory, at)
        self.protect_system()
        if self.on("ProtectKernelTunables"):
            for path in HIDDEN_TUNABLES:
                hide(path)
            for path in filter(os.path.exists, TUNABLES):
                mount(path, path, None, MS_BIND | MS_REC)
                read_only(path)
        if self.on("ProtectControlGroups") and os.path.isdir("/sys/fs/cgroup"):
            mount("/sys/fs/cgroup", "/sys/fs/cgroup", None, MS_BIND | MS_REC)
            read_only("/sys/fs/cgroup")

    def private_tmp(self):
        kept = [value.removeprefix("-") for value in self.all("BindPaths")]
        for directory in ("/tmp", "/var/tmp"):
            def fill(path, directory=directory):
                for one in kept:
                    if one.startswith(directory + "/") and os.path.exists(one):
                        bind(one, path + one[len(directory):])
            build(directory, "1777", fill)

    def device_nodes(self):
        """Replaces the cgroup's list by a /dev with no other devices. char- stands for names in
        /proc/devices."""
        if self.one.get("DevicePolicy", "auto") != "closed":
            return self.done.update(("DevicePolicy", "DeviceAllow"))
        listed = pathlib.Path("/proc/devices").read_text().split("Block devices:")[0].splitlines()[1:]
        majors = {int(number): name for number, name in (line.split() for line in listed if line)}
        nodes = set(present(STANDARD_DEVICES))
        for value in self.all("DeviceAllow"):
            pattern = value.split()[0].removeprefix("char-")
            for root, _, files in os.walk("/dev"):
                for name in files:
                    about = os.stat(os.path.join(root, name), follow_symlinks=False)
                    major = os.major(about.st_rdev)
                    if stat.S_ISCHR(about.st_mode) and fnmatch.fnmatch(majors.get(major, ""), pattern):
                        nodes.add(os.path.relpath(os.path.join(root, name), "/dev"))
        devices(sorted(nodes), ["shm", "hugepages"])
        self.done.update(("DevicePolicy", "DeviceAllow"))

    def protect_system(self):
        self.done.add("ProtectSystem")
        if self.one.get("ProtectSystem") != "strict":
            return
        read_only("/")
        for path in ("/dev", "/proc", "/sys", "/tmp", "/var/tmp", RUN_AT, STATE_AT):
            read_only(path, False)

    def namespaces(self):
        flags = CLONE_NEWNS
        flags |= CLONE_NEWNET if self.on("PrivateNetwork") else 0
        flags |= CLONE_NEWUTS if self.on("ProtectHostname") else 0
        checked(libc.unshare(flags), "unshare")
        mount("none", "/", None, MS_REC | MS_SLAVE)

    def limits(self):
        for directive, which in (("LimitCORE", resource.RLIMIT_CORE), ("LimitMEMLOCK", resource.RLIMIT_MEMLOCK),
                                 ("LimitNOFILE", resource.RLIMIT_NOFILE)):
            value = self.one.get(directive)
            number = resource.RLIM_INFINITY if value == "infinity" else int(value)
            self.done.add(directive)
            try:
                resource.setrlimit(which, (number, number))
            except ValueError as error:
                self.left[directive] = str(error)
        pathlib.Path("/proc/self/oom_score_adj").write_text(self.one["OOMScoreAdjust"])
        os.umask(int(self.one["UMask"], 8))
        self.done.update(("OOMScoreAdjust", "UMask"))

    def rights(self):
        if self.one.get("CapabilityBoundingSet") == "":
            drop_capabilities()
            self.done.add("CapabilityBoundingSet")
        become(UID)
        if self.on("NoNewPrivileges"):
            no_new_privileges()

    # Filters. That of SystemCallFilter= is the last, because it forbids loading another.

    def filters(self):
        table = groups()
        for directive, name in GROUP_OF.items():
            if self.on(directive) and name in table:
                self.deny((EPERM, call) for call in sorted(calls(name, table)))
        for directive, rules in REFUSED.items():
            if self.on(directive):
                self.deny(rules)
        self.restrict_families()
        self.system_calls(table)

    def deny(self, rules):
        denied = Filter()
        for errno, *rule in rules:
            denied.rule(ERRNO | errno, *rule)
        denied.load()

    def restrict_families(self):
        self.done.add("RestrictAddressFamilies")
        allowed = [FAMILIES[word] for value in self.all("RestrictAddressFamilies") for word in value.split()]
        if not allowed:
            return
        compares = [(0, EQ, family, 0) for family in set(range(FAMILIES_END)) - set(allowed)] + [(0, GE, FAMILIES_END, 0)]
        self.deny((EAFNOSUPPORT, call, compare) for call in ("socket", "socketpair") for compare in compares)

    def system_calls(self, table):
        """An allow list, as its first line is no ~."""
        words = self.all("SystemCallFilter")
        kill = 0x80000000
        foreign = kill if self.one.get("SystemCallArchitectures") == "native" else ALLOW
        self.done.update(("SystemCallFilter", "SystemCallArchitectures", "SystemCallErrorNumber"))
        if not any(words):
            return
        if not table:
            self.left["SystemCallFilter"] = "no systemd-analyze where the bundle was made"
            return
        if self.one.get("SystemCallErrorNumber") != "EPERM" or words[0].startswith("~"):
            raise SystemExit("sandbox.py: it knows an allow list with EPERM")
        allowed = calls("@default", table)
        for word in words:
            for name in word.removeprefix("~").split():
                allowed = allowed - calls(name, table) if word.startswith("~") else allowed | calls(name, table)
        rules = Filter(ERRNO | EPERM, foreign)
        for name in sorted(allowed):
            rules.rule(ALLOW, name)
        rules.load()

    def report(self):
        unknown = set(self.one) - self.done - ELSEWHERE - set(self.left)
        if unknown:
            raise SystemExit(f"sandbox.py does not know {', '.join(sorted(unknown))}: teach it")
        left = [f"{name} ({why})" for name, why in self.left.items() if name in self.one]
        applied = [name for name in self.one if name in self.done and name not in self.left]
        return f"applied: {' '.join(applied)}\nnot applied: {', '.join(left) or 'nothing'}\n"


def unit(options):
    sandbox = Unit(parse(options.unit, options.set))
    report = os.open(options.report, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644) if options.report else None
    sandbox.namespaces()
    directories = [(f"/proc/self/fd/{os.open(directory, os.O_PATH | os.O_CLOEXEC)}", at) for directory, at in
               ((options.run, RUN_AT), (options.state, STATE_AT), (options.bundle, BUNDLE_AT))]
    sandbox.mounts(directories)
    sandbox.limits()
    sandbox.rights()
    sandbox.filters()
    text = sandbox.report()
    if report is not None:
        os.write(report, text.encode())


# ---- containers ----

def private_mounts():
    checked(libc.unshare(CLONE_NEWNS), "unshare")
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def pod(options):
    private_mounts()
    devices(present(STANDARD_DEVICES) + nvidia_nodes(), [])
    tmpfs("/dev/shm")
    for directory, at in ((options.run, RUN_AT), (options.state, STATE_AT)):
        build(os.path.dirname(at), "755", lambda path: bind(directory, f"{path}/ucmd") if directory else None)
    tmpfs("/tmp")
    bind(options.bundle, BUNDLE_AT)
    read_only("/")
    for path in ["/dev", "/proc", "/tmp"] + [at for directory, at in ((options.run, RUN_AT), (options.state, STATE_AT)) if directory]:
        read_only(path, False)
    user(options)


def user(options):
    drop_capabilities()
    become(options.uid)
    no_new_privileges()


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("kind", choices=("unit", "pod", "user"))
    parser.add_argument("--bundle")
    parser.add_argument("--run")
    parser.add_argument("--state")
    parser.add_argument("--report")
    parser.add_argument("--unit", default=str(HERE.parents[2] / "systemd/ucmd.service"))
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--uid", type=int, default=1000)
    at = sys.argv.index("--")
    options, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1:]
    os.environ["HOME"] = "/tmp"
    if options.kind == "unit":
        unit(options)
    elif options.kind == "pod":
        pod(options)
    else:
        private_mounts()
        bind(options.bundle, BUNDLE_AT)
        user(options)
    os.chdir("/")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
