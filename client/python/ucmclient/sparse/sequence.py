"""Namespaces of summaries, sequences, and selections by the daemon."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_uint32, c_void_p
from dataclasses import dataclass, replace
from typing import Any, Optional

from .._native import lib
from ..buffers import Blocks, Keys, keys as borrow_keys, uint32s
from ..client import Client, Namespace
from ..errors import check
from ..handle import _Handle, _timeout
from ..region import Task, parts_of, transfer
from . import _native as native
from .choice import Choice, Score, Selection, TopK, query_of, split
from .summary import Summary
from .tensors import Numbers


class SummaryNamespace(Namespace):
    """The summaries of a namespace: a namespace itself, with the base's keys, for lookups, loads, dumps and regions.

    build: while this client is connected, the daemon computes the summaries of each block that is stored in the base. Close it before the
    base."""

    def __init__(self, base: Namespace, summary: Summary, build: bool = False, timeout: Optional[float] = None):
        _Handle.__init__(self, base.client)
        out = c_void_p()
        check(
            lib.ucm_sparse_summary_open(
                base.handle, byref(summary.native), int(build), _timeout(timeout), byref(out)
            )
        )
        self.base, self.summary = base, summary
        self.identity = replace(
            base.identity, dtype="summary", layout=f"summary/1/{summary.method}", layer_bytes=summary.bytes
        )
        self._handle = out.value

    def build(
        self,
        keys: Keys,
        *,
        part: Optional[int] = None,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Task:
        """Has the daemon compute summaries of blocks that are stored already; part None: of all parts."""
        return transfer(lib.ucm_sparse_summary_build, self, self, keys, None, timeout, daemon_timeout, priority=priority, **parts_of(part))

    def sequence(
        self,
        keys: Optional[Keys] = None,
        *,
        part: int = 0,
        build: bool = False,
        lease: float = 0.0,
        timeout: Optional[float] = None,
    ) -> BlockSequence:
        """A sequence of the blocks of these keys, as far as they are cached: len() tells how many."""
        sequence = BlockSequence(self, part, lease, timeout)
        if keys is not None:
            try:
                sequence.append(keys, build=build, timeout=timeout)
            except BaseException:
                sequence.close()
                raise
        return sequence


@dataclass(frozen=True)
class Appended:
    """blocks: of the sequence now. missing: keys that were not appended, from the first one that is not cached. The others
    count appended blocks: where they lie, how many have a summary, and how many of these were built now. status: a byte
    a key, a Found's number and, with a summary, 4 more."""

    blocks: int
    missing: int
    in_dram: int
    nvme: int
    shared: int
    summaries: int
    built: int
    status: bytes


class BlockSequence(_Handle):
    """The blocks of one sequence, kept in some tier, with their summaries in DRAM. ucmclient_sparse.h says what happens
    when the daemon restarts."""

    _free = lib.ucm_sequence_close

    def __init__(self, ns: SummaryNamespace, part: int = 0, lease: float = 0.0, timeout: Optional[float] = None):
        super().__init__(ns.client)
        out = c_void_p()
        check(lib.ucm_sequence_open(ns.handle, part, _timeout(lease), _timeout(timeout), byref(out)))
        self.ns, self.part = ns, part
        self._handle = out.value

    def __len__(self) -> int:
        return lib.ucm_sequence_blocks(self.handle)

    def append(
        self,
        keys: Keys,
        *,
        build: bool = False,
        priority: int = 0,
        daemon_timeout: float = 0.0,
        timeout: Optional[float] = None,
    ) -> Appended:
        """Appends blocks as long as they are cached without a gap. build: summaries that are missing are computed."""
        borrowed, n = borrow_keys(keys, self.ns.identity.key_bytes)
        status = ctypes.create_string_buffer(max(n, 1))
        more = native.SequenceKeys(
            borrowed.address, n, int(build), priority, _timeout(daemon_timeout), ctypes.addressof(status)
        )
        result = native.SequenceResult()
        check(lib.ucm_sequence_append(self.handle, byref(more), _timeout(timeout), byref(result)))
        return Appended(*(getattr(result, name) for name, _ in result._fields_), status.raw[:n])

    def select(
        self,
        layer: int,
        q: Any,
        choose: Choice = TopK(),
        score: Score = Score(),
        *,
        dtype: Any = None,
        prefetch: Optional[int] = None,
        timeout: Optional[float] = None,
    ) -> Selection:
        """The blocks that a query of this layer wants. q: [q_heads][head_dim], or [rows][q_heads][head_dim] for the
        last queries together; dtype: where the tensor has none. prefetch: a priority of 0 to 7 with which the chosen
        blocks are brought into DRAM."""
        return _select([(self, layer)], q, choose, score, dtype, prefetch, timeout, batch=False)[0]

    def prefetch(
        self, index: Blocks, *, priority: int = 0, daemon_timeout: float = 0.0, timeout: Optional[float] = None
    ) -> Task:
        """Brings blocks of the sequence into DRAM. See also Prefetcher."""
        borrowed, n = uint32s(index)
        limits = _timeout(daemon_timeout), _timeout(timeout)
        return Task(
            self.client, n, lambda out: lib.ucm_sequence_prefetch(self.handle, borrowed.address, n, priority, *limits, out)
        )


def select(
    rows: Sequence[tuple[BlockSequence, int]],
    q: Any,
    choose: Choice = TopK(),
    score: Score = Score(),
    *,
    dtype: Any = None,
    prefetch: Optional[int] = None,
    timeout: Optional[float] = None,
) -> list[Selection]:
    """BlockSequence.select for many sequences and layers in one call: rows are (sequence, layer), and q has a first dimension that is
    as long."""
    return _select(rows, q, choose, score, dtype, prefetch, timeout, batch=True)


#: Up to so many, memory is taken for every block of every list; beyond that, for what the policy chooses.
_ROOM = 1 << 24


def _select(
    rows: Sequence[tuple[BlockSequence, int]],
    q: Any,
    choose: Choice,
    score: Score,
    dtype: Any,
    prefetch: Optional[int],
    timeout: Optional[float],
    batch: bool,
) -> list[Selection]:
    if not rows:
        raise ValueError("a selection needs at least one row")
    client: Client = rows[0][0].client
    query, q_dtype, spec = query_of(q, dtype, score, rows[0][0].ns.summary, batch, choose)
    if batch and query.shape[0] != len(rows):
        raise ValueError(f"q has {query.shape[0]} entries for {len(rows)} rows")
    sequences = (c_void_p * len(rows))(*(sequence.handle for sequence, _ in rows))
    layers = (c_uint32 * len(rows))(*(layer for _, layer in rows))
    wish = 0 if prefetch is None else prefetch + 1
    what = native.Select(sequences, layers, len(rows), q_dtype, query.address, spec, choose.native(), wish)
    lists = [sequence.ns.summary.shape.kv_heads if score.heads == "each" else 1 for sequence, _ in rows]
    room = sum(n * min(len(sequence), choose.limit or len(sequence)) for n, (sequence, _) in zip(lists, rows))
    if room > _ROOM:
        least = c_uint32()
        check(lib.ucm_sparse_room(byref(what), None, byref(least)))
        room = max(least.value, _ROOM)
    counts, index, scores = Numbers(sum(lists), "I"), Numbers(max(room, 1), "I"), Numbers(max(room, 1), "f")
    out = native.Selected(
        counts.pointer(c_uint32), index.pointer(c_uint32), scores.pointer(c_float), sum(lists), max(room, 1)
    )
    check(lib.ucm_sparse_select(client.handle, byref(what), _timeout(timeout), byref(out)))
    return split(out, counts, index, scores, lists)
