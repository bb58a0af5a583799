"""The prefetcher: brings selected blocks into DRAM before a worker loads them, the most urgent first."""

from __future__ import annotations

import ctypes
import enum
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Optional

from .._native import lib
from ..buffers import Blocks, uint32s
from ..client import Client
from ..errors import Status, UcmError, check
from ..handle import _Handle, _timeout
from . import _native as native
from .chain import Chain


class Priority(enum.IntEnum):
    """enum ucm_prefetch_priority, by the place of a request in the worker's queue: 0, up to 4, up to 16, beyond."""

    URGENT = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


@dataclass(frozen=True)
class Prefetched:
    """`came` of n blocks lie in DRAM now; blocks: a BlockResult's number for each."""

    n: int
    came: int
    missing: int
    bytes: int
    blocks: bytes


@dataclass(frozen=True)
class PrefetcherStats:
    submitted: int
    ended: int
    displaced: int
    late: int
    came: int
    missing: int
    useful: int
    useless: int
    bytes: int
    pending: int
    held_bytes: int


class Prefetcher(_Handle):
    """struct ucm_prefetcher: bounds 0 are its defaults (64 pending, 2 batches ahead, 1 GiB)."""

    _free = lib.ucm_prefetcher_close

    def __init__(
        self,
        client: Client,
        max_pending_prefetch: int = 0,
        prefetch_ahead: int = 0,
        prefetch_cache_size: int = 0,
    ):
        super().__init__(client)
        out = c_void_p()
        options = native.PrefetcherOptions(max_pending_prefetch, prefetch_ahead, prefetch_cache_size)
        check(lib.ucm_prefetcher_open(client.handle, byref(options), byref(out)))
        self._handle = out.value

    def submit(
        self,
        chain: Chain,
        index: Blocks,
        *,
        place: int = 0,
        batch: int = 0,
        deadline: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Prefetch:
        """index: blocks of the chain, such as Selection.union(). place: of their request in the worker's queue. batch:
        the one that will use them, as advance() counts."""
        return Prefetch(self, chain, index, place, batch, deadline, timeout)

    def advance(self, batch: int) -> None:
        """The worker begins this batch: prefetches for the next ones may leave, and those that are too late end."""
        check(lib.ucm_prefetcher_advance(self.handle, batch))

    def stats(self) -> PrefetcherStats:
        stats = native.PrefetcherStats()
        check(lib.ucm_prefetcher_stats(self.handle, byref(stats)))
        return PrefetcherStats(*(getattr(stats, name) for name, _ in stats._fields_))


class Prefetch(_Handle):
    """Close it when its blocks were loaded or are not wanted any more: that gives its bytes back."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        chain: Chain,
        index: Blocks,
        place: int,
        batch: int,
        deadline: float,
        timeout: Optional[float],
    ):
        """For Prefetcher.submit."""
        super().__init__(prefetcher.client)
        self._prefetcher = prefetcher
        borrowed, n = uint32s(index)
        what = native.PrefetchBlocks(chain.handle, borrowed.address, n, place, batch, _timeout(deadline))
        out = c_void_p()
        check(lib.ucm_prefetcher_submit(prefetcher.handle, byref(what), _timeout(timeout), byref(out)))
        self._handle = out.value

    @property
    def handle(self) -> int:
        if self._prefetcher.closed:
            raise UcmError(Status.INVALID, "this Prefetch's Prefetcher is closed")
        return super().handle

    def _result(self, got: native.Prefetched) -> Prefetched:
        return Prefetched(got.n, got.came, got.missing, got.bytes, ctypes.string_at(got.result, got.n))

    def check(self) -> Optional[Prefetched]:
        """None until it has ended."""
        got = native.Prefetched()
        rc = lib.ucm_prefetch_check(self.handle, byref(got))
        if rc == -Status.PENDING:
            return None
        check(rc)
        return self._result(got)

    def wait(self, timeout: Optional[float] = None) -> Prefetched:
        got = native.Prefetched()
        check(lib.ucm_prefetch_wait(self.handle, _timeout(timeout), byref(got)))
        return self._result(got)

    def move(self, place: int) -> None:
        """Its request got another place in the worker's queue."""
        check(lib.ucm_prefetch_move(self.handle, place))

    def cancel(self, timeout: Optional[float] = None) -> None:
        check(lib.ucm_prefetch_cancel(self.handle, _timeout(timeout)))

    def close(self, used: int = 0) -> None:
        """used: how many of the blocks that came were of use, for the counters."""
        handle = self._take()
        if handle is not None and not self.client.closed and not self._prefetcher.closed:
            lib.ucm_prefetch_free(handle, used)
