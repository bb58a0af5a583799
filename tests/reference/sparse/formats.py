"""Number formats of K and V, in numpy, from their definitions."""

import numpy as np

f32, u64 = np.float32, np.uint64


def bf16_to_f32(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(f32)


def bf16_up(x):
    """Smallest bf16 that is not below x >= 0, as 16 bits."""
    bits = np.ascontiguousarray(x, f32).view(np.uint32).astype(np.uint64)
    return ((bits + u64(0xFFFF)) >> u64(16)).astype(np.uint16)


def fp8_e4m3_to_f32(bits):
    bits = np.asarray(bits, np.uint8).astype(np.int32)
    sign, exponent, fraction = bits >> 7, (bits >> 3) & 15, bits & 7
    value = np.where(exponent == 0, fraction / 512.0, (1 + fraction / 8.0) * 2.0 ** (exponent - 7))
    value = np.where(bits & 0x7F == 0x7F, np.nan, value)
    return np.where(sign == 1, -value, value).astype(f32)


def decode(raw, dtype):
    """Elements as they lie in a block, to float32. raw: the array viewed as f32, f16, u16 (bf16) or u8 (fp8)."""
    if dtype == "bf16":
        return bf16_to_f32(raw)
    if dtype == "fp8_e4m3":
        return fp8_e4m3_to_f32(raw)
    return np.asarray(raw, {"f32": np.float32, "f16": np.float16}[dtype]).astype(f32)
