"""What this package notes of vLLM where vLLM tells a connector nothing: when weights are read. It wraps functions of vLLM, once in each process, when the
connector's module is imported, and earlier where the wheel's entry point is installed."""

from __future__ import annotations

import functools
from typing import Any

from ..weights import begins


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
