"""What the encodings are compared with: other formats and other authors' quantisers, as float32 functions x[n, tokens, heads, dim] -> the same,
before it is rounded to the cache's format. Their scales are bf16 unless a name says otherwise."""

import methods
from methods import f32
from model import bf16, xp


def scale_of(x):
    return xp.maximum(bf16(x.astype(f32)), f32(1e-30))


def minifloat(x, mantissa, least, most):
    """To a float of `mantissa` bits whose least normal exponent is `least` and whose largest value is `most`."""
    e = xp.maximum(xp.frexp(x)[1] - 1, least)
    step = xp.ldexp(f32(1), (e - mantissa).astype(xp.int32))
    return xp.clip(xp.rint(x / step) * step, -most, most)


def e5m2_rows(x):
    """A power of two a row that brings its largest below 2^14 (of 57344)."""
    e = xp.frexp(abs(x).max(-1, keepdims=True))[1]
    power = xp.ldexp(f32(1), (14 - e).astype(xp.int32))
    return minifloat(x * power, 2, -14, 57344) / power


def e4m3_fixed(x):
    """One scale of 1 for all: what an fp8 cache without calibration does."""
    return minifloat(x, 3, -6, 448)


def zero_point(steps, axis):
    """From the least to the largest of a group, in `steps` steps."""
    def code(x):
        low = bf16(x.min(axis, keepdims=True).astype(f32))
        s = scale_of((x.max(axis, keepdims=True) - low) / steps)
        return xp.clip(xp.rint((x - low) / s), 0, steps) * s + low
    return code


def rotated(code, seed=0):
    """code, of rows that are rotated as q4's are."""
    def rotate_and_back(x):
        sign = methods.signs(seed, x.shape[-1]).astype(f32)
        y = code(methods.hadamard(methods.groups(x * sign)))
        return methods.hadamard(y).reshape(x.shape) * sign / f32(methods.rotation(x.shape[-1]))
    return rotate_and_back


def lloyd_max():
    """The 16 levels of least squared error for a normal distribution."""
    x = xp.linspace(-6, 6, 60001)
    p = xp.exp(-x * x / 2)
    c = xp.linspace(-2.5, 2.5, 16)
    for _ in range(400):
        which = xp.searchsorted((c[1:] + c[:-1]) / 2, x)
        c = xp.bincount(which, p * x, 16) / xp.bincount(which, p, 16)
    return c.astype(f32)


def gaussian_rows(x):
    """Those levels times the row's root mean square."""
    levels = lloyd_max()
    s = scale_of(xp.sqrt((x * x).mean(-1, keepdims=True)))
    return levels[xp.searchsorted((levels[1:] + levels[:-1]) / 2, x / s)] * s


def absmax_rows(x):
    s = scale_of(abs(x).max(-1, keepdims=True) / 7)
    return xp.clip(xp.rint(x / s), -8, 7) * s


def q4_rows(x):
    """q4's codes and scales, without rotation, shifts or centre."""
    return decoded(*methods.quantise(x))


def decoded(code, scale):
    return methods.levels(code).astype(f32) * methods.bf16(scale)[..., None]


def q4_less_centre(y):
    """The rotated rows of one tile, without shifts: version 1 of q4's K."""
    rest, code, scale = methods.subtract_centre(y)
    return q4_rows(rest) + decoded(code, scale)[:, None]


TOKENS, CHANNELS = 1, -1  # axes: a group is a channel's tokens, or a row's channels

# name: of K, of V, bytes of a row of K and V over those of bf16, as functions of dim (sections of 16 tokens)
VARIANTS = {
    "fp8, one scale of 1": (e4m3_fixed, e4m3_fixed, lambda d: 2),
    "E5M2, a scale a row": (e5m2_rows, e5m2_rows, lambda d: 2 * d / (d + 1)),
    "int8, zero points": (zero_point(255, CHANNELS), zero_point(255, CHANNELS), lambda d: 2 * d / (d + 4)),
    "int8, zero points, K a channel": (zero_point(255, TOKENS), zero_point(255, CHANNELS), lambda d: 4 * d / (2 * d + 4 + 4 * d / 16)),
    "4 bits, absmax a row": (absmax_rows, absmax_rows, lambda d: 2 * d / (d / 2 + 2)),
    "4 bits, rotated, absmax": (rotated(absmax_rows), rotated(absmax_rows), lambda d: 2 * d / (d / 2 + 2)),
    "4 bits, rotated, Gaussian levels (TurboQuant's)": (rotated(gaussian_rows), rotated(gaussian_rows), lambda d: 2 * d / (d / 2 + 2)),
    "4 bits, K a channel, V a row, zero points (KIVI's)": (zero_point(15, TOKENS), zero_point(15, CHANNELS),
                                                           lambda d: 4 * d / (d + 4 + 4 * d / 16)),
    "q4 without shifts": (rotated(q4_less_centre), rotated(q4_rows), lambda d: 4 * d / (d / 2 + 2) / (33 / 16)),
    "q4 without shifts and centres": (rotated(q4_rows), rotated(q4_rows), lambda d: 2 * d / (d / 2 + 2)),
}
