"""Chained block keys: ucm_keys_sha256 and ucm_keys_md5."""

from __future__ import annotations

import ctypes
from typing import Optional

from ._native import lib
from .buffers import Blocks, uint32s
from .errors import check


def _blocks(tokens: Blocks, block_tokens: int):
    if block_tokens <= 0:
        raise ValueError(f"a block has at least 1 token, not {block_tokens}")
    borrowed, n = uint32s(tokens)
    return borrowed, n // block_tokens


def sha256_chain(tokens: Blocks, block_tokens: int, parent: Optional[bytes] = None) -> bytes:
    """Packed keys of 32 bytes for the full blocks of `tokens`; parent: the key before them."""
    if parent is not None and len(parent) != 32:
        raise ValueError(f"the parent key has 32 bytes, {len(parent)} were given")
    borrowed, n = _blocks(tokens, block_tokens)
    out = ctypes.create_string_buffer(max(32 * n, 1))
    if n > 0:
        check(lib.ucm_keys_sha256(parent, borrowed.address, block_tokens, n, out))
    return out.raw[: 32 * n]


def md5_chain(meta: str, tokens: Blocks, block_tokens: int, parent: Optional[bytes] = None) -> bytes:
    """Packed keys of 16 bytes like the original UCM library's; meta is its "model:size:dtype:rank"."""
    if parent is not None and len(parent) != 16:
        raise ValueError(f"the parent key has 16 bytes, {len(parent)} were given")
    borrowed, n = _blocks(tokens, block_tokens)
    out = ctypes.create_string_buffer(max(16 * n, 1))
    if n > 0:
        check(lib.ucm_keys_md5(meta.encode(), parent, borrowed.address, block_tokens, n, out))
    return out.raw[: 16 * n]
