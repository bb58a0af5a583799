#!/usr/bin/python3
"""Memory by CUDA IPC handle through the daemon, with a driver made here (driver/libcuda.c), whose
GPU memory is the host's. Nonces are right, wrong, missing, old, used or another client's. There are
a thief, altered handles, and the library over a restart of the daemon."""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from daemon import TIMEOUT_S, TOP, Daemon
from second_client import BUSY, DENIED, INVALID, OK, Case, Client, Refused, keys, memfd, u32

SIZE = 4096
BLOCKS = 16
IDENTITY = {"model": "m", "dtype": "bf16", "layout": "l", "block_tokens": 16, "key_bytes": 16, "parts": 1, "layers": [1], "layer_bytes": SIZE}
PLANES = [{"stride": SIZE, "block_bytes": SIZE}]
GPU = bytes([7] * 16)
NONCE_S = 10

DIRECTORY = tempfile.mkdtemp(prefix="proof.")
SO = os.path.join(DIRECTORY, "libcuda.so.1")


def setUpModule():
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", SO, os.path.join(TOP, "tests/integration/driver/libcuda.c")],
                   check=True, timeout=TIMEOUT_S)


def tearDownModule():
    shutil.rmtree(DIRECTORY)


class Memory:
    """This process's memory, with a handle. The driver opens another process's file only with the
    right to do so, which all processes here have."""

    def __init__(self, size=BLOCKS * SIZE):
        cuda = ctypes.CDLL(SO)
        at, handle = ctypes.c_uint64(), (ctypes.c_char * 64)()
        assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)) == 0
        assert cuda.cuIpcGetMemHandle(ctypes.byref(handle), at) == 0
        self.at, self.size, self.ipc = at.value, size, handle.raw

    def read(self, at=0, n=16):
        return ctypes.string_at(self.at + at, n)

    def write(self, data, at=0):
        ctypes.memmove(self.at + at, data, len(data))


def with_driver(**more):
    return Daemon(before=("env", f"LD_LIBRARY_PATH={DIRECTORY}"), nvme=False, **{"device.cuda": "auto", "copy.strategy": "dma", **more})


def ready(daemon):
    """The daemon starts its GPUs after the open socket."""
    client = Client(daemon)
    daemon.until(lambda: any(one["cuda"] for one in client.call("stats")["devices"]), "has no GPU")
    client.close()


class Proof(Case):
    @classmethod
    def setUpClass(cls):
        cls.daemon = with_driver()
        if "built without CUDA" in cls.daemon.log():
            cls.daemon.stop()
            raise unittest.SkipTest("ucmd was built without CUDA")
        ready(cls.daemon)

    def setUp(self):
        self.memory = Memory()
        self.owner = self.client()

    def register(self, client, handles=None, **more):
        ns = client.open(IDENTITY)
        handles = handles or [{"kind": 1, "bytes": self.memory.size, "ipc": self.memory.ipc}]
        return client.call("region.register", ns=ns, blocks=BLOCKS, device="cuda", gpu=GPU, handles=handles, planes=PLANES, **more)["region"]

    def proven(self, client, nonce=None, **more):
        kept = self.memory.read()
        self.memory.write(nonce or client.call("region.challenge")["nonce"])
        try:
            return self.register(client, **more)
        finally:
            self.memory.write(kept)

    def denied(self, *words, **more):
        return self.refused(DENIED, *words, **more)

    def test_the_right_nonce(self):
        self.memory.write(os.urandom(self.memory.size))
        region = self.proven(self.owner)
        kept = self.memory.read(0, SIZE)
        status = self.owner.call("dump", region=region, keys=keys("right"), blocks=u32(0))["status"]
        self.assertEqual(list(status), [OK])
        self.owner.call("load", region=region, keys=keys("right"), blocks=u32(3))
        self.assertEqual(self.memory.read(3 * SIZE, SIZE), kept)
        self.owner.call("region.unregister", region=region)

    def test_a_wrong_nonce(self):
        self.owner.call("region.challenge")
        self.assertRegex(str(self.denied(self.proven, self.owner, os.urandom(16))), "region.challenge")
        for at in (1, -1):  # it stands elsewhere, or not whole
            nonce = self.owner.call("region.challenge")["nonce"]
            self.denied(self.proven, self.owner, b"x" + nonce[:-1] if at > 0 else nonce[:-1] + bytes([nonce[-1] ^ 1]))

    def test_no_nonce(self):
        self.assertRegex(str(self.denied(self.register, self.owner)), "needs region.challenge within")

    def test_a_nonce_serves_once(self):
        nonce = self.owner.call("region.challenge")["nonce"]
        self.owner.call("region.unregister", region=self.proven(self.owner, nonce))
        self.denied(self.proven, self.owner, nonce)
        # The same after a refusal.
        nonce = self.owner.call("region.challenge")["nonce"]
        self.denied(self.register, self.owner)
        self.denied(self.proven, self.owner, nonce)

    def test_a_new_nonce_replaces_the_old_one(self):
        old, new = (self.owner.call("region.challenge")["nonce"] for _ in range(2))
        self.assertNotEqual(old, new)
        self.denied(self.proven, self.owner, old)

    def test_a_nonce_of_another_connection(self):
        other = self.client()
        self.denied(self.proven, self.owner, other.call("region.challenge")["nonce"])
        self.owner.call("region.challenge")
        self.denied(self.proven, self.owner, other.call("region.challenge")["nonce"])

    def test_a_nonce_that_is_old(self):
        nonce, until = self.owner.call("region.challenge")["nonce"], time.monotonic() + NONCE_S
        while time.monotonic() < until + 0.5:
            time.sleep(0.1)
        self.denied(self.proven, self.owner, nonce)

    def test_a_thief_reads_nothing_and_keeps_nobody_out(self):
        thief = self.client()
        for _ in range(3):
            thief.call("region.challenge")
            self.denied(self.register, thief)
            self.owner.call("region.unregister", region=self.proven(self.owner))
        region = self.proven(self.owner)
        thief.call("region.challenge")
        with self.assertRaises(Refused) as caught:
            self.register(thief)
        self.assertIn(caught.exception.code, (DENIED, BUSY))
        self.owner.call("region.unregister", region=region)

    def test_rings(self):
        good = {"gpu": GPU, "ipc": Memory(2 << 16).ipc, "entry_bytes": 1 << 16, "entries": 2}
        fd = memfd(139264, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.addCleanup(os.close, fd)
        self.assertIn("needs region.challenge", str(self.denied(self.owner.call, "ring.register", [fd], **good)))
        self.owner.call("region.challenge")
        self.assertIn("the ring's handle", str(self.denied(self.owner.call, "ring.register", [fd], **good)))

    def test_altered_handles(self):
        """Fields of the handle that the driver reads, by offset: 16: the size, 24: pages of its
        block, 28: its place there."""
        def altered(at, value):
            width = 8 if at == 16 else 4
            ipc = self.memory.ipc[:at] + value.to_bytes(width, "little") + self.memory.ipc[at + width:]
            self.owner.call("region.challenge")
            return str(self.refused(INVALID, self.register, self.owner, [{"kind": 1, "bytes": self.memory.size, "ipc": ipc}]))

        # memory may be so small, but the region does not fit
        for value in (1, self.memory.size - 1):
            self.assertIn(f"pass the {value} bytes of its allocation", altered(16, value))
        for at, value in ((16, 1 << 40), (16, (1 << 64) - 1), (16, 0), (24, 0), (24, 1), (28, 1), (28, 4096), (28, 0xFFFFF000)):
            self.assertIn("is no handle that cudaIpcGetMemHandle gave", altered(at, value))
        self.owner.call("region.unregister", region=self.proven(self.owner))
        self.refused(INVALID, self.register, self.owner, [{"kind": 1, "bytes": 15, "ipc": self.memory.ipc}])


class Library(unittest.TestCase):
    def daemon(self):
        daemon = with_driver(directory=self.directory)
        self.addCleanup(daemon.stop)
        if "built without CUDA" in daemon.log():
            self.skipTest("ucmd was built without CUDA")
        ready(daemon)
        return daemon

    def test_a_restart_of_the_daemon(self):
        """Regions of one allocation, two of them of the same bytes. The library restores every byte
        that it writes, and registers all again."""
        sys.path.insert(0, os.path.join(TOP, "client/python"))
        ctypes.CDLL(SO)  # it is libcuda.so.1 from now on
        from ucmclient import Client as Ucm, Identity, Plane, cuda_allocation

        self.directory = tempfile.mkdtemp(prefix="proof.")
        self.addCleanup(shutil.rmtree, self.directory)
        daemon, own = self.daemon(), Memory()
        first = os.urandom(own.size)
        own.write(first)
        with Ucm(socket=daemon.socket, timeout=TIMEOUT_S) as client:
            ns = client.namespace(Identity("m", "bf16", "l", 16, SIZE, (1,)))
            memory, base, gpu = cuda_allocation(own.at + 5 * SIZE)
            self.assertEqual((base, gpu), (own.at, GPU))
            regions = [ns.register([memory], [Plane(0, place * SIZE, SIZE, SIZE, 0)], blocks=4, gpu=gpu) for place in (1, 5, 1)]
            self.assertEqual(own.read(0, own.size), first)
            for name in (b"a" * 32, b"b" * 32):
                self.assertTrue(regions[0].dump([name], [2]).wait(TIMEOUT_S).all_ok)
                self.assertTrue(regions[1].load([name], [3]).wait(TIMEOUT_S).all_ok)
                self.assertEqual(own.read(8 * SIZE, SIZE), first[3 * SIZE:4 * SIZE])
                own.write(first)
                if name[:1] == b"a":
                    daemon.kill()
                    ready(self.daemon())
                    client.call("stats", b"\x80")
                    self.assertEqual(own.read(0, own.size), first)


if __name__ == "__main__":
    unittest.main()
