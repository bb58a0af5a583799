#!/usr/bin/env python3
"""Sparse decoding in the small engine of tests/vllm against a real daemon. Every output is compared, bit for bit, with that of a decoder
that has all K and V in one array and attends the same blocks; and so are the blocks. Attention itself is compared with numpy's."""

import os
import shutil
import signal
import tempfile
import time
import unittest

from vllm_case import BLOCK, MODEL, Case, Request, daemon, expected, prompt, run, watch  # sets the paths
import numpy
import kernels
import model
from engine import HostPages, Pool
from sparse_engine import LOSSES, SparseEngine
from ucmclient import sparse
from ucmclient.decode import Choices, Refused
from ucmclient.vllm.connector import UcmConnector


def policy(choice, score=sparse.Score()):
    return Choices.alike(choice, model.LAYERS, score)


QUARTER = policy(sparse.TopK(sparse_ratio=0.25, min_blocks=1, local_window_sz=1))
ALL = policy(sparse.TopK(sparse_ratio=1.0))
REFERENCES, PREFILLED = {}, {}


class Reference:
    """logits of each output, and choices as SparseRequest has them. policy None: every token is dense. What kernels/attend computes is
    compared with a softmax of numpy's."""

    def __init__(self, tokens, outputs, policy, dtype):
        self.policy, self.dtype = policy, {"float32": "f32", "bfloat16": "bf16"}[dtype]
        shape = model.LAYERS, -(-(len(tokens) + outputs) // BLOCK), 2, BLOCK, model.KV_HEADS, model.HEAD
        self.memory = HostPages(int(numpy.prod(shape)), dtype)
        self.kv = self.memory.whole.reshape(shape)
        self.digest = sparse.mean(sparse.Shape(self.dtype, BLOCK, model.KV_HEADS, model.HEAD))
        self.logits, self.choices, first = [], {}, len(tokens) - 1
        done, tokens = self.prefilled(tokens[:first], dtype), list(tokens)
        for position in range(done, first + outputs):
            hidden = MODEL.embedding[tokens[position]]
            for layer in range(model.LAYERS):
                for i, row in enumerate(MODEL.keys_values(layer, hidden, position)):
                    self.memory.put(self.kv[layer, position // BLOCK, i, position % BLOCK], row)
                hidden = self.layer(layer, hidden, position, position >= first)
            if position >= first:
                self.logits.append(MODEL.logits(hidden))
                tokens.append(int(numpy.argmax(self.logits[-1])))
            if position == first - 1:
                PREFILLED[tuple(tokens[:first]), dtype] = self.kv.copy()

    def prefilled(self, tokens, dtype):
        earlier = PREFILLED.get((tokens, dtype))
        if earlier is None:
            return 0
        n = -(-len(tokens) // BLOCK)
        self.kv[:, :n] = earlier[:, :n]
        return len(tokens)

    def layer(self, layer, hidden, position, chosen):
        q, lists = MODEL.queries(layer, hidden, position), None
        if chosen and self.policy is not None:
            candidates = max(0, position // BLOCK - self.policy.window)
            lists = self.lists(layer, candidates, q)
            lists *= model.KV_HEADS // len(lists)
            self.choices.update({(position, layer, head): blocks for head, blocks in enumerate(lists)})
            lists = [blocks + list(range(candidates, position // BLOCK + 1)) for blocks in lists]
        outputs = kernels.over(self.kv[layer], q, position, lists, self.dtype)
        if chosen:
            self.compare(layer, q, position, lists, outputs)
        return MODEL.after(layer, hidden, outputs)

    def compare(self, layer, q, position, lists, outputs):
        for head, out in enumerate(outputs):
            blocks = range(position // BLOCK + 1) if lists is None else lists[head]
            tokens = [t for b in blocks for t in range(b * BLOCK, min((b + 1) * BLOCK, position + 1))]
            k, v = (self.memory.get(self.kv[layer, :, i, :, head]).reshape(-1, model.HEAD)[tokens] for i in (0, 1))
            numpy.testing.assert_allclose(out, model.attend(q[model.heads_of(head)], k, v), rtol=1e-4, atol=1e-5)

    def lists(self, layer, candidates, q):
        if candidates == 0:
            return [[]]
        k = numpy.ascontiguousarray(self.kv[layer, :candidates, 0]).reshape(candidates, -1)
        chosen = self.digest.compute(k).select(q, self.policy.of_candidates(layer, candidates), self.policy.score)
        return [list(one) for one in chosen.lists]


def reference(tokens, outputs, policy, dtype="float32"):
    key = (tuple(tokens), outputs, policy, dtype)
    if key not in REFERENCES:
        REFERENCES[key] = Reference(*key)
    return REFERENCES[key]


def forget_slots(e):
    for rank in e.sparse:
        for row in range(e.room.rows):
            rank.decoder.slots.forget(row)


class SparseCase(Case):
    def engine(self, policy=QUARTER, **more):
        more = {"socket": self.daemon.socket, "retry_interval": 0.05, "lookup_timeout": 2.0, "dtype": self.DTYPE, "fetch_deadline": 20.0,
                "patience": 20.0, **more}
        e = SparseEngine(MODEL, UcmConnector, sparse=policy, **more)
        self.addCleanup(e.close)
        return e

    def same(self, requests, but=()):
        for name in requests.keys() - set(but):
            r = requests[name]
            of = reference(r.tokens[: r.prompt_tokens], r.outputs, getattr(r, "policy", None), self.DTYPE)
            self.assertEqual((getattr(r, "error", None), getattr(r, "choices", {})), (None, of.choices))
            self.assertEqual(len(r.logits), len(of.logits))
            for i, (a, b) in enumerate(zip(r.logits, of.logits)):
                self.assertTrue(numpy.array_equal(a, b), f"{name}, output {i}")

    def check(self, e, *requests, but=(), **more):
        self.same(run(e, *requests, **more), but)
        e.step()  # the workers learn which requests are over
        self.assertTrue(e.idle(), "something was never given back")

    def nothing_held(self):
        self.eventually(lambda: all(self.stats()[name] == 0 for name in ("chains", "leases")))

    @staticmethod
    def counts(e, rank=0):
        return e.sparse[rank].decoder.counts


class Together(SparseCase):
    """Many tests, one daemon, which has the blocks of this prompt."""

    KNOWN = prompt(600, 100)

    @classmethod
    def setUpClass(cls):
        cls.daemon = daemon(nvme=False)
        cls.addClassCleanup(cls.daemon.stop)

    def setUp(self):
        if "stored" not in type(self).__dict__:
            type(self).stored = self.known(self.engine())

    def known(self, e):
        """From now on the engine has no pages of the prompt's blocks, and so fetches what it chooses."""
        self.check(e, e.request("known", self.KNOWN, outputs=1))
        e.pool = Pool(e.blocks)
        return e

    def engine(self, policy=QUARTER, **more):
        return super().engine(policy, **{"salt": "together", **more})

    def cold(self, policy=QUARTER, **more):
        return self.engine(policy, salt=self.id(), **more)


class Attended(Together):
    def test_the_whole_budget_gives_dense_bits(self):
        e, tokens = self.engine(ALL), self.KNOWN
        request = e.request("all", tokens, outputs=15)
        self.check(e, request)
        self.assertGreater(self.counts(e).fetched, 0)
        for a, b, near in zip(request.logits, reference(tokens, 15, None).logits, expected(tokens, 15)):
            self.assertTrue(numpy.array_equal(a, b))
            numpy.testing.assert_allclose(a, near, rtol=1e-3, atol=1e-4)

    def test_policies(self):
        parts = sparse.TopK(sparse_ratio=0.25, min_blocks=1)
        for of in (policy(sparse.TopK(topk_tokens=2 * BLOCK, min_blocks=1, local_window_sz=1)),
                   policy(sparse.Mass(eps=0.6, beta_m=0.25, limit=5)),
                   policy(parts, sparse.Score(heads="max")),
                   Choices((sparse.TopK(sparse_ratio=1.0), parts, parts))):
            with self.subTest(of):
                e = self.engine(of)
                self.check(e, e.request("some", self.KNOWN, outputs=10))
                self.assertGreater(self.counts(e).fetched, 0)

    def test_a_prompt_that_is_longer_than_all_pages(self):
        e, before = self.cold(blocks=8, budget=24, slots=36), self.stats()["fetch_items"]
        cold, warm = (e.request(name, prompt(601, 150), outputs=15) for name in ("cold", "warm"))
        self.check(e, cold)
        self.assertGreater(self.counts(e).streamed, 0)
        self.assertGreater(e.given_back, 0)
        self.check(e, warm)
        self.assertGreater(e.loaded_tokens, 0)
        of = self.counts(e)
        self.assertEqual((of.failed, of.fetched + of.streamed), (0, self.stats()["fetch_items"] - before))

    def test_generated_tokens(self):
        """A block of them is digested and stored when it is complete, and chosen later."""
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
        e = self.known(self.engine(policy(sparse.TopK(sparse_ratio=0.25, min_blocks=1, init_window_sz=0, local_window_sz=1)), ranks=2))
        request = e.request("warm", self.KNOWN, outputs=15)
        self.check(e, request)
        chosen = [{(layer, b) for (_, layer, head), blocks in request.choices.items() if head in rank.heads for b in blocks} for rank in e.sparse]
        self.assertNotEqual(*chosen)
        for rank in (0, 1):
            self.assertGreater(self.counts(e, rank).fetched, 0)

    def test_prefixes_are_shared(self):
        e, held, fetched = self.cold(), [], []
        prompts = [prompt(604 + i, 100, shared=84) for i in range(2)]

        def between(e):
            held.append(e.sparse[0].decoder.rows.in_use)
        for name, these in (("stored", prompts), ("first", prompts[:1]), ("second", prompts[1:]), ("both", prompts)):
            e.pool, before = Pool(e.blocks), self.counts(e).fetched
            forget_slots(e)
            self.check(e, *(e.request(f"{name}{i}", tokens, outputs=12) for i, tokens in enumerate(these)), between=between)
            fetched.append(self.counts(e).fetched - before)
        self.assertEqual(max(held), 5, "of twice 5 blocks, which are the same")
        self.assertTrue(0 < fetched[3] < fetched[1] + fetched[2], fetched)

    def test_a_second_engine_computes_nothing(self):
        a, tokens = self.cold(), prompt(601, 100)
        self.check(a, a.request("cold", tokens, outputs=10))
        self.eventually(lambda: a.ranks[0].connector._worker.link.digests.lookup_prefix(
            b"".join(a.request("", tokens).block_hashes)).blocks == 6)
        before = self.stats()
        b = self.cold()
        self.check(b, b.request("warm", tokens, outputs=5))
        self.assertEqual((b.loaded_tokens, self.counts(b).computed), (96, 0))
        after = self.stats()
        self.assertEqual([after[n] - before[n] for n in ("digest_builds", "dump_bytes")], [0, 0])


class Layouts(Together):
    DTYPE, KNOWN = "bfloat16", prompt(610, 70)

    def test_all(self):
        for layout in ("split", "fused", "packed", "content"):
            with self.subTest(layout):
                e = self.known(self.engine(layout=layout))
                self.check(e, e.request("some", self.KNOWN, outputs=6))
                self.assertGreater(self.counts(e).fetched, 0)


class Admitted(Together):
    def test_what_no_memory_would_hold_is_refused(self):
        for more, words in (({"slots": 20}, "needs 36 slots and this worker has 20: give it more, choose fewer blocks"),
                            ({"rows": 5}, "needs 13 rows of digests and this worker has 5"),
                            ({"blocks": 7}, "need 7 pages, and there are 6")):
            e = self.engine(**more)
            with self.assertRaisesRegex(Refused, words):
                e.add(e.request("large", prompt(601, 200), outputs=30))
            self.assertEqual(e.requests, {})
            self.check(e, Request("dense", prompt(610, 40), outputs=2))

    def test_others_wait(self):
        e, most = self.engine(slots=20), []

        def between(e):
            most.append(sum(hasattr(r, "choices") for r in e.running + e.loading))
        self.check(e, *(e.request(f"r{i}", prompt(600, 100 - 10 * i), outputs=10) for i in range(2)), between=between)
        self.assertEqual(max(most), 1)

    def test_windows(self):
        with self.assertRaisesRegex(ValueError, "1 or more"):
            policy(sparse.TopK(local_window_sz=0))


class Scheduled(Together):
    def test_sparse_and_dense_in_one_batch(self):
        e, mixed = self.engine(), []

        def between(e):
            mixed.append({hasattr(r, "choices") for r in e.running} == {True, False})
        self.check(e, e.request("a", self.KNOWN, outputs=12), Request("b", prompt(612, 40), outputs=12),
                   e.request("c", prompt(613, 40), outputs=12), Request("d", self.KNOWN, outputs=5), between=between)
        self.assertIn(True, mixed)

    def test_preemption(self):
        """By a dense request, which keeps all its pages."""
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
            self.check(e, gone, e.request(f"stays{nth}", prompt(610, 40), outputs=4), but=(gone.request_id,), between=forget_slots)
            self.assertLess(len(gone.logits), gone.outputs)
        self.nothing_held()


class Trouble(SparseCase):
    """The daemon dies, stalls, loses blocks."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="vllm_sparse.")
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.daemon = daemon(folder=self.folder)
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
            forget_slots(e)
        self.check(e, e.request("r", prompt(600, 100), outputs=15), between=self.at(e, 5, kill))
        self.assertGreater(e.recomputed, 0)
        self.nothing_held()

    def test_killed_and_back_with_its_disk(self):
        """Nothing is computed again, and the new daemon keeps the blocks from then on."""
        e, chains = self.engine(ranks=2, fetch_deadline=20.0), []

        def kill():
            self.eventually(lambda: self.stats()["nvme_writes"] >= 2 * 7)
            self.daemon.kill()
            self.daemon = daemon(folder=self.folder)
            forget_slots(e)
        killed, later = self.at(e, 5, kill), self.at(e, 9, lambda: chains.append(self.stats()["chains"]))
        self.check(e, e.request("r", prompt(600, 100), outputs=15), between=lambda e: (killed(e), later(e)))
        self.assertEqual((e.recomputed, e.errors, chains), (0, 0, [2]))

    def test_evicted_by_name(self):
        """Chains keep what they hold to the end; a later request finds nothing."""
        e, tokens = self.engine(), prompt(600, 100)

        def evict():
            e.ranks[0].connector._worker.link.ns.evict()
            forget_slots(e)
        self.check(e, e.request("r", tokens, outputs=15), between=self.at(e, 5, evict))
        self.assertGreater(e.replays, 1)
        e.pool = Pool(e.blocks)
        self.check(e, e.request("later", tokens, outputs=2))
        self.assertEqual(e.loaded_tokens, 0)

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
        e, pid = self.engine(fetch_deadline=0.2), self.daemon.process.pid

        def stall():
            os.kill(pid, signal.SIGSTOP)
            forget_slots(e)

        def go_on():
            if e.recomputed:
                os.kill(pid, signal.SIGCONT)
        stop = self.at(e, 5, stall)
        self.check(e, e.request("r", prompt(600, 100), outputs=15), between=lambda e: (stop(e), go_on()))
        self.assertGreater(e.recomputed, 0)

    def gone_for_good(self, blocks):
        e = self.engine(blocks=blocks, fetch_deadline=0.1, patience=0.1, retry_interval=10.0, lookup_timeout=0.2)
        request = e.request("r", prompt(600, 100), outputs=15)
        self.addCleanup(setattr, self, "daemon", None)

        def kill():
            self.daemon.kill()
            forget_slots(e)
        return e, request, run(e, request, between=self.at(e, 5, kill))

    def test_gone_for_good(self):
        """What fits into pages is computed."""
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
