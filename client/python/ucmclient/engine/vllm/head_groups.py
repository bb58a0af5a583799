"""Parts by groups of KV heads: engines of any tensor-parallel size share blocks (docs/vllm.md, "Head groups").

A block has a part for each group, whatever the number of ranks. A rank holds those of its heads, as several regions over the same pages. A
group's bytes, and the layout's name, are the same however many ranks there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from ...client import Region
from ...errors import UcmError
from .identity import Ranks, Unsupported, heads_of, ranks_of
from .layout import _MAX_PLANES, Fragment, Heads, Layout, _block_dimension, _joined, axes_of, kind_of, tensor_fragments
from .settings import Settings
from .tasks import Tasks

_REMEDY = 'or remove the setting "head_groups"'


@dataclass(frozen=True)
class HeadGroups:
    """Which groups of heads a rank holds: `mine` of them, from `ranks.part` on."""

    ranks: Ranks
    mine: int
    #: KV heads of a group.
    size: int
    #: The rank's heads.
    heads: Heads


def check_head_groups(settings: Settings, hybrid: bool) -> None:
    """Refuses settings that need all of a rank's heads in one part."""
    others = {
        "encoding": settings.encoding != "none", "summaries": settings.summaries is not None, "sparse": settings.sparse is not None,
    }
    for name in (name for name, used in others.items() if used and settings.head_groups):
        raise Unsupported(f'head_groups: not supported alongside {name}: remove the setting "{name}", {_REMEDY}')
    if hybrid and settings.head_groups:
        raise Unsupported(
            "head_groups: not supported for models with several kinds of KV cache: --disable-hybrid-kv-cache-manager makes it one, "
            f"{_REMEDY}"
        )


def head_groups_of(config: Any, kv_cache_config: Any, tp_rank: int, groups: int) -> HeadGroups:
    parallel = config.parallel_config
    for kind in ("pipeline", "decode context", "prefill context"):
        size = kind.replace(" ", "_") + "_parallel_size"
        if getattr(parallel, size, 1) > 1:
            raise Unsupported(f"head_groups: not supported with {kind} parallelism: use --{size.replace('_', '-')} 1, {_REMEDY}")
    of = heads_of(kv_cache_config, "head_groups")
    if not of.values:
        raise Unsupported(
            "head_groups: the model keeps one latent vector for all heads (MLA), which engines of all tensor-parallel sizes share "
            'anyway: remove the setting "head_groups"'
        )
    ranks = ranks_of(config, kv_cache_config, tp_rank)
    heads = of.heads * ranks.parts
    total = getattr(config.model_config, "get_total_num_kv_heads", lambda: heads)()
    if total != heads:
        raise Unsupported(
            f"head_groups: {ranks.parts} ranks with {of.heads} KV heads each do not share out the model's {total}: use a smaller "
            f"--tensor-parallel-size, {_REMEDY}"
        )
    if heads % groups or groups % ranks.parts:
        fit = [n for n in range(ranks.parts, heads + 1) if heads % n == 0 and n % ranks.parts == 0]
        raise Unsupported(
            f"head_groups {groups}: the model has {heads} KV heads, of which each of {ranks.parts} ranks holds {of.heads}, so it can be "
            f"{', '.join(map(str, fit))}: take the largest --tensor-parallel-size that will share, {_REMEDY}"
        )
    mine = groups // ranks.parts
    return HeadGroups(Ranks(ranks.part * mine, groups, ranks.writes), mine, heads // groups, of)


# ---- layouts ----


class _Slice:
    """Some heads of a tensor, as tensor_fragments sees it."""

    def __init__(self, tensor: Any, dimension: int, first: int, size: int):
        self._pointer = tensor.data_ptr() + first * tensor.stride()[dimension] * tensor.element_size()
        self.shape = tuple(size if i == dimension else n for i, n in enumerate(tensor.shape))
        self._strides, self._element = tuple(tensor.stride()), tensor.element_size()

    def data_ptr(self) -> int:
        return self._pointer

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._element


def _head_dimension(tensor: Any, blocks: int, of: Heads) -> int:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    found = [i for i in range(_block_dimension(shape, blocks) + 1, len(shape) - 1) if shape[i] == of.heads]
    axes = axes_of(tensor, blocks, of)
    if axes is not None and not axes.alike:
        found = [i for i in found if strides[i] == axes.head_stride]
    if len(found) != 1 or shape[-1] not in (of.dim, 2 * of.dim) or strides[-1] != 1 or (axes is not None and axes.alike):
        raise Unsupported(
            f"head_groups: the connector can't tell which dimension of a KV tensor of shape {shape} counts the {of.heads} heads (blocks of "
            f"{of.tokens} tokens, {of.dim} channels a head): use another attention backend or --block-size, {_REMEDY}"
        )
    return found[0]


def _slices(tensor: Any, blocks: int, of: HeadGroups) -> tuple[list[_Slice], Optional[int]]:
    """Tensors, one for each group that the rank holds, and which dimension counts heads. None: the rank holds one group."""
    if of.mine == 1 and of.size == 1:
        return [_Slice(tensor, 0, 0, tensor.shape[0])], None
    dimension = _head_dimension(tensor, blocks, of.heads)
    slices = [_Slice(tensor, dimension, i * of.size, of.size) for i in range(of.mine)]
    tokens = of.heads.tokens * blocks // tensor.shape[_block_dimension(tuple(tensor.shape), blocks)]
    smallest = tokens * of.heads.dim * tensor.element_size()
    if of.mine > 1 and min(fragment.size for fragment in tensor_fragments(slices[0], blocks)) < smallest:
        raise Unsupported(
            "head_groups: the attention backend keeps the heads of a token together, so that a group of heads is many small pieces of "
            f"a block: use a backend that keeps the tokens of a head together (VLLM_KV_CACHE_LAYOUT=HND), {_REMEDY}"
        )
    return slices, dimension


def _description(tensor: Any, one: _Slice, blocks: int) -> str:
    """The order of bytes in a block's part. Dimensions of one element do not count, since the number of a rank's heads may be one."""
    d = _block_dimension(one.shape, blocks)
    inner = [i for i in range(len(one.shape)) if i != d and one.shape[i] > 1]
    order = sorted(inner, key=lambda i: -one.stride()[i])
    split = f"/{one.shape[d] // blocks}" if one.shape[d] != blocks else ""
    return f"{'x'.join(str(one.shape[i]) for i in inner)}{split}:{''.join(map(str, order))}:{kind_of(tensor)}"


def group_layouts(kv_caches: Mapping[str, Any], blocks: int, of: HeadGroups, apart: bool) -> list[Layout]:
    """The layout of each group that the rank holds. A part has one layer. apart: it has one for each of the engine's layers."""
    layers: list[list[tuple[Fragment, ...]]] = [[] for _ in range(of.mine)]
    descriptions: list[str] = []
    seen: dict[tuple[Fragment, ...], int] = {}
    numbers: dict[str, int] = {}
    around = False
    for name, tensor in kv_caches.items():
        slices, dimension = _slices(tensor, blocks, of)
        fragments = [tuple(tensor_fragments(one, blocks)) for one in slices]
        numbers[name] = seen.setdefault(fragments[0], len(descriptions))
        if numbers[name] < len(descriptions):
            continue
        for to, one in zip(layers, fragments):
            to.append(one)
        descriptions.append(_description(tensor, slices[0], blocks))
        if of.size > 1 and dimension is not None and len(descriptions) == 2:
            around = _layers_within(layers[0], tensor.stride()[dimension] * tensor.element_size())
    sizes = {sum(fragment.size for fragment in layer) for layer in layers[0]}
    if not sizes or (apart and len(sizes) > 1):
        raise Unsupported(f"head_groups: layers keep {sorted(sizes)} bytes of a group: set layerwise to false")
    by_address = around and not apart
    order = hashlib.sha256("\n".join([str(apart), str(by_address), *descriptions]).encode()).hexdigest()[:16]
    name = f"vllm/2 heads:{of.size}:{len(descriptions)}:{order}:{descriptions[0]}"
    return [_layout(one, blocks, apart, by_address, name, numbers) for one in layers]


def _layers_within(layers: Sequence[Sequence[Fragment]], head_step: int) -> bool:
    """All layers of a head lie before those of the next head."""
    return 0 < layers[1][0].address - layers[0][0].address < head_step


def _layout(
    layers: Sequence[tuple[Fragment, ...]], blocks: int, apart: bool, by_address: bool, name: str, numbers: Mapping[str, int]
) -> Layout:
    joined = [list(layer) for layer in layers] if apart else [[fragment for layer in layers for fragment in layer]]
    if by_address:
        joined[0].sort(key=lambda fragment: fragment.address)
    joined = [_joined(one) for one in joined]
    if sum(map(len, joined)) > _MAX_PLANES:
        raise Unsupported(f"head_groups: a group is {sum(map(len, joined))} pieces of a block, more than {_MAX_PLANES}: use fewer groups")
    size = sum(fragment.size for fragment in joined[0])
    return Layout(tuple(map(tuple, joined)), blocks, size, name[:256], numbers if apart else dict.fromkeys(numbers, 0))


# ---- regions ----


class Regions:
    """Regions of one connection, for the parts that a rank holds. It serves as one Region, as far as this package uses that."""

    def __init__(self, regions: Sequence[Region], unregister: Any):
        self._regions = list(regions)
        self._unregister = unregister
        self.client, self.ns = regions[0].client, regions[0].ns

    @classmethod
    def of(cls, regions: Sequence[Region], unregister: Any = None) -> "Union[Region, Regions]":
        """unregister: unregisters all; by default each region's own does."""
        if len(regions) > 1:
            return cls(regions, unregister)
        if unregister is not None:
            regions[0].unregister = unregister  # type: ignore[method-assign]
        return regions[0]

    @staticmethod
    def drop(regions: Sequence[Region], timeout: Optional[float]) -> None:
        """Unregisters these after a failure. If that fails, too, they end with their connection."""
        for region in regions:
            try:
                region.unregister(timeout=timeout)
            except UcmError:
                return

    def gpu_busy(self, now: bool) -> None:
        self._regions[0].gpu_busy(now)  # the GPU is one

    def load(self, *args: Any, **named: Any) -> "Tasks":
        return Tasks.begun([region.load for region in self._regions], args, named)

    def dump(self, *args: Any, **named: Any) -> "Tasks":
        return Tasks.begun([region.dump for region in self._regions], args, named)

    def unregister(self, timeout: Optional[float] = None) -> None:
        if self._unregister is not None:
            self._unregister(timeout=timeout)
            return
        while self._regions:
            self._regions[-1].unregister(timeout=timeout)
            self._regions.pop()
