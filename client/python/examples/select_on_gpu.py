#!/usr/bin/env python3
"""A worker with a GPU builds summaries there when it stores blocks, and chooses from them there.

One sequence's KV lies in a torch tensor on the GPU, its summaries in another. Both are registered as regions. The worker
builds summaries on the stream that computed the KV, and dumps both. Later it loads the summaries back. One launch then
chooses the blocks of a layer that a query wants, and the worker loads only these.

    python3 select_on_gpu.py [--socket PATH]
"""

from __future__ import annotations

import argparse

import torch

from ucmclient import Client, Identity, Plane, cuda_allocation, keys, sparse
from ucmclient.sparse import cuda

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 2, 256, 16, 2, 64
NEEDLE = 177  # the block that the query is about
SHAPE = sparse.Shape("bf16", TOKENS, HEADS, DIM)


def register(ns, pages: torch.Tensor):
    """pages: [LAYERS][BLOCKS][a layer's bytes]."""
    memory, base, gpu = cuda_allocation(pages.data_ptr())
    layer, block = (stride * pages.element_size() for stride in pages.stride()[:2])
    begin = pages.data_ptr() - base
    planes = [Plane(0, begin + i * layer, block, block, i) for i in range(LAYERS)]
    return ns.register([memory], planes, blocks=BLOCKS, gpu=gpu)


def retrieve(client: Client, out=print) -> list[int]:
    summary = sparse.mean(SHAPE)
    kv = torch.randn(LAYERS, BLOCKS, 2, TOKENS, HEADS, DIM, device="cuda").bfloat16()
    summaries = torch.zeros(LAYERS, BLOCKS, summary.bytes, dtype=torch.uint8, device="cuda")
    numbers = torch.arange(BLOCKS, dtype=torch.int32, device="cuda")
    query = torch.randn(1, HEADS, DIM, device="cuda").bfloat16()  # [sequences][q_heads][head_dim]
    kv[1, NEEDLE, 0] += query[0]
    names = keys.sha256_chain(range(BLOCKS * TOKENS), TOKENS)
    identity = Identity("example/gpu", "bf16", "example/1", TOKENS, kv[0, 0].numel() * 2, layers=(LAYERS,))
    with client.namespace(identity) as ns, sparse.SummaryNamespace(ns, summary) as stored:
        with register(ns, kv) as region, register(stored, summaries) as summary_region:
            with cuda.Builder(summary, summaries) as build:
                build(kv, summaries, numbers)
                torch.cuda.current_stream().synchronize()
            region.dump(names, range(BLOCKS)).wait()
            summary_region.dump(names, range(BLOCKS)).wait()

            summaries.zero_(), kv.zero_()
            torch.cuda.current_stream().synchronize()
            summary_region.load(names, range(BLOCKS)).wait()
            lengths = torch.tensor([BLOCKS], dtype=torch.int32, device="cuda")
            some = sparse.TopK(sparse_ratio=0.02, sink_blocks=0, recent_blocks=0)
            with cuda.Selector(summary, summaries, HEADS, BLOCKS, choose=some) as select:
                chosen = select(summaries[1], numbers[None], lengths, query).lists()[0]
            blocks = sorted(set().union(*chosen))
            region.load([names[32 * b : 32 * b + 32] for b in blocks], blocks).wait()
    out(f"{len(blocks)} of {BLOCKS} blocks were loaded: {blocks}")
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--socket", help="default: $UCM_SOCKET, or that of the package")
    with Client(socket=parser.parse_args().socket, name="select on GPU") as client:
        retrieve(client)


if __name__ == "__main__":
    main()
