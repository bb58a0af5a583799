"""UCM's store V1 on ucmd, by "ucm_connector_module_path" or ucmclient.engine.ucm.register() (docs/engines.md).

A block is kept under its id. UCM cuts it into block_size / shard_size shards, each of which is a layer of the daemon's. A block is found when all of
them are there. The id is all that UCM says of what a block holds, so engines share by it. What the id leaves out (weights, type of the KV cache, its
layout) belongs into model, revision or salt.

Written for UCM 0.8.1 and older versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

from ...memory import data_pointer
from .core import WHERE, NotThere, Refused, Store, Unhealthy, logger, own_of

try:  # UCM 0.8 remembers blocks that one of its ranks did not find, and continues without a store that is away
    from ucm.store.pipeline.errors import StoreNotFoundError, StoreUnhealthyError
except ImportError:
    StoreNotFoundError = StoreUnhealthyError = RuntimeError

#: Tasks that move at once. While the daemon copies for one, it gets the next ones.
_THREADS = 4
#: UCM pads its shards to this for its own files.
_PADS = 4096


@dataclass
class UcmdTask(Task):
    task_id: int
    future: Future


def _shape(config: Mapping[str, Any], own_bytes: Optional[int], shards: Optional[int]) -> tuple[int, int, list[int]]:
    """Bytes of a block, UCM's shards of it, and the sizes of a shard's pieces. own_bytes, shards: what the user says."""
    block, shard = int(config.get("block_size") or 0), int(config.get("shard_size") or 0)
    sizes = [int(size) for size in config.get("tensor_size_list") or ()]
    block = block if shard else own_bytes or block
    if block < 1:
        raise Refused(f"block_size must be the bytes of a block, not {config.get('block_size')!r}. UCM tells it no scheduler but the first of data-"
                      f'parallel ones: set "block_bytes" in {WHERE}, to what a worker\'s log says of its store')
    shard = shard or block // (shards or 1)
    if not shard or block % shard or (shards or block // shard) != block // shard:
        raise Refused(f"blocks of {block} bytes in shards of {shard}, and {shards or 'no'} \"shards\" in {WHERE}: shards of equal size, and their "
                      "number, are right")
    if not sizes:
        sizes = [int(config["tensor_size"])] * (shard // int(config["tensor_size"])) if config.get("tensor_size") else [shard]
    pads = shard - sum(sizes)
    if pads and (shard % _PADS or not 0 < pads < _PADS):
        raise Refused(f"tensors of {sum(sizes)} bytes in all, and shard_size {shard}: as many are right")
    shards, whole = block // shard, sum(sizes) * (block // shard)
    if own_bytes not in (None, whole):
        raise Refused(f'"block_bytes" in {WHERE} is {own_bytes}, and this store\'s blocks have {whole}')
    return whole, shards, sizes


def _own_bytes(told: Any, group: str) -> Optional[int]:
    """What the user says of a block, for this group of layers."""
    told = told.get(group) if isinstance(told, Mapping) else told
    if told is not None and (not isinstance(told, int) or isinstance(told, bool) or told < 1):
        raise Refused(f'"block_bytes" in {WHERE} must be a number, 1 or more, or {{"fa": one, "wa": one}}, not {told!r}')
    return told


def _tell(config: Mapping[str, Any], block: int, shards: int) -> None:
    """Warns if a scheduler's store will find nothing, since UCM tells it only the padded bytes of a block."""
    own, lacks = config.get("ucmd") or {}, []
    if shards > 1 and "shards" not in own:
        lacks.append(f'"shards": {shards}')
    if block != int(config.get("block_size") or 0) and "block_bytes" not in own:
        lacks.append(f'"block_bytes": {block}')
    if config.get("shard_size") and lacks:
        logger.warning("a scheduler's store knows block_size only, and does not find this store's blocks: set %s in %s", ", ".join(lacks), WHERE)


class UcmdStore(UcmKVStoreBaseV1):
    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        own, model, shards = own_of(config)
        # Windows' blocks have the ids of full attention's, in a store of their own: "wa" next to "fa".
        group = (str(config.get("unique_id", "")).split("_fawa_") + [""])[1]
        block, shards, sizes = _shape(config, _own_bytes(own.pop("block_bytes", None), group), shards)
        _tell(config, block, shards)
        self._store = Store(own, model, block, shards, sizes, _THREADS, group)
        self.close = self._store.close

    def cc_store(self) -> int:
        raise RuntimeError("ucmd's store has no C++ object: what wants one needs a store of UCM's own")

    def lookup(self, block_ids: list[bytes]) -> list[bool]:
        return self._store.found(block_ids)

    def lookup_on_prefix(self, block_ids: list[bytes]) -> int:
        return self._store.prefix(block_ids) - 1

    def lookup_on_reverse(self, block_ids: list[bytes]) -> int:
        return max((i for i, there in enumerate(self._store.found(block_ids)) if there), default=-1)

    def prefetch(self, block_ids: list[bytes]) -> None:
        self._store.fetch(block_ids)

    def load(self, block_ids: list[bytes], shard_index: list[int], dst_tensor: Sequence[Sequence[Any]]) -> Task:
        return self.load_data(block_ids, shard_index, _addresses(dst_tensor))

    def dump(self, block_ids: list[bytes], shard_index: list[int], src_tensor: Sequence[Sequence[Any]]) -> Task:
        return self.dump_data(block_ids, shard_index, _addresses(src_tensor))

    def load_data(self, block_ids: list[bytes], shard_index: list[int], dst_addr: Any) -> Task:
        return self._start("load", block_ids, shard_index, dst_addr)

    def dump_data(self, block_ids: list[bytes], shard_index: list[int], src_addr: Any, prerequisite_handle: int = 0) -> Task:
        return self._start("save", block_ids, shard_index, src_addr, prerequisite_handle)

    def _start(self, verb: str, blocks: list[bytes], shards: Sequence[int], rows: Any, event: int = 0) -> Task:
        # Some of UCM's callers name no shards if a block has only one.
        return UcmdTask(*self._store.start(verb, blocks, shards if len(shards) else [0] * len(blocks), rows, event))

    def wait(self, task: Task) -> None:
        try:
            self._store.end(task.task_id, task.future)
        except NotThere as error:
            raise StoreNotFoundError(str(error)) from error
        except Unhealthy as error:
            raise StoreUnhealthyError(str(error)) from error

    def check(self, task: Task) -> bool:
        return task.future.done()


def _addresses(tensors: Sequence[Sequence[Any]]) -> Any:
    return np.array([[data_pointer(tensor) for tensor in row] for row in tensors], dtype=np.uint64)
