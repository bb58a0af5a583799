#!/usr/bin/env python3
"""A worker of isolation.py: registers GPU memory in every possible way, dumps, loads and compares.

usage: isolated_worker.py SOCKET SALT WAY...
Prints a line of JSON for each way: "works", or the sentence with which the daemon or the driver refused it.
"""

import ctypes
import json
import os
import pathlib
import sys
import time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python"))

from ucmclient import Client, CopyAgent, Identity, MemoryKind, Plane, Status, UcmError  # noqa: E402
from ucmclient.memory import cuda_allocation, gpu_uuid  # noqa: E402

PATIENCE_S = 30
LAYERS, BLOCKS, FRAGMENT = 4, 16, 65536
BYTES = LAYERS * BLOCKS * FRAGMENT
STORED = BLOCKS // 2
KEY_BYTES = 32
EVENT_FLAGS = 2 | 4  # CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS

driver = ctypes.CDLL("libcuda.so.1")


def cu(name, *arguments):
    rc = getattr(driver, name)(*arguments)
    if rc != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(rc, byref(text))
        raise UcmError(Status.DEVICE, f"{name}: {(text.value or b'unknown error').decode()}")


class VmmProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [("type", c_int), ("handle_types", c_int), ("location_type", c_int), ("location", c_int),
                ("windows", c_void_p), ("flags", ctypes.c_ubyte * 8)]


class VmmAccess(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location_type", c_int), ("location", c_int), ("flags", c_int)]


def context():
    device, made = c_int(), c_void_p()
    cu("cuInit", 0)
    cu("cuDeviceGet", byref(device), 0)
    cu("cuDevicePrimaryCtxRetain", byref(made), device)
    cu("cuCtxSetCurrent", made)


def malloc():
    address = c_uint64()
    cu("cuMemAlloc_v2", byref(address), c_size_t(BYTES))
    return address.value


def create():
    """As PyTorch's expandable segments do."""
    properties = VmmProperties(type=1, handle_types=1, location_type=1)
    access = VmmAccess(location_type=1, flags=3)
    grain, handle, address = c_size_t(), c_uint64(), c_uint64()
    cu("cuMemGetAllocationGranularity", byref(grain), byref(properties), 0)
    size = c_size_t((BYTES + grain.value - 1) // grain.value * grain.value)
    cu("cuMemCreate", byref(handle), size, byref(properties), c_uint64(0))
    cu("cuMemAddressReserve", byref(address), size, c_size_t(0), c_uint64(0), c_uint64(0))
    cu("cuMemMap", address, size, c_size_t(0), handle, c_uint64(0))
    cu("cuMemSetAccess", address, size, byref(access), c_size_t(1))
    return address.value


def write(address, data):
    cu("cuMemcpyHtoD_v2", c_uint64(address), data, c_size_t(len(data)))
    cu("cuCtxSynchronize")


def read(address):
    out = ctypes.create_string_buffer(BYTES)
    cu("cuMemcpyDtoH_v2", out, c_uint64(address), c_size_t(BYTES))
    return out.raw


def event():
    """The handle of an event after everything so far."""
    made, handle = c_void_p(), (ctypes.c_char * 64)()
    cu("cuEventCreate", byref(made), EVENT_FLAGS)
    cu("cuEventRecord", made, None)
    cu("cuIpcGetEventHandle", byref(handle), made)
    return ctypes.string_at(handle, 64)


class Worker:
    def __init__(self, socket, salt):
        self.salt, self.gpu = salt, gpu_uuid(0)
        self.client = Client(socket=socket, timeout=PATIENCE_S)
        self.ns = self.client.namespace(Identity("isolated", "bf16", "one/1", 16, FRAGMENT, (LAYERS,)))

    def patiently(self, register):
        """The daemon starts its GPUs after the open socket."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return register()
            except UcmError as error:
                if error.status != Status.BUSY or time.monotonic() > end:
                    raise
            time.sleep(0.02)

    def round_trip(self, name, region, address, handle=lambda: None):
        """Half of the blocks into the cache, and from there into the other half."""
        keys = [f"{self.salt} {name} {i}".encode().ljust(KEY_BYTES, b".") for i in range(STORED)]
        half = [os.urandom(STORED * FRAGMENT) for _ in range(LAYERS)]
        write(address, b"".join(layer + bytes(STORED * FRAGMENT) for layer in half))
        stored = region.dump(keys, list(range(STORED)), cuda_event=handle(), timeout=PATIENCE_S).wait(PATIENCE_S)
        assert stored.all_ok, f"dump: {stored.blocks}"
        write(address, bytes(BYTES))
        loaded = region.load(keys, list(range(STORED, BLOCKS)), timeout=PATIENCE_S).wait(PATIENCE_S)
        assert loaded.all_ok, f"load: {loaded.blocks}"
        assert read(address) == b"".join(bytes(STORED * FRAGMENT) + layer for layer in half), "the bytes differ"

    def planes(self):
        return [Plane(0, layer * BLOCKS * FRAGMENT, FRAGMENT, FRAGMENT, layer) for layer in range(LAYERS)]

    def region(self, address, kind):
        memory, base, gpu = cuda_allocation(address)
        assert (memory.kind, base, gpu) == (kind, address, self.gpu)
        return self.patiently(lambda: self.ns.register([memory], self.planes(), blocks=BLOCKS, gpu=gpu))

    def handle(self):
        address = malloc()
        with self.region(address, MemoryKind.CUDA_IPC) as region:
            self.round_trip("handle", region, address)

    def descriptor(self):
        address = create()
        with self.region(address, MemoryKind.CUDA_FD) as region:
            self.round_trip("descriptor", region, address)

    def event(self):
        address = create()
        with self.region(address, MemoryKind.CUDA_FD) as region:
            self.round_trip("event", region, address, event)

    def ring(self):
        """The region needs no handle, the ring does."""
        address = create()
        memory, base, gpu = cuda_allocation(address)
        with self.patiently(lambda: CopyAgent(self.client, gpu)) as copy_agent:
            region = copy_agent.register(self.ns, [memory], self.planes(), [base], blocks=BLOCKS)
            self.round_trip("ring", region, address)


def main(socket, salt, *ways):
    context()
    worker = Worker(socket, salt)
    for way in ways:
        try:
            getattr(worker, way)()
            said = "works"
        except (UcmError, AssertionError) as error:
            said = str(error)
        print(json.dumps({way: said}), flush=True)
    os._exit(0)  # a context that another process had open takes seconds to end


if __name__ == "__main__":
    main(*sys.argv[1:])
