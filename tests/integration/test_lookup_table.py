#!/usr/bin/python3
"""Lookup tables alongside lookups: a reader that follows docs/design/mappings.md, and the client
library. Through the tiers, growth, a daemon that ends or is killed, and clients that try to write.
"""

import contextlib
import fcntl
import faulthandler
import mmap
import os
import struct
import tempfile
import threading
import time
import unittest

import client_paths  # noqa: F401  sets the paths of the others
from second_client import (BUSY, DEMO, DENIED, INVALID, NOT_FOUND, OK, OTHER_UID, Case, Daemon, OwnDaemons, Refused, Region, keys, u32,
                           until)
from mapping_case import Reader
from ucmclient import Client as Library, Identity, Plane, SharedMemory, UcmError

SUITE_TIMEOUT_S = 240
FILLING, LIVE, SUPERSEDED, ENDED = range(4)
MASK = (1 << 64) - 1


def xxh3(key, seed):
    """XXH3-64 of 16 bytes, by the definition of xxHash 0.8."""
    low, high = struct.unpack("<QQ", key)
    low ^= (0x6782737BEA4239B9 + seed) & MASK
    high ^= (0xAF56BC3B0996523A - seed) & MASK
    product = low * high
    h = 16 + int.from_bytes(low.to_bytes(8, "little"), "big") + high + ((product ^ product >> 64) & MASK) & MASK
    h = (h ^ h >> 37) * 0x165667919E3779F9 & MASK
    return h ^ h >> 32


class Table:
    """A table as a reader without the library uses it."""

    def __init__(self, client, ns):
        answer = client.call("lookup_table.open", ns=ns)
        self.shared = answer.get("shared", False)
        (self.fd,) = client.take_fds()
        assert os.fstat(self.fd).st_size == answer["bytes"]
        assert fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        self.memory = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
        magic, version, self.key_bytes, self.buckets, self.seed = struct.unpack("<8sIIQQ", self.memory[:32])
        assert magic == b"UCMLTAB1" and version == 2 and answer["bytes"] == 4096 + 64 * self.buckets

    def close(self):
        self.memory.close()
        os.close(self.fd)

    def header(self):
        """state, left_out, beat"""
        return struct.unpack("<QQQ", self.memory[32:56])

    def wait(self, state):
        until(lambda: self.header()[0] == state, self.header)
        return self

    def bucket(self, number):
        at = 4096 + 64 * (number % self.buckets)
        return struct.unpack("<8Q", self.memory[at:at + 64])

    def find(self, key):
        """The entry, or 0."""
        h = xxh3(key, self.seed)
        for probe in range(1 + (self.bucket(h)[0] >> 60)):
            tags, *entries = self.bucket(h + probe)
            for i, entry in enumerate(entries):
                if tags >> 8 * i & 255 == 128 | h >> 57 and entry >> 16 == h >> 16:
                    return entry
        return 0

    def tiers(self, *names):
        return [self.find(keys(name)) & 3 for name in names]


class ByThePage(Case):
    def open(self, blocks=64):
        identity = dict(DEMO, model=self.id())
        client = Reader(self.daemon)
        ns = client.open(identity)
        return client, ns, Region(client, ns, identity, blocks)

    def test_what_a_lookup_finds(self):
        client, ns, region = self.open()
        self.assertEqual(region.dump(range(8), range(8)), [0] * 8)
        table = Table(client, ns).wait(LIVE)
        self.addCleanup(table.close)
        self.assertFalse(table.shared)
        self.assertEqual(table.tiers(*range(10)), [1] * 8 + [0, 0])
        self.assertEqual(table.tiers(*range(10)), client.tiers(ns, *range(10)))
        region.dump([8], [8])
        was = table.find(keys(8))
        self.assertEqual(was & 3, 1)
        client.call("evict", ns=ns, keys=keys(3, 8))
        self.assertEqual(table.tiers(*range(10)), [1, 1, 1, 0, 1, 1, 1, 1, 0, 0])
        self.until(lambda: region.dump([8], [8]) == [OK], "the end of its write to NVMe")
        now = table.find(keys(8))
        self.assertEqual(now & 3, 1)
        self.assertNotEqual(now >> 2 & 0x3FFF, was >> 2 & 0x3FFF, "it came back")
        self.assertEqual(table.header()[1], 0)
        lease = client.call("lookup", ns=ns, keys=keys(0), lease_ms=10000)["lease"]
        client.call("evict", ns=ns, keys=keys(0))
        self.assertEqual(table.tiers(0), [0], "evicted by name, though leased")
        client.call("release", lease=lease)

    def test_tables_that_a_client_keeps_are_counted(self):
        client, ns, region = self.open()
        kept, before = [], client.metrics()["lookup_table_bytes"]

        def keep():
            other = Reader(self.daemon, uid=OTHER_UID)  # limits are not for operators
            other.call("lookup_table.open", ns=other.open(dict(DEMO, model=self.id() + "kept")))
            kept.extend(other.take_fds())
            other.close()
            time.sleep(0.002)  # a uid may connect 1,000 times a second
        with self.assertRaises(Refused) as refused:
            for _ in range(4000):
                keep()
        self.assertEqual(refused.exception.code, BUSY)
        self.assertIn("tables that ended", str(refused.exception))
        self.assertGreater(len(kept), 100)
        self.assertLessEqual(client.metrics()["lookup_table_bytes"], 68 << 20)
        for fd in kept:
            os.close(fd)
        self.until(lambda: client.metrics()["lookup_table_bytes"] <= before, "the end of all tables")
        keep()
        os.close(kept[-1])

    def test_growth(self):
        client, ns, region = self.open(1000)
        first = Table(client, ns).wait(LIVE)
        self.addCleanup(first.close)
        for at in range(0, 1000, 50):
            region.dump(range(at, at + 50), range(at, at + 50))
        first.wait(SUPERSEDED)
        table = Table(client, ns).wait(LIVE)
        self.addCleanup(table.close)
        self.assertGreater(table.buckets, first.buckets)
        self.assertNotEqual(table.seed, first.seed)
        while table.header()[0] == SUPERSEDED:
            table.close()
            table = Table(client, ns).wait(LIVE)
        self.assertEqual([tier > 0 for tier in table.tiers(*range(1100))], [True] * 1000 + [False] * 100)

    def test_it_lives_as_long_as_somebody_asked(self):
        client, ns, region = self.open()
        table = Table(client, ns).wait(LIVE)
        self.addCleanup(table.close)
        other = Reader(self.daemon)
        again = Table(other, other.open(dict(DEMO, model=self.id()))).wait(LIVE)
        self.addCleanup(again.close)
        client.close()
        region = Region(other, other.open(dict(DEMO, model=self.id())), DEMO, 4)
        region.dump([1], [1])
        self.assertEqual(table.tiers(1), [1])
        self.assertEqual(table.header()[0], LIVE)
        other.close()
        table.wait(ENDED)
        again.wait(ENDED)

    def test_who_gets_it(self):
        client, ns, region = self.open()
        self.refused(NOT_FOUND, client.call, "lookup_table.open", ns=ns + 1000)
        if os.geteuid() != 0:
            self.skipTest("needs root to be another user")
        other = Reader(self.daemon, uid=OTHER_UID)
        self.refused(NOT_FOUND, other.call, "lookup_table.open", ns=ns)
        theirs = other.open(dict(DEMO, model=self.id()))
        other.call("lookup_table.open", ns=theirs)
        self.refused(NOT_FOUND, Reader(self.daemon, uid=OTHER_UID).call, "lookup_table.open", ns=theirs)
        # The caller is an operator, which may use the namespace's number.
        self.refused(DENIED, Reader(self.daemon).call, "lookup_table.open", ns=theirs)
        for fd in other.take_fds():
            os.close(fd)

    def test_nobody_writes(self):
        client, ns, region = self.open()
        table = Table(client, ns).wait(LIVE)
        self.addCleanup(table.close)
        fds = [table.fd]
        try:  # its mode does not stop root
            fds.append(os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR))
        except PermissionError:
            pass
        for fd in fds:
            with self.assertRaises((PermissionError, OSError)):
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 1 << 30),
                           lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)):
                with self.assertRaises(OSError):
                    change()
        for fd in fds[1:]:
            os.close(fd)

    def test_many_opens(self):
        """Each answer brings a descriptor, but there is only one table."""
        client, ns, region = self.open()
        for _ in range(200):
            Table(client, ns).close()


class Prefix(Case):
    """load_prefix: a lookup, its lease and a load in one."""

    def test_up_to_the_first_gap(self):
        client, ns, region = self.worker(blocks=32)
        want = [region.fill(block) for block in range(8)]
        self.assertEqual(region.dump(range(8), range(8)), [0] * 8)
        client.call("evict", ns=ns, keys=keys(5))
        for block in range(16, 32):
            region.fill(block)
        behind = [region.bytes(block) for block in range(21, 26)]
        before = client.metrics()
        answer = region.call("load_prefix", range(10), range(16, 26))
        self.assertEqual(list(answer["status"]), [0] * 5 + [1] * 5)
        self.assertEqual(answer["bytes"], 5 * region.size)
        self.assertEqual([region.bytes(16 + i) for i in range(5)], want[:5])
        self.assertEqual([region.bytes(block) for block in range(21, 26)], behind,
                         "after the gap nothing moved")
        after = client.metrics()
        changed = {name: after[name] - before[name] for name in ("lookups", "lookup_keys", "lookup_hits", "leases", "load_blocks_missed")}
        self.assertEqual(changed, {"lookups": 1, "lookup_keys": 10, "lookup_hits": 5, "leases": 0, "load_blocks_missed": 0})
        self.assertEqual(list(region.call("load_prefix", range(50, 53), range(3))["status"]), [1] * 3)
        self.assertEqual(list(region.call("load_prefix", range(5), range(5), layer=1, progress_interval=1)["status"]), [0] * 5)

    def test_what_was_evicted_by_name_is_not_found_though_leased(self):
        client, ns, region = self.worker(blocks=16)
        region.dump(range(4), range(4))
        lease = client.call("lookup", ns=ns, keys=keys(*range(4)), lease_ms=10000)["lease"]
        client.call("evict", ns=ns, keys=keys(2))
        self.assertEqual(list(region.call("load_prefix", range(4), range(8, 12))["status"]), [0, 0, 1, 1])
        self.assertEqual(region.load(range(4), range(8, 12), lease=lease), [0, 0, 1, 0], "a load of what was leased")

    def test_refusals(self):
        client, ns, region = self.worker()
        for bad in ({"blocks": u32(0, 0)}, {"blocks": u32(0)}, {"blocks": u32(0, 99)}, {"layer": 9}, {"lease": 1}):
            self.refused(INVALID, client.call, "load_prefix",
                         **{"region": region.number, "keys": keys(1, 2), "blocks": u32(0, 1), **bad})

    def test_of_the_shared_tier(self):
        with tempfile.TemporaryDirectory() as root:
            os.chmod(root, 0o777)
            first = Daemon(**{"shared.roots": root})
            client = Reader(first)
            ns = client.open(dict(DEMO, model=self.id()))
            region = Region(client, ns, DEMO, 8)
            want = [region.fill(block) for block in range(8)]
            region.dump(range(8), range(8))
            self.until(lambda: client.metrics()["shared_writes"] >= 8)
            self.assertTrue(Table(client, ns).wait(LIVE).shared)
            first.stop()
            other = Daemon(nvme=False, **{"shared.roots": root, "shared.lookup_timeout": "10s", "shared.timeout": "30s"})
            try:
                client = Reader(other)
                region = Region(client, client.open(dict(DEMO, model=self.id())), DEMO, 16)
                answer = region.call("load_prefix", range(12), range(12), wait_ms=60000)
                self.assertEqual(list(answer["status"]), [0] * 8 + [1] * 4)
                self.assertEqual([region.bytes(block) for block in range(8)], want)
            finally:
                other.stop()


class Descriptors(OwnDaemons, Case):
    def test_tables_leave_descriptors_for_others(self):
        daemon = Daemon(nvme=False, directory=self.directory, before=("prlimit", "--nofile=128"))
        self.addCleanup(daemon.stop)
        client = Reader(daemon)
        for i in range(32):
            Table(client, client.open(dict(DEMO, model=str(i)))).close()
        self.refused(BUSY, client.call, "lookup_table.open", ns=client.open(dict(DEMO, model="another")))
        others = [Reader(daemon) for _ in range(20)]
        Table(others[-1], others[-1].open(dict(DEMO, model="7"))).close()


class ByLibrary(OwnDaemons, Case):
    BLOCK = 4096

    def start(self):
        daemon = Daemon(nvme=False, directory=self.directory)
        self.addCleanup(daemon.stop)
        return daemon

    def worker(self, daemon, blocks=64):
        client = Library(socket=daemon.socket, name="lookup table")
        self.addCleanup(client.close)
        ns = client.namespace(Identity(self.id(), "f16", "test/1", 16, self.BLOCK, layers=(1,)))
        shared = SharedMemory(self.BLOCK * blocks)
        region = ns.register([shared.memory()], [Plane(0, 0, self.BLOCK, self.BLOCK, 0)], blocks=blocks)
        return client, ns, region

    @staticmethod
    def names(*numbers):
        return keys(*numbers, size=32)

    @staticmethod
    def advice(ns, names, look=None):
        """Waits for the table. It is of no use while it is filled, or if the daemon did not run for
        5 s."""
        def usable():
            advice = (look or ns.lookup_table_read)(names)
            if advice is None:
                ns.lookup_table_open()
            return advice
        return until(usable, "a lookup table")

    def open(self, ns):
        return self.advice(ns, self.names(0))

    def test_lookup_table(self):
        client, ns, region = self.worker(self.start())
        self.assertIsNone(ns.lookup_table_read(self.names(0)), "not opened yet")
        region.dump(self.names(*range(10)), range(10)).wait()
        self.open(ns)
        advice = self.advice(ns, self.names(*range(20)))
        self.assertEqual((advice.blocks, advice.in_dram, advice.on_shared), (10, 10, 0))
        self.assertTrue(advice.certain)
        ns.evict(self.names(4))
        self.assertEqual(self.advice(ns, self.names(*range(20))).blocks, 4)
        found, advice = self.advice(ns, self.names(*range(12)), ns.lookup_table_read_each)
        self.assertEqual(found, bytes([1] * 4 + [0] + [1] * 5 + [0, 0]))
        self.assertEqual(advice.blocks, 9)

    def test_an_encoded_namespace_has_the_blocks_of_both_forms(self):
        client = Library(socket=self.start().socket, name="encoded")
        self.addCleanup(client.close)
        rows = (16, 2, 64)
        layer = 2 * 16 * 2 * 64 * 2
        base = client.namespace(Identity(self.id(), "bf16", "test/1", 16, layer, layers=(1,)))
        ns = base.encoded("fp8", k=rows, v=rows)
        shared = SharedMemory(layer * 8)
        planes = [Plane(0, 0, layer, layer // 2, 0), Plane(0, layer // 2, layer, layer // 2, 0)]
        region = ns.register([shared.memory()], planes, blocks=8)
        region.dump(self.names(0, 1), [0, 1]).wait()
        region.dump(self.names(2, 3), [2, 3], raw=True).wait()
        region.dump(self.names(4), [4]).wait()
        advice = self.advice(ns, self.names(*range(6)))
        self.assertEqual((advice.blocks, ns.lookup_prefix(self.names(*range(6))).blocks), (5, 5))
        ns.evict(self.names(1))
        found, advice = self.advice(ns, self.names(*range(6)), ns.lookup_table_read_each)
        self.assertEqual([tier > 0 for tier in found], [tier > 0 for tier in ns.lookup_per_key(self.names(*range(6)))[0]])
        self.assertEqual(self.advice(ns, self.names(*range(6))).blocks, 1)

    def test_a_prefix_is_loaded_in_one_request(self):
        client, ns, region = self.worker(self.start())
        region.dump(self.names(*range(6)), range(6)).wait()
        result = region.load_prefix(self.names(*range(8)), range(20, 28)).wait()
        self.assertEqual(result.blocks, bytes([0] * 6 + [1] * 2))

    def test_a_noted_lookup_is_counted(self):
        daemon = self.start()
        client, ns, region = self.worker(daemon)
        region.dump(self.names(*range(4)), range(4)).wait()
        seen = Reader(daemon)
        before = seen.metrics()["lookup_keys"]
        for _ in range(300):
            try:
                ns.lookup_note(self.names(*range(8)))
            except UcmError:
                client.process()
        ns.lookup_prefix(self.names(0))
        counted = seen.metrics()["lookup_keys"] - before
        self.assertGreater(counted, 8 * 256)
        self.assertLessEqual(counted, 8 * 300 + 1)

    def test_a_daemon_that_is_killed_amid_changes(self):
        """The table that it leaves can be read. Once the connection is known to be broken, it
        counts for nothing."""
        for _ in range(3):
            daemon = self.start()
            client, ns, region = self.worker(daemon)
            stays, moves = self.names(*range(8)), self.names(*range(8, 48))
            region.dump(stays, range(8)).wait()
            self.open(ns)
            stop = threading.Event()

            def churn():
                try:
                    while not stop.is_set():
                        region.dump(moves, range(8, 48)).wait()
                        ns.evict(moves)
                except UcmError:
                    pass

            thread = threading.Thread(target=churn)
            thread.start()
            for i in range(200):
                advice = ns.lookup_table_read(stays)
                self.assertIn(advice and advice.blocks, (None, 8))
            daemon.kill()
            for i in range(200):
                advice = ns.lookup_table_read(stays)
                self.assertIn(advice and advice.blocks, (None, 8))
            stop.set()
            thread.join()
            with self.assertRaises(UcmError):
                ns.lookup_prefix(stays, timeout=0.2)
            self.assertIsNone(ns.lookup_table_read(stays))
            with self.assertRaises(UcmError):
                ns.lookup_table_open(timeout=0.2)
            client.close()

    def test_growth_and_a_new_daemon(self):
        daemon = self.start()
        client, ns, region = self.worker(daemon, 1000)
        self.open(ns)
        some = self.names(*range(1000))
        region.dump(some, range(1000)).wait()

        def certain(names):
            advice = ns.lookup_table_read(names)
            return advice if advice is not None and advice.certain else None
        self.assertEqual(self.advice(ns, some, certain).blocks, 1000)
        daemon.kill()
        self.start()

        def opened():
            with contextlib.suppress(UcmError):
                ns.lookup_table_open(timeout=1)
                return True
        until(opened, "the new daemon's table")
        self.assertEqual(self.advice(ns, some).blocks, ns.lookup_prefix(some).blocks)

    def test_a_child_has_none(self):
        client, ns, region = self.worker(self.start())
        region.dump(self.names(0), [0]).wait()
        self.open(ns)
        child = os.fork()
        if child == 0:
            os._exit(0 if ns.lookup_table_read(self.names(0)) is None else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(self.advice(ns, self.names(0)).blocks, 1)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=0)
