#!/usr/bin/env python3
"""check_sparse.py GGUF FOLDER [short|full]: what digests are worth on SmolLM2-135M. Writes FOLDER/results.json, which report.py makes
tables and plots of; what the file has already is not measured again, so that a run that was cut short goes on."""

import json
import multiprocessing
import os
import sys
import time

import numpy as np
import replay
import scorers
import texts
from decode import BLOCK, WARM, State, Step, compare, ranks, run, topk
from model import Model, to_numpy, xp
from scorers import DIGESTS, by_digest, esa, infllm, kvstar, late, oracle, psa, with_mean

import methods

EIGHTH = 1 / 8
SIZES = {
    "short": {"texts": 2, "length": 768, "steps": 64, "shares": (1 / 8, 1 / 4), "trajectories": 2, "clocked": 1, "stop_texts": 1,
              "eps": (0.9, 0.98), "keys": ((512, 0.5),)},
    "full": {"texts": 8, "length": 8192, "steps": 496, "shares": (1 / 32, 1 / 16, 1 / 8, 1 / 4), "trajectories": 99, "clocked": 2,
             "stop_texts": 4, "eps": (0.8, 0.9, 0.95, 0.98, 0.99),
             "keys": tuple((n, d) for n in (1024, 2048, 4096, 6144) for d in (0.1, 0.3, 0.5, 0.7, 0.9))},
}
# What a size needs without a GPU, in GiB: the weights, and of each text K, V and Q of all layers, whose digests are forgotten
# between measurements.
MEMORY_GIB = {"short": 2, "full": 12}
started = time.time()


def say(*words):
    print(f"{time.time() - started:6.0f} s", *words, flush=True)


def check_memory(size):
    """A sentence instead of the kernel's OOM killer after an hour."""
    with open("/proc/meminfo", encoding="ascii") as file:
        have = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) / 2 ** 20
    if have < MEMORY_GIB[size]:
        sys.exit(f"check-sparse: SIZE={size} without a GPU needs {MEMORY_GIB[size]} GiB of memory; {have:.1f} GiB are available")
    if size == "full":
        say("no GPU: this takes a core for many hours, and the dense passes alone take minutes a text. What was measured is kept in",
            "results.json: stop it and run it again as you like.")


# ---- what is compared ----

def block_methods(short=False):
    """{name: scores}, those that choose whole blocks; the oracle, which others are compared with, first."""
    out = {"oracle, mass": oracle}
    best = {f"tokens {r} + mean": with_mean(scorers.spec("tokens", stand_ins=r)) for r in (2, 3, 4)}
    out.update(best)
    for name, digest in DIGESTS.items():
        if short and digest.method in ("submean", "tokens") and name not in ("submean 4", "tokens 2", "tokens 3, rest"):
            continue
        out[name + ", max"] = by_digest(digest, "max")
        if digest.method != "hash":
            out[name + ", softmax"] = by_digest(digest, "softmax")
    out.update({"oracle, best token": scorers.best_token, "window only": scorers.window_only, "random": scorers.random, "ESA": esa,
                "ESA, every 5 steps": late(esa, stride=5), "KVStar as written": kvstar(False), "KVStar corrected": kvstar(True),
                "InfLLM": infllm})
    if short:
        return out
    for name in ("submean 8", "submean 4", "tokens 2", "tokens 4"):
        out[name + ", log-sum"] = by_digest(DIGESTS[name], "softmax", "log-sum")
    out["mean, mean"] = by_digest(DIGESTS["mean"], "mean")
    out["mean + box"] = scorers.box_and_mean
    late_ones = {"mean, softmax": by_digest(DIGESTS["mean"]), "stats, softmax": by_digest(DIGESTS["stats"]),
                 "tokens 4 + mean": best["tokens 4 + mean"], "oracle, mass": oracle}
    for name, score in late_ones.items():
        for lag in (1, 2):
            out[f"{name}, lag {lag}"] = late(score, lag)
        out[f"{name}, every 5 steps"] = late(score, stride=5)
    return out


TRAJECTORIES = ["oracle, mass", "tokens 4 + mean", "tokens 2 + mean", "mean, softmax", "mean, max", "box, softmax", "stats, softmax",
                "submean 4, softmax", "hash 64, max", "hash 128, max", "tokens 4, max", "tokens 3, rest, softmax", "ESA", "KVStar as written",
                "KVStar corrected", "InfLLM", "window only", "random"]
CURVES = ["oracle, mass", "tokens 4 + mean", "mean, softmax", "box, softmax", "hash 128, max", "ESA", "window only"]
AT_AN_EIGHTH = [f"{name}, {when}" for name in ("oracle, mass", "tokens 4 + mean", "mean, softmax")
                for when in ("lag 1", "lag 2", "every 5 steps")] + ["hash 256, max", "tokens 6, rest, softmax", "ESA, every 5 steps"]
CLOCKED = ["oracle, mass", "tokens 4 + mean", "mean, softmax", "box, softmax", "hash 128, max"]
RANKINGS = ["mean, softmax", "tokens 4 + mean", "oracle, mass"]
KEYS = ["oracle, mass", "tokens 4 + mean", "tokens 3, rest, softmax", "stats, softmax", "mean, softmax", "box, softmax", "hash 128, max",
        "ESA", "KVStar corrected", "InfLLM", "window only", "random"]


# ---- a dense trajectory, looked at from the side ----

def spread(x):
    x = np.asarray(x)
    return {"mean": float(x.mean()), "p5": float(np.percentile(x, 5)), "worst": float(x.min()),
            "where": [int(i) for i in np.unravel_index(x.argmin(), x.shape)]}


class Coverage:
    """Sums over texts of what each method's blocks cover, by layer, KV head and head of the group."""

    def __init__(self, scores, shares, alphas):
        self.scores, self.shares, self.alphas = scores, shares, alphas
        self.seen, self.needed = {}, []

    def add(self, name, share, what, layer, value):
        self.seen.setdefault((name, share, what), {}).setdefault(layer, []).append(value)

    def error(self, step, values, allowed, dense):
        out = step.model.attend(step.q, step.k, values, allowed)
        return xp.sqrt(((out - dense) ** 2).sum(-1) / (dense ** 2).sum(-1))[WARM:].mean(0)

    def blocks(self, step, values, dense):
        mass, own = step.mass(), step.blocks[None] == step.own[:, None]
        for name, score in self.scores.items():
            places = ranks(step, score(step))
            for share in self.shares:
                chosen = (places < step.budget(share)[:, None]) & step.valid
                covered = (mass * (chosen | own)[:, None]).sum(-1)[:, :, WARM:]
                self.add(name, share, "mass", step.layer, covered.mean(2))
                if share != EIGHTH:
                    continue
                if name == "oracle, mass":
                    best = chosen & ~step.windows()
                same = (chosen & best)[:, WARM:].sum((1, 2)) / xp.maximum(best[:, WARM:].sum((1, 2)), 1)
                self.add(name, share, "recall", step.layer, same)
                self.add(name, share, "error", step.layer, self.error(step, values, step.tokens(chosen), dense))
        ordered = xp.cumsum(-xp.sort(-mass, axis=-1), -1)
        need = (ordered < 0.95).sum(-1)[:, :, WARM:] + 1  # of each head and step
        self.needed.append(need.reshape(-1))

    def tokens(self, step, values, dense):
        """Those that choose tokens and not blocks."""
        p = xp.exp(step.exact() - step.exact().max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        for share in self.shares:
            for name, choose in (("H2O", scorers.h2o(share)), ("InfiniGen", scorers.infinigen(self.alphas[share]))):
                allowed = choose(step)
                allowed = step.causal if allowed is None else allowed
                self.add(name, share, "mass", step.layer, (p * allowed).sum(-1)[:, :, WARM:].mean(2))
                if share == EIGHTH:
                    self.add(name, share, "error", step.layer, self.error(step, values, allowed, dense))

    def look(self, step, values):
        dense = step.model.attend(step.q, step.k, values, step.causal)
        self.blocks(step, values, dense)
        self.tokens(step, values, dense)

    def table(self):
        """{name: {share: {mass, of_oracle, ...}}}"""
        out = {}
        mean = {key: np.array([np.mean([to_numpy(x) for x in v], 0) for _, v in sorted(layers.items())])
                for key, layers in self.seen.items()}
        for (name, share, what), value in mean.items():
            row = out.setdefault(name, {}).setdefault(str(share), {})
            if what == "mass":
                best = mean["oracle, mass", share, "mass"]
                ratio = value.mean(2) / best.mean(2)  # of each layer and KV head
                row.update(mass=spread(value.mean(2)), of_oracle=spread(ratio), of_oracle_by_head=spread(value / best),
                           by_layer=ratio.mean(1).tolist())
            else:
                row[what] = {"mean": float(value.mean()), "worst": float(value.max() if what == "error" else value.min())}
        return out


def forget_digests(state):
    """They are a gigabyte a text. A GPU has it, and keeps them; here they are built again."""
    if xp is np:
        state.digests.clear()


def infinigen_alphas(states, shares):
    """The one threshold of all layers, heads and steps that attends each share of the tokens on the dense trajectory."""
    edges = np.linspace(0, 40, 2001)
    counts = np.zeros(len(edges))

    def observe(step, values):
        if step.layer:
            x = scorers.infinigen_scores(step)[:, WARM:]
            x = -x[xp.broadcast_to(step.causal[WARM:], x.shape)]
            counts[:] += to_numpy(xp.bincount((xp.minimum(x, 40) * 50).astype(xp.int64), minlength=len(edges)))

    for state in states:
        run(state, None, observe)
    part = np.cumsum(counts) / counts.sum()
    layers = states[0].model.layers
    of_the_rest = {share: max(0, share * layers - 1) / (layers - 1) for share in shares}  # for the first layer is dense
    return {share: float(edges[min(np.searchsorted(part, rest), len(edges) - 1)]) for share, rest in of_the_rest.items()}


def measure_coverage(results, states, settings):
    alphas = infinigen_alphas(states[:2], settings["shares"])
    results["alpha"] = {str(share): alpha for share, alpha in alphas.items()}
    coverage = Coverage(block_methods(results["size"] == "short"), settings["shares"], alphas)
    for state in states:
        run(state, None, coverage.look)
        forget_digests(state)
        say("coverage", state.name)
    results["coverage"] = coverage.table()
    needed = to_numpy(xp.stack(coverage.needed)).reshape(len(states), states[0].model.layers, -1)
    results["needed"] = {"blocks": len(states[0].ids) // BLOCK,
                         "percentiles": [np.percentile(needed[:, layer], range(0, 101, 5)).tolist() for layer in range(needed.shape[1])]}


def measure_first(results, states, pool):
    """Choices of consecutive steps, replayed against a hot set."""
    scores, jobs = block_methods(), {}
    for state in states:
        chosen = {}

        def observe(step, values, chosen=chosen):
            for name in CLOCKED:
                chosen.setdefault(name, []).append(to_numpy(topk(step, scores[name](step), EIGHTH)[:, WARM:]))

        run(state, None, observe)
        own = np.arange(state.begin + WARM, len(state.ids)) // BLOCK
        blocks = np.arange(len(state.ids) // BLOCK)
        windows = (blocks < 1)[None] | (blocks[None] >= own[:, None] - 2)
        for name, layers in chosen.items():
            lanes = np.concatenate(layers)
            job = pool.apply_async(replay.replay, (np.packbits(lanes), lanes.shape, windows, state.begin // BLOCK, len(layers)))
            jobs.setdefault(name, []).append(job)
    results["first"] = {name: [job.get() for job in some] for name, some in jobs.items()}
    say("first experiment")


# ---- trajectories of restricted steps ----

class Attended:
    """A choice, counting what it attends: tokens of each KV head over the tokens that there are."""

    def __init__(self, choose):
        self.choose, self.sums = choose, []

    def __call__(self, step):
        allowed = self.choose(step)
        if allowed is None:
            self.sums.append(1.0)
            return None
        if allowed.ndim == 3:
            allowed = step.tokens(allowed)
        self.sums.append((allowed[:, 0, WARM:].sum(-1) / step.causal[WARM:].sum(-1)).mean())
        return allowed


def measure(states, choose):
    """Of all texts' steps: perplexity, what it is worse than the dense model's, KL, same token, share attended."""
    rows, shares = [], []
    for state in states:
        attended = Attended(choose)
        rows.append(to_numpy(compare(state, run(state, attended))))
        forget_digests(state)
        shares.append(np.mean([float(x) for x in attended.sums]))
    nll, dense, kl, same = np.concatenate(rows, 1).astype(float).mean(1)
    return {"attended": float(np.mean(shares)), "perplexity": float(np.exp(nll)), "dense": float(np.exp(dense)),
            "worse": float(np.exp(nll - dense) - 1), "kl": float(kl), "same": float(same), "steps": int(sum(r.shape[1] for r in rows)),
            "texts": [float(np.exp(np.mean(r[0] - r[1])) - 1) for r in rows]}


def by_share(score, share):
    return lambda step: topk(step, score(step), share)


def by_layer(score, shares):
    """shares: of each layer; 1 is dense."""
    return lambda step: None if shares[step.layer] >= 1 else topk(step, score(step), shares[step.layer])


def first_dense(layers, count, share):
    """The first layers dense and the others' shares such that all together attend `share`."""
    return [1.0] * count + [(share * layers - count) / (layers - count)] * (layers - count)


def layer_shares(states, share):
    """Shares of the layers, together `share` of all: a block more is worth the same mass in each, on these texts' dense steps."""
    curves = {}

    def observe(step, values):
        mass = -xp.sort(-step.mass().mean(1), axis=-1)[:, WARM:]
        curves.setdefault(step.layer, []).append(to_numpy(mass.mean((0, 1))))

    for state in states:
        run(state, None, observe)
    curves = np.array([np.mean(c, 0) for _, c in sorted(curves.items())])
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (curves > middle).mean() > share else (low, middle)
    return [max(float(x), 8 / curves.shape[1]) for x in (curves > high).mean(1)]


def measure_perplexity(results, states, settings, save):
    out, scores = results.setdefault("perplexity", {}), block_methods()
    alphas = {share: results["alpha"][str(share)] for share in settings["shares"]}
    layers = states[0].model.layers

    def put(name, share, choose, some=states):
        row = out.setdefault(name, {})
        if str(share) not in row:
            row[str(share)] = measure(some, choose)
            save()
            say("perplexity", name, f"{share:.3f} attended {row[str(share)]['attended']:.4f}: {row[str(share)]['worse']:+.4f}")

    todo = settings["trajectories"]
    for name in TRAJECTORIES[:todo]:
        for share in settings["shares"][-3:] if name in CURVES else (EIGHTH,):
            put(name, share, by_share(scores[name], share))
    for share in settings["shares"][-3:]:
        put("H2O", share, scorers.h2o(share))
        put("InfiniGen", share, scorers.infinigen(alphas[share]))
    for name in AT_AN_EIGHTH[:todo - 2]:
        put(name, EIGHTH, by_share(scores[name], EIGHTH))
    tuned = results.setdefault("layer_shares", {})
    for share in (EIGHTH, 1 / 4):
        if todo > 2 and str(share) not in tuned:
            tuned[str(share)] = layer_shares(states[:2], share)
    for name in ("oracle, mass", "tokens 4 + mean", "mean, softmax")[:todo - 2]:
        put(f"{name}; layer 0 dense as well", EIGHTH, by_layer(scores[name], [1.0] + [EIGHTH] * (layers - 1)))
        for dense in (1, 2):
            put(f"{name}; first {dense} dense, 1/8 in all", EIGHTH, by_layer(scores[name], first_dense(layers, dense, EIGHTH)))
        for share in (EIGHTH, 1 / 4):
            put(f"{name}; shares by layer", share, by_layer(scores[name], tuned[str(share)]), states[2:])
            put(f"{name}; the same texts, one share", share, by_share(scores[name], share), states[2:])


def measure_stops(results, states, settings, save):
    """{rule: [measurements]}: how much must be attended for the dense model's answers."""
    out, scores = results.setdefault("stops", {}), block_methods()
    shares = [s for s in (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)]

    def put(rule, parameters, make):
        done = {row["parameter"] for row in out.setdefault(rule, [])}
        for parameter in parameters:
            if parameter not in done:
                out[rule].append({"parameter": parameter, **measure(states, make(parameter))})
                save()
        say(rule, [f"{row['attended']:.3f}: {row['same']:.4f}" for row in out[rule]])

    for name in RANKINGS:
        score = scores[name]
        put(f"top k, {name}", shares, lambda share, score=score: by_share(score, share))
        for stop in ("psa", "estimated"):
            put(f"{stop}, {name}", settings["eps"], lambda eps, score=score, stop=stop: psa(score, eps, stop))
        put(f"mass, {name}", settings["eps"], lambda eps, score=score: scorers.mass(score, eps))
    put("certified, oracle, mass", (0.5, 0.98), lambda eps: psa(oracle, eps, "certified"))


# ---- passkeys ----

def measure_keys(model, settings, shares):
    """Of the keys that the dense model finds, how many a restricted one finds."""
    scores = block_methods()
    found, tried, asked = {}, {}, []
    for length, depth in settings["keys"]:
        ids, at, digits = texts.passkey(model.tokenizer, length, depth, int(100 * depth) + length)
        right = np.array(ids[at:at + digits])
        state = State(model, "passkey", ids + [0] * (-len(ids) % BLOCK), (at - 8) // BLOCK * BLOCK)

        def says(logits):
            return bool((to_numpy(logits.argmax(-1))[at - 1 - state.begin:][:digits] == right).all())

        asked.append({"length": length, "depth": depth, "dense": says(state.logits)})
        if not asked[-1]["dense"]:
            continue
        choices = {(name, share): by_share(scores[name], share) for name in KEYS for share in shares}
        choices |= {("H2O", share): scorers.h2o(share) for share in shares}
        for (name, share), choose in choices.items():
            key = f"{name} @ {share}"
            tried[key] = tried.get(key, 0) + 1
            found[key] = found.get(key, 0) + says(run(state, Attended(choose)))
    say("passkeys", sum(a["dense"] for a in asked), "of", len(asked))
    return {"asked": asked, "found": found, "tried": tried}


# ---- all ----

def digest_shares():
    """Bytes of a digest over the bytes of K and V in float16, for heads of 64 and of 128 channels."""
    out = {}
    for name, digest in DIGESTS.items():
        for d in (64, 128):
            keep = tuple(range(d // 4, d // 2)) if digest.keep else ()
            one = methods.dataclasses.replace(digest, kv_heads=8, head_dim=d, keep=keep)
            out.setdefault(name, {})[d] = methods.digest_bytes(one) / (8 * BLOCK * d * 2 * 2)
    return out


def check_scores(model):
    """The fast scores of scorers.py choose as the definitions in methods.py do, on keys and queries of no model."""
    rng = np.random.default_rng(3)
    K, q = rng.normal(size=(20 * BLOCK, 3, 64)).astype(np.float32), rng.normal(size=(5, 9, 64)).astype(np.float32)
    state = State.__new__(State)
    state.model, state.begin, state.K, state.digests = model, 10 * BLOCK, [K], {}
    step = Step(state, 0, None, None, q, K, np.arange(20 * BLOCK - 5, 20 * BLOCK))
    for name, digest in DIGESTS.items():
        fast = scorers.raw(step, digest) / (1 if digest.method in ("stats", "hash") or digest.rest else model.beta)
        exact = methods.score(digest, methods.build(digest, K.reshape(20, BLOCK, 3, 64)), q)  # [T, heads, blocks]
        exact = exact.reshape(5, 3, 3, 20).transpose(1, 2, 0, 3)
        assert np.allclose(fast, exact, rtol=1e-3, atol=np.abs(exact).max() * 2e-3), name


def check_results(results):
    """What must hold if the harness measures what it says."""
    for name, perplexity in results["texts"].items():
        assert 1.5 < perplexity < 25, f"{name}: the dense model is not itself"
    for name, shares in results["coverage"].items():
        for share, row in shares.items():
            if name not in ("InfiniGen", "H2O", "random"):  # the first two choose tokens
                chance = results["coverage"]["random"][share]["of_oracle"]["mean"]
                assert chance < row["of_oracle"]["mean"] < 1.0005, f"{name} is worse than chance or better than the oracle"


def main(path, folder, size="short"):
    settings = SIZES[size]
    os.makedirs(folder, exist_ok=True)
    file = os.path.join(folder, "results.json")
    results = {"size": size}
    if os.path.exists(file):
        with open(file, encoding="utf-8") as old:
            results = json.load(old)
        assert results["size"] == size, f"{file} is of another size"

    def save():
        with open(file + ".new", "w", encoding="utf-8") as new:
            json.dump(results, new, indent=1)
        os.replace(file + ".new", file)

    if xp is np:
        check_memory(size)
    pool = multiprocessing.get_context("spawn").Pool(min(8, max(1, os.cpu_count() - 1)))
    model = Model(path)
    if xp is np:
        check_scores(model)
    results["settings"], results["digest_share"] = settings, digest_shares()
    states = []
    for name, ids in texts.pieces(model.tokenizer, settings["texts"], settings["length"]):
        states.append(State(model, name, ids, settings["length"] - settings["steps"]))
        nll = to_numpy(compare(states[-1], states[-1].logits)[0]).mean()
        say("dense", name, f"perplexity {np.exp(nll):.3f}")
        results.setdefault("texts", {})[name] = float(np.exp(nll))
    if "coverage" not in results:
        measure_coverage(results, states, settings)
        save()
    if "first" not in results:
        measure_first(results, states[:settings["clocked"]], pool)
        save()
    measure_perplexity(results, states, settings, save)
    if "passkeys" not in results:
        results["passkeys"] = measure_keys(model, settings, (1 / 16, EIGHTH))
        save()
    measure_stops(results, states[:settings["stop_texts"]], settings, save)
    pool.terminate()
    check_results(results)
    say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
