#!/usr/bin/python3
"""What a client does to hold up the daemon's loop, against a real daemon: nobody else waits for it."""

import array
import os
import re
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import unittest

import msgpack
from daemon import halt
from hung_mount import HungMount
from second_client import DEADLINE, DEMO, TIMEOUT_S, TOP, Case, Client, Closed, Daemon, Refused, Region, frame, keys

HOUR_S, SO_PASSRIGHTS = 3600, 83
OLDER_KERNEL = (sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "older_kernel.py"))


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

    def give(self, connection, data, times=1, flags=0):
        """From now on the last descriptor is what was sent with the data, if nobody has closed that yet."""
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
        """What is sent within is there when the daemon next looks."""
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
        return self.operator.call("stats")["metrics"]["client_descriptors"]

    def bystander(self):
        """Anything that the loop does for another tenant. It would wait for an hour."""
        self.assertEqual(self.other.hits(self.ns, "none"), 0)

    def until_closed(self):
        self.until(lambda: self.descriptors() == self.before, "the end of what was to be closed")


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Refusals(Closing):
    """A uid that connects too often is turned away unread, with what it has sent."""
    options = {"before": OLDER_KERNEL}

    def given(self):
        """How many of those whom the daemon refuses can give it a descriptor."""
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
        """Nothing: what the daemon has not accepted takes no descriptors."""
        self.assertEqual(self.given(), 0)


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Descriptors(Closing):
    """A tenant that gives descriptors whose close() waits. The daemon ends in order while one is being closed."""

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

    def out_of_band(self, before, behind):
        """Such a byte, with a descriptor, among others."""
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
        self.bystander()
        client.close()
        self.until_closed()

    def test_one_out_of_band(self):
        self.out_of_band(b"", b"")

    def test_one_out_of_band_before_others(self):
        self.out_of_band(b"", bytes(4))

    def test_one_out_of_band_behind_others(self):
        self.out_of_band(b"\0", b"")

    def test_one_out_of_band_in_a_frame(self):
        self.out_of_band(b"\0", b"\0\0")

    def test_two_out_of_band(self):
        if not out_of_band():
            self.skipTest("this kernel's unix sockets have no out-of-band bytes")
        client, lingering = self.client(uid=1001), [Lingering(self), Lingering(self)]
        self.stopped(lambda: [each.give(client.socket, b"!", flags=socket.MSG_OOB) for each in lingering])
        self.bystander()
        client.close()
        self.until_closed()

    def test_a_file_whose_server_does_not_answer(self):
        """Tenants with descriptors to close, all but one with such a file: its close() goes on, the other's is done."""
        folder = self.daemon.folder + "/mount"
        os.makedirs(folder, exist_ok=True)
        try:
            mount = HungMount(folder, opens=True)
        except OSError as e:
            self.skipTest(str(e))
        self.addCleanup(mount.close)
        file = os.open(folder + "/file", os.O_RDWR)
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
        self.until(lambda: self.descriptors() == before, "the connections' end")  # n less, and the file is open
        self.bystander()
        mount.close()
        self.until(lambda: self.descriptors() == before - n, "the file's end")
        self.assertRaises(OSError, os.close, file)
        other.close()
        self.until_closed()


class Monitoring(Stopping, Case):
    """Who sends descriptors whose close() waits to the metrics' socket: its pages are answered meanwhile."""
    where = os.path.join(tempfile.gettempdir(), f"metrics.{os.getpid()}")
    options = {"nvme": False, "metrics.socket": where}

    def setUp(self):
        self.until(lambda: os.path.exists(self.where), "the metrics' socket")

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
        folder = self.daemon.folder + "/mount"
        os.makedirs(folder, exist_ok=True)
        try:
            mount = HungMount(folder, opens=True)
        except OSError as e:
            self.skipTest(str(e))
        self.addCleanup(mount.close)
        file = os.open(folder + "/file", os.O_RDWR)
        for _ in range(6):  # each has one of the socket's 8 places until the server's end
            self.assertTrue(self.given([], lambda one: socket.send_fds(one, [b"x"], [file])))
        mount.close()
        self.assertRaises(OSError, os.close, file)


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Turns(Stopping, Case):
    """Connections take turns, and tenants do: counted in requests, by what the daemon has received when it answers."""

    def setUp(self):
        self.operator = self.client()

    def received(self):
        return self.operator.call("stats")["metrics"]["requests_total"]

    def tiny(self, first, n):
        return b"".join(frame([0, first + i, "lookup", {"ns": 1, "keys": b""}]) for i in range(n))

    def fill(self, client, data):
        """As much of it as the socket takes."""
        client.socket.setblocking(False)
        sent = 0
        try:
            while sent < len(data):
                sent += client.socket.send(data[sent:])
        except BlockingIOError:
            pass
        client.socket.settimeout(TIMEOUT_S)
        return sent

    def answered(self, client, n):
        """The msgids of the next n answers."""
        return [msgpack.unpackb(client.receive(), raw=False)[1] for _ in range(n)]

    def ahead(self, uids, connections, data=None, size=None):
        """How many of a flood's requests are received before one that came behind all of them; and how many there were. data: frames of that
        size."""
        flood = [self.client(uid=uids[i % len(uids)]) for i in range(connections)]
        data, queued = data or self.tiny(0, 20000), []
        size = size or len(data) // 20000
        before = self.received()

        def act():
            queued.extend(self.fill(each, data) // size for each in flood)
            self.msgid = self.operator.begin("stats")
        self.stopped(act)
        ahead = self.operator.wait(self.msgid)["metrics"]["requests_total"] - before
        for each in flood:
            each.close()
        return ahead, sum(queued)

    def test_a_request_passes_another_tenants_flood(self):
        ahead, queued = self.ahead([1001], 20)
        self.assertGreater(queued, 40000)
        self.assertLess(ahead, queued / 8)

    def test_a_pause_is_no_tenants_work(self):
        """The daemon stands still while it serves one of two tenants. That tenant waits no longer afterwards."""
        data = self.tiny(0, 20000)
        size = len(data) // 20000
        for _ in range(4):  # in half of these it serves the other one
            busy, one = [self.client(uid=1002), self.client(uid=1001)], self.client(uid=1002)
            flood, before, sent = [self.client(uid=1001) for _ in range(8)], self.received(), []
            self.stopped(lambda: sent.extend(self.fill(each, data) // size for each in busy))
            self.answered(busy[0], 1)

            def act():
                sent.extend(self.fill(each, data) // size for each in flood)
                self.msgid = one.begin("stats")
                time.sleep(0.3)
            self.stopped(act)
            self.assertLess(one.wait(self.msgid)["metrics"]["requests_total"] - before, sum(sent) / 2)
            for each in flood + busy + [one]:
                each.close()
            self.until(lambda: self.operator.call("stats")["metrics"]["connections"] == 1, "the floods' end")

    def turns(self):
        histograms = self.operator.call("stats")["histograms"]
        return next(h["count"] for h in histograms if h["name"] == "loop_turn")

    def sleeps(self):
        """Whether the loop hardly turns for a while."""
        before = self.turns()
        time.sleep(0.3)
        return self.turns() - before < 300

    def test_the_end_of_a_peer_that_reads_nothing_is_told_once(self):
        """It leaves answers unread, so the daemon leaves its last requests in the socket."""
        client = self.client(uid=1001)
        data = b"".join(frame([0, i, "stats", {}]) for i in range(20000))
        self.until(lambda: self.fill(client, data) < len(data) and self.sleeps(), "its socket is full")
        client.socket.shutdown(socket.SHUT_WR)
        self.until(self.sleeps, "the loop sleeps")
        client.close()
        self.until(lambda: self.operator.call("stats")["metrics"]["connections"] == 1, "its end")

    def test_a_request_passes_the_floods_of_several_tenants(self):
        """Each has a turn before."""
        ahead, queued = self.ahead(range(1001, 1005), 20)
        self.assertLess(ahead, queued / 3)

    def test_a_request_passes_a_flood_of_new_namespaces(self):
        """Each is dear, so that a turn has few of them; most are refused, for there are too many."""
        frames = [frame([0, 10000 + i, "namespace.open", dict(DEMO, model=f"{i:05}", parts=256, shards=[1])]) for i in range(10000)]
        self.assertEqual(len(set(map(len, frames))), 1)
        ahead, queued = self.ahead([1001], 20, b"".join(frames), len(frames[0]))
        self.assertGreater(queued, 4000)
        self.assertLess(ahead, queued / 8)

    def test_connections_of_a_tenant_take_turns(self):
        """A request of the flooding tenant's own other connection waits for a turn of each, not for all that they have sent."""
        flood, one, own = self.client(uid=1001), self.client(uid=1001), self.client(uid=1001)
        data, queued = self.tiny(0, 20000), []

        def act():
            for each in (flood, one):
                queued.append(self.fill(each, data) // (len(data) // 20000))
            own.begin("hello", version_min=1, version_max=1, client="own")
            self.msgid = own.begin("namespace.open", **DEMO)
        self.stopped(act)
        own.wait(self.msgid)
        before = len(own.answers)
        self.assertEqual(before, 1)
        for each, n in zip((flood, one), queued):
            each.socket.settimeout(TIMEOUT_S)
            answers = self.answered(each, 1000)
            self.assertEqual(answers, list(range(1000)))

    def test_fifty_thousand_frames_of_one_write(self):
        client, n = self.client(uid=1001), 50000
        sender = threading.Thread(target=client.socket.sendall, args=(self.tiny(0, n),))
        sender.start()
        self.assertEqual(self.answered(client, n), list(range(n)))
        sender.join()

    def test_frames_before_a_disconnect_are_all_handled(self):
        """Of peers that have gone when the daemon looks."""
        clients, data = [self.client(uid=1001) for _ in range(8)], self.tiny(0, 3000)
        before = self.received()

        def act():
            for each in clients:
                self.assertEqual(self.fill(each, data), len(data))
                each.close()
        self.stopped(act)
        asked = 0
        while self.operator.call("stats")["metrics"]["connections"] > 1:
            asked += 1
        self.assertEqual(self.received() - before - asked, 3000 * len(clients) + 2)

    def test_a_frame_in_pieces_beside_a_flood(self):
        client, flood = self.client(uid=1000), self.client(uid=1001)
        whole = frame([0, 5, "hello", {"version_min": 1, "version_max": 1, "client": "pieces"}])
        self.fill(flood, self.tiny(0, 20000))
        for byte in range(len(whole)):
            client.send(whole[byte:byte + 1])
        self.assertEqual(self.answered(client, 1), [5])

    def test_who_reads_late_gets_all_answers_in_order(self):
        """More than the daemon keeps of answers; meanwhile others are served."""
        client, n = self.client(), 2000
        sender = threading.Thread(target=client.socket.sendall, args=(b"".join(frame([0, i, "stats", {}]) for i in range(n)),))
        sender.start()
        for _ in range(20):
            self.received()
        self.assertEqual(self.answered(client, n), list(range(n)))
        sender.join()


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class AtOnce(Stopping, Case):
    """What comes due for many connections of one tenant in one moment is done in that tenant's turns."""
    connections, blocks, handshake_s = 200, 16384, 3
    options = {"nvme": False, "request.handshake": f"{handshake_s}s", "events.memory": "64MiB"}

    def setUp(self):
        self.operator = self.client()

    def metrics(self):
        return self.operator.call("stats")["metrics"]

    def ahead(self, act):
        """What the daemon has counted when it answers a request that came behind all that `act` does while it stands still."""
        def acts():
            act()
            self.msgid = self.operator.begin("stats")
        self.stopped(acts)
        return self.operator.wait(self.msgid)["metrics"]

    def test_frames_whose_time_is_over(self):
        """Their ends have come in time, and the daemon did not look: each is answered."""
        flood, each = [self.client(uid=1001) for _ in range(self.connections)], 1000
        data = b"".join(frame([0, i, "lookup", {"ns": 1, "keys": b""}]) for i in range(each))
        for client in flood:
            client.send(data[:10])
        before = self.metrics()

        def act():
            for client in flood:
                client.send(data[10:])
            time.sleep(self.handshake_s + 0.1)  # the daemon's own time, which goes on
        ahead = self.ahead(act)["requests_total"] - before["requests_total"]
        self.assertLess(ahead, self.connections * each / 8)
        for client in flood:
            for i in range(each):
                self.assertEqual(msgpack.unpackb(client.receive(), raw=False)[1], i)
        self.assertEqual(self.metrics()["connections_dropped"], before["connections_dropped"])

    def test_frames_that_did_not_come_in_time(self):
        flood = [self.client(uid=1001) for _ in range(self.connections)]
        before = self.metrics()["connections_dropped"]
        for client in flood:
            client.send(frame([0, 1, "stats", {}])[:-1])
        for client in flood:
            with self.assertRaises(Refused) as caught:
                client.next()
            self.assertEqual(caught.exception.code, DEADLINE)
        self.assertEqual(self.metrics()["connections_dropped"], before + self.connections)

    def test_who_waits_for_events(self):
        """A tenant's readers are answered in one moment, and others' requests in between."""
        identity = dict(DEMO, model="events", shards=[1], shard_bytes=1024)
        owner = self.client(uid=1001)
        region = Region(owner, owner.open(identity), identity, 2048)
        since = owner.call("events")["last"]
        readers = [self.client(uid=1001) for _ in range(self.connections)]
        waits = [each.begin("events", since=since, limit=2048, wait_ms=60000) for each in readers]
        active, others = len(readers), [self.client(uid=1002) for _ in range(20)]
        self.until(lambda: self.metrics()["requests_active"] == active, "all readers")

        def act():
            region.begin("dump", range(2048), range(2048))
            for each in others:
                each.asked = [each.begin("stats", more=more) for more in [True] * 49 + [False]]
        self.stopped(act)
        seen = [each.wait(msgid)["metrics"]["requests_active"] for each in others for msgid in each.asked]
        self.assertGreater(sum(0.1 * active < n < 0.9 * active for n in seen), 5)
        for each, wait in zip(readers, waits):
            self.assertTrue(each.wait(wait)["events"])

    def test_ends_of_connections_with_leases(self):
        identity = dict(DEMO, shards=[1], shard_bytes=1024)
        owner, some = self.client(uid=1001), keys(*range(self.blocks))
        Region(owner, owner.open(identity), identity, self.blocks).dump(range(self.blocks), range(self.blocks))
        flood = [self.client(uid=1001) for _ in range(self.connections // 2)]
        for client in flood:
            ns = client.open(identity)
            for _ in range(2):
                self.assertEqual(client.call("lookup", ns=ns, keys=some, lease_ms=3600000)["hits"], self.blocks)
        before = self.metrics()["connections"]
        left = self.ahead(lambda: [client.close() for client in flood])["connections"]
        self.assertGreater(left, before - len(flood) / 2)
        self.until(lambda: self.metrics()["leases"] == 0, "the end of all leases")


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Watchdog(Stopping, unittest.TestCase):
    """The test is systemd: it hears the daemon's watchdog while 1,000 connections of ten uids send what is dear, read nothing or little, come
    and go, and give descriptors that hang. The daemon says that it lives at half of the time that systemd gives it, so it may be late by the
    other half. Here it says so every quarter of a second, which is soon heard six times."""
    connections, pings = 1000, 6
    with open(os.path.join(TOP, "systemd/ucmd.service"), encoding="utf-8") as unit:
        late_s = int(re.search(r"^WatchdogSec=(\d+)s$", unit.read(), re.M)[1]) / 2

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="watchdog.")
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.inbox.close)
        self.inbox.bind(self.folder + "/notify")
        self.inbox.setblocking(False)
        before = ["env", f"NOTIFY_SOCKET={self.folder}/notify", "WATCHDOG_USEC=500000"]
        self.daemon = Daemon(nvme=False, before=before, **{"limits.connections": "4096", "events.memory": "16MiB"})
        self.addCleanup(self.daemon.stop)
        self.heard = 0

    def hear(self):
        try:
            while True:
                self.heard += self.inbox.recv(4096) == b"WATCHDOG=1"
        except BlockingIOError:
            pass

    def request(self, ns, number):
        """Of connection `number`, over and over."""
        some = os.urandom(16 * 16384)
        return [["lookup", {"ns": ns, "keys": some}], ["lookup", {"ns": ns, "keys": some, "each": True}],
                ["namespace.open", dict(DEMO, model=f"dear-{number}", parts=256)], ["verify", {"ns": ns, "limit": 4096}],
                ["evict", {"ns": ns, "keys": some}], ["prefetch", {"ns": ns, "keys": some}], ["stats", {}],
                ["ls", {"ns": ns, "limit": 4096}], ["events.list", {"ns": ns, "limit": 4096}], ["hello", {"version_min": 1, "version_max": 1}],
                ][number % 10]

    def connect(self, number):
        client = Client(self.daemon, uid=1001 + number % 10)
        ns = client.open(DEMO)
        client.socket.setblocking(False)
        client.data = memoryview(frame([0, 1, *self.request(ns, number)]))
        client.at, client.rest, client.number = 0, 40 if number % 20 == 7 else -1, number
        return client

    def send(self, client):
        """True: it ends here, and another one comes in its place."""
        client.at += client.socket.send(client.data[client.at:])
        if client.at == len(client.data):
            client.at = 0
            client.rest -= 1
        return client.rest == 0

    def turn(self, selector):
        for key, what in selector.select(0.1):
            client, over = key.data, False
            try:
                if what & selectors.EVENT_READ and client.number % 3:  # who does not, reads nothing
                    over = not client.socket.recv(1 << 20)
                if what & selectors.EVENT_WRITE:
                    over = self.send(client) or over
            except BlockingIOError:
                pass
            except OSError:
                over = True
            if over:
                selector.unregister(client.socket)
                client.close()
                self.daemon.clients.remove(client)

    def test_a_thousand_that_try_do_not_trip_it(self):
        selector = selectors.DefaultSelector()
        self.addCleanup(selector.close)
        for number in range(self.connections):
            client = self.connect(number)
            self.hear()  # a daemon that nobody hears waits
            selector.register(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
        for _ in range(self.pings):
            client = Client(self.daemon, uid=1020)
            lingering = Lingering(self)
            self.stopped(lambda: lingering.give(client.socket, b"x"))
            client.close()
            self.daemon.clients.remove(client)
            self.hear()
            self.heard, deadline = 0, time.monotonic() + self.late_s
            while not self.heard:
                self.assertIsNone(self.daemon.process.poll())
                self.assertLess(time.monotonic(), deadline, "the watchdog starves")
                self.turn(selector)
                self.hear()
        self.assertGreater(len(selector.get_map()), self.connections / 2)


if __name__ == "__main__":
    unittest.main()
