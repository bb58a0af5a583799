"""LMCache's L2 adapter on ucmd: --l2-adapter of type "plugin" with this class (docs/engines.md).

An object is a block of one layer. Its key is all of LMCache's: chunk hash, model, rank, object group, cache salt. Its namespace has the model's name
and the object's size. At a lookup LMCache does not tell an object's size, or only a guess of it. So the adapter looks where objects of this kind
were stored, and where the guess says.

LMCache's locks are leases, so what a lookup found is there when LMCache loads, until `_LEASE` is over. Results wait until LMCache takes them."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from ..pages import settings_of
from ..places import Full, Movers, PlaceStore
from ..vllm.identity import EngineIdentity

logger = logging.getLogger("ucmclient.engine.lmcache")
#: Seconds that a lookup keeps what it found.
_LEASE = 60.0
#: Sizes of one kind of objects, and namespaces in all.
_SIZES, _STORES = 4, 32
#: From so many locked keys on, those whose leases are over are forgotten.
_LOCKED = 1 << 16
#: Bytes of an object: the most that the daemon takes as one layer.
_LARGEST = 256 << 20


def key_of(key: Any) -> bytes:
    parts = (key.chunk_hash, key.model_name.encode(), str(key.kv_rank).encode(), str(key.object_group_id).encode(), key.cache_salt.encode())
    digest = hashlib.sha256(b"ucm lmcache/1 ")
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


class _Lock:
    """Leases of one lookup, until as many keys as it found are unlocked."""

    def __init__(self, store: PlaceStore, leases: Sequence[Any], keys: int):
        self.store, self.leases, self.keys, self.until = store, leases, keys, time.monotonic() + _LEASE


class UcmL2Adapter(L2AdapterInterface):
    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None):
        """params: adapter_params of the plugin's configuration."""
        super().__init__()
        self._settings = settings_of(params, "adapter_params")
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._movers, self._lookers = Movers("lmcache", 2), Movers("lmcache-lookup", 1)
        #: Held while what follows changes.
        self._mutex = threading.Lock()
        #: Held while a namespace is opened, which waits for the daemon.
        self._opening = threading.Lock()
        self._next, self._done = 0, [{}, {}, {}]
        self._stores: dict[tuple[str, int], PlaceStore] = {}
        self._sizes: dict[tuple[str, int, int], list[int]] = {}
        self._locks: dict[bytes, list[_Lock]] = {}

    # ---- tasks: 0 stores, 1 lookups, 2 loads ----

    def get_store_event_fd(self) -> int:
        return self._notifiers[0].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._notifiers[1].fileno()

    def get_load_event_fd(self) -> int:
        return self._notifiers[2].fileno()

    def _submit(self, kind: int, movers: Movers, failed: Any, work: Callable[..., Any], *args: Any) -> int:
        with self._mutex:
            self._next += 1
            number = self._next

        def run() -> None:
            try:
                result = work(*args)
            except Exception as error:
                logger.error("ucmd: %s", error)
                result = failed
            self._end(kind, number, result)
        try:
            movers.start(run)
        except Full as error:
            logger.warning("ucmd: %s", error)
            self._end(kind, number, failed)
        return number

    def _end(self, kind: int, number: int, result: Any) -> None:
        with self._mutex:
            self._done[kind][number] = result
        self._notifiers[kind].notify()

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(0, self._movers, L2StoreResult(False, 0), self._store_all, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._mutex:
            done, self._done[0] = self._done[0], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        return self._submit(1, self._lookers, Bitmap(len(keys)), self._look, keys, group_layout_descs)

    def query_lookup_and_lock_result(self, task_id: int) -> Optional[Bitmap]:
        with self._mutex:
            return self._done[1].pop(task_id, None)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(2, self._movers, Bitmap(len(keys)), self._load_all, keys, objects)

    def query_load_result(self, task_id: int) -> Optional[Bitmap]:
        with self._mutex:
            return self._done[2].pop(task_id, None)

    # ---- where objects are ----

    def _store_of(self, model: str, size: int) -> PlaceStore:
        with self._opening:
            store = self._stores.get((model, size))
            if store is None:
                if not 0 < size <= _LARGEST:
                    raise ValueError(f"an object of {size} bytes: up to {_LARGEST} are right, with a smaller --chunk-size")
                if len(self._stores) >= _STORES:
                    raise ValueError(f"objects of model {model} with {size} bytes: there are {_STORES} models and sizes already")
                identity = EngineIdentity(
                    model=model[:256] or "unnamed", dtype="bytes", layout="lmcache/1", block_tokens=1, layer_bytes=size, layers=(1,),
                    revision=self._settings.revision or "", salt=self._settings.salt.encode(),
                )
                store = self._stores[model, size] = PlaceStore(self._settings, identity, [size], "lmcache")
            return store

    def _by_store(self, keys: Sequence[Any], sizes: Sequence[int]) -> list[tuple[int, PlaceStore, list[int]]]:
        """Which of the keys lie in which store; notes their sizes."""
        out: dict[tuple[str, int], list[int]] = {}
        for i, (key, size) in enumerate(zip(keys, sizes)):
            out.setdefault((key.model_name, size), []).append(i)
            with self._mutex:
                seen = self._sizes.setdefault((key.model_name, key.kv_rank, key.object_group_id), [])
                if size not in seen:
                    seen.insert(0, size)
                    del seen[_SIZES:]
        return [(size, self._store_of(model, size), which) for (model, size), which in out.items()]

    def _sizes_of(self, key: Any, layouts: dict[int, Any]) -> list[int]:
        with self._mutex:
            seen = list(self._sizes.get((key.model_name, key.kv_rank, key.object_group_id), ()))
        layout = layouts.get(key.object_group_id)
        if layout is not None:
            hint = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes))
            return [*seen, hint] if hint and hint not in seen else seen
        return seen

    def _found(self, keys: Sequence[Any], layouts: dict[int, Any], seconds: float) -> dict[int, int]:
        """The sizes of the keys that are there. seconds: of leases, which submit_unlock ends."""
        asked: dict[tuple[str, int], list[int]] = {}
        for i, key in enumerate(keys):
            for size in self._sizes_of(key, layouts):
                asked.setdefault((key.model_name, size), []).append(i)
        there: dict[int, int] = {}
        for (model, size), which in asked.items():
            store, which = self._store_of(model, size), [i for i in which if i not in there]
            names = [key_of(keys[i]) for i in which]
            good, leases = store.hold(names, seconds)
            there.update((i, size) for i, one in zip(which, good) if one)
            lock = _Lock(store, leases, sum(good))
            with self._mutex:
                for name, one in zip(names, good):
                    if one and leases:
                        self._locks.setdefault(name, []).append(lock)
                if len(self._locks) > _LOCKED:
                    now = time.monotonic()
                    self._locks = {name: live for name, held in self._locks.items() if (live := [one for one in held if one.until > now])}
        return there

    # ---- the work, on threads of this adapter ----

    def _store_all(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        moved, kept = 0, True
        for size, store, which in self._by_store(keys, [one.get_size() for one in objects]):
            there = store.each([key_of(keys[i]) for i in which])
            new = [i for i, one in zip(which, there) if not one]
            good = store.save([key_of(keys[i]) for i in new], store.plan([0] * len(new), [[objects[i].data_ptr] for i in new])) if new else []
            stored = [keys[i] for i, one in zip(new, good) if one]
            moved, kept = moved + size * len(stored), kept and all(good)
            if stored:
                self._notify_keys_stored(stored, [size] * len(stored))
        return L2StoreResult(kept, moved)

    def _look(self, keys: Sequence[Any], layouts: dict[int, Any]) -> Bitmap:
        out, there = Bitmap(len(keys)), self._found(keys, layouts, _LEASE)
        for i in there:
            out.set(i)
        if there:
            self._notify_keys_accessed([keys[i] for i in there])
        return out

    def _load_all(self, keys: Sequence[Any], objects: Sequence[Any]) -> Bitmap:
        out = Bitmap(len(keys))
        for _, store, which in self._by_store(keys, [one.get_size() for one in objects]):
            good = store.load([key_of(keys[i]) for i in which], store.plan([0] * len(which), [[objects[i].data_ptr] for i in which]))
            for i, one in zip(which, good):
                if one:
                    out.set(i)
        return out

    # ---- the rest of the interface ----

    def submit_unlock(self, keys: list[Any]) -> None:
        over: list[_Lock] = []
        with self._mutex:
            for name in map(key_of, keys):
                held = self._locks.get(name)
                if held:
                    lock = held.pop(0)
                    lock.keys -= 1
                    over += [lock] if lock.keys == 0 else []
                    if not held:
                        del self._locks[name]
        for lock in over:
            lock.store.let_go(lock.leases)

    def delete(self, keys: list[Any]) -> None:
        there = self._found(keys, {}, 0.0)
        for size in sorted(set(there.values())):
            gone = [keys[i] for i in there if there[i] == size]
            for model in {key.model_name for key in gone}:
                some = [key for key in gone if key.model_name == model]
                if self._store_of(model, size).drop([key_of(key) for key in some]):
                    self._notify_keys_deleted(some, [size] * len(some))

    def report_status(self) -> dict[str, Any]:
        stores = list(self._stores.values())
        return {"is_healthy": all(store.link.ns is not None for store in stores), "type": type(self).__name__, "namespaces": len(stores)}

    def close(self) -> None:
        self._movers.close()
        self._lookers.close()
        for store in self._stores.values():
            store.close()
        for notifier in self._notifiers:
            notifier.close()
