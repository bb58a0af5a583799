#!/usr/bin/python3
"""Pages of a client's memory that do not exist, or that the client takes away later. The kernel
charges a new page to the process that touches it first, so the daemon makes none."""

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
import sys
import threading
import time
import unittest

from daemon import Daemon
from memory_group import Group
from second_client import INVALID, OK, UCMD, Case, Client, Refused, keys, memfd, u32

PAGE = mmap.PAGESIZE
LAYER = 256 << 10
IDENTITY = {"model": "m", "dtype": "bf16", "layout": "l", "block_tokens": 16, "key_bytes": 16, "parts": 1, "layers": [1], "layer_bytes": LAYER}
BLOCKS = 64


def pages(fd):
    return os.fstat(fd).st_blocks * 512 // PAGE


def memfd_of(test, size):
    fd = memfd(size)
    test.addCleanup(os.close, fd)
    return fd


def punch(fd, offset, size):
    how = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    if ctypes.CDLL(None).fallocate(fd, how, ctypes.c_long(offset), ctypes.c_long(size)) != 0:
        raise OSError("fallocate")


class Holder:
    """A client's thread that holds its file's lock: it writes to the file from a page that nobody
    fills."""

    def __init__(self, fd, offset):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        self.fault = libc.syscall(323 if platform.machine() == "x86_64" else 282, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fault < 0:
            raise unittest.SkipTest("no userfaultfd of the kernel's own faults here")
        self.done, page = threading.Event(), libc.mmap(None, ctypes.c_size_t(PAGE), 3, 0x22, -1, ctypes.c_long(0))
        fcntl.ioctl(self.fault, 0xc018aa3f, struct.pack("QQQ", 0xaa, 0, 0))  # UFFDIO_API
        fcntl.ioctl(self.fault, 0xc020aa00, struct.pack("QQQQ", page, PAGE, 1, 0))  # UFFDIO_REGISTER

        def write():
            libc.pwrite(fd, ctypes.c_void_p(page), ctypes.c_size_t(PAGE), ctypes.c_long(offset))
            self.done.set()
        self.thread = threading.Thread(target=write)
        self.thread.start()
        if not select.select([self.fault], [], [], 30)[0]:
            raise TimeoutError("the write did not begin")

    def end(self):
        os.close(self.fault)
        self.thread.join()


def register(client, ns, fd, blocks=BLOCKS):
    return client.call("region.register", [fd], ns=ns, blocks=blocks, device="cpu", handles=[{"kind": 0, "bytes": blocks * LAYER}],
                       planes=[{"stride": LAYER, "block_bytes": LAYER}])["region"]


def copied(client, method, region, names):
    names = list(names)
    return set(client.call(method, region=region, keys=keys(*names), blocks=u32(*names))["status"])


class Memory(Case):
    options = {"nvme": False}

    def setUp(self):
        if "memory-unguarded" in self.daemon.log() and "hole" in self.id():
            self.skipTest("no userfaultfd here: the daemon fills holes that are made later")

    def opened(self):
        client = self.client()
        return client, client.open(dict(IDENTITY, model=self.id()))

    def test_pages_that_do_not_exist_are_refused(self):
        client, ns = self.opened()
        fd = memfd(0)
        self.addCleanup(os.close, fd)
        os.ftruncate(fd, BLOCKS * LAYER)
        self.assertIn("the memfd has 0 for", str(self.refused(INVALID, register, client, ns, fd)))
        os.pwrite(fd, bytes(BLOCKS * LAYER - PAGE), 0)
        self.assertIn(f"the memfd has {BLOCKS * LAYER // PAGE - 1} for", str(self.refused(INVALID, register, client, ns, fd)))
        self.assertEqual(pages(fd), BLOCKS * LAYER // PAGE - 1)
        os.pwrite(fd, b"x", BLOCKS * LAYER - 1)
        self.assertEqual(copied(client, "dump", register(client, ns, fd), range(BLOCKS)), {OK})

    def test_holes_that_are_made_later_are_not_filled(self):
        client, ns = self.opened()
        fd = memfd(BLOCKS * LAYER)
        self.addCleanup(os.close, fd)
        os.pwrite(fd, os.urandom(BLOCKS * LAYER), 0)
        region = register(client, ns, fd)
        self.assertEqual(copied(client, "dump", region, range(BLOCKS)), {OK})
        punch(fd, 3 * LAYER + PAGE, PAGE)
        self.assertNotIn(OK, copied(client, "load", region, [3]))
        self.assertEqual(copied(client, "load", region, [2, 4]), {OK})
        client.call("evict", ns=ns, keys=keys(3))
        self.assertNotIn(OK, copied(client, "dump", region, [3]))
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(3))["hits"], 0)
        punch(fd, 0, BLOCKS * LAYER)
        for block in range(BLOCKS):
            self.assertNotIn(OK, copied(client, "load", region, [block]))
        self.assertEqual(pages(fd), 0)
        os.pwrite(fd, bytes(BLOCKS * LAYER), 0)
        self.assertEqual(copied(client, "load", region, [2]), {OK})

    def test_holes_that_are_made_meanwhile(self):
        client, ns = self.opened()
        fd = memfd(BLOCKS * LAYER)
        self.addCleanup(os.close, fd)
        region = register(client, ns, fd)
        self.assertEqual(copied(client, "dump", region, range(BLOCKS)), {OK})
        stop = threading.Event()

        def churn():
            while not stop.is_set():
                punch(fd, 0, BLOCKS * LAYER)
                os.pwrite(fd, bytes(BLOCKS * LAYER), 0)
            punch(fd, 0, BLOCKS * LAYER)
        thread, seen = threading.Thread(target=churn), set()
        thread.start()
        try:
            for load in range(1000):
                seen |= copied(client, "load", region, range(BLOCKS))
                if load >= 50 and seen - {OK}:
                    break
        finally:
            stop.set()
            thread.join()
        self.assertTrue(seen - {OK})
        self.assertNotIn(OK, copied(client, "load", region, range(BLOCKS)))
        self.assertEqual(pages(fd), 0)

    def test_pages_elsewhere_in_place_of_holes(self):
        client, ns = self.opened()
        fd = memfd(0)
        self.addCleanup(os.close, fd)
        os.ftruncate(fd, 2 * BLOCKS * LAYER)
        os.posix_fallocate(fd, BLOCKS * LAYER, BLOCKS * LAYER)
        region = register(client, ns, fd)
        self.assertNotIn(OK, copied(client, "dump", region, range(BLOCKS)))
        self.assertEqual(client.call("lookup", ns=ns, keys=keys(*range(BLOCKS)))["hits"], 0)
        self.assertEqual(pages(fd), BLOCKS * LAYER // PAGE)

    def test_a_client_that_holds_its_files_lock(self):
        bystander, client, holders = self.client(), self.client(), []
        ns, theirs = client.open(IDENTITY), bystander.open(dict(IDENTITY, model=self.id()))
        region = register(bystander, theirs, memfd_of(self, BLOCKS * LAYER))
        for _ in range(3):  # more than there are threads
            fd = memfd_of(self, BLOCKS * LAYER)
            os.ftruncate(fd, 2 * BLOCKS * LAYER)
            holders.append(Holder(fd, BLOCKS * LAYER))
            self.addCleanup(holders[-1].end)
            client.begin("region.register", [fd], ns=ns, blocks=BLOCKS, device="cpu", handles=[{"kind": 0, "bytes": BLOCKS * LAYER}],
                         planes=[{"stride": LAYER, "block_bytes": LAYER}])
        self.assertEqual(copied(bystander, "dump", region, range(BLOCKS)), {OK})
        more = register(bystander, theirs, memfd_of(self, BLOCKS * LAYER))
        self.assertEqual(copied(bystander, "load", more, range(BLOCKS)), {OK})
        mine = client.wait(client.msgid)["region"]
        self.assertEqual(copied(client, "dump", mine, range(BLOCKS)), {OK})
        client.call("region.unregister", region=mine)
        self.assertFalse([holder for holder in holders if holder.done.is_set()])

    def test_a_tenant_that_punches_holds_up_no_other(self):
        """While the punch goes on, each thread that touches the memory waits. There are more copies
        than threads."""
        if os.geteuid() != 0:
            self.skipTest("being several users needs root")
        bystander, client, blocks = self.client(uid=1000), self.client(uid=1001), (1 << 30) // LAYER
        ns, theirs = client.open(dict(IDENTITY, model=self.id())), bystander.open(dict(IDENTITY, model=self.id()))
        mine, fd = register(bystander, theirs, memfd_of(self, BLOCKS * LAYER)), memfd(0)
        self.addCleanup(os.close, fd)
        os.ftruncate(fd, blocks * LAYER)
        for attempt in range(20):  # it may be over before a copy has begun
            os.posix_fallocate(fd, 0, blocks * LAYER)
            region = register(client, ns, fd, blocks) if attempt == 0 else region
            thread = threading.Thread(target=punch, args=(fd, 0, blocks * LAYER))
            thread.start()
            names = range(attempt * 8, attempt * 8 + 8)
            for name in names:
                client.begin("dump", region=region, keys=keys(name), blocks=u32(name))
            self.assertEqual(copied(bystander, "dump", mine, [attempt]), {OK})
            waiting = not select.select([client.socket], [], [], 0)[0]
            passed = waiting and thread.is_alive()
            thread.join()
            for msgid in range(client.msgid - 7, client.msgid + 1):
                client.wait(msgid)
            if passed:
                return
        self.fail("no copy of another tenant's ended while the punch went on")

    def test_a_tenant_whose_file_ends_holds_up_no_other(self):
        """All pages of a file go with its last mapping."""
        if os.geteuid() != 0:
            self.skipTest("being several users needs root")
        bystander, client = self.client(uid=1000), self.client(uid=1001)
        ns, theirs = client.open(dict(IDENTITY, model=self.id())), bystander.open(dict(IDENTITY, model=self.id()))
        for _ in range(20):  # it may be over before the other has begun
            fd = memfd(1 << 30)
            try:
                region = register(client, ns, fd)
            finally:
                os.close(fd)
            other = memfd_of(self, BLOCKS * LAYER)
            client.begin("region.unregister", region=region)
            bystander.call("region.unregister", region=register(bystander, theirs, other))
            passed = not select.select([client.socket], [], [], 0)[0]
            client.wait(client.msgid)
            if passed:
                return
        self.fail("no request of another tenant ended while the pages went")

    def test_what_the_library_makes_has_all_its_pages(self):
        sys.path.insert(0, os.path.join(os.path.dirname(UCMD), "../client/python"))
        from ucmclient import SharedMemory
        shared = SharedMemory(3 * PAGE + 1)
        self.assertEqual(pages(shared.fd), 4)


class Charged(unittest.TestCase):
    """What a daemon's group is charged."""

    def setUp(self):
        try:
            self.group = Group("daemon", 800 << 20)
        except OSError as e:
            self.skipTest(f"no memory cgroup can be made here: {e}")
        self.addCleanup(self.group.remove)
        self.daemon = Daemon(nvme=False, before=self.group.words, **{"arena.size": "16MiB"})
        self.addCleanup(self.daemon.stop)
        if "memory-unguarded" in self.daemon.log():
            self.skipTest("no userfaultfd here: the daemon fills holes that are made later")

    def test_a_client_can_t_charge_the_daemon(self):
        client = Client(self.daemon, uid=1000)
        self.addCleanup(client.close)
        ns, fds, blocks, before = client.open(IDENTITY), [], 128, self.group.usage()
        for _ in range(10):  # 320 MiB of holes
            fd = memfd(0)
            fds.append(fd)
            self.addCleanup(os.close, fd)
            os.ftruncate(fd, blocks * LAYER)
            self.assertRaises(Refused, register, client, ns, fd, blocks)
            os.posix_fallocate(fd, 0, blocks * LAYER)
            region = register(client, ns, fd, blocks)
            punch(fd, 0, blocks * LAYER)
            for first in range(0, blocks, 16):
                self.assertNotIn(OK, copied(client, "dump", region, range(first, first + 16)))
        self.assertEqual([pages(fd) for fd in fds], [0] * len(fds))
        self.assertIsNone(self.daemon.process.poll())
        if os.environ.get("UCM_PHASE") != "tsan":  # which keeps memory of its own for each page that is touched
            self.assertLess(self.group.usage() - before, 100 << 20)


if __name__ == "__main__":
    unittest.main()
