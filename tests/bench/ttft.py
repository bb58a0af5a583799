#!/usr/bin/env python3
"""Time to first token on one GPU: a prompt's beginning recomputed, or loaded from ucmd's DRAM or NVMe.

A transformer of Llama-3.1-8B's shape with random weights (PyTorch, bfloat16), its KV in pages of 16 tokens with all
layers of a block side by side. One process computes prompts and stores their blocks, another one loads them: what the
second one's model says to the last token has to be what the first one's said, bit for bit.

    ttft.py [--json FILE] [--tokens N,N] [--layers N] [--nvme FOLDER] [--arena SIZE]

$UCMD is the daemon, $UCMCLIENT_LIB the library. Needs PyTorch with CUDA.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.environ.get("UCM_PYTHON", os.path.join(TOP, "client/python")))

BLOCK, WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 16, 4096, 32, 8, 128, 14336, 128256
HITS, ROUNDS = (50, 80, 100), 3


class Model:
    def __init__(self, layers, blocks):
        import torch
        self.torch, self.layers = torch, layers
        torch.manual_seed(1)

        def matrix(rows, columns):
            return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * (columns ** -0.5)

        self.embedding = matrix(VOCABULARY, WIDTH) * WIDTH ** 0.5
        self.weights = [(matrix((HEADS + 2 * KV_HEADS) * HEAD, WIDTH), matrix(WIDTH, HEADS * HEAD),
                         matrix(2 * INNER, WIDTH), matrix(WIDTH, INNER)) for _ in range(layers)]
        self.head = matrix(VOCABULARY, WIDTH)
        self.pages = torch.zeros(blocks, layers, 2, BLOCK, KV_HEADS, HEAD, dtype=torch.bfloat16, device="cuda")
        self.turns = 500000.0 ** (-torch.arange(HEAD // 2, device="cuda") / (HEAD // 2))

    def rotate(self, x, positions):
        angle = (positions[:, None] * self.turns)[:, None]
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return self.torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)

    def forward(self, tokens, first, table):
        """Logits of the last token; K and V of tokens before `first` lie in the pages of `table`."""
        torch = self.torch
        from torch.nn.attention.bias import causal_lower_right
        functional, n = torch.nn.functional, len(tokens)
        positions = torch.arange(first, n, device="cuda")
        where, row = table[positions // BLOCK], positions % BLOCK
        x = self.embedding[tokens[first:]]
        for layer, (qkv, out, up, down) in enumerate(self.weights):
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
        return functional.rms_norm(x[-1:], (WIDTH,)) @ self.head.T


class Engine:
    """One process: the model, and its pages registered with the daemon."""

    def __init__(self, options):
        import torch
        from ucmclient import Client, Identity
        from ucmclient.vllm.layout import layout_of
        from ucmclient.vllm.worker import region_memory

        self.torch, self.most = torch, max(options["tokens"])
        self.model = Model(options["layers"], self.most // BLOCK)
        layout = layout_of({"all": self.model.pages}, self.most // BLOCK)
        lies = region_memory(layout, True)
        self.client = Client(options["socket"], "ttft")
        self.ns = self.client.namespace(Identity(
            model="ttft", dtype="bfloat16", layout=layout.name, block_tokens=BLOCK, shards=(1,),
            shard_bytes=layout.layer_bytes))
        self.region = self.ns.register(lies.memory, lies.planes, blocks=layout.blocks, gpu=lies.gpu, timeout=60)
        self.block_bytes = layout.layer_bytes

    def prompt(self, tokens):
        from ucmclient.keys import sha256_chain
        draw = random.Random(tokens)
        numbers = [draw.randrange(VOCABULARY) for _ in range(tokens)]
        table = list(range(tokens // BLOCK))
        draw.shuffle(table)  # an engine's blocks lie anywhere
        return (self.torch.tensor(numbers, device="cuda"), sha256_chain(numbers, BLOCK), table,
                self.torch.tensor(table, device="cuda"))

    def digest(self, table):
        """Of all bytes of these blocks."""
        whole = hashlib.sha256()
        for block in table:
            whole.update(self.model.pages[block].view(self.torch.uint8).cpu().numpy())
        return whole.hexdigest()

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
            logits = self.model.forward(numbers, 0, on_gpu)
        event = self.torch.cuda.Event(interprocess=True)
        event.record()
        result = self.region.dump(keys, table, event=event.ipc_handle()).wait(120)
        assert result.all_ok, "the store did not take every block"
        return {"digest": self.digest(table)}

    def recompute(self, tokens):
        numbers, _, _, on_gpu = self.prompt(tokens)
        times = [self.timed(lambda: self.model.forward(numbers, 0, on_gpu))[0] for _ in range(ROUNDS + 1)]
        return {"seconds": statistics.median(times[1:])}

    def load(self, tokens, hit, check):
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
        whole = None

        def answer():
            found = self.ns.lookup_prefix(keys[: blocks * 32], lease=30)
            assert found.blocks == blocks, f"{found.blocks} of {blocks} blocks were found"
            self.region.load(keys[: blocks * 32], table[:blocks], lease=found.lease).wait(120)
            return compute()

        seconds, _ = self.timed(answer)
        if hit == 100 and check:  # the step has computed the last token anew
            self.region.load(keys, table).wait(120)
            whole = self.digest(table)
        return {"seconds": seconds, "rest": rest, "bytes": blocks * self.block_bytes, "digest": whole}

    def bus(self):
        host = self.torch.empty(1 << 30, dtype=self.torch.uint8, pin_memory=True)
        device = self.torch.empty(1 << 30, dtype=self.torch.uint8, device="cuda")
        times = []
        for _ in range(5):
            self.torch.cuda.synchronize()
            began = time.perf_counter()
            device.copy_(host, non_blocking=True)
            self.torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return {"bytes_per_second": (1 << 30) / statistics.median(times)}


def serve(options):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    with torch.inference_mode():
        engine = Engine(options)
        answers.write("{}\n")
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answers.write(json.dumps(getattr(engine, name)(*arguments)) + "\n")


class Process:
    def __init__(self, options):
        self.process = subprocess.Popen([sys.executable, __file__, "--engine", json.dumps(options)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended early")
        return json.loads(line)

    def __call__(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


class Daemon:
    def __init__(self, options, folder):
        self.socket = options["socket"]
        words = {"socket": self.socket, "arena.size": options["arena"], "device.cuda": "required",
                 "nvme.paths": options["nvme"] or "", "nvme.size": "24GiB"}
        if not options["nvme"]:
            del words["nvme.paths"], words["nvme.size"]
        argv = [os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))]
        argv += [w for key, value in words.items() for w in ("--set", f"{key}={value}")]
        self.process = subprocess.Popen(argv, stdout=open(os.path.join(folder, "log"), "w"), stderr=subprocess.STDOUT)
        end = time.monotonic() + 60
        while not os.path.exists(self.socket):
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the daemon did not start:\n" + open(os.path.join(folder, "log")).read())
            time.sleep(0.05)

    def metrics(self):
        ctl = os.path.join(os.path.dirname(os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))), "ucmctl")
        out = subprocess.run([ctl, "--socket", self.socket, "--json", "stats"], capture_output=True, check=True)
        return json.loads(out.stdout)["metrics"]

    def to_nvme(self):
        """Waits until everything lies on NVMe, and drops it from DRAM."""
        ctl = os.path.join(os.path.dirname(os.environ.get("UCMD", os.path.join(TOP, "build/ucmd"))), "ucmctl")
        end = time.monotonic() + 180
        while self.metrics()["nvme_writes"] < self.metrics()["dump_blocks"] and time.monotonic() < end:
            time.sleep(0.1)
        subprocess.run([ctl, "--socket", self.socket, "evict", "1", "--tier", "dram", "--yes"], capture_output=True,
                       check=True)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def measure(options, folder):
    daemon = Daemon(options, folder)
    a, b = Process(options), Process(options)
    bus = b("bus")["bytes_per_second"]
    rows = []
    for tokens in options["tokens"]:
        digest = a("store", tokens)["digest"]
        plain = b("recompute", tokens)["seconds"]
        rows.append({"tokens": tokens, "hit": 0, "tier": "-", "seconds": plain, "sooner": 1.0})
        for tier in ("DRAM", "NVMe") if options["nvme"] else ("DRAM",):
            for hit in HITS:
                rounds = []
                for i in range(ROUNDS):
                    if tier == "NVMe":
                        daemon.to_nvme()
                    rounds.append(b("load", tokens, hit, i == 0))
                one = sorted(rounds, key=lambda r: r["seconds"])[ROUNDS // 2]
                ideal = one["bytes"] / bus + one["rest"]
                rows.append({"tokens": tokens, "hit": hit, "tier": tier, "seconds": one["seconds"],
                             "sooner": plain / one["seconds"], "at_most": plain / one["rest"],
                             "of_ideal": one["seconds"] / ideal,
                             "same": hit < 100 or rounds[0]["digest"] == digest})
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    a.close()
    b.close()
    daemon.stop()
    return {"bus_bytes_per_second": bus, "layers": options["layers"], "rows": rows}


def table(result):
    print(f"bus {result['bus_bytes_per_second'] / 1e9:.1f} GB/s; times are medians of {ROUNDS}")
    print(f"{'tokens':>7} {'hit':>5} {'from':>5} {'ms':>9} {'sooner':>7} {'at most':>8} {'of bus+rest':>12} {'bytes':>8}")
    for r in result["rows"]:
        line = f"{r['tokens']:>7} {r['hit']:>4}% {r['tier']:>5} {r['seconds'] * 1e3:>9.1f} {r['sooner']:>6.1f}x"
        if r["hit"]:
            same = ("same" if r["hit"] == 100 else "") if r["same"] else "DIFFER"
            line += f" {r['at_most']:>7.1f}x {r['of_ideal']:>12.2f} {same:>8}"
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine")
    parser.add_argument("--json")
    parser.add_argument("--tokens", default="2048,8192,32768,65536")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--nvme", default="")
    parser.add_argument("--arena", default="20GiB")
    words = parser.parse_args()
    if words.engine:
        return serve(json.loads(words.engine))
    with tempfile.TemporaryDirectory() as folder:
        options = {"socket": os.path.join(folder, "s"), "tokens": [int(n) for n in words.tokens.split(",")],
                   "layers": words.layers, "nvme": words.nvme, "arena": words.arena}
        result = measure(options, folder)
    if words.json:
        with open(words.json, "w") as f:
            json.dump(result, f, indent=1)
    table(result)
    sys.exit(0 if all(r.get("same", True) for r in result["rows"]) else 1)


if __name__ == "__main__":
    main()
