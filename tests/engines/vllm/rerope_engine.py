"""The small engine with ReRoPE (Su, "Rectified Rotary Position Embeddings", 2023): beyond a window all keys stand at the same distance, so a
model goes past the length that it was trained for. A block has one more plane, K before its rotation (raw K), so it takes 1.5 times the bytes.

Of a query at position i and a key at j: nearer than `window`, the query turned by i and the key by j, as always; from there on, the query turned
by `window` and the raw key. The query is scaled by max(1, log(i + 1) / log(trained)). A chunk's K turns as it is loaded; raw K and V stay as they are."""

import math

import numpy as np

import model as M
from blend_engine import BlendEngine, ROPE
from engine import BLOCK
from engine_pages import HostPages
from ucmclient import Identity, Plane, blend


def layout(window, trained):
    """What the identity's layout says: K, V and raw K of this window are no other window's."""
    if window < 1 or trained < 2:
        raise ValueError(f"rerope_window {window}, trained length {trained}: a window has at least 1 token, a trained length 2")
    return f"split+raw/1;rerope/{window}/{trained}"


def attend(q, far, k, raw, v, near):
    """Softmax of queries that share a KV head: q turned by their position, far by the window; near: which keys are."""
    scores = np.where(near[:, None], k @ q.T, raw @ far.T) / np.float32(M.HEAD**0.5)
    weights = np.exp(scores - scores.max(axis=0))
    return weights.T @ v / weights.sum(axis=0)[:, None]


class ReropeEngine(BlendEngine):
    def __init__(self, model, client, *, rerope_window, trained, **options):
        self.window, self.trained = rerope_window, trained
        super().__init__(model, client, **options)

    def _open_chunks(self, rank):
        section = BLOCK * M.KV_HEADS * M.HEAD * 4
        self.raw_memory = HostPages(M.LAYERS * self.blocks * BLOCK * M.KV_HEADS * M.HEAD, "float32")
        self.raw = self.raw_memory.whole.reshape(M.LAYERS, self.blocks, BLOCK, M.KV_HEADS, M.HEAD)
        identity = Identity(model="mini", dtype="f32", layout=layout(self.window, self.trained), block_tokens=BLOCK, shards=(M.LAYERS,),
                            shard_bytes=3 * section)
        planes = []
        for layer in range(M.LAYERS):
            planes += [Plane(0, (2 * layer + i) * self.blocks * section, section, section, layer) for i in range(2)]
            planes.append(Plane(1, layer * self.blocks * section, section, section, layer))
        self.chunks = blend.Chunks(self.client, identity)
        self.chunk_pages = self.chunks.register([rank.memory.memory.memory(), self.raw_memory.memory.memory()], planes, blocks=self.blocks, rope=ROPE)

    def _raw_keys(self, layer, hidden):
        x = hidden / np.sqrt(hidden @ hidden / np.float32(hidden.size) + np.float32(1e-5))
        return (self.model.layers[layer]["k"] @ x).reshape(M.KV_HEADS, M.HEAD)

    def _attend_all(self, layer, work):
        for request, position, hidden in work:
            block, row = self.pool.requests[request.request_id][position // BLOCK], position % BLOCK
            self.raw[layer, block, row] = self._raw_keys(layer, hidden)
        super()._attend_all(layer, work)

    def _attend(self, layer, request, position, hidden):
        n = position + 1
        k, v = self._read(layer, request, n)
        blocks = self.pool.requests[request.request_id][: -(-n // BLOCK)]
        raw = self.raw[layer, blocks].reshape(-1, M.KV_HEADS, M.HEAD)[:n]
        scale = np.float32(max(1.0, math.log(position + 1) / math.log(self.trained)))
        q = self.model.queries(layer, hidden, position) * scale
        far = self.model.queries(layer, hidden, self.window) * scale
        near = position - np.arange(n) < self.window
        outputs = [attend(q[M.heads_of(g)], far[M.heads_of(g)], k[:, g], raw[:, g], v[:, g], near) for g in range(M.KV_HEADS)]
        return self.model.after(layer, hidden, outputs)
