#!/usr/bin/python3
"""The Python binding, client/python, against a real daemon: every call, its errors, and which objects keep memory alive."""

import array
import ctypes
import faulthandler
import gc
import hashlib
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import numpy

from client_paths import TOP  # sets the paths of the others
import ucmclient

import fake_copy_agent
import second_client
from daemon import Daemon, DaemonCase, until
from ucmclient import (BlockResult, Client, CopyAgent, CopyAgentMissing, Found, Identity, MemoryKind, Memory,
                       WaitMode, Plane, SharedMemory, Status, UcmError, data_pointer)
from ucmclient import _native, copy_agent as copy_agents, keys as chains

SUITE_TIMEOUT_S = 280
LAYERS, FRAGMENT, BLOCKS = 3, 8192, 32


#: Prints the results of three calls. Each began before the client was closed, and reached the
#: library after that.
ABOUT_TO_CALL = """
import sys, threading
from unittest import mock
from ucmclient import Client, Identity, Plane, SharedMemory, Status, UcmError
from ucmclient._native import lib


def about_to(name, call, client):
    real, reached, closed = getattr(lib, name), threading.Event(), threading.Event()

    def held(*args):
        reached.set()
        closed.wait()
        return real(*args)

    def run():
        try:
            print(call())
        except UcmError as error:
            print(error.status.name)
    with mock.patch.object(lib, name, held):
        thread = threading.Thread(target=run)
        thread.start()
        reached.wait()
        client.close()
        closed.set()
        thread.join()

for name in ("ucm_lookup_prefix", "ucm_load", "ucm_task_wait"):
    client = Client(sys.argv[1], "about-to")
    ns, shared = client.namespace(Identity("about to call", "bf16", "nhd/1", 16, 4096, (1,))), SharedMemory(4096)
    region = ns.register([shared.memory()], [Plane(0, 0, 4096, 4096, 0)], blocks=1)
    task = region.load(bytes(32), [0])
    about_to(name, {"ucm_lookup_prefix": lambda: ns.lookup_prefix(bytes(32)), "ucm_load": lambda: region.load(bytes(32), [0]),
                    "ucm_task_wait": task.wait}[name], client)
"""


def key(*names):
    return b"".join(hashlib.sha256(str(name).encode()).digest() for name in names)


class Case(DaemonCase):
    def client(self, **more):
        client = Client(socket=self.daemon.socket, name="python", **more)
        self.addCleanup(client.close)
        return client

    def identity(self, **more):
        fields = dict(model=self.id(), dtype="bf16", layout="nhd/1", block_tokens=16, layers=(LAYERS,),
                      layer_bytes=FRAGMENT)
        return Identity(**dict(fields, **more))

    def worker(self):
        """A namespace and a region in shared memory: layer after layer, and in each layer block
        after block."""
        ns = self.client().namespace(self.identity())
        shared = SharedMemory(LAYERS * FRAGMENT * BLOCKS)
        planes = [Plane(0, layer * FRAGMENT * BLOCKS, FRAGMENT, FRAGMENT, layer) for layer in range(LAYERS)]
        return ns, shared, ns.register([shared.memory()], planes, blocks=BLOCKS)

    def fragment(self, shared, layer, block):
        start = (layer * BLOCKS + block) * FRAGMENT
        return shared.buffer[start:start + FRAGMENT]

    def fill(self, shared, block):
        for layer in range(LAYERS):
            self.fragment(shared, layer, block)[:] = os.urandom(FRAGMENT)
        return self.bytes(shared, block)

    def bytes(self, shared, block):
        return b"".join(bytes(self.fragment(shared, layer, block)) for layer in range(LAYERS))

    def refused(self, status, call, *args, **named):
        with self.assertRaises(UcmError) as caught:
            call(*args, **named)
        self.assertEqual(caught.exception.status, status, caught.exception)
        self.assertGreater(len(str(caught.exception)), 10)
        return caught.exception


class Blocks(Case):
    def test_requests_are_on_behalf_of_the_engines(self):
        client = self.client()
        operator = second_client.Client(self.daemon)
        operator.call("trace", op=1)
        with client.namespace(self.identity()) as ns:
            with ucmclient.on_behalf_of("cmpl-1"):
                ns.lookup_prefix(key(1))
            with ucmclient.on_behalf_of("x" * 100):
                ns.lookup_prefix(key(1))
            with ucmclient.on_behalf_of("no\ntext"):
                ns.lookup_prefix(key(1))
            ns.lookup_prefix(key(1))
        records = operator.call("trace", op=2)["records"]
        self.assertEqual([record["request"] for record in records], ["cmpl-1", "x" * 64, "", ""])

    def test_dump_and_load_move_the_bytes(self):
        ns, shared, region = self.worker()
        stored = [self.fill(shared, block) for block in range(4)]
        result = region.dump(key(0, 1, 2, 3), range(4)).wait()
        self.assertEqual((result.ok, result.all_ok, result.bytes), (4, True, 4 * LAYERS * FRAGMENT))
        hits = ns.lookup_prefix(key(0, 1, 2, 3, "none"), lease=10)
        self.assertEqual((hits.blocks, hits.in_dram), (4, 4))
        self.assertGreater(hits.lease, 0)
        region.load(key(0, 1, 2, 3), array.array("I", [13, 12, 11, 10]), lease=hits.lease).wait()
        self.assertEqual([self.bytes(shared, block) for block in (13, 12, 11, 10)], stored)

    def test_results_name_each_block(self):
        ns, shared, region = self.worker()
        self.fill(shared, 0)
        region.dump(key("a"), [0]).wait()
        self.assertEqual(region.dump([key("a")], [0]).wait().blocks, bytes([BlockResult.EXISTS]))
        result = region.load([key("a"), key("b")], [1, 2]).wait()
        self.assertEqual((result.blocks, result.ok, result.all_ok), (bytes([BlockResult.OK, BlockResult.MISS]), 1, False))
        found, lease = ns.lookup_per_key(key("b", "a"))
        self.assertEqual((found, lease), (bytes([Found.NOT, Found.DRAM]), 0))
        for wait_mode in WaitMode:  # there is no shared tier
            self.assertEqual(ns.lookup_per_key_nowait(key("b", "a"), wait_mode=wait_mode), (found, 0, False))
            hits = ns.lookup_prefix(key("a", "b"), lease=5, wait_mode=wait_mode)
            self.assertEqual((hits.blocks, hits.pending), (1, False))
            self.assertGreater(hits.lease, 0)
        with self.assertRaisesRegex(UcmError, "enum ucm_wait_mode"):
            ns.lookup_prefix(key("a"), wait_mode=3)

    def test_layer_by_layer(self):
        ns, shared, region = self.worker()
        stored = self.fill(shared, 0)
        for layer in (2, 0, 1):
            self.assertEqual(ns.lookup_prefix(key("l")).blocks, 0)
            region.dump(key("l"), [0], layer=layer, layers=1).wait()
        self.assertEqual(ns.lookup_prefix(key("l")).blocks, 1)
        for layer in range(LAYERS):
            region.load(key("l"), [5], layer=layer, layers=1).wait()
        self.assertEqual(self.bytes(shared, 5), stored)

    def test_a_region_of_some_layers(self):
        ns, shared, region = self.worker()
        stored = self.fill(shared, 0)
        region.dump(key("s"), [0]).wait()
        some = SharedMemory(2 * FRAGMENT * BLOCKS)
        with ns.register([some.memory()], [Plane(0, i * FRAGMENT * BLOCKS, FRAGMENT, FRAGMENT, layer) for i, layer in enumerate((0, 2))],
                         blocks=BLOCKS) as part:
            for layer in (0, 2):
                self.assertEqual(part.load(key("s"), [3], layer=layer, layers=1).wait().bytes, FRAGMENT)
            self.assertEqual([bytes(self.fragment(some, i, 3)) for i in (0, 1)], [stored[:FRAGMENT], stored[2 * FRAGMENT:3 * FRAGMENT]])
            for move in (part.load, part.dump):
                for first, layers in ((0, 0), (1, 1), (0, 2), (1, 0)):
                    error = self.refused(Status.INVALID, lambda: move(key("s"), [3], layer=first, layers=layers).wait())
                    self.assertIn("has no memory for layer 1", str(error))
            for i in range(2):
                self.fragment(some, i, 4)[:] = os.urandom(FRAGMENT)
            for layer in (2, 0):
                part.dump(key("t"), [4], layer=layer, layers=1).wait()
            self.assertEqual(ns.lookup_prefix(key("t")).blocks, 0, "a layer is missing")
            region.dump(key("t"), [0], layer=1, layers=1).wait()
            region.load(key("t"), [5]).wait()
            self.assertEqual(self.bytes(shared, 5), bytes(self.fragment(some, 0, 4)) + stored[FRAGMENT:2 * FRAGMENT] + bytes(self.fragment(some, 1, 4)))

    def test_durable_evicted_prefetched_pinned(self):
        ns, shared, region = self.worker()
        stored = self.fill(shared, 0)
        self.assertTrue(region.dump(key("d"), [0], durable=True).wait().all_ok)
        self.assertEqual(ns.pin(key("d")), 1)
        self.assertEqual(ns.evict(key("d")), (0, 1))
        self.assertEqual(ns.unpin(), 1)
        self.assertTrue(ns.prefetch(key("d"), part=0, priority=3).wait().all_ok)
        region.load(key("d"), [9], priority=7, daemon_timeout=5.0).wait()
        self.assertEqual(self.bytes(shared, 9), stored)
        self.assertEqual(ns.evict(key("d")), (1, 0))
        self.assertEqual(ns.lookup_prefix(key("d")).blocks, 0)

    def test_prefetch_of_some_parts(self):
        ns = self.client().namespace(self.identity(parts=3, layers=(1, 2, 3)))
        for part in range(3):
            shared = SharedMemory((part + 1) * FRAGMENT)
            planes = [Plane(0, layer * FRAGMENT, FRAGMENT, FRAGMENT, layer) for layer in range(part + 1)]
            region = ns.register([shared.memory()], planes, blocks=1, part=part)
            self.assertTrue(region.dump(key("p"), [0], durable=True).wait().all_ok)
        operator = second_client.Client(self.daemon)
        self.addCleanup(operator.close)
        number = operator.open(dict(second_client.DEMO, model=self.id(), key_bytes=32, parts=3, layers=[1, 2, 3], layer_bytes=FRAGMENT))

        def prefetched(prefetch):
            operator.call("evict", ns=number, tier=1)
            self.assertTrue(prefetch().wait().all_ok)
            parts = operator.call("inspect", ns=number, key=key("p"))["parts"]
            return [part["part"] for part in parts if part["dram"] == "ready"]

        self.assertEqual([prefetched(lambda: ns.prefetch(key("p"), part=part)) for part in (None, 0, 1, 2)], [[0, 1, 2], [0], [1], [2]])
        self.refused(Status.INVALID, lambda: ns.prefetch(key("p"), part=3).wait())

    def test_numpy_without_a_copy(self):
        ns, shared, region = self.worker()
        pages = numpy.frombuffer(shared.buffer, dtype=numpy.float32).reshape(LAYERS, BLOCKS, -1)
        pages[:, 7] = numpy.arange(LAYERS * FRAGMENT // 4, dtype=numpy.float32).reshape(LAYERS, -1)
        packed = numpy.frombuffer(key("n", "m"), dtype=numpy.uint8).reshape(2, 32)
        region.dump(packed[:1], numpy.array([7], dtype=numpy.uint32)).wait()
        region.load(packed[:1], numpy.array([8], dtype=numpy.int64)).wait()
        self.assertTrue((pages[:, 7] == pages[:, 8]).all())
        self.assertEqual(data_pointer(pages[1]), data_pointer(pages) + BLOCKS * FRAGMENT)

        class Foreign:  # only DLPack
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **_):
                return self.array.__dlpack__()
        self.assertEqual(data_pointer(Foreign(pages[1])), data_pointer(pages[1]))


class Manners(Case):
    def test_server_info_and_connection_epoch(self):
        client = self.client()
        info = client.server_info()
        self.assertTrue(info.server.startswith("ucmd "))
        self.assertEqual((client.connection_epoch, len(info.instance)), (1, 16))
        self.assertGreaterEqual(info.max_keys, 8192)
        self.assertRegex(ucmclient.__version__, r"^\d+\.\d+\.\d+$")

    def test_same_identity_same_fingerprint(self):
        client = self.client()
        prints = {client.namespace(self.identity(**more)).fingerprint
                  for more in ({}, {}, {"salt": b"a\0b"}, {"salt": b"a\0c"}, {"dtype": "fp8"}, {"revision": "r"})}
        self.assertEqual((len(prints), {len(p) for p in prints}), (5, {32}))

    def test_errors_have_a_number_and_a_sentence(self):
        self.refused(Status.NO_DAEMON, Client, socket="/nonexistent/socket", timeout=0.05)
        ns, shared, region = self.worker()
        self.refused(Status.INVALID, region.load(key(1), [BLOCKS]).wait)
        self.refused(Status.INVALID, self.client().namespace, self.identity(block_tokens=0))
        self.refused(Status.DENIED, self.client().namespace, self.identity(tenant="somebody else"))
        for wrong in (lambda: region.load(key(1), [0, 1]), lambda: region.load(b"short", [0]),
                      lambda: region.load([b"short"], [0]), lambda: region.load(key(1), [-1]),
                      lambda: region.dump(key(1), [0], cuda_event=b"x"), lambda: chains.sha256_chain([1], 0),
                      lambda: region.load(key(1), array.array("d", [0.0]))):
            with self.assertRaises(ValueError):
                wrong()

    def test_closed_objects_say_so(self):
        ns, shared, region = self.worker()
        task = region.load(key("none"), [0])
        task.wait()
        self.refused(Status.CONSUMED, task.wait)
        task.close()
        task.close()
        self.refused(Status.INVALID, task.wait)
        region.close()
        region.close()
        self.refused(Status.INVALID, region.load, key(1), [0])
        ns.client.close()
        ns.close()
        self.refused(Status.INVALID, ns.lookup_prefix, key(1))

    def test_a_client_that_goes_takes_its_objects_along(self):
        ns, shared, region = self.worker()
        task = region.load(key("none"), [0])
        ns.client.close()
        for call in (task.check, task.wait, task.cancel, lambda: region.load(key(1), [0]), region.unregister,
                     lambda: ns.lookup_prefix(key(1))):
            self.refused(Status.DISCONNECTED, call)
        task.close()
        region.close()
        ns.close()

    def test_a_client_is_closed_while_another_thread_is_about_to_call(self):
        """It is closed between the look-up of a handle and the library's call. In a process of its
        own, which overwrites freed memory."""
        child = subprocess.run([sys.executable, "-B", "-X", "faulthandler", "-c", ABOUT_TO_CALL, self.daemon.socket], capture_output=True, text=True, timeout=60,
                               env={**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": str(TOP / "client/python")}, check=False)
        self.assertEqual((child.returncode, child.stdout), (0, "DISCONNECTED\n" * 3), child.stderr)

    def test_shared_memory_outlives_its_object(self):
        view = SharedMemory(1 << 20).buffer
        gc.collect()
        view[123] = 45
        self.assertEqual(view[123], 45)

    def test_descriptors_are_closed(self):
        def descriptors():
            return len(os.listdir("/proc/self/fd"))
        ns, shared, region = self.worker()
        region.close()
        before = descriptors()
        for _ in range(20):
            one = SharedMemory(1 << 16)
            planes = [Plane(0, 0, FRAGMENT, FRAGMENT, 0), Plane(0, 2 * FRAGMENT, FRAGMENT, FRAGMENT, 1), Plane(0, 4 * FRAGMENT, FRAGMENT, FRAGMENT, 2)]
            with ns.register([one.memory()], planes, blocks=2):
                pass
            del one
        gc.collect()
        self.assertEqual(descriptors(), before)

    def test_memory_checks_its_handles(self):
        ns, shared, region = self.worker()
        with self.assertRaises(ValueError):
            ns.register([Memory(MemoryKind.CUDA_IPC, 4096, ipc=b"short")], [], blocks=1)
        with self.assertRaises(ValueError):
            ns.register([shared.memory()], [], blocks=1, gpu=b"short")

    def test_polling(self):
        ns, shared, region = self.worker()
        task = region.load(key("none"), [0])
        while task.check() is None:
            self.assertTrue(select.select([ns.client], [], [], 10)[0])
            ns.client.process()

    def test_threads_run_while_a_call_waits(self):
        ns, shared, region = self.worker()
        stop, turns = threading.Event(), []

        def spin():
            while not stop.is_set():
                turns.append(time.monotonic())
                time.sleep(0.001)
        thread = threading.Thread(target=spin)
        thread.start()
        started = time.monotonic()
        with self.assertRaises(UcmError):
            Client(socket="/nonexistent/socket", timeout=1)
        ended = time.monotonic()
        stop.set()
        thread.join()
        # If the call held the interpreter lock, it would be 1, as before the call began to wait.
        self.assertGreater(sum(started < at < ended for at in turns), 3)

    def test_keys(self):
        tokens = array.array("I", range(1, 33))
        both = chains.sha256_chain(tokens, 16)
        self.assertEqual(len(both), 64)
        self.assertEqual(chains.sha256_chain(tokens[16:], 16, parent=both[:32]), both[32:])
        self.assertEqual(chains.sha256_chain(range(1, 40), 16), both)
        self.assertEqual(chains.sha256_chain([], 16), b"")

    def test_keys_are_those_of_hashlib_and_pickle(self):
        """Of tokens with every length that one takes in a pickle, and both ends of each, and of blocks
        whose pickle spans several frames."""
        meta = "llama:8:torch.bfloat16:0"
        each = [0, 1, 255, 256, 65535, 65536, 2147483647, 2147483648, 4294967295, 128000, 7, 300, 70000, 5, 6, 8]
        many = [i * 2654435761 % (1 << 32) for i in range(200000)]

        def md5(of):
            return hashlib.md5(meta.encode() + pickle.dumps(of, protocol=5)).digest()

        def sha256(of):
            return hashlib.sha256(b"ucm-block-1\0" + of[0] + array.array("I", of[1]).tobytes()).digest()

        def md5_chain(*words):
            return chains.md5_chain(meta, *words)

        for tokens, n in [(each, n) for n in (1, 2, 3, 4, 8, 16)] + [(many, n) for n in (13000, 16384, 65536, 200000)]:
            for chain, one, parent, key in ((md5_chain, md5, None, md5("UCM_HASH_SEED")),
                                            (md5_chain, md5, bytes(range(16)), bytes(range(16))),
                                            (chains.sha256_chain, sha256, None, bytes(32)),
                                            (chains.sha256_chain, sha256, bytes(range(32)), bytes(range(32)))):
                want = b""
                for at in range(0, len(tokens) // n * n, n):
                    key = one((key, tuple(tokens[at:at + n])))
                    want += key
                self.assertEqual(chain(tokens, n, parent), want, (one, parent, n))

    def test_the_library_is_asked_for_by_name(self):
        words = subprocess.run([sys.executable, "-c", "import ucmclient"], capture_output=True, text=True,
                               env=dict(os.environ, UCMCLIENT_LIB="/nonexistent.so",
                                        PYTHONPATH=str(TOP / "client/python")))
        self.assertNotEqual(words.returncode, 0)
        self.assertIn("UCMCLIENT_LIB", words.stderr)


class CopyAgents(Case):
    """The binding of libucmclient_cuda, over one that needs no GPU. tests/gpu tests the real one.
    """

    GPU = bytes(range(16))

    def copy_agent(self):
        """With a namespace, memory and planes to register."""
        ns = self.client().namespace(self.identity())
        shared = SharedMemory(LAYERS * FRAGMENT * BLOCKS)
        planes = [Plane(0, layer * FRAGMENT * BLOCKS, FRAGMENT, FRAGMENT, layer) for layer in range(LAYERS)]
        return CopyAgent(ns.client, self.GPU), ns, shared, planes

    def register(self, copy_agent, ns, shared, planes):
        return copy_agent.register(ns, [shared.memory()], planes, [shared.address], blocks=BLOCKS)

    def test_regions_of_it_are_regions(self):
        fake = fake_copy_agent.Fake(self)
        parts = self.copy_agent()
        with parts[0] as copy_agent, self.register(*parts) as region:
            stored = self.fill(parts[2], 0)
            region.dump(key("c"), [0]).wait()
            self.assertTrue(region.load(key("c"), [7]).wait().all_ok)
            self.assertEqual(self.bytes(parts[2], 7), stored)
        self.assertTrue(copy_agent.closed and region.closed)
        self.assertEqual((fake.calls(), fake.copy_agents), ("ORUC", 0))

    def test_regions_end_before_it(self):
        fake = fake_copy_agent.Fake(self)
        parts = self.copy_agent()
        regions = [self.register(*parts) for _ in range(3)]
        regions[1].unregister()
        parts[0].close()
        parts[0].close()
        self.assertEqual((fake.calls(), fake.copy_agents), ("ORRRUUUC", 0))
        for region in regions:
            self.refused(Status.INVALID, region.load, key(1), [0])
        self.refused(Status.INVALID, self.register, *parts)

    def test_another_client_s_namespace_is_refused(self):
        fake_copy_agent.Fake(self)
        copy_agent, _, shared, planes = self.copy_agent()
        other = self.client().namespace(self.identity())
        with self.assertRaisesRegex(ValueError, "another client's"):
            self.register(copy_agent, other, shared, planes)

    def test_a_forked_child_leaves_it_alone(self):
        fake = fake_copy_agent.Fake(self)
        copy_agent, *_ = self.copy_agent()
        fake.calls()
        pid = os.fork()
        if pid == 0:
            copy_agent.close()
            copy_agent.client.close()
            os._exit(len(fake.calls()))
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.assertEqual(fake.copy_agents, 1)

    def test_a_client_that_goes_takes_it_along(self):
        fake = fake_copy_agent.Fake(self)
        copy_agent, ns, shared, planes = parts = self.copy_agent()
        region = self.register(*parts)
        ns.client.close()
        self.assertEqual((fake.calls(), fake.copy_agents), ("ORA", 0))
        self.refused(Status.DISCONNECTED, region.load, key(1), [0])
        self.refused(Status.DISCONNECTED, region.unregister)
        region.close()
        copy_agent.close()
        self.refused(Status.INVALID, self.register, *parts)
        self.assertEqual(fake.calls(), "")

    def test_refusals_have_the_library_s_sentence(self):
        fake = fake_copy_agent.Fake(self)
        fake.refuse(open=Status.NO_MEMORY)
        error = self.refused(Status.NO_MEMORY, CopyAgent, self.client(), self.GPU)
        self.assertIn("can't be made: out of memory", str(error))
        fake.refuse(register=Status.DEVICE)
        parts = self.copy_agent()
        self.assertIn("not of CUDA's memory", str(self.refused(Status.DEVICE, self.register, *parts)))
        fake.refuse()
        copy_agent, ns, shared, planes = parts
        of_libucmclient = self.refused(Status.INVALID, copy_agent.register, ns, [shared.memory()], [], [shared.address],
                                       blocks=BLOCKS)
        self.assertIn("planes", str(of_libucmclient))
        self.assertEqual(fake.copy_agents, 1)

    def test_arguments_are_checked(self):
        fake_copy_agent.Fake(self)
        copy_agent, ns, shared, planes = self.copy_agent()
        with self.assertRaisesRegex(ValueError, "each memory needs one"):
            copy_agent.register(ns, [shared.memory()], planes, [], blocks=BLOCKS)
        with self.assertRaisesRegex(ValueError, "UUID"):
            CopyAgent(ns.client, b"short")
        closed = self.client()
        closed.close()
        self.refused(Status.INVALID, CopyAgent, closed, self.GPU)

    def test_a_library_that_is_not_there(self):
        with fake_copy_agent.named("/nonexistent.so"):
            error = self.refused(Status.UNSUPPORTED, CopyAgent, self.client(), self.GPU)
        self.assertIsInstance(error, CopyAgentMissing)
        for words in ("NVIDIA's driver", "UCMCLIENT_CUDA_LIB", "/nonexistent.so"):
            self.assertIn(words, str(error))

    def test_a_library_of_another_version(self):
        with fake_copy_agent.named(_native.lib._name):
            error = self.refused(Status.UNSUPPORTED, copy_agents.require)
        self.assertIn("ucm_cuda_", str(error))

    def test_a_host_without_a_driver(self):
        library = os.path.join(os.path.dirname(os.path.abspath(_native.lib._name)), copy_agents.SONAME)
        if not os.path.exists(library):
            self.skipTest("libucmclient_cuda was not built: there is no CUDA toolkit")
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            with fake_copy_agent.named(library):
                error = self.refused(Status.UNSUPPORTED, copy_agents.require)
            self.assertIn("libcuda.so.1", str(error))
        else:
            self.skipTest("this host has a driver")

    def test_where_it_is_looked_for(self):
        with tempfile.TemporaryDirectory() as directory:
            package, beside = os.path.join(directory, "package"), os.path.join(directory, "lib")
            for one in (package, beside):
                os.mkdir(one)
                open(os.path.join(one, copy_agents.SONAME), "wb").close()
            library = type("Library", (), {"_name": os.path.join(beside, "libucmclient.so.0")})
            with mock.patch.object(copy_agents, "__file__", os.path.join(package, "copy_agent.py")), \
                    mock.patch.object(_native, "lib", library):
                with mock.patch.dict(os.environ):
                    os.environ.pop("UCMCLIENT_CUDA_LIB", None)
                    self.assertEqual(copy_agents._candidates(), [os.path.join(package, copy_agents.SONAME),
                                                                os.path.join(beside, copy_agents.SONAME), copy_agents.SONAME])
                    os.remove(os.path.join(package, copy_agents.SONAME))
                    library._name = "libucmclient.so.0"
                    self.assertEqual(copy_agents._candidates(), [copy_agents.SONAME])
                with fake_copy_agent.named("/x.so"):
                    self.assertEqual(copy_agents._candidates(), ["/x.so"])


class Restart(Case):
    def test_the_client_goes_on_with_the_next_daemon(self):
        ns, shared, region = self.worker()
        stored = self.fill(shared, 0)
        self.assertTrue(region.dump(key("r"), [0], durable=True).wait().all_ok)
        self.daemon.process.kill()
        self.daemon.process.wait()
        error = self.refused(Status.NO_DAEMON, ns.lookup_prefix, key("r"), timeout=1)
        self.assertTrue(error.away)
        restarted = Daemon(**{"socket": self.daemon.socket, "nvme.paths": self.daemon.store})
        self.addCleanup(restarted.stop)
        until(lambda: ns.lookup_prefix(key("r")).blocks, "the block's return")
        self.assertEqual(ns.client.connection_epoch, 2)
        self.assertTrue(region.load(key("r"), [4]).wait().all_ok)
        self.assertEqual(self.bytes(shared, 4), stored)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()


class Structures(unittest.TestCase):
    """ctypes and a C compiler read the header alike."""

    NAMES = {"ucm_options": "Options", "ucm_server_info": "ServerInfo", "ucm_identity": "Identity",
             "ucm_memory": "Memory", "ucm_plane": "Plane", "ucm_region_spec": "RegionSpec", "ucm_lookup": "Lookup",
             "ucm_transfer": "Transfer", "ucm_result": "Result", "ucm_cuda_options": "CudaOptions",
             "ucm_kv_rows": "KvRows", "ucm_encoded_form": "EncodedForm", "ucm_encoding_info": "EncodingInfo"}

    def test_sizes_and_offsets(self):
        lines = []
        for c, name in self.NAMES.items():
            fields = [field[0] for field in getattr(_native, name)._fields_]
            numbers = [f"sizeof(struct {c})"] + [f"offsetof(struct {c}, {field})" for field in fields]
            lines += [f'printf("%zu ", {number});' for number in numbers] + ['puts("");']
        source = ('#include <ucmclient_cuda.h>\n#include <stddef.h>\n#include <stdio.h>\n'
                  "int main(void) {" + "\n".join(lines) + "}")
        with tempfile.TemporaryDirectory() as directory:
            program = os.path.join(directory, "sizes")
            subprocess.run(["cc", "-I", str(TOP / "client/include"), "-x", "c", "-", "-o", program], input=source.encode(), check=True)
            told = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
        for name, line in zip(self.NAMES.values(), told):
            structure = getattr(_native, name)
            fields = [getattr(structure, field[0]).offset for field in structure._fields_]
            self.assertEqual([int(n) for n in line.split()], [ctypes.sizeof(structure), *fields], name)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=2)
