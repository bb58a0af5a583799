"""The kind of KV cache that sparse decoding needs, and vLLM's manager of it. A request need not have pages for blocks that
the daemon keeps.

vLLM asks its manager, for each request and step, which blocks are no longer needed, and how many pages a request needs.
SparseScheduler answers, and the manager here puts vLLM's null block in place of pages. It manages requests that are not
sparse as vLLM does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Optional

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from .sparse_scheduler import SparseScheduler

#: By the spec's id, which connector and manager get from vLLM as the same object.
_schedulers: weakref.WeakValueDictionary[int, SparseScheduler] = weakref.WeakValueDictionary()

#: More pages than there are, so that vLLM preempts the request.
_NEVER = 1 << 40


@dataclass(frozen=True, kw_only=True)
class SparseSpec(FullAttentionSpec):
    """Full attention whose older blocks may lie in the daemon only."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> SparseSpec:
        return cls(**{field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec) if field.init})


class SparseManager(FullAttentionManager):
    def __init__(self, kv_cache_spec: SparseSpec, *args: Any, **named: Any):
        super().__init__(kv_cache_spec, *args, **named)
        self._scheduler: Optional[SparseScheduler] = _schedulers.get(id(kv_cache_spec))
        if self._scheduler is None:
            raise RuntimeError("a sparse KV cache without UcmConnector, or with a second engine's in this process")

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], total_computed_tokens: int,
        num_local_computed_tokens: int, *args: Any, **named: Any,
    ) -> int:
        if self._scheduler.lost(request_id) and self.req_to_blocks.get(request_id):
            return _NEVER
        n = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, *args, **named
        )
        if self.req_to_blocks.get(request_id):
            return n
        return n - self._holes(request_id, len(new_computed_blocks), total_computed_tokens - num_local_computed_tokens)

    def _holes(self, request_id: str, local: int, external_tokens: int) -> int:
        """How many blocks need no pages, if so many tokens will be loaded after `local` blocks that have pages."""
        return max(0, self._scheduler.needs_no_pages(request_id, local, external_tokens) - local)

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int, *args: Any, **named: Any
    ) -> None:
        blocks = self.req_to_blocks[request_id]
        holes = self._holes(request_id, len(blocks), num_external_computed_tokens)
        blocks.extend([self._null_block] * holes)
        self._scheduler.counts.spared += holes
        super().allocate_external_computed_blocks(
            request_id, num_local_computed_tokens, num_external_computed_tokens, *args, **named
        )

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: Any, **named: Any) -> None:
        first, end = self._scheduler.give_back(request_id, processed_computed_tokens)
        blocks = self.req_to_blocks[request_id] if first < end else []
        freed = []
        for i in range(min(end, len(blocks)) - 1, first - 1, -1):
            if not blocks[i].is_null:
                freed.append(blocks[i])
                blocks[i] = self._null_block
        self._scheduler.counts.given_back += len(freed)
        if freed:
            self.block_pool.free_blocks(freed)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **named: Any) -> None:
        super().cache_blocks(request, self._scheduler.cacheable(request, num_tokens), *args, **named)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self._scheduler.freed(request_id)
        return super().pop_blocks_for_free(request_id)


def serve(group: Any, scheduler: SparseScheduler) -> None:
    """Makes the manager of this group of layers ask this scheduler. Call it before vLLM makes the manager."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(SparseSpec, SparseManager, uniform_type_base_spec=FullAttentionSpec)
    _schedulers[id(group.kv_cache_spec)] = scheduler
