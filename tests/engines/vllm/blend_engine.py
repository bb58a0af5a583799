"""The small engine with chunks (ucmclient.blend). The daemon re-rotates K of a chunk's blocks into
the engine's pages. The engine computes only those tokens of the prompt that the plan names. A
request is planned when it is admitted, and so again after a preemption. The plan begins after the
blocks that the local prefix cache then has. Blocks are loaded in the step of their first token."""

import dataclasses

import numpy as np

import model as M
from engine import BLOCK, Engine, Pool, Request
from ucmclient import BlockResult, Identity, Plane, Rope, blend

ROPE = Rope(rows=BLOCK * M.KV_HEADS, dim=M.HEAD, rotary=M.HEAD, base=10000.0, dtype="f32")


class BlendRequest(Request):
    def __init__(self, name, prompt, spans=(), policy=blend.Nothing(), outputs=8):
        super().__init__(name, prompt, outputs)
        self.spans, self.policy = list(spans), policy
        self.plan, self.lost, self.lease = None, set(), 0

    def fresh(self, position):
        """Whether all layers compute it."""
        plan = self.plan
        return plan is None or position >= plan.n_tokens or position in self.lost or position in plan.compute


class BlendPool(Pool):
    def cache(self, request, tokens):
        """Blended blocks are not the prefix of any other request."""
        exact = request.plan.exact if request.plan else tokens
        super().cache(request, min(tokens, exact))


class BlendEngine(Engine):
    def __init__(self, model, client, **options):
        super().__init__(model, **options)
        self.pool, self.client = BlendPool(self.blocks), client
        self.shifted = self.computed = 0  # blocks; tokens of prompts, a layer each
        self._open_chunks(self.ranks[0])

    def _open_chunks(self, rank):
        section = BLOCK * M.KV_HEADS * M.HEAD * 4
        identity = Identity(model="mini", dtype="f32", layout="split/1", block_tokens=BLOCK, layers=(M.LAYERS,), layer_bytes=2 * section)
        self.chunks = blend.Chunks(self.client, identity)
        planes = [Plane(0, i * self.blocks * section, section, section, i // 2) for i in range(2 * M.LAYERS)]
        self.chunk_pages = self.chunks.register([rank.memory.memory.memory()], planes, blocks=self.blocks, rope=ROPE)

    # ---- scheduler ----

    def _admit(self, out, request, left):
        if request.spans and request.num_computed_tokens == 0:
            hits = len(self.pool.hits(request)) * BLOCK
            found = self.chunks.lookup(request.tokens, request.spans, prefix=hits, lease=30)
            request.plan, request.lost, request.lease = blend.plan(found, request.policy), set(), found.lease
        n = super()._admit(out, request, left)
        if n is None:
            self._release(request)
        return n

    def _preempt(self, request):
        self._release(request)
        super()._preempt(request)

    def _finish(self, request, loading=False):
        self._release(request)
        super()._finish(request, loading)

    def _release(self, request):
        if getattr(request, "lease", 0):
            self.client.release(request.lease)
            request.lease = 0

    # ---- the worker ----

    def _load(self, request, first, n):
        loads = [load for load in request.plan.loads if first <= load.position < first + n] if request.plan else []
        if not loads:
            return
        pages = self.pool.requests[request.request_id]
        part = dataclasses.replace(request.plan, loads=tuple(loads))
        result = self.chunk_pages.load(part, [pages[load.position // BLOCK] for load in loads]).wait()
        for load, r in zip(loads, result.blocks):
            if r != BlockResult.OK:
                request.lost.update(range(load.position, load.position + BLOCK))
        self.shifted += result.ok

    def _forward(self, out, connectors):
        work = []
        for name, n in out.num_scheduled_tokens.items():
            request = self.requests[name]
            first = request.num_computed_tokens - n
            self._load(request, first, n)
            chooses = request.plan is not None and blend.selecting(request.plan.policy)
            work += [[request, p, self.model.embedding[request.tokens[p]]] for p in range(first, first + n)
                     if chooses or request.fresh(p)]
        for layer in range(M.LAYERS):
            k, v = self.model.keys_values(layer, *self._batch(work))
            deviation = {(request.request_id, position): float(np.abs(now - self._read_row(layer, request, position)).sum())
                         for (request, position, _), now in zip(work, k)}
            self._write(layer, work, k, v)
            self._attend_all(layer, work)
            self.computed += len(work)
            work = self._chosen(layer, work, deviation)
        return self._logits(work)

    def _read_row(self, layer, request, position):
        block, row = self.pool.requests[request.request_id][position // BLOCK], position % BLOCK
        rank = self.ranks[0]
        return rank.memory.get(rank.pages[layer][0, block, row])

    def _chosen(self, layer, work, deviation):
        keep = []
        for request in {id(item[0]): item[0] for item in work}.values():
            mine = [item for item in work if item[0] is request]
            if request.plan is not None and layer in blend.selecting(request.plan.policy):
                loose = [item for item in mine if not request.fresh(item[1])]
                chosen = request.policy.choose(layer, [deviation[request.request_id, item[1]] for item in loose], len(loose))
                mine = sorted([item for item in mine if request.fresh(item[1])] + [loose[c] for c in chosen], key=lambda item: item[1])
            keep += mine
        return keep

    def store(self, chunk):
        """Computes a chunk as a request of its own, and stores it. The engine has nothing else to do."""
        request, pages = BlendRequest("chunk", chunk, outputs=2), []
        found = self.chunks.lookup(chunk, [blend.Span(0, len(chunk))])
        empty = dataclasses.replace(found, there=((False,) * len(found.keys[0]),))
        self.add(request)
        while request.request_id in self.requests:
            self.step()
            pages = list(self.pool.requests.get(request.request_id, pages))
        # A finished request leaves its bytes in its pages until others take them.
        return self.chunk_pages.store(blend.plan(empty, blend.Nothing()), chunk, 0, pages[: len(found.keys[0])]).wait()

    def close(self):
        self.chunk_pages.close()
        self.chunks.close()
        super().close()
