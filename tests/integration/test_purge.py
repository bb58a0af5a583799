#!/usr/bin/python3
"""Once a purge, or an eviction by name, is answered, nobody gets the blocks that others still hold,
by any method. This lasts until those release them. A block that is stored again is found."""

import faulthandler
import os
import select
import unittest

from retrieval_case import IDENTITY, Retrieval, lists_of
from second_client import DEMO, IN_PROGRESS, MISS, OK, OTHER_UID, Case, Client, Pool, Region, keys, u32
from shared_case import ABSENT, ON_SHARED, SharedCase
from test_lookup_table import LIVE, Table
from mapping_case import MAPPINGS, Reader, SharedMapping

SUITE_TIMEOUT_S = 240
BLOCKS = 8
MANY, FRAME = 600, 16384
IO = 9
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
        to, pool = range(BLOCKS, 2 * BLOCKS), Pool(client, ns, DEMO["layer_bytes"], BLOCKS)
        before = region.memory[:]
        for more in ({}, {"layer": 1}, {"progress_interval": 1}):
            self.assertEqual(region.load(NAMES, to, **more), [MISS] * BLOCKS)
        self.assertEqual(list(region.call("load_prefix", NAMES, to)["status"]), [MISS] * BLOCKS)
        self.assertEqual(list(client.call("prefetch", ns=ns, keys=keys(*NAMES))["status"]), [MISS] * BLOCKS)
        self.assertEqual(pool.gather([(i, 0, i) for i in NAMES], keys=keys(*NAMES)), [MISS] * BLOCKS)
        self.assertEqual(region.dump(NAMES, to), [IN_PROGRESS] * BLOCKS)
        self.assertEqual(region.load(NAMES, to, lease=lease), [MISS] * BLOCKS,
                         "a load that names a lease misses, too, and ends the lease")
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
        """Each load joins blocks that the one before still uses."""
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


class Sequences(Retrieval):
    options = MAPPINGS

    def test_nor_do_sequences_mappings_and_summaries(self):
        for number, (method, more) in enumerate(GONE):
            with self.subTest(method=method, more=more):
                client, ns, region, _ = self.stored(BLOCKS, client=Reader(self.daemon), salt=bytes([number]))
                self.addCleanup(client.close)
                derived = self.summaries(client, ns)
                self.build(client, derived, NAMES)
                sequence, _ = self.sequence(client, derived, NAMES, build=True)
                mapping = SharedMapping(client, ns)
                pool = Pool(client, ns, IDENTITY["layer_bytes"], BLOCKS)
                client.call(method, ns=ns, **more)
                answer = self.select(client, sequence, self.query())
                self.assertEqual((sum(map(len, lists_of(answer))), answer["evicted"] > 0), (0, True))
                self.assertEqual(pool.gather([(i, 0, i) for i in NAMES], sequence=sequence), [MISS] * BLOCKS)
                self.assertEqual(list(client.call("sequence.prefetch", sequence=sequence, index=u32(*NAMES))["status"]), [MISS] * BLOCKS)
                places = mapping.take(mapping.client.call("mapping.ref", mapping=mapping.number, sequence=sequence, first=0, n=BLOCKS))
                self.assertEqual(places, [None] * BLOCKS)
                _, appended = self.sequence(client, derived, NAMES)
                self.assertEqual((appended["blocks"], appended["missing"]), (0, BLOCKS))

    def test_nor_the_summaries_themselves(self):
        for number, (method, more) in enumerate(GONE):
            with self.subTest(method=method, more=more):
                client, ns, region, _ = self.stored(BLOCKS, salt=bytes([number]))
                derived = self.summaries(client, ns)
                self.build(client, derived, NAMES)
                first, _ = self.sequence(client, derived, NAMES)  # holds them
                self.assertEqual(client.call(method, ns=derived, **more)["busy"], BLOCKS)
                _, appended = self.sequence(client, derived, NAMES, build=True)
                self.assertEqual((appended["blocks"], appended.get("summaries", 0)), (BLOCKS, 0))
                self.assertEqual(self.build(client, derived, NAMES), [IN_PROGRESS] * BLOCKS)
                client.call("sequence.close", sequence=first)
                self.until(lambda: self.build(client, derived, NAMES) == [OK] * BLOCKS, "the end of their last users")


class Shared(SharedCase):
    def test_what_lies_on_a_root_alone(self):
        one, other = self.host(), self.host()
        self.stored(one, 4)
        self.assertEqual(one.daemon.stop(), 0)
        self.hosts.remove(one)
        for method, more in GONE:
            with self.subTest(method=method, more=more):
                self.assertEqual(other.tiers(*range(4)), [ON_SHARED] * 4)
                lease = other.look(*range(4), lease_ms=600000)["lease"]
                self.assertEqual(other.client.call(method, ns=other.ns, **more)["busy"], 4)
                self.assertEqual(other.regions[0].load(range(4), range(4)), [MISS] * 4)
                self.assertEqual(other.tiers(*range(4)), [ABSENT] * 4)
                self.assertEqual(other.regions[0].load(range(4), range(4), lease=lease), [MISS] * 4)
                self.until(lambda: not self.files(), "the files' end")
                self.assertEqual(other.tiers(*range(4)), [ABSENT] * 4)
                self.stored(other, 4)
                other.client.call("evict", ns=other.ns, tier=1)

    def purged(self, host, **more):
        self.assertEqual(len(self.files()), MANY)
        answer = host.client.call("namespace.purge", ns=host.ns, keys=keys(*range(MANY)), **more)
        self.assertEqual((self.files(), answer.get("missing", 0)), ([], 0))

    def test_many_are_gone_once_that_is_answered(self):
        host = self.host(blocks=MANY)
        self.stored(host, MANY)
        self.purged(host)
        self.stored(host, MANY)
        flood = Client(host.daemon, uid=OTHER_UID)
        self.addCleanup(flood.close)
        ns = flood.open(dict(DEMO, model="flood"))
        for _ in range(8):
            flood.begin("namespace.purge", ns=ns, keys=os.urandom(16 * FRAME))
        self.until(lambda: host.client.metrics()["requests_active"] == 8, "the flood")
        self.purged(host)
        self.assertEqual(select.select([flood.socket], [], [], 0)[0], [], "the flood is not over")

    def test_what_another_host_has_stored_goes_with_all_its_parts(self):
        self.identity.update(parts=3, layers=[1] * 3)
        one, other = self.host(), self.host()
        self.stored(one, 4)
        self.assertEqual(other.client.call("evict", ns=other.ns, keys=keys(1, 2, 7)), {"blocks": 0, "missing": 3})
        self.assertEqual(len(self.files()), 2 * 3)

    def test_a_root_that_is_away_is_told_of(self):
        host = self.host()
        self.stored(host, 2)
        os.rename(self.directory, self.directory + ".away")
        try:
            self.refused(IO, host.client.call, "evict", ns=host.ns, keys=keys(0))
        finally:
            os.rename(self.directory + ".away", self.directory)
        host.client.call("evict", ns=host.ns, keys=keys(0))
        self.assertEqual(len(self.files()), 1)

    def test_others_are_answered_meanwhile(self):
        """The block that is named last is still found while the first ones go."""
        client, identity = self.host().client, dict(self.identity, parts=256, layers=[1] * 256)
        ns = client.open(identity)
        for part in range(256):
            region = Region(client, ns, identity, 1, part)
            self.assertEqual(region.dump([0], [0]), [OK])
            client.call("region.unregister", region=region.number)
        self.until(lambda: {part["shared"] for part in client.call("inspect", ns=ns, key=keys(0))["parts"]} == {"ready"}, "its writing")
        self.assertEqual(len(self.files()), 256)
        evict = client.begin("evict", ns=ns, keys=os.urandom(16 * (FRAME - 1)) + keys(0), _more=True)
        lookup = client.begin("lookup", ns=ns, keys=keys(0))
        self.assertEqual([client.next(), client.next()], [lookup, evict])
        self.assertEqual(client.wait(lookup)["hits"], 1)
        self.assertEqual(client.wait(evict), {"blocks": 1, "missing": FRAME - 1})
        self.assertEqual((client.hits(ns, 0), self.files()), (0, []))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
