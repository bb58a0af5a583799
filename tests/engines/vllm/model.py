"""A small decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU) whose KV lies in an engine's pages.

Every token is computed by itself, with the same operations on arrays whose shapes depend on its
position alone, whatever else is in the batch. So its logits are the same bit for bit, however its request was cut into
steps. Functions take one token, or as many as the first axis of hidden and position has.
"""

import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 3, 64, 8, 4, 16, 96, 128
PER_KV = HEADS // KV_HEADS
#: attend_all() fills up what a token attends to a multiple of so many tokens.
STRETCH = 64
POSITIONS = 8192


def _unit(x):
    return x / np.sqrt((x[..., None, :] @ x[..., None])[..., 0] / np.float32(x.shape[-1]) + np.float32(1e-5))


def _times(matrix, x):
    """Of each token. A product of matrices would add in another order for another number of tokens.
    """
    return np.einsum("rc,...c->...r", matrix, x)


def heads_of(kv_head):
    """The query heads that share a KV head."""
    return slice(kv_head * PER_KV, (kv_head + 1) * PER_KV)


def attend(q, k, v):
    """Softmax of queries over the tokens of the KV head that they share. k and v are [tokens, KV
    heads, HEAD]. q and the result are [query heads, HEAD]."""
    scores = k.swapaxes(0, 1) @ q.reshape(k.shape[1], -1, HEAD).swapaxes(1, 2) / np.float32(HEAD**0.5)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights.swapaxes(1, 2) @ v.swapaxes(0, 1) / weights.sum(axis=1)[:, :, None]).reshape(q.shape)


def attend_all(q, positions, kv):
    """attend() of many tokens, each over all tokens up to its position. kv is [2, tokens, KV heads,
    HEAD]. q and the result are [tokens, query heads, HEAD]."""
    positions, out = np.array(positions), np.empty_like(q)
    whole = np.zeros((2, -(-kv.shape[1] // STRETCH) * STRETCH, *kv.shape[2:]), np.float32)
    whole[:, : kv.shape[1]] = kv
    stretches = positions // STRETCH
    for stretch in set(stretches):
        these, (k, v) = stretches == stretch, whole[:, : (stretch + 1) * STRETCH]
        scores = q[these].reshape(-1, KV_HEADS, PER_KV, HEAD) @ k.transpose(1, 2, 0) / np.float32(HEAD**0.5)
        later = np.arange(len(k)) > positions[these][:, None]
        scores = np.where(later[:, None, None], np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        means = weights @ v.swapaxes(0, 1) / weights.sum(axis=-1, keepdims=True)
        out[these] = means.reshape(-1, HEADS, HEAD)
    return out


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
        turns = (np.float32(10000) ** (-np.arange(HEAD // 2, dtype=np.float32) / (HEAD // 2))).astype(np.float32)
        angles = np.arange(POSITIONS, dtype=np.float32)[:, None, None] * turns
        self._cosine, self._sine = np.cos(angles), np.sin(angles)

    def rotate(self, x, position):
        """RoPE: x is [..., heads, HEAD]."""
        cosine, sine, a, b = self._cosine[position], self._sine[position], x[..., : HEAD // 2], x[..., HEAD // 2:]
        return np.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)

    def keys_values(self, layer, hidden, position):
        """K and V: [..., KV_HEADS, HEAD] each."""
        w, x, shape = self.layers[layer], _unit(hidden), (*hidden.shape[:-1], KV_HEADS, HEAD)
        return self.rotate(_times(w["k"], x).reshape(shape), position), _times(w["v"], x).reshape(shape)

    def queries(self, layer, hidden, position):
        """[..., HEADS, HEAD]"""
        return self.rotate(_times(self.layers[layer]["q"], _unit(hidden)).reshape(*hidden.shape[:-1], HEADS, HEAD), position)

    def after(self, layer, hidden, outputs):
        """The next hidden state. outputs: of the attention of the query heads, [..., HEADS, HEAD]."""
        w = self.layers[layer]
        hidden = hidden + _times(w["o"], outputs.reshape(*hidden.shape[:-1], HEADS * HEAD))
        x = _unit(hidden)
        gate = _times(w["gate"], x)
        return hidden + _times(w["down"], gate / (1 + np.exp(-gate)) * _times(w["up"], x))

    def logits(self, hidden):
        return self.head @ _unit(hidden)
