#!/usr/bin/env python3
"""ucmclient.engine.lmcache in LMCache's own code, on a CPU: `make check-lmcache`. LMCache's factory
of adapters, its check of an L2 adapter, and its storage manager with controllers that store, look
up, lock and load. With a real daemon."""

import os
import signal
import sys
import unittest
from unittest import mock

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]

import torch  # noqa: E402
from daemon import Daemon, halt, until  # noqa: E402
from lmcache.v1.check import check_mode_test_l2_adapter as own_check  # noqa: E402
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec  # noqa: E402
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig  # noqa: E402
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig  # noqa: E402
from lmcache.v1.distributed.storage_manager import StorageManager  # noqa: E402

LAYOUT = MemoryLayoutDesc([torch.Size([2, 3, 16, 8])], [torch.bfloat16])


def keys(n, model="m"):
    return [ObjectKey(chunk_hash=bytes([i]) * 32, model_name=model, kv_rank=0) for i in range(n)]


class LMCache(unittest.TestCase):
    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "64MiB"})
        self.addCleanup(self.daemon.stop)

    def plugin(self, **more):
        params = {"socket": self.daemon.socket, "retry_interval": 0.05, "connect_timeout": 5.0, **more}
        return PluginL2AdapterConfig.from_dict({"type": "plugin", "module_path": "ucmclient.engine.lmcache.adapter", "class_name": "UcmL2Adapter",
                                                "adapter_params": params})

    def test_its_own_check_of_an_adapter(self):
        """Absent keys, a store, a lookup, a load with a comparison: as `lmcache` checks an adapter by hand."""
        tests, size = 5, 4096
        buffer = torch.empty(2 * tests * size)
        adapter = create_l2_adapter(self.plugin(), l1_memory_desc=own_check._create_l1_memory_desc(buffer))
        self.addCleanup(adapter.close)
        with mock.patch.object(own_check, "print_performance_results") as results:
            own_check._test_single_adapter(adapter, "m", tests, l1_buffer=buffer, obj_size=size)
        self.assertEqual([row[3] for row in results.call_args[0][0]], [tests] * 4)

    def manager(self, **more):
        config = StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=L1MemoryManagerConfig(1 << 22, use_lazy=False, shm_name="")),
            eviction_config=EvictionConfig("LRU"), l2_adapter_config=L2AdaptersConfig([self.plugin(**more)]))
        made = StorageManager(config)
        self.addCleanup(made.close)
        return made

    until = staticmethod(until)

    def write(self, manager, names, fill):
        for name, memory in manager.reserve_write(names, LAYOUT).items():
            memory.tensor.fill_(fill + names.index(name))
        manager.finish_write(names)

    def forget(self, manager, names):
        """LMCache keeps what is locked, as after a store, until its controller has seen the store's end."""
        self.until(lambda: manager.delete_l1_keys(names)[1] == 0)

    def prefetch(self, manager, names):
        handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(names, 0, LAYOUT)]))
        self.assertTrue(manager.wait_prefetch_status(handle, 60))
        return manager.query_prefetch_status(handle)

    def read(self, manager, names):
        with manager.read_prefetched_results(names) as objects:
            out = [one.tensor.float().mean().item() for one in objects]
        manager.finish_read_prefetched(names)
        return out

    def adapter_of(self, manager):
        return manager.l2_adapters()[0][1]

    def stored(self, manager):
        return self.adapter_of(manager).get_usage().total_bytes_used

    SIZE = 2 * 3 * 16 * 8 * 2

    def test_what_one_server_stored_another_one_finds(self):
        one, names = self.manager(), keys(6)
        self.write(one, names[:4], 10)
        self.until(lambda: self.stored(one) == 4 * self.SIZE)
        two = self.manager()
        result = self.prefetch(two, names)
        self.assertEqual((result.hit_cells[0].popcount(), result.l2_hit_cells[0].popcount()), (4, 4))
        self.assertEqual(self.read(two, names[:4]), [10, 11, 12, 13])
        self.until(lambda: not self.adapter_of(two)._locks)
        self.forget(one, names)
        self.assertEqual(self.prefetch(one, names[:4]).l2_hit_cells[0].popcount(), 4)
        self.assertEqual(self.read(one, names[:4]), [10, 11, 12, 13])

    def test_a_daemon_that_is_killed(self):
        """LMCache goes on, and finds the right bytes before and after the restart."""
        manager, names = self.manager(), keys(3)
        self.write(manager, names, 1)
        self.until(lambda: self.stored(manager) == 3 * self.SIZE)
        self.daemon.kill()
        self.daemon.kept = True
        self.forget(manager, names)
        self.assertEqual(self.prefetch(manager, names).hit_cells[0].popcount(), 0)
        self.daemon = Daemon(nvme=False, directory=self.daemon.directory, **{"arena.size": "64MiB"})
        self.addCleanup(self.daemon.stop)
        self.until(lambda: self.adapter_of(manager).report_status()["is_healthy"])
        again = keys(3, "again")
        self.write(manager, again, 5)
        self.until(lambda: self.stored(manager) == 6 * self.SIZE)
        self.forget(manager, again)
        self.assertEqual(self.prefetch(manager, again).l2_hit_cells[0].popcount(), 3)
        self.assertEqual(self.read(manager, again), [5, 6, 7])

    def test_a_daemon_that_hangs(self):
        manager, names = self.manager(lookup_timeout=0.2, transfer_timeout=0.3), keys(3)
        self.write(manager, names, 1)
        self.until(lambda: self.stored(manager) == 3 * self.SIZE)
        self.forget(manager, names)
        halt(self.daemon.process.pid)
        try:
            self.assertEqual(self.prefetch(manager, names).hit_cells[0].popcount(), 0)
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        self.until(lambda: self.prefetch(manager, names).hit_cells[0].popcount() == 3)
        self.assertEqual(self.read(manager, names), [1, 2, 3])


if __name__ == "__main__":
    unittest.main(verbosity=2)
