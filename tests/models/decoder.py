"""A small decoder in PyTorch, of the architecture that model.py computes in numpy: RMSNorm, RoPE with a head's halves apart, grouped queries,
SwiGLU, embeddings tied. Parameters have the names of GGUF files and are stored [in, out]."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Shape:
    vocabulary: int = 256
    layers: int = 8
    width: int = 512
    heads: int = 4
    kv_heads: int = 2
    d: int = 128
    hidden: int = 1408
    context: int = 32768
    base: float = 500000.0
    epsilon: float = 1e-5


def initial(shape, seed, device):
    """Master weights, float32. What a layer adds to the stream is 0 at first."""
    made = torch.Generator().manual_seed(seed)

    def normal(rows, columns, deviation):
        return torch.randn(rows, columns, generator=made) * deviation

    inner = 1 / math.sqrt(shape.width)
    out = {"token_embd.weight": normal(shape.vocabulary, shape.width, 0.05), "output_norm.weight": torch.ones(shape.width)}
    for layer in range(shape.layers):
        out |= {f"blk.{layer}.{name}.weight": w for name, w in {
            "attn_norm": torch.ones(shape.width), "ffn_norm": torch.ones(shape.width),
            "attn_q": normal(shape.width, shape.heads * shape.d, inner), "attn_k": normal(shape.width, shape.kv_heads * shape.d, inner),
            "attn_v": normal(shape.width, shape.kv_heads * shape.d, inner), "attn_output": torch.zeros(shape.heads * shape.d, shape.width),
            "ffn_gate": normal(shape.width, shape.hidden, inner), "ffn_up": normal(shape.width, shape.hidden, inner),
            "ffn_down": torch.zeros(shape.hidden, shape.width)}.items()}
    return {name: w.to(device) for name, w in out.items()}


def angles(shape, length, device):
    positions, half = torch.arange(length, device=device, dtype=torch.float64), torch.arange(shape.d // 2, device=device, dtype=torch.float64)
    angle = positions[:, None] * shape.base ** (-2 * half / shape.d)
    return angle.cos().float()[:, None], angle.sin().float()[:, None]


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def logits(shape, weights, ids, turn):
    """ids[B, T] -> [B, T, vocabulary]; turn: angles() of T."""
    B, T = ids.shape
    h = F.embedding(ids, weights["token_embd.weight"])
    for layer in range(shape.layers):
        w = {name: weights[f"blk.{layer}.{name}.weight"] for name in
             ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")}
        x = F.rms_norm(h, (shape.width,), w["attn_norm"], shape.epsilon)
        q = rotate((x @ w["attn_q"]).view(B, T, shape.heads, shape.d), *turn)
        k = rotate((x @ w["attn_k"]).view(B, T, shape.kv_heads, shape.d), *turn)
        v = (x @ w["attn_v"]).view(B, T, shape.kv_heads, shape.d)
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, 2) for part in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        h = h + out.transpose(1, 2).reshape(B, T, -1) @ w["attn_output"]
        x = F.rms_norm(h, (shape.width,), w["ffn_norm"], shape.epsilon)
        h = h + (F.silu(x @ w["ffn_gate"]) * (x @ w["ffn_up"])) @ w["ffn_down"]
    return F.rms_norm(h, (shape.width,), weights["output_norm.weight"], shape.epsilon) @ weights["token_embd.weight"].T


def save(shape, weights, folder, about):
    """Weights as the upper 16 bits of float32 (they are bfloat16), in files of at most 16 MB, and shape.json."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts, size = [{}], 0
    for name, w in weights.items():
        bits = (w.detach().to(torch.bfloat16).float().cpu().numpy().view(np.uint32) >> 16).astype(np.uint16)
        if size + bits.nbytes > 16e6:
            parts.append({})
            size = 0
        parts[-1][name] = bits
        size += bits.nbytes
    for i, part in enumerate(parts):
        np.savez(folder / f"weights-{i}.npz", **part)
    (folder / "shape.json").write_text(json.dumps({**dataclasses.asdict(shape), "about": about}, indent=1), encoding="utf-8")
