#!/usr/bin/python3
"""ucmclient.engine.vllm.tier against a real daemon, with vLLM's classes played: tests/engines/offload/check_tier.py has the real ones."""

import dataclasses
import enum
import os
import sys
import tempfile
import threading
import time
import types
import unittest
from collections import namedtuple
from unittest import mock

import client_paths  # noqa: F401  sets the paths of the others
from test_page_store import Case, module

SIZE, CHUNKS = 512, 6
Job = namedtuple("Job", "job_id keys chunk_ids")
Result = namedtuple("Result", "job_id success successful_keys transfer_time transfer_bytes")
Group = dataclasses.make_dataclass("Group", ["tokens_per_block", "layer_names", "group_id"], frozen=True)
Cache = dataclasses.make_dataclass("Cache", ["tokens_per_hash", "blocks_per_chunk"], frozen=True)
Parallel = dataclasses.make_dataclass("Parallel", ["rank", "world_size", "tp_size", "is_parallelism_agnostic", "data_parallel_index"], frozen=True)


class Found(enum.Enum):
    MISS, HIT, RETRY = range(3)


class Tier:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector):
        self.block_size_bytes = primary_kv_view.strides[0]


class Lookups:
    """Asks at once what vLLM's class asks in a thread."""

    def __init__(self, tier_type):
        self.known = {}

    def lookup(self, key, context):
        if key not in self.known:
            (self.known[key],) = self.batch_lookup([key], context)
        return self.known[key]

    def mark_miss(self, keys):
        self.known.update(dict.fromkeys(keys, False))

    def cleanup(self, request):
        self.known.clear()

    def flush(self):
        pass

    shutdown = flush


def play_tiers():
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering"):
        module(name)
    module("vllm.v1.kv_offload.base", LookupResult=Found, Medium=types.SimpleNamespace(STORAGE="storage"), RequestOffloadingContext=object)
    module("vllm.v1.kv_offload.tiering.async_lookup", AsyncLookupManager=Lookups)
    module("vllm.v1.kv_offload.tiering.base", JobResult=Result, SecondaryTierManager=Tier)


def forget_tiers():
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name == "ucmclient.engine.vllm.tier"]:
        del sys.modules[name]


def spec(**more):
    config = {"groups": (Group(16, ("a",), 0),), "cache": Cache(16, 1), "parallel": Parallel(0, 1, 1, False, 0), "replicated_layout": False,
              "canonical_layout": False, "kv_cache_layout": None, "worker_kv_bytes_per_block": SIZE,
              "model": types.SimpleNamespace(name="m", dtype="bf16"), **more}
    return types.SimpleNamespace(config=types.SimpleNamespace(**config))


def keys(n):
    return [bytes([i]) * 36 for i in range(n)]


class Tiers(Case):
    @classmethod
    def setUpClass(cls):
        play_tiers()

    @classmethod
    def tearDownClass(cls):
        forget_tiers()

    def tier(self, spec_=None, **more):
        from ucmclient.engine.vllm.tier import UcmTier
        data = bytearray(os.urandom(SIZE * CHUNKS))
        made = UcmTier(spec_ or spec(), memoryview(data).cast("B", (CHUNKS, SIZE)), "UcmTier", socket=self.daemon.socket, retry_interval=0.05,
                       connect_timeout=5.0, locality=None, **{name: value for name, value in {"revision": "1", **more}.items() if value is not None})
        made.data = data
        self.addCleanup(made.shutdown)
        return made

    def chunk(self, tier, i):
        return bytes(tier.data[i * SIZE : (i + 1) * SIZE])

    def run_job(self, tier, verb, *job):
        getattr(tier, f"submit_{verb}")(Job(*job))
        tier.drain_jobs()
        (result,) = tier.get_finished_jobs()
        self.assertEqual(result.job_id, job[0])
        return result

    def test_store_look_load(self):
        one, two, names = self.tier(), self.tier(), keys(4)
        done = self.run_job(one, "store", 1, names[:3], [5, 0, 2])
        self.assertEqual((done.success, done.successful_keys, done.transfer_bytes), (True, None, 3 * SIZE))
        self.assertEqual([two.lookup(name, None) for name in names], [Found.HIT] * 3 + [Found.MISS])
        self.assertTrue(self.run_job(two, "load", 7, names[:3], [1, 2, 3]).success)
        self.assertEqual([self.chunk(two, i) for i in (1, 2, 3)], [self.chunk(one, i) for i in (5, 0, 2)])

    def test_a_load_that_comes_in_part(self):
        """vLLM keeps the blocks that came, and does not ask again for the others."""
        tier, names = self.tier(), keys(3)
        self.run_job(tier, "store", 1, names[:2], [0, 1])
        self.assertEqual(tier.lookup(names[0], None), Found.HIT)
        tier._lookups.known[names[2]] = True
        done = self.run_job(tier, "load", 2, [names[2], names[1]], [4, 5])
        self.assertEqual((done.success, done.successful_keys, done.transfer_bytes), (False, [names[1]], SIZE))
        self.assertEqual((tier.lookup(names[2], None), self.chunk(tier, 5)), (Found.MISS, self.chunk(tier, 1)))

    def test_too_many_jobs(self):
        from ucmclient.engine.places import Movers
        tier, go = self.tier(), threading.Event()
        tier._movers.close()
        tier._movers = Movers("test", 1, most=1)
        tier._movers.start(go.wait, 60)
        tier.submit_load(Job(1, keys(2), [0, 1]))
        (done,) = tier.get_finished_jobs()
        go.set()
        self.assertEqual((done.success, done.successful_keys), (False, None))

    def test_who_shares(self):
        (name,) = keys(1)
        self.run_job(self.tier(), "store", 1, [name], [0])
        self.assertEqual(self.tier(spec(parallel=Parallel(0, 1, 1, False, 3))).lookup(name, None), Found.HIT, "another replica")
        for of in (spec(parallel=Parallel(0, 2, 2, False, 0)), spec(model=types.SimpleNamespace(name="x", dtype="bf16")), spec(kv_cache_layout="HND"),
                   spec(model=types.SimpleNamespace(name="m", dtype="fp8")), spec(groups=(Group(16, ("a", "b"), 0),))):
            self.assertEqual(self.tier(of).lookup(name, None), Found.MISS, of)
        for more in ({"salt": "x"}, {"revision": "2"}):
            self.assertEqual(self.tier(**more).lookup(name, None), Found.MISS, more)
        with tempfile.TemporaryDirectory() as directory:
            of, weights = spec(model=types.SimpleNamespace(name=directory, dtype="bf16")), os.path.join(directory, "model.safetensors")
            for text in ("as they were", "others now"):
                with open(weights, "w", encoding="utf-8") as file:
                    file.write(text)
                with mock.patch("ucmclient.engine.weights.process_began", return_value=time.time() + 3600):
                    self.assertEqual(self.tier(of, revision=None).lookup(name, None), Found.MISS, text)
                    self.run_job(self.tier(of, revision=None), "store", 1, [name], [0])
                    self.assertEqual(self.tier(of, revision=None).lookup(name, None), Found.HIT, text)

    def test_what_is_refused(self):
        with self.assertRaisesRegex(ValueError, "the tier's configuration has no setting 'root_dir'"):
            self.tier(root_dir="/")


if __name__ == "__main__":
    unittest.main(verbosity=2)
