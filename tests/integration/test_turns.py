#!/usr/bin/python3
"""The order of service if clients send more than the daemon's event loop can answer. Connections
and tenants take turns, and nobody is charged for a pause of the daemon."""

import functools
import os
import re
import selectors
import shutil
import socket
import tempfile
import threading
import time
import unittest

import msgpack
from second_client import DEADLINE, DEMO, TIMEOUT_S, TOP, Case, Client, Daemon, Refused, Region, frame, keys
from test_held_up import Lingering, Stopping


@functools.cache
def tiny(n):
    return b"".join(frame([0, i, "lookup", {"ns": 1, "keys": b""}]) for i in range(n))


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class Turns(Stopping, Case):
    """Connections and tenants take turns. That is counted in requests, by how many the daemon has
    received when it answers."""

    def setUp(self):
        self.operator = self.client()

    def received(self):
        return self.operator.metrics()["requests_total"]

    def fill(self, client, data):
        """As much of it as the socket takes."""
        client.socket.setblocking(False)
        data, sent = memoryview(data), 0
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
        """How many of a flood's requests the daemon receives before one that came after all of
        them; and how many there were. data: frames of that size."""
        flood = [self.client(uid=uids[i % len(uids)]) for i in range(connections)]
        data, queued = data or tiny(20000), []
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
        """The daemon stands still while it serves one of two tenants. That tenant does not wait longer afterwards."""
        data = tiny(20000)
        size = len(data) // 20000
        for _ in range(4):  # in half of these it serves the other one
            busy, one = [self.client(uid=1002), self.client(uid=1001)], self.client(uid=1002)
            # More than a fast machine serves in the longest pause that is charged.
            flood, before, sent = [self.client(uid=1001) for _ in range(24)], self.received(), []
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
            self.until(lambda: self.operator.metrics()["connections"] == 1, "the floods' end")

    def turns(self):
        histograms = self.operator.call("stats")["histograms"]
        return next(h["count"] for h in histograms if h["name"] == "loop_iteration")

    def sleeps(self):
        """Whether the event loop hardly runs for a while."""
        before = self.turns()
        time.sleep(0.3)
        return self.turns() - before < 300

    def test_the_end_of_a_peer_that_reads_nothing_is_told_once(self):
        """The peer leaves answers unread, so the daemon leaves its last requests in the socket."""
        client = self.client(uid=1001)
        data = b"".join(frame([0, i, "stats", {}]) for i in range(20000))
        self.until(lambda: self.fill(client, data) < len(data) and self.sleeps(), "its socket is full")
        client.socket.shutdown(socket.SHUT_WR)
        self.until(self.sleeps, "the event loop sleeps")
        client.close()
        self.until(lambda: self.operator.metrics()["connections"] == 1, "its end")

    def test_a_request_passes_the_floods_of_several_tenants(self):
        """Each tenant has a turn before the request."""
        ahead, queued = self.ahead(range(1001, 1005), 20)
        self.assertLess(ahead, queued / 3)

    def test_a_request_passes_a_flood_of_new_namespaces(self):
        """Each request is expensive, so a turn has few of them. Most are refused, as there are too
        many."""
        frames = [frame([0, 10000 + i, "namespace.open", dict(DEMO, model=f"{i:05}", parts=256, layers=[1])]) for i in range(10000)]
        self.assertEqual(len(set(map(len, frames))), 1)
        ahead, queued = self.ahead([1001], 20, b"".join(frames), len(frames[0]))
        self.assertGreater(queued, 4000)
        self.assertLess(ahead, queued / 8)

    def test_connections_of_a_tenant_take_turns(self):
        """A request of the flooding tenant's other connection waits for one turn of each, not for
        all that they have sent."""
        flood, one, own = self.client(uid=1001), self.client(uid=1001), self.client(uid=1001)
        data, queued = tiny(20000), []

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
        sender = threading.Thread(target=client.socket.sendall, args=(tiny(n),))
        sender.start()
        self.assertEqual(self.answered(client, n), list(range(n)))
        sender.join()

    def test_frames_before_a_disconnect_are_all_handled(self):
        """Peers that are gone when the daemon looks."""
        clients, data = [self.client(uid=1001) for _ in range(8)], tiny(3000)
        before = self.received()

        def act():
            for each in clients:
                self.assertEqual(self.fill(each, data), len(data))
                each.close()
        self.stopped(act)
        asked = 0
        while self.operator.metrics()["connections"] > 1:
            asked += 1
        self.assertEqual(self.received() - before - asked, 3000 * len(clients) + 2)

    def test_a_frame_in_pieces_alongside_a_flood(self):
        client, flood = self.client(uid=1000), self.client(uid=1001)
        whole = frame([0, 5, "hello", {"version_min": 1, "version_max": 1, "client": "pieces"}])
        self.fill(flood, tiny(20000))
        for byte in range(len(whole)):
            client.send(whole[byte:byte + 1])
        self.assertEqual(self.answered(client, 1), [5])

    def test_who_reads_late_gets_all_answers_in_order(self):
        """More answers than the daemon keeps. Meanwhile others are served."""
        client, n = self.client(), 2000
        sender = threading.Thread(target=client.socket.sendall, args=(b"".join(frame([0, i, "stats", {}]) for i in range(n)),))
        sender.start()
        for _ in range(20):
            self.received()
        self.assertEqual(self.answered(client, n), list(range(n)))
        sender.join()


@unittest.skipUnless(os.geteuid() == 0, "being several users needs root")
class AtOnce(Stopping, Case):
    """Work that comes due for many connections of one tenant in one moment is done in that tenant's
    turns."""
    connections, blocks, handshake_s = 200, 16384, 3
    options = {"nvme": False, "arena.size": "64MiB", "request.handshake": f"{handshake_s}s", "events.memory": "64MiB"}

    def setUp(self):
        self.operator = self.client()

    def metrics(self):
        return self.operator.metrics()

    def ahead(self, act):
        """The daemon's counts when it answers a request. The request came after all that `act` does
        while the daemon stands still."""
        def acts():
            act()
            self.msgid = self.operator.begin("stats")
        self.stopped(acts)
        return self.operator.wait(self.msgid)["metrics"]

    def test_frames_whose_time_is_over(self):
        """The frames' last bytes came in time, but the daemon did not look. Each is answered."""
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
        """A tenant's readers all get their answers at one moment, and others' requests are served
        in between."""
        identity = dict(DEMO, model="events", layers=[1], layer_bytes=1024)
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
                each.asked = [each.begin("stats", _more=more) for more in [True] * 49 + [False]]
        self.stopped(act)
        seen = [each.wait(msgid)["metrics"]["requests_active"] for each in others for msgid in each.asked]
        self.assertGreater(sum(0.1 * active < n < 0.9 * active for n in seen), 5)
        self.assertTrue(readers[0].wait(waits[0])["events"])
        for each, wait in zip(readers[1:], waits[1:]):
            # wait() would compare each event with the page.
            *head, result = msgpack.unpackb(each.receive(), raw=False)
            self.assertEqual(head, [1, wait, None])
            self.assertTrue(result["events"])

    def test_ends_of_connections_with_leases(self):
        identity = dict(DEMO, layers=[1], layer_bytes=1024)
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
    """The test plays systemd and listens to the daemon's watchdog. Meanwhile 1,000 connections of
    ten uids send expensive requests, read nothing or little, come and go, and give descriptors that
    hang. The daemon reports after half of the time that systemd allows, so it may be late by the
    other half. Here it reports every quarter of a second, so six reports come soon."""
    connections, pings, some = 1000, 6, os.urandom(16 * 16384)
    with open(os.path.join(TOP, "systemd/ucmd.service"), encoding="utf-8") as unit:
        late_s = int(re.search(r"^WatchdogSec=(\d+)s$", unit.read(), re.M)[1]) / 2

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="watchdog.")
        self.addCleanup(shutil.rmtree, self.directory, True)
        self.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.inbox.close)
        self.inbox.bind(self.directory + "/notify")
        self.inbox.setblocking(False)
        before = ["env", f"NOTIFY_SOCKET={self.directory}/notify", "WATCHDOG_USEC=500000"]
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
        """Sends on connection `number`, over and over."""
        some = self.some
        return [["lookup", {"ns": ns, "keys": some}], ["lookup", {"ns": ns, "keys": some, "per_key": True}],
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
        """True: the connection ends here, and another one replaces it."""
        client.at += client.socket.send(client.data[client.at:])
        if client.at == len(client.data):
            client.at = 0
            client.rest -= 1
        return client.rest == 0

    def turn(self, selector):
        for key, what in selector.select(0.1):
            client, over = key.data, False
            try:
                if what & selectors.EVENT_READ and client.number % 3:  # else it reads nothing
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
            self.hear()  # a daemon that nobody listens to waits
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
