#!/usr/bin/python3
"""Sparse decoding in the small engine of tests/engines/vllm against a real daemon. A decoder has
all K and V in one array and attends the same blocks. Every output, and every choice of blocks, is
compared with the decoder's, bit for bit. Attention itself is compared with numpy's."""

import os
import shutil
import signal
import tempfile
import unittest
from dataclasses import replace

from vllm_case import BLOCK, Request, daemon, expected, prompt, run, watch  # sets the paths
from daemon import halt
from sparse_case import ALL, SparseCase, Together, forget_entries, policy, reference
import numpy
from engine import Pool
from sparse_engine import LOSSES
from ucmclient import sparse
from ucmclient.decode import Choices


class Attended(Together):
    def test_the_whole_budget_gives_dense_bits(self):
        e, tokens = self.engine(ALL), self.KNOWN
        request = e.request("all", tokens, outputs=15)
        self.check(e, request)
        self.assertGreater(self.counts(e).gathered, 0)
        for a, b, near in zip(request.logits, reference(tokens, 15, None).logits, expected(tokens, 15)):
            self.assertTrue(numpy.array_equal(a, b))
            numpy.testing.assert_allclose(a, near, rtol=1e-3, atol=1e-4)

    def test_policies(self):
        parts = sparse.TopK(sparse_ratio=0.25, min_blocks=1)
        for of in (policy(sparse.TopK(topk_tokens=2 * BLOCK, min_blocks=1, recent_blocks=1)),
                   policy(sparse.Mass(eps=0.6, beta_m=0.25, limit=5)),
                   policy(parts, sparse.Score(heads="max")),
                   Choices((sparse.TopK(sparse_ratio=1.0), parts, parts))):
            with self.subTest(of):
                e = self.engine(of)
                self.check(e, e.request("some", self.KNOWN, outputs=10))
                self.assertGreater(self.counts(e).gathered, 0)

    def test_a_prompt_that_is_longer_than_all_pages(self):
        e, before = self.cold(blocks=8, budget=24, entries=36), self.stats()["gather_items"]
        cold, warm = (e.request(name, prompt(601, 150), outputs=15) for name in ("cold", "warm"))
        self.check(e, cold)
        self.assertGreater(self.counts(e).streamed, 0)
        self.assertGreater(e.given_back, 0)
        self.check(e, warm)
        self.assertGreater(e.loaded_tokens, 0)
        of = self.counts(e)
        self.assertEqual((of.failed, of.gathered + of.streamed), (0, self.stats()["gather_items"] - before))

    def test_generated_tokens(self):
        """A block of them is summarised and stored when it is complete, and chosen later."""
        e = self.cold(policy(sparse.TopK(sparse_ratio=0.4, min_blocks=1)))
        request = e.request("long", prompt(602, 40), outputs=75)
        self.check(e, request)
        own = {b for blocks in request.choices.values() for b in blocks if b * BLOCK >= request.prompt_tokens}
        self.assertGreater(len(own), 1)
        self.assertEqual(self.counts(e).computed, 5)

    def test_what_sparse_tokens_computed_is_nobody_elses(self):
        e = self.cold()
        request = e.request("sparse", prompt(603, 60), outputs=40)
        self.check(e, request)
        for name, of, loaded in (("dense", Request, 48), ("sparse again", e.request, 80)):
            before, e.pool = e.loaded_tokens, Pool(e.blocks)
            self.check(e, of(name, request.tokens[:90], outputs=4))
            self.assertEqual(e.loaded_tokens - before, loaded, "what dense tokens computed")

    def test_two_ranks(self):
        """Each brings what its own heads chose."""
        e = self.known(self.engine(policy(sparse.TopK(sparse_ratio=0.25, min_blocks=1, sink_blocks=0, recent_blocks=1)), ranks=2))
        request = e.request("warm", self.KNOWN, outputs=15)
        self.check(e, request)
        chosen = [{(layer, b) for (_, layer, head), blocks in request.choices.items() if head in rank.heads for b in blocks} for rank in e.sparse]
        self.assertNotEqual(*chosen)
        for rank in (0, 1):
            self.assertGreater(self.counts(e, rank).gathered, 0)

    def test_prefixes_are_shared(self):
        e, held, gathered = self.cold(), [], []
        prompts = [prompt(604 + i, 100, shared=84) for i in range(2)]

        def between(e):
            held.append(e.sparse[0].decoder.rows.in_use)
        for name, these in (("stored", prompts), ("first", prompts[:1]), ("second", prompts[1:]), ("both", prompts)):
            e.pool, before = Pool(e.blocks), self.counts(e).gathered
            forget_entries(e)
            self.check(e, *(e.request(f"{name}{i}", tokens, outputs=12) for i, tokens in enumerate(these)), between=between)
            gathered.append(self.counts(e).gathered - before)
        self.assertEqual(max(held), 5, "of twice 5 blocks, which are the same")
        self.assertTrue(0 < gathered[3] < gathered[1] + gathered[2], gathered)

    def test_a_second_engine_computes_nothing(self):
        a, tokens = self.cold(), prompt(601, 100)
        self.check(a, a.request("cold", tokens, outputs=10))
        self.eventually(lambda: a.ranks[0].connector._worker.link.summaries.lookup_prefix(
            b"".join(a.request("", tokens).block_hashes)).blocks == 6)
        before = self.stats()
        b = self.cold()
        self.check(b, b.request("warm", tokens, outputs=5))
        self.assertEqual((b.loaded_tokens, self.counts(b).computed), (96, 0))
        after = self.stats()
        self.assertEqual([after[n] - before[n] for n in ("summaries_built", "dump_bytes")], [0, 0])


class Layouts(Together):
    DTYPE, KNOWN = "bfloat16", prompt(610, 70)

    def test_all(self):
        for layout in ("split", "fused", "packed", "content"):
            with self.subTest(layout):
                e = self.known(self.engine(layout=layout))
                self.check(e, e.request("some", self.KNOWN, outputs=6))
                self.assertGreater(self.counts(e).gathered, 0)


class Scheduled(Together):
    def test_sparse_and_dense_in_one_batch(self):
        e, mixed = self.engine(), []

        def between(e):
            mixed.append({hasattr(r, "choices") for r in e.running} == {True, False})
        self.check(e, e.request("a", self.KNOWN, outputs=12), Request("b", prompt(612, 40), outputs=12),
                   e.request("c", prompt(613, 40), outputs=12), Request("d", self.KNOWN, outputs=5), between=between)
        self.assertIn(True, mixed)

    def test_preemption(self):
        """A dense request, which keeps all its pages, preempts sparse ones."""
        e = self.cold(blocks=9, budget=48)
        requests = [e.request(f"r{i}", prompt(614 + i, 50, shared=32), outputs=40) for i in range(2)]
        self.check(e, Request("dense", prompt(612, 40), outputs=60), *requests)
        self.assertGreater(sum(r.num_preemptions for r in requests), 0)
        self.assertEqual((e.errors, e.recomputed), (0, 0))

    def test_loads_in_the_step(self):
        for more in ({}, {"layerwise": True}):
            e = self.engine(async_load=False, salt="in the step", **more)
            self.check(e, e.request("r", self.KNOWN, outputs=10))

    def test_aborts_in_the_middle_of_a_step(self):
        e, tokens, seen = self.engine(), self.KNOWN, []
        for nth in range(1, 4):
            gone = e.request(f"gone{nth}", tokens, outputs=15)
            seen.clear()

            def abort():
                seen.append(gone)
                if len(seen) == nth:
                    e.abort(gone.request_id)
            e.in_the_middle = abort
            self.check(e, gone, e.request(f"stays{nth}", prompt(610, 40), outputs=4), but=(gone.request_id,), between=forget_entries)
            self.assertLess(len(gone.logits), gone.outputs)
        self.nothing_held()


class Trouble(SparseCase):
    """The daemon dies, stalls, loses blocks."""

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="vllm_sparse.")
        self.addCleanup(shutil.rmtree, self.directory, True)
        self.daemon = daemon(directory=self.directory)
        self.addCleanup(self.stop)

    def at(self, e, output, do, name="r"):
        """Runs `do` once, when the request has so many outputs, and no pages but those of its window."""
        done, stored = [], []

        def between(e):
            request = e.requests.get(name)
            if done or request is None or len(request.logits) < output or request.status != "running":
                return
            n = e.policy.candidates(request.num_computed_tokens // BLOCK)
            if not stored:
                ns, keys = e.ranks[0].connector._worker.link.ns, b"".join(request.block_hashes[:n])
                stored.append(self.eventually(lambda: ns.lookup_prefix(keys).blocks == n))
            elif not any(e.pool.requests[name][:n]):
                done.append(do())
        self.addCleanup(lambda: self.assertTrue(done))
        return between

    def test_killed_with_all_that_it_had(self):
        e = self.engine(blocks=12)

        def kill():
            self.restart()
            forget_entries(e)
        self.check(e, e.request("r", prompt(600, 100), outputs=15), between=self.at(e, 5, kill))
        self.assertGreater(e.recomputed, 0)
        self.nothing_held()

    def test_killed_and_back_with_its_disk(self):
        """No block is computed again, and the new daemon keeps the blocks from then on."""
        e, sequences = self.engine(ranks=2, gather_timeout=20.0), []

        def kill():
            self.eventually(lambda: self.stats()["nvme_writes"] >= 2 * 7)
            self.daemon.kill()
            self.daemon = daemon(directory=self.directory)
            forget_entries(e)
        killed, later = self.at(e, 5, kill), self.at(e, 9, lambda: sequences.append(self.stats()["sequences"]))
        self.check(e, e.request("r", prompt(600, 100), outputs=15), between=lambda e: (killed(e), later(e)))
        self.assertEqual((e.recomputed, e.errors, sequences), (0, 0, [2]))

    def test_evicted_by_name(self):
        """A sequence's lease brings nothing back. The request is computed again, and a later one
        finds the blocks that it stored."""
        self.stop()
        self.daemon = daemon(nvme=False)  # a block that is still being written could not be stored again
        e, tokens = self.engine(), prompt(600, 100)

        def evict():
            ns = e.ranks[0].connector._worker.link.ns
            ns.evict()
            self.assertEqual(ns.lookup_prefix(b"".join(e.requests["r"].block_hashes)).blocks, 0)
            self.assertEqual(self.stats()["sequences"], 1)
            forget_entries(e)
        self.check(e, e.request("r", tokens, outputs=15), between=self.at(e, 5, evict))
        self.assertEqual((e.recomputed, e.errors, e.loaded_tokens), (1, 0, 0))
        self.assertGreater(self.counts(e).failed, 0)
        e.pool = Pool(e.blocks)
        self.check(e, e.request("later", tokens, outputs=2))
        self.assertEqual((e.recomputed, e.loaded_tokens), (1, 96))

    def test_the_mapping_goes_between_steps(self):
        """Blocks are evicted by name, wanted back by the daemon, or gone with it. They are counted
        misses, and bytes stay right. Nobody brings evicted blocks back, so the request is computed
        again."""
        self.stop()
        config = "mapping:\n  size: {}MiB\n"

        def evicted(e):
            for rank in e.ranks:
                rank.connector._worker.link.ns.evict()

        def revoked(e):
            before = self.stats()["mapping_revocations"]
            self.daemon.configure(config.format(0))
            os.kill(self.daemon.process.pid, signal.SIGHUP)

            def given_back():
                for rank in e.sparse:
                    rank.decoder.begin()
                stats = self.stats()
                return stats["mapping_revocations"] > before and stats["mapping_bytes"] == 0
            self.eventually(given_back)

        def killed(e):
            self.eventually(lambda: self.stats()["nvme_writes"] >= 2 * 7)
            self.daemon.kill()
            self.daemon = daemon(directory=self.directory, config=config.format(8))
        for apart, happens in ((False, evicted), (True, revoked), (False, revoked), (True, killed)):
            with self.subTest(happens.__name__, apart=apart):
                shutil.rmtree(self.directory, True)
                os.mkdir(self.directory)
                self.daemon = daemon(directory=self.directory, config=config.format(8))
                e, counts = self.engine(ALL, ranks=2, mapping=True, apart=apart, gather_timeout=20.0), []

                def happen():
                    counts.append([replace(self.counts(e, r)) for r in (0, 1)])
                    happens(e)
                    forget_entries(e)
                self.check(e, e.request("r", prompt(600, 100), outputs=15), between=self.at(e, 5, happen))
                for rank, before in enumerate(counts[0]):
                    after = self.counts(e, rank)
                    lost = happens is evicted
                    self.assertEqual((before.evicted, after.evicted > 0, after.failed > before.failed), (0, True, lost), (before, after))
                    self.assertTrue(lost or after.gathered > before.gathered, (before, after))
                self.assertEqual((e.errors, e.recomputed), (0, happens is evicted))
                e.close()
                self.stop()
        self.daemon = None

    def test_evicted_while_nothing_keeps_it(self):
        e, tokens = self.engine(), prompt(600, 100)
        self.check(e, e.request("cold", tokens, outputs=2))
        self.nothing_held()
        e.pool = Pool(e.blocks)
        taken, ns = e.connector._scheduler.allocated, e.ranks[0].connector._worker.link.ns

        def allocated(request, blocks, loaded):
            taken(request, blocks, loaded)
            if loaded:
                e.connector._scheduler._release(e.connector._scheduler._requests[request.request_id])
                ns.evict()
        e.connector._scheduler.allocated = allocated
        self.check(e, e.request("r", tokens, outputs=5))
        self.assertGreater(e.loaded_tokens, 0)
        self.assertGreater(e.recomputed, 0)

    def test_stalled(self):
        e, pid = self.engine(gather_timeout=0.2), self.daemon.process.pid

        def stall():
            halt(pid)
            forget_entries(e)

        def go_on():
            if e.recomputed:
                os.kill(pid, signal.SIGCONT)
        stop = self.at(e, 5, stall)
        self.check(e, e.request("r", prompt(600, 100), outputs=15), between=lambda e: (stop(e), go_on()))
        self.assertGreater(e.recomputed, 0)

    def gone_for_good(self, blocks):
        e = self.engine(blocks=blocks, gather_timeout=0.1, patience=0.1, retry_interval=10.0, lookup_timeout=0.2)
        request = e.request("r", prompt(600, 100), outputs=15)
        self.addCleanup(setattr, self, "daemon", None)

        def kill():
            self.daemon.kill()
            forget_entries(e)
        return e, request, run(e, request, between=self.at(e, 5, kill))

    def test_gone_for_good(self):
        """A request that fits into pages is computed."""
        e, _, done = self.gone_for_good(24)
        self.same(done)
        self.assertEqual((e.recomputed, e.errors), (1, 0))

    def test_gone_for_good_and_no_pages(self):
        """The request ends with a sentence."""
        e, request, _ = self.gone_for_good(8)
        self.assertEqual(request.error, f"blocks of r did not come, {LOSSES} times")
        self.assertEqual(e.errors, 1)
        e.step()
        self.assertTrue(e.idle())


if __name__ == "__main__":
    watch()
    unittest.main(verbosity=2)
