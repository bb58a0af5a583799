#!/usr/bin/env python3
"""Time to first token on one GPU: a prompt's beginning recomputed, or loaded from ucmd's DRAM or NVMe.

A transformer of Llama-3.1-8B's shape with random weights (PyTorch, bfloat16), its KV in pages of 16 tokens with all
layers of a block side by side. One process computes prompts and stores their blocks, another one loads them: what the
second one's model says to the last token has to be what the first one's said, bit for bit.

    ttft.py [--json FILE] [--tokens N,N] [--hits 50,80,100] [--rounds N] [--layers N] [--nvme FOLDER] [--arena SIZE] [--one-request]
    ttft.py --encoding none,fp8,int8,q4,lossless [--layout layers] [--rounds N] [...]

"above" is what it takes more than the bus's time for the bytes and the GPU's for the remaining tokens; "of bus" the load itself, beside
the bus's time. The aim of whole hits from DRAM is 0.5 ms above.

With --encoding: whole hits only, by encoding, each beside `none` of the same run. What a lossless one loads is compared
byte by byte, and the logits bit by bit; of the others the squared error of the loaded KV must be below a limit, and how far
the logits are off is told. Random weights say nothing about quality: the study of encodings does.

$UCMD is the daemon, $UCMCLIENT_LIB the library, $UCMCLIENT_CUDA_LIB the companion's. Needs PyTorch with CUDA.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time

from engines import Daemon, Process, bus, serve
from llama import Shape

BLOCK, WIDTH, HEADS, KV_HEADS, HEAD, VOCABULARY = (
    getattr(Shape, name) for name in ("block", "width", "heads", "kv_heads", "head", "vocabulary"))
ROUNDS = 3  # of what is computed without a hit
#: Of the time to first token without an encoding, at the longest prompt.
AIMS = {"fp8": 0.65, "int8": 0.65, "q4": 0.5}
#: Squared error of loaded KV over its squares, of normally distributed values (docs/encodings.md, "Bytes").
NMSE = {"none": 0.0, "lossless": 0.0, "int8": 0.0003, "fp8": 0.0012, "q4": 0.015}
#: Chunks of this size and more need no companion, unless they are encoded (docs/copy.md).
LARGE = 512 << 10


class Model:
    def __init__(self, layers, blocks):
        import torch
        from weights import Weights
        self.torch, self.layers = torch, layers
        self.weights = Weights(Shape(layers=layers), "cuda")
        self.rotate = self.weights.rotate
        self.pages = torch.zeros(blocks, layers, 2, BLOCK, KV_HEADS, HEAD, dtype=torch.bfloat16, device="cuda")

    def forward(self, tokens, first, table):
        """Logits of the last token; K and V of tokens before `first` lie in the pages of `table`."""
        torch = self.torch
        from torch.nn.attention.bias import causal_lower_right
        functional, n = torch.nn.functional, len(tokens)
        positions = torch.arange(first, n, device="cuda")
        where, row = table[positions // BLOCK], positions % BLOCK
        x = self.weights.embedding[tokens[first:]]
        for layer, (qkv, out, up, down) in enumerate(self.weights.layers):
            h = functional.rms_norm(x, (WIDTH,)) @ qkv.T
            q, k, v = h.view(n - first, -1, HEAD).split((HEADS, KV_HEADS, KV_HEADS), 1)
            self.pages[where, layer, 0, row] = self.rotate(k, positions)
            self.pages[where, layer, 1, row] = v
            keys, values = (self.pages[:, layer, i].index_select(0, table).view(1, -1, KV_HEADS, HEAD)[:, :n].transpose(1, 2)
                            for i in range(2))
            bias = causal_lower_right(n - first, n) if n - first > 1 else None
            a = functional.scaled_dot_product_attention(
                self.rotate(q, positions).transpose(0, 1)[None], keys, values, attn_mask=bias, enable_gqa=True)
            x = x + a[0].transpose(0, 1).reshape(n - first, -1) @ out.T
            gate, value = (functional.rms_norm(x, (WIDTH,)) @ up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * value) @ down.T
            del h, q, k, v, keys, values, a, gate, value
        return functional.rms_norm(x[-1:], (WIDTH,)) @ self.weights.head.T


class Engine:
    """One process: the model, and its pages registered with the daemon, once for each encoding."""

    def __init__(self, options):
        import torch
        from ucmclient import Client

        self.torch, self.most = torch, max(options["tokens"])
        self.model = Model(options["layers"], self.most // BLOCK)
        self.client, self.companion, self.base = Client(options["socket"], "ttft"), None, None
        self.regions, self.block_bytes = {}, {}
        for encoding in options["encoding"]:
            self.register(encoding, options["layout"] == "layers")
        self.region, self.steps, self.truth = self.regions["none"], {}, {}

    def register(self, encoding, layers):
        from ucmclient import Companion, Identity
        from ucmclient.engine.vllm.layout import Heads, layout_of
        from ucmclient.engine.vllm.worker import region_memory

        pages, blocks = self.model.pages, self.most // BLOCK
        tensors = {str(i): pages[:, i] for i in range(pages.shape[1])} if layers else {"all": pages}
        heads = None if encoding == "none" else Heads(BLOCK, KV_HEADS, HEAD)
        layout = layout_of(tensors, blocks, layers, heads)
        lies = region_memory(layout, True)
        if self.base is None:
            self.base = self.client.namespace(Identity(
                model="ttft", dtype="bfloat16", layout=layout.name, block_tokens=BLOCK, shards=(len(layout.layers),),
                shard_bytes=layout.layer_bytes))
        ns, size = self.base, layout.layer_bytes * len(layout.layers)
        if heads is not None:
            of = layout.sections
            ns = self.base.encoded(encoding, dtype=of.dtype, k=of.k, v=of.v or (), heads_first=bool(of.order))
            size = ns.block_bytes[1]
        if heads is not None or max(plane.chunk_bytes for plane in lies.planes) < LARGE:
            self.companion = self.companion or Companion(self.client, lies.gpu, timeout=60)
            region = self.companion.register(ns, lies.memory, lies.planes, lies.addresses, blocks=blocks, timeout=60)
        else:
            region = ns.register(lies.memory, lies.planes, blocks=blocks, gpu=lies.gpu, timeout=60)
        self.regions[encoding], self.block_bytes[encoding] = region, size

    def prompt(self, tokens):
        from ucmclient.keys import sha256_chain
        draw = random.Random(tokens)
        numbers = [draw.randrange(VOCABULARY) for _ in range(tokens)]
        table = list(range(tokens // BLOCK))
        draw.shuffle(table)  # an engine's blocks lie anywhere
        return (self.torch.tensor(numbers, device="cuda"), sha256_chain(numbers, BLOCK), table,
                self.torch.tensor(table, device="cuda"))

    def parts(self, table):
        """Copies of pages, some at a time, without the last token, which the step computes anew."""
        for i in range(0, len(table), 256):
            part = self.model.pages[table[i:i + 256]]
            if i + 256 >= len(table):
                part[-1, :, :, -1] = 0
            yield part

    def digest(self, table):
        """Of all bytes of these blocks: a sum of each block's words with random weights."""
        words = self.model.pages[0].numel() // 4
        random_words = self.torch.Generator("cuda").manual_seed(7)
        weights = self.torch.randint(-1 << 63, (1 << 63) - 1, (words,), device="cuda", generator=random_words)
        sums = [(part.view(self.torch.int64).view(-1, words) * weights).sum(1) for part in self.parts(table)]
        return hashlib.sha256(self.torch.cat(sums).cpu().numpy()).hexdigest()

    def last(self, numbers, on_gpu):
        """The step that computes the last token alone, as a graph, as engines have it for decoding."""
        for _ in range(2):
            self.model.forward(numbers, len(numbers) - 1, on_gpu)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            logits = self.model.forward(numbers, len(numbers) - 1, on_gpu)

        def replay():
            graph.replay()
            return logits

        return replay

    def timed(self, call):
        self.torch.cuda.synchronize()
        began = time.perf_counter()
        result = call()
        int(result.argmax())
        return time.perf_counter() - began, result

    def store(self, tokens):
        numbers, keys, table, on_gpu = self.prompt(tokens)
        for _ in range(2):
            self.model.forward(numbers, 0, on_gpu)
        event, seconds = self.torch.cuda.Event(interprocess=True), {}
        event.record()
        for encoding, region in self.regions.items():
            if len(self.regions) > 1:  # how long a dump takes, and not what computed its bytes
                self.torch.cuda.synchronize()
            began = time.perf_counter()
            result = region.dump(keys, table, event=event.ipc_handle()).wait(120)
            assert result.all_ok, f"the store of {encoding} did not take every block"
            seconds[encoding] = time.perf_counter() - began
        return {"digest": self.digest(table), "seconds": seconds}

    def recompute(self, tokens):
        numbers, _, _, on_gpu = self.prompt(tokens)
        times = [self.timed(lambda: self.model.forward(numbers, 0, on_gpu))[0] for _ in range(ROUNDS + 1)]
        return {"seconds": statistics.median(times[1:])}

    def load(self, tokens, hit, one_request, check):
        """Blocks of the first `hit` percent loaded, the rest computed."""
        numbers, keys, table, on_gpu = self.prompt(tokens)
        blocks = tokens * hit // 100 // BLOCK
        if blocks * BLOCK < tokens:
            def compute():
                return self.model.forward(numbers, blocks * BLOCK, on_gpu)
        else:
            compute = self.last(numbers, on_gpu)
        for _ in range(3):
            rest, _ = self.timed(compute)
        self.model.pages.zero_()
        told = {"rest": rest, "bytes": blocks * self.block_bytes["none"], "digest": None}

        def answer():
            told["lookup"], told["load"] = self.bring(keys[: blocks * 32], table[:blocks], one_request)
            return compute()

        told["seconds"], _ = self.timed(answer)
        if hit == 100 and check:
            told["digest"] = self.digest(table)
        return told

    def bring(self, keys, table, one_request):
        """Loads these blocks; how long the lookup took, and the load."""
        began = time.perf_counter()
        if one_request:
            assert self.region.load_prefix(keys, table).wait(120).all_ok, "not all blocks were loaded"
            return 0, time.perf_counter() - began
        found = self.base.lookup_prefix(keys, lease=30)
        assert found.blocks == len(table), f"{found.blocks} of {len(table)} blocks were found"
        looked = time.perf_counter()
        assert self.region.load(keys, table, lease=found.lease).wait(120).all_ok, "not all blocks were loaded"
        return looked - began, time.perf_counter() - looked

    def whole(self, tokens, encoding):
        """A whole hit in that form."""
        if tokens not in self.steps:
            prompt = self.prompt(tokens)
            self.steps[tokens] = *prompt, self.last(prompt[0], prompt[3])
        _, keys, table, _, compute = self.steps[tokens]
        region, told = self.regions[encoding], {}
        for _ in range(3):
            told["rest"], _ = self.timed(compute)
        self.model.pages.zero_()

        def answer():
            began = time.perf_counter()
            found = region.ns.lookup_prefix(keys, lease=30)
            assert found.blocks == len(table), f"{found.blocks} of {len(table)} blocks were found"
            looked = time.perf_counter()
            told["bytes"] = region.load(keys, table, lease=found.lease).wait(120).bytes
            told["lookup"], told["load"] = looked - began, time.perf_counter() - looked
            return compute()

        told["seconds"], logits = self.timed(answer)
        assert told["bytes"] == len(table) * self.block_bytes[encoding], "blocks came in another form"
        return {**told, **self.compared(tokens, table, logits.float(), compute)}

    def compared(self, tokens, table, logits, compute):
        """With what came first, which was loaded as it is. Over the same bytes the step gives the same bits, but at some lengths
        one of two results, whoever loaded them: both count."""
        if tokens not in self.truth:
            self.truth[tokens] = list(self.parts(table)), [logits, *(compute().float() for _ in range(32))]
        pages, results = self.truth[tokens]
        right = min(results, key=lambda result: float((logits - result).norm()))
        wrong = whole = 0.0
        for part, true in zip(self.parts(table), pages):
            wrong += float((part.float() - true.float()).square().sum())
            whole += float(true.float().square().sum())
        return {"digest": self.digest(table), "nmse": wrong / whole, "same_logits": bool((logits == right).all()),
                "logits_off": float((logits - right).norm() / right.norm()),
                "same_token": int(logits.argmax()) == int(right.argmax())}

    def bus(self):
        return {"bytes_per_second": bus(self.torch)}


def daemon_words(options):
    words = {"socket": options["socket"], "arena.size": options["arena"], "device.cuda": "required"}
    return {**words, "nvme.paths": options["nvme"], "nvme.size": "24GiB"} if options["nvme"] else words


@contextlib.contextmanager
def fleet(options, folder):
    """A daemon, the engine that stores and the one that loads."""
    daemon = Daemon(daemon_words(options), folder)
    engines = [Process(__file__, options) for _ in range(2)]
    for engine in engines:
        engine.answer()
    yield daemon, *engines
    for engine in engines:
        engine.close()
    daemon.stop()


def tiers(options):
    return ("DRAM", "NVMe") if options["nvme"] else ("DRAM",)


def ways(options):
    """Loads in one request or not."""
    return (False, True) if options["one_request"] else (False,)


def measure(daemon, a, b, options):
    bus = b("bus")["bytes_per_second"]
    rows = []
    for tokens in options["tokens"]:
        digest = a("store", tokens)["digest"]
        plain = b("recompute", tokens)["seconds"]
        rows.append({"tokens": tokens, "hit": 0, "tier": "-", "seconds": plain, "sooner": 1.0})
        for tier, hit, one_request in itertools.product(tiers(options), options["hits"], ways(options)):
            rounds = []
            for i in range(options["rounds"]):
                if tier == "NVMe":
                    daemon.to_nvme()
                rounds.append(b("load", tokens, hit, one_request, i == 0))
            one = sorted(rounds, key=lambda r: r["seconds"])[len(rounds) // 2]
            ideal = one["bytes"] / bus + one["rest"]
            rows.append({"tokens": tokens, "hit": hit, "tier": tier, "one_request": one_request, "sooner": plain / one["seconds"],
                         "at_most": plain / one["rest"], "of_ideal": one["seconds"] / ideal,
                         "above": one["seconds"] - ideal, "of_bus": one["load"] * bus / one["bytes"],
                         **{name: one[name] for name in ("seconds", "rest", "lookup", "load")},
                         "same": hit < 100 or rounds[0]["digest"] == digest})
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {"bus_bytes_per_second": bus, **{name: options[name] for name in ("layers", "rounds")}, "rows": rows}


# ---- by encoding ----


def right(one, encoding, digest):
    """Does the load hold what the encoding promises?"""
    if NMSE[encoding] == 0:
        return one["digest"] == digest and one["same_logits"]
    return one["nmse"] <= NMSE[encoding]


def turns(daemon, b, tokens, tier, digest, options):
    """Whole hits, each encoding once a round; of each the median, and the worst of what was compared."""
    rounds = {encoding: [] for encoding in options["encoding"]}
    for _ in range(options["rounds"]):
        for encoding, said in rounds.items():
            if tier == "NVMe":
                daemon.to_nvme()
            said.append(b("whole", tokens, encoding))
        print(".", end="", file=sys.stderr, flush=True)
    for encoding, said in rounds.items():
        by_time = sorted(said, key=lambda one: one["seconds"])
        yield {**by_time[len(said) // 2], "least": by_time[0]["seconds"], "most": by_time[-1]["seconds"], "tokens": tokens,
               "tier": tier, "encoding": encoding, "same": all(right(one, encoding, digest) for one in said),
               **{key: max(one[key] for one in said) for key in ("nmse", "logits_off")},
               **{key: min(one[key] for one in said) for key in ("same_logits", "same_token")},
               "same_bytes": all(one["digest"] == digest for one in said)}


def measure_encodings(daemon, a, b, options):
    bus, rows = b("bus")["bytes_per_second"], []
    for tokens in options["tokens"]:
        stored = a("store", tokens)
        for tier in tiers(options):
            found = list(turns(daemon, b, tokens, tier, stored["digest"], options))
            for row in found:
                row["of_none"] = row["seconds"] / found[0]["seconds"]
                row["bytes_of_none"] = row["bytes"] / found[0]["bytes"]
                row["of_ideal"] = row["seconds"] / (row["bytes"] / bus + row["rest"])
                row["stored"] = stored["seconds"][row["encoding"]]
            rows += found
    print(file=sys.stderr)
    return {"bus_bytes_per_second": bus, **{name: options[name] for name in ("layers", "layout", "rounds")}, "rows": rows}


def table_encodings(result):
    longest = max(r["tokens"] for r in result["rows"])
    print(f"bus {result['bus_bytes_per_second'] / 1e9:.1f} GB/s; {result['layout']}; times are medians of {result['rounds']}, in ms")
    print(f"{'tokens':>7} {'from':>4} {'encoding':>8} {'ms':>8} {'least':>7} {'most':>7} {'of none':>8} {'aim':>5} {'bytes':>6} "
          f"{'of bus+rest':>11} {'lookup':>6} {'load':>7} {'rest':>5} {'dump':>7}  {'KV, logits off by':>17} token")
    for r in result["rows"]:
        aim = AIMS.get(r["encoding"], 0) if r["tokens"] == longest and r["tier"] == "DRAM" else 0
        aim = f"{aim:5.2f}" if aim else f"{'':5}"
        ms = {name: r[name] * 1e3 for name in ("seconds", "least", "most", "lookup", "load", "rest", "stored")}
        print(f"{r['tokens']:>7} {r['tier']:>4} {r['encoding']:>8} {ms['seconds']:>8.1f} {ms['least']:>7.1f} {ms['most']:>7.1f} "
              f"{r['of_none']:>8.2f} {aim} {r['bytes_of_none']:>6.2f} {r['of_ideal']:>11.2f} {ms['lookup']:>6.1f} {ms['load']:>7.1f} "
              f"{ms['rest']:>5.1f} {ms['stored']:>7.1f}  {r['nmse']:>8.5f} {r['logits_off']:>8.4f} "
              f"{'same' if r['same_token'] else 'other'}{'' if r['same'] else ' WRONG'}")


def table(result):
    print(f"bus {result['bus_bytes_per_second'] / 1e9:.1f} GB/s; times are medians of {result['rounds']}, in ms")
    print(f"{'tokens':>7} {'hit':>5} {'from':>5} {'asks':>5} {'ms':>9} {'sooner':>7} {'at most':>8} {'of bus+rest':>12} {'above':>6} {'lookup':>6} "
          f"{'load':>7} {'of bus':>6} {'rest':>7} {'bytes':>6}")
    for r in result["rows"]:
        asks = ("once" if r["one_request"] else "twice") if r["hit"] else ""
        line = f"{r['tokens']:>7} {r['hit']:>4}% {r['tier']:>5} {asks:>5} {r['seconds'] * 1e3:>9.2f} {r['sooner']:>6.1f}x"
        if r["hit"]:
            ms = {name: r[name] * 1e3 for name in ("above", "lookup", "load", "rest")}
            same = ("same" if r["hit"] == 100 else "") if r["same"] else "DIFFER"
            line += (f" {r['at_most']:>7.1f}x {r['of_ideal']:>12.2f} {ms['above']:>6.2f} {ms['lookup']:>6.2f} {ms['load']:>7.2f} "
                     f"{r['of_bus']:>6.2f} {ms['rest']:>7.2f} {same:>6}")
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine")
    parser.add_argument("--json")
    parser.add_argument("--tokens", default="2048,8192,32768,65536")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--nvme", default="")
    parser.add_argument("--arena", default="20GiB")
    parser.add_argument("--encoding", default="")
    parser.add_argument("--layout", choices=("blocks", "layers"), default="blocks",
                        help="all layers of a block side by side, or each layer's KV by itself")
    parser.add_argument("--hits", default="50,80,100", help="percent of the prompt's blocks that are loaded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-request", action="store_true", help="also look up and load in one request (load_prefix); not with --encoding")
    words = parser.parse_args()
    if words.engine:
        return serve(lambda: Engine(json.loads(words.engine)))
    encodings = [name for name in words.encoding.split(",") if name and name != "none"]
    with tempfile.TemporaryDirectory() as folder:
        options = {"socket": os.path.join(folder, "s"), "tokens": [int(n) for n in words.tokens.split(",")],
                   "layers": words.layers, "nvme": words.nvme, "arena": words.arena, "encoding": ["none", *encodings],
                   "layout": words.layout, "rounds": words.rounds,
                   "hits": [int(n) for n in words.hits.split(",")], "one_request": words.one_request}
        with fleet(options, folder) as those:
            result = (measure_encodings if words.encoding else measure)(*those, options)
    if words.json:
        with open(words.json, "w") as f:
            json.dump(result, f, indent=1)
    (table_encodings if words.encoding else table)(result)
    sys.exit(0 if all(r.get("same", True) for r in result["rows"]) else 1)


if __name__ == "__main__":
    main()
