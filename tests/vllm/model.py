"""A small decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU) whose KV lies in an engine's pages.

Every token is computed by itself, with the same operations on arrays of the same shapes whatever else is in the batch,
so that its logits are the same bit for bit however its request was cut into steps.
"""

import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 3, 64, 8, 4, 16, 96, 128
PER_KV = HEADS // KV_HEADS


def _unit(x):
    return x / np.sqrt(np.mean(x * x) + np.float32(1e-5))


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

    def layer(self, layer, hidden, position, k, v):
        """The token's next hidden state; k and v: [tokens up to it, KV_HEADS, HEAD]."""
        w, x = self.layers[layer], _unit(hidden)
        q = self.rotate((w["q"] @ x).reshape(HEADS, HEAD), position)
        out = np.empty((HEADS, HEAD), np.float32)
        for h in range(HEADS):
            scores = np.ascontiguousarray(k[:, h // PER_KV]) @ q[h] / np.float32(HEAD**0.5)
            weights = np.exp(scores - scores.max())
            out[h] = weights @ np.ascontiguousarray(v[:, h // PER_KV]) / weights.sum()
        hidden = hidden + w["o"] @ out.reshape(-1)
        x = _unit(hidden)
        gate = w["gate"] @ x
        return hidden + w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ x))

    def logits(self, hidden):
        return self.head @ _unit(hidden)
