#!/usr/bin/python3
"""Encoded namespaces against a real daemon, through second_client.py. Stored and loaded bytes are
compared with the C reference. Lookups, loads and prefetches fall through to the base. Also fleets
of engines with several encodings, and refusals."""

import faulthandler
import hashlib
import os
import random
import unittest

from encoding_case import (BLOCK, DIM, ENCODINGS, HEADS, IDENTITY, LAYERS, TENSOR, LAYER, SIZES, SUITE_TIMEOUT_S,
                           TOKENS, UNFIT, EncodingCase, Pages, Reference)
from second_client import (EXISTS, INVALID, MISS, NOT_FOUND, OK, OTHER_UID, UNSUPPORTED, Region, fingerprint_form, keys)

IN_DRAM, ON_NVME = 1, 2


class Encodings(EncodingCase):
    def test_every_encoding_stores_the_references_bytes(self):
        for name in ENCODINGS:
            for more in ({}, {"order": 1}, {"axis": 1}, {"axis": 1, "run": 5}, {"seed": 7}):
                with self.subTest(encoding=name, **more):
                    engine = self.engine(name, **more)
                    names = [f"{name}{more}{i}" for i in range(4)]
                    plain = [engine.pages.fill(i) for i in range(4)]
                    self.assertEqual(engine.dump(names, range(4)), [OK] * 4)
                    raw = self.client()
                    raw_ns = raw.open(self.identity_of(engine))
                    encoded = Region(raw, raw_ns, {"layers": [LAYERS], "layer_bytes": sum(engine.reference.encoded)}, 4)
                    self.assertEqual(encoded.load(names, range(4)), [OK] * 4)
                    self.assertEqual([encoded.bytes(i) for i in range(4)], [engine.reference.encode(p) for p in plain])
                    engine.pages.clear()
                    self.assertEqual(engine.load(names, [5, 0, 7, 2]), [OK] * 4)
                    self.assertEqual([engine.pages.bytes(i) for i in (5, 0, 7, 2)], [engine.through(p) for p in plain])

    def test_one_tensor(self):
        """MLA: a latent of 576 elements."""
        client = self.client()
        sizes = {"dtype": "bf16", "k": [TOKENS, 1, 576]}
        ns = client.open(dict(IDENTITY, model=self.id(), layer_bytes=TOKENS * 576 * 2))
        encoded = client.call("encoding.open", ns=ns, encoding="fp8", **sizes)["ns"]
        pages, reference = Pages(client, encoded, 4, tensors=(TOKENS * 576 * 2,)), Reference("fp8", **sizes)
        plain = pages.fill(0)
        self.assertEqual(pages.dump(["x"], [0]), [OK])
        self.assertEqual(pages.load(["x"], [3]), [OK])
        self.assertEqual(pages.bytes(3), reference.decode(reference.encode(plain)))

    def test_the_namespace_follows_from_base_and_spec(self):
        engine = self.engine("fp8")
        again = engine.client.call("encoding.open", ns=engine.base, encoding="fp8", version=1, **SIZES)
        self.assertEqual(again, engine.opened)
        self.assertEqual(self.engine("fp8", seed=5, axis=1).opened["fingerprint"], again["fingerprint"], "what fp8 ignores")
        form = fingerprint_form(engine.client.limits["tenant"], self.identity_of(engine))
        self.assertEqual(hashlib.sha256(form).digest(), again["fingerprint"], "as the page says")
        self.assertEqual((again["raw_bytes"], again["encoded_bytes"]), (BLOCK, LAYERS * sum(engine.reference.encoded)))
        prints = {self.engine(name).opened["fingerprint"] for name in ENCODINGS}
        prints |= {self.engine("int8", axis=1, run=run).opened["fingerprint"] for run in (0, 4, TOKENS)}
        prints.add(engine.listed(engine.base)["fingerprint"])
        self.assertEqual(len(prints), len(ENCODINGS) + 3, "a run of all tokens is what 0 is")

    def test_the_list_tells_base_and_ratio(self):
        engine = self.engine("fp8")
        listed, base = engine.listed(), engine.listed(engine.base)
        self.assertEqual((listed["encoding"], listed["encoding_version"], listed["raw_layer_bytes"]), ("fp8", 1, LAYER))
        self.assertEqual((listed["base"], listed["base_fingerprint"]), (engine.base, base["fingerprint"]))
        self.assertEqual(listed["layer_bytes"], sum(engine.reference.encoded))
        self.assertEqual((base["encoding"], base["raw_layer_bytes"], base["base"], base["base_fingerprint"]), ("", LAYER, 0, b""))

    def test_ucmctl_shows_base_and_ratio(self):
        engine = self.engine("fp8")
        done = self.daemon.ctl("namespace", "list", check=True)
        listed, base = engine.listed(), engine.listed(engine.base)
        ratio = f"{LAYER / listed['layer_bytes']:.2f}"
        self.assertRegex(done.stdout, rf"(?m)^ *{engine.ns} .* encoding/1/fp8 .* {ratio} +{base['fingerprint'].hex()[:12]} *$")
        self.assertRegex(done.stdout, rf"(?m)^ *{engine.base} .* - *$")

    def test_refused(self):
        client = self.client()
        ns = client.open(dict(IDENTITY, model=self.id()))
        good = {"ns": ns, "encoding": "fp8", **SIZES}
        sentences = {
            "this daemon knows fp8": (UNSUPPORTED, {"encoding": "fp9"}),
            "version: 2 of fp8; this daemon knows version 1": (UNSUPPORTED, {"version": 2}),
            "dtype: \"bf17\"": (INVALID, {"dtype": "bf17"}),
            "f32": (INVALID, {"dtype": "f32"}),
            f"k and v: {3 * TENSOR} bytes a layer; the base namespace's have {LAYER}": (INVALID, {"v": [2 * TOKENS, HEADS, DIM]}),
            f"k and v: {TENSOR} bytes": (INVALID, {"v": []}),
            "v: 2 numbers": (INVALID, {"v": [1, 2]}),
            "tokens of tensor 0": (INVALID, {"k": [0, HEADS, DIM]}),
            "dim of tensor 1": (INVALID, {"v": [TOKENS, HEADS, 1 << 31]}),
            f"run is {TOKENS + 1} tokens": (INVALID, {"encoding": "int8", "axis": 1, "run": TOKENS + 1}),
            "is not open": (NOT_FOUND, {"ns": 4000000000}),
        }
        for words, (code, wrong) in sentences.items():
            with self.subTest(**wrong):
                self.assertIn(words, str(self.refused(code, client.call, "encoding.open", **dict(good, **wrong))))
        encoded = client.call("encoding.open", **good)["ns"]
        error = self.refused(INVALID, client.call, "encoding.open", **dict(good, ns=encoded))
        self.assertIn("is encoded already (fp8); name its base", str(error))
        summaries = client.call("summary.open", ns=ns, method=1, dtype=2, kv_heads=1, head_dim=DIM,
                              k_token_stride=HEADS * DIM * 2)["ns"]
        self.assertIn("holds summaries", str(self.refused(INVALID, client.call, "encoding.open", **dict(good, ns=summaries))))
        other = self.client(uid=OTHER_UID)
        self.refused(NOT_FOUND, other.call, "encoding.open", **good)

    def test_pages_of_an_encoded_region_are_tensors(self):
        client = self.client()
        ns = client.open(dict(IDENTITY, model=self.id()))
        encoded = client.call("encoding.open", ns=ns, encoding="fp8", **SIZES)["ns"]
        error = self.refused(INVALID, Region, client, encoded, IDENTITY, 4)
        self.assertIn(f"a layer has 2 planes, and here its K of {TENSOR} bytes belongs", str(error))

    def test_layer_by_layer(self):
        engine = self.engine("fp8")
        plain = [engine.pages.fill(i) for i in range(4)]
        for layer in (1, 0, 2):
            self.assertEqual(engine.hits(0), 0)
            self.assertEqual(engine.dump(range(4), range(4), layer=layer, layers=1), [OK] * 4)
        engine.pages.clear()
        number = engine.pages.begin("load", range(4), range(4), progress_interval=1)
        self.assertEqual(list(engine.client.wait(number)["status"]), [OK] * 4)
        self.assertEqual([engine.pages.bytes(i) for i in range(4)], [engine.through(p) for p in plain])
        engine.pages.clear()
        self.assertEqual(engine.load(range(4), range(4), layer=1, layers=1), [OK] * 4)
        right = engine.through(plain[2])
        self.assertEqual(engine.pages.bytes(2), bytes(LAYER) + right[LAYER:2 * LAYER] + bytes(LAYER))

    def test_what_moved_is_counted(self):
        engine = self.engine("fp8")
        engine.pages.fill(0)
        engine.pages.fill(1)
        before = engine.metrics()
        self.assertEqual(engine.pages.call("dump", [0], [0])["bytes"], engine.opened["encoded_bytes"])
        engine.dump([1], [1], raw=True)
        self.assertEqual(engine.pages.call("load", [0, 1], [2, 3])["bytes"], engine.opened["encoded_bytes"] + BLOCK)
        engine.hits(0, 1)
        after = engine.metrics()
        moved = {name: after[name] - before[name] for name in before}
        encoded = engine.opened["encoded_bytes"]
        self.assertEqual([moved[name] for name in ("encode_raw_bytes", "encode_bytes", "decode_raw_bytes", "decode_bytes",
                                                   "lookup_hits_raw", "encode_unfit", "dump_bytes", "load_bytes")],
                         [BLOCK, encoded, BLOCK, encoded, 1, 0, encoded + BLOCK, encoded + BLOCK])

    @unittest.skipUnless("lossless" in ENCODINGS, "there is no lossless encoding")
    def test_what_does_not_fit_is_dumped_raw(self):
        engine = self.engine("lossless")
        plain = [engine.pages.fill(0), os.urandom(BLOCK), engine.pages.fill(2)]
        engine.pages.put(1, plain[1])
        before = engine.metrics()["encode_unfit"]
        self.assertEqual(engine.dump(range(3), range(3)), [OK, UNFIT, OK])
        self.assertEqual(engine.metrics()["encode_unfit"] - before, 1)
        self.assertEqual(engine.each(0, 1, 2), [IN_DRAM, 0, IN_DRAM])
        self.assertEqual(engine.dump([1], [1], raw=True), [OK])
        engine.pages.clear()
        self.assertEqual(engine.load(range(3), range(3)), [OK] * 3)
        self.assertEqual([engine.pages.bytes(i) for i in range(3)], plain)


    @unittest.skipUnless("lossless" in ENCODINGS, "there is no lossless encoding")
    def test_those_that_do_not_fit_are_told_from_the_others(self):
        """Many blocks in one dump. A region that may be staged has its items in the order of their
        slots."""
        engine = self.engine("lossless")
        pages, rng = Pages(engine.client, engine.ns, 64, spec=engine.spec, ring_region=1), random.Random(3)
        for turn in range(4):
            plain, names, blocks = [], [f"{turn}.{i}" for i in range(64)], rng.sample(range(64), 64)
            for block in range(64):
                plain.append(pages.fill(block) if rng.random() < 0.6 else os.urandom(BLOCK))
                pages.put(block, plain[block])
            right = [OK if engine.through(plain[block]) == plain[block] else UNFIT for block in blocks]
            self.assertEqual(pages.dump(names, blocks), right)
            self.assertEqual(engine.each(*names), [IN_DRAM if ended == OK else 0 for ended in right])
            pages.clear()
            self.assertEqual(pages.load(names, blocks), [OK if ended == OK else MISS for ended in right])
            for block, ended in zip(blocks, right):
                self.assertEqual(pages.bytes(block), plain[block] if ended == OK else bytes(BLOCK))
            engine.client.call("namespace.purge", ns=engine.ns, keys=keys(*names[::2]))


class FallThrough(EncodingCase):
    """Blocks 0 to 2 and 6 are raw, 3 to 5 and 8 fp8, 7 is nowhere."""

    def mixed(self):
        engine, self.plain = self.engine("fp8"), {}
        for name in (0, 1, 2, 3, 4, 5, 6, 8):
            self.plain[name] = engine.pages.fill(name)
        self.assertEqual(engine.dump([0, 1, 2, 6], [0, 1, 2, 6], raw=True), [OK] * 4)
        self.assertEqual(engine.dump([3, 4, 5, 8], [3, 4, 5, 8]), [OK] * 4)
        engine.pages.clear()
        return engine

    def written(self, engine):
        for ns in (engine.base, engine.ns):
            self.until(lambda ns=ns: all(b["nvme"] for b in engine.client.call("ls", ns=ns)["blocks"]), "write-back")

    def right(self, engine, name):
        return self.plain[name] if name in (0, 1, 2, 6) else engine.through(self.plain[name])

    def test_lookup(self):
        engine = self.mixed()
        self.assertEqual(engine.hits(*range(9)), 7)
        self.assertEqual(engine.hits(*range(3, 9)), 4)
        self.assertEqual(engine.each(*range(9)), [IN_DRAM] * 7 + [MISS - 1, IN_DRAM])
        self.assertEqual(engine.client.hits(engine.base, *range(9)), 3, "of itself the base knows no encoded block")

    def test_load_of_both_forms(self):
        engine = self.mixed()
        self.assertEqual(engine.load(range(9), range(9)), [OK] * 7 + [MISS, OK])
        for name in self.plain:
            self.assertEqual(engine.pages.bytes(name), self.right(engine, name), name)
        self.assertEqual(engine.pages.bytes(7), bytes(BLOCK))

    def test_a_purge_reaches_either_form_though_leased(self):
        engine = self.mixed()
        lease = engine.client.call("lookup", ns=engine.ns, keys=keys(*range(7)), lease_ms=60000)["lease"]
        for ns in (engine.base, engine.ns):
            self.assertEqual(engine.client.call("namespace.purge", ns=ns, keys=keys(*range(9)))["busy"] > 0, True)
        self.assertEqual(engine.hits(*range(7)), 0, "marked for deletion")
        self.assertEqual(engine.load(range(7), range(7)), [MISS] * 7)
        self.assertEqual(engine.load(range(7), range(7), lease=lease), [MISS] * 7)

    def test_the_encoded_form_goes_first(self):
        engine = self.engine("fp8")
        one, other = engine.pages.fill(0), engine.pages.fill(1)
        self.assertEqual(engine.dump(["x"], [0], raw=True), [OK])
        self.assertEqual(engine.dump(["x"], [1]), [OK])
        self.assertEqual(engine.dump(["x", "x"], [0, 0], raw=True), [EXISTS] * 2)
        self.assertEqual(engine.load(["x"], [2]), [OK])
        self.assertEqual(engine.pages.bytes(2), engine.through(other))
        engine.client.call("namespace.purge", ns=engine.ns, keys=keys("x"))
        self.until(lambda: engine.listed()["blocks"] == 0, "the end of the encoded block")
        self.assertEqual(engine.load(["x"], [3]), [OK])
        self.assertEqual(engine.pages.bytes(3), one)

    def test_pin_evict_and_purge_concern_what_they_name(self):
        engine = self.mixed()
        call = engine.client.call
        self.assertEqual(call("pin", ns=engine.ns, keys=keys(*range(9))), {"blocks": 4, "missing": 5})
        self.assertEqual(call("unpin", ns=engine.ns, keys=keys(*range(9))), {"blocks": 4, "missing": 5})
        self.written(engine)
        self.assertEqual(call("namespace.purge", ns=engine.ns)["blocks"], 4)
        self.assertEqual(engine.each(*range(9)), [1, 1, 1, 0, 0, 0, 1, 0, 0])
        self.assertEqual(call("namespace.purge", ns=engine.base, keys=keys(0, 3))["blocks"], 1)
        self.assertEqual(engine.hits(*range(9)), 0)
        self.assertEqual(engine.load([1], [1]), [OK])

    def test_prefetch(self):
        engine = self.mixed()
        self.written(engine)
        for ns in (engine.base, engine.ns):
            engine.client.call("evict", ns=ns, tier=1, keys=keys(*range(9)))
        self.assertEqual(engine.each(*range(9)), [ON_NVME] * 7 + [0, ON_NVME])
        answer = engine.client.call("prefetch", ns=engine.ns, keys=keys(*range(9)))
        self.assertEqual(list(answer["status"]), [OK] * 7 + [MISS, OK])
        self.assertEqual(answer["bytes"], 4 * BLOCK + 4 * engine.opened["encoded_bytes"])
        self.assertEqual(engine.each(*range(9)), [IN_DRAM] * 7 + [0, IN_DRAM])

    def test_bypass_of_either(self):
        engine = self.mixed()
        engine.client.call("bypass", ns=engine.base, load=1)
        try:
            self.assertEqual(engine.each(*range(9)), [0, 0, 0, 1, 1, 1, 0, 0, 1])
            self.assertEqual(engine.load([0, 3], [0, 3]), [MISS, OK])
            engine.client.call("bypass", ns=engine.ns, load=1)
            self.assertEqual(engine.each(*range(9)), [0] * 9)
        finally:
            for ns in (engine.base, engine.ns):
                engine.client.call("bypass", ns=ns, load=2)

    def test_sequences_take_either_form(self):
        """Summaries of an encoded base come from workers; sequences find blocks in it and in its base."""
        engine = self.mixed()
        call, shape = engine.client.call, self.shape()
        error = self.refused(INVALID, call, "summary.open", ns=engine.ns, method=1, build=True, **shape)
        self.assertIn("the base's blocks are encoded (fp8)", str(error))
        summaries = call("summary.open", ns=engine.ns, method=1, **shape)
        self.assertNotEqual(summaries["fingerprint"], call("summary.open", ns=engine.base, method=1, **shape)["fingerprint"])
        self.refused(INVALID, call, "summary.build", ns=summaries["ns"], keys=keys(3))
        summary = Region(engine.client, summaries["ns"], {"layers": [LAYERS], "layer_bytes": summaries["layer_bytes"]}, 16)
        self.assertEqual(summary.dump(range(7), range(7)), [OK] * 7)
        sequence = call("sequence.open", ns=summaries["ns"])["sequence"]
        self.refused(INVALID, call, "sequence.append", sequence=sequence, keys=keys(*range(9)), build=True)
        answer = call("sequence.append", sequence=sequence, keys=keys(*range(9)))
        self.assertEqual((answer["blocks"], answer["summaries"], answer["missing"]), (7, 7, 2))
        answer = call("sequence.prefetch", sequence=sequence, index=b"".join(i.to_bytes(4, "little") for i in range(7)))
        self.assertEqual(list(answer["status"]), [OK] * 7)
        call("sequence.close", sequence=sequence)

    def test_summaries_of_lossless_blocks(self):
        """The daemon builds summaries from either form: when asked, by an append, and as blocks are
        stored. They are the same bit for bit."""
        engine, plain = self.engine("lossless", blocks=32), self.engine(None, blocks=32)
        call, shape = engine.client.call, self.shape()
        data = [engine.pages.fill(i) for i in range(12)]
        right = plain.client.call("summary.open", ns=plain.base, method=1, **shape)
        for i, block in enumerate(data):
            plain.pages.put(i, block)
        names = [f"plain {i}" for i in range(12)]
        self.assertEqual(plain.dump(names, range(12)), [OK] * 12)
        self.assertEqual(list(plain.client.call("summary.build", ns=right["ns"], keys=keys(*names))["status"]), [OK] * 12)
        want = self.summaries(plain, right, names)
        self.assertEqual(engine.dump(range(6), range(6)), [OK] * 6)
        self.assertEqual(engine.dump([6, 7], [6, 7], raw=True), [OK] * 2)
        built = call("summary.open", ns=engine.ns, method=1, **shape)
        self.assertEqual(list(call("summary.build", ns=built["ns"], keys=keys(*range(4)))["status"]), [OK] * 4)
        sequence = call("sequence.open", ns=built["ns"])["sequence"]
        answer = call("sequence.append", sequence=sequence, keys=keys(*range(8)), build=True)
        self.assertEqual((answer["blocks"], answer["summaries"], answer["built"]), (8, 8, 4))
        call("sequence.close", sequence=sequence)
        call("summary.open", ns=engine.ns, method=1, build=True, **shape)
        self.assertEqual(engine.dump([8, 9], [8, 9]), [OK] * 2)
        self.assertEqual(engine.dump([10, 11], [10, 11], raw=True), [OK] * 2)
        self.until(lambda: engine.client.hits(built["ns"], *range(12)) == 12)
        self.assertEqual(self.summaries(engine, built, range(12)), want)

    def shape(self):
        return {"dtype": 2, "kv_heads": HEADS, "head_dim": DIM, "v_head_dim": DIM, "k_token_stride": HEADS * DIM * 2,
                "k_head_stride": DIM * 2, "v_offset": TENSOR, "v_token_stride": HEADS * DIM * 2, "v_head_stride": DIM * 2}

    def summaries(self, engine, opened, names):
        region = Region(engine.client, opened["ns"], {"layers": [LAYERS], "layer_bytes": opened["layer_bytes"]}, 16)
        self.assertEqual(region.load(names, range(len(names))), [OK] * len(names))
        return [region.bytes(i) for i in range(len(names))]


class Fleet(EncodingCase):
    def test_engines_of_every_form_see_their_own(self):
        """One raw engine, one of each encoding, and a client that knows no encodings, on the same
        keys."""
        engines = [self.engine(name) for name in (None, *ENCODINGS)] + [self.engine("int8", axis=1)]
        plain = []
        for engine in engines:
            plain.append([engine.pages.fill(i) for i in range(4)])
        for engine in engines[1:]:
            self.assertEqual(engine.hits(0), 0, "nobody sees another's")
            self.assertEqual(engine.dump(range(4), range(4)), [OK] * 4)
        self.assertEqual(engines[0].hits(0), 0)
        old = self.client()
        self.assertEqual(old.hits(old.open(dict(IDENTITY, model=self.id())), 0), 0)
        self.assertEqual(engines[0].dump(range(8), list(range(4)) * 2), [OK] * 8)
        for engine, kv in zip(engines, plain):
            self.assertEqual(engine.hits(*range(9)), 8)
            engine.pages.clear()
            self.assertEqual(engine.load(range(8), range(8)), [OK] * 8)
            self.assertEqual([engine.pages.bytes(i) for i in range(4)], [engine.through(p) for p in kv])
            self.assertEqual([engine.pages.bytes(4 + i) for i in range(4)], plain[0],
                             "raw blocks serve all")


class Random(EncodingCase):
    """Random requests against a model of what each key may hold. A load brings one of these values,
    in the form in which it was stored."""
    options = {"arena.size": f"{max(64, 2 * 700 * BLOCK >> 20)}MiB"}

    def test_random_requests(self):
        seed = int(os.environ.get("UCM_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
        rng = random.Random(seed)
        with self.subTest(seed=seed):
            engines = [self.engine(name) for name in (None, "fp8", "fp8", "int8", "lossless") if name in (None, *ENCODINGS)]
            for engine in engines:
                engine.stored = {}  # what this form's namespace may hold, by name
            engines[2].stored = engines[1].stored
            for _ in range(400):
                engine = rng.choice(engines)
                names = rng.sample(range(24), rng.randint(1, 8))
                getattr(self, rng.choice(["dump", "dump", "load", "load", "layers", "look", "prefetch", "forget"]))(rng, engine, engines, names)

    def dump(self, rng, engine, engines, names):
        plain = [engine.pages.fill(i) for i in range(len(names))]
        to_base = engine.reference is None or rng.random() < 0.4
        status = engine.dump(names, range(len(names)), raw=to_base and engine.reference is not None)
        for name, data, ended in zip(names, plain, status):
            self.assertIn(ended, (OK, EXISTS, 5))
            if ended == OK:
                holder = engines[0] if to_base else engine
                holder.stored.setdefault(name, set()).add(data if to_base else engine.through(data))

    def may_hold(self, engine, engines, name):
        return engine.stored.get(name, set()) | engines[0].stored.get(name, set())

    def check(self, engine, engines, names, status):
        for i, (name, ended) in enumerate(zip(names, status)):
            self.assertIn(ended, (OK, MISS))
            if ended == OK:
                self.assertIn(engine.pages.bytes(i), self.may_hold(engine, engines, name), name)

    def load(self, rng, engine, engines, names):
        engine.pages.clear()
        self.check(engine, engines, names, engine.load(names, range(len(names))))

    def layers(self, rng, engine, engines, names):
        engine.pages.clear()
        number = engine.pages.begin("load", names, range(len(names)), progress_interval=rng.randint(1, LAYERS))
        if rng.random() < 0.3:
            engine.client.call("cancel", msgid=number)
            engine.client.wait(number)
        else:
            self.check(engine, engines, names, list(engine.client.wait(number)["status"]))

    def look(self, rng, engine, engines, names):
        for name, found in zip(names, engine.each(*names)):
            self.assertTrue(not found or self.may_hold(engine, engines, name))
        answer = engine.client.call("lookup", ns=engine.ns, keys=keys(*names), lease_ms=60000)
        if answer["hits"] and rng.random() < 0.7:
            some = names[:answer["hits"]]
            engine.pages.clear()
            status = engine.load(some, range(len(some)), lease=answer["lease"])
            self.assertEqual(status, [OK] * len(some), "a lease keeps them")
            self.check(engine, engines, some, status)

    def prefetch(self, rng, engine, engines, names):
        for ns in (engine.base, engine.ns):
            engine.client.call("evict", ns=ns, tier=1, keys=keys(*names))
        status = engine.client.call("prefetch", ns=engine.ns, keys=keys(*names))["status"]
        self.assertTrue(set(status) <= {OK, MISS})

    def forget(self, rng, engine, engines, names):
        engine.client.call("namespace.purge", ns=rng.choice([engine.base, engine.ns]), keys=keys(*names[:3]))

    def test_long_prefixes_of_both_forms(self):
        """A prefix longer than a lookup takes at a time."""
        engine, rng = self.engine("fp8"), random.Random(5)
        forms = [rng.random() < 0.5 for _ in range(700)]
        for form in (True, False):
            some = [i for i in range(700) if forms[i] == form]
            for first in range(0, len(some), 16):
                names = some[first:first + 16]
                self.assertEqual(engine.dump(names, range(len(names)), raw=form), [OK] * len(names))
        for gap in (None, 699, 512, 511, 256, 255, 1):
            names = [i if i != gap else "gap" for i in range(700)]
            self.assertEqual(engine.hits(*names), 700 if gap is None else gap)
            self.assertEqual(engine.each(*names).count(0), gap is not None)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main()
