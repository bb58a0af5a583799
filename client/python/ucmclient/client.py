"""Client and Namespace: handles of libucmclient as Python objects. region.py has those of memory and of what moves.

ucmclient.h defines threads, timeouts, restarts of the daemon and fork. Timeouts are in seconds here; None means the
client's default. Each object is a context manager, and closing it twice does no harm. A failed call raises UcmError.
"""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from . import _native as native
from ._native import lib
from .buffers import Blocks, Keys, keys as borrow_keys, uint32s
from .errors import check
from .handle import _Handle, _text, _timeout, on_behalf_of  # noqa: F401  re-exported
from .region import BlockResult, Region, Rope, Task, TaskResult, parts_of, region_spec, transfer  # noqa: F401  likewise

if TYPE_CHECKING:
    from .copy_agent import CopyAgent
    from .sparse.mapping import SharedMapping


class Found(enum.IntEnum):
    """enum ucm_found."""

    NOT = 0
    DRAM = 1
    NVME = 2
    SHARED = 3


class WaitMode(enum.IntEnum):
    """What a lookup does where the shared tier may have what this host lacks (enum ucm_wait_mode)."""

    #: It waits.
    WAIT = 0
    #: It answers at once, and says whether the shared tier is being asked. The same lookup later finds what that tier has. Until then
    #: there is no lease.
    LATER = 1
    #: It answers at once with what this host has, and asks nobody.
    HERE = 2


class MemoryKind(enum.IntEnum):
    """enum ucm_memory_kind."""

    MEMFD = 0
    CUDA_IPC = 1
    CUDA_FD = 2


@dataclass(frozen=True)
class Identity:
    """struct ucm_identity: workers that agree on every field share blocks."""

    model: str
    dtype: str
    layout: str
    block_tokens: int
    layer_bytes: int
    layers: tuple[int, ...]
    parts: int = 1
    key_bytes: int = 32
    revision: str = ""
    salt: bytes = b""
    tenant: Optional[str] = None


@dataclass(frozen=True)
class Memory:
    """struct ucm_memory: one allocation of a worker. A call that takes it duplicates `fd`."""

    kind: MemoryKind
    bytes: int
    offset: int = 0
    fd: int = -1
    ipc: bytes = b""
    #: CUDA_IPC: prove(offset, nonce) writes 16 bytes over those from byte `offset` of the allocation on. prove(offset, None) puts the
    #: old bytes back (ucm_prove_cb of ucmclient.h). cuda_allocation sets it.
    prove: Optional[Callable[[int, Optional[bytes]], None]] = None
    #: An object to keep alive while the region is registered.
    owner: Any = None


@dataclass(frozen=True)
class Plane:
    """Where one layer (or its K, or its V) lies: block b at memory[memory] + offset + b * stride."""

    memory: int
    offset: int
    stride: int
    block_bytes: int
    layer: int


@dataclass(frozen=True)
class ServerInfo:
    server: str
    tenant: str
    instance: bytes
    admin: bool
    max_keys: int
    max_requests: int
    max_regions: int
    max_leases: int
    max_lease_ms: int
    max_timeout_ms: int


@dataclass(frozen=True)
class PrefixHits:
    """`blocks`: how many from the first key on are cached. `in_dram` of them are wholly in DRAM, and `shared` must be
    read from the shared tier (0 unless tell_shared). `lease`: 0 for none. `pending`: with WaitMode.LATER, the shared tier is being asked
    for more."""

    blocks: int
    in_dram: int
    lease: int
    shared: int = 0
    pending: bool = False


@dataclass(frozen=True)
class TableHits:
    """What the daemon's lookup table says of keys. `blocks` are found: with lookup_table_read from the first key on without a
    gap, with lookup_table_read_each anywhere. Of these, `in_dram` lie wholly in DRAM, and `on_shared` must be read from the
    shared tier. complete: the table lacked no block that this host has. shared_tier: there is one, which may have more."""

    blocks: int
    in_dram: int
    on_shared: int
    complete: bool
    shared_tier: bool

    @property
    def certain(self) -> bool:
        """Whether lookup_prefix, too, would miss what the table does not have now."""
        return self.complete and not self.shared_tier


class Client(_Handle):
    """A connection to the daemon of this host. Threads may share it, and one may close it while others use it: their calls then raise."""

    #: The library's client, whose connection has ended.
    _ended: Optional[int] = None

    def __init__(
        self,
        socket: Optional[str] = None,
        name: Optional[str] = None,
        default_timeout: float = 10.0,
        timeout: Optional[float] = None,
    ):
        super().__init__()
        out = c_void_p()
        options = native.Options(_text(socket), _text(name), max(1, _timeout(default_timeout)))
        check(lib.ucm_connect(byref(options), _timeout(timeout), byref(out)))
        #: Their threads use the connection, so they end before it.
        self._copy_agents: set[CopyAgent] = set()
        self._process = os.getpid()
        self._handle = out.value

    def close(self) -> None:
        handle = self._take()
        if handle is None:
            return
        while self._copy_agents:
            copy_agent = self._copy_agents.pop()
            if not self._forked:
                copy_agent._abandon()
        lib.ucm_disconnect(handle)
        self._ended = handle

    def __del__(self) -> None:
        # A thread that was about to call the library when another one called close() holds an object that keeps this one alive. So
        # now no thread can call with the handle.
        if self._ended is not None:
            lib.ucm_close(self._ended)

    @property
    def _forked(self) -> bool:
        """True in a forked child, which lacks the threads of copy agents and their memory."""
        return os.getpid() != self._process

    @property
    def connection_epoch(self) -> int:
        """How many connections this client has had. When it changes, all leases have ended."""
        return lib.ucm_connection_epoch(self.handle)

    def fileno(self) -> int:
        """A descriptor that polls readable when process() has something to do."""
        return lib.ucm_fd(self.handle)

    def process(self) -> int:
        """Handles what has arrived, without blocking. Returns how many tasks became done."""
        return check(lib.ucm_process(self.handle))

    def server_info(self) -> ServerInfo:
        info = native.ServerInfo()
        check(lib.ucm_server_info(self.handle, byref(info)))
        return ServerInfo(
            info.server.decode(),
            info.tenant.decode(),
            bytes(info.instance),
            bool(info.admin),
            *(getattr(info, field) for field in list(ServerInfo.__dataclass_fields__)[4:]),
        )

    def namespace(self, identity: Identity, timeout: Optional[float] = None, durable: bool = False) -> "Namespace":
        """durable: a dump is done when it is on NVMe, unless the dump says otherwise."""
        return Namespace(self, identity, timeout, durable)

    def release(self, lease: int, timeout: Optional[float] = None) -> None:
        """Ends a lease early. 0, or a lease that has ended already, is no error."""
        check(lib.ucm_release(self.handle, lease, _timeout(timeout)))

    def call(self, method: str, params: bytes, timeout: Optional[float] = None) -> bytes:
        """Calls any method of docs/methods.md: a packed map for a packed map."""
        out, n = c_void_p(), c_size_t()
        check(lib.ucm_call(self.handle, method.encode(), params, len(params), _timeout(timeout), byref(out), byref(n)))
        try:
            return ctypes.string_at(out.value, n.value)
        finally:
            native.free(out)

    def release_soon(self, lease: int) -> None:
        """The same without waiting for the daemon."""
        check(lib.ucm_release_soon(self.handle, lease))


class Namespace(_Handle):
    """A namespace, opened for one Identity. Unregister its regions before you close it."""

    _free = lib.ucm_namespace_close

    def __init__(self, client: Client, identity: Identity, timeout: Optional[float] = None, durable: bool = False):
        super().__init__(client)
        layers = (c_uint32 * len(identity.layers))(*identity.layers)
        out = c_void_p()
        native_identity = native.Identity(
            _text(identity.tenant),
            _text(identity.model),
            _text(identity.revision),
            _text(identity.dtype),
            _text(identity.layout),
            identity.block_tokens,
            identity.key_bytes,
            identity.parts,
            layers,
            len(identity.layers),
            identity.layer_bytes,
            identity.salt,
            len(identity.salt),
            int(durable),
        )
        check(lib.ucm_namespace_open(client.handle, byref(native_identity), _timeout(timeout), byref(out)))
        self.identity = identity
        self._handle = out.value

    def encoded(self, encoding: str, **form: Any) -> "EncodedNamespace":
        """The namespace of these blocks in a smaller form. EncodedNamespace says what `form` may hold."""
        return EncodedNamespace(self, encoding, **form)

    def mapping(self, part: int = 0, **options: Any) -> "SharedMapping":
        """A ucmclient.sparse.SharedMapping: memory in which this process reads referenced blocks by
        itself."""
        from .sparse.mapping import SharedMapping

        return SharedMapping(self, part, **options)

    @property
    def fingerprint(self) -> bytes:
        out = ctypes.create_string_buffer(32)
        lib.ucm_namespace_fingerprint(self.handle, out)
        return out.raw

    def _lookup(self, keys: Keys, lease: float, wait: float, tell_shared: bool, wait_mode: int = 0) -> native.Lookup:
        lookup = native.Lookup(lease_ms=_timeout(lease), wait_ms=_timeout(wait), wait_mode=wait_mode)
        lookup.borrowed, lookup.n_keys = borrow_keys(keys, self.identity.key_bytes)
        lookup.keys = lookup.borrowed.address
        lookup.shared_hits = c_uint32()
        if tell_shared:
            lookup.shared = ctypes.pointer(lookup.shared_hits)
        lookup.is_pending = c_uint32()
        if wait_mode:
            lookup.pending = ctypes.pointer(lookup.is_pending)
        return lookup

    def lookup_prefix(
        self,
        keys: Keys,
        lease: float = 0.0,
        timeout: Optional[float] = None,
        *,
        wait: float = 0.0,
        tell_shared: bool = False,
        wait_mode: int = WaitMode.WAIT,
    ) -> PrefixHits:
        """How many blocks from the first key on are cached without a gap. lease: seconds to keep them, 0 for none.
        wait: longest wait for the shared tier in seconds, 0 for the daemon's setting; with WaitMode.LATER, how long it is asked."""
        lookup = self._lookup(keys, lease, wait, tell_shared, wait_mode)
        hits, in_dram, number = c_uint32(), c_uint32(), c_uint32()
        check(
            lib.ucm_lookup_prefix(
                self.handle, byref(lookup), _timeout(timeout), byref(hits), byref(in_dram), byref(number)
            )
        )
        return PrefixHits(hits.value, in_dram.value, number.value, lookup.shared_hits.value, bool(lookup.is_pending.value))

    def lookup_per_key(
        self,
        keys: Keys,
        lease: float = 0.0,
        timeout: Optional[float] = None,
        *,
        wait: float = 0.0,
        tell_shared: bool = False,
    ) -> tuple[bytes, int]:
        """For each key a Found's number, and a lease on those that were found. Blocks of the shared tier count as NVME
        unless tell_shared."""
        return self._each(self._lookup(keys, lease, wait, tell_shared), timeout)[:2]

    def lookup_per_key_nowait(
        self, keys: Keys, lease: float = 0.0, timeout: Optional[float] = None, *, wait_mode: int = WaitMode.LATER, wait: float = 0.0
    ) -> tuple[bytes, int, bool]:
        """As lookup_per_key, and whether the shared tier is being asked for more. wait: how long it is asked, in seconds."""
        return self._each(self._lookup(keys, lease, wait, False, wait_mode), timeout)

    def _each(self, lookup: native.Lookup, timeout: Optional[float]) -> tuple[bytes, int, bool]:
        found, hits, number = ctypes.create_string_buffer(max(lookup.n_keys, 1)), c_uint32(), c_uint32()
        check(lib.ucm_lookup_per_key(self.handle, byref(lookup), _timeout(timeout), found, byref(hits), byref(number)))
        return found.raw[: lookup.n_keys], number.value, bool(lookup.is_pending.value)

    def lookup_table_open(self, timeout: Optional[float] = None) -> None:
        """Gets the lookup table, or a new one if it is of no use any more."""
        check(lib.ucm_lookup_table_open(self.handle, _timeout(timeout)))

    def lookup_table_read(self, keys: Keys) -> Optional[TableHits]:
        """How many blocks from the first key on are cached without a gap, as far as the table says. None: there is no table to
        rely on. Asks nobody, and takes no lease."""
        return self._table_read(keys, None)[0]

    def lookup_table_read_each(self, keys: Keys) -> Optional[tuple[bytes, TableHits]]:
        """For each key a Found's number."""
        advice, found = self._table_read(keys, ctypes.create_string_buffer)
        return None if advice is None else (found, advice)

    def _table_read(self, keys: Keys, buffer: Any) -> tuple[Optional[TableHits], bytes]:
        out = native.TableHits()
        borrowed, n = borrow_keys(keys, self.identity.key_bytes)
        found = buffer(max(n, 1)) if buffer else None
        if check(lib.ucm_lookup_table_read(self.handle, borrowed.address, n, found, byref(out))) != 0:
            return None, b""
        advice = TableHits(out.hits, out.in_dram, out.on_shared, bool(out.complete), bool(out.shared_tier))
        return advice, found.raw[:n] if found else b""

    def lookup_note(self, keys: Keys, timeout: Optional[float] = None) -> None:
        """Tells the daemon of a lookup that the lookup table has answered, so that it counts it. Waits for no answer."""
        borrowed, n = borrow_keys(keys, self.identity.key_bytes)
        check(lib.ucm_lookup_note(self.handle, borrowed.address, n, _timeout(timeout)))

    def block_metadata(
        self,
        keys: Keys,
        tokens: Blocks,
        parent: Optional[bytes] = None,
        lora: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> None:
        """Sends metadata of consecutive blocks of one sequence, for readers of the daemon's events: the text of prompts.
        parent: the key before the first."""
        borrowed, n = borrow_keys(keys, self.identity.key_bytes)
        ids, n_tokens = uint32s(tokens)
        if n_tokens != n * self.identity.block_tokens or (parent is not None and len(parent) != self.identity.key_bytes):
            raise ValueError(f"{n} blocks of {self.identity.block_tokens} tokens, {n_tokens} tokens and this parent do not fit")
        metadata = native.BlockMetadata(borrowed.address, n, ids.address, parent, _text(lora))
        check(lib.ucm_block_metadata(self.handle, byref(metadata), _timeout(timeout)))

    def prefetch(
        self,
        keys: Keys,
        *,
        part: Optional[int] = None,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        timeout: Optional[float] = None,
    ) -> "Task":
        """Reads blocks into DRAM; part None: all parts."""
        return transfer(lib.ucm_prefetch, self, self, keys, None, timeout, daemon_timeout, priority=priority, **parts_of(part))

    def _change(self, function: Any, keys: Optional[Keys], timeout: Optional[float], *more: Any) -> int:
        changed = c_uint64()
        borrowed, n = (None, 0) if keys is None else borrow_keys(keys, self.identity.key_bytes)
        address = borrowed.address if borrowed else None
        check(function(self.handle, address, n, _timeout(timeout), byref(changed), *more))
        return changed.value

    def pin(self, keys: Optional[Keys] = None, timeout: Optional[float] = None) -> int:
        """Pinned blocks are never evicted. keys None: every block. Returns how many changed."""
        return self._change(lib.ucm_pin, keys, timeout)

    def unpin(self, keys: Optional[Keys] = None, timeout: Optional[float] = None) -> int:
        return self._change(lib.ucm_unpin, keys, timeout)

    def evict(self, keys: Optional[Keys] = None, timeout: Optional[float] = None) -> tuple[int, int]:
        """Drops blocks. Returns how many were dropped at once, and how many are pinned or in use."""
        busy = c_uint64()
        return self._change(lib.ucm_evict, keys, timeout, byref(busy)), busy.value

    def register(
        self,
        memory: Sequence[Memory],
        planes: Sequence[Plane],
        *,
        blocks: int,
        part: int = 0,
        gpu: Optional[bytes] = None,
        block_pool: bool = False,
        rope: Optional[Rope] = None,
        timeout: Optional[float] = None,
    ) -> "Region":
        """Registers paged KV memory of this worker. gpu: the UUID of its GPU, None for host memory. block_pool: each of its blocks is an
        entry for Region.gather, for one layer of any block. Its planes describe one layer, as layer 0. rope: where K lies, for loads that
        re-rotate it."""
        spec, out = region_spec(memory, planes, blocks, part, gpu, block_pool, rope), c_void_p()
        check(lib.ucm_region_register(self.handle, byref(spec), _timeout(timeout), byref(out)))
        return Region(self, out.value, memory)


class EncodedNamespace(Namespace):
    """Blocks of a base namespace in a smaller form ("fp8", "int8", "q4", "lossless"), under the same keys. In its regions each
    plane is a layer's whole K or V, as the worker has it. Region.dump stores the encoded form, and with raw=True the bytes as
    they are. Lookups, loads and prefetches find a block in either. Close the base after it.

    k, v: tokens, heads and elements of a row of a layer in a block; without v (MLA) a layer is one K/V tensor. heads_first: rows come
    head after head. per_channel: int8's K has a scale for each channel, over `run` tokens. That is a layer's tokens where k is several
    layers side by side; 0: all of k. version: of the encoding; 0: the library's."""

    def __init__(
        self,
        base: Namespace,
        encoding: str,
        *,
        k: Sequence[int],
        v: Sequence[int] = (),
        dtype: str = "bf16",
        heads_first: bool = False,
        per_channel: bool = False,
        run: int = 0,
        seed: int = 0,
        version: int = 0,
        timeout: Optional[float] = None,
    ):
        _Handle.__init__(self, base.client)
        form = native.EncodedForm(_text(encoding), _text(dtype), version, native.KvRows(*k), native.KvRows(*v))
        form.order, form.axis, form.seed = int(heads_first), int(per_channel), seed
        form.run = run
        out = c_void_p()
        check(lib.ucm_encoding_open(base.handle, byref(form), _timeout(timeout), byref(out)))
        self.base, self.identity, self.encoding = base, base.identity, encoding
        self._handle = out.value

    def _info(self) -> native.EncodingInfo:
        info = native.EncodingInfo()
        check(lib.ucm_encoding_describe(self.handle, byref(info)))
        return info

    @property
    def block_bytes(self) -> tuple[int, int]:
        """A block's bytes with all parts: as they are, and encoded."""
        info = self._info()
        return info.raw_bytes, info.encoded_bytes
