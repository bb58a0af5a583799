#!/usr/bin/env python3
"""Models whose layers keep their KV in several ways, in a real vLLM, a part of `make check-vllm`.
An engine generates the same tokens, with the same probabilities, with the cache and without."""

import os
import subprocess
import tempfile
import unittest

import check_vllm as real
from check_vllm import BLOCK, Engine, Refused, prompt
from daemon import Daemon

#: Tolerance of log probabilities: kernels add in another order if a batch has another shape.
NEAR = 2e-5
#: Qwen3-Next's kernels for CPUs take bfloat16 only, and vLLM then has blocks of so many tokens.
STATES, STATE_BLOCK = {"dtype": "bfloat16", "enable_prefix_caching": True}, 1152
NEAR_STATES = 0.1
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


class Hybrid(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        subprocess.run([real.PYTHON, real.ENGINE, "hybrid", cls.directory.name], check=True, stderr=subprocess.DEVNULL, timeout=real.WAIT_S)

        cls.without = {}

    @classmethod
    def tearDownClass(cls):
        for e in cls.without.values():
            e.close()
        cls.directory.cleanup()

    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        self.addCleanup(lambda: self.daemon.stop())

    def engines(self, name, n=2, **more):
        more = {**(STATES if name == "qwen3next" else {}), **more}
        started = [Engine(self.daemon.socket, os.path.join(self.directory.name, name), **more) for _ in range(n)]
        for e in started:
            self.addCleanup(e.close)
        for e in started:
            e.ready()
        return started

    def plain(self, name):
        """An engine without a connector, which computes each prompt alone."""
        if name not in self.without:
            more = STATES if name == "qwen3next" else {}
            self.without[name] = Engine(None, os.path.join(self.directory.name, name), connector=False,
                                        **{**more, "enable_prefix_caching": False}).ready()
        return self.without[name]

    def metrics(self):
        return self.daemon.metrics()

    @staticmethod
    def ask(e, prompts, outputs):
        e.ask(prompts, outputs, logs=0)
        return e.answer()

    def same(self, e, name, prompts, outputs=8):
        """The engine's answer. Checks that an engine without a cache gives the same."""
        got = self.ask(e, prompts, outputs)
        for i, one in enumerate(prompts):
            want = self.ask(self.plain(name), [one], outputs)
            self.assertEqual(got["tokens"][i], want["tokens"][0])
            for a, b in zip(got["logs"][i], want["logs"][0]):
                self.assertAlmostEqual(a, b, delta=NEAR_STATES if name == "qwen3next" else NEAR)
        return got

    def share(self, name, n=2):
        a, b, *more = self.engines(name, n)
        self.same(a, name, [prompt(1, 1000)])
        self.assertEqual(self.same(b, name, [prompt(1, 1000)])["cached"], [1000 // BLOCK * BLOCK])
        self.same(a, name, [prompt(2, 1024)])
        self.assertEqual(self.same(b, name, [prompt(2, 1024)])["cached"], [1023])
        cold = self.same(a, name, [prompt(3, 500)], outputs=300)
        turn = prompt(3, 500) + cold["tokens"][0] + prompt(4, 20)
        self.assertEqual(self.same(b, name, [turn])["cached"], [799 // BLOCK * BLOCK])
        return a, b, *more

    def test_windows_as_gemma_3_has_them(self):
        """Three groups."""
        a, b, c = self.share("gemma3", 3)
        # For a long prompt, 23 blocks of full attention are stored. So are two windows of 256
        # tokens and one token more, at each of 1024, 2048 and 2944.
        before = self.metrics()["dump_blocks"]
        self.same(a, "gemma3", [prompt(5, 3000)])
        stored = self.metrics()["dump_blocks"] - before
        self.assertEqual(stored, 23 + 2 * 3 * 2)
        before = self.metrics()["load_blocks_dram"]
        self.assertEqual(self.same(b, "gemma3", [prompt(5, 3000)])["cached"], [2944])
        self.assertEqual(self.metrics()["load_blocks_dram"] - before, 23 + 2 * 2)
        # Prompts share a beginning. Full attention's blocks are there for the second prompt, and
        # all blocks for the third.
        cached = [self.same(e, "gemma3", [prompt(10 + i, 1500, shared=1000)])["cached"] for i, e in enumerate((a, b, c))]
        self.assertEqual(cached, [[0], [0], [896]])
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.assertEqual(self.same(c, "gemma3", [prompt(5, 3000)])["cached"], [0])
        self.daemon = Daemon(nvme=False, socket=self.daemon.socket, **{"arena.size": "256MiB", "arena.slab": "4MiB"})

    def test_layers_that_leave_a_remainder(self):
        """The last group has fewer layers, so its blocks are of another kind."""
        self.share("gemma3-odd")

    def test_windows_as_gpt_oss_has_them(self):
        self.share("gptoss")

    def test_chunks_and_preemption(self):
        """Prompts come in pieces, and the pages are too few for all at once."""
        a, b = self.engines("gemma3", num_gpu_blocks_override=64, max_num_batched_tokens=256)
        prompts = [prompt(20 + i, 900 + 100 * i, shared=600) for i in range(5)]
        self.same(a, "gemma3", prompts, outputs=150)
        got = self.same(b, "gemma3", prompts, outputs=150)
        self.assertGreaterEqual(sum(got["cached"]), 5 * 512)

    def test_states_as_qwen3_next_has_them(self):
        """Three groups of states, and one of full attention."""
        a, b = self.engines("qwen3next")
        self.same(a, "qwen3next", [prompt(1, 3000)])
        stored = self.metrics()["dump_blocks"]
        self.assertEqual(stored, 2 + 3)  # full attention's, and the states at the last multiple
        self.assertEqual(self.same(b, "qwen3next", [prompt(1, 3000)])["cached"], [2 * STATE_BLOCK])
        self.assertEqual(self.metrics()["load_blocks_dram"], 2 + 3)
        self.same(a, "qwen3next", [prompt(2, 2 * STATE_BLOCK)])
        self.assertEqual(self.same(b, "qwen3next", [prompt(2, 2 * STATE_BLOCK)])["cached"], [STATE_BLOCK])
        cold = self.same(a, "qwen3next", [prompt(3, 1400)], outputs=20)
        turn = prompt(3, 1400) + cold["tokens"][0] + prompt(4, 20)
        self.assertEqual(self.same(b, "qwen3next", [turn])["cached"], [STATE_BLOCK])
        # Prompts share a beginning. The second one finds full attention's blocks but no state, and
        # leaves one there.
        cached = [self.same(e, "qwen3next", [prompt(10 + i, 3600, shared=1500)])["cached"] for i, e in enumerate((a, b, a))]
        self.assertEqual(cached, [[0], [0], [STATE_BLOCK]])
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.assertEqual(self.same(b, "qwen3next", [prompt(5, 2000)])["cached"], [0])
        self.daemon = Daemon(nvme=False, socket=self.daemon.socket, **{"arena.size": "256MiB", "arena.slab": "4MiB"})

    def test_states_as_nemotron_h_has_them(self):
        """Two groups of states, of two layers and of one, and two layers of full attention, in blocks of 256."""
        a, b = self.engines("nemotron")
        self.same(a, "nemotron", [prompt(1, 1000)])
        self.assertEqual(self.metrics()["dump_blocks"], 3 + 2)
        self.assertEqual(self.same(b, "nemotron", [prompt(1, 1000)])["cached"], [768])
        self.same(a, "nemotron", [prompt(2, 1024)])
        self.assertEqual(self.same(b, "nemotron", [prompt(2, 1024)])["cached"], [768])
        cold = self.same(a, "nemotron", [prompt(3, 500)], outputs=300)
        turn = prompt(3, 500) + cold["tokens"][0] + prompt(4, 20)
        self.assertEqual(self.same(b, "nemotron", [turn])["cached"], [768])
        cached = [self.same(e, "nemotron", [prompt(10 + i, 1500, shared=600)])["cached"] for i, e in enumerate((a, b, a))]
        self.assertEqual(cached, [[0], [0], [512]])

    def test_states_in_pieces_and_preemption(self):
        a, b = self.engines("nemotron", num_gpu_blocks_override=40, max_num_batched_tokens=512)
        prompts = [prompt(20 + i, 900 + 100 * i, shared=600) for i in range(5)]
        self.same(a, "nemotron", prompts, outputs=150)
        got = self.same(b, "nemotron", prompts, outputs=150)
        self.assertGreaterEqual(sum(got["cached"]), 5 * 512)

    def test_states_in_two_ranks(self):
        a, b = self.engines("qwen3next", **RANKS)
        self.same(a, "qwen3next", [prompt(1, 3000)])
        self.assertEqual(self.same(b, "qwen3next", [prompt(1, 3000)])["cached"], [2 * STATE_BLOCK])

    def test_states_in_the_midst_of_an_answer(self):
        a, b = self.engines("qwen3next", settings={"window_interval": STATE_BLOCK})
        cold = self.ask(a, [prompt(3, 2100)], 300)
        turn = prompt(3, 2100) + cold["tokens"][0] + prompt(4, 20)
        self.assertEqual(self.same(b, "qwen3next", [turn])["cached"], [2 * STATE_BLOCK])

    def test_states_and_preemption(self):
        """Pages are too few for all prompts at once."""
        a, b = self.engines("qwen3next", num_gpu_blocks_override=18)
        prompts = [prompt(20 + i, 1300 + 100 * i, shared=1200) for i in range(5)]
        self.ask(a, prompts, 150)
        got = self.same(b, "qwen3next", prompts, outputs=4)
        self.assertGreaterEqual(sum(got["cached"]), 4 * STATE_BLOCK)

    def test_two_ranks(self):
        a, b = self.engines("gemma3", **RANKS)
        self.same(a, "gemma3", [prompt(1, 1000)])
        self.assertEqual(self.same(b, "gemma3", [prompt(1, 1000)])["cached"], [896])

    def test_what_is_refused(self):
        model = os.path.join(self.directory.name, "gemma3")
        for settings, words in (({"encoding": "lossless"}, "remove the setting 'encoding'"), ({"async_load": False}, "async_load")):
            e = Engine(self.daemon.socket, model, settings=settings)
            self.addCleanup(e.close)
            with self.assertRaises(Refused) as caught:
                e.ready()
            self.assertIn(words, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
