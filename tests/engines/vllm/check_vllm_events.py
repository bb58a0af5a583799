#!/usr/bin/env python3
"""vLLM's own publisher of KV events with the setting `events`: what it says of blocks in ucmd, and
of its own blocks. In the Python that has vLLM, with a real engine and a real daemon; `make
check-vllm`."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1",
                  HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", KMP_BLOCKTIME="0")

import msgspec  # noqa: E402
import zmq  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402
from vllm.distributed.kv_events import BlockStored, KVEventBatch  # noqa: E402

from daemon import Daemon  # noqa: E402

LIMIT_S = 60


class Events(unittest.TestCase):
    def test_both_tell_of_the_same_blocks(self):
        daemon = Daemon(**{"arena.size": "64MiB", "events.memory": "64MiB"})
        self.addCleanup(daemon.stop)
        with tempfile.TemporaryDirectory(prefix="events.") as directory, socket.socket() as free:
            subprocess.run([sys.executable, os.path.join(HERE, "vllm_engine.py"), "models", directory + "/model", directory + "/wild"], check=True, cwd="/")
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
            free.close()
            self.subscribe()
            engine = self.start(directory + "/model", daemon.socket)
        self.addCleanup(engine.llm_engine.engine_core.shutdown)
        sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
        prompts = [[(7 * i + j) % 500 for j in range(700)] for i in range(3)]
        own, ours, deadline = {}, {}, time.monotonic() + LIMIT_S
        while not own or set(own) != set(ours):
            self.assertLess(time.monotonic(), deadline, f"{len(own)} blocks on the engine, {len(ours)} in ucmd")
            engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
            self.read(own, ours)
        for key, (tokens, parent) in own.items():
            self.assertEqual(ours[key], (tokens, parent))

    def start(self, model, path):
        return LLM(
            model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=4096,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{self.port}"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="UcmConnector", kv_connector_module_path="ucmclient.engine.vllm.connector", kv_role="kv_both",
                kv_connector_extra_config={"socket": path, "advanced": {"lookup_timeout": 2.0, "events": True}},
            ),
        )

    def subscribe(self):
        context = zmq.Context()
        self.addCleanup(context.destroy, 0)
        self.socket = context.socket(zmq.SUB)
        self.addCleanup(self.socket.close, 0)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.RCVTIMEO, 500)
        self.socket.connect(f"tcp://127.0.0.1:{self.port}")

    def read(self, own, ours):
        """Tokens and parent of each block: on the engine, and in ucmd."""
        try:
            while True:
                batch = msgspec.msgpack.Decoder(KVEventBatch).decode(self.socket.recv_multipart()[2])
                for event in batch.events:
                    if isinstance(event, BlockStored) and event.token_ids:
                        self.take(own if event.medium == "GPU" else ours, event)
        except zmq.Again:
            pass

    @staticmethod
    def take(into, event):
        parent = event.parent_block_hash
        for i, key in enumerate(event.block_hashes):
            into[key] = event.token_ids[i * event.block_size : (i + 1) * event.block_size], parent
            parent = key


if __name__ == "__main__":
    unittest.main()
