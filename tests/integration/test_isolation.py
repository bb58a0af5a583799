#!/usr/bin/python3
"""Workers and daemons in PID, IPC, mount, network, UTS and user namespaces of their own, like
containers. They share the cache of host memory as without namespaces. docs/containers.md says what
that means for pods.
"""

import ctypes
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

from second_client import DEMO, OK, TIMEOUT_S, UCMD, Client, Daemon, Region

TOP = pathlib.Path(__file__).resolve().parents[2]

# What a container runtime makes: its own /proc, and the socket's directory under another path.
MOUNT = ("--mount",)
PID = ("--pid", "--fork", "--kill-child", "--mount-proc")
WORKERS = {"none": (), "pid": PID, "ipc": ("--ipc",), "net": ("--net",), "mount": MOUNT, "uts": ("--uts",),
           "user": ("--user", "--map-root-user"), "all but user": PID + MOUNT + ("--ipc", "--net", "--uts"),
           "all": PID + MOUNT + ("--ipc", "--net", "--uts", "--user", "--map-root-user")}
ISOLATED = ("unshare",) + PID + ("--ipc", "--net", "--uts")


def allowed(*flags):
    return subprocess.run(["unshare", *flags, "true"], capture_output=True, timeout=TIMEOUT_S).returncode == 0


def pattern(block, size):
    return bytes([block + 1]) * size


class Named:
    """The fields of a daemon that Client needs, for a daemon in another namespace."""

    def __init__(self, path):
        self.socket, self.clients = path, []


def worker(path, mine, others):
    """Loads what the workers before it stored, and stores one block."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    client = Client(Named(path))
    region = Region(client, client.open(DEMO), DEMO, 2)
    for name in others:
        assert region.load([f"isolated {name}"], [0]) == [OK], f"the block of worker {name} is not found"
        assert region.bytes(0) == pattern(name, region.size), f"wrong bytes from worker {name}"
    region.memory[region.size:] = pattern(mine, region.size)
    assert region.dump([f"isolated {mine}"], [1]) == [OK]
    client.close()


@unittest.skipUnless(os.geteuid() == 0 and allowed(*ISOLATED[1:]), "namespaces of one's own need root here")
class Isolation(unittest.TestCase):
    def play(self, daemon):
        """Each worker has namespaces of its own. They and the daemon share only the socket's
        directory."""
        stored = []
        for number, (name, flags) in enumerate(WORKERS.items()):
            if not allowed(*flags):
                print(f"not allowed here, so not tried: {name}", file=sys.stderr)
                continue
            with self.subTest(worker=name):
                path = daemon.socket
                command = [sys.executable, "-B", __file__, "worker", path, str(number), *map(str, stored)]
                if "--mount" in flags:
                    inside = f"mkdir /run/ucmd-test && mount --bind {daemon.directory} /run/ucmd-test && exec \"$@\""
                    command = ["sh", "-c", f"mount -t tmpfs none /run && {inside}", "sh", *command]
                    command[command.index(path)] = "/run/ucmd-test/s"
                if flags:
                    command = ["unshare", *flags, *command]
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
                self.assertEqual(done.returncode, 0, done.stderr)
                stored.append(number)

    def test_workers_in_containers(self):
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        self.play(daemon)
        self.assertEqual(daemon.stop(), 0)

    def test_a_daemon_in_a_container(self):
        daemon = Daemon(before=ISOLATED)
        self.addCleanup(daemon.kill)
        self.play(daemon)
        parent = daemon.process.pid
        with open(f"/proc/{parent}/task/{parent}/children") as children:
            os.kill(int(children.read().split()[0]), signal.SIGTERM)
        self.assertEqual(daemon.process.wait(TIMEOUT_S), 0)
        daemon.stop()


class Files(unittest.TestCase):
    """Checks config/container, as no test runs all of it."""

    def test_the_config_of_the_daemon_set(self):
        manifest = (TOP / "config/container/ucmd.yaml").read_text()
        config = textwrap.dedent(re.search(r"  ucmd.yaml: \|\n(.*?)---\n", manifest, re.S)[1])
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            # This machine has neither the group nor the memory.
            file.write(config.replace("socket_group: ucmd", "").replace("64GiB", "64MiB").replace("1TiB", "1GiB"))
            file.flush()
            with tempfile.TemporaryDirectory() as store:
                done = subprocess.run([UCMD, "--config", file.name, "--check", "--set", f"nvme.paths={store}", "--set",
                                       f"socket={store}/s"], capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_every_user_is_the_images(self):
        image = (TOP / "config/container/Containerfile").read_text()
        number = re.search(r"--uid (\d+)", image)[1]
        self.assertIn(f"--gid {number}", image)
        daemon = (TOP / "config/container/ucmd.yaml").read_text()
        self.assertEqual(set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", daemon)), {number, "0"})
        self.assertIn(f"supplementalGroups: [{number}]", (TOP / "config/container/engine.yaml").read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], int(sys.argv[3]), [int(number) for number in sys.argv[4:]])
    else:
        unittest.main()
