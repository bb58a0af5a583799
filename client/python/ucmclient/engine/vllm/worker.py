"""The worker's half of the connector: loads into the engine's KV tensors, and stores from them.

Promises: the engine gets no block back that a store may still read. A load reports every block that it did not deliver. No call waits longer than the settings
say, but cutting the connection waits for a copy agent's kernels (at most 5 s). Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from ...client import BlockResult, EncodedNamespace, Identity, Memory, Namespace, Plane, Region, Task, TaskResult
from ...errors import Status, UcmError
from ...memory import cuda_allocation, shared_memory_of
from ...region import Rope
from ...sparse.summary import Summary
from .adapters import right
from .copy_agent import WorkerCopyAgent, RegionMemory
from .head_groups import Regions
from .identity import Unsupported
from .layer_stores import LayerStores
from .layout import Layout
from .link import Link
from .plan import Copy, Plan
from .settings import Settings
from .stats import Counts
from .tasks import Tasks

logger = logging.getLogger("ucmclient.engine.vllm")

#: When the daemon goes away during a load, its last copies may land within this time.
_GRACE = 0.5
#: Blocks of a store that is small, and how many of these go together (at most 16384 keys: proto/limits.h).
_FEW, _TOGETHER = 8, 1024
#: What a store's result may be for a block that is stored, or will be.
_STORED = (BlockResult.OK, BlockResult.EXISTS, BlockResult.IN_PROGRESS)
#: How long a cancelled store may take to end. It ends after the piece that is being copied.
_STOP = 2.0
#: Seconds between two looks at stores that something waits for.
_PAUSE = 0.001


def region_memory(layout: Layout, on_gpu: bool) -> RegionMemory:
    memory: list[Memory] = []
    known: list[tuple[int, int]] = []
    planes, gpu = [], None
    for at, layer in enumerate(layout.layers):
        for fragment in layer:
            end = fragment.address + (layout.blocks - 1) * fragment.stride + fragment.size
            number = next((i for i, (first, last) in enumerate(known) if first <= fragment.address and end <= last), None)
            if number is None:
                if on_gpu:
                    one, base, gpu = cuda_allocation(fragment.address)
                else:
                    one, base = shared_memory_of(fragment.address)
                number = len(memory)
                memory.append(one)
                known.append((base, base + one.bytes))
            planes.append(Plane(number, fragment.address - known[number][0], fragment.stride, fragment.size, at))
    return RegionMemory(memory, [base for base, _ in known], planes, gpu)


@dataclass(eq=False)
class _Load:
    request: str
    blocks: list[int]
    #: None: there was no daemon, or the adapter is not the one whose KV it is.
    task: Optional[Task]
    failed: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    #: Do not report the load before this time.
    not_before: float = 0.0
    #: For a load that ranks share out.
    number: int = 0


@dataclass(eq=False)
class _Store:
    """A dump of blocks of one or several requests. It lives as long as the daemon may read the blocks, or may still be asked to."""

    copies: list[Copy]
    #: The event at the end of the step's work. None: on a CPU.
    event: Any
    #: When to give up on an event.
    until: float
    #: None: it waits for the event.
    task: Union[Task, Tasks, None] = None
    #: The daemon was given the event.
    by_event: bool = False
    #: If handed over by layers: to which of the client's connections.
    layers_of: int = 0
    #: Also by layers: the events of all groups. A daemon can't wait for an event that was freed.
    events: list[Any] = field(default_factory=list)

    def of(self, request: str) -> bool:
        return any(copy.request == request for copy in self.copies)


def together(copies: list[Copy]) -> list[list[Copy]]:
    """What goes to the daemon as one dump, since a call takes as long as the bookkeeping of a hundred requests. What a prefill has filled goes by itself, so
    that a trace shows it as its request's."""
    groups: list[list[Copy]] = []
    few: tuple[list[Copy], list[Copy]] = [], []
    for copy in copies:
        if len(copy.blocks) > _FEW:
            groups.append([copy])
        else:
            few[copy.raw].append(copy)
    return groups + [of[i : i + _TOGETHER] for of in few for i in range(0, len(of), _TOGETHER)]


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
        summary: Optional[Summary] = None,
        build: bool = True,
        more: Sequence[Layout] = (),
        rope: Optional[Rope] = None,
    ):
        """rope: loads may re-rotate K. more: of further parts that this rank holds, after `part`. writes: this rank stores. build: the daemon builds the
        summaries of what is stored. event() records a GPU event after the step's work and returns it; None on a CPU."""
        self.settings = settings
        self._numbers = layout.numbers
        self.writes = writes
        self.event = event
        self._layers = len(layout.layers)
        self._layouts, self._on_gpu, self._part = [layout, *more], on_gpu, part
        self._layout, self._rope = layout, rope
        self.copy_agent = WorkerCopyAgent(settings, layout, on_gpu, writes)
        self._memory = self._export()
        self._summary, self._build = summary if settings.store and writes else None, build
        self.link = Link(settings, identity, name, self._register, self._summary, build)
        try:
            self.copy_agent.started()
        except Unsupported:
            self.link.close()
            raise
        self._loads: list[_Load] = []
        #: For vLLM's statistics.
        self.counts = Counts()
        #: The time from which loads within the step count as failed.
        self._until = 0.0
        self._failed_blocks: set[int] = set()
        self._finished_loads: set[str] = set()
        self._stores: list[_Store] = []
        #: The step computes something.
        self._computes = False
        #: Set if prompts are stored by layers.
        self.layers: Optional[LayerStores] = None
        #: The daemon can't open this process's events, so dumps begin when these have come.
        self._events_refused = False
        #: Requests of which this step's plan stores nothing.
        self._discarded: set[str] = set()
        #: Some block did not fit its encoding.
        self._unfit = False
        #: Finished requests that are not reported yet.
        self._ending: set[str] = set()

    def _export(self) -> list[RegionMemory]:
        return [region_memory(layout, self._on_gpu) for layout in self._layouts]

    def _register(self, ns: Namespace, timeout: float) -> Union[Region, Regions]:
        """Runs on any thread; the memory handles were made on a thread with a CUDA context."""
        parts, blocks = list(enumerate(self._memory, self._part)), self._layout.blocks
        found = self.copy_agent.register(ns, parts, blocks, timeout, self._rope)
        if found is not None:
            return found
        regions: list[Region] = []
        try:
            for part, of in parts:
                regions.append(ns.register(of.memory, of.planes, blocks=blocks, part=part, gpu=of.gpu, rope=self._rope, timeout=timeout))
        except UcmError:
            Regions.drop(regions, timeout)
            raise
        return Regions.of(regions)

    @property
    def stored_as(self) -> str:
        """A sentence for the log, after the start: how blocks are encoded."""
        if self.settings.encoding == "none":
            return ""
        ns = self.link.ns
        if ns is None:
            return f"blocks will be stored as {self.settings.encoding} once ucmd is there"
        if not isinstance(ns, EncodedNamespace):
            return f"blocks are stored as they are, not as {self.settings.encoding}"
        raw, encoded = ns.block_bytes
        return f"blocks are stored as {ns.encoding}: {encoded} bytes for {raw}, {raw / encoded:.2f} times less"

    @property
    def summarised_as(self) -> str:
        """Likewise: which summaries the daemon builds."""
        if self._summary is None or not self._build:
            return ""
        ns, method = self.link.summaries, self._summary.method
        if ns is None:
            return f"{method} summaries of stored blocks will be built if ucmd can"
        return f"ucmd builds {method} summaries of stored blocks: {self._summary.bytes} bytes a layer"

    def unregister(self) -> None:
        """Returns when the daemon has unmapped the memory. Idempotent. Drops this process's handles too: they keep
        memory."""
        self._drain_stores({copy.request for store in self._stores for copy in store.copies})
        self.link.drop_region()
        self._memory = []

    def restore(self) -> None:
        """The tensors have the same addresses as before, but other memory is mapped there."""
        if not self._memory:
            self._memory = self._export()
            self.link.restore_region()

    # ---- loads ----

    def start_loads(self, plan: Plan) -> None:
        self._computes = plan.computes
        self._loads += [_Load(copy.request, copy.blocks, self._begin_load(copy), number=copy.number) for copy in plan.loads]
        for load in self._loads if plan.void else ():
            if load.request in plan.void:
                load.failed.update(load.blocks)
        self._until = time.monotonic() + self.settings.transfer_timeout
        if not self.settings.async_load and not self.settings.layerwise:
            self._wait_loads()

    def _begin_load(self, copy: Copy) -> Optional[Task]:
        region = self.link.region
        if region is None or not right(copy.adapter):
            return None
        region.gpu_busy(self._computes and self.settings.async_load)
        return self.link.ask(
            region.load, copy.keys, copy.blocks, progress_interval=int(self.settings.layerwise), priority=6, shifts=copy.shifts,
            daemon_timeout=self.settings.transfer_timeout, timeout=self.settings.lookup_timeout, request=copy.request,
        )

    def wait_layer(self, name: str) -> None:
        """For layer-wise loads: on return the layer has arrived, or its load will be reported as failed."""
        if not self._loads:
            return
        layers = self._numbers.get(name, self._layers) + 1
        if layers >= self._layers:
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
        """The step continues and may reuse these blocks, so nothing may still write to them."""
        self._judge(load, None, error)
        if error.status == Status.DEADLINE:
            logger.error("a load does not end: connecting to ucmd again")
            self.link.cut(self.settings.transfer_timeout)

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
        failed = load.blocks if load.task is None else load.failed
        self._failed_blocks.update(failed)
        self.counts.load(len(load.blocks), len(failed), load.began)
        if self.settings.async_load:
            self._finished_loads.add(load.request)

    # ---- stores ----

    def start_stores(self, plan: Plan) -> None:
        self._ending |= plan.ended
        discarded, self._discarded = self._discarded, set()
        stores = plan.stores if self.writes else []
        if self.layers is not None:
            stores = self.layers.end(stores)
        stores = [copy for copy in stores if copy.request not in discarded and right(copy.adapter)]
        if not stores or self.link.region is None:
            return
        event, until = self.event(), time.monotonic() + self.settings.transfer_timeout
        for copies in together(stores):
            if self.link.region is None:  # also when the last call timed out: each such call costs its timeout
                return
            self._begin(_Store(copies, event, until))

    def _begin(self, store: _Store) -> None:
        if self._begin_store(store):
            self._stores.append(store)

    def begin_layers(self, groups: list[list[Copy]]) -> list[_Store]:
        """Stores of these copies, without a layer yet. None if there is no daemon, or it can't wait for events."""
        if self.link.region is None or self._events_refused:
            return []
        until, of = time.monotonic() + self.settings.transfer_timeout, self.link.region.client.connection_epoch
        stores = [_Store(copies, None, until, Tasks(), layers_of=of) for copies in groups]
        self._stores += stores
        return stores

    def dump_layers(self, store: _Store, first: int, n: int) -> None:
        """Hands over n layers of a store, whose KV is there when its event has come."""
        region, task = self.link.region, None
        if region is not None and region.client.connection_epoch == store.layers_of and store.task.broken is None:
            region.gpu_busy(True)
            task = self._dump(region, store, layer=first, layers=n)
        if task is None:
            store.task.broken = store.task.broken or UcmError(Status.CANCELLED, "ucmd did not take all of its layers")
        else:
            store.task.add(task)

    def _dump(self, region: Region, store: _Store, **layers: int) -> Optional[Task]:
        handle = store.event.ipc_handle() if store.event is not None and not self._events_refused else None
        store.by_event = handle is not None
        first, *more = store.copies
        keys = b"".join(copy.keys for copy in store.copies) if more else first.keys
        blocks = [block for copy in store.copies for block in copy.blocks] if more else first.blocks
        return self.link.ask(
            region.dump, keys, blocks, cuda_event=handle, daemon_timeout=self.settings.transfer_timeout, durable=self.settings.durable,
            raw=first.raw, timeout=self.settings.lookup_timeout, request="" if more else first.request, **layers,
        )

    def discard(self, requests: set[str]) -> None:
        """What this step computed of these requests is wrong, and they will be computed again: nothing of it is stored."""
        self._discarded |= requests

    def _begin_store(self, store: _Store) -> bool:
        """False: there will be none. While its event must come first, there is no task."""
        region = self.link.region
        if region is None:
            return False
        if store.event is not None and self._events_refused and not store.event.query():
            return time.monotonic() < store.until
        region.gpu_busy(self._computes)
        store.task = self._dump(region, store)
        return store.task is not None

    def preempted(self, plan: Plan) -> None:
        """vLLM calls this before it overwrites blocks of these requests, or after a fence any blocks."""
        if plan.fence:
            self._end_stores()
        self._drain_stores(plan.preempted)

    def _end_stores(self) -> None:
        """Waits a little for what is being stored, and stops what is left."""
        until = time.monotonic() + _STOP
        while self._stores and time.monotonic() < until:
            self._stores = [store for store in self._stores if not self._store_done(store)]
            if self._stores:
                time.sleep(_PAUSE)
        self._drain_stores({copy.request for store in self._stores for copy in store.copies})

    def _drain_stores(self, requests: set[str]) -> None:
        """Returns when no store of these requests reads any more: all have ended, were cancelled, or were cut with the connection. What went in the same dump
        is stored again."""
        if not requests or not self._stores:
            return
        drained = [store for store in self._stores if any(store.of(request) for request in requests)]
        self._stores = [store for store in self._stores if store not in drained]
        for store in drained:
            if store.task is not None:
                self._stop_store(store.task)
        for store in drained:
            left = [copy for copy in store.copies if copy.request not in requests]
            if left:
                self._begin(_Store(left, store.event, store.until))

    def _stop_store(self, task: Task) -> None:
        try:
            if task.check() is None:
                task.cancel(timeout=self.settings.lookup_timeout)
                task.wait(_STOP)
        except UcmError as error:
            if not error.away:
                # The daemon never publishes what a broken connection was storing.
                logger.error("a store can't be stopped (%s): connecting to ucmd again", error)
                self.link.cut()
        task.close()

    def _store_done(self, store: _Store) -> bool:
        if store.task is None:
            return not self._begin_store(store)
        blocks = sum(len(copy.blocks) for copy in store.copies)
        try:
            result = store.task.check()
            if result is None:
                return False
        except UcmError as error:
            logger.warning("a store failed: %s", error)
            result = None
        store.task.close()
        if result is None:
            self.counts.store(blocks, blocks)
            return True
        if store.by_event and BlockResult.DEVICE in result.blocks:
            return self._without_event(store)
        self.counts.store(blocks, 0 if result.all_ok else sum(status not in _STORED for status in result.blocks))
        return BlockResult.UNFIT not in result.blocks or self._as_it_is(store, result)

    def _as_it_is(self, store: _Store, result: TaskResult) -> bool:
        """Stores again, without the encoding, what the encoding could not hold."""
        if not self._unfit:
            logger.warning("KV that the encoding can't hold is stored as it is; `ucmctl stats` counts it (encode_unfit)")
        self._unfit = True
        unfit, first = [], 0
        for copy in store.copies:
            results = result.blocks[first : first + len(copy.blocks)]
            unfit.append(copy.some([i for i, status in enumerate(results) if status == BlockResult.UNFIT], raw=True))
            first += len(results)
        store.copies = [copy for copy in unfit if copy.blocks]
        store.event = store.task = None
        return not self._begin_store(store)

    def _without_event(self, store: _Store) -> bool:
        if not self._events_refused:
            logger.warning(
                "the daemon can't use this worker's CUDA events (its log says why, docs/containers.md what to do): "
                "stores begin a step later, when the worker has seen the event itself"
            )
            self._events_refused = True
        store.task = None
        return not self._begin_store(store)

    # ---- reports ----

    def finished(self) -> tuple[set[str], set[str]]:
        """Finished requests whose stores have ended, and requests whose loads have ended."""
        if self._stores:
            self._stores = [store for store in self._stores if not self._store_done(store)]
        sent = set()
        if self._ending:
            sent = {name for name in self._ending if not any(store.of(name) for store in self._stores)}
            self._ending -= sent
        if self.settings.async_load and self._loads:
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
