#!/usr/bin/python3
"""ucmclient.engine.trtllm against a real daemon, driven as TensorRT-LLM's executor drives a
connector. TensorRT-LLM's classes are played, by its source of commit 035ab91
(connectors/kv_cache_connector.py)."""

import abc
import contextlib
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import client_paths  # noqa: F401  sets the paths of the others
from test_page_store import Case, Ranks, module
from ucmclient.memory import SharedMemory

BLOCK, SIZE, PAGES = 4, 96, 40
WORKER = ("register_kv_caches", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished")
SCHEDULER = ("build_connector_meta", "get_num_new_matched_tokens", "request_finished", "update_state_after_alloc")


class Base(abc.ABC):
    def __init__(self, llm_args):
        self._llm_args, self._metadata = llm_args, None

    def bind_connector_meta(self, metadata):
        self._metadata = metadata


def abstract(*methods):
    return type("Base", (Base,), {name: abc.abstractmethod(lambda *_: None) for name in methods})


def play_trtllm():
    for name in ("tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor", "tensorrt_llm._torch.pyexecutor.connectors"):
        module(name)
    module("tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector", KvCacheConnectorWorker=abstract(*WORKER),
           KvCacheConnectorScheduler=abstract(*SCHEDULER))
    module("tensorrt_llm._utils", mpi_rank=lambda: 0, mpi_allgather=None)


def forget_trtllm():
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm" or name.startswith("ucmclient.engine.trtllm")]:
        del sys.modules[name]


class Tensor:
    """A KV cache: PAGES pages of SIZE bytes."""

    dtype = "torch.bfloat16"
    shape = (PAGES, 2, SIZE // 4)

    def __init__(self):
        self.memory = SharedMemory(PAGES * SIZE)
        self.data_ptr = lambda: self.memory.address
        self.element_size = lambda: 2
        self.stride = lambda _: SIZE // 2

    def __getitem__(self, page):
        return SimpleNamespace(numel=lambda: SIZE // 2)

    def get(self, page):
        return bytes(self.memory.buffer[page * SIZE : (page + 1) * SIZE])

    def set(self, page, data):
        self.memory.buffer[page * SIZE : (page + 1) * SIZE] = data


def kv(tokens, rank=0, salt=""):
    """What a rank computes for the last block of these tokens."""
    return hashlib.shake_256(repr((tokens, rank, salt)).encode()).digest(SIZE)


class Stream:
    def synchronize(self):
        pass


class Request:
    def __init__(self, number, tokens, **more):
        self.request_id, self.tokens, self.computed, self.pages, self.told = number, list(tokens), 0, [], (0, 0)
        self.get_tokens = lambda _: list(self.tokens)
        self.salt = more.get("cache_salt") or ""
        self.__dict__.update(more)


class Engine:
    """Ranks of one engine, of which rank 0 has the scheduler. chunk: tokens of a prompt that a step
    computes. doubtful: ranks of a model without a revision that don't know which weights they have
    read."""

    def __init__(self, socket, ranks=1, chunk=1000, model="m", args=(), doubtful=None, **settings):
        import json
        self.chunk, self.loaded, self.numbers = chunk, 0, 0
        args = SimpleNamespace(model=model, tensor_parallel_size=ranks, pipeline_parallel_size=1,
                               kv_cache_config=SimpleNamespace(tokens_per_block=BLOCK, dtype="auto"), **dict(args))
        own = {"socket": socket, "retry_interval": 0.05, "connect_timeout": 5.0, "lookup_timeout": 5.0, "revision": "1", **settings}
        own = {name: value for name, value in own.items() if value is not None}
        with mock.patch.dict(os.environ, UCM_TRTLLM=json.dumps(own)):
            self.tensors, mpi, of = [Tensor() for _ in range(ranks)], Ranks(ranks), importlib.import_module("ucmclient.engine.trtllm.connector")

            def begin(rank):
                worker = of.UcmWorker(args)
                worker.register_kv_caches(self.tensors[rank])
                return worker
            with mock.patch.object(of, "mpi_rank", mpi.rank), mock.patch.object(of, "mpi_allgather", mpi.gather), \
                    mpi.in_doubt(doubtful) if doubtful is not None else contextlib.nullcontext():
                self.workers = mpi.run(begin)
            self.of, self.scheduler = of, of.UcmScheduler(args)
        self.free, self.running = list(range(PAGES)), []

    def close(self):
        for worker in self.workers:
            worker.close()

    def add(self, tokens, honoured=None, reused=0, **more):
        """honoured: tokens of the offer that the engine takes. reused: pages that it has of its own."""
        self.numbers += 1
        request = Request(self.numbers, tokens, **more)
        self.allocate(request, honoured, reused)
        self.running.append(request)
        return request

    def allocate(self, request, honoured=None, reused=0):
        self.of._worker = self.workers[0]
        found, later = self.scheduler.get_num_new_matched_tokens(request, reused * BLOCK)
        assert not later
        taken = found if honoured is None else min(found, honoured)
        request.pages = [self.free.pop(0) for _ in range(-(-len(request.tokens) // BLOCK))]
        for block in range(reused):
            self.compute(request, block)
        request.computed, request.taken, request.told = reused * BLOCK + taken, taken, (0, 0)
        self.loaded += taken
        self.scheduler.update_state_after_alloc(request, list(request.pages))

    def compute(self, request, block):
        for rank, tensor in enumerate(self.tensors):
            tensor.set(request.pages[block], kv(request.tokens[: (block + 1) * BLOCK], rank, request.salt))

    def step(self, between=lambda: None):
        new, cached, ends = [], [], []
        for request in self.running:
            n = min(self.chunk, len(request.tokens) - request.computed)
            tokens, pages = request.told
            data = SimpleNamespace(request_id=request.request_id, new_tokens=request.tokens[tokens:], new_block_ids=request.pages[pages:],
                                   computed_position=request.computed - request.taken, num_scheduled_tokens=n)
            (cached if tokens else new).append(data)
            request.told, request.taken = (len(request.tokens), len(request.pages)), 0
            ends.append((request, request.computed, request.computed + n))
        meta = self.scheduler.build_connector_meta(SimpleNamespace(new_requests=new, cached_requests=cached))
        between()
        for worker in self.workers:
            worker.bind_connector_meta(meta)
            worker.start_load_kv(Stream())
        for request, before, after in ends:
            for block in range(before // BLOCK, -(-after // BLOCK)):
                self.compute(request, block)
            request.computed = after
        for worker in self.workers:
            worker.wait_for_save(Stream())
            assert worker.get_finished([], []) == ([], [])

    def generate(self, tokens, outputs=3, **more):
        """Runs a request to its end; returns what its pages held when the prompt was computed."""
        request = self.add(tokens, **more)
        while request.computed < len(request.tokens):
            self.step()
        kept = self.pages(request)
        for i in range(outputs):
            request.tokens.append(1000 + i)
            if len(request.tokens) > len(request.pages) * BLOCK:
                request.pages.append(self.free.pop(0))
            self.step()
        self.finish(request)
        return kept

    def pages(self, request):
        return [[tensor.get(page) for page in request.pages[: len(request.tokens) // BLOCK]] for tensor in self.tensors]

    def finish(self, request):
        assert self.scheduler.request_finished(request, request.pages) is False
        self.running.remove(request)
        self.free += request.pages
        self.step()


def right(tokens, ranks=1, salt=""):
    return [[kv(list(tokens[: end * BLOCK]), rank, salt) for end in range(1, len(tokens) // BLOCK + 1)] for rank in range(ranks)]


class TensorRT(Case):
    @classmethod
    def setUpClass(cls):
        play_trtllm()

    @classmethod
    def tearDownClass(cls):
        forget_trtllm()

    def engine(self, **more):
        made = Engine(self.daemon.socket, **more)
        self.addCleanup(made.close)
        return made

    def test_hits(self):
        tokens = list(range(30))
        for ranks in (1, 2):
            a, b = self.engine(ranks=ranks, model=str(ranks)), self.engine(ranks=ranks, model=str(ranks), chunk=6)
            self.assertEqual(a.generate(tokens), right(tokens, ranks))
            self.assertEqual((a.loaded, b.generate(tokens), b.loaded), (0, right(tokens, ranks), 28))
            longer = tokens + list(range(50, 70))
            self.assertEqual((b.generate(longer), b.loaded), (right(longer, ranks), 56))
            self.assertEqual((a.generate(longer), a.loaded), (right(longer, ranks), 48))
        self.eventually(lambda: self.stats()["leases"] == 0)

    def test_answers_are_kept(self):
        a, b = self.engine(), self.engine()
        a.generate(list(range(10)), outputs=9)
        turn = list(range(10)) + [1000 + i for i in range(9)] + [7, 7]
        self.assertEqual((b.generate(turn), b.loaded), (right(turn), 16))

    def test_a_prompt_of_whole_blocks(self):
        """One token is left to compute."""
        a, b, tokens = self.engine(), self.engine(), list(range(12))
        a.generate(tokens)
        self.assertEqual((b.generate(tokens), b.loaded), (right(tokens), 8))

    def test_what_the_engine_has_itself(self):
        """Its own pages are not loaded, and are stored if the daemon lacks them."""
        a, b, c, tokens = self.engine(), self.engine(), self.engine(), list(range(21))
        self.assertEqual((a.generate(tokens, reused=3), a.loaded), (right(tokens), 0))
        self.assertEqual((b.generate(tokens, reused=2), b.loaded), (right(tokens), 12))
        self.assertEqual((c.generate(tokens), c.loaded), (right(tokens), 20))

    def test_fewer_blocks_than_offered(self):
        """An engine that takes a part of the offer computes the rest, in chunks. No block is stored
        before it is computed."""
        a, b, c, tokens = self.engine(), self.engine(chunk=4), self.engine(), list(range(40))
        a.generate(tokens[:20])
        for honoured in (0, 8):
            self.assertEqual(b.generate(tokens, honoured=honoured), right(tokens))
        self.assertEqual(c.generate(tokens), right(tokens))
        self.assertGreaterEqual(c.loaded, 36)

    def test_who_shares(self):
        tokens, engine = list(range(12)), self.engine()
        engine.generate(tokens + [1])
        for more in ({"cache_salt": "x"}, {"lora_task_id": 3, "py_lora_path": "an/adapter"}, {"multimodal_hashes": [[1, 2, 3, 4, 5, 6, 7, 8]]}, {"multimodal_positions": [2]}):
            other = self.engine()
            other.generate(tokens + [1], **more)
            self.assertEqual(other.loaded, 0, more)
        for words in ({"model": "x"}, {"ranks": 2}, {"salt": "x"}, {"revision": "2"}, {"args": {"dtype": "float16"}}, {"args": {"quant_config": "FP8"}}):
            other = self.engine(**words)
            other.generate(tokens + [1])
            self.assertEqual(other.loaded, 0, words)
        again = self.engine()
        again.generate(tokens + [1], multimodal_hashes=[[1, 2, 3, 4, 5, 6, 7, 8]])
        self.assertEqual(again.loaded, 12)

    def test_adapters_are_known_by_their_files(self):
        """Adapters are not known by their numbers, which mean other adapters in another engine. Nor
        by a path under which other weights lie now."""
        tokens, directory = list(range(13)), tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)

        def adapter(text):
            with open(os.path.join(directory, "adapter.safetensors"), "w", encoding="utf-8") as file:
                file.write(text)
            return {"lora_task_id": 1, "py_lora_path": directory}

        def loaded(engine, **more):
            before = engine.loaded
            engine.generate(tokens, **more)
            return engine.loaded - before
        self.assertEqual((loaded(self.engine(), **adapter("now")), loaded(self.engine(), lora_task_id=1, py_lora_path=directory)), (0, 0), "perhaps read before")
        self.enterContext(mock.patch("ucmclient.engine.weights.process_began", return_value=time.time() + 3600))
        first, none = self.engine(), self.engine()
        self.assertEqual((loaded(none, lora_task_id=1), loaded(self.engine(), lora_task_id=1)), (0, 0), "a number alone")
        self.assertEqual((loaded(first, **adapter("a")), loaded(self.engine(), **adapter("a other"))), (0, 0), "other files")
        self.assertEqual(loaded(first, lora_task_id=1, py_lora_path=directory), 0, "this engine may have either version")
        self.assertEqual(loaded(self.engine(), lora_task_id=2, py_lora_path=directory), 12)

    def test_weights_of_a_directory_are_known_by_its_files(self):
        tokens, directory = list(range(13)), tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        weights = os.path.join(directory, "model.safetensors")
        self.enterContext(mock.patch("ucmclient.engine.weights.process_began", return_value=time.time() + 3600))
        for text, loaded in (("one", 0), (None, 12), ("another", 0)):
            if text is not None:
                with open(weights, "w", encoding="utf-8") as file:
                    file.write(text)
            engine = self.engine(model=directory, revision=None)
            engine.generate(tokens)
            self.assertEqual(engine.loaded, loaded)

    def test_ranks_in_doubt_share_with_each_other(self):
        """An engine that may have other weights than its files still finds what it stored itself,
        with all its ranks. No other engine does."""
        tokens = list(range(13))
        for doubtful in ((0,), (1,), (0, 1), ()):
            first, second = (self.engine(ranks=2, revision=None, model=f"{doubtful}", doubtful=doubtful) for _ in range(2))
            first.generate(tokens)
            self.assertEqual((first.generate(tokens), first.loaded), (right(tokens, 2), 12), doubtful)
            self.assertEqual((second.generate(tokens), second.loaded), (right(tokens, 2), 0 if doubtful else 12), doubtful)

    def test_pauses_and_pages_that_others_get(self):
        """A request loses its pages midway, and another one gets them in the next step. The stored
        bytes are the computed ones."""
        a, tokens = self.engine(chunk=8), list(range(37))
        for told in (False, True):
            request = a.add(tokens)
            a.step(), a.step()
            a.running.remove(request)
            a.free = request.pages + a.free
            other = a.generate([500 + i for i in range(37)])
            self.assertEqual(other, right([500 + i for i in range(37)]))
            a.allocate(request)
            if not told:  # as in older versions, it comes back as a known request
                request.told = (1, 0)
            a.running.append(request)
            while request.computed < len(tokens):
                a.step()
            self.assertEqual(a.pages(request), right(tokens))
            a.finish(request)
        b = self.engine()
        self.assertEqual(b.generate(tokens), right(tokens))
        self.assertGreater(b.loaded, 0)

    def test_a_request_that_is_reset(self):
        a, tokens = self.engine(), list(range(37))
        a.generate(tokens)
        request = a.add(tokens)
        self.assertGreater(self.stats()["leases"], 0)
        a.scheduler.request_reset(request)
        self.eventually(lambda: self.stats()["leases"] == 0)
        a.allocate(request)
        a.step()
        self.assertEqual(a.pages(request), right(tokens))
        a.finish(request)

    def test_a_daemon_that_is_away(self):
        self.daemon.stop()
        a, tokens = self.engine(), list(range(20))
        self.assertEqual((a.generate(tokens), a.loaded), (right(tokens), 0))

    def test_blocks_that_do_not_come(self):
        """The daemon dies between a lookup and its load: the step raises."""
        a, b, tokens = self.engine(), self.engine(), list(range(20))
        a.generate(tokens)
        b.add(tokens)
        with self.assertRaisesRegex(RuntimeError, "4 of 4 blocks that were found before did not come"):
            b.step(between=self.daemon.kill)

    def test_what_is_refused(self):
        from ucmclient.engine.trtllm import connector as of
        args = SimpleNamespace(model="m", tensor_parallel_size=1, pipeline_parallel_size=2, kv_cache_config=SimpleNamespace(tokens_per_block=4))
        for name, value, sentence in (("pipeline_parallel_size", 2, "tensor_parallel_size alone"), ("enable_attention_dp", True, "remove enable_attention_dp")):
            with self.assertRaisesRegex(RuntimeError, sentence):
                of.UcmWorker(SimpleNamespace(**{**vars(args), "pipeline_parallel_size": 1, name: value})).register_kv_caches(Tensor())
        group = SimpleNamespace(regions=(), replicated_regions=())
        with self.assertRaisesRegex(RuntimeError, "one attention window"):
            of.UcmWorker(args).register_kv_cache_layout(SimpleNamespace(groups=(group, group)))
        for value, sentence in (("[]", "must be a JSON object"), ('{"x": 1}', "UCM_TRTLLM has no setting 'x'")):
            with mock.patch.dict(os.environ, UCM_TRTLLM=value), self.assertRaisesRegex((RuntimeError, ValueError), sentence):
                of.UcmWorker(args)
        with mock.patch.object(of, "_worker", None), self.assertRaisesRegex(RuntimeError, "must be UcmWorker"):
            of.UcmScheduler(args).get_num_new_matched_tokens(Request(1, [1] * 9), 0)

    def test_layouts(self):
        """A newer version's description of pages, in two runs of memory."""
        from ucmclient.engine.trtllm import connector as of
        import json
        memory = SharedMemory(2 * 10 * 64)
        region = lambda at, size: SimpleNamespace(base=memory.address + at, size=size, stride=64, num_slots=10, buffers=(  # noqa: E731
            SimpleNamespace(layer_id=0, role="key", expansion=1),))
        layout = SimpleNamespace(groups=(SimpleNamespace(regions=(region(0, 64), region(640, 32)), replicated_regions=()),))
        args = SimpleNamespace(model="m", tensor_parallel_size=1, kv_cache_config=SimpleNamespace(tokens_per_block=4))
        with mock.patch.dict(os.environ, UCM_TRTLLM=json.dumps({"socket": self.daemon.socket})):
            worker = of.UcmWorker(args)
        worker.register_kv_cache_layout(layout)
        self.addCleanup(worker.close)
        memory.buffer[:] = os.urandom(memory.size)
        key = b"k" * 32
        worker.bind_connector_meta(of.Meta(save=[(key, 3)]))
        worker.wait_for_save(Stream())
        worker.bind_connector_meta(of.Meta(load=[(key, 7)]))
        worker.start_load_kv(Stream())
        for at, size in ((0, 64), (640, 32)):
            self.assertEqual(memory.buffer[at + 7 * 64 : at + 7 * 64 + size], memory.buffer[at + 3 * 64 : at + 3 * 64 + size])


if __name__ == "__main__":
    unittest.main(verbosity=2)
