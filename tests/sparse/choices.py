#!/usr/bin/env python3
"""choices.py MODEL FOLDER [options]: which blocks consecutive decode steps choose, layer by layer, on a model that
tests/models/load.py knows. Writes FOLDER/NAME.npz for each text and digest; residency.py replays them.

The steps are those of a dense decode: what a step attends changes nothing in the steps behind it. With --prefix N the texts are requests
that have N tokens in common, the first text's, and go on with their own. --questions SEED is for what train.py makes: one text, which ends
in questions about records that lie far back."""

import argparse
import dataclasses
import os
import time

import numpy as np
import tasks
import texts
from decode import BLOCK, State, ranks, run
from load import load
from model import f16, to_numpy, xp
from scorers import DIGESTS, by_digest

DEEPEST = 1 / 4  # ranks below this share of the blocks are not written down
METHODS = {"tokens": "tokens 4, rest", "mean": "mean"}


class Prefilled(State):
    """A text whose first `begin` tokens have their keys and values; none of what State keeps for other studies."""

    def __init__(self, model, ids, begin, K, V):
        self.model, self.ids, self.begin, self.K, self.V = model, ids, begin, K, V
        self.digests = {}


class Recorder:
    """Sees each layer of the steps; by digest: blocks in order of rank, their scores, the attention mass that they have in fact, and the ranks
    that layer l would have with the query guessed from what entered layer l - 1."""

    def __init__(self, model):
        self.made = {name: dataclasses.replace(DIGESTS[method], kv_heads=model.kv_heads, head_dim=model.d)
                     for name, method in METHODS.items()}
        self.layers = {name: [] for name in METHODS}

    def look(self, step, values):
        guessed = dataclasses.replace(step, q=step.model.queries(step.layer, step.before, step.positions))
        depth, mass = int((step.own[0] + 1) * DEEPEST), to_numpy(step.mass().mean(1)).swapaxes(0, 1)
        for name, digest in self.made.items():
            score = by_digest(digest)(step)
            order, scores = best(step, score, depth)
            guess, _ = best(guessed, by_digest(digest)(guessed), depth // 2)
            self.layers[name].append((order, scores, guess, np.take_along_axis(mass, order.astype(np.int64), -1).astype(np.float16)))

    def save(self, folder, text, state, prefix):
        for name, layers in self.layers.items():
            order, scores, guess, mass = (np.stack(part) for part in zip(*layers))
            np.savez(os.path.join(folder, f"{text.replace('/', '_')}.{name}.npz"), order=order, scores=scores, guess=guess, mass=mass,
                     own=np.arange(state.begin, len(state.ids)) // BLOCK, born=state.begin // BLOCK, prefix=prefix // BLOCK)


def best(step, score, depth):
    """-> uint16[T, heads, depth], the blocks in order of rank, windows first; their scores, of 1 in all."""
    order = to_numpy(xp.argsort(ranks(step, score), axis=-1)[..., :depth])
    share = np.take_along_axis(to_numpy(score) / step.model.group, order, -1)
    return order.swapaxes(0, 1).astype(np.uint16), share.swapaxes(0, 1).astype(np.float16)


def steps_of(model, pieces, steps, prefix):
    """(name, Prefilled) of each text."""
    for i, (name, ids) in enumerate(pieces):
        if prefix and i:  # the keys of the prefix are there; what comes behind it is decoded with the steps
            yield f"request-{i}", Prefilled(model, first[1][:prefix] + ids[prefix:], prefix, K, V)
            continue
        first = name, ids
        K, V = model.prefill(ids[:prefix or len(ids) - steps])[1:3]
        yield ("request-0" if prefix else name), Prefilled(model, ids, prefix or len(ids) - steps, K, V)


def main():
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("model"), asked.add_argument("folder")
    for name, value in (("texts", 4), ("length", 8192), ("steps", 512), ("prefix", 0), ("questions", 0)):
        asked.add_argument("--" + name, type=int, default=value)
    asked = asked.parse_args()
    os.makedirs(asked.folder, exist_ok=True)
    model, started = load(asked.model, f16), time.time()
    pieces = texts.pieces(model.tokenizer, asked.texts, asked.length)
    if asked.questions:
        pieces = [("questions", tasks.questions(asked.questions, tasks.held_out(), asked.length)[0])]
    for name, state in steps_of(model, pieces, asked.steps, asked.prefix):
        recorder = Recorder(model)
        run(state, None, recorder.look)
        recorder.save(asked.folder, name, state, asked.prefix)
        print(f"{time.time() - started:6.0f} s {name}", flush=True)


if __name__ == "__main__":
    main()
