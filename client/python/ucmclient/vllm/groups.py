"""Hybrid models: an engine whose layers keep their KV in several ways has a group of layers for each, with pages of their own.

What a group needs of a request when so many of its tokens are computed, and the keys of its blocks (docs/vllm.md, "Hybrid models").
Reads vLLM's configuration objects by attribute, without importing vLLM.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from .identity import EngineIdentity, Unsupported
from .layout import Layout, layout_of
from .settings import Settings

FULL, WINDOW = "full", "window"
_KINDS = {
    "FullAttentionSpec": FULL,
    "MLAAttentionSpec": FULL,
    "SlidingWindowSpec": WINDOW,
    "SlidingWindowMLASpec": WINDOW,
}
#: Between ends of hits, in windows, where the setting `window_interval` is 0.
_WINDOWS = 4


@dataclass(frozen=True)
class Group:
    #: The engine's number.
    number: int
    kind: str
    block_tokens: int
    #: Tokens behind which nothing is needed any more; 0: all are.
    reach: int
    layers: tuple[str, ...]

    def first(self, tokens: int) -> int:
        """The first block that a request needs when so many tokens are computed, or one less: the engine computes the last
        token of a whole hit again."""
        return max(0, tokens - self.reach) // self.block_tokens if self.reach else 0

    def kept_from(self, tokens: int) -> int:
        """The first block that the engine may still keep for a request with so many computed tokens. It may have given earlier
        ones to others."""
        return max(0, tokens - self.reach + 1) // self.block_tokens if self.reach else 0


@dataclass(frozen=True)
class Member:
    """A group in the namespaces: which of them, and what its keys are combined with."""

    kind: int
    mark: bytes


@dataclass(frozen=True)
class HybridIdentity:
    """A namespace for each kind of block: groups whose blocks lie in the same places of the same tensors share one."""

    kinds: tuple[EngineIdentity, ...]
    members: tuple[Member, ...]


def groups_of(kv_cache_config: Any) -> Optional[list[Group]]:
    """None: one group of full attention, which needs none of this."""
    groups = [_group(i, one) for i, one in enumerate(kv_cache_config.kv_cache_groups)]
    if len(groups) == 1 and (groups[0] is None or groups[0].kind == FULL):
        return None  # or a kind that check_one_group refuses
    unknown = [kv_cache_config.kv_cache_groups[i].kv_cache_spec for i, one in enumerate(groups) if one is None]
    if unknown:
        raise Unsupported(
            f"KV cache of kind {_names(unknown[0])} is not supported beside others: full attention, MLA and sliding windows "
            "are; models with chunked local attention work with --disable-hybrid-kv-cache-manager"
        )
    return [one for one in groups if one is not None]


def _names(spec: Any) -> str:
    return " and ".join(sorted({type(one).__name__ for one in _specs(spec)}))


def _specs(spec: Any) -> list[Any]:
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _group(number: int, group: Any) -> Optional[Group]:
    spec = group.kv_cache_spec
    found = {(_KINDS.get(type(one).__name__), _reach(one)) for one in _specs(spec)}
    kind, reach = found.pop()
    if found or kind is None or not getattr(spec, "prefix_cacheable", True) or not getattr(group, "enable_kv_transfer", True):
        return None
    return Group(number, kind, spec.block_size, reach, tuple(getattr(group, "layer_names", ())))


def _reach(spec: Any) -> int:
    windowed = _KINDS.get(type(spec).__name__) == WINDOW
    return spec.sliding_window + getattr(spec, "extra_retained_tokens", 0) if windowed else 0


def check_hybrid(kv_cache_config: Any, groups: Sequence[Group], settings: Settings, base: type) -> None:
    """base: vLLM's class of connectors."""
    missing = [name for name in ("get_transfer_results", "bind_gpu_block_pool") if not hasattr(base, name)]
    if missing:
        raise Unsupported(
            f"a model with {len(groups)} kinds of KV cache needs a vLLM that can be told of failed loads of it (KVConnectorBase_V1 has no "
            f"{', '.join(missing)}; 0.32 has them): take a newer one; models with sliding windows also work with "
            "--disable-hybrid-kv-cache-manager"
        )
    names = {"encoding": settings.encoding != "none", "digests": settings.digests is not None, "sparse": settings.sparse is not None}
    for name in (name for name, used in names.items() if used):
        raise Unsupported(f"{name}: not supported for models with several kinds of KV cache: remove the setting {name!r}")
    if not settings.async_load:
        raise Unsupported(
            "async_load false: vLLM can't be told of failed loads within a step for models with several kinds of KV cache: remove the "
            "settings async_load and layerwise"
        )
    tokens = hash_tokens(kv_cache_config)
    if any(group.block_tokens % tokens for group in groups):
        raise Unsupported(f"the engine hashes {tokens} tokens, and keeps others in a block: --block-size must be a multiple")


def hash_tokens(kv_cache_config: Any) -> int:
    """Tokens of one of the engine's hashes."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    return known or math.gcd(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))


def unit_of(groups: Sequence[Group]) -> int:
    """Hits end at multiples of so many tokens, or one token before."""
    return math.lcm(*(group.block_tokens for group in groups))


def interval_of(groups: Sequence[Group], settings: Settings) -> int:
    """Windows are stored whole at each multiple of so many tokens."""
    wanted = settings.window_interval or _WINDOWS * max((group.reach for group in groups if group.kind == WINDOW), default=1)
    unit = unit_of(groups)
    return -(-wanted // unit) * unit


@dataclass(frozen=True)
class Kinds:
    """The worker's: the layout of each kind of block, and the groups in them."""

    layouts: tuple[Layout, ...]
    members: tuple[Member, ...]


def kinds_of(groups: Sequence[Group], kv_caches: Mapping[str, Any], blocks: int) -> Kinds:
    layouts = [layout_of({name: kv_caches[name] for name in group.layers}, blocks) for group in groups]
    same: dict[Any, list[int]] = {}
    for i, layout in enumerate(layouts):
        same.setdefault(layout.layers, []).append(i)
    members: list[Optional[Member]] = [None] * len(groups)
    kinds = []
    for number, those in enumerate(same.values()):
        names = "\n".join(sorted({layouts[i].name for i in those}))
        kinds.append(replace(layouts[those[0]], name=f"vllm/2 hybrid:{hashlib.sha256(names.encode()).hexdigest()[:16]}:{names}"[:256]))
        for i in those:
            members[i] = Member(number, _mark(groups[i], layouts[i].name))
    return Kinds(tuple(kinds), tuple(one for one in members if one is not None))


def _mark(group: Group, layout: str) -> bytes:
    """Two groups never have one key, nor has a group whose layers are others in another engine."""
    text = json.dumps(["ucm group", group.kind, group.block_tokens, group.reach, group.layers, layout])
    return hashlib.sha256(text.encode()).digest()


def marked(keys: bytes, mark: bytes, size: int) -> bytes:
    """Keys of `size` bytes each, which are hashes, combined with a group's mark: as unlike as the hashes."""
    of = int.from_bytes(mark[:size] * (len(keys) // size), "big")
    return (int.from_bytes(keys, "big") ^ of).to_bytes(len(keys), "big")


def hybrid_identity(one: EngineIdentity, kinds: Kinds, groups: Sequence[Group]) -> HybridIdentity:
    """one: of the same engine, for any layout."""
    sizes = {member.kind: group.block_tokens for member, group in zip(kinds.members, groups)}
    return HybridIdentity(
        tuple(
            replace(one, layout=layout.name, block_tokens=sizes[i], shards=(len(layout.layers),), shard_bytes=layout.layer_bytes)
            for i, layout in enumerate(kinds.layouts)
        ),
        kinds.members,
    )
