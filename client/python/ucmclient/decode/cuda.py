"""Decode steps on the worker's GPU, with torch's tensors there: ucmclient_cuda_decode.h in Python.

    steps = cuda.Steps(pool, shape, layers=32, q_heads=32, layer_bytes=65536, numbers=8192, requests=8, sequences=8,
                       room=select.room, window=40)
    steps.begin()  # a step: on torch's current stream, or in a graph that captures it
    for layer in range(32):
        ...  # the layer's q; its K and V go into the engine's pages
        chosen = select(summaries[layer], table, candidates, q)
        out = steps.layer(layer, chosen, table, requests, q, cuda.Pages(pages[layer], page_table, first, length))
    steps.end()

    torch.cuda.current_stream().synchronize()
    if steps.result().flags:  # these outputs don't count
        ...  # bring steps.unserved(), put() it, run the same step again

A step launches kernels and waits for nothing, so one CUDA graph can hold all of it; tensors that it names must then stay. Calls between steps wait for the
stream. torch is not imported. Needs the optional libucmclient_cuda.
"""

from __future__ import annotations

import array
import bisect
import ctypes
import enum
from collections.abc import Iterable
from ctypes import byref, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from ..buffers import Blocks, uint32s
from ..sparse.cuda import Chosen, Selector, _dtype, _OnGpu, _step
from ..sparse.summary import Shape
from ..sparse.tensors import DTYPES, SIZES, dtype_number
from ..sparse.mapping import Referenced, SharedMapping
from . import _native_cuda as native
from .choices import Rounds

_RULES, _KNOWN = ("", "psa", "estimated", "certified"), ("", "estimates", "bounds")


class Flag(enum.IntFlag):
    """enum ucm_cuda_decode_flag: UNSERVED and NO_ENTRY: a block is not there. FULL: the step needs more entries than there are. STRAY and NO_PAGE are mistakes
    of the caller."""

    UNSERVED = 1
    FULL = 2
    LIST_FULL = 4
    STRAY = 8
    NO_ENTRY = 256
    NO_PAGE = 512


@dataclass(frozen=True)
class Result:
    """The result of the step that ended last. flags 0: it is valid. unserved: layer heads of blocks that did not come. These count since the handle was opened.
    missed: layer heads that were in no entry. taken: entries that they took. floors_broken: those taken in spite of a floor. These are of all lists and layers,
    with rounds. attended: blocks. rounds: the most of one list. share: the least that one covers."""

    step: int
    flags: Flag
    unserved: int
    missed: int
    taken: int
    floors_broken: int
    attended: int = 0
    rounds: int = 0
    share: float = 0.0


class Ranked(NamedTuple):
    """What Steps with rounds need of a layer's selection, which must be the last that was launched. n_blocks: as the selection got it. least: int32
    [sequences], blocks that each list attends before it may stop. report: int32 [sequences][lists][4], to be written: blocks, rounds, and as float32 share and
    certificate; struct ucm_cuda_decode_report."""

    select: Selector
    n_blocks: Any
    least: Any = None
    report: Any = None


class Key(NamedTuple):
    """A layer head of a block: one KV head of one of its layers. If entries are of a layer, it is the layer, with head 0."""

    layer: int
    head: int
    number: int


@dataclass(frozen=True)
class Pages:
    """The engine's pages of a layer. kv: the first dimension counts pages, which page_shape describes. table: int32 [sequences][...], the page of each block of
    a sequence. first: int32 [sequences], the local window's first block; length: int32 [sequences], tokens of the sequence with the new one. of: int32
    [numbers], the page that has the complete block of a number, or -1. Misses are copied from these pages. For that page_shape must be the shape of the
    daemon's blocks."""

    kv: Any
    table: Any
    first: Any
    length: Any
    of: Any = None


def _layout(shape: Shape, tokens: int, kv_heads: int, head_dim: int, dtype: int) -> native.Layout:
    s = shape.native()
    if (s.tokens, s.kv_heads, s.head_dim, s.dtype) != (tokens, kv_heads, head_dim, dtype):
        raise ValueError("shape and page_shape differ in tokens, KV heads, channels or dtype")
    if s.rope_dim:  # V is the first channels of K
        return native.Layout(s.k_offset, s.k_token_stride, s.k_head_stride, 0, 0, 0)
    if s.v_head_dim != s.head_dim:
        raise ValueError(f"V has {s.v_head_dim} channels and K {s.head_dim}: as many are wanted, or a latent with rope_dim (MLA)")
    return native.Layout(s.k_offset, s.k_token_stride, s.k_head_stride, s.v_offset, s.v_token_stride, s.v_head_stride)


class Steps(_OnGpu):
    """A pool of entries, their blocks, and the launches of steps over it.

    pool: a contiguous tensor on the GPU; bytes_of() tells its size. shape: of one layer of a block in the daemon, with layer_bytes from one layer to the next.
    page_shape: of one of the engine's pages; None: as shape. numbers: block numbers are below this. lists: None: one for each KV head. room: of a list, as the
    Selector's. window: at most so many blocks of a sequence are attended in the engine's pages. A shape with rope_dim is a latent (MLA): 576 channels, of which
    512 are V, up to 128 q_heads, and a scale. q_dtype: of queries and results, where K and V are fp8_e4m3. k_scale, v_scale: what K and V were divided by, 0:
    1. whole: entries are of a layer, not of a KV head of it. encoding: of entries: "fp8", which halves them (docs/encodings.md), or none. misses: room for
    those of a layer, and for what a step did not get; 0: for all. rounds: how lists stop while attention runs; None: all that was chosen is attended."""

    _close = "ucm_cuda_decode_close"
    _native = native

    def __init__(
        self,
        pool: Any,
        shape: Shape,
        *,
        layers: int,
        q_heads: int,
        layer_bytes: int,
        numbers: int,
        requests: int,
        sequences: int,
        room: int,
        window: int,
        page_shape: Optional[Shape] = None,
        lists: Optional[int] = None,
        whole: bool = False,
        scale: float = 0.0,
        q_dtype: Any = None,
        k_scale: float = 0.0,
        v_scale: float = 0.0,
        misses: int = 0,
        rounds: Optional[Rounds] = None,
        encoding: str = "",
    ):
        super().__init__(pool)
        if encoding not in native.ENCODINGS:
            raise ValueError(f"encoding {encoding!r} of entries: 'fp8' is known, and '' for K and V as they are")
        self.shape, self.q_heads, self.sequences, self.window = shape, q_heads, sequences, window
        self.layers, self.numbers, self.requests, self.room = layers, numbers, requests, room
        self.lists, self.rounds = shape.kv_heads if lists is None else lists, rounds
        known = (shape.tokens, shape.kv_heads, shape.head_dim, dtype_number(shape.dtype))
        dtype = dtype_number(shape.dtype if q_dtype is None else q_dtype)
        self._dtype, self._kv_dtype = (next(name for name, number in DTYPES.items() if number == n) for n in (dtype, known[3]))
        self._q, self._out = (q_heads, shape.head_dim), (q_heads, shape.head_dim - shape.rope_dim)
        self.entry_bytes = self._entry_bytes(shape, layer_bytes, whole, encoding)
        self.pool = self._check(pool, "pool")
        size = pool.numel() * pool.element_size()
        if not pool.is_contiguous() or size < self.entry_bytes:
            raise ValueError(f"pool has {size} bytes: a contiguous tensor of entries of {self.entry_bytes} bytes is wanted")
        self.entries = size // self.entry_bytes
        options = native.Options(
            layers, q_heads, shape.kv_heads, shape.head_dim, self._out[1], dtype, known[3], shape.tokens, scale, k_scale, v_scale, int(whole), pool.data_ptr(),
            self.entries, numbers, requests, misses, sequences, self.lists, room, window, _layout(shape, *known), layer_bytes,
            _layout(page_shape or shape, *known), *self._options(rounds), encoding=native.ENCODINGS[encoding],
        )
        out, info, lib = c_void_p(), native.Info(), native.library()
        native.check(lib.ucm_cuda_decode_open(self._uuid(), byref(options), byref(out)))
        self._handle = out.value
        native.check(lib.ucm_cuda_decode_info(self.handle, byref(info)))
        self.table_bytes, self.workspace_bytes, self.host_bytes = info.table_bytes, info.workspace_bytes, info.host_bytes
        self.splits, self.split_tiles = info.splits, info.split_tiles

    @staticmethod
    def _options(rounds: Optional[Rounds]) -> tuple[Any, ...]:
        if rounds is None:
            return ()
        every = max(rounds.every, 1)
        first = -(-max(8 * every, rounds.least) // every) * every
        return _RULES.index(rounds.rule), _KNOWN.index(rounds.known), rounds.eps, rounds.rounds, every, first, rounds.sink_blocks

    @staticmethod
    def _entry_bytes(shape: Shape, layer_bytes: int, whole: bool, encoding: str) -> int:
        if whole:
            return layer_bytes
        row = shape.head_dim + 1 if encoding else shape.head_dim * SIZES[dtype_number(shape.dtype)]
        return (1 if shape.rope_dim else 2) * shape.tokens * row

    @classmethod
    def bytes_of(cls, shape: Shape, layer_bytes: int, entries: int, whole: bool = False, encoding: str = "") -> int:
        """Bytes of a pool of so many entries."""
        return entries * cls._entry_bytes(shape, layer_bytes, whole, encoding)

    # ---- a step ----

    def begin(self, stream: Any = None) -> None:
        native.check(native.library().ucm_cuda_decode_begin(self.handle, self._stream(stream)))

    def end(self, stream: Any = None) -> None:
        native.check(native.library().ucm_cuda_decode_end(self.handle, self._stream(stream)))

    def layer(
        self,
        layer: int,
        chosen: Chosen,
        table: Any,
        requests: Any,
        q: Any,
        pages: Optional[Pages] = None,
        *,
        out: Any = None,
        lse: Any = None,
        ranked: Optional[Ranked] = None,
        stream: Any = None,
    ) -> Any:
        """Attends to what was chosen and to the local window. table: int32 [sequences][...], the numbers of each sequence's blocks. requests: int32
        [sequences]. q: [sequences][q_heads][head_dim]; out, which is returned, likewise, for MLA without the rope_dim last channels. lse: float32
        [sequences][q_heads]. ranked: needed with rounds; chosen must then have scores."""
        self._inputs(chosen, table, requests, q)
        sequences = q.shape[0]
        out = q.new_empty((sequences, *self._out)) if out is None else out
        what = native.Layer(
            layer=layer, sequences=sequences, index=chosen.index.data_ptr(), count=chosen.counts.data_ptr(), table=table.data_ptr(),
            table_stride=table.stride()[0], request=requests.data_ptr(), q=q.data_ptr(), q_stride=q.stride()[0],
            out=self._shaped(out, "out", self._dtype, (sequences, *self._out)).data_ptr(),
            lse=0 if lse is None else self._shaped(lse, "lse", "float32", (sequences, self.q_heads)).data_ptr(),
        )
        if pages is not None:
            self._pages(pages, sequences)
            what.pages, what.page_stride, what.page_bound = pages.kv.data_ptr(), _step(pages.kv), pages.kv.shape[0]
            what.page_table, what.page_table_stride = pages.table.data_ptr(), pages.table.stride()[0]
            what.first, what.length = pages.first.data_ptr(), pages.length.data_ptr()
            what.page_of = 0 if pages.of is None else pages.of.data_ptr()
        if self.rounds is not None:
            self._ranked(what, ranked, chosen, sequences)
        native.check(native.library().ucm_cuda_decode_layer(self.handle, byref(what), self._stream(stream)))
        return out

    def result(self) -> Result:
        """Call it when the stream has run the step's end, and before another's can run."""
        r = native.Result()
        native.check(native.library().ucm_cuda_decode_result(self.handle, byref(r)))
        return Result(r.step, Flag(r.flags), r.unserved, r.missed, r.taken, r.floors_broken, r.attended, r.rounds, r.share)

    # ---- between steps ----

    def enter(self, request: int, floor: int = 0, stream: Any = None) -> None:
        """floor: entries that others leave it. UcmError NO_MEMORY: the floors are more than the entries."""
        native.check(native.library().ucm_cuda_decode_enter(self.handle, request, floor, self._stream(stream)))

    def leave(self, request: int, stream: Any = None) -> None:
        native.check(native.library().ucm_cuda_decode_leave(self.handle, request, self._stream(stream)))

    def forget(self, numbers: Blocks, stream: Any = None) -> None:
        """Other blocks get these numbers from now on."""
        borrowed, n = uint32s(numbers)
        native.check(native.library().ucm_cuda_decode_forget(self.handle, borrowed.address, n, self._stream(stream)))

    def places(
        self, numbers: Blocks, referenced: Optional[Referenced], mapping: Optional[SharedMapping] = None, stream: Any = None
    ) -> None:
        """Where the daemon has these blocks: their places, as SharedMapping.ref of a mapping with addresses=True returned them. None: in no mapping."""
        borrowed, n = uint32s(numbers)
        if referenced is not None and len(referenced) != n:
            raise ValueError(f"{len(referenced)} places for {n} numbers")
        native.check(
            native.library().ucm_cuda_decode_places(
                self.handle, None if mapping is None else mapping.handle, borrowed.address,
                None if referenced is None else referenced.places, n, self._stream(stream),
            )
        )

    def register_mapping(self, mapping: SharedMapping, most: int = 1) -> int:
        """Registers at most so many of the mapping's slabs that the GPU does not know yet with the driver, which takes milliseconds each. Returns how many are
        left. Any thread may call it alongside steps; places() registers what is left."""
        left = c_uint32()
        native.check(native.library().ucm_cuda_decode_mapping_register(self.handle, mapping.handle, most, byref(left)))
        return left.value

    def update_mapping(self, stream: Any = None) -> int:
        """Gives back what the daemon wants back, and everything of an earlier connection. Returns how many places became invalid. Call it between steps when
        the client's descriptor was readable, and at least every second."""
        lost = c_uint32()
        native.check(native.library().ucm_cuda_decode_mapping_update(self.handle, byref(lost), self._stream(stream)))
        return lost.value

    def leave_mapping(self, stream: Any = None) -> None:
        """All places become invalid. Call it before SharedMapping.close()."""
        native.check(native.library().ucm_cuda_decode_mapping_leave(self.handle, self._stream(stream)))

    def unserved(self, stream: Any = None, *, first_layer: bool = False) -> list[Key]:
        """What the last step did not get, each layer head once, by layers; or a part of it, if LIST_FULL. first_layer: only what the first layer that lacked
        something did not get. Later layers chose by queries that the next run will not have."""
        room, n, where = max(self.result().unserved, 1), c_uint32(), self._stream(stream)
        while True:
            out = (native.Key * room)()
            native.check(native.library().ucm_cuda_decode_unserved(self.handle, out, room, byref(n), where))
            if n.value <= room:
                words, end = memoryview(out).cast("B").cast("I"), n.value
                if first_layer and end:
                    end = bisect.bisect_right(range(end), words[0], key=lambda i: words[3 * i])
                numbers = words[: 3 * end].tolist()
                return list(map(Key, numbers[::3], numbers[1::3], numbers[2::3]))
            room = n.value

    def put(self, items: Iterable[tuple[Key, int, int]], stream: Any = None) -> int:
        """Copies layer heads into entries. Returns how many are there now. items: layer head, request, and the GPU address of that layer of the block, as the
        daemon has it."""
        packed = array.array("Q")  # struct ucm_cuda_decode_put, three words each
        for (layer, head, number), request, at in items:
            packed.extend((head << 32 | layer, request << 32 | number, at))
        n, placed = len(packed) // 3, c_uint32()
        known = (native.Put * max(n, 1)).from_buffer(packed or array.array("Q", bytes(ctypes.sizeof(native.Put))))
        native.check(
            native.library().ucm_cuda_decode_put(self.handle, known, n, byref(placed), self._stream(stream))
        )
        return placed.value

    # ---- checks ----

    def _inputs(self, chosen: Chosen, table: Any, requests: Any, q: Any) -> None:
        self._check(q, "q", self._dtype, 3)
        if tuple(q.shape[1:]) != self._q or not 1 <= q.shape[0] <= self.sequences:
            raise ValueError(f"q has shape {tuple(q.shape)}; [1 to {self.sequences}, {self._q[0]}, {self._q[1]}] is wanted")
        if not q[0].is_contiguous() or q.stride()[0] == 0:
            raise ValueError("q: the queries of a sequence must be contiguous, and each sequence has its own")
        lists = (q.shape[0], self.lists)
        self._shaped(chosen.counts, "chosen.counts", "int32", lists)
        self._shaped(chosen.index, "chosen.index", "int32", (*lists, self.room))
        self._table(table, "table", q.shape[0])
        self._one_each(requests, "requests", q.shape[0])

    def _ranked(self, what: native.Layer, ranked: Optional[Ranked], chosen: Chosen, sequences: int) -> None:
        if ranked is None or chosen.scores is None:
            raise ValueError("these steps have rounds: `ranked` is wanted, and scores of what was chosen")
        select, lists = ranked.select, (sequences, self.lists)
        if (select.rows, select.q_heads, select.lists) != (1, self.q_heads, self.lists) or select.sequences < sequences:
            raise ValueError(
                f"ranked.select has rows={select.rows}, q_heads={select.q_heads}, lists={select.lists}, sequences={select.sequences}; "
                f"1, {self.q_heads}, {self.lists} and at least {sequences} are wanted"
            )
        self._shaped(chosen.scores, "chosen.scores", "float32", (*lists, self.room))
        for name, tensor in (("n_blocks", ranked.n_blocks), ("least", ranked.least)):
            if tensor is not None:
                self._one_each(tensor, f"ranked.{name}", sequences)
        what.candidates, what.score = ranked.n_blocks.data_ptr(), chosen.scores.data_ptr()
        what.head_scores, what.head_pitch = select.head_scores, select.head_pitch
        what.least = 0 if ranked.least is None else ranked.least.data_ptr()
        if ranked.report is not None:
            what.report = self._shaped(ranked.report, "ranked.report", "int32", (*lists, 4)).data_ptr()

    def _table(self, table: Any, what: str, sequences: int) -> None:
        self._check(table, what, "int32", 2)
        if len(table.shape) != 2 or table.shape[0] != sequences or table.stride()[1] != 1:
            raise ValueError(f"{what} has shape {tuple(table.shape)}; [{sequences}][...] is wanted, rows contiguous")

    def _pages(self, pages: Pages, sequences: int) -> None:
        if _dtype(self._check(pages.kv, "pages.kv", dims=2)) not in (self._kv_dtype, *["uint8"] * (self._kv_dtype[:6] == "float8")):
            raise ValueError(f"pages.kv is of {_dtype(pages.kv)}; {self._kv_dtype} is wanted")
        self._table(pages.table, "pages.table", sequences)
        if pages.of is not None and self._numbers(pages.of, "pages.of").shape[0] != self.numbers:
            raise ValueError(f"pages.of has {pages.of.shape[0]} entries for {self.numbers} numbers")
        self._one_each(pages.first, "pages.first", sequences)
        self._one_each(pages.length, "pages.length", sequences)
