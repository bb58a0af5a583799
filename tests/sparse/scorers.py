"""What a block is worth to a step, by each method: functions of a decode.Step that give scores[lists, T, blocks], where lists is
1 or a list for each KV head."""

import math

import numpy as np
from decode import BLOCK, ranks
from model import f32, softmax, xp

from methods import MAX, NORMALISED, Spec, sign_bits


def spec(method, **more):
    return Spec(method, tokens=BLOCK, kv_heads=3, head_dim=64, **more)


# ---- scores from digests, times beta ----

def raw(step, spec, inner="max"):
    """[G, group, T, blocks]. inner: how a block's several vectors become one score, max or the log of the sum."""
    digest, model = step.digest(spec), step.model
    if spec.method == "box":
        q = xp.maximum(step.q, 0), xp.minimum(step.q, 0)
        return model.exact(q[0], digest["hi"]) + model.exact(q[1], digest["lo"])
    if spec.method == "stats":
        return model.exact(step.q, digest["k"][:, :, 0]) + model.exact(step.q * step.q, digest["var"]) * f32(model.beta / 2) \
            + f32(math.log(BLOCK))
    vectors = digest["k"]
    n, G, count, width = vectors.shape
    q = step.q
    if spec.method == "hash":
        q = xp.where(sign_bits(spec, q), f32(1), f32(-1))
        rows = q.reshape(len(q), G, -1, width).transpose(1, 2, 0, 3).reshape(G, -1, width)
        out = xp.empty((G, rows.shape[1], n), f32)
        for at in range(0, n, 64):  # the signs of all tokens as float32 would be large
            k = vectors[at:at + 64].transpose(1, 3, 0, 2).reshape(G, width, -1).astype(f32)
            out[..., at:at + 64] = xp.matmul(rows, k).reshape(G, rows.shape[1], -1, count).max(-1)
        return out.reshape(G, -1, len(q), n)
    if spec.method == "submean" and width < q.shape[-1]:
        q = q[..., xp.asarray(spec.channels())]
    x = exact(model, q, xp.moveaxis(vectors, 2, 1).reshape(n * count, G, width))
    x = x.reshape(x.shape[:-1] + (n, count))
    if spec.rest:
        x[..., -1] += f32(math.log(BLOCK - spec.stand_ins))
        return log_sum(x)
    if inner == "max" or count == 1:
        return x.max(-1)
    top = x.max(-1, keepdims=True)
    return xp.log(xp.exp(x - top).sum(-1)) + top[..., 0]


def exact(model, q, k):
    """As Model.exact, for vectors of fewer channels."""
    T, heads, width = q.shape
    rows = q.reshape(T, model.kv_heads, -1, width).transpose(1, 2, 0, 3).reshape(model.kv_heads, -1, width)
    return (xp.matmul(rows, k.transpose(1, 2, 0)) * f32(model.beta)).reshape(model.kv_heads, -1, T, len(k))


def reduce(step, scores, how):
    """[G, group, T, blocks] -> [G, T, blocks]."""
    if how == "max":
        return scores.max(1)
    if how == "mean":
        return scores.mean(1)
    if how == "softmax":
        return softmax(xp.where(step.valid, scores, f32(-np.inf))).sum(1)
    raise ValueError(how)


def by_digest(spec, how="softmax", inner="max"):
    return lambda step: reduce(step, raw(step, spec, inner), how)


# ---- two digests together ----

def log_sum(*parts):
    """Log of the sum of exp() of arrays [..., any number]."""
    x = xp.concatenate(parts, -1)
    top = x.max(-1, keepdims=True)
    return xp.log(xp.exp(x - top).sum(-1)) + top[..., 0]


def with_mean(tokens):
    """A block is its stand-ins, for what sticks out, and its mean, for the rest: the log-sum of both."""
    def score(step):
        stand_ins = raw(step, tokens, "log-sum")
        mean = raw(step, spec("mean")) + f32(math.log(BLOCK))
        return reduce(step, log_sum(stand_ins[..., None], mean[..., None]), "softmax")
    return score


def box_and_mean(step):
    """A quarter of the mean's score, three quarters of the bound."""
    return reduce(step, raw(step, spec("mean")) / 4 + raw(step, spec("box")) * f32(0.75), "softmax")


# ---- the order of others ----

def one_list(score):
    return lambda step: score(step).sum(0, keepdims=True)


def late(score, lag=0, stride=1):
    """The choice of step t is made with the scores of an earlier one."""
    def scores(step):
        rows = np.arange(len(step.positions))
        rows = np.maximum(rows - lag, 0)
        rows -= (step.positions[0] + rows) % stride
        return score(step)[:, xp.asarray(np.maximum(rows, 0))]
    return scores


def window_only(step):
    return xp.broadcast_to(step.blocks.astype(f32), (1,) + step.valid.shape)


def random(step):
    rng = np.random.default_rng(step.layer)
    return xp.asarray(rng.random((step.model.kv_heads,) + step.valid.shape, f32))


def oracle(step):
    """Exact mass of each block, summed over the heads of a group."""
    return step.mass().sum(1)


def best_token(step):
    """Largest q.k in the block, over the group."""
    x = step.exact().max(1)
    return x.reshape(x.shape[:-1] + (step.nb, BLOCK)).max(-1)


def esa(step):
    """q averaged over the group, one list: sum over heads of q.r, r the mean."""
    return reduce(step, raw(step, spec("mean")), "mean").sum(0, keepdims=True)


def kvstar(corrected):
    """Means of 4 tokens, half of the channels by mean |K| in the layer, the softmax of the last 8 queries summed; every 8 steps."""
    def score(step):
        n = step.nb
        weight = xp.abs(step.state.K[step.layer][:step.state.begin]).mean(0)  # [G, d]
        keep = xp.argsort(-weight, axis=-1)[:, :weight.shape[1] // 2]
        k = step.k.reshape(n * 4, 4, *step.k.shape[1:]).mean(1)
        k = xp.take_along_axis(k, keep[None], -1)
        q = step.q.reshape(len(step.q), step.model.kv_heads, -1, step.q.shape[-1])
        q = xp.take_along_axis(q, xp.broadcast_to(keep[None, :, None], q.shape[:3] + keep.shape[1:]), -1)
        x = exact(step.model, q.reshape(len(q), -1, keep.shape[1]), k)
        if not corrected:
            x = x / f32(step.model.beta)
        p = softmax(xp.where(xp.repeat(step.valid, 4, -1), x, f32(-np.inf))).sum(1)
        p = p.reshape(p.shape[:-1] + (n, 4)).max(-1)
        total = xp.zeros_like(p)
        for back in range(8):
            total[:, back:] += p[:, :p.shape[1] - back]
        return total
    return late(score, stride=8)


def infllm(step):
    """Of each block the 2 tokens that the next 64 queries score highest stand for it; their q.k summed over heads, one list."""
    state, model = step.state, step.model
    if step.layer not in state.stand_ins:
        N = len(step.k)
        q = state.Q[step.layer].reshape(N, model.kv_heads, -1, model.d).sum(2)
        run = xp.concatenate([q, xp.zeros((64,) + q.shape[1:], f32)]).cumsum(0)
        following = run[64:] - run[:-64]
        state.stand_ins[step.layer] = (following * state.K[step.layer]).sum((1, 2)).reshape(-1, BLOCK)
    best = xp.argsort(-state.stand_ins[step.layer], axis=-1)[:, :2] + step.blocks[:, None] * BLOCK
    k = step.k[best]  # [blocks, 2, G, d]
    x = exact(model, step.q, k.reshape(-1, *k.shape[2:]))
    return x.reshape(x.shape[:-1] + (step.nb, 2)).sum((0, 1, 4))[None]


# ---- those that choose tokens, not blocks: bool[G, 1, T, N] ----

def h2o(share):
    """Half of the budget for the tokens of the prompt that got most attention, half for the last ones; what was evicted is gone."""
    def choose(step):
        state = step.state
        got = state.received[step.layer][:, :state.begin]
        half = int(len(step.k) * share / 2)
        heavy = xp.zeros((step.model.kv_heads, len(step.k)), bool)
        xp.put_along_axis(heavy, xp.argsort(-got, axis=-1)[:, :half], xp.asarray(True), -1)
        at = xp.arange(len(step.k))[None]
        recent = at > xp.asarray(step.positions)[:, None] - half
        return (heavy[:, None] | recent[None])[:, None] & step.causal
    return choose


def infinigen_scores(step, part=0.3):
    """The logits of this layer guessed from what entered the layer before, in the 0.3 of the channels that matter most after
    turning both by the singular vectors of the prompt's queries; [G, T, N], the distance to the largest of each head."""
    state, model = step.state, step.model
    if step.layer not in state.turns:
        q = state.Q[step.layer][:state.begin].reshape(state.begin, model.kv_heads, -1, model.d)
        rows = q.transpose(1, 0, 2, 3).reshape(model.kv_heads, -1, model.d)
        turn = xp.asarray(np.stack([np.linalg.eigh(to_host(xp.matmul(r.T, r)).astype(np.float64))[1] for r in rows]).astype(f32))
        weight = xp.abs(xp.matmul(rows, turn)).sum(1)
        keep = xp.argsort(-weight, axis=-1)[:, :round(model.d * part)]
        state.turns[step.layer] = xp.take_along_axis(turn, keep[:, None], -1)  # [G, d, kept]
    turn = state.turns[step.layer]
    q = model.queries(step.layer, step.before, step.positions)
    q = q.reshape(len(q), model.kv_heads, -1, model.d).transpose(1, 2, 0, 3).reshape(model.kv_heads, -1, model.d)
    k = xp.matmul(step.k.transpose(1, 0, 2), turn)
    x = xp.matmul(xp.matmul(q, turn), k.transpose(0, 2, 1)) * f32(model.beta)
    x = x.reshape(model.kv_heads, -1, len(step.positions), len(step.k))
    x = xp.where(step.causal, x, f32(-np.inf))
    return (x - x.max(-1, keepdims=True)).max(1)


def to_host(x):
    return x if xp is np else xp.asnumpy(x)


def infinigen(alpha):
    """Tokens whose guessed logit is within alpha of the largest, and the step's own block. The first layer is dense."""
    def choose(step):
        if step.layer == 0:
            return None
        own = xp.arange(len(step.k))[None] // BLOCK == step.own[:, None]
        return ((infinigen_scores(step) > -alpha) | own)[:, None] & step.causal
    return choose


# ---- how many blocks: PSA ----

def smallest_so_far(x):
    shift = 1
    while shift < x.shape[-1]:
        x = xp.concatenate([x[..., :shift], xp.minimum(x[..., shift:], x[..., :-shift])], -1)
        shift *= 2
    return x


def psa(score, eps, stop="psa", every=1):
    """Blocks in order of score until the share of the mass that is known, at least or probably, to be covered reaches eps for
    every head of the group. stop: psa (what is left has at most the smallest log-sum seen), certified (the box's bound),
    estimated (mean and variance)."""
    box, stats = spec("box"), spec("stats")

    def choose(step):
        place = ranks(step, score(step))  # [G or 1, T, nb]
        order = xp.argsort(place, axis=-1)
        sums = step.block_sums()
        top = sums.max(-1, keepdims=True)
        a = xp.exp(sums - top)
        own = xp.take_along_axis(a, xp.broadcast_to(step.own[None, None, :, None], a.shape[:3] + (1,)), -1)
        a = xp.where(step.valid, a, 0)
        wide = xp.broadcast_to(order[:, None], a.shape)
        a = xp.take_along_axis(a, wide, -1)
        covered = xp.cumsum(a, -1) + own
        seen = xp.take_along_axis(xp.broadcast_to(step.valid, a.shape), wide, -1)
        if stop == "psa":
            left = xp.maximum(step.own[:, None] - 1 - step.blocks[None], 0)
            fixed = xp.take_along_axis(xp.broadcast_to(step.windows(), a.shape), wide, -1)  # are there whatever their mass
            rest = left * smallest_so_far(xp.where(seen & ~fixed, a, f32(1e30)))
        else:
            if stop == "certified":
                bound = xp.exp(xp.minimum(raw(step, box) - top, 80)) * BLOCK
            else:
                bound = xp.exp(xp.minimum(raw(step, stats) - top, 80))
            bound = xp.take_along_axis(xp.where(step.valid, bound, 0), wide, -1)
            rest = xp.maximum(bound.sum(-1, keepdims=True) - xp.cumsum(bound, -1), 0)
        enough = (covered >= eps * (covered + rest)).all(1)  # [G, T, nb]
        if every > 1:
            enough &= (step.blocks + 1) % every == 0
        enough |= step.blocks[None] >= step.own[:, None] - 1
        last = enough.argmax(-1)[..., None]
        return (place <= last) & step.valid
    return choose


def mass(score, eps):
    """Blocks in order of score, which is a probability summed over the group, until they have eps of it."""
    def choose(step):
        s = xp.where(step.valid, score(step), 0)
        place = ranks(step, s)
        order = xp.argsort(place, axis=-1)
        have = xp.cumsum(xp.take_along_axis(s, order, -1), -1)
        last = (have >= eps * have[..., -1:]).argmax(-1)[..., None]
        return (place <= last) & step.valid
    return choose


DIGESTS = {
    "mean": spec("mean"), "max": spec("mean", kind=MAX), "normalised mean": spec("mean", kind=NORMALISED),
    "submean 8": spec("submean", run=8), "submean 4": spec("submean", run=4), "submean 2": spec("submean", run=2),
    "submean 8, half": spec("submean", run=8, keep=tuple(range(16, 32))),
    "submean 4, half": spec("submean", run=4, keep=tuple(range(16, 32))),
    "box": spec("box"), "hash 64": spec("hash", bits=64), "hash 128": spec("hash", bits=128), "hash 256": spec("hash", bits=256),
    "stats": spec("stats"), "tokens 1": spec("tokens", stand_ins=1), "tokens 2": spec("tokens", stand_ins=2),
    "tokens 4": spec("tokens", stand_ins=4), "tokens 3, rest": spec("tokens", stand_ins=3, rest=1),
    "tokens 4, rest": spec("tokens", stand_ins=4, rest=1), "tokens 6, rest": spec("tokens", stand_ins=6, rest=1),
}
