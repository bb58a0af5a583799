"""Decode steps whose attention is restricted to chosen blocks.

The steps of a text's end are computed side by side, layer by layer, which gives what one step after the other would give: a step's
keys depend on the steps before it through causal attention only, and its choice on digests of blocks that were complete
before it. A step's own block is not complete, has no digest and is always attended."""

import dataclasses

import numpy as np
from model import f32, xp

import formats
import methods

BLOCK = 16
WARM = 16  # steps before the first that counts, so that a choice may lag

if xp is not np:
    methods.np = formats.np = xp
methods.fma = lambda a, b, c: a * b + c  # twice rounded; the choices of a study don't need the last bit


class State:
    """A text after its dense prefill."""

    def __init__(self, model, name, ids, first):
        """first: position of the first decode step that counts."""
        self.model, self.name, self.ids, self.begin = model, name, ids, first - WARM
        self.received = []  # of each layer: attention that each prompt token got, [kv_heads, begin], for H2O

        def received(layer, at, p):
            if at == 0:
                self.received.append(xp.zeros((model.kv_heads, len(ids)), f32))
            rows = max(0, min(p.shape[2], self.begin - at))
            self.received[layer][:, :p.shape[3]] += p[:, :, :rows].sum((1, 2))

        hidden, self.K, self.V, self.Q = model.prefill(ids, received)
        self.logits = model.logits(hidden[self.begin:])
        self.digests, self.stand_ins, self.turns = {}, {}, {}  # by layer, made when first wanted

    def prefix_digest(self, layer, spec):
        key = layer, spec
        if key not in self.digests:
            n = self.begin // BLOCK
            K = self.K[layer][:n * BLOCK].reshape(n, BLOCK, *self.K[layer].shape[1:])
            self.digests[key] = build(spec, K)
        return self.digests[key]


def build(spec, K):
    """What a digest says, as float32: {name: array[n, G, vectors, d]}; signs of hash as int8."""
    n, _, G, _ = K.shape
    if spec.method == "hash":
        bits = methods.sign_bits(spec, K)  # [n, B, G, bits]
        return {"k": xp.moveaxis(xp.where(bits, xp.int8(1), xp.int8(-1)), 1, 2)}
    d = methods.BUILDERS[spec.method](spec, K, None)

    def wide(name, scale):
        return d[name].astype(f32) * formats.bf16_to_f32(d[scale])[..., None]

    if spec.method == "box":
        return {"lo": wide("lo", "s"), "hi": wide("hi", "s")}
    if spec.method == "stats":
        return {"k": wide("m", "s_m")[:, :, None], "var": wide("var", "s_v")}
    if spec.rest:
        return {"k": methods.whole(d["k"], spec.head_dim).astype(f32) * formats.bf16_to_f32(d["s"])[..., None]}
    vectors = wide("k" if spec.method == "tokens" else "r", "s")
    return {"k": vectors if vectors.ndim == 4 else vectors[:, :, None]}


@dataclasses.dataclass
class Step:
    """What a choice may look at in one layer: T steps side by side, nb blocks."""
    state: State
    layer: int
    h: object        # what enters the layer
    before: object   # what entered the layer before
    q: object
    k: object        # all keys, [N, G, d]
    positions: np.ndarray

    def __post_init__(self):
        self.model = self.state.model
        self.own = xp.asarray(self.positions // BLOCK)  # also the number of complete blocks
        self.nb = len(self.k) // BLOCK
        self.blocks = xp.arange(self.nb)
        self.valid = self.blocks[None] < self.own[:, None]
        self.causal = xp.arange(len(self.k))[None] <= xp.asarray(self.positions)[:, None]
        self._exact = None

    def digest(self, spec):
        old = self.state.prefix_digest(self.layer, spec)
        done = self.state.begin // BLOCK
        K = self.k[done * BLOCK:self.nb * BLOCK]
        new = build(spec, K.reshape(-1, BLOCK, *K.shape[1:]))
        return {name: xp.concatenate([old[name], new[name]]) for name in old}

    def exact(self):
        """beta q.k, [G, group, T, N]; -inf where a step can't look."""
        if self._exact is None:
            self._exact = xp.where(self.causal, self.model.exact(self.q, self.k), f32(-np.inf))
        return self._exact

    def block_sums(self):
        """Log of the sum of exp(beta q.k) in each block, [G, group, T, nb]."""
        x = self.exact()
        x = x.reshape(x.shape[:-1] + (self.nb, BLOCK))
        top = x.max(-1)
        safe = xp.where(xp.isfinite(top), top, 0)
        with np.errstate(divide="ignore"):
            return xp.log(xp.exp(x - safe[..., None]).sum(-1)) + safe

    def mass(self):
        """Attention mass of each block, [G, group, T, nb]."""
        a = self.block_sums()
        p = xp.exp(a - a.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def tokens(self, chosen):
        """bool[lists, T, nb] -> bool[lists, 1, T, N], with each step's own block."""
        chosen = chosen | (self.blocks[None] == self.own[:, None])
        return xp.repeat(chosen, BLOCK, -1)[:, None] & self.causal

    def budget(self, share):
        """Blocks beside its own that a step may attend, so that all are `share` of what there is."""
        return xp.maximum(xp.floor((self.own + 1) * share).astype(xp.int64) - 1, 4)

    def windows(self, init=1, local=2):
        return self.valid & ((self.blocks < init)[None] | (self.blocks[None] >= self.own[:, None] - local))


def ranks(step, scores, init=1, local=2):
    """Place of each block in the order windows, then score; [lists, T, nb], the last for blocks that a step can't see."""
    s = xp.where(step.valid, scores, f32(-np.inf))
    s = xp.where(step.windows(init, local), f32(np.inf), s)
    order = xp.argsort(-s, axis=-1)
    places = xp.empty_like(order)
    xp.put_along_axis(places, order, xp.broadcast_to(xp.arange(step.nb), order.shape), -1)
    return places


def topk(step, scores, share, init=1, local=2):
    return (ranks(step, scores, init, local) < step.budget(share)[:, None]) & step.valid


def run(state, choose=None, observe=None):
    """Logits of the steps from state.begin on. choose(step) -> bool[lists, 1, T, N], None for all; observe(step) only looks."""
    model, begin = state.model, state.begin
    positions = np.arange(begin, len(state.ids))
    h = before = model.embed(state.ids[begin:])
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, h, positions)
        keys = xp.concatenate([state.K[layer][:begin], k])
        values = xp.concatenate([state.V[layer][:begin], v])
        step = Step(state, layer, h, before, q, keys, positions)
        allowed = choose(step) if choose else None
        if observe:
            observe(step, values)
        out = model.attend(q, keys, values, step.causal if allowed is None else allowed)
        before, h = h, model.after_attention(layer, h, out)
    return model.logits(h)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - xp.log(xp.exp(x).sum(-1, keepdims=True))


def compare(state, logits):
    """Of the steps that count: [nll, nll of the dense model, KL(dense, this), same greedy token] each."""
    mine, dense = log_softmax(logits[WARM:-1]), log_softmax(state.logits[WARM:-1])
    target = xp.asarray(state.ids[state.begin + WARM + 1:])
    rows = xp.arange(len(target))
    kl = (xp.exp(dense) * (dense - mine)).sum(-1)
    same = (mine.argmax(-1) == dense.argmax(-1)).astype(f32)
    return xp.stack([-mine[rows, target], -dense[rows, target], kl, same])
