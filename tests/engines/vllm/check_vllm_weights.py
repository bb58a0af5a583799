#!/usr/bin/env python3
"""Which weights KV belongs to, in a real vLLM on a CPU. Its engine runs in the caller's process, as
trainers have it. Files change while they are read, LoRA adapters and weights change in a running
engine, and sleep comes right after generate. And the mask of prompt embeddings. `make check-vllm`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
                  KMP_BLOCKTIME="0", VLLM_LOGGING_LEVEL="WARNING", PYTHONHASHSEED="0")

from daemon import UCMCTL, Daemon  # noqa: E402
from ucmclient.engine.weights import files_at  # noqa: E402

PROMPT = [7 + i * 31 % 400 for i in range(700)]
BLOCKS = 5  # of 128 tokens
WAIT_S = 900


class Engine:
    def __init__(self, socket, model, **more):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.stats = lambda: json.loads(subprocess.run([UCMCTL, "--socket", socket, "--json", "stats"], capture_output=True, check=True).stdout)["metrics"]
        transfer = KVTransferConfig(kv_connector="UcmConnector", kv_connector_module_path="ucmclient.engine.vllm.connector", kv_role="kv_both",
                                    kv_load_failure_policy="recompute", kv_connector_extra_config={"socket": socket, "advanced": {"lookup_timeout": 5.0}})
        self.llm = LLM(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=4096, enforce_eager=True, kv_transfer_config=transfer, **more)

    def ask(self, prompt, outputs=8, **more):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=outputs, detokenize=False, ignore_eos=True)
        done = self.llm.generate([prompt], sampling, use_tqdm=False, **more)[0]
        return list(done.outputs[0].token_ids), done.num_cached_tokens or 0

    def tokens(self, ids=PROMPT, salt=None, **more):
        return self.ask({"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})}, **more)

    def cold(self, ids=PROMPT, **more):
        return self.tokens(ids, salt=f"cold{time.monotonic_ns()}", **more)[0]

    def stored(self, blocks):
        """So many in all, once the engine has gone on."""
        end = time.monotonic() + 120
        while self.stats()["dump_blocks"] < blocks:
            assert time.monotonic() < end, f"{self.stats()['dump_blocks']} of {blocks} blocks were stored"
            self.tokens([5, 6, 7], outputs=1)

    def fresh(self, **more):
        """Tokens that are right, and how many came from ucmd."""
        assert self.llm.reset_prefix_cache()
        got, cached = self.tokens(**more)
        assert got == self.cold(**more), "not what is computed"
        return cached


def scale(worker):
    """Like a trainer that brings a function."""
    for name, weight in worker.model_runner.model.named_parameters():
        if "_proj" in name:
            weight.data.mul_(1.5)


def changes(socket, model):
    import torch

    e = Engine(socket, model, enable_prompt_embeds=True)
    e.tokens()
    e.stored(BLOCKS)
    assert e.fresh() >= 640, "a plain reset keeps what is stored"
    runner = e.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    changed = [(name, weight.detach() * 1.3) for name, weight in runner.model.named_parameters() if name.endswith("o_proj.weight")]
    for change in (lambda: runner.model.load_weights(changed), lambda: e.llm.collective_rpc(scale), lambda: e.llm.collective_rpc("reload_weights")):
        stored = e.stats()["dump_blocks"]
        change()
        assert e.fresh() == 0, "KV of weights that the engine had"
        e.stored(stored + BLOCKS)
        assert e.fresh() >= 640, "it shares with itself"
    embeddings = torch.randn(400, 128, generator=torch.Generator().manual_seed(1)) * 0.1

    def mixed(tokens, **more):
        return e.ask({"prompt_embeds": embeddings, "prompt_token_ids": [0] * 400, "prompt_is_token_ids": [i < tokens for i in range(400)], **more})
    stored = e.stats()["dump_blocks"]
    mixed(10)
    e.stored(stored + 3)
    for tokens, hit in ((10, True), (300, False)):
        assert e.llm.reset_prefix_cache()
        got, cached = mixed(tokens)
        assert bool(cached) == hit and got == mixed(tokens, cache_salt=f"cold{tokens}")[0], tokens
    for i in range(4):
        e.tokens([7 + (i + j * 17) % 400 for j in range(1500)], outputs=4)
        e.llm.sleep(level=1)
        e.llm.wake_up()
    assert e.fresh() == 0, "weights may be others when an engine wakes"


def settle(directory):
    """Until a further change would show in a file system whose clock ticks."""
    end = time.monotonic() + 10
    while not files_at(directory, ("",)).settled:
        assert time.monotonic() < end
        time.sleep(0.01)


def adapter(directory, seed):
    import torch
    from safetensors.torch import save_file

    os.makedirs(directory, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(4):
        for name, outputs in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (8, 128)), ("B", (outputs, 8))):
                tensors[f"{base}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, directory + "/adapter_model.safetensors")
    with open(directory + "/adapter_config.json", "w", encoding="ascii") as file:
        json.dump({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "none",
                   "task_type": "CAUSAL_LM"}, file)


def adapters(socket, model, directory):
    from vllm.lora.request import LoRARequest

    e, lora = Engine(socket, model, enable_lora=True, max_lora_rank=8), LoRARequest("live", 5, directory)
    adapter(directory, 3)
    settle(directory)
    e.llm.llm_engine.add_lora(lora)
    adapter(directory, 9)
    before = e.tokens(lora_request=lora)[0]
    e.tokens([5, 6, 7], outputs=1)
    assert e.stats()["dump_blocks"] == 0, "KV of the old adapter under the new one's name"
    settle(directory)
    e.llm.llm_engine.remove_lora(5)
    e.llm.llm_engine.add_lora(lora)
    assert e.llm.reset_prefix_cache()
    assert e.tokens(lora_request=lora)[0] != before
    e.stored(BLOCKS)
    assert e.fresh(lora_request=lora) >= 640


def weights(directory, model, seed):
    import torch
    from safetensors.torch import load_file, save_file

    os.makedirs(directory, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(os.path.join(model, name), directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: of * (1 + 0.3 * torch.randn(of.shape, generator=generator)) if "proj" in name else of
               for name, of in load_file(model + "/model.safetensors").items()}
    save_file(tensors, directory + "/tmp", {"format": "pt"})
    os.replace(directory + "/tmp", directory + "/model.safetensors")


def replaced(socket, model, directory):
    weights(directory, model, 1)
    settle(directory)
    from vllm.v1.worker import cpu_worker

    real = cpu_worker.CPUWorker.load_model

    def load_model(self, *args, **more):
        done = real(self, *args, **more)
        weights(directory, model, 2)
        return done

    cpu_worker.CPUWorker.load_model = load_model
    e = Engine(socket, directory)
    e.tokens()
    e.stored(BLOCKS)
    assert e.fresh() >= 640, "it shares with itself"


def behind(socket, _, directory, hits):
    e = Engine(socket, directory)
    before = e.stats()["dump_blocks"]
    got, cached = e.tokens()
    assert got == e.cold() and bool(cached) == bool(int(hits)), cached
    if not cached:
        e.stored(before + BLOCKS)


class Weights(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="weights.")
        cls.model = cls.directory.name + "/model"
        subprocess.run([sys.executable, os.path.join(HERE, "vllm_engine.py"), "models", cls.model, cls.directory.name + "/wild"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "256MiB", "arena.slab": "4MiB"})
        self.addCleanup(self.daemon.stop)

    def scene(self, function, *more):
        argv = [sys.executable, "-B", os.path.abspath(__file__), function.__name__, self.daemon.socket, self.model, *more]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S)
        self.assertEqual(done.returncode, 0, done.stdout[-4000:])

    def test_what_changes_in_a_running_engine(self):
        self.scene(changes)

    def test_adapters_are_what_was_read(self):
        self.scene(adapters, os.path.join(self.directory.name, "adapter"))

    def test_files_that_are_replaced_while_an_engine_starts(self):
        directory = os.path.join(self.directory.name, "replaced")
        self.scene(replaced, directory)
        self.scene(behind, directory, "0")
        self.scene(behind, directory, "1")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        unittest.main(verbosity=2)
