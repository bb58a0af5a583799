"""UCM's older store on ucmd: fragments of a block by their offsets, and blocks that begin with create() and end with commit().

A fragment is a layer of the daemon's. The daemon finds a block once all its layers are there, so create() reserves nothing and commit() publishes
nothing. A commit that says the block failed drops it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from ucm.store.ucmstore import Task, UcmKVStoreBase

from ...memory import data_pointer
from .core import Refused, Store, own_of


@dataclass
class UcmdTask(Task):
    task_id: int
    future: Future


class UcmdStore(UcmKVStoreBase):
    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        own, model, shards = own_of(config)
        block = int(config.get("kv_block_size") or 0)
        self._fragment = int(config.get("io_size") or block // (shards or 1))
        if block < 1 or block % self._fragment:
            raise Refused(f"kv_block_size {block} and fragments of {self._fragment} bytes: a block of whole fragments is right")
        if shards not in (None, block // self._fragment):
            raise Refused(f"kv_block_size {block} has {block // self._fragment} fragments of io_size {self._fragment}, and \"shards\" says {shards}")
        self._store = Store(own, f"{model}/v0", block, block // self._fragment, [self._fragment], threads=2)
        self.close = self._store.close

    def cc_store(self) -> int:
        raise RuntimeError("ucmd's store has no C++ object: what wants one needs a store of UCM's own")

    def create(self, block_ids: list[str]) -> list[int]:
        return [0 if self._store.places.link.ns is not None else -1] * len(block_ids)

    def commit(self, block_ids: list[str], is_success: bool = True) -> None:
        if not is_success:
            self._store.drop([name.encode() for name in block_ids])

    def lookup(self, block_ids: list[str]) -> list[bool]:
        return self._store.found([name.encode() for name in block_ids])

    def prefetch(self, block_ids: list[str]) -> None:
        self._store.fetch([name.encode() for name in block_ids])

    def load(self, block_ids: list[str], offset: list[int], dst_tensor: Sequence[Any]) -> Task:
        return self.fetch_data(block_ids, offset, *_places(dst_tensor))

    def dump(self, block_ids: list[str], offset: list[int], src_tensor: Sequence[Any]) -> Task:
        return self.dump_data(block_ids, offset, *_places(src_tensor))

    def fetch_data(self, block_ids: list[str], offset: list[int], dst_addr: list[int], size: list[int]) -> Task:
        return self._start("load", block_ids, offset, dst_addr, size)

    def dump_data(self, block_ids: list[str], offset: list[int], src_addr: list[int], size: list[int]) -> Task:
        return self._start("save", block_ids, offset, src_addr, size)

    def _start(self, verb: str, blocks: list[str], offsets: list[int], addresses: list[int], sizes: list[int]) -> Task:
        if any(size != self._fragment for size in sizes) or any(at % self._fragment for at in offsets):
            raise Refused(f"fragments of {sorted(set(sizes))} bytes: whole fragments of io_size {self._fragment}, at multiples of it, are right")
        shards = [at // self._fragment for at in offsets]
        rows = np.array(addresses, dtype=np.uint64)[:, None]
        return UcmdTask(*self._store.start(verb, [name.encode() for name in blocks], shards, rows))

    def wait(self, task: Task) -> int:
        try:
            self._store.end(task.task_id, task.future)
        except RuntimeError:
            return -1
        return 0

    def check(self, task: Task) -> tuple[int, bool]:
        done = task.future.done()
        return (-1 if done and task.future.exception() is not None else 0), done


def _places(tensors: Sequence[Any]) -> tuple[list[int], list[int]]:
    return [data_pointer(tensor) for tensor in tensors], [tensor.numel() * tensor.element_size() for tensor in tensors]
