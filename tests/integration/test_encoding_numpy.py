#!/usr/bin/python3
"""The encodings of kernels/encoding against the independent numpy of
tests/reference/encoding/methods.py, byte by byte: every encoding, type and instruction set, both
orders and axes. Odd sizes, NaN, infinities, denormals, zeros, and decoding of any bytes. Errors are
at most what docs/design/encodings.md states."""

import ctypes
import os
import pathlib
import struct
import sys
import unittest
import zlib

import numpy as np

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/reference/encoding"))
import methods  # noqa: E402
from methods import METHODS, K, Spec, V  # noqa: E402

LIB = ctypes.CDLL(os.environ.get("UCM_ENCODING_KERNELS", str(TOP / "build/encoding_kernels.so")))
u32 = ctypes.c_uint32
DTYPES = {"f16": 1, "bf16": 2}
ISAS = ["base", "avx2", "avx512"]
KINDS = ["normal", "bits", "finite", "tiny", "huge", "special", "zero", "mixed"]


class CTensor(ctypes.Structure):
    _fields_ = [(n, u32) for n in ("kind", "tokens", "heads", "dim", "order")]


class CSpec(ctypes.Structure):
    _fields_ = [(n, u32) for n in ("encoding", "version", "dtype", "n_tensors")] + \
               [("tensor", CTensor * 2), ("axis", u32), ("run", u32), ("seed", ctypes.c_uint64)]


LIB.test_bytes.restype = ctypes.c_uint64
assert LIB.test_spec_bytes() == ctypes.sizeof(CSpec)


def c_spec(s):
    """Both tensors are s, except for their kinds."""
    spec = CSpec(encoding=LIB.test_number(s.encoding.encode()), version=LIB.test_version(s.encoding.encode()), dtype=DTYPES[s.dtype], n_tensors=2, axis=s.axis, run=s.run,
                 seed=s.seed)
    for i in range(2):
        spec.tensor[i] = CTensor(i, s.tokens, s.heads, s.dim, s.order)
    why = ctypes.create_string_buffer(200)
    assert LIB.test_check(ctypes.byref(spec), why) == 0, why.value
    return spec


def by_tokens(s, raw):
    """Elements as they lie in the page -> [1, tokens, heads, dim]"""
    page = (1, s.heads, s.tokens, s.dim) if s.order else (1, s.tokens, s.heads, s.dim)
    return methods.rows_of(s, raw.reshape(page))


def numpy_encode(s, raw):
    return methods.pack(s, methods.encode(s, by_tokens(s, raw)))[0]


def numpy_decode(s, encoded):
    return methods.rows_of(s, methods.decode(s, methods.unpack(s, encoded[None]))).reshape(-1, s.dim)


def rows_of(rng, dtype, shape, kind):
    """Raw elements."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[..., 0] *= 30  # channels that stand out, as keys have them
    x[..., 1::7] *= 2.0 ** rng.integers(-3, 19 if dtype == "bf16" else 9)
    raw = methods.from_f32(dtype, x)
    bits = rng.integers(0, 65536, shape).astype(np.uint16)
    inf = int(methods.infinity(dtype))
    if kind == "bits":
        return bits
    if kind == "finite":
        return np.where(bits & inf == inf, bits & (0xFFFF ^ inf), bits).astype(np.uint16)
    if kind == "tiny":
        return bits & (0x8FFF if dtype == "f16" else 0x81FF)
    if kind == "huge":
        return ((bits & 0x80FF) | (0x7B00 if dtype == "f16" else 0x7F00)).astype(np.uint16)
    if kind == "special":
        odd = rng.choice(np.array([inf, inf | 0x8000, inf | 1, 0xFFFF, 0, 0x8000, 1], np.uint16), shape)
        return np.where(rng.random(shape) < 0.02, odd, raw)
    if kind == "zero":
        return np.where(rng.random(shape) < 0.5, bits & 0x8000, raw).astype(np.uint16) * (rng.random((shape[0], 1)) < 0.7)
    if kind == "mixed":
        each = [rows_of(rng, dtype, shape, k) for k in KINDS[:-1]]
        return np.stack(each)[rng.integers(0, len(each), shape[0]), np.arange(shape[0])]
    return raw


class Encodings(unittest.TestCase):
    def compare(self, s, kind, isa=2):
        what = f"{s} {kind} {ISAS[isa]}"
        rng = np.random.default_rng(zlib.crc32(what.encode()))
        raw = np.ascontiguousarray(rows_of(rng, s.dtype, (s.tokens * s.heads, s.dim), kind).astype(np.uint16))
        encoded = self.compare_encode(s, raw, isa, what)
        plain = self.compare_decode(s, encoded, what)
        with np.errstate(all="ignore"):
            self.check_errors(s, raw, plain, encoded, what)
        if s.encoding == "fp8":
            np.testing.assert_array_equal(self.compare_encode(s, plain, isa, what), encoded, what)
        at = rng.integers(0, len(encoded), 1 + len(encoded) // 16)
        encoded[at] = rng.integers(0, 256, len(at))
        self.compare_decode(s, encoded, what + ", changed")
        self.compare_decode(s, rng.integers(0, 256, len(encoded), np.uint8), what + ", random")

    def check_errors(self, s, raw, plain, encoded, what):
        """As docs/design/encodings.md states them."""
        arrays, y_bits = methods.unpack(s, encoded[None]), by_tokens(s, plain)
        x, y = methods.to_f32(s.dtype, by_tokens(s, raw)), methods.to_f32(s.dtype, y_bits)
        if s.encoding == "lossless":
            self.assertTrue(arrays[3][0] == methods.UNFIT or np.array_equal(raw, plain), what)
            return
        if s.encoding == "q4":
            shift = methods.by_token(arrays[4] if s.kind == K else methods.unshifted(s), s.tokens, methods.TILE)
            x, y = (methods.groups(v) * np.ldexp(1.0, -shift.astype(np.int32)) for v in (x, y))
            nan, scale = arrays[1] == 0x7FC0, methods.bf16(arrays[1])
            np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(nan[..., None], y.shape), what)
            self.assertTrue(nan[~np.isfinite(x).all(-1)].all(), what)
            most = 15.2 * scale + 2.0 ** -8 * np.linalg.norm(y, axis=-1) + 2.0 ** -91
            self.assertTrue((nan | (np.linalg.norm(x - y, axis=-1) <= most)).all(), what)
            return
        if s.encoding == "fp8":
            most = np.maximum(abs(x) / 16, np.ldexp(1.0, arrays[1].astype(np.int32) - 137)[..., None])
            self.assertTrue((np.isnan(x) | (np.signbit(x) == np.signbit(y))).all(), what)
        else:
            run = methods.int8_run(s)
            scale = methods.bf16(methods.by_token(arrays[1], s.tokens, run) if run else arrays[1][..., None])
            most = 0.51 * scale + abs(y) * 2.0 ** (-11 if s.dtype == "f16" else -8) + (s.dtype == "f16") * 2.0 ** -25
        self.assertTrue((~np.isfinite(x) | (abs(x - y) <= most)).all(), what)
        wanted = methods.special(s.dtype, y_bits, np.isnan(x), np.isposinf(x), np.isneginf(x))
        np.testing.assert_array_equal(y_bits, wanted, what)

    def compare_encode(self, s, raw, isa, what):
        spec = c_spec(s)
        encoded = np.full(LIB.test_bytes(ctypes.byref(spec), s.kind), 0xA5, np.uint8)
        LIB.test_isa(isa)
        LIB.test_encode(ctypes.byref(spec), s.kind, raw.ctypes, encoded.ctypes)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(encoded, numpy_encode(s, raw), what)
        return encoded

    def compare_decode(self, s, encoded, what):
        plain = np.full((s.tokens * s.heads, s.dim), 0xA5A5, np.uint16)
        LIB.test_decode(ctypes.byref(c_spec(s)), s.kind, encoded.ctypes, plain.ctypes)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(plain, numpy_decode(s, encoded), what)
        return plain

    def specs(self, name):
        """Sizes, orders, kinds, types, axes and runs, not each with each."""
        dims = (16, 48, 64, 80, 128, 256, 576) if name == "q4" else (1, 3, 16, 33, 64, 127, 128, 576)
        for i, dim in enumerate(dims * 4):
            dtype = "bf16" if name == "lossless" or (i + i // len(dims)) % 2 else "f16"
            tokens = (1, 5, 16, 17, 33)[i % 5]
            yield Spec(name, dtype, (K, V)[i // 2 % 2], tokens, 1 + i % 3, dim, i % 2, i // 3 % 2 * (name == "int8"),
                       min(tokens, (0, 1, 3, 16)[i // 5 % 4]), i * 0x9999999999999 * (name == "q4"))

    def test_every_size_and_kind(self):
        for name in METHODS:
            for i, s in enumerate(self.specs(name)):
                self.compare(s, KINDS[i % len(KINDS)])
                self.compare(s, KINDS[(i + i // len(KINDS) + 1) % len(KINDS)])

    def test_every_instruction_set(self):
        for name in METHODS:
            for isa in range(LIB.test_isa(2) + 1):
                for i, kind in enumerate(KINDS):
                    dtype = "bf16" if name == "lossless" or i % 2 else "f16"
                    self.compare(Spec(name, dtype, i // 2 % 2, 16, 3, 80, i % 2, i // 3 % 2 * (name == "int8"),
                                      i // 4 * 6, 7 * (name == "q4")), kind, isa)

    def test_every_element(self):
        """All 65,536 patterns, in rows of their neighbours and, each by itself, in rows of one."""
        raw = np.arange(65536, dtype=np.uint16)
        for name in METHODS:
            for dtype in ("bf16",) if name == "lossless" else ("f16", "bf16"):
                for dim in (128, 16 if name == "q4" else 1):
                    s = Spec(name, dtype, V, 1024 // dim, 64, dim)
                    self.compare_decode(s, self.compare_encode(s, raw.reshape(-1, dim), 2, str(s)), str(s))


class Identity(unittest.TestCase):
    def test_fields(self):
        """Field by field as kernels/encoding/encoding.h lists them."""
        out = (ctypes.c_uint8 * 96)()
        for name, axis, order, seed, run in (("fp8", 0, 0, 0, 0), ("int8", 1, 1, 0, 5), ("int8", 1, 1, 0, 16), ("int8", 0, 0, 0, 5),
                                             ("q4", 0, 1, 12345678901234567890, 5), ("lossless", 0, 1, 0, 5)):
            spec = c_spec(Spec(name, "bf16", K, 16, 8, 128, 1, axis or name != "int8", run, 12345678901234567890))
            LIB.test_identity(ctypes.byref(spec), out)
            want = struct.pack("<6IQ10I", 1, spec.encoding, spec.version, 2, 2, axis, seed,
                               0, 16, 8, 128, order, 1, 16, 8, 128, order if name == "lossless" else 0)
            want += struct.pack("<I", run if axis and run < 16 else 0)
            self.assertEqual(bytes(out), want.ljust(96, b"\0"), name)


if __name__ == "__main__":
    unittest.main()
