"""Pages of encoding_case.py on a GPU: memory by the driver's functions, its IPC handles, and copy agents of
tests/gpu/copy_agents.c ($UCM_COPY_AGENTS), one for each connection.

Nothing is freed before the process ends: a daemon may have mapped it until then."""

import ctypes
import os
from ctypes import byref, c_char, c_int, c_size_t, c_uint32, c_uint64, c_void_p

GRAIN = 2 << 20  # smaller allocations share an IPC handle
ENTRY, ENTRIES = 1 << 20, 4  # so that a request takes several


class Plane(ctypes.Structure):
    _fields_ = [("base", c_uint64), ("stride", c_uint64), ("slot_offset", c_uint64), ("block_bytes", c_uint32), ("memory", c_uint32)]


class Driver:
    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = c_int(), c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        uuid = (c_char * 16)()
        self.call("cuDeviceGetUuid_v2", uuid, device)
        self.uuid = bytes(uuid)

    def call(self, name, *arguments):
        rc = getattr(self.cuda, name)(*arguments)
        assert rc == 0, f"{name}: {rc}"


DRIVER = Driver()


class Memory:
    """Bytes on the GPU, as a bytearray has them. Each access waits for the copy."""

    def __init__(self, size):
        self.size, at, ipc = size, c_uint64(), (c_char * 64)()
        DRIVER.call("cuMemAlloc_v2", byref(at), c_size_t((size + GRAIN - 1) // GRAIN * GRAIN))
        DRIVER.call("cuIpcGetMemHandle", byref(ipc), at)
        self.at, self.ipc = at.value, bytes(ipc)
        base = c_uint64()
        DRIVER.call("cuMemGetAddressRange_v2", byref(base), None, at)
        self.offset = self.at - base.value
        self[:] = bytes(size)

    def __len__(self):
        return self.size

    def __getitem__(self, where):
        first, last, _ = where.indices(self.size)
        data = (c_char * (last - first))()
        DRIVER.call("cuMemcpyDtoH_v2", data, c_uint64(self.at + first), c_size_t(last - first))
        return data.raw

    def __setitem__(self, where, data):
        first, last, _ = where.indices(self.size)
        assert len(data) == last - first
        DRIVER.call("cuMemcpyHtoD_v2", c_uint64(self.at + first), bytes(data), c_size_t(len(data)))
        DRIVER.call("cuCtxSynchronize")


class Ring:
    """A connection's copy agent."""

    def __init__(self, client):
        self.lib = ctypes.CDLL(os.environ["UCM_COPY_AGENTS"])
        self.lib.copy_agents_open.restype = c_void_p
        ipc, offset, fd = (c_char * 64)(), c_uint64(), c_int(-1)
        self.ring = self.lib.copy_agents_open(DRIVER.uuid, c_uint64(ENTRY), ENTRIES, ipc, byref(offset), byref(fd))
        assert self.ring, "no copy agent"
        rc = self.lib.copy_agents_prove(c_void_p(self.ring), client.call("region.challenge")["nonce"])
        assert rc == 0, f"copy agent: {rc}"
        try:
            client.call("ring.register", [fd.value], gpu=DRIVER.uuid, ipc=bytes(ipc), offset=offset.value, entry_bytes=ENTRY,
                        entries=ENTRIES)
        finally:
            os.close(fd.value)
        self.lib.copy_agents_serve(c_void_p(self.ring))

    def add(self, memory, planes, blocks, spec):
        """The region's number in orders."""
        native = (Plane * len(planes))(*(Plane(memory.at + p["offset"], p["stride"], 0, p["block_bytes"]) for p in planes))
        number = self.lib.copy_agents_region(c_void_p(self.ring), native, len(planes), blocks, byref(spec) if spec else None)
        assert number > 0, number
        return number


def register(client, size, ring, spec, planes, blocks, **more):
    """Memory, and the number of its region. With `ring`, the region has a copy agent if it is not
    encoded, or its encoding is known."""
    memory, number = Memory(size), 0
    if ring and spec is not None:
        client.ring = getattr(client, "ring", None) or Ring(client)
        number = client.ring.add(memory, planes, blocks, spec)
    kept = memory[:16]
    memory[:16] = client.call("region.challenge")["nonce"]
    try:
        region = client.call("region.register", device="cuda", gpu=DRIVER.uuid, planes=planes, blocks=blocks, ring_region=number,
                             handles=[{"kind": 1, "bytes": size, "offset": memory.offset, "ipc": memory.ipc}], **more)
    finally:
        memory[:16] = kept
    return memory, region["region"]
