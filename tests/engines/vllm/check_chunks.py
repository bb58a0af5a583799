#!/usr/bin/env python3
"""The connector's setting `chunks` in a real vLLM, a part of `make check-vllm`. Prompts that are
sent in pieces get the answers of `ucmclient.blend.transformers` with the same chunks and policy.
All others get the same as without a cache. vLLM's kernels for CPUs keep the tokens of a channel
side by side. Those for GPUs keep the channels of a token side by side, as the attention of
rows_on_cpu.py does. Runs in a Python that has vLLM."""

import os
import shutil
import sys
import tempfile
import unittest
from types import SimpleNamespace

import check_vllm as real  # sets paths
from check_vllm import Engine, Refused, prompt
import chunks_in_vllm
from daemon import Daemon

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from ucmclient import Client, blend  # noqa: E402
from ucmclient.blend import First, Nothing, Span  # noqa: E402
from ucmclient.blend.pieces import STORE_BODY  # noqa: E402
from ucmclient.blend.transformers import Runner  # noqa: E402
from ucmclient.engine.vllm import chunk_rope, chunk_rules  # noqa: E402
from ucmclient.engine.vllm.identity import Unsupported  # noqa: E402

BLOCK = 32
#: Tolerance of log probabilities: kernels add in another order if a batch has another shape.
NEAR = 2e-3
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
A, C = prompt(1, 140), prompt(2, 230)  # 4 and 7 whole blocks
SYSTEM, QUESTION = prompt(3, 64), prompt(4, 9)
MIXED = SYSTEM + A + prompt(5, 20) + C + prompt(6, 26) + A + QUESTION
FIRST = First(32)
SPANS = [Span(64, 204), Span(224, 454), Span(480, 620)]


def small_model(directory):
    """Llama with random weights whose tokens attend to some others by far more than to the rest."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=512,
        max_position_embeddings=4096, initializer_range=0.2, rope_parameters=ROPE)).save_pretrained(directory)


def make_plugin(directory):
    """A package for vLLM, for processes that have the directory in their path. Its attention is
    that of rows_on_cpu.py."""
    os.makedirs(os.path.join(directory, "rows_on_cpu-1.dist-info"))
    for name, text in ("METADATA", "Metadata-Version: 2.1\nName: rows-on-cpu\nVersion: 1\n"), ("entry_points.txt", "[vllm.general_plugins]\nrows = rows_on_cpu:serve\n"):
        with open(os.path.join(directory, "rows_on_cpu-1.dist-info", name), "w") as out:
            out.write(text)
    shutil.copy(os.path.join(real.TOP, "tests/engines/vllm/rows_on_cpu.py"), directory)


class Reference:
    """The same model in `transformers`. An answer is its tokens, and the log probability of each."""

    def __init__(self, directory, socket):
        self.model = LlamaForCausalLM.from_pretrained(directory).eval()
        self.client = Client(socket=socket, name="reference")
        self.runner = Runner(self.model, self.client, name="reference", blocks=64, block_tokens=BLOCK)

    def blended(self, tokens, spans, policy, outputs=8):
        for chunk in {tuple(tokens[s.start : s.end]) for s in spans}:
            self.runner.store(list(chunk))
        logits, cache = self.runner.prefill(tokens, spans, policy, prefixes=False)
        out = [], []
        for position in range(len(tokens), len(tokens) + outputs):
            scores = torch.log_softmax(logits.float(), -1)
            out[0].append(int(scores.argmax()))
            out[1].append(float(scores.max()))
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([out[0][-1:]]), position_ids=torch.tensor([[position]]), past_key_values=cache).logits[0, -1]
        return out

    def full(self, tokens, outputs=8):
        return self.blended(tokens, [], Nothing(), outputs)

    def close(self):
        self.runner.close()
        self.client.close()


class Chunks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.model = os.path.join(cls.directory.name, "model")
        small_model(cls.model)
        plugin = os.path.join(cls.directory.name, "plugin")
        make_plugin(plugin)
        cls.rows = {"PYTHONPATH": f"{real.TOP}/client/python:{plugin}"}

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        self.addCleanup(lambda: self.daemon.stop())
        self.reference = Reference(self.model, self.daemon.socket)
        self.addCleanup(self.reference.close)

    def engine(self, **more):
        e = Engine(self.daemon.socket, self.model, settings={"chunks": True}, **{"block_size": BLOCK, **more})
        self.addCleanup(e.close)
        return e.ready()

    def stored(self):
        return self.daemon.metrics()["dump_blocks"]

    def fill(self, e, *chunks, ranks=1):
        before = self.stored()
        for chunk in chunks:
            e.generate([chunk], 1, transfer=STORE_BODY["kv_transfer_params"])
        want = before + ranks * sum(len(chunk) // BLOCK for chunk in chunks)
        self.daemon.until(lambda: self.stored() >= want, "stores chunks")
        self.assertEqual(self.stored(), want)

    @staticmethod
    def ask(e, tokens, outputs=8, **more):
        e.ask([tokens], outputs, logs=0, **more)
        got = e.answer()
        return (got["tokens"][0], got["logs"][0]), got["cached"][0]

    def answer(self, e, tokens, spans, policy, salt, outputs=8):
        """The last piece's answer, and how many tokens of each piece were not computed."""
        cached = []
        for piece in blend.pieces(tokens, spans, policy, block_tokens=BLOCK, salt=salt):
            more = {"cache_salt": piece.salt, "transfer": piece.body["kv_transfer_params"]}
            got, n = self.ask(e, list(piece.tokens), outputs if piece.last else 1, **more)
            cached.append(n)
        return got, cached

    def near(self, got, want):
        self.assertEqual(got[0], want[0])
        for a, b in zip(got[1], want[1]):
            self.assertAlmostEqual(a, b, delta=NEAR)

    def blended(self, policy=FIRST, outputs=8):
        return self.reference.blended(MIXED, SPANS, policy, outputs)

    def test_pieces_are_answered_as_the_blended_reference_answers(self):
        e, full = self.engine(), self.reference.full(MIXED)
        self.blended()  # stores the reference's chunks, which are counted, too
        self.fill(e, A, C)
        for policy, made, cached in (
            (Nothing(), Nothing(), [0, 64 + 128, 224 + 224, 480 + 128]),
            (First(32), First(32), [0, 96 + 96, 256 + 192, 512 + 96]),
            (First(100), First(128), [0, 352 + 96]),  # all that A has is computed
        ):
            with self.subTest(policy):
                before = self.stored()
                got, n = self.answer(e, MIXED, SPANS, policy, f"{policy}")
                self.near(got, self.blended(made))
                self.assertEqual(n, cached)
                self.assertGreater(abs(got[1][0] - full[1][0]), 10 * NEAR, "blended and full are too near to each other to tell")
                self.assertEqual(self.stored(), before)

    def test_who_gets_what_is_blended(self):
        e, full = self.engine(), self.reference.full(MIXED)
        self.fill(e, A, C)
        blended, _ = self.answer(e, MIXED, SPANS, FIRST, "mine")
        before = self.stored()
        for salt in "ucmd-chunks:other", "tenant", None:
            got, n = self.ask(e, MIXED, **({"cache_salt": salt} if salt else {}))
            self.near(got, full)
            self.assertEqual(n, 0)
        got, n = self.ask(e, MIXED, cache_salt="ucmd-chunks:mine")
        self.near(got, blended)
        self.assertEqual(n, 608)
        self.daemon.until(lambda: self.stored() == before + 2 * (len(MIXED) // BLOCK), "stores the prefixes that have no salt of chunks")
        # Another engine loads these, and chunks.
        other = self.engine()
        got, n = self.ask(other, MIXED)
        self.near(got, full)
        self.assertEqual(n, 608)
        self.near(self.answer(other, MIXED, SPANS, FIRST, "mine")[0], self.blended())

    def test_steps_smaller_than_a_prompt_and_fewer_pages_than_two_need(self):
        e, other, outputs = self.engine(max_num_batched_tokens=64, max_model_len=1024, num_gpu_blocks_override=33), prompt(8, 300), 80
        self.fill(e, A, C)
        *before, last = blend.pieces(MIXED, SPANS, FIRST, block_tokens=BLOCK, salt="mine")
        for piece in before:
            self.ask(e, list(piece.tokens), 1, cache_salt=piece.salt, transfer=piece.body["kv_transfer_params"])
        e.ask([other, MIXED], outputs, logs=0, cache_salt=last.salt, transfer=last.body["kv_transfer_params"])
        got = e.answer()
        self.near((got["tokens"][0], got["logs"][0]), self.reference.full(other, outputs))
        self.near((got["tokens"][1], got["logs"][1]), self.blended(outputs=outputs))

    def test_two_ranks(self):
        e = self.engine(tensor_parallel_size=2, distributed_executor_backend="mp", environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
        self.fill(e, A, C, ranks=2)
        got, n = self.answer(e, MIXED, SPANS, FIRST, "mine")
        self.near(got, self.blended())
        self.assertEqual(n, [0, 192, 448, 608])

    def test_a_daemon_that_goes_and_comes_back(self):
        e, want = self.engine(), self.blended()
        self.fill(e, A, C)
        first, *_ = blend.pieces(MIXED, SPANS, FIRST, block_tokens=BLOCK, salt="mine")
        self.ask(e, list(first.tokens), 1, cache_salt=first.salt, transfer=first.body["kv_transfer_params"])
        full = self.reference.full(MIXED)
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.near(self.answer(e, MIXED, SPANS, FIRST, "gone")[0], full)
        self.daemon = Daemon(nvme=False, socket=self.daemon.socket, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        for i in range(60):
            e.generate([A], 1, transfer=STORE_BODY["kv_transfer_params"])
            e.generate([C], 1, transfer=STORE_BODY["kv_transfer_params"])
            got, n = self.answer(e, MIXED, SPANS, FIRST, f"again{i}")
            if n == [0, 192, 448, 608]:
                break
        self.near(got, want)

    def test_a_server_and_the_example(self):
        server = real.Server(self.daemon.socket, self.model, settings={"chunks": True}, options=("--block-size", str(BLOCK)))
        self.addCleanup(server.close)
        server.ready()
        client, more = chunks_in_vllm.Server(server.url), {"return_token_ids": True, "ignore_eos": True}
        for chunk in (A, C):
            client.store(chunk)
        self.daemon.until(lambda: self.stored() >= (len(A) // BLOCK + len(C) // BLOCK), "stores chunks")
        answer = client.answer(MIXED, SPANS, FIRST, BLOCK, 8, **more)
        self.assertEqual(answer["choices"][0]["token_ids"], self.blended()[0])
        self.assertEqual(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 608)

    def test_channels_of_a_token_side_by_side(self):
        e = self.engine(environment=self.rows)
        self.fill(e, A, C)
        got, n = self.answer(e, MIXED, SPANS, FIRST, "mine")
        self.near(got, self.blended())
        self.assertEqual(n, [0, 192, 448, 608])

    def test_a_model_that_can_not_be_turned_is_refused(self):
        with self.assertRaisesRegex(Refused, "chunks: the model's rope_type is 'longrope'; default, linear, dynamic, yarn and llama3 can be re-rotated"):
            factors = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 512}
            self.engine(hf_overrides={"rope_parameters": factors})


class Tables(unittest.TestCase):
    """vLLM rotates K by the same values that the connector reads from a model's configuration."""

    KINDS = (
        {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "max_trained_positions": 1024}, ROPE,
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "truncate": False},
    )

    def test_each_kind(self):
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding import get_rope

        tables = []
        for found in self.KINDS:
            of = SimpleNamespace(head_dim=128, max_position_embeddings=4096, rope_parameters=found)
            for name, neox in (("LlamaForCausalLM", True), ("Glm4ForCausalLM", False)):
                for dtype in torch.float32, torch.bfloat16:
                    rerotation = chunk_rope.rerotation_of(SimpleNamespace(model_config=SimpleNamespace(architectures=[name], hf_text_config=of)))
                    with set_current_vllm_config(VllmConfig()):
                        table = get_rope(128, 4096, neox, dict(found), dtype)
                    chunk_rope.check_tables(rerotation, [table])
                    tables.append((rerotation, table, found, neox))
        for rerotation, _, found, neox in tables:
            for _, table, other, pairs in tables:
                if (found, neox) != (other, pairs) and found.get("rope_type") != "dynamic" and other.get("rope_type") != "dynamic":
                    with self.assertRaises(Unsupported):
                        chunk_rope.check_tables(rerotation, [table])


class Columns(unittest.TestCase):
    """Where vLLM's kernels for CPUs put a token's K and V, for the instruction sets that the connector knows."""

    def test_each_type(self):
        for instructions in chunk_rules._COLUMN_SETS:
            for dtype in torch.float32, torch.bfloat16, torch.float16:
                for tokens, dim in (32, 32), (32, 128), (64, 64), (32, 80), (16, 64):
                    with self.subTest(instructions=instructions, dtype=dtype, tokens=tokens, dim=dim):
                        self.one(instructions, dtype, tokens, dim)

    def one(self, instructions, dtype, tokens, dim, heads=2):
        from vllm import _custom_ops

        cache = torch.zeros(3, heads, tokens, 2 * dim, dtype=dtype)
        k, v = torch.randn(2, tokens + 5, heads, dim).to(dtype)
        halves = cache.view(3, heads, 2 * tokens, dim).chunk(2, dim=2)  # as vLLM's backend takes them
        _custom_ops.cpu_attn_reshape_and_cache(k, v, *halves, torch.arange(tokens, 2 * tokens + 5), instructions)
        rows = cache.view(3, heads, 2, tokens * dim)
        for i in range(tokens + 5):
            block, token = 1 + i // tokens, i % tokens
            self.assertTrue(torch.equal(rows[block, :, 0].view(heads, dim, tokens)[:, :, token], k[i]))
            self.assertTrue(torch.equal(rows[block, :, 1].view(heads, tokens, dim)[:, token], v[i]))


if __name__ == "__main__":
    unittest.main(verbosity=2)
