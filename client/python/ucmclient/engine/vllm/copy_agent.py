"""Whether a worker uses a copy agent (../copy_agent.py) for small fragments, and registering its region with one.

Promise: if a copy agent fails after the engine's start, the region is registered without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

from ...client import Memory, Namespace, Plane, Region
from ...copy_agent import CopyAgent, require
from ...errors import Status, UcmError
from ...region import Rope
from .head_groups import Regions
from .identity import Unsupported
from .layout import Layout
from .settings import Settings

logger = logging.getLogger("ucmclient.engine.vllm")

#: Fragments of this size and more need no copy agent (docs/design/copy.md).
_LARGE = 512 << 10

#: By encoding: entries of the ring, and bytes of each. `q4` uses the bus for so short a time that more of its entries must be under
#: way while the worker's kernels run (docs/design/copy.md). Others: the library's.
_RINGS = {"q4": (8, 8 << 20)}


@dataclass(frozen=True)
class RegionMemory:
    """A layout's allocations, where each begins, its planes, and the UUID of the GPU."""

    memory: Sequence[Memory] = ()
    addresses: Sequence[int] = ()
    planes: Sequence[Plane] = ()
    gpu: Optional[bytes] = None


class WorkerCopyAgent:
    """The setting `copy_agent`, applied to one worker."""

    def __init__(self, settings: Settings, layout: Layout, on_gpu: bool, writes: bool):
        """writes: this rank stores. Raises Unsupported if the setting is "on" and a copy agent is impossible."""
        self._setting = settings.copy_agent
        self._obstacle = _obstacle(settings, layout, on_gpu, writes)
        if self._setting == "on" and self._obstacle is not None:
            raise _refusal(self._obstacle)
        self._largest = _largest(layout) if self._obstacle is None else 0
        self._encoded = self._obstacle is None and layout.kv_tensors is not None
        self._ring = _RINGS.get(settings.encoding, (0, 0))
        self._refused: Optional[UcmError] = None

    @property
    def used(self) -> bool:
        """The worker has a copy agent, or will have one when the daemon is there."""
        return self._obstacle is None and self._refused is None

    @property
    def why(self) -> str:
        """A sentence for the log, after the start."""
        obstacle = self._obstacle if self._refused is None else str(self._refused)
        if obstacle is not None:
            return f"no copy agent: {obstacle}"
        if self._encoded:
            return "encoded blocks go through a copy agent"
        return f"small fragments go through a copy agent: a block's largest is {self._largest / 1024:g} KiB"

    def register(
        self, ns: Namespace, parts: Sequence[tuple[int, RegionMemory]], blocks: int, timeout: float, rope: Optional[Rope] = None
    ) -> Union[Region, Regions, None]:
        """parts: those that this worker holds, with the memory of each. Returns None if they must be registered without a copy agent.
        Raises only errors that a registration without one would raise, too."""
        gpu = parts[0][1].gpu if parts else None
        if self._obstacle is not None or gpu is None:
            return None
        try:
            entries, entry_bytes = self._ring
            copy_agent = CopyAgent(ns.client, gpu, entries=entries, entry_bytes=entry_bytes, timeout=timeout)
            try:
                regions = [
                    copy_agent.register(
                        ns, of.memory, of.planes, of.addresses, blocks=blocks, part=part, rope=rope, timeout=timeout
                    )
                    for part, of in parts
                ]
                # An engine that sleeps also needs the copy agent's memory back. Closing the copy agent unregisters the regions.
                return Regions.of(regions, copy_agent.close)
            except UcmError:
                copy_agent.close(timeout)
                raise
        except UcmError as error:
            if error.away or error.status in (Status.DEADLINE, Status.BUSY):
                raise
            self._refused = error
            logger.warning("small fragments go without a copy agent (%s)", error)
            return None

    def started(self) -> None:
        """Raises Unsupported if the setting is "on" and the first registration had no copy agent."""
        if self._setting == "on" and self._refused is not None:
            raise _refusal(str(self._refused))


def _largest(layout: Layout) -> int:
    return max(fragment.size for layer in layout.layers for fragment in layer)


def _obstacle(settings: Settings, layout: Layout, on_gpu: bool, writes: bool) -> Optional[str]:
    """Why this worker gets no copy agent; None if it gets one."""
    if settings.copy_agent == "off":
        return 'the setting is "off"'
    if not on_gpu:
        return "the KV cache does not lie on a CUDA GPU"
    if settings.copy_agent == "auto" and layout.kv_tensors is None and _largest(layout) >= _LARGE:
        return f"fragments of {_largest(layout) >> 10} KiB need none"
    if settings.copy_agent == "auto" and not (settings.load and not settings.layerwise) and not (settings.store and writes):
        return "this rank stores nothing, and loads nothing or layer by layer, which goes straight"
    try:
        require()
    except UcmError as error:
        return str(error)
    return None


def _refusal(obstacle: str) -> Unsupported:
    return Unsupported(
        f'kv_connector_extra_config has copy_agent "on" in "advanced", which can\'t be ({obstacle}): remove that, or set it to "auto"'
    )
