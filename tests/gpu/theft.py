#!/usr/bin/env python3
"""A thief knows the handle of another process's GPU memory, and uses handles with changed bytes.
The daemon refuses what it must, copies what is proven, and lives. Run by run.sh. The process that
owns the memory is this script with the word `owner`; no other one here has a GPU."""

import ctypes
import json
import os
import struct
import subprocess
import sys
import unittest
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../integration"))
from second_client import BUSY, DENIED, Case, Refused, keys, u32  # noqa: E402

SIZE, BLOCKS = 65536, 64
IDENTITY = {"model": "m", "dtype": "bf16", "layout": "l", "block_tokens": 16, "key_bytes": 16, "parts": 1, "layers": [1], "layer_bytes": SIZE}


def owner():
    """One JSON a line: writes hexadecimal bytes at the memory's beginning, and says what stood there."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, at, base, whole = c_int(), c_void_p(), c_uint64(), c_uint64(), c_size_t()
    ipc, uuid, first = (c_char * 64)(), (c_char * 16)(), (c_char * 16)()

    def call(name, *words):
        rc = getattr(cuda, name)(*words)
        assert rc == 0, f"{name}: {rc}"

    call("cuInit", 0)
    call("cuDeviceGet", byref(device), 0)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuDeviceGetUuid_v2", uuid, device)
    call("cuMemAlloc_v2", byref(at), c_size_t(BLOCKS * SIZE))
    call("cuMemsetD8_v2", at, ctypes.c_ubyte(0x5A), c_size_t(BLOCKS * SIZE))
    call("cuIpcGetMemHandle", byref(ipc), at)
    call("cuMemGetAddressRange_v2", byref(base), byref(whole), at)
    print(json.dumps({"ipc": ipc.raw.hex(), "gpu": uuid.raw.hex(), "offset": at.value - base.value}), flush=True)
    for line in sys.stdin:
        call("cuMemcpyDtoH_v2", first, at, c_size_t(16))
        call("cuMemcpyHtoD_v2", at, bytes.fromhex(line), c_size_t(len(line.strip()) // 2))
        call("cuCtxSynchronize")
        print(json.dumps(first.raw.hex()), flush=True)


class Theft(Case):
    options = {"device.cuda": "required", "nvme": False, "arena.size": "64MiB"}

    def setUp(self):
        self.process = subprocess.Popen([sys.executable, "-B", __file__, "owner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.end)
        self.memory = {name: bytes.fromhex(value) if isinstance(value, str) else value for name, value in json.loads(self.process.stdout.readline()).items()}

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def write(self, data):
        self.process.stdin.write(data.hex() + "\n")
        self.process.stdin.flush()
        return bytes.fromhex(json.loads(self.process.stdout.readline()))

    def register(self, client, ipc=None):
        handle = {"kind": 1, "bytes": BLOCKS * SIZE, "offset": self.memory["offset"], "ipc": ipc or self.memory["ipc"]}
        return client.call("region.register", ns=client.open(IDENTITY), blocks=BLOCKS, device="cuda", gpu=self.memory["gpu"], handles=[handle],
                           planes=[{"stride": SIZE, "block_bytes": SIZE}])["region"]

    def proven(self, client, ipc=None):
        kept = self.write(client.call("region.challenge")["nonce"])
        try:
            return self.register(client, ipc)
        finally:
            self.write(kept)

    def works(self, client, region, name):
        names, blocks = keys(*(f"{name} {i}" for i in range(BLOCKS))), u32(*range(BLOCKS))
        for method in ("dump", "load"):
            status = client.call(method, region=region, keys=names, blocks=blocks)["status"]
            self.assertEqual(set(status), {0}, (name, method))
        client.call("evict", ns=client.open(IDENTITY), keys=names)

    def test_a_thief(self):
        honest, thief = self.client(), self.client()
        self.refused(DENIED, self.register, thief)
        for _ in range(3):
            thief.call("region.challenge")
            self.assertRegex(str(self.refused(DENIED, self.register, thief)), "does not begin with the nonce")
            region = self.proven(honest)  # nobody keeps it from its memory
            self.works(honest, region, "honest")
            thief.call("region.challenge")
            with self.assertRaises(Refused) as caught:
                self.register(thief)
            self.assertIn(caught.exception.code, (DENIED, BUSY))
            honest.call("region.unregister", region=region)
        self.assertEqual(self.write(b"\x5a" * 16), b"\x5a" * 16, "its own bytes are back")

    def altered(self):
        ipc = self.memory["ipc"]
        for at in range(64):
            for value in {ipc[at] ^ 1, ipc[at] ^ 0x80, (ipc[at] + 1) & 255, 0xFF, 0} - {ipc[at]}:
                yield ipc[:at] + bytes([value]) + ipc[at + 1:]
        for at in range(0, 64, 4):
            for value in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
                yield ipc[:at] + struct.pack("<I", value) + ipc[at + 4:]

    def test_altered_handles(self):
        self.assertNotIn("handles-unchecked", self.daemon.log())
        client, opened, said = self.client(), 0, {}
        for ipc in self.altered():
            try:
                region = self.proven(client, ipc)
            except Refused as error:
                said[error.args[1]] = said.get(error.args[1], 0) + 1
                continue
            opened += 1  # it is still the owner's memory: the driver ignores some bytes
            self.works(client, region, "altered")
            client.call("region.unregister", region=region)
        print(f"altered handles: {opened} opened the owner's memory, {said}")
        region = self.proven(client)
        self.works(client, region, "after all")
        client.call("region.unregister", region=region)
        self.assertNotIn("device-failed", self.daemon.log())


if __name__ == "__main__":
    owner() if sys.argv[1:] == ["owner"] else unittest.main()
