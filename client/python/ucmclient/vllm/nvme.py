"""Is it sooner to load from NVMe than to compute? Off unless the setting `prefill_rate` says how fast computing is."""

from __future__ import annotations

import time
from typing import Any, Optional

from ..errors import UcmError
from .link import Link
from .settings import Settings

#: Share of the newest measurement in the rate.
_NEWEST = 0.3
#: Loads of fewer tokens tell more of the engine's steps than of the disk.
_MEASURABLE = 256


class NvmeRate:
    """Tokens a second that came from NVMe, as requests have waited for them. Until something was measured a load is
    tried. What is not worth waiting for is read into DRAM behind everything else, for whoever asks next, and measured
    on its way, so that a disk which was slow for a while gets another chance."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.tokens_per_second = 0.0
        self._task: Optional[Any] = None
        self._tokens, self._began = 0, 0.0

    def worth(self, tokens: int, slow: int) -> bool:
        """Of `tokens` that could be loaded, `slow` are on NVMe."""
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

    def bring_in(self, link: Link, keys: bytes, tokens: int) -> None:
        """One at a time: more would only wait behind it."""
        if self._busy() or link.ns is None:
            return
        self._task = link.ask(
            link.ns.prefetch, keys, deadline=self.settings.transfer_deadline, timeout=self.settings.lookup_timeout
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
            pass  # gone with its connection
        self._task.close()
        self._task = None
        return False
