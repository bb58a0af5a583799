#!/usr/bin/env python3
"""The connector in a real vLLM on GPUs (`make check-vllm-gpu`). Small models with random weights
keep their KV in several ways. Settings that a CPU can't try are tested, too. An engine generates
the same with the cache and without. A table at the end says how near results are.

    check_models_gpu.py [--gpus N] [--seconds S] [--logs DIRECTORY] [CASE...]

With two GPUs (--gpus, by default as many as there are) also the cases that need two. --seconds:
cases that have not ended by then count as failed.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("VLLM_PYTHON", sys.executable)
os.environ["UCM_TEST_CUDA"] = "required"

import check_vllm as real  # noqa: E402
from check_vllm import Engine, prompt  # noqa: E402
from daemon import Daemon  # noqa: E402

real.WAIT_S = 300  # of an engine, to start or to answer: kernels are compiled meanwhile
#: Between log probabilities in BF16.
NEAR = 0.3
#: An answer with another beginning must be so many times further off. Otherwise a wrong KV would go
#: unseen.
FAR = 3
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}
EAGER = {"enforce_eager": True}
SIZES = {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 4,
         "disable_custom_all_reduce": True}
#: The tests don't use multicast over NVLink.
QUIET = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "TOKENIZERS_PARALLELISM": "false"}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
TINY = [5, 6, 7]
#: An engine without a daemon. Its own cache shows what a hit is like.
PLAIN = {"connector": False, "enable_prefix_caching": True}


class Failed(Exception):
    pass


class Case:
    """Engines of one model over a daemon of their own, and a row of the table."""

    def __init__(self, name, models, logs, gpus, model="llama", least=0.5, near=NEAR, settings=(),
                 prompts=(3000, 2304), shared=(3400, 2400), **options):
        self.name, self.directory, self.logs, self.least = name, os.path.join(models, model), logs, least
        self.near, self.prompts, self.shared = near, prompts, shared
        self.settings, self.options, self.graphs = dict(settings), options, GRAPHS
        self.environment = {**QUIET, "CUDA_VISIBLE_DEVICES": gpus}
        self.over = False
        self.engines, self.notes, self.far, self.hits = [], [], None, []
        #: How far answers were from those of the engine without a daemon: with as many cached
        #: tokens (in the same steps), and with other numbers.
        self.off = {True: 0.0, False: 0.0}
        self.like_hits = 0  # of those with as many
        self.noise = 0.0  # how far that engine's answers are from each other
        self.daemon = Daemon(nvme=False, **{"arena.size": "1GiB", "arena.slab": "4MiB"})

    def engine(self, connector=True, settings=(), **more):
        if self.over:
            raise Failed("not ended in time")
        options = {**SIZES, **self.graphs, **self.options, **more}
        e = Engine(self.daemon.socket, self.directory, connector, environment=self.environment, settings={**self.settings, **dict(settings)}, **options)
        self.engines.append(e)
        return e

    def start(self, *wanted):
        """wanted: what engine() takes. A model for which no graphs can be captured is run without."""
        for attempt in (GRAPHS, EAGER):
            self.graphs = attempt
            started = [self.engine(**one) for one in wanted]
            try:
                return [e.ready() for e in started]
            except (real.Refused, RuntimeError, OSError) as error:
                self.keep_logs(f"start{len(self.engines)}")
                self.close_engines()
                if attempt is EAGER or "ucm" in str(error).lower():
                    raise Failed(f"start: {str(error).strip().splitlines()[-1][:300]}") from None
                self.notes.append("no graphs: " + str(error).strip().splitlines()[-1][:120])
        raise AssertionError

    def ask(self, e, p, outputs=16, **more):
        try:
            e.ask([p], outputs, logs=0, **more)
            got = e.answer()
        except (RuntimeError, OSError) as error:
            raise Failed(str(error).strip().splitlines()[-1][:300]) from None
        return {"tokens": got["tokens"][0], "logs": got["logs"][0], "cached": got["cached"][0], "free": got["free"],
                "drafted": got["drafted"]}

    def stored(self, e):
        """All pages are back when all stores have ended."""
        end = time.monotonic() + 30
        while self.ask(e, TINY, 1)["free"] < e.free:
            if time.monotonic() > end:
                raise Failed("stores did not end")

    def same(self, got, wanted, what):
        """wanted: the same prompt's answers without a daemon. One whose own cache had as many tokens was computed in the same steps."""
        like = [one for one in wanted if one["cached"] == got["cached"]]
        want = (like or wanted)[0]
        self.like_hits += bool(like) and got["cached"] > 0
        for i, (a, b) in enumerate(zip(got["tokens"], want["tokens"])):
            off = abs(got["logs"][i] - want["logs"][i])
            self.off[bool(like)] = max(self.off[bool(like)], off)
            if off > self.near:
                raise Failed(f"{what}: token {i}: {a} {got['logs'][i]:.3f}, without a cache {b} {want['logs'][i]:.3f}")
            if a != b:
                self.notes.append(f"{what}: near tie at token {i}")
                return
        if len(got["tokens"]) != len(want["tokens"]):
            raise Failed(f"{what}: {len(got['tokens'])} tokens")

    def hit(self, e, p, wanted, what, least=None):
        got = self.ask(e, p)
        self.hits.append(got["cached"])
        self.same(got, wanted, what)
        if got["cached"] < (self.least if least is None else least) * len(p):
            raise Failed(f"{what}: {got['cached']} of {len(p)} tokens were cached")
        return got

    def metrics(self):
        return self.daemon.metrics()

    def dumps(self):
        out = self.daemon.ctl("stats", "--prometheus", check=True)
        return sum(float(line.split()[-1]) for line in out.stdout.splitlines() if line.startswith("ucmd_dump_seconds_count"))

    def share(self, plain, a, b):
        """b loads what a has stored: a long prompt, one of whole blocks, a chat's next turn, and
        prompts that share a beginning."""
        long, whole = self.prompts
        for e in (a, b):
            e.free = self.ask(e, TINY, 1)["free"]
        prompts = [prompt(1, long), prompt(2, whole)]
        wanted = [self.references(plain, p) for p in prompts]
        other = self.ask(plain, prompt(99, long - 200) + prompts[0][long - 200 :])
        self.far = max(abs(x - y) for x, y in zip(other["logs"], wanted[0][0]["logs"]))
        for p, want in zip(prompts, wanted):
            cold = self.ask(a, p)
            self.same(cold, want, "cold")
            if cold["cached"]:
                raise Failed(f"cold: {cold['cached']} tokens were cached")
        self.stored(a)
        for p, want in zip(prompts, wanted):
            self.hit(b, p, want, f"hit {len(p)}")
        turn = prompts[0] + wanted[0][0]["tokens"] + prompt(4, 40)
        self.hit(b, turn, [self.ask(plain, turn)], "turn")
        for i, e in enumerate((a, b, a)):
            p = prompt(10 + i, self.shared[0], shared=self.shared[1])
            self.hit(e, p, [self.ask(plain, p)], f"shared beginning {i}", least=0.3 if i == 2 else 0)
            self.stored(e)
        off = self.off[True] if self.like_hits else max(self.off.values())
        if self.far < FAR * off:
            raise Failed(f"the test sees too little: off by {off:.3f}, and with another beginning by {self.far:.3f}")

    def references(self, plain, p):
        """The engine's answers to a prompt that it computes, and to one that it has in its own
        cache. It answers twice, to show how far it is from itself."""
        rounds = [[self.ask(plain, p, reset=again), self.ask(plain, p)] for again in (False, True)]
        for one, two in zip(*rounds):
            for i, (a, b) in enumerate(zip(one["tokens"], two["tokens"])):
                self.noise = max(self.noise, abs(one["logs"][i] - two["logs"][i]))
                if a != b:
                    break
        return rounds[0]

    def daemon_dies(self, plain, b):
        self.daemon.kill()
        p = prompt(50, 700)
        self.same(self.ask(b, p), [self.ask(plain, p)], "daemon dead")

    def keep_logs(self, what):
        for i, e in enumerate(self.engines):
            try:
                e.log.seek(0)
                with open(os.path.join(self.logs, f"{self.name}-{what}-{i}.log".replace(" ", "_")), "wb") as out:
                    out.write(e.log.read()[-60000:])
            except ValueError:
                pass  # closed

    def close_engines(self):
        for e in self.engines:
            e.process.kill()
        for e in self.engines:
            e.close()
        self.engines.clear()

    def close(self):
        with open(os.path.join(self.logs, self.name.replace(" ", "_") + "-daemon.log"), "w", encoding="utf-8") as out:
            out.write(self.daemon.log()[-20000:])
        self.close_engines()
        self.daemon.stop()


# ---- one GPU ----


def shares(case):
    plain, a, b = case.start(PLAIN, {}, {})
    case.share(plain, a, b)
    case.daemon_dies(plain, b)


def stores_by_layer(case):
    plain, a, b = case.start(PLAIN, {}, {})
    case.share(plain, a, b)
    case.notes.append(f"{case.dumps():.0f} dumps")
    if case.dumps() < 3 * 2:
        raise Failed(f"{case.dumps():.0f} dumps: not by layer")


def drafts(case):
    plain, a, b = case.start({**PLAIN, "speculative_config": None}, {}, {})
    case.share(plain, a, b)
    for e in (a, b):
        said = case.ask(e, prompt(70, 1000), 40)["drafted"]
        case.notes.append(f"{said.get('accepted', 0):.0f} of {said.get('draft', 0):.0f} drafted accepted")


# ---- two GPUs ----


def gathers(case):
    """Ranks with the same bytes load a half each. Without the gather, each rank loads all."""
    plain, a, b = case.start(PLAIN, {}, {"settings": {"gather_loads": True}})
    for e in (a, b):
        e.free = case.ask(e, TINY, 1)["free"]
    p = prompt(60, 3000)  # none of share()'s
    want = [case.ask(plain, p)]
    case.same(case.ask(a, p), want, "cold")
    case.stored(a)
    size = case.metrics()["dump_bytes"]
    case.hit(b, p, want, "gathered")
    gathered = case.metrics()["load_bytes"]
    case.same(case.ask(a, p, reset=True), want, "not gathered")
    both = case.metrics()["load_bytes"] - gathered
    case.notes.append(f"stored {size}, loaded {gathered} gathered and {both} not")
    if gathered > 1.05 * size or both < 1.9 * size:
        raise Failed(f"bytes: stored {size}, loaded {gathered} gathered and {both} not")
    case.share(plain, a, b)


def by_heads(case):
    """Engines of two ranks and of one share by groups of heads, both ways."""
    plain, two, one = case.start(PLAIN, dict(TWO_RANKS), {})
    for e in (two, one):
        e.free = case.ask(e, TINY, 1)["free"]
    for i, (stores, loads) in enumerate(((two, one), (one, two))):
        p = prompt(30 + i, 3000)
        want = [case.ask(plain, p)]
        case.same(case.ask(stores, p), want, "cold")
        case.stored(stores)
        case.hit(loads, p, want, ("two to one", "one to two")[i])


def stages(case):
    plain, a, b = case.start(PLAIN, dict(STAGES), dict(STAGES))
    case.share(plain, a, b)


ALIGN = {"mamba_cache_mode": "align"}
STATES = {"least": 0.3, **ALIGN}
#: of one GPU: name: (what runs, arguments of Case). Those that wait the longest for kernels to be compiled come first.
ONE = {
    "qwen3next": (shares, {"model": "qwen3next", "additional_config": {"gdn_prefill_backend": "triton"}, **STATES}),
    "nemotron-h": (shares, {"model": "nemotron", **STATES}),
    "jamba": (shares, {"model": "jamba", **STATES}),
    # It attends 2,048 tokens. vLLM itself chooses others from run to run, so there are only few
    # more.
    "indexer": (shares, {"model": "indexer", "max_model_len": 4096, "prompts": (2100, 2048), "shared": (2080, 1472)}),
    "deepseek": (shares, {"model": "deepseek"}),
    "gemma3": (shares, {"model": "gemma3"}),
    "gemma3-odd": (shares, {"model": "gemma3-odd"}),
    "gpt-oss": (shares, {"model": "gptoss"}),
    "layer_stores": (stores_by_layer, {"settings": {"layer_stores": 512}}),
    "head_groups": (shares, {"settings": {"head_groups": 2}}),
    "fp8_per_token_head": (shares, {"kv_cache_dtype": "fp8_per_token_head"}),
    "fp8": (shares, {"kv_cache_dtype": "fp8", "near": 0.5}),  # E4M3 without scales, of what this model has
    "draft-model": (drafts, {"speculative_config": {"method": "draft_model", "model": "MODELS/llama", "num_speculative_tokens": 3},
                             "disable_log_stats": False}),
    "eagle": (drafts, {"speculative_config": {"method": "eagle", "model": "MODELS/eagle", "num_speculative_tokens": 3},
                       "disable_log_stats": False}),
}
TWO = {
    "gather": (gathers, {"model": "deepseek", **TWO_RANKS}),
    "head_groups-1-2": (by_heads, {"settings": {"head_groups": 2}}),
    "pipeline": (stages, {}),
}
CASES = {**ONE, **TWO}


def make_models(directory):
    subprocess.run([real.PYTHON, os.path.join(os.path.dirname(real.ENGINE), "gpu_engine.py"), "--model", os.path.join(directory, "llama")], check=True,
                   timeout=real.WAIT_S)
    subprocess.run([real.PYTHON, real.ENGINE, "gpu", directory], check=True, stderr=subprocess.DEVNULL, timeout=real.WAIT_S)


def run(name, two, models, logs, rows, running):
    what, options = CASES[name]
    options = json.loads(json.dumps(options).replace("MODELS/", models + "/"))
    began, case, outcome = time.monotonic(), None, "ok"
    try:
        gpus = str(sorted(ONE).index(name) % 2) if name in ONE and two else "0,1" if two else "0"
        case = Case(name, models, logs, gpus, **options)
        running[name] = case
        what(case)
    except Failed as error:
        outcome = f"FAILED: {error}"
    except Exception as error:  # pylint: disable=broad-except
        outcome = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    if case is not None:
        if outcome != "ok":
            case.keep_logs("end")
        stats = {}
        try:
            stats = case.metrics() if case.daemon.process.poll() is None else {}
        except (subprocess.SubprocessError, ValueError):
            pass
        graphs = "eager" if case.graphs is EAGER else "graphs"
        words = [graphs, f"cached {case.hits}", f"off by {case.off[True]:.3f} in the same steps ({case.like_hits} hits), {case.off[False]:.3f} in others; without a daemon by {case.noise:.3f}", f"other beginning {case.far:.2f}" if case.far is not None else "",
                 f"loaded {stats.get('load_bytes')} of {stats.get('dump_bytes')}" if stats else "", *case.notes]
        rows[name] = (outcome, time.monotonic() - began, "; ".join(filter(None, words)))
        case.close()
    else:
        rows[name] = (outcome, time.monotonic() - began, "")
    running.pop(name, None)
    print(f"{name}: {rows[name][0]} ({rows[name][1]:.0f} s) {rows[name][2]}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--logs")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("cases", nargs="*")
    of = parser.parse_args()
    of.gpus = of.gpus or len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=True, timeout=60).stdout.splitlines())
    table = {**TWO, **ONE} if of.gpus > 1 else ONE
    logs = of.logs or tempfile.mkdtemp(prefix="ucm-models.")
    os.makedirs(logs, exist_ok=True)
    rows, running, end = {}, {}, time.monotonic() + of.seconds
    with tempfile.TemporaryDirectory() as models:
        began = time.monotonic()
        make_models(models)
        print(f"models written in {time.monotonic() - began:.0f} s; vLLM {version()}", flush=True)
        names = of.cases or list(table)
        pool = concurrent.futures.ThreadPoolExecutor(of.at_once)
        waiting = [pool.submit(run, name, of.gpus > 1, models, logs, rows, running) for name in names]
        while time.monotonic() < end and not all(one.done() for one in waiting):
            concurrent.futures.wait(waiting, 1)
            if len(rows) >= 5 and all("start:" in outcome for outcome, *_ in rows.values()):
                end = 0.0  # this vLLM does not start here
        pool.shutdown(wait=False, cancel_futures=True)
        for case in list(running.values()):
            case.over = True
            case.keep_logs("late")
            for e in case.engines:
                e.process.kill()
        print(f"\n{'case':24} {'outcome':8} {'s':>4}  what")
        for name in names:
            outcome, seconds, words = rows.get(name, ("FAILED: not ended in time", 0, ""))
            print(f"{name:24} {outcome if outcome == 'ok' else 'FAILED':8} {seconds:4.0f}  {words}{'' if outcome == 'ok' else '; ' + outcome[8:]}")
        sys.stdout.flush()
        for case in list(running.values()):
            case.daemon.kill()
    failed = [name for name in names if rows.get(name, ("",))[0] != "ok"]
    if of.gpus < 2 and not of.cases:
        print(f"not run, for want of a second GPU: {', '.join(TWO)}")
    print(f"{len(failed)} of {len(names)} failed: logs are in {logs}" if failed else f"all {len(rows)} passed", flush=True)
    os._exit(1 if failed else 0)  # threads may wait for the killed process


def version():
    done = subprocess.run([real.PYTHON, "-c", "import vllm, torch; print(vllm.__version__, 'torch', torch.__version__, torch.cuda.get_device_name())"],
                          capture_output=True, text=True, cwd="/")
    return done.stdout.strip() or done.stderr[-300:]


if __name__ == "__main__":
    main()
