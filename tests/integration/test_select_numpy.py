#!/usr/bin/python3
"""The scores of many blocks of kernels/sparse against the independent numpy of
tests/reference/sparse/methods.py. Every method, reduce and way of joining heads, on every
instruction set."""

import ctypes
import itertools
import unittest
import zlib

import numpy as np
from test_summary_numpy import LIB, MLA, SHAPES, Plan, c_spec, methods, same, u32

METRICS = ("dot", "l2", "rounded")
REDUCES, HEADS = ["max", "mean", "softmax"], ["per_head", "sum", "max"]
METHODS = [dict(method="mean"), dict(method="submean", run=4), dict(method="submean", run=8, keep=(0, 1, 5, 9, 31)),
           dict(method="box"), dict(method="hash", bits=64), dict(method="hash", bits=256), dict(method="stats"),
           dict(method="tokens", stand_ins=3), dict(method="tokens", stand_ins=3, rest=1)]


class ScoreSpec(ctypes.Structure):
    _fields_ = [(n, u32) for n in ("metric", "reduce", "heads", "rows", "q_heads")] + [("beta", ctypes.c_float)]


LIB.test_scores.argtypes = [ctypes.c_void_p, ctypes.POINTER(ScoreSpec), ctypes.c_void_p, ctypes.c_void_p, u32, u32,
                            ctypes.c_void_p]
LIB.test_history.argtypes = [ctypes.c_void_p, u32, ctypes.c_void_p]
assert LIB.test_score_spec_bytes() == ctypes.sizeof(ScoreSpec)


class Scores(unittest.TestCase):
    def summaries_of(self, m, n, rng):
        """Summaries by numpy of n random blocks, some heads of which are poisoned."""
        K = rng.standard_normal((n, m.tokens, m.kv_heads, m.head_dim)).astype(np.float32)
        K *= np.exp(rng.standard_normal((n, 1, m.kv_heads, 1))).astype(np.float32)
        K[rng.random(n) < 0.1, 3, rng.integers(m.kv_heads), 7] = np.nan
        V = rng.standard_normal((n, m.tokens, m.kv_heads, m.v_head_dim)).astype(np.float32) if m.v_head_dim else None
        return methods.build(m, K, V)

    def compare(self, m, isa, rows, group, modes):
        rng = np.random.default_rng(zlib.crc32(repr((m, isa, rows)).encode()))
        n = 53
        q = rng.standard_normal((rows, m.kv_heads * group, m.head_dim)).astype(np.float32)
        q[:, 0, ::3] = 0
        summary = self.summaries_of(m, n, rng)
        packed = np.ascontiguousarray(methods.pack(m, summary))
        LIB.test_isa(isa)
        with Plan(c_spec(m, "f32"), isa) as plan:
            LIB.test_isa(isa)
            for metric, reduce, heads in modes:
                if metric != "dot" and (m.method in ("box", "hash", "stats") or (metric == "l2" and m.rest)):
                    continue
                spec = ScoreSpec(metric=METRICS.index(metric), reduce=REDUCES.index(reduce), heads=HEADS.index(heads), rows=rows,
                                 q_heads=m.kv_heads * group)
                got = np.full((m.kv_heads, n), 7, np.float32)
                lists = LIB.test_scores(plan.plan, ctypes.byref(spec), q.ctypes.data, packed.ctypes.data, n, int(rng.integers(n)),
                                        got.ctypes.data)
                beta = 1.0 if m.method == "stats" or m.rest else np.float32(1) / np.sqrt(np.float32(m.head_dim))
                raw = methods.score(m, summary, q, metric)
                want = methods.reduce_heads(methods.reduce_group(raw, m.kv_heads, reduce, beta), heads)
                what = f"{m} isa {isa} {metric} {reduce} {heads}"
                self.assertEqual(lists, len(want), what)
                got = got.reshape(-1)[:lists * n].reshape(lists, n)
                if reduce == "softmax" or m.rest:
                    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7, err_msg=what)
                else:
                    self.assertTrue(same(got, want), f"{what}\n{got}\n{want}")
        LIB.test_isa(2)

    def test_every_mode(self):
        modes = list(itertools.product(METRICS, REDUCES, HEADS))
        for args in METHODS:
            self.compare(methods.Spec(**SHAPES[0], **args), 2, 2, 3, modes)

    def test_every_instruction_set(self):
        modes = [("dot", "max", "per_head"), ("l2", "mean", "sum"), ("dot", "softmax", "max"), ("rounded", "max", "per_head")]
        for isa in range(LIB.test_isa(2) + 1):
            for args in METHODS:
                for shape in SHAPES[1:]:
                    self.compare(methods.Spec(**shape, **args), isa, 1, 4, modes)

    def test_latent_attention(self):
        modes = [("dot", "max", "per_head"), ("dot", "mean", "sum"), ("dot", "softmax", "per_head")]
        for args in (dict(method="mean"), dict(method="box"), dict(method="hash", bits=128, latent_bits=64)):
            self.compare(methods.Spec(**MLA, **args), 2, 1, 16, modes)


class History(unittest.TestCase):
    def test_scores(self):
        uses = np.array([0, 4, 1, 0, 0, 2, 9], np.uint32)
        got = np.empty(len(uses), np.float32)
        LIB.test_history(uses.ctypes.data, len(uses), got.ctypes.data)
        self.assertTrue(same(got, methods.history_scores(uses)))


if __name__ == "__main__":
    unittest.main()
