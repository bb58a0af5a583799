"""Copy agent: kernels in the worker's process move small fragments for the daemon. Mirrors ucmclient_cuda.h.

    memory, base, gpu = cuda_allocation(tensor.data_ptr())
    with CopyAgent(client, gpu) as agent:
        region = agent.register(ns, [memory], planes, [base], blocks=1024)

The first copy agent loads the optional libucmclient_cuda. It takes the file that UCMCLIENT_CUDA_LIB names, or else one
next to this package, next to libucmclient, or on the loader's path.

A copy agent pays for fragments below 512 KiB and takes 64 MiB of GPU memory. It unregisters its regions when it is
closed, and a client closes its copy agents.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, Optional

from . import _native as native
from .client import Client, Memory, Namespace, Plane
from .errors import Status, UcmError, check
from .handle import _Handle, _timeout, check_uuid
from .region import Region, Rope, region_spec

SONAME = "libucmclient_cuda.so.0"

_PROTOTYPES = {
    "ucm_cuda_errmsg": (c_char_p, []),
    "ucm_cuda_open": (c_int, [c_void_p, c_char_p, POINTER(native.CudaOptions), c_int, POINTER(c_void_p)]),
    "ucm_cuda_close": (c_int, [c_void_p, c_int]),
    "ucm_cuda_abandon": (None, [c_void_p]),
    "ucm_cuda_region_register": (
        c_int,
        [c_void_p, c_void_p, POINTER(native.RegionSpec), POINTER(c_uint64), c_int, POINTER(c_void_p)],
    ),
    "ucm_cuda_region_unregister": (c_int, [c_void_p, c_void_p, c_int]),
}


class CopyAgentMissing(UcmError):
    """libucmclient_cuda can't be loaded; str() says which files were tried and what to do."""

    def __init__(self, tried: str):
        super().__init__(
            Status.UNSUPPORTED,
            "libucmclient_cuda can't be used: it needs NVIDIA's driver on this host, and comes with a ucmd that was "
            f"built with the CUDA toolkit; UCMCLIENT_CUDA_LIB names it elsewhere ({tried})",
        )


def _candidates() -> list[str]:
    directories = dict.fromkeys((os.path.dirname(os.path.abspath(__file__)), os.path.dirname(native.lib._name)))
    return native.candidates("UCMCLIENT_CUDA_LIB", SONAME, directories)


def load_cuda(prototypes: dict[str, tuple[Any, list[Any]]]) -> ctypes.CDLL:
    """libucmclient_cuda, which uses the libucmclient that this process has loaded."""
    try:
        return native.load(_candidates(), prototypes)
    except OSError as error:
        raise CopyAgentMissing(str(error)) from None


@lru_cache(maxsize=None)
def _library() -> ctypes.CDLL:
    return load_cuda(_PROTOTYPES)


def require() -> None:
    """Raises CopyAgentMissing if copy agents are impossible here."""
    _library()


def _check(rc: int) -> None:
    check(rc, _library().ucm_cuda_errmsg)


class CopyAgent(_Handle):
    """A staging ring in the memory of the GPU with that UUID; one for each client and GPU. Sizes of 0: four entries of
    16 MiB."""

    def __init__(
        self, client: Client, gpu: bytes, *, entry_bytes: int = 0, entries: int = 0, timeout: Optional[float] = None
    ):
        super().__init__(client)
        check_uuid(gpu)
        out = c_void_p()
        options = native.CudaOptions(entry_bytes, entries)
        _check(_library().ucm_cuda_open(client.handle, gpu, byref(options), _timeout(timeout), byref(out)))
        self.gpu = gpu
        self._regions: set[CopyAgentRegion] = set()
        self._ending = threading.Lock()
        self._handle = out.value
        client._copy_agents.add(self)

    def register(
        self,
        ns: Namespace,
        memory: Sequence[Memory],
        planes: Sequence[Plane],
        addresses: Sequence[int],
        *,
        blocks: int,
        part: int = 0,
        block_pool: bool = False,
        rope: Optional[Rope] = None,
        timeout: Optional[float] = None,
    ) -> CopyAgentRegion:
        """Namespace.register for memory on this GPU; its copies may go through the ring. addresses: where each memory
        begins in this process, including its offset."""
        if ns.client is not self.client:
            raise ValueError("the namespace is another client's than the copy agent")
        if len(addresses) != len(memory):
            raise ValueError(f"{len(memory)} memories and {len(addresses)} addresses were given; each memory needs one")
        spec, out = region_spec(memory, planes, blocks, part, self.gpu, block_pool, rope), c_void_p()
        bases, register = (c_uint64 * len(addresses))(*addresses), _library().ucm_cuda_region_register
        _check(register(self.handle, ns.handle, byref(spec), bases, _timeout(timeout), byref(out)))
        return CopyAgentRegion(self, ns, out.value, memory)

    def close(self, timeout: Optional[float] = None) -> None:
        """Unregisters its regions, waits for copies through the ring, and frees it. If it raises, the copy agent
        stays."""
        with self._ending:
            if self.closed or self.client.closed or self.client._forked:
                return
            for region in list(self._regions):
                CopyAgentRegion.unregister(region, timeout)  # region.unregister may be this function
            _check(_library().ucm_cuda_close(self.handle, _timeout(timeout)))
            self._take()
            self.client._copy_agents.discard(self)

    def _abandon(self) -> None:
        """For the client's close()."""
        with self._ending:
            handle = self._take()
            if handle is not None:
                _library().ucm_cuda_abandon(handle)
            self._regions.clear()


class CopyAgentRegion(Region):
    """A Region whose copies may go through the copy agent's ring."""

    def __init__(self, copy_agent: CopyAgent, ns: Namespace, handle: Optional[int], memory: Sequence[Memory]):
        """For CopyAgent.register."""
        super().__init__(ns, handle, memory)
        self.copy_agent = copy_agent
        copy_agent._regions.add(self)

    def _unregister(self, handle: int, timeout_ms: int) -> None:
        _check(_library().ucm_cuda_region_unregister(self.copy_agent.handle, handle, timeout_ms))

    def unregister(self, timeout: Optional[float] = None) -> None:
        super().unregister(timeout)
        self.copy_agent._regions.discard(self)
