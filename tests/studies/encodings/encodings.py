#!/usr/bin/env python3
"""How much do encodings lose? encodings.py GGUF FOLDER [short|full], on SmolLM2-135M. docs/encodings.md has the answer. Writes FOLDER/results.json,
which report.py makes tables of; a row that the file has already is not measured again.

A text is prefilled plain, as an engine does it. Then its first N tokens' K and V are encoded and decoded, block by block of 16 tokens, and
the steps behind them attend to that: what a hit of N tokens gives. Their own K and V are plain."""

import functools
import json
import os
import sys
import time

import numpy as np
import texts
import variants
from model import Model, bf16, f32, to_numpy, xp

import methods

methods.np = xp
BLOCK = 16
# texts, lengths: how many, and the N behind which `steps` tokens are predicted. ends: N with first and last tokens plain. outliers: texts, N.
# keys: (N, depth) of passkeys.
SIZES = {
    "short": {"texts": 2, "lengths": (128, 896), "ends": (896,), "outliers": (1, 896), "steps": 128, "keys": ((512, 0.5),)},
    "full": {"texts": 12, "lengths": (128, 512, 1024, 2048, 4096, 7680), "ends": (1024, 7680), "outliers": (2, 1024),
             "steps": 512, "keys": tuple((n, d) for n in (1024, 2048, 4096, 6144) for d in (0.1, 0.3, 0.5, 0.7, 0.9))},
}
ENCODINGS = {"fp8": {"encoding": "fp8"}, "int8": {"encoding": "int8"}, "int8, K a channel": {"encoding": "int8", "axis": 1},
             "q4": {"encoding": "q4", "seed": 1}}
ALONE = ("fp8", "int8", "q4")
ENDS = ((16, 0), (64, 0), (128, 0), (0, 16), (0, 64), (0, 128), (64, 64))
OUTLIERS = (1, 4, 16, 64)
started = time.time()


def say(*words):
    print(f"{time.time() - started:6.0f} s", *words, flush=True)


# ---- encoded K and V ----

def by_encoding(kind, name):
    def there_and_back(x):
        spec = methods.Spec(kind=kind, tokens=BLOCK, heads=x.shape[2], dim=x.shape[3], **ENCODINGS[name])
        return methods.bf16(methods.round_trip(spec, (x.view(xp.uint32) >> xp.uint32(16)).astype(xp.uint16)))
    return there_and_back


def as_cached(*codes):
    return tuple((lambda x, code=code: bf16(xp.ascontiguousarray(code(x), f32))) for code in codes)


def coders():
    """{name: what K goes through, what V}; None: it stays."""
    out = {name: (by_encoding(methods.K, name), by_encoding(methods.V, name)) for name in ENCODINGS}
    for name in ALONE:
        out[f"{name}, K alone"], out[f"{name}, V alone"] = (out[name][0], None), (None, out[name][1])
    for name, (k, v, _) in variants.VARIANTS.items():
        out[name] = as_cached(k, v)
    return out


class Text:
    """A text after its plain prefill. K, V: [layers, tokens, KV heads, dim]."""

    def __init__(self, model, name, ids):
        self.model, self.name, self.ids = model, name, ids
        k, v = model.prefill(ids)
        self.k, self.v = xp.stack(k), xp.stack(v)
        self.plain = {}

    def through(self, code, x):
        if code is None:
            return x
        n = x.shape[1] // BLOCK * BLOCK
        return code(x[:, :n].reshape(-1, BLOCK, *x.shape[2:])).reshape(x.shape[0], n, *x.shape[2:])

    def steps(self, k, v, at, steps):
        """Log probabilities of `steps` tokens behind `at` that the encoded k, v stand for."""
        model, positions = self.model, np.arange(at, at + steps)
        h = model.embed(self.ids[at:at + steps])
        for layer in range(model.layers):
            q, own_k, own_v = model.qkv(layer, h, positions)
            keys, values = xp.concatenate([k[layer, :at], own_k]), xp.concatenate([v[layer, :at], own_v])
            h = model.after_attention(layer, h, model.attend(q, keys, values, model.allowed(positions, at + steps)))
        x = model.logits(h)
        x -= x.max(-1, keepdims=True)
        return x - xp.log(xp.exp(x).sum(-1, keepdims=True))

    def reference(self, at, steps):
        if (at, steps) not in self.plain:
            if xp is np:
                self.plain.clear()  # some hundred MB each
            self.plain[at, steps] = self.steps(self.k, self.v, at, steps)
        return self.plain[at, steps]

    def compare(self, k, v, at, steps):
        """Means over the steps: [nll, nll of plain, KL(plain, this), same greedy token]."""
        plain, mine = self.reference(at, steps)[:-1], self.steps(k, v, at, steps)[:-1]
        rows, target = xp.arange(steps - 1), xp.asarray(self.ids[at + 1:at + steps])
        kl = (xp.exp(plain) * (plain - mine)).sum(-1)
        same = (plain.argmax(-1) == mine.argmax(-1)).astype(f32)
        return to_numpy(xp.stack([-mine[rows, target], -plain[rows, target], kl, same])).astype(float).mean(1).tolist()


def with_plain_ends(x, plain, at, first, last):
    if not first and not last:
        return x
    x = x[:, :at].copy()
    x[:, :first] = plain[:, :first]
    x[:, at - last:at] = plain[:, at - last:at]
    return x


# ---- what is measured ----

def nmse(x, y):
    """Squared error over squares, the mean of layers and heads."""
    return float(to_numpy((((x - y) ** 2).sum((1, 3)) / (x ** 2).sum((1, 3))).mean()))


def ends_of(name):
    return ENDS[:1] if name == "int8, K a channel" else ENDS


def missing(results, name, settings):
    """The coders of which a text lacks a row."""
    have = results["texts"].get(name, {"by_length": {}, "ends": {}})

    def complete(coder):
        return len(have["by_length"].get(coder, ())) == len(settings["lengths"]) and (coder not in ENCODINGS or all(
            len(have["ends"].get(f"{coder}, {first} + {last}", ())) == len(settings["ends"]) for first, last in ends_of(coder) if settings["ends"]))

    return {coder: codes for coder, codes in coders().items() if not complete(coder)}


def measure_text(results, text, settings, todo):
    """Rows [nll, nll of plain, KL, same] of this text: by coder and length; by coder, ends and length."""
    lengths, steps = settings["lengths"], settings["steps"]
    out = results["texts"].setdefault(text.name, {"by_length": {}, "ends": {}, "nmse": {}})
    encoded = {}
    for name, (code_k, code_v) in todo.items():
        k, v = text.through(code_k, text.k), text.through(code_v, text.v)
        if name in ENCODINGS:
            encoded[name] = k, v
        n = k.shape[1]
        out["nmse"][name] = [nmse(text.k[:, :n], k[:, :n]), nmse(text.v[:, :n], v[:, :n])]
        if xp is np:
            continue
        for at in lengths:
            out["by_length"].setdefault(name, {})[str(at)] = text.compare(k, v, at, steps)
    if xp is np:  # a length after the other, because the reference is forgotten
        for at in lengths:
            for name, (code_k, code_v) in todo.items():
                k, v = encoded[name] if name in encoded else (text.through(code_k, text.k[:, :at]), text.through(code_v, text.v[:, :at]))
                out["by_length"].setdefault(name, {})[str(at)] = text.compare(k, v, at, steps)
    for at in settings["ends"]:
        for name, (k, v) in encoded.items():
            for first, last in ends_of(name):
                row = text.compare(with_plain_ends(k, text.k, at, first, last), with_plain_ends(v, text.v, at, first, last), at, steps)
                out["ends"].setdefault(f"{name}, {first} + {last}", {})[str(at)] = row
    plain = np.exp(next(iter(out["by_length"].values()))[str(lengths[-1])][1])
    say(text.name, f"perplexity {plain:.2f}", {name: f"{np.mean([r[2] for r in rows.values()]):.5f}" for name, rows in
                                               out["by_length"].items() if name in ENCODINGS})


def with_outliers(code, factor):
    """In each layer and KV head, the pair of K's channels that RoPE turns together and that has most energy is `factor` times larger when it is
    encoded, and smaller again behind that. A model whose weights of K have that factor, and those of Q its inverse, computes the same."""
    def there_and_back(k):
        energy = (k * k).sum((1,)).reshape(k.shape[0], k.shape[2], 2, -1).sum(2)  # [layers, heads, pairs]
        pair = xp.arange(energy.shape[-1]) == energy.argmax(-1)[..., None]
        scale = xp.where(xp.concatenate([pair, pair], -1), f32(factor), f32(1))[:, None]
        return code(k * scale) / scale
    return there_and_back


def measure_outliers(results, name, text, settings):
    _, at = settings["outliers"]
    for coder in (*ENCODINGS, "q4 without shifts"):
        code_k, code_v = coders()[coder]
        rows = [results["outliers"].setdefault(f"{coder}, {factor}", {}) for factor in OUTLIERS]
        if all(name in row for row in rows):
            continue
        v = text().through(code_v, text().v[:, :at])
        for factor, row in zip(OUTLIERS, rows):
            k = with_outliers(lambda x, code=code_k: text().through(code, x), factor)(text().k[:, :at])
            row[name] = text().compare(k, v, at, settings["steps"])
        say("outliers", name, coder)


def measure_key(row, model, settings):
    """Whether the digits come out greedily where the text before the question went through an encoding."""
    length, depth = row["length"], row["depth"]
    todo = {name: codes for name, codes in coders().items() if "alone" not in name and name not in row.get("found", {})}
    if not todo or not row.get("plain", True):
        return
    ids, at, digits = texts.passkey(model.tokenizer, length, depth, int(100 * depth) + length)
    text, begin = Text(model, "passkey", ids), (at - 8) // BLOCK * BLOCK
    right = np.array(ids[at:at + digits])

    def says(k, v):
        best = to_numpy(text.steps(k, v, begin, len(ids) - begin).argmax(-1))
        return bool((best[at - 1 - begin:][:digits] == right).all())

    row["plain"] = says(text.k, text.v)
    if row["plain"]:
        row.setdefault("found", {}).update({name: says(text.through(k, text.k[:, :begin]), text.through(v, text.v[:, :begin]))
                                            for name, (k, v) in todo.items()})


def check_results(results):
    """What must hold if the harness measures what it says."""
    for name, text in results["texts"].items():
        for at in map(str, results["settings"]["lengths"]):
            rows = {coder: lengths[at] for coder, lengths in text["by_length"].items()}
            assert 1.1 < np.exp(rows["int8"][1]) < 60, f"{name}: the plain model is not itself"
            assert rows["int8"][2] < rows["q4"][2] < rows["4 bits, absmax a row"][2] < 1, f"{name} at {at}: the KLs are out of order"
    for name in results["outliers"].get("q4, 1", ()):
        small, large = (results["outliers"][f"q4, {factor}"][name][2] for factor in (OUTLIERS[0], OUTLIERS[-1]))
        assert large < 1.5 * small, f"{name}: outliers in K cost q4 a KL of {large}, not {small}"


def main(path, folder, size="short"):
    settings = SIZES[size]
    os.makedirs(folder, exist_ok=True)
    file = os.path.join(folder, "results.json")
    results = {"size": size, "texts": {}, "keys": []}
    if os.path.exists(file):
        with open(file, encoding="utf-8") as old:
            results = json.load(old)
        assert results["size"] == size, f"{file} is of another size"
    results["settings"] = settings
    results.setdefault("outliers", {})

    def save():
        with open(file + ".new", "w", encoding="utf-8") as new:
            json.dump(results, new, indent=1)
        os.replace(file + ".new", file)

    if xp is np and size.endswith("full"):
        say("no GPU: this takes a core for many hours and 8 GiB. What was measured is kept in results.json: stop it and run it again as you like.")
    model = Model(path, bf16)
    pieces = texts.pieces(model.tokenizer, settings["texts"], settings["lengths"][-1] + settings["steps"])
    for name, ids in pieces:
        todo = missing(results, name, settings)
        if todo:
            measure_text(results, Text(model, name, ids), settings, todo)
            save()
    for length, depth in settings["keys"]:
        row = next((row for row in results["keys"] if (row["length"], row["depth"]) == (length, depth)), None)
        if row is None:
            row = {"length": length, "depth": depth}
            results["keys"].append(row)
        measure_key(row, model, settings)
        save()
    say("passkeys", sum(row["plain"] for row in results["keys"]), "of", len(results["keys"]))
    count, at = settings["outliers"]
    for name, ids in texts.pieces(model.tokenizer, count, at + settings["steps"]):
        measure_outliers(results, name, functools.cache(lambda name=name, ids=ids: Text(model, name, ids)), settings)
        save()
    check_results(results)
    say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
