"""SGLang's host pools in memory that the daemon can map: the entry point "sglang.srt.plugins" of this package.

SGLang takes a host pool from a memfd of its own if the storage's extra config says "allocator": "shm". That memfd can't be sealed against
shrinking, and the daemon maps no memory that a client can take away from it. So here these pools are made of SharedMemory, and otherwise
as SGLang makes them. Pools of other allocators stay as they are."""

from __future__ import annotations

import math
import mmap
import os
from typing import Any

from ...memory import SharedMemory

_PAGE = mmap.PAGESIZE
#: SGLang's function, which ShmHostTensorAllocator calls; its allocator keeps what it returns.
TARGET = "sglang.srt.mem_cache.storage.mmap.alloc_shm"


def alloc_shm(dims: tuple[int, ...], dtype: Any) -> tuple[Any, int, SharedMemory]:
    """Returns a tensor in memory that is there already, as cudaHostRegister needs it. Next a descriptor, which the caller closes. Last an
    object, which the caller keeps as long as the daemon may map the tensor."""
    import torch

    count = math.prod(dims)
    size = max(1, -(-count * dtype.itemsize // _PAGE)) * _PAGE
    shared = SharedMemory(size)
    tensor = torch.frombuffer(shared.buffer, dtype=dtype, count=count).reshape(dims)
    return tensor, os.dup(shared.fd), shared


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, alloc_shm, HookType.REPLACE)
