"""A worker's half of the connector: loads into, and stores out of, the engine's KV tensors.

Promises: no block that a store may still read is given back to the engine; a load that did not deliver a block names
it; and no call waits longer than the settings say, but one that has to cut the connection for the engine's own kernels,
with a companion. Imports nothing of vLLM, and of torch only events, on a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from ..client import BlockResult, Identity, Memory, Namespace, Plane, Region, Task, TaskResult
from ..errors import Status, UcmError
from ..memory import cuda_allocation, shared_memory_of
from .companion import Accompaniment, RegionMemory
from .identity import Unsupported
from .layout import Layout
from .link import Link
from .plan import Copy, Plan
from .settings import Settings

logger = logging.getLogger("ucmclient.vllm")

#: Time that a daemon which went away in the middle of a load is given to end what it had begun.
_GRACE = 0.5
#: A store that was cancelled ends with the piece that is being copied.
_STOP = 2.0


def region_memory(layout: Layout, on_gpu: bool) -> RegionMemory:
    memory: list[Memory] = []
    known: list[tuple[int, int]] = []
    planes, gpu = [], None
    for shard, layer in enumerate(layout.layers):
        for chunk in layer:
            end = chunk.address + (layout.blocks - 1) * chunk.stride + chunk.size
            number = next((i for i, (first, last) in enumerate(known) if first <= chunk.address and end <= last), None)
            if number is None:
                if on_gpu:
                    one, base, gpu = cuda_allocation(chunk.address)
                else:
                    one, base = shared_memory_of(chunk.address)
                number = len(memory)
                memory.append(one)
                known.append((base, base + one.bytes))
            planes.append(Plane(number, chunk.address - known[number][0], chunk.stride, chunk.size, shard))
    return RegionMemory(memory, [base for base, _ in known], planes, gpu)


@dataclass
class _Load:
    request: str
    blocks: list[int]
    #: None: the daemon was not there.
    task: Optional[Task]
    failed: set[int] = field(default_factory=set)
    #: Not to be reported before then.
    not_before: float = 0.0


class WorkerHalf:
    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        layout: Layout,
        *,
        name: str,
        part: int,
        writes: bool,
        on_gpu: bool,
        event: Callable[[], Any],
    ):
        """writes: this rank stores; event() makes and records a GPU event behind the step's work, None on a CPU."""
        self.settings = settings
        self._numbers = layout.numbers
        self.writes = writes
        self.event = event
        self._shards = len(layout.layers)
        self._layout, self._on_gpu, self._part = layout, on_gpu, part
        self.companion = Accompaniment(settings, layout, on_gpu, writes)
        self._memory = region_memory(layout, on_gpu)
        self.link = Link(settings, identity, name, self._register)
        try:
            self.companion.started()
        except Unsupported:
            self.link.close()
            raise
        self._loads: list[_Load] = []
        #: Loads within the step are given up then.
        self._until = 0.0
        self._failed_blocks: set[int] = set()
        self._finished_loads: set[str] = set()
        #: Tasks of each request's stores, with what must live as long.
        self._stores: dict[str, list[tuple[Task, Any]]] = {}
        #: Requests that are over and not reported yet.
        self._ending: set[str] = set()

    def _register(self, ns: Namespace, timeout: float) -> Region:
        """On any thread: handles are made on one that has a CUDA context."""
        of, blocks = self._memory, self._layout.blocks
        region = self.companion.register(ns, of, blocks, self._part, timeout)
        if region is not None:
            return region
        return ns.register(of.memory, of.planes, blocks=blocks, part=self._part, gpu=of.gpu, timeout=timeout)

    def unregister(self) -> None:
        """Idempotent; returns when the daemon has let go of the memory. So does this process: a handle keeps memory."""
        self._drain_stores(list(self._stores))
        self.link.drop_region()
        self._memory = RegionMemory()

    def restore(self) -> None:
        """The tensors have their addresses again, and other memory behind them."""
        if not self._memory.memory:
            self._memory = region_memory(self._layout, self._on_gpu)
            self.link.restore_region()

    # ---- loads ----

    def start_loads(self, plan: Plan) -> None:
        self._loads += [_Load(copy.request, copy.blocks, self._begin_load(copy)) for copy in plan.loads]
        self._until = time.monotonic() + self.settings.transfer_deadline
        if not self.settings.async_load and not self.settings.layerwise:
            self._wait_loads()

    def _begin_load(self, copy: Copy) -> Optional[Task]:
        region = self.link.region
        if region is None:
            return None
        return self.link.ask(
            region.load, copy.keys, copy.blocks, step=int(self.settings.layerwise), priority=6,
            deadline=self.settings.transfer_deadline, timeout=self.settings.lookup_timeout,
        )

    def wait_layer(self, name: str) -> None:
        """With layer-wise loads: the layer is there, or its load will be reported as failed, when this returns."""
        if not self.settings.layerwise or not self._loads:
            return
        layers = self._numbers.get(name, self._shards) + 1
        if layers >= self._shards:
            self._wait_loads()
            return
        for load in self._loads:
            if load.task is not None and not load.task.closed:
                try:
                    load.task.wait_layers(layers, self._left())
                except UcmError as error:
                    self._give_up(load, error)

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _wait_loads(self) -> None:
        for load in self._loads:
            if load.task is not None and not load.task.closed:
                try:
                    self._judge(load, load.task.wait(self._left()))
                except UcmError as error:
                    self._give_up(load, error)
            self._report(load)
        self._loads = []

    def _give_up(self, load: _Load, error: UcmError) -> None:
        """The step goes on, and may use these blocks for anything: nobody must write to them any more."""
        self._judge(load, None, error)
        if error.status == Status.DEADLINE:
            logger.error("a load does not end: the connection to ucmd is made anew")
            self.link.cut()

    def _judge(self, load: _Load, result: Optional[TaskResult], error: Optional[UcmError] = None) -> None:
        if result is None:
            logger.warning("a load of %d blocks failed: %s", len(load.blocks), error)
            load.failed.update(load.blocks)
            load.not_before = time.monotonic() + _GRACE
        elif not result.all_ok:
            load.failed.update(b for b, r in zip(load.blocks, result.blocks) if r != BlockResult.OK)
        if load.task is not None:
            load.task.close()

    def _over(self, load: _Load) -> bool:
        if load.task is not None and not load.task.closed:
            try:
                result = load.task.check()
            except UcmError as error:
                self._judge(load, None, error)
            else:
                if result is None:
                    return False
                self._judge(load, result)
        return time.monotonic() >= load.not_before

    def _report(self, load: _Load) -> None:
        self._failed_blocks.update(load.blocks if load.task is None else load.failed)
        if self.settings.async_load:
            self._finished_loads.add(load.request)

    # ---- stores ----

    def start_stores(self, plan: Plan) -> None:
        self._ending |= plan.ended
        event = None
        for copy in plan.stores if self.writes else ():
            region = self.link.region
            if region is None:  # perhaps since the last one: each call that is not answered costs its timeout
                return
            if event is None:
                event = self.event()
            task = self.link.ask(
                region.dump, copy.keys, copy.blocks, event=event.ipc_handle() if event is not None else None,
                deadline=self.settings.transfer_deadline, durable=self.settings.durable,
                timeout=self.settings.lookup_timeout,
            )
            if task is not None:
                self._stores.setdefault(copy.request, []).append((task, event))

    def preempted(self, plan: Plan) -> None:
        """Called before the blocks of these requests are overwritten."""
        self._drain_stores(plan.preempted)

    def _drain_stores(self, requests: Any) -> None:
        """Returns when no store of theirs reads any more: ended, or cancelled, or cut off with the connection."""
        for request in requests:
            for task, _ in self._stores.pop(request, []):
                self._stop_store(task)

    def _stop_store(self, task: Task) -> None:
        try:
            if task.check() is None:
                task.cancel(timeout=self.settings.lookup_timeout)
                task.wait(_STOP)
        except UcmError as error:
            if not error.away:
                # What is stored through a connection that has ended is never published.
                logger.error("a store can't be stopped (%s): the connection to ucmd is made anew", error)
                self.link.cut()
        task.close()

    def _store_done(self, task: Task) -> bool:
        try:
            if task.check() is None:
                return False
        except UcmError as error:
            logger.warning("a store failed: %s", error)
        task.close()
        return True

    # ---- reports ----

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests that are over and whose stores are, too; and requests whose loads are."""
        for name, tasks in list(self._stores.items()):
            left = [(task, keep) for task, keep in tasks if not self._store_done(task)]
            if left:
                self._stores[name] = left
            else:
                del self._stores[name]
        sent = {name for name in self._ending if name not in self._stores}
        self._ending -= sent
        if self.settings.async_load:
            done = [load for load in self._loads if self._over(load)]
            self._loads = [load for load in self._loads if load not in done]
            for load in done:
                self._report(load)
        received, self._finished_loads = self._finished_loads, set()
        return sent, received

    def failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self.link.close()
