"""Whether a worker's small chunks go through a companion (../companion.py), and its region registered with one.

Promises: what a companion fails at after the engine's start costs its help only: the region is registered without.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from ..client import Memory, Namespace, Plane, Region
from ..companion import Companion, CompanionRegion, require
from ..errors import Status, UcmError
from .identity import Unsupported
from .layout import Layout
from .settings import Settings

logger = logging.getLogger("ucmclient.vllm")

#: Chunks from here on need no help (docs/copy.md).
_LARGE = 512 << 10


@dataclass(frozen=True)
class RegionMemory:
    """The allocations that a layout lies in and where each begins, its planes, and the UUID of the GPU."""

    memory: Sequence[Memory] = ()
    addresses: Sequence[int] = ()
    planes: Sequence[Plane] = ()
    gpu: Optional[bytes] = None


class _Accompanied(CompanionRegion):
    """Ends its companion with itself: an engine that sleeps wants all of its memory back."""

    def unregister(self, timeout: Optional[float] = None) -> None:
        self.companion.close(timeout)


class Accompaniment:
    """What the setting `companion` comes to for one worker."""

    def __init__(self, settings: Settings, layout: Layout, on_gpu: bool, writes: bool):
        """writes: this rank stores. Raises Unsupported for "on" where it can't be."""
        self._setting = settings.companion
        self._obstacle = _obstacle(settings, layout, on_gpu, writes)
        if self._setting == "on" and self._obstacle is not None:
            raise _refusal(self._obstacle)
        self._largest = _largest(layout) if self._obstacle is None else 0
        self._refused: Optional[UcmError] = None

    @property
    def used(self) -> bool:
        """There is to be one, and it was not refused."""
        return self._obstacle is None and self._refused is None

    @property
    def why(self) -> str:
        """For the log, after the start."""
        obstacle = self._obstacle if self._refused is None else str(self._refused)
        if obstacle is not None:
            return f"no companion: {obstacle}"
        return f"small chunks go through a companion: a block's largest is {self._largest / 1024:g} KiB"

    def register(self, ns: Namespace, of: RegionMemory, blocks: int, part: int, timeout: float) -> Optional[Region]:
        """None: to be registered without a companion. Raises only what doing so would raise, too."""
        if self._obstacle is not None or of.gpu is None:
            return None
        try:
            companion = Companion(ns.client, of.gpu, timeout=timeout)
            try:
                return _Accompanied(companion, ns, of.memory, of.planes, of.addresses, blocks, part, timeout)
            except UcmError:
                companion.close(timeout)
                raise
        except UcmError as error:
            if error.away or error.status in (Status.DEADLINE, Status.BUSY):
                raise
            self._refused = error
            logger.warning("small chunks go without a companion (%s)", error)
            return None

    def started(self) -> None:
        """Raises Unsupported for "on" when the start's registration had to do without."""
        if self._setting == "on" and self._refused is not None:
            raise _refusal(str(self._refused))


def _largest(layout: Layout) -> int:
    return max(chunk.size for layer in layout.layers for chunk in layer)


def _obstacle(settings: Settings, layout: Layout, on_gpu: bool, writes: bool) -> Optional[str]:
    """Why there is to be no companion."""
    if settings.companion == "off":
        return 'the setting is "off"'
    if not on_gpu:
        return "the KV cache does not lie on a CUDA GPU"
    if settings.companion == "auto" and _largest(layout) >= _LARGE:
        return f"chunks of {_largest(layout) >> 10} KiB need none"
    if settings.companion == "auto" and not (settings.load and not settings.layerwise) and not (settings.store and writes):
        return "this rank stores nothing, and loads nothing or layer by layer, which goes straight"
    try:
        require()
    except UcmError as error:
        return str(error)
    return None


def _refusal(obstacle: str) -> Unsupported:
    return Unsupported(
        f'kv_connector_extra_config has companion "on", which can\'t be ({obstacle}): remove that, or set it to "auto"'
    )
