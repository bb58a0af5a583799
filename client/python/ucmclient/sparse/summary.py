"""What a summary is computed from and how, and summaries in the caller's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_uint64
from dataclasses import dataclass
from typing import Any, Optional, Union

from .._native import lib
from ..errors import check
from . import _native as native
from .choice import Choice, Score, Selection, TopK, query_of, split
from .tensors import SIZES, Numbers, Tensor, dtype_number


@dataclass(frozen=True)
class Shape:
    """Where K and V lie in one layer of a block. The default is K as [tokens][kv_heads][head_dim], then V likewise;
    order "hnd" swaps the first two. Strides and offsets in bytes say anything else. v_head_dim 0: there is no V, or
    nobody reads it. MLA: kv_heads 1, and rope_dim last channels that are rotated."""

    dtype: Any
    tokens: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    rope_dim: int = 0
    order: str = "nhd"
    k_offset: int = 0
    k_token_stride: Optional[int] = None
    k_head_stride: Optional[int] = None
    v_offset: Optional[int] = None
    v_token_stride: Optional[int] = None
    v_head_stride: Optional[int] = None

    def _strides(self, head_dim: int) -> tuple[int, int]:
        if self.order not in ("nhd", "hnd"):
            raise ValueError(f'order is {self.order!r}: "nhd" or "hnd"')
        row = head_dim * SIZES[dtype_number(self.dtype)]
        return (row * self.kv_heads, row) if self.order == "nhd" else (row, row * self.tokens)

    def native(self) -> native.Shape:
        k_token, k_head = self._strides(self.head_dim)
        v_token, v_head = self._strides(self.v_head_dim)
        if self.v_head_dim == 0:
            v_offset = 0
        elif self.v_offset is None:
            v_offset = self.k_offset + self.tokens * self.kv_heads * self.head_dim * SIZES[dtype_number(self.dtype)]
        else:
            v_offset = self.v_offset
        return native.Shape(
            dtype_number(self.dtype),
            self.tokens,
            self.kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.rope_dim,
            self.k_offset,
            k_token if self.k_token_stride is None else self.k_token_stride,
            k_head if self.k_head_stride is None else self.k_head_stride,
            v_offset,
            v_token if self.v_token_stride is None else self.v_token_stride,
            v_head if self.v_head_stride is None else self.v_head_stride,
        )


_METHODS = {"mean": 1, "submean": 2, "box": 3, "hash": 4, "stats": 5, "tokens": 6}
_KINDS = ("mean", "max", "normalised")
_PAIRS = ("neox", "interleaved")


class Summary:
    """A method, its parameters and a Shape. The functions below make them."""

    def __init__(self, method: str, shape: Shape, keep: Optional[Sequence[int]] = None, **parameters: int):
        self.method, self.shape = method, shape
        self._keep = None
        self.native = native.Summary(method=_METHODS[method], shape=shape.native(), **parameters)
        if keep is not None:
            bits = bytearray((shape.head_dim // 2 + 7) // 8)
            for pair in keep:
                if not 0 <= pair < shape.head_dim // 2:
                    raise ValueError(f"keep names pair {pair} of {shape.head_dim // 2}")
                bits[pair // 8] |= 1 << pair % 8
            self._keep = (ctypes.c_uint8 * len(bits)).from_buffer(bits)
            self.native.keep, self.native.keep_bytes = ctypes.addressof(self._keep), len(bits)
        size = c_uint64()
        check(lib.ucm_sparse_summary_bytes(byref(self.native), byref(size)))
        #: Bytes of one layer of one block.
        self.bytes: int = size.value

    def compute(self, kv: Any, n: Optional[int] = None, stride: Optional[int] = None) -> Summaries:
        """Summaries of n blocks (or layers), the first at the tensor's begin, each `stride` bytes after the one before.
        By default n is the tensor's first dimension, and the blocks follow each other without a gap."""
        source = Tensor(kv, "kv")
        if source.dtype is not None:
            source.wants(self.native.shape.dtype, "kv")
        if n is None:
            n = source.shape[0] if source.shape else 0
        if stride is None:
            stride = source.bytes // n if n else 0
        out = Numbers(self.bytes // 4 * n, "I")
        check(
            lib.ucm_sparse_summary_local(
                byref(self.native), source.address, source.bytes, stride, n, out.address, self.bytes * n, self.bytes
            )
        )
        return Summaries(self, out.view)


def mean(shape: Shape, kind: str = "mean") -> Summary:
    """ESA: one vector a KV head. kind "max": each channel's largest value; "normalised": the mean, divided by its length."""
    return Summary("mean", shape, kind=_number(_KINDS, kind, "kind"))


def submean(shape: Shape, run: int, keep: Optional[Sequence[int]] = None, pairs: str = "neox") -> Summary:
    """GSA, KVStar: means of `run` tokens. keep: the RoPE pairs that count, by default all. Pair i is the channels i and i +
    head_dim / 2 ("neox"), or 2i and 2i + 1 ("interleaved")."""
    return Summary("submean", shape, keep, run=run, pairs=_number(_PAIRS, pairs, "pairs"))


def box(shape: Shape) -> Summary:
    """Quest, PSA: smallest and largest value of each channel. No key of a block scores above its box."""
    return Summary("box", shape)


def hash_(shape: Shape, bits: int = 128, seed: int = 0, rope_bits: int = 0) -> Summary:
    """sparse.hash; here that name would hide the builtin, which Shape's own hash uses. GSA on device: 64, 128 or 256 sign
    bits a token and KV head, rope_bits of them for MLA's rotated part."""
    return Summary("hash", shape, bits=bits, seed=seed, rope_bits=rope_bits)


def stats(shape: Shape) -> Summary:
    """Mean and variance of K and, with v_head_dim, mean of V: scores estimate the attention mass of a block."""
    return Summary("stats", shape)


def tokens(shape: Shape, chosen: int = 2, rest: bool = False) -> Summary:
    """InfLLM: a few tokens stand for the block. rest: so does the mean of the others, all of them in 4 bits a channel,
    and scores estimate the block's attention mass."""
    return Summary("tokens", shape, chosen=chosen, rest=int(rest))


def _number(names: tuple[str, ...], name: str, what: str) -> int:
    if name not in names:
        raise ValueError(f"{what} is {name!r}: one of {', '.join(names)}")
    return names.index(name)


class Summaries:
    """Summaries of blocks in this process: what Summary.compute returns, or summaries that were loaded.

    data: packed, or `stride` bytes apart. missing: a byte a block, not 0: it has none, and is always chosen."""

    def __init__(self, summary: Summary, data: Any, stride: Optional[int] = None, missing: Optional[bytes] = None):
        self.summary, self.data = summary, data
        source = self._source = Tensor(data, "data")
        self.stride = summary.bytes if stride is None else stride
        if self.stride < summary.bytes:
            raise ValueError(f"stride is {self.stride}; a summary has {summary.bytes} bytes")
        self.n = (source.bytes + self.stride - summary.bytes) // self.stride
        if missing is not None and len(missing) != self.n:
            raise ValueError(f"missing has {len(missing)} bytes for {self.n} blocks")
        self._missing = None if missing is None else (ctypes.c_uint8 * self.n).from_buffer_copy(missing)
        self.native = native.Summaries(source.address, source.bytes, self.stride, self.n)
        if self._missing is not None:
            self.native.missing = ctypes.addressof(self._missing)

    def __len__(self) -> int:
        return self.n

    def _query(
        self, q: Any, score: Score, dtype: Any, choose: Optional[Choice] = None
    ) -> tuple[Tensor, int, native.Score, int]:
        query, q_dtype, spec = query_of(q, dtype, score, self.summary, batch=False, choose=choose)
        return query, q_dtype, spec, self.summary.shape.kv_heads if score.heads == "each" else 1

    def scores(self, q: Any, score: Score = Score(), dtype: Any = None) -> list[memoryview]:
        """A float a block, for each list. q: [q_heads][head_dim], or [rows][q_heads][head_dim]."""
        query, q_dtype, spec, lists = self._query(q, score, dtype)
        out = Numbers(lists * self.n, "f")
        check(
            lib.ucm_sparse_score_local(
                byref(self.summary.native), byref(spec), byref(self.native), query.address, q_dtype, out.address,
                lists * self.n,
            )
        )
        return [out.view[i * self.n : (i + 1) * self.n] for i in range(lists)]

    def select(
        self, q: Any, choose: Union[TopK, Choice] = TopK(), score: Score = Score(), dtype: Any = None
    ) -> Selection:
        query, q_dtype, spec, lists = self._query(q, score, dtype, choose)
        room = lists * min(self.n, choose.limit or self.n)
        counts, index, scores = Numbers(lists, "I"), Numbers(room, "I"), Numbers(room, "f")
        out = native.Selected(
            counts.pointer(ctypes.c_uint32), index.pointer(ctypes.c_uint32), scores.pointer(ctypes.c_float), lists, room
        )
        check(
            lib.ucm_sparse_select_local(
                byref(self.summary.native), byref(spec), byref(choose.native()), byref(self.native), query.address,
                q_dtype, byref(out),
            )
        )
        return split(out, counts, index, scores, [lists])[0]
