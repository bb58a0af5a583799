#!/usr/bin/python3
"""Mappings through the client library: other threads read while slots are reused, and while the daemon is killed."""

import faulthandler
import threading
import time
import unittest

import numpy as np

import client_paths  # noqa: F401  sets the paths of the others
from retrieval_case import IDENTITY, LAYERS, SHAPE, SUITE_TIMEOUT_S
from second_client import OwnDaemons, keys
from mapping_case import PART, SLOTS, Case
from daemon import Daemon, until
from ucmclient import Client as Library, Identity, Plane, SharedMemory, UcmError, sparse


class Worker:
    """The client library over a daemon: blocks whose bytes are all their number, and a mapping."""

    def __init__(self, case, daemon, blocks):
        self.blocks = blocks
        self.client = Library(socket=daemon.socket, name="mapping")
        case.addCleanup(self.client.close)
        self.ns = self.client.namespace(Identity(case.id(), "f16", "test/1", IDENTITY["block_tokens"], IDENTITY["layer_bytes"],
                                                 layers=(LAYERS,)))
        shared = SharedMemory(PART * blocks)
        pages = np.frombuffer(shared.buffer, np.uint8).reshape(blocks, PART)
        pages[:] = (np.arange(blocks) % 251)[:, None]
        planes = [Plane(0, layer * IDENTITY["layer_bytes"], PART, IDENTITY["layer_bytes"], layer) for layer in range(LAYERS)]
        self.names = keys(*range(blocks), size=32)
        with self.ns.register([shared.memory()], planes, blocks=blocks) as region:
            region.dump(self.names, range(blocks), durable=True).wait()
        shape = sparse.Shape("float16", SHAPE["kv_heads"] and IDENTITY["block_tokens"], SHAPE["kv_heads"], SHAPE["head_dim"])
        self.summaries = sparse.SummaryNamespace(self.ns, sparse.mean(shape))
        self.sequence = self.summaries.sequence(self.names)
        self.mapping = self.ns.mapping()

    def check(self, place, block):
        """True: the block was read; False: a miss. Never other bytes."""
        data = self.mapping.read(place)
        if data is None:
            return False
        assert data == bytes([block % 251]) * PART, f"wrong bytes for block {block}"
        return True


class ByLibrary(OwnDaemons, Case):
    def start(self, **more):
        self.daemon = Daemon(directory=self.directory, **dict(self.options, **more))
        self.addCleanup(self.daemon.stop)
        return self.daemon

    def test_slots_are_reused_while_others_read(self):
        worker = Worker(self, self.start(**{"mapping.size": "1MiB"}), 4 * SLOTS)
        known, stop, counts, failed = {}, threading.Event(), [0, 0], []

        def reader():
            try:
                while not stop.is_set():
                    for block, place in list(known.items()):
                        counts[worker.check(place, block)] += 1
            except BaseException as error:  # pylint: disable=broad-except
                failed.append(error)

        threads = [threading.Thread(target=reader) for _ in range(2)]
        for thread in threads:
            thread.start()
        begun, rounds = time.monotonic(), 0
        while time.monotonic() < begun + 1 or (counts[0] < 100 and time.monotonic() < begun + 30):
            first = rounds * 7 % (3 * SLOTS)
            referenced = worker.mapping.ref(worker.sequence, first, SLOTS)
            for block, place in enumerate(referenced, first):
                if place is not None:
                    known[block] = place
                    self.assertTrue(worker.check(place, block), "what is referenced is there")
            worker.mapping.unref(worker.sequence)
            rounds += 1
        stop.set()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        self.assertGreater(counts[1], 0)
        self.assertGreater(counts[0], 0, "no slot was reused")

    def test_the_daemon_is_killed_while_others_read(self):
        worker = Worker(self, self.start(), 2 * SLOTS)
        referenced = worker.mapping.ref(worker.sequence)
        self.assertEqual(referenced.placed, 2 * SLOTS)
        stop, counts, failed = threading.Event(), [0, 0], []

        def reader():
            try:
                while not stop.is_set():
                    for block, place in enumerate(referenced):
                        counts[worker.check(place, block)] += 1
            except BaseException as error:  # pylint: disable=broad-except
                failed.append(error)

        thread = threading.Thread(target=reader)
        thread.start()
        self.daemon.kill()
        self.start()

        def ref():
            """Lost blocks of the sequence are reported once; then all is as before."""
            try:
                return worker.mapping.ref(worker.sequence)
            except UcmError as error:
                self.assertTrue(error.away, error)
                return None
        again = until(ref, "a reference")
        stop.set()
        thread.join()
        self.assertEqual(failed, [])
        self.assertEqual([worker.check(place, block) for block, place in enumerate(referenced)], [False] * 2 * SLOTS)
        self.assertEqual([worker.check(place, block) for block, place in enumerate(again)], [True] * len(again))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SUITE_TIMEOUT_S, exit=True)
    unittest.main(verbosity=1)
