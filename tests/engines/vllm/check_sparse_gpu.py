#!/usr/bin/env python3
"""Sparse decoding in a real vLLM on a GPU (`make check-vllm-gpu`, which needs both): small models with random weights, and a real daemon
with a mapping. GPU kernels of different shapes round differently, so answers are compared by their log probabilities, and by their
tokens where steps were alike."""

import os
import unittest

from gpu_engine import prompt
from sparse_scenarios import CLOSE, Scenarios, said

os.environ["UCM_TEST_CUDA"] = "required"

ALL = "topk:topk_tokens=8192,dense_below=512"
SOME = "topk:topk_tokens=256,dense_below=512"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
#: vLLM 0.33 takes the newer one unless a setting says otherwise.
OLDER, NEWER = ({"environment": {"VLLM_USE_V2_MODEL_RUNNER": number}} for number in "01")


class Sparse(Scenarios, unittest.TestCase):
    SIZES = {"max_model_len": 4096, "max_num_seqs": 8, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20, "dtype": "bfloat16",
             "compilation_config": GRAPHS}
    ENGINES = {
        "dense": (None, OLDER),
        "all": (256, {"sparse": ALL, **OLDER}),
        "some": (256, {"sparse": SOME, "settings": {"sparse_room": 1}, **OLDER}),
        "eager": (256, {"sparse": SOME, "enforce_eager": True, "compilation_config": None, **OLDER}),
        "newer": (256, {"sparse": SOME, **NEWER}),
        "newer, all": (256, {"sparse": ALL, **NEWER}),
        "pieces": (256, {"sparse": ALL, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 16 << 20, **OLDER}),
        "few": (0, {"sparse": ALL, "kv_cache_memory_bytes": 10 << 20, **OLDER}),
        "short": (8, {"sparse": ALL, **OLDER}),
        "unmapped": (0, {"sparse": SOME, **OLDER}),
    }
    #: Not "some": that one has memory for fewer requests at once, so its batches have other shapes.
    REFERENCES = {"eager": ("newer", CLOSE), "newer": ("eager", CLOSE), "unmapped": ("eager", CLOSE)}
    SOME = 400
    PROMPTS = [prompt(i, 1500 + 333 * i) for i in range(3)] + [prompt(9, 200)]
    MORE = [prompt(40 + i, 2500) for i in range(6)]

    def test_a_policy_that_takes_everything_is_dense(self):
        self.everything("all")

    def test_everything_by_the_newer_runner(self):
        self.everything("newer, all")

    def lives(self, name):
        """Hits, graphs, batches, what was resident."""
        first, e = self.of(name), self.engine(name)
        self.giving_back(e, 500, lambda answer: self.alike(answer, first))
        self.alike(first, self.of("dense"), [3])
        alone = [e.generate([p]) for p in self.PROMPTS[:3]]
        others = e.generate([prompt(20 + i, 3000 + 100 * i) for i in range(6)])  # they take the entries
        again = [e.generate([p]) for p in self.PROMPTS[:3]]
        said(again[-1])
        for i, (one, two) in enumerate(zip(alone, again)):  # steps of the same shapes: the same bits
            self.alike({name: one[name] * (i + 1) for name in ("tokens", "logprobs")}, first, [i])
            self.assertEqual((one["tokens"], one["logprobs"]), (two["tokens"], two["logprobs"]), f"prompt {i}")
        self.assertGreater(again[-1]["counts"]["mapped"], others["counts"]["mapped"])
        self.assertLessEqual(again[-1]["counts"]["sequences"], 1)  # the last one's is closed by the next step
        self.alike(said(e.generate(self.PROMPTS, reset=True)), first)

    def test_the_same_wherever_blocks_lie(self):
        self.lives("some")
        with self.assertRaises(AssertionError, msg="the policy is too good to be seen at work"):
            self.alike(self.of("some"), self.of("dense"), [0, 1, 2])

    def test_eagerly(self):
        self.lives("eager")
        self.right("eager", self.of("eager"))

    def test_the_newer_runner(self):
        self.lives("newer")
        self.right("newer", self.of("newer"))

    # ---- what goes wrong ----

    def test_evictions_and_purges(self):
        self.goes_on("eager")
        self.goes_on("all", loses=False)

    def test_evictions_and_purges_with_the_newer_runner(self):
        self.goes_on("newer")
        self.goes_on("newer, all", loses=False)

    def test_aborts(self):
        self.gives_up("all")

    def test_aborts_with_the_newer_runner(self):
        self.gives_up("newer, all")

    def test_prompts_in_pieces(self):
        self.everything("pieces")

    def test_preemption(self):
        self.preempts("few")

    def test_zz_the_daemon_dies_and_comes_back(self):
        self.dies("eager")
        self.dies("pieces", loses=False)

    def test_zz_the_daemon_dies_with_the_newer_runner(self):
        self.dies("newer")
        self.dies("newer, all", loses=False)

    def test_a_mapping_that_is_too_small(self):
        self.gathers("short")

    def test_without_a_mapping(self):
        """Pages stay. Blocks that hits brought are gathered, and steps are computed again."""
        first, e = self.of("unmapped"), self.engine("unmapped")
        self.right("unmapped", first)
        for again in False, True:
            self.alike(said(e.generate(self.PROMPTS, reset=again)), first)


if __name__ == "__main__":
    unittest.main(verbosity=2)
