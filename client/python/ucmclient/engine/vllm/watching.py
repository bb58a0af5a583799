"""What this package notes because vLLM does not tell a connector. It notes when weights are read, and when they may have changed in a running engine. It
also notes which names of images and the like a client chose. It wraps functions of vLLM, once in each process. That happens when the connector's module is
imported, or earlier if the wheel's entry point is installed."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Optional

from ..weights import begins
from .inputs import CHOSEN

logger = logging.getLogger("ucmclient.engine.vllm")

#: Methods of workers that change weights.
_UPDATES = frozenset((
    "reload_weights", "load_weights", "update_weights", "start_weight_update", "start_draft_weight_update", "finish_weight_update", "reset_weights",
    "load_model",
))
#: Methods of workers that an engine's user may call by name, and that leave weights alone. What others do is unknown.
_HARMLESS = frozenset((
    "add_lora", "remove_lora", "pin_lora", "list_loras", "profile", "check_health", "reset_mm_cache", "reset_encoder_cache", "synchronize_device",
    "get_supported_tasks", "supports_draft_weight_updates", "init_weight_transfer_engine", "get_kv_connector_handshake_metadata", "save_sharded_state",
    "save_tensorized_model", "report_device_id", "get_kv_cache_spec", "determine_available_memory", "get_cache_block_size_bytes", "update_max_model_len",
    "compute_weight_checksums", "shutdown_weight_transfer_engine", "get_model_inspection", "release_late_interaction_query_cache",
))


class _Seen:
    """How often this process's weights changed for certain, and how often something was done that may have changed them."""

    changes = doubts = 0


def changes(doubts: bool) -> int:
    """A number that grows with each change. doubts: also counts changes that are not certain."""
    return _Seen.changes + (_Seen.doubts if doubts else 0)


def changed(what: Any) -> None:
    """An engine of this process runs a method of its workers by name, or a function of the caller's."""
    if what in _HARMLESS:
        return
    if what in _UPDATES:
        _Seen.changes += 1
    else:
        _Seen.doubts += 1


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    real = getattr(owner, name, None)
    if real is None:
        return False
    if not hasattr(real, "noted"):
        noted = functools.wraps(real)(around(real))
        noted.noted = True  # type: ignore[attr-defined]
        setattr(owner, name, noted)
    return True


def _and_then(what: Callable[[tuple[Any, ...]], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes a change before and after a call, since a step during the call may have either weights. what: from its arguments."""
    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            changed(what((*args[1:], *named.values())))
            try:
                return real(*args, **named)
            finally:
                changed(what((*args[1:], *named.values())))
        return noted
    return around


def loads() -> None:
    """Looks at a model's files when this process begins to read them, and from then on notes what changes its weights. For loaders that are not noted,
    files are compared with the process's start."""
    try:
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader as loader
    except ImportError:
        return

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, vllm_config: Any, model_config: Any, *args: Any, **named: Any) -> Any:
            begins(str(getattr(model_config, "model", "")))
            model = real(self, vllm_config, model_config, *args, **named)
            _wrap(type(model), "load_weights", _and_then(lambda _: "load_weights"))
            worker = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
            for name in _UPDATES - {"load_model"} if worker is not None else ():
                _wrap(worker, name, _and_then(lambda _, name=name: name))
            return model
        return noted

    _wrap(loader, "load_model", around)


def calls() -> bool:
    """Notes what an engine's user has its workers do. Call it in the process of the scheduler. False: this vLLM has another way to do it."""
    core: Optional[Any] = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
    _wrap(core, "set_weight_version", _and_then(lambda _: "update_weights"))
    return _wrap(core, "collective_rpc", _and_then(lambda args: args[0] if args and isinstance(args[0], str) else "a function"))


def names() -> None:
    """Marks names of items that a client chose. What vLLM makes of them, together with a processor's options, looks like a hash of the item."""
    try:
        from vllm.multimodal.processing.inputs import ProcessorInputs as inputs
    except ImportError:
        return

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **named: Any) -> Any:
            found, chosen = real(self, *args, **named), getattr(self, "mm_uuid_items", None) or {}
            return {
                kind: [CHOSEN + name if uuid is not None else name for name, uuid in zip(of, chosen.get(kind) or [None] * len(of))]
                for kind, of in found.items()
            }
        return noted

    _wrap(inputs, "get_mm_hashes", around)
