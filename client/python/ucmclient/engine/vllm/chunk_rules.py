"""The setting `chunks`: which engines can have it, and where K lies in their pages (docs/blend.md).

Reads vLLM's configuration objects by attribute, without importing vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from ...blend.chunks import LAYOUT
from ...region import Rope
from .chunk_rope import REMEDY, Rerotation, rerotation_of
from .drafts import drafts_of
from .identity import EngineIdentity, Unsupported, heads_of
from .layout import Fragment, Heads, Layout, axes_of, kind_of, layout_of
from .settings import Settings

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Attention backends that keep a token's channels of a head side by side.
ROWS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"}
#: The backend of CPUs, and instruction sets. For these it keeps K of a head with the tokens of a channel side by side, and V after it.
COLUMNS, _COLUMN_SETS = "CPU_ATTN", ("vec", "vec16")


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
        "encoding": settings.encoding != "none", "summaries": settings.summaries is not None, "sparse": settings.sparse is not None,
        "head_groups": settings.head_groups > 0, "gather_loads": settings.gather_loads, "layer_stores": settings.layer_stores > 0,
    }
    for name in (name for name, used in beside.items() if used):
        yield f"alongside {name}", f'remove the setting "{name}"'


def chunk_settings(settings: Settings) -> Settings:
    """Settings of the half that loads and stores chunks. It uses no lookup table and no events, which are about prefixes."""
    return replace(settings, lookup_table=False, block_metadata=False)


# ---- where K lies ----


@dataclass(frozen=True)
class Rerotated:
    """How a worker's pages hold chunks. rope: of the model, with the rows of a block."""

    layout: Layout
    rerotation: Rerotation
    rope: Rope


def in_columns(backends: Sequence[str], instructions: str) -> bool:
    """Whether the engine keeps the tokens of a channel side by side, or the channels of a token. backends: names of its attention backends. instructions: what
    vLLM's kernels for CPUs are made for; anything if they are not used."""
    if not backends:
        raise Unsupported(f"chunks: this vLLM does not say which attention backend keeps K: take another version, {REMEDY}")
    if set(backends) == {COLUMNS} and instructions in _COLUMN_SETS:
        return True
    others = sorted(set(backends) - ROWS)
    if others:
        what = f"{others[0]} for {instructions}" if others[0] == COLUMNS else ", ".join(others)
        raise Unsupported(
            f"chunks: how the attention backend {what} keeps K is not known; of {', '.join(sorted(ROWS))}, and {COLUMNS} for {' and '.join(_COLUMN_SETS)}, it "
            f"is: start with another --attention-backend or --dtype, {REMEDY}"
        )
    return False


def shifted(config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], columns: bool) -> Rerotated:
    """columns: in_columns(). Each layer is stored apart, since K lies in each of them."""
    of, blocks, rerotation = heads_of(kv_cache_config, "chunks"), kv_cache_config.num_blocks, rerotation_of(config)
    try:
        layout = layout_of(kv_caches, blocks, apart=True)
    except ValueError as error:
        raise Unsupported(f"chunks: {error}: take another model, {REMEDY}") from None
    tensors = {layout.numbers[name]: tensor for name, tensor in kv_caches.items()}
    place = _in_columns if columns else _in_rows
    ropes = {place(rerotation.rope, tensors[number], layout.layers[number], blocks, of) for number in tensors}
    if len(ropes) > 1:
        raise Unsupported(f"chunks: layers keep K in different ways: take another model, {REMEDY}")
    return Rerotated(layout, rerotation, ropes.pop())


def _not_found(tensor: Any, of: Heads) -> Unsupported:
    return Unsupported(
        f"chunks: the connector can't tell where K lies in a KV tensor of {kind_of(tensor)}, shape {tuple(tensor.shape)} and strides "
        f"{tuple(tensor.stride())}, with {of.heads} heads of {of.dim} and blocks of {of.tokens} tokens: use another attention backend or --block-size, {REMEDY}"
    )


def _in_columns(rope: Rope, tensor: Any, fragments: Sequence[Fragment], blocks: int, of: Heads) -> Rope:
    """A row is a head of a kernel's block: K and V of its tokens."""
    shape, kind = tuple(tensor.shape), kind_of(tensor)
    tokens = shape[2] if len(shape) == 4 else 0
    kernel = shape[0] // blocks
    if (
        kind not in _DTYPES or not of.values or of.dim != rope.dim or shape[1:] != (of.heads, tokens, 2 * of.dim) or tokens * kernel != of.tokens
        or [one.size for one in fragments] != [kernel * of.heads * tokens * 2 * of.dim * tensor.element_size()]
        or tuple(tensor.stride())[1:] != (tokens * 2 * of.dim, 2 * of.dim, 1)
    ):
        raise _not_found(tensor, of)
    return replace(rope, rows=kernel * of.heads, dim=2 * of.dim, run=tokens, dtype=_DTYPES[kind])


def _in_rows(rope: Rope, tensor: Any, fragments: Sequence[Fragment], blocks: int, of: Heads) -> Rope:
    """K first, all rows of a block side by side. A block is re-rotated as one, so it does not matter which rows are tokens and which are heads."""
    axes, kind = axes_of(tensor, blocks, of), kind_of(tensor)
    rows = of.tokens * of.heads
    row = of.dim * (axes.pair if axes is not None else 1)
    kernels = ((axes.kernel_stride, axes.kernel),) if axes is not None and axes.kernel > 1 else ()
    if (
        axes is None or not of.values or kind not in _DTYPES or of.dim != rope.dim
        or axes.outer[: len(kernels)] != kernels or [n for _, n in axes.outer[len(kernels) :]] != [2] * (axes.pair == 1)
        or fragments[0].size < rows * row * tensor.element_size()
    ):
        raise _not_found(tensor, of)
    return replace(rope, rows=rows, dim=row, dtype=_DTYPES[kind])


def with_chunks(identity: EngineIdentity, of: Rerotated) -> EngineIdentity:
    """The engine's identity, with that of its chunks: their own layout, and keys of 32 bytes."""
    layout = of.layout
    chunks = replace(
        identity, layout=layout.name[: 256 - len(LAYOUT)] + LAYOUT, key_bytes=32, layers=(len(layout.layers),), layer_bytes=layout.layer_bytes
    )
    return replace(identity, chunks=chunks)
