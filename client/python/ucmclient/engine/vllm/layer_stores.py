"""Stores by layer (setting `layer_stores`): a prompt's blocks are handed over in groups of layers while their step still computes.

The engine calls a hook after each layer's attention. If it does not (within full CUDA graphs), or not for all layers, the rest goes after
the step, as other stores do. The daemon publishes a block when it has all layers, so nobody sees one that is given up midway.
"""

from __future__ import annotations

from typing import Any, Optional

from .adapters import right
from .drafts import drafts_of
from .identity import Unsupported
from .layout import Layout
from .plan import Copy, Plan
from .settings import Settings

#: Groups of layers that a step's stores are cut into.
_GROUPS = 5
#: Keys of one dump (proto/limits.h).
_MAX_KEYS = 16384


def bounds_of(layers: int) -> list[int]:
    """The layers after which a group ends. Each group has half of what is left, so that little is left to copy when the last layer
    ends."""
    ends = {layers - layers // 2**i for i in range(1, _GROUPS)} | {layers}
    return sorted(ends - {0})


def check_layer_stores(settings: Settings, hybrid: bool) -> None:
    if settings.layer_stores and hybrid:
        raise Unsupported('layer_stores: not supported for models with several kinds of KV cache: remove the setting "layer_stores"')


def store_by_layer(worker: Any, config: Any, layout: Layout) -> tuple[Optional["LayerStores"], str]:
    """worker: a WorkerHalf. Returns what stores by layer for it, and a sentence for the log."""
    if not (worker.settings.layer_stores and worker.settings.store and worker.writes):
        return None, ""
    obstacle = _obstacle(config, layout)
    if obstacle is not None:
        return None, f"blocks are stored after their step, not by layer: {obstacle}"
    worker.layers = LayerStores(worker, layout)
    return worker.layers, f"prompts are stored by layer, in {len(worker.layers.bounds)} groups of layers"


def _obstacle(config: Any, layout: Layout) -> Optional[str]:
    # A pipeline may have cut the engine's layers into more.
    if len(set(layout.numbers.values())) < 2:
        return "this rank has one layer, or all layers of a block in one tensor, or layers that differ in size"
    parallel = config.parallel_config
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "the engine computes a step in several batches (--enable-dbo)"
    if drafts_of(config) is not None:
        return "draft layers run after the model's"
    return None


class LayerStores:
    def __init__(self, worker: Any, layout: Layout):
        """worker: the WorkerHalf that stores."""
        self._worker, self._numbers, self._layers = worker, layout.numbers, len(layout.layers)
        #: After each of the engine's layers: how many stored ones are there.
        self._ends = sorted({number + 1 for number in layout.numbers.values()})
        self.bounds = bounds_of(len(self._ends))
        self._copies: list[list[Copy]] = []
        self._stores: list[Any] = []
        #: In this step: layers whose hook was called without a gap, and stored layers that are handed over.
        self._seen = self._sent = 0

    def begin(self, plan: Plan) -> None:
        """Before the engine computes a step."""
        self._seen = self._sent = 0
        self._stores, self._copies = [], []
        layered = [copy for copy in plan.stores if copy.layered and plan.computes and right(copy.adapter)]
        for copy in sorted(layered, key=lambda copy: copy.raw):
            self._add(copy)

    def _add(self, copy: Copy) -> None:
        last = self._copies[-1] if self._copies else None
        if last and last[0].raw == copy.raw and sum(len(one.blocks) for one in last) + len(copy.blocks) <= _MAX_KEYS:
            last.append(copy)
        else:
            self._copies.append([copy])

    def layer(self, name: str) -> None:
        """Called after the attention of that layer; by then the engine's stream has written the layer's KV."""
        if not self._copies or self._seen == len(self._ends) or self._numbers.get(name) != self._ends[self._seen] - 1:
            return
        self._seen += 1
        if self._seen in self.bounds:
            self._send(self._worker.event(), self._ends[self._seen - 1])

    def end(self, copies: list[Copy]) -> list[Copy]:
        """After the step. Hands over what is left of its layers. Returns those of the step's copies that are still to be stored."""
        if self._stores and self._sent < self._layers:
            self._send(self._worker.event(), self._layers)
        if self._stores:
            copies = [copy for copy in copies if not copy.layered]
        self._copies, self._stores = [], []
        return copies

    def _send(self, event: Any, end: int) -> None:
        first, self._sent = self._sent, end
        if first == 0:
            self._stores = self._worker.begin_layers(self._copies)
        for store in self._stores:
            store.event = event
            store.events.append(event)
            self._worker.dump_layers(store, first, end - first)
