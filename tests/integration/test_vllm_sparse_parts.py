#!/usr/bin/python3
"""Parts of sparse decoding in vLLM that need no vLLM and no daemon. They say which requests are
sparse, when they are admitted, and which blocks have no pages. Also keys of blocks that sparse
tokens computed, entries in host memory, and reports of ranks. tests/engines/vllm/check_sparse.py
has the rest."""

import unittest
from types import SimpleNamespace

from vllm_paths import TOP  # noqa: F401: sets the paths of the others
from extra import extra_of

from ucmclient.decode import Choices, Room
from ucmclient.sparse import TopK
from ucmclient.engine.vllm import settings
from ucmclient.engine.vllm.connector import UcmProgress
from ucmclient.engine.vllm.identity import Unsupported
from ucmclient.engine.vllm.scheduler import SchedulerHalf
from ucmclient.engine.vllm.sparse_rules import Rules, rules_of
from ucmclient.engine.vllm.sparse_scheduler import SparseScheduler
from ucmclient.engine.vllm.sparse_entries import HostEntries

BLOCK = 16


def rules(**more):
    """A window of 2 blocks, and 2 more blocks of each of 3 layers."""
    choices = Choices.alike(TopK(sink_blocks=0, recent_blocks=2, topk_tokens=2 * BLOCK, min_blocks=0), 3)
    return Rules(**{"policy": "p", "choices": choices, "block_tokens": BLOCK, "prompt": 100, "lists": 1, "room": Room(12, 40),
                    "max_tokens": 1000, **more})


def request(name="r", prompt=160, most=16, **more):
    hashes = [bytes([i]) * 32 for i in range((prompt + most) // BLOCK)]
    return SimpleNamespace(**{"request_id": name, "num_prompt_tokens": prompt, "num_tokens": prompt, "max_tokens": most,
                              "num_computed_tokens": 0, "block_hashes": hashes, "num_preemptions": 0, **more})


def tracked(of, blocks):
    return SimpleNamespace(vllm=of, blocks=blocks, keys=lambda first, end: b"".join(of.block_hashes[first:end]))


class Pages(unittest.TestCase):
    def setUp(self):
        self.scheduler = SparseScheduler(rules(), budget=64)
        self.request = request()
        self.assertTrue(self.scheduler.admit(self.request))

    def test_pages_go_back_when_the_daemon_has_them_and_decoding_has_begun(self):
        s = self.scheduler
        self.assertEqual(s.give_back("r", 160), (0, 0))
        s.received({"r": 9}, (), ())
        self.assertEqual(s.give_back("r", 128), (0, 0), "the prompt is not computed")
        given = []
        s.given_back = lambda *told: given.append(told)
        self.assertEqual(s.give_back("r", 160), (0, 8))
        self.assertEqual(given, [("r", 8)])
        self.assertEqual(s.give_back("r", 175), (8, 8))
        s.received({"r": 9}, (), ())
        self.assertEqual(s.give_back("r", 176), (8, 9))
        self.assertEqual(s.give_back("dense", 176), (0, 0))

    def test_a_hit_takes_pages_for_its_window(self):
        s = self.scheduler
        self.assertEqual(s.needs_no_pages("r", 0, 144), 7)
        self.assertEqual(s.needs_no_pages("r", 2, 112), 7)
        self.assertEqual(s.needs_no_pages("r", 0, 80), 0, "more is left than a step may have")
        self.assertEqual(s.needs_no_pages("r", 0, 0), 0)
        self.assertEqual(s.needs_no_pages("dense", 0, 144), 0)

    def test_on_a_gpu_the_last_computed_blocks_window_has_pages(self):
        """A step that came short is computed again from the first token on of that block."""
        s = SparseScheduler(rules(on_gpu=True), budget=64)
        s.admit(self.request)
        s.received({"r": 12}, (), ())
        self.assertEqual(s.give_back("r", 176), (0, 8), "176 is a block's first token: 160 may be computed again")
        self.assertEqual(s.give_back("r", 177), (8, 9))
        self.assertEqual(s.needs_no_pages("r", 0, 160), 7)

    def test_lost_blocks(self):
        s = self.scheduler
        s.received({"r": 9}, (), ())
        for losses in range(1, 4):
            s.received({}, ["r"], ["r"])
            s.received({}, ["r"], ["r"])
            self.assertTrue(s.lost("r"))
            self.assertEqual(s.give_back("r", 160), (0, 0))
            s.freed("r")
            self.assertFalse(s.lost("r"))
            self.assertEqual(s.counts.lost, losses)
        s.received({"r": 9}, (), ())
        self.assertEqual(s.give_back("r", 160), (0, 0), "it has lost blocks too often and keeps its pages")
        self.assertEqual(s.needs_no_pages("r", 0, 144), 0)

    def test_the_engine_caches_dense_blocks_of_steps_that_are_over(self):
        s = self.scheduler
        self.assertEqual(s.cacheable(self.request, 64), 0)
        self.request.num_computed_tokens = 64
        self.assertEqual(s.cacheable(self.request, 128), 64)
        self.request.num_computed_tokens, self.request.num_in_flight_tokens = 128, 64
        self.assertEqual(s.cacheable(self.request, 160), 64)
        self.request.num_computed_tokens, self.request.num_in_flight_tokens = 176, 0
        self.assertEqual(s.cacheable(self.request, 177), 159)
        self.assertEqual(s.cacheable(request("dense"), 177), 177)

    def test_steps_tell_what_is_new(self):
        s, of = self.scheduler, tracked(self.request, [0] * 7 + [3, 4, 5])
        first = s.step(of, 144, 16, reset=True)
        self.assertEqual((first.pages, len(first.keys), first.first, first.end), (of.blocks, 10, 144, 160))
        of.blocks = of.blocks + [6]
        then = s.step(of, 160, 1, reset=False)
        self.assertEqual((then.pages, len(then.keys), then.reset), ([6], 1, False))
        again = s.step(of, 0, 64, reset=True)
        self.assertEqual((again.pages, len(again.keys)), (of.blocks, 11))
        self.assertIsNone(s.step(tracked(request("dense"), []), 0, 1, reset=True))


class Requests(unittest.TestCase):
    def half(self):
        half = SchedulerHalf(settings.Settings(), BLOCK, SparseScheduler(rules(), budget=64))
        return half, half.sparse

    def test_admission_by_entries_and_rows(self):
        half, s = self.half()
        self.assertEqual(half.matched_tokens(request("a"), 0), (0, False))
        self.assertEqual(half.matched_tokens(request("b"), 0), (0, False))
        third = request("c")
        self.assertEqual(half.matched_tokens(third, 0), (None, False), "12 entries are two requests' floors")
        self.assertEqual(half.matched_tokens(request("dense", prompt=99), 0), (0, False))
        half.finished(request("a"), [])
        self.assertEqual(half.matched_tokens(third, 0), (0, False))

    def test_keys_of_blocks_with_sparse_tokens(self):
        half, _ = self.half()
        keys = {}
        for prompt in (99, 160, 161, 162):
            keys[prompt] = [half._tracked(request(str(prompt), prompt)).keys(i, i + 1) for i in range(7)]
            keys[prompt] += [half._tracked(request(str(prompt), prompt)).keys(i, i + 1) for i in range(7, (prompt + 16) // BLOCK)]
        dense = [bytes([i]) * 32 for i in range(11)]
        self.assertEqual(keys[99], dense[:7])
        self.assertEqual(keys[160][:9], dense[:9])
        self.assertNotEqual(keys[160][9], dense[9], "it holds the prompt's last token")
        self.assertEqual(keys[161][:10], dense[:10])
        self.assertNotIn(keys[161][10], (dense[10], keys[160][10], keys[162][10]))


class Entries(unittest.TestCase):
    def test_a_step_keeps_its_entries_and_a_request_its_floor(self):
        entries = HostEntries(layer_heads=2, entries=4)

        def take(*wanted):
            entries.want(wanted)
            taken = entries.take()
            self.assertEqual([one[:2] for one in taken], [one[:2] for one in wanted])
            return [entry for _, _, entry in taken]

        entries.enter(1, 2)
        entries.enter(2, 0)
        entries.begin()
        entries.resolve(0, [(1, [0, 1], [[0, 1], [0]]), (2, [2], [[0]])], apart=False)
        self.assertEqual([one[:2] for one in entries.take()], [(0, 0), (0, 1), (0, 2)])
        entries.publish([True] * 3)
        self.assertNotIn(None, take((1, 2, 2)))
        entries.publish([True])
        self.assertEqual(take((0, 3, 2)), [None], "all are this step's")
        entries.publish([False])
        entries.begin()
        used = entries.entry(0, 2)
        entries.want([(0, 2, 2)])
        self.assertEqual([entry is None for entry in take((1, 3, 2), (0, 3, 2))], [False, True], "request 1 is at its floor")
        entries.publish([False, False])
        self.assertIsNone(entries.entry(1, 3))
        self.assertEqual(entries.entry(0, 2), used)
        entries.leave(1)
        self.assertNotIn(None, take((1, 3, 2), (0, 3, 2), (1, 4, 2)))
        entries.publish([True] * 3)
        entries.forget(3)
        self.assertEqual([entries.entry(layer_head, 3) for layer_head in (0, 1)], [None, None])
        self.assertNotIn(None, take((0, 9, 2), (1, 9, 2)))


class Reports(unittest.TestCase):
    def test_what_all_ranks_keep_and_any_lacks(self):
        both = UcmProgress(3, kept={"a": 4, "b": 2}, spoiled={}).aggregate(UcmProgress(3, kept={"a": 1}, spoiled={"b": 7}))
        self.assertEqual((both.kept, both.spoiled), ({"a": 1}, {"b": 7}))


class Refusals(unittest.TestCase):
    def engine(self, longest=8192, spec="SparseSpec", scheduler=(), cache="auto", **more):
        kind = type(spec, (), {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32})()
        group = SimpleNamespace(kv_cache_spec=kind, layer_names=["0", "1"])
        config = SimpleNamespace(
            model_config=SimpleNamespace(model="m", max_model_len=longest, **{"runner_type": "generate", **more}),
            cache_config=SimpleNamespace(cache_dtype=cache), scheduler_config=SimpleNamespace(**dict(scheduler)), speculative_config=None)
        return config, SimpleNamespace(kv_cache_groups=[group])

    def rules(self, settings_=(), **more):
        return rules_of(settings.Settings.parse(extra_of({"sparse": "auto", **dict(settings_)})), *self.engine(**more))

    def test_room_is_of_so_many_requests(self):
        one, four = self.rules({"sparse_room": 1}), self.rules()
        self.assertEqual((one.room.entries * 4, one.room.rows * 4), (four.room.entries, four.room.rows))
        self.assertEqual(one.room.rows, 8192 // BLOCK - 1 - 2)
        self.assertFalse(one.sparse(4096))
        self.assertTrue(one.sparse(4096 + BLOCK))

    def test_sentences(self):
        for words, more in (("--attention-backend CUSTOM", {"spec": "FullAttentionSpec"}),
                            ("--no-async-scheduling", {"scheduler": {"async_scheduling": True}}),
                            ("--kv-cache-dtype auto", {"cache": "fp8"}), ("does not generate", {"runner_type": "pooling"}),
                            ("no request would ever be sparse", {"longest": 4096}),
                            ("retrieval_stride", {"settings_": {"sparse": "esa"}}),
                            ("remove summaries", {"settings_": {"summaries": "mean"}}),
                            ("set async_load to true", {"settings_": {"async_load": False}}),
                            ("set encoding to none", {"settings_": {"encoding": "lossless"}})):
            with self.subTest(words), self.assertRaisesRegex(Unsupported, words):
                self.rules(**more)
        with self.assertRaisesRegex(ValueError, "did you mean \"auto\""):
            settings.Settings.parse(extra_of({"sparse": "atuo"}))


if __name__ == "__main__":
    unittest.main(verbosity=2)
