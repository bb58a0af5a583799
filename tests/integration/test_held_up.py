#!/usr/bin/env python3
"""What a client does to hold up the daemon's loop, against a real daemon: nobody else waits for it."""

import array
import os
import signal
import socket
import struct
import sys
import unittest

try:
    from hung_mount import HungMount
    from second_client import DEMO, Case, Closed, Refused, frame, keys
except ImportError:  # another Python than Debian's is first in PATH
    if __name__ != "__main__" or sys.executable == "/usr/bin/python3":
        raise
    os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)

HOUR_S = 3600


class Lingering:
    """A socket whose close() waits for an hour: its peer reads nothing of what it has sent."""

    def __init__(self, case):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            self.socket = socket.create_connection(listener.getsockname())
            peer, _ = listener.accept()
        case.addCleanup(peer.close)
        self.socket.setblocking(False)
        try:
            while True:
                self.socket.send(bytes(65536))
        except BlockingIOError:
            pass
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, HOUR_S))

    def give(self, connection, data, times=1):
        """From now on the last descriptor is what was sent with the data, if nobody has closed that yet."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.socket.fileno()] * times))
        connection.sendmsg([data], [rights])
        os.close(self.socket.detach())


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Descriptors(Case):
    """A tenant that gives descriptors whose close() waits. The daemon ends in order while one is being closed."""

    def setUp(self):
        self.other = self.client(uid=1000)
        self.ns = self.other.open(DEMO)
        self.operator = self.client()
        self.before = 2  # these clients
        self.until_closed()

    def descriptors(self):
        return self.operator.call("stats")["metrics"]["client_descriptors"]

    def bystander(self):
        """Anything that the loop does for another tenant. It would wait for an hour."""
        self.assertEqual(self.other.hits(self.ns, "none"), 0)

    def stopped(self, act):
        """What is sent within is there when the daemon next looks."""
        os.kill(self.daemon.process.pid, signal.SIGSTOP)
        try:
            act()
        finally:
            os.kill(self.daemon.process.pid, signal.SIGCONT)

    def until_closed(self):
        self.until(lambda: self.descriptors() == self.before, "the end of what was to be closed")

    def test_one_that_comes_with_a_frame(self):
        client, lingering = self.client(uid=1001), Lingering(self)
        request = frame([0, 9, "stats", {}])
        self.stopped(lambda: lingering.give(client.socket, request))
        self.bystander()
        client.close()
        self.until_closed()

    def test_one_that_nobody_reads(self):
        client, lingering = self.client(uid=1001), Lingering(self)

        def act():
            client.send(bytes(4))  # no frame: the connection ends
            lingering.give(client.socket, b"x")
        self.stopped(act)
        self.bystander()
        client.close()
        self.until_closed()

    def test_one_whose_peer_is_gone(self):
        client, lingering = self.client(uid=1001), Lingering(self)

        def act():
            lingering.give(client.socket, frame([0, 9, "stats", {}])[:1])
            client.close()
        self.stopped(act)
        self.bystander()
        self.until_closed()

    def test_one_that_is_no_memory(self):
        client, lingering = self.client(uid=1001), Lingering(self)
        ns = client.open(DEMO)
        planes = [{"shard": shard, "offset": shard * 4096, "stride": 8192, "chunk": 4096} for shard in range(2)]
        body = [0, 99, "region.register", {"ns": ns, "part": 0, "blocks": 1, "device": "cpu", "planes": planes,
                                           "handles": [{"kind": 0, "bytes": 8192}]}]
        client.methods[99] = "region.register"
        self.stopped(lambda: lingering.give(client.socket, frame(body)))
        self.assertRaises(Refused, client.wait, 99)
        self.bystander()
        client.close()
        self.until_closed()

    def test_more_than_a_frame_may_have(self):
        client, lingering = self.client(uid=1001), Lingering(self)
        self.stopped(lambda: lingering.give(client.socket, b"x", 253))
        self.bystander()
        with self.assertRaises((Refused, Closed)):
            client.next()
        client.close()
        self.until_closed()

    def test_of_peers_that_are_refused(self):
        """A uid that connects too often is turned away unread."""
        lingering, sockets = [], []

        def act():
            os.seteuid(1001)
            try:
                for i in range(700):
                    sockets.append(socket.socket(socket.AF_UNIX))
                    sockets[-1].connect(self.daemon.socket)
                    if i >= 600:
                        lingering.append(Lingering(self))
                        lingering[-1].give(sockets[-1], b"x")
            finally:
                os.seteuid(0)
        self.stopped(act)
        self.bystander()
        for each in sockets:
            each.close()
        self.until_closed()

    def test_a_file_whose_server_does_not_answer(self):
        """Two tenants with descriptors to close, one with such a file: its close() goes on, the other's is done."""
        folder = self.daemon.folder + "/mount"
        os.makedirs(folder, exist_ok=True)
        try:
            mount = HungMount(folder, opens=True)
        except OSError as e:
            self.skipTest(str(e))
        self.addCleanup(mount.close)
        file = os.open(folder + "/file", os.O_RDWR)
        client, other = self.client(uid=1001), self.client(uid=1002)
        before = self.descriptors()
        client.send(frame([0, 9, "stats", {}]), [file])
        self.until(lambda: self.descriptors() > before, "the descriptor")
        for _ in range(20):
            self.bystander()
            other.send(frame([0, 9, "stats", {}]), [self.operator.socket.fileno()])
            self.until(lambda: self.descriptors() == before + 1, "the other tenant's end")
        client.close()
        self.until(lambda: self.descriptors() == before, "the connection's end")  # one less, and the file is open
        self.bystander()
        mount.close()
        self.until(lambda: self.descriptors() == before - 1, "the file's end")
        self.assertRaises(OSError, os.close, file)
        other.close()
        self.until_closed()


if __name__ == "__main__":
    unittest.main()
