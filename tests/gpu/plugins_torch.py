#!/usr/bin/env python3
"""Plug-ins that get addresses of GPU memory, with tensors of PyTorch's and a real daemon: UCM's store, and the worker of TensorRT-LLM's connector.
The engines' own classes are played."""

import os
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from daemon import Daemon  # noqa: E402
from test_trtllm import play_trtllm  # noqa: E402
from test_ucm_store import play_ucm  # noqa: E402

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 32, 96, 128, 8, 128
PIECE = TOKENS * HEADS * DIM * 2


def cache(layers=LAYERS, blocks=BLOCKS):
    """As vLLM's: of each layer a tensor, K of all blocks and then V."""
    return [torch.randn(2, blocks, TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]


def rows(layers, blocks):
    """Addresses as UCM's connector makes them: of each block K and V of each layer."""
    return np.array([[one[kv, 0].data_ptr() + block * PIECE for one in layers for kv in range(2)] for block in blocks], np.uint64)


def ids(n, tag):
    return [f"{tag}{i}".encode().rjust(16, b"-") for i in range(n)]


class Gpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        play_ucm(), play_trtllm()
        cls.daemon = Daemon(nvme=False, **{"arena.size": "4GiB", "arena.slab": "64MiB"})
        cls.addClassCleanup(cls.daemon.stop)

    def store(self, layers=LAYERS, shards=1):
        from ucmclient.engine.ucm.store_v1 import UcmdStore
        whole = layers * 2 * PIECE
        made = UcmdStore({"block_size": whole, "shard_size": whole // shards, "tensor_size_list": [PIECE] * (2 * layers // shards), "device_id": 0,
                          "ucmd": {"socket": self.daemon.socket, "model": self.id(), "shards": shards}})
        self.addCleanup(made.close)
        return made

    def test_blocks_after_an_event(self):
        """The stored bytes are those of kernels that were started before the event."""
        a, b, store, names = cache(), cache(), self.store(), ids(8, "e")
        slow = torch.randn(8192, 8192, device="cuda")
        for _ in range(40):
            slow = slow @ slow / 100
        for one in a:
            one[:, 10:18].fill_(float(slow[0, 0].isnan()) + 3)  # waits for nobody: a later kernel overwrites it
        for i, one in enumerate(a):
            one[:, 10:18] = torch.arange(8, device="cuda", dtype=torch.bfloat16).reshape(1, 8, 1, 1, 1) + i
        event = torch.cuda.Event()
        event.record()
        store.wait(store.dump_data(names, [0] * 8, rows(a, range(10, 18)), int(event.cuda_event)))
        store.wait(store.load_data(names, [0] * 8, rows(b, range(0, 16, 2))))
        self.assertTrue(all(torch.equal(x[:, 10:18], y[:, 0:16:2]) for x, y in zip(a, b)))
        self.assertLessEqual(len(store._store.places._groups), 4)
        self.assertIsNone(store._store.places._staging, "nothing went through this process")

    def test_layer_by_layer(self):
        a, b, store, names = cache(), cache(), self.store(shards=LAYERS), ids(8, "l")
        torch.cuda.synchronize()
        tasks = [store.dump_data(names, [i] * 8, rows([one], range(8))) for i, one in enumerate(a)]
        for task in tasks:
            store.wait(task)
        self.assertEqual(store.lookup_on_prefix(names), 7)
        for task in [store.load_data(names, [i] * 8, rows([one], range(30, 38))) for i, one in enumerate(b)]:
            store.wait(task)
        self.assertTrue(all(torch.equal(x[:, :8], y[:, 30:38]) for x, y in zip(a, b)))
        self.assertLessEqual(len(store._store.places._groups), 4)

    def test_tensors_that_lie_anyhow_are_refused(self):
        store = self.store(layers=2)
        spread = [[torch.zeros(PIECE + 512 * i, device="cuda", dtype=torch.uint8) for _ in range(4)] for i in range(60)]
        with self.assertRaisesRegex(RuntimeError, "memory of a GPU whose blocks do not lie one after another"):
            store.dump(ids(60, "t"), [0] * 60, spread)

    def test_tensorrt(self):
        """Pages of one tensor. The bytes that are saved are those that the forward pass leaves."""
        from ucmclient.engine.trtllm import connector as of
        import json
        args = SimpleNamespace(model=self.id(), tensor_parallel_size=1, kv_cache_config=SimpleNamespace(tokens_per_block=32))
        tensors = [torch.randn(64, 16, 2, 32 * 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        workers = []
        with mock.patch.dict(os.environ, UCM_TRTLLM=json.dumps({"socket": self.daemon.socket, "revision": "1"})):
            for tensor in tensors:
                workers.append(of.UcmWorker(args))
                workers[-1].register_kv_caches(tensor)
                self.addCleanup(workers[-1].close)
                self.assertTrue(workers[-1].store.direct)
        keys, stream = [bytes([i]) * 32 for i in range(8)], torch.cuda.current_stream()
        slow = torch.randn(8192, 8192, device="cuda")
        for _ in range(40):
            slow = slow @ slow / 100
        tensors[0][8:16] = torch.arange(8, device="cuda", dtype=torch.bfloat16).reshape(8, 1, 1, 1)
        workers[0].bind_connector_meta(of.Meta(save=[(key, 8 + i) for i, key in enumerate(keys)]))
        workers[0].wait_for_save(stream)
        workers[0].bind_connector_meta(of.Meta())
        workers[0].start_load_kv(stream)
        workers[1].bind_connector_meta(of.Meta(load=[(key, 63 - i) for i, key in enumerate(keys)]))
        workers[1].start_load_kv(stream)
        self.assertTrue(torch.equal(tensors[0][8:16], tensors[1][56:].flip(0)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
