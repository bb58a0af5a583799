#!/usr/bin/env python3
"""Time to first token of a model of Hugging Face's `transformers` on one GPU, through ucmclient.blend.transformers: a prompt that is made of chunks,
computed whole by the model, or loaded from ucmd's DRAM, turned, and computed in part.

    blend_transformers.py [--json FILE] [--chunks N] [--tokens N] [--question N] [--rounds N] [--layers N] [--arena SIZE] [--small]

Llama-3.1-8B's shape with random weights in bfloat16. Chunks are computed and stored each by itself; the prompt has them in another order, and a
question behind them. Times are the caller's: from the tokens of a request to the number of its first token. What is loaded is compared with K
that was turned in float64, within the bound of docs/blend.md, and with V bit by bit; random weights say nothing about quality (tests/blend does).
--small: a tiny model, where there is no GPU on the CPU, to see that all of it runs. $UCMD is the daemon, $UCMCLIENT_LIB the library,
$UCMCLIENT_CUDA_LIB the companion's. Needs PyTorch and transformers.
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

import torch  # engines has put the client on the path
from transformers import LlamaConfig, LlamaForCausalLM
from ucmclient import Client, Companion, blend
from ucmclient.blend.transformers import Runner
from ucmclient.memory import cuda_allocation

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHAPE = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
SMALL = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
POLICIES = {"none": blend.Nothing(), "first 16": blend.First(16), "first 64": blend.First(64), "hkvd 20 %": blend.Hkvd(0.2),
            "asked 8 %": blend.Asked(0.08)}


def new_model(options):
    config = LlamaConfig(**(SMALL if options.small else SHAPE), num_hidden_layers=options.layers, max_position_embeddings=131072,
                         rope_parameters=ROPE, attn_implementation="sdpa")
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def settle():
    if CUDA:
        torch.cuda.synchronize()


class Timed(Runner):
    """Notes how long the parts of a prefill take, in seconds."""

    took = {"load": 0.0, "compute": 0.0}

    def prefill(self, *args, **more):
        self.took = {"load": 0.0, "compute": 0.0}
        return super().prefill(*args, **more)

    def part(self, name, call, *args):
        settle()
        began = time.perf_counter()
        result = call(*args)
        settle()
        self.took[name] += time.perf_counter() - began
        return result

    def _load_chunks(self, *args):
        return self.part("load", super()._load_chunks, *args)

    def _compute(self, *args, **more):
        return self.part("compute", lambda: super(Timed, self)._compute(*args, **more))


class Prompt:
    """The chunks' tokens, and the prompt that has them in another order."""

    def __init__(self, vocabulary, chunks, tokens, question):
        draw = random.Random(chunks * tokens)
        self.texts = [[draw.randrange(vocabulary) for _ in range(tokens)] for _ in range(chunks)]
        order = [*range(1, chunks), 0]
        self.tokens = [n for i in order for n in self.texts[i]] + [draw.randrange(vocabulary) for _ in range(question)]
        self.spans = [blend.Span(i * tokens, (i + 1) * tokens) for i in range(chunks)]


class Bench:
    def __init__(self, options, socket):
        self.options, self.model = options, new_model(options)
        self.prompt = Prompt(self.model.config.vocab_size, options.chunks, options.tokens, options.question)
        self.client = Client(socket, "blend")
        blocks = options.chunks * options.tokens // 16
        self.runners = {"straight": Timed(self.model, self.client, name="blend", blocks=blocks)}
        if CUDA:
            gpu = cuda_allocation(self.runners["straight"].pages.data_ptr())[2]
            self.runners["companion"] = Timed(self.model, self.client, name="blend", blocks=blocks, companion=Companion(self.client, gpu, timeout=60))
        for text in self.prompt.texts:
            assert self.runners["straight"].store(text) == len(text) // 16, "not all blocks were stored"

    def close(self):
        for runner in self.runners.values():
            runner.close()
        self.client.close()

    def alone(self):
        """The logits of the prompt by the model itself."""
        with torch.no_grad():
            answer = self.model(torch.tensor([self.prompt.tokens], device=DEVICE), use_cache=True, logits_to_keep=1)
        return answer.logits[0, -1].float()

    def prefill(self, way, policy, spans=None, **more):
        return self.runners[way].prefill(self.prompt.tokens, self.prompt.spans if spans is None else spans, policy, prefixes=False, **more)

    def timed(self, call):
        settle()
        began = time.perf_counter()
        first = call()
        int((first if isinstance(first, torch.Tensor) else first[0]).argmax())
        return time.perf_counter() - began

    def wrong(self, way):
        """Of the last chunk's K, which was turned to the prompt's beginning, the largest error beside a turn in float64, by its pair's length; and of
        the first, which went the other way; whether V is equal bit by bit."""
        tokens, last = self.options.tokens, self.options.chunks - 1
        turns = self.model.model.rotary_emb.inv_freq.double()
        cache = self.prefill(way, blend.Nothing())[1]
        most, same = 0.0, True
        for text, begin in ((0, last * tokens), (last, (last - 1) * tokens)):
            kept = self.runners[way].prefill(self.prompt.texts[text], [], blend.Nothing(), prefixes=False)[1]
            for layer in (0, self.options.layers - 1):
                # The request's last token is computed; here it lies in the question.
                here = cache.layers[layer].keys[0, :, begin : begin + tokens].double()
                same = same and torch.equal(cache.layers[layer].values[0, :, begin : begin + tokens], kept.layers[layer].values[0])
                a, b = kept.layers[layer].keys[0].double().chunk(2, -1)
                cos, sin = (begin * turns).cos(), (begin * turns).sin()
                length = (a * a + b * b).sqrt().repeat(1, 1, 2)
                want = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
                most = max(most, float(((here - want).abs() / (length + 1e-9)).max()))
        return most, bool(same)

    def off(self):
        """How far logits are off beside the model's own, by their norm: of the runner's computation without chunks, of that in steps of a chunk, which
        rounds as differently, and with no token and every token of turned chunks computed again."""
        right, turned = self.alone(), [*self.runners][-1]
        found = {"whole": self.prefill("straight", blend.Nothing(), []), "in steps": self.prefill("straight", blend.Nothing(), [], step=self.options.tokens),
                 "no token again": self.prefill(turned, blend.Nothing()), "all tokens again": self.prefill(turned, blend.First(self.options.tokens))}
        return {name: float((logits - right).norm() / right.norm()) for name, (logits, _) in found.items()}

    def row(self, way, policy):
        """The median of the rounds, by the whole time, and its parts."""
        rounds = []
        for _ in range(self.options.rounds + 1):
            seconds = self.timed(lambda: self.prefill(way, policy))
            rounds.append((seconds, dict(self.runners[way].took), self.runners[way].computed_tokens))
        return sorted(rounds[1:], key=lambda of: of[0])[len(rounds[1:]) // 2]


def measure(bench, options):
    n = len(bench.prompt.tokens)
    whole = statistics.median([bench.timed(bench.alone) for _ in range(options.rounds + 1)][1:])
    runner = statistics.median([bench.timed(lambda: bench.prefill("straight", blend.Nothing(), [])) for _ in range(options.rounds + 1)][1:])
    told = {"tokens": n, "whole_s": whole, "runner_whole_s": runner, "wrong": {}, "rows": []}
    print(f"{n} tokens, {options.chunks} chunks of {options.tokens}; whole: the model {whole * 1e3:.1f} ms, the runner {runner * 1e3:.1f} ms"
          + (f"; bus {bus(torch) / 1e9:.1f} GB/s" if CUDA else ""), flush=True)
    for way in bench.runners:
        most, same = told["wrong"][way] = bench.wrong(way)
        print(f"{way}: K off by at most {most:.5f} of its pair (bound 0.0079), V {'equal' if same else 'DIFFERS'}", flush=True)
    told["off"] = bench.off()
    print("logits off, of their norm: " + ", ".join(f"{name} {off:.1e}" for name, off in told["off"].items()), flush=True)
    print(f"{'policy':10} {'by':9} {'ms':>8} {'sooner':>7} {'load':>7} {'compute':>8} {'rest':>6} {'computed':>9}")
    for name, policy in POLICIES.items():
        for way in bench.runners:
            seconds, took, computed = bench.row(way, policy)
            told["rows"].append({"policy": name, "way": way, "seconds": seconds, "sooner": whole / seconds, "computed": computed / n, **took})
            rest = seconds - took["load"] - took["compute"]
            print(f"{name:10} {way:9} {seconds * 1e3:8.1f} {whole / seconds:6.1f}x {took['load'] * 1e3:7.1f} {took['compute'] * 1e3:8.1f} "
                  f"{rest * 1e3:6.1f} {computed / n:9.1%}", flush=True)
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of a chunk; a multiple of 16")
    parser.add_argument("--question", type=int, default=64, help="tokens behind the chunks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--arena", default="8GiB")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if not CUDA and not options.small:
        parser.error("PyTorch finds no GPU; --small runs a tiny model without one")
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon({"socket": os.path.join(folder, "s"), "arena.size": options.arena, "device.cuda": "required" if CUDA else "off"}, folder)
        try:
            bench = Bench(options, daemon.socket)
            told = measure(bench, options)
            bench.close()
        finally:
            daemon.stop()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)
    sys.exit(0 if all(most <= 2**-7 + 2e-3 and same for most, same in told["wrong"].values()) else 1)


if __name__ == "__main__":
    main()
