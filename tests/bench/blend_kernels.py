"""Attention of tokens that lie anywhere in a prompt, over KV in pages, as Triton's kernels; and how much of it each key draws. For blend_ttft.py.

Run as a program, compares both with torch: on a GPU, or on the CPU with TRITON_INTERPRET=1."""

import torch
import triton
import triton.language as tl

ROWS, KEYS = 32, 64  # tokens of a tile, and keys that it reads at a time


@triton.jit
def _tile(q, positions, count, kv_head, heads: tl.constexpr, group: tl.constexpr, head: tl.constexpr, rows: tl.constexpr):
    """Queries of a tile's rows and of one KV head: (queries, their places in `q`, positions, which are there)."""
    m = tl.arange(0, rows * group)
    row = tl.program_id(0) * rows + m // group
    there = row < count
    position = tl.load(positions + row, mask=there, other=0)
    place = row * heads + kv_head * group + m % group
    of = tl.load(q + place[:, None] * head + tl.arange(0, head)[None], mask=there[:, None], other=0.0)
    return of, place, position, there


@triton.jit
def _keys(pages, table, key, there, page_stride, kv_head, kv_heads: tl.constexpr, head: tl.constexpr, block: tl.constexpr):
    """Where K of these keys lies, for one KV head."""
    page = tl.load(table + key // block, mask=there, other=0).to(tl.int64)
    return pages + (page * page_stride + (key % block) * (kv_heads * head) + kv_head * head)[:, None] + tl.arange(0, head)[None]


@triton.jit
def _attend(q, pages, table, positions, out, most, total, count, page_stride, v_offset, scale, kv_heads: tl.constexpr, group: tl.constexpr,
            head: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, parts: tl.constexpr):
    """One part of a tile's keys: sums of values, and of each query the largest score and the sum of exponentials."""
    kv_head, part = tl.program_id(1), tl.program_id(2)
    of, place, position, there = _tile(q, positions, count, kv_head, kv_heads * group, group, head, rows)
    last = tl.max(position) + 1
    length = tl.cdiv(tl.cdiv(last, parts), keys) * keys
    m = tl.full((rows * group,), -1e30, tl.float32)
    s = tl.zeros((rows * group,), tl.float32)
    acc = tl.zeros((rows * group, head), tl.float32)
    for start in range(part * length, tl.minimum(part * length + length, last), keys):
        key = start + tl.arange(0, keys)
        at = _keys(pages, table, key, key < last, page_stride, kv_head, kv_heads, head, block)
        k = tl.load(at, mask=(key < last)[:, None], other=0.0)
        score = tl.where(key[None] <= position[:, None], tl.dot(of, tl.trans(k)) * scale, -1e30)
        larger = tl.maximum(m, tl.max(score, 1))
        p = tl.where(score > -1e29, tl.exp(score - larger[:, None]), 0.0)
        shrink = tl.exp(m - larger)
        v = tl.load(at + v_offset, mask=(key < last)[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        s = s * shrink + tl.sum(p, 1)
        m = larger
    place += part * count * kv_heads * group
    tl.store(out + place[:, None] * head + tl.arange(0, head)[None], acc, mask=there[:, None])
    tl.store(most + place, m, mask=there)
    tl.store(total + place, s, mask=there)


@triton.jit
def _drawn(q, pages, table, positions, log_sum, out, count, n, page_stride, scale, kv_heads: tl.constexpr, group: tl.constexpr,
           head: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr):
    """Of some keys and a tile's queries: the weights that these give to each key, summed."""
    kv_head = tl.program_id(1)
    of, place, position, there = _tile(q, positions, count, kv_head, kv_heads * group, group, head, rows)
    key = tl.program_id(2) * keys + tl.arange(0, keys)
    at = _keys(pages, table, key, key < n, page_stride, kv_head, kv_heads, head, block)
    k = tl.load(at, mask=(key < n)[:, None], other=0.0)
    sees = (key[None] <= position[:, None]) & there[:, None]
    weight = tl.exp(tl.dot(of, tl.trans(k)) * scale - tl.load(log_sum + place, mask=there, other=0.0)[:, None])
    tl.atomic_add(out + key, tl.sum(tl.where(sees, weight, 0.0), 0), mask=key < n)


def attend(q, pages, layer, table, positions, parts):
    """q: [tokens][heads][head], of these positions, which rise. pages: [block][layer][2][token][KV head][head]. parts: of the keys, that
    different programs read. -> (what each query attends to, its log-sum-exp)"""
    count, heads, head = q.shape
    block, kv_heads = pages.shape[3:5]
    out = torch.empty(parts, count, heads, head, dtype=torch.float32, device=q.device)
    most, total = (torch.empty(parts, count, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    of = pages[:, layer, 0]
    _attend[(triton.cdiv(count, ROWS), kv_heads, parts)](
        q.contiguous(), of, table, positions, out, most, total, count, of.stride(0), pages.stride(2), head ** -0.5, kv_heads, heads // kv_heads, head,
        block, ROWS, KEYS, parts, num_warps=8, num_stages=2)
    largest = most.amax(0)
    weight = (most - largest).exp()
    total = (weight * total).sum(0)
    return ((weight[..., None] * out).sum(0) / total[..., None]).to(q.dtype), largest + total.log()


def drawn(q, pages, layer, table, positions, log_sum, n, out):
    """Adds to out[i] the weights that these queries give to key i of the first n, over all heads."""
    count, heads, head = q.shape
    block, kv_heads = pages.shape[3:5]
    of = pages[:, layer, 0]
    _drawn[(triton.cdiv(count, ROWS), kv_heads, triton.cdiv(n, KEYS))](
        q.contiguous(), of, table, positions, log_sum.contiguous(), out, count, n, of.stride(0), head ** -0.5, kv_heads, heads // kv_heads, head, block,
        ROWS, KEYS, num_warps=8)


def check(device, dtype, tokens=200, blocks=20, block=16, kv_heads=2, group=4, head=64, layers=3):
    torch.manual_seed(1)
    pages = torch.randn(blocks, layers, 2, block, kv_heads, head, device=device).to(dtype)
    table = torch.randperm(blocks, device=device)
    positions = torch.randperm(tokens, device=device)[:70].sort().values
    q = torch.randn(len(positions), kv_heads * group, head, device=device).to(dtype)
    k, v = (pages[table, 1, i].flatten(0, 1)[:tokens].repeat_interleave(group, 1).float() for i in range(2))
    score = torch.einsum("qhd,khd->hqk", q.float(), k) * head ** -0.5
    score = score.masked_fill(torch.arange(tokens, device=device) > positions[:, None], float("-inf"))
    want = torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
    for parts in (1, 3):
        found, log_sum = attend(q, pages, 1, table, positions, parts)
        sums = torch.zeros(tokens, device=device)
        drawn(q[-9:], pages, 1, table, positions[-9:], log_sum[-9:], tokens, sums)
        off = (float((found.float() - want).abs().max()), float((log_sum.T - score.logsumexp(-1)).abs().max()),
               float((sums - score.softmax(-1)[:, -9:].sum((0, 1))).abs().max()))
        print(f"{parts} parts: attention off by {off[0]:.1e}, log-sum-exp by {off[1]:.1e}, weights by {off[2]:.1e}")
        assert max(off) < 2e-2


if __name__ == "__main__":
    if torch.cuda.is_available():
        check("cuda", torch.bfloat16, tokens=5000, blocks=400, kv_heads=8, head=128)
    else:
        check("cpu", torch.float32)
