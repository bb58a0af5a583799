"""The worker's half of an engine with the setting `chunks`. It has a half for prefixes, and over the same pages one whose loads re-rotate K."""

from __future__ import annotations

from typing import Any

from .chunk_rules import Rerotated, chunk_settings
from .identity import EngineIdentity
from .layout import Layout
from .plan import Plan
from .settings import Settings
from .worker import WorkerHalf


class ChunkingWorker(WorkerHalf):
    def __init__(self, settings: Settings, identity: EngineIdentity, layout: Layout, *, shifted: Rerotated, name: str, part: int, writes: bool, on_gpu: bool,
                 event: Any, **named: Any):
        """named: arguments of WorkerHalf, for prefixes."""
        of = {"part": part, "writes": writes, "on_gpu": on_gpu, "event": event}
        super().__init__(settings, identity, layout, name=name, **of, **named)
        assert identity.chunks is not None
        try:
            self.shifting = WorkerHalf(chunk_settings(settings), identity.chunks, shifted.layout, name=f"{name}-chunks", rope=shifted.rope, **of)
        except BaseException:
            super().close()
            raise
        #: For statistics.
        self.kinds: list[WorkerHalf] = [self, self.shifting]

    def start_loads(self, plan: Plan) -> None:
        super().start_loads(plan)
        if plan.chunks is not None:
            self.shifting.start_loads(plan.chunks)

    def start_stores(self, plan: Plan) -> None:
        super().start_stores(plan)
        if plan.chunks is not None:
            self.shifting.start_stores(plan.chunks)

    def preempted(self, plan: Plan) -> None:
        super().preempted(plan)
        if plan.chunks is not None:
            self.shifting.preempted(plan.chunks)

    def finished(self) -> tuple[set[str], set[str]]:
        sent, received = super().finished()
        more_sent, more_received = self.shifting.finished()
        return sent | more_sent, received | more_received

    def failed_blocks(self) -> set[int]:
        return super().failed_blocks() | self.shifting.failed_blocks()

    def unregister(self) -> None:
        super().unregister()
        self.shifting.unregister()

    def restore(self) -> None:
        super().restore()
        self.shifting.restore()

    def close(self) -> None:
        super().close()
        self.shifting.close()
