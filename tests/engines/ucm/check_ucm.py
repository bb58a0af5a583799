#!/usr/bin/env python3
"""ucmclient.engine.ucm in UCM's own code: `make check-ucm`, of PyPI's package, or
`UCM_SOURCE=DIRECTORY`, a checkout, which has its programs for stores (ucm/store/test/e2e), too. Its
factories and its connector for vLLM, with a real daemon. UCM's C++ is left out: its log and its own
stores. Tensors that those programs put on a GPU lie in host memory here."""

import importlib.util
import inspect
import mmap
import os
import sys
import time
import types
import unittest
from unittest import mock

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
SOURCE = os.environ.get("UCM_SOURCE", "")
if not os.path.exists(os.path.join(SOURCE, "ucm/store/ucmstore_v1.py")):
    sys.exit("check-ucm: UCM_SOURCE must name a directory with UCM (unified-cache-management): a checkout, or its package's files")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from daemon import Daemon  # noqa: E402
from ucmclient.memory import SharedMemory  # noqa: E402


def without_cpp():
    """UCM's packages, without the first one's __init__, which patches vLLM, and without what is compiled."""
    package = types.ModuleType("ucm")
    package.__path__ = [os.path.join(SOURCE, "ucm")]
    sys.modules["ucm"] = package
    for name in ("ucm.shared.infra.ucmlogger", "ucm.shared.metrics.ucmmetrics", "ucm.store.pipeline.ucmpipelinestore", "ucm.store.nfsstore.ucmnfsstore",
                 "ucm.store.pcstore.ucmpcstore"):
        sys.modules[name] = mock.MagicMock()
    for parent, name in (("ucm.shared.infra", "ucmlogger"), ("ucm.shared.metrics", "ucmmetrics"), ("ucm.store.pipeline", "ucmpipelinestore"),
                         ("ucm.store.nfsstore", "ucmnfsstore"), ("ucm.store.pcstore", "ucmpcstore")):
        __import__(parent)
        setattr(sys.modules[parent], name, sys.modules[f"{parent}.{name}"])


def program(name):
    path = os.path.join(SOURCE, "ucm/store/test/e2e", f"{name}.py")
    if not os.path.exists(path):
        raise unittest.SkipTest("a package of UCM has no programs for stores: UCM_SOURCE=DIRECTORY names a checkout")
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def on_the_host(make):
    return lambda *args, device=None, **named: make(*args, **named)


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(nvme=False, **{"arena.size": "512MiB"})
        cls.addClassCleanup(cls.daemon.stop)
        from ucm.store.factory import UcmConnectorFactory
        from ucm.store.factory_v1 import UcmConnectorFactoryV1
        cls.V0, cls.V1 = UcmConnectorFactory, UcmConnectorFactoryV1

    def setUp(self):
        patch = mock.patch("torch.rand", on_the_host(torch.rand))
        patch.start()
        self.addCleanup(patch.stop)

    def own(self, **more):
        return {"socket": self.daemon.socket, "model": self.id(), "lookup_timeout": 5.0, **more}

    def store(self, factory=None, name="UcmdStore", path=None, own=(), **config):
        arguments = (path,) if path else ()
        store = (factory or self.V1).create_connector(name, {"unique_id": "x", "ucmd": self.own(**dict(own)), **config}, *arguments)
        self.addCleanup(store.close)
        return store

    def pair(self, **config):
        """A worker's store and a scheduler's."""
        return self.store(**config, device_id=0), self.store(**config, path="ucmclient.engine.ucm.store_v1")


class Stores(Case):
    def test_cache_on_posix(self):
        size, layers, chunk = 4096, 8, 2
        worker, scheduler = self.pair(tensor_size=size, shard_size=size * layers * chunk, block_size=size * layers * chunk)
        program("cache_on_posix_test").e2e_test(worker, scheduler, size, layers, chunk, 16, 0)

    def test_cache_layer_chunk(self):
        size, layers, chunk = 4096, 64, 4
        worker, scheduler = self.pair(tensor_size=size, shard_size=size * chunk, block_size=size * chunk * layers)
        program("cache_layer_chunk_test").e2e_test(worker, scheduler, size, layers, chunk, 8, 0)

    def test_cache_variable_length_tensor(self):
        sizes, layers = [8192, 1024], 64
        worker, scheduler = self.pair(tensor_size_list=sizes, shard_size=sum(sizes), block_size=sum(sizes) * layers)
        program("cache_variable_length_tensor_test").e2e_test(worker, scheduler, sizes, layers, 16, 0)

    def test_pcstore_v1(self):
        of, layers = program("pcstore_embed_v1"), 6
        io = 64 * 16 * 2
        hashes, tensors = of.make_buffers(32, 0, 32, 64, 16, layers)
        worker, scheduler = (self.store(block_size=io * layers, tensor_size=io, device_id=device) for device in (0, -1))
        got = [[torch.empty_like(t) for t in row] for row in tensors]
        of.embed(worker, hashes, tensors)
        of.fetch(scheduler, worker, hashes, got)
        of.cmp_and_print_diff(tensors, got)

    def test_posixstore_gc(self):
        """Its main(), with smaller blocks and fewer of them."""
        of = program("posixstore_gc_test")
        with open(of.__file__, encoding="utf-8") as file:
            text = file.read().split("if __name__")[0]
        for many, few in (("block_size = 1048576", "block_size = 65536"), ("batch_size = 1024", "batch_size = 64"), ("batch_number = 64", "batch_number = 3")):
            self.assertIn(many, text)
            text = text.replace(many, few)
        of.mmap = mmap  # which the program forgets to import
        exec(compile(text, of.__file__, "exec"), of.__dict__)
        create = self.V1.create_connector
        with mock.patch.object(self.V1, "create_connector", lambda _, config, *more: create("UcmdStore", {**config, "ucmd": self.own()})):
            of.main()

    def test_nfsstore(self):
        """The older interface: create, dump by offsets, commit."""
        of, layers = program("nfsstore_embed"), 6
        io = 64 * 16 * 2
        hashes, tensors = of.make_buffers(16, 0, 16, 64, 16, layers)
        store = self.store(self.V0, kv_block_size=io * layers, io_size=io, role="worker", device=0)
        got = [[torch.empty_like(t) for t in row] for row in tensors]
        # The program counts offsets in elements. The interface counts them in bytes.
        flat = [[t.view(torch.uint8).reshape(-1) for t in row] for row in tensors]
        of.embed(store, hashes, flat)
        of.fetch(store, hashes, [[t.view(torch.uint8).reshape(-1) for t in row] for row in got])
        of.cmp_and_print_diff(tensors, got)


class Connector(Case):
    """UCM's connector for vLLM, its two halves in one process, over a KV cache in memory that the daemon maps."""

    TOKENS, BLOCKS, LAYERS, HEADS, DIM = 4, 12, 3, 2, 8
    BYTES = LAYERS * 2 * TOKENS * HEADS * DIM * 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        try:
            import ucm.integration.vllm.ucm_connector as of
        except ImportError as error:
            raise unittest.SkipTest(f"UCM's connector can't be imported here: {error}") from None
        cls.of = of
        # vLLM's base class wants a third argument, which UCM's connector has since 0.8.
        base = of.KVConnectorBase_V1
        init = base.__init__
        patch = mock.patch.object(base, "__init__", lambda self, vllm_config, role, kv_cache_config=None: init(self, vllm_config, role, kv_cache_config))
        patch.start()
        cls.addClassCleanup(patch.stop)

    def vllm_config(self, layerwise):
        ns = types.SimpleNamespace
        model = ns(model="m", dtype=torch.bfloat16, is_deepseek_mla=False, hf_text_config=ns(num_hidden_layers=self.LAYERS), served_model_name="m",
                   hf_config=ns(), get_num_layers=lambda _: self.LAYERS, get_num_kv_heads=lambda _: self.HEADS, get_head_size=lambda: self.DIM)
        parallel = ns(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, data_parallel_rank=0)
        extra = {"use_layerwise": layerwise, "enable_event_sync": False, "ucm_connectors": [{
            "ucm_connector_name": "UcmdStore", "ucm_connector_module_path": "ucmclient.engine.ucm.store_v1",
            "ucm_connector_config": {"ucmd": self.own(block_bytes=self.BYTES, **({"shards": self.LAYERS} if layerwise else {}))}}]}
        return ns(model_config=model, parallel_config=parallel, cache_config=ns(block_size=self.TOKENS),
                  kv_transfer_config=ns(kv_connector_extra_config=extra, engine_id="e", kv_connector="UCMConnector"))

    def halves(self, layerwise):
        kind = self.of.UCMLayerWiseConnector if layerwise else self.of.UCMDirectConnector
        roles, config = self.of.KVConnectorRole, self.vllm_config(layerwise)
        more = ({"kv_cache_config": types.SimpleNamespace(num_blocks=self.BLOCKS)} if "kv_cache_config" in inspect.signature(kind).parameters else {})
        shape = (self.LAYERS, 2, self.BLOCKS, self.TOKENS, self.HEADS, self.DIM)
        memory = SharedMemory(int(np.prod(shape)) * 2)
        cache = torch.frombuffer(memory.buffer, dtype=torch.bfloat16).reshape(shape)
        cache.copy_(torch.randn(shape))
        platform = types.SimpleNamespace(is_cuda_alike=lambda: True, device_type="cuda")
        torch_ = types.SimpleNamespace(**{**torch.__dict__, "device": lambda _: "cpu"})
        with mock.patch.object(self.of, "current_platform", platform), mock.patch.object(self.of, "torch", torch_), \
                mock.patch.object(self.of, "get_world_group", lambda: types.SimpleNamespace(local_rank=0, rank=0)), \
                mock.patch.object(self.of, "create_device", mock.MagicMock()), \
                mock.patch.object(self.of, "get_current_device_id", lambda: 0, create=True), \
                mock.patch.object(self.of, "_worker_publish_block_size", lambda *_: None, create=True):
            scheduler, worker = kind(config, roles.SCHEDULER, **more), kind(config, roles.WORKER, **more)
            with mock.patch.object(self.of.torch, "Tensor", torch.Tensor):
                worker.register_kv_caches({f"model.layers.{i}.self_attn": cache[i] for i in range(self.LAYERS)})
        for half in (scheduler, worker):
            self.addCleanup(half.store.close)
        return scheduler, worker, cache, memory

    def step(self, worker, load=((), ()), dump=((), ())):
        """A step of vLLM's worker."""
        meta = self.of.UCMConnectorMetadata({"r": self.of.RequestDispatchMeta(*(tuple(map(list, one)) for one in (load, dump)))})
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        for name in worker.kv_caches:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, worker.kv_caches[name], None)
        worker.wait_for_save()
        until = time.monotonic() + 30
        # UCM 0.8 checks in later steps whether they are over
        while getattr(worker, "_pending_dump_tasks", None):
            self.assertLess(time.monotonic(), until, "dumps do not end")
            worker._poll_pending_dump_tasks()
            time.sleep(0.001)
        return worker.get_block_ids_with_load_errors()

    def test_hits(self):
        for layerwise in (False, True):
            with self.subTest(layerwise=layerwise):
                scheduler, worker, cache, memory = self.halves(layerwise)
                tokens = [int(layerwise) * 100 + i for i in range(5 * self.TOKENS + 2)]  # the last two are computed
                request = types.SimpleNamespace(all_token_ids=tokens, num_tokens=len(tokens), request_id="r", num_prompt_tokens=len(tokens), status=None,
                                                mm_features=[], lora_request=None, cache_salt=None, prompt_embeds=None)
                self.assertEqual(scheduler.get_num_new_matched_tokens(request, 0), (0, False))
                ids = scheduler.requests_meta["r"].ucm_block_ids
                self.assertEqual(self.step(worker, dump=(ids, [7, 3, 9, 1, 0])), set())
                self.assertEqual(scheduler.get_num_new_matched_tokens(request, 0), (5 * self.TOKENS, False))
                other, there = self.halves(layerwise), [2, 4, 6, 8, 10]
                self.assertEqual(self.step(other[1], load=(ids, there)), set())
                self.assertTrue(torch.equal(other[2][:, :, there], cache[:, :, [7, 3, 9, 1, 0]]))
                self.assertEqual(len(worker.store._store.places._groups), 1, "its whole KV cache is one region")
                # A block that is not there: vLLM computes it again.
                self.assertEqual(self.step(other[1], load=([b"x" * 16], [11])), {11})


if __name__ == "__main__":
    without_cpp()
    import ucmclient.engine.ucm
    ucmclient.engine.ucm.register()
    unittest.main(verbosity=2)
