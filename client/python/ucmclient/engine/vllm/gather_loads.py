"""Ranks with the same bytes load once (setting `gather_loads`). Each rank loads a share of a hit's blocks over its own link, and gathers the
others' shares from them.

Ranks' loads end at different times, and one may fail. So no rank decides to gather. Each rank reports its share with the step's output. When
all have, the scheduler's half tells all of them, in one plan, to gather. A rank waits for others only in that collective, which all ranks
call in the same step, as they call the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Optional

from .identity import ranks_of
from .plan import Copy, Gather, Plan
from .settings import Settings
from .worker import WorkerHalf, _Load

#: A load is shared out from so many blocks for each rank on. It takes less time to load a smaller one in all ranks than to gather it.
_LEAST = 4

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
    """Each rank's share. It has neighbouring blocks, since these make long copies. Shares at the end may be shorter, or empty."""
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
        #: Requests of these whose KV is of weights that the engine had before.
        self._void: set[str] = set()
        #: Shares that are over: by load one rank, this one, and which of its blocks did not come.
        self._arrived: dict[int, tuple[int, frozenset[int]]] = {}
        #: What is gathered and not told yet: the load, blocks that did not come, and what must come first (None: nothing).
        self._gathered: list[tuple[Copy, list[int], Any]] = []
        super().__init__(*args, **named)

    def start_loads(self, plan: Plan) -> None:
        self._void |= plan.void & {copy.request for copy in self._whole.values()}
        for gather in plan.gathers:
            copy = self._whole.pop(gather.number)
            failed = copy.blocks if copy.request in self._void else gather.failed
            self._void.discard(copy.request)
            self._gathered.append((copy, failed, self._gather(copy, gather)))
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
        return replace(copy.some(list(mine), copy.raw), number=copy.number)

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
        """Tells of no load into whose pages this rank still gathers. The engine takes a step's output before its stream has ended the work
        after the model. It may then give the pages to another load, which does not wait for that stream."""
        over = [one for one in self._gathered if one[2] is None or one[2].query()]
        self._gathered = [one for one in self._gathered if one not in over]
        for copy, failed, _ in over:
            self._failed_blocks.update(failed)
            self._finished_loads.add(copy.request)
        return super().finished()
