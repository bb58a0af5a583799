"""Choices of consecutive steps, replayed against a hot set that CLOCK keeps."""

import numpy as np


def overlap(chosen, windows):
    """chosen[lanes, T, blocks] -> [lanes]: what share of a step's blocks the step before chose too, windows left out."""
    mine = chosen & ~windows
    both = (mine[:, 1:] & mine[:, :-1]).sum((1, 2))
    return both / np.maximum(mine[:, 1:].sum((1, 2)), 1)


class Clock:
    """Slots of a hot set. A step's blocks stay while the step runs: first those that are there are marked, then the others come in."""

    def __init__(self, slots):
        self.block, self.used, self.place, self.hand = [-1] * slots, [False] * slots, {}, 0

    def step(self, blocks):
        """The blocks of one step that missed; there are no more blocks than slots."""
        pinned, missed = set(blocks), []
        for block in blocks:
            at = self.place.get(block)
            if at is None:
                missed.append(block)
            else:
                self.used[at] = True
        for block in missed:
            while self.used[self.hand] or self.block[self.hand] in pinned:
                if self.block[self.hand] not in pinned:
                    self.used[self.hand] = False
                self.hand = (self.hand + 1) % len(self.block)
            self.place.pop(self.block[self.hand], None)
            self.block[self.hand], self.place[block], self.used[self.hand] = block, self.hand, True
            self.hand = (self.hand + 1) % len(self.block)
        return missed


def miss_rate(steps, slots, born, settle=32):
    """steps: a list of accessed blocks each. Blocks from `born` on were made by the steps themselves and are put in when first
    seen, which is no miss. The first `settle` steps fill the hot set and are not counted. -> (misses, accesses)"""
    clock, misses, accesses, known = Clock(slots), 0, 0, set()
    for t, blocks in enumerate(steps):
        missed = clock.step(blocks)
        if t >= settle:
            misses += sum(block < born or block in known for block in missed)
            accesses += len(blocks)
        known.update(blocks)
    return misses, accesses


def lists(chosen):
    """bool[T, blocks] -> blocks of each step."""
    return [np.flatnonzero(row).tolist() for row in chosen]


def replay(packed, shape, windows, born, layers, multiples=(1, 2, 4)):
    """packed: bits of chosen[layers * heads, T, blocks]. Slots are multiples of the most blocks that a step attends."""
    chosen = np.unpackbits(packed, count=int(np.prod(shape))).reshape(shape).astype(bool)
    lanes, T, nb = shape
    heads = lanes // layers
    out = {"overlap": overlap(chosen, windows[None]).reshape(layers, heads).mean(1).tolist()}
    union = chosen.reshape(layers, heads, T, nb).any(1)
    out["union"] = float(union.sum() / chosen.sum() * heads)
    out["union_overlap"] = overlap(union, windows[None]).tolist()
    per_lane = [lists(c) for c in chosen]
    whole = [lists(c) for c in union]
    for m in multiples:
        slots = int(m * chosen.sum(-1).max())
        pairs = np.array([miss_rate(lane, slots, born) for lane in per_lane]).reshape(layers, heads, 2).sum(1)
        out[f"miss_{m}"] = (pairs[:, 0] / pairs[:, 1]).tolist()
        pairs = np.array([miss_rate(lane, int(m * u.sum(-1).max()), born) for lane, u in zip(whole, union)])
        out[f"union_miss_{m}"] = (pairs[:, 0] / pairs[:, 1]).tolist()
    return out
