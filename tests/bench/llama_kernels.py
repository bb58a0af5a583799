"""The small operations of a decode step (llama.py) as Triton's kernels."""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def _add_norm(x, delta, out, width: tl.constexpr, adds: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, width)
    v = tl.load(x + at).to(tl.float32)
    if adds:
        v = (v + tl.load(delta + at).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
        tl.store(x + at, v.to(tl.bfloat16))
    tl.store(out + at, (v * tl.rsqrt(tl.sum(v * v) / width + 1e-6)).to(tl.bfloat16))


@triton.jit
def _rotate(rows, position, q, k, v, place, head_stride, heads: tl.constexpr, kv_heads: tl.constexpr, head: tl.constexpr,
            ln_base: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, head // 2)
    source = rows + (b * (heads + 2 * kv_heads) + h) * head
    low, high = tl.load(source + half).to(tl.float32), tl.load(source + head // 2 + half).to(tl.float32)
    if h < heads + kv_heads:
        angle = tl.load(position + b).to(tl.float32) * tl.exp(half.to(tl.float32) * (-ln_base / (head // 2)))
        cosine, sine = tl.cos(angle), tl.sin(angle)
        low, high = low * cosine - high * sine, low * sine + high * cosine
    low, high = low.to(tl.bfloat16), high.to(tl.bfloat16)
    if h < heads:
        to = q + (b * heads + h) * head
        tl.store(to + half, low)
        tl.store(to + head // 2 + half, high)
    else:
        at = tl.load(place + b)
        if h < heads + kv_heads:
            to = k + at + (h - heads) * head_stride
            tl.store(to + half, low)
            tl.store(to + head // 2 + half, high)
        else:
            to = v + at + (h - heads - kv_heads) * head_stride
            tl.store(to + half, low)
            tl.store(to + head // 2 + half, high)


@triton.jit
def _gate(rows, out, inner: tl.constexpr, piece: tl.constexpr):
    b, at = tl.program_id(0), tl.program_id(1) * piece + tl.arange(0, piece)
    gate = tl.load(rows + b * 2 * inner + at, mask=at < inner).to(tl.float32)
    value = tl.load(rows + b * 2 * inner + inner + at, mask=at < inner).to(tl.float32)
    tl.store(out + b * inner + at, (gate * tl.sigmoid(gate) * value).to(tl.bfloat16), mask=at < inner)


class TritonOps:
    def __init__(self, weights):
        self.shape = weights.shape

    def add_norm(self, x, delta):
        out = torch.empty_like(x)
        _add_norm[(len(x),)](x, x if delta is None else delta, out, x.shape[1], delta is not None, num_warps=8)
        return out

    def rotate(self, rows, position, place):
        s = self.shape
        q = torch.empty(len(rows), s.heads, s.head, dtype=rows.dtype, device=rows.device)
        _rotate[(len(rows), s.heads + 2 * s.kv_heads)](
            rows, position, q, place.k, place.v, place.at, place.head_stride, s.heads, s.kv_heads, s.head, math.log(500000.0),
            num_warps=1)
        return q

    def gate(self, rows):
        out = torch.empty(len(rows), self.shape.inner, dtype=rows.dtype, device=rows.device)
        _gate[(len(rows), triton.cdiv(self.shape.inner, 1024))](rows, out, self.shape.inner, 1024, num_warps=4)
        return out
