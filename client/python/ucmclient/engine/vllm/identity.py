"""From an engine's configuration to a namespace: everything that changes a block's bytes or the meaning of its key.

Reads vLLM's configuration objects by attribute, without importing vLLM, and refuses at the start what it can't share.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any, Optional

from ...client import Identity
from ..weights import Weights, weights_at
from .layout import Heads, Layout, KvTensors
from .settings import Settings

#: Hash algorithms on which processes can agree, with the bytes of a key.
_HASHES = {"sha256": 32, "sha256_cbor": 32, "sha256_cbor_64bit": 8, "xxhash": 16, "xxhash_cbor": 16}

#: Kinds of KV cache whose blocks hold the KV of their tokens only, and live as long as their request.
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs", "SparseSpec")


class Unsupported(ValueError):
    """The connector can't serve this engine's configuration; the message says what to change."""


@dataclass(frozen=True)
class Ranks:
    """Which part of each block this rank holds. Ranks with the same part hold the same bytes, and one of them stores the part."""

    part: int
    parts: int
    writes: bool


@dataclass(frozen=True)
class EngineIdentity(Identity):
    """The namespace's identity, and how blocks are encoded. The identity is that of engines that don't encode."""

    encoding: str = "none"
    #: int8: K has a scale for each channel, not for each row.
    per_channel: bool = False
    #: None: the blocks are stored as they are.
    kv_tensors: Optional[KvTensors] = None
    #: The identity of the engine's chunks; None: it has none.
    chunks: Optional["EngineIdentity"] = None


def check_engine(config: Any) -> None:
    """Refuses configurations that would share wrong bytes, or none at all."""
    cache, parallel = config.cache_config, config.parallel_config
    if not cache.enable_prefix_caching:
        raise Unsupported("ucmd needs the engine's block hashes: start without --no-enable-prefix-caching")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("prefill context parallelism is not supported: use --prefill-context-parallel-size 1")
    if getattr(cache, "calculate_kv_scales", False):
        raise Unsupported(
            "FP8 scales that are found while the engine runs differ between engines: start without --calculate-kv-scales, which newer "
            "versions of vLLM lack; scales of the checkpoint are used then, or take --kv-cache-dtype fp8_per_token_head, whose scales "
            "lie in the blocks"
        )
    check_hash(cache.prefix_caching_hash_algo)


def check_one_group(kv_cache_config: Any, context_ranks: int = 1) -> None:
    """context_ranks: a block's tokens are spread over so many ranks."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    for one in (spec, *getattr(spec, "kv_cache_specs", {}).values()):
        if type(one).__name__ not in _SPECS:
            raise Unsupported(
                f"KV cache of kind {type(one).__name__} is not supported: full attention, MLA, sliding windows and recurrent states are"
            )
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    kept = spec.block_size * context_ranks
    if hashed not in (None, kept):
        raise Unsupported(f"the engine hashes {hashed} tokens and keeps {kept} in a block: they must agree")


def check_hash(algorithm: str, default_seed: bool | None = None) -> int:
    """Returns the bytes of a key. Refuses algorithms for which each process draws its own seed, since such processes share nothing."""
    if algorithm not in _HASHES or _HASHES[algorithm] < 16:
        raise Unsupported(
            f"--prefix-caching-hash-algo {algorithm} is not supported: use sha256 or sha256_cbor"
        )
    if default_seed is None:
        default_seed = algorithm.startswith("sha256")
    if "PYTHONHASHSEED" not in os.environ and not default_seed:
        raise Unsupported(
            "each process draws a seed of its own for its block hashes, so that no two engines would find each "
            "other's blocks: set PYTHONHASHSEED to the same value for all engines, for example PYTHONHASHSEED=0"
        )
    if os.environ.get("PYTHONHASHSEED") == "random":
        raise Unsupported("PYTHONHASHSEED=random draws a seed for each process: set a number, the same for all engines")
    return _HASHES[algorithm]


def heads_of(kv_cache_config: Any, setting: str) -> Heads:
    """The engine's description of its KV, for the setting that needs it. It leaves out FP8 scales next to K and V; layout.py sees types and sizes."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    found = {_heads(one) for one in getattr(spec, "kv_cache_specs", {"": spec}).values()}
    one = found.pop()
    if found or one is None:
        raise Unsupported(
            f"{setting}: the model's layers have heads of several sizes, or K and V of different ones, which are not supported: "
            f'remove the setting "{setting}"'
        )
    return one


def _heads(spec: Any) -> Optional[Heads]:
    heads, dim = getattr(spec, "num_kv_heads", 0), getattr(spec, "head_size", 0)
    if not heads or not dim or (getattr(spec, "head_size_v", None) or dim) != dim:
        return None
    return Heads(spec.block_size, heads, dim, not type(spec).__name__.startswith("MLA"))


def ranks_of(config: Any, kv_cache_config: Any, tp_rank: int) -> Ranks:
    size = config.parallel_config.tensor_parallel_size
    same = getattr(kv_cache_config, "kv_tp_replicas", None)
    if same is None:
        same = size if getattr(config.model_config, "use_mla", False) else 1
    return Ranks(part=tp_rank // same, parts=size // same, writes=tp_rank % same == 0)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights(config: Any, settings: Settings, draft: Optional[dict[str, Any]], read: Weights) -> str:
    """All that is known of the weights, since a model's name may later stand for other weights."""
    model = config.model_config
    hf_config = getattr(model, "hf_config", None)
    known = {
        "model": str(model.model),
        "revision": settings.revision if settings.revision is not None else getattr(model, "revision", None),
        "commit": getattr(hf_config, "_commit_hash", None),
        "files": read.known,
        "load_format": str(getattr(getattr(config, "load_config", None), "load_format", None)),
        "quantization": str(getattr(model, "quantization", None)),
        "dtype": str(getattr(model, "dtype", None)),
        "config": hf_config.to_dict() if hf_config is not None else None,
        "long": _long_rope(model),
        "windows": not getattr(model, "disable_sliding_window", False),
    }
    if draft is not None:
        known["draft"] = draft
    processor = _processor(model)
    if processor:
        known["processor"] = processor
    name = str(known["revision"] or known["commit"] or "")
    return f"{name[:128]}#{_digest(known)}"


def _processor(model: Any) -> dict[str, Any]:
    """Engine-wide options for images and videos. A request's keys cover only its own options."""
    multimodal = getattr(model, "multimodal_config", None)
    settings = {name: getattr(multimodal, name, None) for name in ("mm_processor_kwargs", "video_pruning_rate")}
    return {name: value for name, value in settings.items() if value}


def model_weights(config: Any, settings: Settings) -> Weights:
    """What the engine has read. Call it after the engine has read its weights."""
    model, load = config.model_config, getattr(getattr(config, "load_config", None), "load_format", None)
    if settings.revision is not None:
        return Weights(None)
    name, elsewhere = str(model.model), getattr(model, "model_weights", None)
    if elsewhere and str(elsewhere) != name:
        return Weights(str(elsewhere), "its weights lie where they can't be looked at")
    return of_model(model, made_up=getattr(load, "value", load) == "dummy")


def of_model(model: Any, made_up: bool = False) -> Weights:
    """model: vLLM's configuration of a model, or of a draft. made_up: its weights are not read."""
    name, commit = str(model.model), getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    found = weights_at(name, getattr(model, "revision", None), commit)
    return Weights(found.known) if made_up else found


def _long_rope(model: Any) -> bool:
    """Whether the engine uses the long set of a model with two sets of rotary factors."""
    text = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    short = getattr(text, "original_max_position_embeddings", None)
    if not short and isinstance(scaling, dict):
        short = scaling.get("original_max_position_embeddings")
    return bool(short) and (getattr(model, "max_model_len", None) or 0) > short


def identity_of(
    config: Any, kv_cache_config: Any, layout: Layout, ranks: Ranks, settings: Settings, engine: dict[str, Any],
    draft: Optional[dict[str, Any]] = None, read: Optional[Weights] = None,
) -> EngineIdentity:
    """engine: anything else that arranges the bytes. draft: what is known of draft layers, whose KV lies in the blocks, too. read: model_weights()."""
    per_channel = settings.encoding == "int8"
    if settings.encoding in ("q4", "int8") and layout.kv_tensors is not None and layout.kv_tensors.alike:
        raise Unsupported(
            "encoding: blocks of as many tokens as the rank has heads, which q4 and int8 can't tell apart: set --block-size to another "
            "number, or take fp8"
        )
    cache = config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED", "default")
    salt = _digest({"hash": algorithm, "seed": seed, "salt": settings.salt, "engine": engine})
    return EngineIdentity(
        model=str(config.model_config.model).encode()[:256].decode(errors="ignore"),
        revision=_weights(config, settings, draft, read or model_weights(config, settings)),
        dtype=str(cache.cache_dtype),
        layout=layout.name,
        block_tokens=block_tokens(kv_cache_config),
        key_bytes=check_hash(algorithm),
        parts=ranks.parts,
        layers=(len(layout.layers),),
        layer_bytes=layout.layer_bytes,
        salt=salt.encode(),
        encoding=settings.encoding,
        per_channel=per_channel,
        kv_tensors=layout.kv_tensors,
    )


def block_tokens(kv_cache_config: Any) -> int:
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
