#!/usr/bin/python3
"""ucmclient.engine.lmcache against a real daemon, with LMCache's classes played: `make check-lmcache` has the real ones."""

import ctypes
import os
import select
import sys
import types
import unittest
from collections import namedtuple

import client_paths  # noqa: F401  sets the paths of the others
from test_page_store import Case, module

Key = namedtuple("Key", "chunk_hash model_name kv_rank object_group_id cache_salt", defaults=("m", 0, 0, ""))


class Bitmap:
    def __init__(self, n):
        self.bits = [0] * n

    def set(self, i):
        self.bits[i] = 1


class Result(int):
    def __new__(cls, good, moved):
        return super().__new__(cls, moved if good else -1)


class Notifier:
    def __init__(self):
        self.fileno_ = os.pipe()

    def fileno(self):
        return self.fileno_[0]

    def notify(self):
        os.write(self.fileno_[1], b"x")

    def close(self):
        for fd in self.fileno_:
            os.close(fd)
        self.fileno_ = ()


class Interface:
    def __init__(self, max_capacity_bytes=0):
        self.stored, self.accessed, self.deleted = [], [], []

    def _notify_keys_stored(self, keys, sizes):
        self.stored += zip(keys, sizes)

    def _notify_keys_accessed(self, keys):
        self.accessed += keys

    def _notify_keys_deleted(self, keys, sizes):
        self.deleted += zip(keys, sizes)


class Object:
    def __init__(self, size=256):
        self.bytes = ctypes.create_string_buffer(os.urandom(size), size)
        self.data_ptr = ctypes.addressof(self.bytes)
        self.get_size = lambda: size


def play_lmcache():
    for name in ("lmcache", "lmcache.v1", "lmcache.v1.distributed", "lmcache.v1.distributed.l2_adapters"):
        module(name)
    module("lmcache.lmcache_native", Bitmap=Bitmap)
    module("lmcache.v1.distributed.internal_api", L2StoreResult=Result)
    module("lmcache.v1.distributed.l2_adapters.base", L2AdapterInterface=Interface)
    module("lmcache.v1.platform", create_event_notifier=Notifier)


def forget_lmcache():
    for name in [name for name in sys.modules if name.split(".")[0] == "lmcache" or name.startswith("ucmclient.engine.lmcache")]:
        del sys.modules[name]


def keys(n, **more):
    return [Key(bytes([i]) * 8, **more) for i in range(n)]


class LMCache(Case):
    @classmethod
    def setUpClass(cls):
        play_lmcache()

    @classmethod
    def tearDownClass(cls):
        forget_lmcache()

    def adapter(self, **more):
        from ucmclient.engine.lmcache.adapter import UcmL2Adapter
        made = UcmL2Adapter({"socket": self.daemon.socket, "retry_interval": 0.05, "connect_timeout": 5.0, **more})
        self.addCleanup(made.close)
        return made

    def done(self, fd, ask):
        while True:
            self.assertTrue(select.select([fd], [], [], 60)[0], "no event came")
            os.read(fd, 1)
            result = ask()
            if result is not None:
                return result

    def store(self, adapter, names, objects):
        number = adapter.submit_store_task(names, objects)
        return self.done(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks().get(number))

    def look(self, adapter, names, layouts=()):
        number = adapter.submit_lookup_and_lock_task(names, dict(layouts))
        return self.done(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(number)).bits

    def load(self, adapter, names, objects):
        number = adapter.submit_load_task(names, objects)
        return self.done(adapter.get_load_event_fd(), lambda: adapter.query_load_result(number)).bits

    @staticmethod
    def layout(size):
        return {0: types.SimpleNamespace(shapes=[(2, size // 4)], dtypes=[types.SimpleNamespace(itemsize=2)])}

    def test_store_look_load(self):
        one, two, names, objects = self.adapter(), self.adapter(), keys(5), [Object() for _ in range(5)]
        self.assertEqual(len({one.get_store_event_fd(), one.get_lookup_and_lock_event_fd(), one.get_load_event_fd()}), 3)
        self.assertEqual(self.look(one, names, self.layout(256)), [0] * 5)
        self.assertEqual(self.store(one, names[:3], objects[:3]), 768)
        self.assertEqual(self.store(one, names[2:4], objects[2:4]), 256, "one of them was there already")
        self.assertEqual(one.stored, [(name, 256) for name in names[:4]])
        self.assertEqual(self.look(two, names), [0] * 5, "nobody has said of what size they are")
        self.assertEqual(self.look(two, names, self.layout(256)), [1, 1, 1, 1, 0])
        self.assertEqual(two.accessed, names[:4])
        into = [Object() for _ in range(5)]
        self.assertEqual(self.load(two, names, into), [1, 1, 1, 1, 0])
        self.assertEqual([a.bytes.raw for a in into[:4]], [a.bytes.raw for a in objects[:4]])
        self.assertEqual(two.report_status()["is_healthy"], True)

    def test_locks_are_leases(self):
        adapter, names = self.adapter(), keys(3)
        self.store(adapter, names, [Object() for _ in names])
        for _ in range(2):
            self.assertEqual(self.look(adapter, names), [1, 1, 1])
        self.assertEqual(self.stats()["leases"], 2)
        adapter.submit_unlock(names[:2])
        adapter.submit_unlock(names)
        adapter.submit_unlock(names[2:])
        self.eventually(lambda: self.stats()["leases"] == 0)
        self.assertEqual(adapter._locks, {})
        adapter.submit_unlock(names)  # nothing is locked

    def test_sizes(self):
        """Objects of one kind have several sizes, and one is requested with a wrong size."""
        adapter, names = self.adapter(), keys(4)
        self.store(adapter, names, [Object(size) for size in (64, 128, 64, 192)])
        self.assertEqual(self.look(adapter, names), [1] * 4)
        self.assertEqual(self.load(adapter, names, [Object(64) for _ in names]), [1, 0, 1, 0])

    def test_delete(self):
        adapter, names = self.adapter(), keys(2)
        self.store(adapter, names, [Object(64), Object(128)])
        adapter.delete([*names, *keys(3)[2:]])
        self.assertEqual(sorted(adapter.deleted), sorted([(names[0], 64), (names[1], 128)]))
        self.assertEqual(self.look(adapter, names), [0, 0])

    def test_who_shares(self):
        adapter, (name,) = self.adapter(), keys(1)
        self.store(adapter, [name], [Object()])
        for more in ({"model_name": "x"}, {"kv_rank": 1}, {"object_group_id": 1}, {"cache_salt": "x"}):
            self.assertEqual(self.look(adapter, [name._replace(**more)], self.layout(256)), [0], more)
        self.assertEqual(self.look(self.adapter(salt="x"), [name], self.layout(256)), [0])

    def test_what_is_refused(self):
        with self.assertRaisesRegex(ValueError, "adapter_params has no setting 'sokcet'"):
            self.adapter(sokcet="x")
        adapter = self.adapter()
        huge = Object()
        huge.get_size = lambda: 1 << 30
        with self.assertLogs("ucmclient.engine.lmcache", "ERROR") as log:
            self.assertEqual(self.store(adapter, keys(1), [huge]), -1)
        self.assertIn("a smaller --chunk-size", log.output[0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
