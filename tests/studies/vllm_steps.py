#!/usr/bin/env python3
"""vllm_steps.py: what the steps of a real vLLM take while it decodes 16 requests and the KV of others comes from below the GPU.

Every sixth step comes a request of 16,000 tokens (2.1 GB of KV; at most four under way), of prompts that are stored and no longer on the
GPU. One engine of Llama-3.1-8B's shape with random weights, CUDA graphs for decode steps; a daemon for each share of the bus
(copy.beside), in turn. Beside it the same steps alone, before and after, because they grow with the contexts, and with requests whose
KV is still on the GPU.

--first-token measures something else, while nobody decodes: the time to the first token of prompts of that length, one after another, whose
KV lies in DRAM, and of the same prompts once more, whose KV then is on the GPU. What lies between is to be the bus's time and 0.5 ms.

    python3 tests/studies/vllm_steps.py [--ucmd build/ucmd] [--beside 100,85,50] [--steps 300] [--first-token 2000] [--json FILE]

Needs vLLM 0.32 with a GPU of 80 GB, ucmclient in PYTHONPATH, 24 GiB of memory, and about a minute for the engine and 12 s for a share.
"""

import argparse
import json
import os
import random
import subprocess
import tempfile
import time

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0",
                  VLLM_LOGGING_LEVEL="WARNING")
os.environ.setdefault("PYTHONHASHSEED", "0")

DECODING, LONG, PROMPTS, SHORT = 16, 16000, 7, 512
EVERY, MOST = 6, 4
PAGES = 5600  # less than the prompts take: the oldest one is never on the GPU
VOCABULARY = 128256
TOKEN_BYTES = 131072
LOAD_BYTES = LONG * TOKEN_BYTES
START_S = 60
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
         "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}


def at(values, share):
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


class Daemon:
    def __init__(self, ucmd, folder, share):
        self.socket = os.path.join(folder, "s")
        sets = [f"socket={self.socket}", "arena.size=18GiB", "device.cuda=required", f"copy.calibration={folder}", f"copy.beside={share}"]
        self.log = open(os.path.join(folder, "log"), "ab")
        self.process = subprocess.Popen([ucmd] + [word for one in sets for word in ("--set", one)], stdout=self.log, stderr=self.log)

    def stop(self):
        self.process.terminate()
        self.process.wait(START_S)
        self.log.close()


def wait(condition, what):
    end = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(what)
        time.sleep(0.05)


class Steps:
    """The engine, whose steps this process makes one by one."""

    def __init__(self, folder, socket):
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(LLAMA, file)
        transfer = KVTransferConfig(
            kv_connector="UcmConnector", kv_connector_module_path="ucmclient.engine.vllm.connector", kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": socket, "required": True, "advanced": {
                "retry_interval": 0.2, "lookup_timeout": 5.0, "connect_timeout": float(START_S)}})
        llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", gpu_memory_utilization=0.6,
                  max_model_len=20000, max_num_batched_tokens=8192, num_gpu_blocks_override=PAGES, kv_transfer_config=transfer,
                  compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                                      "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24]})
        self.engine = llm.llm_engine
        self.worker = get_kv_transfer_group()._worker
        self.scheduler = self.engine.engine_core.engine_core.scheduler.connector._scheduler
        self.draw, self.number, self.decoding = random.Random(5), 0, []
        self.prompts = [self.tokens(LONG) for _ in range(PROMPTS)]

    def tokens(self, n):
        return [self.draw.randrange(5, VOCABULARY) for _ in range(n)]

    def add(self, tokens, outputs, kind):
        from vllm import SamplingParams

        self.number += 1
        name = f"{kind}{self.number}"
        sampling = SamplingParams(temperature=0, max_tokens=outputs, detokenize=False, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def connected(self):
        return self.worker.link.region is not None and self.scheduler.link.ns is not None

    def stored(self):
        if self.engine.has_unfinished_requests():
            self.engine.step()
        self.worker.finished()
        return not self.worker._stores

    def answer(self, prompt):
        """Seconds to its first token, and of each step until then."""
        begin = last = time.perf_counter()
        name, steps, over = self.add(prompt, 1, "one"), [last], False
        while not over:
            over = any(one.finished and one.request_id == name for one in self.engine.step())
            steps.append(time.perf_counter())
        return steps[-1] - begin, [b - a for a, b in zip(steps, steps[1:])]

    def store(self, prompts):
        """With the present daemon."""
        wait(self.connected, "the engine did not connect to the daemon again")
        if self.decoding:
            self.engine.abort_request(self.decoding)
        for prompt in prompts:
            self.answer(prompt)
        wait(self.stored, "the prompts were not stored")

    def begin(self):
        """Then the others decode."""
        self.store(self.prompts)
        self.decoding = [self.add(self.tokens(SHORT), 19000, "decode") for _ in range(DECODING)]
        for _ in range(40):
            self.engine.step()

    def run(self, steps, prompts=None):
        """So many steps, each sixth with one of the prompts; the rest of these is not counted. Times in ms."""
        between, first, sent, last, n, came = [], [], {}, None, 0, 0
        begin = time.perf_counter()
        while n < steps:
            outputs, now, decoded = self.engine.step(), time.perf_counter(), False
            for one in outputs:
                decoded |= one.request_id.startswith("decode")
                if one.finished and one.request_id in sent:
                    first.append(1e3 * (now - sent.pop(one.request_id)))
                    came += 1
            if not decoded:
                continue
            if last is not None:
                between.append(1e3 * (now - last))
            last, n = now, n + 1
            if prompts and n % EVERY == 0 and len(sent) < MOST:
                sent[self.add(next(prompts), 1, "load")] = time.perf_counter()
        seconds = time.perf_counter() - begin
        while sent:
            for one in self.engine.step():
                if one.finished:
                    sent.pop(one.request_id, None)
        return {"ms": between, "first_ms": first, "came": came, "rate": came * LOAD_BYTES / seconds}


def cycle(values):
    while True:
        yield from values


def measure(steps, n):
    """The medians of before and after are the measure: contexts grow meanwhile."""
    rows = [("alone", steps.run(n // 2)), ("loads", steps.run(n, cycle(steps.prompts)))]
    steps.run(20, cycle(steps.prompts[:1]))  # brings it to the GPU
    rows.append(("hits on the GPU", steps.run(n // 2, cycle(steps.prompts[:1]))))
    rows.append(("alone again", steps.run(n // 2)))
    return rows


def first_token(steps, tokens):
    """Prompts that take more pages than there are, each asked for when it is the one that was on the GPU least recently, and at once
    again. The first two are left out: they find things cold."""
    prompts = [steps.tokens(tokens + 1) for _ in range(PAGES * 16 // tokens + 4)]  # the engine computes the last one alone
    steps.store(prompts)
    rows = [(steps.answer(prompt), steps.answer(prompt)) for prompt in prompts][2:]
    loaded, hit = ([row[i][0] * 1e3 for row in rows] for i in (0, 1))
    bus = bus_speed()
    above = [a - b - 1e3 * tokens * TOKEN_BYTES / bus for a, b in zip(loaded, hit)]
    for what, ms in (("from DRAM", loaded), ("on the GPU", hit), (f"above bus ({bus / 1e9:.1f} GB/s) and engine", above)):
        print(f"first of {tokens} tokens: {what:38} median {at(ms, 0.5):6.2f} ms  p10 {at(ms, 0.1):6.2f}  p90 {at(ms, 0.9):6.2f}", flush=True)
    for what, i in (("from DRAM", 0), ("on the GPU", 1)):
        of = sorted((row[i] for row in rows), key=lambda one: one[0])[len(rows) // 2][1]
        shown = " ".join(f"{1e3 * one:.2f}" for one in of[:2] + of[-3:])
        print(f"  {what}: {len(of)} steps of the engine, the first 2 and the last 3 of them (ms) {shown}", flush=True)
    return {"loaded_ms": loaded, "hit_ms": hit, "bus_bytes_per_second": bus, "steps": rows}


def bus_speed():
    import torch

    from engines import bus

    return bus(torch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ucmd", default="build/ucmd")
    parser.add_argument("--beside", default="100,85,50")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--first-token", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    steps, everything = None, {}
    with tempfile.TemporaryDirectory(prefix="ucm-steps-") as folder:
        for share in map(int, args.beside.split(",")):
            daemon = Daemon(args.ucmd, folder, share)
            wait(lambda: os.path.exists(daemon.socket), f"the daemon did not start: {folder}/log")
            steps = steps or Steps(folder, daemon.socket)
            if args.first_token:
                everything[f"first token {share}"] = first_token(steps, args.first_token)
                daemon.stop()
                continue
            steps.begin()
            everything[share] = dict(measure(steps, args.steps))
            alone = (at(everything[share]["alone"]["ms"], 0.5) + at(everything[share]["alone again"]["ms"], 0.5)) / 2
            for what, row in everything[share].items():
                print(f"copy.beside {share:3}: {what:16} median {at(row['ms'], 0.5):6.2f} ms ({at(row['ms'], 0.5) / alone:.2f})  "
                      f"p99 {at(row['ms'], 0.99):6.2f}  first token {at(row['first_ms'], 0.5):6.1f} ms, {row['came']} came, "
                      f"{row['rate'] / 1e9:.1f} GB/s", flush=True)
            daemon.stop()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(everything, file)
    os._exit(0)  # vLLM's threads would wait for each other


if __name__ == "__main__":
    main()
