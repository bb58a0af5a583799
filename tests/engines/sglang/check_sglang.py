#!/usr/bin/env python3
"""ucmclient.engine.sglang in SGLang's own code, on a CPU: `make check-sglang`. SGLang's storage
factory, its host pools of each layout, its plugin framework and its page hashes, with a real
daemon. Its file storage is what results are compared with."""

import os
import random
import sys
import tempfile
import unittest
from dataclasses import replace

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]

import torch  # noqa: E402
from daemon import Daemon  # noqa: E402
from sglang.srt.mem_cache import device_pool_info as info  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from ucmclient.engine.sglang import plugin  # noqa: E402

TOKENS, PAGES, LAYERS, HEADS, DIM = 4, 16, 3, 2, 8


def pool(layout="page_first", allocator="shm", dtype=torch.bfloat16, pages=PAGES):
    k, v = ([torch.zeros(8 * TOKENS, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)] for _ in "kv")
    at = [torch.tensor([one.data_ptr() for one in of], dtype=torch.uint64) for of in (k, v)]
    buffers = info.KVBuffers(layout=info.KVBufferLayout.NHD, k=tuple(k), v=tuple(v), k_data_ptrs=at[0], v_data_ptrs=at[1])
    made = MHATokenToKVPoolHost(
        info.MHABufferInfo(buffers=buffers, page_size=TOKENS, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=dtype, device=torch.device("cpu")),
        2.0, 0, TOKENS, layout, pin_memory=False, device="cpu", allocator_type=allocator, device_capacity_tokens=8 * TOKENS, start_layer=0,
        end_layer=LAYERS, host_token_capacity=pages * TOKENS)
    made.kv_buffer.copy_(torch.randn(made.kv_buffer.shape))
    return made


def places(*pages):
    return torch.tensor([page * TOKENS + i for page in pages for i in range(TOKENS)])


def bytes_of(pool, page):
    return pool.get_data_page(page * TOKENS).view(torch.uint8).tolist()


class Key(list):
    """Tokens with what else SGLang's RadixKey has."""

    extra_key = cache_salt = None


def hashes(tokens, **more):
    key = Key(tokens)
    key.__dict__.update(more)
    return get_storage_hash_str(key, None, page_size=TOKENS)


class Storages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        plugin.register()
        HookRegistry.apply_hooks()
        cls.daemon = Daemon(nvme=False, **{"arena.size": "64MiB"})
        cls.addClassCleanup(cls.daemon.stop)

    def storage(self, pool, ucm=(), **more):
        extra = {"backend_name": "ucmd", "module_path": "ucmclient.engine.sglang.backend", "class_name": "UcmStorage", "interface_v1": 1,
                 "allocator": "shm", "ucm": {"socket": self.daemon.socket, "revision": "1", **dict(ucm)}}
        config = HiCacheStorageConfig(**{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
                                         "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
                                         "model_name": self.id(), "extra_config": extra, **more})
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        self.addCleanup(storage.close)
        storage.register_mem_pool_host(pool)
        return storage

    def test_each_layout_both_allocators(self):
        names = hashes(range(8 * TOKENS))
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
            for there, here in (("shm", "shm"), ("shm", "default"), ("default", "shm")):
                with self.subTest(layout, there=there, here=here):
                    a, b, model = pool(layout, there), pool(layout, here), f"{layout} {there} {here}"
                    one, two = self.storage(a, model_name=model), self.storage(b, model_name=model)
                    for storage, allocator in ((one, there), (two, here)):
                        self.assertEqual(storage._stores["kv"][0].direct, allocator == "shm", "the daemon copies by itself")
                    self.assertEqual(one.batch_set_v1(names[:6], places(*range(4, 10))), [True] * 6)
                    self.assertEqual(two.batch_exists(names), 6)
                    self.assertEqual(two.batch_get_v1(names[3:8], places(0, 1, 2, 3, 4)), [True] * 3 + [False] * 2)
                    self.assertEqual([bytes_of(b, page) for page in range(3)], [bytes_of(a, page) for page in (7, 8, 9)])

    def test_adapters_and_salts_do_not_meet(self):
        tokens, storage = range(2 * TOKENS), self.storage(pool())
        storage.batch_set_v1(hashes(tokens), places(0, 1))
        self.assertEqual(storage.batch_exists(hashes(tokens)), 2)
        for more in ({"extra_key": "lora"}, {"cache_salt": "salt"}, {"extra_key": "sa", "cache_salt": "lt"}):
            self.assertEqual(storage.batch_exists(hashes(tokens, **more)), 0, more)

    def test_pools_of_bytes_name_their_type(self):
        with self.assertRaisesRegex(ValueError, "of which type they are"):
            self.storage(self.of_bytes())
        self.storage(self.of_bytes(), ucm={"dtype": "fp8_e4m3"})

    @staticmethod
    def of_bytes():
        made = pool()
        made.dtype = torch.uint8
        made.head_dim *= 2  # as many bytes as before
        return made

    def test_several_pools_as_the_file_storage(self):
        """SGLang's own storage on files, after the same pages were stored: each question has the same answer."""
        draw, names = random.Random(7), hashes(range(10 * TOKENS))
        with tempfile.TemporaryDirectory() as directory:
            for round_ in range(12):
                pools = {name: pool() for name in (PoolName.KV, PoolName.MAMBA, PoolName.INDEXER)}
                model = f"{self.id()} {round_}"
                ours = self.storage(pools[PoolName.KV], model_name=model)
                files = HiCacheFile(replace(ours._config, extra_config={}), file_path=os.path.join(directory, str(round_)))
                for storage in (ours, files):
                    for name, one in pools.items():
                        storage.register_mem_host_pool_v2(one, name)
                for name in pools:
                    some = sorted(draw.sample(range(10), draw.choice((10, 9, 7, 4)))) if name != PoolName.KV else range(draw.randrange(11))
                    transfer = PoolTransfer(name=name, keys=[names[i] for i in some], host_indices=places(*some))
                    for storage in (ours, files):
                        self.assertEqual(storage.batch_set_v2([transfer]), {name: [True] * len(transfer.keys)})
                for _ in range(12):
                    transfers = [PoolTransfer(name=name, hit_policy=draw.choice((PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)),
                                              keys=draw.choice((None, ["x"], ["x"] * 3)))
                                 for name in draw.sample([PoolName.MAMBA, PoolName.INDEXER], draw.randrange(3))]
                    asked = names[: draw.randrange(1, 11)]
                    self.assertEqual(ours.batch_exists_v2(asked, transfers), files.batch_exists_v2(asked, transfers))
                into = {name: pool() for name in pools}
                for name, one in into.items():
                    ours.register_mem_host_pool_v2(one, name) if name != PoolName.KV else ours.register_mem_pool_host(one)
                for name, one in into.items():
                    got = ours.batch_get_v2([PoolTransfer(name=name, keys=names, host_indices=places(*range(10)))])[name]
                    self.assertEqual([bytes_of(one, i) for i in range(10) if got[i]], [bytes_of(pools[name], i) for i in range(10) if got[i]])
                    self.assertEqual(got, [files.exists(files._log_key(name, key)) for key in names])

    def test_batches_of_many(self):
        """Like SGLang's test of its Mooncake storage: sets, gets, and sets again, of which half are
        there."""
        one = pool(pages=64)
        storage, names = self.storage(one), hashes(range(32 * TOKENS))
        right = [bytes_of(one, page) for page in range(32)]
        self.assertEqual(storage.batch_set_v1(names[:16], places(*range(16))), [True] * 16)
        self.assertEqual(storage.batch_set_v1(names, places(*range(32))), [True] * 32)
        self.assertEqual(storage.batch_exists(names), 32)
        self.assertEqual(storage.batch_get_v1(names, places(*range(32, 64))), [True] * 32)
        self.assertEqual([bytes_of(one, page) for page in range(32, 64)], right)
        self.assertTrue(storage.clear())
        self.assertEqual((storage.batch_exists(names), storage.batch_get_v1(names[:2], places(0, 1))), (0, [False] * 2))


if __name__ == "__main__":
    unittest.main(verbosity=2)
