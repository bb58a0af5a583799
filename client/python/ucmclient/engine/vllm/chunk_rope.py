"""How an engine's model rotates K, for the setting `chunks`. It comes from what vLLM says of the model, and is compared with the tables that vLLM
rotates by.

Reads vLLM's objects by attribute, without importing vLLM. docs/design/blend.md has the kinds of scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...region import Rope
from .identity import Unsupported

REMEDY = 'or remove the setting "chunks"'
#: Models of vLLM's own whose layers all rotate K, by one rotary embedding. True: pairs are neighbours, which no configuration says.
_INTERLEAVED = {
    "LlamaForCausalLM": False, "MistralForCausalLM": False, "MixtralForCausalLM": False, "Qwen2ForCausalLM": False, "Qwen2MoeForCausalLM": False,
    "Qwen3ForCausalLM": False, "Qwen3MoeForCausalLM": False, "Phi3ForCausalLM": False, "StableLmForCausalLM": False, "Glm4ForCausalLM": True,
}
_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
#: Rows of vLLM's tables that are looked at. Frequencies that differ by 1/50000 show at the last; tables in BF16 are right to 1/256.
_LOOKED, _NEAR = (1, 10, 100, 1000), 0.01


@dataclass(frozen=True)
class Rerotation:
    """rope: without rows, which the engine's pages decide. length: the one for which the engine computes dynamic scaling's frequencies, whatever a
    request's length is; 0 for other kinds."""

    rope: Rope
    length: int

    @property
    def sentence(self) -> str:
        """For the log, after the start."""
        of = self.rope
        return f"chunks: {of.rotary} channels of a head turn, base {of.base:g}, scaling {of.scaling}"


def rerotation_of(config: Any) -> Rerotation:
    """Refuses what can't be re-rotated."""
    model = config.model_config
    of = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    names = getattr(model, "architectures", None) or getattr(getattr(model, "hf_config", None), "architectures", None) or ["this model"]
    if names[0] not in _INTERLEAVED:
        raise Unsupported(
            f"chunks: how {names[0]} rotates K is not known (known are {', '.join(sorted(_INTERLEAVED))}): take another model, {REMEDY}"
        )
    return _rerotation(of, _parameters(of), _INTERLEAVED[names[0]])


def _parameters(of: Any) -> Mapping[str, Any]:
    found = getattr(of, "rope_parameters", None)
    if found is None:  # before transformers 5
        found = {"rope_theta": getattr(of, "rope_theta", 10000.0), **(getattr(of, "rope_scaling", None) or {})}
    kinds = [one for one in found.values() if isinstance(one, Mapping)]
    if kinds:
        raise Unsupported(f"chunks: the model's layers rotate K in {len(kinds)} ways: take another model, {REMEDY}")
    return found


def _rerotation(of: Any, found: Mapping[str, Any], interleaved: bool) -> Rerotation:
    kind = found.get("rope_type", found.get("type")) or "default"
    strange = [name for name in ("mrope_section", "alpha", "use_fope", "rope_dim", "extrapolation_factor") if found.get(name)]
    if kind not in _KINDS or strange:
        what = f"{kind!r} with {strange[0]}" if strange else repr(kind)
        raise Unsupported(
            f"chunks: the model's rope_type is {what}; default, linear, dynamic, yarn and llama3 can be re-rotated: take another model, {REMEDY}"
        )
    dim = getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
    share = found.get("partial_rotary_factor") or getattr(of, "partial_rotary_factor", None) or 1.0
    trained = found.get("original_max_position_embeddings") or 0
    if kind == "dynamic":
        trained = found.get("max_trained_positions") or of.max_position_embeddings
    fast, slow = ("high_freq_factor", "low_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow")
    rope = Rope(
        rows=1, dim=dim, rotary=int(dim * share), base=float(found.get("rope_theta") or 10000.0), interleaved=interleaved, scaling=kind,
        factor=float(found.get("factor") or 1.0), trained=int(trained), fast=float(found.get(fast) or 32.0), slow=float(found.get(slow) or 1.0),
        whole=found.get("truncate", True),
    )
    return Rerotation(rope, int(of.max_position_embeddings) if kind == "dynamic" else 0)


# ---- what vLLM rotates by ----


def check_tables(of: Rerotation, tables: Iterable[Any]) -> None:
    """tables: vLLM's rotary embeddings of this process. Refuses an engine that does not rotate as its configuration says, or that does not show its
    tables. A vLLM of another version may understand a kind of scaling otherwise."""
    there = list(tables)
    if not there:
        raise Unsupported(f"chunks: this vLLM does not say by which tables it rotates K: take another version, {REMEDY}")
    if not all(_alike(of, one) for one in there):
        raise Unsupported(
            f"chunks: vLLM does not rotate K as the model's configuration says ({of.rope.rotary} of {of.rope.dim} channels, base {of.rope.base:g}, "
            f"scaling {of.rope.scaling}): take another model, {REMEDY}"
        )


def _alike(of: Rerotation, table: Any) -> bool:
    cache = getattr(table, "cos_sin_cache", None)
    said = getattr(table, "head_size", 0), getattr(table, "rotary_dim", 0), not getattr(table, "is_neox_style", True)
    if cache is None or said != (of.rope.dim, of.rope.rotary, of.rope.interleaved):
        return False
    wanted, half = frequencies(of), of.rope.rotary // 2
    for position in (row for row in _LOOKED if row < len(cache)):
        row = cache[position].tolist()
        for f, cos, sin in zip(wanted, row[:half], row[half:]):
            length = math.hypot(cos, sin) or 1.0  # with YaRN it is not 1
            if abs(cos / length - math.cos(f * position)) > _NEAR or abs(sin / length - math.sin(f * position)) > _NEAR:
                return False
    return True


def frequencies(of: Rerotation) -> list[float]:
    """Radians a position of each pair, as docs/design/blend.md has them."""
    rope, d = of.rope, of.rope.rotary
    base = rope.base
    if rope.scaling == "dynamic" and of.length > rope.trained:
        base *= (rope.factor * of.length / rope.trained - (rope.factor - 1)) ** (d / (d - 2))
    plain = [base ** (-2 * i / d) for i in range(d // 2)]
    if rope.scaling == "linear":
        return [f / rope.factor for f in plain]
    if rope.scaling == "llama3":
        return [_of_llama3(rope, f) for f in plain]
    if rope.scaling == "yarn":
        return [f * (1 - share) + f / rope.factor * share for f, share in zip(plain, _ramp(rope))]
    return plain


def _of_llama3(rope: Rope, f: float) -> float:
    rotations = rope.trained * f / (2 * math.pi)
    share = min(1.0, max(0.0, (rotations - rope.slow) / (rope.fast - rope.slow)))
    return (1 - share) * f / rope.factor + share * f


def _ramp(rope: Rope) -> list[float]:
    d = rope.rotary
    low, high = (d * math.log(rope.trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.base)) for rotations in (rope.fast, rope.slow))
    if rope.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    return [min(1.0, max(0.0, (i - low) / (high - low or 0.001))) for i in range(d // 2)]
