"""The encodings of docs/encodings.md, "Bytes", in numpy, written from that page and not from our C, so that the two can be compared
byte by byte. Slow and plain.

A Section says what its K or V is; encode() takes its elements as u16[rows, dim] in the page's order and returns the coded bytes,
decode() takes bytes, any, and returns u16[rows, dim].
"""

import dataclasses

import numpy as np
from numpy import errstate

f32, f64, u16, u32 = np.float32, np.float64, np.uint16, np.uint32
F16, BF16 = 1, 2
K, V = 0, 1
NHD, HND = 0, 1
ALIGN, TILE = 16, 16
NAN = {F16: 0x7E00, BF16: 0x7FC0}
INF = {F16: 0x7C00, BF16: 0x7F80}


@dataclasses.dataclass(frozen=True)
class Section:
    dtype: int
    tokens: int
    heads: int
    dim: int
    kind: int = K
    order: int = NHD
    axis: int = 0  # int8
    seed: int = 0  # q4

    @property
    def rows(self):
        return self.tokens * self.heads

    def row(self, token, head):
        return token * self.heads + head if self.order == NHD else head * self.tokens + token

    def tiles(self):
        """The rows of each (tile, head), tile by tile."""
        for first in range(0, self.tokens, TILE):
            for head in range(self.heads):
                yield [self.row(t, head) for t in range(first, min(first + TILE, self.tokens))]


# ---- number formats ----

def values(dtype, raw):
    """Elements to float32, exactly."""
    raw = np.ascontiguousarray(raw, u16)
    return raw.view(np.float16).astype(f32) if dtype == F16 else (raw.astype(u32) << u32(16)).view(f32)


def bf16_nearest(x):
    """Finite float32 to BF16, ties to even: of the two neighbours the nearer one."""
    x = np.asarray(x, f32)
    low = np.abs(x).view(u32) >> u32(16)
    below, above = ((n << u32(16)).view(f32).astype(f64) for n in (low, low + u32(1)))
    above = np.where(low == 0x7F7F, 2.0 ** 128, above)
    exact = np.abs(x).astype(f64)
    up = (exact - below > above - exact) | ((exact - below == above - exact) & (low % 2 == 1))
    return ((low + up) | np.where(np.signbit(x), 0x8000, 0)).astype(u16)


def to_dtype(dtype, x):
    most = f32(65504) if dtype == F16 else values(BF16, [0x7F7F])[0]
    x = np.asarray(x, f32)
    with errstate(invalid="ignore"):
        finite = np.where(np.isnan(x), f32(0), np.clip(x, -most, most))
    raw = finite.astype(np.float16).view(u16) if dtype == F16 else bf16_nearest(finite)
    return np.where(np.isnan(x), NAN[dtype], raw).astype(u16)


def largest(x, axis):
    """Of the finite elements."""
    return np.max(np.where(np.isfinite(x), np.abs(x), f32(0)), axis=axis)


# ---- arrays ----

def join(*arrays):
    out = b""
    for a in arrays:
        a = np.ascontiguousarray(a).tobytes()
        out += a + bytes(-len(a) % ALIGN)
    return np.frombuffer(out, np.uint8)


def split(coded, *shapes):
    """The arrays of a coded form: (dtype, shape) of each."""
    out, at, coded = [], 0, np.ascontiguousarray(coded)
    for kind, shape in shapes:
        n = int(np.prod(shape)) * np.dtype(kind).itemsize
        out.append(coded[at:at + n].view(kind).reshape(shape))
        at += n + -n % ALIGN
    assert at == len(coded)
    return out


def pack4(codes):
    """u4 in a flat order."""
    codes = np.append(codes.reshape(-1), [0] * (codes.size % 2)).astype(np.uint8)
    return codes[0::2] | codes[1::2] << 4


def unpack4(packed, shape):
    return np.stack([packed & 15, packed >> 4], -1).reshape(-1)[:int(np.prod(shape))].reshape(shape)


# ---- fp8 ----

E4M3 = np.array([m / 512 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)])


class Fp8:
    @staticmethod
    def arrays(s):
        return (np.uint8, (s.rows, s.dim)), (np.uint8, (s.rows,))

    @staticmethod
    def encode(s, raw):
        x = values(s.dtype, raw)
        a = largest(x, 1).astype(f64)
        k = np.full(s.rows, -15 if s.dtype == F16 else -124)
        while (over := a * 2.0 ** -k >= 432).any():
            k[over] += 1
        k[a == 0] = 0
        y = np.abs(x).astype(f64) * 2.0 ** -k[:, None]
        middle = (E4M3[:0x7D] + E4M3[1:0x7E]) / 2
        up = np.arange(0x7D) % 2 == 0  # at a tie the even code: that below, if it is even
        code = sum((y > m) if even else (y >= m) for m, even in zip(middle, up))
        code = np.where(np.isinf(x), 0x7E, code) | np.where(np.signbit(x), 0x80, 0)
        code = np.where(np.isnan(x), 0x7F, code)
        return join(code.astype(np.uint8), (k + 127).astype(np.uint8))

    @staticmethod
    def decode(s, coded):
        code, scale = split(coded, *Fp8.arrays(s))
        rest, sign = code & 0x7F, np.where(code & 0x80, f32(-1), f32(1))
        power = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(f64) - 127)).astype(f32)[:, None]
        out = to_dtype(s.dtype, sign * E4M3[rest].astype(f32) * power)
        out = np.where(rest == 0x7E, INF[s.dtype] | (code >> 7).astype(u16) << 15, out)
        return np.where(rest == 0x7F, NAN[s.dtype], out).astype(u16)


# ---- int8 ----

def int8_scale(a):
    """The least BF16 s >= 2^-126 with 126 * s >= a, by looking: a / 126 is near it."""
    near = np.maximum(bf16_nearest((a.astype(f64) / 126).astype(f32)).astype(np.int64) - 2, 0x80)
    for _ in range(5):
        near = np.where(values(BF16, near).astype(f64) * 126 < a, near + 1, near)
    return near.astype(u16)


class Int8:
    @staticmethod
    def by_channel(s):
        return s.axis == 1 and s.kind == K

    @staticmethod
    def arrays(s):
        return (np.int8, (s.rows, s.dim)), (u16, (s.heads, s.dim) if Int8.by_channel(s) else (s.rows,))

    @staticmethod
    def of_elements(s, scale):
        """The scale of each element, from the array of scales."""
        if not Int8.by_channel(s):
            return scale[:, None]
        head = np.arange(s.rows) % s.heads if s.order == NHD else np.arange(s.rows) // s.tokens
        return scale[head]

    @staticmethod
    def encode(s, raw):
        x = values(s.dtype, raw)
        if Int8.by_channel(s):
            a = np.stack([largest(x[[s.row(t, h) for t in range(s.tokens)]], 0) for h in range(s.heads)])
        else:
            a = largest(x, 1)
        scale = int8_scale(a)
        r = f32(1) / Int8.of_elements(s, values(BF16, scale))
        code = np.rint(x * r)
        code = np.where(np.isinf(x), np.copysign(127, x), np.where(np.isnan(x), -128, code))
        return join(code.astype(np.int8), scale)

    @staticmethod
    def decode(s, coded):
        code, scale = split(coded, *Int8.arrays(s))
        out = to_dtype(s.dtype, code.astype(f32) * Int8.of_elements(s, values(BF16, scale)))
        inf = INF[s.dtype] | np.where(code < 0, 0x8000, 0)
        return np.where(code == -128, NAN[s.dtype], np.where(np.abs(code.astype(int)) == 127, inf, out)).astype(u16)


# ---- q4 ----

LEVEL = np.array([6, 18, 31, 44, 59, 76, 97, 127, -6, -18, -31, -44, -59, -76, -97, -127])
BOUND = (12, 24.5, 37.5, 51.5, 67.5, 86.5, 112)


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2 ** 64
    return z ^ z >> 31


def hadamard(x):
    """Of the last axis; in float32 in the page's order of additions, in integers exactly."""
    n, h = x.shape[-1], 1
    while h < n:
        pairs = x.reshape(x.shape[:-1] + (n // (2 * h), 2, h))
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        h *= 2
    return x


class Q4:
    @staticmethod
    def rotation(s):
        return max(r for r in (16, 32, 64, 128) if s.dim % r == 0)

    @staticmethod
    def signs(s):
        """-1 and 1, as [groups, R]."""
        word = [mix((s.seed + 0x9E3779B97F4A7C15 * (1 + c // 64)) % 2 ** 64) for c in range(s.dim)]
        return np.array([-1 if w >> c % 64 & 1 else 1 for c, w in enumerate(word)]).reshape(-1, Q4.rotation(s))

    @staticmethod
    def arrays(s):
        groups = s.dim // Q4.rotation(s)
        centres = len(list(s.tiles())) if s.kind == K else 0
        return ((np.uint8, (s.rows * s.dim // 2,)), (u16, (s.rows, groups)), (np.uint8, (centres * s.dim // 2,)), (u16, (centres, groups)))

    @staticmethod
    def quantise(y):
        """[..., R] to codes and scales."""
        a = np.max(np.abs(y), -1)
        finite = np.isfinite(y).all(-1)
        scale = np.where(finite, bf16_nearest(np.where(finite, a, f32(0)) * np.array([0x3BF2B9D6], u32).view(f32)), 0x7FC0).astype(u16)
        s = values(BF16, scale)
        scale[s < 2.0 ** -100] = 0
        none = (scale == 0) | (scale == 0x7FC0)
        y, s = np.where(none[..., None], f32(0), y), np.where(none, f32(1), s)
        size = np.abs(y) * (f32(1) / s)[..., None]
        code = sum((size >= f32(b)).astype(int) for b in BOUND) + np.where(y < 0, 8, 0)
        return np.where(none[..., None], 0, code), scale

    @staticmethod
    def centre(y):
        """Of y[n, R], the rows of one tile, head and group: codes, scale, and what is left of the rows."""
        total = y[0]
        for row in y[1:]:
            total = total + row
        (code,), (scale,) = Q4.quantise((total * (f32(1) / f32(len(y))))[None])
        if scale != 0x7FC0:
            left = y - LEVEL[code].astype(f32) * values(BF16, [scale])
            sane = np.isfinite(left).all() and np.isfinite(y).all()
            if sane and (np.max(np.abs(left), 1) <= f32(1.25) * np.max(np.abs(y), 1)).all():
                return code, scale, left
        return code * 0, np.uint16(0), y

    @staticmethod
    def encode(s, raw):
        signs = Q4.signs(s)
        y = hadamard(values(s.dtype, raw).reshape((s.rows,) + signs.shape) * signs.astype(f32))
        centres, scales = [], []
        for rows in s.tiles() if s.kind == K else ():
            for g in range(len(signs)):
                code, scale, y[rows, g] = Q4.centre(y[rows, g])
                centres.append(code)
                scales.append(scale)
        code, scale = Q4.quantise(y)
        return join(pack4(code), scale, pack4(np.array(centres)), np.array(scales, u16))

    @staticmethod
    def decode(s, coded):
        code, scale, centre, centre_scale = split(coded, *Q4.arrays(s))
        signs = Q4.signs(s)
        part = f32(1 / signs.shape[1])

        def back(code, scale):
            shape = scale.shape + (signs.shape[1],)
            return (hadamard(LEVEL[unpack4(code, shape)]) * signs).astype(f32) * (values(BF16, scale) * part)[..., None]

        x, w = back(code, scale), np.zeros((s.rows,) + signs.shape, f32)
        if s.kind == K:
            for rows, add in zip(s.tiles(), back(centre, centre_scale)):
                w[rows] = add
        return to_dtype(s.dtype, x + w).reshape(s.rows, s.dim)


# ---- lossless ----

class Lossless:
    UNFIT = 0xFFFFFFFF

    @staticmethod
    def arrays(s):
        n = s.rows * s.dim
        return ((np.uint8, (n,)), (np.uint8, ((n + 1) // 2,)), (np.uint8, (len(list(s.tiles())),)), (u32, (1 + -(-n // 128),)))

    @staticmethod
    def of_rows(s, base):
        out = np.zeros((s.rows, 1), int)
        for rows, b in zip(s.tiles(), base):
            out[rows] = b
        return out

    @staticmethod
    def encode(s, raw):
        e = (raw >> 7 & 255).astype(int)
        base = [np.max(np.where(e[rows] == 255, 0, e[rows])) for rows in s.tiles()]
        away = Lossless.of_rows(s, base) - e
        code = np.where(e == 0, 14, np.where((away >= 0) & (away <= 13), away, 15))
        escapes = [int(i) * 256 + int(e.flat[i]) for i in np.flatnonzero(code == 15)]
        rest, codes, bases, entries = (np.zeros(shape, kind) for kind, shape in Lossless.arrays(s))
        if len(escapes) >= len(entries):
            entries[0] = Lossless.UNFIT
            return join(rest, codes, bases, entries)
        entries[:1 + len(escapes)] = [len(escapes)] + escapes
        return join(((raw >> 8 & 0x80) | (raw & 0x7F)).astype(np.uint8), pack4(code), np.array(base, np.uint8), entries)

    @staticmethod
    def decode(s, coded):
        rest, codes, base, entries = split(coded, *Lossless.arrays(s))
        code = unpack4(codes, (s.rows, s.dim)).astype(int)
        e = np.where(code < 14, (Lossless.of_rows(s, base) - code) % 256, 0).reshape(-1)
        count = int(entries[0])
        for entry in entries[1:1 + count] if count != Lossless.UNFIT else ():
            if entry >> 8 < e.size:
                e[entry >> 8] = entry & 255
        rest = rest.astype(int)
        return ((rest & 0x80) << 8 | e << 7 | (rest & 0x7F)).astype(u16).reshape(s.rows, s.dim)


METHODS = {"fp8": Fp8, "int8": Int8, "q4": Q4, "lossless": Lossless}
