"""Chained block keys: ucm_keys_sha256 and ucm_keys_md5."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

from ._native import lib
from .buffers import Blocks, uint32s
from .errors import check


def _chain(size: int, tokens: Blocks, block_tokens: int, parent: Optional[bytes], function: Any, *more: Any) -> bytes:
    if parent is not None and len(parent) != size:
        raise ValueError(f"the parent key has {size} bytes, {len(parent)} were given")
    if block_tokens <= 0:
        raise ValueError(f"a block has at least 1 token, not {block_tokens}")
    borrowed, n_tokens = uint32s(tokens)
    n = n_tokens // block_tokens
    out = ctypes.create_string_buffer(max(size * n, 1))
    if n > 0:
        check(function(*more, parent, borrowed.address, block_tokens, n, out))
    return out.raw[: size * n]


def sha256_chain(tokens: Blocks, block_tokens: int, parent: Optional[bytes] = None) -> bytes:
    """Packed keys of 32 bytes for the full blocks of `tokens`; parent: the key before them."""
    return _chain(32, tokens, block_tokens, parent, lib.ucm_keys_sha256)


def md5_chain(meta: str, tokens: Blocks, block_tokens: int, parent: Optional[bytes] = None) -> bytes:
    """Packed keys of 16 bytes like the original UCM library's; meta is its "model:size:dtype:rank"."""
    return _chain(16, tokens, block_tokens, parent, lib.ucm_keys_md5, meta.encode())
