"""KV tensors in memory that the daemon can map, for engines without a GPU."""

from __future__ import annotations

from typing import Any

from ...memory import SharedMemory, in_shared_memory


def bind(config: Any, kv_caches: dict[str, Any]) -> None:
    """Layers that have views of their tensor, and not the tensor itself, get views of its new memory."""
    for name, layer in config.compilation_config.static_forward_context.items():
        bound = getattr(layer, "kv_cache", None)
        if name in kv_caches and bound is not kv_caches[name] and hasattr(layer, "bind_kv_cache"):
            layer.bind_kv_cache(kv_caches[name])


def share(kv_caches: dict[str, Any]) -> list[SharedMemory]:
    """Moves an engine's KV tensors, while they are empty, into memory that the daemon can map. Each tensor keeps its
    object, shape and strides."""
    shared: dict[int, SharedMemory] = {}
    for tensor in kv_caches.values():
        if in_shared_memory(tensor.data_ptr()):
            continue
        import torch

        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            shared[storage.data_ptr()] = SharedMemory(storage.nbytes())
        to = torch.frombuffer(shared[storage.data_ptr()].buffer, dtype=torch.uint8).untyped_storage()
        tensor.set_(to, tensor.storage_offset(), tensor.size(), tensor.stride())
    return list(shared.values())
