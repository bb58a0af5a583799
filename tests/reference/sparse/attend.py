"""Attention over slots, merges and rounds of kernels/attend in numpy, written from the definitions in its headers and not from
our C, so that the two can be compared bit by bit. exp() and log() are those of kernels/sparse/arith.h, operation by operation."""

import numpy as np
from methods import dot, f32, fma, lanes_sum

TILE = 16


def exp(x):
    """ucm_exp: of x <= 0; 0 below -87 and for NaN."""
    x = np.asarray(x, f32)
    inside = x >= f32(-87)
    x = np.where(inside, x, f32(0))
    n = np.rint(x * f32(float.fromhex("0x1.715476p+0")))
    r = fma(n, f32(float.fromhex("-0x1.62e4p-1")), x)
    r = fma(n, f32(float.fromhex("-0x1.7f7d1cp-20")), r)
    p = fma(r, f32(float.fromhex("0x1.a01a02p-13")), f32(float.fromhex("0x1.6c16c2p-10")))
    for c in ("0x1.111112p-7", "0x1.555556p-5", "0x1.555556p-3", "0x1p-1", "0x1p0", "0x1p0"):
        p = fma(p, r, f32(float.fromhex(c)))
    return np.where(inside, np.ldexp(p, n.astype(np.int32)).astype(f32), f32(0))


def log(x):
    """ucm_log: of normal x > 0."""
    m, e = np.frexp(np.asarray(x, f32))
    low = m < f32(float.fromhex("0x1.6a09e6p-1"))
    m, e = np.where(low, m * f32(2), m).astype(f32), (e - low).astype(f32)
    z = (m - f32(1)) / (m + f32(1))
    s = z * z
    p = fma(s, f32(float.fromhex("0x1.c71c72p-4")), f32(float.fromhex("0x1.24924ap-3")))
    for c in ("0x1.99999ap-3", "0x1.555556p-2"):
        p = fma(s, p, f32(float.fromhex(c)))
    return fma(e, f32(float.fromhex("0x1.62e43p-1")), f32(2) * fma(z * s, p, z))


class Result:
    """Of one KV head: top, sum [group], out [group][v]."""

    def __init__(self, group, v):
        self.top, self.sum = np.full(group, -np.inf, f32), np.zeros(group, f32)
        self.out = np.zeros((group, v), f32)

    def join(self, top, total, out):
        bad = np.isnan(total) | np.isnan(self.sum)
        most = np.where(top > self.top, top, self.top)
        keep, more = exp(self.top - most), exp(top - most)
        keep, more = np.where(bad, f32(np.nan), keep), np.where(bad, f32(np.nan), more)
        self.sum = np.where(bad, f32(np.nan), fma(total, more, self.sum * keep))
        self.top = np.where(bad, f32(np.nan), most)
        self.out = fma(out, more[:, None], self.out * keep[:, None])

    def lse(self):
        with np.errstate(all="ignore"):
            return np.where(self.sum == 0, f32(-np.inf), self.top + log(np.where(self.sum > 0, self.sum, f32(1)))) + self.sum * 0

    def output(self, v_scale=1):
        with np.errstate(all="ignore"):
            return np.where(self.sum[:, None] == 0, f32(0), self.out / self.sum[:, None] * f32(v_scale))


def add_tile(result, q, k, v, scale):
    """q: [group][d]; k: [n][d]; v: [n][v], n at most TILE."""
    logit = dot(q[:, None], k[None]) * f32(scale)
    bad = ~(logit < np.inf)
    top = np.fmax.reduce(logit, -1, initial=-np.inf).astype(f32)
    weight = exp(logit - top[:, None])
    padded = np.zeros((len(q), 32), f32)
    padded[:, : len(k)] = weight
    total = np.where(bad.any(-1), f32(np.nan), lanes_sum(padded))
    out = np.zeros((len(q), v.shape[1]), f32)
    for t in range(len(k)):
        out = fma(weight[:, t, None], v[t], out)
    result.join(top, total, out)
    return top, total


def add_block(result, q, k, v, scale):
    """k, v: [tokens][channels]. Returns the logarithms of the block's weights."""
    own = Result(len(q), 0)
    with np.errstate(all="ignore"):
        for t in range(0, len(k), TILE):
            top, total = add_tile(result, q, k[t : t + TILE], v[t : t + TILE], scale)
            own.join(top, total, np.zeros((len(q), 0), f32))
    return own.lse()


def attend(q, blocks, scale, v_scale=1):
    """blocks: [(k, v)], in the order of attention. out and lse."""
    result = Result(len(q), blocks[0][1].shape[1] if blocks else 0)
    for k, v in blocks:
        add_block(result, q, k, v, scale)
    return result.output(v_scale), result.lse()


def merge(parts):
    """parts: [(out [rows][channels], lse [rows])]"""
    lse = np.array([l for _, l in parts], f32)
    bad = ~(lse < np.inf)
    top = np.fmax.reduce(lse, 0, initial=-np.inf).astype(f32)
    with np.errstate(all="ignore"):
        weight = np.where(lse == -np.inf, f32(0), exp(lse - top))
        total, out = np.zeros_like(top), np.zeros_like(parts[0][0])
        for w, l, (o, _) in zip(weight, lse, parts):
            total = total + w
            out = np.where(l[:, None] == -np.inf, out, fma(w[:, None], o, out))
        out = np.where(total[:, None] == 0, f32(0), out / total[:, None])
        all_lse = np.where(total == 0, f32(-np.inf), top + log(np.where(total > 0, total, f32(1))))
    nan = bad.any(0)
    return np.where(nan[:, None], f32(np.nan), out), np.where(nan, f32(np.nan), all_lse)


def rounds(q, blocks, scale, rule, every, eps, left):
    """How many blocks PSA's rule, an estimate or a certificate attends, in float64. left: [group][n], logarithms of weights,
    or None for PSA's rule. Also each round's share."""
    result = Result(len(q), blocks[0][1].shape[1])
    weights, shares = [], []
    for i, (k, v) in enumerate(blocks):
        weights.append(add_block(result, q, k, v, scale).astype(np.float64))
        if (i + 1) % every and i + 1 < len(blocks):
            continue
        covered = result.lse().astype(np.float64)
        n = len(blocks) - i - 1
        with np.errstate(all="ignore"):
            rest = n * np.exp(np.min(weights, 0) - covered) if rule == "psa" else \
                np.exp(left[:, i + 1 :].astype(np.float64) - covered[:, None]).sum(-1)
        shares.append(float(np.min(1 / (1 + rest))) if n else 1.0)
        if rule != "never" and shares[-1] >= eps:
            break
    return i + 1, shares
