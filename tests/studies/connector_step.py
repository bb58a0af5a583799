#!/usr/bin/env python3
"""connector_step.py: how much of a step's time the vLLM connector takes, in the scheduler and in a worker, by how many requests run.

A real daemon and both halves of the connector, without vLLM and without a GPU: the scheduler's outputs are made here, of requests
of one shared prompt that decode, a token each step. Hooks are called as vLLM calls them in a step. A lookup, which vLLM asks for
when a request comes, is measured by itself.

    python3 tests/studies/connector_step.py [--running 16,64,256] [--tokens 16000] [--steps 320] [--profile]

Prints a line for each number of requests: medians and p99s in us. The aim is 100 us for both halves at 256 requests.
"""

import argparse
import cProfile
import hashlib
import os
import pstats
import sys
import time
from types import SimpleNamespace

sys.path[:0] = [os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "integration")]

os.environ.setdefault("PYTHONHASHSEED", "0")  # the connector wants one; nothing here depends on it

import vllm_case  # noqa: E402  sets the paths of the others
from engine import BLOCK, Engine  # noqa: E402
from ucmclient.engine.vllm.connector import UcmConnector  # noqa: E402

AIM_US = 100
PAUSE_S = 0.003  # between steps, in which stores end as they do beside a model
LAYERS = [f"layers.{i}" for i in range(32)]  # a step calls hooks of each
SHARED = 4096  # the region's blocks; more requests' blocks than that lie in the same ones


class Request:
    """As much of vLLM's as the connector reads."""

    def __init__(self, name, shared, tokens):
        self.request_id, self.block_hashes, self.num_tokens = name, list(shared), tokens
        self.num_computed_tokens, self.num_preemptions = tokens - 1, 0
        self.kv_transfer_params = self.lora_request = None
        self.all_token_ids = [1] * tokens

    def append(self):
        self.num_tokens += 1
        self.all_token_ids.append(1)
        if self.num_tokens // BLOCK > len(self.block_hashes):
            self.block_hashes.append(hashlib.sha256(f"{self.request_id}/{self.num_tokens}".encode()).digest())


class Steps:
    """Steps of an engine with so many requests; the first computes the prompt that all share."""

    def __init__(self, daemon, running, tokens):
        self.engine = Engine(vllm_case.MODEL, UcmConnector, blocks=SHARED, socket=daemon.socket, lookup_timeout=5.0)
        self.scheduler, self.worker = self.engine.connector, self.engine.ranks[0].connector
        shared = [hashlib.sha256(b"%d" % i).digest() for i in range(tokens // BLOCK)]
        # No two reach the end of a block in one step where that can be helped.
        self.requests = [Request(f"{running}/{i}", shared, tokens + 1 + i % BLOCK) for i in range(running)]
        self.next_block, self.times = 1, {"scheduler": [], "worker": [], "lookup": []}
        self._begin(self.requests[:1], 0)
        while self.worker._worker._stores:  # the prompt is stored
            self._step(self._output())
        self._begin(self.requests[1:], tokens)

    def _block(self):
        self.next_block = self.next_block % (SHARED - 1) + 1
        return self.next_block

    def _output(self):
        return SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens={}, preempted_req_ids=set(), has_sync_kv_loads=False,
                               finished_req_ids=set(),
                               scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[],
                                                                     num_computed_tokens=[]))

    def _begin(self, requests, computed):
        """One step of new requests, the first `computed` tokens of which the engine itself has."""
        out = self._output()
        for request in requests:
            begin = time.perf_counter_ns()
            self.scheduler.get_num_new_matched_tokens(request, computed)
            self.times["lookup"].append(time.perf_counter_ns() - begin)
            blocks = [self._block() for _ in range(-(-request.num_tokens // BLOCK))]
            self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda b=blocks: (b,)), 0)
            out.scheduled_new_reqs.append(SimpleNamespace(req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=computed))
            out.num_scheduled_tokens[request.request_id] = request.num_tokens - 1 - computed
        self._step(out)

    def decode(self):
        out, cached = self._output(), self._output().scheduled_cached_reqs
        for request in self.requests:
            cached.req_ids.append(request.request_id)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.new_block_ids.append(([self._block()],) if request.num_computed_tokens % BLOCK == 0 else None)
            out.num_scheduled_tokens[request.request_id] = 1
        out.scheduled_cached_reqs = cached
        self._step(out)
        for request in self.requests:
            request.num_computed_tokens += 1
            request.append()

    def _step(self, out):
        begin = time.perf_counter_ns()
        meta = self.scheduler.build_connector_meta(out)
        planned = time.perf_counter_ns()
        done = self._work(meta, out)
        worked = time.perf_counter_ns()
        self.scheduler.update_connector_output(done)
        self.times["scheduler"].append(planned - begin + time.perf_counter_ns() - worked)
        self.times["worker"].append(worked - planned)

    def _work(self, meta, out):
        worker = self.worker
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        for layer in LAYERS:
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, None, None)
        worker.wait_for_save()
        sent, received = worker.get_finished(out.finished_req_ids)
        done = SimpleNamespace(finished_sending=sent, finished_recving=received,
                               invalid_block_ids=worker.get_block_ids_with_load_errors(),
                               kv_connector_worker_meta=worker.build_connector_worker_meta())
        worker.clear_connector_metadata()
        return done


def at(times, share):
    return sorted(times)[int(share * (len(times) - 1))] / 1e3


def measure(daemon, running, args):
    steps = Steps(daemon, running, args.tokens)
    try:
        lookup = steps.times["lookup"][1:] or steps.times["lookup"]
        for _ in range(BLOCK):
            steps.decode()
        steps.times.update(scheduler=[], worker=[])
        profile = cProfile.Profile() if args.profile else None
        if profile:
            profile.enable()
        for _ in range(args.steps):
            steps.decode()
            time.sleep(PAUSE_S)
        if profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        scheduler, worker = steps.times["scheduler"], steps.times["worker"]
        both = [a + b for a, b in zip(scheduler, worker)]
        row = [f"{at(of, share):9.1f}" for of in (scheduler, worker, both, lookup) for share in (0.5, 0.99)]
        print(f"{running:8} " + " ".join(row), flush=True)
    finally:
        steps.engine.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--running", default="16,64,256")
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    daemon = vllm_case.daemon(**{"arena.size": "512MiB"})
    try:
        print(f"us; {args.tokens} tokens each; the aim is {AIM_US} for both\n" + " " * 8 + "".join(
            f" {name:>9} {'p99':>9}" for name in ("scheduler", "worker", "both", "lookup")))
        for running in map(int, args.running.split(",")):
            measure(daemon, running, args)
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
