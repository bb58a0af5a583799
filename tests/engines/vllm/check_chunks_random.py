#!/usr/bin/env python3
"""The promise of the connector's setting `chunks` under vLLM's own scheduler, with random requests,
preemptions, aborts, failures, evictions and resets. No blended block is stored, or given to a
request that did not ask for it. K is re-rotated by as much as its place differs. The test makes up
what a page holds. A token's KV is a hash of all KV before it, so it shows what came before. A part
of `make check-vllm`; $UCM_SEED and $UCM_ROUNDS choose another run."""

import dataclasses
import os
import random
import unittest
from collections import Counter

import check_vllm_unit as unit  # sets paths
from check_vllm_unit import BLOCK, BYTES, IDENTITY, KVConnectorOutput, ModelRunnerOutput, Plane, Request, RequestStatus, SamplingParams, SharedMemory, UcmProgress
from check_vllm_unit import get_hash_fn_by_name, get_request_block_hasher

from ucmclient import blend
from ucmclient.blend import First, Nothing
from ucmclient.blend.chunks import chunk_identity, chunk_keys
from ucmclient.blend.pieces import SALT, STORE

SEED, ROUNDS = int(os.environ.get("UCM_SEED", "0")), int(os.environ.get("UCM_ROUNDS", "4"))
STEPS, POOL = 500, 40
LOST = ("lost",)


def computed(before, token):
    return "computed", hash((tuple(before), token, len(before)))


def exact(tokens):
    out = []
    for token in tokens:
        out.append(computed(out, token))
    return out


def salted(request):
    return (request.cache_salt or "").startswith(SALT)


def split(keys):
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


class Random(unit.Case):
    def setUp(self):
        super().setUp()
        identity = dataclasses.replace(IDENTITY, chunks=chunk_identity(IDENTITY))
        self.regions = {"prefix": self.region, "chunk": self.registered(identity.chunks)}
        self.identity, self.seen = identity, Counter()

    def registered(self, identity):
        memory = SharedMemory(unit.POOL * BYTES)
        return self.worker.namespace(identity).register([memory.memory()], [Plane(0, 0, BYTES, BYTES, 0)], blocks=unit.POOL)

    def configs(self, policy="recompute", **settings):
        config, caches = super().configs(policy, **settings)
        config.scheduler_config.max_num_batched_tokens = self.random.choice([32, 64, 1024])
        config.cache_config.num_gpu_blocks = caches.num_blocks = POOL
        return config, caches

    def begin(self, seed):
        self.random = random.Random(seed)
        self.documents = [[self.random.randrange(1, 400) for _ in range(self.random.choice([16, 32, 40, 64, 80]))] for _ in range(5)]
        for region in self.regions.values():
            region.ns.evict()
        self.engine = self.scheduler(chunks=True, identity=self.identity)
        self.pages = [[LOST] * BLOCK for _ in range(POOL)]
        self.kept = {"prefix": {}, "chunk": {}}
        self.requests, self.loading, self.ended = {}, {}, set()

    # ---- requests ----

    def add(self):
        r, salt, params = self.random, None, {}
        document, tail = (lambda: r.choice(self.documents)), [r.randrange(1, 400) for _ in range(r.choice([1, 3, 16, 30]))]
        kind = r.random()
        if kind < 0.25:
            tokens, salt, params = list(document()), r.choice([None, "tenant"]), {STORE: True}
        elif kind < 0.5:
            tokens, salt = document() + document() + tail, r.choice([None, "tenant"])
        else:
            tokens, spans = blend.join([document() for _ in range(r.choice([1, 2, 3]))], 3, BLOCK)
            policy = r.choice([Nothing(), First(16)])
            piece = r.choice(list(blend.pieces(tokens + tail, spans, policy, block_tokens=BLOCK, salt=f"{r.randrange(5)}")))
            tokens, salt, params = list(piece.tokens), piece.salt, piece.body["kv_transfer_params"]
            if r.random() < 0.2:
                params = r.choice([{**params, STORE: True}, {STORE: True}])
        sampling = SamplingParams(max_tokens=r.choice([1, 1, 10, 60]), ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, eos_token_id=511)
        hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        request = Request(f"r{len(self.requests)}", tokens, sampling, None, cache_salt=salt, block_hasher=hasher)
        self.requests[request.request_id] = request
        self.engine.add_request(request)

    def held(self, name, tokens):
        """What the pages of its first tokens hold."""
        table = self.blocks_of(self.engine, self.requests[name])
        return [self.pages[table[p // BLOCK]][p % BLOCK] for p in range(tokens)]

    # ---- what a worker does ----

    def load(self, kind, copy):
        table, request = self.blocks_of(self.engine, self.requests[copy.request]), self.requests[copy.request]
        moved = [0] * len(copy.blocks)
        if copy.shifts:
            self.assertTrue(kind == "chunk" and salted(request))
            runs = [(new + i * BLOCK, new - old) for n, old, new, *_ in copy.shifts for i in range(n)]
            self.assertEqual([first for first, _ in runs], [table.index(block) * BLOCK for block in copy.blocks])
            moved = [by for _, by in runs]
        self.loading[copy.request] = [self.random.randrange(4), kind, copy, moved]

    def compute(self, name, first, end):
        request, table = self.requests[name], self.blocks_of(self.engine, self.requests[name])
        kv = self.held(name, first)
        self.assertNotIn(LOST, kv)
        for p in range(first, end):
            kv.append(computed(kv, request.all_token_ids[p]))
            self.pages[table[p // BLOCK]][p % BLOCK] = kv[p]
        tokens = list(request.all_token_ids[:end])
        if not salted(request):
            self.assertEqual(kv, exact(tokens), f"{name} met blended KV")
        for p, one in enumerate(kv):
            if one[0] == "shifted":
                self.assertEqual(one[1], exact(tokens[one[2] : p + 1])[-1], f"{name} has another token's KV at {p}")
        self.seen["blended"] += kv != exact(tokens)

    def store(self, kind, copy):
        request, keys = self.requests[copy.request], split(copy.keys)
        self.assertFalse(salted(request))
        names = request.block_hashes if kind == "prefix" else chunk_keys(list(request.prompt_token_ids), BLOCK)
        kv = exact(list(request.all_token_ids))
        for key, block in zip(keys, copy.blocks):
            i = names.index(key)
            self.assertEqual(self.pages[block], kv[i * BLOCK : (i + 1) * BLOCK], f"{copy.request} stores what is not exact")
            self.kept[kind][key] = list(self.pages[block])
        self.regions[kind].dump(keys, range(len(keys))).wait()
        self.seen["stored"] += len(keys)

    def arrivals(self):
        """Requests whose loads are over, and blocks that did not come."""
        received, invalid = set(), set()
        for name, load in list(self.loading.items()):
            load[0] -= 1
            if load[0] >= 0:
                continue
            _, kind, copy, moved = self.loading.pop(name)
            received.add(name)
            for key, block, by in zip(split(copy.keys), copy.blocks, moved):
                lost = self.random.random() < 0.06
                self.pages[block] = [LOST] * BLOCK if lost else [("shifted", kv, by) if by else kv for kv in self.kept[kind][key]]
                self.seen["lost" if lost else "shifted" if by else "loaded"] += 1
                if lost:
                    invalid.add(block)
        return received, invalid

    # ---- steps ----

    def one(self):
        scheduler, before = self.engine, sum(r.num_preemptions for r in self.requests.values())
        scheduled = scheduler.schedule()
        self.seen["preempted"] += sum(r.num_preemptions for r in self.requests.values()) - before
        plan = scheduled.kv_connector_metadata.plan
        kinds = ("prefix", plan), ("chunk", plan.chunks)
        for kind, of in kinds:
            self.ended |= of.ended
            for copy in of.loads:
                self.load(kind, copy)
        for name, n in scheduled.num_scheduled_tokens.items():
            end = self.requests[name].num_computed_tokens
            self.compute(name, end - n, end)
        for kind, of in kinds:
            for copy in of.stores:
                self.store(kind, copy)
        received, invalid = self.arrivals()
        sent = {name for name in sorted(self.ended) if self.random.random() < 0.6}
        self.ended -= sent
        names = list(scheduled.num_scheduled_tokens)
        done = [r.num_computed_tokens >= r.num_tokens for r in map(self.requests.get, names)]
        report = KVConnectorOutput(finished_recving=received or None, invalid_block_ids=invalid,
                                   kv_connector_worker_meta=UcmProgress(plan.number, sent=dict.fromkeys(sent, 1)))
        scheduler.update_from_output(scheduled, ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, kv_connector_output=report,
            sampled_token_ids=[[self.random.randrange(1, 400)] if one else [] for one in done]))

    def accident(self):
        r, scheduler = self.random, self.engine
        if r.random() < 0.03 and scheduler.requests:
            name = r.choice(sorted(scheduler.requests))
            if not scheduler.requests[name].is_finished():
                scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if r.random() < 0.02 and not scheduler.running and not self.loading:
            scheduler.kv_cache_manager.reset_prefix_cache()
        if r.random() < 0.02:
            self.regions[r.choice(["prefix", "chunk"])].ns.evict()

    def test_what_is_blended_stays_with_its_request(self):
        for seed in range(SEED, SEED + ROUNDS):
            with self.subTest(seed=seed):
                self.begin(seed)
                for _ in range(STEPS):
                    if len(self.engine.requests) < self.random.choice([3, 6, 12]):
                        self.add()
                    self.accident()
                    self.one()
                for _ in range(STEPS):
                    if self.engine.has_requests() or self.ended:  # it steps once more after the last one's end
                        self.one()
                self.assertFalse(self.engine.requests)
                self.assertEqual(self.engine.kv_cache_manager.block_pool.get_num_free_blocks(), POOL - 1)
                self.assertEqual(self.metric("leases"), 0)
        self.assertTrue(all(self.seen[what] for what in ("blended", "stored", "shifted", "loaded", "lost", "preempted")), self.seen)


if __name__ == "__main__":
    unittest.main(verbosity=2)
