#!/usr/bin/python3
"""A compromised backend of a real daemon, run by the daemon's own user, attacks other processes in
many ways (attempts.py). Each try is refused, the daemon is unchanged, and nothing of the backend
outlives it."""

import json
import os
import shutil
import signal
import socket
import tempfile
import unittest

from daemon import TOP, Daemon, until
from memory_group import Group
from second_client import Client
from test_shared_sandbox import landlock

USER = 1500
FILES = {"/proc of the daemon", "a file in /dev/shm", "shared memory of /dev/zero"}  # which Landlock keeps from it
REFUSED = {"EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT"}


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return " Z " not in f.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Attempts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.mkdtemp(prefix="attempts.")
        run, inside, cls.name = (os.path.join(cls.directory, name) for name in ("run", "in", "log.sock"))
        shutil.copy(os.path.join(TOP, "tests/integration/attempts.py"), cls.directory)
        os.makedirs(run)
        os.makedirs(inside)
        cls.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        cls.listener.bind(cls.name)
        os.chmod(cls.name, 0o666)
        os.chmod(cls.directory, 0o755)
        cls.user, cls.uid = [], os.geteuid()
        if cls.uid == 0:
            cls.uid = USER
            for name in (run, inside):
                os.chown(name, USER, USER)
            cls.user = ["/usr/bin/setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        command = f"{cls.directory}/attempts.py {inside} {cls.name}"
        cls.daemon = Daemon(directory=run, recovered=False, nvme=False, before=cls.user,
                            **{"shared.roots": f"process:evil network write={inside} -- {command}"})
        result = os.path.join(inside, "attempts.json")
        until(lambda: os.path.exists(result), "the attempts")
        with open(result, encoding="utf-8") as f:
            cls.result = json.load(f)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()
        for pid in filter(cls.of_backend, filter(str.isdigit, os.listdir("/proc"))):
            os.kill(int(pid), signal.SIGKILL)
        cls.listener.close()
        shutil.rmtree(cls.directory)

    @staticmethod
    def state(daemon):
        pid = daemon.process.pid
        with open(f"/proc/{pid}/limits", encoding="utf-8") as f:
            return (f.read(), os.sched_getscheduler(pid), os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid))

    def test_1_what_reaches_others_is_refused(self):
        self.assertEqual(self.result["daemon"], self.daemon.process.pid)
        self.assertGreater(len(self.result["forbidden"]), 50, "they were tried")
        self.assertEqual({name: how for name, how in self.result["forbidden"].items()
                          if how not in REFUSED and not (landlock() < 1 and name in FILES)}, {})

    def test_1_what_programs_need_works(self):
        self.assertEqual({name: how for name, how in self.result["needed"].items() if how != "done"}, {})

    def test_1_no_datagram_left_it(self):
        self.listener.setblocking(False)
        self.assertRaises(BlockingIOError, self.listener.recv, 100)

    def test_1_the_daemon_is_what_it_was(self):
        run = os.path.join(self.directory, "other")
        os.makedirs(run)
        os.chown(run, self.uid, -1)
        other = Daemon(directory=run, nvme=False, before=self.user)
        self.addCleanup(other.stop)
        self.assertEqual(self.state(self.daemon), self.state(other))
        client = Client(self.daemon)
        client.call("stats")
        client.close()

    def test_2_its_children_end_with_it(self):
        child = self.result["child"]
        with open(f"/proc/{child}/stat", encoding="utf-8") as f:
            backend = int(f.read().rsplit(")", 1)[1].split()[1])
        mine = [int(p) for p in os.listdir("/proc") if p.isdigit() and self.of_backend(p)]
        self.assertIn(child, mine)
        os.kill(backend, signal.SIGKILL)
        until(lambda: not any(map(runs, mine)), "the end of what it started")

    @classmethod
    def of_backend(cls, pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                return f"{cls.directory}/attempts.py".encode() in f.read().split(b"\0")
        except OSError:
            return False


HUNGRY = """#!/usr/bin/python3
all = []
while True:
    all.append(bytearray(b'x') * (1 << 20))
"""
# memory= no longer counts memory that has become read-only.
HUNGRY_FOR_MORE = """#!/usr/bin/python3
import ctypes
libc, size = ctypes.CDLL(None), ctypes.c_size_t(1 << 20)
libc.mmap.restype = ctypes.c_void_p
while True:
    p = ctypes.c_void_p(libc.mmap(None, size, 3, 0x22, -1, ctypes.c_long(0)))
    ctypes.memset(p, 1, 1 << 20)
    libc.mprotect(p, size, 1)
"""


class Hungry(unittest.TestCase):
    """Takes memory until there is none."""

    def hungry(self, program, memory):
        try:
            group = Group("hungry", 900 << 20)
        except OSError as e:
            self.skipTest(f"no memory cgroup can be made here: {e}")
        self.addCleanup(group.remove)
        directory = tempfile.mkdtemp(prefix="hungry.")
        self.addCleanup(shutil.rmtree, directory)
        with open(os.path.join(directory, "hungry.py"), "w", encoding="utf-8") as f:
            f.write(program)
        os.chmod(f.name, 0o755)
        root = f"process:hungry memory={memory} -- {f.name}"
        daemon = Daemon(nvme=False, before=group.words, **{"arena.size": "16MiB", "shared.roots": root})
        self.addCleanup(daemon.stop)
        until(lambda: "backend-ended" in daemon.log(), "the end of the backend")
        self.assertIn("signal 9", daemon.log())
        self.assertIsNone(daemon.process.poll())
        client = Client(daemon)
        client.call("stats")
        client.close()

    def test_it_ends_before_the_daemon(self):
        self.hungry(HUNGRY, "64GiB")

    def test_what_memory_does_not_count_the_group_does(self):
        self.hungry(HUNGRY_FOR_MORE, "64MiB")


if __name__ == "__main__":
    unittest.main()
