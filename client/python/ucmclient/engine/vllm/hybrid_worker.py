"""The worker's half for models with several kinds of KV cache: a WorkerHalf for each kind of block, and their common reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .groups import HybridIdentity, Kinds
from .plan import HybridPlan
from .settings import Settings
from .worker import WorkerHalf, _Load


class _KindWorker(WorkerHalf):
    """Reports loads one by one: a request has several."""

    def __init__(self, *args: Any, over: Callable[[str, bool], None], **named: Any):
        self._load_over = over
        super().__init__(*args, **named)

    def _report(self, load: _Load) -> None:
        self._load_over(load.request, load.task is None or bool(load.failed))

    def stores_of(self, request: str) -> bool:
        return any(store.of(request) for store in self._stores)

    def holds(self) -> set[int]:
        """The holds of stores that may still read."""
        return {getattr(copy, "hold", 0) for store in self._stores for copy in store.copies}


class HybridWorker:
    def __init__(self, settings: Settings, identity: HybridIdentity, kinds: Kinds, *, name: str, **named: Any):
        """named: arguments of WorkerHalf."""
        self.kinds: list[_KindWorker] = []
        try:
            for i, (one, layout) in enumerate(zip(identity.kinds, kinds.layouts)):
                self.kinds.append(_KindWorker(settings, one, layout, name=f"{name}-{i}" if i else name, over=self._over, **named))
        except BaseException:
            self.close()
            raise
        #: Loads that are not over, and requests of which a load failed.
        self._left: Counter[str] = Counter()
        self._failing: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        #: Finished requests that are not reported yet.
        self._ending: set[str] = set()
        self._holding: set[int] = set()
        self.released: dict[int, int] = {}

    @property
    def sentences(self) -> list[str]:
        """For the log, after the start."""
        sizes = ", ".join(str(kind._layout.layer_bytes * len(kind._layout.layers)) for kind in self.kinds)
        return [f"blocks of {len(self.kinds)} kinds, of {sizes} bytes", *(kind.copy_agent.why for kind in self.kinds)]

    def start_loads(self, plan: HybridPlan) -> None:
        for one in plan.kinds:
            self._left.update(copy.request for copy in one.loads)
        for name in plan.hopeless:
            self._left[name] += 1
        for kind, one in zip(self.kinds, plan.kinds):
            kind.start_loads(one)
        for name in plan.hopeless:
            self._over(name, True)

    def _over(self, request: str, failed: bool) -> None:
        if failed:
            self._failing.add(request)
        self._left[request] -= 1
        if self._left[request] > 0:
            return
        del self._left[request]
        self._received.add(request)
        if request in self._failing:
            self._failing.discard(request)
            self._failed.add(request)

    def start_stores(self, plan: HybridPlan) -> None:
        self._ending |= plan.ended
        if plan.hold:
            self._holding.add(plan.hold)
        for kind, one in zip(self.kinds, plan.kinds):
            kind.start_stores(one)

    def preempted(self, plan: HybridPlan) -> None:
        for kind in self.kinds:
            kind.preempted(plan)

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Finished requests whose stores have ended; requests whose loads have ended; those of them whose load failed."""
        for kind in self.kinds:
            kind.finished()
        sent = {name for name in self._ending if not any(kind.stores_of(name) for kind in self.kinds)}
        self._ending -= sent
        if self._holding:
            done = self._holding.difference(*(kind.holds() for kind in self.kinds))
            self._holding -= done
            self.released.update(dict.fromkeys(done, 1))
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return sent, received, failed

    def take_released(self) -> dict[int, int]:
        """Holds that this worker has given up since the last call."""
        released, self.released = self.released, {}
        return released

    def unregister(self) -> None:
        for kind in self.kinds:
            kind.unregister()

    def restore(self) -> None:
        for kind in self.kinds:
            kind.restore()

    def close(self) -> None:
        for kind in self.kinds:
            kind.close()
