#!/usr/bin/python3
"""The vLLM connector with pipeline and with decode context parallelism. Each stage has its own
layers, and each rank of a context its own tokens. A hit is what all have. The small engine of
tests/engines/vllm (stages_engine.py) against a real daemon."""

import unittest
from unittest import mock

from vllm_case import BLOCK, MODEL, Case, Request, model, prompt, run, watch

from stages_engine import SomeRefused, StagesEngine
from ucmclient import Region
from ucmclient.engine.vllm import identity, layout, stages
from ucmclient.engine.vllm.connector import UcmConnector

HIT = 150 // BLOCK * BLOCK


class Pipelines(Case):
    def pipeline(self, of=(2, 1), **more):
        more = {"dtype": self.DTYPE, "socket": self.daemon.socket, "retry_interval": 0.05, "lookup_timeout": 2.0, **more}
        e = StagesEngine(MODEL, UcmConnector, stages=of, **more)
        self.addCleanup(e.close)
        return e

    def share(self, of=(2, 1), **more):
        return self.handed_on(self.pipeline(of, **more), self.pipeline(of, **more), prompt(1, 150), HIT)


class Pipeline(Pipelines):
    def test_stages_of_one_size_and_of_different_ones(self):
        for of in ((1, 1, 1), (2, 1)):
            for where in ("split", "packed"):
                with self.subTest(of, layout=where):
                    before = self.stats()["load_blocks_dram"]
                    self.share(of, layout=where, salt=where)
                    self.assertEqual(self.stats()["load_blocks_dram"] - before, len(of) * (150 // BLOCK), "each stage loads its part")

    def test_stages_of_several_ranks(self):
        self.share(ranks=2)
        before = self.stats()["dump_blocks"]
        self.share(ranks=2, replicated=True)
        self.assertEqual(self.stats()["dump_blocks"] - before, 2 * (157 // BLOCK), "of ranks with the same bytes one stores")

    def test_layers_that_differ_in_size(self):
        for where in ("split", "packed"):
            with self.subTest(where):
                self.share((2, 1), layout=where, salt=where, beside=(16, 0, 48))

    def test_loads_within_the_step_and_layer_after_layer(self):
        self.share(async_load=False)
        self.share(async_load=False, layerwise=True, salt="layers")

    def test_other_stages_are_another_engine(self):
        self.share((2, 1))
        for other in (self.pipeline((1, 2)), self.pipeline((1, 1, 1)), self.engine()):
            self.check(other, Request("other", prompt(1, 150)))
            self.assertEqual(other.loaded_tokens, 0)

    def test_a_hit_is_what_all_stages_have(self):
        """The last stage stores nothing, so no engine loads what the others have stored."""
        a, b = self.pipeline(), self.pipeline()
        a.ranks[1].connector._worker.writes = False
        self.check(a, Request("cold", prompt(2, 150)))
        self.assertGreater(self.stats()["dump_blocks"], 0)
        self.check(b, Request("miss", prompt(2, 150)))
        self.assertEqual(b.loaded_tokens, 0)
        self.check(a, Request("filled", prompt(2, 150)))
        self.assertTrue(self.loads(a, prompt(2, 150)), "the other engine has stored the last stage's part")

    def test_a_block_that_one_stage_does_not_get_is_computed(self):
        for asynchronous in (True, False):
            with self.subTest(asynchronous):
                _, b = self.share(async_load=asynchronous, salt=repr(asynchronous))
                self.one_load_fails(b, 1, prompt(1, 150))

    def test_preemption(self):
        for asynchronous in (True, False):
            with self.subTest(asynchronous):
                tight = self.pipeline(blocks=24, async_load=asynchronous, salt=repr(asynchronous))
                self.check(tight, *[Request(f"r{i}", prompt(40 + i, 120), outputs=60) for i in range(4)])
                self.assertGreater(tight.preemptions, 0)
                other = self.pipeline(async_load=asynchronous, salt=repr(asynchronous))
                self.check(other, *[Request(f"r{i}", prompt(40 + i, 120), outputs=60) for i in range(4)])
                self.assertGreater(other.loaded_tokens, 0)

    def test_the_daemon_dies_and_comes_back(self):
        a, b = self.share()
        self.restart()
        self.check(a, Request("without", prompt(5, 100)))
        for e in (a, b):
            self.connected(e)
        self.check(a, Request("cold again", prompt(6, 150)))
        self.eventually(lambda: self.loads(b, prompt(6, 150)))

    def test_a_handshake_that_did_not_arrive(self):
        a, b = self.pipeline(handshake=False), self.pipeline()
        self.check(a, Request("first", prompt(18, 40)), Request("cold", prompt(17, 100)))
        self.check(b, Request("warm", prompt(17, 100)))
        self.assertGreater(b.loaded_tokens, 0)

    def test_summaries(self):
        self.share(summaries="mean")

    def test_refusals_name_the_remedy(self):
        for more in ({"head_groups": 4}, {"sparse": "auto"}):
            with self.subTest(more), self.assertRaisesRegex(SomeRefused, f'use --pipeline-parallel-size 1, or remove the setting "{[*more][0]}"'):
                self.pipeline(**more)

    def test_what_is_refused_of_one_stage_is_refused_by_all(self):
        with self.assertRaises(SomeRefused) as refused:
            self.pipeline(async_load=False, layerwise=True, beside=(0, 16, 0))  # of the first stage's two layers one is larger
        first, second = sorted(map(str, refused.exception.errors))
        self.assertIn("set layerwise to false", first)
        self.assertEqual(second, f"stage 0 of the pipeline: {first}")


class LayerStores(Pipelines):
    """The setting `layer_stores`: each stage hands over its own layers."""

    def dumps(self, of, **more):
        """The layers of a prompt's dumps in one step, of all stages together."""
        made, dump = [], Region.dump

        def counted(region, keys, blocks, *, layer=0, layers=0, **named):
            if len(blocks) > 1:
                made.append((layer, layers))
            return dump(region, keys, blocks, layer=layer, layers=layers, **named)
        with mock.patch.object(Region, "dump", counted):
            self.share(of, layer_stores=2 * BLOCK, budget=256, **more)
        return sorted(made)

    def test_each_stage_by_its_layers(self):
        for where in ("split", "packed"):
            with self.subTest(where):
                self.assertEqual(self.dumps((2, 1), layout=where, salt=where), [(0, 0), (0, 1), (1, 1)], "one layer goes after the step")
        self.assertEqual(self.dumps((3,)), [(0, 2), (2, 1)])
        self.assertEqual(self.dumps((1, 1, 1)), [(0, 0)] * 3)
        self.assertEqual(self.dumps((2, 1), ranks=2, salt="ranks"), [(0, 0)] * 2 + [(0, 1)] * 2 + [(1, 1)] * 2)
        self.assertEqual(self.dumps((3,), ranks=2, context=2, replicated=True), [(0, 2)] * 2 + [(2, 1)] * 2)

    def test_stages_whose_layers_differ_in_size(self):
        """The stages' layers are cut into layers of one size, so one of the engine's layers is
        several."""
        for where in ("split", "packed"):
            with self.subTest(where):
                kv = 2 * BLOCK * model.KV_HEADS * model.HEAD
                more = kv // 2 // BLOCK
                self.assertEqual(self.dumps((2, 1), layout=where, salt=where, beside=(0, 0, more)), [(0, 0), (0, 2), (2, 2)])
                self.assertEqual(self.dumps((2, 1), layout=where, salt=where, beside=(0, more, 0)), [(0, 0)] * 2, "they go after the step")
        self.assertEqual(self.dumps((3,), beside=(0, more, 0)), [(0, 0)])

    def test_pieces_of_prompts_and_preemption(self):
        tight, wide = (self.pipeline(layer_stores=2 * BLOCK, budget=96, **more) for more in ({"blocks": 24}, {}))
        for e in (tight, wide):
            self.check(e, *[Request(f"r{i}", prompt(60 + i, 120), outputs=60) for i in range(4)])
        self.assertGreater(tight.preemptions, 0)
        self.assertGreater(wide.loaded_tokens, 0)

    def test_a_daemon_that_is_killed_between_two_groups(self):
        a, b = (self.pipeline(layer_stores=2 * BLOCK, budget=256) for _ in range(2))
        hook, killed = UcmConnector.save_kv_layer, []

        def kill(connector, name, *args):
            hook(connector, name, *args)
            if name == "layers.0" and not killed:
                killed.append(True)
                self.restart()
        with mock.patch.object(UcmConnector, "save_kv_layer", kill):
            self.check(a, Request("cold", prompt(70, 150)))
        for e in (a, b):
            self.connected(e)
        self.check(b, Request("gone", prompt(70, 150)))
        self.check(a, Request("again", prompt(71, 150)))
        self.eventually(lambda: self.loads(b, prompt(71, 150)))


class Contexts(Pipelines):
    """Decode context parallelism: a block's tokens lie on several ranks in turn. All layers are in
    one stage, unless said otherwise."""

    def test_tokens_in_turn(self):
        for more in ({"replicated": True}, {"replicated": True, "run": 4}, {"replicated": True, "layout": "packed"},
                     {"replicated": True, "async_load": False, "layerwise": True}):
            with self.subTest(**more):
                before = self.stats()["dump_blocks"]
                self.share((3,), ranks=2, context=2, salt=repr(more), **more)
                self.assertEqual(self.stats()["dump_blocks"] - before, 2 * (157 // BLOCK), "each rank stores its tokens")

    def test_heads_that_several_ranks_have(self):
        for context, ranks, kv_heads, parts in ((2, 4, 2, 4), (2, 4, 1, 2), (4, 4, 1, 4)):
            with self.subTest(context=context, kv_heads=kv_heads):
                before = self.stats()["dump_blocks"]
                self.share((3,), ranks=ranks, context=context, kv_heads=kv_heads)
                self.assertEqual(self.stats()["dump_blocks"] - before, parts * (157 // BLOCK), "of ranks with the same bytes one stores")

    def test_in_a_pipeline(self):
        self.share((2, 1), ranks=2, context=2, replicated=True)

    def test_other_turns_are_another_engine(self):
        self.share((3,), ranks=4, context=2, replicated=True)
        for more in ({"context": 1}, {"context": 4}, {"context": 2, "run": 2}):
            other = self.pipeline((3,), ranks=4, replicated=True, **more)
            self.check(other, Request("other", prompt(1, 150)))
            self.assertEqual(other.loaded_tokens, 0, more)

    def test_preemption(self):
        tight = self.pipeline((3,), ranks=2, context=2, replicated=True, blocks=24)
        self.check(tight, *[Request(f"r{i}", prompt(40 + i, 120), outputs=60) for i in range(4)])
        self.assertGreater(tight.preemptions, 0)

    def test_refusals_name_the_remedy(self):
        for more in ({"head_groups": 4}, {"summaries": "mean"}):
            with self.subTest(more), self.assertRaisesRegex(SomeRefused, f'context-parallel-size 1, or remove the setting "{[*more][0]}"'):
                self.pipeline((3,), ranks=2, context=2, replicated=True, **more)


class Encoded(Pipelines):
    DTYPE = "bfloat16"

    def test_lossless(self):
        for of in ((1, 1, 1), (2, 1)):
            for where in ("split", "packed"):
                with self.subTest(of, layout=where):
                    before = self.stats()["encode_bytes"]
                    self.share(of, layout=where, encoding="lossless", salt=where)
                    self.assertGreater(self.stats()["encode_bytes"], before)

    def test_lossless_of_tokens_in_turn(self):
        self.share((3,), ranks=2, context=2, replicated=True, encoding="lossless")


class Cuts(unittest.TestCase):
    """The same bytes in pieces of one size."""

    def test_pieces_are_the_layout_in_its_order(self):
        chunks = ((layout.Fragment(1000, 500, 30), layout.Fragment(2000, 500, 50)), (layout.Fragment(3000, 500, 80),))
        one = layout.Layout(chunks, 4, 80, "name", {"a": 0, "b": 1})
        self.assertIs(stages.cut(one, 80), one)
        small = stages.cut(one, 20)
        self.assertEqual(small.layers, (
            (layout.Fragment(1000, 500, 20),), (layout.Fragment(1020, 500, 10), layout.Fragment(2000, 500, 10)), (layout.Fragment(2010, 500, 20),),
            (layout.Fragment(2030, 500, 20),), *((layout.Fragment(3000 + i * 20, 500, 20),) for i in range(4))))
        self.assertEqual((small.layer_bytes, small.numbers), (20, {"a": 3, "b": 7}))

    def staged(self, *sizes, parts=(1, 1)):
        of = [stages.Stage("name", n, 1, size) for n, size in zip(parts, sizes)]
        one = layout.Layout(((layout.Fragment(0, 1 << 40, sizes[1]),),), 4, sizes[1], "name", {"all": 0})
        return stages.staged(lambda: one, identity.Ranks(0, 1, True), {}, 1, lambda _: of)

    def test_parts_and_layers_of_all_stages(self):
        of = self.staged(300, 200)
        self.assertEqual((of.ranks, of.layers, of.layout.layer_bytes), (identity.Ranks(1, 2, True), (3, 2), 100))
        of = self.staged(300, 300, parts=(4, 2))
        self.assertEqual((of.ranks, of.layers, len(of.layout.layers)), (identity.Ranks(4, 6, True), (1,) * 6, 1))

    def test_refusals(self):
        with self.assertRaisesRegex(identity.Unsupported, "VLLM_PP_LAYER_PARTITION"):
            self.staged(4096 * 16, 4095 * 16)
        with self.assertRaisesRegex(identity.Unsupported, "fewer ranks"):
            self.staged(300, 300, parts=(256, 1))


if __name__ == "__main__":
    watch()
    unittest.main()
