"""What the tests of the vLLM connector share: a real daemon, and the small paged engine of
tests/engines/vllm. The engine's outputs are compared with those without a cache."""

import contextlib
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import vllm_paths  # sets the paths of the others

import numpy

import engine
import model
from engine import BLOCK, Engine, Request
from daemon import Daemon, until
from ucmclient.engine.vllm.connector import UcmConnector
from ucmclient.engine.weights import before_reading

SUITE_TIMEOUT_S = 280
MODEL = model.Model()
EXPECTED = {}
GPU = "UCM_VLLM_GPU" in os.environ  # KV in a GPU's memory, through CUDA IPC


def prompt(seed, tokens, shared=0):
    """The first `shared` tokens are the same for all seeds."""
    head, tail = random.Random(0), random.Random(seed + 1)
    return [head.randrange(model.VOCABULARY) for _ in range(shared)] + [
        tail.randrange(model.VOCABULARY) for _ in range(tokens - shared)]


class Alone(Engine):
    """Computes a prompt in one step, without any cache."""

    def _logits(self, work):
        request = work[0][0]
        logits = [self.model.logits(hidden) for _, _, hidden in work[request.asked:]]
        return {request.request_id: logits}


def logits_after(tokens, first, dtype="float32"):
    """Of each token from the first-th on."""
    known, logits = EXPECTED.get((key := (tuple(tokens[:first]), dtype)), ((), ()))
    if known[: len(tokens)] != tuple(tokens):
        blocks, request = len(tokens) // BLOCK + 2, Request("alone", tokens)
        alone = Alone(MODEL, dtype=dtype, budget=len(tokens), blocks=blocks)
        request.asked = first - 1
        alone.add(request)
        logits = alone.execute(alone.schedule())[1]["alone"]
        EXPECTED[key] = tuple(tokens), logits
    return logits[: len(tokens) - first + 1]


def expected(tokens, outputs, dtype="float32"):
    """Logits of each output without any cache."""
    key = (tuple(tokens), outputs, dtype)
    if key not in EXPECTED:
        alone = Engine(MODEL, dtype=dtype)
        alone.add(Request("alone", tokens, outputs))
        EXPECTED[key] = run(alone)["alone"].logits
    return EXPECTED[key]


@contextlib.contextmanager
def wild(heads=range(model.KV_HEADS)):
    """A model in which channels of these heads' V differ widely in size. They have so many
    exponents that "lossless" does not fit them."""
    changed = model.Model()
    for layer in changed.layers:
        for head in heads:
            v = layer["v"][head * model.HEAD : (head + 1) * model.HEAD]
            v *= (2.0 ** -(3.0 * numpy.arange(model.HEAD))).astype(numpy.float32)[:, None]
    with mock.patch.object(sys.modules[__name__], "MODEL", changed), mock.patch.dict(EXPECTED, clear=True):
        yield


def run(e, *requests, between=lambda e: None, limit=30.0):
    """Steps until every request is over. Returns all requests, by name."""
    for r in requests:
        e.add(r)
    everything, end = dict(e.requests), time.monotonic() + limit
    while e.requests:
        assert time.monotonic() < end, f"not over: {[(r.request_id, r.status) for r in e.requests.values()]}"
        e.step()
        between(e)
        if not e.running:
            time.sleep(0.001)
    return everything


def daemon(**more):
    return Daemon(**{"arena.size": "64MiB", "device.cuda": "required" if GPU else "off", **more})


class Case(unittest.TestCase):
    DTYPE = "float32"  # of KV

    def setUp(self):
        self.daemon = daemon()
        self.addCleanup(self.stop)

    def stop(self):
        if self.daemon is not None:
            self.assertEqual(self.daemon.stop(), 0)

    def engine(self, **more):
        more = {"gpu": GPU, "dtype": self.DTYPE, "socket": self.daemon.socket, "retry_interval": 0.05, "lookup_timeout": 2.0,
                "shared_wait": 60.0, **more}
        e = Engine(MODEL, UcmConnector, **more)
        self.addCleanup(e.close)
        return e

    def adapter(self, text="weights", number=1, directory=None, path=None):
        """A LoRA adapter whose files nobody has touched for as long as a file system's clock takes to tick."""
        if directory is None:
            directory = tempfile.mkdtemp()
            self.addCleanup(shutil.rmtree, directory)
        with open(os.path.join(directory, "adapter_model.safetensors"), "w", encoding="ascii") as file:
            file.write(text)
        self.eventually(lambda: before_reading(directory, ("",)).settled)
        return SimpleNamespace(lora_name="l", lora_int_id=number, lora_path=path or directory)

    def same(self, requests, but=()):
        for r in requests.values():
            if r.request_id not in but:
                # Each token is the best by its logits. So the first output that differs has other
                # logits than here.
                want = logits_after(r.tokens[:-1], r.prompt_tokens, self.DTYPE)
                self.assertEqual(len(r.logits), r.outputs)
                for i, (a, b) in enumerate(zip(r.logits, want)):
                    self.assertTrue(numpy.array_equal(a, b), f"{r.request_id}, output {i}")

    def check(self, e, *requests, but=(), **more):
        """Checks that the requests' outputs are right, and that no block is left over."""
        self.same(run(e, *requests, **more), but)
        self.assertTrue(e.pool.idle(), "blocks were never given back")

    def handed_on(self, a, b, tokens, loaded, **more):
        """What one engine stores another one loads."""
        self.check(a, Request("cold", tokens, **more))
        self.assertEqual(a.loaded_tokens, 0)
        self.check(b, Request("warm", tokens, **more))
        self.assertEqual(b.loaded_tokens, loaded)
        return a, b

    def all_stats(self):
        return self.daemon.stats()

    def stats(self):
        return self.daemon.metrics()

    eventually = staticmethod(until)

    def restart(self, **more):
        socket = self.daemon.socket  # in the directory of the daemon that is killed
        self.addCleanup(shutil.rmtree, self.daemon.directory, ignore_errors=True)
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.daemon = daemon(socket=socket, nvme=False, **more)

    def connected(self, e):
        workers = [rank.connector._worker for rank in e.ranks]
        links = [half.link for worker in workers for half in getattr(worker, "kinds", [worker])]
        self.eventually(lambda: e.connector._scheduler.link.ns is not None and all(link.region is not None for link in links))

    def one_load_fails(self, e, rank, tokens):
        """The engine computes what this rank does not get, and stores it."""
        e.pool = engine.Pool(e.blocks)
        with mock.patch.object(e.ranks[rank].connector._worker, "_begin_load", lambda copy: None):
            self.check(e, Request("failed", tokens))
        self.assertGreater(e.recomputed, 0)
        self.check(e, Request("later", tokens))

    def loads(self, e, tokens):
        before = e.loaded_tokens
        e.pool = engine.Pool(e.blocks)
        self.check(e, Request(f"probe{before}.{time.monotonic()}", tokens))
        return e.loaded_tokens > before


def finish(e, request):
    """Steps until it is over; the workers' reports of what they stored may come later."""
    e.add(request)
    while request.status != "finished":
        e.step()


def give_up():
    sys.stderr.write("the suite hangs\n")
    os._exit(99)


def watch():
    """Before unittest's main: ends a suite that hangs."""
    os.environ.setdefault("PYTHONHASHSEED", "0")
    watchdog = threading.Timer(SUITE_TIMEOUT_S, give_up)
    watchdog.daemon = True
    watchdog.start()
