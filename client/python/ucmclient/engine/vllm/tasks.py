"""Several loads or dumps of the same blocks as one: of the parts that a rank holds, or of groups of layers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from ...client import BlockResult, Task, TaskResult
from ...errors import Status, UcmError

#: What a block's results say together: the first of these that any says.
_ORDER = (
    BlockResult.DEVICE, BlockResult.FAILED, BlockResult.MISS, BlockResult.CANCELLED, BlockResult.NO_ROOM, BlockResult.UNFIT,
    BlockResult.NOT_DURABLE, BlockResult.IN_PROGRESS, BlockResult.EXISTS, BlockResult.OK,
)
_RANK = bytes(_ORDER.index(result) if result in _ORDER else 0 for result in range(256))


def _together(results: Sequence[bytes]) -> bytes:
    return bytes(_ORDER[min(of)] for of in zip(*(one.translate(_RANK) for one in results)))


def _until(timeout: Optional[float]) -> Optional[float]:
    return None if timeout is None else time.monotonic() + timeout


def _left(until: Optional[float]) -> Optional[float]:
    return None if until is None else max(0.0, until - time.monotonic())


class Tasks:
    """Several as one Task. It is done when all are, even if one has failed, since those under way may still use the
    caller's pages."""

    def __init__(self) -> None:
        self._tasks: list[Union[Task, Tasks]] = []
        self._results: dict[int, TaskResult] = {}
        #: Why it fails. Set it if a task that should be here could not begin.
        self.broken: Optional[UcmError] = None

    @classmethod
    def begun(cls, calls: Sequence[Any], args: Sequence[Any], named: Mapping[str, Any]) -> "Tasks":
        """One task of each call. Raises what the first call raises."""
        tasks = cls()
        tasks.add(calls[0](*args, **named))
        try:
            for call in calls[1:]:
                tasks.add(call(*args, **named))
        except UcmError as error:
            tasks.broken = error
        return tasks

    def add(self, task: "Union[Task, Tasks]") -> None:
        self._tasks.append(task)

    @property
    def closed(self) -> bool:
        return all(task.closed for task in self._tasks)

    def check(self) -> Optional[TaskResult]:
        for i, task in enumerate(self._tasks):
            if i not in self._results:
                self._take(i, task.check)
        return self._result() if len(self._results) == len(self._tasks) else None

    def wait(self, timeout: Optional[float] = None) -> TaskResult:
        """Raises DEADLINE while some are still under way."""
        until = _until(timeout)
        for i, task in enumerate(self._tasks):
            if i not in self._results:
                self._take(i, lambda: task.wait(_left(until)))
        return self._result()

    def _take(self, i: int, ask: Any) -> None:
        try:
            result = ask()
        except UcmError as error:
            if error.status == Status.DEADLINE:
                raise
            self.broken = self.broken or error
            result = TaskResult(0, 0, b"")
        if result is not None:
            self._results[i] = result

    def _result(self) -> TaskResult:
        if self.broken is not None:
            raise self.broken
        blocks = _together([result.blocks for result in self._results.values()])
        ok = sum(status in (BlockResult.OK, BlockResult.EXISTS) for status in blocks)
        return TaskResult(sum(result.bytes for result in self._results.values()), ok, blocks)

    def wait_layers(self, layers: int, timeout: Optional[float] = None) -> bytes:
        until = _until(timeout)
        return _together([task.wait_layers(layers, _left(until)) for task in self._tasks])

    def cancel(self, timeout: Optional[float] = None) -> None:
        for i, task in enumerate(self._tasks):
            if i not in self._results:
                task.cancel(timeout=timeout)

    def close(self) -> None:
        for task in self._tasks:
            task.close()
