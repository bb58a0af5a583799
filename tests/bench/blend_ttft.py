#!/usr/bin/env python3
"""Time to first token on one GPU of a prompt that is made of chunks: computed whole, or loaded from ucmd's DRAM, each chunk turned to
its position, and computed in part.

A transformer of Llama-3.1-8B's shape with random weights (PyTorch, bfloat16), its KV in pages of 16 tokens. Chunks are computed and stored
each by itself; the prompt has them in another order, and a question behind them that is always computed.

    blend_ttft.py [--json FILE] [--chunks N] [--tokens N] [--question N] [--rounds N] [--layers N] [--arena SIZE] [--encoding fp8]

Random weights say nothing about quality (tests/blend does); what is loaded is compared with K that was turned from scratch, within the
bound of docs/blend.md, and with V bit by bit, unless an encoding rounds both. $UCMD is the daemon, $UCMCLIENT_LIB the library, $UCMCLIENT_CUDA_LIB the companion's. Needs
PyTorch with CUDA.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time

from engines import Daemon, bus
from ttft import BLOCK, HEAD, HEADS, KV_HEADS, VOCABULARY, WIDTH, Model

BASE = 500000.0


class Blend(Model):
    """Computes chosen positions of a prompt; K and V of the others lie in the pages of `table`."""

    def kv(self, layer, table, n):
        """K and V of the first n tokens: [1][KV_HEADS][n][HEAD]."""
        return (self.pages[:, layer, i].index_select(0, table).view(1, -1, KV_HEADS, HEAD)[:, :n].transpose(1, 2) for i in range(2))

    def rows(self, layer, x, positions):
        """Q, K and V of these positions, Q and K rotated."""
        qkv = self.weights.layers[layer][0]
        h = self.torch.nn.functional.rms_norm(x, (WIDTH,)) @ qkv.T
        q, k, v = h.view(len(x), -1, HEAD).split((HEADS, KV_HEADS, KV_HEADS), 1)
        return self.rotate(q, positions), self.rotate(k, positions), v

    def rest(self, layer, x, attended):
        """The layer behind its attention."""
        functional = self.torch.nn.functional
        _, out, up, down = self.weights.layers[layer]
        x = x + attended @ out.T
        gate, value = (functional.rms_norm(x, (WIDTH,)) @ up.T).chunk(2, -1)
        return x + (functional.silu(gate) * value) @ down.T

    def logits(self, x):
        return self.torch.nn.functional.rms_norm(x[-1:], (WIDTH,)) @ self.weights.head.T

    def put(self, layer, k, v, positions, table):
        where, row = table[positions // BLOCK], positions % BLOCK
        self.pages[where, layer, 0, row], self.pages[where, layer, 1, row] = k, v

    def runs(self, tokens, table, runs):
        """Positions of the runs alone, each a range: every layer computes the same ones."""
        torch = self.torch
        from torch.nn.attention.bias import causal_lower_right
        attention = torch.nn.functional.scaled_dot_product_attention
        positions = torch.cat([torch.arange(a, b, device="cuda") for a, b in runs])
        x = self.weights.embedding[tokens[positions]]
        for layer in range(self.layers):
            q, k, v = self.rows(layer, x, positions)
            self.put(layer, k, v, positions, table)
            keys, values = self.kv(layer, table, len(tokens))
            parts, at = [], 0
            for a, b in runs:
                part = q[at : at + b - a].transpose(0, 1)[None]
                bias = causal_lower_right(b - a, b) if b - a > 1 else None
                parts.append(attention(part, keys[:, :, :b], values[:, :, :b], attn_mask=bias, enable_gqa=True)[0].transpose(0, 1))
                at += b - a
            x = self.rest(layer, x, torch.cat(parts).reshape(len(x), -1))
        return self.logits(x)

    def scattered(self, layer, q, positions, table, groups):
        """Attention of positions that lie anywhere. groups: ends of ranges of the prompt, so that no query reads far behind itself."""
        torch, parts, at = self.torch, [], 0
        keys, values = (of.repeat_interleave(HEADS // KV_HEADS, 1) for of in self.kv(layer, table, groups[-1][1]))
        for count, end in groups:
            part = q[at : at + count].transpose(0, 1)[None]
            mask = positions[at : at + count, None] >= torch.arange(end, device="cuda")
            parts.append(torch.nn.functional.scaled_dot_product_attention(
                part, keys[:, :, :end], values[:, :, :end], attn_mask=mask)[0].transpose(0, 1))
            at += count
        return torch.cat(parts).reshape(at, -1)

    def hkvd(self, tokens, table, ends, reused, ratio):
        """All positions in layer 0 and the attention of layer 1, whose K says which of the first `reused` go on: those that differ most."""
        torch = self.torch
        from torch.nn.attention.bias import causal_lower_right
        n = len(tokens)
        positions = torch.arange(n, device="cuda")
        x = self.weights.embedding[tokens]
        for layer in range(2):
            q, k, v = self.rows(layer, x, positions)
            if layer == 1:
                old, _ = self.kv(layer, table, reused)
                off = (k[:reused].float() - old[0].transpose(0, 1).float()).abs().sum((1, 2))
                top = off.topk(int(ratio * reused)).indices.sort().values
                keep = torch.cat((top, positions[reused:]))
                counts = torch.searchsorted(keep, torch.tensor(ends, device="cuda")).tolist()
                q, k, v, x, positions = q[keep], k[keep], v[keep], x[keep], keep
                groups = [(b - a, end) for a, b, end in zip([0, *counts], counts, ends)]
                self.put(layer, k, v, positions, table)
                attended = self.scattered(layer, q, positions, table, groups)
            else:
                self.put(layer, k, v, positions, table)
                keys, values = self.kv(layer, table, n)
                attended = torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(0, 1)[None], keys, values, attn_mask=causal_lower_right(n, n), enable_gqa=True)[0].transpose(0, 1).reshape(n, -1)
            x = self.rest(layer, x, attended)
        for layer in range(2, self.layers):
            q, k, v = self.rows(layer, x, positions)
            self.put(layer, k, v, positions, table)
            x = self.rest(layer, x, self.scattered(layer, q, positions, table, groups))
        return self.logits(x)

    def pass_of(self, tokens, table, positions, asks, deep, sums=None):
        """Positions that lie anywhere, in order, by a kernel that reads the pages. asks: how many of the last ones are the question. deep: behind so many
        layers these alone go on. sums: takes the weights that they give to each token of the prompt. Returns the question's hidden states."""
        from blend_kernels import attend, drawn
        x = self.weights.embedding[tokens[positions]]
        for layer in range(self.layers):
            if layer == deep:
                x, positions = x[-asks:], positions[-asks:]
            q, k, v = self.rows(layer, x, positions)
            self.put(layer, k, v, positions, table)
            # Few queries, many keys: more programs.
            attended, log_sum = attend(q, self.pages, layer, table, positions, 16 if len(positions) < 256 else 4)
            if sums is not None:
                drawn(q[-asks:], self.pages, layer, table, positions[-asks:], log_sum[-asks:], len(tokens), sums)
            x = self.rest(layer, x, attended.reshape(len(x), -1))
        return x

    def asked(self, tokens, table, policy, spans):
        """The first tokens of chunks and the question; then the share of the chunks' tokens that the question attended to most, and the question again."""
        torch = self.torch
        reused = spans[-1].end
        question = torch.arange(reused, len(tokens), device="cuda")
        turned = [span for span in spans if span.start]  # a chunk at the prompt's beginning is exact
        beginnings = torch.cat([torch.arange(span.start, span.start + policy.first, device="cuda") for span in turned])
        sums = torch.zeros(len(tokens), dtype=torch.float32, device="cuda")
        self.pass_of(tokens, table, torch.cat((beginnings, question)), len(question), self.layers, sums)
        sums.index_fill_(0, beginnings, -1.0)
        begin = turned[0].start
        top = begin + sums[begin:reused].topk(int(policy.ratio * (reused - begin))).indices.sort().values
        return self.logits(self.pass_of(tokens, table, torch.cat((top, question)), len(question), policy.layers(self.layers)))


class Prompt:
    """The chunks' tokens, and the prompt that has them in another order."""

    def __init__(self, torch, chunks, tokens, question):
        draw = random.Random(chunks * tokens)
        self.texts = [[draw.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(chunks)]
        self.order = [*range(1, chunks), 0]
        self.numbers = [n for i in self.order for n in self.texts[i]] + [draw.randrange(VOCABULARY) for _ in range(question)]
        self.table = list(range(-(-len(self.numbers) // BLOCK)))
        draw.shuffle(self.table)  # an engine's blocks lie anywhere
        self.on_gpu, self.at = (torch.tensor(of, device="cuda") for of in (self.numbers, self.table))


class Bench:
    def __init__(self, options, socket):
        import torch
        from ucmclient import Client, Companion, Identity, Plane, Rope, blend
        from ucmclient.memory import cuda_allocation

        self.torch, self.blend, self.options = torch, blend, options
        self.prompt = Prompt(torch, options.chunks, options.tokens, options.question)
        blocks = len(self.prompt.table)
        self.model = Blend(options.layers, blocks)
        layer = 2 * BLOCK * KV_HEADS * HEAD * 2
        self.client = Client(socket, "blend")
        identity = Identity(model="blend", dtype="bfloat16", layout="blocks", block_tokens=BLOCK, shards=(options.layers,), shard_bytes=layer)
        self.chunks = blend.Chunks(self.client, identity)
        memory, base, uuid = cuda_allocation(self.model.pages.data_ptr())
        first = self.model.pages.data_ptr() - base
        size = layer // 2 if options.encoding else layer  # an encoding wants K and V each in a plane
        planes = [Plane(0, first + at, layer * options.layers, size, at // layer) for at in range(0, layer * options.layers, size)]
        rope = Rope(rows=BLOCK * KV_HEADS, dim=HEAD, rotary=HEAD, base=BASE)
        self.companion = Companion(self.client, uuid, timeout=60)
        ns = self.plain = self.chunks._ns
        if options.encoding:  # which lookups have to know, too
            ns = self.chunks._ns = ns.encoded(options.encoding, k=(BLOCK, KV_HEADS, HEAD), v=(BLOCK, KV_HEADS, HEAD))
        more = dict(blocks=blocks, rope=rope, timeout=60)
        self.ways = {"straight": blend.ChunkPages(self.chunks, ns.register([memory], planes, gpu=uuid, **more), rope),
                     "companion": blend.ChunkPages(self.chunks, self.companion.register(ns, [memory], planes, [base], **more), rope)}
        self.alone = {}  # of some chunks, what their own computation left of layers: [tokens][2][KV_HEADS][HEAD]

    def store(self):
        """Each chunk, computed by itself."""
        blend, span = self.blend, self.blend.Span(0, self.options.tokens)
        table = list(range(self.options.tokens // BLOCK))
        at = self.torch.tensor(table, device="cuda")
        for number, text in enumerate(self.prompt.texts):
            self.model.forward(self.torch.tensor(text, device="cuda"), 0, at)
            self.torch.cuda.synchronize()
            plan = blend.plan(self.chunks.lookup(text, [span]), blend.Nothing())
            assert self.ways["straight"].store(plan, text, 0, table).wait(120).all_ok
            if number in (0, 2):
                for layer in (0, self.options.layers - 1):
                    self.alone[number, layer] = self.model.pages[at, layer].transpose(0, 1).reshape(2, -1, KV_HEADS, HEAD).clone()

    def spans(self):
        return [self.blend.Span(i * self.options.tokens, (i + 1) * self.options.tokens) for i in range(self.options.chunks)]

    def clear(self):
        """A load does not wait for what torch has yet to run."""
        self.model.pages.zero_()
        self.torch.cuda.synchronize()

    def bring(self, policy, way, turned=True):
        """Looks up and loads what the policy reuses. Returns the plan, and the seconds of lookup and plan, and of the load."""
        began = time.perf_counter()
        found = self.chunks.lookup(self.prompt.numbers, self.spans(), lease=60)
        plan = self.blend.plan(found, policy)
        planned = time.perf_counter()
        blocks = [self.prompt.table[load.position // BLOCK] for load in plan.loads]
        pages = self.ways[way]
        if turned:
            result = pages.load(plan, blocks, lease=found.lease).wait(120)
        else:
            result = pages._region.load([load.key for load in plan.loads], blocks, lease=found.lease).wait(120)
        assert result.all_ok, "not all blocks were loaded"
        return plan, planned - began, time.perf_counter() - planned

    def wrong(self):
        """The largest error of a turned K beside one that is turned from scratch, by its pair's length; whether V is equal bit by bit."""
        torch, tokens = self.torch, self.options.tokens
        turns = BASE ** (-torch.arange(HEAD // 2, device="cuda", dtype=torch.float64) / (HEAD // 2))
        most, same = 0.0, True
        for (number, layer), kept in self.alone.items():
            begin = self.prompt.order.index(number) * tokens
            here = self.model.pages[self.prompt.at[begin // BLOCK : (begin + tokens) // BLOCK], layer]
            k, v = here.transpose(0, 1).reshape(2, -1, KV_HEADS, HEAD)
            same = same and bool(torch.equal(v, kept[1]))
            angle = begin * turns.float().double()
            a, b = kept[0].double().chunk(2, -1)
            want = torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
            length = (a * a + b * b).sqrt().repeat(1, 1, 2)
            most = max(most, float(((k.double() - want).abs() / (length + 1e-9)).max()))
        return most, same

    def timed(self, call):
        self.torch.cuda.synchronize()
        began = time.perf_counter()
        result = call()
        int(result.argmax())
        return time.perf_counter() - began

    def graph(self, call):
        """As engines have small steps."""
        for _ in range(2):
            call()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            logits = call()

        def replay():
            graph.replay()
            return logits

        return replay

    def compute_of(self, plan):
        """The positions of a plan, as ranges."""
        runs = []
        for p in plan.compute:
            if runs and runs[-1][1] == p:
                runs[-1][1] = p + 1
            else:
                runs.append([p, p + 1])
        return self.graph(lambda: self.model.runs(self.prompt.on_gpu, self.prompt.at, [tuple(run) for run in runs]))

    def all_again(self):
        """How far logits are off, beside those of the whole prompt: where every token of a turned chunk is computed again, and where the same model
        computes what follows the first chunk in another step, which rounds as differently."""
        right = self.model.forward(self.prompt.on_gpu, 0, self.prompt.at).float()
        twice = self.model.forward(self.prompt.on_gpu, self.options.tokens, self.prompt.at).float()
        self.clear()
        plan, _, _ = self.bring(self.blend.First(self.options.tokens), "companion")
        found = self.compute_of(plan)().float()
        return tuple(float((other - right).norm() / right.norm()) for other in (found, twice))

    def loads(self):
        """Seconds of loads of all chunks, plain and turned in turns."""
        took = {}
        for _ in range(self.options.rounds + 1):
            for way in self.ways:
                for turned in (False, True):
                    took.setdefault((way, turned), []).append(self.bring(self.blend.Nothing(), way, turned)[2])
        return {key: statistics.median(of[1:]) for key, of in took.items()}

    def answers(self, policy, way):
        """Times to the first token: (seconds, lookup and plan, load, compute), the median by the first."""
        plan, _, _ = self.bring(policy, way)
        if isinstance(policy, self.blend.Hkvd):
            reused, ends = self.options.chunks * self.options.tokens, [span.end for span in self.spans()]
            ends.append(len(self.prompt.numbers))

            def compute():
                return self.model.hkvd(self.prompt.on_gpu, self.prompt.at, ends, reused, policy.ratio)
        elif isinstance(policy, self.blend.Asked):
            compute = self.graph(lambda: self.model.asked(self.prompt.on_gpu, self.prompt.at, policy, self.spans()))
        else:
            compute = self.compute_of(plan)
        rounds = []
        for _ in range(self.options.rounds + 1):
            self.clear()
            began = time.perf_counter()
            _, planned, loaded = self.bring(policy, way)
            computed = self.timed(compute)
            rounds.append((time.perf_counter() - began, planned, loaded, computed))
        return sorted(rounds[1:])[len(rounds[1:]) // 2]


def measure(bench, options):
    blend, torch = bench.blend, bench.torch
    rate = bus(torch)
    bench.store()
    n = len(bench.prompt.numbers)
    whole = statistics.median([bench.timed(lambda: bench.model.forward(bench.prompt.on_gpu, 0, bench.prompt.at)) for _ in range(3)][1:])
    bench.clear()
    plan, _, _ = bench.bring(blend.Nothing(), "companion")
    most, same = bench.wrong()
    off, twice = bench.all_again()
    size = len(plan.loads) * options.layers * 2 * BLOCK * KV_HEADS * HEAD * 2
    told = {"logits_off": off, "logits_off_in_two_steps": twice, "tokens": n, "bus_gb_s": rate / 1e9, "compute_s": whole, "bytes": size, "worst": most, "v_same": same}
    print(f"{n} tokens, {options.chunks} chunks of {options.tokens}; bus {rate / 1e9:.1f} GB/s; {size / 2**30:.2f} GiB; computed whole {whole * 1e3:.1f} ms; "
          f"K off by at most {most:.5f} of its pair (bound without an encoding 0.0079), V {'equal' if same else 'DIFFERS'}; "
          f"logits off by {off:.4f} of their norm where all tokens of turned chunks are computed again (by {twice:.4f} where the whole prompt is, in two steps)", flush=True)
    took = bench.loads()
    told["loads"] = {f"{way} {'turned' if turned else 'plain'}": seconds for (way, turned), seconds in took.items()}
    for way in bench.ways:
        plain, turned = took[way, False], took[way, True]
        print(f"load, {way:9}: plain {size / plain / 1e9:5.2f} GB/s, turned {size / turned / 1e9:5.2f}, ratio {plain / turned:.3f}", flush=True)
    told["rows"] = []
    print(f"{'policy':10} {'by':9} {'ms':>8} {'sooner':>7} {'plan':>6} {'load':>7} {'compute':>8}")
    for name, policy in (("none", blend.Nothing()), ("first 16", blend.First(16)), ("first 64", blend.First(64)),
                         ("hkvd 20 %", blend.Hkvd(0.2)), *((f"asked {r} %", blend.Asked(r / 100)) for r in (2, 4, 6, 8))):
        for way in bench.ways:
            seconds, planned, loaded, computed = bench.answers(policy, way)
            told["rows"].append({"policy": name, "way": way, "seconds": seconds, "plan": planned, "load": loaded, "compute": computed,
                                 "sooner": whole / seconds})
            print(f"{name:10} {way:9} {seconds * 1e3:8.1f} {whole / seconds:6.1f}x {planned * 1e3:6.1f} {loaded * 1e3:7.1f} {computed * 1e3:8.1f}", flush=True)
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of a chunk; a multiple of 16")
    parser.add_argument("--question", type=int, default=64, help="tokens behind the chunks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--arena", default="8GiB")
    parser.add_argument("--encoding", help="of the blocks in DRAM, such as fp8")
    options = parser.parse_args()
    import torch
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        socket = os.path.join(folder, "s")
        daemon = Daemon({"socket": socket, "arena.size": options.arena, "device.cuda": "required"}, folder)
        bench = Bench(options, socket)
        told = measure(bench, options)
        for pages in bench.ways.values():
            pages.close()
        bench.companion.close()
        bench.client.close()
        daemon.stop()
    if options.json:
        with open(options.json, "w") as f:
            json.dump(told, f, indent=1)
    sys.exit(0 if options.encoding or (told["worst"] <= 2 ** -7 + 2e-3 and told["v_same"]) else 1)


if __name__ == "__main__":
    main()
