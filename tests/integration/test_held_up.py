#!/usr/bin/python3
"""Clients that try to hold up the event loop of a real daemon. Nobody else waits for them."""

import array
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import unittest

from daemon import halt, listens
from hung_mount import HungMount
from second_client import DEMO, TIMEOUT_S, Case, Closed, Refused, frame

HOUR_S, SO_PASSRIGHTS = 3600, 83
OLDER_KERNEL = (sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "older_kernel.py"))


class Lingering:
    """A socket whose close() waits for an hour, because its peer reads nothing that it has sent."""

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

    def give(self, connection, data, times=1, flags=0):
        """Sends the socket with the data. From now on the sent one is the last descriptor, unless
        it was closed already."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.socket.fileno()] * times))
        try:
            connection.sendmsg([data], [rights], flags)
        except OSError:  # nobody else has it: it must not wait here
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            raise
        finally:
            os.close(self.socket.detach())


def out_of_band():
    """Whether unix sockets have it here."""
    a, b = socket.socketpair()
    with a, b:
        try:
            return a.send(b"x", socket.MSG_OOB) == 1
        except OSError:
            return False


def rights_refusable():
    """Whether a socket can refuse descriptors here (Linux 6.16)."""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            return one.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) == 1
        except OSError:
            return False


class Stopping:
    def stopped(self, act):
        """Requests that `act` sends are there when the daemon next looks."""
        halt(self.daemon.process.pid)
        try:
            act()
        finally:
            os.kill(self.daemon.process.pid, signal.SIGCONT)


class Closing(Stopping, Case):
    def setUp(self):
        self.other = self.client(uid=1000)
        self.ns = self.other.open(DEMO)
        self.operator = self.client()
        self.before = 2  # these clients
        self.until_closed()

    def descriptors(self):
        return self.operator.metrics()["client_descriptors"]

    def bystander(self):
        """The event loop does something for another tenant. If it were held up, this would wait for
        an hour."""
        self.assertEqual(self.other.hits(self.ns, "none"), 0)

    def until_closed(self):
        self.until(lambda: self.descriptors() == self.before, "the end of what was to be closed")

    def holds_up_nobody(self, client):
        self.bystander()
        client.close()
        self.until_closed()


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Refusals(Closing):
    """A uid that connects too often is turned away, and what it has sent stays unread."""
    options = {"before": OLDER_KERNEL}

    def given(self):
        """How many of the clients that the daemon refuses can give it a descriptor."""
        sockets, given = [], 0

        def act():
            nonlocal given
            os.seteuid(1001)
            try:
                for i in range(700):
                    sockets.append(socket.socket(socket.AF_UNIX))
                    sockets[-1].connect(self.daemon.socket)
                    if i >= 600:
                        Lingering(self).give(sockets[-1], b"x")
                        given += 1
            except PermissionError:
                pass
            finally:
                os.seteuid(0)
        self.stopped(act)
        self.bystander()
        for each in sockets:
            each.close()
        self.until_closed()
        return given

    def test_what_lies_in_their_sockets(self):
        self.assertEqual(self.given(), 100)


class RefusalsToday(Refusals):
    options = {}

    @unittest.skipUnless(rights_refusable(), "a kernel before 6.16")
    def test_what_lies_in_their_sockets(self):
        """Nothing lies there: a connection that the daemon has not accepted takes no descriptors.
        """
        self.assertEqual(self.given(), 0)


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Descriptors(Closing):
    """A tenant that gives descriptors whose close() waits. The daemon ends in order while one is being closed."""

    def test_one_that_comes_with_a_frame(self):
        client, lingering = self.client(uid=1001), Lingering(self)
        self.stopped(lambda: lingering.give(client.socket, frame([0, 9, "stats", {}])))
        self.holds_up_nobody(client)

    def test_one_that_nobody_reads(self):
        client, lingering = self.client(uid=1001), Lingering(self)

        def act():
            client.send(bytes(4))  # no frame: the connection ends
            lingering.give(client.socket, b"x")
        self.stopped(act)
        self.holds_up_nobody(client)

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
        planes = [{"layer": layer, "offset": layer * 4096, "stride": 8192, "block_bytes": 4096} for layer in range(2)]
        body = [0, 99, "region.register", {"ns": ns, "part": 0, "blocks": 1, "device": "cpu", "planes": planes,
                                           "handles": [{"kind": 0, "bytes": 8192}]}]
        client.methods[99] = "region.register"
        self.stopped(lambda: lingering.give(client.socket, frame(body)))
        self.assertRaises(Refused, client.wait, 99)
        self.holds_up_nobody(client)

    def test_more_than_a_frame_may_have(self):
        client, lingering = self.client(uid=1001), Lingering(self)
        self.stopped(lambda: lingering.give(client.socket, b"x", 253))
        self.bystander()
        with self.assertRaises((Refused, Closed)):
            client.next()
        client.close()
        self.until_closed()

    def out_of_band(self, before, behind):
        """Sends an out-of-band byte with a descriptor, among others."""
        if not out_of_band():
            self.skipTest("this kernel's unix sockets have no out-of-band bytes")
        client, lingering = self.client(uid=1001), Lingering(self)

        def act():
            if before:
                client.socket.send(before)
            lingering.give(client.socket, b"!", flags=socket.MSG_OOB)
            if behind:
                client.socket.send(behind)
        self.stopped(act)
        self.holds_up_nobody(client)

    def test_one_out_of_band(self):
        for before, behind in ((b"", b""), (b"", bytes(4)), (b"\0", b""), (b"\0", b"\0\0")):
            with self.subTest(before=before, behind=behind):
                self.out_of_band(before, behind)

    def test_two_out_of_band(self):
        if not out_of_band():
            self.skipTest("this kernel's unix sockets have no out-of-band bytes")
        client, lingering = self.client(uid=1001), [Lingering(self), Lingering(self)]
        self.stopped(lambda: [each.give(client.socket, b"!", flags=socket.MSG_OOB) for each in lingering])
        self.holds_up_nobody(client)

    def test_a_file_whose_server_does_not_answer(self):
        """All tenants but one have a file whose close() hangs. The other tenant's close() is done
        while those go on."""
        mount, file = HungMount.file_within(self, self.daemon.directory + "/mount")
        clients, other = [self.client(uid=1010 + i) for i in range(40)], self.client(uid=1002)
        n, before = len(clients), self.descriptors()
        for client in clients:
            client.send(frame([0, 9, "stats", {}]), [file])
        self.until(lambda: self.descriptors() == before + n, "the descriptors")
        for _ in range(20):
            self.bystander()
            other.send(frame([0, 9, "stats", {}]), [self.operator.socket.fileno()])
            self.until(lambda: self.descriptors() == before + n, "the other tenant's end")
        for client in clients:
            client.close()
        # n fewer, and the file is open
        self.until(lambda: self.descriptors() == before, "the connections' end")
        self.bystander()
        mount.close()
        self.until(lambda: self.descriptors() == before - n, "the file's end")
        self.assertRaises(OSError, os.close, file)
        other.close()
        self.until_closed()


class Monitoring(Stopping, Case):
    """A client sends descriptors whose close() blocks to the metrics' socket. Meanwhile the socket
    answers requests for pages."""
    where = os.path.join(tempfile.gettempdir(), f"metrics.{os.getpid()}")
    options = {"nvme": False, "metrics.socket": where}

    def setUp(self):
        self.until(lambda: listens(self.where), "the metrics' socket")

    def get(self, *parts):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as one:
                one.settimeout(TIMEOUT_S)
                one.connect(self.where)
                try:
                    for part in parts:
                        one.sendall(part)
                    answer = b"".join(iter(lambda: one.recv(65536), b""))
                except (BrokenPipeError, ConnectionResetError):
                    answer = b""
            if answer:
                break
            time.sleep(0.1)  # the socket was at its bound of connections: observe/http.h
        self.assertIn(b" 200 ", answer.partition(b"\r\n")[0])
        return answer

    def pages(self):
        self.get(b"GET /live HTTP/1.0\r\n\r\n")
        self.assertIn(b"ucmd_requests_total", self.get(b"GET /metr", b"ics HTTP/1.1\r\nHost: x\r", b"\n\r\n"))

    def given(self, data, give):
        """Whether the socket takes it."""
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(self.where)
            for part in data:
                one.sendall(part)
            try:
                self.stopped(lambda: give(one))
            except (PermissionError, BrokenPipeError):
                return False
            self.pages()
            return True

    def all_given(self):
        return [self.given(data, lambda one: Lingering(self).give(one, b"\r\n\r\n"))
                for data in ([b"GET /live HTTP/1.0"], [], [b"x" * 9000], [b"GET /live HTTP/1.0\r\n\r\n"]) for _ in range(4)]

    @unittest.skipUnless(rights_refusable(), "a kernel before 6.16")
    def test_descriptors_whose_close_waits(self):
        self.assertEqual(self.all_given(), [False] * 16)
        self.pages()


class MonitoringBefore616(Monitoring):
    where = Monitoring.where + ".older"
    options = {"nvme": False, "metrics.socket": where, "before": OLDER_KERNEL}

    def test_descriptors_whose_close_waits(self):
        self.assertEqual(self.all_given()[:8], [True] * 8)  # the others may come too late
        self.pages()

    @unittest.skipUnless(os.geteuid() == 0, "a file system needs root")
    def test_a_file_whose_server_does_not_answer(self):
        mount, file = HungMount.file_within(self, self.daemon.directory + "/mount")
        for _ in range(6):  # each has one of the socket's 8 places until the server's end
            self.assertTrue(self.given([], lambda one: socket.send_fds(one, [b"x"], [file])))
        mount.close()
        self.assertRaises(OSError, os.close, file)


if __name__ == "__main__":
    unittest.main()
