"""Ranks with the same bytes load once (setting `gather_loads`): each rank loads a share of a hit's blocks over its own link, and the ranks gather
the others' shares from each other.

Ranks' loads end at different times, and one may fail. So nobody gathers by itself: each rank reports its share with the step's
output, and when all have, the scheduler's half tells all of them, in one plan, to gather. A rank waits for no other but in that
collective, which all ranks call in the same step, as they call those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Optional

from .identity import ranks_of
from .layout import Layout
from .plan import Copy, Gather, Plan
from .settings import Settings
from .worker import WorkerHalf, _Load

#: Blocks for each rank from which a load is shared out: what is smaller comes sooner to all than it is gathered.
_LEAST = 4
#: Of the memory that a rank takes for the shares of all.
_STAGE_BYTES = 64 << 20

#: Brings every rank's share of blocks to all ranks' pages; the lists are the same in all ranks. Returns a GPU event that comes when
#: this rank's pages have them; None: they have.
Exchange = Callable[[Sequence[Sequence[int]]], Any]


def ranks_with_the_same(config: Any, kv_cache_config: Any, settings: Settings) -> int:
    """How many ranks share loads out; 0: none do."""
    parallel = config.parallel_config
    others = ("pipeline", "decode_context", "prefill_context")
    size = parallel.tensor_parallel_size
    if not (settings.gather_loads and settings.load) or any(getattr(parallel, f"{name}_parallel_size", 1) > 1 for name in others):
        return 0
    return size if size > 1 and ranks_of(config, kv_cache_config, 0).parts == 1 else 0


def shares_of(blocks: Sequence[int], ranks: int) -> list[Sequence[int]]:
    """Each rank's: neighbours, as these make long copies. Shares at the end may be shorter, or empty."""
    most = -(-len(blocks) // ranks)
    return [blocks[i * most : (i + 1) * most] for i in range(ranks)]


class GatherPlanner:
    """The scheduler's: which loads are shared out, and which of these all ranks have reported."""

    def __init__(self, ranks: int):
        self._ranks, self._number = ranks, 0
        #: By load: how many ranks have reported, and which blocks did not come.
        self._reported: dict[int, tuple[int, frozenset[int]]] = {}
        self._due: list[Gather] = []

    def begin(self, copy: Copy) -> None:
        if len(copy.blocks) >= _LEAST * self._ranks:
            self._number += 1
            copy.number = self._number

    def received(self, shares: dict[int, tuple[int, frozenset[int]]]) -> None:
        for number, (ranks, failed) in shares.items():
            before, lost = self._reported.pop(number, (0, frozenset()))
            if before + ranks < self._ranks:
                self._reported[number] = before + ranks, lost | failed
            else:
                self._due.append(Gather(number, sorted(lost | failed)))

    def take(self) -> list[Gather]:
        due, self._due = self._due, []
        return due


class GatheringWorker(WorkerHalf):
    """Loads its share of what is shared out."""

    def __init__(self, *args: Any, rank: int, ranks: int, exchange: Exchange, **named: Any):
        self._rank, self._ranks, self._exchange = rank, ranks, exchange
        #: Loads that are shared out and not gathered yet.
        self._whole: dict[int, Copy] = {}
        #: Shares that are over: by load one rank, this one, and which of its blocks did not come.
        self._arrived: dict[int, tuple[int, frozenset[int]]] = {}
        #: What is gathered and not told yet: the load, blocks that did not come, and what must come first (None: nothing).
        self._gathered: list[tuple[Copy, list[int], Any]] = []
        super().__init__(*args, **named)

    def start_loads(self, plan: Plan) -> None:
        for gather in plan.gathers:
            copy = self._whole.pop(gather.number)
            self._gathered.append((copy, gather.failed, self._gather(copy, gather)))
        super().start_loads(replace(plan, loads=[one for copy in plan.loads if (one := self._mine(copy)) is not None]))

    def _mine(self, copy: Copy) -> Optional[Copy]:
        """None: nothing is left for this rank."""
        if not copy.number:
            return copy
        self._whole[copy.number] = copy
        mine = shares_of(range(len(copy.blocks)), self._ranks)[self._rank]
        if not mine:
            self._arrived[copy.number] = 1, frozenset()
            return None
        return replace(copy.some(list(mine), copy.plain), number=copy.number)

    def _report(self, load: _Load) -> None:
        if not load.number:
            super()._report(load)
            return
        failed = frozenset(load.blocks if load.task is None else load.failed)
        self._arrived[load.number] = 1, failed
        self.counts.load(len(load.blocks), len(failed), load.began)

    def take_arrived(self) -> dict[int, tuple[int, frozenset[int]]]:
        """Shares that are over since the last call, for the scheduler's half."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def _gather(self, copy: Copy, gather: Gather) -> Any:
        """All ranks do this in the same step, in the same order. Blocks that did not come to their rank are gathered, too, and then told as
        failed by all. Returns what the exchange does."""
        return self._exchange(shares_of(copy.blocks, self._ranks)) if len(gather.failed) < len(copy.blocks) else None

    def finished(self) -> tuple[set[str], set[str]]:
        """Tells of no load into whose pages this rank still gathers. The engine takes a step's output before its stream has ended what comes
        behind the model, and may then give the pages to another load, which does not wait for that stream."""
        over = [one for one in self._gathered if one[2] is None or one[2].query()]
        self._gathered = [one for one in self._gathered if one not in over]
        for copy, failed, _ in over:
            self._failed_blocks.update(failed)
            self._finished_loads.add(copy.request)
        return super().finished()


# ---- with torch ----


class TorchExchange:
    """An all_gather of pages through memory that is taken at the start: nothing in it can fail in one rank only but the group itself."""

    def __init__(self, layout: Layout, kv_caches: dict[str, Any], group: Any, rank: int, ranks: int, stage_bytes: int = _STAGE_BYTES):
        import torch

        self._torch, self._group, self._rank, self._ranks = torch, group, rank, ranks
        self._pages = _rows(layout, list(kv_caches.values()))
        self._widths = [pages.shape[1] for pages in self._pages]
        first, width = self._pages[0], sum(self._widths)
        self._at_once = max(1, stage_bytes // (width * first.element_size() * ranks))
        self._all = first.new_empty((ranks * self._at_once, width))
        self._mine = first.new_zeros((self._at_once, width))

    def __call__(self, shares: Sequence[Sequence[int]]) -> Any:
        for at in range(0, max(map(len, shares)), self._at_once):
            self._some([list(share[at : at + self._at_once]) for share in shares])
        if self._all.device.type != "cuda":
            return None
        event = self._torch.cuda.Event()
        event.record()
        return event

    def _some(self, shares: list[list[int]]) -> None:
        torch, n = self._torch, max(map(len, shares))
        ids = [torch.tensor(share, dtype=torch.int64, device=self._all.device) for share in shares]
        mine, everything = self._mine[:n], self._all[: n * self._ranks]
        for pages, to in zip(self._pages, mine.split(self._widths, 1)):
            to[: len(shares[self._rank])] = pages.index_select(0, ids[self._rank])
        torch.distributed.all_gather_into_tensor(everything, mine, group=self._group)
        for rank, share in enumerate(everything.view(self._ranks, n, -1)):
            if rank != self._rank and len(shares[rank]):
                for pages, of in zip(self._pages, share.split(self._widths, 1)):
                    pages.index_copy_(0, ids[rank], of[: len(shares[rank])])


def _rows(layout: Layout, tensors: Sequence[Any]) -> list[Any]:
    """For each piece of a block a tensor with a row for each block, in the widest type that fits."""
    import torch

    chunks = [chunk for layer in layout.layers for chunk in layer]
    dtype = torch.int64 if all((c.address | c.stride | c.size) % 8 == 0 for c in chunks) else torch.uint8
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    rows = []
    for chunk in chunks:
        base, storage = next((at, of) for at, of in storages.items() if at <= chunk.address < at + of.nbytes())
        whole = torch.empty(0, dtype=dtype, device=tensors[0].device)
        size = whole.element_size()
        rows.append(whole.set_(storage, (chunk.address - base) // size, (layout.blocks, chunk.size // size), (chunk.stride // size, 1)))
    return rows
