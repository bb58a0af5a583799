#!/usr/bin/env python3
"""train.py FOLDER [short|full] [SECONDS]: trains a decoder whose context reaches 32,768 bytes and that looks up what it read far before, and
writes its weights to FOLDER. `full` is for one large GPU and takes two minutes of it; `short` shows on a CPU that the program works.

Data and first weights come from a seed. A stage ends after its steps, or after its part of SECONDS if that is sooner, and what was run is written
to shape.json: a slower GPU makes a worse model, not a longer run."""

import collections
import math
import multiprocessing
import os
import sys
import time

import decoder
import numpy as np
import tasks
import torch
import torch.nn.functional as F

SEED = 16
AHEAD = 64  # batches
# (length, steps, part of the seconds)
SIZES = {
    "short": {"shape": decoder.Shape(layers=2, width=64, heads=2, kv_heads=1, d=32, hidden=128, context=1024), "tokens": 2048, "rate": 4e-3,
             "stages": ((256, 150, 0.5), (1024, 50, 0.5))},
    "full": {"shape": decoder.Shape(), "tokens": 65536, "rate": 3e-3,
             "stages": ((512, 297, 0.17), (2048, 492, 0.28), (8192, 264, 0.2), (32768, 226, 0.35))},
}
started = time.time()


def say(*words):
    print(f"{time.time() - started:6.1f} s", *words, flush=True)


# ---- data ----

def use(text):
    make_batch.text = text


def make_batch(number, sequences, length):
    return tasks.batch(SEED, number, make_batch.text, sequences, length)


def batches(pool, steps, sequences, length):
    """(bytes, weights) of one step after the other; other processes make them, at most AHEAD before they are wanted."""
    coming = collections.deque()
    for number in range(steps + AHEAD):
        if number < steps:
            coming.append(pool.apply_async(make_batch, (number, sequences, length)))
        if number >= AHEAD:
            yield coming.popleft().get()


# ---- optimizer ----

def orthogonal(x):
    """Each matrix of x[n, in, out] with all of its singular values near 1, by Newton's and Schulz's iteration."""
    x = x.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon for the layers' matrices, those of one shape at once; AdamW for the rest. float32 beside the `used` ones, of dtype, of the forward
    pass."""

    def __init__(self, master, dtype):
        self.master, self.t = master, 0
        self.used = {name: w.to(dtype, copy=True).requires_grad_() for name, w in master.items()}
        self.groups, self.others = {}, []
        for name, w in master.items():
            if "blk." in name and w.ndim == 2:
                self.groups.setdefault(tuple(w.shape), []).append(name)
            else:
                self.others.append(name)
        self.first = {name: torch.zeros_like(w) for name, w in master.items()}
        self.second = {name: torch.zeros_like(master[name]) for name in self.others}

    @torch.no_grad()
    def step(self, rate):
        self.t += 1
        for shape, names in self.groups.items():
            grad = torch.stack([self.used[name].grad for name in names]).float()
            first = torch.stack([self.first[name] for name in names]).lerp_(grad, 0.05)
            update = orthogonal(grad.lerp(first, 0.95)).float() * (0.2 * math.sqrt(max(shape)))
            for name, m, u in zip(names, first, update):
                self.first[name].copy_(m)
                self.master[name].mul_(1 - 0.05 * rate).sub_(u, alpha=rate)
        for name in self.others:
            grad = self.used[name].grad.float()
            m, v = self.first[name].lerp_(grad, 0.1), self.second[name].lerp_(grad * grad, 0.05)
            update = (m / (1 - 0.9 ** self.t)) / ((v / (1 - 0.95 ** self.t)).sqrt() + 1e-8)
            self.master[name].sub_(update, alpha=rate)
        for name, w in self.used.items():
            w.copy_(self.master[name])
            w.grad = None


# ---- what it can ----

def octaves(pairs):
    """{power of two at or below: mean} of (number, value)."""
    out = {}
    for number, value in pairs:
        out.setdefault(2 ** int(math.log2(max(1, number))), []).append(value)
    return {key: round(float(np.mean(values)), 4) for key, values in sorted(out.items())}


@torch.no_grad()
def quality(shape, weights, text, length, device, count=8):
    """What of text that it never saw the decoder does not foresee, in nats a byte by position; share of values found whole, by distance."""
    turn, losses, found = decoder.angles(shape, length, device), [], []
    for i in range(count):
        ids = torch.from_numpy(text[i * length:(i + 1) * length].copy()).to(device).long()[None]
        out = decoder.logits(shape, weights, ids, turn)[0, :-1].float()
        losses.append(F.cross_entropy(out, ids[0, 1:], reduction="none").cpu().numpy())
        ids, asked = tasks.questions(i, text[i * length:(i + 1) * length], length)
        best = decoder.logits(shape, weights, torch.tensor([ids], device=device), turn)[0].argmax(-1).tolist()
        found += [(distance, best[at - 1:at - 1 + tasks.VALUE] == ids[at:at + tasks.VALUE]) for distance, at in asked]
    return {"loss": octaves(enumerate(np.mean(losses, 0), 1)), "recall": octaves(found)}


# ---- training ----

def main(folder, size="short", seconds="1e9"):
    settings, seconds = SIZES[size], float(seconds)
    shape, tokens, stages = settings["shape"], settings["tokens"], settings["stages"]
    text, held_out = tasks.corpus(), tasks.held_out()
    pool = multiprocessing.get_context("fork").Pool(min(12, os.cpu_count()), use, (text,))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    optimizer = Optimizer(decoder.initial(shape, SEED, device), torch.bfloat16 if device == "cuda" else torch.float32)
    about = {"size": size, "seed": SEED, "parameters": sum(w.numel() for w in optimizer.master.values()), "text": len(text), "steps": {}}
    say(about, device)
    begin, before = time.time(), 0.0
    for length, steps, part in stages:
        turn, entered = decoder.angles(shape, length, device), time.time()
        limit = max(1e-3, begin + seconds * (before + part) - entered)
        for number, (ids, weight) in enumerate(batches(pool, steps, tokens // length, length)):
            spent = max(number / steps, (time.time() - entered) / limit)
            if spent >= 1:
                break
            ids, weight = (torch.from_numpy(a).to(device).long() for a in (ids, weight))
            out = decoder.logits(shape, optimizer.used, ids[:, :-1], turn).view(-1, shape.vocabulary)
            losses = F.cross_entropy(out.float(), ids[:, 1:].reshape(-1), reduction="none") * weight.view(-1)
            loss = losses.sum() / weight.sum()
            loss.backward()
            optimizer.step(settings["rate"] * min(1, (optimizer.t + 1) / 50) * min(1, 2 * (1 - before - part * spent)))
            if number % 50 == 0:
                say(f"{length} step {number}, loss {loss.item():.3f}")
        about["steps"][length] = optimizer.t - sum(about["steps"].values())
        before += part
        say(length, about["steps"][length], "steps", quality(shape, optimizer.used, held_out, length, device, 2))
    pool.terminate()
    about["seconds"] = round(time.time() - begin, 1)
    about["quality"] = {length: quality(shape, optimizer.used, held_out, length, device) for length, _, _ in stages}
    decoder.save(shape, optimizer.master, folder, about)
    say(about)


if __name__ == "__main__":
    main(*sys.argv[1:])
