#!/usr/bin/python3
"""What a compromised backend may try on processes outside of its sandbox, and what any program
needs. attempts.py DIRECTORY SOCKET runs as a backend that never says hello. It writes
DIRECTORY/attempts.json: {name: "done", or the error's name}. SOCKET belongs to a process that takes
datagrams. Standard library only."""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

directory, outside = sys.argv[1], sys.argv[2]
daemon = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
ARM = platform.machine() == "aarch64"
PAGE = mmap.PAGESIZE
some = ctypes.create_string_buffer(256)


def call(x86, arm, *arguments):
    result = libc.syscall(arm if ARM else x86, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def memory(flags, bytes_=PAGE):
    p = libc.mmap(None, bytes_, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if p == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "")


def datagram(kind):
    a, b = socket.socketpair(socket.AF_UNIX, kind)
    a.sendto(b"forged by the backend", outside)


def owner(how):
    a, b = socket.socketpair()
    how(a.fileno())


def own_session(leave):
    """Runs in a child, which stays in what it entered if that works."""
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            leave()
            os.write(tells, b"\0")
            time.sleep(600)
        except OSError as e:
            os.write(tells, bytes([e.errno]))
        os._exit(0)
    error = os.read(told, 1)[0]
    if error:
        os.waitpid(pid, 0)
        raise OSError(error, "")


def adopted():
    """A child that the daemon would have to wait for."""
    if call(56, 220, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:  # CLONE_PARENT
        os._exit(0)


iovec = struct.pack("PN", ctypes.addressof(some), 8)
FORBIDDEN = {
    # limits, scheduling and places of others
    "prlimit of the daemon": lambda: resource.prlimit(daemon, resource.RLIMIT_NOFILE, (64, resource.prlimit(daemon, resource.RLIMIT_NOFILE)[1])),
    "its limits read": lambda: resource.prlimit(daemon, resource.RLIMIT_CPU),
    "affinity": lambda: os.sched_setaffinity(daemon, {0}),
    "scheduler": lambda: os.sched_setscheduler(daemon, os.SCHED_IDLE, os.sched_param(0)),
    "parameters": lambda: os.sched_setparam(daemon, os.sched_param(0)),
    "attributes": lambda: call(314, 274, daemon, struct.pack("IIQiIQQQ", 48, 3, 0, 19, 0, 0, 0, 0), 0),
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, daemon, 19),
    "nice of its group": lambda: os.setpriority(os.PRIO_PGRP, os.getpgid(daemon), 19),
    "nice of the user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "priority of I/O": lambda: call(251, 30, 1, daemon, 3 << 13),
    "priority of the user's I/O": lambda: call(251, 30, 3, os.getuid(), 3 << 13),
    "move_pages": lambda: call(279, 239, daemon, 0, None, None, None, 0),
    "migrate_pages": lambda: call(256, 238, daemon, 64, struct.pack("Q", 1), struct.pack("Q", 1)),
    "cores": lambda: call(157, 167, 62, 1, daemon, 0, None),
    # memory, descriptors, state
    "ptrace": lambda: call(101, 117, 16, daemon, None, None),
    "process_vm_readv": lambda: call(310, 270, daemon, iovec, 1, iovec, 1, 0),
    "process_vm_writev": lambda: call(311, 271, daemon, iovec, 1, iovec, 1, 0),
    "kcmp": lambda: call(312, 272, os.getpid(), daemon, 0, 0, 0),
    "get_robust_list": lambda: call(274, 100, daemon, some, some),
    "perf_event_open": lambda: call(298, 241, struct.pack("IIQ104x", 1, 120, 0), daemon, -1, -1, 0),
    "pidfd_getfd": lambda: call(438, 438, os.pidfd_open(daemon), 0, 0),
    "process_madvise": lambda: call(440, 440, os.pidfd_open(daemon), iovec, 1, 20, 0),
    "process_mrelease": lambda: call(448, 448, os.pidfd_open(daemon), 0),
    "/proc of the daemon": lambda: os.listdir(f"/proc/{daemon}/fd"),
    # signals, 0 and those that are ignored
    "kill": lambda: os.kill(daemon, 0),
    "kill of its group": lambda: os.killpg(os.getpgid(daemon), 0),
    "tkill": lambda: call(200, 130, daemon, 0),
    "tgkill": lambda: call(234, 131, daemon, daemon, 0),
    "rt_sigqueueinfo": lambda: call(129, 138, daemon, signal.SIGURG, struct.pack("iii116x", signal.SIGURG, 0, -1)),
    "rt_tgsigqueueinfo": lambda: call(297, 240, daemon, daemon, signal.SIGURG, struct.pack("iii116x", signal.SIGURG, 0, -1)),
    "pidfd_send_signal": lambda: call(424, 424, os.pidfd_open(daemon), 0, None, 0),
    "F_SETOWN": lambda: owner(lambda fd: fcntl.fcntl(fd, fcntl.F_SETOWN, daemon)),
    "F_SETOWN_EX": lambda: owner(lambda fd: fcntl.fcntl(fd, 15, struct.pack("ii", 1, daemon))),
    "FIOSETOWN": lambda: owner(lambda fd: fcntl.ioctl(fd, 0x8901, struct.pack("i", daemon))),
    # to outlive its end
    "setsid": lambda: own_session(os.setsid),
    "setpgid": lambda: own_session(os.setpgrp),
    "the daemon's child": adopted,
    "PR_SET_PDEATHSIG": lambda: call(157, 167, 1, 0, 0, 0, 0),
    # memory that memory= does not count
    "memfd_create": lambda: os.memfd_create("x"),
    "memfd_secret": lambda: call(447, 447, 0),
    "shared memory of no file": lambda: mmap.mmap(-1, PAGE),
    "shared memory of /dev/zero": lambda: mmap.mmap(os.open("/dev/zero", os.O_RDONLY), PAGE, prot=mmap.PROT_READ),
    "a file in /dev/shm": lambda: os.open("/dev/shm/ucmd-attempt", os.O_RDWR | os.O_CREAT),
    "memory that grows down": lambda: memory(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100),
    "shmget": lambda: call(29, 194, 0, PAGE, 0o1600),
    "more stack": lambda: resource.setrlimit(resource.RLIMIT_STACK, 2 * (1 << 30,)),
    # listeners outside
    "a datagram": lambda: datagram(socket.SOCK_DGRAM),
    "a datagram of a raw pair": lambda: datagram(socket.SOCK_RAW),
    "a local socket": lambda: socket.socket(socket.AF_UNIX),
    "uevents": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15),
    "msgget": lambda: call(68, 186, 0, 0o1600),
    "semget": lambda: call(64, 190, 0, 1, 0o1600),
    "mq_open": lambda: call(240, 180, b"ucmd-attempt", os.O_RDWR | os.O_CREAT, 0o600, None),
    # wider interfaces
    "io_uring": lambda: call(425, 425, 8, bytes(120)),
    "bpf": lambda: call(321, 280, 0, some, 48),
    "userfaultfd": lambda: call(323, 282, 1),
    "keys": lambda: call(250, 219, 0, -3, 0),
    "add_key": lambda: call(248, 217, b"user", b"attempt", b"x", 1, -3),
    "unshare": lambda: call(272, 97, 0x10000000),
    "setns": lambda: call(308, 268, os.pidfd_open(os.getpid()), 0x10000000),
    "clone3": lambda: call(435, 435, bytes(88), 88),
    "mount": lambda: call(165, 40, b"x", b"/", b"tmpfs", 0, None),
    "open_tree": lambda: call(428, 428, -100, b"/", 1),
    "fsopen": lambda: call(430, 430, b"tmpfs", 0),
    "mount_setattr": lambda: call(442, 442, -100, b"/", 0, bytes(32), 32),
    "chroot": lambda: os.chroot(directory),
    "open_by_handle_at": lambda: call(304, 265, -100, bytes(136), 0),
    "fanotify": lambda: call(300, 262, 0, 0),
    "personality": lambda: call(135, 92, 0x0040000),
    "syslog": lambda: call(103, 116, 3, some, 256),
    "setuid": lambda: os.setuid(os.getuid()),
    "a call that is newer than all": lambda: call(1000, 1000),
}


def raising():
    old = signal.signal(signal.SIGUSR1, lambda *a: None)
    signal.raise_signal(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, old)


def file():
    with tempfile.NamedTemporaryFile(dir=directory) as f:
        os.posix_fallocate(f.fileno(), 0, 3 * PAGE)
        f.flush()
        os.fsync(f.fileno())
        mmap.mmap(f.fileno(), PAGE)[:4] = b"file"
        os.rename(f.name, f.name + ".2")
        os.rename(f.name + ".2", f.name)


def thread():
    t = threading.Thread(target=time.sleep, args=(0,))
    t.start()
    t.join()


NEEDED = {
    "own limits": lambda: resource.prlimit(0, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)),
    "own affinity": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "own nice": lambda: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1),
    "own signals": raising,
    "threads": thread,
    "children": lambda: subprocess.run(["/bin/sh", "-c", "/bin/true; exit 0"], check=True),
    "pairs": lambda: [socket.socketpair(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)],
    "memory": lambda: memory(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 64 << 20),
    "TCP": lambda: socket.create_server(("127.0.0.1", 0)),
    "names": lambda: socket.getaddrinfo("localhost", 80),
    "files": file,
    "random numbers": lambda: os.urandom(8),
}


def outcome(attempt):
    try:
        attempt()
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e.errno))
    except ValueError as e:
        return "EPERM" if "raise maximum limit" in str(e) else str(e)
    except BaseException as e:  # a mistake in a line of the table is reported, too
        return f"{type(e).__name__}: {e}"
    return "done"


results = {name: outcome(attempt) for name, attempt in {**NEEDED, **FORBIDDEN}.items()}
stays = os.fork()
if stays == 0:
    time.sleep(600)
with open(directory + "/attempts.new", "w") as f:
    json.dump({"daemon": daemon, "child": stays, "needed": {n: results[n] for n in NEEDED}, "forbidden": {n: results[n] for n in FORBIDDEN}}, f)
os.rename(directory + "/attempts.new", directory + "/attempts.json")
sock = socket.socket(fileno=int(os.environ["UCM_BACKEND_FD"]))
while sock.recv(1 << 16):
    pass
