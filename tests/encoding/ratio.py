"""What lossless codes make of K and V: entropies, the windows that `lossless` could have, its own form, zstd."""

import numpy as np

import methods

try:
    import zstandard as zstd
except ImportError:
    zstd = None

BLOCK = 16
f32 = np.float32


def entropy(symbols, count):
    n = np.bincount(symbols.ravel(), minlength=count).astype(float)
    p = n[n > 0] / n.sum()
    return float(-(p * np.log2(p)).sum())


def by_layer(symbols, count):
    """symbols[layers, tokens, heads, dim]: the mean entropy of a layer's heads."""
    return float(np.mean([entropy(symbols[layer, :, head], count) for layer in range(len(symbols)) for head in range(symbols.shape[2])]))


def windows(e):
    """{bits, base of a: share of elements outside in the mean section, in the worst of 10,000}; e[sections, tokens, heads, dim]"""
    out = {}
    for base, axes in (("channel", (1,)), ("row", (3,)), ("head", (1, 3))):
        below = e.max(axes, keepdims=True) - e
        for bits in (3, 4):
            share = (below >= 2 ** bits - 1).mean((1, 2, 3))
            out[f"{bits} bits, {base}"] = [float(share.mean()), float(np.quantile(share, 0.9999))]
    return out


def halves(x):
    """All low bytes, all high bytes."""
    return [half.tobytes() for half in x.view(np.uint8).reshape(-1, x.itemsize).T]


def zstd_ratios(section, layer):
    """zstd on sections of 16 tokens and on 128 tokens of a layer; of 16-bit elements also on low and high bytes apart."""
    out = {}
    for what, parts in (("16 tokens", section), ("128 tokens", layer)):
        for level in (1, 3):
            packer = zstd.ZstdCompressor(level=level)
            for form in ("as it is", "bytes apart") if section.itemsize == 2 else ("as it is",):
                frames = [frame for p in parts for frame in (halves(p) if form == "bytes apart" else [p.tobytes()])]
                out[f"-{level}, {form}, {what}"] = parts.nbytes / sum(len(packer.compress(frame)) for frame in frames)
    return out


def zstd_of_coded(kind, sections):
    """{encoding: how much smaller zstd -1 makes its coded form}"""
    out, packer = {}, zstd.ZstdCompressor(level=1)
    for encoding in methods.METHODS:
        spec = methods.Spec(encoding, kind=kind, tokens=BLOCK, heads=sections.shape[2], dim=sections.shape[3])
        coded = methods.pack(spec, methods.encode(spec, sections))
        out[encoding] = coded.nbytes / sum(len(packer.compress(c.tobytes())) for c in coded)
    return out


def measure_one(kind, x):
    """x[layers, tokens, heads, dim], bf16 values as float32."""
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    sections = bits.reshape(-1, BLOCK, *x.shape[2:])
    e = (bits >> 7 & 255).astype(np.int64)
    codes = (methods.fp8_codes(np.clip(x, -416, 416)) | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)  # a scale of 1
    fp8_sections = codes.reshape(-1, BLOCK, *x.shape[2:])
    spec = methods.Spec("lossless", kind=kind, tokens=BLOCK, heads=x.shape[2], dim=x.shape[3])
    arrays = methods.encode(spec, sections)
    count, fits = arrays[3], arrays[3] != methods.UNFIT
    assert (methods.decode(spec, arrays)[fits] == sections[fits]).all()
    many = [a.reshape(-1, 8 * BLOCK, *x.shape[2:])[::5] for a in (bits, codes)]
    return {"exponent": by_layer(e, 256), "rest": entropy(bits & 0x7F | bits >> 8 & 0x80, 256), "sections": len(sections),
            "unfit": int((~fits).sum()), "escapes": [float(count[fits].mean() / sections[0].size), float(count[fits].max() / sections[0].size)],
            "ratio": sections[0].nbytes / methods.coded_bytes(spec), "windows": windows(e.reshape(sections.shape)),
            "zstd": zstd_ratios(sections[::7], many[0]), "coded": zstd_of_coded(kind, sections[::7]),
            "fp8": {"byte": by_layer(codes.astype(np.int64), 256), "exponent": by_layer(codes.astype(np.int64) >> 3 & 15, 16),
                    "windows": windows((fp8_sections >> 3 & 15).astype(np.int64)),
                    "zstd": zstd_ratios(fp8_sections[::7], many[1])}}


def measure(k, v):
    return {"K": measure_one(methods.K, k), "V": measure_one(methods.V, v)}


def random_kv(tokens, width=4096, heads=8, dim=128, layers=2):
    """Of layers of Llama-3.1-8B's shape with random weights: normally distributed, whatever the weights. No evidence of anything."""
    rng, out = np.random.default_rng(1), []
    for _ in range(2):
        x = rng.normal(size=(layers, min(tokens, 512), width)).astype(f32)
        w = (rng.normal(size=(layers, width, heads * dim)) / np.sqrt(width)).astype(f32)
        y = np.matmul(x, w).reshape(layers, -1, heads, dim)
        out.append(methods.bf16(methods.from_f32("bf16", y)))
    return out
