#!/usr/bin/python3
"""Encoded namespaces against clients that are hostile or unlucky: specs, identities that nobody
derived, and counts of namespaces. Encoded bytes that no encoder wrote, layers that do not fit in
the middle of a block, and connections that die."""

import faulthandler
import os
import random
import unittest

from encoding_case import (DIM, ENCODINGS, HEADS, IDENTITY, LAYERS, TENSOR, LAYER, SIZES, SUITE_TIMEOUT_S, TOKENS, UNFIT,
                           EncodingCase, Pages)
from second_client import (BUSY, EXISTS, IN_PROGRESS, INVALID, MISS, NO_ROOM, OK, OTHER_UID, Client, Refused, Region, keys,
                           u32)

HUGE = (1, 16, 1 << 10, 1 << 11, 1 << 16, 1 << 21, 1 << 22, 1 << 31, (1 << 32) - 1)


class Mixed(EncodingCase):
    def mixed(self, parts, model="", encoding="lossless"):
        """A connection for each worker of one engine, its base and encoded namespace, and a region
        for each part."""
        clients = [self.client() for _ in range(parts)]
        bases = [client.open(dict(IDENTITY, model=self.id() + model, parts=parts, layers=[LAYERS])) for client in clients]
        encoded = [client.call("encoding.open", ns=base, encoding=encoding, **SIZES)["ns"] for client, base in zip(clients, bases)]
        return clients[0], bases[0], encoded[0], [Pages(c, ns, 8, part=i) for i, (c, ns) in enumerate(zip(clients, encoded))]

    def count(self, client):
        metrics = client.metrics()
        return metrics["unfit_decoded"] + metrics["unfit_decode_failed"]


class Hostile(Mixed):
    def bytes_of(self, client, engine, blocks=16):
        """A region of the engine's encoded namespace. This client takes it for a namespace of
        bytes."""
        identity = self.identity_of(engine)
        ns = client.open(identity)
        self.assertEqual(ns, engine.ns)
        return Region(client, ns, identity, blocks)

    def test_random_specs(self):
        """Sizes whose products pass 2^32 and 2^64."""
        client = self.client()
        ns = client.open(dict(IDENTITY, model=self.id()))
        chance, opened = random.Random(16), 0
        for turn in range(1500):
            sizes = {name: [chance.choice(HUGE) for _ in range(3)] for name in ("k", "v")[:chance.randrange(1, 3)]}
            if turn % 5 == 0:  # as many bytes as the base's, at least
                sizes = {"k": [TOKENS >> (shift := chance.randrange(5)), HEADS, DIM << shift], "v": [TOKENS * HEADS, 1, DIM]}
            try:
                client.call("encoding.open", ns=ns, encoding=chance.choice(list(ENCODINGS)), dtype=chance.choice(["f16", "bf16"]),
                            order=chance.randrange(2), axis=chance.randrange(2), run=chance.choice([0, 1, 7, 1 << 31]), seed=chance.getrandbits(64), **sizes)
                opened += 1
            except Refused as error:
                self.assertIn(error.code, (INVALID, BUSY), sizes)
        self.assertGreater(opened, 5)

    def test_rows_of_one_element_grow(self):
        """The encoded form may be the longer one."""
        client = self.client()
        sizes = {"dtype": "bf16", "k": [16, 8, 1]}
        ns = client.open(dict(IDENTITY, model=self.id(), layer_bytes=256))
        for name in ("fp8", "int8", "lossless"):
            encoded = client.call("encoding.open", ns=ns, encoding=name, **sizes)
            pages = Pages(client, encoded["ns"], 4, tensors=(256,))
            pages.fill(0)
            self.assertEqual(pages.dump([name], [0]), [OK])
            self.assertEqual(pages.load([name], [1]), [OK])

    def test_any_encoded_bytes_decode(self):
        for name in ENCODINGS:
            for more in ({}, {"order": 1, "axis": 1, "seed": 5}):
                with self.subTest(encoding=name, **more):
                    engine = self.engine(name, **more)
                    raw = self.bytes_of(self.client(), engine)
                    names = [f"{name}{more}{i}" for i in range(16)]
                    encoded = [raw.fill(i) for i in range(12)]
                    for i, byte in enumerate((0, 0x7f, 0x80, 0xff), 12):
                        encoded.append(bytes([byte]) * raw.size)
                        raw.memory[i * raw.size:(i + 1) * raw.size] = encoded[i]
                    self.assertEqual(raw.dump(names, range(16)), [OK] * 16)
                    self.assertEqual(engine.load(names, range(16)), [OK] * 16)
                    for i, data in enumerate(encoded):
                        self.assertEqual(engine.pages.bytes(i), engine.reference.decode(data))

    def test_both_ways_to_open_in_one_connection(self):
        """A region of bytes stays one, and one of tensors stays one."""
        engine, client = self.engine("fp8"), self.client()
        reference, encoded = engine.reference, engine.ns
        base = client.open(dict(IDENTITY, model=self.id()))
        before = self.bytes_of(client, engine)
        plain = engine.pages.fill(0)
        self.assertEqual(engine.dump(["x"], [0]), [OK])
        self.assertEqual(engine.dump(["y"], [0], raw=True), [OK])
        lease = client.call("lookup", ns=encoded, keys=keys("x", "y"), lease_ms=60000)
        self.assertEqual(lease["hits"], 1)
        self.assertEqual(client.call("encoding.open", ns=base, encoding="fp8", **SIZES)["ns"], encoded)
        self.assertEqual(client.open(self.identity_of(engine)), encoded)
        pages = Pages(client, encoded, 4)
        both = client.call("lookup", ns=encoded, keys=keys("x", "y"), lease_ms=60000)
        self.assertEqual(both["hits"], 2)
        self.assertEqual(before.load(["x", "y"], [0, 1], lease=both["lease"]), [OK, MISS])
        self.assertEqual(before.bytes(0), reference.encode(plain))
        self.assertEqual(pages.load(["x", "y"], [0, 1], lease=lease["lease"]), [OK, OK])
        self.assertEqual([pages.bytes(0), pages.bytes(1)], [reference.decode(reference.encode(plain)), plain])
        self.assertEqual(before.dump(["z"], [0], raw=True), [OK])
        self.assertEqual(client.hits(base, "z"), 0)

    def test_a_base_that_is_anothers_is_not_told(self):
        """Anybody who knows a tenant's identity could otherwise ask whether it is here."""
        engine, other = self.engine("fp8"), self.client(uid=OTHER_UID)
        ns = other.open(self.identity_of(engine))
        self.assertNotEqual(ns, engine.ns)
        listed = other.call("namespace.list", limit=4096)["namespaces"]
        self.assertEqual([(entry["ns"], entry["base"]) for entry in listed], [(ns, 0)])
        self.assertEqual(engine.listed()["base"], engine.base)

    def test_sequences_and_bypasses(self):
        """A bypass of one form leaves the other, for sequences as well as lookups."""
        engine = self.engine("fp8")
        call, every = engine.client.call, u32(*range(4))
        for i in range(4):
            engine.pages.fill(i)
        self.assertEqual(engine.dump([0, 1], [0, 1], raw=True), [OK] * 2)
        self.assertEqual(engine.dump([2, 3], [2, 3]), [OK] * 2)
        summaries = call("summary.open", ns=engine.ns, method=1, dtype=2, kv_heads=HEADS, head_dim=DIM, v_head_dim=DIM, v_offset=TENSOR,
                       k_token_stride=HEADS * DIM * 2, k_head_stride=DIM * 2, v_token_stride=HEADS * DIM * 2, v_head_stride=DIM * 2)
        sequences = [call("sequence.open", ns=summaries["ns"])["sequence"] for _ in range(4)]
        self.assertEqual(call("sequence.append", sequence=sequences[0], keys=keys(*range(4)))["blocks"], 4)
        try:
            call("bypass", ns=engine.base, load=1)
            self.assertEqual(list(call("sequence.prefetch", sequence=sequences[0], index=every)["status"]), [MISS, MISS, OK, OK])
            self.assertEqual(call("sequence.append", sequence=sequences[1], keys=keys(2, 3, 0))["blocks"], 2)
            call("bypass", ns=engine.ns, load=1)
            self.assertEqual(list(call("sequence.prefetch", sequence=sequences[0], index=every)["status"]), [MISS] * 4)
            self.assertEqual(call("sequence.append", sequence=sequences[2], keys=keys(*range(4)))["blocks"], 0)
            call("bypass", ns=engine.base, load=2)
            self.assertEqual(list(call("sequence.prefetch", sequence=sequences[0], index=every)["status"]), [OK, OK, MISS, MISS])
            self.assertEqual(call("sequence.append", sequence=sequences[3], keys=keys(0, 1, 2))["blocks"], 2)
        finally:
            for ns in (engine.base, engine.ns):
                call("bypass", ns=ns, load=2)

    def test_unfit_in_the_middle_of_layers(self):
        engine = self.engine("lossless")
        good, bad = engine.pages.fill(0), os.urandom(LAYER)
        engine.pages.put(0, good[:LAYER] + bad + good[2 * LAYER:])
        self.assertEqual([engine.dump(["x"], [0], layer=layer, layers=1) for layer in range(LAYERS)], [[OK], [UNFIT], [OK]])
        self.assertEqual(engine.each("x"), [0])
        self.assertEqual(engine.dump(["x"], [0], raw=True), [OK])
        self.assertEqual(engine.load(["x"], [1]), [OK])
        self.assertEqual(engine.pages.bytes(1), engine.pages.bytes(0))
        other = self.engine("lossless")
        other.pages.put(0, good)
        self.assertIn(other.dump(["x"], [0])[0], (OK, IN_PROGRESS))
        engine.client.close()
        self.until(lambda: other.dump(["x"], [0]) in ([OK], [EXISTS]), "what a connection had begun is given up")
        self.assertEqual(other.load(["x"], [2]), [OK])
        self.assertEqual(other.pages.bytes(2), good)

    def test_parts_of_two_forms_become_raw(self):
        """Some workers of an engine dump blocks raw that did not fit. The daemon decodes the other
        workers' parts, in whatever order they came."""
        for unfit, order in (((1,), (0, 1)), ((1,), (1, 0)), ((0, 2), (0, 1, 2)), ((0, 2), (1, 2, 0)), ((2,), (2, 1, 0))):
            with self.subTest(unfit=unfit, order=order):
                client, base, ns, parts = self.mixed(len(order), f"{unfit}{order}")
                before = client.metrics()
                plain = [os.urandom(part.size) if i in unfit else part.fill(0) for i, part in enumerate(parts)]
                for i in order:
                    parts[i].put(0, plain[i])
                    if i not in unfit:
                        self.assertEqual(parts[i].dump(["x"], [0]), [OK])
                        continue
                    self.assertEqual((client.hits(ns, "x"), client.hits(base, "x")), (0, 0))
                    self.assertEqual(parts[i].dump(["x"], [0]), [UNFIT])
                    self.assertEqual(parts[i].dump(["x"], [0], raw=True), [OK])
                self.until(lambda: client.hits(ns, "x") == 1, "the block")
                self.assertEqual(client.hits(base, "x"), 1)
                self.assertEqual([part.load(["x"], [2]) for part in parts], [[OK]] * len(parts))
                self.assertEqual([part.bytes(2) for part in parts], plain)
                after = client.metrics()
                self.assertEqual(after["unfit_decoded"] - before["unfit_decoded"], len(parts) - len(unfit))
                self.assertEqual(after["unfit_decode_failed"], before["unfit_decode_failed"])
                self.settled(client, base)
                for i, part in enumerate(parts):  # as workers do that don't know of it
                    self.assertEqual(part.dump(["x"], [0], raw=i in unfit), [EXISTS])
                client.call("namespace.purge", ns=base)
                self.until(lambda: client.hits(ns, "x") == 0, "the end of the base's block")

    def test_parts_of_two_forms_that_are_no_block(self):
        """A part that nobody stored, and one that was evicted by name, are missing in both forms.
        So is a part with too few layers."""
        client, base, ns, parts = self.mixed(3)
        before = self.count(client)
        for part in parts:
            part.put(0, os.urandom(part.size))
            part.fill(1)
        self.assertEqual(parts[0].dump(["x"], [1]), [OK])
        self.assertEqual(parts[2].dump(["x"], [0], raw=True), [OK])
        self.until(lambda: self.count(client) == before + 1, "the first part")
        self.assertEqual((client.hits(ns, "x"), client.hits(base, "x")), (0, 0))
        self.assertEqual(parts[1].dump(["x"], [1], layer=0, layers=LAYERS - 1), [OK])
        self.assertEqual((client.hits(ns, "x"), client.hits(base, "x")), (0, 0))
        self.assertEqual(parts[1].dump(["x"], [1], layer=LAYERS - 1, layers=1), [OK])
        self.until(lambda: client.hits(ns, "x") == 1, "the last layer of the last part")
        self.assertEqual([part.load(["x"], [3]) for part in parts], [[OK]] * 3)
        self.assertEqual([part.bytes(3) for part in parts], [parts[0].bytes(1), parts[1].bytes(1), parts[2].bytes(0)])

    def test_parts_of_two_forms_stay_where_all_fit(self):
        """fp8 can encode any bytes, so a part dumped raw is meant to be raw, and the daemon decodes
        no other for it."""
        client, base, ns, parts = self.mixed(2, encoding="fp8")
        before = self.count(client)
        for part in parts:
            part.fill(0)
        self.assertEqual([parts[0].dump(["x"], [0]), parts[1].dump(["x"], [0], raw=True)], [[OK]] * 2)
        self.assertEqual((client.hits(ns, "x"), client.hits(base, "x"), self.count(client)), (0, 0, before))
        self.assertEqual(parts[1].dump(["x"], [0]), [OK])
        self.assertEqual((client.hits(ns, "x"), client.hits(base, "x"), self.count(client)), (1, 0, before))

    def test_leases_of_both_forms_end_with_the_connection(self):
        engine = self.engine("fp8")
        for i in range(8):
            engine.pages.fill(i)
            self.assertEqual(engine.dump([i], [i], raw=i % 2 == 0), [OK])
        before = engine.metrics()["leases"]
        for how in ("close", "release", "time", "load"):
            other = self.engine("fp8")
            found = other.client.call("lookup", ns=other.ns, keys=keys(*range(8)), lease_ms=200 if how == "time" else 60000)
            self.assertEqual(found["hits"], 8)
            self.assertEqual(engine.metrics()["leases"], before + 1)
            if how == "close":
                other.client.close()
            elif how == "release":
                other.client.call("release", lease=found["lease"])
            elif how == "load":
                other.load(range(8), range(8), lease=found["lease"])
            self.until(lambda: engine.metrics()["leases"] == before, how)
        for ns in (engine.base, engine.ns):
            self.until(lambda ns=ns: all(b["nvme"] for b in engine.client.call("ls", ns=ns)["blocks"]), "write-back")
            answer = engine.client.call("namespace.purge", ns=ns)
            self.assertEqual((answer["blocks"], answer.get("busy", 0)), (4, 0))


class LittleDram(Mixed):
    """A daemon of its own: at the end it still has parts to decode, and no DRAM to spare."""

    options = {"arena.size": "64MiB"}

    def test_many_mixed_blocks_at_once_in_little_dram(self):
        """More blocks than the arena has room for: some are found, and none is wrong."""
        client, base, ns, parts = self.mixed(2)
        plain = [parts[0].fill(0), os.urandom(parts[1].size)]
        parts[1].put(0, plain[1])
        n = 3 * (64 << 20) // sum(part.size for part in parts) // 100 * 100
        for first in range(0, n, 100):
            names = [f"{first + i}" for i in range(100)]
            self.assertEqual(set(parts[0].dump(names, [0] * 100)), {OK})
            self.assertLessEqual(set(parts[1].dump(names, [0] * 100, raw=True)), {OK, NO_ROOM})
        found = set()

        def enough():
            found.update(i for i in range(n) if client.hits(ns, f"{i}"))
            return len(found) > n // 8

        self.until(enough, "an eighth of them")
        loaded = 0
        for i in sorted(found)[::37]:
            for part, right in zip(parts, plain):
                part.clear()
                status, = part.load([f"{i}"], [3])
                # blocks that are still to be decoded may take its place
                self.assertIn(status, (OK, MISS))
                self.assertEqual(part.bytes(3), right if status == OK else bytes(part.size))
                loaded += status == OK
        self.assertGreater(loaded, 0)


class Stopped(Mixed):
    options = {"arena.size": "256MiB", "arena.slab": "16MiB", "shutdown.drain": "0s"}

    def test_the_daemon_ends_in_order_while_it_decodes(self):
        """To decode a layer of 16 MiB takes longer than an ending daemon waits for work under way.
        No client is connected any more."""
        sizes = {"dtype": "bf16", "k": [1024, 4, 1024], "v": [1024, 4, 1024]}
        identity = dict(IDENTITY, model=self.id(), block_tokens=1024, parts=2, layers=[1], layer_bytes=16 << 20)
        client = Client(self.daemon)
        base = client.open(identity)
        encoded = client.call("encoding.open", ns=base, encoding="lossless", **sizes)["ns"]
        parts = [Pages(client, encoded, 1, tensors=(8 << 20, 8 << 20), layers=1, part=part) for part in range(2)]
        self.assertEqual(parts[0].dump(["x"], [0]), [OK])
        self.assertEqual(parts[1].dump(["x"], [0], raw=True), [OK])
        client.close()


class Bounds(EncodingCase):
    options = {"limits.namespaces_per_tenant": 64}

    def test_derived_namespaces_are_bounded(self):
        clients = [self.client() for _ in range(3)] + [self.client(uid=OTHER_UID)]
        for client in clients:
            base, opened, why = client.open(dict(IDENTITY, model=self.id())), 0, None
            for seed in range(400):
                try:
                    client.call("encoding.open", ns=base, encoding="q4", seed=seed, **SIZES)
                    opened += 1
                except Refused as error:
                    why = error
                    break
            self.assertIsNotNone(why)
            self.assertEqual(why.code, BUSY)
            self.assertLess(opened, 64)
        for client in clients:
            client.close()
        last = self.client()
        base = last.open(dict(IDENTITY, model=self.id() + "2"))
        self.until(lambda: self.opens(last, base))

    def opens(self, client, base):
        try:
            return client.call("encoding.open", ns=base, encoding="fp8", **SIZES)
        except Refused as error:
            self.assertEqual(error.code, BUSY)
            return None


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
