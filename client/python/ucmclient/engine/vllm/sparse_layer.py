"""What the attention backends of sparse decoding have in common: which layers they refuse, and the spec of their KV cache."""

from __future__ import annotations

from typing import Any, Optional

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType

from .identity import Unsupported

#: Whether the engine whose layers this process made last has the setting.
_wanted = False


def check_layer(*, attn_type: Any, **of: Any) -> None:
    """Whether a layer can be attended sparsely, from what vLLM makes its attention with."""
    global _wanted
    _wanted = setting() is not None
    refused = {
        "ALiBi": of["alibi_slopes"] is not None,
        "sliding windows": of["sliding_window"] is not None,
        "a soft cap of logits": bool(of["logits_soft_cap"]),
        "attention sinks": of["sinks"] is not None,
        "encoders": attn_type != AttentionType.DECODER,
        "layers that share a KV cache": of["kv_sharing_target_layer_name"] is not None,
    }
    for what in (what for what, there in refused.items() if _wanted and there):
        raise Unsupported(f'sparse decoding does not work with {what}: remove the setting "sparse"')


def spec_of(spec: Any) -> Any:
    """For a vLLM that asks the backend for the spec of its KV cache. Otherwise sparse_spec.serve replaces it."""
    if not _wanted or type(spec).__name__ != "FullAttentionSpec":
        return spec
    from .sparse_spec import SparseSpec

    return SparseSpec.of(spec)


def setting(config: Any = None) -> Optional[str]:
    transfer = (get_current_vllm_config() if config is None else config).kv_transfer_config
    extra = (transfer.kv_connector_extra_config or {}) if transfer is not None else {}
    if any((one.get("kv_connector_extra_config") or {}).get("sparse") for one in extra.get("connectors", ())):
        # Pages that go back may still be read by another one's stores.
        raise Unsupported("sparse decoding does not work with other connectors alongside UcmConnector: start with it alone")
    return extra.get("sparse")
