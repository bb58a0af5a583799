#!/usr/bin/python3
"""Entries of the small engine with sparse decoding: their bytes, the lane that fills each, and how
many each request has. sparse_case.py has the expected outputs."""

import time
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_case import BLOCK, Request, daemon, prompt, run, watch  # sets the paths
from sparse_case import ALL, QUARTER, Together, forget_entries, policy
import model
from engine import Pool
from ucmclient import sparse
from ucmclient.decode import Choices, Refused


class Apart(Together):
    """Entries of one KV head of a layer: the daemon brings whole layers, and the worker keeps what its heads chose."""

    DTYPE = "bfloat16"

    def test_layouts(self):
        for layout in ("split", "packed", "content"):
            with self.subTest(layout):
                e = self.known(self.engine(layout=layout, apart=True, entries=100, stream=3))
                request = e.request("some", self.KNOWN, outputs=6)
                self.check(e, request)
                self.assertGreater(self.counts(e).gathered, 0)

    def test_one_list_for_all_heads(self):
        e = self.engine(policy(sparse.TopK(sparse_ratio=0.25, min_blocks=1), sparse.Score(heads="max")), apart=True)
        self.check(e, e.request("some", self.KNOWN, outputs=6))
        self.assertEqual(self.counts(e).gathered % model.KV_HEADS, 0)

    def test_less_memory_holds_the_same(self):
        """An entry of a layer holds heads that did not choose its block."""
        held = {}
        for apart in (False, True):
            e = self.engine(policy(sparse.TopK(sparse_ratio=0.2, min_blocks=1, sink_blocks=0)), apart=apart)
            self.check(e, e.request("some", self.KNOWN, outputs=6))
            decoder = e.sparse[0].decoder
            held[apart] = decoder.entry_bytes * sum(decoder.entries.entry(layer_head, row) is not None for layer_head in range(model.LAYERS * decoder.layer_heads)
                                                   for row in range(e.room.rows))
        self.assertLess(held[True], held[False])

    def test_two_ranks(self):
        e = self.known(self.engine(ranks=2, apart=True))
        self.check(e, e.request("some", self.KNOWN, outputs=6))


class Mapped(Together):
    """What the daemon's mapping has is read in the middle of a layer: no step is repeated for it."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = daemon(nvme=False, **{"mapping.size": "8MiB"})
        cls.addClassCleanup(cls.daemon.stop)

    def test_no_step_is_repeated(self):
        for apart in (False, True):
            for of in (QUARTER, ALL, policy(sparse.TopK(sparse_ratio=0.25, min_blocks=1), sparse.Score(heads="max"))):
                with self.subTest(apart=apart, policy=of):
                    e = self.engine(of, mapping=True, apart=apart)
                    self.check(e, e.request("some", self.KNOWN, outputs=10))
                    counts = self.counts(e)
                    self.assertEqual((e.replays, counts.gathered, counts.evicted, counts.misses), (0, 0, 0, counts.mapped))
                    self.assertGreater(counts.mapped, 0)

    def test_prefill_reads_it_too(self):
        e, before = self.engine(mapping=True, salt=self.id(), blocks=8, budget=24, entries=36, ranks=2), self.stats()["gather_items"]
        self.check(e, e.request("cold", prompt(601, 150), outputs=15))
        self.assertGreater(self.counts(e).streamed, 0)
        self.assertEqual(self.stats()["gather_items"] - before, sum(self.counts(e, r).gathered for r in (0, 1)))

    def test_blocks_that_left_it(self):
        """Blocks that the mapping lost come by gather, in the same step."""
        e = self.engine(ALL, mapping=True)
        mapped = [rank.decoder for rank in e.sparse]

        def between(e):
            forget_entries(e)
            for decoder in mapped:
                for row in list(decoder._places)[::2]:
                    decoder._places[row].seq += 2
        request = e.request("some", self.KNOWN, outputs=10)
        self.check(e, request, between=between)
        counts = self.counts(e)
        self.assertTrue(counts.mapped and counts.evicted and counts.gathered and e.replays, counts)

    def test_a_daemon_without_mappings(self):
        own, self.daemon = self.daemon, daemon(nvme=False)
        self.addCleanup(setattr, self, "daemon", own)
        self.addCleanup(self.daemon.stop)
        e = self.known(self.engine(mapping=True))
        self.check(e, e.request("some", self.KNOWN, outputs=5))
        self.assertEqual(self.counts(e).mapped, 0)
        self.assertGreater(self.counts(e).gathered, 0)


class Admitted(Together):
    def test_what_no_memory_would_hold_is_refused(self):
        for more, words in (({"entries": 20}, "needs 36 entries and this worker has 20: give it more, choose fewer blocks"),
                            ({"rows": 5}, "needs 13 rows of summaries and this worker has 5"),
                            ({"blocks": 7}, "need 7 pages, and there are 6")):
            e = self.engine(**more)
            with self.assertRaisesRegex(Refused, words):
                e.add(e.request("large", prompt(601, 200), outputs=30))
            self.assertEqual(e.requests, {})
            self.check(e, Request("dense", prompt(610, 40), outputs=2))

    def test_others_wait(self):
        e, most = self.engine(entries=20), []

        def between(e):
            most.append(sum(hasattr(r, "choices") for r in e.running + e.loading))
        self.check(e, *(e.request(f"r{i}", prompt(600, 100 - 10 * i), outputs=10) for i in range(2)), between=between)
        self.assertEqual(max(most), 1)

    def test_more_than_fits(self):
        """Both were expected to take little, but take all. The later request waits until the first
        is over."""
        e = self.engine(ALL, entries=20)
        e.admission.expected = 0.1
        first, last = e.request("first", self.KNOWN, outputs=10), e.request("last", prompt(610, 100), outputs=10)
        self.check(e, first, last)
        self.assertEqual((e.left_out, first.num_preemptions + last.num_preemptions, first.wary or last.wary, e.errors), (1, 1, True, 0))
        self.assertGreater(e.admission.expected, 0.1)

    def test_more_tokens_than_fit(self):
        """A step computes many sparse tokens of one request again, and their choices differ."""
        of = policy(sparse.TopK(sparse_ratio=0.2, min_blocks=1, sink_blocks=0, recent_blocks=1), sparse.Score(heads="max"))
        e = self.cold(of, blocks=12, budget=48, entries=model.LAYERS * 2, stream=4)
        request = e.request("r", prompt(619, 140), outputs=40)
        evicted = []

        def between(e):
            if len(request.logits) == 30 and not evicted and request.status == "running":
                evicted.append(e.ranks[0].connector._worker.link.ns.evict())
                e._preempt(e.running.pop())
                e.pool = Pool(e.blocks)
        self.check(e, request, between=between)
        self.assertEqual((request.alone, e.errors), (True, 0))

    def test_for_so_long(self):
        e, now = self.engine(entries=12, wait=0.05), 1.0
        first, last = e.request("first", self.KNOWN, outputs=40), e.request("last", prompt(610, 100), outputs=10)

        def between(e):
            nonlocal now
            if any(r.unfit_since is not None for r in e.waiting):
                now += 0.06  # otherwise the first may be done before the other one is late
        with mock.patch("sparse_engine.time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)):
            done = run(e, first, last, between=between)
        late = [r.request_id for r in (first, last) if r.error is not None]
        self.assertEqual([done[name].error for name in late], [f"{name} waited 0.05 s for entries" for name in late])
        self.assertEqual(len(late), 1)
        self.same(done, late)
        e.step()
        self.assertTrue(e.idle())

    def test_a_policy_by_its_text(self):
        """The text has its summary, its windows in its own units, and its length."""
        for text in ("topk:topk_tokens=64,dense_below=48", "auto:min_tokens=64,budget_tokens=512,dense_below=0",
                     "gsa-device:topk_tokens=80,sink_tokens=16,recent_tokens=32,dense_below=0",
                     "topk:topk_tokens=64,reuse=2,dense_below=0", "gsa:lag=0,sink_blocks=1,recent_blocks=1,dense_first=1,dense_below=0"):
            with self.subTest(text):
                ranks = 2 if sparse.Policy(text).score.heads == "each" else 1  # else lists would be of each rank's heads
                e = self.engine(text, salt=text, ranks=ranks, apart=True)
                request = e.request("r", self.KNOWN, outputs=15)
                self.check(e, request)
                self.assertGreater(len({tuple(blocks) for blocks in request.choices.values()}), 3)
                if text.startswith("topk:topk"):
                    self.assertEqual({len(blocks) for blocks in request.choices.values()}, {2}, "four, of which the window has two")

    def test_layers_that_share_a_choice_have_no_summaries(self):
        """Their summaries are neither computed from pages nor loaded. Layers 0 and 2 choose; layer
        1 attends what layer 0 chose."""
        for how in ("computed", "loaded"):  # by the second engine, which finds the prompt in the daemon
            e = self.engine("topk:topk_tokens=64,reuse=2,dense_below=0", salt="share a choice", ranks=2, apart=True)
            self.check(e, e.request("r", self.KNOWN, outputs=15))
            for decoder in (rank.decoder for rank in e.sparse):
                self.assertEqual((decoder.summarised, len(decoder._summaries.buffer)), ((0, 2), 2 * e.room.rows * decoder.summary.bytes))
                self.assertGreater(getattr(decoder.counts, how), 0)

    def test_windows(self):
        with self.assertRaisesRegex(ValueError, "1 or more"):
            policy(sparse.TopK(recent_blocks=0))


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
