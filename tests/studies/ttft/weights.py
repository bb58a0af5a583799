"""A transformer of Llama's shape with random weights in bfloat16 (PyTorch)."""

import torch


class Weights:
    def __init__(self, shape, device):
        self.shape = shape
        torch.manual_seed(1)

        def matrix(rows, columns):
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * (columns ** -0.5)

        s = shape
        self.embedding = matrix(s.vocabulary, s.width) * s.width ** 0.5
        self.layers = [(matrix((s.heads + 2 * s.kv_heads) * s.head, s.width), matrix(s.width, s.heads * s.head),
                        matrix(2 * s.inner, s.width), matrix(s.width, s.inner)) for _ in range(s.layers)]
        self.head = matrix(s.vocabulary, s.width)
        self.turns = 500000.0 ** (-torch.arange(s.head // 2, device=device) / (s.head // 2))

    def rotate(self, x, positions):
        """x: [tokens][heads][head]"""
        angle = (positions[:, None] * self.turns)[:, None]
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)
