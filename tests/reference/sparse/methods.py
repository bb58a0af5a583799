"""Summaries, scores and choices of docs/design/retrieval.md in numpy, written from their
definitions and not from our C, so that the two can be compared. Integers, scales and float32
results are meant to be equal bit by bit: fma() rounds once, as the C library's does. Only results
that need exp() or log() hold within a tolerance: the scores of `tokens` with rest,
reduce_group(..., "softmax"), weights(), and choices by mass. `stats` and `tokens` with rest add the
correctly rounded float32 of a logarithm.

Works with numpy 1.24 and newer. Shapes: K[n, B, G, d], V[n, B, G, v], q[rows, Hq, d]; n blocks of B tokens, G KV heads.
"""

import dataclasses
import math

import numpy as np
from formats import bf16_to_f32, bf16_up
from numpy import errstate

f32, f64, u64 = np.float32, np.float64, np.uint64
BF16_NAN = 0x7FC0
GOLDEN = 0x9E3779B97F4A7C15
LANES = 32
MEAN, MAX, NORMALISED = 0, 1, 2


# ---- float32 arithmetic as the C has it ----

def fma(a, b, c):
    """float32 fma with one rounding. The product is exact in float64. The sum is rounded to odd
    there (Boldo and Melquiond), so that the second rounding, to float32, is right."""
    p = np.asarray(a, f64) * np.asarray(b, f64)
    c = np.asarray(c, f64)
    s = np.asarray(p + c)
    back = s - p
    error = (p - (s - back)) + (c - back)
    bits = np.ascontiguousarray(s).view(np.int64).reshape(s.shape)
    nudge = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    away = np.where((error > 0) == (s > 0), 1, -1)
    with errstate(over="ignore"):
        return (bits + np.where(nudge, away, 0)).view(f64).astype(f32)


def lanes_sum(acc):
    """acc[..., 32] -> its sum, halves added to halves."""
    half = LANES // 2
    while half:
        acc = acc[..., :half] + acc[..., half:2 * half]
        half //= 2
    return acc[..., 0]


def by_lanes(x):
    """x[..., c] -> x[..., ceil(c / 32), 32]: channels past the end are zeros, which change no sum."""
    x = np.asarray(x, f32)
    pad = -x.shape[-1] % LANES
    if pad:
        x = np.concatenate([x, np.zeros(x.shape[:-1] + (pad,), f32)], -1)
    return x.reshape(x.shape[:-1] + (-1, LANES))


def dot(a, b):
    """Sum over the last axis in 32 lanes; the axes before it broadcast."""
    a, b = by_lanes(a), by_lanes(b)
    acc = np.zeros(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (LANES,), f32)
    for step in range(a.shape[-2]):
        acc = fma(a[..., step, :], b[..., step, :], acc)
    return lanes_sum(acc)


def ordered_sum(x, axis):
    """In order from the first, each sum rounded."""
    x = np.moveaxis(x, axis, 0)
    total = x[0].copy()
    for row in x[1:]:
        total += row
    return total


# ---- what a summary is ----

@dataclasses.dataclass(frozen=True)
class Spec:
    method: str                # mean, submean, box, hash, stats, tokens
    tokens: int = 16           # B
    kv_heads: int = 8          # G
    head_dim: int = 128        # d
    v_head_dim: int = 0        # 0: as MLA, no V
    rope_dim: int = 0          # MLA: the last channels, hashed apart
    kind: int = MEAN           # of mean
    run: int = 4               # c of submean
    keep: tuple = ()           # RoPE pairs that submean keeps; none: all
    pairs: str = "neox"        # pair i is channels i, i + d/2; or "interleaved": 2i, 2i + 1
    bits: int = 128            # of hash
    latent_bits: int = 0       # of hash, of those for the part that is not RoPE, where rope_dim > 0
    seed: int = 0              # of hash
    stand_ins: int = 2         # r of tokens
    rest: int = 0              # of tokens: 1: the mean of the others too, all in 4 bits

    def channels(self):
        """The channels that submean keeps, ascending."""
        half = self.head_dim // 2
        pairs = self.keep or range(half)
        two = [(i, i + half) if self.pairs == "neox" else (2 * i, 2 * i + 1) for i in pairs]
        return np.array(sorted(c for pair in two for c in pair))

    def segments(self):
        """[(first channel, channels, bits)] of hash."""
        if self.rope_dim:
            latent = self.head_dim - self.rope_dim
            return [(0, latent, self.latent_bits), (latent, self.rope_dim, self.bits - self.latent_bits)]
        return [(0, self.head_dim, self.bits)]

    def fields(self):
        """[(name, type, shape of one block)] in the order of the bytes."""
        B, G, d = self.tokens, self.kv_heads, self.head_dim
        if self.method == "mean":
            return [("r", "<i1", (G, d)), ("s", "<u2", (G,))]
        if self.method == "submean":
            return [("r", "<i1", (G, B // self.run, len(self.channels()))), ("s", "<u2", (G, B // self.run))]
        if self.method == "box":
            return [("lo", "<i1", (G, d)), ("hi", "<i1", (G, d)), ("s", "<u2", (G,))]
        if self.method == "hash":
            return [("words", "<u8", (G, B, self.bits // 64)), ("poison", "<u4", (G,))]
        if self.method == "stats":
            return [("m", "<i1", (G, d)), ("var", "<u1", (G, d)), ("v", "<i1", (G, self.v_head_dim)), ("s_m", "<u2", (G,)),
                    ("s_v", "<u2", (G,)), ("s_V", "<u2", (G,))]
        if self.method == "tokens" and self.rest:
            return [("k", "<u1", (G, self.stand_ins + 1, (d + 31) // 32 * 16)), ("s", "<u2", (G, self.stand_ins + 1))]
        if self.method == "tokens":
            return [("k", "<i1", (G, self.stand_ins, d)), ("s", "<u2", (G, self.stand_ins))]
        raise ValueError(self.method)


def summary_bytes(spec):
    size = sum(np.dtype(t).itemsize * math.prod(shape) for _, t, shape in spec.fields())
    return (size + 3) // 4 * 4


def pack(spec, summary):
    """{field: array[n, ...]} -> u8[n, summary_bytes]."""
    n = len(summary[spec.fields()[0][0]])
    parts = [np.ascontiguousarray(summary[name], t).reshape(n, -1).view(np.uint8) for name, t, shape in spec.fields()
             if math.prod(shape)]
    body = np.concatenate(parts, 1)
    return np.concatenate([body, np.zeros((n, summary_bytes(spec) - body.shape[1]), np.uint8)], 1)


def unpack(spec, raw):
    summary, at = {}, 0
    for name, t, shape in spec.fields():
        size = np.dtype(t).itemsize * math.prod(shape)
        summary[name] = np.ascontiguousarray(raw[:, at:at + size]).view(t).reshape((len(raw),) + shape)
        at += size
    return summary


# ---- building ----

def scale_up(peak, levels):
    """The bf16 scale of values up to `peak` in `levels` steps: rounded up, and never too small."""
    s = bf16_up((np.asarray(peak, f32) / f32(levels)).astype(f32))
    s = np.where(f32(levels) * bf16_to_f32(s) < peak, s + 1, s).astype(np.uint16)
    return np.where(peak == 0, 0, s).astype(np.uint16)


def steps(x, s, low, high):
    """x[..., c] in steps of s[...]."""
    wide = bf16_to_f32(s)[..., None]
    with errstate(invalid="ignore", divide="ignore"):
        return np.where(wide == 0, 0, np.clip(np.rint((x / wide).astype(f32)), low, high))


def quantise(x):
    """x[..., c] -> (i8[..., c], bf16[...])."""
    s = scale_up(np.abs(x).max(-1), 127)
    return steps(x, s, -127, 127).astype(np.int8), s


def quantise_positive(x):
    s = scale_up(x.max(-1), 255)
    return steps(x, s, 0, 255).astype(np.uint8), s


def block_mean(x):
    """x[n, B, ...] -> mean over tokens, summed in order."""
    return ordered_sum(x, 1) / f32(x.shape[1])


def build_mean(spec, K, V):
    if spec.kind == MAX:
        r = K.max(1)
    else:
        r = block_mean(K)
        if spec.kind == NORMALISED:
            square = dot(r, r)
            norm = np.sqrt(square)[..., None]
            r = np.where(norm == 0, r, r / np.where(norm == 0, f32(1), norm)).astype(f32)
            r = np.where(np.isfinite(norm), r, f32(np.inf))
    r, s = quantise(r)
    return {"r": r, "s": s}


def build_submean(spec, K, V):
    n, B, G, d = K.shape
    runs = K.reshape(n, B // spec.run, spec.run, G, d)
    mean = ordered_sum(runs, 2) / f32(spec.run)
    r, s = quantise(np.moveaxis(mean, 2, 1)[..., spec.channels()])
    return {"r": r, "s": s}


def build_box(spec, K, V):
    low, high = K.min(1), K.max(1)
    s = scale_up(np.maximum(np.abs(low), np.abs(high)).max(-1), 127)
    wide = bf16_to_f32(s)[..., None]
    with errstate(invalid="ignore", divide="ignore"):
        lo = np.where(wide == 0, 0, np.floor((low / wide).astype(f32))).astype(f32)
        hi = np.where(wide == 0, 0, np.ceil((high / wide).astype(f32))).astype(f32)
    for _ in range(2):  # a quotient that was rounded the wrong way
        lo = np.where(lo * wide > low, lo - 1, lo).astype(f32)
        hi = np.where(hi * wide < high, hi + 1, hi).astype(f32)
    fits = np.isfinite(lo) & np.isfinite(hi)
    assert ((lo >= -128) & (hi <= 127) | ~fits).all()
    return {"lo": np.where(fits, lo, 0).astype(np.int8), "hi": np.where(fits, hi, 0).astype(np.int8), "s": s}


def splitmix64(z):
    z = np.asarray(z, u64)
    with errstate(over="ignore"):
        z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


def random_signs(seed, n, chunk, j, segment):
    """f32[n] of 1 and -1; a set bit is -1."""
    words = [(seed + GOLDEN * (1 + c + 1024 * (2 * chunk + j + 16 * segment))) % 2 ** 64 for c in range((n + 63) // 64)]
    words = splitmix64(np.array(words, u64))
    c = np.arange(n)
    bits = (words[c // 64] >> (c % 64).astype(u64)) & u64(1)
    return np.where(bits == 1, f32(-1), f32(1)).astype(f32)


def hadamard(x):
    n, h = x.shape[-1], 1
    while h < n:
        pairs = x.reshape(x.shape[:-1] + (n // (2 * h), 2, h))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], -2).reshape(x.shape)
        h *= 2
    return x


def sign_bits(spec, x):
    """x[..., d] -> bool[..., bits]."""
    out = []
    for segment, (first, channels, bits) in enumerate(spec.segments()):
        part = np.asarray(x[..., first:first + channels], f32)
        n = 1 << (channels - 1).bit_length()
        part = np.concatenate([part, np.zeros(part.shape[:-1] + (n - channels,), f32)], -1)
        for chunk in range((bits + n - 1) // n):
            y = hadamard(random_signs(spec.seed, n, chunk, 0, segment) * part)
            y = hadamard(random_signs(spec.seed, n, chunk, 1, segment) * y)
            out.append(y[..., :min(n, bits - chunk * n)] > 0)
    return np.concatenate(out, -1)


def as_words(bits):
    """bool[..., bits] -> u64[..., bits / 64]; the first bit is the lowest of the first word."""
    octets = np.packbits(bits, -1, bitorder="little")
    return np.ascontiguousarray(octets).view("<u8")


def build_hash(spec, K, V):
    with errstate(invalid="ignore", over="ignore"):
        words = as_words(sign_bits(spec, K))
    return {"words": np.moveaxis(words, 2, 1), "poison": np.zeros((len(K), spec.kv_heads), np.uint32)}


def build_stats(spec, K, V):
    mean = block_mean(K)
    square = np.zeros_like(mean)
    for t in range(spec.tokens):
        diff = K[:, t] - mean
        square = fma(diff, diff, square)
    m, s_m = quantise(mean)
    var, s_v = quantise_positive(square / f32(spec.tokens))
    if spec.v_head_dim:
        v, s_V = quantise(block_mean(V))
    else:
        v, s_V = np.zeros(m.shape[:2] + (0,), np.int8), np.zeros_like(s_m)
    return {"m": m, "var": var, "v": v, "s_m": s_m, "s_v": s_v, "s_V": s_V}


def distance(a, b):
    diff = (a - b).astype(f32)
    return dot(diff, diff)


def farthest_first(spec, K):
    """Indexes [n, G, r] of the tokens that stand for a block, in the order of choice."""
    x = np.moveaxis(K, 2, 1)
    far = distance(x, block_mean(K)[:, :, None])
    chosen = []
    for _ in range(spec.stand_ins):
        for index in chosen:
            far = np.where(np.arange(spec.tokens) == index[..., None], f32(-1), far)  # none is chosen twice
        best = far.argmax(-1)
        picked = np.take_along_axis(x, best[..., None, None], 2)
        far = distance(x, picked) if not chosen else np.minimum(far, distance(x, picked))
        chosen.append(best)
    return np.stack(chosen, -1)


def others_mean(x, index):
    """x[n, G, B, d] -> [n, G, 1, d]: the mean, in order, of the tokens that index[n, G, r] does not name."""
    left = (index[..., None] != np.arange(x.shape[2])).all(2)  # [n, G, B]
    total, seen = np.zeros(x.shape[:2] + x.shape[3:], f32), np.zeros(x.shape[:2] + (1,), bool)
    for t in range(x.shape[2]):
        here = left[:, :, t, None]
        total = np.where(here, np.where(seen, total + x[:, :, t], x[:, :, t]), total)
        seen |= here
    return (total / f32(x.shape[2] - index.shape[2])).astype(f32)[:, :, None]


def halves(v):
    """Integers -8 .. 7 [..., d] -> u8[..., 16 for each 32 of them]: byte i has channel i, and above it 16 + i."""
    pad = np.zeros(v.shape[:-1] + (-v.shape[-1] % 32,), v.dtype)
    pairs = (np.concatenate([v, pad], -1).astype(np.int64) & 15).reshape(v.shape[:-1] + (-1, 2, 16))
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).astype(np.uint8).reshape(v.shape[:-1] + (-1,))


def whole(b, d):
    """The other way."""
    pairs = b.reshape(b.shape[:-1] + (-1, 1, 16))
    v = np.concatenate([pairs & 15, pairs >> 4], -2).reshape(b.shape[:-1] + (-1,))[..., :d].astype(np.int8)
    return np.where(v > 7, v - 16, v)


def build_tokens(spec, K, V):
    x = np.moveaxis(K, 2, 1)
    with errstate(invalid="ignore", over="ignore"):
        index = farthest_first(spec, K)
        vectors = np.take_along_axis(x, index[..., None], 2)
        if spec.rest:
            vectors = np.concatenate([vectors, others_mean(x, index)], 2)
    if not spec.rest:
        k, s = quantise(vectors)
        return {"k": k, "s": s}
    finite = np.isfinite(vectors).all((2, 3), keepdims=True)
    s = scale_up(np.abs(np.where(finite, vectors, 0)).max(-1), 7)
    k = halves(steps(np.where(finite, vectors, 0), s, -7, 7).astype(np.int8))
    return {"k": k, "s": np.where(finite[..., 0], s, np.uint16(BF16_NAN))}


BUILDERS = {"mean": build_mean, "submean": build_submean, "box": build_box, "hash": build_hash, "stats": build_stats,
            "tokens": build_tokens}
SCALES = {"s", "s_m", "s_v", "s_V"}


def build(spec, K, V=None):
    """Summaries of n blocks: {field: array[n, ...]}."""
    K = np.asarray(K, f32)
    V = None if V is None else np.asarray(V, f32)
    bad = ~np.isfinite(K).all((1, 3))
    if spec.method == "stats" and spec.v_head_dim:
        bad |= ~np.isfinite(V).all((1, 3))
    clean = np.where(bad[:, None, :, None], f32(0), K)
    clean_V = None if V is None else np.where(bad[:, None, :, None], f32(0), V)
    summary = BUILDERS[spec.method](spec, clean, clean_V)
    for name in SCALES & set(summary):  # values that overflowed
        bad |= ~np.isfinite(bf16_to_f32(summary[name]).reshape(bad.shape + (-1,))).all(-1)
    for name, array in summary.items():
        if name in SCALES:
            array[bad] = BF16_NAN
        elif name == "poison":
            array[bad] = 1
        else:
            array[bad] = 0
    if spec.method == "stats" and not spec.v_head_dim:
        summary["s_V"][:] = np.where(bad, BF16_NAN, 0)
    return summary


# ---- scores ----

def per_group(q, kv_heads):
    """q[rows, Hq, d] -> [rows, G, group, 1, d], to broadcast with [G, 1, n, d]."""
    rows, heads, d = q.shape
    return q.reshape(rows, kv_heads, heads // kv_heads, 1, d)


def rounded(q, top):
    """q[..., c] to a grid of its last axis. The grid is so coarse that no sum of products with
    integers up to 2^top has more than 24 bits. NaN where a value is NaN or not below 2^100."""
    q = np.asarray(q, f32)
    largest = np.abs(q).max(-1, keepdims=True)
    bad = ~(largest < 2.0 ** 100)
    exponent = np.frexp(np.where(bad, f32(0), largest))[1] - 1  # largest is in [1, 2) * 2^exponent
    e = np.maximum(np.where((largest == 0) | bad, -1000, exponent) - 13, -100).astype(np.int64)
    units = np.rint(np.abs(np.where(bad, f32(0), q)).astype(f64) * 2.0 ** -e).sum(-1, keepdims=True)
    k = np.zeros_like(e)
    while True:
        over = units + q.shape[-1] * 2.0 ** k > 2.0 ** (24 - top + k)
        if not over.any():
            break
        k = k + over
    step = 2.0 ** (e + k)
    return np.where(bad, f32(np.nan), (np.rint(np.where(bad, f32(0), q) / step) * step).astype(f32))


def scaled_dot(q, r, s, metric):
    """q[rows, G, group, 1, c], r[n, G, c] integers, s[n, G] -> [rows, G, group, n]."""
    r = np.moveaxis(r.astype(f32), 1, 0)[None, :, None]
    s = np.moveaxis(bf16_to_f32(s), 1, 0)[None, :, None]
    if metric == "rounded":
        q = rounded(q, 7)
    if metric != "l2":
        return s * dot(q, r)
    diff = q - (s[..., None] * r)
    return -dot(diff, diff)


def log_sum(x):
    """The logarithm of the sum of e^x over the last axis, in float64; NaN adds nothing."""
    x = np.where(np.isnan(x), -np.inf, np.asarray(x, f64))
    top = x.max(-1)
    safe = np.where(np.isfinite(top), top, 0)
    with errstate(divide="ignore"):
        return np.where(np.isfinite(top), safe + np.log(np.exp(x - safe[..., None]).sum(-1)), top).astype(f32)


def score(spec, summary, q, metric="dot", beta=None):
    """Raw scores [rows, Hq, n]; a poisoned head's are +inf."""
    q = np.asarray(q, f32)
    rows, heads, d = q.shape
    G, n = spec.kv_heads, len(summary[spec.fields()[0][0]])
    grouped = per_group(q, G)
    with errstate(invalid="ignore", over="ignore"):
        if spec.method == "mean":
            out = scaled_dot(grouped, summary["r"], summary["s"], metric)
        elif spec.method == "submean":
            kept = grouped[..., spec.channels()]
            out = np.max([scaled_dot(kept, summary["r"][:, :, i], summary["s"][:, :, i], metric)
                          for i in range(summary["r"].shape[2])], 0)
        elif spec.method == "tokens" and spec.rest:
            b = f32(1) / np.sqrt(f32(d)) if beta is None else f32(beta)
            k, s = whole(summary["k"], d), bf16_to_f32(summary["s"])
            grouped = rounded(grouped, 3) if metric == "rounded" else grouped
            each = []
            for i in range(spec.stand_ins + 1):
                scale = np.moveaxis(s[:, :, i], 1, 0)[None, :, None]
                rows_i = np.moveaxis(k[:, :, i].astype(f32), 1, 0)[None, :, None]
                each.append((b * scale).astype(f32) * dot(grouped, rows_i))
            each[-1] = each[-1] + f32(math.log(spec.tokens - spec.stand_ins))
            out = log_sum(np.stack(each, -1))
        elif spec.method == "tokens":
            out = np.max([scaled_dot(grouped, summary["k"][:, :, i], summary["s"][:, :, i], metric)
                          for i in range(spec.stand_ins)], 0)
        elif spec.method == "box":
            lo, hi = (np.moveaxis(summary[name].astype(f32), 1, 0)[None, :, None] for name in ("lo", "hi"))
            s = np.moveaxis(bf16_to_f32(summary["s"]), 1, 0)[None, :, None]
            q1 = dot(np.abs(grouped), np.ones(d, f32))
            wide = fma(f32(2.0 ** -11), q1, dot(grouped, np.where(grouped >= 0, hi, lo)))
            out = fma(s, wide, f32(2.0 ** -149))
            out = np.where(np.isfinite(out), out, f32(np.inf))
        elif spec.method == "stats":
            b = f32(1) / np.sqrt(f32(d)) if beta is None else f32(beta)
            m, var = (np.moveaxis(summary[name].astype(f32), 1, 0)[None, :, None] for name in ("m", "var"))
            s_m, s_v = (np.moveaxis(bf16_to_f32(summary[name]), 1, 0)[None, :, None] for name in ("s_m", "s_v"))
            first = b * s_m * dot(grouped, m)
            second = b * b / f32(2) * s_v * dot(grouped * grouped, var)
            out = first + second + f32(math.log(spec.tokens))
        else:
            mine = as_words(sign_bits(spec, q)).reshape(rows, G, heads // G, 1, 1, -1)
            theirs = np.moveaxis(summary["words"], 1, 0)[None, :, None]
            differ = np.unpackbits(np.ascontiguousarray(mine ^ theirs).view(np.uint8), axis=-1).sum(-1, dtype=np.int64)
            out = (spec.bits - 2 * differ).max(-1).astype(f32)
    poisoned = summary["poison"] != 0 if spec.method == "hash" else \
        np.isnan(bf16_to_f32(summary["s_m" if spec.method == "stats" else "s"]).reshape(n, G, -1)).any(-1)
    out = np.where(np.moveaxis(poisoned, 1, 0)[None, :, None], f32(np.inf), out)
    return out.reshape(rows, heads, n).astype(f32)


def weights(scores, beta):
    """round(2^24 exp(beta (s - max))) as u64[..., n]. The maximum is over blocks that are not
    poisoned; poisoned ones have weight 0. Within one unit of the C, whose exp() is a polynomial."""
    s = np.where(np.isnan(scores), -np.inf, np.asarray(scores, f64))
    judged = s < np.inf
    top = np.max(np.where(judged, s, -np.inf), -1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    with errstate(invalid="ignore"):
        return np.rint(np.where(judged, np.exp(np.minimum(float(beta) * (s - top), 0)), 0) * 2.0 ** 24).astype(u64)


def reduce_group(raw, kv_heads, how="max", beta=None):
    """raw[rows, Hq, n] -> [G, n]: over rows and the heads of a group. how: max, mean, softmax."""
    rows, heads, n = raw.shape
    group = heads // kv_heads
    s = np.where(np.isnan(raw), f32(-np.inf), raw).reshape(rows, kv_heads, group, n)
    poisoned = (s == np.inf).any((0, 2))
    with errstate(invalid="ignore"):
        if how == "max":
            out = s.max((0, 2))
        else:
            if how == "softmax":
                w = weights(s, beta)
                total = w.sum(-1, dtype=u64, keepdims=True)
                s = w.astype(f32) / np.maximum(total, u64(1)).astype(f32)
            in_order = np.moveaxis(s, 2, 1).reshape(rows * group, kv_heads, n)
            out = ordered_sum(in_order, 0)
            if how == "mean":
                out = out / f32(rows * group)
    return np.where(poisoned, f32(np.inf), out).astype(f32)


def reduce_heads(scores, how="per_head"):
    """[G, n] -> lists [G or 1, n]."""
    if how == "per_head":
        return scores
    with errstate(invalid="ignore"):
        one = scores.max(0) if how == "max" else ordered_sum(np.where(np.isnan(scores), f32(-np.inf), scores), 0)
    return np.where((scores == np.inf).any(0), f32(np.inf), one)[None].astype(f32)


def history_scores(uses):
    """GSA's seed: half a point a use and .1 to 1 by the position."""
    uses = np.asarray(uses)
    n = len(uses)
    ramp = f32(0.1) + f32(0.9) * (np.arange(n, dtype=f32) / f32(max(n - 1, 1)))
    return f32(0.5) * uses.astype(f32) + ramp


# ---- choices ----

def ranking(scores):
    """Block numbers, the best first: NaN is -inf, -0 is +0, ties go to the lower block."""
    s = np.where(np.isnan(scores), -np.inf, np.asarray(scores, f64)) + 0.0
    return np.lexsort((np.arange(len(s)), -s))


def windows(n, init, local):
    return set(range(min(init, n))) | set(range(max(0, n - local), n))


def count_topk(n, sparse_ratio=0.3, min_blocks=4, topk_tokens=0, block_tokens=16):
    if topk_tokens:
        return min(n, max(min_blocks, -(-topk_tokens // block_tokens)))
    return min(n, max(min_blocks, math.floor(n * sparse_ratio)))


def finish(chosen, room):
    """Ascending. If windows and poisoned blocks alone exceed the limit, the lowest indexes."""
    chosen = sorted(chosen)
    return np.array(chosen if room is None else chosen[:room], np.int64)


def choose_topk(scores, k, sink_blocks=1, recent_blocks=2, room=None):
    """Indexes ascending. Poisoned blocks (+inf) are in, whatever k."""
    n = len(scores)
    chosen = windows(n, sink_blocks, recent_blocks)
    for block in ranking(scores):
        if len(chosen) >= k and scores[block] != np.inf:
            break
        chosen.add(int(block))
    return finish(chosen, room)


def choose_mass(scores, eps, beta, sink_blocks=1, recent_blocks=2, limit=None):
    """The smallest set whose weights reach eps of all: windows, then in order of score."""
    n = len(scores)
    w = [int(x) for x in weights(scores, beta)]
    total = sum(w)
    most = n if limit is None else limit
    chosen = windows(n, sink_blocks, recent_blocks)
    have = sum(w[i] for i in chosen)
    for block in ranking(scores):
        poisoned = scores[block] == np.inf
        if not poisoned and (have >= eps * total or len(chosen) >= most):
            break
        if block not in chosen:
            chosen.add(int(block))
            have += w[block]
    return finish(chosen, limit)
