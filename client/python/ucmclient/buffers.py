"""Keys and block ids for the library: addresses of packed bytes, copied only where it must be."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, Union

#: Packed keys (bytes, or anything with the buffer protocol, or numpy), or one object a key.
Keys = Union[bytes, bytearray, memoryview, Sequence[bytes]]
#: Packed uint32 (array('I'), numpy uint32, memoryview), or any iterable of ints.
Blocks = Union[array.array, memoryview, Iterable[int]]

#: Packed triples of uint32 (numpy uint32[n][3]), or an iterable of triples.
Items = Union[array.array, memoryview, Iterable[Sequence[int]]]


class Borrowed:
    """The bytes of a Python object, by address. Keeps the object alive, and its size fixed."""

    __slots__ = ("address", "bytes", "_keep")

    def __init__(self, source: Any):
        if not isinstance(source, bytes):  # as most are
            view = memoryview(source)
            if not view.c_contiguous:
                raise ValueError("the buffer must be contiguous")
            if view.nbytes > 0 and not view.readonly:
                flat = view.cast("B")
                exported = ctypes.c_char.from_buffer(flat)  # a type for each size would take longer than the call it is for
                self.bytes, self.address, self._keep = view.nbytes, ctypes.addressof(exported), (flat, exported)
                return
            source = view.tobytes()
        # bytes have no writable export for ctypes: c_char_p points into the object itself
        pointer = ctypes.c_char_p(source)
        self.bytes, self._keep = len(source), (source, pointer)
        self.address = ctypes.cast(pointer, ctypes.c_void_p).value if source else None


def keys(value: Keys, key_bytes: int) -> tuple[Borrowed, int]:
    """Packed keys and their number."""
    if isinstance(value, (list, tuple)):
        for i, key in enumerate(value):
            if len(key) != key_bytes:
                raise ValueError(f"key {i} has {len(key)} bytes, the namespace's keys have {key_bytes}")
        value = b"".join(value)
    borrowed = Borrowed(value)
    if borrowed.bytes % key_bytes != 0:
        raise ValueError(f"{borrowed.bytes} bytes are no whole number of keys of {key_bytes} bytes")
    return borrowed, borrowed.bytes // key_bytes


def uint32s(value: Blocks) -> tuple[Borrowed, int]:
    """Packed uint32 and their number."""
    try:
        view = None if isinstance(value, (list, tuple)) else memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        view = None
    if view is None or view.format in ("b", "h", "l", "q", "B", "H", "L", "Q"):
        try:
            value = array.array("I", value)  # type: ignore[arg-type]
        except OverflowError:
            raise ValueError("numbers must be at least 0 and below 2**32") from None
    elif view.format not in ("I", "i"):
        raise ValueError(f"numbers of format {view.format!r} given, uint32 wanted")
    borrowed = Borrowed(value)
    return borrowed, borrowed.bytes // 4


def triples(value: Items) -> tuple[Borrowed, int]:
    """Packed triples of uint32 and their number."""
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        value = [number for triple in value for number in triple]  # type: ignore[union-attr]
    borrowed, n = uint32s(value)  # type: ignore[arg-type]
    if n % 3 != 0:
        raise ValueError(f"{n} numbers are no whole number of triples (block, layer, slot)")
    return borrowed, n // 3
