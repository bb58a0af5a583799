#!/usr/bin/python3
"""The vLLM connector's setting `summaries`, in the small engine of tests/engines/vllm against a
real daemon. Stored blocks get the summary of their K and V in every layout. Engines share them, and
a restart finds them."""

import shutil
import tempfile
import unittest
from unittest import mock

from vllm_case import BLOCK, GPU, Case, Request, daemon, prompt, watch, wild  # sets the paths
import numpy
import model
from ucmclient import BlockResult, Plane, SharedMemory, sparse
from ucmclient.errors import UcmError

LAYOUTS = ("split", "fused", "packed", "content")
TOKENS = 100
WHOLE = TOKENS // BLOCK


class Summarised(Case):
    def summaries(self, e, rank=0):
        return e.ranks[rank].connector._worker.link.summaries

    def stored(self, name="cold", seed=500, **more):
        """An engine that has stored a request's blocks, and the request."""
        e = self.engine(**{"summaries": "mean", **more})
        request = Request(name, prompt(seed, TOKENS), outputs=1)
        self.check(e, request)
        return e, request

    def keys(self, request):
        return b"".join(request.block_hashes[:WHOLE])

    def found(self, e, request):
        return self.summaries(e).lookup_prefix(self.keys(request)).blocks

    def all_found(self, e, request):
        self.eventually(lambda: self.found(e, request) == WHOLE)

    def read(self, e, request, part=0):
        """u8[block][layer][summary]"""
        ns = self.summaries(e, part)
        of = ns.summary
        memory = SharedMemory(WHOLE * model.LAYERS * of.bytes)
        planes = [Plane(0, i * of.bytes, model.LAYERS * of.bytes, of.bytes, i) for i in range(model.LAYERS)]
        with ns.register([memory.memory()], planes, blocks=WHOLE, part=part) as region:
            done = region.load(self.keys(request), range(WHOLE)).wait()
            self.assertEqual(set(done.blocks), {BlockResult.OK})
        return numpy.frombuffer(bytes(memory.buffer), numpy.uint8).reshape(WHOLE, model.LAYERS, of.bytes)

    def computed(self, e, tokens, make=sparse.mean, part=0, **parameters):
        """The same from K and V as the engine has them, without a daemon."""
        rank, dtype = e.ranks[part], {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[self.DTYPE]
        n = len(rank.heads)
        shape = sparse.Shape(dtype, BLOCK, n, model.HEAD, v_head_dim=model.HEAD)
        summary = make(shape, **parameters)
        probe = Request("probe", tokens)
        blocks = e.pool.hits(probe)[:WHOLE]
        self.assertEqual(len(blocks), WHOLE)
        out = []
        for b in blocks:
            for layer in range(model.LAYERS):
                k, v = (numpy.ascontiguousarray(rank.pages[layer][i, b]) for i in (0, 1))
                out.append(numpy.frombuffer(summary.compute(numpy.stack([k, v]), 1).data.cast("B"), numpy.uint8))
        return numpy.array(out).reshape(WHOLE, model.LAYERS, -1)


class Stored(Summarised):
    def test_they_are_those_of_k_and_v(self):
        for layout in LAYOUTS:
            for setting, make, parameters in (("mean", sparse.mean, {}), ("stats", sparse.stats, {}),
                                              ({"method": "hash", "bits": 64, "seed": 7}, sparse.hash, {"bits": 64, "seed": 7})):
                with self.subTest(layout, setting=setting):
                    e, request = self.stored(layout=layout, summaries=setting, salt=f"{layout}{setting}")
                    self.all_found(e, request)
                    got = self.read(e, request)
                    want = self.computed(e, request.tokens[:TOKENS], make, **parameters)
                    self.assertTrue(numpy.array_equal(got, want))

    def test_each_rank_has_its_own(self):
        e, request = self.stored(ranks=2)
        self.all_found(e, request)
        parts = [self.read(e, request, part) for part in (0, 1)]
        for part in (0, 1):
            self.assertTrue(numpy.array_equal(parts[part], self.computed(e, request.tokens[:TOKENS], part=part)))
        self.assertFalse(numpy.array_equal(*parts))

    def test_other_summaries_and_none_do_not_meet(self):
        a, request = self.stored()
        self.all_found(a, request)
        b, again = self.stored("other", summaries={"method": "mean", "kind": "max"})
        self.assertEqual(b.loaded_tokens, WHOLE * BLOCK, "the blocks are the same")
        self.assertEqual(self.found(b, again), 0, "and were stored before")
        with self.summaries(b).sequence(self.keys(again), build=True) as sequence:
            self.assertEqual(len(sequence), WHOLE)
        self.assertEqual(self.found(b, again), WHOLE)

    def test_tokens_that_were_generated_count(self):
        e = self.engine(summaries="mean")
        request = Request("long", prompt(501, 40), outputs=60)
        self.check(e, request)
        self.all_found(e, request)

    def test_who_stores_nothing_wants_none(self):
        e = self.engine(summaries="mean", store=False)
        self.assertIsNone(self.summaries(e))
        self.check(e, Request("cold", prompt(502, 40)))


class Bfloat16(Summarised):
    DTYPE = "bfloat16"

    def right(self, **more):
        e, request = self.stored(salt=repr(more), **more)
        self.all_found(e, request)
        for part in range(len(e.ranks)):
            got, want = self.read(e, request, part), self.computed(e, request.tokens[:TOKENS], part=part)
            self.assertTrue(numpy.array_equal(got, want))
        return e, request

    def test_they_are_those_of_k_and_v(self):
        self.right()

    def test_of_lossless_blocks(self):
        """The same, whatever form a block has, and where."""
        for more in ({}, {"layout": "content"}, {"raw_first": 40}):
            with self.subTest(**more):
                a, request = self.right(encoding="lossless", **more)
                before = self.stats()["summaries_built"]
                b, _ = self.stored("warm", encoding="lossless", salt=repr({"encoding": "lossless", **more}), **more)
                self.assertEqual((b.loaded_tokens, self.found(b, request)), (WHOLE * BLOCK, WHOLE))
                self.assertEqual(self.stats()["summaries_built"], before)

    def test_of_blocks_that_lossless_can_not_hold(self):
        for heads, ranks in ((range(model.KV_HEADS), 1), ((2, 3), 2)):
            with self.subTest(heads=heads), wild(heads):
                self.right(encoding="lossless", ranks=ranks)
                self.assertGreaterEqual(self.stats()["encode_unfit"], WHOLE)


@unittest.skipIf(GPU, "nothing here depends on the device")
class Restarted(Summarised):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="vllm_summaries.")
        self.addCleanup(shutil.rmtree, self.directory, True)
        self.daemon = daemon(directory=self.directory)
        self.addCleanup(self.stop)

    def again(self):
        self.daemon = daemon(directory=self.directory)

    def test_a_stop(self):
        e, request = self.stored()
        self.all_found(e, request)
        self.assertEqual(self.daemon.stop(), 0)
        self.again()
        self.eventually(lambda: self.summaries(e) is not None and self.settled(e, request))
        self.assertEqual(self.stats()["summaries_built"], 0)
        later, _ = self.stored("later")
        self.assertEqual(later.loaded_tokens, WHOLE * BLOCK)
        self.all_found(later, request)
        with self.summaries(later).sequence(self.keys(request), build=True) as sequence:
            self.assertEqual(len(sequence), WHOLE)
        self.assertEqual(self.stats()["summaries_built"], 0)

    def settled(self, e, request):
        try:
            return self.found(e, request) == WHOLE
        except UcmError:
            return False  # it is connecting

    def test_blocks_that_are_stored_after_a_kill(self):
        """The engine's connection opens the summaries again, and so the daemon builds them again."""
        e, _ = self.stored()
        self.daemon.kill()
        self.again()
        request = Request("fresh", prompt(503, TOKENS), outputs=1)

        def summarised():
            fresh = Request(f"fresh{e.steps}", prompt(503, TOKENS), outputs=1)
            e.pool = type(e.pool)(e.blocks)
            self.check(e, fresh)
            return self.settled(e, request)
        self.eventually(summarised)


class Refused(Summarised):
    def test_with_what_to_change(self):
        for more, words in (({"summaries": "median"}, "summaries must be none, mean,"), ({"summaries": {"kind": "max"}}, "as \"method\""),
                            ({"summaries": {"method": "box", "bits": 3}}, "box has no parameter 'bits'$"),
                            ({"summaries": {"method": "hash", "bit": 3}}, "'bit'; there are bits, seed"),
                            ({"summaries": "submean"}, 'needs "run"'), ({"summaries": 3}, "not 3"),
                            ({"summaries": {"method": "mean", "kind": "least"}}, "one of mean, max, normalised"),
                            ({"summaries": {"method": "hash", "bits": 100}}, "bits"),
                            ({"summaries": {"method": "hash", "bits": "many"}}, "correct the parameters"),
                            ({"summaries": "mean", "encoding": "fp8"}, "set encoding to lossless or none")):
            with self.subTest(more), self.assertRaisesRegex((ValueError, UcmError), words):
                self.engine(**more)

    def test_tokens_and_heads_that_are_as_many(self):
        with mock.patch.object(model, "KV_HEADS", BLOCK), self.assertRaisesRegex(ValueError, "set --block-size"):
            self.engine(summaries="mean")


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
