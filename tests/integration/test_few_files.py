#!/usr/bin/python3
"""A daemon that may have few open files. Clients fill them with descriptors whose close() waits,
and others still get their work done."""

import array
import itertools
import os
import signal
import socket
import struct
import unittest

from hung_mount import HungMount
from second_client import DEMO, OK, Case, Region, frame
from test_held_up import HOUR_S, OLDER_KERNEL

AT_ONCE = 253  # descriptors of a message: the kernel's bound
OTHER, UIDS = 3000, (3001, 3002, 3003)
CONNECTIONS, PEERS = 40, 400  # of each uid, at once
OF_FRAME, ROUNDS = 64, 3


class Flood:
    """A process of that uid. Each of its connections says hello and begins a frame that never ends.
    With each byte it sends `fds` descriptors of that file, or else of a lingering socket. It goes
    on until the daemon drops the connection."""

    def __init__(self, path, uid, fds, file=None):
        self.path, self.fds, self.file = path, fds, file
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setuid(uid)
                self.run()
            finally:
                os._exit(1)

    def run(self):
        signal.signal(signal.SIGALRM, lambda *_: None)  # ends its own wait for a close()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            peers, clients = [], []
            for turn in itertools.count():
                if len(clients) < CONNECTIONS:
                    clients.append(self.connected())
                client = clients[turn % len(clients)]
                if client is None or not self.gave(client, listener, peers):
                    clients.remove(client)
                while len(peers) > PEERS:
                    peers.pop(0).close()

    def connected(self):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(1)
        try:
            client.connect(self.path)
            client.sendall(frame([0, 1, "hello", {"version_min": 1, "version_max": 1, "client": "flood"}]))
            client.recv(4096)
            client.send(struct.pack(">I", 1 << 20))
            return client
        except OSError:
            client.close()
            return None

    def lingering(self, listener, peers):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        one.connect(listener.getsockname())
        peers.append(listener.accept()[0])
        one.setblocking(False)
        try:
            while True:
                one.send(bytes(4096))
        except BlockingIOError:
            pass
        return one

    def sent(self, client, fd):
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * self.fds))
        try:
            client.sendmsg([b"\0"], [rights])
            return True
        except OSError:
            client.close()
            return False

    def gave(self, client, listener, peers):
        if self.file is not None:
            return self.sent(client, self.file)
        with self.lingering(listener, peers) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, HOUR_S))
            sent = self.sent(client, one.fileno())
            if not sent:  # nobody else has it: it must not wait here
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            return sent

    def kill(self):
        """It ends when its files' server does."""
        os.kill(self.pid, signal.SIGKILL)
        return lambda: os.waitpid(self.pid, 0)


@unittest.skipUnless(os.geteuid() == 0, "several uids need root")
class Few(Case):
    files, before = 2048, ()

    @classmethod
    def setUpClass(cls):
        cls.options = {"before": ("prlimit", f"--nofile={cls.files}", *cls.before), "nvme": False}
        super().setUpClass()

    def files_open(self):
        return len(os.listdir(f"/proc/{self.daemon.process.pid}/fd"))

    def works(self, number):
        """Another uid connects, registers memory, stores a block, finds and loads it."""
        client, identity = self.client(uid=OTHER), dict(DEMO, model=f"{self.id()} {number}")
        ns = client.open(identity)
        regions = [Region(client, ns, identity, 2) for _ in range(3)]
        self.assertEqual(regions[0].dump(["a"], [0]), [OK])
        self.assertEqual(client.hits(ns, "a"), 1)
        self.assertEqual(regions[1].load(["a"], [1]), [OK])
        client.close()

    def turned_away(self):
        metrics = self.operator.metrics()
        return metrics["connections_dropped"] + metrics["connections_refused"]

    def flooded(self, fds, file=None):
        self.operator, most = self.client(), 0
        floods = [Flood(self.daemon.socket, uid, fds, file) for uid in UIDS]
        try:
            for number in range(ROUNDS):
                before = self.turned_away()
                self.works(number)
                most = max(most, self.files_open())
                self.until(lambda: self.turned_away() > before, "the flood")
        finally:
            ends = [flood.kill() for flood in floods]
            self.doCleanups()
            for end in ends:
                end()
        self.assertLess(most, self.files * 7 / 8)

    def tearDown(self):
        operator = self.client()
        self.until(lambda: operator.metrics()["client_descriptors"] == 1, "the end of what was to be closed")

    def test_a_messages_most(self):
        self.flooded(AT_ONCE)

    def test_a_frames_most(self):
        """The descriptors stay with the frame that has no end."""
        self.flooded(OF_FRAME)

    def test_one_at_a_time(self):
        self.flooded(1)

    def test_of_a_file_whose_server_does_not_answer(self):
        """The daemon closes none of them while the flood lasts."""
        _, file = HungMount.file_within(self, self.daemon.directory + "/mount")
        self.flooded(8, file)


class FewBefore616(Few):
    """On a kernel where descriptors come with connections that are refused, too."""
    before = OLDER_KERNEL


if __name__ == "__main__":
    unittest.main()
