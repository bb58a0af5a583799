#!/usr/bin/env python3
"""The connector in a real vLLM: `make check-vllm`. vLLM's scheduler, workers and connector base
class, a small model with random weights, and a real daemon. An engine generates the same with the
cache and without."""

import contextlib
import glob
import json
import os
import random
import shutil
import signal
import socket as socket_module
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "client/python/examples"),
                os.path.join(TOP, "tests/integration")]

import prefill_decode_proxy  # noqa: E402
from daemon import Daemon, halt, until  # noqa: E402
from extra import extra_of  # noqa: E402

PYTHON = os.environ["VLLM_PYTHON"]
ENGINE = os.path.join(TOP, "tests/engines/vllm/vllm_engine.py")
BLOCK = 128  # vLLM's choice on a CPU
WAIT_S = 300
# A lookup that takes longer is a miss, and the machine may be busy.
PATIENT = {"lookup_timeout": 2.0}
# Where each process would draw a seed for its block hashes, engines that share are given one.
SEED = {} if subprocess.run(
    [PYTHON, "-c", "from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED"], cwd="/", timeout=WAIT_S,
    env={n: v for n, v in os.environ.items() if n != "PYTHONPATH"}, stderr=subprocess.DEVNULL,
).returncode == 0 else {"PYTHONHASHSEED": "0"}


def prompt(seed, tokens, shared=0):
    head, tail = random.Random(0), random.Random(seed + 1)
    return [head.randrange(512) for _ in range(shared)] + [tail.randrange(512) for _ in range(tokens - shared)]


class Refused(Exception):
    pass


class Engine:
    def __init__(self, socket, model, connector=True, environment=(), settings=(), **options):
        config = {"socket": socket, **PATIENT, **dict(settings)} if connector else None
        paths = [os.path.join(TOP, "client/python"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, **SEED, "PYTHONPATH": os.pathsep.join(paths), **dict(environment)}
        env = {name: value for name, value in env.items() if value is not None}
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [PYTHON, ENGINE, json.dumps({"model": model, "connector": config, **options})], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)

    def ready(self):
        answer = self.answer()
        if "error" in answer:
            raise Refused(answer["error"])
        return self

    def answer(self):
        watchdog = threading.Timer(WAIT_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        if not line:
            self.log.seek(0)
            raise RuntimeError("the engine ended:\n" + self.log.read().decode(errors="replace")[-4000:])
        return json.loads(line)

    def ask(self, prompts, outputs=8, **more):
        self.process.stdin.write(json.dumps({"prompts": prompts, "outputs": outputs, "more": more}) + "\n")
        self.process.stdin.flush()

    def generate(self, prompts, outputs=8, **more):
        self.ask(prompts, outputs, **more)
        answer = self.answer()
        return answer["tokens"], answer["cached"]

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


class Server:
    """The same, over HTTP."""

    def __init__(self, socket, model, settings=(), options=(), environment=()):
        with contextlib.closing(socket_module.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        transfer = {"kv_connector": "UcmConnector", "kv_connector_module_path": "ucmclient.engine.vllm.connector",
                    "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": extra_of({"socket": socket, **PATIENT, **dict(settings)})}
        env = {**os.environ, **SEED, "PYTHONPATH": os.path.join(TOP, "client/python"), "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0",
               **dict(environment)}
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", str(port),
             "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
             "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer), *options],
            env=env, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True)

    def ready(self):
        end = time.monotonic() + WAIT_S
        while True:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    self.log.seek(0)
                    text = self.log.read().decode(errors="replace")[-4000:]
                    raise RuntimeError("the server did not start:\n" + text) from None
            time.sleep(0.5)

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it started, too
        self.process.wait()
        self.log.close()


def complete(url, model, prompt, outputs):
    body = {"model": model, "prompt": prompt, "max_tokens": outputs, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        answer = json.load(response)
    return answer["choices"][0]["token_ids"], (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")


class MiniEngine(unittest.TestCase):
    def test_all_of_it_on_the_real_base_class(self):
        env = {**os.environ, "UCM_REAL_VLLM": "1", "PYTHONHASHSEED": "0"}
        for path in sorted(glob.glob(os.path.join(TOP, "tests/integration/test_vllm_*.py"))):
            with self.subTest(os.path.basename(path)):
                done = subprocess.run([PYTHON, "-B", path], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      timeout=WAIT_S)
                self.assertEqual(done.returncode, 0, done.stdout[-4000:])


class RealVllm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.expected = {}
        cls.directory = tempfile.TemporaryDirectory()
        cls.model, cls.wild = (os.path.join(cls.directory.name, name) for name in ("model", "wild"))
        subprocess.run([PYTHON, ENGINE, "models", cls.model, cls.wild], check=True, stderr=subprocess.DEVNULL, timeout=WAIT_S)
        cls.plain = Engine(None, cls.model, connector=False).ready()

    @classmethod
    def tearDownClass(cls):
        cls.plain.close()
        cls.directory.cleanup()

    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        self.addCleanup(lambda: self.daemon.stop())

    def engines(self, n=1, model=None, **more):
        started = [Engine(self.daemon.socket, model or self.model, **more) for _ in range(n)]
        for e in started:
            self.addCleanup(e.close)
        for e in started:
            e.ready()
        return started

    def same(self, prompts, tokens, outputs=8):
        """As the engine without a connector, which computes each prompt alone."""
        for p, got in zip(prompts, tokens):
            key = (tuple(p), outputs)
            if key not in self.expected:
                self.expected[key] = self.plain.generate([p], outputs)[0][0]
            self.assertEqual(got, self.expected[key])

    def plain_bfloat16(self, model=None, **more):
        e = Engine(None, model or self.model, connector=False, dtype="bfloat16", **more)
        self.addCleanup(e.close)
        return e.ready()

    def encoded(self, encoding, n=1, **more):
        return self.engines(n, dtype="bfloat16", settings={"encoding": encoding, **more})

    def alone(self, e, prompts):
        """Each by itself: in bfloat16 what else is in a batch, or what was cached, can change a token."""
        answers = [e.generate([p]) for p in prompts]
        return [tokens[0] for tokens, _ in answers], [cached[0] for _, cached in answers]

    def test_lossless_is_the_same(self):
        plain, prompts = self.plain_bfloat16(), [prompt(100 + i, 700) for i in range(3)]
        cold, warm = self.alone(plain, prompts), self.alone(plain, prompts)
        self.assertEqual((cold[1], warm[1]), ([0] * 3, [640] * 3))
        for more in ({}, {"block_layout": False}, {"async_load": False, "layerwise": True}):
            with self.subTest(**more):
                a, b = self.encoded("lossless", 2, salt=repr(more), **more)
                self.assertEqual(self.alone(a, prompts), cold)
                self.assertEqual(self.alone(b, prompts), warm)
                a.close()
                b.close()

    def test_lossless_where_one_rank_does_not_fit(self):
        """The blocks of both ranks are stored raw."""
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
                 "model": self.wild}
        prompts = [prompt(105 + i, 700) for i in range(2)]
        plain = self.plain_bfloat16(**ranks)
        cold, warm = self.alone(plain, prompts), self.alone(plain, prompts)
        plain.close()
        a, b = (self.engines(dtype="bfloat16", settings={"encoding": "lossless"}, **ranks)[0] for _ in range(2))
        self.assertEqual(self.alone(a, prompts), cold)
        a.generate([prompt(107, 60)])  # steps in which workers see what became of their stores
        self.eventually(lambda: self.metrics()["unfit_decoded"] == 2 * 5)
        self.assertEqual(self.metrics()["encode_unfit"], 2 * 5)
        self.assertEqual(self.alone(b, prompts), warm)

    def test_lossy_encodings(self):
        """A fleet: only engines of the same encoding load what one engine stores. All load what a
        raw one stores."""
        prompts = [prompt(110 + i, 700) for i in range(2)]
        for encoding, more in (("fp8", {}), ("int8", {}), ("q4", {})):
            with self.subTest(encoding, **more):
                a, b = self.encoded(encoding, 2, **more)
                self.assertEqual(a.generate(prompts)[1], [0, 0])
                tokens, hits = b.generate(prompts)
                self.assertEqual(hits, [640, 640])
                self.assertEqual([len(t) for t in tokens], [8, 8])
                a.close()
                b.close()
        plain, = self.engines(dtype="bfloat16")
        tokens, hits = plain.generate(prompts)
        self.assertEqual(hits, [0, 0])
        later, = self.encoded("fp8", salt="")
        self.assertEqual(later.generate(prompts)[1], [640, 640])
        fresh = [prompt(120, 700)]
        self.alone(plain, fresh)
        self.assertEqual(self.alone(later, fresh), self.alone(plain, fresh))

    def metrics(self):
        return json.loads(self.ctl("--json", "stats"))["metrics"]

    def dumps(self):
        counts = [line for line in self.ctl("stats", "--prometheus").splitlines() if line.startswith("ucmd_dump_seconds_count")]
        return sum(float(line.split()[-1]) for line in counts)

    def ctl(self, *words):
        ucmctl = [os.path.join(os.path.dirname(os.environ["UCMD"]), "ucmctl"), "--socket", self.daemon.socket, *words]
        return subprocess.run(ucmctl, capture_output=True, check=True, text=True).stdout

    eventually = staticmethod(until)

    def test_summaries(self):
        """Each stored block's summary is built once. A second engine and a daemon that was stopped
        meanwhile build none."""
        directory = tempfile.mkdtemp(prefix="summaries.")
        self.addCleanup(shutil.rmtree, directory, True)
        options = {"directory": directory, "arena.size": "256MiB", "arena.slab": "4MiB"}
        self.daemon.stop()
        self.daemon = Daemon(**options)
        prompts = [prompt(130 + i, 700) for i in range(3)]
        for dtype, encoding in (("bfloat16", "lossless"), ("float32", "none")):
            with self.subTest(dtype):
                before = self.metrics()["summaries_built"]
                a, b = self.engines(2, dtype=dtype, settings={"summaries": "mean", "encoding": encoding})
                self.assertEqual(a.generate(prompts)[1], [0] * 3)
                self.eventually(lambda: self.metrics()["summaries_built"] == before + 3 * 5)
                self.assertEqual(b.generate(prompts)[1], [640] * 3)
                self.assertEqual(self.metrics()["summaries_built"], before + 3 * 5)
                a.close()
                b.close()
        self.assertEqual(self.metrics()["summaries_skipped"], 0)
        self.daemon.stop()
        self.daemon = Daemon(**options)
        later, = self.engines(settings={"summaries": "mean"})
        tokens, hits = later.generate(prompts)
        self.same(prompts, tokens)
        self.assertEqual(hits, [640] * 3)
        self.assertEqual(self.metrics()["summaries_built"], 0)

    def share(self, prompts=None, cached=640, **more):
        a, b = self.engines(2, **more)
        prompts = prompts or [prompt(i, 700) for i in range(3)]
        tokens, _ = a.generate(prompts)
        self.same(prompts, tokens)
        tokens, hits = b.generate(prompts)
        self.same(prompts, tokens)
        self.assertEqual(hits, [cached] * len(prompts))
        return a, b

    def test_two_engines_share_a_prefix(self):
        a, b = self.share()
        later = [prompt(i, 1500, shared=512) for i in range(8)]
        for e, seeds in ((a, later[:4]), (b, later[4:])):
            e.ask(seeds)
        for e, seeds in ((a, later[:4]), (b, later[4:])):
            self.same(seeds, e.answer()["tokens"])
        tokens, hits = b.generate(later[:4])
        self.same(later[:4], tokens)
        self.assertEqual(hits, [1500 // BLOCK * BLOCK] * 4)

    def test_a_full_hit_computes_one_token(self):
        self.share([prompt(20 + i, 5 * BLOCK) for i in range(2)], cached=5 * BLOCK - 1)

    def test_loads_within_the_step(self):
        self.share(settings={"async_load": False})

    def test_layer_after_layer(self):
        self.share(settings={"async_load": False, "layerwise": True})

    def test_stores_by_layer(self):
        a, b = self.engines(2, settings={"layer_stores": 128})
        prompts = [prompt(250, 700)]
        self.same(prompts, a.generate(prompts)[0])
        self.eventually(lambda: self.metrics()["dump_blocks"] == 700 // BLOCK)
        self.assertEqual(self.dumps(), 3, "of the model's four layers two, one and one")
        tokens, cached = b.generate(prompts)
        self.same(prompts, tokens)
        self.assertEqual(cached, [700 // BLOCK * BLOCK])

    def test_two_ranks(self):
        self.share(tensor_parallel_size=2, distributed_executor_backend="mp",
                   environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})

    def test_two_ranks_and_one_share_by_groups_of_heads(self):
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
        for stores, loads in ((two, {}), ({}, two)):
            prompts = [prompt((240 if stores else 245) + i, 700) for i in range(2)]
            a, = self.engines(settings={"head_groups": 2}, **stores)
            self.same(prompts, a.generate(prompts)[0])
            a.generate([prompt(249, 60)])  # a step in which workers see what became of their stores
            a.close()
            b, = self.engines(settings={"head_groups": 2}, **loads)
            tokens, cached = b.generate(prompts)
            self.same(prompts, tokens)
            self.assertEqual(cached, [700 // BLOCK * BLOCK] * 2)
            b.close()

    def test_a_pipeline(self):
        """The second engine, of other stages, shares nothing with the first."""
        directories = ":".join(os.path.join(TOP, directory) for directory in ("client/python", "tests/engines/vllm/workers"))
        more = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "worker_cls": "pipeline_worker.PipelineWorker"}
        cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": directories}
        a, b = self.share(environment=cores, **more)
        a.close()
        b.close()
        a, b = self.share(environment={**cores, "VLLM_PP_LAYER_PARTITION": "3,1"}, **more)
        prompts = [prompt(35 + i, 1500, shared=512) for i in range(6)]
        self.same(prompts, a.generate(prompts, 40)[0], 40)
        tokens, hits = b.generate(prompts, 40)
        self.same(prompts, tokens, 40)
        self.assertEqual(hits, [1500 // BLOCK * BLOCK] * 6)

    def test_a_pipeline_that_stores_by_layer(self):
        directories = ":".join(os.path.join(TOP, directory) for directory in ("client/python", "tests/engines/vllm/workers"))
        a, b = self.engines(2, pipeline_parallel_size=2, distributed_executor_backend="mp", worker_cls="pipeline_worker.PipelineWorker",
                            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": directories}, settings={"layer_stores": 128})
        prompts = [prompt(270, 700)]
        self.same(prompts, a.generate(prompts)[0])
        self.eventually(lambda: self.dumps() == 2 * 2)  # of each stage's two layers one, and one
        self.eventually(lambda: self.metrics()["dump_blocks"] == 2 * (700 // BLOCK))
        tokens, cached = b.generate(prompts)
        self.same(prompts, tokens)
        self.assertEqual(cached, [700 // BLOCK * BLOCK])

    def drafts(self, e, prompts):
        """Hits, and which share of the draft's tokens was accepted."""
        e.ask(prompts, 40)
        answer = e.answer()
        self.same(prompts, answer["tokens"], 40)
        return answer["cached"], answer["drafted"]["accepted"] / answer["drafted"]["draft"]

    def test_a_draft_model(self):
        """The draft is a copy of the model, so all that it proposes is accepted, unless its KV is
        not there."""
        more = {"speculative_config": {"method": "draft_model", "model": self.model, "num_speculative_tokens": 3}, "disable_log_stats": False}
        prompts = [prompt(260 + i, 700) for i in range(3)]
        a, b = self.engines(2, **more)
        cold, warm = self.drafts(a, prompts), self.drafts(b, prompts)
        self.assertEqual((cold[0], warm[0]), ([0] * 3, [640] * 3))
        self.assertGreater(min(cold[1], warm[1]), 0.9)
        b.close()
        plain, = self.engines()
        tokens, hits = plain.generate(prompts, 40)
        self.same(prompts, tokens, 40)
        self.assertEqual(hits, [0] * 3, "what has no draft's KV is another engine's")

    def test_draft_layers(self):
        eagle = os.path.join(self.directory.name, "eagle")
        subprocess.run([PYTHON, ENGINE, "eagle", eagle], check=True, stderr=subprocess.DEVNULL, timeout=WAIT_S)
        more = {"speculative_config": {"method": "eagle", "model": eagle, "num_speculative_tokens": 3}, "disable_log_stats": False}
        prompts = [prompt(265 + i, 700) for i in range(2)] + [prompt(268, 5 * BLOCK)]
        a, b = self.engines(2, **more)
        self.assertEqual(self.drafts(a, prompts)[0], [0] * 3)
        self.assertEqual(self.drafts(b, prompts)[0], [640, 640, 4 * BLOCK])

    def test_two_ranks_with_the_same_bytes_load_a_half_each(self):
        model = os.path.join(self.directory.name, "one-head")
        subprocess.run([PYTHON, ENGINE, "one-head", model], check=True, stderr=subprocess.DEVNULL, timeout=WAIT_S)
        ranks = {"model": model, "tensor_parallel_size": 2, "distributed_executor_backend": "mp",
                 "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, "settings": {"gather_loads": True}}
        prompts = [prompt(255 + i, 9 * BLOCK + 20) for i in range(2)]
        a, = self.engines(**ranks)
        computed = a.generate(prompts)[0]
        a.generate([prompt(259, 60)])  # a step in which workers see what became of their stores
        size = self.metrics()["dump_bytes"]
        self.assertEqual(size, 2 * 9 * BLOCK * 4 * 2 * 32 * 4, "one rank stores")
        a.close()
        b, = self.engines(**ranks)
        self.assertEqual(b.generate(prompts), (computed, [9 * BLOCK] * 2))
        self.assertEqual(self.metrics()["load_bytes"], size, "each block comes once")

    def test_beside_another_connector(self):
        other = Daemon(nvme=False, **{"arena.size": "64MiB"})
        self.addCleanup(other.stop)
        a, = self.engines(beside={"socket": other.socket, **PATIENT})
        prompts = [prompt(25 + i, 700) for i in range(2)]
        self.same(prompts, a.generate(prompts)[0])
        for socket in (self.daemon.socket, other.socket):
            e = Engine(socket, self.model)
            self.addCleanup(e.close)
            tokens, hits = e.ready().generate(prompts)
            self.same(prompts, tokens)
            self.assertEqual(hits, [640] * 2)
        self.daemon.process.kill()
        b, = self.engines(beside={"socket": other.socket, **PATIENT}, settings={"connect_timeout": 0.5})
        tokens, hits = b.generate(prompts)
        self.same(prompts, tokens)
        self.assertEqual(hits, [640] * 2)

    def test_a_salt_keeps_apart(self):
        a, b = self.engines(2)
        prompts = [prompt(30, 700)]
        a.generate(prompts, cache_salt="one")
        self.assertEqual(b.generate(prompts, cache_salt="other")[1], [0])
        self.assertEqual(b.generate(prompts, cache_salt="one")[1], [640])

    def test_prefill_hands_over_to_decode(self):
        a, b = self.engines(2)
        prompts = [prompt(90, 700)]
        a.ask(prompts, 1, transfer={"ucmd_prefill": True})
        (handover,) = a.answer()["transfer"]
        self.assertEqual(handover, {"ucmd_blocks": 5})
        tokens, hits = b.generate(prompts, transfer=handover)
        self.same(prompts, tokens)
        self.assertEqual(hits, [640])

    def test_prefill_and_decode_by_http(self):
        servers = [Server(self.daemon.socket, self.model) for _ in range(2)]
        for s in servers:
            self.addCleanup(s.close)
        for s in servers:
            s.ready()
        door = prefill_decode_proxy.serve("127.0.0.1:0", [servers[0].url], [servers[1].url])
        threading.Thread(target=door.serve_forever, daemon=True).start()
        self.addCleanup(door.server_close)
        self.addCleanup(door.shutdown)
        asked = prompt(95, 700)
        tokens, cached = complete(f"http://127.0.0.1:{door.server_port}", self.model, asked, 8)
        self.same([asked], [tokens])
        self.assertEqual(cached, 640)

    def test_preemption(self):
        (e,) = self.engines(num_gpu_blocks_override=26, max_model_len=2048)
        prompts = [prompt(40 + i, 600) for i in range(6)]
        tokens, _ = e.generate(prompts, 100)
        self.same(prompts, tokens, 100)
        (other,) = self.engines(num_gpu_blocks_override=26, max_model_len=2048)
        tokens, hits = other.generate(prompts, 100)
        self.same(prompts, tokens, 100)
        self.assertGreaterEqual(min(hits), 512)

    def test_blocks_vanish_while_they_are_used(self):
        a, b = self.engines(2)
        prompts = [prompt(50 + i, 900) for i in range(6)]
        a.generate(prompts)
        stop = threading.Event()

        evicted = []

        def evict():
            ucmctl = [os.path.join(os.path.dirname(os.environ["UCMD"]), "ucmctl"), "--socket", self.daemon.socket, "--json"]
            while not stop.is_set():
                done = subprocess.run([*ucmctl, "evict", "1", "--yes"], capture_output=True, check=True)
                evicted.append(json.loads(done.stdout))

        thread = threading.Thread(target=evict)
        thread.start()
        try:
            for _ in range(3):
                tokens, _ = b.generate(prompts)
                self.same(prompts, tokens)
        finally:
            stop.set()
            thread.join()
        self.assertGreater(sum(e["blocks"] for e in evicted), 0)

    def test_the_daemon_dies_and_comes_back(self):
        a, b = self.engines(2, settings={"retry_interval": 0.2})
        prompts = [prompt(60 + i, 1000) for i in range(4)]
        a.generate(prompts)
        b.ask(prompts, 200)
        time.sleep(0.1)
        socket = self.daemon.socket
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.same(prompts, b.answer()["tokens"], 200)
        more = [prompt(70, 500)]
        self.same(more, b.generate(more)[0])
        self.daemon = Daemon(nvme=False, socket=socket, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        time.sleep(1.0)
        again = [prompt(80 + i, 700) for i in range(2)]
        deadline = time.monotonic() + 60
        while a.generate(again)[1] != [640, 640]:  # its own, at the latest
            self.assertLess(time.monotonic(), deadline)
        fresh, = self.engines()
        while True:
            tokens, hits = fresh.generate([prompt(80, 700)])
            self.same([prompt(80, 700)], tokens)
            if hits == [640]:
                break
            self.assertLess(time.monotonic(), deadline)

    def test_a_shared_tier_that_is_slow(self):
        """The root's process is stopped until the engine has asked for the answer again, and has
        answered another prompt."""
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        asked, options = prompt(97, 700), {"nvme": False, "arena.size": "256MiB", "arena.slab": "4MiB", "shared.timeout": "60s"}
        host = Daemon(**options, **{"shared.roots": directory})
        first = Engine(host.socket, self.model)
        try:
            first.ready().generate([asked])
            self.reaches(host.socket, lambda stats: stats["metrics"]["shared_writes"] == stats["metrics"]["dump_blocks"] > 0)
        finally:
            first.close()
            host.stop()
        host = Daemon(**options, **{"shared.roots": directory})
        self.addCleanup(host.stop)
        server = Server(host.socket, self.model, {"shared_wait": float(WAIT_S)})
        self.addCleanup(server.close)
        server.ready()
        backend = self.reaches(host.socket, lambda stats: stats["shared_roots"][0]["pid"])
        halt(backend)
        self.addCleanup(os.kill, backend, signal.SIGCONT)
        answers = []
        waits = threading.Thread(target=lambda: answers.append(complete(server.url, self.model, asked, 8)))
        waits.start()
        self.reaches(host.socket, lambda stats: stats["metrics"]["lookups_pending"] >= 5)
        short = asked[:50]  # no block of it has a key
        self.same([short], [complete(server.url, self.model, short, 8)[0]])
        self.assertEqual(answers, [])
        os.kill(backend, signal.SIGCONT)
        waits.join(WAIT_S)
        self.same([asked], [tokens for tokens, _ in answers])
        self.assertEqual([cached for _, cached in answers], [640])
        self.reaches(host.socket, lambda stats: stats["metrics"]["lookups_waited"] == 0)

    def reaches(self, socket, condition):
        """Waits until condition(the daemon's `stats`) is true, and returns its result."""
        ucmctl = os.path.join(os.path.dirname(os.environ["UCMD"]), "ucmctl")
        end = time.monotonic() + WAIT_S
        while True:
            done = subprocess.run([ucmctl, "--socket", socket, "--json", "stats"], capture_output=True, check=True)
            if said := condition(json.loads(done.stdout)):
                return said
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_refusals_name_the_remedy(self):
        for words, more in (("prefix-caching", {"enable_prefix_caching": False}),
                            ("PYTHONHASHSEED", {"prefix_caching_hash_algo": "xxhash",
                                                "environment": {"PYTHONHASHSEED": None}}),
                            ("start with --dtype bfloat16", {"settings": {"encoding": "fp8"}}),
                            ("there are", {"settings": {"sockte": "x"}})):
            with self.subTest(words), self.assertRaisesRegex(Refused, words):
                self.engines(**more)


if __name__ == "__main__":
    version = subprocess.run([PYTHON, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True)
    print("vLLM", version.stdout.strip() or version.stderr)
    unittest.main(verbosity=2)
