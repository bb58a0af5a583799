#!/usr/bin/python3
"""The attention of kernels/attend against the independent numpy of tests/reference/sparse/attend.py, bit by bit: formats, GQA, uneven heads,
MLA, lists and windows, tails, what is no number, merges, every instruction set; and where rounds stop."""

import ctypes
import pathlib
import sys
import unittest

import numpy as np
from test_digest_numpy import DTYPES, LIB, Shape, encode, formats, u32, u64

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/reference/sparse"))
import attend  # noqa: E402

f32, pointer = np.float32, ctypes.c_void_p
RULES = ["never", "psa", "estimated", "certified"]


class Spec(ctypes.Structure):
    _fields_ = [("shape", Shape), ("group", u32)] + [(n, ctypes.c_float) for n in ("scale", "k_scale", "v_scale", "soft_cap")]


class Memory(ctypes.Structure):
    _fields_ = [("base", pointer), ("stride", u64), ("blocks", u32)]


class Batch(ctypes.Structure):
    _fields_ = [("chains", u32), ("lists", u32), ("q", pointer), ("pool", Memory), ("slots", pointer), ("count", pointer),
                ("room", u32), ("pages", Memory), ("table", pointer), ("table_stride", u32), ("first", pointer),
                ("length", pointer), ("out", pointer), ("lse", pointer)]


class Part(ctypes.Structure):
    _fields_ = [("out", pointer), ("lse", pointer)]


class Left(ctypes.Structure):
    _fields_ = [("top", ctypes.c_float), ("unknown", u32), ("units", u64)]


class Stop(ctypes.Structure):
    _fields_ = [("rule", u32), ("every", u32), ("eps", ctypes.c_float)]


class List(ctypes.Structure):
    _fields_ = [("first", u32), ("heads", u32), ("query", pointer), ("memory", Memory), ("blocks", pointer), ("n", u32),
                ("beyond", u32), ("estimate", pointer), ("bound", pointer), ("pitch", u32), ("estimate_beyond", pointer),
                ("bound_beyond", pointer)]


class Report(ctypes.Structure):
    _fields_ = [("blocks", u32), ("rounds", u32), ("share", ctypes.c_float), ("certificate", ctypes.c_float)]


assert LIB.test_attend_spec_bytes() == ctypes.sizeof(Spec)
assert LIB.test_attend_batch_bytes() == ctypes.sizeof(Batch)
LIB.test_attend.argtypes = [ctypes.POINTER(Spec), ctypes.POINTER(Batch), ctypes.c_char_p]
LIB.test_attend_merge.argtypes = [ctypes.POINTER(Part), u32, u32, u32, pointer, pointer]
LIB.test_attend_rounds.argtypes = [ctypes.POINTER(Spec), ctypes.POINTER(Stop), ctypes.POINTER(List), pointer, pointer, pointer,
                                   ctypes.POINTER(Report)]
LIB.test_left_of.argtypes = [pointer, u32, ctypes.POINTER(Left)]
LIB.test_log.argtypes = [pointer, u32, pointer]


def at(array):
    return None if array is None else array.ctypes.data


class Slots:
    """Random K and V in slots; mla: V is the first channels of K."""

    def __init__(self, rng, n, dtype, tokens, heads, d, v, mla=False):
        self.dtype, self.tokens, self.heads, self.d, self.v, self.n = dtype, tokens, heads, d, v, n
        raw = encode(rng.standard_normal((n, heads, tokens, d if mla else d + v)).astype(f32), dtype)
        self.raw = np.ascontiguousarray(raw)
        size, row = raw.itemsize, raw.strides[2]
        self.shape = Shape(DTYPES[dtype][0], tokens, heads, d, v, 0, 0, row, raw.strides[1], 0 if mla else d * size, row,
                           raw.strides[1])
        self.memory = Memory(at(self.raw), self.raw.strides[0], n)
        self.mla = mla

    def block(self, i, g, tokens=None):
        x = formats.decode(self.raw[i, g, :tokens], self.dtype)
        return x[:, : self.d], x[:, : self.v] if self.mla else x[:, self.d :]


def same(a, b, what=""):
    np.testing.assert_array_equal(a.view(np.uint32)[~np.isnan(a)], b.view(np.uint32)[~np.isnan(b)], what)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b), what)


FORMS = [dict(dtype="f16", tokens=16, heads=2, d=64, v=64), dict(dtype="bf16", tokens=16, heads=1, d=128, v=128),
         dict(dtype="f32", tokens=7, heads=2, d=80, v=36), dict(dtype="fp8_e4m3", tokens=32, heads=1, d=96, v=256),
         dict(dtype="bf16", tokens=16, heads=1, d=576, v=512, mla=True), dict(dtype="f16", tokens=20, heads=3, d=192, v=128)]


class Attention(unittest.TestCase):
    def compare(self, rng, form, group, lists, window, odd=False, **scales):
        pool, pages = Slots(rng, 11, **form), Slots(rng, 9, **form)
        if odd and pool.raw.itemsize == 4:
            pool.raw[rng.random(pool.raw.shape) < 0.002] = np.inf
            pool.raw[rng.random(pool.raw.shape) < 0.002] = np.nan
        chains, heads, room, tokens = 2, pool.heads, 3, pool.tokens
        lists = heads if lists else 1
        q = rng.standard_normal((chains, heads, group, pool.d)).astype(f32)
        slots = rng.integers(0, 11, (chains, lists, room)).astype(np.int32)
        count = rng.integers(0, room + 1, (chains, lists)).astype(np.uint32)
        table = rng.integers(0, 9, (chains, 5)).astype(np.int32)
        first = rng.integers(0, 3, chains).astype(np.uint32)
        length = rng.integers(2 * tokens, 5 * tokens + 1, chains).astype(np.uint32) if window else None
        out, lse = np.full((chains, heads, group, pool.v), 7, f32), np.full((chains, heads, group), 7, f32)
        spec = Spec(pool.shape, group, scale=0.11 if pool.mla else 0, **scales)
        batch = Batch(chains, lists, at(q), pool.memory, at(slots), at(count), room, pages.memory, at(table), 5, at(first),
                      at(length), at(out), at(lse))
        why = ctypes.create_string_buffer(160)
        self.assertEqual(LIB.test_attend(ctypes.byref(spec), ctypes.byref(batch), why), 0, why.value)
        scale = f32(0.11) if pool.mla else f32(1) / np.sqrt(f32(pool.d))
        for c in range(chains):
            for g in range(heads):
                mine = slots[c, g if lists > 1 else 0][: count[c, g if lists > 1 else 0]]
                blocks = [pool.block(s, g) for s in mine]
                for b in range(first[c], -(-int(length[c]) // tokens) if window else 0):
                    blocks.append(pages.block(table[c, b], g, min(tokens, int(length[c]) - b * tokens)))
                want_out, want_lse = attend.attend(q[c, g], blocks, scale * f32(scales.get("k_scale", 1)), scales.get("v_scale", 1))
                if blocks:
                    same(out[c, g], want_out, f"{form} group {group} chain {c} head {g}")
                else:
                    self.assertTrue((out[c, g] == 0).all())
                same(lse[c, g], want_lse)

    def test_every_form(self):
        rng = np.random.default_rng(1)
        for i, form in enumerate(FORMS):
            for group in (1, 3, 16) if i < 3 else (4,):
                self.compare(rng, form, group, lists=group % 3 == 1, window=group != 1)

    def test_every_instruction_set(self):
        rng = np.random.default_rng(2)
        most = LIB.test_isa(2)
        for isa in range(most):
            LIB.test_isa(isa)
            for form in FORMS[:4]:
                self.compare(rng, form, 5, lists=True, window=True)
        LIB.test_isa(2)

    def test_scales_and_what_is_no_number(self):
        rng = np.random.default_rng(3)
        self.compare(rng, FORMS[3], 4, lists=True, window=True, k_scale=0.3, v_scale=1.7)
        for _ in range(4):
            self.compare(rng, FORMS[2], 4, lists=True, window=True, odd=True)

    def test_exact_softmax(self):
        """Against float64, so that both are not wrong together."""
        rng = np.random.default_rng(4)
        for form in FORMS:
            pool = Slots(rng, 8, **form)
            q = rng.standard_normal((4, pool.d)).astype(f32)
            blocks = [pool.block(i, 0) for i in range(8)]
            out, lse = attend.attend(q, blocks, 0.1)
            k, v = (np.concatenate([b[j] for b in blocks]).astype(np.float64) for j in (0, 1))
            logit = q.astype(np.float64) @ k.T * float(f32(0.1))
            weight = np.exp(logit - logit.max(-1, keepdims=True))
            np.testing.assert_allclose(lse, logit.max(-1) + np.log(weight.sum(-1)), atol=2e-5)
            np.testing.assert_allclose(out, weight @ v / weight.sum(-1, keepdims=True), atol=2e-5 * np.abs(v).max())


class Merges(unittest.TestCase):
    def test_merge(self):
        rng = np.random.default_rng(5)
        for n in range(1, 6):
            rows, channels = 40, 72
            outs = [rng.standard_normal((rows, channels)).astype(f32) for _ in range(n)]
            lses = [(rng.standard_normal(rows) * 10 ** rng.integers(0, 5)).astype(f32) for _ in range(n)]
            for lse in lses:
                odd = np.array([-np.inf, -np.inf, -np.inf, np.inf, np.nan], f32)
                lse[:] = np.where(rng.random(rows) < 0.2, odd[rng.integers(5, size=rows)], lse)
            parts = (Part * n)(*(Part(at(o), at(l)) for o, l in zip(outs, lses)))
            out, lse = np.empty((rows, channels), f32), np.empty(rows, f32)
            LIB.test_attend_merge(parts, n, rows, channels, at(out), at(lse))
            want_out, want_lse = attend.merge(list(zip(outs, lses)))
            same(out, want_out)
            same(lse, want_lse)

    def test_log(self):
        x = np.concatenate([np.logspace(-37, 38, 100000), 1 + np.linspace(-0.4, 0.6, 10000)]).astype(f32)
        got = np.empty_like(x)
        LIB.test_log(at(x), len(x), at(got))
        same(got, attend.log(x))
        want = np.log(x.astype(np.float64))
        self.assertLess(np.max(np.abs(got - want) / np.maximum(np.spacing(np.abs(want).astype(f32)), 2 ** -24)), 2)


class Rounds(unittest.TestCase):
    def test_where_rounds_stop(self):
        rng = np.random.default_rng(6)
        stopped = 0
        for round_ in range(48):
            rule, n, group = RULES[round_ % 4], int(rng.integers(1, 20)), 3
            pool = Slots(rng, n, "f16", 8, 1, 32, 8)
            q = (2 * rng.standard_normal((group, 32))).astype(f32)
            blocks = [pool.block(i, 0) for i in range(n)]
            scale = f32(1) / np.sqrt(f32(32))
            exact = np.array([attend.add_block(attend.Result(group, 8), q, k, v, scale) for k, v in blocks])
            order = np.argsort(-exact.max(1), kind="stable").astype(np.int32)
            left = np.ascontiguousarray((exact[order] + np.abs(0.3 * rng.standard_normal(exact.shape))).T.astype(f32))
            every, eps = int(rng.integers(1, 5)), f32(rng.uniform(0.3, 0.99))
            stop, report = Stop(RULES.index(rule), every, eps), Report()
            lists = List(first=0, heads=1, memory=pool.memory, blocks=at(order), n=n, estimate=at(left), bound=at(left), pitch=n)
            out, lse = np.empty((group, 8), f32), np.empty(group, f32)
            self.assertEqual(LIB.test_attend_rounds(ctypes.byref(Spec(pool.shape, group)), ctypes.byref(stop),
                                                    ctypes.byref(lists), at(q), at(out), at(lse), ctypes.byref(report)), 0)
            count, shares = attend.rounds(q, [blocks[i] for i in order], scale, rule, every, eps, left)
            if min(abs(s - eps) for s in shares) > 1e-3:  # else rounding decides
                self.assertEqual(report.blocks, count, rule)
                if rule != "never":
                    self.assertAlmostEqual(report.share, shares[-1], delta=1e-3)
            want = attend.attend(q, [blocks[i] for i in order[: report.blocks]], scale)
            same(out, want[0])
            same(lse, want[1])
            stopped += report.blocks < n
        self.assertGreater(stopped, 12)

    def test_what_is_left(self):
        rng = np.random.default_rng(7)
        for n in (0, 1, 7, 3000):
            x = (rng.standard_normal(n) * 20).astype(f32)
            left = Left()
            LIB.test_left_of(at(x), n, ctypes.byref(left))
            truth = np.exp(x.astype(np.float64) - left.top).sum() if n else 0
            self.assertGreaterEqual(left.units * 2.0 ** -40, truth)
            self.assertLessEqual(left.units * 2.0 ** -40, truth * 1.0001 + n * 2.0 ** -38)
            self.assertEqual(left.unknown, 0)


if __name__ == "__main__":
    unittest.main()
