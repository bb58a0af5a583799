"""Where an engine's KV tensors keep each block, from their shapes and strides.

A tensor needs data_ptr(), shape, stride(), element_size(), and may have dtype. Does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

#: Planes of one region (proto/limits.h).
_MAX_PLANES = 2048


@dataclass(frozen=True)
class Chunk:
    """Bytes [address + b * stride, + size) are a piece of block b."""

    address: int
    stride: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The chunks of each shard, in the engine's order of layers. Layouts with different bytes differ in `name`."""

    layers: tuple[tuple[Chunk, ...], ...]
    blocks: int
    layer_bytes: int
    name: str
    #: From the engine's name of a layer to its shard.
    numbers: Mapping[str, int]


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
        f"a KV tensor of shape {tuple(shape)} is not understood: neither its first dimension, nor the one behind K and "
        f"V, counts {blocks} blocks"
    )


def tensor_chunks(tensor: Any, blocks: int) -> list[Chunk]:
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
    return [Chunk(tensor.data_ptr() + offset * element, stride * element, size * element) for offset in offsets]


def _description(tensor: Any, chunks: Sequence[Chunk], blocks: int) -> str:
    """Describes the order of bytes in a block: shape without the blocks, order of dimensions, type."""
    d = _block_dimension(tuple(tensor.shape), blocks)
    inner = [i for i in range(len(tensor.shape)) if i != d]
    order = sorted(inner, key=lambda i: (-tensor.stride()[i], i))
    shape = "x".join(str(tensor.shape[i]) for i in inner)
    split = f"/{tensor.shape[d] // blocks}" if tensor.shape[d] != blocks else ""
    kind = str(getattr(tensor, "dtype", tensor.element_size())).rpartition(".")[2]
    return f"{len(chunks)}:{shape}{split}:{''.join(map(str, order))}:{kind}"


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Merges neighbouring chunks; keeps their order."""
    out: list[Chunk] = []
    for chunk in chunks:
        last = out[-1] if out else None
        if last and last.stride == chunk.stride and last.address + last.size == chunk.address and (
            last.size + chunk.size <= last.stride
        ):
            out[-1] = Chunk(last.address, last.stride, last.size + chunk.size)
        else:
            out.append(chunk)
    return out


def layout_of(kv_caches: Mapping[str, Any], blocks: int, layerwise: bool = False) -> Layout:
    """Layers are in the mapping's order, which is the model's. Layers that share a tensor count as one. If all layers
    of a block lie side by side, or layers differ in size, they form one shard, unless they are loaded layer by
    layer."""
    layers: list[tuple[Chunk, ...]] = []
    descriptions: list[str] = []
    seen: dict[tuple[Chunk, ...], int] = {}
    numbers = {}
    for name, tensor in kv_caches.items():
        chunks = tuple(tensor_chunks(tensor, blocks))
        numbers[name] = seen.setdefault(chunks, len(layers))
        if numbers[name] < len(layers):
            continue
        layers.append(chunks)
        descriptions.append(_description(tensor, chunks, blocks))
    if not layers:
        raise ValueError("the engine has no KV tensors to register")
    sizes = {sum(chunk.size for chunk in layer) for layer in layers}
    whole = _joined([chunk for layer in layers for chunk in layer])
    if not layerwise and len(layers) > 1 and (len(whole) == 1 or len(sizes) > 1):
        layers, numbers = [tuple(whole)], dict.fromkeys(numbers, 0)
        sizes = {sum(chunk.size for chunk in whole)}
    if len(sizes) > 1:
        raise ValueError(
            f"layers keep {sorted(sizes)} bytes of a block; loading layer by layer needs layers of one size: set "
            "layerwise to false"
        )
    if sum(map(len, layers)) > _MAX_PLANES:
        raise ValueError(f"the KV tensors keep a block in {sum(map(len, layers))} pieces, more than {_MAX_PLANES}")
    order = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()[:16]
    name = f"vllm/2:{len(layers)}of{len(descriptions)}:{order}:{descriptions[0]}"
    return Layout(tuple(layers), blocks, sizes.pop(), name[:256], numbers)
