#!/usr/bin/env python3
"""Decode steps of a sequence whose KV is not on the GPU: entries, the daemon's mapping, and a CUDA graph.

The daemon stores the KV of one sequence, and the worker gives its pages back, except those of the last blocks. A step then chooses by
summaries, reads misses out of the daemon's memory, and attends to them. If the mapping lacks a block, the worker gathers it and runs
the step again. There is no model here: queries are made up, and one of them is about a block in the middle.

    python3 decode_on_gpu.py [--socket PATH]
"""

from __future__ import annotations

import argparse
from typing import Any, Optional

import torch

from ucmclient import Client, Identity, Plane, UcmError, cuda_allocation, keys, sparse
from ucmclient.decode.cuda import Pages, Steps
from ucmclient.decode.gpu import GpuDecoder
from ucmclient.sparse.cuda import Builder, Chosen, Selector

LAYERS, BLOCKS, TOKENS, HEADS, GROUP, DIM = 4, 256, 16, 2, 4, 64
WINDOW = 8  # last blocks, whose pages stay
CANDIDATES = BLOCKS - WINDOW
NEEDLE = 177  # the block that the query is about
SHAPE = sparse.Shape("bf16", TOKENS, HEADS, DIM, v_head_dim=DIM)
LAYER = 2 * TOKENS * HEADS * DIM * 2  # bytes of a layer of a block


class Link:
    """The connection. An engine would continue without the daemon and reconnect later. This one only reports the failure."""

    def __init__(self, client: Client, summary: sparse.Summary):
        self.client = client
        self.ns = client.namespace(Identity("example/decode", "bf16", "example/1", TOKENS, LAYER, layers=(LAYERS,)))
        self.summaries = sparse.SummaryNamespace(self.ns, summary)

    def ask(self, call: Any, *arguments: Any, **named: Any) -> Optional[Any]:
        try:
            return call(*arguments, **named)
        except UcmError as error:
            print(f"{error}")
            return None

    @property
    def away(self) -> bool:
        return self.client.closed

    def cut(self) -> None:
        self.client.close()


def store(link: Link, kv: torch.Tensor, names: list[bytes]) -> None:
    """kv: [LAYERS][BLOCKS][K, V][TOKENS][HEADS][DIM]."""
    memory, base, gpu = cuda_allocation(kv.data_ptr())
    begin = kv.data_ptr() - base
    planes = [Plane(0, begin + layer * BLOCKS * LAYER, LAYER, LAYER, layer) for layer in range(LAYERS)]
    torch.cuda.current_stream().synchronize()
    with link.ns.register([memory], planes, blocks=BLOCKS, gpu=gpu) as region:
        region.dump(names, range(BLOCKS)).wait()


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def decode(client: Client, steps_wanted: int = 3, out=print) -> torch.Tensor:
    summary = sparse.tokens(SHAPE, chosen=4, rest=True)
    link, packed = Link(client, summary), keys.sha256_chain(range(BLOCKS * TOKENS), TOKENS)
    names = [packed[32 * i : 32 * i + 32] for i in range(BLOCKS)]
    kv = torch.randn(LAYERS, BLOCKS, 2, TOKENS, HEADS, DIM, device="cuda").bfloat16()
    q = torch.randn(LAYERS, 1, GROUP * HEADS, DIM, device="cuda").bfloat16()
    kv[:, NEEDLE, 0] += 4 * q[:, 0, ::GROUP].unsqueeze(1)  # its keys answer the first query head of each KV head
    kv[:, NEEDLE, 1] = 7
    store(link, kv, names)

    # The worker's memory: entries for a few steps' worth of blocks, and tables.
    pool = torch.empty(Steps.bytes_of(SHAPE, LAYER, entries=1024), dtype=torch.uint8, device="cuda")
    some = sparse.TopK(topk_tokens=16 * TOKENS, sink_blocks=0, recent_blocks=0)
    select = Selector(summary, pool, GROUP * HEADS, CANDIDATES, choose=some)
    steps = Steps(pool, SHAPE, layers=LAYERS, q_heads=GROUP * HEADS, layer_bytes=LAYER, numbers=BLOCKS, requests=1, sequences=1,
                  room=select.room, window=WINDOW)
    builder = Builder(summary, pool)

    def build(pages: Any, rows: Any) -> None:
        builder(kv, decoder.summaries, numbers(*pages), numbers(*rows))

    decoder = GpuDecoder(link, summary, steps, layer_bytes=LAYER, build=build)
    sequence = decoder.open("request", floor=512)
    decoder.extend(sequence, names[:CANDIDATES], lambda block: block)
    decoder.keep(sequence, names)
    table = numbers(*[-1] * BLOCKS)[None].contiguous()
    decoder.write(table[0], sequence)

    # Pages of the last blocks stay, all others are given back.
    torch.cuda.synchronize()
    pages = kv[:, CANDIDATES:].clone()
    kv.zero_()
    where = numbers(*[-1] * CANDIDATES, *range(WINDOW))[None].contiguous()
    length, requests, candidates = numbers(BLOCKS * TOKENS - 3), numbers(sequence.number), numbers(CANDIDATES)
    lists = [Chosen(numbers(*[0] * HEADS)[None].contiguous(), torch.zeros(1, HEADS, select.room, dtype=torch.int32, device="cuda"))
             for _ in range(LAYERS)]
    result = torch.zeros_like(q)

    def step() -> None:
        steps.begin()
        for layer in range(LAYERS):
            chosen = select(decoder.summaries[layer], table[:, :CANDIDATES], candidates, q[layer], out=lists[layer])
            local = Pages(pages[layer], where, candidates, length)
            steps.layer(layer, chosen, table, requests, q[layer], local, out=result[layer])
        steps.end()

    def run(launch: Any) -> None:
        """Until a run counts."""
        decoder.update()
        launch()
        torch.cuda.synchronize()
        while not decoder.counted():
            if decoder.serve():
                raise SystemExit("the daemon does not have the blocks any more")
            launch()
            torch.cuda.synchronize()

    run(step)  # the first time without a graph, which then finds all kernels loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(steps_wanted):
        q[:, :, 1::GROUP].normal_()  # one query head of each KV head asks for something else
        run(graph.replay)
    counts = decoder.counts
    out(f"{counts.misses} misses: {counts.mapped} layer heads came through the mapping, {counts.gathered} by gathers")
    out(f"block {NEEDLE} was {'' if NEEDLE in lists[0].lists()[0][0] else 'not '}chosen; attended there: {result[0, 0, 0, 0]:.2f}")
    del graph
    decoder.end()
    steps.close(), select.close(), builder.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--socket", help="default: $UCM_SOCKET, or that of the package")
    with Client(socket=parser.parse_args().socket, name="decode on GPU") as client:
        decode(client)


if __name__ == "__main__":
    main()
