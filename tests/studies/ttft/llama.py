"""The shape of Llama-3.1-8B, which ttft.py runs with random weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    inner: int = 14336
    vocabulary: int = 128256
    block: int = 16  # tokens of a block of KV

    @property
    def group(self):
        return self.heads // self.kv_heads

    @property
    def layer_bytes(self):
        """K and V of one layer of a block."""
        return 2 * self.block * self.kv_heads * self.head * 2

    def kv_bytes(self, tokens):
        return tokens // self.block * self.layers * self.layer_bytes
