"""A Triton kernel that moves all pieces of many blocks in one launch. vLLM has Triton wherever it has a GPU of NVIDIA's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .gather_pages import Pieces

#: Elements that a program moves at a time.
_STEP = 1024


@triton.jit
def _move(ids, pieces, rows, width, take: tl.constexpr, step: tl.constexpr):
    """Moves one piece of one block between its page and its row. pieces: for each its address, the distance of pages, its elements, and
    where it begins in a row."""
    row, piece = tl.program_id(0).to(tl.int64), pieces + tl.program_id(1) * 4
    block = tl.load(ids + row)
    if block >= 0:
        page = tl.load(piece).to(tl.pointer_type(rows.dtype.element_ty)) + block * tl.load(piece + 1)
        size = tl.load(piece + 2)
        rows += row * width + tl.load(piece + 3)
        for start in range(0, size, step):
            at = start + tl.arange(0, step)
            if take:
                tl.store(rows + at, tl.load(page + at, mask=at < size), mask=at < size)
            else:
                tl.store(page + at, tl.load(rows + at, mask=at < size), mask=at < size)


class FusedPieces(Pieces):
    def __init__(self, pages: Sequence[Any]):
        super().__init__(pages)
        begins = [sum(self._widths[:i]) for i in range(len(pages))]
        table = [[one.data_ptr(), one.stride(0), one.shape[1], begin] for one, begin in zip(pages, begins)]
        device = pages[0].device
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        nobody, row = torch.full((1,), -1, dtype=torch.int64).to(device), pages[0].new_empty((1, self.width))
        self.take(nobody, row)  # compiled now, and not when a request waits
        self.put(nobody, row)

    def take(self, ids: Any, rows: Any) -> None:
        self._launch(ids, rows, True)

    def put(self, ids: Any, rows: Any) -> None:
        self._launch(ids, rows, False)

    def _launch(self, ids: Any, rows: Any, take: bool) -> None:
        _move[(len(ids), len(self.pages))](ids, self._table, rows, self.width, take, _STEP)
