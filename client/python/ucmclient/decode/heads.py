"""One KV head's bytes of a layer of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..sparse.summary import Shape
from ..sparse.tensors import SIZES, dtype_number


class HeadBytes:
    """K of all tokens, one after the other, then V: what an entry of a KV head holds."""

    def __init__(self, of: Shape):
        at, size = of.native(), SIZES[dtype_number(of.dtype)]
        self._rows = [
            (at.k_offset, at.k_token_stride, at.k_head_stride, of.head_dim * size),
            (at.v_offset, at.v_token_stride, at.v_head_stride, of.v_head_dim * size),
        ]
        self._tokens = of.tokens
        self.bytes = of.tokens * (of.head_dim + of.v_head_dim) * size
        #: Where K and V lie in it.
        self.shape = Shape(of.dtype, of.tokens, 1, of.head_dim, of.v_head_dim, of.rope_dim)

    def _pieces(self, head: int) -> Iterator[slice]:
        for offset, token, of_head, row in self._rows:
            first = offset + head * of_head
            if token == row:
                yield slice(first, first + self._tokens * row)
            else:
                yield from (slice(first + t * token, first + t * token + row) for t in range(self._tokens))

    def of(self, head: int, data: Any) -> bytes:
        view = memoryview(data)
        return b"".join(view[piece] for piece in self._pieces(head))
