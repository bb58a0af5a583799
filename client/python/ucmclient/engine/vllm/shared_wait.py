"""Requests that wait for the shared tier, while the scheduler and other requests go on (docs/vllm.md, "A slow shared tier").

The daemon answers a lookup at once with what its host has, and says whether it is asking the shared tier. If it is, the engine retries the request
later, and the same lookup then finds the shared tier's answer.

Promise: no step waits for the shared tier. A request waits for `shared_wait` at most, in all, and is computed with what is known then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Optional

from ...client import PrefixHits, WaitMode
from .link import Link
from .settings import Settings

#: At most so many requests are looked for at once, fewer than the daemon lets a connection have under way (docs/methods.md, lookup). Others wait
#: for their turn.
_MOST = 48
#: Seconds until the daemon is asked again: at first, and at most. With many requests, it is asked for one in each _APART.
_PAUSE, _LONGEST_PAUSE, _APART = 0.001, 0.02, 0.0005


@dataclass
class _Wait:
    until: float
    pause: float = _PAUSE
    ask_at: float = 0.0


class SharedWait:
    def __init__(self, settings: Settings):
        self._settings = settings
        self._waits: dict[str, _Wait] = {}
        #: Requests for which the daemon's latest answer was that it asks the shared tier.
        self._pending: set[str] = set()

    def holds(self, name: str) -> bool:
        """There is no need to look the request up in this step."""
        now, wait = time.monotonic(), self._waits.get(name)
        if name not in self._pending and len(self._pending) >= _MOST:
            wait = wait or self._begin(name)
            return now < wait.until
        return name in self._pending and wait is not None and now < wait.ask_at

    def pending(self, name: str) -> bool:
        """The engine should come back with it."""
        return name in self._pending

    def begin(self, name: str) -> None:
        """A lookup of the request begins, perhaps in several calls."""
        self._pending.discard(name)

    def extend(self, name: str, until: float) -> None:
        """Another host is still storing blocks that the request needs."""
        if name in self._waits:
            self._waits[name].until = max(self._waits[name].until, until)

    def give_up(self, name: str) -> None:
        """Nobody waits for the request any more."""
        self._pending.discard(name)
        self._waits[name] = _Wait(until=0.0)

    def forget(self, name: str) -> None:
        self._pending.discard(name)
        self._waits.pop(name, None)

    def prefix(self, link: Link, name: str, keys: bytes) -> Optional[PrefixHits]:
        """ns.lookup_prefix with a lease. None: the daemon did not answer."""
        ns = link.ns
        hits = None if ns is None else link.ask(ns.lookup_prefix, keys, lease=self._settings.lease, **self._how(name))
        self._answered(name, hits is not None and hits.pending)
        return hits

    def each(self, link: Link, name: str, keys: bytes, lease: float) -> Optional[tuple[bytes, int]]:
        """ns.lookup_per_key. None: the daemon did not answer."""
        ns = link.ns
        answer = None if ns is None else link.ask(ns.lookup_per_key_nowait, keys, lease=lease, **self._how(name))
        if answer is None:
            return None
        found, number, pending = answer
        self._answered(name, pending)
        return found, number

    def _begin(self, name: str) -> _Wait:
        return self._waits.setdefault(name, _Wait(time.monotonic() + self._settings.shared_wait))

    def _how(self, name: str) -> dict[str, Any]:
        how = {"timeout": self._settings.lookup_timeout, "request": name}
        if self._settings.shared_wait == 0:
            return how | {"wait_mode": WaitMode.WAIT}
        wait = self._waits.get(name)
        left = self._settings.shared_wait if wait is None else wait.until - time.monotonic()
        return how | ({"wait_mode": WaitMode.LATER, "wait": max(left, 0.001)} if left > 0 else {"wait_mode": WaitMode.HERE})

    def _answered(self, name: str, pending: bool) -> None:
        if not pending:
            return
        wait = self._begin(name)
        self._pending.add(name)
        wait.ask_at = min(time.monotonic() + max(wait.pause, _APART * len(self._pending)), wait.until)
        wait.pause = min(2 * wait.pause, _LONGEST_PAUSE)
