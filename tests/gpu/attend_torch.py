#!/usr/bin/env python3
"""What PyTorch's attention takes for the shapes of `test_attend --speed`: KV that lies in one piece, in the order of its tokens,
which is the best case. Each of torch's kernels, and the query heads of a KV head as rows of one query where that is
faster."""

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


print("torch", torch.__version__, torch.cuda.get_device_name())
print("| chains | tokens | kernel | us | GB/s |\n|---|---|---|---|---|")
for chains, tokens in ((1, 288 * 16), (1, 160 * 16), (8, 288 * 16), (50, 288 * 16), (1, 8224 * 16)):
    q = torch.randn(chains, HEADS * GROUP, 1, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(chains, HEADS, tokens, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for name, call in forms(q, k, v):
            try:
                with sdpa_kernel(backend):
                    us = median_us(call)
            except RuntimeError as error:
                print(f"| {chains} | {tokens} | {backend.name} {name} | {str(error).splitlines()[0][:60]} | |")
                continue
            print(f"| {chains} | {tokens} | {backend.name} {name} | {us:.1f} | {2 * k.nbytes / us / 1e3:.0f} |")
