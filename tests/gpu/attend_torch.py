#!/usr/bin/env python3
"""What PyTorch's attention takes for the shapes of `test_attend --speed`: KV that lies in one piece, in the order of its tokens,
which is the best case. Each of torch's kernels, and the query heads of a KV head as rows of one query where that is
faster. Then latents (MLA): the query heads as rows of one query over the latent, whose first 512 channels are V; by those kernels,
and by two products with a softmax in float32 between them. `heads` or `latents` as an argument: only those."""

import sys
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

HEADS, GROUP, D = 8, 4, 128
flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def median_us(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        call()
    for i in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.fill_(i)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[7]


def forms(q, k, v):
    yield "gqa", lambda: attend(q, k, v, enable_gqa=True)
    rows = q.view(len(q), HEADS, GROUP, D)
    yield "rows", lambda: attend(rows, k, v)


def times(what, nbytes, forms):
    """A line of the table for each form; a kernel that refuses says why."""
    for name, call in forms:
        try:
            us = median_us(call)
        except RuntimeError as error:
            print(f"| {what} | {name} | {str(error).splitlines()[0][:60]} | |")
            continue
        print(f"| {what} | {name} | {us:.1f} | {nbytes / us / 1e3:.0f} |")


def by_kernels(forms):
    def only(backend, call):
        with sdpa_kernel(backend):
            return call()

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    return [(f"{backend.name} {name}", partial(only, backend, call)) for backend in backends for name, call in forms]


def products(q, kv):
    p = torch.softmax(torch.matmul(q, kv.transpose(1, 2)).float() * SCALE, -1)
    return torch.matmul(p.to(q.dtype), kv[:, :, :VALUES])


def heads():
    print("| chains | tokens | kernel | us | GB/s |\n|---|---|---|---|---|")
    for chains, tokens in ((1, 288 * 16), (1, 160 * 16), (8, 288 * 16), (50, 288 * 16), (1, 8224 * 16)):
        q = torch.randn(chains, HEADS * GROUP, 1, D, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(chains, HEADS, tokens, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        times(f"{chains} | {tokens}", 2 * k.nbytes, by_kernels(list(forms(q, k, v))))


def latents():
    print("| chains | query heads | tokens | kernel | us | GB/s |\n|---|---|---|---|---|---|")
    for chains, rows, tokens in ((1, 16, 4608), (1, 128, 4608), (8, 16, 4608), (8, 128, 4608), (50, 16, 4608), (50, 128, 4608),
                                 (1, 16, 131584), (1, 128, 131584)):
        q = torch.randn(chains, rows, LATENT, dtype=torch.bfloat16, device="cuda")
        kv = torch.randn(chains, tokens, LATENT, dtype=torch.bfloat16, device="cuda")
        one = [("rows", lambda: attend(q[:, None], kv[:, None], kv[:, None, :, :VALUES], scale=SCALE))]
        what = f"{chains} | {rows} | {tokens}"
        times(what, kv.nbytes, [*by_kernels(one), ("two products", lambda: products(q, kv))])


LATENT, VALUES, SCALE = 576, 512, 1 / 16
print("torch", torch.__version__, torch.cuda.get_device_name())
if sys.argv[1:] != ["latents"]:
    heads()
if sys.argv[1:] != ["heads"]:
    latents()
