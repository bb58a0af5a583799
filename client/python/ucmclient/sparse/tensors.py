"""Tensors of numpy, torch and all that has the buffer protocol, by address. Their bytes are never copied, and neither
library is imported."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

from ..buffers import Borrowed
from ..memory import data_pointer

#: enum ucm_sparse_dtype by the names that numpy and torch use.
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3}
_SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8": "float8_e4m3fn"}
_FORMATS = {"f": "float32", "e": "float16"}
SIZES = {0: 4, 1: 2, 2: 2, 3: 1}


def dtype_number(name: Any) -> int:
    """The number of "bf16", "float16", torch.bfloat16, numpy.dtype("float32"), ..."""
    text = getattr(name, "name", None) or (name.__name__ if isinstance(name, type) else str(name))
    text = text.rpartition(".")[2]
    text = _SHORT.get(text, text)
    if text not in DTYPES:
        raise ValueError(f"dtype {text} is none of {', '.join(DTYPES)}")
    return DTYPES[text]


class Tensor:
    """Where a tensor's bytes lie. `dtype` is None where its type says nothing (bytes, uint8, uint16)."""

    def __init__(self, value: Any, what: str):
        self.keep = value
        if hasattr(value, "data_ptr"):
            self._torch(value, what)
        elif hasattr(value, "__array_interface__"):
            self._numpy(value, what)
        else:
            self._buffer(value, what)

    def _set(self, address: Optional[int], shape: tuple, size: int, name: str) -> None:
        self.address, self.shape, self.dtype = address, tuple(shape), DTYPES.get(name)
        self.bytes = size
        for n in self.shape:
            self.bytes *= n

    def _torch(self, value: Any, what: str) -> None:
        if value.device.type != "cpu":
            raise ValueError(f"{what} lies on {value.device}: give a tensor of the CPU, or use the GPU's functions")
        if not value.is_contiguous():
            raise ValueError(f"{what} must be contiguous")
        self._set(data_pointer(value), value.shape, value.element_size(), str(value.dtype).rpartition(".")[2])

    def _numpy(self, value: Any, what: str) -> None:
        interface = value.__array_interface__
        if interface.get("strides") is not None and not value.flags.c_contiguous:
            raise ValueError(f"{what} must be contiguous")
        if interface["typestr"][0] == ">":
            raise ValueError(f"{what} must be little-endian")
        self._set(interface["data"][0], interface["shape"], int(interface["typestr"][2:]), value.dtype.name)

    def _buffer(self, value: Any, what: str) -> None:
        try:
            view = memoryview(value)
        except TypeError:
            raise TypeError(f"{what} is a {type(value).__name__}: a tensor or a buffer is needed") from None
        self.keep = Borrowed(value)
        self._set(self.keep.address, view.shape, view.itemsize, _FORMATS.get(view.format, view.format))

    def wants(self, dtype: Optional[int], what: str) -> int:
        """Its dtype's number; dtype: what the caller says, where the tensor says nothing."""
        if self.dtype is None and dtype is None:
            raise ValueError(f"{what} has no floating dtype: name it")
        if self.dtype is not None and dtype is not None and self.dtype != dtype:
            raise ValueError(f"{what} has another dtype than was said")
        return dtype if self.dtype is None else self.dtype


class Numbers:
    """Memory that the library writes numbers into: `view` is a memoryview of format I or f."""

    def __init__(self, n: int, format: str):
        self._bytes = bytearray(4 * n)
        self.view = memoryview(self._bytes).cast(format)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes)) if n else None

    def pointer(self, kind: Any) -> Any:
        return ctypes.cast(self.address, ctypes.POINTER(kind))
