"""Memory for regions: shared host memory, and CUDA memory by its address.

Copies no bytes and does not import torch. A tensor is anything with data_ptr(), an array interface or DLPack.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, Optional

from ._native import lib
from .client import Memory, MemoryKind
from .errors import Status, UcmError, check


class _Descriptor:
    """Closes a descriptor when its owner goes."""

    def __init__(self, fd: int):
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


_shared: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


class SharedMemory:
    """Host memory that the daemon can map: a sealed memfd with all its pages. `buffer` is a writable memoryview, which numpy.frombuffer
    and torch.frombuffer turn into arrays without a copy. The memory is unmapped when its last view is gone."""

    def __init__(self, size: int):
        fd, address = c_int(-1), c_void_p()
        check(lib.ucm_shared_memory(size, byref(fd), byref(address)))
        self.fd = fd.value
        self._descriptor = _Descriptor(self.fd)
        self.size = size
        libc = ctypes.CDLL(None, use_errno=True)
        libc.munmap.argtypes = [c_void_p, c_size_t]
        libc.munmap(address, size)
        # Python's own mapping counts its views, so it stays while one is in use.
        self.mapping = mmap.mmap(self.fd, size)
        self.buffer = memoryview(self.mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        _shared.add(self)

    def memory(self, offset: int = 0) -> Memory:
        return Memory(MemoryKind.MEMFD, self.size - offset, offset, self.fd, owner=self)


def data_pointer(tensor: Any) -> int:
    """Address of a tensor's first element: torch by data_ptr(), numpy by its interface, others by DLPack."""
    if hasattr(tensor, "data_ptr"):
        return tensor.data_ptr()
    for interface in ("__cuda_array_interface__", "__array_interface__"):
        if hasattr(tensor, interface):
            return getattr(tensor, interface)["data"][0]
    if hasattr(tensor, "__dlpack__"):
        return _dlpack_pointer(tensor.__dlpack__())
    raise TypeError(f"{type(tensor).__name__} has no address: it needs data_ptr(), an array interface or DLPack")


class _DLTensor(ctypes.Structure):
    """The head of DLTensor (DLPack 0.8), as far as an address needs it."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int),
        ("device_id", c_int),
        ("ndim", c_int),
        ("dtype", ctypes.c_uint32),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


def _dlpack_pointer(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(get(capsule, b"dltensor"))
    return (tensor.data or 0) + tensor.byte_offset


# ---- CUDA, by the driver's API ----

_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_POSIX_FD = 1  # CUmemAllocationHandleType
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PROOF = 16  # bytes


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", c_char * 16)]


@lru_cache(maxsize=None)
def _cuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UcmError(Status.DEVICE, f"no CUDA driver on this host: {error}") from None


def _call(name: str, *arguments: Any) -> None:
    rc = getattr(_cuda(), name)(*arguments)
    if rc != 0:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(rc, byref(text))
        raise UcmError(Status.DEVICE, f"{name}: {(text.value or b'unknown error').decode()}")


def gpu_uuid(ordinal: int) -> bytes:
    """UUID of the process's CUDA device of this number. CUDA_VISIBLE_DEVICES does not change the UUID."""
    device, uuid = c_int(), _Uuid()
    _call("cuInit", 0)
    _call("cuDeviceGet", byref(device), ordinal)
    _call("cuDeviceGetUuid_v2", byref(uuid), device)
    return ctypes.string_at(byref(uuid), 16)


def on_gpu(pointer: int) -> bool:
    """Whether CUDA, if this process has it, knows the address as memory of a GPU."""
    kind = c_int()
    try:
        return _cuda().cuPointerGetAttribute(byref(kind), _MEMORY_TYPE, c_uint64(pointer)) == 0 and kind.value == _DEVICE
    except UcmError:
        return False


def current_context() -> Optional[int]:
    """The calling thread's CUDA context."""
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    return context.value


def wait_for_event(event: int, context: Optional[int], timeout: float) -> None:
    """Returns when what was on the event's stream before it is done. event: a cudaEvent_t; context: of the thread that recorded it."""
    _call("cuCtxSetCurrent", c_void_p(context))
    until = time.monotonic() + timeout
    while (rc := _cuda().cuEventQuery(c_void_p(event))) == _NOT_READY:
        if time.monotonic() >= until:
            raise UcmError(Status.DEADLINE, f"the GPU did not reach the event within {timeout:g} s")
        time.sleep(0.0001)
    if rc != 0:
        raise UcmError(Status.DEVICE, f"cuEventQuery failed with {rc}")


def _descriptor(pointer: int) -> Optional[int]:
    """A descriptor of VMM memory (expandable segments). None: the memory is not VMM memory."""
    handle, fd = c_uint64(), c_int(-1)
    if _cuda().cuMemRetainAllocationHandle(byref(handle), c_void_p(pointer)) != 0:
        return None
    try:
        if _cuda().cuMemExportToShareableHandle(byref(fd), handle, _POSIX_FD, c_uint64(0)) != 0:
            raise UcmError(
                Status.DEVICE,
                "this GPU memory was made so that it can't be shared (expandable segments without handles, or an "
                "engine's sleep mode): unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or start vLLM without "
                "--enable-sleep-mode",
            )
    finally:
        _cuda().cuMemRelease(handle)
    return fd.value


class _Proof:
    """Memory.prove of an allocation: shows the daemon that it is this process's."""

    def __init__(self, base: int, context: Optional[int]):
        self._base, self._context = base, context
        self._kept: dict[int, list[bytes]] = {}

    def __call__(self, offset: int, nonce: Optional[bytes]) -> None:
        kept, at = self._kept.setdefault(offset, []), c_uint64(self._base + offset)
        with _stream(self._context) as stream:
            if nonce is None:
                self._write(at, kept.pop(), stream)
                return
            old = (c_char * _PROOF)()
            _call("cuMemcpyDtoHAsync_v2", old, at, c_size_t(_PROOF), stream)
            _call("cuStreamSynchronize", stream)
            self._write(at, nonce, stream)
            kept.append(old.raw)

    def _write(self, at: c_uint64, data: bytes, stream: c_void_p) -> None:
        _call("cuMemcpyHtoDAsync_v2", at, data, c_size_t(_PROOF), stream)
        _call("cuStreamSynchronize", stream)


@lru_cache(maxsize=None)
def _proof(base: int, context: Optional[int]) -> _Proof:
    """One for the life of the process, since a client may call it at any reconnect."""
    return _Proof(base, context)


@contextlib.contextmanager
def _stream(context: Optional[int]) -> Iterator[c_void_p]:
    """A stream that waits for no other, since the engine's streams may wait for a load. It disturbs no capture of a graph."""
    stream, popped, mode = c_void_p(), c_void_p(), c_int(_RELAXED)
    _call("cuCtxPushCurrent_v2", c_void_p(context))
    try:
        _call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            _call("cuStreamCreate", byref(stream), _NON_BLOCKING)
            try:
                yield stream
            finally:
                _call("cuStreamDestroy_v2", stream)
        finally:
            _call("cuThreadExchangeStreamCaptureMode", byref(mode))
    finally:
        _call("cuCtxPopCurrent_v2", byref(popped))


def cuda_allocation(pointer: int) -> tuple[Memory, int, bytes]:
    """The allocation that contains `pointer`, its first address, and the UUID of its GPU. The calling thread needs a
    CUDA context, which torch creates."""
    base, whole, ordinal = c_uint64(), c_size_t(), c_int()
    _call("cuMemGetAddressRange_v2", byref(base), byref(whole), c_uint64(pointer))
    _call("cuPointerGetAttribute", byref(ordinal), _ORDINAL, c_uint64(pointer))
    uuid = gpu_uuid(ordinal.value)
    fd = _descriptor(base.value)
    if fd is not None:
        return Memory(MemoryKind.CUDA_FD, whole.value, 0, fd, owner=_Descriptor(fd)), base.value, uuid
    ipc = (c_char * 64)()
    _call("cuIpcGetMemHandle", byref(ipc), c_uint64(base.value))
    _call("cuCtxSynchronize")  # work that still fills the memory would overwrite the nonce
    proof = _proof(base.value, current_context())
    return Memory(MemoryKind.CUDA_IPC, whole.value, ipc=bytes(ipc), prove=proof), base.value, uuid


def _containing(pointer: int) -> Optional[SharedMemory]:
    return next((one for one in list(_shared) if one.address <= pointer < one.address + one.size), None)


def in_shared_memory(pointer: int) -> bool:
    return _containing(pointer) is not None


def shared_memory_of(pointer: int) -> tuple[Memory, int]:
    """The SharedMemory of this process that contains `pointer`, and its first address."""
    shared = _containing(pointer)
    if shared is None:
        raise UcmError(
            Status.INVALID,
            "the daemon can copy only to host memory in a SharedMemory: allocate the KV tensors from one",
        )
    return shared.memory(), shared.address


def allocation_of(pointer: int) -> tuple[Memory, int, Optional[bytes]]:
    """The allocation that contains `pointer`, its first address, and its GPU's UUID; None for a SharedMemory."""
    if in_shared_memory(pointer) or not on_gpu(pointer):
        return (*shared_memory_of(pointer), None)
    return cuda_allocation(pointer)
