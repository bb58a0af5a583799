#!/usr/bin/python3
"""The reference of a sparse decode step (tests/sparse/sparse_decode.py) on a small random model: a whole budget is dense attention, any budget
is a softmax over the chosen tokens, generated tokens count, steps one by one are steps side by side, and the choice is libucmclient's."""

import os
import pathlib
import sys
import unittest

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "client/python"), str(TOP / "tests/sparse"), str(TOP / "tests/models")]
os.environ.setdefault("UCMCLIENT_LIB", str(TOP / "build/libucmclient.so"))

import numpy as np  # noqa: E402

import contexts  # noqa: E402
import sparse_decode as sd  # noqa: E402
from model import Model, f16  # noqa: E402
from ucmclient import sparse  # noqa: E402

PROMPT, STEPS, BLOCK = 451, 40, 16
# At every length, and so that a step's choice is its own.
NOW = "dense_below=0,retrieval_stride=1,lag=0,min_tokens=0"
PRESETS = ["auto", "topk:sparse_ratio=0.3", "psa-estimated", "psa-certified", "psa", "esa", "gsa", "gsa-device", "kvstar", "kvstar-corrected"]


class Small(Model):
    """Random weights; keys that tell blocks apart."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.layers, self.width, self.heads, self.kv_heads, self.d = 3, 64, 4, 2, 32
        self.epsilon, self.base, self.context, self.cached = 1e-5, 10000.0, 4096, f16
        self.beta, self.group = self.d ** -0.5, 2
        self.weights = {"token_embd.weight": rng.normal(size=(64, 64)), "output_norm.weight": np.ones(64)}
        sizes = {"attn_norm": None, "ffn_norm": None, "attn_q": (64, 128), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (128, 64),
                 "ffn_gate": (64, 96), "ffn_up": (64, 96), "ffn_down": (96, 64)}
        for layer in range(self.layers):
            for name, size in sizes.items():
                scale = 3 if name in ("attn_q", "attn_k") else 1
                w = np.ones(64) if size is None else rng.normal(size=size) * scale / np.sqrt(size[0])
                self.weights[f"blk.{layer}.{name}.weight"] = w
        self.weights = {name: w.astype(np.float32) for name, w in self.weights.items()}


def config(text, **more):
    return sd.Config(text, sparse.Policy(text), **more)


def and_keys(preset, keys):
    return preset + ("," if ":" in preset else ":") + keys


def now(preset):
    return config(and_keys(preset, NOW))


class SparseDecode(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = Small(1)
        rng = np.random.default_rng(2)
        cls.ids = rng.integers(64, size=PROMPT + STEPS).tolist()
        K, V = contexts.prefill(cls.model, cls.ids)
        cls.prefix = sd.Request(cls.model, [k.astype(np.float32) for k in K], [v.astype(np.float32) for v in V], PROMPT, BLOCK)
        cls.dense = sd.run(cls.prefix.fork(), sd.Config("dense"), cls.ids[PROMPT:])

    def run_ids(self, how, attended=None):
        return sd.run(self.prefix.fork(), how, self.ids[PROMPT:], attended)

    def test_the_dense_step_is_the_models(self):
        h, *_ = self.model.prefill(self.ids)
        np.testing.assert_allclose(self.dense, self.model.logits(h[PROMPT:]), rtol=1e-2, atol=2e-2)

    def test_a_whole_budget_is_dense_attention(self):
        whole = [f"{preset}:{NOW},sparse_ratio=1" for preset in ("topk", "esa", "gsa", "kvstar", "kvstar-corrected")]
        whole += [f"{preset}:{NOW},eps=1" for preset in ("psa", "psa-estimated", "psa-certified")]
        whole += [f"gsa-device:{NOW},topk_tokens=4096", f"auto:{NOW},min_blocks=1000",
                  "topk:dense_below=4096"]
        for text in whole:
            attended = sd.Attended()
            np.testing.assert_array_equal(self.run_ids(config(text), attended), self.dense, text)
            self.assertEqual(attended.tokens, attended.of, text)

    def test_any_budget_is_a_softmax_over_the_same_tokens(self):
        rng = np.random.default_rng(3)
        positions = np.arange(PROMPT, PROMPT + STEPS)
        for preset in PRESETS:
            request, how = self.prefix.fork(), now(preset)
            q = rng.normal(size=(STEPS, 4, 32)).astype(np.float32) * 4
            for kv in (request.K, request.V):
                kv[1] = np.concatenate([kv[1], rng.normal(size=(2, STEPS, 32)).astype(np.float32)], 1)
            chosen = sd.choose(request, 1, how, q, sd.weights(request, 1, q, positions), positions)
            request.layers[1] = sd.Layer()
            out = sd.attend(request, 1, how, q, positions, None)
            few = 0
            for t in range(0, STEPS, 7):
                for head in range(4):
                    g = head // 2
                    blocks = np.flatnonzero(chosen[g % len(chosen), t]).tolist()
                    own = int(positions[t]) // BLOCK
                    self.assertLess(max(blocks), own)
                    for always in (0, own - 1, own - 2):
                        self.assertIn(always, blocks)
                    tokens = [i for b in [*blocks, own] for i in range(b * BLOCK, (b + 1) * BLOCK) if i <= positions[t]]
                    few += len(tokens) < PROMPT
                    x = request.K[1][g, tokens].astype(np.float64) @ q[t, head] * self.model.beta
                    p = np.exp(x - x.max())
                    expected = p @ request.V[1][g, tokens] / p.sum()
                    np.testing.assert_allclose(out[t, head], expected, rtol=1e-3, atol=1e-4, err_msg=preset)
            self.assertTrue(few or preset in ("gsa-device", "psa-certified"), preset)

    def test_one_by_one_is_side_by_side(self):
        for preset in PRESETS + ["topk:retrieval_stride=3,lag=2", "kvstar:retrieval_stride=3,rows=5"]:
            how = config(and_keys(preset, "dense_below=0,min_tokens=0"))
            beside, alone = sd.Attended(), sd.Attended()
            expected = self.run_ids(how, beside)
            request = self.prefix.fork()
            got = np.concatenate([sd.run(request, how, [i], alone) for i in self.ids[PROMPT:]])
            np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3, err_msg=preset)
            self.assertAlmostEqual(alone.tokens / alone.of, beside.tokens / beside.of, 2, preset)
            self.assertEqual(alone.of, beside.of)

    def test_generated_tokens_count(self):
        request, how = self.prefix.fork(), config(f"topk:{NOW},sparse_ratio=0.3")
        out = sd.generate(request, how, self.ids[PROMPT], 70)
        self.assertEqual(len(out), 70)
        self.assertEqual(request.tokens, PROMPT + 70)
        spec = sd.spec_of(how.policy, self.model, BLOCK)
        self.assertEqual(len(request.digests[0][spec]["k"]), (PROMPT + 69) // BLOCK)
        whole = sd.Request(self.model, request.K, request.V, request.tokens, BLOCK)
        np.testing.assert_array_equal(whole.digest(0, spec, 32)["k"], request.digest(0, spec, 32)["k"])

    def test_the_choice_is_the_librarys(self):
        rng = np.random.default_rng(4)
        shape = sparse.Shape("f32", tokens=BLOCK, kv_heads=2, head_dim=32)
        n = PROMPT // BLOCK
        for preset in PRESETS:
            request, how = self.prefix.fork(), now(preset)
            policy = how.policy
            if policy.choice != "topk":
                continue
            rows = policy.rows
            q = rng.normal(size=(rows, 4, 32)).astype(np.float32) * 3
            at = np.full(rows, PROMPT - 1)
            mine = sd.choose(request, 0, how, q, sd.weights(request, 0, q, at), at)[:, -1]
            K = np.ascontiguousarray(request.K[0].swapaxes(0, 1)[:n * BLOCK])
            budget = policy.budget(BLOCK, n) if policy.goal else None
            choose = policy.choose(BLOCK, n, budget)
            digests = policy.digest(shape).compute(K.reshape(n, BLOCK, 2, 32))
            theirs = digests.select(q if rows > 1 else q[0], choose, policy.score)
            scores = digests.scores(q if rows > 1 else q[0], policy.score)
            for g, chosen in enumerate(theirs.lists):
                got = set(np.flatnonzero(mine[g]).tolist())
                self.assertEqual(len(got), len(chosen), preset)
                wrong = got ^ set(chosen)
                values = np.array(scores[g])[sorted(wrong)]  # ties within rounding
                self.assertTrue(not wrong or np.ptp(values) <= 1e-3 * np.abs(values).max(), f"{preset}: {wrong}")

    def test_budgets_follow_the_mass(self):
        seen = {}
        for goal in ("0.5", "0.9", "0.99"):
            attended = sd.Attended()
            request = self.prefix.fork()
            sd.run(request, config(f"auto:dense_below=0,goal={goal},min_tokens=0,budget_tokens=2000"), self.ids[PROMPT:], attended)
            seen[goal] = attended.tokens / attended.of
            for layer in request.layers:
                self.assertLessEqual(layer.budget.blocks, (PROMPT + STEPS) // BLOCK)
        self.assertLess(seen["0.5"], seen["0.9"])
        self.assertLess(seen["0.9"], seen["0.99"])


if __name__ == "__main__":
    unittest.main()
