"""Memory of a worker that the daemon knows, and what moves between it and blocks."""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Union

from . import _native as native
from ._native import lib
from .buffers import Blocks, Items, Keys, keys as borrow_keys, triples, uint32s
from .errors import Status, UcmError, check
from .handle import _Handle, _timeout, check_uuid

if TYPE_CHECKING:
    from .client import Client, Memory, Namespace, Plane
    from .sparse.sequence import BlockSequence


class BlockResult(enum.IntEnum):
    """enum ucm_block_result: the result of one block."""

    OK = 0
    MISS = 1
    FAILED = 2
    NO_ROOM = 3
    EXISTS = 4
    IN_PROGRESS = 5
    CANCELLED = 6
    DEVICE = 7
    NOT_DURABLE = 8
    UNFIT = 9  # the encoding can't hold these bytes: dump them with raw=True


@dataclass(frozen=True)
class TaskResult:
    """`bytes` moved; `ok`: how many blocks are OK or EXISTS; `blocks`: a BlockResult's number for each key, or item of a gather."""

    bytes: int
    ok: int
    blocks: bytes

    @property
    def all_ok(self) -> bool:
        return self.ok == len(self.blocks)


@dataclass(frozen=True)
class Rope:
    """struct ucm_rope: where K lies in a layer of a block, and how the model rotates it. rows of dim elements from byte `offset` of the layer
    on; elements [first, first + rotary) of a row are rotated. run: a row is so many tokens of a head, and has those of a channel side by side."""

    rows: int
    dim: int
    rotary: int
    base: float
    dtype: str = "bf16"
    offset: int = 0
    first: int = 0
    interleaved: bool = False
    scaling: str = "default"
    factor: float = 1.0
    trained: int = 0
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True
    run: int = 1

    def native(self) -> native.Rope:
        return native.Rope(
            self.offset,
            self.rows,
            self.dim,
            self.first,
            self.rotary,
            int(self.interleaved),
            self.dtype.encode(),
            self.scaling.encode(),
            self.base,
            self.factor,
            self.trained,
            int(self.whole),
            self.fast,
            self.slow,
            self.run,
        )


class _Proofs:
    """By number: what the library calls with that number. It may call until the region is unregistered or its client closed, since it does not tell when it
    registers again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Any, int] = {}
        self._calls: dict[int, Any] = {}

    def keep(self, prove: Any) -> int:
        with self._lock:
            number = self._numbers.setdefault(prove, len(self._numbers) + 1)
            self._calls[number] = prove
            return number

    def call(self, number: int, offset: int, nonce: Optional[bytes]) -> None:
        self._calls[number](offset, nonce)


_proofs = _Proofs()


@native.Prove
def _prove(number: int, offset: int, nonce: Optional[int]) -> int:
    try:
        _proofs.call(number, offset, ctypes.string_at(nonce, 16) if nonce else None)
    except Exception:  # the library says that it failed
        return 1
    return 0


def region_spec(
    memory: Sequence[Memory],
    planes: Sequence[Plane],
    blocks: int,
    part: int,
    gpu: Optional[bytes],
    block_pool: bool = False,
    rope: Optional[Rope] = None,
) -> native.RegionSpec:
    if gpu is not None:
        check_uuid(gpu)
    native_memory = (native.Memory * len(memory))()
    for to, of in zip(native_memory, memory):
        to.kind, to.bytes, to.offset, to.fd = of.kind, of.bytes, of.offset, of.fd
        if len(of.ipc) not in (0, 64):
            raise ValueError(f"a CUDA IPC handle has 64 bytes, {len(of.ipc)} were given")
        ctypes.memmove(to.ipc, of.ipc, len(of.ipc))
        if of.prove is not None:
            to.prove_cb, to.prove_ctx = _prove, _proofs.keep(of.prove)
    native_planes = (native.Plane * len(planes))(
        *((p.memory, p.offset, p.stride, p.block_bytes, p.layer) for p in planes)
    )
    device = b"cpu" if gpu is None else b"cuda"
    shifted = None if rope is None else ctypes.pointer(rope.native())
    return native.RegionSpec(
        part, blocks, device, gpu, native_memory, len(memory), native_planes, len(planes), 0, int(block_pool), shifted
    )


class Region(_Handle):
    """Registered memory. It must stay allocated until close() or unregister() has returned."""

    def __init__(self, ns: Namespace, handle: Optional[int], memory: Sequence[Memory]):
        """For Namespace.register."""
        super().__init__(ns.client)
        self.ns = ns
        self._handle = handle
        self._owners = [m.owner for m in memory]

    def _unregister(self, handle: int, timeout_ms: int) -> None:
        check(lib.ucm_region_unregister(handle, timeout_ms))

    def unregister(self, timeout: Optional[float] = None) -> None:
        """Returns when the daemon has closed its mapping. If it raises, the region stays registered."""
        handle = self.handle
        try:
            self._unregister(handle, _timeout(timeout))
        except UcmError as error:
            if error.status != Status.DISCONNECTED:
                raise
        self._take()
        self._owners = []

    def close(self) -> None:
        if not self.closed and not self.client.closed:
            self.unregister()

    def gpu_busy(self, now: bool) -> None:
        """Sets whether the worker's GPU computes. Loads and dumps that begin from now on tell the daemon, and give way to the worker's own copies. Sends
        nothing. For a closed region it does nothing."""
        if self._handle is not None and not self.client.closed:
            lib.ucm_region_gpu_busy(self._handle, int(now))

    def load(
        self,
        keys: Keys,
        blocks: Blocks,
        *,
        layer: int = 0,
        layers: int = 0,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        lease: int = 0,
        progress_interval: int = 0,
        shifts: Optional[Sequence[Sequence[int]]] = None,
        timeout: Optional[float] = None,
    ) -> "Task":
        """Copies blocks into the region's pages. layers 0: every layer from `layer` on. progress_interval: copies layer by layer, with a report every
        `progress_interval` layers, for Task.wait_layers. shifts: for a region with `rope`, runs of keys whose K is re-rotated. Each is (keys, old position, new
        position, old length, new length). The lengths are for dynamic scaling, and may be left out."""
        fields: dict[str, Any] = {"layer": layer, "n_layers": layers, "priority": priority, "lease": lease, "progress_interval": progress_interval}
        if shifts is not None:
            packed, n = uint32s([number for run in shifts for number in (*run, 0, 0)[:5]])
            fields.update(shifts=packed.address, n_shifts=n // 5)
        return transfer(lib.ucm_load, self, self.ns, keys, blocks, timeout, daemon_timeout, **fields)

    def load_prefix(
        self,
        keys: Keys,
        blocks: Blocks,
        *,
        wait: float = 0.0,
        layer: int = 0,
        layers: int = 0,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        progress_interval: int = 0,
        timeout: Optional[float] = None,
    ) -> "Task":
        """Namespace.lookup_prefix, its lease and load in one request. It loads the blocks that are cached from the first key on without a gap. The other keys'
        results are MISS. wait: as for lookup_prefix."""
        fields = {"layer": layer, "n_layers": layers, "priority": priority, "progress_interval": progress_interval}

        def call(handle: int, what: Any, timeout_ms: int, out: Any) -> int:
            return lib.ucm_load_prefix(handle, what, _timeout(wait), timeout_ms, out)

        return transfer(call, self, self.ns, keys, blocks, timeout, daemon_timeout, **fields)

    def gather(
        self,
        source: Union[BlockSequence, Keys],
        items: Items,
        *,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        timeout: Optional[float] = None,
    ) -> "Task":
        """Copies single layers of blocks into entries of a pool (Namespace.register with block_pool=True). items: (block, layer, entry) each, as tuples, or
        packed as three uint32, such as numpy's uint32[n][3]. source: a ucmclient.sparse.BlockSequence of this namespace, or keys; blocks count from its
        beginning. The result has a BlockResult's number for each item."""
        packed, n = triples(items)
        spec = native.GatherSpec(items=packed.address, n_items=n, priority=priority, daemon_timeout_ms=_timeout(daemon_timeout))
        if isinstance(source, _Handle):
            spec.sequence = source.handle
        else:
            borrowed, spec.n_keys = borrow_keys(source, self.ns.identity.key_bytes)
            spec.keys = borrowed.address
        return Task(self.client, n, lambda out: lib.ucm_gather(self.handle, byref(spec), _timeout(timeout), out))

    def dump(
        self,
        keys: Keys,
        blocks: Blocks,
        *,
        layer: int = 0,
        layers: int = 0,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        cuda_event: Optional[bytes] = None,
        durable: Optional[bool] = None,
        raw: bool = False,
        timeout: Optional[float] = None,
    ) -> "Task":
        """Stores blocks of the region's pages. cuda_event: the 64 bytes of a CUDA IPC event, recorded after the last write. durable: done when on NVMe (True)
        or in DRAM (False); None: as the namespace was opened. raw: stores the bytes as they are, in an encoded namespace's base."""
        if cuda_event is not None and len(cuda_event) != 64:
            raise ValueError(f"a CUDA IPC event handle has 64 bytes, {len(cuda_event)} were given")
        fields = {"layer": layer, "n_layers": layers, "priority": priority, "cuda_event": cuda_event}
        durability = 0 if durable is None else 1 if durable else 2
        call = lib.ucm_dump_raw if raw else lib.ucm_dump
        return transfer(call, self, self.ns, keys, blocks, timeout, daemon_timeout, durability=durability, **fields)


class Task(_Handle):
    """A load, gather, dump or prefetch under way. Closing one that is not done cancels it."""

    _free = lib.ucm_task_free

    def __init__(self, client: Client, keys: int, begin: Callable[[Any], int]):
        """begin: calls the library, which writes the task to the given place. The task has so many keys or items."""
        super().__init__(client)
        out = c_void_p()
        check(begin(byref(out)))
        self._keys, self._handle = keys, out.value

    def _result(self, result: native.Result) -> TaskResult:
        return TaskResult(result.bytes, result.n_ok, ctypes.string_at(result.result, result.n_keys))

    def check(self) -> Optional[TaskResult]:
        """None while the task is under way. The first check() or wait() after that gets the result, later ones
        raise."""
        result = native.Result()
        rc = lib.ucm_task_check(self.handle, byref(result))
        if rc == -Status.PENDING:
            return None
        check(rc)
        return self._result(result)

    def wait(self, timeout: Optional[float] = None) -> TaskResult:
        result = native.Result()
        check(lib.ucm_task_wait(self.handle, _timeout(timeout), byref(result)))
        return self._result(result)

    def wait_layers(self, layers: int, timeout: Optional[float] = None) -> bytes:
        """For a load with `progress_interval`: waits until that many layers have landed in all blocks. Returns a BlockResult's
        number for each key so far; check() or wait() must still take the result."""
        result = ctypes.create_string_buffer(max(self._keys, 1))
        check(lib.ucm_task_wait_layers(self.handle, layers, _timeout(timeout), result))
        return result.raw[: self._keys]

    def cancel(self, timeout: Optional[float] = None) -> None:
        """Asks the daemon to stop the task, which then becomes done."""
        check(lib.ucm_task_cancel(self.handle, _timeout(timeout)))


def parts_of(part: Optional[int]) -> dict[str, int]:
    """Fields of a transfer that name one part, or all."""
    return {} if part is None else {"part": part, "n_parts": 1}


def transfer(
    function: Any,
    owner: _Handle,
    ns: Namespace,
    keys: Keys,
    blocks: Optional[Blocks],
    timeout: Optional[float],
    daemon_timeout: float,
    **fields: Any,
) -> Task:
    """Begins a transfer of keys with this function of the library. fields: the others of native.Transfer."""
    borrowed, n = borrow_keys(keys, ns.identity.key_bytes)
    what = native.Transfer(keys=borrowed.address, n_keys=n, daemon_timeout_ms=_timeout(daemon_timeout), **fields)
    if blocks is not None:
        ids, n_ids = uint32s(blocks)
        if n_ids != n:
            raise ValueError(f"{n} keys and {n_ids} block ids were given; each key needs one")
        what.blocks = ids.address
    return Task(ns.client, n, lambda out: function(owner.handle, byref(what), _timeout(timeout), out))
