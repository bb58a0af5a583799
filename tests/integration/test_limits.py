#!/usr/bin/python3
"""One uid or tenant floods what clients share. Others still get their work done, operators get in,
and everything is returned."""

import os
import select
import threading
import unittest

from second_client import BUSY, DEMO, OK, Case, Client, Closed, Refused, Region, keys, memfd
from mapping_case import Reader

FLOOD, OTHER, FIRST, SECOND, FEW = 2001, 2002, 2003, 2004, 2005  # uids; two of them are of one tenant
TENANT = "team"
HOLDS = ("connections", "requests_active", "regions", "leases", "request_bytes", "lookup_tables")


@unittest.skipUnless(os.geteuid() == 0, "several uids need root")
class Flood(Case):
    options = {"nvme": False, "limits.connections": "64", "limits.frame_memory": "8MiB", "limits.namespaces": "64",
               "request.unread": "500ms", "tenants": f"{TENANT} uid:{FIRST} uid:{SECOND}",
               "tenant_settings": f"uid:{FEW} connections=2 memory=1MiB",
               "before": ("prlimit", "--nofile=512")}

    def setUp(self):
        self.until(lambda: self.holds()["connections"] == 1, "the end of an earlier test's connections")
        self.before = self.holds()

    def tearDown(self):
        self.doCleanups()
        self.until(lambda: self.holds() == self.before, lambda: f"the return of all that the flood took, {self.holds()}, to {self.before}")

    def holds(self):
        client = Client(self.daemon)
        metrics = client.metrics()
        client.close()
        return {name: metrics[name] for name in HOLDS}

    def flood(self, uid, begin, most=2000):
        """Begins connections of that uid until one is refused. Returns the connections, and the
        refusal's sentence."""
        clients = []
        for _ in range(most):
            try:
                client = self.client(uid=uid, hello=False)
                begin(client)
            except Refused as e:
                return clients, e.args[2]
            except (Closed, BrokenPipeError):
                continue  # the sentence was lost, as there was a request after it
            clients.append(client)
        self.fail(f"nothing stopped uid {uid}")

    def hello(self, client):
        client.call("hello", version_min=1, version_max=3, client="flood")

    def works(self, uid=OTHER):
        """Another client stores and finds a block."""
        client = self.client(uid=uid)
        ns = client.open(dict(DEMO, model=f"{self.id()} {uid}"))
        region = Region(client, ns, DEMO, 2)
        self.assertIn(region.dump(["a"], [0])[0], (OK, 4))
        found = client.call("lookup", ns=ns, keys=keys("a"), lease_ms=1000)
        self.assertEqual(found["hits"], 1)
        client.call("release", lease=found["lease"])
        client.close()

    def silent(self, client):
        """Connects; the daemon has looked at it when this returns."""
        self.connects += 1

        def looked():
            metrics = self.operator.metrics()
            return metrics["connections_accepted"] + metrics["connections_refused"] >= self.connects
        self.until(looked, "the daemon's look at a connection")
        if select.select([client.socket], [], [], 0)[0]:
            client.next()

    def test_silent_connections(self):
        self.operator = self.client()
        metrics = self.operator.metrics()
        self.connects = metrics["connections_accepted"] + metrics["connections_refused"]
        clients, why = self.flood(FLOOD, self.silent)
        self.assertLess(len(clients), 16)
        self.assertRegex(why, r'tenant "uid:2001" has \d+ of 16 connections that have not said hello')
        self.works()
        self.works(uid=None)

    def test_connections(self):
        clients, why = self.flood(FLOOD, self.hello)
        self.assertRegex(why, r'tenant "uid:2001" has \d+ of 64 connections.*limits\.connections')
        self.assertIn(len(clients), range(40, 48))
        self.works()
        for uid in (FIRST, SECOND, 3000, 3001, 3002, 3003):
            self.flood(uid, self.hello)
        self.works(uid=None)  # an operator gets in

    def test_connections_of_a_tenant_with_many_uids(self):
        first, why = self.flood(FIRST, self.hello)
        self.assertRegex(why, r'uid 2003 of tenant "team" has')
        second, _ = self.flood(SECOND, self.hello)
        self.assertLess(len(first) + len(second), 48)
        self.assertGreater(len(second), 4)
        self.works()

    def test_who_connects_again_and_again(self):
        for _ in range(1200):
            client = self.client(uid=FLOOD, hello=False)
            client.close()
        self.works()
        self.works(uid=None)

    def test_a_tenants_setting(self):
        clients, why = self.flood(FEW, self.hello)
        self.assertEqual(len(clients), 2)
        self.assertIn('its setting "connections" (ucmctl tenant set)', why)

    def test_settings_that_change_live(self):
        operator, tenant = self.client(), f"uid:{OTHER}"
        operator.call("tenant.set", tenant=tenant, settings="connections=3 leased=64KiB")
        clients, why = self.flood(OTHER, self.hello)
        self.assertEqual(len(clients), 3)
        self.assertIn('its setting "connections"', why)
        client, identity = clients[0], dict(DEMO, model=self.id())
        ns = client.open(identity)
        names = [str(i) for i in range(16)]
        self.assertEqual(set(Region(client, ns, identity, 16).dump(names, range(16))), {OK})  # 8 KiB each

        def lease(part):
            client.call("lookup", ns=ns, keys=keys(*part), lease_ms=60000)
        lease(names[:8])
        self.assertIn('its setting "leased"', self.refused(BUSY, lease, names[8:]).args[2])
        operator.call("tenant.reset", tenant=tenant)
        lease(names[8:])
        self.assertGreater(len(self.flood(OTHER, self.hello)[0]), 20)

    def test_frames_that_do_not_end(self):
        def begin(client):
            self.hello(client)
            client.send((1 << 20).to_bytes(4, "big") + bytes((1 << 20) - 64))
        clients = []
        for _ in range(20):
            client = self.client(uid=FLOOD)
            clients.append(client)
            try:
                begin(client)
            except Closed:
                pass
        self.works()

        def frame_bytes():
            return self.client().metrics()["frame_bytes"]
        self.until(lambda: frame_bytes() < 7 << 20)

    def test_answers_that_nobody_reads(self):
        """Each connection sends requests until the daemon has dropped it. One that stops earlier,
        with less than 1 MiB unread, may stay."""
        missing, ended = bytes(16 * 16384), []
        clients = [self.client(uid=FLOOD) for _ in range(8)]
        numbers = [client.open(dict(DEMO, model=self.id())) for client in clients]

        def flood(client, ns):
            try:
                while True:
                    client.begin("lookup", ns=ns, keys=missing, per_key=True)
            except Exception as e:  # pylint: disable=broad-except
                ended.append(type(e))
        floods = [threading.Thread(target=flood, args=pair) for pair in zip(clients, numbers)]
        for thread in floods:
            thread.start()
        try:
            self.works()
        finally:
            for thread in floods:
                thread.join()
        self.assertEqual(ended, [Closed] * 8)
        self.until(lambda: self.holds()["connections"] == 1,
                   "the end of connections that read nothing")

    def test_descriptors(self):
        self.operator, fd = self.client(), os.open("/dev/null", os.O_RDONLY)
        self.addCleanup(os.close, fd)
        clients = [self.client(uid=FLOOD) for _ in range(12)]
        before = self.operator.metrics()

        def dropped():
            return self.operator.metrics()["connections_dropped"] - before["connections_dropped"]

        def looked():  # each is dropped, or has 60 in the daemon
            taken = self.operator.metrics()["client_descriptors"] - before["client_descriptors"] + dropped()
            return taken == 60 * (12 - dropped())
        for client in clients:  # each begins a frame
            client.send(b"\0", [fd] * 60)
        self.until(looked, "the daemon's look at all descriptors")
        self.assertGreater(dropped(), 5)
        for client in clients:
            if select.select([client.socket], [], [], 0)[0]:
                with self.assertRaises(Refused) as caught:
                    client.next()
                self.assertIn("descriptors", caught.exception.args[2])
        self.works()
        self.assertLess(self.operator.metrics()["client_descriptors"], 384)

    def test_namespaces(self):
        opened, sentence = 0, ""
        for _ in range(8):
            client = self.client(uid=FLOOD)
            try:
                for _ in range(16):
                    client.open(dict(DEMO, model=f"{self.id()} {opened}"))
                    opened += 1
            except Refused as e:
                self.assertEqual(e.code, BUSY)
                sentence = e.args[2]
                break
        self.assertRegex(sentence, r'tenant "uid:2001" has \d+ of 64 namespaces.*limits\.namespaces')
        self.assertLess(opened, 48)
        self.works()

    def test_tables_of_lookup_table(self):
        opened, refused = 0, None
        for _ in range(3):
            client = Reader(self.daemon, uid=FLOOD)
            self.addCleanup(client.close)
            for _ in range(16):
                try:
                    client.call("lookup_table.open", ns=client.open(dict(DEMO, model=f"{self.id()} {opened}")))
                except Refused as e:
                    refused = refused or e
                    continue
                opened += 1
                for fd in client.take_fds():
                    os.close(fd)
        client = Reader(self.daemon, uid=OTHER)
        self.addCleanup(client.close)
        client.call("lookup_table.open", ns=client.open(dict(DEMO, model=self.id())))
        for fd in client.take_fds():
            os.close(fd)
        self.assertGreater(opened, 20)

    def test_memory_of_others_that_is_mapped(self):
        client = self.client(uid=FLOOD)
        ns = client.open(dict(DEMO, model=self.id()))
        fd, end = memfd(0), 1 << 45
        self.addCleanup(os.close, fd)
        os.pwrite(fd, bytes(12288), end - 12288)  # nothing is before that

        def register():
            client.call("region.register", [fd], ns=ns, part=0, blocks=1, device="cpu",
                        handles=[{"kind": 0, "offset": end - 12288, "bytes": 12288}],
                        planes=[{"layer": i, "offset": i * 4096, "stride": 8192, "block_bytes": 4096} for i in range(2)])
        register()
        refused = self.refused(BUSY, register)
        self.assertIn("bytes of workers' memory that the daemon maps", refused.args[2])
        self.works()

    def test_page_tables_of_others_memory(self):
        """One file is registered again and again. The daemon has page tables for each registration.
        """
        operator, client = self.client(), self.client(uid=FLOOD)
        ns = client.open(dict(DEMO, model=self.id()))
        handles, most = 32, 60  # fewer regions than one connection may have
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 8 // handles // most
        if size > 256 << 20:
            self.skipTest("this host has so much memory that a file of which a few registrations take too much is large")
        fd = memfd(size)
        self.addCleanup(os.close, fd)
        planes = [{"layer": i, "offset": i * 4096, "stride": 8192, "block_bytes": 4096} for i in range(2)]

        def register():
            # Waits until the descriptors of the registration before have been closed.
            self.until(lambda: operator.metrics()["client_descriptors"] < 2 * handles, "the close of descriptors")
            fds = [os.dup(fd) for _ in range(handles)]
            try:
                client.call("region.register", fds, ns=ns, part=0, blocks=1, device="cpu",
                            handles=[{"kind": 0, "bytes": size, "fd": i} for i in range(handles)], planes=planes)
            finally:
                for copy in fds:
                    os.close(copy)
        with self.assertRaises(Refused) as caught:
            for _ in range(most + 1):
                register()
        self.assertEqual(caught.exception.code, BUSY)
        self.assertIn("bytes of workers' host memory", caught.exception.args[2])
        self.works()

    def test_memory_of_leases(self):
        client = self.client(uid=FEW)
        ns = client.open(dict(DEMO, model=self.id()))
        region = Region(client, ns, DEMO, 1)
        region.dump(["a"], [0])
        with self.assertRaises(Refused) as caught:
            for _ in range(4096):
                client.call("lookup", ns=ns, keys=keys(*["a"] * 4000), lease_ms=60000)
        self.assertEqual(caught.exception.code, BUSY)
        self.assertIn('its setting "memory"', caught.exception.args[2])


@unittest.skipUnless(os.geteuid() == 0, "several uids need root")
class MakesWay(Case):
    options = {"nvme": False, "limits.frame_memory": "16MiB"}

    def behind(self, uid):
        """A connection that reads none of its answers, of which the daemon has 2 MiB. Returns it,
        and the requests' numbers."""
        client, before, n = self.client(uid=uid), self.operator.metrics()["frame_bytes"], 400
        asked = [client.begin("stats", _more=i < n - 1) for i in range(n)]
        self.until(lambda: self.operator.metrics()["frame_bytes"] - before > 2000000, "answers that wait to be read")
        return client, asked

    def test_ones_own_make_way_and_others_stay(self):
        self.operator = self.client()
        other, asked = self.behind(OTHER)
        own = [self.behind(FLOOD) for _ in range(5)]
        client = self.client(uid=FLOOD)
        ns = client.open(dict(DEMO, model=self.id(), key_bytes=32))
        self.assertEqual(self.operator.metrics()["connections_dropped"], 0)
        self.assertEqual(client.call("lookup", ns=ns, keys=bytes(32 * 16384))["hits"], 0)
        self.assertEqual(self.operator.metrics()["connections_dropped"], 1)
        for msgid in asked:
            self.assertIn("metrics", other.wait(msgid))
        ended = 0
        for left, numbers in own:
            try:
                for msgid in numbers:
                    left.wait(msgid)
            except Closed:
                ended += 1
        self.assertEqual(ended, 1)


if __name__ == "__main__":
    unittest.main()
