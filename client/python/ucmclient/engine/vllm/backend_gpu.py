"""The attention backend of sparse decoding on a GPU: FlashAttention as vLLM has it, except for tokens that a policy makes sparse.

A layer has two forms. If each request has one token, the host decides nothing: the GPU finds out which requests are sparse. So the
layer runs the same eagerly and in a CUDA graph of vLLM's (FULL_DECODE_ONLY). Other batches (prompts, requests that are computed
again) run eagerly, and their sparse tokens wait for what they need, layer by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from .sparse_gpu import worker_of
from .sparse_layer import check_layer, setting, spec_of

#: What vLLM prepared for the whole batch and a part of it must not use.
_OF_THE_WHOLE = {"scheduler_metadata": None}


class SparseBackend(FlashAttentionBackend):
    """It has its base's name, since it keeps blocks as that does, and the name is in the namespace's identity. But with `sparse` a
    block's layers are stored one by one. Engines without it share dense blocks only if they do so, too (docs/vllm.md, "Which
    engines share blocks"). By default a plain engine asks vLLM for all layers of a block side by side, and stores them as one."""

    attends_sparsely = True

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseBuilder]:
        return SparseBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec_of(super().customize_spec(spec))


class SparseBuilder(FlashAttentionMetadataBuilder):
    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if setting(vllm_config) is None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class SparseImpl(FlashAttentionImpl):
    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **named: Any):
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **named)
        check_layer(
            alibi_slopes=self.alibi_slopes, sliding_window=None if self.sliding_window == (-1, -1) else self.sliding_window,
            logits_soft_cap=self.logits_soft_cap, sinks=self.sinks, attn_type=self.attn_type,
            kv_sharing_target_layer_name=self.kv_sharing_target_layer_name,
        )

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *args: Any, **named: Any
    ) -> Any:
        known = None if attn_metadata is None else worker_of(kv_cache)
        if known is None or not known[0].has_work(attn_metadata.max_query_len):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **named)
        worker, number = known
        if attn_metadata.max_query_len == 1:
            dense = worker.uniform(number, attn_metadata.block_table, attn_metadata.seq_lens)
            batch = replace(attn_metadata, seq_lens=dense, **_OF_THE_WHOLE)
            super().forward(layer, query, key, value, kv_cache, batch, output, *args, **named)
            worker.attend_uniform(number, query, output, attn_metadata.block_table)
            return output
        rows = worker.rows(attn_metadata, attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table)
        if rows.all_dense:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **named)
        if rows.dense is not None:
            self._dense(layer, query, kv_cache, attn_metadata, output, rows.dense)
        worker.attend_rows(number, rows, query, output)
        return output

    def _dense(self, layer: Any, query: Any, kv_cache: Any, of: FlashAttentionMetadata, output: Any, dense: Any) -> None:
        """The dense tokens of these rows."""
        batch = replace(
            of, num_actual_tokens=dense.tokens, max_query_len=dense.longest, query_start_loc=dense.starts, max_seq_len=dense.end,
            seq_lens=dense.lengths, block_table=of.block_table[dense.rows], **_OF_THE_WHOLE,
        )
        q = query[dense.at]
        out = q.new_empty(q.shape)
        super().forward(layer, q, q, q, kv_cache, batch, out)
        output[dense.at] = out
