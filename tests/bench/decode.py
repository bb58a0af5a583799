#!/usr/bin/env python3
"""Sparse decoding on one GPU beside dense attention with all KV there: the table of docs/sparse.md, "Measured on a GPU".

    decode.py [PART...] [--json FILE] [--known FILE] [--tokens N] [--policies POLICY/POLICY...] [--only PART=POLICY/POLICY...] [--slots X] [--nvme FOLDER]

A transformer of Llama-3.1-8B's shape with random weights decodes a token of each request a step, as one CUDA graph. The KV of a long prompt
lies in the daemon, in a window, from which the GPU itself reads what it misses. Parts:

    dense     torch's best attention, all KV on the GPU, by batch size up to the largest that fits
    one       sparse, one request, by policy
    eighth    the same in an eighth of the KV's memory
    batch     sparse, by policy, as many requests as fit into the memory that dense has
    long      sparse, one request of 1M tokens
    second    what a second engine takes from the daemon
    restart   the first token after a restart of daemon and engine, from NVMe in --nvme
    serve     requests a second by a simulation that takes the steps' times from the parts above

A policy may say how its slots are: "topk:topk_tokens=4096 +fp8 +3x" for coded ones, three times what a step chooses. --only names
those of a part: --only batch=POLICY/POLICY.

All requests of a batch, and all 128k pieces of 1M tokens, are the same prompt in DRAM; on the GPU each has numbers, digests and slots of its own.

$UCMD is the daemon, $UCMCTL the ucmctl beside it, $UCMCLIENT_LIB the library, $UCMCLIENT_CUDA_LIB the companion's. Needs PyTorch with CUDA; with --tiny a small shape
runs on a CPU, which shows that the script works."""

import argparse
import json
import os
import sys
import tempfile
import time

import decode_page
import decode_serve
from engines import Daemon, Process, serve

PARTS = ("dense", "one", "eighth", "batch", "long", "second", "restart", "serve")
POLICIES = ("topk:topk_tokens=4096", "topk:topk_tokens=4096 +fp8", "topk:topk_tokens=4096,reuse=2", "topk:topk_tokens=4096,reuse=2 +fp8",
            "topk:topk_tokens=4096,digest=hash,reduce=max", "topk:topk_tokens=4096,digest=mean,reduce=max")
MIB = 1 << 20
#: Share of the blocks among which all layers and heads of a step choose after the restart, and of these a layer's heads: as many as SmolLM2's at
#: 1/32 of 8,192 tokens. A head chooses 1/32 there, the three of a layer 1.77 times as much, as they would independently out of 0.064.
LEANING = "0.226,0.283"


def words_of(options, nvme):
    """Of a daemon whose window has the prompt, whose arena has a part of it, or all if it comes back from NVMe."""
    kv = options["kv_bytes"]
    window, arena = kv + kv // 16 + (1 << 30), min(kv, 4 << 30) + (2 << 30)
    if options["tiny"]:
        window, arena = 2 * kv + 64 * MIB, 2 * kv + 64 * MIB
    words = {"socket": options["socket"], "arena.size": arena, "window.size": window, "metrics.socket": "",
             "arena.extent": 16 * MIB if options["tiny"] else 512 * MIB, "device.cuda": "off" if options["tiny"] else "required"}
    if nvme:
        words.update({"nvme.paths": options["nvme"], "nvme.size": 3 * kv // 2 + 256 * MIB, "arena.size": window})
    return words


class Bench:
    def __init__(self, options, folder):
        self.options, self.folder, self.result, self.began = options, folder, {"options": options}, time.monotonic()

    def engine(self):
        engine = Process(os.path.abspath(__file__), self.options)
        engine.answer()
        return engine

    def note(self, part, value):
        self.result.setdefault(part, []).append(value)
        self.result["seconds"] = time.monotonic() - self.began
        print(f"# {self.result['seconds']:.1f} s, {part}: {json.dumps(value)}", flush=True)
        if self.options["json"]:
            with open(self.options["json"], "w") as f:
                json.dump(self.result, f, indent=1)

    def add(self, file):
        with open(file) as f:
            for part, values in json.load(f).items():
                if part in PARTS and values:
                    self.result[part] = self.result.get(part, []) + values

    def run(self, parts):
        if "dense" in parts:
            self.dense()
        if set(parts) & {"one", "eighth", "batch", "long", "second"}:
            self.windows(parts)
        if "restart" in parts:
            self.restart()
        if "serve" in parts:
            self.result["serve"] = decode_serve.table(self.result)

    def dense(self):
        engine = self.engine()
        self.note("dense", engine("dense"))
        engine.close()

    def store(self):
        engine = self.engine()
        self.note("store", engine("store", True, None))
        engine.close()

    def open(self, daemon):
        """An engine that has what the daemon has."""
        engine, before = self.engine(), daemon.metrics()
        answer, now = engine("open"), daemon.metrics()
        answer["stored_bytes"], answer["built_bytes"] = (now[name] - before[name] for name in ("dump_bytes", "digest_bytes"))
        self.note("second", answer)
        return engine

    def sparse(self, daemon, engine, part, policy, *more):
        """Returns the engine, or another one if it ended."""
        try:
            self.note(part, engine("sparse", policy, *more))
            return engine
        except SystemExit:
            self.note("failed", {"part": part, "policy": policy})
            return self.open(daemon)

    def windows(self, parts):
        daemon = Daemon(words_of(self.options, False), self.folder)
        self.store()
        engine = self.open(daemon)
        for part, more in (("one", ([1],)), ("eighth", ([1], None, 0)), ("batch", (self.options["batches"],)),
                           ("long", ([1], 8 * self.options["tokens"]))):
            if part in parts:
                for policy in self.options["only"].get(part, self.options["policies"]):
                    engine = self.sparse(daemon, engine, part, policy, *more)
        engine.close()
        daemon.stop()

    def restart(self):
        words = words_of(self.options, True)
        daemon = Daemon(words, self.folder)
        engine = self.engine()
        leaning = self.options["leaning"]
        self.note("restart", {"how": "stored", "leaning": leaning, **engine("store", False, leaning)})
        engine.close()
        for how in ("whole", "steps"):
            daemon.to_nvme()
            daemon.stop()
            daemon = Daemon(words, self.folder)
            engine = self.engine()
            before = daemon.metrics()
            answer = engine("restart", how)
            now = daemon.metrics()
            self.note("restart", {**answer, "nvme_read_bytes": now["nvme_read_bytes"] - before["nvme_read_bytes"]})
            engine.close()
        daemon.stop()


def options_of(words, folder):
    layer_bytes, layers = (2 * 16 * 2 * 64 * 2, 2) if words.tiny else (64 << 10, 32)
    policies = words.policies.split("/")
    only = {part: some.split("/") for part, _, some in (one.partition("=") for one in words.only)}
    return {"only": only, "socket": os.path.join(folder, "s"), "tokens": words.tokens, "steps": words.steps, "settle": words.settle, "policies": policies,
            "policy": policies[0], "slots": words.slots, "batches": [int(n) for n in words.batches.split(",") if n], "nvme": words.nvme,
            "leaning": [float(share) for share in words.leaning.split(",")],
            "tiny": words.tiny, "json": words.json, "kv_bytes": words.tokens // 16 * layers * layer_bytes}


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    parser.add_argument("--known", action="append", default=[], help="a JSON with parts that need not be measured again")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=64, help="that are timed")
    parser.add_argument("--settle", type=int, default=64, help="before them: they fill the slots")
    parser.add_argument("--policies", default="/".join(POLICIES))
    parser.add_argument("--only", action="append", default=[], metavar="PART=POLICY/POLICY", help="in place of --policies, for that part")
    parser.add_argument("--slots", type=float, default=4.0, help="of a request, in multiples of what its step chooses")
    parser.add_argument("--batches", default="", help="in place of four up to as many as fit: 1,8,16; 0 is as many as fit")
    parser.add_argument("--nvme", default="", help="a folder, for the restart")
    parser.add_argument("--leaning", default=LEANING, help="for the restart: the blocks that any layer chooses among, and of them a layer's")
    parser.add_argument("--tiny", action="store_true", help="a small shape, on a CPU")
    return parser


def main():
    words = parser().parse_args()
    if words.engine:
        from decode_engine import Engine
        return serve(lambda: Engine(json.loads(words.engine)))
    with tempfile.TemporaryDirectory(prefix="ucm-decode-") as folder:
        bench = Bench(options_of(words, folder), folder)
        for file in words.known:
            bench.add(file)
        bench.run(words.parts or [p for p in PARTS if p != "restart" or words.nvme])
    decode_page.show(bench.result)


if __name__ == "__main__":
    sys.exit(main())
