"""The prefetcher: brings selected blocks into DRAM before a worker loads them, the most urgent first.

It has no thread. Its calls send what may be sent, and the daemon does the work."""

from __future__ import annotations

import array
import ctypes
import enum
import threading
import time
from dataclasses import dataclass, replace
from typing import Optional

from ..buffers import Blocks, uint32s
from ..client import Client
from ..errors import Status, UcmError
from ..region import BlockResult, Task, TaskResult
from .sequence import BlockSequence

PENDING_MAX = 64
DEADLINE_S = 10.0


class Priority(enum.IntEnum):
    """By the place of a request in the worker's queue: 0, up to 4, up to 16, beyond."""

    URGENT = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @classmethod
    def of(cls, place: int) -> Priority:
        return cls((place > 0) + (place > 4) + (place > 16))


@dataclass(frozen=True)
class Prefetched:
    """`came` of n blocks lie in DRAM now; blocks: a BlockResult's number for each."""

    n: int
    came: int
    missing: int
    bytes: int
    blocks: bytes


@dataclass
class PrefetcherStats:
    """displaced, late: of those that ended, those that a more urgent one displaced, and those that were never sent in time. useful,
    useless: blocks that came, by the `used` of Prefetch.close. held_bytes: of those that were sent and not closed."""

    submitted: int = 0
    ended: int = 0
    displaced: int = 0
    late: int = 0
    came: int = 0
    missing: int = 0
    useful: int = 0
    useless: int = 0
    bytes: int = 0
    pending: int = 0
    held_bytes: int = 0


class Prefetcher:
    """Orders the prefetches of many sequences. Bounds: how many prefetches have not ended (64), and how many batches ahead of the running
    one may be sent (2). The last is the bytes of prefetches that were sent and not closed (1 GiB). 0 means these defaults. Threads may
    share it, but not one Prefetch."""

    def __init__(
        self,
        client: Client,
        max_pending_prefetch: int = 0,
        prefetch_ahead: int = 0,
        prefetch_cache_size: int = 0,
    ):
        if max_pending_prefetch > PENDING_MAX:
            raise UcmError(Status.INVALID, f"max_pending_prefetch is {max_pending_prefetch}, at most {PENDING_MAX}")
        self.client, self.closed = client, False
        self._max_pending = max_pending_prefetch or PENDING_MAX
        self._ahead = prefetch_ahead or 2
        self._bytes_max = prefetch_cache_size or 1 << 30
        self._batch = 0
        self._stats = PrefetcherStats()
        self._open: list[Prefetch] = []
        self._waiting: list[list[Prefetch]] = [[] for _ in Priority]  # in the order of their submission
        self._sent: list[Prefetch] = []  # that have not ended
        self._changed = threading.Condition(threading.RLock())  # guards all of it

    def submit(
        self,
        sequence: BlockSequence,
        index: Blocks,
        *,
        place: int = 0,
        batch: int = 0,
        daemon_timeout: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Prefetch:
        """index: blocks of the sequence, such as Selection.union(). place: of their request in the worker's queue. batch: the one that
        will use them, as advance() counts. daemon_timeout: from now; then blocks that did not come count as missing (10 s). If too many
        have not ended, it displaces a less urgent one that still waits, or is refused as BUSY."""
        prefetch = Prefetch(self, sequence, index, place, batch, daemon_timeout)
        with self._changed:
            self._pump(timeout)
            self._make_room(prefetch.priority)
            self._open.append(prefetch)
            self._waiting[prefetch.priority].append(prefetch)
            self._stats.submitted += 1
            self._pump(timeout)
            if prefetch.error:
                prefetch.close()
                raise prefetch.error
        return prefetch

    def advance(self, batch: int) -> None:
        """The worker begins this batch: prefetches for the next ones may leave, and those that are too late end."""
        with self._changed:
            if batch < self._batch:
                raise UcmError(Status.INVALID, f"batch {self._batch} runs already")
            self._batch = batch
            self._pump(0)

    def stats(self) -> PrefetcherStats:
        with self._changed:
            self._pump(0)
            return replace(self._stats, pending=self._pending())

    def close(self) -> None:
        with self._changed:
            self.closed = True
            for prefetch in list(self._open):
                prefetch.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for Prefetch, with the lock ----

    def _pending(self) -> int:
        return len(self._sent) + sum(map(len, self._waiting))

    def _make_room(self, priority: Priority) -> None:
        if self._pending() < self._max_pending:
            return
        for waiting in reversed(self._waiting[priority + 1 :]):
            if waiting:
                self._stats.displaced += 1
                waiting[-1]._end()
                return
        raise UcmError(Status.BUSY, f"{self._pending()} prefetches have not ended, and none that waits is less urgent")

    def _next(self) -> Optional[Prefetch]:
        for waiting in self._waiting:
            for prefetch in waiting:
                if prefetch.batch - self._batch <= self._ahead:
                    return prefetch if prefetch.bytes <= self._bytes_max - self._stats.held_bytes else None
        return None

    def _pump(self, timeout: Optional[float]) -> None:
        """Sees what has ended, ends what is too late, and sends what may be sent."""
        for prefetch in list(self._sent):
            prefetch._poll()
        now = time.monotonic()
        for prefetch in [prefetch for waiting in self._waiting for prefetch in waiting]:
            if prefetch.batch < self._batch or prefetch.deadline <= now:
                self._stats.late += 1
                prefetch._end()
        while not self.closed and (following := self._next()) is not None:
            if not following._send(timeout):
                break
        self._changed.notify_all()


class Prefetch:
    """Close it when its blocks were loaded or are not needed any more. That gives its bytes back, and cancels what has not ended."""

    def __init__(self, prefetcher: Prefetcher, sequence: BlockSequence, index: Blocks, place: int, batch: int, deadline: float):
        """For Prefetcher.submit."""
        if prefetcher.closed:
            raise UcmError(Status.INVALID, "this Prefetcher is closed")
        if sequence.client is not prefetcher.client:
            raise UcmError(Status.INVALID, "the sequence is of another client than the prefetcher")
        borrowed, n = uint32s(index)
        self.index = array.array("I", ctypes.string_at(borrowed.address, borrowed.bytes) if n else b"")
        wrong = next((block for block in self.index if block >= len(sequence)), None)
        if n == 0 or wrong is not None:
            raise UcmError(Status.INVALID, f"{n} blocks of a sequence of {len(sequence)}" + (f", among them {wrong}" if n else ""))
        base = sequence.ns.base.identity
        self.bytes = n * base.layer_bytes * base.layers[sequence.part if len(base.layers) > 1 else 0]
        if self.bytes > prefetcher._bytes_max:
            raise UcmError(Status.INVALID, f"{n} blocks have {self.bytes} bytes; prefetch_cache_size is {prefetcher._bytes_max}")
        self.sequence, self.priority, self.batch, self.closed = sequence, Priority.of(place), batch, False
        self.deadline = time.monotonic() + (deadline or DEADLINE_S)
        self.error: Optional[UcmError] = None
        self._prefetcher = prefetcher
        self._task: Optional[Task] = None  # from when it was sent
        self._got: Optional[Prefetched] = None  # from when it ended
        self._awaited = False  # a thread waits for the task, without the lock

    def check(self) -> Optional[Prefetched]:
        """None until it has ended."""
        with self._prefetcher._changed:
            self._look(0)
            return self._got

    def wait(self, timeout: Optional[float] = None) -> Prefetched:
        """Waits until it has ended. It may not be sent yet, since its batch is too far ahead, or others hold the bytes. Then this waits
        for other threads' calls, until its own deadline."""
        until = None if timeout is None else time.monotonic() + timeout
        prefetcher = self._prefetcher
        while True:
            with prefetcher._changed:
                self._look(timeout)
                if self._got is not None:
                    return self._got
                now = time.monotonic()
                left = None if until is None else until - now
                if left is not None and left <= 0:
                    raise UcmError(Status.DEADLINE, "the prefetch did not end in time")
                if self._task is None:
                    own = max(self.deadline - now, 0.001)
                    prefetcher._changed.wait(own if left is None else min(own, left))
                    continue
                self._awaited = True
            self._await_task(left)

    def move(self, place: int) -> None:
        """Its request got another place in the worker's queue. No effect once it was sent."""
        with self._prefetcher._changed:
            waiting = self._prefetcher._waiting
            if self in waiting[self.priority] and self.priority != Priority.of(place):
                waiting[self.priority].remove(self)
                self.priority = Priority.of(place)
                waiting[self.priority].append(self)
            self._prefetcher._pump(0)

    def cancel(self, timeout: Optional[float] = None) -> None:
        """Ends it if it still waits, and asks the daemon to stop it if it was sent. What has come stays."""
        with self._prefetcher._changed:
            self._look(0)
            if self._got is None and self._task is None:
                self._end()
            elif self._got is None:
                self._task.cancel(timeout)

    def close(self, used: int = 0) -> None:
        """used: how many of the blocks that came were of use, for the counters."""
        prefetcher = self._prefetcher
        with prefetcher._changed:
            if self.closed:
                return
            self.closed = True
            if self._got is None:
                self._end()
            if self._task is not None:
                self._task.close()
                prefetcher._stats.held_bytes -= self.bytes
            used = min(used, self._got.came)
            prefetcher._stats.useful += used
            prefetcher._stats.useless += self._got.came - used
            prefetcher._open.remove(self)
            prefetcher._pump(0)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for Prefetcher, with the lock ----

    def _look(self, timeout: Optional[float]) -> None:
        if self.closed:
            raise UcmError(Status.INVALID, "this Prefetch is closed")
        if self._got is None:
            self._prefetcher._pump(timeout)
        if self.error:
            raise self.error

    def _send(self, timeout: Optional[float]) -> bool:
        """False: nothing further can be sent now."""
        prefetcher = self._prefetcher
        if self.sequence.closed:
            self._end()
            return True
        left = max(self.deadline - time.monotonic(), 0.001)
        try:
            self._task = self.sequence.prefetch(
                self.index, priority=Priority.LOW - self.priority, daemon_timeout=left, timeout=timeout
            )
        except UcmError as error:
            if error.status == Status.DEADLINE:
                return False
            self._end(error=error)
            return True
        prefetcher._waiting[self.priority].remove(self)
        prefetcher._sent.append(self)
        prefetcher._stats.held_bytes += self.bytes
        return True

    def _poll(self) -> None:
        if self._awaited or self._task is None:
            return
        try:
            result = self._task.check()
        except UcmError as error:
            self._end(error=error)
        else:
            if result is not None:
                self._end(result)

    def _await_task(self, timeout: Optional[float]) -> None:
        """Without the lock."""
        result, error = None, None
        try:
            result = self._task.wait(timeout)
        except UcmError as e:
            error = None if e.status == Status.DEADLINE else e
        with self._prefetcher._changed:
            self._awaited = False
            if self._got is None and (result is not None or error is not None):
                self._end(result, error)

    def _end(self, result: Optional[TaskResult] = None, error: Optional[UcmError] = None) -> None:
        """If there is no result, nothing came, which is no error."""
        prefetcher, stats, n = self._prefetcher, self._prefetcher._stats, len(self.index)
        for where in (prefetcher._sent, prefetcher._waiting[self.priority]):
            if self in where:
                where.remove(self)
        result = result or TaskResult(0, 0, bytes([BlockResult.CANCELLED]) * n)
        self.error, self._got = error, Prefetched(n, result.ok, n - result.ok, result.bytes, result.blocks)
        stats.ended += 1
        stats.came += result.ok
        stats.missing += n - result.ok
        stats.bytes += result.bytes
