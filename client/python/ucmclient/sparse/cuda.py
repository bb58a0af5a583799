"""Summaries and selections on the worker's GPU, with torch's tensors there: ucmclient_cuda_sparse.h in Python.

    build = cuda.Builder(summary, gpu=summaries)
    select = cuda.Selector(summary, gpu=summaries, q_heads=32, max_blocks=4096, sequences=8)
    build(kv, summaries, blocks)  # of all layers, when blocks are complete
    chosen = select(summaries[layer], table, lengths, q)  # each step and layer

A call launches one kernel on torch's current stream (or `stream`) and waits for nothing, so a CUDA graph can capture it. Tensors must
live as with any kernel; torch's allocator ensures that for those of that stream. torch is not imported. Needs the optional
libucmclient_cuda; CopyAgentMissing says which files were tried. No daemon is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any, Optional

from ..handle import _Handle
from ..memory import gpu_uuid
from . import _native_cuda as native
from .choice import Choice, Score, TopK
from .summary import Summary
from .tensors import DTYPES, SIZES, dtype_number


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def _span(tensor: Any) -> int:
    """Bytes from a block's begin to its end, of a tensor whose first dimension counts blocks."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:]))
    return (last + 1) * tensor.element_size()


def _step(tensor: Any) -> int:
    return tensor.stride()[0] * tensor.element_size()


class _OnGpu(_Handle):
    """A handle on one GPU. Close it after its last launch has run, and when no graph will replay one."""

    _close = ""
    _native: Any = native

    def __init__(self, gpu: Any):
        super().__init__()
        device = getattr(gpu, "device", gpu)
        if getattr(device, "type", None) != "cuda" or device.index is None:
            raise ValueError(f"gpu is {device}: a tensor on a GPU is wanted, or its device with a number")
        self.device = device

    def _uuid(self) -> bytes:
        return gpu_uuid(self.device.index)

    def _check(self, tensor: Any, what: str, dtype: Optional[str] = None, dims: int = 1) -> Any:
        """A tensor on this GPU, of that dtype and so many dimensions at least."""
        if not hasattr(tensor, "data_ptr") or not hasattr(tensor, "device"):
            raise TypeError(f"{what} is a {type(tensor).__name__}: a tensor of torch is wanted")
        if tensor.device != self.device:
            raise ValueError(f"{what} lies on {tensor.device}, and this {type(self).__name__} is for {self.device}")
        if dtype is not None and _dtype(tensor) != dtype:
            raise ValueError(f"{what} is of {_dtype(tensor)}; {dtype} is wanted")
        if len(tensor.shape) < dims:
            raise ValueError(f"{what} has shape {tuple(tensor.shape)}; {dims} dimensions are wanted at least")
        return tensor

    def _numbers(self, tensor: Any, what: str) -> Any:
        self._check(tensor, what, "int32")
        if len(tensor.shape) != 1 or not tensor.is_contiguous():
            raise ValueError(f"{what} has shape {tuple(tensor.shape)}; one contiguous dimension is wanted")
        return tensor

    def _one_each(self, tensor: Any, what: str, sequences: int) -> Any:
        """A number for each sequence."""
        if self._numbers(tensor, what).shape[0] != sequences:
            raise ValueError(f"{what} has {tensor.shape[0]} numbers for {sequences} sequences")
        return tensor

    def _shaped(self, tensor: Any, what: str, dtype: str, shape: tuple[int, ...]) -> Any:
        self._check(tensor, what, dtype, 2)
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{what} has shape {tuple(tensor.shape)}; {shape} is wanted, contiguous")
        return tensor

    def _stream(self, stream: Any) -> int:
        if stream is None:
            torch = sys.modules.get("torch")
            if torch is None:
                raise ValueError("torch is not loaded, so stream must be named")
            stream = torch.cuda.current_stream(self.device)
        return getattr(stream, "cuda_stream", stream)

    def close(self) -> None:
        handle = self._take()
        if handle is not None:
            getattr(self._native.library(), self._close)(handle)


class Builder(_OnGpu):
    """Builds summaries. gpu: any tensor on the GPU, or its torch.device."""

    _close = "ucm_cuda_summary_close"

    def __init__(self, summary: Summary, gpu: Any):
        super().__init__(gpu)
        self.summary = summary
        out = c_void_p()
        native.check(native.library().ucm_cuda_summary_open(self._uuid(), byref(summary.native), byref(out)))
        self._handle = out.value

    def __call__(
        self,
        kv: Sequence[Any],
        summaries: Sequence[Any],
        blocks: Any,
        out_blocks: Any = None,
        *,
        thread_blocks: int = 0,
        stream: Any = None,
    ) -> None:
        """Makes the summaries of each layer's blocks with these numbers. kv: for each layer a tensor of blocks that the summary's Shape
        describes, or a pair (K, V) of them. summaries: for each layer a tensor of blocks. In both, the first dimension counts blocks,
        and all layers are alike. blocks: int32 on the GPU; out_blocks: their numbers in `summaries`, if they differ. A block is skipped
        if either number is out of range. thread_blocks: how much of the GPU it takes; 0: 32."""
        layers = [self._layer(kv[i], summaries[i], i) for i in range(len(kv))] if len(kv) == len(summaries) else []
        if not layers:
            raise ValueError(f"kv has {len(kv)} layers and summaries {len(summaries)}: as many are wanted, and one at least")
        _, stride, bound, out_stride, out_bound = layers[0]
        for i, layer in enumerate(layers):
            if layer[1:] != layers[0][1:]:
                raise ValueError(f"layer {i} differs from layer 0 in blocks or in strides")
        self._numbers(blocks, "blocks")
        if out_blocks is not None and self._numbers(out_blocks, "out_blocks").shape[0] != blocks.shape[0]:
            raise ValueError(f"blocks has {blocks.shape[0]} numbers, out_blocks {out_blocks.shape[0]}")
        where = self._stream(stream)
        for begin in range(0, len(layers), native.SUMMARY_LAYERS):
            some = [layer for layer, *_ in layers[begin : begin + native.SUMMARY_LAYERS]]
            build = native.SummaryBuild(
                (native.SummaryLayer * len(some))(*some), len(some), blocks.shape[0], blocks.data_ptr(),
                0 if out_blocks is None else out_blocks.data_ptr(), stride, out_stride, bound, out_bound, thread_blocks,
            )
            native.check(native.library().ucm_cuda_summary(self.handle, byref(build), where))

    def _layer(self, kv: Any, out: Any, layer: int) -> tuple[native.SummaryLayer, int, int, int, int]:
        k, v = kv if isinstance(kv, (tuple, list)) else (kv, kv)
        shape = self.summary.native.shape
        size = SIZES[shape.dtype]
        reads_v = self.summary.method == "stats" and shape.v_head_dim > 0
        for what, tensor, offset, token, head, dim in (
            ("K", k, shape.k_offset, shape.k_token_stride, shape.k_head_stride, shape.head_dim),
            ("V", v, shape.v_offset, shape.v_token_stride, shape.v_head_stride, shape.v_head_dim),
        ):
            if what == "V" and not reads_v:
                break
            what = f"{what} of layer {layer}"
            self._check(tensor, what, dims=2)
            if DTYPES.get(_dtype(tensor), shape.dtype) != shape.dtype:
                raise ValueError(f"{what} is of {_dtype(tensor)}, the summary's shape is not")
            end = offset + (shape.tokens - 1) * token + (shape.kv_heads - 1) * head + dim * size
            if end > _span(tensor):
                raise ValueError(f"{what}: a block has {_span(tensor)} bytes, the summary's shape reads {end}")
        self._check(out, f"summaries of layer {layer}", dims=2)
        if reads_v and (_step(v), v.shape[0]) != (_step(k), k.shape[0]):
            raise ValueError(f"K and V of layer {layer} differ in blocks or in strides")
        if _span(out) < self.summary.bytes:
            raise ValueError(f"summaries of layer {layer}: {_span(out)} bytes a block; a summary has {self.summary.bytes}")
        addresses = native.SummaryLayer(k.data_ptr(), v.data_ptr() if reads_v else 0, out.data_ptr())
        return addresses, _step(k), k.shape[0], _step(out), out.shape[0]


@dataclass(frozen=True)
class Chosen:
    """On the GPU: counts, int32 [sequences][lists]; index, int32 [sequences][lists][room]: positions in each sequence, ascending,
    then -1; scores: as they were given."""

    counts: Any
    index: Any
    scores: Any = None

    def lists(self) -> list[list[list[int]]]:
        """[sequence][list], on the CPU: waits for the GPU."""
        counts, index = self.counts.tolist(), self.index.tolist()
        return [[of[:n] for n, of in zip(*sequence)] for sequence in zip(counts, index)]


class Selector(_OnGpu):
    """Scores and chooses for up to `sequences` sequences of up to max_blocks blocks. Its launches must follow each other, in one stream
    or by events. room: blocks of one list's answer, 0 for what max_blocks blocks need. The attributes `room` and `lists` say what the
    outputs have."""

    _close = "ucm_cuda_select_close"

    def __init__(
        self,
        summary: Summary,
        gpu: Any,
        q_heads: int,
        max_blocks: int,
        *,
        sequences: int = 1,
        choose: Choice = TopK(),
        score: Score = Score(),
        rows: int = 1,
        q_dtype: Any = "bf16",
        room: int = 0,
    ):
        super().__init__(gpu)
        for what, n in (("q_heads", q_heads), ("max_blocks", max_blocks), ("sequences", sequences), ("rows", rows)):
            if not 1 <= n < 2**32:
                raise ValueError(f"{what} is {n}; 1 to 2**32 - 1 are allowed")
        self.summary, self.q_heads, self.rows, self.sequences, self.max_blocks = summary, q_heads, rows, sequences, max_blocks
        self._q_dtype = next(name for name, number in DTYPES.items() if number == dtype_number(q_dtype))
        options = native.SelectOptions(
            score.native(rows, q_heads, summary, choose), choose.native(), DTYPES[self._q_dtype], sequences, max_blocks, room
        )
        out, info, lib = c_void_p(), native.SelectInfo(), native.library()
        native.check(lib.ucm_cuda_select_open(self._uuid(), byref(summary.native), byref(options), byref(out)))
        self._handle = out.value
        native.check(lib.ucm_cuda_select_info(self.handle, byref(info)))
        self.lists, self.room, self.workspace_bytes = info.lists, info.room, info.workspace_bytes
        #: Address and pitch of each query head's scores, of the launch that ran last; see ucm_cuda_select_info.
        self.head_scores, self.head_pitch = info.head_scores, info.head_pitch

    def __call__(
        self,
        summaries: Any,
        table: Any,
        n_blocks: Any,
        q: Any,
        *,
        out: Optional[Chosen] = None,
        scores: Any = None,
        most: Any = None,
        stream: Any = None,
    ) -> Chosen:
        """summaries: one layer's, the first dimension counts blocks. table: int32 [sequences][max_blocks or more], the blocks' numbers
        in `summaries`. A block whose number is out of range has no summary, and is chosen. n_blocks: int32 [sequences]. q:
        [sequences][q_heads][head_dim], or [sequences][rows][q_heads][head_dim]. out: what an earlier call returned, to be written
        again. scores: float32 [sequences][lists][room] for the scores of the chosen blocks. most: int32 [sequences], how many each list
        may choose, at most `room`; it replaces what the Choice says."""
        self._inputs(summaries, table, n_blocks, q)
        sequences = table.shape[0]
        if out is None:
            shape = (sequences, self.lists)
            out = Chosen(table.new_empty(shape), table.new_empty((*shape, self.room)), scores)
        self._outputs(out, sequences)
        layer = native.SelectLayer(
            summaries.data_ptr(), _step(summaries), summaries.shape[0], sequences, table.data_ptr(), table.stride()[0],
            n_blocks.data_ptr(), q.data_ptr(), q.stride()[0], out.counts.data_ptr(), out.index.data_ptr(),
            0 if out.scores is None else out.scores.data_ptr(), 0 if most is None else self._one_each(most, "most", sequences).data_ptr(),
        )
        native.check(native.library().ucm_cuda_select(self.handle, byref(layer), self._stream(stream)))
        return out

    def _inputs(self, summaries: Any, table: Any, n_blocks: Any, q: Any) -> None:
        self._check(summaries, "summaries", dims=2)
        if _span(summaries) < self.summary.bytes:
            raise ValueError(f"summaries: {_span(summaries)} bytes a block; a summary has {self.summary.bytes}")
        self._check(table, "table", "int32", 2)
        sequences = table.shape[0]
        if len(table.shape) != 2 or table.shape[1] < self.max_blocks or table.stride()[1] != 1:
            raise ValueError(f"table has shape {tuple(table.shape)}; [sequences][{self.max_blocks} or more] is wanted")
        if not 1 <= sequences <= self.sequences:
            raise ValueError(f"table has {sequences} sequences; this Selector is for 1 to {self.sequences}")
        self._one_each(n_blocks, "n_blocks", sequences)
        self._check(q, "q", self._q_dtype, 3)
        one = (self.q_heads, self.summary.shape.head_dim)
        wanted = [(sequences, self.rows, *one)] + [(sequences, *one)] * (self.rows == 1)
        if tuple(q.shape) not in wanted:
            raise ValueError(f"q has shape {tuple(q.shape)}; {wanted[0]} is wanted")
        if not q[0].is_contiguous():
            raise ValueError("q: the queries of a sequence must be contiguous")

    def _outputs(self, out: Chosen, sequences: int) -> None:
        lists = (sequences, self.lists)
        self._shaped(out.counts, "out.counts", "int32", lists)
        self._shaped(out.index, "out.index", "int32", (*lists, self.room))
        if out.scores is not None:
            self._shaped(out.scores, "scores", "float32", (*lists, self.room))
