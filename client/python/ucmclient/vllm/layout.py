"""Where an engine's KV tensors keep each block: planes for the daemon, from shapes and strides alone.

A tensor needs data_ptr(), shape, stride(), element_size(); torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class Chunk:
    """Bytes [address + b * stride, + size) are a piece of block b."""

    address: int
    stride: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Chunks of each layer, layers in the engine's order; `name` tells layouts apart that differ in their bytes."""

    layers: tuple[tuple[Chunk, ...], ...]
    blocks: int
    layer_bytes: int
    name: str
    #: By the engine's name of a layer, its number here.
    numbers: Mapping[str, int]


def _outer(shape: Sequence[int], strides: Sequence[int], blocks: int) -> int:
    """Which dimension counts blocks: the first one of that size, or of a multiple (kernel blocks), with a dimension of
    K and V at most before it."""
    for d in range(min(2, len(shape))):
        if shape[d] % blocks == 0 and shape[d] >= blocks and (d == 0 or shape[0] == 2):
            if d == 0 and shape[0] == 2 and blocks in (1, 2) and len(shape) > 1 and shape[1] == blocks:
                continue  # [K and V, blocks, ...] with as few blocks as that
            return d
    raise ValueError(
        f"a KV tensor of shape {tuple(shape)} is not understood: neither its first dimension, nor the one behind K and "
        f"V, counts {blocks} blocks"
    )


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Do these dimensions, in whatever order, fill one piece of memory without a gap?"""
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(shape, strides) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def tensor_chunks(tensor: Any, blocks: int) -> list[Chunk]:
    """One chunk, or one for K and one for V."""
    shape, strides, element = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    d = _outer(shape, strides, blocks)
    per_block = shape[d] // blocks  # kernel blocks in a block of the engine's
    inner_shape, inner_strides = shape[d + 1:], strides[d + 1:]
    address = tensor.data_ptr()
    if per_block > 1:
        inner_shape, inner_strides = (per_block, *inner_shape), (strides[d], *inner_strides)
    stride = strides[d] * per_block
    outer = [0] if d == 0 else [i * strides[0] for i in range(shape[0])]
    if d == 1 and _dense((shape[0], *inner_shape), (strides[0], *inner_strides)):
        outer, inner_shape, inner_strides = [0], (shape[0], *inner_shape), (strides[0], *inner_strides)
    elif not _dense(inner_shape, inner_strides):
        raise ValueError(
            f"a KV tensor of shape {shape} and strides {strides} is not understood: a block's bytes do not lie together"
        )
    size = prod(inner_shape) * element
    return [Chunk(address + offset * element, stride * element, size) for offset in outer]


def layout_of(kv_caches: Mapping[str, Any], blocks: int) -> Layout:
    """Layers in the mapping's order, which the engine builds in the model's. Layers that share one tensor are one."""
    layers, descriptions = [], []
    seen: dict[tuple[Chunk, ...], int] = {}
    numbers = {}
    for name, tensor in kv_caches.items():
        chunks = tuple(tensor_chunks(tensor, blocks))
        numbers[name] = seen.setdefault(chunks, len(layers))
        if numbers[name] < len(layers):
            continue
        layers.append(chunks)
        d = _outer(tuple(tensor.shape), tuple(tensor.stride()), blocks)
        shape = [n for i, n in enumerate(tensor.shape) if i != d]
        order = sorted(range(len(tensor.shape)), key=lambda i: (-tensor.stride()[i], i))
        order = [i for i in order if i != d]
        descriptions.append(f"{len(chunks)}:{'x'.join(map(str, shape))}:{''.join(map(str, order))}")
    if not layers:
        raise ValueError("the engine has no KV tensors to register")
    sizes = {sum(chunk.size for chunk in layer) for layer in layers}
    if len(sizes) > 1:
        raise ValueError(
            f"layers keep {sorted(sizes)} bytes of a block; layers of different sizes are not supported"
        )
    names = sorted(set(descriptions))
    return Layout(tuple(layers), blocks, sizes.pop(), "vllm/1:" + ",".join(names), numbers)
