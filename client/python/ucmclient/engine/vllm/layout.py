"""Where an engine's KV tensors keep each block, from their shapes and strides.

A tensor needs data_ptr(), shape, stride(), element_size(), and may have dtype. Does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Optional

#: Planes of one region (proto/limits.h).
_MAX_PLANES = 2048


@dataclass(frozen=True)
class Fragment:
    """Bytes [address + b * stride, + size) are a piece of block b."""

    address: int
    stride: int
    size: int


@dataclass(frozen=True)
class Heads:
    """What an engine keeps of a layer in a block: K, and V unless it keeps one latent vector (MLA)."""

    tokens: int
    heads: int
    dim: int
    values: bool = True


@dataclass(frozen=True)
class KvTensors:
    """The fragments of each layer as encodings see them (docs/design/encodings.md): tokens, heads, dim of the first one, and of the second one. A
    K/V tensor may hold more than one layer's K, or K and V, as long as each row is of one head."""

    dtype: str
    k: tuple[int, int, int]
    v: Optional[tuple[int, int, int]] = None
    #: 0: token after token; 1: head after head.
    order: int = 0
    #: A block has as many tokens as heads, so that they may be mistaken for each other.
    alike: bool = False
    #: So many tokens' rows of one head and layer follow one another; 0: those of the whole K/V tensor do.
    run: int = 0


@dataclass(frozen=True)
class Layout:
    """The fragments of each layer, in the engine's order. Layouts with different bytes differ in `name`."""

    layers: tuple[tuple[Fragment, ...], ...]
    blocks: int
    layer_bytes: int
    name: str
    #: From the engine's name of a layer to its number.
    numbers: Mapping[str, int]
    #: If they were asked for: what the fragments of a layer hold.
    kv_tensors: Optional[KvTensors] = None


def _block_dimension(shape: Sequence[int], blocks: int) -> int:
    """Which dimension counts blocks: the first that is a multiple of `blocks` (kernel blocks). Only one of K and V may
    precede it."""
    if len(shape) > 1:
        first, second = (n % blocks == 0 and n >= blocks for n in shape[:2])
        # With 2 blocks, [2, blocks, ...] and [blocks, 2, ...] look alike.
        if first and not (shape[0] == 2 and blocks < 2 and second):
            return 0
        if second and shape[0] == 2:
            return 1
    raise ValueError(
        f"a KV tensor of shape {tuple(shape)} is not understood: neither its first dimension, nor the one after K and "
        f"V, counts {blocks} blocks"
    )


def tensor_fragments(tensor: Any, blocks: int) -> list[Fragment]:
    """The pieces of memory of a block: one in all, one each for K and V, or one a head."""
    shape, strides, element = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    d = _block_dimension(shape, blocks)
    if d == 0 and shape[0] == 2 == blocks and shape[1] == 2:
        raise ValueError(f"a KV tensor of shape {shape} is not understood: 2 blocks, or K and V; give it more blocks")
    per_block = shape[d] // blocks  # kernel blocks in a block of the engine's
    inside = [(strides[d], per_block)] + [(strides[i], shape[i]) for i in range(len(shape)) if i != d]
    inside = sorted(pair for pair in inside if pair[1] > 1)
    dense, size = 0, 1
    for stride, n in inside:
        if stride != size:
            break
        dense, size = dense + 1, size * n
    stride, apart = strides[d] * per_block, inside[dense:]
    if any(step < size for step, _ in apart) or stride < size or prod(n for _, n in apart) > _MAX_PLANES:
        raise ValueError(
            f"a KV tensor of shape {shape} and strides {strides} is not understood: a block's bytes do not lie together"
        )
    offsets = [sum(i * step for i, (step, _) in zip(at, apart[::-1])) for at in product(*(range(n) for _, n in apart[::-1]))]
    return [Fragment(tensor.data_ptr() + offset * element, stride * element, size * element) for offset in offsets]


def _description(tensor: Any, fragments: Sequence[Fragment], blocks: int) -> str:
    """Describes the order of bytes in a block: shape without the blocks, order of dimensions, type."""
    d = _block_dimension(tuple(tensor.shape), blocks)
    inner = [i for i in range(len(tensor.shape)) if i != d]
    order = sorted(inner, key=lambda i: (-tensor.stride()[i], i))
    shape = "x".join(str(tensor.shape[i]) for i in inner)
    split = f"/{tensor.shape[d] // blocks}" if tensor.shape[d] != blocks else ""
    kind = str(getattr(tensor, "dtype", tensor.element_size())).rpartition(".")[2]
    return f"{len(fragments)}:{shape}{split}:{''.join(map(str, order))}:{kind}"


def _joined(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Merges neighbouring fragments; keeps their order."""
    out: list[Fragment] = []
    for fragment in fragments:
        last = out[-1] if out else None
        if last and last.stride == fragment.stride and last.address + last.size == fragment.address and (
            last.size + fragment.size <= last.stride
        ):
            out[-1] = Fragment(last.address, last.stride, last.size + fragment.size)
        else:
            out.append(fragment)
    return out


# ---- what encodings need to know ----

#: Limits of a K/V tensor (kernels/encoding/encoding.h).
_MAX_TOKENS, _MAX_HEADS, _MAX_DIM, _MAX_ELEMENTS = 65536, 1024, 1024, 1 << 22
_DTYPES = {"bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class _Cell:
    """One layer's rows in a tensor: the innermost tokens and heads, and what lies around them."""

    dtype: str
    tokens: int
    heads: int
    dim: int
    #: 2: K and V of a token and head follow one another.
    pair: int
    heads_outside: bool
    alike: bool
    #: K and V of a block are its two halves.
    halves: bool
    #: How many tokens' rows follow one another before those of another layer, or of V.
    run: int

    @property
    def bytes(self) -> int:
        return 2 * self.tokens * self.heads * self.dim * self.pair

    def rows(self, cells: int) -> tuple[int, int, int]:
        """Tokens, heads and dim of so many cells that follow one another. An encoding does not care which tokens these are, but it cares which
        rows are of one head."""
        if not self.heads_outside:
            return cells * self.tokens, self.heads * self.pair, self.dim
        if self.pair == 1:
            return self.tokens, cells * self.heads, self.dim
        return cells * self.heads * self.tokens, 2, self.dim

    @property
    def order(self) -> int:
        return int(self.heads_outside and self.pair == 1)

    def run_in(self, rows: tuple[int, int, int]) -> int:
        return 0 if self.order or rows[0] <= self.run else self.run


def _not_encoded(why: str, remedy: str) -> ValueError:
    return ValueError(f"encoding: {why}: {remedy}")


_OR_NONE = 'or remove the setting "encoding"'


def kind_of(tensor: Any) -> str:
    """"bfloat16" and the like."""
    return str(getattr(tensor, "dtype", "of an unknown type")).rpartition(".")[2]


def _dtype(tensor: Any) -> str:
    kind = kind_of(tensor)
    if kind in _DTYPES:
        return _DTYPES[kind]
    if "float8" in kind or kind == "uint8":
        raise _not_encoded(f"the KV cache is quantized ({kind}), which is stored as it is", 'remove the setting "encoding"')
    raise _not_encoded(f"the KV cache is {kind}", f"start with --dtype bfloat16 (or float16), {_OR_NONE}")


@dataclass(frozen=True)
class Axes:
    """How many tokens, heads, kernel blocks and others a block has in a tensor, and from one of each to the next, in
    elements."""

    tokens: int
    heads: int
    dim: int
    token_stride: int
    head_stride: int
    #: The engine's block is so many of the kernel's.
    kernel: int
    kernel_stride: int
    #: 2: K and V of a token and head follow one another.
    pair: int
    heads_outside: bool
    #: (stride, size) of what lies around rows, kernel blocks among them; the innermost first.
    outer: tuple[tuple[int, int], ...]

    @property
    def alike(self) -> bool:
        return self.tokens == self.heads > 1

    @property
    def run(self) -> int:
        """How many tokens follow one another: those of the engine's block, or only those of the kernel's."""
        together = not self.heads_outside and self.outer[:1] == ((self.kernel_stride, self.kernel),)
        return self.tokens * self.kernel if together else self.tokens


def axes_of(tensor: Any, blocks: int, of: Heads) -> Optional[Axes]:
    """None: the tensor's shape and strides do not say which dimension is tokens and which is heads."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    d = _block_dimension(shape, blocks)
    kernel = shape[d] // blocks
    dims = [(strides[i], kernel if i == d else shape[i]) for i in range(len(shape))]
    inner = sorted(pair for pair in dims[:-1] if pair[1] > 1)
    tokens = of.tokens // kernel
    wanted = {True: [n for n in (tokens, of.heads) if n > 1], False: [n for n in (of.heads, tokens) if n > 1]}
    outside = next((way for way in (False, True) if [n for _, n in inner[: len(wanted[way])]] == wanted[way]), None)
    pair = shape[-1] // of.dim
    outer = inner[len(wanted[False]) :]
    layers = prod(n for _, n in outer) * pair // (1 + of.values)
    if (
        outside is None
        or strides[-1] != 1
        or pair * of.dim != shape[-1]
        or pair not in ((1, 2) if of.values else (1,))
        or tokens * kernel != of.tokens
        or layers * (1 + of.values) != prod(n for _, n in outer) * pair
    ):
        return None
    found = [stride for stride, _ in inner]
    first, second = (found.pop(0) if n > 1 else 0 for n in ((tokens, of.heads) if outside else (of.heads, tokens)))
    token_stride, head_stride = (first, second) if outside else (second, first)
    return Axes(tokens, of.heads, of.dim, token_stride, head_stride, kernel, strides[d], pair, outside, tuple(outer))


def _cell(tensor: Any, blocks: int, of: Heads) -> _Cell:
    axes = axes_of(tensor, blocks, of)
    if axes is None:
        raise _not_encoded(
            f"the connector can't tell where K and V lie in a KV tensor of shape {tuple(tensor.shape)} and strides "
            f"{tuple(tensor.stride())}, with {of.heads} heads of {of.dim} and blocks of {of.tokens} tokens",
            f"use another attention backend, {_OR_NONE}",
        )
    return _Cell(
        _dtype(tensor), axes.tokens, of.heads, of.dim, axes.pair, axes.heads_outside and of.heads > 1,
        alike=axes.alike, halves=of.values and axes.pair == 1 and [n for _, n in axes.outer] == [2],
        run=axes.run,
    )


def _too_large(rows: tuple[int, int, int]) -> bool:
    tokens, heads, dim = rows
    return tokens > _MAX_TOKENS or heads > _MAX_HEADS or dim > _MAX_DIM or prod(rows) > _MAX_ELEMENTS


def _halved(fragments: Sequence[Fragment]) -> tuple[Fragment, ...]:
    return tuple(
        Fragment(fragment.address + half * (fragment.size // 2), fragment.stride, fragment.size // 2) for fragment in fragments for half in (0, 1)
    )


def _kv_tensors(layers: Sequence[Sequence[Fragment]], cells: Sequence[_Cell]) -> KvTensors:
    """Raises ValueError if the fragments are no K/V tensors, or other ones in each layer."""
    cell, fragments = cells[0], {tuple(fragment.size for fragment in layer) for layer in layers}
    if len(set(cells)) > 1 or len(fragments) > 1:
        raise _not_encoded("layers keep their KV in different ways", 'remove the setting "encoding"')
    sizes = fragments.pop()
    if len(sizes) > 2 or len(set(sizes)) > 1 or sizes[0] % cell.bytes:
        raise _not_encoded(
            f"a layer keeps a block in {len(sizes)} pieces of {sizes[0]} bytes, and not as K and V",
            f"use an attention backend that keeps the heads of a block together, {_OR_NONE}",
        )
    rows = cell.rows(sizes[0] // cell.bytes)
    if _too_large(rows):
        raise _not_encoded(
            f"a block's {'x'.join(map(str, rows))} elements lie side by side, more than an encoding takes at once",
            f"set block_layout to false, {_OR_NONE}",
        )
    return KvTensors(cell.dtype, rows, rows if len(sizes) == 2 else None, cell.order, cell.alike, cell.run_in(rows))


def layers_alike(kv_caches: Mapping[str, Any], blocks: int) -> bool:
    """Whether all layers keep as many bytes of a block."""
    return len({sum(fragment.size for fragment in tensor_fragments(tensor, blocks)) for tensor in kv_caches.values()}) < 2


def layout_of(
    kv_caches: Mapping[str, Any], blocks: int, apart: bool = False, heads: Optional[Heads] = None
) -> Layout:
    """Layers are in the mapping's order, which is the model's. Layers that share a tensor count as one. If all layers of a block lie side by
    side, or layers differ in size, they form one layer. apart: they don't, because they are loaded layer by layer, or summarised. heads:
    fragments are cut so that an encoding takes them, and the layout has kv_tensors. Name and sizes are then the same as without heads. Only for
    models with many layers do they differ: all layers of a block may be too much for one tensor."""
    layers: list[tuple[Fragment, ...]] = []
    descriptions: list[str] = []
    cells: list[_Cell] = []
    seen: dict[tuple[Fragment, ...], int] = {}
    numbers = {}
    for name, tensor in kv_caches.items():
        fragments = tuple(tensor_fragments(tensor, blocks))
        numbers[name] = seen.setdefault(fragments, len(layers))
        if numbers[name] < len(layers):
            continue
        layers.append(fragments)
        descriptions.append(_description(tensor, fragments, blocks))
        if heads is not None:
            cells.append(_cell(tensor, blocks, heads))
    if not layers:
        raise ValueError("the engine has no KV tensors to register")
    sizes = {sum(fragment.size for fragment in layer) for layer in layers}
    whole = _joined([fragment for layer in layers for fragment in layer])
    side_by_side = len(whole) == 1 and not (cells and _too_large(cells[0].rows(whole[0].size // cells[0].bytes)))
    if not apart and len(layers) > 1 and (side_by_side or len(sizes) > 1):
        layers, numbers = [tuple(whole)], dict.fromkeys(numbers, 0)
        sizes = {sum(fragment.size for fragment in whole)}
    if len(sizes) > 1:
        raise ValueError(
            f"layers keep {sorted(sizes)} bytes of a block; loading layer by layer needs layers of one size, and so do "
            "summaries: set layerwise to false, summaries to none"
        )
    if sum(map(len, layers)) > _MAX_PLANES:
        raise ValueError(f"the KV tensors keep a block in {sum(map(len, layers))} pieces, more than {_MAX_PLANES}")
    order = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()[:16]
    name = f"vllm/2:{len(layers)}of{len(descriptions)}:{order}:{descriptions[0]}"
    kv_tensors = None
    if heads is not None:
        if len(layers) == len(cells) and cells[0].halves and all(len(layer) == 1 for layer in layers):
            layers = [_halved(layer) for layer in layers]
        kv_tensors = _kv_tensors(layers, cells)
    return Layout(tuple(layers), blocks, sizes.pop(), name[:256], numbers, kv_tensors)
