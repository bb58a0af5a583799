#!/usr/bin/python3
"""A read of a shared folder that the kernel finishes behind the daemon's end: it reaches nothing of the next daemon's."""

import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

from second_client import DEMO, OK, Case, Client, Daemon, OwnDaemons, Region, keys

SUITE_TIMEOUT_S = 240
SHARD = 1 << 18  # reads of it go on behind slow_mount.HELD_FROM
HERE = os.path.dirname(os.path.abspath(__file__))


class LateRead(OwnDaemons, Case):
    def setUp(self):
        super().setUp()
        if not os.access("/dev/shm", os.W_OK) or not os.access("/dev/fuse", os.W_OK):
            self.skipTest("it needs /dev/shm and, as root, /dev/fuse")
        self.origin, self.mount = tempfile.mkdtemp(), tempfile.mkdtemp()
        self.kept = tempfile.mkdtemp(dir="/dev/shm")
        for folder in (self.origin, self.mount, self.kept):
            self.addCleanup(shutil.rmtree, folder, True)
        self.flag = os.path.join(self.folder, "held")

    def start(self, blocks, **options):
        daemon = Daemon(nvme=False, **{"share.deadline": "1s", "share.threads": "2", "arena.size": "16MiB", "shutdown.drain": "20s"} | options)
        self.addCleanup(daemon.stop)
        identity = dict(DEMO, model=self.id(), parts=1, shards=[1], shard_bytes=SHARD)
        client = Client(daemon)
        ns = client.open(identity)
        return daemon, client, ns, Region(client, ns, identity, blocks)

    def stored_on_the_root(self):
        daemon, _, _, region = self.start(4, **{"share.roots": self.origin})
        self.assertEqual(region.dump(range(4), range(4)), [OK] * 4)
        files = lambda: [f for _, _, names in os.walk(self.origin) for f in names if not f.startswith(".")]
        self.until(lambda: sum(len(f) > 16 for f in files()) >= 4, "the files")
        daemon.stop()

    def mounted(self):
        server = subprocess.Popen([sys.executable, os.path.join(HERE, "slow_mount.py"), self.mount, self.origin, self.flag],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addCleanup(server.stdout.close)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        self.addCleanup(ctypes.CDLL(None).umount2, self.mount.encode(), 2)
        if server.stdout.readline().strip() != "mounted":
            self.skipTest("no FUSE file system can be mounted here")

    def threads(self, daemon):
        return len(os.listdir(f"/proc/{daemon.process.pid}/task"))

    def test_it_reaches_nobody(self):
        self.stored_on_the_root()
        self.mounted()
        daemon, client, ns, region = self.start(4, **{"share.roots": self.mount, "arena.keep": self.kept})
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(*range(4)), shared=True, each=True, wait_ms=20000)["hits"], 4)
        open(self.flag, "w", encoding="utf-8").close()
        self.assertNotIn(OK, region.load([0, 1], [0, 1]), "held back")
        daemon.process.send_signal(signal.SIGTERM)
        self.until(lambda: "share-hangs" in daemon.log() and not daemon.answers(), "its end, but for the threads")
        self.assertIsNone(daemon.process.poll(), "the mount holds it")
        _, _, _, region = self.start(64, **{"arena.keep": self.kept})  # has all of the memory
        kv = [region.fill(i) for i in range(64)]
        names = [f"new {i}" for i in range(64)]
        stored = [i for i, status in enumerate(region.dump(names, range(64))) if status == OK]
        self.assertGreater(len(stored), 48)
        os.unlink(self.flag)
        self.until(lambda: daemon.process.poll() is not None, "the end of the reads, and of the old process")
        region.memory[:] = bytes(len(region.memory))
        for i, status in zip(stored, region.load([names[i] for i in stored], stored)):
            if status == OK:
                self.assertEqual(region.bytes(i), kv[i], names[i])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
