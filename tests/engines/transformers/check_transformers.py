#!/usr/bin/env python3
"""ucmclient.blend.transformers over a real daemon, with a small Llama of random weights. Needs torch and transformers: make check-transformers. On a GPU
if $UCM_TEST_CUDA, which says what the daemon does with GPUs, is not off: then without a copy agent and with one."""

import copy
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

TOP = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(TOP / "client/python"), str(TOP / "tests/integration")]
os.environ.setdefault("UCMCLIENT_LIB", str(TOP / "build/libucmclient.so"))

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM  # noqa: E402

from daemon import Daemon  # noqa: E402
from ucmclient import Client, CopyAgent, blend  # noqa: E402
from ucmclient.blend import Asked, First, Hkvd, Nothing, Span  # noqa: E402
from ucmclient.blend.transformers import Runner, rope_of  # noqa: E402
from ucmclient.memory import cuda_allocation  # noqa: E402

DEVICE = "cpu" if os.environ.get("UCM_TEST_CUDA", "off") == "off" else "cuda"
torch.manual_seed(1)
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
SHAPE = dict(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=1024)
MODEL = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=SCALED)).eval().to(DEVICE)
A = [int(i) for i in torch.randint(0, 90, (70,))]
C = [int(i) for i in torch.randint(0, 90, (50,))]
QUESTION = [91, 92, 93, 94, 95]


def reference(tokens, model=MODEL):
    with torch.no_grad():
        return model(torch.tensor([tokens], device=DEVICE)).logits[0, -1].float()


class Case(unittest.TestCase):
    copy_agent = False

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="runner.")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.daemon = Daemon(directory=self.directory, **{"arena.size": "64MiB"})
        self.addCleanup(lambda: self.daemon.stop())
        self.runner = self.open()

    def open(self, model=MODEL, **more):
        self.client = Client(socket=self.daemon.socket, name="runner")
        self.addCleanup(self.client.close)
        if self.copy_agent:
            more["copy_agent"] = CopyAgent(self.client, cuda_allocation(torch.zeros(1, device=DEVICE).data_ptr())[2])
        return Runner(model, self.client, name=self.id(), **{"blocks": 64, **more})

    def close_to(self, logits, other, most):
        self.assertLess(float((logits - other).abs().max()), most)

    def test_what_is_computed_in_full_is_what_the_model_computes(self):
        tokens = A + C + QUESTION
        for step in (0, 7, 16):
            logits, cache = self.runner.prefill(tokens, [], Nothing(), step=step, prefixes=False)
            self.close_to(logits, reference(tokens), 1e-4)
        out = self.runner.generate(tokens, logits, cache, 4)
        with torch.no_grad():
            self.assertEqual(out, MODEL.generate(torch.tensor([tokens], device=DEVICE), max_new_tokens=4, do_sample=False, eos_token_id=None)[0, len(tokens):].tolist())

    def test_turned_k_is_what_the_position_gives_in_layer_0(self):
        """Its K and V depend on the token and its position alone."""
        self.assertEqual(self.runner.store(A), 4)
        self.assertEqual(self.runner.store(A), 0, "it is there")
        tokens = QUESTION + A + QUESTION + A
        spans = [Span(5, 75), Span(80, 150)]
        _, full = self.runner.prefill(tokens, [], Nothing(), prefixes=False)
        _, cache = self.runner.prefill(tokens, spans, Nothing(), prefixes=False)
        self.assertEqual(len(self.runner.last_plan.loads), 8)
        self.close_to(cache.layers[0].keys, full.layers[0].keys, 1e-4)
        self.close_to(cache.layers[0].values, full.layers[0].values, 1e-5)
        self.assertGreater(float((cache.layers[3].keys - full.layers[3].keys).abs().max()), 1e-3, "later layers know what stands before")

    def test_bfloat16_is_within_its_bounds(self):
        half = copy.deepcopy(MODEL).to(torch.bfloat16)
        runner = self.open(half)
        runner.store(A)
        tokens, spans = QUESTION + A + QUESTION + A, [Span(5, 75), Span(80, 150)]
        _, full = runner.prefill(tokens, [], Nothing(), prefixes=False)
        _, cache = runner.prefill(tokens, spans, Nothing(), prefixes=False)
        turned, fresh = (of.layers[0].keys[0, :, 5:69].float() for of in (cache, full))
        pair = fresh.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 2)
        # The model rounds cosine, sine, two products and a sum, both for the stored and the fresh
        # KV. The re-rotation rounds once. That makes 11 halves of 2^-8.
        self.assertLess(float(((turned - fresh).abs() / pair).max()), 11 * 2**-9)
        self.close_to(cache.layers[0].values[0, :, 5:69], full.layers[0].values[0, :, 5:69], 2**-7 * float(full.layers[0].values.abs().max()))
        # All of it computed again differs from float32 by at most twice as much as the model itself
        # in this dtype.
        right, own = reference(tokens), float((reference(tokens, half) - reference(tokens)).abs().max())
        for policy, step in ((First(70), 0), (First(70), 40), (Hkvd(1.0), 0)):
            logits, _ = runner.prefill(tokens, spans, policy, step=step, prefixes=False)
            self.close_to(logits, right, 2 * own)

    def test_the_more_is_computed_the_closer(self):
        self.runner.store(A), self.runner.store(C)
        tokens, spans = QUESTION + A + C + QUESTION, [Span(5, 75), Span(75, 125)]
        full, _ = self.runner.prefill(tokens, [], Nothing(), prefixes=False)
        off = {}
        for name, policy in (("none", Nothing()), ("all", First(70)), ("most", Hkvd(1.0)), ("some", Hkvd(0.5)), ("two", Hkvd({1: 0.5, 2: 0.25})),
                             ("asked all", Asked(1.0, first=4, depth=1.0)), ("asked some", Asked(0.5, first=4)), ("asked deep", Asked(0.5, first=4, depth=1.0))):
            for step in (0, 40):
                logits, _ = self.runner.prefill(tokens, spans, policy, step=step, prefixes=False)
                off[name, step] = float((logits - full).abs().max())
                whole = len(tokens)
                fresh = len(self.runner.last_plan.compute)
                if name.startswith("asked") and step == 0:
                    chosen, layers = -(-(whole - fresh) // 2), 3 if name == "asked some" else 4
                    chosen = whole - fresh if name == "asked all" else chosen
                    self.assertAlmostEqual(self.runner.computed_tokens, fresh + chosen * layers / 4 + len(QUESTION), delta=0.01)
                if name == "two" and step == 0:
                    reused = whole - fresh
                    self.assertAlmostEqual(self.runner.computed_tokens, (2 * whole + (fresh + -(-reused // 2)) + (fresh + -(-reused // 4))) / 4, delta=0.01)
        for name in ("all", "most"):
            for step in (0, 40):
                self.assertLess(off[name, step], 1e-4, name)
        self.assertGreater(off["none", 0], 1e-3)
        for name in ("some", "asked some"):
            self.assertLess(off[name, 0], off["none", 0], name)
            self.assertLess(off["asked all", 0], off["asked some", 0])
        self.assertAlmostEqual(off["asked some", 0], off["asked some", 40], delta=1e-4)

    def test_asked_computes_what_the_question_attends_to_most(self):
        """Compared with the weights that eager attention gives over the same cache."""
        eager = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=SCALED, attn_implementation="eager")).eval().to(DEVICE)
        eager.load_state_dict(MODEL.state_dict())
        self.runner.store(A), self.runner.store(C)
        documents, spans = A[:9] + A + C, [Span(9, 79), Span(79, 129)]
        _, cache = self.runner.prefill(documents, spans, First(4), prefixes=False)
        with torch.no_grad():
            at = torch.arange(len(documents), len(documents) + len(QUESTION), device=DEVICE)
            answer = eager(torch.tensor([QUESTION], device=DEVICE), position_ids=at[None], past_key_values=cache, output_attentions=True)
        told = {}

        class Noting(Asked):
            def choose(self, attended):
                told[self.queries] = attended, super().choose(attended)
                return told[self.queries][1]

        for queries in (64, 2):
            computed = []
            compute = self.runner._compute
            self.runner._compute = lambda tokens, plan, *at, **more: (computed.append(plan), compute(tokens, plan, *at, **more))[1]
            self.runner.prefill(documents + QUESTION, spans, Noting(0.1, first=4, queries=queries), prefixes=False)
            self.runner._compute = compute
            reused = self.runner.last_plan.reused
            want = sum(of[0, :, -queries:].sum((0, 1)) for of in answer.attentions)[list(reused)]
            self.close_to(torch.tensor(told[queries][0]), want.cpu(), 1e-4)
            self.assertEqual(len(told[queries][1]), -(-len(reused) // 10))
            behind = tuple(range(len(documents), len(documents) + len(QUESTION)))
            self.assertEqual(computed[-1].compute, tuple(reused[i] for i in told[queries][1]) + behind)
            self.assertGreaterEqual(float(want[told[queries][1]].min()), float(want.median()))

    def test_a_chunk_at_two_positions_across_a_restart_alongside_prefix_hits_and_in_steps(self):
        self.runner.store(A), self.runner.store(C)
        system = [int(i) for i in range(40)]
        first = system + C + QUESTION + A + QUESTION
        spans = [Span(40, 90), Span(95, 165)]
        before, _ = self.runner.prefill(first, spans, First(4))
        self.assertEqual((self.runner.last_plan.prefix, self.runner.last_plan.exact), (0, 40))
        self.runner.close()
        self.client.close()
        self.assertEqual(self.daemon.stop(), 0)
        self.daemon = Daemon(directory=self.directory, **{"arena.size": "64MiB"})
        runner = self.open()
        again, _ = runner.prefill(first, spans, First(4), step=32)
        self.assertEqual(runner.last_plan.prefix, 32, "the exact blocks of the first time, and no more")
        self.close_to(before, again, 1e-4)
        other = system + A + QUESTION + C + QUESTION  # the same chunks elsewhere
        logits, cache = runner.prefill(other, [Span(40, 110), Span(115, 165)], First(4))
        self.assertEqual((runner.last_plan.prefix, len(runner.last_plan.loads)), (32, 7))
        self.assertEqual(len(runner.generate(other, logits, cache, 3)), 3)

    def test_what_is_lost_meanwhile_is_computed(self):
        self.runner.store(A)
        tokens, spans = QUESTION + A, [Span(5, 75)]
        lookup = self.runner.chunks.lookup

        def loses(*args, **more):
            found = lookup(*args, **{**more, "lease": 0})
            # Blocks that are being written to NVMe go a moment later.
            self.daemon.until(lambda: self.runner.chunks._ns.evict([found.keys[0][1]])[1] == 0, "keeps a block")
            return found

        self.runner.chunks.lookup = loses
        logits, _ = self.runner.prefill(tokens, spans, First(70), prefixes=False)
        self.runner.chunks.lookup = lookup
        self.close_to(logits, reference(tokens), 1e-4)
        self.runner.prefill(tokens, spans, Nothing(), prefixes=False)
        self.assertEqual([load.block for load in self.runner.last_plan.loads], [0, 2, 3])

    def test_dynamic_scaling_past_the_trained_length_computes(self):
        shape = {**SHAPE, "max_position_embeddings": 128, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
        runner = self.open(LlamaForCausalLM(LlamaConfig(**shape)).eval().to(DEVICE))
        runner.store(A)
        for before, loads in ((20, 4), (100, 0)):
            tokens = [1] * before + A + QUESTION
            spans = [Span(before, before + len(A))]
            _, full = runner.prefill(tokens, [], Nothing(), prefixes=False)
            _, cache = runner.prefill(tokens, spans, Nothing(), prefixes=False)
            self.assertEqual(len(runner.last_plan.loads), loads)
            self.close_to(cache.layers[0].keys, full.layers[0].keys, 1e-4)

    def test_models_that_can_not_be_are_refused(self):
        windowed = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=32))
        with self.assertRaisesRegex(ValueError, "attends through a window"):
            self.open(windowed)
        config = LlamaConfig(**SHAPE)
        config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
        with self.assertRaisesRegex(ValueError, "rope_type is 'longrope'; default, linear"):
            rope_of(config, 16)
        flexible = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="flex_attention"))
        with self.assertRaisesRegex(ValueError, "attends by 'flex_attention', which takes no mask of chosen positions"):
            self.open(flexible)
        scattered = LlamaForCausalLM(LlamaConfig(**SHAPE))
        scattered.lm_head.to("meta")
        with self.assertRaisesRegex(ValueError, "lies on cpu, meta; chunks need it on the CPU or on one CUDA GPU"):
            self.open(scattered)
        with self.assertRaisesRegex(ValueError, "5 blocks are to move at once, the pages hold 4"):
            self.open(blocks=4).store(A + [1] * 10)

    def test_eager_attention_sees_no_more_than_sdpa(self):
        """Without a mask it would see all tokens."""
        eager = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=SCALED, attn_implementation="eager")).eval().to(DEVICE)
        eager.load_state_dict(MODEL.state_dict())
        runner = self.open(eager)
        runner.store(A)
        tokens, spans = QUESTION + A + QUESTION, [Span(5, 75)]
        for policy in (First(70), Hkvd(0.5)):
            self.close_to(runner.prefill(tokens, spans, policy, prefixes=False)[0], self.like(tokens, spans, policy), 1e-4)

    def like(self, tokens, spans, policy):
        self.runner.store(A)
        return self.runner.prefill(tokens, spans, policy, prefixes=False)[0]


@unittest.skipIf(DEVICE == "cpu", "copy agents are for GPUs")
class WithCopyAgent(Case):
    copy_agent = True


if __name__ == "__main__":
    unittest.main(verbosity=2)
