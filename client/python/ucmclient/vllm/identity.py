"""From an engine's configuration to a namespace: everything that changes the bytes of a block, or what its key means.

Reads vLLM's configuration objects by attribute and imports nothing of it, so that what is missing in an older or newer
vLLM is found here, with a sentence, and not in the middle of a request.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from ..client import Identity
from .layout import Layout
from .settings import Settings

#: Algorithms whose hashes several processes agree on, with the length of their keys.
_HASHES = {"sha256": 32, "sha256_cbor": 32, "sha256_cbor_64bit": 8, "xxhash": 16, "xxhash_cbor": 16}

#: A block of these is kept for as long as its request, and holds the KV of its tokens and nothing else.
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs")


class Unsupported(ValueError):
    """This engine's configuration can't share its cache; the message says what to change."""


@dataclass(frozen=True)
class Ranks:
    """Which part of each block this rank holds. Ranks with the same part hold the same bytes; one of them writes."""

    part: int
    parts: int
    writes: bool


def check_engine(config: Any, kv_cache_config: Any) -> None:
    """Refuses what would share wrong bytes, or none."""
    cache, parallel = config.cache_config, config.parallel_config
    if not cache.enable_prefix_caching:
        raise Unsupported("ucmd needs the engine's block hashes: start without --no-enable-prefix-caching")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(
            f"the model keeps {len(groups)} kinds of KV cache (sliding windows or recurrent state beside full "
            "attention), which are not supported; models with sliding windows work with "
            "--disable-hybrid-kv-cache-manager"
        )
    spec = type(groups[0].kv_cache_spec).__name__
    if spec not in _SPECS:
        raise Unsupported(f"KV cache of kind {spec} is not supported: only full attention and MLA are")
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("pipeline parallelism is not supported: use --pipeline-parallel-size 1")
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise Unsupported("decode context parallelism is not supported: use --decode-context-parallel-size 1")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("prefill context parallelism is not supported: use --prefill-context-parallel-size 1")
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None and speculative.use_eagle():
        raise Unsupported("speculative decoding with draft layers (EAGLE, MTP) is not supported: start without it")
    if getattr(cache, "calculate_kv_scales", False):
        raise Unsupported(
            "FP8 scales that are found while the engine runs differ between engines: start without "
            "--calculate-kv-scales"
        )
    check_hash(cache.prefix_caching_hash_algo)


def check_hash(algorithm: str, default_seed: bool | None = None) -> int:
    """Length of a key. Block hashes start from a seed; where each process draws its own, nothing is ever shared."""
    if algorithm not in _HASHES or _HASHES[algorithm] < 16:
        raise Unsupported(
            f"--prefix-caching-hash-algo {algorithm} is not supported: use sha256 or sha256_cbor"
        )
    if default_seed is None:
        default_seed = algorithm.startswith("sha256") and _engine_has_default_seed()
    if "PYTHONHASHSEED" not in os.environ and not default_seed:
        raise Unsupported(
            "each process draws a seed of its own for its block hashes, so that no two engines would find each "
            "other's blocks: set PYTHONHASHSEED to the same value for all engines, for example PYTHONHASHSEED=0"
        )
    if os.environ.get("PYTHONHASHSEED") == "random":
        raise Unsupported("PYTHONHASHSEED=random draws a seed for each process: set a number, the same for all engines")
    return _HASHES[algorithm]


def _engine_has_default_seed() -> bool:
    """vLLM from 0.2x on starts cryptographic hashes from a fixed seed."""
    try:
        from vllm.v1.core import kv_cache_utils
    except ImportError:
        return False
    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


def ranks_of(config: Any, kv_cache_config: Any, tp_rank: int) -> Ranks:
    size = config.parallel_config.tensor_parallel_size
    same = getattr(kv_cache_config, "kv_tp_replicas", None)
    if same is None:
        same = size if getattr(config.model_config, "use_mla", False) else 1
    return Ranks(part=tp_rank // same, parts=size // same, writes=tp_rank % same == 0)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights(config: Any, settings: Settings) -> str:
    """Whatever is known of the weights: a name can stand for others tomorrow."""
    model = config.model_config
    hf_config = getattr(model, "hf_config", None)
    known = {
        "revision": settings.revision if settings.revision is not None else getattr(model, "revision", None),
        "quantization": str(getattr(model, "quantization", None)),
        "dtype": str(getattr(model, "dtype", None)),
        "config": hf_config.to_dict() if hf_config is not None else None,
    }
    name = known["revision"] or ""
    return f"{name}#{_digest(known)}"


def identity_of(config: Any, kv_cache_config: Any, layout: Layout, ranks: Ranks, settings: Settings) -> Identity:
    cache = config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED", "default")
    salt = json.dumps({"hash": algorithm, "seed": seed, "salt": settings.salt}, sort_keys=True)
    return Identity(
        model=str(config.model_config.model)[:256],
        revision=_weights(config, settings),
        dtype=str(cache.cache_dtype),
        layout=layout.name,
        block_tokens=block_tokens(kv_cache_config),
        key_bytes=check_hash(algorithm),
        parts=ranks.parts,
        shards=(len(layout.layers),),
        shard_bytes=layout.layer_bytes,
        salt=salt.encode(),
    )


def block_tokens(kv_cache_config: Any) -> int:
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
