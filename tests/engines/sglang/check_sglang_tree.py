#!/usr/bin/env python3
"""SGLang's radix tree, HiCache controller and its threads over ucmd, on a CPU: `make check-sglang`. One server computes a prompt and backs it up;
another one finds it in the storage, prefetches it and loads it back. By the fixtures of SGLang's own tests. Copies between its two pools, which
are kernels for GPUs, are torch's here, and nothing is registered with a driver."""

import json
import os
import signal
import sys
import types
import unittest
from unittest import mock

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
sys.modules.setdefault("datasets", types.SimpleNamespace(load_dataset=None))  # of SGLang's benchmarks

import torch  # noqa: E402
from daemon import Daemon  # noqa: E402
from sglang.srt.mem_cache.pool_host import base, common, mha  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures, mixins  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import CacheRequestHandle, UnifiedRadixCacheStorageFixtures, match_prefix  # noqa: E402
from ucmclient.engine.sglang import backend, plugin  # noqa: E402


def to_host(self, device_pool, host_indices, device_indices, io_backend):
    for host, device in zip(self.k_data_refs + self.v_data_refs, self.device_k_buffers + self.device_v_buffers):
        host[host_indices] = device[device_indices]


def to_device(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    for host, device in ((self.k_data_refs, self.device_k_buffers), (self.v_data_refs, self.device_v_buffers)):
        device[layer_id][device_indices] = host[layer_id][host_indices]


def without_a_gpu():
    fixtures.get_device = lambda *_: "cpu"
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = to_host
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = to_device
    torch.cpu.Stream.synchronize = lambda self: None
    for module in (common, mha, base):
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: None)


class Tree(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    cfg = CacheConfig(page_size=4, components=(ComponentType.FULL,), num_layers=4, full_attention_layer_ids=(0, 1, 2, 3))
    allocator = "shm"

    @classmethod
    def setUpClass(cls):
        without_a_gpu()
        plugin.register()
        HookRegistry.apply_hooks()

    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "64MiB"})
        self.addCleanup(self.daemon.stop)
        one = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        one.__enter__()
        self.addCleanup(one.__exit__, None, None, None)
        self.stores = []

    def _init_hicache(self, cache, *, storage_backend=None, storage_dir=None, prefetch_threshold=None, **more):
        """Where the fixtures ask for SGLang's files, storage_dir is the salt of a test."""
        extra = {"backend_name": "ucmd", "module_path": "ucmclient.engine.sglang.backend", "class_name": "UcmStorage", "interface_v1": 1,
                 "allocator": self.allocator, "prefetch_threshold": prefetch_threshold or 1,
                 "ucm": {"socket": self.daemon.socket, "revision": "1", "salt": storage_dir, "retry_interval": 0.05}}
        args = mixins.ServerArgs
        with mock.patch.object(mixins, "ServerArgs", lambda **words: args(**{**words, "hicache_storage_backend_extra_config": json.dumps(extra)})):
            super()._init_hicache(cache, storage_backend="dynamic", **more)
        storage = cache.cache_controller.storage_backend
        self.assertIsInstance(storage, backend.UcmStorage)
        self.addCleanup(storage.close)
        self.stores.append(storage._stores["kv"][0])

    def test_what_one_server_stored_another_one_loads(self):
        for self.allocator in ("shm", "default"):
            with self.subTest(self.allocator):
                prompt = self._make_seq(1, 6)
                right = self._l3_produce(self.allocator, prompt, marker=3)
                other, allocator, _ = self._l3_consumer(self.allocator)
                self.assertEqual([store.direct for store in self.stores[-2:]], [self.allocator == "shm"] * 2)
                self._consume_prefetch(other, prompt, CacheRequestHandle("r", 0))
                found = match_prefix(other, prompt)
                self.assertEqual(found.host_hit_length, len(prompt))
                device = self._load_back_node(other, found.last_host_node)
                for got, want in zip(self._snapshot_full_kv(allocator, device), right):
                    self.assertTrue(torch.equal(got, want))

    def test_a_daemon_that_is_killed(self):
        """Prompts are computed, because the tree finds nothing, and nothing hangs. With the next
        daemon, servers share again."""
        prompt = self._make_seq(1, 6)
        self._l3_produce("killed", prompt, marker=3)
        other, _, _ = self._l3_consumer("killed")
        self.daemon.process.send_signal(signal.SIGKILL)
        self.daemon.process.wait()
        self._consume_prefetch(other, prompt, CacheRequestHandle("r", 0))
        self.assertEqual(match_prefix(other, prompt).host_hit_length, 0)
        self.daemon.kept = True
        self.daemon = Daemon(nvme=False, directory=self.daemon.directory, **{"arena.size": "64MiB"})
        self.addCleanup(self.daemon.stop)
        self.daemon.until(lambda: all(store.link.ns is not None and store.link.region is not None for store in self.stores), "was not found")
        self._l3_produce("killed", prompt, marker=5)
        self._consume_prefetch(other, prompt, CacheRequestHandle("again", 0))
        self.assertEqual(match_prefix(other, prompt).host_hit_length, len(prompt))


if __name__ == "__main__":
    unittest.main(verbosity=2)
