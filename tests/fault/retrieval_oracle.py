"""What tests/fault/test_retrieval_random.py compares with. A block's bytes follow from its name. So
do its summaries and every choice, by the numpy of tests/reference/sparse/methods.py.
"""

import numpy as np

import methods

NAMES = 160
TOKENS, KV_HEADS, HEAD_DIM, LAYERS = 16, 2, 32, 2
K_BYTES = TOKENS * KV_HEADS * HEAD_DIM * 2
SHAPE = {"dtype": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM,
         "k_token_stride": KV_HEADS * HEAD_DIM * 2, "k_head_stride": HEAD_DIM * 2, "v_offset": K_BYTES,
         "v_token_stride": KV_HEADS * HEAD_DIM * 2, "v_head_stride": HEAD_DIM * 2}
BASE = {"dtype": "f16", "layout": "test/1", "block_tokens": TOKENS, "key_bytes": 16, "layers": [LAYERS],
        "layer_bytes": 2 * K_BYTES}
MODELS = {"one": 1, "two": 2}  # parts
COMMON = {"tokens": TOKENS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM}
METHODS = {
    "mean": (dict(method=1), methods.Spec("mean", **COMMON)),
    "largest": (dict(method=1, kind=1), methods.Spec("mean", kind=methods.MAX, **COMMON)),
    "normal": (dict(method=1, kind=2), methods.Spec("mean", kind=methods.NORMALISED, **COMMON)),
    "submean": (dict(method=2, run=4), methods.Spec("submean", run=4, **COMMON)),
    "pruned": (dict(method=2, run=8, keep=b"\x0f\x81", pairs=1),
               methods.Spec("submean", run=8, keep=(0, 1, 2, 3, 8, 15), pairs="interleaved", **COMMON)),
    "box": (dict(method=3), methods.Spec("box", **COMMON)),
    "hash": (dict(method=4, bits=128, seed=5), methods.Spec("hash", bits=128, seed=5, **COMMON)),
    "stats": (dict(method=5), methods.Spec("stats", **COMMON)),
    "tokens": (dict(method=6, chosen=3), methods.Spec("tokens", stand_ins=3, **COMMON)),
    "rest": (dict(method=6, chosen=3, rest=1), methods.Spec("tokens", stand_ins=3, rest=1, **COMMON)),
}
ROUNDED = 1e-5  # where a score has exp() and a logarithm in it: C's and numpy's differ by less


class Oracle:
    """What every block holds, and what numpy computes from it."""

    def __init__(self):
        self.kv, self.summary = {}, {}

    def blocks(self, model, part):
        """f16[names][layers][K, V][tokens][heads][channels]; some have a NaN, or look alike."""
        at = model, part
        if at not in self.kv:
            shape = (NAMES, LAYERS, 2, TOKENS, KV_HEADS, HEAD_DIM)
            kv = np.random.default_rng(list(map(ord, f"{model}{part}"))).standard_normal(shape).astype(np.float16)
            kv[::17, :, 0, 3, 1, 7] = np.nan
            kv[5::19] = kv[5]
            self.kv[at] = kv
        return self.kv[at]

    def summaries(self, model, part, method, layer):
        at = model, part, method, layer
        if at not in self.summary:
            kv = self.blocks(model, part)[:, layer]
            self.summary[at] = methods.build(METHODS[method][1], kv[:, 0], kv[:, 1])
        return self.summary[at]

    def packed(self, model, part, method):
        return np.stack([methods.pack(METHODS[method][1], self.summaries(model, part, method, layer))
                         for layer in range(LAYERS)], 1)

    def lists(self, sequence, blocks, layer, ask, q):
        """The scores of each list over blocks [(name, has summary)]."""
        spec, index = METHODS[sequence.method][1], np.array([name for name, _ in blocks], int)
        summary = {field: values[index] for field, values in self.summaries(sequence.model, sequence.part, sequence.method, layer).items()}
        raw = methods.score(spec, summary, q, ("dot", "l2")[ask["metric"]])
        raw[:, :, [not held for _, held in blocks]] = np.inf
        reduce, heads = ("max", "mean")[ask["reduce"]], ("per_head", "sum", "max")[ask["heads"]]
        return methods.reduce_heads(methods.reduce_group(raw, KV_HEADS, reduce), heads)


def choice(scores, ask):
    """What docs/design/retrieval.md says: the windows, then the blocks that can't be judged, then the best; `limit` at most."""
    n = len(scores)
    room = min(ask["limit"] or n, n)
    inside = sorted(methods.windows(n, ask["sink_blocks"], ask["recent_blocks"]))
    if len(inside) >= room:
        return inside[:room]
    chosen = set(inside)
    if ask["policy"] == 0:
        k = methods.count_topk(n, ask["sparse_ratio"], ask["min_blocks"], ask["topk_tokens"], TOKENS)
        enough = lambda: len(chosen) >= k  # noqa: E731
    else:
        weights = [int(w) for w in methods.weights(scores, ask["beta_m"] or HEAD_DIM ** -0.5)]
        total = sum(weights)
        enough = lambda: sum(weights[b] for b in chosen) >= ask["eps"] * total  # noqa: E731
    for block in map(int, methods.ranking(scores)):
        if len(chosen) >= room or (scores[block] != np.inf and enough()):
            break
        chosen.add(block)
    return sorted(chosen)


def settle(chosen, best, row):
    """`best`, except that of two blocks whose scores in `row` differ only by rounding, it has the
    one that was chosen."""
    best = set(best)
    for mine in {b for b in chosen if b < len(row)} - best:
        other = min(best - set(chosen), key=lambda b: abs(row[b] - row[mine]), default=None)
        if other is not None and np.isclose(row[other], row[mine], ROUNDED, ROUNDED):
            best = best - {other} | {mine}
    return sorted(best)
