"""The encodings of docs/design/encodings.md in numpy, written from that page and not from our C, so that the two can be compared bit by bit.

x is the raw form of n tensors, uint16[n, tokens, heads, dim], whatever the order of rows in a page.
encode() gives the arrays of a tensor's form, decode() takes them; pack() and unpack() make bytes of
them and back, in a page's order. cupy may stand in for numpy: set methods.np.

Works with numpy 1.24 and newer."""

import dataclasses

import numpy as np
from numpy import errstate

f32, f64, u8, u16, u32 = np.float32, np.float64, np.uint8, np.uint16, np.uint32
GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
K, V = 0, 1
TILE = 16  # tokens that share a centre or a base


@dataclasses.dataclass(frozen=True)
class Spec:
    encoding: str
    dtype: str = "bf16"  # or "f16"
    kind: int = K
    tokens: int = 16
    heads: int = 3
    dim: int = 64
    order: int = 0  # 0: NHD, 1: HND
    axis: int = 0   # int8: 1 is a scale a channel of K
    run: int = 0    # int8, axis 1: over so many tokens; 0: the tensor's
    seed: int = 0   # q4


# ---- number formats ----

def to_f32(dtype, bits):
    if dtype == "f16":
        return bits.view(np.float16).astype(f32)
    return bf16(bits)


def bf16(bits):
    return (bits.astype(u32) << u32(16)).view(f32)


def from_f32(dtype, x):
    """"to dtype" of docs/design/encodings.md."""
    with errstate(over="ignore"):
        if dtype == "f16":
            bits = np.clip(x, -65504, 65504).astype(np.float16).view(u16)
            return np.where(np.isnan(x), u16(0x7E00), bits)
    u = np.ascontiguousarray(x, f32).view(u32)
    rounded = (u + u32(0x7FFF) + ((u >> u32(16)) & u32(1))) >> u32(16)
    rounded = np.where((rounded & u32(0x7FFF)) >= u32(0x7F80), (u >> u32(16)) & u32(0x8000) | u32(0x7F7F), rounded)
    return np.where(np.isnan(x), u32(0x7FC0), rounded).astype(u16)


def infinity(dtype):
    return u16(0x7C00 if dtype == "f16" else 0x7F80)


def special(dtype, value, nan, positive, negative):
    """value, or NaN and the infinities where nan, positive and negative say so."""
    nan_bits = u16(0x7E00 if dtype == "f16" else 0x7FC0)
    out = np.where(positive, infinity(dtype), np.where(negative, infinity(dtype) | u16(0x8000), value))
    return np.where(nan, nan_bits, out).astype(u16)


def largest(x, axis):
    """The largest of the finite elements' magnitudes."""
    return np.where(np.isfinite(x), abs(x), f32(0)).max(axis, keepdims=True)


def pieces(x, size):
    """[n, tokens, ...] -> of each `size` tokens [n, tokens, ...]; the last may be fewer"""
    return [x[:, at:at + size] for at in range(0, x.shape[1], size)]


def by_token(x, tokens, size):
    """[n, pieces, ...] -> for each token the value of its piece."""
    return np.repeat(x, size, 1)[:, :tokens]


# ---- fp8 ----

def fp8_codes(y):
    """E4M3 of |y| < 432, without its sign."""
    e = np.maximum(np.where(y == 0, -6, np.frexp(abs(y))[1] - 1), -6).astype(np.int32)
    return 8 * (e + 6) + np.rint(np.ldexp(abs(y), 3 - e)).astype(np.int32)  # 16 eighths carry into the exponent


def fp8_encode(spec, x):
    x = to_f32(spec.dtype, x)
    m, e = np.frexp(largest(x, -1))
    k = np.where(m < 432 / 512, e - 9, e - 8)
    k = np.where(m == 0, 0, np.maximum(k, -15 if spec.dtype == "f16" else -124)).astype(np.int32)
    with errstate(invalid="ignore", over="ignore"):
        y = np.where(np.isfinite(x), abs(x), f32(0)) * np.ldexp(f32(1), -k)
    code = fp8_codes(y)
    code = np.where(np.isinf(x), 0x7E, code) | np.where(np.signbit(x), 0x80, 0)
    return [np.where(np.isnan(x), 0x7F, code).astype(u8), (k[..., 0] + 127).astype(u8)]


def fp8_decode(spec, arrays):
    code, scale = arrays
    rest = (code & 0x7F).astype(np.int32)
    e = np.maximum(rest >> 3, 1) - 7
    value = np.ldexp((np.where(rest >= 8, 8, 0) + (rest & 7)).astype(f32), e - 3)
    value = np.where(code & 0x80, -value, value)
    power = np.ldexp(f32(1), np.where(scale == 255, 0, scale).astype(np.int32) - 127)
    power = np.where(scale == 255, f32(np.nan), power)[..., None]
    with errstate(over="ignore", invalid="ignore"):
        bits = from_f32(spec.dtype, value.astype(f32) * power.astype(f32))
    return special(spec.dtype, bits, rest == 0x7F, code == 0x7E, code == 0xFE)


# ---- int8 ----

def int8_run(spec):
    """Tokens that share a channel's scale; 0: a row has one."""
    return (spec.run or spec.tokens) if spec.axis and spec.kind == K else 0


def int8_encode(spec, x):
    x, run = to_f32(spec.dtype, x), int8_run(spec)
    a = (np.concatenate([largest(p, 1) for p in pieces(x, run)], 1) if run else largest(x, -1)).astype(f64)
    scale = np.maximum(((a / 126).astype(f32).view(u32) >> u32(16)).astype(np.int64) - 1, 0)
    for _ in range(3):
        scale = np.where(126 * bf16(scale.astype(u16)).astype(f64) < a, scale + 1, scale)
    scale = np.maximum(scale, 0x80).astype(u16)
    s = bf16(by_token(scale, spec.tokens, run) if run else scale)
    with errstate(invalid="ignore", over="ignore"):
        code = np.rint(x * (f32(1) / s))
    code = np.where(np.isposinf(x), f32(127), np.where(np.isneginf(x), f32(-127), code))
    code = np.where(np.isnan(x), f32(-128), code).astype(np.int8)
    return [code, scale if run else scale[..., 0]]


def int8_decode(spec, arrays):
    (code, scale), run = arrays, int8_run(spec)
    s = bf16(by_token(scale, spec.tokens, run)) if run else bf16(scale)[..., None]
    with errstate(over="ignore", invalid="ignore"):
        bits = from_f32(spec.dtype, code.astype(f32) * s)
    return special(spec.dtype, bits, code == -128, code == 127, code == -127)


# ---- q4 ----

MAGNITUDES = (6, 18, 31, 44, 59, 76, 97, 127)
BETWEEN = (12, 24.5, 37.5, 51.5, 67.5, 86.5, 112)
CENTRE_MOST = f32(1.25)
# octaves above the median channel's: those that are left alone, and the most that are taken off
LEVEL, SHIFT_MOST = 2, 15


def rotation(dim):
    return min(dim & -dim, 128)


def signs(seed, dim):
    out = []
    for word in range((dim + 63) // 64):
        z = (seed + (word + 1) * GOLDEN) & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        z ^= z >> 31
        out += [-1 if z >> bit & 1 else 1 for bit in range(64)]
    return np.asarray(out[:dim], dtype=np.int32)


def hadamard(y):
    """Over the last axis, not normalised. Each stage adds and subtracts what is `stride` apart."""
    size, stride = y.shape[-1], 1
    while stride < size:
        pairs = y.reshape(y.shape[:-1] + (size // (2 * stride), 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], -2).reshape(y.shape)
        stride *= 2
    return y


def groups(x):
    """[..., dim] -> [..., groups, rotation]"""
    return x.reshape(x.shape[:-1] + (-1, rotation(x.shape[-1])))


def quantise(y):
    """Groups in the last axis -> codes, scales (bf16 bits)."""
    a = abs(y).max(-1)
    finite = np.isfinite(y).all(-1)
    scale = from_f32("bf16", np.where(finite, a, f32(0)) * (f32(1) / f32(135)))
    scale = np.where(bf16(scale) < f32(2.0 ** -100), u16(0), scale)
    empty = ~finite | (scale == 0)
    r = f32(1) / np.where(empty, f32(1), bf16(scale))
    magnitude = abs(np.where(empty[..., None], f32(0), y)) * r[..., None]
    index = sum((magnitude >= f32(b)).astype(u8) for b in BETWEEN)
    code = np.where(empty[..., None], u8(0), index | np.where(y < 0, u8(8), u8(0)))
    return code.astype(u8), np.where(finite, scale, u16(0x7FC0)).astype(u16)


def levels(code):
    level = np.asarray(MAGNITUDES, dtype=np.int32)[(code & 7).astype(np.int32)]
    return np.where(code & 8, -level, level)


def tiles(x):
    return pieces(x, TILE)


def subtract_centre(y):
    """A tile's rotated rows [n, tokens, heads, groups, rotation] -> rows less the centre, its codes and scales."""
    c = y[:, 0]
    for t in range(1, y.shape[1]):
        c = c + y[:, t]
    code, scale = quantise(c * (f32(1) / f32(y.shape[1])))
    r = y - (levels(code).astype(f32) * bf16(scale)[..., None])[:, None]
    keep = (abs(r).max(-1) <= CENTRE_MOST * abs(y).max(-1)).all(1) & (scale != 0x7FC0)
    code, scale = np.where(keep[..., None], code, u8(0)), np.where(keep, scale, u16(0))
    return np.where(keep[:, None, ..., None], r, y), code, scale


def nibbles(code):
    """Codes of rows -> bytes; the first in the low half."""
    flat = code.reshape(code.shape[0], -1)
    if flat.shape[1] % 2:
        flat = np.concatenate([flat, np.zeros((len(flat), 1), u8)], 1)
    return (flat[:, 0::2] | flat[:, 1::2] << 4).astype(u8)


def from_nibbles(packed, count):
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :count]


def shifts(x):
    """From a tile's elements [n, tokens, heads, dim] as float32, those of its channels [n, heads, groups, rotation]."""
    exponent = groups(np.ascontiguousarray(largest(x, 1)[:, 0]).view(u32) >> u32(23)).astype(np.int32)
    median = np.sort(exponent, axis=-1)[..., exponent.shape[-1] // 2 - 1, None]
    return np.clip(exponent - median - LEVEL, 0, SHIFT_MOST).astype(u8)


def unshifted(spec):
    return np.zeros((1, -(-spec.tokens // TILE), 1, 1, 1), u8)


def factors(spec, shift):
    """What each channel of a group was divided by; shift: [..., groups, rotation]"""
    return np.ldexp(groups(signs(spec.seed, spec.dim)).astype(f32), shift.astype(np.int32))


def q4_encode(spec, x):
    with errstate(invalid="ignore", over="ignore"):
        x = to_f32(spec.dtype, x)
        shift = np.stack([shifts(t) for t in tiles(x)], 1) if spec.kind == K else unshifted(spec)
        y = hadamard(groups(x) / by_token(factors(spec, shift), spec.tokens, TILE))
        centres = []
        if spec.kind == K:
            parts = [subtract_centre(t) for t in tiles(y)]
            y = np.concatenate([p[0] for p in parts], 1)
            centres = [np.stack([p[1] for p in parts], 1), np.stack([p[2] for p in parts], 1), shift]
        code, scale = quantise(y)
    return [code, scale, *centres]


def q4_decode(spec, arrays):
    def back(code, scale):
        part = bf16(scale) * f32(1 / rotation(spec.dim))
        return hadamard(levels(code)).astype(f32) * part[..., None]

    with errstate(invalid="ignore", over="ignore"):
        y, shift = back(*arrays[:2]), unshifted(spec)
        if spec.kind == K:
            y, shift = y + by_token(back(*arrays[2:4]), spec.tokens, TILE), arrays[4]
        y = y * by_token(factors(spec, shift), spec.tokens, TILE)
        return from_f32(spec.dtype, y.reshape(y.shape[:3] + (spec.dim,)))


# ---- lossless ----

ZERO, ESCAPE, UNFIT = 14, 15, 0xFFFFFFFF


def lossless_room(spec):
    return -(-spec.tokens * spec.heads * spec.dim // 128)


def rows_of(spec, x):
    """[n, tokens, heads, ...] in a page's order, and back."""
    return np.swapaxes(x, 1, 2) if spec.order else x


def lossless_encode(spec, x):
    e = (x >> u16(7) & u16(255)).astype(np.int32)
    base = np.stack([np.where(t == 255, 0, t).max((1, 3)) for t in tiles(e)], 1)  # [n, tiles, heads]
    below = by_token(base, spec.tokens, TILE)[..., None] - e
    code = np.where((below >= 0) & (below < ZERO), below, ESCAPE)
    code = np.where(e == 0, ZERO, code).astype(u8)
    escapes = rows_of(spec, code == ESCAPE).reshape(len(x), -1)
    flat, room = rows_of(spec, e).reshape(len(x), -1), lossless_room(spec)
    count = escapes.sum(1).astype(np.int64)
    entries = np.zeros((len(x), room), u32)
    for s in range(len(x)):
        at = np.flatnonzero(escapes[s])
        if 0 < len(at) <= room:
            entries[s, :len(at)] = (at << 8 | flat[s, at]).astype(u32)
    rest = (x >> u16(8) & u16(0x80) | x & u16(0x7F)).astype(u8)
    out = [rest, code, base.astype(u8), np.where(count > room, UNFIT, count).astype(u32), entries]
    fits = count <= room
    return [np.where(fits.reshape((-1,) + (1,) * (a.ndim - 1)), a, a.dtype.type(UNFIT if a.ndim == 1 else 0)) for a in out]


def lossless_decode(spec, arrays):
    rest, code, base, count, entries = arrays
    below = by_token(base, spec.tokens, TILE)[..., None].astype(np.int32) - code
    e = np.where(code < ZERO, below & 255, 0)
    shape = rows_of(spec, e).shape
    e = rows_of(spec, e).reshape(len(rest), -1).copy()
    for s in range(len(rest)):
        used = 0 if count[s] == UNFIT else min(int(count[s]), lossless_room(spec))
        for entry in entries[s, :used].tolist():
            if entry >> 8 < e.shape[1]:
                e[s, entry >> 8] = entry & 255
    e = rows_of(spec, e.reshape(shape)).astype(u16)
    return (rest & 0x80).astype(u16) << u16(8) | e << u16(7) | (rest & 0x7F).astype(u16)


# ---- all ----

METHODS = {"fp8": (fp8_encode, fp8_decode), "int8": (int8_encode, int8_decode), "q4": (q4_encode, q4_decode),
           "lossless": (lossless_encode, lossless_decode)}


def encode(spec, x):
    return METHODS[spec.encoding][0](spec, x)


def decode(spec, arrays):
    return METHODS[spec.encoding][1](spec, arrays)


def align(n):
    return -(-n // 16) * 16


def layout(spec):
    """For each array of a tensor's form: dtype, shape, whether it has rows in the page's order, whether two codes are a byte."""
    T, H, D, n_tiles = spec.tokens, spec.heads, spec.dim, -(-spec.tokens // TILE)
    if spec.encoding == "fp8":
        return [(u8, (T, H, D), True, False), (u8, (T, H), True, False)]
    if spec.encoding == "int8":
        run = int8_run(spec)
        return [(np.int8, (T, H, D), True, False), (u16, (-(-T // run), H, D), False, False) if run else (u16, (T, H), True, False)]
    if spec.encoding == "q4":
        G, R = D // rotation(D), rotation(D)
        centres = [(u8, (n_tiles, H, G, R), False, True), (u16, (n_tiles, H, G), False, False), (u8, (n_tiles, H, G, R), False, True)]
        return [(u8, (T, H, G, R), True, True), (u16, (T, H, G), True, False)] + (centres if spec.kind == K else [])
    return [(u8, (T, H, D), True, False), (u8, (T, H, D), True, True), (u8, (n_tiles, H), False, False), (u32, (), False, False),
            (u32, (lossless_room(spec),), False, False)]


def sizes(spec):
    """Bytes of each array, and whether the next one follows without padding: the list of `lossless` follows its count."""
    for dtype, shape, _, packed in layout(spec):
        count = 1
        for n in shape:
            count *= n
        yield (-(-count // 2) if packed else count * np.dtype(dtype).itemsize), shape == ()


def encoded_bytes(spec):
    at = 0
    for size, joined in sizes(spec):
        at += size if joined else align(size) if at % 16 == 0 else align(at + size) - at
    return align(at)


def pack(spec, arrays):
    """-> uint8[n, encoded_bytes]"""
    parts, at = [], 0
    for a, (_, _, rows, packed), (size, joined) in zip(arrays, layout(spec), sizes(spec)):
        a = np.ascontiguousarray(rows_of(spec, a) if rows else a)
        flat = nibbles(a) if packed else a.reshape(len(a), -1).view(u8)
        end = at + size if joined else align(at + size)
        parts += [flat, np.zeros((len(a), end - at - size), u8)]
        at = end
    return np.concatenate(parts, 1)


def unpack(spec, encoded):
    out, at = [], 0
    for (dtype, shape, rows, packed), (size, joined) in zip(layout(spec), sizes(spec)):
        flat = np.ascontiguousarray(encoded[:, at:at + size])
        wanted = (shape[1], shape[0], *shape[2:]) if rows and spec.order else shape
        count = 1
        for n in shape:
            count *= n
        flat = from_nibbles(flat, count) if packed else flat.view(dtype)
        a = flat.reshape((len(encoded), *wanted))
        out.append(rows_of(spec, a) if rows else a)
        at = at + size if joined else align(at + size)
    return out


def round_trip(spec, x):
    return decode(spec, encode(spec, x))
