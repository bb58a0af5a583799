#!/usr/bin/python3
"""ucmclient.engine.ucm against a real daemon, with UCM's abstract classes and factories played: `make check-ucm` has the real ones."""

import abc
import ctypes
import os
import sys
import threading
import time
import unittest
from unittest import mock

import numpy as np

import client_paths  # noqa: F401  sets the paths of the others
from daemon import Daemon
from test_page_store import Case, module
from ucmclient.memory import SharedMemory
from ucmclient.engine.places import _GROUPS

LAYERS, BLOCKS, SIZE = 3, 6, 64


def names(n, tag=""):
    return [f"{tag}{i}".encode().rjust(16, b"-") for i in range(n)]


class Base(abc.ABC):
    def __init__(self, config):
        self.config = config


def abstract(*methods):
    """A base class with these abstract methods, and no other."""
    return type("Base", (Base,), {name: abc.abstractmethod(lambda *_: None) for name in methods})


V0 = ("cc_store", "create", "lookup", "prefetch", "load", "dump", "fetch_data", "dump_data", "wait", "commit", "check")
V1 = ("cc_store", "lookup", "lookup_on_prefix", "lookup_on_reverse", "prefetch", "load", "dump", "load_data", "dump_data", "wait", "check")


class NotFound(RuntimeError):
    pass


class Sick(RuntimeError):
    pass


class Factory:
    def __init__(self):
        self.known = {}

    def register_connector(self, name, path, class_name):
        self.known[name] = path, class_name


def play_ucm():
    module("ucm"), module("ucm.store"), module("ucm.store.pipeline")
    module("ucm.store.pipeline.errors", StoreNotFoundError=NotFound, StoreUnhealthyError=Sick)
    module("ucm.store.ucmstore", Task=object, UcmKVStoreBase=abstract(*V0))
    module("ucm.store.ucmstore_v1", Task=object, UcmKVStoreBaseV1=abstract(*V1))
    module("ucm.store.factory", UcmConnectorFactory=Factory())
    module("ucm.store.factory_v1", UcmConnectorFactoryV1=Factory())


class Cache:
    """Like a paged KV cache of vLLM: for each layer K of all blocks, then V. shared: in memory that
    the daemon maps. The first `lead` bytes are not the cache's."""

    def __init__(self, shared=True, lead=0, layers=LAYERS, blocks=BLOCKS):
        size = lead + layers * 2 * blocks * SIZE
        self.memory = SharedMemory(size) if shared else ctypes.create_string_buffer(size)
        address = self.memory.address if shared else ctypes.addressof(self.memory)
        self.whole = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        self.bytes = self.whole[lead:].reshape(layers, 2, blocks, SIZE)
        self.bytes[:] = np.frombuffer(os.urandom(self.bytes.nbytes), np.uint8).reshape(self.bytes.shape)
        self.at = address + lead + np.arange(layers * 2 * blocks).reshape(layers, 2, blocks) * SIZE

    def rows(self, *blocks):
        """Of blocks: K and V of each layer."""
        return np.array([self.at[:, :, block].ravel() for block in blocks], np.uint64)

    def layer(self, layer, *blocks):
        return np.array([self.at[layer, :, block] for block in blocks], np.uint64)

    def block(self, block):
        return self.bytes[:, :, block].tobytes()


class Ucm(Case):
    @classmethod
    def setUpClass(cls):
        play_ucm()

    @classmethod
    def tearDownClass(cls):
        for name in [name for name in sys.modules if name.split(".")[0] == "ucm" or name.startswith("ucmclient.engine.ucm.")]:
            del sys.modules[name]

    def own(self, **more):
        return {"socket": self.daemon.socket, "retry_interval": 0.05, "connect_timeout": 5.0, "lookup_timeout": 5.0, **more}

    def config(self, shards=1, own=(), **more):
        whole = LAYERS * 2 * SIZE
        return {"block_size": whole, "shard_size": whole // shards, "tensor_size_list": [SIZE] * (2 * LAYERS // shards), "unique_id": "x",
                "device_id": 0, "ucmd": self.own(**dict(own)), **more}

    def store(self, **words):
        from ucmclient.engine.ucm.store_v1 import UcmdStore
        store = UcmdStore(self.config(**words))
        self.addCleanup(store.close)
        return store

    def v0(self, config):
        from ucmclient.engine.ucm.store_v0 import UcmdStore
        store = UcmdStore(config)
        self.addCleanup(store.close)
        return store


class V1Store(Ucm):
    def test_whole_blocks(self):
        """What UCM's connector does in a step, in memory of each kind: the scheduler's store looks
        up, and the worker's loads and dumps."""
        for there in (True, False):
            for here in (True, False):
                with self.subTest(there=there, here=here):
                    a, b, ids = Cache(there), Cache(here, lead=200), names(BLOCKS, f"{there}{here}")
                    one, two = self.store(), self.store()
                    looks = self.store(own={}, tensor_size_list=None, shard_size=None, device_id=-1)
                    self.assertEqual((looks.lookup(ids), looks.lookup_on_prefix(ids)), ([False] * BLOCKS, -1))
                    task = one.dump_data(ids[:4], [0] * 4, a.rows(1, 2, 3, 4))
                    one.wait(task)
                    self.assertTrue(task.task_id > 0 and one.check(task))
                    self.assertEqual((looks.lookup(ids), looks.lookup_on_prefix(ids)), ([True] * 4 + [False] * 2, 3))
                    looks.prefetch(ids)
                    two.wait(two.load_data(ids[1:4], [0] * 3, b.rows(5, 0, 2)))
                    self.assertEqual([b.block(i) for i in (5, 0, 2)], [a.block(i) for i in (2, 3, 4)])
                    with self.assertRaisesRegex(RuntimeError, "1 of 2 shards were not loaded"):
                        two.wait(two.load_data(ids[3:5], [0, 0], b.rows(1, 3).tolist()))
                    self.assertEqual(len(one._store.places._groups), int(there), "one region has every block")
                    self.assertEqual((one._store.places._staging is None, two._store.places._staging is None), (there, here))

    def test_layer_by_layer(self):
        """A block is found once its last layer is there. The layers of a cache are one region, which grows."""
        for shared in (True, False):
            a, b, ids = Cache(shared, lead=5 * SIZE + 16), Cache(shared), names(3, str(shared))
            one, two, looks = self.store(shards=LAYERS), self.store(shards=LAYERS), self.store(
                shards=LAYERS, own={"shards": LAYERS}, tensor_size_list=None, shard_size=None)
            for layer in (0, 2, 1):
                self.assertEqual(looks.lookup_on_prefix(ids), -1)
                one.wait(one.dump_data(ids, [layer] * 3, a.layer(layer, 0, 1, 5)))
            self.assertEqual(looks.lookup_on_prefix(ids), 2)
            tasks = [two.load_data(ids, [layer] * 3, b.layer(layer, 4, 3, 2)) for layer in range(LAYERS)]
            for task in tasks:
                two.wait(task)
            self.assertEqual([b.block(i) for i in (4, 3, 2)], [a.block(i) for i in (0, 1, 5)])
            self.assertEqual(len(two._store.places._groups), int(shared))
            # The memory begins with bytes that are not the cache's. Blocks before and after a
            # border of regions, and the last ones.
            self.assertLessEqual(len(one._store.places._groups), 3)
            self.assertLessEqual(self.stats()["regions"], 6)

    def test_nothing_is_copied_while_its_region_is_registered_again(self):
        """To register memory of a GPU, the client writes over the first bytes of each allocation for a moment."""
        from ucmclient.client import Namespace
        a, ids, under_way, seen, lock = Cache(True), names(BLOCKS, "again"), [0], [], threading.Lock()
        store = self.store(shards=LAYERS)
        ask, register = store._store.places._ask, Namespace.register

        def slow(region, *words, **more):
            with lock:
                under_way[0] += region is not None
            time.sleep(0.05)  # longer than the next layer takes to come
            try:
                return ask(region, *words, **more)
            finally:
                with lock:
                    under_way[0] -= region is not None

        def seeing(ns, *words, **more):
            seen.append(under_way[0])
            return register(ns, *words, **more)

        with mock.patch.object(store._store.places, "_ask", slow), mock.patch.object(Namespace, "register", seeing):
            for task in [store.dump_data(ids, [layer] * BLOCKS, a.layer(layer, *range(BLOCKS))) for layer in range(LAYERS)]:
                store.wait(task)
        self.assertEqual(seen, [0] * len(seen))
        self.assertEqual(store.lookup_on_prefix(ids), BLOCKS - 1)

    def test_shards_of_many_blocks_in_one_call(self):
        a, b, ids, store = Cache(), Cache(), names(2), self.store(shards=LAYERS)
        every = [(i, layer) for i in range(2) for layer in range(LAYERS)]
        for verb, cache in (("dump_data", a), ("load_data", b)):
            rows = np.concatenate([cache.layer(layer, i) for i, layer in every])
            store.wait(getattr(store, verb)([ids[i] for i, _ in every], [layer for _, layer in every], rows))
        self.assertEqual(b.bytes[:, :, :2].tobytes(), a.bytes[:, :, :2].tobytes())

    def test_tensors(self):
        """Tensors that lie anywhere, as in UCM's own tests."""
        class Tensor:
            def __init__(self):
                self.bytes = np.frombuffer(os.urandom(SIZE), np.uint8).copy()
                self.data_ptr = lambda: self.bytes.ctypes.data
        there, here, ids = ([[Tensor() for _ in range(2 * LAYERS)] for _ in range(40)] for _ in "ab"), None, names(40)
        there, here = there
        store = self.store()
        store.wait(store.dump(ids, [], there))
        store.wait(store.load(ids, [0] * 40, here))
        self.assertTrue(all((a.bytes == b.bytes).all() for one, other in zip(there, here) for a, b in zip(one, other)))

    def test_pieces_of_several_sizes(self):
        sizes = [96, 32]
        memory = [SharedMemory(10 * size) for size in sizes]
        rows = np.array([[one.address + size * i for one, size in zip(memory, sizes)] for i in range(10)], np.uint64)
        store = self.store(block_size=128, shard_size=128, tensor_size_list=sizes)
        for one in memory:
            one.buffer[:] = os.urandom(one.size)
        store.wait(store.dump_data(names(5), [0] * 5, rows[:5]))
        store.wait(store.load_data(names(5), [0] * 5, rows[5:]))
        self.assertEqual([bytes(one.buffer[: 5 * size]) for one, size in zip(memory, sizes)],
                         [bytes(one.buffer[5 * size :]) for one, size in zip(memory, sizes)])
        self.assertEqual(len(store._store.places._groups), 1)

    def test_blocks_that_lie_anyhow(self):
        """Shared memory without an order goes through the store's own memory, once there would be
        too many regions."""
        memory, draw, store = SharedMemory(1 << 20), np.random.default_rng(3), self.store()
        memory.buffer[:] = os.urandom(memory.size)
        rows = (memory.address + draw.permutation((1 << 20) // 128)[: 120 * 2 * LAYERS] * 128).reshape(120, -1).astype(np.uint64)
        store.wait(store.dump_data(names(60), [0] * 60, rows[:60]))
        store.wait(store.load_data(names(60), [0] * 60, rows[60:]))
        at = [[int(one) - memory.address for one in row] for row in rows]
        got = [b"".join(bytes(memory.buffer[i : i + SIZE]) for i in row) for row in at]
        self.assertEqual(got[:60], got[60:])
        self.assertEqual(len(store._store.places._groups), _GROUPS)
        self.assertLessEqual(self.stats()["regions"], _GROUPS + 1)

    def test_who_shares(self):
        one, ids, cache = self.store(), names(1), Cache()
        one.wait(one.dump_data(ids, [0], cache.rows(0)))
        self.assertEqual(self.store().lookup(ids), [True])
        for own in ({"model": "other"}, {"salt": "x"}, {"revision": "2"}):
            self.assertEqual(self.store(own=own).lookup(ids), [False], own)

    def test_windows_have_blocks_of_their_own(self):
        """UCM's connector for models with windows has two stores, with the same ids for different
        bytes."""
        whole, window, other = (self.store(unique_id=f"{engine}_fawa_{which}") for engine, which in (("x", "fa"), ("x", "wa"), ("y", "wa")))
        ids, cache = names(4), Cache()
        whole.wait(whole.dump_data(ids[:3], [0] * 3, cache.rows(0, 1, 2)))
        window.wait(window.dump_data(ids[:2], [0] * 2, cache.rows(4, 5)))
        self.assertEqual([store.lookup(ids) for store in (whole, window, other, self.store())],
                         [[True] * 3 + [False], [True] * 2 + [False] * 2, [True] * 2 + [False] * 2, [False] * 4])
        other.wait(other.load_data(ids[1:2], [0], cache.rows(3)))
        self.assertEqual(cache.block(3), cache.block(5))

    def test_the_last_one_that_is_there(self):
        store, ids, cache = self.store(), names(6), Cache()
        self.assertEqual(store.lookup_on_reverse(ids), -1)
        store.wait(store.dump_data([ids[1], ids[4]], [0, 0], cache.rows(1, 4)))
        self.assertEqual([store.lookup_on_reverse(ids[:n]) for n in (0, 1, 2, 4, 5, 6)], [-1, -1, 1, 1, 4, 4])

    def test_what_is_not_there_and_a_daemon_that_is_away(self):
        daemon = Daemon(nvme=False)
        self.addCleanup(daemon.stop)
        store, ids, cache = self.store(own={"socket": daemon.socket}), names(2), Cache()
        store.wait(store.dump_data(ids[:1], [0], cache.rows(0)))
        with self.assertRaisesRegex(NotFound, "1 of 2 shards were not loaded"):
            store.wait(store.load_data(ids, [0, 0], cache.rows(1, 2)))
        daemon.kill()
        for task in (lambda: store.load_data(ids[:1], [0], cache.rows(1)), lambda: store.dump_data(ids[:1], [0], cache.rows(0))):
            with self.assertRaises(Sick):
                store.wait(task())

    def test_a_scheduler_that_is_told_no_size(self):
        """All data-parallel engines but the first."""
        ids, cache, worker = names(1), Cache(), self.store()
        worker.wait(worker.dump_data(ids, [0], cache.rows(0)))
        nothing = {"block_size": None, "shard_size": None, "tensor_size_list": None}
        with self.assertRaisesRegex(RuntimeError, 'set "block_bytes"'):
            self.store(**nothing)
        self.assertEqual(self.store(own={"block_bytes": LAYERS * 2 * SIZE}, **nothing).lookup(ids), [True])

    def test_shards_that_are_padded(self):
        """UCM pads its shards to 4 KiB for files. Only a shard's own bytes are moved, and a
        scheduler is told how many they are."""
        part, ids, cache = 2 * SIZE, names(2), Cache()
        padded = {"shard_size": 4096, "block_size": LAYERS * 4096, "tensor_size_list": [SIZE] * 2}
        own = {"block_bytes": LAYERS * part, "shards": LAYERS}
        with self.assertLogs("ucmclient.engine.ucm", "WARNING") as log:
            self.store(**padded)
        self.assertIn(f'set "shards": {LAYERS}, "block_bytes": {LAYERS * part} in', log.output[0])
        worker = self.store(own=own, **padded)
        for layer in range(LAYERS):
            worker.wait(worker.dump_data(ids, [layer] * 2, cache.layer(layer, 0, 1)))
        looks = self.store(own=own, block_size=LAYERS * 4096, shard_size=None, tensor_size_list=None)
        self.assertEqual(looks.lookup_on_prefix(ids), 1)
        worker.wait(worker.load_data(ids[1:], [1], cache.layer(1, 4)))
        self.assertEqual(cache.bytes[1, :, 4].tobytes(), cache.bytes[1, :, 1].tobytes())
        of = {"fa": LAYERS * part, "wa": 1}
        self.store(own={"shards": LAYERS, "block_bytes": of}, unique_id="x_fawa_fa", **padded)
        with self.assertRaisesRegex(RuntimeError, f"is 1, and this store's blocks have {LAYERS * part}"):
            self.store(own={"shards": LAYERS, "block_bytes": of}, unique_id="x_fawa_wa", **padded)

    def test_what_is_refused(self):
        for words, sentence in (({"own": {"block_bytes": "x"}}, "must be a number"), ({"block_size": 0}, "block_size must be the bytes"), ({"shard_size": 100}, "shards of equal size"),
                                ({"own": {"shards": 2}}, "shards of equal size"), ({"own": {"shards": 0}}, "1 or more"),
                                ({"tensor_size_list": [SIZE]}, "as many are right"), ({"own": {"sokcet": "x"}}, "has no setting 'sokcet'"),
                                ({"own": {"model": ""}}, "must be a name")):
            with self.assertRaisesRegex((RuntimeError, ValueError), sentence):
                self.store(**words)
        store, cache = self.store(), Cache()
        for arguments, sentence in (((names(1), [0], cache.rows(0)[:, :3]), "6 addresses for each"), ((names(1), [1], cache.rows(0)), "numbered from 0 to 0"),
                                    ((names(2), [0], cache.rows(0)), "one for each block"),
                                    ((names(1), [0], cache.rows(0) * (np.arange(6) != 3).astype(np.uint64)), "an address is 0"),
                                    ((names(1), [0], cache.rows(0) + np.uint64(LAYERS * 2 * BLOCKS * SIZE - 100)), "reaches beyond|not")):
            with self.assertRaisesRegex(RuntimeError, sentence):
                store.wait(store.load_data(*arguments))
        with self.assertRaisesRegex(RuntimeError, "no C.. object"):
            store.cc_store()

    def test_too_many_at_once(self):
        import ucmclient.engine.places as places
        movers = places.Movers("test", threads=1, most=2)
        import threading
        go = threading.Event()
        futures = [movers.start(go.wait, 30) for _ in range(2)]
        with self.assertRaisesRegex(places.Full, "2 transfers wait already"):
            movers.start(go.wait)
        go.set()
        self.assertEqual([future.result(30) for future in futures], [True] * 2)
        movers.close()

    def test_the_factories_know_it(self):
        import ucmclient.engine.ucm
        ucmclient.engine.ucm.register()
        for factory in (sys.modules["ucm.store.factory"].UcmConnectorFactory, sys.modules["ucm.store.factory_v1"].UcmConnectorFactoryV1):
            path, name = factory.known["UcmdStore"]
            __import__(path)
            self.assertTrue(hasattr(sys.modules[path], name))


class V0Store(Ucm):
    def test_create_to_commit(self):
        """Pieces of blocks, by their offsets. A block that failed is dropped."""
        a, b, ids = Cache(), Cache(False), ["00" * 16, "11" * 16, "22" * 16]
        store = self.v0({"kv_block_size": LAYERS * 2 * SIZE, "io_size": SIZE, "role": "worker", "device": 0, "ucmd": self.own()})
        where = [(block, layer, kv) for block in range(2) for layer in range(LAYERS) for kv in range(2)]

        def moved(verb, cache):
            task = getattr(store, verb)([ids[i] for i, _, _ in where], [(2 * layer + kv) * SIZE for _, layer, kv in where],
                                        [int(cache.at[layer, kv, i]) for i, layer, kv in where], [SIZE] * len(where))
            self.assertGreater(task.task_id, 0)
            result = store.wait(task)
            self.assertEqual(store.check(task), (result, True))
            return result
        self.assertEqual(store.create(ids), [0] * 3)
        self.assertEqual(moved("dump_data", a), 0)
        store.commit(ids[:2])
        self.assertEqual(store.lookup(ids), [True, True, False])
        store.prefetch(ids)
        self.assertEqual(moved("fetch_data", b), 0)
        self.assertEqual((b.block(0), b.block(1)), (a.block(0), a.block(1)))
        store.commit(ids[:1], False)
        self.assertEqual((store.lookup(ids), moved("fetch_data", b)), ([False, True, False], -1))

    def test_what_is_refused(self):
        with self.assertRaisesRegex(RuntimeError, "a block of whole fragments"):
            self.v0({"kv_block_size": 100, "io_size": 64, "ucmd": self.own()})
        store = self.v0({"kv_block_size": 128, "io_size": 64, "ucmd": self.own()})
        with self.assertRaisesRegex(RuntimeError, "whole fragments of io_size 64"):
            store.fetch_data(["00"], [32], [4096], [64])


if __name__ == "__main__":
    unittest.main(verbosity=2)
