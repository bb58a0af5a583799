#!/usr/bin/env python3
"""Sparse decoding in a real vLLM on a GPU (`make check-vllm-gpu`, for who has both): small models with random weights, and a real daemon
with a window. GPU kernels of different shapes round differently, so answers are compared by their log probabilities, and by their
tokens where steps were alike.

    check_sparse_gpu.py [TEST...]          as any unittest
    check_sparse_gpu.py --speed [FILE]     Llama-3.1-8B's shape, a prompt of 128k: time per token, dense and sparse; 40 GiB of DRAM
"""

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [folder for folder in sys.path if folder != HERE]  # transformers looks for a package `kernels`
sys.path += [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0",
                  UCM_TEST_CUDA="required")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

ALL = "topk:topk_tokens=8192,dense_below=512"
SOME = "topk:topk_tokens=256,dense_below=512"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
SIZES = {"max_model_len": 4096, "max_num_seqs": 8, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20, "dtype": "bfloat16",
         "compilation_config": GRAPHS}
WAIT_S = float(os.environ.get("UCM_CHECK_SECONDS", "240"))
#: Between log probabilities of one token, by two ways to compute it: rounding makes a token choose another block now and then.
CLOSE = 0.5


def llama(folder, layers, hidden, inner, heads, kv_heads, dim, vocab, longest):
    os.makedirs(folder, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
              "vocab_size": vocab, "max_position_embeddings": longest, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
              "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    with open(os.path.join(folder, "config.json"), "w") as out:
        json.dump(config, out)
    return folder


def small_model(folder):
    """Queries that prefer some keys by far."""
    import torch
    from safetensors.torch import save_file

    layers, hidden, inner, heads, kv_heads, dim, vocab = 4, 512, 1024, 8, 2, 64, 512
    llama(folder, layers, hidden, inner, heads, kv_heads, dim, vocab, 16384)
    torch.manual_seed(1)

    def random(*shape, by=1.0):
        return (torch.randn(*shape) * 0.02 * by).bfloat16()

    weights = {"model.embed_tokens.weight": random(vocab, hidden, by=10), "lm_head.weight": random(vocab, hidden, by=5),
               "model.norm.weight": torch.ones(hidden).bfloat16()}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        sizes = {"q_proj": (heads * dim, 4), "k_proj": (kv_heads * dim, 4), "v_proj": (kv_heads * dim, 2)}
        weights.update({f"{name}self_attn.{which}.weight": random(n, hidden, by=by) for which, (n, by) in sizes.items()})
        weights[name + "self_attn.o_proj.weight"] = random(hidden, heads * dim, by=2)
        weights.update({f"{name}mlp.{which}.weight": random(inner, hidden) for which in ("gate_proj", "up_proj")})
        weights[name + "mlp.down_proj.weight"] = random(hidden, inner)
        for which in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{which}.weight"] = torch.ones(hidden).bfloat16()
    save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    return folder


def prompt(seed, tokens):
    import random

    of = random.Random(seed + 1)
    return [of.randrange(5, 512) for _ in range(tokens)]


def plugin(folder):
    """What pip makes of the wheel's entry point."""
    info = os.path.join(folder, "ucmclient-0.dist-info")
    os.makedirs(info)
    for name, text in (("METADATA", "Metadata-Version: 2.1\nName: ucmclient\nVersion: 0\n"),
                       ("entry_points.txt", "[vllm.general_plugins]\nucmd = ucmclient.vllm.sparse_plugin:register\n")):
        with open(os.path.join(info, name), "w") as out:
            out.write(text)
    sys.path.append(folder)


def counts():
    found = {}
    for of in {of for of, _ in sys.modules["ucmclient.vllm.sparse_gpu"]._by_address.values()}:
        found.update(vars(of.decoder.counts), sequences=len(of.decoder.sequences), windowed_now=of.decoder.windowed)
    for of in sys.modules["ucmclient.vllm.sparse_spec"]._schedulers.values():
        found.update(vars(of.counts), requests=len(of._of))
    return found


def serve(options):
    """An engine: a line of JSON in is what to generate, and one out what came of it."""
    faulthandler.dump_traceback_later(WAIT_S, repeat=True)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    socket, sparse, settings = options.pop("socket", None), options.pop("sparse", None), options.pop("settings", {})
    answer, began = {}, time.monotonic()
    try:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        if sparse is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="UcmConnector", kv_connector_module_path="ucmclient.vllm.connector", kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"socket": socket, "sparse": sparse, "retry_interval": 0.2, "lookup_timeout": 2.0, **settings})
            options.update(attention_backend="CUSTOM", async_scheduling=False)
        answer["import"] = time.monotonic() - began
        llm = LLM(skip_tokenizer_init=True, **options)
        answer["start"] = time.monotonic() - began
    except Exception as error:
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    answers.write(json.dumps(answer) + "\n")
    for line in sys.stdin if "error" not in answer else ():
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["outputs"], detokenize=False, ignore_eos=True, logprobs=asked["logprobs"])
        began = time.monotonic()
        try:
            done = llm.generate([{"prompt_token_ids": p} for p in asked["prompts"]], sampling, use_tqdm=False)
            answer = {"tokens": [list(o.outputs[0].token_ids) for o in done], "cached": [o.num_cached_tokens or 0 for o in done],
                      "logprobs": [[{str(t): p.logprob for t, p in of.items()} for of in o.outputs[0].logprobs or ()] for o in done],
                      "seconds": time.monotonic() - began, "counts": counts() if sparse is not None else {}}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


class Failed(Exception):
    pass


class Engine:
    """In a process of its own, which starts while others run."""

    def __init__(self, model, environment=(), name="engine", **options):
        logs = os.environ.get("UCM_CHECK_LOGS")
        self.log = open(os.path.join(logs, name + ".log"), "w+b") if logs else tempfile.TemporaryFile()
        env = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0", "PYTHONPATH": os.pathsep.join(sys.path), **dict(environment)}
        self.process = subprocess.Popen([sys.executable, "-B", __file__, "--engine", json.dumps({"model": model, **SIZES, **options})],
                                        env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        self.started = None

    def ready(self):
        if self.started is None:
            self.started = self.answer()
        return self

    def words(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def answer(self):
        watchdog = threading.Timer(WAIT_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        answer = json.loads(line) if line else {"error": "the engine ended"}
        if "error" in answer:
            raise Failed(f"{answer['error']}\n{self.words()[-4000:]}")
        return answer

    def ask(self, prompts, outputs, logprobs=8):
        self.process.stdin.write(json.dumps({"prompts": prompts, "outputs": outputs, "logprobs": logprobs}) + "\n")
        self.process.stdin.flush()

    def generate(self, prompts, outputs=40, logprobs=8):
        self.ask(prompts, outputs, logprobs)
        return self.answer()

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


def differs(a, b):
    """Of two answers to the same prompt, as tokens and log probabilities: where they differ by more than rounding; None: nowhere."""
    for i, (s, t) in enumerate(zip(a[1], b[1])):
        x, y = str(a[0][i]), str(b[0][i])
        if abs(s[x] - t.get(x, -99.0)) > CLOSE or abs(t[y] - s.get(y, -99.0)) > CLOSE:
            return f"token {i}: {x} {s[x]:.3f} and {t.get(x)}, {y} {t[y]:.3f} and {s.get(y)}"
        if x != y:
            return None  # a near tie: from here on each follows its own text
    return None


#: Of each engine: its daemon's window in MiB, and what it is started with.
ENGINES = {
    "dense": (None, {}),
    "all": (256, {"sparse": ALL}),
    "some": (256, {"sparse": SOME, "settings": {"sparse_room": 1}}),
    "eager": (256, {"sparse": SOME, "enforce_eager": True, "compilation_config": None}),
    "newer": (256, {"sparse": SOME, "environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}),
    "pieces": (256, {"sparse": SOME, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 16 << 20}),
    "windowless": (0, {"sparse": SOME}),
}


class Sparse(unittest.TestCase):
    PROMPTS = [prompt(i, 1500 + 333 * i) for i in range(3)] + [prompt(9, 200)]

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        plugin(os.path.join(cls.folder.name, "plugin"))
        cls.model = os.path.join(cls.folder.name, "model")
        subprocess.run([sys.executable, "-B", __file__, "--model", cls.model], check=True)
        cls.daemons, cls.engines = {}, {}
        for name, (window, options) in ENGINES.items():
            if name not in os.environ.get("UCM_CHECK_ENGINES", ",".join(ENGINES)).split(","):
                continue
            if window is not None:
                cls.daemons[name] = cls.daemon(window)
                cls.addClassCleanup(lambda name=name: cls.daemons[name].stop())
                options = {**options, "socket": cls.daemons[name].socket}
            cls.engines[name] = Engine(cls.model, name=name, **options)
            cls.addClassCleanup(cls.engines[name].close)
        cls.known = {}

    @staticmethod
    def daemon(window, **more):
        from daemon import Daemon

        return Daemon(nvme=False, **{"arena.size": "512MiB", "arena.extent": "8MiB", "window.size": f"{window}MiB", **more})

    def engine(self, name):
        e = self.engines[name].ready()
        print(name, {k: round(v, 1) for k, v in e.started.items()}, flush=True)
        return e

    def of(self, name):
        """What an engine answers first."""
        if name not in self.known:
            self.known[name] = self.engine(name).generate(self.PROMPTS)
        return self.known[name]

    def alike(self, answer, wanted, which=None):
        for i in range(len(wanted["tokens"])) if which is None else which:
            one = [(of["tokens"][i], of["logprobs"][i]) for of in (answer, wanted)]
            self.assertIsNone(differs(*one), f"prompt {i}")

    def test_a_policy_that_takes_everything_is_dense(self):
        first, second = self.of("all"), self.engine("all").generate(self.PROMPTS)
        said(second)
        for answer in first, second:
            self.alike(answer, self.of("dense"))
        self.assertGreater(second["counts"]["given_back"], 100)

    def lives(self, name):
        """Hits, graphs, batches, what was resident."""
        first, e = self.of(name), self.engine(name)
        second = e.generate(self.PROMPTS)
        said(second)
        self.assertGreater(second["counts"]["given_back"], 500)
        self.alike(second, first)
        self.alike(first, self.of("dense"), [3])
        alone = [e.generate([p]) for p in self.PROMPTS[:3]]
        others = e.generate([prompt(20 + i, 3000 + 100 * i) for i in range(6)])  # they take the slots
        again = [e.generate([p]) for p in self.PROMPTS[:3]]
        said(again[-1])
        for i, (one, two) in enumerate(zip(alone, again)):  # steps of the same shapes: the same bits
            self.alike({name: one[name] * (i + 1) for name in ("tokens", "logprobs")}, first, [i])
            self.assertEqual((one["tokens"], one["logprobs"]), (two["tokens"], two["logprobs"]), f"prompt {i}")
        self.assertGreater(again[-1]["counts"]["windowed"], others["counts"]["windowed"])
        self.assertLessEqual(again[-1]["counts"]["sequences"], 1)  # the last one's is closed by the next step

    def test_the_same_wherever_blocks_lie(self):
        self.lives("some")
        with self.assertRaises(AssertionError, msg="the policy is too good to be seen at work"):
            self.alike(self.of("some"), self.of("dense"), [0, 1, 2])

    def test_eagerly(self):
        self.lives("eager")
        self.alike(self.of("eager"), self.of("some"))

    def test_the_newer_runner(self):
        self.lives("newer")
        self.alike(self.of("newer"), self.of("some"))

    def test_prompts_in_pieces_preemption_and_the_daemons_death(self):
        wanted, e = self.of("some"), self.engine("pieces")
        many = [prompt(40 + i, 2500) for i in range(6)]
        for _ in range(2):
            self.alike(e.generate(self.PROMPTS), wanted)
            e.generate(many, 60)
        before = e.generate(self.PROMPTS)
        said(before)
        e.ask(self.PROMPTS, 1200)
        time.sleep(1.0)
        socket = self.daemons["pieces"].socket
        self.daemons["pieces"].kill()
        answer = e.answer()
        said(answer)
        self.alike({**answer, "tokens": [t[:40] for t in answer["tokens"]]}, wanted)
        self.assertGreater(sum(answer["counts"][n] for n in ("lost", "repeated")), sum(before["counts"][n] for n in ("lost", "repeated")))
        self.daemons["pieces"] = self.daemon(256, socket=socket)
        for _ in range(3):
            self.alike(e.generate(self.PROMPTS), wanted)
            time.sleep(0.5)

    def test_without_a_window(self):
        """Pages stay; what hits brought is fetched, and steps are computed again."""
        first, second = self.of("windowless"), self.engine("windowless").generate(self.PROMPTS)
        said(second)
        self.alike(first, self.of("some"))
        self.alike(second, first)


def said(answer):
    print(round(answer["seconds"], 2), "s", {k: v for k, v in answer["counts"].items() if v}, flush=True)


def speed(file):
    from daemon import Daemon

    folder = tempfile.TemporaryDirectory()
    plugin(os.path.join(folder.name, "plugin"))
    longest = int(os.environ.get("UCM_SPEED_TOKENS", "131072"))
    model = llama(os.path.join(folder.name, "llama"), 32, 4096, 14336, 32, 8, 128, 128256, longest)
    kv, sparse = longest * 131072, "topk:topk_tokens=4096"
    common = {"load_format": "dummy", "max_model_len": longest, "max_num_batched_tokens": 8192, "max_num_seqs": 4, "gpu_memory_utilization": 0.3,
              "kv_cache_memory_bytes": kv + (1 << 30), "compilation_config": {**GRAPHS, "cudagraph_capture_sizes": [1, 2, 4]}}
    engines = {"dense": Engine(model, name="dense-llama", **common)}
    memory = f"{(kv + kv // 8 >> 30) + 1}GiB"
    daemon = Daemon(nvme=False, **{"arena.size": memory, "arena.extent": "512MiB", "window.size": memory})
    engines[sparse] = Engine(model, name="sparse-llama", socket=daemon.socket, sparse=sparse, settings={"sparse_room": 1}, **common)
    asked, rows, first = prompt(1, longest - 600), [], {}
    for name, e in engines.items():
        try:
            first[name] = e.ready().generate([asked], 1, None)["seconds"]
            print(name, "has the prompt after", round(first[name], 1), "s", flush=True)
        except Failed as error:
            print(name, "failed:", error, flush=True)
    while os.path.exists(os.environ.get("UCM_SPEED_WAIT", "")):  # others use the GPU
        time.sleep(0.1)
    for name in first:
        try:
            e = engines[name]
            some, more = (e.generate([asked], outputs, None) for outputs in (65, 321))
            rows.append({"engine": name, "start s": e.started["start"], "first token s": first[name], "hit and 65 tokens s": some["seconds"],
                         "ms a token": (more["seconds"] - some["seconds"]) / 256 * 1e3, "counts": more["counts"]})
            print(json.dumps(rows[-1]), flush=True)
            if file:
                with open(file, "w") as out:
                    json.dump(rows, out)
        except Failed as error:
            print(name, "failed:", error, flush=True)
    for e in engines.values():
        e.close()
    daemon.stop()
    folder.cleanup()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["--model"]:
        small_model(sys.argv[2])
    elif sys.argv[1:2] == ["--speed"]:
        speed(sys.argv[2] if len(sys.argv) > 2 else None)
    else:
        unittest.main(verbosity=2)
