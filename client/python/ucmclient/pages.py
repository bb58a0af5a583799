"""Pages of an engine's host memory, kept in the daemon by their keys: what plug-ins of engines have in common that offload by pages (SGLang's
HiCache and its like), whatever their interface is.

    chunks = [Chunk(address_of_k, stride, size), Chunk(address_of_v, stride, size)]  # of page 0, and from a page to the next
    store = PageStore(settings, identity, chunks, pages=1000, name="engine")
    store.save(keys, [3, 4])         # page 3 under the first key, 4 under the second one
    store.prefix(keys)               # so many from the first one on are there
    store.load(keys, [7, 8])         # -> [True, True]

Memory that is a SharedMemory's is copied to and from by the daemon itself. Other memory goes through a SharedMemory of this module: one
copy more, by this process. While the daemon is away nothing is found, and nothing is kept; no call waits longer than its deadline.
Threads may share a PageStore. An engine may write to its pages again when a call has returned, whatever it returned."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .client import BlockResult, Found, Namespace, Plane, Region
from .errors import UcmError
from .memory import SharedMemory, in_shared_memory, shared_memory_of
from .vllm.identity import EngineIdentity
from .vllm.link import Link
from .vllm.settings import Settings

#: Keys of one request.
_MOST = 4096
#: Of memory that pages go through, in bytes, if one page is not larger.
_STAGING = 64 << 20
#: When the daemon goes away during a copy, or its answer is late, its last bytes may land within this time.
_GRACE = 0.5
#: Beyond a transfer's deadline, for its answer.
_MARGIN = 1.0
_LOADED = frozenset((BlockResult.OK,))
#: In progress: another engine stores the same bytes now.
_SAVED = frozenset((BlockResult.OK, BlockResult.EXISTS, BlockResult.IN_PROGRESS))
_SETTINGS = ("socket", "lookup_timeout", "connect_timeout", "transfer_deadline", "retry_interval", "required", "store", "load", "salt", "revision")


@dataclass(frozen=True)
class Chunk:
    """Of page 0: where it lies, as an address; bytes to the next page's; its bytes."""

    address: int
    stride: int
    size: int


def settings_of(extra: Mapping[str, Any], where: str) -> Settings:
    """What a plug-in's user may set, of what docs/vllm.md lists. where: names the place in messages."""
    known = {field.name: field for field in fields(Settings) if field.name in _SETTINGS}
    for name, value in extra.items():
        if name not in known:
            raise ValueError(f"{where} has no setting {name!r}; there are {', '.join(sorted(known))}")
        default = known[name].default
        wanted: Any = str if default is None else (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or (wanted == (int, float) and (isinstance(value, bool) or value < 0)):
            kind = "a number of seconds, 0 or more" if wanted == (int, float) else wanted.__name__
            raise ValueError(f"{where}: {name} must be {kind}, not {value!r}")
    return Settings(**{"lookup_timeout": 1.0, **extra})


class PageStore:
    def __init__(self, settings: Settings, identity: EngineIdentity, chunks: Sequence[Chunk], pages: int, name: str):
        """identity: one shard of all chunks of a page, in their order; its `parts` is 1. Raises if settings.required and the daemon is not
        there, or if it refuses."""
        self.chunks, self.pages, self.settings = list(chunks), pages, settings
        self.page_bytes = sum(chunk.size for chunk in self.chunks)
        if identity.parts != 1 or identity.shards != (1,) or identity.shard_bytes != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes: an identity of one part with one shard of as many is right")
        self.direct = all(in_shared_memory(chunk.address) for chunk in self.chunks)
        #: Held while pages go through `_staging`.
        self._lock, self._staging = threading.Lock(), None if self.direct else SharedMemory(self._room() * self.page_bytes)
        self.link = Link(settings, identity, name, self._register)

    def _room(self) -> int:
        return max(1, min(self.pages, _STAGING // self.page_bytes, _MOST))

    def _register(self, ns: Namespace, timeout: float) -> Region:
        if self._staging is not None:
            size = self.page_bytes
            return ns.register([self._staging.memory()], [Plane(0, 0, size, size, 0)], blocks=self._room(), timeout=timeout)
        memory, first, planes = [], {}, []
        for chunk in self.chunks:
            one, base = shared_memory_of(chunk.address)
            if base not in first:
                first[base] = len(memory)
                memory.append(one)
            planes.append(Plane(first[base], chunk.address - base, chunk.stride, chunk.size, 0))
        return ns.register(memory, planes, blocks=self.pages, timeout=timeout)

    # ---- what is there ----

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many from the first one on are there. The daemon may drop them before they are loaded."""
        for at in range(0, len(keys), _MOST):
            some = keys[at : at + _MOST]
            ns = self.link.ns if self.settings.load else None
            hits = None if ns is None else self.link.ask(ns.lookup_prefix, b"".join(some), timeout=self.settings.lookup_timeout)
            if hits is None or hits.blocks < len(some):
                return at + (0 if hits is None else hits.blocks)
        return len(keys)

    def each(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are there."""
        out: list[bool] = []
        for at in range(0, len(keys), _MOST):
            some, ns = keys[at : at + _MOST], self.link.ns if self.settings.load else None
            found = None if ns is None else self.link.ask(ns.lookup_each, b"".join(some), timeout=self.settings.lookup_timeout)
            out += [False] * len(some) if found is None else [one != Found.NOT for one in found[0]]
        return out

    def drop(self) -> bool:
        """Has the daemon forget all pages of this identity. False: it did not, or kept some that are in use."""
        ns = self.link.ns
        dropped = None if ns is None else self.link.ask(ns.evict, timeout=self.settings.transfer_deadline)
        return dropped is not None and dropped[1] == 0

    # ---- what moves ----

    def load(self, keys: Sequence[bytes], pages: Sequence[int]) -> list[bool]:
        """Into these pages, each named once. What was not loaded may hold anything."""
        return self._moved("load", keys, pages, _LOADED) if self.settings.load else [False] * len(keys)

    def save(self, keys: Sequence[bytes], pages: Sequence[int]) -> list[bool]:
        """Which are kept now, or were before."""
        return self._moved("dump", keys, pages, _SAVED) if self.settings.store else [False] * len(keys)

    def _moved(self, verb: str, keys: Sequence[bytes], pages: Sequence[int], good: frozenset[BlockResult]) -> list[bool]:
        if len(keys) != len(pages) or any(not 0 <= page < self.pages for page in pages):
            raise ValueError(f"{len(keys)} keys and {len(pages)} pages; a page for each is right, below {self.pages}")
        out: list[bool] = []
        most = _MOST if self._staging is None else self._room()
        for at in range(0, len(keys), most):
            move = self._ask if self._staging is None else self._through
            out += [result in good for result in move(verb, keys[at : at + most], pages[at : at + most])]
        return out

    def _through(self, verb: str, keys: Sequence[bytes], pages: Sequence[int]) -> bytes:
        with self._lock:
            if verb == "dump":
                for slot, page in enumerate(pages):
                    self._copy(slot, page, out=False)
            results = self._ask(verb, keys, range(len(keys)))
            if verb == "load":
                for slot, (page, result) in enumerate(zip(pages, results)):
                    if result == BlockResult.OK:
                        self._copy(slot, page, out=True)
        return results

    def _copy(self, slot: int, page: int, out: bool) -> None:
        assert self._staging is not None
        at = self._staging.address + slot * self.page_bytes
        for chunk in self.chunks:
            there = chunk.address + page * chunk.stride
            ctypes.memmove(*((there, at) if out else (at, there)), chunk.size)
            at += chunk.size

    def _ask(self, verb: str, keys: Sequence[bytes], blocks: Sequence[int]) -> bytes:
        """A BlockResult's number for each."""
        region, deadline = self.link.region, self.settings.transfer_deadline
        task = None if region is None else self.link.ask(
            getattr(region, verb), b"".join(keys), list(blocks), deadline=deadline, timeout=self.settings.connect_timeout
        )
        nothing = bytes([BlockResult.FAILED]) * len(keys)
        if task is None:
            return nothing
        try:
            return task.wait(deadline + _MARGIN).blocks
        except UcmError:
            self.link.cut()  # nothing may read or write these pages any more
            time.sleep(_GRACE)
            return nothing
        finally:
            task.close()

    def close(self) -> None:
        """The daemon unmaps the memory."""
        self.link.drop_region()
        self.link.close()


def key_of(name: str) -> bytes:
    """32 bytes for an engine's name of a page: its bytes, if it is a hash of as many in hexadecimal."""
    try:
        key = bytes.fromhex(name) if len(name) == 64 and name == name.lower() else b""
    except ValueError:
        key = b""
    return key if len(key) == 32 else hashlib.sha256(b"ucm page " + name.encode()).digest()
