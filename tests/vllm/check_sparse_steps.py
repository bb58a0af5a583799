#!/usr/bin/env python3
"""Sparse decoding's half of a GPU worker in a real vLLM without a GPU, a part of `make check-vllm`: vLLM's scheduler and runner, and the kernels of
check_sparse_rows.py, which take all blocks. So tokens are those of a dense engine, also where steps came short and vLLM computes them again."""

import json
import os
import random
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)
WAIT_S, BLOCK, LAYERS = 300, 32, 4
SETTINGS = {"socket": "/nonexistent/ucmd.sock", "sparse": "topk:topk_tokens=8192,dense_below=128", "connect_timeout": 0.5}


def make_steps(rows, split, short):
    """Attention over the blocks of vLLM's kernels for CPUs. short: every so often a step lacks blocks."""
    import torch

    class Steps(rows.FakeSteps):
        def begin(self):
            super().begin()
            if short and self.begun % 17 == 5:
                self.flags = rows.Flag.UNSERVED

        def layer(self, layer, chosen, table, requests, q, pages, out=None):
            out.zero_()
            for c, length in enumerate(pages.length.tolist()):
                if length:
                    n, first = int(chosen.counts[c, 0]), int(pages.first[c])
                    of = [int(pages.of[table[c, b]]) for b in chosen.index[c, 0, :n].tolist()]
                    of += [int(pages.table[c, b]) for b in range(first, (length - 1) // BLOCK + 1)]
                    assert all(page > 0 for page in of), "a block that is nowhere"
                    k, v = (part.transpose(0, 1).flatten(1, 2)[:, : (n - first) * BLOCK + length] for part in split(pages.kv[of].float()))
                    grouped = q[c].float().view(len(k), -1, q.shape[-1])
                    weights = torch.softmax(grouped @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1)
                    out[c] = (weights @ v).reshape(q.shape[1:]).to(out.dtype)
            return out

    return Steps


def forward(self, layer, query, key, value, kv_cache, batch, output, *args, **named):
    """As SparseImpl of backend_gpu.py; what the platform's kernels make of sparse tokens is written over."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from ucmclient.vllm.sparse_gpu import worker_of

    CPUAttentionBackendImpl.forward(self, layer, query, key, value, kv_cache, batch, output, *args, **named)
    worker, number = (None if batch is None else worker_of(kv_cache)) or (None, 0)
    if worker is None or not worker.has_work(batch.max_query_len):
        return output
    if batch.max_query_len == 1:
        worker.uniform(number, batch.block_table, batch.seq_lens)
        worker.attend_uniform(number, query, output, batch.block_table)
        return output
    rows = worker.rows(batch, batch.query_start_loc, batch.seq_lens, batch.block_table)
    if not rows.all_dense:
        worker.attend_rows(number, rows, query, output)
    return output


def pretend(short):
    """That this platform is a GPU."""
    import check_sparse_rows as rows

    from ucmclient.vllm import backend_cpu, sparse_gpu, sparse_rules, sparse_worker

    class Decoder(rows.FakeDecoder):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            self.digests = self.digests.new_zeros((LAYERS, self.steps.numbers, 1))

        def end(self):
            pass

    reasons = sparse_rules._reasons
    sparse_rules.device_of = lambda config: "cuda"
    sparse_rules._reasons = lambda *of: (reason for reason in reasons(*of) if "on a GPU" not in reason[0])
    sparse_gpu.Steps, sparse_gpu.GpuDecoder = make_steps(rows, sparse_worker._split, short), Decoder
    sparse_gpu.Selector, sparse_gpu.Builder = rows.FakeSelector, rows.FakeBuilder
    backend_cpu.SparseImpl.forward = forward


def engine(how, model, plugin):
    sys.path[:] = [folder for folder in sys.path if folder != HERE]  # transformers looks for a package `kernels`
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1",
                      HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_USE_V2_MODEL_RUNNER="0")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path += [plugin, os.path.join(TOP, "client/python")]
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options = {"dtype": "float32", "max_model_len": 1024, "block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    if how != "dense":
        sys.path.append(HERE)  # check_sparse_rows.py removes it
        pretend(how == "short")
        transfer = KVTransferConfig(kv_connector="UcmConnector", kv_connector_module_path="ucmclient.vllm.connector", kv_role="kv_both",
                                    kv_load_failure_policy="recompute", kv_connector_extra_config=SETTINGS)
        options.update(attention_backend="CUSTOM", async_scheduling=False, kv_transfer_config=transfer)
    llm = LLM(model, skip_tokenizer_init=True, enforce_eager=True, **options)
    prompts = [[random.Random(i).randrange(5, 500) for _ in range(n)] for i, n in enumerate((300, 170, 60, 415, 333))]
    sampling = SamplingParams(temperature=0, max_tokens=70, detokenize=False, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    spec = sys.modules.get("ucmclient.vllm.sparse_spec")
    counts = [vars(of.counts) for of in spec._schedulers.values()] if spec else []
    json.dump({"tokens": [list(o.outputs[0].token_ids) for o in done], "counts": counts}, out)
    out.flush()
    os._exit(0)


class Steps(unittest.TestCase):
    def test_steps_that_came_short_are_computed_again(self):
        from check_sparse_gpu import plugin

        with tempfile.TemporaryDirectory() as folder:
            model, entry = os.path.join(folder, "model"), os.path.join(folder, "plugin")
            plugin(entry)
            subprocess.run([PYTHON, os.path.join(HERE, "vllm_engine.py"), "models", model, os.path.join(folder, "wild")], check=True,
                           stderr=subprocess.DEVNULL, timeout=WAIT_S)
            found = {}
            for how in ("dense", "whole", "short"):
                ran = subprocess.run([PYTHON, "-B", __file__, how, model, entry], stdout=subprocess.PIPE, timeout=WAIT_S, check=True,
                                     env={**os.environ, "PYTHONHASHSEED": "0"})
                found[how] = json.loads(ran.stdout)
            self.assertEqual(found["whole"]["tokens"], found["dense"]["tokens"])
            self.assertEqual(found["short"]["tokens"], found["dense"]["tokens"])
            self.assertEqual(found["whole"]["counts"][0]["repeated"], 0)
            self.assertGreater(found["short"]["counts"][0]["repeated"], 20)
            self.assertEqual(found["short"]["counts"][0]["lost"], 0)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        engine(*sys.argv[1:])
    unittest.main(verbosity=2)
