"""Pages whose fragments lie where the engine says at each call, for engines that hand over addresses and register no memory beforehand.

    store = PlaceStore(settings, identity, sizes=[4096, 4096], name="engine")     # a layer has two fragments: K and V, say
    plan = store.plan([0, 0], [[k3, v3], [k7, v7]])   # of two keys: which layer, and the addresses of its fragments
    store.save(keys, plan)                            # -> [True, True]

Addresses are resolved to registered memory. Fragments in an allocation of a SharedMemory or a GPU become a region if their blocks lie one after
another, as in paged KV caches. Then the daemon copies by itself. Other memory of the host goes through a SharedMemory of this module. Other memory
of a GPU is refused.

Threads may share a PlaceStore, but plan() needs the engine's own thread if addresses are a GPU's. Memory must stay allocated until close()."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from ..client import Memory, Namespace, Plane, Region
from ..memory import allocation_of, in_shared_memory, on_gpu
from .pages import _LOADED, _MOST, _SAVED, Kept
from .vllm.identity import EngineIdentity
from .vllm.settings import Settings

#: Most regions of a store. Each has the layers that lie alike. The daemon gives a connection 64, and a region that grows takes two for a moment.
_GROUPS = 24
#: Allocations of a region.
_HANDLES = 64
_FAR, _BLOCKS = 2**62, 2**32 - 1


class Unreachable(RuntimeError):
    """Only the engine can reach these addresses, or they don't fit the store; the message says what would be right."""


@dataclass(frozen=True)
class _Allocation:
    base: int
    memory: Memory
    gpu: Optional[bytes]

    @property
    def end(self) -> int:
        return self.base + self.memory.bytes


@dataclass(frozen=True)
class _Where:
    """For block 0 of a layer: the address of each fragment, and its allocation. Block b's fragment is b fragments further on."""

    starts: Any
    sizes: Any
    allocations: tuple[_Allocation, ...]
    blocks: int

    def spans(self, blocks: int) -> list[tuple[int, int]]:
        return [(int(start), int(start) + blocks * int(size)) for start, size in zip(self.starts, self.sizes)]

    def numbers(self, rows: Any, blocks: int) -> tuple[Any, Any]:
        """Which rows are blocks of it, and their numbers."""
        numbers, rest = np.divmod(rows - self.starts, self.sizes)
        first = numbers[:, 0]
        return (rest == 0).all(1) & (numbers == first[:, None]).all(1) & (first >= 0) & (first < blocks), first


@dataclass
class _Registered:
    ns: Namespace
    region: Region
    layers: int
    users: int = 0


class _Group:
    """A region: where the fragments of each layer lie, for the layers seen so far.

    Nothing is copied while it is registered again. To prove that memory of a GPU is its own, the client writes over the first bytes of each
    allocation for a moment, and they may be a block's."""

    def __init__(self, blocks: int):
        self.blocks, self.wheres = blocks, dict[int, _Where]()
        self._unused, self._now = threading.Condition(), None

    def takes(self, layer: int, where: _Where) -> bool:
        if layer in self.wheres or where.blocks < self.blocks:
            return False
        every = [*self.wheres.values(), where]
        spans = sorted(span for one in every for span in one.spans(self.blocks))
        gpus = {allocation.gpu for one in every for allocation in one.allocations}
        handles = {allocation.base for one in every for allocation in one.allocations}
        apart = all(one[1] <= other[0] for one, other in zip(spans, spans[1:]))
        return apart and len(gpus) == 1 and len(handles) <= _HANDLES

    def add(self, layer: int, where: _Where) -> None:
        with self._unused:
            self.wheres[layer] = where

    def use(self, store: PlaceStore) -> Optional[_Registered]:
        """The region as it is now. None: the daemon is away, or copies that began before do not end. unuse() must follow."""
        until = time.monotonic() + store.settings.transfer_timeout
        with self._unused:
            while (now := self._now) is None or now.ns is not store.link.ns or now.layers != len(self.wheres):
                if store.link.ns is None:
                    return None
                if now is not None and now.users > 0:
                    if not self._unused.wait(until - time.monotonic()):
                        return None
                elif not self._registered(store, now):
                    return None
            now.users += 1
            return now

    def unuse(self, used: _Registered) -> None:
        with self._unused:
            used.users -= 1
            self._unused.notify_all()

    def _registered(self, store: PlaceStore, old: Optional[_Registered]) -> bool:
        ns = store.link.ns
        region = None if ns is None else store.link.ask(self._register, ns, store.settings.connect_timeout)
        if region is None:
            return False
        self._now = _Registered(ns, region, len(self.wheres))
        if old is not None:
            store.link.ask(old.region.close)
        return True

    def _register(self, ns: Namespace, timeout: float) -> Region:
        first: dict[int, int] = {}
        memory, planes = [], []
        for layer, where in sorted(self.wheres.items()):
            for start, size, of in zip(where.starts, where.sizes, where.allocations):
                if of.base not in first:
                    first[of.base] = len(memory)
                    memory.append(of.memory)
                planes.append(Plane(first[of.base], int(start) - of.base, int(size), int(size), layer))
        return ns.register(memory, planes, blocks=self.blocks, gpu=of.gpu, timeout=timeout)

    def close(self, store: PlaceStore) -> None:
        with self._unused:
            now, self._now = self._now, None
            if now is not None:
                self._unused.wait_for(lambda: now.users == 0, store.settings.transfer_timeout)
                store.link.ask(now.region.close)


@dataclass
class Plan:
    """plan()'s result for addresses. A run has a layer, the owner of the region (None: memory goes through `_staging`), the indexes of keys, and
    their blocks, or addresses."""

    n: int
    runs: list[tuple[int, Optional[_Group], Any, Any]]


class PlaceStore(Kept):
    def __init__(self, settings: Settings, identity: EngineIdentity, sizes: Sequence[int], name: str):
        """identity: of one part. sizes: of the fragments of a layer, in bytes, in their order."""
        if identity.parts != 1 or identity.layer_bytes != sum(sizes) or not all(size > 0 for size in sizes):
            raise ValueError(f"fragments of {list(sizes)} bytes: an identity of one part, whose layers have as many in all, is right")
        self._sizes = np.array(sizes, dtype=np.int64)
        self._groups: list[_Group] = []
        self._allocations: list[_Allocation] = []
        #: Held while _groups and _allocations change.
        self._planning = threading.Lock()
        super().__init__(settings, identity, name)

    def plan(self, layers: Sequence[int], rows: Any) -> Plan:
        """For each key which layer, and a row of addresses: of its fragments. Raises Unreachable."""
        rows = np.asarray(rows, dtype=np.uint64).astype(np.int64)
        layers = np.asarray(layers, dtype=np.int64)
        if rows.shape != (len(layers), len(self._sizes)):
            raise Unreachable(f"{len(layers)} layers and addresses of shape {rows.shape}: {len(self._sizes)} addresses for each are right")
        if len(rows) and rows.min() <= 0:
            raise Unreachable("an address is 0: a place for each fragment of a layer is right, also where its layer has none of that size")
        if len(layers) and not 0 <= layers.min() <= layers.max() < self.identity.layers[0]:
            raise Unreachable(f"layers are numbered from 0 to {self.identity.layers[0] - 1}, not {layers.min()} to {layers.max()}")
        plan = Plan(len(layers), [])
        with self._planning:
            for layer in dict.fromkeys(layers.tolist()):
                self._plan(plan, layer, np.flatnonzero(layers == layer), rows)
        return plan

    def _plan(self, plan: Plan, layer: int, left: Any, rows: Any) -> None:
        staged: list[int] = []
        while len(left):
            group = self._group_of(layer, rows[left[0]])
            if group is None:
                staged.append(int(left[0]))
                left = left[1:]
                continue
            good, numbers = group.wheres[layer].numbers(rows[left], group.blocks)
            plan.runs.append((layer, group, left[good], numbers[good]))
            left = left[~good]
        if staged:
            self._need_staging()
            plan.runs.append((layer, None, np.array(staged), rows[staged]))

    def _group_of(self, layer: int, row: Any) -> Optional[_Group]:
        """None: it is memory of the host that goes through `_staging`."""
        for group in self._groups:
            where = group.wheres.get(layer)
            if where is not None and where.numbers(row[None, :], group.blocks)[0][0]:
                return group
        found = [self._allocation_of(int(at), int(size)) for at, size in zip(row, self._sizes)]
        where = None if None in found else _where(row, self._sizes, found)
        group = None
        if where is not None:
            group = next((one for one in self._groups if one.takes(layer, where)), None)
            if group is None and len(self._groups) < _GROUPS:
                group = _Group(where.blocks)
                self._groups.append(group)
        if group is not None:
            group.add(layer, where)
        elif any(of is not None and of.gpu is not None for of in found):
            raise Unreachable("memory of a GPU whose blocks do not lie one after another: paged KV caches, in which they do, are right")
        return group

    def _allocation_of(self, at: int, size: int) -> Optional[_Allocation]:
        """None: it is memory that only this process has."""
        for one in self._allocations:
            if one.base <= at and at + size <= one.end:
                return one
        if not in_shared_memory(at) and not on_gpu(at):
            return None
        memory, base, gpu = allocation_of(at)
        found = _Allocation(base, memory, gpu)
        if at + size > found.end:
            raise Unreachable(f"a fragment of {size} bytes reaches beyond the memory that it begins in")
        self._allocations.append(found)
        return found

    def _need_staging(self) -> None:
        if self._staging is None:
            self._staging = self._stage()
            self.link.restore_region()

    # ---- what moves ----

    def load(self, keys: Sequence[bytes], plan: Plan) -> list[bool]:
        """Into these places, each named once. What was not loaded may hold anything."""
        return self._moved("load", keys, plan, _LOADED) if self.settings.load else [False] * len(keys)

    def save(self, keys: Sequence[bytes], plan: Plan) -> list[bool]:
        """Which are kept now, or were before."""
        return self._moved("dump", keys, plan, _SAVED) if self.settings.store else [False] * len(keys)

    def _moved(self, verb: str, keys: Sequence[bytes], plan: Plan, good: frozenset) -> list[bool]:
        if len(keys) != plan.n:
            raise ValueError(f"{len(keys)} keys and a plan of {plan.n}")
        out = [False] * len(keys)
        for layer, group, which, what in plan.runs:
            most = self._room() if group is None else _MOST
            for at in range(0, len(which), most):
                some = which[at : at + most].tolist()
                names, part = [keys[i] for i in some], what[at : at + most].tolist()
                results = self._direct(group, verb, names, part, layer) if group is not None else self._through(
                    verb, names, part, self._sizes.tolist(), layer)
                for i, result in zip(some, results):
                    out[i] = result in good
        return out

    def _direct(self, group: _Group, verb: str, keys: Sequence[bytes], blocks: Sequence[int], layer: int) -> bytes:
        used = group.use(self)
        try:
            return self._ask(None if used is None else used.region, verb, keys, blocks, layer=layer, layers=1)
        finally:
            if used is not None:
                group.unuse(used)

    def close(self) -> None:
        for group in self._groups:
            group.close(self)
        super().close()


def _where(row: Any, sizes: Any, found: Sequence[_Allocation]) -> Optional[_Where]:
    """Supposes that blocks like this one follow each other, fragment by fragment. Returns where the first of them lies, in the longest stretch that
    no two fragments share. None: they would overlap."""
    bases = np.array([one.base for one in found], dtype=np.int64)
    ends = np.array([one.end for one in found], dtype=np.int64)

    def room(starts: Any, ends: Any) -> int:
        """Blocks until a fragment meets the next one's first, or its end."""
        order = np.argsort(starts)
        limits = np.minimum(ends[order], np.append(starts[order][1:], _FAR))
        return int(((limits - starts[order]) // sizes[order]).min())

    apart = room(row, np.full(len(row), _FAR))
    if apart < 1:
        return None
    # Stretches begin where the allocation does, so a cache that fills it is one stretch, whichever block was seen first.
    before = int(((row - bases) // sizes).min()) % apart
    first = row - before * sizes
    if room(first, ends) <= before:
        first = row
    return _Where(first, sizes, tuple(found), min(room(first, ends), _BLOCKS))


class Full(RuntimeError):
    """Too much waits already."""


class Movers:
    """Threads that do an engine's moves, so that the engine's own thread does not wait."""

    def __init__(self, name: str, threads: int = 2, most: int = 1024):
        """most: calls that may be under way or wait."""
        self._pool, self._room, self._most = ThreadPoolExecutor(threads, name), threading.BoundedSemaphore(most), most

    def start(self, work: Any, *args: Any) -> Future:
        if not self._room.acquire(blocking=False):
            raise Full(f"{self._most} transfers wait already: wait for some first")
        try:
            future = self._pool.submit(work, *args)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Waits for what is under way; what waits is cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=True)
