"""Pages of the engine's pool that the scheduler's half holds: a store may still read them when the engine would give them to others.

The engine can reset its cache only while nobody holds pages. So all are then given up, and the next plan has a fence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .plan import Plan

#: vLLM's id for "no block": a request's table has it where a block has lost its page, or needs none.
NULL_BLOCK = 0


@dataclass
class Hold:
    """Holds blocks of the engine's pool until so many workers have reported."""

    blocks: list[Any]
    workers: int


class HeldPages:
    """A part of SchedulerHalf."""

    _requests: dict[str, Any]
    _plan: Any
    _held: list[Any]
    _ending: set[str]
    resets_count: bool

    def __init__(self, workers: int):
        #: The engine's pool of blocks. None: the engine does not show it, and keeps finished requests' blocks itself.
        self.pool: Any = None
        self._workers = workers
        #: By finished request: which of its blocks stores may still read.
        self._kept: dict[str, Hold] = {}

    def reset(self) -> None:
        raise NotImplementedError

    def _look_at(self, tracked: Any) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def bind(self, pool: Any) -> None:
        """The engine resets its own cache only while nobody holds blocks, and then tells its pool first."""
        self.pool, reset = pool, pool.reset_prefix_cache

        def reset_prefix_cache() -> Any:
            if not self._running():  # else the engine refuses
                self.let_go()
            if self.resets_count:
                self.reset()
            return reset()

        pool.reset_prefix_cache = reset_prefix_cache

    def _running(self) -> bool:
        """Some request has blocks of its own."""
        for tracked in self._requests.values():
            self._look_at(tracked)
        return any(tracked.blocks for tracked in self._requests.values())

    def let_go(self) -> None:
        """Gives up all blocks that stores may read. The workers end these stores before the engine's next step, which may overwrite them."""
        self._held = [held for held in self._held if held.copy.request not in self._kept]
        self._forget_stores(self._plan)
        self._ending.clear()
        self._plan.ended.clear()
        self._plan.fence = True
        while self._kept:
            self._free(self._kept.popitem()[1])

    def _forget_stores(self, plan: Plan) -> None:
        """Those of finished requests that are not begun."""
        plan.stores = [copy for copy in plan.stores if copy.request not in self._kept]

    def _free(self, hold: Hold) -> None:
        self.pool.free_blocks(reversed(hold.blocks))  # the engine evicts the last ones first, as it does when it frees a request

    def _keep(self, name: str, blocks: Iterable[int]) -> bool:
        """Keeps a finished request's blocks until the workers have reported. Returns whether the engine must keep them itself."""
        self._ending.add(name)
        self._end()
        if self.pool is None:
            return True
        held = [self.pool.blocks[block] for block in blocks if block != NULL_BLOCK]
        self.pool.touch(held)
        self._kept[name] = Hold(held, self._workers)
        return False

    def sent(self, names: Mapping[str, int]) -> None:
        """The workers' report: for each finished request, how many workers have no store that still reads its blocks."""
        self._given_up(self._kept, names)

    def _given_up(self, holds: dict[Any, Hold], reports: Mapping[Any, int]) -> None:
        """reports: how many workers have given up each hold."""
        for name, workers in reports.items():
            hold = holds.get(name)
            if hold is not None:
                hold.workers -= workers
                if hold.workers <= 0:
                    self._free(holds.pop(name))
