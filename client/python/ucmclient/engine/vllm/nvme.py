"""Is loading from NVMe faster than computing? Only with the setting `prefill_rate`, the speed of computing."""

from __future__ import annotations

import time
from typing import Any, Optional

from ...errors import UcmError
from .link import Link
from .settings import Settings

#: Weight of the newest measurement in the rate.
_NEWEST = 0.3
#: Loads smaller than this are not measured: their time depends more on the engine's steps than on the disk.
_MEASURABLE = 256


class NvmeRate:
    """Measures how many tokens a second requests get from NVMe. Before the first measurement every load is worth
    trying. Blocks that are not worth the wait are read into DRAM with low priority, for the next request. That is
    measured, too, so a disk that was slow for a while gets another chance."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.tokens_per_second = 0.0
        self._task: Optional[Any] = None
        self._tokens, self._began = 0, 0.0

    def worth(self, tokens: int, slow: int) -> bool:
        """Whether loading `tokens` is worthwhile when `slow` of them are on NVMe."""
        computing = self.settings.prefill_rate
        if not computing or not slow or not self.tokens_per_second:
            return True
        return slow / self.tokens_per_second <= tokens / computing

    def measured(self, tokens: int, seconds: float) -> None:
        if tokens < _MEASURABLE or seconds <= 0:
            return
        rate = tokens / seconds
        old = self.tokens_per_second
        self.tokens_per_second = rate if not old else old + _NEWEST * (rate - old)

    def bring_in(self, link: Link, keys: bytes, tokens: int, request: str) -> None:
        """Reads blocks into DRAM, one request at a time: a second one would only wait."""
        if self._busy() or link.ns is None:
            return
        self._task = link.ask(
            link.ns.prefetch, keys, daemon_timeout=self.settings.transfer_timeout, timeout=self.settings.lookup_timeout,
            request=request,
        )
        self._tokens, self._began = tokens, time.monotonic()

    def _busy(self) -> bool:
        if self._task is None:
            return False
        try:
            result = self._task.check()
            if result is None:
                return True
            if result.all_ok:
                self.measured(self._tokens, time.monotonic() - self._began)
        except UcmError:
            pass  # its connection broke
        self._task.close()
        self._task = None
        return False
