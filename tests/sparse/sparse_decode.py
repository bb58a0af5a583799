"""A sparse decode step in numpy, as a policy of ucmclient.sparse describes it: each layer attends to the first blocks, the last ones, the
chosen ones and the block that is being filled. What other forms of a step are compared with.

Steps may be computed one after the other, as an engine does, or side by side where their tokens are known: a step's keys depend on the
steps before it through causal attention only, its choice on queries and on digests of blocks that were complete before it, and its
budget on what earlier steps of the same layer covered."""

import dataclasses

import numpy as np
import scorers
from decode import build
from model import f32, softmax

import methods

METHODS = ("", "mean", "submean", "box", "hash", "stats", "tokens")
ORDERS = ("digest", "oracle", "random", "window")


@dataclasses.dataclass
class Config:
    """policy: a ucmclient.sparse.Policy; None: dense. order: what ranks the blocks; only `digest` can be had in earnest. share:
    what stands for a group where a rule or a budget asks what is covered, its least covered head or the mean of its heads. keep: of top k,
    what the step before chose keeps its place unless another block scores so many times as much. coded: blocks before the last ones,
    which slots hold, are attended as the encoding `fp8` leaves them. first: of `estimated`, rounds as a GPU's steps have them, the first
    of so many blocks beside the last window; 0: of `microbatch` blocks."""
    name: str
    policy: object = None
    order: str = "digest"
    share: str = "least"
    keep: float = 1.0
    coded: bool = False
    first: int = 0


class Request:
    """A sequence's KV in every layer, as a cache holds it, and what its steps leave to those behind them."""

    def __init__(self, model, K, V, begin, block=16):
        """K, V: of each layer, [G, N, d]; the first `begin` tokens count."""
        self.model, self.begin, self.tokens, self.block, self.steps, self.parent = model, begin, begin, block, 0, None
        self.K, self.V = ([np.ascontiguousarray(x[:, :begin]) for x in some] for some in (K, V))
        self.digests = [{} for _ in range(model.layers)]
        self.layers = [Layer() for _ in range(model.layers)]
        self.room = [None] * model.layers  # of each layer, (K, V) with places for tokens to come
        self.coded = [None] * model.layers  # of each layer, (K, V) of the first tokens as `fp8` leaves them

    def append(self, layer, k, v):
        """k, v: [T, G, d]"""
        n, end = self.K[layer].shape[1], self.K[layer].shape[1] + len(k)
        if self.room[layer] is None or end > self.room[layer][0].shape[1]:
            G, _, d = self.K[layer].shape
            self.room[layer] = tuple(np.empty((G, end + 256, d), f32) for _ in range(2))
            for room, old in zip(self.room[layer], (self.K[layer], self.V[layer])):
                room[:, :n] = old
        for room, new in zip(self.room[layer], (k, v)):
            room[:, n:end] = new.swapaxes(0, 1)
        self.K[layer], self.V[layer] = (room[:, :end] for room in self.room[layer])

    def fork(self):
        """The same prefix for another decode; digests of its blocks are shared, as the daemon shares them."""
        assert self.steps == 0
        out = Request.__new__(Request)
        out.__dict__.update(self.__dict__, parent=self, K=list(self.K), V=list(self.V), digests=[{} for _ in self.digests],
                            layers=[Layer() for _ in self.layers], room=[None] * len(self.layers), coded=[None] * len(self.layers))
        return out

    def decoded(self, layer):
        """(K, V), encoded and decoded; a row of channels has a scale."""
        old = self.coded[layer]
        if old is None and self.parent:
            old = self.parent.decoded(layer)
        done = old[0].shape[1] if old else 0
        if done < self.K[layer].shape[1]:
            new = [fp8(x[layer][:, done:]) for x in (self.K, self.V)]
            old = [np.concatenate(pair, 1) for pair in zip(old, new)] if old else new
            self.coded[layer] = old
        return old

    def digest(self, layer, spec, complete):
        """Of the complete blocks, each digested once, when it is complete."""
        old = self.digests[layer].get(spec)
        if old is None and self.parent:
            old = self.parent.digest(layer, spec, self.begin // self.block)
        done = len(next(iter(old.values()))) if old else 0
        if done < complete:
            K = self.K[layer][:, done * self.block:complete * self.block].swapaxes(0, 1)
            new = build(spec, K.reshape(complete - done, self.block, *K.shape[1:]))
            old = {name: np.concatenate([old[name], new[name]]) if old else new[name] for name in new}
            self.digests[layer][spec] = old
        return {name: x[:complete] for name, x in old.items()}


def fp8(x):
    """float32 as docs/encodings.md's `fp8` leaves it: E4M3 times the least power of two of a row with which none is 432 or more."""
    m, e = np.frexp(abs(x).max(-1, keepdims=True))
    power = np.where(m < 432 / 512, e - 9, e - 8)
    y = np.ldexp(x, -power)
    step = np.maximum(np.frexp(y)[1] - 4, -9)
    return np.ldexp(np.rint(np.ldexp(y, -step)), step + power).astype(f32)


class Layer:
    """What a layer of a request keeps from step to step."""

    def __init__(self):
        self.votes = []   # [G, blocks] of the last steps, for policies whose queries vote
        self.chosen = {}  # {step: bool[lists, blocks]} that may serve yet
        self.last = None  # bool[lists, blocks] of the last step
        self.budget = None
        self.made = None  # the choice of the steps under way, for layers that share it


@dataclasses.dataclass
class Look:
    """What scorers.raw needs of a step."""
    model: object
    q: object
    digests: dict

    def digest(self, spec):
        return self.digests


# ---- scores ----

def spec_of(policy, model, block):
    d = {name: getattr(policy, name) for name in ("run", "kind", "bits", "seed", "rest")}
    keep = ()
    if METHODS[policy.native.digest] == "submean" and policy.keep < 1:
        pairs = model.d // 2
        keep = tuple(range(pairs - max(1, round(pairs * policy.keep)), pairs))
    return methods.Spec(METHODS[policy.native.digest], tokens=block, kv_heads=model.kv_heads, head_dim=model.d,
                        stand_ins=policy.chosen, keep=keep, **d)


def distances(look, spec):
    """Minus the squared distance of the nearest of a block's vectors, [G, group, T, blocks]."""
    k, model = look.digests["k"], look.model
    n, G, count, width = k.shape
    q = look.q[..., np.asarray(spec.channels())] if width < look.q.shape[-1] else look.q
    dot = scorers.exact(model, q, np.moveaxis(k, 2, 1).reshape(n * count, G, width)) / f32(model.beta)
    square = (q * q).sum(-1).reshape(len(q), G, -1).transpose(1, 2, 0)[..., None]
    x = 2 * dot - square - (k * k).sum(-1).transpose(1, 0, 2).reshape(G, 1, 1, -1)
    return x.reshape(x.shape[:-1] + (n, count)).max(-1)


def log_masses(look, spec):
    """As scorers.raw of `tokens` with rest; a block's vectors are apart, so that sums over them run along the blocks."""
    k = look.digests["k"]
    n, G, count, width = k.shape
    x = scorers.exact(look.model, look.q, np.moveaxis(k, 2, 0).reshape(count * n, G, width))
    x = x.reshape(x.shape[:-1] + (count, n))
    x[..., -1, :] += f32(np.log(spec.tokens - spec.stand_ins))
    top = x.max(-2)
    x -= top[..., None, :]
    return np.log(np.exp(x, out=x).sum(-2)) + top


def raw_scores(request, layer, q, policy, complete):
    spec = spec_of(policy, request.model, request.block)
    look = Look(request.model, q, request.digest(layer, spec, complete))
    if policy.score.metric == "l2":
        return distances(look, spec)
    return log_masses(look, spec) if spec.rest else scorers.raw(look, spec)


def reduced(raw, policy, valid, state):
    """[G, group, T, n] -> [lists, T, n], the votes of earlier steps included."""
    score = policy.score
    if score.reduce == "softmax":
        scale = f32(1 / state.beta * score.beta) if score.beta else f32(1)
        x = softmax(np.where(valid, raw * scale, f32(-np.inf))).sum(1)
    else:
        x = raw.max(1) if score.reduce == "max" else raw.mean(1)
    rows = policy.rows
    if rows > 1:
        n = x.shape[-1]
        old = [np.pad(v, ((0, 0), (0, n - v.shape[-1]))) for v in state.votes[-(rows - 1):]]
        every = np.concatenate([np.stack(old, 1), x], 1) if old else x
        state.votes = (state.votes + list(x.swapaxes(0, 1)))[-(rows - 1):]
        T, first = x.shape[1], every.shape[1] - x.shape[1]
        total = np.zeros_like(x)
        for back in range(rows):
            have = max(0, back - first)  # rows that the request didn't have yet
            if have < T:
                total[:, have:] += every[:, first - back + have:first - back + T]
        x = total
    if score.heads != "each":
        x = (x.sum(0) if score.heads == "sum" else x.max(0))[None]
    return x


def best_first(scores, valid, windows):
    """Blocks of each row in the order windows, then score, then those that it can't see; and the place of each."""
    s = np.where(valid, scores, f32(-np.inf))
    order = np.argsort(-np.where(windows, f32(np.inf), s), axis=-1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(s.shape[-1]), order.shape), -1)
    return order, places


# ---- how many ----

def fixed(policy, n, block):
    """Blocks of top k, of n complete ones each."""
    c = policy
    k = -(-c.topk_tokens // block) if c.topk_tokens else np.floor(n * c.sparse_ratio).astype(np.int64)
    return bounded(policy, np.maximum(k, least(policy, block)), n)


def least(policy, block):
    return max(policy.min_blocks, -(-policy.min_tokens // block))


def bounded(policy, k, n):
    return np.minimum(np.minimum(k, policy.limit) if policy.limit else k, n)


def sorted_by(order, x):
    return np.take_along_axis(x, np.broadcast_to(order[:, None], x.shape), -1)


class Covered:
    """What is covered behind the first i blocks of the order, i = 0 to n: of each list, its least head or their mean."""

    def __init__(self, config, order, sums, own, left, n):
        """sums: weights of blocks [G, group, T, n], own: of the step's own block; left: what each block is taken to weigh while it
        is left; n: blocks that there are, of each step."""
        lists, T, most = order.shape
        def shaped(x):
            return x.reshape(lists, -1, T, x.shape[-1])
        a = sorted_by(order, shaped(sums))
        self.attended = np.cumsum(np.concatenate([shaped(own[..., None]), a], -1, dtype=np.float64), -1)
        self.sorted, self.n, self.share = a, n, config.share
        if left is not None:
            x = sorted_by(order, shaped(left))
            total = np.cumsum(x[..., ::-1], -1, dtype=np.float64)[..., ::-1]
            self.left = np.concatenate([total, np.zeros_like(total[..., :1])], -1)

    def by_lightest(self, windows):
        """PSA's: each of those left weighs as much as the lightest attended one; the windows, which are there whatever they weigh, are
        not counted for it."""
        i = np.arange(self.sorted.shape[-1])
        light = np.where(i < windows[:, None], np.inf, self.sorted)
        light = np.minimum.accumulate(light, -1)
        light = np.concatenate([np.full_like(light[..., :1], np.inf), light], -1)
        count = np.maximum(self.n[:, None] - np.arange(self.sorted.shape[-1] + 1), 0)
        self.left = np.where(count == 0, 0, np.where(np.isinf(light), 1e30, light) * count)
        return self

    def shares(self):
        """[lists, T, n + 1]"""
        x = self.attended / (self.attended + self.left)
        return x.min(1) if self.share == "least" else x.mean(1)


def rounds(policy, shares, windows, n, block):
    """Blocks attended when a round ends with eps covered: windows, then `microbatch` a round."""
    m, most = policy.microbatch, shares.shape[-1] - 1
    i = np.arange(most + 1)
    ends = (i >= windows[:, None]) & ((i - windows[:, None]) % m == 0) | (i >= n[:, None])
    enough = (shares >= policy.eps) & ends | (i >= n[:, None])
    return bounded(policy, np.maximum(enough.argmax(-1), least(policy, block)), n)


def few_rounds(policy, covered, n, block, first, most=3):
    """The same by at most so many rounds: the first of the last window and `first` blocks, each further one up to where the share would reach
    eps if the blocks until there weighed what is estimated, the last of all."""
    shares, m, eps = covered.shares(), policy.microbatch, policy.eps
    k = np.zeros(shares.shape[:2], np.int64)
    for l, t in np.ndindex(*k.shape):
        left, of, took = covered.left[l, :, t], int(n[t]), 1
        end = min(of, policy.local_window_sz + first)
        while end < of and shares[l, t, end] < eps:
            took += 1
            i = np.arange(end + max(m, end // 8), of if took < most else 0, m)
            gain = covered.attended[l, :, t, end, None] + left[:, end, None] - left[:, i]
            ends = i[(left[:, i] * eps <= (1 - eps) * gain).all(0)]
            end = int(ends[0]) if len(ends) else of
        k[l, t] = end
    return bounded(policy, np.maximum(k, least(policy, block)), n)


def budgets(request, state, policy, shares, n):
    """A budget a step, moved on by what the step covered."""
    out, worst = np.empty(len(n), np.int64), shares.min(0)
    for t, blocks in enumerate(n.tolist()):
        if state.budget is None:
            state.budget = policy.budget(request.block, blocks)
        out[t] = bounded(policy, max(state.budget.blocks, least(policy, request.block)), blocks)
        state.budget.next(blocks, float(worst[t, out[t]]))
    return out


def kept(state, keep, scores, valid, windows, k):
    """Steps one after the other: each chooses by the scores and by what the one before chose."""
    made = np.zeros(scores.shape, bool)
    for t in range(len(k)):
        last = np.zeros((len(scores), scores.shape[-1]), bool) if state.last is None else state.last
        last = np.pad(last, ((0, 0), (0, scores.shape[-1] - last.shape[-1])))
        _, places = best_first(scores[:, t] * np.where(last, f32(keep), f32(1)), valid[t], windows[t])
        made[:, t] = state.last = (places < k[t]) & valid[t]
    return made


# ---- a layer ----

@dataclasses.dataclass
class Weights:
    """Exact attention of T steps: e^(beta q.k - top), 0 where a step can't look."""
    every: object  # [G, group, T, N]
    sums: object   # of blocks, [G, group, T, blocks]
    top: object    # [G, group, T, 1]


def coded_ends(request, config, positions):
    """Of each step, the first token that it attends as it was computed."""
    policy, block = config.policy, request.block
    last = max(policy.local_window_sz, -(-policy.local_window_tokens // block))
    return np.maximum(positions // block - last, 0) * block


def weights(request, layer, q, positions, coded=None):
    """coded: coded_ends; None: nothing is."""
    model, block, N = request.model, request.block, request.K[layer].shape[1]
    G, T = model.kv_heads, len(q)
    nb = -(-N // block)
    x = np.empty((G, model.group, T, nb * block), f32)
    rows = (q.reshape(T, G, model.group, model.d) * f32(model.beta)).transpose(1, 2, 0, 3)
    for g in range(G):
        np.matmul(rows[g].reshape(-1, model.d), request.K[layer][g].T, out=x[g].reshape(-1, nb * block)[:, :N])
        if coded is not None:
            of_coded = (rows[g].reshape(-1, model.d) @ request.decoded(layer)[0][g].T).reshape(model.group, T, N)
            for t, end in enumerate(coded):
                x[g, :, t, :end] = of_coded[:, t, :end]
    first = int(positions[0])
    x[..., first:][..., np.arange(first, nb * block)[None] > positions[:, None]] = -np.inf
    top = x.max(-1, keepdims=True)
    np.subtract(x, top, out=x)
    np.exp(x, out=x)
    return Weights(x, (x.reshape(-1, block) @ np.ones(block, f32)).reshape(G, model.group, T, nb), top)


def serving(policy, step0, T):
    """The step whose choice serves each step, as ucm_schedule_step has it."""
    asked = np.maximum(np.arange(step0, step0 + T) - policy.lag, 0)
    return asked - asked % policy.retrieval_stride


def choose(request, layer, config, q, w, positions):
    """bool[lists, T, blocks]: the blocks that each step attends to beside its own; None: all."""
    policy, state = config.policy, request.layers[layer]
    if policy is None or request.tokens < policy.dense_below:
        return None
    own = positions // request.block
    nb, T, lists = w.sums.shape[-1], len(q), 1 if policy.score.heads != "each" else request.model.kv_heads
    blocks = np.arange(nb)
    valid = blocks < own[:, None]
    first = max(policy.init_window_sz, -(-policy.init_window_tokens // request.block))
    last = max(policy.local_window_sz, -(-policy.local_window_tokens // request.block))
    windows = valid & ((blocks < first) | (blocks >= own[:, None] - last))
    state.beta = request.model.beta
    complete = int(own[-1])
    pad = ((0, 0),) * 3 + ((0, nb - complete),)
    raw = np.pad(raw_scores(request, layer, q, policy, complete), pad) if config.order == "digest" else None
    if config.order == "digest":
        scores = reduced(raw, policy, valid, state)
    elif config.order == "oracle":
        scores = (w.sums / w.sums.sum(-1, keepdims=True)).sum(1)
    elif config.order == "random":
        scores = np.random.default_rng(layer).random((lists, T, nb), f32)
    else:
        scores = np.broadcast_to(blocks.astype(f32), (lists, T, nb))
    order, places = best_first(scores, valid, windows)
    seen = np.where(valid, w.sums, 0)
    mine = np.take_along_axis(w.sums, np.broadcast_to(own[:, None], w.sums.shape[:3] + (1,)), -1)[..., 0]
    n, always = own, windows.sum(-1)

    def covered(left):
        return Covered(config, order, seen, mine, left, n)

    def estimate():
        if config.order == "oracle":
            return seen
        return np.where(valid, np.exp(np.minimum(raw - w.top, 80)), 0)

    if config.keep != 1:
        assert policy.choice == "topk" and not policy.goal and policy.score.metric == "dot" and policy.score.reduce == "softmax"
        return kept(state, config.keep, scores, valid, windows, fixed(policy, n, request.block)) | windows
    if policy.choice == "topk" and policy.goal > 0:
        k = budgets(request, state, policy, covered(estimate()).shares(), n)
    elif policy.choice == "topk":
        k = fixed(policy, n, request.block)
    elif policy.choice == "mass":
        top = np.where(valid, scores, f32(-np.inf))
        p = np.where(valid, np.exp(top - top.max(-1, keepdims=True)), 0)[:, None]
        have = np.cumsum(sorted_by(order, p), -1)[:, 0]
        k = np.maximum((have >= policy.eps * have[..., -1:]).argmax(-1) + 1, always)
    elif policy.choice == "psa":
        k = rounds(policy, covered(None).by_lightest(always).shares(), always, n, request.block)
    elif policy.choice == "estimated" and config.first:
        k = few_rounds(policy, covered(estimate()), n, request.block, config.first)
    elif policy.choice == "estimated":
        k = rounds(policy, covered(estimate()).shares(), always, n, request.block)
    else:
        bound = np.where(valid, np.exp(np.minimum(raw - w.top, 80)) * request.block, 0)
        k = rounds(policy, covered(bound).shares(), always, n, request.block)
    made = (places < np.broadcast_to(k, (order.shape[0], T))[..., None]) & valid
    return served(state, policy, request.steps, made) | windows


def served(state, policy, step0, made):
    """Of the choices made with each step's queries, and of those kept, the ones that serve."""
    if policy.retrieval_stride == 1 and policy.lag == 0:
        return made
    T = made.shape[1]
    at = serving(policy, step0, T)
    out = np.zeros_like(made)
    for t, step in enumerate(at.tolist()):
        if step >= step0:
            out[:, t] = made[:, step - step0]
        else:
            old = state.chosen[step]
            out[:, t, :old.shape[-1]] = old
    need = int(serving(policy, step0 + T, 1)[0])
    for t in range(T):
        state.chosen[step0 + t] = made[:, t]
    state.chosen = {step: x for step, x in state.chosen.items() if step >= need}
    return out


@dataclasses.dataclass
class Attended:
    """Sums over layers and steps."""
    tokens: float = 0  # of a KV head
    union: float = 0   # that any KV head of the layer attends
    of: float = 0      # that there are
    least: list = dataclasses.field(default_factory=list)  # true mass covered, of each layer's steps, the least head

    def add(self, chosen, w, positions, block):
        own = positions // block
        there = positions + 1.0
        if chosen is None:
            self.tokens, self.union, self.of = (x + there.sum() for x in (self.tokens, self.union, self.of))
            return
        partial = there - own * block
        count = chosen.sum(-1) * block + partial
        self.tokens += count.mean(0).sum()
        self.union += (chosen.any(0).sum(-1) * block + partial).sum()
        self.of += there.sum()


def attend(request, layer, config, q, positions, attended):
    """out[T, heads, d]"""
    model, block = request.model, request.block
    coded = coded_ends(request, config, positions) if config.coded else None
    w = weights(request, layer, q, positions, coded)
    source = layer - layer % config.policy.reuse if config.policy else layer
    if source == layer:
        request.layers[layer].made = choose(request, layer, config, q, w, positions)
    chosen = request.layers[source].made
    if attended is not None:
        attended.add(chosen, w, positions, block)
    N = request.V[layer].shape[1]
    every, sums = w.every, w.sums
    if chosen is not None:
        mask = chosen | (np.arange(sums.shape[-1]) == (positions // block)[:, None])
        every *= np.repeat(mask.astype(f32), block, -1)[:, None]
        sums = sums * mask[:, None]
    out = np.empty((model.kv_heads, model.group * len(q), model.d), f32)
    for g in range(model.kv_heads):
        if coded is not None:
            old = every[g][..., :N].copy()
            for t, end in enumerate(coded):
                old[:, t, end:] = every[g, :, t, :end] = 0
        np.matmul(every[g].reshape(-1, every.shape[-1])[:, :N], request.V[layer][g], out=out[g])
        if coded is not None:
            out[g] += old.reshape(-1, N) @ request.decoded(layer)[1][g]
    out = out.reshape(model.kv_heads, model.group, len(q), model.d) / sums.sum(-1)[..., None]
    return out.transpose(2, 0, 1, 3).reshape(len(q), model.heads, model.d)


# ---- steps ----

def run(request, config, ids, attended=None):
    """Logits of the steps that read these tokens, one step each; their KV joins the request."""
    model = request.model
    positions = np.arange(request.tokens, request.tokens + len(ids))
    h = model.embed(ids)
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, h, positions)
        request.append(layer, k, v)
        h = model.after_attention(layer, h, attend(request, layer, config, q, positions, attended))
    request.tokens += len(ids)
    request.steps += len(ids)
    return model.logits(h)


def generate(request, config, token, count, attended=None):
    """Greedy: the tokens behind this one, whose KV counts as that of the prompt does."""
    out = []
    for _ in range(count):
        token = int(run(request, config, [token], attended)[0].argmax())
        out.append(token)
    return out
