#!/usr/bin/python3
"""gather: single layers of blocks into slots of a pool, against real daemons through second_client.py."""

import faulthandler
import os
import random
import signal
import time
import unittest

from encoding_case import LAYERS as ENCODED_LAYERS, LAYER as ENCODED_LAYER, EncodingCase
from second_client import (CANCELLED, DEMO, FAILED, INVALID, MISS, NOT_FOUND, OK, Case, Client, Closed, Pool, Refused,
                           Region, keys, u32)
from shared_case import ON_SHARED, SharedCase

SUITE_TIMEOUT_S = 300
LAYERS, LAYER, BLOCKS, SLOTS = 5, 4096, 24, 64
IDENTITY = dict(DEMO, layers=[LAYERS], layer_bytes=LAYER)
SUMMARY = {"method": 1, "dtype": 1, "kv_heads": 1, "head_dim": 64, "k_token_stride": 128}


class GatherCase(Case):
    def stored(self, client=None, identity=IDENTITY, blocks=BLOCKS, slots=SLOTS):
        """A client, its namespace with blocks 0 to n, a pool, and what the blocks hold."""
        client, identity = client or self.client(), dict(identity, model=self.id())
        ns = client.open(identity)
        region = Region(client, ns, identity, blocks)
        kv = [region.fill(block) for block in range(blocks)]
        self.assertEqual(set(region.dump(range(blocks), range(blocks))), {OK})
        return client, ns, Pool(client, ns, identity["layer_bytes"], slots), kv

    def sequence(self, client, ns, names):
        derived = client.call("summary.open", ns=ns, **SUMMARY)["ns"]
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        client.call("sequence.append", sequence=sequence, keys=keys(*names))
        return sequence

    def right(self, pool, items, kv, status=None):
        """The slots of items that are OK hold their layers, and no other slot holds anything."""
        named = {slot: (kv[index], layer) for i, (index, layer, slot) in enumerate(items) if not status or status[i] == OK}
        for slot in range(len(pool.memory) // pool.size):
            block, layer = named.get(slot, (bytes(pool.size), 0))
            self.assertEqual(pool.bytes(slot), block[layer * pool.size:(layer + 1) * pool.size], f"slot {slot}")

    def scattered(self, count, blocks=BLOCKS, layers=LAYERS, slots=SLOTS):
        slots = random.sample(range(slots), count)
        return [(random.randrange(blocks), random.randrange(layers), slot) for slot in slots]


class Gather(GatherCase):
    def test_scattered_layers_by_sequence_and_by_keys(self):
        client, ns, pool, kv = self.stored()
        sequence = self.sequence(client, ns, range(BLOCKS))
        before = client.metrics()
        for source in ({"sequence": sequence}, {"keys": keys(*range(BLOCKS))}, {"sequence": sequence, "priority": 7, "timeout_ms": 5000}):
            for items in (self.scattered(40), sorted(self.scattered(40)), [(7, 3, 60)], [(2, layer, layer) for layer in range(LAYERS)],
                          [(2, 4, 0), (2, 4, 9), (3, 4, 1)]):
                pool.clear()
                self.assertEqual(pool.gather(items, **source), [OK] * len(items))
                self.right(pool, items, kv)
        after = client.metrics()
        grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
        count = 3 * (40 + 40 + 1 + LAYERS + 3)
        self.assertEqual((grown["gathers"], grown["gather_items"], grown["gather_bytes"], grown["load_bytes"]),
                         (15, count, count * LAYER, count * LAYER))
        self.assertEqual((grown["gather_items_missed"], grown["gather_reads"], grown["load_blocks_dram"]), (0, 0, 0))

    def test_from_nvme_a_part_is_read_once(self):
        client, ns, pool, kv = self.stored()
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        sequence = self.sequence(client, ns, range(BLOCKS))
        before = client.metrics()
        items = [(index, layer, (index - 4) * LAYERS + layer) for index in range(4, 12) for layer in range(LAYERS)]
        random.shuffle(items)
        self.assertEqual(pool.gather(items, sequence=sequence), [OK] * len(items))
        self.right(pool, items, kv)
        after = client.metrics()
        self.assertEqual([after[name] - before[name] for name in ("nvme_reads", "gather_reads", "gather_items")], [8, 8, len(items)])
        self.assertEqual(client.tiers(ns, 3, 4, 11, 12), [2, 1, 1, 2], "what was read stays in DRAM")

    def test_some_are_missing(self):
        client, ns, pool, kv = self.stored()
        names = [3, "nowhere", 5, 6, "nor here"]
        self.settled(client, ns)
        client.call("evict", ns=ns, keys=keys(6))
        items = [(index, layer, index * LAYERS + layer) for index in range(5) for layer in range(LAYERS)]
        random.shuffle(items)
        missed = client.metrics()["gather_items_missed"]
        status = pool.gather(items, keys=keys(*names))
        self.assertEqual(status, [OK if index in (0, 2) else MISS for index, _, _ in items])
        self.right(pool, items, [kv[name] if name in (3, 5) else None for name in names], status)
        self.assertEqual(client.metrics()["gather_items_missed"] - missed, 3 * LAYERS)

    def test_evicted_by_name_in_between(self):
        client, ns, pool, kv = self.stored()
        sequence = self.sequence(client, ns, range(BLOCKS))
        client.call("evict", ns=ns, keys=keys(4, 9))
        items = self.scattered(60)
        status = pool.gather(items, sequence=sequence)
        self.assertEqual(status, [MISS if index in (4, 9) else OK for index, _, _ in items])
        self.right(pool, items, kv, status)

    def test_traced(self):
        """By its items, however its blocks are named; those that came are counted."""
        client, ns, pool, _ = self.stored()
        sequence = self.sequence(client, ns, range(BLOCKS))
        operator = self.client()
        operator.call("trace", op=1)
        pool.gather([(2, layer, layer) for layer in range(LAYERS)], sequence=sequence)
        pool.gather([(0, 1, 0), (1, 1, 1), (1, 2, 2)], keys=keys(3, "nowhere"))
        records = operator.call("trace", op=2)["records"]
        self.assertEqual([(r["method"], r["n_keys"], r["ok"], r["bytes"], r["request"]) for r in records],
                         [("gather", LAYERS, LAYERS, LAYERS * LAYER, ""), ("gather", 3, 1, LAYER, "")])
        self.assertTrue(all("copy" in [span["name"] for span in r["spans"]] for r in records), records)

    def test_the_sequence_is_closed_meanwhile(self):
        client, ns, pool, kv = self.stored()
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        sequence = self.sequence(client, ns, range(BLOCKS))
        items = self.scattered(SLOTS)
        gather = client.begin("gather", _more=True, region=pool.number, sequence=sequence, items=u32(*(n for item in items for n in item)))
        client.call("sequence.close", sequence=sequence)
        self.assertEqual(list(client.wait(gather)["status"]), [OK] * len(items))
        self.right(pool, items, kv)
        self.refused(NOT_FOUND, pool.gather, items, sequence=sequence)

    def test_cancelled_and_unregistered(self):
        client, ns, pool, kv = self.stored()
        self.settled(client, ns)
        everything, items = keys(*range(BLOCKS)), [(i, 0, i) for i in range(BLOCKS)]
        for method in ("cancel", "region.unregister"):
            client.call("evict", ns=ns, tier=1)
            gather = client.begin("gather", _more=True, region=pool.number, keys=everything, items=u32(*(n for i in items for n in i)))
            client.call(method, **({"msgid": gather} if method == "cancel" else {"region": pool.number}))
            self.assertLessEqual(set(client.wait(gather)["status"]), {OK, CANCELLED})
        self.refused(NOT_FOUND, pool.gather, items, keys=everything)

    def test_a_client_that_dies(self):
        other = self.client()
        regions = other.metrics()["regions"]
        gathers = 20
        client, ns, pool, kv = self.stored(client=Client(self.daemon), slots=gathers * SLOTS)
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        for i in range(gathers):  # each into slots of its own: threads write them, in any order
            pool.begin([(block, layer, i * SLOTS + slot) for block, layer, slot in self.scattered(SLOTS)], keys=keys(*range(BLOCKS)))
        client.close()
        self.until(lambda: other.metrics()["regions"] == regions and other.metrics()["requests_active"] == 0)
        pool = Pool(other, other.open(dict(IDENTITY, model=self.id())), LAYER, SLOTS)
        items = self.scattered(SLOTS)
        self.assertEqual(set(pool.gather(items, keys=keys(*range(BLOCKS)))), {OK})
        self.right(pool, items, kv)

    def test_bypassed(self):
        client, ns, pool, _ = self.stored()
        sequence = self.sequence(client, ns, range(BLOCKS))
        client.call("bypass", ns=ns, load=1)
        for source in ({"sequence": sequence}, {"keys": keys(*range(BLOCKS))}):
            self.assertEqual(pool.gather([(1, 0, 0), (2, 0, 1)], **source), [MISS, MISS])
        client.call("bypass", ns=ns, load=2)
        self.assertEqual(pool.gather([(1, 0, 0)], sequence=sequence), [OK])

    def test_wrong_numbers(self):
        client, ns, pool, _ = self.stored()
        sequence, everything = self.sequence(client, ns, range(BLOCKS)), keys(*range(BLOCKS))
        huge = (1 << 32) - 1
        for source in ({"sequence": sequence}, {"keys": everything}):
            for item in ((BLOCKS, 0, 0), (huge, 0, 0), (0, LAYERS, 0), (0, huge, 0), (0, 0, SLOTS), (0, 0, huge)):
                error = self.refused(INVALID, pool.gather, [(0, 0, 5), item], **source)
                self.assertIn("items[1]", str(error))
            error = self.refused(INVALID, pool.gather, [(0, 0, 5), (1, 1, 6), (2, 2, 5)], **source)
            self.assertIn("entry 5 is named twice", str(error))
        call = lambda **params: client.call("gather", **params)  # noqa: E731
        self.refused(INVALID, call, region=pool.number, sequence=sequence, items=bytes(13))
        self.refused(INVALID, call, region=pool.number, items=u32(0, 0, 0))
        self.refused(INVALID, call, region=pool.number, sequence=sequence, keys=everything, items=u32(0, 0, 0))
        self.refused(INVALID, call, region=pool.number, keys=bytes(17), items=u32(0, 0, 0))
        self.refused(NOT_FOUND, call, region=pool.number, sequence=sequence + 1, items=u32(0, 0, 0))
        self.refused(NOT_FOUND, call, region=pool.number + 1, sequence=sequence, items=u32(0, 0, 0))
        empty = self.sequence(client, ns, ["nothing"])
        self.refused(INVALID, call, region=pool.number, sequence=empty, items=u32(0, 0, 0))
        self.assertEqual(pool.gather([(0, 0, 0)], sequence=sequence), [OK], "the connection goes on")

    def test_more_blocks_than_a_request_has_keys(self):
        client, ns, _, _ = self.stored()
        sequence = client.call("sequence.open", ns=client.call("summary.open", ns=ns, **SUMMARY)["ns"])["sequence"]
        for _ in range(2):
            client.call("sequence.append", sequence=sequence, keys=keys(*range(16)) * 1024)
        pool = Pool(client, ns, LAYER, 65536)
        items = [(i, i % LAYERS, i) for i in range(16385)]
        self.assertIn("16384", str(self.refused(INVALID, pool.gather, items, sequence=sequence)))
        items = [(i // 4, i % LAYERS, 65535 - i) for i in range(65536)]
        self.assertEqual(set(pool.gather(items, sequence=sequence)), {OK})
        items += [(0, 0, 0)]
        self.refused(INVALID, pool.gather, items, sequence=sequence)

    def test_pools_and_other_regions(self):
        client, ns, pool, _ = self.stored()
        region, sequence = Region(client, ns, dict(IDENTITY), 4), self.sequence(client, ns, range(BLOCKS))
        move = {"region": pool.number, "keys": keys(0), "blocks": u32(0)}
        self.assertIn("pool", str(self.refused(INVALID, client.call, "load", **move)))
        self.assertIn("pool", str(self.refused(INVALID, client.call, "dump", **move)))
        self.assertIn("pool", str(self.refused(INVALID, client.call, "gather", region=region.number, sequence=sequence, items=u32(0, 0, 0))))
        other = client.open(dict(IDENTITY, model=self.id() + "other"))
        elsewhere = Pool(client, other, LAYER, 4)
        self.assertIn("namespace", str(self.refused(INVALID, elsewhere.gather, [(0, 0, 0)], sequence=sequence)))
        two = client.open(dict(IDENTITY, model=self.id() + "two", parts=2, layers=[LAYERS, 2]))
        parts = Region(client, two, dict(IDENTITY, layers=[LAYERS, 2]), 1, part=1)
        whole = Region(client, two, dict(IDENTITY, layers=[LAYERS, 2]), 1)
        kv, _ = parts.fill(0), whole.fill(0)
        self.assertEqual((parts.dump([1], [0]), whole.dump([1], [0])), ([OK], [OK]))
        small = Pool(client, two, LAYER, 4, part=1)
        self.assertEqual(small.gather([(0, 1, 3)], keys=keys(1)), [OK])
        self.assertEqual(small.bytes(3), kv[LAYER:])
        self.refused(INVALID, small.gather, [(0, 2, 3)], keys=keys(1))

    def test_slots_of_one_kv_head(self):
        """A layer for each KV head of each of the model's; K and V of all slots apart."""
        client, ns, _, kv = self.stored(identity=dict(IDENTITY, layers=[LAYERS * 2], layer_bytes=LAYER // 2))
        half, slots = LAYER // 4, 40
        pool = Pool(client, ns, 2 * half, slots, tensors=2, apart=True)
        items = self.scattered(slots, layers=LAYERS * 2, slots=slots)
        self.assertEqual(pool.gather(items, sequence=self.sequence(client, ns, range(BLOCKS))), [OK] * slots)
        for index, layer, slot in items:
            k, v = (pool.memory[at:at + half] for at in (slot * half, (slots + slot) * half))
            self.assertEqual(k + v, kv[index][2 * half * layer:2 * half * (layer + 1)])

    def test_what_a_pools_planes_may_be(self):
        client = self.client()
        ns = client.open(dict(IDENTITY, model=self.id()))
        pool = Pool(client, ns, LAYER, 4, tensors=2)
        for sizes, layers, words in (((LAYER // 2,), (0,), "2048 bytes"), ((LAYER // 2, LAYER), (0, 0), "add up"),
                                     ((LAYER // 2, LAYER // 2), (0, 1), "hold any layer"), ((LAYER, LAYER), (0, 1), "hold any layer")):
            planes = [{"offset": i * LAYER, "stride": 2 * LAYER, "block_bytes": size, "layer": layer}
                      for i, (size, layer) in enumerate(zip(sizes, layers))]
            fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, 8 * LAYER)
            error = self.refused(INVALID, client.call, "region.register", [fd], ns=ns, blocks=4, device="cpu", block_pool=True,
                                 handles=[{"kind": 0, "bytes": 8 * LAYER}], planes=planes)
            os.close(fd)
            self.assertIn(words, str(error))
        client.call("region.unregister", region=pool.number)


class Small(GatherCase):
    options = {"arena.size": "8MiB", "nvme.size": "64MiB"}

    def test_more_than_a_job_and_more_than_the_arena(self):
        """Parts of 320 KiB, and more items than a job of a device has."""
        identity = dict(IDENTITY, layer_bytes=65536)
        client, ns, pool, kv = self.stored(identity=identity, blocks=BLOCKS, slots=1000)
        region = Region(client, ns, dict(identity, model=self.id()), BLOCKS)
        for first in range(BLOCKS, 3 * BLOCKS, BLOCKS):  # 22 MiB
            kv += [region.fill(block) for block in range(BLOCKS)]
            self.assertEqual(set(region.dump(range(first, first + BLOCKS), range(BLOCKS))), {OK})
            self.settled(client, ns)
        sequence = self.sequence(client, ns, range(3 * BLOCKS))
        items = self.scattered(900, blocks=3 * BLOCKS, slots=1000)
        self.assertEqual(set(pool.gather(items, sequence=sequence)), {OK})
        self.right(pool, items, kv)

    def test_damaged_on_nvme(self):
        client, ns, pool, kv = self.stored()
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        self.spoil(kv[8][:512])
        items = [(8, 1, 0), (7, 1, 1), (8, 4, 2)]
        status = pool.gather(items, keys=keys(*range(BLOCKS)))
        self.assertEqual(status, [FAILED, OK, FAILED])
        self.right(pool, items, kv, status)


class Drained(GatherCase):
    @classmethod
    def tearDownClass(cls):
        pass

    def test_drained(self):
        client, ns, pool, kv = self.stored()
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        everything, items = keys(*range(BLOCKS)), self.scattered(SLOTS)
        gather = pool.begin(items, keys=everything)
        client.call("health")  # the gather was taken
        self.daemon.process.send_signal(signal.SIGTERM)
        self.assertEqual(list(client.wait(gather)["status"]), [OK] * len(items))
        self.right(pool, items, kv)
        try:
            while True:
                pool.gather(items, keys=everything)
                time.sleep(0.01)
        except (Refused, Closed) as end:
            self.assertTrue(isinstance(end, Closed) or end.code in (11, NOT_FOUND), end)
        self.assertEqual(self.daemon.stop(), 0)


class Encoded(EncodingCase):
    def test_encoded_blocks_and_raw_ones(self):
        for encoding in ("fp8", "lossless"):
            with self.subTest(encoding=encoding):
                plain, engine = self.engine(None), self.engine(encoding)
                blocks = [engine.pages.fill(i) for i in range(8)]
                for i, block in enumerate(blocks):
                    plain.pages.put(i, block)
                names = [f"{encoding}{i}" for i in range(8)]
                self.assertEqual(engine.dump(names[:4], range(4)), [OK] * 4)
                self.assertEqual(plain.dump(names[4:], range(4, 8)), [OK] * 4)
                blocks[:4] = [engine.through(block) for block in blocks[:4]]
                pool = Pool(engine.client, engine.ns, ENCODED_LAYER, 40, tensors=2)
                items = [(i % 8, random.randrange(ENCODED_LAYERS), slot) for i, slot in enumerate(random.sample(range(40), 30))]
                before = engine.metrics()["decode_raw_bytes"]
                self.assertEqual(pool.gather(items, keys=keys(*names)), [OK] * 30)
                for index, layer, slot in items:
                    self.assertEqual(pool.bytes(slot), blocks[index][layer * ENCODED_LAYER:(layer + 1) * ENCODED_LAYER])
                self.assertEqual(engine.metrics()["decode_raw_bytes"] - before, ENCODED_LAYER * sum(item[0] < 4 for item in items))


class Shared(SharedCase):
    def test_from_the_shared_tier(self):
        self.identity = dict(IDENTITY, model=self.id())
        first = self.host()
        kv = self.stored(first, 8)[0]
        second = self.host()
        self.assertEqual(second.tiers(*range(8)), [ON_SHARED] * 8)
        pool = Pool(second.client, second.ns, LAYER, 8)
        items = [(index, 4 - index % LAYERS, 7 - index) for index in range(8)]
        self.assertEqual(pool.gather(items, keys=keys(*range(8))), [OK] * 8)
        for index, layer, slot in items:
            self.assertEqual(pool.bytes(slot), kv[index][layer * LAYER:(layer + 1) * LAYER])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
