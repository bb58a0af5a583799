#!/usr/bin/env python3
"""Digests, chains and selections against a real daemon, through second_client.py: what it builds and chooses is compared with
the numpy of tests/sparse/methods.py; then restarts, other connections, evictions, damage, and what hostile clients send.
"""

import faulthandler
import hashlib
import os
import shutil
import struct
import sys
import tempfile
import time
import unittest

try:
    import numpy as np
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sparse"))
    import methods
    from second_client import (BUSY, EXISTS, FAILED, INVALID, MISS, NOT_FOUND, OK, OTHER_UID, SHUTDOWN, TIMEOUT_S, Case,
                               Client, Daemon, Refused, Region, fingerprint_form, keys, u32)
except ImportError:  # another Python than Debian's is first in PATH
    if __name__ != "__main__" or sys.executable == "/usr/bin/python3":
        raise
    os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)

SUITE_TIMEOUT_S = 300
TOKENS, KV_HEADS, HEAD_DIM, LAYERS = 16, 2, 64, 3
K_BYTES = TOKENS * KV_HEADS * HEAD_DIM * 2
IDENTITY = {"model": "retrieval", "dtype": "f16", "layout": "test/1", "block_tokens": TOKENS, "key_bytes": 16, "parts": 1,
            "shards": [LAYERS], "shard_bytes": 2 * K_BYTES}  # K, then V
SHAPE = {"dtype": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM,
         "k_token_stride": KV_HEADS * HEAD_DIM * 2, "k_head_stride": HEAD_DIM * 2, "v_offset": K_BYTES,
         "v_token_stride": KV_HEADS * HEAD_DIM * 2, "v_head_stride": HEAD_DIM * 2}
IN_DRAM, ON_NVME, ON_SHARE, HELD = 1, 2, 3, 4
DEADLINE, CANCELLED_CODE = 6, 7
MEAN = {"method": 1}
METHODS = {"mean": (1, {}), "submean": (2, {"run": 4}), "box": (3, {}), "hash": (4, {"bits": 64, "seed": 7}),
           "stats": (5, {}), "tokens": (6, {"chosen": 2}), "rest": (6, {"chosen": 2, "rest": 1})}


def spec_of(name):
    return methods.Spec("tokens" if name == "rest" else name, rest=int(name == "rest"), tokens=TOKENS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM,
                        run=4, bits=64, seed=7, stand_ins=2)


def random_kv(blocks, seed):
    """f16[blocks][layers][K, V][tokens][heads][channels]"""
    shape = (blocks, LAYERS, 2, TOKENS, KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def lists_of(answer):
    """[list of chosen blocks]"""
    counts = struct.unpack(f"<{len(answer['counts']) // 4}I", answer["counts"])
    index, at, out = np.frombuffer(answer["index"], "<u4"), 0, []
    for count in counts:
        out.append(index[at:at + count].tolist())
        at += count
    assert at == len(index)
    return out


class Retrieval(Case):
    blocks = 40

    def stored(self, blocks=None, client=None, **identity):
        """A client with a base namespace whose blocks, named 0 to n, are dumped."""
        blocks = blocks or self.blocks
        client, identity = client or self.client(), dict(IDENTITY, model=self.id(), **identity)
        ns = client.open(identity)
        region = Region(client, ns, identity, blocks)
        kv = random_kv(blocks, 1)
        region.memory[:] = kv.tobytes()
        self.assertEqual(set(region.dump(range(blocks), range(blocks))), {OK})
        return client, ns, region, kv

    def again(self, daemon=None, **identity):
        """Another connection to what stored() opened."""
        client = Client(daemon or self.daemon)
        self.addCleanup(client.close)
        return client, client.open(dict(IDENTITY, model=self.id(), **identity))

    def digests(self, client, ns, method="mean", **more):
        number, params = METHODS[method]
        return client.call("digest.open", ns=ns, method=number, **params, **SHAPE, **more)["ns"]

    def build(self, client, derived, names, **more):
        return list(client.call("digest.build", ns=derived, keys=keys(*names), **more)["status"])

    def chain(self, client, derived, names, **more):
        chain = client.call("chain.open", ns=derived)["chain"]
        return chain, client.call("chain.append", chain=chain, keys=keys(*names), **more)

    def metrics(self, client):
        return client.call("stats")["metrics"]

    def query(self, rows=1, heads=4, seed=2):
        return np.random.default_rng(seed).standard_normal((rows, heads, HEAD_DIM)).astype(np.float16)

    def select(self, client, chain, q, shard=0, **more):
        params = {"min_blocks": 1, **more}
        return client.call("select", chains=[chain], shards=[shard], q=q.tobytes(), q_dtype=1, q_heads=q.shape[1],
                           rows=q.shape[0], **params)

    def read_digests(self, client, derived, shard_bytes, count):
        """u8[count][layers][shard_bytes] through a region of the digests' namespace."""
        region = Region(client, derived, {"shards": [LAYERS], "shard_bytes": shard_bytes}, count)
        self.assertEqual(region.load(range(count), range(count)), [OK] * count)
        raw = np.frombuffer(region.memory[:], np.uint8).reshape(count, LAYERS, shard_bytes).copy()
        client.call("region.unregister", region=region.number)
        return raw


class Digests(Retrieval):
    def test_every_method_builds_what_numpy_builds(self):
        client, ns, _, kv = self.stored(8)
        for name, (number, params) in METHODS.items():
            with self.subTest(method=name):
                opened = client.call("digest.open", ns=ns, method=number, **params, **SHAPE)
                self.assertEqual(opened["shard_bytes"], methods.digest_bytes(spec_of(name)))
                self.assertEqual(self.build(client, opened["ns"], range(8)), [OK] * 8)
                raw = self.read_digests(client, opened["ns"], opened["shard_bytes"], 8)
                for layer in range(LAYERS):
                    right = methods.pack(spec_of(name), methods.build(spec_of(name), kv[:, layer, 0], kv[:, layer, 1]))
                    np.testing.assert_array_equal(raw[:, layer], right)

    def test_the_namespace_follows_from_the_spec(self):
        client, ns, _, _ = self.stored(2)
        one = client.call("digest.open", ns=ns, method=1, **SHAPE)
        self.assertEqual(client.call("digest.open", ns=ns, method=1, run=3, seed=9, **SHAPE), one, "what mean ignores")
        other, other_ns = self.again()
        self.assertEqual(other.call("digest.open", ns=other_ns, method=1, **SHAPE), one)
        different = [dict(SHAPE, method=1, kind=1), dict(SHAPE, method=3), dict(SHAPE, method=1, dtype=2),
                     dict(SHAPE, method=1, k_offset=128, kv_heads=1)]
        prints = {client.call("digest.open", ns=ns, **spec)["fingerprint"] for spec in different}
        self.assertEqual(len(prints | {one["fingerprint"]}), 5)
        listed = {entry["fingerprint"]: entry for entry in client.call("namespace.list", limit=4096)["namespaces"]}
        entry = listed[one["fingerprint"]]
        base = listed[client.call("namespace.open", **dict(IDENTITY, model=self.id()))["fingerprint"]]
        spec = struct.pack("<8IQ64x6I6Q", 1, 1, 0, 0, 0, 0, 0, 0, 0, SHAPE["dtype"], TOKENS, KV_HEADS, HEAD_DIM, 0, 0,
                           0, SHAPE["k_token_stride"], SHAPE["k_head_stride"], 0, 0, 0)
        identity = dict(IDENTITY, model=self.id(), dtype="digest", layout="digest/1/mean", shard_bytes=one["shard_bytes"],
                        salt=hashlib.sha256(base["fingerprint"] + spec).digest())
        form = fingerprint_form(client.limits["tenant"], identity)
        self.assertEqual(hashlib.sha256(form).digest(), one["fingerprint"], "as docs/retrieval.md and the page say")
        self.assertEqual((entry["dtype"], entry["layout"], entry["model"], entry["shard_bytes"]),
                         ("digest", "digest/1/mean", self.id(), one["shard_bytes"]))

    def test_refused_specs(self):
        client, ns, _, _ = self.stored(1)
        good = dict(SHAPE, ns=ns, method=1)
        for wrong in ({"method": 7}, {"method": 255}, {"kv_heads": 1024}, {"head_dim": 63}, {"head_dim": 1024},
                      {"k_offset": 4294967295}, {"k_token_stride": 8192}, {"k_token_stride": 4294967294},
                      {"k_token_stride": 3}, {"k_offset": 1}, {"rope_dim": 64}, {"dtype": 0},
                      {"method": 2, "run": 3}, {"method": 2}, {"method": 2, "run": 4, "keep": b"\x01"},
                      {"method": 4, "bits": 65}, {"method": 4}, {"method": 6}, {"method": 6, "chosen": 17}, {"method": 6, "chosen": 16, "rest": 1},
                      {"method": 5, "v_offset": 8000}, {"sparse_ratio": 0.5}, {"seed": -1}, {"build": 1}):
            self.refused(INVALID, client.call, "digest.open", **dict(good, **wrong))
        self.refused(NOT_FOUND, client.call, "digest.open", **dict(good, ns=4000000000))
        self.assertEqual(client.call("digest.open", **good)["ns"] > 0, True)

    def test_single_flight_and_a_second_client_builds_nothing(self):
        client, ns, _, _ = self.stored()
        other, other_ns = self.again()
        derived, other_derived = self.digests(client, ns), self.digests(other, other_ns)
        self.assertEqual(derived, other_derived)
        before = self.metrics(client)["digest_builds"]
        both = [c.begin("digest.build", ns=derived, keys=keys(*range(self.blocks))) for c in (client, other)]
        statuses = [list(c.wait(msgid)["status"]) for c, msgid in zip((client, other), both)]
        self.assertTrue(set(sum(statuses, [])) <= {OK, EXISTS}, statuses)
        self.assertEqual(self.metrics(client)["digest_builds"] - before, self.blocks)
        self.assertEqual(self.build(other, derived, range(self.blocks)), [EXISTS] * self.blocks)
        _, answer = self.chain(other, derived, range(self.blocks), build=True)
        self.assertEqual((answer["digests"], answer.get("built", 0)), (self.blocks, 0))
        self.assertEqual(self.metrics(client)["digest_builds"] - before, self.blocks)

    def test_built_as_blocks_are_stored(self):
        client, ns = self.again()
        derived = self.digests(client, ns, build=True)
        worker, _, _, kv = self.stored(20)
        self.until(lambda: client.hits(derived, *range(20)) == 20, "their digests")
        raw = self.read_digests(client, derived, methods.digest_bytes(spec_of("mean")), 20)
        right = methods.pack(spec_of("mean"), methods.build(spec_of("mean"), kv[:, 1, 0]))
        np.testing.assert_array_equal(raw[:, 1], right)
        client.close()  # nobody wants them any more
        self.until(lambda: worker.call("stats")["metrics"]["connections"] == 1)
        region = Region(worker, worker.open(dict(IDENTITY, model=self.id())), IDENTITY, 1)
        builds = self.metrics(worker)["digest_builds"]
        self.assertEqual(region.dump(["later"], [0]), [OK])
        self.assertEqual(self.metrics(worker)["digest_builds"], builds)

    def test_what_can_not_be_built(self):
        client, ns, region, _ = self.stored(2)
        derived = self.digests(client, ns)
        self.assertEqual(self.build(client, derived, [0, "nobody", 1]), [OK, MISS, OK])
        self.refused(INVALID, client.call, "digest.build", ns=derived, keys=bytes(17))
        self.refused(INVALID, client.call, "digest.build", ns=derived, keys=keys(0), part=2)
        self.refused(NOT_FOUND, client.call, "digest.build", ns=ns, keys=keys(0))
        by_hand, _ = self.again()
        self.refused(NOT_FOUND, by_hand.call, "digest.build", ns=derived, keys=keys(0))
        client.call("evict", ns=ns, keys=keys(0))
        orphans = self.metrics(client)["digest_orphans"]
        self.assertEqual(self.build(client, derived, [0]), [EXISTS])
        self.assertEqual(self.metrics(client)["digest_orphans"], orphans + 1)

    def test_a_worker_dumps_them_itself(self):
        client, ns, _, kv = self.stored(4)
        opened = client.call("digest.open", ns=ns, method=1, **SHAPE)
        region = Region(client, opened["ns"], {"shards": [LAYERS], "shard_bytes": opened["shard_bytes"]}, 4)
        built = [methods.pack(spec_of("mean"), methods.build(spec_of("mean"), kv[:, layer, 0])) for layer in range(LAYERS)]
        region.memory[:] = np.stack(built, 1).tobytes()
        self.assertEqual(region.dump(range(4), range(4)), [OK] * 4)
        self.assertEqual(self.build(client, opened["ns"], range(4)), [EXISTS] * 4)
        _, answer = self.chain(client, opened["ns"], range(4))
        self.assertEqual(answer["digests"], 4)

    def test_blocks_on_nvme_are_read_up(self):
        client, ns, _, kv = self.stored(12)
        derived = self.digests(client, ns)
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        self.assertEqual(client.tiers(ns, *range(12)), [ON_NVME] * 12)
        self.assertEqual(self.build(client, derived, range(12)), [OK] * 12)
        raw = self.read_digests(client, derived, methods.digest_bytes(spec_of("mean")), 12)
        np.testing.assert_array_equal(
            raw[:, 2], methods.pack(spec_of("mean"), methods.build(spec_of("mean"), kv[:, 2, 0])))


class Chains(Retrieval):
    def test_append_tells_tiers_and_digests(self):
        client, ns, _, _ = self.stored(10)
        derived = self.digests(client, ns)
        self.build(client, derived, range(0, 10, 2))
        chain, answer = self.chain(client, derived, [*range(10), "nobody", 3])
        self.assertEqual(answer, {"blocks": 10, "dram": 10, "missing": 2, "digests": 5,
                                  "status": bytes([IN_DRAM | HELD, IN_DRAM] * 5 + [0, 0])})
        more = client.call("chain.append", chain=chain, keys=keys(3, 4, 5), build=True)
        self.assertEqual(more, {"blocks": 13, "dram": 3, "digests": 3, "built": 2, "status": bytes([IN_DRAM | HELD] * 3)})
        stats = self.metrics(client)
        self.assertEqual((stats["chains"], stats["chain_blocks"]), (1, 13))
        self.assertGreater(stats["digest_held_bytes"], 0)
        client.call("chain.close", chain=chain)
        stats = self.metrics(client)
        self.assertEqual((stats["chains"], stats["chain_blocks"], stats["digest_held_bytes"]), (0, 0, 0))
        for method in ("chain.close", "chain.append", "chain.prefetch"):
            more = {"chain.append": {"keys": keys(1)}, "chain.prefetch": {"index": u32(0)}}.get(method, {})
            self.refused(NOT_FOUND, client.call, method, chain=chain, **more)

    def test_digests_that_lie_on_nvme_come_back(self):
        client, ns, _, _ = self.stored(30)
        derived = self.digests(client, ns)
        self.build(client, derived, range(30))
        self.settled(client, ns)
        self.settled(client, derived)
        client.call("evict", ns=ns, tier=1)
        client.call("evict", ns=derived, tier=1)
        builds = self.metrics(client)["digest_builds"]
        _, answer = self.chain(client, derived, range(30), build=True)
        self.assertEqual(answer, {"blocks": 30, "nvme": 30, "digests": 30, "status": bytes([ON_NVME | HELD] * 30)})
        self.assertEqual(self.metrics(client)["digest_builds"], builds)

    def test_a_damaged_digest_is_built_anew_or_missing(self):
        client, ns, _, kv = self.stored(6)
        derived = self.digests(client, ns, "box")
        self.build(client, derived, range(6))
        self.settled(client, derived)
        raw = self.read_digests(client, derived, methods.digest_bytes(spec_of("box")), 6)
        client.call("evict", ns=derived, tier=1)
        for block in (2, 4):
            self.spoil(raw[block].tobytes()[:64])
        corrupt = self.metrics(client)["nvme_corrupt"]
        chain, answer = self.chain(client, derived, range(4))
        self.assertEqual(answer["status"], bytes([IN_DRAM | HELD, IN_DRAM | HELD, IN_DRAM, IN_DRAM | HELD]))
        self.assertEqual(self.metrics(client)["nvme_corrupt"], corrupt + 1)
        picked = self.select(client, chain, self.query(), min_blocks=1)
        self.assertTrue(all(2 in blocks for blocks in lists_of(picked)))
        self.assertEqual(picked["no_digest"], 1)
        _, answer = self.chain(client, derived, range(6), build=True)
        self.assertEqual((answer["digests"], answer["built"]), (6, 2))
        np.testing.assert_array_equal(self.read_digests(client, derived, raw.shape[2], 6), raw)

    def spoil(self, needle):
        for path in [os.path.join(at, name) for at, _, names in os.walk(self.daemon.store) for name in names]:
            with open(path, "r+b") as file:
                content, at = file.read(), -1
                while (at := content.find(needle, at + 1)) >= 0:
                    file.seek(at + 7)
                    file.write(bytes([needle[7] ^ 1]))

    def test_other_connections_see_nothing_of_a_chain(self):
        client, ns, _, _ = self.stored(4)
        derived = self.digests(client, ns)
        chain, _ = self.chain(client, derived, range(4), build=True)
        other, other_ns = self.again()
        self.refused(NOT_FOUND, other.call, "chain.open", ns=derived)
        self.digests(other, other_ns)
        for call in (("chain.append", {"keys": keys(1)}), ("chain.close", {}), ("chain.prefetch", {"index": u32(0)})):
            self.refused(NOT_FOUND, other.call, call[0], chain=chain, **call[1])
        self.refused(NOT_FOUND, self.select, other, chain, self.query())

    @unittest.skipUnless(os.geteuid() == 0, "takes another uid")
    def test_other_tenants(self):
        client, ns, _, _ = self.stored(4)
        derived = self.digests(client, ns)
        other = self.client(uid=OTHER_UID)
        mine = other.open(dict(IDENTITY, model=self.id()))
        self.assertNotEqual(mine, ns)
        self.refused(NOT_FOUND, other.call, "digest.open", ns=ns, method=1, **SHAPE)
        self.refused(NOT_FOUND, other.call, "digest.build", ns=derived, keys=keys(0))
        self.refused(NOT_FOUND, other.call, "chain.open", ns=derived)
        theirs = self.digests(other, mine)
        self.assertNotEqual(theirs, derived)
        self.assertEqual(self.chain(other, theirs, range(4), build=True)[1]["missing"], 4)

    def test_a_chain_that_nobody_uses_ends(self):
        client, ns, _, _ = self.stored(4)
        derived = self.digests(client, ns)
        chain = client.call("chain.open", ns=derived, lease_ms=400)["chain"]
        client.call("chain.append", chain=chain, keys=keys(*range(4)), build=True)
        began = used = time.monotonic()
        while time.monotonic() < began + 1.2:
            try:
                self.select(client, chain, self.query())
            except Refused as refused:  # this machine is slow
                self.assertEqual((refused.code, time.monotonic() - used > 0.2), (NOT_FOUND, True))
                break
            used = time.monotonic()
        self.until(lambda: self.metrics(client)["chains_expired"] > 0)
        self.refused(NOT_FOUND, self.select, client, chain, self.query())

    def test_a_chain_keeps_its_blocks_and_what_it_holds(self):
        client, ns, _, _ = self.stored(8)
        derived = self.digests(client, ns)
        chain, _ = self.chain(client, derived, range(8), build=True)
        first = lists_of(self.select(client, chain, self.query(), min_blocks=3))
        busy = client.call("evict", ns=derived)
        self.assertEqual((busy["blocks"], busy["busy"]), (0, 8), "held")
        self.assertEqual(lists_of(self.select(client, chain, self.query(), min_blocks=3)), first, "what it holds stays")
        self.assertEqual(client.hits(derived, 0), 0)
        gone = first[0][0]
        client.call("namespace.purge", ns=ns, keys=keys(gone))
        self.assertEqual(client.hits(ns, gone), 0)
        left = self.select(client, chain, self.query(), min_blocks=3)
        self.assertEqual(lists_of(left), [[block for block in blocks if block != gone] for blocks in first])
        self.assertEqual(left["gone"], sum(gone in blocks for blocks in first))
        self.assertEqual(client.call("chain.prefetch", chain=chain, index=u32(gone, 7))["status"], bytes([MISS, OK]))
        client.call("chain.close", chain=chain)
        self.until(lambda: not client.call("ls", ns=derived)["blocks"], "the last use")
        _, answer = self.chain(client, derived, [7], build=True)
        self.assertEqual((answer["digests"], answer["built"]), (1, 1))

    def test_a_purge_of_a_block_that_lost_its_copies(self):
        client, ns, region, kv = self.stored(4)
        derived = self.digests(client, ns)
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        chain, _ = self.chain(client, derived, range(4))
        self.spoil(kv[2].tobytes()[:64])
        self.assertEqual(region.load([2], [2]), [FAILED])
        purged = client.call("namespace.purge", ns=ns, keys=keys(1, 2, 9))
        self.assertEqual((purged["blocks"], purged["busy"], purged["missing"]), (0, 1, 2))
        region.memory[2 * region.size:3 * region.size] = kv[2].tobytes()
        self.assertEqual(region.dump([2], [2]), [OK])
        self.assertEqual(client.hits(ns, 2), 1, "stored again")
        client.call("chain.close", chain=chain)

    def test_a_purge_of_all_under_a_chain(self):
        client, ns, _, _ = self.stored(8)
        derived = self.digests(client, ns)
        chain, _ = self.chain(client, derived, range(8), build=True)
        client.call("namespace.purge", ns=ns)
        answer = self.select(client, chain, self.query(), min_blocks=4)
        self.assertEqual((answer["index"], answer["gone"]), (b"", 8))
        self.assertEqual(self.chain(client, derived, range(8), build=True)[1]["missing"], 8)
        client.close()
        other, _ = self.again()
        self.until(lambda: not other.call("ls", ns=other.open(dict(IDENTITY, model=self.id())))["blocks"])

    def test_closing_the_connection_ends_everything(self):
        client, ns, _, _ = self.stored()
        derived = self.digests(client, ns, build=True)
        for _ in range(5):
            chain, _ = self.chain(client, derived, range(self.blocks), build=True)
        for _ in range(20):  # answers that nobody reads
            client.begin("select", chains=[chain] * 8, shards=[0] * 8, q=np.tile(self.query(), (8, 1, 1)).tobytes(),
                         q_dtype=1, q_heads=4, sparse_ratio=0.3, prefetch=1)
            client.begin("chain.append", chain=chain, keys=keys(*range(self.blocks)), build=True)
            client.begin("digest.build", ns=derived, keys=keys(*range(self.blocks)))
        client.close()
        other, _ = self.again()
        self.until(lambda: self.metrics(other)["chains"] == 0 and self.metrics(other)["requests_active"] == 0)
        self.assertEqual(self.metrics(other)["digest_held_bytes"], 0)

    def test_bounds(self):
        client, ns, _, _ = self.stored(2)
        derived = self.digests(client, ns)
        self.refused(INVALID, client.call, "chain.open", ns=derived, part=1)
        chains = [client.call("chain.open", ns=derived)["chain"] for _ in range(4096)]
        self.refused(BUSY, client.call, "chain.open", ns=derived)
        client.call("chain.close", chain=chains[0])
        self.refused(NOT_FOUND, client.call, "chain.append", chain=chains[0], keys=keys(0))
        chain = client.call("chain.open", ns=derived)["chain"]
        self.refused(INVALID, client.call, "chain.append", chain=chain, keys=bytes(17))
        self.refused(INVALID, client.call, "chain.append", chain=chain, keys=b"")
        self.assertEqual(client.call("chain.append", chain=chain, keys=bytes(16) * 16384)["missing"], 16384)
        two = [client.begin("chain.append", chain=chain, keys=keys(0, 1) * 2000, build=True) for _ in range(2)]
        self.assertEqual(client.wait(two[0])["digests"], 4000)
        self.refused(BUSY, client.wait, two[1])

    def test_not_more_than_a_quarter_of_the_arena_is_held(self):
        client, ns, _, _ = self.stored(1)
        derived = self.digests(client, ns)
        chain = client.call("chain.open", ns=derived)["chain"]
        answer = client.call("chain.append", chain=chain, keys=keys(0) * 16384, build=True)
        held = self.metrics(client)["digest_held_bytes"]
        self.assertEqual((answer["dram"], answer["digests"]), (16384, (16 << 20) * answer["digests"] // held))
        self.assertLessEqual(held, 16 << 20)
        self.assertGreater(held, 15 << 20)
        self.assertEqual(self.select(client, chain, self.query(), limit=100)["no_digest"], 16384 - answer["digests"])
        client.call("chain.close", chain=chain)
        self.assertEqual(self.metrics(client)["digest_held_bytes"], 0)


class Selections(Retrieval):
    def expected(self, name, kv, layer, q, reduce="max", heads="per_head"):
        spec = spec_of(name)
        raw = methods.score(spec, methods.build(spec, kv[:, layer, 0], kv[:, layer, 1]), q.astype(np.float32))
        return methods.reduce_heads(methods.reduce_group(raw, KV_HEADS, reduce), heads)

    def test_every_method_chooses_what_numpy_chooses(self):
        client, ns, _, kv = self.stored()
        q = self.query(rows=2)
        for name in METHODS:
            chain, _ = self.chain(client, self.digests(client, ns, name), range(self.blocks), build=True)
            for layer, reduce, heads in ((0, "max", "per_head"), (2, "mean", "per_head"), (1, "max", "sum"), (2, "max", "max")):
                with self.subTest(method=name, layer=layer, reduce=reduce, heads=heads):
                    scores = self.expected(name, kv, layer, q, reduce, heads)
                    answer = self.select(client, chain, q, layer, reduce=["max", "mean"].index(reduce), scores=True,
                                         heads=["per_head", "sum", "max"].index(heads), sparse_ratio=0.3, min_blocks=4,
                                         init_window_sz=1, local_window_sz=2)
                    right = [methods.choose_topk(row, methods.count_topk(self.blocks)).tolist() for row in scores]
                    self.assertEqual(lists_of(answer), right)
                    got = np.frombuffer(answer["scores"], "<f4")
                    want = np.concatenate([row[c] for row, c in zip(scores, right)])
                    np.testing.assert_allclose(got, want, rtol=1e-6 if name == "rest" else 0)  # which has exp() in it

    def test_mass_and_softmax(self):
        client, ns, _, kv = self.stored()
        q = self.query()
        chain, _ = self.chain(client, self.digests(client, ns, "stats"), range(self.blocks), build=True)
        scores = self.expected("stats", kv, 0, q)
        answer = self.select(client, chain, q, policy=1, eps=0.6, beta_m=1.0, init_window_sz=1, local_window_sz=1)
        right = [methods.choose_mass(row, 0.6, 1.0, 1, 1) for row in scores]
        for blocks, best in zip(lists_of(answer), right):
            self.assertLessEqual(abs(len(blocks) - len(best)), 1)  # numpy's exp is another one
            self.assertGreaterEqual(len(set(blocks) & set(best.tolist())), len(best) - 1)
        summed = self.select(client, chain, q, reduce=2, heads=1, min_blocks=5, scores=True)
        self.assertEqual([len(blocks) for blocks in lists_of(summed)], [5])

    def test_many_rows_in_one_message(self):
        client, ns, _, kv = self.stored()
        derived = self.digests(client, ns)
        chains = [self.chain(client, derived, range(n), build=True)[0] for n in (self.blocks, 5, 17)]
        chains.append(client.call("chain.open", ns=derived)["chain"])  # no blocks
        rows = [(chains[i % 4], i % LAYERS, [self.blocks, 5, 17, 0][i % 4]) for i in range(200)]
        q = np.concatenate([self.query(seed=i) for i in range(200)])
        answer = client.call("select", chains=[c for c, _, _ in rows], shards=[s for _, s, _ in rows], q=q.tobytes(), q_dtype=1,
                             q_heads=4, min_blocks=3)
        got = lists_of(answer)
        self.assertEqual(len(got), 400)
        for i, (_, layer, n) in enumerate(rows):
            scores = self.expected("mean", kv[:n], layer, q[i:i + 1]) if n else np.zeros((2, 0))
            self.assertEqual(got[2 * i:2 * i + 2], [methods.choose_topk(row, min(3, n), 0, 0).tolist() for row in scores], i)

    def test_queries_of_every_type(self):
        client, ns, _, kv = self.stored()
        chain, _ = self.chain(client, self.digests(client, ns), range(self.blocks), build=True)
        q = np.round(self.query().astype(np.float32) * 4) / 4  # exact in all of them
        bf16 = (q.view(np.uint32) >> 16).astype(np.uint16)
        answers = [client.call("select", chains=[chain], shards=[1], q=data.tobytes(), q_dtype=dtype, q_heads=4, min_blocks=7,
                               scores=True) for dtype, data in enumerate((q, q.astype(np.float16), bf16))]
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(answers[0], answers[2])

    def test_bad_selections(self):
        client, ns, _, _ = self.stored(8)
        derived = self.digests(client, ns)
        chain, _ = self.chain(client, derived, range(8), build=True)
        other, _ = self.chain(client, self.digests(client, ns, "box"), range(8), build=True)
        q = self.query().tobytes()
        good = {"chains": [chain], "shards": [0], "q": q, "q_dtype": 1, "q_heads": 4, "min_blocks": 1}
        self.assertEqual(len(lists_of(client.call("select", **good))), 2)
        for wrong in ({"shards": [LAYERS]}, {"shards": [0, 1]}, {"shards": []}, {"chains": []}, {"q": q[:-2]}, {"q": q + b"xx"},
                      {"q_heads": 3}, {"q_heads": 2}, {"q_heads": 1}, {"rows": 2}, {"rows": 65}, {"q_dtype": 0}, {"q_dtype": 3},
                      {"metric": 2}, {"reduce": 3}, {"heads": 3}, {"policy": 2}, {"eps": 1.5}, {"eps": 1}, {"sparse_ratio": -0.1},
                      {"sparse_ratio": float("nan")}, {"beta": float("inf")}, {"limit": 1 << 21}, {"prefetch": 9},
                      {"chains": [chain, other], "shards": [0, 0], "q": q + q}):
            self.refused(INVALID, client.call, "select", **dict(good, **wrong))
        self.refused(NOT_FOUND, client.call, "select", **dict(good, chains=[0]))
        self.refused(NOT_FOUND, client.call, "select", **dict(good, chains=[chain ^ 1]))
        for bad in (np.nan, np.inf, -np.inf):
            values = self.query()
            values[0, 2, 5] = bad
            said = self.refused(INVALID, client.call, "select", **dict(good, q=values.tobytes()))
            self.assertIn(f"element {2 * HEAD_DIM + 5} ", said.args[2])
        self.refused(INVALID, client.call, "select", **dict(good, metric=1, chains=[other]))

    def test_an_answer_that_is_too_long_is_refused_before_it_is_made(self):
        client, ns, _, _ = self.stored(8)
        derived = self.digests(client, ns)
        chain = client.call("chain.open", ns=derived)["chain"]
        for _ in range(2):
            client.call("chain.append", chain=chain, keys=keys(0, 1, 2, 3) * 500, build=True)
        q = np.tile(self.query(heads=2), (100, 1, 1)).tobytes()
        ask = dict(chains=[chain] * 100, shards=[0] * 100, q=q, q_dtype=1, q_heads=2)
        self.refused(INVALID, client.call, "select", sparse_ratio=1.0, **ask)
        answer = client.call("select", sparse_ratio=1.0, limit=1000, **ask)
        self.assertEqual({len(blocks) for blocks in lists_of(answer)}, {1000})
        self.refused(INVALID, client.call, "select", sparse_ratio=1.0, limit=1000, scores=True, **ask)
        self.assertEqual({len(blocks) for blocks in lists_of(client.call("select", sparse_ratio=0.25, **ask))}, {1000})

    def test_limits_windows_and_nothing(self):
        client, ns, _, _ = self.stored()
        chain, _ = self.chain(client, self.digests(client, ns), range(self.blocks), build=True)
        q = self.query()
        self.assertEqual(lists_of(client.call("select", chains=[chain], shards=[0], q=q.tobytes(), q_dtype=1, q_heads=4)), [[], []])
        windows = self.select(client, chain, q, min_blocks=0, init_window_sz=2, local_window_sz=3)
        last = self.blocks
        self.assertEqual(lists_of(windows), [[0, 1, last - 3, last - 2, last - 1]] * 2)
        self.assertEqual([len(blocks) for blocks in lists_of(self.select(client, chain, q, topk_tokens=100, min_blocks=0))], [7, 7])
        self.assertEqual([len(blocks) for blocks in lists_of(self.select(client, chain, q, sparse_ratio=1.0, limit=6))], [6, 6])

    def test_prefetch_of_what_was_chosen(self):
        client, ns, region, _ = self.stored()
        derived = self.digests(client, ns)
        self.build(client, derived, range(self.blocks))
        self.settled(client, ns)
        client.call("evict", ns=ns, tier=1)
        chain, _ = self.chain(client, derived, range(self.blocks))
        before = self.metrics(client)
        answer = self.select(client, chain, self.query(), min_blocks=6, prefetch=8)
        wanted = sorted(set(sum(lists_of(answer), [])))
        self.until(lambda: client.tiers(ns, *wanted) == [IN_DRAM] * len(wanted), "the chosen blocks")
        self.assertEqual(client.tiers(ns, *range(self.blocks)).count(IN_DRAM), len(wanted))
        self.assertEqual(region.load(wanted, range(len(wanted))), [OK] * len(wanted))
        rest = [block for block in range(self.blocks) if block not in wanted][:5]
        self.refused(INVALID, client.call, "chain.prefetch", chain=chain, index=u32(self.blocks))
        self.refused(INVALID, client.call, "chain.prefetch", chain=chain, index=bytes(5))
        answer = client.call("chain.prefetch", chain=chain, index=u32(*rest, rest[0]), priority=7)
        self.assertEqual(answer["status"], bytes([OK] * 6))
        client.call("chain.close", chain=chain)  # its leases
        client.call("evict", ns=ns, tier=1)
        after = self.metrics(client)
        self.assertEqual(after["prefetch_useful"] - before["prefetch_useful"], len(wanted))
        self.assertEqual(after["prefetch_useless"] - before["prefetch_useless"], 5)

    def test_cancel_and_deadline(self):
        client, ns, _, _ = self.stored(8)
        derived = self.digests(client, ns, "tokens")
        chain = client.call("chain.open", ns=derived)["chain"]
        for _ in range(1):
            client.call("chain.append", chain=chain, keys=keys(*range(8)) * 250, build=True)
        rows = 100
        q = np.tile(self.query(rows=4, heads=8), (rows, 1, 1))[:rows * 4].tobytes()
        long = dict(chains=[chain] * rows, shards=[0] * rows, q=q, q_dtype=1, q_heads=8, rows=4, limit=10, reduce=2)
        codes = []
        for how in ("cancel", "deadline"):
            for _ in range(20):
                msgid = client.begin("select", deadline_ms=1 if how == "deadline" else 0, **long)
                if how == "cancel":
                    client.call("cancel", msgid=msgid)
                try:
                    client.wait(msgid)
                    codes.append(0)
                except Exception as refused:
                    codes.append(refused.code)
        self.assertTrue(set(codes) <= {0, CANCELLED_CODE, DEADLINE}, codes)
        self.assertEqual(len(lists_of(client.call("select", **long))), 2 * rows)


class Restart(Retrieval):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="retrieval.")
        self.addCleanup(shutil.rmtree, self.folder, True)

    @classmethod
    def setUpClass(cls):
        pass

    @classmethod
    def tearDownClass(cls):
        pass

    def run_twice(self, how, **options):
        first = Daemon(folder=self.folder, **options)
        self.daemon = first
        client, ns, _, _ = self.stored()
        derived = self.digests(client, ns)
        self.assertEqual(self.build(client, derived, range(self.blocks)), [OK] * self.blocks)
        chain, _ = self.chain(client, derived, range(self.blocks))
        before = lists_of(self.select(client, chain, self.query(), min_blocks=8))
        if options.get("nvme", True):
            self.settled(client, ns)
            self.settled(client, derived)
        if how == "kill":
            first.kill()
        else:
            self.assertEqual(first.stop(), 0)
        again = self.daemon = Daemon(folder=self.folder, **options)
        client, ns = self.again()
        self.until(lambda: client.call("health")["status"] != "recovering")
        derived = self.digests(client, ns)
        self.until(lambda: client.hits(derived, *range(self.blocks)) == self.blocks)
        chain, answer = self.chain(client, derived, range(self.blocks), build=True)
        self.assertEqual((answer["digests"], answer.get("built", 0)), (self.blocks, 0))
        self.assertEqual(self.metrics(client)["digest_builds"], 0)
        self.assertEqual(lists_of(self.select(client, chain, self.query(), min_blocks=8)), before)
        self.assertEqual(again.stop(), 0)

    def test_stop(self):
        self.run_twice("stop")

    def test_kill(self):
        self.run_twice("kill")

    @unittest.skipUnless(os.path.isdir("/dev/shm"), "needs /dev/shm")
    def test_digests_that_chains_hold_survive_in_dram(self):
        with tempfile.TemporaryDirectory(prefix="retrieval.", dir="/dev/shm") as keep:
            self.run_twice("stop", nvme=False, **{"arena.keep": keep})

    def test_drain_with_chains_selections_and_builds(self):
        daemon = self.daemon = Daemon(folder=self.folder)
        client, ns, _, _ = self.stored()
        derived = self.digests(client, ns, build=True)
        chain, _ = self.chain(client, derived, range(self.blocks), build=True)
        begun = [client.begin("select", chains=[chain], shards=[0], q=self.query().tobytes(), q_dtype=1, q_heads=4, min_blocks=2)
                 for _ in range(50)]
        begun += [client.begin("digest.build", ns=self.digests(client, ns, "box"), keys=keys(*range(self.blocks)))]
        daemon.process.terminate()
        for msgid in begun:
            try:
                client.wait(msgid)
            except Exception as ended:
                self.assertIn(getattr(ended, "code", SHUTDOWN), (SHUTDOWN, CANCELLED_CODE))
        self.assertEqual(daemon.process.wait(TIMEOUT_S), 0)


class Share(Retrieval):
    options = {"nvme": False}

    def test_another_host_finds_the_digests(self):
        with tempfile.TemporaryDirectory(prefix="share.") as folder:
            hosts = [Daemon(nvme=False, **{"share.roots": folder, "share.negative": "50ms", "share.lookup_deadline": "2s"})
                     for _ in range(2)]
            try:
                self.two_hosts(*hosts)
            finally:
                statuses = [host.stop() for host in hosts]
            self.assertEqual(statuses, [0, 0])

    def shared(self, client, ns):
        def written():
            return all(block["shared"] == 1 for block in client.call("ls", ns=ns, limit=4096)["blocks"])
        self.until(written, "every block on the share")

    def two_hosts(self, one, other):
        self.daemon = one
        client, ns, _, _ = self.stored(20)
        derived = self.digests(client, ns)
        self.assertEqual(self.build(client, derived, range(20)), [OK] * 20)
        self.shared(client, ns)
        self.shared(client, derived)
        chain, _ = self.chain(client, derived, range(20))
        best = lists_of(self.select(client, chain, self.query(), min_blocks=5))
        far, far_ns = self.again(other)
        chain, answer = self.chain(far, self.digests(far, far_ns), range(25), build=True)
        self.assertEqual(answer["status"], bytes([ON_SHARE | HELD] * 20 + [0] * 5))
        self.assertEqual((answer["shared"], answer["digests"], answer.get("built", 0), answer["missing"]), (20, 20, 0, 5))
        self.assertEqual(lists_of(self.select(far, chain, self.query(), min_blocks=5)), best)
        self.assertEqual(self.metrics(far)["digest_builds"], 0)
        box = self.digests(far, far_ns, "box")
        self.assertEqual(self.build(far, box, range(20)), [OK] * 20, "bases are read from the share")


class Pressure(Retrieval):
    options = {"arena.size": "4MiB", "nvme": True}

    def test_chains_under_arena_pressure(self):
        """What chains hold stays, while everything else comes and goes."""
        client, ns, region, _ = self.stored(60)
        derived = self.digests(client, ns)
        chain, answer = self.chain(client, derived, range(60), build=True)
        self.assertEqual((answer["blocks"], answer["digests"]), (60, 60))
        best = lists_of(self.select(client, chain, self.query(), min_blocks=9))
        for turn in range(10):
            names = [f"{turn}.{i}" for i in range(60)]
            self.assertTrue(set(region.dump(names, range(60))) <= {OK, 3})
            self.assertEqual(lists_of(self.select(client, chain, self.query(), min_blocks=9)), best)
        self.assertEqual(set(region.load(range(60), range(60))), {OK}, "leased blocks are in some tier")
        answer = client.call("chain.prefetch", chain=chain, index=u32(*range(60)))
        self.assertTrue(set(answer["status"]) <= {OK, 3})


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
