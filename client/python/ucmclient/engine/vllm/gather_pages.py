"""How ranks gather each other's blocks (gather_loads.py), with torch: an all_gather of what lies in pages. A block has as many pieces as there are
layers, or twice as many, and a hit has thousands of blocks. So a kernel moves all pieces of many blocks in one launch. Piece by piece, launches
alone would take longer than the loads that are saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .layout import Layout

logger = logging.getLogger("ucmclient.engine.vllm")

#: Bytes of the memory that a rank takes for the shares of all.
_STAGE_BYTES = 64 << 20


class TorchExchange:
    """Memory is taken at the start, so that later only the group itself can fail in one rank alone."""

    def __init__(self, layout: Layout, kv_caches: dict[str, Any], group: Any, rank: int, ranks: int, stage_bytes: int = _STAGE_BYTES):
        import torch

        self._torch, self._group, self._rank, self._ranks = torch, group, rank, ranks
        self._pieces = pieces_of(layout, list(kv_caches.values()))
        first, width = self._pieces.pages[0], self._pieces.width
        # Even, so that numbers of blocks begin at addresses of one alignment. For another, Triton would compile again while a request waits.
        self._at_once = max(2, stage_bytes // (width * first.element_size() * ranks) // 2 * 2)
        self._all = first.new_empty((ranks * self._at_once, width))
        self._mine = first.new_zeros((self._at_once, width))

    def __call__(self, shares: Sequence[Sequence[int]]) -> Any:
        """As gather_loads.Exchange says."""
        torch, most = self._torch, max(map(len, shares))
        ids = torch.full((self._ranks, most), -1, dtype=torch.int64)
        for rank, share in enumerate(shares):
            ids[rank, : len(share)] = torch.tensor(share, dtype=torch.int64)
        mine, others = ids[self._rank].clone(), ids
        others[self._rank] = -1
        mine, others = mine.to(self._all.device), others.to(self._all.device)
        for at in range(0, most, self._at_once):
            self._some(mine[at : at + self._at_once], others[:, at : at + self._at_once].reshape(-1))
        if self._all.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _some(self, mine: Any, others: Any) -> None:
        share, everything = self._mine[: len(mine)], self._all[: len(others)]
        self._pieces.take(mine, share)
        self._torch.distributed.all_gather_into_tensor(everything, share, group=self._group)
        self._pieces.put(others, everything)


class Pieces:
    """The pieces of each block as one row. ids: of blocks, on the pages' device; for -1 nothing is moved."""

    def __init__(self, pages: Sequence[Any]):
        #: For each piece, a tensor with a row for each block.
        self.pages = pages
        self._widths = [one.shape[1] for one in pages]
        self.width = sum(self._widths)

    def take(self, ids: Any, rows: Any) -> None:
        there = (ids >= 0).nonzero().squeeze(1)
        blocks = ids[there]
        for pages, to in zip(self.pages, rows.split(self._widths, 1)):
            to.index_copy_(0, there, pages.index_select(0, blocks))

    def put(self, ids: Any, rows: Any) -> None:
        there = (ids >= 0).nonzero().squeeze(1)
        blocks = ids[there]
        for pages, of in zip(self.pages, rows.split(self._widths, 1)):
            pages.index_copy_(0, blocks, of.index_select(0, there))


def pieces_of(layout: Layout, tensors: Sequence[Any]) -> Pieces:
    pages = _rows(layout, tensors)
    if pages[0].device.type != "cuda":
        return Pieces(pages)
    try:
        from .gather_kernel import FusedPieces

        return FusedPieces(pages)
    except Exception as error:  # Triton raises of every kind where it can't compile
        logger.warning("gather_loads: loads are gathered piece by piece, which takes long: Triton's kernel does not work here: %s", error)
        return Pieces(pages)


def _rows(layout: Layout, tensors: Sequence[Any]) -> list[Any]:
    """For each piece of a block a tensor with a row for each block, in the widest type that fits."""
    import torch

    fragments = [fragment for layer in layout.layers for fragment in layer]
    dtype = torch.int64 if all((c.address | c.stride | c.size) % 8 == 0 for c in fragments) else torch.uint8
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    rows = []
    for fragment in fragments:
        base, storage = next((at, of) for at, of in storages.items() if at <= fragment.address < at + of.nbytes())
        whole = torch.empty(0, dtype=dtype, device=tensors[0].device)
        size = whole.element_size()
        rows.append(whole.set_(storage, (fragment.address - base) // size, (layout.blocks, fragment.size // size), (fragment.stride // size, 1)))
    return rows
