#!/usr/bin/python3
"""The summaries of kernels/sparse against the independent numpy of
tests/reference/sparse/methods.py, byte by byte and score by score. Every method, format and
instruction set, GQA and MLA. Strides with gaps, poison, zeros, denormals, huge values."""

import ctypes
import os
import pathlib
import sys
import unittest
import zlib

import numpy as np

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/reference/sparse"))
import formats  # noqa: E402
import methods  # noqa: E402

LIB = ctypes.CDLL(os.environ.get("UCM_SPARSE_KERNELS", str(TOP / "build/sparse_kernels.so")))
METHODS = {"mean": 1, "submean": 2, "box": 3, "hash": 4, "stats": 5, "tokens": 6}
DTYPES = {"f32": (0, np.float32), "f16": (1, np.float16), "bf16": (2, np.uint16), "fp8_e4m3": (3, np.uint8)}
ISAS = ["base", "avx2", "avx512"]
u32, u64 = ctypes.c_uint32, ctypes.c_uint64


class Shape(ctypes.Structure):
    _fields_ = [(n, u32) for n in ("dtype", "tokens", "kv_heads", "head_dim", "v_head_dim", "rope_dim")] + \
               [(n, u64) for n in ("k_offset", "k_token_stride", "k_head_stride", "v_offset", "v_token_stride", "v_head_stride")]


class Spec(ctypes.Structure):
    _fields_ = [(n, u32) for n in ("method", "kind", "run", "pairs", "keep_bytes")] + [("keep", ctypes.c_uint8 * 64)] + \
               [("bits", u32), ("rope_bits", u32), ("seed", u64), ("chosen", u32), ("rest", u32), ("beta", ctypes.c_float), ("shape", Shape)]


LIB.test_plan.restype = ctypes.c_void_p
LIB.test_plan.argtypes = [ctypes.POINTER(Spec), ctypes.c_char_p]
LIB.test_plan_free.argtypes = LIB.test_bytes.argtypes = [ctypes.c_void_p]
LIB.test_extent.restype = u64
LIB.test_build.argtypes = [ctypes.c_void_p, ctypes.c_void_p, u64, u32, ctypes.c_void_p]
LIB.test_score.argtypes = [ctypes.c_void_p, u32, ctypes.c_void_p, u32, ctypes.c_void_p, u32, ctypes.c_void_p]
assert LIB.test_spec_bytes() == ctypes.sizeof(Spec)


def c_spec(m, dtype, gap=0, k_offset=0):
    """The C spec of a numpy one. K lies token by token, and V after it; gap: elements between heads and between tokens."""
    size = np.dtype(DTYPES[dtype][1]).itemsize
    spec = Spec(method=METHODS[m.method], kind=m.kind, run=m.run, pairs=int(m.pairs == "interleaved"), bits=m.bits,
                rope_bits=m.bits - m.latent_bits if m.rope_dim else 0, seed=m.seed, chosen=m.stand_ins, rest=m.rest)
    if m.keep:
        spec.keep_bytes = (m.head_dim // 2 + 7) // 8
        for pair in m.keep:
            spec.keep[pair // 8] |= 1 << pair % 8
    s = spec.shape
    s.dtype, s.tokens, s.kv_heads, s.head_dim, s.v_head_dim, s.rope_dim = \
        DTYPES[dtype][0], m.tokens, m.kv_heads, m.head_dim, m.v_head_dim, m.rope_dim
    s.k_offset = k_offset * size
    s.k_head_stride = (m.head_dim + gap) * size
    s.k_token_stride = m.kv_heads * s.k_head_stride + gap * size
    s.v_offset = s.k_offset + m.tokens * s.k_token_stride
    s.v_head_stride = (m.v_head_dim + 2 * gap) * size
    s.v_token_stride = m.kv_heads * s.v_head_stride + 3 * gap * size
    return spec


def lay(spec, raw_k, raw_v, seed):
    """Blocks in memory as the spec says; bytes that it does not name are random."""
    s, n = spec.shape, len(raw_k)
    size = raw_k.dtype.itemsize
    stride = s.v_offset + s.tokens * s.v_token_stride + 64
    memory = np.random.default_rng(seed).integers(0, 256, (n, stride), np.uint8)
    for raw, offset, token, head in ((raw_k, s.k_offset, s.k_token_stride, s.k_head_stride),
                                     (raw_v, s.v_offset, s.v_token_stride, s.v_head_stride)):
        for t in range(s.tokens if raw is not None else 0):
            for g in range(s.kv_heads):
                at = offset + t * token + g * head
                memory[:, at:at + raw.shape[-1] * size] = np.ascontiguousarray(raw[:, t, g]).view(np.uint8)
    return memory


def values(rng, dtype, shape, kind):
    """Raw elements: normal, huge, tiny (denormal), zero blocks among them, any finite bits, poison."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[..., 0] *= 30  # a channel that stands out, as keys have them
    if kind == "huge":
        with np.errstate(over="ignore"):
            x *= {"f32": 1e37, "f16": 1e4, "bf16": 1e37, "fp8_e4m3": 100}[dtype]
    elif kind == "tiny":
        x *= {"f32": 1e-41, "f16": 1e-7, "bf16": 1e-40, "fp8_e4m3": 1e-3}[dtype]
    elif kind == "zero":
        x[:, :, ::2] = 0
        x[:, :, :, ::5] = -0.0
    raw = encode(x, dtype)
    if kind in ("bits", "poison"):
        t = raw.dtype.type
        bits = rng.integers(0, 256, raw.nbytes, np.uint8).view(t).reshape(shape)
        clean = np.isfinite(formats.decode(bits, dtype))
        raw = np.where(clean if kind == "bits" else np.ones_like(clean), bits, raw).astype(t)
        if kind == "poison":  # about one head in two
            keep = np.where(np.isfinite(formats.decode(raw, dtype)), raw, encode(x, dtype))
            bad = rng.random((shape[0], 1, shape[2], 1)) < 0.5
            raw = np.where(bad, raw, keep).astype(t)
    return raw


def encode(x, dtype):
    if dtype == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "fp8_e4m3":
        table = formats.fp8_e4m3_to_f32(np.arange(256))
        table[[0x7F, 0xFF]] = np.inf
        order = np.argsort(table)[:254]
        return order[np.clip(np.searchsorted(table[order], x), 0, 253)].astype(np.uint8)
    return np.clip(x, -65504, 65504).astype(np.float16) if dtype == "f16" else x


class Plan:
    def __init__(self, spec, isa=2):
        why = ctypes.create_string_buffer(160)
        LIB.test_isa(isa)
        self.spec, self.plan = spec, LIB.test_plan(ctypes.byref(spec), why)
        LIB.test_isa(2)
        self.why = why.value.decode()
        self.bytes = LIB.test_bytes(self.plan) if self.plan else 0

    def __enter__(self):
        assert self.plan, self.why
        return self

    def __exit__(self, *_):
        LIB.test_plan_free(self.plan)

    def build(self, memory):
        out = np.full((len(memory), self.bytes), 0xA5, np.uint8)
        LIB.test_build(self.plan, memory.ctypes.data, memory.shape[1], len(memory), out.ctypes.data)
        return out

    def score(self, q, summaries, metric):
        out = np.empty((len(q), len(summaries)), np.float32)
        assert LIB.test_score(self.plan, int(metric == "l2"), q.ctypes.data, len(q), summaries.ctypes.data, len(summaries),
                              out.ctypes.data) == 0
        return out


def same(a, b):
    """Equal bits, except for the sign of zero and the kind of NaN."""
    return np.array_equal(a, b, equal_nan=True)


ALL = [dict(method="mean", kind=0), dict(method="mean", kind=1), dict(method="mean", kind=2),
       dict(method="submean", run=4), dict(method="submean", run=8, keep=(0, 1, 5, 9, 31)),
       dict(method="submean", run=1, keep=(2, 3, 30), pairs="interleaved"), dict(method="box"),
       dict(method="hash", bits=64, seed=7), dict(method="hash", bits=128, seed=2 ** 64 - 1), dict(method="hash", bits=256),
       dict(method="stats"), dict(method="tokens", stand_ins=1), dict(method="tokens", stand_ins=3),
       dict(method="tokens", stand_ins=16), dict(method="tokens", stand_ins=1, rest=1), dict(method="tokens", stand_ins=3, rest=1),
       dict(method="tokens", stand_ins=15, rest=1)]
SHAPES = [dict(tokens=16, kv_heads=2, head_dim=64, v_head_dim=64), dict(tokens=32, kv_heads=3, head_dim=80, v_head_dim=40),
          dict(tokens=16, kv_heads=1, head_dim=96, v_head_dim=0), dict(tokens=16, kv_heads=4, head_dim=128, v_head_dim=128)]
MLA = dict(tokens=16, kv_heads=1, head_dim=576, v_head_dim=0, rope_dim=64)


class Summaries(unittest.TestCase):
    def compare(self, m, dtype, kind, isa, gap=0, k_offset=0, blocks=4):
        rng = np.random.default_rng(zlib.crc32(repr((m, dtype, kind, gap)).encode()))
        shape = (blocks, m.tokens, m.kv_heads)
        raw_k = values(rng, dtype, shape + (m.head_dim,), kind)
        raw_v = values(rng, dtype, shape + (m.v_head_dim,), kind) if m.v_head_dim else None
        if kind == "poison":
            raw_v = None if raw_v is None else values(rng, dtype, raw_v.shape, "normal")
        spec = c_spec(m, dtype, gap, k_offset)
        what = f"{m} {dtype} {kind} {ISAS[isa]} gap {gap}"
        with np.errstate(all="ignore"), Plan(spec, isa) as plan:
            summary = methods.build(m, formats.decode(raw_k, dtype), None if raw_v is None else formats.decode(raw_v, dtype))
            want = methods.pack(m, summary)
            got = plan.build(lay(spec, raw_k, raw_v, 1))
            self.assertEqual(plan.bytes, methods.summary_bytes(m), what)
            np.testing.assert_array_equal(got, want, what)
            q = rng.standard_normal((m.kv_heads * 2, m.head_dim)).astype(np.float32)
            q[0, ::3] = 0
            q[1] *= np.float32({"huge": 1e20, "tiny": 1e-30}.get(kind, 1))
            for metric in ("dot", "l2") if m.method in ("mean", "submean", "tokens") and not m.rest else ("dot",):
                mine, theirs = plan.score(q, got, metric), methods.score(m, summary, q[None], metric)[0]
                if m.rest:  # has exp() and a logarithm in it
                    np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6, err_msg=what)
                else:
                    self.assertTrue(same(mine, theirs), f"{what} {metric}:\n{mine}\n{theirs}")

    def test_every_method_and_format(self):
        for args in ALL:
            for i, dtype in enumerate(DTYPES):
                for kind in ("normal", "huge", "tiny", "zero", "bits", "poison"):
                    self.compare(methods.Spec(**SHAPES[i], **args), dtype, kind, 2, gap=(0, 1, 3)[i % 3])

    def test_every_shape(self):
        for args in ALL:
            for i, shape in enumerate(SHAPES + [dict(tokens=16, kv_heads=2, head_dim=68, v_head_dim=4)]):
                self.compare(methods.Spec(**shape, **args), list(DTYPES)[i % 4], "normal", 2, gap=i, k_offset=5)

    def test_every_instruction_set(self):
        most = LIB.test_isa(2)
        for args in ALL:
            for isa in range(most):
                for i, kind in enumerate(("normal", "bits", "tiny", "poison")):
                    self.compare(methods.Spec(**SHAPES[1], **args), list(DTYPES)[i], kind, isa, gap=1)

    def test_mla(self):
        for args in ALL:
            more = dict(latent_bits=args["bits"] - 24) if args["method"] == "hash" else {}
            for dtype in ("bf16", "fp8_e4m3"):
                self.compare(methods.Spec(**MLA, **args, **more), dtype, "normal", 2, blocks=2)

    def test_one_token_and_long_blocks(self):
        for args in ALL:
            for tokens in (1, 64):
                if args["method"] == "submean" and tokens % args["run"] or args.get("stand_ins", 0) + args.get("rest", 0) > tokens:
                    continue
                self.compare(methods.Spec(tokens=tokens, kv_heads=1, head_dim=64, v_head_dim=64, **args), "f16", "normal", 2)


class Arithmetic(unittest.TestCase):
    def test_every_f16_and_fp8(self):
        """Each finite element by itself: a block of one token, all of whose channels are that
        element."""
        for dtype, count in (("f16", 65536), ("fp8_e4m3", 256)):
            raw = np.arange(count).astype(np.uint16 if dtype == "f16" else np.uint8)
            raw = raw.view(DTYPES[dtype][1])
            m = methods.Spec("box", tokens=1, kv_heads=1, head_dim=4)
            k = np.repeat(raw[:, None, None, None], 4, 3)
            for isa in range(LIB.test_isa(2) + 1):
                spec = c_spec(m, dtype)
                with Plan(spec, isa) as plan:
                    want = methods.pack(m, methods.build(m, formats.decode(k, dtype)))
                    np.testing.assert_array_equal(plan.build(lay(spec, k, None, 0)), want)

    def test_exp(self):
        x = np.concatenate([-np.logspace(-30, np.log10(88), 200000), [0, -0.0, -87, -88, -1e30, -np.inf, np.nan]]).astype(np.float32)
        got = np.empty_like(x)
        LIB.test_exp(x.ctypes.data_as(ctypes.c_void_p), u32(len(x)), got.ctypes.data_as(ctypes.c_void_p))
        want = np.where(x >= -87, np.exp(x.astype(np.float64)), 0)
        self.assertLess(np.max(np.abs(got - want) / np.spacing(want.astype(np.float32))), 2)
        self.assertEqual(got[-1], 0)

    def test_fma_without_the_instruction(self):
        rng = np.random.default_rng(5)
        a, b, c = (rng.integers(0, 2 ** 32, 200000, np.uint32).view(np.float32) for _ in range(3))
        got = np.empty_like(a)
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, c)]
        with np.errstate(all="ignore"):
            c[::2] = -(a[::2].astype(np.float64) * b[::2]).astype(np.float32)  # what remains is the rounding
            LIB.test_fma(*pointers, u32(len(a)), got.ctypes.data_as(ctypes.c_void_p))
            self.assertTrue(same(got, methods.fma(a, b, c)))


if __name__ == "__main__":
    unittest.main()
