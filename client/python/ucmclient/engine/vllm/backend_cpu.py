"""The attention backend of sparse decoding on a CPU: backend.py says what it promises. If all blocks of a request have pages, its dense
tokens are attended with vLLM's own tables. Otherwise they are attended over copies of its blocks in one array. Sparse tokens go to
SparseWorker."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

from .sparse_layer import check_layer, spec_of
from .sparse_worker import Row, SparseWorker, worker_of

#: What this vLLM's function takes: it differs from version to version.
_SCHEDULE = frozenset(inspect.signature(ops.cpu_attn_get_scheduler_metadata).parameters)


class SparseBackend(CPUAttentionBackend):
    """It has its base's name, since it keeps blocks as that does, and the name is in the namespace's identity. So engines with and without
    `sparse` share dense blocks if both store a block's layers one by one (docs/vllm.md, "Which engines share blocks")."""

    attends_sparsely = True

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec_of(super().customize_spec(spec))


class SparseImpl(CPUAttentionBackendImpl):
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Optional[list[float]],
        sliding_window: Optional[int], kv_cache_dtype: str, logits_soft_cap: Optional[float] = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: Optional[str] = None, sinks: Any = None, **more: Any,
    ):
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, sinks, **more,
        )
        check_layer(
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap, sinks=sinks,
            attn_type=attn_type, kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )

    def forward(
        self, layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: torch.Tensor, attn_metadata: Any,
        output: torch.Tensor, *args: Any, **named: Any,
    ) -> torch.Tensor:
        known = None if attn_metadata is None else worker_of(kv_cache)
        rows = None if known is None else _rows(known[0], attn_metadata)
        if known is None or rows is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **named)
        worker, number = known
        together = [row for row in rows if row.first < row.dense_end and worker.has_pages(row)]
        if together:
            table = attn_metadata.block_table[[row.index for row in together]]
            self._dense(layer, query, kv_cache, attn_metadata, output, together, table)
        for row in rows:
            if row.first < row.dense_end and not worker.has_pages(row):
                blocks = worker.gathered(number, row)
                table = torch.arange(len(blocks), dtype=attn_metadata.block_table.dtype)[None]
                self._dense(layer, query, blocks, attn_metadata, output, [row], table)
        worker.attend(number, rows, query, output, self.scale)
        return output

    def _dense(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, of: CPUAttentionMetadata, output: torch.Tensor,
        rows: Sequence[Row], table: torch.Tensor,
    ) -> None:
        """The dense tokens of these rows, by the platform."""
        counts = [row.dense_end - row.first for row in rows]
        at = torch.cat([torch.arange(row.q, row.q + n) for row, n in zip(rows, counts)])
        starts = torch.tensor([0, *counts]).cumsum(0).to(of.query_start_loc.dtype)
        lengths = torch.tensor([row.dense_end for row in rows], dtype=of.seq_lens.dtype)
        known = {
            "num_reqs": len(rows), "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_size,
            "seq_lens": lengths, "dtype": query.dtype, "query_start_loc": starts, "causal": True, "sliding_window_size": -1,
            "isa": getattr(layer, "isa", None) or self.isa, "enable_kv_split": envs.VLLM_CPU_ATTN_SPLIT_KV,
            "dynamic_causal": None, "kv_cache_dtype": self.kv_cache_dtype,
        }
        scheduled = ops.cpu_attn_get_scheduler_metadata(**{name: known[name] for name in _SCHEDULE & known.keys()})
        batch = replace(
            of, num_actual_tokens=len(at), max_query_len=max(counts), query_start_loc=starts, max_seq_len=max(row.dense_end for row in rows),
            seq_lens=lengths, block_table=table.contiguous(), scheduler_metadata=scheduled,
        )
        q = query[at].contiguous()
        out = torch.empty_like(q)
        super().forward(layer, q, None, None, kv_cache, batch, out)
        output[at] = out


def _rows(worker: SparseWorker, of: CPUAttentionMetadata) -> Optional[list[Row]]:
    return worker.rows(of, of.query_start_loc.tolist(), of.seq_lens.tolist(), of.block_table)

