#!/usr/bin/python3
"""The vLLM connector's setting `layer_stores`, in the small engine of tests/engines/vllm against a
real daemon. A prompt's blocks go to the daemon while their step computes. Outputs are the same bit
for bit as without a cache."""

import os
import unittest
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, GPU, Case, Request, daemon, model, prompt, watch, wild  # sets the paths
from extra import extra_of

import test_vllm_trouble
from ucmclient import Region
from ucmclient.errors import Status, UcmError
from ucmclient.engine.vllm import identity, layer_stores, settings
from ucmclient.engine.vllm.connector import UcmConnector
from ucmclient.engine.vllm.layout import Fragment, Layout

BY_LAYER = {"layer_stores": 2 * BLOCK, "layout": "packed"}
HOOK = UcmConnector.save_kv_layer
GROUPS = [(0, 2), (2, 1)]


class Calls:
    """Counts dumps: of which layers, and of how many blocks."""

    def __init__(self, case):
        self.made, dump = [], Region.dump

        def counted(region, keys, blocks, *, layer=0, layers=0, **named):
            self.made.append((layer, layers, len(blocks)))
            return dump(region, keys, blocks, layer=layer, layers=layers, **named)
        patch = mock.patch.object(Region, "dump", counted)
        patch.start()
        case.addCleanup(patch.stop)


class LayerStores(Case):
    def hooked(self, hook):
        patch = mock.patch.object(UcmConnector, "save_kv_layer", hook)
        patch.start()
        self.addCleanup(patch.stop)

    def shared(self, seed, tokens=150, **more):
        a, b = (self.engine(**{**BY_LAYER, "budget": 256, **more}) for _ in range(2))
        text = prompt(seed, tokens)
        self.check(a, Request("cold", text))
        self.check(b, Request("warm", text))
        self.assertEqual(b.loaded_tokens, tokens // BLOCK * BLOCK)

    def test_prompts_go_by_layers_and_what_decode_adds_does_not(self):
        calls, a = Calls(self), self.engine(**BY_LAYER, budget=256)
        self.check(a, Request("cold", prompt(800, 150), outputs=2 * BLOCK))
        self.assertEqual(calls.made, [(*group, 150 // BLOCK) for group in GROUPS] + [(0, 0, 1)] * 2)

    def test_layouts_ranks_parts_and_pieces(self):
        for i, more in enumerate(({"layout": "split"}, {"layout": "fused"}, {"ranks": 2}, {"budget": 64}, {"async_load": False},
                                  {"layout": "heads", "head_groups": 4, "ranks": 2})):
            with self.subTest(more):
                self.shared(810 + i, salt=repr(more), **more)

    def test_it_is_there_when_the_last_layer_ends_and_not_before(self):
        found = []

        def hook(connector, name, *args):
            HOOK(connector, name, *args)
            if not found or len(found) < model.LAYERS:
                if name == f"layers.{model.LAYERS - 1}":
                    self.eventually(lambda: self.stats()["dump_blocks"] >= 150 // BLOCK)
                found.append(self.stats()["dump_blocks"])
        self.hooked(hook)
        self.shared(820)
        self.assertEqual(found, [0, 0, 150 // BLOCK])

    def test_several_requests_of_a_step_go_together(self):
        calls, a = Calls(self), self.engine(**BY_LAYER, budget=256)
        self.check(a, *(Request(f"r{i}", prompt(830 + i, 5 * BLOCK), outputs=2) for i in range(3)), Request("few", prompt(839, BLOCK + 3), outputs=2))
        self.assertEqual([call for call in calls.made if call[1]], [(*group, 15) for group in GROUPS])

    def test_layers_whose_hook_is_not_called_go_after_the_step(self):
        """As within full CUDA graphs."""
        for i, (left, groups) in enumerate((((0, 1, 2), [(0, 0)]), ((0,), [(0, 0)]), ((2,), GROUPS))):
            with self.subTest(left):
                calls = Calls(self)

                def hook(connector, name, *args):
                    if int(name[-1]) not in left:
                        HOOK(connector, name, *args)
                self.hooked(hook)
                self.shared(840 + i)
                self.assertEqual([call[:2] for call in calls.made if call[2] > 1], groups)

    def test_a_daemon_that_is_killed_between_two_groups(self):
        killed = []

        def hook(connector, name, *args):
            HOOK(connector, name, *args)
            if name == "layers.1" and not killed:
                killed.append(True)
                self.restart()
        self.hooked(hook)
        a, b = self.engine(**BY_LAYER, budget=256), self.engine(**BY_LAYER, budget=256)
        self.check(a, Request("cold", prompt(850, 150)))
        self.eventually(lambda: self.loads(b, prompt(850, 150)) or self.check(a, Request(f"again{len(killed)}{killed.append(True)}", prompt(850, 150))))

    def test_a_group_that_is_not_taken(self):
        """No lookup sees any of it. The next step's store of all layers replaces it."""
        dump, a, b = Region.dump, self.engine(**BY_LAYER, budget=256), self.engine(**BY_LAYER, budget=256)

        def refused(region, *args, layer=0, **named):
            if layer:
                raise UcmError(Status.NO_MEMORY, "none is left")
            return dump(region, *args, layer=layer, **named)
        tokens = prompt(860, 150)
        with mock.patch.object(Region, "dump", refused):
            self.check(a, Request("cold", tokens))
        self.assertEqual(a.connector._scheduler.link.ns.lookup_prefix(b"".join(Request("x", tokens).block_hashes)).blocks, 0)
        self.check(b, Request("after the step", tokens[:40]))  # a store of few blocks
        self.check(a, Request("again", tokens))
        b.pool = b._new_pool()
        self.check(b, Request("warm", tokens))
        self.assertGreater(b.loaded_tokens, 0)

    def test_events_live_as_long_as_their_store(self):
        """The daemon waits for the events of all groups, and a freed event tells it nothing."""
        events, lost = weakref.WeakSet(), []

        class Event:
            def __init__(self):
                events.add(self)

            def ipc_handle(self):
                lost.extend([len(events)] if len(events) != self.number else [])

            def query(self):
                return True
        a, made = self.engine(**BY_LAYER, budget=256), []

        def event():
            made.append(None)
            one = Event()
            one.number = len(made)
            return one
        worker = a.ranks[0].connector._worker
        worker.event = event
        a.add(Request("cold", prompt(865, 150), outputs=2))
        with mock.patch.object(worker, "_store_done", lambda store: False):
            a.step()
        self.assertEqual((len(made), len(events), lost), (len(GROUPS), len(GROUPS), []))
        self.eventually(lambda: a.step() or not worker._stores)
        self.assertEqual(len(events), 0)
        self.check(a, but=("cold",))

    def test_an_engine_that_ends_midway(self):
        def hook(connector, name, *args):
            HOOK(connector, name, *args)
            if name == "layers.1":
                raise KeyboardInterrupt
        a = self.engine(**BY_LAYER, budget=256)
        with mock.patch.object(UcmConnector, "save_kv_layer", hook), self.assertRaises(KeyboardInterrupt):
            self.check(a, Request("cold", prompt(870, 150)))
        self.eventually(lambda: all(store.task.check() is not None for rank in a.ranks for store in rank.connector._worker._stores))
        self.assertEqual((self.stats()["dump_blocks"], self.stats()["dump_blocks_dropped"]), (0, 0))
        a.close()
        self.eventually(lambda: self.stats()["dump_blocks_dropped"] == 150 // BLOCK)
        self.assertEqual(self.stats()["dump_blocks"], 0)


@unittest.skipIf(GPU, "the host's memory says enough")
class Encoded(LayerStores):
    DTYPE = "bfloat16"

    def test_lossless(self):
        self.shared(880, encoding="lossless")

    def test_what_lossless_can_not_hold_is_stored_as_it_is(self):
        with wild():
            self.shared(881, encoding="lossless")


for name in [name for name in dir(LayerStores) if name.startswith("test_")]:
    setattr(Encoded, name, None)


@unittest.skipUnless(os.environ.get("UCM_PHASE", "plain") == "plain", "sanitizers see test_vllm_trouble.py itself")
class LayerStoresTrouble(test_vllm_trouble.Trouble):
    def engine(self, **more):
        return super().engine(**{**BY_LAYER, **more})


for name in dir(test_vllm_trouble.Trouble):
    if name.startswith("test_") and not any(word in name for word in ("preemption", "reset", "aborts")):
        setattr(LayerStoresTrouble, name, None)


class Rules(unittest.TestCase):
    def test_groups_of_layers(self):
        self.assertEqual(layer_stores.bounds_of(32), [16, 24, 28, 30, 32])
        self.assertEqual([layer_stores.bounds_of(n) for n in (2, 3, 5)], [[1, 2], [2, 3], [3, 4, 5]])

    def test_engines_that_store_after_the_step_all_the_same(self):
        layers = Layout(((Fragment(0, 8, 8),), (Fragment(8, 8, 8),)), 4, 8, "x", {"a": 0, "b": 1})
        one = replace(layers, numbers={"a": 1, "b": 1})  # as a pipeline cuts it
        worker = SimpleNamespace(settings=settings.Settings(layer_stores=512), writes=True, layers=None)

        def of(layout=layers, parallel=(), speculative=None):
            config = SimpleNamespace(parallel_config=SimpleNamespace(**dict(parallel)), speculative_config=speculative)
            return layer_stores.store_by_layer(worker, config, layout)[1]
        draft = SimpleNamespace(use_eagle=lambda: True)
        self.assertIn("in 2 groups", of())
        for sentence, words in ((of(one), "one tensor"), (of(parallel={"enable_dbo": True}), "--enable-dbo"), (of(speculative=draft), "draft layers")):
            self.assertRegex(sentence, "after their step.*" + words)
        worker.writes = False
        self.assertEqual(of(), "")

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "remove one of them"):
            settings.Settings.parse(extra_of({"layer_stores": 512, "sparse": "auto"}))
        with self.assertRaisesRegex(identity.Unsupported, 'remove the setting "layer_stores"'):
            layer_stores.check_layer_stores(settings.Settings(layer_stores=512), True)


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
