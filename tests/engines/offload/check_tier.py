#!/usr/bin/env python3
"""ucmclient.engine.vllm.tier below vLLM's own tiers (vllm.v1.kv_offload), on a CPU and with a real
daemon. The half of vLLM's scheduler is real: its spec, factory and tiering manager. Copies of GPUs
to and from its memory are played, because vLLM lets no CPU be the GPU of its offloading connector.
"""

import os
import signal
import sys
import time
import unittest
import uuid

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]

from daemon import Daemon, halt, until  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig, OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig, OffloadingParallelConfig)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402
from ucmclient.engine.vllm.tier import key_of  # noqa: E402

BYTES, CHUNKS = 8192, 8


def keys(n, tag=0):
    return [make_offload_key(bytes([tag, i]) * 16, 0) for i in range(n)]


class Engine:
    """Drives the tiers as vLLM's scheduler does."""

    def __init__(self, socket, model="m", chunks=CHUNKS, **tier):
        groups = (OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"), group_id=0),)
        parallel = OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, False)
        extra = {"cpu_bytes_to_use": chunks * 2 * BYTES, "secondary_tiers": [{
            "type": "UcmTier", "module_path": "ucmclient.engine.vllm.tier", "socket": socket, "retry_interval": 0.05, "connect_timeout": 5.0, "revision": "1", **tier}]}
        self.spec = TieringOffloadingSpec(OffloadingConfig(
            groups=groups, worker_kv_bytes_per_block=BYTES, enable_kv_cache_events=False, extra_config=extra, engine_id=uuid.uuid4().hex,
            model=OffloadingModelConfig(model, "bfloat16"), cache=OffloadingCacheConfig(16, 1), parallel=parallel))
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext(set(), set()))

    def close(self):
        self.manager.shutdown()

    def chunk(self, number):
        return bytes(self.tier._primary_kv_view.cast("B")[number * 2 * BYTES : (number + 1) * 2 * BYTES])

    def memory(self):
        return [self.chunk(i) for i in range(len(self.tier._primary_kv_view))]

    def store(self, names, data):
        """A GPU's chunks go to vLLM's memory, and on from there. Returns when the tier is done."""
        context = ReqContext(uuid.uuid4().hex)
        self.manager.on_new_request(context)
        made = self.manager.prepare_store(names, context)
        for chunk, one in zip(made.store_spec.block_ids, data):
            self.tier._primary_kv_view.cast("B")[chunk * 2 * BYTES : (chunk + 1) * 2 * BYTES] = one
        self.manager.complete_store(names, context, True)
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self):
        until = time.monotonic() + 60
        while self.manager._jobs:
            assert time.monotonic() < until
            self.step()
            self.manager._maybe_process_finished_jobs()
            time.sleep(0.005)

    def look(self, names):
        """The result of a request's lookups and loads: for each key the bytes, or None."""
        context = ReqContext(uuid.uuid4().hex)
        self.manager.on_new_request(context)
        out, until = {}, time.monotonic() + 60
        while len(out) < len(names):
            assert time.monotonic() < until
            for name in names:
                if name not in out:
                    found = self.manager.lookup(name, context)
                    if found == LookupResult.HIT:
                        out[name] = self.chunk(self.manager.prepare_load([name], context).block_ids[0])
                        self.manager.complete_load([name], context)
                    elif found == LookupResult.MISS:
                        out[name] = None
            self.step()
            time.sleep(0.005)
        self.manager.on_request_finished(context)
        self.settle()
        return [out[name] for name in names]


class Tier(unittest.TestCase):
    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "64MiB"})
        self.addCleanup(self.daemon.stop)
        self.data = [os.urandom(2 * BYTES) for _ in range(CHUNKS)]

    def engine(self, **more):
        made = Engine(self.daemon.socket, **more)
        self.addCleanup(made.close)
        return made

    def test_chunks_outlive_the_engine(self):
        names = keys(5)
        one = Engine(self.daemon.socket)
        self.assertEqual(one.look(names), [None] * 5)
        one.store(names[:4], self.data[:4])
        one.close()
        self.assertEqual(self.engine().look(names), [*self.data[:4], None])
        for more in ({"model": "other"}, {"salt": "x"}):
            self.assertEqual(self.engine(**more).look(names[:1]), [None], more)

    def test_what_vllm_evicts_comes_back(self):
        one = self.engine(chunks=3)
        for i in range(3):
            one.store(keys(2, i), self.data[2 * i : 2 * i + 2])
        for i in (0, 2, 1):
            self.assertEqual(one.look(keys(2, i)), self.data[2 * i : 2 * i + 2])

    def test_a_daemon_that_is_killed(self):
        names, one = keys(3), self.engine()
        one.store(names, self.data[:3])
        self.daemon.kill()
        self.daemon.kept = True
        two = self.engine()
        self.assertEqual(two.look(names), [None] * 3)
        self.assertEqual(one.look(names), self.data[:3], "they are in vLLM's own memory")
        self.daemon = Daemon(nvme=False, directory=self.daemon.directory, **{"arena.size": "64MiB"})
        self.addCleanup(self.daemon.stop)
        until(lambda: two.tier._store.link.ns is not None and one.tier._store.link.ns is not None, "the connections")
        again = keys(2, 9)
        one.store(again, self.data[5:7])
        self.assertEqual(two.look(again), self.data[5:7])

    def test_a_daemon_that_hangs(self):
        """A late load is a miss, and nothing is written after it."""
        names, one, two = keys(3), self.engine(), self.engine(lookup_timeout=0.5, transfer_timeout=0.3)
        one.store(names, self.data[:3])
        real = two.tier._store.load

        def stopped(*arguments):
            halt(self.daemon.process.pid)
            return real(*arguments)
        two.tier._store.load = stopped
        before = two.memory()
        try:
            self.assertEqual(two.look(names), [None] * 3)
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        two.tier._store.load = real
        until(lambda: all(two.tier._store.each([key_of(name) for name in names])), "their return")
        self.assertEqual(two.memory(), before)
        self.assertEqual(two.look(names), self.data[:3])

    def test_reset(self):
        """vLLM waits for jobs under way and forgets its memory; the daemon keeps what it has."""
        names, one = keys(3), self.engine()
        one.store(names, self.data[:3])
        one.tier.drain_jobs()
        one.manager.reset_cache()
        if hasattr(one.manager, "on_reset_flushed"):  # from 0.33 on vLLM brings nothing in until its workers' copies have ended, and says when
            self.assertEqual(one.look(names), [None] * 3)
            one.manager.on_reset_flushed()
        self.assertEqual(one.look(names), self.data[:3])


if __name__ == "__main__":
    unittest.main(verbosity=2)
