#!/usr/bin/env python3
"""residency.py TABLE FOLDER...: replays what choices.py recorded against a pool of slots on the GPU, and prints how often it misses. TABLE:
policies, pools, choices, ahead, prefixes; with prefixes each folder is a batch of requests, else each is a model.

One pool for all layers. A slot holds one layer of one block, for all KV heads; a step goes through the layers in order and needs in each the
union of its heads' choices, those of the local window left out: the engine has them. What a step used stays until it ends."""

import argparse
import glob
import os

import numpy as np

LOCAL = 2   # blocks of the local window, beside the step's own
SETTLE = 64  # steps that fill the pool, not counted
GROUP = 32   # slots that a warp looks at
NEVER = 1 << 30
# KV of Llama-3.1-8B at 128k: 8,192 blocks of 8 KiB for each of 8 KV heads of 32 layers.
LLAMA_MIB = 16384


class Choices:
    """Of one recording: what each step chose. Its share, and how it chooses if not by its scores alone."""

    def __init__(self, file, share, sticky=0.0, stride=1):
        with np.load(file) as data:
            order, scores, own, self.born, prefix = (data[k] for k in ("order", "scores", "own", "born", "prefix"))
            self.guess, mass = data["guess"], data["mass"]
        self.layers, self.steps, self.heads = order.shape[:3]
        self.name, self.own, self.prefix, self.blocks = os.path.basename(file)[:-4], own, int(prefix), int(own[-1]) + 1
        self.score = np.zeros((self.steps, self.layers, self.heads, self.blocks), np.float32)
        np.put_along_axis(self.score, order.swapaxes(0, 1).astype(np.int64), scores.swapaxes(0, 1).astype(np.float32), -1)
        self.budget = np.maximum(((own + 1) * share).astype(int) - 1, 4)  # beside its own block, as decode.Step.budget
        self.needs = float((self.budget - LOCAL)[SETTLE:].mean())  # blocks of a KV head
        self.chosen = self.choose(sticky, stride)
        there = np.take_along_axis(self.chosen, order.swapaxes(0, 1).astype(np.int64), -1)
        self.mass = float((mass.swapaxes(0, 1) * there)[SETTLE:].sum(-1, dtype=np.float64).mean())

    def choose(self, sticky, stride):
        """bool[T, layers, heads, blocks]. sticky: what a block's score gains if the step before had chosen it. stride: steps of a choice."""
        out = np.zeros(self.score.shape, bool)
        for t in range(self.steps):
            if t % stride:
                out[t] = out[t - 1]
            else:
                out[t] = self.best(self.score[t] * (1 + sticky * out[t - 1]) if t and sticky else self.score[t], t, self.budget[t])
        return out

    def again(self):
        """Share of a step's blocks that the step before chose too, for the union of the heads; windows left out."""
        union = self.chosen.any(2)
        union[..., 0] = False
        for t in range(self.steps):
            union[t, :, self.own[t] - LOCAL:] = False
        return float((union[1:] & union[:-1]).sum() / union[1:].sum())

    def needed(self, t, mask):
        """mask bool[layers, heads, blocks] without the local window."""
        mask = mask.copy()
        mask[..., self.own[t] - LOCAL:] = False
        return mask

    def by_guess(self, t, factor):
        """What a step's guessed queries choose."""
        mask = np.zeros(self.chosen.shape[1:], bool)
        np.put_along_axis(mask, self.guess[:, t, :, :int(self.budget[t] * factor)].astype(np.int64), True, -1)
        return mask

    def by_last(self, t, factor):
        """The best of the step before."""
        return self.best(self.score[max(t - 1, 0)], t, int(self.budget[t] * factor))

    def best(self, value, t, k):
        """The k best, windows before all others."""
        value, mask = value.copy(), np.zeros(value.shape, bool)
        value[..., 0] = np.inf
        value[..., self.own[t] - LOCAL:self.own[t]] = np.inf
        np.put_along_axis(mask, np.argpartition(-value, k - 1)[..., :k], True, -1)
        return mask


class Trace:
    """Accesses: at[t][layer] are keys, each once; worth their scores, of which a layer's best is 1; due the step that uses each next; extra
    what is brought ahead. made: keys that the steps themselves made, which come from HBM at first."""

    def __init__(self, layers, blocks):
        self.layers, self.blocks, self.keys = layers, blocks, layers * blocks
        self.at, self.worth, self.extra, self.made = [], [], [], np.zeros(layers * blocks, bool)

    def finish(self):
        due = np.full(self.keys, NEVER)
        self.steps, self.due = len(self.at), [None] * len(self.at)
        for t in range(self.steps - 1, -1, -1):
            self.due[t] = [due[keys] for keys in self.at[t]]
            for keys in self.at[t]:
                due[keys] = t
        used = [sum(map(len, step)) for step in self.at]
        self.most, self.mean = max(used), float(np.mean(used[SETTLE:]))
        return self


def of_one(c, each_head=False, ahead=None):
    """The trace of one request. each_head: a slot holds one KV head. ahead: (Choices.by_last or by_guess, factor)."""
    trace = Trace(c.layers, c.blocks * (c.heads if each_head else 1))
    trace.made[:] = np.tile(np.arange(c.blocks) >= c.born, trace.keys // c.blocks)
    for t in range(c.steps):
        wanted = [c.needed(t, c.chosen[t])] + ([c.needed(t, ahead[0](c, t, ahead[1]))] if ahead else [])
        rows = [m.reshape(c.layers, -1) if each_head else m.any(1) for m in wanted]
        score = c.score[t].reshape(c.layers, -1) if each_head else c.score[t].max(1)
        best = np.maximum(np.where(rows[0], score, 0)[:, 1:].max(-1), 1e-9)
        trace.at.append([np.flatnonzero(row) + layer * trace.blocks for layer, row in enumerate(rows[0])])
        trace.worth.append([np.minimum(s[row] / b, 1) for s, row, b in zip(score, rows[0], best)])
        if ahead:
            trace.extra.append([np.flatnonzero(row) + layer * trace.blocks for layer, row in enumerate(rows[1])])
    return trace.finish()


def of_batch(choices, shared):
    """Requests that step together; if shared, those below their common prefix have the same numbers."""
    first = np.cumsum([0] + [c.blocks for c in choices])
    trace = Trace(choices[0].layers, int(first[-1]))
    made = np.concatenate([np.arange(c.blocks) >= c.born for c in choices])
    trace.made[:] = np.tile(made, trace.layers)
    for t in range(min(c.steps for c in choices)):
        union = np.zeros((trace.layers, trace.blocks), bool)
        for i, c in enumerate(choices):
            mask = c.needed(t, c.chosen[t]).any(1)
            p = c.prefix if shared else 0
            union[:, :p] |= mask[:, :p]
            union[:, first[i] + p:first[i] + c.blocks] |= mask[:, p:]
        trace.at.append([np.flatnonzero(row) + layer * trace.blocks for layer, row in enumerate(union)])
        trace.worth.append([np.ones(len(a)) for a in trace.at[-1]])
    return trace.finish()


# ---- policies: which slots to take; never one with this step's stamp ----

class Pool:
    """Slots without a policy. stamp: the last step that used a slot."""

    def __init__(self, slots, keys):
        self.slots, self.slot_of = slots, np.full(keys, -1)
        self.key, self.stamp = np.full(slots, -1), np.full(slots, -1)
        self.t, self.hand = 0, 0
        self.start()

    def start(self):
        pass

    def used(self, slots, worth, due, hit):
        pass

    def put(self, keys, worth, due):
        """One layer's keys. -> indices of those that missed."""
        at = self.slot_of[keys]
        hit = at >= 0
        self.stamp[at[hit]] = self.t
        self.used(at[hit], worth[hit], due[hit], True)
        missed = np.flatnonzero(~hit)
        if len(missed):
            slots = self.take(len(missed))
            old = self.key[slots]
            self.slot_of[old[old >= 0]] = -1
            self.key[slots], self.slot_of[keys[missed]], self.stamp[slots] = keys[missed], slots, self.t
            self.used(slots, worth[missed], due[missed], False)
        return missed

    def least(self, value, count):
        value = np.where(self.stamp == self.t, np.inf, value)
        slots = np.argpartition(value, count - 1)[:count] if count < self.slots else np.arange(self.slots)
        assert np.isfinite(value[slots]).all(), "a step needs more slots than there are"
        return slots


class Lru(Pool):
    """The oldest stamp."""

    def take(self, count):
        return self.least(self.stamp, count)


class Belady(Pool):
    """The one that is used again last. Nobody knows it: the bound of all."""

    def start(self):
        self.due = np.full(self.slots, NEVER)

    def used(self, slots, worth, due, hit):
        self.due[slots] = due

    def take(self, count):
        return self.least(-self.due.astype(float) - (self.key < 0), count)


class Hybrid(Pool):
    """The seeds': least .7 score + .3 / (age + 1), age in steps."""

    def start(self):
        self.worth = np.zeros(self.slots)

    def used(self, slots, worth, due, hit):
        self.worth[slots] = worth

    def take(self, count):
        return self.least(np.where(self.key < 0, -1, 0.7 * self.worth + 0.3 / (self.t - self.stamp + 1)), count)


class Clock(Pool):
    """A use gives lives; the hand takes one from a slot that has some, and takes the slot if it has none."""
    lives = 1

    def start(self):
        self.life = np.zeros(self.slots, int)

    def used(self, slots, worth, due, hit):
        self.life[slots] = 1

    def take(self, count):
        taken = np.zeros(0, int)
        for _ in range(self.lives + 2):
            turn = np.roll(np.arange(self.slots), -self.hand)
            free = self.stamp[turn] != self.t
            free[np.isin(turn, taken)] = False
            ripe = np.flatnonzero(free & (self.life[turn] == 0))[:count - len(taken)]
            passed = self.slots if len(taken) + len(ripe) < count else ripe[-1] + 1
            old = turn[:passed][free[:passed]]
            self.life[old] = np.maximum(self.life[old] - 1, 0)
            taken = np.concatenate([taken, turn[ripe]])
            self.hand = (self.hand + passed) % self.slots
            if len(taken) == count:
                return taken
        raise AssertionError("a step needs more slots than there are")


class ColdClock(Clock):
    """What was used once only has no life."""

    def used(self, slots, worth, due, hit):
        self.life[slots] = int(hit)


class ScoreClock(Clock):
    """A life more for a twentieth of the layer's best score, and one more for a third."""
    lives = 3

    def used(self, slots, worth, due, hit):
        self.life[slots] = 1 + (worth >= 0.05).astype(int) + (worth >= 0.3)


class Oldest(Pool):
    """The oldest stamp of the GROUP slots at the hand, which goes on to the next GROUP: kernels/slots."""

    def take(self, count):
        taken = []
        for _ in range(count):
            for _ in range(-(-self.slots // GROUP)):
                first, self.hand = self.hand, 0 if self.hand + GROUP >= self.slots else self.hand + GROUP
                age = self.rank(slice(first, min(first + GROUP, self.slots)))
                age[self.stamp[first:first + GROUP] == self.t] = NEVER
                at = first + int(age.argmin())
                if self.stamp[at] != self.t:
                    break
            assert self.stamp[at] != self.t, "a step needs more slots than there are"
            self.stamp[at] = self.t
            taken.append(at)
        return np.array(taken)

    def rank(self, slots):
        return self.stamp[slots].copy()


class OldestTwice(Oldest):
    """The same; being used a second time makes a slot 4 steps younger."""

    def start(self):
        self.again = np.zeros(self.slots, int)

    def used(self, slots, worth, due, hit):
        self.again[slots] = 4 * hit

    def rank(self, slots):
        return self.stamp[slots] + self.again[slots]


POLICIES = {"oldest of 32": Oldest, "LRU": Lru, "CLOCK": Clock, "CLOCK, used once: no life": ColdClock, "CLOCK, lives by score": ScoreClock,
            "oldest of 32, used twice": OldestTwice, ".7 score + .3 / (age + 1)": Hybrid, "Belady, the bound": Belady}


def replay(trace, slots, policy=Oldest):
    """-> shares of the accesses behind SETTLE: misses over the bus that a step waits for, blocks brought ahead."""
    pool, misses, accesses, ahead = policy(slots, trace.keys), 0, 0, 0
    known = ~trace.made
    for t in range(trace.steps):
        pool.t, counts = t, t >= SETTLE
        for layer in range(trace.layers):
            keys = trace.at[t][layer]
            if trace.extra:
                extra = trace.extra[t][layer]
                extra = extra[known[extra] & (pool.slot_of[extra] < 0)]
                room = slots - int((pool.stamp == t).sum()) - sum(map(len, trace.at[t][layer:]))
                extra = extra[:max(room, 0)]
                if len(extra):
                    pool.put(extra, np.zeros(len(extra)), np.full(len(extra), NEVER))
                    ahead += counts * len(extra)
            missed = pool.put(keys, trace.worth[t][layer], trace.due[t][layer])
            misses += counts * int(known[keys[missed]].sum())
            accesses += counts * len(keys)
            known[keys] = True
    return misses / accesses, ahead / accesses


# ---- tables ----

MULTIPLES = (1, 1.3, 2, 2.6, 4)


def percent(x):
    return f"{100 * x:.1f}"


def show(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print()


def files(folder, digest="tokens"):
    return sorted(glob.glob(os.path.join(folder, f"*.{digest}.npz")))


def traces(folder, share, digest="tokens", **more):
    return [of_one(Choices(file, share, **more)) for file in files(folder, digest)]


def misses(some, multiple, policy=Oldest):
    return np.mean([replay(t, int(multiple * t.most), policy)[0] for t in some])


def by_head(some, plain, multiple):
    """Misses with slots of one KV head in the memory of `multiple` unions of plain's choices."""
    return np.mean([replay(of_one(c, each_head=True), int(multiple * of_one(p).most) * c.heads)[0] for c, p in zip(some, plain)])


def union_of(some):
    """Blocks that a step needs in a layer, over those that a KV head needs."""
    return float(np.mean([of_one(c).mean / (c.layers * c.needs) for c in some]))


def policies(folders, share=1 / 32):
    """Misses by policy; a cell has the folders' one after the other."""
    some = [traces(folder, share) for folder in folders]
    show(["policy", *(f"{m} x" for m in MULTIPLES)],
         ([name] + [", ".join(percent(misses(one, m, policy)) for one in some) for m in MULTIPLES] for name, policy in POLICIES.items()))


def pools(folders, shares=(1 / 8, 1 / 16, 1 / 32)):
    """Misses by digest, share and size of the pool."""
    def row(folder, digest, share):
        some = [Choices(file, share) for file in files(folder, digest)]
        one, union = [of_one(c) for c in some], union_of(some)
        rates, heads = [misses(one, m) for m in MULTIPLES], by_head(some, some, 2.6)
        return [os.path.basename(folder), digest, f"1/{round(1 / share)}", f"{np.mean([c.again() for c in some]):.2f}", f"{union:.2f}",
                *map(percent, rates), percent(misses(one, 2.6, Belady)), f"{LLAMA_MIB * share * union * rates[3]:.0f}", percent(heads),
                f"{LLAMA_MIB * share * heads:.0f}"]
    show(["recording", "digest", "attended", "chosen again", "union", *(f"{m} x" for m in MULTIPLES), "Belady at 2.6 x", "MiB at 2.6 x",
          "slots of a KV head at 2.6 x", "MiB"], (row(f, d, s) for f in folders for d in ("tokens", "mean") for s in shares))


def choices(folders, share=1 / 32, multiple=2.6):
    """What is chosen, in the memory of `multiple` unions of top k's choices."""
    ways = {"top k": {}, "1.5 times the score if chosen before": {"sticky": 0.5}, "twice": {"sticky": 1.0}, "4 times": {"sticky": 3.0},
            "8 times": {"sticky": 7.0}, "every 2 steps": {"stride": 2}, "every 4 steps": {"stride": 4}}

    def row(folder, name, more):
        some = [Choices(file, share, **more) for file in files(folder)]
        plain = [Choices(file, share) for file in files(folder)]
        whole = np.mean([replay(of_one(c), max(int(multiple * of_one(p).most), of_one(c).most))[0] for c, p in zip(some, plain)])
        heads = by_head(some, plain, multiple)
        return [os.path.basename(folder), name, f"{np.mean([c.mass for c in some]):.3f}", f"{np.mean([c.again() for c in some]):.2f}",
                percent(whole), f"{LLAMA_MIB * share * union_of(some) * whole:.0f}", percent(heads), f"{LLAMA_MIB * share * heads:.0f}"]
    show(["recording", "choice", "mass", "chosen again", "misses", "MiB", "slots of a KV head: misses", "MiB"],
         (row(f, name, more) for f in folders for name, more in ways.items()))


def ahead(folders, share=1 / 32):
    """What bringing blocks ahead of the choice saves, and costs."""
    ways = {"nothing": None, "the layer's last choice": (Choices.by_last, 1), "the same and half as many more": (Choices.by_last, 1.5),
            "a guess by the layer before": (Choices.by_guess, 1), "half of that guess": (Choices.by_guess, 0.5)}

    def row(folder, name, way):
        some = [of_one(Choices(file, share), ahead=way) for file in files(folder)]
        cells = [np.mean([replay(t, int(m * t.most)) for t in some], 0) for m in (1.3, 2.6)]
        return [os.path.basename(folder), name, *(f"{percent(waits)} + {percent(more)}" for waits, more in cells)]
    show(["recording", "brought ahead", "1.3 x: waited for + ahead", "2.6 x"],
         (row(f, name, way) for f in folders for name, way in ways.items()))


def prefixes(folders, share=1 / 32):
    """Requests with a common prefix: slots of their own, or common ones."""
    def row(folder, shared):
        batch = of_batch([Choices(file, share) for file in files(folder)], shared)
        alone = of_batch([Choices(file, share) for file in files(folder)], False)
        return [os.path.basename(folder), "common" if shared else "own", f"{batch.mean / alone.mean:.2f}",
                *(percent(replay(batch, max(int(m * alone.most), batch.most))[0] * batch.mean / alone.mean) for m in MULTIPLES)]
    show(["requests", "numbers", "a step's blocks", *(f"{m} x" for m in MULTIPLES)], (row(f, s) for f in folders for s in (False, True)))


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {f.__name__: f for f in (policies, pools, choices, ahead, prefixes)}
    asked.add_argument("table", choices=tables), asked.add_argument("folders", nargs="+")
    asked = asked.parse_args()
    tables[asked.table](asked.folders)


if __name__ == "__main__":
    main()
