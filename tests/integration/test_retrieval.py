#!/usr/bin/python3
"""Summaries and sequences against a real daemon, through second_client.py. The summaries that it
builds are compared with the numpy of tests/reference/sparse/methods.py. Also other connections,
evictions, damage, and hostile clients."""

import faulthandler
import hashlib
import os
import struct
import time
import unittest

import numpy as np
from retrieval_case import (HEAD_DIM, HELD, IDENTITY, IN_DRAM, KV_HEADS, LAYERS, METHODS, ON_NVME, SHAPE, SUITE_TIMEOUT_S,
                            TOKENS, Retrieval, lists_of, random_kv, spec_of, methods)
from second_client import (BUSY, EXISTS, FAILED, INVALID, MISS, NOT_FOUND, OK, OTHER_UID, Refused, Region,
                           fingerprint_form, keys, u32)


class Summaries(Retrieval):
    def test_every_method_builds_what_numpy_builds(self):
        client, ns, _, kv = self.stored(8)
        for name, (number, params) in METHODS.items():
            with self.subTest(method=name):
                opened = client.call("summary.open", ns=ns, method=number, **params, **SHAPE)
                self.assertEqual(opened["layer_bytes"], methods.summary_bytes(spec_of(name)))
                self.assertEqual(self.build(client, opened["ns"], range(8)), [OK] * 8)
                raw = self.read_summaries(client, opened["ns"], opened["layer_bytes"], 8)
                for layer in range(LAYERS):
                    right = methods.pack(spec_of(name), methods.build(spec_of(name), kv[:, layer, 0], kv[:, layer, 1]))
                    np.testing.assert_array_equal(raw[:, layer], right)

    def test_the_namespace_follows_from_the_spec(self):
        client, ns, _, _ = self.stored(2)
        one = client.call("summary.open", ns=ns, method=1, **SHAPE)
        self.assertEqual(client.call("summary.open", ns=ns, method=1, run=3, seed=9, **SHAPE), one, "what mean ignores")
        other, other_ns = self.again()
        self.assertEqual(other.call("summary.open", ns=other_ns, method=1, **SHAPE), one)
        different = [dict(SHAPE, method=1, kind=1), dict(SHAPE, method=3), dict(SHAPE, method=1, dtype=2),
                     dict(SHAPE, method=1, k_offset=128, kv_heads=1)]
        prints = {client.call("summary.open", ns=ns, **spec)["fingerprint"] for spec in different}
        self.assertEqual(len(prints | {one["fingerprint"]}), 5)
        listed = {entry["fingerprint"]: entry for entry in client.call("namespace.list", limit=4096)["namespaces"]}
        entry = listed[one["fingerprint"]]
        base = listed[client.call("namespace.open", **dict(IDENTITY, model=self.id()))["fingerprint"]]
        spec = struct.pack("<8IQ64x6I6Q", 1, 1, 0, 0, 0, 0, 0, 0, 0, SHAPE["dtype"], TOKENS, KV_HEADS, HEAD_DIM, 0, 0,
                           0, SHAPE["k_token_stride"], SHAPE["k_head_stride"], 0, 0, 0)
        identity = dict(IDENTITY, model=self.id(), dtype="summary", layout="summary/1/mean", layer_bytes=one["layer_bytes"],
                        salt=hashlib.sha256(base["fingerprint"] + spec).digest())
        form = fingerprint_form(client.limits["tenant"], identity)
        self.assertEqual(hashlib.sha256(form).digest(), one["fingerprint"], "as kernels/sparse/sparse.h says")
        self.assertEqual((entry["dtype"], entry["layout"], entry["model"], entry["layer_bytes"]),
                         ("summary", "summary/1/mean", self.id(), one["layer_bytes"]))

    def test_refused_specs(self):
        client, ns, _, _ = self.stored(1)
        good = dict(SHAPE, ns=ns, method=1)
        for wrong in ({"method": 7}, {"method": 255}, {"kv_heads": 1024}, {"head_dim": 63}, {"head_dim": 1024},
                      {"k_offset": 4294967295}, {"k_token_stride": 8192}, {"k_token_stride": 4294967294},
                      {"k_token_stride": 3}, {"k_offset": 1}, {"rope_dim": 64}, {"dtype": 0},
                      {"method": 2, "run": 3}, {"method": 2}, {"method": 2, "run": 4, "keep": b"\x01"},
                      {"method": 4, "bits": 65}, {"method": 4}, {"method": 6}, {"method": 6, "chosen": 17}, {"method": 6, "chosen": 16, "rest": 1},
                      {"method": 5, "v_offset": 8000}, {"sparse_ratio": 0.5}, {"seed": -1}, {"build": 1}):
            self.refused(INVALID, client.call, "summary.open", **dict(good, **wrong))
        self.refused(NOT_FOUND, client.call, "summary.open", **dict(good, ns=4000000000))
        self.assertEqual(client.call("summary.open", **good)["ns"] > 0, True)

    def test_single_flight_and_a_second_client_builds_nothing(self):
        client, ns, _, _ = self.stored()
        other, other_ns = self.again()
        derived, other_derived = self.summaries(client, ns), self.summaries(other, other_ns)
        self.assertEqual(derived, other_derived)
        before = client.metrics()["summaries_built"]
        both = [c.begin("summary.build", ns=derived, keys=keys(*range(self.blocks))) for c in (client, other)]
        statuses = [list(c.wait(msgid)["status"]) for c, msgid in zip((client, other), both)]
        self.assertTrue(set(sum(statuses, [])) <= {OK, EXISTS}, statuses)
        self.assertEqual(client.metrics()["summaries_built"] - before, self.blocks)
        self.assertEqual(self.build(other, derived, range(self.blocks)), [EXISTS] * self.blocks)
        _, answer = self.sequence(other, derived, range(self.blocks), build=True)
        self.assertEqual((answer["summaries"], answer.get("built", 0)), (self.blocks, 0))
        self.assertEqual(client.metrics()["summaries_built"] - before, self.blocks)

    def test_built_as_blocks_are_stored(self):
        client, ns = self.again()
        derived = self.summaries(client, ns, build=True)
        worker, _, _, kv = self.stored(20)
        self.until(lambda: client.hits(derived, *range(20)) == 20, "their summaries")
        raw = self.read_summaries(client, derived, methods.summary_bytes(spec_of("mean")), 20)
        right = methods.pack(spec_of("mean"), methods.build(spec_of("mean"), kv[:, 1, 0]))
        np.testing.assert_array_equal(raw[:, 1], right)
        client.close()  # no request needs them any more
        self.until(lambda: worker.metrics()["connections"] == 1)
        region = Region(worker, worker.open(dict(IDENTITY, model=self.id())), IDENTITY, 1)
        builds = worker.metrics()["summaries_built"]
        self.assertEqual(region.dump(["later"], [0]), [OK])
        self.assertEqual(worker.metrics()["summaries_built"], builds)

    def test_what_can_not_be_built(self):
        client, ns, region, _ = self.stored(2)
        derived = self.summaries(client, ns)
        self.assertEqual(self.build(client, derived, [0, "nobody", 1]), [OK, MISS, OK])
        self.refused(INVALID, client.call, "summary.build", ns=derived, keys=bytes(17))
        self.refused(INVALID, client.call, "summary.build", ns=derived, keys=keys(0), parts=2)
        self.refused(NOT_FOUND, client.call, "summary.build", ns=ns, keys=keys(0))
        by_hand, _ = self.again()
        self.refused(NOT_FOUND, by_hand.call, "summary.build", ns=derived, keys=keys(0))
        client.call("evict", ns=ns, keys=keys(0))
        orphans = client.metrics()["summaries_orphaned"]
        self.assertEqual(self.build(client, derived, [0]), [EXISTS])
        self.assertEqual(client.metrics()["summaries_orphaned"], orphans + 1)

    def test_summaries_of_some_parts(self):
        client, identity = self.client(), dict(IDENTITY, model=self.id(), parts=3, layers=[LAYERS] * 3)
        ns, asked = client.open(identity), [{"part": 1}, {"part": 0, "parts": 2}, {"part": 2, "parts": 1}, {}]
        for part in range(3):
            region = Region(client, ns, identity, len(asked), part)
            region.memory[:] = random_kv(len(asked), part).tobytes()
            self.assertEqual(set(region.dump(range(len(asked)), range(len(asked)))), {OK})
        derived = self.summaries(client, ns)
        for name, (parts, built) in enumerate(zip(asked, ([1, 2], [0, 1], [2], [0, 1, 2]))):
            with self.subTest(**parts):
                self.assertEqual(self.build(client, derived, [name], **parts), [OK])
                found = client.call("inspect", ns=derived, key=keys(name))["parts"]
                self.assertEqual([part["part"] for part in found if part["dram"] == "ready"], built)
        for wrong in ({"part": 3}, {"part": 1, "parts": 3}):
            refused = self.refused(INVALID, client.call, "summary.build", ns=derived, keys=keys(0), **wrong)
            self.assertIn("the namespace has 3, from 0", str(refused))

    def test_a_worker_dumps_them_itself(self):
        client, ns, _, kv = self.stored(4)
        opened = client.call("summary.open", ns=ns, method=1, **SHAPE)
        region = Region(client, opened["ns"], {"layers": [LAYERS], "layer_bytes": opened["layer_bytes"]}, 4)
        built = [methods.pack(spec_of("mean"), methods.build(spec_of("mean"), kv[:, layer, 0])) for layer in range(LAYERS)]
        region.memory[:] = np.stack(built, 1).tobytes()
        self.assertEqual(region.dump(range(4), range(4)), [OK] * 4)
        self.assertEqual(self.build(client, opened["ns"], range(4)), [EXISTS] * 4)
        _, answer = self.sequence(client, opened["ns"], range(4))
        self.assertEqual(answer["summaries"], 4)

    def test_blocks_on_nvme_are_read_up(self):
        client, ns, _, kv = self.stored(12)
        derived = self.summaries(client, ns)
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        self.assertEqual(client.tiers(ns, *range(12)), [ON_NVME] * 12)
        self.assertEqual(self.build(client, derived, range(12)), [OK] * 12)
        raw = self.read_summaries(client, derived, methods.summary_bytes(spec_of("mean")), 12)
        np.testing.assert_array_equal(
            raw[:, 2], methods.pack(spec_of("mean"), methods.build(spec_of("mean"), kv[:, 2, 0])))


class Sequences(Retrieval):
    options = {"arena.size": "64MiB"}

    def test_append_tells_tiers_and_summaries(self):
        client, ns, _, _ = self.stored(10)
        derived = self.summaries(client, ns)
        self.build(client, derived, range(0, 10, 2))
        sequence, answer = self.sequence(client, derived, [*range(10), "nobody", 3])
        self.assertEqual(answer, {"blocks": 10, "dram": 10, "missing": 2, "summaries": 5,
                                  "status": bytes([IN_DRAM | HELD, IN_DRAM] * 5 + [0, 0])})
        more = client.call("sequence.append", sequence=sequence, keys=keys(3, 4, 5), build=True)
        self.assertEqual(more, {"blocks": 13, "dram": 3, "summaries": 3, "built": 2, "status": bytes([IN_DRAM | HELD] * 3)})
        stats = client.metrics()
        self.assertEqual((stats["sequences"], stats["sequence_blocks"]), (1, 13))
        self.assertGreater(stats["summaries_held_bytes"], 0)
        client.call("sequence.close", sequence=sequence)
        stats = client.metrics()
        self.assertEqual((stats["sequences"], stats["sequence_blocks"], stats["summaries_held_bytes"]), (0, 0, 0))
        for method in ("sequence.close", "sequence.append", "sequence.prefetch"):
            more = {"sequence.append": {"keys": keys(1)}, "sequence.prefetch": {"index": u32(0)}}.get(method, {})
            self.refused(NOT_FOUND, client.call, method, sequence=sequence, **more)

    def test_summaries_that_lie_on_nvme_come_back(self):
        client, ns, _, _ = self.stored(30)
        derived = self.summaries(client, ns)
        self.build(client, derived, range(30))
        self.settled(client, ns)
        self.settled(client, derived)
        client.call("evict", ns=ns, tier=1)
        client.call("evict", ns=derived, tier=1)
        builds = client.metrics()["summaries_built"]
        _, answer = self.sequence(client, derived, range(30), build=True)
        self.assertEqual(answer, {"blocks": 30, "nvme": 30, "summaries": 30, "status": bytes([ON_NVME | HELD] * 30)})
        self.assertEqual(client.metrics()["summaries_built"], builds)

    def test_a_damaged_summary_is_built_again_or_missing(self):
        client, ns, _, kv = self.stored(6)
        derived = self.summaries(client, ns, "box")
        self.build(client, derived, range(6))
        self.settled(client, derived)
        raw = self.read_summaries(client, derived, methods.summary_bytes(spec_of("box")), 6)
        client.call("evict", ns=derived, tier=1)
        for block in (2, 4):
            self.spoil(raw[block].tobytes()[:64], 7)
        corrupt = client.metrics()["nvme_corrupt"]
        sequence, answer = self.sequence(client, derived, range(4))
        self.assertEqual(answer["status"], bytes([IN_DRAM | HELD, IN_DRAM | HELD, IN_DRAM, IN_DRAM | HELD]))
        self.assertEqual(client.metrics()["nvme_corrupt"], corrupt + 1)
        picked = self.select(client, sequence, self.query(), min_blocks=1)
        self.assertTrue(all(2 in blocks for blocks in lists_of(picked)))
        self.assertEqual(picked["no_summary"], 1)
        _, answer = self.sequence(client, derived, range(6), build=True)
        self.assertEqual((answer["summaries"], answer["built"]), (6, 2))
        np.testing.assert_array_equal(self.read_summaries(client, derived, raw.shape[2], 6), raw)

    def test_other_connections_see_nothing_of_a_sequence(self):
        client, ns, _, _ = self.stored(4)
        derived = self.summaries(client, ns)
        sequence, _ = self.sequence(client, derived, range(4), build=True)
        other, other_ns = self.again()
        self.refused(NOT_FOUND, other.call, "sequence.open", ns=derived)
        self.summaries(other, other_ns)
        for call in (("sequence.append", {"keys": keys(1)}), ("sequence.close", {}), ("sequence.prefetch", {"index": u32(0)})):
            self.refused(NOT_FOUND, other.call, call[0], sequence=sequence, **call[1])
        self.refused(NOT_FOUND, self.select, other, sequence, self.query())

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_other_tenants(self):
        client, ns, _, _ = self.stored(4)
        derived = self.summaries(client, ns)
        other = self.client(uid=OTHER_UID)
        mine = other.open(dict(IDENTITY, model=self.id()))
        self.assertNotEqual(mine, ns)
        self.refused(NOT_FOUND, other.call, "summary.open", ns=ns, method=1, **SHAPE)
        self.refused(NOT_FOUND, other.call, "summary.build", ns=derived, keys=keys(0))
        self.refused(NOT_FOUND, other.call, "sequence.open", ns=derived)
        theirs = self.summaries(other, mine)
        self.assertNotEqual(theirs, derived)
        self.assertEqual(self.sequence(other, theirs, range(4), build=True)[1]["missing"], 4)

    def test_a_sequence_that_nobody_uses_ends(self):
        client, ns, _, _ = self.stored(4)
        derived = self.summaries(client, ns)
        sequence = client.call("sequence.open", ns=derived, lease_ms=400)["sequence"]
        began = used = time.monotonic()
        client.call("sequence.append", sequence=sequence, keys=keys(*range(4)), build=True)
        while time.monotonic() < began + 1.2:
            asked = time.monotonic()
            try:
                self.select(client, sequence, self.query())
            except Refused as refused:  # this machine is slow
                self.assertEqual((refused.code, time.monotonic() - used > 0.2), (NOT_FOUND, True))
                break
            used = asked
        self.until(lambda: client.metrics()["sequences_expired"] > 0)
        self.refused(NOT_FOUND, self.select, client, sequence, self.query())

    def test_a_sequence_keeps_its_blocks_and_what_it_holds(self):
        client, ns, _, _ = self.stored(8)
        derived = self.summaries(client, ns)
        sequence, _ = self.sequence(client, derived, range(8), build=True)
        first = lists_of(self.select(client, sequence, self.query(), min_blocks=3))
        busy = client.call("evict", ns=derived)
        self.assertEqual((busy["blocks"], busy["busy"]), (0, 8), "held")
        self.assertEqual(lists_of(self.select(client, sequence, self.query(), min_blocks=3)), first, "what it holds stays")
        self.assertEqual(client.hits(derived, 0), 0)
        gone = first[0][0]
        client.call("namespace.purge", ns=ns, keys=keys(gone))
        self.assertEqual(client.hits(ns, gone), 0)
        left = self.select(client, sequence, self.query(), min_blocks=3)
        self.assertEqual(lists_of(left), [[block for block in blocks if block != gone] for blocks in first])
        self.assertEqual(left["evicted"], sum(gone in blocks for blocks in first))
        self.assertEqual(client.call("sequence.prefetch", sequence=sequence, index=u32(gone, 7))["status"], bytes([MISS, OK]))
        client.call("sequence.close", sequence=sequence)
        self.until(lambda: not client.call("ls", ns=derived)["blocks"], "the last use")
        _, answer = self.sequence(client, derived, [7], build=True)
        self.assertEqual((answer["summaries"], answer["built"]), (1, 1))

    def test_a_purge_of_a_block_that_lost_its_copies(self):
        client, ns, region, kv = self.stored(4)
        derived = self.summaries(client, ns)
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        sequence, _ = self.sequence(client, derived, range(4))
        self.spoil(kv[2].tobytes()[:64], 7)
        self.assertEqual(region.load([2], [2]), [FAILED])
        purged = client.call("namespace.purge", ns=ns, keys=keys(1, 2, 9))
        self.assertEqual((purged["blocks"], purged["busy"], purged["missing"]), (0, 1, 2))
        region.memory[2 * region.size:3 * region.size] = kv[2].tobytes()
        self.assertEqual(region.dump([2], [2]), [OK])
        self.assertEqual(client.hits(ns, 2), 1, "stored again")
        client.call("sequence.close", sequence=sequence)

    def test_closing_the_connection_ends_everything(self):
        client, ns, _, _ = self.stored()
        derived = self.summaries(client, ns, build=True)
        for _ in range(5):
            sequence, _ = self.sequence(client, derived, range(self.blocks), build=True)
        for _ in range(20):  # answers that nobody reads
            client.begin("select", sequences=[sequence] * 8, layers=[0] * 8, q=np.tile(self.query(), (8, 1, 1)).tobytes(),
                         q_dtype=1, q_heads=4, sparse_ratio=0.3, prefetch=1)
            client.begin("sequence.append", sequence=sequence, keys=keys(*range(self.blocks)), build=True)
            client.begin("summary.build", ns=derived, keys=keys(*range(self.blocks)))
        client.close()
        other, _ = self.again()
        self.until(lambda: other.metrics()["sequences"] == 0 and other.metrics()["requests_active"] == 0)
        self.assertEqual(other.metrics()["summaries_held_bytes"], 0)

    def test_bounds(self):
        client, ns, _, _ = self.stored(2)
        derived = self.summaries(client, ns)
        self.refused(INVALID, client.call, "sequence.open", ns=derived, part=1)
        sequences = [client.call("sequence.open", ns=derived)["sequence"] for _ in range(4096)]
        self.refused(BUSY, client.call, "sequence.open", ns=derived)
        client.call("sequence.close", sequence=sequences[0])
        self.refused(NOT_FOUND, client.call, "sequence.append", sequence=sequences[0], keys=keys(0))
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        self.refused(INVALID, client.call, "sequence.append", sequence=sequence, keys=bytes(17))
        self.refused(INVALID, client.call, "sequence.append", sequence=sequence, keys=b"")
        self.assertEqual(client.call("sequence.append", sequence=sequence, keys=bytes(16) * 16384)["missing"], 16384)
        for _ in range(100):  # the first append may end before the daemon reads the second
            two = [client.begin("sequence.append", _more=more, sequence=sequence, keys=keys(0, 1) * 2000, build=True) for more in (True, False)]
            self.assertEqual(client.wait(two[0])["summaries"], 4000)
            try:
                self.assertEqual(client.wait(two[1])["summaries"], 4000)
            except Refused as refused:
                self.assertEqual(refused.code, BUSY)
                return
        self.fail("two appends to one sequence were never refused")

    def test_not_more_than_a_quarter_of_the_arena_is_held(self):
        client, ns, _, _ = self.stored(1)
        derived = self.summaries(client, ns)
        sequence = client.call("sequence.open", ns=derived)["sequence"]
        answer = client.call("sequence.append", sequence=sequence, keys=keys(0) * 16384, build=True)
        held = client.metrics()["summaries_held_bytes"]
        self.assertEqual((answer["dram"], answer["summaries"]), (16384, (16 << 20) * answer["summaries"] // held))
        self.assertLessEqual(held, 16 << 20)
        self.assertGreater(held, 15 << 20)
        self.assertEqual(self.select(client, sequence, self.query(), limit=100)["no_summary"], 16384 - answer["summaries"])
        client.call("sequence.close", sequence=sequence)
        self.assertEqual(client.metrics()["summaries_held_bytes"], 0)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
