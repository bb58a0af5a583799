"""Decode context parallelism: ranks with the same heads hold a block's tokens in turn. So each of them holds a part of the block, and a
block has as many times more tokens (docs/vllm.md, "Ranks"). Reads vLLM's configuration objects by attribute, without importing vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from .identity import Ranks, Unsupported, ranks_of
from .settings import Settings


@dataclass(frozen=True)
class Context:
    #: How many ranks hold the tokens of the same heads.
    ranks: int = 1
    #: Tokens that follow one another on a rank.
    run: int = 1

    @property
    def name(self) -> dict[str, Any]:
        """For the identity."""
        return {"context": [self.ranks, self.run]} if self.ranks > 1 else {}


def context_of(config: Any, kv_cache_config: Any) -> Context:
    parallel = config.parallel_config
    ranks = getattr(parallel, "decode_context_parallel_size", 1)
    if ranks == 1 or not getattr(kv_cache_config.kv_cache_groups[0].kv_cache_spec, "dcp_sharded", True):
        return Context()
    older = getattr(parallel, "dcp_kv_cache_interleave_size", 1)  # counts if it is set
    return Context(ranks, older if older > 1 else getattr(parallel, "cp_kv_cache_interleave_size", 1))


def check_context(config: Any, groups: Optional[Sequence[Any]], settings: Settings) -> None:
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) == 1:
        return
    if groups is not None:
        raise Unsupported(
            "decode context parallelism is not supported for models with several kinds of KV cache: use --decode-context-parallel-size 1"
        )
    used = {"sparse": settings.sparse is not None, "summaries": settings.summaries is not None, "head_groups": settings.head_groups > 0}
    for name in (name for name, is_used in used.items() if is_used):
        raise Unsupported(
            f'{name}: not supported with decode context parallelism: use --decode-context-parallel-size 1, or remove the setting "{name}"'
        )


def context_ranks(config: Any, kv_cache_config: Any, tp_rank: int, context: Context) -> Ranks:
    """As ranks_of, which this is without context parallelism."""
    if context.ranks == 1:
        return ranks_of(config, kv_cache_config, tp_rank)
    size = config.parallel_config.tensor_parallel_size
    same = _same_heads(config.model_config, size, context.ranks)
    return Ranks(
        part=tp_rank // same * context.ranks + tp_rank % context.ranks,
        parts=size // same * context.ranks,
        writes=tp_rank % same < context.ranks,
    )


def _same_heads(model: Any, size: int, ranks: int) -> int:
    """How many neighbouring tensor-parallel ranks have the same heads: at least those of one context."""
    if getattr(model, "use_mla", False):
        return size
    heads = model.get_total_num_kv_heads() if hasattr(model, "get_total_num_kv_heads") else 0
    same = size // heads if heads and size % heads == 0 else ranks
    return same if same % ranks == 0 else ranks
