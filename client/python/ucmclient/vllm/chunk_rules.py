"""The setting `chunks`: which engines can have it, and where K lies in their pages (docs/vllm.md, "Chunks").

Reads vLLM's configuration objects by attribute, without importing vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from ..blend.chunks import LAYOUT
from ..region import Rope
from .chunk_rope import REMEDY, Turning, turning_of
from .drafts import drafts_of
from .identity import EngineIdentity, Unsupported, heads_of
from .layout import Chunk, Heads, Layout, axes_of, kind_of, layout_of
from .settings import Settings

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Attention backends that keep a token's channels of a head side by side.
ROWS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"}


def check_chunks(settings: Settings, config: Any, groups: Optional[Sequence[Any]]) -> None:
    if settings.chunks:
        for why, remedy in _reasons(settings, config, groups):
            raise Unsupported(f"chunks: not supported {why}: {remedy}, {REMEDY}")


def _reasons(settings: Settings, config: Any, groups: Optional[Sequence[Any]]) -> Iterator[tuple[str, str]]:
    if groups is not None:
        yield "for models with several kinds of KV cache", "--disable-hybrid-kv-cache-manager makes it one"
    if getattr(config.model_config, "use_mla", False):
        yield "for MLA, which is not tried", "take another model"
    for kind in ("pipeline", "decode_context", "prefill_context"):
        if getattr(config.parallel_config, f"{kind}_parallel_size", 1) > 1:
            yield f"with {kind.replace('_', ' ')} parallelism", f"use --{kind.replace('_', '-')}-parallel-size 1"
    if drafts_of(config) is not None:
        yield "with draft layers or a draft model", "start without speculative decoding"
    if str(config.cache_config.cache_dtype) not in ("auto", *_DTYPES):
        yield f"for a KV cache of {config.cache_config.cache_dtype}", "start with --kv-cache-dtype auto"
    if not settings.async_load:
        yield "with loads within the step", "set async_load to true"
    beside = {
        "encoding": settings.encoding != "none", "digests": settings.digests is not None, "sparse": settings.sparse is not None,
        "head_groups": settings.head_groups > 0, "gather_loads": settings.gather_loads, "layer_stores": settings.layer_stores > 0,
    }
    for name in (name for name, used in beside.items() if used):
        yield f"beside {name}", f'remove the setting "{name}"'


def chunk_settings(settings: Settings) -> Settings:
    """Of the half that loads and stores chunks. Hints and events are about prefixes."""
    return replace(settings, hints=False, describe=False)


# ---- where K lies ----


@dataclass(frozen=True)
class Turned:
    """How a worker's pages hold chunks. rope: the model's, with the rows of a block."""

    layout: Layout
    turning: Turning
    rope: Rope


def turned(config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], backends: Sequence[str]) -> Turned:
    """backends: names of the engine's attention backends. A layer is a shard, since K lies in each of them."""
    others = sorted(set(backends) - ROWS)
    if others:
        raise Unsupported(
            f"chunks: the attention backend {', '.join(others)} may not keep a token's channels side by side (vLLM's kernels for CPUs don't): "
            f"start with --attention-backend and one of {', '.join(sorted(ROWS))}, {REMEDY}"
        )
    of, blocks, turning = heads_of(kv_cache_config, "chunks"), kv_cache_config.num_blocks, turning_of(config)
    try:
        layout = layout_of(kv_caches, blocks, apart=True)
    except ValueError as error:
        raise Unsupported(f"chunks: {error}: take another model, {REMEDY}") from None
    tensors = {layout.numbers[name]: tensor for name, tensor in kv_caches.items()}
    ropes = {_placed(turning.rope, tensors[number], layout.layers[number], blocks, of) for number in tensors}
    if len(ropes) > 1:
        raise Unsupported(f"chunks: layers keep K in different ways: take another model, {REMEDY}")
    return Turned(layout, turning, ropes.pop())


def _placed(rope: Rope, tensor: Any, chunks: Sequence[Chunk], blocks: int, of: Heads) -> Rope:
    """K first, all rows of a block side by side: which of them are tokens and which heads does not matter, since a block turns as one."""
    axes, kind = axes_of(tensor, blocks, of), kind_of(tensor)
    rows = of.tokens * of.heads
    row = of.dim * (axes.pair if axes is not None else 1)
    outer = [n for _, n in axes.outer if n > 1] if axes is not None else []
    if (
        axes is None or not of.values or kind not in _DTYPES or of.dim != rope.dim
        or outer != [axes.kernel] * (axes.kernel > 1) + [2] * (axes.pair == 1)
        or chunks[0].size < rows * row * tensor.element_size()
    ):
        raise Unsupported(
            f"chunks: the connector can't tell where K lies in a KV tensor of {kind}, shape {tuple(tensor.shape)} and strides "
            f"{tuple(tensor.stride())}, with {of.heads} heads of {of.dim} and blocks of {of.tokens} tokens: use another attention backend, {REMEDY}"
        )
    return replace(rope, rows=rows, dim=row, dtype=_DTYPES[kind])


def with_chunks(identity: EngineIdentity, of: Turned) -> EngineIdentity:
    """The engine's identity, with that of its chunks: their own layout, and keys of 32 bytes."""
    layout = of.layout
    chunks = replace(
        identity, layout=layout.name[: 256 - len(LAYOUT)] + LAYOUT, key_bytes=32, shards=(len(layout.layers),), shard_bytes=layout.layer_bytes
    )
    return replace(identity, chunks=chunks)
