#!/usr/bin/python3
"""ucmclient.engine.pages against a real daemon: pages that the daemon copies by itself, and pages
that go through this process. And SGLang's backend over them, with SGLang's classes played
(check_sglang.py has the real ones)."""

import contextlib
import ctypes
import enum
import os
import shutil
import sys
import tempfile
import threading
import time
import types
import unittest
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import client_paths  # noqa: F401  sets the paths of the others
from daemon import Daemon, until
from ucmclient.memory import SharedMemory
from ucmclient.engine.pages import Fragment, PageStore, key_of, settings_of
from ucmclient.engine.vllm.identity import EngineIdentity
from ucmclient.engine.weights import Weights

PAGES, SIZES = 12, (96, 32)


def module(name, **members):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(members)


class Pool:
    """As SGLang's host pools: K of all pages, then V of all pages; an index counts tokens, and a page has 4."""

    page_size, page_num, dtype, layout, head_num, head_dim = 4, PAGES, "torch.bfloat16", "page_first", 2, 8

    def __init__(self, shared=True, pages=PAGES):
        self.page_num, size = pages, pages * sum(SIZES)
        self.memory = SharedMemory(size) if shared else ctypes.create_string_buffer(size)
        self.address = self.memory.address if shared else ctypes.addressof(self.memory)
        self.bytes = (ctypes.c_char * size).from_address(self.address)
        for page in range(pages):
            self.set(page, os.urandom(sum(SIZES)))

    def at(self, page):
        return self.address + page * SIZES[0], self.address + self.page_num * SIZES[0] + page * SIZES[1]

    def fragments(self):
        return [Fragment(at, size, size) for at, size in zip(self.at(0), SIZES)]

    def get(self, page):
        return b"".join(ctypes.string_at(at, size) for at, size in zip(self.at(page), SIZES))

    def set(self, page, data):
        ctypes.memmove(self.at(page)[0], data[:SIZES[0]], SIZES[0])
        ctypes.memmove(self.at(page)[1], data[SIZES[0]:], SIZES[1])

    def get_page_buffer_meta(self, indices):
        pages = [i // self.page_size for i in indices.tolist()[::self.page_size]]
        return [at for page in pages for at in self.at(page)], list(SIZES) * len(pages)


class Ranks:
    """The ranks of one engine, each a thread. They exchange values as an engine's communication
    library would."""

    def __init__(self, n):
        self.said, self.met, self.own = [None] * n, threading.Barrier(n), threading.local()

    def rank(self):
        return self.own.rank

    def gather(self, mine):
        self.said[self.rank()] = mine
        self.met.wait(60)
        said = list(self.said)
        self.met.wait(60)
        return said

    def run(self, what):
        """Calls it on each rank. Returns what each call returned."""
        def in_thread(rank):
            self.own.rank = rank
            return what(rank)
        with ThreadPoolExecutor(len(self.said)) as threads:
            return list(threads.map(in_thread, range(len(self.said))))

    @contextlib.contextmanager
    def in_doubt(self, doubtful, directory="files"):
        """These ranks don't know which weights they have read."""
        def look(name, revision=None):
            return Weights(directory, "they changed" if self.rank() in doubtful else "")
        with mock.patch("ucmclient.engine.pages.weights_at", look):
            yield self


class Indices(list):
    def tolist(self):
        return list(self)


def places(*pages):
    return Indices(4 * page + i for page in pages for i in range(4))


class Case(unittest.TestCase):
    def setUp(self):
        self.daemon = Daemon(nvme=False)
        self.addCleanup(self.daemon.stop)

    def settings(self, **more):
        return settings_of({"socket": self.daemon.socket, "retry_interval": 0.05, "connect_timeout": 5.0, **more}, "here")

    def stats(self):
        return self.daemon.metrics()

    eventually = staticmethod(until)


class Pages(Case):
    def store(self, pool, salt=b"", **more):
        identity = EngineIdentity("m", "bf16", "pages/1", 4, sum(SIZES), (1,), salt=salt)
        store = PageStore(self.settings(**more), identity, pool.fragments(), pool.page_num, "test")
        self.addCleanup(store.close)
        return store

    def test_both_ways(self):
        """An engine loads what another one saved, whichever way their pages go."""
        for there in (True, False):
            for here in (True, False):
                a, b = Pool(there), Pool(here)
                names = [key_of(f"{there} {here} {i}") for i in range(PAGES)]
                one, two = self.store(a), self.store(b)
                self.assertEqual((one.direct, two.direct), (there, here))
                self.assertEqual(one.save(names[:8], range(2, 10)), [True] * 8)
                self.assertEqual((two.prefix(names), two.each(names)), (8, [True] * 8 + [False] * 4))
                self.assertEqual(two.load(names[6:10], [5, 0, 1, 2]), [True, True, False, False])
                self.assertEqual((b.get(5), b.get(0)), (a.get(8), a.get(9)))
                self.assertEqual(one.save(names[:2], [0, 0]), [True] * 2, "they are there already")
                two.load(names[:1], [3])
                self.assertEqual(b.get(3), a.get(2), "what is kept stays as it was first")
        self.assertEqual(self.store(Pool(), salt=b"other").prefix(names), 0)

    def test_more_than_goes_through_at_once(self):
        pool = Pool(False)
        with mock.patch("ucmclient.engine.pages._STAGING", 3 * sum(SIZES)):
            self.more_than_goes_through(pool, self.store(pool))

    def more_than_goes_through(self, pool, store):
        names, before = [key_of(str(i)) for i in range(PAGES)], [pool.get(i) for i in range(PAGES)]
        self.assertTrue(all(store.save(names, range(PAGES))))
        self.assertTrue(all(store.load(names, range(PAGES)[::-1])))
        self.assertEqual([pool.get(i) for i in range(PAGES)], before[::-1])

    def test_what_is_refused(self):
        pool = Pool()
        store = self.store(pool)
        for keys, pages in (([key_of("a")], []), ([key_of("a")], [PAGES]), ([key_of("a")], [-1])):
            with self.assertRaisesRegex(ValueError, f"a page for each is right, below {PAGES}"):
                store.load(keys, pages)
        with self.assertRaisesRegex(ValueError, "parts with one layer"):
            PageStore(self.settings(), EngineIdentity("m", "bf16", "pages/1", 4, 64, (1,)), pool.fragments(), PAGES, "test")
        for extra, word in (({"sockt": "x"}, "here has no setting 'sockt'"), ({"socket": 1}, "socket must be str"),
                            ({"lookup_timeout": -1}, "a number of seconds"), ({"required": 1}, "required must be bool")):
            with self.assertRaisesRegex(ValueError, word):
                settings_of(extra, "here")

    def test_only_one_way(self):
        pool = Pool()
        self.assertEqual(self.store(pool, store=False).save([key_of("a")], [0]), [False])
        self.assertEqual(self.store(pool).save([key_of("a")], [0]), [True])
        reads = self.store(pool, load=False)
        self.assertEqual((reads.prefix([key_of("a")]), reads.each([key_of("a")]), reads.load([key_of("a")], [1])), (0, [False], [False]))

    def test_dropped(self):
        store = self.store(Pool())
        store.save([key_of("a")], [0])
        self.assertTrue(store.drop())
        self.assertEqual(store.prefix([key_of("a")]), 0)

    def test_keys(self):
        self.assertEqual(key_of("ab" * 32), bytes.fromhex("ab" * 32))
        self.assertEqual(len({key_of(name) for name in ("ab" * 32, "AB" * 32, "ab" * 31, "zz" * 32, "")}), 5)


Transfer = namedtuple("Transfer", "name keys hit_policy host_indices", defaults=(None, None))


class SGLang(Case):
    @classmethod
    def setUpClass(cls):
        class Policy(enum.Enum):
            ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"

        class Name(str, enum.Enum):
            KV, MAMBA, INDEXER = "kv", "mamba", "indexer"
            __str__ = lambda self: self.value  # noqa: E731

        class Storage:
            def register_mem_pool_host(self, pool):
                self.mem_pool_host = pool

            def register_mem_host_pool_v2(self, pool, name):
                pass
        cls.Policy, cls.Name = Policy, Name
        cls.utils = types.ModuleType("utils")
        cls.utils.storage_namespace_seed = None
        module("sglang"), module("sglang.srt"), module("sglang.srt.mem_cache", utils=cls.utils)
        module("sglang.srt.mem_cache.hicache_storage", HiCacheStorage=Storage, PoolHitPolicy=Policy, PoolName=Name,
               PoolTransferResult=namedtuple("PoolTransferResult", "kv_hit_pages extra_pool_hit_pages restorable_prefix_pages"))
        cls.torch = sys.modules.get("torch")
        module("torch", arange=lambda a, b: Indices(range(a, b)), distributed=types.SimpleNamespace(
            all_gather_object=lambda out, mine, group: out.__setitem__(slice(None), group.gather(mine))))
        from ucmclient.engine.sglang.backend import Refused, UcmStorage
        cls.Refused, cls.UcmStorage = Refused, UcmStorage

    @classmethod
    def tearDownClass(cls):
        for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "torch") or name.startswith("ucmclient.engine.sglang")]:
            del sys.modules[name]
        if cls.torch is not None:
            sys.modules["torch"] = cls.torch

    def storage(self, pool, ucm=(), extra=(), **config):
        own = {"socket": self.daemon.socket, "connect_timeout": 5.0, "revision": "1", **dict(ucm)}
        config = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
                  "model_name": self.id(), "should_split_heads": False, **config,
                  "extra_config": {"interface_v1": 1, "ucm": {name: value for name, value in own.items() if value is not None}, **dict(extra)}}
        storage = self.UcmStorage(types.SimpleNamespace(**config), {})
        self.addCleanup(storage.close)
        if pool is not None:
            storage.register_mem_pool_host(pool)
        return storage

    def test_pages(self):
        pool, names = Pool(), [f"{i:064x}" for i in range(6)]
        one, other = self.storage(pool), Pool(False)
        self.assertEqual(one.batch_set_v1(names[:4], places(3, 4, 5, 6)), [True] * 4)
        two = self.storage(other)
        self.assertEqual((two.batch_exists(names), two.exists(names[3]), two.exists(names[4])), (4, True, False))
        self.assertEqual(two.batch_get_v1(names[2:5], places(0, 1, 2)), [True, True, False])
        self.assertEqual((other.get(0), other.get(1)), (pool.get(5), pool.get(6)))
        self.assertEqual(two.batch_get_v1(names[:2], places(0)), [False] * 2, "places are missing")
        self.assertTrue(two.clear())
        self.assertEqual(one.batch_exists(names), 0)

    def test_who_shares(self):
        names, pool = [f"{i:064x}" for i in range(2)], Pool()
        self.storage(pool, tp_rank=0, tp_size=2).batch_set_v1(names, places(0, 1))
        for differs in ({"tp_rank": 1, "tp_size": 2}, {"tp_rank": 0, "tp_size": 1}, {"tp_rank": 0, "tp_size": 2, "pp_rank": 1, "pp_size": 2},
                        {"tp_rank": 0, "tp_size": 2, "model_name": "other"}, {"tp_rank": 0, "tp_size": 2, "ucm": {"salt": "x"}}):
            self.assertEqual(self.storage(Pool(), **differs).batch_exists(names), 0, differs)
        self.assertEqual(self.storage(Pool(), tp_rank=0, tp_size=2).batch_exists(names), 2)
        self.storage(pool, tp_rank=0, tp_size=2, is_mla_model=True).batch_set_v1(names, places(0, 1))
        self.assertEqual(self.storage(Pool(), tp_rank=1, tp_size=2, is_mla_model=True).batch_exists(names), 2, "all ranks have the same latents")

    def test_the_name_that_is_served_does_not_name_weights(self):
        """--served-model-name may be the same for models that share only the shape of their KV."""
        names, directory = [f"{i:064x}" for i in range(2)], tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        self.addCleanup(sys.modules.pop, "sglang.srt.runtime_context", None)

        def of(pool=None, **told):
            told = {"model_path": directory, "revision": None, "dtype": "auto", "quantization": None, **told}
            module("sglang.srt.runtime_context", get_server_args=lambda: types.SimpleNamespace(**told))
            return self.storage(pool or Pool(), ucm={"revision": None})
        weights = os.path.join(directory, "model.safetensors")
        with open(weights, "w", encoding="utf-8") as file:
            file.write("as they are read")
        self.enterContext(mock.patch("ucmclient.engine.weights.process_began", return_value=time.time() + 3600))
        of().batch_set_v1(names, places(0, 1))
        self.assertEqual(of().batch_exists(names), 2)
        for differs in ({"model_path": "another/model"}, {"revision": "2"}, {"dtype": "float16"}, {"quantization": "fp8"}):
            self.assertEqual(of(**differs).batch_exists(names), 0, differs)
        drafting = {"speculative_draft_model_path": weights}
        of(**drafting).batch_set_v1(names, places(0, 1))
        with open(weights, "w", encoding="utf-8") as file:
            file.write("others now")
        self.assertEqual((of().batch_exists(names), of(**drafting).batch_exists(names)), (0, 0))

    def test_weights_that_may_be_others_are_shared_with_nobody(self):
        """Files that changed while this process ran, names that nobody knows, and an engine that
        does not say what it serves."""
        names, directory = [f"{i:064x}" for i in range(2)], tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        self.addCleanup(sys.modules.pop, "sglang.srt.runtime_context", None)
        with open(os.path.join(directory, "model.safetensors"), "w", encoding="utf-8") as file:
            file.write("written while it was read")
        for path in (directory, "a/name", None):
            say = mock.Mock(side_effect=ValueError("not set yet")) if path is None else lambda: types.SimpleNamespace(model_path=path)
            module("sglang.srt.runtime_context", get_server_args=say)
            with self.assertLogs("ucmclient", "WARNING"):
                self.storage(Pool(), ucm={"revision": None}).batch_set_v1(names, places(0, 1))
            self.assertEqual(self.storage(Pool(), ucm={"revision": None}).batch_exists(names), 0, path)

    def test_ranks_in_doubt_share_with_each_other(self):
        """All ranks have the same latents, so only rank 0 stores them, even if another rank alone
        is in doubt."""
        names = [f"{i:064x}" for i in range(2)]
        self.addCleanup(sys.modules.pop, "sglang.srt.runtime_context", None)

        def engine(doubtful):
            ranks = Ranks(2)
            module("sglang.srt.runtime_context", get_server_args=lambda: types.SimpleNamespace(model_path="here"),
                   get_parallel=lambda: types.SimpleNamespace(attn_tp_group=types.SimpleNamespace(world_size=2, cpu_group=ranks)))
            with ranks.in_doubt(doubtful):
                return ranks.run(lambda rank: self.storage(Pool(), ucm={"revision": None}, tp_rank=rank, tp_size=2, is_mla_model=True))
        for doubtful in ((0, 1), (1,), ()):
            first, second = engine(doubtful)
            found = second.batch_exists(names)
            first.batch_set_v1(names, places(0, 1))
            self.assertEqual([found, second.batch_exists(names), engine(doubtful)[1].batch_exists(names)], [0, 2, 0 if doubtful else 2], doubtful)

    def test_several_pools(self):
        names, kv, state, index = [f"{i:064x}" for i in range(6)], Pool(), Pool(False), Pool()
        storage = self.storage(kv)
        for pool, name in ((kv, self.Name.KV), (state, self.Name.MAMBA), (index, self.Name.INDEXER)):
            storage.register_mem_host_pool_v2(pool, name)
        storage.batch_set_v1(names[:5], places(0, 1, 2, 3, 4))
        saved = storage.batch_set_v2([Transfer(self.Name.MAMBA, [names[1], names[3]], None, places(7, 8)),
                                      Transfer(self.Name.INDEXER, names[:5], None, places(0, 1, 2, 3, 4))])
        self.assertEqual(saved, {"mamba": [True] * 2, "indexer": [True] * 5})
        every, last = self.Policy.ALL_PAGES, self.Policy.TRAILING_PAGES
        for transfers, hit, hits, restorable in (
                ([], 5, {"kv": 5}, [1, 2, 3, 4, 5]), ([Transfer("indexer", None, every)], 5, {"kv": 5, "indexer": 5}, [1, 2, 3, 4, 5]),
                ([Transfer("mamba", ["x"], last)], 4, {"kv": 5, "mamba": 4}, [2, 4]),
                ([Transfer("mamba", None, every)], 0, {"kv": 5}, []),
                ([Transfer("indexer", None, every), Transfer("mamba", ["x"], last)], 4, {"kv": 5, "indexer": 5, "mamba": 4}, [2, 4])):
            self.assertEqual(tuple(storage.batch_exists_v2(names, transfers)), (hit, hits, restorable))
        got = storage.batch_get_v2([Transfer(self.Name.MAMBA, [names[3], names[4]], None, places(0, 1))])
        self.assertEqual((got, state.get(0)), ({"mamba": [True, False]}, state.get(8)))
        with self.assertRaisesRegex(self.Refused, "BLOCK_GROUPS are not supported"):
            storage.batch_exists_v2(names, [Transfer("indexer", None, self.Policy.BLOCK_GROUPS)])
        with self.assertRaisesRegex(self.Refused, "pool swa was never registered"):
            storage.batch_get_v2([Transfer("swa", names[:1], None, places(0))])

    def test_what_is_refused(self):
        for words, sentence in ((({"extra": {"interface_v1": 0}}), '"interface_v1": 1'), ({"should_split_heads": True}, "tp_lcm_size"),
                                ({"ucm": {"sokcet": "x"}}, "has no setting 'sokcet'")):
            with self.assertRaisesRegex(ValueError, sentence):
                self.storage(None, **words)
        with self.assertRaisesRegex(self.Refused, "moved by their places only"):
            self.storage(Pool()).batch_get(["x"], [None])
        del self.utils.storage_namespace_seed
        try:
            with self.assertRaisesRegex(self.Refused, "LoRA adapter and the salt"):
                self.storage(Pool())
        finally:
            self.utils.storage_namespace_seed = None
        bytes_, uneven, silent = Pool(), Pool(), Pool()
        bytes_.dtype = "torch.uint8"
        with self.assertRaisesRegex(self.Refused, "of which type they are"):
            self.storage(bytes_)
        self.storage(bytes_, ucm={"dtype": "fp8_e4m3"}).batch_set_v1(["0" * 64], places(0))
        self.assertEqual(self.storage(bytes_, ucm={"dtype": "fp8_e5m2"}).batch_exists(["0" * 64]), 0)
        uneven.at = lambda page: (uneven.address + page * page * 8, uneven.address)
        silent.get_page_buffer_meta = mock.Mock(side_effect=NotImplementedError("not this layout"))
        for pool, sentence in ((uneven, "equal distances"), (silent, "does not say where its pages lie .not this layout.")):
            with self.assertRaisesRegex(self.Refused, sentence):
                self.storage(pool)


if __name__ == "__main__":
    unittest.main(verbosity=2)
