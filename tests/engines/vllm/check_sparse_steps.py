#!/usr/bin/env python3
"""Sparse decoding's half of a GPU worker in a real vLLM without a GPU, a part of `make check-vllm`.
It has vLLM's scheduler and runner, a real daemon with a mapping, and the kernels of
sparse_on_cpu.py. It tests what check_sparse_gpu.py tests on a GPU, except speed."""

import unittest

from gpu_engine import prompt
from sparse_scenarios import Scenarios, said

ALL = "topk:topk_tokens=8192,dense_below=128"


class Steps(Scenarios, unittest.TestCase):
    SIZES = {"dtype": "float32", "max_model_len": 1024, "block_size": 32, "max_num_seqs": 8, "max_num_batched_tokens": 256, "enforce_eager": True}
    ENGINES = {
        "dense": (None, {}),
        "all": (64, {"sparse": ALL, "cpu": {"others": 5}}),
        "preempted": (64, {"sparse": ALL, "cpu": {"preempts": True, "others": 7, "short": 53}}),
        "few": (0, {"sparse": ALL, "cpu": {"others": 5}, "num_gpu_blocks_override": 33}),
        "short": (8, {"sparse": ALL, "cpu": {"others": 7, "short": 17}}),
    }
    PROMPTS = [prompt(i, n) for i, n in enumerate((300, 170, 415))] + [prompt(9, 60)]
    MORE = [prompt(40 + i, 500) for i in range(6)]
    SOME, PAGES, AT_ONCE = 80, 15, False

    def test_a_policy_that_takes_everything_is_dense(self):
        self.everything("all")

    def test_evictions_and_purges(self):
        self.goes_on("all")

    def test_evictions_and_purges_where_steps_cant_be_taken_back(self):
        self.goes_on("preempted")

    def test_aborts(self):
        self.gives_up("all")

    def test_preemption(self):
        self.preempts("few")

    def test_steps_that_came_short_are_computed_again(self):
        self.gathers("short")
        counts = said(self.engines["short"].generate(self.PROMPTS))["counts"]
        self.assertGreater(counts["repeated"], 20)
        self.assertEqual(counts["lost"], 0)

    def test_steps_that_came_short_and_cant_be_taken_back(self):
        for again in False, True:
            answer = said(self.engine("preempted").generate(self.PROMPTS, reset=again))
            self.right("preempted", answer)
        self.assertGreater(answer["counts"]["lost"], 0)
        self.assertEqual(answer["counts"]["repeated"], 0)

    def test_zz_the_daemon_dies_and_comes_back(self):
        self.dies("all")

    def test_zz_the_daemon_dies_where_steps_cant_be_taken_back(self):
        self.dies("preempted")


if __name__ == "__main__":
    unittest.main(verbosity=2)
