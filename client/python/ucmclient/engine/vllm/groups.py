"""Hybrid models: an engine whose layers keep their KV in several ways has a group of layers for each, with pages of their own.

This module says what a group needs of a request with so many computed tokens, and has the keys of its blocks (docs/vllm.md, "Hybrid models").
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

FULL, WINDOW, STATE = "full", "window", "state"
_KINDS = {
    "FullAttentionSpec": FULL,
    "MLAAttentionSpec": FULL,
    "SlidingWindowSpec": WINDOW,
    "SlidingWindowMLASpec": WINDOW,
    "MambaSpec": STATE,
}
#: Between ends of hits, in windows, where the setting `window_interval` is 0.
_WINDOWS = 4


@dataclass(frozen=True)
class Group:
    #: The engine's number.
    number: int
    kind: str
    block_tokens: int
    #: Tokens after which nothing is needed any more; 0: all are.
    reach: int
    layers: tuple[str, ...]
    #: For recurrent layers: a description of a state's bytes.
    state: str = ""

    def first(self, tokens: int) -> int:
        """The first block that a request needs when so many tokens are computed, or one token less. The engine computes the last token of a
        whole hit again."""
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
    kept = [one.kv_cache_spec for one in kv_cache_config.kv_cache_groups if not _shared(one)]
    if kept:
        raise Unsupported(
            f"the engine keeps KV cache of kind {_names(kept[0])} for one request, and does not say of its blocks which tokens they are of, so "
            "that no other request can use them: this model runs without the connector only"
        )
    unknown = [kv_cache_config.kv_cache_groups[i].kv_cache_spec for i, one in enumerate(groups) if one is None]
    if unknown:
        raise Unsupported(
            f"KV cache of kind {_names(unknown[0])} is not supported alongside others: full attention, MLA, sliding windows and "
            "recurrent states are; models with chunked local attention work with --disable-hybrid-kv-cache-manager"
        )
    return [one for one in groups if one is not None]


def _shared(group: Any) -> bool:
    return getattr(group.kv_cache_spec, "prefix_cacheable", True) and getattr(group, "enable_kv_transfer", True)


def _names(spec: Any) -> str:
    return " and ".join(sorted({type(one).__name__ for one in _specs(spec)}))


def _specs(spec: Any) -> list[Any]:
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _group(number: int, group: Any) -> Optional[Group]:
    spec = group.kv_cache_spec
    found = {(_KINDS.get(type(one).__name__), _reach(one), _state(one)) for one in _specs(spec)}
    kind, reach, state = found.pop()
    if found or kind is None:
        return None
    return Group(number, kind, spec.block_size, reach, tuple(getattr(group, "layer_names", ())), state)


def _reach(spec: Any) -> int:
    kind = _KINDS.get(type(spec).__name__)
    if kind == STATE:
        return 2  # the engine keeps the block with the state before the next token, as if a window of two tokens were left
    return spec.sliding_window + getattr(spec, "extra_retained_tokens", 0) if kind == WINDOW else 0


def _state(spec: Any) -> str:
    """Tensors of other shapes or types may have as many bytes."""
    if _KINDS.get(type(spec).__name__) != STATE:
        return ""
    return json.dumps([str(getattr(spec, name, None)) for name in ("mamba_type", "shapes", "dtypes")])


def check_hybrid(config: Any, kv_cache_config: Any, groups: Sequence[Group], settings: Settings) -> None:
    if any(group.kind == STATE for group in groups):
        _check_states(config, kv_cache_config)
    names = {"encoding": settings.encoding != "none", "summaries": settings.summaries is not None, "sparse": settings.sparse is not None}
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


def _check_states(config: Any, kv_cache_config: Any) -> None:
    if getattr(config, "speculative_config", None) is not None:
        raise Unsupported("speculative decoding is not supported for models with recurrent states: start without it")
    states = [one for group in kv_cache_config.kv_cache_groups for one in _specs(group.kv_cache_spec) if _state(one)]
    if any(getattr(one, "mamba_cache_mode", "none") != "align" for one in states):
        raise Unsupported("this engine keeps no states at the ends of blocks: start with --mamba-cache-mode align")


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


def state_interval_of(groups: Sequence[Group], settings: Settings) -> int:
    """At least so many tokens lie between states that are stored within a prompt or an answer. By default states take at most the bytes of full
    attention; a layer's block has as many bytes as a state."""
    states, full = (sum(len(group.layers) for group in groups if group.kind == kind) for kind in (STATE, FULL))
    unit = unit_of(groups)
    return settings.window_interval or -(-states // max(full, 1)) * unit


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
    """No two groups have the same mark. Nor do groups of two engines, if their layers differ."""
    text = json.dumps(["ucm group", group.kind, group.block_tokens, group.reach, group.layers, layout, *([group.state] if group.state else ())])
    return hashlib.sha256(text.encode()).digest()


def marked(keys: bytes, mark: bytes, size: int) -> bytes:
    """Keys of `size` bytes each, which are hashes, combined with a group's mark. They collide no more often than the hashes."""
    of = int.from_bytes(mark[:size] * (len(keys) // size), "big")
    return (int.from_bytes(keys, "big") ^ of).to_bytes(len(keys), "big")


def hybrid_identity(one: EngineIdentity, kinds: Kinds, groups: Sequence[Group]) -> HybridIdentity:
    """one: of the same engine, for any layout."""
    sizes = {member.kind: group.block_tokens for member, group in zip(kinds.members, groups)}
    return HybridIdentity(
        tuple(
            replace(one, layout=layout.name, block_tokens=sizes[i], layers=(len(layout.layers),), layer_bytes=layout.layer_bytes)
            for i, layout in enumerate(kinds.layouts)
        ),
        kinds.members,
    )
