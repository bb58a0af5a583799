"""Brings what a hit without pages needs of the daemon, by a thread, while the request still waits for its load. That is its blocks in the mapping,
and summaries of those that have none. So the engine waits for neither, and its other requests go on. Imports nothing of vLLM."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Optional

from ...decode.supply import PAUSE, URGENT, Source
from ...sparse.sequence import BlockSequence
from ...sparse.mapping import Referenced

logger = logging.getLogger("ucmclient.engine.vllm")

#: Asks for blocks of a sequence: the first block, how many, and for how many seconds. As GpuDecoder.ref_beside.
Ref = Callable[[BlockSequence, int, int, float], Optional[Referenced]]
#: How many blocks one call asks for, and for how many seconds. Other calls of the mapping may wait so long.
_AT_ONCE, _WAIT = 1024, 0.01
#: How long it goes on when none has come, and how long at most. Moving blocks within DRAM takes a quarter of a second a GiB; computing them takes
#: longer.
_LOOK, _LONGEST = 0.25, 10.0


class _Coming:
    """Of one request. sequence keeps its blocks and their references, and belongs to this until take(). With it comes the epoch of its
    connection."""

    def __init__(self, keys: bytes):
        self.keys = keys
        self.sequence: Optional[tuple[BlockSequence, int]] = None
        self.done = self.dropped = False


class Ahead:
    """One thread for all requests. It ends with end(). Only the engine's thread calls the methods."""

    def __init__(self, source: Source, ref: Ref, part: int, deadline: float):
        """deadline: in seconds, for the sequence and for its summaries, each. After it, and when no blocks come any more, the request goes on with
        what there is."""
        self._source, self._ref, self._part, self._deadline = source, ref, part, deadline
        self._coming: dict[str, _Coming] = {}
        self._arrived: set[str] = set()
        self._queue: deque[_Coming] = deque()
        #: Held for what both threads write.
        self._lock = threading.Condition()
        self._ended = False
        self._thread: Optional[threading.Thread] = None

    def begin(self, name: str, keys: bytes) -> None:
        """keys: of its first blocks, which have no pages."""
        self.drop(name)
        coming = self._coming[name] = _Coming(keys)
        with self._lock:
            self._queue.append(coming)
            self._lock.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ucmclient-ahead", daemon=True)
            self._thread.start()

    def arrived(self, names: set[str]) -> set[str]:
        """names: requests whose loads have ended since the last call. Returns those of these and of earlier ones that can go on."""
        self._arrived |= names
        ready = {name for name in self._arrived if name not in self._coming or self._coming[name].done}
        self._arrived -= ready
        return ready

    def take(self, name: str) -> Optional[tuple[BlockSequence, int]]:
        """The sequence of all the keys, for the caller to close, and the epoch of its connection; None: it has not come."""
        coming = self._coming.pop(name, None)
        if coming is None:
            return None
        with self._lock:
            sequence, coming.sequence, coming.dropped = coming.sequence if coming.done else None, None, True
        return sequence

    def drop(self, name: str) -> None:
        taken = self.take(name)
        if taken is not None:
            taken[0].close()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
        for name in list(self._coming):
            self.drop(name)

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._ended:
                    self._lock.wait()
                if self._ended:
                    return
                coming = self._queue.popleft()
            brought = None
            try:
                brought = None if coming.dropped else self._brought(coming)
            except Exception:  # otherwise the request would wait for ever
                logger.exception("blocks of a request can't be brought into the mapping before it begins")
            with self._lock:
                coming.done = True
                if not coming.dropped:
                    coming.sequence, brought = brought, None
            if brought is not None:
                brought[0].close()

    def _brought(self, coming: _Coming) -> Optional[tuple[BlockSequence, int]]:
        ask, summaries, left = self._source.ask, self._source.summaries, self._deadline
        if summaries is None:
            return None
        connection_epoch = summaries.client.connection_epoch
        sequence: Optional[BlockSequence] = ask(BlockSequence, summaries, self._part, timeout=left)
        if sequence is None:
            return None
        try:
            appended = ask(sequence.append, coming.keys, build=True, priority=URGENT, daemon_timeout=left, timeout=left)
            if appended is None or appended.missing:
                sequence.close()
                return None
            self._ref_all(sequence, len(coming.keys) // summaries.identity.key_bytes, coming)
        except BaseException:  # the daemon keeps what nobody closes: its blocks could neither go nor be stored again
            sequence.close()
            raise
        return sequence, connection_epoch

    def _ref_all(self, sequence: BlockSequence, blocks: int, coming: _Coming) -> None:
        """Waits until no more will come into the mapping. All have come, or none came for a while, or there is no space, or it takes too long."""
        at, placed, came = 0, 0, time.monotonic()
        until = came + _LONGEST
        while at < blocks and time.monotonic() < min(until, came + _LOOK) and not (coming.dropped or self._ended):
            n = min(_AT_ONCE, blocks - at)
            referenced = self._ref(sequence, at, n, _WAIT)
            if referenced is None:
                return
            here = referenced.placed + referenced.missing
            if here > placed:
                came = time.monotonic()
            else:
                time.sleep(PAUSE)
            at, placed = (at + n, 0) if here == n else (at, here)
