"""Gemma 3: its tokenizer, and where its forward pass differs from Llama's. Its K passes an RMSNorm with weights before RoPE, and five layers
of six attend to the last 512 tokens only."""

import heapq
import math
import re

import numpy as np
from model import Model, f32, xp

LOCAL_BASE = 10000.0  # of RoPE in the layers with a window; not in the file
PERIOD = 6            # every sixth layer attends to all


class Tokenizer:
    """SentencePiece's: of all neighbours that are a token together, the pair with the best score is joined first. A run of spaces, or of line
    ends, is a token before that."""
    RUNS = re.compile(r"( {2,31}|\n+)")

    def __init__(self, tokens, scores, begin):
        self.number = {token: i for i, token in enumerate(tokens)}
        self.scores, self.begin = scores, begin

    def encode(self, text):
        out = [self.begin]
        for piece in self.RUNS.split(text):
            out += [self.number[piece]] if self.RUNS.fullmatch(piece) else self.joined(piece.replace(" ", "\u2581"))
        return out

    def joined(self, text):
        parts = list(text)
        left, right = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
        pairs = []

        def offer(a, b):
            if a >= 0 and b < len(parts) and parts[a] + parts[b] in self.number:
                joined = parts[a] + parts[b]
                heapq.heappush(pairs, (-self.scores[self.number[joined]], a, b, joined))

        for i in range(len(parts) - 1):
            offer(i, i + 1)
        while pairs:
            _, a, b, joined = heapq.heappop(pairs)
            if parts[a] is None or parts[b] is None or right[a] != b or parts[a] + parts[b] != joined:
                continue
            parts[a], parts[b], right[a] = joined, None, right[b]
            if right[a] < len(parts):
                left[right[a]] = a
            offer(left[a], a)
            offer(a, right[a])
        out = []
        for part in parts:
            if part is not None:
                out += [self.number[part]] if part in self.number else [self.number[f"<0x{b:02X}>"] for b in part.encode()]
        return out


class Gemma(Model):
    def settle(self, value):
        self.layers, self.width = value("gemma3.block_count"), value("gemma3.embedding_length")
        self.heads, self.kv_heads = value("gemma3.attention.head_count"), value("gemma3.attention.head_count_kv")
        self.d = value("gemma3.attention.key_length")
        self.epsilon, self.base = value("gemma3.attention.layer_norm_rms_epsilon"), value("gemma3.rope.freq_base")
        self.context, self.window = value("gemma3.context_length"), value("gemma3.attention.sliding_window")
        self.beta, self.group = 1 / math.sqrt(self.d), self.heads // self.kv_heads
        self.tokenizer = Tokenizer(value("tokenizer.ggml.tokens"), value("tokenizer.ggml.scores"), value("tokenizer.ggml.bos_token_id"))

    def arranged(self, name, w):
        return w

    def local(self, layer):
        return layer % PERIOD != PERIOD - 1

    def embed(self, ids):
        return super().embed(ids) * f32(math.sqrt(self.width))

    def qkv(self, layer, h, positions):
        x, T, base = self.norm(h, self.w(layer, "attn_norm")), len(h), LOCAL_BASE if self.local(layer) else None
        q = self.norm((x @ self.w(layer, "attn_q")).reshape(T, -1, self.d), self.w(layer, "attn_q_norm"))
        k = self.norm((x @ self.w(layer, "attn_k")).reshape(T, -1, self.d), self.w(layer, "attn_k_norm"))
        v = (x @ self.w(layer, "attn_v")).reshape(T, -1, self.d)
        return self.rotate(q, positions, base), self.cached(self.rotate(k, positions, base)), self.cached(v)

    def allowed(self, layer, positions, count):
        causal = super().allowed(layer, positions, count)
        return causal & (xp.arange(count)[None] > xp.asarray(positions)[:, None] - self.window) if self.local(layer) else causal

    def after_attention(self, layer, h, out):
        h = h + self.norm(out.reshape(len(h), -1) @ self.w(layer, "attn_output"), self.w(layer, "post_attention_norm"))
        x = self.norm(h, self.w(layer, "ffn_norm"))
        gate = x @ self.w(layer, "ffn_gate")
        gate = f32(0.5) * gate * (1 + xp.tanh(f32(math.sqrt(2 / math.pi)) * (gate + f32(0.044715) * gate ** 3)))
        return h + self.norm((gate * (x @ self.w(layer, "ffn_up"))) @ self.w(layer, "ffn_down"), self.w(layer, "post_ffw_norm"))
