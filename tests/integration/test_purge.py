#!/usr/bin/env python3
"""What nobody gets once a purge, or an eviction by name, is answered: blocks that others still hold, by no method, until those
let go of them; and what is stored anew is found."""

import faulthandler
import os
import sys
import unittest

try:
    from retrieval_case import IDENTITY, Retrieval, lists_of
    from second_client import DEMO, IN_PROGRESS, MISS, OK, Case, Pool, Region, keys, u32
    from share_case import ABSENT, ON_SHARE, ShareCase
    from test_hints import LIVE, Table
    from window_case import WINDOWS, Reader, Window
except ImportError:  # another Python than Debian's is first in PATH
    if __name__ != "__main__" or sys.executable == "/usr/bin/python3":
        raise
    os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)

SUITE_TIMEOUT_S = 240
BLOCKS = 8
NAMES = list(range(BLOCKS))
GONE = [("namespace.purge", {}), ("namespace.purge", {"keys": keys(*NAMES)}), ("evict", {}), ("evict", {"keys": keys(*NAMES)})]


class Held(Case):
    """A lease holds the blocks all the while."""
    options = {"events.memory": "1MiB"}

    def stored(self, number):
        client = Reader(self.daemon)
        self.addCleanup(client.close)
        identity = dict(DEMO, model=f"{self.id()} {number}")
        ns = client.open(identity)
        region = Region(client, ns, identity, 4 * BLOCKS)
        for block in NAMES:
            region.fill(block)
        self.assertEqual(region.dump(NAMES, NAMES), [OK] * BLOCKS)
        self.settled(client, ns)
        return client, ns, region

    def holds(self, client, ns):
        return client.call("lookup", ns=ns, keys=keys(*NAMES), lease_ms=600000)["lease"]

    def nobody_gets(self, client, ns, region, lease):
        self.assertEqual(client.hits(ns, *NAMES), 0)
        self.assertEqual(client.tiers(ns, *NAMES), [0] * BLOCKS)
        to, pool = range(BLOCKS, 2 * BLOCKS), Pool(client, ns, DEMO["shard_bytes"], BLOCKS)
        before = region.memory[:]
        for more in ({}, {"shard": 1}, {"step": 1}):
            self.assertEqual(region.load(NAMES, to, **more), [MISS] * BLOCKS)
        self.assertEqual(list(region.call("load_prefix", NAMES, to)["status"]), [MISS] * BLOCKS)
        self.assertEqual(list(client.call("prefetch", ns=ns, keys=keys(*NAMES))["status"]), [MISS] * BLOCKS)
        self.assertEqual(pool.fetch([(i, 0, i) for i in NAMES], keys=keys(*NAMES)), [MISS] * BLOCKS)
        self.assertEqual(region.dump(NAMES, to), [IN_PROGRESS] * BLOCKS)
        self.assertEqual(region.load(NAMES, to, lease=lease), [MISS] * BLOCKS, "also who names a lease; it ends that")
        self.assertEqual(region.memory[:], before)

    def test_no_method_brings_one(self):
        for tier in (0, 1):
            for number, (method, more) in enumerate(GONE):
                with self.subTest(method=method, more=more, tier=tier):
                    client, ns, region = self.stored(2 * number + tier)
                    table = Table(client, ns).wait(LIVE)
                    if tier:
                        client.call("evict", ns=ns, tier=1)
                    lease, holder = self.holds(client, ns), self.holds(client, ns)
                    self.assertEqual(client.call(method, ns=ns, **more)["busy"], BLOCKS)
                    self.assertEqual(table.tiers(*NAMES), [0] * BLOCKS)
                    self.nobody_gets(client, ns, region, lease)
                    client.call("release", lease=holder)
                    self.assertEqual(set(region.dump(NAMES, NAMES)), {OK}, "nobody holds them any more")
                    self.assertEqual(table.tiers(*NAMES), [1] * BLOCKS)
                    table.close()

    def test_loads_that_overlap_come_to_an_end(self):
        """Each joins what the one before still uses."""
        client, ns, region = self.stored(0)
        other, _, theirs = self.again(client, 0)
        under_way = [(c, r.begin("load", NAMES, NAMES)) for c, r in ((client, region), (other, theirs)) for _ in range(4)]
        self.assertEqual(other.call("namespace.purge", ns=ns).get("missing", 0), 0)
        later = [(c, r.begin("load", NAMES, NAMES)) for c, r in ((client, region), (other, theirs)) for _ in range(4)]
        for c, msgid in under_way:
            self.assertLessEqual(set(c.wait(msgid)["status"]), {OK, MISS})
        for c, msgid in later:
            self.assertEqual(list(c.wait(msgid)["status"]), [MISS] * BLOCKS)

    def again(self, client, number):
        other = Reader(self.daemon)
        self.addCleanup(other.close)
        identity = dict(DEMO, model=f"{self.id()} {number}")
        ns = other.open(identity)
        return other, ns, Region(other, ns, identity, 4 * BLOCKS)


class Chains(Retrieval):
    options = WINDOWS

    def test_nor_do_chains_windows_and_digests(self):
        for number, (method, more) in enumerate(GONE):
            with self.subTest(method=method, more=more):
                client, ns, region, _ = self.stored(BLOCKS, client=Reader(self.daemon), salt=bytes([number]))
                self.addCleanup(client.close)
                derived = self.digests(client, ns)
                self.build(client, derived, NAMES)
                chain, _ = self.chain(client, derived, NAMES, build=True)
                window = Window(client, ns)
                pool = Pool(client, ns, IDENTITY["shard_bytes"], BLOCKS)
                client.call(method, ns=ns, **more)
                answer = self.select(client, chain, self.query())
                self.assertEqual((sum(map(len, lists_of(answer))), answer["gone"] > 0), (0, True))
                self.assertEqual(pool.fetch([(i, 0, i) for i in NAMES], chain=chain), [MISS] * BLOCKS)
                self.assertEqual(list(client.call("chain.prefetch", chain=chain, index=u32(*NAMES))["status"]), [MISS] * BLOCKS)
                places = window.take(window.client.call("window.pin", window=window.number, chain=chain, first=0, n=BLOCKS))
                self.assertEqual(places, [None] * BLOCKS)
                _, appended = self.chain(client, derived, NAMES)
                self.assertEqual((appended["blocks"], appended["missing"]), (0, BLOCKS))

    def test_nor_the_digests_themselves(self):
        for number, (method, more) in enumerate(GONE):
            with self.subTest(method=method, more=more):
                client, ns, region, _ = self.stored(BLOCKS, salt=bytes([number]))
                derived = self.digests(client, ns)
                self.build(client, derived, NAMES)
                first, _ = self.chain(client, derived, NAMES)  # holds them
                self.assertEqual(client.call(method, ns=derived, **more)["busy"], BLOCKS)
                _, appended = self.chain(client, derived, NAMES, build=True)
                self.assertEqual((appended["blocks"], appended.get("digests", 0)), (BLOCKS, 0))
                self.assertEqual(self.build(client, derived, NAMES), [IN_PROGRESS] * BLOCKS)
                client.call("chain.close", chain=first)
                self.until(lambda: self.build(client, derived, NAMES) == [OK] * BLOCKS, "the end of their last users")


class Shared(ShareCase):
    def test_what_lies_on_a_root_alone(self):
        one, other = self.host(), self.host()
        self.stored(one, 4)
        self.assertEqual(one.daemon.stop(), 0)
        self.hosts.remove(one)
        for method in ("namespace.purge", "evict"):
            self.assertEqual(other.tiers(*range(4)), [ON_SHARE] * 4)
            lease = other.look(*range(4), lease_ms=600000)["lease"]
            other.client.call(method, ns=other.ns)
            self.assertEqual(other.regions[0].load(range(4), range(4)), [MISS] * 4)
            self.assertEqual(other.tiers(*range(4)), [ABSENT] * 4)
            self.assertEqual(other.regions[0].load(range(4), range(4), lease=lease), [MISS] * 4)
            self.until(lambda: not self.files(), "the files' end")
            self.assertEqual(other.tiers(*range(4)), [ABSENT] * 4)
            self.stored(other, 4)
            other.client.call("evict", ns=other.ns, tier=1)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
