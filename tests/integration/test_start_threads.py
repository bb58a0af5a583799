#!/usr/bin/python3
"""A daemon whose user may have few threads: it serves, or says that it cannot start."""

import os
import resource
import shutil
import socket
import subprocess
import tempfile
import unittest

from daemon import TIMEOUT_S, UCMD, listens, until
from second_client import frame

UID = 23456  # of nobody: the kernel counts a user's threads
MOST = 64


def answers(path):
    """Whether the daemon that listens there answers; else it ends."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT_S)
        try:
            client.connect(path)
            client.sendall(frame([0, 1, "hello", {"version_min": 1, "version_max": 1, "client": "threads"}]))
            return len(client.recv(1)) == 1
        except ConnectionError:
            return False


@unittest.skipUnless(os.geteuid() == 0, "being another user needs root")
class Threads(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="threads.")
        self.addCleanup(shutil.rmtree, self.directory)
        os.chown(self.directory, UID, UID)
        self.ucmd = shutil.copy(UCMD, self.directory)  # which that user may run

    def serves(self, threads):
        """Whether a daemon with so many threads serves. If not, it ended and said why."""
        def limited():
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
            os.setgid(UID)
            os.setuid(UID)

        path = os.path.join(self.directory, f"s{threads}")
        sets = (f"socket={path}", "arena.size=16MiB", "arena.slab=1MiB", "device.cuda=off", "device.cpu_threads=1", "log.level=error")
        with subprocess.Popen([self.ucmd, *(word for each in sets for word in ("--set", each))], preexec_fn=limited, text=True,
                              stderr=subprocess.PIPE) as daemon:
            try:
                until(lambda: daemon.poll() is not None or listens(path), "its socket or its end")
                serves = daemon.poll() is None and answers(path)
                if not serves:
                    daemon.wait(TIMEOUT_S)
            finally:
                daemon.terminate()
                said = daemon.communicate(timeout=TIMEOUT_S)[1]
        if serves:
            self.assertEqual(daemon.returncode, 0, said)
        else:
            self.assertEqual(daemon.returncode, 1, (threads, said))
            self.assertIn("temporarily unavailable", said)
        return serves

    def test_each_number_of_threads(self):
        """Whichever module gets no thread, the others undo what they have made."""
        self.assertFalse(self.serves(1))
        self.assertTrue(any(self.serves(threads) for threads in range(2, MOST)))


if __name__ == "__main__":
    unittest.main()
