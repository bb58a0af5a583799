#!/usr/bin/env python3
"""Sparse decoding in a real vLLM without a GPU, a part of `make check-vllm`. It has vLLM's
scheduler and block pool, the CPU backend's kernels for dense tokens, a small model with random
weights, and a real daemon. A policy that takes everything gives a dense engine's tokens. Any other
gives those of an engine without a daemon, which has all blocks in its pages."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import unittest

import check_vllm
from check_vllm import ENGINE, PYTHON, TOP, WAIT_S, Engine, Refused, Server, complete, prompt
from daemon import Daemon

ALL = "topk:sparse_ratio=1.0,topk_tokens=0,dense_below=256"
SOME = "topk:topk_tokens=192,dense_below=256"
SIZES = {"block_size": 32, "max_model_len": 2048}


class Sparse(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.model, wild = (os.path.join(cls.directory.name, name) for name in ("model", "wild"))
        subprocess.run([PYTHON, ENGINE, "models", cls.model, wild], check=True, stderr=subprocess.DEVNULL, timeout=WAIT_S)
        # What pip makes of the wheel's entry point.
        info = os.path.join(cls.directory.name, "plugin", "ucmclient-0.dist-info")
        os.makedirs(info)
        for name, text in (("METADATA", "Metadata-Version: 2.1\nName: ucmclient\nVersion: 0\n"),
                           ("entry_points.txt", "[vllm.general_plugins]\nucmd = ucmclient.engine.vllm.sparse_plugin:register\n")):
            with open(os.path.join(info, name), "w") as out:
                out.write(text)
        cls.plugin = os.path.dirname(info)
        cls.known = {}
        cls.reference = {}

    @classmethod
    def tearDownClass(cls):
        for e in cls.reference.values():
            e.close()
        cls.directory.cleanup()

    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        self.addCleanup(lambda: self.daemon.stop())

    @classmethod
    def start(cls, socket, policy, environment=(), settings=(), **more):
        environment = {"PYTHONPATH": os.path.join(TOP, "client/python") + ":" + cls.plugin, **dict(environment)}
        if policy is not None:
            more.setdefault("attention_backend", "CUSTOM")
            settings = {"sparse": policy, "retry_interval": 0.2, **dict(settings)}
        return Engine(socket, cls.model, connector=policy is not None, environment=environment, settings=settings, **{**SIZES, **more})

    def engine(self, policy=SOME, **more):
        e = self.start(self.daemon.socket, policy, **more)
        self.addCleanup(e.close)
        return e.ready()

    def expected(self, policy, prompts, outputs):
        """Answers of an engine without a connector, or of one that finds no daemon; each prompt alone."""
        if policy not in self.reference:
            self.reference[policy] = self.start("/nonexistent/ucmd.sock", policy, settings={"connect_timeout": 0.5}).ready()
        for p in prompts:
            key = policy, tuple(p), outputs
            if key not in self.known:
                self.known[key] = self.reference[policy].generate([p], outputs)[0][0]
        return [self.known[policy, tuple(p), outputs] for p in prompts]

    def same(self, e, prompts, outputs=100, policy=SOME):
        e.ask(prompts, outputs)
        return self.answered(e, prompts, outputs, policy)

    def answered(self, e, prompts, outputs=100, policy=SOME):
        answer = e.answer()
        self.assertEqual(answer["tokens"], self.expected(policy, prompts, outputs))
        return answer

    PROMPTS = [prompt(i, 700 + 50 * i) for i in range(3)] + [prompt(9, 100)]

    def test_a_policy_that_takes_everything_is_dense(self):
        a, dense = self.engine(ALL), self.expected(None, self.PROMPTS, 100)
        self.assertEqual(self.expected(ALL, self.PROMPTS, 100), dense)
        counts = self.same(a, self.PROMPTS, policy=ALL)["sparse"]
        self.assertGreater(counts["given_back"], 60)
        self.assertGreater(counts["gathered"], 0)
        a.close()
        b = self.engine(ALL)
        answer = self.same(b, self.PROMPTS, policy=ALL)
        self.assertEqual(answer["cached"], [672, 736, 799, 96])
        self.assertEqual(answer["sparse"]["spared"], 19 + 21 + 22)

    def test_the_same_wherever_blocks_lie(self):
        a = self.engine()
        self.assertNotEqual(self.expected(SOME, self.PROMPTS, 100)[:3], self.expected(None, self.PROMPTS, 100)[:3])
        for _ in range(2):
            counts = self.same(a, self.PROMPTS)["sparse"]
        self.assertGreater(counts["given_back"], 120)
        self.assertGreater(counts["misses"], 500)
        a.close()
        # Hits without pages, of prompts cut into steps.
        b = self.engine(max_num_batched_tokens=64)
        counts = self.same(b, self.PROMPTS)["sparse"]
        self.assertGreater(counts["spared"], 60)
        self.assertEqual(counts["lost"], 0)

    def test_preemption(self):
        """Requests that need all pages until their prompts are computed, and entries for two of them at most."""
        e = self.engine(num_gpu_blocks_override=70, settings={"sparse_room": 2})
        prompts = [prompt(40 + i, 1000 + 100 * i) for i in range(5)]
        counts = self.same(e, prompts, 150)["sparse"]
        self.assertGreater(counts["given_back"], 100)

    def test_layers_that_share_a_choice(self):
        policy = SOME + ",dense_first=1,reuse=2"
        e = self.engine(policy)
        for _ in range(2):
            counts = self.same(e, self.PROMPTS, policy=policy)["sparse"]
        self.assertGreater(counts["given_back"], 120)

    def test_a_second_turn_finds_no_sparse_tokens_as_its_prompt(self):
        e = self.engine()
        first = [prompt(60, 700)]
        answer = self.same(e, first)["tokens"][0]
        second = [first[0] + answer + prompt(61, 50)]
        self.assertEqual(self.same(e, second)["cached"], [672])

    def test_a_server_with_the_flags_of_the_manual(self):
        plugin = {"PYTHONPATH": os.path.join(TOP, "client/python") + ":" + self.plugin}
        flags = ["--attention-backend", "CUSTOM", "--no-async-scheduling", "--block-size", "32"]
        server = Server(self.daemon.socket, self.model, {"sparse": SOME}, flags, plugin)
        self.addCleanup(server.close)
        server.ready()
        asked = prompt(65, 700)
        for hit in (0, 672):
            tokens, cached = complete(server.url, self.model, asked, 40)
            self.assertEqual([tokens], self.expected(SOME, [asked], 40))
            self.assertEqual(cached or 0, hit)
        self.assertGreater(self.gathered(), 0)

    def gathered(self):
        ucmctl = [os.path.join(os.path.dirname(os.environ["UCMD"]), "ucmctl"), "--socket", self.daemon.socket, "--json", "stats"]
        return json.loads(subprocess.run(ucmctl, capture_output=True, check=True).stdout)["metrics"]["gather_items"]

    def test_two_ranks(self):
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
        e = self.engine(ALL, **ranks)
        for _ in range(2):
            self.same(e, self.PROMPTS, policy=ALL)

    def test_the_daemon_dies_and_comes_back(self):
        e, prompts = self.engine(), [prompt(70 + i, 900) for i in range(3)]
        self.same(e, prompts)
        before = self.same(e, prompts, 20)["sparse"]
        e.ask(prompts, 400)
        time.sleep(1.0)
        socket = self.daemon.socket
        self.daemon.process.send_signal(signal.SIGKILL)
        self.daemon.process.wait()
        after = self.answered(e, prompts, 400)["sparse"]
        self.assertGreater(after["lost"], before["lost"])
        self.daemon = Daemon(nvme=False, socket=socket, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        self.same(e, [prompt(80, 800)])
        deadline = time.monotonic() + 60
        while self.same(e, [prompt(81, 800)])["sparse"]["given_back"] == after["given_back"]:
            self.assertLess(time.monotonic(), deadline)

    def test_eviction(self):
        """Leases of a sequence, and of a hit before its request has a sequence."""
        e, prompts = self.engine(), [prompt(90 + i, 900) for i in range(3)]
        self.same(e, prompts)
        e.close()
        e, stop = self.engine(), threading.Event()

        def evict():
            ucmctl = [os.path.join(os.path.dirname(os.environ["UCMD"]), "ucmctl"), "--socket", self.daemon.socket]
            while not stop.wait(0.05):
                subprocess.run([*ucmctl, "evict", "1", "--yes"], capture_output=True, check=True)

        thread = threading.Thread(target=evict)
        thread.start()
        try:
            for _ in range(2):
                self.same(e, prompts)
        finally:
            stop.set()
            thread.join()

    def test_refusals_name_the_remedy(self):
        """Tests that need no vLLM are in test_vllm_sparse_parts.py."""
        for words, more in (("start with --attention-backend CUSTOM", {"environment": {"VLLM_PLUGINS": ""}}),
                            ("with it alone", {"beside": {"socket": self.daemon.socket}}),
                            ("did you mean", {"policy": "topk:topk_token=5"})):
            with self.subTest(words), self.assertRaisesRegex(Refused, words):
                self.engine(**more)


if __name__ == "__main__":
    check_vllm.WAIT_S = 300
    unittest.main(verbosity=2)
