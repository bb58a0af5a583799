"""What a request's KV depends on and the engine's block hashes leave out. The connector hashes it into its keys. It is which places of a prompt with embeddings
are tokens, and the true contents of images and the like whose names a client chose. tests/engines/vllm/request_fields.py has all fields of a request. Imports
nothing of vLLM."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any, Optional

#: Precedes the name of an item if a client chose that name, or one that it was made of.
CHOSEN = "named-by-a-client-"
#: A hash of the engine's own.
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")


def mask_of(request: Any) -> Optional[list[bool]]:
    """Which places of the prompt are tokens; None: all are, or none."""
    return getattr(request, "prompt_is_token_ids", None) if getattr(request, "prompt_embeds", None) is not None else None


def chosen_items(request: Any) -> list[tuple[int, bytes]]:
    """For items that a client has named: the place, and a hash of the model's input. A name may stand for other bytes in another engine, or a moment later. The
    hash is random if these bytes are not in this process."""
    found = []
    for one in getattr(request, "mm_features", None) or ():
        name = getattr(one, "mm_hash", None) or one.identifier
        if not _HASH.fullmatch(name):
            found.append((one.mm_position.offset, _digest(getattr(one, "data", None))))
    return found


def more_of(request: Any) -> bytes:
    """A hash of a pooling model's inputs other than tokens. Only the model knows their meaning."""
    return os.urandom(16) if getattr(getattr(request, "pooling_params", None), "extra_kwargs", None) else b""


class Mask:
    """For each block a hash of the mask up to its end."""

    def __init__(self, mask: list[bool], block_tokens: int):
        self._mask, self._tokens = bytes(mask), block_tokens
        self._digests: list[bytes] = []

    def digest(self, block: int) -> bytes:
        while len(self._digests) <= block:
            at = len(self._digests) * self._tokens
            before = self._digests[-1] if at else b"mask"
            self._digests.append(hashlib.sha256(before + self._mask[at : at + self._tokens]).digest())
        return self._digests[block]


def _digest(data: Any) -> bytes:
    digest, there = hashlib.sha256(), False
    for name, value in sorted((data or {}).items()):
        digest.update(f"/{name}".encode())
        for one in _leaves(getattr(value, "data", value)):
            if hasattr(one, "untyped_storage"):
                there = True
                digest.update(f"/{one.dtype}{tuple(one.shape)}".encode())
                digest.update(_bytes(one))
            else:
                digest.update(f"/{one!r}".encode())
    return digest.digest() if there else os.urandom(32)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
