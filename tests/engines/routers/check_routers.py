#!/usr/bin/env python3
"""Routers read ucmevents: Dynamo's indexer (python -m dynamo.indexer) over its own ZeroMQ listener,
and vLLM's own decoder if $VLLM_PYTHON has a vLLM. Needs pyzmq, msgpack and ai-dynamo-runtime: make
check-routers."""

import json
import os
import socket
import subprocess
import sys
import unittest
import urllib.error
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "integration"))

import zmq  # noqa: E402

from second_client import DEMO, OK, TOP, Case, Daemon, OwnDaemons, Region, keys, u32  # noqa: E402

UCMEVENTS = os.environ.get("UCMEVENTS", os.path.join(TOP, "build/ucmevents"))
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
LIMIT_S = 60
#: Decodes each batch and packs it again.
DECODE = """
import sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
for line in sys.stdin:
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(bytes.fromhex(line))
    print([type(event).__name__ for event in batch.events], msgspec.msgpack.Encoder().encode(batch).hex() == line.strip())
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def tokens(*names):
    return [token for name in names for token in range(100 * name, 100 * name + 16)]


class Routers(OwnDaemons, Case):
    def setUp(self):
        super().setUp()
        self.daemon = Daemon(directory=self.directory, **{"arena.size": "64MiB", "events.memory": "16MiB"})
        self.addCleanup(self.daemon.stop)
        self.engine = self.client()
        self.ns = self.engine.open(DEMO)
        self.region = Region(self.engine, self.ns, DEMO, 16)
        self.endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]

    def spawn(self, *argv, **more):
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, **more)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def publish(self, *words):
        return self.spawn(UCMEVENTS, "publish", "--socket", self.daemon.socket, "--endpoint", self.endpoints[0], "--replay", self.endpoints[1], *words)

    def store(self, *names, parent=None):
        more = {"parent": keys(parent)} if parent is not None else {}
        self.engine.call("events.metadata", ns=self.ns, keys=keys(*names), tokens=u32(*tokens(*names)), **more)
        self.assertEqual(set(self.region.dump(names, range(len(names)))), {OK})

    # ---- Dynamo ----

    def indexer(self):
        self.port = free_port()
        self.spawn(sys.executable, "-m", "dynamo.indexer", "--port", str(self.port), stderr=subprocess.DEVNULL)
        self.until(lambda: self.post("/workers") is not None)
        self.post("/register", instance_id=7, endpoint=self.endpoints[0], replay_endpoint=self.endpoints[1], model_name="demo",
                  block_size=16, dp_rank=0)

    def post(self, path, **body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method="POST" if body else "GET",
                                         data=json.dumps(body).encode() if body else None, headers={"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return json.loads(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return None

    def matched(self, tier, *names):
        """How many of these tokens Dynamo would find at the engine, in that tier or above."""
        answer = self.post("/query", token_ids=tokens(*names), model_name="demo") or {}
        return answer.get("instances", {}).get("7", {}).get(tier, 0)

    def in_dynamo(self, *words):
        self.store(1, 2, 3)
        publisher = self.publish(*words)
        self.indexer()
        self.until(lambda: self.matched("cpu", 1, 2, 3, 4) == 48)
        self.store(4, parent=3)
        self.until(lambda: self.matched("cpu", 1, 2, 3, 4) == 64)
        self.settled(self.engine, self.ns)
        self.engine.call("evict", ns=self.ns, keys=keys(3), tier=1)
        self.until(lambda: (self.matched("cpu", 1, 2, 3, 4), self.matched("disk", 1, 2, 3, 4)) == (32, 48))
        self.engine.call("evict", ns=self.ns, keys=keys(2))
        self.until(lambda: self.matched("disk", 1, 2, 3, 4) == 16)
        return publisher

    def test_dynamo_knows_what_lies_where(self):
        publisher = self.in_dynamo()
        publisher.kill()
        publisher.wait()
        self.store(2, parent=1)
        self.publish()  # renumbers everything, and tells all
        self.until(lambda: self.matched("disk", 1, 2, 3, 4) >= 48)

    def test_dynamo_reads_arrays(self):
        self.in_dynamo("--format", "array")

    # ---- vLLM ----

    @unittest.skipUnless(VLLM_PYTHON, "VLLM_PYTHON names no Python that has vLLM")
    def test_vllm_decodes_and_packs_the_same_bytes(self):
        context = zmq.Context()
        self.addCleanup(context.destroy, 0)
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
        subscriber.setsockopt(zmq.RCVTIMEO, 1000 * LIMIT_S)
        self.addCleanup(subscriber.close, 0)
        subscriber.connect(self.endpoints[0])
        self.store(1, 2, 3)
        self.publish()
        batches = [b""]
        while b"BlockStored" not in batches[-1]:
            batches.append(subscriber.recv_multipart()[2])
        self.engine.call("evict", ns=self.ns, keys=keys(2))
        while b"BlockRemoved" not in batches[-1]:
            batches.append(subscriber.recv_multipart()[2])
        batches = batches[1:]
        run = subprocess.run([VLLM_PYTHON, "-c", DECODE], input="\n".join(batch.hex() for batch in batches), capture_output=True,
                             text=True, timeout=300, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        lines = [line for line in run.stdout.splitlines() if line.startswith("[")]
        self.assertEqual([line.endswith("True") for line in lines], [True] * len(batches), lines)
        self.assertTrue(any("BlockStored" in line for line in lines))


if __name__ == "__main__":
    unittest.main()
