"""Pages of an engine's host memory, which the daemon keeps by their keys. Plug-ins of engines that offload by pages, such as SGLang's HiCache, have this in
common.

    fragments = [Fragment(address_of_k, stride, size), Fragment(address_of_v, stride, size)]  # of page 0, and from a page to the next
    store = PageStore(settings, identity, fragments, pages=1000, name="engine")
    store.save(keys, [3, 4])         # page 3 under the first key, 4 under the second one
    store.prefix(keys)               # so many from the first one on are there
    store.load(keys, [7, 8])         # -> [True, True]

The daemon itself copies to and from memory of a SharedMemory or of a GPU. Other memory goes through a SharedMemory of this module, which costs one more copy,
by this process. While the daemon is away, nothing is found or kept. No call waits longer than its deadline. Threads may share a PageStore. An engine may write
to its pages again when a call has returned, whatever it returned."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields
from typing import Any, Optional

from ..client import BlockResult, Found, Namespace, Plane, Region, Task
from ..errors import UcmError
from ..memory import SharedMemory, allocation_of, in_shared_memory, on_gpu
from .vllm.identity import EngineIdentity
from .vllm.layout import Fragment
from .vllm.link import Link
from .vllm.settings import Settings
from .weights import weights_at

logger = logging.getLogger("ucmclient")

#: Keys of one request.
_MOST = 4096
#: Bytes of the memory that pages go through, or one page if that is larger.
_STAGING = 64 << 20
#: When the daemon goes away during a copy, or its answer is late, its last bytes may land within this time.
_GRACE = 0.5
#: Beyond a transfer's deadline, for its answer.
_MARGIN = 1.0
_LOADED = frozenset((BlockResult.OK,))
#: In progress: another engine stores the same bytes now.
_SAVED = frozenset((BlockResult.OK, BlockResult.EXISTS, BlockResult.IN_PROGRESS))
_SETTINGS = ("socket", "lookup_timeout", "connect_timeout", "transfer_timeout", "retry_interval", "required", "store", "load", "salt", "revision")


def settings_of(extra: Mapping[str, Any], where: str) -> Settings:
    """The settings of docs/vllm.md that a plug-in's user may set. where: names the place in messages."""
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


def weights_of(settings: Settings, model: str, told: Mapping[str, Any], drafts: Sequence[tuple[str, Optional[str]]] = (),
               of_all_ranks: Callable[[Any], Sequence[Any]] = lambda mine: [mine]) -> str:
    """For an identity's revision: what tells weights apart that have one name. model: its name, or a path. Its files' sizes and times, or a hub's commit,
    count unless the user names the weights. If it is unknown which files were read, this engine shares with no other. told: what else the engine's user said
    of them. drafts: names and revisions of models whose KV lies next to it. of_all_ranks: takes what this rank says, and returns what each of the engine's
    ranks says, in one order. All ranks call it, unless the user names the weights. They get one revision, even if only one of them is in doubt."""
    known: dict[str, Any] = {"model": model, "told": {name: str(value) for name, value in told.items()}}
    if settings.revision is None:
        read = [(name, weights_at(name, revision)) for name, revision in ((model, told.get("revision") or None), *drafts)]
        said = of_all_ranks(([one.known for _, one in read], [(name, one.doubt) for name, one in read if one.doubt], os.urandom(16).hex()))
        files, doubts = [of for of, _, _ in said], [doubt for _, some, _ in said for doubt in some]
        known["files"] = files[0] if all(of == files[0] for of in files) else files  # hosts may have copies of their own
        if doubts:
            known["alone"] = said[0][2]
            logger.warning("this engine shares with no other one, since it is not known which weights of %r it has read (%s): start it again, or set revision",
                           *doubts[0])
    return f"{(settings.revision or '')[:128]}#{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]}"


class Kept:
    """A namespace of the daemon in which an engine keeps pages: the part that does not depend on where they lie in the engine's memory."""

    _part = 0

    def __init__(self, settings: Settings, identity: EngineIdentity, name: str, staged: bool = False):
        self.settings, self.identity = settings, identity
        self.page_bytes = identity.layer_bytes * identity.layers[0]
        #: Held while pages go through `_staging`. That holds whole pages in memory that the daemon maps, in place of memory that it can't map.
        self._lock, self._staging = threading.Lock(), self._stage() if staged else None
        self.link = Link(settings, identity, name, self._register)

    def _stage(self) -> SharedMemory:
        return SharedMemory(self._room() * self.page_bytes)

    def _room(self) -> int:
        return max(1, min(_STAGING // self.page_bytes, _MOST))

    def _register(self, ns: Namespace, timeout: float) -> Optional[Region]:
        if self._staging is None:
            return None
        size, layers = self.identity.layer_bytes, self.identity.layers[0]
        planes = [Plane(0, layer * size, self.page_bytes, size, layer) for layer in range(layers)]
        return ns.register([self._staging.memory()], planes, blocks=self._room(), part=self._part, timeout=timeout)

    # ---- what is there ----

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many from the first one on are there. The daemon may drop them before they are loaded."""
        return self.hold_prefix(keys, 0.0)[0]

    def hold_prefix(self, keys: Sequence[bytes], seconds: float) -> tuple[int, list[tuple[Namespace, int]]]:
        """Likewise, with a lease: those that are there stay for so long, or until let_go()."""
        leases: list[tuple[Namespace, int]] = []
        for at in range(0, len(keys), _MOST):
            some = keys[at : at + _MOST]
            ns = self.link.ns if self.settings.load else None
            hits = None if ns is None else self.link.ask(ns.lookup_prefix, b"".join(some), seconds, timeout=self.settings.lookup_timeout)
            if hits is not None and hits.lease:
                leases.append((ns, hits.lease))
            if hits is None or hits.blocks < len(some):
                return at + (0 if hits is None else hits.blocks), leases
        return len(keys), leases

    def each(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are there."""
        return self.hold(keys, 0.0)[0]

    def hold(self, keys: Sequence[bytes], seconds: float) -> tuple[list[bool], list[tuple[Namespace, int]]]:
        """Likewise, with a lease: those that are there stay for so long, or until let_go()."""
        out: list[bool] = []
        leases = []
        for at in range(0, len(keys), _MOST):
            some, ns = keys[at : at + _MOST], self.link.ns if self.settings.load else None
            found = None if ns is None else self.link.ask(ns.lookup_per_key, b"".join(some), seconds, timeout=self.settings.lookup_timeout)
            out += [False] * len(some) if found is None else [one != Found.NOT for one in found[0]]
            if found is not None and found[1]:
                leases.append((ns, found[1]))
        return out, leases

    def let_go(self, leases: Sequence[tuple[Namespace, int]]) -> None:
        """Ends leases early, without waiting for the daemon."""
        for ns, lease in leases:
            if ns is self.link.ns:  # a connection's leases end with it, and the next one has numbers of its own
                self.link.release(lease)

    def fetch(self, keys: Sequence[bytes]) -> None:
        """Has the daemon read pages into its DRAM, and waits for that."""
        for at in range(0, len(keys), _MOST):
            ns = self.link.ns if self.settings.load else None
            if ns is not None:
                self._finish(self.link.ask(ns.prefetch, b"".join(keys[at : at + _MOST]), daemon_timeout=self.settings.transfer_timeout,
                                           timeout=self.settings.lookup_timeout), 0)

    def drop(self, keys: Optional[Sequence[bytes]] = None) -> bool:
        """Has the daemon forget these pages, or all of this identity. False: it did not, or kept some that are in use."""
        ns = self.link.ns
        packed = None if keys is None else b"".join(keys)
        dropped = None if ns is None else self.link.ask(ns.evict, packed, timeout=self.settings.transfer_timeout)
        return dropped is not None and dropped[1] == 0

    # ---- what moves ----

    def _through(self, verb: str, keys: Sequence[bytes], rows: Sequence[Sequence[int]], sizes: Sequence[int], layer: int = 0) -> bytes:
        """Layers whose pieces lie at these addresses, `_room` at most, by way of `_staging`."""
        with self._lock:
            if verb == "dump":
                for slot, row in enumerate(rows):
                    self._copy(slot, row, sizes, layer, out=False)
            results = self._ask(self.link.region, verb, keys, range(len(keys)), layer=layer, layers=1)
            if verb == "load":
                for slot, (row, result) in enumerate(zip(rows, results)):
                    if result == BlockResult.OK:
                        self._copy(slot, row, sizes, layer, out=True)
        return results

    def _copy(self, slot: int, row: Sequence[int], sizes: Sequence[int], layer: int, out: bool) -> None:
        assert self._staging is not None
        at = self._staging.address + slot * self.page_bytes + layer * self.identity.layer_bytes
        for there, size in zip(row, sizes):
            ctypes.memmove(*((there, at) if out else (at, there)), size)
            at += size

    def _ask(self, region: Optional[Region], verb: str, keys: Sequence[bytes], blocks: Sequence[int], **layers: int) -> bytes:
        """A BlockResult's number for each."""
        task = None if region is None else self.link.ask(
            getattr(region, verb), b"".join(keys), list(blocks), daemon_timeout=self.settings.transfer_timeout,
            timeout=self.settings.lookup_timeout, **layers  # of sending it, which waits for a daemon that has gone
        )
        return self._finish(task, len(keys), verb)

    def _finish(self, task: Optional[Task], n: int, verb: str = "") -> bytes:
        """verb: what the task does with the engine's pages, if anything."""
        nothing = bytes([BlockResult.FAILED]) * n
        if task is None:
            return nothing
        try:
            return task.wait(self.settings.transfer_timeout + _MARGIN).blocks
        except UcmError:
            if verb:
                # Nothing may read or write these pages any more. What a daemon that was stopped has read it does not store.
                self.link.cut(self.settings.transfer_timeout if verb == "load" else 0.0)
                time.sleep(_GRACE)
            return nothing
        finally:
            task.close()

    def end(self, moves: Sequence[Future], seconds: float) -> bool:
        """Waits so many seconds for these transfers. It cancels those that have not begun by then, and cuts the connection to end the others. So the engine
        may use its pages whatever this returns."""
        late = wait(moves, seconds).not_done
        if late and not all([one.cancel() for one in late]):
            self.link.cut()
            wait(late, 2 * self.settings.transfer_timeout + _MARGIN)
        return not late

    def close(self) -> None:
        """The daemon unmaps the memory."""
        self.link.drop_region()
        self.link.close()


class PageStore(Kept):
    def __init__(self, settings: Settings, identity: EngineIdentity, fragments: Sequence[Fragment], pages: int, name: str, part: int = 0):
        """identity: one layer of all fragments of a page, in their order. part: which part of a block these pages hold. Raises if settings.required and
        the daemon is not there, or if it refuses."""
        self.fragments, self.pages, self._part = list(fragments), pages, part
        size = sum(fragment.size for fragment in self.fragments)
        if not 0 <= part < identity.parts or identity.layers != (1,) or identity.layer_bytes != size:
            raise ValueError(f"a page has {size} bytes: an identity of parts with one layer of as many is right")
        self.direct = all(in_shared_memory(fragment.address) or on_gpu(fragment.address) for fragment in self.fragments)
        super().__init__(settings, identity, name, staged=not self.direct)

    def _room(self) -> int:
        return min(super()._room(), max(1, self.pages))

    def _register(self, ns: Namespace, timeout: float) -> Optional[Region]:
        if not self.direct:
            return super()._register(ns, timeout)
        memory, first, planes = [], {}, []
        for fragment in self.fragments:
            one, base, gpu = allocation_of(fragment.address)
            if base not in first:
                first[base] = len(memory)
                memory.append(one)
            planes.append(Plane(first[base], fragment.address - base, fragment.stride, fragment.size, 0))
        return ns.register(memory, planes, blocks=self.pages, part=self._part, gpu=gpu, timeout=timeout)

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
        most, sizes = _MOST if self.direct else self._room(), [fragment.size for fragment in self.fragments]
        for at in range(0, len(keys), most):
            some, places = keys[at : at + most], pages[at : at + most]
            if self.direct:
                results = self._ask(self.link.region, verb, some, places)
            else:
                results = self._through(verb, some, [[one.address + page * one.stride for one in self.fragments] for page in places], sizes)
            out += [result in good for result in results]
        return out


def key_of(name: str) -> bytes:
    """32 bytes for an engine's name of a page: its bytes, if it is a hash of as many in hexadecimal."""
    try:
        key = bytes.fromhex(name) if len(name) == 64 and name == name.lower() else b""
    except ValueError:
        key = b""
    return key if len(key) == 32 else hashlib.sha256(b"ucm page " + name.encode()).digest()
