#!/usr/bin/python3
"""Mappings against a real daemon, over the wire. Bytes that are read are compared with those
stored, while blocks leave, tenants take turns, and clients die."""

import faulthandler
import mmap
import os
import signal
import unittest

import numpy as np
from retrieval_case import IDENTITY, LAYERS, ON_NVME, ON_SHARED, SHAPE, SUITE_TIMEOUT_S, Retrieval, random_kv
from second_client import BUSY, INVALID, NOT_FOUND, OK, OTHER_UID, UNSUPPORTED, Closed, OwnDaemons, Region, keys
from mapping_case import SLAB, PART, SLOTS, MAPPINGS, Case, Reader, SharedMapping
from daemon import Daemon, halt


class Refs(Case):
    def test_blocks_in_dram_move_and_are_read(self):
        client, _, mapping, sequence, kv = self.referenced()
        before = client.metrics()
        places = mapping.ref(sequence, self.blocks)
        self.assert_read(mapping, places, kv)
        self.assertEqual(mapping.last.get("moved", 0), self.blocks)
        metrics = client.metrics()
        self.assertEqual(metrics["mapping_moves"] - before["mapping_moves"], self.blocks)
        self.assertEqual((metrics["mapping_refs"], metrics["mapping_referenced_bytes"]), (self.blocks, self.blocks * PART))
        self.assertGreaterEqual(metrics["mapping_bytes"], metrics["mapping_referenced_bytes"])
        again = mapping.ref(sequence, self.blocks)
        self.assertEqual(again, places, "a reference that stands tells its place")
        self.assertEqual((mapping.last.get("moved", 0), mapping.last.get("granted", [])), (0, []))
        client.call("mapping.close", mapping=mapping.number)
        self.assertEqual(client.metrics()["mapping_refs"], 0)

    def test_what_lies_in_a_mapping_is_loaded_as_ever(self):
        client, ns, mapping, sequence, kv = self.referenced(8)
        mapping.ref(sequence, 8)
        region = Region(client, ns, IDENTITY, 8)
        self.assertEqual(region.load(range(8), range(8)), [OK] * 8)
        self.assertEqual(region.memory[:], kv.tobytes())

    def test_blocks_on_nvme_are_read_into_the_mapping(self):
        client, ns, mapping, sequence, kv = self.referenced()
        self.settled(client, ns)
        client.call("sequence.close", sequence=sequence)
        client.call("evict", ns=ns, tier=1)
        self.assertEqual(client.tiers(ns, *range(self.blocks)), [ON_NVME] * self.blocks)
        sequence, _ = self.sequence(client, self.summaries(client, ns), range(self.blocks))
        places = mapping.ref(sequence, self.blocks)
        self.assert_read(mapping, places, kv)
        self.assertEqual(mapping.last.get("read", 0), self.blocks)

    def test_nobody_writes_but_the_daemon(self):
        client, _, mapping, sequence, _ = self.referenced(4)
        answer = client.call("mapping.ref", mapping=mapping.number, sequence=sequence, n=4)
        for fd in client.take_fds():
            with self.assertRaises(OSError):
                mmap.mmap(fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with self.assertRaises(OSError):
                os.ftruncate(fd, 0)
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            with self.assertRaises(OSError):
                mmap.mmap(again, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with self.assertRaises(OSError):
                os.pwrite(again, b"x", 0)
            with self.assertRaises(OSError):
                os.ftruncate(again, 0)
            os.close(again)
            os.close(fd)
        self.assertTrue(answer["granted"])

    def test_evicted_by_name_and_purged(self):
        client, ns, mapping, sequence, kv = self.referenced(12)
        places = mapping.ref(sequence, 12)
        client.call("evict", ns=ns, keys=keys(3))
        self.assertIsNone(mapping.read(places[3]))
        self.assert_read(mapping, places[4:], kv[4:])
        self.until(lambda: client.metrics()["mapping_refs"] == 11, "the end of its reference")
        again = mapping.ref(sequence, 12)
        self.assertEqual((again[3], mapping.last["missing"]), (None, 1))
        client.call("namespace.purge", ns=ns)
        self.assertEqual([mapping.read(place) for place in places], [None] * 12)
        self.until(lambda: client.metrics()["mapping_refs"] == 0, "the end of all references")

    def test_unref(self):
        client, _, mapping, sequence, kv = self.referenced(12)
        places = mapping.ref(sequence, 12)
        client.call("mapping.unref", mapping=mapping.number, sequence=sequence, first=2, n=4)
        self.assertEqual(client.metrics()["mapping_refs"], 8)
        client.call("mapping.unref", mapping=mapping.number, sequence=sequence, first=2, n=1048576)
        client.call("mapping.unref", mapping=mapping.number, sequence=sequence, first=2, n=1048576)
        self.assertEqual(client.metrics()["mapping_refs"], 2)
        self.assert_read(mapping, places[:2], kv)
        client.call("sequence.close", sequence=sequence)
        self.assertEqual(client.metrics()["mapping_refs"], 0)

    def test_a_sequence_with_refs_does_not_run_out(self):
        client, ns, _, _ = self.stored(4)
        derived, mapping = self.summaries(client, ns), SharedMapping(client, ns)
        sequence = client.call("sequence.open", ns=derived, lease_ms=100)["sequence"]
        client.call("sequence.append", sequence=sequence, keys=keys(*range(4)))
        mapping.ref(sequence, 4)
        idle = client.call("sequence.open", ns=derived, lease_ms=100)["sequence"]
        expired = client.metrics()["sequences_expired"]
        self.until(lambda: client.metrics()["sequences_expired"] > expired, "the end of the other sequence")
        self.refused(NOT_FOUND, client.call, "sequence.close", sequence=idle)
        self.assertEqual(len(mapping.ref(sequence, 4)), 4)

    def test_more_than_fits(self):
        client, _, mapping, sequence, kv = self.referenced(5 * SLOTS)
        places = mapping.ref(sequence, 5 * SLOTS, timeout_ms=20000)
        self.assertEqual(sum(place is not None for place in places), 4 * SLOTS)
        self.assertEqual(mapping.last.get("missing", 0), 0)
        self.assert_read(mapping, [p for p in places if p], [b for p, b in zip(places, kv) if p])
        self.assertEqual(client.metrics()["mapping_bytes"], 4 * SLAB)
        full = client.metrics()["mapping_full"]
        self.assertGreaterEqual(full, SLOTS)
        client.call("mapping.unref", mapping=mapping.number, sequence=sequence, n=SLOTS)
        places = mapping.ref(sequence, SLOTS, 4 * SLOTS)
        self.assert_read(mapping, places, kv[4 * SLOTS:])

    def test_many_mappings(self):
        client = self.client()
        for i in range(100):
            ns = client.open(dict(IDENTITY, model=f"{self.id()} {i}", parts=2, layers=[LAYERS, LAYERS]))
            SharedMapping(client, ns, part=i % 2)
            if i % 10 == 9:  # a connection holds few namespaces
                client = self.client()
        self.assertGreaterEqual(client.metrics()["mappings"], 100)

    def test_parts(self):
        client = self.client()
        identity = dict(IDENTITY, model=self.id(), parts=2, layers=[LAYERS, LAYERS])
        ns, kv = client.open(identity), [random_kv(6, seed) for seed in (3, 4)]
        for part in range(2):
            region = Region(client, ns, identity, 6, part)
            region.memory[:] = kv[part].tobytes()
            self.assertEqual(region.dump(range(6), range(6)), [OK] * 6)
        derived = self.summaries(client, ns)
        mappings = [SharedMapping(client, ns, part=part) for part in range(2)]
        sequences = [client.call("sequence.open", ns=derived, part=part)["sequence"] for part in range(2)]
        for part in range(2):
            client.call("sequence.append", sequence=sequences[part], keys=keys(*range(6)))
            self.assert_read(mappings[part], mappings[part].ref(sequences[part], 6), kv[part])
        self.refused(INVALID, mappings[0].ref, sequences[1], 6)
        self.refused(INVALID, client.call, "mapping.open", ns=ns, part=2)
        self.refused(INVALID, client.call, "mapping.open", ns=ns, part=1)


class Hostile(Case):
    def test_numbers_that_name_nothing(self):
        client, ns, mapping, sequence, _ = self.referenced(8)
        places = mapping.ref(sequence, 8)
        good = {"mapping": mapping.number, "sequence": sequence, "first": 0, "n": 8}
        for wrong, code in (({"mapping": 4000000000}, NOT_FOUND), ({"sequence": 4000000000}, NOT_FOUND), ({"first": 1}, INVALID),
                            ({"n": 9}, INVALID), ({"n": 0}, INVALID), ({"n": 16385}, INVALID), ({"first": 1048575}, INVALID),
                            ({"priority": 8}, INVALID)):
            self.refused(code, client.call, "mapping.ref", **dict(good, **wrong))
        other, _ = self.again()
        self.refused(NOT_FOUND, other.call, "mapping.ref", **good)
        self.refused(NOT_FOUND, other.call, "mapping.close", mapping=mapping.number)
        self.refused(INVALID, client.call, "mapping.open", ns=ns)
        derived = self.summaries(client, ns)
        self.refused(NOT_FOUND, client.call, "mapping.open", ns=4000000000)
        summaries = SharedMapping(client, derived)
        self.refused(INVALID, summaries.ref, sequence, 8)
        self.assert_read(mapping, places, random_kv(8, 1))

    def test_releases_of_what_is_not_granted(self):
        client, _, mapping, sequence, kv = self.referenced(8)
        places = mapping.ref(sequence, 8)
        (slab,) = mapping.slabs
        for slabs in ([77], [slab, slab], [slab, 77], [4294967295]):
            self.refused(INVALID, client.call, "mapping.release", mapping=mapping.number, slabs=slabs)
        mapping.release(slab)
        self.refused(INVALID, client.call, "mapping.release", mapping=mapping.number, slabs=[slab])
        self.assertIsNone(mapping.read(places[0]))
        self.assert_read(mapping, mapping.ref(sequence, 8), kv)

    def test_a_client_that_reads_no_descriptors(self):
        client, _, mapping, sequence, _ = self.referenced(8)
        (slab,) = {place[0] for place in mapping.ref(sequence, 8)}
        begun = []
        for _ in range(400):
            begun.append(client.begin("mapping.release", mapping=mapping.number, slabs=[slab]))
            begun.append(client.begin("mapping.ref", mapping=mapping.number, sequence=sequence, n=1))
        codes = set()
        for msgid in begun:
            try:
                client.wait(msgid)
            except Exception as error:  # pylint: disable=broad-except
                codes.add(error.code)
        self.assertLessEqual(codes, {BUSY, INVALID})
        self.assertIn(BUSY, codes)
        for fd in client.take_fds():
            os.close(fd)
        self.assertLess(len(os.listdir(f"/proc/{self.daemon.process.pid}/fd")), 300)

    def test_no_mappings_for_encoded_blocks(self):
        client, ns, _, _ = self.stored(2)
        shape = [IDENTITY["block_tokens"], SHAPE["kv_heads"], SHAPE["head_dim"]]
        encoded = client.call("encoding.open", ns=ns, encoding="int8", dtype="f16", k=shape, v=shape)["ns"]
        self.refused(UNSUPPORTED, client.call, "mapping.open", ns=encoded)


class NoMappings(Retrieval):
    def test_refused(self):
        client, ns, _, _ = self.stored(1)
        self.refused(UNSUPPORTED, client.call, "mapping.open", ns=ns)


class Tenants(OwnDaemons, Case):
    """Two tenants, one after the other, of a daemon of each test's own."""

    def start(self, **more):
        self.daemon = Daemon(directory=self.directory, **dict(self.options, **more))
        self.addCleanup(self.daemon.stop)

    def of(self, uid, blocks, seed, model=""):
        """The same as referenced() for a uid's tenant, with blocks of that seed."""
        client = Reader(self.daemon, uid=uid)
        self.addCleanup(client.close)
        identity = dict(IDENTITY, model=self.id() + model)
        ns, kv = client.open(identity), random_kv(blocks, seed)
        region = Region(client, ns, identity, blocks)
        region.memory[:] = kv.tobytes()
        self.assertEqual(set(region.dump(range(blocks), range(blocks))), {OK})
        self.settled(client, ns)
        sequence, _ = self.sequence(client, self.summaries(client, ns), range(blocks))
        return client, ns, SharedMapping(client, ns), sequence, kv

    def test_more_slabs_than_an_answer_names(self):
        """A frame carries 64 descriptors: the places after those come with the next answer."""
        blocks, part = 70, 640 << 10
        self.start(**{"mapping.size": f"{blocks}MiB", "arena.size": "192MiB", "nvme": False})
        client, identity = self.client(), dict(IDENTITY, model=self.id(), layers=[1], layer_bytes=part)
        ns, kv = client.open(identity), np.random.default_rng(1).integers(0, 256, (blocks, part), np.uint8)
        region = Region(client, ns, identity, blocks)
        region.memory[:] = kv.tobytes()
        self.assertEqual(set(region.dump(range(blocks), range(blocks))), {OK})
        sequence, _ = self.sequence(client, self.summaries(client, ns), range(blocks))
        mapping = SharedMapping(client, ns)
        mapping.part = part
        first = client.call("mapping.ref", mapping=mapping.number, sequence=sequence, n=blocks, timeout_ms=20000)
        places = mapping.take(first)
        self.assertEqual((first["more"], len(first["granted"]), len(places)), (True, 64, 64))
        places += mapping.ref(sequence, blocks - 64, 64, timeout_ms=20000)
        self.assertEqual((mapping.last.get("more", False), len(mapping.slabs), len({p[0] for p in places})), (False, blocks, blocks))
        for place, block in zip(places, kv):
            self.assertEqual(mapping.read(place), block.tobytes())

    def test_one_tenant_sees_nothing_of_the_other(self):
        self.start()
        a, a_ns, a_mapping, a_sequence, a_kv = self.of(None, SLOTS, 5)
        b, _, b_mapping, b_sequence, b_kv = self.of(OTHER_UID, SLOTS, 6)
        self.assertNotEqual(a.limits["tenant"], b.limits["tenant"])
        a_places = a_mapping.ref(a_sequence, SLOTS)
        self.refused(NOT_FOUND, b.call, "mapping.open", ns=a_ns)
        b_places = b_mapping.ref(b_sequence, SLOTS)
        self.assert_read(a_mapping, a_places, a_kv)
        self.assert_read(b_mapping, b_places, b_kv)
        self.assertFalse({p[0] for p in a_places} & {p[0] for p in b_places}, "a slab is of one tenant")
        # A's slabs go to B. B gets no byte of A's.
        a.close()
        self.until(lambda: b.metrics()["mappings"] == 1)
        mine = b_kv.tobytes()
        for slab in b_mapping.slabs.values():
            for at in range(0, SLAB, PART):
                data = slab[at:at + PART]
                self.assertTrue(data.strip(b"\0") == b"" or data[:PART] in mine or len(data) < PART, at)

    def test_one_uid_refs_three_times_what_it_leaves_of_its_tenants_part(self):
        self.start(tenants="team uid:2003 uid:2004")

        def refs(mapping, sequence):
            return sum(place is not None for place in mapping.ref(sequence, 4 * SLOTS, timeout_ms=20000))
        a, _, a_mapping, a_sequence, _ = self.of(2003, 4 * SLOTS, 5)
        most = 3 * SLAB // a_mapping.slot_bytes
        self.assertEqual(refs(a_mapping, a_sequence), most)
        b, _, b_mapping, b_sequence, b_kv = self.of(2004, 4 * SLOTS, 6, "b")
        self.assertEqual(refs(b_mapping, b_sequence), (4 * SLAB - most * a_mapping.slot_bytes) * 3 // 4 // a_mapping.slot_bytes)
        before = b.metrics()["mapping_refs"]
        a.close()
        self.until(lambda: b.metrics()["mapping_refs"] == before - most, "the end of the first one's references")
        places = b_mapping.ref(b_sequence, 4 * SLOTS, timeout_ms=20000)
        self.assertEqual(sum(place is not None for place in places), most)
        self.assert_read(b_mapping, [p for p in places if p], [k for p, k in zip(places, b_kv) if p])
        b.close()
        self.until(lambda: self.client().metrics()["mapping_refs"] == 0, "the end of all references")

    def test_a_tenant_gets_its_part_from_another_that_has_more(self):
        self.start()
        a, _, a_mapping, a_sequence, a_kv = self.of(None, 4 * SLOTS, 5)
        a_places = a_mapping.ref(a_sequence, 4 * SLOTS, timeout_ms=20000)
        self.assertEqual(sum(p is not None for p in a_places), 4 * SLOTS)
        b, _, b_mapping, b_sequence, b_kv = self.of(OTHER_UID, 4 * SLOTS, 6)
        msgid = b.begin("mapping.ref", mapping=b_mapping.number, sequence=b_sequence, n=4 * SLOTS, timeout_ms=20000)
        released = []

        def release():
            a.call("health")
            while a.revoked:
                released.append(a.revoked.pop())
                self.assertEqual([a_mapping.read(p) for p in a_places if p[0] == released[-1]], [None] * SLOTS)
                a_mapping.release(released[-1])
            return len(released) == 2
        self.until(release, "the release of two slabs")
        b_places = b_mapping.take(b.wait(msgid))
        self.assertEqual(sum(p is not None for p in b_places), 2 * SLOTS)
        self.assert_read(b_mapping, [p for p in b_places if p], [k for p, k in zip(b_places, b_kv) if p])
        left = [(p, k) for p, k in zip(a_places, a_kv) if p[0] in a_mapping.slabs]
        self.assertEqual(len(left), 2 * SLOTS)
        self.assert_read(a_mapping, *zip(*left))
        self.assertEqual(b.metrics()["mapping_bytes"], 4 * SLAB)
        self.assertGreaterEqual(b.metrics()["mapping_revocations"], 2)

    def test_who_does_not_release_is_dropped(self):
        self.start()
        a, _, a_mapping, a_sequence, _ = self.of(None, 4 * SLOTS, 5)
        a_mapping.ref(a_sequence, 4 * SLOTS, timeout_ms=20000)
        b, _, b_mapping, b_sequence, b_kv = self.of(OTHER_UID, SLOTS, 6)
        places = b_mapping.ref(b_sequence, SLOTS, timeout_ms=30000)
        self.assert_read(b_mapping, places, b_kv)
        with self.assertRaises(Closed):
            self.until(lambda: a.call("health") is None, "the end of the connection")
        self.assertGreaterEqual(b.metrics()["mapping_overdue_bytes"], SLAB)
        self.assertIn("overdue", self.daemon.log())

    def test_a_client_that_dies_gives_all_back(self):
        self.start()
        a, _, a_mapping, a_sequence, _ = self.of(None, 4 * SLOTS, 5)
        a_mapping.ref(a_sequence, 4 * SLOTS, timeout_ms=20000)
        a.close()
        b, _, b_mapping, b_sequence, b_kv = self.of(OTHER_UID, 4 * SLOTS, 6)
        self.until(lambda: b.metrics()["mappings"] == 1)
        self.assertEqual(b.metrics()["mapping_refs"], 0)
        # Slots that nobody references are DRAM for their tenant, up to its share.
        places = b_mapping.ref(b_sequence, 4 * SLOTS, timeout_ms=20000)
        self.assertGreaterEqual(sum(place is not None for place in places), 2 * SLOTS)
        self.assert_read(b_mapping, [p for p in places if p], [k for p, k in zip(places, b_kv) if p])

    def test_memory_that_a_client_keeps_is_its_own_loss(self):
        """A client says that it has released all, but keeps the mappings. The daemon allocates no
        further memory for it. Another tenant gets all that it may have."""
        self.start()
        a, a_ns, a_mapping, a_sequence, _ = self.of(None, 4 * SLOTS, 5)
        a_mapping.ref(a_sequence, 4 * SLOTS, timeout_ms=20000)
        self.assertEqual(len(a_mapping.slabs), 4)
        a.call("mapping.close", mapping=a_mapping.number)
        a.call("sequence.close", sequence=a_sequence)
        a.call("evict", ns=a_ns, keys=keys(*range(4 * SLOTS)))
        self.until(lambda: self.daemon.log().count("mapping-kept") == 4, "all slabs to be found kept")
        again, _, mapping, sequence, _ = self.of(None, SLOTS, 7, "again")
        self.assertEqual(set(mapping.ref(sequence, SLOTS, timeout_ms=2000)), {None})
        again.close()
        b, _, b_mapping, b_sequence, b_kv = self.of(OTHER_UID, 4 * SLOTS, 6)
        places = b_mapping.ref(b_sequence, 4 * SLOTS, timeout_ms=20000)
        self.assert_read(b_mapping, places, b_kv)
        self.assertEqual(b.metrics()["mapping_bytes"], 8 * SLAB)
        for memory in a_mapping.slabs.values():
            memory.close()
        self.until(lambda: b.metrics()["mapping_bytes"] == 4 * SLAB, "the end of what was kept")
        b.close()
        _, _, mapping, sequence, kv = self.of(None, SLOTS, 8, "at last")
        self.assert_read(mapping, mapping.ref(sequence, SLOTS, timeout_ms=20000), kv)

    def test_mapping_size_is_lowered_and_raised(self):
        self.lowered_and_raised(lambda client: self.assertNotIn("refused", client.call("config.reload")))

    def test_mapping_size_is_lowered_by_a_signal(self):
        self.lowered_and_raised(lambda _: self.daemon.process.send_signal(signal.SIGHUP))

    def lowered_and_raised(self, reload):
        config = "mapping:\n  size: {}MiB\n"
        self.options = {}
        self.start(config=config.format(4))
        a, _, mapping, sequence, kv = self.of(None, 4 * SLOTS, 5)
        places = mapping.ref(sequence, 4 * SLOTS, timeout_ms=20000)
        self.daemon.configure(config.format(1))
        reload(a)
        self.until(lambda: self.give_back(mapping) == 1, "the release of all but one slab")
        self.until(lambda: a.metrics()["mapping_bytes"] == SLAB)
        left = [(p, k) for p, k in zip(places, kv) if p[0] in mapping.slabs]
        self.assertEqual(len(left), SLOTS)
        self.assert_read(mapping, *zip(*left))
        self.daemon.configure(config.format(4))
        a.call("config.reload")
        places = mapping.ref(sequence, 4 * SLOTS, timeout_ms=20000)
        self.assert_read(mapping, places, kv)

    def lower(self, config, how, *mappings):
        """How many slabs each still maps, once the daemon grants no more than `config` says."""
        self.daemon.configure(config)
        how()
        size = int(config.split()[-1].removesuffix("MiB"))
        self.until(lambda: [self.give_back(mapping) for mapping in mappings] and mappings[0].client.metrics()["mapping_bytes"] <= size * SLAB,
                   "the release of what does not fit")
        return [len(mapping.slabs) for mapping in mappings]

    @staticmethod
    def give_back(mapping):
        """Releases the slabs that the daemon wants back. Returns how many are left."""
        mapping.client.call("health")
        while mapping.client.revoked:
            mapping.release(mapping.client.revoked.pop())
        return len(mapping.slabs)

    def test_refs_that_fit_stay(self):
        config = "mapping:\n  size: {}MiB\n"
        self.options = {}
        self.start(config=config.format(4))
        a, _, mapping, sequence, kv = self.of(None, 4 * SLOTS, 5)
        places = mapping.ref(sequence, 4 * SLOTS, timeout_ms=20000)
        kept = [i for i, place in enumerate(places) if place[0] == places[0][0]]
        for i in set(range(4 * SLOTS)) - set(kept):
            a.call("mapping.unref", mapping=mapping.number, sequence=sequence, first=i, n=1)
        self.lower(config.format(2), lambda: a.call("config.reload"), mapping)
        self.assertEqual(a.metrics()["mapping_refs"], len(kept))
        self.assert_read(mapping, [places[i] for i in kept], [kv[i] for i in kept])

    def test_each_tenant_gives_some(self):
        config = "mapping:\n  size: {}MiB\n"
        self.options = {}
        self.start(config=config.format(4))
        a, _, a_mapping, a_sequence, _ = self.of(None, 2 * SLOTS, 5)
        a_mapping.ref(a_sequence, 2 * SLOTS, timeout_ms=20000)
        _, _, b_mapping, b_sequence, _ = self.of(OTHER_UID, 2 * SLOTS, 6)
        b_mapping.ref(b_sequence, 2 * SLOTS, timeout_ms=20000)
        self.assertEqual(self.lower(config.format(2), lambda: a.call("config.reload"), a_mapping, b_mapping), [1, 1])


class Padding(Case):
    def test_a_block_brings_nothing_of_others_with_it(self):
        """A block was written with its slot's padding, which comes back with it. The slot was
        another tenant's before."""
        other, whole = self.client(uid=OTHER_UID), dict(IDENTITY, model=self.id(), parts=1, layers=[1], layer_bytes=2 * 4096)
        ns = other.open(whole)
        region = Region(other, ns, whole, 8)
        region.memory[:] = b"secret! " * (len(region.memory) // 8)
        region.dump(range(8), range(8))
        other.call("evict", ns=ns)
        client, short = self.client(), dict(whole, layer_bytes=4096 + 512)
        ns = client.open(short)
        self.assertEqual(Region(client, ns, short, 8).dump(range(8), range(8)), [OK] * 8)
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        summaries = client.call("summary.open", ns=ns, method=1, kv_heads=1, head_dim=4, k_token_stride=16)["ns"]
        sequence = client.call("sequence.open", ns=summaries)["sequence"]
        self.assertEqual(client.call("sequence.append", sequence=sequence, keys=keys(*range(8)))["blocks"], 8)
        mapping = SharedMapping(client, ns)
        mapping.ref(sequence, 8)
        self.assertEqual(mapping.last.get("read", 0), 8)
        for slab in mapping.slabs.values():
            self.assertNotIn(b"secret!", slab[:])


class Stops(OwnDaemons, Case):
    @staticmethod
    def at_root(client):
        root = client.call("stats")["shared_roots"][0]
        return root["in_flight"] + root["queued"]

    def test_what_ends_refs_whose_reads_last(self):
        """References to blocks on a root whose process is stopped."""
        self.daemon = Daemon(nvme=False, **MAPPINGS, **{"shared.roots": self.directory, "shared.timeout": "600s"})
        self.addCleanup(self.daemon.stop)
        client, ns, _, kv = self.stored(8)
        names = range(8)
        self.until(lambda: client.metrics()["shared_writes"] >= 8, "the files")
        client.call("evict", ns=ns, tier=1)
        self.assertEqual(list(client.call("lookup", ns=ns, keys=keys(*names), per_key=True, shared=True)["status"]), [ON_SHARED] * 8)
        pid = client.call("stats")["shared_roots"][0]["pid"]
        halt(pid)
        self.addCleanup(os.kill, pid, signal.SIGCONT)
        for end in ("cancel", "mapping.close", "sequence.close", "the connection's end"):
            reader = self.client()
            ns = reader.open(dict(IDENTITY, model=self.id()))
            sequence, _ = self.sequence(reader, self.summaries(reader, ns), names)
            mapping = SharedMapping(reader, ns)
            # Only that end ends the request: its deadline is far.
            ref = reader.begin("mapping.ref", mapping=mapping.number, sequence=sequence, first=0, n=8, timeout_ms=600000)
            self.until(lambda: client.metrics()["requests_active"] >= 1, "the reference")
            self.until(lambda: self.at_root(client) >= 8, "the reads")
            if end == "the connection's end":
                reader.close()
                self.until(lambda: client.metrics()["requests_active"] == 0, end)
                continue
            named = {"cancel": {"msgid": ref}, "mapping.close": {"mapping": mapping.number}, "sequence.close": {"sequence": sequence}}
            reader.call(end, **named[end])
            self.assertEqual(mapping.take(reader.wait(ref)), [None] * 8, end)
        os.kill(pid, signal.SIGCONT)
        reader = self.client()
        ns = reader.open(dict(IDENTITY, model=self.id()))
        sequence, _ = self.sequence(reader, self.summaries(reader, ns), names)
        mapping = SharedMapping(reader, ns)
        self.assert_read(mapping, mapping.ref(sequence, 8), kv)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=1)
