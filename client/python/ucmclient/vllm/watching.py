"""What this package notes of vLLM where vLLM tells a connector nothing: when weights are read, and which names of images and the like a client chose. It wraps functions of vLLM, once in each process, when the
connector's module is imported, and earlier where the wheel's entry point is installed."""

from __future__ import annotations

import functools
from typing import Any

from ..weights import begins
from .inputs import CHOSEN


def loads() -> None:
    """Looks at a model's files when this process begins to read them. Loaders that are not noted leave the process's start to compare with."""
    try:
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader as loader
    except ImportError:
        return
    load = loader.load_model
    if hasattr(load, "noted"):
        return

    @functools.wraps(load)
    def noted(self: Any, vllm_config: Any, model_config: Any, *args: Any, **named: Any) -> Any:
        begins(str(getattr(model_config, "model", "")))
        return load(self, vllm_config, model_config, *args, **named)

    noted.noted = True  # type: ignore[attr-defined]
    loader.load_model = noted


def names() -> None:
    """Marks names of items that a client chose: what vLLM makes of them, together with a processor's options, looks like a hash of the item."""
    try:
        from vllm.multimodal.processing.inputs import ProcessorInputs as inputs

        hashes = inputs.get_mm_hashes
    except (ImportError, AttributeError):
        return
    if hasattr(hashes, "noted"):
        return

    @functools.wraps(hashes)
    def noted(self: Any, *args: Any, **named: Any) -> Any:
        found, chosen = hashes(self, *args, **named), getattr(self, "mm_uuid_items", None) or {}
        return {
            kind: [CHOSEN + name if uuid is not None else name for name, uuid in zip(of, chosen.get(kind) or [None] * len(of))]
            for kind, of in found.items()
        }

    noted.noted = True  # type: ignore[attr-defined]
    inputs.get_mm_hashes = noted
