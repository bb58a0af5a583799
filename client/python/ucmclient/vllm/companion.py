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
    """What the setting `companion` comes to for one worker. `why` is for the log."""

    def __init__(self, setting: str, layout: Layout, on_gpu: bool):
        """Raises Unsupported for "on" where it can't be."""
        obstacle = _obstacle(setting, layout, on_gpu)
        if setting == "on" and obstacle is not None:
            raise _refusal(obstacle)
        self.used = obstacle is None
        self.why = (
            f"small chunks go through a companion: a block's largest is {_largest(layout) / 1024:g} KiB"
            if obstacle is None
            else f"no companion: {obstacle}"
        )
        self._setting = setting
        self._refused: Optional[UcmError] = None

    def register(self, ns: Namespace, of: RegionMemory, blocks: int, part: int, timeout: float) -> Optional[Region]:
        """None: to be registered without a companion. Raises only what doing so would raise, too."""
        if not self.used or of.gpu is None:
            return None
        try:
            companion = Companion(ns.client, of.gpu, timeout=timeout)
            try:
                return _Accompanied(companion, ns, of.memory, of.planes, of.addresses, blocks, part, timeout)
            except UcmError:
                companion.close(timeout)
                raise
        except UcmError as error:
            if error.away or error.status == Status.DEADLINE:
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


def _obstacle(setting: str, layout: Layout, on_gpu: bool) -> Optional[str]:
    """Why there is to be no companion."""
    if setting == "off":
        return 'the setting is "off"'
    if not on_gpu:
        return "the KV cache does not lie on a CUDA GPU"
    if setting == "auto" and _largest(layout) >= _LARGE:
        return f"chunks of {_largest(layout) >> 10} KiB need none"
    try:
        require()
    except UcmError as error:
        return str(error)
    return None


def _refusal(obstacle: str) -> Unsupported:
    return Unsupported(
        f'kv_connector_extra_config has companion "on", which can\'t be ({obstacle}): remove that, or set it to "auto"'
    )
