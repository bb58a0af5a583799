"""An engine of vLLM in a process of its own, for check_sparse_gpu.py and check_sparse_steps.py, that reads what to generate from lines of JSON.

    gpu_engine.py --engine OPTIONS    JSON: LLM's options and `started()`'s; answers by lines of JSON
    gpu_engine.py --model DIRECTORY      writes a small model there
"""

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
#: Of engines.
PATHS = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
sys.path += [directory for directory in PATHS if directory not in sys.path]
PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)
WAIT_S = float(os.environ.get("UCM_CHECK_SECONDS", "240"))
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
         "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0", "PYTHONHASHSEED": "0",
         "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}


def llama(directory, layers, hidden, inner, heads, kv_heads, dim, vocab, longest):
    os.makedirs(directory, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
              "vocab_size": vocab, "max_position_embeddings": longest, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
              "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    with open(os.path.join(directory, "config.json"), "w") as out:
        json.dump(config, out)
    return directory


def small_model(directory):
    """Queries that prefer some keys by far."""
    import torch
    from safetensors.torch import save_file

    layers, hidden, inner, heads, kv_heads, dim, vocab = 4, 512, 1024, 8, 2, 64, 512
    llama(directory, layers, hidden, inner, heads, kv_heads, dim, vocab, 16384)
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
    save_file(weights, os.path.join(directory, "model.safetensors"), {"format": "pt"})
    return directory


def prompt(seed, tokens):
    import random

    of = random.Random(seed + 1)
    return [of.randrange(5, 512) for _ in range(tokens)]


def plugin(directory):
    """What pip makes of the wheel's entry point."""
    info = os.path.join(directory, "ucmclient-0.dist-info")
    os.makedirs(info)
    for name, text in (("METADATA", "Metadata-Version: 2.1\nName: ucmclient\nVersion: 0\n"),
                       ("entry_points.txt", "[vllm.general_plugins]\nucmd = ucmclient.engine.vllm.sparse_plugin:register\n")):
        with open(os.path.join(info, name), "w") as out:
            out.write(text)
    PATHS.append(directory)


def counts():
    found = {"preempted": _preempted[0]}
    for of in {of for of, _ in sys.modules["ucmclient.engine.vllm.sparse_gpu"]._by_address.values()}:
        found.update(vars(of.decoder.counts), sequences=len(of.decoder.sequences), mapped_now=of.decoder.mapped)
    for of in sys.modules["ucmclient.engine.vllm.sparse_spec"]._schedulers.values():
        found.update(vars(of.counts), requests=len(of._of))
    return found


_preempted = [0]


def count_preemptions():
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    def counted(*args, **named):
        _preempted[0] += 1
        return preempt(*args, **named)

    Scheduler._preempt_request = counted


def stepping(llm, prompts, sampling, events):
    """events: after which steps something happens, as [the first, how many to the next or 0, what,
    its argument]. Requests (their numbers) are aborted, and have no answer. A process (its number)
    is killed. A command is begun."""
    engine, done, running = llm.llm_engine, {}, []
    names = [f"{time.monotonic()}-{i}" for i in range(len(prompts))]
    happens = {"abort": lambda which: engine.abort_request([names[i] for i in which]), "kill": lambda pid: os.kill(pid, signal.SIGKILL),
               "run": lambda words: running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))}
    for name, p in zip(names, prompts):
        engine.add_request(name, p, sampling)
    for step in itertools.count(1):
        if not engine.has_unfinished_requests():
            break
        done.update({out.request_id: out for out in engine.step() if out.finished})
        for first, every, what, argument in events:
            if step == first or (every and step > first and (step - first) % every == 0):
                happens[what](argument)
    for process in running:
        process.wait()
    return [done[name] for name in names if name in done]


def reset(llm):
    """Resets the engine's own prefix cache when no page of it is used any more, so the next hit is
    in the daemon. Pages that are being stored are given back in a step, so this runs some steps."""
    from vllm import SamplingParams

    until = time.monotonic() + 30
    while not llm.reset_prefix_cache():
        if time.monotonic() > until:
            raise RuntimeError("pages are in use without requests")
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)


def started(options):
    """socket, sparse, settings: of the connector, if sparse is set. cpu: arguments of sparse_on_cpu.pretend()."""
    cpu = options.pop("cpu", None)
    if cpu is not None:
        import sparse_on_cpu

        sparse_on_cpu.pretend(**cpu)
    socket, sparse, settings = options.pop("socket", None), options.pop("sparse", None), options.pop("settings", {})
    from extra import extra_of
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if sparse is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="UcmConnector", kv_connector_module_path="ucmclient.engine.vllm.connector", kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra_of({"socket": socket, "sparse": sparse, "retry_interval": 0.2, "lookup_timeout": 2.0, **settings}))
        options.update(attention_backend="CUSTOM", async_scheduling=False)
    count_preemptions()
    return LLM(skip_tokenizer_init=True, **options)


def answered(llm, asked):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=asked["outputs"], detokenize=False, ignore_eos=True, logprobs=asked["logprobs"])
    prompts = [{"prompt_token_ids": p} for p in asked["prompts"]]

    def run():
        return llm.generate(prompts, sampling, use_tqdm=False)

    if asked.get("reset"):
        reset(llm)
    done = stepping(llm, prompts, sampling, asked["events"]) if "events" in asked else run()
    return {"cached": [o.num_cached_tokens or 0 for o in done],
            "tokens": [list(o.outputs[0].token_ids) for o in done],
            "logprobs": [[{str(t): p.logprob for t, p in of.items()} for of in o.outputs[0].logprobs or ()] for o in done],
            "counts": counts() if "ucmclient.engine.vllm.sparse_gpu" in sys.modules else {}}


def serve(options):
    """An engine: a line of JSON on input says what to generate, and one on output has the result.
    """
    faulthandler.dump_traceback_later(WAIT_S, repeat=True)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    try:
        llm = started(options)
        answer = {}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    for line in sys.stdin if "error" not in answer else ():
        try:
            answer = answered(llm, json.loads(line))
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
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), *PATHS]
        env = {**os.environ, **QUIET, "VLLM_USE_V2_MODEL_RUNNER": "0", "PYTHONPATH": os.pathsep.join(paths), **dict(environment)}
        self.process = subprocess.Popen([PYTHON, "-B", __file__, "--engine", json.dumps({"model": model, **options})],
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

    def ask(self, prompts, outputs, logprobs=8, **more):
        self.process.stdin.write(json.dumps({"prompts": prompts, "outputs": outputs, "logprobs": logprobs, **more}) + "\n")
        self.process.stdin.flush()

    def generate(self, prompts, outputs=40, logprobs=8, **more):
        self.ask(prompts, outputs, logprobs, **more)
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(json.loads(sys.argv[2]))
    else:
        small_model(sys.argv[2])
