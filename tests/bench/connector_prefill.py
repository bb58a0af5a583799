#!/usr/bin/env python3
"""What the vLLM connector's worker costs a prompt's step, and how long after it the prompt's KV is stored: after the step, or by layer
(`layer_stores`); and what loads and stores take when a part is a group of heads (`head_groups`).

A transformer of Llama-3.1-8B's shape with random weights (PyTorch, bfloat16), the connector's worker and a real daemon.

    connector_prefill.py [--tokens N,N] [--rounds N] [--layers N] [--cpu] [--json FILE]

$UCMD is the daemon, $UCMCLIENT_LIB the library, $UCMCLIENT_CUDA_LIB the companion's. --cpu: only to see whether it runs."""

import argparse
import json
import math
import os
import statistics
import tempfile
import time

from engines import Daemon, bus
from llama import Shape

BLOCK = Shape.block


class Step:
    """A step that computes a whole prompt. hook(layer) is called behind each layer's attention."""

    def __init__(self, torch, shape, device):
        from llama_torch import Weights
        self.torch, self.shape, self.weights = torch, shape, Weights(shape, device)

    def __call__(self, tokens, pages, table, hook):
        functional, s = self.torch.nn.functional, self.shape
        positions = self.torch.arange(len(tokens), device=tokens.device)
        x = self.weights.embedding[tokens]
        for layer, (qkv, out, up, down) in enumerate(self.weights.layers):
            rows = functional.rms_norm(x, (s.width,)) @ qkv.T
            q, k, v = rows.view(len(tokens), -1, s.head).split((s.heads, s.kv_heads, s.kv_heads), 1)
            q, k = self.weights.rotate(q, positions), self.weights.rotate(k, positions)
            pages[table, layer] = self.torch.cat((k, v), -1).view(-1, BLOCK, s.kv_heads, 2 * s.head)
            a = functional.scaled_dot_product_attention(
                *(of.transpose(0, 1)[None] for of in (q, k, v)), is_causal=True, enable_gqa=True)
            hook(layer)
            x = x + a[0].transpose(0, 1).reshape(len(tokens), -1) @ out.T
            gate, value = (functional.rms_norm(x, (s.width,)) @ up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * value) @ down.T
        return x


class Rig:
    def __init__(self, options, socket):
        import torch
        from ucmclient.vllm.settings import Settings
        self.torch, self.gpu, self.rounds = torch, not options.cpu, options.rounds
        self.device = "cuda" if self.gpu else "cpu"
        self.shape = Shape(layers=options.layers) if self.gpu else Shape(
            layers=options.layers, width=64, heads=8, kv_heads=8, head=8, inner=64, vocabulary=128)
        self.settings = Settings(socket=socket, lookup_timeout=10.0)
        self.blocks = max(options.tokens) // BLOCK + 1
        self.rows = {}

    def wait(self):
        if self.gpu:
            self.torch.cuda.synchronize()

    def pages(self, *shape):
        if self.gpu:
            return self.torch.zeros(shape, dtype=self.torch.bfloat16, device=self.device)
        from ucmclient import SharedMemory
        self.kept = SharedMemory(2 * math.prod(shape))
        return self.torch.frombuffer(self.kept.buffer, dtype=self.torch.bfloat16).view(shape)

    def worker(self, layout, more, parts):
        from ucmclient.vllm.identity import EngineIdentity
        from ucmclient.vllm.worker import WorkerHalf
        identity = EngineIdentity(model="prefill", dtype="bfloat16", layout=layout.name, block_tokens=BLOCK, parts=parts,
                                  shards=(len(layout.layers),), shard_bytes=layout.layer_bytes)
        return WorkerHalf(self.settings, identity, layout, name="prefill", part=0, writes=True, on_gpu=self.gpu,
                          event=self.event, more=more)

    def prompt(self, tokens):
        table = self.torch.randperm(tokens // BLOCK) + 1  # an engine's blocks lie anywhere
        return os.urandom(32 * (tokens // BLOCK)), table.tolist(), table.to(self.device)

    def event(self):
        if not self.gpu:
            return None
        event = self.torch.cuda.Event(interprocess=True)
        event.record()
        return event

    # ---- stores after the step, or by layer ----

    def steps(self, tokens):
        from ucmclient.vllm.layer_stores import LayerStores, bounds_of
        from ucmclient.vllm.layout import layout_of
        s = self.shape
        pages = self.pages(self.blocks, s.layers, BLOCK, s.kv_heads, 2 * s.head)
        step = Step(self.torch, s, self.device)
        tensors = {str(i): pages[:, i].swapaxes(1, 2) for i in range(s.layers)}
        whole, apart = (self.worker(layout_of(tensors, self.blocks, by_layer), (), 1) for by_layer in (False, True))
        apart.layers = LayerStores(apart, layout_of(tensors, self.blocks, True))
        four = [s.layers * i // 4 for i in range(1, 5)]
        for n in tokens:
            numbers = self.torch.randint(s.vocabulary, (n,), device=self.device)
            ways = {"no store": (None, None), "after the step": (whole, None), "after the step, layers apart": (apart, None),
                    "by layer, halves": (apart, bounds_of(s.layers)), "by layer, quarters": (apart, four),
                    "by layer, each": (apart, list(range(1, s.layers + 1)))}
            times = {way: [] for way in ways}
            for _ in range(self.rounds + 2):
                for way, (worker, bounds) in ways.items():
                    times[way].append(self.step(step, numbers, pages, worker, bounds))
            for way, each in times.items():
                step_ms, later_ms = (1000 * statistics.median(one[i] for one in each[2:]) for i in range(2))
                self.rows[f"{n} tokens, {way}"] = {"step_ms": step_ms, "stored_later_ms": later_ms}
                print(f"{n:6} tokens  {way:30} step {step_ms:8.2f} ms, stored {later_ms:6.2f} ms later", flush=True)
        whole.close()
        apart.close()

    def step(self, step, numbers, pages, worker, bounds):
        """Seconds of the step, and from its end until all is stored."""
        from ucmclient.vllm.plan import Copy, Plan
        keys, table, on_gpu = self.prompt(len(numbers))
        plan = Plan(stores=[Copy("a", keys, table, layered=bounds is not None)], computes=True)
        layers = worker.layers if bounds is not None else None
        self.wait()
        began = time.perf_counter()
        if worker is not None:
            worker.start_loads(plan)
        if layers is not None:
            layers._bounds = bounds
            layers.begin(plan)
        step(numbers, pages, on_gpu, (lambda layer: layers.layer(str(layer))) if layers is not None else (lambda layer: None))
        if worker is not None:
            worker.start_stores(plan)
        self.wait()
        ended = time.perf_counter()
        while worker is not None and worker._stores:
            worker.finished()
        stored = time.perf_counter()
        if worker is not None:
            counts = worker.counts.take()
            assert not counts.get("store_failed_blocks"), counts
        return ended - began, stored - ended

    # ---- parts by groups of heads ----

    def groups(self, tokens):
        from ucmclient.vllm.head_groups import HeadGroups, group_layouts
        from ucmclient.vllm.identity import Ranks
        from ucmclient.vllm.layout import Heads, layout_of
        s = self.shape
        for name, numbers in (("BLNHC", (0,)), ("BHLNC", (2, 8)), ("LBHNC", (0, 2, 8))):
            if name == "BLNHC":
                pages = self.pages(self.blocks, s.layers, BLOCK, s.kv_heads, 2 * s.head)
                tensors = {str(i): pages[:, i].swapaxes(1, 2) for i in range(s.layers)}
            elif name == "BHLNC":
                pages = self.pages(self.blocks, s.kv_heads, s.layers, BLOCK, 2 * s.head)
                tensors = {str(i): pages[:, :, i] for i in range(s.layers)}
            else:
                pages = self.pages(s.layers, self.blocks, s.kv_heads, BLOCK, 2 * s.head)
                tensors = {str(i): pages[i] for i in range(s.layers)}
            pages.copy_(self.torch.randn(pages.shape[1:], device=self.device))
            for n in numbers:
                if n:
                    of = HeadGroups(Ranks(0, n, True), n, s.kv_heads // n, Heads(BLOCK, s.kv_heads, s.head))
                    layout, *more = group_layouts(tensors, self.blocks, of, False)
                else:
                    layout, more = layout_of(tensors, self.blocks), []
                worker = self.worker(layout, more, n or 1)
                piece = max(chunk.size for layer in layout.layers for chunk in layer)
                times = [self.there_and_back(worker, pages, max(tokens)) for _ in range(self.rounds + 1)][1:]
                dump, load = (max(tokens) // BLOCK * s.layers * s.layer_bytes / statistics.median(one[i] for one in times) for i in range(2))
                self.rows[f"{name}, {n} groups"] = {"piece": piece, "store": dump, "load": load}
                print(f"{name}  groups {n}, pieces of {piece >> 10:5} KiB  store {dump / 1e9:6.2f} GB/s, load {load / 1e9:6.2f} GB/s; "
                      f"{worker.companion.why}", flush=True)
                worker.close()

    def there_and_back(self, worker, pages, tokens):
        from ucmclient.vllm.plan import Copy, Plan
        keys, table, _ = self.prompt(tokens)
        before = pages.clone()
        self.wait()
        began = time.perf_counter()
        worker.start_stores(Plan(stores=[Copy("a", keys, table)]))
        while worker._stores:
            worker.finished()
        stored = time.perf_counter() - began
        assert not worker.counts.take().get("store_failed_blocks")
        axis = pages.shape.index(self.blocks)
        pages.index_fill_(axis, self.torch.tensor(table, device=self.device), 0)
        self.wait()
        began = time.perf_counter()
        worker.start_loads(Plan(loads=[Copy("a", keys, table)]))
        while not worker.finished()[1]:
            pass
        loaded = time.perf_counter() - began
        assert not worker.failed_blocks() and self.torch.equal(before, pages), "not what was stored"
        return stored, loaded


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = {"socket": os.path.join(folder, "s"), "arena.size": "256MiB" if options.cpu else "8GiB", "log.level": "warn",
                 "device.cuda": "off" if options.cpu else "required"}
        daemon = Daemon(words, folder)
        try:
            rig = Rig(options, words["socket"])
            if rig.gpu:
                rig.rows["bus"] = bus(rig.torch)
                print(f"bus {rig.rows['bus'] / 1e9:.1f} GB/s", flush=True)
            with rig.torch.inference_mode():
                rig.steps(options.tokens)
                rig.groups(options.tokens)
        finally:
            daemon.stop()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rig.rows, file, indent=1)


if __name__ == "__main__":
    main()
