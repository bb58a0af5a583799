#!/usr/bin/env python3
"""check_sparse_decode.py MODEL FOLDER [short|full]: what policies of sparse decoding attend to, and what of the dense model's answers they
keep, on SmolLM2-135M (a GGUF file) or on a decoder that train.py made. Writes FOLDER/results.json, of which report_sparse_decode.py makes
tables. Contexts are prefilled once and kept in FOLDER/contexts; what results.json has already is not measured again."""

import json
import os
import sys
import time

import contexts
import numpy as np
from load import load
from model import Trained, f16
from sparse_decode import Attended, Config, Request, generate, run
from ucmclient import sparse

started = time.time()


def say(*words):
    print(f"{time.time() - started:6.0f} s", *words, flush=True)


# ---- what is compared ----

FULLY = ("recall 0 8192", "recall 1 8192", "text howto/logging-cookbook 8192")  # the others by fewer settings

def sweep(few=False):
    """[(text, order, what stands for a group)]: the same order and digest with rules that stop at different places."""
    out = []

    def add(name, key, values, order="digest", share="least"):
        out.extend((f"{name}{',' if ':' in name else ':'}{key}={value}", order, share) for value in values)

    add("topk:chosen=8", "topk_tokens", (96, 256, 512, 1024, 2048) if few else (96, 128, 256, 512, 1024, 2048))
    add("psa-estimated:chosen=8", "eps", (0.5, 0.9, 0.95) if few else (0.5, 0.8, 0.9, 0.95))
    add("topk:chosen=4", "topk_tokens", (256, 1024, 2048) if few else (128, 256, 512, 1024, 2048))
    add("topk:digest=hash,reduce=max", "topk_tokens", (128, 512, 2048) if few else (128, 256, 512, 1024))
    add("topk", "topk_tokens", (96, 256) if few else (96, 128, 256, 512), "oracle")
    add("psa-estimated:microbatch=1", "eps", (0.9,) if few else (0.5, 0.8, 0.9, 0.95), "oracle")
    add("auto:min_tokens=0", "goal", (0.8,) if few else (0.8, 0.9, 0.95))
    add("psa", "eps", (0.98,) if few else (0.9, 0.98))
    out.extend((f"topk:chosen=8,topk_tokens={tokens}", "digest", "least", keep) for tokens in (256, 1024) for keep in (2.0, 4.0, 8.0))
    for tokens in (256, 1024, 2048):
        text = f"topk:chosen=8,topk_tokens={tokens}"
        out += [(text, "digest", "least", 1.0, True), (f"{text},reuse=2", "digest", "least"), (f"{text},reuse=2", "digest", "least", 1.0, True)]
    out += [("psa-estimated:chosen=8,eps=0.95", "digest", "least", 1.0, False, first) for first in (16, 32, 64)]
    add("topk", "topk_tokens", (2048,), "window")
    out += [("auto", "digest", "least")]
    if few:
        return out + [("psa-estimated:chosen=4,eps=0.95", "digest", "least"), ("esa", "digest", "least")]
    add("topk", "topk_tokens", (2048,), "random")
    add("psa-estimated:chosen=4", "eps", (0.8, 0.9, 0.95))
    add("auto:chosen=4,min_tokens=0", "goal", (0.8, 0.9, 0.95))
    for chosen in (8, 4):
        add(f"psa-estimated:chosen={chosen}", "eps", (0.8, 0.9), share="mean")
    add("topk:digest=box", "topk_tokens", (256, 1024))
    add("topk:choice=mass,reduce=max,chosen=8", "eps", (0.9,))
    add("psa:digest=tokens,chosen=8", "eps", (0.98,))
    return out + [(name, "digest", "least") for name in ("esa", "gsa", "gsa-device", "kvstar", "kvstar-corrected", "psa-certified")]


def config(text, order, share, keep=1.0, coded=False, first=0):
    name = {"digest": text}.get(order, f"{order} {text}") + (f", kept against {keep:g} times" if keep != 1 else "") + ", fp8 slots" * coded
    name += f", at most 3 rounds, the first of {first} blocks" if first else ""
    full = text + (":" if ":" not in text else ",") + "dense_below=0"
    return Config(name if share == "least" else f"{name}, mean of heads", sparse.Policy(full), order, share, keep, coded, first)


# What continuations, whose steps can't be computed side by side, are asked for.
AGAIN = [("topk:topk_tokens=1024", "window", "least")] + [(text, "digest", "least") for text in (
    "topk:chosen=8,topk_tokens=1024", "topk:chosen=8,topk_tokens=2048", "psa-estimated:chosen=8,eps=0.95", "auto")]


# ---- contexts ----

def recall_steps(context, most=10):
    """(first step, last step) of the first questions of a recall context."""
    asked = context.asked[:most]
    return asked[0][1] - 6, asked[-1][1] + asked[-1][2]


class Case:
    """A context whose last steps are decoded, the dense model's logits of them, and the answers that it gives."""

    def __init__(self, model, context, begin, end):
        self.name, self.ids, self.begin, self.end = context.name, context.ids, begin, end
        self.request = Request(model, context.K, context.V, begin)
        self.asked = [a for a in context.asked if begin < a[1] and a[1] + a[2] <= end]
        self.dense = self.run(Config("dense"))
        self.dense_log = log_softmax(self.dense[:-1])
        self.right = [self.says(self.dense, a) for a in self.asked]

    def run(self, how, attended=None):
        return run(self.request.fork(), how, self.ids[self.begin:self.end], attended)

    def says(self, logits, asked):
        _, at, count = asked
        best = logits[at - 1 - self.begin:at - 1 - self.begin + count].argmax(-1)
        return bool((best == np.array(self.ids[at:at + count])).all())

    def measure(self, how):
        attended = Attended()
        logits = self.run(how, attended)
        mine, dense = log_softmax(logits[:-1]), self.dense_log
        target, rows = np.array(self.ids[self.begin + 1:self.end]), np.arange(len(self.dense) - 1)
        kept = [self.says(logits, a) for a, right in zip(self.asked, self.right) if right]
        return {"length": self.end, "steps": len(rows), "attended": attended.tokens / attended.of, "union": attended.union / attended.of,
                "tokens": attended.tokens / self.request.model.layers / len(self.dense), "asked": len(kept), "kept": sum(kept),
                "kl": float((np.exp(dense) * (dense - mine)).sum(-1, dtype=np.float64).mean()), "same": float((mine.argmax(-1) == dense.argmax(-1)).mean()),
                "worse": float((dense - mine)[rows, target].mean())}


class Continuation(Case):
    """The same, but each goes on by its own greedy tokens, whose KV counts; an answer is the dense model's continuation up to the first
    other token."""

    def __init__(self, model, context, begin, count):
        self.name, self.ids, self.begin, self.count = context.name, context.ids, begin, count
        self.request, self.right = Request(model, context.K, context.V, begin), []
        self.dense = self.goes_on(Config("dense"), None)

    def goes_on(self, how, attended):
        return generate(self.request.fork(), how, self.ids[self.begin], self.count, attended)

    def measure(self, how):
        attended = Attended()
        same = np.array(self.goes_on(how, attended)) == np.array(self.dense)
        kept = self.count if same.all() else int(same.argmin())
        return {"length": self.begin + self.count, "steps": self.count, "attended": attended.tokens / attended.of,
                "union": attended.union / attended.of, "tokens": attended.tokens / self.request.model.layers / self.count,
                "asked": self.count, "kept": kept, "same": float(same.mean()), "kl": 0.0, "worse": 0.0}


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def cases(model, folder, size):
    """Makers of cases, the cheapest first."""
    kv = os.path.join(folder, "contexts")
    os.makedirs(kv, exist_ok=True)

    def recall(seed, length):
        context = contexts.recall(kv, model, seed, length)
        return Case(model, context, *recall_steps(context))

    def text(name, length, steps):
        context = contexts.text(kv, model, name, length)
        return Case(model, context, length - steps, length)

    def goes_on(context, length, count=96):
        return Continuation(model, context, length - count, count)

    def passkey(length, depth):
        context = contexts.passkey(kv, model, length, depth, int(100 * depth) + length)
        return Case(model, context, context.asked[0][1] - 8, len(context.ids))

    if isinstance(model, Trained):
        if size == "short":
            return {"recall 0 512": lambda: recall(0, 512)}
        out = {f"recall {seed} {length}": (lambda seed=seed, length=length: recall(seed, length))
               for length, seeds in ((8192, 4), (32768, 2)) for seed in range(seeds)}
        return {**out, **{f"continuation {seed} 7680": (lambda seed=seed: goes_on(contexts.recall(kv, model, seed, 8192), 7680))
                          for seed in range(4)}}
    if size == "short":
        return {"text ezek 512": lambda: text("ezek", 512, 32)}
    out = {f"text {name} 8192": (lambda name=name: text(name, 8192, 96)) for name in ("howto/logging-cookbook", "ezek", "faq/programming")}
    out |= {f"continuation {name} 8192": (lambda name=name: goes_on(contexts.text(kv, model, name, 8192), 8192))
            for name in ("ezek", "faq/programming")}
    return {**out, **{f"passkey {n} {d}": (lambda n=n, d=d: passkey(n, d)) for n in (2048, 4096) for d in (0.1, 0.3, 0.5, 0.7, 0.9)}}


# ---- all ----

def main(path, folder, size="short", only=""):
    os.makedirs(folder, exist_ok=True)
    file = os.path.join(folder, "results.json")
    results = {}
    if os.path.exists(file):
        with open(file, encoding="utf-8") as old:
            results = json.load(old)

    def save():
        with open(file + ".new", "w", encoding="utf-8") as new:
            json.dump(results, new, indent=1)
        os.replace(file + ".new", file)

    model = load(path, f16)
    for name, make in cases(model, folder, size).items():
        if only and not name.startswith(only):
            continue
        rows, case = results.setdefault(name, {}), None
        todo = AGAIN if name.startswith("continuation") else sweep(name not in FULLY)
        for how in (config(*x) for x in (todo[::7] if size == "short" else todo)):
            if how.name in rows:
                continue
            if case is None:
                case = make()
                say(name, f"dense: {sum(case.right)} of {len(case.right)} answers")
            rows[how.name] = case.measure(how)
            save()
            r = rows[how.name]
            say(name, how.name, f"{r['attended']:.4f} {r['tokens']:.0f} tokens, union {r['union']:.3f}: {r['kept']} of {r['asked']}, same "
                f"{r['same']:.3f}, KL {r['kl']:.4f}")
    say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
