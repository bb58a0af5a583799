"""A small decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU) whose KV lies in an engine's pages.

Every token is computed by itself, with the same operations on arrays of the same shapes whatever else is in the batch,
so that its logits are the same bit for bit however its request was cut into steps.
"""

import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 3, 64, 8, 4, 16, 96, 128
PER_KV = HEADS // KV_HEADS


def _unit(x):
    return x / np.sqrt(x @ x / np.float32(x.size) + np.float32(1e-5))


def heads_of(kv_head):
    """The query heads that share a KV head."""
    return slice(kv_head * PER_KV, (kv_head + 1) * PER_KV)


def attend(q, k, v):
    """Softmax of queries that share a KV head over its tokens: q is [queries, HEAD], k and v [tokens, HEAD]."""
    scores = np.ascontiguousarray(k) @ q.T / np.float32(HEAD**0.5)
    weights = np.exp(scores - scores.max(axis=0))
    return weights.T @ np.ascontiguousarray(v) / weights.sum(axis=0)[:, None]


class Model:
    def __init__(self, seed=1):
        draw = np.random.default_rng(seed)

        def matrix(rows, columns):
            return (draw.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

        self.embedding = matrix(VOCABULARY, WIDTH) * np.float32(8)
        self.layers = [
            {
                "q": matrix(HEADS * HEAD, WIDTH),
                "k": matrix(KV_HEADS * HEAD, WIDTH),
                "v": matrix(KV_HEADS * HEAD, WIDTH),
                "o": matrix(WIDTH, HEADS * HEAD),
                "gate": matrix(INNER, WIDTH),
                "up": matrix(INNER, WIDTH),
                "down": matrix(WIDTH, INNER),
            }
            for _ in range(LAYERS)
        ]
        self.head = matrix(VOCABULARY, WIDTH)
        self._turns = (np.float32(10000) ** (-np.arange(HEAD // 2, dtype=np.float32) / (HEAD // 2))).astype(np.float32)

    def rotate(self, x, position):
        """RoPE: x is [heads, HEAD]."""
        angle = np.float32(position) * self._turns
        cosine, sine = np.cos(angle), np.sin(angle)
        a, b = x[:, : HEAD // 2], x[:, HEAD // 2:]
        return np.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=1)

    def keys_values(self, layer, hidden, position):
        """K and V of one token: [KV_HEADS, HEAD] each."""
        w, x = self.layers[layer], _unit(hidden)
        k = self.rotate((w["k"] @ x).reshape(KV_HEADS, HEAD), position)
        return k, (w["v"] @ x).reshape(KV_HEADS, HEAD)

    def queries(self, layer, hidden, position):
        """Of one token: [HEADS, HEAD]."""
        return self.rotate((self.layers[layer]["q"] @ _unit(hidden)).reshape(HEADS, HEAD), position)

    def layer(self, layer, hidden, position, k, v):
        """The token's next hidden state; k and v: [tokens up to it, KV_HEADS, HEAD]."""
        q = self.queries(layer, hidden, position)
        return self.after(layer, hidden, [attend(q[heads_of(g)], k[:, g], v[:, g]) for g in range(KV_HEADS)])

    def after(self, layer, hidden, outputs):
        """The token's next hidden state. outputs: of the attention of each KV head's query heads."""
        w = self.layers[layer]
        hidden = hidden + w["o"] @ np.concatenate(outputs).reshape(-1)
        x = _unit(hidden)
        gate = w["gate"] @ x
        return hidden + w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ x))

    def logits(self, hidden):
        return self.head @ _unit(hidden)
