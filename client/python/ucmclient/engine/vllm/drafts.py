"""Speculative decoding whose draft keeps KV of its own (EAGLE, MTP, draft models). The draft's layers lie next to the model's in each
block (docs/vllm.md, "Draft layers"). Reads vLLM's configuration objects by attribute, without importing vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ..weights import Weights
from .identity import Unsupported, of_model
from .settings import Settings

#: Methods that keep no KV.
_WITHOUT = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


@dataclass(frozen=True)
class Drafts:
    #: The draft's KV of a token is a function of the next token, too. A draft model's is not.
    reads_next: bool
    #: All that is known of the draft, for the identity.
    name: dict[str, Any]
    #: Why that may be wrong; "": it is right.
    doubt: str


def drafts_of(config: Any) -> Optional[Drafts]:
    """None: there is no draft, or it keeps no KV."""
    of = getattr(config, "speculative_config", None)
    method = getattr(of, "method", None)
    if of is None or method in _WITHOUT:
        return None
    model = getattr(of, "draft_model_config", None)
    hf_config, read = getattr(model, "hf_config", None), of_model(model) if model is not None else Weights(None)
    return Drafts(
        method != "draft_model",
        {
            "method": method,
            "model": str(getattr(model, "model", getattr(of, "model", None))),
            "revision": getattr(model, "revision", None),
            "commit": getattr(hf_config, "_commit_hash", None),
            "files": read.known,
            "quantization": str(getattr(model, "quantization", None)),
            "dtype": str(getattr(model, "dtype", None)),
            "config": hf_config.to_dict() if hf_config is not None else None,
            "parallel": bool(getattr(of, "parallel_drafting", False)),
        },
        read.doubt,
    )


def check_drafts(config: Any, groups: Optional[Sequence[Any]], settings: Settings) -> None:
    drafts = drafts_of(config)
    if drafts is None:
        return
    if drafts.name["method"] == "extract_hidden_states":
        raise Unsupported("speculative method extract_hidden_states keeps hidden states, not KV: start without it")
    if groups is not None:
        raise Unsupported(
            "speculative decoding with draft layers or a draft model is not supported for models with several kinds of KV cache: start "
            "without it, or with method ngram"
        )
    if getattr(config, "num_prefill_lookahead_tokens", 1) > 1:
        raise Unsupported(
            "a chain of MTP modules, each of which reads one token further ahead, is not supported: set num_speculative_tokens to 1"
        )
    if settings.layerwise:
        raise Unsupported("layerwise: draft layers run after failed loads were reported: remove the setting layerwise")
