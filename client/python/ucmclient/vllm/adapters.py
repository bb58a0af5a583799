"""What tells LoRA adapters apart, beside the name by which the engine hashes them."""

from __future__ import annotations

import hashlib
import os
from typing import Any


def adapter_of(request: Any) -> bytes:
    """vLLM hashes a LoRA adapter by its name, which may stand for other weights in another engine. So keys of such
    requests are hashed again with this digest of the adapter's path and the sizes and times of its files."""
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return b""
    return hashlib.sha256(files_in(str(getattr(lora, "lora_path", "") or getattr(lora, "path", ""))).encode()).digest()


def files_in(path: str) -> str:
    """An adapter's path, and names, sizes and times of its files."""
    files: list[Any] = []
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                files = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.is_file())
    except OSError:  # it is being written, so the engine's version is unknown
        files = [os.urandom(32)]
    return repr((path, files))
